//! The guard: a ledger's front door for library users, and what it emits.

#[path = "../support/mod.rs"]
mod support;

mod api;
mod faults;
mod skips;
