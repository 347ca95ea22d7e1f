//! From a URL to a pool, for everything that lives in PostgreSQL.

use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, PgPool};

use super::error::translate;
use crate::error::{Error, Result};

/// Opens a pool. `name` is the setting the URL comes from.
///
/// A host that is not this machine is spoken to over verified TLS, unless the URL names another `sslmode`.
pub(super) async fn open_pool(
    name: &str,
    url: &str,
    pool_max: u32,
    acquire_timeout: Duration,
) -> Result<PgPool> {
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
    // It would log slow statements with their whole SQL; what is slow here is seen by spans and metrics.
    let options = options.disable_statement_logging();
    knock(&options, acquire_timeout).await?;
    PgPoolOptions::new()
        .max_connections(pool_max)
        .acquire_timeout(acquire_timeout)
        .test_before_acquire(false) // a broken connection is a doubt like any other, and resolved as one
        .connect_with(options)
        .await
        .map_err(|e| translate("connecting to PostgreSQL", e))
}

/// One connection by hand: a pool that meets a closed door tries until its time is over, and then cannot say why.
async fn knock(options: &PgConnectOptions, within: Duration) -> Result<()> {
    let what = "connecting to PostgreSQL";
    match tokio::time::timeout(within, sqlx::PgConnection::connect_with(options)).await {
        Ok(Ok(connection)) => {
            let _ = connection.close().await; // it has answered; that is all
            Ok(())
        }
        Ok(Err(error)) => Err(translate(what, error)),
        Err(late) => Err(Error::unavailable(format!("{what}: no answer within {within:?}"), late)),
    }
}
