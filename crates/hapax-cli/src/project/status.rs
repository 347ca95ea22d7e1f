//! `hapax project status`: whether a projection can be relied on, and how far it is.

use clap::Args;
use hapax::bus::Partition;
use hapax::ledger::Level;
use hapax::open::ProjectionUse;
use serde_json::json;

use super::{ToArgs, TopicArgs, projection};
use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::{open, print};

#[derive(Debug, Args)]
pub(super) struct StatusArgs {
    #[command(flatten)]
    to: ToArgs,
    #[command(flatten)]
    topic: TopicArgs,
}

pub(super) async fn run(global: &Global, args: &StatusArgs) -> Result<u8, Failure> {
    let config = args.to.load(global, &[("relay.topic", "--topic", args.topic.topic.clone())])?;
    let topic = config.relay.topic.clone();
    let settings = config.projector_settings(args.topic.scope.clone(), topic.clone())?;
    let opened = projection(&config, ProjectionUse::Run).await;
    // A projection that is gone cannot be relied on; nothing is wrong with the flags.
    let projection = opened.map_err(|failure| {
        if failure.is_missing() { failure.exits(failure::BROKEN_PROMISE) } else { failure }
    })?;
    let findings = projection.check().await?;
    let bus = open::bus_of(global, &config, std::slice::from_ref(&topic)).await?;
    let partitions = bus.topic(&topic).await?.map_or(0, |info| info.partitions);
    let (mut applied, mut behind) = (0, 0);
    for number in 0..partitions {
        let partition = Partition { topic: topic.clone(), number };
        let (start, end) = bus.range(&partition).await?;
        let committed = bus.committed(&settings.group(), &partition).await?.unwrap_or(start).max(start);
        applied += committed - start;
        behind += (end - committed).max(0);
    }
    let refused = findings.iter().any(|finding| finding.level == Level::Refusal);
    let level = |level| match level {
        Level::Fine => "fine",
        Level::Warning => "warning",
        Level::Refusal => "refusal",
    };
    if global.json {
        let findings = findings
            .iter()
            .map(|finding| json!({"check": finding.check, "level": level(finding.level), "message": finding.message}));
        print::json(&json!({
            "projection": projection.about(), "scope": settings.scope.as_str(), "topic": topic.as_str(),
            "passed": applied, "behind": behind, "findings": findings.collect::<Vec<_>>(),
        }))?;
    } else {
        print::line(&format!("projection  {}", projection.about()))?;
        print::line(&format!("scope       {}", settings.scope))?;
        print::line(&format!("topic       {topic}: {applied} records passed, {behind} to go"))?;
        for finding in &findings {
            print::line(&format!("{:<11} {}", level(finding.level), finding.message))?;
        }
    }
    Ok(if refused { failure::BROKEN_PROMISE } else { 0 })
}
