//! Removes published events, and counts.
//!
//! A sweep removes the ids first, then the events, then their entry in the index. If it is killed
//! in between, the next sweep finds the entry and continues.
//!
//! A link stays for ever, without its events: about 200 bytes per append. If its name became free,
//! a writer that has not looked since could take the slot a second time, and with it the number.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::append::millis;
use super::chain::{Link, PAGE};
use super::ids::json;
use super::journal::Inner;
use super::name::{self, Entry};
use crate::clock::Time;
use crate::crash_point;
use crate::error::Result;
use crate::id::EventId;
use crate::journal::{JournalStat, JournalSweep, Position, RelayState, is_behind, swept_up_to};

/// Beyond this many names counting stops, and the result is not exact.
const COUNTED_MAX: usize = 100_000;

/// How far an entry's index time may be ahead of its append's time.
pub(super) const AHEAD_MS: u64 = 10_000;

/// After this many removals the relays are read again.
const LOOK_EVERY: u32 = 100;

/// How far the relays have come.
#[derive(Debug)]
struct Limits {
    relays: Vec<RelayState>,
    up_to: Position,
    /// For each chain that a relay holds back, the first seq that it needs.
    held: HashMap<String, u64>,
}

impl Limits {
    /// `None` if there are no relays, so that nothing is published.
    fn of(relays: Vec<RelayState>) -> Result<Option<Self>> {
        let Some(up_to) = swept_up_to(&relays) else { return Ok(None) };
        let mut held = HashMap::new();
        for behind in relays.iter().filter_map(|relay| relay.checkpoint.as_ref()).flat_map(|c| &c.behind) {
            let next = held.entry(name::chain(&behind.of()?)).or_insert(behind.next);
            *next = behind.next.min(*next);
        }
        Ok(Some(Limits { relays, up_to, held }))
    }

    /// Whether relays have only moved forward since, and none is missing.
    fn still_true(&self, now: &Limits) -> bool {
        let position = |relay: &RelayState| relay.checkpoint.as_ref().map(|c| c.position.clone());
        now.up_to >= self.up_to
            && self.relays.iter().all(|before| {
                let same = now.relays.iter().find(|relay| relay.relay == before.relay);
                same.is_some_and(|relay| position(relay) >= position(before))
            })
    }

    /// Whether a relay holds back all events of an append.
    fn hold(&self, entry: &Entry) -> bool {
        self.held.get(&entry.chain).is_some_and(|next| entry.slot.seq + entry.gone >= *next)
    }

    /// How many of an append's events may be removed. These are always its first ones, since relays
    /// pass them in order and hold back the rest.
    fn expired(&self, link: &Link, entry: &Entry, cutoff: Time) -> Result<u64> {
        if Time::from_micros(link.at) >= cutoff {
            return Ok(0);
        }
        let mut expired = 0;
        for (nth, _) in link.left() {
            match link.stored(entry.slot, nth)? {
                Some(stored) if stored.position <= self.up_to && !is_behind(&self.relays, &stored) => {
                    expired += 1;
                }
                _ => break,
            }
        }
        Ok(expired)
    }
}

/// How far each chain was swept: the name of its last link before which all links are empty, itself
/// included.
#[derive(Debug, Default)]
struct Floors(BTreeMap<String, (String, bool)>);

impl Floors {
    /// Adds the next entry of a chain. The index has the entries of a chain in the chain's order.
    fn pass(&mut self, entry: &Entry, empty: bool) {
        let (link, open) = self.0.entry(entry.chain.clone()).or_insert_with(|| (String::new(), true));
        *open &= empty;
        if *open {
            *link = entry.link();
        }
    }
}

impl Inner {
    pub(super) async fn sweep(&self, settings: &JournalSweep) -> Result<u64> {
        let mut floors = Floors::default();
        let swept = self.sweep_index(settings, &mut floors).await;
        if !settings.dry_run && swept.as_ref().is_ok_and(|swept| *swept < settings.batch_max as u64) {
            self.collect(settings.older_than).await?;
        }
        if !settings.dry_run {
            for (chain, (link, _)) in floors.0.into_iter().filter(|(_, (link, _))| !link.is_empty()) {
                let _ = self.objects.put(&name::floor(&chain), link.into()).await; // only a hint
            }
        }
        swept
    }

    async fn sweep_index(&self, settings: &JournalSweep, floors: &mut Floors) -> Result<u64> {
        let Some(mut limits) = Limits::of(self.relays().await?)? else { return Ok(0) };
        let cutoff = self.objects.now().await?.about.minus(settings.older_than);
        let young = millis(cutoff) + AHEAD_MS;
        let (mut swept, mut removed) = (0, 0);
        let mut after = name::INDEX.to_owned();
        loop {
            let listed = self.objects.list(name::INDEX, &after, PAGE).await?;
            for entry in name::entries(&listed)? {
                if entry.position(entry.gone) > limits.up_to || entry.ms > young {
                    return Ok(swept); // so is everything after it
                }
                if limits.hold(&entry) {
                    floors.pass(&entry, false);
                    continue;
                }
                if removed == LOOK_EVERY {
                    removed = 0;
                    match Limits::of(self.relays().await?)? {
                        Some(now) if limits.still_true(&now) => limits = now,
                        // A relay went back or was added: leave the rest to the next sweep.
                        _ => return Ok(swept),
                    }
                }
                let link = self.link_named(&entry.link()).await?;
                let expired = link.as_ref().map_or(Ok(0), |link| limits.expired(link, &entry, cutoff))?;
                let take = expired.min(settings.batch_max as u64 - swept);
                let empty = link.as_ref().is_none_or(|link| link.events.len() as u64 == take);
                if !settings.dry_run && (take > 0 || empty) {
                    self.remove_first(&entry, link, take).await?;
                    removed += 1;
                }
                floors.pass(&entry, empty);
                swept += take;
                if swept == settings.batch_max as u64 {
                    return Ok(swept);
                }
            }
            match listed.last() {
                Some(last) if listed.len() == PAGE => after.clone_from(&last.name),
                _ => return Ok(swept),
            }
        }
    }

    /// Removes the first remaining events of an append, and with the last of them its entry.
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
            if take > 0 {
                self.objects.put(&entry.link(), json(&link)?).await?;
            }
            crash_point!("journal.object.sweep_link");
            if !link.is_empty() {
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

    /// How many chains outside the index have had events, all swept; and whether all chains were
    /// counted.
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
            // A chain of voids only is not an aggregate: its first append was never committed.
            let began = name::slot_of(last)?.seq > 1;
            count += u64::from(began || self.link_named(last).await?.is_some_and(|link| link.count > 0));
        }
        Ok((count, all))
    }
}
