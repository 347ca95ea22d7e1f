//! Opens ledgers.

use std::sync::Arc;

use super::{Migrate, OpenSettings};
use crate::backend::memory::MemoryLedger;
use crate::error::{Error, Result};
use crate::ledger::Ledger;
use crate::secret::hide_password;

/// A backend, as named by a URL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Backend<'u> {
    Memory,
    Sqlite(&'u str),
    Postgres(&'u str),
    Redis(&'u str),
}

impl<'u> Backend<'u> {
    fn of(url: &'u str) -> Result<Self> {
        match url.split_once(':') {
            Some(("memory", "")) => Ok(Backend::Memory),
            Some(("sqlite", path)) => {
                let path = path.strip_prefix("//").unwrap_or(path);
                if path.is_empty() {
                    return Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into()));
                }
                Ok(Backend::Sqlite(path))
            }
            Some(("postgres" | "postgresql", _)) => Ok(Backend::Postgres(url)),
            Some(("redis" | "rediss" | "valkey" | "valkeys", _)) => Ok(Backend::Redis(url)),
            _ => Err(Error::Config(format!(
                "{:?} is not the URL of a ledger; use memory:, sqlite:FILE, postgres://USER@HOST/DATABASE or redis://HOST:PORT",
                hide_password(url)
            ))),
        }
    }
}

pub(super) async fn open(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    match Backend::of(url)? {
        Backend::Memory => Ok(Arc::new(MemoryLedger::new(settings.ledger.clone()))),
        Backend::Sqlite(path) => open_sqlite(path, settings).await,
        Backend::Postgres(url) => open_postgres(url, settings).await,
        Backend::Redis(url) => open_redis(url, settings).await,
    }
}

/// Creates the ledger that a URL names, or brings its schema up to date, whatever `migrate` says.
pub async fn init_ledger(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    open(url, &OpenSettings { migrate: Migrate::Auto, ..settings.clone() }).await
}

/// The SQL that grants a role what a service needs, and nothing more. The owner of the schema runs it.
pub fn ledger_grants(url: &str, schema: &str, role: &str) -> Result<String> {
    match Backend::of(url)? {
        Backend::Postgres(_) => postgres_grants(schema, role),
        Backend::Memory | Backend::Redis(_) | Backend::Sqlite(_) => {
            Err(Error::Unsupported("only a ledger in PostgreSQL has roles to grant rights to".into()))
        }
    }
}

/// The SQL that creates the schema, for a DBA to read and run.
pub fn ledger_schema(url: &str, schema: &str) -> Result<String> {
    match Backend::of(url)? {
        Backend::Memory => Err(Error::Unsupported("a ledger in memory has no schema".into())),
        Backend::Redis(_) => Err(Error::Unsupported("a ledger in Redis has no schema in SQL".into())),
        Backend::Sqlite(_) => sqlite_schema(),
        Backend::Postgres(_) => postgres_schema(schema),
    }
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn open_sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    use crate::backend::sqlite::SqliteLedger;
    let open = match settings.migrate {
        Migrate::Auto => SqliteLedger::open,
        Migrate::Check => SqliteLedger::open_existing,
    };
    Ok(Arc::new(open(path, settings.ledger.clone())?))
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_sqlite(_path: &str, _settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    use crate::backend::postgres::{PgLedger, PgSettings};
    let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
    let pool = settings.pools.postgres("ledger.url", url, pool_max, timeout).await?;
    let settings = PgSettings {
        ledger: settings.ledger.clone(),
        schema: settings.schema.clone(),
        migrate: settings.migrate,
        refuse: settings.refuse,
        ..PgSettings::default()
    };
    Ok(Arc::new(PgLedger::with_pool(pool, settings).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "redis")]
async fn open_redis(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    use crate::backend::redis::{RedisLedger, RedisSettings};
    let settings = RedisSettings {
        ledger: settings.ledger.clone(),
        name: settings.schema.clone(),
        migrate: settings.migrate,
        timeout: settings.acquire_timeout,
        refuse: settings.refuse,
        ..RedisSettings::default()
    };
    Ok(Arc::new(RedisLedger::connect(url, settings).await?))
}

#[cfg(not(feature = "redis"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_redis(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn Ledger>> {
    Err(Error::NotBuiltIn { what: "Redis", feature: "redis" })
}

#[cfg_attr(feature = "sqlite", allow(clippy::unnecessary_wraps))] // the other build can fail
fn sqlite_schema() -> Result<String> {
    #[cfg(feature = "sqlite")]
    return Ok(crate::backend::sqlite::schema_sql());
    #[cfg(not(feature = "sqlite"))]
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}

#[cfg_attr(not(feature = "postgres"), allow(unused_variables))]
fn postgres_grants(schema: &str, role: &str) -> Result<String> {
    #[cfg(feature = "postgres")]
    return crate::backend::postgres::grants_sql(schema, role);
    #[cfg(not(feature = "postgres"))]
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg_attr(not(feature = "postgres"), allow(unused_variables))]
fn postgres_schema(schema: &str) -> Result<String> {
    #[cfg(feature = "postgres")]
    return crate::backend::postgres::schema_sql(schema);
    #[cfg(not(feature = "postgres"))]
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}
