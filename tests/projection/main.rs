//! Projections pass the conformance suite, and end as if every event had come once and in order: in memory, in the cache
//! (Valkey) and in OpenSearch.
#![cfg(all(feature = "testing", feature = "sqlite", feature = "redis", feature = "opensearch"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

mod broken;
mod cache;
mod crash;
mod late;
mod mutants;
mod rebuild;
mod search;
#[path = "../support/mod.rs"]
mod support;
mod world;

use std::sync::Arc;

use async_trait::async_trait;
use hapax::backend::opensearch::SearchProjection;
use hapax::backend::redis::CacheProjection;
use hapax::testing::projection::{MemoryProjectionHarness, ProjectionHarness};
use tokio::sync::{OwnedRwLockReadGuard, RwLock};

hapax::projection_conformance!(memory, MemoryProjectionHarness::new());
hapax::projection_conformance!(cache_suite, CacheHarness::new());
hapax::projection_conformance!(opensearch_suite, SearchHarness::new().await);

/// Keys that nobody else uses.
struct CacheHarness {
    prefix: String,
}

impl CacheHarness {
    fn new() -> Self {
        CacheHarness { prefix: support::valkey::fresh_name() }
    }
}

#[async_trait]
impl ProjectionHarness for CacheHarness {
    type Projection = CacheProjection;

    async fn open(&self) -> CacheProjection {
        world::cache(&self.prefix).await
    }

    fn rebuilds_apart(&self) -> bool {
        false
    }
}

/// Who restarts the engine waits for the others, and they for it.
static ENGINE: std::sync::LazyLock<Arc<RwLock<()>>> = std::sync::LazyLock::new(Arc::default);

/// An alias that nobody else uses.
struct SearchHarness {
    alias: String,
    _up: OwnedRwLockReadGuard<()>,
}

impl SearchHarness {
    async fn new() -> Self {
        SearchHarness { alias: support::valkey::fresh_name(), _up: Arc::clone(&ENGINE).read_owned().await }
    }
}

impl Drop for SearchHarness {
    fn drop(&mut self) {
        world::remove_indices(&self.alias);
    }
}

#[async_trait]
impl ProjectionHarness for SearchHarness {
    type Projection = SearchProjection;

    async fn open(&self) -> SearchProjection {
        world::search(&self.alias).await
    }
}
