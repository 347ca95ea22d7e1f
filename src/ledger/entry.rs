//! The contents of a ledger as people and tools see them: entries, pages, statistics, findings.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Deref;
use std::time::Duration;

use super::transition::Row;
use super::{Identity, Token, Week};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Record;
use crate::id::{Aggregate, EventId, Scope, Tenant, Topic};

/// The state of an entry. `docs/state-machine.md` is generated from the transition function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Running under a lease.
    Leased,
    /// Took effect.
    Done,
    /// Failed; runs again at a stored time.
    Retry,
    /// Failed permanently.
    Dead,
    /// Running at most once.
    Claimed,
    /// An at-most-once run that succeeded.
    Finished,
    /// An at-most-once run that failed or never reported its end.
    Lost,
    /// Waits behind something unresolved in its aggregate.
    Parked,
    /// Arrived after its aggregate had moved past it.
    Stale,
}

impl State {
    /// Every state.
    pub const ALL: [State; 9] = [
        State::Leased,
        State::Done,
        State::Retry,
        State::Dead,
        State::Claimed,
        State::Finished,
        State::Lost,
        State::Parked,
        State::Stale,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            State::Leased => "leased",
            State::Done => "done",
            State::Retry => "retry",
            State::Dead => "dead",
            State::Claimed => "claimed",
            State::Finished => "finished",
            State::Lost => "lost",
            State::Parked => "parked",
            State::Stale => "stale",
        }
    }

    /// Whether the event still has to be dealt with, so that a sweep must not forget it.
    pub fn is_open(self) -> bool {
        matches!(self, State::Leased | State::Retry | State::Dead | State::Parked)
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for State {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        State::ALL.into_iter().find(|state| state.name() == text).ok_or_else(|| {
            let names: Vec<_> = State::ALL.iter().map(|state| state.name()).collect();
            Error::invalid("state", format!("{text:?} is not a state; expected one of {}", names.join(", ")))
        })
    }
}

/// One entry of the ledger: a row, and whose it is. The fields of the row read as if they were the
/// entry's own (`entry.state`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The event's identity.
    pub identity: Identity,
    /// The week it is stored in.
    pub week: Week,
    /// What is stored.
    pub row: Row,
}

impl Deref for Entry {
    type Target = Row;
    fn deref(&self) -> &Row {
        &self.row
    }
}

impl Entry {
    /// Approximate size of its body in memory.
    pub fn bytes(&self) -> usize {
        self.body.as_ref().map_or(0, Record::memory_bytes)
    }

    /// What it counts on a page: its body and its texts, so that a page of entries without a body is
    /// bounded too.
    pub(crate) fn page_bytes(&self) -> usize {
        let texts = self.metadata.as_ref().map_or(0, |metadata| metadata.as_str().len())
            + self.reason.as_deref().map_or(0, str::len);
        self.bytes() + texts + 256
    }
}

/// How many bytes a page of a listing has. The entry that reaches it completes the page, so a page
/// has at least one entry, however large.
pub const LIST_BYTES_MAX: usize = 16 << 20;

/// Which entries to list. An empty filter matches all.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// Only this tenant (`Some(None)`: the default tenant, which is one of its own); `None` matches all
    /// tenants.
    pub tenant: Option<Option<Tenant>>,
    /// One scope.
    pub scope: Option<Scope>,
    /// Any of these scopes; an empty set matches nothing.
    pub scopes: Option<BTreeSet<Scope>>,
    /// One id.
    pub id: Option<EventId>,
    /// Any of these states; empty matches all. A tracked at-most-once claim past its time counts as
    /// lost.
    pub states: Vec<State>,
    /// First seen at or after this time.
    pub since: Option<Time>,
    /// First seen before this time.
    pub until: Option<Time>,
    /// A top-level metadata key with this value (a string, or the text of another JSON scalar).
    pub metadata: Option<(String, String)>,
    /// One aggregate.
    pub aggregate: Option<Aggregate>,
    /// From one topic.
    pub topic: Option<Topic>,
    /// From this partition number of any topic.
    pub partition: Option<i32>,
}

impl Filter {
    /// Whether entries of this tenant and scope can match.
    pub(crate) fn wants(&self, tenant: Option<&Tenant>, scope: &Scope) -> bool {
        self.tenant.as_ref().is_none_or(|wanted| wanted.as_ref() == tenant)
            && self.scope.as_ref().is_none_or(|wanted| scope == wanted)
            && self.scopes.as_ref().is_none_or(|wanted| wanted.contains(scope))
    }

    /// Whether an entry matches. `overdue` says that it is an at-most-once claim past its time.
    pub(crate) fn matches(&self, entry: &Entry, overdue: bool) -> bool {
        let state = if overdue { State::Lost } else { entry.state };
        self.wants(entry.identity.tenant.as_ref(), &entry.identity.scope)
            && self.id.as_ref().is_none_or(|id| entry.identity.id == *id)
            && (self.states.is_empty() || self.states.contains(&state))
            && self.since.is_none_or(|since| entry.first_at >= since)
            && self.until.is_none_or(|until| entry.first_at < until)
            && self.metadata.as_ref().is_none_or(|(key, value)| {
                entry.metadata.as_ref().is_some_and(|metadata| metadata.has(key, value))
            })
            && self.aggregate.as_ref().is_none_or(|a| entry.order.as_ref().is_some_and(|(of, _)| of == a))
            && self.topic.as_ref().is_none_or(|t| entry.origin.as_ref().is_some_and(|from| from.topic == *t))
            && self.partition.is_none_or(|p| entry.origin.as_ref().is_some_and(|from| from.partition == p))
    }
}

/// Where a page begins. Opaque; comes from [`Page::next`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(pub(crate) String);

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::str::FromStr for Cursor {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        CursorParts::decode(text).map(|_| Cursor(text.to_owned()))
    }
}

/// What a cursor encodes: the last key of the previous page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CursorParts {
    pub week: i16,
    pub scope: i32,
    pub key: Vec<u8>,
}

impl CursorParts {
    pub(crate) fn encode(&self) -> Cursor {
        use std::fmt::Write as _;
        let mut text = format!("{}.{}.", self.week, self.scope);
        for byte in &self.key {
            let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        }
        Cursor(text)
    }

    pub(crate) fn decode(text: &str) -> Result<Self> {
        let bad = || Error::invalid("cursor", format!("{text:?} is not one that a listing gave"));
        let mut parts = text.splitn(3, '.');
        let mut part = || parts.next().ok_or_else(bad);
        let week = part()?.parse().map_err(|_| bad())?;
        let scope = part()?.parse().map_err(|_| bad())?;
        let hex = part()?;
        if !hex.is_ascii() || hex.len() % 2 != 0 {
            return Err(bad());
        }
        let key = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).map_err(|_| bad()))
            .collect::<Result<_>>()?;
        Ok(CursorParts { week, scope, key })
    }
}

/// Entries in key order, and where the next page begins.
#[derive(Debug, Clone)]
pub struct Page {
    /// The entries.
    pub entries: Vec<Entry>,
    /// Where the next page begins; `None` on the last page.
    pub next: Option<Cursor>,
}

/// Statistics of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The ledger's current time.
    pub now: Time,
    /// Entries by tenant, scope and state.
    pub counts: Vec<(Option<Tenant>, Scope, State, u64)>,
    /// The existing weeks.
    pub weeks: Vec<Week>,
    /// How much each of them holds.
    pub week_sizes: Vec<WeekSize>,
    /// The weeks that were dropped, and when.
    pub dropped: Vec<(Week, Time)>,
    /// Events held with their bytes.
    pub held: u64,
    /// The same by tenant and scope, without those that hold none.
    pub held_by: Vec<(Option<Tenant>, Scope, u64)>,
}

/// How much a week holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeekSize {
    /// The week.
    pub week: Week,
    /// Its entries, without those that were moved out of it because it goes.
    pub entries: u64,
    /// What they and their index occupy, if the store can tell.
    pub bytes: Option<u64>,
}

/// What an operator may do to an entry outside its normal course. Each writes an audit row and
/// draws a new token, which fences off the current holder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intervention {
    /// `dead → retry(now)`, attempts reset. An event whose bytes are not held, or that no consumer
    /// takes up, runs when it is delivered again ([`Intervened::needs_delivery`]).
    Redrive,
    /// `retry(later)`, `lost` or `parked` → `retry(now)`, otherwise like `Redrive`.
    Retry,
    /// A live lease → `retry(now)`.
    Release,
    /// Anything open except dead → `dead`.
    Kill,
    /// `dead → lost`: its bytes are deleted, and its aggregate moves past it.
    Drop,
    /// The parked event stays parked, but its aggregate moves past what blocks it: a missing seq,
    /// or a dead one, which stays dead.
    Skip,
    /// Removes the entry: the next delivery is a first one. The order does not move back: if the
    /// aggregate has moved past an ordered event, its next delivery is stale.
    Forget,
}

impl Intervention {
    /// Every intervention.
    pub const ALL: [Intervention; 7] = [
        Intervention::Redrive,
        Intervention::Retry,
        Intervention::Release,
        Intervention::Kill,
        Intervention::Drop,
        Intervention::Skip,
        Intervention::Forget,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Intervention::Redrive => "redrive",
            Intervention::Retry => "retry",
            Intervention::Release => "release",
            Intervention::Kill => "kill",
            Intervention::Drop => "drop",
            Intervention::Skip => "skip",
            Intervention::Forget => "forget",
        }
    }
}

/// A request to intervene: what, by whom and for what reason.
#[derive(Debug, Clone)]
pub struct Intervene {
    /// The entry.
    pub identity: Identity,
    /// The event's time, where the ledger's identity includes it.
    pub time: Option<Time>,
    /// What to do.
    pub what: Intervention,
    /// Who does it, for the audit row.
    pub by: String,
    /// Why, for the audit row.
    pub reason: String,
    /// Allows [`Redrive`](Intervention::Redrive) and [`Retry`](Intervention::Retry) of an event
    /// whose aggregate has moved past it: from then on it runs without order.
    pub out_of_order: bool,
    /// The token that the entry had when it was looked at. If it has another one by now, it was
    /// changed meanwhile, and nothing is done ([`Conflict`](crate::Error::Conflict)).
    pub token: Option<Token>,
    /// Only report what would happen.
    pub dry_run: bool,
}

/// What an intervention did.
#[derive(Debug, Clone)]
pub struct Intervened {
    /// The entry before.
    pub before: Entry,
    /// The entry after; none if it was forgotten.
    pub after: Option<Entry>,
}

impl Intervened {
    /// Whether the entry is to run again, but no consumer is known to take it up by itself: its
    /// bytes are not held, or it was claimed without a topic, by a caller of the API or a program of
    /// its own. Deliver it once more; its successors in the aggregate wait for that. If a consumer of
    /// the scope takes up one without a topic first, the delivery is a duplicate.
    pub fn needs_delivery(&self) -> bool {
        self.after.as_ref().is_some_and(|after| {
            after.state == State::Retry && (after.body.is_none() || after.origin.is_none())
        })
    }
}

/// One row of the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// When, by ledger time.
    pub at: Time,
    /// Who.
    pub by: String,
    /// What was done.
    pub what: String,
    /// To which entry, for humans: two entries may have the same text.
    pub identity: String,
    /// The entry itself. Rows of an earlier build have none.
    pub of: Option<Identity>,
    /// Why.
    pub reason: String,
}

#[cfg(any(feature = "sqlite", feature = "postgres", feature = "redis"))]
impl Audit {
    /// How an entry is named in a stored row: as `[tenant, scope, id]`, in JSON. Joined by a
    /// character, the names of two tenants' entries could be one text.
    pub(crate) fn name(identity: &Identity) -> String {
        let tenant = identity.tenant.as_ref().map(Tenant::as_str);
        serde_json::json!([tenant, identity.scope.as_str(), identity.id.as_str()]).to_string()
    }

    /// Reads a stored row.
    pub(crate) fn stored(at: Time, by: String, what: String, name: String, reason: String) -> Self {
        let of = Audit::named(&name);
        let identity = of.as_ref().map_or(name, ToString::to_string);
        Audit { at, by, what, identity, of, reason }
    }

    fn named(name: &str) -> Option<Identity> {
        let (tenant, scope, id): (Option<String>, String, String) = serde_json::from_str(name).ok()?;
        let tenant = tenant.map(Tenant::new).transpose().ok()?;
        Some(Identity { tenant, scope: Scope::new(scope).ok()?, id: EventId::new(id).ok()? })
    }
}

/// What to sweep.
///
/// Age is measured by the ledger's clock, and a clock can leap: a virtual machine resumes, or a
/// wrong time is set. A ledger therefore stores when its last sweep began. If more than half the
/// retention (at least two hours) has passed since then, a sweep cannot tell a leap from a long
/// silence. It forgets nothing, and neither does any other sweep for a whole retention from then on
/// ([`Swept::paused_until`]); claims that never reported their end are still marked lost. After
/// that, sweeps forget again. The first sweep of a ledger has nothing to compare with and trusts
/// the clock; so sweep at least twice per retention, as a [`Guard`](crate::Guard) does. A leap
/// during a pause takes half the retention off it, and no more. Only if no sweep runs between the one
/// that began the pause and that leap does it look like rare sweeps, and count as elapsed time.
#[derive(Debug, Clone, Copy)]
pub struct SweepSettings {
    /// How long entries stay after they were settled.
    pub retention: Duration,
    /// How many rows one transaction deletes at most.
    pub batch_max: u32,
    /// Only report what would go.
    pub dry_run: bool,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Rows deleted one by one (timeless entries).
    pub rows: u64,
    /// Weeks dropped, each with the number of entries that went with it.
    pub weeks: Vec<(Week, u64)>,
    /// Entries that outlive their dropped week, because they are open or ended within the retention.
    pub held: u64,
    /// At-most-once claims that never reported their end, now marked lost.
    pub lost: u64,
    /// Set if the ledger's clock leapt, or no sweep ran for long: no sweep forgets anything before
    /// this time. See [`SweepSettings`].
    pub paused_until: Option<Time>,
}

impl Swept {
    /// The number of entries removed.
    pub fn entries(&self) -> u64 {
        self.rows + self.weeks.iter().map(|(_, rows)| rows).sum::<u64>()
    }
}

/// One result of a start-up check.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How severe it is.
    pub level: Level,
    /// What was checked.
    pub check: &'static str,
    /// The result as a sentence.
    pub message: String,
}

/// How severe a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Everything is in order.
    Fine,
    /// Worth knowing.
    Warning,
    /// A guarantee cannot be kept; hapax does not start.
    Refusal,
}

/// What a backend can guarantee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // independent facts
pub struct Capabilities {
    /// Its name: `memory`, `sqlite`, `postgres` …
    pub backend: &'static str,
    /// Whether what it acknowledged survives a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
    /// Whether effects can be written in the claim's transaction.
    pub transactional: bool,
    /// Whether it logs skips and counts effects that were not done twice
    /// ([`SkipLog`](super::SkipLog)).
    pub skips: bool,
}
