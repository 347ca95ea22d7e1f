//! What is wrong with a request is said in the server's words: what, where, and what it takes.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};
use tempfile::tempdir;

use crate::common::run;
use crate::common::serve::{Answer, Server, request};

/// How the parsers speak, to those who know them.
const FOREIGN: [&str; 17] = [
    "invalid type",
    "invalid value",
    "invalid length",
    "missing field",
    "unknown field",
    "unknown variant",
    "duplicate field",
    ", expected",
    "expected value",
    "u64",
    "i64",
    "struct ",
    "recursion",
    "EOF",
    "target type",
    "digit found",
    "Failed to",
];

fn is_plain(answer: &Answer, asked: &str) -> String {
    let detail = answer.json()["detail"].as_str().unwrap_or_else(|| panic!("{asked}: {answer:?}")).to_owned();
    for words in FOREIGN {
        assert!(!detail.contains(words), "{asked}: {detail}");
    }
    assert!(!detail.chars().any(char::is_control), "{asked}: {detail:?}");
    detail
}

fn ask(server: &Server, method: &str, path: &str, body: &[u8]) -> Answer {
    // A key each: what was done must not be in the way of what comes next.
    static ASKED: AtomicU64 = AtomicU64::new(0);

    let key = format!("words-{}", ASKED.fetch_add(1, Ordering::Relaxed));
    let headers = [("content-type", "application/json"), ("idempotency-key", key.as_str())];
    request(&server.address, method, path, &headers, body)
}

fn nested(levels: usize) -> String {
    format!("{}{}", "[".repeat(levels), "]".repeat(levels))
}

/// Every route that takes a body, and every parameter that takes a number, as the description lists them.
#[test]
fn t540_no_route_answers_in_the_words_of_its_parser() {
    let dir = tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let api = server.get("/openapi.json").is(200);
    let (mut bodies, mut numbers) = (0, 0);
    for (template, operations) in api["paths"].as_object().unwrap() {
        let path =
            template.replace("{slug}", "orders").replace("{id}", "0190d3a0-5b7e-7c3a-9f51-00000000000a");
        let path = path.replace(['{', '}'], "");
        for (method, operation) in operations.as_object().unwrap() {
            let method = method.to_uppercase();
            if operation["requestBody"].is_object() {
                bodies += 1;
                for body in [
                    "",
                    "{",
                    "[]",
                    "[7]",
                    "7",
                    "-1",
                    "1.5",
                    "1e999",
                    "null",
                    "true",
                    "\"x\"",
                    "\"\\u001b[2J\"",
                    "{\"\\u001b[2J\": 1}",
                    "{\"id\" 7}",
                    "{}",
                    "{} {}",
                    "nul",
                    "\u{fffd}",
                    &nested(400),
                ] {
                    let asked = format!("{method} {path} {body:.60}");
                    let answer = ask(&server, &method, &path, body.as_bytes());
                    // A body of which all members may be missing.
                    if body == "{}" && answer.json()["code"] != "json-invalid" {
                        continue;
                    }
                    assert_eq!(answer.problem(400, "json-invalid"), is_plain(&answer, &asked), "{asked}");
                }
                every_member(&server, &api, operation, &method, &path);
            }
            for parameter in operation["parameters"].as_array().into_iter().flatten() {
                let kinds = parameter["schema"]["type"].to_string();
                if parameter["in"] != "query" || !kinds.contains("integer") {
                    continue;
                }
                numbers += 1;
                let name = parameter["name"].as_str().unwrap();
                let schema = &parameter["schema"];
                let is_signed = schema["minimum"].is_null();
                let max = match &schema["maximum"] {
                    Value::Null if is_signed => i64::MAX.to_string(),
                    Value::Null => u64::MAX.to_string(),
                    max => max.to_string(),
                };
                for value in ["99999999999999999999", "-1", "x", ""] {
                    if is_signed && value == "-1" {
                        continue;
                    }
                    let asked = format!("{path}?{name}={value}");
                    let answer = ask(&server, &method, &asked, b"");
                    let detail = is_plain(&answer, &asked);
                    let is_missing = answer.status == 400 && detail.contains("is missing");
                    let says = detail.contains(name) && detail.contains(&max);
                    assert!(is_missing || says, "{asked}: {detail}");
                }
            }
        }
    }
    assert!(bodies >= 15 && numbers >= 10, "{bodies} bodies, {numbers} numbers");
}

/// Each member of a body with values of types that it does not take.
fn every_member(server: &Server, api: &Value, operation: &Value, method: &str, path: &str) {
    let mut schema = &operation["requestBody"]["content"]["application/json"]["schema"];
    if let Some(name) = schema["$ref"].as_str() {
        schema = api.pointer(name.strip_prefix('#').unwrap()).unwrap();
    }
    for name in schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name) {
        for value in ["-1", "1e30", "\"\\u001b\"", "[[]]", "{\"x\": {}}", "true"] {
            let body = format!("{{{name:?}: {value}}}");
            let answer = ask(server, method, path, body.as_bytes());
            if answer.json()["code"] == "json-invalid" {
                is_plain(&answer, &format!("{method} {path} {body}"));
            }
        }
    }
}

#[test]
fn t541_what_is_wrong_with_a_body_is_said_with_its_place_and_its_limit() {
    let dir = tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let says = |path: &str, body: &str, says: &str| {
        let answer = ask(&server, "POST", path, body.as_bytes());
        assert_eq!(answer.problem(400, "json-invalid"), says, "{path} {body:.80}");
    };
    let claim = |body: &str, sentence: &str| says("/v1/claims", body, sentence);
    claim("", "the body is empty; it must be a JSON object");
    claim("[]", "the body is an array; it must be a JSON object");
    claim("7", "the body is 7; it must be a JSON object");
    claim(r#"{"scope": "s"}"#, "`id` is missing in the body");
    claim(r#"{"scope": "s", "id": 7}"#, "`id` is 7; it must be a string");
    claim(r#"{"scope": "s", "scope": "s"}"#, "`scope` is in the body twice");
    claim(
        r#"{"scope": "s", "id": "i", "mode": "twice"}"#,
        "`mode` is \"twice\"; it must be \"lease\" or \"at_most_once\"",
    );
    claim(r#"{"scope": "s", "id": "i", "mode": 7}"#, "`mode` is 7; it must be \"lease\" or \"at_most_once\"");
    for value in ["-1", "1.5", "\"x\"", "[]"] {
        let shown = if value == "[]" { "an array" } else { value };
        claim(
            &format!(r#"{{"scope": "s", "id": "i", "lease_ms": {value}}}"#),
            &format!("`lease_ms` is {shown}; it must be a whole number from 1 to 86400000"),
        );
    }
    claim(
        r#"{"scope": "s", "id": "i", "leas_ms": 1}"#,
        "the body has no `leas_ms`; it takes `scope`, `id`, `time`, `mode`, `lease_ms`, `request_id`, `kind`, \
         `payload`, `fingerprint` and `metadata`",
    );
    claim("{\"scope\": \"s\",\n \"id\" 7}", "the body is not JSON: a colon is missing at line 2, column 7");
    says(
        "/v1/claims/batch",
        r#"{"claims": [{"scope": "s", "id": "i"}, {"scope": "s"}]}"#,
        "`id` is missing in `claims[1]`",
    );
    says(
        "/v1/claims/batch",
        r#"{"claims": [{"scope": "s", "id": "i", "lease_ms": -1}]}"#,
        "`claims[0].lease_ms` is -1; it must be a whole number from 1 to 86400000",
    );
    says(
        "/v1/claims/done",
        r#"{"scope": "s", "id": "i", "token": 9223372036854775808}"#,
        "`token` is 9223372036854775808; it must be a whole number from -9223372036854775808 to 9223372036854775807",
    );
    let metadata = |levels| format!(r#"{{"scope": "s", "id": "i", "metadata": {}}}"#, nested(levels));
    claim(&metadata(127), "`metadata` makes the body nest deeper than 127 levels, which is the limit");
    claim(&metadata(300), "`metadata` makes the body nest deeper than 127 levels, which is the limit");
    ask(&server, "POST", "/v1/claims", metadata(126).as_bytes()).is(200);
    let put = "/v1/modules/orders/records/0190d3a0-5b7e-7c3a-9f51-00000000000a";
    let answer = ask(&server, "PUT", put, br#"{"payload": {}, "expected_seq": -1}"#);
    assert_eq!(
        answer.problem(400, "json-invalid"),
        "`expected_seq` is -1; it must be a whole number from 0 to 18446744073709551615"
    );
    // What is too long to read is cut.
    let long = json!({"scope": "s", "id": "i", "mode": "x".repeat(5000)}).to_string();
    let answer = ask(&server, "POST", "/v1/claims", long.as_bytes());
    assert!(answer.problem(400, "json-invalid").len() < 200, "{answer:?}");
}

#[test]
fn t542_what_is_wrong_with_a_parameter_is_said_with_its_limit() {
    let dir = tempdir().unwrap();
    let server = Server::start(dir.path(), &[]);
    let says = |path: &str, says: &str| {
        let detail = server.get(path).problem(400, "invalid");
        assert!(detail.ends_with(says), "{path}: {detail}");
    };
    says(
        "/v1/journal/events?limit=99999999999999999999",
        "limit is \"99999999999999999999\"; it must be a whole number from 1 to 1000",
    );
    says("/v1/journal/events?limit=-1", "limit is \"-1\"; it must be a whole number from 1 to 1000");
    says(
        "/v1/journal/aggregates/a?from=99999999999999999999",
        "from is \"99999999999999999999\"; it must be a whole number from 1 to 18446744073709551615",
    );
    says("/v1/journal/events?all_tenants=yes", "all_tenants is \"yes\"; it must be true or false");
    says("/v1/processed?scope=s", "id is missing");
    says("/v1/processed?scope=s&scope=t&id=i", "scope is there twice");
    says("/v1/processed?scope=s&id=i&x=1", "there is no parameter `x`; there are `scope`, `id` and `time`");
}
