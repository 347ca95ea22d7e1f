//! Opens read models.

use std::sync::Arc;

use crate::analytics::{MemoryReadModel, ReadModel};
use crate::error::{Error, Result};
use crate::secret::hide_password;

/// What is made if it is missing.
#[derive(Clone, Copy)]
pub(super) enum Make {
    Nothing,
    /// A model of any generation.
    Any,
    /// A model of one generation.
    For(u16),
}

pub(super) fn read_model(url: &str, make: Make) -> Result<Arc<dyn ReadModel>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(match make {
            Make::For(generation) => MemoryReadModel::default().for_generation(generation),
            Make::Nothing | Make::Any => MemoryReadModel::default(),
        })),
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into()));
            }
            open_sqlite(path, make)
        }
        Some(("clickhouse" | "clickhouses", _)) => open_clickhouse(url, make),
        _ => Err(Error::Config(format!(
            "{:?} is not the URL of a read model; use sqlite:FILE, clickhouse://USER:PASSWORD@HOST:PORT/DATABASE (clickhouses:// for TLS) or memory:",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "sqlite")]
fn open_sqlite(path: &str, make: Make) -> Result<Arc<dyn ReadModel>> {
    use crate::backend::sqlite::SqliteReadModel;
    Ok(Arc::new(match make {
        Make::Nothing => SqliteReadModel::open_existing(path)?,
        Make::Any => SqliteReadModel::open(path)?,
        Make::For(generation) => SqliteReadModel::open_for(path, generation)?,
    }))
}

#[cfg(not(feature = "sqlite"))]
fn open_sqlite(_: &str, _: Make) -> Result<Arc<dyn ReadModel>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}

#[cfg(feature = "clickhouse")]
fn open_clickhouse(url: &str, make: Make) -> Result<Arc<dyn ReadModel>> {
    use crate::backend::clickhouse::ClickHouseReadModel;
    Ok(Arc::new(match make {
        Make::Nothing => ClickHouseReadModel::open_existing(url)?,
        Make::Any => ClickHouseReadModel::open(url)?,
        Make::For(generation) => ClickHouseReadModel::open_for(url, generation)?,
    }))
}

#[cfg(not(feature = "clickhouse"))]
fn open_clickhouse(_: &str, _: Make) -> Result<Arc<dyn ReadModel>> {
    Err(Error::NotBuiltIn { what: "ClickHouse", feature: "clickhouse" })
}
