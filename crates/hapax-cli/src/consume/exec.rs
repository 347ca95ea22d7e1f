//! Handlers as child processes: assigns requests to children, and cancels those that are no longer
//! needed.
//!
//! A child handles one request at a time, or as many as it announces. A request is sent only when
//! there is capacity for it, and only then does its timeout begin. Until then its event waits for a
//! permit, under a lease that is extended meanwhile. A cancelled request takes up capacity until the
//! child reacts.
//!
//! If a child dies with several requests in flight, any of them may have killed it. None is
//! charged: each becomes a suspect, and runs again in a separate child, the *apart* one, which
//! handles one request at a time. A death there is charged to that event. Only this process
//! remembers suspects; if it dies too, the ledger knows what was running, and the library runs
//! those events one at a time with nothing else in the process.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use async_trait::async_trait;
use hapax::consumer::{Failed, Handled, Permit, Permits};
use hapax::ledger::Identity;
use hapax::sink::{Effect, Sink, protocol};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::child;
use crate::failure::Failure;

/// How long to watch a new child before taking events: a command that does not work usually ends at
/// once.
const START_WATCHED: Duration = Duration::from_millis(200);

/// The children of one command.
pub struct Pool {
    command: String,
    slots: Mutex<Vec<Arc<ChildSlot>>>,
    /// The child for suspects, created on first use.
    apart: tokio::sync::Mutex<Option<Arc<ChildSlot>>>,
    /// Locked while a suspect uses that child.
    alone: Arc<tokio::sync::Mutex<()>>,
    numbers: AtomicI64,
    pub(super) common: Arc<Common>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

/// A child as seen by requests.
pub(super) struct ChildSlot {
    orders: mpsc::UnboundedSender<Order>,
    /// Requests in flight, including cancelled ones without a reaction yet.
    load: AtomicUsize,
    /// How many requests it takes at once; 0 while it does not run.
    takes: AtomicUsize,
    /// Whether it has yet to react to a cancellation.
    pub(super) unwell: AtomicBool,
    /// The pool whose capacity it counts towards; `None` for the child of the suspects.
    capacity: Option<Arc<Common>>,
}

/// How many requests the children take together, and how many places are taken.
#[derive(Default)]
struct Capacity {
    places: usize,
    taken: usize,
    closed: bool,
}

/// A place in a child; dropping it frees the place.
struct Place(Arc<Common>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.capacity(|capacity| capacity.taken -= 1);
    }
}

/// A cancelled request that still takes up capacity.
pub(super) struct CancelledRequest {
    slot: Weak<ChildSlot>,
    _place: Option<Place>,
}

impl Drop for CancelledRequest {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.upgrade() {
            slot.load.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// State shared by all children.
pub(super) struct Common {
    /// How long a child may take to react to a cancellation before it is killed, with everything it
    /// started.
    pub(super) cancel_grace: Duration,
    pub(super) restarts: AtomicU64,
    /// Whether any child has ever replied, which shows that the command works.
    pub(super) replied: AtomicBool,
    capacity: Mutex<Capacity>,
    capacity_changed: Notify,
    suspects: Mutex<HashSet<Identity>>,
    ignored: AtomicU64,
    groups: Mutex<HashSet<u32>>,
    broken: watch::Sender<Option<String>>,
}

/// An instruction to a child.
pub(super) enum Order {
    Run(Request),
    Cancel(String, i64, CancelledRequest),
}

/// One attempt.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) token: i64,
    /// The leased identity; `None` if it runs at most once.
    pub(super) leased: Option<Identity>,
    pub(super) line: String,
    pub(super) reply: oneshot::Sender<Handled>,
}

impl Pool {
    /// Starts the children. Fails if the command ends at once, before anything is consumed.
    pub async fn start(command: &str, children: usize, cancel_grace: Duration) -> Result<Arc<Self>, Failure> {
        if command.trim().is_empty() {
            return Err(Failure::config("--exec is blank; it takes a command"));
        }
        let common = Arc::new(Common {
            cancel_grace,
            restarts: AtomicU64::new(0),
            replied: AtomicBool::new(false),
            capacity: Mutex::default(),
            capacity_changed: Notify::new(),
            suspects: Mutex::default(),
            ignored: AtomicU64::new(0),
            groups: Mutex::default(),
            broken: watch::channel(None).0,
        });
        let mut tasks = JoinSet::new();
        let mut slots = Vec::new();
        for _ in 0..children {
            slots.push(ChildSlot::start(command, &common, &mut tasks, true));
        }
        let pool = Arc::new(Pool {
            command: command.to_owned(),
            apart: tokio::sync::Mutex::default(),
            alone: Arc::default(),
            slots: Mutex::new(slots),
            numbers: AtomicI64::new(0),
            common,
            tasks: tokio::sync::Mutex::new(tasks),
        });
        if let Ok(sentence) = tokio::time::timeout(START_WATCHED, pool.broken()).await {
            pool.close().await;
            return Err(Failure::config(sentence));
        }
        Ok(pool)
    }

    /// Returns an explanation once the command turns out not to work.
    pub async fn broken(&self) -> String {
        let mut broken = self.common.broken.subscribe();
        match broken.wait_for(Option::is_some).await {
            Ok(sentence) => sentence.clone().unwrap_or_default(),
            Err(_) => std::future::pending().await,
        }
    }

    /// How often children were restarted, and how many replies were ignored.
    pub fn counts(&self) -> (u64, u64) {
        (self.common.restarts.load(Ordering::Relaxed), self.common.ignored.load(Ordering::Relaxed))
    }

    /// Lets no more requests begin; those waiting for a permit get none.
    pub fn drain(&self) {
        self.common.capacity(|capacity| capacity.closed = true);
    }

    /// Ends all children and waits for them: closes their input, and kills those that do not end.
    pub async fn close(&self) {
        self.drain();
        self.slots.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.apart.lock().await.take();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
    }

    /// Kills all children and everything they started.
    pub fn kill(&self) {
        for group in self.common.groups.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            child::kill_group(*group);
        }
    }

    /// Takes a place with the least loaded child. One that has yet to react to a cancellation is
    /// chosen last.
    fn slot(&self) -> Result<Option<Arc<ChildSlot>>, Failed> {
        let slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        if slots.is_empty() {
            return Err(ended()); // closed
        }
        let load = |slot: &ChildSlot| slot.load.load(Ordering::Relaxed);
        let free = slots.iter().filter(|slot| load(slot) < slot.takes.load(Ordering::Relaxed));
        let slot = free.min_by_key(|slot| (slot.unwell.load(Ordering::Relaxed), load(slot))).cloned();
        if let Some(slot) = &slot {
            slot.load.fetch_add(1, Ordering::Relaxed);
        }
        Ok(slot)
    }

    /// Sends a request to a shared child. A permit guarantees a place unless a child has just
    /// ended. Then a leased request fails uncounted and is retried, because waiting here would use
    /// up its time; an at-most-once request cannot be retried, so it waits.
    async fn apply_beside_others(&self, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        loop {
            let changed = self.common.capacity_changed.notified();
            if let Some(slot) = self.slot()? {
                return slot.ask(request, replied).await;
            }
            if request.leased.is_some() {
                return Err(Failed::uncounted("the handler is being started again", TURN_PAUSE));
            }
            changed.await;
        }
    }

    /// Runs a suspect alone in its child.
    async fn apply_alone(&self, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        if self.slots.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Err(ended()); // closed
        }
        let slot = {
            let mut apart = self.apart.lock().await;
            if let Some(slot) = &*apart {
                Arc::clone(slot)
            } else {
                let slot =
                    ChildSlot::start(&self.command, &self.common, &mut *self.tasks.lock().await, false);
                Arc::clone(apart.insert(slot))
            }
        };
        if slot.takes.load(Ordering::Relaxed) == 0 || slot.load.load(Ordering::Relaxed) > 0 {
            return Err(Failed::uncounted("the handler is being started again", TURN_PAUSE));
        }
        slot.load.fetch_add(1, Ordering::Relaxed);
        slot.ask(request, replied).await
    }
}

/// The pause before a request that found no free child is retried.
const TURN_PAUSE: Duration = Duration::from_millis(50);

fn ended() -> Failed {
    Failed::retryable("the handler was ended before it answered")
}

impl ChildSlot {
    fn start(command: &str, common: &Arc<Common>, tasks: &mut JoinSet<()>, shared: bool) -> Arc<Self> {
        let (orders, taken) = mpsc::unbounded_channel();
        let slot = Arc::new(ChildSlot {
            orders,
            load: AtomicUsize::new(0),
            takes: AtomicUsize::new(0),
            unwell: AtomicBool::new(false),
            capacity: shared.then(|| Arc::clone(common)),
        });
        slot.takes(1); // its child starts right away
        let supervised =
            child::supervise(command.to_owned(), taken, Arc::downgrade(&slot), Arc::clone(common));
        tasks.spawn(supervised);
        slot
    }

    /// Sets how many requests it takes at once.
    pub(super) fn takes(&self, now: usize) {
        let before = self.takes.swap(now, Ordering::Relaxed);
        if let Some(common) = &self.capacity {
            common.capacity(|capacity| capacity.places = capacity.places + now - before);
        }
    }

    /// Whether it is one of the shared children. The other one gets one request at a time, whatever
    /// it announces.
    pub(super) fn is_shared(&self) -> bool {
        self.capacity.is_some()
    }

    /// Sends a request that has a place.
    async fn ask(self: Arc<Self>, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        let mut cancel_on_drop =
            CancelOnDrop { slot: self, id: request.id.clone(), token: request.token, answered: false };
        cancel_on_drop.slot.orders.send(Order::Run(request)).map_err(|_| ended())?;
        let handled = replied.await;
        cancel_on_drop.answered = true;
        handled.unwrap_or_else(|_| Err(ended()))
    }
}

#[async_trait]
impl Sink for Pool {
    async fn apply(&self, effect: Effect) -> Handled {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let (id, token) = (effect.event.id.as_str().into_owned(), protocol::token(&effect, number));
        let mut line = protocol::request(&effect, number).to_string();
        line.push('\n');
        let leased = effect.lease.map(|(identity, _)| identity);
        let suspect = leased.as_ref().is_some_and(|leased| self.common.is_suspect(leased));
        let (reply, replied) = oneshot::channel();
        let request = Request { id, token, leased, line, reply };
        if suspect {
            return self.apply_alone(request, replied).await;
        }
        self.apply_beside_others(request, replied).await
    }
}

#[async_trait]
impl Permits for Pool {
    async fn permit(&self, leased: Option<&Identity>) -> Option<Permit> {
        if leased.is_some_and(|leased| self.common.is_suspect(leased)) {
            return tokio::select! {
                alone = Arc::clone(&self.alone).lock_owned() => Some(Box::new(alone)),
                () = self.common.closed() => None,
            };
        }
        loop {
            let changed = self.common.capacity_changed.notified();
            let taken = self.common.capacity(|capacity| {
                if capacity.closed {
                    return None;
                }
                let free = capacity.taken < capacity.places;
                capacity.taken += usize::from(free);
                Some(free)
            })?;
            if taken {
                return Some(Box::new(Place(Arc::clone(&self.common))));
            }
            changed.await;
        }
    }
}

/// Cancels the request in the child when dropped without an answer (a timeout, a lost lease, a
/// stop).
struct CancelOnDrop {
    slot: Arc<ChildSlot>,
    id: String,
    token: i64,
    answered: bool,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if self.answered {
            self.slot.load.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        // The permit ends here, but the request takes up capacity until the child reacts.
        let place = self.slot.capacity.as_ref().map(|common| {
            common.capacity(|capacity| capacity.taken += 1);
            Place(Arc::clone(common))
        });
        let cancelled = CancelledRequest { slot: Arc::downgrade(&self.slot), _place: place };
        // A child that is gone has nothing to cancel.
        let _ = self.slot.orders.send(Order::Cancel(std::mem::take(&mut self.id), self.token, cancelled));
    }
}

/// Beyond this many, all suspects are forgotten, and may kill a shared child once more.
const SUSPECTS_MAX: usize = 10_000;

impl Common {
    /// Reads or changes the capacity, and wakes waiting requests if there is more of it.
    fn capacity<T>(&self, change: impl FnOnce(&mut Capacity) -> T) -> T {
        let mut capacity = self.capacity.lock().unwrap_or_else(PoisonError::into_inner);
        let before = (capacity.places, capacity.taken, capacity.closed);
        let result = change(&mut capacity);
        if capacity.taken < before.1 || capacity.places > before.0 || capacity.closed != before.2 {
            self.capacity_changed.notify_waiters();
        }
        result
    }

    /// Returns once no more requests begin.
    async fn closed(&self) {
        loop {
            let changed = self.capacity_changed.notified();
            if self.capacity(|capacity| capacity.closed) {
                return;
            }
            changed.await;
        }
    }

    /// Notes a request that was in flight when a child died.
    pub(super) fn suspect(&self, leased: Identity) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        if suspects.len() >= SUSPECTS_MAX {
            suspects.clear();
        }
        suspects.insert(leased);
    }

    /// Clears a suspect that was answered.
    pub(super) fn clear_suspect(&self, leased: &Identity) {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).remove(leased);
    }

    fn is_suspect(&self, leased: &Identity) -> bool {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).contains(leased)
    }

    /// Reports that the command does not work.
    pub(super) fn give_up(&self, sentence: String) {
        self.broken.send_replace(Some(sentence));
    }

    /// Ignores a line that is not a reply or that no request waits for: reported once, always
    /// counted.
    pub(super) fn ignore(&self, reason: &str) {
        if self.ignored.fetch_add(1, Ordering::Relaxed) == 0 {
            eprintln!(
                "hapax: a line from the handler was ignored: {reason}; more such lines are only counted"
            );
        }
    }

    pub(super) fn began(&self, group: u32) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(group);
    }

    pub(super) fn ended(&self, group: u32) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).remove(&group);
    }
}
