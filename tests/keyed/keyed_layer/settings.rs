//! Which settings a layer takes, and which it refuses.
#![allow(clippy::wildcard_imports, reason = "the same kit")]

use std::sync::Mutex;

use tracing_subscriber::layer::SubscriberExt as _;

use super::*;

/// Times that are as long as can be said are as long as can be done.
#[tokio::test]
async fn t270_times_that_are_too_long_or_too_short_are_bounded() {
    let dir = tempfile::tempdir().unwrap();
    for (n, time) in [Duration::MAX, Duration::from_hours(25), Duration::ZERO].into_iter().enumerate() {
        let runs = Elsewhere::default();
        let leased = KeyedLayer::new(MemoryKeys::default()).wait(time).lease(time).store_timeout(PATIENCE);
        let got = send(&runs.app(leased), order("key", "book")).await;
        // A lease of a millisecond is over at once; what is told is a sentence, and no panic.
        assert!(got.status == 201 || (time.is_zero() && got.code() == "key-running"), "{time:?}: {got:?}");
        let file = sqlite_keys(&dir.path().join(format!("shop-{n}.db")));
        let app = sqlite_app(KeyedLayer::new(file).transactional().wait(time).timeout(time));
        let got = send(&app, order("key", "book")).await;
        // A millisecond may not be enough for the handler; then that is the answer.
        let late = || ["handler-failed", "handler-timeout", "contended"].contains(&got.code().as_str());
        assert!(got.status == 201 || (time.is_zero() && late()), "{time:?}: {got:?}");
    }
}

/// A request that fails in a transaction leaves nothing that could be held: who asks for both is told so at once.
#[tokio::test]
async fn t273_a_transaction_that_holds_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let keys = SqliteKeys::open(dir.path().join("keys.db")).unwrap();
    let hold = AfterFailure::HoldFor(Duration::from_secs(60));
    for rule in [AfterFailure::Hold, hold] {
        type Make = fn(KeyedLayer<SqliteKeys>, AfterFailure) -> KeyedLayer<SqliteKeys>;
        let makes: [Make; 2] = [
            |layer, rule| layer.transactional().after_failure(rule),
            |layer, rule| layer.after_failure(rule).transactional(),
        ];
        for make in makes {
            let layer = KeyedLayer::new(keys.clone());
            let made = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| drop(make(layer, rule))));
            let said = made.expect_err("it is refused");
            let said = said.downcast_ref::<String>().expect("a sentence");
            assert!(said.contains("contradict each other") && said.contains("Hold"), "{said}");
        }
    }
    let _ = KeyedLayer::new(keys).after_failure(AfterFailure::Rerun).transactional();
}

#[derive(Clone, Default)]
struct Warnings(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Warnings {
    fn on_event(&self, event: &tracing::Event<'_>, _: tracing_subscriber::layer::Context<'_, S>) {
        struct Message(String);
        impl tracing::field::Visit for Message {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                if field.name() == "message" {
                    self.0 = format!("{value:?}");
                }
            }
        }
        let mut message = Message(String::new());
        event.record(&mut message);
        self.0.lock().unwrap().push(message.0);
    }
}

/// A handler behind a transactional layer that does not take its transaction: what it does elsewhere is not protected.
/// The log says so, once.
#[tokio::test]
async fn t273_a_handler_that_does_not_take_its_transaction_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let keys = sqlite_keys(&dir.path().join("shop.db"));
    let lines = Warnings::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let layer = || KeyedLayer::new(keys.clone()).transactional();
    let takes = sqlite_app(layer());
    assert_eq!(send(&takes, order("takes", "book")).await.status, 201);
    let does_not = || Elsewhere::default().app(layer());
    // A line that another test's thread has met first is remembered as one that nobody listens to.
    assert_eq!(send(&does_not(), order("not-1", "book")).await.status, 201);
    tracing::callsite::rebuild_interest_cache();
    let warnings = || {
        lines.0.lock().unwrap().iter().filter(|line| line.contains("does not take its transaction")).count()
    };
    let (before, app) = (warnings(), does_not());
    assert!(before <= 1, "only the second layer may have said so");
    assert_eq!(send(&app, order("refused", "refuse")).await.status, 422);
    assert_eq!(warnings(), before, "a refusal has nothing to protect");
    for name in ["not-2", "not-3"] {
        assert_eq!(send(&app, order(name, "book")).await.status, 201);
        assert_eq!(warnings(), before + 1, "{name}");
    }
}

/// A client sends the head of a request and never the rest. It is answered, its key is free, and a handler never ran.
#[tokio::test]
async fn t415_a_body_that_never_comes_to_its_end_is_given_up() {
    let (keys, runs) = (MemoryKeys::default(), Elsewhere::default());
    let app = runs.app(KeyedLayer::new(keys.clone()).body_timeout(Duration::from_millis(50)));
    let part = futures_util::stream::iter([Ok::<_, std::io::Error>("bo")]);
    let body = Body::from_stream(futures_util::StreamExt::chain(part, futures_util::stream::pending()));
    let request = Request::post("/orders").header("Idempotency-Key", "key").body(body).unwrap();
    let got = tokio::time::timeout(PATIENCE, send(&app, request)).await.expect("an answer");
    assert_eq!((got.status, got.code().as_str()), (400, "body-unreadable"), "{got:?}");
    assert!(got.body.contains("50ms") && runs.runs() == 0, "{got:?}");
    assert_eq!(keys.get(None, &key("key")).await.unwrap().word(), "unknown");
    assert_eq!(send(&app, order("key", "book")).await.status, 201);
}
