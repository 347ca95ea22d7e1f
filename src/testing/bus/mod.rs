//! What every bus must pass. Cases are named after the clauses of the [`Bus`] contract (`b1_` … `b13_`).
//!
//! A bus implements [`BusHarness`] and is enrolled by one line; every case becomes a test of its own:
//!
//! ```text
//! hapax::bus_conformance!(memory, MemoryBusHarness::new());
//! ```
//!
//! Cases make topics and groups of their own, with names nobody else has, so a bus may be shared by all of them. They
//! wait for what shall happen, a minute at most: on some buses a group takes seconds to come to rest.

use std::time::Duration;

use async_trait::async_trait;

use crate::bus::{Bus, Partition, Subscription};

mod cases;
mod kit;
mod memory;
pub mod mutants;

pub mod consume;
pub mod members;
pub mod publish;

pub use cases::NAMES;
pub use kit::{DEADLINE, Recorder, Stage, drive, until};
pub use memory::MemoryBusHarness;

/// A bus under test, and what a test must be able to do to it.
#[async_trait]
pub trait BusHarness: Send + Sync {
    /// The bus.
    type Bus: Bus;

    /// Opens the bus once more, as another process would.
    async fn open(&self) -> Self::Bus;

    /// From now on the bus gets no heartbeats of the members that joined through this opening, as if their process stood
    /// still. The case does not call them until it wakes them.
    async fn silence(&self, bus: &Self::Bus);

    /// The members of a silenced opening go on.
    async fn wake(&self, bus: &Self::Bus);

    /// Removes the records of a partition below an offset, as retention does.
    async fn remove_below(&self, partition: &Partition, offset: i64);

    /// Whether a member's other partitions go on while one is asked back. Where the client library stops all of them
    /// (librdkafka does), they go on once it is given back.
    fn others_go_on(&self) -> bool {
        true
    }

    /// The shortest session the bus allows, and can keep on a loaded machine.
    fn session(&self) -> Duration {
        Duration::from_secs(6)
    }

    /// Suits a subscription to the bus.
    fn tune(&self, subscription: &mut Subscription) {
        subscription.session_timeout = self.session();
    }

    /// A name nobody else has.
    fn unique(&self, what: &str) -> String {
        format!("{what}-{}", uuid::Uuid::new_v4().simple())
    }
}
