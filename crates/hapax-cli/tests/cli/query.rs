//! The read model, as a newcomer has it: posts to a server, and questions over HTTP and on the command line.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader};
use std::path::Path;

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::serve::{Answer, Server, request};
use crate::common::{Ran, hapax, run};

const A: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
const B: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000b";

fn started(dir: &Path) -> Server {
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    Server::start(dir, &["--data", "d"])
}

fn send(server: &Server, tenant: Option<&str>, method: &str, path: &str, key: &str, body: &Value) -> Answer {
    let mut headers = vec![("content-type", "application/json"), ("idempotency-key", key)];
    headers.extend(tenant.map(|tenant| ("hapax-tenant", tenant)));
    let send = || request(&server.address, method, path, &headers, body.to_string().as_bytes());
    // As a client does: if others keep the file locked for long it tries again, and the key makes a second request harmless.
    let mut answer = send();
    for _ in 0..20 {
        if answer.status != 503 {
            break;
        }
        answer = send();
    }
    answer
}

fn create(server: &Server, tenant: Option<&str>, key: &str, payload: &Value) -> Value {
    let answer =
        send(server, tenant, "POST", "/v1/modules/orders/records", key, &json!({"payload": payload}));
    assert!([200, 201].contains(&answer.status), "{answer:?}");
    answer.json()
}

fn token(record: &Value) -> String {
    format!("orders/{}@{}", record["id"].as_str().unwrap(), record["seq"])
}

fn ask(server: &Server, tenant: Option<&str>, rest: &str) -> Answer {
    let headers: Vec<_> = tenant.map(|tenant| ("hapax-tenant", tenant)).into_iter().collect();
    request(&server.address, "GET", &format!("/v1/analytics/modules/orders/{rest}"), &headers, b"")
}

/// From a POST with a retry to an answer, over HTTP and on the command line.
#[test]
fn what_is_written_is_counted_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = started(dir);
    let mut newest = Value::Null;
    for (n, amount) in ["0.10", "0.20", "7"].iter().enumerate() {
        let payload: Value =
            serde_json::from_str(&format!(r#"{{"amount": {amount}, "status": "s{}"}}"#, n % 2)).unwrap();
        for _ in 0..2 {
            newest = create(&server, None, &format!("k{n}"), &payload); // the second is a retry
        }
    }
    let wait = format!("after_write={}&wait_ms=30000", token(&newest));
    let page = ask(&server, None, &format!("records?limit=2&{wait}")).is(200);
    assert_eq!(page["records"].as_array().unwrap().len(), 2, "{page}");
    let next = page["next"].as_str().unwrap();
    let rest = ask(&server, None, &format!("records?after={next}")).is(200);
    assert_eq!(rest["records"], json!([newest]));
    let tally = ask(&server, None, "tally?sum=/amount&max=/amount&group_by=/status").is(200);
    let groups = tally["groups"].as_array().unwrap();
    assert_eq!((&groups[0]["key"], &groups[0]["count"]), (&json!("s0"), &json!(2)), "{tally}");
    assert_eq!(groups[0]["measures"][0]["value"], json!(7.1), "{tally}");
    assert_eq!(groups[1]["measures"][1]["value"], json!(0.2), "{tally}");
    wait_until("it is known how current it is", || {
        !ask(&server, None, "tally").is(200)["meta"]["lastSyncAt"].is_null()
    });

    // The same on the command line, also while the server runs.
    let query = |args: &[&str]| {
        run(dir, &[&["query", "records", "--module", "orders", "--data", "d"], args].concat())
    };
    let stdout = query(&["--sum", "/amount"]).code(0).out;
    assert!(stdout.contains("7.3") && stdout.contains("complete up to "), "{stdout}");
    assert_eq!(query(&["--json"]).code(0).json()["records"].as_array().unwrap().len(), 3);
    let stdout = query(&["--after", &token(&newest), "--limit", "1"]).code(0).out;
    assert!(stdout.contains("1 record; ") && stdout.contains("more: --cursor "), "{stdout}");
    let csv = query(&["--format", "csv"]).code(0).out;
    assert_eq!(csv.lines().count(), 4, "{csv}");
    assert!(csv.contains(r#""{""amount"":0.1"#) || csv.contains(r#"""amount"":0.10"#), "{csv}");
    let status = run(dir, &["query", "status", "--data", "d", "--json"]).code(0).json();
    assert_eq!(status["partitions"].as_array().unwrap().len(), 4, "{status}");
    assert_eq!(status["rejected"], json!([]));
    // What is changed and deleted is current too.
    let id = newest["id"].as_str().unwrap();
    let path = format!("/v1/modules/orders/records/{id}?expected_seq=1");
    let gone = send(&server, None, "DELETE", &path, "k9", &Value::Null).is(200);
    let wait = format!("after_write={}&wait_ms=30000", token(&gone));
    assert_eq!(ask(&server, None, &format!("tally?{wait}")).is(200)["groups"][0]["count"], 2);
}

/// A server that is killed between any two steps loses and doubles nothing in its read model.
#[test]
fn a_killed_server_counts_each_record_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut server = started(dir);
    let mut last = Value::Null;
    for round in 0..3 {
        for n in 0..20 {
            last = create(&server, None, &format!("k{round}-{n}"), &json!({"amount": 1}));
        }
        server.signal("-KILL");
        server.ended();
        server = Server::start(dir, &["--data", "d"]);
    }
    // The members that were killed keep their partitions until their sessions are over.
    let mut tally = Value::Null;
    wait_until("all are there", || {
        tally = ask(&server, None, "tally?sum=/amount").is(200);
        tally["groups"][0]["count"] == 60
    });
    ask(&server, None, &format!("records?after_write={}", token(&last))).is(200);
    assert_eq!(tally["groups"][0]["measures"][0]["value"], 60, "{tally}");
    assert!(server.stop().is_some());
    let stdout = run(dir, &["query", "records", "--module", "orders", "--data", "d", "--count"]).code(0).out;
    assert!(stdout.lines().any(|line| line == "60"), "{stdout}");
}

/// No question shows another tenant's records, whatever it says.
#[test]
fn tenants_do_not_see_each_other() {
    let dir = tempfile::tempdir().unwrap();
    let server = started(dir.path());
    let of_a = create(&server, Some(A), "k", &json!({"secret": "of-a", "amount": 41}));
    let of_b = create(&server, Some(B), "k", &json!({"secret": "of-b", "amount": 1}));
    for (tenant, record) in [(A, &of_a), (B, &of_b)] {
        let wait = format!("after_write={}&wait_ms=30000", token(record));
        let list = ask(&server, Some(tenant), &format!("records?{wait}")).is(200);
        assert_eq!(list["records"], json!([record]));
        let tally = ask(&server, Some(tenant), "tally?sum=/amount&group_by=/secret").is(200);
        assert_eq!(tally["groups"].as_array().unwrap().len(), 1, "{tally}");
    }
    // A token of another tenant's write shows nothing of it.
    let foreign = format!("records?after_write={}&wait_ms=0", token(&of_a));
    let problem = ask(&server, Some(B), &foreign).problem(409, "conflict");
    assert!(problem.contains("the record is not there"), "{problem}");
    for rest in ["records", "tally?group_by=/secret", "records?after=00000000-0000-0000-0000-000000000000"] {
        let answer = ask(&server, None, rest).is(200).to_string();
        assert!(!answer.contains("of-"), "{answer}");
    }
    for hostile in ["' OR 1=1 --", "*", "00000000-0000-0000-0000-000000000000"] {
        let answer = ask(&server, Some(hostile), "records");
        answer.problem(400, "invalid");
    }
}

/// A mistake gets a sentence that says what, where and the limit.
#[test]
fn mistakes_get_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = started(dir);
    for (rest, word) in [
        ("records?since=7x", "for example 7d"),
        ("records?limit=1001", "1 to 1000"),
        ("records?limit=0", "1 to 1000"),
        ("records?after=x", "the id of a record"),
        ("records?after_write=orders@7", "MODULE/ID@SEQ"),
        ("records?wait_ms=30001", "up to 30000"),
        ("records?other=1", "other"),
        ("tally?sum=amount", "begins with a slash"),
        ("tally?sum=/a,,/b", "begins with a slash"),
        ("tally?group_by=/a~2", "after ~ comes 0 or 1"),
    ] {
        let problem = ask(&server, None, rest).problem(400, "invalid");
        assert!(problem.contains(word), "{rest}: {problem}");
    }
    let many = vec!["/a"; 17].join(",");
    assert!(
        ask(&server, None, &format!("tally?sum={many}")).problem(400, "invalid").contains("the limit is 16")
    );
    let path = "/v1/analytics/modules/Orders/records";
    request(&server.address, "GET", path, &[], b"").problem(400, "invalid");
    let command = |args: &[&str]| run(dir, &[&["query"], args].concat());
    let stderr = command(&["records", "--module", "orders", "--data", "nowhere"]).code(3).err;
    assert!(
        stderr.contains("there is no read model at nowhere") && stderr.contains("--data nowhere serve"),
        "{stderr}"
    );
    assert!(!dir.join("nowhere").exists(), "looking makes nothing");
    command(&["records", "--module", "Orders", "--data", "d"]).code(2);
    command(&["records", "--module", "orders", "--data", "d", "--sum", "x"]).code(2);
    command(&["records", "--module", "orders", "--data", "d", "--count", "--limit", "3"]).code(2);
    command(&["records", "--module", "orders", "--data", "d", "--json", "--format", "csv"]).code(2);
    command(&["drop", "--topic", "events", "--partition", "0", "--offset", "5", "--data", "d"]).code(4);
    let stderr = command(&["status", "--bus", "kafka://127.0.0.1:1"]).code(2).err;
    assert!(stderr.contains("analytics.url is unset"), "{stderr}");
}

/// A server may leave the feed, or have no read model at all.
#[test]
fn a_server_without_a_feed_answers_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut server = started(dir);
    let record = create(&server, None, "k", &json!({}));
    ask(&server, None, &format!("records?after_write={}&wait_ms=30000", token(&record))).is(200);
    server.stop();
    let server = Server::start(dir, &["--data", "d", "--without", "analytics"]);
    assert_eq!(ask(&server, None, "tally").is(200)["groups"][0]["count"], 1);
    drop(server);
    std::fs::create_dir(dir.join("j")).unwrap();
    let server = Server::start(dir, &["--data", "d", "--journal", "dir:j"]);
    let problem = ask(&server, None, "records").problem(501, "unsupported");
    assert!(problem.contains("analytics.url"), "{problem}");
}

/// A file of several pages is as current as its first page: what was written while it was printed may be missing in
/// it.
#[test]
fn t334_a_file_is_as_current_as_its_first_page() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = started(dir);
    // Two pages: one ends after 8 MiB.
    let payload = json!({"text": "x".repeat(800 << 10)});
    let mut newest = Value::Null;
    for n in 0..12 {
        newest = create(&server, None, &format!("k{n}"), &payload);
    }
    ask(&server, None, &format!("tally?after_write={}&wait_ms=30000", token(&newest))).is(200);
    let synced = || ask(&server, None, "tally").is(200)["meta"]["lastSyncAt"].as_str().map(ToOwned::to_owned);
    wait_until("it is known how current it is", || synced().is_some());
    let args = ["query", "records", "--module", "orders", "--data", "d", "--format", "csv"];
    let mut child = hapax(dir, &args).spawn().unwrap();
    // A pipe has no room for a page, so the command waits within the first one.
    let mut out = BufReader::new(child.stdout.take().unwrap());
    out.read_line(&mut String::new()).unwrap();
    let first = synced();
    wait_until("the read model has gone on", || synced() > first);
    assert_eq!(out.lines().count(), 12);
    let ran = Ran::from(child.wait_with_output().unwrap()).code(0);
    let reached = ran.err.split("complete up to ").nth(1).and_then(|rest| rest.split_whitespace().next());
    assert!(reached.is_some_and(|reached| Some(reached) <= first.as_deref()), "{} {first:?}", ran.err);
}

/// Without a server no pulse arrives: after five seconds the answer says that it is not current, and with a server it is again.
#[test]
fn an_answer_without_a_server_is_called_stale() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = started(dir);
    let record = create(&server, None, "one", &json!({"n": 1}));
    let after = token(&record);
    let asked = |more: &[&str]| {
        let args = ["query", "records", "--data", "d", "--module", "orders"];
        run(dir, &[&args[..], more].concat()).code(0)
    };
    asked(&["--after", &after, "--wait", "60s"]);
    let is_stale = || {
        let (said, answer) = (asked(&[]), asked(&["--format", "json"]).out);
        let text = format!("{}{}", said.out, said.err);
        let is_stale = text.contains("(stale: is `hapax serve` running?)");
        assert!(text.contains("complete up to") || is_stale, "{text}");
        (is_stale, answer.contains("\"stale\":true"))
    };
    wait_until("it is current", || is_stale() == (false, false));
    assert_eq!(ask(&server, None, "tally").is(200)["meta"]["stale"], false);
    drop(server);
    wait_until("it is stale", || is_stale() == (true, true));
    let server = Server::start(dir, &["--data", "d"]);
    wait_until("it is current again", || ask(&server, None, "tally").is(200)["meta"]["stale"] == false);
}
