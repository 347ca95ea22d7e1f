//! A week on its way out: whoever works on it meanwhile, however long their transaction lasts, sees one truth.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/postgres.rs"]
mod support;

use std::time::{Duration, Instant};

use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Ledger as _, Mode, SweepTerms, Swept};
use hapax::testing::{Harness as _, kit};
use sqlx::{AssertSqlSafe, PgPool};
use support::{PgHarness, ask, pool, run, until};
use tokio::task::JoinHandle;

const RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// A ledger with an old week: what is in it was last touched 30 days ago.
struct Stage {
    harness: PgHarness,
    ledger: PgLedger,
    /// Leased 30 days ago, and lapsed.
    leased: Claim,
    grant: hapax::ledger::Grant,
    /// Its retry is due.
    due: Claim,
    done: Claim,
    /// Never claimed.
    never: Claim,
}

impl Stage {
    async fn new() -> Self {
        let harness = PgHarness::new().await;
        let ledger = kit::open(&harness).await;
        let now = ledger.now().await.unwrap();
        let claim = |n| kit::claim(&kit::v7_at(now, n).to_string(), kit::lease());
        let (leased, due, done, never) = (claim(1), claim(2), claim(3), claim(4));
        kit::run(&ledger, &done).await;
        let grant = kit::first(&ledger, &leased).await;
        let other = kit::first(&ledger, &due).await;
        kit::settled(&ledger, &due, &other, kit::retry(Duration::from_secs(1))).await;
        harness.advance(30 * kit::DAY).await;
        Stage { harness, ledger, leased, grant, due, done, never }
    }

    fn sweep_beside(&self) -> JoinHandle<hapax::Result<Swept>> {
        let ledger = self.ledger.clone();
        tokio::spawn(async move {
            ledger.sweep(SweepTerms { retention: RETENTION, batch_max: 1000, dry_run: false }).await
        })
    }

    async fn is_under_way(&self) -> bool {
        let s = &self.harness.schema;
        ask(&self.harness.pool, format!("select exists (select from {s}.dropped)")).await
    }

    /// Whether the week is gone.
    async fn is_gone(&self) -> bool {
        let s = &self.harness.schema;
        let tables = format!(
            "select count(*) = 1 from pg_class where relname like 'entry\\__%' and relkind = 'r' \
             and relnamespace = '{s}'::regnamespace"
        );
        ask(&self.harness.pool, tables).await
    }

    /// Sweeps until the week is gone.
    async fn finish(&self) {
        until("the week is gone", async || {
            kit::sweep(&self.ledger, RETENTION).await;
            self.is_gone().await
        })
        .await;
    }
}

/// T claims a due retry in a transaction that stays open while the week is swept: nobody else may have it.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_claim_in_an_open_transaction_is_not_granted_again_by_a_sweep() {
    let stage = Stage::new().await;
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let mine = Claim { mode: Mode::Done, ..kit::another(&stage.due) };
    let outcome = stage.ledger.claim_in(&mut tx, std::slice::from_ref(&mine)).await.unwrap().remove(0).unwrap();
    assert!(outcome.is_claimed());
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    let rival = kit::open(&stage.harness).await;
    let end = Instant::now() + Duration::from_secs(2);
    while Instant::now() < end {
        let theirs = kit::one(&rival, &kit::another(&stage.due)).await;
        assert_eq!(theirs.name(), "busy", "a rival got it beside an open transaction: {theirs:?}");
        let theirs = kit::one(&rival, &kit::another(&stage.leased)).await;
        assert!(["claimed", "busy"].contains(&theirs.name()), "{theirs:?}"); // lapsed: whoever is first has it
    }
    tx.commit().await.unwrap();
    sweeping.await.unwrap().unwrap();
    assert!(stage.ledger.was_committed(&mine).await.unwrap(), "it was, and is asked where it is");
    stage.finish().await;
    kit::expect(&stage.ledger, &kit::another(&stage.due), "duplicate").await;
    kit::expect(&stage.ledger, &kit::another(&stage.done), "too_old").await;
    kit::expect(&stage.ledger, &kit::another(&stage.leased), "busy").await;
}

/// A lease that is committed while the sweep is under way is the only one.
#[tokio::test(flavor = "multi_thread")]
async fn t63_a_lease_taken_during_a_sweep_is_the_only_one() {
    let stage = Stage::new().await;
    let reader = reader(&stage.harness.pool, &stage.harness.schema).await;
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    let one = kit::another(&stage.due);
    let grant = kit::first(&stage.ledger, &one).await;
    let rival = kit::open(&stage.harness).await;
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    reader.rollback().await.unwrap();
    sweeping.await.unwrap().unwrap();
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    stage.finish().await;
    kit::expect(&rival, &kit::another(&stage.due), "busy").await;
    kit::settled(&stage.ledger, &one, &grant, kit::done()).await;
    kit::expect(&rival, &kit::another(&stage.due), "duplicate").await;
}

/// Someone whose snapshot is old: a dump, a report.
async fn reader(pool: &PgPool, s: &str) -> sqlx::PgTransaction<'static> {
    let mut tx = pool.begin().await.unwrap();
    sqlx::raw_sql("set transaction isolation level repeatable read").execute(&mut *tx).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("select from {s}.entry"))).execute(&mut *tx).await.unwrap();
    tx
}

/// The partition of the old week becomes invisible between a statement that locks a row and the one that updates it.
#[tokio::test(flavor = "multi_thread")]
async fn t64_an_update_that_reaches_no_row_is_no_success() {
    for what in ["claim", "settle"] {
        let stage = Stage::new().await;
        let s = &stage.harness.schema;
        // Whoever is called slow stops where the clock is read: between the lock and the write.
        run(
            &stage.harness.pool,
            format!(
                "create or replace function {s}.ledger_now() returns timestamptz language plpgsql volatile as $$ begin \
                   while current_setting('application_name') = 'slow {s}' and not pg_try_advisory_xact_lock_shared(hashtext('{s}')) loop \
                     perform pg_sleep(0.01); end loop; \
                   return (select at from {s}.test_clock); end $$"
            ),
        )
        .await;
        let mut gate = stage.harness.pool.begin().await.unwrap();
        sqlx::query(AssertSqlSafe(format!("select pg_advisory_xact_lock(hashtext('{s}'))")))
            .execute(&mut *gate)
            .await
            .unwrap();
        let slow = pool(1).await;
        run(&slow, format!("set application_name = 'slow {s}'")).await;
        let mine = if what == "claim" { &stage.due } else { &stage.leased };
        let (scope, id) = (mine.identity.scope.clone(), mine.identity.id.to_string());
        let sql = match what {
            "claim" => format!("select token from {s}.lease($1, $2) where outcome = 'claimed' and $3 > 0"),
            _ => format!("select $3 from {s}.settle($1, $2, $3, 'done') done where done"),
        };
        let token = stage.grant.token.0;
        let working = tokio::spawn(async move {
            sqlx::query_scalar::<_, i64>(AssertSqlSafe(sql))
                .bind(scope.as_str())
                .bind(id)
                .bind(token)
                .fetch_optional(&slow)
                .await
        });
        until("it has locked the row", async || {
            ask(&stage.harness.pool, format!("select exists (select from pg_stat_activity where application_name = 'slow {s}' and wait_event = 'PgSleep')")).await
        })
        .await;
        // An operator takes the partition out by hand, as no sweep would: it is invisible before the writer has ended.
        let week: String = ask(
            &stage.harness.pool,
            format!(
                "select c.relname::text from pg_inherits i join pg_class c on c.oid = i.inhrelid \
                 where i.inhparent = '{s}.entry'::regclass and c.relname <> 'entry_0' order by 1 limit 1"
            ),
        )
        .await;
        let by_hand = tokio::spawn({
            let (pool, sql) =
                (pool(1).await, format!("alter table {s}.entry detach partition {s}.{week} concurrently"));
            async move { run(&pool, sql).await }
        });
        until("the partition is invisible", async || {
            ask(&stage.harness.pool, format!("select exists (select from pg_inherits where inhparent = '{s}.entry'::regclass and inhdetachpending)")).await
        })
        .await;
        gate.rollback().await.unwrap();
        let answer = working.await.unwrap();
        by_hand.await.unwrap();
        println!("{what}: {answer:?}");
        // Whoever is told that it is theirs, or done, finds it so in the tables.
        if let Ok(Some(token)) = answer {
            let state = if what == "claim" { "L" } else { "D" };
            let found: bool = ask(
                &stage.harness.pool,
                format!(
                    "select exists (select from {s}.{week} where id = {s}.id_key('{id}') and token = {token} and state = '{state}')",
                    id = mine.identity.id
                ),
            )
            .await;
            assert!(found, "{what} was answered with success, and nothing is stored");
        }
    }
}

/// What is settled while its week is on the way out is answered as a duplicate for as long as the retention says.
#[tokio::test(flavor = "multi_thread")]
async fn t65_what_was_settled_during_a_sweep_is_remembered() {
    let stage = Stage::new().await;
    let reader = reader(&stage.harness.pool, &stage.harness.schema).await;
    let sweeping = stage.sweep_beside();
    until("the sweep is under way", async || stage.is_under_way().await).await;
    tokio::time::sleep(Duration::from_millis(300)).await; // as far as it comes while the reader is there
    kit::settled(&stage.ledger, &stage.leased, &stage.grant, kit::done()).await;
    let due = kit::another(&stage.due);
    kit::run(&stage.ledger, &due).await;
    reader.rollback().await.unwrap();
    sweeping.await.unwrap().unwrap();
    stage.finish().await;
    for mine in [&stage.leased, &stage.due] {
        kit::expect(&stage.ledger, &kit::another(mine), "duplicate").await;
    }
    kit::expect(&stage.ledger, &kit::another(&stage.done), "too_old").await;
    kit::expect(&stage.ledger, &stage.never, "too_old").await;
    // And is forgotten when its own time has come.
    stage.harness.advance(8 * kit::DAY).await;
    kit::sweep(&stage.ledger, RETENTION).await;
    kit::expect(&stage.ledger, &kit::another(&stage.leased), "too_old").await;
}
