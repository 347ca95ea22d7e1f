//! A full disk under PostgreSQL. Run by `scripts/full-disk`, a part of `scripts/test`, which needs root to mount a small one.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

#[path = "support/postgres.rs"]
mod support;

use hapax::Error;
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Ledger, Metadata};
use hapax::testing::kit;
use support::{ask, pool_to, run, settings};

fn batch(n: usize) -> Vec<Claim> {
    let metadata =
        Metadata::new(format!("{{\"x\": \"{}\"}}", uuid::Uuid::new_v4().to_string().repeat(50))).unwrap();
    let claim =
        |m| Claim { metadata: Some(metadata.clone()), ..kit::claim(&format!("event-{n}-{m}"), kit::lease()) };
    (0..200).map(claim).collect()
}

#[tokio::test]
async fn a_full_disk_is_a_sentence_and_changes_nothing() {
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
