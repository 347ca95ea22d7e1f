//! The PostgreSQL ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::postgres::PgHarness;

hapax::conformance!(postgres, PgHarness::new().await);
