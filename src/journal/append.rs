//! An append and its result.

use std::collections::HashMap;
use std::fmt;

use super::{AggregateOf, JournalSettings, Position, expects};
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint};
use crate::id::{Aggregate, EventId, Tenant};
use crate::ledger::MismatchRule;

/// What an append expects of its aggregate's last seq.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Expected {
    /// The last event has this seq; 0: there is none.
    Exact(u64),
    /// The aggregate has no events yet.
    New,
    /// Anything.
    /// Gives up: detecting concurrent appends to the aggregate.
    Any,
}

impl Expected {
    /// Checks the expectation against an aggregate whose last seq is `head`. If it does not hold,
    /// the conflict names both.
    pub fn check(self, head: u64) -> Result<()> {
        match self {
            Expected::Any => Ok(()),
            Expected::New if head == 0 => Ok(()),
            Expected::Exact(seq) if seq == head => Ok(()),
            Expected::New | Expected::Exact(_) => {
                Err(Error::Conflict { expected: self.to_string(), actual: format!("seq {head}") })
            }
        }
    }
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Expected::Exact(seq) => write!(f, "seq {seq}"),
            Expected::New => f.write_str("seq 0 (a new aggregate)"),
            Expected::Any => f.write_str("any seq"),
        }
    }
}

/// Events to append to one aggregate, in one step.
///
/// ```
/// use hapax::journal::{Append, Expected};
/// use hapax::Event;
/// # fn main() -> hapax::Result<()> {
/// let paid = Event::of("order-17-paid")?.payload(r#"{"amount": 7}"#);
/// let append = Append::to("order-17", Expected::New, [paid])?;
/// assert_eq!(append.events.len(), 1);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Append {
    /// Whose data this is.
    pub tenant: Option<Tenant>,
    /// The aggregate.
    pub aggregate: Aggregate,
    /// What the append expects of it.
    pub expected: Expected,
    /// The events, in the order in which they are numbered.
    pub events: Vec<Event>,
}

impl Append {
    /// Events for an aggregate without a tenant. Validates the aggregate's name.
    pub fn to(
        aggregate: impl AsRef<str>,
        expected: Expected,
        events: impl IntoIterator<Item = Event>,
    ) -> Result<Self> {
        Ok(Append::new(Aggregate::new(aggregate)?, expected, events))
    }

    /// Events for an aggregate without a tenant.
    pub fn new(aggregate: Aggregate, expected: Expected, events: impl IntoIterator<Item = Event>) -> Self {
        Append { tenant: None, aggregate, expected, events: events.into_iter().collect() }
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Tenant) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// The aggregate and its tenant.
    pub fn of(&self) -> AggregateOf {
        AggregateOf { tenant: self.tenant.clone(), aggregate: self.aggregate.clone() }
    }

    /// Checks everything that does not need the journal. Every backend calls this first.
    pub fn check(&self, settings: &JournalSettings) -> Result<Ready<'_>> {
        let count = self.events.len();
        if count == 0 || count > settings.events_max {
            let problem = format!("it has {count} events; 1 to {} are allowed", settings.events_max);
            return Err(Error::invalid("append", problem));
        }
        let mut fingerprints = Vec::with_capacity(count);
        let mut firsts: HashMap<&EventId, usize> = HashMap::with_capacity(count);
        let mut same = Vec::with_capacity(count);
        for (index, event) in self.events.iter().enumerate() {
            self.check_event(event, settings)?;
            let fingerprint =
                Fingerprint::of(event.kind.as_ref(), Some(&self.aggregate), None, &event.payload);
            let first = *firsts.entry(&event.id).or_insert(index);
            if first != index && fingerprints.get(first) != Some(&fingerprint) {
                let problem = format!("{} is there twice in one append, with two contents", event.id);
                return Err(Error::invalid("event id", problem));
            }
            fingerprints.push(fingerprint);
            same.push(first);
        }
        expects(self)?;
        Ok(Ready { append: self, fingerprints, same })
    }

    fn check_event(&self, event: &Event, settings: &JournalSettings) -> Result<()> {
        let size = event.payload.len()
            + event.headers.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
        if size > settings.event_bytes_max {
            let problem = format!(
                "{} has {size} bytes with its headers; {} are allowed",
                event.id, settings.event_bytes_max
            );
            return Err(Error::invalid("event", problem));
        }
        if let Some((name, _)) = event.headers.iter().find(|(name, _)| name.is_empty() || name.contains('\0'))
        {
            let problem = format!(
                "a header of {} is named {name:?}; a name needs characters, none of them NUL",
                event.id
            );
            return Err(Error::invalid("event", problem));
        }
        if event.aggregate.as_ref().is_some_and(|aggregate| *aggregate != self.aggregate) {
            let problem = format!("{} names another aggregate than the append, {}", event.id, self.aggregate);
            return Err(Error::invalid("event", problem));
        }
        if event.tenant.is_some() && event.tenant != self.tenant {
            return Err(Error::invalid(
                "event",
                format!("{} names another tenant than the append", event.id),
            ));
        }
        if event.seq == Some(0) || event.seq.is_some_and(|seq| i64::try_from(seq).is_err()) {
            let problem = format!("{} has a seq outside of 1 to {}", event.id, i64::MAX);
            return Err(Error::invalid("event", problem));
        }
        Ok(())
    }
}

/// A checked append, with what every backend needs to carry it out.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Ready<'a> {
    /// The append.
    pub append: &'a Append,
    /// The fingerprint of each event: kind, aggregate and payload.
    pub fingerprints: Vec<Fingerprint>,
    /// For each event, the index of the first event of the append with the same id; its own index
    /// unless the id occurs twice.
    pub same: Vec<usize>,
}

impl Ready<'_> {
    /// Decides the append, given the aggregate's last seq and what is known of each id (original
    /// seq, position and fingerprint).
    ///
    /// Returns a place for each event. Those that are `New` have no position yet and must be stored
    /// under their seq.
    pub fn decide(
        &self,
        head: u64,
        settings: &JournalSettings,
        mut known: impl FnMut(usize) -> Option<(u64, Position, Fingerprint)>,
    ) -> Result<Vec<Placed>> {
        let mut placed: Vec<Placed> = Vec::with_capacity(self.same.len());
        let mut last = head;
        for (index, event) in self.append.events.iter().enumerate() {
            let first = self.same[index];
            if first != index {
                let original = placed[first].clone();
                placed.push(Placed { placing: Placing::Repeat, ..original });
                continue;
            }
            placed.push(match known(index) {
                Some((seq, position, fingerprint))
                    if fingerprint == self.fingerprints[index] || fingerprint == Fingerprint::ERASED =>
                {
                    Placed { seq, position, placing: Placing::Repeat }
                }
                Some((seq, position, _)) if settings.mismatch == MismatchRule::Warn => {
                    settings.kept(&event.id);
                    Placed { seq, position, placing: Placing::Kept }
                }
                Some((seq, ..)) => {
                    return Err(Error::Mismatch {
                        what: format!(
                            "{} is in the journal with other content, as seq {seq} of its aggregate",
                            event.id
                        ),
                    });
                }
                None => {
                    if last == head {
                        self.append.expected.check(head)?; // a repeat was checked the first time
                    }
                    last += 1;
                    if event.seq.is_some_and(|seq| seq != last) {
                        let seq = event.seq.unwrap_or_default();
                        return Err(Error::Conflict {
                            expected: format!("seq {seq} for {}", event.id),
                            actual: format!("seq {last} is next"),
                        });
                    }
                    Placed { seq: last, position: Position::START, placing: Placing::New }
                }
            });
        }
        Ok(placed)
    }
}

/// Why an event has its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placing {
    /// This append stored it.
    New,
    /// It was already stored; this is its original place.
    Repeat,
    /// Another event is stored under its id. That one was kept, and this one was not stored
    /// (`warn`).
    Kept,
}

/// The place of an appended event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placed {
    /// Its number within the aggregate.
    pub seq: u64,
    /// Its place in the journal's order.
    pub position: Position,
    /// Why it has this place.
    pub placing: Placing,
}

/// The result of an append.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[must_use]
pub struct Appended {
    /// Each event's place, in the order of the append.
    pub placed: Vec<Placed>,
}

impl Appended {
    /// The places of an append's events.
    pub fn new(placed: Vec<Placed>) -> Self {
        Appended { placed }
    }

    /// The highest of the seqs.
    pub fn last_seq(&self) -> u64 {
        self.placed.iter().map(|placed| placed.seq).max().unwrap_or_default()
    }

    /// Whether nothing was stored because all events were already there.
    pub fn is_repeat(&self) -> bool {
        self.placed.iter().all(|placed| placed.placing != Placing::New)
    }
}
