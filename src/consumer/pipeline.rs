//! The pipeline: `match → window → order → claim → handle → settle → commit point → commit`.
//!
//! One task owns everything that has an order (partitions, queues, commit points) and waits for the
//! next event. Claims, handlers and settles run in separate tasks, which report how each delivery
//! ended.

mod ask;
mod end;
mod health;
mod intake;
mod partitions;
mod window;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::arrival::{Arrival, Delivered, Ending, Key, Queued, Source, Undecodable};
use super::claim::ConsumerContext;
use super::dead::{self, DeadLetterOutlet};
use super::held::HeldFeed;
use super::meter::Meter;
use super::offsets::CommitPoint;
use super::order::{KeyQueues, QueueId, QueueRun};
use super::worker::{Suspects, Worker};
use super::{Counts, OutagePolicy, Passed, Stop};
use crate::bus::{Assignment, Partition, Subscriber};
use crate::error::{Error, Result};
use crate::id::Topic;
use crate::ledger::{Claim, Identity, Mode, Week};
pub(super) use ask::Failing;
use ask::{Extent, LAG_INTERVAL, SuspectsAnswer};
pub(super) use health::LedgerHealth;
pub(super) use window::WindowStage;

/// A partition assigned to this process.
pub(super) struct PartitionState {
    pub(super) assigned: Assignment,
    pub(super) commit_point: CommitPoint,
    /// `None` until the bus has told it.
    extent: Option<Extent>,
    committed: Option<i64>,
    running: usize,
    /// Total size of unfinished deliveries.
    bytes: usize,
    paused: bool,
    cancel: watch::Sender<bool>,
    /// What was in flight when a process died, until all of it is finished.
    suspects: Option<Suspects>,
    /// Whether the ledger has yet to say if there are suspects. Nothing starts until it has.
    suspects_unknown: bool,
}

/// What a task reports for one queue.
struct Ended {
    queue: QueueId<Key>,
    queued: Vec<Queued>,
    endings: Vec<Ending>,
}

pub(super) struct Pipeline {
    pub(super) context: ConsumerContext,
    pub(super) worker: Arc<dyn Worker>,
    pub(super) subscriber: Box<dyn Subscriber>,
    pub(super) stop: watch::Receiver<Stop>,
    pub(super) meter: Arc<Meter>,
    pub(super) partitions: HashMap<Partition, PartitionState>,
    /// Cancel what still runs of released partitions.
    pub(super) released: Vec<watch::Sender<bool>>,
    pub(super) queues: KeyQueues<Key, Queued>,
    /// Suspects, each to run with nothing beside it.
    pub(super) alone: VecDeque<(QueueId<Key>, Vec<Arrival>)>,
    pub(super) window: WindowStage,
    pub(super) held: HeldFeed,
    pub(super) dead_letters: DeadLetterOutlet,
    pub(super) ledger: LedgerHealth,
    pub(super) tasks: Tasks,
    pub(super) state: State,
}

/// Tasks that run beside the pipeline.
#[derive(Default)]
pub(super) struct Tasks {
    running: JoinSet<Vec<Ended>>,
    in_flight: usize,
    lone: bool,
    suspects: JoinSet<SuspectsAnswer>,
    extents: JoinSet<Option<Vec<(Assignment, Extent)>>>,
}

/// The pipeline's state.
pub(super) struct State {
    bus_away: bool,
    draining: Option<Instant>,
    next_commit: Instant,
    next_lag: Instant,
    too_old: u32,
    /// Partitions that the bus has yet to accept back.
    unreleased: Vec<Assignment>,
    uncommitted: Failing,
}

impl State {
    pub(super) fn new() -> Self {
        let now = Instant::now();
        State {
            bus_away: false,
            draining: None,
            next_commit: now,
            next_lag: now,
            too_old: 0,
            unreleased: Vec::new(),
            uncommitted: Failing::default(),
        }
    }
}

impl Pipeline {
    /// Runs until it is told to stop or cannot continue. Either way it releases what it has.
    pub(super) async fn run(mut self) -> Result<Counts> {
        self.on_stop(false); // it may have been stopped before it started
        let ran = self.run_loop().await;
        self.end(ran).await
    }

    /// Takes deliveries along the path in the module's first line.
    async fn run_loop(&mut self) -> Result<()> {
        loop {
            self.start_runnable(); // claim → handle → settle
            let wake = self.next_wake();
            tokio::select! {
                event = self.subscriber.next() => self.on_bus_event(event).await?, // match → window → order
                Some(ended) = self.tasks.running.join_next() => self.on_task_done(ended)?, // → commit point
                Some(answer) = self.held.answer() => self.on_due(answer)?,
                Some(copied) = self.dead_letters.copied() => self.dead_letters.on_copied(copied)?,
                Some(answer) = self.window.answer() => self.on_window_answer(answer)?,
                Some(probed) = self.ledger.probed() => self.ledger.on_probed(probed)?,
                Some(answer) = self.tasks.suspects.join_next() => self.on_suspects(answer)?,
                Some(extents) = self.tasks.extents.join_next() => self.on_extents(extents.map_err(task_failed)?),
                () = tokio::time::sleep_until(wake) => {}
                changed = self.stop.changed() => self.on_stop(changed.is_err()),
            }
            if *self.stop.borrow() == Stop::Now {
                return Ok(());
            }
            self.run_periodic();
            self.update_partitions().await?; // → commit
            if self.state.draining.is_some() && (self.tasks.in_flight == 0 || self.is_overdue()) {
                return Ok(());
            }
        }
    }

    fn next_wake(&self) -> Instant {
        // Overdue work is already done, or waits for something that wakes the loop.
        let now = Instant::now();
        let times = [self.state.next_commit, self.held.next_wake(), self.dead_letters.next_wake()]
            .into_iter()
            .chain(self.queues.next_at());
        times.chain(self.state.draining).filter(|at| *at > now).min().unwrap_or(now + Duration::from_secs(1))
    }

    fn on_stop(&mut self, nobody_left: bool) {
        if nobody_left || *self.stop.borrow() != Stop::No {
            self.drain();
        }
    }

    /// Starts nothing new; running deliveries may finish.
    fn drain(&mut self) {
        if self.state.draining.is_none() {
            self.state.draining = Some(Instant::now() + self.context.settings.drain);
            self.queues.retain(|_| false);
            self.alone.clear();
            self.window.clear();
        }
    }

    // --- out: claim → handle → settle, in tasks ---

    fn start_runnable(&mut self) {
        let suspects_unknown = self.partitions.values().any(|own| own.suspects_unknown);
        if self.ledger.is_away() || suspects_unknown || self.state.draining.is_some() || self.tasks.lone {
            return;
        }
        if !self.alone.is_empty() {
            if self.tasks.in_flight == 0 {
                let queues = self.next_suspects();
                self.tasks.lone = true;
                self.start(queues);
            }
            return; // nothing else starts until the suspects are finished
        }
        let batch_max = self.worker.batch_max();
        while self.queues.has_ready() {
            let mut room = self.context.settings.concurrency.saturating_sub(self.tasks.running.len());
            if room == 0 {
                break;
            }
            let mut queues = Vec::new();
            let (max, per_key) =
                if batch_max == 1 { (room, 1) } else { (batch_max, self.worker.per_key_max()) };
            for QueueRun { queue, items } in self.queues.take(max, per_key) {
                let (first, rest) = first_of(items);
                self.queues.put_back(&queue, rest);
                let arrivals = match first {
                    First::Events(arrivals) => arrivals,
                    First::Undecodable(undecodable) if room == 0 => {
                        self.queues.release(queue, vec![Queued::Undecodable(undecodable)], None);
                        continue;
                    }
                    First::Undecodable(undecodable) => {
                        room -= 1;
                        self.start_refusal(queue, undecodable);
                        continue;
                    }
                };
                let Some(first) = arrivals.first() else { continue };
                let is_held = first.is_held();
                if first.alone || first.suspects_max.is_some() {
                    self.alone.push_back((queue, arrivals));
                } else if is_held && batch_max > 1 && room == 0 {
                    self.queues.release(queue, events(arrivals), None);
                } else if is_held || batch_max == 1 {
                    // No marker covers a held event, so it runs separately: the others of a batch
                    // would have to wait for it.
                    room = room.saturating_sub(1);
                    self.start(vec![(queue, arrivals)]);
                } else {
                    queues.push((queue, arrivals));
                }
            }
            if !queues.is_empty() {
                self.start(queues);
            }
            if !self.alone.is_empty() {
                return self.start_runnable();
            }
        }
    }

    /// The next suspects to run with nothing beside them: one queue, or as many as may run together.
    fn next_suspects(&mut self) -> Vec<(QueueId<Key>, Vec<Arrival>)> {
        let together = |(_, arrivals): &(QueueId<Key>, Vec<Arrival>)| {
            arrivals.first().filter(|arrival| !arrival.alone).and_then(|arrival| arrival.suspects_max)
        };
        let max = self.alone.front().and_then(together);
        let mut room = max.unwrap_or(1);
        let mut queues = Vec::new();
        while let Some(next) = self.alone.front()
            && (queues.is_empty() || (max.is_some() && together(next) == max && next.1.len() <= room))
        {
            room = room.saturating_sub(next.1.len());
            queues.extend(self.alone.pop_front());
        }
        queues
    }

    fn start(&mut self, queues: Vec<(QueueId<Key>, Vec<Arrival>)>) {
        for (_, arrivals) in &queues {
            self.count_in_flight(arrivals.iter().map(|arrival| &arrival.delivered));
        }
        let (worker, context) = (Arc::clone(&self.worker), self.context.clone());
        self.tasks.running.spawn(async move {
            let (keys, mut arrivals): (Vec<_>, Vec<_>) = queues.into_iter().unzip();
            let endings = work(&*worker, &context, &mut arrivals).await;
            let ended = keys.into_iter().zip(arrivals).zip(endings);
            ended
                .map(|((queue, arrivals), endings)| Ended { queue, queued: events(arrivals), endings })
                .collect()
        });
    }

    /// Records an undecodable record as a dead letter.
    fn start_refusal(&mut self, queue: QueueId<Key>, undecodable: Box<Undecodable>) {
        self.count_in_flight([&undecodable.delivered]);
        let context = self.context.clone();
        self.tasks.running.spawn(async move {
            let ending = context.refuse_undecodable(&undecodable).await;
            vec![Ended { queue, queued: vec![Queued::Undecodable(undecodable)], endings: vec![ending] }]
        });
    }

    fn count_in_flight<'a>(&mut self, delivered: impl IntoIterator<Item = &'a Delivered>) {
        for delivered in delivered {
            self.tasks.in_flight += 1;
            if let Some(own) = self.partition_of(delivered) {
                own.running += 1;
                if crate::crash_point::mutant!("commit before settle") {
                    own.commit_point.finish(delivered.received.origin.offset);
                }
            }
        }
    }

    // --- back: commit point → commit ---

    fn on_task_done(&mut self, ended: std::result::Result<Vec<Ended>, tokio::task::JoinError>) -> Result<()> {
        // Handlers' panics are caught where they happen. A panic here is a bug in hapax, and its
        // queues are lost.
        let ended = ended.map_err(task_failed)?;
        self.tasks.lone = false;
        for Ended { queue, queued, endings } in ended {
            self.tasks.in_flight -= queued.len();
            for delivered in &queued {
                if let Some(own) = self.partition_of(delivered) {
                    own.running -= 1;
                }
            }
            self.finish_queue(queue, queued, endings)?;
        }
        Ok(())
    }

    fn finish_queue(&mut self, queue: QueueId<Key>, queued: Vec<Queued>, endings: Vec<Ending>) -> Result<()> {
        let mut queued = queued.into_iter();
        let mut until = None;
        let mut rest = Vec::new();
        for ending in endings {
            let Some(mut next) = queued.next() else { break };
            match ending {
                Ending::Passed(how) => {
                    self.pass(&next, how);
                    self.note_too_old(how)?;
                    continue;
                }
                Ending::Later(after) => {
                    until = Some(Instant::now() + after);
                    if let Queued::Event(arrival) = &mut next {
                        arrival.suspects_max = None; // it has run, here or elsewhere, and the process lives
                    }
                }
                Ending::Contended(after) => until = Some(Instant::now() + after),
                Ending::Alone => {
                    if let Queued::Event(arrival) = &mut next {
                        arrival.alone = true;
                    }
                }
                Ending::Cancelled => {}
                Ending::Stop(error) => return Err(error),
                Ending::Unavailable(error) => match self.context.settings.outage {
                    OutagePolicy::FailFast => return Err(error),
                    OutagePolicy::DeadLetter if self.dead_topic_of(&next).is_some() => {
                        self.meter.ledger_away();
                        let rest = std::iter::once(next).chain(queued).collect();
                        self.copy_unclaimed(queue, rest, &error);
                        return Ok(());
                    }
                    OutagePolicy::DeadLetter | OutagePolicy::Pause => {
                        self.ledger.on_away();
                        until = Some(Instant::now() + Duration::from_millis(50));
                    }
                },
            }
            rest.push(next);
            break;
        }
        rest.extend(queued);
        rest.retain(|delivered| self.is_ours(delivered));
        // An event that came out of the ledger meanwhile may be the one the rest waits for.
        let strict = self.context.settings.is_strict();
        self.queues.release_among(queue, rest, until, |queued, given| queued.precedes(given, strict));
        Ok(())
    }

    /// Whether a delivery's partition is still assigned to this process under the same epoch.
    fn is_ours(&self, delivered: &Delivered) -> bool {
        if self.state.draining.is_some() {
            return false;
        }
        match &delivered.source {
            Source::Held(..) => true,
            Source::Bus(assigned) => {
                self.partitions.get(&assigned.partition).is_some_and(|own| own.assigned == *assigned)
            }
        }
    }

    fn partition_of(&mut self, delivered: &Delivered) -> Option<&mut PartitionState> {
        let Source::Bus(assigned) = &delivered.source else { return None };
        self.partitions.get_mut(&assigned.partition).filter(|own| own.assigned == *assigned)
    }

    /// Finishes a delivery, so that the commit point may move past it.
    fn pass(&mut self, queued: &Queued, how: Passed) {
        queued.span.record("consumer.ending", how.label());
        self.held.note_activity();
        self.meter.passed(how);
        let offset = queued.received.origin.offset;
        if let Some(own) = self.partition_of(queued) {
            own.bytes = own.bytes.saturating_sub(queued.bytes());
            let partition = own.assigned.partition.clone();
            self.finish_offset(&partition, offset);
        }
        if let Source::Held(identity, week) = &queued.source {
            self.held.finished(identity);
            if let Queued::Event(arrival) = queued {
                self.end_alias(arrival, identity.clone(), *week, how);
            }
        }
        if matches!(how, Passed::Done | Passed::Finished) {
            self.window.on_done(queued);
        }
    }

    /// Finishes an offset of a partition that is this process's.
    fn finish_offset(&mut self, partition: &Partition, offset: i64) {
        let Some(own) = self.partitions.get_mut(partition) else { return };
        own.commit_point.finish(offset);
        let position = own.commit_point.position().unwrap_or(i64::MIN);
        if own.suspects.as_ref().is_some_and(|suspects| suspects.last < position) {
            own.suspects = None;
            self.worker.cleared(partition);
        }
    }

    /// Settles the entry of a record that was refused under its location. It was redriven and could
    /// be read this time, so it now has its own id.
    fn end_alias(&self, arrival: &Arrival, refused: Identity, week: Week, how: Passed) {
        let identity = self.context.identity_of(arrival);
        // Left to another process: until that one has settled it, its bytes are here alone.
        if identity == refused || matches!(how, Passed::Refused | Passed::TooOld | Passed::Left) {
            return;
        }
        let core = self.context.core.clone();
        tokio::spawn(async move {
            let claim = Claim { time: Some(week.moment()), ..Claim::new(refused, Mode::Done) };
            if let Err(error) = core.claim_raw(claim).await {
                tracing::warn!(target: "hapax", error = %error.chain(), "a redriven record's first entry stays open");
            }
        });
    }

    fn note_too_old(&mut self, how: Passed) -> Result<()> {
        self.state.too_old = if how == Passed::TooOld { self.state.too_old + 1 } else { 0 };
        let max = self.context.settings.too_old_max;
        if self.state.too_old >= max {
            return Err(Error::Config(format!(
                "{max} events in a row are older than what the ledger remembers (too_old_max): is the topic being read again from its beginning?"
            )));
        }
        Ok(())
    }

    fn dead_topic_of(&self, delivered: &Delivered) -> Option<Topic> {
        self.context.settings.dead_topic_of(&delivered.received.origin.topic)
    }

    /// With the ledger unavailable and the policy to continue, copies the queue's first record. The
    /// copy is all that remains of it here.
    fn copy_unclaimed(&mut self, queue: QueueId<Key>, queued: Vec<Queued>, error: &Error) {
        let Some((first, topic)) = queued.first().and_then(|first| Some((first, self.dead_topic_of(first)?)))
        else {
            return;
        };
        let record = dead::unclaimed_record(&self.context, &first.received, &error.chain());
        let bus = Arc::clone(&self.context.bus);
        self.count_in_flight(queued.iter().map(|queued| &**queued));
        self.tasks.running.spawn(async move {
            let published = bus.publish(&topic, &[record]).await;
            let ending = match published.map(|mut answers| answers.pop()) {
                Ok(Some(Ok(_))) => Ending::Passed(Passed::DeadLettered),
                Ok(Some(Err(error))) | Err(error) => {
                    tracing::warn!(target: "hapax", error = %error.chain(), "neither the ledger nor the dead-letter topic takes this record");
                    Ending::Later(Duration::from_secs(1))
                }
                Ok(None) => Ending::Later(Duration::from_secs(1)),
            };
            vec![Ended { queue, queued, endings: vec![ending] }]
        });
    }

    /// Starts periodic work.
    fn run_periodic(&mut self) {
        let now = Instant::now();
        self.ledger.start();
        if self.state.draining.is_none() && !self.ledger.is_away() {
            self.held.start(now);
            self.dead_letters.start(now);
        }
        self.window.remember(now >= self.state.next_commit);
        if now >= self.state.next_lag && self.tasks.extents.is_empty() {
            self.state.next_lag = now + LAG_INTERVAL;
            let of = |own: &PartitionState| (own.assigned.clone(), own.commit_point.position().is_some());
            let of = self.partitions.values().map(of).collect();
            self.tasks.extents.spawn(ask::extents(self.context.clone(), of));
        }
        self.meter.lag(self.lag());
        if self.state.draining.is_some_and(|deadline| now >= deadline) {
            self.cancel_all();
        }
    }
}

/// Handlers' panics are caught where they happen. A panic here is a bug in hapax, and its
/// deliveries are lost.
#[allow(clippy::needless_pass_by_value)] // a `map_err` function
pub(super) fn task_failed(error: tokio::task::JoinError) -> Error {
    Error::Corrupt(format!("a task of the consumer ended badly: {error}"))
}

/// The first deliveries of a queue that may run together.
enum First {
    Events(Vec<Arrival>),
    Undecodable(Box<Undecodable>),
}

/// Splits the deliveries of a queue into those that run first and the rest. An undecodable record is
/// split from the others, and so is an event that must run alone.
fn first_of(items: Vec<Queued>) -> (First, Vec<Queued>) {
    let kind = |arrival: &Arrival| (arrival.alone, arrival.suspects_max);
    let mut items = items.into_iter().peekable();
    let mut arrivals: Vec<Arrival> = Vec::new();
    while let Some(next) = items.next_if(|next| match (arrivals.first(), next) {
        (None, _) => true,
        (Some(first), Queued::Event(next)) => {
            kind(first) == kind(next) && arrivals.len() < first.suspects_max.unwrap_or(usize::MAX)
        }
        (Some(_), Queued::Undecodable(_)) => false,
    }) {
        match next {
            Queued::Event(arrival) => arrivals.push(arrival),
            Queued::Undecodable(undecodable) => return (First::Undecodable(undecodable), items.collect()),
        }
    }
    (First::Events(arrivals), items.collect())
}

fn events(arrivals: Vec<Arrival>) -> Vec<Queued> {
    arrivals.into_iter().map(Queued::Event).collect()
}

/// Runs queues. An unwanted event is stepped past.
async fn work(
    worker: &dyn Worker,
    context: &ConsumerContext,
    queues: &mut [Vec<Arrival>],
) -> Vec<Vec<Ending>> {
    if let [queue] = &mut *queues
        && let [arrival] = queue.as_mut_slice()
        && !context.settings.wants.matches(&arrival.event)
    {
        return vec![vec![context.step_past(arrival).await]];
    }
    worker.work(queues).await
}
