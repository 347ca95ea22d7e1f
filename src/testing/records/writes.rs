//! Writes, their events, and who wins.

#![allow(missing_docs, reason = "the name of a case says what it shows")]

use std::collections::HashSet;

use super::{RecordsHarness, create, events, payload, tenant, value};
use crate::event::Event;
use crate::id::{Aggregate, Tenant};
use crate::journal::{Append, Expected};
use crate::records::{Create, Delete, Record, Records, Update, Uuid, conflict_seqs};

fn update(record: &Record, of: Option<&Tenant>, expected: u64, json: &str) -> Update {
    Update::new(record.module.clone(), record.id, expected, payload(json)).tenant(of.cloned())
}

fn delete(record: &Record, expected: u64) -> Delete {
    Delete::new(record.module.clone(), record.id, expected)
}

pub async fn r1_a_write_and_its_event_are_one(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let of = tenant(7);
    let first = create(harness, r#"{"n": 1}"#).tenant(Some(of.clone()));
    let created = records.create(&first).await.unwrap();
    assert_eq!((created.id, created.seq, &created.module), (first.id, 1, &first.module));
    let updated = records.update(&update(&created, Some(&of), 1, r#"{"n": 2}"#)).await.unwrap();
    assert_eq!((updated.seq, updated.created_at), (2, created.created_at));
    let gone = records.delete(&delete(&created, 2).tenant(Some(of.clone()))).await.unwrap();
    assert_eq!((gone.seq, gone.payload.as_str()), (3, r#"{"n":2}"#));
    let events = events(harness, Some(&of), created.id).await;
    let seen: Vec<_> = events
        .iter()
        .map(|stored| {
            let payload: serde_json::Value = serde_json::from_slice(&stored.event.payload).unwrap();
            (stored.seq, stored.event.kind.clone().unwrap().to_string(), payload)
        })
        .collect();
    // The times of the record too: a read model needs no other event.
    let name = |after: &Record| {
        serde_json::json!({
            "id": first.id.to_string(), "module": first.module.as_str(), "seq": after.seq,
            "created_at": created.created_at.to_string(), "updated_at": after.updated_at.to_string(),
        })
    };
    let with = |after: &Record, payload: serde_json::Value| {
        let mut all = name(after);
        all["payload"] = payload;
        all
    };
    let wanted = [
        (1, "record.created".to_owned(), with(&created, serde_json::json!({"n": 1}))),
        (2, "record.updated".to_owned(), with(&updated, serde_json::json!({"n": 2}))),
        (3, "record.deleted".to_owned(), name(&gone)),
    ];
    assert_eq!(seen, wanted);
}

pub async fn r1_a_rollback_leaves_neither_record_nor_event(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let first = create(harness, "{}");
    assert_eq!(harness.rolled_back(&records, &first).await.unwrap().seq, 1);
    assert_eq!(records.get(None, &first.module, first.id).await.unwrap(), None);
    assert!(events(harness, None, first.id).await.is_empty());
    assert_eq!(records.create(&first).await.unwrap().seq, 1, "no number was used up");
}

/// An append past the records must not lock a record up, nor let its seq and the journal's differ.
pub async fn r1_a_record_follows_its_aggregate_if_others_append(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let created = records.create(&create(harness, "{}")).await.unwrap();
    let aggregate = Aggregate::new(format!("{}/{}", created.module, created.id)).unwrap();
    let event = Event::of("a-stranger").unwrap();
    let append = Append::new(aggregate, Expected::Exact(1), [event]);
    assert_eq!(harness.journal().await.append(&append).await.unwrap().last_seq(), 2);
    let updated = records.update(&update(&created, None, 1, r#"{"n":2}"#)).await.unwrap();
    assert_eq!(updated.seq, 3, "the seq of its event");
    assert_eq!(events(harness, None, created.id).await.last().unwrap().seq, 3);
    let gone = records.delete(&delete(&created, 3)).await.unwrap();
    assert_eq!(gone.seq, 4);
}

/// The id of an event is random and does not follow from the record. Else whoever may append to the journal
/// could take the id first, and the record could not be made; or, where ids that are used twice are only
/// warned about, it would get the seq of that other event.
pub async fn r1_the_id_of_an_event_cannot_be_foretold(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let first = create(harness, "{}");
    for seq in [1, 3] {
        let created = records.create(&first).await.unwrap();
        assert_eq!(records.delete(&delete(&created, seq)).await.unwrap().seq, seq + 1);
    }
    let appended = events(harness, None, first.id).await;
    let ids: HashSet<String> = appended.iter().map(|stored| stored.event.id.as_str().into()).collect();
    assert_eq!(ids.len(), 4, "{ids:?}");
    for id in ids {
        assert_eq!(Uuid::try_parse(&id).unwrap().get_version_num(), 7, "a v7 id has 62 random bits at least");
    }
}

pub async fn r2_another_seq_is_a_conflict_and_burns_nothing(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let created = records.create(&create(harness, "{}")).await.unwrap();
    for expected in [0, 2, u64::MAX >> 1] {
        let refused = records.update(&update(&created, None, expected, "{}")).await.unwrap_err();
        assert_eq!(conflict_seqs(&refused), Some((expected, 1)), "{refused}");
        let refused = records.delete(&delete(&created, expected)).await.unwrap_err();
        assert_eq!(conflict_seqs(&refused), Some((expected, 1)), "{refused}");
    }
    assert_eq!(records.get(None, &created.module, created.id).await.unwrap(), Some(created.clone()));
    assert_eq!(events(harness, None, created.id).await.len(), 1);
    assert_eq!(records.update(&update(&created, None, 1, "{}")).await.unwrap().seq, 2);
}

pub async fn r2_of_many_writers_with_one_seq_one_wins(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let created = records.create(&create(harness, "{}")).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for n in 0..16 {
        let (records, created) = (harness.open().await, created.clone());
        tasks.spawn(async move {
            let json = format!(r#"{{"n":{n}}}"#);
            loop {
                let done = if n % 4 == 0 {
                    records.delete(&delete(&created, 1)).await
                } else {
                    records.update(&update(&created, None, 1, &json)).await
                };
                match done {
                    Err(error) if error.is_retryable() => tokio::task::yield_now().await,
                    other => return other,
                }
            }
        });
    }
    let ended = tasks.join_all().await;
    let won: Vec<_> = ended.iter().filter_map(|ended| ended.as_ref().ok()).collect();
    assert_eq!(won.len(), 1, "{ended:?}");
    for lost in ended.iter().filter_map(|ended| ended.as_ref().err()) {
        // The others find its seq, or that it was deleted.
        assert!(conflict_seqs(lost) == Some((1, 2)) || lost.code() == "not-found", "{lost}");
    }
    assert_eq!(events(harness, None, created.id).await.len(), 2);
}

pub async fn r3_an_id_that_exists_is_a_conflict(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let first = create(harness, r#"{"n":1}"#);
    let created = records.create(&first).await.unwrap();
    let again = records.create(&create(harness, r#"{"n":2}"#).id(first.id)).await.unwrap_err();
    assert_eq!(conflict_seqs(&again), Some((0, 1)), "{again}");
    assert_eq!(records.get(None, &first.module, first.id).await.unwrap(), Some(created));
    assert_eq!(events(harness, None, first.id).await.len(), 1);
}

/// Also of creators with the same content: all but the one that made the record get a conflict.
pub async fn r3_of_many_creators_of_one_id_one_wins(harness: &impl RecordsHarness) {
    let (different, equal) = (|n| format!(r#"{{"n":{n}}}"#), |_| r#"{"n":0}"#.to_owned());
    for json in [&different as &(dyn Fn(u32) -> String + Sync), &equal, &different, &equal] {
        one_creator_wins(harness, json).await;
    }
}

async fn one_creator_wins(harness: &impl RecordsHarness, json: &(dyn Fn(u32) -> String + Sync)) {
    let (id, records) = (Uuid::now_v7(), harness.open().await);
    for seq in [1, 3] {
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..12 {
            let (records, create) = (harness.open().await, create(harness, &json(n)).id(id));
            tasks.spawn(async move { until_decided(&records, &create).await });
        }
        let ended = tasks.join_all().await;
        let won: Vec<_> = ended.iter().filter_map(|ended| ended.as_ref().ok()).collect();
        assert!(won.len() == 1 && won[0].seq == seq, "{ended:?}");
        for lost in ended.iter().filter_map(|ended| ended.as_ref().err()) {
            assert_eq!(lost.code(), "conflict", "{lost}");
        }
        let stored = records.get(None, &won[0].module, id).await.unwrap().expect("the winner's");
        assert_eq!(value(&stored.payload), value(&won[0].payload));
        assert_eq!(records.delete(&delete(&stored, seq)).await.unwrap().seq, seq + 1);
    }
    assert_eq!(events(harness, None, id).await.len(), 4);
}

/// Creates, again while others are in the way.
async fn until_decided(records: &impl Records, create: &Create) -> crate::Result<Record> {
    loop {
        match records.create(create).await {
            Err(error) if error.is_retryable() => tokio::task::yield_now().await,
            other => return other,
        }
    }
}

pub async fn r4_a_deleted_record_is_gone_and_its_seq_goes_on(harness: &impl RecordsHarness) {
    let records = harness.open().await;
    let first = create(harness, r#"{"n":1}"#);
    let created = records.create(&first).await.unwrap();
    assert_eq!(records.delete(&delete(&created, 1)).await.unwrap().seq, 2);
    assert_eq!(records.get(None, &first.module, first.id).await.unwrap(), None);
    for expected in [1, 2] {
        let missing = records.update(&update(&created, None, expected, "{}")).await.unwrap_err();
        assert_eq!(missing.code(), "not-found", "{missing}");
        let missing = records.delete(&delete(&created, expected)).await.unwrap_err();
        assert_eq!(missing.code(), "not-found", "{missing}");
    }
    let again = records.create(&first).await.unwrap();
    assert_eq!(again.seq, 3, "a read model that saw seq 2 must take this one");
    assert_eq!(records.get(None, &first.module, first.id).await.unwrap().unwrap().seq, 3);
    let seqs: Vec<u64> = events(harness, None, first.id).await.iter().map(|stored| stored.seq).collect();
    assert_eq!(seqs, [1, 2, 3]);
}
