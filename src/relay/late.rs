//! Journals whose read may pass an event: what it passed is brought in, and nothing of an aggregate goes before what precedes it.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::RelaySettings;
use super::behind::{Waiters, aggregate_of};
use super::dedup::Known;
use crate::error::Result;
use crate::id::{EventId, Tenant};
use crate::journal::{AggregateOf, Filling, Journal, PAGE_BYTES_MAX, Page, Position, ReadBatch, Stored};

/// So many late events are known by their ids at most.
const LATE_MAX: usize = 100_000;
/// So many predecessors are asked for at once.
const BACK: u64 = 50;

/// What `read` has passed.
struct Passed {
    /// The first of it, as much as makes a batch. What is held back is left out: it would fill every batch.
    events: Page,
    /// All of it, up to a position: what lies there and is not among it is known to be on the bus.
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

/// What is remembered between two looks.
#[derive(Debug, Default)]
pub(super) struct LateEvents {
    /// Where the lookback goes on.
    cursor: Position,
    /// The last seq on the bus of aggregates lately published.
    seqs: HashMap<AggregateOf, u64>,
}

impl LateEvents {
    pub(super) fn published(&mut self, stored: &Stored, max: usize) {
        if self.seqs.len() > 2 * max {
            self.seqs.clear(); // asked for again
        }
        if let Some(of) = aggregate_of(stored) {
            let last = self.seqs.entry(of).or_default();
            *last = stored.seq.max(*last);
        }
    }

    pub(super) fn forget(&mut self, of: &AggregateOf) {
        self.seqs.remove(of);
    }

    #[allow(clippy::too_many_arguments)] // all of what a relay knows
    /// A batch after `position`, completed: first what was passed, then the batch, each aggregate's events by seq and none left out.
    /// `read` came first, so that whatever precedes one of its events is there by now.
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

    /// Some of what lies behind the checkpoint and is not known to be on the bus. Without a memory of what is, everything would be
    /// unknown each time: then there is no lookback.
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

    /// Each aggregate's events by seq, with what is missing before or between them.
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
            // Those that are not there any more were swept, which only what is out is.
            before = if out.is_some() || missing.is_empty() { 1 } else { from };
            all.extend(missing.into_iter().map(|stored| (stored.seq, stored)));
        }
        Ok(())
    }
}

/// Those events of an aggregate from one seq up to, and without, another that are wanted.
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
