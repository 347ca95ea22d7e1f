//! The bus: its contract in memory and embedded, groups of processes, and mutants.

#[path = "../support/mod.rs"]
mod support;

mod contract;
mod embedded;
mod mutants;
mod processes;
