//! The layer in front of real handlers and stores.
#![allow(clippy::result_large_err, reason = "axum rejects with responses")]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use hapax::backend::postgres::PgKeys;
use hapax::backend::sqlite::SqliteKeys;
use hapax::keyed::{
    AfterFailure, Caller, IdempotencyKey, KeyLease, KeyedLayer, KeyedSqlite, KeyedTx, Keys, MemoryKeys,
};
use hapax::testing::keyed::key;
use hapax::{Tenant, Time};
use sqlx::AssertSqlSafe;
use tower::ServiceExt as _;

use crate::support::postgres::{ask, child, fresh_schema, pool, pool_to, role, run, until, url};
use crate::support::proxy::Proxy;

mod answers;
mod callers;
mod leases;
mod processes;
mod routes;
mod settings;
mod silence;
mod transactions;

pub const PATIENCE: Duration = Duration::from_secs(90);

/// What came back.
#[derive(Debug, Clone, PartialEq)]
pub struct Got {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: String,
}

impl Got {
    pub fn code(&self) -> String {
        assert_eq!(self.headers["content-type"], "application/problem+json", "{self:?}");
        let problem: serde_json::Value = serde_json::from_str(&self.body).expect("a problem is JSON");
        assert_eq!(problem["status"], self.status);
        assert!(problem["detail"].as_str().is_some_and(|detail| detail.len() > 20), "a sentence: {problem}");
        problem["code"].as_str().expect("a code").to_owned()
    }

    pub fn replayed(&self) -> bool {
        self.headers.contains_key("idempotency-replayed")
    }
}

pub async fn send(app: &Router, request: Request<Body>) -> Got {
    let response = app.clone().oneshot(request).await.unwrap();
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    Got {
        status: parts.status.as_u16(),
        headers: parts.headers,
        body: String::from_utf8_lossy(&body).into_owned(),
    }
}

pub fn order(key: &str, body: &str) -> Request<Body> {
    Request::post("/orders").header("Idempotency-Key", key).body(Body::from(body.to_owned())).unwrap()
}

/// Posts until the answer is not "it runs".
pub async fn post_until(app: &Router, key: &str, body: &str) -> Got {
    let started = std::time::Instant::now();
    loop {
        let got = send(app, order(key, body)).await;
        if got.status != 409 && got.status != 503 {
            return got;
        }
        assert!(started.elapsed() < PATIENCE, "{got:?}");
        assert_eq!(got.headers["retry-after"], "1");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// What a handler does, by the body of its request.
pub fn answer_to(body: &str, number: i64) -> Response {
    match body {
        "fail" => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        "refuse" => (StatusCode::UNPROCESSABLE_ENTITY, "no such item").into_response(),
        "busy" => (StatusCode::CONFLICT, "not now").into_response(),
        "large" => "x".repeat(5000).into_response(),
        "stream" => ([("content-type", "text/event-stream")], "data: 1\n\n").into_response(),
        "panic" => panic!("as the test asks"),
        _ => {
            let headers = [
                ("location", format!("/orders/{number}")),
                ("set-cookie", "session=secret".to_owned()),
                ("x-trace", "abc".to_owned()),
            ];
            (StatusCode::CREATED, headers, format!("order {number}: {body}")).into_response()
        }
    }
}

/// A service whose effect is elsewhere: it counts its runs.
#[derive(Clone, Default)]
pub struct Elsewhere(Arc<AtomicUsize>);

impl Elsewhere {
    pub fn runs(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }

    fn app<K: Keys + Clone>(&self, layer: KeyedLayer<K>) -> Router {
        let handler = |State(runs): State<Elsewhere>, body: String| async move {
            let run = runs.0.fetch_add(1, Ordering::SeqCst) + 1;
            // Long enough for requests with the same key to meet it while it runs.
            tokio::time::sleep(Duration::from_millis(20)).await;
            if let Ok(status) = body.parse::<u16>() {
                return (StatusCode::from_u16(status).unwrap(), format!("run {run}")).into_response();
            }
            answer_to(&body, run as i64)
        };
        Router::new()
            .route("/orders", post(handler))
            .route("/orders/{id}", post(handler))
            .layer(layer)
            .with_state(self.clone())
    }
}

/// A shop whose rows are in the database of its keys.
pub struct Shop {
    pub app: Router,
    pub keys: Arc<dyn Keys>,
    rows: Rows,
}

enum Rows {
    Pg(sqlx::PgPool, String),
    Sqlite(std::path::PathBuf, #[allow(dead_code)] Option<tempfile::TempDir>),
    Elsewhere(Elsewhere),
}

impl Shop {
    pub async fn rows(&self) -> i64 {
        match &self.rows {
            Rows::Pg(pool, schema) => ask(pool, format!("select count(*) from {schema}.orders")).await,
            Rows::Sqlite(path, _) => {
                let conn = rusqlite::Connection::open(path).unwrap();
                conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
            }
            Rows::Elsewhere(runs) => runs.runs() as i64,
        }
    }
}

fn configured<K: Keys + Clone>(keys: K, wait: Duration) -> KeyedLayer<K> {
    KeyedLayer::new(keys).required().wait(wait).bytes_max(4096, 4096)
}

pub async fn pg_order(State(schema): State<String>, mut tx: KeyedTx, body: String) -> Response {
    let sql = format!("insert into {schema}.orders (body) values ($1) returning id");
    let number: i64 = sqlx::query_scalar(AssertSqlSafe(sql)).bind(&body).fetch_one(&mut **tx).await.unwrap();
    if body == "undo" {
        tx.rollback();
    }
    answer_to(&body, number)
}

pub fn pg_app(schema: &str, layer: KeyedLayer<PgKeys>) -> Router {
    Router::new().route("/orders", post(pg_order)).layer(layer).with_state(schema.to_owned())
}

/// Keys and a table of orders in a fresh schema.
pub async fn pg_keys(pool: &sqlx::PgPool, schema: &str) -> PgKeys {
    let keys = PgKeys::with_pool(pool.clone(), super::settings(schema)).await.unwrap();
    let table =
        format!("create table if not exists {schema}.orders (id bigserial primary key, body text not null)");
    run(pool, table).await;
    keys
}

pub async fn pg_shop(connections: u32, wait: Duration) -> Shop {
    let (pool, schema) = (pool(connections).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let app = pg_app(&schema, configured(keys.clone(), wait).transactional());
    Shop { app, keys: Arc::new(keys), rows: Rows::Pg(pool, schema) }
}

pub async fn sqlite_order(mut tx: KeyedSqlite, body: String) -> Response {
    let text = body.clone();
    let inserted = tx.run(move |tx| {
        tx.execute("INSERT INTO orders (body) VALUES (?1)", [text]).map(|_| tx.last_insert_rowid())
    });
    let number = inserted.await.unwrap().unwrap();
    if body == "undo" {
        tx.rollback();
    }
    answer_to(&body, number)
}

pub fn sqlite_keys(file: &std::path::Path) -> SqliteKeys {
    let keys = SqliteKeys::open(file).unwrap();
    let conn = rusqlite::Connection::open(file).unwrap();
    conn.busy_timeout(Duration::from_secs(120)).unwrap();
    conn.execute_batch("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, body TEXT NOT NULL)")
        .unwrap();
    keys
}

pub fn sqlite_app(layer: KeyedLayer<SqliteKeys>) -> Router {
    Router::new().route("/orders", post(sqlite_order)).layer(layer)
}

pub fn sqlite_shop(wait: Duration) -> Shop {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("shop.db");
    let keys = sqlite_keys(&file);
    let app = sqlite_app(configured(keys.clone(), wait).transactional());
    Shop { app, keys: Arc::new(keys), rows: Rows::Sqlite(file, Some(dir)) }
}

pub fn memory_shop(wait: Duration) -> (Shop, Elsewhere) {
    let (keys, runs) = (MemoryKeys::default(), Elsewhere::default());
    let app = runs.app(configured(keys.clone(), wait));
    (Shop { app, keys: Arc::new(keys), rows: Rows::Elsewhere(runs.clone()) }, runs)
}

/// One in each store.
pub async fn shops(wait: Duration) -> [Shop; 3] {
    [pg_shop(8, wait).await, sqlite_shop(wait), memory_shop(wait).0]
}

/// A hundred at once: one effect; and everybody gets the one answer, at once or after 409s that end in it.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t100_a_hundred_posts_with_one_key_have_one_effect() {
    for wait in [Duration::ZERO, PATIENCE] {
        for shop in shops(wait).await {
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..100 {
                let app = shop.app.clone();
                tasks.spawn(async move {
                    let first = send(&app, order("\"key\"", "book")).await;
                    (first.status, post_until(&app, "key", "book").await)
                });
            }
            let got = tasks.join_all().await;
            let backend = shop.keys.capabilities().backend;
            assert_eq!(shop.rows().await, 1, "{backend}");
            assert!(got.iter().all(|(_, end)| (end.status, &end.body) == (got[0].1.status, &got[0].1.body)));
            assert!(got[0].1.replayed() && got[0].1.status < 300, "{:?}", got[0].1);
            if !wait.is_zero() {
                assert!(got.iter().all(|(first, _)| *first < 300), "{backend}: nobody had to ask again");
            }
        }
    }
}

/// What is sent again is the original: body, status and the headers that belong to it.
#[tokio::test]
async fn t107_a_replay_is_the_original_without_what_belonged_to_one_exchange() {
    for shop in shops(Duration::ZERO).await {
        let first = send(&shop.app, order("key", "book")).await;
        assert_eq!((first.status, first.replayed()), (201, false));
        assert_eq!(first.headers["set-cookie"], "session=secret", "the first answer is sent as it is");
        assert_eq!(first.headers["idempotency-key-retention"], "2592000");
        let again = send(&shop.app, order("\"key\"", "book")).await;
        assert_eq!((again.status, &again.body), (201, &first.body));
        assert_eq!(again.headers["idempotency-replayed"], "true");
        for kept in ["location", "content-type"] {
            assert_eq!(again.headers[kept], first.headers[kept]);
        }
        assert!(!again.headers.contains_key("set-cookie") && !again.headers.contains_key("x-trace"));
        assert_eq!(shop.rows().await, 1);
    }
    let runs = Elsewhere::default();
    let app = runs.app(KeyedLayer::new(MemoryKeys::default()).replay_status(StatusCode::OK));
    assert_eq!(send(&app, order("key", "book")).await.status, 201);
    assert_eq!(send(&app, order("key", "book")).await.status, 200, "as the route wants it");
    assert_eq!(send(&app, order("other", "422")).await.status, 422);
    assert_eq!(send(&app, order("other", "422")).await.status, 422, "a refusal stays one");
}

/// Success and definite refusals are kept. What says "later", or that nothing is known, is not.
#[tokio::test]
async fn t108_only_definite_answers_are_kept() {
    let (shop, runs) = memory_shop(Duration::ZERO);
    let mut expected = 0;
    for status in [200, 201, 202, 204, 303, 400, 402, 404, 405, 410, 422, 451] {
        expected += 1;
        for _ in 0..2 {
            let got = send(&shop.app, order(&format!("key-{status}"), &status.to_string())).await;
            assert_eq!(got.status, status);
        }
        assert_eq!(runs.runs(), expected, "{status} is kept");
    }
    let about_the_caller_or_the_time = [401, 403, 407, 408, 409, 412, 421, 425, 428, 429];
    let about_the_headers = [406, 411, 413, 414, 415, 417, 426, 431];
    let failures = [500, 502, 503, 504];
    for status in [&about_the_caller_or_the_time[..], &about_the_headers, &failures].concat() {
        for _ in 0..2 {
            expected += 1;
            let got = send(&shop.app, order(&format!("key-{status}"), &status.to_string())).await;
            assert_eq!((got.status, got.replayed()), (status, false));
        }
        assert_eq!(runs.runs(), expected, "{status} is not kept");
    }
}

#[tokio::test]
async fn t109_bad_requests_are_refused_with_a_sentence_and_change_nothing() {
    for shop in shops(Duration::ZERO).await {
        let bare = || Request::post("/orders");
        let long = "k".repeat(256);
        let bad = [
            (bare().body(Body::empty()), 400, "key-missing"),
            (
                bare().header("Idempotency-Key", "a").header("Idempotency-Key", "a").body(Body::empty()),
                400,
                "key-invalid",
            ),
            (bare().header("Idempotency-Key", "").body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", "a, b").body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", "\"a").body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", "a b").body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", "\u{e9}").body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", long).body(Body::empty()), 400, "key-invalid"),
            (bare().header("Idempotency-Key", "k").body(Body::from(vec![b'x'; 4097])), 413, "body-too-large"),
        ];
        for (request, status, code) in bad {
            let got = send(&shop.app, request.unwrap()).await;
            assert_eq!((got.status, got.code().as_str()), (status, code));
        }
        assert_eq!(shop.rows().await, 0);
        assert!(shop.keys.list(&hapax::keyed::ListKeys::default()).await.unwrap().is_empty());
    }
    // Without `required`, what has no key passes; and what only reads always does.
    let runs = Elsewhere::default();
    let app = runs.app(KeyedLayer::new(MemoryKeys::default()));
    assert_eq!(send(&app, Request::post("/orders").body(Body::from("x")).unwrap()).await.status, 201);
    let get = Request::get("/orders").header("Idempotency-Key", "k").body(Body::empty()).unwrap();
    assert_eq!(send(&app, get).await.status, 405, "the router's own word");
}

fn by_headers(parts: &axum::http::request::Parts) -> Result<Caller, Response> {
    let of = |name: &str| parts.headers.get(name).map(|value| value.to_str().unwrap().to_owned());
    let Some(principal) = of("x-user") else {
        return Err(StatusCode::UNAUTHORIZED.into_response());
    };
    Ok(Caller {
        tenant: of("x-tenant").map(|tenant| Tenant::new(tenant).unwrap()),
        principal: Some(principal),
    })
}

fn of(request: Request<Body>, tenant: &str, user: &str) -> Request<Body> {
    let (mut parts, body) = request.into_parts();
    parts.headers.insert("x-tenant", tenant.parse().unwrap());
    parts.headers.insert("x-user", user.parse().unwrap());
    Request::from_parts(parts, body)
}

/// Two tenants with one key are two keys; and nobody unknown learns anything.
#[tokio::test]
async fn t04_equal_keys_of_two_tenants_never_meet() {
    let (pool, schema, dir) = (pool(4).await, fresh_schema(), tempfile::tempdir().unwrap());
    let pg =
        pg_app(&schema, KeyedLayer::new(pg_keys(&pool, &schema).await).transactional().caller(by_headers));
    let file = sqlite_keys(&dir.path().join("shop.db"));
    let sqlite = sqlite_app(KeyedLayer::new(file).transactional().caller(by_headers));
    let memory = Elsewhere::default().app(KeyedLayer::new(MemoryKeys::default()).caller(by_headers));
    for app in [pg, sqlite, memory] {
        let acme = send(&app, of(order("key", "acme's secret"), "acme", "ann")).await;
        assert_eq!(acme.status, 201);
        // The other tenant's first request is a first request, whatever its body; no conflict tells it of the other.
        let other = send(&app, of(order("key", "another body"), "umbrella", "ann")).await;
        assert_eq!((other.status, other.replayed()), (201, false));
        assert!(!other.body.contains("acme"), "{other:?}");
        let again = send(&app, of(order("key", "acme's secret"), "acme", "ann")).await;
        assert_eq!((&again.body, again.replayed()), (&acme.body, true));
        let unknown = send(&app, order("key", "acme's secret")).await;
        assert_eq!((unknown.status, unknown.body.as_str()), (401, ""), "who asks comes before what is known");
        let unknown = send(&app, order("a bad key", "x")).await;
        assert_eq!(unknown.status, 401, "and before the key's syntax");
    }
}

/// A key that is used for another request is refused, without a word of the stored answer; which field differs is named
/// only to whom the key belongs, and only where that is wanted.
#[tokio::test]
async fn t05_reused_key_with_another_body_is_refused() {
    let runs = Elsewhere::default();
    let app = runs.app(KeyedLayer::new(MemoryKeys::default()).caller(by_headers).tell_fields());
    let sent = |key: &str, body: &str, user: &str| of(order(key, body), "acme", user);
    let first = send(&app, sent("key", r#"{"item": 1, "card": "4111"}"#, "ann")).await;
    assert_eq!(first.status, 201);
    let other = send(&app, sent("key", r#"{"item": 1, "card": "4242"}"#, "ann")).await;
    assert_eq!((other.status, other.code().as_str()), (422, "key-mismatch"));
    assert!(other.body.contains(r#""fields":["/card"]"#) && !other.body.contains("4111"), "{}", other.body);
    let foreign = send(&app, sent("key", r#"{"item": 1, "card": "4111"}"#, "bob")).await;
    assert_eq!((foreign.status, foreign.code().as_str()), (422, "key-mismatch"));
    assert!(!foreign.body.contains("fields") && !foreign.body.contains("order"), "{}", foreign.body);
    // The path as sent, not the pattern of the route.
    let post_to = |path: &str| {
        let request = Request::post(path).header("Idempotency-Key", "k2").body(Body::from("x")).unwrap();
        of(request, "acme", "ann")
    };
    assert_eq!(send(&app, post_to("/orders/1")).await.status, 201);
    for path in ["/orders/2", "/orders/1?dry=true"] {
        assert_eq!(send(&app, post_to(path)).await.code(), "key-mismatch", "{path}");
    }
    assert_eq!(runs.runs(), 2);
    // Nested routers strip their prefix; the request is still another.
    let layer = KeyedLayer::new(MemoryKeys::default());
    let nested = Router::new()
        .nest("/a", Elsewhere::default().app(layer.clone()))
        .nest("/b", Elsewhere::default().app(layer));
    let post_to =
        |path: &str| Request::post(path).header("Idempotency-Key", "k").body(Body::from("x")).unwrap();
    assert_eq!(send(&nested, post_to("/a/orders")).await.status, 201);
    assert_eq!(send(&nested, post_to("/b/orders")).await.code(), "key-mismatch");
    // On request, JSON that says the same is the same.
    let app = Elsewhere::default().app(KeyedLayer::new(MemoryKeys::default()).canonical_json());
    assert_eq!(send(&app, order("key", r#"{"a": 1, "b": 2}"#)).await.status, 201);
    assert!(send(&app, order("key", r#"{"b":2,"a":1}"#)).await.replayed());
}

/// Keys go after their retention, and what was written stays. A forgotten UUIDv7 is gone, never new; another key is new.
#[tokio::test]
async fn t06_keys_expire_and_records_stay() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("shop.db");
    sqlite_keys(&file);
    let clock = hapax::clock::ManualClock::new(Time::parse("2026-03-04T12:00:00Z").unwrap());
    let keys = SqliteKeys::open_with_clock(&file, Arc::new(clock.clone())).unwrap();
    let app = sqlite_app(KeyedLayer::new(keys.clone()).transactional());
    let v7 = hapax::testing::keyed::v7(&keys, Duration::ZERO, false).await;
    let first = send(&app, order(&v7, "book")).await;
    assert_eq!(first.status, 201);
    assert_eq!(send(&app, order("order-17", "book")).await.status, 201);
    let rows = || -> i64 {
        let conn = rusqlite::Connection::open(&file).unwrap();
        conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
    };
    let mut gone = 0;
    for _ in 0..4 {
        clock.advance(Duration::from_hours(24 * 10));
        gone += keys.sweep(&hapax::keyed::KeySweep::new(hapax::keyed::RETENTION)).await.unwrap().keys;
    }
    assert_eq!((gone, rows()), (2, 2), "the records stay");
    let late = send(&app, order(&v7, "book")).await;
    assert_eq!((late.status, late.code().as_str()), (410, "key-expired"));
    assert_eq!(rows(), 2, "never run as new");
    assert_eq!(send(&app, order("order-17", "book")).await.status, 201);
    assert_eq!(rows(), 3, "protection ends with the retention, as documented");
}

/// A client hangs up while its request runs: the request ends all the same, and the retry gets its answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t110_a_client_that_hangs_up_cancels_nothing() {
    let (pool, schema) = (pool(4).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let (runs, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Notify::new()));
    let handler = {
        let (schema, runs, go) = (schema.clone(), Arc::clone(&runs), Arc::clone(&go));
        move |mut tx: KeyedTx| async move {
            let sql = format!("insert into {schema}.orders (body) values ('x')");
            sqlx::query(AssertSqlSafe(sql)).execute(&mut **tx).await.unwrap();
            runs.fetch_add(1, Ordering::SeqCst);
            go.notified().await;
            "done"
        }
    };
    let app =
        Router::new().route("/orders", post(handler)).layer(KeyedLayer::new(keys.clone()).transactional());
    let client = tokio::spawn({
        let app = app.clone();
        async move { send(&app, order("key", "x")).await }
    });
    until("the handler runs", async || runs.load(Ordering::SeqCst) == 1).await;
    client.abort();
    assert!(client.await.unwrap_err().is_cancelled());
    assert_eq!(send(&app, order("key", "x")).await.code(), "key-running", "it runs on");
    go.notify_one();
    until("it is done", async || {
        matches!(keys.get(None, &key("key")).await.unwrap(), hapax::keyed::KeyStatus::Done(_))
    })
    .await;
    let got = send(&app, order("key", "x")).await;
    assert_eq!((got.body.as_str(), got.replayed(), runs.load(Ordering::SeqCst)), ("done", true, 1));
    assert_eq!(ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await, 1);
}

/// Those who wait for a running request hold no connection: a pool of one is enough for all of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t13_requests_that_wait_need_no_connection() {
    let shop = pg_shop(1, PATIENCE).await;
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let app = shop.app.clone();
            tokio::spawn(async move { send(&app, order("key", "book")).await })
        })
        .collect();
    let mut replays = 0;
    for task in tasks {
        let got = tokio::time::timeout(PATIENCE, task).await.expect("no deadlock").unwrap();
        assert_eq!(got.status, 201, "{got:?}");
        replays += usize::from(got.replayed());
    }
    assert_eq!((replays, shop.rows().await), (19, 1));
}

/// A request that failed, under `hold`, is never run again by itself.
#[tokio::test]
async fn t111_a_held_request_waits_for_a_person() {
    let (keys, runs) = (MemoryKeys::default(), Elsewhere::default());
    let app = runs.app(KeyedLayer::new(keys.clone()).after_failure(AfterFailure::Hold));
    for (body, status) in [("fail", 500), ("panic", 500)] {
        let before = runs.runs();
        assert_eq!(send(&app, order(body, body)).await.status, status);
        for _ in 0..2 {
            assert_eq!(send(&app, order(body, body)).await.code(), "outcome-unknown");
        }
        assert_eq!(runs.runs(), before + 1);
    }
    assert_eq!(send(&app, order("busy", "busy")).await.status, 409);
    let runs_before = runs.runs();
    assert_eq!(
        send(&app, order("busy", "busy")).await.body,
        "not now",
        "it did nothing, so it may run again"
    );
    assert_eq!(runs.runs(), runs_before + 1);
    let open = keys.list(&hapax::keyed::ListKeys { open_only: true, ..Default::default() }).await.unwrap();
    let held = open.iter().find(|entry| entry.key == key("fail")).unwrap();
    let lease = KeyLease { tenant: None, key: held.key.clone(), token: held.token };
    let known = hapax::keyed::Answer::new(201, "it was done");
    keys.resolve(&lease, &hapax::keyed::Resolution::Answer(known), &hapax::testing::keyed::person())
        .await
        .unwrap();
    let got = send(&app, order("fail", "fail")).await;
    assert_eq!((got.status, got.body.as_str()), (201, "it was done"));
}

/// The handler can pass the key and the token on.
#[tokio::test]
async fn a_handler_gets_its_key_and_token() {
    let handler = |axum::Extension(lease): axum::Extension<KeyLease>| async move {
        format!("{} {}", lease.key, lease.token)
    };
    let app: Router =
        Router::new().route("/orders", post(handler)).layer(KeyedLayer::new(MemoryKeys::default()));
    assert_eq!(send(&app, order("key", "x")).await.body, "key 1");
}

/// An answer that cannot be kept is refused, not cut; and its request does not run again.
#[tokio::test]
async fn t112_streams_and_large_answers_are_bounded() {
    for shop in shops(Duration::ZERO).await {
        let transactional = shop.keys.capabilities().transactional;
        for (n, body) in ["large", "stream"].into_iter().enumerate() {
            for _ in 0..2 {
                let got = send(&shop.app, order(body, body)).await;
                assert_eq!((got.status, got.code().as_str()), (500, "answer-too-large"));
            }
            let rows = if transactional { 0 } else { n as i64 + 1 };
            assert_eq!(shop.rows().await, rows, "undone, or done once");
        }
    }
}

/// Keys made by a client before its first try.
#[test]
fn a_key_is_made_without_a_store() {
    assert!(IdempotencyKey::now_v7().time().is_some());
}
