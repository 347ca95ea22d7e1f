//! A full disk under PostgreSQL. Run by `scripts/full-disk`, a part of `scripts/test`, which needs root to mount a small one.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/mod.rs"]
mod support;

use hapax::backend::postgres::{PgJournal, PgJournalSettings, PgLedger, Pooling};
use hapax::journal::{Append, Expected, Journal, Placing, Position};
use hapax::ledger::{Claim, Claims as _, Metadata};
use hapax::testing::kit;
use hapax::{Aggregate, Error, Event, EventId};
use support::postgres::{ask, pool_to, run, settings};

fn batch(n: usize) -> Vec<Claim> {
    let metadata =
        Metadata::new(format!("{{\"x\": \"{}\"}}", uuid::Uuid::new_v4().to_string().repeat(50))).unwrap();
    let claim =
        |m| Claim { metadata: Some(metadata.clone()), ..kit::claim(&format!("event-{n}-{m}"), kit::lease()) };
    (0..200).map(claim).collect()
}

/// One after the other: both fill the same disk.
#[tokio::test]
async fn a_full_disk_is_a_sentence_and_changes_nothing() {
    ledger().await;
    journal().await;
}

async fn ledger() {
    let url = std::env::var("HAPAX_TEST_FULL_DISK_URL").expect("run scripts/full-disk");
    let pool = pool_to(&url, 2).await;
    let ledger = PgLedger::with_pool(pool.clone(), settings("hapax")).await.unwrap();
    run(&pool, "create table ballast as select md5(n::text) as x from generate_series(1, 150000) n".into())
        .await;
    let mut batches = 0;
    let (error, refused) = loop {
        let claims = batch(batches);
        match ledger.claim(&claims).await {
            Ok(outcomes) => assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().is_claimed())),
            Err(error) => break (error, claims),
        }
        batches += 1;
        assert!(batches < 1000, "the disk of the test is too large");
    };
    println!("after {} claims: {}", batches * 200, error.chain());
    assert!(
        matches!(error, Error::Refused { .. }) && error.to_string().contains("disk is full"),
        "{error:?}"
    );
    let rows: i64 = ask(&pool, "select count(*) from hapax.entry").await;
    assert_eq!(rows, batches as i64 * 200, "a batch that did not fit left nothing");
    // Room again: the same claims, as if nothing had happened.
    run(&pool, "drop table ballast".into()).await;
    let outcomes = ledger.claim(&refused).await.expect("there is room");
    assert!(outcomes.iter().all(|outcome| outcome.as_ref().unwrap().is_claimed()));
}

async fn journal() {
    let url = std::env::var("HAPAX_TEST_FULL_DISK_URL").expect("run scripts/full-disk");
    let pool = pool_to(&url, 2).await;
    run(&pool, "drop schema hapax cascade".into()).await;
    let mut settings = PgJournalSettings::default();
    settings.pooling = Pooling::Session;
    let journal = PgJournal::with_pool(pool.clone(), settings).await.unwrap();
    run(&pool, "create table ballast as select md5(n::text) as x from generate_series(1, 150000) n".into())
        .await;
    let of = Aggregate::new("order-17").unwrap();
    let append = |n: u64| {
        let event = |m| {
            // Bytes that do not compress.
            let payload: Vec<u8> = (0..256).flat_map(|_| uuid::Uuid::new_v4().into_bytes()).collect();
            Event::new(EventId::new(format!("event-{n}-{m}")).unwrap()).payload(payload)
        };
        Append::new(of.clone(), Expected::Exact(n * 20), (0..20).map(event))
    };
    let mut appends = 0;
    let (error, refused) = loop {
        let append = append(appends);
        match journal.append(&append).await {
            Ok(appended) => assert_eq!(appended.last_seq(), (appends + 1) * 20),
            Err(error) => break (error, append),
        }
        appends += 1;
        assert!(appends < 2000, "the disk of the test is too large");
    };
    println!("after {} events: {}", appends * 20, error.chain());
    assert!(
        matches!(error, Error::Refused { .. }) && error.to_string().contains("disk is full"),
        "{error:?}"
    );
    assert_eq!(journal.head(None, &of).await.unwrap(), appends * 20, "no number was burned");
    run(&pool, "drop table ballast".into()).await;
    let appended = journal.append(&refused).await.expect("there is room");
    assert!(appended.placed.iter().all(|placed| placed.placing == Placing::New));
    let (mut after, mut count) = (Position::START, 0);
    loop {
        let batch = journal.read(&after, 100).await.unwrap();
        assert!(!batch.at_hole, "what did not fit is not waited for");
        if batch.events.is_empty() {
            break;
        }
        after = batch.next;
        count += batch.events.len() as u64;
    }
    assert_eq!(count, (appends + 1) * 20);
}
