//! One typed configuration.
//!
//! Every setting is a row of one [table](SETTINGS). Its value comes from, strongest first: a flag,
//! its `HAPAX_*` variable, the older variable, `hapax.toml`, its default. Variables that disagree,
//! unknown keys and variables, and impossible values are errors that name the place, the value and
//! what is allowed. Every value records where it came from ([`Config::values`]); secrets can come
//! from a file (`HAPAX_LEDGER_URL_FILE`) and are never printed.
//!
//! ```
//! use hapax::config::{Config, Sources};
//! let sources = Sources::new()
//!     .toml("hapax.toml", "[ledger]\nurl = 'sqlite:a.db'\nretention_days = 30")
//!     .env([("HAPAX_LEDGER_URL", "memory:")]);
//! let config = Config::load(&sources).unwrap();
//! assert_eq!(config.ledger.url, "memory:");
//! assert_eq!(config.ledger.retention.as_secs(), 30 * 86_400);
//! ```
//!
//! Configuration uses the settings of every other module. None of them uses configuration.

mod analytics;
mod cdc;
mod consumer;
mod example;
mod file;
mod journal;
mod keys;
mod kind;
mod load;
mod projection;
mod records;
mod scoped;
mod serve;
mod table;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

pub use analytics::AnalyticsSection;
pub use cdc::CdcSection;
pub use consumer::ConsumerSection;
pub use example::example;
pub use journal::JournalSection;
pub use keys::KeysSection;
pub use kind::Kind;
pub use load::{Place, Sources, Value};
pub use projection::ProjectionSection;
pub use records::RecordsSection;
pub use serve::{Secret, ServeSection};
pub use table::{ATTEMPTS_OF_SCOPE, SETTINGS, Setting, setting};

pub use crate::backend::Migrate;
use crate::error::{Error, Result};
use crate::exact::Field;
use crate::guard::{Guard, GuardSettings};
use crate::id::{Owner, Scope};
use crate::ledger::{IdentityRule, MismatchRule, Settings, SweepSettings};
use crate::open::OpenSettings;
use crate::relay::RelaySettings;
pub use crate::secret::hide_password;
use crate::window::{OnOutage, OutageWindow, Window, WindowSettings};

/// All settings, validated.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Config {
    /// The directory of embedded data.
    pub data_dir: PathBuf,
    /// `ledger.*`
    pub ledger: LedgerSection,
    /// `dedup.*`
    pub dedup: DedupSection,
    /// `lease.*`
    pub lease: LeaseSection,
    /// `retry.*`
    pub retry: RetrySection,
    /// `window.*`
    pub window: WindowSection,
    /// `journal.*`
    pub journal: JournalSection,
    /// `keys.*`
    pub keys: KeysSection,
    /// `records.*`
    pub records: RecordsSection,
    /// `analytics.*`
    pub analytics: AnalyticsSection,
    /// `cdc.*`
    pub cdc: CdcSection,
    /// `projection.*`
    pub projection: ProjectionSection,
    /// `relay.*`
    pub relay: RelaySettings,
    /// The URL of the bus; may contain a password.
    pub bus_url: String,
    /// `consumer.*`, besides [`consumer_settings`](Config::consumer_settings)
    pub consumer: ConsumerSection,
    /// `serve.*`
    pub serve: ServeSection,
    /// `telemetry.prefix`
    pub telemetry_prefix: String,
    values: Vec<Value>,
    scoped: scoped::Scoped,
}

/// The ledger's settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LedgerSection {
    /// The URL of the ledger; may contain a password.
    pub url: String,
    /// The PostgreSQL schema.
    pub schema: String,
    /// What to do if the schema is missing or out of date.
    pub migrate: Migrate,
    /// The maximum number of connections.
    pub pool_max: u32,
    /// How long to wait for a connection.
    pub acquire_timeout: Duration,
    /// How long entries stay after they were settled.
    pub retention: Duration,
    /// What makes up an identity.
    pub identity: IdentityRule,
    /// What a reused id leads to.
    pub mismatch: MismatchRule,
    /// The maximum size of metadata.
    pub metadata_bytes_max: usize,
    /// Whether a guard sweeps in the background.
    pub sweep: bool,
    /// How often the sweeper runs.
    pub sweep_interval: Duration,
    /// Whether skipped deliveries are logged, and effects that were not done twice counted.
    pub log_skips: bool,
    /// Where the value of an event is in its payload.
    pub value: Option<Field>,
}

/// The guard's settings.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DedupSection {
    /// The scope of claims that name none.
    pub default_scope: Option<Scope>,
    /// Whether the guard uses the ledger at all.
    pub enabled: bool,
}

/// The settings of leases.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LeaseSection {
    /// How long a lease lasts unless it is extended.
    pub timeout: Duration,
    /// How often it is extended.
    pub heartbeat: Duration,
    /// Name of the lease holder, for humans.
    pub owner: Option<Owner>,
}

/// The settings of retries.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RetrySection {
    /// How many runs an event gets.
    pub attempts_max: u32,
    /// The pause after the first failure.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
}

/// The settings of the window.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WindowSection {
    /// The URL of the window, if there is one; may contain a password.
    pub url: Option<String>,
    /// How long it remembers.
    pub ttl: Duration,
    /// An epoch set manually, in addition to the ledger's own: entries of another epoch are misses.
    pub epoch: String,
    /// What happens while it is unavailable.
    pub outage: OnOutage,
}

impl Config {
    /// Resolves and validates all settings.
    pub fn load(sources: &Sources) -> Result<Self> {
        let values = sources.resolve()?;
        let of = Typed(&values);
        let data_dir = PathBuf::from(of.text("data.dir")?);
        let config = Config {
            ledger: LedgerSection {
                url: of.text("ledger.url")?.to_owned(),
                schema: of.text("ledger.schema")?.to_owned(),
                migrate: if of.text("ledger.migrate")? == "check" { Migrate::Check } else { Migrate::Auto },
                pool_max: of.int("ledger.pool_max")? as u32,
                acquire_timeout: of.millis("ledger.acquire_timeout_ms")?,
                retention: Duration::from_secs(of.int("ledger.retention_days")? * 86_400),
                identity: match of.text("ledger.identity")? {
                    "id_and_time" => IdentityRule::IdAndTime,
                    _ => IdentityRule::Id,
                },
                mismatch: match of.text("ledger.mismatch")? {
                    "warn" => MismatchRule::Warn,
                    _ => MismatchRule::Error,
                },
                metadata_bytes_max: of.int("ledger.metadata_bytes_max")? as usize,
                sweep: of.text("ledger.sweep")? == "true",
                sweep_interval: of.seconds("ledger.sweep_interval_s")?,
                log_skips: of.text("ledger.log_skips")? == "true",
                value: of.name("ledger.value", Field::new)?,
            },
            dedup: DedupSection {
                default_scope: of.name("dedup.default_scope_id", Scope::new)?,
                enabled: of.text("dedup.enabled")? == "true",
            },
            lease: LeaseSection {
                timeout: of.seconds("lease.timeout_s")?,
                heartbeat: of.seconds("lease.heartbeat_s")?,
                owner: of.name("lease.owner", Owner::new)?,
            },
            retry: RetrySection {
                attempts_max: of.int("retry.attempts_max")? as u32,
                backoff_base: of.millis("retry.backoff_base_ms")?,
                backoff_max: of.millis("retry.backoff_max_ms")?,
            },
            window: WindowSection {
                url: Some(of.text("window.url")?.to_owned()).filter(|url| !url.is_empty()),
                ttl: Duration::from_secs(of.int("window.ttl_hours")? * 3600),
                epoch: Some(of.text("window.epoch")?)
                    .filter(|epoch| !epoch.is_empty())
                    .unwrap_or("1")
                    .to_owned(),
                outage: match of.text("window.outage")? {
                    "pause" => OnOutage::Pause,
                    _ => OnOutage::PassThrough,
                },
            },
            journal: JournalSection::of(&of)?,
            keys: KeysSection::of(&of)?,
            records: RecordsSection::of(&of)?,
            analytics: AnalyticsSection::of(&of)?,
            cdc: CdcSection::of(&of)?,
            projection: ProjectionSection::of(&of)?,
            relay: journal::relay_settings(&of)?,
            bus_url: of.text("bus.url")?.to_owned(),
            consumer: ConsumerSection::of(&of)?,
            serve: ServeSection::of(&of)?,
            telemetry_prefix: of.text("telemetry.prefix")?.to_owned(),
            data_dir,
            values,
            scoped: scoped::Scoped::load(sources, &sources.entries()?)?,
        };
        config.check()?;
        Ok(config)
    }

    /// Rejects settings that are impossible together.
    fn check(&self) -> Result<()> {
        if self.lease.heartbeat >= self.lease.timeout {
            return self.impossible("lease.heartbeat_s", "must be shorter than", "lease.timeout_s");
        }
        // Of any scope: they differ in their attempts only.
        let consumer = self.consumer_settings(Scope::new("any")?, Vec::new())?;
        if consumer.heartbeat >= consumer.lease {
            return self.impossible("consumer.heartbeat_s", "must be shorter than", "consumer.lease_s");
        }
        if self.retry.backoff_base > self.retry.backoff_max {
            return self.impossible(
                "retry.backoff_base_ms",
                "must not be longer than",
                "retry.backoff_max_ms",
            );
        }
        if self.serve.admin_listen == Some(self.serve.listen) && self.serve.listen.port() != 0 {
            let of = Typed(&self.values);
            let name = |key: &'static str| match &of.at(key)?.place {
                Place::Flag(flag) if flag != "--set" => Ok(flag.clone()),
                _ => Ok::<_, Error>(key.to_owned()),
            };
            return Err(Error::Config(format!(
                "{} and {} are the same address ({}); the second is for a port of its own",
                name("serve.listen")?,
                name("serve.admin_listen")?,
                self.serve.listen
            )));
        }
        self.check_source()?;
        if self.data_dir.as_os_str().is_empty() {
            return Err(Error::Config(format!("{} is empty", Typed(&self.values).at("data.dir")?.place)));
        }
        Ok(())
    }

    fn impossible(&self, key: &str, relation: &str, other: &str) -> Result<()> {
        let of = Typed(&self.values);
        let (value, other) = (of.at(key)?, of.at(other)?);
        Err(Error::Config(format!(
            "{key} = {} (from {}) {relation} {} = {} (from {})",
            value.text(),
            value.place,
            other.setting.key,
            other.text(),
            other.place
        )))
    }

    /// The prefix of metrics and spans, if one is set.
    fn prefix(&self) -> Option<String> {
        Some(self.telemetry_prefix.clone()).filter(|prefix| !prefix.is_empty())
    }

    /// Every setting with its value and where it came from.
    pub fn values(&self) -> &[Value] {
        &self.values
    }

    /// The settings of single scopes (`consumer.<scope>.max_attempts`), by the key or variable that
    /// set them.
    pub fn scoped_values(&self) -> impl Iterator<Item = (String, &Value)> {
        self.scoped.all()
    }

    /// How many runs an event of a scope gets: `consumer.<scope>.max_attempts`, else `retry.attempts_max`.
    ///
    /// ```
    /// use hapax::config::{Config, Sources};
    /// let config = Config::load(&Sources::new().env([("PROJECTION_WORKER_MAX_RETRIES", "8")])).unwrap();
    /// let attempts = |scope| config.attempts_max(&hapax::Scope::new(scope).unwrap()).unwrap();
    /// assert_eq!((attempts("projection_worker"), attempts("mailer")), (8, 5));
    /// ```
    pub fn attempts_max(&self, scope: &Scope) -> Result<u32> {
        let Some(value) = self.scoped.of(scope)? else { return Ok(self.retry.attempts_max) };
        let text = value.text();
        text.parse().map_err(|_| Error::Config(format!("{} = {text:?} is not a whole number", value.place)))
    }

    /// The URL of the bus, with its password hidden.
    pub fn bus_url_shown(&self) -> String {
        hide_password(&self.bus_url)
    }

    /// The URL of the ledger, with its password hidden.
    pub fn ledger_url_shown(&self) -> String {
        hide_password(&self.ledger.url)
    }

    /// The ledger's own settings.
    pub fn ledger_settings(&self) -> Settings {
        Settings {
            owner: self.lease.owner.clone(),
            identity: self.ledger.identity,
            mismatch: self.ledger.mismatch,
            metadata_bytes_max: self.ledger.metadata_bytes_max,
            ..Settings::default()
        }
    }

    /// The settings to open a ledger with.
    pub fn open_settings(&self) -> OpenSettings {
        OpenSettings {
            ledger: self.ledger_settings(),
            schema: self.ledger.schema.clone(),
            migrate: self.ledger.migrate,
            pool_max: self.ledger.pool_max,
            acquire_timeout: self.ledger.acquire_timeout,
            ..OpenSettings::default()
        }
    }

    /// The settings of a guard.
    pub fn guard_settings(&self) -> GuardSettings {
        let mut guard = GuardSettings::default();
        guard.scope.clone_from(&self.dedup.default_scope);
        guard.enabled = self.dedup.enabled;
        guard.lease = self.lease.timeout;
        guard.heartbeat = self.lease.heartbeat;
        guard.attempts_max = self.retry.attempts_max;
        guard.backoff_base = self.retry.backoff_base;
        guard.backoff_max = self.retry.backoff_max;
        guard.retention = self.ledger.retention;
        guard.sweep = self.ledger.sweep;
        guard.sweep_interval = self.ledger.sweep_interval;
        guard.log_skips = self.ledger.log_skips;
        guard.value.clone_from(&self.ledger.value);
        guard.telemetry_prefix = self.prefix();
        guard
    }

    /// Opens the ledger and makes a guard for it.
    ///
    /// ```
    /// use hapax::config::{Config, Sources};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let sources = Sources::new().env([("HAPAX_LEDGER_URL", "memory:"), ("HAPAX_DEDUP_DEFAULT_SCOPE_ID", "mailer")]);
    /// let guard = Config::load(&sources)?.guard().await?;
    /// assert!(guard.try_claim("order-17-paid").await?.is_claimed());
    /// # Ok(()) }
    /// ```
    pub async fn guard(&self) -> Result<Guard> {
        let ledger = crate::open::ledger_with(&self.ledger.url, &self.open_settings()).await?;
        Guard::with_settings(ledger, self.guard_settings())
    }

    /// Opens the window, if one is configured, with its outage policy. `epoch` is set manually, in
    /// addition to the ledger's own: entries of another epoch are misses.
    pub fn window(&self, epoch: impl Into<String>) -> Result<Option<Arc<dyn Window>>> {
        let Some(url) = &self.window.url else { return Ok(None) };
        let settings = WindowSettings::new(epoch).ttl(self.window.ttl);
        let window = crate::open::window(url, settings)?;
        let prefix = self.prefix();
        Ok(Some(Arc::new(OutageWindow::new(window, self.window.outage).telemetry_prefix(prefix.as_deref()))))
    }

    /// The settings of a sweep, with transactions of 10,000 rows.
    pub fn sweep_settings(&self) -> SweepSettings {
        SweepSettings { retention: self.ledger.retention, batch_max: 10_000, dry_run: false }
    }
}

/// The file of a `sqlite:` URL.
pub fn sqlite_path(url: &str) -> Option<&Path> {
    url.strip_prefix("sqlite:").map(|path| Path::new(path.strip_prefix("//").unwrap_or(path)))
}

/// Values by key, typed. The table has validated their form, so an error here is a bug in this
/// file.
struct Typed<'v>(&'v [Value]);

impl<'v> Typed<'v> {
    fn at(&self, key: &str) -> Result<&'v Value> {
        let found = self.0.iter().find(|value| value.setting.key == key);
        found.ok_or_else(|| Error::Config(format!("{key} is missing from the table of settings")))
    }

    fn text(&self, key: &str) -> Result<&'v str> {
        self.at(key).map(Value::text)
    }

    fn int(&self, key: &str) -> Result<u64> {
        let text = self.text(key)?;
        text.parse().map_err(|_| Error::Config(format!("{key} = {text:?} is not a whole number")))
    }

    fn seconds(&self, key: &str) -> Result<Duration> {
        self.int(key).map(Duration::from_secs)
    }

    fn millis(&self, key: &str) -> Result<Duration> {
        self.int(key).map(Duration::from_millis)
    }

    fn name<T>(&self, key: &str, make: impl Fn(&'v str) -> Result<T>) -> Result<Option<T>> {
        let value = self.at(key)?;
        if value.text().is_empty() {
            return Ok(None);
        }
        make(value.text()).map(Some).map_err(|e| Error::Config(format!("{}: {e}", value.place)))
    }
}
