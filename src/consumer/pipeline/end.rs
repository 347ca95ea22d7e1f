//! The end: releases running deliveries, commits offsets and leaves the group. Also after an error,
//! so that other members need not wait for the leases or the session of a process that is gone.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::Pipeline;
use super::partitions::{COMMIT_TIMEOUT, positions};
use crate::consumer::dead::DeadLetterOutlet;
use crate::consumer::{Counts, Stop};
use crate::error::{Error, Result};

/// How long an ending consumer waits for cancelled deliveries to be released.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an ending consumer waits, at least, for the ledger to resolve its last claims.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a consumer that must end at once waits for the group.
const LEAVE_NOW_TIMEOUT: Duration = Duration::from_millis(200);

impl Pipeline {
    /// Cancels everything that runs.
    pub(super) fn cancel_all(&self) {
        for cancel in self.partitions.values().map(|own| &own.cancel).chain(&self.released) {
            cancel.send_replace(true);
        }
        self.held.cancel();
    }

    /// Whether deliveries cancelled at the drain deadline still have not ended, because the ledger
    /// does not answer.
    pub(super) fn is_overdue(&self) -> bool {
        self.state.draining.is_some_and(|deadline| Instant::now() >= deadline + CANCEL_TIMEOUT)
    }

    /// Releases what could not finish, commits and leaves. Returns the run's result, or the first
    /// error of the end.
    pub(super) async fn end(mut self, ran: Result<()>) -> Result<Counts> {
        let now = *self.stop.borrow() == Stop::Now;
        let mut ended = ran;
        if !now {
            if ended.is_err() {
                self.cancel_running().await;
            }
            if !self.tasks.running.is_empty() {
                tracing::warn!(target: "hapax", "some deliveries did not end in time; their leases lapse");
            }
            ended = self.commit_and_clear(ended).await;
        }
        let counts = self.meter.counts();
        let within = if now { LEAVE_NOW_TIMEOUT } else { COMMIT_TIMEOUT };
        match tokio::time::timeout(within, self.subscriber.leave()).await {
            Ok(left) => ended = ended.and(left),
            Err(_) => {
                tracing::warn!(target: "hapax", "could not leave the group in time; the broker removes this member when its session times out");
            }
        }
        if !now {
            let draining = self.state.draining.filter(|_| ended.is_ok());
            ended = ended.and(finish_copies(&mut self.dead_letters, &mut self.stop, draining).await);
        }
        ended.map(|()| counts)
    }

    /// After an error: cancels what runs and waits a limited time for it.
    async fn cancel_running(&mut self) {
        self.drain();
        self.cancel_all();
        let until = Instant::now() + CANCEL_TIMEOUT;
        while let Ok(Some(task)) = tokio::time::timeout_at(until, self.tasks.running.join_next()).await {
            // Note the result, so that it is committed. One error is enough, so ignore more.
            let _ = self.on_task_done(task);
        }
    }

    async fn commit_and_clear(&mut self, ran: Result<()>) -> Result<()> {
        let deadline = self.state.draining.unwrap_or_else(Instant::now).max(Instant::now() + RESOLVE_TIMEOUT);
        if tokio::time::timeout_at(deadline, self.context.core.release_doubtful()).await.is_err() {
            tracing::warn!(target: "hapax", "the ledger did not answer; claims that it may have granted are left to lapse");
        }
        // If the bus's offsets make no sense, nothing is known to be finished.
        let ran = if matches!(ran, Err(Error::Corrupt(_))) { ran } else { ran.and(self.commit().await) };
        self.window.end().await;
        let positions = positions(self.partitions.values());
        self.clear_markers(&positions).await;
        let flushed = tokio::time::timeout(RESOLVE_TIMEOUT, self.context.core.skip_log().flush()).await;
        if let Ok(Err(error)) = flushed {
            tracing::warn!(target: "hapax", error = %error.chain(), "the last skips could not be logged");
        }
        ran
    }
}

/// Waits for copies of dead letters that are under way, up to the end of the drain. One that is cut
/// off may have been published, and would be copied again. The partitions are released by now, so
/// nobody waits for this. Returns an error if one panicked.
async fn finish_copies(
    copies: &mut DeadLetterOutlet,
    stop: &mut watch::Receiver<Stop>,
    draining: Option<Instant>,
) -> Result<()> {
    let now = Instant::now();
    let deadline = draining.map_or(now + CANCEL_TIMEOUT, |deadline| deadline.max(now + RESOLVE_TIMEOUT));
    let mut finished = Ok(());
    tokio::select! {
        () = copies.finish(&mut finished) => return finished,
        Ok(_) = stop.wait_for(|stop| *stop == Stop::Now) => {}
        () = tokio::time::sleep_until(deadline) => {}
    }
    tracing::warn!(target: "hapax", "copies of dead letters were not answered in time; they may be made again");
    finished
}
