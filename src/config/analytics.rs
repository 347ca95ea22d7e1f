//! `analytics.*`: the read model of records.

use super::kind::Kind;
use super::table::{Setting, int, row, unset};
use super::{Config, Typed, hide_password};
use crate::analytics::FeedSettings;
use crate::error::Result;

/// The settings of the read model.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AnalyticsConfig {
    /// The URL of the read model, if there is one.
    pub url: Option<String>,
    /// The generation of the source.
    pub generation: u16,
}

const READ_MODELS: Kind = Kind::Url(&[("sqlite", "sqlite:FILE"), ("memory", "")]);

/// The rows of the table.
pub(super) const OF_ANALYTICS: &[Setting] = &[
    unset(
        "none, since the journal or the bus is not embedded",
        row(
            "analytics.url",
            READ_MODELS,
            "",
            "sqlite:FILE: the read model of records; unset: sqlite:reads.db in data.dir where journal and bus are embedded",
        ),
    ),
    row(
        "analytics.generation",
        int(1, 65_535),
        "1",
        "the generation of the records: raise it when they were restored from a backup",
    ),
];

impl AnalyticsConfig {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        Ok(AnalyticsConfig {
            url: Some(of.text("analytics.url")?.to_owned()).filter(|url| !url.is_empty()),
            generation: of.int("analytics.generation")? as u16,
        })
    }
}

impl Config {
    /// The URL of the read model, with its password hidden.
    pub fn analytics_url_shown(&self) -> Option<String> {
        self.analytics.url.as_deref().map(hide_password)
    }

    /// The settings of the feed of the read model, from the relay's topic.
    pub fn feed_settings(&self) -> FeedSettings {
        let mut settings = FeedSettings::new(self.relay.topic.clone());
        settings.generation = self.analytics.generation;
        settings
    }
}
