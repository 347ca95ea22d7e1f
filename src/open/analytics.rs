//! Opens read models.

use std::sync::Arc;

use crate::analytics::{MemoryReadModel, ReadModel};
use crate::error::{Error, Result};
use crate::secret::hide_password;

/// `make`: makes a file that is missing.
pub(super) fn read_model(url: &str, make: bool) -> Result<Arc<dyn ReadModel>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryReadModel::default())),
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("sqlite: names no file; write sqlite:FILE".into()));
            }
            open_sqlite(path, make)
        }
        Some(("clickhouse" | "clickhouses", _)) => open_clickhouse(url, make),
        _ => Err(Error::Config(format!(
            "{:?} is no read model; known are sqlite:FILE, clickhouse://USER:PASSWORD@HOST:PORT/DATABASE (clickhouses:// for TLS) and memory:",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "sqlite")]
fn open_sqlite(path: &str, make: bool) -> Result<Arc<dyn ReadModel>> {
    use crate::backend::sqlite::SqliteReadModel;
    Ok(Arc::new(if make { SqliteReadModel::open(path)? } else { SqliteReadModel::open_existing(path)? }))
}

#[cfg(not(feature = "sqlite"))]
fn open_sqlite(_: &str, _: bool) -> Result<Arc<dyn ReadModel>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}

#[cfg(feature = "clickhouse")]
fn open_clickhouse(url: &str, make: bool) -> Result<Arc<dyn ReadModel>> {
    use crate::backend::clickhouse::ClickHouseReadModel;
    let open = if make { ClickHouseReadModel::open } else { ClickHouseReadModel::open_existing };
    Ok(Arc::new(open(url)?))
}

#[cfg(not(feature = "clickhouse"))]
fn open_clickhouse(_: &str, _: bool) -> Result<Arc<dyn ReadModel>> {
    Err(Error::NotBuiltIn { what: "ClickHouse", feature: "clickhouse" })
}
