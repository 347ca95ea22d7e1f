//! Read models pass the conformance suite, and stay in step with records through crashes, repeats and shuffles.
#![cfg(all(feature = "testing", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

mod away;
#[cfg(feature = "clickhouse")]
mod clickhouse_feeds;
#[cfg(feature = "clickhouse")]
mod crash;
mod debezium;
#[cfg(feature = "clickhouse")]
mod engine;
mod feed;
mod growing;
mod mutants;
#[cfg(feature = "clickhouse")]
mod on_clickhouse;
mod pausing;
#[cfg(feature = "clickhouse")]
mod rebuild;
mod republish;
mod stale;
#[path = "../support/mod.rs"]
mod support;
mod verify;
#[cfg(feature = "clickhouse")]
mod verify_clickhouse;
#[cfg(feature = "clickhouse")]
mod view;

use async_trait::async_trait;
use hapax::backend::sqlite::SqliteReadModel;
use hapax::testing::analytics::{MemoryReadModelHarness, ReadModelHarness};

hapax::read_model_conformance!(memory, MemoryReadModelHarness::new());
hapax::read_model_conformance!(sqlite, SqliteReadModelHarness::new());
#[cfg(feature = "clickhouse")]
hapax::read_model_conformance!(clickhouse, engine::Database::new());

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

    async fn open_for(&self, generation: u16) -> SqliteReadModel {
        SqliteReadModel::open_for(self.0.path().join("reads.db"), generation).expect("the file opens")
    }
}
