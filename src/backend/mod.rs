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

#[cfg(not(feature = "sqlite"))]
pub(crate) use open::not_built_in;
pub use open::{OpenSettings, init, open, schema_sql};
