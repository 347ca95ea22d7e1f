//! Read models pass the conformance suite, and stay in step with records through crashes, repeats and shuffles.
#![cfg(all(feature = "testing", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

mod feed;
mod mutants;
#[path = "../support/mod.rs"]
mod support;

use async_trait::async_trait;
use hapax::backend::sqlite::SqliteReadModel;
use hapax::testing::analytics::{MemoryReadModelHarness, ReadModelHarness};

hapax::read_model_conformance!(memory, MemoryReadModelHarness::new());
hapax::read_model_conformance!(sqlite, SqliteReadModelHarness::new());

/// A fresh file.
struct SqliteReadModelHarness(tempfile::TempDir);

impl SqliteReadModelHarness {
    fn new() -> Self {
        SqliteReadModelHarness(tempfile::tempdir().unwrap())
    }
}

#[async_trait]
impl ReadModelHarness for SqliteReadModelHarness {
    type Model = SqliteReadModel;

    async fn open(&self) -> SqliteReadModel {
        SqliteReadModel::open(self.0.path().join("reads.db")).expect("the file opens")
    }
}
