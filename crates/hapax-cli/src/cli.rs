//! The flags that all commands share, and the list of commands.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use hapax::config::{Config, Sources, hide_password};

use crate::exporters::{Log, LogFormat};
use crate::failure::Failure;

/// Every event takes effect once.
#[derive(Debug, Parser)]
#[command(
    name = "hapax",
    version,
    about = "Every event takes effect once: consume a topic, serve records and claims over HTTP, catch duplicates, look into a ledger, make and read ids",
    subcommand_help_heading = "Commands",
    after_help = "Exit codes: 0 done; 1 a promise or verification failed; 2 usage or configuration; \
                  3 a dependency is unavailable; 4 input rejected; 130 and 143 signals.\n\n\
                  Examples: hapax demo\n          hapax filter --id /event_id events.jsonl"
)]
pub struct Cli {
    #[command(flatten)]
    pub global: Global,
    #[command(subcommand)]
    pub command: Command,
}

/// Flags of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub struct Global {
    /// Read this configuration file instead of ./hapax.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Where embedded data lives (data.dir)
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<String>,
    /// Which ledger: memory:, sqlite:FILE, postgres://… or redis://… (ledger.url)
    #[arg(long, global = true, value_name = "URL")]
    pub ledger: Option<String>,
    /// Which journal: sqlite:FILE, postgres://…, s3://BUCKET/PREFIX or dir:PATH (journal.url)
    #[arg(long, global = true, value_name = "URL")]
    pub journal: Option<String>,
    /// Which bus: embedded, embedded:FILE or kafka://HOST:PORT (bus.url)
    #[arg(long, global = true, value_name = "URL")]
    pub bus: Option<String>,
    /// Set any setting that `hapax config show` lists; may be repeated
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// How much to log on standard error
    #[arg(long, global = true, value_name = "LEVEL", value_enum, default_value = "warn")]
    pub log: Log,
    /// How the log is written [default: text, or json with --json]
    #[arg(long, global = true, value_name = "FORMAT", value_enum)]
    pub log_format: Option<LogFormat>,
    /// Write metrics to this file at the end (consume: also every 5 seconds), in Prometheus text
    /// format
    #[arg(long, global = true, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Use JSON: results on standard output, counts and errors on standard error
    #[arg(long, global = true)]
    pub json: bool,
}

impl Global {
    /// Loads the configuration from flags, environment, file and defaults.
    pub fn load(&self) -> Result<Config, Failure> {
        self.load_with(&[])
    }

    /// The same, with flags of one command: key, flag, value.
    pub fn load_with(&self, flags: &[(&str, &str, Option<String>)]) -> Result<Config, Failure> {
        let config = Config::load(&self.sources(flags))?;
        if config.data_dir.is_file() {
            let said = if self.data.is_some() { "--data" } else { "data.dir" };
            let message = format!("{said} {} is a file; it must be a directory", config.data_dir.display());
            return Err(Failure::config(message));
        }
        Ok(config)
    }

    /// The sources of settings.
    pub fn sources(&self, flags: &[(&str, &str, Option<String>)]) -> Sources {
        let places = self.places().map(|(key, flag, value)| (key, flag, value.cloned()));
        let mut sources = Sources::new();
        for (key, flag, value) in flags.iter().cloned().chain(places) {
            if let Some(value) = value {
                sources = sources.flag(key, flag, value);
            }
        }
        for pair in &self.set {
            sources = match pair.split_once('=') {
                Some((key, value)) => sources.flag(key.trim(), "--set", value),
                None => sources.problem(format!("--set {pair:?} is not KEY=VALUE")),
            };
        }
        sources.of_process(self.config.as_deref())
    }

    /// Those of `flags` that were given, as command-line text (` --data d`), for hints: without
    /// them the command would work on something else. Leaves out passwords.
    pub fn given(&self, flags: &[&str]) -> String {
        let mut text = String::new();
        if let Some(config) = &self.config {
            text.extend([" --config ", &quoted(&config.display().to_string())]);
        }
        for (_, flag, value) in self.places() {
            if let Some(value) = value.filter(|_| flags.contains(&flag)) {
                let value = if flag == "--data" { value.clone() } else { hide_password(value) };
                text.extend([" ", flag, " ", &quoted(&value)]);
            }
        }
        text
    }

    /// The flags that locate things: key, flag, value.
    fn places(&self) -> [(&'static str, &'static str, Option<&String>); 4] {
        [
            ("data.dir", "--data", self.data.as_ref()),
            ("ledger.url", "--ledger", self.ledger.as_ref()),
            ("journal.url", "--journal", self.journal.as_ref()),
            ("bus.url", "--bus", self.bus.as_ref()),
        ]
    }
}

/// Quotes a word for the shell.
pub fn quoted(text: &str) -> String {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"./_-:@,+=".contains(&b);
    if !text.is_empty() && text.bytes().all(plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', "'\\''"))
}

/// Global flags that a command does not use; it hides them.
#[derive(Debug, Args)]
pub struct NoPlaces {
    #[arg(long, hide = true, global = true)]
    data: Option<String>,
    #[arg(long, hide = true, global = true)]
    ledger: Option<String>,
    #[arg(long, hide = true, global = true)]
    journal: Option<String>,
    #[arg(long, hide = true, global = true)]
    bus: Option<String>,
}

impl NoPlaces {
    /// The first of them that was given anyway.
    pub fn given(&self) -> Option<&'static str> {
        let flags = [
            ("--data", &self.data),
            ("--ledger", &self.ledger),
            ("--journal", &self.journal),
            ("--bus", &self.bus),
        ];
        flags.into_iter().find(|(_, value)| value.is_some()).map(|(flag, _)| flag)
    }
}

// The descriptions of commands are on their arguments, together with the long help.
#[derive(Debug, Subcommand)]
pub enum Command {
    #[cfg(unix)]
    Demo(crate::demo::DemoArgs),
    #[cfg(unix)]
    #[command(hide = true)]
    DemoWorker(crate::demo::WorkerArgs),
    Consume(Box<crate::consume::ConsumeArgs>),
    Produce(crate::produce::ProduceArgs),
    /// Append events to a journal, read, sweep and archive them
    Journal(Box<crate::journal::JournalArgs>),
    /// Create modules of records, and check whether they are protected
    Modules(crate::modules::ModulesArgs),
    /// Publish a journal to a bus: every event at least once, each aggregate's in order
    Relay(Box<crate::relay::RelayArgs>),
    /// Keep a search engine or cache in sync with records; rebuild and verify it
    Project(Box<crate::project::ProjectArgs>),
    Serve(Box<crate::serve::ServeArgs>),
    Top(crate::top::TopArgs),
    Plan(crate::plan::PlanArgs),
    Probe(Box<crate::probe::ProbeArgs>),
    /// Query the read model of records: each record is counted once, as of a time that is shown
    Query(Box<crate::query::QueryArgs>),
    /// Rebuild the read model while it answers
    Analytics(crate::analytics::AnalyticsArgs),
    /// Prove that a read model, a search index or a cache equals the records, without pausing anything
    Verify(Box<crate::verify::VerifyArgs>),
    /// Stream records from PostgreSQL to a topic with Debezium
    Cdc(Box<crate::cdc::CdcArgs>),
    Explain(Box<crate::explain::ExplainArgs>),
    Stats(Box<crate::stats::StatsArgs>),
    Erase(Box<crate::erase::EraseArgs>),
    /// List dead letters, run them again or drop them
    Dead(crate::letters::DeadArgs),
    /// List events that wait behind something unresolved, and release them
    Parked(crate::letters::ParkedArgs),
    /// Check ledger, bus, topics, window and projection; exit 1 if a promise cannot be kept, 3 if one of them does not answer
    Doctor(crate::doctor::DoctorArgs),
    Filter(crate::filter::FilterArgs),
    /// Generate, derive and inspect event ids
    Id(crate::id::IdArgs),
    /// Show the configuration
    Config(crate::config::ConfigArgs),
    /// List and sweep idempotency keys; resolve those whose outcome is unknown
    Keys(Box<crate::keys::KeysArgs>),
    Completions(crate::completions::CompletionsArgs),
    /// Inspect and maintain a ledger
    Ledger(crate::ledger::LedgerArgs),
    /// Create, list, rotate and revoke the server's API tokens
    Token(crate::token::TokenArgs),
    /// Show who did what on the server, and why
    Audit(crate::token::AuditArgs),
}

/// A parser of whole numbers from `least` to `most`. clap's own ranges tell a user "0 is not in 1..=10".
pub fn between<N>(least: N, most: N) -> impl Fn(&str) -> Result<N, String> + Clone + Send + Sync + 'static
where
    N: std::str::FromStr + std::fmt::Display + PartialOrd + Copy + Send + Sync + 'static,
{
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("it must be {least} to {most}"))
    }
}

/// Parses a number of partitions.
pub fn partitions(text: &str) -> Result<i32, String> {
    let number = text.parse().ok().filter(|number| (1..=10_000).contains(number));
    number.ok_or_else(|| "a topic has 1 to 10000 partitions".to_owned())
}

/// Parses a time such as `90s`, `15m`, `24h`, `7d` or `500ms`.
pub fn duration(text: &str) -> Result<std::time::Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let unit_ms = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => return Err("write a whole number and ms, s, m, h or d, for example 7d".to_owned()),
    };
    let number: u64 = number.parse().map_err(|_| format!("{number:?} is not a whole number"))?;
    match number.checked_mul(unit_ms) {
        Some(ms) if ms > 0 && ms <= 36_500 * 86_400_000 => Ok(std::time::Duration::from_millis(ms)),
        _ => Err("it must be more than 0 and at most 36500d".to_owned()),
    }
}
