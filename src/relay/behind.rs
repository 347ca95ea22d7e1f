//! Aggregates with an event that could not be published: they wait while the others continue.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::answers::{Answered, Awaited};
use super::leading::Leading;
use super::{End, RelaySettings};
use crate::error::Result;
use crate::journal::{AggregateOf, Behind, Checkpoint, Position, Stored};

/// After more failed attempts than this, an aggregate is tried with one event at a time.
const FIRST_ATTEMPTS: u32 = 1;

/// A waiting aggregate.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) behind: Behind,
    /// When to try it again. None if it is poison or awaits an answer.
    due: Option<Instant>,
    /// When it was sent to the bus, if the bus has not answered yet.
    asked: Option<Instant>,
    /// Whether the relay has passed more of its events than the bus has received.
    more: bool,
}

/// All waiting aggregates.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    all: BTreeMap<AggregateOf, Waiting>,
}

/// The aggregate of an event. Every stored event has one.
pub(super) fn aggregate_of(stored: &Stored) -> Option<AggregateOf> {
    let aggregate = stored.event.aggregate.clone()?;
    Some(AggregateOf { tenant: stored.event.tenant.clone(), aggregate })
}

impl Waiters {
    /// The waiting aggregates of a checkpoint. All are due at once, because whatever blocked them
    /// may be gone.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let now = Instant::now();
        let waiting = |behind: &Behind| {
            let due = (!behind.poison).then_some(now);
            Ok((behind.of()?, Waiting { behind: behind.clone(), due, asked: None, more: true }))
        };
        Ok(Waiters { all: checkpoint.behind.iter().map(waiting).collect::<Result<_>>()? })
    }

    /// Whether an event must wait behind its aggregate; if so, notes that there is more to catch
    /// up.
    pub(super) fn hold_back(&mut self, stored: &Stored) -> bool {
        let holds = self.holds_back(stored);
        if holds && let Some(waiting) = aggregate_of(stored).and_then(|of| self.all.get_mut(&of)) {
            waiting.more = true;
        }
        holds
    }

    /// Whether an event precedes the one its aggregate waits for, so that it is on the bus or was
    /// skipped.
    pub(super) fn is_past(&self, stored: &Stored) -> bool {
        !self.all.is_empty()
            && aggregate_of(stored)
                .and_then(|of| self.all.get(&of))
                .is_some_and(|waiting| stored.seq < waiting.behind.next)
    }

    pub(super) fn holds_back(&self, stored: &Stored) -> bool {
        !self.all.is_empty()
            && aggregate_of(stored)
                .and_then(|of| self.all.get(&of))
                .is_some_and(|waiting| stored.seq >= waiting.behind.next)
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Whether everything of the waiting aggregates up to a position is on the bus: each waits for
    /// an event behind it.
    pub(super) fn are_beyond(&self, position: &Position) -> bool {
        // A waiting aggregate has the position of the event it waits for, or of the last one that
        // was acknowledged before it.
        self.all.values().all(|waiting| waiting.behind.position > *position)
    }

    /// How many are retried automatically.
    pub(super) fn tried(&self) -> usize {
        self.len() - self.parked()
    }

    pub(super) fn parked(&self) -> usize {
        self.all.values().filter(|waiting| waiting.behind.poison).count()
    }

    pub(super) fn add(&mut self, of: AggregateOf, behind: Behind, settings: &RelaySettings) {
        let due = (!behind.poison).then(|| Instant::now() + settings.backoff(behind.attempts));
        self.all.insert(of, Waiting { behind, due, asked: None, more: true });
    }

    /// Adds an aggregate that was sent to the bus at `since`. It is not tried again until the bus
    /// answers.
    pub(super) fn add_asked(&mut self, of: AggregateOf, behind: Behind, since: Instant, more: bool) {
        self.all.insert(of, Waiting { behind, due: None, asked: Some(since), more });
    }

    /// Notes that an aggregate was sent to the bus. `more`: some of its events were not.
    pub(super) fn asked(&mut self, of: &AggregateOf, more: bool) {
        if let Some(waiting) = self.all.get_mut(of) {
            (waiting.due, waiting.asked, waiting.more) = (None, Some(Instant::now()), more);
        }
    }

    /// How many await an answer.
    pub(super) fn unanswered(&self) -> usize {
        self.all.values().filter(|waiting| waiting.asked.is_some()).count()
    }

    /// Whether any has awaited an answer for this long.
    pub(super) fn unanswered_for(&self, time: Duration) -> bool {
        self.all.values().any(|waiting| waiting.asked.is_some_and(|since| since.elapsed() >= time))
    }

    /// Notes that an aggregate failed again, perhaps further on; `behind` has the event and the
    /// reason. Keeps the time at which it fell behind.
    pub(super) fn stuck(&mut self, of: AggregateOf, mut behind: Behind, settings: &RelaySettings) {
        if let Some(before) = self.all.get(&of) {
            let same = before.behind.next == behind.next;
            behind.attempts = if same { before.behind.attempts.saturating_add(1) } else { 1 };
            behind.since = before.behind.since;
        }
        self.add(of, behind, settings);
    }

    pub(super) fn remove(&mut self, of: &AggregateOf) {
        self.all.remove(of);
    }

    /// Notes progress of an aggregate: it has caught up and is removed, or continues at once.
    pub(super) fn moved(&mut self, of: &AggregateOf, last: &Stored) {
        if let Some(waiting) = self.all.get_mut(of) {
            if !waiting.more {
                self.all.remove(of);
                return;
            }
            waiting.behind.next = last.seq + 1;
            waiting.behind.attempts = FIRST_ATTEMPTS;
            waiting.behind.position = last.position.clone();
            waiting.behind.appended = last.at.as_micros(); // approximate: the next event was appended later
            (waiting.due, waiting.asked) = (Some(Instant::now()), None);
        }
    }

    /// The aggregate that has been due the longest, the seq to continue from, and how many events
    /// may be read. None if no aggregate is due or there is no room.
    fn due(&self, awaited: &Awaited, batch_max: usize) -> Option<(AggregateOf, u64, usize)> {
        let now = Instant::now();
        let room = [awaited.room(batch_max, false), awaited.room(batch_max, true)];
        let room = |waiting: &Waiting| room[usize::from(waiting.behind.attempts > FIRST_ATTEMPTS)];
        let due = self.all.iter().filter(|(_, waiting)| waiting.due.is_some_and(|at| at <= now));
        let (of, waiting) =
            due.filter(|(_, waiting)| room(waiting) > 0).min_by_key(|(_, waiting)| waiting.due)?;
        Some((of.clone(), waiting.behind.next, room(waiting)))
    }

    /// When the next aggregate with room is due. The others wait for an answer.
    pub(super) fn next_at(&self, awaited: &Awaited, batch_max: usize) -> Option<Instant> {
        let room = [awaited.room(batch_max, false), awaited.room(batch_max, true)];
        let has_room = |waiting: &&Waiting| room[usize::from(waiting.behind.attempts > FIRST_ATTEMPTS)] > 0;
        self.all.values().filter(has_room).filter_map(|waiting| waiting.due).min()
    }

    /// Postpones an aggregate whose next event the relay has not passed yet.
    fn not_yet(&mut self, of: &AggregateOf, pause: Duration) {
        if let Some(waiting) = self.all.get_mut(of) {
            waiting.due = Some(Instant::now() + pause);
        }
    }

    fn position(&self, of: &AggregateOf) -> Option<&Position> {
        self.all.get(of).map(|waiting| &waiting.behind.position)
    }

    /// In the form that checkpoints store.
    pub(super) fn list(&self) -> Vec<Behind> {
        self.all.values().map(|waiting| waiting.behind.clone()).collect()
    }
}

impl Leading {
    /// Continues with the aggregates that have been due the longest: sends the events of each, from
    /// the one it is stuck at up to the checkpoint, in order, without waiting for the answers.
    pub(super) async fn catch_up(&mut self) -> Result<(), End> {
        self.settle_answered().await?;
        if self.attempts > 0 {
            return Ok(()); // the bus takes nothing
        }
        let mut caught_up = false;
        while let Some((of, from, room)) = self.waiters.due(&self.awaited, self.settings.batch_max) {
            let (events, last) = self.read_behind(&of, from, room).await?;
            if events.is_empty() {
                // An operator's decision may have moved it ahead of the relay. Keep it until the
                // relay has passed that position.
                if self.waiters.position(&of).is_some_and(|at| *at > self.position) {
                    self.waiters.not_yet(&of, self.settings.poll);
                } else {
                    self.waiters.remove(&of);
                    caught_up = true;
                }
                continue;
            }
            let count = events.len();
            let (unanswered, begun) = self.publisher.begin(&self.leadership, events).await?;
            self.waiters.asked(&of, begun < count || !last);
            self.awaited.add(unanswered, true);
        }
        if caught_up {
            self.save_behind().await?;
        }
        Ok(())
    }

    /// Reads a page of an aggregate up to the checkpoint, and whether that is all of it.
    async fn read_behind(&self, of: &AggregateOf, from: u64, max: usize) -> Result<(Vec<Stored>, bool), End> {
        let journal = &self.journal;
        let read = || journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, max);
        let page = self.insist("reading an aggregate", read).await?;
        let (mut events, more) = (page.events, page.more);
        let read = events.len();
        // The relay will read events further on with the rest.
        let passed = events.iter().take_while(|stored| stored.position <= self.position).count();
        events.truncate(passed);
        let last = events.len() < read || !more;
        Ok((events, last))
    }

    /// Processes the answers that have arrived.
    pub(super) async fn settle_answered(&mut self) -> Result<(), End> {
        let mut answered = self.awaited.take_answered()?;
        answered.extend(self.last_answer.take());
        if answered.is_empty() {
            return Ok(());
        }
        for Answered { of, acknowledged, failed, began } in answered {
            self.note(acknowledged.iter(), began);
            if let Some((stored, error)) = failed {
                let behind = self.left_behind(&stored, &error, true);
                self.waiters.stuck(of, behind, &self.settings);
            } else if let Some(last) = acknowledged.last() {
                self.waiters.moved(&of, last);
            }
        }
        self.save_behind().await
    }

    async fn save_behind(&mut self) -> Result<(), End> {
        let position = self.position.clone();
        self.save(&position).await
    }

    /// Before leadership ends, waits for outstanding answers.
    pub(super) async fn finish(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + self.settings.flush_timeout;
        while self.waiters.unanswered() > 0 {
            match tokio::time::timeout_at(deadline, self.awaited.next()).await {
                Ok(answered) => self.last_answer = answered?,
                Err(_) => break,
            }
            self.settle_answered().await?;
        }
        Ok(())
    }
}
