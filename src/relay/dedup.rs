//! What is known to be on the bus, as far as it is remembered.

use std::collections::{BTreeMap, HashMap};

use crate::id::{EventId, Tenant};
use crate::journal::{Position, Stored};

type Id = (Option<Tenant>, EventId);

/// Ids lately acknowledged, the oldest forgotten first. An id is known only if everything before it of its aggregate is on the bus too.
#[derive(Debug, Default)]
pub(super) struct Known {
    max: usize,
    turn: u64,
    turns: HashMap<Id, u64>,
    ids: BTreeMap<u64, (Id, Position)>,
}

impl Known {
    /// At most so many; what a checkpoint remembers is known from the start.
    pub(super) fn new(max: usize, recent: &[String]) -> Self {
        let mut known = Known { max, ..Known::default() };
        for id in recent.iter().filter_map(|text| parse(text)) {
            known.insert(id, Position::START);
        }
        known
    }

    pub(super) fn add(&mut self, stored: &Stored) {
        if self.max > 0 {
            self.insert(id(stored), stored.position.clone());
        }
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
        !self.turns.is_empty() && self.turns.contains_key(&id(stored))
    }

    /// Behind which position ids may have been forgotten: before it, not being known says nothing.
    pub(super) fn forgotten_up_to(&self) -> Option<Position> {
        let full = self.ids.len() >= self.max;
        full.then(|| self.ids.first_key_value().map(|(_, (_, position))| position.clone())).flatten()
    }

    /// The last so many, the oldest first, as a checkpoint keeps them.
    pub(super) fn recent(&self, max: usize) -> Vec<String> {
        let skip = self.ids.len().saturating_sub(max);
        self.ids.values().skip(skip).map(|(id, _)| text(id)).collect()
    }
}

fn id(stored: &Stored) -> Id {
    (stored.event.tenant.clone(), stored.event.id.clone())
}

/// `TENANT/ID`, the tenant percent-encoded, so that no two share a text: taking one for another would be a loss.
fn text((tenant, id): &Id) -> String {
    let tenant = tenant.as_ref().map_or("", |tenant| tenant.as_str());
    let tenant = percent_encoding::utf8_percent_encode(tenant, percent_encoding::NON_ALPHANUMERIC);
    format!("{tenant}/{}", id.as_str())
}

fn parse(text: &str) -> Option<Id> {
    let (tenant, id) = text.split_once('/')?;
    let tenant = percent_encoding::percent_decode_str(tenant).decode_utf8().ok()?;
    let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant).ok()?) };
    Some((tenant, EventId::new(id).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Aggregate, Event, Time};

    fn stored(tenant: Option<&str>, id: &str, position: u64) -> Stored {
        let mut event = Event::new(EventId::new(id).unwrap());
        event.tenant = tenant.map(|tenant| Tenant::new(tenant).unwrap());
        let fingerprint = event.fingerprint();
        let aggregate = Aggregate::new("a").unwrap();
        Stored::new(Position::of(position), Time::default(), fingerprint, event, aggregate, position)
    }

    #[test]
    fn the_oldest_is_forgotten_first_and_the_rest_survives_a_restart() {
        let mut known = Known::new(3, &[]);
        for n in 1..=4 {
            known.add(&stored(None, &format!("e-{n}"), n));
        }
        assert!(!known.has(&stored(None, "e-1", 1)) && known.has(&stored(None, "e-2", 2)));
        assert_eq!(known.forgotten_up_to(), Some(Position::of(2)));
        assert_eq!(known.recent(2), ["/e-3", "/e-4"]);
        let again = Known::new(3, &known.recent(2));
        assert!(again.has(&stored(None, "e-4", 4)) && !again.has(&stored(None, "e-2", 2)));
    }

    #[test]
    fn tenants_are_apart_whatever_they_are_called() {
        let mut known = Known::new(10, &[]);
        known.add(&stored(Some("a/b"), "c", 1));
        known.add(&stored(None, "x/y", 2));
        let again = Known::new(10, &known.recent(10));
        assert!(again.has(&stored(Some("a/b"), "c", 1)) && again.has(&stored(None, "x/y", 2)));
        for (tenant, id) in [(None, "c"), (Some("a"), "b/c"), (None, "a/b/c"), (Some("x"), "y")] {
            assert!(!again.has(&stored(tenant, id, 3)), "{tenant:?} {id}");
        }
    }

    #[test]
    fn zero_remembers_nothing() {
        let mut known = Known::new(0, &["/e-1".into()]);
        known.add(&stored(None, "e-2", 2));
        assert!(!known.has(&stored(None, "e-1", 1)) && !known.has(&stored(None, "e-2", 2)));
    }
}
