//! `hapax relay`: brings a journal to a bus, says how far it has come, and sends it back.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::bus::TopicTerms;
use hapax::journal::{AggregateOf, Behind, Checkpoint, Position, RelayState};
use hapax::relay::{self, Progress, Relay, RelaySettings};
use hapax::{Aggregate, Journal, RelayName, Tenant, Time};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::{self, Failure};
use crate::signal::Gate;
use crate::{open, print};

/// How many events a rewind counts at most.
const COUNT_MAX: u64 = 10_000_000;
/// How often the line on a terminal is drawn, and metrics are written.
const SHOWN: Duration = Duration::from_millis(200);
const WRITTEN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct RelayArgs {
    /// Which relay (relay.name)
    #[arg(long, value_name = "NAME", global = true)]
    name: Option<String>,
    #[command(subcommand)]
    command: RelayCommand,
}

#[derive(Debug, Subcommand)]
enum RelayCommand {
    /// Publish what is appended, until a signal; run two for safety: one leads, the other waits
    #[command(after_help = "Example: hapax relay run --topic orders --create 4 --bus kafka://localhost:9092")]
    Run(RunArgs),
    /// Say how far each relay has come, who leads, and which aggregates are behind
    Status,
    /// Send a relay back to a position: what lies after it is published again
    #[command(after_help = "Example: hapax relay rewind --to 1700")]
    Rewind(RewindArgs),
    /// Try an aggregate that is parked again
    #[command(after_help = "Example: hapax relay resume order-17")]
    Resume(AggregateArgs),
    /// Give up the event that an aggregate is parked at, and go on behind it
    #[command(after_help = "Example: hapax relay skip order-17 --seq 4")]
    Skip(SkipArgs),
    /// Forget a relay that is not run any more: it holds back no sweep from then on
    #[command(after_help = "Example: hapax relay forget --name archive")]
    Forget(ForgetArgs),
}

#[derive(Debug, Args)]
struct ForgetArgs {
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
struct RunArgs {
    /// Where to publish (relay.topic)
    #[arg(long)]
    topic: Option<String>,
    /// Make the topic with so many partitions, if it is not there
    #[arg(long, value_name = "PARTITIONS", value_parser = clap::value_parser!(i32).range(1..=10_000))]
    create: Option<i32>,
    /// End with exit code 0 once everything appended so far is published, or only what is parked is left
    #[arg(long)]
    once: bool,
}

#[derive(Debug, Args)]
struct RewindArgs {
    /// Where to: a position, 0 is the start
    #[arg(long, value_name = "POSITION")]
    to: Position,
    /// Only say how many events would be published again
    #[arg(long)]
    dry_run: bool,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Args)]
struct AggregateArgs {
    /// The aggregate
    aggregate: Aggregate,
    /// Whose data it is
    #[arg(long)]
    tenant: Option<Tenant>,
}

#[derive(Debug, Args)]
struct SkipArgs {
    #[command(flatten)]
    of: AggregateArgs,
    /// The seq that it is parked at
    #[arg(long)]
    seq: u64,
    /// Do not ask
    #[arg(long)]
    yes: bool,
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
    let journal = open::journal(&config).await?;
    let name = &config.relay.name;
    match &args.command {
        RelayCommand::Run(args) => {
            let bus = open::bus(&config).await?;
            if let Some(partitions) = args.create {
                bus.create_topic(&config.relay.topic, TopicTerms::new(partitions)).await?;
            }
            if bus.topic(&config.relay.topic).await?.is_none() {
                let told = format!("there is no topic {}; --create PARTITIONS makes it", config.relay.topic);
                return Err(Failure::config(told));
            }
            let settings = config.relay_settings();
            warn_of_what_does_nothing(&settings, &*journal);
            let relay = Relay::new(journal.clone(), bus, settings)?;
            publish(global, relay, &*journal, args.once, gate, metrics).await
        }
        RelayCommand::Status => status(global, &*journal).await,
        RelayCommand::Rewind(args) => rewind(global, &*journal, name, args).await,
        RelayCommand::Resume(args) => {
            let behind = relay::resume(&*journal, name, &args.of()).await?;
            told(global, "resumed", &behind)
        }
        RelayCommand::Skip(args) => {
            if !args.yes {
                print::can_ask("this gives an event up for good")?;
                let question =
                    format!("leave seq {} of {} unpublished for good?", args.seq, args.of.aggregate);
                if !print::asked(&question)? {
                    return Err(Failure::new(failure::USAGE, "refused", "nothing was changed"));
                }
            }
            let behind = relay::skip(&*journal, name, &args.of.of(), args.seq).await?;
            told(global, "skipped", &behind)
        }
        RelayCommand::Forget(ForgetArgs { yes }) => {
            if args.name.is_none() {
                return Err(Failure::config("which relay is to be forgotten? Give --name"));
            }
            forget(global, &*journal, name, *yes).await
        }
    }
}

/// Says so if a setting was changed that only journals need whose read is not ordered.
fn warn_of_what_does_nothing(settings: &RelaySettings, journal: &dyn Journal) {
    if !journal.capabilities().ordered {
        return;
    }
    let default = RelaySettings::new(settings.name.clone(), settings.topic.clone());
    for (key, changed) in [
        ("relay.lookback_s", settings.lookback != default.lookback),
        ("relay.lookback_max", settings.lookback_max != default.lookback_max),
        ("relay.dedup_checkpoint_max", settings.dedup_checkpoint_max != default.dedup_checkpoint_max),
    ] {
        if changed {
            tracing::warn!(target: "hapax::relay", "{key} does nothing here: this journal is read in order");
        }
    }
}

/// Relays until a signal, or until nothing is left.
async fn publish(
    global: &Global,
    relay: Relay,
    journal: &dyn Journal,
    once: bool,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let watch = relay.watch();
    let mut signals = gate.take_signals();
    let line = std::io::stderr().is_terminal() && !global.json;
    let mut code = 0;
    let stop = async {
        let (mut shown, mut written) = (tokio::time::interval(SHOWN), tokio::time::interval(WRITTEN));
        loop {
            tokio::select! {
                signal = signals.recv() => {
                    code = signal.unwrap_or_default();
                    return;
                }
                _ = shown.tick() => {
                    let progress = watch.progress();
                    if line {
                        let waits = if progress.leads { "" } else { ", waiting for the lead" };
                        eprint!("\r\x1b[K{}{waits}", sentence(&progress));
                        let _ = std::io::stderr().flush(); // a line that cannot be seen hurts nobody
                    }
                    if once && progress.leads && is_through(journal, &progress).await {
                        return;
                    }
                }
                _ = written.tick() => {
                    if let Some(metrics) = metrics
                        && let Err(failure) = metrics.write()
                    {
                        tracing::warn!(target: "hapax", "{}", failure.message());
                    }
                }
            }
        }
    };
    let ended = relay.run(stop).await;
    if line {
        eprint!("\r\x1b[K");
    }
    let progress = ended?;
    if global.json {
        print::json(&progress_json(&progress))?;
    } else {
        eprintln!("{}", sentence(&progress));
    }
    Ok(u8::try_from(code).unwrap_or(1))
}

/// Whether nothing is left that this relay could publish by itself.
async fn is_through(journal: &dyn Journal, progress: &Progress) -> bool {
    let after = journal.count_after(&progress.position, 1).await;
    let late = journal.late(&progress.position, &Position::START, 1).await;
    progress.behind == progress.parked
        && after.is_ok_and(|count| count == 0)
        && late.is_ok_and(|late| late.events.is_empty())
}

fn sentence(progress: &Progress) -> String {
    let Progress { published, position, behind, parked, .. } = progress;
    let leads = if progress.leads { "" } else { ", waiting for the lead" };
    format!(
        "{published} published up to {position}, {behind} aggregates behind, {parked} of them parked{leads}"
    )
}

fn progress_json(progress: &Progress) -> Value {
    json!({
        "published": progress.published, "suppressed": progress.suppressed,
        "position": progress.position.to_string(), "behind": progress.behind, "parked": progress.parked,
        "holes": progress.holes, "outages": progress.outages,
    })
}

async fn status(global: &Global, journal: &dyn Journal) -> Result<u8, Failure> {
    let (relays, now) = (journal.relays().await?, journal.now().await?);
    let mut rows = Vec::new();
    for state in &relays {
        let position = state.checkpoint.as_ref().map(|checkpoint| checkpoint.position.clone());
        let left = journal.count_after(&position.unwrap_or_default(), COUNT_MAX).await?;
        rows.push((state, left));
    }
    if global.json {
        let relays: Vec<_> = rows.iter().map(|(state, left)| state_json(state, *left, now)).collect();
        print::json(&json!({"journal": journal.id(), "relays": relays}))?;
        return Ok(0);
    }
    if rows.is_empty() {
        print::line("no relay has followed this journal yet")?;
        return Ok(0);
    }
    let cells: Vec<_> = rows
        .iter()
        .map(|(state, left)| {
            let checkpoint = state.checkpoint.as_ref();
            let count = |poison: bool| {
                let behind = checkpoint.map(|checkpoint| &checkpoint.behind[..]).unwrap_or_default();
                behind.iter().filter(|behind| behind.poison == poison).count()
            };
            [
                state.relay.to_string(),
                leader(state, now).unwrap_or_else(|| "nobody".to_owned()),
                checkpoint.map_or_else(|| "-".to_owned(), |checkpoint| checkpoint.position.to_string()),
                state.saved_at.map_or_else(|| "-".to_owned(), |at| at.to_string()),
                left.to_string(),
                count(false).to_string(),
                count(true).to_string(),
            ]
        })
        .collect();
    print::table(["relay", "led by", "position", "saved at", "left", "behind", "parked"], &cells)?;
    for state in &relays {
        for behind in state.checkpoint.iter().flat_map(|checkpoint| &checkpoint.behind) {
            let what = if behind.poison { "parked" } else { "behind" };
            let aggregate = named(behind);
            let reason = print::escaped(&behind.reason);
            print::line(&format!("{}: {aggregate} is {what} at seq {}: {reason}", state.relay, behind.next))?;
        }
    }
    Ok(0)
}

/// Which aggregate, whose: two tenants may each have one of the name.
fn named(behind: &Behind) -> String {
    let aggregate = print::escaped(&behind.aggregate);
    match &behind.tenant {
        Some(tenant) => format!("{aggregate} of tenant {}", print::escaped(tenant)),
        None => aggregate,
    }
}

/// Who leads, if somebody does.
fn leader(state: &RelayState, now: Time) -> Option<String> {
    let leads = state.until.is_some_and(|until| until > now);
    state.owner.as_ref().filter(|_| leads).map(ToString::to_string)
}

fn state_json(state: &RelayState, left: u64, now: Time) -> Value {
    let checkpoint = state.checkpoint.as_ref();
    let behind: Vec<_> =
        checkpoint.iter().flat_map(|checkpoint| &checkpoint.behind).map(behind_json).collect();
    json!({
        "relay": state.relay.as_str(), "led_by": leader(state, now), "token": state.token.0,
        "position": checkpoint.map(|checkpoint| checkpoint.position.to_string()),
        "saved_at": state.saved_at.map(|at| at.to_string()), "left": left, "behind": behind,
    })
}

fn behind_json(behind: &Behind) -> Value {
    json!({
        "tenant": behind.tenant, "aggregate": behind.aggregate, "seq": behind.next, "reason": behind.reason,
        "parked": behind.poison, "since": Time::from_micros(behind.since).to_string(), "tries": behind.tries,
    })
}

async fn rewind(
    global: &Global,
    journal: &dyn Journal,
    name: &RelayName,
    args: &RewindArgs,
) -> Result<u8, Failure> {
    let state = journal.relays().await?.into_iter().find(|state| state.relay == *name);
    let Some(state) = state else {
        return Err(hapax::Error::NotFound(format!("relay {name} has never followed this journal")).into());
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
    if !args.dry_run {
        if !args.yes {
            print::can_ask(&format!("this publishes {at_least}{again} events again"))?;
            let question = format!("publish {at_least}{again} events again, from {} to {was}?", args.to);
            if !print::asked(&question)? {
                return Err(Failure::new(failure::USAGE, "refused", "nothing was changed"));
            }
        }
        checkpoint.position = args.to.clone();
        checkpoint.recent.clear();
        // What stands behind the new position comes by again; only what is stuck before it stays.
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
        print::line(&format!("{at_least}{again} events {will} published again"))?;
    }
    Ok(0)
}

fn told(global: &Global, what: &str, behind: &Behind) -> Result<u8, Failure> {
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

async fn forget(global: &Global, journal: &dyn Journal, name: &RelayName, yes: bool) -> Result<u8, Failure> {
    let relays = journal.relays().await?;
    let position =
        |state: &RelayState| state.checkpoint.as_ref().map(|checkpoint| checkpoint.position.clone());
    let state = relays.iter().find(|state| state.relay == *name);
    let its = state.and_then(position).unwrap_or_default();
    let others = relays.iter().filter(|state| state.relay != *name);
    let others = others.map(|state| position(state).unwrap_or_default()).min();
    // What no other relay needs: a sweep takes it from now on.
    let held_back = match &others {
        Some(others) if state.is_some() && *others > its => {
            let after = journal.count_after(&its, COUNT_MAX).await?;
            after.saturating_sub(journal.count_after(others, COUNT_MAX).await?)
        }
        _ => 0,
    };
    let holds = match &others {
        Some(_) => format!("it holds back {held_back} events from being swept"),
        None => "no other relay follows the journal, so nothing is swept without it".to_owned(),
    };
    if state.is_some() && !yes {
        print::can_ask(&format!("this forgets relay {name} at position {its} ({holds})"))?;
        let question = format!("forget relay {name} at position {its} for good? ({holds})");
        if !print::asked(&question)? {
            return Err(Failure::new(failure::USAGE, "refused", "nothing was changed"));
        }
    }
    let was = journal.forget_relay(name).await?;
    let behind = was.checkpoint.as_ref().map(|checkpoint| &checkpoint.behind[..]).unwrap_or_default();
    if global.json {
        print::json(&json!({
            "relay": name.as_str(), "position": position(&was).map(|position| position.to_string()),
            "saved_at": was.saved_at.map(|at| at.to_string()), "held_back": held_back,
            "last_relay": others.is_none(), "behind": behind.iter().map(behind_json).collect::<Vec<_>>(),
        }))?;
        return Ok(0);
    }
    let held = holds.replace("holds back", "held back");
    print::line(&format!("relay {name} is forgotten at position {its}: {held}"))?;
    for behind in behind {
        print::line(&format!("it had left {} behind at seq {}", named(behind), behind.next))?;
    }
    Ok(0)
}
