//! Implementations for each database; no other module names one.

pub mod memory;
pub mod object;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

/// A driver error in readable form, for drivers whose own message says too much.
#[cfg_attr(not(feature = "postgres"), allow(clippy::missing_const_for_fn, unused_variables))]
pub(crate) fn told(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    #[cfg(feature = "postgres")]
    if let Some(text) = postgres::told(error) {
        return Some(text);
    }
    None
}

/// What to do about a schema that is missing or out of date.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Migrate {
    /// Create it or bring it up to date. Gives up: running under a role that may not change the
    /// schema.
    #[default]
    Auto,
    /// Refuse to start unless it is up to date.
    Check,
}
