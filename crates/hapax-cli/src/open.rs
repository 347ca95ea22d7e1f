//! Opening what a command works on: ledger, journal, bus.

use std::path::Path;
use std::sync::Arc;

use hapax::bus::{self, Bus};
use hapax::config::{Config, sqlite_path};
use hapax::{Journal, Ledger, backend, journal};

use crate::failure::Failure;

/// Opens the ledger to work with it; one that is embedded is made if it is missing.
pub async fn ledger(config: &Config) -> Result<Arc<dyn Ledger>, Failure> {
    if sqlite_path(&config.ledger.url).is_some_and(|path| path.starts_with(&config.data_dir)) {
        make_folder(&config.data_dir)?;
    }
    Ok(backend::open(&config.ledger.url, &config.open_settings()).await?)
}

/// Opens the journal to work with it; one that is embedded is made if it is missing.
pub async fn journal(config: &Config) -> Result<Arc<dyn Journal>, Failure> {
    if config.journal.url == "memory:" {
        return Err(Failure::config(
            "a journal in memory would end with this command; use --journal sqlite:FILE",
        ));
    }
    if sqlite_path(&config.journal.url).is_some_and(|path| path.starts_with(&config.data_dir)) {
        make_folder(&config.data_dir)?;
    }
    Ok(journal::open(&config.journal.url, &config.journal_settings()).await?)
}

/// Opens the bus. The embedded one's file is made if it is missing, in the data directory only.
pub async fn bus(config: &Config) -> Result<Arc<dyn Bus>, Failure> {
    if config.bus_url == "memory:" {
        return Err(Failure::config(
            "a bus in memory would be this process's own, and nobody else could reach it; use --bus embedded",
        ));
    }
    if config.bus_url.trim_end_matches(':') == "embedded" {
        make_folder(&config.data_dir)?;
    }
    let mut settings = bus::OpenSettings::default();
    settings.data = Some(config.data_dir.clone());
    Ok(bus::open(&config.bus_url, &settings).await?)
}

fn make_folder(folder: &Path) -> Result<(), Failure> {
    std::fs::create_dir_all(folder)
        .map_err(|e| Failure::dependency("unavailable", format!("{} cannot be made: {e}", folder.display())))
}
