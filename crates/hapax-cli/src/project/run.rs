//! `hapax project run`: a consumer whose handler is a projection.

use std::time::Duration;

use clap::Args;
use hapax::Consumer;
use hapax::open::{Pools, ProjectionUse};
use hapax::projection::Projector;

use super::{ToArgs, TopicArgs, projection};
use crate::cli::Global;
use crate::consume::{report, seconds, watch::Watch};
use crate::exporters::Metrics;
use crate::failure::Failure;
use crate::open;
use crate::signal::Gate;

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    to: ToArgs,
    #[command(flatten)]
    topic: TopicArgs,
    /// Make an empty index with the alias if it is missing (opensearch)
    #[arg(long)]
    create: bool,
    /// How many events are applied at once at most (consumer.concurrency batches)
    #[arg(long, value_name = "N")]
    concurrency: Option<String>,
    /// Exit with code 0 once the topic is read to its end and nothing has arrived for this many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    until_idle: Option<Duration>,
}

pub(super) async fn run(
    global: &Global,
    args: &RunArgs,
    gate: &Gate,
    metrics: Option<&Metrics>,
) -> Result<u8, Failure> {
    let config = args.to.load(
        global,
        &[
            ("relay.topic", "--topic", args.topic.topic.clone()),
            ("consumer.concurrency", "--concurrency", args.concurrency.clone()),
        ],
    )?;
    let topic = config.relay.topic.clone();
    let settings = config.projector_settings(args.topic.scope.clone(), topic.clone())?;
    settings.check()?;
    let purpose = if args.create { ProjectionUse::Create } else { ProjectionUse::Run };
    let projector = Projector::new(projection(&config, purpose).await?, config.analytics.generation)?;
    let bus = open::bus_of(global, &config, &[topic]).await?;
    let ledger = open::ledger(&config, &Pools::default()).await?;
    let consumer = Consumer::builder(bus, ledger).settings(settings).build()?;
    let signals = gate.take_signals(); // until now there was nothing to drain
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased_batch(projector));
    let watched = Watch::new(global, handle, args.until_idle, None, metrics);
    let (ended, code) = watched.until_ended(running, signals).await;
    report(global, &ended?, None)?;
    Ok(code)
}
