//! `keys.*`: where the keys of writes are stored, and for how long.

use std::time::Duration;

use super::{Config, Typed, hide_password};
use crate::error::Result;
use crate::open::OpenSettings;

/// The settings of keyed writes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct KeysSection {
    /// The URL of the store of keys; may contain a password.
    pub url: String,
    /// The same with the role that sweeps and lists the keys of all tenants; may contain a password.
    pub maintenance_url: Option<String>,
    /// How long an answer is kept after it was stored.
    pub retention: Duration,
}

impl KeysSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        Ok(KeysSection {
            url: of.text("keys.url")?.to_owned(),
            maintenance_url: Some(of.text("keys.maintenance_url")?.to_owned()).filter(|url| !url.is_empty()),
            retention: Duration::from_secs(of.int("keys.retention_days")? * 86_400),
        })
    }
}

impl Config {
    /// The settings to open a store of keys with: those of the journal, whose database it shares.
    pub fn keys_settings(&self) -> OpenSettings {
        OpenSettings { pool_max: self.ledger.pool_max, ..self.journal_settings() }
    }

    /// The URL of the store of keys, with its password hidden.
    pub fn keys_url_shown(&self) -> String {
        hide_password(&self.keys.url)
    }
}
