//! Clauses 1 and 2: numbers without gaps, expectations that hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::JournalHarness;
use super::kit::{
    Follower, aggregate, all, append, event, id, ids, open, other, placings, put, refused, seqs, snapshot,
    try_put, write,
};
use crate::error::Error;
use crate::event::Event;
use crate::id::Kind;
use crate::journal::{Append, Expected, Journal, JournalSettings, Placed, Placing, Position};
use crate::testing::model::{Rng, seed};

/// 1, 2, 3 in each aggregate, however many are appended at a time, also by another opening.
pub async fn j1_numbers_begin_at_one_and_have_no_gap<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Any, &["a1", "a2"])).await), [1, 2]);
    assert_eq!(seqs(&put(&journal, &append("b", Expected::Any, &["b1"])).await), [1]);
    let again = open(harness).await;
    let appended = put(&again, &append("a", Expected::Any, &["a3"])).await;
    assert_eq!((seqs(&appended), placings(&appended)), (vec![3], vec![Placing::New]));
    assert_eq!((appended.last_seq(), appended.is_repeat()), (3, false));
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3"]);
    assert_eq!(ids(&journal, None, "b").await, ["b1"]);
    assert_eq!(journal.head(None, &aggregate("c")).await.unwrap(), 0);
}

/// The last of three events is refused: none is stored.
pub async fn j1_an_append_is_all_or_nothing<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    let before = snapshot(&journal, &["a"]).await;
    let mut third_is_out_of_turn = append("a", Expected::Any, &["a2", "a3", "a4"]);
    third_is_out_of_turn.events[2].seq = Some(9);
    refused(&journal, &third_is_out_of_turn, "conflict").await;
    let third_is_reused = Append::new(aggregate("a"), Expected::Any, [event("a2"), event("a3"), other("a1")]);
    refused(&journal, &third_is_reused, "mismatch").await;
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    assert_eq!(journal.find(None, &id("a2")).await.unwrap(), None);
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(1), &["a2", "a3"])).await), [2, 3]);
}

/// Whatever an append is refused for, the next number is still the next.
pub async fn j1_a_refused_append_burns_no_number<H: JournalHarness>(harness: &H) {
    let settings = JournalSettings { event_bytes_max: 1000, ..JournalSettings::default() };
    let journal = harness.open(settings).await;
    for n in 1..=4_u64 {
        let name = format!("a{n}");
        assert_eq!(seqs(&put(&journal, &append("a", Expected::Any, &[&name])).await), [n]);
        refused(&journal, &append("a", Expected::Exact(n - 1), &["late"]), "conflict").await;
        refused(&journal, &append("a", Expected::New, &["new"]), "conflict").await;
        let reused = Append::new(aggregate("a"), Expected::Any, [event("before"), other(&name)]);
        refused(&journal, &reused, "mismatch").await;
        let large = Append::new(aggregate("a"), Expected::Any, [event("large").payload(vec![7; 2000])]);
        refused(&journal, &large, "invalid").await;
        assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), n);
    }
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3", "a4"]);
}

const WRITERS: usize = 32;
const ROUNDS: usize = 12;
const AGGREGATES: u64 = 8;

/// What was acknowledged to one writer.
type Appends = Vec<(String, String, Placed)>;

/// 32 writers on 8 aggregates, with wrong expectations, reused ids, events too large and repeats between: the numbers of
/// every aggregate are 1 to n, each once, and everything acknowledged stands where its answer said.
pub async fn j1_32_writers_on_8_aggregates_leave_no_gap<H: JournalHarness>(harness: &H) {
    let seed = seed();
    let settings = JournalSettings { event_bytes_max: 1000, ..JournalSettings::default() };
    let journals = [Arc::new(harness.open(settings.clone()).await), Arc::new(harness.open(settings).await)];
    let writers: Vec<_> = (0..WRITERS)
        .map(|n| tokio::spawn(write_some(Arc::clone(&journals[n % 2]), n, Rng::new(seed + n as u64))))
        .collect();
    let mut appended: BTreeMap<String, Vec<(String, Placed)>> = BTreeMap::new();
    for writer in writers {
        for (of, event, placed) in writer.await.expect("a writer ends well") {
            appended.entry(of).or_default().push((event, placed));
        }
    }
    let total = appended.values().map(Vec::len).sum();
    println!("{total} events of {WRITERS} writers on {AGGREGATES} aggregates");
    let mut follower = Follower::new(&*journals[0], 50);
    follower.until(total).await;
    for (of, mut events) in appended {
        events.sort_by_key(|(_, placed)| placed.seq);
        let acknowledged: Vec<String> = events.iter().map(|(event, _)| event.clone()).collect();
        assert_eq!(
            ids(&journals[1], None, &of).await,
            acknowledged,
            "{of} has what was acknowledged, in that order"
        );
        let read = follower.events.iter().find(|(key, _)| key.aggregate.as_str() == of).expect("followed").1;
        for ((event, placed), stored) in events.iter().zip(read) {
            assert_eq!((&placed.position, placed.seq), (&stored.position, stored.seq), "{event}");
        }
    }
}

async fn write_some<J: Journal>(journal: Arc<J>, writer: usize, mut rng: Rng) -> Appends {
    let mut acknowledged: Appends = Vec::new();
    for round in 0..ROUNDS {
        let of = format!("aggregate-{}", rng.below(AGGREGATES));
        let names: Vec<String> = (0..=rng.below(3)).map(|n| format!("e-{writer}-{round}-{n}")).collect();
        let events: Vec<Event> = names.iter().map(|name| event(name)).collect();
        let head = journal.head(None, &aggregate(&of)).await.unwrap();
        let mut sent = Append::new(aggregate(&of), Expected::Any, events);
        match rng.below(7) {
            0 => {
                sent.expected = Expected::Exact(head + 1_000_000);
                refused(&*journal, &sent, "conflict").await;
            }
            1 if !acknowledged.is_empty() => {
                let (used_in, used, _) = rng.pick(&acknowledged);
                sent.aggregate = aggregate(&used_in);
                sent.events.push(other(&used));
                refused(&*journal, &sent, "mismatch").await;
            }
            2 => {
                sent.events.push(event("large").payload(vec![7; 2000]));
                refused(&*journal, &sent, "invalid").await;
            }
            3 if !acknowledged.is_empty() => {
                let (used_in, used, placed) = rng.pick(&acknowledged);
                let again = put(&*journal, &append(&used_in, Expected::Exact(0), &[&used])).await;
                assert_eq!(again.placed, [Placed { placing: Placing::Repeat, ..placed }]);
            }
            way => {
                // Who expects a head may find that another was faster, and then has written nothing.
                sent.expected = if way == 4 { Expected::Exact(head) } else { Expected::Any };
                match try_put(&*journal, &sent).await {
                    Ok(appended) => {
                        let placed = names.into_iter().zip(appended.placed);
                        acknowledged.extend(placed.map(|(name, placed)| (of.clone(), name, placed)));
                    }
                    Err(error) => assert!(way == 4 && error.code() == "conflict", "{error}"),
                }
            }
        }
    }
    acknowledged
}

/// Acknowledged is visible to another opening, by every way of reading.
pub async fn j1_what_is_acknowledged_others_see<H: JournalHarness>(harness: &H) {
    let (journal, other) = (open(harness).await, open(harness).await);
    assert_eq!(journal.id(), other.id(), "one journal");
    assert_eq!(journal.capabilities(), other.capabilities());
    let mut follower = Follower::new(&other, 10);
    for n in 1..=3_usize {
        let name = format!("a{n}");
        write(&journal, &append("a", Expected::Any, &[&name])).await;
        follower.until(n).await;
        let third = open(harness).await;
        assert!(third.find(None, &id(&name)).await.unwrap().is_some());
        assert_eq!(third.head(None, &aggregate("a")).await.unwrap(), n as u64);
        assert_eq!(all(&third, None, "a").await.len(), n);
    }
}

/// Many at once: each has its own answer, in order, and sees what those before it did.
pub async fn j1_of_many_appends_one_refused_harms_no_other<H: JournalHarness>(harness: &H) {
    let settings = JournalSettings { event_bytes_max: 1000, ..JournalSettings::default() };
    let journal = harness.open(settings).await;
    write(&journal, &append("b", Expected::New, &["b1"])).await;
    let appends = [
        append("a", Expected::New, &["a1", "a2"]),
        append("b", Expected::New, &["b2"]),
        append("a", Expected::Exact(2), &["a3"]),
        Append::new(aggregate("a"), Expected::Any, [event("large").payload(vec![7; 2000])]),
        Append::new(aggregate("a"), Expected::Any, [event("a4"), other("a1")]),
        append("a", Expected::Any, &[]),
        append("a", Expected::New, &["a2"]),
        append("a", Expected::Any, &["a4"]),
        append("b", Expected::Exact(1), &["b2"]),
    ];
    let answers = journal.append_many(&appends).await.expect("the journal is there");
    let seqs_of: Vec<_> = answers
        .iter()
        .map(|answer| match answer {
            Ok(appended) => seqs(appended).iter().map(u64::to_string).collect::<Vec<_>>().join(" "),
            Err(error) => error.code().to_owned(),
        })
        .collect();
    assert_eq!(seqs_of, ["1 2", "conflict", "3", "invalid", "mismatch", "invalid", "2", "4", "2"]);
    assert!(answers[6].as_ref().unwrap().is_repeat());
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3", "a4"]);
    assert_eq!(ids(&journal, None, "b").await, ["b1", "b2"]);
    for (append, answer) in appends.iter().zip(&answers).filter(|(_, answer)| answer.is_ok()) {
        for (event, placed) in append.events.iter().zip(&answer.as_ref().unwrap().placed) {
            let stored = journal.find(None, &event.id).await.unwrap().expect("it is there");
            assert_eq!((&stored.position, stored.seq), (&placed.position, placed.seq), "{}", event.id);
        }
    }
    assert!(journal.append_many(&[]).await.unwrap().is_empty());
}

/// Exact, new and any, each where it holds and where it does not.
pub async fn j2_what_is_expected_is_checked<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    refused(&journal, &append("a", Expected::Exact(1), &["a1"]), "conflict").await;
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(0), &["a1"])).await), [1]);
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(1), &["a2", "a3"])).await), [2, 3]);
    for expected in [Expected::New, Expected::Exact(0), Expected::Exact(2), Expected::Exact(4)] {
        refused(&journal, &append("a", expected, &["a4"]), "conflict").await;
    }
    refused(&journal, &append("a", Expected::Exact(u64::MAX), &["a4"]), "conflict").await;
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Any, &["a4"])).await), [4]);
    assert_eq!(seqs(&put(&journal, &append("b", Expected::New, &["b1"])).await), [1]);
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3", "a4"]);
}

/// The sentence has what was expected and what is there.
pub async fn j2_a_conflict_says_both_numbers<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    write(&journal, &append("a", Expected::New, &["a1", "a2", "a3"])).await;
    let error = refused(&journal, &append("a", Expected::Exact(17), &["a4"]), "conflict").await;
    let Error::Conflict { expected, actual } = &error else { panic!("{error:?}") };
    assert!(expected.contains("17") && actual.contains('3'), "{error}");
    assert_eq!(ids(&journal, None, "a").await.len(), 3);
}

/// Ten who saw the same head and decide at the same time: one is right.
pub async fn j2_of_those_who_expect_the_same_one_wins<H: JournalHarness>(harness: &H) {
    let journals = [Arc::new(open(harness).await), Arc::new(open(harness).await)];
    for round in 0..5_u64 {
        let tasks: Vec<_> = (0..10)
            .map(|n| {
                let journal = Arc::clone(&journals[n % 2]);
                let append = append("a", Expected::Exact(round), &[&format!("e-{round}-{n}")]);
                tokio::spawn(async move { try_put(&*journal, &append).await })
            })
            .collect();
        let mut won = 0;
        for task in tasks {
            match task.await.unwrap() {
                Ok(appended) => {
                    assert_eq!(seqs(&appended), [round + 1]);
                    won += 1;
                }
                Err(error) => assert_eq!(error.code(), "conflict", "{error}"),
            }
        }
        assert_eq!(won, 1, "in round {round}");
    }
    assert_eq!(ids(&*journals[0], None, "a").await.len(), 5);
}

/// Who numbers by itself is checked all the same.
pub async fn j2_an_event_that_has_a_seq_must_be_next<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let numbered = |name: &str, seq| event(name).seq(aggregate("a"), seq);
    let put_numbered = |events: Vec<Event>| Append::new(aggregate("a"), Expected::Any, events);
    assert_eq!(seqs(&put(&journal, &put_numbered(vec![numbered("a1", 1), numbered("a2", 2)])).await), [1, 2]);
    for seq in [1, 2, 4, u64::try_from(i64::MAX).unwrap()] {
        let error = refused(&journal, &put_numbered(vec![numbered("a3", seq)]), "conflict").await;
        assert!(error.to_string().contains(&seq.to_string()) && error.to_string().contains('3'), "{error}");
    }
    assert_eq!(seqs(&put(&journal, &put_numbered(vec![numbered("a3", 3)])).await), [3]);
    // A repeat is a repeat, whichever number it asks for.
    let appended = put(&journal, &put_numbered(vec![numbered("a1", 7), numbered("a4", 4)])).await;
    assert_eq!((seqs(&appended), placings(&appended)), (vec![1, 4], vec![Placing::Repeat, Placing::New]));
    assert_eq!(ids(&journal, None, "a").await, ["a1", "a2", "a3", "a4"]);
}

/// An update or a delete says what it expects to find; a creation, or a fact, need not.
pub async fn j2_update_and_delete_commands_must_expect<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    let of_kind = |name: &str, kind: &str, payload: &'static str| {
        event(name).kind(Kind::new(kind).unwrap()).payload(payload)
    };
    let command = r#"{"metadata": {"kind": "command"}}"#;
    let one = |expected, event| Append::new(aggregate("a"), expected, [event]);
    write(&journal, &one(Expected::Any, of_kind("c1", "CreateOrder", command))).await;
    let before = snapshot(&journal, &["a"]).await;
    for kind in ["UPDATE_ORDER", "order.delete"] {
        let error = refused(&journal, &one(Expected::Any, of_kind("c2", kind, command)), "invalid").await;
        assert!(error.to_string().contains("c2"), "{error}");
    }
    refused(&journal, &one(Expected::Exact(7), of_kind("c2", "UPDATE_ORDER", command)), "conflict").await;
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    write(&journal, &one(Expected::Exact(1), of_kind("c2", "UPDATE_ORDER", command))).await;
    write(&journal, &one(Expected::Any, of_kind("f1", "UPDATE_ORDER", r#"{"metadata": {"kind": "event"}}"#)))
        .await;
    let last = put(&journal, &one(Expected::Any, of_kind("f2", "delete", ""))).await;
    assert_eq!((seqs(&last), last.placed[0].position > Position::START), (vec![4], true));
}
