//! More corners of the PostgreSQL ledger: scopes under registration, limits, SQL functions.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::postgres as support;
use std::time::Duration;

use crate::support::postgres::{ask, ledger, run};
use hapax::ledger::TransactionalLedger;
use hapax::ledger::{Baseline, Claims, FailureSettings, Mode, Operations, SweepSettings};
use hapax::testing::kit;
use hapax::{EventId, Scope};
use sqlx::AssertSqlSafe;

/// A scope that is being registered by somebody's open transaction is not the neighbours' trouble.
#[tokio::test]
async fn c8_a_scope_that_is_being_registered_fails_only_its_own_claims() {
    let ledger = ledger(8).await;
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    let mut fresh = kit::claim("a", Mode::Done);
    fresh.identity.scope = Scope::new("fresh").unwrap();
    let mut tx = ledger.pool().begin().await.unwrap();
    assert!(
        ledger.claim_in(&mut tx, std::slice::from_ref(&fresh)).await.unwrap().remove(0).unwrap().is_claimed()
    );
    let mut other = kit::another(&fresh);
    other.identity.id = EventId::new("b").unwrap();
    let answers = ledger.claim(&[other, kit::claim("c", Mode::Done)]).await;
    tx.rollback().await.unwrap();
    assert!(answers.as_ref().is_ok_and(|all| all[1].is_ok()), "{answers:.200?}");
}

#[tokio::test]
async fn ids_have_one_key_in_rust_and_sql() {
    let ledger = ledger(2).await;
    let s = ledger.schema().to_owned();
    for id in [
        "0190A1B2-C3D4-7000-8000-000000000001",
        "0190a1b2-c3d4-7000-8000-000000000001",
        "sixteen-bytes-ab",
        "üüüüüüüü",
        "a\n",
        "0190a1b2c3d470008000000000000001",
        "{0190a1b2-c3d4-7000-8000-000000000001}",
    ] {
        let key: Vec<u8> = sqlx::query_scalar(AssertSqlSafe(format!("select {s}.id_key($1)")))
            .bind(id)
            .fetch_one(ledger.pool())
            .await
            .unwrap();
        assert_eq!(key, EventId::new(id).unwrap().key().to_vec(), "{id}");
    }
}

#[tokio::test]
async fn a_sql_id_of_unicode_blanks_is_blank() {
    let ledger = ledger(2).await;
    let s = ledger.schema().to_owned();
    for id in ["\u{3000}", "\u{a0}", "\u{2003}"] {
        assert!(EventId::new(id).is_err());
        let key: sqlx::Result<Vec<u8>> = sqlx::query_scalar(AssertSqlSafe(format!("select {s}.id_key($1)")))
            .bind(id)
            .fetch_one(ledger.pool())
            .await;
        assert!(key.is_err(), "{id:?}");
    }
}

#[tokio::test]
async fn failures_beyond_a_smallint_are_counted_or_dead() {
    let ledger = ledger(2).await;
    let settings = |attempts_max| {
        Mode::Failed(FailureSettings {
            attempts_max,
            backoff_base: Duration::ZERO,
            backoff_max: Duration::ZERO,
            jitter_permille: 1,
        })
    };
    kit::one(&ledger, &kit::claim("e", settings(100_000))).await.name();
    run(ledger.pool(), format!("update {}.entry set attempts = 32767", ledger.schema())).await;
    let outcome = kit::try_one(&ledger, &kit::claim("e", settings(32_768))).await;
    assert!(outcome.as_ref().is_ok_and(|o| o.name() == "dead"), "{outcome:?}");
}

#[tokio::test]
async fn a_baseline_beyond_i64_is_invalid() {
    let ledger = ledger(2).await;
    let outcome = kit::try_one(&ledger, &kit::strict_from(Baseline::From(u64::MAX), 5)).await;
    assert!(outcome.is_err(), "{outcome:?}");
}

#[tokio::test]
async fn a_sweep_with_batches_of_none_ends() {
    let ledger = ledger(2).await;
    kit::first(&ledger, &kit::claim("e", Mode::Done)).await;
    let settings = SweepSettings { retention: Duration::from_secs(1), batch_max: 0, dry_run: false };
    assert!(tokio::time::timeout(Duration::from_mins(1), ledger.sweep(settings)).await.is_ok());
}

/// A SQL caller that meets an id held by an open transaction.
#[tokio::test]
async fn a_sql_claim_of_a_busy_id_does_not_abort_the_transaction() {
    let ledger = ledger(4).await;
    let s = ledger.schema().to_owned();
    let _: String = ask(ledger.pool(), format!("select outcome from {s}.claim_in('s', 'warm')")).await;
    let mut one = ledger.pool().begin().await.unwrap();
    let mut two = ledger.pool().begin().await.unwrap();
    let sql = format!("select outcome from {s}.claim_in('s', 'e')");
    let a: String = sqlx::query_scalar(AssertSqlSafe(sql.clone())).fetch_one(&mut *one).await.unwrap();
    let b: sqlx::Result<String> = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut *two).await;
    println!("{a} {b:?}");
    assert_eq!(b.unwrap(), "busy");
}

/// A transaction that stands still is ended by the server, and from 17 on also one that keeps it busy: what it claimed is free.
#[tokio::test]
async fn t20_a_transaction_past_its_time_is_ended_by_the_server() {
    let ledger = ledger(8).await;
    let limited =
        ask::<i32>(ledger.pool(), "select current_setting('server_version_num')::int").await >= 170_000;
    // The scope is registered: whoever registers it too would wait for the first transaction.
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    let time_max = Duration::from_secs(10); // longer than a busy machine stands still
    for (id, busy) in [("idle", false), ("busy", true)] {
        let claim = kit::claim(id, Mode::Done);
        let mut tx = TransactionalLedger::begin(&ledger, time_max, time_max * 3).await.unwrap();
        let claimed = TransactionalLedger::claim_in(&ledger, &mut tx, std::slice::from_ref(&claim)).await;
        assert!(claimed.unwrap().remove(0).unwrap().is_claimed());
        let began = std::time::Instant::now();
        if busy && !limited {
            // An older server lets it go on for as long as it is heard of.
            while began.elapsed() < time_max * 2 {
                sqlx::query("select pg_sleep(0.05)").execute(&mut *tx).await.unwrap();
            }
            TransactionalLedger::commit(&ledger, tx).await.unwrap().unwrap();
            continue;
        }
        if busy {
            let error = loop {
                if let Err(error) = sqlx::query("select pg_sleep(0.05)").execute(&mut *tx).await {
                    break error;
                }
                assert!(began.elapsed() < Duration::from_mins(2), "it goes on and on");
            };
            println!("after {:?}: {error}", began.elapsed());
            assert!(
                ledger.is_doubt(&error) && ledger.is_lost(&mut tx).await,
                "no failure of a handler: {error:?}"
            );
        }
        // Whoever comes next waits for the server, not for the one that stands still.
        support::until("the id is free", async || {
            let answers = ledger.claim(&[kit::another(&claim)]).await;
            answers.is_ok_and(|mut answers| answers.remove(0).is_ok_and(|outcome| outcome.is_claimed()))
        })
        .await;
        assert!(TransactionalLedger::commit(&ledger, tx).await.is_err(), "{id}: it was ended");
    }
}

/// SQLSTATEs that somebody's trigger may refuse a row with: the default, codes of its own, and the server's, some of which mean
/// something else when the server raises them.
const REFUSALS: [&str; 9] = ["P0001", "HX042", "45000", "22023", "23514", "23505", "42501", "0A000", "55000"];

/// A trigger that refuses rows in which a condition holds.
async fn refuse(pool: &sqlx::PgPool, table: &str, when: &str, code: &str) {
    run(
        pool,
        format!(
            "create or replace function {table}_refuse() returns trigger language plpgsql as \
             $$ begin if {when} then raise exception 'not this one' using errcode = '{code}'; end if; \
             return new; end $$; \
             create or replace trigger refuse before insert on {table} \
             for each row execute function {table}_refuse()"
        ),
    )
    .await;
}

/// A row that the server refuses (here by somebody's trigger) is its own trouble, whatever code it is refused with.
#[tokio::test]
async fn c8_a_row_that_a_trigger_refuses_fails_alone() {
    let ledger = ledger(4).await;
    let s = ledger.schema().to_owned();
    kit::run(&ledger, &kit::claim("warm", kit::lease())).await;
    for code in REFUSALS {
        let bad = format!("{code}-7");
        refuse(ledger.pool(), &format!("{s}.entry"), &format!("new.id = convert_to('{bad}', 'UTF8')"), code)
            .await;
        let claims: Vec<_> = (0..20).map(|n| kit::claim(&format!("{code}-{n}"), kit::lease())).collect();
        let outcomes = ledger.claim(&claims).await;
        for (n, outcome) in outcomes.unwrap_or_else(|e| panic!("{code}: {e:?}")).into_iter().enumerate() {
            match outcome {
                Ok(outcome) => assert!(n != 7 && outcome.is_claimed(), "{code}-{n}: {outcome:?}"),
                Err(error) => {
                    assert_eq!(n, 7, "{code}: {error:?}");
                    assert!(error.chain().contains("not this one"), "{}", error.chain());
                    if ["P0001", "HX042", "45000", "22023"].contains(&code) {
                        assert!(!error.is_retryable(), "{code}: trying again is of no use: {error:?}");
                    }
                }
            }
        }
    }
}

/// The same of appends: those of other callers in the same statement go on.
#[tokio::test(flavor = "multi_thread")]
async fn t121_an_append_that_a_trigger_refuses_fails_alone() {
    use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};
    use hapax::journal::{Append, Appender, Expected, Journal as _};
    let pool = support::pool(6).await;
    let mut settings = PgJournalSettings::default();
    settings.schema = support::fresh_schema();
    settings.pooling = Pooling::Session;
    let table = format!("{}.journal", settings.schema);
    let journal = std::sync::Arc::new(PgJournal::with_pool(pool.clone(), settings).await.unwrap());
    let append = |id: String| {
        let event = hapax::Event::new(EventId::new(&id).unwrap()).payload(id.clone());
        Append::new(hapax::Aggregate::new(id).unwrap(), Expected::New, [event])
    };
    for code in REFUSALS {
        let bad = format!("{code}-7");
        refuse(&pool, &table, &format!("new.payload = convert_to('{bad}', 'UTF8')"), code).await;
        let appends: Vec<_> = (0..20).map(|n| append(format!("{code}-{n}"))).collect();
        let answers = journal.append_many(&appends).await.unwrap();
        for (n, answer) in answers.into_iter().enumerate() {
            match answer {
                Ok(appended) => assert!(n != 7 && appended.last_seq() == 1, "{code}-{n}"),
                Err(error) => {
                    assert!(n == 7 && error.chain().contains("not this one"), "{code}-{n}: {error:?}");
                }
            }
        }
        // And of callers that do not know of each other.
        let appender = Appender::new(journal.clone());
        let refused = |n: u32| if n == 7 { bad.clone() } else { format!("{code}-single-{n}") };
        let single: Vec<_> = (0..20).map(|n| tokio::spawn(appender.append(append(refused(n))))).collect();
        for (n, one) in single.into_iter().enumerate() {
            assert_eq!(one.await.unwrap().is_ok(), n != 7, "{code}: append {n}");
        }
    }
}
