//! A PostgreSQL ledger under test: a schema of its own on the server that `scripts/services` runs.

use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::postgres::{PgLedger, PgSettings};
use hapax::ledger::{Claim, Outcome, Settings};
use hapax::testing::{Harness, noon};
use hapax::{Result, Time};
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

/// A pool of its own.
pub async fn pool(connections: u32) -> PgPool {
    sqlx::postgres::PgPoolOptions::new()
        .max_connections(connections)
        .connect(&url())
        .await
        .expect("the test server answers")
}

pub async fn run(pool: &PgPool, sql: String) {
    pool.execute(AssertSqlSafe(sql)).await.expect("a statement of the test");
}

/// Settings for a schema.
pub fn settings(schema: &str) -> PgSettings {
    let mut settings = PgSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = hapax::backend::postgres::Pooling::Session;
    settings
}

/// A ledger in a fresh schema, on the server's own clock.
#[allow(dead_code)]
pub async fn ledger(connections: u32) -> PgLedger {
    PgLedger::with_pool(pool(connections).await, settings(&fresh_schema())).await.expect("a fresh ledger")
}

/// A fresh schema whose clock stands still until it is moved.
#[derive(Debug)]
#[allow(dead_code)]
pub struct PgHarness {
    pool: PgPool,
    schema: String,
}

#[allow(dead_code)]
impl PgHarness {
    pub async fn new() -> Self {
        let pool = pool(12).await;
        let schema = fresh_schema();
        PgLedger::with_pool(pool.clone(), settings(&schema)).await.expect("a fresh ledger");
        let us = Time::as_micros(noon());
        run(
            &pool,
            format!(
                "create table {schema}.test_clock (at timestamptz not null); \
                 insert into {schema}.test_clock values (timestamptz 'epoch' + {us} * interval '1 microsecond'); \
                 create or replace function {schema}.ledger_now() returns timestamptz language sql volatile \
                 as 'select at from {schema}.test_clock'"
            ),
        )
        .await;
        PgHarness { pool, schema }
    }
}

#[async_trait]
impl Harness for PgHarness {
    type Ledger = PgLedger;

    async fn open(&self, ledger: Settings) -> PgLedger {
        let mut all = settings(&self.schema);
        all.ledger = ledger;
        PgLedger::with_pool(self.pool.clone(), all).await.expect("the ledger opens again")
    }

    async fn advance(&self, by: Duration) {
        let us = by.as_micros();
        run(
            &self.pool,
            format!("update {}.test_clock set at = at + {us} * interval '1 microsecond'", self.schema),
        )
        .await;
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

    async fn was_committed(&self, ledger: &PgLedger, claim: &Claim) -> Result<bool> {
        ledger.was_committed(claim).await
    }
}
