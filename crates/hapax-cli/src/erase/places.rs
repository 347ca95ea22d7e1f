//! The stores that may have something of a subject, and what is out of reach.

use std::collections::BTreeSet;
use std::sync::Arc;

use hapax::access::Access;
use hapax::analytics::{ReadModel, Source};
use hapax::bus::Bus;
use hapax::config::{Config, Migrate, ProjectionSection, sqlite_path};
use hapax::erase::Eraser;
use hapax::open::{OpenSettings, ProjectionUse};
use hapax::projection::Projection;
use hapax::records::{ModuleSlug, Records, Roles};
use hapax::{Error, Journal, Ledger, Scope, Topic};

use crate::cli::Global;
use crate::failure::Failure;
use crate::{open, project};

/// What is opened. A store that nobody has made yet has nothing, and is not made.
pub struct Places {
    pub erasers: Vec<Arc<dyn Eraser>>,
    pub ledger: Option<Arc<dyn Ledger>>,
    pub journal: Option<Arc<dyn Journal>>,
    pub records: Option<Arc<dyn Records>>,
    pub modules: Vec<ModuleSlug>,
    pub model: Option<Arc<dyn ReadModel>>,
    pub projections: Vec<Arc<dyn Projection>>,
    /// Scopes of projections that were not opened: these may have something.
    pub unopened: Vec<Scope>,
    /// A bus whose topics only their retention empties.
    pub bus: Option<Arc<dyn Bus>>,
    /// Its topics that carry payloads of records: the relay's, Debezium's if the read model is fed by that, and earlier ones.
    pub topics: Vec<Topic>,
    /// What erasing does not reach, a sentence each.
    pub beyond: Vec<String>,
}

/// What is named on the command line.
pub struct Named<'n> {
    /// Projections besides those of the configuration.
    pub projections: &'n [String],
    /// Scopes of projections that are no more.
    pub ended: &'n [Scope],
    /// Topics besides those of the configuration.
    pub topics: &'n [Topic],
    /// Whether stores that cannot erase are left out.
    pub skip: bool,
}

/// What always is.
const BEYOND: [&str; 2] = [
    "backups, archives of the journal, dead letter topics on Kafka, and what handlers made of the events",
    "names: the tenant, ids of records and events, aggregates and idempotency keys stay, as do kinds, seqs and times",
];

pub fn as_it_is(mut settings: OpenSettings) -> OpenSettings {
    (settings.migrate, settings.pool_max, settings.refuse) = (Migrate::Check, 2, false);
    settings
}

/// What was opened; tables that nobody has made are nothing.
pub fn there<T>(opened: Result<T, Error>) -> Result<Option<T>, Failure> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(Error::Schema(message)) if message.starts_with("there ") => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Whether a URL names a file that is not there, or memory.
pub fn is_missing(url: &str) -> bool {
    url == "memory:" || sqlite_path(url).is_some_and(|file| !file.exists())
}

impl Places {
    /// Opens them. A store that cannot erase is refused, or skipped and named among what is out of reach.
    pub async fn open(global: &Global, config: &Config, named: &Named<'_>) -> Result<Self, Failure> {
        let mut places = Places {
            erasers: Vec::new(),
            ledger: None,
            journal: None,
            records: None,
            modules: Vec::new(),
            model: None,
            projections: Vec::new(),
            unopened: Vec::new(),
            bus: None,
            topics: Vec::new(),
            beyond: BEYOND.map(str::to_owned).into(),
        };
        places.open_erasers(config, named.skip).await?;
        if !is_missing(&config.ledger.url) {
            let opened =
                hapax::open::ledger_with(&config.ledger.url, &as_it_is(config.open_settings())).await;
            places.ledger = there(opened)?;
        }
        places.open_records(config).await?;
        if config.analytics.url.as_deref().is_some_and(|url| !is_missing(url)) {
            let model = open::existing_read_model(global, config)?;
            // It connects with the first question.
            places.model = there(model.partitions().await)?.map(|_| model);
        }
        if config.analytics.url.as_deref().is_some_and(|url| url.starts_with("clickhouse")) {
            let message = "ClickHouse: parts that were replaced stay on its disks for old_parts_lifetime (8 minutes by default)";
            places.beyond.push(message.to_owned());
        }
        places.open_projections(config, named).await?;
        places.open_bus(config, named.topics).await?;
        Ok(places)
    }

    /// Opens those that are named, and looks for others: whoever projects claims in the ledger, under a scope that
    /// says where to.
    async fn open_projections(&mut self, config: &Config, named: &Named<'_>) -> Result<(), Failure> {
        let urls: BTreeSet<&String> = config.projection.urls.iter().chain(named.projections).collect();
        let mut opened = BTreeSet::new();
        for url in urls {
            opened.insert(ProjectionSection::scope_of(url)?);
            let projection = project::projection_at(config, url, ProjectionUse::Run).await?;
            self.beyond.push(format!(
                "{}: its server keeps replaced documents until it merges or frees them",
                projection.about()
            ));
            self.projections.push(projection);
        }
        let Some(ledger) = &self.ledger else { return Ok(()) };
        let known = ledger.scopes().await?;
        for scope in known.into_iter().filter(ProjectionSection::is_scope) {
            if opened.contains(&scope) {
                continue;
            }
            let is_over = named.ended.contains(&scope);
            let says = if is_over { "which was said to be no more" } else { "which was not opened" };
            self.beyond.push(format!("the projection of the scope {scope}, {says}"));
            if !is_over {
                self.unopened.push(scope);
            }
        }
        Ok(())
    }

    async fn open_erasers(&mut self, config: &Config, skip: bool) -> Result<(), Failure> {
        let mut urls = vec![
            (config.journal.url.clone(), config.journal.schema.clone()),
            (config.keys.url.clone(), config.journal.schema.clone()),
            (config.ledger.url.clone(), config.ledger.schema.clone()),
        ];
        let read_model = config.analytics.url.iter().filter(|url| sqlite_path(url).is_some());
        urls.extend(read_model.map(|url| (url.clone(), String::new())));
        let bus = open::embedded_file(config).map(|file| format!("sqlite:{}", file.display()));
        urls.extend(bus.map(|url| (url, String::new())));
        let mut seen = BTreeSet::new();
        for (url, schema) in urls {
            if is_missing(&url) {
                continue;
            }
            let file =
                sqlite_path(&url).map(|file| std::fs::canonicalize(file).unwrap_or_else(|_| file.to_owned()));
            let place = file.map_or_else(|| format!("{url} {schema}"), |file| file.display().to_string());
            if !seen.insert(place) {
                continue;
            }
            match hapax::open::eraser(&url, &schema).await {
                Ok(eraser) => self.erasers.push(eraser),
                Err(Error::Unsupported(message)) if skip => self.beyond.push(message),
                Err(Error::Unsupported(message)) => {
                    let message =
                        format!("{message}. --skip-unsupported erases everywhere else; nothing was changed");
                    return Err(Error::Unsupported(message).into());
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    async fn open_records(&mut self, config: &Config) -> Result<(), Failure> {
        let url = &config.journal.url;
        if is_missing(url) || open::missing_journal(url).is_some() {
            return Ok(());
        }
        let settings = as_it_is(config.journal_settings());
        self.journal = there(hapax::open::journal_with(url, &settings).await)?;
        if self.journal.is_none() || config.records_in_one_database().is_err() {
            return Ok(());
        }
        let Some(modules) = there(hapax::open::modules_with(url, &settings, &Roles::default()).await)? else {
            return Ok(());
        };
        self.modules = modules.modules().await?.into_iter().map(|module| module.slug).collect();
        self.records = there(open::existing_records(config).await)?;
        Ok(())
    }

    async fn open_bus(&mut self, config: &Config, named: &[Topic]) -> Result<(), Failure> {
        if !config.bus_url.starts_with("kafka") {
            return match named.first() {
                // All topics of the embedded bus are erased.
                Some(topic) => Err(Failure::input(format!("--topic {topic}: the bus is not Kafka"))),
                None => Ok(()),
            };
        }
        let bus = open::bus(config).await?;
        for topic in named {
            if bus.topic(topic).await?.is_none() {
                return Err(Failure::input(format!("--topic {topic}: there is no such topic")));
            }
        }
        // What the read model was fed from before a setting was changed.
        let known = match &self.model {
            Some(model) => model.partitions().await?,
            None => Vec::new(),
        };
        let earlier: BTreeSet<Topic> =
            known.into_iter().map(|known| known.partition.topic).chain(named.iter().cloned()).collect();
        // The relay publishes every event, also where Debezium feeds the read model.
        let mut topics = vec![(&config.relay.topic, "")];
        if config.analytics.source == Source::Debezium {
            topics.push((&config.cdc.topic, " (deletions carry the row before)"));
        }
        topics.dedup_by_key(|(topic, _)| *topic);
        for topic in &earlier {
            if topics.iter().all(|(known, _)| *known != topic) {
                topics.push((topic, " to it until another was configured"));
            }
        }
        let generation = config.analytics.generation;
        if generation > 1 {
            self.beyond.push(format!(
                "topics on Kafka of generations before {generation}, unless they are listed here: name each with --topic until it is gone"
            ));
        }
        for (topic, before) in topics {
            let Some(info) = bus.topic(topic).await? else { continue };
            let kept = match info.retention {
                Some(retention) => format!("for {} s", retention.as_secs()),
                None => "for ever".to_owned(),
            };
            self.beyond
                .push(format!("topic {topic} on Kafka, which keeps what was published{before} {kept}"));
            self.topics.push(topic.clone());
        }
        self.bus = Some(bus);
        Ok(())
    }

    /// The store of audit rows. Its tables are made if they are missing and may be: nothing is erased without a row.
    pub async fn audit(config: &Config) -> Result<Arc<dyn Access>, Failure> {
        if config.keys.url == "memory:" {
            return Err(Failure::config("keys.url is memory:, so no audit row would stay; name a database"));
        }
        open::make_room(config, sqlite_path(&config.keys.url), "audit")?;
        Ok(hapax::open::access_with(&config.keys.url, &config.keys_settings()).await?)
    }
}
