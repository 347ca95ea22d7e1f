//! `hapax serve` on PostgreSQL, Kafka and Valkey, and while they are away.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use crate::common::consume::{Sample, effects, wait_until};
use crate::common::serve::{Server, refused};
use crate::common::{hapax, run, run_with};

fn of(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: run `scripts/services up` and `eval \"$(scripts/services env)\"`")
    })
}

/// A name of this run alone.
fn unique(dir: &Path) -> String {
    run(dir, &["id", "make"]).code(0).out.trim().replace('-', "_")
}

/// Forwards connections to a server until it is cut.
struct Wire {
    address: String,
    cut: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    fn to(server: String) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let (cut, open) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (is_cut, held) = (Arc::clone(&cut), Arc::clone(&open));
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let client = client.unwrap();
                if is_cut.load(Ordering::SeqCst) {
                    continue; // dropped at once
                }
                let upstream = TcpStream::connect(&server).unwrap();
                let mut held = held.lock().unwrap();
                if is_cut.load(Ordering::SeqCst) {
                    continue; // since it was accepted
                }
                for (from, to) in [(&client, &upstream), (&upstream, &client)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    held.push(from.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let mut part = [0; 8192];
                        while let Ok(count @ 1..) = from.read(&mut part) {
                            if to.write_all(&part[..count]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Wire { address, cut, open }
    }

    fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn mend(&self) {
        self.cut.store(false, Ordering::SeqCst);
    }
}

/// Host and port of a URL.
fn host_of(url: &str) -> String {
    let rest = url.split_once("://").unwrap().1;
    let rest = rest.rsplit_once('@').map_or(rest, |(_, rest)| rest);
    rest.split(['/', '?']).next().unwrap().to_owned()
}

#[test]
fn the_same_api_on_postgresql_and_kafka() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (url, bus, name) =
        (of("HAPAX_TEST_POSTGRES_URL"), format!("kafka://{}", of("HAPAX_TEST_KAFKA")), unique(dir));
    let schema = format!("serve_{name}");
    // Nothing but a file, as an operator has it. The tests' role is a superuser.
    let file = format!(
        "[ledger]\nurl = \"{url}\"\nschema = \"{schema}\"\n[journal]\nurl = \"{url}\"\nschema = \"{schema}\"\n\
         [bus]\nurl = \"{bus}\"\n[relay]\ntopic = \"{name}\"\nlease_ms = 1000\n[records]\naccept_bypass = true\n"
    );
    std::fs::write(dir.join("hapax.toml"), file).unwrap();
    let ran = refused(dir, &["--listen", "127.0.0.1:0"]).code(2);
    assert!(ran.err.contains("there is no topic") && ran.err.contains("relay run --create"), "{}", ran.err);
    run_with(dir, &["produce", "--bus", &bus, "--topic", &name, "--create", "2"], b"").code(0);

    let mut server = Server::start(dir, &[]);
    println!("from start to ready: {} ms", server.took.as_millis());
    let info = server.get("/v1/info").is(200);
    assert_eq!(
        (&info["ledger"], &info["journal"], &info["keys"], &info["bus"]),
        (&json!("postgres"), &json!("postgres"), &json!("postgres"), &json!("kafka"))
    );
    let claims: Vec<_> = (0..100).map(|n| json!({"scope": "s", "id": format!("e-{}", n % 50)})).collect();
    let batch = json!({"request_id": "b-1", "claims": claims});
    let words = |answer: &Value, word: &str| {
        answer["outcomes"].as_array().unwrap().iter().filter(|one| one["outcome"] == word).count()
    };
    let first = server.post("/v1/claims/batch", &batch).is(200);
    assert_eq!((words(&first, "claimed"), words(&first, "busy")), (50, 50), "{first}");
    let event =
        json!({"aggregate": "o-1", "expected": "new", "events": [{"id": "e-1", "payload": {"amount": 7}}]});
    server.post("/v1/journal/append", &event).is(200);
    wait_until("it is published", || server.get("/v1/stats").is(200)["relay"]["published"] == 1);

    // Killed, with the answer to the batch lost.
    server.signal("-KILL");
    server.ended();
    let server = Server::start(dir, &[]);
    let again = server.post("/v1/claims/batch", &batch).is(200);
    assert_eq!(
        (&again["outcomes"][7]["outcome"], &again["outcomes"][7]["token"]),
        (&json!("claimed"), &first["outcomes"][7]["token"])
    );
    let done: Vec<_> = again["outcomes"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|one| one["outcome"] == "claimed")
        .map(|one| json!({"scope": "s", "id": one["id"], "token": one["token"]}))
        .collect();
    let settled = server.post("/v1/claims/done/batch", &json!({"claims": done})).is(200);
    assert!(settled["outcomes"].as_array().unwrap().iter().all(|one| one["state"] == "done"), "{settled}");
    let after = server.post("/v1/claims/batch", &batch).is(200);
    assert_eq!(words(&after, "duplicate"), 100, "{after}");
    assert_eq!(server.post("/v1/journal/append", &event).is(200)["events"][0]["placing"], "repeat");
    let mismatch = json!({"aggregate": "o-1", "events": [{"id": "e-1", "payload": {"amount": 8}}]});
    server.post("/v1/journal/append", &mismatch).problem(422, "mismatch");
    let conflict = server
        .post("/v1/journal/append", &json!({"aggregate": "o-1", "expected": 0, "events": [{"id": "e-2"}]}));
    conflict.problem(409, "conflict");
    assert_eq!((&conflict.json()["expected"], &conflict.json()["actual"]), (&json!(0), &json!(1)));
    assert_eq!(server.get("/v1/stats").is(200)["ledger"][0]["count"], 50);

    // A consumer gets it from Kafka.
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let consume = ["consume", "--bus", &bus, "--topic", &name, "--scope", &name, "--exec", &command];
    let mut consumer = hapax(dir, &consume).spawn().unwrap();
    wait_until("it is consumed", || !effects(dir).is_empty());
    let _ = consumer.kill();
    let _ = consumer.wait();
    assert_eq!(effects(dir), ["e-1"]);
}

#[test]
fn t165_an_outage_is_named_and_ends_by_itself() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let url = of("HAPAX_TEST_POSTGRES_URL");
    let wire = Wire::to(host_of(&url));
    let through = url.replace(&host_of(&url), &wire.address);
    let sets = [format!("ledger.schema=serve_{}", unique(dir)), "ledger.acquire_timeout_ms=5000".to_owned()];
    let server = Server::start(dir, &["--ledger", &through, "--set", &sets[0], "--set", &sets[1]]);
    wait_until("it is ready", || server.get("/readyz").status == 200);
    let claim = json!({"scope": "s", "id": "e-1", "request_id": "r-1"});
    let token = server.post("/v1/claims", &claim).is(200)["token"].clone();
    wire.cut();
    // An answer is remembered for a second. On a machine that stalls others may be late for a moment, too.
    let mut down = server.get("/readyz");
    wait_until("it is noticed", || {
        down = server.get("/readyz");
        let said = down.json();
        down.status == 503 && said["checks"]["ledger"] != "ok" && said["checks"]["journal"] == "ok"
    });
    let problem = down.problem(503, "not-ready");
    assert!(problem.contains("ledger") && !problem.contains("journal"), "{problem}");
    assert_eq!(
        (&down.json()["checks"]["ledger"] != "ok", &down.json()["checks"]["journal"]),
        (true, &json!("ok"))
    );
    assert_eq!(down.header("retry-after"), Some("1"));
    server.get("/healthz").is(200);
    let away = server.post("/v1/claims", &json!({"scope": "s", "id": "e-2"}));
    away.problem(503, "unavailable");
    assert_eq!(away.header("retry-after"), Some("1"));
    let (host, password) = (wire.address.as_str(), "postgres://");
    assert!(!away.body.contains(host) && !away.body.contains(password), "{}", away.body);
    // What does not need it goes on.
    server.post("/v1/journal/append", &json!({"aggregate": "a", "events": [{"id": "e-1"}]})).is(200);
    wire.mend();
    wait_until("it is back", || server.get("/readyz").status == 200);
    assert_eq!(server.post("/v1/claims", &claim).is(200)["token"], token);
}

/// The COMMIT of a claim takes longer than its client waits. The client asks again under the same name, and meets the lock of its
/// own first try. Whoever is told "busy" goes away, and then the claim is granted to nobody.
#[test]
#[cfg(feature = "postgres")]
fn t401_a_claim_whose_first_try_is_being_committed_is_not_busy() {
    use crate::common::roles::Connection;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (url, schema) = (of("HAPAX_TEST_POSTGRES_URL"), format!("serve_{}", unique(dir)));
    let server = Server::start(dir, &["--ledger", &url, "--set", &format!("ledger.schema={schema}")]);
    assert_eq!(server.post("/v1/claims", &json!({"scope": "s", "id": "e"})).is(200)["outcome"], "claimed");
    let (mut gate, mut watch) = (Connection::to(&url), Connection::to(&url));
    let lock = format!("(4711, hashtext('{schema}'))");
    gate.run(&format!(
        "create function {schema}.wait() returns trigger language plpgsql as \
         $$ begin perform pg_advisory_xact_lock_shared{lock}; return null; end $$; \
         create constraint trigger wait after insert on {schema}.entry deferrable initially deferred \
         for each row execute function {schema}.wait()"
    ));
    for mode in ["at_most_once", "lease"] {
        gate.run(&format!("select pg_advisory_lock{lock}"));
        let claim = json!({"scope": "s", "id": mode, "mode": mode, "request_id": mode});
        let granted = std::thread::scope(|scope| {
            let first = scope.spawn(|| server.post("/v1/claims", &claim).is(200));
            let waits = format!(
                "select from pg_stat_activity where wait_event = 'advisory' and query like '%{schema}.%'"
            );
            wait_until("the first try is being committed", || watch.rows(&waits) > 0);
            let again = server.post("/v1/claims", &claim);
            again.problem(503, "contended");
            assert_eq!(again.header("retry-after"), Some("1"));
            // Of a claim without a name there was no first try.
            let nameless = json!({"scope": "s", "id": mode, "mode": mode});
            let busy = server.post("/v1/claims", &nameless).is(200);
            assert_eq!((&busy["outcome"], &busy["until"]), (&json!("busy"), &Value::Null));
            let batch = server.post("/v1/claims/batch", &json!({"claims": [claim, nameless]})).is(200);
            let said = [&batch["outcomes"][0]["problem"]["code"], &batch["outcomes"][1]["outcome"]];
            assert_eq!(said, ["contended", "busy"], "{batch}");
            gate.run(&format!("select pg_advisory_unlock{lock}"));
            first.join().unwrap() // nobody has waited for this answer
        });
        let own = server.post("/v1/claims", &claim).is(200);
        assert_eq!((&own["outcome"], &own["token"]), (&json!("claimed"), &granted["token"]));
    }
}

#[test]
fn a_ledger_in_valkey_serves_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let schema = format!("ledger.schema=serve_{}", unique(dir));
    let url = of("HAPAX_TEST_VALKEY_URL");
    let server = Server::start(dir, &["--ledger", &url, "--set", &schema]);
    assert_eq!(server.get("/v1/info").is(200)["ledger"], "redis");
    let claim = json!({"scope": "s", "id": "e-1", "request_id": "r-1"});
    let first = server.post("/v1/claims", &claim).is(200);
    assert_eq!(server.post("/v1/claims", &claim).is(200)["token"], first["token"]);
    server.post("/v1/claims/done", &json!({"scope": "s", "id": "e-1", "token": first["token"]})).is(200);
    assert_eq!(server.post("/v1/claims", &claim).is(200)["outcome"], "duplicate");
}
