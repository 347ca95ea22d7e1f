//! Clauses 3, 4, 5 and 8: one id, one event.

use std::sync::Arc;

use super::JournalHarness;
use super::kit::{
    Follower, aggregate, all, append, event, id, ids, open, open_warning, other, placings, put, refused,
    seqs, snapshot, tenant, write,
};
use crate::event::Headers;
use crate::id::{EventId, Kind};
use crate::journal::{Append, Expected, Journal, Placed, Placing};

/// A repeat is answered as the original was, and nothing is stored, as often as it comes.
pub async fn j3_a_repeat_has_its_original_place<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let first = append("a", Expected::New, &["a1", "a2"]);
    let original = put(&journal, &first).await;
    assert_eq!(placings(&original), [Placing::New, Placing::New]);
    write(&journal, &append("a", Expected::Exact(2), &["a3"])).await;
    let before = snapshot(&journal, &["a"]).await;
    for journal in [journal, open(harness).await] {
        let again = put(&journal, &first).await;
        assert!(again.is_repeat());
        for (again, original) in again.placed.iter().zip(&original.placed) {
            assert_eq!(*again, Placed { placing: Placing::Repeat, ..original.clone() });
        }
        assert_eq!(snapshot(&journal, &["a"]).await, before);
    }
}

/// Who retries has expected what was there the first time.
pub async fn j3_a_repeat_is_not_asked_what_it_expects<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    write(&journal, &append("a", Expected::Exact(1), &["a2", "a3"])).await;
    for expected in
        [Expected::New, Expected::Any, Expected::Exact(0), Expected::Exact(2), Expected::Exact(99)]
    {
        assert_eq!(seqs(&put(&journal, &append("a", expected, &["a2"])).await), [2], "{expected}");
    }
    // With something new beside it, the expectation counts.
    let before = snapshot(&journal, &["a"]).await;
    refused(&journal, &append("a", Expected::Exact(1), &["a2", "a4"]), "conflict").await;
    refused(&journal, &append("a", Expected::Exact(1), &["a4", "a2"]), "conflict").await;
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(3), &["a2", "a4"])).await), [2, 4]);
}

/// Some are there, some are not: each has the answer that is true of it.
pub async fn j3_repeats_mix_with_new_events<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let original = put(&journal, &append("a", Expected::New, &["a1", "a2"])).await;
    let mixed = append("a", Expected::Exact(2), &["a3", "a1", "a4", "a2", "a5"]);
    let answer = put(&journal, &mixed).await;
    let (new, repeat) = (Placing::New, Placing::Repeat);
    assert_eq!(seqs(&answer), [3, 1, 4, 2, 5]);
    assert_eq!(placings(&answer), [new, repeat, new, repeat, new]);
    assert!(!answer.is_repeat());
    assert_eq!(answer.placed[1].position, original.placed[0].position);
    assert_eq!(answer.placed[3].position, original.placed[1].position);
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3", "a4", "a5"]);
    assert_eq!(seqs(&put(&journal, &mixed).await), [3, 1, 4, 2, 5], "and all of it again");
}

/// The same event twice in one append is there once; two contents under one id are refused.
pub async fn j3_one_id_twice_in_an_append<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let answer = put(&journal, &append("a", Expected::New, &["a1", "a2", "a1", "a2", "a1"])).await;
    assert_eq!(seqs(&answer), [1, 2, 1, 2, 1]);
    let (new, repeat) = (Placing::New, Placing::Repeat);
    assert_eq!(placings(&answer), [new, new, repeat, repeat, repeat]);
    assert_eq!(answer.placed[2].position, answer.placed[0].position);
    assert_eq!(answer.placed[3].position, answer.placed[1].position);
    let before = snapshot(&journal, &["a"]).await;
    let two = Append::new(aggregate("a"), Expected::Any, [event("a3"), other("a3")]);
    let error = refused(&journal, &two, "invalid").await;
    assert!(error.to_string().contains("a3"), "{error}");
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(2), &["a1", "a3", "a1"])).await), [1, 3, 1]);
}

/// Space and the order of keys in JSON, headers and times do not make another event; what was stored first stays.
pub async fn j3_the_same_fact_written_otherwise_is_a_repeat<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let first = event("a1").payload(r#"{"a": 1, "b": 2}"#);
    write(&journal, &Append::new(aggregate("a"), Expected::New, [first])).await;
    let before = snapshot(&journal, &["a"]).await;
    let mut otherwise = event("a1").payload(r#"{"b":2,"a":1}"#).time(crate::Time::from_millis(7));
    otherwise.headers = [("try", "2")].into_iter().collect::<Headers>();
    let again = put(&journal, &Append::new(aggregate("a"), Expected::New, [otherwise])).await;
    assert!(again.is_repeat());
    assert_eq!(snapshot(&journal, &["a"]).await, before);
}

/// Someone whose append ended in doubt, and who tries again from several places at once.
pub async fn j3_a_repeat_of_an_append_in_doubt_is_stored_once<H: JournalHarness>(harness: &H) {
    let journals = [Arc::new(open(harness).await), Arc::new(open(harness).await)];
    let doubtful = append("a", Expected::New, &["a1", "a2", "a3"]);
    let tasks: Vec<_> = (0..12)
        .map(|n| {
            let (journal, append) = (Arc::clone(&journals[n % 2]), doubtful.clone());
            tokio::spawn(async move { put(&*journal, &append).await })
        })
        .collect();
    let (mut stored, mut positions) = (0, Vec::new());
    for task in tasks {
        let answer = task.await.expect("each is answered");
        assert_eq!(seqs(&answer), [1, 2, 3]);
        stored += usize::from(!answer.is_repeat());
        positions.push(answer.placed.iter().map(|placed| placed.position.clone()).collect::<Vec<_>>());
    }
    positions.dedup();
    assert_eq!((stored, positions.len()), (1, 1), "stored once, in one place: {positions:?}");
    assert_eq!(ids(&*journals[0], None, "a").await, ["a1", "a2", "a3"]);
    Follower::new(&*journals[1], 2).until(3).await;
}

/// Payload, kind and aggregate are what must not change under an id.
pub async fn j4_other_content_is_a_mismatch<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    write(&journal, &append("b", Expected::New, &["b1"])).await;
    let before = snapshot(&journal, &["a", "b"]).await;
    let kind = event("a1").kind(Kind::new("paid").unwrap());
    for reused in [other("a1"), kind, event("a1").payload("")] {
        for expected in [Expected::Any, Expected::Exact(1), Expected::Exact(9)] {
            let append = Append::new(aggregate("a"), expected, [reused.clone()]);
            let error = refused(&journal, &append, "mismatch").await;
            assert!(error.to_string().contains("a1"), "{error}");
        }
    }
    for of in ["b", "c"] {
        refused(&journal, &append(of, Expected::Any, &["a1"]), "mismatch").await;
    }
    assert_eq!(snapshot(&journal, &["a", "b"]).await, before);
    assert_eq!(journal.head(None, &aggregate("c")).await.unwrap(), 0);
}

/// Nothing of an append with a reused id is stored, wherever the id stands in it.
pub async fn j4_a_mismatch_stores_nothing_of_its_append<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    let before = snapshot(&journal, &["a"]).await;
    for place in 0..3 {
        let mut events = vec![event("a2"), event("a3")];
        events.insert(place, other("a1"));
        refused(&journal, &Append::new(aggregate("a"), Expected::Any, events), "mismatch").await;
    }
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    for name in ["a2", "a3"] {
        assert_eq!(journal.find(None, &id(name)).await.unwrap(), None);
    }
    let original = journal.find(None, &id("a1")).await.unwrap().expect("it is there");
    assert_eq!(original.event.payload, event("a1").payload);
}

/// Under `warn` the original is kept and answered with; the new payload is nowhere.
pub async fn j4_warned_mismatches_keep_the_original<H: JournalHarness>(harness: &H) {
    let journal = open_warning(harness).await;
    let original = put(&journal, &append("a", Expected::New, &["a1", "a2"])).await;
    let before = snapshot(&journal, &["a"]).await;
    for expected in [Expected::New, Expected::Any, Expected::Exact(2)] {
        let answer = put(&journal, &Append::new(aggregate("a"), expected, [other("a1")])).await;
        assert_eq!(answer.placed, [Placed { placing: Placing::Kept, ..original.placed[0].clone() }]);
        assert!(answer.is_repeat());
    }
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    let mixed = Append::new(aggregate("a"), Expected::Exact(2), [other("a2"), event("a3"), event("a1")]);
    let answer = put(&journal, &mixed).await;
    assert_eq!(placings(&answer), [Placing::Kept, Placing::New, Placing::Repeat]);
    assert_eq!(seqs(&answer), [2, 3, 1]);
    // An id of another aggregate: its place there.
    let elsewhere = put(&journal, &append("b", Expected::Any, &["a1"])).await;
    assert_eq!(elsewhere.placed[0], Placed { placing: Placing::Kept, ..original.placed[0].clone() });
    assert_eq!(journal.head(None, &aggregate("b")).await.unwrap(), 0);
    for name in ["a1", "a2", "a3"] {
        let found = journal.find(None, &id(name)).await.unwrap().expect("it is there");
        assert_eq!(found.event.payload, event(name).payload);
    }
    for stored in all(&journal, None, "a").await {
        assert_eq!(stored.event.payload, event(&stored.event.id.to_string()).payload);
    }
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3"]);
    let mut follower = Follower::new(&journal, 10);
    follower.until(3).await;
    let payloads = follower.events.values().flatten().map(|stored| stored.event.payload.clone());
    assert!(payloads.eq(["a1", "a2", "a3"].map(|name| event(name).payload)));
    // The same storage, opened to refuse.
    let strict = open(harness).await;
    refused(&strict, &Append::new(aggregate("a"), Expected::Any, [other("a1")]), "mismatch").await;
}

/// Command envelopes are repeated and reused like any event.
pub async fn j4_commands_are_no_exception<H: JournalHarness>(harness: &H) {
    let command = |amount: u32| {
        let payload = format!(r#"{{"metadata": {{"kind": "command"}}, "amount": {amount}}}"#);
        let event = event("c1").kind(Kind::new("UPDATE_ORDER").unwrap()).payload(payload);
        Append::new(aggregate("a"), Expected::Exact(1), [event])
    };
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    let original = put(&journal, &command(7)).await;
    let again = put(&journal, &command(7)).await;
    assert_eq!(again.placed, [Placed { placing: Placing::Repeat, ..original.placed[0].clone() }]);
    refused(&journal, &command(8), "mismatch").await;
    let warning = open_warning(harness).await;
    assert_eq!(placings(&put(&warning, &command(8)).await), [Placing::Kept]);
    assert_eq!(ids(&journal, None, "a").await, ["a1", "c1"]);
    let found = journal.find(None, &id("c1")).await.unwrap().expect("it is there");
    assert_eq!(found.event.payload, command(7).events[0].payload);
}

/// The same aggregate and the same ids in two tenants, and in none, are strangers.
pub async fn j5_two_tenants_never_meet<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let tenants = [None, Some(tenant("acme")), Some(tenant("Acme")), Some(tenant("acme%"))];
    let of = |n: usize, append: Append| match &tenants[n] {
        Some(tenant) => append.tenant(tenant.clone()),
        None => append,
    };
    for n in 0..tenants.len() {
        for _ in 0..2 {
            let payload = format!("of tenant {n}");
            let one = Append::new(aggregate("a"), Expected::New, [event("e1").payload(payload)]);
            assert_eq!(seqs(&put(&journal, &of(n, one)).await), [1]);
        }
        let own = format!("own-{n}");
        write(&journal, &of(n, append("a", Expected::Exact(1), &[&own]))).await;
    }
    for (n, tenant) in tenants.iter().enumerate() {
        assert_eq!(ids(&journal, tenant.as_ref(), "a").await, ["e1".to_owned(), format!("own-{n}")]);
        for stored in all(&journal, tenant.as_ref(), "a").await {
            assert_eq!(stored.event.tenant, *tenant);
        }
        let found = journal.find(tenant.as_ref(), &id("e1")).await.unwrap().expect("it is there");
        assert_eq!(found.event.payload, format!("of tenant {n}"));
        let foreign = format!("own-{}", (n + 1) % tenants.len());
        assert_eq!(journal.find(tenant.as_ref(), &id(&foreign)).await.unwrap(), None);
    }
    assert_eq!(journal.head(Some(&tenant("other")), &aggregate("a")).await.unwrap(), 0);
    assert!(all(&journal, Some(&tenant("other")), "a").await.is_empty());
    let mut follower = Follower::new(&journal, 3);
    follower.until(8).await;
    assert_eq!(follower.events.len(), 4);
}

/// Found as it was appended, with its place; an unknown id is not found.
pub async fn j8_an_event_is_found_by_its_id<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let uuid = EventId::now_v7().to_string();
    let appended = put(&journal, &append("a", Expected::New, &["a1", &uuid])).await;
    write(&journal, &append("b", Expected::New, &["b1"])).await;
    for (name, placed) in ["a1", &uuid].iter().zip(&appended.placed) {
        let found = journal.find(None, &id(name)).await.unwrap().expect("it is there");
        assert_eq!((found.event.id.to_string().as_str(), found.seq), (*name, placed.seq));
        assert_eq!(found.position, placed.position);
        assert_eq!((found.event.aggregate, found.event.seq), (Some(aggregate("a")), Some(placed.seq)));
    }
    for unknown in ["a2", "a", "a1 ", &EventId::now_v7().to_string()] {
        assert_eq!(journal.find(None, &id(unknown)).await.unwrap(), None, "{unknown:?}");
    }
    assert_eq!(journal.find(Some(&tenant("acme")), &id("a1")).await.unwrap(), None);
}

/// Texts that look alike are different ids.
pub async fn j8_ids_are_compared_as_bytes<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let uuid = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
    let upper = uuid.to_uppercase();
    let long = "ü".repeat(255);
    let names = [
        "id",
        "ID",
        "id ",
        " id",
        "i%d",
        "i_d",
        "i/d",
        "../id",
        "é",
        "e\u{301}",
        "🦀",
        "'; DROP TABLE x; --",
        "a\nb",
        "a\tb",
        uuid,
        &upper,
        &long,
    ];
    let appended = put(&journal, &append("a", Expected::New, &names)).await;
    assert!(appended.placed.iter().all(|placed| placed.placing == Placing::New));
    for (n, name) in names.iter().enumerate() {
        let found = journal.find(None, &id(name)).await.unwrap().expect("it is there");
        assert_eq!((found.seq, found.event.id.as_str().as_ref()), (n as u64 + 1, *name));
    }
    assert_eq!(ids(&journal, None, "a").await, names);
}
