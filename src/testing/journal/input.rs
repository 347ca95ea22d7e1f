//! Clause 12: bad input is refused with a sentence and changes nothing.

use super::JournalHarness;
use super::kit::{
    aggregate, all, append, event, id, open, other, put, refused, seqs, snapshot, tenant, write,
};
use crate::event::{Event, Headers};
use crate::id::{Owner, RelayName};
use crate::journal::{Append, Expected, Journal, JournalSettings, Position, RelayStore as _};

fn headed(name: &str, header: &str, value: usize) -> Event {
    Event {
        headers: [(header, vec![7_u8; value])].into_iter().collect::<Headers>(),
        ..event(name).payload("")
    }
}

fn small() -> JournalSettings {
    JournalSettings { event_bytes_max: 100, events_max: 5, ..JournalSettings::default() }
}

/// Each with what is wrong and where; the journal is as it was.
pub async fn j12_bad_input_is_refused_with_a_sentence<H: JournalHarness>(harness: &H) {
    let journal = harness.open(small()).await;
    write(&journal, &append("a", Expected::New, &["a1"])).await;
    let before = snapshot(&journal, &["a"]).await;
    let many: Vec<String> = (0..6).map(|n| format!("m{n}")).collect();
    let many: Vec<Event> = many.iter().map(|name| event(name)).collect();
    let of_others = Event { aggregate: Some(aggregate("b")), ..event("bad") };
    let bad: [(&str, Vec<Event>, &str); 11] = [
        ("no events", vec![], "0"),
        ("too many", many, "6"),
        ("too large", vec![event("bad").payload(vec![7; 101])], "101"),
        ("too large with its headers", vec![headed("bad", "name", 97)], "101"),
        ("the second is too large", vec![event("fine"), event("bad").payload(vec![7; 101])], "bad"),
        ("a header without a name", vec![headed("bad", "", 1)], "bad"),
        ("a header with a NUL", vec![headed("bad", "a\0b", 1)], "bad"),
        ("another aggregate", vec![of_others], "bad"),
        ("another tenant", vec![event("bad").tenant(tenant("acme"))], "bad"),
        ("a seq of 0", vec![event("bad").seq(aggregate("a"), 0)], "bad"),
        ("two contents", vec![event("bad"), other("bad")], "bad"),
    ];
    for (what, events, says) in bad {
        let error = refused(&journal, &Append::new(aggregate("a"), Expected::Any, events), "invalid").await;
        let sentence = error.to_string();
        assert!(sentence.contains(says) && sentence.len() > 20, "{what}: {sentence}");
    }
    let huge = event("bad").seq(aggregate("a"), u64::MAX);
    refused(&journal, &Append::new(aggregate("a"), Expected::Any, [huge]), "invalid").await;
    let of_acme = Event { tenant: Some(tenant("other")), ..event("bad") };
    let of_acme = Append::new(aggregate("a"), Expected::Any, [of_acme]).tenant(tenant("acme"));
    refused(&journal, &of_acme, "invalid").await;
    assert_eq!(snapshot(&journal, &["a"]).await, before);
    for name in ["bad", "fine", "m0"] {
        assert_eq!(journal.find(None, &id(name)).await.unwrap(), None);
    }
    assert_eq!(seqs(&put(&journal, &append("a", Expected::Exact(1), &["a2"])).await), [2]);
}

/// Limits are what is still allowed.
pub async fn j12_what_is_just_allowed_is_taken<H: JournalHarness>(harness: &H) {
    let journal = harness.open(small()).await;
    let of_acme = Event { tenant: Some(tenant("acme")), ..event("e5").seq(aggregate("a"), 5) };
    let events = [
        event("e1").payload(vec![7; 100]),
        headed("e2", "name", 96),
        event("e3").payload(""),
        event("e4"),
        of_acme,
    ];
    let appended =
        put(&journal, &Append::new(aggregate("a"), Expected::New, events).tenant(tenant("acme"))).await;
    assert_eq!(seqs(&appended), [1, 2, 3, 4, 5]);
    // The largest by default, opened by default.
    let journal = open(harness).await;
    let largest = JournalSettings::default().event_bytes_max;
    write(&journal, &Append::new(aggregate("b"), Expected::New, [event("large").payload(vec![7; largest])]))
        .await;
    assert_eq!(all(&journal, None, "b").await[0].event.payload.len(), largest);
    let most = JournalSettings::default().events_max;
    let many = (0..most).map(|n| event(&format!("m{n}")));
    let appended = put(&journal, &Append::new(aggregate("c"), Expected::New, many)).await;
    assert_eq!(appended.last_seq(), most as u64);
}

/// Nothing is found in an empty journal, and asking makes nothing.
pub async fn j12_there_is_nothing_in_an_empty_journal<H: JournalHarness>(harness: &H) {
    let journal = open(harness).await;
    assert!(!journal.id().is_empty());
    assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 0);
    assert!(all(&journal, None, "a").await.is_empty());
    assert_eq!(journal.find(None, &id("a1")).await.unwrap(), None);
    let batch = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!((batch.events.len(), batch.at_hole), (0, false));
    assert_eq!(journal.relays().await.unwrap(), []);
    let stat = journal.stat().await.unwrap();
    assert_eq!((stat.events, stat.aggregates, stat.oldest_at, stat.last), (0, 0, None, None));
    assert!(RelayName::new("").is_err() && RelayName::new(" ").is_err() && Owner::new("a\0b").is_err());
}
