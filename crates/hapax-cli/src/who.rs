//! Who runs a command, for audit rows.

use crate::failure::Failure;

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
    Err(Failure::config("nobody is named for the audit row: $USER is not set, give --by NAME"))
}
