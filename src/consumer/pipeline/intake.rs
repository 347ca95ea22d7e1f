//! Intake: match → window → order.

use std::ops::Range;
use std::time::Duration;

use tokio::task::JoinError;

use super::Pipeline;
use super::partitions::suspect;
use super::window::{self, Answered};
use crate::bus::{BusEvent, Partition, Pulse, Received};
use crate::consumer::Passed;
use crate::consumer::arrival::{Arrival, Queued, Source};
use crate::consumer::held::DueAnswer;
use crate::error::{Error, Result};
use crate::ledger::{Layer, SkipReason};

impl Pipeline {
    pub(super) async fn on_bus_event(&mut self, event: Result<BusEvent>) -> Result<()> {
        match event {
            Ok(event) => {
                if std::mem::take(&mut self.state.bus_away) {
                    tracing::info!(target: "hapax", "the bus is back");
                }
                match event {
                    BusEvent::Records(records) => self.receive(records)?,
                    BusEvent::Assigned(assigned) => self.on_assigned(assigned),
                    BusEvent::Revoked(revoked) => self.on_revoked(&revoked).await?,
                    BusEvent::Lost(lost) => self.on_lost(&lost),
                    BusEvent::Removed { partition, offsets } => self.on_removed(&partition, &offsets),
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

    /// Counts records that retention removed before the group read them. No member will ever see
    /// these.
    fn on_removed(&mut self, partition: &Partition, offsets: &Range<i64>) {
        let count = offsets.end.saturating_sub(offsets.start).unsigned_abs();
        tracing::warn!(
            target: "hapax", %partition, from = offsets.start, to = offsets.end, count,
            "retention removed records before they were read; going on with the oldest that is left"
        );
        self.meter.removed(count);
    }

    pub(super) fn receive(&mut self, records: Vec<Received>) -> Result<()> {
        if self.state.draining.is_some() {
            return Ok(());
        }
        let mut arrivals = Vec::with_capacity(records.len());
        for received in records {
            let partition =
                Partition { topic: received.origin.topic.clone(), number: received.origin.partition };
            let Some(own) = self.partitions.get_mut(&partition) else {
                continue; // of an assignment that is over
            };
            if !own.commit_point.receive(received.origin.offset) {
                // The offset may now hold another record than the one handled, so do not skip it.
                return Err(Error::Corrupt(format!(
                    "the bus delivered offset {} of {partition} again under one assignment",
                    received.origin.offset
                )));
            }
            if received.unreadable.is_none() && Pulse::is(&received.record) {
                // It is not an event, whatever the order and whoever wants what: finished for the commit
                // point, and counted nowhere.
                self.finish_offset(&partition, received.origin.offset);
                continue;
            }
            let source = Source::Bus(own.assigned.clone());
            let queued = self.context.decode(received, source, own.cancel.subscribe(), self.ledger.epoch());
            own.bytes += queued.bytes();
            if self.is_wanted(&queued) {
                arrivals.push(queued);
            } else {
                self.pass(&queued, Passed::Unwanted);
            }
        }
        if let Some(arrivals) = self.window.ask(arrivals) {
            self.queue(arrivals);
        }
        Ok(())
    }

    pub(super) fn queue(&mut self, arrivals: Vec<Queued>) {
        self.held.note_activity();
        for mut queued in arrivals {
            if !self.is_ours(&queued) {
                continue;
            }
            suspect(&self.partitions, &mut queued);
            self.put_in_order(queued);
        }
    }

    /// Whether a delivery must go through the pipeline: a handler wants it, or a strict order has
    /// to step past it.
    fn is_wanted(&self, queued: &Queued) -> bool {
        let settings = &self.context.settings;
        let strict = settings.is_strict();
        queued.arrival().is_none_or(|Arrival { event, .. }| {
            settings.wants.matches(event) || (strict && event.aggregate.is_some() && event.seq.is_some())
        })
    }

    /// Passes what the window knows to be done.
    pub(super) fn on_window_answer(
        &mut self,
        answer: std::result::Result<window::Answer, JoinError>,
    ) -> Result<()> {
        let Answered { seen, unseen, epoch } = self.window.on_answer(answer)?;
        self.ledger.on_epoch(epoch);
        for queued in seen {
            if let Some(arrival) = queued.arrival() {
                self.context.note_skip(arrival, SkipReason::Window, Some(Layer::Window));
            }
            self.pass(&queued, Passed::Window);
        }
        self.queue(unseen);
        Ok(())
    }

    /// Queues due events from the ledger as if they had just arrived.
    pub(super) fn on_due(&mut self, answer: DueAnswer) -> Result<()> {
        let due = self.held.on_due(answer, self.ledger.epoch())?;
        if self.state.draining.is_some() {
            return Ok(());
        }
        if let Some(arrivals) = due {
            for arrival in arrivals {
                self.put_in_order(arrival);
            }
            let in_memory = self.held.len() + self.tasks.in_flight + self.queues.len();
            self.meter.at_rest(self.held.is_idle() && in_memory == 0);
        }
        Ok(())
    }

    /// Queues a delivery before those of its key that wait for it.
    fn put_in_order(&mut self, queued: Queued) {
        let strict = self.context.settings.is_strict();
        let key = queued.key.clone();
        if queued.may_precede(strict) {
            self.queues.push_before(key, queued, |item, other| item.precedes(other, strict));
        } else {
            self.queues.push(key, queued);
        }
    }
}
