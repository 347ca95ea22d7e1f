//! `consumer.*`: the settings of consumers.

use std::time::Duration;

use super::{Config, Typed};
use crate::consumer::ConsumerSettings;
use crate::error::Result;
use crate::id::{Scope, Topic};

/// What is configured besides [`ConsumerSettings`], which [`Config::consumer_settings`] fills in: how
/// `consume --exec` runs its children, and how a strict order waits.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerSection {
    /// How many children `consume --exec` runs.
    pub workers: usize,
    /// How long a child may take to react to a cancellation.
    pub cancel_grace: Duration,
    /// How long a strict order waits for a missing seq.
    pub gap_timeout: Duration,
}

impl ConsumerSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        Ok(ConsumerSection {
            workers: of.int("consumer.workers")? as usize,
            cancel_grace: of.millis("consumer.cancel_grace_ms")?,
            gap_timeout: of.millis("consumer.gap_timeout_ms")?,
        })
    }
}

impl Config {
    /// The settings of a consumer of a scope. What is not configurable has its default.
    pub fn consumer_settings(&self, scope: Scope, topics: Vec<Topic>) -> Result<ConsumerSettings> {
        let of = Typed(&self.values);
        let attempts_max = self.attempts_max(&scope)?;
        let mut settings = ConsumerSettings::new(scope, topics);
        settings.concurrency = of.int("consumer.concurrency")? as usize;
        settings.in_flight_max = of.int("consumer.in_flight_max")? as usize;
        settings.handler_timeout = of.millis("consumer.handler_timeout_ms")?;
        settings.lease = of.seconds("consumer.lease_s")?;
        settings.heartbeat = of.seconds("consumer.heartbeat_s")?;
        settings.attempts_max = attempts_max;
        settings.backoff_base = self.retry.backoff_base;
        settings.backoff_max = self.retry.backoff_max;
        settings.hold_max = of.millis("consumer.hold_ms_max")?;
        settings.held_max = of.int("consumer.held_max")?;
        settings.held_interval = of.millis("consumer.held_interval_ms")?;
        settings.commit_interval = of.millis("consumer.commit_interval_ms")?;
        settings.drain = of.millis("consumer.drain_ms")?;
        settings.session_timeout = of.millis("consumer.session_timeout_ms")?;
        settings.outage = of.text("consumer.outage")?.parse()?;
        settings.dead_topic = match of.text("consumer.dead_topic")? {
            "" => None,
            "-" => Some(String::new()),
            name => Some(name.to_owned()),
        };
        settings.retention = self.ledger.retention;
        settings.log_skips = self.ledger.log_skips;
        settings.value.clone_from(&self.ledger.value);
        settings.telemetry_prefix = self.prefix();
        Ok(settings)
    }
}
