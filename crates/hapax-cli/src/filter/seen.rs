//! Tracks which ids were seen: in memory, within a window, or in a ledger.
//!
//! Ids are compared exactly, never by a hash alone: a collision would drop an event. The hash only
//! locates the entry, and is seeded anew for each run, because ids may come from untrusted sources.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use foldhash::fast::RandomState;
use hapax::ledger::{Claim, Identity, Ledger, Mode, Nonce, Outcome, Week};
use hapax::{EventId, Result, Scope, Time};

type IdSet = HashSet<EventId, RandomState>;

/// How often to retry a busy ledger.
const ATTEMPTS_MAX: u32 = 20;

/// Distinguishes first occurrences from repeats.
///
/// `admit` says of each event whether it is a first occurrence, taking earlier events of the batch
/// into account; the caller writes the lines; `record` makes the result permanent. In that order,
/// so that an unwritten line is never remembered.
pub trait Seen {
    /// Checks that the id can be remembered at all.
    fn check(&self, _id: &EventId) -> Result<()> {
        Ok(())
    }

    /// Says which are first occurrences.
    fn admit(&mut self, batch: &[(&EventId, Option<Time>)]) -> Result<Vec<bool>>;

    /// Makes the result of the last `admit` permanent.
    fn record(&mut self) -> Result<Recorded> {
        Ok(Recorded::default())
    }

    /// How many events were older than the window and passed without a check.
    fn late(&self) -> u64 {
        0
    }
}

/// The result of recording.
#[derive(Debug, Default)]
pub struct Recorded {
    /// Newly remembered.
    pub ids: u64,
    /// Recorded by another process after our lookup: those lines were written twice.
    pub raced: u64,
    /// Not remembered, with the first reason.
    pub refused: Option<(u64, String)>,
}

/// Remembers every id of this run.
#[derive(Debug, Default)]
pub struct All(IdSet);

impl Seen for All {
    fn admit(&mut self, batch: &[(&EventId, Option<Time>)]) -> Result<Vec<bool>> {
        Ok(batch.iter().map(|(id, _)| self.0.insert((*id).clone())).collect())
    }
}

/// Remembers the last `max` distinct ids.
#[derive(Debug)]
pub struct LastCount {
    ids: IdSet,
    order: VecDeque<EventId>,
    max: usize,
}

impl LastCount {
    /// Remembers `max` ids.
    pub fn new(max: usize) -> Self {
        LastCount { ids: IdSet::default(), order: VecDeque::new(), max }
    }
}

impl Seen for LastCount {
    fn admit(&mut self, batch: &[(&EventId, Option<Time>)]) -> Result<Vec<bool>> {
        let mut first = |id: &EventId| {
            if !self.ids.insert(id.clone()) {
                return false;
            }
            self.order.push_back(id.clone());
            if self.order.len() > self.max
                && let Some(oldest) = self.order.pop_front()
            {
                self.ids.remove(&oldest);
            }
            true
        };
        Ok(batch.iter().map(|(id, _)| first(id)).collect())
    }
}

/// Remembers ids whose first occurrence is at most `window` older than the newest event.
#[derive(Debug)]
pub struct LastTime {
    ids: IdSet,
    order: BinaryHeap<Reverse<(Time, EventId)>>,
    window: Duration,
    newest: Option<Time>,
    late: u64,
}

impl LastTime {
    /// Remembers ids for this long.
    pub fn new(window: Duration) -> Self {
        LastTime { ids: IdSet::default(), order: BinaryHeap::new(), window, newest: None, late: 0 }
    }

    fn first(&mut self, id: &EventId, time: Time) -> bool {
        let newest = self.newest.map_or(time, |newest| newest.max(time));
        self.newest = Some(newest);
        let oldest = newest.minus(self.window);
        while self.order.peek().is_some_and(|Reverse((time, _))| *time < oldest) {
            if let Some(Reverse((_, id))) = self.order.pop() {
                self.ids.remove(&id);
            }
        }
        if self.ids.contains(id) {
            return false;
        }
        if time < oldest {
            self.late += 1; // it may have been seen and forgotten; there is no way to know
            return true;
        }
        self.ids.insert(id.clone());
        self.order.push(Reverse((time, id.clone())));
        true
    }
}

impl Seen for LastTime {
    fn admit(&mut self, batch: &[(&EventId, Option<Time>)]) -> Result<Vec<bool>> {
        Ok(batch.iter().map(|(id, time)| self.first(id, time.unwrap_or_default())).collect())
    }

    fn late(&self) -> u64 {
        self.late
    }
}

/// Remembers ids in a ledger, across runs.
pub struct InLedger<'r> {
    runtime: &'r tokio::runtime::Runtime,
    ledger: Arc<dyn Ledger>,
    scope: Scope,
    now: Time,
    pending: Vec<Identity>,
    /// Set if the ledger is only read: finds repeats within the run.
    looked: Option<IdSet>,
}

impl<'r> InLedger<'r> {
    /// Remembers ids under a scope of a ledger; `look_only` leaves the ledger unchanged.
    pub fn new(
        runtime: &'r tokio::runtime::Runtime,
        ledger: Arc<dyn Ledger>,
        scope: Scope,
        look_only: bool,
    ) -> Result<Self> {
        let now = runtime.block_on(ledger.now())?;
        let looked = look_only.then(IdSet::default);
        Ok(InLedger { runtime, ledger, scope, now, pending: Vec::new(), looked })
    }

    /// Retries while the error is retryable. Claims keep their nonces, so a retry does not claim
    /// twice.
    fn patiently<T>(&self, ask: &impl AsyncFn(&dyn Ledger) -> Result<T>) -> Result<T> {
        self.runtime.block_on(async {
            for attempt in 1.. {
                match ask(&*self.ledger).await {
                    Err(error) if error.is_retryable() && attempt < ATTEMPTS_MAX => {
                        tokio::time::sleep(Duration::from_millis(25 * u64::from(attempt))).await;
                    }
                    ended => return ended,
                }
            }
            unreachable!("the loop ends by returning")
        })
    }
}

impl Seen for InLedger<'_> {
    /// The ledger refuses weeks too far ahead; detect that before the line is written.
    fn check(&self, id: &EventId) -> Result<()> {
        match id.v7_millis() {
            Some(ms) => {
                Week::of(Time::from_millis(ms)).may_be_made(self.now, self.ledger.settings().weeks_ahead)
            }
            None => Ok(()),
        }
    }

    fn admit(&mut self, batch: &[(&EventId, Option<Time>)]) -> Result<Vec<bool>> {
        let mut here: HashSet<&EventId, RandomState> = HashSet::default();
        let mut first: Vec<bool> = Vec::with_capacity(batch.len());
        let mut asked = Vec::new();
        for (id, _) in batch {
            let new = here.insert(id) && self.looked.as_ref().is_none_or(|looked| !looked.contains(*id));
            if new {
                asked.push(Identity::new(self.scope.clone(), (*id).clone()));
            }
            first.push(new);
        }
        let known = self.patiently(&async |ledger| ledger.known(&asked).await)?;
        for (first, known) in first.iter_mut().filter(|first| **first).zip(&known) {
            *first = !known;
        }
        let new = asked.into_iter().zip(known).filter(|(_, known)| !known).map(|(identity, _)| identity);
        match &mut self.looked {
            Some(looked) => looked.extend(new.map(|identity| identity.id)),
            None => self.pending = new.collect(),
        }
        Ok(first)
    }

    fn record(&mut self) -> Result<Recorded> {
        if self.pending.is_empty() {
            return Ok(Recorded::default());
        }
        self.pending.sort_unstable(); // neighbours in key order share pages
        // One nonce for the whole batch: the identities distinguish the claims.
        let nonce = Nonce::random();
        let claim = |identity| Claim { nonce, ..done(identity) };
        let claims: Vec<Claim> = self.pending.drain(..).map(claim).collect();
        let outcomes = self.patiently(&async |ledger| ledger.claim(&claims).await)?;
        let mut recorded = Recorded::default();
        for outcome in outcomes {
            let reason = match outcome {
                Ok(Outcome::First(_)) => {
                    recorded.ids += 1;
                    continue;
                }
                Ok(Outcome::Duplicate(_)) => {
                    recorded.raced += 1;
                    continue;
                }
                Ok(Outcome::TooOld { week }) => format!("the state of the week of {week} was dropped"),
                Ok(_) => "another process holds the event under this scope".to_owned(),
                Err(error) => error.to_string(),
            };
            let (count, _) = recorded.refused.get_or_insert((0, reason));
            *count += 1;
        }
        Ok(recorded)
    }
}

/// A claim without a nonce of its own, because drawing one costs a system call.
fn done(identity: Identity) -> Claim {
    Claim {
        identity,
        time: None,
        fingerprint: None,
        order: None,
        origin: None,
        metadata: None,
        mode: Mode::Done,
        reason: None,
        body: None,
        hold: false,
        nonce: Nonce(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hapax::backend::memory::MemoryLedger;

    fn id(text: &str) -> EventId {
        EventId::new(text).unwrap()
    }

    fn firsts(seen: &mut dyn Seen, texts: &[&str]) -> String {
        let ids: Vec<_> = texts.iter().map(|text| id(text)).collect();
        let batch: Vec<_> = ids.iter().map(|id| (id, None)).collect();
        let firsts = seen.admit(&batch).unwrap();
        firsts.iter().map(|first| if *first { '1' } else { '-' }).collect()
    }

    #[test]
    fn counts() {
        assert_eq!(firsts(&mut All::default(), &["a", "b", "a", "b", "c"]), "11--1");
        // Two are remembered: a is forgotten when c arrives, and a repeat does not refresh.
        assert_eq!(firsts(&mut LastCount::new(2), &["a", "b", "a", "c", "a", "c"]), "11-11-");
    }

    #[test]
    fn times() {
        let mut seen = LastTime::new(Duration::from_secs(10));
        let mut first = |text: &str, s: i64| seen.first(&id(text), Time::from_millis(s * 1000));
        assert!(first("a", 100));
        assert!(!first("a", 110));
        assert!(first("b", 111)); // a (100) is now older than 101
        assert!(first("a", 105)); // forgotten, then remembered again at 105
        assert!(!first("a", 106));
        assert!(first("late", 50));
        assert!(first("late", 50)); // too old to remember: passes, and is counted
        assert_eq!(seen.late(), 2);
    }

    #[test]
    fn a_ledger_remembers_only_what_was_recorded() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
        let open =
            |look| InLedger::new(&runtime, Arc::clone(&ledger), Scope::new("filter").unwrap(), look).unwrap();
        let mut seen = open(false);
        assert_eq!(firsts(&mut seen, &["a", "b", "a"]), "11-");
        // Not recorded (the pipe broke): the next run sees them as first occurrences.
        let mut seen = open(false);
        assert_eq!(firsts(&mut seen, &["a", "b", "a"]), "11-");
        assert_eq!(seen.record().unwrap().ids, 2);
        assert_eq!(firsts(&mut seen, &["a", "c"]), "-1");
        // Reading only: finds repeats within the run and the state, and records nothing.
        let mut look = open(true);
        assert_eq!(firsts(&mut look, &["a", "d", "d"]), "-1-");
        assert_eq!(firsts(&mut look, &["d"]), "-");
        assert_eq!(look.record().unwrap().ids, 0);
        // Another filter was faster.
        let mut one = open(false);
        let mut two = open(false);
        assert_eq!(firsts(&mut one, &["e"]), "1");
        assert_eq!(firsts(&mut two, &["e"]), "1");
        assert_eq!(one.record().unwrap().ids, 1);
        assert_eq!(two.record().unwrap().raced, 1);
        assert!(one.check(&id("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10")).is_ok());
        assert!(one.check(&id("0372f1c8-5b7e-7c3a-9f51-2f6f1f3b7c10")).is_err());
    }
}
