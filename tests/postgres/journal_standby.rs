//! A journal that is read on a hot standby. The standby shows what was committed, but not who is still writing on the primary, so nothing
//! there can tell a position that was rolled back from one that is still to come.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::postgres as support;
use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::postgres::{ask, fresh_schema, pool_to, until};
use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgLedger, Pooling};
use hapax::journal::{Append, Expected, Journal, Position};
use hapax::{Aggregate, Error, Event, EventId};
use sqlx::PgPool;

fn settings(schema: &str, refuse: bool) -> PgJournalSettings {
    let mut settings = PgJournalSettings::default();
    schema.clone_into(&mut settings.schema);
    settings.pooling = Pooling::Session;
    settings.refuse = refuse;
    settings
}

fn append(id: &str) -> Append {
    let event = Event::new(EventId::new(id).unwrap()).payload("{}");
    Append::new(Aggregate::new(id).unwrap(), Expected::New, [event])
}

/// Waits until a server has an event; a standby has it a moment after the primary.
async fn until_there(pool: &PgPool, schema: &str, position: u64) {
    until("the event is there", async || {
        ask::<bool>(pool, format!("select exists (select from {schema}.journal where position = {position})"))
            .await
    })
    .await;
}

async fn ids(journal: &PgJournal, after: u64) -> (Vec<String>, bool) {
    let batch = journal.read(&Position::of(after), 100).await.unwrap();
    (batch.events.iter().map(|stored| stored.event.id.to_string()).collect(), batch.at_hole)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t81_a_reader_on_a_hot_standby_passes_no_open_transaction() {
    let (mut primary, schema) = (Cluster::new().await, fresh_schema());
    let journal =
        PgJournal::with_pool(pool_to(&primary.url(), 4).await, settings(&schema, true)).await.unwrap();
    let _ = journal.append(&append("one")).await.unwrap();
    let standby = primary.standby().await;
    let there = pool_to(&standby.url(), 2).await;
    let reader = PgJournal::with_pool(there.clone(), settings(&schema, false)).await.unwrap();
    assert_eq!(ids(&reader, 0).await, (vec!["one".to_owned()], false));
    let error = reader.horizon().await.expect_err("nothing here tells what the primary has acknowledged");
    assert!(matches!(error, Error::Unsupported(_)) && error.to_string().contains("standby"), "{error:?}");

    let mut slow = journal.pool().begin().await.unwrap();
    let two = journal.append_in(&mut slow, &append("two")).await.unwrap();
    let three = journal.append(&append("three")).await.unwrap();
    assert_eq!((two.placed[0].position.number(), three.placed[0].position.number()), (2, 3));
    until_there(&there, &schema, 3).await;
    for _ in 0..3 {
        assert_eq!(ids(&reader, 1).await, (vec![], true), "the primary may still commit position 2");
        reader.wait(&Position::of(1), Duration::from_millis(50)).await.unwrap();
    }
    slow.commit().await.unwrap();
    until_there(&there, &schema, 2).await;
    assert_eq!(ids(&reader, 1).await, (vec!["two".into(), "three".into()], false));

    // A number that was rolled back looks the same from here, and is waited for just as long.
    let mut undone = journal.pool().begin().await.unwrap();
    let four = journal.append_in(&mut undone, &append("four")).await.unwrap();
    undone.rollback().await.unwrap();
    let five = journal.append(&append("five")).await.unwrap();
    let mut lost = journal.pool().begin().await.unwrap();
    let six = journal.append_in(&mut lost, &append("six")).await.unwrap();
    let seven = journal.append(&append("seven")).await.unwrap();
    let drawn = [four, five, six, seven].map(|appended| appended.placed[0].position.number());
    assert_eq!(drawn, [4, 5, 6, 7]);
    until_there(&there, &schema, 7).await;
    assert_eq!(ids(&reader, 3).await, (vec![], true));

    // Promoted, the server knows its own writers: what the old primary never committed is gone for ever.
    primary.kill();
    assert!(ask::<bool>(&there, "select pg_promote()").await);
    assert_eq!(ids(&reader, 3).await, (vec!["five".into(), "seven".into()], false));
    let eight = reader.append(&append("eight")).await.unwrap();
    assert!(reader.horizon().await.unwrap().1 >= eight.placed[0].position, "promoted, it can tell");
    assert!(eight.placed[0].position.number() > 7);
    assert_eq!(ids(&reader, 7).await, (vec!["eight".into()], false));
}

/// Whoever would write is refused when it is opened, by a sentence that says why; also where there is nothing to open yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t81_a_standby_is_refused_with_a_sentence() {
    let (primary, schema) = (Cluster::new().await, fresh_schema());
    let here = pool_to(&primary.url(), 4).await;
    PgJournal::with_pool(here.clone(), settings(&schema, true)).await.unwrap();
    PgLedger::with_pool(here, support::settings(&schema)).await.unwrap();
    let standby = primary.standby().await;
    let there = pool_to(&standby.url(), 4).await;
    for schema in [schema, fresh_schema()] {
        let journal = PgJournal::with_pool(there.clone(), settings(&schema, true)).await.map(drop);
        let ledger = PgLedger::with_pool(there.clone(), support::settings(&schema)).await.map(drop);
        for refused in [journal, ledger] {
            let error = refused.expect_err("a standby takes no writes");
            assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error:?}");
            assert!(error.to_string().contains("a standby"), "{error}");
        }
    }
}
