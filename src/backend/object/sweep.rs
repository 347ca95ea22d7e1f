//! Removing what is published, and counting.
//!
//! Ids go first, then the events, then their entry in the index: killed in between, the next sweep finds the entry and goes on. The
//! last link of a chain stays, without its events: it is what the next number follows from.

use std::collections::{BTreeMap, HashSet};

use super::chain::{Link, PAGE};
use super::ids::json;
use super::journal::Inner;
use super::name::{self, Entry, Slot};
use crate::clock::Time;
use crate::crash_point;
use crate::error::Result;
use crate::id::EventId;
use crate::journal::{JournalStat, JournalSweep, Position, RelayState, is_behind, swept_up_to};

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
            for entry in name::entries(&listed)? {
                if entry.position(entry.gone) > up_to {
                    return Ok(swept);
                }
                let link = self.link_named(&entry.link()).await?;
                let ripe = link.as_ref().map_or(Ok(0), |link| ripe(link, &entry, &up_to, cutoff, &relays))?;
                let take = ripe.min(terms.batch_max as u64 - swept);
                if !terms.dry_run && (take > 0 || link.as_ref().is_none_or(|link| link.events.is_empty())) {
                    self.remove_first(&entry, link, take).await?;
                }
                swept += take;
                if swept == terms.batch_max as u64 {
                    return Ok(swept);
                }
            }
            match listed.last() {
                Some(last) if listed.len() == PAGE => after.clone_from(&last.name),
                _ => return Ok(swept),
            }
        }
    }

    /// Removes the first events that are left of an append; with the last of them, its entry.
    async fn remove_first(&self, entry: &Entry, link: Option<Link>, take: u64) -> Result<()> {
        if let Some(mut link) = link {
            let of = link.of()?;
            let take = take as usize;
            for (record, number) in link.events.iter().zip(&link.intents).take(take) {
                self.forget(of.tenant.as_ref(), &EventId::new(&record.id)?, *number).await?;
            }
            crash_point!("journal.object.sweep_ids");
            link.events.drain(..take);
            link.intents.drain(..take);
            link.gone += take as u64;
            let left = link.events.len();
            let behind = Slot { seq: entry.slot.seq, void: entry.slot.void + 1 };
            if left > 0 || self.slots(&of, behind, 1).await?.is_empty() {
                self.objects.put(&entry.link(), json(&link)?).await?;
            } else {
                self.objects.delete(&entry.link()).await?;
            }
            crash_point!("journal.object.sweep_link");
            if left > 0 {
                let rest = Entry { gone: link.gone, ..entry.clone() };
                self.objects.put(&rest.name(), bytes::Bytes::new()).await?;
            }
        }
        self.objects.delete(&entry.name()).await
    }

    pub(super) async fn stat(&self) -> Result<JournalStat> {
        let mut stat = JournalStat { exact: true, ..JournalStat::default() };
        let mut indexed = HashSet::new();
        let mut after = name::INDEX.to_owned();
        let mut names = 0;
        loop {
            let listed = self.objects.list(name::INDEX, &after, PAGE).await?;
            for entry in name::entries(&listed)? {
                if names == 0 {
                    let link = self.link_named(&entry.link()).await?;
                    stat.oldest_at = link.map(|link| Time::from_micros(link.at));
                }
                names += 1;
                stat.events += entry.count - entry.gone;
                stat.last = Some(entry.position(entry.count.saturating_sub(1)));
                indexed.insert(entry.chain);
            }
            stat.exact = names < COUNTED_MAX;
            match listed.last() {
                Some(last) if listed.len() == PAGE && stat.exact => after.clone_from(&last.name),
                _ => break,
            }
        }
        let (swept, all) = self.count_swept(&indexed).await?;
        stat.aggregates = indexed.len() as u64 + swept;
        stat.exact &= all;
        Ok(stat)
    }

    /// How many chains there are besides those in the index: all their events were swept. And whether that is all.
    async fn count_swept(&self, indexed: &HashSet<String>) -> Result<(u64, bool)> {
        let mut others: BTreeMap<String, String> = BTreeMap::new();
        let (mut names, mut all) = (0, false);
        let mut after = name::CHAINS.to_owned();
        while names < COUNTED_MAX && !all {
            let listed = self.objects.list(name::CHAINS, &after, PAGE).await?;
            names += listed.len();
            all = listed.len() < PAGE;
            for object in listed {
                let chain = object.name.rfind('/').map_or("", |at| &object.name[..=at]);
                if !indexed.contains(chain) {
                    others.insert(chain.to_owned(), object.name.clone());
                }
                after = object.name;
            }
        }
        let mut count = 0;
        for last in others.values() {
            // Nothing but voids is no aggregate: someone was about to begin it.
            let began = name::slot_of(last)?.seq > 1;
            count += u64::from(began || self.link_named(last).await?.is_some_and(|link| link.count > 0));
        }
        Ok((count, all))
    }
}

/// How many of an append's events may go: always the first ones, since relays pass them in order and hold back what follows.
fn ripe(link: &Link, entry: &Entry, up_to: &Position, cutoff: Time, relays: &[RelayState]) -> Result<u64> {
    if Time::from_micros(link.at) >= cutoff {
        return Ok(0);
    }
    let mut ripe = 0;
    for (nth, _) in link.left() {
        match link.stored(entry.slot, nth)? {
            Some(stored) if stored.position <= *up_to && !is_behind(relays, &stored) => ripe += 1,
            _ => break,
        }
    }
    Ok(ripe)
}
