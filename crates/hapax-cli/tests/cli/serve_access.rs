//! Who may do what on the server: tokens, roles, tenants, scopes, rates and the audit, on the real process.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_push_string)]

pub mod process;

use std::path::Path;

use serde_json::{Value, json};

use crate::common::{Ran, hapax, run};
use process::{PATIENCE, Server, ask, port, raw, until};

/// Makes a token by the CLI.
fn token(dir: &Path, args: &[&str]) -> String {
    run(dir, &[&["token", "create", "--name", "test"], args].concat()).code(0).out.trim().to_owned()
}

fn id(token: &str) -> &str {
    &token[4..20]
}

const LOOK: &str = "/v1/processed?scope=mailer&id=e1";

fn claim(scope: &str, event: &str) -> Value {
    json!({"scope": scope, "id": event, "lease_ms": 60_000})
}

/// What each operation needs. An operation that is not here has no rule, and fails the test.
#[allow(clippy::match_same_arms)] // a line per part of the API
fn rule(method: &str, path: &str) -> Option<&'static str> {
    Some(match (method, path) {
        ("get", "/healthz" | "/readyz") => "open",
        ("get", "/metrics" | "/v1/processed" | "/v1/info" | "/v1/journal/events" | "/v1/keys/{key}") => {
            "read"
        }
        ("get", "/v1/journal/aggregates/{aggregate}") => "read",
        ("post", "/v1/journal/append" | "/v1/claims" | "/v1/claims/batch") => "write",
        ("post", "/v1/claims/done" | "/v1/claims/done/batch" | "/v1/claims/fail") => "write",
        ("post", "/v1/claims/extend" | "/v1/claims/release") => "write",
        ("get", "/v1/dead" | "/v1/parked" | "/v1/held" | "/v1/lost" | "/v1/keys" | "/v1/stats") => "admin",
        ("post", "/v1/dead/redrive" | "/v1/dead/drop" | "/v1/parked/release") => "admin",
        ("get", "/v1/tokens" | "/v1/audit") | ("delete", "/v1/tokens/{id}") => "admin",
        ("post", "/v1/tokens" | "/v1/tokens/{id}/rotate") => "admin",
        ("get", "/v1/analytics/status") => "admin",
        ("get", "/v1/session") => "read",
        ("post", "/v1/login" | "/v1/logout") => "login",
        ("get", "/v1/overview" | "/v1/overview/live" | "/v1/explain" | "/v1/waiting") => "admin",
        ("get", "/v1/dead/groups" | "/v1/retention" | "/v1/doctor") | ("post", "/v1/dead/preview") => "admin",
        ("get", path) if path.starts_with("/v1/modules/") || path.starts_with("/v1/analytics/modules/") => {
            "read"
        }
        ("post" | "put" | "patch" | "delete", path) if path.starts_with("/v1/modules/{slug}/records") => {
            "write"
        }
        _ => return None,
    })
}

/// Every operation of the API's own description, with every kind of caller.
#[test]
fn t185_every_route_asks_for_its_role() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let roles = ["read", "write", "admin"];
    let good: Vec<_> = roles.iter().map(|role| token(dir, &["--role", role])).collect();
    let revoked = token(dir, &["--role", "admin"]);
    run(dir, &["token", "revoke", id(&revoked)]).code(0);
    let server = Server::start(dir, &[]);
    let api = server.ask("GET", "/openapi.json", &[], &Value::Null).is(200);
    let mut asked = 0;
    for (path, item) in api["paths"].as_object().unwrap() {
        for method in item.as_object().unwrap().keys() {
            let rule = rule(method, path).unwrap_or_else(|| panic!("{method} {path} has no rule"));
            // A name in the path that is valid everywhere it could be one.
            let (open, target) = (path.find('{'), path.find('}'));
            let target = match (open, target) {
                (Some(open), Some(close)) => format!("{}x{}", &path[..open], &path[close + 1..]),
                _ => path.clone(),
            };
            let target = target.replace("{id}", "x").replace("/live", "/live?seconds=1");
            let (method, body) = (method.to_uppercase(), json!({}));
            let body = if method == "GET" { Value::Null } else { body };
            let needed = roles.iter().position(|role| *role == rule);
            let Some(needed) = needed else {
                let status = server.ask(&method, &target, &[], &body).status;
                // Without a token nobody is logged in.
                let answers: &[u16] = if rule == "login" { &[204, 400] } else { &[200, 503] };
                assert!(answers.contains(&status), "{path}: {status}");
                continue;
            };
            server.ask(&method, &target, &[], &body).unauthenticated();
            let bad = [("authorization", &*format!("Bearer {revoked}"))];
            assert_eq!(server.ask(&method, &target, &bad, &body).unauthenticated(), "the token is not valid");
            for (has, token) in good.iter().enumerate() {
                let with = [("authorization", &*format!("Bearer {token}"))];
                let answer = server.ask(&method, &target, &with, &body);
                if has < needed {
                    let problem = answer.problem(403, "forbidden");
                    assert!(problem.contains("needs the role"), "{method} {path}: {problem}");
                } else {
                    let passed = !matches!(answer.status, 401 | 403 | 429) && answer.status < 500;
                    assert!(passed, "{method} {path} as {}: {answer:?}", roles[has]);
                }
                asked += 1;
            }
        }
    }
    assert!(asked >= 30, "{asked}");
    // What is not described is not there, and what is there says so only to whom it may.
    server.ask("GET", "/v1/nothing", &[], &Value::Null).problem(404, "route-unknown");
    assert!(matches!(server.ask("DELETE", "/v1/claims", &[], &Value::Null).status, 401 | 405));
    assert_eq!(server.ask("HEAD", LOOK, &[], &Value::Null).status, 401);
}

#[test]
fn an_open_server_closes_with_its_first_token() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start(dir, &[]);
    let look = |headers: &[(&str, &str)]| server.ask("GET", LOOK, headers, &Value::Null);
    look(&[]).is(200);
    look(&[("hapax-tenant", "acme")]).is(200);
    look(&[("hapax-tenant", "acme"), ("hapax-tenant", "acme")]).problem(400, "invalid");
    server.ask("GET", "/v1/tokens", &[], &Value::Null).is(200);
    let token = token(dir, &["--role", "read"]);
    until("a token is needed", || look(&[]).status == 401);
    assert!(look(&[]).unauthenticated().contains("Authorization: Bearer"));
    assert!(!look(&[]).head.contains("invalid_token"));
    server.get(LOOK, &token).is(200);
    // Once it has had a token, it does not open again.
    run(dir, &["token", "revoke", id(&token)]).code(0);
    until("the revocation takes effect", || server.get(LOOK, &token).status == 401);
    look(&[]).unauthenticated();
    assert_eq!(server.ask("GET", "/healthz", &[], &Value::Null).status, 200);
}

#[test]
fn tokens_that_are_over_or_wrong_open_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let brief = token(dir, &["--expires", "2s"]);
    let rotated = token(dir, &[]);
    let server = Server::start(dir, &[]);
    until("it expires", || server.get(LOOK, &brief).status == 401);
    let refused = server.get(LOOK, &brief);
    assert_eq!(refused.unauthenticated(), "the token has expired");
    assert!(refused.head.contains("error=\"invalid_token\""), "{refused:?}");
    server.get(LOOK, &rotated).is(200);
    let next = run(dir, &["token", "rotate", id(&rotated), "--overlap", "1h"]).code(0).out.trim().to_owned();
    for good in [&rotated, &next] {
        server.get(LOOK, good).is(200);
    }
    let last = run(dir, &["token", "rotate", id(&rotated)]).code(0).out.trim().to_owned();
    server.get(LOOK, &last).is(200);
    for old in [&rotated, &next] {
        until("the old secret ends", || server.get(LOOK, old).status == 401);
        assert_eq!(server.get(LOOK, old).unauthenticated(), "the token is not valid");
    }
    let unknown = run(dir, &["token", "generate"]).code(0).out.trim().to_owned();
    assert_eq!(server.get(LOOK, &unknown).unauthenticated(), "the token is not valid");
    let problem = server.get(LOOK, &last[..50]).unauthenticated();
    assert!(problem.contains("cut off or mistyped") && !problem.contains(&last[21..50]), "{problem}");
}

/// A rotation changes the secret, and not who it is: a claim that is repeated with the new secret is the same claim.
#[test]
fn t181_a_rotated_token_is_the_same_caller() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (first, other) = (token(dir, &[]), token(dir, &[]));
    let server = Server::start(dir, &[]);
    let body = json!({"scope": "mailer", "id": "e1", "lease_ms": 60_000, "request_id": "attempt-1"});
    let claimed = server.post("/v1/claims", &first, &body).is(200);
    assert_eq!(claimed["outcome"], "claimed");
    let next = run(dir, &["token", "rotate", id(&first)]).code(0).out.trim().to_owned();
    let again = server.post("/v1/claims", &next, &body).is(200);
    assert_eq!((&again["outcome"], &again["token"]), (&json!("claimed"), &claimed["token"]));
    // The same words from another caller are another claim.
    assert_eq!(server.post("/v1/claims", &other, &body).is(200)["outcome"], "busy");
}

#[test]
fn t184_hostile_headers_get_a_sentence_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let token = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    let bearer = format!("Bearer {token}");
    let look = |headers: &[(&str, &str)]| server.ask("GET", LOOK, headers, &Value::Null);
    look(&[("authorization", &bearer)]).is(200);
    look(&[("Authorization", &bearer.replace("Bearer", "bearer"))]).is(200);
    let twice = look(&[("authorization", &bearer), ("authorization", &bearer)]).unauthenticated();
    assert!(twice.contains("more than once"), "{twice}");
    for bad in [
        "Basic YTpi",
        "Bearer",
        &token,
        "Bearer é",
        &bearer.replace(' ', "\t"),
        &format!("{bearer}, {bearer}"),
    ] {
        let answer = look(&[("authorization", bad)]);
        let problem = answer.unauthenticated();
        assert!(!problem.contains(&token[21..]), "{problem}");
    }
    let with_nul = format!("GET {LOOK} HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer a\0b\r\n\r\n");
    assert_eq!(raw(server.port, with_nul.as_bytes()).status, 400);
    let long = look(&[("authorization", &format!("Bearer {}", "a".repeat(65_536)))]);
    assert!(matches!(long.status, 400 | 401 | 431), "{long:?}");
    look(&[("authorization", &bearer), ("hapax-tenant", "")]).problem(400, "invalid");
    // It still serves.
    look(&[("authorization", &bearer)]).is(200);
}

#[test]
fn a_token_reaches_its_tenant_and_its_scopes_only() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let acme = token(dir, &["--role", "admin", "--tenant", "acme"]);
    let other = token(dir, &["--role", "admin", "--tenant", "other"]);
    let mailer = token(dir, &["--role", "admin", "--tenant", "acme", "--scope", "mailer"]);
    let operator = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    assert_eq!(server.post("/v1/claims", &acme, &claim("mailer", "e1")).is(200)["outcome"], "claimed");
    assert_eq!(server.get(LOOK, &acme).is(200)["state"], "leased");
    for stranger in [&other, &operator] {
        assert_eq!(server.get(LOOK, stranger).is(200)["state"], Value::Null);
        let with = [("authorization", &*format!("Bearer {stranger}")), ("hapax-tenant", "acme")];
        let problem = server.ask("GET", LOOK, &with, &Value::Null).problem(403, "forbidden");
        assert!(problem.contains("Hapax-Tenant"), "{problem}");
    }
    let with = [("authorization", &*format!("Bearer {acme}")), ("hapax-tenant", "acme")];
    server.ask("GET", LOOK, &with, &Value::Null).is(200);
    // Scopes.
    assert_eq!(server.post("/v1/claims", &mailer, &claim("mailer", "e1")).is(200)["outcome"], "busy");
    let refused = server.post("/v1/claims", &mailer, &claim("billing", "e1"));
    assert!(refused.problem(403, "forbidden").contains("scope billing"));
    assert_eq!(refused.json()["scope"], "billing");
    let batch = json!({"claims": [claim("mailer", "e2"), claim("billing", "e2")]});
    let outcomes = server.post("/v1/claims/batch", &mailer, &batch).is(200);
    assert_eq!(outcomes["outcomes"][0]["outcome"], "claimed");
    assert_eq!(outcomes["outcomes"][1]["problem"]["code"], "forbidden");
    server.get("/v1/processed?scope=billing&id=e2", &mailer).problem(403, "forbidden");
    // Tokens: nobody sees, ends or hands out more than they have.
    let seen = |token: &str, path: &str| {
        let tokens = server.get(path, token).is(200)["tokens"].as_array().unwrap().clone();
        let mut ids: Vec<_> = tokens.iter().map(|token| token["id"].as_str().unwrap().to_owned()).collect();
        ids.sort();
        ids
    };
    assert_eq!(seen(&other, "/v1/tokens"), [id(&other)]);
    assert_eq!(seen(&operator, "/v1/tokens?all_tenants=true").len(), 4);
    server.get("/v1/tokens?all_tenants=true", &acme).problem(403, "forbidden");
    server.get("/v1/audit", &acme).problem(403, "forbidden");
    for (caller, theirs) in [(&other, &acme), (&mailer, &acme), (&acme, &operator)] {
        let path = format!("/v1/tokens/{}", id(theirs));
        server
            .ask("DELETE", &path, &[("authorization", &format!("Bearer {caller}"))], &Value::Null)
            .problem(404, "not-found");
        server.post(&format!("{path}/rotate"), caller, &json!({"rotations": 0})).problem(404, "not-found");
        server.get(LOOK, theirs).is(200);
    }
    for more in [
        json!({"name": "x", "role": "read", "tenant": "other"}),
        json!({"name": "x", "role": "read"}),
        json!({"name": "x", "role": "admin", "scopes": ["mailer", "billing"]}),
    ] {
        server.post("/v1/tokens", &mailer, &more).problem(403, "forbidden");
    }
    let less = json!({"name": "x", "role": "write", "scopes": ["mailer"]});
    let made = server.post("/v1/tokens", &mailer, &less);
    assert!(made.head.contains("cache-control: no-store"), "{made:?}");
    let made = made.is(201);
    assert_eq!((&made["tenant"], &made["role"]), (&json!("acme"), &json!("write")));
    server.get(LOOK, made["token"].as_str().unwrap()).is(200);
}

#[test]
fn tokens_are_managed_over_http_and_leave_audit_rows() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ops = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    let mine = run(dir, &["token", "generate"]).code(0).out.trim().to_owned();
    let body =
        json!({"name": "shop", "role": "write", "expires_s": 3600, "token": mine, "reason": "a new shop"});
    let made = server.post("/v1/tokens", &ops, &body).is(201);
    assert_eq!((made["token"].as_str(), &made["state"]), (Some(&*mine), &json!("live")));
    // The answer was lost: the same request makes no second one.
    assert_eq!(server.post("/v1/tokens", &ops, &body).is(201)["id"], made["id"]);
    server.get(LOOK, &mine).is(200);
    server.get("/v1/tokens", &mine).problem(403, "forbidden");
    let path = format!("/v1/tokens/{}", id(&mine));
    let rotated =
        server.post(&format!("{path}/rotate"), &ops, &json!({"rotations": 0, "overlap_s": 60})).is(200);
    server.get(LOOK, rotated["token"].as_str().unwrap()).is(200);
    let late = server.post(&format!("{path}/rotate"), &ops, &json!({"rotations": 0}));
    assert!(late.problem(409, "conflict").contains("somebody else"), "{late:?}");
    let wrong = json!({"rotations": 1, "token": ops});
    server.post(&format!("{path}/rotate"), &ops, &wrong).problem(400, "invalid");
    let revoke =
        |path: &str| server.ask("DELETE", path, &[("authorization", &format!("Bearer {ops}"))], &Value::Null);
    assert_eq!(revoke(&format!("{path}?reason=closed")).is(200)["state"], "revoked");
    assert_eq!(revoke(&path).is(200)["state"], "revoked");
    revoke("/v1/tokens/0000000000000000").problem(404, "not-found");
    revoke("/v1/tokens/%00").problem(400, "invalid");
    for bad in [
        json!({"name": "", "role": "read"}),
        json!({"name": "x", "role": "root"}),
        json!({"name": "x", "role": "read", "expires_s": 0}),
        json!({"name": "x", "role": "read", "scopes": []}),
        json!({"name": "x", "role": "read", "token": "hpx_nonsense"}),
    ] {
        server.post("/v1/tokens", &ops, &bad).problem(400, "invalid");
    }
    let rows = server.get("/v1/audit?limit=10", &ops).is(200)["rows"].as_array().unwrap().clone();
    let seen: Vec<_> =
        rows.iter().map(|row| (row["action"].as_str().unwrap(), row["reason"].as_str().unwrap())).collect();
    assert_eq!(
        seen,
        [
            ("token.revoke", "closed"),
            ("token.rotate", ""),
            ("token.create", "a new shop"),
            ("token.create", "")
        ]
    );
    assert!(
        rows[..3]
            .iter()
            .all(|row| row["who"] == format!("token {} (test)", id(&ops)) && row["target"] == id(&mine))
    );
    let listed = run(dir, &["audit", "ls", "--json"]).code(0).json();
    assert_eq!(listed["audit"].as_array().unwrap().len(), 4, "the CLI sees the same");
}

/// Makes a dead letter.
fn dead(server: &Server, token: &str, scope: &str, event: &str) {
    let claimed = server.post("/v1/claims", token, &claim(scope, event)).is(200);
    let fail = json!({"scope": scope, "id": event, "token": claimed["token"], "reason": "no such order", "then": "dead"});
    assert_eq!(server.post("/v1/claims/fail", token, &fail).is(200)["state"], "dead");
}

/// An intervention is recorded before it is done; what cannot be recorded is not done. Nobody sees or changes what is
/// another's.
#[test]
fn t187_an_intervention_that_cannot_be_recorded_is_not_done() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let ops = token(dir, &["--role", "admin"]);
    let acme = token(dir, &["--role", "admin", "--tenant", "acme"]);
    let mailer = token(dir, &["--role", "admin", "--scope", "mailer"]);
    let server = Server::start(dir, &[]);
    dead(&server, &ops, "mailer", "e1");
    dead(&server, &ops, "billing", "e2");
    dead(&server, &acme, "mailer", "e3");
    let seen = |token: &str, path: &str| {
        let entries = server.get(path, token).is(200)["entries"].as_array().unwrap().clone();
        let mut ids: Vec<_> = entries.iter().map(|entry| entry["id"].as_str().unwrap().to_owned()).collect();
        ids.sort();
        ids
    };
    assert_eq!(seen(&ops, "/v1/dead"), ["e1", "e2"]);
    assert_eq!(seen(&ops, "/v1/dead?all_tenants=true"), ["e1", "e2", "e3"]);
    assert_eq!(seen(&acme, "/v1/dead"), ["e3"]);
    assert_eq!(seen(&mailer, "/v1/dead"), ["e1"]);
    for path in
        ["/v1/dead", "/v1/held", "/v1/parked", "/v1/lost", "/v1/keys", "/v1/stats", "/v1/journal/events"]
    {
        for token in [&acme, &mailer] {
            server.get(&format!("{path}?all_tenants=true"), token).problem(403, "forbidden");
        }
    }
    let counted = server.get("/v1/stats", &mailer).is(200);
    assert!(counted["ledger"].as_array().unwrap().iter().all(|row| row["scope"] == "mailer"), "{counted}");
    server.get("/v1/dead?scope=billing", &mailer).problem(403, "forbidden");
    let redrive = |token: &str, scope: &str, event: &str| {
        let body = json!({"scope": scope, "ids": [event], "reason": "fixed in 1.4.2"});
        server.post("/v1/dead/redrive", token, &body)
    };
    redrive(&mailer, "billing", "e2").problem(403, "forbidden");
    redrive(&acme, "mailer", "e1").problem(404, "not-found");
    assert_eq!(redrive(&ops, "mailer", "e1").is(200)["entries"][0]["after"]["state"], "retry");
    let rows = server.get("/v1/audit?action=ledger.", &ops).is(200)["rows"].clone();
    assert_eq!(rows.as_array().unwrap().len(), 1, "what was refused leaves no row: {rows}");
    assert_eq!(
        (&rows[0]["action"], &rows[0]["reason"]),
        (&json!("ledger.redrive"), &json!("fixed in 1.4.2"))
    );
    assert!(
        rows[0]["who"].as_str().unwrap().contains(id(&ops))
            && rows[0]["target"].as_str().unwrap().contains("e1")
    );
    // Without a place for the row.
    let file = rusqlite::Connection::open(dir.join("hapax-data/journal.db")).unwrap();
    file.busy_timeout(PATIENCE).unwrap();
    file.execute_batch("ALTER TABLE hapax_access_audit RENAME TO away").unwrap();
    let refused = redrive(&ops, "billing", "e2").is(200);
    assert!(refused["entries"][0]["problem"]["code"].is_string(), "{refused}");
    assert_eq!(seen(&ops, "/v1/dead"), ["e2"], "it is still dead");
    let new = server.post("/v1/tokens", &ops, &json!({"name": "x", "role": "read"}));
    assert!(new.status >= 500, "{new:?}");
    file.execute_batch("ALTER TABLE away RENAME TO hapax_access_audit").unwrap();
    assert_eq!(
        server.get("/v1/tokens", &ops).is(200)["tokens"].as_array().unwrap().len(),
        2,
        "none was made"
    );
    redrive(&ops, "billing", "e2").is(200);
    assert_eq!(seen(&ops, "/v1/dead"), Vec::<String>::new());
}

#[test]
fn one_token_is_limited_and_others_are_not() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (busy, quiet) = (token(dir, &["--role", "read"]), token(dir, &["--role", "read"]));
    let server = Server::start(dir, &["--set", "serve.rate_per_s=1"]);
    server.get(LOOK, &quiet).is(200);
    let mut refused = None;
    until("a request is refused", || {
        let answer = server.get(LOOK, &busy);
        if answer.status == 429 {
            refused = Some(answer);
        }
        refused.is_some()
    });
    let refused = refused.unwrap();
    assert!(refused.problem(429, "rate-limited").contains("serve.rate_per_s"));
    assert!(refused.head.contains("retry-after: 1"), "{refused:?}");
    until("the other one is served", || server.get(LOOK, &quiet).status == 200);
    until("it is served again", || server.get(LOOK, &busy).status == 200);
    assert_eq!(server.ask("GET", "/healthz", &[], &Value::Null).status, 200);
}

/// The first token comes from a file. Starting again changes nothing, and does not revive what was revoked.
#[test]
fn t183_a_bootstrap_token_is_imported_once_and_never_revived() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let first = run(dir, &["token", "generate"]).code(0).out;
    std::fs::write(dir.join("first.token"), &first).unwrap();
    let first = first.trim();
    let env = [("HAPAX_BOOTSTRAP_TOKEN_FILE", "first.token")];
    let start = || Server::start_with(dir, "127.0.0.1:0", &[], &env);
    for _ in 0..2 {
        let server = start();
        server.ask("GET", LOOK, &[], &Value::Null).unauthenticated();
        let tokens = server.get("/v1/tokens", first).is(200);
        assert_eq!(tokens["tokens"].as_array().unwrap().len(), 1);
        assert_eq!(
            (&tokens["tokens"][0]["role"], &tokens["tokens"][0]["name"]),
            (&json!("admin"), &json!("bootstrap"))
        );
    }
    run(dir, &["token", "revoke", "bootstrap"]).code(0);
    let server = start();
    server.get(LOOK, first).unauthenticated();
    let log = std::fs::read_to_string(dir.join("serve.err")).unwrap();
    assert!(log.contains("not live") && !log.contains(&first[21..]), "{log}");
    drop(server);
    let shown = hapax(dir, &["config", "show"]).envs(env).output().unwrap();
    let shown: Ran = shown.into();
    assert!(
        shown.out.contains("serve.bootstrap_token") && !shown.out.contains(&first[21..]),
        "{}",
        shown.out
    );
    std::fs::write(dir.join("first.token"), &first[..40]).unwrap();
    let refused: Ran = hapax(dir, &["serve", "--listen", "127.0.0.1:0"]).envs(env).output().unwrap().into();
    let refused = refused.code(2);
    assert!(
        refused.err.contains("hapax token generate") && !refused.err.contains(&first[21..40]),
        "{}",
        refused.err
    );
}

#[test]
fn another_address_needs_tokens_from_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let refused = run(dir, &["serve", "--listen", "0.0.0.0:0"]).code(2);
    assert!(refused.err.contains("hapax token create"), "{}", refused.err);
    assert!(!dir.join("hapax-data").exists(), "nothing was made");
    let token = token(dir, &["--role", "read"]);
    let server = Server::start_with(dir, "0.0.0.0:0", &[], &[]);
    server.ask("GET", LOOK, &[], &Value::Null).unauthenticated();
    server.get(LOOK, &token).is(200);
    assert_eq!(server.ask("GET", "/healthz", &[], &Value::Null).status, 200);
}

#[test]
fn operators_can_have_a_listener_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &["--admin-listen", "127.0.0.1:0"]);
    let apart = port(&server.ready["admin_address"]);
    let bearer = [("authorization", &*format!("Bearer {admin}"))];
    server.get("/v1/tokens", &admin).problem(404, "route-unknown");
    ask(apart, "GET", "/v1/tokens", &bearer, &Value::Null).is(200);
    ask(apart, "GET", "/v1/tokens", &[], &Value::Null).unauthenticated();
    assert_eq!(ask(apart, "GET", "/metrics", &bearer, &Value::Null).status, 200);
    ask(apart, "GET", "/metrics", &[], &Value::Null).unauthenticated();
    ask(apart, "POST", "/v1/claims", &bearer, &claim("mailer", "e1")).problem(404, "route-unknown");
    server.post("/v1/claims", &admin, &claim("mailer", "e1")).is(200);
}
