//! One pass over all places. Each step may be repeated, and ends the same.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use hapax::analytics::{Block, Change, ReadModel, Source, Version};
use hapax::bus::Partition;
use hapax::config::Config;
use hapax::erase::Subject;
use hapax::ledger::{Entry, Filter, Intervene, Intervention, State};
use hapax::projection::Projection;
use hapax::records::{Delete, List, Name, Record, Scan};
use hapax::{Error, Time, Topic};

use super::places::Places;
use super::projected;
use crate::failure::Failure;

/// How many rows are read or applied at once.
pub const PAGE: usize = 500;
/// How often a record is deleted that somebody writes to.
const ATTEMPTS_MAX: u32 = 20;
const PAUSE: Duration = Duration::from_millis(200);

/// How much there is, by place, in the order in which they were found.
#[derive(Debug, Default)]
pub struct Counts(pub Vec<(String, u64)>);

impl Counts {
    fn add(&mut self, place: &str, rows: u64) {
        match self.0.iter_mut().find(|(known, _)| known == place) {
            Some((_, sum)) => *sum += rows,
            None => self.0.push((place.to_owned(), rows)),
        }
    }

    pub fn total(&self) -> u64 {
        self.0.iter().map(|(_, rows)| rows).sum()
    }

    pub fn add_all(&mut self, other: &Counts) {
        other.0.iter().for_each(|(place, rows)| self.add(place, *rows));
    }
}

/// Whether anybody still has what was erased on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Settled {
    Yes,
    /// The relay or the read model has not passed the deletions.
    Passing,
    /// A rebuild has not ended, which says this: whoever fills its place may have read what was erased before it was.
    Rebuilding(String),
}

/// Who erases what.
pub struct Work<'w> {
    pub places: &'w Places,
    pub config: &'w Config,
    pub by: &'w str,
}

impl Work<'_> {
    /// How much there is. Changes nothing.
    pub async fn count(&self, of: &Subject) -> Result<Counts, Failure> {
        let of = &self.with_events(of).await?;
        let mut counts = Counts::default();
        if self.places.records.is_some() {
            let mut records = 0;
            self.each_record(of, async |_| {
                records += 1;
                Ok(())
            })
            .await?;
            counts.add("records", records);
        }
        for eraser in &self.places.erasers {
            eraser.count(of).await?.iter().for_each(|found| counts.add(found.place, found.rows));
        }
        if self.places.ledger.is_some() {
            counts.add("held events", self.held(of).await?.len() as u64);
        }
        if let Some(model) = &self.places.model {
            counts.add("read model", model.erasable(of).await?);
        }
        if !self.places.projections.is_empty() {
            let heads = self.heads(of).await?;
            for projection in &self.places.projections {
                let there = projected::with_content(&**projection, of, &heads).await?;
                counts.add(&self.name(&**projection), there.len() as u64);
            }
        }
        Ok(counts)
    }

    /// Whether anything of it was ever here.
    pub async fn knows(&self, of: &Subject) -> Result<bool, Failure> {
        for eraser in &self.places.erasers {
            if eraser.knows(of).await? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Erases everywhere.
    pub async fn erase(&self, of: &Subject) -> Result<Counts, Failure> {
        let mut counts = Counts::default();
        if let Some(records) = &self.places.records {
            let mut deleted = 0;
            self.each_record(of, async |record| {
                self.delete(&**records, of, record).await?;
                deleted += 1;
                Ok(())
            })
            .await?;
            counts.add("records", deleted);
        }
        let of = &self.with_events(of).await?;
        for eraser in &self.places.erasers {
            eraser.erase(of).await?.iter().for_each(|found| counts.add(found.place, found.rows));
        }
        counts.add("held events", self.drop_held(of).await?);
        let heads = self.heads(of).await?;
        if let Some(model) = &self.places.model {
            // It may be of another generation than the one that is configured, and takes no other.
            let generation = model.generation().await?.unwrap_or(self.config.analytics.generation);
            let deletions = self.deletions(&heads, generation).await?;
            counts.add("read model", self.erase_rows(&**model, of, &heads, &deletions).await?);
        }
        if !self.places.projections.is_empty() {
            let deletions = self.deletions(&heads, self.config.analytics.generation).await?;
            for projection in &self.places.projections {
                let erased = self.erase_projected(&**projection, of, &heads, &deletions).await?;
                counts.add(&self.name(&**projection), erased);
            }
        }
        Ok(counts)
    }

    /// What a projection is called among the places: of several each by where it is.
    fn name(&self, projection: &dyn Projection) -> String {
        match self.places.projections.len() {
            1 => "projection".to_owned(),
            _ => format!("projection {}", projection.about()),
        }
    }

    /// Takes what was erased out of files; returns what could not be.
    pub async fn compact(&self) -> Result<Vec<String>, Failure> {
        let mut left = Vec::new();
        for eraser in &self.places.erasers {
            left.extend(eraser.compact().await?);
        }
        left.sort();
        left.dedup();
        Ok(left)
    }

    /// The subject with the ids of its events, by which ledgers find it.
    async fn with_events(&self, of: &Subject) -> Result<Subject, Failure> {
        let mut of = of.clone();
        let (Some(journal), Some(aggregate)) = (&self.places.journal, of.aggregate()?) else { return Ok(of) };
        let mut from = 1;
        loop {
            let page = journal.read_aggregate(of.tenant.as_ref(), &aggregate, from, PAGE).await?;
            let Some(last) = page.events.last() else { return Ok(of) };
            from = last.seq + 1;
            of.events.extend(page.events.iter().map(|stored| stored.event.id.clone()));
            if !page.more {
                return Ok(of);
            }
        }
    }

    /// Shows the records of the subject, also while they are being deleted.
    async fn each_record(
        &self,
        of: &Subject,
        mut show: impl AsyncFnMut(Record) -> Result<(), Failure>,
    ) -> Result<(), Failure> {
        let (Some(records), Some(_)) = (&self.places.records, of.tenant_id()) else { return Ok(()) };
        if let Some((module, id)) = &of.record {
            if !self.places.modules.contains(module) {
                return Ok(());
            }
            return match records.get(of.tenant.as_ref(), module, *id).await? {
                Some(record) => show(record).await,
                None => Ok(()),
            };
        }
        for module in &self.places.modules {
            let mut list = List::new(module.clone()).tenant(of.tenant.clone()).limit(PAGE);
            loop {
                let page = records.list(&list).await?;
                for record in page.records {
                    show(record).await?;
                }
                list = list.after(page.next);
                if page.next.is_none() {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Deletes a record, whatever seq it has by now.
    async fn delete(
        &self,
        records: &dyn hapax::records::Records,
        of: &Subject,
        mut record: Record,
    ) -> Result<(), Failure> {
        for _ in 0..ATTEMPTS_MAX {
            let delete = Delete::new(record.module.clone(), record.id, record.seq).tenant(of.tenant.clone());
            match records.delete(&delete).await {
                Ok(_) | Err(Error::NotFound(_)) => return Ok(()),
                Err(Error::Conflict { .. }) => {}
                Err(error) if error.is_retryable() => tokio::time::sleep(PAUSE).await,
                Err(error) => return Err(error.into()),
            }
            match records.get(of.tenant.as_ref(), &record.module, record.id).await? {
                Some(newer) => record = newer,
                None => return Ok(()),
            }
        }
        let message =
            format!("record {}/{} is written to all the time; run this again", record.module, record.id);
        Err(Failure::dependency("contended", message))
    }

    /// Entries of the subject whose bytes are held.
    async fn held(&self, of: &Subject) -> Result<Vec<Entry>, Failure> {
        let Some(ledger) = &self.places.ledger else { return Ok(Vec::new()) };
        let states = vec![State::Leased, State::Retry, State::Dead, State::Parked];
        let filter = Filter { tenant: Some(of.tenant.clone()), states, ..Filter::default() };
        let (aggregate, mut found, mut after) = (of.aggregate()?, Vec::new(), None);
        let key = aggregate.as_ref().map(|aggregate| aggregate.as_str().to_owned());
        let is_meant = |entry: &Entry| {
            let Some(body) = &entry.body else { return false };
            let Some(aggregate) = &aggregate else { return true };
            let said = body.headers.get("aggregate_id");
            entry.order.as_ref().is_some_and(|(of, _)| of == aggregate)
                || of.events.contains(&entry.identity.id)
                || said.is_some_and(|said| Some(said) == key.as_deref().map(str::as_bytes))
        };
        loop {
            let page = ledger.list(&filter, after.as_ref(), PAGE).await?;
            found.extend(page.entries.into_iter().filter(is_meant).map(|mut entry| {
                entry.row.body = None; // only its name is needed
                entry
            }));
            after = page.next;
            if after.is_none() {
                return Ok(found);
            }
        }
    }

    /// Drops them, as an operator would: the aggregates go on.
    async fn drop_held(&self, of: &Subject) -> Result<u64, Failure> {
        let Some(ledger) = &self.places.ledger else { return Ok(0) };
        let held = self.held(of).await?;
        for entry in &held {
            let mut intervene = Intervene {
                identity: entry.identity.clone(),
                time: crate::ledger::act::Target::of(entry).time,
                what: Intervention::Kill,
                by: self.by.to_owned(),
                reason: "erased".to_owned(),
                out_of_order: false,
                token: None,
                dry_run: false,
            };
            for what in [Intervention::Kill, Intervention::Drop] {
                intervene.what = what;
                match ledger.intervene(&intervene).await {
                    // It is dead already, or its worker has settled it meanwhile: then it is not held.
                    Ok(_) | Err(Error::Conflict { .. } | Error::NotFound(_)) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(held.len() as u64)
    }

    /// Every record that the journal has ever had of the subject, and the seq of its last event.
    async fn heads(&self, of: &Subject) -> Result<BTreeMap<Name, u64>, Failure> {
        let mut heads = BTreeMap::new();
        for eraser in &self.places.erasers {
            heads.extend(eraser.heads(of).await?);
        }
        Ok(heads)
    }

    /// The deletions of the records, as their last events say them.
    async fn deletions(&self, heads: &BTreeMap<Name, u64>, generation: u16) -> Result<Vec<Change>, Failure> {
        let mut deletions = Vec::with_capacity(heads.len());
        for (name, seq) in heads {
            if !self.is_there(name).await? {
                let version = Version::new(generation, *seq)?;
                deletions.push(self.deletion(name, version).await?);
            }
        }
        Ok(deletions)
    }

    /// Whether there is such a record. One that was written again meanwhile is not deleted: the next pass does it.
    async fn is_there(&self, name: &Name) -> Result<bool, Failure> {
        match &self.places.records {
            Some(records) if self.places.modules.contains(&name.module) => {
                let tenant = (!name.tenant.is_nil()).then(|| hapax::Tenant::new(name.tenant.to_string()));
                Ok(records.get(tenant.transpose()?.as_ref(), &name.module, name.id).await?.is_some())
            }
            _ => Ok(false),
        }
    }

    async fn deletion(&self, name: &Name, version: Version) -> Result<Change, Failure> {
        let now = match &self.places.journal {
            Some(journal) => journal.now().await?,
            None => Time::default(),
        };
        Ok(Change::deletion(name.clone(), version, now, self.topic()))
    }

    fn topic(&self) -> Topic {
        self.config.feed_settings().topic
    }

    /// The deletions first, then the older versions.
    async fn erase_rows(
        &self,
        model: &dyn ReadModel,
        of: &Subject,
        heads: &BTreeMap<Name, u64>,
        deletions: &[Change],
    ) -> Result<u64, Failure> {
        let before = model.erasable(of).await?;
        let known = model.partitions().await?;
        let partition = known.first().map(|known| known.partition.clone());
        let partition = partition.unwrap_or_else(|| Partition { topic: self.topic(), number: 0 });
        let count = known.iter().filter(|known| known.partition.topic == partition.topic).count();
        let partitions = i32::try_from(count.max(1)).unwrap_or(i32::MAX);
        let apply = async |changes: &[Change]| -> Result<(), Failure> {
            for changes in changes.chunks(PAGE) {
                let mut block = Block::aside(partition.clone(), partitions);
                block.changes = changes.to_vec();
                model.apply(&[block]).await?;
            }
            Ok(())
        };
        if before > 0 {
            apply(deletions).await?;
        }
        // Rows that no record has: of an older source, or under a higher generation.
        apply(&self.ghosts(model, of, heads).await?).await?;
        model.erase(of).await?;
        let after = model.erasable(of).await?;
        Ok(before.saturating_sub(after))
    }

    async fn ghosts(
        &self,
        model: &dyn ReadModel,
        of: &Subject,
        heads: &BTreeMap<Name, u64>,
    ) -> Result<Vec<Change>, Failure> {
        let Some(tenant) = of.tenant_id() else { return Ok(Vec::new()) };
        let module = of.record.as_ref().map(|(module, _)| module.clone());
        let mut scan = Scan::new(PAGE).tenant(Some(tenant)).module(module);
        let mut rows = HashMap::new();
        loop {
            let page = model.scan(&scan).await?;
            let Some(last) = page.last() else { break };
            scan.after = Some(last.name.clone());
            let is_meant = |name: &Name| of.record.as_ref().is_none_or(|(_, id)| *id == name.id);
            rows.extend(
                page.into_iter().filter(|row| is_meant(&row.name)).map(|row| (row.name, row.version)),
            );
        }
        let mut ghosts = Vec::new();
        for (name, version) in rows {
            if heads.get(&name).is_none_or(|head| *head >= version.seq()) && !self.is_there(&name).await? {
                let version = Version::new(version.generation(), version.seq() + 1)?;
                ghosts.push(self.deletion(&name, version).await?);
            }
        }
        Ok(ghosts)
    }

    /// The deletions, and those of what no deletion of the history reaches: a record of an older source, or one under
    /// a higher generation. Says how many records had content.
    async fn erase_projected(
        &self,
        projection: &dyn Projection,
        of: &Subject,
        heads: &BTreeMap<Name, u64>,
        deletions: &[Change],
    ) -> Result<u64, Failure> {
        let reached: HashMap<Name, Version> =
            deletions.iter().map(|change| (Name::of(change), change.version)).collect();
        let (mut changes, mut erased) = (deletions.to_vec(), 0);
        for (name, version) in projected::with_content(projection, of, heads).await? {
            let is_reached = reached.get(&name).is_some_and(|deletion| *deletion > version);
            if !is_reached && self.is_there(&name).await? {
                continue;
            }
            if !is_reached {
                let above = Version::new(version.generation(), version.seq() + 1)?;
                changes.push(self.deletion(&name, above).await?);
            }
            erased += 1;
        }
        projected::apply(projection, &changes).await?;
        Ok(erased)
    }

    /// Waits until nobody has what was erased on its way any more: no rebuild of the read model or of a projection runs
    /// that may have read it, the relay has published the deletions, and the read model has passed them.
    pub async fn settled(&self, of: &Subject, wait: Duration) -> Result<Settled, Failure> {
        let since = tokio::time::Instant::now();
        if let Some(model) = &self.places.model {
            while let Some(rebuild) = model.unfinished().await? {
                if since.elapsed() >= wait {
                    return Ok(Settled::Rebuilding(rebuild));
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        for projection in &self.places.projections {
            while let Some(rebuild) = projection.unfinished().await? {
                if since.elapsed() >= wait {
                    return Ok(Settled::Rebuilding(rebuild));
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        let Some(journal) = &self.places.journal else { return Ok(Settled::Yes) };
        if journal.capabilities().timed {
            return Ok(Settled::Yes);
        }
        let (at, position) = journal.horizon().await?;
        loop {
            let now = journal.now().await?;
            let relays = journal.relays().await?;
            let mut live = relays
                .iter()
                .filter(|relay| relay.owner.is_some() && relay.until.is_some_and(|until| until > now));
            let is_live = live.clone().next().is_some();
            let published = live.all(|relay| {
                relay.checkpoint.as_ref().is_some_and(|to| to.position >= position && to.behind.is_empty())
            });
            let streams = self.config.analytics.source == Source::Debezium;
            let passed = match &self.places.model {
                Some(model) if is_live || streams => {
                    let tenant = of.tenant_id().unwrap_or_default();
                    model.last_sync_at(tenant).await?.is_some_and(|synced| synced >= at)
                }
                _ => true,
            };
            if published && passed {
                return Ok(Settled::Yes);
            }
            if since.elapsed() >= wait {
                return Ok(Settled::Passing);
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}
