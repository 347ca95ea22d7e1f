//! `hapax cdc`: has Debezium carry records from PostgreSQL to a topic, for read models.

#[cfg(all(feature = "postgres", feature = "http"))]
mod act;
#[cfg(all(feature = "postgres", feature = "http"))]
mod connect;
#[cfg(all(feature = "postgres", feature = "http"))]
mod connector;
#[cfg(all(feature = "postgres", feature = "http"))]
pub mod look;
#[cfg(all(feature = "postgres", feature = "http"))]
mod streams;

use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::config::Config;

use crate::cli::{Global, duration, partitions};
use crate::failure::Failure;
use crate::token::ByArgs;

#[derive(Debug, Args)]
pub struct CdcArgs {
    #[command(subcommand)]
    command: CdcCommand,
}

#[derive(Debug, Subcommand)]
enum CdcCommand {
    /// Print the connector's configuration, as Kafka Connect takes it
    #[command(after_help = "Example: hapax cdc config --journal postgres://owner@db/app > connector.json")]
    Config(ConfigArgs),
    /// Create or change the connector, and wait until it streams; repeating this changes nothing
    #[command(
        override_usage = "hapax cdc apply [OPTIONS]",
        after_help = "The owner of the modules runs it: it makes the table of pulses and publishes it.\n\n\
        Example: hapax cdc apply --connect http://connect:8083 --bus kafka://broker --create 6"
    )]
    Apply(ApplyArgs),
    /// Show connector, tasks, slot and pulses; exit 1 if no changes arrive
    #[command(after_help = "Example: hapax cdc status --connect http://connect:8083 --json")]
    Status(ConnectArgs),
    /// Remove the connector; with --slot also its offsets and the replication slot
    #[command(
        after_help = "Without --slot, `hapax cdc apply` goes on where it was. The slot keeps the log until then.\n\n\
        Example: hapax cdc remove --connect http://connect:8083 --slot"
    )]
    Remove(RemoveArgs),
}

#[derive(Debug, Args)]
struct ConnectArgs {
    /// The REST API of Kafka Connect (cdc.connect_url)
    #[arg(long, value_name = "URL")]
    connect: Option<String>,
}

#[derive(Debug, Args)]
struct ConfigArgs {
    /// Set or replace a property of the connector; may be repeated
    #[arg(long, value_name = "KEY=VALUE", value_parser = property)]
    with: Vec<(String, String)>,
}

#[derive(Debug, Args)]
struct ApplyArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    config: ConfigArgs,
    /// Create the topic with this many partitions if it does not exist
    #[arg(long, value_name = "PARTITIONS", value_parser = partitions)]
    create: Option<i32>,
    /// How long to wait until the connector streams
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "2m")]
    wait: Duration,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Args)]
struct RemoveArgs {
    #[command(flatten)]
    connect: ConnectArgs,
    /// Also remove the connector's offsets and the replication slot: the next connector starts over
    #[arg(long)]
    slot: bool,
    #[command(flatten)]
    by: ByArgs,
}

fn property(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_owned(), value.to_owned())),
        _ => Err("write KEY=VALUE, for example poll.interval.ms=100".to_owned()),
    }
}

fn load(global: &Global, connect: Option<&ConnectArgs>) -> Result<Config, Failure> {
    let url = connect.and_then(|args| args.connect.clone());
    let config = global.load_with(&[("cdc.connect_url", "--connect", url)])?;
    if !config.journal.url.starts_with("postgres:") && !config.journal.url.starts_with("postgresql:") {
        let message = "change data capture needs records in PostgreSQL: name their database with --journal postgres://…";
        return Err(Failure::config(message));
    }
    Ok(config)
}

#[cfg(all(feature = "postgres", feature = "http"))]
pub async fn run(global: &Global, args: &CdcArgs) -> Result<u8, Failure> {
    match &args.command {
        CdcCommand::Config(args) => act::config(&load(global, None)?, &args.with).await,
        CdcCommand::Apply(args) => {
            let config = load(global, Some(&args.connect))?;
            act::apply(global, &config, args).await
        }
        CdcCommand::Status(args) => look::status(global, &load(global, Some(args))?).await,
        CdcCommand::Remove(args) => {
            let config = load(global, Some(&args.connect))?;
            act::remove(global, &config, args).await
        }
    }
}

#[cfg(not(all(feature = "postgres", feature = "http")))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
pub async fn run(global: &Global, args: &CdcArgs) -> Result<u8, Failure> {
    let (connect, asked) = match &args.command {
        CdcCommand::Config(args) => (None, format!("{:?}", args.with)),
        CdcCommand::Apply(args) => {
            let asked = format!("{:?} {:?} {:?} {:?}", args.config.with, args.create, args.wait, args.by);
            (Some(&args.connect), asked)
        }
        CdcCommand::Status(args) => (Some(args), String::new()),
        CdcCommand::Remove(args) => (Some(&args.connect), format!("{} {:?}", args.slot, args.by)),
    };
    tracing::debug!(target: "hapax", asked, "not built in");
    load(global, connect)?;
    Err(Failure::not_built_in("change data capture (PostgreSQL and HTTP)", "postgres,http"))
}
