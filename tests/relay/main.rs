//! The relay: from a journal to a bus.

#[path = "../support/mod.rs"]
mod support;

mod kafka;
mod publishing;
mod put_back;
mod tenants;
