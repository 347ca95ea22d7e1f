//! What the library says through its facades, made visible: logs on standard error, metrics in a file.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::filter::LevelFilter;

use crate::failure::Failure;

/// How much is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// Nothing
    Off,
    /// What went wrong
    Error,
    /// And what may
    Warn,
    /// And what was done
    Info,
    /// And how
    Debug,
}

/// Shows the library's spans and events on standard error: lines for people, or JSON.
pub fn log(level: Log, json: bool) {
    let level = match level {
        Log::Off => LevelFilter::OFF,
        Log::Error => LevelFilter::ERROR,
        Log::Warn => LevelFilter::WARN,
        Log::Info => LevelFilter::INFO,
        Log::Debug => LevelFilter::DEBUG,
    };
    let lines = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr);
    // A subscriber that is there already stays.
    let _ = if json { lines.json().try_init() } else { lines.with_target(false).try_init() };
}

/// Collects metrics and writes them to a file at the end (`consume`: every few seconds too), in Prometheus' text format: for a
/// collector of text files, since most commands do not live long enough to be scraped.
pub struct Metrics {
    file: PathBuf,
    handle: PrometheusHandle,
}

impl Metrics {
    /// Begins to collect.
    pub fn collect(file: &Path) -> Result<Self, Failure> {
        let handle = PrometheusBuilder::new()
            .install_recorder()
            .map_err(|e| Failure::config(format!("--metrics: {e}")))?;
        hapax::telemetry::describe(None);
        Ok(Metrics { file: file.to_owned(), handle })
    }

    /// Writes the file beside itself and renames it, so that a collector never reads half of it.
    pub fn write(&self) -> Result<(), Failure> {
        let mut part = self.file.clone().into_os_string();
        part.push(".part");
        std::fs::write(&part, self.handle.render()).and_then(|()| std::fs::rename(&part, &self.file)).map_err(
            |e| Failure::dependency("unavailable", format!("--metrics {}: {e}", self.file.display())),
        )
    }
}
