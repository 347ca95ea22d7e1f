//! What happens while the broker is down. These tests stop the broker, so `scripts/test` gives this program its own.

#[path = "../support/mod.rs"]
mod support;

mod consuming;
mod relaying;
