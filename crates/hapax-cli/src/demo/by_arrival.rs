//! `--break version`: a read model that keeps what arrived last.

use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use hapax::analytics::{
    Block, Groups, ListPage, PartitionSync, ReadModel, RejectedEntry, Row, Selection, Tally, Uuid, Version,
};
use hapax::backend::sqlite::SqliteReadModel;
use hapax::bus::Partition;
use hapax::records::{Listed, ModuleSlug, Scan};
use hapax::{Result, Time, Topic};

/// Numbers changes as they arrive, so that a late copy of an old one counts as the newest.
pub struct ByArrival {
    inner: SqliteReadModel,
    arrived: AtomicU64,
}

impl ByArrival {
    pub fn new(inner: SqliteReadModel) -> Self {
        ByArrival { inner, arrived: AtomicU64::new(0) }
    }
}

#[async_trait]
impl ReadModel for ByArrival {
    async fn apply(&self, blocks: &[Block]) -> Result<()> {
        let mut blocks = blocks.to_vec();
        for change in blocks.iter_mut().flat_map(|block| &mut block.changes) {
            change.version = Version::new(1, 1 + self.arrived.fetch_add(1, Ordering::Relaxed))?;
        }
        self.inner.apply(&blocks).await
    }

    // The rest is passed on.
    async fn expect(&self, topic: &Topic, partitions: i32) -> Result<()> {
        self.inner.expect(topic, partitions).await
    }
    async fn list(&self, of: &Selection, page: ListPage) -> Result<Listed> {
        self.inner.list(of, page).await
    }
    async fn tally(&self, of: &Selection, what: &Tally) -> Result<Groups> {
        self.inner.tally(of, what).await
    }
    async fn scan(&self, scan: &Scan) -> Result<Vec<Row>> {
        self.inner.scan(scan).await
    }
    async fn last_sync_at(&self, tenant: Uuid) -> Result<Option<Time>> {
        self.inner.last_sync_at(tenant).await
    }
    async fn version(&self, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Version>> {
        self.inner.version(tenant, module, id).await
    }
    async fn partitions(&self) -> Result<Vec<PartitionSync>> {
        self.inner.partitions().await
    }
    async fn rejected(&self, limit: usize) -> Result<Vec<RejectedEntry>> {
        self.inner.rejected(limit).await
    }
    async fn drop_rejected(&self, partition: &Partition, offset: i64) -> Result<bool> {
        self.inner.drop_rejected(partition, offset).await
    }
    async fn id(&self) -> Result<Option<Uuid>> {
        self.inner.id().await
    }
    async fn now(&self) -> Result<Time> {
        self.inner.now().await
    }
    fn durable(&self) -> bool {
        self.inner.durable()
    }
}
