//! Seals: a week is counted ahead of its drop, and whoever writes to it after that is noticed.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/postgres.rs"]
mod support;

use std::time::Duration;

use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Ledger as _, Mode, Outcome, Settings, State, Week};
use hapax::testing::{Harness as _, kit};
use sqlx::AssertSqlSafe;
use support::{PgHarness, ask, run, until, until_waiting};

const RETENTION: Duration = Duration::from_secs(7 * 86_400);
/// Of a sweep that drops nothing.
const LONG: Duration = Duration::from_secs(3650 * 86_400);

struct Stage {
    harness: PgHarness,
    ledger: PgLedger,
    week: i16,
}

impl Stage {
    async fn new() -> Self {
        let harness = PgHarness::new().await;
        let ledger = harness.open(Settings::default()).await;
        let week = Week::of(ledger.now().await.unwrap()).number();
        Stage { harness, ledger, week }
    }

    /// Claims on ids of the week, whatever time it is.
    async fn claims<const N: usize>(&self) -> [Claim; N] {
        let now = self.ledger.now().await.unwrap();
        std::array::from_fn(|n| kit::claim(&kit::v7_at(now, n as u8).to_string(), kit::lease()))
    }

    async fn is_sealed(&self) -> bool {
        let Stage { harness, week, .. } = self;
        let sql = format!(
            "select exists (select from {s}.sealed s where s.week = {week} and s.rows is not null and not exists \
             (select from {s}.touch t where t.week = {week} and not t.number = any (s.seen)))",
            s = harness.schema
        );
        ask(&harness.pool, sql).await
    }

    /// Other tests have transactions open on this server: until they have ended, a week cannot be counted.
    async fn seal(&self) {
        until("the week is sealed", async || {
            kit::sweep(&self.ledger, LONG).await;
            self.is_sealed().await
        })
        .await;
    }

    async fn sql(&self, sql: &str) {
        let sql = sql.replace("{s}", &self.harness.schema).replace("{week}", &self.week.to_string());
        run(&self.harness.pool, sql).await;
    }

    /// How many rows the sweep says it dropped with the week; none if the week stays.
    async fn drop_it(&self) -> Option<u64> {
        let swept = kit::sweep(&self.ledger, RETENTION).await;
        swept.weeks.iter().find(|(week, _)| week.number() == self.week).map(|(_, rows)| *rows)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sealed_week_goes_without_a_look_at_its_rows() {
    let stage = Stage::new().await;
    let [done, open, dead] = stage.claims().await;
    kit::run(&stage.ledger, &done).await;
    let grant = kit::first(&stage.ledger, &open).await;
    let other = kit::first(&stage.ledger, &dead).await;
    kit::settled(&stage.ledger, &dead, &other, kit::dead()).await;
    kit::sweep(&stage.ledger, LONG).await;
    assert!(!stage.is_sealed().await, "it is not over");
    stage.harness.advance(30 * kit::DAY).await;
    stage.seal().await;
    // Were the rows looked at, this would not be believed.
    stage.sql("update {s}.sealed set rows = 777 where week = {week}").await;
    assert_eq!(stage.drop_it().await, Some(777));
    kit::expect(&stage.ledger, &kit::another(&done), "too_old").await;
    let kept = kit::there(&stage.ledger, &open).await;
    assert_eq!((kept.state, kept.token), (State::Leased, grant.token));
    kit::expect(&stage.ledger, &kit::another(&dead), "dead").await;
    let seals: i64 = ask(
        &stage.harness.pool,
        format!("select count(*) from {}.sealed where week = {}", stage.harness.schema, stage.week),
    )
    .await;
    assert_eq!(seals, 0, "a seal goes with its week");
}

/// Someone leases an id of a week that is sealed; what becomes of the lease when the week goes.
async fn late_lease(stage: &Stage, voided: bool) -> bool {
    let [early, late] = stage.claims().await;
    kit::run(&stage.ledger, &early).await;
    stage.harness.advance(30 * kit::DAY).await;
    stage.seal().await;
    kit::first(&stage.ledger, &late).await;
    assert!(!stage.is_sealed().await, "a late touch voids the seal");
    assert_eq!(stage.drop_it().await, None, "a week in use stays");
    if !voided {
        // As if the seal had not been: what it saw is taken to be all there is.
        stage
            .sql("update {s}.sealed set rows = 1, open = 0, seen = array(select number from {s}.touch) where week = {week}")
            .await;
    }
    stage.harness.advance(30 * kit::DAY).await;
    let rows = stage.drop_it().await;
    let kept = kit::entry(&stage.ledger, &late).await.is_some();
    println!("seal voided: {voided}: {rows:?} rows dropped, the late lease is kept: {kept}");
    assert_eq!(rows, Some(if voided { 2 } else { 1 }));
    kept
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_writer_between_seal_and_drop_is_not_lost() {
    assert!(late_lease(&Stage::new().await, true).await);
}

/// The test above can fail: without the void, the late lease is lost.
#[tokio::test(flavor = "multi_thread")]
async fn a_seal_that_is_not_voided_would_lose_a_late_writer() {
    assert!(!late_lease(&Stage::new().await, false).await);
}

/// A transaction that wrote to the week, without a touch of its own because somebody's was fresh, is still open long after.
#[tokio::test(flavor = "multi_thread")]
async fn a_week_is_not_sealed_while_a_writer_of_it_is_open() {
    let stage = Stage::new().await;
    let [early, mine] = stage.claims().await;
    kit::run(&stage.ledger, &early).await;
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let mine = Claim { mode: Mode::Done, ..mine };
    let outcome =
        stage.ledger.claim_in(&mut tx, std::slice::from_ref(&mine)).await.unwrap().remove(0).unwrap();
    assert!(outcome.is_claimed());
    stage.harness.advance(2 * kit::DAY * 7).await;
    for _ in 0..3 {
        kit::sweep(&stage.ledger, LONG).await;
        assert!(!stage.is_sealed().await, "its writer could not be counted");
    }
    tx.commit().await.unwrap();
    stage.seal().await;
    let rows: i64 = ask(
        &stage.harness.pool,
        format!("select rows from {}.sealed where week = {}", stage.harness.schema, stage.week),
    )
    .await;
    assert_eq!(rows, 2);
}

/// The same writer, open for longer than the retention, settles what the sweep saw open: its end is not undone.
#[tokio::test(flavor = "multi_thread")]
async fn a_settling_in_a_transaction_older_than_the_retention_is_not_lost() {
    let stage = Stage::new().await;
    let [mine] = stage.claims().await;
    let grant = kit::first(&stage.ledger, &mine).await;
    let mut tx = stage.harness.pool.begin().await.unwrap();
    let sql = format!("select {}.settle($1, $2, $3, 'done')", stage.harness.schema);
    let settled: bool = sqlx::query_scalar(AssertSqlSafe(sql))
        .bind(mine.identity.scope.as_str())
        .bind(mine.identity.id.to_string())
        .bind(grant.token.0)
        .fetch_one(&mut *tx)
        .await
        .unwrap();
    assert!(settled);
    stage.harness.advance(30 * kit::DAY).await;
    let sweeping = tokio::spawn({
        let ledger = stage.ledger.clone();
        async move { kit::sweep(&ledger, RETENTION).await }
    });
    until_waiting(&stage.harness.pool, &format!("{}.entry detach", stage.harness.schema)).await;
    tx.commit().await.unwrap();
    println!("{:?}", sweeping.await.unwrap());
    let again = kit::one(&stage.ledger, &kit::another(&mine)).await;
    assert!(
        matches!(again, Outcome::Duplicate { .. } | Outcome::TooOld { .. }),
        "took effect twice: {again:?}"
    );
}
