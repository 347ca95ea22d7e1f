//! The ledger: its contract on memory, SQLite and Redis, the state machine, and mutants that the suites must catch.

#[path = "../support/mod.rs"]
mod support;

mod batching;
mod crash_point;
mod memory;
mod mutants;
mod redis;
mod redis_incarnation;
mod redis_ledger;
mod sqlite;
mod sqlite_contract;
mod state_machine;
mod traps;
