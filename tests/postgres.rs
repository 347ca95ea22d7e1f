//! The PostgreSQL ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

#[path = "support/postgres.rs"]
mod support;

use support::PgHarness;

hapax::conformance!(postgres, PgHarness::new().await);
