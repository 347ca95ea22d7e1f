//! `records.*`: the roles that work on records in PostgreSQL.

use super::{Config, Typed};
use crate::error::{Error, Result};
use crate::records::Roles;

/// The settings of records.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RecordsSection {
    /// The PostgreSQL roles besides the owner.
    pub roles: Roles,
    /// Accepts a role that bypasses row security, for development.
    pub accept_bypass: bool,
}

impl RecordsSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let role = |key: &str| -> Result<Option<String>> {
            Ok(Some(of.text(key)?.to_owned()).filter(|role| !role.is_empty()))
        };
        Ok(RecordsSection {
            roles: Roles { app: role("records.app_role")?, maintenance: role("records.maintenance_role")? },
            accept_bypass: of.text("records.accept_bypass")? == "true",
        })
    }
}

impl Config {
    /// Refuses records whose keys and journal are in two databases: a write could not commit them as
    /// one.
    pub fn records_in_one_database(&self) -> Result<()> {
        let journal = &self.journal.url;
        if !journal.starts_with("sqlite:") && !journal.starts_with("postgres") {
            return Err(Error::Unsupported(format!(
                "records need a journal in SQLite or PostgreSQL, and journal.url is {}",
                super::hide_password(journal)
            )));
        }
        if *journal == self.keys.url {
            return Ok(());
        }
        Err(Error::Config(format!(
            "records need their keys in the database of the journal, which commits them as one: keys.url is {}, and journal.url \
             is {}; leave keys.url unset",
            self.keys_url_shown(),
            super::hide_password(journal)
        )))
    }
}
