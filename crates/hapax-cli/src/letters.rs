//! `hapax dead` and `hapax parked`: events that could not be processed, and events that wait behind
//! them.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use hapax::ledger::{Entry, Filter, Identity, Intervention, State};
use hapax::{Aggregate, Ledger, Scope, Tenant};

use crate::cli::Global;
use crate::failure::Failure;
use crate::ledger::act::{ChangeArgs, carry_out, entries, targets};
use crate::ledger::look::{PageArgs, ShowArgs, WhichArgs, list_page, show_if};
use crate::ledger::open;

/// How many entries to read at a time.
const PAGE: usize = 500;

#[derive(Debug, Args)]
pub struct DeadArgs {
    #[command(subcommand)]
    command: DeadCommand,
}

#[derive(Debug, Subcommand)]
enum DeadCommand {
    /// List dead letters, each with its reason
    #[command(after_help = "Example: hapax dead ls --scope mailer --topic orders --since 24h")]
    Ls(ListArgs),
    /// Show one dead letter; with --payload also its bytes and headers
    #[command(after_help = "Example: hapax dead show --scope mailer --payload order-17-paid")]
    Show(ShowArgs),
    /// Run dead letters again with attempts reset, in the order of their aggregates
    #[command(
        after_help = "Example: hapax dead redrive --scope mailer --all --reason 'fixed in 1.4.2' --dry-run"
    )]
    Redrive(RedriveArgs),
    /// Give up dead letters: removes their bytes, and their aggregates continue past them
    #[command(after_help = "Example: hapax dead drop --scope mailer --reason 'test data' order-17-paid")]
    Drop(ChangeArgs),
}

#[derive(Debug, Args)]
pub struct ParkedArgs {
    #[command(subcommand)]
    command: ParkedCommand,
}

#[derive(Debug, Subcommand)]
enum ParkedCommand {
    /// List parked events
    #[command(after_help = "Example: hapax parked ls --scope mailer --aggregate order-17")]
    Ls(ListArgs),
    /// Show one parked event; with --payload also its bytes and headers
    #[command(after_help = "Example: hapax parked show --scope mailer order-17-shipped")]
    Show(ShowArgs),
    /// Run again what parked events wait behind: the dead event of their aggregate, or else
    /// themselves
    #[command(
        after_help = "Example: hapax parked resume --scope mailer --aggregate order-17 --all --reason 'fixed in 1.4.2'"
    )]
    Resume(ChangeArgs),
    /// Let aggregates continue past what their parked events wait behind (a dead event stays dead)
    #[command(
        after_help = "Example: hapax parked skip --scope mailer --aggregate order-17 --all --reason 'seq 3 never existed'"
    )]
    Skip(ChangeArgs),
}

#[derive(Debug, Args)]
struct ListArgs {
    #[command(flatten)]
    which: WhichArgs,
    #[command(flatten)]
    page: PageArgs,
}

#[derive(Debug, Args)]
struct RedriveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    /// Include events whose aggregate has moved past them: they then run without order, permanently
    #[arg(long)]
    out_of_order: bool,
}

pub async fn dead(global: &Global, args: &DeadArgs) -> Result<u8, Failure> {
    let ledger = open(global, &global.load()?).await?;
    match &args.command {
        DeadCommand::Ls(args) => list(global, &*ledger, State::Dead, args).await,
        DeadCommand::Show(args) => show_if(global, &*ledger, args, Some(State::Dead)).await,
        DeadCommand::Redrive(args) => {
            args.change.check()?;
            let steps = each(&*ledger, Intervention::Redrive, &args.change).await?;
            carry_out(global, &*ledger, steps, &args.change, args.out_of_order).await
        }
        DeadCommand::Drop(args) => {
            args.check()?;
            let steps = each(&*ledger, Intervention::Drop, args).await?;
            carry_out(global, &*ledger, steps, args, false).await
        }
    }
}

pub async fn parked(global: &Global, args: &ParkedArgs) -> Result<u8, Failure> {
    let ledger = open(global, &global.load()?).await?;
    match &args.command {
        ParkedCommand::Ls(args) => list(global, &*ledger, State::Parked, args).await,
        ParkedCommand::Show(args) => show_if(global, &*ledger, args, Some(State::Parked)).await,
        ParkedCommand::Resume(args) => {
            args.check()?;
            let steps = resume(&*ledger, args).await?;
            carry_out(global, &*ledger, steps, args, false).await
        }
        ParkedCommand::Skip(args) => {
            args.check()?;
            let steps = skip(&*ledger, args).await?;
            carry_out(global, &*ledger, steps, args, false).await
        }
    }
}

async fn list(global: &Global, ledger: &dyn Ledger, state: State, args: &ListArgs) -> Result<u8, Failure> {
    let filter = args.which.filter(ledger, &[state]).await?;
    list_page(global, ledger, &filter, &args.page).await
}

/// An intervention in each of the chosen dead letters.
pub async fn each(
    ledger: &dyn Ledger,
    what: Intervention,
    args: &ChangeArgs,
) -> hapax::Result<Vec<(Intervention, Identity)>> {
    let targets = targets(ledger, &[State::Dead], args).await?;
    Ok(targets.into_iter().map(|identity| (what, identity)).collect())
}

/// The dead events that the chosen parked events wait behind, in order; if there are none, the
/// parked events themselves.
pub async fn resume(ledger: &dyn Ledger, args: &ChangeArgs) -> hapax::Result<Vec<(Intervention, Identity)>> {
    let mut steps = Vec::new();
    for parked in lowest(ledger, args).await? {
        let mut heads = dead_heads(ledger, &parked).await?;
        heads.sort_by_key(|head| head.order.as_ref().map(|(_, seq)| *seq));
        if heads.is_empty() && parked.order.is_some() {
            return Err(hapax::Error::Conflict {
                expected: format!("a dead event that {} waits for", parked.identity),
                actual:
                    "none: one before it never came; publish that, or go on without it (`hapax parked skip`)"
                        .into(),
            });
        } else if heads.is_empty() {
            steps.push((Intervention::Retry, parked.identity));
        } else {
            steps.extend(heads.into_iter().map(|head| (Intervention::Redrive, head.identity)));
        }
    }
    Ok(steps)
}

/// Lets the aggregates of the chosen parked events go on; one event of an aggregate moves all of it.
pub async fn skip(ledger: &dyn Ledger, args: &ChangeArgs) -> hapax::Result<Vec<(Intervention, Identity)>> {
    let lowest = lowest(ledger, args).await?;
    Ok(lowest.into_iter().map(|entry| (Intervention::Skip, entry.identity)).collect())
}

/// Identifies a sequence of events that wait for each other: those of an aggregate, or a single
/// event without one.
type Line = (Option<Tenant>, Scope, Option<Aggregate>, Option<Identity>);

/// The first of the chosen parked events of each aggregate, and all those without an aggregate.
async fn lowest(ledger: &dyn Ledger, args: &ChangeArgs) -> hapax::Result<Vec<Entry>> {
    let chosen = if args.all {
        entries(ledger, &[State::Parked], &args.which, args.read_max).await?
    } else {
        let mut chosen = Vec::new();
        for identity in targets(ledger, &[State::Parked], args).await? {
            let entry = ledger.get(&identity, args.time).await?;
            chosen.push(entry.ok_or_else(|| hapax::Error::NotFound(format!("no entry for {identity}")))?);
        }
        chosen
    };
    let mut first: BTreeMap<Line, Entry> = BTreeMap::new();
    for entry in chosen {
        let Identity { tenant, scope, .. } = entry.identity.clone();
        let aggregate = entry.order.as_ref().map(|(aggregate, _)| aggregate.clone());
        let alone = aggregate.is_none().then(|| entry.identity.clone());
        let seq = |entry: &Entry| entry.order.as_ref().map(|(_, seq)| *seq);
        let before = first.entry((tenant, scope, aggregate, alone)).or_insert_with(|| entry.clone());
        if seq(&entry) < seq(before) {
            *before = entry;
        }
    }
    let mut first: Vec<_> = first.into_values().collect();
    first.truncate(args.limit.unwrap_or(usize::MAX));
    Ok(first)
}

async fn dead_heads(ledger: &dyn Ledger, parked: &Entry) -> hapax::Result<Vec<Entry>> {
    let Some((aggregate, seq)) = &parked.order else { return Ok(Vec::new()) };
    let filter = Filter {
        tenant: Some(parked.identity.tenant.clone()),
        scope: Some(parked.identity.scope.clone()),
        aggregate: Some(aggregate.clone()),
        states: vec![State::Dead],
        ..Filter::default()
    };
    let mut found = Vec::new();
    let mut after = None;
    loop {
        let page = ledger.list(&filter, after.as_ref(), PAGE).await?;
        let below = |entry: &Entry| entry.order.as_ref().is_some_and(|(_, of)| of < seq);
        found.extend(page.entries.into_iter().filter(below));
        after = page.next;
        if after.is_none() {
            return Ok(found);
        }
    }
}
