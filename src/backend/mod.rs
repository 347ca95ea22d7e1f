//! Implementations for each database; no other module names a driver, but for the files of `guard`
//! that take a driver's transactions.
//!
//! A backend implements contracts (`ledger`, `journal`, `bus`, `window`) and uses them and names only.
//! It knows neither who calls it nor where its settings come from.

#[cfg(feature = "clickhouse")]
pub mod clickhouse;
pub mod memory;
pub mod object;
#[cfg(feature = "opensearch")]
pub mod opensearch;
mod pools;
#[cfg(feature = "postgres")]
pub mod postgres;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(feature = "sqlite")]
pub mod sqlite;

pub use pools::Pools;

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
