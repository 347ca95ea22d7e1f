//! A world of real parts: a Kafka topic, a PostgreSQL ledger, an effect record that is independent of it, and consumer
//! processes that can be killed, stopped and continued.
#![allow(dead_code, unused_macros, unused_imports)] // each test binary uses its part

use std::collections::BTreeMap;
use std::future::Future;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::postgres::{PgLedger, PgTx};
use hapax::bus::kafka::{KafkaBus, KafkaSettings};
use hapax::bus::{Bus, Partition, Record, TopicSettings};
use hapax::consumer::{Consumer, ConsumerBuilder, Failed, Handled, LeasedHandler, TransactionalHandler};
use hapax::guard::Run;
use hapax::ledger::{Entry, Filter, Ledger as _, OnDead, Operations as _, OrderPolicy, State};
use hapax::sink::{Effect, HttpSink, Sink as _};
use hapax::{Event, Topic};
use sqlx::{AssertSqlSafe, PgPool};
use tokio::process::Child;

use super::postgres as support;

/// The broker of the tests.
pub fn brokers() -> String {
    std::env::var("HAPAX_TEST_KAFKA")
        .expect("HAPAX_TEST_KAFKA: run scripts/services up, then eval \"$(scripts/services env)\"")
}

pub async fn bus() -> Arc<KafkaBus> {
    Arc::new(answered(|| KafkaBus::connect(KafkaSettings::new(brokers()))).await)
}

pub fn event(id: &str) -> Record {
    record(None, serde_json::json!({ "event_id": id }))
}

pub fn numbered(id: &str, aggregate: &str, seq: u64) -> Record {
    record(Some(aggregate), serde_json::json!({"event_id": id, "aggregate_id": aggregate, "seq": seq}))
}

#[allow(clippy::needless_pass_by_value)] // a json! at every call
pub fn record(key: Option<&str>, json: serde_json::Value) -> Record {
    Record {
        key: key.map(|key| key.to_owned().into()),
        payload: Some(json.to_string().into()),
        ..Record::default()
    }
}

/// As [`wait::until`](crate::support::wait::until), for tests that run as tasks: this future can be sent between threads.
pub async fn until<F: Future<Output = bool>>(what: &str, mut is: impl FnMut() -> F) {
    let end = std::time::Instant::now() + Duration::from_secs(120);
    while !is().await {
        assert!(std::time::Instant::now() < end, "never came: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Asks until it is answered: on a busy machine a broker may lose its session, and its partitions their leader, for a moment.
async fn answered<T, F: Future<Output = hapax::Result<T>>>(mut ask: impl FnMut() -> F) -> T {
    let end = std::time::Instant::now() + Duration::from_secs(120);
    loop {
        match ask().await {
            Ok(answer) => return answer,
            Err(error) => assert!(error.is_retryable() && std::time::Instant::now() < end, "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// What a test's processes share.
pub struct World {
    pub test: &'static str,
    pub topic: Topic,
    pub schema: String,
    pub url: String,
    pub pool: PgPool,
    pub bus: Arc<KafkaBus>,
    pub ledger: PgLedger,
}

impl World {
    /// A fresh topic and schema, on the server of the tests or on another.
    pub async fn new(test: &'static str, partitions: i32) -> Self {
        World::on(test, partitions, support::url()).await
    }

    pub async fn on(test: &'static str, partitions: i32, url: String) -> Self {
        let pool = support::pool_to(&url, 6).await;
        let schema = support::fresh_schema();
        let ledger =
            PgLedger::with_pool(pool.clone(), support::settings(&schema)).await.expect("a fresh ledger");
        let topic = Topic::new(format!("t-{}", uuid::Uuid::new_v4().simple())).unwrap();
        let bus = bus().await;
        answered(|| bus.create_topic(&topic, TopicSettings::new(partitions))).await;
        let world = World { test, topic, schema, url, pool, bus, ledger };
        // Unconstrained on purpose: whatever happens twice is there twice.
        let sql = format!(
            "create table {} (id text, worker int, number bigint generated always as identity)",
            world.effects()
        );
        support::run(&world.pool, sql).await;
        world
    }

    pub fn effects(&self) -> String {
        format!("{}.effect", self.schema)
    }

    pub async fn publish(&self, records: &[Record]) {
        for answer in self.bus.publish(&self.topic, records).await.expect("published") {
            answer.expect("acknowledged");
        }
    }

    /// A consumer process of this test binary; `knobs` are environment variables the worker reads.
    pub fn spawn(&self, knobs: &[(&str, &str)]) -> Child {
        let mut command = support::child(self.test, "worker", &self.schema);
        command
            .env("WORKER_TOPIC", self.topic.as_str())
            .env("WORKER_URL", &self.url)
            .stderr(Stdio::inherit());
        for (name, value) in knobs {
            command.env(name, value);
        }
        command.spawn().expect("a worker process")
    }

    /// How often each id took effect, in the independent record.
    pub async fn effect_counts(&self) -> BTreeMap<String, i64> {
        let sql = format!("select id, count(*) from {} group by id", self.effects());
        let rows: Vec<(String, i64)> =
            sqlx::query_as(AssertSqlSafe(sql)).fetch_all(&self.pool).await.expect("effects");
        rows.into_iter().collect()
    }

    /// How many processes had effects.
    pub async fn workers(&self) -> i64 {
        let sql = format!("select count(distinct worker) from {}", self.effects());
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool).await.expect("effects")
    }

    /// The ids in the order in which they took effect.
    pub async fn effect_order(&self) -> Vec<String> {
        let sql = format!("select id from {} order by number", self.effects());
        sqlx::query_scalar(AssertSqlSafe(sql)).fetch_all(&self.pool).await.expect("effects")
    }

    pub async fn entries(&self, state: State) -> Vec<Entry> {
        let filter = Filter { states: vec![state], ..Filter::default() };
        self.ledger.list(&filter, None, 10_000).await.expect("the ledger").entries
    }

    async fn partitions(&self) -> i32 {
        answered(|| self.bus.topic(&self.topic)).await.expect("the topic of the test").partitions
    }

    /// What the group has committed, over all partitions.
    pub async fn committed(&self) -> i64 {
        let mut sum = 0;
        for number in 0..self.partitions().await {
            let partition = Partition { topic: self.topic.clone(), number };
            let committed = answered(|| self.bus.committed("worker", &partition)).await;
            sum += committed.unwrap_or(0);
        }
        sum
    }

    /// Whether the group has committed everything there is. Not while the broker cannot say.
    pub async fn is_through(&self) -> bool {
        let Ok(Some(topic)) = self.bus.topic(&self.topic).await else { return false };
        for number in 0..topic.partitions {
            let partition = Partition { topic: self.topic.clone(), number };
            let (committed, range) =
                (self.bus.committed("worker", &partition).await, self.bus.range(&partition).await);
            let (Ok(committed), Ok((_, end))) = (committed, range) else { return false };
            if committed.unwrap_or(0) != end {
                return false;
            }
        }
        true
    }

    /// Publishes what the broker may not take at once: each until it is acknowledged.
    pub async fn insist(&self, records: &[Record]) {
        let mut left = records.to_vec();
        while !left.is_empty() {
            match self.bus.publish(&self.topic, &left).await {
                Ok(answers) => {
                    let answers = answers.into_iter().zip(left);
                    left = answers.filter_map(|(answer, record)| answer.is_err().then_some(record)).collect();
                }
                Err(error) => assert!(error.is_retryable(), "{error:?}"),
            }
        }
    }

    /// How many records are in its dead-letter topic.
    pub async fn copies(&self) -> i64 {
        let dead = Topic::new(format!("{}.dead", self.topic.as_str())).unwrap();
        let mut copies = 0;
        for number in 0..self.partitions().await {
            let partition = Partition { topic: dead.clone(), number };
            copies += self.bus.range(&partition).await.map_or(0, |(_, end)| end);
        }
        copies
    }

    /// Waits until so many ids took effect, and says how many of them more than once.
    pub async fn until_effects(&self, count: usize) -> usize {
        until(&format!("{count} effects"), || async { self.effect_counts().await.len() >= count }).await;
        let counts = self.effect_counts().await;
        let doubled = counts.values().filter(|count| **count > 1).count();
        println!("{}: {} ids took effect, {doubled} more than once", self.test, counts.len());
        doubled
    }
}

/// Sends a signal.
pub fn signal(child: &Child, signal: &str) {
    let pid = child.id().expect("it runs").to_string();
    assert!(
        std::process::Command::new("kill").args([&format!("-{signal}"), &pid]).status().unwrap().success()
    );
}

fn knob(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn millis(name: &str, default: u64) -> Duration {
    Duration::from_millis(knob(name).map_or(default, |value| value.parse().unwrap()))
}

/// A consumer as the workers are; its knobs are those of this process.
pub fn builder(bus: Arc<KafkaBus>, ledger: PgLedger, topic: &str) -> ConsumerBuilder<PgLedger> {
    Consumer::builder(bus, ledger).scope(knob("WORKER_SCOPE").unwrap_or("worker".into())).topic(topic).with(
        |settings| {
            settings.group = Some(knob("WORKER_GROUP").unwrap_or("worker".into()).into());
            settings.lease = millis("WORKER_LEASE_MS", 3000);
            settings.heartbeat = settings.lease / 3;
            settings.session_timeout = Duration::from_secs(6);
            settings.backoff_base = millis("WORKER_BACKOFF_MS", 50);
            settings.backoff_max = Duration::from_secs(1);
            settings.held_interval = Duration::from_millis(100);
            settings.dead_reserve = Duration::from_secs(2);
            settings.drain = Duration::from_secs(10);
            settings.hold_max = millis("WORKER_HOLD_MS", 30_000);
            settings.batch_max = 64;
            settings.concurrency = if knob("WORKER_MODE").as_deref() == Some("leased") { 16 } else { 2 };
            if let Some(outage) = knob("WORKER_OUTAGE") {
                settings.outage = outage.parse().unwrap();
            }
            match knob("WORKER_ORDER").as_deref() {
                Some("latest") => settings.order = Some((OrderPolicy::Latest, OnDead::Park)),
                Some(other) => panic!("order {other}"),
                None => {}
            }
        },
    )
}

/// The worker: one consumer process, until it is stopped by a signal or killed.
pub async fn worker(schema: &str) {
    let url = knob("WORKER_URL").unwrap();
    let topic = knob("WORKER_TOPIC").unwrap();
    // It gives up soon, so that an outage is noticed.
    let pool =
        sqlx::postgres::PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
    let pool = loop {
        match pool.clone().connect(&url).await {
            Err(sqlx::Error::PoolTimedOut) => {} // nobody is away: the machine is busy
            connected => break connected.expect("the server answers"),
        }
    };
    let ledger = PgLedger::with_pool(pool.clone(), support::settings(schema)).await.expect("the ledger");
    let built = builder(bus().await, ledger, &topic).build().expect("a consumer");
    let handle = built.handle();
    tokio::spawn(async move {
        let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).unwrap();
        term.recv().await;
        handle.stop();
        term.recv().await;
        handle.stop_now();
    });
    let worker = i32::try_from(std::process::id()).unwrap();
    let http = knob("WORKER_HTTP").map(|url| HttpSink::new(&url).expect("a sink"));
    let effects = Effects { table: format!("{schema}.effect"), worker };
    let ended = if knob("WORKER_MODE").as_deref() == Some("leased") {
        built.leased(Outside { pool, effects, http }).await
    } else {
        built.transactional(Misbehaves(effects)).await
    };
    match ended {
        Ok(counts) => eprintln!("worker {worker} ended: {counts:?}"),
        Err(error) => {
            eprintln!("worker {worker} cannot go on: {}", error.chain());
            std::process::exit(3);
        }
    }
}

/// Writes each event to the record of effects, in the transaction of its claim.
pub struct Effects {
    pub table: String,
    pub worker: i32,
}

impl TransactionalHandler<PgTx> for Effects {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        let insert = format!("insert into {} (id, worker) values ($1, $2)", self.table);
        let insert = sqlx::query(AssertSqlSafe(insert)).bind(event.id.to_string()).bind(self.worker);
        insert.execute(&mut **tx).await?;
        Ok(())
    }
}

impl Effects {
    /// As an outside store does: it dedups on the key, unless the test asks for a plain one.
    async fn apply_outside(&self, pool: &PgPool, key: &str) -> Handled {
        let effects = &self.table;
        let sql = if knob("WORKER_SINK").as_deref() == Some("plain") {
            format!("insert into {effects} (id, worker) values ($1, $2)")
        } else {
            format!(
                "insert into {effects} (id, worker) select $1, $2 where not exists (select from {effects} where id = $1)"
            )
        };
        sqlx::query(AssertSqlSafe(sql)).bind(key).bind(self.worker).execute(pool).await?;
        Ok(())
    }
}

/// What can go wrong before and after an effect, if the test asks for it.
async fn around(event: &Event, effect: impl Future<Output = Handled>) -> Handled {
    misbehave(event)?;
    tokio::time::sleep(millis("WORKER_SLOW_MS", 0)).await;
    hapax::crash_point!("test.before-apply");
    effect.await?;
    hapax::crash_point!("test.after-apply");
    Ok(())
}

struct Misbehaves(Effects);

impl TransactionalHandler<PgTx> for Misbehaves {
    async fn handle(&self, tx: &mut PgTx, event: &Event) -> Handled {
        around(event, self.0.handle(tx, event)).await
    }
}

/// Effects outside of the transaction: over HTTP, or in a store of its own.
struct Outside {
    pool: PgPool,
    effects: Effects,
    http: Option<HttpSink>,
}

impl LeasedHandler for Outside {
    async fn handle(&self, event: &Event, run: &Run) -> Handled {
        around(event, async {
            match &self.http {
                Some(http) => http.apply(Effect::leased(event.clone(), run, Duration::from_secs(30))).await,
                None => self.effects.apply_outside(&self.pool, &run.key().id.to_string()).await,
            }
        })
        .await
    }
}

/// What events can ask a worker to do.
fn misbehave(event: &Event) -> Result<(), Failed> {
    let id = event.id.to_string();
    if id.starts_with("abort") {
        std::process::abort();
    }
    if id.starts_with("poison") {
        return Err(Failed::retryable("poison"));
    }
    if id.starts_with("fatal") || (id.starts_with("broken") && !is_mended()) {
        return Err(Failed::fatal("fatal"));
    }
    Ok(())
}

/// Whether someone has mended what `broken` events break on.
fn is_mended() -> bool {
    knob("WORKER_MENDED").is_some_and(|file| std::path::Path::new(&file).exists())
}

/// Plays the worker if this process is one: then the test ends here.
macro_rules! play {
    () => {
        if let Some((_, schema)) = crate::support::postgres::role() {
            return crate::support::world::worker(&schema).await;
        }
    };
}

/// Plays the worker if this process is one, else makes a world.
macro_rules! world {
    ($test:literal, $partitions:expr) => {{
        crate::support::world::play!();
        crate::support::world::World::new($test, $partitions).await
    }};
}

pub(crate) use {play, world};
