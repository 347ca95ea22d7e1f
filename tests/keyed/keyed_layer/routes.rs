//! What a router answers by itself, and what belongs to the bytes of an answer.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use axum::routing::any;
use tower::Layer as _;

use super::*;

fn at(method: &str, path: &str) -> Request<Body> {
    Request::builder()
        .method(method)
        .uri(path)
        .header("Idempotency-Key", "key")
        .body(Body::from("book"))
        .unwrap()
}

async fn sent_twice(app: &Router, method: &str, path: &str) -> (Got, Got) {
    (send(app, at(method, path)).await, send(app, at(method, path)).await)
}

async fn known(keys: &MemoryKeys) -> String {
    keys.get(None, &key("key")).await.unwrap().word().to_owned()
}

/// No handler ran: the route may be there tomorrow, and then the retry must find it.
#[tokio::test]
async fn t135_a_routers_own_answer_is_not_kept() {
    let none = || Router::new().route("/orders", post(|| async { "order 17" }));
    let apps: [fn(Router, KeyedLayer<MemoryKeys>) -> Router; 6] = [
        |app, layer| app.layer(layer),
        |app, layer| app.route_layer(layer),
        |app, layer| Router::new().nest("/v1", app).layer(layer),
        |app, layer| Router::new().nest("/v1", app.layer(layer)),
        |app, layer| Router::new().nest_service("/v1", app.layer(layer)),
        |app, layer| Router::new().fallback_service(layer.layer(app)),
    ];
    for (n, make) in apps.into_iter().enumerate() {
        let prefix = if (2..5).contains(&n) { "/v1" } else { "" };
        for (method, path, status) in [("POST", "/nowhere", 404), ("PUT", "/orders", 405)] {
            let keys = MemoryKeys::default();
            let path = format!("{prefix}{path}");
            let app = make(none(), KeyedLayer::new(keys.clone()));
            let (first, again) = sent_twice(&app, method, &path).await;
            assert_eq!((first.status, again.status, again.replayed()), (status, status, false), "{n} {path}");
            assert_ne!(known(&keys).await, "done", "{n} {path}");
            // The next deployment has the route.
            let next = Router::new()
                .route("/orders", any(|| async { "put" }))
                .route("/nowhere", post(|| async { "found" }));
            let got = send(&make(next, KeyedLayer::new(keys.clone())), at(method, &path)).await;
            assert_eq!(got.status, 200, "{n} {path}: {got:?}");
            assert_eq!(known(&keys).await, "done", "{n} {path}");
        }
    }
}

/// A handler's own 404 and 405 are its answers, in a route or behind a layer around the router.
#[tokio::test]
async fn t135_a_handlers_404_is_kept() {
    let refuse = || async { (StatusCode::NOT_FOUND, "no such item") };
    let bare = || async { StatusCode::NOT_FOUND };
    let routes = || Router::new().route("/refuse", post(refuse)).route("/bare", post(bare));
    for app in [
        routes().layer(KeyedLayer::new(MemoryKeys::default())),
        routes().route_layer(KeyedLayer::new(MemoryKeys::default())),
        Router::new().nest("/v1", routes()).merge(routes()).layer(KeyedLayer::new(MemoryKeys::default())),
    ] {
        for path in ["/refuse", "/bare"] {
            let request = || {
                let mut request = at("POST", path);
                request.headers_mut().insert("Idempotency-Key", path[1..].parse().unwrap());
                request
            };
            let (first, again) = (send(&app, request()).await, send(&app, request()).await);
            assert_eq!((first.status, again.status, again.replayed()), (404, 404, true), "{path}");
        }
    }
    // A fallback that writes is a handler: what it did is kept.
    let (keys, runs) = (MemoryKeys::default(), Elsewhere::default());
    let counted = {
        let runs = runs.clone();
        move || async move { format!("run {}", runs.0.fetch_add(1, Ordering::SeqCst) + 1) }
    };
    let app = Router::new().fallback(counted).layer(KeyedLayer::new(keys));
    let (first, again) = sent_twice(&app, "POST", "/anything").await;
    assert_eq!((first.body.as_str(), again.body.as_str(), again.replayed()), ("run 1", "run 1", true));
    // A fallback's page for what is not there is not.
    let keys = MemoryKeys::default();
    let page = || async { (StatusCode::NOT_FOUND, "nothing here") };
    let app = Router::new().fallback(page).layer(KeyedLayer::new(keys.clone()));
    let (_, again) = sent_twice(&app, "POST", "/anything").await;
    assert!(again.status == 404 && !again.replayed());
}

/// Whoever asks again may not decode what the first one could: an answer is kept as it is, not encoded for one client.
#[tokio::test]
async fn t136_a_replay_can_be_read_by_whoever_asks() {
    // As compression layers do: encoded if the client says so.
    let compressing = |headers: HeaderMap| async move {
        let gzip =
            headers.get("accept-encoding").is_some_and(|value| value.to_str().unwrap().contains("gzip"));
        if gzip {
            ([("content-encoding", "gzip")], "\u{1f}\u{8b}").into_response()
        } else {
            "plain".into_response()
        }
    };
    let by_itself = || async { ([("content-encoding", "br")], "bytes of brotli") };
    let app = Router::new()
        .route("/orders", post(compressing))
        .route("/packed", post(by_itself))
        .layer(KeyedLayer::new(MemoryKeys::default()));
    let first = Request::post("/orders")
        .header("Idempotency-Key", "key")
        .header("Accept-Encoding", "gzip, br")
        .body(Body::empty())
        .unwrap();
    let first = send(&app, first).await;
    assert_eq!((first.body.as_str(), first.headers.get("content-encoding")), ("plain", None));
    let again = Request::post("/orders").header("Idempotency-Key", "key").body(Body::empty()).unwrap();
    let again = send(&app, again).await;
    assert_eq!(
        (again.body.as_str(), again.headers.get("content-encoding"), again.replayed()),
        ("plain", None, true)
    );
    // What a handler encodes by itself is named as that.
    for replayed in [false, true] {
        let packed =
            Request::post("/packed").header("Idempotency-Key", "packed").body(Body::empty()).unwrap();
        let got = send(&app, packed).await;
        assert_eq!((got.body.as_str(), got.replayed()), ("bytes of brotli", replayed));
        assert_eq!(got.headers["content-encoding"], "br");
    }
}

/// A replay needs no writer: while somebody else holds the file's, it is answered.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t137_a_replay_does_not_wait_for_the_files_writer() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("shop.db");
    let keys = sqlite_keys(&file);
    let transactional = sqlite_app(KeyedLayer::new(keys.clone()).transactional());
    let leased = Elsewhere::default().app(KeyedLayer::new(keys.clone()));
    let apps = [(&transactional, "transactional"), (&leased, "leased")];
    for (app, key) in apps {
        assert_eq!(send(app, order(key, "book")).await.status, 201);
    }
    let writer = rusqlite::Connection::open(&file).unwrap();
    writer.execute_batch("BEGIN IMMEDIATE; INSERT INTO orders (body) VALUES ('not committed')").unwrap();
    for (app, key) in apps {
        let got = send(app, order(key, "book")).await;
        assert_eq!((got.status, got.replayed()), (201, true), "{key}: {got:?}");
        assert_eq!(send(app, order(key, "other")).await.code(), "key-mismatch");
    }
    writer.execute_batch("ROLLBACK").unwrap();
    assert_eq!(send(&transactional, order("next", "book")).await.status, 201);
}
