//! `hapax journal read`.

use clap::Args;
use hapax::journal::{Position, Stored};
use hapax::{Aggregate, EventId, Journal, Tenant};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

/// How many events to read at a time.
const PAGE: usize = 500;

#[derive(Debug, Args)]
pub struct ReadArgs {
    /// Only this aggregate
    #[arg(long, conflicts_with_all = ["after", "id"])]
    aggregate: Option<Aggregate>,
    /// Start at this seq of the aggregate
    #[arg(long, value_name = "SEQ", requires = "aggregate", default_value_t = 1)]
    from: u64,
    /// The tenant whose data it is, with --aggregate or --id
    #[arg(long)]
    tenant: Option<Tenant>,
    /// The event with this id
    #[arg(long, conflicts_with = "after")]
    id: Option<EventId>,
    /// Events after this position [default: from the start]
    #[arg(long, value_name = "POSITION")]
    after: Option<Position>,
    /// Print at most this many
    #[arg(long, value_name = "N", default_value_t = u64::MAX, hide_default_value = true)]
    limit: u64,
    /// Print payloads and headers too
    #[arg(long)]
    payload: bool,
}

pub async fn run(global: &Global, journal: &dyn Journal, args: &ReadArgs) -> Result<u8, Failure> {
    if let Some(id) = &args.id {
        let found = journal.find(args.tenant.as_ref(), id).await?;
        let Some(stored) = found else {
            return Err(hapax::Error::NotFound(format!("no event {id} in this journal")).into());
        };
        show(global, args, &[stored], true)?;
        return Ok(0);
    }
    let mut heads = true;
    let (mut left, mut seq, mut after) = (args.limit, args.from, args.after.clone().unwrap_or_default());
    while left > 0 {
        let limit = usize::try_from(left).unwrap_or(PAGE).min(PAGE);
        let mut at_hole = false;
        let (page, more) = if let Some(aggregate) = &args.aggregate {
            let page = journal.read_aggregate(args.tenant.as_ref(), aggregate, seq, limit).await?;
            (page.events, page.more)
        } else {
            let batch = journal.read(&after, limit).await?;
            (after, at_hole) = (batch.next, batch.at_hole);
            (batch.events, batch.more)
        };
        left -= page.len() as u64;
        seq = page.last().map_or(seq, |last| last.seq + 1);
        show(global, args, &page, heads)?;
        heads &= page.is_empty();
        if at_hole && left > 0 {
            warn_of_hole(global, &after);
        }
        if !more {
            break;
        }
    }
    Ok(0)
}

/// Reports that reading ended at a hole: not an error, but the reader must not take it for the end.
fn warn_of_hole(global: &Global, after: &Position) {
    let message = format!(
        "a hole after position {after}: a transaction that appends there has not committed yet; events after the hole \
         are not shown"
    );
    eprintln!("hapax: {message}");
    if global.json {
        eprintln!("{}", json!({"hole": {"after": after.to_string(), "message": message}}));
    }
}

/// Prints a page, with headings if it is the first.
fn show(global: &Global, args: &ReadArgs, page: &[Stored], heads: bool) -> Result<(), Failure> {
    if global.json {
        return page.iter().try_for_each(|stored| print::json(&to_json(stored, args.payload)));
    }
    let cells: Vec<_> = page
        .iter()
        .map(|stored| {
            let event = &stored.event;
            [
                stored.position.to_string(),
                event.aggregate.as_ref().map_or_else(String::new, ToString::to_string),
                stored.seq.to_string(),
                event.kind.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
                event.id.to_string(),
                stored.at.to_string(),
            ]
        })
        .collect();
    let rows = print::table_rows(["position", "aggregate", "seq", "kind", "id", "at"], &cells);
    let (Some((head, rows)), false) = (rows.split_first(), page.is_empty()) else { return Ok(()) };
    if heads {
        print::line(head)?;
    }
    for (row, stored) in rows.iter().zip(page) {
        print::line(row)?;
        if args.payload {
            let event = &stored.event;
            for (name, value) in event.headers.iter() {
                let value = print::escaped(&String::from_utf8_lossy(value));
                print::line(&format!("          {}: {value}", print::escaped(name)))?;
            }
            print::line(&format!("          {}", print::escaped(&String::from_utf8_lossy(&event.payload))))?;
        }
    }
    Ok(())
}

fn to_json(stored: &Stored, payload: bool) -> Value {
    let event = &stored.event;
    let mut value = json!({
        "position": stored.position.to_string(),
        "tenant": event.tenant.as_ref().map(hapax::Tenant::as_str),
        "aggregate": event.aggregate.as_ref().map(hapax::Aggregate::as_str),
        "seq": stored.seq,
        "id": event.id.as_str(),
        "kind": event.kind.as_ref().map(hapax::Kind::as_str),
        "time": event.time.map(|time| time.to_string()),
        "at": stored.at.to_string(),
        "fingerprint": stored.fingerprint.to_string(),
    });
    if payload {
        value["headers"] =
            event.headers.iter().map(|(name, value)| json!([name, String::from_utf8_lossy(value)])).collect();
        value["payload"] = serde_json::from_slice(&event.payload)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&event.payload).into_owned()));
    }
    value
}
