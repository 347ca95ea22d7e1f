//! What is seen of a consumer: metrics with bounded labels. `docs/telemetry.md` lists them.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Counts, Passed};
use crate::telemetry::ConsumerMeter;

/// What a consumer has done so far.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Deliveries that are through, by what became of them.
    pub passed: Counts,
    /// Deliveries in memory that are not through.
    pub in_flight: usize,
    /// Partitions in this process's partitions.
    pub partitions: usize,
    /// Those of them that are paused.
    pub paused: usize,
    /// Whether nothing is to be done here: nothing is in memory, and the ledger was looked at since and had nothing that is due.
    pub at_rest: bool,
    /// Events that the scope holds in the ledger.
    pub held: u64,
    /// Records behind the end of this process's partitions, when they were last asked for.
    pub lag: Option<i64>,
}

/// Counts for metrics and for whoever watches.
#[derive(Debug)]
pub(super) struct Meter {
    progress: Arc<Mutex<Progress>>,
    metrics: ConsumerMeter,
}

impl Meter {
    pub(super) fn new(progress: Arc<Mutex<Progress>>, metrics: ConsumerMeter) -> Self {
        Meter { progress, metrics }
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
        self.metrics.removed(count);
    }

    pub(super) fn ledger_away(&self) {
        self.metrics.ledger_away();
    }

    pub(super) fn lag(&self, lag: Option<i64>) {
        if let Some(lag) = lag {
            self.change(|progress| progress.lag = Some(lag));
            self.metrics.lag(lag);
        }
    }
}
