//! Settings of a relay, and their validation.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::id::{Owner, RelayName, Topic};
use crate::journal::Stored;

/// Picks the topic of an event. It must always return the same topic for the same event, and should
/// return the same topic for all events of an aggregate: a bus keeps order within a topic, not
/// across topics.
pub type Route = Arc<dyn Fn(&Stored) -> Topic + Send + Sync>;

/// Settings of a [`Relay`](super::Relay). 0 disables `lookback`, `lookback_max`, `dedup_max`,
/// `dedup_checkpoint_max` and `log_interval`.
#[derive(Clone)]
#[non_exhaustive]
pub struct RelaySettings {
    /// The relay's name. One relay of a name leads at a time.
    pub name: RelayName,
    /// The topic to publish to.
    pub topic: Topic,
    /// Picks the topic of each event, if not all go to `topic`.
    pub route: Option<Route>,
    /// The name of this process, for humans; generated if unset.
    pub owner: Option<Owner>,
    /// The CloudEvents source of published records; the journal's id if unset.
    pub source: Option<String>,
    /// The schema of the payloads (CloudEvents `dataschema`), for events whose headers do not name
    /// one.
    pub schema: Option<String>,
    /// How far back the relay looks for events that appear late. Used only if the journal's
    /// positions are [times](crate::journal::JournalCapabilities::timed), in object stores. 0: it
    /// does not look back.
    pub lookback: Duration,
    /// How many events it looks at per batch. 0: it does not look back.
    pub lookback_max: usize,
    /// How many published events the relay remembers when it looks back. It does not look at events
    /// before those. 0: it does not look back.
    pub dedup_max: usize,
    /// How many of them the checkpoint stores. 0: after a restart the relay does not look at events
    /// before its checkpoint.
    pub dedup_checkpoint_max: usize,
    /// How many events the relay reads and publishes before it saves the checkpoint: a crash may
    /// repeat that many.
    pub batch_max: usize,
    /// How many records the relay sends before it waits for acknowledgements; `batch_max` if unset.
    pub flush_max: Option<usize>,
    /// How long acknowledgements may take. If only some are missing after that, the relay goes on
    /// without them; if all are, it reports an outage of the bus.
    pub flush_timeout: Duration,
    /// How often to log a line with counts.
    pub log_interval: Duration,
    /// The lease of the leadership. The relay renews it three times per lease.
    pub lease: Duration,
    /// How long to wait for a quiet journal before reading it again.
    pub poll: Duration,
    /// How many aggregates may be behind, parked ones excluded, before the relay pauses.
    pub behind_max: usize,
    /// The pause after the first failure; doubles with each further one.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// A record larger than this is the last of its aggregate in a flush, so that no later event of
    /// the aggregate is on the bus if the bus refuses it for its size.
    pub large_bytes: usize,
    /// How often the relay publishes a [pulse](crate::bus::Pulse) to every partition of its topic,
    /// at most: a record that says up to when everything is on the topic. None: never. Not with a
    /// `route`, nor if the journal's positions are
    /// [times](crate::journal::JournalCapabilities::timed).
    pub pulse: Option<Duration>,
    /// Prefix for the names of metrics and spans.
    pub telemetry_prefix: Option<String>,
}

impl fmt::Debug for RelaySettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RelaySettings")
            .field("name", &self.name)
            .field("topic", &self.topic)
            .field("routed", &self.route.is_some())
            .field("batch_max", &self.batch_max)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl RelaySettings {
    /// The default settings for a relay and its topic.
    pub fn new(name: RelayName, topic: Topic) -> Self {
        RelaySettings {
            name,
            topic,
            route: None,
            owner: None,
            source: None,
            schema: None,
            lookback: Duration::from_secs(600),
            lookback_max: 50,
            dedup_max: 10_000,
            dedup_checkpoint_max: 2000,
            batch_max: 1000,
            flush_max: None,
            flush_timeout: Duration::from_secs(10),
            log_interval: Duration::from_secs(30),
            lease: Duration::from_secs(15),
            poll: Duration::from_secs(1),
            behind_max: 1000,
            backoff_base: Duration::from_millis(200),
            backoff_max: Duration::from_secs(60),
            large_bytes: 256 << 10,
            pulse: None,
            telemetry_prefix: None,
        }
    }

    /// How many records are sent before waiting for acknowledgements.
    pub fn flush(&self) -> usize {
        self.flush_max.unwrap_or(self.batch_max).min(self.batch_max)
    }

    /// How often leadership is renewed.
    pub(super) fn heartbeat(&self) -> Duration {
        self.lease / 3
    }

    /// How long before its end leadership is no longer used.
    pub(super) fn margin(&self) -> Duration {
        (self.lease / 10).min(Duration::from_secs(5))
    }

    /// The pause before attempt `attempts + 1`.
    pub(super) fn backoff(&self, attempts: u32) -> Duration {
        let doubled = self.backoff_base.saturating_mul(1 << attempts.saturating_sub(1).min(20));
        doubled.min(self.backoff_max)
    }

    pub(super) fn topic_of(&self, stored: &Stored) -> Topic {
        self.route.as_ref().map_or_else(|| self.topic.clone(), |route| route(stored))
    }

    /// Validates the settings. An error names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let range = |key: &str, value: usize, min: usize, max: usize| {
            if (min..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::Config(format!("relay.{key} is {value}; it must be {min} to {max}")))
        };
        range("batch_max", self.batch_max, 1, 100_000)?;
        range("flush_max", self.flush_max.unwrap_or(1), 1, 100_000)?;
        range("lookback_max", self.lookback_max, 0, 100_000)?;
        range("dedup_max", self.dedup_max, 0, 10_000_000)?;
        range("dedup_checkpoint_max", self.dedup_checkpoint_max, 0, 100_000)?;
        range("behind_max", self.behind_max, 1, 100_000)?;
        range("large_bytes", self.large_bytes, 1, 1 << 30)?;
        let hour = Duration::from_hours(1);
        for (key, value, min, max) in [
            ("lookback", self.lookback, Duration::ZERO, 24 * hour),
            ("log_interval", self.log_interval, Duration::ZERO, 24 * hour),
            ("flush_timeout", self.flush_timeout, Duration::from_millis(1), hour),
            ("lease", self.lease, Duration::from_millis(100), hour),
            ("poll", self.poll, Duration::from_millis(1), hour),
            ("backoff_base", self.backoff_base, Duration::from_millis(1), hour),
            ("backoff_max", self.backoff_max, Duration::from_millis(1), 24 * hour),
            ("pulse", self.pulse.unwrap_or(hour), Duration::from_millis(1), hour),
        ] {
            if value < min || value > max {
                return Err(Error::Config(format!(
                    "relay.{key} is {value:?}; it must be {min:?} to {max:?}"
                )));
            }
        }
        if self.pulse.is_some() && self.route.is_some() {
            return Err(Error::Config(
                "relay.pulse is set, and so is a route: a pulse says how far one topic is, and with a route \
                 the relay does not know all of its topics; leave one of them out"
                    .into(),
            ));
        }
        Ok(())
    }
}
