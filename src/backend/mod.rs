//! The only place that names a database.

pub mod memory;
mod open;

pub use open::{OpenSettings, init, open, schema_sql};
