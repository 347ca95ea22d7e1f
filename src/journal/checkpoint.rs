//! How far a relay has come, and who leads.

use serde::{Deserialize, Serialize};

use super::{AggregateOf, Position, Stored};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Owner, RelayName, Tenant};
use crate::ledger::Token;

/// What a relay remembers: everything up to `position` is on the bus, except for the aggregates that are behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// The journal it belongs to.
    pub journal: String,
    /// Up to where the journal was gone through.
    pub position: Position,
    /// Events lately published, the oldest first, so that a restart does not repeat them; as many as the relay keeps.
    #[serde(default)]
    pub recent: Vec<String>,
    /// Aggregates of which something could not be published.
    #[serde(default)]
    pub behind: Vec<Behind>,
}

/// An aggregate that the relay has left behind: its events from `next` on are not on the bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Behind {
    /// Whose data it is.
    pub tenant: Option<String>,
    /// Which one.
    pub aggregate: String,
    /// The seq that is to be published next.
    pub next: u64,
    /// Its position: what a sweep must not pass.
    pub position: Position,
    /// Why it was not.
    pub reason: String,
    /// Whether it will never be by itself (too large for the bus): then the aggregate is parked until someone decides.
    pub poison: bool,
    /// When it began, in microseconds since 1970 by the journal's clock.
    pub since: i64,
    /// How often it was tried.
    pub tries: u32,
    /// When the event that is to be published next was appended, as `since` is counted; 0: unknown.
    #[serde(default)]
    pub appended: i64,
}

impl Behind {
    /// An aggregate is left behind at an event that could not be published.
    pub fn at(stored: &Stored, reason: impl Into<String>, poison: bool, since: Time) -> Self {
        let event = &stored.event;
        Behind {
            tenant: event.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            aggregate: event.aggregate.as_ref().map_or_else(String::new, |a| a.as_str().to_owned()),
            next: stored.seq,
            position: stored.position.clone(),
            reason: reason.into(),
            poison,
            since: since.as_micros(),
            tries: 1,
            appended: stored.at.as_micros(),
        }
    }

    /// When the event that it is stuck at was appended, as far as is known.
    pub(crate) fn appended_at(&self) -> Time {
        Time::from_micros(if self.appended == 0 { self.since } else { self.appended })
    }

    /// Which aggregate, whose.
    pub fn of(&self) -> Result<AggregateOf> {
        let tenant = self.tenant.as_deref().map(Tenant::new).transpose()?;
        Ok(AggregateOf { tenant, aggregate: Aggregate::new(&self.aggregate)? })
    }

    fn is_of(&self, stored: &Stored) -> bool {
        let event = &stored.event;
        event.tenant.as_ref().map(Tenant::as_str) == self.tenant.as_deref()
            && event.aggregate.as_ref().is_some_and(|aggregate| aggregate.as_str() == self.aggregate)
    }
}

impl Checkpoint {
    /// The beginning of a journal.
    pub fn start(journal: impl Into<String>) -> Self {
        Checkpoint {
            journal: journal.into(),
            position: Position::START,
            recent: Vec::new(),
            behind: Vec::new(),
        }
    }

    /// How many aggregates are parked.
    pub(crate) fn parked(&self) -> usize {
        self.behind.iter().filter(|behind| behind.poison).count()
    }

    /// Whether the relay has passed an event without publishing it.
    pub fn holds_back(&self, stored: &Stored) -> bool {
        self.behind.iter().any(|behind| behind.is_of(stored) && stored.seq >= behind.next)
    }

    /// Up to where a sweep may look: the position itself, since what is behind is told by [`holds_back`](Checkpoint::holds_back).
    pub(crate) fn passed(&self) -> Position {
        self.position.clone()
    }

    /// Refuses a checkpoint of another journal.
    pub fn must_be_of(&self, journal: &str) -> Result<()> {
        if self.journal == journal {
            return Ok(());
        }
        Err(Error::Conflict {
            expected: format!("a checkpoint of journal {journal}"),
            actual: format!("one of journal {}", self.journal),
        })
    }
}

/// Whether a relay leads.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leadership {
    /// It does, from this checkpoint on.
    Acquired {
        /// What every save carries.
        token: Token,
        /// Where its predecessor had come to.
        checkpoint: Checkpoint,
    },
    /// Someone else does.
    Taken {
        /// Who, for humans.
        by: Owner,
        /// Until when, by the journal's clock, unless it is kept.
        until: Time,
    },
}

/// What is known of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayState {
    /// Its name.
    pub relay: RelayName,
    /// Who leads, or led last, for humans.
    pub owner: Option<Owner>,
    /// Until when it leads; past: nobody does.
    pub until: Option<Time>,
    /// The last token.
    pub token: Token,
    /// Its checkpoint; none if nothing was saved yet.
    pub checkpoint: Option<Checkpoint>,
    /// When it was saved.
    pub saved_at: Option<Time>,
}

impl RelayState {
    /// What is known of a relay.
    pub fn new(
        relay: RelayName,
        owner: Option<Owner>,
        until: Option<Time>,
        token: Token,
        checkpoint: Option<Checkpoint>,
        saved_at: Option<Time>,
    ) -> Self {
        RelayState { relay, owner, until, token, checkpoint, saved_at }
    }
}
