//! One order from POST to query, on PostgreSQL, Kafka and ClickHouse. Every layer gets its failure:
//! clients send every write three times under one key, a consumer is killed before it commits its
//! offsets, and the whole topic is published again. Each order is one record, one effect and one row.
//!
//! ```text
//! POST ─▶ KeyedLayer ─▶ record ─▶ journal ─▶ relay ─▶ Kafka ─┬▶ Consumer ─▶ effect
//!         (its key)                         (twice)          │  (its ledger; killed once)
//!                                                            └▶ Feed ─▶ ClickHouse ─▶ Analytics
//!                                                                       (by version)
//! ```
//!
//! `cargo run --features axum,client,clickhouse,kafka,postgres --example three_layers -- \
//!  --postgres URL --kafka HOST:PORT --clickhouse clickhouse://HOST:PORT`. Its last line has the counts.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::routing::{post, put};
use axum::{Json, Router};
use hapax::analytics::{Analytics, Feed, FeedSettings, ListPage};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::backend::postgres::{
    Migrate, PgJournal, PgJournalSettings, PgKeys, PgKeysSettings, PgLedger, PgModules, PgRecords,
    PgRecordsSettings, PgSettings, PgTx, sqlx,
};
use hapax::bus::kafka::{KafkaBus, KafkaSettings};
use hapax::bus::{Bus, TopicSettings};
use hapax::client::{Client, PreparedWrite, Uuid};
use hapax::clock::{Clock as _, SystemClock};
use hapax::consumer::{Handled, Json as Read};
use hapax::journal::{Checkpoint, RelayStore as _};
use hapax::keyed::{KeyedLayer, KeyedTx};
use hapax::problem::Problem;
use hapax::records::{Create, ModuleSlug, Modules as _, Payload, Record, Records as _, Roles, Update};
use hapax::relay::{Relay, RelayHandle};
use hapax::{Consumer, Event, Journal as _, RelayName, Topic};
use serde_json::{Value, json};
use sqlx::AssertSqlSafe;

type Fallible<T> = Result<T, Box<dyn Error + Send + Sync>>;

const ORDERS: u64 = 20;
/// How often a client sends each write.
const SENT: u64 = 3;
/// Nothing here takes longer.
const PATIENCE: Duration = Duration::from_secs(120);

const USAGE: &str = "\
Usage: three_layers --postgres URL --kafka HOST:PORT --clickhouse clickhouse://HOST:PORT

Takes orders over HTTP, each write sent three times; kills a consumer; publishes everything again; and says how many records,
effects and rows there are. It makes a schema, a topic and a database of its own, and removes schema and database at the end.

  --postgres URL     keys, records, journal and ledger
  --kafka HOST:PORT  the bus
  --clickhouse URL   the read model, without a database: it has its own
  --help             this text";

/// The servers, and the name of everything that this run makes there.
#[derive(Debug, Clone, Default)]
struct Servers {
    postgres: String,
    kafka: String,
    clickhouse: String,
    name: String,
    /// Whether this is the consumer that is going to be killed.
    consumes: bool,
}

/// Reads the command line; `None`: somebody asks for help.
fn servers(mut arguments: impl Iterator<Item = String>) -> Result<Option<Servers>, String> {
    let mut of = Servers { name: format!("three_layers_{}", std::process::id()), ..Servers::default() };
    while let Some(argument) = arguments.next() {
        let value = match argument.as_str() {
            "--help" | "-h" => return Ok(None),
            "--postgres" => &mut of.postgres,
            "--kafka" => &mut of.kafka,
            "--clickhouse" => &mut of.clickhouse,
            "--consume" => {
                of.consumes = true;
                &mut of.name
            }
            _ => {
                return Err(format!(
                    "{argument} is not known; there are --postgres, --kafka and --clickhouse"
                ));
            }
        };
        *value = arguments.next().ok_or_else(|| format!("{argument} needs a value"))?;
    }
    for (name, value) in
        [("--postgres", &of.postgres), ("--kafka", &of.kafka), ("--clickhouse", &of.clickhouse)]
    {
        if value.is_empty() {
            return Err(format!("{name} is missing; --help says what it names"));
        }
    }
    Ok(Some(of))
}

#[tokio::main]
async fn main() -> Fallible<ExitCode> {
    match servers(std::env::args().skip(1)) {
        Ok(None) => println!("{USAGE}"),
        Ok(Some(servers)) if servers.consumes => consume_until_killed(&servers).await?,
        Ok(Some(servers)) => {
            let answer = story(&servers).await;
            remove(&servers).await?;
            println!("{}", answer?);
        }
        Err(problem) => {
            eprintln!("three_layers: {problem}");
            return Ok(ExitCode::from(2));
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// What the service works with.
#[derive(Clone)]
struct Shop {
    records: PgRecords,
    module: ModuleSlug,
}

fn body_of(record: &Record) -> Value {
    let payload: Value = serde_json::from_str(record.payload.as_str()).unwrap_or_default();
    json!({
        "id": record.id, "module": record.module.as_str(), "seq": record.seq, "payload": payload,
        "created_at": record.created_at.to_string(), "updated_at": record.updated_at.to_string(),
    })
}

/// Takes an order: the key, the record, its event and the answer are one transaction.
async fn take(
    State(shop): State<Shop>,
    mut tx: KeyedTx,
    Json(body): Json<Value>,
) -> Result<Json<Value>, Problem> {
    let create = Create::new(shop.module, Payload::new(body["payload"].to_string())?);
    let record = shop.records.create_in(&mut tx, &create).await?;
    Ok(Json(body_of(&record)))
}

/// Changes an order that is as its client has seen it.
async fn change(
    State(shop): State<Shop>,
    Path(id): Path<String>,
    mut tx: KeyedTx,
    Json(body): Json<Value>,
) -> Result<Json<Value>, Problem> {
    let id = Uuid::try_parse(&id).map_err(|_| hapax::Error::NotFound("no such order".into()))?;
    let seen = body["expected_seq"].as_u64().unwrap_or(0);
    let update = Update::new(shop.module, id, seen, Payload::new(body["payload"].to_string())?);
    let record = shop.records.update_in(&mut tx, &update).await?;
    Ok(Json(body_of(&record)))
}

/// Layer 1 on a port of this machine; its URL.
async fn serve(keys: PgKeys, shop: Shop) -> Fallible<String> {
    let path = format!("/v1/modules/{}/records", shop.module);
    let app = Router::new()
        .route(&path, post(take))
        .route(&format!("{path}/{{id}}"), put(change))
        .route_layer(KeyedLayer::new(keys).required().anonymous().transactional())
        .with_state(shop);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Ok(url)
}

/// Sends a write as a client does that never sees an answer: the same bytes, under the same key.
async fn send(client: &Client, write: &PreparedWrite) -> Fallible<hapax::client::Record> {
    let first = client.send(write).await?;
    for _ in 1..SENT {
        let again = client.send(write).await?;
        if !again.replayed || again.record != first.record {
            return Err(format!("a retry was answered otherwise: {again:?}").into());
        }
    }
    Ok(first.record)
}

/// What the consumer does with each event: an order that was taken is one effect, in the transaction
/// of its claim.
async fn effect(tx: &mut PgTx, event: &Event, Read(order): Read<Value>) -> Handled {
    if event.kind.as_ref().is_some_and(|kind| kind.as_str() == "record.created") {
        let insert = sqlx::query("insert into effects (id) values ($1)");
        insert.bind(order["id"].as_str()).execute(&mut **tx).await?;
    }
    Ok(())
}

/// Layer 2. Nothing in the table of effects keeps one from being there twice.
async fn consumer(of: &Servers, commits: Duration) -> Fallible<Consumer<PgLedger>> {
    let mut settings = PgSettings::default();
    settings.schema.clone_from(&of.name);
    let url = format!("{}?options=-csearch_path%3D{}", of.postgres, of.name);
    let ledger = PgLedger::connect(&url, settings).await?;
    sqlx::query("create table if not exists effects (id text)").execute(ledger.pool()).await?;
    let bus = Arc::new(KafkaBus::connect(KafkaSettings::new(&of.kafka)).await?);
    let consumer = Consumer::builder(bus, ledger).scope("shop").topic(&of.name).with(move |settings| {
        settings.commit_interval = commits;
        settings.session_timeout = Duration::from_secs(6); // how long the partitions of a killed one wait
    });
    Ok(consumer.build()?)
}

/// A consumer that never commits its offsets: it will be killed, and all it has done is delivered
/// again.
async fn consume_until_killed(of: &Servers) -> Fallible<()> {
    consumer(of, Duration::from_secs(3600)).await?.transactional(effect).await?;
    Ok(())
}

/// Publishes the journal; the handle, once everything is on the topic.
async fn relay(of: &Servers, journal: &PgJournal, bus: &Arc<dyn Bus>, events: u64) -> Fallible<RelayHandle> {
    let relay = Relay::builder(Arc::new(journal.clone()), Arc::clone(bus)).name("shop").topic(&of.name);
    // Pulses say up to when the topic is complete.
    let relay = relay.with(|settings| settings.pulse = Some(Duration::from_millis(500))).build()?;
    let handle = relay.handle();
    tokio::spawn(relay.run());
    let waiting = handle.clone();
    until("everything is published", async || Ok(waiting.progress().published >= events)).await?;
    Ok(handle)
}

async fn until(what: &str, mut is: impl AsyncFnMut() -> Fallible<bool>) -> Fallible<()> {
    let end = Instant::now() + PATIENCE;
    while !is().await? {
        if Instant::now() > end {
            return Err(format!("two minutes were not enough until {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    Ok(())
}

async fn story(of: &Servers) -> Fallible<String> {
    let modules = PgModules::connect(&of.postgres, &of.name, Roles::default(), Migrate::Auto).await?;
    let module = ModuleSlug::new(&of.name)?;
    modules.create_module(&module).await?;
    let mut settings = PgJournalSettings::default();
    settings.schema.clone_from(&of.name);
    let journal = PgJournal::connect(&of.postgres, settings).await?;
    let mut settings = PgRecordsSettings::default();
    settings.accept_bypass = true; // a developer's role may be a superuser
    let records = PgRecords::open(&journal, settings).await?;
    let mut settings = PgKeysSettings::default();
    settings.schema.clone_from(&of.name);
    let keys = PgKeys::with_pool(journal.pool().clone(), settings).await?;
    let bus: Arc<dyn Bus> = Arc::new(KafkaBus::connect(KafkaSettings::new(&of.kafka)).await?);
    let topic = Topic::new(&of.name)?;
    bus.create_topic(&topic, TopicSettings::new(3)).await?;

    // 1. Every write is sent three times, and done once.
    let client = Client::new(&serve(keys, Shop { records: records.clone(), module: module.clone() }).await?)?;
    let orders = client.data(&of.name);
    for number in 0..ORDERS {
        let taken =
            orders.prepare_create(json!({"order": number, "cents": 100 + number, "status": "taken"}))?;
        let taken = send(&client, &taken).await?;
        let confirmed = json!({"order": number, "cents": 100 + number, "status": "confirmed"});
        send(&client, &orders.prepare_update(taken.id, taken.seq, confirmed)?).await?;
    }
    let events = 2 * ORDERS;

    // 2. A consumer does all the work and is killed before it commits its offsets.
    let first = relay(of, &journal, &bus, events).await?;
    let mut victim = std::process::Command::new(std::env::current_exe()?)
        .args([
            "--postgres",
            &of.postgres,
            "--kafka",
            &of.kafka,
            "--clickhouse",
            &of.clickhouse,
            "--consume",
            &of.name,
        ])
        .spawn()?;
    let effects = format!("select count(*) from {}.effects", of.name);
    let effects = async || -> Fallible<u64> {
        let count = sqlx::query_scalar::<_, i64>(AssertSqlSafe(effects.clone()));
        Ok(count.fetch_one(journal.pool()).await.map_or(0, i64::unsigned_abs)) // the table may not be there yet
    };
    let worked = until("every order took effect", async || Ok(effects().await? >= ORDERS)).await;
    victim.kill()?; // kill -9
    victim.wait()?;
    worked?;

    // 3. Everything is published again, as by a relay that has lost its place.
    let model = Arc::new(ClickHouseReadModel::open(&format!("{}/{}", of.clickhouse, of.name))?);
    let feed = Feed::new(Arc::clone(&bus), model.clone(), FeedSettings::new(topic))?;
    let feeding = feed.handle();
    tokio::spawn(feed.run());
    until("the read model has every order", async || Ok(feeding.progress().changes >= events)).await?;
    first.stop();
    let name = RelayName::new("shop")?;
    until("the relay has stopped", async || {
        Ok(journal.rewind(&name, &Checkpoint::start(journal.id()), None).await.is_ok())
    })
    .await?;
    let second = relay(of, &journal, &bus, events).await?;
    let published = SystemClock.now();

    // Another consumer gets all of it: what the first one did, and the copies.
    let consumer = consumer(of, Duration::from_millis(200)).await?;
    let consuming = consumer.handle();
    tokio::spawn(consumer.transactional(effect));
    let passed = |word: &str| consuming.progress().passed.get(word).copied().unwrap_or(0);
    until("every delivery is finished", async || Ok(passed("done") + passed("duplicate") >= 2 * events))
        .await?;
    let duplicates = passed("duplicate");
    consuming.stop();

    // The question: one row for each order, as it is now, and complete up to after the repeats.
    let analytics = Analytics::new(model.clone(), None)?;
    until("the read model is in step", async || {
        let meta = analytics.records(&of.name)?.tally().await?.meta;
        Ok(meta.last_sync_at.is_some_and(|synced| synced > published))
    })
    .await?;
    let page = analytics.records(&of.name)?.list(ListPage::new(None, 1000)?).await?;
    let tally = analytics.records(&of.name)?.sum("/cents")?.tally().await?;
    second.stop();
    feeding.stop();
    let latest =
        page.value.records.iter().filter(|row| row.seq == 2 && row.payload.as_str().contains("confirmed"));
    let (rows, latest) = (tally.value.groups[0].count, latest.count() as u64);
    let stored = records.list(&hapax::records::List::new(module)).await?.records.len() as u64;
    let effects = effects().await?;
    let counts = format!(
        "{} requests, {events} events published twice, {duplicates} duplicates, 1 kill: {stored} records, {effects} effects, \
         {rows} rows ({latest} as they are now) of {ORDERS} orders",
        2 * SENT * ORDERS
    );
    if [stored, effects, rows, latest] != [ORDERS; 4] {
        return Err(format!("these should be equal: {counts}").into());
    }
    Ok(counts)
}

/// Removes what this run has made, except its topic.
async fn remove(of: &Servers) -> Fallible<()> {
    let pool = sqlx::PgPool::connect(&of.postgres).await?;
    let drop =
        format!("drop schema if exists module_{0} cascade; drop schema if exists {0} cascade", of.name);
    sqlx::raw_sql(AssertSqlSafe(drop)).execute(&pool).await?;
    let http = of.clickhouse.replacen("clickhouse://", "http://", 1);
    let drop = format!("DROP DATABASE IF EXISTS {}", of.name);
    reqwest::Client::new().post(http).body(drop).send().await?.error_for_status()?;
    Ok(())
}
