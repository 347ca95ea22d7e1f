//! A bus in memory, for tests and for use within one process. Nothing survives the process.
//!
//! A member exists until its subscriber is dropped; there is no heartbeat that could fail. Keys are
//! routed as Kafka's Java client does; records without a key go to the partitions in turn.

mod state;

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use tokio::sync::Notify;
use tokio::time::Instant;

use self::state::State;
use super::assignments::Assignments;
use super::{
    Assignment, Bus, BusEvent, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo,
    TopicSettings,
};
use crate::clock::{Clock, SystemClock};
use crate::error::Result;
use crate::event::Origin;
use crate::id::Topic;

/// The most records returned at once.
const RECORDS_MAX: usize = 500;

/// A bus in memory. Clones share everything.
#[derive(Clone)]
pub struct MemoryBus {
    shared: Arc<Shared>,
    /// Whether members that joined through this instance count as silent (tests only).
    silent: Arc<AtomicBool>,
}

struct Shared {
    state: Mutex<State>,
    changed: Notify,
    clock: Arc<dyn Clock>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No change can panic halfway, so a poisoned state is still consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes all waiting members.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let value = change(&mut self.lock());
        self.changed.notify_waiters();
        value
    }
}

impl fmt::Debug for MemoryBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBus").finish_non_exhaustive()
    }
}

impl Default for MemoryBus {
    fn default() -> Self {
        MemoryBus::new()
    }
}

impl MemoryBus {
    /// An empty bus.
    pub fn new() -> Self {
        MemoryBus::with_clock(Arc::new(SystemClock))
    }

    /// An empty bus that uses the caller's clock for timestamps and retention.
    pub fn with_clock(clock: Arc<dyn Clock>) -> Self {
        let shared = Shared { state: Mutex::default(), changed: Notify::new(), clock };
        MemoryBus { shared: Arc::new(shared), silent: Arc::default() }
    }

    /// Expels the member that owns a partition, as if its session had timed out. The member
    /// receives `Lost` next, then joins again. Returns false if no member owns the partition.
    #[cfg(feature = "testing")]
    pub fn expire(&self, group: &str, partition: &Partition) -> bool {
        self.shared.change(|state| state.expire(group, partition))
    }

    /// An instance that shares records and groups, but whose members can be silenced separately.
    #[cfg(feature = "testing")]
    #[must_use]
    pub fn reopened(&self) -> Self {
        MemoryBus { shared: self.shared.clone(), silent: Arc::default() }
    }

    /// Silences the members that joined through this instance: they are expelled from their groups,
    /// and their subscribers receive nothing until this is undone.
    #[cfg(feature = "testing")]
    pub fn silence(&self, silent: bool) {
        self.silent.store(silent, Ordering::SeqCst);
        self.shared.change(|state| {
            if silent {
                state.expire_silent();
            }
        });
    }

    /// Removes a partition's records below an offset, as retention would.
    #[cfg(feature = "testing")]
    pub fn remove_below(&self, partition: &Partition, offset: i64) -> Result<()> {
        self.shared.change(|state| state.remove_below(partition, offset))
    }
}

#[async_trait]
impl Bus for MemoryBus {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let now = self.shared.clock.now();
        self.shared.change(|state| state.publish(topic, None, records, now))
    }

    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let now = self.shared.clock.now();
        let Partition { topic, number } = partition;
        self.shared.change(|state| state.publish(topic, Some(*number), records, now))
    }

    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        self.shared.lock().check(&subscription)?;
        let mut member =
            Member { bus: self.clone(), subscription, number: 0, assignments: Assignments::default() };
        member.join();
        Ok(Box::new(member))
    }

    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.shared.change(|state| state.create_topic(topic, settings))
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        Ok(self.shared.lock().topic(topic))
    }

    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.shared.lock().range(partition)
    }

    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        let state = self.shared.lock();
        state.range(partition)?;
        Ok(state.committed(group, partition))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { bus: "memory", durable: false, shared: false }
    }
}

/// A member of a group.
struct Member {
    bus: MemoryBus,
    subscription: Subscription,
    /// Its number in the group. It gets a new one each time it joins.
    number: u64,
    assignments: Assignments,
}

impl Member {
    fn join(&mut self) {
        let (subscription, silent) = (&self.subscription, &self.bus.silent);
        self.number =
            self.bus.shared.change(|state| state.join(subscription, silent.clone(), Instant::now()));
    }

    /// The next event, or when to look again at the latest.
    fn next_event(&mut self) -> std::result::Result<BusEvent, Option<Instant>> {
        if self.bus.silent.load(Ordering::SeqCst) {
            return Err(None);
        }
        let group = &*self.subscription.group;
        let mut state = self.bus.shared.lock();
        if state.expire_overdue(group, Instant::now()) {
            self.bus.shared.changed.notify_waiters();
        }
        let mine = state.mine(group, self.number);
        if let Some(event) = self.assignments.next_event(mine.as_deref().unwrap_or_default()) {
            return Ok(event);
        }
        if mine.is_none() {
            drop(state);
            self.join();
            return self.next_event();
        }
        let mut records = Vec::new();
        for (assigned, position) in self.assignments.readable() {
            let left = RECORDS_MAX - records.len();
            state.read(&assigned.partition, position, left, &mut records);
        }
        if records.is_empty() { Err(state.overdue_at(group)) } else { Ok(self.assignments.deliver(records)) }
    }
}

#[async_trait]
impl Subscriber for Member {
    async fn next(&mut self) -> Result<BusEvent> {
        loop {
            let shared = self.bus.shared.clone();
            let mut changed = std::pin::pin!(shared.changed.notified());
            changed.as_mut().enable(); // changes from here on are not missed
            match self.next_event() {
                Ok(event) => return Ok(event),
                Err(None) => changed.await,
                Err(Some(at)) => {
                    let _ = tokio::time::timeout_at(at, changed).await; // either way, look again
                }
            }
        }
    }

    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.assignments.pause(partitions, true);
        Ok(())
    }

    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.assignments.pause(partitions, false);
        Ok(())
    }

    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        self.assignments.seek(partition, offset)
    }

    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        let (group, number) = (&*self.subscription.group, self.number);
        let mut state = self.bus.shared.lock();
        Ok(offsets.iter().map(|(assigned, offset)| state.commit(group, number, assigned, *offset)).collect())
    }

    async fn release(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.assignments.release(partitions);
        let (group, number) = (&*self.subscription.group, self.number);
        self.bus.shared.change(|state| state.release(group, number, partitions, Instant::now()));
        Ok(())
    }

    async fn leave(self: Box<Self>) -> Result<()> {
        Ok(()) // dropping it leaves the group
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let (group, number) = (&*self.subscription.group, self.number);
        self.bus.shared.change(|state| state.leave(group, number, Instant::now()));
    }
}
