//! What every ledger must pass, and the tools to break one: conformance cases, a model, mutants, a proxy that loses
//! acknowledgements, crash points.
//!
//! A backend implements [`Harness`] and is enrolled by one line; every case of the one list becomes a test of its
//! own, so a new case enrols every backend:
//!
//! ```text
//! hapax::conformance!(memory, MemoryHarness::new());
//! ```
//!
//! Cases are named after the clauses of the [`Ledger`] contract (`c1_` … `c10_`), after `docs/traps.md` (`t10_` …)
//! and after `docs/acceptance.md`.

// A panic is how a case fails.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::missing_panics_doc)]

use std::time::Duration;

use async_trait::async_trait;

use crate::error::Result;
use crate::id::Scope;
use crate::ledger::{
    Claim, Ledger, Marker, Operations, Outcome, Settings, Settle, Settled, SweepSettings, Swept,
};

pub mod access;
pub mod analytics;
pub mod bus;
mod cases;
pub mod crash;
mod forward;
pub mod fuzz;
pub mod journal;
#[cfg(feature = "kafka")]
pub mod kafka;
pub mod keyed;
pub mod kit;
mod memory;
pub mod mutants;
pub mod projection;
pub mod proxy;
pub mod records;

pub mod counting;
pub mod doubt;
pub mod held;
pub mod identity;
pub mod lease;
pub mod model;
pub mod once;
pub mod operate;
pub mod order;
pub mod relay;
pub mod retention;
pub mod skips;

pub use cases::NAMES;
pub use memory::{MemoryHarness, noon};

/// A fresh storage of one backend, and what a test must be able to do to it.
#[async_trait]
pub trait Harness: Send + Sync {
    /// The ledger under test.
    type Ledger: Ledger + Clone;

    /// Opens the storage once more, as another process would.
    async fn open(&self, settings: Settings) -> Self::Ledger;

    /// Moves the ledger's own clock on.
    async fn advance(&self, by: Duration);

    /// Claims in a transaction of the ledger's database, which is then committed or rolled back.
    async fn in_transaction(
        &self,
        ledger: &Self::Ledger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>>;

    /// Settles and marks in a transaction of the ledger's database, which is then committed or rolled back.
    async fn settle_in_transaction(
        &self,
        ledger: &Self::Ledger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>>;

    /// Whether a claim made in a transaction was committed.
    async fn was_committed(&self, ledger: &Self::Ledger, claim: &Claim) -> Result<bool>;

    /// Begins a sweep and stops after some steps, as if its process were killed there. Where a sweep is one step, it is done.
    async fn sweep_part(&self, ledger: &Self::Ledger, settings: SweepSettings, steps: u32) -> Swept {
        let _ = steps;
        ledger.sweep(settings).await.expect("a sweep")
    }

    /// Whether [`sweep_part`](Harness::sweep_part) leaves weeks half dropped.
    fn sweeps_in_steps(&self) -> bool {
        false
    }

    /// Whether the ledger's clock stands still between two [`advance`](Harness::advance)s, so that times can be
    /// compared exactly.
    fn exact_time(&self) -> bool {
        true
    }
}
