//! What only PostgreSQL has: statements that began before a week was closed, and commit afterwards.

use std::time::Duration;

use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claims as _, Mode, Settled, SweepSettings, Verdict};
use hapax::testing::{Harness as _, kit};
use sqlx::AssertSqlSafe;

use crate::support::postgres::{PgHarness, Scratch, ask, pool_to, until};

const RETENTION: Duration = Duration::from_secs(7 * 86_400);
/// One step of a sweep.
async fn step(ledger: &PgLedger) {
    let settings = SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false };
    ledger.sweep_part(settings, 1).await.unwrap();
}

/// A transaction that saw its week closed ends an at-most-once claim, and commits when the sweep has moved everything else.
/// The sweep has to look again before it drops the week: else the end would be gone, and its repeat would be "too old".
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_commits_late_outlives_its_week() {
    // A database of its own: a drop waits for all transactions of its database.
    let scratch = Scratch::new().await;
    let harness = PgHarness::on(pool_to(&scratch.url(), 8).await).await;
    let (s, pool) = (harness.schema.clone(), harness.pool.clone());
    let ledger = kit::open(&harness).await;
    let now = ledger.now().await.unwrap();
    let once = kit::claim(&kit::v7_at(now, 21).to_string(), Mode::Once { track: None });
    let grant = kit::first(&ledger, &once).await;
    harness.advance(30 * kit::DAY).await;
    let is = async |what: String| {
        ask::<bool>(&pool, format!("select exists (select from {s}.dropped where {what})")).await
    };
    let until_phase = async |phase: &str| {
        until("the drop is that far", async || {
            step(&ledger).await;
            is(format!("phase = '{phase}'")).await
        })
        .await;
    };
    let beside = || {
        let ledger = ledger.clone();
        tokio::spawn(async move { step(&ledger).await })
    };
    until_phase("closed").await;
    // While somebody reads, the sweep waits with its list of transactions: the late one is not on it.
    let mut reader = pool.begin().await.unwrap();
    sqlx::raw_sql("set transaction isolation level repeatable read").execute(&mut *reader).await.unwrap();
    sqlx::query(AssertSqlSafe(format!("select from {s}.entry"))).execute(&mut *reader).await.unwrap();
    let sweeping = beside();
    until("the sweep waits for the reader", async || {
        is("phase = 'closed' and waits is not null".into()).await
    })
    .await;
    let mut late = pool.begin().await.unwrap();
    let settles = [kit::settling(&once, &grant, Verdict::Finished { metadata: None })];
    let settled = ledger.settle_in(&mut late, &settles).await.unwrap().remove(0).unwrap();
    assert!(matches!(settled, Settled::Ok { .. }), "{settled:?}");
    reader.rollback().await.unwrap();
    sweeping.await.unwrap();
    until_phase("moved").await;
    let sweeping = beside();
    until("the sweep waits for the late one", async || {
        is("phase = 'moved' and waits is not null".into()).await
    })
    .await;
    late.commit().await.unwrap();
    sweeping.await.unwrap();
    until("the sweep has looked again", async || {
        let is_on = !is("phase = 'moved'".into()).await;
        if !is_on {
            step(&ledger).await;
        }
        is_on
    })
    .await;
    assert!(is("phase = 'moving'".into()).await, "a drop of what came late");
    until_phase("empty").await;
    kit::expect(&ledger, &kit::another(&once), "duplicate").await;
    pool.close().await;
    scratch.drop_it().await;
}
