//! `hapax verify`: proves that what is read equals the records.

use std::time::Duration;

use clap::{Args, Subcommand};
use hapax::analytics::{self, Sum, Sums, TenantModule, Uuid, Verified, VerifySettings};
use hapax::records::{ModuleSlug, tenant_id};
use hapax::words::counted;
use hapax::{Error, Tenant};
use serde_json::{Value, json};

use crate::cli::{Global, duration};
use crate::failure::{self, Failure};
use crate::{open, print, project};

#[derive(Debug, Args)]
pub struct VerifyArgs {
    #[command(subcommand)]
    command: VerifyCommand,
}

#[derive(Debug, Subcommand)]
enum VerifyCommand {
    /// Compare the read model with the records; exit 1 and list records that are lost or differ, and rows without a record
    #[command(
        override_usage = "hapax verify analytics [OPTIONS]",
        after_help = "Examples:\n  \
            hapax verify analytics\n  \
            hapax verify analytics --module orders --wait 1m --json > receipt.json"
    )]
    Analytics(AnalyticsArgs),
    /// Compare a search index with the records, as `hapax project verify` does
    #[command(
        override_usage = "hapax verify search --to <URL> [OPTIONS]",
        after_help = "Example: hapax verify search --to opensearch:http://localhost:9200/records"
    )]
    Search(project::VerifyArgs),
    /// Compare a cache with the records, as `hapax project verify` does
    #[command(
        override_usage = "hapax verify cache --to <URL> [OPTIONS]",
        after_help = "Example: hapax verify cache --to cache:redis://localhost"
    )]
    Cache(project::VerifyArgs),
}

#[derive(Debug, Args)]
struct AnalyticsArgs {
    /// Only records of this tenant
    #[arg(long, value_name = "UUID")]
    tenant: Option<Tenant>,
    /// Only records of this module
    #[arg(long, value_name = "SLUG")]
    module: Option<ModuleSlug>,
    /// How long to recheck changes that are still on their way
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "30s")]
    wait: Duration,
    /// List at most this many differences
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
}

pub async fn run(global: &Global, args: &VerifyArgs) -> Result<u8, Failure> {
    match &args.command {
        VerifyCommand::Analytics(args) => analytics(global, args).await,
        VerifyCommand::Search(args) => project::compare(global, args, Some("opensearch:")).await,
        VerifyCommand::Cache(args) => project::compare(global, args, Some("cache:")).await,
    }
}

async fn analytics(global: &Global, args: &AnalyticsArgs) -> Result<u8, Failure> {
    let config = global.load()?;
    let mut settings = VerifySettings::default();
    settings.tenant = args.tenant.as_ref().map(|tenant| tenant_id(Some(tenant))).transpose()?;
    (settings.generation, settings.wait) = (config.analytics.generation, args.wait);
    let model = open::existing_read_model(global, &config)?;
    let source = open::records_of_all(global, &config).await?;
    if let Some(module) = &args.module {
        // A name that is misspelt would prove nothing.
        let journal = config.journal_settings();
        if !hapax::open::has_module(&config.journal.url, &journal, module).await? {
            return Err(Error::NotFound(format!(
                "there is no module {module}; `hapax modules ls` lists them"
            ))
            .into());
        }
        settings.module = Some(module.clone());
    }
    let verified = analytics::verify(&*model, &*source, &settings).await?;
    if global.json {
        print::json(&receipt(&verified, args.limit))?;
    } else {
        show(&verified, args.limit)?;
        // A tenant that is misspelt would prove nothing.
        if let Some(tenant) = args.tenant.as_ref().filter(|_| verified.source.total().records == 0) {
            let shown = print::escaped(tenant.as_str());
            print::line(&format!("tenant {shown} has no records: nothing is proven"))?;
        }
    }
    Ok(if verified.differences.is_empty() { 0 } else { failure::BROKEN_PROMISE })
}

/// The result with all its sums.
pub(crate) fn receipt(verified: &Verified, limit: usize) -> Value {
    let sums = sums(&verified.source, ("model", &verified.model));
    let listed = verified.differences.iter().take(limit).map(|(name, what)| {
        json!({"record": name.to_string(), "kind": what.kind(), "difference": what.to_string()})
    });
    json!({
        "records": verified.source.total().records, "differences": verified.differences.len(),
        "listed": listed.collect::<Vec<_>>(), "moving": verified.moving,
        "source": sum(verified.source.total()), "model": sum(verified.model.total()), "sums": sums,
    })
}

pub(crate) fn sum(sum: Sum) -> Value {
    json!({"records": sum.records, "sum": hex(sum)})
}

/// The sums of all buckets of both sides.
pub(crate) fn sums(source: &Sums, (name, other): (&str, &Sums)) -> Vec<Value> {
    let mut all = Vec::new();
    for of in source.groups(other) {
        for bucket in 0..=u8::MAX {
            let (source, other) = (source.bucket(&of, bucket), other.bucket(&of, bucket));
            if source != Sum::default() || other != Sum::default() {
                all.push(json!({
                    "tenant": tenant(&of), "module": of.1.as_str(), "bucket": bucket, "source": sum(source), name: sum(other),
                }));
            }
        }
    }
    all
}

pub(crate) fn show(verified: &Verified, limit: usize) -> Result<(), Failure> {
    let mut rows = Vec::new();
    for of in verified.source.groups(&verified.model) {
        let (source, model) = (verified.source.group(&of), verified.model.group(&of));
        let equal =
            if source == model { "equal".to_owned() } else { format!("{} {}", model.records, hex(model)) };
        let tenant = tenant(&of).unwrap_or_else(|| "(none)".to_owned());
        rows.push([tenant, of.1.to_string(), source.records.to_string(), hex(source), equal]);
    }
    if !rows.is_empty() {
        print::table(["tenant", "module", "records", "sum", "read model"], &rows)?;
    }
    for (name, what) in verified.differences.iter().take(limit) {
        print::line(&format!("{}: {name} {what}", what.kind()))?;
    }
    let count = verified.differences.len();
    let differ = if count == 0 { "all equal".to_owned() } else { format!("{count} differ") };
    let moving = match verified.moving {
        0 => String::new(),
        moving => format!(", {moving} still in motion"),
    };
    let records = counted(verified.source.total().records, "record", "records");
    print::line(&format!("{records} compared, {differ}{moving}"))
}

pub(crate) fn hex(sum: Sum) -> String {
    format!("{:032x}", sum.hash)
}

/// Whose; `None` is not a tenant.
fn tenant((tenant, _): &TenantModule) -> Option<String> {
    Some(*tenant).filter(|tenant| *tenant != Uuid::nil()).map(|tenant| tenant.to_string())
}
