//! Handlers as children: who gets which request, and what becomes of requests nobody waits for any more.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use hapax::consumer::{Failed, Handled};
use hapax::sink::{Effect, Sink, protocol};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;

use super::child;
use crate::failure::Failure;

/// A command that does not work mostly ends at once; so long is it watched before events are taken.
const START_WATCHED: Duration = Duration::from_millis(200);

/// Several children of one command.
pub struct Pool {
    seats: Mutex<Vec<Arc<Seat>>>,
    numbers: AtomicI64,
    pub(super) common: Arc<Common>,
    tasks: tokio::sync::Mutex<JoinSet<()>>,
}

/// A child, as requests see it.
pub(super) struct Seat {
    orders: mpsc::UnboundedSender<Order>,
    load: AtomicUsize,
    /// It was told to cancel something and has not reacted yet.
    pub(super) unwell: AtomicBool,
}

/// What children share.
pub(super) struct Common {
    /// A child that does not react to a cancel for so long is killed, with whatever it started.
    pub(super) cancel_grace: Duration,
    pub(super) restarts: AtomicU64,
    ignored: AtomicU64,
    groups: Mutex<HashSet<u32>>,
    broken: watch::Sender<Option<String>>,
}

/// What a child is to do.
pub(super) enum Order {
    Run(Request),
    Cancel(String, i64),
}

/// One attempt.
pub(super) struct Request {
    pub(super) id: String,
    pub(super) token: i64,
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
            ignored: AtomicU64::new(0),
            groups: Mutex::default(),
            broken: watch::channel(None).0,
        });
        let mut tasks = JoinSet::new();
        let mut seats = Vec::new();
        for _ in 0..children {
            let (orders, taken) = mpsc::unbounded_channel();
            let seat = Arc::new(Seat { orders, load: AtomicUsize::new(0), unwell: AtomicBool::new(false) });
            tasks.spawn(child::supervise(
                command.to_owned(),
                taken,
                Arc::downgrade(&seat),
                Arc::clone(&common),
            ));
            seats.push(seat);
        }
        let pool = Arc::new(Pool {
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

    /// Ends all children and waits for them: their input ends, and what does not follow is killed.
    pub async fn close(&self) {
        self.seats.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let mut tasks = self.tasks.lock().await;
        while tasks.join_next().await.is_some() {}
    }

    /// Kills all children and whatever they started.
    pub fn kill(&self) {
        for group in self.common.groups.lock().unwrap_or_else(PoisonError::into_inner).iter() {
            child::kill_group(*group);
        }
    }

    /// The child with the least to do; one that does not react gets nothing while there are others.
    fn seat(&self) -> Option<Arc<Seat>> {
        let seats = self.seats.lock().unwrap_or_else(PoisonError::into_inner);
        let rank =
            |seat: &&Arc<Seat>| (seat.unwell.load(Ordering::Relaxed), seat.load.load(Ordering::Relaxed));
        seats.iter().min_by_key(rank).cloned()
    }
}

#[async_trait]
impl Sink for Pool {
    async fn apply(&self, effect: Effect) -> Handled {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed) + 1;
        let (id, token) = (effect.event.id.as_str().into_owned(), protocol::token(&effect, number));
        let mut line = protocol::request(&effect, number).to_string();
        line.push('\n');
        drop(effect);
        let ended = || Failed::retryable("the handler was ended before it answered");
        let seat = self.seat().ok_or_else(ended)?;
        let (reply, replied) = oneshot::channel();
        seat.load.fetch_add(1, Ordering::Relaxed);
        let mut ticket = Ticket { seat, id: id.clone(), token, answered: false };
        let request = Request { id, token, line, reply };
        ticket.seat.orders.send(Order::Run(request)).map_err(|_| ended())?;
        let handled = replied.await;
        ticket.answered = true;
        handled.unwrap_or_else(|_| Err(ended()))
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
        self.seat.load.fetch_sub(1, Ordering::Relaxed);
        if !self.answered {
            // A child that is gone has nothing to cancel.
            let _ = self.seat.orders.send(Order::Cancel(std::mem::take(&mut self.id), self.token));
        }
    }
}

impl Common {
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
