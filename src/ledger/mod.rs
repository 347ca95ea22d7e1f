//! The ledger: the durable record of what took effect.
//!
//! The life of an event: a delivery *claims* the event's identity; one claimer at a time holds the
//! lease, runs the effect and *settles* it as done, to be retried, or dead. Every later delivery
//! gets that answer. A claim made in the effect's own transaction needs no lease: it is done when
//! the transaction commits. `transition` is the state machine, one pure function per command;
//! backends store what it decides.

mod batcher;
mod claim;
mod engine;
mod entry;
mod epoch;
mod held;
mod outage;
mod pace;
mod queue;
pub mod transition;
mod week;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

pub(crate) use batcher::{Batcher, ClaimRef, gone, in_batch};
pub(crate) use claim::BODY_BYTES;
pub use claim::{
    Baseline, Body, Claim, Extend, FailureSettings, Grant, Identity, LeaseSettings, Metadata, Mode, Nonce,
    OnDead, Order, OrderPolicy, Outcome, Prior, Settle, Settled, Token, Verdict,
};
#[allow(unused_imports)] // each backend takes what it needs
pub(crate) use engine::{
    Key, Rows, Waiting, claim_rows, extend_rows, intervene_rows, may_sweep, runnable, settle_rows,
};
#[allow(unused_imports)]
pub(crate) use entry::CursorParts;
pub use entry::{
    Audit, Capabilities, Cursor, Entry, Filter, Finding, Intervene, Intervened, Intervention, Level, Page,
    Stat, State, SweepSettings, Swept,
};
pub use epoch::Epoch;
pub use held::{Due, HeldQuery, Marker, PublishedDead, Reused};
pub(crate) use outage::Outage;
pub(crate) use pace::Pace;
pub(crate) use queue::Queue;
pub use week::{IdentityRule, Week};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, Scope, Topic};

/// What a reused id (same identity, different fingerprint) leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MismatchRule {
    /// [`Outcome::Mismatch`].
    #[default]
    Error,
    /// The ledger keeps the original and answers the delivery as one of it. Gives up: the only
    /// trace of the reuse is a counter.
    Warn,
}

/// The settings a ledger is opened with.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Name of the lease holder, for humans.
    pub owner: Option<Owner>,
    /// What makes up an identity.
    pub identity: IdentityRule,
    /// What a reused id leads to.
    pub mismatch: MismatchRule,
    /// The maximum size of metadata.
    pub metadata_bytes_max: usize,
    /// How far an id's own time may lie ahead of the ledger's clock.
    pub weeks_ahead: Duration,
    /// The maximum number of odd weeks. A week is odd if it is not present; last week, this week
    /// and the next four are present and are always made. In PostgreSQL each tenant may have this
    /// many, out of a thousand for the whole ledger, and tenants share the last of these. In other
    /// backends all tenants share one limit, and existing present weeks count towards it.
    pub weeks_max: usize,
    /// Counts deliveries of reused ids that [`MismatchRule::Warn`] let pass as the original.
    pub reused: Reused,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            owner: None,
            identity: IdentityRule::default(),
            mismatch: MismatchRule::default(),
            metadata_bytes_max: Metadata::BYTES_MAX,
            weeks_ahead: Duration::from_secs(28 * 86_400),
            weeks_max: 260,
            reused: Reused::default(),
        }
    }
}

impl Settings {
    /// Checks a claim for what its types do not enforce, and returns its week.
    pub fn check(&self, claim: &Claim) -> Result<Week> {
        if let Some(metadata) = &claim.metadata {
            metadata.check_size(self.metadata_bytes_max)?;
        }
        claim.note.as_deref().map_or(Ok(()), check_note)?;
        if let Some(order) = &claim.order {
            check_seq(order.seq)?;
            if let OrderPolicy::Strict { baseline: Baseline::From(first), .. } = order.policy {
                check_seq(first)?;
            }
        }
        Week::route(self.identity, &claim.identity.id, claim.time)
    }

    /// Checks a settle request likewise.
    pub fn check_settle(&self, settle: &Settle) -> Result<()> {
        settle.advance_to.map_or(Ok(()), check_seq)?;
        match &settle.verdict {
            Verdict::Done { metadata } | Verdict::Finished { metadata } => {
                metadata.as_ref().map_or(Ok(()), |metadata| metadata.check_size(self.metadata_bytes_max))
            }
            Verdict::Retry { note, .. } => note.as_deref().map_or(Ok(()), check_note),
            Verdict::Dead { note, .. } | Verdict::Lost { note } => check_note(note),
        }
    }
}

fn check_seq(seq: u64) -> Result<()> {
    if i64::try_from(seq).is_err() {
        return Err(Error::invalid("seq", format!("{seq} is larger than {}", i64::MAX)));
    }
    Ok(())
}

/// Checks that every backend can store a note.
fn check_note(note: &str) -> Result<()> {
    if note.contains('\0') {
        return Err(Error::invalid("note", "it has a NUL character; NUL is not allowed"));
    }
    if note.len() > NOTE_BYTES_MAX {
        return Err(Error::invalid(
            "note",
            format!("it has {} bytes; the limit is {NOTE_BYTES_MAX}", note.len()),
        ));
    }
    Ok(())
}

/// The maximum size of a note.
const NOTE_BYTES_MAX: usize = 64 * 1024;

/// A durable record of what took effect.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. At most one live lease (or open claiming transaction) per identity, across tasks, processes
///    and machines.
/// 2. Tokens come from one ledger-wide, never reset sequence. Settling, extending and advancing
///    order carry the token; a stale token changes nothing and the caller gets `Fenced`. Settling
///    again with the token that settled succeeds. Owner names are for humans.
/// 3. Time is the ledger's own clock, read when it decides: never a client's, never a transaction's
///    start.
/// 4. `done` and the aggregate's last seq change in one atomic step.
/// 5. An event that kills its process also reaches `dead`: runs are counted when they start. An
///    entry that is dead or lost without its bytes takes them from the next delivery.
/// 6. Retry times are stored; only an intervention shortens one. Releasing a lease is `retry(now)`,
///    never a delete.
/// 7. Every claim carries a nonce: the same claim issued again has the same outcome. Doubt is
///    resolved that way, never by reading.
/// 8. Batches have per-event outcomes; a duplicate or a bad row never fails its neighbours. A call in
///    a caller's transaction that changes nothing holds nothing, so no other call waits for it.
/// 9. Same id with a different fingerprint is a mismatch. Same fingerprint with a different time is
///    just a duplicate. An event that is still to run stays in the order in which it was first
///    claimed.
/// 10. An identity whose week was dropped since its scope began is too old, never a first. (A week
///     that had no entry forgets nothing when it is dropped, and bars no scope.) Open entries, and those settled within the retention, outlive their week. While a week is being
///     dropped, an id of it that has no entry is busy, and no attempt is counted; when the drop is
///     over it is too old, or a first for a scope that began later.
/// 11. The epoch is the same for all who have the ledger open, and changes as soon as the ledger
///     may lack something that it acknowledged before.
/// 12. A leap of the ledger's clock is not age: entries settled before it are forgotten no sooner
///     than a whole retention after it was noticed, by the rule in the docs of [`SweepSettings`].
///
/// The calls take batches because storage handles batches well; [`Guard`](crate::Guard) gathers its
/// per-event calls into batches.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Claims events in the order given, each with its own outcome. The outer error means that
    /// nothing is known about any of them; the same claims may be issued again.
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>>;

    /// Settles claims. May be issued again after an error.
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>>;

    /// Extends leases, each with its own answer.
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>>;

    /// Reads one entry.
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>>;

    /// Tells which of these took effect before (`done` or `finished`), in the order given. It only
    /// reads: another claimer may come first between this and a claim. For ledgers whose identity
    /// is the id alone.
    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        let mut known = Vec::with_capacity(identities.len());
        for identity in identities {
            let entry = self.get(identity, None).await?;
            known.push(entry.is_some_and(|entry| matches!(entry.state, State::Done | State::Finished)));
        }
        Ok(known)
    }

    /// Lists entries in key order, at most `limit` a page.
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page>;

    /// The held events of a scope, of all its tenants, that may be claimed now: those due for a
    /// retry, those whose lease lapsed while they ran, and parked ones whose turn has come (or that
    /// were overtaken, and will be stale). Of an aggregate only the lowest. In random order, so that
    /// members of a group that ask at the same time get different ones, and events that a member
    /// does not want hide no others. At most `limit` entries, ending with the one that reaches the
    /// query's `bytes_max`; only their bodies are read. It only reads: whoever claims an event
    /// first has it. Claim each with the order of its entry.
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due>;

    /// The dead events of a scope, of all its tenants, that are held with their bytes and were not
    /// copied out yet. Bounded like [`due`](Self::due). With `reserve` the caller alone gets these
    /// for so long, so that a group copies each once: others skip them, and get them later if they
    /// are still not copied out. Oldest first, and those that were reserved before come last.
    /// Without `reserve` it only reads, and skips nothing.
    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>>;

    /// Records that dead events were copied out. It does nothing if the entry has another token by
    /// now, so that an event that was redriven and died again is copied again. May be repeated.
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()>;

    /// Records which offsets the next batches of transactional claims will cover: one marker per
    /// scope, topic and partition, each replacing the previous one. An empty marker removes it.
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()>;

    /// The markers of these partitions, by partition.
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>>;

    /// Counts entries, weeks and held events.
    async fn stat(&self) -> Result<Stat>;

    /// Applies an operator's intervention to an entry and writes an audit row.
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened>;

    /// The latest audit rows, newest first.
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>>;

    /// Forgets entries older than the retention.
    async fn sweep(&self, terms: SweepSettings) -> Result<Swept>;

    /// Prepares what will be needed soon, such as the coming week, so that no claim has to wait for
    /// it.
    async fn make_ahead(&self) -> Result<()> {
        Ok(())
    }

    /// Checks the preconditions of the guarantees.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// The ledger's current time.
    async fn now(&self) -> Result<Time>;

    /// The ledger's current epoch, read anew with every call. A ledger that was restored, copied,
    /// failed over or (where a restart may lose data) restarted has a new one.
    async fn epoch(&self) -> Result<Epoch>;

    /// What this backend can guarantee.
    fn capabilities(&self) -> Capabilities;

    /// The settings it was opened with.
    fn settings(&self) -> &Settings;

    /// How many batches may run at once.
    fn parallel_batches(&self) -> usize {
        1
    }
}

#[async_trait]
impl<L: Ledger + ?Sized> Ledger for Arc<L> {
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
        (**self).claim(claims).await
    }
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
        (**self).settle(settles).await
    }
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
        (**self).extend(extends).await
    }
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>> {
        (**self).get(identity, time).await
    }
    async fn known(&self, identities: &[Identity]) -> Result<Vec<bool>> {
        (**self).known(identities).await
    }
    async fn list(&self, filter: &Filter, after: Option<&Cursor>, limit: usize) -> Result<Page> {
        (**self).list(filter, after, limit).await
    }
    async fn due(&self, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
        (**self).due(scope, query, limit).await
    }
    async fn unpublished_dead(
        &self,
        scope: &Scope,
        query: &HeldQuery,
        limit: usize,
        reserve: Option<Duration>,
    ) -> Result<Vec<Entry>> {
        (**self).unpublished_dead(scope, query, limit, reserve).await
    }
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()> {
        (**self).mark_dead_published(entries).await
    }
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()> {
        (**self).set_markers(scope, markers).await
    }
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
        (**self).markers(scope, topic, partitions).await
    }
    async fn stat(&self) -> Result<Stat> {
        (**self).stat().await
    }
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened> {
        (**self).intervene(intervene).await
    }
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>> {
        (**self).audit(limit).await
    }
    async fn sweep(&self, terms: SweepSettings) -> Result<Swept> {
        (**self).sweep(terms).await
    }
    async fn make_ahead(&self) -> Result<()> {
        (**self).make_ahead().await
    }
    async fn check(&self) -> Result<Vec<Finding>> {
        (**self).check().await
    }
    async fn now(&self) -> Result<Time> {
        (**self).now().await
    }
    async fn epoch(&self) -> Result<Epoch> {
        (**self).epoch().await
    }
    fn capabilities(&self) -> Capabilities {
        (**self).capabilities()
    }
    fn settings(&self) -> &Settings {
        (**self).settings()
    }
    fn parallel_batches(&self) -> usize {
        (**self).parallel_batches()
    }
}
