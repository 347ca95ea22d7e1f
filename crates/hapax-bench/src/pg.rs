//! The PostgreSQL server of the benches: fresh schemas that are dropped afterwards.

use std::time::Duration;

use hapax::backend::postgres::{PgLedger, PgSettings, Pooling};
use hapax::{EventId, Guard, Outcome};
use sqlx::postgres::PgPoolOptions;
use sqlx::{AssertSqlSafe, Executor, PgPool};

use crate::harness::{Fallible, Missing};

/// The scope of all claims.
pub const SCOPE: &str = "bench";

/// The URL of the PostgreSQL server.
pub fn url() -> Fallible<String> {
    ["HAPAX_BENCH_POSTGRES_URL", "HAPAX_TEST_POSTGRES_URL"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|url| !url.is_empty()))
        .ok_or_else(|| {
            Missing(
                "no PostgreSQL: set HAPAX_BENCH_POSTGRES_URL, or run `scripts/services up postgres` and \
                 `eval \"$(scripts/services env)\"`"
                    .into(),
            )
            .into()
        })
}

/// The server's version, if it can be reached.
pub async fn version() -> Option<String> {
    let pool = pool(1).await.ok()?;
    sqlx::query_scalar("show server_version").fetch_one(&pool).await.ok()
}

/// A pool of connections that are opened before the clock starts.
pub async fn pool(connections: u32) -> Fallible<PgPool> {
    let url = url()?;
    let pool = PgPoolOptions::new()
        .max_connections(connections)
        .min_connections(connections)
        .acquire_timeout(Duration::from_secs(10))
        .test_before_acquire(false)
        .connect(&url)
        .await
        .map_err(|error| Missing(format!("the PostgreSQL server does not answer: {error}")))?;
    let mut held = Vec::new();
    for _ in 0..connections {
        held.push(pool.acquire().await?);
    }
    Ok(pool)
}

/// Runs statements without a result.
pub async fn execute(pool: &PgPool, sql: impl Into<String>) -> Fallible<u64> {
    Ok(pool.execute(AssertSqlSafe(sql.into())).await?.rows_affected())
}

/// Queries one number.
pub async fn number(pool: &PgPool, sql: impl Into<String>) -> Fallible<i64> {
    Ok(sqlx::query_scalar(AssertSqlSafe(sql.into())).persistent(false).fetch_one(pool).await?)
}

/// A fresh schema. [`drop`](Schema::drop) it when done; a failed bench leaves it behind, named
/// `bench_…`.
#[derive(Debug, Clone)]
pub struct Schema {
    /// Its name.
    pub name: String,
    pool: PgPool,
}

impl Schema {
    /// Creates a schema.
    pub async fn fresh(pool: &PgPool) -> Fallible<Self> {
        let name = format!("bench_{}", uuid::Uuid::new_v4().simple());
        execute(pool, format!("create schema {name}")).await?;
        Ok(Schema { name, pool: pool.clone() })
    }

    /// Drops it and everything in it.
    pub async fn drop(self) -> Fallible<()> {
        execute(&self.pool, format!("drop schema {} cascade", self.name)).await.map(drop)
    }

    /// A guard over a ledger in this schema. Its scope and the current week already exist, created
    /// by a claim.
    pub async fn guard(&self, connections: u32) -> Fallible<Guard<PgLedger>> {
        let guard = self.open(connections).await?;
        if !guard.mark_processed(EventId::now_v7(), None).await?.is_claimed() {
            return Err("a fresh ledger knew a new id".into());
        }
        Ok(guard)
    }

    /// The same, but the week is created by a lease, as in a ledger used for leases.
    pub async fn leasing_guard(&self, connections: u32) -> Fallible<Guard<PgLedger>> {
        let guard = self.open(connections).await?;
        match guard.lease(EventId::now_v7()).await? {
            Outcome::First(lease) => lease.done().await?,
            other => return Err(format!("a new id was {}", other.name()).into()),
        }
        Ok(guard)
    }

    /// A guard that logs skips, or does not.
    pub async fn logging_guard(&self, connections: u32, log: bool) -> Fallible<Guard<PgLedger>> {
        let ledger = self.ledger(connections).await?;
        Ok(Guard::builder(ledger).scope(SCOPE).with(|settings| settings.log_skips = log).build()?)
    }

    async fn open(&self, connections: u32) -> Fallible<Guard<PgLedger>> {
        Ok(Guard::builder(self.ledger(connections).await?).scope(SCOPE).build()?)
    }

    async fn ledger(&self, connections: u32) -> Fallible<PgLedger> {
        let mut settings = PgSettings::default();
        settings.schema.clone_from(&self.name);
        settings.pooling = Pooling::Session;
        Ok(PgLedger::with_pool(pool(connections).await?, settings).await?)
    }
}

/// New UUIDv7 ids.
pub fn ids(count: usize) -> Vec<EventId> {
    (0..count).map(|_| EventId::now_v7()).collect()
}

const WEEK_MS: i64 = 7 * 24 * 3600 * 1000;
/// Monday, 1999-12-27: the start of week 1.
const FIRST_MONDAY_MS: i64 = 946_252_800_000;

/// The week of an id generated now.
pub fn this_week() -> i64 {
    let now = EventId::now_v7().v7_millis().unwrap_or_default();
    (now - FIRST_MONDAY_MS) / WEEK_MS + 1
}

/// The start of a week, in milliseconds since 1970.
pub fn week_start_ms(week: i64) -> i64 {
    FIRST_MONDAY_MS + (week - 1) * WEEK_MS
}

/// An SQL expression for the 16 bytes of a UUIDv7 of that millisecond.
pub fn v7_sql(ms: &str) -> String {
    format!(
        "set_byte(substring(int8send(({ms})::bigint) from 3 for 6) || substring(uuid_send(gen_random_uuid()) from 7 for 10), \
         6, 112 + (random() * 15)::int)"
    )
}

/// The partition of a week.
pub async fn week_table(pool: &PgPool, schema: &str, week: i64) -> Fallible<String> {
    let sql = format!(
        "select c.oid::regclass::text from pg_inherits i join pg_class c on c.oid = i.inhrelid \
         where i.inhparent = '{schema}.entry'::regclass and c.relname like 'entry\\_{week}\\_%'"
    );
    Ok(sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(pool).await?)
}

/// Fills a week of a ledger with done entries, as claims would have left them: ids in the order of
/// time.
pub async fn fill_week(pool: &PgPool, schema: &str, week: i64, rows: u64) -> Fallible<()> {
    let start = week_start_ms(week);
    // Leave the last minutes free, so that later claims come after these entries.
    let end = if week == this_week() {
        EventId::now_v7().v7_millis().unwrap_or_default() - 60_000
    } else {
        start + WEEK_MS - 60_000
    };
    execute(pool, format!("select {schema}.make_week({week}::smallint, 28, 1000)")).await?;
    let table = week_table(pool, schema, week).await?;
    let days = if week == this_week() { 0 } else { 20 }; // entries of an old week were done long ago
    let id = v7_sql(&format!("{start} + i * {}::float8 / {rows}", (end - start).max(1)));
    execute(
        pool,
        format!(
            "insert into {table} (first_at, at, token, nonce, scope, week, attempts, flags, state, id) \
             select now(), now() - interval '{days} days', 1, (random() * 1e18)::bigint, 1, {week}, 1, 0, 'D', {id} \
             from generate_series(1, {rows}) i"
        ),
    )
    .await
    .map(drop)
}
