//! `hapax analytics`: looks after the read model.

use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::analytics::{RebuildSettings, Rebuilt, Source, rebuild};
use serde_json::json;

use crate::cli::{Global, duration};
use crate::failure::{self, Failure};
use crate::token::ByArgs;
use crate::{open, print, verify, who};

#[derive(Debug, Args)]
pub struct AnalyticsArgs {
    #[command(subcommand)]
    command: AnalyticsCommand,
}

#[derive(Debug, Subcommand)]
enum AnalyticsCommand {
    /// Build a second read model, compare it with the records, and switch to it; the first one answers
    /// until then
    #[command(
        override_usage = "hapax analytics rebuild [OPTIONS]",
        after_help = "Examples:\n  \
            hapax analytics rebuild\n  \
            hapax analytics rebuild --set analytics.generation=2 --set relay.topic=events-2"
    )]
    Rebuild(RebuildArgs),
}

#[derive(Debug, Args)]
struct RebuildArgs {
    /// How long to wait without progress before giving up, and how long to recheck differences
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "60s")]
    wait: Duration,
    /// Start over if an earlier rebuild did not finish
    #[arg(long)]
    anew: bool,
    /// List at most this many differences
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    #[command(flatten)]
    by: ByArgs,
}

pub async fn run(global: &Global, args: &AnalyticsArgs) -> Result<u8, Failure> {
    match &args.command {
        AnalyticsCommand::Rebuild(args) => build_again(global, args).await,
    }
}

async fn build_again(global: &Global, args: &RebuildArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let mut settings = RebuildSettings::new(config.feed_settings());
    (settings.wait, settings.anew) = (args.wait, args.anew);
    let topic = settings.feed.topic.clone();
    let model = open::existing_read_model(global, &config)?;
    let records = open::records_of_all(global, &config).await?;
    let bus = open::bus_of(global, &config, std::slice::from_ref(&topic)).await?;
    // Debezium's topic begins with a snapshot of its own.
    let begin = (config.analytics.source == Source::Journal).then(|| records.clone());
    let target = config.analytics_url_shown().unwrap_or_default();
    let details = if args.anew { "anew" } else { "" };
    who::acts(&config, &args.by, "analytics.rebuild", &target, details).await?;
    let mut say = |step: &str| eprintln!("hapax: {step}");
    let rebuilt = rebuild(&*model, bus, begin, &*records, &settings, &mut say).await?;
    let (word, verified) = match &rebuilt {
        Rebuilt::Exchanged(verified) => ("exchanged", Some(verified)),
        Rebuilt::Differs(verified) => ("differs", Some(verified)),
        _ => ("finished", None),
    };
    if global.json {
        let receipt = verified.map(|verified| verify::receipt(verified, args.limit));
        print::json(&json!({"rebuilt": word, "verified": receipt}))?;
    } else {
        if let Some(verified) = verified {
            verify::show(verified, args.limit)?;
        }
        print::line(match &rebuilt {
            Rebuilt::Exchanged(_) => "the read model is built again, and answers",
            Rebuilt::Differs(_) => {
                "the second read model differs from the records, so the first one stays; `hapax analytics rebuild` goes on \
                 with it, and --anew starts over"
            }
            _ => {
                "an earlier rebuild lacked only its last step, which is done now; --anew builds the model again"
            }
        })?;
    }
    Ok(if matches!(rebuilt, Rebuilt::Differs(_)) { failure::BROKEN_PROMISE } else { 0 })
}
