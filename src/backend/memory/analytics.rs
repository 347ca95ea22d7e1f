//! A read model in the memory of this process, for tests.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;

use crate::analytics::{
    Block, Change, Groups, ListPage, PartitionSync, ReadModel, RejectedEntry, Row, Selection, Synced, Tally,
    Tallying, Uuid, Version, earliest, held_back,
};
use crate::bus::Partition;
use crate::clock::{Clock, SystemClock, Time};
use crate::error::Result;
use crate::id::Topic;
use crate::records::{Filling, Listed, ModuleSlug, Name, Payload, Record, Scan};

/// A read model in memory. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryReadModel {
    clock: Arc<dyn Clock>,
    id: Uuid,
    store: Arc<Mutex<Store>>,
}

#[derive(Debug, Default)]
struct Store {
    rows: BTreeMap<Name, Change>,
    topics: BTreeMap<Topic, Synced>,
    offsets: BTreeMap<Partition, i64>,
    rejected: BTreeMap<(Partition, i64), RejectedEntry>,
    /// The generation whose rows it takes; `None`: any.
    generation: Option<u16>,
}

impl Default for MemoryReadModel {
    fn default() -> Self {
        MemoryReadModel::with_clock(Arc::new(SystemClock))
    }
}

impl MemoryReadModel {
    /// An empty one on a clock of your own.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        MemoryReadModel { clock, id: Uuid::new_v4(), store: Arc::default() }
    }

    /// The same, and if it has no rows yet, it takes rows of this generation of the source only.
    #[must_use]
    pub fn for_generation(self, generation: u16) -> Self {
        {
            let mut store = self.store();
            let found = store.rows.values().map(|row| row.version.generation()).max();
            store.generation = store.generation.or(found).or(Some(generation));
        }
        self
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Store {
    fn apply(&mut self, block: &Block) {
        for change in &block.changes {
            let row = self.rows.entry(Name::of(change)).or_insert_with(|| change.clone());
            if change.version > row.version {
                row.clone_from(change);
            }
        }
        let Partition { topic, number } = &block.partition;
        let synced = self.topics.entry(topic.clone()).or_default();
        synced.expect(block.partitions.max(number.saturating_add(1)));
        let before = usize::try_from(*number).ok().and_then(|place| synced.pulses[place]);
        if let Some(at) = block.pulse {
            synced.pulse(*number, at);
        }
        for (rejected, pulse) in &block.rejected {
            let place = (block.partition.clone(), rejected.origin.offset);
            let entry = RejectedEntry::new(rejected.clone(), (*pulse).or(before));
            let noted = self.rejected.entry(place).or_insert_with(|| entry.clone());
            // What holds everybody back may have the place of what held one tenant back.
            if rejected.tenant.is_none() && noted.rejected.tenant.take().is_some() {
                noted.rejected.reason = format!("{}; {}", noted.rejected.reason, rejected.reason);
                noted.holds_back = noted.holds_back.min(entry.holds_back);
            }
        }
        if let Some(end) = block.end() {
            self.offsets.insert(block.partition.clone(), end);
        }
    }

    /// The current versions of a selection, from an id on. Deleted records are not among them.
    fn select<'s>(
        &'s self,
        of: &'s Selection,
        after: Option<Uuid>,
    ) -> impl Iterator<Item = Record> + use<'s> {
        let name = |id| Name { tenant: of.tenant, module: of.module.clone(), id };
        let begin = after.map_or_else(|| Bound::Included(name(Uuid::nil())), |id| Bound::Excluded(name(id)));
        let rows = self.rows.range((begin, Bound::Included(name(Uuid::max()))));
        rows.filter(move |(_, row)| of.since.is_none_or(|since| row.updated_at >= since)).filter_map(
            |(_, row)| {
                let payload = row.payload.clone()?;
                Some(Record {
                    id: row.id,
                    module: row.module.clone(),
                    seq: row.version.seq(),
                    payload,
                    created_at: row.created_at,
                    updated_at: row.updated_at,
                })
            },
        )
    }
}

#[async_trait]
impl ReadModel for MemoryReadModel {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        let mut store = self.store();
        blocks.iter().try_for_each(|block| block.must_be_of(store.generation))?;
        for block in blocks {
            store.apply(block);
        }
        Ok(())
    }

    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        self.store().topics.entry(topic.clone()).or_default().expect(partitions);
        Ok(())
    }

    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        let store = self.store();
        let mut filling = Filling::new(page.limit);
        for record in store.select(of, page.after) {
            if filling.is_full() {
                return Ok(filling.done(true));
            }
            filling.add(record);
        }
        Ok(filling.done(false))
    }

    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        what.check()?;
        let mut tallying = Tallying::new(what);
        for record in self.store().select(of, None) {
            tallying.add(record.payload.as_str())?;
        }
        Ok(tallying.done())
    }

    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        let store = self.store();
        let begin = scan.after.clone().map_or(Bound::Unbounded, Bound::Excluded);
        let wanted = |change: &&Change| {
            scan.tenant.is_none_or(|tenant| tenant == change.tenant)
                && scan.module.as_ref().is_none_or(|module| *module == change.module)
        };
        let rows = store.rows.range((begin, Bound::Unbounded)).map(|(_, change)| change).filter(wanted);
        let live = rows.filter_map(|change| change.payload.as_ref().map(|payload| (change, payload)));
        let row = |(change, payload): (&Change, &Payload)| {
            let times = (change.created_at, change.updated_at);
            Row::new(Name::of(change), change.version, times, payload.as_str().as_bytes())
        };
        live.take(scan.limit).map(row).collect()
    }

    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        let store = self.store();
        let complete = earliest(store.topics.values().map(|topic| topic.complete));
        let of = |entry: &&RejectedEntry| entry.rejected.tenant.is_none_or(|of| of == tenant);
        Ok(held_back(complete, store.rejected.values().filter(of).map(|entry| entry.holds_back)))
    }

    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        let name = Name { tenant, module: module.clone(), id };
        Ok(self.store().rows.get(&name).map(|row| row.version))
    }

    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        let store = self.store();
        let mut all = Vec::new();
        for (topic, synced) in &store.topics {
            for (number, pulse) in (0..).zip(&synced.pulses) {
                let partition = Partition { topic: topic.clone(), number };
                let offset = store.offsets.get(&partition).copied();
                all.push(PartitionSync::new(partition, offset, *pulse));
            }
        }
        Ok(all)
    }

    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        Ok(self.store().rejected.values().take(limit).cloned().collect())
    }

    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        Ok(self.store().rejected.remove(&(partition.clone(), offset)).is_some())
    }

    async fn id(&self) -> Result<Option<Uuid>> {
        Ok(Some(self.id))
    }

    async fn generation(&self) -> Result<Option<u16>> {
        Ok(self.store().generation)
    }

    async fn now(&self) -> Result<Time> {
        Ok(self.clock.now())
    }

    fn durable(&self) -> bool {
        false
    }
}
