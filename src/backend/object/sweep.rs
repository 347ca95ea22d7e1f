//! Removing what is published, and counting.
//!
//! Ids go first, then the events, then their entry in the index: killed in between, the next sweep finds the entry and goes on. The
//! last link of a chain stays, without its events: it is what the next number follows from.

use std::collections::HashSet;

use super::chain::{Link, PAGE};
use super::ids::json;
use super::journal::Inner;
use super::name::{self, Entry, Slot};
use crate::clock::Time;
use crate::crash_point;
use crate::error::Result;
use crate::id::EventId;
use crate::journal::{JournalStat, JournalSweep, RelayState, is_behind, swept_up_to};

/// Beyond so many names a count is an estimate: what was counted, and not exact.
const COUNTED_MAX: usize = 100_000;

impl Inner {
    pub(super) async fn sweep(&self, terms: &JournalSweep) -> Result<u64> {
        let relays = self.relays().await?;
        let Some(up_to) = swept_up_to(&relays) else { return Ok(0) };
        let cutoff = self.objects.now().await?.about.minus(terms.older_than);
        let mut swept = 0;
        let mut after = name::INDEX.to_owned();
        loop {
            let listed = self.objects.list(name::INDEX, &after, PAGE).await?;
            for object in &listed {
                let entry = Entry::parse(&object.name)?;
                let enough = swept > 0 && swept + entry.count > terms.batch_max as u64;
                if enough || entry.position(entry.count - 1) > up_to {
                    return Ok(swept);
                }
                let link = self.link_named(&entry.link()).await?;
                if let Some(link) = &link
                    && !may_go(link, entry.slot, cutoff, &relays)?
                {
                    continue;
                }
                let events = link.as_ref().map_or(0, |link| link.events.len() as u64);
                if !terms.dry_run {
                    self.remove_entry(&entry, link).await?;
                }
                swept += events;
            }
            match listed.last() {
                Some(last) if listed.len() == PAGE => after.clone_from(&last.name),
                _ => return Ok(swept),
            }
        }
    }

    async fn remove_entry(&self, entry: &Entry, link: Option<Link>) -> Result<()> {
        if let Some(mut link) = link {
            let of = link.of()?;
            for (record, number) in link.events.iter().zip(&link.intents) {
                self.forget(of.tenant.as_ref(), &EventId::new(&record.id)?, *number).await?;
            }
            crash_point!("journal.object.sweep_ids");
            let behind = Slot { seq: entry.slot.seq, void: entry.slot.void + 1 };
            if self.slots(&of, behind, 1).await?.is_empty() {
                link.events.clear();
                link.intents.clear();
                self.objects.put(&entry.link(), json(&link)?).await?;
            } else {
                self.objects.delete(&entry.link()).await?;
            }
            crash_point!("journal.object.sweep_link");
        }
        self.objects.delete(&entry.name()).await
    }

    pub(super) async fn stat(&self) -> Result<JournalStat> {
        let mut stat = JournalStat { exact: true, ..JournalStat::default() };
        let mut aggregates = HashSet::new();
        let mut after = name::INDEX.to_owned();
        let mut names = 0;
        loop {
            let listed = self.objects.list(name::INDEX, &after, PAGE).await?;
            for object in &listed {
                let entry = Entry::parse(&object.name)?;
                if names == 0 {
                    let link = self.link_named(&entry.link()).await?;
                    stat.oldest_at = link.map(|link| Time::from_micros(link.at));
                }
                names += 1;
                stat.events += entry.count;
                stat.last = Some(entry.position(entry.count.saturating_sub(1)));
                aggregates.insert(entry.chain);
            }
            stat.exact = names < COUNTED_MAX;
            match listed.last() {
                Some(last) if listed.len() == PAGE && stat.exact => after.clone_from(&last.name),
                _ => break,
            }
        }
        stat.aggregates = aggregates.len() as u64;
        Ok(stat)
    }
}

/// Whether all events of an append may go: they go together.
fn may_go(link: &Link, slot: Slot, cutoff: Time, relays: &[RelayState]) -> Result<bool> {
    if Time::from_micros(link.at) >= cutoff {
        return Ok(false);
    }
    for nth in 0..link.events.len() {
        if let Some(stored) = link.stored(slot, nth)?
            && is_behind(relays, &stored)
        {
            return Ok(false);
        }
    }
    Ok(true)
}
