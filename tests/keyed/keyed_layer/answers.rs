//! Which answers are kept, and what of a request and of an answer counts.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use axum::http::header;
use hapax::keyed::NotKept;

use super::*;

/// A request that was sent badly is mended and sent again with its key: the handler runs.
#[tokio::test]
async fn t212_an_answer_from_before_the_handler_is_not_kept() {
    #[derive(serde::Deserialize)]
    struct Item {
        item: u32,
    }
    let json = |axum::Json(of): axum::Json<Item>| async move { format!("item {}", of.item) };
    let shops = Arc::new(std::sync::Mutex::new(Vec::<String>::new()));
    let in_shop = {
        let shops = Arc::clone(&shops);
        move |axum::extract::Path(shop): axum::extract::Path<String>| async move {
            if shops.lock().unwrap().contains(&shop) {
                return (StatusCode::CREATED, "sold").into_response();
            }
            (NotKept, (StatusCode::NOT_FOUND, "there is no such shop yet")).into_response()
        }
    };
    let keys = MemoryKeys::default();
    let app = Router::new()
        .route("/items", post(json))
        .route("/shops/{shop}", post(in_shop))
        .route_layer(KeyedLayer::new(keys).after_failure(AfterFailure::Hold));
    let item = |media: &str| {
        let request = Request::post("/items").header("Idempotency-Key", "item").header("content-type", media);
        request.body(Body::from(r#"{"item": 17}"#)).unwrap()
    };
    assert_eq!(send(&app, item("text/plain")).await.status, 415);
    let mended = send(&app, item("application/json")).await;
    assert_eq!((mended.status, mended.body.as_str(), mended.replayed()), (200, "item 17", false));
    assert!(send(&app, item("text/plain")).await.replayed(), "the key has its answer now");
    let sale = || Request::post("/shops/late").header("Idempotency-Key", "sale").body(Body::empty()).unwrap();
    for _ in 0..2 {
        let got = send(&app, sale()).await;
        assert_eq!((got.status, got.replayed()), (404, false));
    }
    shops.lock().unwrap().push("late".to_owned());
    assert_eq!(send(&app, sale()).await.status, 201);
    let again = send(&app, sale()).await;
    assert_eq!((again.status, again.replayed()), (201, true));
}

/// What a handler marks is not kept in a transaction either, and its writes are undone.
#[tokio::test]
async fn t212_a_marked_answer_undoes_the_transaction() {
    let (pool, schema) = (pool(4).await, fresh_schema());
    let keys = pg_keys(&pool, &schema).await;
    let handler = |state: State<String>, tx: KeyedTx, body: String| async move {
        (NotKept, pg_order(state, tx, body).await).into_response()
    };
    let layer = KeyedLayer::new(keys.clone()).transactional();
    let app = Router::new().route("/orders", post(handler)).layer(layer).with_state(schema.clone());
    for _ in 0..2 {
        let got = send(&app, order("key", "book")).await;
        assert_eq!((got.status, got.replayed()), (201, false));
    }
    assert_eq!(ask::<i64>(&pool, format!("select count(*) from {schema}.orders")).await, 0);
    assert_eq!(keys.get(None, &key("key")).await.unwrap().word(), "unknown");
}

/// A header that decides what is written is part of the request, where the route says so.
#[tokio::test]
async fn t213_a_header_that_decides_is_part_of_the_request() {
    let runs = Elsewhere::default();
    let layer = KeyedLayer::new(MemoryKeys::default()).fingerprint_headers([header::IF_MATCH]).tell_fields();
    let app = runs.app(layer);
    let put = |etags: &[&str]| {
        let mut request = order("key", "book");
        for etag in etags {
            request.headers_mut().append(header::IF_MATCH, etag.parse().unwrap());
        }
        request
    };
    assert_eq!(send(&app, put(&["\"1\""])).await.status, 201);
    assert!(send(&app, put(&["\"1\""])).await.replayed());
    for other in [&["\"3\""][..], &[], &["\"1\"", "\"3\""]] {
        let got = send(&app, put(other)).await;
        assert_eq!((got.status, got.code().as_str()), (422, "key-mismatch"), "{other:?}");
        assert!(got.body.contains(r#""fields":["header if-match"]"#), "{}", got.body);
    }
    let mut noisy = put(&["\"1\""]);
    noisy.headers_mut().insert("x-request-id", "another".parse().unwrap());
    assert!(send(&app, noisy).await.replayed(), "other headers do not count");
    assert_eq!(runs.runs(), 1);
}

/// Headers that are too large to be kept are like a body that is: the request was done, and does not run again.
#[tokio::test]
async fn t217_headers_that_cannot_be_kept_do_not_free_the_key() {
    let handler = |State(runs): State<Elsewhere>| async move {
        let run = runs.0.fetch_add(1, Ordering::SeqCst) + 1;
        let links: Vec<_> = (0..9).map(|n| ("link", format!("</{n}{}>", "x".repeat(8000)))).collect();
        (StatusCode::CREATED, axum::response::AppendHeaders(links), format!("run {run}")).into_response()
    };
    let (keys, runs) = (MemoryKeys::default(), Elsewhere::default());
    let app = Router::new()
        .route("/orders", post(handler))
        .layer(KeyedLayer::new(keys.clone()))
        .with_state(runs.clone());
    for replayed in [false, true] {
        let got = send(&app, order("key", "book")).await;
        assert_eq!((got.status, got.code().as_str(), got.replayed()), (500, "answer-too-large", replayed));
    }
    assert_eq!((runs.runs(), keys.get(None, &key("key")).await.unwrap().word()), (1, "done"));
}

/// Somebody's time was over in the middle: nobody knows what was done, so the request is held.
#[tokio::test]
async fn t218_a_timeout_is_not_taken_for_nothing_done() {
    let runs = Elsewhere::default();
    let app = runs.app(KeyedLayer::new(MemoryKeys::default()).after_failure(AfterFailure::Hold));
    assert_eq!(send(&app, order("timeout", "408")).await.status, 408);
    assert_eq!(send(&app, order("timeout", "408")).await.code(), "outcome-unknown");
    assert_eq!(runs.runs(), 1);
    for status in ["409", "429"] {
        for _ in 0..2 {
            assert_eq!(send(&app, order(status, status)).await.status.to_string(), status, "it did nothing");
        }
    }
    assert_eq!(runs.runs(), 5);
}
