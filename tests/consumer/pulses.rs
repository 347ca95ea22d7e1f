//! Pulses on a consumer's topic: finished for the commit point, and nothing else. No handler sees one, nothing counts it, and it is
//! never a dead letter, although there is no event in it.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::wait::until;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, PULSE, Partition, Pulse, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, Counts, Wants};
use hapax::guard::Run;
use hapax::ledger::{Baseline, Filter, Ledger, OnDead, OrderPolicy, State};
use hapax::{Event, Kind, Time, Topic};

const EVENTS: u64 = 40;

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn pulse(n: i64) -> Record {
    Pulse { at: Time::from_millis(n), partitions: 1 }.record()
}

/// A topic of two partitions with events of two aggregates, and pulses before, between and after them; one cannot be read.
async fn bus() -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
    pulses(&bus, 0).await;
    for n in 0..EVENTS {
        let (aggregate, seq) = (format!("a{}", n % 2), n / 2 + 1);
        let json = serde_json::json!({"event_id": format!("e-{n}"), "aggregate_id": aggregate, "seq": seq});
        let record = Record {
            key: Some(aggregate.into()),
            payload: Some(json.to_string().into()),
            headers: [("ce_type", if n % 4 == 0 { "odd" } else { "plain" })].into_iter().collect(),
            ..Record::default()
        };
        let partition = Partition { topic: topic(), number: i32::from(n % 2 == 1) };
        bus.publish_to(&partition, &[record]).await.unwrap().remove(0).unwrap();
        if n % 3 == 0 {
            pulses(&bus, n.cast_signed()).await;
        }
    }
    let unreadable = Record { headers: [(PULSE, "soon")].into_iter().collect(), ..pulse(1) };
    bus.publish(&topic(), &[unreadable]).await.unwrap().remove(0).unwrap();
    pulses(&bus, 99).await;
    bus
}

async fn pulses(bus: &MemoryBus, n: i64) {
    for number in 0..2 {
        let partition = Partition { topic: topic(), number };
        bus.publish_to(&partition, &[pulse(n)]).await.unwrap().remove(0).unwrap();
    }
}

fn consumer<L: Ledger + Clone>(bus: &Arc<MemoryBus>, ledger: L) -> ConsumerBuilder<L> {
    let bus: Arc<dyn Bus> = bus.clone();
    Consumer::builder(bus, ledger).scope("mailer").topic("orders").with(|settings| {
        settings.commit_interval = Duration::from_millis(5);
        settings.held_interval = Duration::from_millis(10);
    })
}

fn strict() -> OrderPolicy {
    OrderPolicy::Strict { baseline: Baseline::From(1), gap_timeout: Duration::from_secs(60) }
}

/// Runs until everything on the topic is committed and there is nothing left to do, although pulses go on.
async fn run<L: Ledger + Clone, R>(
    bus: &Arc<MemoryBus>,
    builder: ConsumerBuilder<L>,
    consume: impl FnOnce(Consumer<L>) -> R,
) -> Counts
where
    R: Future<Output = hapax::Result<Counts>> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consume(consumer));
    let finished = async || {
        for number in 0..2 {
            let partition = Partition { topic: topic(), number };
            let end = bus.range(&partition).await.unwrap().1;
            if bus.committed("mailer", &partition).await.unwrap() != Some(end) {
                return false;
            }
        }
        true
    };
    until("everything is committed", finished).await;
    let passed = handle.progress().passed;
    for n in 0..5 {
        pulses(bus, n).await;
        until("that too", finished).await;
    }
    until("it is at rest", async || handle.progress().at_rest && handle.progress().in_flight == 0).await;
    assert_eq!(handle.progress().passed, passed, "a pulse is counted nowhere");
    handle.stop();
    running.await.unwrap().unwrap()
}

type Seen = Arc<Mutex<Vec<String>>>;

async fn ends_well(ledger: &impl Ledger, counts: &Counts, seen: &Seen, wanted: u64) {
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen.len() as u64, wanted, "{counts:?}");
    assert!(seen.iter().all(|id| id.starts_with("e-")), "{seen:?}");
    assert_eq!(counts.values().sum::<u64>(), EVENTS, "{counts:?}");
    let page = ledger.list(&Filter::default(), None, 1000).await.unwrap();
    assert!(page.entries.iter().all(|entry| entry.identity.id.to_string().starts_with("e-")));
    assert!(page.entries.iter().all(|entry| entry.state != State::Dead));
}

#[tokio::test]
async fn a_leased_consumer_passes_pulses() {
    for order in [None, Some(OrderPolicy::Latest), Some(strict())] {
        let (bus, ledger, seen) = (bus().await, Arc::new(MemoryLedger::default()), Seen::default());
        let builder = consumer(&bus, Arc::clone(&ledger));
        let builder = match order {
            Some(order) => builder.order(order, OnDead::Park),
            None => builder,
        };
        let noting = Arc::clone(&seen);
        let handler = move |event: &Event, _: &Run| {
            noting.lock().unwrap().push(event.id.to_string());
            async { Ok(()) }
        };
        let counts = run(&bus, builder, |consumer| consumer.leased(handler)).await;
        ends_well(&ledger, &counts, &seen, EVENTS).await;
    }
}

/// A strict order steps past what nobody wants, and past pulses without a step.
#[tokio::test]
async fn a_strict_consumer_of_some_kinds_passes_pulses() {
    let (bus, ledger, seen) = (bus().await, Arc::new(MemoryLedger::default()), Seen::default());
    let wants = Wants::Kinds(vec![Kind::new("plain").unwrap()]);
    let builder = consumer(&bus, Arc::clone(&ledger)).order(strict(), OnDead::Park);
    let noting = Arc::clone(&seen);
    let handler = move |event: &Event| {
        noting.lock().unwrap().push(event.id.to_string());
        async { Ok(()) }
    };
    let builder = builder.with(|settings| settings.wants = wants);
    let counts = run(&bus, builder, |consumer| consumer.at_most_once(handler)).await;
    assert_eq!((counts["finished"], counts["unwanted"]), (EVENTS / 4 * 3, EVENTS / 4), "{counts:?}");
    ends_well(&ledger, &counts, &seen, EVENTS / 4 * 3).await;
}

#[cfg(feature = "sqlite")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transactional_consumer_passes_pulses() {
    use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
    for order in [OrderPolicy::Latest, strict()] {
        let folder = tempfile::tempdir().unwrap();
        let settings = hapax::ledger::Settings::default();
        let ledger = SqliteLedger::open(folder.path().join("app.db"), settings).unwrap();
        let (bus, seen) = (bus().await, Seen::default());
        let noting = Arc::clone(&seen);
        let handler = move |_: &mut SqliteTransaction, event: &Event| {
            noting.lock().unwrap().push(event.id.to_string());
            async { Ok(()) }
        };
        let builder = consumer(&bus, ledger.clone()).order(order, OnDead::Park);
        let counts = run(&bus, builder, |consumer| consumer.transactional(handler)).await;
        ends_well(&ledger, &counts, &seen, EVENTS).await;
    }
}
