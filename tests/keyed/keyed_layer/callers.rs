//! Who asks: an answer never goes to another caller.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use std::sync::Mutex;

use axum::http::HeaderValue;
use hapax::backend::postgres::Pooling;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

use super::*;

fn with(headers: &[(&'static str, &[u8])]) -> Request<Body> {
    let mut request = order("key", "book");
    for (name, value) in headers {
        request.headers_mut().append(*name, HeaderValue::from_bytes(value).unwrap());
    }
    request
}

/// Whatever says who asks by default counts, with all of its values and bytes.
#[tokio::test]
async fn t214_callers_with_other_credentials_are_other_callers() {
    let callers: [&[(&'static str, &[u8])]; 10] = [
        &[],
        &[("authorization", b"Bearer ann")],
        &[("authorization", b"Bearer bob")],
        &[("authorization", b"\xff\xfe")],
        &[("authorization", b"\xfe\xff")],
        &[("authorization", b"Bearer ann"), ("authorization", b"Bearer bob")],
        &[("cookie", b"session=ann")],
        &[("cookie", b"session=bob")],
        &[("cookie", b"theme=dark"), ("cookie", b"session=bob")],
        &[("x-api-key", b"ann")],
    ];
    for (n, first) in callers.iter().enumerate() {
        let runs = Elsewhere::default();
        let app = runs.app(KeyedLayer::new(MemoryKeys::default()));
        assert_eq!(send(&app, with(first)).await.status, 201);
        assert!(send(&app, with(first)).await.replayed(), "a retry of the same caller");
        for other in callers.iter().enumerate().filter(|(m, _)| *m != n).map(|(_, other)| other) {
            let got = send(&app, with(other)).await;
            assert_eq!((got.status, got.code().as_str()), (422, "key-mismatch"), "{first:?} {other:?}");
            assert!(!got.body.contains("order"), "{}", got.body);
        }
        assert_eq!(runs.runs(), 1);
    }
    let app = Elsewhere::default().app(KeyedLayer::new(MemoryKeys::default()).anonymous());
    assert_eq!(send(&app, with(callers[6])).await.status, 201);
    assert!(send(&app, with(callers[7])).await.replayed(), "everybody is one caller, on request");
}

/// A caller whose token was replaced looks like another one. It must not be told to make a new key: that would write
/// twice.
#[tokio::test]
async fn t215_another_caller_is_not_told_to_make_a_new_key() {
    let app = Elsewhere::default().app(KeyedLayer::new(MemoryKeys::default()).tell_fields());
    assert_eq!(send(&app, with(&[("authorization", b"Bearer old")])).await.status, 201);
    let mut other_body = order("key", "pen");
    other_body.headers_mut().insert("authorization", HeaderValue::from_static("Bearer new"));
    for request in [with(&[("authorization", b"Bearer new")]), other_body] {
        let got = send(&app, request).await;
        assert_eq!((got.status, got.code().as_str()), (422, "key-mismatch"));
        let problem: serde_json::Value = serde_json::from_str(&got.body).unwrap();
        assert_eq!(problem["differs"], serde_json::json!(["principal"]));
        assert!(problem.get("fields").is_none(), "nothing of the other's request: {problem}");
        assert!(problem["detail"].as_str().unwrap().contains("find out"), "{problem}");
    }
    let mut own = order("key", "pen");
    own.headers_mut().insert("authorization", HeaderValue::from_static("Bearer old"));
    let problem: serde_json::Value = serde_json::from_str(&send(&app, own).await.body).unwrap();
    assert!(problem.get("differs").is_none() && problem["detail"].as_str().unwrap().contains("new key"));
}

/// What was logged, as a subscriber formats it.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<String>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Fields<'l>(&'l mut String);
        impl tracing::field::Visit for Fields<'_> {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                use std::fmt::Write as _;
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        event.record(&mut Fields(&mut self.0.lock().unwrap()));
    }
}

/// The names of fields are the client's: they cannot write lines into the log.
#[tokio::test]
async fn t216_the_names_of_fields_forge_no_line_of_the_log() {
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let app = Elsewhere::default().app(KeyedLayer::new(MemoryKeys::default()));
    assert_eq!(send(&app, order("key", r#"{"a": 1}"#)).await.status, 201);
    // A line that another test's thread has met first is remembered as one that nobody listens to.
    assert_eq!(send(&app, order("key", r#"{"a": 2}"#)).await.code(), "key-mismatch");
    tracing::callsite::rebuild_interest_cache();
    let forged = r#"{"a": 1, "\n2026-03-04 ERROR forged \u001b[2J": 2}"#;
    assert_eq!(send(&app, order("key", forged)).await.code(), "key-mismatch");
    let lines = lines.0.lock().unwrap();
    assert!(lines.contains("forged"), "it is logged: {lines}");
    assert!(!lines.contains(['\n', '\u{1b}']), "{lines:?}");
}

/// A handler's own statements run as the caller's tenant, where row security asks for it; also after an undo.
#[tokio::test]
async fn t219_the_handlers_statements_run_as_the_callers_tenant() {
    let (pool, schema) = (pool(4).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let role = format!("app_{schema}");
    run(
        &pool,
        format!(
            "create role {role}; grant usage on schema {schema} to {role}; \
             create table {schema}.sales (tenant text not null default current_setting('hapax.tenant', true)); \
             alter table {schema}.sales enable row level security; \
             create policy own on {schema}.sales using (tenant = current_setting('hapax.tenant', true)); \
             grant select, insert on {schema}.sales to {role}"
        ),
    )
    .await;
    let handler = {
        let (schema, role) = (schema.clone(), role.clone());
        move |mut tx: KeyedTx| async move {
            let statement = |sql: String| sqlx::query(AssertSqlSafe(sql));
            statement(format!("set local role {role}")).execute(&mut **tx).await.unwrap();
            statement(format!("insert into {schema}.sales default values")).execute(&mut **tx).await.unwrap();
            let seen = sqlx::query_scalar(AssertSqlSafe(format!("select count(*) from {schema}.sales")));
            let seen: i64 = seen.fetch_one(&mut **tx).await.unwrap();
            statement("reset role".to_owned()).execute(&mut **tx).await.unwrap();
            format!("sees {seen}")
        }
    };
    let layer = KeyedLayer::new(keys).transactional().caller(by_headers);
    let app = Router::new().route("/orders", post(handler)).layer(layer);
    for (tenant, key, seen) in [("acme", "a", "sees 1"), ("acme", "b", "sees 2"), ("umbrella", "a", "sees 1")]
    {
        let got = send(&app, of(order(key, "x"), tenant, "ann")).await;
        assert_eq!((got.status, got.body.as_str()), (200, seen), "{tenant} {key}");
    }
    run(&pool, format!("drop owned by {role}; drop role {role}")).await;
}

/// A request of a tenant names it to its transaction with a statement that the connection keeps prepared: one question to the server
/// instead of two. Behind a pooler none is kept.
#[tokio::test]
async fn t455_naming_the_tenant_of_a_request_is_prepared_once() {
    for (pooling, kept) in [(Pooling::Session, 1), (Pooling::Transaction, 0)] {
        let pool = pool(1).await;
        let mut settings = super::super::settings(&fresh_schema());
        settings.pooling = pooling;
        let keys = PgKeys::with_pool(pool.clone(), settings).await.unwrap();
        let layer = KeyedLayer::new(keys).transactional().caller(by_headers);
        let app = Router::new().route("/orders", post(|_: KeyedTx| async { "done" })).layer(layer);
        for key in ["a", "b"] {
            assert_eq!(send(&app, of(order(key, "x"), "acme", "ann")).await.status, 200);
        }
        let prepared = "select count(*) from pg_prepared_statements where statement like 'select pg_catalog.set_config%'";
        assert_eq!(ask::<i64>(&pool, prepared).await, kept, "{pooling:?}");
    }
}

/// What one tenant is told does not depend on another tenant's key of the same name, whatever its state: the answers are
/// the same, and so is what the service and its database say to each other, byte for byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t274_another_tenants_key_changes_nothing_that_can_be_seen() {
    let (direct, schema) = (pool(4).await, fresh_schema());
    let owner = pg_keys(&direct, &schema).await;
    let proxy = Proxy::new(&url()).await;
    let mut settings = super::super::settings(&schema);
    settings.pool_max = 1;
    let keys = PgKeys::connect(&proxy.url(&url()), settings).await.unwrap();
    // One process that answers at once, and one whose requests run until they are told to end.
    let (begun, go) = (Arc::new(AtomicUsize::new(0)), Arc::new(tokio::sync::Notify::new()));
    let app = |keys: &PgKeys, mode: &str, waits: bool| {
        let (begun, go) = (Arc::clone(&begun), Arc::clone(&go));
        let work = move || async move {
            if waits {
                begun.fetch_add(1, Ordering::SeqCst);
                go.notified().await;
            }
            (StatusCode::CREATED, "done")
        };
        let layer = KeyedLayer::new(keys.clone()).caller(by_headers);
        if mode == "leased" {
            return Router::new().route("/orders", post(work)).layer(layer);
        }
        let handler = move |_tx: KeyedTx| work();
        Router::new().route("/orders", post(handler)).layer(layer.transactional())
    };
    for mode in ["transactional", "leased"] {
        let (app, holder) = (app(&keys, mode, false), app(&owner, mode, true));
        // All that umbrella is told about its key: first, replayed, another body, running.
        let seen = async |name: &str| {
            let mut seen = Vec::new();
            let sent = async |name: &str, body: &str| {
                until("the connection is idle", async || keys.pool().num_idle() == 1).await;
                let before = proxy.carried();
                let got = send(&app, of(order(name, body), "umbrella", "ann")).await;
                until("the connection is idle", async || keys.pool().num_idle() == 1).await;
                let after = proxy.carried();
                (got, (after.0 - before.0, after.1 - before.1))
            };
            for body in ["book", "book", "pen"] {
                seen.push(sent(name, body).await);
            }
            let running = format!("{name}r");
            let (holder, posted) = (holder.clone(), of(order(&running, "book"), "umbrella", "ann"));
            let before = begun.load(Ordering::SeqCst);
            let held = tokio::spawn(async move { send(&holder, posted).await });
            until("it runs", async || begun.load(Ordering::SeqCst) > before).await;
            seen.push(sent(&running, "book").await);
            go.notify_one();
            assert_eq!(held.await.unwrap().status, 201);
            seen
        };
        seen(&format!("{mode}-warm")).await; // statements are prepared once
        let expected = seen(&format!("{mode}-none")).await;
        assert_eq!(expected.iter().map(|(got, _)| got.status).collect::<Vec<_>>(), [201, 201, 422, 409]);
        for state in ["runs", "open", "done", "held", "free"] {
            let mut open = Vec::new();
            for suffix in ["", "r"] {
                let name = format!("{mode}-{state}{suffix}");
                let mut its = hapax::testing::keyed::request_of(Some("acme"), &name, "acme's secret");
                its.after_failure = AfterFailure::Hold;
                if state == "open" {
                    let mut tx = owner.transaction().await.unwrap();
                    let begun = owner.begin_in(&mut tx, &its).await.unwrap();
                    open.push((tx, begun));
                    continue;
                }
                let lease = hapax::testing::keyed::first(&owner, &its).await;
                let ended = match state {
                    "done" => owner.finish(&lease, &hapax::testing::keyed::answer("17")).await,
                    "held" => owner.release(&lease, hapax::keyed::Ended::Failed).await,
                    "free" => owner.release(&lease, hapax::keyed::Ended::Undone).await,
                    _ => Ok(()),
                };
                ended.unwrap();
            }
            assert_eq!(seen(&format!("{mode}-{state}")).await, expected, "{mode}, acme's key: {state}");
        }
    }
}
