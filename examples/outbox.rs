//! The outbox: a row and its event in one transaction, relayed to a bus, applied once by a consumer.
//!
//! `cargo run --features sqlite --example outbox` needs no server. Five of 50 requests are rolled
//! back, and five come twice; the last line says how many events were written, published, applied.

use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteJournal, SqliteLedger, SqliteTransaction};
use hapax::bus::{Bus, EmbeddedBus, TopicSettings};
use hapax::consumer::{Consumer, Handled};
use hapax::journal::{Append, Expected, JournalSettings};
use hapax::{Event, Relay, Topic, ledger};
use rusqlite::{Connection, TransactionBehavior};

/// Stores which events were applied, in the transaction of their claim.
async fn apply(tx: &mut SqliteTransaction, event: &Event) -> Handled {
    tx.execute("INSERT INTO applied VALUES (?1)", [event.id.as_str()])?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let dir = tempfile::tempdir()?;
    let (shop, effects) = (dir.path().join("shop.db"), dir.path().join("effects.db"));
    let journal = Arc::new(SqliteJournal::open(&shop, JournalSettings::default())?);
    let mut connection = Connection::open(&shop)?;
    connection.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)", [])?;
    for number in (1..=50).chain(1..=5) {
        let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
        tx.execute("INSERT OR IGNORE INTO orders VALUES (?1)", [number])?;
        let placed = Event::of(format!("order-{number}-placed"))?;
        let _ = journal.append_in(&tx, &Append::to(format!("order-{number}"), Expected::New, [placed])?)?;
        if number % 10 == 0 { tx.rollback()? } else { tx.commit()? } // row and event, or neither
    }
    let written: u32 = connection.query_row("SELECT count(*) FROM orders", [], |row| row.get(0))?;

    let bus = Arc::new(EmbeddedBus::open(dir.path().join("bus.db"))?);
    bus.create_topic(&Topic::new("orders")?, TopicSettings::new(2)).await?;
    let relay = Relay::builder(journal, bus.clone()).name("outbox").topic("orders").build()?;
    let relay_handle = relay.handle();
    let relaying = tokio::spawn(relay.run());

    let ledger = SqliteLedger::open(&effects, ledger::Settings::default())?;
    let effects = Connection::open(&effects)?;
    effects.execute("CREATE TABLE applied (id TEXT)", [])?;
    let consumer = Consumer::builder(bus, ledger).scope("shipping").topic("orders").build()?;
    let consumer_handle = consumer.handle();
    let consuming = tokio::spawn(consumer.transactional(apply));
    while consumer_handle.progress().passed.values().sum::<u64>() < u64::from(written) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    relay_handle.stop();
    consumer_handle.stop();
    let published = relaying.await??.published;
    consuming.await??;
    let applied: u32 = effects.query_row("SELECT count(*) FROM applied", [], |row| row.get(0))?;
    println!("{written} written, {published} published, {applied} applied");
    Ok(())
}
