//! Corners of the PostgreSQL ledger: locks of others, sweeps under open transactions, hostile values.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::postgres as support;
use std::time::Duration;

use crate::support::postgres::{PgHarness, ask, ledger};
use hapax::guard::ProcessingResult;
use hapax::ledger::{Claim, Claims, Extend, Mode, Outcome, Settings};
use hapax::testing::{Harness as _, kit};
use hapax::{Event, EventId, Guard, Scope};
use sqlx::AssertSqlSafe;

const DAY: Duration = Duration::from_secs(86_400);

/// A same-transaction claim that is told Busy keeps the row locked; one locked row stops every heartbeat of the process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_locked_row_does_not_cost_others_their_lease() {
    let ledger = ledger(8).await;
    let guard = Guard::builder(ledger.clone())
        .scope("s")
        .lease(Duration::from_secs(10), Duration::from_millis(1500))
        .build()
        .unwrap();
    let Outcome::First(mut a) = guard.lease("a").await.unwrap() else { panic!() };
    let Outcome::First(mut b) = guard.lease("b").await.unwrap() else { panic!() };
    let mut tx = ledger.pool().begin().await.unwrap();
    let busy = guard.try_claim_in(&mut tx, "a").await.unwrap();
    assert_eq!(busy.name(), "busy");
    // The caller of that transaction goes on with other work.
    let work = || tokio::time::sleep(Duration::from_secs(15));
    let (_a, b) = tokio::join!(a.run(work()), b.run(work()));
    tx.rollback().await.unwrap();
    assert!(b.is_ok(), "b lost its lease because a's row was locked: {b:?}");
}

#[tokio::test]
async fn c8_one_locked_row_fails_only_its_own_settling() {
    let ledger = ledger(8).await;
    let (a, b) = (kit::claim("a", kit::lease()), kit::claim("b", kit::lease()));
    let (ga, gb) = (kit::first(&ledger, &a).await, kit::first(&ledger, &b).await);
    let mut tx = ledger.pool().begin().await.unwrap();
    let busy = ledger.claim_in(&mut tx, &[kit::claim("a", Mode::Done)]).await.unwrap().remove(0).unwrap();
    assert_eq!(busy.name(), "busy");
    let settles = [kit::settling(&a, &ga, kit::done()), kit::settling(&b, &gb, kit::done())];
    let answer = ledger.settle(&settles).await;
    tx.rollback().await.unwrap();
    assert!(answer.as_ref().is_ok_and(|all| all[1].is_ok()), "{answer:?}");
}

#[tokio::test]
async fn c8_one_locked_row_fails_only_its_own_extension() {
    let ledger = ledger(8).await;
    let (a, b) = (kit::claim("a", kit::lease()), kit::claim("b", kit::lease()));
    let (ga, gb) = (kit::first(&ledger, &a).await, kit::first(&ledger, &b).await);
    let mut tx = ledger.pool().begin().await.unwrap();
    let _ = ledger.claim_in(&mut tx, &[kit::claim("a", Mode::Done)]).await.unwrap().remove(0).unwrap();
    let ext = |c: &Claim, g: &hapax::ledger::Grant| Extend {
        identity: c.identity.clone(),
        week: g.week,
        token: g.token,
        lease: DAY,
    };
    let answer = ledger.extend(&[ext(&a, &ga), ext(&b, &gb)]).await;
    tx.rollback().await.unwrap();
    assert!(answer.is_ok(), "{answer:?}");
}

/// A new scope replays old events while a sweep drops their week.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c10_an_id_done_while_its_week_is_dropped_is_never_first_again() {
    let harness = PgHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    let mut old = kit::claim("x", Mode::Done);
    old.identity.id = kit::v7_at(ledger.now().await.unwrap(), 1);
    kit::first(&ledger, &old).await;
    harness.advance(DAY * 40).await;

    let mut mine = kit::another(&old);
    mine.identity.scope = Scope::new("replay").unwrap();
    let mut tx = ledger.pool().begin().await.unwrap();
    let outcome = ledger.claim_in(&mut tx, std::slice::from_ref(&mine)).await.unwrap().remove(0).unwrap();
    assert_eq!(outcome.name(), "claimed");
    harness.advance(Duration::from_secs(1)).await;
    let sweeping = tokio::spawn({
        let ledger = ledger.clone();
        async move { kit::sweep(&ledger, DAY * 7).await }
    });
    support::until("the sweep waits", async || {
        let s = &harness.schema;
        ask(ledger.pool(), format!("select exists (select from {s}.dropped where waits <> '{{}}')")).await
    })
    .await;
    tx.commit().await.unwrap(); // the effect took place
    println!("{:?}", sweeping.await.unwrap());
    let again = kit::one(&ledger, &kit::another(&mine)).await;
    assert!(!again.is_claimed(), "took effect twice: {again:?}");
}

/// A sweep that waits for somebody's open transaction does not keep a new week from being made.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiting_sweep_does_not_stop_new_weeks() {
    let harness = PgHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    let mut old = kit::claim("x", Mode::Done);
    old.identity.id = kit::v7_at(ledger.now().await.unwrap(), 1);
    kit::first(&ledger, &old).await;
    harness.advance(DAY * 40).await;
    // Somebody's transaction: a timeless id, nothing to do with any week.
    let mut tx = ledger.pool().begin().await.unwrap();
    let _ = ledger.claim_in(&mut tx, &[kit::claim("y", Mode::Done)]).await.unwrap();
    let sweeping = tokio::spawn({
        let ledger = ledger.clone();
        async move { kit::sweep(&ledger, DAY * 7).await }
    });
    support::until("the sweep waits", async || {
        let s = &harness.schema;
        ask(ledger.pool(), format!("select exists (select from {s}.dropped where waits <> '{{}}')")).await
    })
    .await;
    let mut new = kit::claim("z", Mode::Done);
    new.identity.id = kit::v7_at(ledger.now().await.unwrap(), 2);
    let started = std::time::Instant::now();
    let outcome = kit::try_one(&ledger, &new).await;
    println!("{:?} after {:?}", outcome, started.elapsed());
    tx.commit().await.unwrap();
    let _ = sweeping.await;
    assert!(outcome.is_ok(), "{outcome:?}");
}

/// Header names come from the wire.
#[tokio::test]
async fn an_event_with_a_nul_in_a_header_name_dies_like_any_other() {
    let ledger = ledger(4).await;
    let guard = Guard::builder(ledger.clone()).scope("s").attempts_max(1).build().unwrap();
    let mut event = Event::new(EventId::new("e").unwrap());
    event.headers = [("a\0b", &b"v"[..])].into_iter().collect();
    let result = guard.process_if_new(&event, || async { Err::<(), _>("no") }).await.unwrap();
    assert_eq!(result, ProcessingResult::Failed("no".into()));
    let again = guard.process_if_new(&event, || async { Err::<(), _>("no") }).await.unwrap();
    assert_eq!(again, ProcessingResult::Dead);
}

/// Trap 10 by way of SQL: one id, once with and once without its time.
#[tokio::test]
async fn t10_sql_claims_of_one_id_with_and_without_time_are_one() {
    let ledger = ledger(4).await;
    let s = ledger.schema().to_owned();
    ask::<bool>(ledger.pool(), format!("select {s}.make_week({s}.week_of({s}.us(now())), 28, 260)")).await;
    let one: String = ask(ledger.pool(), format!("select outcome from {s}.claim_in('s', 'e')")).await;
    let two: String =
        ask(ledger.pool(), format!("select outcome from {s}.claim_in('s', 'e', p_event_time => now())"))
            .await;
    assert_eq!((one.as_str(), two.as_str()), ("claimed", "duplicate"));
}

#[tokio::test]
async fn a_blank_tenant_is_refused_by_the_sql_lease() {
    let ledger = ledger(4).await;
    let s = ledger.schema().to_owned();
    let sql = format!("select outcome from {s}.lease('s', 'e', p_tenant => '')");
    let answer: sqlx::Result<String> = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(ledger.pool()).await;
    assert!(answer.is_err(), "{answer:?}");
}

/// Two processes that disagree about what an identity is.
#[tokio::test]
async fn a_ledger_refuses_another_identity_rule() {
    let harness = PgHarness::new().await;
    let _one = harness.open(Settings::default()).await;
    let mut other = Settings::default();
    other.identity = hapax::ledger::IdentityRule::IdAndTime;
    let mut all = support::settings(&harness.schema);
    all.ledger = other;
    let opened = hapax::backend::postgres::PgLedger::with_pool(harness.pool.clone(), all).await;
    assert!(opened.is_err());
}
