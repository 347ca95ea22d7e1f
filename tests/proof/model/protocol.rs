//! What can happen next: steps of workers, faults, the sweep, an operator.

use hapax::ledger::transition::Head;
use hapax::ledger::{Nonce, Outcome, State, Token};
use stateright::{Model, Property};

use super::broken::Broken;
use super::world::{EVENTS, Late, Left, ModelState, Phase, Place, Verdict, Witness, Worker};
use super::{ledger, properties};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Promise {
    /// Claim and effect commit together.
    Transactional,
    /// Claim, effect at a sink that deduplicates on the event's id, settle.
    Leased,
    /// Claim, then the effect, which nobody repeats.
    AtMostOnce,
}

impl Promise {
    pub const ALL: [Promise; 3] = [Promise::Transactional, Promise::Leased, Promise::AtMostOnce];
}

/// A world to explore: who takes part, and how many faults of each kind there are.
#[derive(Clone, Copy, Debug)]
pub struct Protocol {
    pub promise: Promise,
    pub workers: usize,
    pub ticks: i64,
    pub crashes: u8,
    pub losses: u8,
    pub failures: u8,
    pub redrives: u8,
    pub sweep: bool,
    pub broken: Option<Broken>,
}

impl Protocol {
    pub fn new(promise: Promise) -> Self {
        Protocol {
            promise,
            workers: 2,
            ticks: 2,
            crashes: 2,
            losses: 1,
            failures: 1,
            redrives: 1,
            sweep: false,
            broken: None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Ledger time passes; whoever holds a lease may stand still meanwhile.
    Tick,
    /// A delivery: the statement of the claim takes its snapshot. It matters only to a sweep.
    Look {
        worker: usize,
        event: usize,
    },
    /// The claim is decided and answered.
    Claim {
        worker: usize,
        event: usize,
    },
    /// The claim is decided, and its answer lost.
    ClaimLost {
        worker: usize,
        event: usize,
    },
    /// The claim is under way when its sender loses the connection.
    ClaimLate {
        worker: usize,
        event: usize,
    },
    /// Such a claim arrives after all.
    Arrive {
        late: usize,
    },
    /// Such a claim never arrives.
    Vanish {
        late: usize,
    },
    /// A worker in doubt issues the same claim again.
    Again {
        worker: usize,
    },
    /// The effect reaches the sink.
    Effect {
        worker: usize,
    },
    /// The run is settled.
    Settle {
        worker: usize,
        verdict: Verdict,
    },
    /// The run is settled, and the answer lost.
    SettleLost {
        worker: usize,
        verdict: Verdict,
    },
    /// A worker in doubt settles again.
    SettleAgain {
        worker: usize,
    },
    /// kill -9.
    Crash {
        worker: usize,
    },
    Redrive {
        event: usize,
    },
    /// The sweep closes the week.
    Close,
    /// The sweep moves an open row to `held`.
    Move {
        event: usize,
    },
    /// The sweep drops the week with what is left in it.
    Drop,
}

impl Model for Protocol {
    type State = ModelState;
    type Action = Action;

    fn init_states(&self) -> Vec<ModelState> {
        vec![ModelState {
            now: 1,
            places: [Place::default(), Place::default()],
            head: Head::default(),
            phase: Phase::Open,
            workers: vec![Worker::Idle; self.workers],
            late: Vec::new(),
            left: Left {
                crashes: self.crashes,
                losses: self.losses,
                failures: self.failures,
                redrives: self.redrives,
            },
            seen: Witness::default(),
        }]
    }

    fn actions(&self, world: &ModelState, actions: &mut Vec<Action>) {
        if world.now <= self.ticks {
            actions.push(Action::Tick);
        }
        for (worker, state) in world.workers.iter().enumerate() {
            self.steps_of(world, worker, *state, actions);
        }
        for late in 0..world.late.len() {
            actions.extend([Action::Arrive { late }, Action::Vanish { late }]);
        }
        for event in 0..EVENTS {
            if world.left.redrives > 0 && world.row(event).is_some_and(|row| row.state == State::Dead) {
                actions.push(Action::Redrive { event });
            }
        }
        if self.sweep {
            self.steps_of_sweep(world, actions);
        }
    }

    fn next_state(&self, world: &ModelState, action: Action) -> Option<ModelState> {
        let mut next = world.clone();
        self.step(&mut next, action);
        next.late.sort_unstable();
        (next != *world).then_some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        properties::of(self)
    }
}

impl Protocol {
    fn steps_of(&self, world: &ModelState, worker: usize, state: Worker, actions: &mut Vec<Action>) {
        let can_lose = world.left.losses > 0;
        match state {
            Worker::Idle if self.sweep => {
                actions.extend((0..EVENTS).map(|event| Action::Look { worker, event }));
            }
            Worker::Idle => (0..EVENTS).for_each(|event| claims(worker, event, can_lose, actions)),
            Worker::Looking { event, .. } => claims(worker, event, can_lose, actions),
            // A transaction that was cut off holds its locks until it ends, so the same claim waits for it. A single
            // statement may still lie unread in a buffer, and come second.
            Worker::Doubt { event, .. }
                if self.promise == Promise::Transactional
                    && world.late.iter().any(|late| late.event == event) => {}
            Worker::Doubt { .. } => actions.push(Action::Again { worker }),
            Worker::Running { effect, .. } => {
                if !effect {
                    actions.push(Action::Effect { worker });
                }
                let verdicts = match effect {
                    true => vec![Verdict::Done],
                    false if self.is(Broken::DoneWithoutEffect) => vec![Verdict::Done],
                    false => vec![],
                };
                for verdict in verdicts.into_iter().chain((world.left.failures > 0).then_some(Verdict::Retry))
                {
                    actions.push(Action::Settle { worker, verdict });
                    if can_lose {
                        actions.push(Action::SettleLost { worker, verdict });
                    }
                }
            }
            Worker::Settling { .. } => actions.push(Action::SettleAgain { worker }),
        }
        if world.left.crashes > 0 && state != Worker::Idle {
            actions.push(Action::Crash { worker });
        }
    }

    /// Between its steps the sweep waits until no statement is left that began before the week was closed.
    fn steps_of_sweep(&self, world: &ModelState, actions: &mut Vec<Action>) {
        let early = |worker: &Worker| matches!(worker, Worker::Looking { seen: Phase::Open, .. });
        let waits =
            !self.is(Broken::SweepDoesNotWait) && (world.workers.iter().any(early) || !world.late.is_empty());
        match world.phase {
            Phase::Open => actions.push(Action::Close),
            Phase::Closed if !waits => {
                let is_open = |place: &Place| place.week.as_ref().is_some_and(|row| must_move(row.state));
                let copied = |event: usize| world.places[event].held.is_some();
                let open: Vec<usize> =
                    (0..EVENTS).filter(|event| is_open(&world.places[*event]) && !copied(*event)).collect();
                if open.is_empty() {
                    actions.push(Action::Drop);
                }
                actions.extend(open.into_iter().map(|event| Action::Move { event }));
            }
            Phase::Closed | Phase::Dropped => {}
        }
    }

    pub fn step(&self, world: &mut ModelState, action: Action) {
        match action {
            Action::Tick => world.now += 1,
            Action::Look { worker, event } => {
                world.workers[worker] = Worker::Looking { event, seen: world.phase };
            }
            Action::Claim { worker, event } => {
                let seen = world.snapshot_of(worker);
                let nonce = world.fresh_nonce();
                self.ask(world, worker, event, nonce, seen);
            }
            Action::ClaimLost { worker, event } => {
                let seen = world.snapshot_of(worker);
                let nonce = world.fresh_nonce();
                world.left.losses -= 1;
                let _ = self.apply(world, event, nonce, seen); // nobody hears it
                world.workers[worker] = Worker::Doubt { event, nonce };
            }
            Action::ClaimLate { worker, event } => {
                let nonce = world.fresh_nonce();
                world.left.losses -= 1;
                world.late.push(Late { event, nonce: nonce.0 });
                world.workers[worker] = Worker::Doubt { event, nonce };
            }
            Action::Arrive { late } => {
                let Late { event, nonce } = world.late.remove(late);
                let waits = |worker: &Worker| matches!(worker, Worker::Doubt { nonce: of, .. } | Worker::Running { nonce: of, .. } if of.0 == nonce);
                if self.promise == Promise::AtMostOnce && !world.workers.iter().any(waits) {
                    world.seen.interrupted[event] = true; // its sender has given up
                }
                let _ = self.apply(world, event, Nonce(nonce), world.phase); // nobody hears it
            }
            Action::Vanish { late } => {
                world.late.remove(late);
            }
            Action::Again { worker } => {
                let Worker::Doubt { event, nonce } = world.workers[worker] else { return };
                let nonce = if self.is(Broken::DoubtAsksAnew) { world.fresh_nonce() } else { nonce };
                self.ask(world, worker, event, nonce, world.phase);
            }
            Action::Effect { worker } => self.effect(world, worker),
            Action::Settle { worker, verdict } => self.settled(world, worker, verdict, true),
            Action::SettleLost { worker, verdict } => self.settled(world, worker, verdict, false),
            Action::SettleAgain { worker } => {
                let Worker::Settling { event, token, verdict } = world.workers[worker] else { return };
                self.finish(world, worker, event, token, verdict);
            }
            Action::Crash { worker } => {
                world.left.crashes -= 1;
                self.interrupt(world, worker);
                world.workers[worker] = Worker::Idle;
            }
            Action::Redrive { event } => {
                if self.redrive(world, event) {
                    world.left.redrives -= 1;
                }
            }
            Action::Close => world.phase = Phase::Closed,
            Action::Move { event } => {
                let place = &mut world.places[event];
                place.held = place.week.take();
            }
            Action::Drop => {
                world.phase = Phase::Dropped;
                world.places.iter_mut().for_each(|place| place.week = None);
            }
        }
    }

    /// A claim whose answer reaches the worker.
    fn ask(&self, world: &mut ModelState, worker: usize, event: usize, nonce: Nonce, seen: Phase) {
        let outcome = self.apply(world, event, nonce, seen);
        world.workers[worker] = Worker::Idle;
        match outcome {
            Outcome::First(grant) if self.promise != Promise::Transactional => {
                let until = ledger::ticks(grant.until);
                world.workers[worker] =
                    Worker::Running { event, token: grant.token, nonce, until, effect: false };
                if self.is(Broken::OffsetBeforeSettle) {
                    world.seen.acknowledged[event] = true;
                }
            }
            Outcome::First(_) => world.seen.acknowledged[event] = true,
            outcome if outcome.may_acknowledge() => world.seen.acknowledged[event] = true,
            _ => {}
        }
    }

    /// A claim that the ledger decides, whoever hears of it. In the effect's own transaction both happen, or neither.
    fn apply(&self, world: &mut ModelState, event: usize, nonce: Nonce, seen: Phase) -> Outcome {
        let committed_before = world.row(event).is_some_and(|row| row.nonce == nonce);
        let outcome = self.claim(world, event, nonce, seen);
        if outcome.is_claimed() && !committed_before && self.promise != Promise::Leased {
            world.seen.done.push(event);
        }
        if outcome.is_claimed() && !committed_before && self.promise == Promise::Transactional {
            world.seen.sent[event] = world.seen.sent[event].saturating_add(1);
            world.seen.effects[event] = world.seen.effects[event].saturating_add(1);
        }
        outcome
    }

    fn effect(&self, world: &mut ModelState, worker: usize) {
        let Worker::Running { event, token, nonce, until, .. } = world.workers[worker] else { return };
        let seen = &mut world.seen;
        seen.sent[event] = (seen.sent[event] + 1).min(2);
        let is_known = seen.effects[event] > 0 && !self.is(Broken::SinkKnowsTokensOnly);
        if self.promise == Promise::AtMostOnce || !is_known {
            seen.effects[event] = (seen.effects[event] + 1).min(2);
        }
        world.workers[worker] = Worker::Running { event, token, nonce, until, effect: true };
    }

    fn settled(&self, world: &mut ModelState, worker: usize, verdict: Verdict, answered: bool) {
        let Worker::Running { event, token, .. } = world.workers[worker] else { return };
        if verdict == Verdict::Retry {
            world.left.failures -= 1;
            self.interrupt(world, worker);
        }
        if answered {
            self.finish(world, worker, event, token, verdict);
        } else {
            world.left.losses -= 1;
            self.settle(world, event, token, verdict);
            world.workers[worker] = Worker::Settling { event, token, verdict };
        }
    }

    fn finish(&self, world: &mut ModelState, worker: usize, event: usize, token: Token, verdict: Verdict) {
        let counted = self.settle(world, event, token, verdict);
        world.workers[worker] = Worker::Idle;
        // At most once, the claim is what counts: a failed run is listed, and never delivered again.
        if counted && (verdict == Verdict::Done || self.promise == Promise::AtMostOnce) {
            world.seen.acknowledged[event] = true;
        }
    }

    fn interrupt(&self, world: &mut ModelState, worker: usize) {
        if self.promise != Promise::AtMostOnce {
            return;
        }
        if let Worker::Running { event, .. } | Worker::Doubt { event, .. } | Worker::Settling { event, .. } =
            world.workers[worker]
        {
            world.seen.interrupted[event] = true;
        }
    }
}

fn claims(worker: usize, event: usize, can_lose: bool, actions: &mut Vec<Action>) {
    actions.push(Action::Claim { worker, event });
    if can_lose {
        actions.extend([Action::ClaimLost { worker, event }, Action::ClaimLate { worker, event }]);
    }
}

impl ModelState {
    /// What a worker's statement knows of the sweep.
    fn snapshot_of(&self, worker: usize) -> Phase {
        match self.workers[worker] {
            Worker::Looking { seen, .. } => seen,
            _ => self.phase,
        }
    }
}

/// What a sweep moves to `held`: everything that is not settled.
fn must_move(state: State) -> bool {
    state.is_open() || state == State::Claimed
}
