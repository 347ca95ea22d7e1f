//! What becomes of a record on its way through the ledger and out to the dead letters: its bytes, and what is told of it.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

#[path = "faulty/mod.rs"]
mod faulty;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Heard, Partition, Record, Subscription, TopicTerms};
use hapax::consumer::{Consumer, ConsumerBuilder, Failed, Handled, OutagePolicy, leased};
use hapax::{Event, Headers, Topic};

fn topic(name: &str) -> Topic {
    Topic::new(name).unwrap()
}

fn record(id: &str, payload: Option<&'static str>) -> Record {
    Record {
        key: Some(id.to_owned().into()),
        payload: payload.map(Into::into),
        headers: Headers::from_iter([("idempotency_key", id.to_owned())]),
        ..Record::default()
    }
}

async fn bus(records: &[Record]) -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic("orders"), TopicTerms::new(1)).await.unwrap();
    for answer in bus.publish(&topic("orders"), records).await.unwrap() {
        answer.unwrap();
    }
    bus
}

fn consumer(bus: &Arc<MemoryBus>, ledger: &faulty::Faulty) -> ConsumerBuilder<faulty::Faulty> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger.clone()).scope("mailer").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(5);
        settings.backoff_max = Duration::from_millis(20);
        settings.hold_max = Duration::from_millis(1);
        settings.held_interval = Duration::from_millis(10);
    })
}

/// Runs until so many dead letters are there, and hands them out.
async fn dead_letters<R>(
    bus: &MemoryBus,
    builder: ConsumerBuilder<faulty::Faulty>,
    handler: impl Fn(Event) -> R + Send + Sync + 'static,
    count: i64,
) -> Vec<Record>
where
    R: Future<Output = Handled> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.run(leased(move |event, _| handler(event))));
    let dead = Partition { topic: topic("orders.dead"), number: 0 };
    for _ in 0..3000 {
        if bus.range(&dead).await.is_ok_and(|(_, end)| end == count) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    handle.stop();
    running.await.unwrap().unwrap();
    let mut reader =
        bus.subscribe(Subscription::new("reader", [topic("orders.dead")]).unwrap()).await.unwrap();
    let mut letters = Vec::new();
    while i64::try_from(letters.len()).unwrap() < count {
        if let Heard::Records(records) = reader.next().await.unwrap() {
            letters.extend(records.into_iter().map(|received| received.record));
        }
    }
    letters
}

fn header(record: &Record, name: &str) -> String {
    let value = record.headers.get(&format!("hapax-dead-{name}"));
    String::from_utf8(value.unwrap_or_else(|| panic!("no {name}")).to_vec()).unwrap()
}

/// A record without a payload is not one with an empty payload: held, delivered again, dead, and copied out.
#[tokio::test]
async fn a_tombstone_stays_a_tombstone() {
    let bus = bus(&[record("gone", None), record("empty", Some(""))]).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&runs);
    let handler = move |_| {
        counter.fetch_add(1, Ordering::SeqCst);
        async { Err(Failed::retryable("no")) }
    };
    let mut letters = dead_letters(&bus, consumer(&bus, &faulty::Faulty::default()), handler, 2).await;
    letters.sort_by_key(|letter| letter.key.clone());
    let payloads: Vec<_> = letters.iter().map(|letter| letter.payload.as_deref()).collect();
    assert_eq!(payloads, [Some(&b""[..]), None]);
    assert_eq!(runs.load(Ordering::SeqCst), 10, "each ran five times");
}

/// What is copied because the ledger is away has all the headers of a dead letter.
#[tokio::test]
async fn what_was_never_claimed_is_told_like_any_dead_letter() {
    let bus = bus(&[record("e", Some("{}"))]).await;
    let ledger = faulty::Faulty::default();
    ledger.faults.claims_lost.store(u32::MAX, Ordering::SeqCst);
    let builder = consumer(&bus, &ledger).with(|settings| settings.outage = OutagePolicy::DeadLetter);
    let letter = dead_letters(&bus, builder, |_| async { Ok(()) }, 1).await.remove(0);
    for name in ["reason", "scope", "topic", "partition", "offset"] {
        header(&letter, name);
    }
    assert_eq!((header(&letter, "code"), header(&letter, "attempts")), ("unavailable".into(), "0".into()));
    let (first, last) = (header(&letter, "first-at"), header(&letter, "last-at"));
    assert_eq!(first, last);
    assert!(hapax::Time::parse(&first).is_ok(), "{first}");
}
