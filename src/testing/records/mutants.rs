//! Deliberately broken stores of records. Each makes one mistake, and the suite must notice.

use std::sync::Arc;

use async_trait::async_trait;

use super::RecordsHarness;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::journal::{Journal, MemoryJournal};
use crate::records::{Create, Delete, List, Listed, Module, ModuleSlug, Record, Records, Update, Uuid};

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecordsMutant {
    /// Records of all tenants are in one place.
    TenantIgnored,
    /// A write replaces whatever is there, also what its writer has not seen.
    SeqIgnored,
    /// An id that is created again begins at 1.
    SeqReset,
    /// A write leaves no event in its journal.
    NoEvent,
    /// Writing to an unknown module makes it.
    UnknownModuleMade,
}

/// A store that makes one mistake.
pub struct MutantRecords<H: RecordsHarness>(Arc<H>, H::Records, RecordsMutant);

impl<H: RecordsHarness> Clone for MutantRecords<H> {
    fn clone(&self) -> Self {
        MutantRecords(Arc::clone(&self.0), self.1.clone(), self.2)
    }
}

impl<H: RecordsHarness> MutantRecords<H> {
    fn is(&self, mutant: RecordsMutant) -> bool {
        self.2 == mutant
    }

    fn tenant<'t>(&self, tenant: Option<&'t Tenant>) -> Option<&'t Tenant> {
        tenant.filter(|_| !self.is(RecordsMutant::TenantIgnored))
    }

    /// The seq that the record has, where the caller's is ignored.
    async fn seq(
        &self,
        tenant: Option<&Tenant>,
        module: &ModuleSlug,
        id: Uuid,
        expected: u64,
    ) -> Result<u64> {
        if !self.is(RecordsMutant::SeqIgnored) {
            return Ok(expected);
        }
        Ok(self.1.get(tenant, module, id).await?.map_or(expected, |record| record.seq))
    }
}

#[async_trait]
impl<H: RecordsHarness + 'static> Records for MutantRecords<H> {
    async fn create(&self, create: &Create) -> Result<Record> {
        let create = Create { tenant: self.tenant(create.tenant.as_ref()).cloned(), ..create.clone() };
        let mut created = self.1.create(&create).await;
        if self.is(RecordsMutant::UnknownModuleMade) && matches!(created, Err(Error::NotFound(_))) {
            self.0.make(&create.module).await;
            created = self.1.create(&create).await;
        }
        let mut record = created?;
        if self.is(RecordsMutant::SeqReset) {
            record.seq = 1;
        }
        Ok(record)
    }

    async fn update(&self, update: &Update) -> Result<Record> {
        let tenant = self.tenant(update.tenant.as_ref()).cloned();
        let expected_seq = self.seq(tenant.as_ref(), &update.module, update.id, update.expected_seq).await?;
        self.1.update(&Update { tenant, expected_seq, ..update.clone() }).await
    }

    async fn delete(&self, delete: &Delete) -> Result<Record> {
        let tenant = self.tenant(delete.tenant.as_ref()).cloned();
        let expected_seq = self.seq(tenant.as_ref(), &delete.module, delete.id, delete.expected_seq).await?;
        self.1.delete(&Delete { tenant, expected_seq, ..delete.clone() }).await
    }

    async fn get(&self, tenant: Option<&Tenant>, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>> {
        self.1.get(self.tenant(tenant), module, id).await
    }

    async fn list(&self, which: &List) -> Result<Listed> {
        let tenant = self.tenant(which.tenant.as_ref()).cloned();
        self.1.list(&List { tenant, ..which.clone() }).await
    }
}

/// A broken store on the storage of a sound one.
#[derive(Debug)]
pub struct MutantRecordsHarness<H>(Arc<H>, RecordsMutant);

impl<H: RecordsHarness> MutantRecordsHarness<H> {
    /// Breaks a fresh storage.
    pub fn new(sound: H, mutant: RecordsMutant) -> Self {
        MutantRecordsHarness(Arc::new(sound), mutant)
    }
}

#[async_trait]
impl<H: RecordsHarness + 'static> RecordsHarness for MutantRecordsHarness<H> {
    type Records = MutantRecords<H>;

    async fn open(&self) -> MutantRecords<H> {
        MutantRecords(Arc::clone(&self.0), self.0.open().await, self.1)
    }

    fn module(&self) -> ModuleSlug {
        self.0.module()
    }

    async fn make(&self, slug: &ModuleSlug) -> bool {
        self.0.make(slug).await
    }

    async fn modules(&self) -> Vec<Module> {
        self.0.modules().await
    }

    async fn journal(&self) -> Arc<dyn Journal> {
        if self.1 == RecordsMutant::NoEvent {
            return Arc::new(MemoryJournal::default()); // nothing was ever appended to it
        }
        self.0.journal().await
    }

    async fn rolled_back(&self, records: &MutantRecords<H>, create: &Create) -> Result<Record> {
        self.0.rolled_back(&records.1, create).await
    }
}
