//! `hapax dead` and `hapax parked`: events that could not be processed, and events that wait behind
//! them.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use hapax::ledger::{Entry, Filter, Identity, Intervention, State};
use hapax::{Aggregate, Error, Ledger, Scope, Tenant};
use serde_json::json;

use crate::cli::Global;
use crate::failure::Failure;
use crate::ledger::act::{ChangeArgs, Target, Wanted, carry_out, each_entry, targets, targets_in};
use crate::ledger::look::{PageArgs, ShowArgs, WhichArgs, list_page, or_dash, show_if};
use crate::ledger::open;
use crate::print;
use crate::reasons::Groups;
use crate::select::Part;

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
    Ls(DeadListArgs),
    /// Show one dead letter; with --payload also its bytes and headers
    #[command(after_help = "Example: hapax dead show --scope mailer --payload order-17-paid")]
    Show(ShowArgs),
    /// Run dead letters again with attempts reset, in the order of their aggregates
    #[command(
        after_help = "Example: hapax dead redrive --scope mailer --all --reason 'fixed in 1.4.2' --dry-run"
    )]
    Redrive(RedriveArgs),
    /// Drop dead letters: their bytes are removed, and their aggregates continue past them
    #[command(after_help = "Example: hapax dead drop --scope mailer --reason 'test data' order-17-paid")]
    Drop(DropArgs),
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
    /// Run again what parked events wait behind: the dead event of their aggregate, or the parked
    /// events themselves
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
struct DeadListArgs {
    #[command(flatten)]
    list: ListArgs,
    /// Count them by reason, the most frequent first: words with digits are `#` in it
    #[arg(long, conflicts_with = "after")]
    by_reason: bool,
}

#[derive(Debug, Args)]
struct PatternArgs {
    /// Only dead letters whose reason has this pattern, as `hapax dead ls --by-reason` shows it
    #[arg(long, value_name = "P", requires = "all")]
    pattern: Option<String>,
}

impl PatternArgs {
    /// A pattern narrows down by itself.
    fn check(&self, change: &ChangeArgs) -> Result<(), Failure> {
        if self.pattern.is_some() { Ok(()) } else { change.check() }
    }

    fn part(&self) -> Part {
        Part { pattern: self.pattern.clone(), after: None }
    }
}

#[derive(Debug, Args)]
struct DropArgs {
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    of: PatternArgs,
}

#[derive(Debug, Args)]
struct RedriveArgs {
    #[command(flatten)]
    change: ChangeArgs,
    #[command(flatten)]
    of: PatternArgs,
    /// Include events whose aggregate has moved past them: those run without their place in the order
    #[arg(long)]
    out_of_order: bool,
}

pub async fn dead(global: &Global, args: &DeadArgs) -> Result<u8, Failure> {
    let ledger = open(global, &global.load()?).await?;
    match &args.command {
        DeadCommand::Ls(args) if args.by_reason => by_reason(global, &*ledger, &args.list).await,
        DeadCommand::Ls(args) => list(global, &*ledger, State::Dead, &args.list).await,
        DeadCommand::Show(args) => show_if(global, &*ledger, args, Some(State::Dead)).await,
        DeadCommand::Redrive(args) => {
            args.of.check(&args.change)?;
            let steps = each(&*ledger, Intervention::Redrive, &args.change, &args.of.part()).await?;
            carry_out(global, &*ledger, steps, &args.change, args.out_of_order).await
        }
        DeadCommand::Drop(args) => {
            args.of.check(&args.change)?;
            let steps = each(&*ledger, Intervention::Drop, &args.change, &args.of.part()).await?;
            carry_out(global, &*ledger, steps, &args.change, false).await
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

/// Counts dead letters by reason.
async fn by_reason(global: &Global, ledger: &dyn Ledger, args: &ListArgs) -> Result<u8, Failure> {
    let mut groups = Groups::default();
    each_entry(ledger, &[State::Dead], &args.which, |entry| groups.add(&entry)).await?;
    let (looked, is_cut) = (groups.looked, groups.is_cut);
    let mut groups = groups.sorted();
    let more = is_cut || groups.len() > args.page.limit;
    groups.truncate(args.page.limit);
    if global.json {
        let list = groups.iter().map(|group| {
            json!({
                "tenant": group.tenant.as_ref().map(Tenant::as_str), "scope": group.scope.as_str(),
                "pattern": group.pattern, "reason": group.reason, "count": group.count,
                "first_at": group.first_at.to_string(), "last_at": group.last_at.to_string(), "ids": group.ids,
            })
        });
        print::json(&json!({"groups": list.collect::<Vec<_>>(), "looked": looked, "more": more}))?;
        return Ok(0);
    }
    let rows: Vec<_> = groups
        .iter()
        .map(|group| {
            [
                group.count.to_string(),
                or_dash(group.tenant.as_ref()),
                group.scope.to_string(),
                group.first_at.to_string(),
                group.last_at.to_string(),
                print::escaped(&group.pattern),
            ]
        })
        .collect();
    print::table(["count", "tenant", "scope", "first", "latest", "reason"], &rows)?;
    if more {
        print::line("there are more reasons: --limit, or a filter")?;
    }
    Ok(0)
}

/// An intervention in each of the chosen dead letters.
async fn each(
    ledger: &dyn Ledger,
    what: Intervention,
    args: &ChangeArgs,
    part: &Part,
) -> hapax::Result<Vec<Wanted>> {
    let targets = targets_in(ledger, &[State::Dead], args, part).await?;
    Ok(targets.into_iter().map(|target| Wanted::new(what, target)).collect())
}

/// The dead events that the chosen parked events wait behind, in order; if there are none, the
/// parked events themselves. Such a dead event may be named itself, as a preview does.
pub async fn resume(ledger: &dyn Ledger, args: &ChangeArgs) -> hapax::Result<Vec<Wanted>> {
    let Chosen { lowest, others, mut wanted } = chosen(ledger, args, Intervention::Retry).await?;
    for entry in others {
        let target = Target::of(&entry);
        wanted.push(match (entry.state, &entry.order) {
            (State::Dead, Some(_)) => Wanted::new(Intervention::Redrive, target),
            (_, None) => Wanted::new(Intervention::Retry, target),
            (state, Some(_)) => {
                let expected = "a parked event, or a dead one that others wait behind".to_owned();
                let error = Error::Conflict { expected, actual: state.to_string() };
                Wanted::refused(Intervention::Retry, target, error)
            }
        });
    }
    for parked in lowest {
        let mut heads = dead_heads(ledger, &parked).await?;
        heads.sort_by_key(|head| head.order.as_ref().map(|(_, seq)| *seq));
        if heads.is_empty() && parked.order.is_some() {
            let error = Error::Conflict {
                expected: format!("a dead event that {} waits for", parked.identity),
                actual:
                    "none: one before it never came; publish that, or go on without it (`hapax parked skip`)"
                        .into(),
            };
            wanted.push(Wanted::refused(Intervention::Retry, Target::of(&parked), error));
        } else if heads.is_empty() {
            wanted.push(Wanted::new(Intervention::Retry, Target::of(&parked)));
        } else {
            let is_new = |head: &&Entry| !wanted.iter().any(|wanted| wanted.target == Target::of(head));
            let heads: Vec<_> = heads.iter().filter(is_new).map(Target::of).collect();
            wanted.extend(heads.into_iter().map(|head| Wanted::new(Intervention::Redrive, head)));
        }
    }
    Ok(wanted)
}

/// Lets the aggregates of the chosen parked events go on; one event of an aggregate moves all of it.
pub async fn skip(ledger: &dyn Ledger, args: &ChangeArgs) -> hapax::Result<Vec<Wanted>> {
    let Chosen { lowest, others, mut wanted } = chosen(ledger, args, Intervention::Skip).await?;
    let entries = others.iter().chain(&lowest);
    wanted.extend(entries.map(|entry| Wanted::new(Intervention::Skip, Target::of(entry))));
    Ok(wanted)
}

/// Identifies a sequence of events that wait for each other: those of an aggregate, or a single
/// event without one.
type Line = (Option<Tenant>, Scope, Option<Aggregate>, Option<Identity>);

/// The chosen parked events.
struct Chosen {
    /// The first of each aggregate, and all those without an aggregate; of more than the limit the first in the
    /// order of [`Line`].
    lowest: Vec<Entry>,
    /// Those that are named and not parked, by aggregate and seq.
    others: Vec<Entry>,
    /// Those that are named and not there.
    wanted: Vec<Wanted>,
}

async fn chosen(ledger: &dyn Ledger, args: &ChangeArgs, what: Intervention) -> hapax::Result<Chosen> {
    let (mut first, most) = (BTreeMap::<Line, Entry>::new(), args.limit.unwrap_or(usize::MAX));
    let (mut others, mut wanted) = (Vec::new(), Vec::new());
    let seq = |entry: &Entry| entry.order.as_ref().map(|(_, seq)| *seq);
    let mut look = |entry: Entry| {
        let Identity { tenant, scope, .. } = entry.identity.clone();
        let aggregate = entry.order.as_ref().map(|(aggregate, _)| aggregate.clone());
        let alone = aggregate.is_none().then(|| entry.identity.clone());
        let before = first.entry((tenant, scope, aggregate, alone)).or_insert_with(|| entry.clone());
        if seq(&entry) < seq(before) {
            *before = entry;
        }
        // What is beyond the limit now is so at the end too: only what is before it can come.
        if first.len() > most {
            first.pop_last();
        }
    };
    if args.all {
        each_entry(ledger, &[State::Parked], &args.which, look).await?;
    } else {
        for target in targets(ledger, &[State::Parked], args).await? {
            match ledger.get(&target.identity, target.time).await? {
                Some(entry) if entry.state == State::Parked => look(entry),
                Some(entry) => others.push(entry),
                None => {
                    let error = Error::NotFound(format!("no entry for {}", target.identity));
                    wanted.push(Wanted::refused(what, target, error));
                }
            }
        }
    }
    others.sort_by(|a, b| a.order.cmp(&b.order));
    Ok(Chosen { lowest: first.into_values().collect(), others, wanted })
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use hapax::EventId;
    use hapax::backend::memory::MemoryLedger;
    use hapax::ledger::{Claim, Claims as _, LeaseSettings, Mode, OnDead, Order, OrderPolicy, Outcome};

    use super::*;

    fn claim(id: &str, seq: u64) -> Claim {
        let identity =
            Identity { tenant: None, scope: Scope::new("mailer").unwrap(), id: EventId::new(id).unwrap() };
        let settings = LeaseSettings { lease: Duration::from_secs(600), attempts_max: 5, alone: true };
        let mut claim = Claim::new(identity, Mode::Lease(settings));
        let aggregate = Aggregate::new("order-17").unwrap();
        claim.order = Some(Order { aggregate, seq, policy: OrderPolicy::Latest, on_dead: OnDead::Park });
        claim.hold = true;
        claim
    }

    /// Entries are listed by id, 500 at a time. The event that all others wait behind is the last of three pages.
    #[tokio::test]
    async fn the_lowest_parked_event_is_found_however_many_are_listed_before_it() {
        let ledger = MemoryLedger::default();
        let head = ledger.claim(&[claim("head", 1)]).await.unwrap().pop().unwrap().unwrap();
        assert!(matches!(head, Outcome::First(_)));
        let mut parked: Vec<_> = (0..1_100).map(|n| claim(&format!("a-{n:05}"), 3 + n)).collect();
        parked.push(claim("zz", 2));
        for outcome in ledger.claim(&parked).await.unwrap() {
            assert_eq!(outcome.unwrap().name(), "parked");
        }
        let args = ChangeArgs {
            which: WhichArgs { scope: Some(Scope::new("mailer").unwrap()), ..WhichArgs::default() },
            all: true,
            time: None,
            limit: Some(1),
            reason: "fixed".into(),
            by: None,
            dry_run: false,
            yes: true,
            ids: Vec::new(),
            tokens: BTreeMap::new(),
        };
        let steps = skip(&ledger, &args).await.unwrap();
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].target.identity.id.as_str(), "zz");
        // Whatever is chosen one by one comes in the same order.
        let first = targets(&ledger, &[State::Parked], &args).await.unwrap();
        assert_eq!(first[0].identity.id.as_str(), "zz");
    }
}
