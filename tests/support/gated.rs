//! A bus whose answers to publishing wait at a gate: the broker has the records, and is slow to say so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use hapax::Topic;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings};
use hapax::error::Result;
use hapax::event::Origin;
use tokio::sync::watch;

/// The bus. Publishing to a topic whose name ends with `.dead` is answered while the gate is open.
pub struct Gated {
    pub inner: MemoryBus,
    open: watch::Sender<bool>,
    under_way: AtomicUsize,
    broken: OnceLock<Topic>,
}

impl Gated {
    /// With these topics, of one partition, and the gate shut.
    pub async fn shut(topics: &[&str]) -> Arc<Self> {
        let bus = Gated {
            inner: MemoryBus::default(),
            open: watch::Sender::new(false),
            under_way: 0.into(),
            broken: OnceLock::new(),
        };
        for name in topics {
            bus.inner.create_topic(&Topic::new(*name).unwrap(), TopicSettings::new(1)).await.unwrap();
        }
        Arc::new(bus)
    }

    /// From now on publishing to this topic panics.
    pub fn break_topic(&self, topic: &str) {
        self.broken.set(Topic::new(topic).unwrap()).unwrap();
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }

    /// How many calls wait at the gate.
    pub fn under_way(&self) -> usize {
        self.under_way.load(Ordering::SeqCst)
    }

    /// How many records are in a topic's dead letters.
    pub async fn copies(&self, topic: &str) -> i64 {
        let dead = Topic::new(format!("{topic}.dead")).unwrap();
        self.inner.range(&Partition { topic: dead, number: 0 }).await.map_or(0, |(_, end)| end)
    }
}

#[async_trait::async_trait]
impl Bus for Gated {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        assert!(self.broken.get() != Some(topic), "the test ordered a panic");
        let answers = self.inner.publish(topic, records).await;
        #[allow(clippy::case_sensitive_file_extension_comparisons)] // a topic, not a file
        if topic.as_str().ends_with(".dead") {
            self.under_way.fetch_add(1, Ordering::SeqCst);
            let _ = self.open.subscribe().wait_for(|open| *open).await;
            self.under_way.fetch_sub(1, Ordering::SeqCst);
        }
        answers
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
        self.inner.topic(topic).await
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
