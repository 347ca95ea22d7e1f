//! Finds events that an object store shows late.
//!
//! In an object store positions are times. If the clocks of writers and of the store differ by more
//! than `skew`, an event can appear at a position that the relay has already passed. So the relay
//! reads again, a few events per batch, what lies up to `lookback` behind it, and publishes what it
//! has not published. It recognizes published events by their positions: `dedup_max` of them in
//! memory, `dedup_checkpoint_max` in the checkpoint. If the relay meets an event before it has found
//! the late predecessor, it reads the predecessor from the aggregate, whose seqs have no gaps.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use tokio::time::Instant;

use super::RelaySettings;
use super::behind::{Waiters, aggregate_of};
use crate::error::Result;
use crate::journal::{AggregateOf, Checkpoint, Journal, Position, ReadBatch, Stored};

/// A pass over the lookback begins at most this often per lookback.
const PASSES: u32 = 60;
/// How many predecessors are read at a time.
const BACK: u64 = 8;

/// What the relay has published lately, and where it looks again.
#[derive(Debug)]
pub(super) struct Lookback {
    /// The relay does not look at events up to here. A later event up to the relay's position is on
    /// the bus only if it is known.
    floor: Position,
    /// Positions of published events.
    known: BTreeSet<Position>,
    /// The last published seq of recently published aggregates.
    seqs: HashMap<AggregateOf, u64>,
    /// Where the current pass continues; `None` between two passes.
    cursor: Option<Position>,
    /// Where it was before the last read.
    looked_from: Option<Position>,
    next_pass: Instant,
    settings: Arc<RelaySettings>,
}

impl Lookback {
    /// Starts with the published events of a checkpoint. `None` if the settings switch it off.
    pub(super) fn new(settings: &Arc<RelaySettings>, checkpoint: &Checkpoint) -> Option<Self> {
        if settings.lookback.is_zero() || settings.lookback_max == 0 || settings.dedup_max == 0 {
            return None;
        }
        let mut recent = checkpoint.recent.iter().filter_map(|text| text.parse().ok());
        let floor: Position = recent.next().unwrap_or_else(|| checkpoint.position.clone());
        let mut lookback = Lookback {
            known: recent.collect(),
            seqs: HashMap::new(),
            // While no relay ran, events may have appeared late whose time is long past by now.
            cursor: Some(back(checkpoint.position.number(), settings)),
            looked_from: None,
            next_pass: Instant::now() + settings.lookback / PASSES,
            settings: Arc::clone(settings),
            floor,
        };
        lookback.forget_oldest();
        Some(lookback)
    }

    /// Notes that an event is on the bus.
    pub(super) fn published(&mut self, stored: &Stored) {
        if stored.position > self.floor {
            self.known.insert(stored.position.clone());
            self.forget_oldest();
        }
        if self.seqs.len() > 2 * self.settings.dedup_max {
            self.seqs.clear(); // costs a read for each aggregate that comes again
        }
        if let Some(of) = aggregate_of(stored) {
            let last = self.seqs.entry(of).or_default();
            *last = stored.seq.max(*last);
        }
    }

    fn forget_oldest(&mut self) {
        while self.known.len() > self.settings.dedup_max
            && let Some(oldest) = self.known.pop_first()
        {
            self.floor = oldest;
        }
    }

    /// Whether an event is known to be on the bus.
    pub(super) fn knows(&self, stored: &Stored) -> bool {
        self.known.contains(&stored.position)
    }

    /// For the checkpoint: the position up to which not to look, and the known positions after it.
    pub(super) fn recent(&self) -> Vec<String> {
        let max = self.settings.dedup_checkpoint_max;
        let last = self.known.iter().skip((self.known.len() + 1).saturating_sub(max));
        let floor = self.known.iter().rev().nth(max.saturating_sub(1)).unwrap_or(&self.floor);
        std::iter::once(floor).chain(last).take(max).map(Position::to_string).collect()
    }

    /// Completes the batch after `position`: adds late events, and predecessors that the relay has
    /// missed.
    pub(super) async fn complete(
        &mut self,
        journal: &dyn Journal,
        waiters: &Waiters,
        position: &Position,
        mut batch: ReadBatch,
    ) -> Result<ReadBatch> {
        let mut events = self.look(journal, position).await?;
        // What waits is not late; kept, it would fill every batch.
        events.retain(|stored| !waiters.holds_back(stored) && !waiters.is_past(stored));
        events.append(&mut batch.events);
        let mut heads: HashMap<AggregateOf, u64> = HashMap::new();
        for stored in events {
            let Some(of) = aggregate_of(&stored) else { continue };
            if !waiters.holds_back(&stored) && !self.knows(&stored) {
                let head = heads.get(&of).or_else(|| self.seqs.get(&of)).copied();
                if self.may_lack(&stored, head) {
                    batch.events.extend(self.missing(journal, &of, head.unwrap_or_default(), &stored).await?);
                }
            }
            heads.insert(of, stored.seq);
            batch.events.push(stored);
        }
        Ok(batch)
    }

    /// Reads the last part again: what was found there was not published.
    pub(super) fn look_again(&mut self) {
        self.cursor = self.looked_from.take().or(self.cursor.take());
    }

    /// Some events up to `position` that are not on the bus.
    async fn look(&mut self, journal: &dyn Journal, position: &Position) -> Result<Vec<Stored>> {
        self.looked_from = None;
        let from = match &self.cursor {
            Some(cursor) => cursor.clone(),
            None if Instant::now() < self.next_pass => return Ok(Vec::new()),
            None => {
                let now = journal.now().await?.as_micros() / 1000;
                self.next_pass = Instant::now() + self.settings.lookback / PASSES;
                back(u64::try_from(now).unwrap_or_default(), &self.settings)
            }
        };
        let from = from.max(self.floor.clone());
        if from >= *position {
            self.cursor = None;
            return Ok(Vec::new());
        }
        let looked = journal.read(&from, self.settings.lookback_max).await?;
        self.cursor = (looked.more && looked.next < *position).then_some(looked.next);
        self.looked_from = Some(from);
        let is_late = |stored: &Stored| stored.position <= *position && !self.is_out(stored);
        Ok(looked.events.into_iter().filter(is_late).collect())
    }

    /// Whether an event the relay has passed is on the bus, or too old to look at.
    fn is_out(&self, stored: &Stored) -> bool {
        stored.position <= self.floor || self.knows(stored)
    }

    /// Whether predecessors of an event may be unpublished, if the last published seq is `head`.
    fn may_lack(&self, stored: &Stored, head: Option<u64>) -> bool {
        head.unwrap_or_default() + 1 < stored.seq
            && stored.previous.as_ref().is_some_and(|previous| previous.number() >= self.floor.number())
    }

    /// The unpublished events of an aggregate after seq `head` and before an event, in order.
    async fn missing(
        &self,
        journal: &dyn Journal,
        of: &AggregateOf,
        head: u64,
        stored: &Stored,
    ) -> Result<Vec<Stored>> {
        let (mut before, mut missing) = (stored.seq, Vec::new());
        while before > head + 1 {
            let from = before.saturating_sub(BACK).max(head + 1);
            let mut page = between(journal, of, from, before).await?;
            let out = page.iter().rposition(|stored| self.is_out(stored));
            let unpublished = page.split_off(out.map_or(0, |place| place + 1));
            // If none is left, they were swept, and a sweep removes only what a relay has passed.
            let is_all = out.is_some() || unpublished.is_empty();
            missing.splice(0..0, unpublished);
            before = if is_all { 0 } else { from };
        }
        Ok(missing)
    }
}

/// The position that lies the lookback before this time.
fn back(ms: u64, settings: &RelaySettings) -> Position {
    Position::of(ms.saturating_sub(u64::try_from(settings.lookback.as_millis()).unwrap_or(u64::MAX)))
}

/// The events of an aggregate with seqs from `from` to before `to`.
async fn between(journal: &dyn Journal, of: &AggregateOf, from: u64, to: u64) -> Result<Vec<Stored>> {
    let (mut from, mut found) = (from, Vec::new());
    while from < to {
        let limit = usize::try_from(to - from).unwrap_or(usize::MAX);
        let page = journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, limit).await?;
        from = page.events.last().filter(|_| page.more).map_or(to, |last| last.seq + 1);
        found.extend(page.events.into_iter().filter(|stored| stored.seq < to));
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Aggregate, Event, EventId, RelayName, Time, Topic};

    fn settings(dedup_max: usize, dedup_checkpoint_max: usize) -> Arc<RelaySettings> {
        let mut settings = RelaySettings::new(RelayName::new("r").unwrap(), Topic::new("t").unwrap());
        (settings.dedup_max, settings.dedup_checkpoint_max) = (dedup_max, dedup_checkpoint_max);
        Arc::new(settings)
    }

    fn stored(ms: u64) -> Stored {
        let event = Event::new(EventId::new("e").unwrap());
        let fingerprint = event.fingerprint();
        Stored::new(Position::of(ms), Time::default(), fingerprint, event, Aggregate::new("a").unwrap(), ms)
    }

    fn after(recent: Vec<String>, position: u64) -> Checkpoint {
        let mut checkpoint = Checkpoint::start("j");
        (checkpoint.recent, checkpoint.position) = (recent, Position::of(position));
        checkpoint
    }

    #[test]
    fn the_oldest_is_forgotten_first_and_the_rest_survives_a_restart() {
        let mut lookback = Lookback::new(&settings(3, 2), &after(Vec::new(), 0)).unwrap();
        assert_eq!(lookback.recent(), ["0"], "everything after the start is known");
        for ms in [1, 3, 4, 5] {
            lookback.published(&stored(ms));
        }
        assert!(lookback.is_out(&stored(1)) && !lookback.is_out(&stored(2)) && lookback.knows(&stored(3)));
        assert_eq!(lookback.recent(), ["4", "5"]);
        let again = Lookback::new(&settings(3, 2), &after(lookback.recent(), 5)).unwrap();
        assert!(again.is_out(&stored(4)) && again.knows(&stored(5)) && !again.is_out(&stored(6)));
    }

    #[test]
    fn a_late_event_is_known_like_any_other() {
        let mut lookback = Lookback::new(&settings(10, 10), &after(Vec::new(), 0)).unwrap();
        for ms in [1, 3, 2] {
            lookback.published(&stored(ms));
        }
        assert_eq!(lookback.recent(), ["0", "1", "2", "3"]);
    }

    #[test]
    fn without_positions_in_the_checkpoint_nothing_before_it_is_looked_at() {
        for (recent, kept) in [(Vec::new(), 10), (vec!["3:/a".to_owned()], 10), (Vec::new(), 0)] {
            let lookback = Lookback::new(&settings(10, kept), &after(recent, 7)).unwrap();
            assert!(lookback.is_out(&stored(7)) && !lookback.is_out(&stored(8)));
        }
        assert!(Lookback::new(&settings(0, 10), &after(Vec::new(), 7)).is_none());
        let mut off = (*settings(10, 10)).clone();
        off.lookback = Duration::ZERO;
        assert!(Lookback::new(&Arc::new(off), &after(Vec::new(), 7)).is_none());
    }
}
