//! Processes that are killed or stopped in a request, and several that share one database.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use hapax::keyed::{Ended, Resolution};
use hapax::testing::keyed::KeysHarness as _;

use super::*;
use crate::PgKeysHarness;

/// Runs one request in a child that dies at a crash point.
async fn die_at(point: &str, test: &str, store: &str, place: &str) {
    let mut command = child(test, store, place);
    command.env(hapax::testing::crash::VARIABLE, format!("{point}:1"));
    let output = command.output().await.unwrap();
    let signal = std::os::unix::process::ExitStatusExt::signal(&output.status);
    assert_eq!(signal, Some(9), "{}", String::from_utf8_lossy(&output.stdout));
}

/// kill -9 between the commit and the answer, and just before the commit; then the client retries.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t104_killed_between_commit_and_answer() {
    const TEST: &str = "keyed_layer::processes::t104_killed_between_commit_and_answer";
    if let Some((store, place)) = role() {
        let app = if store == "postgres" {
            pg_app(&place, KeyedLayer::new(pg_keys(&pool(2).await, &place).await).transactional())
        } else {
            sqlite_app(KeyedLayer::new(sqlite_keys(place.as_ref())).transactional())
        };
        let got = send(&app, order("key", "book")).await;
        println!("survived: {got:?}");
        return;
    }
    for (point, replayed) in [("keyed.commit.after", true), ("keyed.commit.before", false)] {
        let schema = fresh_schema();
        die_at(point, TEST, "postgres", &schema).await;
        let pool = pool(2).await;
        let keys = pg_keys(&pool, &schema).await;
        let got = post_until(&pg_app(&schema, KeyedLayer::new(keys).transactional()), "key", "book").await;
        assert_eq!((got.status, got.replayed()), (201, replayed), "{point}: {got:?}");
        assert!(got.body.ends_with(": book"));
        assert_eq!(ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await, 1, "{point}");

        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("shop.db");
        die_at(point, TEST, "sqlite", file.to_str().unwrap()).await;
        let app = sqlite_app(KeyedLayer::new(sqlite_keys(&file)).transactional());
        let got = post_until(&app, "key", "book").await;
        assert_eq!(
            (got.status, got.replayed(), got.body.as_str()),
            (201, replayed, "order 1: book"),
            "{point}"
        );
        let conn = rusqlite::Connection::open(&file).unwrap();
        let rows: i64 = conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
        assert_eq!(rows, 1, "{point}");
    }
}

/// Where a leased request dies: before its handler begins, between its effect and its answer being kept, after that.
const DEATHS: [(&str, &str); 5] = [
    ("rerun", "keyed.granted"),
    ("rerun", "keyed.handled"),
    ("rerun", "keyed.finished"),
    ("hold", "keyed.granted"),
    ("hold", "keyed.handled"),
];

fn rule_of(role: &str) -> AfterFailure {
    if role == "hold" { AfterFailure::Hold } else { AfterFailure::Rerun }
}

/// After a death: the key is not stuck. It runs again, or is held, as its rule says, once its lease has ended.
async fn is_not_stuck(app: &Router, rule: &str, point: &str, past_the_lease: impl AsyncFnOnce()) {
    let got = send(app, order("key", "book")).await;
    if point == "keyed.finished" {
        assert!(got.replayed() && got.status == 201, "{rule} {point}: {got:?}");
        return;
    }
    assert_eq!(got.code(), "key-running", "{rule} {point}: its lease has not ended");
    past_the_lease().await;
    let got = send(app, order("key", "book")).await;
    match rule {
        "hold" => assert_eq!(got.code(), "outcome-unknown", "{point}"),
        _ => assert!(!got.replayed() && got.status == 201, "{point}: {got:?}"),
    }
}

/// kill -9 of a leased request in a file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t105_a_killed_request_leaves_no_stuck_key() {
    const TEST: &str = "keyed_layer::processes::t105_a_killed_request_leaves_no_stuck_key";
    let app = |keys: SqliteKeys, rule| Elsewhere::default().app(KeyedLayer::new(keys).after_failure(rule));
    if let Some((store, place)) = role() {
        let keys = SqliteKeys::open(place).unwrap();
        let got = send(&app(keys, rule_of(&store)), order("key", "book")).await;
        println!("survived: {got:?}");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for (store, point) in DEATHS {
        let file = dir.path().join(format!("{store}-{point}.db"));
        die_at(point, TEST, store, file.to_str().unwrap()).await;
        // The store's clock decides when a lease is over.
        let begun =
            SqliteKeys::open(&file).unwrap().entry(None, &key("key")).await.unwrap().unwrap().begun_at;
        let clock = hapax::clock::ManualClock::new(begun);
        let app = app(SqliteKeys::open_with_clock(&file, Arc::new(clock.clone())).unwrap(), rule_of(store));
        is_not_stuck(&app, store, point, async || clock.advance(Duration::from_secs(31))).await;
    }
}

/// The same on a server, which has to notice that a client is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t105_a_killed_request_leaves_no_stuck_key_on_a_server() {
    const TEST: &str = "keyed_layer::processes::t105_a_killed_request_leaves_no_stuck_key_on_a_server";
    let app = |keys: PgKeys, rule| Elsewhere::default().app(KeyedLayer::new(keys).after_failure(rule));
    if let Some((rule, schema)) = role() {
        let keys = PgKeys::with_pool(pool(2).await, super::super::settings(&schema)).await.unwrap();
        println!("survived: {:?}", send(&app(keys, rule_of(&rule)), order("key", "book")).await);
        return;
    }
    for (rule, point) in DEATHS {
        let harness = PgKeysHarness::new().await; // its clock decides when a lease is over
        die_at(point, TEST, rule, &harness.schema).await;
        let app = app(harness.open().await, rule_of(rule));
        is_not_stuck(&app, rule, point, async || harness.advance(Duration::from_secs(31)).await).await;
    }
}

/// A process is stopped between a statement that locked a key and its COMMIT, and its connection stays open: the server
/// ends the transaction, and the key goes on. Every way to lock one: also those of `begin` and `finish` behind a pooler,
/// and of the question what became of a COMMIT.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t260_a_process_that_stops_before_a_commit_sticks_no_key() {
    const TEST: &str = "keyed_layer::processes::t260_a_process_that_stops_before_a_commit_sticks_no_key";
    let person = hapax::testing::keyed::person;
    if let Some((step, schema)) = role() {
        let mut settings = super::super::settings(&schema);
        settings.pooling = hapax::backend::postgres::Pooling::Transaction;
        let keys = PgKeys::with_pool(pool(2).await, settings).await.unwrap();
        let found = keys.entry(None, &key("key")).await.unwrap();
        let token = found.map_or(hapax::ledger::Token(0), |entry| entry.token);
        let lease = KeyLease { tenant: None, key: key("key"), token };
        let begin = hapax::testing::keyed::request("key", "{}");
        let ended = match step.as_str() {
            "extend" => keys.extend(&lease, PATIENCE).await,
            "release" => keys.release(&lease, Ended::Undone).await,
            "finish" => keys.finish(&lease, &hapax::testing::keyed::answer("17")).await,
            "resolve" => keys.resolve(&lease, &Resolution::Rerun, &person()).await,
            "begin" => keys.begin(&begin).await.map(drop),
            _ => keys.was_committed(&begin).await.map(drop),
        };
        println!("went on: {ended:?}");
        return;
    }
    for step in ["extend", "release", "finish", "resolve", "begin", "doubt"] {
        let (pool, schema) = (pool(4).await, fresh_schema());
        let keys = pg_keys(&pool, &schema).await;
        let mut begin = hapax::testing::keyed::request("key", "{}");
        begin.lease = Duration::from_millis(1);
        if step == "resolve" {
            begin.after_failure = AfterFailure::Hold;
        }
        if !matches!(step, "begin" | "doubt") {
            hapax::testing::keyed::first(&keys, &begin).await;
        }
        // The first statement is the look at the key.
        let point = if step == "doubt" { "keyed.doubt.end:1:stop" } else { "keyed.statement.commit:2:stop" };
        let mut child = child(TEST, step, &schema);
        let mut child = child.env(hapax::testing::crash::VARIABLE, point).spawn().unwrap();
        let locked = format!(
            "select count(*) from pg_stat_activity a join pg_locks l on l.pid = a.pid and l.mode = 'RowExclusiveLock' \
             where a.state = 'idle in transaction' and l.relation = '{schema}.keys'::regclass"
        );
        until(&format!("{step}: it is stopped"), async || ask::<i64>(&pool, locked.clone()).await > 0).await;
        let lease = keys.entry(None, &begin.key).await.unwrap();
        until(&format!("{step}: the key goes on"), async || {
            if let (Some(entry), "resolve") = (&lease, step) {
                let lease = KeyLease { tenant: None, key: key("key"), token: entry.token };
                let who = person();
                let resolve = keys.resolve(&lease, &Resolution::Rerun, &who);
                let _ = tokio::time::timeout(Duration::from_secs(2), resolve).await; // it waits for the lock
            }
            let next = hapax::testing::keyed::request("key", "{}");
            matches!(keys.begin(&next).await, Ok(hapax::keyed::Begun::First(_)))
        })
        .await;
        child.kill().await.unwrap();
    }
}

/// A second process: its own pool and its own layer, on the same keys.
async fn process(schema: &str, connections: u32) -> KeyedLayer<PgKeys> {
    KeyedLayer::new(pg_keys(&pool(connections).await, schema).await)
}

/// Requests wait for one of another process, with one connection for all of them, and ask the store now and then.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t13_requests_that_wait_for_another_process_need_no_connection() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    let (runs, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Semaphore::new(0)));
    let handler = {
        let (runs, go) = (Arc::clone(&runs), Arc::clone(&go));
        move |state: State<String>, tx: KeyedTx, body: String| async move {
            runs.fetch_add(1, Ordering::SeqCst);
            drop(go.acquire().await.unwrap());
            pg_order(state, tx, body).await
        }
    };
    let mut apps = Vec::new();
    for _ in 0..2 {
        let layer = process(&schema, 1).await.transactional().wait(PATIENCE).timeout(PATIENCE);
        let app = Router::new().route("/orders", post(handler.clone())).layer(layer);
        apps.push(app.with_state(schema.clone()));
    }
    let sent: Vec<_> = (0..20)
        .map(|n| {
            let app = apps[n % 2].clone();
            tokio::spawn(async move { send(&app, order("key", "book")).await })
        })
        .collect();
    // Each look at a key that an open transaction holds draws a token.
    let looks = async || ask::<i64>(&direct, format!("select last_value from {schema}.keys_token")).await;
    until("the other process has looked again and again", async || looks().await > 5).await;
    assert_eq!(runs.load(Ordering::SeqCst), 1, "and only looked");
    go.add_permits(1000);
    let mut replays = 0;
    for task in sent {
        let got = tokio::time::timeout(PATIENCE, task).await.expect("no deadlock").unwrap();
        assert_eq!((got.status, got.body.as_str()), (201, "order 1: book"), "{got:?}");
        replays += usize::from(got.replayed());
    }
    assert_eq!((replays, runs.load(Ordering::SeqCst)), (19, 1));
    assert_eq!(ask::<i64>(&direct, format!("select count(*) from {schema}.orders")).await, 1);
}

/// Of requests with one key only the one that runs has a permit. Others of its process, and those that wait for another process,
/// are in nobody's way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t13_requests_that_wait_leave_the_permits_to_others() {
    let (schema, go) = (fresh_schema(), Arc::new(tokio::sync::Semaphore::new(0)));
    let running = Arc::new(AtomicUsize::new(0));
    let handler = {
        let (running, go) = (Arc::clone(&running), Arc::clone(&go));
        move |state: State<String>, tx: KeyedTx, body: String| async move {
            if body == "slow" {
                running.fetch_add(1, Ordering::SeqCst);
                drop(go.acquire().await.unwrap());
            }
            pg_order(state, tx, body).await
        }
    };
    let mut apps = Vec::new();
    for permits in [2, 1] {
        let permits = Arc::new(tokio::sync::Semaphore::new(permits));
        let layer = process(&schema, 3).await.transactional().wait(PATIENCE).timeout(PATIENCE);
        let layer = layer.transactions_max(permits);
        apps.push(
            Router::new().route("/orders", post(handler.clone())).layer(layer).with_state(schema.clone()),
        );
    }
    let slow = |app: &Router| {
        let app = app.clone();
        tokio::spawn(async move { send(&app, order("key", "slow")).await })
    };
    let mut sent = vec![slow(&apps[0])];
    until("it runs", async || running.load(Ordering::SeqCst) == 1).await;
    sent.extend((0..20).map(|n| slow(&apps[n % 2])));
    for n in 0..5 {
        for app in &apps {
            let other = send(app, order(&format!("other-{n}"), "fast"));
            let got = tokio::time::timeout(PATIENCE, other).await.expect("a permit is free");
            assert_eq!(got.status, 201, "{got:?}");
        }
    }
    assert_eq!(running.load(Ordering::SeqCst), 1);
    go.add_permits(1);
    for task in sent {
        let got = tokio::time::timeout(PATIENCE, task).await.expect("an answer").unwrap();
        assert_eq!(got.status, 201, "{got:?}");
    }
    assert_eq!(running.load(Ordering::SeqCst), 1);
}

/// A hundred posts with one key at two processes with one database: one effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t100_a_hundred_posts_at_two_processes_have_one_effect() {
    for (transactional, wait) in [(true, Duration::ZERO), (true, PATIENCE), (false, PATIENCE)] {
        let (direct, schema, runs) = (pool(2).await, fresh_schema(), Elsewhere::default());
        let mut apps = Vec::new();
        for _ in 0..2 {
            let layer = process(&schema, 4).await.wait(wait).timeout(PATIENCE).lease(PATIENCE);
            let app = if transactional { pg_app(&schema, layer.transactional()) } else { runs.app(layer) };
            apps.push(app);
        }
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..100 {
            let app = apps[n % 2].clone();
            tasks.spawn(async move { post_until(&app, "key", "book").await });
        }
        let got = tasks.join_all().await;
        assert!(got.iter().all(|one| one.status == 201 && one.body == got[0].body), "{got:?}");
        assert_eq!(got.iter().filter(|got| !got.replayed()).count(), 1, "one of them ran");
        let rows = ask::<i64>(&direct, format!("select count(*) from {schema}.orders")).await;
        assert_eq!((rows, runs.runs()), if transactional { (1, 0) } else { (0, 1) });
    }
}

/// Says that a request has begun, and waits until it may end.
async fn begun(pool: sqlx::PgPool, schema: String) {
    run(&pool, format!("insert into {schema}.notes values ('begun')")).await;
    let may_end = format!("select count(*) from {schema}.notes where note = 'end'");
    while ask::<i64>(&pool, may_end.clone()).await == 0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn signal(child: &tokio::process::Child, name: &str) {
    let pid = child.id().expect("it runs").to_string();
    assert!(std::process::Command::new("kill").args([name, &pid]).status().unwrap().success());
}

/// A process is stopped in a request, for longer than its lease or its transaction may take, and goes on after another
/// process has done the request: it changes nothing, and does not say that it did.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t130_a_stopped_process_that_goes_on_late_changes_nothing() {
    const TEST: &str = "keyed_layer::processes::t130_a_stopped_process_that_goes_on_late_changes_nothing";
    const LIMIT: Duration = Duration::from_secs(3);
    let layer = |keys: PgKeys| KeyedLayer::new(keys).lease(LIMIT).timeout(LIMIT);
    if let Some((mode, schema)) = role() {
        let pool = pool(3).await;
        let keys = pg_keys(&pool, &schema).await;
        let (its_pool, its_schema) = (pool.clone(), schema.clone());
        let app = if mode == "leased" {
            let handler = move || async move {
                begun(its_pool, its_schema).await;
                (StatusCode::CREATED, "of the stopped one")
            };
            Router::new().route("/orders", post(handler)).layer(layer(keys))
        } else {
            let handler = move |state: State<String>, tx: KeyedTx, body: String| async move {
                let answer = pg_order(state, tx, body).await;
                begun(its_pool, its_schema).await;
                answer
            };
            let app = Router::new().route("/orders", post(handler)).layer(layer(keys).transactional());
            app.with_state(schema.clone())
        };
        let got = send(&app, order("key", "book")).await;
        run(&pool, format!("insert into {schema}.notes values ('status {}')", got.status)).await;
        return;
    }
    for mode in ["leased", "transactional"] {
        let (pool, schema) = (pool(4).await, fresh_schema());
        let keys = pg_keys(&pool, &schema).await;
        run(&pool, format!("create table {schema}.notes (note text)")).await;
        let notes = async |like: &str| {
            let sql = format!("select coalesce(max(note), '') from {schema}.notes where note like '{like}'");
            ask::<String>(&pool, sql).await
        };
        let mut child = child(TEST, mode, &schema).spawn().unwrap();
        until("it has begun", async || !notes("begun").await.is_empty()).await;
        signal(&child, "-STOP");
        let app = if mode == "leased" {
            Elsewhere::default().app(KeyedLayer::new(keys.clone()))
        } else {
            pg_app(&schema, KeyedLayer::new(keys.clone()).transactional())
        };
        let got = post_until(&app, "key", "book").await;
        assert_eq!((got.status, got.replayed()), (201, false), "{mode}: {got:?}");
        run(&pool, format!("insert into {schema}.notes values ('end')")).await;
        signal(&child, "-CONT");
        until("it has answered", async || !notes("status%").await.is_empty()).await;
        let notes_found = notes("status%").await;
        let refusals = ["status 409", "status 500", "status 503", "status 504"];
        assert!(refusals.contains(&notes_found.as_str()), "{mode}: {notes_found}");
        assert!(child.wait().await.unwrap().success());
        let again = send(&app, order("key", "book")).await;
        assert_eq!((&again.body, again.replayed()), (&got.body, true), "{mode}");
        let rows = ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await;
        assert_eq!(rows, i64::from(mode == "transactional"), "{mode}");
    }
}
