//! The only place that names a database.

pub mod memory;
#[cfg(feature = "sqlite")]
pub mod sqlite;
