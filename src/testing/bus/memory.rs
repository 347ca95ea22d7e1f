//! The memory bus under test.

use std::time::Duration;

use async_trait::async_trait;

use super::BusHarness;
use crate::bus::{MemoryBus, Partition};

/// A memory bus of its own.
#[derive(Debug, Default)]
pub struct MemoryBusHarness(MemoryBus);

impl MemoryBusHarness {
    /// An empty one.
    pub fn new() -> Self {
        MemoryBusHarness::default()
    }
}

#[async_trait]
impl BusHarness for MemoryBusHarness {
    type Bus = MemoryBus;

    async fn open(&self) -> MemoryBus {
        self.0.reopened()
    }

    async fn silence(&self, bus: &MemoryBus) {
        bus.silence(true);
    }

    async fn wake(&self, bus: &MemoryBus) {
        bus.silence(false);
    }

    async fn remove_below(&self, partition: &Partition, offset: i64) {
        self.0.remove_below(partition, offset).expect("the partition is there");
    }

    fn session(&self) -> Duration {
        Duration::from_millis(300)
    }
}
