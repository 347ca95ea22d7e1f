//! A feed that holds too much reads no more, whatever the group gives to it or takes from it meanwhile.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax::analytics::{Feed, FeedHandle, FeedProgress, FeedSettings, MemoryReadModel};
use hapax::bus::{
    Assignment, Bus, BusEvent, Capabilities, MemoryBus, Partition, Received, Record, Subscriber,
    Subscription, TopicInfo, TopicSettings,
};
use hapax::event::Origin;
use hapax::{Result, Topic};
use tokio::sync::mpsc;

use crate::support::wait::until;

fn topic() -> Topic {
    Topic::new("records").unwrap()
}

fn partition(number: i32) -> Partition {
    Partition { topic: topic(), number }
}

/// What the feed told its subscriber, in words.
type Calls = Arc<Mutex<Vec<String>>>;

/// A bus whose group does what the test says.
struct Scripted {
    bus: MemoryBus,
    events: Mutex<Option<mpsc::UnboundedReceiver<BusEvent>>>,
    calls: Calls,
}

struct Member {
    events: mpsc::UnboundedReceiver<BusEvent>,
    calls: Calls,
}

impl Member {
    fn note(&self, what: &str, of: &[Assignment]) {
        let numbers: Vec<_> = of.iter().map(|one| one.partition.number).collect();
        self.calls.lock().unwrap().push(format!("{what} {numbers:?}"));
    }
}

#[async_trait]
impl Subscriber for Member {
    async fn next(&mut self) -> Result<BusEvent> {
        match self.events.recv().await {
            Some(event) => Ok(event),
            None => std::future::pending().await,
        }
    }
    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.note("pause", partitions);
        Ok(())
    }
    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.note("resume", partitions);
        Ok(())
    }
    async fn seek(&mut self, _: &Partition, _: i64) -> Result<()> {
        Ok(())
    }
    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        Ok(offsets.iter().map(|_| Ok(())).collect())
    }
    async fn release(&mut self, _: &[Assignment]) -> Result<()> {
        Ok(())
    }
    async fn leave(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl Bus for Scripted {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.bus.publish(topic, records).await
    }
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.bus.publish_to(partition, records).await
    }
    async fn subscribe(&self, _: Subscription) -> Result<Box<dyn Subscriber>> {
        let events = self.events.lock().unwrap().take().expect("one feed subscribes");
        Ok(Box::new(Member { events, calls: Arc::clone(&self.calls) }))
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.bus.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.bus.topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.bus.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.bus.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.bus.capabilities()
    }
}

/// A feed of a few bytes, and what its group does.
struct Stage {
    group: mpsc::UnboundedSender<BusEvent>,
    calls: Calls,
    feed: FeedHandle,
    running: tokio::task::JoinHandle<Result<FeedProgress>>,
}

impl Stage {
    async fn new(linger: Duration) -> Self {
        let (group, events) = mpsc::unbounded_channel();
        let calls = Calls::default();
        let bus = MemoryBus::default();
        bus.create_topic(&topic(), TopicSettings::new(2)).await.unwrap();
        let bus = Scripted { bus, events: Mutex::new(Some(events)), calls: Arc::clone(&calls) };
        let mut settings = FeedSettings::new(topic());
        (settings.buffer_bytes_max, settings.linger) = (100, linger);
        let feed = Feed::new(Arc::new(bus), Arc::new(MemoryReadModel::default()), settings).unwrap();
        Stage { group, calls, feed: feed.handle(), running: tokio::spawn(feed.run()) }
    }

    fn assign(&self, number: i32) -> Assignment {
        let of = Assignment { partition: partition(number), epoch: 1 };
        self.group.send(BusEvent::Assigned(vec![of.clone()])).unwrap();
        of
    }

    /// More than the feed may hold.
    fn fill(&self, number: i32) {
        let record = Record { payload: Some(vec![b' '; 200].into()), ..Record::default() };
        let received = Received::new(record, Origin::new(topic(), number, 0));
        self.group.send(BusEvent::Records(vec![received])).unwrap();
    }

    async fn hears(&self, expected: &[&str]) {
        until(&format!("it says {expected:?}"), async || *self.calls.lock().unwrap() == expected).await;
    }

    async fn end(self) {
        self.feed.stop();
        self.running.await.unwrap().unwrap();
    }
}

/// The group gives a partition to a member whose memory is full of another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partition_that_a_full_feed_gets_is_paused() {
    let stage = Stage::new(Duration::from_secs(3600)).await;
    let first = stage.assign(0);
    stage.fill(0);
    stage.hears(&["pause [0]"]).await;
    stage.assign(1);
    stage.hears(&["pause [0]", "pause [1]"]).await;
    // What filled it is another member's now: nothing is left to be applied, and nothing else would wake it.
    stage.group.send(BusEvent::Revoked(vec![first])).unwrap();
    stage.hears(&["pause [0]", "pause [1]", "resume [1]"]).await;
    stage.end().await;
}

/// What was too much is applied, and the feed reads on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_feed_that_was_full_reads_on_once_it_is_applied() {
    let stage = Stage::new(Duration::from_millis(1)).await;
    stage.assign(0);
    stage.assign(1);
    stage.fill(1);
    stage.hears(&["pause [0, 1]", "resume [0, 1]"]).await;
    assert!(stage.feed.progress().follows);
    stage.end().await;
}
