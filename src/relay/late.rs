//! For journals whose `read` may pass an event: adds the events it passed, and publishes none
//! before its predecessors.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::RelaySettings;
use super::behind::{Waiters, aggregate_of};
use super::dedup::Known;
use crate::error::Result;
use crate::id::{EventId, Tenant};
use crate::journal::{AggregateOf, Filling, Journal, PAGE_BYTES_MAX, Page, Position, ReadBatch, Stored};

/// The maximum number of late events whose ids are kept.
const LATE_MAX: usize = 100_000;
/// How many predecessors are read at a time.
const BACK: u64 = 50;

/// Events that `read` has passed.
struct Passed {
    /// The first of them, up to a batch. Leaves out events that are held back, since they would
    /// fill every batch.
    events: Page,
    /// The ids of all of them up to `up_to`: any other event up to there is known to be on the bus.
    ids: HashSet<(Option<Tenant>, EventId)>,
    up_to: Position,
}

async fn passed(
    journal: &dyn Journal,
    settings: &RelaySettings,
    waiters: &Waiters,
    position: &Position,
) -> Result<Passed> {
    let mut events = Filling::new(settings.batch_max, PAGE_BYTES_MAX);
    let (mut ids, mut after) = (HashSet::new(), Position::START);
    loop {
        let page = journal.late(position, &after, settings.batch_max).await?;
        for stored in page.events {
            after = stored.position.clone();
            ids.insert(id(&stored));
            if !waiters.holds_back(&stored) {
                events.take(stored);
            }
        }
        let is_all = !page.more;
        if is_all || ids.len() >= LATE_MAX {
            let up_to = if is_all { position.clone() } else { after };
            return Ok(Passed { events: events.done(), ids, up_to });
        }
    }
}

/// State kept from one batch to the next.
#[derive(Debug, Default)]
pub(super) struct LateEvents {
    /// Where the lookback continues.
    cursor: Position,
    /// The last published seq of recently published aggregates.
    seqs: HashMap<AggregateOf, u64>,
}

impl LateEvents {
    pub(super) fn published(&mut self, stored: &Stored, max: usize) {
        if self.seqs.len() > 2 * max {
            self.seqs.clear(); // will be read again
        }
        if let Some(of) = aggregate_of(stored) {
            let last = self.seqs.entry(of).or_default();
            *last = stored.seq.max(*last);
        }
    }

    pub(super) fn forget(&mut self, of: &AggregateOf) {
        self.seqs.remove(of);
    }

    #[allow(clippy::too_many_arguments)] // needs all of the relay's state
    /// Completes the batch after `position`: first the events that `read` passed, then the batch,
    /// with each aggregate's events by seq and without gaps. The caller reads the batch first, so
    /// that by now all predecessors of its events are in the journal.
    pub(super) async fn complete(
        &mut self,
        journal: &dyn Journal,
        settings: &RelaySettings,
        known: &Known,
        waiters: &Waiters,
        position: &Position,
        mut batch: ReadBatch,
    ) -> Result<ReadBatch> {
        let Passed { events, ids: unpublished, up_to } = passed(journal, settings, waiters, position).await?;
        let Page { events: mut late, more, .. } = events;
        if more {
            batch = ReadBatch::new(late, position.clone(), false).more(true);
        } else {
            let looked = self.look_back(journal, settings, known, position).await?;
            let mut seen = unpublished.clone();
            late.extend(looked.into_iter().filter(|stored| seen.insert(id(stored))));
            batch.events.retain(|stored| !seen.contains(&id(stored)));
            late.append(&mut batch.events);
            batch.events = late;
        }
        let is_out = |stored: &Stored| {
            known.has(stored) || (stored.position <= up_to && !unpublished.contains(&id(stored)))
        };
        batch.events = self.in_order(journal, batch.events, &is_out).await?;
        Ok(batch)
    }

    /// Some events before the checkpoint that are not known to be on the bus. Without a memory of
    /// published events every event would be unknown each time, so there is no lookback then.
    async fn look_back(
        &mut self,
        journal: &dyn Journal,
        settings: &RelaySettings,
        known: &Known,
        position: &Position,
    ) -> Result<Vec<Stored>> {
        let back = u64::try_from(settings.lookback.as_millis()).unwrap_or(u64::MAX);
        if back == 0 || settings.lookback_max == 0 || settings.dedup_max == 0 {
            return Ok(Vec::new());
        }
        let mut from = Position::of(position.number().saturating_sub(back));
        from = from.max(known.forgotten_up_to().unwrap_or_default());
        if self.cursor < from || self.cursor >= *position {
            self.cursor = from;
        }
        let looked = journal.read(&self.cursor, settings.lookback_max).await?;
        self.cursor = if looked.events.is_empty() { position.clone() } else { looked.next };
        let unknown = |stored: &Stored| stored.position <= *position && !known.has(stored);
        Ok(looked.events.into_iter().filter(unknown).collect())
    }

    /// Sorts each aggregate's events by seq and adds those missing before or between them.
    async fn in_order(
        &self,
        journal: &dyn Journal,
        events: Vec<Stored>,
        is_out: &(dyn Fn(&Stored) -> bool + Sync),
    ) -> Result<Vec<Stored>> {
        let mut aggregates: Vec<AggregateOf> = Vec::new();
        let mut by_seq: HashMap<AggregateOf, BTreeMap<u64, Stored>> = HashMap::new();
        for stored in events {
            let Some(of) = aggregate_of(&stored) else { continue };
            let all = by_seq.entry(of.clone()).or_default();
            if all.is_empty() {
                aggregates.push(of);
            }
            all.insert(stored.seq, stored);
        }
        let mut ordered = Vec::new();
        for of in aggregates {
            let Some(mut all) = by_seq.remove(&of) else { continue };
            self.fill(journal, &of, &mut all, is_out).await?;
            ordered.extend(all.into_values());
        }
        Ok(ordered)
    }

    async fn fill(
        &self,
        journal: &dyn Journal,
        of: &AggregateOf,
        all: &mut BTreeMap<u64, Stored>,
        is_out: &(dyn Fn(&Stored) -> bool + Sync),
    ) -> Result<()> {
        let (Some(&first), Some(&last)) = (all.keys().next(), all.keys().next_back()) else { return Ok(()) };
        let gapless = last - first + 1 == all.len() as u64;
        let follows = first == 1 || self.seqs.get(of).is_some_and(|seq| seq + 1 >= first);
        if gapless && follows {
            return Ok(());
        }
        if !gapless {
            for stored in between(journal, of, first, last, &|stored| !is_out(stored)).await? {
                all.entry(stored.seq).or_insert(stored);
            }
        }
        let mut before = if follows { 1 } else { first };
        while before > 1 {
            let from = before.saturating_sub(BACK).max(1);
            let mut page = between(journal, of, from, before, &|_| true).await?;
            let out = page.iter().rposition(is_out);
            let missing = page.split_off(out.map_or(0, |place| place + 1));
            // Missing events were swept, and a sweep removes only published events.
            before = if out.is_some() || missing.is_empty() { 1 } else { from };
            all.extend(missing.into_iter().map(|stored| (stored.seq, stored)));
        }
        Ok(())
    }
}

/// The events of an aggregate with seqs from `from` to before `to` that pass a filter.
async fn between(
    journal: &dyn Journal,
    of: &AggregateOf,
    from: u64,
    to: u64,
    wanted: &(dyn Fn(&Stored) -> bool + Sync),
) -> Result<Vec<Stored>> {
    let (mut from, mut found) = (from, Vec::new());
    while from < to {
        let limit = usize::try_from(to - from).unwrap_or(usize::MAX);
        let page = journal.read_aggregate(of.tenant.as_ref(), &of.aggregate, from, limit).await?;
        from = page.events.last().filter(|_| page.more).map_or(to, |last| last.seq + 1);
        found.extend(page.events.into_iter().filter(|stored| stored.seq < to && wanted(stored)));
    }
    Ok(found)
}

fn id(stored: &Stored) -> (Option<Tenant>, EventId) {
    (stored.event.tenant.clone(), stored.event.id.clone())
}
