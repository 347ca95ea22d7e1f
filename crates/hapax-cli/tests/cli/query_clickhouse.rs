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
    let stderr = query(&["--count"]).code(3).err;
    assert!(stderr.contains("there is no read model in database") && !stderr.contains("s3cret"), "{stderr}");
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
        let stdout = query(&["--after", &token, "--sum", "/amount"]).code(0).out;
        assert!(stdout.contains("0.6"), "{stdout}");
        stdout.contains("complete up to ")
    });
    let stdout = query(&["--count", "--approximate"]).code(0).out;
    assert!(stdout.contains("approximate: versions that were replaced or deleted count"), "{stdout}");
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
    let stdout = run(dir, &["config", "show", "--data", "d", "--set", &set]).code(0).out;
    assert!(stdout.contains("clickhouse://hapax:***@") && !stdout.contains("s3cret"), "{stdout}");
}

/// What a read model cannot do, or cannot be, gets a sentence.
#[test]
fn a_read_model_that_is_not_there_gets_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let database = Database::new(dir);
    let stdout = run(dir, &["query", "schema", "--set", &database.set()]).code(0).out;
    assert!(
        stdout.contains(
            "ENGINE = ReplacingMergeTree(_version, _deleted) ORDER BY (tenant_id, module, record_id)"
        ),
        "{stdout}"
    );
    let wrong = format!("analytics.url=clickhouse://hapax:wr0ng@{}/{}", database.host, database.name);
    let stderr = refused(dir, &["--data", "d", "--set", &wrong]).code(3).err;
    assert!(stderr.contains("password is wrong") && !stderr.contains("wr0ng"), "{stderr}");
    let stderr = refused(dir, &["--data", "d", "--set", "analytics.url=clickhouse://h/a-b"]).code(2).err;
    assert!(stderr.contains("letters, digits and underscores"), "{stderr}");
    // A server that is away keeps nobody from working; whoever asks gets an error.
    let nobody = "analytics.url=clickhouse://127.0.0.1:1/x";
    let away = Server::start(dir, &["--data", "d", "--set", nobody]);
    let path = "/v1/analytics/modules/orders/records";
    request(&away.address, "GET", path, &[], b"").problem(503, "unavailable");
    let asked = ["query", "records", "--module", "orders", "--data", "d", "--set", nobody];
    let stderr = run(dir, &asked).code(3).err;
    assert!(stderr.contains("127.0.0.1:1 gives no answer"), "{stderr}");
    drop(away);
    // The embedded one writes no Parquet, and says who does.
    let server = Server::start(dir, &["--data", "d"]);
    let said = run(dir, &["query", "records", "--module", "orders", "--data", "d", "--format", "parquet"]);
    assert!(said.err.contains("one in ClickHouse does"), "{}", said.err);
    assert_eq!(said.code, Some(2), "{}", said.err);
    let said = run(dir, &["analytics", "rebuild", "--data", "d"]).code(2).err;
    assert!(said.contains("remove the model and start the server"), "{said}");
    let said = run(dir, &["query", "schema", "--data", "d", "--json"]).code(0).json();
    assert!(said["statements"][1].as_str().unwrap().contains("hapax_read_row"), "{said}");
    drop(server);
}

/// A record that never was is in the model. A rebuild beside the running server removes it, and the server goes on.
#[test]
fn a_read_model_is_built_again_while_it_answers() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let database = Database::new(dir);
    let set = database.set();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d", "--set", &set]);
    for n in 0..5 {
        create(&server, &format!("k{n}"), &json!({"n": n}));
    }
    let hapax = |args: &[&str]| -> Ran { run(dir, &[args, &["--data", "d", "--set", &set]].concat()) };
    hapax(&["verify", "analytics", "--wait", "60s"]).code(0);
    database.run(&format!(
        "INSERT INTO {}.data_records (tenant_id, module, record_id, payload, _version, _deleted, created_at, updated_at) VALUES
         ('00000000-0000-0000-0000-000000000000', 'orders', '00000000-0000-0000-0000-0000000000ff', '{{}}', {}, 0, now(), now())",
        database.name,
        (1_u64 << 48) + 1
    ));
    let said = hapax(&["verify", "analytics", "--wait", "1s"]).code(1).out;
    assert!(said.contains("ghost: ") && said.contains("1 differ"), "{said}");
    let rebuilt = hapax(&["analytics", "rebuild", "--json"]).code(0).json();
    assert_eq!(
        (&rebuilt["rebuilt"], &rebuilt["verified"]["records"]),
        (&json!("exchanged"), &json!(5)),
        "{rebuilt}"
    );
    let audit = hapax(&["--json", "audit", "ls", "--action", "analytics."]).code(0).json();
    let row = &audit["audit"][0];
    assert_eq!((&row["action"], &row["who"]), (&json!("analytics.rebuild"), &json!("tester")), "{audit}");
    assert!(row["target"].as_str().unwrap().starts_with("clickhouse:"), "{audit}");
    let last = create(&server, "k-last", &json!({"n": "last"}));
    let token = format!("orders/{}@{}", last["id"].as_str().unwrap(), last["seq"]);
    let asked =
        ["query", "records", "--module", "orders", "--count", "--after", &token, "--wait", "60s", "--json"];
    let asked = hapax(&asked).code(0).json();
    assert_eq!(asked["groups"][0]["count"], 6, "the server feeds the new table: {asked}");
    hapax(&["verify", "analytics", "--wait", "60s"]).code(0);
    let status = hapax(&["query", "status", "--json"]).code(0).json();
    assert_eq!(status["unfinished"], Value::Null, "{status}");

    // A server of another generation feeds nothing, and says what to do.
    drop(server);
    let later = ["--set", "analytics.generation=2", "--set", "relay.topic=events-2"];
    let server = Server::start(dir, &[&["--data", "d", "--set", &set], &later[..]].concat());
    let said = hapax(&[&["doctor"], &later[..]].concat()).out;
    assert!(said.contains("generation 1, and analytics.generation is 2"), "{said}");
    let said = hapax(&[&["analytics", "rebuild"], &later[..]].concat()).code(0).out;
    assert!(said.contains("6 records compared, all equal") && said.contains("is built again"), "{said}");
    drop(server);
    // The embedded one is a file.
    let said = run(dir, &["analytics", "rebuild", "--data", "d", "--set", "analytics.url=sqlite:d/other.db"])
        .code(3)
        .err;
    assert!(said.contains("there is no read model"), "{said}");
}
