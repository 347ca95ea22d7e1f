//! Changes: `sweep`, `retry`, `release`, `kill`, `forget`. The last four say what they will do,
//! ask, and leave a row in the ledger's own audit.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax::config::Config;
use hapax::ledger::{
    Entry, Filter, Identity, IdentityRule, Intervene, Intervened, Intervention, State, SweepSettings, Token,
};
use hapax::words::counted;
use hapax::{Error, EventId, Guard, Ledger, Time};
use serde_json::json;

use super::look::{WhichArgs, entry_json, or_dash};
use crate::cli::Global;
use crate::failure::Failure;
use crate::select::{Part, each_match, first};
use crate::token::ByArgs;
use crate::{print, who};

/// How many entries to read at a time.
const PAGE: usize = 500;

#[derive(Debug, Args)]
pub struct SweepArgs {
    /// How long to keep entries after they are settled [default: ledger.retention_days]
    #[arg(long, value_name = "TIME", value_parser = crate::cli::duration)]
    retention: Option<Duration>,
    /// Say what would be removed, change nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    by: ByArgs,
}

pub async fn sweep(
    global: &Global,
    config: &Config,
    ledger: Arc<dyn Ledger>,
    args: &SweepArgs,
) -> Result<u8, Failure> {
    let mut settings = config.guard_settings();
    settings.retention = args.retention.unwrap_or(settings.retention);
    let swept = if args.dry_run {
        let rehearsal =
            SweepSettings { retention: settings.retention, dry_run: true, ..config.sweep_settings() };
        ledger.sweep(rehearsal).await?
    } else {
        let details = format!("kept for {} s", settings.retention.as_secs());
        who::acts(config, &args.by, "ledger.sweep", &config.ledger_url_shown(), &details).await?;
        Guard::with_settings(ledger, settings)?.sweep().await? // with its spans and metrics
    };
    if global.json {
        let weeks = swept.weeks.iter().map(|(week, rows)| json!({"week": week.to_string(), "entries": rows}));
        print::json(&json!({
            "dry_run": args.dry_run, "entries": swept.entries(), "timeless": swept.rows,
            "weeks": weeks.collect::<Vec<_>>(), "held": swept.held, "lost": swept.lost,
            "paused_until": swept.paused_until.map(|until| until.to_string()),
        }))?;
        return Ok(0);
    }
    let verb = if args.dry_run { "would forget" } else { "forgot" };
    print::line(&format!(
        "{verb} {} ({}, {}); kept although old, because they are open or ended within the retention: {}; marked lost: {}",
        counted(swept.entries(), "entry", "entries"),
        counted(swept.weeks.len() as u64, "week", "weeks"),
        counted(swept.rows, "timeless entry", "timeless entries"),
        swept.held,
        swept.lost
    ))?;
    if let Some(until) = swept.paused_until {
        print::line(&format!(
            "the ledger's clock advanced by more than half the retention since the last sweep; in case it jumped, nothing is \
             deleted before {until}"
        ))?;
    }
    Ok(0)
}

#[derive(Debug, Args)]
pub struct ActArgs {
    /// Only this state; may be repeated
    #[arg(long)]
    state: Vec<State>,
    #[command(flatten)]
    change: ChangeArgs,
}

/// Which entries to change, why, and whether to ask.
#[derive(Debug, Args)]
pub struct ChangeArgs {
    #[command(flatten)]
    pub which: WhichArgs,
    /// Select every entry that matches the filters above, instead of named ones
    #[arg(long, conflicts_with = "ids")]
    pub all: bool,
    /// The event's time, if the ledger's identity includes it
    #[arg(long, value_parser = Time::parse)]
    pub time: Option<Time>,
    /// At most this many, with --all
    #[arg(long, value_name = "N", requires = "all")]
    pub limit: Option<usize>,
    /// The reason, for the audit row
    #[arg(long, alias = "why", value_name = "R")]
    pub reason: String,
    /// The person, for the audit row [default: $USER, else the uid]
    #[arg(long, value_name = "NAME")]
    pub by: Option<String>,
    /// Say what would happen, change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Do not ask for confirmation
    #[arg(long)]
    pub yes: bool,
    /// The events
    #[arg(required_unless_present = "all")]
    pub ids: Vec<EventId>,
    /// The tokens that the events had when they were looked at, by id; of a request to the server.
    #[arg(skip)]
    pub tokens: BTreeMap<String, i64>,
}

/// An entry that is meant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Target {
    pub identity: Identity,
    /// A time of its week, which is part of its name where the ledger's identity includes it.
    pub time: Option<Time>,
}

impl Target {
    pub fn of(entry: &Entry) -> Self {
        // A time before 2000 names the timeless week.
        let time = if entry.week.is_timeless() { Time::default() } else { entry.week.start() };
        Target { identity: entry.identity.clone(), time: Some(time) }
    }
}

/// What is wanted of an entry.
#[derive(Debug)]
pub struct Wanted {
    pub what: Intervention,
    pub target: Target,
    /// Why the ledger need not be asked: it cannot be done.
    pub refused: Option<Error>,
}

impl Wanted {
    pub fn new(what: Intervention, target: Target) -> Self {
        Wanted { what, target, refused: None }
    }

    pub fn refused(what: Intervention, target: Target, error: Error) -> Self {
        Wanted { what, target, refused: Some(error) }
    }
}

impl ChangeArgs {
    /// Refuses flags that name no entries, or all of them.
    pub fn check(&self) -> Result<(), Failure> {
        if !self.all && self.which.scope.is_none() {
            return Err(Failure::config("--scope is missing: an event is named by scope and id"));
        }
        if self.all && self.which.is_empty() {
            return Err(Failure::config("--all without a filter would be every entry; narrow it down"));
        }
        Ok(())
    }
}

pub async fn act(
    global: &Global,
    ledger: &dyn Ledger,
    what: Intervention,
    args: &ActArgs,
) -> Result<u8, Failure> {
    args.change.check()?;
    let states = if args.state.is_empty() { states(what) } else { args.state.clone() };
    let targets = targets(ledger, &states, &args.change).await?;
    let steps = targets.into_iter().map(|target| Wanted::new(what, target)).collect();
    carry_out(global, ledger, steps, &args.change, false).await
}

/// Carries out an intervention on each entry: first a preview of all, by the transition function itself, then
/// a question, then the change of exactly what was previewed. What has changed meanwhile is left as it is.
pub async fn carry_out(
    global: &Global,
    ledger: &dyn Ledger,
    mut steps: Vec<Wanted>,
    args: &ChangeArgs,
    out_of_order: bool,
) -> Result<u8, Failure> {
    if args.reason.trim().is_empty() {
        return Err(Failure::config("--reason is blank; the audit row needs a reason"));
    }
    let by = crate::who::runs(args.by.as_deref())?;
    let request = |what: Intervention, target: &Target, token: Option<Token>| Intervene {
        identity: target.identity.clone(),
        time: target.time,
        what,
        by: by.clone(),
        reason: args.reason.clone(),
        out_of_order,
        dry_run: token.is_none(),
        token,
    };
    let progress = Progress::of(global, steps.len());
    let mut plan = Vec::new();
    for Wanted { what, target, refused } in &mut steps {
        let answer = match refused.take() {
            Some(error) => Err(error),
            None => intervene(ledger, request(*what, target, None)).await,
        };
        let step = match answer {
            Ok(step) => Step::Changes(step.0, Box::new(step.1)),
            // Of those that match, some may stay. One that is named and cannot be changed is a mistake, which
            // changes nothing at all.
            Err(error) => match stays(&error).filter(|_| args.all) {
                Some(reason) => Step::Stays(*what, target.identity.clone(), reason),
                None => return Err(Failure::from(error).about(&target.identity.to_string())),
            },
        };
        plan.push(step);
        progress.show("looked at", plan.len());
    }
    progress.end();
    if args.dry_run {
        report(global, true, &plan)?;
        return Ok(0);
    }
    if !plan.iter().any(|step| matches!(step, Step::Changes(..))) {
        report(global, false, &plan)?;
        return Ok(0);
    }
    if !args.yes && !confirmed(&plan)? {
        return Err(Failure::declined("nothing was changed"));
    }
    let mut done = Vec::new();
    for (step, Wanted { target, .. }) in plan.into_iter().zip(&steps) {
        done.push(match step {
            Step::Changes(what, previewed) => {
                let token = previewed.before.token;
                match intervene(ledger, request(what, target, Some(token))).await {
                    Ok(step) => Step::Changes(step.0, Box::new(step.1)),
                    Err(error) => match stays(&error) {
                        Some(reason) => Step::Stays(what, target.identity.clone(), reason),
                        None => return Err(Failure::from(error).about(&target.identity.to_string())),
                    },
                }
            }
            stays @ Step::Stays(..) => stays,
        });
        progress.show("done with", done.len());
    }
    progress.end();
    report(global, false, &done)?;
    Ok(0)
}

/// How far a long change is, on one line of a terminal.
struct Progress {
    of: usize,
    is_shown: bool,
}

impl Progress {
    fn of(global: &Global, of: usize) -> Self {
        Progress { of, is_shown: std::io::stderr().is_terminal() && !global.json && of > 100 }
    }

    fn show(&self, what: &str, count: usize) {
        if self.is_shown && count.is_multiple_of(100) {
            eprint!("\r{what} {count} of {}", self.of);
        }
    }

    fn end(&self) {
        if self.is_shown {
            eprint!("\r\x1b[K");
        }
    }
}

/// What an intervention does to an entry, or why it leaves it as it is.
enum Step {
    Changes(Intervention, Box<Intervened>),
    Stays(Intervention, Identity, String),
}

impl Step {
    fn what(&self) -> Intervention {
        match self {
            Step::Changes(what, _) | Step::Stays(what, ..) => *what,
        }
    }

    fn identity(&self) -> &Identity {
        match self {
            Step::Changes(_, step) => &step.before.identity,
            Step::Stays(_, identity, _) => identity,
        }
    }

    fn outcome(&self) -> String {
        match self {
            Step::Changes(what, step) => outcome(*what, step),
            Step::Stays(.., reason) => format!("stays: {reason}"),
        }
    }
}

/// What an intervention does to an entry, in words.
pub fn outcome(what: Intervention, step: &Intervened) -> String {
    let unordered = step.after.as_ref().is_some_and(|after| after.unordered);
    let how = if unordered { ", outside the order of its aggregate" } else { "" };
    match what {
        Intervention::Redrive | Intervention::Retry if step.needs_delivery() => {
            "runs when it is delivered again: its bytes or its topic are not in the ledger".to_owned()
        }
        Intervention::Redrive | Intervention::Retry => {
            format!("runs again now{how}, its attempts count from 0")
        }
        Intervention::Release => "loses its lease and runs again now".to_owned(),
        Intervention::Kill => "becomes a dead letter".to_owned(),
        Intervention::Drop => "is lost: its bytes are deleted, its aggregate goes on past it".to_owned(),
        Intervention::Skip => "stays parked, its aggregate goes on past what it waits behind".to_owned(),
        Intervention::Forget => "is removed: its next delivery counts as the first".to_owned(),
    }
}

/// Why an entry stays as it is; `None` if the error says something else.
pub fn stays(error: &Error) -> Option<String> {
    match error {
        Error::Conflict { expected, actual } => Some(format!("it needs {expected}; it is {actual}")),
        Error::NotFound(_) => Some("it is gone".to_owned()),
        // One that others have just now does not fail its neighbours.
        Error::Contended { .. } => Some("it is being changed just now: ask again".to_owned()),
        error @ Error::Invalid { .. } => Some(error.to_string()),
        _ => None,
    }
}

/// For a dead event, `retry` means a redrive.
pub async fn intervene(
    ledger: &dyn Ledger,
    mut request: Intervene,
) -> hapax::Result<(Intervention, Intervened)> {
    if request.what == Intervention::Retry {
        let entry = ledger.get(&request.identity, request.time).await?;
        if entry.is_some_and(|entry| entry.state == State::Dead) {
            request.what = Intervention::Redrive;
        }
    }
    Ok((request.what, ledger.intervene(&request).await?))
}

/// The states to which an intervention applies by default.
fn states(what: Intervention) -> Vec<State> {
    match what {
        Intervention::Redrive | Intervention::Drop => vec![State::Dead],
        Intervention::Skip => vec![State::Parked],
        Intervention::Retry => vec![State::Dead, State::Retry, State::Lost, State::Parked],
        Intervention::Release => vec![State::Leased],
        Intervention::Kill => vec![State::Leased, State::Retry, State::Parked],
        Intervention::Forget => Vec::new(),
    }
}

/// The named entries, or those that match the filters, in the order in which they may run: by
/// aggregate and seq.
pub async fn targets(ledger: &dyn Ledger, states: &[State], args: &ChangeArgs) -> hapax::Result<Vec<Target>> {
    targets_in(ledger, states, args, &Part::default()).await
}

/// The same of a part of those that match the filters.
pub async fn targets_in(
    ledger: &dyn Ledger,
    states: &[State],
    args: &ChangeArgs,
    part: &Part,
) -> hapax::Result<Vec<Target>> {
    if !args.all {
        let scope = args.which.scope.clone();
        let scope = scope.ok_or_else(|| Error::invalid("scope", "an event is named by scope and id"))?;
        let identity = |id: &EventId| Identity {
            tenant: args.which.tenant.clone(),
            scope: scope.clone(),
            id: id.clone(),
        };
        let mut targets = Vec::with_capacity(args.ids.len());
        for id in &args.ids {
            let target = named(ledger, identity(id), args).await?;
            if !targets.contains(&target) {
                targets.push(target);
            }
        }
        return Ok(targets);
    }
    let filter = args.which.filter(ledger, states).await?;
    let found = first(ledger, &filter, part, args.limit.unwrap_or(usize::MAX)).await?;
    Ok(found.into_iter().map(|(_, entry)| Target::of(&entry)).collect())
}

/// A named entry. Where the identity includes the time and none is given, the entry with that id, if the
/// ledger has one, or the one of several that was looked at.
async fn named(ledger: &dyn Ledger, identity: Identity, args: &ChangeArgs) -> hapax::Result<Target> {
    if args.time.is_some() || ledger.settings().identity != IdentityRule::IdAndTime {
        return Ok(Target { identity, time: args.time });
    }
    let filter = Filter {
        tenant: Some(identity.tenant.clone()),
        scope: Some(identity.scope.clone()),
        id: Some(identity.id.clone()),
        ..Filter::default()
    };
    let found = ledger.list(&filter, None, PAGE).await?.entries;
    let token = args.tokens.get(identity.id.as_str().as_ref());
    let looked_at = token.and_then(|token| found.iter().find(|entry| entry.token.0 == *token));
    match (looked_at, &found[..]) {
        (Some(entry), _) | (None, [entry]) => Ok(Target::of(entry)),
        (None, []) => Ok(Target { identity, time: Some(Time::default()) }), // it is not found then either
        (None, [entry, ..]) if token.is_some() => Ok(Target::of(entry)), // it has changed, whichever it was
        _ => {
            let message =
                format!("{} entries have the id {}; their times tell them apart", found.len(), identity.id);
            Err(Error::invalid("time", message))
        }
    }
}

/// Shows every entry that matches the filters, in key order and without its bytes.
pub async fn each_entry(
    ledger: &dyn Ledger,
    states: &[State],
    which: &WhichArgs,
    look: impl FnMut(Entry),
) -> hapax::Result<()> {
    each_match(ledger, &which.filter(ledger, states).await?, look).await
}

fn confirmed(plan: &[Step]) -> Result<bool, Failure> {
    print::can_ask("this changes the ledger")?;
    for step in plan.iter().take(20) {
        eprintln!("{} {}: {}", step.what().name(), step.identity(), print::escaped(&step.outcome()));
    }
    if plan.len() > 20 {
        eprintln!("… and {} more; --dry-run shows all", plan.len() - 20);
    }
    let changes = plan.iter().filter(|step| matches!(step, Step::Changes(..))).count() as u64;
    let what = plan.first().map_or("change", |step| step.what().name());
    print::asked(&format!("{what} {}?", counted(changes, "entry", "entries")))
}

fn report(global: &Global, dry_run: bool, steps: &[Step]) -> Result<(), Failure> {
    if global.json {
        let list: Vec<_> = steps.iter().map(step_json).collect();
        return print::json(&json!({"dry_run": dry_run, "entries": list}));
    }
    if steps.is_empty() {
        return print::line("no such entries");
    }
    let would = if dry_run { "would " } else { "" };
    let rows: Vec<_> = steps
        .iter()
        .map(|step| {
            let (before, after, token) = match step {
                Step::Changes(_, step) => {
                    let after = step.after.as_ref();
                    let state = after.map_or_else(|| "gone".to_owned(), |entry| entry.state.to_string());
                    (step.before.state.to_string(), state, or_dash(after.map(|entry| &entry.token)))
                }
                Step::Stays(..) => ("-".to_owned(), "-".to_owned(), "-".to_owned()),
            };
            let entry = step.identity().to_string();
            [
                format!("{would}{}", step.what().name()),
                entry,
                before,
                after,
                token,
                print::escaped(&step.outcome()),
            ]
        })
        .collect();
    print::table(["what", "entry", "before", "after", "token", "outcome"], &rows)?;
    let bare = steps.iter().filter(|step| matches!(step, Step::Changes(_, step) if step.needs_delivery()));
    let bare = bare.count();
    if bare > 0 {
        print::line(&format!(
            "{bare} of them have no bytes or no topic in the ledger: publish those again, for no consumer may take them up"
        ))?;
    }
    let stay = steps.iter().filter(|step| matches!(step, Step::Stays(..))).count() as u64;
    if stay > 0 {
        print::line(&format!("{} as before", counted(stay, "entry stays", "entries stay")))?;
    }
    Ok(())
}

fn step_json(step: &Step) -> serde_json::Value {
    let (before, after, needs_delivery) = match step {
        Step::Changes(_, step) => {
            let after = step.after.as_ref().map(|entry| entry_json(entry, false));
            (Some(entry_json(&step.before, false)), after, step.needs_delivery())
        }
        Step::Stays(..) => (None, None, false),
    };
    json!({
        "what": step.what().name(),
        "id": step.identity().id.to_string(),
        "changes": matches!(step, Step::Changes(..)),
        "outcome": step.outcome(),
        "before": before,
        "after": after,
        "needs_delivery": needs_delivery,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// T537: a preview of a thousand does not fail because of one that others have just now; a ledger that is away
    /// fails it.
    #[test]
    fn t537_an_event_that_others_have_just_now_stays() {
        let contended = Error::Contended { what: "a lock".to_owned(), source: None };
        assert!(stays(&contended).is_some_and(|why| why.contains("ask again")));
        assert_eq!(stays(&Error::Unavailable { what: "it is away".to_owned(), source: None }), None);
    }
}
