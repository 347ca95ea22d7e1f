//! `consumer.*`: the settings of consumers.

use std::time::Duration;

use super::kind::Kind;
use super::table::{Setting, int, row, unset};
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

/// The rows of the table.
pub(super) const OF_CONSUMER: &[Setting] = &[
    row("consumer.concurrency", int(1, 100_000), "64", "how many events a consumer handles at once"),
    row("consumer.workers", int(1, 1000), "1", "how many child processes `consume --exec` runs"),
    row(
        "consumer.cancel_grace_ms",
        int(1, 3_600_000),
        "5000",
        "how long a child of `consume --exec` may take to react to a cancel before it is killed",
    ),
    row(
        "consumer.handler_timeout_ms",
        int(1, 86_400_000),
        "30000",
        "how long a handler may take for one event",
    ),
    row("consumer.lease_s", int(1, 86_400), "30", "how long a consumer's lease lasts unless it is extended"),
    row("consumer.heartbeat_s", int(1, 86_399), "10", "how often a consumer extends its leases"),
    row(
        "consumer.in_flight_max",
        int(1, 10_000_000),
        "4096",
        "how many deliveries a consumer keeps in memory, of all partitions and from the ledger; beyond that it pauses partitions",
    ),
    row(
        "consumer.hold_ms_max",
        int(0, 86_400_000),
        "30000",
        "how long a retry may wait in memory; one further away waits in the ledger, and its offset is passed",
    ),
    row(
        "consumer.held_max",
        int(1, 1_000_000_000),
        "100000",
        "how many events a scope may hold in the ledger; at that number a consumer pauses its partitions",
    ),
    row(
        "consumer.held_interval_ms",
        int(1, 3_600_000),
        "500",
        "how often a consumer asks the ledger which held events are due",
    ),
    row("consumer.commit_interval_ms", int(1, 3_600_000), "500", "how often a consumer commits offsets"),
    row(
        "consumer.drain_ms",
        int(0, 3_600_000),
        "20000",
        "how long a consumer that stops waits for handlers that run",
    ),
    row(
        "consumer.session_timeout_ms",
        int(100, 3_600_000),
        "45000",
        "how long a member of the group may show no sign of life before its partitions go to others",
    ),
    row(
        "consumer.gap_timeout_ms",
        int(1, 86_400_000),
        "60000",
        "strict order: how long a consumer waits for a missing seq before it parks the aggregate",
    ),
    row(
        "consumer.outage",
        Kind::Choice(&["pause", "fail_fast", "dead_letter"]),
        "pause",
        "what a consumer does while the ledger is away: wait, end with the error, or copy what arrives to the dead-letter topic",
    ),
    unset(
        "<topic>.dead",
        row(
            "consumer.dead_topic",
            Kind::Name,
            "",
            "the topic that dead letters are copied to (blank: <topic>.dead; a lone hyphen: nowhere)",
        ),
    ),
];

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
