//! What only a server or a file can show: open transactions, their ends, and sweeps beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use hapax::backend::postgres::{PgKeys, keys::keys_grants_sql};
use hapax::backend::sqlite::SqliteKeys;
use hapax::keyed::{Begin, Begun, KeyStatus, KeySweep, KeySweeper, Keys, MemoryKeys, RETENTION};
use hapax::testing::keyed::{KeysHarness as _, answer, done, key, request, v7, word};
use hapax::{Error, Result};
use sqlx::{AssertSqlSafe, PgPool};

use crate::support::postgres::{ask, fresh_schema, pool, run, until};
use crate::{PgKeysHarness, pg_keys, settings};

const DAY: Duration = Duration::from_hours(24);

/// A role that has what the documents grant, and row security binds; its statements begin with this.
async fn granted(keys: &PgKeys) -> (String, String) {
    let role = format!("app_{}", keys.schema());
    run(keys.pool(), format!("create role {role}")).await;
    run(keys.pool(), keys_grants_sql(keys.schema(), &role).unwrap()).await;
    run(
        keys.pool(),
        format!("create table {0}.orders (id text); grant insert on {0}.orders to {role}", keys.schema()),
    )
    .await;
    (format!("set local role {role}"), role)
}

/// Runs statements in one transaction as a role; the SQLSTATE of the first that fails. It ends with a COMMIT all the
/// same, as a caller who looks at no answer does.
async fn blindly(pool: &PgPool, role: &str, statements: &[String]) -> Option<String> {
    let mut tx = pool.begin().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(role.to_owned())).execute(&mut *tx).await.unwrap();
    let mut failed = None;
    for statement in statements {
        if let Err(error) = sqlx::raw_sql(AssertSqlSafe(statement.clone())).execute(&mut *tx).await {
            let code = error.as_database_error().and_then(sqlx::error::DatabaseError::code).map(Into::into);
            failed = failed.or(Some(code.unwrap_or_else(|| error.to_string())));
        }
    }
    tx.commit().await.unwrap();
    failed
}

/// Row security hides the row from a sub-select, so the token is null: the work must not be committed without its
/// answer, whatever the caller looks at.
#[tokio::test]
async fn t220_work_is_never_committed_under_a_token_that_does_not_hold_the_key() {
    let keys = pg_keys(2).await;
    let s = keys.schema().to_owned();
    let (set_role, role) = granted(&keys).await;
    let begin =
        |key: &str| format!("select outcome, token from {s}.key_begin('{key}', '\\x0123456789abcdef')");
    let order = |key: &str| format!("insert into {s}.orders values ('{key}')");
    let finish = |key: &str, token: &str| format!("select {s}.key_finish('{key}', {token}, 201)");
    let hidden = format!("(select token from {s}.keys where key = 'hidden')");
    let gone = format!("(select token from {s}.key_begin('other', '\\x0123456789abcdef'))");
    for (key, statements, code) in [
        ("hidden", vec![begin("hidden"), order("hidden"), finish("hidden", &hidden)], "22023"),
        ("foreign", vec![begin("foreign"), order("foreign"), finish("foreign", &gone)], "KF001"),
        ("never", vec![order("never"), finish("never", "17")], "KF001"),
        // Undone since, and gone on.
        (
            "undone",
            vec![
                "savepoint before".to_owned(),
                begin("undone"),
                "rollback to savepoint before".to_owned(),
                order("undone"),
                finish("undone", "1"),
            ],
            "KF001",
        ),
    ] {
        assert_eq!(blindly(keys.pool(), &set_role, &statements).await.as_deref(), Some(code), "{key}");
        let rows: i64 = ask(keys.pool(), format!("select count(*) from {s}.orders where id = '{key}'")).await;
        assert_eq!((rows, word(&keys, &request(key, "{}")).await), (0, "unknown"), "{key}");
    }
    run(keys.pool(), format!("drop owned by {role}; drop role {role}")).await;
}

/// Every outcome of the SQL functions, for the role that a service has.
#[tokio::test]
async fn holding_and_expiry_are_told_to_a_granted_role() {
    let harness = PgKeysHarness::new().await;
    let keys = harness.open().await;
    let s = keys.schema().to_owned();
    let (set_role, role) = granted(&keys).await;
    run(keys.pool(), format!("grant select on {s}.test_clock to {role}")).await;
    let begin = async |key: &str, how: &str| -> String {
        let mut tx = keys.pool().begin().await.unwrap();
        sqlx::raw_sql(AssertSqlSafe(set_role.clone())).execute(&mut *tx).await.unwrap();
        let sql = format!("select outcome from {s}.key_begin('{key}', '\\x0123456789abcdef'{how})");
        let outcome = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut *tx).await.unwrap();
        tx.commit().await.unwrap();
        outcome
    };
    let old = v7(&keys, Duration::ZERO, false).await;
    for (key, how, after) in [
        ("held", ", p_lease_seconds => 30, p_hold => true", "outcome-unknown"),
        ("free", ", p_lease_seconds => 30", "first"),
    ] {
        assert_eq!(begin(key, how).await, "first");
        assert_eq!(begin(key, how).await, "running");
        harness.advance(Duration::from_secs(60)).await;
        assert_eq!(begin(key, how).await, after, "{key}");
    }
    harness.advance(DAY * 10).await;
    assert!(!keys.sweep(&KeySweep::new(DAY * 9)).await.unwrap().skipped);
    assert_eq!(begin(&old, "").await, "expired");
    assert_eq!(begin("held", "").await, "outcome-unknown", "no time limit decides about it");
    run(keys.pool(), format!("drop owned by {role}; drop role {role}")).await;
}

/// While a transaction has begun a key, nobody may be told that the key was never used.
#[tokio::test]
async fn t222_a_key_in_an_open_transaction_runs() {
    let keys = pg_keys(4).await;
    for (name, commit) in [("committed", true), ("undone", false)] {
        let begin = request(name, "{}");
        let mut open = keys.transaction().await.unwrap();
        let Begun::First(lease) = keys.begin_in(&mut open, &begin).await.unwrap() else {
            panic!("a fresh key")
        };
        assert_eq!(keys.get(None, &begin.key).await.unwrap(), KeyStatus::Running { until: None });
        assert_eq!(keys.get(None, &key("other")).await.unwrap(), KeyStatus::Unknown);
        let acme = hapax::Tenant::new("acme").unwrap();
        assert_eq!(keys.get(Some(&acme), &begin.key).await.unwrap(), KeyStatus::Unknown, "another tenant's");
        keys.finish_in(&mut open, &lease, &answer("17")).await.unwrap();
        assert_eq!(word(&keys, &begin).await, "running", "it is not committed yet");
        if commit {
            open.commit().await.unwrap();
        } else {
            open.rollback().await.unwrap();
        }
        assert_eq!(word(&keys, &begin).await, if commit { "done" } else { "unknown" });
    }
    // One that takes over a key that failed before.
    let begin = request("failed", "{}");
    let lease = hapax::testing::keyed::first(&keys, &begin).await;
    keys.release(&lease, hapax::keyed::Ended::Failed).await.unwrap();
    assert_eq!(word(&keys, &begin).await, "free");
    let mut open = keys.transaction().await.unwrap();
    let next = Begin::new(None, begin.key.clone(), begin.fingerprint.clone());
    assert!(matches!(keys.begin_in(&mut open, &next).await.unwrap(), Begun::First(_)));
    assert_eq!(word(&keys, &begin).await, "running");
    open.rollback().await.unwrap();
    assert_eq!(word(&keys, &begin).await, "free");
}

/// The same in a file: nobody sees the row of an open transaction, not even in another process.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t222_a_key_in_an_open_transaction_of_another_process_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let keys = SqliteKeys::open(dir.path().join("keys.db")).unwrap();
    let mut other = rusqlite::Connection::open(keys.path()).unwrap();
    let tx = other.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    let begin = request("key", "{}");
    let Begun::First(lease) = keys.begin_in(&tx, &begin).unwrap() else { panic!("a fresh key") };
    let asked = {
        let (keys, key) = (keys.clone(), begin.key.clone());
        tokio::spawn(async move { keys.get(None, &key).await })
    };
    tokio::time::sleep(Duration::from_millis(300)).await; // whatever it would say at once, it says by now
    keys.finish_in(&tx, &lease, &answer("17")).unwrap();
    tx.commit().unwrap();
    // On a slow machine it may have given up: then it says so.
    match asked.await.unwrap() {
        Ok(status) => assert_eq!(status.word(), "done"),
        Err(error) => assert!(matches!(error, Error::Contended { .. }), "{error}"),
    }
}

/// A begin waits for the file's writer, and its caller goes away: it is not granted to nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t261_a_begin_whose_caller_is_gone_is_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let keys = SqliteKeys::open(dir.path().join("keys.db")).unwrap();
    let mut other = rusqlite::Connection::open(keys.path()).unwrap();
    let busy = other.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    let begin = request("key", "{}");
    let given_up = tokio::time::timeout(Duration::from_millis(500), keys.begin(&begin)).await;
    assert!(given_up.is_err(), "{given_up:?}");
    drop(busy);
    until("the writer has come to it", async || keys.probe().await.is_ok()).await;
    assert_eq!(word(&keys, &begin).await, "unknown");
}

/// Old keys: settled, and made, before the horizon of a sweep that keeps a day.
async fn old_keys(harness: &PgKeysHarness, keys: &PgKeys, count: usize) -> Vec<Begin> {
    let mut requests = Vec::new();
    for _ in 0..count {
        let begin = request(&v7(keys, Duration::ZERO, false).await, "{}");
        done(keys, &begin, "17").await;
        requests.push(begin);
    }
    harness.advance(DAY + Duration::from_secs(60)).await;
    requests
}

fn in_batches(batch_max: usize) -> KeySweep {
    let mut settings = KeySweep::new(DAY);
    settings.batch_max = batch_max;
    settings
}

/// A request with an old key, open for as long as it likes, keeps no sweep from forgetting all that is old; and no
/// sweep makes its key new, or refuses it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t224_a_sweep_forgets_all_beside_open_requests_with_old_keys() {
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        let harness = PgKeysHarness::new().await;
        let keys = harness.open().await;
        // Made by a client long ago, and never sent before.
        let (late, undone) = (v7(&keys, Duration::ZERO, false).await, v7(&keys, Duration::ZERO, false).await);
        let requests = old_keys(&harness, &keys, 25).await;
        let mut open = Vec::new();
        for name in [&late, &undone] {
            let begin = request(name, "{}");
            let mut tx = harness
                .pool
                .begin_with(AssertSqlSafe(format!("BEGIN ISOLATION LEVEL {isolation}")))
                .await
                .unwrap();
            let Begun::First(lease) = keys.begin_in(&mut tx, &begin).await.unwrap() else {
                panic!("nothing was forgotten yet")
            };
            open.push((tx, begin, lease));
        }
        let swept = keys.sweep(&in_batches(10)).await.unwrap();
        assert_eq!((swept.keys, swept.skipped), (25, false), "{isolation}");
        // While they are open, and after one of them is done and the other undone.
        for name in [&late, &undone] {
            let again = keys.begin(&request(name, "{}")).await.unwrap();
            assert!(matches!(again, Begun::Running { until: None }), "{isolation}: {again:?}");
            assert_eq!(word(&keys, &request(name, "{}")).await, "running", "{isolation}");
        }
        let (tx, _, _) = open.pop().unwrap();
        tx.rollback().await.unwrap();
        let (mut tx, begin, lease) = open.pop().unwrap();
        keys.finish_in(&mut tx, &lease, &answer("18")).await.unwrap();
        tx.commit().await.unwrap();
        assert!(matches!(keys.begin(&begin).await.unwrap(), Begun::Done(_)), "{isolation}");
        assert_eq!(keys.begin(&request(&undone, "{}")).await.unwrap(), Begun::Expired, "{isolation}");
        for begin in requests {
            assert_eq!(hapax::testing::keyed::again(&keys, &begin).await, Begun::Expired, "{isolation}");
        }
    }
}

/// Two sweeps that meet: what one of them reports is whole.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t224_sweeps_that_meet_leave_nothing_behind() {
    let harness = PgKeysHarness::new().await;
    let keys = harness.open().await;
    old_keys(&harness, &keys, 40).await;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        let keys = keys.clone();
        tasks.spawn(async move {
            let swept = keys.sweep(&in_batches(3)).await.expect("a sweep");
            let left = keys.list(&hapax::keyed::ListKeys::default()).await.unwrap().len();
            assert!(swept.skipped || left == 0, "{swept:?} and {left} are left");
            swept.keys
        });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<u64>(), 40, "each is counted once");
}

/// Requests with old keys come and go while sweeps raise the horizon: each key runs once, or is expired.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t224_no_old_key_runs_twice_beside_sweeps() {
    let harness = PgKeysHarness::new().await;
    let keys = harness.open().await;
    let mut names = Vec::new();
    for _ in 0..20 {
        names.push(v7(&keys, Duration::ZERO, false).await);
        harness.advance(Duration::from_secs(600)).await;
    }
    harness.advance(DAY).await; // the oldest are at the horizon now
    let mut tasks = tokio::task::JoinSet::new();
    let (done, swept) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
    for name in names.clone() {
        let (keys, done, swept) = (keys.clone(), Arc::clone(&done), Arc::clone(&swept));
        tasks.spawn(async move {
            let mut firsts = 0;
            while !swept.load(Ordering::SeqCst) {
                match keys.begin(&request(&name, "{}")).await {
                    Ok(Begun::First(lease)) => {
                        firsts += 1;
                        keys.finish(&lease, &answer("17")).await.unwrap();
                        done.fetch_add(1, Ordering::SeqCst);
                    }
                    Ok(Begun::Done(_) | Begun::Expired | Begun::Running { .. }) => {}
                    other => assert!(matches!(&other, Err(error) if error.is_retryable()), "{other:?}"),
                }
            }
            firsts
        });
    }
    until("all have run", async || done.load(Ordering::SeqCst) >= 20).await;
    // 60 hours: the horizon passes the answers too, and they are forgotten.
    let mut forgotten = 0;
    for _ in 0..20 {
        harness.advance(Duration::from_hours(3)).await;
        forgotten += keys.sweep(&in_batches(10)).await.unwrap().keys;
    }
    swept.store(true, Ordering::SeqCst);
    for firsts in tasks.join_all().await {
        assert_eq!(firsts, 1, "how often it ran");
    }
    assert_eq!(forgotten, 20);
    for _ in 0..3 {
        harness.advance(DAY).await; // more at once would be a leap of the clock
        keys.sweep(&in_batches(10)).await.unwrap();
    }
    for name in names {
        assert_eq!(keys.begin(&request(&name, "{}")).await.unwrap(), Begun::Expired);
    }
}

/// The clock is set back after a sweep, and a key that was forgotten looks young by it: it is expired all the same.
#[tokio::test]
async fn t264_a_clock_that_is_set_back_makes_no_forgotten_key_new() {
    let harness = PgKeysHarness::new().await;
    let keys = harness.open().await;
    let old = old_keys(&harness, &keys, 1).await.remove(0);
    assert_eq!(keys.sweep(&in_batches(10)).await.unwrap().keys, 1);
    let back = format!("update {}.test_clock set at = at - interval '30 hours'", harness.schema);
    run(&harness.pool, back).await;
    for isolation in ["READ COMMITTED", "REPEATABLE READ", "SERIALIZABLE"] {
        assert_eq!(hapax::testing::keyed::again(&keys, &old).await, Begun::Expired);
        let begin = format!("BEGIN ISOLATION LEVEL {isolation}");
        let mut tx = harness.pool.begin_with(AssertSqlSafe(begin)).await.unwrap();
        let retry = Begin::new(None, old.key.clone(), old.fingerprint.clone());
        assert_eq!(keys.begin_in(&mut tx, &retry).await.unwrap(), Begun::Expired, "{isolation}");
    }
}

/// Nobody calls `sweep`: the sweeper does, when it is started and a night was missed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sweeper_sweeps_by_itself() {
    let clock = hapax::clock::ManualClock::new(hapax::testing::noon());
    let memory = MemoryKeys::with_clock(Arc::new(clock.clone()));
    done(&memory, &request("old", "{}"), "17").await;
    clock.advance(RETENTION + DAY);
    done(&memory, &request("young", "{}"), "18").await;
    let (dir, file_clock) =
        (tempfile::tempdir().unwrap(), hapax::clock::ManualClock::new(hapax::testing::noon()));
    let file = SqliteKeys::open_with_clock(dir.path().join("keys.db"), Arc::new(file_clock.clone())).unwrap();
    done(&file, &request("old", "{}"), "17").await;
    file_clock.advance(RETENTION + DAY);
    done(&file, &request("young", "{}"), "18").await;
    let stores: [Arc<dyn Keys>; 2] = [Arc::new(memory), Arc::new(file)];
    for keys in stores {
        let sweeper = KeySweeper::spawn(Arc::clone(&keys), RETENTION).unwrap();
        until("the old key is forgotten", async || word(&keys, &request("old", "{}")).await == "unknown")
            .await;
        assert_eq!(word(&keys, &request("young", "{}")).await, "done");
        assert!(keys.info().await.unwrap().swept_at.is_some());
        drop(sweeper);
    }
    assert!(KeySweeper::spawn(Arc::new(MemoryKeys::default()), Duration::from_hours(23)).is_err());
}

#[cfg(feature = "axum")]
mod in_the_layer {
    use axum::Router;
    use axum::http::StatusCode;
    use axum::routing::post;
    use hapax::backend::sqlite::SqliteTransaction;
    use hapax::keyed::{KeyedLayer, KeyedSqlite, KeyedTx};
    use tokio::sync::Notify;

    use super::*;
    use crate::keyed_layer::{order, send};

    fn orders(file: &std::path::Path) -> i64 {
        let conn = rusqlite::Connection::open(file).unwrap();
        conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
    }

    fn shop(dir: &tempfile::TempDir) -> SqliteKeys {
        let file = dir.path().join("shop.db");
        let conn = rusqlite::Connection::open(&file).unwrap();
        conn.execute_batch(
            "CREATE TABLE orders (body TEXT UNIQUE); CREATE TABLE refused (n INTEGER); \
             CREATE TRIGGER refuse BEFORE INSERT ON refused BEGIN SELECT RAISE(ROLLBACK, 'no'); END;",
        )
        .unwrap();
        SqliteKeys::open(file).unwrap()
    }

    /// SQLite ends a transaction by itself, the handler swallows that and goes on: whatever it writes then must not
    /// be committed, for the key is free, and a retry would write it again.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn t221_a_handler_that_goes_on_after_a_rollback_writes_nothing() {
        type Work = fn(&SqliteTransaction);
        let insert =
            |tx: &SqliteTransaction, body: &str| tx.execute("INSERT INTO orders VALUES (?1)", [body]);
        let works: [(&str, Work); 5] = [
            ("or rollback", |tx| {
                tx.execute("INSERT INTO orders VALUES ('same')", []).unwrap();
                tx.execute("INSERT OR ROLLBACK INTO orders VALUES ('same')", []).unwrap_err();
            }),
            ("raise", |tx| drop(tx.execute("INSERT INTO refused VALUES (1)", []).unwrap_err())),
            ("rollback", |tx| tx.execute_batch("ROLLBACK").unwrap()),
            ("commit", |tx| drop(tx.execute_batch("COMMIT").unwrap_err())),
            ("begin again", |tx| tx.execute_batch("ROLLBACK; BEGIN IMMEDIATE").unwrap()),
        ];
        for (name, work) in works {
            let dir = tempfile::tempdir().unwrap();
            let keys = shop(&dir);
            let handler = move |mut tx: KeyedSqlite| async move {
                let after = tx
                    .run(move |tx| {
                        insert(tx, "before").unwrap();
                        work(tx);
                        let after = insert(tx, "after");
                        let _ = tx.execute_batch("COMMIT"); // as of the transaction that it believes in
                        after.is_ok()
                    })
                    .await;
                (StatusCode::CREATED, format!("{after:?}"))
            };
            let layer = KeyedLayer::new(keys.clone()).transactional();
            let app = Router::new().route("/orders", post(handler)).layer(layer);
            for _ in 0..2 {
                let got = send(&app, order("key", "x")).await;
                assert!(got.status >= 500, "{name}: {got:?}");
                assert_eq!(
                    (orders(keys.path()), word(&keys, &request("key", "{}")).await),
                    (0, "unknown"),
                    "{name}"
                );
            }
        }
    }

    /// The other way: what ends by itself is committed, once; a savepoint of the handler's own too.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn t221_a_handler_that_leaves_the_transaction_alone_is_committed() {
        let dir = tempfile::tempdir().unwrap();
        let keys = shop(&dir);
        let handler = |mut tx: KeyedSqlite| async move {
            tx.run(|tx| {
                tx.execute_batch(
                    "SAVEPOINT mine; INSERT INTO orders VALUES ('undone'); ROLLBACK TO mine; \
                     INSERT INTO orders VALUES ('kept'); RELEASE mine",
                )
                .unwrap();
            })
            .await
            .unwrap();
            StatusCode::CREATED
        };
        let layer = KeyedLayer::new(keys.clone()).transactional();
        let app = Router::new().route("/orders", post(handler)).layer(layer);
        for _ in 0..2 {
            assert_eq!(send(&app, order("key", "x")).await.status, 201);
            assert_eq!((orders(keys.path()), word(&keys, &request("key", "{}")).await), (1, "done"));
        }
    }

    /// A statement is interrupted at the deadline, which rolls back; the closure runs on, on its thread.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn t221_what_a_closure_writes_after_its_deadline_is_not_kept() {
        let dir = tempfile::tempdir().unwrap();
        let keys = shop(&dir);
        let ended = Arc::new(Notify::new());
        let over = Arc::clone(&ended);
        let handler = move |mut tx: KeyedSqlite| {
            let over = Arc::clone(&over);
            async move {
                let done = tx.run(move |tx| {
                    tx.execute("INSERT INTO orders VALUES ('before')", []).unwrap();
                    // For ever, but for the interrupt.
                    let endless = "INSERT INTO orders WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c) \
                                   SELECT n FROM c WHERE n < 0";
                    tx.execute(endless, []).unwrap_err();
                    let after = tx.execute("INSERT INTO orders VALUES ('after')", []);
                    over.notify_one();
                    after.is_ok()
                });
                let _ = done.await;
                StatusCode::CREATED
            }
        };
        let layer = KeyedLayer::new(keys.clone()).transactional().timeout(Duration::from_secs(5));
        let app = Router::new().route("/orders", post(handler)).layer(layer);
        let got = send(&app, order("key", "x")).await;
        assert!(got.status >= 500, "{got:?}");
        tokio::time::timeout(Duration::from_secs(120), ended.notified()).await.expect("it is interrupted");
        until("the transaction is over", async || word(&keys, &request("key", "{}")).await == "unknown")
            .await;
        assert_eq!(orders(keys.path()), 0);
    }

    /// A client that got no answer asks what became of its key while the request still runs.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn t222_a_key_whose_handler_runs_in_a_file_is_running() {
        let dir = tempfile::tempdir().unwrap();
        let keys = shop(&dir);
        // Another handle on the same file, as `GET /v1/keys/{key}` has.
        let looks = SqliteKeys::open(keys.path()).unwrap();
        let (began, go) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let handler = {
            let (began, go) = (Arc::clone(&began), Arc::clone(&go));
            move |mut tx: KeyedSqlite| {
                let (began, go) = (Arc::clone(&began), Arc::clone(&go));
                async move {
                    let insert = tx.run(|tx| tx.execute("INSERT INTO orders VALUES (random())", []));
                    let in_time = insert.await.is_ok_and(|inserted| inserted.is_ok());
                    began.notify_one();
                    go.notified().await;
                    if in_time { StatusCode::CREATED } else { StatusCode::SERVICE_UNAVAILABLE }
                }
            }
        };
        let layer = KeyedLayer::new(keys.clone()).transactional();
        let app = Router::new().route("/orders", post(handler)).layer(layer);
        // On a machine that stands still its limit of five seconds may be over before it answers: then another one.
        let n = AtomicUsize::new(0);
        until("a request that ends in time", async || {
            let name = format!("key-{}", n.fetch_add(1, Ordering::SeqCst));
            let (app, its) = (app.clone(), order(&name, "x"));
            let request_sent = tokio::spawn(async move { send(&app, its).await });
            began.notified().await;
            let mut seen = Vec::new();
            for store in [&keys, &looks] {
                seen.push(store.get(None, &key(&name)).await);
            }
            go.notify_one();
            let in_time = request_sent.await.unwrap().status == 201;
            if in_time {
                for seen in seen {
                    assert_eq!(seen.unwrap(), KeyStatus::Running { until: None }, "it was open then");
                }
                assert_eq!(word(&looks, &request(&name, "{}")).await, "done");
            }
            in_time
        })
        .await;
    }

    /// Servers before 17 cannot limit a whole transaction; each statement is limited there.
    #[tokio::test]
    async fn t228_a_statement_of_a_request_has_the_limit_of_its_lease() {
        let (pool, schema) = (pool(2).await, fresh_schema());
        let keys = PgKeys::with_pool(pool, settings(&schema)).await.unwrap();
        let handler = |mut tx: KeyedTx| async move {
            let names = "current_setting('statement_timeout') || ' ' || current_setting('idle_in_transaction_session_timeout')";
            let limits: Result<String, _> =
                sqlx::query_scalar(AssertSqlSafe(format!("select {names}"))).fetch_one(&mut **tx).await;
            limits.unwrap()
        };
        let layer = KeyedLayer::new(keys).transactional().timeout(Duration::from_secs(77));
        let app = Router::new().route("/orders", post(handler)).layer(layer);
        assert_eq!(send(&app, order("key", "x")).await.body, "77s 77s");
    }
}
