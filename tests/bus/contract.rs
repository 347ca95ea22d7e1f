//! The buses pass the conformance suite.
#![cfg(feature = "testing")]
#![allow(clippy::expect_used, reason = "a panic is how a test fails")]

use hapax::testing::bus::MemoryBusHarness;

hapax::bus_conformance!(memory, MemoryBusHarness::new());

#[cfg(feature = "sqlite")]
hapax::bus_conformance!(embedded, file::EmbeddedHarness::new());

#[cfg(feature = "sqlite")]
mod file {
    use std::time::Duration;

    use async_trait::async_trait;
    use hapax::bus::{EmbeddedBus, Partition};
    use hapax::testing::bus::BusHarness;

    /// A fresh file.
    pub struct EmbeddedHarness(tempfile::TempDir);

    impl EmbeddedHarness {
        pub fn new() -> Self {
            EmbeddedHarness(tempfile::tempdir().expect("a directory for the test"))
        }
    }

    #[async_trait]
    impl BusHarness for EmbeddedHarness {
        type Bus = EmbeddedBus;

        async fn open(&self) -> EmbeddedBus {
            EmbeddedBus::open(self.0.path().join("bus.db")).expect("the file opens")
        }

        async fn silence(&self, bus: &EmbeddedBus) {
            bus.silence(true);
        }

        async fn wake(&self, bus: &EmbeddedBus) {
            bus.silence(false);
        }

        async fn remove_below(&self, partition: &Partition, offset: i64) {
            let bus = self.open().await;
            bus.remove_below(partition, offset).await.expect("the partition is there");
        }

        fn session(&self) -> Duration {
            Duration::from_secs(5) // a busy machine does not stand still for so long
        }
    }
}
