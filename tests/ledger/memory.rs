//! The memory ledger passes the conformance suite.
#![cfg(feature = "testing")]

use hapax::testing::MemoryHarness;

hapax::conformance!(memory, MemoryHarness::new());
