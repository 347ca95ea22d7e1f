//! What requests work on.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use hapax::access::{Access, Actor, ApiToken, Authenticator, NewToken, RateLimit, Role, TokenState};
use hapax::analytics::ReadModel;
use hapax::bus::Bus;
use hapax::config::{Config, sqlite_path};
use hapax::journal::Appender;
use hapax::keyed::Keys;
use hapax::open::Pools;
use hapax::{Error, Guard, Journal, Ledger};
use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::{Semaphore, watch};

use super::background::RelayStatus;
use super::beside::Watched;
use super::checks::Checked;
use super::feeding::FeedStatus;
use super::groups::RecentGroups;
use super::health::Readiness;
use super::overview::{Counted, Listeners};
use super::store::Store;
use super::waiting::Waits;
use crate::cli::Global;
use crate::exporters::{self, Metrics};
use crate::failure::Failure;
use crate::open;

/// How many connections look up callers and write audit rows.
const ACCESS_CONNECTIONS: u32 = 4;

/// Everything a route may use.
pub struct App {
    /// The flags that it was started with.
    pub global: Global,
    pub config: Config,
    pub ledger: Arc<dyn Ledger>,
    pub guard: Guard,
    pub journal: Arc<dyn Journal>,
    /// Gathers the appends of concurrent requests.
    pub appender: Appender,
    pub keys: Arc<dyn Keys>,
    /// The keys again, with the role that looks after those of all tenants.
    pub kept_keys: Arc<dyn Keys>,
    pub records: Store,
    /// Who may call, and what operators did.
    pub access: Authenticator,
    /// The same again, with the role that sweeps.
    pub kept_access: Arc<dyn Access>,
    /// What one token may ask for.
    pub rate: RateLimit,
    /// The read model of records, if there is one.
    pub reads: Option<Arc<dyn ReadModel>>,
    /// The bus, if the relay runs here.
    pub bus: Option<Arc<dyn Bus>>,
    /// The bus of a demo, whose relay is another process.
    pub watched: Option<Watched>,
    pub relay: RelayStatus,
    pub feed: FeedStatus,
    pub readiness: Readiness,
    /// What pages show, and who listens.
    pub counted: Counted,
    pub listeners: Listeners,
    pub waits: Waits,
    pub groups: RecentGroups,
    pub checked: Checked,
    pub metrics: PrometheusHandle,
    /// A permit for each request that runs, whether or not its client still waits; of the listener for
    /// everybody, and of the one for operators.
    pub work: [Arc<Semaphore>; 2],
    /// True once the server is about to stop, and others should be asked instead.
    pub leaving: AtomicBool,
    /// True once the server stops: what waits for long ends then.
    pub stopping: watch::Receiver<bool>,
}

/// What else runs in the process.
#[derive(Debug, Clone, Copy)]
pub struct With {
    pub relay: bool,
    pub sweepers: bool,
    pub analytics: bool,
}

/// What handlers get as their state.
pub type Shared = Arc<App>;

impl App {
    /// Opens everything. Creates what is embedded and missing.
    pub async fn open(
        global: &Global,
        config: Config,
        metrics: Option<&Metrics>,
        stopping: watch::Receiver<bool>,
        with: With,
        watched: Option<Watched>,
    ) -> Result<(Shared, Option<Arc<dyn Bus>>), Failure> {
        let metrics = match metrics {
            Some(metrics) => metrics.handle(),
            None => exporters::recorder(&config.telemetry_prefix)?,
        };
        super::store::check_roles(&config).await?;
        let pools = Pools::shared();
        let ledger = open::ledger(&config, &pools).await?;
        let mut settings = config.guard_settings();
        settings.sweep &= with.sweepers;
        let guard = Guard::with_settings(Arc::clone(&ledger), settings)?;
        let journal = open::journal(&config, &pools).await?;
        open::make_room(&config, sqlite_path(&config.keys.url), "keys")?;
        let mut of_keys = config.keys_settings();
        of_keys.pools = pools.clone();
        let keys = hapax::open::keys_with(&config.keys.url, &of_keys).await?;
        super::store::check_keys(&config, &pools).await?;
        let kept_keys = open::kept_keys(&config, &keys, &pools).await?;
        let records = Store::open(&config, &pools).await?;
        // Who calls is looked up apart: it does not wait for requests that hold the connections.
        let mut of_access = config.keys_settings();
        of_access.pool_max = of_access.pool_max.min(ACCESS_CONNECTIONS);
        let access = hapax::open::access_with(&config.keys.url, &of_access).await?;
        let kept_access = open::kept_access(&config, &access, &pools).await?;
        let access = Authenticator::new(access);
        let rate = RateLimit::per_second(config.serve.rate_per_s);
        let bus = if with.relay { Some(open::bus_for_relay(&config).await?) } else { None };
        let reads = open::read_model(&config).await?;
        let appender = Appender::new(Arc::clone(&journal));
        let relay = RelayStatus::default();
        let work = [(); 2].map(|()| Arc::new(Semaphore::new(config.serve.connections_max)));
        let app = App {
            global: global.clone(),
            config,
            ledger,
            guard,
            journal,
            appender,
            keys,
            kept_keys,
            records,
            access,
            kept_access,
            rate,
            reads,
            bus: bus.clone(),
            watched,
            relay,
            feed: FeedStatus::default(),
            readiness: Readiness::default(),
            counted: Counted::default(),
            listeners: Listeners::default(),
            waits: Waits::default(),
            groups: RecentGroups::default(),
            checked: Checked::default(),
            metrics,
            work,
            leaving: AtomicBool::new(false),
            stopping,
        };
        Ok((Arc::new(app), bus))
    }

    /// Stores the first token, if one is configured and was not stored before. A token that was revoked
    /// or rotated since stays as it is.
    pub async fn import_bootstrap_token(&self) -> Result<(), Failure> {
        let text = self.config.serve.bootstrap_token.trim();
        if text.is_empty() {
            return Ok(());
        }
        let token = ApiToken::parse(text).map_err(|error| {
            let message = format!("serve.bootstrap_token: {error}; `hapax token generate` makes one");
            Failure::config(message)
        })?;
        let about = NewToken::new("bootstrap", Role::Admin);
        let by = Actor::new("serve.bootstrap_token", "the server started with it");
        match self.access.store().create(&token, &about, &by).await {
            Ok(entry) if entry.state == TokenState::Live => {}
            Ok(entry) => {
                tracing::warn!(target: "hapax", id = %entry.id, state = %entry.state, "the bootstrap token is not live; it is left as it is");
            }
            Err(Error::Conflict { .. }) => {
                tracing::warn!(target: "hapax", id = %token.id(), "the bootstrap token was rotated; the configured one is no longer valid");
            }
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// Waits until no request runs, also none whose client has gone. Connections have ended before, so
    /// that no other begins.
    pub async fn finished(&self) {
        for work in &self.work {
            let all = u32::try_from(self.config.serve.connections_max).unwrap_or(u32::MAX);
            let _ = work.acquire_many(all).await; // nobody closes it
        }
    }

    /// The bus whose topics are looked at, and these.
    pub fn looked_at(&self) -> Option<Watched> {
        let topics = vec![self.config.relay.topic.clone()];
        self.watched.clone().or_else(|| self.bus.clone().map(|bus| Watched { bus, topics }))
    }

    /// The backends, for people.
    pub fn backends(&self) -> String {
        let relay = match &self.bus {
            Some(bus) => format!("relay to {} on {}", self.config.relay.topic, bus.capabilities().bus),
            None => "no relay".to_owned(),
        };
        format!(
            "ledger {}, journal {}, keys {}, {relay}",
            self.ledger.capabilities().backend,
            self.journal.capabilities().backend,
            self.keys.capabilities().backend
        )
    }
}

/// Returns when the server stops.
pub async fn stopped(stopping: &mut watch::Receiver<bool>) {
    let _ = stopping.wait_for(|stopping| *stopping).await; // whoever says so is gone: it stops too
}
