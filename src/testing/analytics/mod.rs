//! What every read model must pass. Cases are named after the clauses of the [`ReadModel`] contract
//! (`m1_` … `m15_`).
//!
//! A read model implements [`ReadModelHarness`] and is enrolled by one line; every case becomes a test of
//! its own:
//!
//! ```text
//! hapax::read_model_conformance!(memory, MemoryReadModelHarness::new());
//! ```

use async_trait::async_trait;

use crate::analytics::{
    Block, Change, Groups, ListPage, MemoryReadModel, ReadModel, Rejected, Row, Selection, Tally, Uuid,
    Version,
};
use crate::bus::Partition;
use crate::clock::Time;
use crate::event::Origin;
use crate::id::Topic;
use crate::records::{ModuleSlug, Payload, Record, Scan};

mod cases;
pub mod mutants;
pub mod questions;
pub mod scans;
pub mod sync;
pub mod versions;

pub use cases::NAMES;

/// A fresh storage of one backend.
#[async_trait]
pub trait ReadModelHarness: Send + Sync {
    /// The read model under test.
    type Model: ReadModel;

    /// Opens the storage once more, as another process would.
    async fn open(&self) -> Self::Model;

    /// The same, for one generation of the source.
    async fn open_for(&self, generation: u16) -> Self::Model;
}

/// A read model in memory.
#[derive(Debug, Default)]
pub struct MemoryReadModelHarness(MemoryReadModel);

impl MemoryReadModelHarness {
    /// An empty one.
    pub fn new() -> Self {
        MemoryReadModelHarness::default()
    }
}

#[async_trait]
impl ReadModelHarness for MemoryReadModelHarness {
    type Model = MemoryReadModel;

    async fn open(&self) -> MemoryReadModel {
        self.0.clone()
    }

    async fn open_for(&self, generation: u16) -> MemoryReadModel {
        self.0.clone().for_generation(generation)
    }
}

/// The topic of the cases.
pub fn topic() -> Topic {
    Topic::new("records").expect("a valid topic")
}

/// A partition of it.
pub fn partition(number: i32) -> Partition {
    Partition { topic: topic(), number }
}

/// A module.
pub fn module(slug: &str) -> ModuleSlug {
    ModuleSlug::new(slug).expect("a valid slug")
}

/// A time, in seconds since 1970.
pub fn at(seconds: i64) -> Time {
    Time::from_millis(seconds * 1000)
}

/// A change of record `id` of no tenant in module `orders`. Without JSON it is a deletion.
pub fn change(id: u128, seq: u64, json: Option<&str>) -> Change {
    let seconds = i64::try_from(seq).expect("a small seq");
    Change {
        tenant: Uuid::nil(),
        module: module("orders"),
        id: Uuid::from_u128(id),
        version: Version::new(1, seq).expect("a valid seq"),
        payload: json.map(|json| Payload::new(json).expect("a valid payload")),
        created_at: at(1),
        updated_at: at(seconds),
        origin: Origin::new(topic(), 0, seconds),
        lsn: 0,
    }
}

/// A block of partition 0 of 1.
pub fn block(changes: impl IntoIterator<Item = Change>) -> Block {
    let mut block = Block::new(partition(0), 1, 0..1);
    block.changes = changes.into_iter().collect();
    block
}

/// Applies a block.
pub async fn apply(model: &impl ReadModel, block: Block) {
    model.apply(&[block]).await.expect("a block is applied");
}

/// A change that cannot be read.
pub fn rejected(tenant: Option<Uuid>, number: i32, offset: i64) -> Rejected {
    let origin = Origin::new(topic(), number, offset);
    Rejected { tenant, origin, reason: "it is broken".into(), payload: b"{".to_vec() }
}

/// All orders of no tenant.
pub fn orders() -> Selection {
    Selection { tenant: Uuid::nil(), module: module("orders"), since: None, approximate: false }
}

/// All records of a selection, page by page.
pub async fn all(model: &impl ReadModel, of: &Selection, limit: usize) -> Vec<Record> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = ListPage::new(after, limit).expect("a valid limit");
        let page = model.list(of, page).await.expect("a page");
        assert!(page.records.len() <= limit, "a page is not longer than asked for");
        found.extend(page.records);
        after = page.next;
        if after.is_none() {
            return found;
        }
    }
}

/// All rows of a scan, page by page.
pub async fn scanned(model: &impl ReadModel, mut scan: Scan) -> Vec<Row> {
    let mut found = Vec::new();
    loop {
        let page = model.scan(&scan).await.expect("a page");
        assert!(page.len() <= scan.limit, "a page is not longer than asked for");
        let Some(last) = page.last() else { return found };
        scan.after = Some(last.name.clone());
        found.extend(page);
    }
}

/// Seq and payload of every order of no tenant, by id.
pub async fn shown(model: &impl ReadModel) -> Vec<(u128, u64, String)> {
    let shown = |record: Record| (record.id.as_u128(), record.seq, record.payload.as_str().to_owned());
    all(model, &orders(), 100).await.into_iter().map(shown).collect()
}

/// Numbers about all orders of no tenant.
pub async fn tally(model: &impl ReadModel, what: &Tally) -> Groups {
    model.tally(&orders(), what).await.expect("a tally")
}

/// A value that compares as JSON.
pub fn value(payload: &Payload) -> serde_json::Value {
    serde_json::from_str(payload.as_str()).expect("a payload is JSON")
}
