//! Opens backends by URL: [`ledger`], [`journal`], [`keys`], [`access`], [`bus`], [`read_model`], and
//! [`window`], the filter in front of a ledger.
//!
//! | URL | ledger | journal | keys, access | bus | window | read model | feature |
//! |---|---|---|---|---|---|---|---|
//! | `memory:` | yes | yes | yes | yes | yes | yes | |
//! | `sqlite:FILE` | yes | yes | yes | | | yes | `sqlite` |
//! | `postgres://…` | yes | yes | yes | | | | `postgres` |
//! | `redis://…` | yes | | | | yes | | `redis` |
//! | `dir:PATH` | | yes | | | | | |
//! | `s3://BUCKET/PREFIX` | | yes | | | | | `s3` |
//! | `embedded:FILE` | | | | yes | | | `sqlite` |
//! | `kafka://HOST:PORT` | | | | yes | | | `kafka` |
//! | `clickhouse://HOST:PORT/DATABASE` | | | | | | yes | `clickhouse` |
//!
//! If a backend is not built in, the error names its feature. These functions return trait objects;
//! open the type itself ([`PgLedger::connect`](crate::backend::postgres::PgLedger::connect)) to
//! claim within your own transactions.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let ledger = hapax::open::ledger("memory:").await?;
//! let bus = hapax::open::bus("memory:").await?;
//! assert_eq!((ledger.capabilities().backend, bus.capabilities().bus), ("memory", "memory"));
//! assert!(hapax::open::journal("mysql://db").await.is_err());
//! # Ok(()) }
//! ```
//!
//! This module uses all backends and buses, to return them as their contracts.
#![cfg_attr(not(feature = "postgres"), allow(rustdoc::broken_intra_doc_links))]

mod analytics;
mod bus;
mod erase;
mod journal;
mod ledger;
mod projection;
mod records;
mod stores;
mod window;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub use bus::EMBEDDED_FILE;
pub use journal::store;
pub use ledger::{init_ledger, ledger_grants, ledger_schema};
pub use projection::{ProjectionSettings, ProjectionUse};

use crate::access::Access;
use crate::analytics::ReadModel;
use crate::backend::object::AllocatorSettings;
pub use crate::backend::{Migrate, Pools};
use crate::bus::Bus;
use crate::erase::Eraser;
use crate::error::Result;
use crate::journal::{Journal, JournalSettings};
use crate::keyed::Keys;
use crate::ledger::{Ledger, Settings};
use crate::projection::Projection;
use crate::records::{ModuleSlug, Modules, Roles, Snapshot};
use crate::window::{Window, WindowSettings};

/// The settings to open any backend with; each backend uses its part.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct OpenSettings {
    /// The settings of a ledger, whatever its backend.
    pub ledger: Settings,
    /// The settings of a journal, whatever its backend.
    pub journal: JournalSettings,
    /// The PostgreSQL schema; in Redis, the name of the ledger.
    pub schema: String,
    /// What to do if the schema is missing or out of date.
    pub migrate: Migrate,
    /// The maximum number of connections in a pool.
    pub pool_max: u32,
    /// The connections to PostgreSQL that are shared; none by default.
    pub pools: Pools,
    /// How long to wait for a connection, or for an answer from an object store.
    pub acquire_timeout: Duration,
    /// Whether to refuse a server that cannot keep the guarantees. Set it to false for read-only
    /// use.
    pub refuse: bool,
    /// Where the sequence numbers of an object store come from.
    pub allocator: AllocatorSettings,
    /// The directory for the file of `embedded` without a file name. It must exist.
    pub data: Option<PathBuf>,
    /// The maximum size of a record on the bus; `None` means the bus's own limit.
    pub record_bytes_max: Option<usize>,
}

impl Default for OpenSettings {
    fn default() -> Self {
        OpenSettings {
            ledger: Settings::default(),
            journal: JournalSettings::default(),
            schema: "hapax".to_owned(),
            migrate: Migrate::default(),
            pool_max: 20,
            pools: Pools::default(),
            acquire_timeout: Duration::from_secs(10),
            refuse: true,
            allocator: AllocatorSettings::default(),
            data: None,
            record_bytes_max: None,
        }
    }
}

/// Opens a ledger: `memory:`, `sqlite:FILE`, `postgres://…` or `redis://…`.
pub async fn ledger(url: &str) -> Result<Arc<dyn Ledger>> {
    ledger_with(url, &OpenSettings::default()).await
}

/// Opens a ledger with your own settings.
pub async fn ledger_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    ledger::open(url, settings).await
}

/// Opens a journal: `memory:`, `sqlite:FILE`, `postgres://…`, `s3://BUCKET/PREFIX` or `dir:PATH`.
pub async fn journal(url: &str) -> Result<Arc<dyn Journal>> {
    journal_with(url, &OpenSettings::default()).await
}

/// Opens a journal with your own settings.
pub async fn journal_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    journal::open(url, settings).await
}

/// Opens a bus: `memory:`, `embedded:FILE` or `kafka://HOST:PORT[,HOST:PORT][?PROPERTY=VALUE&…]`.
pub async fn bus(url: &str) -> Result<Arc<dyn Bus>> {
    bus_with(url, &OpenSettings::default()).await
}

/// Opens a bus with your own settings. With a data directory, `embedded` needs no file.
pub async fn bus_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Bus>> {
    bus::open(url, settings).await
}

/// Opens a read model of records, and makes a missing file or missing tables: `sqlite:FILE`,
/// `clickhouse://USER:PASSWORD@HOST:PORT/DATABASE` (`clickhouses://` for TLS) or `memory:`. A server is connected to
/// with the first call.
pub fn read_model(url: &str) -> Result<Arc<dyn ReadModel>> {
    analytics::read_model(url, analytics::Make::Any)
}

/// The same, for one generation of the source: tables that are made take no rows of another. See
/// [`Version`](crate::analytics::Version).
pub fn read_model_for(url: &str, generation: u16) -> Result<Arc<dyn ReadModel>> {
    analytics::read_model(url, analytics::Make::For(generation))
}

/// Opens a read model that is there.
pub fn existing_read_model(url: &str) -> Result<Arc<dyn ReadModel>> {
    analytics::read_model(url, analytics::Make::Nothing)
}

/// Opens a projection of records: `cache:redis://HOST:PORT` or `opensearch:http://HOST:PORT/ALIAS`.
pub async fn projection(url: &str, settings: &ProjectionSettings) -> Result<Arc<dyn Projection>> {
    projection::open(url, settings).await
}

/// Opens a window: `memory:` or `redis://HOST`. Does not connect yet;
/// [`OutageWindow`](crate::window::OutageWindow) decides what an unavailable server means.
pub fn window(url: &str, settings: WindowSettings) -> Result<Arc<dyn Window>> {
    window::open(url, settings)
}

/// Opens a store of keys for [keyed writes](crate::keyed): `memory:`, `sqlite:FILE` or
/// `postgres://…`.
pub async fn keys(url: &str) -> Result<Arc<dyn Keys>> {
    keys_with(url, &OpenSettings::default()).await
}

/// Opens a store of keys with your own settings.
pub async fn keys_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    stores::keys(url, settings).await
}

/// Opens the modules of records in the database of a journal, with the rights of their owner:
/// `sqlite:FILE` or `postgres://…`.
pub async fn modules_with(url: &str, settings: &OpenSettings, roles: &Roles) -> Result<Arc<dyn Modules>> {
    records::modules(url, settings, roles).await
}

/// Opens the records of all tenants in the database of a journal, to read them: `sqlite:FILE`, or
/// `postgres://…` with a role that may see them. Makes nothing.
pub async fn snapshot_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    records::snapshot(url, settings).await
}

/// Whether there is a module of records in the database of a journal. Makes nothing; a journal that can have
/// no records has no module.
pub async fn has_module(url: &str, settings: &OpenSettings, module: &ModuleSlug) -> Result<bool> {
    records::has_module(url, settings, module).await
}

/// Opens a store of [API tokens and audit rows](crate::access): `memory:`, `sqlite:FILE` or
/// `postgres://…`. It may share the database of keys, a journal or a ledger.
pub async fn access(url: &str) -> Result<Arc<dyn Access>> {
    access_with(url, &OpenSettings::default()).await
}

/// Opens a store of API tokens with your own settings.
pub async fn access_with(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    stores::access(url, settings).await
}

/// Opens what [erases](crate::erase) in the database of a ledger, a journal, keys, a read model or an embedded bus:
/// `sqlite:FILE`, whatever the file holds, or `postgres://…`, whatever its schema holds. Makes nothing.
pub async fn eraser(url: &str, schema: &str) -> Result<Arc<dyn Eraser>> {
    erase::eraser(url, schema).await
}
