//! The end: what runs is given back, offsets are committed, the group is left. After an error as well, so that nobody waits for a
//! lease or a session of a process that is gone.

use std::time::Duration;

use tokio::time::Instant;

use super::Pipeline;
use super::partitions::{COMMIT_TIMEOUT, positions};
use crate::consumer::Counts;
use crate::consumer::Stop;
use crate::error::{Error, Result};

/// How long a consumer that ends waits for what it cancelled to be given back.
const GIVE_BACK_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a consumer that ends waits at least for the ledger to say what became of its last claims.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a consumer that ends waits for its window.
const REMEMBER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a consumer that is to end at once waits for the group.
const LEAVE_NOW_TIMEOUT: Duration = Duration::from_millis(200);

impl Pipeline {
    /// Tells everything that runs to stop.
    pub(super) fn cancel_all(&self) {
        for cancel in self.partitions.values().map(|own| &own.cancel).chain(&self.released) {
            cancel.send_replace(true);
        }
        self.state.cancel.send_replace(true);
    }

    /// Whether what was cancelled at the deadline of a drain has not ended since: the ledger does not answer.
    pub(super) fn is_overdue(&self) -> bool {
        self.state.draining.is_some_and(|deadline| Instant::now() >= deadline + GIVE_BACK_TIMEOUT)
    }

    /// Gives back what could not finish, commits, leaves. Answers with how it ran, or else with the first error of its end.
    pub(super) async fn end(mut self, ran: Result<()>) -> Result<Counts> {
        let now = *self.stop.borrow() == Stop::Now;
        let mut ended = ran;
        if !now {
            if ended.is_err() {
                self.give_back().await;
            }
            if !self.tasks.running.is_empty() {
                tracing::warn!(target: "hapax", "some deliveries did not end in time; their leases lapse");
            }
            ended = self.settle_up(ended).await;
        }
        let counts = std::mem::take(&mut self.state.counts);
        let within = if now { LEAVE_NOW_TIMEOUT } else { COMMIT_TIMEOUT };
        match tokio::time::timeout(within, self.subscriber.leave()).await {
            Ok(left) => ended = ended.and(left),
            Err(_) => {
                tracing::warn!(target: "hapax", "the group was not left in time; it will notice by itself");
            }
        }
        ended.map(|()| counts)
    }

    /// After an error: cancels what runs and waits for it, for a while.
    async fn give_back(&mut self) {
        self.drain();
        self.cancel_all();
        let until = Instant::now() + GIVE_BACK_TIMEOUT;
        while let Ok(Some(task)) = tokio::time::timeout_at(until, self.tasks.running.join_next()).await {
            // What it says is noted, so that it is committed. One error is enough.
            let _ = self.on_task_done(task);
        }
    }

    async fn settle_up(&mut self, ran: Result<()>) -> Result<()> {
        let deadline = self.state.draining.unwrap_or_else(Instant::now).max(Instant::now() + RELEASE_TIMEOUT);
        if tokio::time::timeout_at(deadline, self.context.core.release_doubtful()).await.is_err() {
            tracing::warn!(target: "hapax", "the ledger did not answer; claims that it may have granted are left to lapse");
        }
        // Of a bus whose offsets make no sense, nothing is known to be finished.
        let ran = if matches!(ran, Err(Error::Corrupt(_))) { ran } else { ran.and(self.commit().await) };
        if let Some(window) = &self.window {
            // What it does not hear of costs a claim, no more.
            let done = std::mem::take(&mut self.tasks.remember);
            let _ = tokio::time::timeout(REMEMBER_TIMEOUT, window.remember(&done)).await;
        }
        let positions = positions(self.partitions.values());
        self.clear_markers(&positions).await;
        ran
    }
}
