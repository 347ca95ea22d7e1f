//! The README's first program without hapax: Kafka to PostgreSQL with rdkafka and sqlx. It exists to
//! be compared (docs/decisions/0021), and because it must compile to be compared.
//!
//! It has the README program's main promise, and only that: an event has its effect once through
//! crashes and rebalances. Compare what it does not have before you copy it.
use std::error::Error;

use rdkafka::config::ClientConfig;
use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use rdkafka::message::{Headers as _, Message as _};
use sqlx::{PgPool, PgTransaction};

/// Claims the event in the transaction; says whether it is the first delivery.
async fn claim(tx: &mut PgTransaction<'_>, id: &str) -> Result<bool, sqlx::Error> {
    let claim = "insert into processed (scope, id) values ('billing', $1) on conflict do nothing";
    Ok(sqlx::query(claim).bind(id).execute(&mut **tx).await?.rows_affected() == 1)
}

async fn paid(tx: &mut PgTransaction<'_>, id: &str) -> Result<(), sqlx::Error> {
    sqlx::query("insert into paid (id) values ($1)").bind(id).execute(&mut **tx).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let pool = PgPool::connect("postgres://localhost/app").await?;
    let table = "create table if not exists processed (scope text, id text, at timestamptz default now(), \
                 primary key (scope, id))";
    sqlx::query(table).execute(&pool).await?;
    let consumer: StreamConsumer = ClientConfig::new()
        .set("bootstrap.servers", "localhost:9092")
        .set("group.id", "billing")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .create()?;
    consumer.subscribe(&["orders"])?;
    loop {
        let message = consumer.recv().await?;
        let header =
            message.headers().and_then(|headers| headers.iter().find(|header| header.key == "eventId"));
        let id = match header.and_then(|header| header.value) {
            Some(value) => String::from_utf8(value.to_vec())?,
            None => return Err("a record has no id; every restart will end here".into()),
        };
        let mut tx = pool.begin().await?;
        if claim(&mut tx, &id).await? {
            // An error here ends the process; the next one meets the same event, for ever.
            paid(&mut tx, &id).await?;
        }
        tx.commit().await?;
        consumer.commit_message(&message, CommitMode::Async)?;
    }
}
