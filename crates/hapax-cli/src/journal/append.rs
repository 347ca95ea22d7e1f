//! `hapax journal append`.

use std::collections::HashMap;
use std::io::IsTerminal as _;
use std::path::PathBuf;

use bytes::Bytes;
use clap::{ArgGroup, Args};
use hapax::config::Config;
use hapax::id::{IdChain, IdSource};
use hapax::journal::{Append, Appended, Expected, Placing};
use hapax::records::{ModuleSlug, module_of, not_yours};
use hapax::words::counted;
use hapax::{Aggregate, Event, EventId, Headers, Journal, Kind, Tenant, Time};
use serde_json::{Value, json};

use crate::cli::Global;
use crate::failure::Failure;
use crate::{lines, print};

/// The maximum number of appends sent together.
const BATCH: usize = 500;

/// Appends JSON Lines, each line an event. Its id is found as a consumer finds it (`/eventId`, then
/// `/event_id`), or generated.
///
/// With --expected, all lines are one append: all of them are stored, or none. Otherwise each line
/// is an append of its own.
#[derive(Debug, Args)]
#[command(
    group(ArgGroup::new("where").required(true).args(["aggregate", "aggregate_at"])),
    override_usage = "hapax journal append --aggregate <NAME> [FILE]\n       \
                      hapax journal append --aggregate-at <POINTER> [FILE]",
)]
pub struct AppendArgs {
    /// A file of JSON Lines; `-` or none for standard input
    file: Option<PathBuf>,
    /// The aggregate of all lines
    #[arg(long)]
    aggregate: Option<Aggregate>,
    /// Where a line's aggregate is (a JSON pointer)
    #[arg(long, value_name = "POINTER", conflicts_with = "expected")]
    aggregate_at: Option<String>,
    /// The tenant whose data it is
    #[arg(long)]
    tenant: Option<Tenant>,
    /// What the aggregate's last seq must be: a number, or `new`
    #[arg(long, value_name = "SEQ", value_parser = expected)]
    expected: Option<Expected>,
    /// The kind of all lines
    #[arg(long, conflicts_with = "kind_at")]
    kind: Option<Kind>,
    /// Where a line's kind is (a JSON pointer)
    #[arg(long, value_name = "POINTER")]
    kind_at: Option<String>,
    /// Where a line's own time is (a JSON pointer to an RFC 3339 time)
    #[arg(long, value_name = "POINTER")]
    time_at: Option<String>,
    /// Where the id is (a JSON pointer). A line without it is refused
    #[arg(long, value_name = "POINTER")]
    id: Option<String>,
    /// The longest line in bytes; a longer one is refused
    #[arg(long, value_name = "BYTES", default_value_t = 1024 * 1024)]
    line_bytes_max: usize,
}

fn expected(text: &str) -> Result<Expected, String> {
    match text {
        "new" => Ok(Expected::New),
        "any" => Ok(Expected::Any),
        number => number
            .parse()
            .map(Expected::Exact)
            .map_err(|_| format!("{number:?} is neither a whole number from 0 on, nor new or any")),
    }
}

#[derive(Debug, Default)]
struct Counts {
    appended: u64,
    repeats: u64,
    kept: u64,
}

pub async fn run(
    global: &Global,
    config: &Config,
    journal: &dyn Journal,
    args: &AppendArgs,
) -> Result<u8, Failure> {
    let maker = Maker::new(args)?;
    let mut modules = Modules { config, known: HashMap::new() };
    let mut lines = lines::read(args.file.as_deref(), args.line_bytes_max)?;
    let together = args.expected.is_some_and(|expected| expected != Expected::Any);
    let shown = std::io::stderr().is_terminal() && !global.json;
    let (mut counts, mut ended) = (Counts::default(), None);
    let mut batch: Vec<(u64, Append)> = Vec::new();
    while let Some(line) = lines.recv().await {
        let made = match line.and_then(|(number, line)| Ok((number, maker.append(number, line)?))) {
            Ok((number, append)) => modules.check(number, &append).await.map(|()| (number, append)),
            Err(failure) => Err(failure),
        };
        match made {
            Ok(next) => batch.push(next),
            Err(failure) => {
                ended = Some(failure);
                break;
            }
        }
        if !together && (batch.len() >= BATCH || lines.is_empty()) {
            send(global, journal, &mut batch, &mut counts).await?;
            if shown {
                eprint!("\r{} appended ", counts.appended);
            }
        }
    }
    if shown {
        eprint!("\r\x1b[K");
    }
    match ended {
        // All or nothing: a bad line rejects the others too.
        Some(failure) if together => return Err(failure),
        _ if together => one(global, journal, &batch, args, &mut counts).await?,
        _ => send(global, journal, &mut batch, &mut counts).await?,
    }
    if !global.json {
        let Counts { appended, repeats, kept } = counts;
        let before = counted(repeats, "was there before", "were there before");
        let kept = counted(kept, "kept as it was", "kept as they were");
        eprintln!("{appended} appended, {before}, {kept}");
    }
    ended.map_or(Ok(0), Err)
}

/// Appends all lines as one append.
async fn one(
    global: &Global,
    journal: &dyn Journal,
    batch: &[(u64, Append)],
    args: &AppendArgs,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let Some((_, first)) = batch.first() else { return Ok(()) };
    let events = batch.iter().flat_map(|(_, append)| append.events.clone());
    let mut append = Append::new(first.aggregate.clone(), args.expected.unwrap_or(Expected::Any), events);
    append.tenant.clone_from(&args.tenant);
    let appended = journal.append(&append).await?;
    report(global, &append, &appended, counts)
}

/// Appends each line on its own; stops at the first that is refused.
async fn send(
    global: &Global,
    journal: &dyn Journal,
    batch: &mut Vec<(u64, Append)>,
    counts: &mut Counts,
) -> Result<(), Failure> {
    let (numbers, appends): (Vec<_>, Vec<_>) = batch.drain(..).unzip();
    if appends.is_empty() {
        return Ok(());
    }
    let answers = journal.append_many(&appends).await?;
    let mut refused = None;
    for ((number, append), answer) in numbers.into_iter().zip(&appends).zip(answers) {
        match answer {
            Ok(appended) => report(global, append, &appended, counts)?,
            Err(error) if refused.is_none() => refused = Some((number, error)),
            Err(_) => {}
        }
    }
    match refused {
        Some((number, error)) => Err(Failure::from(error).about(&format!("line {number}"))),
        None => Ok(()),
    }
}

fn report(global: &Global, append: &Append, appended: &Appended, counts: &mut Counts) -> Result<(), Failure> {
    for (event, placed) in append.events.iter().zip(&appended.placed) {
        let placing = match placed.placing {
            Placing::New => "new",
            Placing::Repeat => "repeat",
            Placing::Kept => "kept",
        };
        match placed.placing {
            Placing::New => counts.appended += 1,
            Placing::Repeat => counts.repeats += 1,
            Placing::Kept => counts.kept += 1,
        }
        if global.json {
            print::json(&json!({
                "id": event.id.as_str(), "aggregate": append.aggregate.as_str(), "seq": placed.seq,
                "position": placed.position.to_string(), "placing": placing,
            }))?;
        }
    }
    Ok(())
}

/// The modules of the journal's database: what looks like the aggregate of a record is theirs.
struct Modules<'a> {
    config: &'a Config,
    known: HashMap<ModuleSlug, bool>,
}

impl Modules<'_> {
    /// Refuses an append to the aggregate of a record.
    async fn check(&mut self, number: u64, append: &Append) -> Result<(), Failure> {
        let Some(module) = module_of(&append.aggregate) else { return Ok(()) };
        let is_there = if let Some(known) = self.known.get(&module) {
            *known
        } else {
            let (url, settings) = (&self.config.journal.url, self.config.journal_settings());
            let found = hapax::open::has_module(url, &settings, &module).await?;
            self.known.insert(module, found);
            found
        };
        if is_there {
            return Err(Failure::from(not_yours(&append.aggregate)).about(&format!("line {number}")));
        }
        Ok(())
    }
}

/// Turns lines into appends.
struct Maker<'a> {
    args: &'a AppendArgs,
    id: Option<IdChain>,
    chain: IdChain,
}

impl<'a> Maker<'a> {
    fn new(args: &'a AppendArgs) -> Result<Self, Failure> {
        let pointers = [
            ("--aggregate-at", &args.aggregate_at),
            ("--kind-at", &args.kind_at),
            ("--time-at", &args.time_at),
        ];
        for (flag, pointer) in pointers {
            if let Some(pointer) = pointer.as_deref().filter(|pointer| !pointer.starts_with('/')) {
                let message = format!("{flag} {pointer:?} is not a JSON pointer: it does not start with '/'");
                return Err(Failure::config(message));
            }
        }
        let id = args.id.clone().map(|pointer| IdChain::new([IdSource::Pointer(pointer)])).transpose();
        let id = id.map_err(|e| Failure::config(format!("--id: {e}")))?;
        Ok(Maker { args, id, chain: IdChain::default() })
    }

    fn append(&self, number: u64, line: Vec<u8>) -> Result<Append, Failure> {
        self.made(line).map_err(|error| Failure::input(format!("line {number}: {error}")))
    }

    fn made(&self, line: Vec<u8>) -> Result<Append, String> {
        let args = self.args;
        let value: Value = serde_json::from_slice(&line).map_err(|e| format!("it is not JSON ({e})"))?;
        let payload = Bytes::from(line);
        let headers = Headers::default();
        let id = match &self.id {
            Some(chain) => chain.find(&headers, &payload, None).map_err(|e| e.to_string())?,
            None => match self.chain.find(&headers, &payload, None) {
                Ok(id) => id,
                // An invalid id is a mistake in the line, not a reason to generate one.
                Err(error) if crate::produce::has_id(&value) => return Err(error.to_string()),
                Err(_) => EventId::now_v7(),
            },
        };
        let aggregate = match (&args.aggregate, &args.aggregate_at) {
            (Some(aggregate), _) => aggregate.clone(),
            (None, pointer) => {
                let text = text_at(&value, pointer.as_deref().unwrap_or_default())?;
                Aggregate::new(text).map_err(|e| e.to_string())?
            }
        };
        let mut event = Event::new(id).payload(payload);
        event.kind = match &args.kind_at {
            Some(pointer) => Some(Kind::new(text_at(&value, pointer)?).map_err(|e| e.to_string())?),
            None => args.kind.clone(),
        };
        hapax::records::check_event(&event).map_err(|e| e.to_string())?;
        if let Some(pointer) = &args.time_at {
            event = event.time(Time::parse(&text_at(&value, pointer)?).map_err(|e| e.to_string())?);
        }
        let mut append = Append::new(aggregate, Expected::Any, [event]);
        append.tenant.clone_from(&args.tenant);
        Ok(append)
    }
}

fn text_at(value: &Value, pointer: &str) -> Result<String, String> {
    match value.pointer(pointer) {
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Number(number)) => Ok(number.to_string()),
        Some(_) => Err(format!("its {pointer} is neither a text nor a number")),
        None => Err(format!("it has no {pointer}")),
    }
}
