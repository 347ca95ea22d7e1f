//! Small words the cases are written in.

use std::collections::{BTreeMap, HashSet};
use std::future::Future;
use std::time::Duration;

use tokio::time::Instant;

use super::JournalHarness;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::id::{Aggregate, EventId, Tenant};
use crate::journal::{
    AggregateOf, Append, Appended, Expected, Journal, JournalSettings, Placing, Position, Stored,
};
use crate::ledger::MismatchRule;

/// How long a case waits for what shall happen.
pub const DEADLINE: Duration = Duration::from_mins(1);
/// How long is waited before something is looked at again.
const AGAIN: Duration = Duration::from_millis(20);

/// The harness opened with default settings.
pub(crate) async fn open<H: JournalHarness>(harness: &H) -> H::Journal {
    harness.open(JournalSettings::default()).await
}

/// The harness opened so that mismatches are warned of only.
pub(crate) async fn open_warning<H: JournalHarness>(harness: &H) -> H::Journal {
    harness.open(JournalSettings { mismatch: MismatchRule::Warn, ..JournalSettings::default() }).await
}

/// An aggregate.
pub fn aggregate(name: &str) -> Aggregate {
    Aggregate::new(name).expect("a valid aggregate")
}

/// A tenant.
pub fn tenant(name: &str) -> Tenant {
    Tenant::new(name).expect("a valid tenant")
}

/// An id.
pub(crate) fn id(text: &str) -> EventId {
    EventId::new(text).expect("a valid id")
}

/// An event with a content that follows from its id.
pub fn event(name: &str) -> Event {
    Event::new(id(name)).payload(format!("the content of {name}"))
}

/// An event of the same id with another content.
pub(crate) fn other(name: &str) -> Event {
    event(name).payload(format!("another content of {name}"))
}

/// An append of events by their ids.
pub fn append(of: &str, expected: Expected, ids: &[&str]) -> Append {
    Append::new(aggregate(of), expected, ids.iter().map(|id| event(id)))
}

/// Appends; tries again what is worth trying again, which is a repeat if it was done already.
pub(crate) async fn try_put(journal: &impl Journal, append: &Append) -> Result<Appended> {
    let started = Instant::now();
    loop {
        match journal.append(append).await {
            Err(error) if error.is_retryable() && started.elapsed() < DEADLINE => {
                tokio::time::sleep(AGAIN).await;
            }
            answer => return answer,
        }
    }
}

/// Appends, which must succeed: each event has its answer.
pub async fn put(journal: &impl Journal, append: &Append) -> Appended {
    let appended = try_put(journal, append).await.unwrap_or_else(|error| panic!("{append:?}: {error}"));
    assert_eq!(appended.placed.len(), append.events.len(), "each event has its place");
    for placed in &appended.placed {
        assert!(placed.seq > 0, "seqs begin at 1");
        assert!(placed.position > Position::START, "an event lies after the start");
    }
    appended
}

/// Appends, which must succeed, whatever the places are.
pub(crate) async fn write(journal: &impl Journal, append: &Append) {
    let _ = put(journal, append).await;
}

/// Appends, which must be refused by an error of this code.
pub(crate) async fn refused(journal: &impl Journal, append: &Append, code: &str) -> Error {
    match try_put(journal, append).await {
        Err(error) if error.code() == code => error,
        answer => panic!("{append:?} should be {code}, and is {answer:?}"),
    }
}

/// The seqs of an answer.
pub(crate) fn seqs(appended: &Appended) -> Vec<u64> {
    appended.placed.iter().map(|placed| placed.seq).collect()
}

/// How the events of an answer came to their places.
pub(crate) fn placings(appended: &Appended) -> Vec<Placing> {
    appended.placed.iter().map(|placed| placed.placing).collect()
}

/// All events of an aggregate.
pub(crate) async fn all(journal: &impl Journal, tenant: Option<&Tenant>, of: &str) -> Vec<Stored> {
    let (mut found, mut from) = (Vec::new(), 0);
    loop {
        let page = journal.read_aggregate(tenant, &aggregate(of), from, 1000).await.expect("it can be read");
        from = page.events.last().map_or(from, |last| last.seq + 1);
        found.extend(page.events);
        if !page.more {
            return found;
        }
    }
}

/// The ids of an aggregate's events, in order; their seqs have no gap and end at the head.
pub(crate) async fn ids(journal: &impl Journal, tenant: Option<&Tenant>, of: &str) -> Vec<String> {
    let events = all(journal, tenant, of).await;
    let found: Vec<u64> = events.iter().map(|stored| stored.seq).collect();
    let wanted: Vec<u64> = (1..=events.len() as u64).collect();
    assert_eq!(found, wanted, "the seqs of {of}");
    assert_eq!(journal.head(tenant, &aggregate(of)).await.unwrap(), events.len() as u64, "the head of {of}");
    events.iter().map(|stored| stored.event.id.as_str().into_owned()).collect()
}

/// What there is of some aggregates of no tenant, to be compared.
pub(crate) async fn snapshot(journal: &impl Journal, aggregates: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    for of in aggregates {
        let head = journal.head(None, &aggregate(of)).await.unwrap();
        found.push(format!("{of} {head} {:?}", all(journal, None, of).await));
    }
    let stat = journal.stat().await.unwrap();
    if stat.exact {
        found.push(format!("{} events, last {:?}", stat.events, stat.last));
    }
    found
}

/// Looks again until something is there.
pub(crate) async fn until<T, F: Future<Output = Option<T>>>(what: &str, mut look: impl FnMut() -> F) -> T {
    let started = Instant::now();
    loop {
        if let Some(found) = look().await {
            return found;
        }
        assert!(started.elapsed() < DEADLINE, "waited {DEADLINE:?} for: {what}");
        tokio::time::sleep(AGAIN).await;
    }
}

/// Whether waiting for what comes after a position is waiting: not a busy loop.
pub(crate) async fn waits(journal: &impl Journal, after: &Position) -> bool {
    let (started, mut waits) = (Instant::now(), 0);
    while started.elapsed() < Duration::from_millis(300) {
        let wait = journal.wait(after, Duration::from_millis(50));
        tokio::time::timeout(DEADLINE, wait).await.expect("it ends").expect("it can be waited");
        waits += 1;
    }
    waits < 150
}

/// Follows a journal from its start as a relay does, and checks what must hold of all that it is given.
#[derive(Debug)]
pub struct Follower<'j, J> {
    journal: &'j J,
    after: Position,
    page: usize,
    known: HashSet<(Option<Tenant>, EventId)>,
    /// Each aggregate's events, in the order of their seqs.
    pub events: BTreeMap<AggregateOf, Vec<Stored>>,
}

impl<'j, J: Journal> Follower<'j, J> {
    /// From the start, so many events at a time.
    pub fn new(journal: &'j J, page: usize) -> Self {
        Follower { journal, after: Position::START, page, known: HashSet::new(), events: BTreeMap::new() }
    }

    /// Where it has come to.
    pub fn position(&self) -> &Position {
        &self.after
    }

    /// How many events it was given, in their order.
    pub fn count(&self) -> usize {
        self.events.values().map(Vec::len).sum()
    }

    /// Reads one page; says whether there was anything new.
    pub async fn step(&mut self) -> bool {
        let batch = self.journal.read(&self.after, self.page).await.expect("it can be followed");
        assert!(batch.events.len() <= self.page, "{} events in a page", batch.events.len());
        let mut last = self.after.clone();
        for stored in &batch.events {
            assert!(stored.position > last, "{} is given after {last}", stored.position);
            last = stored.position.clone();
        }
        assert!(batch.next >= last, "next is {}, but {last} was given", batch.next);
        let moved = batch.next > self.after;
        self.after = batch.next;
        for stored in batch.events {
            self.take(stored);
        }
        moved
    }

    /// Takes an event, which must be new and the next of its aggregate.
    fn take(&mut self, stored: Stored) {
        let of = AggregateOf {
            tenant: stored.event.tenant.clone(),
            aggregate: stored.event.aggregate.clone().expect("its aggregate is filled in"),
        };
        assert_eq!(stored.event.seq, Some(stored.seq), "its seq is filled in");
        let new = self.known.insert((stored.event.tenant.clone(), stored.event.id.clone()));
        assert!(new, "{} is given twice", stored.event.id);
        let events = self.events.entry(of.clone()).or_default();
        let (next, seq) = (events.len() as u64 + 1, stored.seq);
        assert!(seq == next, "seq {seq} of {of} is given, {next} is next");
        events.push(stored);
    }

    /// Follows until nothing moves any more, and says where that is.
    pub async fn to_the_end(&mut self) -> Position {
        while self.step().await {}
        self.after.clone()
    }

    /// Follows until it was given so many events, and there is nothing else.
    pub async fn until(&mut self, count: usize) {
        let mut progress = Instant::now();
        loop {
            let moved = self.step().await;
            if self.count() >= count && !moved {
                break;
            }
            if moved {
                progress = Instant::now(); // writers may take as long as they like
            } else {
                let still = progress.elapsed();
                assert!(still < DEADLINE, "{} of {count} events, and no more for {still:?}", self.count());
                self.journal.wait(&self.after, AGAIN).await.expect("it can be waited");
            }
        }
        assert_eq!(self.count(), count, "as many events as there are");
    }
}
