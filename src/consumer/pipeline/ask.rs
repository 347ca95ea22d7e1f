//! Queries that run beside the pipeline, and how long they have been failing.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::bus::{Assignment, Start};
use crate::consumer::claim::ConsumerContext;
use crate::consumer::worker::{Suspects, Worker};
use crate::error::{Error, Result};

/// How often to query the ends of the partitions.
pub(super) const LAG_INTERVAL: Duration = Duration::from_secs(5);
/// How long a retried operation may fail before it is logged.
const FAILING_MAX: Duration = Duration::from_secs(30);

/// What is to be read of an assigned partition.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    /// Where reading began.
    pub(super) start: i64,
    /// The offset after its newest record, when last queried.
    pub(super) end: i64,
}

/// The extents of partitions, each with whether something was read of it. `None` if the bus does not
/// answer.
pub(super) async fn extents(
    context: ConsumerContext,
    of: Vec<(Assignment, bool)>,
) -> Option<Vec<(Assignment, Extent)>> {
    let mut extents = Vec::with_capacity(of.len());
    for (assigned, is_read) in of {
        let partition = &assigned.partition;
        let (first, end) = context.bus.range(partition).await.ok()?;
        // What was read has a position of its own.
        let committed =
            if is_read { None } else { context.bus.committed(&context.group, partition).await.ok()? };
        let unread = if context.settings.start == Start::Latest { end } else { first };
        let start = committed.unwrap_or(unread).clamp(first, end);
        extents.push((assigned, Extent { start, end }));
    }
    Some(extents)
}

/// The suspects of partitions, with the assignments at the time of the query.
pub(super) struct SuspectsAnswer {
    pub(super) assigned: Vec<Assignment>,
    pub(super) suspects: Result<Vec<Suspects>>,
}

pub(super) async fn suspects(worker: Arc<dyn Worker>, assigned: Vec<Assignment>) -> SuspectsAnswer {
    let partitions: Vec<_> = assigned.iter().map(|assigned| assigned.partition.clone()).collect();
    let suspects = worker.suspects(&partitions).await;
    SuspectsAnswer { assigned, suspects }
}

/// Since when a retried operation has been failing, and whether that was logged.
#[derive(Default)]
pub(in crate::consumer) struct Failing {
    since: Option<Instant>,
    logged: bool,
}

impl Failing {
    /// Notes a failure. Returns true if it should be logged now: at once if the error is permanent,
    /// after a while if it may pass.
    pub(in crate::consumer) fn failed(&mut self, error: &Error) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let log = !self.logged && (!error.is_retryable() || since.elapsed() >= FAILING_MAX);
        self.logged |= log;
        log
    }

    /// Notes a success. Returns true if the failure was logged, so this should be too.
    pub(in crate::consumer) fn succeeded(&mut self) -> bool {
        std::mem::take(self).logged
    }
}
