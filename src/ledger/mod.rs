//! The ledger: the durable record of what took effect.
//!
//! The life of an event: a delivery *claims* the event's identity; one claimer at a time holds the
//! lease, runs the effect and *settles* it as done, to be retried, or dead. Every later delivery
//! gets that answer. A claim made in the effect's own transaction needs no lease: it is done when
//! the transaction commits. `transition` is the state machine, one pure function per command;
//! backends store what it decides.
//!
//! The ledger uses names only (ids, events, times, errors). It knows no caller and no database.

mod batcher;
mod claim;
mod claims;
mod consumer_store;
mod doubts;
mod engine;
mod entry;
mod epoch;
mod held;
mod operations;
mod outage;
mod queue;
mod skip_log;
mod skips;
mod sweep_state;
mod transactional;
pub mod transition;
mod week;

use std::time::Duration;

pub(crate) use batcher::{Batcher, ClaimRef, gone, in_batch};
pub use claim::{
    Baseline, Claim, Extend, FailureSettings, Grant, Identity, LeaseSettings, Metadata, Mode, Nonce, OnDead,
    Order, OrderPolicy, Outcome, Prior, Settle, Settled, Token, Verdict,
};
pub use claims::Claims;
pub use consumer_store::ConsumerStore;
#[allow(unused_imports)] // each backend takes what it needs
pub(crate) use engine::{
    Key, Rows, Waiting, claim_rows, extend_rows, intervene_rows, may_sweep, runnable, settle_rows,
};
#[allow(unused_imports)]
pub(crate) use entry::CursorParts;
pub use entry::{
    Audit, Capabilities, Cursor, Entry, Filter, Finding, Intervene, Intervened, Intervention, LIST_BYTES_MAX,
    Level, Page, Stat, State, SweepSettings, Swept, WeekSize,
};
pub use epoch::Epoch;
pub use held::{Due, HeldQuery, Marker, PublishedDead, Reused};
pub use operations::Operations;
pub(crate) use outage::Outage;
pub(crate) use queue::Queue;
pub use skip_log::{Skip, SkipLog};
pub use skips::{
    Amount, Layer, Logged, LoggedSkip, PREVENTED_RETENTION, Prevented, PreventedDays, SKIP_SLOTS, SKIPS_KEPT,
    SKIPS_RETENTION, ScopeOf, SkipBatch, SkipNote, SkipReason, Skipped, day_name, day_of,
};
#[allow(unused_imports)] // each backend takes what it needs
pub(crate) use skips::{
    Counted, ROWS_PER_DAY_MAX, days as prevented_days, horizons as skip_horizons, is_of as is_skip_of,
    plan as plan_skips, slots as skip_slots,
};
pub(crate) use sweep_state::SweepState;
pub use transactional::TransactionalLedger;
pub use transition::Row;
pub use week::{IdentityRule, Week};

use crate::error::{Error, Result};
use crate::id::Owner;

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
        claim.reason.as_deref().map_or(Ok(()), check_reason)?;
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
            Verdict::Retry { reason, .. } => reason.as_deref().map_or(Ok(()), check_reason),
            Verdict::Dead { reason, .. } | Verdict::Lost { reason } => check_reason(reason),
        }
    }
}

fn check_seq(seq: u64) -> Result<()> {
    if i64::try_from(seq).is_err() {
        return Err(Error::invalid("seq", format!("{seq} is larger than {}", i64::MAX)));
    }
    Ok(())
}

/// Checks that every backend can store a reason.
fn check_reason(reason: &str) -> Result<()> {
    if reason.contains('\0') {
        return Err(Error::invalid("reason", "it has a NUL character; NUL is not allowed"));
    }
    if reason.len() > REASON_BYTES_MAX {
        return Err(Error::invalid(
            "reason",
            format!("it has {} bytes; the limit is {REASON_BYTES_MAX}", reason.len()),
        ));
    }
    Ok(())
}

/// The maximum size of a reason.
const REASON_BYTES_MAX: usize = 64 * 1024;

/// A durable record of what took effect: all three parts, by who calls them. A type that implements
/// the parts is a `Ledger`; code that has a `dyn Ledger` or an `L: Ledger` can call the methods of
/// all parts without importing them.
///
/// | part | what it is for | who calls it |
/// |---|---|---|
/// | [`Claims`] | claim, settle, extend; read an entry, the time, the epoch | [`Guard`](crate::Guard), workers, sinks |
/// | [`ConsumerStore`] | held events, dead letters to publish, markers | [`Consumer`](crate::Consumer) |
/// | [`Operations`] | list, count, intervene, audit, sweep, check | operators, the sweeper |
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
/// 9. Same id with a different fingerprint is a mismatch, also under the same nonce. Same fingerprint
///    with a different time is just a duplicate. An event that is still to run stays in the order in
///    which it was first claimed.
/// 10. An identity whose week was dropped since its scope began is too old, never a first. (A week
///     that had no entry forgets nothing when it is dropped, and bars no scope.) Open entries, and
///     those settled within the retention, outlive their week. While a week is being dropped, an id
///     of it that has no entry is busy, and no attempt is counted; when the drop is over it is too
///     old, or a first for a scope that began later.
/// 11. The epoch is the same for all who have the ledger open, and changes as soon as the ledger
///     may lack something that it acknowledged before.
/// 12. A leap of the ledger's clock is not age: entries settled before it are forgotten no sooner
///     than a whole retention after it was noticed, by the rule in the docs of [`SweepSettings`].
///
/// The calls take batches because storage handles batches well; [`Guard`](crate::Guard) gathers its
/// per-event calls into batches.
pub trait Ledger: Claims + ConsumerStore + Operations {}

impl<L: Claims + ConsumerStore + Operations + ?Sized> Ledger for L {}
