//! `hapax id`: make, derive and read event ids.

use clap::{Args, Subcommand};
use hapax::clock::{Clock as _, SystemClock};
use hapax::ledger::{IdentityRule, Settings, Week};
use hapax::{EventId, Time};
use serde_json::{Value, json};

use crate::cli::{Global, NoPlaces};
use crate::failure::{self, Failure};
use crate::print;

#[derive(Debug, Args)]
pub struct IdArgs {
    #[command(subcommand)]
    command: IdCommand,
    #[command(flatten)]
    no_places: NoPlaces,
}

#[derive(Debug, Subcommand)]
enum IdCommand {
    /// Generate new ids (UUIDv7, increasing)
    #[command(after_help = "Example: hapax id make --count 3")]
    Make {
        /// How many ids
        #[arg(long, default_value_t = 1, value_parser = at_least_one)]
        count: u64,
    },
    /// Derive an id from a namespace and parts: the same parts always give the same id
    #[command(after_help = "Example: hapax id derive invoices order-17 line-3")]
    Derive {
        /// A UUID, or any text
        namespace: EventId,
        /// The parts that identify the event
        #[arg(required = true)]
        parts: Vec<String>,
    },
    /// Describe an id: kind, time, week, and problems (exit 4 if there are any)
    #[command(after_help = "Example: hapax id inspect 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10")]
    Inspect {
        /// The ids to inspect
        #[arg(required = true)]
        ids: Vec<String>,
    },
}

fn at_least_one(text: &str) -> Result<u64, String> {
    text.parse().ok().filter(|count| *count > 0).ok_or_else(|| "it must be a number, at least 1".to_owned())
}

pub fn run(global: &Global, args: &IdArgs) -> Result<u8, Failure> {
    if let Some(flag) = args.no_places.given() {
        return Err(Failure::config(format!("ids are made and read without {flag}")));
    }
    match &args.command {
        IdCommand::Make { count } => {
            for _ in 0..*count {
                show(global, &EventId::now_v7())?;
            }
            Ok(0)
        }
        IdCommand::Derive { namespace, parts } => {
            show(global, &EventId::derived(namespace, parts))?;
            Ok(0)
        }
        IdCommand::Inspect { ids } => inspect(global, ids),
    }
}

fn show(global: &Global, id: &EventId) -> Result<(), Failure> {
    if global.json { print::json(&json!({"id": id.as_str()})) } else { print::line(&id.to_string()) }
}

fn inspect(global: &Global, ids: &[String]) -> Result<u8, Failure> {
    let mut exit = 0;
    let mut rows = Vec::new();
    for text in ids {
        let report = report(text);
        if report["problem"].is_string() {
            exit = failure::INPUT;
        }
        if global.json {
            print::json(&report)?;
            continue;
        }
        let cell = |name: &str| report[name].as_str().unwrap_or("-").to_owned();
        let note = if report["problem"].is_string() { cell("problem") } else { cell("note") };
        rows.push([print::escaped(text), cell("kind"), cell("time"), cell("week"), cell("key"), note]);
    }
    if !global.json {
        print::table(["id", "kind", "time", "week", "key", "remark"], &rows)?;
    }
    Ok(exit)
}

/// Describes a text as an id.
fn report(text: &str) -> Value {
    let id = match EventId::new(text) {
        Ok(id) => id,
        Err(error) => return json!({"id": text, "problem": error.to_string()}),
    };
    let week = Week::route(IdentityRule::Id, &id, None).unwrap_or(Week::TIMELESS);
    let kind = match id.as_uuid() {
        Some(uuid) if uuid.is_nil() => "nil uuid".to_owned(),
        Some(uuid) => format!("uuid v{}", uuid.get_version_num()),
        None => "text".to_owned(),
    };
    let key: Vec<_> = id.key().iter().map(|byte| format!("{byte:02x}")).collect();
    let note = note(text, &id, week);
    let time = id.v7_millis().map(|ms| Time::from_millis(ms).to_string());
    json!({"id": text, "kind": kind, "time": time, "week": week.to_string(), "key": key.concat(), "note": note})
}

/// Points out what is allowed but may surprise.
fn note(text: &str, id: &EventId, week: Week) -> Option<&'static str> {
    let folded = text.trim().trim_start_matches('{').trim_end_matches('}').to_ascii_lowercase();
    if id.as_uuid().is_none() && EventId::new(&folded).is_ok_and(|other| other.as_uuid().is_some()) {
        return Some("looks like a UUID but is not written as one: it is another id than the canonical text");
    }
    if id.as_uuid().is_some_and(|uuid| uuid.is_nil()) {
        return Some("the nil UUID is often a placeholder");
    }
    if id.v7_millis().is_some() && week.is_timeless() {
        return Some("its time lies outside 2000 to 2100, so it has no week");
    }
    if week.may_be_made(SystemClock.now(), Settings::default().weeks_ahead).is_err() {
        return Some("its time is more than 28 days ahead of this clock: a ledger refuses it");
    }
    if text.trim() != text {
        return Some("it begins or ends with white space, which counts");
    }
    None
}
