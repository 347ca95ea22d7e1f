//! Metrics of a consumer, with bounded labels. `docs/telemetry.md` lists them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::{Counts, Passed};
use crate::telemetry::ConsumerMeter;

/// The progress of a consumer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Finished deliveries, by how they ended.
    pub passed: Counts,
    /// Unfinished deliveries in memory.
    pub in_flight: usize,
    /// Partitions assigned to this process.
    pub partitions: usize,
    /// How many of them are paused.
    pub paused: usize,
    /// Whether there is nothing to do: nothing is in memory, and the last look at the ledger since
    /// then found nothing due.
    pub at_rest: bool,
    /// Events that the scope holds in the ledger.
    pub held: u64,
    /// How many records this process's partitions are behind their ends, as last queried. `None`
    /// until it is known of all of them.
    pub lag: Option<i64>,
}

/// Counts for metrics and for [`Progress`].
#[derive(Debug)]
pub(super) struct Meter {
    progress: Arc<Mutex<Progress>>,
    metrics: ConsumerMeter,
    /// Records that retention removed before they were read.
    removed: AtomicU64,
}

impl Meter {
    pub(super) fn new(progress: Arc<Mutex<Progress>>, metrics: ConsumerMeter) -> Self {
        Meter { progress, metrics, removed: AtomicU64::new(0) }
    }

    fn change(&self, change: impl FnOnce(&mut Progress)) {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(super) fn passed(&self, how: Passed) {
        self.change(|progress| *progress.passed.entry(how).or_default() += 1);
        self.metrics.passed(how.label());
    }

    pub(super) fn flow(&self, in_flight: usize, distance: usize, paused: usize) {
        self.change(|progress| {
            progress.in_flight = in_flight;
            progress.paused = paused;
        });
        self.metrics.flow(in_flight, distance, paused);
    }

    pub(super) fn at_rest(&self, at_rest: bool) {
        self.change(|progress| progress.at_rest = at_rest);
    }

    pub(super) fn partitions(&self, count: usize) {
        self.change(|progress| progress.partitions = count);
    }

    pub(super) fn held(&self, count: u64) {
        self.change(|progress| progress.held = count);
        self.metrics.held(count);
    }

    pub(super) fn rebalanced(&self) {
        self.metrics.rebalanced();
    }

    pub(super) fn removed(&self, count: u64) {
        self.removed.fetch_add(count, Ordering::Relaxed);
        self.metrics.removed(count);
    }

    /// How many deliveries ended in which way.
    pub(super) fn counts(&self) -> Counts {
        let mut counts = self.progress.lock().unwrap_or_else(PoisonError::into_inner).passed.clone();
        let removed = self.removed.load(Ordering::Relaxed);
        if removed > 0 {
            counts.insert(Passed::Removed, removed);
        }
        counts
    }

    pub(super) fn ledger_away(&self) {
        self.metrics.ledger_away();
    }

    pub(super) fn lag(&self, lag: Option<i64>) {
        let mut shown = None;
        self.change(|progress| {
            let changed = std::mem::replace(&mut progress.lag, lag) != lag;
            // Without a partition nothing is behind.
            shown = lag.or((progress.partitions == 0).then_some(0)).filter(|_| changed);
        });
        if let Some(lag) = shown {
            self.metrics.lag(lag);
        }
    }
}
