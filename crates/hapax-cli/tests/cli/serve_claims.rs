//! Claims over HTTP: attempts, repeats, races, what is lost, and what a request may say.

#![allow(missing_docs, clippy::unwrap_used)]

use std::sync::Barrier;

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::serve::{Answer, Server, request};

fn server(more: &[&str]) -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    let quick = ["--set", "retry.backoff_base_ms=1", "--set", "retry.backoff_max_ms=1"];
    let server = Server::start(dir.path(), &[&quick, more].concat());
    (dir, server)
}

/// Claims an event, fails it, and so on: how many runs it has had when it is dead.
fn runs_until_dead(server: &Server, scope: &str) -> u64 {
    let mut runs = 0;
    loop {
        let mut claimed = Value::Null;
        wait_until("it can be claimed", || {
            claimed = server.post("/v1/claims", &json!({"scope": scope, "id": "e-1"})).is(200);
            claimed["outcome"] != "retry_later"
        });
        if claimed["outcome"] == "dead" {
            return runs;
        }
        assert_eq!(claimed["outcome"], "claimed", "{claimed}");
        runs += 1;
        assert_eq!(claimed["attempt"], runs);
        let fail = json!({"scope": scope, "id": "e-1", "token": claimed["token"], "reason": "no"});
        let state = server.post("/v1/claims/fail", &fail).is(200)["state"].clone();
        assert!(state == "retry" || state == "dead", "{state}");
    }
}

/// A scope may have a number of runs of its own, and `fail` counts by it as `claim` does.
#[test]
fn t240_a_scope_has_its_own_number_of_runs() {
    let sets = ["--set", "consumer.vip.max_attempts=8", "--set", "consumer.one.max_attempts=1"];
    let (_dir, server) = server(&sets);
    assert_eq!(runs_until_dead(&server, "vip"), 8);
    assert_eq!(runs_until_dead(&server, "one"), 1);
    assert_eq!(runs_until_dead(&server, "other"), 5);
}

fn words(answer: &Value) -> Vec<String> {
    let all = answer["outcomes"].as_array().unwrap().iter();
    all.map(|one| one["outcome"].as_str().unwrap().to_owned()).collect()
}

/// One event is in a batch twice, under one name: each `claimed` would be a permission to run it.
#[test]
fn t243_equal_claims_of_a_batch_are_one_claim() {
    let (_dir, server) = server(&[]);
    for mode in ["lease", "at_most_once"] {
        let claim =
            |id: &str, request: &str| json!({"scope": mode, "id": id, "mode": mode, "request_id": request});
        let batch = json!({"claims": [
            claim("e-1", "r-1"), claim("e-2", "r-1"), claim("e-1", "r-1"), claim("e-1", "r-1"), claim("e-2", "r-2"),
            claim(" ", "r-1"), claim("e-3", "r-1"),
        ]});
        let first = server.post("/v1/claims/batch", &batch).is(200);
        let other = if mode == "lease" { "busy" } else { "duplicate" };
        assert_eq!(
            words(&first),
            ["claimed", "claimed", "busy", "busy", other, "error", "claimed"],
            "{first}"
        );
        assert_eq!(first["outcomes"][2]["until"], first["outcomes"][0]["until"]);
        // The answer was lost: the same again is the same.
        let again = server.post("/v1/claims/batch", &batch).is(200);
        assert_eq!(words(&again), words(&first));
        for at in [0, 1, 6] {
            assert_eq!(again["outcomes"][at]["token"], first["outcomes"][at]["token"]);
        }
        let done = json!({"scope": mode, "id": "e-1", "token": first["outcomes"][0]["token"]});
        server.post("/v1/claims/done", &done).is(200);
        let after = server.post("/v1/claims/batch", &batch).is(200);
        assert_eq!(words(&after)[2..4], ["duplicate", "duplicate"], "what is done is done, for each of them");
    }
}

/// A name that is used for another event's content is not a repetition.
#[test]
fn t243_a_request_id_does_not_hide_other_content() {
    let (_dir, server) = server(&[]);
    for mode in ["lease", "at_most_once"] {
        let claim = |payload: i64| {
            let body = json!({"scope": mode, "id": "e-1", "mode": mode, "request_id": "r-1", "payload": {"n": payload}});
            server.post("/v1/claims", &body).is(200)
        };
        let first = claim(1);
        assert_eq!(first["outcome"], "claimed");
        assert_eq!(claim(2)["outcome"], "mismatch");
        assert_eq!(claim(1)["token"], first["token"]);
    }
}

/// Clients that are quick, each with an attempt of its own: one of them runs the event.
#[test]
fn of_clients_that_race_for_an_event_one_gets_it() {
    const CLIENTS: usize = 8;
    let (_dir, server) = server(&[]);
    let address = &server.address;
    for round in 0..10 {
        let barrier = Barrier::new(CLIENTS);
        let outcomes: Vec<Value> = std::thread::scope(|scope| {
            let client = |n: usize| {
                let body =
                    json!({"scope": "s", "id": format!("e-{round}"), "request_id": format!("{round}-{n}")});
                barrier.wait();
                let headers = [("content-type", "application/json")];
                request(address, "POST", "/v1/claims", &headers, body.to_string().as_bytes()).is(200)
            };
            let clients: Vec<_> = (0..CLIENTS).map(|n| scope.spawn(move || client(n))).collect();
            clients.into_iter().map(|client| client.join().unwrap()).collect()
        });
        let count = |word: &str| outcomes.iter().filter(|one| one["outcome"] == word).count();
        assert_eq!((count("claimed"), count("busy")), (1, CLIENTS - 1), "{outcomes:?}");
    }
}

fn once(server: &Server, id: &str, lease_ms: Option<u64>) -> Value {
    let mut body = json!({"scope": "mailer", "id": id, "mode": "at_most_once"});
    if let Some(lease_ms) = lease_ms {
        body["lease_ms"] = lease_ms.into();
    }
    let claimed = server.post("/v1/claims", &body).is(200);
    assert_eq!(claimed["outcome"], "claimed", "{claimed}");
    claimed
}

fn ids(answer: &Answer) -> Vec<String> {
    let entries = answer.is(200)["entries"].as_array().unwrap().clone();
    let mut ids: Vec<_> = entries.iter().map(|entry| entry["id"].as_str().unwrap().to_owned()).collect();
    ids.sort();
    ids
}

/// What was claimed at most once and did not end well is listed, and not silent.
#[test]
fn t247_lost_events_are_listed() {
    let (_dir, server) = server(&[]);
    let failed = once(&server, "failed", Some(600_000));
    once(&server, "running", Some(600_000));
    once(&server, "untracked", None);
    assert_eq!(ids(&server.get("/v1/lost")), [""; 0]);
    let fail = |more: Value| {
        let mut body =
            json!({"scope": "mailer", "id": "failed", "token": failed["token"], "reason": "no network"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/claims/fail", &body)
    };
    // It will never run again, so nobody would read it.
    let problem = fail(json!({"payload": {"n": 1}})).problem(400, "invalid");
    assert!(problem.contains("payload") && problem.contains("mailer/failed"), "{problem}");
    assert_eq!(ids(&server.get("/v1/lost")), [""; 0], "nothing was changed");
    assert_eq!(fail(json!({})).is(200)["state"], "lost");
    once(&server, "late", Some(1));
    wait_until("the one that does not report is listed", || {
        ids(&server.get("/v1/lost")) == ["failed", "late"]
    });
    let listed = server.get("/v1/lost?scope=mailer&id=failed").is(200);
    assert_eq!(listed["entries"][0]["reason"], "no network");
    let first = server.get("/v1/lost?limit=1").is(200);
    let second = server.get(&format!("/v1/lost?limit=1&after={}", first["next"].as_str().unwrap())).is(200);
    assert_eq!((second["entries"].as_array().unwrap().len(), &second["next"]), (1, &Value::Null));
    assert_eq!(ids(&server.get("/v1/dead")), [""; 0]);
}

/// At most once is given back before it ran, and has no lease to extend.
#[test]
fn an_at_most_once_claim_is_released_and_never_extended() {
    let (_dir, server) = server(&[]);
    let claimed = once(&server, "e-1", Some(600_000));
    let body = |token: &Value| json!({"scope": "mailer", "id": "e-1", "token": token});
    for path in ["extend", "release", "done"] {
        server.post(&format!("/v1/claims/{path}"), &body(&json!(99_999))).problem(409, "fenced");
    }
    let problem = server.post("/v1/claims/extend", &body(&claimed["token"])).problem(409, "fenced");
    assert!(problem.contains("is in state claimed") && !problem.contains("another token"), "{problem}");
    assert_eq!(server.post("/v1/claims/release", &body(&claimed["token"])).is(200)["state"], "retry");
    let again = once(&server, "e-1", Some(600_000));
    assert!(again["token"].as_i64() > claimed["token"].as_i64(), "{again}");
    server.post("/v1/claims/done", &body(&claimed["token"])).problem(409, "fenced");
    assert_eq!(server.post("/v1/claims/done", &body(&again["token"])).is(200)["state"], "finished");
    let problem = server.post("/v1/claims/release", &body(&again["token"])).problem(409, "fenced");
    assert!(problem.contains("is in state finished") && !problem.contains("another token"), "{problem}");
}

/// A client counts by its own clock, so it is told how long and not only until when.
#[test]
fn a_claim_says_how_long_it_lasts() {
    let (_dir, server) = server(&["--set", "lease.timeout_s=77"]);
    let default = server.get("/v1/info").is(200)["lease_ms"].clone();
    assert_eq!(default, 77_000);
    let claim = |more: Value| {
        let mut body = json!({"scope": "s", "id": format!("e-{more}")});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/claims", &body).is(200)
    };
    assert_eq!(claim(json!({}))["lease_ms"], 77_000);
    assert_eq!(claim(json!({"lease_ms": 1234}))["lease_ms"], 1234);
    assert_eq!(claim(json!({"lease_ms": 1234, "mode": "at_most_once"}))["lease_ms"], 1234);
    assert_eq!(claim(json!({"mode": "at_most_once"}))["lease_ms"], Value::Null);
    let claims = json!([{"scope": "s", "id": " "}, {"scope": "s", "id": "b", "lease_ms": 5000}, {"scope": "s", "id": "c"}]);
    let batch = server.post("/v1/claims/batch", &json!({"claims": claims})).is(200);
    let seen: Vec<_> = (0..3).map(|at| batch["outcomes"][at]["lease_ms"].clone()).collect();
    assert_eq!(seen, [Value::Null, json!(5000), json!(77_000)]);
}

/// What a request names is what it names, and not something like it.
#[test]
fn t248_names_that_are_no_utf_8_are_refused() {
    let (dir, server) = server(&[]);
    crate::common::run(dir.path(), &["modules", "create", "orders"]).code(0);
    server.post("/v1/claims", &json!({"scope": "mailer", "id": "\u{fffd}"})).is(200);
    assert_eq!(server.get("/v1/processed?scope=mailer&id=%EF%BF%BD").is(200)["state"], "leased");
    for bad in ["%FF", "%EF%BF", "a%80b", "%C0%AF"] {
        for path in [
            format!("/v1/processed?scope=mailer&id={bad}"),
            format!("/v1/processed?scope={bad}&id=e"),
            format!("/v1/dead?scope={bad}"),
            format!("/v1/journal/aggregates/{bad}"),
            format!("/v1/keys/{bad}"),
            format!("/v1/modules/orders/records/{bad}"),
            format!("/v1/modules/{bad}/records"),
            format!("/v1/modules/orders/records?after={bad}"),
        ] {
            let problem = server.get(&path).problem(400, "invalid");
            assert!(problem.contains("UTF-8"), "{path}: {problem}");
        }
    }
    let answer = server.get("/v1/processed?scope=mailer&id=%E2%82%AC+%zz%").is(200);
    assert_eq!(answer["state"], Value::Null, "what is not an escape is text");
}

/// The description and the server have the same limits, whatever a batch may have.
#[test]
fn limits_are_those_of_the_description() {
    let (_dir, server) = server(&["--set", "serve.batch_max=10"]);
    let api = server.get("/openapi.json").is(200);
    let mut asked = 0;
    for (path, item) in api["paths"].as_object().unwrap() {
        if path.contains("/modules/") {
            continue; // there is none
        }
        let parameters = item["get"]["parameters"].as_array().cloned().unwrap_or_default();
        for parameter in parameters.iter().filter(|parameter| parameter["in"] == "query") {
            let Some(max) = parameter["schema"]["maximum"].as_u64() else { continue };
            let name = parameter["name"].as_str().unwrap();
            let path = path.replace("{aggregate}", "a");
            let ask = |value: u64| server.get(&format!("{path}?{name}={value}"));
            assert_eq!(ask(if name == "wait_ms" { 1 } else { max }).status, 200, "{path} {name}");
            let problem = ask(max + 1).problem(400, "invalid");
            assert!(problem.contains(&max.to_string()), "{path} {name}: {problem}");
            asked += 1;
        }
    }
    assert!(asked >= 9, "{asked}");
}

/// `null` is content; what is not there is none.
#[test]
fn t249_null_is_a_payload() {
    let (_dir, server) = server(&[]);
    let body = json!({"aggregate": "a", "events": [{"id": "null", "payload": null}, {"id": "none"}]});
    for placing in ["new", "repeat"] {
        assert_eq!(server.post("/v1/journal/append", &body).is(200)["events"][0]["placing"], placing);
    }
    let events = server.get("/v1/journal/aggregates/a").is(200)["events"].clone();
    let payload = |at: usize| events[at].as_object().unwrap().get("payload").cloned();
    assert_eq!((payload(0), payload(1)), (Some(Value::Null), None), "{events}");
    let other = json!({"aggregate": "a", "events": [{"id": "null"}]});
    server.post("/v1/journal/append", &other).problem(422, "mismatch");
    let both = json!({"aggregate": "a", "events": [{"id": "x", "payload": null, "payload_base64": "AA=="}]});
    server.post("/v1/journal/append", &both).problem(400, "invalid");
    // In a claim it has a fingerprint, and a dead letter keeps it.
    let claim = |payload: Value| {
        server.post("/v1/claims", &json!({"scope": "s", "id": "e-1", "payload": payload})).is(200)
    };
    let claimed = claim(Value::Null);
    assert_eq!((&claimed["outcome"], &claim(json!(1))["outcome"]), (&json!("claimed"), &json!("mismatch")));
    let fail = json!({"scope": "s", "id": "e-1", "token": claimed["token"], "reason": "r", "then": "dead", "payload": null});
    server.post("/v1/claims/fail", &fail).is(200);
    assert_eq!(server.get("/v1/dead?payload=true").is(200)["entries"][0]["payload"], "null");
}

/// One row of the ledger is damaged. What was granted to its neighbours is in the answer: an at-most-once claim that
/// nobody was told of would be a duplicate when it is sent again, and its effect would never happen.
#[test]
fn t410_a_claim_that_fails_leaves_its_neighbours_what_they_were_granted() {
    let (dir, server) = server(&[]);
    server.post("/v1/claims", &json!({"scope": "s", "id": "damaged"})).is(200);
    let file = rusqlite::Connection::open(dir.path().join("hapax-data/ledger.db")).unwrap();
    file.busy_timeout(crate::common::serve::PATIENCE).unwrap();
    let tables: Vec<String> = file
        .prepare("SELECT name FROM sqlite_schema WHERE type = 'table' AND name GLOB 'hapax_entry_*'")
        .and_then(|mut all| all.query_map([], |row| row.get(0))?.collect())
        .unwrap();
    let changed =
        |table| file.execute(&format!("UPDATE {table} SET state = 77 WHERE scope > 0"), []).unwrap();
    assert_eq!(tables.iter().map(changed).sum::<usize>(), 1);
    for mode in ["at_most_once", "lease"] {
        let (one, two) = (format!("one-{mode}"), format!("two-{mode}"));
        let claim = |id: &str| json!({"scope": "s", "id": id, "mode": mode});
        let claims = json!({"claims": [claim(&one), claim("damaged"), claim(" "), claim(&two)]});
        let answer = server.post("/v1/claims/batch", &claims).is(200);
        assert_eq!(words(&answer), ["claimed", "error", "error", "claimed"], "{answer}");
        let of = &answer["outcomes"];
        assert_eq!(
            (&of[1]["problem"]["code"], &of[1]["problem"]["status"]),
            (&json!("corrupt"), &json!(500))
        );
        assert_eq!(of[2]["problem"]["code"], "invalid");
        let run = |at: usize| json!({"scope": "s", "id": of[at]["id"], "token": of[at]["token"]});
        let damaged = json!({"scope": "s", "id": "damaged", "token": 1});
        let done =
            server.post("/v1/claims/done/batch", &json!({"claims": [run(0), damaged, run(3)]})).is(200);
        let states: Vec<_> = (0..3).map(|at| done["outcomes"][at]["state"].clone()).collect();
        let state = if mode == "lease" { "done" } else { "finished" };
        assert_eq!(states, [state, "error", state], "{done}");
        assert_eq!(done["outcomes"][1]["problem"]["code"], "corrupt");
        // Where nothing was granted or settled, the request has failed.
        let alone = json!({"claims": [claim("damaged")]});
        server.post("/v1/claims/batch", &alone).problem(500, "corrupt");
        server.post("/v1/claims/done/batch", &json!({"claims": [damaged]})).problem(500, "corrupt");
    }
}
