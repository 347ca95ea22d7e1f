//! `hapax project`: a cache that follows records, is rebuilt and compared; and what it says when it cannot.
#![cfg(feature = "redis")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use crate::common::serve::{Server, request};
use crate::common::{Ran, hapax, run};

/// A database of the server that no other test uses.
const DATABASE: u8 = 9;

fn server() -> String {
    std::env::var("HAPAX_TEST_VALKEY_URL").expect(
        "HAPAX_TEST_VALKEY_URL is not set: run `scripts/services up` and `eval \"$(scripts/services env)\"`",
    )
}

fn cache() -> String {
    format!("cache:{}/{DATABASE}", server())
}

/// Commands of the test's own, one on each line. The first line of each answer.
fn valkey(commands: &[&str]) -> Vec<String> {
    let mut stream = std::net::TcpStream::connect(server().strip_prefix("redis://").unwrap()).unwrap();
    let mut answers = BufReader::new(stream.try_clone().unwrap());
    let select = format!("SELECT {DATABASE}");
    let mut lines = Vec::new();
    for command in std::iter::once(select.as_str()).chain(commands.iter().copied()) {
        write!(stream, "{command}\r\n").unwrap();
        let mut line = String::new();
        answers.read_line(&mut line).unwrap();
        assert!(!line.starts_with('-'), "{command}: {line}");
        lines.push(line.trim().to_owned());
    }
    lines
}

fn project(dir: &Path, command: &str, more: &[&str]) -> Ran {
    run(dir, &[&["project", command, "--data", "d"], more].concat())
}

fn write(server: &Server, method: &str, path: &str, key: &str, body: &Value) -> Value {
    let headers = [("content-type", "application/json"), ("idempotency-key", key)];
    let path = format!("/v1/modules/orders/records{path}");
    let answer = request(&server.address, method, &path, &headers, body.to_string().as_bytes());
    assert!((200..300).contains(&answer.status), "{answer:?}");
    if answer.body.is_empty() { Value::Null } else { answer.json() }
}

/// From a POST to the cache, and back from what somebody broke there.
#[test]
fn a_cache_follows_records_and_can_be_compared_and_rebuilt() {
    valkey(&["FLUSHDB"]);
    let dir = tempfile::tempdir().unwrap();
    let (dir, to) = (dir.path(), cache());
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let served = Server::start(dir, &["--data", "d"]);
    let mut ids = Vec::new();
    for n in 0..3 {
        let created = write(&served, "POST", "", &format!("k{n}"), &json!({"payload": {"n": n}}));
        ids.push(created["id"].as_str().unwrap().to_owned());
    }
    let update = json!({"expected_seq": 1, "payload": {"n": "new"}});
    write(&served, "PUT", &format!("/{}", ids[1]), "k-put", &update);
    // What the read model shows is on the topic.
    for (id, seq) in ids.iter().zip([1, 2, 1]) {
        let token = format!("orders/{id}@{seq}");
        let query =
            ["query", "records", "--module", "orders", "--data", "d", "--wait", "60s", "--after", &token];
        run(dir, &query).code(0);
    }
    drop(served); // its pulses would keep the topic from ever being idle
    let late = project(dir, "verify", &["--to", &to, "--wait", "100ms"]).code(1).out;
    assert_eq!(late.matches("late: is missing").count(), 3, "no consumer has read them: {late}");
    let stderr = project(dir, "run", &["--to", &to, "--until-idle", "1"]).code(0).err;
    assert!(stderr.contains("done"), "{stderr}");
    let again = project(dir, "run", &["--to", &to, "--until-idle", "1", "--json"]).code(0).json();
    assert!(again["deliveries"]["done"].is_null(), "nothing is left to do: {again}");
    let verified = project(dir, "verify", &["--to", &to, "--json"]).code(0).json();
    assert_eq!((&verified["records"], &verified["differences"]), (&json!(3), &json!(0)), "{verified}");
    explain_says_what_a_cache_has(dir, &to, &ids);
    let status = project(dir, "status", &["--to", &to, "--json"]).code(0).json();
    assert_eq!(status["behind"], 0, "{status}");
    assert!(status["scope"].as_str().unwrap().starts_with("projection_worker:cache:"), "{status}");

    // Somebody removes one record from the cache, and makes another one up.
    let of = |id: &str, what: &str| {
        format!("hapax:cache:{{00000000-0000-0000-0000-000000000000:orders:{id}}}:{what}")
    };
    let forged = of("00000000-0000-0000-0000-00000000000f", "version");
    valkey(&[
        &format!("DEL {} {}", of(&ids[0], "version"), of(&ids[0], "value")),
        &format!("SET {forged} {:020}D", (1_u64 << 48) + 1),
    ]);
    let differs = project(dir, "verify", &["--to", &to, "--wait", "100ms"]).code(1).out;
    assert!(differs.contains(&format!("{}: missing", ids[0])), "{differs}");
    assert!(differs.contains("never written") && differs.contains("2 differ"), "{differs}");
    let rebuilt = project(dir, "rebuild", &["--to", &to, "--by", "ada", "--reason", "ticket 7"]).code(0).out;
    assert!(rebuilt.contains("3 changes of 3 records applied, 0 rejected"), "{rebuilt}");
    let audit = run(dir, &["--json", "audit", "ls", "--action", "project.", "--data", "d"]).code(0).json();
    let row = &audit["audit"][0];
    assert_eq!((&row["action"], &row["who"]), (&json!("project.rebuild"), &json!("ada")), "{audit}");
    assert!(row["target"].as_str().unwrap().starts_with("cache:"), "{audit}");
    valkey(&[&format!("DEL {forged}")]);
    project(dir, "verify", &["--to", &to]).code(0);
    valkey(&["FLUSHDB"]);
}

/// What `hapax explain` says of three records of which the second was written twice; the third one is taken from
/// the cache and put back.
fn explain_says_what_a_cache_has(dir: &Path, to: &str, ids: &[String]) {
    let setting = format!("projection.url={to}");
    let said = |id: &str| {
        let aggregate = format!("orders/{id}");
        let args = ["explain", "--aggregate", &aggregate, "--data", "d", "--json", "--set", &setting];
        let answer = run(dir, &args).code(0).json();
        let steps = answer["steps"].as_array().unwrap().clone();
        let step = steps.into_iter().find(|step| step["layer"] == "projection");
        step.unwrap_or_else(|| panic!("nothing of the projection: {answer:#}"))
    };
    let step = said(&ids[1]);
    assert_eq!((&step["what"], &step["at"]), (&json!("it has the record at seq 2"), &Value::Null), "{step}");
    assert!(step["name"].as_str().unwrap().contains("cache") && step["facts"]["generation"] == 1, "{step}");
    let of =
        |what: &str| format!("hapax:cache:{{00000000-0000-0000-0000-000000000000:orders:{}}}:{what}", ids[2]);
    // As an expiry does, which takes the value and leaves the version.
    let (value, version) = (of("value"), of("version"));
    valkey(&[&format!("RENAME {value} hapax-test:value")]);
    assert_eq!(said(&ids[2])["what"], "it is at seq 1 of the record, whose content has expired there");
    let deleted = format!("SET {version} {:020}D", (1_u64 << 48) + 2);
    valkey(&[&format!("RENAME {version} hapax-test:version"), &deleted]);
    assert_eq!(said(&ids[2])["what"], "it is at seq 2, with which the record was deleted");
    // A deleted record with a value contradicts itself.
    valkey(&[&format!("RENAME hapax-test:value {value}")]);
    let step = said(&ids[2]);
    assert_eq!(step["what"], "what it has of the record cannot be read");
    assert!(step["facts"]["reason"].is_string(), "{step}");
    valkey(&[&format!("RENAME hapax-test:version {version}")]);
    assert_eq!(said(&ids[2])["what"], "it has the record at seq 1");
    // One that is away is a line of the report, and an exit code.
    let aggregate = format!("orders/{}", ids[0]);
    let away = ["--set", "projection.url=cache:redis://127.0.0.1:1"];
    let args = [&["explain", "--aggregate", &aggregate, "--data", "d"], &away[..]].concat();
    let answer = run(dir, &args).code(3);
    assert!(answer.out.contains("projection") && answer.out.contains("appended as seq 1"), "{}", answer.out);
}

/// A sentence that says what is wrong and what to write, and nothing is made.
#[test]
fn what_cannot_be_projected_to_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (to, code, expected) in [
        ("mysql://db", 2, "cache:redis://HOST:PORT or opensearch:http://HOST:PORT/ALIAS"),
        ("opensearch:http://localhost:9200", 2, "http://HOST:PORT/ALIAS"),
        ("cache:redis://127.0.0.1:1", 3, "127.0.0.1:1"),
        ("opensearch:http://me:secret@127.0.0.1:1/records", 3, "127.0.0.1:1"),
    ] {
        let ran = project(dir, "run", &["--to", to]).code(code);
        assert!(ran.err.contains(expected) && !ran.err.contains("secret"), "{to}: {}", ran.err);
    }
    let missing = project(dir, "verify", &[]).code(3).err;
    assert!(missing.contains("no journal"), "{missing}");
    let unnamed = project(dir, "run", &[]).code(2).err;
    assert!(unnamed.contains("--to is missing"), "{unnamed}");
    assert!(!dir.join("d").exists(), "nothing was made");
    let shown: Ran = hapax(dir, &["config", "show"])
        .env("HAPAX_PROJECTION_URL", "cache:redis://me:secret@h")
        .output()
        .unwrap()
        .into();
    assert!(!shown.code(0).out.contains("secret"));
}

/// What was swept is not archived: neither a rebuild nor a comparison passes, and nothing is changed.
#[test]
#[cfg(feature = "opensearch")]
fn t350_a_rebuild_after_a_sweep_is_refused_and_an_empty_index_is_not_made() {
    let engine = std::env::var("HAPAX_TEST_OPENSEARCH_URL").expect("scripts/services up opensearch");
    let alias = format!("t_{}", hapax::records::Uuid::now_v7().simple());
    let to = format!("opensearch:{engine}/{alias}");
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let served = Server::start(dir, &["--data", "d"]);
    for n in 0..3 {
        let created = write(&served, "POST", "", &format!("k{n}"), &json!({"payload": {"n": n}}));
        let token = format!("orders/{}@1", created["id"].as_str().unwrap());
        let query =
            ["query", "records", "--module", "orders", "--data", "d", "--wait", "60s", "--after", &token];
        run(dir, &query).code(0);
    }
    drop(served);
    project(dir, "run", &["--to", &to, "--create", "--until-idle", "1"]).code(0);
    run(dir, &["journal", "sweep", "--older-than", "1ms", "--yes", "--data", "d"]).code(0);
    let stderr = project(dir, "rebuild", &["--to", &to]).code(1).err;
    assert!(stderr.contains("and of 2 other records") && stderr.contains("archive"), "{stderr}");
    let stdout = project(dir, "verify", &["--to", &to]).code(0).out;
    assert!(stdout.contains("3 records compared, all equal"), "{stdout}");
    // The index is lost. An empty one would lack what was applied.
    let removed = format!("{engine}/{alias}-*?allow_no_indices=true");
    let index = std::process::Command::new("curl")
        .args(["-sS", &format!("{engine}/_alias/{alias}")])
        .output()
        .unwrap();
    let index: Value = serde_json::from_slice(&index.stdout).unwrap();
    let index = index.as_object().unwrap().keys().next().unwrap().clone();
    let remove = ["-sS", "-X", "DELETE", &format!("{engine}/{index}")].map(str::to_owned);
    assert!(std::process::Command::new("curl").args(remove).status().unwrap().success());
    let stderr = project(dir, "run", &["--to", &to, "--create", "--until-idle", "1"]).code(4).err;
    assert!(stderr.contains("has applied events already") && stderr.contains("project rebuild"), "{stderr}");
    project(dir, "status", &["--to", &to]).code(1);
    let left = std::process::Command::new("curl").args(["-sS", &removed]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&left.stdout).trim(), "{}", "nothing was made");
}
