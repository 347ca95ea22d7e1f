//! Opens stores of keys and stores of API tokens. Both are in memory, in an SQLite file or in
//! PostgreSQL, and one macro opens either.

use std::sync::Arc;

use super::OpenSettings;
use crate::access::{Access, MemoryAccess};
use crate::error::{Error, Result};
use crate::keyed::{Keys, MemoryKeys};
use crate::secret::hide_password;

/// Where a store is.
enum Location<'u> {
    Memory,
    Sqlite(&'u str),
    Postgres,
}

impl<'u> Location<'u> {
    /// Reads a URL. `what` names the store; `not_redis` says why it cannot be in Redis.
    fn of(url: &'u str, what: &str, not_redis: &str) -> Result<Self> {
        match url.split_once(':') {
            Some(("memory", "")) => Ok(Location::Memory),
            Some(("postgres" | "postgresql", _)) => Ok(Location::Postgres),
            Some(("sqlite", path)) => match path.strip_prefix("//").unwrap_or(path) {
                "" => Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into())),
                path => Ok(Location::Sqlite(path)),
            },
            Some(("redis" | "rediss", _)) => {
                Err(Error::Unsupported(format!("Redis cannot keep {not_redis}; use PostgreSQL or SQLite")))
            }
            _ => Err(Error::Config(format!(
                "{:?} is not the URL of a store of {what}; use memory:, sqlite:FILE or postgres://USER@HOST/DATABASE",
                hide_password(url)
            ))),
        }
    }
}

/// A function that opens a store by its URL.
macro_rules! opens {
    ($name:ident, $contract:ident, $what:literal, not_redis: $not_redis:literal,
     $memory:ident, $sqlite:ident, $postgres:ident with $postgres_settings:ident) => {
        pub(super) async fn $name(url: &str, settings: &OpenSettings) -> Result<Arc<dyn $contract>> {
            #[cfg(feature = "postgres")]
            async fn postgres(url: &str, settings: &OpenSettings) -> Result<Arc<dyn $contract>> {
                use crate::backend::postgres::{$postgres, $postgres_settings};
                let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
                let pool = settings.pools.postgres("keys.url", url, pool_max, timeout).await?;
                let settings = $postgres_settings {
                    schema: settings.schema.clone(),
                    migrate: settings.migrate,
                    refuse: settings.refuse,
                    ..$postgres_settings::default()
                };
                Ok(Arc::new($postgres::with_pool(pool, settings).await?))
            }

            #[cfg(not(feature = "postgres"))]
            #[allow(clippy::unused_async)] // has the signature of the built-in one
            async fn postgres(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn $contract>> {
                Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
            }

            #[cfg(feature = "sqlite")]
            fn sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn $contract>> {
                use crate::backend::{Migrate, sqlite::$sqlite};
                Ok(Arc::new(match settings.migrate {
                    Migrate::Auto => $sqlite::open(path)?,
                    Migrate::Check => $sqlite::open_existing(path)?,
                }))
            }

            #[cfg(not(feature = "sqlite"))]
            fn sqlite(_path: &str, _settings: &OpenSettings) -> Result<Arc<dyn $contract>> {
                Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
            }

            match Location::of(url, $what, $not_redis)? {
                Location::Memory => Ok(Arc::new($memory::default())),
                Location::Sqlite(path) => sqlite(path, settings),
                Location::Postgres => postgres(url, settings).await,
            }
        }
    };
}

opens!(keys, Keys, "keys", not_redis: "the keys of writes: it may forget an acknowledged answer",
       MemoryKeys, SqliteKeys, PgKeys with PgKeysSettings);
opens!(access, Access, "API tokens", not_redis: "API tokens: it may forget a revocation",
       MemoryAccess, SqliteAccess, PgAccess with PgAccessSettings);
