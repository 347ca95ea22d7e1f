//! The broker is killed (kill -9) under load and comes back: nothing that was acknowledged is missing, what cannot be done is
//! reported in bounded time, and the log has a few lines about it, not one per second. Consumers on it lose and double nothing.
#![cfg(all(feature = "testing", feature = "postgres", feature = "kafka", feature = "http"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use crate::support::world;
use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax::bus::kafka::{GroupProtocol, KafkaBus};
use hapax::bus::{Assignment, Bus, BusEvent, Partition, Record, Subscriber, Subscription, TopicSettings};
use hapax::testing::kafka::{connect, settings};
use hapax::{Error, Topic};
use tracing_subscriber::layer::{Context, SubscriberExt};

const DEADLINE: Duration = Duration::from_secs(120);

/// The one outage that all scenarios go through: a broker takes its time to start.
struct Outage(tokio::sync::Barrier);

impl Outage {
    fn new(scenarios: usize) -> Self {
        Outage(tokio::sync::Barrier::new(scenarios))
    }

    /// Waits until all are ready for it; then the broker is killed.
    async fn begin(&self) {
        self.all("kill").await;
    }

    /// Waits until all have seen enough of it; then the broker is back.
    async fn end(&self) {
        self.all("up").await;
    }

    async fn all(&self, command: &'static str) {
        if self.0.wait().await.is_leader() {
            services(command).await;
        }
        self.0.wait().await;
    }
}

/// Remembers the lines that an operator would see.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                use std::fmt::Write as _;
                let _ = write!(self.0, "{field}={value:?} ");
            }
        }
        if *event.metadata().level() <= tracing::Level::INFO && event.metadata().target() == "hapax::kafka" {
            let mut text = Text(format!("{} ", event.metadata().level()));
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
    }
}

async fn services(command: &'static str) {
    let status = tokio::task::spawn_blocking(move || {
        Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/services"))
            .args([command, "kafka"])
            .status()
    });
    assert!(
        status.await.unwrap().expect("scripts/services runs").success(),
        "scripts/services {command} kafka"
    );
}

/// Publishes numbers until told to stop; each until it is acknowledged.
async fn publish_all(bus: KafkaBus, topic: Topic, stop: Arc<AtomicBool>, count: Arc<AtomicUsize>) -> usize {
    let mut next = 0;
    let mut failures = 0;
    while !stop.load(Ordering::SeqCst) {
        let mut batch: Vec<usize> = (next..next + 20).collect();
        next += 20;
        while !batch.is_empty() {
            let records: Vec<_> = batch
                .iter()
                .map(|n| Record {
                    key: Some(format!("key-{}", n % 7).into()),
                    payload: Some(n.to_string().into()),
                    ..Record::default()
                })
                .collect();
            let answers = match bus.publish(&topic, &records).await {
                Ok(answers) => answers,
                Err(error) => {
                    assert!(error.is_retryable(), "{error:?}");
                    failures += batch.len();
                    continue;
                }
            };
            let mut left = Vec::new();
            for (n, answer) in batch.into_iter().zip(answers) {
                match answer {
                    Ok(_) => {
                        count.fetch_add(1, Ordering::SeqCst);
                    }
                    Err(error) => {
                        assert!(error.is_retryable(), "{error:?}");
                        left.push(n);
                    }
                }
            }
            failures += left.len();
            batch = left;
        }
    }
    println!("{failures} answers were failures");
    next
}

struct Consumer {
    member: Box<dyn Subscriber>,
    held: BTreeMap<Partition, Assignment>,
    after: BTreeMap<Partition, i64>,
    received: BTreeSet<usize>,
    again: usize,
}

impl Consumer {
    async fn listen(&mut self) {
        let Ok(received) = tokio::time::timeout(Duration::from_millis(200), self.member.next()).await else {
            return;
        };
        match received.expect("an outage is not an error of `next`") {
            BusEvent::Assigned(given) => {
                for assigned in given {
                    self.after.remove(&assigned.partition);
                    self.held.insert(assigned.partition.clone(), assigned);
                }
            }
            BusEvent::Removed { partition, offsets } => panic!("{offsets:?} of {partition} removed"),
            BusEvent::Revoked(gone) | BusEvent::Lost(gone) => {
                for assigned in &gone {
                    self.held.remove(&assigned.partition);
                }
                self.member.release(&gone).await.unwrap();
            }
            BusEvent::Records(records) => {
                for received in records {
                    let origin = &received.origin;
                    let partition = Partition { topic: origin.topic.clone(), number: origin.partition };
                    let after = self.after.insert(partition, origin.offset + 1).unwrap_or(0);
                    assert!(origin.offset >= after, "{} after {}", origin.offset, after - 1);
                    let number = std::str::from_utf8(received.record.payload.as_ref().unwrap()).unwrap();
                    if !self.received.insert(number.parse().unwrap()) {
                        self.again += 1;
                    }
                }
            }
        }
    }

    async fn commit(&mut self) -> Result<(), Error> {
        let offsets: Vec<_> = self
            .held
            .values()
            .filter_map(|held| self.after.get(&held.partition).map(|after| (held.clone(), *after)))
            .collect();
        self.member.commit(&offsets).await?.into_iter().collect()
    }
}

async fn survives(protocol: GroupProtocol, outage: &Outage) {
    let mut settings = settings();
    settings.group_protocol = protocol;
    settings.answer_timeout = Duration::from_secs(5);
    settings.poll_interval_max = Duration::from_secs(60);
    let bus = connect(settings).await;
    let topic = Topic::new(format!("outage-{}", uuid::Uuid::new_v4().simple())).unwrap();
    bus.create_topic(&topic, TopicSettings::new(3)).await.unwrap();
    let group = format!("group-{}", uuid::Uuid::new_v4().simple());
    let member = bus.subscribe(Subscription::new(group.as_str(), [topic.clone()]).unwrap()).await.unwrap();
    let mut consumer = Consumer {
        member,
        held: BTreeMap::new(),
        after: BTreeMap::new(),
        received: BTreeSet::new(),
        again: 0,
    };
    let (stop, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let publishing =
        tokio::spawn(publish_all(bus.clone(), topic.clone(), stop.clone(), acknowledged.clone()));
    let end = Instant::now() + DEADLINE;
    while consumer.received.len() < 500 {
        assert!(Instant::now() < end, "nothing is received");
        consumer.listen().await;
    }
    consumer.commit().await.expect("a commit");

    outage.begin().await;
    consumer.listen().await;
    let began = Instant::now();
    let error = consumer.commit().await.expect_err("nobody is there");
    println!("{protocol:?}: a commit fails after {:?}: {}", began.elapsed(), error.chain());
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(60));
    let began = Instant::now();
    let error = bus.range(&Partition { topic: topic.clone(), number: 0 }).await.expect_err("nobody is there");
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(began.elapsed() < Duration::from_secs(60));
    outage.end().await;
    let back = Instant::now();
    let end = back + DEADLINE; // a broker may take a minute to start

    let (before, seen) = (acknowledged.load(Ordering::SeqCst), consumer.received.len());
    let (mut published, mut received) = (None, None);
    while acknowledged.load(Ordering::SeqCst) < before + 500 || consumer.received.len() < seen + 100 {
        assert!(Instant::now() < end, "it does not go on: {} received", consumer.received.len());
        consumer.listen().await;
        if acknowledged.load(Ordering::SeqCst) > before + 40 {
            published.get_or_insert_with(|| back.elapsed());
        }
        if acknowledged.load(Ordering::SeqCst) >= before + 500 {
            stop.store(true, Ordering::SeqCst); // a group that takes long to come back need not read more than that
        }
        if consumer.received.len() > seen + 40 {
            received.get_or_insert_with(|| back.elapsed());
        }
    }
    println!("{protocol:?}: after it is back: published {published:?}, received {received:?}");
    let total = publishing.await.unwrap();
    while consumer.received.len() < total {
        assert!(Instant::now() < end, "{} of {total} received", consumer.received.len());
        consumer.listen().await;
    }
    assert_eq!(consumer.received.last(), Some(&(total - 1)));
    // The group may not have settled yet: then it is heard, and tried again.
    while let Err(error) = consumer.commit().await {
        assert!(Instant::now() < end, "commits do not work again: {error:?}");
        consumer.listen().await;
    }
    for (partition, after) in &consumer.after {
        assert_eq!(bus.committed(&group, partition).await.unwrap(), Some(*after));
    }
    println!("{protocol:?}: {total} published, {} of them received again", consumer.again);
    consumer.member.leave().await.unwrap();
}

/// Two transactional worker processes on the broker, and somebody who publishes for them.
struct Workers {
    world: Arc<world::World>,
    _processes: [tokio::process::Child; 2],
    stop: Arc<AtomicBool>,
    publishing: tokio::task::JoinHandle<usize>,
}

impl Workers {
    /// Both are at work.
    async fn new(test: &'static str) -> Self {
        let world = Arc::new(world::World::new(test, 3).await);
        let stop = Arc::new(AtomicBool::new(false));
        let publishing = tokio::spawn({
            let (world, stop) = (Arc::clone(&world), Arc::clone(&stop));
            async move {
                let mut count = 0;
                while !stop.load(Ordering::SeqCst) {
                    let batch: Vec<_> =
                        (count..count + 10).map(|n| world::event(&format!("e-{n}"))).collect();
                    world.insist(&batch).await;
                    count += 10;
                    tokio::time::sleep(Duration::from_millis(10)).await; // the load, not a wait
                }
                count
            }
        });
        let processes = [world.spawn(&[]), world.spawn(&[])];
        world::until("both are at work", || async { world.workers().await == 2 }).await;
        Workers { world, _processes: processes, stop, publishing }
    }

    /// What was acknowledged takes effect once, though some of it was sent again, and all that was not committed is delivered again.
    async fn survive(self, outage: &Outage) {
        let took_effect = async || self.world.effect_counts().await.len();
        outage.begin().await;
        let before = took_effect().await;
        outage.end().await;
        let after = took_effect().await;
        world::until("they go on", || async { took_effect().await > after + 200 }).await;
        self.stop.store(true, Ordering::SeqCst);
        let total = self.publishing.await.unwrap();
        let doubled = self.world.until_effects(total).await;
        world::until("the offsets move again", || self.world.is_through()).await;
        let all = self.world.effect_counts().await.len();
        println!(
            "{total} acknowledged, {all} took effect ({before} before the broker was killed, {after} when it was back), {doubled} repeated"
        );
        assert_eq!((all, doubled), (total, 0));
    }
}

/// Members of both group protocols, and consumer processes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broker_that_is_killed_under_load_loses_nothing() {
    world::play!();
    let _broker = crate::BROKER.lock().await;
    let lines = Lines::default();
    tracing::subscriber::set_global_default(tracing_subscriber::registry().with(lines.clone())).unwrap();
    let workers = Workers::new("a_broker_that_is_killed_under_load_loses_nothing").await;
    lines.0.lock().unwrap().clear();
    let outage = Outage::new(3);
    tokio::join!(
        survives(GroupProtocol::Classic, &outage),
        survives(GroupProtocol::Consumer, &outage),
        workers.survive(&outage)
    );
    let logged = std::mem::take(&mut *lines.0.lock().unwrap());
    for line in &logged {
        println!("  {line}");
    }
    let with = |words| logged.iter().filter(|line| line.contains(words)).count();
    assert!(with("Kafka is away") >= 3, "an outage is logged on each of three buses");
    assert!(with("Kafka is back") >= 3, "and its end");
    assert!(logged.len() <= 3 * 15, "{} lines for one outage", logged.len());
}
