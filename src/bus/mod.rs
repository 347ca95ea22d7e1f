//! The bus: how events travel from those who make them to those who consume them.
//!
//! A topic has partitions, a partition has records in offset order. Consumers subscribe as a *group*: each partition
//! belongs to one member at a time, and the group remembers up to where each partition is finished. A member learns of
//! its partitions in the same stream as their records: *given*, being *revoked* (commit, give back) or *lost*
//! (someone else may have them already; commit nothing). Each gift has an epoch; what a member still does under an older
//! epoch changes nothing.

#[cfg(feature = "kafka")]
pub mod kafka;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Headers, Origin};
use crate::id::Topic;

mod assignments;
#[cfg(feature = "sqlite")]
pub mod embedded;
mod group;
pub mod memory;
mod route;

#[cfg(feature = "sqlite")]
pub use embedded::EmbeddedBus;
pub use memory::MemoryBus;

/// What is published, and what a received record is made of. Cloning shares the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// Records of one key share a partition and stay in order.
    pub key: Option<Bytes>,
    /// The content; none is a tombstone.
    pub payload: Option<Bytes>,
    /// The headers.
    pub headers: Headers,
    /// When it was made, by its producer; the bus fills it in if unset.
    pub timestamp: Option<Time>,
}

/// A record as it arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The record.
    pub record: Record,
    /// Where it lies.
    pub origin: Origin,
    /// Why the bus could not read all of it, if it could not. Such a record is never handled: it is a dead letter, with what
    /// could be read.
    pub unreadable: Option<String>,
}

impl Received {
    /// A record that was read in full.
    pub fn new(record: Record, origin: Origin) -> Self {
        Received { record, origin, unreadable: None }
    }
}

/// One partition of one topic.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Partition {
    /// The topic.
    pub topic: Topic,
    /// Its number, from 0.
    pub number: i32,
}

impl fmt::Display for Partition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}[{}]", self.topic, self.number)
    }
}

/// A partition in a member's assignments.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// Which one.
    pub partition: Partition,
    /// Grows with each gift to this member, so that what belongs to an earlier one can be told apart.
    pub epoch: u64,
}

/// What a subscriber hears next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BusEvent {
    /// Records, each partition's in offset order, all of partitions that are in this member's assignments.
    Records(Vec<Received>),
    /// Partitions are this member's from now on. Their records follow.
    Assigned(Vec<Assignment>),
    /// The group wants partitions back: commit what is finished, then [`release`](Subscriber::release), without waiting for
    /// anything else: on some buses the other partitions stand still until then. Nothing of these is delivered any more.
    Revoked(Vec<Assignment>),
    /// Partitions are gone already. Commits of them are refused.
    Lost(Vec<Assignment>),
    /// Retention removed records before this member read them: it goes on with the oldest that is left.
    Removed {
        /// Of this partition.
        partition: Partition,
        /// The offsets that are gone.
        offsets: std::ops::Range<i64>,
    },
}

/// Where a group begins in a topic of which it has committed nothing. Once it has committed something of a topic, its other
/// partitions begin at their beginning: they were added since, or nothing of them was finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// With the oldest record there is.
    #[default]
    Earliest,
    /// With what comes from now on. Gives up: everything published before, also while a first member was starting.
    Latest,
    /// Nowhere: it is an error. Gives up: starting by itself.
    Refuse,
}

/// Who subscribes to what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Subscription {
    /// The group.
    pub group: Arc<str>,
    /// The topics.
    pub topics: Vec<Topic>,
    /// Where to begin where nothing was committed.
    pub start: Start,
    /// After this long without a sign of life a member's partitions go to others.
    pub session_timeout: Duration,
    /// How long a member may take to give back what is revoked before it is thrown out of the group.
    pub revoke_timeout: Duration,
}

impl Subscription {
    /// A group's subscription, from the beginning of each topic.
    pub fn new(group: impl Into<Arc<str>>, topics: impl IntoIterator<Item = Topic>) -> Result<Self> {
        let group = group.into();
        let topics: Vec<_> = topics.into_iter().collect();
        if group.trim().is_empty()
            || group.chars().count() > crate::id::NAME_CHARS_MAX
            || group.contains('\0')
        {
            return Err(Error::invalid(
                "group",
                format!("it needs 1 to {} characters, not blank, without NUL", crate::id::NAME_CHARS_MAX),
            ));
        }
        if topics.is_empty() {
            return Err(Error::invalid("topics", "a subscription needs at least one"));
        }
        Ok(Subscription {
            group,
            topics,
            start: Start::default(),
            session_timeout: Duration::from_secs(45),
            revoke_timeout: Duration::from_secs(60),
        })
    }
}

/// What there is to know of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicInfo {
    /// How many partitions.
    pub partitions: i32,
    /// How long records stay; none is for ever.
    pub retention: Option<Duration>,
    /// Whether older records of a key are removed (gaps in offsets).
    pub compacted: bool,
    /// How many copies there are; none where the bus has no such notion.
    pub replication: Option<i32>,
    /// How many of them must have a record before it is acknowledged.
    pub min_insync: Option<i32>,
}

/// How a topic is to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicSettings {
    /// How many partitions.
    pub partitions: i32,
    /// How long records stay; none is for ever.
    pub retention: Option<Duration>,
    /// How many bytes of a partition stay; none is all.
    pub retention_bytes: Option<u64>,
}

impl TopicSettings {
    /// A topic with so many partitions, and a week of retention.
    pub fn new(partitions: i32) -> Self {
        TopicSettings { partitions, retention: Some(Duration::from_secs(7 * 86_400)), retention_bytes: None }
    }
}

/// What a bus can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Its word: `memory`, `embedded`, `kafka`.
    pub bus: &'static str,
    /// Whether what it acknowledged survives a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
}

/// Is told the place of a record and the answer to it.
pub type OnAnswer<'t> = &'t mut (dyn FnMut(usize, Result<Origin>) + Send);

/// Carries records.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. `publish` answers each record with where it lies, and only when it lies there as safely as the bus can promise. An
///    error means that it may lie there all the same. `publish_each` is the same, and tells each answer when it is known.
/// 2. Records of one key go to one partition; a partition's records arrive in the order in which they were acknowledged to
///    one publisher.
/// 3. Within a group each partition is in one member's assignments at a time. A member learns of it before its first record.
/// 4. A partition begins at the group's committed offset. If retention has removed that, it begins with the oldest record that is
///    left, and the member hears `Removed`. Without a commit it begins where the subscription says, unless the group has committed
///    something else of the topic: then at its beginning.
/// 5. `commit` stores the offset *after* the last finished record. A commit under an epoch that is over changes nothing and
///    is `Fenced`.
/// 6. A revoked partition goes to another member only after it was given back, or its member was thrown out.
/// 7. A member that stops answering loses its partitions after the session timeout; when it comes back it hears `Lost`.
/// 8. A paused partition delivers nothing until it is resumed; the others go on. Membership survives any pause. `pause` and
///    `resume` under an epoch that is over change nothing: a partition that is assigned again is not paused.
/// 9. `seek` makes a partition's next record the one at the offset given, or the next above it.
/// 10. Offsets may have gaps. They are never reused: under one epoch they only grow, unless the member seeks. Where they begin anew
///     all the same (a topic that was made again), the member hears `Lost`, and then `Assigned` under another epoch.
/// 11. A subscription that has ended says so: `next` answers with an error that is not retryable, whatever ended it.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Publishes records to a topic, each with its own answer, in order.
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>>;

    /// Publishes records to a topic, in order, and tells the answer to each (by its place) as soon as it is known, so that a partition
    /// that is slow keeps nobody else waiting. An error is the answer to all that were told none.
    async fn publish_each(&self, topic: &Topic, records: &[Record], on_answer: OnAnswer<'_>) -> Result<()> {
        for (place, answer) in self.publish(topic, records).await?.into_iter().enumerate() {
            on_answer(place, answer);
        }
        Ok(())
    }

    /// Joins a group.
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>>;

    /// Makes a topic. False: it is there already (as it is).
    async fn create_topic(&self, topic: &Topic, terms: TopicSettings) -> Result<bool>;

    /// What is known of a topic; none: there is no such topic.
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>>;

    /// The offsets of a partition: of its oldest record, and after its newest.
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)>;

    /// What a group has committed of a partition.
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>>;

    /// What this bus can promise.
    fn capabilities(&self) -> Capabilities;
}

/// A member of a group. It takes part as long as [`next`](Subscriber::next) is called again and again; a pause between two
/// calls may be as long as a handler takes, never as long as the bus's own limit.
#[async_trait]
pub trait Subscriber: Send {
    /// Waits for what is heard next. Cancel safe: what was not returned is returned by the next call.
    async fn next(&mut self) -> Result<BusEvent>;

    /// Stops delivery of partitions. One that is not assigned under that epoch any more is left as it is.
    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Goes on with partitions. One that is not assigned under that epoch any more is left as it is.
    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Goes on at another offset. What was delivered and not yet returned is dropped.
    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()>;

    /// Remembers for the group that everything below each offset is finished. Answers in the order given.
    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>>;

    /// Gives revoked partitions to the group.
    async fn release(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Leaves the group at once, so that nobody waits for a timeout.
    async fn leave(self: Box<Self>) -> Result<()>;
}

#[async_trait]
impl<B: Bus + ?Sized> Bus for Arc<B> {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        (**self).publish(topic, records).await
    }
    async fn publish_each(&self, topic: &Topic, records: &[Record], on_answer: OnAnswer<'_>) -> Result<()> {
        (**self).publish_each(topic, records, on_answer).await
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        (**self).subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, terms: TopicSettings) -> Result<bool> {
        (**self).create_topic(topic, terms).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        (**self).topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        (**self).range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        (**self).committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
}
