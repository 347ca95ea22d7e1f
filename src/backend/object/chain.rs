//! An aggregate's chain: one object per append, each at the slot that the one before it determines.
//!
//! A writer takes a slot by creating its object, which only one writer can do. It has read every
//! slot before it, so what it knows of the chain still holds when its object appears. That makes an
//! append atomic.

use std::sync::PoisonError;

use serde::{Deserialize, Serialize};

use super::journal::Inner;
use super::name::{self, Entry, Slot};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, Tenant};
use crate::journal::record::EventRecord;
use crate::journal::{AggregateOf, Filling, Page, Position, Stored};

/// The most events in one append.
pub(super) const EVENTS_MAX: u64 = 1000;
/// The most names per listing.
pub(super) const PAGE: usize = 1000;
/// How many tails are cached.
const TAILS_MAX: usize = 10_000;
/// A hint to the chain's end is written about once per this many events, for processes that have to
/// search for it.
const HINT_EVERY: u64 = 500;

/// The object at a slot: the events of one append, or none (a void), which only marks the slot as
/// taken.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Link {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) tenant: Option<String>,
    pub(super) aggregate: String,
    /// Distinguishes attempts.
    pub(super) nonce: String,
    /// The seq of the first event.
    pub(super) first: u64,
    /// How many events; 0 for a void.
    pub(super) count: u64,
    /// Its index time; a void has that of the link before it.
    pub(super) ms: u64,
    /// The index time of the link before it; 0 if unknown.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) previous_ms: u64,
    /// When it was appended, in microseconds since 1970.
    pub(super) at: i64,
    /// The intents that this void bars.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) barred: Vec<(String, u32)>,
    /// The number of the intent under which each event was appended.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) intents: Vec<u32>,
    /// How many of the first events were swept.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) gone: u64,
    /// The remaining events.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) events: Vec<EventRecord>,
}

impl Link {
    pub(super) fn void(of: &AggregateOf, slot: Slot, ms: u64, barred: Vec<(String, u32)>) -> Self {
        Link {
            tenant: of.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            aggregate: of.aggregate.as_str().to_owned(),
            nonce: uuid::Uuid::new_v4().simple().to_string(),
            first: slot.seq,
            count: 0,
            ms,
            previous_ms: 0,
            at: 0,
            barred,
            intents: Vec::new(),
            gone: 0,
            events: Vec::new(),
        }
    }

    pub(super) fn of(&self) -> Result<AggregateOf> {
        let tenant = self.tenant.as_deref().map(Tenant::new).transpose();
        match (tenant, Aggregate::new(&self.aggregate)) {
            (Ok(tenant), Ok(aggregate)) => Ok(AggregateOf { tenant, aggregate }),
            _ => Err(Error::Corrupt(format!("a stored aggregate is named {:?}", self.aggregate))),
        }
    }

    /// The chain's end if this is its last link.
    pub(super) fn tail(&self, at: Slot) -> Tail {
        let next = match self.count {
            0 => Slot { seq: at.seq, void: at.void + 1 },
            count => Slot { seq: at.seq + count, void: 0 },
        };
        Tail { next, ms: self.ms, last: Some(at) }
    }

    /// Whether it holds no events: all were swept, or it is a void. An empty link is never deleted,
    /// so that its slot never becomes free again.
    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// The remaining events, each with its index from 0.
    pub(super) fn left(&self) -> impl Iterator<Item = (usize, &EventRecord)> {
        self.events.iter().enumerate().map(|(n, record)| (n + self.gone as usize, record))
    }

    /// Its n-th event, from 0.
    pub(super) fn stored(&self, slot: Slot, nth: usize) -> Result<Option<Stored>> {
        let left = nth.checked_sub(self.gone as usize);
        let Some(record) = left.and_then(|left| self.events.get(left)) else { return Ok(None) };
        let of = self.of()?;
        let event = record.event(of.tenant.as_ref())?;
        let position = Entry::new(&of, slot, self.ms, self.count).position(nth as u64);
        let at = Time::from_micros(self.at);
        let seq = self.first + nth as u64;
        let mut stored = Stored::new(position, at, record.fingerprint()?, event, of.aggregate, seq);
        let previous_ms = if nth == 0 { self.previous_ms } else { self.ms };
        stored.previous = (previous_ms > 0).then(|| Position::of(previous_ms));
        Ok(Some(stored))
    }
}

#[allow(clippy::trivially_copy_pass_by_ref)] // required by serde
fn is_zero(number: &u64) -> bool {
    *number == 0
}

/// The end of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Tail {
    /// The next free slot.
    pub(super) next: Slot,
    /// The last link's index time.
    pub(super) ms: u64,
    /// The last link's slot.
    pub(super) last: Option<Slot>,
}

impl Tail {
    pub(super) const EMPTY: Tail = Tail { next: Slot::FIRST, ms: 0, last: None };

    /// The aggregate's last seq.
    pub(super) fn head(&self) -> u64 {
        self.next.seq - 1
    }
}

impl Inner {
    /// The chain's end as this process last saw it.
    pub(super) fn seen_tail(&self, of: &AggregateOf) -> Option<Tail> {
        self.tails.lock().unwrap_or_else(PoisonError::into_inner).get(of).copied()
    }

    pub(super) fn see_tail(&self, of: &AggregateOf, tail: Tail) {
        let mut tails = self.tails.lock().unwrap_or_else(PoisonError::into_inner);
        if tails.len() >= TAILS_MAX && !tails.contains_key(of) {
            tails.clear(); // rare, and costs each aggregate one lookup
        }
        let seen = tails.entry(of.clone()).or_insert(tail);
        if tail.next > seen.next {
            *seen = tail;
        }
    }

    /// Looks up the chain's end: one listing, and one object if the chain has grown; the first time
    /// also a hint.
    pub(super) async fn tail(&self, of: &AggregateOf) -> Result<Tail> {
        loop {
            let seen = self.seen_tail(of);
            let from = match seen {
                Some(tail) => tail.next,
                None => self.hint(of).await?.unwrap_or(Slot::FIRST),
            };
            let Some(last) = self.last_slot(of, from).await? else {
                if seen.is_none() && from != Slot::FIRST {
                    return Err(Error::Corrupt(format!(
                        "{of} had an event with seq {} but no longer has one: was the object store restored from a backup?",
                        from.seq
                    )));
                }
                return Ok(seen.unwrap_or(Tail::EMPTY));
            };
            if let Some(link) = self.link(of, last).await? {
                let tail = link.tail(last);
                self.see_tail(of, tail);
                return Ok(tail);
            }
        }
    }

    async fn last_slot(&self, of: &AggregateOf, from: Slot) -> Result<Option<Slot>> {
        let mut after = name::chain_from(of, from);
        let mut last = None;
        loop {
            let listed = self.objects.list(&name::chain(of), &after, PAGE).await?;
            let Some(end) = listed.last() else { return Ok(last) };
            last = Some(name::slot_of(&end.name)?);
            if listed.len() < PAGE {
                return Ok(last);
            }
            after.clone_from(&end.name);
        }
    }

    /// A slot that was once the chain's last.
    async fn hint(&self, of: &AggregateOf) -> Result<Option<Slot>> {
        if let Some(allocator) = &self.allocator {
            return self.complete(allocator.as_ref(), of).await;
        }
        let Some(body) = self.objects.get(&name::head(of)).await? else { return Ok(None) };
        let slot = std::str::from_utf8(&body).ok().and_then(|text| name::slot_of(text).ok());
        Ok(slot)
    }

    /// A slot up to which everything was swept: a hint left by the last sweep.
    async fn floor(&self, of: &AggregateOf) -> Result<Option<Slot>> {
        let Some(body) = self.objects.get(&name::floor(&name::chain(of))).await? else { return Ok(None) };
        Ok(std::str::from_utf8(&body).ok().and_then(|text| name::slot_of(text).ok()))
    }

    /// Occasionally writes a hint. It only saves time, so failures are ignored.
    pub(super) async fn leave_hint(&self, of: &AggregateOf, at: Slot, count: u64) {
        if self.allocator.is_none() && at.seq / HINT_EVERY != (at.seq + count) / HINT_EVERY {
            let _ = self.objects.put(&name::head(of), name::link(of, at).into()).await;
        }
    }

    /// The link at a slot.
    pub(super) async fn link(&self, of: &AggregateOf, slot: Slot) -> Result<Option<Link>> {
        let Some(link) = self.link_named(&name::link(of, slot)).await? else { return Ok(None) };
        if link.of()? != *of {
            return Err(Error::Corrupt(format!(
                "{of} and {} share a name in the object store",
                link.aggregate
            )));
        }
        Ok(Some(link))
    }

    pub(super) async fn link_named(&self, name: &str) -> Result<Option<Link>> {
        let Some(body) = self.objects.get(name).await? else { return Ok(None) };
        self.has_read(body.len());
        let link = serde_json::from_slice(&body);
        link.map(Some).map_err(|e| Error::Corrupt(format!("{name} is not part of a chain: {e}")))
    }

    /// The taken slots from `from` on, at most `limit`.
    pub(super) async fn slots(&self, of: &AggregateOf, from: Slot, limit: usize) -> Result<Vec<Slot>> {
        let listed = self.objects.list(&name::chain(of), &name::chain_from(of, from), limit).await?;
        listed.iter().map(|object| name::slot_of(&object.name)).collect()
    }

    /// The events with seq ≥ `from`.
    pub(super) async fn events_from(&self, of: &AggregateOf, from: u64, limit: usize) -> Result<Page> {
        let from = from.max(1);
        // The append that contains `from` begins less than `EVENTS_MAX` before it.
        let mut begin = Slot { seq: from.saturating_sub(EVENTS_MAX - 1).max(1), void: 0 };
        let mut page = Filling::new(limit, self.settings.page_bytes_max);
        let mut looked = false;
        while !page.is_full() {
            let mut slots = self.slots(of, begin, PAGE).await?;
            let full = slots.len() == PAGE;
            let Some(end) = slots.last().copied() else { break };
            let inside = slots.partition_point(|slot| slot.seq <= from).saturating_sub(1);
            slots.drain(..inside);
            let first = self.links(of, &slots[..1]).await?;
            if !looked && first.iter().all(|(_, link)| link.is_empty()) {
                looked = true;
                if let Some(floor) = self.floor(of).await?.filter(|floor| *floor > slots[0]) {
                    begin = floor; // skips what may be thousands of swept links
                    continue;
                }
            }
            fill(&mut page, &first, from)?;
            let mut done = 1;
            while done < slots.len() && !page.is_full() {
                let count = self.at_once().min(limit - page.len()).min(slots.len() - done);
                fill(&mut page, &self.links(of, &slots[done..done + count]).await?, from)?;
                done += count;
            }
            if !full {
                break;
            }
            begin = Slot { seq: end.seq, void: end.void + 1 };
        }
        Ok(page.done())
    }
}

/// Adds events to a page until it is full.
fn fill(page: &mut Filling, links: &[(Slot, Link)], from: u64) -> Result<()> {
    for (slot, link) in links {
        for (nth, _) in link.left() {
            if page.is_full() {
                return Ok(());
            }
            if link.first + nth as u64 >= from
                && let Some(stored) = link.stored(*slot, nth)?
            {
                page.take(stored);
            }
        }
    }
    Ok(())
}
