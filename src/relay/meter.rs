//! Shows what a relay does: progress on request, metrics, and a periodic log line.
//! `docs/telemetry.md` lists them.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::RelaySettings;
use crate::clock::{Clock as _, SystemClock, Time};
use crate::error::Error;
use crate::journal::{Behind, Checkpoint, Position};
use crate::telemetry::RelayMeter;

/// A hole that lasts longer is reported. Most writers commit at once.
const HOLE_REPORTED_AFTER: Duration = Duration::from_secs(10);

/// A relay's counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Progress {
    /// Whether this process holds leadership.
    pub leads: bool,
    /// Whether it asked for leadership, and does not hold it.
    pub follows: bool,
    /// Records acknowledged by the bus.
    pub published: u64,
    /// Events skipped because they were already on the bus.
    pub suppressed: u64,
    /// The position of the saved checkpoint.
    pub position: Position,
    /// Aggregates that are behind, including parked ones.
    pub behind: usize,
    /// Aggregates that are parked until an operator decides.
    pub parked: usize,
    /// Holes in the journal that the relay waited for, each counted once.
    pub holes: u64,
    /// How often the bus accepted no records at all.
    pub outages: u64,
    /// How often this process acquired leadership.
    pub takeovers: u64,
    /// Pulses that every partition has acknowledged.
    pub pulses: u64,
    /// How often the relay read the journal.
    pub looks: u64,
    /// The age of the oldest unpublished event, including aggregates that are behind or parked.
    pub lag: Duration,
}

#[derive(Debug, Default)]
struct State {
    progress: Progress,
    /// When the oldest unpublished event was appended, by the journal's clock.
    oldest: Option<Time>,
    /// The same for aggregates that are behind.
    oldest_behind: Option<Time>,
    /// The position before the current hole, and when the hole was first seen.
    hole: Option<(Position, Time)>,
    /// Whether the hole was reported.
    hole_reported: bool,
    /// How far the journal's clock is ahead of ours, in microseconds.
    ahead: i64,
    /// Whether an outage was reported, so that each one logs two lines.
    away: bool,
    full: bool,
    /// What was reported of pulses, so that each change logs one line.
    pulses: Pulses,
    /// The value of `published` at the last log line.
    logged: u64,
}

/// How pulses fare.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Pulses {
    #[default]
    Fine,
    Failing,
    Impossible,
}

/// Collects the counters of a relay.
#[derive(Debug)]
pub(super) struct Meter {
    name: String,
    state: Mutex<State>,
    metrics: RelayMeter,
}

impl Meter {
    pub(super) fn new(settings: &RelaySettings) -> crate::Result<Self> {
        let metrics = RelayMeter::new(settings.telemetry_prefix.as_deref(), &settings.name)?;
        Ok(Meter { name: settings.name.to_string(), state: Mutex::default(), metrics })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn span_name(&self) -> Option<&str> {
        self.metrics.span_name()
    }

    /// The approximate current time by the journal's clock.
    pub(super) fn now(&self) -> Time {
        Time::from_micros(SystemClock.now().as_micros().saturating_add(self.state().ahead))
    }

    pub(super) fn clock_is(&self, journal: Time) {
        self.state().ahead = journal.as_micros().saturating_sub(SystemClock.now().as_micros());
    }

    pub(super) fn progress(&self) -> Progress {
        let (now, state) = (self.now(), self.state());
        let hole = state.hole.as_ref().map(|(_, since)| *since);
        let oldest = [state.oldest, state.oldest_behind, hole].into_iter().flatten().min();
        let lag = oldest.map_or(Duration::ZERO, |oldest| now.since(oldest));
        Progress { lag, ..state.progress.clone() }
    }

    /// Leadership begins at a checkpoint. Reports the checkpoint's state before any work.
    pub(super) fn leads(&self, checkpoint: &Checkpoint) {
        let position = &checkpoint.position;
        self.saved(checkpoint);
        let mut state = self.state();
        (state.progress.leads, state.progress.follows) = (true, false);
        state.progress.takeovers += 1;
        drop(state);
        self.metrics.leadership("acquired");
        tracing::info!(target: "hapax::relay", relay = %self.name, %position, "leads");
    }

    pub(super) fn leads_no_more(&self, cause: &'static str) {
        let mut state = self.state();
        (state.progress.leads, state.progress.follows) = (false, true);
        (state.oldest, state.oldest_behind, state.hole) = (None, None, None);
        drop(state);
        self.metrics.leadership(cause);
        tracing::info!(target: "hapax::relay", relay = %self.name, cause, "leadership lost");
    }

    /// Another process leads.
    pub(super) fn follows(&self) {
        self.state().progress.follows = true;
    }

    pub(super) fn looked(&self) {
        self.state().progress.looks += 1;
    }

    pub(super) fn oldest(&self, oldest: Option<Time>) {
        self.state().oldest = oldest;
    }

    pub(super) fn published(&self, records: usize, took: Duration) {
        let mut state = self.state();
        state.progress.published += records as u64;
        let back = records > 0 && std::mem::take(&mut state.away);
        drop(state);
        if records > 0 {
            self.metrics.published(records as u64, took);
        }
        if back {
            tracing::info!(target: "hapax::relay", relay = %self.name, "the bus is back");
        }
    }

    pub(super) fn suppressed(&self, events: usize) {
        if events > 0 {
            self.state().progress.suppressed += events as u64;
            self.metrics.suppressed(events as u64);
        }
    }

    /// Events after a hole are unpublished and at least as old as the hole. Repeated looks at a
    /// hole count once.
    pub(super) fn hole(&self, after: &Position) {
        let now = self.now();
        let mut state = self.state();
        let known = state.hole.as_ref().is_some_and(|(known, _)| known == after);
        if !known {
            state.progress.holes += 1;
            state.hole = Some((after.clone(), now));
            state.hole_reported = false;
        }
        let since = state.hole.as_ref().map_or(now, |(_, since)| *since);
        let tells =
            now.since(since) >= HOLE_REPORTED_AFTER && !std::mem::replace(&mut state.hole_reported, true);
        drop(state);
        if tells {
            tracing::warn!(target: "hapax::relay", relay = %self.name, %after, "the relay waits for a writer behind this position whose transaction stays open, prepared ones among them");
        }
        if !known {
            self.metrics.hole();
        }
        self.refresh();
    }

    pub(super) fn no_hole(&self) {
        self.state().hole = None;
    }

    /// The bus accepts nothing. Logs one line per outage.
    pub(super) fn away(&self, reason: &str) {
        let mut state = self.state();
        let first = !std::mem::replace(&mut state.away, true);
        state.progress.outages += u64::from(first);
        drop(state);
        if first {
            self.metrics.outage();
            tracing::warn!(target: "hapax::relay", relay = %self.name, reason, "the bus is away; the relay waits for it");
        }
    }

    /// Every partition has acknowledged a pulse.
    pub(super) fn pulsed(&self) {
        let mut state = self.state();
        state.progress.pulses += 1;
        let back = std::mem::take(&mut state.pulses) == Pulses::Failing;
        drop(state);
        self.metrics.pulse("published");
        if back {
            tracing::info!(target: "hapax::relay", relay = %self.name, "pulses are published again");
        }
    }

    /// A pulse was dropped. Logs one line until one is published.
    pub(super) fn pulse_failed(&self, error: &Error) {
        self.metrics.pulse("failed");
        if std::mem::replace(&mut self.state().pulses, Pulses::Failing) == Pulses::Fine {
            tracing::warn!(target: "hapax::relay", relay = %self.name, error = %error.chain(), "a pulse could not be published; the relay tries another at the next interval");
        }
    }

    /// There can be no pulses. Logs one line, however often this process leads.
    pub(super) fn no_pulses(&self, error: &Error) {
        if std::mem::replace(&mut self.state().pulses, Pulses::Impossible) != Pulses::Impossible {
            tracing::warn!(target: "hapax::relay", relay = %self.name, error = %error.chain(), "the relay publishes no pulses");
        }
    }

    /// The relay makes progress again.
    pub(super) fn flows(&self) {
        self.state().full = false;
    }

    /// No more aggregates may be behind. Logs a line each time this begins.
    pub(super) fn full(&self, max: usize) {
        if !std::mem::replace(&mut self.state().full, true) {
            tracing::error!(target: "hapax::relay", relay = %self.name, max, "as many aggregates are behind as may be (behind_max); the relay pauses until one has caught up or an operator decides");
        }
    }

    /// An aggregate is behind or still behind. Logs a line when this begins.
    pub(super) fn left_behind(&self, aggregate: &str, seq: u64, poison: bool, again: bool, error: &Error) {
        let error = error.chain();
        if again && !poison {
            tracing::debug!(target: "hapax::relay", relay = %self.name, aggregate, seq, error, "an aggregate is still behind");
        } else if poison {
            tracing::error!(target: "hapax::relay", relay = %self.name, aggregate, seq, error, "an event cannot be published; its aggregate is parked");
        } else {
            tracing::warn!(target: "hapax::relay", relay = %self.name, aggregate, seq, error, "an aggregate is behind");
        }
    }

    /// Aggregates await an answer that the bus does not give. Logs one line for all of them.
    pub(super) fn left_unanswered(&self, aggregates: usize, time: Duration) {
        tracing::warn!(target: "hapax::relay", relay = %self.name, aggregates, ?time, "a part of the bus does not answer; its aggregates wait for it");
    }

    pub(super) fn saved(&self, checkpoint: &Checkpoint) {
        let position = &checkpoint.position;
        let (behind, parked) = (checkpoint.behind.len(), checkpoint.parked());
        let mut state = self.state();
        state.progress.position = position.clone();
        state.progress.behind = behind;
        state.progress.parked = parked;
        state.oldest_behind = checkpoint.behind.iter().map(Behind::appended_at).min();
        drop(state);
        self.metrics.saved(position.number(), behind, parked);
    }

    pub(super) fn refresh(&self) {
        self.metrics.lag(self.progress().lag);
    }

    /// The periodic line with counts.
    pub(super) fn log(&self, interval: Duration) {
        let progress = self.progress();
        let before = std::mem::replace(&mut self.state().logged, progress.published);
        let per_second = (progress.published - before) as f64 / interval.as_secs_f64().max(0.001);
        tracing::info!(
            target: "hapax::relay",
            relay = %self.name,
            leads = progress.leads,
            published = progress.published,
            per_second,
            suppressed = progress.suppressed,
            behind = progress.behind,
            parked = progress.parked,
            holes = progress.holes,
            outages = progress.outages,
            pulses = progress.pulses,
            lag_seconds = progress.lag.as_secs_f64(),
            position = %progress.position,
            "relay"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::Stored;
    use crate::{Aggregate, Event, EventId, RelayName, Topic};

    fn meter() -> Meter {
        let (name, topic) = (RelayName::new("r").unwrap(), Topic::new("orders").unwrap());
        Meter::new(&RelaySettings::new(name, topic)).unwrap()
    }

    /// A checkpoint with one aggregate that is behind and one that is parked, at events appended at
    /// `at`.
    fn checkpoint(at: Time) -> Checkpoint {
        let mut checkpoint = Checkpoint::start("j");
        checkpoint.position = Position::of(9);
        for (n, aggregate) in [(3, "behind"), (4, "parked")] {
            let event = Event::new(EventId::new(aggregate).unwrap());
            let (fingerprint, of) = (event.fingerprint(), Aggregate::new(aggregate).unwrap());
            let stored = Stored::new(Position::of(n), at, fingerprint, event, of, 1);
            checkpoint.behind.push(Behind::at(&stored, "no", aggregate == "parked", SystemClock.now()));
        }
        checkpoint
    }

    #[test]
    fn whoever_leads_begins_with_what_the_checkpoint_says() {
        let meter = meter();
        meter.leads(&checkpoint(meter.now()));
        let progress = meter.progress();
        assert!(progress.leads);
        assert_eq!((progress.position, progress.behind, progress.parked), (Position::of(9), 2, 1));
    }

    #[test]
    fn the_lag_is_the_age_of_the_oldest_that_is_not_on_the_bus_wherever_it_waits() {
        let meter = meter();
        let minutes = |n: u64| meter.now().minus(Duration::from_mins(n));
        let lag = || meter.progress().lag.as_secs() / 60;
        meter.leads(&checkpoint(minutes(30)));
        assert_eq!(lag(), 30, "what is behind, since it was appended");
        meter.oldest(Some(minutes(40)));
        assert_eq!(lag(), 40);
        meter.oldest(Some(minutes(10)));
        assert_eq!(lag(), 30);
        meter.saved(&Checkpoint::start("j"));
        assert_eq!(lag(), 10, "it has caught up");
        meter.leads_no_more("fenced");
        assert_eq!(lag(), 0);
    }

    #[test]
    fn a_hole_is_counted_once_and_ages() {
        let meter = meter();
        meter.hole(&Position::of(4));
        let since = meter.state().hole.clone();
        meter.oldest(None);
        meter.hole(&Position::of(4));
        assert_eq!((meter.progress().holes, meter.state().hole.clone()), (1, since));
        meter.hole(&Position::of(7));
        assert_eq!(meter.progress().holes, 2);
        meter.no_hole();
        assert_eq!(meter.progress().lag, Duration::ZERO);
    }
}
