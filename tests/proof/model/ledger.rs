//! The ledger of the model: each statement is one atomic step that the production functions decide.

use std::time::Duration;

use hapax::ledger::transition::{self, Row, Situation, Step};
use hapax::ledger::{
    Claim, Identity, Intervene, Intervention, LeaseSettings, MismatchRule, Mode, Nonce, OnDead, Order,
    OrderPolicy, Outcome, Settle, Settled, State, Token, Verdict, Week,
};
use hapax::{Aggregate, EventId, Scope, Time};

use super::broken::Broken;
use super::protocol::{Promise, Protocol};
use super::world::{ModelState, Phase};

/// One tick of ledger time, which is also a lease's length and the pause before a retry.
pub const TICK: Duration = Duration::from_secs(1);
pub const ATTEMPTS_MAX: u32 = 2;

fn at(now: i64) -> Time {
    Time::from_millis(1_000 * now)
}

/// A time in ticks.
pub fn ticks(time: Time) -> i64 {
    time.as_micros() / 1_000_000
}

fn week() -> Week {
    Week::of(Time::from_millis(1_772_625_600_000))
}

fn identity(event: usize) -> Identity {
    Identity::new(Scope::new("scope").unwrap(), EventId::new(format!("event-{event}")).unwrap())
}

fn order(event: usize) -> Order {
    let aggregate = Aggregate::new("aggregate").unwrap();
    Order { aggregate, seq: event as u64 + 1, policy: OrderPolicy::Latest, on_dead: OnDead::Park }
}

impl Protocol {
    fn claim_of(&self, event: usize, nonce: Nonce) -> Claim {
        let mode = match self.promise {
            Promise::Transactional => Mode::Done,
            Promise::Leased => {
                Mode::Lease(LeaseSettings { lease: TICK, attempts_max: ATTEMPTS_MAX, alone: true })
            }
            Promise::AtMostOnce => Mode::Once { track: Some(TICK) },
        };
        Claim { order: Some(order(event)), nonce, ..Claim::new(identity(event), mode) }
    }

    /// A claim whose statement began when the sweep was in phase `seen`.
    pub fn claim(&self, world: &mut ModelState, event: usize, nonce: Nonce, seen: Phase) -> Outcome {
        let before = world.row(event).cloned();
        // An id that is nowhere is busy while its week is being dropped. A statement that began before knows nothing of it.
        if before.is_none() && seen == Phase::Closed {
            return Outcome::Busy { until: None, owner: None };
        }
        let claim = self.claim_of(event, nonce);
        let dropped = seen == Phase::Dropped && !self.is(Broken::TooOldIsNew);
        let (row, head) = self.as_looked_at(world, before.as_ref());
        let step = transition::claim(
            &claim,
            Situation {
                row: row.as_ref(),
                head: &head,
                dropped: dropped.then(week),
                week: week(),
                now: at(world.now),
                token: self.fresh_token(world),
                owner: None,
                mismatch: MismatchRule::Error,
            },
        );
        Self::judge_claim(world, nonce, before.as_ref(), &step);
        let answer = step.answer.clone();
        world.store(event, step);
        answer
    }

    fn fresh_token(&self, world: &ModelState) -> Token {
        Token(if self.is(Broken::TokensRepeat) { 1 } else { world.last_token() + 1 })
    }

    /// What a broken ledger sees instead of what is there.
    fn as_looked_at(&self, world: &ModelState, row: Option<&Row>) -> (Option<Row>, transition::Head) {
        let (mut row, mut head) = (row.cloned(), world.head.clone());
        match (self.broken, &mut row) {
            (Some(Broken::ClaimIgnoresLease), Some(row)) if row.state == State::Leased => {
                row.at = at(world.now);
                head.lease = head.lease.map(|lease| transition::HeadLease { until: at(world.now), ..lease });
            }
            (Some(Broken::DeadIsTakenAgain), Some(row)) if row.state == State::Dead => {
                row.state = State::Retry;
                head.parked = None;
            }
            (Some(Broken::OrderForgetsRetries), _) => {
                head.lease = None;
                head.retrying.clear();
            }
            _ => {}
        }
        (row, head)
    }

    fn judge_claim(world: &mut ModelState, nonce: Nonce, before: Option<&Row>, step: &Step<Outcome>) {
        let Outcome::First(grant) = step.answer else { return };
        let is_repeat = before.is_some_and(|row| row.nonce == nonce && row.token == grant.token);
        if world.phase == Phase::Dropped && before.is_none() {
            world.seen.granted_after_drop = true;
        }
        if before.is_some_and(|row| row.state == State::Dead) {
            world.seen.left_dead = true;
        }
        if !is_repeat && before.is_some_and(|row| row.token >= grant.token) {
            world.seen.token_went_back = true;
        }
        // The first answer of this claim was lost; it still holds, and nobody else has taken over.
        let still = before
            .is_some_and(|row| row.nonce == nonce && matches!(row.state, State::Leased | State::Claimed));
        if still && !is_repeat && before.is_some_and(|row| row.at > at(world.now)) {
            world.seen.doubt_changed = true;
        }
    }

    /// Settles a run; whether it counted.
    pub fn settle(
        &self,
        world: &mut ModelState,
        event: usize,
        token: Token,
        verdict: super::world::Verdict,
    ) -> bool {
        let current = world.row(event).map(|row| row.token);
        let verdict = match (verdict, self.promise) {
            (super::world::Verdict::Done, Promise::AtMostOnce) => Verdict::Finished { metadata: None },
            (super::world::Verdict::Done, _) => Verdict::Done { metadata: None },
            (super::world::Verdict::Retry, Promise::AtMostOnce) => Verdict::Lost { reason: "failed".into() },
            (super::world::Verdict::Retry, _) => {
                Verdict::Retry { after: Duration::ZERO, counted: true, reason: None, body: None }
            }
        };
        let used = if self.is(Broken::SettleWithoutToken) { current.unwrap_or(token) } else { token };
        let settle = Settle {
            identity: identity(event),
            week: week(),
            token: used,
            verdict,
            order: Some(order(event)),
            advance_to: None,
        };
        let was = world.row(event).map(|row| row.state);
        let mut step = transition::settle(&settle, world.row(event), &world.head, at(world.now));
        if self.is(Broken::DoneWithoutItsOrder) {
            step.head = step.head.map(|head| transition::Head { last: world.head.last, ..head });
        }
        let counted = matches!(step.answer, Settled::Ok { .. });
        if counted && step.row.is_some() && current != Some(token) {
            world.seen.settled_by_stale = true;
        }
        let is_done =
            step.row.as_ref().is_some_and(|row| row.state == State::Done) && was != Some(State::Done);
        world.store(event, step);
        if is_done {
            world.seen.done.push(event);
        }
        counted
    }

    /// An operator's redrive of a dead event.
    pub fn redrive(&self, world: &mut ModelState, event: usize) -> bool {
        let Some(row) = world.row(event).cloned() else { return false };
        let asked = Intervene {
            identity: identity(event),
            time: None,
            what: Intervention::Redrive,
            by: "operator".into(),
            reason: "mended".into(),
            out_of_order: false,
            token: None,
            dry_run: false,
        };
        let token = self.fresh_token(world);
        let Ok((row, head)) = transition::intervene(&asked, &row, &world.head, at(world.now), token) else {
            return false;
        };
        world.keep(event, row);
        if let Some(head) = head {
            world.head = head;
        }
        world.seen.redriven[event] = true;
        true
    }

    pub fn is(&self, broken: Broken) -> bool {
        self.broken == Some(broken)
    }
}

impl ModelState {
    fn store<T>(&mut self, event: usize, step: Step<T>) {
        if step.row.is_some() {
            self.keep(event, step.row);
        }
        if let Some(head) = step.head {
            self.head = head;
        }
    }

    /// A row that was moved stays in `held`. A new one goes to its week; if that is gone, it is stored nowhere.
    fn keep(&mut self, event: usize, row: Option<Row>) {
        let phase = self.phase;
        let place = &mut self.places[event];
        if phase != Phase::Dropped && (place.week.is_some() || place.held.is_none()) {
            place.week = row;
        } else if place.held.is_some() {
            place.held = row;
        }
    }
}
