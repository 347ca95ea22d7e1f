//! The queue that collects items for the next batch.
//!
//! Each runtime has a queue of its own: a task of the pushing runtime processes what it pushes. Two
//! runtimes that share a guard (a current-thread one per core, or per test) do not wait for each
//! other's tasks, which make progress only while their runtime is driven.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::runtime::{Handle, Id};
use tokio::sync::oneshot;

use crate::error::Result;

/// The maximum number of items in one batch.
pub(super) const BATCH_MAX: usize = 1000;

/// Items that wait for the next batch, by runtime.
pub(crate) struct Queue<I, O>(Mutex<HashMap<Id, Waiting<I, O>>>);

struct Waiting<I, O> {
    items: Vec<I>,
    answers: Vec<oneshot::Sender<Result<O>>>,
    running: usize,
}

impl<I, O> Default for Queue<I, O> {
    fn default() -> Self {
        Queue(Mutex::default())
    }
}

pub(crate) type Batch<I, O> = (Vec<I>, Vec<oneshot::Sender<Result<O>>>);

impl<I, O> Queue<I, O> {
    fn lock(&self) -> MutexGuard<'_, HashMap<Id, Waiting<I, O>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds an item. Returns true if the caller must start a runner for it on this runtime.
    pub(crate) fn push(&self, item: I, answer: oneshot::Sender<Result<O>>, runners_max: usize) -> bool {
        let runtime = Handle::current().id();
        let mut queues = self.lock();
        let empty = || Waiting { items: Vec::new(), answers: Vec::new(), running: 0 };
        let waiting = queues.entry(runtime).or_insert_with(empty);
        waiting.items.push(item);
        waiting.answers.push(answer);
        let start = waiting.running < runners_max;
        waiting.running += usize::from(start);
        start
    }

    /// A runner for the items pushed on this runtime.
    pub(crate) fn runner(&self) -> Runner<'_, I, O> {
        Runner { queue: self, runtime: Handle::current().id(), taken: 0, ended: false }
    }
}

/// Processes a queue. If its task ends early (a panic, or the runtime shuts down), `Drop` frees its
/// place, so that the queue does not wait for it forever.
pub(crate) struct Runner<'q, I, O> {
    queue: &'q Queue<I, O>,
    runtime: Id,
    /// How many items the last batch had.
    taken: usize,
    ended: bool,
}

impl<I, O> Runner<'_, I, O> {
    /// The next batch; `None` ends the runner. If several were just answered, they have their turn
    /// first: they may queue again, and a batch without them would be small. A lone one pays nothing.
    pub(crate) async fn next(&mut self) -> Option<Batch<I, O>> {
        if self.taken > 1 {
            tokio::task::yield_now().await;
        }
        let batch = self.take();
        self.taken = batch.as_ref().map_or(0, |(items, _)| items.len());
        batch
    }

    fn take(&mut self) -> Option<Batch<I, O>> {
        let mut queues = self.queue.lock();
        let waiting = queues.get_mut(&self.runtime)?;
        if waiting.items.is_empty() {
            self.ended = true;
            waiting.running -= 1;
            if waiting.running == 0 {
                queues.remove(&self.runtime);
            }
            return None;
        }
        let rest = waiting.items.len().min(BATCH_MAX);
        let later = (waiting.items.split_off(rest), waiting.answers.split_off(rest));
        Some((
            std::mem::replace(&mut waiting.items, later.0),
            std::mem::replace(&mut waiting.answers, later.1),
        ))
    }
}

impl<I, O> Drop for Runner<'_, I, O> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let mut queues = self.queue.lock();
        let Some(waiting) = queues.get_mut(&self.runtime) else { return };
        waiting.running -= 1;
        if waiting.running == 0 {
            // No runner is left for these items; their callers notice the dropped senders.
            queues.remove(&self.runtime);
        }
    }
}
