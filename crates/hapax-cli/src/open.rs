//! Opens what a command works on: ledger, journal, bus, read model.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use hapax::access::Access;
use hapax::analytics::ReadModel;
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::bus::{Bus, TopicSettings};
use hapax::config::{Config, sqlite_path};
use hapax::keyed::Keys;
use hapax::open::Pools;
use hapax::records::{Records, Snapshot};
use hapax::{Journal, Ledger, Topic, open};

use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

/// The flags that select the bus.
const OF_BUS: [&str; 2] = ["--data", "--bus"];

/// Opens the ledger for work; creates an embedded one if it is missing.
pub async fn ledger(config: &Config, pools: &Pools) -> Result<Arc<dyn Ledger>, Failure> {
    make_room(config, sqlite_path(&config.ledger.url), "ledger")?;
    let mut settings = config.open_settings();
    settings.pools = pools.clone();
    Ok(open::ledger_with(&config.ledger.url, &settings).await?)
}

/// Opens the read model of records, if there is one; creates its file or its tables if they are missing. A
/// server that is away is waited for by the feed; one that refuses, or has other tables, ends the start.
pub async fn read_model(config: &Config) -> Result<Option<Arc<dyn ReadModel>>, Failure> {
    let Some(url) = &config.analytics.url else { return Ok(None) };
    make_room(config, sqlite_path(url), "read model")?;
    let model = open::read_model_for(url, config.analytics.generation)?;
    match model.partitions().await {
        Err(error) if error.is_retryable() => {
            tracing::warn!(target: "hapax", error = %error.chain(), "read model unavailable; the feed is waiting for it");
        }
        other => drop(other?),
    }
    Ok(Some(model))
}

/// Opens the read model to look into it. A missing one is not created.
pub fn existing_read_model(global: &Global, config: &Config) -> Result<Arc<dyn ReadModel>, Failure> {
    let Some(url) = &config.analytics.url else {
        let message =
            "there is no read model: analytics.url is unset, and the journal or the bus is not embedded";
        return Err(Failure::config(message));
    };
    if let Some(file) = sqlite_path(url).filter(|file| !file.exists()) {
        let flags = global.given(&["--data"]);
        let message = format!("there is no read model at {}; `hapax{flags} serve` makes one", file.display());
        return Err(Failure::dependency("unavailable", message));
    }
    Ok(open::existing_read_model(url)?)
}

/// Opens the journal to append to it or to relay it; creates an embedded one if it is missing.
pub async fn journal(config: &Config, pools: &Pools) -> Result<Arc<dyn Journal>, Failure> {
    make_room(config, journal_path(&config.journal.url), "journal")?;
    open_journal(config, pools).await
}

/// Opens the journal to inspect or maintain it. A missing one is a mistake in the name, so it is
/// not created.
pub async fn existing_journal(global: &Global, config: &Config) -> Result<Arc<dyn Journal>, Failure> {
    if let Some(path) = missing_journal(&config.journal.url) {
        let flags = global.given(&["--data", "--journal"]);
        let message =
            format!("there is no journal at {}; `hapax{flags} journal append` makes one", path.display());
        return Err(Failure::dependency("unavailable", message));
    }
    open_journal(config, &Pools::default()).await
}

/// How many connections the role has that looks after all tenants.
pub const MAINTENANCE_CONNECTIONS: u32 = 2;

/// With the role that looks after all tenants. It makes nothing.
fn maintenance_settings(config: &Config, pools: &Pools) -> open::OpenSettings {
    let mut settings = config.keys_settings();
    settings.migrate = open::Migrate::Check;
    (settings.pool_max, settings.pools) = (MAINTENANCE_CONNECTIONS, pools.clone());
    settings
}

/// The keys, with the role that looks after those of all tenants (keys.maintenance_url).
pub async fn kept_keys(
    config: &Config,
    keys: &Arc<dyn Keys>,
    pools: &Pools,
) -> Result<Arc<dyn Keys>, Failure> {
    let Some(url) = &config.keys.maintenance_url else { return Ok(Arc::clone(keys)) };
    Ok(open::keys_with(url, &maintenance_settings(config, pools)).await?)
}

/// Who may call and what operators did, with the role that looks after all tenants, if one is named:
/// audit rows are swept by it.
pub async fn kept_access(
    config: &Config,
    access: &Arc<dyn Access>,
    pools: &Pools,
) -> Result<Arc<dyn Access>, Failure> {
    let Some(url) = &config.keys.maintenance_url else { return Ok(Arc::clone(access)) };
    Ok(open::access_with(url, &maintenance_settings(config, pools)).await?)
}

/// Opens the records of all tenants to read them, with the role that looks after all of them, if one is
/// named (keys.maintenance_url). Missing ones are not created.
pub async fn records_of_all(global: &Global, config: &Config) -> Result<Arc<dyn Snapshot>, Failure> {
    config.records_in_one_database()?;
    let flags = global.given(&["--data", "--journal"]);
    if let Some(file) = sqlite_path(&config.journal.url).filter(|file| !file.exists()) {
        let message = format!(
            "there is no journal, and so no record, at {}; `hapax{flags} modules create SLUG` makes one",
            file.display()
        );
        return Err(Failure::dependency("unavailable", message));
    }
    let url = config.keys.maintenance_url.as_ref().unwrap_or(&config.journal.url);
    let opened = open::snapshot_with(url, &maintenance_settings(config, &Pools::default())).await;
    opened.map_err(|error| Failure::from(error).with_flags(&flags))
}

/// Opens records to look at them. Makes nothing.
pub async fn existing_records(config: &Config) -> hapax::Result<Arc<dyn Records>> {
    let settings = config.journal_settings();
    match sqlite_path(&config.journal.url) {
        Some(path) => {
            let journal = SqliteJournal::open_existing(path, settings.journal)?;
            Ok(Arc::new(SqliteRecords::open_existing(&journal)?))
        }
        None => existing_postgres_records(config, settings).await,
    }
}

#[cfg(feature = "postgres")]
async fn existing_postgres_records(
    config: &Config,
    settings: open::OpenSettings,
) -> hapax::Result<Arc<dyn Records>> {
    use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgRecords, PgRecordsSettings};
    let mut of_journal = PgJournalSettings::from(settings.journal);
    of_journal.schema = settings.schema;
    of_journal.acquire_timeout = settings.acquire_timeout;
    (of_journal.migrate, of_journal.pool_max, of_journal.refuse) = (open::Migrate::Check, 1, false);
    let journal = PgJournal::connect(&config.journal.url, of_journal).await?;
    let mut of_records = PgRecordsSettings::default();
    of_records.accept_bypass = true; // looking is always allowed
    Ok(Arc::new(PgRecords::open(&journal, of_records).await?))
}

#[cfg(not(feature = "postgres"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn existing_postgres_records(_: &Config, _: open::OpenSettings) -> hapax::Result<Arc<dyn Records>> {
    Err(hapax::Error::NotBuiltIn { what: "PostgreSQL", feature: "postgres" })
}

/// Where a journal in a file or a directory would be, if it is not there.
pub fn missing_journal(url: &str) -> Option<&Path> {
    journal_path(url).filter(|path| {
        // An empty directory is not a journal yet.
        let has_files = || std::fs::read_dir(path).is_ok_and(|mut files| files.next().is_some());
        !(if path.is_dir() { has_files() } else { path.exists() })
    })
}

/// The file or directory of a journal, if it has one.
pub fn journal_path(url: &str) -> Option<&Path> {
    let directory =
        || url.strip_prefix("dir:").map(|path| Path::new(path.strip_prefix("//").unwrap_or(path)));
    sqlite_path(url).or_else(directory)
}

async fn open_journal(config: &Config, pools: &Pools) -> Result<Arc<dyn Journal>, Failure> {
    if config.journal.url == "memory:" {
        return Err(Failure::config(
            "a journal in memory would end with this command; use --journal sqlite:FILE",
        ));
    }
    let mut settings = config.journal_settings();
    // The pool may be that of ledger and keys, which have the same limit.
    (settings.pool_max, settings.pools) = (config.ledger.pool_max, pools.clone());
    Ok(open::journal_with(&config.journal.url, &settings).await?)
}

/// Opens the bus. Creates the file of an embedded one if it is missing.
pub async fn bus(config: &Config) -> Result<Arc<dyn Bus>, Failure> {
    if config.bus_url == "memory:" {
        return Err(Failure::config(
            "a bus in memory would be this process's own, and nobody else could reach it; use --bus embedded",
        ));
    }
    make_room(config, embedded_file(config).as_deref(), "bus")?;
    let mut settings = open::OpenSettings::default();
    settings.data = Some(config.data_dir.clone());
    Ok(open::bus_with(&config.bus_url, &settings).await?)
}

/// Opens the bus to work on a topic. With `create`, creates a missing topic with that many
/// partitions; otherwise creates nothing.
pub async fn bus_with(config: &Config, topic: &Topic, create: Option<i32>) -> Result<Arc<dyn Bus>, Failure> {
    if create.is_none() && embedded_file(config).is_some_and(|file| !file.exists()) {
        return Err(missing(config, topic, "--create PARTITIONS"));
    }
    let bus = bus(config).await?;
    if let Some(partitions) = create {
        bus.create_topic(topic, TopicSettings::new(partitions)).await?;
    }
    match bus.topic(topic).await? {
        Some(_) => Ok(bus),
        None => Err(missing(config, topic, "--create PARTITIONS")),
    }
}

/// The partitions of a topic that the server makes on an embedded bus.
const PARTITIONS: i32 = 4;

/// Opens the bus for the relay of a server. Makes a missing topic on an embedded bus; on a server's bus
/// its owner decides about partitions and replicas.
pub async fn bus_for_relay(config: &Config) -> Result<Arc<dyn Bus>, Failure> {
    let topic = &config.relay.topic;
    let bus = bus(config).await?;
    if bus.topic(topic).await?.is_some() {
        return Ok(bus);
    }
    if embedded_file(config).is_none() {
        return Err(missing(config, topic, "`hapax relay run --create PARTITIONS --once`"));
    }
    bus.create_topic(topic, TopicSettings::new(PARTITIONS)).await?;
    Ok(bus)
}

/// Opens the bus to read topics, which must exist. Creates nothing.
pub async fn bus_of(global: &Global, config: &Config, topics: &[Topic]) -> Result<Arc<dyn Bus>, Failure> {
    if let (Some(topic), Some(file)) = (topics.first(), embedded_file(config))
        && !file.exists()
    {
        return Err(no_topic(global, config, topic));
    }
    let bus = bus(config).await?;
    for topic in topics {
        if bus.topic(topic).await?.is_none() {
            return Err(no_topic(global, config, topic));
        }
    }
    Ok(bus)
}

/// A topic is missing: names the bus that was queried, and the command that creates the topic
/// there.
pub fn no_topic(global: &Global, config: &Config, topic: &Topic) -> Failure {
    missing(config, topic, &format!("`{}`", makes_topic(global, topic.as_str())))
}

/// The command that creates a topic on the configured bus.
pub fn makes_topic(global: &Global, topic: &str) -> String {
    format!("hapax{} produce --topic {topic} --create PARTITIONS", global.given(&OF_BUS))
}

fn missing(config: &Config, topic: &Topic, makes: &str) -> Failure {
    let url = print::escaped(&config.bus_url_shown());
    let bus = match embedded_file(config) {
        Some(file) => format!("{url} ({})", file.display()),
        None => url,
    };
    Failure::config(format!("there is no topic {topic} on the bus {bus}; {makes} makes it"))
}

/// The file of an embedded bus.
pub fn embedded_file(config: &Config) -> Option<PathBuf> {
    match config.bus_url.split_once(':').unwrap_or((&config.bus_url, "")) {
        ("embedded", "") => Some(config.data_dir.join(open::EMBEDDED_FILE)),
        ("embedded", path) => Some(path.strip_prefix("//").unwrap_or(path).into()),
        _ => None,
    }
}

/// Creates the data directory if one of our files goes there. Any other directory must exist,
/// because a missing one is more likely a mistake in the name.
pub fn make_room(config: &Config, file: Option<&Path>, what: &str) -> Result<(), Failure> {
    let Some(file) = file else { return Ok(()) };
    let folder = file.parent().filter(|folder| !folder.as_os_str().is_empty());
    let Some(folder) = folder.filter(|folder| !folder.is_dir()) else { return Ok(()) };
    if folder != config.data_dir {
        let message = format!(
            "there is no directory {} for the {what} {}; make it first",
            folder.display(),
            file.display()
        );
        return Err(Failure::config(message));
    }
    make_private_directory(folder)
        .map_err(|e| Failure::dependency("unavailable", format!("{} cannot be made: {e}", folder.display())))
}

/// Makes a directory, and those above it, that only their owner may look into.
pub fn make_private_directory(path: &Path) -> std::io::Result<()> {
    let mut private = std::fs::DirBuilder::new();
    private.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut private, 0o700);
    private.create(path)
}
