//! Handlers of batches that take decoded payloads: a payload that does not decode fails alone.
#![cfg(all(feature = "testing", feature = "postgres", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::{Arc, OnceLock};

use hapax::backend::memory::MemoryLedger;
use hapax::backend::postgres::PgTx;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, Record, TopicSettings};
use hapax::consumer::{BatchHandled, Failed, Handled, Json, LeasedBatchHandler, LeasedEvent};
use hapax::guard::Run;
use hapax::ledger::{Entry, Filter, Identity, Ledger, State, Token};
use hapax::{Consumer, Event, Scope, Topic};
use sqlx::AssertSqlSafe;

use crate::support::postgres as support;
use crate::support::wait::until_so;

#[derive(Debug, serde::Deserialize)]
struct Paid {
    amount: i64,
}

/// The payload of an event; without an amount, it does not decode.
fn payload(id: &str, amount: Option<i64>) -> String {
    match amount {
        Some(amount) => serde_json::json!({"event_id": id, "amount": amount}).to_string(),
        None => serde_json::json!({"event_id": id, "amount": "much"}).to_string(),
    }
}

/// Twenty events; two of them do not decode.
async fn bus() -> Arc<dyn Bus> {
    let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("orders").unwrap());
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let record = |n: i64| {
        let payload = payload(&format!("e-{n}"), (n != 7 && n != 12).then_some(n));
        Record { payload: Some(payload.into()), ..Record::default() }
    };
    let records: Vec<_> = (0..20).map(record).collect();
    for answer in bus.publish(&topic, &records).await.unwrap() {
        answer.unwrap();
    }
    bus
}

async fn consumer<L: Ledger>(ledger: L) -> Consumer<L> {
    let consumer = Consumer::builder(bus().await, ledger).scope("billing").topic("orders").build().unwrap();
    let handle = consumer.handle();
    tokio::spawn(async move {
        until_so("all is through", || handle.progress().passed.values().sum::<u64>() == 20).await;
        handle.stop();
    });
    consumer
}

/// The two are dead after one attempt, for what is wrong with their payloads.
async fn assert_two_died(ledger: &impl Ledger) {
    let filter = Filter { states: vec![State::Dead], ..Filter::default() };
    let mut dead: Vec<Entry> = ledger.list(&filter, None, 99).await.unwrap().entries;
    dead.sort_by_key(|entry| entry.identity.id.to_string());
    let ids: Vec<String> = dead.iter().map(|entry| entry.identity.id.to_string()).collect();
    assert_eq!(ids, ["e-12", "e-7"]);
    for entry in dead {
        let reason = entry.reason.clone().unwrap();
        assert_eq!(entry.attempts, 1, "{reason}");
        assert!(reason.contains("does not decode") && reason.contains("expected i64"), "{reason}");
    }
}

/// The table of the one test that writes to PostgreSQL.
static TABLE: OnceLock<String> = OnceLock::new();

async fn insert_all(tx: &mut PgTx, events: &[(&Event, Json<Paid>)]) -> Handled {
    let (ids, amounts): (Vec<_>, Vec<_>) =
        events.iter().map(|(event, Json(paid))| (event.id.to_string(), paid.amount)).unzip();
    let insert =
        format!("insert into {} select * from unnest($1::text[], $2::bigint[])", TABLE.get().unwrap());
    sqlx::query(AssertSqlSafe(insert)).bind(ids).bind(amounts).execute(&mut **tx).await?;
    Ok(())
}

/// T550, in one transaction: the neighbours of what does not decode run.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t550_postgres_a_payload_that_does_not_decode_fails_without_its_batch() {
    let ledger = support::ledger(8).await;
    let table = support::fresh_schema();
    support::run(ledger.pool(), format!("create table {table} (id text, amount bigint)")).await;
    TABLE.set(table.clone()).unwrap();
    let counts = consumer(ledger.clone()).await.transactional_batch(insert_all).await.unwrap();
    assert_eq!((counts["done"], counts["dead"]), (18, 2), "{counts:?}");
    let rows: i64 = support::ask(ledger.pool(), format!("select count(distinct id) from {table}")).await;
    let sum: i64 = support::ask(ledger.pool(), format!("select sum(amount)::bigint from {table}")).await;
    assert_eq!((rows, sum), (18, (0..20).sum::<i64>() - 7 - 12));
    assert_two_died(&ledger).await;
}

async fn receipts(batch: &[(&LeasedEvent, Json<Paid>)]) -> BatchHandled {
    Ok(batch
        .iter()
        .map(|(item, Json(paid))| {
            let its_own = item.event.id.as_str() == format!("e-{}", paid.amount);
            if its_own { Ok(()) } else { Err(Failed::fatal("another event's payload")) }
        })
        .collect())
}

/// T550, under leases, on the ledger in memory.
#[tokio::test]
async fn t550_a_payload_that_does_not_decode_fails_without_its_leased_batch() {
    let ledger = Arc::new(MemoryLedger::default());
    let counts = consumer(Arc::clone(&ledger)).await.leased_batch(receipts).await.unwrap();
    assert_eq!((counts["done"], counts["dead"]), (18, 2), "{counts:?}");
    assert_two_died(&ledger).await;
}

/// A batch whose events carry these amounts, called "e-0", "e-1" and so on.
fn batch(amounts: &[Option<i64>]) -> Vec<LeasedEvent> {
    let item = |(n, amount): (usize, &Option<i64>)| {
        let id = format!("e-{n}");
        let event = Event::of(id.as_str()).unwrap().payload(payload(&id, *amount));
        let identity = Identity::new(Scope::new("receipts").unwrap(), event.id.clone());
        LeasedEvent::new(event, Run::for_test(identity, Token(1)))
    };
    amounts.iter().enumerate().map(item).collect()
}

/// Who failed, and why.
fn told(outcomes: &[Handled]) -> Vec<&'static str> {
    let one = |outcome: &Handled| match outcome {
        Ok(()) => "done",
        Err(failed) if failed.to_string().contains("does not decode") => "does not decode",
        Err(failed) if failed.is_fatal() => "fatal",
        Err(_) => "failed",
    };
    outcomes.iter().map(one).collect()
}

async fn away(_: &[(&LeasedEvent, Json<Paid>)]) -> BatchHandled {
    Err(Failed::retryable("the sink is away"))
}

async fn few(_: &[(&LeasedEvent, Json<Paid>)]) -> BatchHandled {
    Ok(vec![])
}

async fn many(batch: &[(&LeasedEvent, Json<Paid>)]) -> BatchHandled {
    Ok(batch.iter().chain(batch).map(|_| Ok(())).collect())
}

async fn handle<A: 'static>(handler: &impl LeasedBatchHandler<A>, amounts: &[Option<i64>]) -> BatchHandled {
    handler.handle(&batch(amounts)).await
}

/// T550: each outcome is that of its event, wherever events do not decode; and an error for all
/// leaves what does not decode its own reason.
#[tokio::test]
async fn t550_outcomes_of_a_decoded_batch_are_in_the_order_of_its_events() {
    let odd = [None, Some(1), Some(9), None, Some(4), None];
    let outcomes = handle(&receipts, &odd).await.unwrap();
    let wanted = ["does not decode", "done", "fatal", "does not decode", "done", "does not decode"];
    assert_eq!(told(&outcomes), wanted);
    assert_eq!(told(&handle(&receipts, &[None, None]).await.unwrap()), ["does not decode"; 2]);
    assert_eq!(told(&handle(&receipts, &[Some(0), Some(1)]).await.unwrap()), ["done"; 2]);

    let outcomes = handle(&away, &[Some(0), None, Some(2)]).await.unwrap();
    assert_eq!(told(&outcomes), ["failed", "does not decode", "failed"]);
    assert!(outcomes[2].as_ref().unwrap_err().to_string().contains("the sink is away"));
    assert!(handle(&away, &[Some(0)]).await.is_err());

    // Too few and too many outcomes are seen by their number, and cost nobody an outcome.
    assert_eq!(handle(&few, &odd).await.unwrap().len(), 3);
    assert_eq!(handle(&many, &odd).await.unwrap().len(), 9);
}
