//! The state machine as pure functions: what a command does to an entry and to the head of its
//! aggregate.
//!
//! Memory, SQLite and Redis run these functions; PostgreSQL implements them in SQL, and the model
//! test compares the two. Nothing here reads a clock, draws a number or touches storage.

use std::sync::Arc;
use std::time::Duration;

use super::{
    Claim, FailureSettings, Grant, MismatchRule, Mode, OnDead, Order, OrderPolicy, Outcome, Settle, Settled,
    State, Token, Verdict, Week,
};
use crate::clock::Time;
use crate::event::Record;
use crate::id::Owner;

mod intervene;
mod order;
mod row;

pub use intervene::intervene;
pub use order::{Head, HeadLease};
use order::{Place, place};
pub use row::Row;

/// The state in which a claim is decided.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The entry, from its week or from `held`.
    pub row: Option<&'a Row>,
    /// The head of its aggregate; a fresh one if the aggregate is new or the event has none.
    pub head: &'a Head,
    /// The entry's week, if it was dropped since the scope began.
    pub dropped: Option<Week>,
    /// The week in which the entry is or would be stored.
    pub week: Week,
    /// The ledger's current time.
    pub now: Time,
    /// A fresh token.
    pub token: Token,
    /// Who claims.
    pub owner: Option<&'a Owner>,
    /// What a reused id leads to.
    pub mismatch: MismatchRule,
}

/// The result of a command: the answer, and what to store (`None` where nothing changes).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step<T> {
    /// The answer.
    pub answer: T,
    /// The new entry.
    pub row: Option<Row>,
    /// The new head of the aggregate.
    pub head: Option<Head>,
    /// Whether [`MismatchRule::Warn`] let a reused id pass, which must be counted.
    pub reused: bool,
}

impl<T> Step<T> {
    fn new(answer: T, row: Option<Row>, head: Option<Head>) -> Self {
        Step { answer, row, head, reused: false }
    }

    fn only(answer: T) -> Self {
        Step::new(answer, None, None)
    }
}

/// Decides a claim by, in this order: the entry's state (in its week or in `held`), its place in
/// the order, a dropped week. Otherwise it is new.
pub fn claim(claim: &Claim, at: Situation<'_>) -> Step<Outcome> {
    if claim.order.is_some() && at.row.is_some_and(|row| row.unordered) {
        return self::claim(&Claim { order: None, ..claim.clone() }, at);
    }
    let Some(row) = at.row else { return unsettled(claim, at) };
    // Before anything else: a nonce that is used for other content does not make it the same claim.
    let differs =
        matches!((row.fingerprint, claim.fingerprint), (Some(stored), Some(given)) if stored != given);
    if differs && at.mismatch == MismatchRule::Error {
        return Step::only(Outcome::Mismatch(row.prior()));
    }
    if let Some(again) = repeat(claim, row, at) {
        return again;
    }
    let step = match closed(row, claim.mode, at) {
        Some(answer) => Step::new(answer, take_bytes(claim, row).filter(|_| !differs), None),
        None => unsettled(claim, at),
    };
    Step { reused: differs, ..step }
}

/// The claim with its order replaced, if necessary: an entry that is still to run stays in the
/// order in which it was first claimed, whatever a later delivery of its id says, so that its
/// aggregate does not wait for it forever.
pub(crate) fn in_order_of(claim: &Claim, row: Option<&Row>) -> Option<Claim> {
    let row = row.filter(|row| matches!(row.state, State::Leased | State::Retry | State::Parked))?;
    let (aggregate, seq) = row.order.as_ref().filter(|_| !row.unordered)?;
    let order = match &claim.order {
        Some(order) if order.aggregate == *aggregate && order.seq == *seq => return None,
        Some(order) => Order { aggregate: aggregate.clone(), seq: *seq, ..order.clone() },
        None => Order {
            aggregate: aggregate.clone(),
            seq: *seq,
            policy: OrderPolicy::Latest,
            on_dead: OnDead::Park,
        },
    };
    Some(Claim { order: Some(order), ..claim.clone() })
}

/// Decides a claim on an event that has no entry, or one that is still to run.
fn unsettled(claim: &Claim, at: Situation<'_>) -> Step<Outcome> {
    if claim.mode == Mode::Refused {
        return refuse(claim, at);
    }
    if let Some(order) = &claim.order {
        let mut head = at.head.clone();
        let place = place(&mut head, order, at.now);
        if let (Place::Go | Place::Wait(_) | Place::Parked(_), Some(too_old)) = (&place, too_old(at)) {
            return Step::only(too_old);
        }
        let counts = matches!(claim.mode, Mode::Failed(_)); // a failure counts wherever the event stands
        let behind = match place {
            Place::Stale(last) => {
                // A dropped week takes no new rows.
                let row = too_old(at).is_none().then(|| blank(claim, at, State::Stale));
                return Step::new(Outcome::Stale { last }, row, None);
            }
            Place::Parked(behind) if !counts => Some(behind),
            Place::Wait(on) if !counts && claim.hold => Some(on),
            Place::Wait(on) if !counts => {
                let head = (head != *at.head).then_some(head);
                return Step::new(Outcome::Wait { on: Some(on) }, None, head);
            }
            Place::Go | Place::Parked(_) | Place::Wait(_) => None,
        };
        if let Some(behind) = behind {
            head.must_run_first(order.seq); // so that its successors stay behind it when the way is free
            let row = blank(claim, at, State::Parked);
            return Step::new(Outcome::Parked { behind }, Some(row), Some(head));
        }
    } else if let Some(too_old) = too_old(at) {
        return Step::only(too_old);
    }
    match claim.mode {
        Mode::Failed(settings) => fail(claim, at, settings),
        _ => grant(claim, at),
    }
}

/// The answer if the ledger can no longer know whether the event ran.
fn too_old(at: Situation<'_>) -> Option<Outcome> {
    at.dropped.filter(|_| at.row.is_none()).map(|week| Outcome::TooOld { week })
}

/// The same claim again, under its nonce: the answer is the same, and a lease starts over.
fn repeat(claim: &Claim, row: &Row, at: Situation<'_>) -> Option<Step<Outcome>> {
    if row.nonce != claim.nonce {
        return None;
    }
    let mut row = row.clone();
    match (claim.mode, row.state) {
        (Mode::Lease(settings), State::Leased) => {
            row.at = at.now.plus(settings.lease);
            let mut head = None;
            if let Some(order) = &claim.order {
                if !at.head.holds(order.seq, row.token) {
                    return None; // the lease had lapsed and another event of the aggregate took over
                }
                let lease = HeadLease { seq: order.seq, token: row.token, until: row.at };
                head = Some(Head { lease: Some(lease), ..at.head.clone() });
            }
            let answer = Outcome::First(granted(&row, at.week));
            Some(Step::new(answer, Some(row), head))
        }
        (Mode::Once { .. }, State::Claimed) | (Mode::Done, State::Done) => {
            Some(Step::only(Outcome::First(granted(&row, at.week))))
        }
        (Mode::Failed(_), State::Retry) => {
            Some(Step::only(Outcome::RetryLater { at: row.at, attempts: row.attempts }))
        }
        _ => None,
    }
}

/// The answer for an entry that no claim of this mode can get now.
fn closed(row: &Row, mode: Mode, at: Situation<'_>) -> Option<Outcome> {
    match row.state {
        State::Leased if row.at > at.now => {
            Some(Outcome::Busy { until: Some(row.at), owner: row.owner.clone() })
        }
        State::Retry if row.at > at.now && !matches!(mode, Mode::Failed(_)) => {
            Some(Outcome::RetryLater { at: row.at, attempts: row.attempts })
        }
        // An event that cannot run does not run an existing entry either.
        State::Leased if mode == Mode::Refused => {
            Some(Outcome::Busy { until: Some(row.at), owner: row.owner.clone() })
        }
        State::Retry if mode == Mode::Refused => {
            Some(Outcome::RetryLater { at: row.at, attempts: row.attempts })
        }
        State::Parked if mode == Mode::Refused => {
            let seq = row.order.as_ref().map_or(0, |(_, seq)| *seq);
            Some(Outcome::Parked { behind: at.head.parked.unwrap_or(seq) })
        }
        State::Leased | State::Retry | State::Parked => None,
        State::Done | State::Claimed | State::Finished | State::Lost => Some(Outcome::Duplicate(row.prior())),
        State::Stale => {
            let seq = row.order.as_ref().map_or(0, |(_, seq)| *seq);
            Some(Outcome::Stale { last: at.head.last.unwrap_or(seq) })
        }
        State::Dead => Some(Outcome::Dead { at: row.at, attempts: row.attempts }),
    }
}

/// An entry that died or was lost before its bytes were held takes them from the next delivery: a
/// redrive could not run it without them.
fn take_bytes(claim: &Claim, row: &Row) -> Option<Row> {
    let is_bare = matches!(row.state, State::Dead | State::Lost) && row.body.is_none();
    let body = claim.body.clone().filter(|_| is_bare)?;
    let origin = row.origin.clone().or_else(|| claim.origin.clone());
    Some(Row { body: Some(body), origin, ..row.clone() })
}

/// A row in a state that no run led to.
fn blank(claim: &Claim, at: Situation<'_>, state: State) -> Row {
    Row {
        state,
        token: at.token,
        nonce: claim.nonce,
        attempts: at.row.map_or(0, |row| row.attempts),
        first_at: at.row.map_or(at.now, |row| row.first_at),
        at: at.now,
        owner: at.owner.cloned(),
        fingerprint: at.row.and_then(|row| row.fingerprint).or(claim.fingerprint),
        order: claim.order.as_ref().map(|order| (order.aggregate.clone(), order.seq)),
        origin: claim.origin.clone().or_else(|| at.row.and_then(|row| row.origin.clone())),
        metadata: claim.metadata.clone().or_else(|| at.row.and_then(|row| row.metadata.clone())),
        reason: None,
        tracked: false,
        alone: false,
        suspect: false,
        unordered: at.row.is_some_and(|row| row.unordered),
        body: body(claim, at, state),
    }
}

/// The bytes to store: those of the claim if it ends here, else those held before. An event that
/// will never run needs none.
fn body(claim: &Claim, at: Situation<'_>, state: State) -> Option<Record> {
    let brought = match state {
        State::Stale => return None,
        State::Parked | State::Dead => claim.body.as_ref(),
        State::Retry if claim.hold => claim.body.as_ref(),
        _ => None,
    };
    brought.or_else(|| at.row.and_then(|row| row.body.as_ref())).cloned()
}

fn granted(row: &Row, week: Week) -> Grant {
    Grant { token: row.token, week, until: row.at, attempt: row.attempts, suspect: row.suspect }
}

/// How many runs have counted so far: one during which the process died counts only if it ran
/// alone.
fn counted(row: Option<&Row>) -> u32 {
    row.map_or(0, |row| match row.state {
        State::Leased if !row.alone => row.attempts.saturating_sub(1),
        _ => row.attempts,
    })
}

fn grant(claim: &Claim, at: Situation<'_>) -> Step<Outcome> {
    let lapsed = at.row.is_some_and(|row| row.state == State::Leased);
    let attempts = counted(at.row);
    if let Mode::Lease(settings) = claim.mode
        && lapsed
        && attempts >= settings.attempts_max
    {
        let reason = format!("its process died or stopped answering in each of {attempts} runs");
        return dead(claim, at, attempts, reason);
    }
    let mut row = blank(claim, at, State::Leased);
    row.attempts = attempts + 1;
    row.suspect = lapsed;
    match claim.mode {
        Mode::Lease(settings) => {
            row.at = at.now.plus(settings.lease);
            row.alone = settings.alone;
        }
        Mode::Once { track } => {
            row.state = State::Claimed;
            row.tracked = track.is_some();
            row.at = at.now.plus(track.unwrap_or_default());
        }
        Mode::Done | Mode::Failed(_) | Mode::Refused => {
            row.state = State::Done;
            row.body = None;
        }
    }
    let head = claim.order.as_ref().map(|order| {
        let mut head = at.head.clone();
        head.begin(order);
        if let Some(lapsed) = head.lease.filter(|lease| lease.seq != order.seq) {
            head.must_run_first(lapsed.seq);
        }
        if row.state == State::Leased {
            head.retrying.remove(&order.seq);
            head.lease = Some(HeadLease { seq: order.seq, token: row.token, until: row.at });
        } else {
            head.lease = None;
            head.advance(order.seq);
        }
        head
    });
    Step::new(Outcome::First(granted(&row, at.week)), Some(row), head)
}

fn dead(claim: &Claim, at: Situation<'_>, attempts: u32, reason: impl Into<Arc<str>>) -> Step<Outcome> {
    let mut row = blank(claim, at, State::Dead);
    row.attempts = attempts;
    row.reason = Some(reason.into());
    let head = claim.order.as_ref().map(|order| {
        let mut head = at.head.clone();
        head.begin(order);
        head.die(order.seq, at.row.map(|row| row.token), order.on_dead);
        head
    });
    Step::new(Outcome::Dead { at: at.now, attempts }, Some(row), head)
}

/// Records the event as dead without a run and outside every order. This works in a dropped week
/// too: the row goes to `held`, not into the week.
fn refuse(claim: &Claim, at: Situation<'_>) -> Step<Outcome> {
    let mut row = blank(claim, at, State::Dead);
    row.order = None;
    row.reason = Some(claim.reason.clone().unwrap_or_else(|| "refused".into()));
    Step::new(Outcome::Dead { at: at.now, attempts: 0 }, Some(row), None)
}

fn fail(claim: &Claim, at: Situation<'_>, settings: FailureSettings) -> Step<Outcome> {
    let attempts = counted(at.row) + 1;
    if attempts >= settings.attempts_max {
        let reason = claim.reason.clone().unwrap_or_else(|| "failed".into());
        return dead(claim, at, attempts, reason);
    }
    let mut row = blank(claim, at, State::Retry);
    row.attempts = attempts;
    row.at = at.now.plus(settings.pause(attempts));
    row.reason.clone_from(&claim.reason);
    let head = claim.order.as_ref().map(|order| {
        let mut head = at.head.clone();
        head.begin(order);
        head.end_lease(order.seq, at.row.map(|row| row.token));
        head.must_run_first(order.seq);
        head
    });
    Step::new(Outcome::RetryLater { at: row.at, attempts }, Some(row), head)
}

/// Decides a settle request: only the current token settles, and repeating the request succeeds.
pub fn settle(settle: &Settle, row: Option<&Row>, head: &Head, now: Time) -> Step<Settled> {
    let Some(row) = row else { return Step::only(Settled::Fenced { state: None }) };
    let fenced = Step::only(Settled::Fenced { state: Some(row.state) });
    if row.token != settle.token {
        return fenced;
    }
    match (row.state, &settle.verdict) {
        (State::Leased, Verdict::Done { .. } | Verdict::Retry { .. } | Verdict::Dead { .. })
        | (State::Claimed, Verdict::Finished { .. } | Verdict::Lost { .. } | Verdict::Retry { .. }) => {}
        (State::Lost, Verdict::Retry { .. }) if row.order.is_some() => {
            return Step::only(Settled::Ok { at: row.at }); // released before, see below
        }
        (state, verdict) if state == verdict.state() => return Step::only(Settled::Ok { at: row.at }),
        _ => return fenced,
    }
    let seq = row.order.as_ref().map(|(_, seq)| *seq);
    if row.state == State::Leased && seq.is_some_and(|seq| !head.holds(seq, row.token)) {
        return fenced; // another event of the aggregate took over after the lease had lapsed
    }
    let was_leased = row.state == State::Leased;
    let mut row = row.clone();
    let mut head = head.clone();
    if row.state == State::Claimed && seq.is_some() && settle.verdict.state() == State::Retry {
        // The order moved on with the claim, so releasing it cannot make it runnable: list it as
        // lost instead.
        row.state = State::Lost;
        row.at = now;
        row.reason = Some("released after its aggregate had moved on".into());
        return Step::new(Settled::Ok { at: now }, Some(row), None);
    }
    row.state = settle.verdict.state();
    row.at = now;
    match &settle.verdict {
        Verdict::Done { metadata } | Verdict::Finished { metadata } => {
            row.metadata = metadata.clone().or(row.metadata);
            row.body = None;
            row.reason = None;
            if let Some(seq) = seq {
                head.advance(seq.max(settle.advance_to.unwrap_or(0)));
                if was_leased {
                    head.lease = None; // of an at-most-once run, it would be a later event's
                }
            }
        }
        Verdict::Retry { after, counted, reason, body } => {
            row.at = now.plus(*after);
            if !counted {
                row.attempts = row.attempts.saturating_sub(1);
            }
            row.reason = reason.clone().or(row.reason);
            row.body = body.clone().or(row.body);
            if let Some(seq) = seq {
                head.lease = None;
                head.must_run_first(seq);
            }
        }
        Verdict::Dead { reason, body } => {
            row.reason = Some(reason.clone());
            row.body = body.clone().or(row.body);
            if let Some(seq) = seq {
                let on_dead = settle.order.as_ref().map_or(OnDead::Park, |order| order.on_dead);
                head.die(seq, Some(row.token), on_dead);
            }
        }
        Verdict::Lost { reason } => row.reason = Some(reason.clone()),
    }
    Step::new(Settled::Ok { at: row.at }, Some(row), seq.map(|_| head))
}

/// Decides an extension: as with settling, only the current token extends.
pub fn extend(token: Token, lease: Duration, row: Option<&Row>, head: &Head, now: Time) -> Step<Settled> {
    let Some(row) = row else { return Step::only(Settled::Fenced { state: None }) };
    let fenced = Step::only(Settled::Fenced { state: Some(row.state) });
    if row.token != token || row.state != State::Leased {
        return fenced;
    }
    let mut row = row.clone();
    row.at = now.plus(lease);
    let mut next = None;
    if let Some((_, seq)) = &row.order {
        if !head.holds(*seq, token) {
            return fenced;
        }
        let lease = HeadLease { seq: *seq, token, until: row.at };
        next = Some(Head { lease: Some(lease), ..head.clone() });
    }
    Step::new(Settled::Ok { at: row.at }, Some(row), next)
}
