//! Opens a pool from a URL, for everything that is stored in PostgreSQL.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use sqlx::postgres::{PgConnectOptions, PgPoolOptions, PgSslMode};
use sqlx::{ConnectOptions as _, Connection as _, PgConnection, PgPool};

use super::error::{reword_errors, translate};
use crate::error::{Error, Result};

/// How long a connection that returns to its pool may take to answer.
const RETURN_WITHIN: Duration = Duration::from_secs(5);
/// A connection that was idle for longer is asked before it is used.
const IDLE_MAX: Duration = Duration::from_secs(30);

/// When a server was last found to take no writes.
static LEFT: Mutex<Option<Instant>> = Mutex::new(None);

/// A server takes no writes: no connection that is open now is used again, whichever server it leads to.
/// Whoever opens a new one may reach the primary.
pub(super) fn leave_servers() {
    *LEFT.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
}

/// Whether a connection of this age was open when a server was last found to take no writes.
fn was_left(age: Duration) -> bool {
    LEFT.lock().unwrap_or_else(PoisonError::into_inner).is_some_and(|at| at.elapsed() <= age)
}

/// What hapax needs of a pool: a connection that leads to a server that takes no writes (a fail-over
/// reached a standby first) is not used again, and one that does not answer is closed in time, and its
/// place is free again. sqlx by itself waits for it for ever, and a network that went silent would take one
/// connection after the other out of the pool. (One that goes silent in the very moment in which it
/// returns, between hapax's question and sqlx's, is still waited for until the network gives up.)
///
/// Use it for pools of your own that you give to `with_pool`, and add to it what you like but
/// `before_acquire` and `after_release`.
pub fn pool_options() -> PgPoolOptions {
    PgPoolOptions::new()
        .test_before_acquire(false) // a broken connection is resolved like any other doubt
        .before_acquire(|connection, of| {
            Box::pin(async move {
                if was_left(of.age) {
                    return Ok(false);
                }
                if of.idle_for > IDLE_MAX {
                    answers(connection).await?;
                }
                Ok(true)
            })
        })
        .after_release(|connection, _| Box::pin(async move { answers(connection).await.map(|()| true) }))
}

async fn answers(connection: &mut PgConnection) -> sqlx::Result<()> {
    let silent = |_| sqlx::Error::Io(std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer"));
    tokio::time::timeout(RETURN_WITHIN, connection.ping()).await.map_err(silent)?
}

/// Opens a pool. `name` is the setting the URL comes from.
///
/// Connections to other hosts use verified TLS, unless the URL sets `sslmode`.
pub(crate) async fn open_pool(
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
    check_reachable(&options, acquire_timeout).await?;
    pool_options()
        .max_connections(pool_max)
        .acquire_timeout(acquire_timeout)
        .connect_with(options)
        .await
        .map_err(|e| translate("connecting to PostgreSQL", e))
}

/// Opens one connection directly: a pool that is refused retries until its timeout, and then cannot
/// say why.
async fn check_reachable(options: &PgConnectOptions, within: Duration) -> Result<()> {
    let what = &format!("connecting to PostgreSQL at {}:{}", options.get_host(), options.get_port());
    match tokio::time::timeout(within, sqlx::PgConnection::connect_with(options)).await {
        Ok(Ok(connection)) => {
            let _ = connection.close().await; // the server answered; nothing else matters
            Ok(())
        }
        Ok(Err(error)) => Err(translate(what, error)),
        Err(late) => Err(Error::unavailable(format!("{what}: no answer within {within:?}"), late)),
    }
}
