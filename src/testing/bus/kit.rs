//! Small words the cases are written in.

use std::collections::BTreeMap;
use std::time::Duration;

use super::BusHarness;
use crate::bus::{
    Assignment, Bus, BusEvent, Partition, Received, Record, Subscriber, Subscription, TopicSettings,
};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// How long a case waits for what shall happen.
pub const DEADLINE: Duration = Duration::from_mins(1);
/// How long one member is listened to before it is another's turn.
const TURN: Duration = Duration::from_millis(50);

/// A bus with a topic and a group of the case's own.
#[derive(Debug)]
pub struct Stage<'h, H: BusHarness> {
    /// The harness.
    pub harness: &'h H,
    /// One opening of the bus.
    pub bus: H::Bus,
    /// The topic.
    pub topic: Topic,
    /// The group.
    pub group: String,
}

impl<'h, H: BusHarness> Stage<'h, H> {
    /// With so many partitions.
    pub async fn new(harness: &'h H, partitions: i32) -> Self {
        let bus = harness.open().await;
        let topic = Topic::new(harness.unique("topic")).unwrap();
        assert!(bus.create_topic(&topic, TopicSettings::new(partitions)).await.unwrap(), "the topic is new");
        Stage { harness, bus, topic, group: harness.unique("group") }
    }

    /// A partition of the topic.
    pub fn partition(&self, number: i32) -> Partition {
        Partition { topic: self.topic.clone(), number }
    }

    /// Publishes records, which must succeed.
    pub async fn publish(&self, records: &[Record]) -> Vec<Origin> {
        publish(&self.bus, &self.topic, records).await
    }

    /// Publishes so many records, all of one key; they share a partition.
    pub async fn publish_some(&self, count: usize) -> Vec<Origin> {
        let records: Vec<_> = (0..count).map(|n| record("one-key", &n.to_string())).collect();
        self.publish(&records).await
    }

    /// Publishes records of ever new keys until each partition has at least `count`.
    pub async fn fill(&self, count: i64) {
        let partitions = self.bus.topic(&self.topic).await.unwrap().expect("the topic").partitions;
        for round in 0.. {
            assert!(round < 1000, "keys do not reach every partition");
            let records: Vec<_> = (0..20).map(|n| record(&format!("key-{round}-{n}"), "x")).collect();
            self.publish(&records).await;
            let mut least = i64::MAX;
            for number in 0..partitions {
                least = least.min(self.bus.range(&self.partition(number)).await.unwrap().1);
            }
            if least >= count {
                return;
            }
        }
    }

    /// The stage's subscription.
    pub fn subscription(&self) -> Subscription {
        let mut subscription = Subscription::new(self.group.as_str(), [self.topic.clone()]).unwrap();
        self.harness.tune(&mut subscription);
        subscription
    }

    /// A member of the group.
    pub async fn member(&self, name: &'static str) -> Recorder {
        Recorder::new(name, self.bus.subscribe(self.subscription()).await.expect("a member"))
    }

    /// What the group has committed of a partition.
    pub async fn committed(&self, number: i32) -> Option<i64> {
        self.bus.committed(&self.group, &self.partition(number)).await.unwrap()
    }

    /// Leaves the group behind retention: it has committed offset 1 of six records, and the first four are
    /// removed.
    pub async fn behind_retention(&self) -> Partition {
        let partition = self.partition(0);
        self.publish_some(6).await;
        let mut recorder = self.member("a").await;
        until(&mut recorder, "the first records", |recorder| recorder.records.len() >= 6).await;
        let assigned = recorder.assigned(&partition);
        recorder.commit(&assigned, 1).await.unwrap();
        recorder.leave().await;
        self.harness.remove_below(&partition, 4).await;
        partition
    }

    /// How many records the topic has.
    pub async fn total(&self) -> usize {
        let partitions = self.bus.topic(&self.topic).await.unwrap().expect("the topic").partitions;
        let mut total = 0;
        for number in 0..partitions {
            let (oldest, end) = self.bus.range(&self.partition(number)).await.unwrap();
            total += usize::try_from(end - oldest).unwrap();
        }
        total
    }
}

/// A record.
pub fn record(key: &str, payload: &str) -> Record {
    Record { key: Some(key.to_owned().into()), payload: Some(payload.to_owned().into()), ..Record::default() }
}

/// Publishes records, which must succeed.
pub async fn publish(bus: &impl Bus, topic: &Topic, records: &[Record]) -> Vec<Origin> {
    let answers = bus.publish(topic, records).await.expect("the bus is there");
    assert_eq!(answers.len(), records.len(), "each record has its answer");
    answers.into_iter().map(|answer| answer.expect("it is published")).collect()
}

/// A member that remembers what it received, and checks what must hold of all of it.
pub struct Recorder {
    name: &'static str,
    subscriber: Option<Box<dyn Subscriber>>,
    /// What is in its hands, by epoch.
    pub held: BTreeMap<Partition, u64>,
    /// What was asked back and is not given back yet.
    pub revoked: Vec<Assignment>,
    /// What it lost without being asked.
    pub lost: Vec<Assignment>,
    /// Every record, in the order received.
    pub records: Vec<Received>,
    /// What retention removed before it was received.
    pub removed: Vec<(Partition, std::ops::Range<i64>)>,
    /// Whether what is asked back is not given back by itself.
    pub keeps: bool,
    /// The offset after the last record of each partition since it was given or sought.
    after: BTreeMap<Partition, i64>,
}

impl std::fmt::Debug for Recorder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} holds {:?}, was asked for {:?}, lost {:?}, heard {} records",
            self.name,
            self.held,
            self.revoked,
            self.lost,
            self.records.len()
        )
    }
}

impl Recorder {
    /// Listens to a subscriber.
    pub fn new(name: &'static str, subscriber: Box<dyn Subscriber>) -> Self {
        Recorder {
            name,
            subscriber: Some(subscriber),
            held: BTreeMap::new(),
            revoked: Vec::new(),
            lost: Vec::new(),
            records: Vec::new(),
            removed: Vec::new(),
            keeps: false,
            after: BTreeMap::new(),
        }
    }

    /// The subscriber itself.
    pub fn subscriber(&mut self) -> &mut dyn Subscriber {
        self.subscriber.as_deref_mut().expect("it has not left")
    }

    /// Listens once, for a moment at most.
    async fn listen(&mut self) {
        if let Ok(event) = tokio::time::timeout(TURN, self.subscriber().next()).await {
            let event = event.unwrap_or_else(|error| panic!("{}: {}", self.name, error.chain()));
            self.take(event).await;
        }
    }

    pub(super) async fn take(&mut self, event: BusEvent) {
        match event {
            BusEvent::Assigned(given) => {
                for Assignment { partition, epoch } in given {
                    let before = self.held.insert(partition.clone(), epoch);
                    assert_eq!(before, None, "{} is given {partition} twice", self.name);
                    self.after.remove(&partition);
                }
            }
            BusEvent::Revoked(revoked) => {
                for assigned in &revoked {
                    assert_eq!(self.held.get(&assigned.partition), Some(&assigned.epoch), "{}", self.name);
                }
                self.revoked.extend(revoked);
                if !self.keeps {
                    self.release().await;
                }
            }
            BusEvent::Lost(lost) => {
                for assigned in &lost {
                    assert_eq!(self.held.remove(&assigned.partition), Some(assigned.epoch), "{}", self.name);
                    self.revoked.retain(|revoked| revoked != assigned);
                }
                self.lost.extend(lost);
            }
            BusEvent::Removed { partition, offsets } => self.removed.push((partition, offsets)),
            BusEvent::Records(records) => {
                assert!(!records.is_empty(), "nothing is not heard");
                for received in records {
                    self.check(&received);
                    self.records.push(received);
                }
            }
        }
    }

    fn check(&mut self, received: &Received) {
        let partition = partition_of(received);
        let offset = received.origin.offset;
        assert!(self.held.contains_key(&partition), "{} has no {partition}, and hears {offset}", self.name);
        assert!(
            self.revoked.iter().all(|revoked| revoked.partition != partition),
            "{} hears {offset} of {partition}, which was asked back",
            self.name
        );
        let after = self.after.insert(partition.clone(), offset + 1).unwrap_or(0);
        assert!(offset >= after, "{} hears {offset} of {partition} after {}", self.name, after - 1);
    }

    /// A partition in hand.
    pub fn assigned(&self, partition: &Partition) -> Assignment {
        let epoch =
            *self.held.get(partition).unwrap_or_else(|| panic!("{partition} is not in hand: {self:?}"));
        Assignment { partition: partition.clone(), epoch }
    }

    /// Commits one offset.
    pub async fn commit(&mut self, assigned: &Assignment, offset: i64) -> Result<()> {
        let mut answers = self.subscriber().commit(&[(assigned.clone(), offset)]).await?;
        assert_eq!(answers.len(), 1, "one commit, one answer");
        answers.remove(0)
    }

    /// Gives back what was asked back.
    pub async fn release(&mut self) {
        let revoked = std::mem::take(&mut self.revoked);
        for assigned in &revoked {
            self.held.remove(&assigned.partition);
        }
        self.subscriber().release(&revoked).await.expect("it is given back");
    }

    /// Seeks, and expects what is there.
    pub async fn seek(&mut self, partition: &Partition, offset: i64) {
        self.subscriber().seek(partition, offset).await.expect("it is in hand");
        self.after.insert(partition.clone(), offset);
    }

    /// Leaves the group.
    pub async fn leave(mut self) {
        self.subscriber.take().expect("it has not left").leave().await.expect("it leaves");
    }

    /// The offsets received of a partition, in order.
    pub fn offsets(&self, partition: &Partition) -> Vec<i64> {
        let of = self.records.iter().filter(|received| partition_of(received) == *partition);
        of.map(|received| received.origin.offset).collect()
    }
}

/// The partition of a record.
pub fn partition_of(received: &Received) -> Partition {
    Partition { topic: received.origin.topic.clone(), number: received.origin.partition }
}

/// Listens to members in turn until something is so.
pub async fn drive<'e>(
    members: &mut [&'e mut Recorder],
    what: &str,
    so: impl Fn(&[&'e mut Recorder]) -> bool,
) {
    let started = tokio::time::Instant::now();
    while !so(members) {
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} for: {what}; {members:?}");
        for recorder in &mut *members {
            recorder.listen().await;
        }
    }
}

/// Listens to one member until something is so.
pub async fn until(recorder: &mut Recorder, what: &str, so: impl Fn(&Recorder) -> bool) {
    drive(&mut [recorder], what, |members| so(members[0])).await;
}

/// Asserts that a commit came too late.
pub fn assert_fenced(result: &Result<()>) {
    assert!(matches!(result, Err(Error::Fenced { .. })), "it should be fenced, and is {result:?}");
}
