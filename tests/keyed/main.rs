//! Stores of keys pass the conformance suite; and what only a server or a file can show.
#![cfg(all(feature = "testing", feature = "postgres", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

mod access;
#[cfg(all(feature = "axum", feature = "client"))]
mod client;
#[cfg(feature = "axum")]
mod keyed_layer;
mod mutants;
mod records;
mod stores;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::postgres::{PgKeys, PgKeysSettings, Pooling};
use hapax::backend::sqlite::SqliteKeys;
use hapax::clock::ManualClock;
use hapax::keyed::{Answer, Begin, Begun, Keys};
use hapax::testing::keyed::{KeysHarness, MemoryKeysHarness, answer, request, word};
use hapax::{Error, Result};
use rusqlite::{Connection, TransactionBehavior};
use sqlx::PgPool;
use support::postgres::{advance_clock, ask, fresh_schema, pool, run, stop_clock};

hapax::keys_conformance!(memory, MemoryKeysHarness::new());
hapax::keys_conformance!(sqlite, SqliteKeysHarness::new());
hapax::keys_conformance!(postgres, PgKeysHarness::new().await);

/// A fresh file whose clock stands still until it is moved.
struct SqliteKeysHarness(tempfile::TempDir, ManualClock);

impl SqliteKeysHarness {
    fn new() -> Self {
        SqliteKeysHarness(tempfile::tempdir().unwrap(), ManualClock::new(hapax::testing::noon()))
    }

    fn file(&self) -> std::path::PathBuf {
        self.0.path().join("keys.db")
    }
}

#[async_trait]
impl KeysHarness for SqliteKeysHarness {
    type Keys = SqliteKeys;

    async fn open(&self) -> SqliteKeys {
        SqliteKeys::open_with_clock(self.file(), Arc::new(self.1.clone())).expect("the file opens")
    }

    async fn advance(&self, by: Duration) {
        self.1.advance(by);
    }

    async fn in_transaction(
        &self,
        keys: &SqliteKeys,
        begin: &Begin,
        answer: Option<&Answer>,
        commit: bool,
    ) -> Result<Begun> {
        let mut conn = Connection::open(self.file()).unwrap();
        conn.busy_timeout(Duration::from_secs(120)).unwrap();
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let outcome = keys.begin_in(&tx, begin)?;
        if let (Begun::First(lease), Some(answer)) = (&outcome, answer) {
            keys.finish_in(&tx, lease, answer)?;
        }
        if commit {
            tx.commit().unwrap();
        }
        Ok(outcome)
    }
}

fn settings(schema: &str) -> PgKeysSettings {
    let mut settings = PgKeysSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings
}

/// A fresh schema whose clock stands still until it is moved.
struct PgKeysHarness {
    pool: PgPool,
    schema: String,
}

impl PgKeysHarness {
    async fn new() -> Self {
        let (pool, schema) = (pool(12).await, fresh_schema());
        PgKeys::with_pool(pool.clone(), settings(&schema)).await.expect("fresh keys");
        stop_clock(&pool, &schema, "keys_now").await;
        PgKeysHarness { pool, schema }
    }
}

#[async_trait]
impl KeysHarness for PgKeysHarness {
    type Keys = PgKeys;

    async fn open(&self) -> PgKeys {
        PgKeys::with_pool(self.pool.clone(), settings(&self.schema)).await.expect("the keys open")
    }

    async fn advance(&self, by: Duration) {
        advance_clock(&self.pool, &self.schema, by).await;
    }

    async fn in_transaction(
        &self,
        keys: &PgKeys,
        begin: &Begin,
        answer: Option<&Answer>,
        commit: bool,
    ) -> Result<Begun> {
        let mut tx = keys.transaction().await?;
        let outcome = keys.begin_in(&mut tx, begin).await?;
        if let (Begun::First(lease), Some(answer)) = (&outcome, answer) {
            keys.finish_in(&mut tx, lease, answer).await?;
        }
        if commit {
            tx.commit().await.unwrap();
        } else {
            tx.rollback().await.unwrap();
        }
        Ok(outcome)
    }
}

/// Keys on the server's own clock, in a schema of their own.
async fn pg_keys(connections: u32) -> PgKeys {
    PgKeys::with_pool(pool(connections).await, settings(&fresh_schema())).await.expect("fresh keys")
}

/// A second request does not wait for the transaction of the first, however long that takes; and it keeps no lock that
/// the first one needs.
#[tokio::test]
async fn t101_a_second_request_meets_an_open_transaction_and_goes_on() {
    let keys = pg_keys(4).await;
    let begin = request("key", "{}");
    let mut open = keys.transaction().await.unwrap();
    let Begun::First(lease) = keys.begin_in(&mut open, &begin).await.unwrap() else { panic!("a fresh key") };
    let started = std::time::Instant::now();
    let leased = keys.begin(&request("key", "{}")).await.unwrap();
    assert!(matches!(leased, Begun::Running { until: None }), "{leased:?}");
    let mut second = keys.transaction().await.unwrap();
    let outcome = keys.begin_in(&mut second, &request("key", "{}")).await.unwrap();
    assert!(matches!(outcome, Begun::Running { until: None }), "{outcome:?}");
    assert!(started.elapsed() < Duration::from_secs(120), "it waited for the other");
    // The second transaction is still usable, and still open while the first one ends.
    sqlx::query("select 1").execute(&mut *second).await.unwrap();
    keys.finish_in(&mut open, &lease, &answer("17")).await.unwrap();
    open.commit().await.unwrap();
    second.rollback().await.unwrap();
    assert_eq!(word(&keys, &begin).await, "done");
}

/// Under REPEATABLE READ a key that was swept after the snapshot must not look new: its horizon is not visible there.
#[tokio::test]
async fn t102_an_old_snapshot_cannot_miss_the_horizon() {
    let harness = PgKeysHarness::new().await;
    let keys = harness.open().await;
    let v7 = hapax::testing::keyed::v7(&keys, Duration::ZERO, false).await;
    let begin = request(&v7, "{}");
    hapax::testing::keyed::done(&keys, &begin, "17").await;
    let month = Duration::from_hours(24 * 31);
    harness.advance(month).await;
    let mut tx = harness.pool.begin_with("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    sqlx::query("select count(*) from pg_class").execute(&mut *tx).await.unwrap(); // the snapshot
    assert_eq!(keys.sweep(&hapax::keyed::KeySweep::new(hapax::keyed::RETENTION)).await.unwrap().keys, 1);
    let retry = Begin::new(None, begin.key.clone(), begin.fingerprint.clone());
    let outcome = keys.begin_in(&mut tx, &retry).await;
    assert!(matches!(outcome, Err(Error::Contended { .. }) | Ok(Begun::Done(_))), "{outcome:?}");
}

/// The two SQL functions, as another language calls them; the library sees what they did.
#[tokio::test]
async fn t103_two_sql_functions_are_enough_for_any_language() {
    let keys = pg_keys(2).await;
    let schema = keys.schema().to_owned();
    let begin =
        format!("select outcome from {schema}.key_begin('order-17', '\\x0123456789abcdef', p_nonce => 5)");
    let mut tx = keys.pool().begin().await.unwrap();
    let (outcome, token): (String, i64) =
        sqlx::query_as(sqlx::AssertSqlSafe(begin.replace("outcome from", "outcome, token from")))
            .fetch_one(&mut *tx)
            .await
            .unwrap();
    assert_eq!(outcome, "first");
    let finish = format!(
        "select {schema}.key_finish('order-17', {token}, 201, 'done', '[[\"Location\", \"/orders/17\"]]')"
    );
    let stored: bool =
        sqlx::query_scalar(sqlx::AssertSqlSafe(finish.clone())).fetch_one(&mut *tx).await.unwrap();
    assert!(stored);
    tx.commit().await.unwrap();
    let answer: String = ask(
        keys.pool(),
        begin.replace(
            "outcome",
            "concat_ws(' ', outcome, mine, status, headers->0->>0, convert_from(body, 'UTF8'))",
        ),
    )
    .await;
    assert_eq!(answer, "done t 201 location done");
    let status = keys.get(None, &hapax::testing::keyed::key("order-17")).await.unwrap();
    let hapax::keyed::KeyStatus::Done(kept) = status else { panic!("{status:?}") };
    assert_eq!(kept.answer, Answer::new(201, "done").header("location", "/orders/17"));
    let other = begin.replace("0123456789abcdef", "ffffffffffffffff");
    assert_eq!(ask::<String>(keys.pool(), other).await, "mismatch");
    // Leased, for work elsewhere.
    let leased = format!(
        "select outcome from {schema}.key_begin('leased', '\\x0123456789abcdef', p_lease_seconds => 30)"
    );
    assert_eq!(ask::<String>(keys.pool(), leased.clone()).await, "first");
    assert_eq!(ask::<String>(keys.pool(), leased).await, "running");
    let ahead = begin.replace("order-17", "0fffffff-ffff-7fff-8fff-ffffffffffff"); // of the year 2527
    assert_eq!(ask::<String>(keys.pool(), ahead).await, "ahead");
    // Bad input: a sentence, and nothing is changed.
    for (call, says) in [
        (format!("{schema}.key_begin('a b', '\\x0123456789abcdef')"), "visible ASCII"),
        (format!("{schema}.key_begin(null, '\\x0123456789abcdef')"), "visible ASCII"),
        (format!("{schema}.key_begin(repeat('k', 256), '\\x0123456789abcdef')"), "255"),
        (format!("{schema}.key_begin('k', '\\x01')"), "8 to 64 bytes"),
        (format!("{schema}.key_begin('k', null)"), "8 to 64 bytes"),
        (format!("{schema}.key_begin('k', '\\x0123456789abcdef', p_tenant => ' ')"), "tenant"),
        (
            format!(
                "{schema}.key_begin('k', '\\x0123456789abcdef', p_tenant => '00000000-0000-0000-0000-000000000000')"
            ),
            "nil UUID",
        ),
        (format!("{schema}.key_begin('k', '\\x0123456789abcdef', p_lease_seconds => 0)"), "1 to 86400"),
        (format!("{schema}.key_finish('order-17', {token}, 99)"), "status is 99"),
        (format!("{schema}.key_finish('order-17', {token}, 200, '', '{{}}')"), "array of"),
        (format!("{schema}.key_finish('order-17', {token}, 200, '', '[[\"Set-Cookie\", \"a\"]]')"), "kept"),
    ] {
        let failed: sqlx::Result<sqlx::postgres::PgRow> =
            sqlx::query(sqlx::AssertSqlSafe(format!("select {call}"))).fetch_one(keys.pool()).await;
        let error = failed.expect_err(&call);
        let error = error.as_database_error().expect("the server's word");
        assert!(
            error.code().as_deref() == Some("22023") && error.message().contains(says),
            "{call}: {error}"
        );
    }
    assert_eq!(word(&keys, &request("k", "{}")).await, "unknown");
}

/// The role that a service needs can begin and finish, and cannot forget.
#[tokio::test]
async fn the_grants_are_enough_and_no_more() {
    let keys = pg_keys(2).await;
    let (schema, role) = (keys.schema().to_owned(), format!("app_{}", keys.schema()));
    run(keys.pool(), format!("create role {role}")).await;
    run(keys.pool(), hapax::backend::postgres::keys::keys_grants_sql(&schema, &role).unwrap()).await;
    let mut tx = keys.transaction().await.unwrap();
    sqlx::query(sqlx::AssertSqlSafe(format!("set local role {role}"))).execute(&mut *tx).await.unwrap();
    let old = request(&hapax::testing::keyed::v7(&keys, Duration::from_hours(48), false).await, "{}");
    for begin in [request("key", "{}"), old] {
        let Begun::First(lease) = keys.begin_in(&mut tx, &begin).await.unwrap() else {
            panic!("a fresh key")
        };
        keys.finish_in(&mut tx, &lease, &answer("17")).await.unwrap();
    }
    let gone = sqlx::query(sqlx::AssertSqlSafe(format!("delete from {schema}.keys"))).execute(&mut *tx).await;
    assert!(gone.is_err_and(|e| e.as_database_error().unwrap().code().as_deref() == Some("42501")));
    tx.rollback().await.unwrap();
    run(keys.pool(), format!("drop owned by {role}; drop role {role}")).await;
}

/// Many processes open a fresh schema or file at once; one that only checks makes nothing.
#[tokio::test]
async fn opening_is_safe_at_once_and_check_makes_nothing() {
    let (pool, schema) = (pool(8).await, fresh_schema());
    let mut check = settings(&schema);
    check.migrate = hapax::open::Migrate::Check;
    let missing = PgKeys::with_pool(pool.clone(), check).await;
    assert!(missing.is_err_and(|error| error.code() == "schema"));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let (pool, schema) = (pool.clone(), schema.clone());
        tasks.spawn(async move { *PgKeys::with_pool(pool, settings(&schema)).await.unwrap().secret() });
    }
    let secrets: std::collections::HashSet<_> = tasks.join_all().await.into_iter().collect();
    assert_eq!(secrets.len(), 1, "one store, one secret");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("keys.db");
    assert!(SqliteKeys::open_existing(&file).is_err() && !file.exists());
    let secret = *SqliteKeys::open(&file).unwrap().secret();
    assert_eq!(*SqliteKeys::open_existing(&file).unwrap().secret(), secret);
}

#[tokio::test]
async fn a_url_opens_keys_and_redis_is_refused() {
    assert_eq!(hapax::open::keys("memory:").await.unwrap().capabilities().backend, "memory");
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", dir.path().join("keys.db").display());
    assert_eq!(hapax::open::keys(&url).await.unwrap().capabilities().backend, "sqlite");
    let refused = hapax::open::keys("redis://127.0.0.1").await.unwrap_err();
    assert!(
        refused.code() == "unsupported" && refused.to_string().contains("PostgreSQL or SQLite"),
        "{refused}"
    );
    assert_eq!(hapax::open::keys("mysql://x").await.unwrap_err().code(), "config");
}

/// A transaction on another file, or one that is over, would not commit the key with its rows.
#[tokio::test]
async fn a_foreign_transaction_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = SqliteKeys::open(dir.path().join("keys.db")).unwrap();
    let mut other = Connection::open(dir.path().join("other.db")).unwrap();
    let tx = other.transaction().unwrap();
    assert!(matches!(keys.begin_in(&tx, &request("key", "{}")), Err(Error::Unsupported(_))));
    drop(tx);
    let mut unsafe_conn = Connection::open(keys.path()).unwrap();
    unsafe_conn.execute_batch("PRAGMA synchronous = OFF").unwrap();
    let tx = unsafe_conn.transaction().unwrap();
    assert!(matches!(keys.begin_in(&tx, &request("key", "{}")), Err(Error::Unsupported(_))));
}

/// A sweep whose batches are small.
fn small_batches() -> hapax::keyed::KeySweep {
    let mut sweep = hapax::keyed::KeySweep::new(hapax::keyed::RETENTION);
    sweep.batch_max = 10;
    sweep
}

/// After this long every key is forgotten.
const OLD: Duration = Duration::from_hours(24 * 31);

/// Fills a store with keys, kills a sweep of it in another process, and looks at what is left.
async fn killed_sweep<H: KeysHarness>(harness: &H, mut sweeper: tokio::process::Command, hit: usize) {
    let keys = harness.open().await;
    let mut requests = Vec::new();
    for _ in 0..25 {
        let begin = request(&hapax::testing::keyed::v7(&keys, Duration::ZERO, false).await, "{}");
        hapax::testing::keyed::done(&keys, &begin, "17").await;
        requests.push(begin);
    }
    harness.advance(OLD).await;
    sweeper.env(hapax::testing::crash::VARIABLE, format!("keyed.sweep.commit:{hit}"));
    let status = sweeper.status().await.unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    for begin in &requests {
        let retry = || Begin::new(None, begin.key.clone(), begin.fingerprint.clone());
        support::postgres::until("the store notices the kill", async || {
            let outcome = keys.begin(&retry()).await;
            assert!(matches!(outcome, Ok(Begun::Done(_) | Begun::Expired) | Err(_)), "{outcome:?}");
            outcome.is_ok()
        })
        .await;
    }
    support::postgres::until("the killed sweep is gone", async || {
        !keys.sweep(&small_batches()).await.unwrap().skipped
    })
    .await;
    let left = keys.list(&hapax::keyed::ListKeys::default()).await.unwrap().len();
    assert_eq!(left, 0, "the next sweep finishes it");
    for begin in &requests {
        assert_eq!(hapax::testing::keyed::again(&keys, begin).await, Begun::Expired);
    }
}

/// A sweep is killed in each of its batches: a key is there with its answer, or expired; never new, never half.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t43_a_sweep_of_keys_that_was_killed_lets_no_key_look_new() {
    const TEST: &str = "t43_a_sweep_of_keys_that_was_killed_lets_no_key_look_new";
    if let Some((_, schema)) = support::postgres::role() {
        let keys = PgKeys::with_pool(pool(2).await, settings(&schema)).await.unwrap();
        println!("survived: {:?}", keys.sweep(&small_batches()).await);
        return;
    }
    // The horizon, and three batches.
    for hit in 1..=4 {
        let harness = PgKeysHarness::new().await;
        let sweeper = support::postgres::child(TEST, "sweeper", &harness.schema);
        killed_sweep(&harness, sweeper, hit).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t43_a_sweep_of_keys_on_sqlite_that_was_killed_lets_no_key_look_new() {
    const TEST: &str = "t43_a_sweep_of_keys_on_sqlite_that_was_killed_lets_no_key_look_new";
    if let Some((_, file)) = support::postgres::role() {
        let clock = ManualClock::new(hapax::testing::noon().plus(OLD));
        let keys = SqliteKeys::open_with_clock(file, Arc::new(clock)).unwrap();
        println!("survived: {:?}", keys.sweep(&small_batches()).await);
        return;
    }
    for hit in 1..=4 {
        let harness = SqliteKeysHarness::new();
        let sweeper = support::postgres::child(TEST, "sweeper", harness.file().to_str().unwrap());
        killed_sweep(&harness, sweeper, hit).await;
    }
}
