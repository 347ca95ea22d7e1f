//! Tokens that tokens made, and tokens that somebody guesses.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;

use hapax::access::ApiToken;
use serde_json::{Value, json};

use crate::common::run;
use crate::serve_access::process::{PATIENCE, Server, raw, until};
use crate::serve_tenants::{id, token};

/// A token that ends must not leave behind one that does not, and what it made can be ended with it.
#[test]
fn t245_a_token_does_not_outlive_the_one_that_made_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (ops, brief) =
        (token(dir, &["--role", "admin"]), token(dir, &["--role", "admin", "--expires", "1h"]));
    let server = Server::start(dir, &[]);
    let make = |maker: &str, more: Value| {
        let mut body = json!({"name": "child", "role": "admin"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/tokens", maker, &body).is(201)
    };
    let of = |id: &str| {
        let all = run(dir, &["token", "ls", "--json"]).code(0).json()["tokens"].as_array().unwrap().clone();
        all.into_iter().find(|token| token["id"] == id).unwrap()
    };
    let end = of(id(&brief))["expires_at"].clone();
    let child = make(&brief, json!({}));
    assert_eq!((&child["expires_at"], &child["made_by"]), (&end, &json!(id(&brief))));
    assert_eq!(make(&brief, json!({"expires_s": 86_400}))["expires_at"], end);
    assert!(make(&brief, json!({"expires_s": 60}))["expires_at"].as_str() < end.as_str());
    let secret = child["token"].as_str().unwrap();
    let grandchild = make(secret, json!({"role": "read"}));
    assert_eq!((&grandchild["expires_at"], &grandchild["made_by"]), (&end, &child["id"]));
    assert_eq!(of(child["id"].as_str().unwrap())["made_by"], id(&brief), "the CLI shows it");
    assert_eq!(make(&ops, json!({}))["expires_at"], Value::Null);
    // What it made goes on, and is listed; or is ended with it.
    let revoke = |query: &str| {
        let bearer = format!("Bearer {ops}");
        let path = format!("/v1/tokens/{}{query}", id(&brief));
        server.ask("DELETE", &path, &[("authorization", &bearer)], &Value::Null).is(200)
    };
    let alone = revoke("");
    assert_eq!((&alone["state"], alone["children"].as_array().unwrap().len()), (&json!("revoked"), 3));
    server.get("/v1/info", secret).is(200);
    let ended = revoke("?children=true&reason=all");
    assert_eq!(ended["children"].as_array().unwrap().len(), 4, "{ended}");
    assert!(ended["children"].as_array().unwrap().iter().all(|child| child["state"] == "revoked"));
    for secret in [secret, grandchild["token"].as_str().unwrap()] {
        until("it is over", || server.get("/v1/info", secret).status == 401);
    }
    server.get("/v1/info", &ops).is(200);
    // The same by the command line.
    let maker = token(dir, &["--role", "admin"]);
    let child = make(&maker, json!({"name": "left"}));
    let stdout = run(dir, &["token", "revoke", id(&maker)]).code(0).out;
    assert!(stdout.contains(child["id"].as_str().unwrap()) && stdout.contains("--children"), "{stdout}");
    run(dir, &["token", "revoke", id(&maker), "--children"]).code(0);
    assert_eq!(of(child["id"].as_str().unwrap())["state"], "revoked");
}

/// Somebody tries tokens. They are told to wait, and nobody else waits.
#[test]
fn t246_unknown_tokens_are_limited_and_known_ones_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let known = token(dir, &["--role", "read"]);
    let server = Server::start(dir, &[]);
    server.get("/v1/info", &known).is(200);
    // Many in one go are quicker than the budget grows, on a slow machine too.
    let guesses = |count: usize| -> Vec<u8> {
        let guess = || {
            let token = ApiToken::generate();
            format!(
                "GET /v1/info HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nauthorization: Bearer {}\r\n\r\n",
                server.port,
                token.expose()
            )
        };
        let last = guess().replace("\r\n\r\n", "\r\nconnection: close\r\n\r\n");
        ((0..count).map(|_| guess()).collect::<String>() + &last).into_bytes()
    };
    let mut refused = String::new();
    until("a guess is refused", || {
        let all = raw(server.port, &guesses(400));
        refused = format!("{}{}", all.head, all.body);
        refused.contains(" 429 ")
    });
    assert!(refused.contains("rate-limited") && refused.contains("nobody knows"), "{refused}");
    assert!(refused.contains("retry-after: 1"), "{refused}");
    server.get("/v1/info", &known).is(200);
    // After a while a guess is looked up again.
    until("it is looked up", || server.get("/v1/info", ApiToken::generate().expose()).status == 401);
}

/// A page that shows live numbers is open when its token is revoked. It shows no more of them.
#[test]
fn t411_numbers_end_with_the_token_that_asked_for_them() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let make = || token(dir, &["--role", "admin"]);
    let (stays, ends) = (make(), make());
    let server = Server::start(dir, &[]);
    let listen = |token: &str| {
        let mut stream = TcpStream::connect(("127.0.0.1", server.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let head = format!(
            "GET /v1/overview/live HTTP/1.1\r\nhost: 127.0.0.1:{}\r\nauthorization: Bearer {token}\r\n\
             connection: close\r\n\r\n",
            server.port
        );
        stream.write_all(head.as_bytes()).unwrap();
        BufReader::new(stream).lines().map(Result::unwrap)
    };
    // It began first, so that it would also be the first to end after a minute.
    let (mut other, mut mine) = (listen(&stays), listen(&ends));
    let is_event = |line: &String| line.starts_with("event: ");
    assert_eq!(mine.find(is_event).as_deref(), Some("event: overview"));
    let path = format!("/v1/tokens/{}", id(&ends));
    let bearer = format!("Bearer {stays}");
    server.ask("DELETE", &path, &[("authorization", &bearer)], &Value::Null).is(200);
    let rest: Vec<String> = mine.filter(is_event).collect();
    assert!(rest.iter().all(|line| line == "event: overview"), "{rest:?}");
    // Many of its numbers are here already; then another one comes.
    for event in 0..rest.len() + 3 {
        assert!(other.find(is_event).is_some(), "after {event} events the other one ended, too");
    }
}
