//! What a handler can do with its transaction, and what it cannot break.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use super::*;

#[tokio::test]
async fn t113_refusals_undo_the_work_and_keep_the_answer_and_failures_undo_both() {
    for shop in [pg_shop(4, Duration::ZERO).await, sqlite_shop(Duration::ZERO)] {
        for (body, status, kept) in [
            ("refuse", 422, true),
            ("undo", 201, true),
            ("fail", 500, false),
            ("busy", 409, false),
            ("panic", 500, false),
        ] {
            let first = send(&shop.app, order(body, body)).await;
            assert_eq!(first.status, status, "{body}");
            assert_eq!(shop.rows().await, 0, "{body}: its work is undone");
            let again = send(&shop.app, order(body, body)).await;
            assert_eq!((again.status, again.replayed()), (status, kept), "{body}");
            assert_eq!(shop.rows().await, 0, "{body}");
        }
        assert_eq!(send(&shop.app, order("key", "book")).await.status, 201);
        assert_eq!(shop.rows().await, 1, "and the store goes on");
    }
}

/// A handler that swallows the error of a statement cannot answer success: nothing of its transaction would be kept.
#[tokio::test]
async fn t114_a_failed_transaction_is_never_answered_as_a_success() {
    let (pool, schema) = (pool(4).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let handler = |mut tx: KeyedTx| async move {
        let _ = sqlx::query("select 1 / 0").execute(&mut **tx).await;
        (StatusCode::CREATED, "all is well")
    };
    let app =
        Router::new().route("/orders", post(handler)).layer(KeyedLayer::new(keys.clone()).transactional());
    let got = send(&app, order("key", "x")).await;
    assert_eq!((got.status, got.code().as_str()), (500, "refused"));
    assert_eq!(keys.get(None, &key("key")).await.unwrap().word(), "unknown");
    // A deferred constraint fails at the commit.
    run(&pool, format!("alter table {schema}.orders add unique (body) deferrable initially deferred")).await;
    let app = pg_app(&schema, KeyedLayer::new(keys).transactional());
    assert_eq!(send(&app, order("one", "same")).await.status, 201);
    let got = send(&app, order("two", "same")).await;
    assert!(got.status >= 500, "{got:?}");
    assert_eq!(ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await, 1);
}

/// The transaction is found through clones of the request's extensions; taken twice, or kept beyond the answer, it is
/// an error, and nothing is committed.
#[tokio::test]
async fn t115_a_transaction_survives_clones_and_does_not_outlive_its_answer() {
    let (pool, schema) = (pool(4).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let layer = || KeyedLayer::new(keys.clone()).transactional();
    // A middleware that hands on a copy, as tracing layers do. One that tries again: T269.
    let cloning =
        axum::middleware::from_fn(|request: Request<Body>, next: axum::middleware::Next| async move {
            let (parts, body) = request.into_parts();
            let mut copy = Request::new(body);
            *copy.method_mut() = parts.method.clone();
            *copy.uri_mut() = parts.uri.clone();
            *copy.extensions_mut() = parts.extensions.clone();
            let response = next.run(copy).await;
            drop(parts);
            response
        });
    let app = Router::new()
        .route("/orders", post(pg_order))
        .layer(cloning)
        .layer(layer())
        .with_state(schema.clone());
    assert_eq!(send(&app, order("cloned", "book")).await.status, 201);
    let rows = async || ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await;
    assert_eq!(rows().await, 1);

    let twice = |_one: KeyedTx, _two: KeyedTx| async { "never" };
    let app = Router::new().route("/orders", post(twice)).layer(layer());
    assert_eq!(send(&app, order("twice", "x")).await.code(), "transaction-in-use");

    let insert = format!("insert into {schema}.orders (body) values ('kept')");
    let keeps = move |mut tx: KeyedTx| async move {
        sqlx::query(AssertSqlSafe(insert)).execute(&mut **tx).await.unwrap();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(200)).await; // past the answer
            drop(tx);
        });
        "answered too early"
    };
    let app = Router::new().route("/orders", post(keeps)).layer(layer());
    assert_eq!(send(&app, order("kept", "x")).await.code(), "transaction-in-use");
    until("the transaction is rolled back", async || {
        let open = format!("select count(*) from pg_stat_activity where state like 'idle in tran%' and query like '%{schema}%'");
        ask::<i64>(&pool, open).await == 0
    })
    .await;
    assert_eq!(rows().await, 1);

    // A handler that wants a transaction behind a layer that has none.
    let app = pg_app(&schema, KeyedLayer::new(keys));
    assert_eq!(send(&app, order("none", "x")).await.code(), "transaction-missing");
}

/// A middleware inside the layer that tries again runs the handler twice in one transaction. The second try is refused:
/// otherwise the writes of both would be committed.
#[tokio::test]
async fn t269_a_handler_that_runs_twice_in_a_request_writes_nothing_twice() {
    let (pool, schema, dir) = (pool(4).await, fresh_schema(), tempfile::tempdir().unwrap());
    let pg = pg_keys(&pool, &schema).await;
    let file = sqlite_keys(&dir.path().join("shop.db"));
    let calls = Arc::new(AtomicUsize::new(0));
    // The handler's own answer says "later" at first, as if something else was away.
    let retrying = {
        let calls = Arc::clone(&calls);
        axum::middleware::from_fn(move |request: Request<Body>, next: axum::middleware::Next| {
            let calls = Arc::clone(&calls);
            async move {
                let (parts, _) = request.into_parts();
                let mut response = StatusCode::SERVICE_UNAVAILABLE.into_response();
                for body in ["fail", "book"] {
                    let mut copy = Request::new(Body::from(body));
                    *copy.method_mut() = parts.method.clone();
                    *copy.uri_mut() = parts.uri.clone();
                    *copy.extensions_mut() = parts.extensions.clone();
                    calls.fetch_add(1, Ordering::SeqCst);
                    response = next.clone().run(copy).await;
                    if response.status().is_success() {
                        break;
                    }
                }
                response
            }
        })
    };
    let pg_app = Router::new()
        .route("/orders", post(pg_order))
        .layer(retrying.clone())
        .layer(KeyedLayer::new(pg).transactional())
        .with_state(schema.clone());
    let file_app = Router::new()
        .route("/orders", post(sqlite_order))
        .layer(retrying)
        .layer(KeyedLayer::new(file.clone()).transactional());
    for app in [pg_app, file_app] {
        calls.store(0, Ordering::SeqCst);
        let got = send(&app, order("key", "book")).await;
        assert_eq!((got.status, got.code().as_str()), (500, "transaction-in-use"), "{got:?}");
        assert_eq!(calls.load(Ordering::SeqCst), 2, "it was called twice");
    }
    assert_eq!(ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await, 0);
    let conn = rusqlite::Connection::open(file.path()).unwrap();
    let rows: i64 = conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 0);
}

/// A statement that begins after the limit, when its handler has answered: there was none to interrupt at either time, and
/// it would hold the file's only writer for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t266_a_statement_that_begins_after_the_limit_is_ended() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sqlite_keys(&dir.path().join("shop.db"));
    let (go, wait) = std::sync::mpsc::channel::<()>();
    let (ended, ending) = tokio::sync::oneshot::channel();
    let once = Arc::new(std::sync::Mutex::new(Some((wait, ended))));
    let late = move |mut tx: KeyedSqlite| {
        let (wait, ended) = once.lock().unwrap().take().unwrap();
        async move {
            let run = tx.run(move |tx| {
                wait.recv_timeout(PATIENCE).unwrap(); // past the limit, without SQL
                let sql =
                    "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n";
                let endless = tx.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(|e| e.to_string());
                ended.send(endless).unwrap();
            });
            assert!(run.await.is_err_and(|error| error.code() == "contended"), "its time is over");
            StatusCode::SERVICE_UNAVAILABLE
        }
    };
    let layer = KeyedLayer::new(keys.clone()).transactional().timeout(Duration::from_secs(1));
    let app = Router::new().route("/orders", post(late)).layer(layer);
    let got = send(&app, order("key", "x")).await;
    assert!(got.status >= 500, "{got:?}");
    go.send(()).unwrap();
    let endless = tokio::time::timeout(PATIENCE, ending).await.expect("it is ended").unwrap();
    assert!(endless.is_err_and(|error| error.contains("interrupted")));
    // The writer is there for others.
    let app = sqlite_app(KeyedLayer::new(keys).transactional());
    assert_eq!(post_until(&app, "other", "book").await.status, 201);
}

/// A handler that stops waiting for a function before it begins: it does not begin. One that panics is told so, not that
/// it took too long, and nothing of its transaction is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t271_a_function_that_nobody_waits_for_or_that_panics_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sqlite_keys(&dir.path().join("shop.db"));
    let rows = || -> i64 {
        let conn = rusqlite::Connection::open(dir.path().join("shop.db")).unwrap();
        conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
    };
    let given_up = |mut tx: KeyedSqlite| async move {
        let (go, wait) = std::sync::mpsc::channel::<()>();
        let (begun, has_begun) = tokio::sync::oneshot::channel();
        let blocks = tx.run(move |_| {
            begun.send(()).unwrap();
            wait.recv().unwrap();
        });
        // Polled until it has begun, and given up; the next one waits behind it.
        tokio::select! {
            _ = blocks => panic!("it waits"),
            begun = has_begun => begun.unwrap(),
        }
        {
            let insert = tx.run(|tx| tx.execute("INSERT INTO orders (body) VALUES ('given up')", []));
            let mut insert = std::pin::pin!(insert);
            assert!(futures_util::poll!(&mut insert).is_pending(), "it waits for the one before");
        }
        go.send(()).unwrap();
        tx.run(|_| ()).await.unwrap();
        StatusCode::CREATED
    };
    let layer = || KeyedLayer::new(keys.clone()).transactional();
    let app = Router::new().route("/orders", post(given_up)).layer(layer());
    assert_eq!((send(&app, order("given-up", "x")).await.status, rows()), (201, 0));

    let panics = |mut tx: KeyedSqlite| async move {
        let run = tx.run(|tx| {
            tx.execute("INSERT INTO orders (body) VALUES ('half')", []).unwrap();
            panic!("as the test asks")
        });
        let refused: hapax::Result<()> = run.await;
        assert_eq!(refused.unwrap_err().code(), "refused");
        StatusCode::CREATED
    };
    let app = Router::new().route("/orders", post(panics)).layer(layer());
    let got = send(&app, order("panics", "x")).await;
    assert_eq!((got.status, got.code().as_str(), rows()), (500, "refused", 0), "{got:?}");
    let app = sqlite_app(layer());
    assert_eq!((post_until(&app, "other", "book").await.status, rows()), (201, 1));
}

/// On SQLite a transaction holds the only writer: it ends after its limit, and others go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t106_a_slow_handler_does_not_hold_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sqlite_keys(&dir.path().join("shop.db"));
    let slow = |mut tx: KeyedSqlite, body: String| async move {
        let text = body.clone();
        let run = tx.run(move |tx| tx.execute("INSERT INTO orders (body) VALUES (?1)", [text])).await;
        // On a busy machine its time may be over before it begins.
        if !matches!(run, Ok(Ok(_))) {
            return (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")]).into_response();
        }
        if body == "slow" {
            std::future::pending::<()>().await;
        }
        if body == "endless" {
            let sql =
                "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT count(*) FROM n";
            let endless = tx
                .run(move |tx| tx.query_row(sql, [], |row| row.get::<_, i64>(0)).map_err(|e| e.to_string()))
                .await;
            assert!(!matches!(endless, Ok(Ok(_))), "{endless:?}");
        }
        "done".into_response()
    };
    let layer = KeyedLayer::new(keys.clone()).transactional().timeout(Duration::from_secs(5));
    let app = Router::new().route("/orders", post(slow)).layer(layer);
    let got = send(&app, order("slow", "slow")).await;
    assert!(got.status >= 500, "{got:?}");
    let got = send(&app, order("endless", "endless")).await;
    assert!(got.status >= 500, "{got:?}");
    assert_eq!(post_until(&app, "key", "book").await.status, 200);
    let conn = rusqlite::Connection::open(keys.path()).unwrap();
    let rows: i64 = conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap();
    assert_eq!(rows, 1, "only what was answered is there");
}
