//! `hapax relay run`: publishes until a signal, or until nothing is left.

use std::io::{IsTerminal as _, Write as _};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax::config::Config;
use hapax::journal::{Checkpoint, Position};
use hapax::open::Pools;
use hapax::relay::{Progress, Relay, RelaySettings};
use hapax::words::counted;
use hapax::{Error, EventId, Journal, Owner, RelayName};
use serde_json::{Value, json};

use super::leader;
use crate::cli::Global;
use crate::exporters::Metrics;
use crate::failure::{self, Failure};
use crate::signal::Gate;
use crate::{open, print};

/// How often to redraw the line on a terminal, and to write metrics.
const SHOWN: Duration = Duration::from_millis(200);
const WRITTEN: Duration = Duration::from_secs(5);

#[derive(Debug, Args)]
pub struct RunArgs {
    /// The topic to publish to (relay.topic)
    #[arg(long)]
    pub topic: Option<String>,
    /// Create the topic with this many partitions if it does not exist
    #[arg(long, value_name = "PARTITIONS", value_parser = crate::cli::partitions)]
    create: Option<i32>,
    /// Exit with code 0 once everything appended so far is published, by this relay or by another
    /// of its name that leads. If only parked aggregates are left, exit with code 1
    #[arg(long)]
    once: bool,
}

pub async fn run(
    global: &Global,
    config: &Config,
    args: &RunArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    // Check the topic first: if it is missing, do not create a journal.
    let bus = open::bus_with(config, &config.relay.topic, args.create).await?;
    let journal = open::journal(config, &Pools::default()).await?;
    let mut settings = config.relay_settings();
    if args.once {
        // A unique owner, to recognise its own leadership.
        let owner =
            settings.owner.map_or_else(|| format!("relay-{}", std::process::id()), |owner| owner.to_string());
        settings.owner = Some(Owner::new(format!("{owner}-{}", EventId::now_v7()))?);
    }
    warn_of_what_does_nothing(&settings, &*journal);
    let relay = Relay::new(Arc::clone(&journal), bus, settings)?;
    publish(global, relay, &*journal, args.once, gate, metrics).await
}

/// Warns about changed settings that only matter to journals in object stores.
fn warn_of_what_does_nothing(settings: &RelaySettings, journal: &dyn Journal) {
    if journal.capabilities().timed {
        return;
    }
    let default = RelaySettings::new(settings.name.clone(), settings.topic.clone());
    for (key, changed) in [
        ("relay.lookback_s", settings.lookback != default.lookback),
        ("relay.lookback_max", settings.lookback_max != default.lookback_max),
        ("relay.dedup_max", settings.dedup_max != default.dedup_max),
        ("relay.dedup_checkpoint_max", settings.dedup_checkpoint_max != default.dedup_checkpoint_max),
    ] {
        if changed {
            tracing::warn!(target: "hapax::relay", "{key} does nothing here: it is for journals in object stores");
        }
    }
}

/// Why the run ended.
enum Ended {
    /// A signal, with its exit code.
    Signal(i32),
    /// Nothing is left that could be published.
    Through(Through),
}

/// Nothing is left that a relay could publish without an operator.
struct Through {
    /// The leader, if it is another relay.
    led_by: Option<String>,
    position: Position,
    parked: usize,
}

/// Runs the relay until a signal, or until nothing is left.
async fn publish(
    global: &Global,
    relay: Relay,
    journal: &dyn Journal,
    once: bool,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let (handle, settings) = (relay.handle(), relay.settings().clone());
    let mut signals = gate.take_signals();
    let line = std::io::stderr().is_terminal() && !global.json;
    let mut ended = Ended::Signal(0);
    let until_stopped = async {
        let (mut shown, mut written) = (tokio::time::interval(SHOWN), tokio::time::interval(WRITTEN));
        loop {
            tokio::select! {
                signal = signals.recv() => {
                    ended = Ended::Signal(signal.unwrap_or_default());
                    return;
                }
                _ = shown.tick() => {
                    let progress = handle.progress();
                    if line {
                        let waits = if progress.leads { "" } else { ", waiting for leadership" };
                        eprint!("\r\x1b[K{}{waits}", sentence(&progress));
                        let _ = std::io::stderr().flush(); // nothing is lost if nobody sees the line
                    }
                    if once && let Some(through) = through(journal, &settings, &progress).await {
                        ended = Ended::Through(through);
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
    let ran = {
        // If the relay fails, do not wait for a signal.
        let mut running = std::pin::pin!(relay.run());
        tokio::select! {
            ran = &mut running => ran,
            () = until_stopped => {
                handle.stop();
                running.await
            }
        }
    };
    if line {
        eprint!("\r\x1b[K");
    }
    let progress = ran.map_err(|error| match error {
        // This is not about the user's input: the journal is not as the relay left it.
        Error::Conflict { .. } => Failure::from(error).exits(failure::BROKEN_PROMISE),
        error => error.into(),
    })?;
    tell(global, &progress, &ended)?;
    match ended {
        Ended::Signal(code) => Ok(u8::try_from(code).unwrap_or(1)),
        Ended::Through(through) if through.parked > 0 => Err(left(&settings.name, through.parked)),
        Ended::Through(_) => Ok(0),
    }
}

/// Checks whether nothing is left that a relay of this name could publish without an operator.
async fn through(journal: &dyn Journal, settings: &RelaySettings, progress: &Progress) -> Option<Through> {
    if progress.leads {
        let of = Through { led_by: None, position: progress.position.clone(), parked: progress.parked };
        return (progress.behind == of.parked && nothing_after(journal, &of.position).await).then_some(of);
    }
    // If the journal does not answer, the next check asks again.
    let (relays, now) = (journal.relays().await.ok()?, journal.now().await.ok()?);
    let state = relays.into_iter().find(|state| state.relay == settings.name)?;
    if state.owner == settings.owner {
        return None; // this relay leads, but does not know yet
    }
    let led_by = Some(leader(&state, now)?);
    let checkpoint = state.checkpoint.unwrap_or_else(|| Checkpoint::start(journal.id()));
    let parked = checkpoint.behind.iter().filter(|behind| behind.poison).count();
    let all = checkpoint.behind.len() == parked && nothing_after(journal, &checkpoint.position).await;
    all.then_some(Through { led_by, position: checkpoint.position, parked })
}

async fn nothing_after(journal: &dyn Journal, position: &Position) -> bool {
    journal.count_after(position, 1).await.is_ok_and(|count| count == 0)
}

/// The failure that reports what a run has left unpublished.
fn left(name: &RelayName, parked: usize) -> Failure {
    let are = if parked == 1 { "1 aggregate is" } else { &format!("{parked} aggregates are") };
    let message = format!(
        "not everything is published: {are} parked. `hapax relay status` says why; \
         `hapax relay resume --name {name} --all` tries them again, `hapax relay skip --name {name} AGGREGATE --seq N` gives an event up"
    );
    Failure::new(failure::BROKEN_PROMISE, "parked", message)
}

fn tell(global: &Global, progress: &Progress, ended: &Ended) -> Result<(), Failure> {
    if global.json {
        return print::json(&progress_json(progress, ended));
    }
    match ended {
        Ended::Through(Through { led_by: Some(leader), position, parked }) => eprintln!(
            "{} published by this one; another one leads ({}) and has published everything up to {position}, {} parked",
            progress.published,
            print::escaped(leader),
            counted(*parked as u64, "aggregate", "aggregates"),
        ),
        _ if progress.takeovers == 0 => eprintln!("nothing published: it never led"),
        _ => eprintln!("{}", sentence(progress)),
    }
    Ok(())
}

fn sentence(progress: &Progress) -> String {
    let Progress { published, position, behind, parked, .. } = progress;
    let behind = counted(*behind as u64, "aggregate", "aggregates");
    format!("{published} published up to {position}, {behind} behind, {parked} of them parked")
}

fn progress_json(progress: &Progress, ended: &Ended) -> Value {
    let mut value = json!({
        "published": progress.published, "suppressed": progress.suppressed,
        "position": progress.position.to_string(), "behind": progress.behind, "parked": progress.parked,
        "holes": progress.holes, "outages": progress.outages, "led_by": null,
    });
    if let Ended::Through(Through { led_by: Some(leader), position, parked }) = ended {
        value["led_by"] = leader.as_str().into();
        value["position"] = position.to_string().into();
        (value["behind"], value["parked"]) = ((*parked).into(), (*parked).into());
    }
    value
}
