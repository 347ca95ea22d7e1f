//! The journal in memory, on SQLite and on object stores.

#[path = "../support/mod.rs"]
mod support;

mod memory;
mod mutants;
mod object;
mod object_killed;
mod object_probe;
mod object_sweep;
mod sqlite;
