//! Changes: `sweep`, `retry`, `release`, `kill`, `forget`. The last four say what they will do,
//! ask, and leave an audit row.

use std::collections::BTreeMap;
use std::io::IsTerminal as _;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use hapax::config::Config;
use hapax::ledger::{Entry, Identity, Intervene, Intervened, Intervention, State, SweepSettings};
use hapax::words::counted;
use hapax::{EventId, Guard, Ledger, Time};
use serde_json::json;

use super::look::{WhichArgs, entry_json, or_dash};
use crate::cli::Global;
use crate::failure::Failure;
use crate::print;

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
        "{verb} {} ({}, {}); kept although old, because still open: {}; marked lost: {}",
        counted(swept.entries(), "entry", "entries"),
        counted(swept.weeks.len() as u64, "week", "weeks"),
        counted(swept.rows, "timeless entry", "timeless entries"),
        swept.held,
        swept.lost
    ))?;
    if let Some(until) = swept.paused_until {
        print::line(&format!(
            "the ledger's clock moved on by more than half the retention since the sweep before; in case the clock jumped, nothing is \
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
    let steps = targets.into_iter().map(|identity| (what, identity)).collect();
    carry_out(global, ledger, steps, &args.change, false).await
}

/// Carries out an intervention on each entry: first a dry run of all, then a question, then the
/// change.
pub async fn carry_out(
    global: &Global,
    ledger: &dyn Ledger,
    steps: Vec<(Intervention, Identity)>,
    args: &ChangeArgs,
    out_of_order: bool,
) -> Result<u8, Failure> {
    if args.reason.trim().is_empty() {
        return Err(Failure::config("--reason is blank; the audit row needs a reason"));
    }
    let by = crate::who::runs(args.by.as_deref())?;
    let request = |what: Intervention, identity: &Identity, dry_run| Intervene {
        identity: identity.clone(),
        time: args.time,
        what,
        by: by.clone(),
        reason: args.reason.clone(),
        out_of_order,
        dry_run,
    };
    // Dry-run all of them first, so that a mistake in the list changes nothing at all.
    let mut plan = Vec::new();
    for (what, identity) in &steps {
        plan.push(intervened(ledger, request(*what, identity, true)).await?);
    }
    if args.dry_run {
        report(global, "would ", &plan)?;
        return Ok(0);
    }
    if plan.is_empty() {
        report(global, "", &[])?;
        return Ok(0);
    }
    if !args.yes && !confirmed(&plan)? {
        return Err(Failure::declined("nothing was changed"));
    }
    let line = std::io::stderr().is_terminal() && !global.json && steps.len() > 100;
    let mut done = Vec::new();
    for (what, identity) in &steps {
        done.push(intervened(ledger, request(*what, identity, false)).await?);
        if line && done.len() % 100 == 0 {
            eprint!("\r{} of {}", done.len(), steps.len());
        }
    }
    if line {
        eprint!("\r\x1b[K");
    }
    report(global, "", &done)?;
    Ok(0)
}

async fn intervened(ledger: &dyn Ledger, request: Intervene) -> Result<(Intervention, Intervened), Failure> {
    let identity = request.identity.to_string();
    intervene(ledger, request).await.map_err(|error| Failure::from(error).about(&identity))
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
pub async fn targets(
    ledger: &dyn Ledger,
    states: &[State],
    args: &ChangeArgs,
) -> hapax::Result<Vec<Identity>> {
    if !args.all {
        let scope = args.which.scope.clone();
        let scope =
            scope.ok_or_else(|| hapax::Error::invalid("scope", "an event is named by scope and id"))?;
        let identity = |id: &EventId| Identity {
            tenant: args.which.tenant.clone(),
            scope: scope.clone(),
            id: id.clone(),
        };
        return Ok(args.ids.iter().map(identity).collect());
    }
    let most = args.limit.unwrap_or(usize::MAX);
    let mut first = BTreeMap::new();
    each_entry(ledger, states, &args.which, |entry| {
        let Identity { tenant, scope, id } = entry.identity.clone();
        first.insert((tenant, scope, entry.order.clone(), entry.first_at, id), entry.identity);
        if first.len() > most {
            first.pop_last();
        }
    })
    .await?;
    Ok(first.into_values().collect())
}

/// Shows every entry that matches the filters, in key order and without its bytes. Whoever wants the first in
/// another order looks at all of them, and keeps as many as it needs.
pub async fn each_entry(
    ledger: &dyn Ledger,
    states: &[State],
    which: &WhichArgs,
    mut look: impl FnMut(Entry),
) -> hapax::Result<()> {
    let filter = which.filter(ledger, states).await?;
    let mut after = None;
    loop {
        let page = ledger.list(&filter, after.as_ref(), PAGE).await?;
        for mut entry in page.entries {
            entry.row.body = None;
            look(entry);
        }
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

fn confirmed(plan: &[(Intervention, Intervened)]) -> Result<bool, Failure> {
    print::can_ask("this changes the ledger")?;
    for (what, step) in plan.iter().take(20) {
        eprintln!("{} {} ({})", what.name(), step.before.identity, step.before.state);
    }
    if plan.len() > 20 {
        eprintln!("… and {} more", plan.len() - 20);
    }
    let what = plan.first().map_or("change", |(what, _)| what.name());
    print::asked(&format!("{what} {}?", counted(plan.len() as u64, "entry", "entries")))
}

fn report(global: &Global, would: &str, steps: &[(Intervention, Intervened)]) -> Result<(), Failure> {
    if global.json {
        let list = steps.iter().map(|(what, step)| {
            json!({
                "what": what.name(),
                "before": entry_json(&step.before, false),
                "after": step.after.as_ref().map(|entry| entry_json(entry, false)),
                "needs_delivery": step.needs_delivery(),
            })
        });
        return print::json(&json!({"dry_run": !would.is_empty(), "entries": list.collect::<Vec<_>>()}));
    }
    if steps.is_empty() {
        return print::line("no such entries");
    }
    let rows: Vec<_> = steps
        .iter()
        .map(|(what, step)| {
            let after = step.after.as_ref();
            [
                format!("{would}{}", what.name()),
                step.before.identity.to_string(),
                step.before.state.to_string(),
                after.map_or_else(|| "gone".to_owned(), |entry| entry.state.to_string()),
                or_dash(after.map(|entry| &entry.token)),
            ]
        })
        .collect();
    print::table(["what", "entry", "before", "after", "token"], &rows)?;
    let bare = steps.iter().filter(|(_, step)| step.needs_delivery()).count();
    if bare > 0 {
        print::line(&format!(
            "{bare} of them have no bytes or no topic in the ledger: publish those again, for no consumer may take them up"
        ))?;
    }
    Ok(())
}
