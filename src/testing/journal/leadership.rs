//! Clauses 9 and 10: who leads, and how far it has come.

use std::sync::Arc;
use std::time::Duration;

use super::JournalHarness;
use super::kit::{aggregate, append, open, until, write};
use crate::clock::Time;
use crate::error::Result;
use crate::id::{Owner, RelayName};
use crate::journal::{
    Behind, Checkpoint, Expected, Journal, Leadership, Position, RelayState, RelayStore as _,
};
use crate::ledger::Token;

/// Longer than any case takes.
const LEASE: Duration = Duration::from_mins(30);
/// A lease that is waited for.
const SHORT: Duration = Duration::from_millis(200);

fn relay(name: &str) -> RelayName {
    RelayName::new(name).expect("a valid name")
}

fn owner(name: &str) -> Owner {
    Owner::new(name).expect("a valid owner")
}

/// Opened, with ten events at least.
async fn open_ten<H: JournalHarness>(harness: &H) -> H::Journal {
    let journal = open(harness).await;
    if journal.head(None, &aggregate("ten")).await.unwrap() == 0 {
        let ids: Vec<String> = (0..10).map(|n| format!("ten-{n}")).collect();
        let ids: Vec<&str> = ids.iter().map(String::as_str).collect();
        write(&journal, &append("ten", Expected::Any, &ids)).await;
    }
    journal
}

/// Acquires leadership, which must be free.
pub(super) async fn acquire(journal: &impl Journal, name: &str, by: &str) -> (Token, Checkpoint) {
    match journal.acquire_leadership(&relay(name), &owner(by), LEASE).await.expect("the journal is there") {
        Leadership::Acquired { token, checkpoint } => (token, checkpoint),
        taken @ Leadership::Taken { .. } => panic!("{by} should lead {name}, but it is {taken:?}"),
    }
}

/// A checkpoint at a position.
pub(super) fn at(journal: &impl Journal, position: &Position) -> Checkpoint {
    Checkpoint { position: position.clone(), ..Checkpoint::start(journal.id()) }
}

/// Saves a relay's checkpoint, and releases leadership.
pub(super) async fn save(journal: &impl Journal, name: &str, checkpoint: &Checkpoint) {
    let (token, _) = acquire(journal, name, "a relay").await;
    journal.save(&relay(name), token, checkpoint).await.expect("it is saved");
    journal.release_leadership(&relay(name), token).await.expect("it is released");
}

async fn state(journal: &impl Journal, name: &str) -> RelayState {
    let mut relays = journal.relays().await.unwrap();
    relays.retain(|state| state.relay == relay(name));
    assert_eq!(relays.len(), 1, "the relay {name} is known once");
    relays.remove(0)
}

fn is_fenced<T: std::fmt::Debug>(result: &Result<T>) {
    assert_eq!(result.as_ref().map_err(crate::Error::code).err(), Some("fenced"), "{result:?}");
}

/// Whoever has this token can do nothing any more, and changes nothing by trying.
pub(super) async fn must_be_fenced(journal: &impl Journal, name: &str, token: Token) {
    let before = journal.relays().await.unwrap();
    let checkpoint = at(journal, &Position::of(999_999));
    is_fenced(&journal.save(&relay(name), token, &checkpoint).await);
    is_fenced(&journal.renew_leadership(&relay(name), token, LEASE).await);
    is_fenced(&journal.release_leadership(&relay(name), token).await);
    assert_eq!(journal.relays().await.unwrap(), before);
}

/// The second candidate learns who leads, until the first releases the leadership.
pub async fn j9_one_of_two_leads<H: JournalHarness>(harness: &H) {
    let (one, two) = (open(harness).await, open(harness).await);
    assert_eq!(one.relays().await.unwrap(), []);
    let (token, checkpoint) = acquire(&one, "main", "ada").await;
    assert_eq!(checkpoint, Checkpoint::start(one.id()), "a new relay begins at the start");
    for journal in [&two, &one] {
        let answer = journal.acquire_leadership(&relay("main"), &owner("bob"), LEASE).await.unwrap();
        let Leadership::Taken { by, until } = answer else { panic!("two lead: {answer:?}") };
        assert_eq!(by, owner("ada"));
        assert!(until > two.now().await.unwrap());
    }
    let known = state(&two, "main").await;
    assert_eq!((known.owner, known.token, known.checkpoint), (Some(owner("ada")), token, None));
    one.renew_leadership(&relay("main"), token, LEASE).await.expect("it still leads");
    one.release_leadership(&relay("main"), token).await.expect("it led");
    acquire(&two, "main", "bob").await;
    must_be_fenced(&one, "main", token).await;
    assert_eq!(state(&one, "main").await.owner, Some(owner("bob")));
}

/// Each leadership has a higher token, across names, openings and rewinds; each older one is fenced.
pub async fn j9_tokens_grow_and_stale_ones_are_fenced<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    is_fenced(&journal.save(&relay("main"), Token(1), &at(&journal, &Position::START)).await);
    is_fenced(&journal.renew_leadership(&relay("main"), Token(1), LEASE).await);
    let mut tokens: Vec<Token> = Vec::new();
    for n in 0..5_u64 {
        let journal = open_ten(harness).await;
        let (token, checkpoint) = acquire(&journal, "main", "the same owner").await;
        assert_eq!(checkpoint.position, Position::of(n), "from where the last one had come to");
        assert!(tokens.iter().all(|before| before.0 < token.0), "{token:?} after {tokens:?}");
        for stale in &tokens {
            must_be_fenced(&journal, "main", *stale).await;
        }
        is_fenced(&journal.save(&relay("main"), Token(token.0 + 1), &checkpoint).await);
        journal.save(&relay("main"), token, &at(&journal, &Position::of(n + 1))).await.expect("it leads");
        journal.release_leadership(&relay("main"), token).await.expect("it leads");
        tokens.push(token);
    }
}

/// A relay that does not renew loses its leadership when the lease is over, not before, and the next one
/// continues from its checkpoint.
pub async fn j9_leadership_lapses_by_the_journals_clock<H: JournalHarness>(harness: &H) {
    let (one, two) = (open_ten(harness).await, open_ten(harness).await);
    let began = two.now().await.unwrap();
    let answer = one.acquire_leadership(&relay("main"), &owner("ada"), SHORT).await.unwrap();
    let Leadership::Acquired { token, .. } = answer else { panic!("{answer:?}") };
    one.save(&relay("main"), token, &at(&one, &Position::of(7))).await.expect("it leads");
    let (next, checkpoint) = until("leadership to lapse", async || {
        match two.acquire_leadership(&relay("main"), &owner("bob"), LEASE).await.unwrap() {
            Leadership::Acquired { token, checkpoint } => Some((token, checkpoint)),
            Leadership::Taken { by, .. } => {
                assert_eq!(by, owner("ada"));
                None
            }
        }
    })
    .await;
    let now = two.now().await.unwrap();
    assert!(now >= began.plus(SHORT), "taken at {now}, led since {began}");
    assert!(next.0 > token.0);
    assert_eq!(checkpoint, at(&one, &Position::of(7)));
    must_be_fenced(&one, "main", token).await;
    two.save(&relay("main"), next, &at(&two, &Position::of(8))).await.expect("the new one leads");
}

/// A relay that renews in time keeps its leadership.
pub async fn j9_leadership_that_is_renewed_does_not_lapse<H: JournalHarness>(harness: &H) {
    let (one, two) = (open(harness).await, open(harness).await);
    let answer = one.acquire_leadership(&relay("main"), &owner("ada"), LEASE).await.unwrap();
    let Leadership::Acquired { token, .. } = answer else { panic!("{answer:?}") };
    let first = state(&two, "main").await.until.expect("it leads");
    let longer = LEASE * 2;
    one.renew_leadership(&relay("main"), token, longer).await.expect("it leads");
    let kept = state(&two, "main").await.until.expect("it leads");
    assert!(kept > first.plus(LEASE / 2), "{kept} is not later than {first}");
    let answer = two.acquire_leadership(&relay("main"), &owner("bob"), LEASE).await.unwrap();
    assert!(matches!(answer, Leadership::Taken { .. }), "{answer:?}");
    // Keeping counts from now on, not from the end: a shorter one ends sooner.
    one.renew_leadership(&relay("main"), token, SHORT).await.expect("it leads");
    until("the shorter lease to lapse", async || {
        let answer = two.acquire_leadership(&relay("main"), &owner("bob"), LEASE).await.unwrap();
        matches!(answer, Leadership::Acquired { .. }).then_some(())
    })
    .await;
    must_be_fenced(&one, "main", token).await;
}

/// Relays of two names have a leadership and a checkpoint each.
pub async fn j9_relays_of_two_names_do_not_meet<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    let names = ["main", "Main", "m/a%in ü", &"r".repeat(255)];
    let mut tokens = Vec::new();
    for (n, name) in names.iter().enumerate() {
        let (token, checkpoint) = acquire(&journal, name, "ada").await;
        assert_eq!(checkpoint.position, Position::START);
        journal.save(&relay(name), token, &at(&journal, &Position::of(n as u64))).await.expect("it leads");
        tokens.push(token);
    }
    for (n, name) in names.iter().enumerate() {
        assert_eq!(state(&journal, name).await.checkpoint, Some(at(&journal, &Position::of(n as u64))));
        let foreign = tokens[(n + 1) % names.len()];
        if foreign != tokens[n] {
            must_be_fenced(&journal, name, foreign).await;
        }
        journal.renew_leadership(&relay(name), tokens[n], LEASE).await.expect("it leads");
    }
    let known: Vec<_> = journal.relays().await.unwrap().into_iter().map(|state| state.relay).collect();
    assert_eq!(known.len(), names.len());
    assert!(known.is_sorted(), "by name: {known:?}");
}

/// Twenty at once: one leads.
pub async fn j9_of_many_candidates_one_leads<H: JournalHarness>(harness: &H) {
    let journals = [Arc::new(open(harness).await), Arc::new(open(harness).await)];
    let tasks: Vec<_> = (0..20)
        .map(|n| {
            let journal = Arc::clone(&journals[n % 2]);
            tokio::spawn(async move {
                let by = owner(&format!("candidate-{n}"));
                loop {
                    match journal.acquire_leadership(&relay("main"), &by, LEASE).await {
                        Ok(answer) => return matches!(answer, Leadership::Acquired { .. }),
                        Err(error) => assert!(error.is_retryable(), "{error}"),
                    }
                }
            })
        })
        .collect();
    let mut leaders = 0;
    for task in tasks {
        leaders += usize::from(task.await.expect("each is answered"));
    }
    assert_eq!(leaders, 1);
}

/// An operator puts the checkpoint elsewhere: the leader loses its leadership, the next begins there.
pub async fn j9_rewinding_fences_the_leader<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    let unknown = journal.rewind(&relay("new"), &at(&journal, &Position::of(3)), None).await.unwrap();
    assert_eq!(unknown, None, "it had no checkpoint");
    assert_eq!(acquire(&journal, "new", "ada").await.1.position, Position::of(3));
    let (token, _) = acquire(&journal, "main", "ada").await;
    journal.save(&relay("main"), token, &at(&journal, &Position::of(9))).await.expect("it leads");
    let was = journal.rewind(&relay("main"), &at(&journal, &Position::of(2)), None).await.unwrap();
    assert_eq!(was, Some(at(&journal, &Position::of(9))));
    must_be_fenced(&journal, "main", token).await;
    let known = state(&journal, "main").await;
    assert_eq!(known.checkpoint, Some(at(&journal, &Position::of(2))));
    let (next, checkpoint) = acquire(&journal, "main", "bob").await;
    assert!(next.0 > token.0);
    assert_eq!(checkpoint.position, Position::of(2));
    must_be_fenced(&journal, "main", token).await;
}

/// Two operators decide at once: the second gets an error and undoes nothing.
pub async fn j9_a_rewind_from_what_is_no_longer_so_changes_nothing<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    let (token, _) = acquire(&journal, "main", "ada").await;
    journal.save(&relay("main"), token, &at(&journal, &Position::of(9))).await.expect("it leads");
    let to = |n: u64| at(&journal, &Position::of(n));
    let was = journal.rewind(&relay("main"), &to(5), Some(token)).await.expect("nobody came between");
    assert_eq!(was, Some(to(9)));
    let before = journal.relays().await.unwrap();
    for (name, read) in [("main", token), ("main", Token(token.0 + 1_000_000)), ("unknown", token)] {
        let error = journal.rewind(&relay(name), &to(2), Some(read)).await.unwrap_err();
        assert_eq!(error.code(), "conflict", "{error}");
        assert!(error.to_string().contains(&read.0.to_string()), "{error}");
    }
    assert_eq!(journal.relays().await.unwrap(), before, "nothing is changed");
    let (next, checkpoint) = acquire(&journal, "main", "bob").await;
    assert_eq!(checkpoint, to(5));
    let error = journal.rewind(&relay("main"), &to(2), Some(before[0].token)).await.unwrap_err();
    assert_eq!(error.code(), "conflict", "someone leads since: {error}");
    journal.renew_leadership(&relay("main"), next, LEASE).await.expect("it still leads");
}

/// Everything a checkpoint says, also what is behind and lately published, and when it was saved.
pub async fn j10_a_checkpoint_comes_back_whole<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1", "a2"])).await;
    let stored = journal.read(&Position::START, 10).await.unwrap().events;
    let behind = |n: u32, poison: bool| Behind {
        tenant: poison.then(|| "ten'ant ü".to_owned()),
        aggregate: format!("aggregate \"{n}\" 🦀\n"),
        next: u64::from(n) + 1,
        position: Position::of(u64::from(n)),
        reason: "it said: 'no', \\ and ü\n\"quoted\"".to_owned(),
        poison,
        since: 1_234_567_890_123_457,
        attempts: n,
        appended: i64::from(n),
    };
    let checkpoint = Checkpoint {
        journal: journal.id().to_owned(),
        position: stored[1].position.clone(),
        recent: (0..2000).map(|n| format!("id ü {n}")).collect(),
        behind: vec![
            behind(7, true),
            behind(8, false),
            Behind::at(&stored[0], "first", true, Time::from_micros(5)),
        ],
    };
    let began = journal.now().await.unwrap();
    let (token, _) = acquire(&journal, "main", "ada").await;
    for saved in [&checkpoint, &Checkpoint::start(journal.id()), &checkpoint] {
        journal.save(&relay("main"), token, saved).await.expect("it leads");
        let known = state(&open(harness).await, "main").await;
        assert_eq!(known.checkpoint.as_ref(), Some(saved));
        let saved_at = known.saved_at.expect("it was saved");
        assert!(saved_at >= began && saved_at <= journal.now().await.unwrap(), "{saved_at}");
    }
    journal.release_leadership(&relay("main"), token).await.expect("it leads");
    assert_eq!(acquire(&open(harness).await, "main", "bob").await.1, checkpoint);
    assert!(checkpoint.holds_back(&stored[0]) && checkpoint.holds_back(&stored[1]));
}

/// A checkpoint says whose it is, and nobody else takes it.
pub async fn j10_a_checkpoint_of_another_journal_is_refused<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    let foreign = Checkpoint::start("another-journal");
    let (token, _) = acquire(&journal, "main", "ada").await;
    journal.save(&relay("main"), token, &at(&journal, &Position::of(4))).await.expect("it leads");
    let before = journal.relays().await.unwrap();
    for error in [
        journal.save(&relay("main"), token, &foreign).await.unwrap_err(),
        journal.rewind(&relay("main"), &foreign, None).await.unwrap_err(),
        journal.rewind(&relay("unknown"), &foreign, None).await.unwrap_err(),
    ] {
        assert_eq!(error.code(), "conflict");
        assert!(
            error.to_string().contains("another-journal") && error.to_string().contains(journal.id()),
            "{error}"
        );
    }
    assert_eq!(journal.relays().await.unwrap(), before);
    journal.renew_leadership(&relay("main"), token, LEASE).await.expect("it still leads");
}

/// What was never given out cannot have been passed: the journal was put back. The sentence has both positions and what mends it.
pub async fn j10_a_checkpoint_beyond_the_journal_is_refused<H: JournalHarness>(harness: &H) {
    let journal = open_ten(harness).await;
    let (token, _) = acquire(&journal, "main", "ada").await;
    journal.save(&relay("main"), token, &at(&journal, &Position::of(4))).await.expect("it leads");
    let before = journal.relays().await.unwrap();
    let beyond = Position::of(9_000_000_000_000);
    for error in [
        journal.save(&relay("main"), token, &at(&journal, &beyond)).await.unwrap_err(),
        journal.rewind(&relay("main"), &at(&journal, &beyond), None).await.unwrap_err(),
    ] {
        assert_eq!(error.code(), "conflict", "{error}");
        let message = error.to_string();
        assert!(
            message.contains(&beyond.to_string()) && message.contains("hapax relay --name main rewind --to"),
            "{message}"
        );
    }
    assert_eq!(journal.relays().await.unwrap(), before);
    journal.renew_leadership(&relay("main"), token, LEASE).await.expect("it still leads");
}
