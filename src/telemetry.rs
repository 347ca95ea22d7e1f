//! Spans and metrics, through the `tracing` and `metrics` facades.
//!
//! The library exports nothing itself: install a subscriber and a recorder of your choice, before
//! or after you create guards. Metric handles are looked up per call, so a recorder installed late
//! works too. [`METRICS`], [`SPANS`] and `docs/telemetry.md` list names and labels; a test compares
//! the page with what is emitted.
//!
//! With a prefix such as `im2be` every metric is named `im2be_…` and every span `im2be.…`. The
//! names of `tracing` spans are static, so the prefixed name is in the field `otel.name`, which the
//! OpenTelemetry layer uses as the span's name.
//!
//! Labels are bounded: outcomes and the like are fixed words, and after the first [`SCOPES_MAX`]
//! scopes (and relays) of a process all others count as `other`. No id is ever a label.
//!
//! Telemetry uses names and the ledger's outcomes. Whoever measures calls it; it calls nobody.

mod feed;
mod relay;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use metrics::{Key, KeyName, Label, Metadata, SharedString, Unit};

use crate::error::{Error, Result};
use crate::id::Scope;
use crate::ledger::{Layer, Outcome, ScopeOf, Settled, SkipBatch, Swept, Verdict};

pub(crate) use feed::FeedMeter;
use relay::RELAY;
pub(crate) use relay::RelayMeter;

/// How many scopes, and how many relays, of a process have labels of their own.
pub const SCOPES_MAX: usize = 100;

/// How a metric is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It only grows.
    Counter,
    /// It goes up and down.
    Gauge,
    /// It is a distribution.
    Histogram,
}

/// One metric: its name without prefix, its labels, its meaning.
#[derive(Debug, Clone, Copy)]
pub struct Metric {
    /// The name, without prefix.
    pub name: &'static str,
    /// How it is measured.
    pub kind: Kind,
    /// Its labels.
    pub labels: &'static [&'static str],
    /// What it means.
    pub help: &'static str,
}

const fn metric(
    name: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    help: &'static str,
) -> Metric {
    Metric { name, kind, labels, help }
}

const CLAIMS: &str = "dedup_claims_total";
const CHECKS: &str = "idempotent_consumer_checks_total";
const DURATION: &str = "idempotent_consumer_processing_duration_seconds";
const SETTLES: &str = "dedup_settles_total";
const LEASES_LOST: &str = "dedup_leases_lost_total";
const DEAD_LETTERS: &str = "dedup_dead_letters_total";
const SWEPT_ENTRIES: &str = "dedup_swept_entries_total";
const SWEPT_WEEKS: &str = "dedup_swept_weeks_total";
const SWEEP_FAILURES: &str = "dedup_sweep_failures_total";
const REUSED: &str = "dedup_reused_ids_total";
const UNGUARDED: &str = "dedup_unguarded";
const JOURNAL_REUSED: &str = "journal_reused_ids_total";
const WINDOW_CHECKS: &str = "dedup_window_checks_total";
const WINDOW_UNREMEMBERED: &str = "dedup_window_unremembered_total";
const DELIVERIES: &str = "consumer_deliveries_total";
const IN_FLIGHT: &str = "consumer_in_flight";
const DISTANCE: &str = "consumer_commit_point_distance";
const PAUSED: &str = "consumer_paused_partitions";
const HELD: &str = "consumer_held";
const LAG: &str = "consumer_lag";
const REBALANCES: &str = "consumer_rebalances_total";
const REMOVED: &str = "consumer_removed_total";
const AWAY: &str = "consumer_ledger_outages_total";
const PREVENTED: &str = "dedup_prevented_total";
const UNLOGGED: &str = "dedup_unlogged_skips_total";
const SCOPE: &str = "consumer_scope_id";

/// All metrics.
pub const METRICS: [Metric; 39] = [
    metric(CLAIMS, Kind::Counter, &[SCOPE, "outcome"], "Claims by what they came to"),
    metric(CHECKS, Kind::Counter, &["result"], "Checks before processing, by what they came to"),
    metric(DURATION, Kind::Histogram, &[SCOPE, "result"], "How long handlers ran, in seconds"),
    metric(
        SETTLES,
        Kind::Counter,
        &[SCOPE, "verdict", "result"],
        "Settlings by verdict and what came of them",
    ),
    metric(PREVENTED, Kind::Counter, &[SCOPE, "layer"], "Effects that were not done twice"),
    metric(UNLOGGED, Kind::Counter, &[], "Skips that were too many at once to be logged"),
    metric(LEASES_LOST, Kind::Counter, &[SCOPE, "cause"], "Leases lost while the handler ran"),
    metric(DEAD_LETTERS, Kind::Counter, &[SCOPE, "result"], "Dead events handed to the dead letters"),
    metric(SWEPT_ENTRIES, Kind::Counter, &[], "Entries forgotten after the retention"),
    metric(SWEPT_WEEKS, Kind::Counter, &[], "Weeks dropped after the retention"),
    metric(SWEEP_FAILURES, Kind::Counter, &[], "Sweeps that failed"),
    metric(WINDOW_CHECKS, Kind::Counter, &["result"], "Looks into the window, by what they came to"),
    metric(WINDOW_UNREMEMBERED, Kind::Counter, &[], "Done events that could not be written to the window"),
    metric(REUSED, Kind::Counter, &[], "Deliveries of reused ids that were let pass as the original"),
    metric(DELIVERIES, Kind::Counter, &[SCOPE, "ending"], "Finished deliveries, by outcome"),
    metric(IN_FLIGHT, Kind::Gauge, &[SCOPE], "Deliveries in memory that are not finished"),
    metric(DISTANCE, Kind::Gauge, &[SCOPE], "Received offsets that the commit point has not passed"),
    metric(PAUSED, Kind::Gauge, &[SCOPE], "Partitions that pause because too much is in memory or held"),
    metric(HELD, Kind::Gauge, &[SCOPE], "Events that the scope holds in the ledger"),
    metric(LAG, Kind::Gauge, &[SCOPE], "Records behind the end of this process's partitions"),
    metric(REBALANCES, Kind::Counter, &[SCOPE], "Changes of assignment"),
    metric(REMOVED, Kind::Counter, &[SCOPE], "Records that retention removed before they were read"),
    metric(AWAY, Kind::Counter, &[SCOPE], "Deliveries while the ledger did not answer"),
    metric(JOURNAL_REUSED, Kind::Counter, &[], "Events not stored because their id was already used"),
    metric(relay::PUBLISHED, Kind::Counter, &[RELAY], "Records that the bus has acknowledged"),
    metric(relay::TOOK, Kind::Histogram, &[RELAY], "How long a batch's acknowledgements took, in seconds"),
    metric(
        relay::SUPPRESSED,
        Kind::Counter,
        &[RELAY],
        "Events known to be on the bus and not published again",
    ),
    metric(relay::LAG, Kind::Gauge, &[RELAY], "The age of the oldest unpublished event, in seconds"),
    metric(relay::POSITION, Kind::Gauge, &[RELAY], "The position of the checkpoint"),
    metric(relay::BEHIND, Kind::Gauge, &[RELAY], "Aggregates of which something could not be published"),
    metric(relay::PARKED, Kind::Gauge, &[RELAY], "Aggregates behind an event that the bus will never take"),
    metric(relay::HOLES, Kind::Counter, &[RELAY], "Looks that ended before a position not committed yet"),
    metric(relay::OUTAGES, Kind::Counter, &[RELAY], "Times that the bus took nothing at all"),
    metric(relay::PULSES, Kind::Counter, &[RELAY, "outcome"], "Pulses, sent to every partition or dropped"),
    metric(relay::LEADS, Kind::Counter, &[RELAY, "change"], "Changes of leadership"),
    metric(feed::CHANGES, Kind::Counter, &[], "Changes that a read model has applied, with repeats"),
    metric(feed::REJECTED, Kind::Counter, &[], "Changes for a read model that could not be read"),
    metric(feed::LAG, Kind::Gauge, &[], "How long ago lastSyncAt of the read model is, in seconds"),
    metric(UNGUARDED, Kind::Gauge, &[], "1 while the guard is switched off and lets everything pass"),
];

/// All spans, with their fields.
pub const SPANS: [(&str, &[&str]); 5] = [
    (
        "dedup.try_claim",
        &[
            "otel.name",
            "consumer.scope_id",
            "event.id",
            "event.week_start",
            "kafka.topic",
            "kafka.partition",
            "kafka.offset",
            "dedup.outcome",
        ],
    ),
    ("dedup.process", &["otel.name", "consumer.scope_id", "event.id", "dedup.attempt", "trace.parent"]),
    ("dedup.sweep", &["otel.name"]),
    (
        "consumer.delivery",
        &[
            "otel.name",
            "otel.kind",
            "consumer.scope_id",
            "event.id",
            "kafka.topic",
            "kafka.partition",
            "kafka.offset",
            "trace.parent",
            "consumer.ending",
        ],
    ),
    (relay::SPAN, &["otel.name", "otel.kind", "relay.name", "relay.events", "relay.acknowledged"]),
];

/// Describes each metric to the current recorder. Call it again after you install another recorder.
pub fn describe(prefix: Option<&str>) {
    metrics::with_recorder(|recorder| {
        for metric in &METRICS {
            let name = KeyName::from(prefixed(prefix, metric.name));
            let help = SharedString::const_str(metric.help);
            let unit = (metric.kind == Kind::Histogram).then_some(Unit::Seconds);
            match metric.kind {
                Kind::Counter => recorder.describe_counter(name, unit, help),
                Kind::Gauge => recorder.describe_gauge(name, unit, help),
                Kind::Histogram => recorder.describe_histogram(name, unit, help),
            }
        }
    });
}

fn prefixed(prefix: Option<&str>, name: &'static str) -> SharedString {
    match prefix {
        Some(prefix) => SharedString::from_owned(format!("{prefix}_{name}")),
        None => SharedString::const_str(name),
    }
}

/// Counts an event that was not stored, under `warn`, because its id belongs to another.
pub(crate) fn reused_in_journal(prefix: Option<&str>) {
    count(&Key::from_name(prefixed(prefix, JOURNAL_REUSED)), 1);
}

static METADATA: Metadata<'static> = Metadata::new("hapax", metrics::Level::INFO, Some("hapax::guard"));

fn count(key: &Key, by: u64) {
    metrics::with_recorder(|recorder| recorder.register_counter(key, &METADATA).increment(by));
}

/// The names of outcomes, in the order of [`outcome_index`]; the last one is for failed calls.
const OUTCOMES: [&str; 11] = [
    "claimed",
    "duplicate",
    "busy",
    "retry_later",
    "wait",
    "stale",
    "parked",
    "dead",
    "mismatch",
    "too_old",
    "error",
];
/// The names of the same outcomes in checks: `claimed` is `new` there.
const RESULTS: [&str; 11] = {
    let mut names = OUTCOMES;
    names[0] = "new";
    names
};

fn outcome_index<G>(outcome: Option<&Outcome<G>>) -> usize {
    match outcome {
        Some(Outcome::First(_)) => 0,
        Some(Outcome::Duplicate(_)) => 1,
        Some(Outcome::Busy { .. }) => 2,
        Some(Outcome::RetryLater { .. }) => 3,
        Some(Outcome::Wait { .. }) => 4,
        Some(Outcome::Stale { .. }) => 5,
        Some(Outcome::Parked { .. }) => 6,
        Some(Outcome::Dead { .. }) => 7,
        Some(Outcome::Mismatch(_)) => 8,
        Some(Outcome::TooOld { .. }) => 9,
        None => 10,
    }
}

/// The name of an outcome, or of a failed call.
pub(crate) fn outcome_name<G>(outcome: Option<&Outcome<G>>) -> &'static str {
    OUTCOMES[outcome_index(outcome)]
}

const VERDICTS: [&str; 5] = ["done", "retry", "dead", "finished", "lost"];
const SETTLE_RESULTS: [&str; 3] = ["ok", "fenced", "error"];

fn verdict_index(verdict: &Verdict) -> usize {
    match verdict {
        Verdict::Done { .. } => 0,
        Verdict::Retry { .. } => 1,
        Verdict::Dead { .. } => 2,
        Verdict::Finished { .. } => 3,
        Verdict::Lost { .. } => 4,
    }
}

/// The telemetry of one guard, under its prefix.
#[derive(Debug)]
pub(crate) struct Telemetry {
    prefix: Option<Arc<str>>,
    spans: [Option<String>; SPANS.len()],
    checks: [OnceLock<Key>; OUTCOMES.len()],
    meters: Mutex<HashMap<Scope, Arc<Meter>>>,
    others: Arc<Meter>,
}

impl Telemetry {
    pub(crate) fn new(prefix: Option<&str>) -> Result<Self> {
        if let Some(prefix) = prefix {
            check_prefix(prefix)?;
        }
        Ok(Telemetry::under(prefix.map(Arc::from)))
    }

    fn under(prefix: Option<Arc<str>>) -> Self {
        describe(prefix.as_deref());
        Telemetry {
            spans: SPANS.map(|(name, _)| prefix.as_ref().map(|prefix| format!("{prefix}.{name}"))),
            checks: Default::default(),
            meters: Mutex::default(),
            others: Arc::new(Meter::new(prefix.clone(), "other".into())),
            prefix,
        }
    }

    /// The prefixed names of spans, in the order of [`SPANS`]; `None` without a prefix.
    pub(crate) fn span_name(&self, span: usize) -> Option<&str> {
        self.spans[span].as_deref()
    }

    /// The counters of a scope.
    pub(crate) fn meter(&self, scope: &Scope) -> Arc<Meter> {
        let mut meters = self.meters.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(meter) = meters.get(scope) {
            return Arc::clone(meter);
        }
        if !is_told_apart(SCOPE, scope.as_str()) {
            return Arc::clone(&self.others);
        }
        let meter = Arc::new(Meter::new(self.prefix.clone(), scope.as_str().into()));
        meters.insert(scope.clone(), Arc::clone(&meter));
        meter
    }

    pub(crate) fn checked<G>(&self, outcome: Option<&Outcome<G>>) {
        let at = outcome_index(outcome);
        let key = self.checks[at].get_or_init(|| self.key(CHECKS, vec![label("result", RESULTS[at])]));
        count(key, 1);
    }

    pub(crate) fn swept(&self, swept: &Swept) {
        count(&self.key(SWEPT_ENTRIES, Vec::new()), swept.entries());
        count(&self.key(SWEPT_WEEKS, Vec::new()), swept.weeks.len() as u64);
    }

    pub(crate) fn sweep_failed(&self) {
        count(&self.key(SWEEP_FAILURES, Vec::new()), 1);
    }

    pub(crate) fn reused(&self, by: u64) {
        count(&self.key(REUSED, Vec::new()), by);
    }

    /// Counts what a log of skips gathered.
    pub(crate) fn skipped(&self, batch: &SkipBatch) {
        for (layer, of, amount) in &batch.prevented {
            self.meter_of(of.as_ref()).prevented(*layer, amount.count);
        }
        let unlogged: u64 = batch.unlogged.iter().map(|(_, count)| count).sum();
        if unlogged > 0 {
            count(&self.key(UNLOGGED, Vec::new()), unlogged);
        }
    }

    fn meter_of(&self, of: Option<&ScopeOf>) -> Arc<Meter> {
        of.map_or_else(|| Arc::clone(&self.others), |(_, scope)| self.meter(scope))
    }

    pub(crate) fn unguarded(&self) {
        let key = self.key(UNGUARDED, Vec::new());
        metrics::with_recorder(|recorder| recorder.register_gauge(&key, &METADATA).set(1.0));
    }

    /// The metrics of a consumer of a scope.
    pub(crate) fn consumer_meter(&self, scope: &Scope) -> ConsumerMeter {
        ConsumerMeter(self.meter(scope))
    }

    fn key(&self, name: &'static str, labels: Vec<Label>) -> Key {
        Key::from_parts(prefixed(self.prefix.as_deref(), name), labels)
    }
}

impl Default for Telemetry {
    fn default() -> Self {
        Telemetry::under(None)
    }
}

/// Checks a prefix by the rules of Prometheus, the strictest system.
fn check_prefix(prefix: &str) -> Result<()> {
    let fine = prefix.len() <= 64
        && prefix.starts_with(|c: char| c.is_ascii_alphabetic())
        && prefix.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if fine {
        return Ok(());
    }
    Err(Error::Config(format!(
        "telemetry.prefix is {prefix:?}; it takes 1 to 64 of the characters A-Z a-z 0-9 _ and begins with a letter"
    )))
}

/// Whether a name is among the first [`SCOPES_MAX`] of its kind in this process.
fn is_told_apart(kind: &'static str, name: &str) -> bool {
    static SEEN: Mutex<Option<HashMap<&'static str, HashSet<String>>>> = Mutex::new(None);
    let mut seen = SEEN.lock().unwrap_or_else(PoisonError::into_inner);
    let seen = seen.get_or_insert_default().entry(kind).or_default();
    seen.contains(name) || (seen.len() < SCOPES_MAX && seen.insert(name.to_owned()))
}

fn label(name: &'static str, value: &'static str) -> Label {
    Label::from_static_parts(name, value)
}

/// The counters of one scope. Their keys are made once, so that counting does not allocate.
#[derive(Debug)]
pub(crate) struct Meter {
    prefix: Option<Arc<str>>,
    scope: Arc<str>,
    claims: [OnceLock<Key>; OUTCOMES.len()],
    settles: [[OnceLock<Key>; SETTLE_RESULTS.len()]; VERDICTS.len()],
}

impl Meter {
    fn new(prefix: Option<Arc<str>>, scope: Arc<str>) -> Self {
        Meter { prefix, scope, claims: Default::default(), settles: Default::default() }
    }

    fn key(&self, name: &'static str, labels: impl IntoIterator<Item = Label>) -> Key {
        let scope = Label::new(SCOPE, SharedString::from_shared(Arc::clone(&self.scope)));
        let labels: Vec<Label> = std::iter::once(scope).chain(labels).collect();
        Key::from_parts(prefixed(self.prefix.as_deref(), name), labels)
    }

    pub(crate) fn claimed<G>(&self, outcome: Option<&Outcome<G>>) {
        let at = outcome_index(outcome);
        count(self.claims[at].get_or_init(|| self.key(CLAIMS, [label("outcome", OUTCOMES[at])])), 1);
    }

    pub(crate) fn settled(&self, verdict: usize, result: &Result<Settled>) {
        let came = match result {
            Ok(Settled::Ok { .. }) => 0,
            Ok(Settled::Fenced { .. }) => 1,
            Err(_) => 2,
        };
        let key = self.settles[verdict][came].get_or_init(|| {
            self.key(SETTLES, [label("verdict", VERDICTS[verdict]), label("result", SETTLE_RESULTS[came])])
        });
        count(key, 1);
    }

    fn prevented(&self, layer: Layer, by: u64) {
        count(&self.key(PREVENTED, [label("layer", layer.name())]), by);
    }

    /// The index of a verdict, for [`settled`](Meter::settled) when the verdict itself is gone.
    pub(crate) fn verdict(verdict: &Verdict) -> usize {
        verdict_index(verdict)
    }

    pub(crate) fn lease_lost(&self, cause: &'static str) {
        count(&self.key(LEASES_LOST, [label("cause", cause)]), 1);
    }

    pub(crate) fn dead_letter(&self, result: &'static str) {
        count(&self.key(DEAD_LETTERS, [label("result", result)]), 1);
    }

    pub(crate) fn processed(&self, took: Duration, result: &'static str) {
        let key = self.key(DURATION, [label("result", result)]);
        metrics::with_recorder(|recorder| {
            recorder.register_histogram(&key, &METADATA).record(took.as_secs_f64());
        });
    }
}

/// The metrics of one consumer.
#[derive(Debug)]
pub(crate) struct ConsumerMeter(Arc<Meter>);

impl ConsumerMeter {
    fn gauge(&self, name: &'static str, value: f64) {
        let key = self.0.key(name, []);
        metrics::with_recorder(|recorder| recorder.register_gauge(&key, &METADATA).set(value));
    }

    pub(crate) fn passed(&self, word: &'static str) {
        count(&self.0.key(DELIVERIES, [label("ending", word)]), 1);
    }

    pub(crate) fn flow(&self, in_flight: usize, distance: usize, paused: usize) {
        self.gauge(IN_FLIGHT, in_flight as f64);
        self.gauge(DISTANCE, distance as f64);
        self.gauge(PAUSED, paused as f64);
    }

    pub(crate) fn held(&self, count: u64) {
        self.gauge(HELD, count as f64);
    }

    pub(crate) fn lag(&self, lag: i64) {
        self.gauge(LAG, lag as f64);
    }

    pub(crate) fn rebalanced(&self) {
        count(&self.0.key(REBALANCES, []), 1);
    }

    pub(crate) fn removed(&self, records: u64) {
        count(&self.0.key(REMOVED, []), records);
    }

    pub(crate) fn ledger_away(&self) {
        count(&self.0.key(AWAY, []), 1);
    }
}

/// The metrics of a window.
#[derive(Debug)]
pub(crate) struct WindowMeter {
    hit: Key,
    miss: Key,
    unfiltered: Key,
    unremembered: Key,
}

impl WindowMeter {
    pub(crate) fn new(prefix: Option<&str>) -> Self {
        let check = |result| Key::from_parts(prefixed(prefix, WINDOW_CHECKS), vec![label("result", result)]);
        WindowMeter {
            hit: check("hit"),
            miss: check("miss"),
            unfiltered: check("unfiltered"),
            unremembered: Key::from_name(prefixed(prefix, WINDOW_UNREMEMBERED)),
        }
    }

    pub(crate) fn checked(&self, seen: &[bool]) {
        let hits = seen.iter().filter(|seen| **seen).count();
        for (key, events) in [(&self.hit, hits), (&self.miss, seen.len() - hits)] {
            if events > 0 {
                count(key, events as u64);
            }
        }
    }

    pub(crate) fn unfiltered(&self, events: usize) {
        count(&self.unfiltered, events as u64);
    }

    pub(crate) fn unremembered(&self, events: usize) {
        count(&self.unremembered, events as u64);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Time;
    use crate::ledger::{Prior, State, Week};

    #[test]
    fn words_of_outcomes_are_those_of_the_outcomes() {
        let prior = Prior { state: State::Done, at: Time::default(), owner: None };
        let all: [Outcome<()>; 10] = [
            Outcome::First(()),
            Outcome::Duplicate(prior.clone()),
            Outcome::Busy { until: None, owner: None },
            Outcome::RetryLater { at: Time::default(), attempts: 1 },
            Outcome::Wait { on: None },
            Outcome::Stale { last: 1 },
            Outcome::Parked { behind: 1 },
            Outcome::Dead { at: Time::default(), attempts: 1 },
            Outcome::Mismatch(prior),
            Outcome::TooOld { week: Week::TIMELESS },
        ];
        for outcome in &all {
            assert_eq!(outcome_name(Some(outcome)), outcome.name());
        }
    }

    #[test]
    fn scopes_in_labels_are_bounded() {
        let telemetry = Telemetry::default();
        let meter = |n: usize| telemetry.meter(&Scope::new(format!("scope-{n}")).unwrap());
        let first = meter(0);
        let labels: HashSet<Arc<str>> = (0..10 * SCOPES_MAX).map(|n| meter(n).scope.clone()).collect();
        assert!(labels.len() <= SCOPES_MAX + 1 && labels.contains("other"));
        assert_eq!(meter(0).scope, first.scope, "the first ones stay");
    }

    #[test]
    fn prefixes_are_checked() {
        assert!(check_prefix("im2be").is_ok());
        for bad in ["", "7up", "a-b", "ü"] {
            assert!(check_prefix(bad).is_err(), "{bad}");
        }
    }
}
