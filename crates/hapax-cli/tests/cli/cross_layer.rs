//! One order, from POST to query, and what each layer catches. The three failures come from the same table as the names:
//! a client that sends again, a consumer that is killed, a topic that is published again.
//!
//! ```text
//! POST ─▶ record ─▶ journal ─▶ relay ─▶ Kafka ─┬▶ consumer ─▶ effect
//!  key (1)     PostgreSQL                      │  ledger (2)
//!                                              └▶ feed ─▶ ClickHouse ─▶ query
//!                                                         version (3)
//! ```
//!
//! Each story is told twice: with the layer, and without it. Without it the duplicate is there, and the other two layers do
//! not hide it.

#![cfg(all(feature = "postgres", feature = "kafka", feature = "clickhouse"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::path::{Path, PathBuf};
use std::process::Child;

use hapax::bus::{Bus, Partition};
use hapax::clock::{Clock as _, SystemClock};
use hapax::{Time, Topic};
use serde_json::{Value, json};

use crate::common::consume::{Sample, count, effects, wait_until};
use crate::common::roles::Postgres;
use crate::common::serve::{Answer, Server, request};
use crate::common::{Ran, hapax, run, run_with};
use crate::query_clickhouse::Database;

const ORDERS: usize = 4;
const PARTITIONS: i32 = 2;
/// How often a client sends that saw no answer.
const SENT: usize = 3;

/// What goes wrong.
#[derive(Debug, Clone, Copy, Default)]
struct Failures {
    /// The client sees no answer, and sends again.
    retries: bool,
    /// The consumer is killed before it commits its offsets.
    crash: bool,
    /// The relay loses its place, and publishes everything again.
    republish: bool,
}

/// What is there to catch it.
#[derive(Debug, Clone, Copy)]
struct Layers {
    /// A retry has the key of the first attempt.
    keys: bool,
    /// The ledger outlives the consumer.
    ledger: bool,
    /// A query counts the highest version of a record (FINAL).
    versions: bool,
}

const ALL: Layers = Layers { keys: true, ledger: true, versions: true };

/// What there is in the end.
#[derive(Debug, PartialEq, Eq)]
struct Found {
    records: usize,
    effects: usize,
    rows: usize,
}

const ONCE: Found = Found { records: ORDERS, effects: ORDERS, rows: ORDERS };

/// The servers, with names of one story alone.
struct StoryServers {
    dir: PathBuf,
    place: Postgres,
    database: Database,
    bus: String,
    topic: String,
    handler: String,
}

impl StoryServers {
    fn new(dir: &Path) -> Self {
        let kafka = std::env::var("HAPAX_TEST_KAFKA").expect("scripts/services env is set");
        let topic = run(dir, &["id", "make"]).code(0).out.trim().to_owned();
        // The effect is a line for every order that was taken; who sees it knows nothing of the ledger.
        let body =
            "if request['event']['kind'] == 'record.created':\n    effect(request['event']['payload']['id'])";
        let handler = Sample::Python.handler(dir, body);
        let world = StoryServers {
            dir: dir.to_owned(),
            place: Postgres::new(dir),
            database: Database::new(dir),
            bus: format!("kafka://{kafka}"),
            topic,
            handler,
        };
        let partitions = PARTITIONS.to_string();
        let create = ["produce", "--bus", &world.bus, "--topic", &world.topic, "--create", &partitions];
        run_with(dir, &create, b"").code(0);
        world
    }

    fn serve(&self) -> Server {
        let (keeper, topic) = (
            format!("keys.maintenance_url={}", self.place.keeper_url),
            format!("relay.topic={}", self.topic),
        );
        let sets = [&keeper, &topic, &self.database.set(), "relay.lease_ms=1000"];
        let mut args = vec!["--bus", &self.bus];
        args.extend(sets.iter().flat_map(|set| ["--set", *set]));
        let server = self.place.start_with(&args);
        // So that a version which was replaced stays where it can be counted.
        let stop = format!("SYSTEM STOP MERGES {}.data_records", self.database.name);
        wait_until("the table is there", || self.database.sql(&stop).0 == 200);
        server
    }

    fn write(&self, server: &Server, method: &str, rest: &str, key: &str, body: &Value) -> Answer {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        let path = format!("/v1/modules/{}/records{rest}", self.place.slug);
        request(&server.address, method, &path, &headers, body.to_string().as_bytes())
    }

    /// Sends a write once, or as often as a client does that sees no answer.
    fn send(
        &self,
        server: &Server,
        failures: Failures,
        layers: Layers,
        write: (&str, &str, &Value),
    ) -> Value {
        let (method, rest, body) = write;
        let key = new_id(&self.dir);
        let mut first = None;
        for _ in 0..if failures.retries { SENT } else { 1 } {
            let key = if layers.keys { key.clone() } else { new_id(&self.dir) };
            let answer = self.write(server, method, rest, &key, body);
            if first.is_none() || layers.keys {
                assert!([200, 201].contains(&answer.status), "{answer:?}");
            }
            first.get_or_insert_with(|| answer.json());
        }
        first.unwrap()
    }

    /// Consumes until it is ended. One that is to be killed does not commit its offsets before.
    fn consume(&self, layers: Layers, is_killed: bool) -> Child {
        let schema = format!("ledger.schema={}", self.place.schema);
        // A ledger that does not outlive its process catches nothing that is delivered to the next one.
        let ledger = if layers.ledger { self.place.owner_url.as_str() } else { "memory:" };
        let fixed = ["consume", "--bus", &self.bus, "--topic", &self.topic, "--scope", &self.topic, "--json"];
        let more = ["--ledger", ledger, "--set", &schema, "--exec", &self.handler, "--workers", "1"];
        let commits = format!("consumer.commit_interval_ms={}", if is_killed { 3_000_000 } else { 200 });
        let times = ["--set", &commits, "--set", "consumer.session_timeout_ms=6000"];
        hapax(&self.dir, &[&fixed[..], &more, &times].concat()).spawn().unwrap()
    }

    /// How many events the ledger has as done.
    fn done(&self) -> u64 {
        let schema = format!("ledger.schema={}", self.place.schema);
        let args = ["ledger", "stat", "--json", "--ledger", &self.place.owner_url, "--set", &schema];
        let stat = run(&self.dir, &args);
        if stat.code != Some(0) {
            return 0; // the consumer is about to make it
        }
        let counts = stat.json()["counts"].as_array().unwrap().clone();
        let done = counts.iter().filter(|of| of["scope"] == json!(self.topic) && of["state"] == "done");
        done.map(|of| of["count"].as_u64().unwrap()).sum()
    }

    fn rewind(&self) {
        let rewind = ["relay", "rewind", "--to", "0", "--yes"];
        run(&self.dir, &[&self.place.as_owner()[..], &rewind].concat()).code(0);
    }

    /// How many records the topic has, with pulses.
    fn published(&self) -> i64 {
        self.on_bus(&async |bus, partition| Some(bus.range(partition).await.ok()?.1)).unwrap_or(0)
    }

    /// How many of them the consumers' group has committed.
    fn committed(&self) -> i64 {
        let of =
            async |bus: &dyn Bus, partition: &Partition| bus.committed(&self.topic, partition).await.ok();
        self.on_bus(&async |bus, partition| Some(of(bus, partition).await?.unwrap_or(0))).unwrap_or(0)
    }

    /// The sum over the partitions; `None` if the broker is too busy to say.
    fn on_bus(&self, of: &impl AsyncFn(&dyn Bus, &Partition) -> Option<i64>) -> Option<i64> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let bus = hapax::open::bus(&self.bus).await.ok()?;
            let mut sum = 0;
            for number in 0..PARTITIONS {
                let partition = Partition { topic: Topic::new(&self.topic).unwrap(), number };
                sum += of(&*bus, &partition).await?;
            }
            Some(sum)
        })
    }

    fn tally(&self, server: &Server, rest: &str) -> Value {
        server.get(&format!("/v1/analytics/modules/{}/tally{rest}", self.place.slug)).is(200)
    }

    /// Waits until everything that was published by now is in the read model.
    fn until_synced(&self, server: &Server) {
        let now = SystemClock.now();
        wait_until("the read model is in step", || {
            let meta = &self.tally(server, "")["meta"];
            meta["lastSyncAt"].as_str().is_some_and(|synced| Time::parse(synced).unwrap() > now)
        });
    }

    /// How many records have more than one row in ClickHouse: an older version, or the same once more.
    fn repeated(&self) -> usize {
        let sql = format!(
            "SELECT count() FROM (SELECT record_id FROM {}.data_records GROUP BY record_id HAVING count() > 1)",
            self.database.name
        );
        let (status, text) = self.database.sql(&sql);
        assert_eq!(status, 200, "{text}");
        text.trim().parse().unwrap()
    }
}

fn new_id(dir: &Path) -> String {
    run(dir, &["id", "make"]).code(0).out.trim().to_owned()
}

fn end(mut consumer: Child) -> Ran {
    let pid = consumer.id().to_string();
    let sent = std::process::Command::new("kill").args(["-TERM", &pid]).status().unwrap();
    assert!(sent.success() && consumer.try_wait().unwrap().is_none(), "it ended by itself");
    Ran::from(consumer.wait_with_output().unwrap()).code(143)
}

/// Takes orders and confirms them, lets go wrong what should, and counts.
fn story(failures: Failures, layers: Layers) -> Found {
    let dir = tempfile::tempdir().unwrap();
    let world = StoryServers::new(dir.path());
    let server = world.serve();
    let mut made = 0;
    for n in 0..ORDERS {
        let body = json!({"payload": {"order": n, "status": "taken"}});
        let record = world.send(&server, failures, layers, ("POST", "", &body));
        made += if failures.retries && !layers.keys { SENT } else { 1 };
        let body = json!({"payload": {"order": n, "status": "confirmed"}, "expected_seq": 1});
        let rest = format!("/{}", record["id"].as_str().unwrap());
        let changed = world.send(&server, failures, layers, ("PUT", &rest, &body));
        assert_eq!(changed["seq"], 2, "{changed}");
    }
    let events = (made + ORDERS) as u64; // each is created, and the first of each order changed

    let mut consumer = world.consume(layers, failures.crash);
    wait_until("every order took effect", || effects(&world.dir).len() >= made);
    if layers.ledger {
        wait_until("the ledger knows it", || world.done() >= events);
    }
    if failures.crash {
        consumer.kill().unwrap(); // kill -9: its offsets are not committed
        consumer.wait().unwrap();
        assert_eq!(world.committed(), 0, "it was to be killed before it commits");
    }
    world.until_synced(&server);
    if failures.republish {
        let before = world.published();
        world.rewind();
        wait_until("it is published again", || world.published() >= before + events as i64);
        wait_until("it arrives", || world.repeated() >= made);
        world.until_synced(&server);
    }
    if failures.crash {
        consumer = world.consume(layers, false);
    }
    let published = world.published();
    wait_until("the consumer has seen it all", || world.committed() >= published);
    let ran = end(consumer);
    println!("{failures:?}, {layers:?}: {events} events, {} duplicates caught", count(&ran, "duplicate"));
    if layers.ledger {
        let expected = if failures.crash { events } else { 0 } + if failures.republish { events } else { 0 };
        assert!(count(&ran, "duplicate") >= expected, "{}", ran.out);
    }

    let slug = &world.place.slug;
    let records = server.get(&format!("/v1/modules/{slug}/records?limit=1000")).is(200)["records"].clone();
    let shown =
        server.get(&format!("/v1/analytics/modules/{slug}/records?limit=1000")).is(200)["records"].clone();
    assert_eq!(shown, records, "the right last version of each");
    let approximate = if layers.versions { "" } else { "?approximate=true" };
    let rows = world.tally(&server, approximate)["groups"][0]["count"].as_u64().unwrap();
    let confirmed = records.as_array().unwrap().iter().filter(|of| of["payload"]["status"] == "confirmed");
    assert_eq!(confirmed.count(), ORDERS);
    Found {
        records: records.as_array().unwrap().len(),
        effects: effects(&world.dir).len(),
        rows: rows as usize,
    }
}

#[test]
fn cross_layer_1_a_client_that_sends_again_makes_one_record() {
    let failures = Failures { retries: true, ..Failures::default() };
    assert_eq!(story(failures, ALL), ONCE);
    // Without its key each attempt is another order, and all layers behind it treat it as one.
    let many = ORDERS * SENT;
    let found = story(failures, Layers { keys: false, ..ALL });
    assert_eq!(found, Found { records: many, effects: many, rows: many });
}

#[test]
fn cross_layer_2_a_consumer_that_is_killed_takes_effect_once() {
    let failures = Failures { crash: true, ..Failures::default() };
    assert_eq!(story(failures, ALL), ONCE);
    let found = story(failures, Layers { ledger: false, ..ALL });
    assert_eq!(found, Found { effects: 2 * ORDERS, ..ONCE });
}

#[test]
fn cross_layer_3_what_is_published_again_is_one_row() {
    let failures = Failures { republish: true, ..Failures::default() };
    assert_eq!(story(failures, ALL), ONCE);
    let found = story(failures, Layers { versions: false, ..ALL });
    assert!(found.rows >= 2 * ORDERS, "{found:?}");
    assert_eq!((found.records, found.effects), (ORDERS, ORDERS));
}

#[test]
fn cross_layer_4_all_three_at_once_are_one_record_one_effect_and_one_row() {
    let failures = Failures { retries: true, crash: true, republish: true };
    assert_eq!(story(failures, ALL), ONCE);
}
