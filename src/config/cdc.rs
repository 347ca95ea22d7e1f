//! `cdc.*`: change data capture with Debezium, from PostgreSQL to a topic.

use super::kind::Kind;
use super::table::{DATABASES, Setting, row, unset};
use super::{Config, Typed, hide_password};
use crate::analytics::Source;
use crate::error::{Error, Result};
use crate::id::Topic;

/// The settings of change data capture.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CdcSection {
    /// The URL of Kafka Connect's REST API, if there is one; may contain a password.
    pub connect_url: Option<String>,
    /// The name of the connector.
    pub connector: String,
    /// The topic of all modules and of the pulses.
    pub topic: Topic,
    /// The replication slot.
    pub slot: String,
    /// The database as Debezium reaches it, if that differs from the journal's URL.
    pub database_url: Option<String>,
    /// Its password, or how Connect finds it; empty if none is needed.
    pub password: String,
}

const CONNECT: Kind = Kind::Url(&[("http", "http://HOST:PORT"), ("https", "https://HOST:PORT")]);

/// The rows of the table.
pub(super) const OF_CDC: &[Setting] = &[
    Setting {
        flag: Some("--connect"),
        secret: true,
        ..row("cdc.connect_url", CONNECT, "", "the REST API of Kafka Connect, for `hapax cdc`")
    },
    row("cdc.connector", Kind::Name, "hapax", "the name of Debezium's connector in Kafka Connect"),
    row("cdc.topic", Kind::Name, "hapax-records", "the topic that Debezium publishes all modules to"),
    row("cdc.slot", Kind::Identifier, "hapax_records", "the replication slot that Debezium reads"),
    Setting {
        secret: true,
        ..unset(
            "journal.url",
            row("cdc.database_url", DATABASES, "", "the database and the role as Debezium reaches them"),
        )
    },
    Setting {
        secret: true,
        ..row(
            "cdc.password",
            Kind::Text,
            "",
            "the password of the role in cdc.database_url, best as a reference that Connect resolves: ${file:FILE:KEY} or ${env:NAME}",
        )
    },
];

impl CdcSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let optional = |key: &str| -> Result<Option<String>> {
            Ok(Some(of.text(key)?.to_owned()).filter(|text| !text.is_empty()))
        };
        let topic = of.name("cdc.topic", Topic::new)?;
        Ok(CdcSection {
            connect_url: optional("cdc.connect_url")?,
            connector: of.text("cdc.connector")?.to_owned(),
            topic: topic.map_or_else(|| Topic::new("hapax-records"), Ok)?,
            slot: of.text("cdc.slot")?.to_owned(),
            database_url: optional("cdc.database_url")?,
            password: of.text("cdc.password")?.to_owned(),
        })
    }
}

impl Config {
    /// The database as Debezium reaches it, and the setting that says so.
    pub fn cdc_database_url(&self) -> (&'static str, &str) {
        match &self.cdc.database_url {
            Some(url) => ("cdc.database_url", url),
            None => ("journal.url", &self.journal.url),
        }
    }

    /// The URL of Kafka Connect, with its password hidden.
    pub fn cdc_connect_url_shown(&self) -> Option<String> {
        self.cdc.connect_url.as_deref().map(hide_password)
    }

    /// Refuses Debezium as the source of the read model where it cannot be one.
    pub(super) fn check_source(&self) -> Result<()> {
        if self.analytics.source == Source::Journal {
            return Ok(());
        }
        let journal = &self.journal.url;
        if !journal.starts_with("postgres:") && !journal.starts_with("postgresql:") {
            return Err(Error::Config(format!(
                "analytics.source = debezium needs records in PostgreSQL, and journal.url is {}",
                hide_password(journal)
            )));
        }
        Ok(())
    }
}
