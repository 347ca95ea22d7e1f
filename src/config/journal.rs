//! `journal.*` and `relay.*`: where events are stored, and how they get to the bus.

use super::kind::Kind;
use super::table::{Setting, also, int, row, unset};
use super::{Config, Migrate, Place, Typed, hide_password};
use crate::backend::object::AllocatorSettings;
use crate::error::Result;
use crate::id::{Owner, RelayName, Topic};
use crate::journal::JournalSettings;
use crate::ledger::MismatchRule;
use crate::open::OpenSettings;
use crate::relay::RelaySettings;

/// The journal's settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JournalSection {
    /// The URL of the journal; may contain a password.
    pub url: String,
    /// The PostgreSQL schema.
    pub schema: String,
    /// What to do if the schema is missing or out of date.
    pub migrate: Migrate,
    /// What a reused id leads to.
    pub mismatch: MismatchRule,
    /// The maximum size of an event.
    pub event_bytes_max: usize,
    /// What numbers the events of an object store.
    pub allocator: AllocatorSettings,
}

/// The rows of the table for the relay.
pub(super) const OF_RELAY: &[Setting] = &[
    row(
        "relay.name",
        Kind::Name,
        "relay",
        "the relay's name: of all relays of one name, one leads at a time",
    ),
    row("relay.topic", Kind::Name, "events", "the topic that the relay publishes to"),
    row(
        "relay.lease_ms",
        int(100, 3_600_000),
        "15000",
        "how long the relay's leadership lasts unless it is renewed; another relay takes over from a killed one after that",
    ),
    also(
        row(
            "relay.lookback_s",
            int(0, 86_400),
            "600",
            "object stores: how far back the relay looks for events that appear late; 0: not at all",
        ),
        &["EVENT_PUBLISHER_LOOKBACK_SECONDS"],
    ),
    also(
        row(
            "relay.lookback_max",
            int(0, 100_000),
            "50",
            "object stores: how many earlier events the relay looks at again for each batch; 0: none",
        ),
        &["EVENT_PUBLISHER_LOOKBACK_MAX_KEYS"],
    ),
    also(
        row(
            "relay.dedup_max",
            int(0, 10_000_000),
            "10000",
            "object stores: how many published events the relay remembers; 0: none, and no lookback",
        ),
        &["EVENT_PUBLISHER_DEDUP_MAX_EVENTS"],
    ),
    also(
        row(
            "relay.dedup_checkpoint_max",
            int(0, 100_000),
            "2000",
            "object stores: how many published events the relay's checkpoint remembers over a restart; 0: none",
        ),
        &["EVENT_PUBLISHER_DEDUP_CHECKPOINT_MAX_EVENTS"],
    ),
    also(
        row(
            "relay.batch_max",
            int(1, 100_000),
            "1000",
            "how many events the relay reads and publishes at once",
        ),
        &["EVENT_PUBLISHER_BATCH_SIZE"],
    ),
    also(
        row(
            "relay.flush_max",
            int(0, 100_000),
            "0",
            "after how many events the relay waits for acknowledgements; 0: as relay.batch_max",
        ),
        &["EVENT_PUBLISHER_KAFKA_FLUSH_BATCH_SIZE"],
    ),
    also(
        row("relay.flush_timeout_s", int(1, 3600), "10", "how long the relay waits for acknowledgements"),
        &["EVENT_PUBLISHER_KAFKA_FLUSH_TIMEOUT_SECONDS"],
    ),
    also(
        row("relay.log_interval_s", int(0, 86_400), "30", "how often the relay logs what it did; 0: never"),
        &["EVENT_PUBLISHER_METRICS_LOG_INTERVAL_SECONDS"],
    ),
    row(
        "relay.behind_max",
        int(1, 100_000),
        "1000",
        "how many aggregates may be behind before the relay pauses; parked ones do not count",
    ),
    row(
        "relay.large_bytes",
        int(1, 1 << 30),
        "262144",
        "beyond how many bytes of a record the relay sends the aggregate's next one only after this one is acknowledged; lower it if the topic takes less",
    ),
    row(
        "relay.poll_ms",
        int(1, 3_600_000),
        "1000",
        "how often the relay polls a journal that sends no wake-up",
    ),
    row(
        "relay.backoff_base_ms",
        int(1, 3_600_000),
        "200",
        "the relay's pause after a first failure; it doubles with each further one",
    ),
    row("relay.backoff_max_ms", int(1, 86_400_000), "60000", "the relay's longest pause after a failure"),
    row(
        "relay.pulse_ms",
        int(0, 3_600_000),
        "0",
        "how often the relay publishes a pulse to each partition, which tells read models up to when everything is there; 0: never",
    ),
    unset(
        "the journal's id",
        row(
            "relay.source",
            Kind::Text,
            "",
            "the CloudEvents source of the records that the relay publishes (unset: the journal's id)",
        ),
    ),
    row(
        "relay.schema",
        Kind::Text,
        "",
        "where the payloads' schema is described (CloudEvents dataschema), for published events that do not say",
    ),
];

impl JournalSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let set = |key: &str| of.text(key).map(|text| Some(text.to_owned()).filter(|text| !text.is_empty()));
        let ledger = set("ledger.url")?.filter(|url| url.starts_with("postgres"));
        Ok(JournalSection {
            url: of.text("journal.url")?.to_owned(),
            schema: of.text("journal.schema")?.to_owned(),
            migrate: if of.text("journal.migrate")? == "check" { Migrate::Check } else { Migrate::Auto },
            mismatch: match of.text("journal.mismatch")? {
                "warn" => MismatchRule::Warn,
                _ => MismatchRule::Error,
            },
            event_bytes_max: of.int("journal.event_bytes_max")? as usize,
            allocator: AllocatorSettings {
                // Unset: use PostgreSQL if one is configured; otherwise the object store alone
                // suffices.
                mode: match of.at("journal.allocator")? {
                    value if matches!(value.place, Place::Default | Place::Because(_)) => None,
                    value => Some(value.text().parse()?),
                },
                postgres_url: set("journal.allocator_url")?.or(ledger),
                schema: of.text("journal.allocator_schema")?.to_owned(),
                handler_prefix: set("journal.allocator_prefix")?.unwrap_or_else(|| "write_side".to_owned()),
            },
        })
    }
}

/// The settings of a relay.
pub(super) fn relay_settings(of: &Typed<'_>) -> Result<RelaySettings> {
    let count = |key: &str| of.int(key).map(|number| number as usize);
    let set = |key: &str| of.text(key).map(|text| Some(text.to_owned()).filter(|text| !text.is_empty()));
    let name = of.name("relay.name", RelayName::new)?.map_or_else(|| RelayName::new("relay"), Ok)?;
    let topic = of.name("relay.topic", Topic::new)?.map_or_else(|| Topic::new("events"), Ok)?;
    let mut settings = RelaySettings::new(name, topic);
    settings.owner = of.name("lease.owner", Owner::new)?;
    settings.lease = of.millis("relay.lease_ms")?;
    settings.lookback = of.seconds("relay.lookback_s")?;
    settings.lookback_max = count("relay.lookback_max")?;
    settings.dedup_max = count("relay.dedup_max")?;
    settings.dedup_checkpoint_max = count("relay.dedup_checkpoint_max")?;
    settings.batch_max = count("relay.batch_max")?;
    settings.flush_max = Some(count("relay.flush_max")?);
    settings.flush_timeout = of.seconds("relay.flush_timeout_s")?;
    settings.log_interval = of.seconds("relay.log_interval_s")?;
    settings.behind_max = count("relay.behind_max")?;
    settings.large_bytes = count("relay.large_bytes")?;
    settings.poll = of.millis("relay.poll_ms")?;
    settings.backoff_base = of.millis("relay.backoff_base_ms")?;
    settings.backoff_max = of.millis("relay.backoff_max_ms")?;
    settings.pulse = Some(of.millis("relay.pulse_ms")?).filter(|pulse| !pulse.is_zero());
    settings.source = set("relay.source")?;
    settings.schema = set("relay.schema")?;
    settings.telemetry_prefix = set("telemetry.prefix")?;
    Ok(settings)
}

impl Config {
    /// The settings to open a journal with.
    pub fn journal_settings(&self) -> OpenSettings {
        let journal = JournalSettings {
            mismatch: self.journal.mismatch,
            event_bytes_max: self.journal.event_bytes_max,
            telemetry_prefix: self.prefix(),
            ..JournalSettings::default()
        };
        OpenSettings {
            journal,
            schema: self.journal.schema.clone(),
            migrate: self.journal.migrate,
            acquire_timeout: self.ledger.acquire_timeout,
            allocator: self.journal.allocator.clone(),
            ..OpenSettings::default()
        }
    }

    /// The settings of a relay.
    pub fn relay_settings(&self) -> RelaySettings {
        self.relay.clone()
    }

    /// The URL of the journal, with its password hidden.
    pub fn journal_url_shown(&self) -> String {
        hide_password(&self.journal.url)
    }
}
