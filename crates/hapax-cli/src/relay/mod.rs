//! `hapax relay`: publishes a journal to a bus, shows its progress, and rewinds it.

mod forget;
mod run;
mod status;

use clap::{Args, Subcommand};
use hapax::config::Config;
use hapax::journal::{AggregateOf, Behind, Checkpoint, Position, RelayState};
use hapax::relay;
use hapax::words::counted;
use hapax::{Aggregate, Journal, Tenant, Time};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::Failure;
use crate::signal::Gate;
use crate::token::ByArgs;
use crate::{open, print};

/// The maximum number of events that a rewind counts.
const COUNT_MAX: u64 = 10_000_000;

#[derive(Debug, Args)]
pub struct RelayArgs {
    /// The relay's name (relay.name)
    #[arg(long, global = true, value_name = "NAME")]
    name: Option<String>,
    #[command(subcommand)]
    command: RelayCommand,
}

#[derive(Debug, Subcommand)]
enum RelayCommand {
    /// Publish appended events until a signal; run two for availability: one leads, the other waits
    #[command(after_help = "Example: hapax relay run --topic orders --create 4 --bus kafka://localhost:9092")]
    Run(run::RunArgs),
    /// Show how far each relay has got, who leads, and which aggregates are behind
    Status,
    /// Rewind a relay to a position: later events are published again
    #[command(after_help = "Example: hapax relay rewind --to 1700")]
    Rewind(RewindArgs),
    /// Retry a parked aggregate, or all of them
    #[command(after_help = "Examples:\n  hapax relay resume order-17\n  hapax relay resume --all")]
    Resume(ResumeArgs),
    /// Skip the event that an aggregate is parked at, and continue after it
    #[command(after_help = "Example: hapax relay skip order-17 --seq 4")]
    Skip(SkipArgs),
    /// Forget a relay that no longer runs: it no longer holds back sweeps
    #[command(after_help = "Example: hapax relay forget --name archive")]
    Forget(ForgetArgs),
}

#[derive(Debug, Args)]
struct RewindArgs {
    /// The target position; 0 is the start
    #[arg(long, value_name = "POSITION")]
    to: Position,
    /// Only count the events that would be published again
    #[arg(long)]
    dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct ForgetArgs {
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct AggregateArgs {
    /// The aggregate
    aggregate: Aggregate,
    /// The tenant whose data it is
    #[arg(long)]
    tenant: Option<Tenant>,
}

#[derive(Debug, Args)]
struct ResumeArgs {
    /// The aggregate
    #[arg(required_unless_present = "all")]
    aggregate: Option<Aggregate>,
    /// The tenant whose data it is
    #[arg(long)]
    tenant: Option<Tenant>,
    /// Every parked aggregate of all tenants
    #[arg(long, conflicts_with_all = ["aggregate", "tenant"])]
    all: bool,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct SkipArgs {
    #[command(flatten)]
    of: AggregateArgs,
    /// The seq that the aggregate is parked at
    #[arg(long)]
    seq: u64,
    /// Do not ask for confirmation
    #[arg(long)]
    yes: bool,
    #[command(flatten)]
    by: ByArgs,
}

impl AggregateArgs {
    fn of(&self) -> AggregateOf {
        AggregateOf { tenant: self.tenant.clone(), aggregate: self.aggregate.clone() }
    }
}

pub async fn run(
    global: &Global,
    args: &RelayArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let topic = match &args.command {
        RelayCommand::Run(args) => args.topic.clone(),
        _ => None,
    };
    let flags = [("relay.name", "--name", args.name.clone()), ("relay.topic", "--topic", topic)];
    let config = global.load_with(&flags)?;
    let (name, journal) = (&config.relay.name, || open::existing_journal(global, &config));
    match &args.command {
        RelayCommand::Run(args) => run::run(global, &config, args, gate, metrics).await,
        RelayCommand::Status => status::status(global, &*journal().await?).await,
        RelayCommand::Rewind(args) => rewind(global, &config, &*journal().await?, args).await,
        RelayCommand::Resume(args) => resume(global, &config, &*journal().await?, args).await,
        RelayCommand::Skip(args) => {
            let journal = journal().await?;
            if !args.yes {
                print::can_ask("this gives an event up for good")?;
                let question =
                    format!("leave seq {} of {} unpublished for good?", args.seq, args.of.aggregate);
                if !print::asked(&question)? {
                    return Err(Failure::declined("nothing was changed"));
                }
            }
            let of = args.of.of();
            note(&config, &args.by, "relay.skip", &format!("{} at seq {}", of_tenant(&of), args.seq)).await?;
            let behind = relay::skip(&*journal, name, &of, args.seq).await?;
            report(global, "skipped", &behind)
        }
        RelayCommand::Forget(forgotten) => {
            if args.name.is_none() {
                return Err(Failure::config("which relay is to be forgotten? Give --name"));
            }
            forget::forget(global, &config, &*journal().await?, forgotten).await
        }
    }
}

/// Leaves an audit row about this relay, before the action.
async fn note(config: &Config, by: &ByArgs, action: &str, details: &str) -> Result<(), Failure> {
    crate::who::acts(config, by, action, config.relay.name.as_str(), details).await
}

fn of_tenant(of: &AggregateOf) -> String {
    match &of.tenant {
        Some(tenant) => format!("{} of tenant {tenant}", of.aggregate),
        None => of.aggregate.to_string(),
    }
}

/// Names an aggregate with its tenant: two tenants may use the same name.
fn named(behind: &Behind) -> String {
    let aggregate = print::escaped(&behind.aggregate);
    match &behind.tenant {
        Some(tenant) => format!("{aggregate} of tenant {}", print::escaped(tenant)),
        None => aggregate,
    }
}

/// The current leader, if there is one.
fn leader(state: &RelayState, now: Time) -> Option<String> {
    let leads = state.until.is_some_and(|until| until > now);
    state.owner.as_ref().filter(|_| leads).map(ToString::to_string)
}

fn behind_json(behind: &Behind) -> Value {
    json!({
        "tenant": behind.tenant, "aggregate": behind.aggregate, "seq": behind.next, "reason": behind.reason,
        "parked": behind.poison, "since": Time::from_micros(behind.since).to_string(), "attempts": behind.attempts,
    })
}

async fn rewind(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &RewindArgs,
) -> Result<u8, Failure> {
    let name = &config.relay.name;
    let state = journal.relays().await?.into_iter().find(|state| state.relay == *name);
    let Some(state) = state else {
        return Err(hapax::Error::NotFound(format!("this journal has no relay {name}")).into());
    };
    let mut checkpoint = state.checkpoint.clone().unwrap_or_else(|| Checkpoint::start(journal.id()));
    let was = checkpoint.position.clone();
    if args.to > was {
        return Err(hapax::Error::Conflict {
            expected: format!("a position up to {was}, where relay {name} is"),
            actual: format!("{}: what lies between would never be published", args.to),
        }
        .into());
    }
    let after = journal.count_after(&args.to, COUNT_MAX).await?;
    let again = after.saturating_sub(journal.count_after(&was, COUNT_MAX).await?);
    let at_least = if after == COUNT_MAX { "at least " } else { "" };
    let events = counted(again, "event", "events");
    if !args.dry_run {
        if !args.yes {
            print::can_ask(&format!("this publishes {at_least}{events} again"))?;
            let question = format!("publish {at_least}{events} again, from {} to {was}?", args.to);
            if !print::asked(&question)? {
                return Err(Failure::declined("nothing was changed"));
            }
        }
        note(config, &args.by, "relay.rewind", &format!("from {was} to {}", args.to)).await?;
        checkpoint.position = args.to.clone();
        checkpoint.recent.clear();
        // Keep only aggregates that are stuck before the new position; the relay reads the others
        // again.
        checkpoint.behind.retain(|behind| behind.position <= args.to);
        journal.rewind(name, &checkpoint, Some(state.token)).await?;
    }
    if global.json {
        print::json(&json!({
            "relay": name.as_str(), "dry_run": args.dry_run, "from": was.to_string(),
            "to": args.to.to_string(), "published_again": again,
        }))?;
    } else {
        let will = if args.dry_run { "would be" } else { "will be" };
        print::line(&format!("{at_least}{events} {will} published again"))?;
    }
    Ok(0)
}

async fn resume(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &ResumeArgs,
) -> Result<u8, Failure> {
    let name = &config.relay.name;
    if let Some(aggregate) = args.aggregate.clone() {
        let of = AggregateOf { tenant: args.tenant.clone(), aggregate };
        note(config, &args.by, "relay.resume", &of_tenant(&of)).await?;
        return report(global, "resumed", &relay::resume(journal, name, &of).await?);
    }
    note(config, &args.by, "relay.resume", "all parked aggregates").await?;
    let resumed = relay::resume_all(journal, name).await?;
    if global.json {
        let aggregates: Vec<_> = resumed.iter().map(behind_json).collect();
        print::json(&json!({"what": "resumed", "count": resumed.len(), "aggregates": aggregates}))?;
    } else {
        let plural = if resumed.len() == 1 { "" } else { "s" };
        print::line(&format!("{} parked aggregate{plural} resumed", resumed.len()))?;
    }
    Ok(0)
}

fn report(global: &Global, what: &str, behind: &Behind) -> Result<u8, Failure> {
    if global.json {
        let mut value = behind_json(behind);
        value["what"] = what.into();
        print::json(&value)?;
    } else {
        let aggregate = named(behind);
        print::line(&format!("{aggregate} {what} at seq {}", behind.next))?;
    }
    Ok(0)
}
