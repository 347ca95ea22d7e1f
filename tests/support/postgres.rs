//! A PostgreSQL ledger under test: a schema of its own on the server that `scripts/services` runs.
#![allow(dead_code)] // each test binary uses its part
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::postgres::{PgLedger, PgSettings};
use hapax::ledger::{Claim, Marker, Outcome, Settings, Settle, Settled, SweepSettings, Swept};
use hapax::testing::{Harness, noon};
use hapax::{Result, Scope, Time};
use sqlx::{AssertSqlSafe, Executor, PgPool};

/// Where the server is. A missing one is a failure, never a skip.
pub fn url() -> String {
    std::env::var("HAPAX_TEST_POSTGRES_URL").expect(
        "HAPAX_TEST_POSTGRES_URL is not set: run `scripts/test`, or `scripts/services up` and `eval \"$(scripts/services env)\"`",
    )
}

/// A schema name nobody else uses.
pub fn fresh_schema() -> String {
    format!("t_{}", uuid::Uuid::new_v4().simple())
}

/// A pool of its own. Nobody waits for a connection so long that it matters, however busy the server is.
pub async fn pool(connections: u32) -> PgPool {
    sqlx::postgres::PgPoolOptions::new()
        .max_connections(connections)
        .acquire_timeout(Duration::from_secs(120))
        .connect(&url())
        .await
        .expect("the test server answers")
}

/// A pool to some URL.
pub async fn pool_to(url: &str, connections: u32) -> PgPool {
    sqlx::postgres::PgPoolOptions::new()
        .max_connections(connections)
        .connect(url)
        .await
        .expect("the test server answers")
}

/// The URL of another database of the test server.
pub fn url_of(database: &str) -> String {
    let url = url();
    format!("{}/{database}", url.rsplit_once('/').expect("the URL names a database").0)
}

/// A database of its own, for tests that change the settings of a whole database. Dropped by [`Scratch::drop_it`].
pub struct Scratch {
    pub name: String,
    admin: PgPool,
}

impl Scratch {
    pub async fn new() -> Self {
        let name = fresh_schema();
        let admin = pool(1).await;
        run(&admin, format!("create database {name}")).await;
        Scratch { name, admin }
    }

    pub fn url(&self) -> String {
        url_of(&self.name)
    }

    /// Runs a statement about the database, from outside of it.
    pub async fn admin(&self, sql: &str) {
        run(&self.admin, sql.replace("{db}", &self.name)).await;
    }

    pub async fn drop_it(self) {
        self.admin("drop database {db} with (force)").await;
    }
}

/// One value.
pub async fn ask<T>(pool: &PgPool, sql: impl Into<String>) -> T
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
{
    sqlx::query_scalar(AssertSqlSafe(sql.into())).fetch_one(pool).await.expect("an answer for the test")
}

pub use crate::support::wait::until;

/// Waits until a statement with this text in it waits for a lock.
pub async fn until_waiting(pool: &PgPool, text: &str) {
    until("a statement waits for a lock", async || {
        ask::<i64>(
            pool,
            format!(
                "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and pid <> pg_backend_pid() \
                 and query like '%{text}%'"
            ),
        )
        .await
            > 0
    })
    .await;
}

/// The variable that tells a test binary which part it plays as a child of a test.
pub const ROLE: &str = "HAPAX_TEST_ROLE";

/// This test binary once more, as another process, to play a role in one test.
pub fn child(test: &str, role: &str, schema: &str) -> tokio::process::Command {
    let mut command = tokio::process::Command::from(super::this::test(test));
    command.arg("--test-threads=1");
    command.env(ROLE, role).env("HAPAX_TEST_SCHEMA", schema).kill_on_drop(true);
    command.stdout(std::process::Stdio::null());
    command
}

/// The role of this process, if it is a child of a test, and the schema it works in.
pub fn role() -> Option<(String, String)> {
    let role = std::env::var(ROLE).ok()?;
    Some((role, std::env::var("HAPAX_TEST_SCHEMA").expect("a child gets its schema")))
}

/// Small, seeded randomness: a failure can be repeated with the printed seed.
pub struct Random(u64);

impl Random {
    /// From `HAPAX_TEST_SEED`, or fresh; printed.
    pub fn new() -> Self {
        let seed = match std::env::var("HAPAX_TEST_SEED") {
            Ok(seed) => seed.parse().expect("HAPAX_TEST_SEED is a number"),
            Err(_) => uuid::Uuid::new_v4().as_u64_pair().0,
        };
        eprintln!("seed {seed} (HAPAX_TEST_SEED repeats it)");
        Random(seed)
    }

    /// Another stream of the same seed.
    pub fn fork(&mut self) -> Self {
        Random(self.number())
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, limit: usize) -> usize {
        (self.number() % limit as u64) as usize
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for at in (1..items.len()).rev() {
            items.swap(at, self.below(at + 1));
        }
    }
}

/// Runs a statement of the test; again if it met somebody who was still at work: a deadlock, or a session that has not left a
/// database yet, for which the server waits five seconds.
pub async fn run(pool: &PgPool, sql: String) {
    let mut met = 0;
    while let Err(error) = pool.execute(AssertSqlSafe(sql.clone())).await {
        let code = error.as_database_error().and_then(|error| error.code().map(std::borrow::Cow::into_owned));
        met += 1;
        let others = matches!(code.as_deref(), Some("40P01" | "55006"));
        assert!(others && met < 10, "a statement of the test: {error:?}");
    }
}

/// Settings for a schema.
pub fn settings(schema: &str) -> PgSettings {
    let mut settings = PgSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = hapax::backend::postgres::Pooling::Session;
    // A drop waits for all transactions of the database, and other tests have some open for long.
    settings.sweep_patience = Duration::from_secs(180);
    settings
}

/// A ledger in a fresh schema, on the server's own clock.
pub async fn ledger(connections: u32) -> PgLedger {
    PgLedger::with_pool(pool(connections).await, settings(&fresh_schema())).await.expect("a fresh ledger")
}

/// A fresh schema whose clock stands still until it is moved.
#[derive(Debug)]

pub struct PgHarness {
    pub pool: PgPool,
    pub schema: String,
}

impl PgHarness {
    pub async fn new() -> Self {
        PgHarness::on(pool(12).await).await
    }

    /// On a server of one's own.
    pub async fn on(pool: PgPool) -> Self {
        let schema = fresh_schema();
        PgLedger::with_pool(pool.clone(), settings(&schema)).await.expect("a fresh ledger");
        stop_clock(&pool, &schema, "ledger_now").await;
        PgHarness { pool, schema }
    }
}

/// From now on it is noon in this schema, until somebody moves the clock. `function` tells its time.
pub async fn stop_clock(pool: &PgPool, schema: &str, function: &str) {
    let us = noon().as_micros();
    let sql = format!(
        "create table {schema}.test_clock (at timestamptz not null); \
         insert into {schema}.test_clock values (timestamptz 'epoch' + {us} * interval '1 microsecond'); \
         create or replace function {schema}.{function}() returns timestamptz language sql volatile \
         as 'select at from {schema}.test_clock'"
    );
    run(pool, sql).await;
}

/// Moves a clock that was stopped.
pub async fn advance_clock(pool: &PgPool, schema: &str, by: Duration) {
    let us = by.as_micros();
    run(pool, format!("update {schema}.test_clock set at = at + {us} * interval '1 microsecond'")).await;
}

#[async_trait]
impl Harness for PgHarness {
    type Ledger = PgLedger;

    async fn open(&self, ledger: Settings) -> PgLedger {
        let mut all = settings(&self.schema);
        all.ledger = ledger;
        // As if the schema had been made by the one who opens it.
        let rule = match all.ledger.identity {
            hapax::ledger::IdentityRule::Id => "id",
            hapax::ledger::IdentityRule::IdAndTime => "id_and_time",
        };
        run(&self.pool, format!("update {}.meta set identity = '{rule}'", self.schema)).await;
        PgLedger::with_pool(self.pool.clone(), all).await.expect("the ledger opens again")
    }

    async fn advance(&self, by: Duration) {
        advance_clock(&self.pool, &self.schema, by).await;
    }

    async fn in_transaction(
        &self,
        ledger: &PgLedger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>> {
        // A missing week is made beside the transaction, and the transaction tried again, as its error asks.
        loop {
            let mut tx = self.pool.begin().await.expect("a transaction");
            let outcomes = match ledger.claim_in(&mut tx, claims).await {
                Err(hapax::Error::WeekMissing { .. }) => {
                    tx.rollback().await.expect("a rollback");
                    tokio::task::yield_now().await;
                    continue;
                }
                other => other?,
            };
            if commit {
                tx.commit().await.expect("a commit");
            } else {
                tx.rollback().await.expect("a rollback");
            }
            return Ok(outcomes);
        }
    }

    async fn settle_in_transaction(
        &self,
        ledger: &PgLedger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>> {
        let mut tx = self.pool.begin().await.expect("a transaction");
        let answers = ledger.settle_in(&mut tx, settles).await?;
        ledger.set_markers_in(&mut tx, markers.0, markers.1).await?;
        if commit {
            tx.commit().await.expect("a commit");
        } else {
            tx.rollback().await.expect("a rollback");
        }
        Ok(answers)
    }

    async fn was_committed(&self, ledger: &PgLedger, claim: &Claim) -> Result<bool> {
        ledger.was_committed(claim).await
    }

    async fn sweep_part(&self, ledger: &PgLedger, settings: SweepSettings, steps: u32) -> Swept {
        ledger.sweep_part(settings, steps).await.expect("a part of a sweep")
    }

    fn sweeps_in_steps(&self) -> bool {
        true
    }
}
