//! The routes of `hapax serve`, one after the other, with what they refuse.

#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::run;
use crate::common::serve::{Server, request};

fn server(more: &[&str]) -> (tempfile::TempDir, Server) {
    let dir = tempfile::tempdir().unwrap();
    let quick = ["--set", "retry.backoff_base_ms=1", "--set", "retry.backoff_max_ms=1"];
    let server = Server::start(dir.path(), &[&quick, more].concat());
    (dir, server)
}

fn claim(server: &Server, id: &str) -> i64 {
    let claimed = server.post("/v1/claims", &json!({"scope": "mailer", "id": id})).is(200);
    assert_eq!(claimed["outcome"], "claimed", "{claimed}");
    claimed["token"].as_i64().unwrap()
}

fn state(server: &Server, id: &str) -> Value {
    server.get(&format!("/v1/processed?scope=mailer&id={id}")).is(200)["state"].clone()
}

#[test]
fn an_event_is_claimed_once_and_settled_by_its_token() {
    let (_dir, server) = server(&[]);
    let token = claim(&server, "e-1");
    let busy = server.post("/v1/claims", &json!({"scope": "mailer", "id": "e-1"})).is(200);
    assert_eq!((&busy["outcome"], busy["until"].is_string()), (&json!("busy"), true));
    let settle = |token: i64| json!({"scope": "mailer", "id": "e-1", "token": token});
    for path in ["done", "extend", "release"] {
        let problem = server.post(&format!("/v1/claims/{path}"), &settle(token + 1)).problem(409, "fenced");
        assert!(problem.contains("mailer/e-1 is in state leased"), "{problem}");
    }
    let extended = server
        .post(
            "/v1/claims/extend",
            &json!({"scope": "mailer", "id": "e-1", "token": token, "lease_ms": 3_600_000}),
        )
        .is(200);
    assert!(extended["at"].as_str().unwrap() > busy["until"].as_str().unwrap(), "{extended}");
    for _ in 0..2 {
        assert_eq!(server.post("/v1/claims/done", &settle(token)).is(200)["state"], "done");
    }
    let again = server.post("/v1/claims", &json!({"scope": "mailer", "id": "e-1"})).is(200);
    assert_eq!((&again["outcome"], &again["state"]), (&json!("duplicate"), &json!("done")));
    // Another scope, and another tenant, have their own.
    let other = server.post("/v1/claims", &json!({"scope": "billing", "id": "e-1"})).is(200);
    assert_eq!(other["outcome"], "claimed");
    let tenant = server
        .post_with("/v1/claims", &[("hapax-tenant", "acme")], &json!({"scope": "mailer", "id": "e-1"}))
        .is(200);
    assert_eq!(tenant["outcome"], "claimed");
    let of = |tenant: &str| {
        server.post_with("/v1/claims", &[("hapax-tenant", tenant)], &json!({"scope": "s", "id": "i"}))
    };
    for bad in ["", " ", &"x".repeat(256)] {
        of(bad).problem(400, "invalid");
    }
    // A tenant is text, compared byte by byte: this one is neither "a b" nor "ab".
    for tenant in ["a\tb", "a b", "ab"] {
        assert_eq!(of(tenant).is(200)["outcome"], "claimed", "{tenant:?}");
        assert_eq!(of(tenant).is(200)["outcome"], "busy", "{tenant:?}");
    }
    let two = [("hapax-tenant", "a"), ("hapax-tenant", "b")];
    server.post_with("/v1/claims", &two, &json!({"scope": "s", "id": "i"})).problem(400, "invalid");
}

#[test]
fn t164_a_repeated_claim_is_the_same_claim_and_only_for_its_caller() {
    let (_dir, server) = server(&[]);
    let claim = |id: &str, request: &str| {
        server.post("/v1/claims", &json!({"scope": "mailer", "id": id, "request_id": request})).is(200)
    };
    let first = claim("e-1", "r-1");
    let again = claim("e-1", "r-1");
    assert_eq!(
        (&again["outcome"], &again["token"], &again["attempt"]),
        (&json!("claimed"), &first["token"], &json!(1))
    );
    assert_eq!(claim("e-1", "r-2")["outcome"], "busy");
    // Done is done, also for the attempt that did it.
    server.post("/v1/claims/done", &json!({"scope": "mailer", "id": "e-1", "token": first["token"]})).is(200);
    assert_eq!(claim("e-1", "r-1")["outcome"], "duplicate");
    // In a batch the place counts too: an event that is there twice runs once.
    let batch = json!({"request_id": "b-1", "claims": [{"scope": "mailer", "id": "e-2"}, {"scope": "mailer", "id": "e-2"}, {"scope": "mailer", "id": " "}]});
    let first = server.post("/v1/claims/batch", &batch).is(200);
    let words: Vec<_> =
        first["outcomes"].as_array().unwrap().iter().map(|one| one["outcome"].clone()).collect();
    assert_eq!(words, ["claimed", "busy", "error"]);
    assert_eq!(first["outcomes"][2]["problem"]["code"], "invalid");
    let again = server.post("/v1/claims/batch", &batch).is(200);
    assert_eq!(again["outcomes"][0]["token"], first["outcomes"][0]["token"]);
    for bad in ["", &"x".repeat(256), "a\u{0}"] {
        server
            .post("/v1/claims", &json!({"scope": "s", "id": "i", "request_id": bad}))
            .problem(400, "invalid");
    }
}

#[test]
fn failures_are_retried_until_they_are_dead() {
    let (_dir, server) = server(&["--set", "retry.attempts_max=2"]);
    let fail = |token: i64, more: Value| {
        let mut body = json!({"scope": "mailer", "id": "e-1", "token": token, "reason": "no such account"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/claims/fail", &body)
    };
    let token = claim(&server, "e-1");
    fail(token + 1, json!({})).problem(409, "fenced");
    fail(token, json!({"reason": " "})).problem(400, "invalid");
    for _ in 0..2 {
        assert_eq!(fail(token, json!({})).is(200)["state"], "retry", "the same again has the same answer");
    }
    let mut second = Value::Null;
    wait_until("its pause is over", || {
        second = server.post("/v1/claims", &json!({"scope": "mailer", "id": "e-1"})).is(200);
        second["outcome"] == "claimed"
    });
    assert_eq!(second["attempt"], 2);
    let dead = fail(second["token"].as_i64().unwrap(), json!({"payload": {"n": 1}})).is(200);
    assert_eq!(dead["state"], "dead", "its attempts are used up");
    let listed = server.get("/v1/dead?scope=mailer&payload=true").is(200);
    assert_eq!(
        (&listed["entries"][0]["reason"], &listed["entries"][0]["payload"]),
        (&json!("no such account"), &json!("{\"n\":1}"))
    );
    assert_eq!(server.get("/v1/held").is(200)["entries"][0]["id"], "e-1");
    // At once, if the caller knows better.
    let token = claim(&server, "e-2");
    let body =
        json!({"scope": "mailer", "id": "e-2", "token": token, "reason": "unreadable", "then": "dead"});
    assert_eq!(server.post("/v1/claims/fail", &body).is(200)["state"], "dead");
    // A lease that is given back counts nothing.
    let token = claim(&server, "e-3");
    let release = json!({"scope": "mailer", "id": "e-3", "token": token});
    assert_eq!(server.post("/v1/claims/release", &release).is(200)["state"], "retry");
    let again = server.post("/v1/claims", &json!({"scope": "mailer", "id": "e-3"})).is(200);
    assert_eq!((&again["outcome"], &again["attempt"]), (&json!("claimed"), &json!(1)));
}

#[test]
fn at_most_once_runs_are_finished_or_lost_and_never_run_again() {
    let (_dir, server) = server(&[]);
    let claim = |id: &str| {
        let body = json!({"scope": "mailer", "id": id, "mode": "at_most_once", "lease_ms": 60_000});
        server.post("/v1/claims", &body).is(200)
    };
    let (one, two) = (claim("e-1"), claim("e-2"));
    let done = json!({"scope": "mailer", "id": "e-1", "token": one["token"]});
    assert_eq!(server.post("/v1/claims/done", &done).is(200)["state"], "finished");
    let stale = json!({"scope": "mailer", "id": "e-2", "token": 99_999});
    server.post("/v1/claims/done", &stale).problem(409, "fenced");
    let fail = json!({"scope": "mailer", "id": "e-2", "token": two["token"], "reason": "no network"});
    assert_eq!(server.post("/v1/claims/fail", &fail).is(200)["state"], "lost", "never run again");
    assert_eq!(claim("e-2")["outcome"], "duplicate");
    let batch = json!({"claims": [done, {"scope": "mailer", "id": "e-9", "token": 1}]});
    let settled = server.post("/v1/claims/done/batch", &batch).is(200);
    assert_eq!(
        (&settled["outcomes"][0]["state"], &settled["outcomes"][1]["problem"]["code"]),
        (&json!("finished"), &json!("fenced"))
    );
}

#[test]
fn an_id_that_is_used_again_is_noticed() {
    let (_dir, server) = server(&[]);
    let claim = |payload: Value| {
        server.post("/v1/claims", &json!({"scope": "mailer", "id": "e-1", "payload": payload})).is(200)
    };
    assert_eq!(claim(json!({"a": 1, "b": 2}))["outcome"], "claimed");
    assert_eq!(claim(json!({"b": 2, "a": 1}))["outcome"], "busy", "the same content, written otherwise");
    assert_eq!(claim(json!({"a": 1, "b": 3}))["outcome"], "mismatch");
    let both = json!({"scope": "s", "id": "i", "payload": 1, "fingerprint": "0".repeat(32)});
    server.post("/v1/claims", &both).problem(400, "invalid");
    for bad in ["0", &"g".repeat(32), &"+".repeat(32)] {
        server
            .post("/v1/claims", &json!({"scope": "s", "id": "i", "fingerprint": bad}))
            .problem(400, "invalid");
    }
    for (field, value) in [
        ("lease_ms", json!(0)),
        ("lease_ms", json!(86_400_001u64)),
        ("time", json!("yesterday")),
        ("scope", json!("")),
        ("id", json!("")),
        ("metadata", json!("\u{0}")),
    ] {
        let mut body = json!({"scope": "s", "id": "i"});
        body[field] = value;
        server.post("/v1/claims", &body).problem(400, "invalid");
    }
    assert_eq!(server.get("/v1/processed?scope=s&id=i").is(200)["state"], Value::Null);
}

fn append(server: &Server, body: &Value) -> crate::common::serve::Answer {
    server.post("/v1/journal/append", body)
}

#[test]
fn appends_are_numbered_checked_and_repeatable() {
    let (_dir, server) = server(&[]);
    let body = json!({"aggregate": "orders/17", "expected": 0, "events": [
        {"id": "e-1", "kind": "order.placed", "time": "2026-03-02T10:00:00Z", "payload": {"b": 1, "a": [1.50, null]}, "headers": [{"name": "h", "value": "ü"}]},
        {"id": "e-2", "payload_base64": "/w=="},
    ]});
    let placed = append(&server, &body).is(200);
    assert_eq!((&placed["last_seq"], &placed["events"][1]["placing"]), (&json!(2), &json!("new")));
    let again = append(&server, &body).is(200);
    assert_eq!((&again["last_seq"], &again["events"][0]["placing"]), (&json!(2), &json!("repeat")));
    let conflict =
        append(&server, &json!({"aggregate": "orders/17", "expected": 1, "events": [{"id": "e-3"}]}));
    conflict.problem(409, "conflict");
    assert_eq!((&conflict.json()["expected"], &conflict.json()["actual"]), (&json!(1), &json!(2)));
    append(&server, &json!({"aggregate": "orders/17", "expected": "new", "events": [{"id": "e-3"}]}))
        .problem(409, "conflict");
    let mismatch =
        append(&server, &json!({"aggregate": "orders/17", "events": [{"id": "e-1", "payload": 7}]}));
    assert!(mismatch.problem(422, "mismatch").contains("e-1"));
    let read = server.get("/v1/journal/aggregates/orders%2F17").is(200);
    assert_eq!((&read["last_seq"], &read["more"]), (&json!(2), &json!(false)));
    let event = &read["events"][0];
    assert_eq!((&event["kind"], &event["time"]), (&json!("order.placed"), &json!("2026-03-02T10:00:00Z")));
    assert_eq!(
        (&event["payload"], &event["headers"][0]["value"]),
        (&json!({"b": 1, "a": [1.50, null]}), &json!("ü"))
    );
    assert_eq!(read["events"][1]["payload_base64"], "/w==");
    assert!(
        server.get("/v1/journal/aggregates/orders%2F17").body.contains(r#"{"a":[1.5,null],"b":1}"#),
        "as it was sent"
    );
    let from = server.get("/v1/journal/aggregates/orders%2F17?from=2&limit=1").is(200);
    assert_eq!(from["events"][0]["id"], "e-2");
    assert_eq!(server.get("/v1/journal/aggregates/nobody").is(200)["last_seq"], 0);
    for (bad, says) in [
        (json!({"aggregate": "a", "events": []}), "0 events"),
        (json!({"aggregate": " ", "events": [{"id": "x"}]}), "blank"),
        (json!({"aggregate": "a", "events": [{"id": ""}]}), "empty"),
        (json!({"aggregate": "a", "events": [{"id": "x", "payload": 1, "payload_base64": ""}]}), "both"),
        (json!({"aggregate": "a", "events": [{"id": "x", "payload_base64": "*"}]}), "base64"),
        (json!({"aggregate": "a", "events": [{"id": "x", "headers": [{"name": "h"}]}]}), "value"),
        (json!({"aggregate": "a", "events": [{"id": "x", "time": "x"}]}), "time"),
        (
            json!({"aggregate": "a", "events": [{"id": "x", "payload": 1}, {"id": "x", "payload": 2}]}),
            "twice",
        ),
    ] {
        let problem = append(&server, &bad).problem(400, "invalid");
        assert!(problem.contains(says), "{bad}: {problem}");
    }
    let problem = append(&server, &json!({"aggregate": "a", "expected": -1, "events": [{"id": "x"}]}))
        .problem(400, "json-invalid");
    assert!(problem.contains("expected must be a whole number"), "{problem}");
    assert_eq!(server.get("/v1/journal/aggregates/a").is(200)["last_seq"], 0, "nothing of this was stored");
}

#[test]
fn commands_must_say_what_they_expect() {
    let (_dir, server) = server(&[]);
    let command = |id: &str, expected: Value| {
        let payload = json!({"metadata": {"kind": "command"}, "n": 1});
        append(
            &server,
            &json!({"aggregate": "o-1", "expected": expected, "events": [{"id": id, "kind": "UPDATE_ORDER", "payload": payload}]}),
        )
    };
    assert!(command("c-1", json!("any")).problem(400, "invalid").contains("must say which seq"));
    command("c-1", json!(0)).is(200);
    command("c-2", json!(0)).problem(409, "conflict");
    command("c-2", json!(1)).is(200);
}

#[test]
fn under_warn_a_reused_id_gets_the_original_and_a_warning() {
    let (_dir, server) = server(&["--set", "journal.mismatch=warn"]);
    append(&server, &json!({"aggregate": "o-1", "events": [{"id": "e-1", "payload": {"n": 1}}]})).is(200);
    let kept =
        append(&server, &json!({"aggregate": "o-1", "events": [{"id": "e-1", "payload": {"n": 2}}]})).is(200);
    assert!(kept["warning"].as_str().unwrap().contains("e-1"), "{kept}");
    assert_eq!((&kept["events"][0]["placing"], &kept["events"][0]["seq"]), (&json!("kept"), &json!(1)));
    assert_eq!(kept["events"][0]["original"]["payload"], json!({"n": 1}));
}

#[test]
fn events_are_read_in_order_and_only_by_their_tenant() {
    let (_dir, server) = server(&[]);
    let body = |id: &str| json!({"aggregate": "o-1", "events": [{"id": id, "payload": {"of": id}}]});
    for n in 0..3 {
        append(&server, &body(&format!("e-{n}"))).is(200);
        server
            .post_with("/v1/journal/append", &[("hapax-tenant", "acme")], &body(&format!("acme-{n}")))
            .is(200);
    }
    let read = |tenant: Option<&str>, query: &str| {
        let headers: Vec<_> = tenant.map(|tenant| ("hapax-tenant", tenant)).into_iter().collect();
        let (mut ids, mut after) = (Vec::new(), String::new());
        loop {
            let path = format!("/v1/journal/events?limit=2{query}{after}");
            let page = request(&server.address, "GET", &path, &headers, b"").is(200);
            ids.extend(
                page["events"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|event| event["id"].as_str().unwrap().to_owned()),
            );
            after = format!("&after={}", page["next"].as_str().unwrap());
            if page["more"] == false {
                return ids;
            }
        }
    };
    assert_eq!(read(None, ""), ["e-0", "e-1", "e-2"]);
    assert_eq!(read(Some("acme"), ""), ["acme-0", "acme-1", "acme-2"]);
    assert_eq!(read(Some("other"), ""), [""; 0]);
    assert_eq!(read(None, "&all_tenants=true").len(), 6);
    let of_acme =
        request(&server.address, "GET", "/v1/journal/aggregates/o-1", &[("hapax-tenant", "acme")], b"")
            .is(200);
    assert_eq!(of_acme["events"][0]["id"], "acme-0");
    // A reader that waits gets the next event when it comes.
    let address = server.address.clone();
    let waiter = std::thread::spawn(move || {
        let mut after = "6".to_owned();
        loop {
            let page = request(
                &address,
                "GET",
                &format!("/v1/journal/events?wait_ms=10000&after={after}"),
                &[],
                b"",
            )
            .is(200);
            if page["events"] != json!([]) {
                return page["events"][0]["id"].clone();
            }
            after = page["next"].as_str().unwrap().to_owned();
        }
    });
    append(&server, &body("late")).is(200);
    assert_eq!(waiter.join().unwrap(), "late");
}

#[test]
fn keys_are_told_to_their_tenant() {
    use hapax::keyed::{Answer, Begin, Begun, IdempotencyKey, Keys as _, RequestFingerprint, RequestParts};
    let (dir, server) = server(&[]);
    assert_eq!(server.get("/v1/keys/k-1").is(200)["state"], "unknown");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", dir.path().join("hapax-data/journal.db").display());
        let keys = hapax::open::keys(&url).await.unwrap();
        let begin = async |tenant: Option<&str>, key: &str| {
            let fingerprint = RequestFingerprint::of(
                keys.secret(),
                &RequestParts { method: "POST", target: "/", ..RequestParts::default() },
            );
            let tenant = tenant.map(|tenant| hapax::Tenant::new(tenant).unwrap());
            let Begun::First(lease) = keys
                .begin(&Begin::new(tenant, IdempotencyKey::new(key).unwrap(), fingerprint))
                .await
                .unwrap()
            else {
                panic!("{key}")
            };
            lease
        };
        begin(None, "k-running").await;
        let lease = begin(None, "k-1").await;
        let answer = Answer::new(201, "{\"id\":17}").header("location", "/orders/17");
        keys.finish(&lease, &answer).await.unwrap();
        begin(Some("acme"), "k-acme").await;
    });
    let done = server.get("/v1/keys/k-1").is(200);
    assert_eq!(
        (&done["state"], &done["answer"]["status"], &done["answer"]["body"]),
        (&json!("done"), &json!(201), &json!("{\"id\":17}"))
    );
    assert_eq!(done["answer"]["headers"], json!([["location", "/orders/17"]]));
    assert_eq!(server.get("/v1/keys/k-running").is(200)["state"], "running");
    assert_eq!(server.get("/v1/keys/k-acme").is(200)["state"], "unknown", "it is another tenant's");
    let keys = |query: &str| {
        let listed = server.get(&format!("/v1/keys{query}")).is(200);
        listed["keys"]
            .as_array()
            .unwrap()
            .iter()
            .map(|key| key["key"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(keys(""), ["k-1", "k-running"]);
    assert_eq!(keys("?open=true"), ["k-running"]);
    assert_eq!(keys("?limit=1"), ["k-1"]);
    assert_eq!(keys("?after=k-1"), ["k-running"]);
    assert_eq!(keys("?all_tenants=true").len(), 3);
    let of_acme = request(&server.address, "GET", "/v1/keys", &[("hapax-tenant", "acme")], b"").is(200);
    assert_eq!(of_acme["keys"].as_array().unwrap().len(), 1);
}

/// Makes an event dead.
fn kill(server: &Server, tenant: Option<&str>, id: &str) {
    let headers: Vec<_> = tenant.map(|tenant| ("hapax-tenant", tenant)).into_iter().collect();
    let claimed = server.post_with("/v1/claims", &headers, &json!({"scope": "mailer", "id": id})).is(200);
    let fail = json!({"scope": "mailer", "id": id, "token": claimed["token"], "reason": "r", "then": "dead", "payload": {"id": id}});
    assert_eq!(server.post_with("/v1/claims/fail", &headers, &fail).is(200)["state"], "dead");
}

#[test]
fn dead_letters_are_run_again_or_dropped_by_name() {
    let (dir, server) = server(&[]);
    for id in ["e-1", "e-2", "e-3"] {
        kill(&server, None, id);
    }
    kill(&server, Some("acme"), "acme-1");
    let redrive = |body: Value| server.post("/v1/dead/redrive", &body);
    let tried =
        redrive(json!({"scope": "mailer", "ids": ["e-1"], "reason": "fixed", "dry_run": true})).is(200);
    assert_eq!((&tried["dry_run"], &tried["entries"][0]["after"]["state"]), (&json!(true), &json!("retry")));
    assert_eq!(state(&server, "e-1"), "dead", "it was a dry run");
    let done = redrive(json!({"scope": "mailer", "ids": ["e-1"], "reason": "fixed in 1.4.2"})).is(200);
    assert_eq!(done["entries"][0]["what"], "redrive");
    // It was claimed over HTTP: no consumer takes it up by itself.
    assert_eq!(done["entries"][0]["needs_delivery"], json!(true), "t341: {done}");
    assert_eq!(state(&server, "e-1"), "retry");
    // One mistake in the list: nothing is changed.
    redrive(json!({"scope": "mailer", "ids": ["e-2", "nobody"], "reason": "r"})).problem(404, "not-found");
    redrive(json!({"scope": "mailer", "ids": ["e-2", "e-1"], "reason": "r"})).problem(409, "conflict");
    assert_eq!(state(&server, "e-2"), "dead");
    for bad in [
        json!({"scope": "mailer", "reason": "r"}),
        json!({"scope": "mailer", "ids": ["e-2"], "all": true, "reason": "r"}),
        json!({"scope": "mailer", "ids": ["e-2"], "reason": " "}),
        json!({"scope": "mailer", "ids": ["e-2"], "reason": "r", "how": "skip"}),
        json!({"scope": "mailer", "ids": ["e-2"], "reason": "r", "limit": 1}),
        json!({"scope": "mailer", "all": true, "reason": "r", "limit": 0}),
        json!({"scope": "", "ids": ["e-2"], "reason": "r"}),
    ] {
        redrive(bad).problem(400, "invalid");
    }
    let dropped = server
        .post("/v1/dead/drop", &json!({"scope": "mailer", "all": true, "limit": 1, "reason": "test data"}))
        .is(200);
    assert_eq!((dropped["entries"].as_array().unwrap().len(), &dropped["more"]), (1, &json!(true)));
    let dropped =
        server.post("/v1/dead/drop", &json!({"scope": "mailer", "all": true, "reason": "test data"})).is(200);
    assert_eq!((dropped["entries"].as_array().unwrap().len(), &dropped["more"]), (1, &json!(false)));
    assert_eq!(server.get("/v1/dead").is(200)["entries"], json!([]), "those of acme are not ours");
    assert_eq!(server.get("/v1/dead?all_tenants=true").is(200)["entries"][0]["id"], "acme-1");
    // Who did what, and why.
    let audit = crate::common::run(dir.path(), &["ledger", "audit", "--json"]).code(0).json();
    let row = audit["audit"].as_array().unwrap().iter().find(|row| row["what"] == "redrive").unwrap().clone();
    assert_eq!((&row["by"], &row["reason"]), (&json!("loopback"), &json!("fixed in 1.4.2")));
}

#[test]
fn parked_events_are_released() {
    use hapax::ledger::{
        Claim, Identity, LeaseSettings, Mode, OnDead, Order, OrderPolicy, Outcome, Settle, Verdict,
    };
    use hapax::{Aggregate, EventId, Scope};
    let (dir, server) = server(&[]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", dir.path().join("hapax-data/ledger.db").display());
        let ledger = hapax::open::ledger(&url).await.unwrap();
        for order in ["o-1", "o-2"] {
            let claim = |seq: u64| {
                let id = EventId::new(format!("{order}-{seq}")).unwrap();
                let settings =
                    LeaseSettings { lease: std::time::Duration::from_secs(60), attempts_max: 5, alone: true };
                let mut claim =
                    Claim::new(Identity::new(Scope::new("mailer").unwrap(), id), Mode::Lease(settings));
                let aggregate = Aggregate::new(order).unwrap();
                claim.order =
                    Some(Order { aggregate, seq, policy: OrderPolicy::Latest, on_dead: OnDead::Park });
                claim.hold = true;
                claim
            };
            let head = claim(1);
            let Some(Ok(Outcome::First(grant))) =
                ledger.claim(std::slice::from_ref(&head)).await.unwrap().pop()
            else {
                panic!()
            };
            let verdict = Verdict::Dead { reason: "r".into(), body: None };
            let settle = Settle {
                identity: head.identity.clone(),
                week: grant.week,
                token: grant.token,
                verdict,
                order: head.order.clone(),
                advance_to: None,
            };
            ledger
                .settle(&[settle])
                .await
                .unwrap()
                .pop()
                .unwrap()
                .unwrap()
                .ok_or_fenced(&head.identity, grant.token)
                .unwrap();
            let parked = ledger.claim(&[claim(2)]).await.unwrap().pop().unwrap().unwrap();
            assert_eq!(parked.name(), "parked");
        }
    });
    let parked = server.get("/v1/parked?scope=mailer&aggregate=o-1").is(200);
    assert_eq!((&parked["entries"][0]["id"], &parked["entries"][0]["seq"]), (&json!("o-1-2"), &json!(2)));
    let release = |body: Value| server.post("/v1/parked/release", &body);
    let resumed = release(json!({"scope": "mailer", "ids": ["o-1-2"], "reason": "fixed"})).is(200);
    assert_eq!(
        (&resumed["entries"][0]["what"], &resumed["entries"][0]["id"]),
        (&json!("redrive"), &json!("o-1-1")),
        "what it waits behind"
    );
    assert_eq!(state(&server, "o-1-1"), "retry");
    let skipped = release(
        json!({"scope": "mailer", "all": true, "aggregate": "o-2", "reason": "never mind", "how": "skip"}),
    )
    .is(200);
    assert_eq!(
        (&skipped["entries"][0]["what"], &skipped["entries"][0]["id"]),
        (&json!("skip"), &json!("o-2-2"))
    );
    assert_eq!(state(&server, "o-2-1"), "dead", "it stays dead");
    release(json!({"scope": "mailer", "ids": ["nobody"], "reason": "r"})).problem(404, "not-found");
    release(json!({"scope": "mailer", "ids": ["o-2-2"], "reason": "r", "out_of_order": true}))
        .problem(400, "invalid");
}

#[test]
fn statistics_are_of_the_caller() {
    let (_dir, server) = server(&[]);
    kill(&server, None, "e-1");
    kill(&server, Some("acme"), "e-1");
    append(&server, &json!({"aggregate": "a", "events": [{"id": "e-1"}]})).is(200);
    let stats = server.get("/v1/stats").is(200);
    assert_eq!(stats["ledger"], json!([{"tenant": null, "scope": "mailer", "state": "dead", "count": 1}]));
    assert_eq!((&stats["journal"]["events"], &stats["held"]), (&json!(1), &json!(1)));
    assert!(stats["relay"]["position"].is_string());
    let all = server.get("/v1/stats?all_tenants=true").is(200);
    assert_eq!((all["ledger"].as_array().unwrap().len(), &all["held"]), (2, &json!(2)));
    // What is counted for all tenants together is not told to one of them.
    let acme = request(&server.address, "GET", "/v1/stats", &[("hapax-tenant", "acme")], b"").is(200);
    assert_eq!(acme["ledger"], json!([{"tenant": "acme", "scope": "mailer", "state": "dead", "count": 1}]));
    assert_eq!((&acme["held"], &acme["journal"], &acme["relay"]), (&json!(1), &Value::Null, &Value::Null));
    let nobody = request(&server.address, "GET", "/v1/stats", &[("hapax-tenant", "other")], b"").is(200);
    assert_eq!((&nobody["ledger"], &nobody["held"]), (&json!([]), &json!(0)));
}

/// T424: without a tenant some commands mean all of them. No tenant can be named, too.
#[test]
fn t424_no_tenant_is_not_every_tenant() {
    let (dir, server) = server(&[]);
    for tenant in [None, Some("acme")] {
        kill(&server, tenant, "e-1");
    }
    let dir = dir.path();
    let list = |more: &[&str]| {
        let entries = run(dir, &[&["dead", "ls", "--json"], more].concat()).code(0).json()["entries"].clone();
        let tenants = entries.as_array().unwrap().iter().map(|entry| entry["tenant"].clone());
        tenants.collect::<Vec<_>>()
    };
    assert_eq!(list(&[]).len(), 2);
    assert_eq!(list(&["--no-tenant"]), [Value::Null]);
    assert_eq!(list(&["--tenant=acme"]), [json!("acme")]);
    let act = ["dead", "redrive", "--scope=mailer", "--no-tenant", "--all", "--yes", "--reason=r"];
    run(dir, &act).code(0);
    assert_eq!(list(&[]), [json!("acme")]);
    run(dir, &["dead", "ls", "--no-tenant", "--tenant", "acme"]).code(2);
    for command in [&["stats"][..], &["keys", "ls"]] {
        run(dir, &[command, &["--no-tenant"]].concat()).code(0);
    }
}
