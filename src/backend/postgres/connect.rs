//! Opens a pool from a URL, for everything that is stored in PostgreSQL.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, PgPool};

use super::error::{reword_errors, translate};
use crate::error::{Error, Result};

/// Opens a pool. `name` is the setting the URL comes from.
///
/// Connections to other hosts use verified TLS, unless the URL sets `sslmode`.
pub(super) async fn open_pool(
    name: &str,
    url: &str,
    pool_max: u32,
    acquire_timeout: Duration,
) -> Result<PgPool> {
    reword_errors();
    if !url.starts_with("postgres://") && !url.starts_with("postgresql://") {
        return Err(Error::Config(format!("{name} is not a PostgreSQL URL: it begins with no postgres://")));
    }
    let mut options: PgConnectOptions = url
        .parse()
        .map_err(|e: sqlx::Error| Error::Config(format!("{name} is not a PostgreSQL URL: {e}")))?;
    if !url.contains("sslmode=") && !url.contains("ssl-mode=") {
        let local = matches!(options.get_host(), "localhost" | "127.0.0.1" | "::1")
            || options.get_host().starts_with('/');
        options = options.ssl_mode(if local { PgSslMode::Prefer } else { PgSslMode::VerifyFull });
    }
    if std::env::var_os("PGAPPNAME").is_none() && options.get_application_name().is_none() {
        options = options.application_name("hapax");
    }
    // sqlx would log slow statements with their whole SQL; spans and metrics already show what is
    // slow.
    let options = options.disable_statement_logging();
    knock(&options, acquire_timeout).await?;
    PgPoolOptions::new()
        .max_connections(pool_max)
        .acquire_timeout(acquire_timeout)
        .test_before_acquire(false) // a broken connection is resolved like any other doubt
        .connect_with(options)
        .await
        .map_err(|e| translate("connecting to PostgreSQL", e))
}

/// Opens one connection directly: a pool that is refused retries until its timeout, and then cannot
/// say why.
async fn knock(options: &PgConnectOptions, within: Duration) -> Result<()> {
    let what = "connecting to PostgreSQL";
    match tokio::time::timeout(within, sqlx::PgConnection::connect_with(options)).await {
        Ok(Ok(connection)) => {
            let _ = connection.close().await; // the server answered; nothing else matters
            Ok(())
        }
        Ok(Err(error)) => Err(translate(what, error)),
        Err(late) => Err(Error::unavailable(format!("{what}: no answer within {within:?}"), late)),
    }
}
