//! The ledger: the durable record of what took effect.
//!
//! An event's life in it: a delivery *claims* the event's identity; one claimer at a time holds the lease, runs the
//! effect and *settles* it as done, to be retried, or dead. Every later delivery is told so. Claims made in the effect's
//! own transaction need no lease: they are done when that transaction commits. `transition` is the state machine,
//! one pure function per command; backends store what it decides.

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
pub use held::{Due, Marker, PublishedDead, Reused, Share};
pub(crate) use outage::Outage;
pub(crate) use pace::Pace;
pub(crate) use queue::Queue;
pub use week::{IdentityRule, Week};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, Scope, Topic};

/// What a reused id (same identity, other fingerprint) leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MismatchRule {
    /// [`Outcome::Mismatch`].
    #[default]
    Error,
    /// The original stands, and the delivery is answered as one of it. Gives up: noticing, but for a counter.
    Warn,
}

/// What a ledger is told when it is opened.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// Who holds the leases, for humans.
    pub owner: Option<Owner>,
    /// What makes an identity.
    pub identity: IdentityRule,
    /// What a reused id leads to.
    pub mismatch: MismatchRule,
    /// The largest metadata.
    pub metadata_bytes_max: usize,
    /// How far ahead of the ledger's present an id's own time may lie.
    pub weeks_ahead: Duration,
    /// How many odd weeks there may be: those of ids whose own time is neither last week's nor this one's nor in the next four. The
    /// present weeks are always made. In PostgreSQL each tenant has so many, out of a thousand that the ledger can hold, and the
    /// last of these are shared out; elsewhere all have them together, and the present weeks count while they are there.
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
    /// Checks what no type checks.
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

    /// Checks a settling.
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

/// A note is text that every backend can store.
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

/// The largest note.
const NOTE_BYTES_MAX: usize = 64 * 1024;

/// A durable record of what took effect.
///
/// # Contract
///
/// Conformance cases (module `testing`, feature `testing`) are named after these clauses.
///
/// 1. At most one live lease (or open claiming transaction) per identity, across tasks, processes and machines.
/// 2. Tokens come from one ledger-wide, never reset sequence. Settling, extending and advancing order carry the token; a
///    stale token affects nothing and is told so. Settling again with the token that settled is fine. Owner names are for
///    humans.
/// 3. Time is the ledger's own clock, read when it decides: never a client's, never a transaction's start.
/// 4. `done` and the aggregate's last seq change in one atomic step.
/// 5. An event that kills its process also reaches `dead`: runs are counted when they start. What is dead or lost without its
///    bytes takes them from the next delivery.
/// 6. Retry times are stored; nothing but an intervention shortens one. Giving a lease back is `retry(now)`, never a delete.
/// 7. Every claim carries a nonce: the same claim issued again has the same outcome. Doubt is resolved that way and never
///    by reading.
/// 8. Batches have per-event outcomes; a duplicate or a bad row never fails its neighbours. A call in a caller's transaction that
///    changes nothing holds nothing: nobody waits for it.
/// 9. Same id, other fingerprint is a mismatch. Same fingerprint with another time is just a duplicate. What is still to run stays
///    in the order in which it was first claimed.
/// 10. An identity whose week was dropped since its scope began is too old, never a first; a week that had no entry at all forgets
///     nothing, and bars nobody. What is open, and what was settled within the retention, outlives its week. While a week is being dropped, an id of it that has no entry is busy, and no attempt is
///     counted; it is too old, or for a scope that began later a first, when the drop is over.
/// 11. The epoch is the same for all who have the ledger open, and another as soon as the ledger may lack something that was
///     acknowledged before.
/// 12. A leap of the ledger's clock is not age: what was settled before it is forgotten no sooner than a whole retention after it
///     was noticed, by the rule in the docs of [`SweepSettings`].
///
/// The calls take batches because that is what storage is good at; the plain per-event calls of
/// [`Guard`](crate::Guard) gather into such batches by themselves.
#[async_trait]
pub trait Ledger: Send + Sync + 'static {
    /// Claims events, each with its own outcome, in the order given. The outer error means that nothing is known of any of
    /// them and that the same claims may be issued again.
    async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>>;

    /// Settles claims. May be issued again after an error.
    async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>>;

    /// Extends leases, each with its own answer.
    async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>>;

    /// Looks at one entry.
    async fn get(&self, identity: &Identity, time: Option<Time>) -> Result<Option<Entry>>;

    /// Which of these took effect before (`done` or `finished`), in the order given. A look, never a claim: between it
    /// and a claim anyone may come first. For ledgers whose identity is the id alone.
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

    /// The held events of a scope, of all its tenants, that may be claimed now: what is due for a retry, what was being
    /// run when its lease lapsed, and what is parked and has its turn (or was overtaken, and will be told that it is stale).
    /// Oldest first; of an aggregate only the lowest; and only those of the share, so that others' do not fill the page. At most
    /// `limit`, and no more bytes than the share says but for the entry that reaches them: bodies are read for those alone. A
    /// look, never a claim; claim each with the order of its entry.
    async fn due(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Due>;

    /// The dead events of a scope, of all its tenants, that are held with their bytes and were not copied out yet, as far as they
    /// are of the share. Oldest first, and bounded like [`due`](Self::due).
    async fn unpublished_dead(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Vec<Entry>>;

    /// Notes that dead events were copied out. Under another token than the entry's it does nothing, so that one that was
    /// redriven and died again is copied again. May be repeated.
    async fn mark_dead_published(&self, entries: &[PublishedDead]) -> Result<()>;

    /// Notes which offsets the next batches of transactional claims will cover: one marker per scope, topic and partition, each
    /// replacing the one before. An empty one removes it.
    async fn set_markers(&self, scope: &Scope, markers: &[Marker]) -> Result<()>;

    /// The markers of these partitions, by partition.
    async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>>;

    /// Counts what there is.
    async fn stat(&self) -> Result<Stat>;

    /// Does to an entry what a person asked for, with an audit row.
    async fn intervene(&self, intervene: &Intervene) -> Result<Intervened>;

    /// The latest audit rows, newest first.
    async fn audit(&self, limit: usize) -> Result<Vec<Audit>>;

    /// Forgets what is older than the retention.
    async fn sweep(&self, terms: SweepSettings) -> Result<Swept>;

    /// Makes what will be needed soon, such as the coming week, so that nobody has to wait for it.
    async fn make_ahead(&self) -> Result<()> {
        Ok(())
    }

    /// Checks what the promises rest on.
    async fn check(&self) -> Result<Vec<Finding>>;

    /// The ledger's present.
    async fn now(&self) -> Result<Time>;

    /// Which life of the ledger this is, asked anew with every call: a ledger that was restored, copied, failed over or
    /// (where that may be either) started anew has another one.
    async fn epoch(&self) -> Result<Epoch>;

    /// What this backend can promise.
    fn capabilities(&self) -> Capabilities;

    /// What it was opened with.
    fn settings(&self) -> &Settings;

    /// How many batches may be under way at once.
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
    async fn due(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Due> {
        (**self).due(scope, share, limit).await
    }
    async fn unpublished_dead(&self, scope: &Scope, share: &Share, limit: usize) -> Result<Vec<Entry>> {
        (**self).unpublished_dead(scope, share, limit).await
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
