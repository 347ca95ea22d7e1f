//! The journal in an object store: what a sweep leaves, and what others do meanwhile.
#![cfg(all(feature = "s3", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::objects;
use std::sync::Arc;
use std::time::Duration;

use crate::support::objects::{Place, aggregate, append};
use crate::support::watched::{Watched, held_up, open_watched};
use hapax::backend::object::{ObjectJournal, ObjectSettings, Objects};
use hapax::journal::{
    Checkpoint, Expected, Journal as _, JournalSweep, Leadership, Position, RelayStore as _,
};
use hapax::{EventId, Owner, RelayName};

/// A relay that has published everything there is.
async fn publish_all(journal: &ObjectJournal) {
    let relay = RelayName::new("main").unwrap();
    let owner = Owner::new("test").unwrap();
    let answer = journal.acquire_leadership(&relay, &owner, Duration::from_secs(60)).await.unwrap();
    let Leadership::Acquired { token, .. } = answer else { panic!("{answer:?}") };
    let mut checkpoint = Checkpoint::start(journal.id());
    let mut batch = journal.read(&Position::START, 1000).await.unwrap();
    while !batch.events.is_empty() || batch.at_hole {
        batch = journal.read(&batch.next, 1000).await.unwrap();
    }
    checkpoint.position = batch.next;
    journal.save(&relay, token, &checkpoint).await.unwrap();
    journal.release_leadership(&relay, token).await.unwrap();
}

/// A writer that has not looked since before others appended, and a sweep took what they had appended: no number is issued twice.
async fn a_swept_place_is_not_free(place: Place) {
    let sweep = JournalSweep::new(Duration::ZERO);
    for (of, expected) in
        [("any", Expected::Any), ("exact", Expected::Exact(4)), ("right", Expected::Exact(7))]
    {
        let (one, two) = (place.open().await, place.open().await);
        for n in 1..=4 {
            let _ = one.append(&append(of, Expected::Any, &[&format!("{of}-{n}")])).await.unwrap();
        }
        for n in 5..=7 {
            let _ = two.append(&append(of, Expected::Any, &[&format!("{of}-{n}")])).await.unwrap();
        }
        publish_all(&two).await;
        place.until_past(&two).await;
        assert_eq!(two.sweep(&sweep).await.unwrap(), 7 + u64::from(of != "any"), "{of}");
        assert_eq!(two.read_aggregate(None, &aggregate(of), 1, 10).await.unwrap().events.len(), 0);
        let answer = one.append(&append(of, expected, &[&format!("{of}-late")])).await;
        if expected == Expected::Exact(4) {
            assert_eq!(answer.unwrap_err().code(), "conflict");
            let _ = one.append(&append(of, Expected::Any, &[&format!("{of}-late")])).await.unwrap();
        } else {
            assert_eq!(answer.unwrap().placed[0].seq, 8, "{of}");
        }
        for reader in [&one, &two, &place.open().await] {
            let left = reader.read_aggregate(None, &aggregate(of), 1, 10).await.unwrap().events;
            assert_eq!(left.iter().map(|stored| stored.seq).collect::<Vec<_>>(), [8], "{of}");
            assert_eq!(reader.head(None, &aggregate(of)).await.unwrap(), 8);
        }
    }
}

/// A slow writer whose place others have passed, and which was swept: its note goes, and its place is not free.
async fn a_slow_writer_finds_a_swept_place_taken(place: Place) {
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_mins(10)).await;
    let slow = held_up(&store, &journal, append("slow", Expected::New, &["s1"])).await;
    let other = place.open().await; // another way to the same objects: nothing is held up there
    for n in 1..=3 {
        let _ = other.append(&append("slow", Expected::Any, &[&format!("o{n}")])).await.unwrap();
    }
    publish_all(&other).await;
    place.until_past(&other).await;
    assert_eq!(other.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap(), 3);
    publish_all(&other).await;
    store.hold(None);
    assert_eq!(slow.await.unwrap().unwrap_err().code(), "conflict", "it is not new any more");
    assert_eq!(other.head(None, &aggregate("slow")).await.unwrap(), 3);
    assert!(follow_left(&other).await.is_empty());
}

async fn follow_left(journal: &ObjectJournal) -> Vec<u64> {
    journal.read(&Position::START, 100).await.unwrap().events.iter().map(|stored| stored.seq).collect()
}

/// A relay that is taken over while a sweep or another leader looks is never left out, and never begins from the start.
#[tokio::test]
async fn a_relay_is_seen_while_it_is_taken_over() {
    let place = Place::directory();
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_secs(5)).await;
    for n in 0..5 {
        let _ = journal.append(&append("a", Expected::Any, &[&format!("e{n}")])).await.unwrap();
    }
    publish_all(&journal).await;
    let (slow, owner) = (RelayName::new("slow").unwrap(), Owner::new("test").unwrap());
    let acquire =
        async || match journal.acquire_leadership(&slow, &owner, Duration::from_secs(60)).await.unwrap() {
            Leadership::Acquired { token, checkpoint } => (token, checkpoint),
            taken => panic!("{taken:?}"),
        };
    let mut checkpoint = Checkpoint::start(journal.id());
    checkpoint.position = journal.read(&Position::START, 2).await.unwrap().next;
    for part in ["relay/slow/", ".lead", ".save."] {
        let (token, _) = acquire().await;
        journal.save(&slow, token, &checkpoint).await.unwrap();
        journal.release_leadership(&slow, token).await.unwrap();
        store.miss(part, 3);
        let mut settings = JournalSweep::new(Duration::ZERO);
        settings.dry_run = true;
        assert_eq!(journal.sweep(&settings).await.unwrap(), 2, "{part}");
        assert_eq!(store.to_miss(), 0);
        assert_eq!(journal.relays().await.unwrap().len(), 2, "{part}");
    }
    store.miss(".save.", 1);
    let (token, begun) = acquire().await;
    assert_eq!((begun, store.to_miss()), (checkpoint, 0));
    journal.release_leadership(&slow, token).await.unwrap();
    store.miss("relay/", usize::MAX);
    let error = journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap_err();
    assert!(error.is_retryable() && store.to_miss() > 0, "{error}");
}

/// A rewind while a sweep is at work stops it before the next hundred.
#[tokio::test(flavor = "multi_thread")]
async fn a_sweep_stops_when_a_relay_goes_back() {
    let place = Place::directory();
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_secs(5)).await;
    for n in 0..250 {
        let _ = journal.append(&append("a", Expected::Any, &[&format!("e{n}")])).await.unwrap();
    }
    publish_all(&journal).await;
    store.hold_put(Some("aggregate/"));
    let sweeper = journal.clone();
    let sweep = tokio::spawn(async move { sweeper.sweep(&JournalSweep::new(Duration::ZERO)).await });
    store.is_held().await;
    let relay = RelayName::new("main").unwrap();
    let _ = journal.rewind(&relay, &Checkpoint::start(journal.id()), None).await.unwrap();
    store.hold_put(None);
    assert_eq!(sweep.await.unwrap().unwrap(), 100);
    assert_eq!(follow_left(&journal).await[0], 101);
}

/// A sweep does not look at what is too young, nor at what is held back.
#[tokio::test]
async fn a_sweep_costs_nothing_for_what_stays() {
    let place = Place::directory();
    let store = Watched::new(place.objects().await);
    let journal = open_watched(&store, Duration::from_secs(5)).await;
    for n in 0..40 {
        let _ = journal.append(&append("a", Expected::Any, &[&format!("e{n}")])).await.unwrap();
    }
    publish_all(&journal).await;
    store.requests();
    assert_eq!(journal.sweep(&JournalSweep::new(Duration::from_hours(1))).await.unwrap(), 0);
    let intents = 3 + 2; // the relay once more, where the last sweep had come to, a listing
    assert_eq!(store.requests(), 3 + 1 + intents, "the relay, and a listing");
    assert_eq!(journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap(), 40);
    assert_eq!(
        store.requests(),
        3 + 1 + 40 * (3 + 2) + 1 + intents,
        "each once, and how far its aggregate was swept"
    );
    let _ = journal.append(&append("a", Expected::Any, &["last"])).await.unwrap();
    store.requests();
    assert_eq!(journal.read_aggregate(None, &aggregate("a"), 1, 100).await.unwrap().events.len(), 1);
    assert_eq!(store.requests(), 6, "two listings, two swept links, the hint, what is left");
}

/// However many attempts have failed: an id is claimed, and goes to one aggregate.
#[tokio::test]
async fn thousands_of_intents_are_passed() {
    let place = Place::directory();
    let objects = place.objects().await;
    let journal = place.open().await;
    for id in ["same", "other"] {
        for number in 0..1500 {
            let intent = format!("{{\"id\": \"{id}\", \"aggregate\": \"a\", \"from\": 1}}");
            objects.put(&format!("id/-/{id}_.{number:06}"), intent.into()).await.unwrap();
        }
    }
    for (id, of, intents) in [("same", "a", 1500), ("other", "b", 1501)] {
        let append = append(of, Expected::New, &[id]);
        let appended = tokio::time::timeout(Duration::from_mins(1), journal.append(&append)).await;
        assert_eq!(appended.expect("it comes to an end").unwrap().placed[0].seq, 1);
        let listed = objects.list("id/", &format!("id/-/{id}"), usize::MAX).await.unwrap();
        let there = listed.iter().filter(|object| object.name.contains(&format!("/{id}_"))).count();
        assert_eq!(there, intents, "{id}: one's own is used again");
        assert!(place.open().await.append(&append).await.unwrap().is_repeat());
        assert!(journal.find(None, &EventId::new(id).unwrap()).await.unwrap().is_some());
    }
    publish_all(&journal).await;
    assert_eq!(journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap(), 2);
    assert!(objects.list("id/", "id/", usize::MAX).await.unwrap().is_empty(), "and all are removed");
}

/// Opened by someone whose claims are forgotten soon.
async fn open_forgetful(objects: Arc<dyn Objects>) -> ObjectJournal {
    let mut settings = ObjectSettings::default();
    settings.grace = Duration::from_mins(10); // nobody takes a slow writer for gone
    settings.intent_max = Duration::from_millis(300);
    ObjectJournal::open(objects, settings).await.unwrap()
}

async fn intents(objects: &dyn Objects) -> Vec<String> {
    let listed = objects.list("id/", "id/", usize::MAX).await.unwrap();
    listed.into_iter().map(|object| object.name).collect()
}

/// An append stands still between claiming its id and its commit, for so long that a sweep forgets the claim. It wakes up, and the id is in
/// the journal once, and known.
async fn a_claim_is_forgotten_under_a_paused_writer(place: Place) {
    let objects = place.objects().await;
    let store = Watched::new(Arc::clone(&objects));
    let journal = open_forgetful(Arc::clone(&store) as Arc<dyn Objects>).await;
    let other = open_forgetful(Arc::clone(&objects)).await; // nothing is held up there
    let slow = held_up(&store, &journal, append("slow", Expected::Any, &["s1"])).await;
    let mut appended = 0;
    let started = std::time::Instant::now();
    while intents(&*objects).await.iter().any(|name| name.contains("/s1_")) {
        assert!(started.elapsed() < objects::DEADLINE, "{:?}", intents(&*objects).await);
        appended += 1;
        let _ = other.append(&append("slow", Expected::Any, &[&format!("o{appended}")])).await.unwrap();
        publish_all(&other).await;
        other.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    }
    assert!(other.find(None, &EventId::new("s1").unwrap()).await.unwrap().is_none());
    store.hold(None);
    let woken = slow.await.unwrap().expect("it claims its id anew");
    assert_eq!(woken.placed[0].seq, appended + 1, "after {appended} others");
    for journal in [&journal, &other, &place.open().await] {
        let found = journal.find(None, &EventId::new("s1").unwrap()).await.unwrap().expect("it is known");
        assert_eq!(found.seq, appended + 1);
        let again = journal.append(&append("slow", Expected::Any, &["s1"])).await.unwrap();
        assert!(again.is_repeat() && again.placed == woken_as_repeat(&woken), "{again:?}");
    }
    assert_eq!(other.head(None, &aggregate("slow")).await.unwrap(), appended + 1);
    publish_all(&other).await;
    place.until_past(&other).await;
    other.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    assert_eq!(intents(&*objects).await, Vec::<String>::new(), "nothing is left behind");
}

fn woken_as_repeat(woken: &hapax::journal::Appended) -> Vec<hapax::journal::Placed> {
    let repeat = |placed: &hapax::journal::Placed| hapax::journal::Placed {
        placing: hapax::journal::Placing::Repeat,
        ..placed.clone()
    };
    woken.placed.iter().map(repeat).collect()
}

/// What a killed append has left goes once its aggregate has gone on, and not before; what is in the journal, or held back, is known as ever.
#[tokio::test(flavor = "multi_thread")]
async fn intents_of_killed_appends_are_removed() {
    let place = Place::directory();
    let objects = place.objects().await;
    let journal = open_forgetful(Arc::clone(&objects)).await;
    let first = journal.append(&append("busy", Expected::Any, &["kept"])).await.unwrap();
    for (id, of, from) in [("dead-1", "busy", 2), ("dead-2", "busy", 2), ("idle-1", "idle", 1)] {
        let intent = format!("{{\"id\": \"{id}\", \"aggregate\": \"{of}\", \"from\": {from}}}");
        objects.put(&format!("id/-/{id}_.000000"), intent.into()).await.unwrap();
    }
    let _ = objects
        .put("id/-/dead-2_.000001", r#"{"id": "dead-2", "aggregate": "busy", "from": 2}"#.into())
        .await;
    // The first event is held back: it is as old as what was left behind, and is not.
    publish_all(&journal).await;
    let (relay, owner) = (RelayName::new("holds").unwrap(), Owner::new("test").unwrap());
    let Leadership::Acquired { token, mut checkpoint } =
        journal.acquire_leadership(&relay, &owner, Duration::from_mins(30)).await.unwrap()
    else {
        panic!("nobody else leads")
    };
    let stored = journal.read(&Position::START, 1).await.unwrap().events.remove(0);
    checkpoint.behind.push(hapax::journal::Behind::at(&stored, "too large", true, stored.at));
    let started = std::time::Instant::now();
    let mut n = 0;
    while intents(&*objects).await.iter().any(|name| name.contains("dead-")) {
        assert!(started.elapsed() < objects::DEADLINE, "{:?}", intents(&*objects).await);
        n += 1;
        let _ = journal.append(&append("busy", Expected::Any, &[&format!("b{n}")])).await.unwrap();
        publish_all(&journal).await;
        checkpoint.position = journal.stat().await.unwrap().last.unwrap();
        journal.save(&relay, token, &checkpoint).await.unwrap();
        journal.sweep(&JournalSweep::new(Duration::ZERO)).await.unwrap();
    }
    let left = intents(&*objects).await;
    assert!(
        left.iter().any(|name| name.contains("idle-1")),
        "nobody can tell that it will not come: {left:?}"
    );
    assert!(journal.find(None, &EventId::new("kept").unwrap()).await.unwrap().is_some(), "{left:?}");
    let again = journal.append(&append("busy", Expected::Any, &["kept"])).await.unwrap();
    assert_eq!(again.placed[0].seq, first.placed[0].seq);
    assert!(
        !journal.append(&append("busy", Expected::Any, &["dead-1"])).await.unwrap().is_repeat(),
        "it is free"
    );
    assert!(journal.append(&append("busy", Expected::Any, &["dead-1"])).await.unwrap().is_repeat());
}

mod directory {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_claim_that_was_forgotten_is_made_anew() {
        a_claim_is_forgotten_under_a_paused_writer(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_number_is_issued_twice_after_a_sweep() {
        a_swept_place_is_not_free(Place::directory()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_swept_place_is_taken_for_a_slow_writer() {
        a_slow_writer_finds_a_swept_place_taken(Place::directory()).await;
    }
}

mod s3 {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn a_claim_that_was_forgotten_is_made_anew() {
        a_claim_is_forgotten_under_a_paused_writer(Place::s3()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn no_number_is_issued_twice_after_a_sweep() {
        a_swept_place_is_not_free(Place::s3()).await;
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_swept_place_is_taken_for_a_slow_writer() {
        a_slow_writer_finds_a_swept_place_taken(Place::s3()).await;
    }
}
