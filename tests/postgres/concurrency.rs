//! Many at once: processes, batches in any order, locks of others, weeks that come and go, a pool of one.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::postgres::{PgHarness, Random, ask, child, ledger, pool, role, run, settings, until};
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{
    Claim, Claims, Mode, OnDead, Operations, OrderPolicy, Outcome, Settle, SweepSettings, Week,
};
use hapax::testing::{Harness as _, kit};
use hapax::{Guard, Scope, Time};
use sqlx::AssertSqlSafe;

const PROCESSES: usize = 10;
const IDS: usize = 10_000;

/// A child: claims every id, batch by batch in an order of its own, and writes down what it won.
async fn claimer(name: &str, schema: &str) {
    let ledger = PgLedger::with_pool(pool(2).await, settings(schema)).await.unwrap();
    let mut random = Random::new();
    let mut ids: Vec<usize> = (0..IDS).collect();
    random.shuffle(&mut ids);
    for batch in ids.chunks(250) {
        let claims: Vec<Claim> =
            batch.iter().map(|n| kit::claim(&format!("event-{n}"), kit::lease())).collect();
        let outcomes = ledger.claim(&claims).await.expect("ten at once are not a reason to fail");
        let won: Vec<i32> = batch
            .iter()
            .zip(outcomes)
            .filter(|(_, outcome)| outcome.as_ref().expect("a valid claim").is_claimed())
            .map(|(n, _)| *n as i32)
            .collect();
        sqlx::query(AssertSqlSafe(format!("insert into {schema}.winner select $1, unnest($2::int[])")))
            .bind(name)
            .bind(&won)
            .execute(ledger.pool())
            .await
            .unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_processes_claim_the_same_ids_and_each_has_one_winner() {
    const NAME: &str = "ten_processes_claim_the_same_ids_and_each_has_one_winner";
    if let Some((name, schema)) = role() {
        return claimer(&name, &schema).await;
    }
    let ledger = ledger(2).await;
    let schema = ledger.schema();
    run(ledger.pool(), format!("create table {schema}.winner (who text, id int)")).await;
    let began = Instant::now();
    let mut random = Random::new();
    let spawn = |n: usize| {
        let mut command = child(NAME, &format!("claimer-{n}"), schema);
        command.env("HAPAX_TEST_SEED", random.number().to_string()).spawn().unwrap()
    };
    let children: Vec<_> = (0..PROCESSES).map(spawn).collect();
    for mut child in children {
        assert!(child.wait().await.unwrap().success(), "a claimer failed");
    }
    let count = async |what: &str| {
        ask::<i64>(ledger.pool(), format!("select count({what}) from {schema}.winner")).await
    };
    let (wins, ids, winners) = (count("*").await, count("distinct id").await, count("distinct who").await);
    println!(
        "{PROCESSES} processes, {IDS} ids: {ids} won, {} twice, by {winners} processes, in {:?}",
        wins - ids,
        began.elapsed()
    );
    assert_eq!((wins, ids), (IDS as i64, IDS as i64), "each id has exactly one winner");
}

/// Claims go on, v7 ids of this week, while an old week of the ledger is dropped and made again, over and over.
#[tokio::test(flavor = "multi_thread")]
async fn t37_claims_go_on_while_a_week_is_dropped() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let stop = Arc::new(AtomicBool::new(false));
    let (claimed, worst) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let workers: Vec<_> = (0..4)
        .map(|_| {
            let (ledger, stop, claimed, worst) =
                (ledger.clone(), stop.clone(), claimed.clone(), worst.clone());
            tokio::spawn(async move {
                while !stop.load(Ordering::SeqCst) {
                    // Of the ledger's present, so that each claim is routed through the table that is being altered.
                    let now = ledger.now().await.unwrap();
                    let claims: Vec<Claim> = (0..20).map(|_| fresh_v7(now)).collect();
                    let began = Instant::now();
                    for outcome in ledger.claim(&claims).await.expect("a drop stops nobody") {
                        assert!(outcome.unwrap().is_claimed());
                    }
                    worst.fetch_max(began.elapsed().as_millis() as u64, Ordering::SeqCst);
                    claimed.fetch_add(20, Ordering::SeqCst);
                }
            })
        })
        .collect();
    let mut dropped = 0;
    for round in 0..6 {
        let now = ledger.now().await.unwrap();
        let scope = Scope::new(format!("round-{round}")).unwrap();
        // A scope younger than the last drop, so that the week is made again.
        let old: Vec<Claim> = (0..200)
            .map(|_| {
                let mut claim = fresh_v7(now.minus(21 * kit::DAY));
                claim.identity.scope = scope.clone();
                claim.mode = Mode::Done;
                claim
            })
            .collect();
        for outcome in ledger.claim(&old).await.unwrap() {
            assert!(outcome.unwrap().is_claimed());
        }
        for _ in 0..3 {
            harness.advance(2 * kit::DAY).await;
            dropped += kit::sweep(&ledger, 7 * kit::DAY).await.weeks.len();
        }
        harness.advance(2 * kit::DAY).await;
        let before = claimed.load(Ordering::SeqCst);
        let swept = kit::sweep(&ledger, 7 * kit::DAY).await;
        assert!(!swept.weeks.is_empty(), "round {round}: {swept:?}");
        dropped += swept.weeks.len();
        assert_eq!(ledger.claim(&old[..1]).await.unwrap().remove(0).unwrap().name(), "too_old");
        until("claims went on", async || claimed.load(Ordering::SeqCst) > before).await;
    }
    stop.store(true, Ordering::SeqCst);
    for worker in workers {
        worker.await.expect("no claim failed");
    }
    println!(
        "{dropped} weeks dropped beside {} claims; the slowest batch of 20 took {} ms",
        claimed.load(Ordering::SeqCst),
        worst.load(Ordering::SeqCst)
    );
}

fn fresh_v7(at: Time) -> Claim {
    let mut bytes = [0; 10];
    bytes.copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..10]);
    let millis = u64::try_from(at.as_micros() / 1000).unwrap();
    let id = uuid::Builder::from_unix_timestamp_millis(millis, &bytes).into_uuid();
    kit::claim(&id.to_string(), kit::lease())
}

#[tokio::test(flavor = "multi_thread")]
async fn t13_a_pool_of_one_never_deadlocks() {
    let all = async {
        let ledger = ledger(1).await;
        let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
        let sweeper = guard.spawn_sweeper();
        let now = ledger.now().await.unwrap();
        let tasks: Vec<_> = (0..40).map(|n| tokio::spawn(one_of_all(guard.clone(), now, n))).collect();
        for task in tasks {
            task.await.unwrap();
        }
        for _ in 0..3 {
            guard.sweep().await.unwrap();
        }
        sweeper.stop().await;
        let done: i64 = ask(
            ledger.pool(),
            format!("select count(*) from {}.entries where state = 'done'", ledger.schema()),
        )
        .await;
        println!("a pool of one: {done} events done");
        assert_eq!(done, 40 * 2);
    };
    tokio::time::timeout(Duration::from_secs(120), all).await.expect("nobody waits for himself");
}

/// Own-transaction and same-transaction work of one task: a new scope, a week that is not there yet.
async fn one_of_all(guard: Guard<PgLedger>, now: Time, n: u64) {
    let guard = guard.in_scope(Scope::new(format!("scope-{n}")).unwrap());
    let Outcome::First(lease) = guard.lease(format!("leased-{n}")).await.unwrap() else { panic!("a first") };
    lease.done().await.unwrap();
    // Ids of as many weeks as there are tasks, and a scope that nobody has registered.
    let id = fresh_v7(now.minus(Duration::from_secs(n * 604_800))).identity.id;
    let fresh = guard.in_scope(Scope::new(format!("fresh-{n}")).unwrap());
    loop {
        let mut tx = guard.ledger().pool().begin().await.unwrap();
        match fresh.try_claim_in(&mut tx, &id).await {
            Ok(outcome) => {
                assert!(outcome.is_claimed(), "{}", outcome.name());
                tx.commit().await.unwrap();
                return;
            }
            Err(error) => {
                assert!(error.is_retryable(), "{error:?}");
                tx.rollback().await.unwrap();
                tokio::task::yield_now().await;
            }
        }
    }
}

/// One id is one identity, whatever time a delivery claims for it.
#[tokio::test(flavor = "multi_thread")]
async fn two_claims_of_one_id_on_either_side_of_monday_meet() {
    let ledger = ledger(8).await;
    let sunday = Time::parse("2026-03-01T23:30:00Z").unwrap();
    let monday = Time::parse("2026-03-02T00:30:00Z").unwrap();
    let mut rounds = 0;
    for times in [[Some(sunday), Some(monday)], [None, Some(monday)], [Some(sunday), None]] {
        for n in 0..20 {
            // Half of them carry a time of their own, on the Monday's side.
            let id = if n % 2 == 0 { kit::v4() } else { kit::v7_at(monday, n) };
            let race = times.map(|time| {
                let mut claim = kit::claim(&id.to_string(), Mode::Done);
                claim.identity.scope = Scope::new(format!("race-{}", rounds % 60)).unwrap();
                claim.time = time;
                let ledger = ledger.clone();
                tokio::spawn(async move { kit::one(&ledger, &claim).await.is_claimed() })
            });
            let mut firsts = 0;
            for racer in race {
                firsts += usize::from(racer.await.unwrap());
            }
            assert_eq!(firsts, 1, "{id} with {times:?}");
            rounds += 1;
        }
    }
    println!("{rounds} races, one winner each");
}

#[tokio::test(flavor = "multi_thread")]
async fn t19_a_lease_granted_after_a_lock_wait_has_its_full_length() {
    let ledger = ledger(4).await;
    let schema = ledger.schema().to_owned();
    let mut granted = 0;
    for n in 0..100 {
        let claim = kit::claim(&format!("waited-{n}"), kit::lease());
        // It may run again at once, and someone has a lock on it.
        let grant = kit::first(&ledger, &claim).await;
        kit::settled(&ledger, &claim, &grant, kit::retry(Duration::ZERO)).await;
        let mut tx = ledger.pool().begin().await.unwrap();
        sqlx::query(AssertSqlSafe(format!("select from {schema}.entry where token = $1 for update")))
            .bind(grant.token.0)
            .execute(&mut *tx)
            .await
            .unwrap();
        let waiting = tokio::spawn({
            let (ledger, again) = (ledger.clone(), kit::another(&claim));
            async move { kit::one(&ledger, &again).await }
        });
        let waits = format!(
            "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and query like '%{schema}.claim_batch%' \
             and pid <> pg_backend_pid()"
        );
        until("the claim waits, or has waited too long", async || {
            waiting.is_finished() || ask::<i64>(ledger.pool(), waits.clone()).await > 0
        })
        .await;
        let released = ledger.now().await.unwrap();
        tx.rollback().await.unwrap();
        // Had it waited a tenth of a second it would be told `busy`, which is also fine, and shows nothing here.
        if let Outcome::First(grant) = waiting.await.unwrap() {
            assert!(grant.until >= released.plus(kit::LEASE), "{} began before {released}", grant.until);
            granted += 1;
        }
        if granted == 10 {
            break;
        }
    }
    println!("{granted} leases granted after a lock wait, all of full length");
    assert!(granted > 0, "no claim was granted after a wait");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_that_meets_a_held_id_answers_all_others() {
    let ledger = ledger(4).await;
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await; // the scope is known
    let held = kit::claim("event-77", Mode::Done);
    let mut tx = ledger.pool().begin().await.unwrap();
    assert!(
        ledger.claim_in(&mut tx, std::slice::from_ref(&held)).await.unwrap().remove(0).unwrap().is_claimed()
    );
    let claims: Vec<Claim> = (0..200).map(|n| kit::claim(&format!("event-{n}"), kit::lease())).collect();
    let began = Instant::now();
    let outcomes = ledger.claim(&claims).await.unwrap();
    let took = began.elapsed();
    let mut names: HashMap<&str, usize> = HashMap::new();
    for (n, outcome) in outcomes.iter().enumerate() {
        let outcome = outcome.as_ref().unwrap();
        *names.entry(outcome.name()).or_default() += 1;
        assert_eq!(outcome.name(), if n == 77 { "busy" } else { "claimed" }, "event-{n}");
    }
    println!("a batch of 200 beside an open transaction: {names:?} in {took:?}");
    // The transaction is still open: nobody waited for its end.
    tx.commit().await.unwrap();
    kit::expect(&ledger, &claims[77], "duplicate").await;
}

/// Batches that overlap in every way, in any order: the database never sees a deadlock that a caller would see.
#[tokio::test(flavor = "multi_thread")]
async fn shuffled_overlapping_batches_finish_without_error() {
    let ledger = ledger(10).await;
    let mut random = Random::new();
    let began = Instant::now();
    let tasks: Vec<_> =
        (0..8).map(|n| tokio::spawn(busy_batches(ledger.clone(), random.fork(), n % 2 == 0))).collect();
    let (mut claimed, mut settled) = (0, 0);
    for task in tasks {
        let (c, s) = task.await.expect("no batch failed");
        claimed += c;
        settled += s;
    }
    let deadlocks: i64 =
        ask(ledger.pool(), "select deadlocks from pg_stat_database where datname = current_database()").await;
    println!(
        "{claimed} claims granted, {settled} settled, in {:?}; this database has seen {deadlocks} deadlocks so far",
        began.elapsed()
    );
    assert_eq!(claimed, settled);
}

async fn busy_batches(ledger: PgLedger, mut random: Random, ordered: bool) -> (usize, usize) {
    let (mut claimed, mut settled) = (0, 0);
    for round in 0..25 {
        let mut numbers: Vec<usize> = (0..120).collect();
        random.shuffle(&mut numbers);
        let claims: Vec<Claim> = numbers[..80].iter().map(|n| one_claim(*n, round / 2, ordered)).collect();
        let outcomes = ledger.claim(&claims).await.expect("overlapping claims are not an error");
        let mut settles: Vec<Settle> = Vec::new();
        for (claim, outcome) in claims.iter().zip(outcomes) {
            if let Outcome::First(grant) = outcome.expect("a valid claim") {
                settles.push(kit::settling(claim, &grant, kit::done()));
            }
        }
        claimed += settles.len();
        random.shuffle(&mut settles);
        for answer in ledger.settle(&settles).await.expect("overlapping settles are not an error") {
            assert!(!kit::is_fenced(answer.expect("a valid settle")));
            settled += 1;
        }
    }
    (claimed, settled)
}

fn one_claim(n: usize, round: usize, ordered: bool) -> Claim {
    if ordered {
        let (aggregate, seq) = (n % 12, round * 10 + n / 12 + 1);
        let mut claim = kit::ordered(
            &format!("o-{aggregate}-{seq}"),
            kit::lease(),
            seq as u64,
            OrderPolicy::Latest,
            OnDead::Park,
        );
        if let Some(order) = &mut claim.order {
            order.aggregate = hapax::Aggregate::new(format!("order-{aggregate}")).unwrap();
        }
        claim
    } else {
        kit::claim(&format!("u-{round}-{n}"), kit::lease())
    }
}

/// A sweep of two at once drops each week once, and nobody is told an error.
#[tokio::test(flavor = "multi_thread")]
async fn two_sweepers_at_once_do_the_work_of_one() {
    let harness = PgHarness::new().await;
    let ledger = kit::open(&harness).await;
    let now = ledger.now().await.unwrap();
    let mut weeks: Vec<Week> = Vec::new();
    for n in 0..5 {
        let claim = fresh_v7(now.minus(n * 7 * kit::DAY));
        weeks.push(kit::run(&ledger, &claim).await.week);
    }
    harness.advance(60 * kit::DAY).await;
    let settings = SweepSettings { retention: 7 * kit::DAY, batch_max: 1000, dry_run: false };
    let sweepers = [(); 4].map(|()| {
        let ledger = ledger.clone();
        tokio::spawn(async move { ledger.sweep(settings).await.expect("a sweep beside another").weeks })
    });
    let mut dropped = Vec::new();
    for sweeper in sweepers {
        dropped.extend(sweeper.await.unwrap().into_iter().map(|(week, _)| week));
    }
    dropped.extend(kit::sweep(&ledger, 7 * kit::DAY).await.weeks.into_iter().map(|(week, _)| week));
    dropped.sort();
    weeks.sort();
    println!("4 sweepers dropped {dropped:?}");
    assert_eq!(dropped, weeks);
}
