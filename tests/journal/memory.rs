//! The memory journal passes the conformance suite.
#![cfg(feature = "testing")]

use hapax::testing::journal::MemoryJournalHarness;

hapax::journal_conformance!(memory, MemoryJournalHarness::new());
