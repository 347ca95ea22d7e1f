//! Steps of the ledger: when a scope first saw an event, what operators did, and how it stands.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use hapax::ledger::{Audit, Entry, Filter, Identity, Intervention, Logged, State, Week};
use hapax::words::counted;
use hapax::{EventId, Fingerprint, Ledger, Owner, Scope, Tenant, Time};

use super::explanation::{Layer, Queue, Step, stamp};
use super::skips::{self, Skips};
use super::stores::Visibility;

/// How many open entries of a scope are shown, those with the lowest seqs; how many settled ones, the latest; and how
/// many are on a page.
const OPEN_MAX: usize = 2000;
const SETTLED_MAX: usize = 2000;
const PAGE: usize = 2000;
/// How many audit rows are shown, the newest.
const AUDIT_MAX: usize = 10_000;
/// How many seqs a sentence names.
const SEQS_MAX: usize = 10;
/// How many entries of other tenants are looked at.
const OTHERS: usize = 20;

/// An entry without its bytes, which are never shown.
pub struct Seen {
    pub entry: Entry,
    held: Option<Held>,
}

/// How much the ledger holds of an event.
struct Held {
    payload_bytes: Option<usize>,
    headers: usize,
}

impl Seen {
    pub fn new(mut entry: Entry) -> Self {
        let held = entry.row.body.take().map(|body| Held {
            payload_bytes: body.payload.as_ref().map(bytes::Bytes::len),
            headers: body.headers.iter().count(),
        });
        Seen { entry, held }
    }

    fn seq(&self) -> Option<u64> {
        self.entry.order.as_ref().map(|(_, seq)| *seq)
    }

    fn place(&self) -> Place {
        let Identity { scope, id, .. } = self.entry.identity.clone();
        (self.seq(), self.entry.first_at, scope, id, self.entry.week)
    }
}

/// The order of entries that are shown: by seq, then by when they were first seen.
type Place = (Option<u64>, Time, Scope, EventId, Week);

/// How far a scope is with an aggregate, as all of its settled entries say, also those that are not shown.
#[derive(Default)]
struct Progress {
    /// The highest seq that took effect.
    done_up_to: Option<u64>,
    /// The lowest seq that is parked, and the highest that took effect below it.
    parked: Option<u64>,
    done_below: Option<u64>,
}

impl Progress {
    fn opened(&mut self, state: State, seq: u64) {
        if state == State::Parked {
            self.parked = Some(self.parked.map_or(seq, |parked| parked.min(seq)));
        }
    }

    fn settled(&mut self, state: State, seq: u64) {
        if !matches!(state, State::Done | State::Finished) {
            return;
        }
        self.done_up_to = self.done_up_to.max(Some(seq));
        if self.parked.is_some_and(|parked| seq < parked) {
            self.done_below = self.done_below.max(Some(seq));
        }
    }
}

/// What a ledger has.
pub struct Found {
    /// Entries that are shown, by seq.
    pub seen: Vec<Seen>,
    progress: BTreeMap<Scope, Progress>,
    /// If there is nothing: the tenants that have something of this name.
    pub others: Vec<Option<Tenant>>,
    audit: Vec<Audit>,
    skips: Skips,
    now: Time,
    /// What was left out, if anything was.
    pub left_out: Vec<String>,
}

/// Asks a ledger about events of a tenant, as far as the one who asks may see them. Of those with a known id, also
/// what is recorded of entries that are gone.
pub async fn look(
    ledger: &dyn Ledger,
    tenant: Option<&Tenant>,
    filter: Filter,
    known: &[EventId],
    visibility: &Visibility,
) -> hapax::Result<Found> {
    let filter = Filter { scopes: visibility.scopes.clone(), ..filter };
    let mut found = look_without_audit(ledger, tenant, filter, visibility).await?;
    found.skips = Skips::look(ledger, tenant, known, &found, visibility).await?;
    let scopes = match &visibility.scopes {
        Some(scopes) => scopes.clone(),
        None => ledger.scopes().await?,
    };
    let mut of: BTreeSet<Identity> = found.seen.iter().map(|seen| seen.entry.identity.clone()).collect();
    for scope in &scopes {
        let identity =
            |id: &EventId| Identity { tenant: tenant.cloned(), scope: scope.clone(), id: id.clone() };
        of.extend(known.iter().map(identity));
    }
    let of: Vec<_> = of.into_iter().collect();
    found.audit = ledger.audit_of(&of, AUDIT_MAX).await?;
    if found.audit.len() >= AUDIT_MAX {
        found.left_out.push(format!("audit rows before the latest {AUDIT_MAX} are not shown"));
    }
    Ok(found)
}

/// The same without what operators did.
async fn look_without_audit(
    ledger: &dyn Ledger,
    tenant: Option<&Tenant>,
    mut filter: Filter,
    visibility: &Visibility,
) -> hapax::Result<Found> {
    filter.tenant = Some(tenant.cloned());
    let mut found = if filter.id.is_some() {
        // Each scope has one, or one a week.
        let (mut seen, now) = (BTreeMap::new(), ledger.now().await?);
        each(ledger, &filter, |one| drop(seen.insert(one.place(), one))).await?;
        Found::new(seen, BTreeMap::new(), now)
    } else {
        let (open, more) = open_entries(ledger, &filter).await?;
        let mut found = with_settled(ledger, &filter, open, SETTLED_MAX).await?;
        if more {
            found.left_out.push(format!("of a scope's open entries only the first {OPEN_MAX} are shown"));
        }
        found
    };
    if found.seen.is_empty() && !visibility.is_bound {
        filter.tenant = None;
        let page = ledger.list(&filter, None, OTHERS).await?;
        let others: BTreeSet<_> = page.entries.into_iter().map(|entry| entry.identity.tenant).collect();
        found.others.extend(others);
    }
    Ok(found)
}

/// The open entries that match, of each scope those with the lowest seqs, and whether there are more. Listings are by
/// id, so all of them are looked at.
pub async fn open_entries(ledger: &dyn Ledger, filter: &Filter) -> hapax::Result<(Vec<Seen>, bool)> {
    let filter = Filter { states: states(true), ..filter.clone() };
    let (mut open, mut more) = (BTreeMap::<Scope, BTreeMap<Place, Seen>>::new(), false);
    each(ledger, &filter, |seen| {
        let of = open.entry(seen.entry.identity.scope.clone()).or_default();
        of.insert(seen.place(), seen);
        if of.len() > OPEN_MAX {
            of.pop_last();
            more = true;
        }
    })
    .await?;
    Ok((open.into_values().flat_map(BTreeMap::into_values).collect(), more))
}

/// Adds to open entries the latest settled ones that match the filter. It looks at all of those: how a scope stands
/// does not depend on how many are shown.
pub async fn with_settled(
    ledger: &dyn Ledger,
    filter: &Filter,
    open: Vec<Seen>,
    shown_max: usize,
) -> hapax::Result<Found> {
    let now = ledger.now().await?;
    let mut progress = BTreeMap::<Scope, Progress>::new();
    for (seen, seq) in open.iter().filter_map(|seen| Some((seen, seen.seq()?))) {
        progress.entry(seen.entry.identity.scope.clone()).or_default().opened(seen.entry.state, seq);
    }
    let mut open: BTreeMap<_, _> = open.into_iter().map(|seen| (seen.place(), seen)).collect();
    let (mut settled, mut is_cut) = (BTreeMap::new(), false);
    let filter = Filter { states: states(false), ..filter.clone() };
    each(ledger, &filter, |seen| {
        let place = seen.place();
        open.remove(&place); // it was settled meanwhile
        if let Some(seq) = seen.seq() {
            progress.entry(seen.entry.identity.scope.clone()).or_default().settled(seen.entry.state, seq);
        }
        settled.insert(place, seen);
        if settled.len() > shown_max {
            settled.pop_first();
            is_cut = true;
        }
    })
    .await?;
    settled.append(&mut open);
    let cut = is_cut.then(|| format!("of its settled entries only the latest {shown_max} are shown"));
    Ok(Found { left_out: cut.into_iter().collect(), ..Found::new(settled, progress, now) })
}

fn states(open: bool) -> Vec<State> {
    State::ALL.into_iter().filter(|state| state.is_open() == open).collect()
}

/// Shows every entry that matches a filter.
async fn each(ledger: &dyn Ledger, filter: &Filter, mut look: impl FnMut(Seen)) -> hapax::Result<()> {
    let mut after = None;
    loop {
        let page = ledger.list(filter, after.as_ref(), PAGE).await?;
        page.entries.into_iter().map(Seen::new).for_each(&mut look);
        after = page.next;
        if after.is_none() {
            return Ok(());
        }
    }
}

impl Found {
    fn new(seen: BTreeMap<Place, Seen>, progress: BTreeMap<Scope, Progress>, now: Time) -> Self {
        Found {
            seen: seen.into_values().collect(),
            progress,
            others: Vec::new(),
            audit: Vec::new(),
            skips: Skips::default(),
            now,
            left_out: Vec::new(),
        }
    }

    /// The steps of each entry.
    pub fn threads(&self) -> Vec<Vec<Step>> {
        self.seen.iter().map(|seen| self.thread(seen)).collect()
    }

    /// The deliveries that were skipped.
    pub fn skipped(&self) -> Vec<Vec<Step>> {
        let seq = |logged: &Logged| {
            self.seen.iter().find(|seen| seen.entry.identity == logged.identity).and_then(Seen::seq)
        };
        self.skips.logged.iter().map(|logged| skips::steps(logged, seq(logged))).collect()
    }

    /// What is not recorded of skips.
    pub fn unrecorded_skips(&self) -> String {
        self.skips.unrecorded()
    }

    fn thread(&self, seen: &Seen) -> Vec<Step> {
        let entry = &seen.entry;
        let about = |step: Step| step.named(&entry.identity.scope).of(&entry.identity.id, seen.seq());
        let origin = entry.origin.as_ref();
        let first = Step::new(Layer::Ledger, "first seen")
            .at(entry.first_at)
            .fact("topic", origin.map(|origin| origin.topic.as_str()))
            .fact("partition", origin.map(|origin| origin.partition))
            .fact("offset", origin.map(|origin| origin.offset))
            .fact("aggregate", entry.order.as_ref().map(|(aggregate, _)| aggregate.as_str()))
            .fact("seq", seen.seq())
            .fact("fingerprint", entry.fingerprint.as_ref().map(Fingerprint::to_string));
        let mut steps = vec![about(first)];
        let of_it = self.audit.iter().rev().filter(|row| row.of.as_ref() == Some(&entry.identity));
        steps.extend(of_it.map(|row| about(done_by(row))));
        steps.push(about(state(entry, self.now)));
        if let Some(held) = &seen.held {
            let step = Step::new(Layer::Ledger, "its bytes are held")
                .fact("payload_bytes", held.payload_bytes)
                .fact("headers", Some(held.headers));
            steps.push(about(step));
        }
        steps
    }

    /// What operators did to events in scopes that have no entry of them any more. Rows of an earlier build, which
    /// name tenant, scope and id in one text, are left out: it can be read in two ways.
    pub fn forgotten(&self) -> Vec<Vec<Step>> {
        let known: HashSet<_> = self.seen.iter().map(|seen| &seen.entry.identity).collect();
        let mut threads = BTreeMap::<&Identity, Vec<Step>>::new();
        for row in self.audit.iter().rev() {
            if let Some(of) = row.of.as_ref().filter(|of| !known.contains(of)) {
                threads.entry(of).or_default().push(done_by(row).named(&of.scope).of(&of.id, None));
            }
        }
        threads.into_values().collect()
    }

    /// How each scope stands with the aggregate.
    pub fn queues(&self) -> Vec<Queue> {
        let mut open = BTreeMap::<&Scope, Vec<(u64, &Seen)>>::new();
        for seen in self.seen.iter().filter(|seen| seen.entry.state.is_open()) {
            if let Some(seq) = seen.seq() {
                open.entry(&seen.entry.identity.scope).or_default().push((seq, seen));
            }
        }
        // They are in the order of their seqs.
        let of = |scope| open.get(scope).map_or(&[][..], Vec::as_slice);
        let scopes = self.progress.iter();
        scopes.map(|(scope, progress)| self.queue(scope, progress, of(scope))).collect()
    }

    fn queue(&self, scope: &Scope, progress: &Progress, open: &[(u64, &Seen)]) -> Queue {
        let head = open.first();
        let parked = open.iter().filter(|(_, seen)| seen.entry.state == State::Parked);
        let waiting: Vec<_> = parked.map(|(seq, _)| *seq).collect();
        let done = match progress.done_up_to {
            Some(seq) => format!("done up to seq {seq}"),
            None => "nothing is done yet".to_owned(),
        };
        let rest = match (waiting.first(), head) {
            (Some(first), _) => self.waits(progress, open, &waiting, *first),
            (None, Some((seq, seen))) => format!("seq {seq} is {}", word(seen.entry.state)),
            (None, None) => "nothing waits".to_owned(),
        };
        Queue {
            scope: scope.to_string(),
            done_up_to: progress.done_up_to,
            head: head.map(|(seq, _)| *seq),
            head_state: head.map(|(_, seen)| seen.entry.state.name()),
            waiting,
            what: format!("{done}; {rest}"),
        }
    }

    /// What parked events wait behind: the first that is open after what is done. There is none if one never came.
    fn waits(&self, progress: &Progress, open: &[(u64, &Seen)], waiting: &[u64], first: u64) -> String {
        let is_between = |seq: u64| Some(seq) > progress.done_below && seq < first;
        let blocks = open.iter().find(|(seq, _)| is_between(*seq));
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        let behind = match blocks {
            Some((seq, seen)) => format!("seq {seq}, which is {}", word(seen.entry.state)),
            None => "a seq that has not come".to_owned(),
        };
        let skipped = if self.was_skipped(open) { "; an operator let the aggregate past it" } else { "" };
        format!("seq {} {wait} behind {behind}{skipped}", seqs(waiting))
    }

    /// Whether an operator skipped what the parked events wait behind.
    fn was_skipped(&self, of: &[(u64, &Seen)]) -> bool {
        let parked = of.iter().filter(|(_, seen)| seen.entry.state == State::Parked);
        let parked: HashSet<_> = parked.map(|(_, seen)| &seen.entry.identity).collect();
        let is_skip = |row: &Audit| {
            row.what == Intervention::Skip.name() && row.of.as_ref().is_some_and(|of| parked.contains(of))
        };
        self.audit.iter().any(is_skip)
    }
}

/// A few seqs in words.
fn seqs(of: &[u64]) -> String {
    let named: Vec<_> = of.iter().take(SEQS_MAX).map(ToString::to_string).collect();
    let named = named.join(", ");
    if of.len() > SEQS_MAX { format!("{named} and {} more", of.len() - SEQS_MAX) } else { named }
}

/// A state as an adjective.
fn word(state: State) -> &'static str {
    match state {
        State::Retry => "waiting for its next run",
        other => other.name(),
    }
}

/// What an operator did.
fn done_by(row: &Audit) -> Step {
    let what = Intervention::ALL.into_iter().find(|what| what.name() == row.what);
    let what = match what {
        Some(Intervention::Redrive) => "redriven: it runs again, its attempts count from 0",
        Some(Intervention::Retry) => "retried: it runs again now",
        Some(Intervention::Release) => "released: its lease was taken away",
        Some(Intervention::Kill) => "killed: it became dead",
        Some(Intervention::Drop) => "dropped: its bytes were deleted, its aggregate goes on past it",
        Some(Intervention::Skip) => "skipped: its aggregate goes on past what it waits behind",
        Some(Intervention::Forget) => {
            "forgotten: its entry was removed, the next delivery counts as the first"
        }
        None => "an operator changed it",
    };
    Step::new(Layer::Ledger, what)
        .at(row.at)
        .fact("by", Some(row.by.as_str()))
        .fact("reason", Some(row.reason.as_str()))
}

/// How an entry stands.
fn state(entry: &Entry, now: Time) -> Step {
    let attempts = || counted(entry.attempts.into(), "attempt", "attempts");
    let at = stamp(entry.at);
    // Only for some states `at` is a time at which something happened.
    let (what, happened) = match entry.state {
        State::Leased if entry.at > now => (format!("leased until {at}"), false),
        State::Leased => {
            (format!("its lease ended at {at} without an outcome: the next delivery runs it"), false)
        }
        State::Retry => (format!("waits for its next run, due at {at}"), false),
        State::Claimed if entry.is_overdue(now) => {
            (format!("lost: it runs at most once, and did not report its end by {at}"), false)
        }
        State::Claimed if entry.tracked => (format!("claimed to run at most once, until {at}"), false),
        State::Claimed => ("claimed to run at most once; its end is not reported".to_owned(), false),
        State::Done => ("done".to_owned(), true),
        State::Finished => ("finished, at most once".to_owned(), true),
        State::Dead => (format!("dead after {}", attempts()), true),
        State::Lost => ("lost".to_owned(), true),
        State::Parked => ("parked: it waits behind something unresolved in its aggregate".to_owned(), true),
        State::Stale => ("stale: its aggregate had moved past it".to_owned(), true),
    };
    let step = Step::new(Layer::Ledger, what)
        .fact("reason", entry.reason.as_deref())
        .fact("attempts", Some(entry.attempts))
        .fact("token", Some(entry.token.0))
        .fact("owner", entry.owner.as_ref().map(Owner::as_str))
        .fact("suspect", entry.suspect.then_some(true))
        .fact("unordered", entry.unordered.then_some(true));
    if happened { step.at(entry.at) } else { step }
}
