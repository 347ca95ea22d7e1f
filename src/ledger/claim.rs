//! Input and output of a ledger: claims and their outcomes, settle requests and theirs.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::{State, Week};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint, Origin, Record};
use crate::id::{Aggregate, EventId, Owner, Scope, Tenant, Visible};

/// The subject of a claim: (tenant, scope, event id). The absence of a tenant counts as one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity {
    /// Whose data it is.
    pub tenant: Option<Tenant>,
    /// Whose effect it is.
    pub scope: Scope,
    /// Which event it is.
    pub id: EventId,
}

impl Identity {
    /// An identity without a tenant.
    pub fn new(scope: Scope, id: EventId) -> Self {
        Identity { tenant: None, scope, id }
    }
}

/// For humans: invisible characters are escaped.
impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(tenant) = &self.tenant {
            write!(f, "{}/", Visible(tenant.as_str()))?;
        }
        write!(f, "{}/{}", Visible(self.scope.as_str()), Visible(&self.id.as_str()))
    }
}

/// A fencing token, drawn from one ledger-wide sequence that is never reset: a later lease has a
/// higher one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub i64);

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Makes a claim repeatable: the same claim issued again under its nonce gets the same outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub i64);

impl Nonce {
    /// A fresh nonce. Nonces must be distinct, not secret, so only a thread's first comes from the
    /// system; the rest follow from it (splitmix64), which costs nanoseconds instead of a system
    /// call.
    pub fn random() -> Self {
        thread_local! {
            static STATE: std::cell::Cell<u64> = {
                let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
                // The version and variant bits are fixed; folding the halves leaves 64 random bits.
                std::cell::Cell::new(high ^ low.rotate_left(32))
            };
        }
        STATE.with(|state| {
            let next = state.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
            state.set(next);
            let mixed = (next ^ (next >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            Nonce((mixed ^ (mixed >> 31)) as i64)
        })
    }
}

/// JSON stored with an entry: valid, without NUL, and no larger than the ledger allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Metadata(Arc<str>);

impl Metadata {
    /// The default maximum size.
    pub const BYTES_MAX: usize = 16 * 1024;

    /// Validates a JSON text. The ledger checks its size.
    pub fn new(json: impl AsRef<str>) -> Result<Self> {
        let json = json.as_ref();
        let value: serde_json::Value = serde_json::from_str(json)
            .map_err(|e| Error::invalid("metadata", format!("it is not JSON ({e})")))?;
        Metadata::of(&value, json)
    }

    fn of(value: &serde_json::Value, json: &str) -> Result<Self> {
        if has_nul(value) {
            return Err(Error::invalid("metadata", "a string in it has a NUL character; NUL is not allowed"));
        }
        Ok(Metadata(json.into()))
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether a top-level key has this value: strings compare by content, other scalars by their
    /// JSON text.
    pub(crate) fn has(&self, key: &str, value: &str) -> bool {
        let parsed: serde_json::Value = serde_json::from_str(&self.0).unwrap_or_default();
        match parsed.get(key) {
            Some(serde_json::Value::String(text)) => text == value,
            Some(serde_json::Value::Null) | None => false,
            Some(other) => {
                let text = other.to_string();
                text == value
            }
        }
    }

    pub(crate) fn check_size(&self, bytes_max: usize) -> Result<()> {
        if self.0.len() > bytes_max {
            return Err(Error::invalid(
                "metadata",
                format!("it has {} bytes; the limit is {bytes_max}", self.0.len()),
            ));
        }
        Ok(())
    }
}

impl TryFrom<serde_json::Value> for Metadata {
    type Error = Error;
    fn try_from(value: serde_json::Value) -> Result<Self> {
        Metadata::of(&value, &value.to_string())
    }
}

fn has_nul(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::String(text) => text.contains('\0'),
        serde_json::Value::Array(items) => items.iter().any(has_nul),
        serde_json::Value::Object(map) => map.iter().any(|(key, value)| key.contains('\0') || has_nul(value)),
        _ => false,
    }
}

/// What the claimer intends to do, which decides what the ledger guarantees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Run under a lease, then settle. Gives up: after a crash that follows the effect, the effect
    /// runs again, unless the sink deduplicates.
    Lease(LeaseSettings),
    /// Run at most once. Gives up: an event that crashes or fails after the claim is lost (and
    /// listed). With `track`, the run must report its end within that time; a claim that has not is
    /// listed as lost.
    Once {
        /// How long the claimer expects to take, if it will report the end.
        track: Option<Duration>,
    },
    /// Record it as done now: the claim settles it. For claims in the effect's own transaction, and
    /// for marking events as done.
    Done,
    /// Count a failed attempt whose transaction, claim included, was rolled back. Never grants
    /// anything.
    Failed(FailureSettings),
    /// The event cannot run at all (undecodable, no id, too old): record it as dead, with its reason
    /// and bytes, outside every order. If there is an entry already, its outcome is the answer and
    /// nothing changes. Never grants anything.
    Refused,
}

/// The settings of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LeaseSettings {
    /// How long it lasts unless it is extended.
    pub lease: Duration,
    /// How many runs an event gets before it is dead.
    pub attempts_max: u32,
    /// Whether the event runs alone, so that a death of its process is its own fault and counts as
    /// an attempt. A claim that runs beside others says false: then a lapsed lease makes the event
    /// suspect, and it runs alone the next time.
    pub alone: bool,
}

/// What a counted failure leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailureSettings {
    /// How many failures make an event dead.
    pub attempts_max: u32,
    /// The pause after the first failure.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// The fraction of the pause to take, in thousandths (full jitter: random in 0..=1000).
    pub jitter_permille: u16,
}

impl FailureSettings {
    /// The pause after the `attempt`-th failure.
    pub fn pause(&self, attempt: u32) -> Duration {
        let doubled = self.backoff_base.saturating_mul(1u32 << attempt.saturating_sub(1).min(30));
        let us = doubled.min(self.backoff_max).as_micros() * u128::from(self.jitter_permille) / 1000;
        Duration::from_micros(us as u64)
    }
}

/// What happens to an aggregate when one of its events is dead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnDead {
    /// Its successors wait until it is redriven or dropped. Gives up: progress.
    Park,
    /// Its successors continue. Gives up: the dead event's place in the order.
    Skip,
}

/// How events of one aggregate follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OrderPolicy {
    /// Never backwards: a seq at or below the last one done is stale. Gaps are allowed. Gives up:
    /// events that arrive too late.
    Latest,
    /// n is followed by n+1 only. Gives up: progress while one is missing; after `gap_timeout` the
    /// aggregate is parked.
    Strict {
        /// Where the order begins.
        baseline: Baseline,
        /// How long to wait for a missing seq.
        gap_timeout: Duration,
    },
}

/// Where a strict order begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Baseline {
    /// With the first seq that arrives.
    FirstSeen,
    /// With this seq.
    From(u64),
}

/// The place of an event in the order of its aggregate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Order {
    /// The aggregate.
    pub aggregate: Aggregate,
    /// The number within it, at most `i64::MAX`.
    pub seq: u64,
    /// The policy.
    pub policy: OrderPolicy,
    /// What a dead event does to its successors.
    pub on_dead: OnDead,
}

/// A request for the right to run an event.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The event's identity.
    pub identity: Identity,
    /// The event's logical time; part of the identity only if the ledger's
    /// [`IdentityRule`](super::IdentityRule) says so.
    pub time: Option<Time>,
    /// Hash of the event's immutable part, to detect a reused id.
    pub fingerprint: Option<Fingerprint>,
    /// Its place in an order, if it has one.
    pub order: Option<Order>,
    /// The record it came from, for forensics.
    pub origin: Option<Origin>,
    /// JSON to store with the entry.
    pub metadata: Option<Metadata>,
    /// What the claimer intends to do.
    pub mode: Mode,
    /// What went wrong, for [`Mode::Failed`] and [`Mode::Refused`].
    pub reason: Option<Arc<str>>,
    /// The event's bytes. The ledger holds them if the claim itself ends as `parked` or `dead`, and
    /// with `hold` also if it counts a failure that ends as `retry`. An entry that is `dead` or
    /// `lost` without bytes takes them, so that it can be redriven.
    pub body: Option<Record>,
    /// Whether an event that would have to wait is parked instead, with its bytes, so that its
    /// offset can be committed. It is [`due`](super::ConsumerStore::due) when its turn has come.
    pub hold: bool,
    /// Makes the claim repeatable.
    pub nonce: Nonce,
}

impl Claim {
    /// A claim on an identity.
    pub fn new(identity: Identity, mode: Mode) -> Self {
        Claim {
            identity,
            time: None,
            fingerprint: None,
            order: None,
            origin: None,
            metadata: None,
            mode,
            reason: None,
            body: None,
            hold: false,
            nonce: Nonce::random(),
        }
    }

    /// A claim on an event in a scope, with the event's fingerprint, time and origin.
    pub fn of(scope: Scope, event: &Event, mode: Mode) -> Self {
        let identity = Identity { tenant: event.tenant.clone(), scope, id: event.id.clone() };
        let fingerprint = event.fingerprint_if_any();
        Claim { time: event.time, fingerprint, origin: event.origin.clone(), ..Claim::new(identity, mode) }
    }
}

/// The result of a claim, in any mode. `G` is what the first claimer gets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "an outcome says whether to run the event; match it"]
pub enum Outcome<G = Grant> {
    /// It has not run before: run it.
    First(G),
    /// It took effect before (or, for at-most-once claims, will never run again).
    Duplicate(Prior),
    /// Another claimer holds it.
    Busy {
        /// When that lease ends, by ledger time; unknown while an open transaction holds the event.
        until: Option<Time>,
        /// The holder, if known.
        owner: Option<Owner>,
    },
    /// It failed and its pause is not over.
    RetryLater {
        /// When it may run, by ledger time.
        at: Time,
        /// How many runs it has had.
        attempts: u32,
    },
    /// Another event of its aggregate must come first.
    Wait {
        /// The seq that is in the way or missing, if known.
        on: Option<u64>,
    },
    /// Its aggregate has moved past it.
    Stale {
        /// The last seq done.
        last: u64,
    },
    /// Its aggregate waits behind something unresolved.
    Parked {
        /// The seq that is dead or missing or, for a claim with `hold`, has to come first.
        behind: u64,
    },
    /// It failed permanently; only a redrive runs it again.
    Dead {
        /// When it died.
        at: Time,
        /// How many runs it had.
        attempts: u32,
    },
    /// The id was used before for a different event.
    Mismatch(Prior),
    /// The ledger no longer knows what happened in the event's week.
    TooOld {
        /// The week that was dropped.
        week: Week,
    },
}

impl<G> Outcome<G> {
    /// Whether the caller is the one to run the event.
    pub fn is_claimed(&self) -> bool {
        matches!(self, Outcome::First(_))
    }

    /// Whether the delivery is settled, so that its offset may be committed without running
    /// anything: the event was done before or is stale. Not if it is busy or waiting, or dead or
    /// parked but not yet held with its bytes.
    pub fn may_acknowledge(&self) -> bool {
        matches!(self, Outcome::Duplicate(_) | Outcome::Stale { .. })
    }

    /// The name for spans and metrics; one of a bounded set.
    pub fn name(&self) -> &'static str {
        match self {
            Outcome::First(_) => "claimed",
            Outcome::Duplicate(_) => "duplicate",
            Outcome::Busy { .. } => "busy",
            Outcome::RetryLater { .. } => "retry_later",
            Outcome::Wait { .. } => "wait",
            Outcome::Stale { .. } => "stale",
            Outcome::Parked { .. } => "parked",
            Outcome::Dead { .. } => "dead",
            Outcome::Mismatch(_) => "mismatch",
            Outcome::TooOld { .. } => "too_old",
        }
    }

    /// Replaces what the first claimer gets.
    pub fn map<H>(self, with: impl FnOnce(G) -> H) -> Outcome<H> {
        match self {
            Outcome::First(grant) => Outcome::First(with(grant)),
            Outcome::Duplicate(prior) => Outcome::Duplicate(prior),
            Outcome::Busy { until, owner } => Outcome::Busy { until, owner },
            Outcome::RetryLater { at, attempts } => Outcome::RetryLater { at, attempts },
            Outcome::Wait { on } => Outcome::Wait { on },
            Outcome::Stale { last } => Outcome::Stale { last },
            Outcome::Parked { behind } => Outcome::Parked { behind },
            Outcome::Dead { at, attempts } => Outcome::Dead { at, attempts },
            Outcome::Mismatch(prior) => Outcome::Mismatch(prior),
            Outcome::TooOld { week } => Outcome::TooOld { week },
        }
    }
}

/// What the claimer that may run the event gets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The fencing token of this run.
    pub token: Token,
    /// The week in which the entry is stored.
    pub week: Week,
    /// When the lease ends, by ledger time; for claims without one, when the claim was made.
    pub until: Time,
    /// Which run this is, counted from 1.
    pub attempt: u32,
    /// Whether the process died during the last run, so that this run should go alone.
    pub suspect: bool,
}

/// How an event ended before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Prior {
    /// Its state.
    pub state: State,
    /// Since when it has been in that state.
    pub at: Time,
    /// Who ran it, for humans.
    pub owner: Option<Owner>,
}

/// A request to settle a claim.
#[derive(Debug, Clone)]
pub struct Settle {
    /// The event's identity.
    pub identity: Identity,
    /// The week of the entry, from the grant.
    pub week: Week,
    /// The token, from the grant.
    pub token: Token,
    /// How the run ended.
    pub verdict: Verdict,
    /// The event's place in its order, as claimed.
    pub order: Option<Order>,
    /// No handler wanted the aggregate's events up to here; the order moves past them too.
    pub advance_to: Option<u64>,
}

/// How a run ended.
#[derive(Debug, Clone)]
pub enum Verdict {
    /// It took effect.
    Done {
        /// JSON to store, replacing that of the claim.
        metadata: Option<Metadata>,
    },
    /// Run it again later.
    Retry {
        /// How long to pause, from ledger time.
        after: Duration,
        /// Whether the run counts as an attempt. A released lease does not.
        counted: bool,
        /// What went wrong.
        reason: Option<Arc<str>>,
        /// The event's bytes, if it is to wait in `held`.
        body: Option<Record>,
    },
    /// It failed permanently.
    Dead {
        /// Why it failed.
        reason: Arc<str>,
        /// The event's bytes, for inspection and redrive.
        body: Option<Record>,
    },
    /// An at-most-once run succeeded.
    Finished {
        /// JSON to store, replacing that of the claim.
        metadata: Option<Metadata>,
    },
    /// An at-most-once run failed; its effect may be lost.
    Lost {
        /// Why it failed.
        reason: Arc<str>,
    },
}

impl Verdict {
    /// Releases the claim immediately, uncounted.
    pub fn release() -> Self {
        Verdict::Retry { after: Duration::ZERO, counted: false, reason: None, body: None }
    }

    /// The state this verdict leads to.
    pub fn state(&self) -> State {
        match self {
            Verdict::Done { .. } => State::Done,
            Verdict::Retry { .. } => State::Retry,
            Verdict::Dead { .. } => State::Dead,
            Verdict::Finished { .. } => State::Finished,
            Verdict::Lost { .. } => State::Lost,
        }
    }
}

/// The result of settling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use = "a fenced settling changed nothing"]
pub enum Settled {
    /// It is recorded, now or earlier by the same request.
    Ok {
        /// Since when, or when a retry is due.
        at: Time,
    },
    /// The token is not the current one. Nothing was changed.
    Fenced {
        /// The state of the entry now; `None` if there is no entry.
        state: Option<State>,
    },
}

impl Settled {
    /// Turns a fenced result into an error.
    pub fn ok_or_fenced(self, identity: &Identity, token: Token) -> Result<Time> {
        match self {
            Settled::Ok { at } => Ok(at),
            Settled::Fenced { state } => Err(Error::Fenced {
                what: match state {
                    Some(state) => format!("{identity} is in state {state}; token {token} cannot settle it"),
                    None => format!("{identity} has no entry any more (token {token})"),
                },
            }),
        }
    }
}

/// A request to extend a lease.
#[derive(Debug, Clone)]
pub struct Extend {
    /// The event's identity.
    pub identity: Identity,
    /// The week in which the entry is stored.
    pub week: Week,
    /// The token.
    pub token: Token,
    /// How long the lease lasts from now.
    pub lease: Duration,
}
