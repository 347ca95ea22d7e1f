//! The journal stores each event once, numbers it within its aggregate, and keeps all events in an
//! order that readers can follow.
//!
//! ```text
//! append(aggregate, expected, events) ──▶ journal ──▶ read(after position) ──▶ relay ──▶ bus
//!        numbers 1, 2, 3, … per aggregate                 └ checkpoint, saved after acknowledgement
//! ```
//!
//! A *seq* numbers the events of one aggregate. A *position* orders all events of a journal;
//! positions may have gaps, so use them to follow a journal, not to count its events.
//!
//! The journal uses names, tokens of the ledger and telemetry. It knows no relay and no database;
//! only `archive.rs`, which follows a journal as a relay does, writes to an object store.

mod append;
mod appender;
mod archive;
mod checkpoint;
mod command;
pub(crate) mod page;
mod position;
pub(crate) mod record;
mod relay_store;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub use append::{Append, Appended, Expected, Placed, Placing, Ready};
pub use appender::Appender;
pub use archive::{ArchiveSettings, Archived, archive, archive_files, archive_read};
pub use checkpoint::{Behind, Checkpoint, Leadership, RelayState};
pub use command::expects;
pub use page::{EVENT_BYTES, Filling, PAGE_BYTES_MAX, Page, bytes_of};
pub use position::Position;
pub use relay_store::RelayStore;
#[cfg(feature = "postgres")]
pub(crate) use relay_store::put_back;
pub(crate) use relay_store::{is_behind, may_be_forgotten, must_be_drawn, must_be_last, swept_up_to};

pub use crate::backend::memory::journal::MemoryJournal;

use crate::clock::Time;
use crate::error::Result;
use crate::event::{Event, Fingerprint};
use crate::id::{Aggregate, EventId, Tenant};
use crate::ledger::MismatchRule;

/// Settings of a journal, given when it is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JournalSettings {
    /// What happens when an id is reused (same id, different fingerprint).
    pub mismatch: MismatchRule,
    /// The largest payload in bytes, headers included. The default leaves 64 KiB of a bus's default
    /// record size (1 MiB) for what the relay adds.
    pub event_bytes_max: usize,
    /// The maximum number of events in one append.
    pub events_max: usize,
    /// The maximum number of bytes on a page, counting the event that reaches it; see [`Filling`].
    pub page_bytes_max: usize,
    /// Prefix for the names of metrics.
    pub telemetry_prefix: Option<String>,
}

impl Default for JournalSettings {
    fn default() -> Self {
        JournalSettings {
            mismatch: MismatchRule::Error,
            event_bytes_max: 960 << 10,
            events_max: 1000,
            page_bytes_max: PAGE_BYTES_MAX,
            telemetry_prefix: None,
        }
    }
}

impl JournalSettings {
    /// Logs and counts an event that was not stored because its id belongs to another event.
    pub(crate) fn kept(&self, id: &EventId) {
        crate::telemetry::reused_in_journal(self.telemetry_prefix.as_deref());
        tracing::warn!(target: "hapax", id = %crate::id::Visible(&id.as_str()), "an id was used again for different content; the original is kept");
    }
}

/// An event as stored in a journal, with tenant, aggregate and seq filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Its place in the order of the whole journal.
    pub position: Position,
    /// Its number within the aggregate, from 1.
    pub seq: u64,
    /// When it was appended, by the journal's clock.
    pub at: Time,
    /// The hash of its immutable part (kind, aggregate and payload) at the time of the append.
    pub fingerprint: Fingerprint,
    /// The event.
    pub event: Event,
    /// The time in the position of the aggregate's previous event, if positions are
    /// [times](JournalCapabilities::timed) and it is known.
    pub previous: Option<Position>,
}

impl Stored {
    /// Combines an event with what the journal knows about it.
    pub fn new(
        position: Position,
        at: Time,
        fingerprint: Fingerprint,
        event: Event,
        aggregate: Aggregate,
        seq: u64,
    ) -> Self {
        Stored { position, seq, at, fingerprint, event: event.seq(aggregate, seq), previous: None }
    }

    /// The aggregate it belongs to.
    pub fn aggregate(&self) -> Option<&Aggregate> {
        self.event.aggregate.as_ref()
    }
}

/// A batch of events read from a journal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ReadBatch {
    /// Its events, in the journal's order.
    pub events: Vec<Stored>,
    /// Where to continue: every position up to here was returned or is known to be empty.
    pub next: Position,
    /// Whether the batch ends before a position whose writer has not committed yet. Later positions
    /// may already be filled.
    pub at_hole: bool,
    /// Whether the batch ends because it is full, by count or by bytes; more events may follow
    /// `next` right away. Never set at a hole.
    pub more: bool,
}

impl ReadBatch {
    /// A batch that ends at a hole or at the end of the journal.
    pub fn new(events: Vec<Stored>, next: Position, at_hole: bool) -> Self {
        ReadBatch { events, next, at_hole, more: false }
    }

    /// Sets whether the batch ends because it is full.
    #[must_use]
    pub fn more(self, more: bool) -> Self {
        ReadBatch { more, ..self }
    }
}

/// How much a journal holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct JournalStat {
    /// The number of events; an estimate unless `exact`.
    pub events: u64,
    /// The number of aggregates; an estimate unless `exact`.
    pub aggregates: u64,
    /// Whether the counts are exact. Large journals estimate them.
    pub exact: bool,
    /// When the oldest remaining event was appended.
    pub oldest_at: Option<Time>,
    /// The position of the newest event.
    pub last: Option<Position>,
}

/// What a journal can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalCapabilities {
    /// The name of the backend: `memory`, `sqlite`, `postgres`, `object`.
    pub backend: &'static str,
    /// Whether acknowledged events survive a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
    /// Whether positions are times in milliseconds, by clocks that may differ. If they differ by
    /// more than the journal allows for, an event can appear at a position that a reader has passed;
    /// a relay looks back for it.
    pub timed: bool,
}

/// Which published events a sweep removes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JournalSweep {
    /// Only events appended longer ago than this, by the journal's clock.
    pub older_than: Duration,
    /// The maximum number of events in one step.
    pub batch_max: usize,
    /// Count the events without removing them.
    pub dry_run: bool,
}

impl JournalSweep {
    /// Sweeps published events older than this, in steps of 10,000.
    pub fn new(older_than: Duration) -> Self {
        JournalSweep { older_than, batch_max: 10_000, dry_run: false }
    }
}

/// Stores events.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. `append` checks, numbers and stores in one atomic step: all events of an append or none. An
///    aggregate's seqs are 1, 2, 3, … without gaps or repeats, even under concurrent appends; a
///    failed append uses up no number.
/// 2. `expected` is checked against the aggregate's last seq. If it does not hold, the answer is
///    `Conflict` with both numbers, and nothing is stored.
/// 3. An id that is already stored with the same fingerprint is a repeat: the answer is its
///    original seq and position, regardless of `expected`, and nothing is stored for it.
/// 4. An id that is already stored with another fingerprint is a `Mismatch`, and nothing of the
///    append is stored. Under `warn` the answer is the original, and the mismatch is counted; the
///    new payload is never stored. An id whose event was [erased](crate::erase) is a repeat, whatever
///    its content.
/// 5. Tenants are isolated: aggregates and ids of different tenants never collide.
/// 6. An aggregate's events are read in seq order from any seq on, in pages. They read back byte
///    for byte as appended: id, time, kind, payload, headers, trace.
/// 7. Following `next` of [`read`](Journal::read) from the start returns every event once, each
///    aggregate's by seq. An event whose writer commits late holds back the later ones until then;
///    one whose writer is gone does not. If positions are [times](JournalCapabilities::timed), this
///    holds as long as clocks differ by no more than the journal allows for.
/// 8. An event can be found by its id.
/// 9. Leadership: see [`RelayStore`].
/// 10. Checkpoints: see [`RelayStore`].
/// 11. A sweep removes only events that every relay's checkpoint has passed, and never an event
///     that is behind; an aggregate's numbering continues where it was. A journal that no relay
///     follows is never swept.
/// 12. Bad input (sizes, names, numbers) is refused with a sentence and changes nothing.
/// 13. Methods that return many events return pages. A page ends with the event that brings it to
///     `limit` events or to [`page_bytes_max`](JournalSettings::page_bytes_max) bytes, so it may be
///     shorter than requested and is empty only if there is nothing. Only `more` says whether there
///     may be more, never the number of events.
/// 14. Every event whose append was acknowledged before the time of a [`horizon`](Journal::horizon),
///     by the journal's clock, has a position at or below that of the horizon. A journal whose
///     positions are [times](JournalCapabilities::timed) cannot tell, and answers `Unsupported`.
#[async_trait]
pub trait Journal: RelayStore {
    /// Appends events to an aggregate.
    async fn append(&self, append: &Append) -> Result<Appended>;

    /// Carries out several appends in order, in one round trip where the backend can. Each gets its
    /// own answer; a refused append does not affect the others.
    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        let mut answers = Vec::with_capacity(appends.len());
        for append in appends {
            answers.push(self.append(append).await);
        }
        Ok(answers)
    }

    /// The events of an aggregate with seq ≥ `from`, in order, at most `limit`. If there is
    /// [`more`](Page::more), continue with the seq after the last one.
    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page>;

    /// The events after a position, in order, at most `limit`. [`Position::START`] is before the
    /// first event.
    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch>;

    /// The event with an id.
    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>>;

    /// The seq of the last event of an aggregate; 0 if it has none.
    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64>;

    /// Waits until there may be events after a position, at most `at_most`. It may return early,
    /// but must not busy-loop.
    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()>;

    /// Permanently removes published events, or counts them; returns how many. The journal no
    /// longer knows the ids of removed events.
    async fn sweep(&self, sweep: &JournalSweep) -> Result<u64>;

    /// Sizes and ages.
    async fn stat(&self) -> Result<JournalStat>;

    /// The current time by the journal's clock.
    async fn now(&self) -> Result<Time>;

    /// How far the journal is: every event whose append was acknowledged before this time, by the
    /// journal's clock, has a position at or below this one. Positions that were drawn and not
    /// committed count too. Implementations read the clock first, and then the position: an append
    /// that is acknowledged in between lies below the position, and the time does not speak of it.
    async fn horizon(&self) -> Result<(Time, Position)>;

    /// Answers once the journal could append: it asks whatever serves appends, and changes nothing.
    /// For probes.
    async fn probe(&self) -> Result<()> {
        self.now().await.map(drop)
    }

    /// The identity of this journal: created once, never changed, part of every checkpoint.
    fn id(&self) -> &str;

    /// What this journal can promise.
    fn capabilities(&self) -> JournalCapabilities;
}

/// Conveniences on top of [`Journal`].
#[async_trait]
pub trait JournalExt: Journal {
    /// Appends events to an aggregate without a tenant: `journal.append_to("order-17",
    /// Expected::Exact(3), [event])`.
    async fn append_to(
        &self,
        aggregate: impl AsRef<str> + Send,
        expected: Expected,
        events: impl IntoIterator<Item = Event> + Send,
    ) -> Result<Appended> {
        let append = Append::to(aggregate, expected, events)?;
        self.append(&append).await
    }
}

impl<J: Journal + ?Sized> JournalExt for J {}

/// An aggregate and its tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AggregateOf {
    /// Whose data it is.
    pub tenant: Option<Tenant>,
    /// The aggregate.
    pub aggregate: Aggregate,
}

impl fmt::Display for AggregateOf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.tenant {
            Some(tenant) => write!(f, "{} of {tenant}", self.aggregate),
            None => self.aggregate.fmt(f),
        }
    }
}

#[async_trait]
impl<J: Journal + ?Sized> Journal for Arc<J> {
    async fn append(&self, append: &Append) -> Result<Appended> {
        (**self).append(append).await
    }
    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        (**self).append_many(appends).await
    }
    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page> {
        (**self).read_aggregate(tenant, aggregate, from, limit).await
    }
    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch> {
        (**self).read(after, limit).await
    }
    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
        (**self).find(tenant, id).await
    }
    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
        (**self).head(tenant, aggregate).await
    }
    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()> {
        (**self).wait(after, at_most).await
    }
    async fn sweep(&self, sweep: &JournalSweep) -> Result<u64> {
        (**self).sweep(sweep).await
    }
    async fn stat(&self) -> Result<JournalStat> {
        (**self).stat().await
    }
    async fn now(&self) -> Result<Time> {
        (**self).now().await
    }
    async fn horizon(&self) -> Result<(Time, Position)> {
        (**self).horizon().await
    }
    async fn probe(&self) -> Result<()> {
        (**self).probe().await
    }
    fn id(&self) -> &str {
        (**self).id()
    }
    fn capabilities(&self) -> JournalCapabilities {
        (**self).capabilities()
    }
}
