//! A topic gets more partitions while Debezium is behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax::analytics::{Feed, FeedSettings, MemoryReadModel, ReadModel, Source, Uuid};
use hapax::bus::{
    Bus, Capabilities, MemoryBus, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings,
};
use hapax::event::Origin;
use hapax::records::ModuleSlug;
use hapax::{Error, Result, Time, Topic};
use serde_json::{Value, json};

use crate::debezium::{at, message, row, topic};
use crate::support::wait::{until, until_so};

/// A bus that shows the first partitions of its topic, or does not answer who counts them.
struct Growing {
    inner: MemoryBus,
    shown: AtomicI32,
    away: AtomicBool,
    asked_away: AtomicBool,
}

impl Growing {
    async fn publish_value(&self, number: i32, value: &Value) {
        let record = Record { payload: Some(Bytes::from(value.to_string())), ..Record::default() };
        let partition = Partition { topic: topic(), number };
        self.inner.publish_to(&partition, &[record]).await.unwrap().remove(0).unwrap();
    }
}

#[async_trait]
impl Bus for Growing {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.inner.publish(topic, records).await
    }
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.inner.publish_to(partition, records).await
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        self.inner.subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.inner.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        if self.away.load(Ordering::SeqCst) {
            self.asked_away.store(true, Ordering::SeqCst);
            return Err(Error::Unavailable { what: "the bus is away".into(), source: None });
        }
        let mut info = self.inner.topic(topic).await?;
        if let Some(info) = &mut info {
            info.partitions = self.shown.load(Ordering::SeqCst);
        }
        Ok(info)
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.inner.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.inner.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
}

/// A pulse of a row for so many partitions.
fn pulse(partitions: i32, last: Option<u32>, second: u32) -> Value {
    let row = |second| json!({"partitions": partitions, "n": 0, "at": at(second)});
    let op = if last.is_some() { "u" } else { "c" };
    json!({"op": op, "before": last.map(row), "after": row(second), "source": {"schema": "hapax", "table": "record_pulse"}})
}

/// A write is acknowledged, and then a pulse is stamped for two partitions, while Connect is down. A third partition
/// is added, and Connect hashes the write to that one: the pulse must not say that the write was read. While the bus
/// does not say how many partitions there are, the feed waits.
#[tokio::test]
async fn t430_a_pulse_for_fewer_partitions_than_there_are_says_nothing() {
    let bus = Arc::new(Growing {
        inner: MemoryBus::default(),
        shown: 2.into(),
        away: AtomicBool::default(),
        asked_away: AtomicBool::default(),
    });
    bus.create_topic(&topic(), TopicSettings::new(3)).await.unwrap();
    let model = Arc::new(MemoryReadModel::default());
    let mut settings = FeedSettings::new(topic());
    (settings.source, settings.linger) = (Source::Debezium, Duration::from_millis(5));
    let feed = Feed::new(Arc::<Growing>::clone(&bus), Arc::<MemoryReadModel>::clone(&model), settings);
    let feed = feed.unwrap();
    let (handle, running) = (feed.handle(), tokio::spawn(feed.run()));
    let synced = async || model.last_sync_at(Uuid::nil()).await.unwrap();
    let reaches = async |second| {
        let wanted = Time::parse(&at(second)).ok();
        until("lastSyncAt moves", async || synced().await == wanted).await;
    };
    for number in 0..2 {
        bus.publish_value(number, &pulse(2, None, 1)).await;
    }
    reaches(1).await;

    // The write at second 2 is in partition 2, which nobody has published yet.
    bus.shown.store(3, Ordering::SeqCst);
    bus.away.store(true, Ordering::SeqCst);
    for number in 0..2 {
        bus.publish_value(number, &pulse(2, Some(1), 3)).await;
    }
    until_so("the feed counts", || bus.asked_away.load(Ordering::SeqCst)).await;
    bus.away.store(false, Ordering::SeqCst);
    for number in 0..2 {
        bus.publish_value(number, &message("c", Value::Null, row(0, 90, 1 + number as u64))).await;
    }
    let orders = ModuleSlug::new("orders").unwrap();
    let seq = async || {
        let version = model.version(Uuid::nil(), &orders, Uuid::from_u128(90)).await.unwrap();
        version.map(hapax::analytics::Version::seq)
    };
    until("everything in one of them is read", async || seq().await == Some(2)).await;
    until_so("both pulses were counted", || handle.progress().changes == 2).await;
    assert_eq!(synced().await, Time::parse(&at(1)).ok(), "a write before the pulse is not read yet");

    bus.publish_value(2, &message("c", Value::Null, row(0, 7, 1))).await;
    for number in 0..3 {
        bus.publish_value(number, &pulse(3, None, 5)).await;
    }
    reaches(5).await;
    assert_eq!(handle.progress().rejected, 0, "the rows for three partitions are new, and no gap");
    handle.stop();
    running.await.unwrap().unwrap();
}
