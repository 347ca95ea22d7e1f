//! What a stored key means for a request: the rules as pure functions, for the stores that keep
//! their rows in this process or in a file. PostgreSQL's functions say the same in SQL.

use std::time::Duration;

use super::{
    AfterFailure, Answer, Begin, Begun, Decided, Ended, IdempotencyKey, Kept, KeyEntry, KeyLease, KeyState,
    KeyStatus, Resolution, Resolved,
};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::ledger::{Nonce, Token};

/// No end.
pub(crate) const FOREVER: Time = Time::from_micros(i64::MAX);
/// How far the time of a new key may be ahead of the store's clock: it is kept for that much longer, so there
/// is a bound. Weeks of the ledger are made as far ahead.
pub(crate) const AHEAD_MAX: Duration = Duration::from_hours(28 * 24);

/// A key as it is stored.
#[derive(Debug, Clone)]
pub(crate) struct Row {
    pub token: Token,
    pub nonce: Nonce,
    pub fingerprint: Fingerprint,
    pub parts: String,
    pub begun_at: Time,
    /// Until when it runs.
    pub until: Time,
    /// Until when nobody else may run it.
    pub held_until: Time,
    /// Its last run was released, or decided about: the nonce of that run begins nothing any more.
    pub ended: bool,
    /// Whether a run of it failed or never ended, and so may have had an effect: the key then
    /// belongs to that request for good.
    pub bound: bool,
    pub settled: Option<Settled>,
    /// The last decision of a person about it.
    pub resolved: Option<Resolved>,
}

/// How it ended.
#[derive(Debug, Clone)]
pub(crate) struct Settled {
    pub at: Time,
    /// The time from which the retention counts.
    pub aged_from: Time,
    pub answer: Answer,
}

/// How to answer a request.
#[derive(Debug)]
pub(crate) enum Decision {
    /// Store a new row.
    Insert,
    /// The row goes to this request, under a new token.
    TakeOver,
    /// The row is this request's already: renew its lease.
    Renew,
    /// Change nothing.
    Answer(Begun),
}

/// The state of a key without an answer.
enum OpenState {
    Running,
    OutcomeUnknown,
    Free,
}

/// Decides about a request. `horizon` is that of the last sweep.
pub(crate) fn decide(row: Option<&Row>, begin: &Begin, horizon: Option<Time>, now: Time) -> Decision {
    let Some(row) = row else {
        return if is_expired(&begin.key, horizon) {
            Decision::Answer(Begun::Expired)
        } else if begin.key.time().is_some_and(|time| time > now.plus(AHEAD_MAX)) {
            Decision::Answer(Begun::Ahead { now })
        } else {
            Decision::Insert
        };
    };
    if row.fingerprint != begin.fingerprint.whole && !row.did_nothing() {
        return Decision::Answer(Begun::Mismatch { differing: begin.fingerprint.differing(&row.parts) });
    }
    let own = row.nonce == begin.nonce;
    if let Some(settled) = &row.settled {
        return Decision::Answer(Begun::Done(row.kept(settled, own && !row.ended)));
    }
    // A transaction that committed without an answer has no lease to renew.
    if own && !row.ended && row.until > row.begun_at {
        return Decision::Renew;
    }
    match row.open_state(now) {
        OpenState::OutcomeUnknown => Decision::Answer(Begun::OutcomeUnknown { since: row.begun_at }),
        // A late copy of the begin whose run has ended: nobody waits for it, so it gets nothing.
        OpenState::Free if own && row.ended => Decision::Answer(Begun::Running { until: Some(row.until) }),
        OpenState::Free => Decision::TakeOver,
        OpenState::Running => Decision::Answer(Begun::Running { until: Some(row.until) }),
    }
}

/// Whether a key that is not found was, or could have been, forgotten.
pub(crate) fn is_expired(key: &IdempotencyKey, horizon: Option<Time>) -> bool {
    horizon.is_some_and(|horizon| key.time().is_some_and(|time| time < horizon))
}

impl Row {
    /// The row of a request that begins now. `leased` is false in a caller's transaction, which
    /// commits it with an answer, or by mistake without one.
    pub(crate) fn begun(begin: &Begin, token: Token, now: Time, leased: bool) -> Self {
        let mut row = Row {
            token,
            nonce: begin.nonce,
            fingerprint: begin.fingerprint.whole,
            parts: begin.fingerprint.parts_text(),
            begun_at: now,
            until: now,
            held_until: FOREVER,
            ended: false,
            bound: false,
            settled: None,
            resolved: None,
        };
        if leased {
            row.renew(begin, now);
        }
        row
    }

    /// Renews the lease of the request that began it.
    pub(crate) fn renew(&mut self, begin: &Begin, now: Time) {
        self.until = now.plus(begin.lease);
        self.held_until = match begin.after_failure {
            AfterFailure::Rerun => self.until,
            AfterFailure::Hold => FOREVER,
            AfterFailure::HoldFor(time) => self.until.plus(time),
        };
    }

    /// Whether all of its runs ended without having done anything: then the next request may be another.
    fn did_nothing(&self) -> bool {
        self.ended && !self.bound && self.settled.is_none()
    }

    fn must_run(&self, of: &KeyLease) -> Result<()> {
        if self.token == of.token && self.settled.is_none() { Ok(()) } else { Err(of.fenced()) }
    }

    pub(crate) fn extend(&mut self, of: &KeyLease, lease: Duration, now: Time) -> Result<()> {
        self.must_run(of)?;
        let held_for = self.held_until.since(self.until);
        self.until = now.plus(lease);
        if self.held_until != FOREVER {
            self.held_until = self.until.plus(held_for);
        }
        Ok(())
    }

    pub(crate) fn finish(&mut self, of: &KeyLease, answer: &Answer, now: Time) -> Result<()> {
        if self.token == of.token && self.settled.is_some() {
            return Ok(());
        }
        self.must_run(of)?;
        self.settle(&of.key, answer, now);
        Ok(())
    }

    fn settle(&mut self, key: &IdempotencyKey, answer: &Answer, now: Time) {
        // A key from a clock that is ahead stays until its own time is old, so that it is expired, and
        // never new, once it is forgotten.
        let aged_from = key.time().map_or(now, |time| time.max(now));
        self.settled = Some(Settled { at: now, aged_from, answer: answer.clone() });
    }

    /// Ends the run. A `token` that was never used before fences the holder of the lease: neither a
    /// late heartbeat nor a late copy of its begin revives the run.
    pub(crate) fn release(&mut self, of: &KeyLease, ended: Ended, token: Token, now: Time) -> Result<()> {
        self.must_run(of)?;
        self.token = token;
        self.ended = true;
        self.bound |= ended == Ended::Failed;
        self.held_until = match ended {
            Ended::Undone => now,
            Ended::Failed if self.held_until == FOREVER => FOREVER,
            Ended::Failed => now.plus(self.held_until.since(self.until)),
        };
        self.until = now;
        Ok(())
    }

    /// The row of a request that takes over one that ended without an answer, or never ended.
    pub(crate) fn taken_over(
        before: Option<&Row>,
        begin: &Begin,
        token: Token,
        now: Time,
        leased: bool,
    ) -> Self {
        let resolved = before.and_then(|before| before.resolved.clone());
        // A run that never ended may have done something.
        let bound = before.is_some_and(|before| before.bound || !before.ended);
        Row { bound, resolved, ..Row::begun(begin, token, now, leased) }
    }

    /// The row as it is listed.
    pub(crate) fn entry(&self, tenant: Option<Tenant>, key: IdempotencyKey, now: Time) -> KeyEntry {
        let settled = self.settled.as_ref();
        KeyEntry {
            tenant,
            key,
            state: self.state(now),
            token: self.token,
            begun_at: self.begun_at,
            settled_at: settled.map(|settled| settled.at),
            status: settled.map(|settled| settled.answer.status),
            resolved: self.resolved.clone(),
        }
    }

    /// Stores a person's decision, under a `token` that was never used before: the holder of the
    /// lease can neither extend it nor store an answer.
    pub(crate) fn resolve(
        &mut self,
        of: &KeyLease,
        how: &Resolution,
        who: &Decided,
        token: Token,
        now: Time,
    ) -> Result<()> {
        let found = self.state(now);
        if self.token != of.token || found != KeyState::OutcomeUnknown {
            return Err(of.not_unknown(&format!("it is {found} under token {}", self.token)));
        }
        match how {
            Resolution::Rerun => self.held_until = now,
            Resolution::Answer(answer) => self.settle(&of.key, answer, now),
        }
        self.token = token;
        (self.ended, self.bound) = (true, true);
        self.resolved = Some(Resolved { at: now, by: who.by.clone(), reason: who.reason.clone() });
        Ok(())
    }

    pub(crate) fn state(&self, now: Time) -> KeyState {
        match (&self.settled, self.open_state(now)) {
            (Some(_), _) => KeyState::Done,
            (None, OpenState::Running) => KeyState::Running,
            (None, OpenState::OutcomeUnknown) => KeyState::OutcomeUnknown,
            (None, OpenState::Free) => KeyState::Free,
        }
    }

    /// The state of a row that has no answer.
    fn open_state(&self, now: Time) -> OpenState {
        if self.did_nothing() {
            OpenState::Free // by any clock
        } else if now < self.until {
            OpenState::Running
        } else if now < self.held_until {
            OpenState::OutcomeUnknown
        } else {
            OpenState::Free
        }
    }

    pub(crate) fn status(&self, now: Time) -> KeyStatus {
        match &self.settled {
            Some(settled) => KeyStatus::Done(self.kept(settled, false)),
            None => match self.open_state(now) {
                OpenState::Running => KeyStatus::Running { until: Some(self.until) },
                OpenState::OutcomeUnknown => KeyStatus::OutcomeUnknown { since: self.begun_at },
                OpenState::Free => KeyStatus::Free,
            },
        }
    }

    fn kept(&self, settled: &Settled, mine: bool) -> Kept {
        Kept { answer: settled.answer.clone(), at: settled.at, mine, parts: self.parts.clone() }
    }

    /// Whether a sweep up to `horizon` forgets it: settled before, or free to be run again since.
    pub(crate) fn is_old(&self, horizon: Time) -> bool {
        self.settled.as_ref().map_or(self.held_until, |settled| settled.aged_from) < horizon
    }
}

/// The status of a key that is not stored.
pub(crate) fn missing(key: &IdempotencyKey, horizon: Option<Time>) -> KeyStatus {
    if is_expired(key, horizon) { KeyStatus::Expired } else { KeyStatus::Unknown }
}

/// The error for a lease of a key that is not stored any more.
pub(crate) fn gone(of: &KeyLease) -> Error {
    of.fenced()
}
