//! The window stage: asks the window which deliveries were done before, and tells it which are done.

use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};

use super::task_failed;
use crate::consumer::arrival::Queued;
use crate::consumer::claim::ConsumerContext;
use crate::error::Result;
use crate::ledger::Epoch;
use crate::window::{Sighting, Window};

/// How many deliveries are told to the window at once, at least, unless offsets are committed.
const REMEMBER_MIN: usize = 500;
/// How long an ending consumer waits for its window.
const REMEMBER_TIMEOUT: Duration = Duration::from_secs(2);

/// The window's answer for a batch, and the ledger's epoch if it was queried.
pub(super) struct Answer {
    queued: Vec<Queued>,
    done: HashSet<Sighting>,
    epoch: Option<Epoch>,
}

/// A batch, by the window's answer.
pub(super) struct Answered {
    pub(super) seen: Vec<Queued>,
    pub(super) unseen: Vec<Queued>,
    /// The ledger's epoch, if it was queried.
    pub(super) epoch: Option<Epoch>,
}

/// Asks the window about one batch at a time, so that deliveries stay in order. Runs in a task,
/// because an unavailable window may be slow and the pipeline must not wait.
pub(in crate::consumer) struct WindowStage {
    context: ConsumerContext,
    window: Option<Arc<dyn Window>>,
    /// Batches that the window has yet to be asked about.
    unasked: VecDeque<Vec<Queued>>,
    asking: JoinSet<Answer>,
    /// What is done and the window does not know yet.
    done: Vec<Sighting>,
}

impl WindowStage {
    pub(in crate::consumer) fn new(context: ConsumerContext, window: Option<Arc<dyn Window>>) -> Self {
        WindowStage { context, window, unasked: VecDeque::new(), asking: JoinSet::new(), done: Vec::new() }
    }

    /// Asks about a batch. Returns the batch if there is no window.
    pub(super) fn ask(&mut self, queued: Vec<Queued>) -> Option<Vec<Queued>> {
        if self.window.is_none() {
            return Some(queued);
        }
        self.unasked.push_back(queued);
        self.ask_next();
        None
    }

    fn ask_next(&mut self) {
        if !self.asking.is_empty() {
            return;
        }
        let (Some(window), Some(queued)) = (self.window.clone(), self.unasked.pop_front()) else { return };
        let context = self.context.clone();
        self.asking.spawn(async move {
            let sightings: Vec<_> = queued.iter().filter_map(|queued| context.sighting_of(queued)).collect();
            // A failing window logs that itself. Treat everything as unseen.
            let seen = window.seen(&sightings).await.unwrap_or_default();
            let seen =
                sightings.into_iter().zip(seen).filter_map(|(sighting, seen)| seen.then_some(sighting));
            let mut done: HashSet<_> = seen.collect();
            let mut epoch = None;
            if !done.is_empty() {
                // The ledger may have been replaced since it was last asked, unnoticed. One that
                // does not answer confirms nothing.
                epoch = context.ledger.epoch().await.ok();
                done.retain(|sighting| epoch.is_some() && sighting.epoch == epoch);
            }
            Answer { queued, done, epoch }
        });
    }

    /// The window's next answer, or `None` if it is not being asked.
    pub(super) async fn answer(&mut self) -> Option<std::result::Result<Answer, JoinError>> {
        self.asking.join_next().await
    }

    /// Sorts a batch by the window's answer, and asks about the next.
    pub(super) fn on_answer(&mut self, answer: std::result::Result<Answer, JoinError>) -> Result<Answered> {
        let Answer { queued, done, epoch } = answer.map_err(task_failed)?;
        let is_done = |queued: &Queued| {
            self.context.sighting_of(queued).is_some_and(|sighting| done.contains(&sighting))
        };
        let (seen, unseen): (_, Vec<_>) = queued.into_iter().partition(is_done);
        if crate::crash_point::mutant!("window before done") {
            for queued in &unseen {
                self.on_done(queued);
            }
            self.remember(true);
        }
        self.ask_next();
        Ok(Answered { seen, unseen, epoch })
    }

    /// Notes that a delivery is done.
    pub(super) fn on_done(&mut self, queued: &Queued) {
        if self.window.is_some() {
            self.done.extend(self.context.sighting_of(queued));
        }
    }

    /// Tells the window what is done: if it is much, or if `all` is set.
    pub(super) fn remember(&mut self, all: bool) {
        if self.done.len() >= REMEMBER_MIN || (all && !self.done.is_empty()) {
            let done = std::mem::take(&mut self.done);
            if let Some(window) = self.window.clone() {
                tokio::spawn(async move { window.remember(&done).await });
            }
        }
    }

    /// Forgets what the window has yet to be asked about.
    pub(super) fn clear(&mut self) {
        self.unasked.clear();
    }

    /// Tells the window what is done, before the process ends. Anything it does not learn costs a
    /// claim, no more.
    pub(super) async fn end(&mut self) {
        if let Some(window) = &self.window {
            let _ = tokio::time::timeout(REMEMBER_TIMEOUT, window.remember(&self.done)).await;
        }
    }
}
