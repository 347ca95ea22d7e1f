//! Clause 11: what is on the bus may go, nothing else does.

use std::time::Duration;

use super::JournalHarness;
use super::kit::{Follower, aggregate, all, append, id, open, put, seqs, until, waits, write};
use super::leadership::{acquire, at, must_be_fenced, save};
use crate::clock::Time;
use crate::journal::{Behind, Expected, Journal, JournalSweep, Position, RelayStore as _, Stored};

/// Everything that is published may go, however young.
fn any_age() -> JournalSweep {
    JournalSweep::new(Duration::ZERO)
}

fn dry() -> JournalSweep {
    JournalSweep { dry_run: true, ..any_age() }
}

/// Two aggregates, two tenants less than none: a1 b1 a2 b2 a3 b3.
async fn six(journal: &impl Journal) -> Vec<Stored> {
    for n in 1..=3 {
        for of in ["a", "b"] {
            write(journal, &append(of, Expected::Any, &[&format!("{of}{n}")])).await;
        }
    }
    let mut events = all(journal, None, "a").await;
    events.extend(all(journal, None, "b").await);
    events.sort_by(|one, other| one.position.cmp(&other.position));
    // Older than nothing means older than now: the clock must have moved on.
    let newest = events.iter().map(|stored| stored.at).max().expect("six");
    until("the journal's clock to move on", async || (journal.now().await.unwrap() > newest).then_some(()))
        .await;
    events
}

/// The ids that are left, of both aggregates.
async fn left(journal: &impl Journal) -> Vec<String> {
    let mut ids = Vec::new();
    for of in ["a", "b"] {
        ids.extend(all(journal, None, of).await.into_iter().map(|stored| stored.event.id.to_string()));
    }
    ids
}

const ALL: [&str; 6] = ["a1", "a2", "a3", "b1", "b2", "b3"];

/// No relay, or one that has saved nothing: who knows what it has published.
pub async fn j11_a_journal_that_nobody_follows_keeps_everything<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    six(&journal).await;
    assert_eq!(journal.sweep(&dry()).await.unwrap(), 0);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 0);
    acquire(&journal, "main", "ada").await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 0);
    save(&journal, "other", &at(&journal, &Position::START)).await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 0);
    assert_eq!(left(&journal).await, ALL);
}

/// The slowest relay decides.
pub async fn j11_only_what_every_relay_has_passed_goes<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    save(&journal, "fast", &at(&journal, &events[4].position)).await;
    save(&journal, "slow", &at(&journal, &events[1].position)).await;
    assert_eq!(journal.sweep(&dry()).await.unwrap(), 2);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 2);
    assert_eq!(left(&journal).await, ["a2", "a3", "b2", "b3"]);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 0);
    // One that begins later begins at the start, and holds everything back.
    let (token, _) = acquire(&journal, "new", "ada").await;
    save(&journal, "slow", &at(&journal, &events[3].position)).await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 0);
    let new = crate::id::RelayName::new("new").unwrap();
    journal.save(&new, token, &at(&journal, &events[5].position)).await.expect("it leads");
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 2);
    assert_eq!(left(&journal).await, ["a3", "b3"]);
    let rest = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!(rest.events, events[4..], "what is left is followed as before");
}

/// What a relay has passed without publishing it stays, whoever else has published it.
pub async fn j11_what_is_behind_stays<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    let b2 = events.iter().find(|stored| stored.event.id == id("b2")).expect("b2");
    let mut checkpoint = at(&journal, &events[5].position);
    checkpoint.behind = vec![Behind::at(b2, "the broker said no", false, Time::from_micros(1))];
    save(&journal, "main", &checkpoint).await;
    save(&journal, "other", &at(&journal, &events[5].position)).await;
    assert_eq!(journal.sweep(&dry()).await.unwrap(), 4);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 4);
    assert_eq!(left(&journal).await, ["b2", "b3"]);
    save(&journal, "main", &at(&journal, &events[5].position)).await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 2);
    assert!(left(&journal).await.is_empty());
}

/// Only what is older than was said.
pub async fn j11_what_is_young_stays<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    save(&journal, "main", &at(&journal, &events[5].position)).await;
    for older_than in [Duration::from_hours(1), Duration::MAX] {
        assert_eq!(journal.sweep(&JournalSweep::new(older_than)).await.unwrap(), 0);
    }
    assert_eq!(left(&journal).await, ALL);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 6);
}

/// A dry run says what would go, as often as it is asked.
pub async fn j11_a_dry_run_only_counts<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    save(&journal, "main", &at(&journal, &events[3].position)).await;
    let relays = journal.relays().await.unwrap();
    for _ in 0..3 {
        assert_eq!(journal.sweep(&dry()).await.unwrap(), 4);
    }
    assert_eq!(left(&journal).await, ALL);
    assert_eq!(journal.relays().await.unwrap(), relays);
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 4);
}

/// At most so many at a time, until there is nothing more.
pub async fn j11_a_sweep_goes_in_steps<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    save(&journal, "main", &at(&journal, &events[4].position)).await;
    let step = JournalSweep { batch_max: 2, ..any_age() };
    let mut swept = Vec::new();
    while swept.last() != Some(&0) {
        swept.push(journal.sweep(&step).await.unwrap());
        assert!(swept.len() < 10, "{swept:?}");
    }
    assert!(swept.iter().all(|count| *count <= 2), "{swept:?}");
    assert_eq!(swept.iter().sum::<u64>(), 5);
    assert_eq!(left(&journal).await, ["b3"]);
}

/// Everything is gone but the number: the next event is the next. What was removed is no longer known.
pub async fn j11_numbers_go_on_where_they_were<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    let end = events[5].position.clone();
    save(&journal, "main", &at(&journal, &end)).await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 6);
    let journal = open(harness).await;
    assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 3);
    assert_eq!(journal.find(None, &id("a1")).await.unwrap(), None);
    assert_eq!(journal.count_after(&Position::START, 10).await.unwrap(), 0);
    // Whoever comes from the start waits for what comes, and not for what is gone.
    let nothing = Follower::new(&journal, 10).to_the_end().await;
    assert!(waits(&journal, &nothing).await, "it does not wait after {nothing}");
    super::kit::refused(&journal, &append("a", Expected::New, &["a4"]), "conflict").await;
    let next = put(&journal, &append("a", Expected::Exact(3), &["a4"])).await;
    assert_eq!(seqs(&next), [4]);
    assert!(next.placed[0].position > end, "positions are not used again");
    let again = put(&journal, &append("a", Expected::Exact(4), &["a1"])).await;
    assert_eq!((seqs(&again), again.is_repeat()), (vec![5], false), "its id was forgotten");
    let rest: Vec<_> =
        journal.read(&end, 10).await.unwrap().events.into_iter().map(|stored| stored.seq).collect();
    assert_eq!(rest, [4, 5]);
}

/// A relay that was named by mistake, or is not run any more. One of its name begins at the start, under a higher token.
pub async fn j11_a_relay_that_is_forgotten_holds_nothing_back<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let events = six(&journal).await;
    let name = |name: &str| crate::id::RelayName::new(name).unwrap();
    save(&journal, "main", &at(&journal, &events[5].position)).await;
    let (token, _) = acquire(&journal, "mian", "ada").await;
    journal.save(&name("mian"), token, &at(&journal, &events[1].position)).await.expect("it leads");
    journal.release_leadership(&name("mian"), token).await.expect("it leads");
    assert_eq!(journal.sweep(&dry()).await.unwrap(), 2);
    let error = journal.forget_relay(&name("other")).await.unwrap_err();
    assert_eq!(error.code(), "not-found", "{error}");
    let was = open(harness).await.forget_relay(&name("mian")).await.expect("nobody leads");
    assert_eq!((was.relay, was.token), (name("mian"), token));
    assert_eq!(was.checkpoint, Some(at(&journal, &events[1].position)));
    let known: Vec<_> = journal.relays().await.unwrap().into_iter().map(|state| state.relay).collect();
    assert_eq!(known, [name("main")]);
    assert_eq!(journal.forget_relay(&name("mian")).await.unwrap_err().code(), "not-found", "not twice");
    must_be_fenced(&journal, "mian", token).await;
    assert_eq!(journal.sweep(&any_age()).await.unwrap(), 6);
    let (next, checkpoint) = acquire(&journal, "mian", "bob").await;
    assert!(next > token, "{next:?} after {token:?}");
    assert_eq!(checkpoint, crate::journal::Checkpoint::start(journal.id()));
    must_be_fenced(&journal, "mian", token).await;
    journal.save(&name("mian"), next, &at(&journal, &events[0].position)).await.expect("it leads");
    assert_eq!(journal.relays().await.unwrap().len(), 2, "it is a relay again");
}

/// Shows who leads and until when; nothing is changed.
pub async fn j11_a_relay_that_someone_leads_is_not_forgotten<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let main = crate::id::RelayName::new("main").unwrap();
    let (token, _) = acquire(&journal, "main", "ada").await;
    let before = journal.relays().await.unwrap();
    let error = open(harness).await.forget_relay(&main).await.unwrap_err();
    assert_eq!(error.code(), "conflict", "{error}");
    let until = before[0].until.expect("it leads").to_string();
    assert!(error.to_string().contains("ada") && error.to_string().contains(&until), "{error}");
    assert_eq!(journal.relays().await.unwrap(), before);
    journal.renew_leadership(&main, token, Duration::from_mins(30)).await.expect("it leads still");
    journal.release_leadership(&main, token).await.expect("it leads");
    journal.forget_relay(&main).await.expect("nobody leads");
    assert_eq!(journal.relays().await.unwrap(), []);
}
