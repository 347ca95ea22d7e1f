//! What a member's thread and its subscriber share: records that wait, news of partitions, and wishes.
//!
//! No lock of this file is held while librdkafka is called: its callbacks come back here.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Notify, oneshot};

use crate::bus::route::bytes_of;
use crate::bus::{Assigned, Heard, Partition, Received};
use crate::error::{Error, Result};

/// The most records a subscriber hears at once.
const RECORDS_MAX: usize = 500;

/// Wakes the thread: records came, or the subscriber wants something.
#[derive(Default)]
pub(super) struct Bell(Mutex<bool>, Condvar);

impl Bell {
    pub(super) fn ring(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.1.notify_one();
    }

    /// Waits until it rings, or rang since the last wait.
    pub(super) fn wait(&self, at_most: Duration) {
        let rung = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = self.1.wait_timeout_while(rung, at_most, |rung| !*rung);
        *waited.unwrap_or_else(PoisonError::into_inner).0 = false;
    }
}

/// One partition in this member's hands.
#[derive(Default)]
struct Lane {
    epoch: u64,
    paused: bool,
    /// The group wants it back: nothing more is delivered.
    wanted: bool,
    records: VecDeque<Received>,
    bytes: usize,
    /// The offset after the last record that came, or that was sought; at first the group's commit, if it has one.
    next: Option<i64>,
    /// The offsets that were passed over last: a gap, or what retention removed.
    jump: Option<Range<i64>>,
}

/// A wish to go on elsewhere.
pub(super) struct Seek {
    pub partition: Partition,
    pub offset: i64,
    pub by: Instant,
    pub answer: oneshot::Sender<Result<()>>,
}

/// Partitions that librdkafka waits to have unassigned.
struct Returning {
    partitions: Vec<Partition>,
    by: Instant,
}

#[derive(Default)]
struct State {
    epoch: u64,
    lanes: BTreeMap<Partition, Lane>,
    news: VecDeque<Result<Heard>>,
    seeks: Vec<Seek>,
    returning: Option<Returning>,
    leaving: bool,
    /// Why there will be nothing more to hear.
    over: Option<Error>,
    /// Which lane delivers first next time, so that a busy one does not starve the others.
    turn: usize,
    /// Whether `next` is waiting at the moment, and when it last did.
    listening: bool,
    listened: Option<Instant>,
}

/// Notes that nobody waits any more, also when the wait was cancelled.
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
    heard: Notify,
    pub(super) bell: Arc<Bell>,
    records_max: usize,
    bytes_max: usize,
    /// Whether this member stands still (tests only).
    pub(super) silent: Arc<AtomicBool>,
}

impl Inbox {
    pub(super) fn new(records_max: usize, bytes_max: usize, silent: Arc<AtomicBool>) -> Self {
        Inbox {
            state: Mutex::default(),
            heard: Notify::new(),
            bell: Arc::default(),
            records_max,
            bytes_max,
            silent,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Every change is complete before anything can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, state: &mut State, news: Result<Heard>) {
        state.news.push_back(news);
        self.heard.notify_one();
    }

    // What the thread does.

    /// Partitions are this member's from now on, each with the offset that comes next, if that is known.
    pub(super) fn given(&self, partitions: Vec<(Partition, Option<i64>)>) {
        if partitions.is_empty() {
            return;
        }
        let mut state = self.lock();
        state.epoch += 1;
        let epoch = state.epoch;
        let mut given = Vec::with_capacity(partitions.len());
        for (partition, next) in partitions {
            state.lanes.insert(partition.clone(), Lane { epoch, next, ..Lane::default() });
            given.push(Assigned { partition, epoch });
        }
        self.tell(&mut state, Ok(Heard::Given(given)));
    }

    /// The group wants partitions back. False: they are not in anyone's hands here, there is nothing to wait for.
    pub(super) fn wanted(&self, partitions: Vec<Partition>, by: Instant) -> bool {
        let mut state = self.lock();
        let mut revoked = Vec::new();
        for partition in &partitions {
            if let Some(lane) = state.lanes.get_mut(partition) {
                lane.wanted = true;
                lane.records.clear();
                lane.bytes = 0;
                revoked.push(Assigned { partition: partition.clone(), epoch: lane.epoch });
            }
        }
        if revoked.is_empty() || state.leaving {
            return false;
        }
        state.returning = Some(Returning { partitions, by });
        self.tell(&mut state, Ok(Heard::Revoked(revoked)));
        true
    }

    /// Partitions are gone.
    pub(super) fn lost(&self, partitions: &[Partition]) {
        let mut state = self.lock();
        let lost: Vec<_> = partitions
            .iter()
            .filter_map(|p| {
                state.lanes.remove(p).map(|lane| Assigned { partition: p.clone(), epoch: lane.epoch })
            })
            .collect();
        if lost.is_empty() {
            return;
        }
        // What is gone is not asked for any more.
        forget(&mut state.news, |heard| matches!(heard, Heard::Revoked(_)), &lost);
        self.tell(&mut state, Ok(Heard::Lost(lost)));
    }

    /// All of them are.
    pub(super) fn lost_all(&self) {
        let mut state = self.lock();
        state.returning = None;
        let all: Vec<_> = state.lanes.keys().cloned().collect();
        // Whoever waits for a seek hears that the partition is not in hand any more.
        state.seeks.clear();
        drop(state);
        self.lost(&all);
    }

    /// Those of which librdkafka must be told that they were given back, once all of them were or time is up. What was not
    /// given back in time is lost. `lost`: the group has taken them already.
    pub(super) fn returned(&self, lost: impl FnOnce() -> bool) -> Option<Vec<Partition>> {
        let state = self.lock();
        let returning = state.returning.as_ref()?;
        let held = returning.partitions.iter().any(|p| state.lanes.contains_key(p));
        let up = Instant::now() >= returning.by || state.leaving;
        drop(state);
        // Asked without the lock: it is librdkafka that answers.
        if held && !up && !lost() {
            return None;
        }
        let partitions = self.lock().returning.take()?.partitions;
        self.lost(&partitions);
        Some(partitions)
    }

    /// A record came. One of a partition that is not ours (any more) is nobody's.
    /// A partition whose offsets have begun anew is answered: it was taken away and given again, and is not paused any more.
    pub(super) fn push(&self, record: Received, bytes: usize) -> Option<Partition> {
        let anew = self.begins_anew(&record);
        self.put(record, bytes);
        anew
    }

    /// The partition of a record that lies below what was delivered: what lies there now is something else. What was done under the
    /// old offsets counts for nothing, so the partition is lost, and given under another epoch.
    fn begins_anew(&self, record: &Received) -> Option<Partition> {
        let mut state = self.lock();
        let partition = Partition { topic: record.origin.topic.clone(), number: record.origin.partition };
        let offset = record.origin.offset;
        let steps_back = |lane: &&Lane| !lane.wanted && lane.next.is_some_and(|next| offset < next);
        let lane = state.lanes.get(&partition).filter(steps_back)?;
        let before = Assigned { partition: partition.clone(), epoch: lane.epoch };
        tracing::warn!(
            target: "hapax::kafka", %partition, expected = lane.next, offset,
            "offsets have begun anew: was the topic made again? Reading it as a new one"
        );
        state.epoch += 1;
        let epoch = state.epoch;
        state.lanes.insert(partition.clone(), Lane { epoch, ..Lane::default() });
        self.tell(&mut state, Ok(Heard::Lost(vec![before])));
        self.tell(&mut state, Ok(Heard::Given(vec![Assigned { partition: partition.clone(), epoch }])));
        Some(partition)
    }

    fn put(&self, record: Received, bytes: usize) {
        let mut state = self.lock();
        let partition = Partition { topic: record.origin.topic.clone(), number: record.origin.partition };
        let offset = record.origin.offset;
        if let Some(lane) = state.lanes.get_mut(&partition).filter(|lane| !lane.wanted) {
            if let Some(next) = lane.next.filter(|next| *next < offset) {
                lane.jump = Some(next..offset);
            }
            lane.next = Some(offset + 1);
            lane.bytes += bytes;
            lane.records.push_back(record);
            if !lane.paused {
                self.heard.notify_one();
            }
        }
    }

    /// Whether more records may come. Those of paused partitions do not count: they would keep the others out, and no more
    /// of them is fetched.
    pub(super) fn has_room(&self) -> bool {
        let state = self.lock();
        let waiting = state.lanes.values().filter(|lane| !lane.paused);
        let (records, bytes) =
            waiting.fold((0, 0), |(records, bytes), lane| (records + lane.records.len(), bytes + lane.bytes));
        records < self.records_max && bytes < self.bytes_max
    }

    /// The offsets that partitions passed over since this was asked last.
    pub(super) fn jumps(&self) -> Vec<(Partition, Range<i64>)> {
        let mut state = self.lock();
        let jumps = state.lanes.iter_mut().filter_map(|(p, lane)| Some((p.clone(), lane.jump.take()?)));
        jumps.collect()
    }

    /// Retention removed records before they came.
    pub(super) fn removed(&self, partition: Partition, offsets: Range<i64>) {
        let mut state = self.lock();
        self.tell(&mut state, Ok(Heard::Removed { partition, offsets }));
    }

    /// Something went wrong that the subscriber must know.
    pub(super) fn failed(&self, error: Error) {
        let mut state = self.lock();
        self.tell(&mut state, Err(error));
    }

    /// There will be nothing more to hear.
    pub(super) fn end(&self, error: Error) {
        self.lock().over.get_or_insert(error);
        self.heard.notify_one();
    }

    pub(super) fn seeks(&self) -> Vec<Seek> {
        std::mem::take(&mut self.lock().seeks)
    }

    /// Nothing of what was fetched before a seek to `next` is delivered.
    pub(super) fn clear(&self, partition: &Partition, next: i64) {
        if let Some(lane) = self.lock().lanes.get_mut(partition) {
            (lane.next, lane.jump) = (Some(next), None);
            lane.records.clear();
            lane.bytes = 0;
        }
    }

    /// Whether the subscriber has heard all news, and listens for more.
    pub(super) fn is_heard(&self, within: Duration) -> bool {
        !self.silent.load(Ordering::SeqCst) && self.lock().news.is_empty() && self.is_listened_to(within)
    }

    /// Whether `next` waits, or did not long ago.
    pub(super) fn is_listened_to(&self, within: Duration) -> bool {
        let mut state = self.lock();
        state.listening || state.listened.get_or_insert_with(Instant::now).elapsed() < within
    }

    /// How many gifts there were.
    pub(super) fn epoch(&self) -> u64 {
        self.lock().epoch
    }

    pub(super) fn is_leaving(&self) -> bool {
        self.lock().leaving
    }

    /// Those partitions whose delivery is stopped.
    pub(super) fn paused(&self) -> Vec<Partition> {
        let state = self.lock();
        state.lanes.iter().filter(|(_, lane)| lane.paused).map(|(p, _)| p.clone()).collect()
    }

    // What the subscriber does.

    /// Waits for what is heard next. Cancel safe: what is taken is returned at once.
    pub(super) async fn next(&self) -> Result<Heard> {
        self.lock().listening = true;
        let _listening = Listening(self);
        loop {
            let mut heard = std::pin::pin!(self.heard.notified());
            heard.as_mut().enable(); // what comes from here on is not missed
            if let Some(next) = self.take() {
                self.bell.ring(); // there is room again
                return next;
            }
            heard.await;
        }
    }

    fn take(&self) -> Option<Result<Heard>> {
        if self.silent.load(Ordering::SeqCst) {
            return None;
        }
        let mut state = self.lock();
        if let Some(news) = state.news.pop_front() {
            return Some(news);
        }
        state.turn = state.turn.wrapping_add(1);
        let turn = state.turn;
        let mut records = Vec::new();
        let mut lanes: Vec<_> =
            state.lanes.values_mut().filter(|lane| !lane.paused && !lane.wanted).collect();
        let first = turn % lanes.len().max(1);
        lanes.rotate_left(first);
        for lane in lanes {
            let count = lane.records.len().min(RECORDS_MAX - records.len());
            records.extend(lane.records.drain(..count));
            lane.bytes = lane.records.iter().map(|r| bytes_of(&r.record)).sum();
        }
        if !records.is_empty() {
            return Some(Ok(Heard::Records(records)));
        }
        state.over.as_ref().map(|error| Err(error.copy()))
    }

    /// Wakes a subscriber that may have something to hear now.
    pub(super) fn nudge(&self) {
        self.heard.notify_one();
        self.bell.ring();
    }

    /// Stops or resumes delivery; answers with those partitions that are in hand.
    pub(super) fn set_paused(&self, partitions: &[Partition], paused: bool) -> Vec<Partition> {
        let mut state = self.lock();
        let mut mine = Vec::new();
        for partition in partitions {
            if let Some(lane) = state.lanes.get_mut(partition).filter(|lane| !lane.wanted) {
                lane.paused = paused;
                mine.push(partition.clone());
            }
        }
        mine
    }

    pub(super) fn seek(&self, seek: Seek) -> Result<()> {
        let mut state = self.lock();
        if state.lanes.get(&seek.partition).is_none_or(|lane| lane.wanted) {
            return Err(Error::Fenced { what: format!("{} is not in this member's hands", seek.partition) });
        }
        state.seeks.push(seek);
        drop(state);
        self.bell.ring();
        Ok(())
    }

    /// Whether a partition is still in hand since the same gift.
    pub(super) fn check(&self, assigned: &Assigned) -> Result<()> {
        let state = self.lock();
        match state.lanes.get(&assigned.partition) {
            Some(lane) if lane.epoch == assigned.epoch => Ok(()),
            other => Err(Error::Fenced {
                what: format!(
                    "{} was this member's under epoch {}; now {}",
                    assigned.partition,
                    assigned.epoch,
                    other.map_or_else(
                        || "it is not".to_owned(),
                        |lane| format!("it is under epoch {}", lane.epoch)
                    )
                ),
            }),
        }
    }

    /// Gives partitions back that are wanted.
    pub(super) fn give_back(&self, partitions: &[Assigned]) {
        let mut state = self.lock();
        for assigned in partitions {
            let wanted = |lane: &Lane| lane.wanted && lane.epoch == assigned.epoch;
            if state.lanes.get(&assigned.partition).is_some_and(wanted) {
                state.lanes.remove(&assigned.partition);
            }
        }
        // Who has given something back need not hear that it was lost since.
        forget(&mut state.news, |heard| matches!(heard, Heard::Lost(_)), partitions);
        drop(state);
        self.bell.ring();
    }

    pub(super) fn leave(&self) {
        self.lock().leaving = true;
        self.bell.ring();
    }
}

/// Takes partitions out of news that were not heard yet.
fn forget(news: &mut VecDeque<Result<Heard>>, which: impl Fn(&Heard) -> bool, partitions: &[Assigned]) {
    for heard in news.iter_mut().flatten().filter(|heard| which(heard)) {
        if let Heard::Revoked(some) | Heard::Lost(some) = heard {
            some.retain(|assigned| !partitions.contains(assigned));
        }
    }
    news.retain(|heard| !matches!(heard, Ok(Heard::Revoked(some) | Heard::Lost(some)) if some.is_empty()));
}
