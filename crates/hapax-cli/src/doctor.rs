//! `hapax doctor`: checks ledger, bus, topics, window, journal, keys, records, read model, change data
//! capture and projection at once.

mod stores;

use std::sync::Arc;

use clap::Args;
use hapax::bus::Bus;
use hapax::config::Config;
use hapax::ledger::{Finding, Identity, Level};
use hapax::window::{Window, WindowSettings};
use hapax::{EventId, Ledger, Scope, Topic, consumer};
use serde_json::json;

use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::{open, print};

#[derive(Debug, Args)]
#[command(
    after_help = "Example: hapax doctor --bus kafka://localhost:9092 --topic orders --scope mailer --ledger postgres://localhost/app"
)]
pub struct DoctorArgs {
    /// A topic to check; may be repeated
    #[arg(long)]
    topic: Vec<Topic>,
    /// The scope whose settings to check
    #[arg(long)]
    scope: Option<Scope>,
    /// The window to check (window.url)
    #[arg(long, value_name = "URL")]
    window: Option<String>,
}

/// What a check concludes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Fine,
    Warning,
    /// A promise that cannot be kept.
    Refusal,
    /// The check could not be made.
    Unreachable,
}

impl Verdict {
    pub fn label(self) -> &'static str {
        match self {
            Verdict::Fine => "fine",
            Verdict::Warning => "warning",
            Verdict::Refusal => "refusal",
            Verdict::Unreachable => "unreachable",
        }
    }
}

/// The result of one check: a finding, or a dependency that cannot be reached.
pub struct Looked {
    pub verdict: Verdict,
    pub check: String,
    pub message: String,
}

/// What all checks found.
#[derive(Default)]
pub struct Report {
    pub looked: Vec<Looked>,
    refused: bool,
    unreachable: bool,
}

impl Report {
    fn add(&mut self, finding: &Finding) {
        let level = match finding.level {
            Level::Fine => Verdict::Fine,
            Level::Warning => Verdict::Warning,
            Level::Refusal => Verdict::Refusal,
        };
        self.refused |= finding.level == Level::Refusal;
        self.say(level, finding.check, finding.message.clone());
    }

    fn say(&mut self, verdict: Verdict, check: &str, message: String) {
        self.looked.push(Looked { verdict, check: check.to_owned(), message });
    }

    /// Records a promise that cannot be kept.
    fn refuse(&mut self, check: &str, message: String) {
        self.refused = true;
        self.say(Verdict::Refusal, check, message);
    }

    /// Records a check that could not be made. A mistake in the request itself is a refusal.
    fn failed(&mut self, check: &str, failure: &Failure) {
        if failure.is_dependency() {
            self.unreachable = true;
            self.say(Verdict::Unreachable, check, failure.message().to_owned());
        } else {
            self.refuse(check, failure.message().to_owned());
        }
    }
}

pub async fn run(global: &Global, args: &DoctorArgs) -> Result<u8, Failure> {
    let config = global.load_with(&[("window.url", "--window", args.window.clone())])?;
    let report = examine(global, &config, &args.topic, args.scope.as_ref(), None).await;
    print(global, &report)?;
    Ok(if report.unreachable {
        failure::DEPENDENCY
    } else if report.refused {
        failure::BROKEN_PROMISE
    } else {
        0
    })
}

/// Makes all checks. A ledger in memory is that of the process that asks.
pub async fn examine(
    global: &Global,
    config: &Config,
    wanted: &[Topic],
    scope: Option<&Scope>,
    in_memory: Option<Arc<dyn Ledger>>,
) -> Report {
    let mut report = Report::default();
    let opened = match in_memory {
        Some(ledger) => Ok(ledger),
        None => crate::ledger::open(global, config).await,
    };
    let ledger = match opened {
        Ok(ledger) => {
            report.say(Verdict::Fine, "ledger", format!("{} answers", config.ledger_url_shown()));
            Some(ledger)
        }
        Err(failure) => {
            report.failed("ledger", &failure);
            None
        }
    };
    let bus = match look_at_bus(global, config).await {
        Ok(bus) => {
            let (word, durable) = (bus.capabilities().bus, bus.capabilities().durable);
            let message = format!("{} answers ({word})", config.bus_url_shown());
            report.say(if durable { Verdict::Fine } else { Verdict::Warning }, "bus", message);
            Some(bus)
        }
        Err(failure) => {
            report.failed("bus", &failure);
            None
        }
    };
    let mut topics = Vec::new();
    if let Some(bus) = &bus {
        for topic in wanted {
            match bus.topic(topic).await {
                Ok(Some(_)) => topics.push(topic.clone()),
                Ok(None) => report.failed("topic", &open::no_topic(global, config, topic)),
                Err(error) => report.failed("topic", &error.into()),
            }
        }
    }
    look_together(&mut report, config, scope, topics, ledger.as_deref(), bus.as_deref()).await;
    stores::look(&mut report, global, config).await;
    look_at_cdc(&mut report, config).await;
    look_at_projections(&mut report, config).await;
    report
}

/// Opens the bus and queries it. Does not create a missing embedded bus.
async fn look_at_bus(global: &Global, config: &Config) -> Result<Arc<dyn Bus>, Failure> {
    if let Some(file) = open::embedded_file(config).filter(|file| !file.exists()) {
        let makes = open::makes_topic(global, "TOPIC");
        let message = format!("there is no embedded bus at {}; `{makes}` makes one", file.display());
        return Err(Failure::dependency("unavailable", message));
    }
    let bus = open::bus(config).await?;
    bus.topic(&Topic::new("hapax-doctor")?).await?;
    Ok(bus)
}

/// Checks change data capture where it is used.
#[cfg(all(feature = "postgres", feature = "http"))]
async fn look_at_cdc(report: &mut Report, config: &Config) {
    let is_used =
        config.cdc.connect_url.is_some() || config.analytics.source == hapax::analytics::Source::Debezium;
    if !is_used || !config.journal.url.starts_with("postgres") {
        return;
    }
    match crate::cdc::look::findings(config).await {
        Ok(findings) => findings.iter().for_each(|finding| report.add(finding)),
        Err(failure) => report.failed("cdc", &failure),
    }
}

#[cfg(not(all(feature = "postgres", feature = "http")))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn look_at_cdc(_: &mut Report, _: &Config) {}

/// Opens the window, if there is one, and queries it without the policy that would hide an outage.
async fn look_at_window(config: &Config) -> Result<Option<Arc<dyn Window>>, Failure> {
    let Some(url) = &config.window.url else { return Ok(None) };
    let settings = WindowSettings::new(config.window.epoch.as_str()).ttl(config.window.ttl);
    let nobody = Identity::new(Scope::new("hapax-doctor")?, EventId::new("hapax-doctor")?);
    hapax::open::window(url, settings)?.seen(&[nobody.into()]).await?;
    Ok(config.window(config.window.epoch.as_str())?)
}

/// Opens the projections, if there are any (projection.url). Of several each finding says which it is about.
async fn look_at_projections(report: &mut Report, config: &Config) {
    let urls = &config.projection.urls;
    for url in urls {
        let opened = crate::project::projection_at(config, url, hapax::open::ProjectionUse::Run).await;
        let projection = match opened {
            Ok(projection) => projection,
            Err(failure) => {
                report.failed("projection", &failure);
                continue;
            }
        };
        let findings = projection.check().await.map(|mut findings| {
            if urls.len() > 1 {
                let about = projection.about();
                for found in &mut findings {
                    found.message = format!("{about}: {}", found.message);
                }
            }
            findings
        });
        add_all(report, "projection", findings);
    }
}

/// Checks that involve several parts: topics against the ledger's retention, the window, clocks,
/// settings.
async fn look_together(
    report: &mut Report,
    config: &Config,
    scope: Option<&Scope>,
    topics: Vec<Topic>,
    ledger: Option<&dyn Ledger>,
    bus: Option<&dyn Bus>,
) {
    let window = match look_at_window(config).await {
        Ok(window) => window,
        Err(failure) => {
            report.failed("window", &failure);
            None
        }
    };
    let Some(ledger) = ledger else { return };
    let (Some(bus), false) = (bus, topics.is_empty()) else {
        let mut findings = ledger.check().await;
        if let (Ok(findings), Some(window)) = (&mut findings, &window) {
            findings.extend(window.check(None).await);
        }
        return add_all(report, "ledger", findings);
    };
    let given = scope.cloned();
    let settings = Scope::new("doctor")
        .and_then(|scope| config.consumer_settings(given.unwrap_or(scope), topics))
        .and_then(|settings| settings.check().map(|()| settings));
    let settings = match settings {
        Ok(settings) => settings,
        Err(error) => return report.failed("settings", &error.into()),
    };
    add_all(report, "consumer", consumer::check(bus, ledger, window.as_deref(), &settings).await);
}

fn add_all(report: &mut Report, check: &str, findings: hapax::Result<Vec<Finding>>) {
    match findings {
        Ok(findings) => findings.iter().for_each(|finding| report.add(finding)),
        Err(error) => report.failed(check, &error.into()),
    }
}

fn print(global: &Global, report: &Report) -> Result<(), Failure> {
    if global.json {
        let list = report
            .looked
            .iter()
            .map(|looked| json!({"level": looked.verdict.label(), "check": looked.check, "message": looked.message}));
        return print::json(&json!({"findings": list.collect::<Vec<_>>()}));
    }
    let rows: Vec<_> = report
        .looked
        .iter()
        .map(|looked| {
            [looked.verdict.label().to_owned(), looked.check.clone(), print::escaped(&looked.message)]
        })
        .collect();
    print::table(["level", "check", "finding"], &rows)
}
