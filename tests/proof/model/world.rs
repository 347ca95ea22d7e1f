//! The state of the small world: the ledger's rows, the workers, what is under way, and what the witness has seen.

use std::hash::{DefaultHasher, Hash, Hasher};

use hapax::ledger::transition::{Head, Row};
use hapax::ledger::{Nonce, State, Token};

/// Two events of one aggregate: event `e` has seq `e + 1`.
pub const EVENTS: usize = 2;

/// Where the rows of an event are. In production a row is in one place: its week, or `held` once it was moved there.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Place {
    pub week: Option<Row>,
    pub held: Option<Row>,
}

/// How far the sweep of the events' week is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    Open,
    Closed,
    Dropped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    Done,
    Retry,
}

/// What a worker is doing. Its memory goes with it when it crashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Worker {
    Idle,
    /// Its statement has taken a snapshot, and knows this of the sweep.
    Looking {
        event: usize,
        seen: Phase,
    },
    /// It sent a claim and got no answer.
    Doubt {
        event: usize,
        nonce: Nonce,
    },
    /// It may run the event, and perhaps has. `until` is what the grant said.
    Running {
        event: usize,
        token: Token,
        nonce: Nonce,
        until: i64,
        effect: bool,
    },
    /// It settled and got no answer.
    Settling {
        event: usize,
        token: Token,
        verdict: Verdict,
    },
}

/// A claim whose sender gave up waiting. It may arrive at any time, or never.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Late {
    pub event: usize,
    pub nonce: i64,
}

/// Everything that the protocol's next step depends on.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelState {
    /// Ledger time, in ticks.
    pub now: i64,
    pub places: [Place; EVENTS],
    pub head: Head,
    pub phase: Phase,
    pub workers: Vec<Worker>,
    pub late: Vec<Late>,
    pub left: Left,
    pub seen: Witness,
}

/// Faults that may still happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Left {
    pub crashes: u8,
    pub losses: u8,
    pub failures: u8,
    pub redrives: u8,
}

/// What somebody who cannot see the ledger would know.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
#[allow(clippy::struct_excessive_bools)] // each is a sighting of its own
pub struct Witness {
    /// How often each effect reached the sink.
    pub sent: [u8; EVENTS],
    /// How often it took effect there.
    pub effects: [u8; EVENTS],
    /// The events in the order in which they were done.
    pub done: Vec<usize>,
    /// Offsets that a consumer may commit.
    pub acknowledged: [bool; EVENTS],
    /// A process died or a handler failed while it held the event.
    pub interrupted: [bool; EVENTS],
    /// Granted again after its week was dropped.
    pub granted_after_drop: bool,
    /// A delivery, not a redrive, took an event from the dead letters.
    pub left_dead: bool,
    /// A run was settled by somebody who no longer held it.
    pub settled_by_stale: bool,
    /// A new run got a token that is not above the one before.
    pub token_went_back: bool,
    /// The same claim, asked again, was told of another run although the first still held.
    pub doubt_changed: bool,
    pub redriven: [bool; EVENTS],
}

impl ModelState {
    /// The row of an event, as every statement finds it: in its week, else in `held`.
    pub fn row(&self, event: usize) -> Option<&Row> {
        let place = &self.places[event];
        place.week.as_ref().filter(|_| self.phase != Phase::Dropped).or(place.held.as_ref())
    }

    /// The highest token that anybody remembers: one that is forgotten everywhere may be drawn again in the model.
    pub fn last_token(&self) -> i64 {
        let rows =
            self.places.iter().flat_map(|place| place.week.iter().chain(&place.held)).map(|row| row.token.0);
        let leases = self.head.lease.iter().map(|lease| lease.token.0);
        let held = self.workers.iter().filter_map(|worker| match worker {
            Worker::Running { token, .. } | Worker::Settling { token, .. } => Some(token.0),
            _ => None,
        });
        rows.chain(leases).chain(held).max().unwrap_or(0)
    }

    /// A nonce that nobody uses.
    pub fn fresh_nonce(&self) -> Nonce {
        let used = |nonce: i64| {
            self.places.iter().any(|place| place.week.iter().chain(&place.held).any(|row| row.nonce.0 == nonce))
                || self.late.iter().any(|late| late.nonce == nonce)
                || self.workers.iter().any(|worker| {
                    matches!(worker, Worker::Doubt { nonce: n, .. } | Worker::Running { nonce: n, .. } if n.0 == nonce)
                })
        };
        Nonce((1..i64::MAX).find(|nonce| !used(*nonce)).unwrap_or(i64::MAX))
    }
}

/// Worlds that cannot behave differently count as one: workers are interchangeable; a nonce matters while somebody may
/// use it again; a time matters while somebody waits for it; owners, first sights and reasons are never read.
impl Hash for ModelState {
    fn hash<H: Hasher>(&self, to: &mut H) {
        self.now.hash(to);
        for place in &self.places {
            for row in [&place.week, &place.held] {
                row.as_ref().map(|row| self.essence(row)).hash(to);
            }
        }
        let head = &self.head;
        (head.last, head.parked, head.gap_at.map(hapax::Time::as_micros)).hash(to);
        head.retrying.hash(to);
        head.lease.map(|lease| (lease.seq, lease.token, lease.until.as_micros())).hash(to);
        self.phase.hash(to);
        let mut workers: Vec<_> = self.workers.iter().map(|worker| self.fingerprint(*worker)).collect();
        workers.sort_unstable();
        workers.hash(to);
        self.late.hash(to);
        self.left.hash(to);
        self.seen.hash(to);
    }
}

impl ModelState {
    /// The nonce if somebody may still send it.
    fn open_nonce(&self, nonce: Nonce) -> Option<Nonce> {
        let in_doubt = |worker: &Worker| matches!(worker, Worker::Doubt { nonce: of, .. } if *of == nonce);
        let open = self.workers.iter().any(in_doubt) || self.late.iter().any(|late| late.nonce == nonce.0);
        open.then_some(nonce)
    }

    fn fingerprint(&self, worker: Worker) -> u64 {
        let mut hasher = DefaultHasher::new();
        match worker {
            Worker::Running { event, token, nonce, until, effect } => {
                let live = (until > self.now).then_some(until);
                (event, token, self.open_nonce(nonce), live, effect).hash(&mut hasher);
            }
            other => other.hash(&mut hasher),
        }
        hasher.finish()
    }

    fn essence(&self, row: &Row) -> impl Hash + use<> {
        let order = row.order.as_ref().map(|(_, seq)| *seq);
        let waits = matches!(row.state, State::Leased | State::Retry).then(|| row.at.as_micros());
        let flags = (row.tracked, row.alone, row.suspect, row.unordered, row.body.is_some());
        (row.state, row.token, self.open_nonce(row.nonce), row.attempts, waits, order, flags)
    }
}
