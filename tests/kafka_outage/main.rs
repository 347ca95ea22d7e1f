//! What happens while the broker is down. These tests stop the broker, so `scripts/test` gives this program its own.

#[path = "../support/mod.rs"]
mod support;

mod consuming;
mod relaying;

/// One test at a time: each of them stops the broker.
#[cfg(all(feature = "testing", feature = "kafka"))]
static BROKER: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
