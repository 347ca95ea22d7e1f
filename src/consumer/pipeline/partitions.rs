//! Partitions come and go: given, revoked, lost; paused when too much is in memory; committed below the lowest
//! unfinished offset.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use super::{Hand, Pipeline, Uncommitted, is_suspect};
use crate::bus::{Assigned, Partition};
use crate::consumer::OutagePolicy;
use crate::consumer::arrival::Source;
use crate::consumer::offsets::Watermark;
use crate::error::{Error, Result};

/// How many offsets above an unfinished one a partition may keep in memory, per delivery it may have in flight.
const DISTANCE_FACTOR: usize = 64;

impl Pipeline {
    pub(super) async fn given(&mut self, given: Vec<Assigned>) -> Result<()> {
        self.meter.rebalanced();
        let partitions: Vec<_> = given.iter().map(|assigned| assigned.partition.clone()).collect();
        let (suspects, unsure) = match self.worker.suspects(&partitions).await {
            Ok(suspects) => (suspects, false),
            // Nobody can say while the ledger is away: nothing is started until it can be asked.
            Err(error) if error.is_retryable() && self.desk.settings.outage != OutagePolicy::FailFast => {
                self.state.away = true;
                self.meter.ledger_away();
                (Vec::new(), true)
            }
            Err(error) => return Err(error),
        };
        for assigned in given {
            let partition = assigned.partition.clone();
            tracing::info!(target: "hapax", %partition, epoch = assigned.epoch, "partition given");
            let suspects =
                suspects.iter().filter(|(of, ..)| *of == partition).map(|(_, first, last)| (*first, *last));
            let hand = Hand {
                assigned,
                watermark: Watermark::default(),
                committed: None,
                running: 0,
                bytes: 0,
                paused: false,
                cancel: watch::channel(false).0,
                suspects: suspects.collect(),
                unsure,
            };
            self.hands.insert(partition, hand);
        }
        self.meter.partitions(self.hands.len());
        Ok(())
    }

    /// What is finished is committed, and the partitions go at once. What is queued is dropped: whoever is next gets it. What runs goes
    /// on under its lease or in its transaction: whoever is next reads it first, meets the claim, and waits in its key's lane.
    pub(super) async fn revoked(&mut self, revoked: &[Assigned]) -> Result<()> {
        self.meter.rebalanced();
        self.forget_queued(revoked);
        self.commit().await?;
        let mut hands = Vec::with_capacity(revoked.len());
        for assigned in revoked {
            if self.hands.get(&assigned.partition).is_some_and(|hand| hand.assigned == *assigned)
                && let Some(hand) = self.hands.remove(&assigned.partition)
            {
                tracing::info!(target: "hapax", partition = %assigned.partition, running = hand.running, "partition revoked");
                hands.push(hand);
            }
        }
        self.meter.partitions(self.hands.len());
        self.worker.release(&positions(&hands)).await;
        // Whoever stops this process stops these too.
        self.released.retain(|cancel| cancel.receiver_count() > 0);
        self.released.extend(hands.into_iter().map(|hand| hand.cancel));
        self.state.unreturned.extend(revoked.iter().cloned());
        Ok(())
    }

    /// Nothing of it is ours any more: what runs is told to stop, and its tokens decide the rest.
    pub(super) fn lost(&mut self, lost: &[Assigned]) {
        self.meter.rebalanced();
        for assigned in lost {
            if self.hands.get(&assigned.partition).is_some_and(|hand| hand.assigned == *assigned)
                && let Some(hand) = self.hands.remove(&assigned.partition)
            {
                tracing::warn!(target: "hapax", partition = %assigned.partition, running = hand.running, "partition lost");
                hand.cancel.send_replace(true);
            }
        }
        self.forget_queued(lost);
        self.meter.partitions(self.hands.len());
    }

    fn forget_queued(&mut self, gone: &[Assigned]) {
        let is_gone = |source: &Source| matches!(source, Source::Bus(assigned) if gone.contains(assigned));
        self.queues.retain(|arrival| !is_gone(&arrival.source));
        let mut waiting = std::mem::take(&mut self.alone);
        for (lane, mut arrivals) in waiting.drain(..) {
            arrivals.retain(|arrival| !is_gone(&arrival.source));
            if arrivals.is_empty() {
                self.queues.give(lane, arrivals, None);
            } else {
                self.alone.push_back((lane, arrivals));
            }
        }
    }

    pub(super) async fn tend_partitions(&mut self) -> Result<()> {
        let now = Instant::now();
        if !self.state.unreturned.is_empty() {
            match self.subscriber.give_back(&self.state.unreturned).await {
                Ok(()) => self.state.unreturned.clear(),
                Err(error) if error.is_retryable() => {
                    tracing::debug!(target: "hapax", error = %error.chain(), "partitions not given back yet");
                }
                Err(error) => return Err(error),
            }
        }
        self.ask_for_suspects().await?;
        self.pause_and_resume().await?;
        if now >= self.state.next_commit {
            self.commit().await?;
            self.state.next_commit = Instant::now() + self.desk.settings.commit_interval;
        }
        Ok(())
    }

    /// Asks for what could not be asked for when partitions were given, and marks what has arrived since. Before anything is
    /// started: while there is no answer the ledger counts as away.
    async fn ask_for_suspects(&mut self) -> Result<()> {
        let unsure: Vec<_> = self
            .hands
            .values()
            .filter(|hand| hand.unsure)
            .map(|hand| hand.assigned.partition.clone())
            .collect();
        if unsure.is_empty() || self.state.away {
            return Ok(());
        }
        let suspects = match self.worker.suspects(&unsure).await {
            Ok(suspects) => suspects,
            Err(error) if error.is_retryable() => {
                self.state.away = true;
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for partition in unsure {
            if let Some(hand) = self.hands.get_mut(&partition) {
                hand.unsure = false;
                let of = suspects.iter().filter(|(of, ..)| *of == partition);
                hand.suspects = of.map(|(_, first, last)| (*first, *last)).collect();
            }
        }
        let hands = &self.hands;
        self.queues.for_each(|arrival| arrival.alone |= is_suspect(hands, arrival));
        Ok(())
    }

    /// A partition pauses at its limit and goes on at half of it.
    async fn pause_and_resume(&mut self) -> Result<()> {
        let max = self.desk.settings.in_flight_max;
        let bytes_max = self.desk.settings.in_flight_bytes_max;
        let stop = self.state.full || self.state.draining.is_some();
        let (mut pause, mut resume) = (Vec::<Partition>::new(), Vec::new());
        for hand in self.hands.values_mut() {
            let (unfinished, distance) = (hand.watermark.unfinished(), hand.watermark.distance());
            let over =
                stop || unfinished >= max || hand.bytes >= bytes_max || distance >= max * DISTANCE_FACTOR;
            let under = !stop
                && unfinished <= max / 2
                && hand.bytes <= bytes_max / 2
                && distance <= max * DISTANCE_FACTOR / 2;
            if over && !hand.paused {
                hand.paused = true;
                pause.push(hand.assigned.partition.clone());
            } else if under && hand.paused {
                hand.paused = false;
                resume.push(hand.assigned.partition.clone());
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
        let unfinished: usize = self.hands.values().map(|hand| hand.watermark.unfinished()).sum();
        let distance: usize = self.hands.values().map(|hand| hand.watermark.distance()).sum();
        let paused = self.hands.values().filter(|hand| hand.paused).count();
        self.meter.flow(unfinished, distance, paused);
        Ok(())
    }

    /// A bus that could not be asked to pause or to resume is asked again: the partitions are as they were.
    fn unless_away(&mut self, asked: Result<()>, partitions: &[Partition], paused: bool) -> Result<()> {
        match asked {
            Err(error) if error.is_retryable() => {
                tracing::debug!(target: "hapax", error = %error.chain(), "partitions not paused or resumed yet");
                for partition in partitions {
                    if let Some(hand) = self.hands.get_mut(partition) {
                        hand.paused = paused;
                    }
                }
                Ok(())
            }
            other => other,
        }
    }

    /// Commits what the watermarks have passed. The ledger has recorded all of it: that is what "finished" means.
    pub(super) async fn commit(&mut self) -> Result<()> {
        let mut offsets = Vec::new();
        for hand in self.hands.values() {
            if let Some(position) = hand.watermark.position()
                && hand.committed != Some(position)
            {
                offsets.push((hand.assigned.clone(), position));
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
                return Ok(()); // the next one says the same
            }
        };
        let mut refused = None;
        for ((assigned, position), answer) in offsets.into_iter().zip(answers) {
            match answer {
                Ok(()) => {
                    if let Some(hand) =
                        self.hands.get_mut(&assigned.partition).filter(|hand| hand.assigned == assigned)
                    {
                        hand.committed = Some(position);
                    }
                }
                Err(error) => {
                    tracing::debug!(target: "hapax", partition = %assigned.partition, error = %error.chain(), "offset not committed");
                    // What is worse is told: of a partition that is gone, the next owner commits.
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
            None if std::mem::take(&mut self.state.uncommitted).told => {
                tracing::info!(target: "hapax", "offsets are committed again");
            }
            None => {}
        }
        Ok(())
    }

    /// Offsets could not be committed. What takes effect does so once all the same; but whoever is next begins further back, so it is
    /// told, once: at once if it is for good, after a while if it might have passed.
    fn uncommitted(&mut self, error: &Error) {
        if matches!(error, Error::Fenced { .. }) {
            return;
        }
        let Uncommitted { since, told } = &mut self.state.uncommitted;
        let since = *since.get_or_insert_with(Instant::now);
        if !*told && (!error.is_retryable() || since.elapsed() >= UNCOMMITTED_MAX) {
            *told = true;
            tracing::warn!(
                target: "hapax", error = %error.chain(),
                "offsets cannot be committed; events take effect once all the same, and are read again after a restart"
            );
        }
    }

    /// Gives back what could not finish, commits, leaves.
    pub(in crate::consumer) async fn end(mut self) -> Result<std::collections::BTreeMap<&'static str, u64>> {
        let now = *self.stop.borrow() == crate::consumer::Stop::Now;
        if !now {
            self.commit().await?;
            if let Some(window) = &self.window {
                // What it does not hear of costs a claim, no more.
                let done = std::mem::take(&mut self.tasks.remember);
                let _ = tokio::time::timeout(REMEMBER_TIMEOUT, window.remember(&done)).await;
            }
            self.worker.release(&positions(self.hands.values())).await;
        }
        let counts = std::mem::take(&mut self.state.counts);
        let leaving = self.subscriber.leave();
        match tokio::time::timeout(if now { Duration::from_millis(200) } else { COMMIT_TIMEOUT }, leaving)
            .await
        {
            Ok(left) => left?,
            Err(_) => {
                tracing::warn!(target: "hapax", "the group was not left in time; it will notice by itself");
            }
        }
        Ok(counts)
    }
}

/// Up to where partitions are through.
fn positions<'a>(hands: impl IntoIterator<Item = &'a Hand>) -> Vec<(Partition, Option<i64>)> {
    let of = |hand: &Hand| (hand.assigned.partition.clone(), hand.watermark.position());
    hands.into_iter().map(of).collect()
}

/// How long commits may fail before it is told.
const UNCOMMITTED_MAX: Duration = Duration::from_secs(30);
/// How long a consumer that ends waits for its window.
const REMEMBER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long the pipeline waits for a commit of offsets. One that did not arrive is made again.
const COMMIT_TIMEOUT: Duration = Duration::from_secs(10);
