//! State shared by a member's thread and its subscriber: buffered records, assignment events and
//! requests.
//!
//! Pausing a partition stops its delivery here, not its fetching. librdkafka's own pause drops all
//! that was fetched ahead, and after its resume up to a second passes before it fetches again. What
//! arrives while a partition is paused waits here. Only if too much waits is it paused in librdkafka.
//!
//! The state's lock is never held during a call to librdkafka, because its callbacks lock it too.
//! `flow` is held during such calls, but only those that pause or resume delivery, which trigger no
//! callbacks.

mod partition;
mod pushed;
mod room;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use self::partition::{Mark, PartitionState};
pub(super) use self::pushed::Pushed;
use self::pushed::StepBack;
use self::room::{Room, Waiting};
use crate::bus::{Assignment, BusEvent, Partition, Received};
use crate::error::{Error, Result};

/// The most records returned at once.
const RECORDS_MAX: usize = 500;

/// What tests see and do.
#[derive(Default)]
pub(super) struct Probe {
    /// Members have stopped polling.
    pub(super) silent: AtomicBool,
    /// How often a partition was paused in librdkafka, because too much of it waited.
    pub(super) fetch_pauses: AtomicUsize,
    /// The most records of paused partitions that waited in one member.
    pub(super) waited_max: AtomicUsize,
}

/// Wakes the thread when records arrive or the subscriber has a request.
#[derive(Default)]
pub(super) struct WakeUp(Mutex<bool>, Condvar);

impl WakeUp {
    pub(super) fn wake(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_one();
    }

    /// Waits until woken, or returns at once if woken since the last wait.
    pub(super) fn wait(&self, at_most: Duration) {
        let woken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(woken, at_most, |woken| !*woken);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// A request to continue at another offset.
pub(super) struct Seek {
    pub partition: Partition,
    pub offset: i64,
    pub by: Instant,
    pub answer: oneshot::Sender<Result<()>>,
}

/// Revoked partitions that librdkafka expects to be unassigned.
struct Returning {
    partitions: Vec<Partition>,
    by: Instant,
}

#[derive(Default)]
struct State {
    epoch: u64,
    partitions: BTreeMap<Partition, PartitionState>,
    news: VecDeque<Result<BusEvent>>,
    seeks: Vec<Seek>,
    returning: Option<Returning>,
    leaving: bool,
    /// Why the subscription has ended.
    over: Option<Error>,
    /// Rotates which partition delivers first, so that a busy one does not starve the others.
    rotation: usize,
    /// The same for the gaps about which the broker is asked.
    asked: usize,
    /// Whether `next` is waiting now. `listened` is when it last did.
    listening: bool,
    listened: Option<Instant>,
}

/// Notes that `next` no longer waits, also if it was cancelled.
struct Listening<'i>(&'i Inbox);

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.listening = false;
        state.listened = Some(Instant::now());
    }
}

pub(super) struct Inbox {
    state: Mutex<State>,
    flow: Mutex<()>,
    changed: Notify,
    pub(super) wake_up: Arc<WakeUp>,
    room: Room,
    pub(super) probe: Arc<Probe>,
}

impl Inbox {
    pub(super) fn new(records_max: usize, bytes_max: usize, probe: Arc<Probe>) -> Self {
        Inbox {
            state: Mutex::default(),
            flow: Mutex::default(),
            changed: Notify::new(),
            wake_up: Arc::default(),
            room: Room { records_max, bytes_max },
            probe,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No change can panic halfway, so a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Held while partitions are assigned, paused or resumed both here and in librdkafka, which has
    /// no epochs. Otherwise a pause from an assignment that is over could reach librdkafka after
    /// the next assignment resumed the partition.
    pub(super) fn flow(&self) -> MutexGuard<'_, ()> {
        self.flow.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report(&self, state: &mut State, news: Result<BusEvent>) {
        state.news.push_back(news);
        self.changed.notify_one();
    }

    // Called by the thread.

    /// Adds partitions to this member's assignments, each with its next offset, if known.
    pub(super) fn assigned(&self, partitions: Vec<(Partition, Option<i64>)>) {
        if partitions.is_empty() {
            return;
        }
        let mut state = self.lock();
        state.epoch += 1;
        let epoch = state.epoch;
        let mut given = Vec::with_capacity(partitions.len());
        for (partition, next) in partitions {
            state.partitions.insert(
                partition.clone(),
                PartitionState { epoch, next, delivered: next, ..PartitionState::default() },
            );
            given.push(Assignment { partition, epoch });
        }
        self.report(&mut state, Ok(BusEvent::Assigned(given)));
    }

    /// Marks partitions as revoked. Returns false if there is nothing to wait for: this member owns
    /// none of them, or is leaving.
    pub(super) fn revoke(&self, partitions: Vec<Partition>, by: Instant) -> bool {
        let mut state = self.lock();
        let mut revoked = Vec::new();
        for partition in &partitions {
            if let Some(own) = state.partitions.get_mut(partition) {
                own.revoking = true;
                own.clear();
                revoked.push(Assignment { partition: partition.clone(), epoch: own.epoch });
            }
        }
        if revoked.is_empty() || state.leaving {
            return false;
        }
        state.returning = Some(Returning { partitions, by });
        self.report(&mut state, Ok(BusEvent::Revoked(revoked)));
        true
    }

    /// Removes partitions that the group has taken.
    pub(super) fn lost(&self, partitions: &[Partition]) {
        let mut state = self.lock();
        let lost: Vec<_> = partitions
            .iter()
            .filter_map(|p| {
                state.partitions.remove(p).map(|own| Assignment { partition: p.clone(), epoch: own.epoch })
            })
            .collect();
        if lost.is_empty() {
            return;
        }
        // A lost partition need not be released any more.
        forget(&mut state.news, |event| matches!(event, BusEvent::Revoked(_)), &lost);
        self.report(&mut state, Ok(BusEvent::Lost(lost)));
    }

    /// Removes all partitions.
    pub(super) fn lost_all(&self) {
        let mut state = self.lock();
        state.returning = None;
        let all: Vec<_> = state.partitions.keys().cloned().collect();
        // Dropping the seeks tells their callers that the partition is no longer assigned.
        state.seeks.clear();
        drop(state);
        self.lost(&all);
    }

    /// The revoked partitions to unassign in librdkafka, once all were released or the time is up.
    /// Those not released in time are lost. `lost` asks whether the group has taken them already.
    pub(super) fn returned(&self, lost: impl FnOnce() -> bool) -> Option<Vec<Partition>> {
        let state = self.lock();
        let returning = state.returning.as_ref()?;
        let held = returning.partitions.iter().any(|p| state.partitions.contains_key(p));
        let up = Instant::now() >= returning.by || state.leaving;
        drop(state);
        // Call `lost` without the lock: it calls librdkafka.
        if held && !up && !lost() {
            return None;
        }
        let partitions = self.lock().returning.take()?.partitions;
        self.lost(&partitions);
        Some(partitions)
    }

    /// Buffers a record, or drops it if its partition is not (or no longer) ours.
    pub(super) fn push(&self, record: Received, bytes: usize) -> Pushed {
        match self.on_step_back(&record) {
            Some(StepBack::Repeat) => Pushed::Open,
            Some(StepBack::Anew(partition)) => {
                self.put(record, bytes);
                Pushed::Anew(partition)
            }
            None => self.put(record, bytes),
        }
    }

    /// Detects a record below the offsets already received. Unless it is the last one once more, the
    /// partition now holds other data: work under the old offsets no longer counts, so the partition
    /// is lost and assigned under a new epoch.
    fn on_step_back(&self, record: &Received) -> Option<StepBack> {
        let mut state = self.lock();
        let partition = Partition { topic: record.origin.topic.clone(), number: record.origin.partition };
        let offset = record.origin.offset;
        let steps_back = |own: &&PartitionState| !own.revoking && own.next.is_some_and(|next| offset < next);
        let own = state.partitions.get(&partition).filter(steps_back)?;
        if own.last.as_ref().is_some_and(|last| *last == Mark::of(record)) {
            return Some(StepBack::Repeat);
        }
        let before = Assignment { partition: partition.clone(), epoch: own.epoch };
        tracing::warn!(
            target: "hapax::kafka", %partition, expected = own.next, offset,
            "offsets went back: the topic was probably deleted and created again; reading it as a new topic"
        );
        state.epoch += 1;
        let epoch = state.epoch;
        state.partitions.insert(partition.clone(), PartitionState { epoch, ..PartitionState::default() });
        self.report(&mut state, Ok(BusEvent::Lost(vec![before])));
        self.report(
            &mut state,
            Ok(BusEvent::Assigned(vec![Assignment { partition: partition.clone(), epoch }])),
        );
        Some(StepBack::Anew(partition))
    }

    fn put(&self, record: Received, bytes: usize) -> Pushed {
        let mut state = self.lock();
        let partition = Partition { topic: record.origin.topic.clone(), number: record.origin.partition };
        let offset = record.origin.offset;
        let wanted = |own: &&mut PartitionState| !own.revoking && own.rewind.is_none();
        let Some(own) = state.partitions.get_mut(&partition).filter(wanted) else { return Pushed::Open };
        own.gaps.on_record(own.next, offset);
        own.next = Some(offset + 1);
        own.last = Some(Mark::of(&record));
        own.bytes += bytes;
        own.records.push_back(record);
        if !own.paused {
            self.changed.notify_one();
            return Pushed::Open;
        }
        let paused = state.waiting();
        self.probe.waited_max.fetch_max(paused.records, Ordering::Relaxed);
        if self.room.fetches_on(paused) { Pushed::Waits } else { Pushed::Full(partition) }
    }

    /// Whether more records may be buffered. Those of paused partitions do not count: they would
    /// block the others. They have bounds of their own.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        self.room.is_free(Waiting::of(state.partitions.values().filter(|own| !own.paused)))
    }

    /// Notes that librdkafka has reset a partition to its beginning (`None`: any of them), so its next
    /// gap may be records that retention removed.
    pub(super) fn reset(&self, which: Option<&(String, i32)>) {
        let mut state = self.lock();
        for (partition, own) in &mut state.partitions {
            let named = which.is_none_or(|(topic, number)| {
                partition.topic.as_str() == topic && partition.number == *number
            });
            if named && !own.revoking {
                own.gaps.on_reset();
            }
        }
    }

    /// The first gap of each partition about which the broker must be asked, and since when. Starts
    /// with another one each time.
    pub(super) fn unknown_gaps(&self) -> Vec<(Partition, Range<i64>, Instant)> {
        let mut state = self.lock();
        let unknown = |(partition, own): (&Partition, &PartitionState)| {
            let (offsets, since) = own.gaps.unknown()?;
            Some((partition.clone(), offsets, since))
        };
        let mut all: Vec<_> = state.partitions.iter().filter_map(unknown).collect();
        if !all.is_empty() {
            state.asked = state.asked.wrapping_add(1);
            let first = state.asked % all.len();
            all.rotate_left(first);
        }
        all
    }

    /// Notes a partition's oldest offset, which tells what of a gap retention removed. `None`: the
    /// broker does not answer, and all of it counts as removed.
    pub(super) fn answered(&self, partition: &Partition, gap: &Range<i64>, oldest: Option<i64>) {
        let mut state = self.lock();
        if let Some(own) = state.partitions.get_mut(partition) {
            own.gaps.answered(gap, oldest);
            self.changed.notify_one();
        }
    }

    /// Reports an error to the subscriber.
    pub(super) fn failed(&self, error: Error) {
        let mut state = self.lock();
        self.report(&mut state, Err(error));
    }

    /// Ends the subscription.
    pub(super) fn end(&self, error: Error) {
        self.lock().over.get_or_insert(error);
        self.changed.notify_one();
    }

    pub(super) fn seeks(&self) -> Vec<Seek> {
        std::mem::take(&mut self.lock().seeks)
    }

    /// Drops everything fetched before a seek to `next`.
    pub(super) fn clear(&self, partition: &Partition, next: i64) {
        if let Some(own) = self.lock().partitions.get_mut(partition) {
            own.continue_at(next);
        }
    }

    /// The partitions to read again, each from its offset. The thread seeks there, then calls
    /// [`clear`](Self::clear).
    pub(super) fn rewinds(&self) -> Vec<(Partition, i64)> {
        let state = self.lock();
        let rewinds = state.partitions.iter().filter(|(_, own)| !own.revoking);
        rewinds.filter_map(|(partition, own)| Some((partition.clone(), own.rewind?))).collect()
    }

    /// Whether the subscriber has taken all events and still calls `next`.
    pub(super) fn is_heard(&self, within: Duration) -> bool {
        !self.probe.silent.load(Ordering::SeqCst)
            && self.lock().news.is_empty()
            && self.is_listened_to(within)
    }

    /// Whether `next` is waiting, or was within this time.
    pub(super) fn is_listened_to(&self, within: Duration) -> bool {
        let mut state = self.lock();
        state.listening || state.listened.get_or_insert_with(Instant::now).elapsed() < within
    }

    /// Increases with each assignment.
    pub(super) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.lock().leaving
    }

    /// The partitions that are paused in librdkafka.
    pub(super) fn fetch_paused(&self) -> Vec<Partition> {
        let state = self.lock();
        state.partitions.iter().filter(|(_, own)| own.fetch_paused).map(|(p, _)| p.clone()).collect()
    }

    /// Notes that partitions were paused or resumed in librdkafka.
    pub(super) fn set_fetch_paused(&self, partitions: &[Partition], paused: bool) {
        let mut state = self.lock();
        for partition in partitions {
            if let Some(own) = state.partitions.get_mut(partition) {
                own.fetch_paused = paused;
                self.probe.fetch_pauses.fetch_add(usize::from(paused), Ordering::SeqCst);
            }
        }
    }

    // Called by the subscriber.

    /// Waits for the next event. Cancel safe: an event that is taken is returned at once.
    pub(super) async fn next(&self) -> Result<BusEvent> {
        self.lock().listening = true;
        let _listening = Listening(self);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable(); // changes from here on are not missed
            if let Some(next) = self.take() {
                self.wake_up.wake(); // there is room again
                return next;
            }
            changed.await;
        }
    }

    pub(super) fn take(&self) -> Option<Result<BusEvent>> {
        if self.probe.silent.load(Ordering::SeqCst) {
            return None;
        }
        let mut state = self.lock();
        if let Some(news) = state.news.pop_front() {
            return Some(news);
        }
        let delivers = |own: &PartitionState| !own.paused && !own.revoking;
        for (partition, own) in state.partitions.iter_mut().filter(|(_, own)| delivers(own)) {
            let next = own.records.front().map(|next| next.origin.offset);
            if let Some(offsets) = own.gaps.take_removed(next) {
                own.delivered = Some(offsets.end);
                return Some(Ok(BusEvent::Removed { partition: partition.clone(), offsets }));
            }
        }
        state.rotation = state.rotation.wrapping_add(1);
        let rotation = state.rotation;
        let mut records = Vec::new();
        let mut partitions: Vec<_> = state.partitions.values_mut().filter(|own| delivers(own)).collect();
        let first = rotation % partitions.len().max(1);
        partitions.rotate_left(first);
        for own in partitions {
            let count = own.ready().min(RECORDS_MAX - records.len());
            records.extend(own.records.drain(..count));
            own.delivered =
                records.last().filter(|_| count > 0).map(|last| last.origin.offset + 1).or(own.delivered);
            own.bytes = own.records.iter().map(|r| r.record.bytes()).sum();
        }
        if !records.is_empty() {
            return Some(Ok(BusEvent::Records(records)));
        }
        state.over.as_ref().map(|error| Err(error.copy()))
    }

    /// Wakes a subscriber that may have something to receive now.
    pub(super) fn wake_subscriber(&self) {
        self.changed.notify_one();
        self.wake_up.wake();
    }

    /// Pauses delivery of partitions that are still assigned under the same epoch. One that is paused
    /// when paused ones keep too much already is dropped from memory, and read again. Returns those
    /// that were dropped: they must not be fetched now.
    pub(super) fn pause(&self, partitions: &[Assignment]) -> Vec<Partition> {
        let mut state = self.lock();
        let mine = state.set_paused(partitions, true);
        self.probe.waited_max.fetch_max(state.waiting().records, Ordering::Relaxed);
        let mut dropped = Vec::new();
        for partition in mine {
            if !self.room.is_exceeded(state.waiting()) {
                break;
            }
            if let Some(own) = state.partitions.get_mut(&partition).filter(|own| !own.records.is_empty()) {
                own.drop_fetched();
                tracing::debug!(target: "hapax::kafka", %partition, from = own.rewind, "paused with too much in memory; it is read again");
                dropped.push(partition);
            }
        }
        dropped
    }

    /// Resumes delivery. Returns the partitions to resume in librdkafka.
    pub(super) fn resume(&self, partitions: &[Assignment]) -> Vec<Partition> {
        let mut state = self.lock();
        let mut mine = state.set_paused(partitions, false);
        mine.retain(|partition| state.partitions.get(partition).is_some_and(|own| own.fetch_paused));
        mine
    }

    pub(super) fn seek(&self, seek: Seek) -> Result<()> {
        let mut state = self.lock();
        if state.partitions.get(&seek.partition).is_none_or(|own| own.revoking) {
            return Err(Error::Fenced {
                what: format!("{} is not in this member's assignments", seek.partition),
            });
        }
        state.seeks.push(seek);
        drop(state);
        self.wake_up.wake();
        Ok(())
    }

    /// Fails unless a partition is still assigned under the same epoch.
    pub(super) fn check(&self, assigned: &Assignment) -> Result<()> {
        let state = self.lock();
        match state.partitions.get(&assigned.partition) {
            Some(own) if own.epoch == assigned.epoch => Ok(()),
            other => Err(Error::Fenced {
                what: format!(
                    "{} was this member's under epoch {}; now {}",
                    assigned.partition,
                    assigned.epoch,
                    other.map_or_else(
                        || "it is not".to_owned(),
                        |own| format!("it is under epoch {}", own.epoch)
                    )
                ),
            }),
        }
    }

    /// Releases revoked partitions.
    pub(super) fn release(&self, partitions: &[Assignment]) {
        let mut state = self.lock();
        for assigned in partitions {
            let revoking = |own: &PartitionState| own.revoking && own.epoch == assigned.epoch;
            if state.partitions.get(&assigned.partition).is_some_and(revoking) {
                state.partitions.remove(&assigned.partition);
            }
        }
        // A released partition need not be reported as lost afterwards.
        forget(&mut state.news, |event| matches!(event, BusEvent::Lost(_)), partitions);
        drop(state);
        self.wake_up.wake();
    }

    pub(super) fn leave(&self) {
        self.lock().leaving = true;
        self.wake_up.wake();
    }
}

impl State {
    /// Pauses or resumes partitions. Returns those that are still assigned under the same epoch.
    fn set_paused(&mut self, partitions: &[Assignment], paused: bool) -> Vec<Partition> {
        let mut mine = Vec::new();
        for Assignment { partition, epoch } in partitions {
            let same = |own: &&mut PartitionState| own.epoch == *epoch && !own.revoking;
            if let Some(own) = self.partitions.get_mut(partition).filter(same) {
                own.paused = paused;
                mine.push(partition.clone());
            }
        }
        mine
    }

    /// What waits of paused partitions.
    fn waiting(&self) -> Waiting {
        Waiting::of(self.partitions.values().filter(|own| own.paused))
    }
}

/// Removes partitions from events that were not taken yet.
fn forget(
    news: &mut VecDeque<Result<BusEvent>>,
    which: impl Fn(&BusEvent) -> bool,
    partitions: &[Assignment],
) {
    for event in news.iter_mut().flatten().filter(|event| which(event)) {
        if let BusEvent::Revoked(some) | BusEvent::Lost(some) = event {
            some.retain(|assigned| !partitions.contains(assigned));
        }
    }
    news.retain(
        |event| !matches!(event, Ok(BusEvent::Revoked(some) | BusEvent::Lost(some)) if some.is_empty()),
    );
}

#[cfg(test)]
mod tests;
