//! Feeds a read model from a topic.
//!
//! ```text
//! assigned ─▶ seek to where the model is ─▶ records ─▶ a block per partition ─▶ apply ─▶ commit offsets
//! ```
//!
//! No ledger is asked: a change that arrives twice changes nothing the second time. Where to go on is
//! what the model itself says, because the model may have been put back or made anew; the group's
//! commits are for those who look at the lag. A new model begins with the records as they are
//! ([`Feed::with_snapshot`]), because retention may have removed their events. What is missing later
//! (retention removed it before it was read, or the topic was made anew) is noted as rejected, which
//! holds `lastSyncAt` back for everybody.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{Block, Input, ReadModel, Rejected, snapshot};
use crate::bus::{Assignment, Bus, BusEvent, Partition, Received, Subscriber, Subscription};
use crate::clock::jitter_permille;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::records::Snapshot;

/// The longest pause between two attempts while the model does not answer.
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// How long a feed that stops waits for the model.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// Settings of a [`Feed`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct FeedSettings {
    /// The topic of the records' events.
    pub topic: Topic,
    /// The consumer group.
    pub group: Arc<str>,
    /// The generation of the source; see [`Version`](super::Version).
    pub generation: u16,
    /// How many records a block has at most.
    pub block_max: usize,
    /// How many bytes wait to be applied at most, in all partitions together. Then nothing more is read.
    pub buffer_bytes_max: usize,
    /// How long a block waits for more records.
    pub linger: Duration,
}

impl FeedSettings {
    /// The settings for a topic: blocks of up to 5,000 records, applied every 100 ms, in 32 MiB.
    pub fn new(topic: Topic) -> Self {
        FeedSettings {
            topic,
            group: "hapax-analytics".into(),
            generation: 1,
            block_max: 5_000,
            buffer_bytes_max: 32 << 20,
            linger: Duration::from_millis(100),
        }
    }

    fn check(&self) -> Result<()> {
        let bad = |what: &str| Err(Error::Config(format!("{what} must be at least 1")));
        match (self.generation, self.block_max, self.buffer_bytes_max) {
            (0, ..) => bad("the generation of a feed"),
            (_, 0, _) => bad("the size of a feed's blocks"),
            (.., 0) => bad("the buffer of a feed"),
            _ => Ok(()),
        }
    }
}

/// What a feed has done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FeedProgress {
    /// Changes that were applied, with repeats.
    pub changes: u64,
    /// Changes that could not be read.
    pub rejected: u64,
    /// Pulses that were applied.
    pub pulses: u64,
    /// Why nothing is applied at the moment, if so.
    pub away: Option<String>,
}

/// Stops a feed and tells its progress. Clones share the same state.
#[derive(Debug, Clone)]
pub struct FeedHandle {
    stop: Arc<watch::Sender<bool>>,
    progress: Arc<Mutex<FeedProgress>>,
}

impl FeedHandle {
    /// Stops the feed: what is being applied is finished, and the rest is read again later.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// The progress so far.
    pub fn progress(&self) -> FeedProgress {
        self.note(|progress| progress.clone())
    }

    fn note<T>(&self, change: impl FnOnce(&mut FeedProgress) -> T) -> T {
        change(&mut self.progress.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Feeds a read model from a topic. Any number may run in any number of processes: each has some of the
/// partitions.
pub struct Feed {
    bus: Arc<dyn Bus>,
    model: Arc<dyn ReadModel>,
    settings: FeedSettings,
    handle: FeedHandle,
    source: Option<Arc<dyn Snapshot>>,
}

impl Feed {
    /// A feed with these settings. Fails if they are invalid.
    pub fn new(bus: Arc<dyn Bus>, model: Arc<dyn ReadModel>, settings: FeedSettings) -> Result<Self> {
        settings.check()?;
        let handle = FeedHandle { stop: Arc::new(watch::channel(false).0), progress: Arc::default() };
        Ok(Feed { bus, model, settings, handle, source: None })
    }

    /// Fills a model that has read nothing yet with the records as they are, before it follows the topic.
    /// They must be those whose events the topic carries.
    #[must_use]
    pub fn with_snapshot(mut self, source: Arc<dyn Snapshot>) -> Self {
        self.source = Some(source);
        self
    }

    /// A handle to stop it and to see its progress.
    pub fn handle(&self) -> FeedHandle {
        self.handle.clone()
    }

    /// Runs until its [handle](Feed::handle) stops it or an error ends it.
    pub async fn run(self) -> Result<FeedProgress> {
        let topic = &self.settings.topic;
        let found = self.bus.topic(topic).await?;
        let missing = || Error::NotFound(format!("topic {topic}: make it before a read model follows it"));
        let partitions = found.ok_or_else(missing)?.partitions;
        self.model.expect(topic, partitions).await?;
        if let Some(source) = &self.source {
            snapshot::take(&*self.bus, &*self.model, &**source, &self.settings).await?;
        }
        let subscription = Subscription::new(Arc::clone(&self.settings.group), [topic.clone()])?;
        let subscriber = self.bus.subscribe(subscription).await?;
        let mut run = Run {
            stop: self.handle.stop.subscribe(),
            feed: &self,
            subscriber,
            partitions,
            assigned: BTreeMap::new(),
            applying: None,
            due: None,
            attempts: 0,
            paused: false,
        };
        let ended = run.serve().await;
        let left = run.leave().await;
        ended.and(left).map(|()| self.handle.progress())
    }
}

/// A partition that is this member's.
struct Reading {
    assignment: Assignment,
    /// What was read and not handed to the model.
    block: Option<Block>,
    bytes: usize,
}

/// Blocks that the model applies.
struct Applying {
    blocks: Arc<Vec<Block>>,
    /// Where each partition is afterwards.
    offsets: Vec<(Assignment, i64)>,
    task: JoinHandle<Result<()>>,
}

struct Run<'f> {
    feed: &'f Feed,
    stop: watch::Receiver<bool>,
    subscriber: Box<dyn Subscriber>,
    /// How many partitions the topic has, as far as is known.
    partitions: i32,
    assigned: BTreeMap<Partition, Reading>,
    applying: Option<Applying>,
    /// When what was read is applied.
    due: Option<Instant>,
    /// How often the model has failed to apply the same blocks.
    attempts: u32,
    paused: bool,
}

impl Run<'_> {
    async fn serve(&mut self) -> Result<()> {
        loop {
            if *self.stop.borrow() {
                return Ok(());
            }
            let due = self.due.filter(|_| self.applying.is_none());
            tokio::select! {
                event = self.subscriber.next() => match event {
                    Ok(event) => self.on_bus_event(event).await?,
                    Err(error) if error.is_retryable() => tokio::time::sleep(self.pause()).await,
                    Err(error) => return Err(error),
                },
                applied = applied(&mut self.applying) => self.on_applied(applied).await?,
                () = sleep_until(due) => self.apply(),
                _ = self.stop.changed() => {}
            }
        }
    }

    async fn on_bus_event(&mut self, event: BusEvent) -> Result<()> {
        match event {
            BusEvent::Records(records) => {
                for received in &records {
                    self.take(received);
                }
                if self.is_full() && !self.paused {
                    self.paused = true;
                    let all: Vec<_> =
                        self.assigned.values().map(|reading| reading.assignment.clone()).collect();
                    self.subscriber.pause(&all).await?;
                }
                Ok(())
            }
            BusEvent::Assigned(assignments) => self.on_assigned(assignments).await,
            BusEvent::Revoked(assignments) => {
                // What is being applied goes on: whoever reads it again changes nothing.
                self.forget(&assignments);
                self.subscriber.release(&assignments).await
            }
            BusEvent::Lost(assignments) => {
                self.forget(&assignments);
                Ok(())
            }
            BusEvent::Removed { partition, offsets } => {
                self.missing(&partition, offsets.start, offsets.end);
                Ok(())
            }
        }
    }

    fn forget(&mut self, assignments: &[Assignment]) {
        for assignment in assignments {
            self.assigned.remove(&assignment.partition);
        }
    }

    /// Goes on where the model is.
    async fn on_assigned(&mut self, assignments: Vec<Assignment>) -> Result<()> {
        let known = self.feed.model.partitions().await?;
        for assignment in assignments {
            let partition = assignment.partition.clone();
            let (oldest, end) = self.feed.bus.range(&partition).await?;
            let at = known.iter().find(|known| known.partition == partition).and_then(|known| known.offset);
            let from = at.unwrap_or(0);
            let reading = Reading { assignment, block: None, bytes: 0 };
            self.assigned.insert(partition.clone(), reading);
            if from < oldest || from > end {
                self.missing(&partition, from, oldest);
            }
            let next = if from > end { oldest } else { from.max(oldest) };
            self.subscriber.seek(&partition, next).await?;
        }
        Ok(())
    }

    /// Notes that offsets of a partition were never read.
    fn missing(&mut self, partition: &Partition, from: i64, next: i64) {
        let reason = format!(
            "offsets {from} to {next} of {partition} were gone before they were read: retention removed them, or the topic was \
             made anew. Build the read model again: stop the server, remove the model's file and start it"
        );
        tracing::error!(target: "hapax::analytics", %partition, from, next, "changes are missing in the read model");
        let origin = Origin::new(partition.topic.clone(), partition.number, from - 1);
        let rejected = Rejected { tenant: None, origin, reason, payload: Vec::new() };
        let partitions = self.partitions;
        let Some(reading) = self.assigned.get_mut(partition) else { return };
        let block = reading.block.get_or_insert_with(|| Block::aside(partition.clone(), partitions));
        block.rejected.push((rejected, block.pulse));
        block.reach(next);
        self.due.get_or_insert_with(Instant::now);
        self.feed.handle.note(|progress| progress.rejected += 1);
    }

    /// Adds a record to its partition's block.
    fn take(&mut self, received: &Received) {
        let Origin { topic, partition, offset } = &received.origin;
        let partition = Partition { topic: topic.clone(), number: *partition };
        let partitions = self.partitions;
        let Some(reading) = self.assigned.get_mut(&partition) else { return };
        let fresh = || Block::new(partition, partitions, *offset..*offset);
        let block = reading.block.get_or_insert_with(fresh);
        match Input::of(received, self.feed.settings.generation) {
            Ok(Input::Change(change)) => block.changes.push(*change),
            Ok(Input::Pulse(pulse)) => {
                block.pulse = block.pulse.max(Some(pulse.at));
                self.partitions = self.partitions.max(pulse.partitions);
                block.partitions = self.partitions;
                self.feed.handle.note(|progress| progress.pulses += 1);
            }
            Ok(Input::Other) => {}
            Err(rejected) => {
                tracing::warn!(
                    target: "hapax::analytics", partition = %block.partition, offset, reason = %rejected.reason,
                    "a change cannot be read; lastSyncAt is held back until it is dropped"
                );
                block.rejected.push((*rejected, block.pulse));
                self.feed.handle.note(|progress| progress.rejected += 1);
            }
        }
        block.reach(offset + 1);
        reading.bytes += received.record.memory_bytes();
        let full = block.changes.len() >= self.feed.settings.block_max;
        let due = Instant::now() + if full { Duration::ZERO } else { self.feed.settings.linger };
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
    }

    fn is_full(&self) -> bool {
        let bytes: usize = self.assigned.values().map(|reading| reading.bytes).sum();
        bytes >= self.feed.settings.buffer_bytes_max
    }

    /// Hands what was read to the model, as a task: the membership goes on meanwhile.
    fn apply(&mut self) {
        self.due = None;
        let (mut blocks, mut offsets) = (Vec::new(), Vec::new());
        for reading in self.assigned.values_mut() {
            let Some(block) = reading.block.take() else { continue };
            reading.bytes = 0;
            offsets.extend(block.end().map(|end| (reading.assignment.clone(), end)));
            blocks.push(block);
        }
        if !blocks.is_empty() {
            self.start(Arc::new(blocks), offsets, Duration::ZERO);
        }
    }

    fn start(&mut self, blocks: Arc<Vec<Block>>, offsets: Vec<(Assignment, i64)>, pause: Duration) {
        let (model, of_task) = (Arc::clone(&self.feed.model), Arc::clone(&blocks));
        let task = tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            model.apply(&of_task).await
        });
        self.applying = Some(Applying { blocks, offsets, task });
    }

    async fn on_applied(&mut self, applied: Result<()>) -> Result<()> {
        let Some(Applying { blocks, offsets, .. }) = self.applying.take() else { return Ok(()) };
        match applied {
            Ok(()) => {}
            Err(error) if error.is_retryable() => {
                self.attempts += 1;
                if self.attempts == 1 {
                    tracing::warn!(target: "hapax::analytics", error = %error.chain(), "the read model does not answer; the feed waits");
                }
                self.feed.handle.note(|progress| progress.away = Some(error.chain()));
                let pause = self.pause();
                self.start(blocks, offsets, pause);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        if self.attempts > 0 {
            self.attempts = 0;
            tracing::info!(target: "hapax::analytics", "the read model answers again");
        }
        let changes: usize = blocks.iter().map(|block| block.changes.len()).sum();
        self.feed.handle.note(|progress| {
            progress.away = None;
            progress.changes += changes as u64;
        });
        self.commit(&offsets).await?;
        if self.paused && !self.is_full() {
            self.paused = false;
            let all: Vec<_> = self.assigned.values().map(|reading| reading.assignment.clone()).collect();
            self.subscriber.resume(&all).await?;
        }
        Ok(())
    }

    /// For those who look at the lag: the model knows where it is.
    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<()> {
        let is_ours = |of: &Assignment| self.assigned.get(&of.partition).is_some_and(|r| r.assignment == *of);
        let ours: Vec<_> = offsets.iter().filter(|(of, _)| is_ours(of)).cloned().collect();
        if ours.is_empty() {
            return Ok(());
        }
        match self.subscriber.commit(&ours).await {
            Ok(answers) => {
                for error in answers.into_iter().filter_map(Result::err) {
                    tracing::debug!(target: "hapax::analytics", error = %error.chain(), "an offset was not committed");
                }
                Ok(())
            }
            Err(error) if error.is_retryable() => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn pause(&self) -> Duration {
        let base = Duration::from_millis(100) * 2_u32.saturating_pow(self.attempts.min(10));
        base.min(PAUSE_MAX) * u32::from(jitter_permille()) / 1000
    }

    /// Ends what is being applied, and leaves the group.
    async fn leave(mut self) -> Result<()> {
        if let Some(mut applying) = self.applying.take() {
            match tokio::time::timeout(STOP_PATIENCE, &mut applying.task).await {
                Ok(Ok(Ok(()))) => {
                    let offsets = std::mem::take(&mut applying.offsets);
                    self.commit(&offsets).await?;
                }
                Ok(_) => {} // it is read again
                Err(_) => applying.task.abort(),
            }
        }
        self.subscriber.leave().await
    }
}

/// The end of what is being applied; never, if nothing is.
async fn applied(applying: &mut Option<Applying>) -> Result<()> {
    match applying {
        Some(applying) => match (&mut applying.task).await {
            Ok(applied) => applied,
            Err(error) => Err(Error::Corrupt(format!("applying changes to a read model panicked: {error}"))),
        },
        None => std::future::pending().await,
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
