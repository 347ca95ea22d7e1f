//! Aggregates of which something could not be published: they wait, the others go on.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::turn::Leading;
use super::{End, RelaySettings};
use crate::error::Result;
use crate::journal::{AggregateOf, Behind, Checkpoint, Stored};

/// One that waits.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) behind: Behind,
    /// When it is tried again; never, if it is poison.
    due: Option<Instant>,
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
            Ok((behind.of()?, Waiting { behind: behind.clone(), due }))
        };
        Ok(Waiters { all: checkpoint.behind.iter().map(waiting).collect::<Result<_>>()? })
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
        self.all.insert(of, Waiting { behind, due });
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

    /// It has moved on, and goes on at once.
    pub(super) fn moved(&mut self, of: &AggregateOf, last: &Stored) {
        if let Some(waiting) = self.all.get_mut(of) {
            waiting.behind.next = last.seq + 1;
            waiting.behind.position = last.position.clone();
            waiting.behind.appended = last.at.as_micros(); // about: what follows it came later
            waiting.due = Some(Instant::now());
        }
    }

    /// The one that has been due the longest, with the seq to go on from.
    pub(super) fn due(&self) -> Option<(AggregateOf, u64)> {
        let now = Instant::now();
        let due = self.all.iter().filter(|(_, waiting)| waiting.due.is_some_and(|at| at <= now));
        let (of, waiting) = due.min_by_key(|(_, waiting)| waiting.due)?;
        Some((of.clone(), waiting.behind.next))
    }

    /// When the next one is due.
    pub(super) fn next_at(&self) -> Option<Instant> {
        self.all.values().filter_map(|waiting| waiting.due).min()
    }

    /// As a checkpoint has them.
    pub(super) fn list(&self) -> Vec<Behind> {
        self.all.values().map(|waiting| waiting.behind.clone()).collect()
    }
}

impl Leading {
    /// Goes on with the aggregate that has been due the longest: from where it is stuck up to the checkpoint, in order.
    pub(super) async fn catch_up(&mut self) -> Result<(), End> {
        if self.tries > 0 {
            return Ok(()); // the bus takes nothing
        }
        let Some((of, from)) = self.waiters.due() else { return Ok(()) };
        let (journal, max) = (&self.journal, self.settings.batch_max);
        let page = self
            .insist("reading an aggregate", || {
                journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, max)
            })
            .await?;
        let (mut events, more) = (page.events, page.more);
        let read = events.len();
        if self.is_ordered() {
            // What is further on comes by with the rest.
            let passed = events.iter().take_while(|stored| stored.position <= self.position).count();
            events.truncate(passed);
        }
        let last = events.len() < read || !more;
        let flushed = self.flush(&events).await?;
        if let Some((place, error)) = flushed.failed.get(&of) {
            let behind = self.left_behind(&events[*place], error, true);
            events.truncate(*place);
            self.waiters.stuck(of, behind, &self.settings);
        } else if last {
            self.waiters.remove(&of);
        } else if let Some(last) = events.last() {
            self.waiters.moved(&of, last);
        }
        let position = self.position.clone();
        self.save(&position).await?;
        if !self.is_ordered() {
            self.tell_of(&events).await?;
        }
        Ok(())
    }
}
