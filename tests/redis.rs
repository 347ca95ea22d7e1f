//! The Redis ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "redis"))]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

#[path = "support/valkey.rs"]
mod support;

use support::RedisHarness;

hapax::conformance!(redis, RedisHarness::new().await);
