//! `analytics.*`: the read model of records.

use super::kind::Kind;
use super::table::{Setting, int, row, unset};
use super::{Config, Typed, hide_password};
use crate::analytics::{FeedSettings, Source};
use crate::error::Result;

/// The settings of the read model.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AnalyticsSection {
    /// The URL of the read model, if there is one.
    pub url: Option<String>,
    /// The consumer group of the feed; `None`: named after the model.
    pub group: Option<String>,
    /// Who publishes the topic that feeds it.
    pub source: Source,
    /// The generation of the source.
    pub generation: u16,
}

const READ_MODELS: Kind = Kind::Url(&[
    ("sqlite", "sqlite:FILE"),
    ("clickhouse", "clickhouse://USER:PASSWORD@HOST:PORT/DATABASE"),
    ("clickhouses", ""),
    ("memory", ""),
]);

/// The rows of the table.
pub(super) const OF_ANALYTICS: &[Setting] = &[
    Setting {
        secret: true,
        unset: "none, since the journal or the bus is not embedded",
        ..row(
            "analytics.url",
            READ_MODELS,
            "",
            "the read model of records: sqlite:FILE or clickhouse://HOST:PORT/DATABASE; unset: sqlite:reads.db in data.dir where journal and bus are embedded",
        )
    },
    unset(
        "hapax-analytics-ID, with the id that is in the model",
        row(
            "analytics.group",
            Kind::Text,
            "",
            "the consumer group of the read model's feed; processes that feed one model share it, and each model has its own",
        ),
    ),
    row(
        "analytics.source",
        Kind::Choice(&["journal", "debezium"]),
        "journal",
        "who publishes the changes that feed the read model: the relay (journal), or Debezium (cdc.topic)",
    ),
    row(
        "analytics.generation",
        int(1, 65_535),
        "1",
        "the generation of the records: raise it when they were restored from a backup",
    ),
];

impl AnalyticsSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        Ok(AnalyticsSection {
            url: Some(of.text("analytics.url")?.to_owned()).filter(|url| !url.is_empty()),
            group: Some(of.text("analytics.group")?.to_owned()).filter(|group| !group.is_empty()),
            source: match of.text("analytics.source")? {
                "debezium" => Source::Debezium,
                _ => Source::Journal,
            },
            generation: of.int("analytics.generation")? as u16,
        })
    }
}

impl Config {
    /// The URL of the read model, with its password hidden.
    pub fn analytics_url_shown(&self) -> Option<String> {
        self.analytics.url.as_deref().map(hide_password)
    }

    /// The settings of the feed of the read model, from the relay's topic or from Debezium's.
    pub fn feed_settings(&self) -> FeedSettings {
        let topic = match self.analytics.source {
            Source::Debezium => &self.cdc.topic,
            Source::Journal => &self.relay.topic,
        };
        let mut settings = FeedSettings::new(topic.clone());
        settings.source = self.analytics.source;
        settings.group = self.analytics.group.as_deref().map(Into::into);
        settings.generation = self.analytics.generation;
        settings.telemetry_prefix = self.prefix();
        settings
    }
}
