//! A handler for whole batches: many events, one statement, one transaction, each event once.
//!
//! `cargo run --features sqlite --example batch` needs no server.
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteLedger, SqliteTransaction};
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus as _, Record, TopicSettings};
use hapax::consumer::{Handled, Json};
use hapax::ledger::Settings;
use hapax::{Consumer, Event, Topic};

#[derive(serde::Deserialize)]
struct Paid {
    cents: i64,
}

/// Adds the events and their amounts to a total. An error would undo the whole batch; hapax then
/// splits it, so that a bad event keeps nobody else from running. An event whose payload does not
/// decode goes to the dead letters, and the handler gets the others.
async fn add_up(tx: &mut SqliteTransaction, events: &[(&Event, Json<Paid>)]) -> Handled {
    let cents: i64 = events.iter().map(|(_, Json(paid))| paid.cents).sum();
    tx.execute("UPDATE total SET events = events + ?1, cents = cents + ?2", (events.len() as i64, cents))?;
    println!("a batch of {}", events.len());
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let dir = tempfile::tempdir()?;
    let ledger = SqliteLedger::open(dir.path().join("app.db"), Settings::default())?;
    let app = rusqlite::Connection::open(dir.path().join("app.db"))?;
    app.execute_batch("CREATE TABLE total (events INTEGER, cents INTEGER); INSERT INTO total VALUES (0, 0)")?;

    // 1,000 events, each of 5 cents and delivered twice.
    let (bus, topic) = (Arc::new(MemoryBus::default()), Topic::new("orders")?);
    bus.create_topic(&topic, TopicSettings::new(4)).await?;
    let record = |n: u32| Record {
        key: Some(n.to_string().into()),
        payload: Some(format!(r#"{{"event_id":"order-{n}-paid","cents":5}}"#).into()),
        ..Record::default()
    };
    let records: Vec<Record> = (0..1000).chain(0..1000).map(record).collect();
    for answer in bus.publish(&topic, &records).await? {
        answer?;
    }

    let consumer = Consumer::builder(bus, ledger).scope("totals").topic("orders").build()?;
    let handle = consumer.handle();
    let consuming = tokio::spawn(consumer.transactional_batch(add_up));
    while handle.progress().passed.values().sum::<u64>() < 2000 {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    handle.stop();
    consuming.await??;
    let (events, cents): (i64, i64) =
        app.query_row("SELECT events, cents FROM total", [], |row| Ok((row.get(0)?, row.get(1)?)))?;
    println!("2000 deliveries, {events} events of {cents} cents counted");
    if (events, cents) == (1000, 5000) {
        Ok(())
    } else {
        Err("1000 events of 5000 cents were expected".into())
    }
}
