//! The telemetry of one relay.

use std::sync::Arc;
use std::time::Duration;

use metrics::{Key, Label, SharedString};

use super::{METADATA, SPANS, check_prefix, count, describe, is_told_apart, label, prefixed};
use crate::error::Result;
use crate::id::RelayName;

pub(super) const PUBLISHED: &str = "relay_published_total";
pub(super) const TOOK: &str = "relay_publish_duration_seconds";
pub(super) const SUPPRESSED: &str = "relay_suppressed_total";
pub(super) const LAG: &str = "relay_lag_seconds";
pub(super) const POSITION: &str = "relay_position";
pub(super) const BEHIND: &str = "relay_behind";
pub(super) const PARKED: &str = "relay_parked";
pub(super) const HOLES: &str = "relay_holes_total";
pub(super) const OUTAGES: &str = "relay_outages_total";
pub(super) const PULSES: &str = "relay_pulses_total";
pub(super) const LEADS: &str = "relay_leads_total";
pub(super) const RELAY: &str = "relay";

/// Its span, in [`SPANS`].
pub(super) const SPAN: &str = "relay.publish";

/// The metrics and the span of one relay. Their keys are made once.
#[derive(Debug)]
pub(crate) struct RelayMeter {
    prefix: Option<Arc<str>>,
    relay: Arc<str>,
    span: Option<String>,
    published: Key,
    took: Key,
    suppressed: Key,
    lag: Key,
    position: Key,
    behind: Key,
    parked: Key,
    holes: Key,
    outages: Key,
}

impl RelayMeter {
    pub(crate) fn new(prefix: Option<&str>, name: &RelayName) -> Result<Self> {
        if let Some(prefix) = prefix {
            check_prefix(prefix)?;
        }
        describe(prefix);
        let relay: Arc<str> =
            if is_told_apart(RELAY, name.as_str()) { name.as_str() } else { "other" }.into();
        let key = |name| key(prefix, &relay, name, []);
        let span = SPANS.iter().map(|(name, _)| *name).find(|name| *name == SPAN);
        Ok(RelayMeter {
            span: prefix.zip(span).map(|(prefix, span)| format!("{prefix}.{span}")),
            published: key(PUBLISHED),
            took: key(TOOK),
            suppressed: key(SUPPRESSED),
            lag: key(LAG),
            position: key(POSITION),
            behind: key(BEHIND),
            parked: key(PARKED),
            holes: key(HOLES),
            outages: key(OUTAGES),
            prefix: prefix.map(Arc::from),
            relay,
        })
    }

    /// The prefixed name of its span; `None` without a prefix.
    pub(crate) fn span_name(&self) -> Option<&str> {
        self.span.as_deref()
    }

    pub(crate) fn published(&self, records: u64, took: Duration) {
        count(&self.published, records);
        metrics::with_recorder(|recorder| {
            recorder.register_histogram(&self.took, &METADATA).record(took.as_secs_f64());
        });
    }

    pub(crate) fn suppressed(&self, events: u64) {
        count(&self.suppressed, events);
    }

    pub(crate) fn hole(&self) {
        count(&self.holes, 1);
    }

    pub(crate) fn outage(&self) {
        count(&self.outages, 1);
    }

    pub(crate) fn pulse(&self, outcome: &'static str) {
        count(&key(self.prefix.as_deref(), &self.relay, PULSES, [label("outcome", outcome)]), 1);
    }

    pub(crate) fn leadership(&self, change: &'static str) {
        count(&key(self.prefix.as_deref(), &self.relay, LEADS, [label("change", change)]), 1);
    }

    pub(crate) fn lag(&self, lag: Duration) {
        gauge(&self.lag, lag.as_secs_f64());
    }

    pub(crate) fn saved(&self, position: u64, behind: usize, parked: usize) {
        gauge(&self.position, position as f64);
        gauge(&self.behind, behind as f64);
        gauge(&self.parked, parked as f64);
    }
}

fn gauge(key: &Key, value: f64) {
    metrics::with_recorder(|recorder| recorder.register_gauge(key, &METADATA).set(value));
}

fn key(
    prefix: Option<&str>,
    relay: &Arc<str>,
    name: &'static str,
    labels: impl IntoIterator<Item = Label>,
) -> Key {
    let relay = Label::new(RELAY, SharedString::from_shared(Arc::clone(relay)));
    let labels: Vec<Label> = std::iter::once(relay).chain(labels).collect();
    Key::from_parts(prefixed(prefix, name), labels)
}
