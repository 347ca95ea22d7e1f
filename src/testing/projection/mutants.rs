//! Deliberately broken projections. Each makes one mistake, and the suite must notice.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;

use super::ProjectionHarness;
use crate::error::Result;
use crate::ledger::Finding;
use crate::projection::{
    Applied, Change, Document, InPlace, MemoryProjection, Name, Projection, Rebuilding, Scanned, Uuid,
    Version,
};

/// The mistake.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProjectionMutant {
    /// What arrives last counts.
    LastWins,
    /// A deletion leaves nothing behind, so that an older change brings the record back.
    TombstonesForgotten,
    /// Versions are compared as doubles, as a script would.
    DoubleVersions,
    /// Reads, then decides, then writes: another writer may come in between.
    ReadThenWrite,
    /// Records belong to nobody.
    TenantIgnored,
    /// Every change is called newer.
    AlwaysNewer,
    /// A scan leaves out deleted records.
    ScanForgetsDeleted,
    /// A rebuild writes to what is read.
    RebuildShows,
}

/// A projection that makes one mistake.
#[derive(Debug, Clone)]
pub struct MutantProjection {
    projection: MemoryProjection,
    mutant: ProjectionMutant,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    applied: u64,
    deleted: BTreeSet<Name>,
}

impl MutantProjection {
    fn is(&self, mutant: ProjectionMutant) -> bool {
        self.mutant == mutant
    }

    fn broken(&self, change: &Change) -> Change {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let mut change = change.clone();
        if self.is(ProjectionMutant::TenantIgnored) {
            change.tenant = Uuid::nil();
        }
        if self.is(ProjectionMutant::LastWins) {
            state.applied += 1;
            change.version = Version::new(60_000, state.applied).unwrap_or(change.version);
        }
        if self.is(ProjectionMutant::TombstonesForgotten) {
            if change.payload.is_none() {
                state.deleted.insert(Name::of(&change));
            } else if state.deleted.remove(&Name::of(&change)) {
                change.version = Version::new(60_000, 1).unwrap_or(change.version);
            }
        }
        if self.is(ProjectionMutant::DoubleVersions) {
            let rounded = change.version.as_u64() as f64 as u64;
            change.version = Version::from_u64(rounded).unwrap_or(change.version);
        }
        change
    }

    fn named(&self, name: &Name) -> Name {
        let tenant = if self.is(ProjectionMutant::TenantIgnored) { Uuid::nil() } else { name.tenant };
        Name { tenant, ..name.clone() }
    }

    /// Looks, pauses and writes whatever is there by then.
    async fn read_then_write(&self, change: &Change) -> Result<Applied> {
        let found = self.projection.documents(&[Name::of(change)]).await?.pop().flatten();
        tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        if found.is_some_and(|document| document.version >= change.version) {
            return Ok(Applied::Stale);
        }
        let fresh = self.projection.begin_rebuild().await?;
        let mut all = Vec::new();
        for (name, _) in self.projection.scan(None).await?.found {
            if name != Name::of(change)
                && let Some(document) =
                    self.projection.documents(std::slice::from_ref(&name)).await?.pop().flatten()
            {
                all.push(restored(change, name, document));
            }
        }
        all.push(change.clone());
        fresh.apply(&all).await?;
        fresh.switch().await?;
        Ok(Applied::Newer)
    }
}

/// A change that makes a document again.
fn restored(like: &Change, name: Name, document: Document) -> Change {
    use crate::projection::Content;
    let Name { tenant, module, id } = name;
    let change = Change { tenant, module, id, version: document.version, payload: None, ..like.clone() };
    match document.content {
        Content::Present { payload, created_at, updated_at } => {
            Change { payload: Some(payload), created_at, updated_at, ..change }
        }
        _ => change,
    }
}

#[async_trait]
impl Projection for MutantProjection {
    async fn apply(&self, changes: &[Change]) -> Result<Vec<Applied>> {
        if self.is(ProjectionMutant::ReadThenWrite) {
            let mut applied = Vec::new();
            for change in changes {
                applied.push(self.read_then_write(change).await?);
            }
            return Ok(applied);
        }
        let changes: Vec<Change> = changes.iter().map(|change| self.broken(change)).collect();
        let applied = self.projection.apply(&changes).await?;
        if self.is(ProjectionMutant::AlwaysNewer) {
            return Ok(applied.iter().map(|_| Applied::Newer).collect());
        }
        Ok(applied)
    }

    async fn documents(&self, names: &[Name]) -> Result<Vec<Option<Document>>> {
        let names: Vec<Name> = names.iter().map(|name| self.named(name)).collect();
        self.projection.documents(&names).await
    }

    async fn scan(&self, after: Option<&str>) -> Result<Scanned> {
        let mut scanned = self.projection.scan(after).await?;
        if self.is(ProjectionMutant::ScanForgetsDeleted) {
            let mut left = Vec::new();
            for (name, version) in scanned.found {
                let document = self.projection.documents(std::slice::from_ref(&name)).await?.pop().flatten();
                if document.is_some_and(|document| document.content != crate::projection::Content::Deleted) {
                    left.push((name, version));
                }
            }
            scanned.found = left;
        }
        Ok(scanned)
    }

    async fn begin_rebuild(&self) -> Result<Box<dyn Rebuilding>> {
        if self.is(ProjectionMutant::RebuildShows) {
            return Ok(Box::new(InPlace(self.projection.clone())));
        }
        self.projection.begin_rebuild().await
    }

    async fn check(&self) -> Result<Vec<Finding>> {
        self.projection.check().await
    }

    fn durable(&self) -> bool {
        self.projection.durable()
    }

    fn about(&self) -> String {
        format!("{:?}", self.mutant)
    }
}

/// A harness for it.
#[derive(Debug)]
pub struct MutantProjectionHarness(MutantProjection);

impl MutantProjectionHarness {
    /// An empty one.
    pub fn new(mutant: ProjectionMutant) -> Self {
        let projection = MemoryProjection::default();
        MutantProjectionHarness(MutantProjection { projection, mutant, state: Arc::default() })
    }
}

#[async_trait]
impl ProjectionHarness for MutantProjectionHarness {
    type Projection = MutantProjection;

    async fn open(&self) -> MutantProjection {
        self.0.clone()
    }
}
