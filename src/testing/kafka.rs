//! A real Kafka under test, and what tests do to it that a bus has no word for: transactions, topics with other settings,
//! deletion.

use std::time::Duration;

use async_trait::async_trait;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::producer::{BaseProducer, BaseRecord, Producer};
use rdkafka::{Offset, TopicPartitionList};

use super::bus::BusHarness;
use crate::bus::kafka::{GroupProtocol, KafkaBus, KafkaSettings};
use crate::bus::{Bus, Partition};
use crate::id::Topic;

const TIMEOUT: Duration = Duration::from_secs(30);

/// The broker of the tests.
pub fn brokers() -> String {
    std::env::var("HAPAX_TEST_KAFKA").expect("HAPAX_TEST_KAFKA: run scripts/test")
}

/// Settings for it, quick to notice a member that stands still.
pub fn settings() -> KafkaSettings {
    let mut settings = KafkaSettings::new(brokers());
    settings.poll_interval_max = Duration::from_secs(6);
    settings
}

/// A connection of its own.
pub async fn connect(settings: KafkaSettings) -> KafkaBus {
    KafkaBus::connect(settings).await.expect("Kafka is there")
}

fn admin() -> AdminClient<DefaultClientContext> {
    ClientConfig::new().set("bootstrap.servers", brokers()).create().expect("an admin client")
}

/// Makes a topic with settings of its own.
pub async fn topic_with(topic: &Topic, partitions: i32, config: &[(&str, &str)]) {
    let new = config
        .iter()
        .fold(NewTopic::new(topic.as_str(), partitions, TopicReplication::Fixed(1)), |new, (k, v)| {
            new.set(k, v)
        });
    let options = AdminOptions::new().operation_timeout(Some(TIMEOUT));
    for made in admin().create_topics([&new], &options).await.expect("an answer") {
        made.expect("the topic is made");
    }
    // The broker's clients learn of it a moment later.
    let bus = connect(settings()).await;
    while bus.topic(topic).await.expect("an answer").is_none() {
        tokio::task::yield_now().await;
    }
}

/// Deletes a topic.
pub async fn delete_topic(topic: &Topic) {
    let options = AdminOptions::new().operation_timeout(Some(TIMEOUT));
    for gone in admin().delete_topics(&[topic.as_str()], &options).await.expect("an answer") {
        gone.expect("the topic is deleted");
    }
}

/// Removes the records of a partition below an offset, as retention does.
pub async fn remove_below(partition: &Partition, offset: i64) {
    let mut list = TopicPartitionList::new();
    list.add_partition_offset(partition.topic.as_str(), partition.number, Offset::Offset(offset))
        .expect("an offset");
    let removed = admin().delete_records(&list, &AdminOptions::new()).await.expect("an answer");
    for element in removed.elements() {
        element.error().expect("records are removed");
    }
}

/// Has a topic so many partitions.
pub async fn add_partitions(topic: &Topic, count: usize) {
    let more = rdkafka::admin::NewPartitions::new(topic.as_str(), count);
    let options = AdminOptions::new().operation_timeout(Some(TIMEOUT));
    for made in admin().create_partitions([&more], &options).await.expect("an answer") {
        made.expect("partitions are added");
    }
    // The broker's clients learn of it a moment later.
    let bus = connect(settings()).await;
    while bus.topic(topic).await.expect("an answer").is_none_or(|info| info.partitions < count as i32) {
        tokio::task::yield_now().await;
    }
}

/// Publishes payloads to one partition. Blocks.
pub fn produce_to(topic: &Topic, partition: i32, payloads: &[&str]) {
    let producer: BaseProducer =
        ClientConfig::new().set("bootstrap.servers", brokers()).create().expect("a producer");
    for payload in payloads {
        let record = BaseRecord::<(), str>::to(topic.as_str()).partition(partition).payload(payload);
        producer.send(record).map_err(|(error, _)| error).expect("it is sent");
    }
    producer.flush(TIMEOUT).expect("it is acknowledged");
}

/// Publishes payloads to partition 0 in one transaction, and commits or aborts it. Blocks.
pub fn transaction(topic: &Topic, payloads: &[&str], commit: bool) {
    let producer: BaseProducer = ClientConfig::new()
        .set("bootstrap.servers", brokers())
        .set("transactional.id", uuid::Uuid::new_v4().to_string())
        // With more, a new partition that refuses the first batch loses it (T335).
        .set("max.in.flight.requests.per.connection", "1")
        .create()
        .expect("a producer");
    producer.init_transactions(TIMEOUT).expect("transactions");
    producer.begin_transaction().expect("a transaction");
    for payload in payloads {
        let record = BaseRecord::<(), str>::to(topic.as_str()).partition(0).payload(payload);
        producer.send(record).map_err(|(error, _)| error).expect("it is sent");
    }
    // What aborts must have reached the log first, to be skipped there.
    producer.flush(TIMEOUT).expect("it is acknowledged");
    if commit {
        producer.commit_transaction(TIMEOUT).expect("it is committed");
    } else {
        producer.abort_transaction(TIMEOUT).expect("it is aborted");
    }
}

/// The bus over the broker of the tests.
#[derive(Debug)]
pub struct KafkaBusHarness(GroupProtocol);

impl KafkaBusHarness {
    /// With groups of either protocol.
    pub fn new(protocol: GroupProtocol) -> Self {
        KafkaBusHarness(protocol)
    }
}

#[async_trait]
impl BusHarness for KafkaBusHarness {
    type Bus = KafkaBus;

    async fn open(&self) -> KafkaBus {
        let mut settings = settings();
        settings.group_protocol = self.0;
        connect(settings).await
    }

    async fn silence(&self, bus: &KafkaBus) {
        bus.silence(true);
    }

    async fn wake(&self, bus: &KafkaBus) {
        bus.silence(false);
    }

    async fn remove_below(&self, partition: &Partition, offset: i64) {
        remove_below(partition, offset).await;
    }

    fn others_go_on(&self) -> bool {
        false
    }
}
