//! `hapax project run`: a consumer whose handler is a projection.

use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax::bus::{Bus, Partition};
use hapax::config::Config;
use hapax::ledger::Level;
use hapax::open::{Pools, ProjectionUse};
use hapax::projection::{Projection, Projector};
use hapax::{Consumer, Error, Topic};

use super::{ToArgs, TopicArgs, projection};
use crate::cli::Global;
use crate::consume::{report, seconds, watch::Watch};
use crate::exporters::Metrics;
use crate::failure::Failure;
use crate::signal::Gate;
use crate::{open, print};

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    to: ToArgs,
    #[command(flatten)]
    topic: TopicArgs,
    /// Create an empty index with the alias if there is none (opensearch)
    #[arg(long)]
    create: bool,
    /// How many events are applied at once (consumer.concurrency batches)
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
    let opened = match projection(&config, ProjectionUse::Run).await {
        Err(failure) if !(args.create && failure.is_missing()) => return Err(failure),
        opened => opened,
    };
    let bus = open::bus_of(global, &config, std::slice::from_ref(&topic)).await?;
    let target = match opened {
        Ok(target) => target,
        Err(missing) => create(&config, &missing, &*bus, &settings.group(), &topic).await?,
    };
    for finding in target.check().await?.iter().filter(|finding| finding.level > Level::Fine) {
        eprintln!("hapax: {}", print::escaped(&finding.message));
    }
    let projector = Projector::new(target, config.analytics.generation)?;
    let ledger = open::ledger(&config, &Pools::default()).await?;
    let consumer = Consumer::builder(bus, ledger).settings(settings).build()?;
    let signals = gate.take_signals(); // until now there was nothing to drain
    let handle = consumer.handle();
    let (projector, broken) = projector.stopping(consumer.handle());
    let running = tokio::spawn(consumer.leased_batch(projector));
    let watched = Watch::new(global, handle, args.until_idle, None, metrics);
    let (ended, code) = watched.until_ended(running, signals).await;
    report(global, &ended?, None)?;
    match broken.take() {
        Some(error) => Err(error.into()),
        None => Ok(code),
    }
}

/// Makes a projection that is missing, if its consumer has not begun: an empty one would lack what was applied to
/// the one that is gone.
async fn create(
    config: &Config,
    missing: &Failure,
    bus: &dyn Bus,
    group: &str,
    topic: &Topic,
) -> Result<Arc<dyn Projection>, Failure> {
    let partitions = bus.topic(topic).await?.map_or(0, |info| info.partitions);
    for number in 0..partitions {
        let partition = Partition { topic: topic.clone(), number };
        let (start, _) = bus.range(&partition).await?;
        if bus.committed(group, &partition).await?.is_some_and(|committed| committed > start) {
            return Err(Error::NotFound(format!(
                "{}: the group {group} has applied events already, which an empty one would lack; run `hapax project rebuild` instead",
                missing.message()
            ))
            .into());
        }
    }
    projection(config, ProjectionUse::Create).await
}
