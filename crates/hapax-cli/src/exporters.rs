//! Exports the library's logs to standard error and its metrics to a file.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;

use crate::failure::Failure;
use crate::print;
use crate::traces::Traces;

/// How much to log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Log {
    /// Nothing
    Off,
    /// Errors
    Error,
    /// Also warnings
    Warn,
    /// Also what was done
    Info,
    /// Also how it was done
    Debug,
}

/// How log lines are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// A JSON object per line
    Json,
}

/// The levels for the library and for the libraries below it. hapax itself reports when a server is
/// away or slow, so their warnings (a slow statement with its whole SQL, a line per broken
/// connection) appear only at `debug`.
fn targets(level: Log) -> Targets {
    let level = match level {
        Log::Off => LevelFilter::OFF,
        Log::Error => LevelFilter::ERROR,
        Log::Warn => LevelFilter::WARN,
        Log::Info => LevelFilter::INFO,
        Log::Debug => LevelFilter::DEBUG,
    };
    let others = if level == LevelFilter::DEBUG { level } else { level.min(LevelFilter::ERROR) };
    Targets::new().with_target("hapax", level).with_default(others)
}

/// Shows the library's spans and events on standard error: lines for people, or JSON. Spans also go to
/// a collector of traces, if there is one.
pub fn log(level: Log, json: bool, traces: Option<&Traces>) {
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr);
    let shown = tracing_subscriber::registry().with(traces.map(Traces::layer));
    // Keep a subscriber that is already installed.
    let _ = if json {
        let lines = lines.json().with_writer(|| Visibly(std::io::stderr(), LogFormat::Json));
        shown.with(lines.with_filter(targets(level))).try_init()
    } else {
        let lines = lines.with_writer(|| Visibly(std::io::stderr(), LogFormat::Text)).with_target(false);
        shown.with(lines.with_filter(targets(level))).try_init()
    };
}

/// Writes each event as one line on which everything can be seen: a name in it can neither begin another line nor
/// tell the terminal what to do. Each write is one event.
struct Visibly<W: std::io::Write>(W, LogFormat);

impl<W: std::io::Write> std::io::Write for Visibly<W> {
    fn write(&mut self, event: &[u8]) -> std::io::Result<usize> {
        let text = String::from_utf8_lossy(event);
        let line = text.strip_suffix('\n').unwrap_or(&text);
        let line = match self.1 {
            LogFormat::Text => print::escaped(line),
            LogFormat::Json => print::visible_json(line),
        };
        self.0.write_all(format!("{line}\n").as_bytes())?;
        Ok(event.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// Starts collecting metrics, once in a process.
pub fn recorder(prefix: &str) -> Result<PrometheusHandle, Failure> {
    let handle = PrometheusBuilder::new()
        .install_recorder()
        .map_err(|e| Failure::config(format!("metrics cannot be collected: {e}")))?;
    hapax::telemetry::describe(Some(prefix).filter(|prefix| !prefix.is_empty()));
    Ok(handle)
}

/// Collects metrics and writes them to a file at the end (`consume`: also every few seconds), in
/// Prometheus text format. It is meant for a collector of text files, because most commands end too
/// soon to be scraped.
pub struct Metrics {
    file: PathBuf,
    handle: PrometheusHandle,
}

impl Metrics {
    /// Starts collecting.
    pub fn collect(file: &Path) -> Result<Self, Failure> {
        Ok(Metrics { file: file.to_owned(), handle: recorder("")? })
    }

    /// What renders the metrics.
    pub fn handle(&self) -> PrometheusHandle {
        self.handle.clone()
    }

    /// Writes a temporary file and renames it, so that a collector never reads half of it.
    pub fn write(&self) -> Result<(), Failure> {
        let mut part = self.file.clone().into_os_string();
        part.push(".part");
        std::fs::write(&part, self.handle.render()).and_then(|()| std::fs::rename(&part, &self.file)).map_err(
            |e| Failure::dependency("unavailable", format!("--metrics {}: {e}", self.file.display())),
        )
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::filter::LevelFilter;

    use super::*;

    #[test]
    fn an_event_is_one_line_whatever_is_in_it() {
        use std::io::Write as _;
        let mut lines = Visibly(Vec::new(), LogFormat::Text);
        lines.write_all("WARN id=a\u{1b}[2J\n2026 ERROR forged \u{202e}b \u{9b}31m\n".as_bytes()).unwrap();
        lines.write_all("next 漢\n".as_bytes()).unwrap();
        let text = String::from_utf8(lines.0).unwrap();
        assert_eq!(text, "WARN id=a\\u{1b}[2J\\n2026 ERROR forged \\u{202e}b \\u{9b}31m\nnext 漢\n");
    }

    /// T533: JSON need not escape all that a terminal acts upon.
    #[test]
    fn t533_json_has_escapes_for_what_cannot_be_seen() {
        use std::io::Write as _;
        let id = "a\u{1b}[2J\n\u{7f}\u{9b}31m\u{202e}\u{2028}\u{e0041}漢";
        let mut lines = Visibly(Vec::new(), LogFormat::Json);
        lines.write_all(format!("{}\n", serde_json::json!({ "id": id })).as_bytes()).unwrap();
        let text = String::from_utf8(lines.0).unwrap();
        let escaped = r#"{"id":"a\u001b[2J\n\u007f\u009b31m\u202e\u2028\udb40\udc41漢"}"#;
        assert_eq!(text, format!("{escaped}\n"));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap()["id"], id);
    }

    #[test]
    fn e_what_the_libraries_below_say_is_not_shown_by_default() {
        let shown = |level, target: &str, of| targets(level).would_enable(target, &of);
        for target in ["sqlx::query", "sqlx_core::pool::connection", "hyper::client"] {
            assert!(!shown(Log::Warn, target, tracing::Level::WARN), "{target}");
            assert!(!shown(Log::Info, target, tracing::Level::WARN), "{target}");
            assert!(shown(Log::Debug, target, tracing::Level::DEBUG), "{target}");
        }
        for target in ["hapax", "hapax::kafka", "hapax::backend::postgres::transaction"] {
            assert!(shown(Log::Warn, target, tracing::Level::WARN), "{target}");
            assert!(!shown(Log::Warn, target, tracing::Level::INFO), "{target}");
        }
        assert!(targets(Log::Off).default_level().is_none_or(|level| level == LevelFilter::OFF));
    }
}
