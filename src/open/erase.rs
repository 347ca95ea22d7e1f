//! Opens erasers.

use std::sync::Arc;

use crate::erase::Eraser;
use crate::error::{Error, Result};
use crate::secret::hide_password;

pub(super) async fn eraser(url: &str, schema: &str) -> Result<Arc<dyn Eraser>> {
    match url.split_once(':') {
        Some(("postgres" | "postgresql", _)) => postgres(url, schema).await,
        Some(("sqlite", path)) => match path.strip_prefix("//").unwrap_or(path) {
            "" => Err(Error::Config("sqlite: lacks a file name; write sqlite:FILE".into())),
            path => sqlite(path),
        },
        Some(("redis" | "rediss", _)) => Err(Error::Unsupported(
            "a ledger in Redis cannot erase the metadata and the reasons of its entries: they stay for its retention".into(),
        )),
        Some(("s3" | "dir", _)) => Err(Error::Unsupported(
            "a journal in an object store cannot erase: its objects are written once".into(),
        )),
        _ => Err(Error::Unsupported(format!(
            "{:?} cannot erase; SQLite and PostgreSQL can",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "postgres")]
async fn postgres(url: &str, schema: &str) -> Result<Arc<dyn Eraser>> {
    Ok(Arc::new(crate::backend::postgres::PgEraser::connect(url, schema).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn postgres(_: &str, _: &str) -> Result<Arc<dyn Eraser>> {
    Err(Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

#[cfg(feature = "sqlite")]
#[allow(clippy::unnecessary_wraps)] // has the signature of the other one
fn sqlite(path: &str) -> Result<Arc<dyn Eraser>> {
    Ok(Arc::new(crate::backend::sqlite::SqliteEraser::new(path)))
}

#[cfg(not(feature = "sqlite"))]
fn sqlite(_: &str) -> Result<Arc<dyn Eraser>> {
    Err(Error::NotBuiltIn { what: "SQLite", feature: "sqlite" })
}
