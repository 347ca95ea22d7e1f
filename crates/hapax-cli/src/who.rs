//! Who runs a command, for audit rows.

use hapax::access::AuditNote;
use hapax::config::{Config, sqlite_path};

use crate::failure::Failure;
use crate::token::ByArgs;

/// Records an action before it is done, beside the API tokens. Where there are none, there is no audit
/// either.
pub async fn note(config: &Config, note: &AuditNote) -> Result<(), Failure> {
    if config.keys.url == "memory:" || sqlite_path(&config.keys.url).is_some_and(|path| !path.exists()) {
        return Ok(());
    }
    let mut settings = config.keys_settings();
    settings.migrate = hapax::open::Migrate::Check;
    match hapax::open::access_with(&config.keys.url, &settings).await {
        Ok(access) => Ok(access.note(note).await?),
        Err(hapax::Error::Schema(_)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Records what a command with `--by` and `--reason` is about to do.
pub async fn acts(
    config: &Config,
    by: &ByArgs,
    action: &str,
    target: &str,
    details: &str,
) -> Result<(), Failure> {
    note(config, &AuditNote::new(&by.actor()?, action, target).details(details)).await
}

/// The name that was given, else the user's. A plain container names nobody; the number of the user is
/// still a fact about them.
pub fn runs(given: Option<&str>) -> Result<String, Failure> {
    if let Some(given) = given {
        if given.trim().is_empty() {
            return Err(Failure::config("--by is blank; it names the person who decides"));
        }
        return Ok(given.to_owned());
    }
    let named = ["USER", "LOGNAME"].into_iter().filter_map(|name| std::env::var(name).ok());
    named.filter(|name| !name.trim().is_empty()).map(Ok).next().unwrap_or_else(user_id)
}

#[cfg(unix)]
#[allow(clippy::unnecessary_wraps)] // has the signature of the other one
fn user_id() -> Result<String, Failure> {
    Ok(format!("uid {}", rustix::process::getuid().as_raw()))
}

#[cfg(not(unix))]
fn user_id() -> Result<String, Failure> {
    Err(Failure::config("the audit row needs a name: $USER is not set, pass --by NAME"))
}
