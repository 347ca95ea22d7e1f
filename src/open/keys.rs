//! Opens stores of keys.

use std::sync::Arc;

use super::OpenSettings;
use crate::error::{Error, Result};
use crate::keyed::{Keys, MemoryKeys};
use crate::secret::hide_password;

pub(super) async fn open(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryKeys::default())),
        Some(("postgres" | "postgresql", _)) => open_postgres(url, settings).await,
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("sqlite: names no file; write sqlite:FILE".into()));
            }
            open_sqlite(path, settings).await
        }
        Some(("redis" | "rediss", _)) => Err(Error::Unsupported(
            "Redis cannot keep the keys of writes: it may forget an acknowledged answer; use PostgreSQL or SQLite".into(),
        )),
        _ => Err(Error::Config(format!(
            "{:?} names no store of keys; known are memory:, sqlite:FILE and postgres://USER@HOST/DATABASE",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    use crate::backend::postgres::{PgKeys, PgKeysSettings};
    let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
    let pool = settings.pools.postgres("keys.url", url, pool_max, timeout).await?;
    let settings = PgKeysSettings {
        schema: settings.schema.clone(),
        migrate: settings.migrate,
        refuse: settings.refuse,
        ..PgKeysSettings::default()
    };
    Ok(Arc::new(PgKeys::with_pool(pool, settings).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn open_sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    use crate::backend::Migrate;
    use crate::backend::sqlite::SqliteKeys;
    Ok(Arc::new(match settings.migrate {
        Migrate::Auto => SqliteKeys::open(path)?,
        Migrate::Check => SqliteKeys::open_existing(path)?,
    }))
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_sqlite(_path: &str, _settings: &OpenSettings) -> Result<Arc<dyn Keys>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}
