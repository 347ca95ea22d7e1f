//! Kafka to PostgreSQL rows, exactly once, against the same consumer without deduplication, and
//! against a check, an effect and a mark per event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax::backend::postgres::{PgLedger, PgTx};
use hapax::bus::Record;
use hapax::bus::kafka::KafkaBus;
use hapax::consumer::{Consumer, Handled, TransactionalBatchHandler};
use hapax::ledger::{OnDead, OrderPolicy};
use hapax::{Event, EventId};
use rdkafka::Message;
use rdkafka::consumer::{CommitMode, Consumer as _};
use sqlx::pool::PoolConnection;
use sqlx::postgres::PgConnection;
use sqlx::{AssertSqlSafe, Connection, PgPool, Postgres};
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;

use crate::harness::{Contestant, Fallible, Goal, Line, Options, Report, interleave};
use crate::kafka::{Filled, bus, by_hand, consume, settings};
use crate::pg::{SCOPE, Schema, execute, number, pool};
use crate::rivals::{check_sql, insert_sql, rival_table};

const PARTITIONS: i32 = 4;
const AGGREGATES: usize = 1000;
/// How many events are delivered before they are repeated, where half are repeats.
const REPLAYED: usize = 2000;
/// Of a hundred deliveries, how many are repeats: few, some, half.
const REPEATS: [usize; 3] = [1, 10, 50];
/// Workers of the per-event flow; in `claims`, about this many do best.
const WORKERS: usize = 32;
/// How often offsets are committed; our default.
const COMMIT_INTERVAL: Duration = Duration::from_millis(500);

/// The content of an event, as its handler reads it.
#[derive(serde::Deserialize)]
struct Paid {
    #[serde(deserialize_with = "uuid_of")]
    event_id: uuid::Uuid,
    aggregate_id: String,
    amount: i64,
    note: String,
}

fn uuid_of<'de, D: serde::Deserializer<'de>>(from: D) -> Result<uuid::Uuid, D::Error> {
    let text: std::borrow::Cow<'de, str> = serde::Deserialize::deserialize(from)?;
    uuid::Uuid::parse_str(&text).map_err(serde::de::Error::custom)
}

/// The target table, and the batches written to it.
#[derive(Clone)]
struct Sink {
    insert: Arc<str>,
    batch: usize,
    concurrency: usize,
}

impl Sink {
    async fn make(schema: &Schema, on: &PgPool, options: &Options) -> Fallible<Self> {
        let s = &schema.name;
        let table = format!(
            "create table {s}.paid (row bigint generated always as identity primary key, \
             at timestamptz not null default now(), id bytea not null, aggregate text not null, amount bigint not null, \
             note text not null)"
        );
        execute(on, table).await?;
        let insert = format!(
            "insert into {s}.paid (id, aggregate, amount, note) \
             select * from unnest($1::bytea[], $2::text[], $3::bigint[], $4::text[])"
        );
        Ok(Sink { insert: insert.into(), batch: options.batch, concurrency: options.concurrency })
    }

    /// One multi-row insert.
    async fn write(&self, connection: &mut PgConnection, rows: &[Paid]) -> sqlx::Result<()> {
        let ids: Vec<&[u8]> = rows.iter().map(|row| &row.event_id.as_bytes()[..]).collect();
        let aggregates: Vec<&str> = rows.iter().map(|row| &*row.aggregate_id).collect();
        let amounts: Vec<i64> = rows.iter().map(|row| row.amount).collect();
        let notes: Vec<&str> = rows.iter().map(|row| &*row.note).collect();
        let query = sqlx::query(AssertSqlSafe(Arc::clone(&self.insert)));
        query.bind(ids).bind(aggregates).bind(amounts).bind(notes).execute(connection).await.map(drop)
    }
}

async fn has_rows(on: &PgPool, schema: &Schema, expected: usize) -> Fallible<()> {
    let rows = number(on, format!("select count(*) from {}.paid", schema.name)).await?;
    if rows == expected as i64 { Ok(()) } else { Err(format!("{rows} rows instead of {expected}").into()) }
}

impl TransactionalBatchHandler<PgTx> for Sink {
    async fn handle(&self, tx: &mut PgTx, events: &[Event]) -> Handled {
        let rows: Result<Vec<Paid>, _> =
            events.iter().map(|event| serde_json::from_slice(&event.payload)).collect();
        Ok(self.write(tx, &rows?).await?)
    }
}

/// Exactly once: claims and rows in one transaction per batch.
async fn ours(bus: &Arc<KafkaBus>, from: &Filled, options: &Options, ordered: bool) -> Fallible<f64> {
    let on = pool(1).await?;
    let schema = Schema::fresh(&on).await?;
    let sink = Sink::make(&schema, &on, options).await?;
    let guard = schema.guard(sink.concurrency as u32 + 2).await?;
    let mut settings = settings(SCOPE, &from.topic)?;
    (settings.batch_max, settings.concurrency) = (sink.batch, sink.concurrency);
    settings.order = ordered.then_some((OrderPolicy::Latest, OnDead::Skip));
    let ledger = guard.ledger().clone();
    let run = |consumer: Consumer<PgLedger>| consumer.transactional_batch(sink);
    let reached = consume(bus.clone(), ledger, settings, run, from.records).await?;
    has_rows(&on, &schema, from.unique).await?;
    drop(guard);
    schema.drop().await?;
    Ok(reached)
}

/// The same rows in the same batches with the same concurrency; offsets are committed afterwards. A
/// repeat becomes a second row.
async fn no_dedup(from: &Filled, options: &Options) -> Fallible<f64> {
    let on = pool(options.concurrency as u32).await?;
    let schema = Schema::fresh(&on).await?;
    let sink = Sink::make(&schema, &on, options).await?;
    let consumer = by_hand(&from.topic)?;
    let (mut tasks, mut rows, mut got) = (JoinSet::new(), Vec::with_capacity(sink.batch), 0);
    let mut began = None;
    let mut committed = Instant::now();
    while got < from.records {
        let message = tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await??;
        began.get_or_insert_with(Instant::now);
        rows.push(serde_json::from_slice::<Paid>(message.payload().unwrap_or_default())?);
        got += 1;
        let due = committed.elapsed() >= COMMIT_INTERVAL || got == from.records;
        if rows.len() == sink.batch || due {
            if tasks.len() >= sink.concurrency {
                ended(tasks.join_next().await)?;
            }
            let (on, sink, rows) = (on.clone(), sink.clone(), std::mem::take(&mut rows));
            tasks.spawn(async move {
                let mut tx = on.begin().await?;
                sink.write(&mut tx, &rows).await?;
                tx.commit().await
            });
        }
        if due {
            while let Some(one) = tasks.join_next().await {
                ended(Some(one))?;
            }
            consumer.commit_consumer_state(CommitMode::Async)?;
            committed = Instant::now();
        }
    }
    let reached = rate_since(got, began)?;
    has_rows(&on, &schema, from.records).await?;
    schema.drop().await?;
    Ok(reached)
}

fn ended(one: Option<Result<sqlx::Result<()>, tokio::task::JoinError>>) -> Fallible<()> {
    one.map_or(Ok(()), |one| Ok(one??))
}

fn rate_since(count: usize, began: Option<Instant>) -> Fallible<f64> {
    Ok(count as f64 / began.ok_or("nothing was delivered")?.elapsed().as_secs_f64())
}

/// The per-event flow: check whether an event is processed, then write its row and its mark in one
/// transaction.
#[derive(Clone)]
struct Plain {
    sink: Sink,
    check: Arc<str>,
    mark: Arc<str>,
}

impl Plain {
    async fn run(&self, connection: &mut PgConnection, row: &Paid, keep: bool) -> sqlx::Result<()> {
        let id = row.event_id.to_string();
        let check = sqlx::query_scalar(AssertSqlSafe(Arc::clone(&self.check)));
        if check.bind(&id).fetch_one(&mut *connection).await? {
            return Ok(());
        }
        let mut tx = connection.begin().await?;
        self.sink.write(&mut tx, std::slice::from_ref(row)).await?;
        let mark = sqlx::query(AssertSqlSafe(Arc::clone(&self.mark)));
        mark.bind(&id).bind(None::<&str>).execute(&mut *tx).await?;
        if keep { tx.commit().await } else { tx.rollback().await }
    }

    /// A connection on which all statements are prepared.
    async fn warm(&self, on: &PgPool) -> sqlx::Result<PoolConnection<Postgres>> {
        let mut connection = on.acquire().await?;
        let row = Paid {
            event_id: uuid::Uuid::new_v4(),
            aggregate_id: String::new(),
            amount: 0,
            note: String::new(),
        };
        self.run(&mut connection, &row, false).await?;
        Ok(connection)
    }
}

/// The per-event flow with many workers at once. The clock starts when all of them are prepared.
async fn per_event(from: &Filled, options: &Options, events: usize) -> Fallible<f64> {
    let on = pool(WORKERS as u32).await?;
    let schema = Schema::fresh(&on).await?;
    let sink = Sink::make(&schema, &on, options).await?;
    rival_table(&schema, &on).await?;
    let plain = Plain { sink, check: check_sql(&schema.name), mark: insert_sql(&schema.name) };
    let (send, receive) = mpsc::channel::<Paid>(WORKERS * 2);
    let receive = Arc::new(Mutex::new(receive));
    let mut tasks = JoinSet::new();
    for _ in 0..WORKERS {
        let (plain, receive) = (plain.clone(), Arc::clone(&receive));
        let mut connection = plain.warm(&on).await?;
        tasks.spawn(async move {
            loop {
                let next = receive.lock().await.recv().await;
                let Some(row) = next else { return Ok(()) };
                plain.run(&mut connection, &row, true).await?;
            }
        });
    }
    let consumer = by_hand(&from.topic)?;
    let (mut began, mut committed) = (None, Instant::now());
    for _ in 0..events {
        let message = tokio::time::timeout(Duration::from_secs(60), consumer.recv()).await??;
        began.get_or_insert_with(Instant::now);
        send.send(serde_json::from_slice(message.payload().unwrap_or_default())?).await?;
        if committed.elapsed() >= COMMIT_INTERVAL {
            consumer.commit_consumer_state(CommitMode::Async)?;
            committed = Instant::now();
        }
    }
    drop(send);
    while let Some(one) = tasks.join_next().await {
        ended(Some(one))?;
    }
    let reached = rate_since(events, began)?;
    has_rows(&on, &schema, events).await?;
    schema.drop().await?;
    Ok(reached)
}

fn record(n: usize) -> Record {
    let aggregate = format!("order-{}", n % AGGREGATES);
    let payload = serde_json::json!({
        "event_id": EventId::now_v7().to_string(), "aggregate_id": aggregate, "sequence_number": n / AGGREGATES + 1,
        "event_type": "order.paid", "amount": n * 7 % 10_000, "note": "as agreed by telephone, in two parts",
    });
    Record { key: Some(aggregate.into()), payload: Some(payload.to_string().into()), ..Record::default() }
}

/// A topic with so many deliveries, of which some in a hundred are repeats: after every few thousand
/// events, the first of them come again.
async fn fill(bus: &KafkaBus, events: usize, repeats: usize) -> Fallible<Filled> {
    let unique = events * (100 - repeats) / 100;
    let records: Vec<Record> = (0..unique).map(record).collect();
    let mut filled = Filled::empty(bus, &format!("repeats-{repeats}"), PARTITIONS).await?;
    for part in records.chunks(REPLAYED) {
        filled.publish(bus, part).await?;
        filled.publish(bus, &part[..part.len() * repeats / (100 - repeats)]).await?;
    }
    filled.unique = unique;
    Ok(filled)
}

/// Names of the orders, and whether hapax keeps one.
const ORDERS: [(&str, bool); 2] = [("unordered", false), ("ordered", true)];

/// Runs the bench.
pub async fn run(options: &Options) -> Fallible<Report> {
    let events = options.rows.map_or_else(|| options.events(60_000), |rows| rows as usize);
    let few = (events / 3).max(WORKERS);
    let bus = bus().await?;
    let unique = fill(&bus, events, 0).await?;
    let mut repeated = Vec::new();
    for repeats in REPEATS {
        repeated.push((repeats, fill(&bus, events, repeats).await?));
    }
    let (bus, unique_ref) = (&bus, &unique);
    let mut contestants = vec![
        Contestant::new("hapax, unordered", || ours(bus, unique_ref, options, false)),
        Contestant::new("hapax, ordered by aggregate and seq (latest)", || {
            ours(bus, unique_ref, options, true)
        }),
        Contestant::new("no dedup, same batches", || no_dedup(unique_ref, options)),
        Contestant::new(format!("check, row and mark per event, {WORKERS} workers"), || {
            per_event(unique_ref, options, few)
        }),
    ];
    for (repeats, from) in &repeated {
        for (name, ordered) in ORDERS {
            let name = format!("hapax, {name}, {repeats} % of the deliveries are repeats");
            contestants.push(Contestant::new(name, move || ours(bus, from, options, ordered)));
        }
    }
    let lines = interleave(options.rounds, contestants).await?;
    unique.delete().await?;
    for (_, topic) in repeated {
        topic.delete().await?;
    }
    let over = &|one: usize, other: usize| lines[one].median() / lines[other].median();
    Ok(Report {
        title: "pipeline: Kafka to PostgreSQL rows".into(),
        unit: "deliveries/s",
        goals: vec![
            Goal::at_least("unordered / no dedup", over(0, 2), 0.65),
            Goal::at_least("ordered / no dedup", over(1, 2), 0.6),
            Goal::at_least("unordered / per event", over(0, 3), 12.0),
        ]
        .into_iter()
        .chain(REPEATS.iter().enumerate().flat_map(|(at, repeats)| {
            // Half repeats must pay; few must not cost.
            let bound = if *repeats == 50 { 1.3 } else { 0.95 };
            ORDERS.iter().enumerate().map(move |(order, (name, _))| {
                let what = format!("{repeats} % repeats, {name}, deliveries / unique only");
                Goal::at_least(what, over(4 + 2 * at + order, order), bound)
            })
        }))
        .collect(),
        notes: vec![note(options, events), each(&lines)],
        lines,
    })
}

fn note(options: &Options, events: usize) -> String {
    format!(
        "{events} records in {PARTITIONS} partitions, {AGGREGATES} keys; batches of {}, {} at once",
        options.batch, options.concurrency
    )
}

fn each(lines: &[Line]) -> String {
    format!(
        "{:.1} µs per delivery more than without dedup",
        1e6 / lines[0].median() - 1e6 / lines[2].median()
    )
}
