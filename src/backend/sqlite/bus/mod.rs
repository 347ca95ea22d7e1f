//! A bus in an SQLite file: durable, and shared by the processes of one machine.
//!
//! One thread per process writes. It puts all waiting requests into one transaction and
//! acknowledges them once that is flushed to disk. Group members in several processes coordinate
//! through the file. The writer thread also sends heartbeats for its process's members, so a member
//! with a slow handler stays in the group, and the members of a dead or stopped process do not. An
//! expelled member is notified, and its commits are refused.
//!
//! A key's partition is `murmur2(key) & 0x7fffffff` modulo the number of partitions, as in Kafka's
//! Java client; records without a key go to the partitions in turn. Retention counts from when the
//! bus accepted a record, by the bus's own clock. The file must belong to the bus alone (one writer
//! per file), and must not be on a network file system.
//!
//! Limits: a process that is stopped (not killed) in the middle of a transaction keeps the file
//! locked, and all others get `Contended` until it continues or is killed. Space that retention
//! frees is reused, but the file does not shrink.

mod group;
mod log;
mod member;
mod schema;
mod writer;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use self::member::Member;
use self::writer::Common;
use crate::backend::sqlite::connect::{self, Access};
use crate::backend::sqlite::{Threads, answer, reader};
use crate::bus::{Bus, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo, TopicSettings};
use crate::clock::{Clock, SystemClock};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// Settings of an embedded bus.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct EmbeddedSettings {
    /// The most bytes of a record, counting key, payload and headers.
    pub record_bytes_max: usize,
    /// How often to look for records to remove.
    pub sweep_interval: Duration,
}

impl Default for EmbeddedSettings {
    fn default() -> Self {
        EmbeddedSettings { record_bytes_max: 1 << 20, sweep_interval: Duration::from_secs(60) }
    }
}

/// A bus in an SQLite file. Clones share its connections. They close when the last clone and every
/// subscriber are dropped.
#[derive(Clone)]
pub struct EmbeddedBus(Arc<Inner>);

struct Inner {
    // The senders are dropped first, so that the threads end before they are joined.
    write: writer::Requests,
    read: reader::Questions,
    _threads: Threads,
    common: Arc<Common>,
    settings: EmbeddedSettings,
    path: PathBuf,
}

impl fmt::Debug for EmbeddedBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddedBus").field("path", &self.0.path).finish_non_exhaustive()
    }
}

impl EmbeddedBus {
    /// Opens a file, creating it if missing; its directory must exist. Several processes may do so
    /// at once.
    ///
    /// Blocks while another process creates the tables.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with(path, EmbeddedSettings::default(), Arc::new(SystemClock))
    }

    /// Opens a file with the caller's settings and clock. The clocks of all processes that share a
    /// file must agree.
    pub fn open_with(
        path: impl AsRef<Path>,
        settings: EmbeddedSettings,
        clock: Arc<dyn Clock>,
    ) -> Result<Self> {
        let path = path.as_ref();
        let conn = connect::open_file(path, Access::Write, "bus")?;
        connect::make_durable(&conn)?;
        schema::make(&conn)?;
        let read = connect::open_file(path, Access::Read, "bus")?;
        let common = Arc::new(Common::default());
        let failed = |error| Error::unavailable("starting a thread of the bus", error);
        let (write, writes) =
            writer::start(conn, clock, common.clone(), settings.sweep_interval).map_err(failed)?;
        let (read, reads) = reader::start(read).map_err(failed)?;
        Ok(EmbeddedBus(Arc::new(Inner {
            write,
            read,
            _threads: Threads(vec![writes, reads]),
            common,
            settings,
            path: path.to_owned(),
        })))
    }

    /// Where the file is.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Publishes to partition `to`, or where each record's key says.
    async fn publish_at(
        &self,
        topic: &Topic,
        to: Option<i32>,
        records: &[Record],
    ) -> Result<Vec<Result<Origin>>> {
        let (topic, records, max) = (topic.clone(), records.to_vec(), self.0.settings.record_bytes_max);
        answer(self.0.write.send(move |conn, now| log::publish(conn, &topic, to, &records, max, now))).await?
    }

    /// Stops the heartbeats of members that joined through this instance.
    #[cfg(feature = "testing")]
    pub fn silence(&self, silent: bool) {
        self.0.common.silent.store(silent, std::sync::atomic::Ordering::SeqCst);
    }

    /// Removes a partition's records below an offset, as retention would.
    #[cfg(feature = "testing")]
    pub async fn remove_below(&self, partition: &Partition, offset: i64) -> Result<()> {
        let partition = partition.clone();
        answer(self.0.write.send(move |conn, _| log::remove(conn, &partition, offset))).await?
    }
}

#[async_trait]
impl Bus for EmbeddedBus {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.publish_at(topic, None, records).await
    }

    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.publish_at(&partition.topic, Some(partition.number), records).await
    }

    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        Ok(Box::new(Member::join(self.0.clone(), subscription).await?))
    }

    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        crate::bus::route::check_topic(topic, &settings)?;
        let topic = topic.clone();
        answer(self.0.write.send(move |conn, _| log::create(conn, &topic, &settings))).await
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        let topic = topic.clone();
        answer(self.0.read.send(move |conn| log::info(conn, &topic))).await
    }

    async fn probe(&self, topic: &Topic) -> Result<()> {
        let topic = topic.clone();
        // A transaction that changes nothing costs no flush.
        let found = answer(self.0.write.send(move |conn, _| log::info(conn, &topic))).await?;
        found.map(drop).ok_or_else(|| crate::Error::NotFound("the topic".into()))
    }

    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        let partition = partition.clone();
        let part = answer(self.0.read.send(move |conn| log::part(conn, &partition))).await??;
        Ok((part.oldest, part.next))
    }

    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        let (group, partition) = (group.to_owned(), partition.clone());
        answer(self.0.read.send(move |conn| group::committed(conn, &group, &partition))).await
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { bus: "embedded", durable: true, shared: true }
    }
}
