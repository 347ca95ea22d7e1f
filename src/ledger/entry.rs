//! What a ledger holds, as people and tools see it: entries, held events, pages, statistics, findings.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{Body, Identity, Metadata, Token, Week};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Origin};
use crate::id::{Aggregate, EventId, Owner, Scope, Tenant, Topic};

/// What became of an event. `docs/state-machine.md` is generated from the transition function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum State {
    /// Being run under a lease.
    Leased,
    /// Took effect.
    Done,
    /// Failed; to be run again at a stored time.
    Retry,
    /// Failed for good.
    Dead,
    /// Being run at most once.
    Claimed,
    /// An at-most-once run that ended well.
    Finished,
    /// An at-most-once run that failed or never reported its end.
    Lost,
    /// Waits behind something unresolved of its aggregate.
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

    /// Its word.
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

    /// Whether something is still to happen, so that a sweep must not forget it.
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
            Error::invalid("state", format!("{text:?} is none of {}", names.join(", ")))
        })
    }
}

/// One entry of the ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// What it is about.
    pub identity: Identity,
    /// The week it is kept in.
    pub week: Week,
    /// What became of it.
    pub state: State,
    /// The token of its last run.
    pub token: Token,
    /// Runs that counted.
    pub attempts: u32,
    /// When the ledger first saw it.
    pub first_at: Time,
    /// Leased: until when; retry: due when; else: since when.
    pub at: Time,
    /// Who ran it last, for humans.
    pub owner: Option<Owner>,
    /// Hash of its immutable part.
    pub fingerprint: Option<Fingerprint>,
    /// Its aggregate and number.
    pub order: Option<(Aggregate, u64)>,
    /// The record it came from.
    pub origin: Option<Origin>,
    /// JSON kept with it.
    pub metadata: Option<Metadata>,
    /// The last error or reason.
    pub note: Option<Arc<str>>,
    /// Whether the end of an at-most-once run is tracked.
    pub tracked: bool,
    /// The event's bytes, if it is held.
    pub body: Option<Body>,
}

impl Entry {
    /// How much memory its body takes, more or less.
    pub fn bytes(&self) -> usize {
        self.body.as_ref().map_or(0, Body::bytes)
    }
}

/// Which entries to look at. Empty means all.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    /// One tenant.
    pub tenant: Option<Tenant>,
    /// One scope.
    pub scope: Option<Scope>,
    /// One id.
    pub id: Option<EventId>,
    /// Any of these states; empty is any. A tracked at-most-once claim past its time counts as lost.
    pub states: Vec<State>,
    /// First seen at or after.
    pub since: Option<Time>,
    /// First seen before.
    pub until: Option<Time>,
    /// A top-level metadata key with this value (a string, or another JSON scalar by its text).
    pub metadata: Option<(String, String)>,
    /// One aggregate.
    pub aggregate: Option<Aggregate>,
    /// From one topic.
    pub topic: Option<Topic>,
    /// From one partition of whatever topic.
    pub partition: Option<i32>,
}

impl Filter {
    /// Whether an entry passes. `overdue` says that it is an at-most-once claim past its time.
    pub(crate) fn matches(&self, entry: &Entry, overdue: bool) -> bool {
        let state = if overdue { State::Lost } else { entry.state };
        self.tenant.as_ref().is_none_or(|t| entry.identity.tenant.as_ref() == Some(t))
            && self.scope.as_ref().is_none_or(|s| entry.identity.scope == *s)
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

/// Where a page begins: opaque, from [`Page::next`].
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

/// What a cursor says: the last key of the page before.
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
            let _ = write!(text, "{byte:02x}"); // a String takes everything
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

/// Some entries, in key order, and where the next page begins.
#[derive(Debug, Clone)]
pub struct Page {
    /// The entries.
    pub entries: Vec<Entry>,
    /// Where to go on; none at the end.
    pub next: Option<Cursor>,
}

/// Counts of a ledger.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// The ledger's present.
    pub now: Time,
    /// Entries by tenant, scope and state.
    pub counts: Vec<(Option<Tenant>, Scope, State, u64)>,
    /// The weeks there are.
    pub weeks: Vec<Week>,
    /// The weeks that were dropped, and when.
    pub dropped: Vec<(Week, Time)>,
    /// Events held with their bytes.
    pub held: u64,
}

/// What a person or a tool may do to an entry, against the normal course. Each leaves an audit row, and draws a new
/// token, so that whoever held the entry is fenced off.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Intervention {
    /// `dead → retry(now)`, attempts reset. One whose bytes are not held runs when it is delivered again
    /// ([`Intervened::needs_delivery`]).
    Redrive,
    /// `retry(later)`, `lost` or `parked` → `retry(now)`, likewise.
    Retry,
    /// A live lease → `retry(now)`.
    Release,
    /// Anything open but dead → `dead`.
    Kill,
    /// `dead → lost`, its bytes go, and its aggregate goes on past it.
    Drop,
    /// A parked one stays parked, but its aggregate goes on past what it is parked behind: a seq that is missing, or a
    /// dead one, which stays dead.
    Skip,
    /// Removes the entry: the next delivery is a first one. Its place in the order stays what it was: of an ordered event
    /// that its aggregate has gone past, the next delivery is stale.
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

    /// Its word.
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

/// Who intervenes and why.
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
    pub why: String,
    /// Allows [`Redrive`](Intervention::Redrive) and [`Retry`](Intervention::Retry) of an event whose aggregate has moved past
    /// it: it then runs without order, for good.
    pub out_of_order: bool,
    /// Say what would happen, change nothing.
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
    /// Whether the entry is to run again but its bytes are not held: nothing runs it before it is delivered once more, and what
    /// comes after it in its aggregate waits for that.
    pub fn needs_delivery(&self) -> bool {
        self.after.as_ref().is_some_and(|after| after.state == State::Retry && after.body.is_none())
    }
}

/// One line of the audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Audit {
    /// When, by ledger time.
    pub at: Time,
    /// Who.
    pub by: String,
    /// What was done.
    pub what: String,
    /// To which entry.
    pub identity: String,
    /// Why.
    pub why: String,
}

/// What to sweep.
///
/// Age is measured by the ledger's clock, and a clock can leap: a virtual machine resumes, a wrong time is set. A ledger therefore
/// stores when its last sweep began. A sweep that finds more than half the retention (at least two hours) gone by since then cannot
/// tell a leap from a long silence. It forgets nothing, and neither does any sweep for a whole retention from there
/// ([`Swept::paused_until`]); claims that never reported their end are still marked lost. Then sweeps go on as before. The
/// first sweep of a ledger has nothing to compare with and trusts the clock; so sweep at least twice per retention, as a
/// [`Guard`](crate::Guard) does by itself. Two leaps within one retention are taken for one.
#[derive(Debug, Clone, Copy)]
pub struct SweepSettings {
    /// How long entries stay after they were settled.
    pub retention: Duration,
    /// How many rows one transaction deletes at most.
    pub batch_max: u32,
    /// Say what would go, change nothing.
    pub dry_run: bool,
}

/// What a sweep did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Swept {
    /// Rows deleted one by one (timeless entries).
    pub rows: u64,
    /// Weeks dropped, with the number of entries in each.
    pub weeks: Vec<(Week, u64)>,
    /// Open entries that were moved to `held` before their week went.
    pub held: u64,
    /// At-most-once claims that never reported their end, now marked lost.
    pub lost: u64,
    /// The ledger's clock leapt, or nobody swept for long: no sweep forgets anything before this time. See [`SweepSettings`].
    pub paused_until: Option<Time>,
}

impl Swept {
    /// Entries gone.
    pub fn entries(&self) -> u64 {
        self.rows + self.weeks.iter().map(|(_, rows)| rows).sum::<u64>()
    }
}

/// One thing a start-up check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// How bad.
    pub level: Level,
    /// What was looked at.
    pub check: &'static str,
    /// A sentence.
    pub message: String,
}

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// As it should be.
    Fine,
    /// Worth knowing.
    Warning,
    /// The promise cannot be kept; hapax does not start.
    Refusal,
}

/// What a backend can promise.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    /// Its word: `memory`, `sqlite`, `postgres` …
    pub backend: &'static str,
    /// Whether what it acknowledged survives a crash of the machine.
    pub durable: bool,
    /// Whether several processes can share it.
    pub shared: bool,
    /// Whether effects can be written in the claim's transaction.
    pub transactional: bool,
}
