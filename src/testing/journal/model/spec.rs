//! What a journal should answer, written down plainly: lists that are looked through from the start. Shares no code with any
//! backend.

use std::collections::BTreeMap;

use crate::clock::Time;
use crate::event::Event;
use crate::id::{EventId, RelayName};
use crate::journal::{AggregateOf, Append, Checkpoint, Expected, Placing, Position};
use crate::ledger::Token;

/// An event that was appended.
#[derive(Debug, Clone)]
pub(super) struct Written {
    pub of: AggregateOf,
    pub seq: u64,
    pub position: Position,
    pub event: Event,
    /// Whether a sweep has taken it.
    pub gone: bool,
}

/// A relay.
#[derive(Debug, Clone, Default)]
pub(super) struct Relay {
    pub tokens: Vec<Token>,
    pub leads: bool,
    pub checkpoint: Option<Checkpoint>,
}

impl Relay {
    /// Whether this token still counts.
    pub(super) fn is_current(&self, token: Token) -> bool {
        self.tokens.last() == Some(&token)
    }
}

/// Where an event should stand; the position only if it was there before.
pub(super) type Place = (u64, Option<Position>, Placing);

#[derive(Debug, Default)]
pub(super) struct Spec {
    pub written: Vec<Written>,
    pub heads: BTreeMap<AggregateOf, u64>,
    pub relays: BTreeMap<RelayName, Relay>,
    pub newest: Time,
}

/// What must not change under an id.
fn same_fact(one: &Event, other: &Event) -> bool {
    one.kind == other.kind && one.payload == other.payload
}

impl Spec {
    pub(super) fn head(&self, of: &AggregateOf) -> u64 {
        self.heads.get(of).copied().unwrap_or(0)
    }

    /// What is still there, in the journal's order.
    pub(super) fn there(&self) -> Vec<&Written> {
        let mut there: Vec<_> = self.written.iter().filter(|written| !written.gone).collect();
        there.sort_by(|one, other| one.position.cmp(&other.position));
        there
    }

    pub(super) fn find(&self, of: &AggregateOf, id: &EventId) -> Option<&Written> {
        let is =
            |written: &&Written| !written.gone && written.of.tenant == of.tenant && written.event.id == *id;
        self.written.iter().find(is)
    }

    /// Whether any event's id stands for another fact.
    pub(super) fn reuses(&self, append: &Append) -> bool {
        let of = append.of();
        append.events.iter().any(|event| {
            let known = self.find(&of, &event.id);
            known.is_some_and(|known| known.of != of || !same_fact(&known.event, event))
        })
    }

    /// What becomes of an append: a place for each event, or the code of an error.
    pub(super) fn decide(
        &self,
        append: &Append,
        warn: bool,
        (bytes_max, events_max): (usize, usize),
    ) -> Result<Vec<Place>, &'static str> {
        let events = &append.events;
        if events.is_empty() || events.len() > events_max {
            return Err("invalid");
        }
        for (n, event) in events.iter().enumerate() {
            let twice = events[..n].iter().find(|before| before.id == event.id);
            if event.payload.len() > bytes_max || twice.is_some_and(|before| !same_fact(before, event)) {
                return Err("invalid");
            }
        }
        let of = append.of();
        let head = self.head(&of);
        let mut next = head;
        let mut places: Vec<Place> = Vec::new();
        for (n, event) in events.iter().enumerate() {
            if let Some(before) = events[..n].iter().position(|before| before.id == event.id) {
                let (seq, position, _) = places[before].clone();
                places.push((seq, position, Placing::Repeat));
                continue;
            }
            if let Some(written) = self.find(&of, &event.id) {
                let same = written.of == of && same_fact(&written.event, event);
                if !same && !warn {
                    return Err("mismatch");
                }
                let placing = if same { Placing::Repeat } else { Placing::Kept };
                places.push((written.seq, Some(written.position.clone()), placing));
                continue;
            }
            let holds = match append.expected {
                Expected::Any => true,
                Expected::New => head == 0,
                Expected::Exact(seq) => head == seq,
            };
            next += 1;
            if !holds || event.seq.is_some_and(|seq| seq != next) {
                return Err("conflict");
            }
            places.push((next, None, Placing::New));
        }
        Ok(places)
    }

    /// Notes an event that was stored.
    pub(super) fn store(&mut self, of: &AggregateOf, event: &Event, seq: u64, position: Position) {
        self.heads.insert(of.clone(), seq);
        let mut event = event.clone().seq(of.aggregate.clone(), seq);
        event.tenant.clone_from(&of.tenant);
        self.written.push(Written { of: of.clone(), seq, position, event, gone: false });
    }

    /// What a sweep of everything, however young, would take.
    pub(super) fn swept(&self) -> Vec<usize> {
        let mut passed: Option<Position> = None;
        for relay in self.relays.values() {
            let at = relay.checkpoint.as_ref().map_or(Position::START, |c| c.position.clone());
            passed = Some(passed.map_or(at.clone(), |passed| passed.min(at)));
        }
        let Some(passed) = passed else { return Vec::new() };
        let held_back = |written: &Written| {
            self.relays.values().filter_map(|relay| relay.checkpoint.as_ref()).any(|checkpoint| {
                checkpoint
                    .behind
                    .iter()
                    .any(|behind| behind.of().is_ok_and(|of| of == written.of) && written.seq >= behind.next)
            })
        };
        let goes = |written: &Written| !written.gone && written.position <= passed && !held_back(written);
        (0..self.written.len()).filter(|n| goes(&self.written[*n])).collect()
    }
}
