//! Deliberately broken read models. Each makes one mistake, and the suite must notice.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use super::ReadModelHarness;
use crate::analytics::{
    Block, Groups, ListPage, MemoryReadModel, PartitionSync, ReadModel, RejectedEntry, Row, Selection, Tally,
    Uuid, Version,
};
use crate::bus::Partition;
use crate::clock::Time;
use crate::error::Result;
use crate::id::Topic;
use crate::records::{Listed, ModuleSlug, Scan};

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadModelMutant {
    /// What arrives last counts.
    LastWins,
    /// A deletion leaves nothing behind, so that an older change brings the record back.
    TombstonesForgotten,
    /// Records belong to nobody.
    TenantIgnored,
    /// Everything is complete up to the latest pulse.
    LatestPulse,
    /// What cannot be read is forgotten.
    RejectedForgotten,
    /// Old records count too.
    SinceIgnored,
    /// A page forgets its first row.
    PageForgets,
    /// Each look makes another id.
    IdMadeAnew,
    /// A scan hashes no payload.
    PayloadUnhashed,
    /// A scan forgets the first row of a page.
    ScanForgets,
    /// Rows of every generation are taken, whatever it was made for.
    GenerationForgotten,
}

/// A read model that makes one mistake.
#[derive(Debug, Clone)]
pub struct MutantReadModel {
    model: MemoryReadModel,
    mutant: ReadModelMutant,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    applied: u64,
    deleted: BTreeSet<Uuid>,
}

impl MutantReadModel {
    fn is(&self, mutant: ReadModelMutant) -> bool {
        self.mutant == mutant
    }

    fn broken(&self, block: &Block) -> Block {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut block = block.clone();
        if self.is(ReadModelMutant::RejectedForgotten) {
            block.rejected.clear();
        }
        for change in &mut block.changes {
            if self.is(ReadModelMutant::TenantIgnored) {
                change.tenant = Uuid::nil();
            }
            if self.is(ReadModelMutant::LastWins) {
                state.applied += 1;
                change.version = Version::new(60_000, state.applied).unwrap_or(change.version);
            }
            if self.is(ReadModelMutant::TombstonesForgotten) {
                if change.payload.is_none() {
                    state.deleted.insert(change.id);
                } else if state.deleted.remove(&change.id) {
                    change.version = Version::new(60_000, 1).unwrap_or(change.version);
                }
            }
        }
        block
    }

    fn selected(&self, of: &Selection) -> Selection {
        let mut of = of.clone();
        if self.is(ReadModelMutant::TenantIgnored) {
            of.tenant = Uuid::nil();
        }
        if self.is(ReadModelMutant::SinceIgnored) {
            of.since = None;
        }
        of
    }
}

#[async_trait]
impl ReadModel for MutantReadModel {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        let blocks: Vec<_> = blocks.iter().map(|block| self.broken(block)).collect();
        self.model.apply(&blocks).await
    }
    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        self.model.expect(topic, partitions).await
    }
    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        let mut listed = self.model.list(&self.selected(of), page).await?;
        if self.is(ReadModelMutant::PageForgets) && page.after.is_some() && !listed.records.is_empty() {
            listed.records.remove(0);
        }
        Ok(listed)
    }
    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        self.model.tally(&self.selected(of), what).await
    }
    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        let mut rows = self.model.scan(scan).await?;
        if self.is(ReadModelMutant::PayloadUnhashed) {
            let times = (Time::default(), Time::default());
            rows = rows
                .into_iter()
                .map(|row| Row::new(row.name, row.version, times, b"{}"))
                .collect::<Result<_>>()?;
        }
        if self.is(ReadModelMutant::ScanForgets) && rows.len() > 1 {
            rows.remove(0);
        }
        Ok(rows)
    }
    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        if self.is(ReadModelMutant::LatestPulse) {
            let partitions = self.model.partitions().await?;
            return Ok(partitions.into_iter().filter_map(|partition| partition.pulse).max());
        }
        self.model.last_sync_at(tenant).await
    }
    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        self.model.version(tenant, module, id).await
    }
    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        self.model.partitions().await
    }
    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        self.model.rejected(limit).await
    }
    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        self.model.drop_rejected(partition, offset).await
    }
    async fn id(&self) -> Result<Option<Uuid>> {
        if self.is(ReadModelMutant::IdMadeAnew) {
            return Ok(Some(Uuid::new_v4()));
        }
        self.model.id().await
    }
    async fn generation(&self) -> Result<Option<u16>> {
        self.model.generation().await
    }
    async fn now(&self) -> Result<Time> {
        self.model.now().await
    }
    fn durable(&self) -> bool {
        self.model.durable()
    }
}

/// A harness for it.
#[derive(Debug)]
pub struct MutantReadModelHarness(MutantReadModel);

impl MutantReadModelHarness {
    /// An empty one.
    pub fn new(mutant: ReadModelMutant) -> Self {
        let model = MemoryReadModel::default();
        MutantReadModelHarness(MutantReadModel { model, mutant, state: Arc::default() })
    }
}

#[async_trait]
impl ReadModelHarness for MutantReadModelHarness {
    type Model = MutantReadModel;

    async fn open(&self) -> MutantReadModel {
        self.0.clone()
    }

    async fn open_for(&self, generation: u16) -> MutantReadModel {
        let mut of = self.0.clone();
        if !of.is(ReadModelMutant::GenerationForgotten) {
            of.model = of.model.for_generation(generation);
        }
        of
    }
}
