//! Opens journals.

use std::sync::Arc;
use std::time::Duration;

use super::OpenSettings;
use crate::backend::object::{Directory, ObjectJournal, ObjectSettings, Objects};
use crate::error::{Error, Result};
use crate::journal::{Journal, MemoryJournal};
use crate::secret::hide_password;

pub(super) async fn open(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    match url.split_once(':') {
        Some(("memory", "")) => Ok(Arc::new(MemoryJournal::new(settings.journal.clone()))),
        Some(("dir" | "s3", _)) => open_objects(store(url, settings.acquire_timeout).await?, settings).await,
        Some(("postgres" | "postgresql", _)) => open_postgres(url, settings).await,
        Some(("sqlite", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into()));
            }
            open_sqlite(path, settings).await
        }
        _ => Err(Error::Config(format!(
            "{:?} is not the URL of a journal; use memory:, sqlite:FILE, postgres://USER@HOST/DATABASE, s3://BUCKET/PREFIX or dir:PATH",
            hide_password(url)
        ))),
    }
}

async fn open_objects(objects: Arc<dyn Objects>, settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    let settings = ObjectSettings {
        journal: settings.journal.clone(),
        migrate: settings.migrate,
        allocator: settings.allocator.clone(),
        ..ObjectSettings::default()
    };
    Ok(Arc::new(ObjectJournal::open(objects, settings).await?))
}

/// Opens the object store that a URL names, `dir:PATH` or `s3://BUCKET/PREFIX`; each request may
/// take `timeout`.
pub async fn store(url: &str, timeout: Duration) -> Result<Arc<dyn Objects>> {
    match url.split_once(':') {
        Some(("dir", path)) => {
            let path = path.strip_prefix("//").unwrap_or(path);
            if path.is_empty() {
                return Err(Error::Config("dir: lacks a directory; write dir:PATH".into()));
            }
            Ok(Arc::new(Directory::open(path)?))
        }
        Some(("s3", _)) => open_s3(url, timeout).await,
        _ => Err(Error::Config(format!(
            "{:?} is not the URL of an object store; use s3://BUCKET/PREFIX or dir:PATH",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "s3")]
async fn open_s3(url: &str, timeout: Duration) -> Result<Arc<dyn Objects>> {
    use crate::backend::object::{S3, S3Settings};
    let s3 = S3Settings { timeout, ..S3Settings::from_url(url)? };
    Ok(Arc::new(S3::connect(s3).await?))
}

#[cfg(not(feature = "s3"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_s3(_url: &str, _timeout: Duration) -> Result<Arc<dyn Objects>> {
    Err(Error::NotBuiltIn { what: "S3", feature: "s3" })
}

#[cfg(feature = "postgres")]
async fn open_postgres(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    use crate::backend::postgres::{PgJournal, PgJournalSettings};
    let (pool_max, timeout) = (settings.pool_max, settings.acquire_timeout);
    let pool = settings.pools.postgres("journal.url", url, pool_max, timeout).await?;
    let settings = PgJournalSettings {
        journal: settings.journal.clone(),
        schema: settings.schema.clone(),
        migrate: settings.migrate,
        ..PgJournalSettings::default()
    };
    Ok(Arc::new(PgJournal::with_pool(pool, settings).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_postgres(_url: &str, _settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unused_async)] // opening a file does not wait, unlike a server
async fn open_sqlite(path: &str, settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    use crate::backend::Migrate;
    use crate::backend::sqlite::SqliteJournal;
    let open = match settings.migrate {
        Migrate::Auto => SqliteJournal::open,
        Migrate::Check => SqliteJournal::open_existing,
    };
    Ok(Arc::new(open(path, settings.journal.clone())?))
}

#[cfg(not(feature = "sqlite"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_sqlite(_path: &str, _settings: &OpenSettings) -> Result<Arc<dyn Journal>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}
