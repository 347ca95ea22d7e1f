//! Records from PostgreSQL through Debezium and Kafka to a read model, with the binary and real servers.
//!
//! It needs Kafka Connect (`scripts/services up connect`), which is started by name only: `scripts/run-tests` does so for this
//! program. There is one database and one connector for all tests, which run one after the other; a truncate, after which no
//! feed goes on, has its own. They are left behind for the next run, which begins by removing them.
#![cfg(all(feature = "postgres", feature = "kafka", feature = "http"))]
#![allow(
    clippy::missing_panics_doc,
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a panic is how a test fails"
)]

#[path = "../cli/common/mod.rs"]
mod common;

mod commands;
mod flows;
mod generations;
mod own;
mod repeats;
mod topic;
mod truncate;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use hapax::analytics::Uuid;
use serde_json::{Value, json};

use common::roles::Connection;
use common::serve::{Answer, Server, request};
use common::{Ran, run};

pub const SLOT: &str = DATABASE;
pub const PARTITIONS: i32 = 3;
const DATABASE: &str = "hapax_test_cdc";
const OWNER: &str = "hapax_test_cdc_owner";
const APP: &str = "hapax_test_cdc_app";
const KEEPER: &str = "hapax_test_cdc_keeper";

/// The database, the topic and the connector, and a directory with the configuration of all of them.
pub struct Deployment {
    pub dir: PathBuf,
    pub topic: String,
    /// The database of the records. The slot has its name.
    database: &'static str,
    admin: String,
}

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: scripts/services up postgres18 kafka connect, then eval \"$(scripts/services env)\"")
    })
}

/// The world, for one test at a time. Each finds the connector streaming.
pub fn world() -> MutexGuard<'static, Deployment> {
    static WORLD: OnceLock<Mutex<Deployment>> = OnceLock::new();
    let world = WORLD
        .get_or_init(|| Mutex::new(Deployment::new(DATABASE, "hapax-test")))
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    world.cdc(&["apply", "--create", &PARTITIONS.to_string()]).code(0);
    world
}

impl Deployment {
    /// A database of this name with a connector. What a run before has left is removed.
    pub fn new(database: &'static str, connector: &str) -> Self {
        let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(database);
        let _ = std::fs::remove_dir_all(&dir); // of a run before
        std::fs::create_dir_all(&dir).unwrap();
        let run_id = Uuid::now_v7().simple().to_string();
        let (topic, admin) = (format!("cdc-{run_id}"), variable("HAPAX_TEST_POSTGRES_URL"));
        let world = Deployment { dir, topic, database, admin };
        let file = format!(
            "[journal]\nurl = \"{}\"\n[bus]\nurl = \"kafka://{}\"\n[records]\napp_role = \"{APP}\"\nmaintenance_role = \"{KEEPER}\"\n\
             [relay]\ntopic = \"events-{run_id}\"\n[analytics]\nurl = \"sqlite:reads.db\"\nsource = \"debezium\"\n\
             [cdc]\nconnect_url = \"{}\"\nconnector = \"{connector}\"\ntopic = \"{}\"\nslot = \"{database}\"\ndatabase_url = \"{}\"\n",
            world.url(OWNER),
            variable("HAPAX_TEST_KAFKA"),
            variable("HAPAX_TEST_CONNECT"),
            world.topic,
            world.url(KEEPER),
        );
        std::fs::write(world.dir.join("hapax.toml"), file).unwrap();
        let mut admin = Connection::to(&world.admin);
        for (role, rights) in [(OWNER, ""), (APP, ""), (KEEPER, "replication")] {
            admin.run(&format!(
                "do $$ begin if not exists (select from pg_roles where rolname = '{role}') then create role {role} login {rights}; end if; end $$"
            ));
        }
        if admin.rows(&format!("select from pg_database where datname = '{database}'")) == 1 {
            world.cdc(&["remove", "--slot"]).code(0);
        }
        admin.run(&format!(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = '{database}' and not active"
        ));
        admin.run(&format!("drop database if exists {database} with (force)"));
        admin.run(&format!("create database {database} owner {OWNER}"));
        run(&world.dir, &["ledger", "init"]).code(0);
        world.module("orders");
        run(&world.dir, &["produce", "--topic", &format!("events-{run_id}"), "--create", "1"]).code(0);
        world
    }

    pub fn url(&self, role: &str) -> String {
        let rest = self.admin.split_once('@').unwrap().1;
        format!("postgres://{role}@{}/{}", rest.rsplit_once('/').unwrap().0, self.database)
    }

    /// The URL of a role that may do everything, in the database of the records.
    pub fn admin(&self) -> Connection {
        Connection::to(&self.url("postgres"))
    }

    pub fn cdc(&self, args: &[&str]) -> Ran {
        run(&self.dir, &[&["cdc"], args].concat())
    }

    pub fn module(&self, slug: &str) {
        run(&self.dir, &["modules", "create", slug]).code(0);
        let grants = run(&self.dir, &["modules", "grants"]).code(0).out;
        Connection::to(&self.url(OWNER)).run(&grants);
    }

    /// A server with the app's role, which feeds the read model.
    pub fn serve(&self) -> Server {
        self.serve_with(&[])
    }

    /// The same, with other settings.
    pub fn serve_with(&self, more: &[&str]) -> Server {
        let (app, keeper) = (self.url(APP), format!("keys.maintenance_url={}", self.url(KEEPER)));
        let args = ["--journal", &app, "--set", &keeper, "--set", "journal.migrate=check"];
        Server::start(&self.dir, &[&args[..], more].concat())
    }

    /// `scripts/services`, on the servers of this run.
    pub fn services(&self, args: &[&str]) {
        let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/services");
        let mut command = Command::new(script);
        if let Some(cache) = std::env::var_os("HAPAX_TEST_CACHE") {
            command.env("HAPAX_CACHE", cache);
        }
        let output = command.args(args).output().unwrap();
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

/// A write with a key of its own.
pub fn send(server: &Server, method: &str, path: &str, body: &Value) -> Answer {
    let key = Uuid::now_v7().to_string();
    let headers = [("content-type", "application/json"), ("idempotency-key", key.as_str())];
    request(&server.address, method, &format!("/v1/modules/{path}"), &headers, body.to_string().as_bytes())
}

pub fn create(server: &Server, module: &str, payload: &Value) -> Value {
    send(server, "POST", &format!("{module}/records"), &json!({"payload": payload})).is(201)
}

pub fn update(server: &Server, record: &Value, payload: &Value) -> Value {
    let path = format!("{}/records/{}", text(record, "module"), text(record, "id"));
    send(server, "PUT", &path, &json!({"payload": payload, "expected_seq": record["seq"]})).is(200)
}

pub fn delete(server: &Server, record: &Value) -> Value {
    let path =
        format!("{}/records/{}?expected_seq={}", text(record, "module"), text(record, "id"), record["seq"]);
    send(server, "DELETE", &path, &Value::Null).is(200)
}

pub fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name}: {value}"))
}

/// Waits until a write is visible in the read model.
pub fn visible(server: &Server, record: &Value) {
    let (module, id) = (text(record, "module"), text(record, "id"));
    let path = format!(
        "/v1/analytics/modules/{module}/records?limit=1&after_write={module}/{id}@{}&wait_ms=30000",
        record["seq"]
    );
    for _ in 0..6 {
        if server.get(&path).status == 200 {
            return;
        }
    }
    panic!("{record} is never visible: {:?}", server.get("/v1/analytics/status"));
}

/// All records of a module as the read model has them, and `lastSyncAt` of the first page.
pub fn listed(server: &Server, module: &str) -> (Vec<Value>, Option<String>) {
    let (mut all, mut after, mut synced) = (Vec::new(), String::new(), None);
    loop {
        let page = server.get(&format!("/v1/analytics/modules/{module}/records?limit=1000{after}")).is(200);
        if after.is_empty() {
            synced = page["meta"]["lastSyncAt"].as_str().map(str::to_owned);
        }
        all.extend(page["records"].as_array().unwrap().iter().cloned());
        let Some(next) = page["next"].as_str() else { return (all, synced) };
        after = format!("&after={next}");
    }
}

/// All records of a module as they are in PostgreSQL.
pub fn stored(server: &Server, module: &str) -> Vec<Value> {
    let (mut all, mut after) = (Vec::new(), String::new());
    loop {
        let page = server.get(&format!("/v1/modules/{module}/records?limit=1000{after}")).is(200);
        all.extend(page["records"].as_array().unwrap().iter().cloned());
        let Some(next) = page["next"].as_str() else { return all };
        after = format!("&after={next}");
    }
}
