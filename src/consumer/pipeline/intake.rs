//! Intake: match → window → order.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::partitions::suspect;
use super::{Pipeline, Seen, ended_badly};
use crate::bus::{BusEvent, Partition, Received};
use crate::consumer::Passed;
use crate::consumer::arrival::{Arrival, Source};
use crate::consumer::held;
use crate::error::{Error, Result};
use crate::ledger::{Due, Entry, Identity, Share, State};

/// How long to skip a dead letter that the bus refuses before trying again.
const PASSED_OVER_FOR: Duration = Duration::from_mins(1);

impl Pipeline {
    pub(super) async fn on_bus_event(&mut self, event: Result<BusEvent>) -> Result<()> {
        match event {
            Ok(event) => {
                if std::mem::take(&mut self.state.bus_away) {
                    tracing::info!(target: "hapax", "the bus is back");
                }
                match event {
                    BusEvent::Records(records) => self.receive(records)?,
                    BusEvent::Assigned(given) => self.on_assigned(given),
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
        *self.state.counts.entry(Passed::Removed).or_default() += count;
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
            let mut arrival =
                self.context.arrival(received, Source::Bus(own.assigned.clone()), own.cancel.subscribe());
            arrival.epoch = self.state.epoch;
            own.bytes += arrival.bytes();
            if self.is_wanted(&arrival) {
                arrivals.push(arrival);
            } else {
                self.pass(&arrival, Passed::Unwanted);
            }
        }
        if self.window.is_none() {
            self.queue(arrivals);
        } else {
            self.tasks.unasked.push_back(arrivals);
            self.ask_window();
        }
        Ok(())
    }

    pub(super) fn queue(&mut self, arrivals: Vec<Arrival>) {
        self.note_activity();
        for mut arrival in arrivals {
            if !self.is_ours(&arrival) {
                continue;
            }
            suspect(&self.partitions, &mut arrival);
            self.put_in_order(arrival);
        }
    }

    /// Whether a delivery must go through the pipeline: a handler wants it, or a strict order has
    /// to step past it.
    fn is_wanted(&self, arrival: &Arrival) -> bool {
        let settings = &self.context.settings;
        let strict = settings.is_strict();
        arrival.event.as_ref().map_or(true, |event| {
            settings.wants.matches(event) || (strict && event.aggregate.is_some() && event.seq.is_some())
        })
    }

    /// Asks the window about one batch at a time, so that deliveries stay in order. Runs in a task,
    /// because an unavailable window may be slow and the pipeline must not wait.
    fn ask_window(&mut self) {
        if !self.tasks.window.is_empty() {
            return;
        }
        let (Some(window), Some(arrivals)) = (self.window.clone(), self.tasks.unasked.pop_front()) else {
            return;
        };
        let context = self.context.clone();
        self.tasks.window.spawn(async move {
            let sightings: Vec<_> =
                arrivals.iter().filter_map(|arrival| context.sighting_of(arrival)).collect();
            // A failing window logs that itself. Treat everything as unseen.
            let seen = window.seen(&sightings).await.unwrap_or_default();
            let seen =
                sightings.into_iter().zip(seen).filter_map(|(sighting, seen)| seen.then_some(sighting));
            let mut seen: HashSet<_> = seen.collect();
            let mut epoch = None;
            if !seen.is_empty() {
                // The ledger may have been replaced since it was last asked, unnoticed. One that
                // does not answer confirms nothing.
                epoch = context.ledger.epoch().await.ok();
                seen.retain(|sighting| epoch.is_some() && sighting.epoch == epoch);
            }
            Seen { arrivals, done: seen, epoch }
        });
    }

    /// Passes what the window knows to be done.
    pub(super) fn on_window_answer(
        &mut self,
        answer: std::result::Result<Seen, tokio::task::JoinError>,
    ) -> Result<()> {
        let Seen { arrivals, done, epoch } = answer.map_err(ended_badly)?;
        self.state.epoch = epoch.or(self.state.epoch);
        let mut unseen = Vec::with_capacity(arrivals.len());
        for arrival in arrivals {
            if self.context.sighting_of(&arrival).is_some_and(|sighting| done.contains(&sighting)) {
                self.pass(&arrival, Passed::Window);
            } else {
                unseen.push(arrival);
            }
        }
        self.queue(unseen);
        self.ask_window();
        Ok(())
    }

    /// Periodically looks for due events and for dead letters to copy.
    pub(super) fn look_after_held(&mut self, now: Instant) {
        let settings = &self.context.settings;
        if now >= self.state.next_look && self.tasks.look.is_empty() {
            self.state.next_look = now + settings.held_interval;
            if !self.state.away {
                // Half of the memory budget is for held events, whatever the bus has delivered:
                // those deliveries may be waiting for them.
                let bytes: usize = self.state.held.values().sum();
                let room = (settings.in_flight_max / 2).max(1).saturating_sub(self.state.held.len());
                let room_bytes = (settings.in_flight_bytes_max / 2).saturating_sub(bytes);
                if room > 0 && (room_bytes > 0 || self.state.held.is_empty()) {
                    let share = Share { bytes_max: Some(room_bytes.max(1)), ..self.share() };
                    self.state.active_since_look = false;
                    self.tasks.look.spawn(held::look(
                        self.context.clone(),
                        share,
                        room,
                        self.state.look_from,
                    ));
                }
            }
        }
        if settings.dead_topic.as_deref() != Some("") {
            self.look_after_dead(now);
        }
    }

    /// Starts rounds of copying dead letters.
    fn look_after_dead(&mut self, now: Instant) {
        let is_next = |round: &held::Round| now >= round.at && !round.is_under_way;
        let next = self.state.outlets.iter().filter(|(_, round)| is_next(round));
        for whose in next.map(|(whose, _)| whose.clone()).collect::<Vec<_>>() {
            let mut share = self.share();
            if let Some(topics) = &mut share.topics {
                topics.retain(|topic, _| match &whose {
                    Some(whose) => topic == whose,
                    None => !self.state.outlets.contains_key(&Some(topic.clone())),
                });
            }
            let Some(round) = self.state.outlets.get_mut(&whose) else { continue };
            round.at = now + self.context.settings.held_interval;
            if self.state.away {
                continue;
            }
            round.is_under_way = true;
            let place = round.place;
            if now >= self.state.passed_over_until && !self.state.passed_over.is_empty() {
                self.state.passed_over = Arc::default();
            }
            let passed_over = Arc::clone(&self.state.passed_over);
            self.tasks.outlet.spawn(held::copy_dead(self.context.clone(), share, whose, place, passed_over));
        }
    }

    /// The held events this process is responsible for: those of its partitions.
    fn share(&self) -> Share {
        let settings = &self.context.settings;
        let mut topics: BTreeMap<_, BTreeSet<i32>> =
            settings.topics.iter().map(|topic| (topic.clone(), BTreeSet::new())).collect();
        for own in self.partitions.values() {
            let partition = &own.assigned.partition;
            if let Some(mine) = topics.get_mut(&partition.topic) {
                mine.insert(partition.number);
            }
        }
        Share { topics: Some(topics), grace: settings.held_grace, ..Share::all() }
    }

    /// Logs once that dead letters cannot be copied, and once that they can again.
    pub(super) fn on_dead_published(
        &mut self,
        outlet: std::result::Result<held::Outlet, tokio::task::JoinError>,
    ) -> Result<()> {
        let held::Outlet { whose, next, unwell, copied, refused } = outlet.map_err(ended_badly)?;
        let at = Instant::now() + self.context.settings.held_interval;
        if !refused.is_empty() {
            if self.state.passed_over.is_empty() {
                self.state.passed_over_until = Instant::now() + PASSED_OVER_FOR;
            }
            Arc::make_mut(&mut self.state.passed_over).extend(refused);
        }
        // Everything found for this topic could be copied, and there is no more, so it needs no
        // separate round.
        if whose.is_some() && copied.is_ok() && unwell.is_empty() && next == held::Place::default() {
            self.state.outlets.remove(&whose);
        } else {
            self.state.outlets.insert(whose, held::Round { place: next, ..held::Round::new(at) });
            for topic in unwell {
                self.state.outlets.entry(Some(topic)).or_insert_with(|| held::Round::new(at));
            }
        }
        let uncopied = copied.is_err() || self.state.outlets.len() > 1 || !self.state.passed_over.is_empty();
        if uncopied != std::mem::replace(&mut self.state.uncopied, uncopied) {
            match copied {
                Err(error) => {
                    tracing::warn!(target: "hapax", error = %error.chain(), "dead letters cannot be copied; they stay in the ledger, and it is tried again");
                }
                Ok(()) if uncopied => {
                    tracing::warn!(target: "hapax", "dead letters have no topic to be copied to; they stay in the ledger");
                }
                Ok(()) => tracing::info!(target: "hapax", "dead letters are copied again"),
            }
        }
        Ok(())
    }

    /// Queues due events from the ledger as if they had just arrived.
    pub(super) fn on_due(
        &mut self,
        looked: std::result::Result<Result<(Due, held::Place)>, tokio::task::JoinError>,
    ) -> Result<()> {
        self.state.next_look = Instant::now() + self.context.settings.held_interval;
        let (due, next) = match looked.map_err(ended_badly)? {
            Ok(looked) => looked,
            Err(error) if error.is_retryable() => {
                if self.state.unlooked.failed(&error) {
                    tracing::warn!(target: "hapax", error = %error.chain(), "held events cannot be looked for; it is tried again");
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if self.state.unlooked.succeeded() {
            tracing::info!(target: "hapax", "held events are looked for again");
        }
        self.meter.held(due.held);
        let full = due.held >= self.context.settings.held_max;
        if full != std::mem::replace(&mut self.state.full, full) {
            if full {
                tracing::warn!(target: "hapax", held = due.held, "the scope holds as many events as it may (held_max): partitions pause until some are resolved");
            } else {
                tracing::info!(target: "hapax", held = due.held, "the scope holds fewer events than it may: partitions go on");
            }
        }
        // If some entries were left, continue behind them next time. Otherwise a full page of them
        // would hide all others.
        let some_left = self.queue_due(due.entries);
        let in_memory = self.state.held.len() + self.tasks.in_flight + self.queues.len();
        if next == held::Place::default() {
            self.meter.at_rest(!self.state.active_since_look && in_memory == 0);
        }
        self.state.look_from = if some_left { next } else { held::Place::default() };
        Ok(())
    }

    /// Queues due events. Returns whether some were left because this process does not want them.
    fn queue_due(&mut self, entries: Vec<Entry>) -> bool {
        let mut some_left = false;
        if self.state.draining.is_some() {
            return some_left;
        }
        for entry in entries {
            // A strict order has to step past unwanted events, which may have been parked on the
            // way. Any other held event has run or was redriven, so some process of the scope wants
            // it.
            let steps_past = self.context.settings.is_strict()
                && entry.order.is_some()
                && entry.state == State::Parked
                && entry.attempts == 0;
            if !steps_past && self.state.left.contains(&entry.identity) {
                some_left = true;
                continue;
            }
            let Some(received) = held::received(&entry, &self.context.settings.topics[0]) else { continue };
            if self.state.held.contains_key(&entry.identity) {
                continue;
            }
            let source = Source::Held(entry.identity.clone(), entry.week);
            let mut arrival = self.context.arrival(received, source, self.state.cancel.subscribe());
            if !steps_past
                && arrival.event.as_ref().is_ok_and(|event| !self.context.settings.wants.matches(event))
            {
                self.leave(entry.identity);
                some_left = true;
                continue;
            }
            self.state.held.insert(entry.identity.clone(), arrival.bytes());
            arrival.epoch = self.state.epoch;
            if entry.order.is_none() {
                // It was redriven out of order, or never had an order.
                arrival.unordered = true;
                arrival.key = None;
            }
            self.put_in_order(arrival);
        }
        some_left
    }

    /// Leaves a held event that this process does not want. It stays held. Counts it and logs the
    /// first.
    fn leave(&mut self, identity: Identity) {
        if self.state.left.is_empty() {
            tracing::warn!(target: "hapax", id = %crate::id::Visible(&identity.id.as_str()), "events are held that this process does not want; they stay held for one that does");
        }
        if self.state.left.len() as u64 >= self.context.settings.held_max {
            self.state.left.clear(); // what is forgotten is only logged again
        }
        self.state.left.insert(identity);
        *self.state.counts.entry(Passed::Left).or_default() += 1;
        self.meter.passed(Passed::Left);
    }

    /// Queues a delivery before those of its key that wait for it.
    fn put_in_order(&mut self, arrival: Arrival) {
        let strict = self.context.settings.is_strict();
        self.queues.push_before(arrival.key.clone(), arrival, |item, other| item.precedes(other, strict));
    }
}
