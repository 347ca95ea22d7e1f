//! `hapax project`: keeps a search engine or cache in sync with records; rebuilds and verifies it.

mod run;
mod status;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::config::{Config, hide_password};
use hapax::open::ProjectionUse;
use hapax::projection::{Difference, History, Projection, Reading, rebuild, verify};
use hapax::words::counted;
use hapax::{Journal, Scope};
use serde_json::json;

use crate::cli::{Global, duration};
use crate::exporters::Metrics;
use crate::failure::{self, Failure};
use crate::signal::Gate;
use crate::token::ByArgs;
use crate::verify::{hex, sum, sums};
use crate::{open, print, who};

/// How long a consumer that follows may take to read what was written before something was found missing.
const CATCH_UP: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct ProjectArgs {
    #[command(subcommand)]
    command: ProjectCommand,
}

#[derive(Debug, Subcommand)]
enum ProjectCommand {
    /// Apply the events of records to a projection until a signal, also those that come twice, late or after a crash
    #[command(
        override_usage = "hapax project run --to <URL> [OPTIONS]",
        after_help = "Examples:\n  \
            hapax project run --to cache:redis://localhost\n  \
            hapax project run --to opensearch:http://localhost:9200/records --create --bus kafka://localhost:9092"
    )]
    Run(run::RunArgs),
    /// Rebuild a projection from the journal and its archive, while it serves
    #[command(
        override_usage = "hapax project rebuild --to <URL> [OPTIONS]",
        after_help = "Example: hapax project rebuild --to opensearch:http://localhost:9200/records --archive s3://events/archive"
    )]
    Rebuild(HistoryArgs),
    /// Compare a projection with the records; exit 1 and list what differs
    #[command(
        override_usage = "hapax project verify --to <URL> [OPTIONS]",
        after_help = "Example: hapax project verify --to cache:redis://localhost --wait 10s"
    )]
    Verify(VerifyArgs),
    /// Show whether a projection can be relied on, and how far it has got
    #[command(override_usage = "hapax project status --to <URL> [OPTIONS]")]
    Status(status::StatusArgs),
}

/// Which projection.
#[derive(Debug, Args)]
struct ToArgs {
    /// cache:redis://HOST:PORT or opensearch:http://HOST:PORT/ALIAS (projection.url)
    #[arg(long, value_name = "URL")]
    to: Option<String>,
}

/// Which topic, for whom.
#[derive(Debug, Args)]
struct TopicArgs {
    /// The topic of the records' events (relay.topic)
    #[arg(long)]
    topic: Option<String>,
    /// The scope of the events' effects [default: projection_worker and the projection's place]
    #[arg(long)]
    scope: Option<Scope>,
}

#[derive(Debug, Args)]
struct HistoryArgs {
    #[command(flatten)]
    to: ToArgs,
    /// The archive of the journal: s3://BUCKET/PREFIX or dir:PATH
    #[arg(long, value_name = "URL")]
    archive: Option<String>,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    #[command(flatten)]
    to: ToArgs,
    #[command(flatten)]
    topic: TopicArgs,
    /// How long to wait for changes that are still on their way
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5s")]
    wait: Duration,
    /// List at most this many differences
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
}

pub async fn run(
    global: &Global,
    args: &ProjectArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    match &args.command {
        ProjectCommand::Run(args) => run::run(global, args, gate, metrics).await,
        ProjectCommand::Rebuild(args) => make_anew(global, args).await,
        ProjectCommand::Verify(args) => compare(global, args, None).await,
        ProjectCommand::Status(args) => status::run(global, args).await,
    }
}

impl ToArgs {
    /// The configuration, with this flag and others.
    fn load(&self, global: &Global, others: &[(&str, &str, Option<String>)]) -> Result<Config, Failure> {
        let mut flags = vec![("projection.url", "--to", self.to.clone())];
        flags.extend_from_slice(others);
        let config = global.load_with(&flags)?;
        if config.projection.urls.len() > 1 {
            let message = format!(
                "there are several projections ({}): say which with --to",
                print::escaped(&config.projection_urls_shown().join(", "))
            );
            return Err(Failure::config(message));
        }
        Ok(config)
    }
}

/// Opens the one projection of a command.
async fn projection(config: &Config, purpose: ProjectionUse) -> Result<Arc<dyn Projection>, Failure> {
    let Some(url) = config.projection.urls.first() else {
        return Err(Failure::config(
            "--to is missing: name the projection, as cache:redis://HOST:PORT or opensearch:http://HOST:PORT/ALIAS (or set projection.url)",
        ));
    };
    projection_at(config, url, purpose).await
}

/// Opens a projection.
pub(crate) async fn projection_at(
    config: &Config,
    url: &str,
    purpose: ProjectionUse,
) -> Result<Arc<dyn Projection>, Failure> {
    let mut settings = config.projection_settings();
    settings.purpose = purpose;
    Ok(hapax::open::projection(url, &settings).await?)
}

/// The store of an archive that is there.
async fn archive(
    config: &Config,
    url: Option<&str>,
) -> Result<Option<Arc<dyn hapax::backend::object::Objects>>, Failure> {
    let Some(url) = url else { return Ok(None) };
    if let Some(path) = open::journal_path(url).filter(|path| !path.exists()) {
        return Err(Failure::dependency("unavailable", format!("there is no archive at {}", path.display())));
    }
    Ok(Some(hapax::open::store(url, config.ledger.acquire_timeout).await?))
}

/// A history that is missing something is a promise that cannot be kept.
fn incomplete(error: hapax::Error) -> Failure {
    let is_missing = matches!(error, hapax::Error::NotFound(_));
    let failure = Failure::from(error);
    if is_missing { failure.exits(failure::BROKEN_PROMISE) } else { failure }
}

async fn make_anew(global: &Global, args: &HistoryArgs) -> Result<u8, Failure> {
    let config = args.to.load(global, &[])?;
    let journal: Arc<dyn Journal> = open::existing_journal(global, &config).await?;
    let archive = archive(&config, args.archive.as_deref()).await?;
    let projection = projection(&config, ProjectionUse::Rebuild).await?;
    let records = open::records_of_all(global, &config).await?;
    let generation = config.analytics.generation;
    let mut history = History::open(&*journal, &*records, archive.as_deref(), generation).await?;
    let target = config.projection_urls_shown().concat();
    let from = args.archive.as_deref().map_or_else(String::new, |url| format!("with {}", hide_password(url)));
    who::acts(&config, &args.by, "project.rebuild", &target, &from).await?;
    let rebuilt = rebuild(&*projection, &mut history).await.map_err(incomplete)?;
    if global.json {
        let examples = rebuilt
            .examples
            .iter()
            .map(|(name, reason)| json!({"record": name.to_string(), "reason": reason}));
        print::json(&json!({
            "records": rebuilt.records, "changes": rebuilt.changes, "rejected": rebuilt.rejected,
            "removed": rebuilt.removed, "examples": examples.collect::<Vec<_>>(),
        }))?;
    } else {
        let (changes, records) =
            (counted(rebuilt.changes, "change", "changes"), counted(rebuilt.records, "record", "records"));
        print::line(&format!(
            "{} is rebuilt: {changes} of {records} applied, {} rejected",
            projection.about(),
            rebuilt.rejected
        ))?;
        if rebuilt.removed > 0 {
            let removed = counted(rebuilt.removed, "record", "records");
            print::line(&format!(
                "{removed} of an earlier generation, which the history does not have, removed"
            ))?;
        }
        for (name, reason) in &rebuilt.examples {
            print::line(&format!("rejected: {name}: {}", print::escaped(reason)))?;
        }
    }
    Ok(if rebuilt.rejected == 0 { 0 } else { failure::BROKEN_PROMISE })
}

/// Compares a projection. Also `hapax verify search` and `hapax verify cache`, which take one kind of URL.
pub(crate) async fn compare(global: &Global, args: &VerifyArgs, kind: Option<&str>) -> Result<u8, Failure> {
    let config = args.to.load(global, &[("relay.topic", "--topic", args.topic.topic.clone())])?;
    if let (Some(kind), Some(url)) = (kind, config.projection.urls.first())
        && !url.starts_with(kind)
    {
        let shown = print::escaped(&hide_password(url));
        return Err(Failure::config(format!("{shown} is another kind of projection; --to takes {kind}…")));
    }
    let journal = open::existing_journal(global, &config).await?;
    let records = open::records_of_all(global, &config).await?;
    let projection = projection(&config, ProjectionUse::Run).await?;
    let history = History::open(&*journal, &*records, None, config.analytics.generation).await?;
    let mut verified = verify(&*projection, &history, args.wait).await?;
    if !verified.differences.is_empty() {
        let topic = config.relay.topic.clone();
        let group = config.projector_settings(args.topic.scope.clone(), topic.clone())?.group();
        let about = format!("the group {group} has not read of the topic {topic}");
        let asked = match open::bus_of(global, &config, std::slice::from_ref(&topic)).await {
            Ok(bus) => {
                let reading = Reading::new(&*bus, topic, group, config.relay.name.clone());
                verified.recheck(&*projection, &history, &reading, CATCH_UP).await.map_err(Failure::from)
            }
            Err(failure) => Err(failure),
        };
        if let Err(failure) = asked {
            let reason = print::escaped(failure.message());
            eprintln!(
                "hapax: what is missing may be late; how far the consumer has read is unknown: {reason}"
            );
        } else if verified.differences.values().any(|one| matches!(one, Difference::Late { .. })) {
            eprintln!("hapax: late is what {about}; --scope and --topic name another consumer");
        }
    }
    let count = verified.differences.len() + verified.foreign.len();
    let of_records = verified.differences.iter().map(|(name, what)| (name.to_string(), what.to_string()));
    let foreign = verified
        .foreign
        .iter()
        .map(|(what, reason)| (what.clone(), format!("does not belong there: {reason}")));
    let listed = of_records.chain(foreign).take(args.limit);
    if global.json {
        let listed = listed.map(|(name, what)| json!({"record": name, "difference": what}));
        print::json(&json!({
            "records": verified.records, "differences": count, "moving": verified.moving,
            "listed": listed.collect::<Vec<_>>(),
            "source": sum(verified.source.total()), "projection": sum(verified.projection.total()),
            "sums": sums(&verified.source, ("projection", &verified.projection)),
        }))?;
    } else {
        for (name, what) in listed {
            print::line(&print::escaped(&format!("{name}: {what}")))?;
        }
        let records = counted(verified.records, "record", "records");
        let differ = if count == 0 { "all equal".to_owned() } else { format!("{count} differ") };
        let moving = match verified.moving {
            0 => String::new(),
            moving => format!(", {moving} still in motion"),
        };
        print::line(&format!("{records} compared, {differ}{moving}; sum {}", hex(verified.source.total())))?;
    }
    Ok(if count == 0 { 0 } else { failure::BROKEN_PROMISE })
}
