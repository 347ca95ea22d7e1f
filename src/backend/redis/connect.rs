//! Opens connections and maps their errors.

use std::collections::HashMap;
use std::time::Duration;

use redis::aio::{ConnectionManager, ConnectionManagerConfig};
use redis::{Client, ErrorKind, RedisError, ServerErrorKind};

use crate::error::{Error, Result};
use crate::secret::hide_password;

/// A connection that reconnects automatically. It connects with the first command. It never repeats
/// a failed command: whether that is right depends on the command.
pub(super) fn manager(url: &str, timeout: Duration) -> Result<ConnectionManager> {
    if let Some((scheme @ ("rediss" | "valkeys"), _)) = url.split_once(':') {
        return Err(Error::Unsupported(format!(
            "{:?} asks for TLS, which is not built in towards Redis; say {}:// and put a tunnel (such as stunnel) in between",
            hide_password(url),
            &scheme[..scheme.len() - 1]
        )));
    }
    let bad = |error: RedisError| {
        // The driver's text may contain the URL, and the URL a password.
        Error::Config(format!("{:?} is not a usable Redis URL: {}", hide_password(url), error.category()))
    };
    let client = Client::open(url).map_err(bad)?;
    let config = ConnectionManagerConfig::new()
        .set_connection_timeout(Some(timeout))
        .set_response_timeout(Some(timeout))
        .set_min_delay(Duration::from_millis(20))
        .set_number_of_retries(1);
    if tokio::runtime::Handle::try_current().is_err() {
        return Err(Error::Config("a Redis connection needs a Tokio runtime around it".into()));
    }
    ConnectionManager::new_lazy_with_config(client, config).map_err(bad)
}

/// Names the server in an error of its opening; the driver's error says only that it was refused.
pub(super) fn at(url: &str, error: Error) -> Error {
    match error {
        Error::Unavailable { what, source } => {
            Error::Unavailable { what: format!("{}: {what}", hide_password(url)), source }
        }
        error => error,
    }
}

/// Adds what was being done when a command failed.
pub(super) trait Doing<T> {
    fn doing(self, what: &str) -> Result<T>;
}

impl<T> Doing<T> for redis::RedisResult<T> {
    fn doing(self, what: &str) -> Result<T> {
        self.map_err(|error| fault(what, error))
    }
}

fn fault(what: &str, error: RedisError) -> Error {
    let what = what.to_owned();
    match error.kind() {
        ErrorKind::Server(ServerErrorKind::ReadOnly | ServerErrorKind::NoPerm)
        | ErrorKind::AuthenticationFailed => Error::Refused { what, source: Some(error.into()) },
        ErrorKind::Extension if matches!(error.code(), Some("OOM" | "MISCONF" | "NOAUTH" | "NOREPLICAS")) => {
            Error::Refused { what, source: Some(error.into()) }
        }
        ErrorKind::Server(ServerErrorKind::Moved | ServerErrorKind::Ask | ServerErrorKind::CrossSlot) => {
            Error::Unsupported(format!("{what}: the server is part of a Redis Cluster ({error})"))
        }
        ErrorKind::InvalidClientConfig => Error::Config(format!("{what}: {error}")),
        ErrorKind::Server(ServerErrorKind::ResponseError)
        | ErrorKind::UnexpectedReturnType
        | ErrorKind::Parse
        | ErrorKind::Extension => Error::Corrupt(format!("{what}: {error}")),
        _ => Error::unavailable(what, error),
    }
}

/// Runs a script by its hash, and sends it in full if the server does not know it. The server may
/// forget it again before the call; nothing has run then, so it is sent again.
pub(super) async fn send<T: redis::FromRedisValue>(
    connection: &ConnectionManager,
    script: &redis::ScriptInvocation<'_>,
) -> redis::RedisResult<T> {
    let mut sent = 0;
    loop {
        sent += 1;
        match script.invoke_async(&mut connection.clone()).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) && sent < SENT_MAX => {
            }
            answer => return answer,
        }
    }
}

/// How often a script is tried before giving up.
const SENT_MAX: u32 = 10;

/// What the server reports about itself (`INFO`), by name.
pub(super) async fn info(connection: &ConnectionManager) -> Result<HashMap<String, String>> {
    let text: String = redis::cmd("INFO")
        .query_async(&mut connection.clone())
        .await
        .doing("asking the server about itself")?;
    let pairs = text.lines().filter_map(|line| line.trim().split_once(':'));
    Ok(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
}
