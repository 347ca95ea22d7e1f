//! The buses pass the conformance suite.
#![cfg(feature = "testing")]

use hapax::testing::bus::MemoryBusHarness;

hapax::bus_conformance!(memory, MemoryBusHarness::new());
