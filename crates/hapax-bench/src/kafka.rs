//! The Kafka broker of the benches: fresh topics that are deleted afterwards, and hand-written
//! consumers.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hapax::bus::kafka::{KafkaBus, KafkaSettings};
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerSettings, Counts, Wants};
use hapax::ledger::Ledger;
use hapax::{Scope, Topic};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{Consumer as _, StreamConsumer};

use crate::harness::{Fallible, Missing};

/// The time limit of a measurement.
const LIMIT: Duration = Duration::from_secs(180);

/// The address of the broker.
pub fn brokers() -> Fallible<String> {
    ["HAPAX_BENCH_KAFKA", "HAPAX_TEST_KAFKA"]
        .iter()
        .find_map(|name| std::env::var(name).ok().filter(|brokers| !brokers.is_empty()))
        .ok_or_else(|| Missing("no Kafka: set HAPAX_BENCH_KAFKA to its host:port".into()).into())
}

/// The bus.
pub async fn bus() -> Fallible<Arc<KafkaBus>> {
    let bus = KafkaBus::connect(KafkaSettings::new(brokers()?)).await;
    Ok(Arc::new(bus.map_err(|error| Missing(error.chain()))?))
}

/// A unique name.
pub fn fresh(what: &str) -> String {
    format!("bench-{what}-{}", uuid::Uuid::new_v4().simple())
}

/// A fresh topic. [`delete`](Filled::delete) it when done; a failed bench leaves it behind, named
/// `bench-…`.
#[derive(Debug, Clone)]
pub struct Filled {
    /// Its name.
    pub topic: Topic,
    /// How many records it has.
    pub records: usize,
    /// How many of them are not repeats.
    pub unique: usize,
}

impl Filled {
    /// Creates a topic.
    pub async fn empty(bus: &KafkaBus, what: &str, partitions: i32) -> Fallible<Self> {
        let topic = Topic::new(fresh(what))?;
        bus.create_topic(&topic, TopicSettings::new(partitions)).await?;
        Ok(Filled { topic, records: 0, unique: 0 })
    }

    /// Publishes records.
    pub async fn publish(&mut self, bus: &KafkaBus, records: &[Record]) -> Fallible<()> {
        for part in records.chunks(5000) {
            for answer in bus.publish(&self.topic, part).await? {
                answer?;
            }
        }
        self.records += records.len();
        Ok(())
    }

    /// Deletes it.
    pub async fn delete(self) -> Fallible<()> {
        let admin: AdminClient<DefaultClientContext> = config()?.create()?;
        admin.delete_topics(&[self.topic.as_str()], &AdminOptions::new()).await?;
        Ok(())
    }
}

fn config() -> Fallible<ClientConfig> {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", brokers()?);
    Ok(config)
}

/// A hand-written consumer: a new group that reads a topic from its start. It prefetches as much as
/// ours does.
pub fn by_hand(topic: &Topic) -> Fallible<StreamConsumer> {
    let consumer: StreamConsumer = config()?
        .set("group.id", fresh("hand"))
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .set("queued.min.messages", "5000")
        // With the default of a second it would sleep whenever so much is queued.
        .set("fetch.queue.backoff.ms", "50")
        .set("fetch.max.bytes", "16777216")
        .create()?;
    consumer.subscribe(&[topic.as_str()])?;
    Ok(consumer)
}

/// Settings of a consumer that reads a topic from its start and publishes no dead letters. Its scope
/// is new, and its group has the scope's name, as by default.
pub fn settings(scope: &str, topic: &Topic) -> Fallible<ConsumerSettings> {
    let mut settings = ConsumerSettings::new(Scope::new(fresh(scope))?, vec![topic.clone()]);
    settings.dead_topic = Some(String::new());
    Ok(settings)
}

/// Deliveries per second of a consumer, from its first record until `records` of them are finished.
pub async fn consume<L: Ledger, R>(
    bus: Arc<dyn Bus>,
    ledger: L,
    mut settings: ConsumerSettings,
    run: impl FnOnce(Consumer<L>) -> R,
    records: usize,
) -> Fallible<f64>
where
    R: Future<Output = hapax::Result<Counts>> + Send + 'static,
{
    let began = Arc::new(OnceLock::new());
    let first = Arc::clone(&began);
    // Called for every incoming event: the first one starts the clock, so that joining the group
    // does not count.
    settings.wants = Wants::Matching(Arc::new(move |_| {
        first.get_or_init(Instant::now);
        true
    }));
    let consumer = Consumer::builder(bus, ledger).settings(settings).build()?;
    let handle = consumer.handle();
    let running = tokio::spawn(run(consumer));
    let limit = Instant::now() + LIMIT;
    let through = || handle.progress().passed.values().sum::<u64>() as usize;
    while through() < records && !running.is_finished() && Instant::now() < limit {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let (ended, reached) = (Instant::now(), through());
    handle.stop();
    let counts = running.await??;
    if reached < records {
        return Err(format!("{reached} of {records} deliveries were through: {counts:?}").into());
    }
    let began = began.get().ok_or("nothing was delivered")?;
    Ok(records as f64 / ended.duration_since(*began).as_secs_f64())
}
