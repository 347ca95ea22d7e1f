//! The only place that names a database.

pub mod memory;
pub mod object;
mod open;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

/// A driver's error with its causes, for people, where the driver itself says more than they can use.
#[cfg_attr(not(feature = "postgres"), allow(clippy::missing_const_for_fn, unused_variables))]
pub(crate) fn told(error: &(dyn std::error::Error + 'static)) -> Option<String> {
    #[cfg(feature = "postgres")]
    if let Some(text) = postgres::told(error) {
        return Some(text);
    }
    None
}

pub use open::{OpenSettings, init, open, schema_sql};
