//! The README's first program with apalis: Kafka to PostgreSQL, one row per event.
//!
//! apalis has no Kafka input. `consume` turns records into jobs, and `paid` is the worker.
use apalis::prelude::*;
use apalis_postgres::PostgresStorage;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{CommitMode, Consumer as _, StreamConsumer};
use rdkafka::message::{Headers as _, Message as _};
use serde::{Deserialize, Serialize};
use sqlx::PgPool;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Paid {
    id: String,
}

/// A job is acknowledged in a statement of its own, after this. One whose worker was killed in
/// between runs again, so the effect needs a key of its own.
async fn paid(job: Paid, pool: Data<PgPool>) -> Result<(), BoxDynError> {
    let insert = "insert into paid (id) values ($1) on conflict do nothing";
    sqlx::query(insert).bind(job.id).execute(&*pool).await?;
    Ok(())
}

async fn consume(mut jobs: PostgresStorage<Paid>) -> Result<(), BoxDynError> {
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
        let job = TaskBuilder::new(Paid { id: id.clone() }).idempotency_key(&id).build();
        match jobs.push_task(job).await {
            Ok(()) => {}
            // A record that was delivered before: its job is there.
            Err(error) if format!("{error:?}").contains("idx_jobs_idempotency_key") => {}
            Err(error) => return Err(error.into()),
        }
        consumer.commit_message(&message, CommitMode::Async)?;
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxDynError> {
    let pool = PgPool::connect("postgres://localhost/app").await?;
    PostgresStorage::setup(&pool).await?;
    let jobs = PostgresStorage::new(&pool);
    let worker = WorkerBuilder::new("billing-1").backend(jobs.clone()).data(pool).build(paid);
    tokio::select! {
        ended = worker.run() => ended?,
        ended = consume(jobs) => ended?,
    }
    Ok(())
}
