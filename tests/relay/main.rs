//! The relay: from a journal to a bus.

#[path = "../support/mod.rs"]
mod support;

mod kafka;
mod panics;
mod publishing;
mod pulses;
mod pulses_race;
mod put_back;
mod tenants;
