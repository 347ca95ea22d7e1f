//! The whole path under crashes and outages: real processes, real servers.

#[path = "../support/mod.rs"]
mod support;

mod cases;
mod chaos;
mod outages;
