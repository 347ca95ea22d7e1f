//! Steps of the ledger: when a scope first saw an event, what operators did, and how it stands.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use hapax::ledger::{Audit, Entry, Filter, Identity, Intervention, Logged, State};
use hapax::words::counted;
use hapax::{EventId, Fingerprint, Ledger, Owner, Scope, Tenant, Time};

use super::explanation::{Layer, Queue, Step, stamp};
use super::skips::{self, Skips};
use super::stores::Visibility;

/// How many entries are looked at, and how many on a page.
const ENTRIES_MAX: usize = 2000;
const PAGE: usize = 500;
/// How many audit rows are looked at, newest first.
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
    fn new(mut entry: Entry) -> Self {
        let held = entry.row.body.take().map(|body| Held {
            payload_bytes: body.payload.as_ref().map(bytes::Bytes::len),
            headers: body.headers.iter().count(),
        });
        Seen { entry, held }
    }

    fn seq(&self) -> Option<u64> {
        self.entry.order.as_ref().map(|(_, seq)| *seq)
    }
}

/// What a ledger has.
pub struct Found {
    pub seen: Vec<Seen>,
    /// If there is nothing: the tenants that have something of this name.
    pub others: Vec<Option<Tenant>>,
    audit: Vec<Audit>,
    skips: Skips,
    now: Time,
    /// What was left out, if anything was.
    pub left_out: Vec<String>,
}

/// Asks a ledger about events of a tenant, as far as the one who asks may see them.
pub async fn look(
    ledger: &dyn Ledger,
    tenant: Option<&Tenant>,
    filter: Filter,
    visibility: &Visibility,
) -> hapax::Result<Found> {
    let filter = Filter { scopes: visibility.scopes.clone(), ..filter };
    let wanted: Vec<EventId> = filter.id.iter().cloned().collect();
    let mut found = look_without_audit(ledger, tenant, filter, visibility).await?;
    found.skips = Skips::look(ledger, tenant, &wanted, &found, visibility).await?;
    found.audit = ledger.audit(AUDIT_MAX).await?;
    if found.audit.len() >= AUDIT_MAX {
        found.left_out.push(format!("audit rows before its latest {AUDIT_MAX} were not looked at"));
    }
    Ok(found)
}

/// The same without what operators did.
pub async fn look_without_audit(
    ledger: &dyn Ledger,
    tenant: Option<&Tenant>,
    mut filter: Filter,
    visibility: &Visibility,
) -> hapax::Result<Found> {
    let now = ledger.now().await?;
    let (mut seen, mut after, mut left_out) = (Vec::new(), None, Vec::new());
    filter.tenant = Some(tenant.cloned());
    loop {
        let page = ledger.list(&filter, after.as_ref(), PAGE).await?;
        seen.extend(page.entries.into_iter().map(Seen::new));
        after = page.next;
        if after.is_none() {
            break;
        }
        if seen.len() >= ENTRIES_MAX {
            left_out.push(format!("only its first {} entries are shown", seen.len()));
            break;
        }
    }
    let mut others = BTreeSet::new();
    if seen.is_empty() && !visibility.is_bound {
        filter.tenant = None;
        let page = ledger.list(&filter, None, OTHERS).await?;
        others.extend(page.entries.into_iter().map(|entry| entry.identity.tenant));
    }
    let others = others.into_iter().collect();
    Ok(Found { seen, others, audit: Vec::new(), skips: Skips::default(), now, left_out })
}

impl Found {
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

    /// What operators did to an event in scopes that have no entry of it any more. Rows of an earlier build, which
    /// name tenant, scope and id in one text, are left out: it can be read in two ways.
    pub fn forgotten(
        &self,
        tenant: Option<&Tenant>,
        id: &EventId,
        visibility: &Visibility,
    ) -> Vec<Vec<Step>> {
        let is_known = |of: &Identity| self.seen.iter().any(|seen| seen.entry.identity == *of);
        let mut threads = BTreeMap::<&Scope, Vec<Step>>::new();
        for row in self.audit.iter().rev() {
            let Some(of) = row.of.as_ref().filter(|of| of.tenant.as_ref() == tenant && of.id == *id) else {
                continue;
            };
            if visibility.sees(of.scope.as_str()) && !is_known(of) {
                let step = done_by(row).named(&of.scope).of(id, None);
                threads.entry(&of.scope).or_default().push(step);
            }
        }
        threads.into_values().collect()
    }

    /// How each scope stands with the aggregate.
    pub fn queues(&self) -> Vec<Queue> {
        let mut scopes = BTreeMap::<&str, Vec<(u64, &Seen)>>::new();
        for seen in &self.seen {
            let Some(seq) = seen.seq() else { continue };
            scopes.entry(seen.entry.identity.scope.as_str()).or_default().push((seq, seen));
        }
        scopes
            .into_iter()
            .map(|(scope, mut of)| {
                of.sort_by_key(|(seq, _)| *seq);
                self.queue(scope, &of)
            })
            .collect()
    }

    fn queue(&self, scope: &str, of: &[(u64, &Seen)]) -> Queue {
        let in_state = |states: &'static [State]| {
            of.iter().filter(move |(_, seen)| states.contains(&seen.entry.state)).map(|(seq, _)| *seq)
        };
        let done_up_to = in_state(&[State::Done, State::Finished]).max();
        let head = of.iter().find(|(_, seen)| seen.entry.state.is_open());
        let waiting: Vec<_> = in_state(&[State::Parked]).collect();
        let done = match done_up_to {
            Some(seq) => format!("done up to seq {seq}"),
            None => "nothing is done yet".to_owned(),
        };
        let rest = match (waiting.first(), head) {
            (Some(first), _) => self.waits(of, &waiting, *first),
            (None, Some((seq, seen))) => format!("seq {seq} is {}", word(seen.entry.state)),
            (None, None) => "nothing waits".to_owned(),
        };
        Queue {
            scope: scope.to_owned(),
            done_up_to,
            head: head.map(|(seq, _)| *seq),
            head_state: head.map(|(_, seen)| seen.entry.state.name()),
            waiting,
            what: format!("{done}; {rest}"),
        }
    }

    /// What parked events wait behind: the first that is open after what is done. There is none if one never came.
    fn waits(&self, of: &[(u64, &Seen)], waiting: &[u64], first: u64) -> String {
        let is_done = |seen: &Seen| matches!(seen.entry.state, State::Done | State::Finished);
        let before = || of.iter().filter(|(seq, _)| *seq < first);
        let passed = before().filter(|(_, seen)| is_done(seen)).map(|(seq, _)| *seq).max();
        let blocks = before().find(|(seq, seen)| Some(*seq) > passed && seen.entry.state.is_open());
        let wait = if waiting.len() == 1 { "waits" } else { "wait" };
        let behind = match blocks {
            Some((seq, seen)) => format!("seq {seq}, which is {}", word(seen.entry.state)),
            None => "a seq that has not come".to_owned(),
        };
        let skipped = if self.was_skipped(of) { "; an operator let the aggregate past it" } else { "" };
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
