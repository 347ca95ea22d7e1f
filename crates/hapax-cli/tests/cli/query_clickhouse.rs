//! The read model in ClickHouse: a server that feeds it, and questions over HTTP and on the command line.

#![cfg(feature = "clickhouse")]
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::path::Path;

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::serve::{Server, refused, request};
use crate::common::{Ran, hapax, run};

/// A database of this test's own. It goes when this is dropped.
pub struct Database {
    host: String,
    pub name: String,
}

impl Database {
    pub fn new(dir: &Path) -> Self {
        let url = std::env::var("HAPAX_TEST_CLICKHOUSE_URL").unwrap_or_else(|_| {
            panic!("HAPAX_TEST_CLICKHOUSE_URL is not set: run `scripts/services up` and `eval \"$(scripts/services env)\"`")
        });
        let name = run(dir, &["id", "make"]).code(0).out.trim().replace('-', "_");
        let host = url.strip_prefix("clickhouse://").unwrap().to_owned();
        Database { host, name: format!("hapax_cli_{name}") }
    }

    pub fn set(&self) -> String {
        format!("analytics.url=clickhouse://hapax:s3cret%2F%26%3F@{}/{}", self.host, self.name)
    }

    /// Runs a statement; the status and what it says, 0 if nobody answers.
    pub fn sql(&self, sql: &str) -> (u16, String) {
        let Ok(answer) = self.send(sql) else { return (0, String::new()) };
        let status = answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        (status, answer.split_once("\r\n\r\n").map_or_else(String::new, |(_, body)| body.to_owned()))
    }

    /// Sends a statement; what the server says, with its headers.
    fn send(&self, sql: &str) -> std::io::Result<String> {
        let mut stream = std::net::TcpStream::connect(&self.host)?;
        let head = format!(
            "POST / HTTP/1.1\r\nHost: c\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
            sql.len()
        );
        stream.write_all((head + sql).as_bytes())?;
        let mut said = Vec::new();
        stream.read_to_end(&mut said)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    pub fn run(&self, sql: &str) {
        let said = self.send(sql).unwrap();
        assert!(said.starts_with("HTTP/1.1 200"), "{sql}: {said}");
    }

    /// The one number that a question is answered with.
    pub fn ask(&self, sql: &str) -> u64 {
        let said = self.send(sql).unwrap();
        let number = said.lines().find_map(|line| line.trim().parse().ok().filter(|_| !line.contains(':')));
        let chunked = said.to_ascii_lowercase().contains("transfer-encoding: chunked");
        let last = said.split("\r\n\r\n").nth(1).unwrap_or_default();
        let number =
            if chunked { last.lines().nth(1).and_then(|line| line.trim().parse().ok()) } else { number };
        number.unwrap_or_else(|| panic!("{sql}: {said}"))
    }
}

impl Drop for Database {
    fn drop(&mut self) {
        self.sql(&format!("DROP DATABASE IF EXISTS {}", self.name));
    }
}

fn create(server: &Server, key: &str, payload: &Value) -> Value {
    let headers = [("content-type", "application/json"), ("idempotency-key", key)];
    let body = json!({"payload": payload}).to_string();
    let answer = request(&server.address, "POST", "/v1/modules/orders/records", &headers, body.as_bytes());
    assert!([200, 201].contains(&answer.status), "{answer:?}");
    answer.json()
}

/// From a POST with a retry to an answer out of ClickHouse, and on from there when the server is started again.
#[test]
fn what_is_written_is_counted_once_in_clickhouse() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let database = Database::new(dir);
    let set = database.set();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let query = |args: &[&str]| -> Ran {
        run(dir, &[&["query", "records", "--module", "orders", "--data", "d", "--set", &set], args].concat())
    };
    let told = query(&["--count"]).code(3).err;
    assert!(told.contains("there is no read model in database") && !told.contains("s3cret"), "{told}");
    let mut server = Server::start(dir, &["--data", "d", "--set", &set]);
    let mut newest = Value::Null;
    for n in 0..6 {
        for _ in 0..2 {
            let status = format!("s{}", n % 2);
            newest = create(&server, &format!("k{n}"), &json!({"amount": 0.1, "status": status})); // the second is a retry
        }
        if n == 2 {
            assert!(server.stop().is_some());
            server = Server::start(dir, &["--data", "d", "--set", &set]);
        }
    }
    let token = format!("orders/{}@{}", newest["id"].as_str().unwrap(), newest["seq"]);
    wait_until("all are there", || {
        let rest = "/v1/analytics/modules/orders/tally?sum=/amount&group_by=/status";
        let tally = request(&server.address, "GET", rest, &[], b"").is(200);
        let counts: Vec<_> =
            tally["groups"].as_array().unwrap().iter().map(|group| &group["count"]).collect();
        counts == [3, 3] && tally["groups"][0]["measures"][0]["value"] == json!(0.3)
    });
    wait_until("it is known how current it is", || {
        let told = query(&["--after", &token, "--sum", "/amount"]).code(0).out;
        assert!(told.contains("0.6"), "{told}");
        told.contains("complete up to ")
    });
    let told = query(&["--count", "--approximate"]).code(0).out;
    assert!(told.contains("approximate: versions that were replaced or deleted count"), "{told}");
    assert_eq!(query(&["--json", "--limit", "4"]).code(0).json()["records"].as_array().unwrap().len(), 4);
    assert_eq!(query(&["--format", "csv"]).code(0).out.lines().count(), 7);
    let whole = ["query", "records", "--module", "orders", "--data", "d", "--format", "parquet"];
    let file = hapax(dir, &[&whole[..], &["--set", &set]].concat()).output().unwrap();
    assert_eq!(file.status.code(), Some(0), "{}", String::from_utf8_lossy(&file.stderr));
    assert!(file.stdout.starts_with(b"PAR1") && file.stdout.ends_with(b"PAR1"), "a Parquet file");
    assert!(String::from_utf8_lossy(&file.stderr).contains("complete up to "));
    query(&["--format", "parquet", "--limit", "3"]).code(2);
    query(&["--format", "parquet", "--json"]).code(2);
    let status = run(dir, &["query", "status", "--data", "d", "--json", "--set", &set]).code(0).json();
    assert_eq!(status["rejected"], json!([]), "{status}");
    let told = run(dir, &["config", "show", "--data", "d", "--set", &set]).code(0).out;
    assert!(told.contains("clickhouse://hapax:***@") && !told.contains("s3cret"), "{told}");
}

/// What a read model cannot do, or cannot be, gets a sentence.
#[test]
fn a_read_model_that_is_not_there_gets_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let database = Database::new(dir);
    let told = run(dir, &["query", "schema", "--set", &database.set()]).code(0).out;
    assert!(
        told.contains(
            "ENGINE = ReplacingMergeTree(_version, _deleted) ORDER BY (tenant_id, module, record_id)"
        ),
        "{told}"
    );
    let wrong = format!("analytics.url=clickhouse://hapax:wr0ng@{}/{}", database.host, database.name);
    let told = refused(dir, &["--data", "d", "--set", &wrong]).code(3).err;
    assert!(told.contains("password is wrong") && !told.contains("wr0ng"), "{told}");
    let told = refused(dir, &["--data", "d", "--set", "analytics.url=clickhouse://h/a-b"]).code(2).err;
    assert!(told.contains("letters, digits and underscores"), "{told}");
    // A server that is away keeps nobody from working; who asks is told.
    let nobody = "analytics.url=clickhouse://127.0.0.1:1/x";
    let away = Server::start(dir, &["--data", "d", "--set", nobody]);
    let path = "/v1/analytics/modules/orders/records";
    request(&away.address, "GET", path, &[], b"").problem(503, "unavailable");
    let asked = ["query", "records", "--module", "orders", "--data", "d", "--set", nobody];
    let told = run(dir, &asked).code(3).err;
    assert!(told.contains("127.0.0.1:1 gives no answer"), "{told}");
    drop(away);
    // The embedded one writes no Parquet, and says who does.
    let server = Server::start(dir, &["--data", "d"]);
    let told = run(dir, &["query", "records", "--module", "orders", "--data", "d", "--format", "parquet"]);
    assert!(told.err.contains("one in ClickHouse does"), "{}", told.err);
    assert_eq!(told.code, Some(2), "{}", told.err);
    let told = run(dir, &["query", "schema", "--data", "d", "--json"]).code(0).json();
    assert!(told["statements"][1].as_str().unwrap().contains("hapax_read_row"), "{told}");
    drop(server);
}
