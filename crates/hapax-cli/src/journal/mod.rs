//! `hapax journal`: appends, reads and maintains events.

mod append;
mod read;

use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::config::{Config, hide_password};
use hapax::journal::{self, ArchiveSettings, JournalSweep};
use hapax::open::Pools;
use hapax::words::counted;
use hapax::{Journal, Owner};
use serde_json::json;

use crate::cli::Global;
use crate::failure::Failure;
use crate::token::ByArgs;
use crate::{open, print, who};

#[derive(Debug, Args)]
pub struct JournalArgs {
    #[command(subcommand)]
    command: JournalCommand,
}

#[derive(Debug, Subcommand)]
enum JournalCommand {
    /// Append events from JSON Lines: numbered within their aggregate, each id once
    #[command(after_help = "Examples:\n  \
        hapax journal append --aggregate order-17 --expected 3 events.jsonl\n  \
        hapax journal append --aggregate-at /order_id --kind-at /type events.jsonl")]
    Append(append::AppendArgs),
    /// Print events: of one aggregate, by id, or all in the journal's order
    #[command(after_help = "Examples:\n  \
        hapax journal read --aggregate order-17 --from 3 --payload\n  \
        hapax journal read --after 1700 --limit 50 --json")]
    Read(read::ReadArgs),
    /// Show how much the journal holds, and how far each relay has got
    Stat,
    /// Remove events that every relay has published
    #[command(after_help = "Example: hapax journal sweep --older-than 90d --dry-run")]
    Sweep(SweepArgs),
    /// Move events that every relay has published into files of an object store
    #[command(
        override_usage = "hapax journal archive --to <URL> --older-than <TIME>\n       [OPTIONS]",
        after_help = "Example: hapax journal archive --to s3://events/archive --older-than 90d --yes"
    )]
    Archive(ArchiveArgs),
}

#[derive(Debug, Args)]
struct ArchiveArgs {
    /// The destination: s3://BUCKET/PREFIX or dir:PATH
    #[arg(long, value_name = "URL")]
    to: String,
    /// Only events appended longer ago than this
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    older_than: Duration,
    /// Keep the events in the journal too
    #[arg(long)]
    keep: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct SweepArgs {
    /// Only events appended longer ago than this
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    older_than: Duration,
    /// Only count them
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

pub async fn run(global: &Global, args: &JournalArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let journal = match &args.command {
        JournalCommand::Append(_) => open::journal(&config, &Pools::default()).await?,
        _ => open::existing_journal(global, &config).await?,
    };
    match &args.command {
        JournalCommand::Append(args) => append::run(global, &config, &*journal, args).await,
        JournalCommand::Read(args) => read::run(global, &*journal, args).await,
        JournalCommand::Stat => stat(global, &*journal).await,
        JournalCommand::Sweep(args) => sweep(global, &config, &*journal, args).await,
        JournalCommand::Archive(args) => archive(global, &config, &*journal, args).await,
    }
}

async fn stat(global: &Global, journal: &dyn Journal) -> Result<u8, Failure> {
    let stat = journal.stat().await?;
    let relays = journal.relays().await?;
    if global.json {
        let relays = relays.iter().map(|state| {
            json!({
                "relay": state.relay.as_str(),
                "position": state.checkpoint.as_ref().map(|checkpoint| checkpoint.position.to_string()),
            })
        });
        print::json(&json!({
            "journal": journal.id(), "backend": journal.capabilities().backend,
            "events": stat.events, "aggregates": stat.aggregates, "exact": stat.exact,
            "oldest_at": stat.oldest_at.map(|at| at.to_string()),
            "last": stat.last.as_ref().map(ToString::to_string),
            "relays": relays.collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }
    let about = if stat.exact { "" } else { "about " };
    print::line(&format!("journal     {} ({})", journal.id(), journal.capabilities().backend))?;
    print::line(&format!("events      {about}{}", stat.events))?;
    print::line(&format!("aggregates  {about}{}", stat.aggregates))?;
    let oldest = stat.oldest_at.map_or_else(|| "-".to_owned(), |at| at.to_string());
    print::line(&format!("oldest      {oldest}"))?;
    let last = stat.last.map_or_else(|| "-".to_owned(), |last| last.to_string());
    print::line(&format!("last        {last}"))?;
    for state in relays {
        let position = state.checkpoint.map(|checkpoint| checkpoint.position).unwrap_or_default();
        print::line(&format!("relay       {} is at {position}", state.relay))?;
    }
    Ok(0)
}

async fn sweep(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &SweepArgs,
) -> Result<u8, Failure> {
    let mut settings = JournalSweep::new(args.older_than);
    if !args.dry_run && !args.yes {
        print::can_ask("this removes events for good")?;
        if !print::asked("remove published events for good?")? {
            return Err(Failure::declined("nothing was removed"));
        }
    }
    settings.dry_run = args.dry_run;
    let mut swept = 0;
    if args.dry_run {
        settings.batch_max = usize::MAX >> 1;
        swept = journal.sweep(&settings).await?;
    } else {
        let details = format!("older than {} s", args.older_than.as_secs());
        who::acts(config, &args.by, "journal.sweep", &config.journal_url_shown(), &details).await?;
        loop {
            let step = journal.sweep(&settings).await?;
            swept += step;
            if step == 0 {
                break;
            }
        }
    }
    if global.json {
        print::json(&json!({"dry_run": args.dry_run, "removed": swept}))?;
    } else {
        let would = if args.dry_run { "would be " } else { "" };
        print::line(&format!("{} {would}removed", counted(swept, "event", "events")))?;
    }
    Ok(0)
}

async fn archive(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &ArchiveArgs,
) -> Result<u8, Failure> {
    if !args.keep && !args.yes {
        print::can_ask("this removes archived events from the journal (unless --keep)")?;
        if !print::asked("remove events from the journal once they are archived?")? {
            return Err(Failure::declined("nothing was archived or removed"));
        }
    }
    open::make_room(config, open::journal_path(&args.to), "archive")?;
    let store = hapax::open::store(&args.to, config.ledger.acquire_timeout).await?;
    let owner = match &config.lease.owner {
        Some(owner) => owner.clone(),
        None => Owner::new(format!("archive-{}", std::process::id()))?,
    };
    let mut settings = ArchiveSettings::new(args.older_than, owner)?;
    settings.sweep = !args.keep;
    let (to, kept) = (hide_password(&args.to), if args.keep { ", kept in the journal" } else { "" });
    let details = format!("older than {} s, to {to}{kept}", args.older_than.as_secs());
    who::acts(config, &args.by, "journal.archive", &config.journal_url_shown(), &details).await?;
    let done = journal::archive(journal, &*store, &settings).await?;
    if global.json {
        print::json(&json!({"files": done.files, "archived": done.events, "removed": done.swept}))?;
    } else {
        let (events, files) =
            (counted(done.events as u64, "event", "events"), counted(done.files as u64, "file", "files"));
        let message = format!("{events} archived in {files}, {} removed", done.swept);
        print::line(&message)?;
    }
    Ok(0)
}
