//! The way in: match → window → order.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;

use super::{Pipeline, ended_badly};
use crate::bus::{Heard, Partition, Received};
use crate::consumer::arrival::{Arrival, Source};
use crate::consumer::held;
use crate::error::Result;
use crate::ledger::Entry;
use crate::window::Sighting;

impl Pipeline {
    pub(super) async fn hear(&mut self, heard: Result<Heard>) -> Result<()> {
        match heard {
            Ok(heard) => {
                if std::mem::take(&mut self.state.bus_away) {
                    tracing::info!(target: "hapax", "the bus is back");
                }
                match heard {
                    Heard::Records(records) => self.take_in(records),
                    Heard::Given(given) => self.given(given).await?,
                    Heard::Revoked(revoked) => self.revoked(&revoked),
                    Heard::Lost(lost) => self.lost(&lost),
                }
            }
            Err(error) if error.is_retryable() => {
                if !std::mem::replace(&mut self.state.bus_away, true) {
                    tracing::warn!(target: "hapax", error = %error.chain(), "the bus is away");
                }
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }

    pub(super) fn take_in(&mut self, records: Vec<Received>) {
        if self.state.draining.is_some() {
            return;
        }
        let mut arrivals = Vec::with_capacity(records.len());
        for received in records {
            let partition =
                Partition { topic: received.origin.topic.clone(), number: received.origin.partition };
            let Some(hand) = self.hands.get_mut(&partition).filter(|hand| hand.revoked.is_none()) else {
                continue; // of a gift that is over
            };
            if !hand.watermark.receive(received.origin.offset) {
                continue;
            }
            let mut arrival =
                self.desk.arrival(received, Source::Bus(hand.assigned.clone()), hand.cancel.subscribe());
            hand.bytes += arrival.bytes();
            let offset = arrival.received.origin.offset;
            arrival.alone = hand.suspects.iter().any(|(first, last)| (*first..=*last).contains(&offset));
            if self.is_wanted(&arrival) {
                arrivals.push(arrival);
            } else {
                self.pass(&arrival, "unwanted");
            }
        }
        if self.window.is_none() {
            return self.queue(arrivals);
        }
        self.tasks.unasked.push_back(arrivals);
        self.ask_window();
    }

    pub(super) fn queue(&mut self, arrivals: Vec<Arrival>) {
        for arrival in arrivals {
            if !self.is_ours(&arrival) {
                continue;
            }
            self.put_in_order(arrival);
        }
    }

    /// What no handler of the scope wants is passed, unless a strict order has to move past it.
    fn is_wanted(&self, arrival: &Arrival) -> bool {
        let settings = &self.desk.settings;
        let strict = settings.is_strict();
        arrival.event.as_ref().map_or(true, |event| {
            settings.wants.matches(event) || (strict && event.aggregate.is_some() && event.seq.is_some())
        })
    }

    /// Asks the window about one batch at a time, so that deliveries stay in order. In a task: a window that is away may
    /// make its callers wait, and the pipeline must not.
    fn ask_window(&mut self) {
        if !self.tasks.window.is_empty() {
            return;
        }
        let (Some(window), Some(arrivals)) = (self.window.clone(), self.tasks.unasked.pop_front()) else {
            return;
        };
        let desk = self.desk.clone();
        self.tasks.window.spawn(async move {
            let sightings: Vec<_> = arrivals.iter().filter_map(|arrival| desk.sighting_of(arrival)).collect();
            // One that fails has said so itself: then nothing was seen.
            let seen = window.seen(&sightings).await.unwrap_or_default();
            let seen =
                sightings.into_iter().zip(seen).filter_map(|(sighting, seen)| seen.then_some(sighting));
            (arrivals, seen.collect())
        });
    }

    /// Passes what the window knows to be done.
    pub(super) fn answered(
        &mut self,
        answer: std::result::Result<(Vec<Arrival>, HashSet<Sighting>), tokio::task::JoinError>,
    ) -> Result<()> {
        let (arrivals, seen) = answer.map_err(ended_badly)?;
        let mut unseen = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            if self.desk.sighting_of(&arrival).is_some_and(|sighting| seen.contains(&sighting)) {
                self.pass(&arrival, "window");
            } else {
                unseen.push(arrival);
            }
        }
        self.queue(unseen);
        self.ask_window();
        Ok(())
    }

    /// What is due comes from the ledger as if it had just arrived.
    pub(super) fn take_due(
        &mut self,
        looked: std::result::Result<held::Looked, tokio::task::JoinError>,
    ) -> Result<()> {
        self.state.next_look = Instant::now() + self.desk.settings.held_interval;
        let held::Looked { due, copied } = looked.map_err(ended_badly)?;
        let uncopied = copied.is_err();
        if uncopied != std::mem::replace(&mut self.state.uncopied, uncopied) {
            if let Err(error) = copied {
                tracing::warn!(target: "hapax", error = %error.chain(), "dead letters cannot be copied; they stay in the ledger, and it is tried again");
            } else {
                tracing::info!(target: "hapax", "dead letters are copied again");
            }
        }
        let due = match due {
            Ok(due) => due,
            Err(error) => {
                tracing::debug!(target: "hapax", error = %error.chain(), "the ledger was not looked at for what is due");
                return Ok(());
            }
        };
        self.meter.held(due.held);
        let full = due.held >= self.desk.settings.held_max;
        if full != std::mem::replace(&mut self.state.full, full) {
            if full {
                tracing::warn!(target: "hapax", held = due.held, "the scope holds as many events as it may (held_max): partitions pause until some are resolved");
            } else {
                tracing::info!(target: "hapax", held = due.held, "the scope holds fewer events than it may: partitions go on");
            }
        }
        self.queue_due(due.entries);
        Ok(())
    }

    fn queue_due(&mut self, entries: Vec<Entry>) {
        if self.state.draining.is_some() {
            return;
        }
        for entry in entries {
            let Some(received) = held::received(&entry, &self.desk.settings.topics[0]) else { continue };
            if !self.state.held.insert(entry.identity.clone()) {
                continue;
            }
            let source = Source::Held(entry.identity.clone(), entry.week);
            let mut arrival = self.desk.arrival(received, source, self.state.cancel.subscribe());
            if entry.order.is_none() {
                // It was redriven out of order, or never had one.
                arrival.unordered = true;
                arrival.key = None;
            }
            // No marker covers it, so a batch that dies with it would not be counted against it.
            arrival.alone = self.worker.batch_max() > 1;
            self.put_in_order(arrival);
        }
    }

    /// Queues a delivery before those of its key that wait for it.
    fn put_in_order(&mut self, arrival: Arrival) {
        let strict = self.desk.settings.is_strict();
        self.queues.push_before(arrival.key.clone(), arrival, |item, other| item.precedes(other, strict));
    }
}
