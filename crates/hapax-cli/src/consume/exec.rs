//! Handlers as children: who gets which request, and what becomes of requests nobody waits for any more.
//!
//! A child has one request at a time, or as many as it says it takes. A request is sent when there is room for it, and only
//! then does its time begin: what waits here waits for a permit, under a lease that is extended meanwhile. What was cancelled
//! takes up room until the child has reacted.
//!
//! A child that dies takes all it had in hand with it, and one of them may have killed it. None of them is charged for that: each is
//! suspect, and runs again in a child of its own kind, the *apart* one, which has one request at a time. A death there is that
//! event's own. What is suspect is remembered by this process alone: if that dies too, the ledger knows what was running, and the
//! library runs it again with nothing beside it in the whole process.

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

/// A command that does not work mostly ends at once; so long is it watched before events are taken.
const START_WATCHED: Duration = Duration::from_millis(200);

/// Several children of one command.
pub struct Pool {
    command: String,
    seats: Mutex<Vec<Arc<Seat>>>,
    /// The child for suspects, once there was one.
    apart: tokio::sync::Mutex<Option<Arc<Seat>>>,
    /// Whoever has the lock has that child to himself.
    alone: Arc<tokio::sync::Mutex<()>>,
    numbers: AtomicI64,
    pub(super) common: Arc<Common>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

/// A child, as requests see it.
pub(super) struct Seat {
    orders: mpsc::UnboundedSender<Order>,
    /// What it has in hand, what was cancelled and not reacted to among it.
    load: AtomicUsize,
    /// How many requests it takes at once; 0 while it does not run.
    takes: AtomicUsize,
    /// It was told to cancel something and has not reacted yet.
    pub(super) unwell: AtomicBool,
    /// Whose room it is part of; none: it is the one for suspects.
    room: Option<Arc<Common>>,
}

/// How much the children take together, and how much of that is taken.
#[derive(Default)]
struct Room {
    places: usize,
    taken: usize,
    closed: bool,
}

/// A place in a child's hands; dropped, it is free.
struct Place(Arc<Common>);

impl Drop for Place {
    fn drop(&mut self) {
        self.0.room(|room| room.taken -= 1);
    }
}

/// What was cancelled and still takes up room.
pub(super) struct Lingering {
    seat: Weak<Seat>,
    _place: Option<Place>,
}

impl Drop for Lingering {
    fn drop(&mut self) {
        if let Some(seat) = self.seat.upgrade() {
            seat.load.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// What children share.
pub(super) struct Common {
    /// A child that does not react to a cancel for so long is killed, with whatever it started.
    pub(super) cancel_grace: Duration,
    pub(super) restarts: AtomicU64,
    /// Whether any child has ever replied: then the command works.
    pub(super) replied: AtomicBool,
    room: Mutex<Room>,
    room_changed: Notify,
    suspects: Mutex<HashSet<Identity>>,
    ignored: AtomicU64,
    groups: Mutex<HashSet<u32>>,
    broken: watch::Sender<Option<String>>,
}

/// What a child is to do.
pub(super) enum Order {
    Run(Request),
    Cancel(String, i64, Lingering),
}

/// One attempt.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) token: i64,
    /// What it is leased as; none if it is run at most once.
    pub(super) leased: Option<Identity>,
    pub(super) line: String,
    pub(super) reply: oneshot::Sender<Handled>,
}

impl Pool {
    /// Starts the children. A command that ends at once is an error before anything was consumed.
    pub async fn start(command: &str, children: usize, cancel_grace: Duration) -> Result<Arc<Self>, Failure> {
        if command.trim().is_empty() {
            return Err(Failure::config("--exec is blank; it takes a command"));
        }
        let common = Arc::new(Common {
            cancel_grace,
            restarts: AtomicU64::new(0),
            replied: AtomicBool::new(false),
            room: Mutex::default(),
            room_changed: Notify::new(),
            suspects: Mutex::default(),
            ignored: AtomicU64::new(0),
            groups: Mutex::default(),
            broken: watch::channel(None).0,
        });
        let mut tasks = JoinSet::new();
        let mut seats = Vec::new();
        for _ in 0..children {
            seats.push(Seat::start(command, &common, &mut tasks, true));
        }
        let pool = Arc::new(Pool {
            command: command.to_owned(),
            apart: tokio::sync::Mutex::default(),
            alone: Arc::default(),
            seats: Mutex::new(seats),
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

    /// Ends when the command turns out not to work, with a sentence.
    pub async fn broken(&self) -> String {
        let mut broken = self.common.broken.subscribe();
        match broken.wait_for(Option::is_some).await {
            Ok(sentence) => sentence.clone().unwrap_or_default(),
            Err(_) => std::future::pending().await,
        }
    }

    /// How often children were started again, and how many replies were ignored.
    pub fn counts(&self) -> (u64, u64) {
        (self.common.restarts.load(Ordering::Relaxed), self.common.ignored.load(Ordering::Relaxed))
    }

    /// From now on no request begins: what waits for room is given back.
    pub fn drain(&self) {
        self.common.room(|room| room.closed = true);
    }

    /// Ends all children and waits for them: their input ends, and what does not follow is killed.
    pub async fn close(&self) {
        self.drain();
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.apart.lock().await.take();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
    }

    /// Kills all children and whatever they started.
    pub fn kill(&self) {
        for group in self.common.groups.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            child::kill_group(*group);
        }
    }

    /// A place with the child that has the least to do; one that does not react gets nothing while there are others.
    fn seat(&self) -> Result<Option<Arc<Seat>>, Failed> {
        let seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        if seats.is_empty() {
            return Err(ended()); // closed
        }
        let load = |seat: &Seat| seat.load.load(Ordering::Relaxed);
        let free = seats.iter().filter(|seat| load(seat) < seat.takes.load(Ordering::Relaxed));
        let seat = free.min_by_key(|seat| (seat.unwell.load(Ordering::Relaxed), load(seat))).cloned();
        if let Some(seat) = &seat {
            seat.load.fetch_add(1, Ordering::Relaxed);
        }
        Ok(seat)
    }

    /// Whoever has a permit finds a place, unless a child ended just now. Then a leased run comes again, as waiting here would
    /// use up its time; what is run at most once cannot, and waits.
    async fn apply_beside_others(&self, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        loop {
            let changed = self.common.room_changed.notified();
            if let Some(seat) = self.seat()? {
                return seat.ask(request, replied).await;
            }
            if request.leased.is_some() {
                return Err(Failed::uncounted("the handler is being started again", TURN_PAUSE));
            }
            changed.await;
        }
    }

    /// Runs a suspect with nothing beside it.
    async fn apply_alone(&self, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        if self.seats.lock().unwrap_or_else(PoisonError::into_inner).is_empty() {
            return Err(ended()); // closed
        }
        let seat = {
            let mut apart = self.apart.lock().await;
            if let Some(seat) = &*apart {
                Arc::clone(seat)
            } else {
                let seat = Seat::start(&self.command, &self.common, &mut *self.tasks.lock().await, false);
                Arc::clone(apart.insert(seat))
            }
        };
        if seat.takes.load(Ordering::Relaxed) == 0 || seat.load.load(Ordering::Relaxed) > 0 {
            return Err(Failed::uncounted("the handler is being started again", TURN_PAUSE));
        }
        seat.load.fetch_add(1, Ordering::Relaxed);
        seat.ask(request, replied).await
    }
}

/// Between two questions whether it is one's turn to run alone.
const TURN_PAUSE: Duration = Duration::from_millis(50);

fn ended() -> Failed {
    Failed::retryable("the handler was ended before it answered")
}

impl Seat {
    fn start(command: &str, common: &Arc<Common>, tasks: &mut JoinSet<()>, shared: bool) -> Arc<Self> {
        let (orders, taken) = mpsc::unbounded_channel();
        let seat = Arc::new(Seat {
            orders,
            load: AtomicUsize::new(0),
            takes: AtomicUsize::new(0),
            unwell: AtomicBool::new(false),
            room: shared.then(|| Arc::clone(common)),
        });
        seat.takes(1); // its child is started right away
        let supervised =
            child::supervise(command.to_owned(), taken, Arc::downgrade(&seat), Arc::clone(common));
        tasks.spawn(supervised);
        seat
    }

    /// It takes so many requests at once from now on.
    pub(super) fn takes(&self, now: usize) {
        let before = self.takes.swap(now, Ordering::Relaxed);
        if let Some(common) = &self.room {
            common.room(|room| room.places = room.places + now - before);
        }
    }

    /// Whether it shares the work; one that does not has one request at a time, whatever it takes.
    pub(super) fn is_shared(&self) -> bool {
        self.room.is_some()
    }

    /// Sends a request for which there is a place.
    async fn ask(self: Arc<Self>, request: Request, replied: oneshot::Receiver<Handled>) -> Handled {
        let mut ticket = Ticket { seat: self, id: request.id.clone(), token: request.token, answered: false };
        ticket.seat.orders.send(Order::Run(request)).map_err(|_| ended())?;
        let handled = replied.await;
        ticket.answered = true;
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
            let changed = self.common.room_changed.notified();
            let taken = self.common.room(|room| {
                if room.closed {
                    return None;
                }
                let free = room.taken < room.places;
                room.taken += usize::from(free);
                Some(free)
            })?;
            if taken {
                return Some(Box::new(Place(Arc::clone(&self.common))));
            }
            changed.await;
        }
    }
}

/// Dropped without an answer (a timeout, a lost lease, a stop), it tells the child.
struct Ticket {
    seat: Arc<Seat>,
    id: String,
    token: i64,
    answered: bool,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.answered {
            self.seat.load.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        // The permit ends with this; what the child still has in hand takes up room until it has reacted.
        let place = self.seat.room.as_ref().map(|common| {
            common.room(|room| room.taken += 1);
            Place(Arc::clone(common))
        });
        let lingering = Lingering { seat: Arc::downgrade(&self.seat), _place: place };
        // A child that is gone has nothing to cancel.
        let _ = self.seat.orders.send(Order::Cancel(std::mem::take(&mut self.id), self.token, lingering));
    }
}

/// More suspects than this are forgotten, and may take others with them once more.
const SUSPECTS_MAX: usize = 10_000;

impl Common {
    /// Looks at the room or changes it; whoever waits for some looks again.
    fn room<T>(&self, change: impl FnOnce(&mut Room) -> T) -> T {
        let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
        let before = (room.places, room.taken, room.closed);
        let told = change(&mut room);
        if room.taken < before.1 || room.places > before.0 || room.closed != before.2 {
            self.room_changed.notify_waiters();
        }
        told
    }

    /// Ends when no request begins any more.
    async fn closed(&self) {
        loop {
            let changed = self.room_changed.notified();
            if self.room(|room| room.closed) {
                return;
            }
            changed.await;
        }
    }

    /// It was in hand when a child died.
    pub(super) fn suspect(&self, leased: Identity) {
        let mut suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner);
        if suspects.len() >= SUSPECTS_MAX {
            suspects.clear();
        }
        suspects.insert(leased);
    }

    /// It was answered.
    pub(super) fn acquit(&self, leased: &Identity) {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).remove(leased);
    }

    fn is_suspect(&self, leased: &Identity) -> bool {
        self.suspects.lock().unwrap_or_else(PoisonError::into_inner).contains(leased)
    }

    /// The command does not work.
    pub(super) fn give_up(&self, sentence: String) {
        self.broken.send_replace(Some(sentence));
    }

    /// A reply that nobody waits for, or that is none: told once, counted always.
    pub(super) fn ignore(&self, why: &str) {
        if self.ignored.fetch_add(1, Ordering::Relaxed) == 0 {
            eprintln!("hapax: a line from the handler was ignored: {why}; more such lines are only counted");
        }
    }

    pub(super) fn began(&self, group: u32) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).insert(group);
    }

    pub(super) fn ended(&self, group: u32) {
        self.groups.lock().unwrap_or_else(PoisonError::into_inner).remove(&group);
    }
}
