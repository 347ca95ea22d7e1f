//! Leased runs never overlap: a store that hangs, a handler that does not stop, an answer that is hard to store.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use std::sync::Mutex;

use async_trait::async_trait;
use axum::body::Bytes;
use hapax::keyed::{
    Answer, Begin, Begun, Decided, Ended, KeyEntry, KeyStatus, KeySweep, KeysCapabilities, KeysInfo,
    ListKeys, Resolution, SweptKeys,
};
use hapax::{Error, Result};

use super::*;

/// What a store in trouble does.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Trouble {
    /// Heartbeats get no answer.
    ExtendHangs,
    /// The first answers cannot be stored.
    FinishFails(usize),
    /// Keys are granted late in their lease; then heartbeats get no answer, or do.
    BeginIsLate { by: Duration, extend_hangs: bool },
    /// Storing an answer takes long.
    FinishTakes(Duration),
    /// Keys are granted, and the answer never comes.
    BeginHangs,
    /// The first so many releases get no answer.
    ReleaseFails(usize),
    /// None.
    Nothing,
}

/// Keys in memory, as they are seen through a bad connection.
#[derive(Debug, Clone)]
struct Troubled {
    keys: MemoryKeys,
    trouble: Arc<Mutex<Trouble>>,
    extended: Arc<AtomicUsize>,
    finishing: Arc<AtomicUsize>,
}

impl Troubled {
    fn new(keys: &MemoryKeys, trouble: Trouble) -> Self {
        Troubled {
            keys: keys.clone(),
            trouble: Arc::new(Mutex::new(trouble)),
            extended: Arc::default(),
            finishing: Arc::default(),
        }
    }

    fn trouble(&self) -> Trouble {
        *self.trouble.lock().unwrap()
    }

    fn extended(&self) -> usize {
        self.extended.load(Ordering::SeqCst)
    }
}

#[async_trait]
impl Keys for Troubled {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        let outcome = self.keys.begin(begin).await;
        // The troubles with a time are what the tests are about: a slow store.
        match self.trouble() {
            Trouble::BeginIsLate { by, .. } => tokio::time::sleep(by).await,
            Trouble::BeginHangs => std::future::pending().await,
            _ => {}
        }
        outcome
    }

    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        if matches!(self.trouble(), Trouble::ExtendHangs | Trouble::BeginIsLate { extend_hangs: true, .. }) {
            std::future::pending::<()>().await;
        }
        let extended = self.keys.extend(of, lease).await;
        self.extended.fetch_add(1, Ordering::SeqCst);
        extended
    }

    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        self.finishing.fetch_add(1, Ordering::SeqCst);
        let trouble = {
            let mut trouble = self.trouble.lock().unwrap();
            let now = *trouble;
            if let Trouble::FinishFails(times) = &mut *trouble {
                *times = times.saturating_sub(1);
            }
            now
        };
        match trouble {
            Trouble::FinishFails(1..) => {
                // A store that fails, and takes its time over it.
                tokio::time::sleep(Duration::from_millis(400)).await;
                return Err(Error::unavailable("storing an answer", "as the test asks"));
            }
            Trouble::FinishTakes(time) => tokio::time::sleep(time).await,
            _ => {}
        }
        self.keys.finish(of, answer).await
    }

    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        if let Trouble::ReleaseFails(times @ 1..) = &mut *self.trouble.lock().unwrap() {
            *times -= 1;
            return Err(Error::unavailable("releasing a key", "as the test asks"));
        }
        self.keys.release(of, ended).await
    }

    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        self.keys.get(tenant, key).await
    }

    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        self.keys.resolve(of, how, who).await
    }

    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        self.keys.entry(tenant, key).await
    }

    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        self.keys.list(which).await
    }

    async fn sweep(&self, settings: &KeySweep) -> Result<SweptKeys> {
        self.keys.sweep(settings).await
    }

    async fn info(&self) -> Result<KeysInfo> {
        self.keys.info().await
    }

    fn secret(&self) -> &[u8; 32] {
        self.keys.secret()
    }

    fn capabilities(&self) -> KeysCapabilities {
        self.keys.capabilities()
    }
}

/// Counts handlers that run at the same time, up to their very end.
#[derive(Debug, Clone, Default)]
struct AtOnce {
    running: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    runs: Arc<AtomicUsize>,
}

struct Inside(AtOnce);

impl AtOnce {
    fn enter(&self) -> Inside {
        let now = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.runs.fetch_add(1, Ordering::SeqCst);
        Inside(self.clone())
    }

    fn most(&self) -> usize {
        self.most.load(Ordering::SeqCst)
    }

    fn runs(&self) -> usize {
        self.runs.load(Ordering::SeqCst)
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

const LEASE: Duration = Duration::from_millis(1500);

/// The time of a store in memory, which follows tokio's: a test that stops that clock has stopped both.
#[derive(Debug)]
struct Following(tokio::time::Instant);

impl hapax::clock::Clock for Following {
    fn now(&self) -> Time {
        hapax::testing::noon().plus(self.0.elapsed())
    }
}

/// Keys in memory on tokio's clock.
pub fn following_keys() -> MemoryKeys {
    MemoryKeys::with_clock(Arc::new(Following(tokio::time::Instant::now())))
}

/// Waiting is a setting of its own: a request may wait longer than a lease lasts, while the one that runs keeps its
/// lease; and a worker that comes back late stores nothing.
#[tokio::test(start_paused = true)]
async fn t38_a_request_can_wait_and_a_late_one_overwrites_nothing() {
    let (keys, runs) = (following_keys(), Arc::new(AtomicUsize::new(0)));
    let handler = {
        let runs = Arc::clone(&runs);
        move || async move {
            tokio::time::sleep(Duration::from_millis(1200)).await; // four leases
            format!("run {}", runs.fetch_add(1, Ordering::SeqCst) + 1)
        }
    };
    // Two processes: each has a layer of its own, and only the keys are shared.
    let app = || {
        let layer = KeyedLayer::new(keys.clone()).lease(Duration::from_millis(300)).wait(PATIENCE);
        Router::new().route("/orders", post(handler.clone())).layer(layer)
    };
    let (one, two) = (app(), app());
    let (first, second) = tokio::join!(send(&one, order("key", "x")), send(&two, order("key", "x")));
    assert_eq!((first.body.as_str(), second.body.as_str()), ("run 1", "run 1"), "{second:?}");
    assert!(first.replayed() != second.replayed());
    // A late one: its lease has ended, another run has answered.
    let begin = hapax::testing::keyed::request("late", "{}");
    let brief = hapax::keyed::Begin::new(None, begin.key.clone(), begin.fingerprint.clone());
    let mut brief = brief;
    brief.lease = Duration::from_millis(1);
    let late = hapax::testing::keyed::first(&keys, &brief).await;
    tokio::time::advance(Duration::from_millis(20)).await; // longer than the lease
    hapax::testing::keyed::done(&keys, &begin, "newer").await;
    assert!(keys.finish(&late, &hapax::testing::keyed::answer("stale")).await.is_err());
}

/// A heartbeat that gets no answer: the run ends before its lease does, so the next one does not run beside it.
#[tokio::test(start_paused = true)]
async fn t130_a_heartbeat_that_hangs_ends_the_run_before_its_lease() {
    let (keys, count) = (following_keys(), AtOnce::default());
    let endless = {
        let count = count.clone();
        move || async move {
            let inside = count.enter();
            if count.runs() == 1 {
                std::future::pending::<()>().await;
            }
            drop(inside);
            "done"
        }
    };
    let troubled = Troubled::new(&keys, Trouble::ExtendHangs);
    let one = Router::new()
        .route("/orders", post(endless.clone()))
        .layer(KeyedLayer::new(troubled).lease(LEASE).timeout(PATIENCE));
    let other = Router::new().route("/orders", post(endless)).layer(KeyedLayer::new(keys).lease(LEASE));
    let first = tokio::spawn({
        let one = one.clone();
        async move { send(&one, order("key", "x")).await }
    });
    until("the first runs", async || count.runs() == 1).await;
    let second = post_until(&other, "key", "x").await;
    assert_eq!((second.status, second.body.as_str()), (200, "done"));
    let first = tokio::time::timeout(PATIENCE, first).await.expect("it does not hang").unwrap();
    assert_eq!((first.status, first.code().as_str()), (409, "key-running"));
    assert_eq!((count.most(), count.runs()), (1, 2), "never two at once");
}

/// A handler that does not stop when it is told to: its key stays its own until it has ended, and its answer is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t131_a_stopped_handler_has_ended_before_its_key_is_free() {
    // Longer than a busy machine stands still: who loses its lease before its time is over is told something else.
    let lease = LEASE * 4;
    let clock = hapax::clock::ManualClock::new(hapax::testing::noon());
    let (keys, count) = (MemoryKeys::with_clock(Arc::new(clock.clone())), AtOnce::default());
    let go = Arc::new(std::sync::Barrier::new(2));
    let stubborn = {
        let (count, go) = (count.clone(), Arc::clone(&go));
        move || async move {
            let inside = count.enter();
            tokio::task::block_in_place(|| go.wait());
            drop(inside);
            "done after all"
        }
    };
    // Two processes: each has a layer of its own, and only the keys are shared.
    let troubled = Troubled::new(&keys, Trouble::Nothing);
    let app = |timeout| {
        let layer = KeyedLayer::new(troubled.clone()).lease(lease).timeout(timeout);
        Router::new().route("/orders", post(stubborn.clone())).layer(layer)
    };
    let (one, other) = (app(Duration::from_millis(100)), app(PATIENCE));
    let got = send(&one, order("key", "x")).await;
    assert_eq!(
        (got.status, got.code().as_str()),
        (504, "handler-timeout"),
        "the client does not wait for it"
    );
    // Five leases by the store's clock, which waits for each extension.
    for _ in 0..6 {
        let before = troubled.extended();
        until("the lease is extended", async || troubled.extended() > before).await;
        clock.advance(lease * 9 / 10);
        for app in [&one, &other] {
            assert_eq!(send(app, order("key", "x")).await.code(), "key-running", "it has not ended");
        }
    }
    tokio::task::block_in_place(|| go.wait());
    let got = post_until(&other, "key", "x").await;
    assert_eq!((got.body.as_str(), got.replayed()), ("done after all", true));
    assert_eq!((count.most(), count.runs()), (1, 1));
}

/// One that does stop is released at once, as its rule says.
#[tokio::test(start_paused = true)]
async fn t131_a_handler_that_stops_is_released_at_once() {
    for (rule, code) in [(AfterFailure::Rerun, "handler-timeout"), (AfterFailure::Hold, "outcome-unknown")] {
        let (keys, count) = (following_keys(), AtOnce::default());
        let slow = {
            let count = count.clone();
            move || async move {
                let _inside = count.enter();
                std::future::pending::<()>().await;
            }
        };
        let layer = KeyedLayer::new(keys).timeout(Duration::from_millis(100)).after_failure(rule);
        let app = Router::new().route("/orders", post(slow)).layer(layer.lease(PATIENCE));
        assert_eq!(send(&app, order("key", "x")).await.code(), "handler-timeout");
        assert_eq!(send(&app, order("key", "x")).await.code(), code, "{rule:?}");
        assert_eq!(count.most(), 1);
    }
}

/// Storing an answer takes longer than the lease: nobody runs the request again meanwhile.
#[tokio::test(start_paused = true)]
async fn t132_the_lease_is_kept_while_the_answer_is_stored() {
    let (keys, runs) = (following_keys(), Elsewhere::default());
    let troubled = Troubled::new(&keys, Trouble::FinishFails(4));
    let one = runs.app(KeyedLayer::new(troubled.clone()).lease(Duration::from_millis(900)));
    let other = runs.app(KeyedLayer::new(keys.clone()).lease(Duration::from_millis(900)));
    let first = tokio::spawn(async move { send(&one, order("key", "book")).await });
    until("the first runs", async || runs.runs() == 1).await;
    let second = post_until(&other, "key", "book").await;
    let first = first.await.unwrap();
    assert_eq!((first.status, &first.body), (201, &second.body), "{second:?}");
    assert_eq!((second.replayed(), runs.runs()), (true, 1));
    assert!(troubled.extended() > 0);
}

/// A process is paused for most of a lease while an answer is stored. Nobody has taken the lease: the heartbeat goes on,
/// and the answer that is stored at last is the only one.
#[tokio::test(start_paused = true)]
async fn t211_a_pause_does_not_end_the_heartbeat() {
    let (keys, runs) = (following_keys(), Elsewhere::default());
    let troubled = Troubled::new(&keys, Trouble::FinishTakes(LEASE * 5));
    let one = runs.app(KeyedLayer::new(troubled.clone()).lease(LEASE));
    let other = runs.app(KeyedLayer::new(keys.clone()).lease(LEASE));
    let first = tokio::spawn(async move { send(&one, order("key", "book")).await });
    until("the answer is being stored", async || troubled.finishing.load(Ordering::SeqCst) == 1).await;
    tokio::time::advance(LEASE * 9 / 10).await;
    let second = post_until(&other, "key", "book").await;
    assert_eq!((second.replayed(), runs.runs()), (true, 1), "{second:?}");
    assert_eq!(first.await.unwrap().body, second.body);
    assert!(troubled.extended() > 3);
}

/// The same for a handler that was stopped and does not stop: the heartbeat outlives extensions that failed for longer
/// than the rule of a run allows.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn t211_a_handler_that_does_not_stop_keeps_its_lease_after_an_outage() {
    let clock = hapax::clock::ManualClock::new(hapax::testing::noon());
    let (keys, count) = (MemoryKeys::with_clock(Arc::new(clock.clone())), AtOnce::default());
    let go = Arc::new(std::sync::Barrier::new(2));
    let stubborn = {
        let (count, go) = (count.clone(), Arc::clone(&go));
        move || async move {
            let inside = count.enter();
            tokio::task::block_in_place(|| go.wait());
            drop(inside);
            "done after all"
        }
    };
    let troubled = Troubled::new(&keys, Trouble::ExtendHangs);
    let one = Router::new()
        .route("/orders", post(stubborn.clone()))
        .layer(KeyedLayer::new(troubled.clone()).lease(LEASE).timeout(PATIENCE));
    let other = Router::new().route("/orders", post(stubborn)).layer(KeyedLayer::new(keys).lease(LEASE));
    // Its heartbeat gets no answer, so it is told to stop; and does not.
    assert_eq!(send(&one, order("key", "x")).await.code(), "key-running");
    *troubled.trouble.lock().unwrap() = Trouble::Nothing;
    for _ in 0..4 {
        let before = troubled.extended();
        until("the lease is extended", async || troubled.extended() > before).await;
        clock.advance(LEASE * 9 / 10);
        assert_eq!(send(&other, order("key", "x")).await.code(), "key-running", "it has not ended");
    }
    tokio::task::block_in_place(|| go.wait());
    let got = post_until(&other, "key", "x").await;
    assert_eq!((got.body.as_str(), got.replayed(), count.runs()), ("done after all", true, 1));
}

/// A key that was granted late is extended before anything runs under it; if that fails, nothing runs.
#[tokio::test(start_paused = true)]
async fn t130_a_lease_that_is_granted_late_is_extended_first() {
    let (keys, runs) = (following_keys(), Elsewhere::default());
    for (key, extend_hangs, status) in [("extended", false, 201), ("not-extended", true, 409)] {
        let late = Troubled::new(&keys, Trouble::BeginIsLate { by: LEASE / 2, extend_hangs });
        let app = runs.app(KeyedLayer::new(late.clone()).lease(LEASE));
        let got = send(&app, order(key, "book")).await;
        assert_eq!((got.status, runs.runs()), (status, 1), "{key}: only the first has run");
        assert_eq!(late.extended() > 0, !extend_hangs, "{key}");
    }
    let other = runs.app(KeyedLayer::new(keys));
    assert_eq!(post_until(&other, "not-extended", "book").await.status, 201);
    assert_eq!(runs.runs(), 2);
}

/// A key is granted while its request is given up, because the store gives no answer: nothing ran, so nothing may be
/// held, and nobody has to decide. The key is given back once the store answers.
#[tokio::test(start_paused = true)]
async fn t261_a_key_that_nobody_waits_for_is_given_back() {
    let (keys, runs) = (following_keys(), Elsewhere::default());
    let troubled = Troubled::new(&keys, Trouble::BeginHangs);
    let layer = KeyedLayer::new(troubled.clone()).after_failure(AfterFailure::Hold).lease(PATIENCE);
    let app = runs.app(layer.store_timeout(Duration::from_secs(1)));
    for name in ["one", "two"] {
        assert_eq!(send(&app, order(name, "book")).await.code(), "unavailable");
        assert_eq!(keys.get(None, &key(name)).await.unwrap().word(), "running", "it was granted");
    }
    *troubled.trouble.lock().unwrap() = Trouble::Nothing;
    for name in ["one", "two"] {
        until("it is given back", async || keys.get(None, &key(name)).await.unwrap().word() == "free").await;
        assert_eq!(send(&app, order(name, "book")).await.status, 201);
    }
    assert_eq!(runs.runs(), 2);
}

/// A release is tried as often as an answer is stored: otherwise a request that did nothing waits for the end of a lease,
/// and under `Hold` for a person.
#[tokio::test(start_paused = true)]
async fn t265_a_release_is_tried_again() {
    let (keys, runs) = (following_keys(), Elsewhere::default());
    let troubled = Troubled::new(&keys, Trouble::ReleaseFails(4));
    let layer = KeyedLayer::new(troubled.clone()).after_failure(AfterFailure::Hold).lease(PATIENCE);
    let app = runs.app(layer);
    assert_eq!(send(&app, order("key", "busy")).await.status, 409);
    assert_eq!(keys.get(None, &key("key")).await.unwrap().word(), "free");
    assert_eq!((send(&app, order("key", "busy")).await.body.as_str(), runs.runs()), ("not now", 2));
}

/// A token has expired (401), and the client sends the same request with a new one: nothing was done, so the key is still
/// its own. As in a transaction.
#[tokio::test]
async fn t263_a_refusal_that_did_nothing_does_not_bind_the_key() {
    let handler = |headers: HeaderMap| async move {
        let fresh = headers["authorization"] == "Bearer fresh";
        (if fresh { StatusCode::CREATED } else { StatusCode::UNAUTHORIZED }, "x").into_response()
    };
    let dir = tempfile::tempdir().unwrap();
    let (file, schema) = (SqliteKeys::open(dir.path().join("keys.db")).unwrap(), fresh_schema());
    let pg = pg_keys(&pool(4).await, &schema).await;
    let routed = || Router::new().route("/orders", post(handler));
    for (mode, app) in [
        ("memory", routed().layer(KeyedLayer::new(MemoryKeys::default()))),
        ("sqlite, leased", routed().layer(KeyedLayer::new(file.clone()))),
        ("sqlite", routed().layer(KeyedLayer::new(file).transactional())),
        ("postgres, leased", routed().layer(KeyedLayer::new(pg.clone()).after_failure(AfterFailure::Hold))),
        ("postgres", routed().layer(KeyedLayer::new(pg).transactional())),
    ] {
        let sent = |token: &str| {
            let mut request = order(&mode.replace(", ", "-"), "book");
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
            request
        };
        assert_eq!(send(&app, sent("expired")).await.status, 401, "{mode}");
        let got = send(&app, sent("fresh")).await;
        assert_eq!((got.status, got.replayed()), (201, false), "{mode}: {got:?}");
        assert!(send(&app, sent("fresh")).await.replayed(), "{mode}");
        assert_eq!(send(&app, sent("expired")).await.code(), "key-mismatch", "{mode}: now it was done");
    }
}

/// A failure follows `after_failure` however its answer looks; only what is kept is kept.
#[tokio::test]
async fn t133_a_failure_with_a_huge_or_broken_body_is_no_answer() {
    let handler = |State(runs): State<Elsewhere>, body: String| async move {
        runs.0.fetch_add(1, Ordering::SeqCst);
        let (status, kind) = body.split_once(' ').unwrap();
        let broken = vec![Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("as the test asks"))];
        let body = match kind {
            "broken" => Body::from_stream(futures_util::stream::iter(broken)),
            _ => Body::from("x".repeat(5000)),
        };
        (StatusCode::from_u16(status.parse().unwrap()).unwrap(), body).into_response()
    };
    for (rule, after) in [(AfterFailure::Rerun, "handler-failed"), (AfterFailure::Hold, "outcome-unknown")] {
        let runs = Elsewhere::default();
        let layer = KeyedLayer::new(MemoryKeys::default()).after_failure(rule).bytes_max(4096, 4096);
        let app = Router::new().route("/orders", post(handler)).layer(layer).with_state(runs.clone());
        for body in ["500 huge", "503 broken", "201 broken"] {
            let key = body.replace(' ', "-");
            let before = runs.runs();
            assert_eq!(send(&app, order(&key, body)).await.code(), "handler-failed", "{body}");
            assert_eq!(send(&app, order(&key, body)).await.code(), after, "{body} under {rule:?}");
            assert_eq!(runs.runs() - before, if rule == AfterFailure::Hold { 1 } else { 2 }, "{body}");
        }
        // It did nothing: it may run again under any rule.
        let before = runs.runs();
        for _ in 0..2 {
            assert_eq!(send(&app, order("busy", "409 huge")).await.code(), "answer-too-large");
        }
        assert_eq!(runs.runs() - before, 2);
        // It was done: it does not run again only because of its answer.
        let before = runs.runs();
        for replayed in [false, true] {
            let got = send(&app, order("done", "201 huge")).await;
            assert_eq!((got.code().as_str(), got.replayed()), ("answer-too-large", replayed));
        }
        assert_eq!(runs.runs() - before, 1);
    }
}

/// A run that failed is held for its time, by the store's clock; then the next request runs it.
#[tokio::test]
async fn t138_a_held_request_is_decided_by_its_time_limit() {
    let clock = hapax::clock::ManualClock::new(Time::parse("2026-03-04T12:00:00Z").unwrap());
    let (keys, runs) = (MemoryKeys::with_clock(Arc::new(clock.clone())), Elsewhere::default());
    let hour = Duration::from_hours(1);
    let app = runs.app(KeyedLayer::new(keys).after_failure(AfterFailure::HoldFor(hour)));
    assert_eq!(send(&app, order("key", "fail")).await.status, 500);
    assert_eq!(send(&app, order("key", "fail")).await.code(), "outcome-unknown");
    clock.advance(Duration::from_mins(59));
    assert_eq!(send(&app, order("key", "fail")).await.code(), "outcome-unknown");
    assert_eq!(runs.runs(), 1);
    clock.advance(Duration::from_mins(2));
    assert_eq!(send(&app, order("key", "fail")).await.status, 500);
    assert_eq!(runs.runs(), 2, "its time was over");
    assert_eq!(send(&app, order("key", "fail")).await.code(), "outcome-unknown", "and it is held again");
}

/// Routes of one service have settings of their own.
#[tokio::test]
async fn each_route_has_its_own_rules() {
    let keys = MemoryKeys::default();
    let layer = || KeyedLayer::new(keys.clone());
    let created = || async { (StatusCode::CREATED, "order 17") };
    let failing = || async { StatusCode::INTERNAL_SERVER_ERROR };
    let app = Router::new()
        .route("/as-it-was", post(created).layer(layer()))
        .route("/ok", post(created).layer(layer().replay_status(StatusCode::OK)))
        .route("/rerun", post(failing).layer(layer()))
        .route("/hold", post(failing).layer(layer().after_failure(AfterFailure::Hold)))
        .route("/required", post(created).layer(layer().required()));
    for (path, first, again) in
        [("/as-it-was", 201, 201), ("/ok", 201, 200), ("/rerun", 500, 500), ("/hold", 500, 409)]
    {
        let request = || Request::post(path).header("Idempotency-Key", path).body(Body::empty()).unwrap();
        assert_eq!(send(&app, request()).await.status, first, "{path}");
        assert_eq!(send(&app, request()).await.status, again, "{path}");
    }
    let bare = |path: &str| Request::post(path).body(Body::empty()).unwrap();
    assert_eq!(send(&app, bare("/required")).await.code(), "key-missing");
    assert_eq!(send(&app, bare("/ok")).await.status, 201);
}
