//! Where records are: the database of the journal, which holds their keys too.

use std::sync::Arc;

use axum::extract::FromRequestParts;
#[cfg(feature = "postgres")]
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::{IntoResponse, Response};
use hapax::backend::sqlite::{SqliteJournal, SqliteKeys, SqliteRecords};
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::keyed::KeyedSqlite;
use hapax::open::Pools;
use hapax::problem::Problem;
use hapax::records::{Create, Delete, ModuleSlug, Record, Records, Snapshot, Update};
use hapax::{Error, Result};
use tokio::sync::Semaphore;

use super::app::{App, Shared};
use crate::failure::Failure;

/// Records and their keys.
pub enum Store {
    Sqlite {
        keys: SqliteKeys,
        records: SqliteRecords,
    },
    #[cfg(feature = "postgres")]
    Postgres(Box<postgres::Postgres>),
    /// This server has none; why not.
    Nowhere(String),
}

/// A write of a record.
pub enum Write {
    Create(Create),
    Update(Update),
    Delete(Delete),
}

/// Refuses roles that bypass row security where keys or records are in PostgreSQL, before anything is made
/// with them: the server's own, and the one that looks after all tenants, which has policies of its own.
#[cfg(feature = "postgres")]
pub async fn check_roles(config: &Config) -> Result<()> {
    let (url, accepted) = (&config.keys.url, config.records.accept_bypass);
    let name = if *url == config.journal.url { "journal.url" } else { "keys.url" };
    let timeout = config.keys_settings().acquire_timeout;
    let maintenance = config.keys.maintenance_url.iter().map(|url| ("keys.maintenance_url", url));
    for (name, url) in std::iter::once((name, url)).chain(maintenance) {
        if url.starts_with("postgres:") || url.starts_with("postgresql:") {
            hapax::backend::postgres::refuse_bypass(name, url, timeout, accepted).await?;
        }
    }
    Ok(())
}

/// Refuses keys in PostgreSQL whose row security was changed.
#[cfg(feature = "postgres")]
pub async fn check_keys(config: &Config, pools: &Pools) -> Result<()> {
    let (url, settings) = (&config.keys.url, config.keys_settings());
    if !url.starts_with("postgres:") && !url.starts_with("postgresql:") {
        return Ok(());
    }
    let pool = pools.postgres("keys.url", url, settings.pool_max, settings.acquire_timeout).await?;
    hapax::backend::postgres::check_keys(&pool, &settings.schema, config.records.accept_bypass).await
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
pub async fn check_keys(_: &Config, _: &Pools) -> Result<()> {
    Ok(())
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
pub async fn check_roles(_: &Config) -> Result<()> {
    Ok(())
}

impl Store {
    /// Opens it. Records that were never made are opened once they are there.
    pub async fn open(config: &Config, pools: &Pools) -> std::result::Result<Self, Failure> {
        if let Err(error) = config.records_in_one_database() {
            return Ok(Store::Nowhere(error.to_string()));
        }
        match sqlite_path(&config.journal.url) {
            Some(path) => Ok(open_sqlite(config, path)?),
            None => Ok(open_postgres(config, pools).await?),
        }
    }

    /// Permits for writes, which hold a connection to their end, also while they wait for a lock.
    /// Files have no pool.
    pub fn writes(&self) -> Option<Arc<Semaphore>> {
        match self {
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => Some(of.writes()),
            _ => None,
        }
    }

    /// Opens what could not be opened at the start.
    #[allow(clippy::unused_async)] // a file is open already
    pub async fn ready(&self) -> Result<()> {
        match self {
            Store::Sqlite { .. } => Ok(()),
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => of.ready().await,
            Store::Nowhere(reason) => Err(Error::Unsupported(reason.clone())),
        }
    }

    /// Refuses a module whose protection was changed. The others are served.
    #[cfg_attr(not(feature = "postgres"), allow(clippy::unused_async, clippy::unused_self, unused_variables))]
    pub async fn serves(&self, slug: &str) -> std::result::Result<(), Problem> {
        // A name that no module can have is refused by the route.
        #[cfg(feature = "postgres")]
        if let (Store::Postgres(of), Ok(module)) = (self, ModuleSlug::new(slug)) {
            return match of.records()?.check_module(&module).await {
                Err(error @ Error::Refused { .. }) => Err(unprotected(&module, &error)),
                other => Ok(other?),
            };
        }
        Ok(())
    }

    /// Whether there is this module, also where this server has no records.
    pub async fn has_module(&self, app: &App, module: &ModuleSlug) -> Result<bool> {
        match self {
            Store::Sqlite { records, .. } => {
                let (path, module) = (records.path().to_owned(), module.clone());
                let look = tokio::task::spawn_blocking(move || SqliteRecords::has_module(path, &module));
                look.await.unwrap_or_else(|error| Err(Error::unavailable("looking for a module", error)))
            }
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => hapax::backend::postgres::PgRecords::has_module(&of.journal, module).await,
            Store::Nowhere(_) => {
                let (url, settings) = (&app.config.journal.url, app.config.journal_settings());
                hapax::open::has_module(url, &settings, module).await
            }
        }
    }

    /// For reading.
    pub fn reader(&self) -> Result<&dyn Records> {
        match self {
            Store::Sqlite { records, .. } => Ok(records),
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => Ok(of.records()?),
            Store::Nowhere(reason) => Err(Error::Unsupported(reason.clone())),
        }
    }

    /// For reading, by code that outlives the request.
    pub fn shared(&self) -> Option<Arc<dyn Records>> {
        match self {
            Store::Sqlite { records, .. } => Some(Arc::new(records.clone())),
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => {
                of.records().ok().map(|records| Arc::new(records.clone()) as Arc<dyn Records>)
            }
            Store::Nowhere(_) => None,
        }
    }

    /// Writes in the transaction of a request.
    pub async fn write(&self, tx: Tx, write: Write) -> Result<Record> {
        match (self, tx) {
            (Store::Sqlite { records, .. }, Tx::Sqlite(mut tx)) => {
                let records = records.clone();
                let done = tx.run(move |tx| match &write {
                    Write::Create(create) => records.create_in(tx, create),
                    Write::Update(update) => records.update_in(tx, update),
                    Write::Delete(delete) => records.delete_in(tx, delete),
                });
                done.await?
            }
            #[cfg(feature = "postgres")]
            (Store::Postgres(of), Tx::Postgres(mut tx)) => {
                let records = of.records()?;
                match &write {
                    Write::Create(create) => records.create_in(&mut tx, create).await,
                    Write::Update(update) => records.update_in(&mut tx, update).await,
                    Write::Delete(delete) => records.delete_in(&mut tx, delete).await,
                }
            }
            #[cfg(feature = "postgres")]
            _ => Err(Error::Unsupported("the transaction is of another database".into())),
            #[cfg(not(feature = "postgres"))]
            (Store::Nowhere(reason), Tx::Sqlite(_)) => Err(Error::Unsupported(reason.clone())),
        }
    }

    /// The records of all tenants, for a read model that begins. None where there are none yet, where
    /// Debezium reads them by itself, and where no role of this server sees all tenants: then a model begins
    /// with the topic.
    #[cfg_attr(not(feature = "postgres"), allow(clippy::unused_async, unused_variables))]
    pub async fn snapshot(&self, config: &Config) -> Result<Option<Arc<dyn Snapshot>>> {
        match self {
            Store::Sqlite { records, .. } => Ok(Some(Arc::new(records.clone()))),
            #[cfg(feature = "postgres")]
            Store::Postgres(_) if config.feed_settings().source != hapax::analytics::Source::Journal => {
                Ok(None)
            }
            #[cfg(feature = "postgres")]
            Store::Postgres(of) => of.snapshot().await,
            Store::Nowhere(_) => Ok(None),
        }
    }

    /// The pulses of change data capture, where records are in PostgreSQL.
    #[cfg(feature = "postgres")]
    pub fn cdc(&self, config: &Config) -> Option<hapax::backend::postgres::PgCdc> {
        let Store::Postgres(of) = self else { return None };
        Some(hapax::backend::postgres::PgCdc::with_pool(
            of.keys.pool().clone(),
            &config.keys_settings().schema,
        ))
    }

    /// Wakes those who wait for events.
    #[cfg_attr(not(feature = "postgres"), allow(clippy::unused_self))] // files need no call
    pub fn wake(&self) {
        #[cfg(feature = "postgres")]
        if let Store::Postgres(of) = self {
            of.journal.wake();
        }
    }
}

/// What is wrong with it is for the log: it says how to get past it.
#[cfg(feature = "postgres")]
fn unprotected(module: &ModuleSlug, error: &Error) -> Problem {
    tracing::error!(target: "hapax", error = %error.chain(), "a module is not served");
    let message = format!(
        "module {module} is not served, because its protection was changed; `hapax modules ls` says how, and it is served again \
         once that is mended"
    );
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "The module is not served", message).retry()
}

fn open_sqlite(config: &Config, path: &std::path::Path) -> Result<Store> {
    let settings = config.journal_settings();
    let keys = if settings.migrate == Migrate::Auto {
        SqliteKeys::open(path)?
    } else {
        SqliteKeys::open_existing(path)?
    };
    let journal = match settings.migrate {
        Migrate::Auto => SqliteJournal::open(path, settings.journal)?,
        Migrate::Check => SqliteJournal::open_existing(path, settings.journal)?,
    };
    match settings.migrate {
        Migrate::Auto => Ok(Store::Sqlite { keys, records: SqliteRecords::open(&journal)? }),
        Migrate::Check => match SqliteRecords::open_existing(&journal) {
            Ok(records) => Ok(Store::Sqlite { keys, records }),
            Err(error @ Error::Schema(_)) => Ok(Store::Nowhere(error.to_string())),
            Err(error) => Err(error),
        },
    }
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_: &Config, _: &Pools) -> Result<Store> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "postgres")]
async fn open_postgres(config: &Config, pools: &Pools) -> Result<Store> {
    Ok(Store::Postgres(Box::new(postgres::Postgres::open(config, pools).await?)))
}

#[cfg(feature = "postgres")]
mod postgres {
    use std::sync::Arc;

    use hapax::backend::postgres::{
        PgJournal, PgJournalSettings, PgKeys, PgKeysSettings, PgRecords, PgRecordsSettings, PgSnapshot,
    };
    use hapax::config::Config;
    use hapax::open::Pools;
    use hapax::records::{Scan, Snapshot};
    use hapax::{Error, Result};
    use tokio::sync::{OnceCell, Semaphore};

    /// Keys, journal and records on one pool.
    pub struct Postgres {
        pub keys: PgKeys,
        pub journal: PgJournal,
        records: OnceCell<PgRecords>,
        accept_bypass: bool,
        /// With the role that sees all tenants, if one is named.
        all: PgSnapshot,
        /// How many writes of records may hold a connection at once.
        writes: Arc<Semaphore>,
    }

    impl Postgres {
        pub async fn open(config: &Config, pools: &Pools) -> Result<Self> {
            let settings = config.keys_settings();
            let mut of_keys = PgKeysSettings::default();
            of_keys.schema.clone_from(&settings.schema);
            of_keys.migrate = settings.migrate;
            let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
            let pool = pools.postgres("keys.url", &config.keys.url, pool_max, timeout).await?;
            let keys = PgKeys::with_pool(pool, of_keys).await?;
            let of_all = match &config.keys.maintenance_url {
                Some(url) => {
                    let connections = crate::open::MAINTENANCE_CONNECTIONS;
                    pools.postgres("keys.maintenance_url", url, connections, timeout).await?
                }
                None => keys.pool().clone(),
            };
            let all = PgSnapshot::with_pool(of_all, &settings.schema)?;
            let mut of_journal = PgJournalSettings::from(settings.journal);
            of_journal.schema = settings.schema;
            of_journal.migrate = settings.migrate;
            let journal = PgJournal::with_pool(keys.pool().clone(), of_journal).await?;
            let accept_bypass = config.records.accept_bypass;
            // Some connections are left for what is short and must not wait: settlings, the relay, probes.
            let connections = keys.pool().options().get_max_connections();
            let writes = Arc::new(Semaphore::new((connections - connections / 4) as usize));
            let of = Postgres { keys, journal, records: OnceCell::new(), accept_bypass, all, writes };
            match of.ready().await {
                Ok(()) | Err(Error::NotFound(_)) => Ok(of),
                Err(error) => Err(error),
            }
        }

        pub async fn ready(&self) -> Result<()> {
            let mut settings = PgRecordsSettings::default();
            settings.accept_bypass = self.accept_bypass;
            if self.records.get().is_none() && !PgRecords::are_there(&self.journal).await? {
                return Err(none());
            }
            self.records.get_or_try_init(|| PgRecords::open(&self.journal, settings)).await.map(|_| ())
        }

        /// The records of all tenants, if there are any and a role sees them.
        pub async fn snapshot(&self) -> Result<Option<Arc<dyn Snapshot>>> {
            match self.ready().await {
                Err(Error::NotFound(_)) => return Ok(None),
                other => other?,
            }
            match self.all.snapshot(&Scan::new(1)).await {
                Ok(_) => Ok(Some(Arc::new(self.all.clone()))),
                Err(Error::Refused { what, .. }) => {
                    tracing::info!(target: "hapax", %what, "a read model that begins here begins with the topic");
                    Ok(None)
                }
                Err(error) => Err(error),
            }
        }

        pub fn writes(&self) -> Arc<Semaphore> {
            Arc::clone(&self.writes)
        }

        pub fn records(&self) -> Result<&PgRecords> {
            self.records.get().ok_or_else(none)
        }
    }

    fn none() -> Error {
        Error::NotFound("there is no module; `hapax modules create SLUG` makes one".into())
    }
}

/// The transaction that a key was begun in.
pub enum Tx {
    Sqlite(KeyedSqlite),
    #[cfg(feature = "postgres")]
    Postgres(hapax::keyed::KeyedTx),
}

impl FromRequestParts<Shared> for Tx {
    type Rejection = Response;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> std::result::Result<Self, Response> {
        match &app.records {
            Store::Sqlite { .. } => KeyedSqlite::from_request_parts(parts, app).await.map(Tx::Sqlite),
            #[cfg(feature = "postgres")]
            Store::Postgres(_) => {
                hapax::keyed::KeyedTx::from_request_parts(parts, app).await.map(Tx::Postgres)
            }
            Store::Nowhere(reason) => Err(Problem::of(&Error::Unsupported(reason.clone())).into_response()),
        }
    }
}
