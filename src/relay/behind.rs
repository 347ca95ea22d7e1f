//! Aggregates of which something could not be published: they wait, the others go on.

use std::collections::BTreeMap;
use std::time::Duration;

use tokio::time::Instant;

use super::answers::{Answered, Awaited};
use super::turn::Leading;
use super::{End, RelaySettings};
use crate::error::Result;
use crate::journal::{AggregateOf, Behind, Checkpoint, Position, Stored};

/// One that has failed more often is tried with one event.
const FIRST_TRIES: u32 = 1;

/// One that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) behind: Behind,
    /// When it is tried again; never, if it is poison, and not before it is answered.
    due: Option<Instant>,
    /// Since when it is with the bus, which has not answered yet.
    asked: Option<Instant>,
    /// Whether more of it has passed by than what is with the bus.
    more: bool,
}

/// All that wait.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    all: BTreeMap<AggregateOf, Waiting>,
}

/// Which aggregate an event belongs to. Every stored event has one.
pub(super) fn aggregate_of(stored: &Stored) -> Option<AggregateOf> {
    let aggregate = stored.event.aggregate.clone()?;
    Some(AggregateOf { tenant: stored.event.tenant.clone(), aggregate })
}

impl Waiters {
    /// Those of a checkpoint; all are due at once, since whatever was in the way may be gone.
    pub(super) fn of(checkpoint: &Checkpoint) -> Result<Self> {
        let now = Instant::now();
        let waiting = |behind: &Behind| {
            let due = (!behind.poison).then_some(now);
            Ok((behind.of()?, Waiting { behind: behind.clone(), due, asked: None, more: true }))
        };
        Ok(Waiters { all: checkpoint.behind.iter().map(waiting).collect::<Result<_>>()? })
    }

    /// Whether an event that comes by must wait; that it came is remembered.
    pub(super) fn hold_back(&mut self, stored: &Stored) -> bool {
        let holds = self.holds_back(stored);
        if holds && let Some(waiting) = aggregate_of(stored).and_then(|of| self.all.get_mut(&of)) {
            waiting.more = true;
        }
        holds
    }

    /// Whether an event lies before what its aggregate waits for: it is on the bus, or was given up.
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

    /// Those that are tried again by themselves.
    pub(super) fn tried(&self) -> usize {
        self.len() - self.parked()
    }

    pub(super) fn parked(&self) -> usize {
        self.all.values().filter(|waiting| waiting.behind.poison).count()
    }

    pub(super) fn add(&mut self, of: AggregateOf, behind: Behind, settings: &RelaySettings) {
        let due = (!behind.poison).then(|| Instant::now() + settings.backoff(behind.tries));
        self.all.insert(of, Waiting { behind, due, asked: None, more: true });
    }

    /// It is with the bus since then, and is not tried again before that has answered.
    pub(super) fn add_asked(&mut self, of: AggregateOf, behind: Behind, since: Instant, more: bool) {
        self.all.insert(of, Waiting { behind, due: None, asked: Some(since), more });
    }

    /// It was handed to the bus; `more`: not all of it.
    pub(super) fn asked(&mut self, of: &AggregateOf, more: bool) {
        if let Some(waiting) = self.all.get_mut(of) {
            (waiting.due, waiting.asked, waiting.more) = (None, Some(Instant::now()), more);
        }
    }

    /// How many are with the bus.
    pub(super) fn unanswered(&self) -> usize {
        self.all.values().filter(|waiting| waiting.asked.is_some()).count()
    }

    /// Whether one has been with the bus for so long.
    pub(super) fn unanswered_for(&self, time: Duration) -> bool {
        self.all.values().any(|waiting| waiting.asked.is_some_and(|since| since.elapsed() >= time))
    }

    /// It has moved on, but not to the end: what failed and why is in `behind`. It keeps the time since which it is behind.
    pub(super) fn stuck(&mut self, of: AggregateOf, mut behind: Behind, settings: &RelaySettings) {
        if let Some(before) = self.all.get(&of) {
            let same = before.behind.next == behind.next;
            behind.tries = if same { before.behind.tries.saturating_add(1) } else { 1 };
            behind.since = before.behind.since;
        }
        self.add(of, behind, settings);
    }

    pub(super) fn remove(&mut self, of: &AggregateOf) {
        self.all.remove(of);
    }

    /// It has moved on: it has caught up, or goes on at once.
    pub(super) fn moved(&mut self, of: &AggregateOf, last: &Stored) {
        if let Some(waiting) = self.all.get_mut(of) {
            if !waiting.more {
                self.all.remove(of);
                return;
            }
            waiting.behind.next = last.seq + 1;
            waiting.behind.tries = FIRST_TRIES;
            waiting.behind.position = last.position.clone();
            waiting.behind.appended = last.at.as_micros(); // about: what follows it came later
            (waiting.due, waiting.asked) = (Some(Instant::now()), None);
        }
    }

    /// The one that has been due the longest, with the seq to go on from and how much of it may be read; none: nobody is, or there is no room.
    fn due(&self, awaited: &Awaited, batch_max: usize) -> Option<(AggregateOf, u64, usize)> {
        let now = Instant::now();
        let room = [awaited.room(batch_max, false), awaited.room(batch_max, true)];
        let room = |waiting: &Waiting| room[usize::from(waiting.behind.tries > FIRST_TRIES)];
        let due = self.all.iter().filter(|(_, waiting)| waiting.due.is_some_and(|at| at <= now));
        let (of, waiting) =
            due.filter(|(_, waiting)| room(waiting) > 0).min_by_key(|(_, waiting)| waiting.due)?;
        Some((of.clone(), waiting.behind.next, room(waiting)))
    }

    /// When the next one is due for which there is room; the others wait for an answer.
    pub(super) fn next_at(&self, awaited: &Awaited, batch_max: usize) -> Option<Instant> {
        let room = [awaited.room(batch_max, false), awaited.room(batch_max, true)];
        let has_room = |waiting: &&Waiting| room[usize::from(waiting.behind.tries > FIRST_TRIES)] > 0;
        self.all.values().filter(has_room).filter_map(|waiting| waiting.due).min()
    }

    /// What it waits for was not passed yet, and is not looked for before then.
    fn not_yet(&mut self, of: &AggregateOf, pause: Duration) {
        if let Some(waiting) = self.all.get_mut(of) {
            waiting.due = Some(Instant::now() + pause);
        }
    }

    fn position(&self, of: &AggregateOf) -> Option<&Position> {
        self.all.get(of).map(|waiting| &waiting.behind.position)
    }

    /// As a checkpoint has them.
    pub(super) fn list(&self) -> Vec<Behind> {
        self.all.values().map(|waiting| waiting.behind.clone()).collect()
    }
}

impl Leading {
    /// Goes on with the aggregates that have been due the longest: hands each to the bus from where it is stuck up to the checkpoint, in
    /// order, and does not wait for the answers.
    pub(super) async fn catch_up(&mut self) -> Result<(), End> {
        self.settle_answered().await?;
        if self.tries > 0 {
            return Ok(()); // the bus takes nothing
        }
        let mut caught_up = false;
        while let Some((of, from, room)) = self.waiters.due(&self.awaited, self.settings.batch_max) {
            let (events, last) = self.read_behind(&of, from, room).await?;
            if events.is_empty() {
                // Where it stands may lie ahead, if an operator has decided: then that it was passed must not be forgotten yet.
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

    /// A page of an aggregate up to the checkpoint, and whether nothing follows it there.
    async fn read_behind(&self, of: &AggregateOf, from: u64, max: usize) -> Result<(Vec<Stored>, bool), End> {
        let journal = &self.journal;
        let read = || journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, max);
        let page = self.insist("reading an aggregate", read).await?;
        let (mut events, more) = (page.events, page.more);
        let read = events.len();
        if self.is_ordered() {
            // What is further on comes by with the rest.
            let passed = events.iter().take_while(|stored| stored.position <= self.position).count();
            events.truncate(passed);
        }
        let last = events.len() < read || !more;
        Ok((events, last))
    }

    /// Notes what has been answered in the meantime.
    pub(super) async fn settle_answered(&mut self) -> Result<(), End> {
        let mut answered = self.awaited.come();
        answered.extend(self.heard.take());
        if answered.is_empty() {
            return Ok(());
        }
        let mut told = Vec::new();
        for Answered { of, acknowledged, failed, began } in answered {
            self.note(acknowledged.iter(), began);
            if let Some((stored, error)) = failed {
                let behind = self.left_behind(&stored, &error, true);
                self.waiters.stuck(of, behind, &self.settings);
            } else if let Some(last) = acknowledged.last() {
                self.waiters.moved(&of, last);
            }
            told.extend(acknowledged);
        }
        self.save_behind().await?;
        if self.is_ordered() { Ok(()) } else { self.tell_of(&told).await }
    }

    async fn save_behind(&mut self) -> Result<(), End> {
        let position = self.position.clone();
        self.save(&position).await
    }

    /// Before it ends: what is with the bus may still be answered.
    pub(super) async fn finish(&mut self) -> Result<(), End> {
        let deadline = Instant::now() + self.settings.flush_timeout;
        while self.waiters.unanswered() > 0 {
            match tokio::time::timeout_at(deadline, self.awaited.next()).await {
                Ok(answered) => self.heard = answered,
                Err(_) => break,
            }
            self.settle_answered().await?;
        }
        Ok(())
    }
}
