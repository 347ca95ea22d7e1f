//! The memory ledger under test.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::Harness;
use crate::backend::memory::MemoryLedger;
use crate::clock::{ManualClock, Time};
use crate::error::Result;
use crate::id::Scope;
use crate::ledger::{Claim, Marker, Outcome, Settings, Settle, Settled};

/// A memory ledger on a clock that moves only when the test moves it.
#[derive(Debug)]
pub struct MemoryHarness {
    clock: ManualClock,
    ledger: MemoryLedger,
}

impl MemoryHarness {
    /// A fresh one. It is a Wednesday noon in it.
    pub fn new() -> Self {
        MemoryHarness::starting_at(noon())
    }

    /// A fresh one in which it is `now`.
    pub fn starting_at(now: Time) -> Self {
        let clock = ManualClock::new(now);
        let ledger = MemoryLedger::with_clock(Settings::default(), Arc::new(clock.clone()));
        MemoryHarness { clock, ledger }
    }
}

/// Wednesday 2026-03-04T12:00:00Z: where clocks that a test moves begin.
pub fn noon() -> Time {
    Time::parse("2026-03-04T12:00:00Z").expect("a constant")
}

impl Default for MemoryHarness {
    fn default() -> Self {
        MemoryHarness::new()
    }
}

#[async_trait]
impl Harness for MemoryHarness {
    type Ledger = MemoryLedger;

    async fn open(&self, settings: Settings) -> MemoryLedger {
        self.ledger.with_settings(settings)
    }

    async fn advance(&self, by: Duration) {
        self.clock.advance(by);
    }

    async fn in_transaction(
        &self,
        ledger: &MemoryLedger,
        claims: &[Claim],
        commit: bool,
    ) -> Result<Vec<Result<Outcome>>> {
        let mut transaction = ledger.begin();
        let outcomes = transaction.claim(claims)?;
        if commit {
            transaction.commit();
        }
        Ok(outcomes)
    }

    async fn settle_in_transaction(
        &self,
        ledger: &MemoryLedger,
        settles: &[Settle],
        markers: (&Scope, &[Marker]),
        commit: bool,
    ) -> Result<Vec<Result<Settled>>> {
        let mut transaction = ledger.begin();
        let answers = transaction.settle(settles)?;
        transaction.set_markers(markers.0, markers.1);
        if commit {
            transaction.commit();
        }
        Ok(answers)
    }

    async fn was_committed(&self, ledger: &MemoryLedger, claim: &Claim) -> Result<bool> {
        ledger.was_committed(claim)
    }
}
