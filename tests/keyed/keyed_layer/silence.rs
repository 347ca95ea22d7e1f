//! A network that cuts connections, or goes silent: nothing is answered, and nothing is closed.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use super::*;

/// How long an answer of the store is waited for here: longer than a busy machine stands still.
const STORE: Duration = Duration::from_secs(6);

/// Keys behind a proxy, on a pool of so many connections.
async fn behind(proxy: &Proxy, schema: &str, connections: u32) -> PgKeys {
    let mut settings = super::super::settings(schema);
    settings.pool_max = connections;
    settings.acquire_timeout = PATIENCE;
    PgKeys::connect(&proxy.url(&url()), settings).await.unwrap()
}

/// A COMMIT without an answer is a doubt, resolved by the request's nonce; the key is not stuck, and the one connection
/// of the pool is there again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t210_a_silent_network_at_the_commit_is_a_doubt_and_no_stuck_key() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    pg_keys(&direct, &schema).await;
    let proxy = Proxy::new(&url()).await;
    let keys = behind(&proxy, &schema, 1).await;
    let app = pg_app(&schema, KeyedLayer::new(keys).transactional().store_timeout(STORE));
    let rows = async || ask::<i64>(&direct, format!("select count(*) from {schema}.orders")).await;
    let sent = async |key: &str| {
        tokio::time::timeout(PATIENCE, send(&app, order(key, "book"))).await.expect("it is answered")
    };
    proxy.silence_after("COMMIT\0");
    let got = sent("committed").await;
    assert_eq!(
        (got.status, got.replayed(), rows().await),
        (201, false, 1),
        "the server had committed: {got:?}"
    );
    let again = sent("committed").await;
    assert_eq!((&again.body, again.replayed()), (&got.body, true));
    proxy.silence_before("COMMIT\0");
    let got = sent("lost").await;
    assert_eq!((got.status, got.code().as_str()), (503, "unavailable"), "the server never saw it: {got:?}");
    assert_eq!(rows().await, 1);
    assert_eq!(post_until(&app, "lost", "book").await.status, 201);
    assert_eq!((rows().await, proxy.lost()), (2, 2));
}

/// The same for every other statement of a request, of the layer or of the handler.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t210_a_silent_network_at_any_statement_sticks_nothing() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    pg_keys(&direct, &schema).await;
    let proxy = Proxy::new(&url()).await;
    let keys = behind(&proxy, &schema, 1).await;
    let layer = || KeyedLayer::new(keys.clone()).transactional().store_timeout(STORE).timeout(STORE * 3);
    let app = pg_app(&schema, layer());
    let rows = async || ask::<i64>(&direct, format!("select count(*) from {schema}.orders")).await;
    for (n, (at, body)) in [
        ("S\0\0\0\u{4}", "book"), // before anything: whether the connection answers at all
        ("SAVEPOINT hapax_keyed\0", "book"),
        ("handlers-book", "handlers-book"), // bound in the handler's own statement
        ("ROLLBACK TO SAVEPOINT hapax_keyed\0", "refuse"),
        ("ROLLBACK\0", "busy"),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("key-{n}");
        // sqlx asks a connection that returns to its pool, and waits for ever; so not in that moment.
        until("the connection is idle", async || keys.pool().num_idle() == 1).await;
        proxy.silence_after(at);
        let got =
            tokio::time::timeout(PATIENCE, send(&app, order(&key, body))).await.expect("it is answered");
        assert!(matches!(got.status, 409 | 503 | 504), "{at}: {got:?}");
        assert_eq!(proxy.lost(), n + 1, "{at}");
        let before = rows().await;
        let got = post_until(&app, &format!("after-{n}"), "book").await;
        assert_eq!((got.status, rows().await), (201, before + 1), "{at}: others go on");
        if body.ends_with("book") {
            let got = post_until(&app, &key, body).await;
            assert_eq!((got.status, rows().await), (201, before + 2), "{at}: once");
        }
    }
}

/// A claim without an answer was granted: the same claim again gets it, and the handler runs once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t210_a_claim_that_gets_no_answer_is_repeated() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    pg_keys(&direct, &schema).await;
    let proxy = Proxy::new(&url()).await;
    let keys = behind(&proxy, &schema, 2).await;
    let runs = Elsewhere::default();
    let layer = KeyedLayer::new(keys.clone()).after_failure(AfterFailure::Hold);
    let app = runs.app(layer.store_timeout(STORE).lease(PATIENCE));
    proxy.silence_after("silent-key");
    let got = tokio::time::timeout(PATIENCE, send(&app, order("silent-key", "book"))).await;
    let got = got.expect("it is answered");
    assert_eq!((got.status, runs.runs(), proxy.lost()), (201, 1, 1), "{got:?}");
    assert!(send(&app, order("silent-key", "book")).await.replayed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t31_a_lost_commit_of_a_request_is_resolved_by_its_nonce() {
    let (direct, schema) = (pool(2).await, fresh_schema());
    pg_keys(&direct, &schema).await;
    let proxy = Proxy::new(&url()).await;
    let lossy = pool_to(&proxy.url(&url()), 4).await;
    let keys = PgKeys::with_pool(lossy, super::super::settings(&schema)).await.unwrap();
    let app = pg_app(&schema, KeyedLayer::new(keys).transactional());
    let rows = async || ask::<i64>(&direct, format!("select count(*) from {schema}.orders")).await;
    for n in 0..10 {
        let key = format!("acknowledged-{n}");
        proxy.lose_commit_answer();
        let got = send(&app, order(&key, "book")).await;
        assert_eq!((got.status, got.replayed()), (201, false), "the server had committed: {got:?}");
        assert_eq!(rows().await, n + 1);
        let again = send(&app, order(&key, "book")).await;
        assert_eq!((&again.body, again.replayed()), (&got.body, true));
    }
    assert_eq!(proxy.lost(), 10, "each was cut");
    proxy.lose_commit();
    let got = send(&app, order("lost", "book")).await;
    assert_eq!((got.status, got.code().as_str()), (503, "unavailable"), "the server never saw it: {got:?}");
    assert_eq!(got.headers["retry-after"], "1");
    assert_eq!(rows().await, 10);
    assert_eq!(post_until(&app, "lost", "book").await.status, 201);
    assert_eq!(rows().await, 11);
}
