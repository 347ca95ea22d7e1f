//! Read models: the current state of records, stored apart from the records, with each record
//! counted once.
//!
//! ```text
//! record ─▶ event ─▶ journal ─▶ relay ─▶ topic ─▶ Feed ─▶ ReadModel ─▶ Analytics ─▶ answer, lastSyncAt
//!           seq                  pulses            by version           tenant in every question
//! ```
//!
//! A topic delivers at least once and a relay may publish again, so the same change arrives twice,
//! late, or after a newer one. To get that right a read model remembers no events: every change has
//! a [`Version`], and the read model keeps the highest one of each record. A deletion is a version
//! too.
//!
//! Instead of a relay, Debezium may carry the rows of modules from PostgreSQL's log to a topic
//! ([`Source::Debezium`]): the same versions, with pulses from a table.
//!
//! A relay with [pulses](crate::bus::Pulse) tells every partition up to which time the topic is
//! complete. The earliest of the last pulses of all partitions is `lastSyncAt`: every write that
//! was acknowledged before it is in the answer. The times of events would not do: two events may be
//! stored in another order than that of their times.
//!
//! ```
//! # tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(async {
//! use std::sync::Arc;
//! use std::time::Duration;
//! use hapax::analytics::{Analytics, MemoryReadModel};
//!
//! let analytics = Analytics::new(Arc::new(MemoryReadModel::default()), None)?;
//! let orders = analytics.records("orders")?.since(Duration::from_secs(7 * 86_400));
//! let answer = orders.sum("/amount")?.tally().await?;
//! assert_eq!(answer.value.groups[0].count, 0);
//! assert_eq!(answer.meta.last_sync_at, None); // nothing is known yet
//! # Ok::<(), hapax::Error>(()) }).unwrap();
//! ```
//!
//! [`verify()`] compares a read model with its records while both are in use; [`rebuild()`] fills a
//! second one, and replaces the first with it.
//!
//! This module uses records, buses and names. It knows no database; read models are in
//! [`backend`](crate::backend).

mod ask;
mod change;
mod debezium;
mod feed;
mod missing;
mod query;
mod rebuild;
mod row;
mod snapshot;
mod synced;
mod tally;
mod verify;
mod version;

use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
pub use uuid::Uuid;

#[cfg(feature = "clickhouse")]
pub(crate) use crate::exact::{DEPTH_MAX, FIELD_MAX};
pub use crate::exact::{Decimal, Field};
pub use ask::{Analytics, RecordsPages, RecordsQuery};
pub use change::{Change, Input, Rejected, Source};
#[cfg(feature = "postgres")]
pub(crate) use debezium::{PULSES, pulse_rows};
pub use feed::{Feed, FeedHandle, FeedProgress, FeedSettings};
pub use missing::missing;
pub use query::{
    Answer, GROUPS_MAX, Group, Groups, ListPage, MEASURES_MAX, Measure, Measured, Meta, ReadToken,
    STALE_AFTER, Selection, Tally,
};
pub use rebuild::{RebuildSettings, Rebuilt, Second, SecondModel, rebuild};
pub use row::Row;
pub(crate) use synced::{Synced, earliest, held_back};
pub(crate) use tally::Tallying;
#[cfg(feature = "clickhouse")]
pub(crate) use tally::group_text;
pub use verify::{Difference, Sum, Sums, TenantModule, Verified, VerifySettings, verify};
#[cfg(feature = "clickhouse")]
pub(crate) use version::SEQ_BITS;
pub use version::{SEQ_MAX, Version};

pub use crate::backend::memory::analytics::MemoryReadModel;

use crate::bus::Partition;
use crate::clock::Time;
use crate::erase::Subject;
use crate::error::Result;
use crate::id::Topic;
use crate::records::{Listed, ModuleSlug, Scan};

/// What a [`Feed`] read from one partition, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Block {
    /// The partition.
    pub partition: Partition,
    /// How many partitions its topic has, as far as the reader knows.
    pub partitions: i32,
    /// The offsets that it covers: fixed before it is applied, so that a repeated block is the
    /// same. `None`: its changes come from elsewhere, and the partition's offset does not change.
    pub offsets: Option<Range<i64>>,
    /// The changes.
    pub changes: Vec<Change>,
    /// Changes that cannot be read, each with the last pulse before it in this block.
    pub rejected: Vec<(Rejected, Option<Time>)>,
    /// The last pulse.
    pub pulse: Option<Time>,
}

impl Block {
    /// An empty one that covers some offsets.
    pub fn new(partition: Partition, partitions: i32, offsets: Range<i64>) -> Self {
        Block { offsets: Some(offsets), ..Block::aside(partition, partitions) }
    }

    /// An empty one for changes that do not come from the topic.
    pub fn aside(partition: Partition, partitions: i32) -> Self {
        Block { partition, partitions, offsets: None, changes: Vec::new(), rejected: Vec::new(), pulse: None }
    }

    /// Covers everything up to an offset.
    fn reach(&mut self, end: i64) {
        let (start, before) =
            self.offsets.as_ref().map_or((end, end), |offsets| (offsets.start, offsets.end));
        self.offsets = Some(start.min(end)..before.max(end));
    }

    /// Refuses changes of another generation of the source; `None` takes any.
    pub(crate) fn must_be_of(&self, generation: Option<u16>) -> Result<()> {
        let Some(generation) = generation else { return Ok(()) };
        match self.changes.iter().map(|change| change.version.generation()).find(|of| *of != generation) {
            Some(other) => Err(crate::Error::Schema(format!(
                "the read model takes rows of generation {generation}, and a change is of generation {other}; nothing was changed"
            ))),
            None => Ok(()),
        }
    }

    /// The offset after what it covers.
    pub(crate) fn end(&self) -> Option<i64> {
        self.offsets.as_ref().map(|offsets| offsets.end)
    }
}

/// How far one partition was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PartitionSync {
    /// The partition.
    pub partition: Partition,
    /// Where to continue: the offset after the last block; `None` if there was no block.
    pub offset: Option<i64>,
    /// The last pulse that was applied.
    pub pulse: Option<Time>,
}

impl PartitionSync {
    pub(crate) fn new(partition: Partition, offset: Option<i64>, pulse: Option<Time>) -> Self {
        PartitionSync { partition, offset, pulse }
    }
}

/// A rejected change, as a read model keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RejectedEntry {
    /// What was rejected.
    pub rejected: Rejected,
    /// Up to when `lastSyncAt` of its tenant (of every tenant, if it is unknown) is held back; `None`:
    /// it is unknown.
    pub holds_back: Option<Time>,
}

impl RejectedEntry {
    pub(crate) fn new(rejected: Rejected, holds_back: Option<Time>) -> Self {
        RejectedEntry { rejected, holds_back }
    }
}

/// Takes the pieces of a file, in order.
pub type Pieces<'p> = &'p mut (dyn FnMut(&[u8]) -> std::io::Result<()> + Send);

/// Keeps the current version of every record, and answers queries.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. Of all changes of a record (tenant, module, id) the one with the highest version counts, whatever
///    order they are applied in and however often. An equal version changes nothing.
/// 2. A record whose highest version deletes it is in no answer. Its version stays, so that an older
///    change that arrives later does not bring it back.
/// 3. Each block is one step: all its changes, its rejections and its pulse, or none. Repeating a block
///    changes nothing, so an error that is [retryable](crate::Error::is_retryable) may be answered by
///    repeating all blocks.
/// 4. A query sees the records of its tenant and its module, and nothing of others, whatever their
///    ids, names and payloads contain.
/// 5. `last_sync_at` is the earliest of the last pulses of all partitions of all topics that were
///    expected or seen, and unknown until each has one. It never goes back. A rejected change holds
///    it back for its tenant, or for all tenants if its tenant is unknown, until the change is
///    dropped.
/// 6. Rows are ordered by the bytes of their ids. A page ends with the row that reaches the limit or
///    [`LIST_BYTES_MAX`](crate::records::LIST_BYTES_MAX). Following `next` shows every record that was
///    there all the time once, in its current version.
/// 7. Sums are exact decimals. Values that are not numbers, or do not fit, are left out and
///    counted. Groups are ordered by the text of their keys, and complete for the first
///    [`GROUPS_MAX`].
/// 8. `since` compares the time of the record's current version.
/// 9. A payload comes back as the same JSON value, its numbers digit for digit.
/// 10. What was applied survives a restart, where the model is [durable](ReadModel::durable).
/// 11. An id is created with the model and never changes: every opening of the model returns it,
///     and no other model has it. What was read for one model is not applied to another that has
///     replaced it: `apply` then fails with an error that is not retryable, until `expect` begins
///     with the new model.
/// 12. A scan hashes what is stored, even if it is no longer JSON. Following its pages shows every
///     record that was there all the time once, in its current version; deleted ones are not in it.
///     The rows of a tenant and module are ordered by the bytes of their ids. A page is empty only
///     if nothing follows.
/// 13. `erase` leaves no content of the subject's deleted records and rejected changes, content of
///     others stays, and so do the versions of deletions. Repeating it changes nothing. A model
///     that cannot erase answers `Unsupported`. A second model that is being filled is erased too,
///     but not the changes that its feed has in flight: erase again once nothing is
///     [unfinished](ReadModel::unfinished).
/// 14. A [second model](ReadModel::second) replaces the first in one step. Until then the first one
///     answers queries, and afterwards the second one, which has another id.
/// 15. A model that is created for a generation of the source stores it, and takes no change of
///     another generation: otherwise changes that a restore of the source has undone would stay.
#[async_trait]
pub trait ReadModel: Send + Sync + 'static {
    /// Applies blocks, each of another partition.
    async fn apply(&self, blocks: &[Block]) -> Result<()>;

    /// Begins a feed: expects pulses from every partition of a topic. Without them `last_sync_at` is unknown.
    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()>;

    /// A page of records.
    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed>;

    /// Numbers about records.
    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups>;

    /// A page of the rows of all tenants, or some, for comparing them with their records.
    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>>;

    /// Up to when everything is applied, for a tenant. Read it before the rows that it is to speak of.
    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>>;

    /// The version of a record, also of a deleted one.
    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>>;

    /// How far each partition was applied, in order.
    async fn partitions(&self) -> Result<Vec<PartitionSync>>;

    /// Rejected changes, by topic, partition and offset.
    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>>;

    /// Drops a rejected change, so that it no longer holds `last_sync_at` back. False if there is
    /// no such change.
    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool>;

    /// The id of the model; `None` if it keeps none.
    async fn id(&self) -> Result<Option<Uuid>> {
        Ok(None)
    }

    /// The one generation of the source whose rows it takes; `None`: any.
    async fn generation(&self) -> Result<Option<u16>> {
        Ok(None)
    }

    /// Begins a second model for a generation of the source, or continues one that an earlier
    /// rebuild left behind; with `anew` that one is removed first. Any other rebuild that is
    /// filling it is fenced. See [`rebuild()`]. [`Unsupported`](crate::Error::Unsupported) where a
    /// model cannot be replaced while it serves.
    async fn second(&self, generation: u16, anew: bool) -> Result<Second> {
        let (_, _) = (generation, anew);
        let message = "this read model cannot be built again while it serves; one in ClickHouse can. Stop the server, remove the \
                    model and start the server: it starts from a snapshot of the records";
        Err(crate::Error::Unsupported(message.into()))
    }

    /// Describes, for people, what an unfinished rebuild has left behind.
    async fn unfinished(&self) -> Result<Option<String>> {
        Ok(None)
    }

    /// The time by the model's clock.
    async fn now(&self) -> Result<Time>;

    /// How many rows and rejected changes have content of a subject, replaced versions too: what
    /// [`erase`](ReadModel::erase) would remove once the records are deleted. Changes nothing.
    async fn erasable(&self, of: &Subject) -> Result<u64> {
        Err(cannot_erase(of))
    }

    /// Removes, for good, every version of the subject's records that a higher one replaces, and
    /// the content of its rejected changes; returns how many there were. Deletions stay. Apply the
    /// deletions of the records first: a version that nothing replaces stays as well.
    async fn erase(&self, of: &Subject) -> Result<u64> {
        Err(cannot_erase(of))
    }

    /// Writes all records of a selection as one Parquet file, piece by piece. A file that cannot be finished is
    /// an error. [`Unsupported`](crate::Error::Unsupported) where the model has no engine for it.
    async fn export_parquet(&self, of: &Selection, to: Pieces<'_>) -> Result<()> {
        let (_, _) = (of, to);
        let message = "this read model writes no Parquet files; one in ClickHouse does (analytics.url)";
        Err(crate::Error::Unsupported(message.into()))
    }

    /// The statements that make its tables, if it has any.
    fn schema(&self) -> Vec<String> {
        Vec::new()
    }

    /// What an approximate answer may count wrong; `None` if it is always exact.
    fn approximate(&self) -> Option<&'static str> {
        None
    }

    /// Whether what was applied survives a restart.
    fn durable(&self) -> bool;
}

fn cannot_erase(of: &Subject) -> crate::Error {
    crate::Error::Unsupported(format!("this read model cannot erase {of}; one in SQLite or ClickHouse can"))
}

#[async_trait]
impl<M: ReadModel + ?Sized> ReadModel for Arc<M> {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        (**self).apply(blocks).await
    }
    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        (**self).expect(topic, partitions).await
    }
    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        (**self).list(of, page).await
    }
    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        (**self).tally(of, what).await
    }
    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        (**self).scan(scan).await
    }
    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        (**self).last_sync_at(tenant).await
    }
    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        (**self).version(tenant, module, id).await
    }
    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        (**self).partitions().await
    }
    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        (**self).rejected(limit).await
    }
    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        (**self).drop_rejected(partition, offset).await
    }
    async fn id(&self) -> Result<Option<Uuid>> {
        (**self).id().await
    }
    async fn generation(&self) -> Result<Option<u16>> {
        (**self).generation().await
    }
    async fn second(&self, generation: u16, anew: bool) -> Result<Second> {
        (**self).second(generation, anew).await
    }
    async fn unfinished(&self) -> Result<Option<String>> {
        (**self).unfinished().await
    }
    async fn now(&self) -> Result<Time> {
        (**self).now().await
    }
    async fn erasable(&self, of: &Subject) -> Result<u64> {
        (**self).erasable(of).await
    }
    async fn erase(&self, of: &Subject) -> Result<u64> {
        (**self).erase(of).await
    }
    async fn export_parquet(&self, of: &Selection, to: Pieces<'_>) -> Result<()> {
        (**self).export_parquet(of, to).await
    }
    fn schema(&self) -> Vec<String> {
        (**self).schema()
    }
    fn approximate(&self) -> Option<&'static str> {
        (**self).approximate()
    }
    fn durable(&self) -> bool {
        (**self).durable()
    }
}
