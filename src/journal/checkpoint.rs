//! A relay's progress and its leadership.

use serde::{Deserialize, Serialize};

use super::{AggregateOf, Position, Stored};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Owner, RelayName, Tenant};
use crate::ledger::Token;

/// A relay's progress: everything up to `position` is on the bus, except for the aggregates that
/// are behind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Checkpoint {
    /// The journal it belongs to.
    pub journal: String,
    /// The position up to which the relay has read the journal.
    pub position: Position,
    /// If the journal's positions are [times](super::JournalCapabilities::timed): positions of
    /// recently published events, oldest first, so that a restart neither misses a late event nor
    /// publishes another again. The relay does not look at events up to the first of them. The
    /// relay's settings limit their number.
    #[serde(default)]
    pub recent: Vec<String>,
    /// Aggregates with an event that could not be published yet.
    #[serde(default)]
    pub behind: Vec<Behind>,
}

/// An aggregate that is behind: its events from `next` on are not on the bus.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Behind {
    /// Whose data it is.
    pub tenant: Option<String>,
    /// The aggregate.
    pub aggregate: String,
    /// The seq to publish next.
    pub next: u64,
    /// The position of that event, or of the one published before it.
    pub position: Position,
    /// Why it could not be published.
    pub reason: String,
    /// Whether retrying cannot help (the event is too large for the bus): the aggregate is then
    /// parked until an operator decides.
    pub poison: bool,
    /// When it fell behind, in microseconds since 1970 by the journal's clock.
    pub since: i64,
    /// How many attempts were made.
    #[serde(alias = "tries")]
    pub attempts: u32,
    /// When the event to publish next was appended, in the same unit as `since`; 0 if unknown.
    #[serde(default)]
    pub appended: i64,
}

impl Behind {
    /// Records that an aggregate is behind, at an event that could not be published.
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
            attempts: 1,
            appended: stored.at.as_micros(),
        }
    }

    /// When the event it is stuck at was appended, or when it fell behind if that is unknown.
    pub(crate) fn appended_at(&self) -> Time {
        Time::from_micros(if self.appended == 0 { self.since } else { self.appended })
    }

    /// The aggregate and its tenant.
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
    /// A checkpoint at the beginning of a journal.
    pub fn start(journal: impl Into<String>) -> Self {
        Checkpoint {
            journal: journal.into(),
            position: Position::START,
            recent: Vec::new(),
            behind: Vec::new(),
        }
    }

    /// The number of parked aggregates.
    pub(crate) fn parked(&self) -> usize {
        self.behind.iter().filter(|behind| behind.poison).count()
    }

    /// Whether the relay has passed an event without publishing it.
    pub fn holds_back(&self, stored: &Stored) -> bool {
        self.behind.iter().any(|behind| behind.is_of(stored) && stored.seq >= behind.next)
            || self.has_missed(stored)
    }

    /// Whether an event appeared late: it is not among those that are known to be published.
    fn has_missed(&self, stored: &Stored) -> bool {
        let since = self.recent.first().and_then(|text| text.parse::<Position>().ok());
        since.is_some_and(|since| stored.position > since && stored.position <= self.position)
            && !self.recent.contains(&stored.position.to_string())
    }

    /// The position up to which a sweep may look. It need not allow for aggregates that are behind,
    /// because [`holds_back`](Checkpoint::holds_back) protects their events.
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

/// Whether a relay holds leadership.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leadership {
    /// It does, starting from this checkpoint.
    Acquired {
        /// The token that every save carries.
        token: Token,
        /// How far its predecessor got.
        checkpoint: Checkpoint,
    },
    /// Another relay does.
    Taken {
        /// Its owner, for humans.
        by: Owner,
        /// When its leadership ends unless renewed, by the journal's clock.
        until: Time,
    },
}

/// The stored state of a relay.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct RelayState {
    /// Its name.
    pub relay: RelayName,
    /// The current or last leader, for humans.
    pub owner: Option<Owner>,
    /// When its leadership ends. If this is past, the relay has no leader.
    pub until: Option<Time>,
    /// The last token.
    pub token: Token,
    /// Its checkpoint; `None` if it has not saved one.
    pub checkpoint: Option<Checkpoint>,
    /// When the checkpoint was saved.
    pub saved_at: Option<Time>,
}

impl RelayState {
    /// The stored state of a relay.
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
