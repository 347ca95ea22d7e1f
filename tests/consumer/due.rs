//! What a look for due events costs: bodies are read of those that are returned, and a head is looked at once, however many
//! wait behind it.
#![cfg(all(feature = "testing", feature = "sqlite", feature = "redis", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use crate::support::postgres as support;
use crate::support::valkey;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax::backend::sqlite::SqliteLedger;
use hapax::bus::Record;
use hapax::clock::ManualClock;
use hapax::ledger::{Claim, HeldQuery, Ledger, Mode, Settings};
use hapax::testing::{Harness, kit, noon};

/// Waits with its bytes for its next run.
fn failing(claim: Claim) -> Claim {
    let body = Record { headers: [("name", "value")].into_iter().collect(), ..Record::default() };
    Claim { mode: kit::failed(), hold: true, body: Some(body), ..claim }
}

async fn first_due(ledger: &impl Ledger) -> Vec<String> {
    let due = ledger.due(&kit::identity("x").scope, &HeldQuery::all(), 1).await.unwrap();
    due.entries.into_iter().map(|entry| entry.identity.id.to_string()).collect()
}

/// Of three that are due only the bytes of `a` can be read. Whoever asks for one gets `a` sooner or later, and until then an error;
/// whoever asks for three never gets anything.
async fn only_a_can_be_read(ledger: &impl Ledger) {
    let scope = kit::identity("x").scope;
    let mut found = None;
    for _ in 0..1000 {
        match ledger.due(&scope, &HeldQuery::all(), 1).await {
            Ok(due) => found = Some(due.entries[0].identity.id.to_string()),
            Err(error) => assert_eq!(error.code(), "corrupt"),
        }
        if found.is_some() {
            break;
        }
    }
    assert_eq!(found.as_deref(), Some("a"));
    assert_eq!(ledger.due(&scope, &HeldQuery::all(), 3).await.unwrap_err().code(), "corrupt");
}

/// Three wait; the bytes of the two that are not asked for cannot be read any more.
#[tokio::test]
async fn sqlite_reads_the_bodies_of_those_it_returns() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("ledger.db");
    let clock = Arc::new(ManualClock::new(noon()));
    let ledger = SqliteLedger::open_with_clock(&path, Settings::default(), clock.clone()).unwrap();
    for id in ["a", "b", "c"] {
        kit::expect(&ledger, &failing(kit::claim(id, Mode::Done)), "retry_later").await;
        clock.advance(Duration::from_millis(1));
    }
    clock.advance(Duration::from_mins(1));
    let file = rusqlite::Connection::open(&path).unwrap();
    let garbled =
        file.execute("UPDATE hapax_entry_0 SET headers = x'01' WHERE id IN (x'62', x'63')", []).unwrap();
    assert_eq!(garbled, 2);
    only_a_can_be_read(&ledger).await;
}

#[tokio::test]
async fn redis_reads_the_bodies_of_those_it_returns() {
    let harness = valkey::RedisHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    for id in ["a", "b", "c"] {
        kit::expect(&ledger, &failing(kit::claim(id, Mode::Done)), "retry_later").await;
        harness.advance(Duration::from_millis(1)).await;
    }
    harness.advance(Duration::from_mins(1)).await;
    let mut connection = valkey::connection().await;
    let week = format!("hapax:{{{}}}:w:0:1", harness.name);
    for id in ["b", "c"] {
        let stored: Vec<u8> =
            redis::cmd("HGET").arg(&week).arg(id).query_async(&mut connection).await.unwrap();
        let cut = &stored[..stored.len() - 1];
        let _: i64 =
            redis::cmd("HSET").arg(&week).arg(id).arg(cut).query_async(&mut connection).await.unwrap();
    }
    only_a_can_be_read(&ledger).await;
}

/// Eight times as many behind one head take about eight times as long, not 64 times.
#[tokio::test]
async fn postgres_looks_at_a_head_once() {
    let harness = support::PgHarness::new().await;
    let ledger = harness.open(Settings::default()).await;
    let s = ledger.schema();
    kit::expect(&ledger, &failing(kit::latest(1)), "retry_later").await;
    harness.advance(Duration::from_mins(1)).await;
    let mut took = Vec::new();
    for (from, to) in [(2, 1_000), (1_001, 8_000)] {
        let columns: String = support::ask(
            ledger.pool(),
            format!(
                "select string_agg(case column_name when 'seq' then 'n' when 'id' then 'int4send(n)' \
                 else quote_ident(column_name) end, ', ' order by ordinal_position) \
                 from information_schema.columns where table_schema = '{s}' and table_name = 'held'"
            ),
        )
        .await;
        support::run(
            ledger.pool(),
            format!(
                "insert into {s}.held select {columns} from {s}.held, generate_series({from}, {to}) n where seq = 1"
            ),
        )
        .await;
        let all = format!("update {s}.head set retrying = array(select generate_series(1, {to})::bigint)");
        support::run(ledger.pool(), all).await;
        let mut quickest = Duration::MAX;
        for _ in 0..3 {
            let began = Instant::now();
            assert_eq!(first_due(&ledger).await, ["e1"]);
            quickest = quickest.min(began.elapsed());
        }
        println!("{to} behind one head: {quickest:?}");
        took.push(quickest);
    }
    // What a look costs by itself hides in both.
    assert!(took[1] < took[0] * 24 + Duration::from_millis(200), "{took:?}");
}
