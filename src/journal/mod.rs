//! The journal: events that happened, written once, numbered within their aggregate, in an order that can be followed.
//!
//! ```text
//! append(aggregate, expected, events) ──▶ journal ──▶ read(after position) ──▶ relay ──▶ bus
//!        numbers 1, 2, 3, … per aggregate                 └ checkpoint, saved after acknowledgement
//! ```
//!
//! A *seq* counts an aggregate's events, a *position* orders all events of a journal. Positions are for following, not for
//! counting: some may be empty.

mod append;
mod appender;
mod archive;
mod checkpoint;
mod command;
pub(crate) mod page;
mod position;
pub(crate) mod record;

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

pub use crate::backend::memory::journal::MemoryJournal;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint};
use crate::id::{Aggregate, EventId, Owner, RelayName, Tenant};
use crate::ledger::{MismatchRule, Token};

/// What a journal is told when it is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JournalSettings {
    /// What a reused id (same id, other fingerprint) leads to.
    pub mismatch: MismatchRule,
    /// The largest payload, headers included, in bytes. What the buses take by default (1 MiB a record) leaves room for what the relay
    /// says of an event: 64 KiB.
    pub event_bytes_max: usize,
    /// The most events in one append.
    pub events_max: usize,
    /// The most bytes on a page, the event that reaches them included; see [`Filling`].
    pub page_bytes_max: usize,
    /// What metrics are prefixed with.
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
    /// Tells that an event was not stored because its id stands for another.
    pub(crate) fn kept(&self, id: &EventId) {
        crate::telemetry::reused_in_journal(self.telemetry_prefix.as_deref());
        tracing::warn!(target: "hapax", id = %crate::id::Visible(&id.as_str()), "an id was used again for another content; the original is kept");
    }
}

/// An event as it lies in a journal. Its tenant, aggregate and seq are filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stored {
    /// Where it stands in the order of the whole journal.
    pub position: Position,
    /// Its number within the aggregate, from 1.
    pub seq: u64,
    /// When it was appended, by the journal's clock.
    pub at: Time,
    /// The hash of its immutable part as it was appended: kind, aggregate and payload.
    pub fingerprint: Fingerprint,
    /// The event.
    pub event: Event,
}

impl Stored {
    /// Puts an event and what the journal knows of it together.
    pub fn new(
        position: Position,
        at: Time,
        fingerprint: Fingerprint,
        event: Event,
        aggregate: Aggregate,
        seq: u64,
    ) -> Self {
        Stored { position, seq, at, fingerprint, event: event.seq(aggregate, seq) }
    }

    /// The aggregate it belongs to.
    pub fn aggregate(&self) -> Option<&Aggregate> {
        self.event.aggregate.as_ref()
    }
}

/// A batch of a journal.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct ReadBatch {
    /// Its events, in the journal's order.
    pub events: Vec<Stored>,
    /// Where to go on from: everything up to here was given, or is known to be empty.
    pub next: Position,
    /// Whether the batch ends before a position whose writer has not committed yet. More may follow it already.
    pub at_hole: bool,
    /// Whether it ends because it is full, by count or by bytes: there may be more after `next` at once. Never at a hole.
    pub more: bool,
}

impl ReadBatch {
    /// A batch that ends at a hole, or where the journal does.
    pub fn new(events: Vec<Stored>, next: Position, at_hole: bool) -> Self {
        ReadBatch { events, next, at_hole, more: false }
    }

    /// Whether it ends because it is full.
    #[must_use]
    pub fn more(self, more: bool) -> Self {
        ReadBatch { more, ..self }
    }
}

/// How much a journal holds.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct JournalStat {
    /// How many events, as far as `exact` says.
    pub events: u64,
    /// How many aggregates, as far as `exact` says.
    pub aggregates: u64,
    /// Whether the counts are exact; a large journal estimates.
    pub exact: bool,
    /// When the oldest event still here was appended.
    pub oldest_at: Option<Time>,
    /// The position of the newest event.
    pub last: Option<Position>,
}

/// What a journal can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalCapabilities {
    /// Its word: `memory`, `sqlite`, `postgres`, `object`.
    pub backend: &'static str,
    /// Whether what it acknowledged survives a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
    /// Whether [`read`](Journal::read) by itself comes by every event. Where not, [`late`](Journal::late) brings the rest.
    pub ordered: bool,
}

/// Which published events may go.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct JournalSweep {
    /// Only those appended longer ago than this, by the journal's clock.
    pub older_than: Duration,
    /// The most events in one step.
    pub batch_max: usize,
    /// Only count.
    pub dry_run: bool,
}

impl JournalSweep {
    /// Published events older than this, in steps of 10,000.
    pub fn new(older_than: Duration) -> Self {
        JournalSweep { older_than, batch_max: 10_000, dry_run: false }
    }
}

/// Keeps events.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. `append` checks, numbers and stores in one atomic step: all events of an append or none. An aggregate's seqs are 1,
///    2, 3, … without a gap and without a repeat, whoever appends at the same time; a failure burns no number.
/// 2. `expected` is checked against the aggregate's last seq. If it does not hold: `Conflict` with both numbers, and nothing
///    is stored.
/// 3. An id that is there with the same fingerprint is a repeat: it is answered with its original seq and position,
///    whatever was expected, and nothing is stored for it.
/// 4. An id that is there with another fingerprint is `Mismatch`, and nothing of the append is stored. Under `warn` it is
///    answered as the original, and counted; the new payload is never stored.
/// 5. Tenants are apart: aggregates and ids of two tenants never meet.
/// 6. An aggregate's events are read in seq order from any seq on, in pages. What was appended is read back byte for byte:
///    id, time, kind, payload, headers, trace.
/// 7. Following `next` of [`read`](Journal::read) from the start gives every event once, each aggregate's by seq. An event
///    whose writer commits late is waited for; one whose writer is gone is not. (Where capabilities say that read is not
///    ordered: together with [`late`](Journal::late).)
/// 8. An event is found by its id.
/// 9. One relay of a name leads at a time. Each lead has a higher token than any before it; whoever has lost the lead saves
///    nothing and is told so (`Fenced`).
/// 10. A checkpoint is stored whole or not at all, and belongs to one journal: another's is refused, and so is one at a position that
///     was never given out (`Conflict`, with both): the journal was put back, and what gets an old position now would be passed by.
/// 11. A sweep takes only what every relay's checkpoint has passed, never all of what is behind; an aggregate's numbers go
///     on where they were. A journal that no relay follows is never swept. A relay that is forgotten holds nothing back; one that
///     somebody leads is not forgotten (`Conflict`, with who and until when), and one of its name begins at the start.
/// 12. Bad input (sizes, names, numbers) is told with a sentence and changes nothing.
/// 13. What gives many events gives pages. A page ends with the event that brings it to `limit` events or to
///     [`page_bytes_max`](JournalSettings::page_bytes_max) bytes, so it may be shorter than asked for and is empty only if there is nothing.
///     Whether there may be more is told by `more`, never by how many events there are.
#[async_trait]
pub trait Journal: Send + Sync + 'static {
    /// Appends events to an aggregate.
    async fn append(&self, append: &Append) -> Result<Appended>;

    /// Appends, each with its own answer, in order; where the backend can, in one trip. One that is refused harms no other.
    async fn append_many(&self, appends: &[Append]) -> Result<Vec<Result<Appended>>> {
        let mut answers = Vec::with_capacity(appends.len());
        for append in appends {
            answers.push(self.append(append).await);
        }
        Ok(answers)
    }

    /// The events of an aggregate with seq ≥ `from`, in order, at most `limit`. If there is [`more`](Page::more), it goes on with the
    /// seq behind the last.
    async fn read_aggregate(
        &self,
        tenant: Option<&Tenant>,
        aggregate: &Aggregate,
        from: u64,
        limit: usize,
    ) -> Result<Page>;

    /// The events after a position, in order, at most `limit`. [`Position::START`] is before the first.
    async fn read(&self, after: &Position, limit: usize) -> Result<ReadBatch>;

    /// The event with an id.
    async fn find(&self, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>>;

    /// The seq of the last event of an aggregate; 0 if it has none.
    async fn head(&self, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64>;

    /// Waits until there may be something after a position, at most so long. Returning early is allowed, busy looping not.
    async fn wait(&self, after: &Position, at_most: Duration) -> Result<()>;

    /// Events that [`read`](Journal::read) may have passed without giving them, up to the position `passed` and after `after`, by position, at
    /// most `limit`: where `read` is ordered, none. If there is [`more`](Page::more), it goes on after the last one's position.
    async fn late(&self, passed: &Position, after: &Position, limit: usize) -> Result<Page> {
        let _ = (passed, after, limit);
        Ok(Page::default())
    }

    /// Tells the journal that events are on the bus and that a checkpoint says so; [`late`](Journal::late) need not bring them.
    async fn published(&self, events: &[Stored]) -> Result<()> {
        let _ = events;
        Ok(())
    }

    /// Takes the lead among the relays of a name, if nobody else has it.
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership>;

    /// Keeps the lead for another `lease` from now. `Fenced`: it is lost.
    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()>;

    /// Saves a checkpoint. `Fenced`: the lead is lost, and nothing was saved.
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()>;

    /// Gives the lead up, so that nobody waits for it to lapse.
    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()>;

    /// Every relay that has ever led, with its checkpoint, by name.
    async fn relays(&self) -> Result<Vec<RelayState>>;

    /// Puts a relay's checkpoint elsewhere, for an operator: whoever leads is fenced first. Answers with what it was. With a token only if
    /// that is the relay's last still: `Conflict`, and nothing is changed, if someone has led or rewound it since.
    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>>;

    /// Forgets a relay that nobody leads, for an operator: it was named by mistake, or is not run any more. It holds no sweep back from then on, and if
    /// one of its name leads again it begins at the start. Answers with what it was. `NotFound`: there is none; `Conflict`: someone leads.
    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState>;

    /// How many events lie after a position, counted up to `limit`.
    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64>;

    /// Removes published events for good, or counts them; says how many. Ids of removed events are no longer known.
    async fn sweep(&self, terms: &JournalSweep) -> Result<u64>;

    /// How much there is.
    async fn stat(&self) -> Result<JournalStat>;

    /// The present, by the journal's clock.
    async fn now(&self) -> Result<Time>;

    /// Which journal this is: made once, never changed, in every checkpoint.
    fn id(&self) -> &str;

    /// What this journal can promise.
    fn capabilities(&self) -> JournalCapabilities;
}

/// What every journal can do besides, for those who write programs.
#[async_trait]
pub trait JournalExt: Journal {
    /// Appends events to an aggregate of no tenant: `journal.append_to("order-17", Expected::Exact(3), [event])`.
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

/// The position behind which a sweep may remove events: the lowest that any relay needs still. None: nobody follows.
pub(crate) fn swept_up_to(relays: &[RelayState]) -> Option<Position> {
    relays.iter().map(|relay| relay.checkpoint.as_ref().map(Checkpoint::passed).unwrap_or_default()).min()
}

/// Refuses a position that was never given out.
pub(crate) fn must_be_drawn(relay: &RelayName, position: &Position, last: u64) -> Result<()> {
    if position.number() <= last {
        return Ok(());
    }
    let found = format!("the last position it has given out is {last}");
    Err(put_back(Some(relay.as_str()), position, &found, &Position::of(last)))
}

/// The journal is not as someone who follows it has left it. Going on would pass by what has got an old position since.
pub(crate) fn put_back(relay: Option<&str>, position: &Position, found: &str, safe: &Position) -> Error {
    let name = relay.map(|relay| format!("--name {relay} ")).unwrap_or_default();
    Error::Conflict {
        expected: format!(
            "the journal as {} left it, at position {position}",
            relay.map_or_else(|| "whoever follows it".to_owned(), |relay| format!("relay {relay}"))
        ),
        actual: format!(
            "{found}: it was put back (a restore, or a fail-over that lost its last commits). A relay that is started again goes on \
             if its checkpoint was put back too; else `hapax relay {name}rewind --to {safe}` publishes again what came after {safe}"
        ),
    }
}

/// Refuses to forget a relay that somebody leads, or that there is none of.
pub(crate) fn may_be_forgotten(
    relay: &RelayName,
    state: Option<RelayState>,
    now: Time,
) -> Result<RelayState> {
    let state =
        state.ok_or_else(|| Error::NotFound(format!("relay {relay} has never followed this journal")))?;
    match &state.until {
        Some(until) if state.owner.is_some() && *until > now => {
            let by = state.owner.as_ref().map_or("someone", Owner::as_str);
            Err(Error::Conflict {
                expected: format!("relay {relay} with nobody who leads"),
                actual: format!("{by}, who leads it until {until}; stop it first"),
            })
        }
        _ => Ok(state),
    }
}

/// Refuses to change a relay that has another token than was read.
pub(crate) fn must_be_last(relay: &RelayName, read: Option<Token>, last: Option<Token>) -> Result<()> {
    if read.is_none() || read == last {
        return Ok(());
    }
    let text = |token: Option<Token>| token.map_or_else(|| "none".to_owned(), |token| token.0.to_string());
    Err(Error::Conflict {
        expected: format!("relay {relay} at token {}, as it was read", text(read)),
        actual: format!("token {}: someone has led or changed it since", text(last)),
    })
}

/// Whether any relay still has this event before it although its checkpoint is past it.
pub(crate) fn is_behind(relays: &[RelayState], stored: &Stored) -> bool {
    let of = |checkpoint: &Checkpoint| checkpoint.holds_back(stored);
    relays.iter().any(|relay| relay.checkpoint.as_ref().is_some_and(of))
}

/// Which aggregate, whose.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AggregateOf {
    /// Whose data it is.
    pub tenant: Option<Tenant>,
    /// Which one.
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
    async fn late(&self, passed: &Position, after: &Position, limit: usize) -> Result<Page> {
        (**self).late(passed, after, limit).await
    }
    async fn published(&self, events: &[Stored]) -> Result<()> {
        (**self).published(events).await
    }
    async fn acquire_leadership(
        &self,
        relay: &RelayName,
        owner: &Owner,
        lease: Duration,
    ) -> Result<Leadership> {
        (**self).acquire_leadership(relay, owner, lease).await
    }
    async fn renew_leadership(&self, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
        (**self).renew_leadership(relay, token, lease).await
    }
    async fn save(&self, relay: &RelayName, token: Token, checkpoint: &Checkpoint) -> Result<()> {
        (**self).save(relay, token, checkpoint).await
    }
    async fn release_leadership(&self, relay: &RelayName, token: Token) -> Result<()> {
        (**self).release_leadership(relay, token).await
    }
    async fn relays(&self) -> Result<Vec<RelayState>> {
        (**self).relays().await
    }
    async fn rewind(
        &self,
        relay: &RelayName,
        to: &Checkpoint,
        if_token: Option<Token>,
    ) -> Result<Option<Checkpoint>> {
        (**self).rewind(relay, to, if_token).await
    }
    async fn forget_relay(&self, relay: &RelayName) -> Result<RelayState> {
        (**self).forget_relay(relay).await
    }
    async fn count_after(&self, after: &Position, limit: u64) -> Result<u64> {
        (**self).count_after(after, limit).await
    }
    async fn sweep(&self, terms: &JournalSweep) -> Result<u64> {
        (**self).sweep(terms).await
    }
    async fn stat(&self) -> Result<JournalStat> {
        (**self).stat().await
    }
    async fn now(&self) -> Result<Time> {
        (**self).now().await
    }
    fn id(&self) -> &str {
        (**self).id()
    }
    fn capabilities(&self) -> JournalCapabilities {
        (**self).capabilities()
    }
}
