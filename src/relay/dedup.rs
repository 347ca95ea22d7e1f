//! Remembers which events are on the bus.

use std::collections::{BTreeMap, HashMap};

use super::behind::aggregate_of;
use crate::id::{Aggregate, Tenant};
use crate::journal::{AggregateOf, Position, Stored};

/// Identifies an event by aggregate and seq. An id is not enough: after a sweep the same id can be
/// appended again, as another event. A seq is never reused.
type Id = (AggregateOf, u64);

/// Recently acknowledged events; the oldest are forgotten first. An event is known only if all
/// earlier events of its aggregate are on the bus too.
#[derive(Debug, Default)]
pub(super) struct Known {
    max: usize,
    turn: u64,
    turns: HashMap<Id, u64>,
    ids: BTreeMap<u64, (Id, Position)>,
}

impl Known {
    /// Remembers at most `max` events, starting with those of a checkpoint.
    pub(super) fn new(max: usize, recent: &[String]) -> Self {
        let mut known = Known { max, ..Known::default() };
        for id in recent.iter().filter_map(|text| parse(text)) {
            known.insert(id, Position::START);
        }
        known
    }

    pub(super) fn add(&mut self, stored: &Stored) {
        if self.max > 0
            && let Some(id) = id(stored)
        {
            self.insert(id, stored.position.clone());
        }
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
        self.ids.clear();
    }

    fn insert(&mut self, id: Id, position: Position) {
        self.turn += 1;
        if let Some(before) = self.turns.insert(id.clone(), self.turn) {
            self.ids.remove(&before);
        }
        self.ids.insert(self.turn, (id, position));
        while self.ids.len() > self.max {
            if let Some((_, (oldest, _))) = self.ids.pop_first() {
                self.turns.remove(&oldest);
            }
        }
    }

    pub(super) fn has(&self, stored: &Stored) -> bool {
        !self.turns.is_empty() && id(stored).is_some_and(|id| self.turns.contains_key(&id))
    }

    /// The position up to which events may have been forgotten: before it, an unknown event may
    /// still be on the bus.
    pub(super) fn forgotten_up_to(&self) -> Option<Position> {
        let full = self.ids.len() >= self.max;
        full.then(|| self.ids.first_key_value().map(|(_, (_, position))| position.clone())).flatten()
    }

    /// The last `max`, oldest first, in the form that checkpoints store.
    pub(super) fn recent(&self, max: usize) -> Vec<String> {
        let skip = self.ids.len().saturating_sub(max);
        self.ids.values().skip(skip).map(|(id, _)| text(id)).collect()
    }
}

fn id(stored: &Stored) -> Option<Id> {
    Some((aggregate_of(stored)?, stored.seq))
}

/// `SEQ:TENANT/AGGREGATE`. The tenant is percent-encoded, so that no two events share a text:
/// confusing them would lose one.
fn text((of, seq): &Id) -> String {
    let tenant = of.tenant.as_ref().map_or("", |tenant| tenant.as_str());
    let tenant = percent_encoding::utf8_percent_encode(tenant, percent_encoding::NON_ALPHANUMERIC);
    format!("{seq}:{tenant}/{}", of.aggregate.as_str())
}

/// Ignores the texts of older versions; their events are published again.
fn parse(text: &str) -> Option<Id> {
    let (seq, of) = text.split_once(':')?;
    let (tenant, aggregate) = of.split_once('/')?;
    let tenant = percent_encoding::percent_decode_str(tenant).decode_utf8().ok()?;
    let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant).ok()?) };
    Some((AggregateOf { tenant, aggregate: Aggregate::new(aggregate).ok()? }, seq.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Event, EventId, Time};

    fn stored(tenant: Option<&str>, aggregate: &str, seq: u64) -> Stored {
        let mut event = Event::new(EventId::new("e").unwrap());
        event.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        let fingerprint = event.fingerprint();
        let aggregate = Aggregate::new(aggregate).unwrap();
        Stored::new(Position::of(seq), Time::default(), fingerprint, event, aggregate, seq)
    }

    #[test]
    fn the_oldest_is_forgotten_first_and_the_rest_survives_a_restart() {
        let mut known = Known::new(3, &[]);
        for n in 1..=4 {
            known.add(&stored(None, "a", n));
        }
        assert!(!known.has(&stored(None, "a", 1)) && known.has(&stored(None, "a", 2)));
        assert_eq!(known.forgotten_up_to(), Some(Position::of(2)));
        assert_eq!(known.recent(2), ["3:/a", "4:/a"]);
        let again = Known::new(3, &known.recent(2));
        assert!(again.has(&stored(None, "a", 4)) && !again.has(&stored(None, "a", 2)));
    }

    #[test]
    fn tenants_are_apart_whatever_they_are_called() {
        let mut known = Known::new(10, &[]);
        known.add(&stored(Some("a/b"), "c", 1));
        known.add(&stored(None, "x/y", 2));
        let again = Known::new(10, &known.recent(10));
        assert!(again.has(&stored(Some("a/b"), "c", 1)) && again.has(&stored(None, "x/y", 2)));
        for (tenant, id) in [(None, "c"), (Some("a"), "b/c"), (None, "a/b/c"), (Some("x"), "y")] {
            assert!(!again.has(&stored(tenant, id, 1)), "{tenant:?} {id}");
        }
    }

    #[test]
    fn what_an_older_version_remembered_is_forgotten() {
        let known = Known::new(10, &["/1:/a".into(), "t/1:a".into(), "1".into()]);
        assert!(!known.has(&stored(None, "a", 1)) && known.recent(10).is_empty());
    }

    #[test]
    fn zero_remembers_nothing() {
        let mut known = Known::new(0, &["1:/a".into()]);
        known.add(&stored(None, "a", 2));
        assert!(!known.has(&stored(None, "a", 1)) && !known.has(&stored(None, "a", 2)));
    }
}
