//! `journal.*` and `relay.*`: where events are stored, and how they get to the bus.

use std::time::Duration;

use super::{Config, Migrate, Place, Typed, hide_password};
use crate::backend::object::AllocatorSettings;
use crate::error::Result;
use crate::id::{RelayName, Topic};
use crate::journal::JournalSettings;
use crate::ledger::MismatchRule;
use crate::open::OpenSettings;
use crate::relay::RelaySettings;

/// The journal's settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct JournalConfig {
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

/// The relay's settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RelayConfig {
    /// The relay's name.
    pub name: RelayName,
    /// The topic it publishes to.
    pub topic: Topic,
    /// How long leadership lasts unless it is renewed.
    pub lease: Duration,
    /// How far it looks back; zero means not at all.
    pub lookback: Duration,
    /// How many events it looks back at per batch.
    pub lookback_max: usize,
    /// How many published ids it remembers.
    pub dedup_max: usize,
    /// How many of them its checkpoint stores.
    pub dedup_checkpoint_max: usize,
    /// How many events it reads and publishes per checkpoint.
    pub batch_max: usize,
    /// How many records it publishes before it waits for acknowledgements.
    pub flush_max: usize,
    /// How long it waits for acknowledgements.
    pub flush_timeout: Duration,
    /// How often it logs counts; zero means never.
    pub log_interval: Duration,
    /// How many aggregates may be behind, not counting parked ones.
    pub behind_max: usize,
    /// A record of more bytes than this is the last of its aggregate in its flush.
    pub large_bytes: usize,
    /// How long to wait before reading a journal again that gave no notification.
    pub poll: Duration,
    /// The pause after the first failure.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// The CloudEvents source; if unset, the journal's id.
    pub source: Option<String>,
    /// The CloudEvents dataschema, if any.
    pub schema: Option<String>,
}

impl JournalConfig {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let set = |key: &str| of.text(key).map(|text| Some(text.to_owned()).filter(|text| !text.is_empty()));
        let ledger = set("ledger.url")?.filter(|url| url.starts_with("postgres"));
        Ok(JournalConfig {
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

impl RelayConfig {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let count = |key: &str| of.int(key).map(|number| number as usize);
        let seconds = |key: &str| of.int(key).map(Duration::from_secs);
        let millis = |key: &str| of.int(key).map(Duration::from_millis);
        let set = |key: &str| of.text(key).map(|text| Some(text.to_owned()).filter(|text| !text.is_empty()));
        Ok(RelayConfig {
            name: of.name("relay.name", RelayName::new)?.map_or_else(|| RelayName::new("relay"), Ok)?,
            topic: of.name("relay.topic", Topic::new)?.map_or_else(|| Topic::new("events"), Ok)?,
            lease: millis("relay.lease_ms")?,
            lookback: seconds("relay.lookback_s")?,
            lookback_max: count("relay.lookback_max")?,
            dedup_max: count("relay.dedup_max")?,
            dedup_checkpoint_max: count("relay.dedup_checkpoint_max")?,
            batch_max: count("relay.batch_max")?,
            flush_max: count("relay.flush_max")?,
            flush_timeout: seconds("relay.flush_timeout_s")?,
            log_interval: seconds("relay.log_interval_s")?,
            behind_max: count("relay.behind_max")?,
            large_bytes: count("relay.large_bytes")?,
            poll: millis("relay.poll_ms")?,
            backoff_base: millis("relay.backoff_base_ms")?,
            backoff_max: millis("relay.backoff_max_ms")?,
            source: set("relay.source")?,
            schema: set("relay.schema")?,
        })
    }
}

impl Config {
    /// The settings to open a journal with.
    pub fn journal_settings(&self) -> OpenSettings {
        let journal = JournalSettings {
            mismatch: self.journal.mismatch,
            event_bytes_max: self.journal.event_bytes_max,
            telemetry_prefix: Some(self.telemetry_prefix.clone()).filter(|prefix| !prefix.is_empty()),
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
        let relay = &self.relay;
        let mut settings = RelaySettings::new(relay.name.clone(), relay.topic.clone());
        settings.owner.clone_from(&self.lease.owner);
        settings.lease = relay.lease;
        settings.lookback = relay.lookback;
        settings.lookback_max = relay.lookback_max;
        settings.dedup_max = relay.dedup_max;
        settings.dedup_checkpoint_max = relay.dedup_checkpoint_max;
        settings.batch_max = relay.batch_max;
        settings.flush_max = Some(relay.flush_max);
        settings.flush_timeout = relay.flush_timeout;
        settings.log_interval = relay.log_interval;
        settings.behind_max = relay.behind_max;
        settings.large_bytes = relay.large_bytes;
        settings.poll = relay.poll;
        settings.backoff_base = relay.backoff_base;
        settings.backoff_max = relay.backoff_max;
        settings.source.clone_from(&relay.source);
        settings.schema.clone_from(&relay.schema);
        settings.telemetry_prefix = Some(self.telemetry_prefix.clone()).filter(|prefix| !prefix.is_empty());
        settings
    }

    /// The URL of the journal, with its password hidden.
    pub fn journal_url_shown(&self) -> String {
        hide_password(&self.journal.url)
    }
}
