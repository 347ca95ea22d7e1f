//! What every projection must pass. Cases are named after the clauses of the [`Projection`] contract
//! (`p1_` … `p9_`).
//!
//! A projection implements [`ProjectionHarness`] and is enrolled by one line; every case becomes a test
//! of its own:
//!
//! ```text
//! hapax::projection_conformance!(memory, MemoryProjectionHarness::new());
//! ```

use async_trait::async_trait;

use super::analytics;
use crate::projection::{
    Applied, Change, Content, Document, MemoryProjection, Name, Projection, Uuid, Version,
};

mod cases;
pub mod documents;
pub mod mutants;
pub mod versions;

pub use cases::NAMES;

/// A fresh storage of one backend.
#[async_trait]
pub trait ProjectionHarness: Send + Sync {
    /// The projection under test.
    type Projection: Projection + Clone;

    /// Opens the storage once more, as another process would.
    async fn open(&self) -> Self::Projection;

    /// Whether a rebuild has a place of its own.
    fn rebuilds_apart(&self) -> bool {
        true
    }
}

/// A projection in memory.
#[derive(Debug, Default)]
pub struct MemoryProjectionHarness(MemoryProjection);

impl MemoryProjectionHarness {
    /// An empty one.
    pub fn new() -> Self {
        MemoryProjectionHarness::default()
    }
}

#[async_trait]
impl ProjectionHarness for MemoryProjectionHarness {
    type Projection = MemoryProjection;

    async fn open(&self) -> MemoryProjection {
        self.0.clone()
    }
}

/// A change of record `id` of no tenant in module `orders`. Without JSON it is a deletion.
pub fn change(id: u128, seq: u64, json: Option<&str>) -> Change {
    analytics::change(id, seq, json)
}

/// The same under another generation.
pub fn under(generation: u16, seq: u64, change: &Change) -> Change {
    let version = Version::new(generation, seq).expect("a valid version");
    Change { version, ..change.clone() }
}

/// Record `id` of no tenant in module `orders`.
pub fn name(id: u128) -> Name {
    Name { tenant: Uuid::nil(), module: analytics::module("orders"), id: Uuid::from_u128(id) }
}

/// Applies changes at once.
pub async fn apply(projection: &impl Projection, changes: &[Change]) -> Vec<Applied> {
    let applied = projection.apply(changes).await.expect("changes are applied");
    assert_eq!(applied.len(), changes.len(), "an outcome for each");
    applied
}

/// What a projection has of a record.
pub async fn document(projection: &impl Projection, name: &Name) -> Option<Document> {
    let mut documents = projection.documents(std::slice::from_ref(name)).await.expect("documents");
    assert_eq!(documents.len(), 1, "one for each name");
    documents.pop().flatten()
}

/// Version and content of an order of no tenant, as a change made them.
pub async fn shows(projection: &impl Projection, change: &Change) {
    let found = document(projection, &Name::of(change)).await;
    assert_eq!(found, Some(Document::new(change.version, Content::of(change))));
}
