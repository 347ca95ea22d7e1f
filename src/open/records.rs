//! Opens modules of records.

use std::sync::Arc;

use super::OpenSettings;
use crate::error::{Error, Result};
use crate::records::{ModuleSlug, Modules, Roles, Snapshot};
use crate::secret::hide_password;

pub(super) async fn modules(url: &str, settings: &OpenSettings, roles: &Roles) -> Result<Arc<dyn Modules>> {
    match place(url)? {
        Place::Postgres => open_postgres(url, settings, roles).await,
        Place::Sqlite(path) => open_sqlite(path, settings).await,
    }
}

pub(super) async fn snapshot(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    match place(url)? {
        Place::Postgres => postgres_snapshot(url, settings).await,
        Place::Sqlite(path) => sqlite_snapshot(path, settings).await,
    }
}

/// Where records are.
enum Place<'u> {
    Postgres,
    Sqlite(&'u str),
}

fn place(url: &str) -> Result<Place<'_>> {
    match url.split_once(':') {
        Some(("postgres" | "postgresql", _)) => Ok(Place::Postgres),
        Some(("sqlite", path)) => match path.strip_prefix("//").unwrap_or(path) {
            "" => Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into())),
            path => Ok(Place::Sqlite(path)),
        },
        _ => Err(Error::Unsupported(format!(
            "records need a journal in SQLite or PostgreSQL, and {:?} is neither; use sqlite:FILE or \
             postgres://USER@HOST/DATABASE",
            hide_password(url)
        ))),
    }
}

#[cfg_attr(not(all(feature = "postgres", feature = "sqlite")), allow(unused_variables, clippy::unused_async))]
pub(super) async fn has_module(url: &str, settings: &OpenSettings, module: &ModuleSlug) -> Result<bool> {
    match url.split_once(':') {
        #[cfg(feature = "postgres")]
        Some(("postgres" | "postgresql", _)) => {
            use crate::backend::postgres::{PgJournal, PgJournalSettings, PgRecords};
            let mut of = PgJournalSettings::from(settings.journal.clone());
            of.schema.clone_from(&settings.schema);
            (of.migrate, of.pool_max) = (crate::backend::Migrate::Check, 1);
            PgRecords::has_module(&PgJournal::connect(url, of).await?, module).await
        }
        #[cfg(feature = "sqlite")]
        Some(("sqlite", path)) => {
            let (path, module) = (path.strip_prefix("//").unwrap_or(path).to_owned(), module.clone());
            let look = move || crate::backend::sqlite::SqliteRecords::has_module(path, &module);
            let found = tokio::task::spawn_blocking(look).await;
            found.unwrap_or_else(|error| Err(Error::unavailable("looking for a module", error)))
        }
        _ => Ok(false),
    }
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &OpenSettings, roles: &Roles) -> Result<Arc<dyn Modules>> {
    use crate::backend::postgres::PgModules;
    Ok(Arc::new(PgModules::connect(url, &settings.schema, roles.clone(), settings.migrate).await?))
}

#[cfg(feature = "postgres")]
async fn postgres_snapshot(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    use crate::backend::postgres::PgSnapshot;
    let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
    let pool = settings.pools.postgres("journal.url", url, pool_max, timeout).await?;
    Ok(Arc::new(PgSnapshot::with_pool(pool, &settings.schema)?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn postgres_snapshot(_: &str, _: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_: &str, _: &OpenSettings, _: &Roles) -> Result<Arc<dyn Modules>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn open_sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Modules>> {
    use crate::backend::Migrate;
    use crate::backend::sqlite::{SqliteJournal, SqliteRecords};
    let journal = settings.journal.clone();
    Ok(Arc::new(match settings.migrate {
        Migrate::Auto => SqliteRecords::open(&SqliteJournal::open(path, journal)?)?,
        Migrate::Check => SqliteRecords::open_existing(&SqliteJournal::open_existing(path, journal)?)?,
    }))
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn sqlite_snapshot(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    use crate::backend::sqlite::{SqliteJournal, SqliteRecords};
    let journal = SqliteJournal::open_existing(path, settings.journal.clone())?;
    Ok(Arc::new(SqliteRecords::open_existing(&journal)?))
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn sqlite_snapshot(_: &str, _: &OpenSettings) -> Result<Arc<dyn Snapshot>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_sqlite(_: &str, _: &OpenSettings) -> Result<Arc<dyn Modules>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}
