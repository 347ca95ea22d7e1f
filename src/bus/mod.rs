//! The bus carries events from producers to consumers.
//!
//! A topic has partitions; a partition has records in offset order. Consumers subscribe as a
//! *group*: each partition belongs to one member at a time, and the group remembers up to which
//! offset each partition is finished. A member receives assignments in the same stream as records:
//! a partition is *assigned*, *revoked* (commit, then release it) or *lost* (another member may own
//! it already; commit nothing). Each assignment has an epoch. Anything a member still does under an
//! older epoch has no effect.
//!
//! A bus uses names only. It knows neither ledgers nor handlers.

#[cfg(feature = "kafka")]
pub mod kafka;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

pub(crate) mod assignments;
pub(crate) mod group;
pub mod memory;
mod pulse;
pub(crate) mod route;

#[cfg(feature = "sqlite")]
pub use crate::backend::sqlite::bus::{self as embedded, EmbeddedBus};
pub use memory::MemoryBus;
pub(crate) use pulse::PARTITIONS_MAX;
pub use pulse::{PULSE, Pulse};

pub use crate::event::Record;

/// A record as it arrives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Received {
    /// The record.
    pub record: Record,
    /// Where it is stored.
    pub origin: Origin,
    /// Why the bus could not read the whole record, if so. Such a record is never handled: it
    /// becomes a dead letter with the parts that could be read.
    pub unreadable: Option<String>,
}

impl Received {
    /// A record that was read in full.
    pub fn new(record: Record, origin: Origin) -> Self {
        Received { record, origin, unreadable: None }
    }

    /// The partition it is stored in.
    pub(crate) fn partition(&self) -> Partition {
        Partition { topic: self.origin.topic.clone(), number: self.origin.partition }
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

/// A partition that is assigned to a member.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Assignment {
    /// The partition.
    pub partition: Partition,
    /// Increases with each assignment to this member, so that work under an earlier assignment can
    /// be recognized.
    pub epoch: u64,
}

/// What a subscriber receives next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BusEvent {
    /// Records, in offset order per partition, only from partitions assigned to this member.
    Records(Vec<Received>),
    /// These partitions now belong to this member. Their records follow.
    Assigned(Vec<Assignment>),
    /// The group asks for these partitions back. Commit what is finished, then call
    /// [`release`](Subscriber::release) without waiting for anything else: on some buses the other
    /// partitions stop until then. No more records of these partitions are delivered.
    Revoked(Vec<Assignment>),
    /// The group has already taken these partitions. Commits of them are refused.
    Lost(Vec<Assignment>),
    /// Retention removed records before this member read them. It continues with the oldest
    /// remaining record, which comes after this event.
    Removed {
        /// The partition they belonged to.
        partition: Partition,
        /// The removed offsets.
        offsets: std::ops::Range<i64>,
    },
}

/// Where a group starts in a topic of which it has committed nothing. Once it has committed any
/// partition of a topic, the others start at their beginning: they were added later, or nothing in
/// them was finished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Start {
    /// At the oldest record.
    #[default]
    Earliest,
    /// At records published from now on. Gives up: everything published earlier, including while
    /// the first member was starting.
    Latest,
    /// Fail if the group has no committed offset. Gives up: a new group does not start until somebody commits
    /// offsets for it.
    Refuse,
}

/// What a group subscribes to.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Subscription {
    /// The group.
    pub group: Arc<str>,
    /// The topics.
    pub topics: Vec<Topic>,
    /// Where to start if nothing was committed.
    pub start: Start,
    /// A member that shows no sign of life for this long loses its partitions to others.
    pub session_timeout: Duration,
    /// How long a member may take to release revoked partitions before the group expels it.
    pub revoke_timeout: Duration,
}

impl Subscription {
    /// A group's subscription that starts at the beginning of each topic.
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

/// Facts about a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicInfo {
    /// Number of partitions.
    pub partitions: i32,
    /// How long records are kept. `None` means forever.
    pub retention: Option<Duration>,
    /// Whether older records of a key are removed, which leaves gaps in the offsets.
    pub compacted: bool,
    /// Number of replicas. `None` if the bus has no replication.
    pub replication: Option<i32>,
    /// How many replicas must have a record before it is acknowledged.
    pub min_insync: Option<i32>,
    /// Whether a replica that has not all acknowledged records may become the leader. The others are
    /// lost then, and their offsets given to other records.
    pub unclean_election: bool,
}

/// Settings for a new topic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TopicSettings {
    /// Number of partitions.
    pub partitions: i32,
    /// How long records are kept. `None` means forever.
    pub retention: Option<Duration>,
    /// How many bytes of a partition are kept. `None` means all.
    pub retention_bytes: Option<u64>,
}

impl TopicSettings {
    /// A topic with this many partitions and one week of retention.
    pub fn new(partitions: i32) -> Self {
        TopicSettings { partitions, retention: Some(Duration::from_secs(7 * 86_400)), retention_bytes: None }
    }
}

/// What a bus can guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Its name: `memory`, `embedded`, `kafka`.
    pub bus: &'static str,
    /// Whether acknowledged records survive a machine crash.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
}

/// Called with the index of a record and the answer for it.
pub type OnAnswer<'t> = &'t mut (dyn FnMut(usize, Result<Origin>) + Send);

/// Carries records.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. `publish` answers each record with its location, and only once it is stored as safely as the
///    bus can guarantee. After an error the record may be stored all the same. `publish_each` is
///    the same, but reports each answer as soon as it is known.
/// 2. Records of one key go to one partition. The records of a partition arrive in the order in
///    which they were acknowledged to one publisher.
/// 3. Within a group each partition is assigned to one member at a time. A member receives the
///    assignment before the first record.
/// 4. A partition starts at the group's committed offset. If retention has removed that offset, the
///    partition starts with the oldest remaining record and the member receives `Removed`. Without
///    a commit it starts where the subscription says, unless the group has committed another
///    partition of the topic: then it starts at its beginning.
/// 5. `commit` stores the offset *after* the last finished record. A commit under an epoch that is
///    over changes nothing and is `Fenced`.
/// 6. A revoked partition goes to another member only after its member released it or was expelled.
/// 7. A member that stops responding loses its partitions after the session timeout. When it comes
///    back it receives `Lost`.
/// 8. A paused partition delivers nothing until it is resumed; the others continue. Membership
///    survives any pause. `pause` and `resume` under an epoch that is over change nothing: a
///    partition that is assigned again is not paused.
/// 9. `seek` makes the record at the given offset, or the next one above it, the partition's next
///    record.
/// 10. Offsets may have gaps. They are never reused: under one epoch they only increase, unless the
///     member seeks. If they start over anyway (a topic was deleted and created again), the member
///     receives `Lost`, then `Assigned` under a new epoch.
/// 11. Once a subscription has ended, `next` returns an error that is not retryable, whatever ended
///     it.
/// 12. `publish_to` publishes to the given partition, whatever the records' keys are; its answers
///     mean the same as those of `publish`. A record that was published after the acknowledgement of
///     another arrives after it, if both are in one partition, whoever published them. `NotFound`
///     if there is no such partition; then nothing is stored.
/// 13. If retention removed records that a member did not read, the member receives `Removed` with
///     their offsets before the first record behind them. Whoever passes a record on therefore knows
///     what is missing before it. A bus that cannot learn whether records were removed or never
///     existed reports them as removed.
#[async_trait]
pub trait Bus: Send + Sync + 'static {
    /// Publishes records to a topic, in order, and returns an answer for each.
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>>;

    /// Publishes records to a topic, in order, and reports each answer (by index) as soon as it is
    /// known, so that one slow partition does not delay the others. An error is the answer to every
    /// record that has none yet.
    async fn publish_each(&self, topic: &Topic, records: &[Record], on_answer: OnAnswer<'_>) -> Result<()> {
        for (place, answer) in self.publish(topic, records).await?.into_iter().enumerate() {
            on_answer(place, answer);
        }
        Ok(())
    }

    /// Publishes records to one partition, in order, and returns an answer for each. A record's key
    /// is stored, and does not decide where it goes.
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>>;

    /// Joins a group.
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>>;

    /// Creates a topic. Returns false if it exists already; it is then left unchanged.
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool>;

    /// Facts about a topic, or `None` if it does not exist.
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>>;

    /// Answers once the bus could publish to a topic, as far as that can be known without publishing:
    /// it changes nothing. `NotFound` if there is no such topic. For probes.
    async fn probe(&self, topic: &Topic) -> Result<()> {
        let missing = || crate::Error::NotFound(format!("topic {topic}"));
        self.topic(topic).await?.map(drop).ok_or_else(missing)
    }

    /// The offset of a partition's oldest record, and the offset after its newest.
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)>;

    /// The offset a group has committed for a partition.
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>>;

    /// What this bus can guarantee.
    fn capabilities(&self) -> Capabilities;
}

/// A member of a group. It stays a member as long as [`next`](Subscriber::next) is called again and
/// again. The time between two calls may be as long as a handler takes, but must stay within the
/// bus's own limit.
#[async_trait]
pub trait Subscriber: Send {
    /// Waits for the next event. Cancel safe: an event that was not returned is returned by the
    /// next call.
    async fn next(&mut self) -> Result<BusEvent>;

    /// Stops delivery of partitions. Ignores any that is no longer assigned under that epoch.
    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Resumes delivery of partitions. Ignores any that is no longer assigned under that epoch.
    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Continues at another offset. Drops records that are buffered but not yet returned.
    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()>;

    /// Records for the group that everything below each offset is finished. Answers in the order
    /// given.
    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>>;

    /// Returns revoked partitions to the group.
    async fn release(&mut self, partitions: &[Assignment]) -> Result<()>;

    /// Leaves the group at once, so that the others need not wait for a timeout.
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
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        (**self).publish_to(partition, records).await
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        (**self).subscribe(subscription).await
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        (**self).create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        (**self).topic(topic).await
    }
    async fn probe(&self, topic: &Topic) -> Result<()> {
        (**self).probe(topic).await
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
