//! Opens stores of API tokens.

use std::sync::Arc;

use super::OpenSettings;
use crate::access::{Access, MemoryAccess};
use crate::error::{Error, Result};
use crate::secret::hide_password;

pub(super) async fn open(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryAccess::default())),
        Some(("postgres" | "postgresql", _)) => open_postgres(url, settings).await,
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("sqlite: names no file; write sqlite:FILE".into()));
            }
            open_sqlite(path, settings).await
        }
        Some(("redis" | "rediss", _)) => Err(Error::Unsupported(
            "Redis cannot keep API tokens: it may forget a revocation; use PostgreSQL or SQLite".into(),
        )),
        _ => Err(Error::Config(format!(
            "{:?} names no store of API tokens; known are memory:, sqlite:FILE and postgres://USER@HOST/DATABASE",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    use crate::backend::postgres::{PgAccess, PgAccessSettings};
    let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
    let pool = settings.pools.postgres("keys.url", url, pool_max, timeout).await?;
    let settings = PgAccessSettings {
        schema: settings.schema.clone(),
        migrate: settings.migrate,
        refuse: settings.refuse,
        ..PgAccessSettings::default()
    };
    Ok(Arc::new(PgAccess::with_pool(pool, settings).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn open_sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    use crate::backend::Migrate;
    use crate::backend::sqlite::SqliteAccess;
    Ok(Arc::new(match settings.migrate {
        Migrate::Auto => SqliteAccess::open(path)?,
        Migrate::Check => SqliteAccess::open_existing(path)?,
    }))
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_sqlite(_path: &str, _settings: &OpenSettings) -> Result<Arc<dyn Access>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}
