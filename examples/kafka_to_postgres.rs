//! Kafka to PostgreSQL, exactly once. Ctrl-C stops it.
//!
//! `cargo run --features postgres,kafka --example kafka_to_postgres -- HOST:PORT POSTGRES-URL TOPIC`
use hapax::backend::postgres::{PgLedger, PgSettings, PgTx, sqlx};
use hapax::consumer::{Handled, Json};
use hapax::{Consumer, Event};

/// The payload, as the producer writes it.
#[derive(serde::Deserialize)]
struct Order {
    aggregate: String,
    kind: String,
}

async fn record(tx: &mut PgTx, event: &Event, Json(order): Json<Order>) -> Handled {
    let insert = "insert into orders (event_id, order_id, kind) values ($1, $2, $3)";
    let insert = sqlx::query(insert).bind(event.id.as_str()).bind(order.aggregate).bind(order.kind);
    insert.execute(&mut **tx).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kafka, postgres, topic] = &arguments[..] else { return Err("give HOST:PORT, URL and TOPIC".into()) };
    let ledger = PgLedger::connect(postgres, PgSettings::default()).await?;
    let table = "create table if not exists orders (event_id text, order_id text, kind text)";
    sqlx::query(table).execute(ledger.pool()).await?;

    let bus = hapax::open::bus(&format!("kafka://{kafka}")).await?;
    let consumer = Consumer::builder(bus, ledger).scope("orders").topic(topic).build()?;
    let handle = consumer.handle();
    tokio::spawn(async move { tokio::signal::ctrl_c().await.map(|()| handle.stop()) });
    println!("{:?}", consumer.transactional(record).await?);
    Ok(())
}
