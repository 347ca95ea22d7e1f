//! The PostgreSQL ledger passes the conformance suite.
#![cfg(all(feature = "testing", feature = "postgres"))]

#[path = "support/postgres.rs"]
mod support;

use support::PgHarness;

hapax::conformance!(postgres, PgHarness::new().await);
