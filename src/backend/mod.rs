//! The only place that names a database.

pub mod memory;
