//! Partitions: assigned, revoked, lost; paused when too much is in memory; committed up to the
//! lowest unfinished offset.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::ask::{self, Extent, SuspectsAnswer};
use super::{PartitionState, Pipeline, task_failed};
use crate::bus::{Assignment, Partition};
use crate::consumer::OutagePolicy;
use crate::consumer::arrival::{Queued, Source};
use crate::consumer::claim::is_contention;
use crate::consumer::offsets::CommitPoint;
use crate::error::{Error, Result};

/// How many offsets above unfinished ones may be kept in memory, per delivery that may be in
/// flight.
const DISTANCE_FACTOR: usize = 64;

impl Pipeline {
    pub(super) fn on_assigned(&mut self, assigned: Vec<Assignment>) {
        self.meter.rebalanced();
        for assigned in assigned {
            let partition = assigned.partition.clone();
            tracing::info!(target: "hapax", %partition, epoch = assigned.epoch, "partition assigned");
            let own = PartitionState {
                assigned,
                commit_point: CommitPoint::default(),
                extent: None,
                committed: None,
                running: 0,
                bytes: 0,
                paused: false,
                cancel: watch::channel(false).0,
                suspects: None,
                suspects_unknown: true,
            };
            self.partitions.insert(partition, own);
        }
        self.meter.partitions(self.partitions.len());
        self.state.next_lag = Instant::now();
        self.meter.lag(None);
        self.ask_for_suspects();
    }

    pub(super) fn on_extents(&mut self, extents: Option<Vec<(Assignment, Extent)>>) {
        for (assigned, extent) in extents.into_iter().flatten() {
            if let Some(own) = self.partitions.get_mut(&assigned.partition)
                && own.assigned == assigned
            {
                let start = own.extent.map_or(extent.start, |known| known.start);
                own.extent = Some(Extent { start, ..extent });
            }
        }
    }

    /// How many records the partitions are behind their ends. `None` until that is known of all.
    pub(super) fn lag(&self) -> Option<i64> {
        let behind = |own: &PartitionState| {
            let extent = own.extent?;
            Some((extent.end - own.commit_point.position().unwrap_or(extent.start)).max(0))
        };
        if self.partitions.is_empty() { None } else { self.partitions.values().map(behind).sum() }
    }

    /// Commits what is finished and releases the partitions at once. Queued deliveries are dropped;
    /// the next owner gets them. Running ones continue under their lease or in their transaction:
    /// the next owner reads them first, meets the claim and waits in the queue of their key.
    pub(super) async fn on_revoked(&mut self, revoked: &[Assignment]) -> Result<()> {
        self.meter.rebalanced();
        self.forget_queued(revoked);
        self.commit().await?;
        let mut partitions = Vec::with_capacity(revoked.len());
        for assigned in revoked {
            if self.partitions.get(&assigned.partition).is_some_and(|own| own.assigned == *assigned)
                && let Some(own) = self.partitions.remove(&assigned.partition)
            {
                tracing::info!(target: "hapax", partition = %assigned.partition, running = own.running, "partition revoked");
                partitions.push(own);
            }
        }
        self.meter.partitions(self.partitions.len());
        self.clear_markers(&positions(&partitions)).await;
        // Stopping this process cancels these too.
        self.released.retain(|cancel| cancel.receiver_count() > 0);
        self.released.extend(partitions.into_iter().map(|own| own.cancel));
        self.state.unreleased.extend(revoked.iter().cloned());
        Ok(())
    }

    /// Cancels what runs of lost partitions. Tokens decide the rest.
    pub(super) fn on_lost(&mut self, lost: &[Assignment]) {
        self.meter.rebalanced();
        for assigned in lost {
            if self.partitions.get(&assigned.partition).is_some_and(|own| own.assigned == *assigned)
                && let Some(own) = self.partitions.remove(&assigned.partition)
            {
                tracing::warn!(target: "hapax", partition = %assigned.partition, running = own.running, "partition lost");
                own.cancel.send_replace(true);
            }
        }
        self.forget_queued(lost);
        self.meter.partitions(self.partitions.len());
    }

    fn forget_queued(&mut self, gone: &[Assignment]) {
        let is_gone = |source: &Source| matches!(source, Source::Bus(assigned) if gone.contains(assigned));
        self.queues.retain(|queued| !is_gone(&queued.source));
        let mut waiting = std::mem::take(&mut self.alone);
        for (queue, mut arrivals) in waiting.drain(..) {
            arrivals.retain(|arrival| !is_gone(&arrival.source));
            if arrivals.is_empty() {
                self.queues.release(queue, Vec::new(), None);
            } else {
                self.alone.push_back((queue, arrivals));
            }
        }
    }

    pub(super) async fn update_partitions(&mut self) -> Result<()> {
        let now = Instant::now();
        if !self.state.unreleased.is_empty() {
            match self.subscriber.release(&self.state.unreleased).await {
                Ok(()) => self.state.unreleased.clear(),
                Err(error) if error.is_retryable() => {
                    tracing::debug!(target: "hapax", error = %error.chain(), "partitions not given back yet");
                }
                Err(error) => return Err(error),
            }
        }
        self.ask_for_suspects();
        self.pause_and_resume().await?;
        if now >= self.state.next_commit {
            self.commit().await?;
            self.state.next_commit = Instant::now() + self.context.settings.commit_interval;
        }
        Ok(())
    }

    /// Asks which deliveries of new partitions were in flight when a process died. Runs in a task,
    /// because a ledger that hangs must delay neither the group nor a stop.
    fn ask_for_suspects(&mut self) {
        if self.ledger.is_away() || !self.tasks.suspects.is_empty() {
            return;
        }
        let suspects_unknown = self.partitions.values().filter(|own| own.suspects_unknown);
        let suspects_unknown: Vec<_> = suspects_unknown.map(|own| own.assigned.clone()).collect();
        if !suspects_unknown.is_empty() {
            self.tasks.suspects.spawn(ask::suspects(Arc::clone(&self.worker), suspects_unknown));
        }
    }

    /// Marks suspects among what has arrived since the assignment. Nothing starts until the answer
    /// is there.
    pub(super) fn on_suspects(
        &mut self,
        answer: std::result::Result<SuspectsAnswer, tokio::task::JoinError>,
    ) -> Result<()> {
        let SuspectsAnswer { assigned, suspects } = answer.map_err(task_failed)?;
        let fail_fast = self.context.settings.outage == OutagePolicy::FailFast;
        let suspects = match suspects {
            Ok(suspects) => suspects,
            Err(error) if error.is_retryable() && (!fail_fast || is_contention(&error)) => {
                self.ledger.on_away(); // it is asked again once the ledger answers
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for assigned in assigned {
            let same = |own: &&mut PartitionState| own.assigned == assigned;
            if let Some(own) = self.partitions.get_mut(&assigned.partition).filter(same) {
                own.suspects_unknown = false;
                let of = suspects.iter().find(|suspects| suspects.partition == assigned.partition);
                own.suspects = of.cloned();
            }
        }
        let partitions = &self.partitions;
        self.queues.for_each(|queued| suspect(partitions, queued));
        Ok(())
    }

    /// Clears the markers of partitions. If the ledger does not answer in time, the markers stay,
    /// and the next owner finds some suspects, nothing worse.
    pub(super) async fn clear_markers(&mut self, positions: &[(Partition, Option<i64>)]) {
        if tokio::time::timeout(CLEAR_TIMEOUT, self.worker.release(positions)).await.is_err() {
            tracing::debug!(target: "hapax", "markers were not cleared in time");
        }
    }

    /// Pauses partitions when as much is in memory as allowed, from all partitions and the ledger
    /// together, and resumes them when enough is free again.
    async fn pause_and_resume(&mut self) -> Result<()> {
        let settings = &self.context.settings;
        let stop = self.held.is_full() || self.state.draining.is_some();
        let unfinished: usize = self.partitions.values().map(|own| own.commit_point.unfinished()).sum();
        let bytes: usize = self.partitions.values().map(|own| own.bytes).sum();
        let distance: usize = self.partitions.values().map(|own| own.commit_point.distance()).sum();
        let events = Budget { max: settings.in_flight_max, used: unfinished + self.held.len() };
        let bytes = Budget { max: settings.in_flight_bytes_max, used: bytes + self.held.bytes() };
        let kept = Budget { max: settings.in_flight_max * DISTANCE_FACTOR, used: distance };
        let (mut pause, mut resume) = (Vec::<Assignment>::new(), Vec::new());
        for own in self.partitions.values_mut() {
            let (open, behind) = (own.commit_point.unfinished(), own.commit_point.distance());
            let over = stop || events.is_over(open) || bytes.is_over(own.bytes) || kept.is_over(behind);
            let under = !stop && events.is_under(open) && bytes.is_under(own.bytes) && kept.is_under(behind);
            if over && !own.paused {
                own.paused = true;
                pause.push(own.assigned.clone());
            } else if under && own.paused {
                own.paused = false;
                resume.push(own.assigned.clone());
            }
        }
        if !pause.is_empty() {
            let paused = self.subscriber.pause(&pause).await;
            self.unless_away(paused, &pause, false)?;
        }
        if !resume.is_empty() {
            let resumed = self.subscriber.resume(&resume).await;
            self.unless_away(resumed, &resume, true)?;
        }
        let paused = self.partitions.values().filter(|own| own.paused).count();
        self.meter.flow(unfinished + self.held.len(), distance, paused);
        Ok(())
    }

    /// If the bus is unavailable, restores the partitions' state so that the request is made again.
    fn unless_away(&mut self, asked: Result<()>, partitions: &[Assignment], paused: bool) -> Result<()> {
        match asked {
            Err(error) if error.is_retryable() => {
                tracing::debug!(target: "hapax", error = %error.chain(), "partitions not paused or resumed yet");
                for assigned in partitions {
                    if let Some(own) = self.partitions.get_mut(&assigned.partition) {
                        own.paused = paused;
                    }
                }
                Ok(())
            }
            other => other,
        }
    }

    /// Commits the commit points. The ledger has recorded everything below them: that is what
    /// "finished" means.
    pub(super) async fn commit(&mut self) -> Result<()> {
        let mut offsets = Vec::new();
        for own in self.partitions.values() {
            if let Some(position) = own.commit_point.position()
                && own.committed != Some(position)
            {
                offsets.push((own.assigned.clone(), position));
            }
        }
        if offsets.is_empty() {
            return Ok(());
        }
        crate::crash_point!("consumer.before-commit");
        let answers = match tokio::time::timeout(COMMIT_TIMEOUT, self.subscriber.commit(&offsets)).await {
            Ok(Ok(answers)) => answers,
            Ok(Err(error)) if error.is_retryable() || matches!(error, Error::Fenced { .. }) => {
                self.uncommitted(&error);
                return Ok(());
            }
            Ok(Err(error)) => return Err(error),
            Err(_) => {
                let what = format!("no answer to a commit within {COMMIT_TIMEOUT:?}");
                self.uncommitted(&Error::Unavailable { what, source: None });
                return Ok(()); // the next commit covers this one
            }
        };
        let mut refused = None;
        for ((assigned, position), answer) in offsets.into_iter().zip(answers) {
            match answer {
                Ok(()) => {
                    if let Some(own) =
                        self.partitions.get_mut(&assigned.partition).filter(|own| own.assigned == assigned)
                    {
                        own.committed = Some(position);
                    }
                }
                Err(error) => {
                    tracing::debug!(target: "hapax", partition = %assigned.partition, error = %error.chain(), "offset not committed");
                    // Keep the worst error. A fenced partition does not matter: its next owner
                    // commits.
                    if !matches!(error, Error::Fenced { .. })
                        && refused.as_ref().is_none_or(Error::is_retryable)
                    {
                        refused = Some(error);
                    }
                }
            }
        }
        match refused {
            Some(error) => self.uncommitted(&error),
            None if self.state.uncommitted.succeeded() => {
                tracing::info!(target: "hapax", "offsets are committed again");
            }
            None => {}
        }
        Ok(())
    }

    /// Logs once that offsets cannot be committed: at once if the error is permanent, after a while
    /// if it may pass. Events still take effect once, but the next owner starts further back.
    fn uncommitted(&mut self, error: &Error) {
        if !matches!(error, Error::Fenced { .. }) && self.state.uncommitted.failed(error) {
            tracing::warn!(
                target: "hapax", error = %error.chain(),
                "offsets cannot be committed; events take effect once all the same, and are read again after a restart"
            );
        }
    }
}

/// Makes a delivery run apart from all others if it is among the suspects of a process that died.
pub(super) fn suspect(partitions: &HashMap<Partition, PartitionState>, queued: &mut Queued) {
    let Queued::Event(arrival) = queued else { return }; // no handler ran it
    let Source::Bus(assigned) = &arrival.source else { return };
    let suspects = partitions.get(&assigned.partition).and_then(|own| own.suspects.as_ref());
    let Some(suspects) = suspects.filter(|suspects| suspects.tried.contains(&arrival.received.origin.offset))
    else {
        return;
    };
    if suspects.batch_max == 1 {
        arrival.alone = true;
    } else {
        arrival.suspects_max = Some(suspects.batch_max);
    }
}

/// A memory limit, and how much of it is used.
struct Budget {
    max: usize,
    used: usize,
}

impl Budget {
    fn free(&self) -> usize {
        self.max.saturating_sub(self.used)
    }

    /// Whether a partition must pause: it has four times as much as is free, or more. So a single
    /// partition may use nearly everything, and however many have events that wait long, something
    /// stays free for the others.
    fn is_over(&self, own: usize) -> bool {
        own >= 4 * self.free()
    }

    /// Whether a partition may resume. One that has much waits until part of the total is free
    /// again. One that has little compared with what is free resumes however little that is,
    /// because others may hold the rest for long.
    fn is_under(&self, own: usize) -> bool {
        let free = self.free();
        (free > self.max / 8 && own <= 2 * free) || (free > 0 && own <= free / 2)
    }
}

/// The commit points of partitions.
pub(super) fn positions<'a>(
    partitions: impl IntoIterator<Item = &'a PartitionState>,
) -> Vec<(Partition, Option<i64>)> {
    let of = |own: &PartitionState| (own.assigned.partition.clone(), own.commit_point.position());
    partitions.into_iter().map(of).collect()
}

/// How long to wait for markers to be cleared.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(2);
/// How long to wait for an offset commit. One that gets no answer is repeated.
pub(super) const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
