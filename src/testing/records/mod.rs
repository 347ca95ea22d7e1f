//! What every store of records must pass. Cases are named after the clauses of the [`Records`] contract
//! (`r1_` … `r10_`).
//!
//! A store implements [`RecordsHarness`] and is enrolled by one line; every case becomes a test of its own:
//!
//! ```text
//! hapax::records_conformance!(sqlite, SqliteRecordsHarness::new().await);
//! ```

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::Result;
use crate::id::{Aggregate, Tenant};
use crate::journal::{Journal, Stored};
use crate::records::{Create, Module, ModuleSlug, Payload, Record, Records, Uuid};

mod cases;
pub mod mutants;
pub mod reads;
pub mod writes;

pub use cases::NAMES;

/// A fresh storage of one backend, with one module.
#[async_trait]
pub trait RecordsHarness: Send + Sync {
    /// The store under test.
    type Records: Records + Clone + 'static;

    /// Opens the storage once more, as another process would.
    async fn open(&self) -> Self::Records;

    /// The module that is there.
    fn module(&self) -> ModuleSlug;

    /// Makes another one.
    async fn make(&self, slug: &ModuleSlug) -> bool;

    /// All modules of the storage, at least.
    async fn modules(&self) -> Vec<Module>;

    /// The journal that the writes are appended to.
    async fn journal(&self) -> Arc<dyn Journal>;

    /// Creates a record in a transaction, and rolls it back.
    async fn rolled_back(&self, records: &Self::Records, create: &Create) -> Result<Record>;
}

/// A payload.
pub fn payload(json: &str) -> Payload {
    Payload::new(json).expect("a valid payload")
}

/// A tenant.
pub fn tenant(number: u128) -> Tenant {
    Tenant::new(Uuid::from_u128(number).to_string()).expect("a valid tenant")
}

/// A record to create in the harness's module.
pub fn create(harness: &impl RecordsHarness, json: &str) -> Create {
    Create::new(harness.module(), payload(json))
}

/// The events of a record.
pub async fn events(harness: &impl RecordsHarness, of: Option<&Tenant>, id: Uuid) -> Vec<Stored> {
    let aggregate = Aggregate::new(format!("{}/{id}", harness.module())).expect("a valid aggregate");
    harness.journal().await.read_aggregate(of, &aggregate, 1, 1000).await.expect("the journal reads").events
}

/// A payload as a value.
pub fn value(payload: &Payload) -> serde_json::Value {
    serde_json::from_str(payload.as_str()).expect("a payload is JSON")
}
