//! Clauses 6 and 7: what was appended is read back, and followed.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::timeout;

use super::JournalHarness;
use super::kit::{
    DEADLINE, Follower, aggregate, all, append, event, id, ids, open, put, tenant, waits, write,
};
use crate::clock::Time;
use crate::event::{Event, Fingerprint, Headers, Origin, TraceContext};
use crate::id::{Kind, Topic};
use crate::journal::{Append, Expected, Journal, Position, RelayStore as _, Stored};
use crate::testing::model::{Rng, seed};

/// From any seq on, so many at a time.
pub async fn j6_an_aggregate_is_read_in_pages<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let names: Vec<String> = (1..=10).map(|n| format!("a{n}")).collect();
    for two in names.chunks(2) {
        write(&journal, &append("a", Expected::Any, &[&two[0], &two[1]])).await;
        write(&journal, &append("b", Expected::Any, &[&format!("b-{}", two[0])])).await;
    }
    for (from, limit, wanted) in [
        (0, 3, vec![1, 2, 3]),
        (1, 3, vec![1, 2, 3]),
        (4, 3, vec![4, 5, 6]),
        (8, 100, vec![8, 9, 10]),
        (10, 1, vec![10]),
        (11, 10, vec![]),
        (5, 0, vec![]),
        (u64::MAX, 10, vec![]),
    ] {
        let page = journal.read_aggregate(None, &aggregate("a"), from, limit).await.unwrap().events;
        let seqs: Vec<u64> = page.iter().map(|stored| stored.seq).collect();
        assert_eq!(seqs, wanted, "{limit} from {from}");
        assert!(page.iter().all(|stored| stored.event.id.to_string() == format!("a{}", stored.seq)));
        assert!(page.is_sorted_by(|one, next| one.position < next.position), "in the journal's order too");
    }
}

/// Everything that an event can be, back as it was, by every way of reading.
pub async fn j6_bytes_come_back_exactly<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let started = journal.now().await.unwrap();
    let raw: Bytes = (0..=255_u8).collect::<Vec<_>>().into();
    let mut full = event("full")
        .time(Time::from_micros(1_234_567_890_123_457))
        .kind(Kind::new("order.paid/ü 🦀").unwrap())
        .payload(raw.clone())
        .origin(Origin::new(Topic::new("orders").unwrap(), 3, 17));
    full.trace =
        Some(TraceContext::parse(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01").unwrap());
    full.headers = [
        ("name", Bytes::from_static(b"1")),
        ("name", Bytes::from_static(b"2")),
        ("Name", Bytes::from_static(b"")),
        ("ü 🦀\n'", raw.clone()),
        ("a", Bytes::from_static(b"\xff\xfe\x00")),
    ]
    .into_iter()
    .collect::<Headers>();
    let events = [
        full,
        event("empty").payload(""),
        event("json").payload("{ \"b\" : 1.0 ,\n\"a\":[ ] }"),
        event("before 1970").time(Time::from_micros(-7)),
        event("other trace").payload(vec![0; 70_000]),
        Event { aggregate: Some(aggregate("a")), tenant: Some(tenant("acme")), ..event("names its own") },
    ];
    write(&journal, &Append::new(aggregate("a"), Expected::New, events.clone()).tenant(tenant("acme"))).await;
    let journal = open(harness).await;
    let (now, acme) = (journal.now().await.unwrap(), tenant("acme"));
    let read = all(&journal, Some(&acme), "a").await;
    let mut follower = Follower::new(&journal, 4);
    while follower.count() < events.len() {
        follower.step().await;
    }
    let given: Vec<Stored> = follower.events.into_values().flatten().collect();
    assert_eq!(read, given);
    for (n, (sent, stored)) in events.into_iter().zip(read).enumerate() {
        assert_eq!(journal.find(Some(&acme), &sent.id).await.unwrap().as_ref(), Some(&stored));
        assert!(stored.at >= started && stored.at <= now, "{} is between {started} and {now}", stored.at);
        let fingerprint = Fingerprint::of(sent.kind.as_ref(), Some(&aggregate("a")), None, &sent.payload);
        assert_eq!(stored.fingerprint, fingerprint);
        // Where it came from before is nobody's business; whose it is, and its number, are filled in.
        let wanted = Event { tenant: Some(acme.clone()), origin: None, ..sent };
        assert_eq!(stored.event, wanted.seq(aggregate("a"), n as u64 + 1));
    }
}

/// Names that look alike, or like something else, are aggregates of their own.
pub async fn j6_hostile_names_are_aggregates_of_their_own<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let (long, wide) = ("x".repeat(255), "🦀".repeat(255));
    let names = [
        "order",
        "Order",
        "ORDER",
        "order ",
        " order",
        "or der",
        "or  der",
        "order/1",
        "order/1/",
        "/order",
        "order//1",
        "../order",
        "..",
        ".",
        "%6frder",
        "order%",
        "o_der",
        "order\\1",
        "order\n",
        "order\t",
        "é",
        "e\u{301}",
        "ß",
        "ss",
        "'; DROP TABLE x; --",
        "\"order\"",
        "order:1",
        "order?x=1#y",
        "1",
        "01",
        "null",
        "\u{202e}order",
        &long,
        &wide,
    ];
    for round in 1..=2_u64 {
        for (n, name) in names.iter().enumerate() {
            let expected = Expected::Exact(round - 1);
            let event = event(&format!("e-{n}-{round}"));
            write(&journal, &Append::new(aggregate(name), expected, [event])).await;
        }
    }
    let journal = open(harness).await;
    for (n, name) in names.iter().enumerate() {
        assert_eq!(ids(&journal, None, name).await, [format!("e-{n}-1"), format!("e-{n}-2")], "{name:?}");
        let found = journal.find(None, &id(&format!("e-{n}-1"))).await.unwrap().expect("it is there");
        assert_eq!(found.aggregate(), Some(&aggregate(name)));
    }
    let mut follower = Follower::new(&journal, 7);
    follower.until(names.len() * 2).await;
    assert_eq!(follower.events.len(), names.len());
}

/// From the start to the end, in pages of every size; and from any place on, what comes after it.
pub async fn j7_following_gives_every_event_once<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    for n in 0..12 {
        let of = format!("aggregate-{}", n % 5);
        let names = [format!("e-{n}-1"), format!("e-{n}-2")];
        write(&journal, &append(&of, Expected::Any, &[&names[0], &names[1]])).await;
    }
    for page in [1, 5, 24, 1000] {
        let mut follower = Follower::new(&journal, page);
        follower.until(24).await;
        assert_eq!(follower.events.len(), 5);
    }
    let whole = journal.read(&Position::START, 1000).await.unwrap();
    assert!(!whole.at_hole, "nobody is writing");
    for (n, stored) in whole.events.iter().enumerate() {
        let rest = journal.read(&stored.position, 1000).await.unwrap();
        assert_eq!(rest.events, whole.events[n + 1..]);
        assert_eq!(journal.read(&stored.position, 0).await.unwrap().events, []);
    }
    let end = journal.read(&whole.next, 10).await.unwrap();
    assert_eq!((end.events.len(), end.next), (0, whole.next));
}

/// Two followers beside eight writers: nothing is missed, nothing comes twice, no aggregate goes back.
pub async fn j7_following_while_writers_run<H: JournalHarness>(harness: &H) {
    const WRITERS: usize = 8;
    const ROUNDS: usize = 25;
    let seed = seed();
    let journals = [Arc::new(open(harness).await), Arc::new(open(harness).await)];
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (journal, mut rng) = (Arc::clone(&journals[writer % 2]), Rng::new(seed + writer as u64));
            tokio::spawn(async move {
                for round in 0..ROUNDS {
                    let names: Vec<_> = (0..2).map(|n| format!("e-{writer}-{round}-{n}")).collect();
                    let of = format!("aggregate-{}", rng.below(3));
                    write(&*journal, &append(&of, Expected::Any, &[&names[0], &names[1]])).await;
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    let followers: Vec<_> = journals
        .into_iter()
        .map(|journal| {
            tokio::spawn(async move {
                let mut follower = Follower::new(&*journal, 16);
                follower.until(WRITERS * ROUNDS * 2).await;
                follower.events
            })
        })
        .collect();
    for writer in writers {
        writer.await.expect("a writer ends well");
    }
    let mut all = Vec::new();
    for follower in followers {
        all.push(follower.await.expect("it is given everything"));
    }
    all.dedup();
    assert_eq!(all.len(), 1, "all were given the same");
}

/// How many lie after a place, up to a limit; and how many there are.
pub async fn j7_what_follows_is_counted<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    assert_eq!(journal.count_after(&Position::START, 100).await.unwrap(), 0);
    let names: Vec<String> = (0..9).map(|n| format!("e{n}")).collect();
    for (n, name) in names.iter().enumerate() {
        write(&journal, &append(&format!("aggregate-{}", n % 2), Expected::Any, &[name])).await;
    }
    assert_eq!(journal.count_after(&Position::START, 100).await.unwrap(), 9);
    assert_eq!(journal.count_after(&Position::START, 4).await.unwrap(), 4);
    let events = journal.read(&Position::START, 100).await.unwrap().events;
    for (n, stored) in events.iter().enumerate() {
        let after = events.len() - n - 1;
        assert_eq!(journal.count_after(&stored.position, 100).await.unwrap(), after as u64);
    }
    let stat = journal.stat().await.unwrap();
    if stat.exact {
        assert_eq!((stat.events, stat.aggregates), (9, 2));
    }
    let oldest = events.iter().map(|stored| stored.at).min();
    assert_eq!((stat.oldest_at, stat.last.as_ref()), (oldest, events.last().map(|stored| &stored.position)));
}

/// Whoever waits is woken by an append, of this opening or another, and not kept waiting by one that was before.
pub async fn j7_waiting_ends_when_something_is_appended<H: JournalHarness>(harness: &H) {
    let (journal, other) = (Arc::new(open(harness).await), open(harness).await);
    let mut after = Position::START;
    for n in 0..4 {
        let (waiting, from) = (Arc::clone(&journal), after.clone());
        let wait = tokio::spawn(async move { waiting.wait(&from, DEADLINE * 10).await });
        let one = append("a", Expected::Any, &[&format!("a{n}")]);
        let appended = if n % 2 == 0 { put(&*journal, &one).await } else { put(&other, &one).await };
        timeout(DEADLINE, wait).await.expect("it is woken").unwrap().expect("it waits");
        let again = timeout(DEADLINE, journal.wait(&after, DEADLINE * 10)).await;
        again.expect("there is something already").unwrap();
        after = appended.placed[0].position.clone();
    }
}

/// Nothing comes: waiting ends all the same, and it does wait.
pub async fn j7_waiting_ends_at_its_limit<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::Any, &["a1"])).await;
    let mut follower = Follower::new(&journal, 10);
    follower.until(1).await;
    let after = follower.position().clone();
    assert!(waits(&journal, &after).await, "a busy loop");
}
