//! The held feed: events that are due return from the ledger to the pipeline.
//!
//! Any member takes what is due: whoever claims an event first has it, and it is not due for the
//! others any more. They ask in random order, so they seldom claim the same one, and if they do, all
//! but one leave it.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::Passed;
use super::arrival::{Queued, Source};
use super::claim::ConsumerContext;
use super::meter::Meter;
use super::pipeline::{Failing, task_failed};
use crate::bus::Received;
use crate::error::Result;
use crate::event::Origin;
use crate::id::Topic;
use crate::ledger::{Due, Entry, Epoch, HeldQuery, Identity, State};

/// The most events that are taken from the ledger and not finished. Few, because another member may
/// claim them first.
const LIMIT: usize = 200;

/// What the ledger says is due.
pub(super) type DueAnswer = std::result::Result<Result<Due>, JoinError>;

/// Takes due events from the ledger.
pub(super) struct HeldFeed {
    context: ConsumerContext,
    meter: Arc<Meter>,
    /// Events that are queued or run, with their sizes, so that the next look does not queue them
    /// again.
    taken: HashMap<Identity, usize>,
    /// Events that this process does not want and leaves to others.
    left: HashSet<Identity>,
    next_look: Instant,
    looking: JoinSet<Result<Due>>,
    failing: Failing,
    /// Whether anything has happened since the last look that may have made an event due.
    active_since_look: bool,
    /// Whether the scope holds as many events as it may.
    is_full: bool,
    /// Set to true to cancel deliveries that came from the ledger.
    cancel: watch::Sender<bool>,
}

impl HeldFeed {
    pub(super) fn new(context: ConsumerContext, meter: Arc<Meter>) -> Self {
        HeldFeed {
            context,
            meter,
            taken: HashMap::new(),
            left: HashSet::new(),
            next_look: Instant::now(),
            looking: JoinSet::new(),
            failing: Failing::default(),
            active_since_look: true,
            is_full: false,
            cancel: watch::channel(false).0,
        }
    }

    pub(super) fn next_wake(&self) -> Instant {
        self.next_look
    }

    /// Looks for due events, if it is time.
    pub(super) fn start(&mut self, now: Instant) {
        if now < self.next_look || !self.looking.is_empty() {
            return;
        }
        let settings = &self.context.settings;
        self.next_look = now + settings.held_interval;
        // Half of the memory budget is for held events, whatever the bus has delivered: those
        // deliveries may be waiting for them.
        let room = (settings.in_flight_max / 2).clamp(1, LIMIT).saturating_sub(self.taken.len());
        let room_bytes = (settings.in_flight_bytes_max / 2).saturating_sub(self.bytes());
        if room == 0 || (room_bytes == 0 && !self.taken.is_empty()) {
            return;
        }
        self.active_since_look = false;
        let topics = Some(settings.topics.iter().cloned().collect());
        let query = HeldQuery { topics, bytes_max: Some(room_bytes.max(1)) };
        let context = self.context.clone();
        self.looking.spawn(async move { context.ledger.due(&context.settings.scope, &query, room).await });
    }

    /// The answer of the current look, or `None` if there is none.
    pub(super) async fn answer(&mut self) -> Option<DueAnswer> {
        self.looking.join_next().await
    }

    /// Returns the due events to queue, oldest first. `None` if nothing is known about them.
    pub(super) fn on_due(&mut self, answer: DueAnswer, epoch: Option<Epoch>) -> Result<Option<Vec<Queued>>> {
        self.next_look = Instant::now() + self.context.settings.held_interval;
        let due = match answer.map_err(task_failed)? {
            Ok(due) => due,
            Err(error) if error.is_retryable() => {
                if self.failing.failed(&error) {
                    tracing::warn!(target: "hapax", error = %error.chain(), "cannot read held events; retrying");
                }
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if self.failing.succeeded() {
            tracing::info!(target: "hapax", "held events can be read again");
        }
        self.note_held(due.held);
        let all = due.entries.len() as u64 >= due.claimable;
        if all {
            let due: HashSet<_> = due.entries.iter().map(|entry| &entry.identity).collect();
            self.left.retain(|left| due.contains(left));
        }
        let mut entries = due.entries;
        entries.sort_by_key(|entry| entry.at);
        let arrivals: Vec<_> = entries.into_iter().filter_map(|entry| self.take(entry, epoch)).collect();
        // If there are more, they may be wanted, unless all are known to be unwanted.
        let known = all || self.left.len() as u64 >= due.claimable;
        Ok((known || !arrivals.is_empty()).then_some(arrivals))
    }

    fn note_held(&mut self, held: u64) {
        self.meter.held(held);
        let full = held >= self.context.settings.held_max;
        if full != std::mem::replace(&mut self.is_full, full) {
            if full {
                tracing::warn!(target: "hapax", held, "held_max reached: partitions pause");
            } else {
                tracing::info!(target: "hapax", held, "below held_max: partitions resume");
            }
        }
    }

    /// Takes a due event, unless it is here already or this process does not want it.
    fn take(&mut self, entry: Entry, epoch: Option<Epoch>) -> Option<Queued> {
        // A strict order has to step past unwanted events, which may have been parked on the way.
        // Any other held event has run or was redriven, so some process of the scope wants it.
        let settings = &self.context.settings;
        let steps_past = settings.is_strict()
            && entry.order.is_some()
            && entry.state == State::Parked
            && entry.attempts == 0;
        if self.taken.contains_key(&entry.identity) || (!steps_past && self.left.contains(&entry.identity)) {
            return None;
        }
        let received = received(&entry, settings.topics.first()?)?;
        let source = Source::Held(entry.identity.clone(), entry.week);
        let mut queued = self.context.decode(received, source, self.cancel.subscribe(), epoch);
        if let Queued::Event(arrival) = &mut queued {
            if !steps_past && !settings.wants.matches(&arrival.event) {
                self.leave(entry.identity);
                return None;
            }
            if entry.order.is_none() {
                // It was redriven out of order, or never had an order.
                arrival.unordered = true;
                arrival.delivered.key = None;
            }
        }
        self.taken.insert(entry.identity, queued.bytes());
        Some(queued)
    }

    /// Leaves a held event that this process does not want. It stays held. Counts it and logs the
    /// first.
    fn leave(&mut self, identity: Identity) {
        if self.left.is_empty() {
            tracing::warn!(target: "hapax", id = %crate::id::Visible(&identity.id.as_str()), "events are held that this process does not want; they stay held for one that does");
        }
        if self.left.len() as u64 >= self.context.settings.held_max {
            self.left.clear(); // what is forgotten is only logged again
        }
        self.left.insert(identity);
        self.meter.passed(Passed::Left);
    }

    /// Notes that a held event is finished here.
    pub(super) fn finished(&mut self, identity: &Identity) {
        self.taken.remove(identity);
    }

    /// Notes that something happened which may have made an event due.
    pub(super) fn note_activity(&mut self) {
        self.active_since_look = true;
        self.meter.at_rest(false);
    }

    /// Whether nothing happened since the last look that may have made an event due.
    pub(super) fn is_idle(&self) -> bool {
        !self.active_since_look
    }

    /// Whether the scope holds as many events as it may, so that partitions pause.
    pub(super) fn is_full(&self) -> bool {
        self.is_full
    }

    /// How many held events are in memory.
    pub(super) fn len(&self) -> usize {
        self.taken.len()
    }

    /// Their size.
    pub(super) fn bytes(&self) -> usize {
        self.taken.values().sum()
    }

    /// Cancels those that run.
    pub(super) fn cancel(&self) {
        self.cancel.send_replace(true);
    }
}

/// The record that a held entry was made from.
fn received(entry: &Entry, fallback: &Topic) -> Option<Received> {
    let record = entry.body.clone()?;
    let origin = entry.origin.clone().unwrap_or_else(|| Origin::new(fallback.clone(), 0, -1));
    Some(Received::new(record, origin))
}
