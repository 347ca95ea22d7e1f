//! What a relay is told, and what of it is impossible.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::id::{Owner, RelayName, Topic};
use crate::journal::Stored;

/// Picks the topic of an event. It must always say the same of the same event, and should say the same of all events of an
/// aggregate: a bus keeps order within a topic, not across topics.
pub type Route = Arc<dyn Fn(&Stored) -> Topic + Send + Sync>;

/// What a [`Relay`](super::Relay) is told. 0 switches `lookback`, `lookback_max`, `dedup_max`, `dedup_checkpoint_max` and
/// `log_interval` off; nothing is lost by that, only repeated or not told.
#[derive(Clone)]
#[non_exhaustive]
pub struct RelaySettings {
    /// Which of the journal's relays: one of a name leads at a time.
    pub name: RelayName,
    /// Where events go.
    pub topic: Topic,
    /// Where each event goes, if not all to `topic`.
    pub route: Option<Route>,
    /// Who this process is, for humans; made up if unset.
    pub owner: Option<Owner>,
    /// The CloudEvents source of what is published; the journal's id if unset.
    pub source: Option<String>,
    /// Where the schema of the payloads is described (CloudEvents `dataschema`), for events whose headers do not say.
    pub schema: Option<String>,
    /// How far behind the checkpoint a journal whose read is not ordered is looked through once more.
    pub lookback: Duration,
    /// How many events of that are looked at per batch.
    pub lookback_max: usize,
    /// How many published ids are remembered in memory, so that they are not published again.
    pub dedup_max: usize,
    /// How many of them go into the checkpoint, so that a restart remembers them. Only where the journal's read is not ordered:
    /// elsewhere the position says it all.
    pub dedup_checkpoint_max: usize,
    /// How many events are read and published before the checkpoint is saved: what a crash may repeat.
    pub batch_max: usize,
    /// How many records are handed to the bus before their acknowledgements are awaited; `batch_max` if unset.
    pub flush_max: Option<usize>,
    /// How long acknowledgements may take. After that those that are missing are not waited for if there are others, and the bus is said to
    /// be away if there are none.
    pub flush_timeout: Duration,
    /// How often a line with counts is logged.
    pub log_interval: Duration,
    /// How long the lead lasts unless it is kept. It is kept three times as often.
    pub lease: Duration,
    /// How long a journal that says nothing is left alone.
    pub poll: Duration,
    /// How many aggregates may be behind before the relay pauses.
    pub behind_max: usize,
    /// The pause after a first failure; doubles with each.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// A record of more bytes is the last of its aggregate in its flush, so that nothing of the aggregate has passed it if the bus
    /// refuses it for its size.
    pub large_bytes: usize,
    /// What metrics and spans are prefixed with.
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
    /// The defaults, for a relay and its topic.
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
            batch_max: 200,
            flush_max: None,
            flush_timeout: Duration::from_secs(10),
            log_interval: Duration::from_secs(30),
            lease: Duration::from_secs(15),
            poll: Duration::from_secs(1),
            behind_max: 1000,
            backoff_base: Duration::from_millis(200),
            backoff_max: Duration::from_secs(60),
            large_bytes: 256 << 10,
            telemetry_prefix: None,
        }
    }

    /// How many records are handed over before their acknowledgements are awaited.
    pub fn flush(&self) -> usize {
        self.flush_max.unwrap_or(self.batch_max).min(self.batch_max)
    }

    /// How often the lead is kept.
    pub(super) fn heartbeat(&self) -> Duration {
        self.lease / 3
    }

    /// How long before its end a lead is not used any more.
    pub(super) fn margin(&self) -> Duration {
        (self.lease / 10).min(Duration::from_secs(5))
    }

    /// The pause before try `tries + 1`.
    pub(super) fn backoff(&self, tries: u32) -> Duration {
        let doubled = self.backoff_base.saturating_mul(1 << tries.saturating_sub(1).min(20));
        doubled.min(self.backoff_max)
    }

    pub(super) fn topic_of(&self, stored: &Stored) -> Topic {
        self.route.as_ref().map_or_else(|| self.topic.clone(), |route| route(stored))
    }

    /// Says what is impossible, naming the setting and its range.
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
        ] {
            if value < min || value > max {
                return Err(Error::Config(format!(
                    "relay.{key} is {value:?}; it must be {min:?} to {max:?}"
                )));
            }
        }
        Ok(())
    }
}
