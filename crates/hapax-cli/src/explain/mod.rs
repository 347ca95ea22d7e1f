//! `hapax explain`: the whole history of an event, of a keyed write or of an aggregate, from what the stores record.
//!
//! `gather` asks the stores that are there (`stores`) and makes a [`Explanation`](explanation::Explanation) of what they answer:
//! `entries` has the steps of the ledger. `text`, `markdown` and `html` show it. Payloads, the values of headers
//! and the bodies of answers are never part of it.

pub mod entries;
pub mod explanation;
pub mod gather;
mod html;
mod markdown;
mod mask;
mod output;
mod skips;
pub mod stores;
mod text;

pub use mask::masked;

use std::path::{Path, PathBuf};

use clap::Args;
use hapax::keyed::IdempotencyKey;
use hapax::{Aggregate, EventId, Tenant};

use crate::cli::Global;
use crate::failure::{self, Failure};
use crate::print;

/// Show the whole history of an event: key, journal, relay, every scope, read model
///
/// Asks the stores that are there what they recorded, and shows it in order. A store that does not answer is
/// named, and the exit code is 3. Payloads and the values of headers are never shown; their sizes are. Reasons are
/// what handlers and operators wrote: passwords and tokens in them are masked, and an HTML page has none unless
/// --reasons asks for them.
#[derive(Debug, Args)]
#[command(
    override_usage = "hapax explain <ID | --key K | --aggregate A>\n       [--tenant T] [--json | --html FILE | --md]",
    after_help = "Examples:\n  \
        hapax explain order-17-paid\n  \
        hapax explain --aggregate order-17 --tenant acme\n  \
        hapax explain --key 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10 --html incident.html"
)]
pub struct ExplainArgs {
    #[command(flatten)]
    of: SubjectArgs,
    /// Whose data it is
    #[arg(long)]
    tenant: Option<Tenant>,
    /// If this tenant has nothing of it, name the tenants that have
    #[arg(long)]
    all_tenants: bool,
    /// Write the report to this file, as one HTML page that needs no other
    #[arg(long, value_name = "FILE", conflicts_with = "md")]
    html: Option<PathBuf>,
    /// Show the reasons of failures in the HTML page too: they may quote payloads
    #[arg(long, requires = "html")]
    reasons: bool,
    /// Print the report as Markdown
    #[arg(long)]
    md: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct SubjectArgs {
    /// The event
    id: Option<EventId>,
    /// The key of a write: what became of it, and of the record it wrote
    #[arg(long, value_name = "K", value_parser = key)]
    key: Option<IdempotencyKey>,
    /// The aggregate: its events, and what waits behind what
    #[arg(long, value_name = "A")]
    aggregate: Option<Aggregate>,
}

fn key(text: &str) -> Result<IdempotencyKey, String> {
    IdempotencyKey::new(text).map_err(|error| error.to_string())
}

pub async fn run(global: &Global, args: &ExplainArgs) -> Result<u8, Failure> {
    if global.json && (args.md || args.html.is_some()) {
        return Err(Failure::config("--json, --html and --md are three formats; choose one"));
    }
    let config = global.load()?;
    let (mut stores, tenant) = (stores::Stores::new(global, &config), args.tenant.as_ref());
    stores.names_others = args.all_tenants;
    let file = args.html.as_deref().map(output::File::new).transpose()?;
    let mut explanation = match &args.of {
        SubjectArgs { id: Some(id), .. } => gather::event(&mut stores, tenant, id).await?,
        SubjectArgs { key: Some(key), .. } => gather::key(&mut stores, tenant, key).await?,
        SubjectArgs { aggregate: Some(of), .. } => gather::aggregate(&mut stores, tenant, of).await?,
        SubjectArgs { .. } => return Err(Failure::config("name an event, a --key or an --aggregate")),
    };
    if file.is_some() && !args.reasons {
        explanation.leave_out_reasons();
    }
    let is_away = explanation.stores.iter().any(|answer| answer.unreachable);
    match file {
        Some(file) => {
            file.write(&html::page(&explanation, args.reasons))?;
            let name = args.html.as_deref().unwrap_or(Path::new("")).display().to_string();
            print::line(&format!("{} is written", print::escaped(&name)))?;
        }
        None if args.md => print::line(markdown::page(&explanation).trim_end())?,
        None if global.json => {
            let value = serde_json::to_value(&explanation);
            let corrupt =
                |error| hapax::Error::Corrupt(format!("the report cannot be written as JSON: {error}"));
            print::json(&value.map_err(corrupt)?)?;
        }
        None => text::show(&explanation)?,
    }
    Ok(if is_away { failure::DEPENDENCY } else { 0 })
}
