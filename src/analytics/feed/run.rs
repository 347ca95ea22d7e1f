//! A feed that follows its topic: from an assignment to the committed offset.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::super::{Block, Input, Rejected, Source};
use super::chain::Chain;
use super::{Feed, pause};
use crate::bus::{Assignment, BusEvent, Partition, Received, Subscriber};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::records::ModuleSlug;

/// How long a feed that stops waits for the model.
const STOP_PATIENCE: Duration = Duration::from_secs(10);

/// A partition that is this member's.
struct Reading {
    assignment: Assignment,
    /// What was read and not yet given to the model.
    block: Option<Block>,
    bytes: usize,
    chain: Chain,
    /// Where the model was at the start. Rejections before it were noted by then, and may have been
    /// dropped since.
    known: i64,
}

/// Blocks that the model applies.
struct Applying {
    blocks: Arc<Vec<Block>>,
    /// Where each partition is afterwards.
    offsets: Vec<(Assignment, i64)>,
    bytes: usize,
    task: JoinHandle<Result<()>>,
}

pub(super) struct Run<'f> {
    feed: &'f Feed,
    stop: watch::Receiver<bool>,
    subscriber: Box<dyn Subscriber>,
    /// How many partitions the topic is known to have.
    partitions: i32,
    assigned: BTreeMap<Partition, Reading>,
    /// Paused partitions, for which the model has not yet said where to continue.
    unplaced: Vec<Assignment>,
    /// When the model is asked again.
    place_at: Option<Instant>,
    applying: Option<Applying>,
    /// When what was read is applied.
    due: Option<Instant>,
    /// How often the model has failed to apply the same blocks.
    attempts: u32,
    /// Nothing is read, because too much waits.
    paused: bool,
}

impl<'f> Run<'f> {
    pub(super) fn new(feed: &'f Feed, subscriber: Box<dyn Subscriber>, partitions: i32) -> Self {
        Run {
            stop: feed.handle.stop.subscribe(),
            feed,
            subscriber,
            partitions,
            assigned: BTreeMap::new(),
            unplaced: Vec::new(),
            place_at: None,
            applying: None,
            due: None,
            attempts: 0,
            paused: false,
        }
    }

    pub(super) async fn serve(&mut self) -> Result<()> {
        loop {
            if *self.stop.borrow() {
                return Ok(());
            }
            let due = self.due.filter(|_| self.applying.is_none());
            tokio::select! {
                event = self.subscriber.next() => match event {
                    Ok(event) => self.on_bus_event(event).await?,
                    Err(error) if error.is_retryable() => tokio::time::sleep(pause(self.attempts)).await,
                    Err(error) => return Err(error),
                },
                applied = applied(&mut self.applying) => self.on_applied(applied).await?,
                () = sleep_until(due) => self.apply(),
                () = sleep_until(self.place_at) => self.place().await?,
                _ = self.stop.changed() => {}
            }
        }
    }

    async fn on_bus_event(&mut self, event: BusEvent) -> Result<()> {
        match event {
            BusEvent::Records(records) => {
                let mut is_counted = false;
                for received in &records {
                    if *self.stop.borrow() {
                        return Ok(()); // nothing more is applied
                    }
                    self.take(received, &mut is_counted).await?;
                }
                self.pause_or_resume().await
            }
            BusEvent::Assigned(assignments) => self.on_assigned(assignments).await,
            BusEvent::Revoked(assignments) => {
                // What is being applied continues: reading it again changes nothing.
                self.forget(&assignments);
                self.subscriber.release(&assignments).await?;
                self.pause_or_resume().await
            }
            BusEvent::Lost(assignments) => {
                self.forget(&assignments);
                self.pause_or_resume().await
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
        self.unplaced.retain(|unplaced| !assignments.contains(unplaced));
    }

    /// Continues where the model is. While the model does not answer, the partitions wait, and the
    /// process stays a member of the group.
    async fn on_assigned(&mut self, assignments: Vec<Assignment>) -> Result<()> {
        self.unplaced.extend(assignments);
        self.place().await
    }

    async fn place(&mut self) -> Result<()> {
        let paused = self.place_at.take().is_some();
        if self.unplaced.is_empty() {
            return Ok(());
        }
        match self.find_places(paused).await {
            Err(error) if error.is_retryable() => {
                self.feed.away(&error, self.attempts);
                self.place_at = Some(Instant::now() + pause(self.attempts));
                self.attempts += 1;
                self.subscriber.pause(&self.unplaced).await
            }
            Err(error) => Err(error),
            Ok(()) => {
                if self.attempts > 0 && self.applying.is_none() {
                    self.attempts = 0;
                    self.feed.answers_again();
                }
                Ok(())
            }
        }
    }

    async fn find_places(&mut self, paused: bool) -> Result<()> {
        let known = self.feed.model.partitions().await?;
        let is_debezium = self.feed.settings.source == Source::Debezium;
        while let Some(assignment) = self.unplaced.first().cloned() {
            let partition = assignment.partition.clone();
            let (oldest, end) = self.feed.bus.range(&partition).await?;
            let at = known.iter().find(|known| known.partition == partition);
            let place = at.and_then(|at| at.offset).unwrap_or(0);
            let of_topic = known.iter().filter(|known| known.partition.topic == partition.topic);
            let chain = Chain::from(at.and_then(|at| at.pulse), of_topic);
            // A snapshot is not in the model as a pulse: whether its stream follows is read from the beginning.
            let from = if is_debezium && chain.is_unknown() { place.min(oldest) } else { place };
            let next = if from > end { oldest } else { from.max(oldest) };
            self.subscriber.seek(&partition, next).await?;
            // Not before: what comes from another place would be taken for what follows.
            let new = assignment.clone();
            // A place behind the end is of a topic that was there before this one.
            let place = if place > end { next } else { place };
            let reading = Reading { assignment, block: None, bytes: 0, chain, known: place };
            self.assigned.insert(partition.clone(), reading);
            if from < oldest || from > end {
                self.missing(&partition, from, oldest);
            }
            match (self.paused, paused) {
                (true, _) => self.subscriber.pause(&[new]).await?,
                (false, true) => self.subscriber.resume(&[new]).await?,
                (false, false) => {}
            }
            self.unplaced.remove(0);
        }
        Ok(())
    }

    /// Notes that offsets of a partition were never read.
    fn missing(&mut self, partition: &Partition, from: i64, next: i64) {
        let reason = format!(
            "offsets {from} to {next} of {partition} were gone before they were read: retention removed them, or the topic was \
             made anew. Build the read model again: in ClickHouse by `hapax analytics rebuild`; otherwise stop the server, remove the \
             model's file and start the server"
        );
        tracing::error!(target: "hapax::analytics", %partition, from, next, "changes are missing in the read model");
        let origin = Origin::new(partition.topic.clone(), partition.number, from - 1);
        let rejected = Rejected { tenant: None, origin, reason, payload: Vec::new() };
        let partitions = self.partitions;
        let Some(reading) = self.assigned.get_mut(partition) else { return };
        let block = reading.block.get_or_insert_with(|| Block::aside(partition.clone(), partitions));
        // A pulse from behind the gap says nothing of what lies before it.
        let is_behind = block.end().is_some_and(|end| end > from);
        block.rejected.push((rejected, block.pulse.filter(|_| !is_behind)));
        block.reach(next);
        reading.chain.note();
        self.due.get_or_insert_with(Instant::now);
        self.feed.rejected();
    }

    /// Adds a record to its partition's block. Fails where nothing after the record can be applied. `is_counted`:
    /// whether the partitions were counted after this record was received.
    async fn take(&mut self, received: &Received, is_counted: &mut bool) -> Result<()> {
        let Origin { topic, partition, offset } = &received.origin;
        let partition = Partition { topic: topic.clone(), number: *partition };
        if !self.assigned.contains_key(&partition) {
            return Ok(());
        }
        let input = self.feed.settings.source.read(received, self.feed.settings.generation);
        match &input {
            // A relay has counted after everything that its pulse speaks of was on the topic.
            Ok(Input::Pulse(pulse)) if pulse.partitions > self.partitions => self.count().await?,
            // Debezium publishes a pulse long after it was stamped, and what lies before it was distributed to the
            // partitions of that time. Only if there are no more of them now, they all had this pulse to come.
            Ok(Input::NextPulse { .. } | Input::SnapshotPulse(_)) if !*is_counted => {
                self.count().await?;
                *is_counted = true;
            }
            _ => {}
        }
        let partitions = self.partitions;
        let Some(reading) = self.assigned.get_mut(&partition) else { return Ok(()) };
        let fresh = || Block::new(partition, partitions, *offset..*offset);
        let block = reading.block.get_or_insert_with(fresh);
        let (input, missing) = match input {
            // Of the topic before it got more partitions; or of another topic of the database.
            Ok(Input::NextPulse { pulse, .. } | Input::SnapshotPulse(pulse))
                if pulse.partitions != partitions =>
            {
                (Ok(Input::Other), None)
            }
            Ok(Input::NextPulse { pulse, last }) => {
                (Ok(Input::Pulse(pulse)), reading.chain.on_pulse(pulse, last))
            }
            Ok(Input::SnapshotPulse(pulse)) => (Ok(Input::Other), reading.chain.on_snapshot(pulse)),
            input => (input, None),
        };
        if let Some(missing) = missing {
            tracing::error!(target: "hapax::analytics", partition = %block.partition, offset, missing, "changes are missing in the read model");
            block.rejected.push((gap(received, &missing), block.pulse));
            self.feed.rejected();
        }
        match input {
            Ok(Input::Change(change)) => block.changes.push(*change),
            Ok(Input::Truncated(module)) => {
                let error = truncated(&module, &received.origin);
                let mut note = Block::aside(block.partition.clone(), partitions);
                note.rejected.push((incomplete(received, error.to_string()), None));
                // For those who ask how far the model is: the error ends this feed, and is in a log only.
                if let Err(away) = self.feed.model.apply(&[note]).await {
                    tracing::warn!(target: "hapax::analytics", error = %away.chain(), "a truncate was not noted");
                }
                return Err(error);
            }
            Ok(Input::Pulse(pulse)) => {
                block.pulse = block.pulse.max(Some(pulse.at));
                block.partitions = partitions;
                self.feed.handle.note(|progress| progress.pulses += 1);
            }
            Ok(Input::Other | Input::NextPulse { .. } | Input::SnapshotPulse(_)) => {}
            Err(_) if *offset < reading.known => {} // see `known`
            Err(rejected) => {
                tracing::warn!(
                    target: "hapax::analytics", partition = %block.partition, offset, reason = %rejected.reason,
                    "a change cannot be read; lastSyncAt is held back until it is dropped"
                );
                block.rejected.push((*rejected, block.pulse));
                self.feed.rejected();
            }
        }
        block.reach(reading.known.max(offset + 1));
        reading.bytes += received.record.memory_bytes();
        let full = block.changes.len() >= self.feed.settings.block_max;
        let due = Instant::now() + if full { Duration::ZERO } else { self.feed.settings.linger };
        self.due = Some(self.due.map_or(due, |before| before.min(due)));
        Ok(())
    }

    /// Partitions may be added: asks how many there are, however long the bus is away. Gives up when it is stopped.
    async fn count(&mut self) -> Result<()> {
        let mut attempts = 0;
        let found = loop {
            match self.feed.bus.topic(&self.feed.settings.topic).await {
                Err(error) if error.is_retryable() => {
                    let mut stop = self.stop.clone();
                    tokio::select! {
                        _ = stop.wait_for(|stop| *stop) => return Ok(()),
                        () = tokio::time::sleep(pause(attempts)) => attempts += 1,
                    }
                }
                found => break found?,
            }
        };
        self.partitions = found.map_or(self.partitions, |topic| topic.partitions.max(self.partitions));
        Ok(())
    }

    fn is_full(&self) -> bool {
        let waiting: usize = self.assigned.values().map(|reading| reading.bytes).sum();
        let applying = self.applying.as_ref().map_or(0, |applying| applying.bytes);
        waiting + applying >= self.feed.settings.buffer_bytes_max
    }

    /// Pauses reading while too much waits, and resumes afterwards.
    async fn pause_or_resume(&mut self) -> Result<()> {
        let full = self.is_full();
        if full == self.paused {
            return Ok(());
        }
        self.paused = full;
        let all: Vec<_> = self.assigned.values().map(|reading| reading.assignment.clone()).collect();
        if full { self.subscriber.pause(&all).await } else { self.subscriber.resume(&all).await }
    }

    /// Gives what was read to the model, in a task: the process stays a member of the group
    /// meanwhile.
    fn apply(&mut self) {
        self.due = None;
        let (mut blocks, mut offsets, mut bytes) = (Vec::new(), Vec::new(), 0);
        for reading in self.assigned.values_mut() {
            let Some(block) = reading.block.take() else { continue };
            bytes += std::mem::take(&mut reading.bytes);
            offsets.extend(block.end().map(|end| (reading.assignment.clone(), end)));
            blocks.push(block);
        }
        if !blocks.is_empty() {
            self.start(Arc::new(blocks), offsets, bytes, Duration::ZERO);
        }
    }

    fn start(
        &mut self,
        blocks: Arc<Vec<Block>>,
        offsets: Vec<(Assignment, i64)>,
        bytes: usize,
        pause: Duration,
    ) {
        let (model, of_task) = (Arc::clone(&self.feed.model), Arc::clone(&blocks));
        let task = tokio::spawn(async move {
            tokio::time::sleep(pause).await;
            model.apply(&of_task).await
        });
        self.applying = Some(Applying { blocks, offsets, bytes, task });
    }

    async fn on_applied(&mut self, applied: Result<()>) -> Result<()> {
        let Some(Applying { blocks, offsets, bytes, .. }) = self.applying.take() else { return Ok(()) };
        match applied {
            Ok(()) => {}
            Err(error) if error.is_retryable() => {
                self.feed.away(&error, self.attempts);
                let pause = pause(self.attempts);
                self.attempts += 1;
                self.start(blocks, offsets, bytes, pause);
                return Ok(());
            }
            Err(error) => return Err(error),
        }
        if self.attempts > 0 {
            self.attempts = 0;
            self.feed.answers_again();
        }
        let changes: usize = blocks.iter().map(|block| block.changes.len()).sum();
        self.feed.handle.note(|progress| progress.changes += changes as u64);
        self.feed.meter.changes(changes as u64);
        crate::crash_point!("analytics.feed.before-commit");
        self.commit(&offsets).await?;
        self.pause_or_resume().await
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

    /// Ends what is being applied, and leaves the group.
    pub(super) async fn leave(mut self) -> Result<()> {
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

/// What to note of pulses that do not follow one another.
fn gap(received: &Received, missing: &str) -> Rejected {
    let reason = format!(
        "{missing}. The replication slot was recreated, the database was restored, a snapshot was cut off, or the topic is not the \
         one that the connector began with. Raise analytics.generation, name a new cdc.topic, run `hapax cdc remove --slot` and \
         `hapax cdc apply`, and build the read model again: in ClickHouse by `hapax analytics rebuild`; otherwise remove its file"
    );
    incomplete(received, reason)
}

/// What is missing concerns everybody, and has no content.
fn incomplete(received: &Received, reason: String) -> Rejected {
    Rejected { tenant: None, origin: received.origin.clone(), reason, payload: Vec::new() }
}

fn truncated(module: &ModuleSlug, at: &Origin) -> Error {
    Error::Corrupt(format!(
        "the records of module {module} were truncated (partition {} of {}, offset {}), and a TRUNCATE has no version: the read \
         model cannot tell which rows are gone. Raise analytics.generation, name a new cdc.topic, run `hapax cdc remove --slot` \
         and `hapax cdc apply`, and build the read model again: in ClickHouse by `hapax analytics rebuild`; otherwise remove its file",
        at.partition, at.topic, at.offset
    ))
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
