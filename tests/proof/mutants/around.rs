//! What is before and behind the consumer: a relay, keyed writes, a read model.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use axum::Router;
use axum::body::Body;
use axum::http::Request;
use axum::routing::post;
use hapax::analytics::{Input, MemoryReadModel};
use hapax::bus::{Bus, MemoryBus, Received, Record, TopicSettings};
use hapax::clock::ManualClock;
use hapax::event::Origin;
use hapax::journal::{Append, Expected, Journal as _, JournalSettings, MemoryJournal};
use hapax::keyed::{
    Answer, Begin, Begun, Decided, Ended, IdempotencyKey, KeyEntry, KeyLease, KeyStatus, KeySweep,
    KeyedLayer, Keys, KeysCapabilities, KeysInfo, ListKeys, MemoryKeys, Resolution, SweptKeys,
};
use hapax::relay::{Relay, RelaySettings};
use hapax::testing::relay::{FaultyBus, away, read_topic, witness};
use hapax::testing::{analytics, keyed};
use hapax::{Aggregate, Event, EventId, RelayName, Result, Tenant, Time, Topic};
use tower::ServiceExt as _;

const EVENTS: usize = 20;
/// Longer than anything here takes; virtual time, so a busy machine does not need more.
const PATIENCE: Duration = Duration::from_secs(60);

/// The bus refuses everything, and then the relay dies. The next one publishes all of it.
#[tokio::test(start_paused = true)]
async fn a_relay_that_dies_leaves_nothing_unpublished() {
    let topic = Topic::new("orders").unwrap();
    let memory = MemoryBus::default();
    memory.create_topic(&topic, TopicSettings::new(3)).await.unwrap();
    let bus = Arc::new(FaultyBus::new(Arc::new(memory)));
    let clock = ManualClock::new(Time::parse("2026-01-02T03:04:05Z").unwrap());
    let journal = Arc::new(MemoryJournal::with_clock(JournalSettings::default(), Arc::new(clock.clone())));
    for n in 0..EVENTS {
        let aggregate = Aggregate::new(format!("a{}", n % 4)).unwrap();
        let append = Append::new(aggregate, Expected::Any, [Event::new(EventId::now_v7())]);
        let _ = journal.append(&append).await.unwrap();
    }
    let start = || {
        let settings = RelaySettings::new(RelayName::new("main").unwrap(), topic.clone());
        tokio::spawn(Relay::new(journal.clone(), bus.clone(), settings).unwrap().run())
    };
    let refused = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&refused);
    bus.fail(move |_| {
        count.fetch_add(1, Ordering::SeqCst);
        Some(away())
    });
    let first = start();
    while refused.load(Ordering::SeqCst) == 0 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    first.abort();
    assert!(first.await.unwrap_err().is_cancelled());
    clock.advance(Duration::from_secs(3600)); // nobody leads any more
    bus.heal();
    let heir = start();
    let published = async || witness(&read_topic(&*bus, &topic).await).unwrap().events;
    let end = tokio::time::Instant::now() + PATIENCE;
    while published().await < EVENTS && tokio::time::Instant::now() < end {
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let missing = EVENTS - published().await;
    assert_eq!(missing, 0, "not published: {missing} of {EVENTS}");
    heir.abort();
}

/// Keys whose answers take a second to be stored, so that it can be seen what happens meanwhile.
#[derive(Debug, Clone)]
struct Slow(MemoryKeys);

#[async_trait]
impl Keys for Slow {
    async fn begin(&self, begin: &Begin) -> Result<Begun> {
        self.0.begin(begin).await
    }
    async fn extend(&self, of: &KeyLease, lease: Duration) -> Result<()> {
        self.0.extend(of, lease).await
    }
    async fn finish(&self, of: &KeyLease, answer: &Answer) -> Result<()> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.finish(of, answer).await
    }
    async fn release(&self, of: &KeyLease, ended: Ended) -> Result<()> {
        self.0.release(of, ended).await
    }
    async fn get(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<KeyStatus> {
        self.0.get(tenant, key).await
    }
    async fn resolve(&self, of: &KeyLease, how: &Resolution, who: &Decided) -> Result<()> {
        self.0.resolve(of, how, who).await
    }
    async fn entry(&self, tenant: Option<&Tenant>, key: &IdempotencyKey) -> Result<Option<KeyEntry>> {
        self.0.entry(tenant, key).await
    }
    async fn list(&self, which: &ListKeys) -> Result<Vec<KeyEntry>> {
        self.0.list(which).await
    }
    async fn sweep(&self, sweep: &KeySweep) -> Result<SweptKeys> {
        self.0.sweep(sweep).await
    }
    async fn info(&self) -> Result<KeysInfo> {
        self.0.info().await
    }
    fn secret(&self) -> &[u8; 32] {
        self.0.secret()
    }
    fn capabilities(&self) -> KeysCapabilities {
        self.0.capabilities()
    }
}

/// A process may die as soon as its client has the answer: then the key has to be there.
#[tokio::test(start_paused = true)]
async fn an_answer_is_kept_before_it_is_sent() {
    let keys = Slow(MemoryKeys::default());
    let app = Router::new().route("/orders", post(async || "done")).layer(KeyedLayer::new(keys.clone()));
    let request = Request::post("/orders").header("Idempotency-Key", "key").body(Body::empty()).unwrap();
    let response = app.oneshot(request).await.unwrap();
    assert_eq!(response.status(), 200);
    let word = keys.get(None, &keyed::key("key")).await.unwrap().word();
    assert_eq!(word, "done", "the answer was sent, and its key is {word}");
}

/// What a relay publishes of a record that was written by a server with this clock.
fn published(seq: u64, updated_at: &str) -> Received {
    let id = "00000000-0000-0000-0000-000000000007";
    let body = serde_json::json!({
        "id": id, "module": "orders", "seq": seq, "payload": {"seq": seq},
        "created_at": "2026-01-02T03:00:00Z", "updated_at": updated_at,
    });
    let headers = [
        ("ce_type", "record.updated".to_owned()),
        ("aggregate_id", format!("orders/{id}")),
        ("sequence_number", seq.to_string()),
    ];
    let headers = headers.into_iter().collect();
    let record = Record { payload: Some(body.to_string().into()), headers, ..Record::default() };
    Received::new(record, Origin::new(analytics::topic(), 0, seq as i64))
}

/// A record is written twice. The server of the later write has a clock that is behind.
#[tokio::test]
async fn the_later_write_counts_whatever_clocks_say() {
    let model = MemoryReadModel::default();
    for (seq, at) in [(1, "2026-01-02T03:04:05Z"), (2, "2026-01-02T03:04:04Z")] {
        let Ok(Input::Change(change)) = Input::of(&published(seq, at), 1) else { panic!("a change") };
        analytics::apply(&model, analytics::block([*change])).await;
    }
    let shown: Vec<_> = analytics::shown(&model).await.into_iter().map(|(_, _, payload)| payload).collect();
    assert_eq!(shown, [r#"{"seq":2}"#], "the read model shows an outdated row");
}
