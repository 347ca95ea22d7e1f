//! `hapax query`: asks the read model about records.

mod show;

use std::sync::Arc;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use hapax::Tenant;
use hapax::analytics::{Analytics, Field, ListPage, ReadModel, ReadToken, RecordsQuery, Uuid};
use hapax::bus::Partition;
use hapax::config::Config;
use hapax::records::ModuleSlug;
use hapax::{Error, Topic};
use serde_json::json;

use crate::cli::{Global, between, duration};
use crate::failure::Failure;
use crate::serve::analytics::measures_of;
use crate::token::ByArgs;
use crate::{open, print, who};

#[derive(Debug, Args)]
pub struct QueryArgs {
    #[command(subcommand)]
    command: QueryCommand,
}

#[derive(Debug, Subcommand)]
enum QueryCommand {
    /// List the records of a module, or count and sum them
    #[command(after_help = "Examples:\n  \
        hapax query records --module orders --since 7d\n  \
        hapax query records --module orders --sum /amount --group-by /status\n  \
        hapax query records --module orders --format csv > orders.csv\n  \
        hapax query records --module orders --format parquet > orders.parquet")]
    Records(Box<RecordsArgs>),
    /// Show how far the read model has got, and which changes it could not read; exit 1 if there are any
    #[command(after_help = "Example: hapax query status --json")]
    Status,
    /// Drop a change that could not be read, so that it no longer holds back lastSyncAt
    #[command(
        override_usage = "hapax query drop --topic T --partition N --offset N\n       [OPTIONS]",
        after_help = "Example: hapax query drop --topic events --partition 3 --offset 1842"
    )]
    Drop(DropArgs),
    /// Print the statements that create the read model's tables
    #[command(
        after_help = "Example: hapax query schema --set analytics.url=clickhouse://127.0.0.1:8123/analytics"
    )]
    Schema,
}

#[derive(Debug, Args)]
struct RecordsArgs {
    /// The module
    #[arg(long, value_name = "SLUG")]
    module: ModuleSlug,
    /// The tenant whose records to read [default: records without a tenant]
    #[arg(long, value_name = "UUID")]
    tenant: Option<Tenant>,
    /// Only records written within this time, as 7d, 24h or 90s
    #[arg(long, value_name = "TIME", value_parser = duration)]
    since: Option<Duration>,
    /// List at most this many, up to 1000; csv and parquet list all
    #[arg(long, value_name = "N", value_parser = between::<u16>(1, 1000))]
    limit: Option<u16>,
    /// Continue after a page, with the id printed as `more:` (with --json: `next`)
    #[arg(long, value_name = "ID")]
    cursor: Option<Uuid>,
    /// Accept an answer that may count replaced versions
    #[arg(long)]
    approximate: bool,
    /// Wait until a write is visible: MODULE/ID@SEQ
    #[arg(long, value_name = "TOKEN")]
    after: Option<ReadToken>,
    /// How long to wait for that write
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "5s")]
    wait: Duration,
    /// Count the records instead of listing them
    #[arg(long)]
    count: bool,
    /// Sum a field, as /amount; may be repeated
    #[arg(long, value_name = "FIELD")]
    sum: Vec<Field>,
    /// Show the smallest value of a field; may be repeated
    #[arg(long, value_name = "FIELD")]
    min: Vec<Field>,
    /// Show the largest value of a field; may be repeated
    #[arg(long, value_name = "FIELD")]
    max: Vec<Field>,
    /// Count and sum separately for each value of a field
    #[arg(long, value_name = "FIELD")]
    group_by: Option<Field>,
    /// How to print the answer [default: table, or json with --json]
    #[arg(long, value_name = "FORMAT", value_enum)]
    format: Option<Format>,
}

#[derive(Debug, Args)]
struct DropArgs {
    /// The change's topic
    #[arg(long)]
    topic: Topic,
    /// The change's partition
    #[arg(long)]
    partition: i32,
    /// The change's offset
    #[arg(long, allow_negative_numbers = true)]
    offset: i64,
    #[command(flatten)]
    by: ByArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    /// Columns for people
    Table,
    /// One JSON object
    Json,
    /// One line per record, with a heading
    Csv,
    /// A Parquet file of all records; needs a read model in ClickHouse
    Parquet,
}

pub async fn run(global: &Global, args: &QueryArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let model = open::existing_read_model(global, &config)?;
    match &args.command {
        QueryCommand::Records(args) => records(global, model, args).await,
        QueryCommand::Status => show::status(global, &*model).await,
        QueryCommand::Drop(args) => drop_rejected(global, &config, &*model, args).await,
        QueryCommand::Schema => show::schema(global, &*model),
    }
}

impl RecordsArgs {
    /// Whether numbers are asked for, not records.
    fn is_tally(&self) -> bool {
        let measures = [&self.sum, &self.min, &self.max].iter().any(|fields| !fields.is_empty());
        self.count || self.group_by.is_some() || measures
    }

    fn query(&self, model: Arc<dyn ReadModel>) -> Result<RecordsQuery, Failure> {
        let mut query = Analytics::new(model, self.tenant.as_ref())?.records(self.module.as_str())?;
        if let Some(since) = self.since {
            query = query.since(since);
        }
        if self.approximate {
            query = query.approximate();
        }
        if let Some(token) = &self.after {
            query = query.after(token.clone()).wait(self.wait);
        }
        Ok(query)
    }
}

async fn records(global: &Global, model: Arc<dyn ReadModel>, args: &RecordsArgs) -> Result<u8, Failure> {
    let format = match args.format {
        Some(Format::Table | Format::Csv | Format::Parquet) if global.json => {
            return Err(Failure::config("--json prints JSON; leave out --format, or say --format json"));
        }
        Some(format) => format,
        None if global.json => Format::Json,
        None => Format::Table,
    };
    let query = args.query(model)?;
    if format == Format::Parquet {
        if args.is_tally() || args.limit.is_some() || args.cursor.is_some() {
            let message = "a Parquet file has all records: leave out --limit, --cursor, --count, --sum, --min, --max and --group-by";
            return Err(Failure::config(message));
        }
        return show::parquet(query).await;
    }
    if args.is_tally() {
        if args.limit.is_some() || args.cursor.is_some() {
            let message = "--limit and --cursor are for lists; --count, --sum, --min, --max and --group-by ask for numbers";
            return Err(Failure::config(message));
        }
        let measures = measures_of(&args.sum, &args.min, &args.max);
        return show::tally(query, measures, args.group_by.as_ref(), format).await;
    }
    let limit = usize::from(args.limit.unwrap_or(if format == Format::Csv { 1000 } else { 100 }));
    let all = format == Format::Csv && args.limit.is_none();
    show::list(query, ListPage::new(args.cursor, limit)?, all, format).await
}

async fn drop_rejected(
    global: &Global,
    config: &Config,
    model: &dyn ReadModel,
    args: &DropArgs,
) -> Result<u8, Failure> {
    let partition = Partition { topic: args.topic.clone(), number: args.partition };
    let target = format!("offset {} of {partition}", args.offset);
    who::acts(config, &args.by, "query.drop", &target, "").await?;
    if !model.drop_rejected(&partition, args.offset).await? {
        let message = format!(
            "nothing was rejected at offset {} of {partition}; `hapax query status` lists what was",
            args.offset
        );
        return Err(Error::NotFound(message).into());
    }
    if global.json {
        print::json(&json!({"dropped": true}))?;
    } else {
        print::line(&format!("offset {} of {partition} is given up", args.offset))?;
    }
    Ok(0)
}
