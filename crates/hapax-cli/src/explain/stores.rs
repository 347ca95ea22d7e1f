//! The stores that are asked. Makes nothing: a store that is missing or does not answer is a line of the report.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use hapax::analytics::ReadModel;
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::keyed::Keys;
use hapax::open::{OpenSettings, ProjectionUse};
use hapax::projection::Projection;
use hapax::records::Records;
use hapax::{Error, Journal, Ledger, Scope};

use super::explanation::StoreAnswer;
use crate::cli::Global;
use crate::failure::Failure;
use crate::open;

const IN_MEMORY: &str = "it is in memory, where each process has its own";

/// Whom to ask, and what they said besides steps.
pub struct Stores<'c> {
    global: &'c Global,
    config: &'c Config,
    /// Those of a server, which are open already.
    open: Option<Open>,
    pub visibility: Visibility,
    pub answers: Vec<StoreAnswer>,
    /// How many stores could be asked.
    pub there: usize,
    /// Whether other tenants may be named.
    pub names_others: bool,
}

/// What the one who asks may see. Whoever opens the stores may see everything in them; a caller of a server may
/// be bound to a tenant and to scopes.
#[derive(Debug, Clone, Default)]
pub struct Visibility {
    /// Only these scopes; none: all.
    pub scopes: Option<BTreeSet<Scope>>,
    /// Whether other tenants must not be named, nor anything that shows what they have.
    pub is_bound: bool,
}

impl Visibility {
    pub fn sees(&self, scope: &str) -> bool {
        self.scopes.as_ref().is_none_or(|scopes| scopes.iter().any(|known| known.as_str() == scope))
    }
}

/// The stores of a server.
pub struct Open {
    pub ledger: Arc<dyn Ledger>,
    pub journal: Arc<dyn Journal>,
    pub keys: Arc<dyn Keys>,
    /// None where the server has no records.
    pub records: Option<Arc<dyn Records>>,
    /// None where the server has no read model.
    pub read_model: Option<Arc<dyn ReadModel>>,
}

impl<'c> Stores<'c> {
    pub fn new(global: &'c Global, config: &'c Config) -> Self {
        Stores {
            global,
            config,
            open: None,
            visibility: Visibility::default(),
            answers: Vec::new(),
            there: 0,
            names_others: false,
        }
    }

    /// Those of a server, for one of its callers.
    pub fn of_server(global: &'c Global, config: &'c Config, open: Open, visibility: Visibility) -> Self {
        let names_others = !visibility.is_bound;
        Stores { open: Some(open), visibility, names_others, ..Stores::new(global, config) }
    }

    /// One that is open already.
    fn already<T>(&mut self, pick: impl FnOnce(&Open) -> T) -> Option<T> {
        let picked = self.open.as_ref().map(pick)?;
        self.there += 1;
        Some(picked)
    }

    /// Notes what a store said.
    pub fn say(&mut self, store: &'static str, message: impl Into<String>) {
        self.answers.push(StoreAnswer { store, unreachable: false, message: message.into() });
    }

    /// Whether a store that is configured did not answer.
    pub fn is_away(&self) -> bool {
        self.answers.iter().any(|answer| answer.unreachable)
    }

    /// What is there. A store that does not answer is noted; any other failure ends the command.
    pub fn answer<T>(
        &mut self,
        store: &'static str,
        answer: Result<T, impl Into<Failure>>,
    ) -> Result<Option<T>, Failure> {
        let failure = match answer {
            Ok(answer) => return Ok(Some(answer)),
            Err(failure) => failure.into(),
        };
        if !failure.is_dependency() {
            return Err(failure.about(store));
        }
        let message = if self.open.is_some() {
            tracing::warn!(target: "hapax", store, error = failure.message(), "a store did not answer");
            "it does not answer; the server's log says why".to_owned()
        } else {
            format!("it does not answer: {}", failure.message())
        };
        self.answers.push(StoreAnswer { store, unreachable: true, message });
        Ok(None)
    }

    /// What was opened. Tables that nobody has made are not a failure.
    fn opened<T>(&mut self, store: &'static str, opened: Result<T, Error>) -> Result<Option<T>, Failure> {
        let opened = match opened {
            Err(Error::Schema(message)) => {
                self.say(store, message);
                return Ok(None);
            }
            other => self.answer(store, other)?,
        };
        self.there += usize::from(opened.is_some());
        Ok(opened)
    }

    /// Whether a store that may be a file is there.
    fn is_there(&mut self, store: &'static str, url: &str, missing: Option<&Path>) -> bool {
        if url == "memory:" {
            self.say(store, IN_MEMORY);
            return false;
        }
        if let Some(file) = missing {
            self.say(store, format!("not found at {}", file.display()));
            return false;
        }
        true
    }

    pub async fn ledger(&mut self) -> Result<Option<Arc<dyn Ledger>>, Failure> {
        if let Some(open) = self.already(|open| Arc::clone(&open.ledger)) {
            return Ok(Some(open));
        }
        let url = &self.config.ledger.url;
        if !self.is_there("ledger", url, missing_file(url)) {
            return Ok(None);
        }
        let mut settings = as_it_is(self.config.open_settings());
        settings.refuse = false;
        let opened = hapax::open::ledger_with(url, &settings).await;
        self.opened("ledger", opened)
    }

    pub async fn journal(&mut self) -> Result<Option<Arc<dyn Journal>>, Failure> {
        if let Some(open) = self.already(|open| Arc::clone(&open.journal)) {
            return Ok(Some(open));
        }
        let url = &self.config.journal.url;
        if !self.is_there("journal", url, open::missing_journal(url)) {
            return Ok(None);
        }
        let opened = hapax::open::journal_with(url, &as_it_is(self.config.journal_settings())).await;
        self.opened("journal", opened)
    }

    pub async fn keys(&mut self) -> Result<Option<Arc<dyn Keys>>, Failure> {
        if let Some(open) = self.already(|open| Arc::clone(&open.keys)) {
            return Ok(Some(open));
        }
        // The same database, with the role that sees the keys of all tenants.
        let url = self.config.keys.maintenance_url.as_ref().unwrap_or(&self.config.keys.url);
        if !self.is_there("keys", url, missing_file(url)) {
            return Ok(None);
        }
        let mut settings = as_it_is(self.config.keys_settings());
        settings.refuse = false;
        let opened = hapax::open::keys_with(url, &settings).await;
        self.opened("keys", opened)
    }

    pub async fn records(&mut self) -> Result<Option<Arc<dyn Records>>, Failure> {
        if let Some(open) = self.open.as_ref().map(|open| open.records.clone()) {
            self.there += usize::from(open.is_some());
            if open.is_none() {
                self.say("records", "this server has none");
            }
            return Ok(open);
        }
        if let Err(error) = self.config.records_in_one_database() {
            self.say("records", error.to_string());
            return Ok(None);
        }
        let url = &self.config.journal.url;
        if !self.is_there("records", url, missing_file(url)) {
            return Ok(None);
        }
        let opened = open::existing_records(self.config).await;
        self.opened("records", opened)
    }

    pub fn read_model(&mut self) -> Result<Option<Arc<dyn ReadModel>>, Failure> {
        if let Some(open) = self.open.as_ref().map(|open| open.read_model.clone()) {
            self.there += usize::from(open.is_some());
            if open.is_none() {
                self.say("read model", "this server has none");
            }
            return Ok(open);
        }
        let Some(url) = &self.config.analytics.url else {
            self.say("read model", "not configured: analytics.url is unset");
            return Ok(None);
        };
        if !self.is_there("read model", url, missing_file(url)) {
            return Ok(None);
        }
        let opened = open::existing_read_model(self.global, self.config);
        self.answer("read model", opened)
    }

    /// The search indices and caches, if there are any: most have none. A server has none open either, as only
    /// `hapax project` writes to them.
    pub async fn projections(&mut self) -> Result<Vec<Arc<dyn Projection>>, Failure> {
        let mut projections = Vec::new();
        for url in &self.config.projection.urls {
            projections.extend(self.projection(url).await?);
        }
        Ok(projections)
    }

    async fn projection(&mut self, url: &str) -> Result<Option<Arc<dyn Projection>>, Failure> {
        match crate::project::projection_at(self.config, url, ProjectionUse::Run).await {
            // A wrong setting, or an index that nobody has made: everything else is told all the same.
            Err(failure) if !failure.is_dependency() => {
                let message = if self.open.is_some() {
                    tracing::warn!(target: "hapax", error = failure.message(), "a projection was not opened");
                    "it cannot be opened; the server's log says why"
                } else {
                    failure.message()
                };
                self.say("projection", message);
                Ok(None)
            }
            opened => {
                self.there += usize::from(opened.is_ok());
                self.answer("projection", opened)
            }
        }
    }
}

/// The file of a store, if it is not there.
fn missing_file(url: &str) -> Option<&Path> {
    sqlite_path(url).filter(|file| !file.exists())
}

/// Nothing is made, and nothing brought up to date.
fn as_it_is(mut settings: OpenSettings) -> OpenSettings {
    (settings.migrate, settings.pool_max) = (Migrate::Check, 1);
    settings
}
