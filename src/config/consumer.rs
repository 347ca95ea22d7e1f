//! `consumer.*`: the settings of consumers.

use std::time::Duration;

use super::{Config, Typed};
use crate::consumer::{ConsumerSettings, OutagePolicy};
use crate::error::Result;
use crate::id::{Scope, Topic};

/// The settings of consumers that are configurable; the rest of [`ConsumerSettings`] is up to the
/// program.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerConfig {
    /// How many events are handled at once.
    pub concurrency: usize,
    /// How many children `consume --exec` runs.
    pub workers: usize,
    /// How long a child may take to react to a cancellation.
    pub cancel_grace: Duration,
    /// How long handling one event may take.
    pub handler_timeout: Duration,
    /// How long a lease lasts unless it is extended.
    pub lease: Duration,
    /// How often leases are extended.
    pub heartbeat: Duration,
    /// The maximum number of deliveries of a partition in memory at once.
    pub in_flight_max: usize,
    /// A retry that is further away than this waits in the ledger.
    pub hold_max: Duration,
    /// How many events a scope may hold in the ledger.
    pub held_max: u64,
    /// How often the ledger is asked for due events.
    pub held_interval: Duration,
    /// How often offsets are committed.
    pub commit_interval: Duration,
    /// How long a stop waits for running handlers.
    pub drain: Duration,
    /// How long a member may be silent before its partitions go to others.
    pub session_timeout: Duration,
    /// How long a strict order waits for a missing seq.
    pub gap_timeout: Duration,
    /// What to do while the ledger is unavailable.
    pub outage: OutagePolicy,
    /// The topic that dead letters are copied to; `None` means `<topic>.dead`, an empty one no
    /// copy.
    pub dead_topic: Option<String>,
}

impl ConsumerConfig {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let ms = |key: &str| of.int(key).map(Duration::from_millis);
        Ok(ConsumerConfig {
            concurrency: of.int("consumer.concurrency")? as usize,
            workers: of.int("consumer.workers")? as usize,
            cancel_grace: ms("consumer.cancel_grace_ms")?,
            handler_timeout: ms("consumer.handler_timeout_ms")?,
            lease: Duration::from_secs(of.int("consumer.lease_s")?),
            heartbeat: Duration::from_secs(of.int("consumer.heartbeat_s")?),
            in_flight_max: of.int("consumer.in_flight_max")? as usize,
            hold_max: ms("consumer.hold_ms_max")?,
            held_max: of.int("consumer.held_max")?,
            held_interval: ms("consumer.held_interval_ms")?,
            commit_interval: ms("consumer.commit_interval_ms")?,
            drain: ms("consumer.drain_ms")?,
            session_timeout: ms("consumer.session_timeout_ms")?,
            gap_timeout: ms("consumer.gap_timeout_ms")?,
            outage: of.text("consumer.outage")?.parse()?,
            dead_topic: match of.text("consumer.dead_topic")? {
                "" => None,
                "-" => Some(String::new()),
                name => Some(name.to_owned()),
            },
        })
    }
}

impl Config {
    /// The settings of a consumer of a scope.
    pub fn consumer_settings(&self, scope: Scope, topics: Vec<Topic>) -> Result<ConsumerSettings> {
        let consumer = &self.consumer;
        let attempts_max = self.attempts_max(&scope)?;
        let mut settings = ConsumerSettings::new(scope, topics);
        settings.concurrency = consumer.concurrency;
        settings.in_flight_max = consumer.in_flight_max;
        settings.handler_timeout = consumer.handler_timeout;
        settings.lease = consumer.lease;
        settings.heartbeat = consumer.heartbeat;
        settings.attempts_max = attempts_max;
        settings.backoff_base = self.retry.backoff_base;
        settings.backoff_max = self.retry.backoff_max;
        settings.hold_max = consumer.hold_max;
        settings.held_max = consumer.held_max;
        settings.held_interval = consumer.held_interval;
        settings.commit_interval = consumer.commit_interval;
        settings.drain = consumer.drain;
        settings.session_timeout = consumer.session_timeout;
        settings.outage = consumer.outage;
        settings.dead_topic.clone_from(&consumer.dead_topic);
        settings.retention = self.ledger.retention;
        settings.telemetry_prefix = Some(self.telemetry_prefix.clone()).filter(|prefix| !prefix.is_empty());
        Ok(settings)
    }
}
