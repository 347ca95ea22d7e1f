//! A partition goes from one consumer to another while something of it runs: it goes at once, and nothing is lost, doubled or put
//! out of order. What runs goes on under its claim; the next owner reads it first, meets the claim, and waits in its key's queue.
#![cfg(all(feature = "testing", feature = "postgres", feature = "kafka"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::postgres as support;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::backend::postgres::PgTx;
use hapax::bus::kafka::GroupProtocol;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Partition, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, ConsumerHandle, Counts};
use hapax::guard::Run;
use hapax::testing::kafka::{connect, settings};
use hapax::{Event, Topic};
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// What handlers did, in order; and a gate before the end of those whose id begins with `slow`.
#[derive(Clone)]
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    gate: Arc<watch::Sender<bool>>,
}

impl Log {
    fn new() -> Self {
        Log { lines: Arc::default(), gate: Arc::new(watch::channel(false).0) }
    }

    async fn handle(&self, who: &'static str, id: String) {
        self.say(format!("{id} begins at {who}"));
        if id.starts_with("slow") {
            self.gate.subscribe().wait_for(|open| *open).await.unwrap();
        }
        self.say(format!("{id} ends at {who}"));
    }

    fn say(&self, line: String) {
        self.lines.lock().unwrap().push(line);
    }

    fn all(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }

    fn has(&self, text: &str) -> bool {
        self.all().iter().any(|line| line.starts_with(text))
    }

    fn place(&self, text: &str) -> usize {
        let all = self.all();
        let places: Vec<_> = (0..all.len()).filter(|at| all[*at].starts_with(text)).collect();
        assert_eq!(places.len(), 1, "{text:?} once: {all:#?}");
        places[0]
    }
}

async fn until(what: &str, log: &Log, is: impl Fn() -> bool) {
    let end = std::time::Instant::now() + Duration::from_secs(120);
    while !is() {
        assert!(std::time::Instant::now() < end, "never came: {what}; {:#?}", log.all());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

struct Stage {
    bus: Arc<dyn Bus>,
    topic: Topic,
    scope: String,
    /// Two keys of each partition.
    keys: Vec<[String; 2]>,
}

impl Stage {
    async fn new(bus: Arc<dyn Bus>) -> Self {
        let name = |what: &str| format!("{what}-{}", uuid::Uuid::new_v4().simple());
        let (topic, probe) = (Topic::new(name("handover")).unwrap(), Topic::new(name("keys")).unwrap());
        for topic in [&topic, &probe] {
            bus.create_topic(topic, TopicSettings::new(2)).await.unwrap();
        }
        let mut keys: Vec<Vec<String>> = vec![Vec::new(); 2];
        for n in 0.. {
            let key = format!("k{n}");
            let record = Record { key: Some(key.clone().into()), ..Record::default() };
            let origin = bus.publish(&probe, &[record]).await.unwrap().remove(0).unwrap();
            keys[usize::try_from(origin.partition).unwrap()].push(key);
            if keys.iter().all(|keys| keys.len() >= 2) {
                break;
            }
        }
        let keys = keys.into_iter().map(|keys| [keys[0].clone(), keys[1].clone()]).collect();
        Stage { bus, topic, scope: name("scope"), keys }
    }

    /// Publishes an event to each partition, under its first or its second key.
    async fn publish(&self, name: &str, which: usize) {
        for (number, keys) in self.keys.iter().enumerate() {
            let id = format!("{name}-{number}");
            let record = Record {
                key: Some(keys[which].clone().into()),
                payload: Some(format!("{{\"event_id\":\"{id}\"}}").into()),
                ..Record::default()
            };
            let origin = self.bus.publish(&self.topic, &[record]).await.unwrap().remove(0).unwrap();
            assert_eq!(usize::try_from(origin.partition).unwrap(), number);
        }
    }

    async fn committed(&self) -> Vec<Option<i64>> {
        let mut all = Vec::new();
        for number in 0..2 {
            let partition = Partition { topic: self.topic.clone(), number };
            all.push(self.bus.committed(&self.scope, &partition).await.unwrap());
        }
        all
    }

    fn consumer<L: hapax::ledger::Ledger>(&self, ledger: L) -> ConsumerBuilder<L> {
        Consumer::builder(self.bus.clone(), ledger).scope(&self.scope).topic(self.topic.as_str()).with(
            |settings| {
                settings.commit_interval = Duration::from_millis(20);
                settings.drain = Duration::from_secs(60);
                settings.batch_max = 1; // what is slow blocks its own transaction only
                settings.dead_topic = Some(String::new());
            },
        )
    }

    /// Two consumers; the second starts while both partitions have something slow under way at the first.
    async fn hand_over<C>(&self, log: &Log, start: impl Fn(&'static str) -> C)
    where
        C: IntoFuture<Output = (ConsumerHandle, Running)>,
    {
        // The first claim of a scope makes its row, and others wait for that.
        self.publish("warm", 0).await;
        let (first, first_runs) = start("first").await;
        until("the first ones", log, || log.has("warm-0 ends") && log.has("warm-1 ends")).await;
        self.publish("slow", 0).await;
        until("both under way", log, || log.has("slow-0 begins") && log.has("slow-1 begins")).await;
        self.publish("next", 0).await;
        let (second, second_runs) = start("second").await;
        // What runs is not waited for.
        until("one each", log, || first.progress().partitions == 1 && second.progress().partitions == 1)
            .await;
        // What stays goes on, what moved goes on, but for the keys that have something under way.
        self.publish("other", 1).await;
        until("the other keys", log, || log.has("other-0 ends") && log.has("other-1 ends")).await;
        let places = [log.place("other-0 ends"), log.place("other-1 ends")].map(|at| log.all()[at].clone());
        assert!(places.iter().any(|line| line.ends_with("first")), "{places:?}");
        assert!(places.iter().any(|line| line.ends_with("second")), "{places:?}");
        assert!(!log.has("next-"), "it must wait for what runs: {:#?}", log.all());
        log.gate.send_replace(true);
        until("the keys that waited", log, || log.has("next-0 ends") && log.has("next-1 ends")).await;
        for number in 0..2 {
            assert!(log.place(&format!("slow-{number} ends")) < log.place(&format!("next-{number} begins")));
            assert!(
                log.all()[log.place(&format!("slow-{number} ends"))].ends_with("first"),
                "{:#?}",
                log.all()
            );
        }
        for (handle, runs) in [(first, first_runs), (second, second_runs)] {
            handle.stop();
            runs.await.unwrap().unwrap();
        }
        assert_eq!(self.committed().await, [Some(4), Some(4)], "{:#?}", log.all());
    }
}

type Running = JoinHandle<hapax::Result<Counts>>;

fn run<L: hapax::ledger::Ledger + Clone, R>(
    builder: ConsumerBuilder<L>,
    consume: impl FnOnce(Consumer<L>) -> R,
) -> (ConsumerHandle, Running)
where
    R: Future<Output = hapax::Result<Counts>> + Send + 'static,
{
    let consumer = builder.build().unwrap();
    (consumer.handle(), tokio::spawn(consume(consumer)))
}

async fn leased_over(bus: Arc<dyn Bus>) {
    let (stage, log, ledger) = (Stage::new(bus).await, Log::new(), MemoryLedger::default());
    let start = |who: &'static str| {
        let log = log.clone();
        let handler = move |event: &Event, _: &Run| {
            let (log, id) = (log.clone(), event.id.as_str().into_owned());
            async move {
                log.handle(who, id).await;
                Ok(())
            }
        };
        std::future::ready(run(stage.consumer(ledger.clone()), |consumer| consumer.leased(handler)))
    };
    stage.hand_over(&log, start).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_partition_goes_at_once_and_its_keys_wait_for_what_runs() {
    leased_over(Arc::new(MemoryBus::default())).await;
}

/// librdkafka stops all partitions of a member until it has answered: it answers at once, so what stays goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn on_kafka_a_revoked_partition_goes_at_once_and_what_stays_goes_on() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        settings.poll_interval_max = Duration::from_secs(300);
        leased_over(Arc::new(connect(settings).await)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_a_revoked_partition_goes_at_once_and_its_keys_wait_for_open_transactions() {
    let (stage, log) = (Stage::new(Arc::new(MemoryBus::default())).await, Log::new());
    let ledger = support::ledger(8).await;
    let start = |who: &'static str| {
        let log = log.clone();
        let handler = move |_: &mut PgTx, event: &Event| {
            let (log, id) = (log.clone(), event.id.as_str().into_owned());
            async move {
                log.handle(who, id).await;
                Ok(())
            }
        };
        std::future::ready(run(stage.consumer(ledger.clone()), |consumer| consumer.transactional(handler)))
    };
    stage.hand_over(&log, start).await;
}
