//! A ledger that fails on order.
#![allow(dead_code, reason = "each test file orders other faults")]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::error::Result;
use hapax::ledger::{
    Claim, Epoch, Extend, Marker, PreventedDays, Settle, Settled, SkipBatch, SweepSettings, Swept,
};
use hapax::{Error, Outcome, Scope, Time, Topic, ledger_over};

/// A ledger with faults to order. Clones share them.
#[derive(Clone, Default)]
pub struct Faulty {
    pub inner: MemoryLedger,
    pub faults: Arc<Faults>,
}

#[derive(Default)]
pub struct Faults {
    /// So many claims are made, but their acknowledgement is lost.
    pub claims_unheard: AtomicU32,
    /// So many batches of claims do not reach the ledger.
    pub claims_lost: AtomicU32,
    /// So many batches of claims, of those that reach the ledger, find their events held by an open transaction.
    pub claims_held: AtomicU32,
    /// So many batches of claims are in someone's way.
    pub claims_contended: AtomicU32,
    /// So many settlings do not reach the ledger.
    pub settles_lost: AtomicU32,
    /// So many extensions do not reach the ledger.
    pub extends_lost: AtomicU32,
    /// So many claims panic.
    pub panics: AtomicU32,
    /// How long a claim takes, in microseconds.
    pub claim_us: AtomicU32,
    /// How long a settling takes, in microseconds.
    pub settle_us: AtomicU32,
    /// Whether probes panic.
    pub probes_panic: AtomicBool,
    /// Whether the ledger refuses to tell the time.
    pub now_refused: AtomicBool,
    /// Whether claims, settlings and markers are never answered.
    pub stalled: AtomicBool,
    /// So many sweeps fail.
    pub sweeps_failing: AtomicU32,
    /// So many batches of skips are stored, but their acknowledgement is lost.
    pub skips_unheard: AtomicU32,
    /// Whether batches of skips are never answered.
    pub skips_stalled: AtomicBool,
    /// How often it failed over.
    pub incarnations: AtomicU32,
}

/// Takes one of a count, if there is one left.
pub fn one_of(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

fn away<T>() -> Result<T> {
    Err(Error::Unavailable { what: "a fault the test ordered".into(), source: None })
}

impl Faulty {
    async fn stall(&self) {
        if self.faults.stalled.load(Ordering::SeqCst) {
            std::future::pending::<()>().await;
        }
    }
}

ledger_over!(Faulty {
    Claims {
        async fn claim(&self, claims: &[Claim]) -> Result<Vec<Result<Outcome>>> {
            let pause = u64::from(self.faults.claim_us.load(Ordering::SeqCst));
            if pause > 0 {
                // As slow as the test asks.
                tokio::time::sleep(Duration::from_micros(pause)).await;
            }
            self.stall().await;
            assert!(!one_of(&self.faults.panics), "a panic the test ordered");
            if one_of(&self.faults.claims_contended) {
                return Err(Error::Contended { what: "a fault the test ordered".into(), source: None });
            }
            if one_of(&self.faults.claims_lost) {
                return away();
            }
            if self.faults.claims_unheard.load(Ordering::SeqCst) == 0 && one_of(&self.faults.claims_held) {
                return Ok(claims.iter().map(|_| Ok(Outcome::Busy { until: None, owner: None })).collect());
            }
            let outcomes = self.inner.claim(claims).await;
            if one_of(&self.faults.claims_unheard) { away() } else { outcomes }
        }
        async fn settle(&self, settles: &[Settle]) -> Result<Vec<Result<Settled>>> {
            self.stall().await;
            let pause = u64::from(self.faults.settle_us.load(Ordering::SeqCst));
            if pause > 0 {
                // As slow as the test asks.
                tokio::time::sleep(Duration::from_micros(pause)).await;
            }
            if one_of(&self.faults.settles_lost) {
                return away();
            }
            self.inner.settle(settles).await
        }
        async fn extend(&self, extends: &[Extend]) -> Result<Vec<Result<Settled>>> {
            if one_of(&self.faults.extends_lost) {
                return away();
            }
            self.inner.extend(extends).await
        }
        async fn now(&self) -> Result<Time> {
            if self.faults.now_refused.load(Ordering::SeqCst) {
                return Err(Error::Refused { what: "a fault the test ordered".into(), source: None });
            }
            self.inner.now().await
        }
        async fn probe(&self) -> Result<()> {
            assert!(!self.faults.probes_panic.load(Ordering::SeqCst), "a panic the test ordered");
            self.now().await.map(drop)
        }
        async fn epoch(&self) -> Result<Epoch> {
            let incarnation = self.faults.incarnations.load(Ordering::SeqCst);
            Ok(Epoch::of([self.inner.epoch().await?.to_string(), incarnation.to_string()]))
        }
    }
    ConsumerStore {
        async fn markers(&self, scope: &Scope, topic: &Topic, partitions: &[i32]) -> Result<Vec<Marker>> {
            self.stall().await;
            self.inner.markers(scope, topic, partitions).await
        }
    }
    Operations {
        async fn note_skips(&self, batch: &SkipBatch) -> Result<()> {
            if self.faults.skips_stalled.load(Ordering::SeqCst) {
                std::future::pending::<()>().await;
            }
            self.inner.note_skips(batch).await?;
            if one_of(&self.faults.skips_unheard) { away() } else { Ok(()) }
        }
        async fn prevented(&self, since_day: i32) -> Result<PreventedDays> {
            self.inner.prevented(since_day).await
        }
        async fn sweep(&self, settings: SweepSettings) -> Result<Swept> {
            if one_of(&self.faults.sweeps_failing) {
                return away();
            }
            self.inner.sweep(settings).await
        }
    }
});
