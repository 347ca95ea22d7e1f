//! The operator's page and what it asks: its files, the life of an event, dead letters by reason, a redrive of
//! what was previewed, and the cookie of a browser. The page itself is tested in a browser (`ui/test`).

#![allow(missing_docs, clippy::unwrap_used)]

use serde_json::{Value, json};

use crate::common::consume::{Sample, consume, count, produce};
use crate::common::run;
use crate::serve_access::process::{Server, ask, port, until};
use crate::serve_tenants::token;

/// Claims an event and lets it die.
fn die(server: &Server, token: &str, scope: &str, id: &str, reason: &str) {
    let claimed = server.post("/v1/claims", token, &json!({"scope": scope, "id": id})).is(200);
    let fail = json!({"scope": scope, "id": id, "token": claimed["token"], "reason": reason, "then": "dead", "payload": 1});
    server.post("/v1/claims/fail", token, &fail).is(200);
}

#[test]
fn the_page_is_where_operators_are_and_has_no_data() {
    let dir = tempfile::tempdir().unwrap();
    let whole = Server::start(dir.path(), &[]);
    for path in ["/", "/event?id=x", "/dead", "/aggregates", "/retention", "/doctor", "/page.js", "/page.css"]
    {
        let answer = whole.ask("GET", path, &[], &Value::Null);
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        let head = answer.head.to_ascii_lowercase();
        for header in
            ["content-security-policy: default-src 'none'", "x-content-type-options: nosniff", "etag: \""]
        {
            assert!(head.contains(header), "{path} has no {header}: {head}");
        }
        assert!(!head.contains("unsafe"), "{head}");
    }
    whole.ask("POST", "/", &[], &json!({})).problem(405, "method-not-allowed");
    drop(whole);
    // Apart from operators, programs get no page.
    let dir = tempfile::tempdir().unwrap();
    let apart = Server::start(dir.path(), &["--admin-listen", "127.0.0.1:0"]);
    apart.ask("GET", "/", &[], &Value::Null).problem(404, "route-unknown");
    let admin = port(&apart.ready["admin_address"]);
    assert_eq!(ask(admin, "GET", "/", &[], &Value::Null).status, 200);
    assert_eq!(ask(admin, "GET", "/v1/overview", &[], &Value::Null).is(200)["scopes"], json!([]));
}

#[test]
fn the_life_of_an_event_is_what_the_command_tells_as_far_as_the_caller_may_see_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let [whole, acme, mailer] = [&[][..], &["--tenant", "acme"], &["--tenant", "acme", "--scope", "mailer"]]
        .map(|more| token(dir, &[&["--role", "admin"], more].concat()));
    let server = Server::start_whole(dir, &[]);
    let event = json!({"aggregate": "order-17", "events": [{"id": "order-17-paid"}]});
    server.post("/v1/journal/append", &acme, &event).is(200);
    die(&server, &acme, "mailer", "order-17-paid", "no such address");
    die(&server, &acme, "billing", "order-17-paid", "card declined");
    let path = "/v1/explain?id=order-17-paid";
    let scopes = |life: &Value| {
        let of_ledger = life["steps"].as_array().unwrap().iter().filter(|step| step["layer"] == "ledger");
        let mut names: Vec<String> =
            of_ledger.map(|step| step["name"].as_str().unwrap().to_owned()).collect();
        names.sort();
        names.dedup();
        names
    };
    let own = server.get(path, &acme).is(200);
    assert_eq!(scopes(&own), ["billing", "mailer"]);
    let parts = |life: &Value| (life["steps"][0].clone(), life["of"].clone(), life["not_recorded"].clone());
    // The relay goes on meanwhile: two looks agree once nothing changes any more.
    until("the server and the command say the same", || {
        let own = server.get(path, &acme).is(200);
        let answer = run(dir, &["explain", "order-17-paid", "--tenant", "acme", "--json"]).code(0).json();
        own["steps"][0].is_object() && parts(&own) == parts(&answer)
    });
    let bound = server.get(path, &mailer).is(200);
    assert_eq!(scopes(&bound), ["mailer"]);
    assert!(!bound.to_string().contains("card declined"), "{bound}");
    // Only who sees all tenants may name one, and learns where else to look.
    until("both callers see the same", || {
        let all = server.get(&format!("{path}&tenant=acme"), &whole).is(200);
        all["steps"] == server.get(path, &acme).is(200)["steps"]
    });
    let hint = server.get(path, &whole).problem(404, "not-found");
    assert!(hint.contains("tenant acme"), "{hint}");
    let none = server.get("/v1/explain?id=other", &acme).problem(404, "not-found");
    assert!(!none.contains("--tenant"), "{none}");
    server.get(&format!("{path}&tenant=other"), &acme).problem(403, "forbidden");
    server.get("/v1/explain", &acme).problem(400, "invalid");
    server.get("/v1/explain?id=a&key=b", &acme).problem(400, "invalid");
}

#[test]
fn a_redrive_does_what_was_previewed_and_leaves_what_changed_since() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    let server = Server::start_whole(dir, &[]);
    for n in 1..=3 {
        die(
            &server,
            &admin,
            "mailer",
            &format!("order-{n}-paid"),
            &format!("card of customer-{n} declined: HTTP 402"),
        );
    }
    die(&server, &admin, "mailer", "order-4-paid", "card of customer-4 declined: HTTP 500");
    let groups = server.get("/v1/dead/groups", &admin).is(200)["groups"].clone();
    assert_eq!(groups[0]["pattern"], "card of # declined: HTTP 402");
    assert_eq!((&groups[0]["count"], &groups[1]["count"]), (&json!(3), &json!(1)), "{groups}");
    let which = json!({"scope": "mailer", "pattern": groups[0]["pattern"]});
    let preview = server.post("/v1/dead/preview", &admin, &which).is(200)["events"].clone();
    let events = preview.as_array().unwrap();
    assert!(events.len() == 3 && events.iter().all(|event| event["runs"] == true), "{preview}");
    assert_eq!(
        server.get("/v1/dead", &admin).is(200)["entries"].as_array().unwrap().len(),
        4,
        "nothing is changed"
    );
    let tokens: serde_json::Map<_, _> = events
        .iter()
        .map(|event| (event["id"].as_str().unwrap().to_owned(), event["token"].clone()))
        .collect();
    // One runs and dies again meanwhile, one is dropped.
    let of = |ids: Value| json!({"scope": "mailer", "ids": ids, "reason": "meanwhile"});
    server.post("/v1/dead/redrive", &admin, &of(json!(["order-1-paid"]))).is(200);
    die(&server, &admin, "mailer", "order-1-paid", "card of customer-1 declined: HTTP 402");
    server.post("/v1/dead/drop", &admin, &of(json!(["order-2-paid"]))).is(200);
    let redrive = json!({"scope": "mailer", "ids": tokens.keys().collect::<Vec<_>>(), "tokens": tokens, "reason": "mended"});
    let done = server.post("/v1/dead/redrive", &admin, &redrive).is(200);
    let problem = |id: &str| {
        let entries = done["entries"].as_array().unwrap();
        entries.iter().find(|entry| entry["id"] == id).unwrap()["problem"]["detail"].clone()
    };
    assert!(problem("order-1-paid").as_str().unwrap().contains("has changed since"), "{done}");
    assert!(problem("order-2-paid").as_str().unwrap().contains("lost"), "{done}");
    assert_eq!(problem("order-3-paid"), Value::Null);
    let dead = server.get("/v1/dead", &admin).is(200)["entries"].clone();
    let mut ids: Vec<_> =
        dead.as_array().unwrap().iter().map(|entry| entry["id"].as_str().unwrap()).collect();
    ids.sort_unstable();
    assert_eq!(ids, ["order-1-paid", "order-4-paid"]);
    let audit = server.get("/v1/audit", &admin).body;
    assert!(audit.contains("mended") && audit.contains("order-3-paid"), "{audit}");
    for bad in [
        json!({"scope": "mailer", "all": true, "tokens": {"a": 1}, "reason": "r"}),
        json!({"scope": "mailer", "ids": ["a", "b"], "tokens": {"a": 1}, "reason": "r"}),
    ] {
        server.post("/v1/dead/redrive", &admin, &bad).problem(400, "invalid");
    }
}

/// What each decision would do is told event by event, and done to exactly these.
#[test]
fn every_decision_is_previewed_and_changes_nothing_before() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    // `a1` is dead, `a2` and `a3` wait behind it; `b` is dead and nothing waits for it.
    let line = |id: &str, seq: u32, what: &str| {
        json!({"event_id": id, "aggregate_id": &id[..1], "seq": seq, "do": what}).to_string() + "\n"
    };
    let lines =
        [line("a1", 1, "break"), line("a2", 2, ""), line("a3", 3, ""), line("b1", 1, "break")].concat();
    produce(dir, &lines);
    let command = Sample::Python.handler(dir, "if do == 'break': raise Fatal('no such order')");
    let strict = ["--order", "strict", "--on-dead", "park", "--first-seq", "1"];
    let ran = consume(dir, &command, &strict).code(0);
    assert_eq!(count(&ran, "dead"), 2, "{}", ran.out);

    let server = Server::start_whole(dir, &[]);
    let entries = || {
        let of = |path: &str| server.get(path, &admin).is(200)["entries"].clone();
        (of("/v1/dead"), of("/v1/parked"))
    };
    let (before, audit) = (entries(), server.get("/v1/audit", &admin).body);
    let preview = |what: &str| {
        let body = json!({"scope": "mailer", "what": what});
        let mut events =
            server.post("/v1/dead/preview", &admin, &body).is(200)["events"].as_array().unwrap().clone();
        events.sort_by_key(|event| event["id"].to_string());
        assert_eq!(entries(), before, "a preview of {what} changes something");
        events
    };
    let audited = |what: &str| -> Vec<(String, String, bool, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let of = |event: &Value| {
            (text(&event["id"]), text(&event["what"]), event["runs"] == true, text(&event["outcome"]))
        };
        preview(what).iter().map(of).collect()
    };
    let one = |id: &str, what: &str, runs: bool, outcome: &str| {
        (id.to_owned(), what.to_owned(), runs, outcome.to_owned())
    };
    let again = "runs again now, its attempts count from 0";
    let lost = "is lost: its bytes are deleted, its aggregate goes on past it";
    let past = "stays parked, its aggregate goes on past what it waits behind";
    assert_eq!(audited("redrive"), [one("a1", "redrive", true, again), one("b1", "redrive", true, again)]);
    assert_eq!(audited("drop"), [one("a1", "drop", false, lost), one("b1", "drop", false, lost)]);
    assert_eq!(audited("resume"), [one("a1", "redrive", true, again)]);
    assert_eq!(audited("skip"), [one("a2", "skip", false, past)]);
    assert_eq!(server.get("/v1/audit", &admin).body, audit, "a preview leaves no audit row");
    for (what, field) in [("drop", "out_of_order"), ("resume", "out_of_order"), ("skip", "out_of_order")] {
        let body = json!({"scope": "mailer", "what": what, field: true});
        server.post("/v1/dead/preview", &admin, &body).problem(400, "invalid");
    }

    // The drop is bound to what was shown: one of the two is changed meanwhile, and stays.
    let shown = preview("drop");
    let tokens: serde_json::Map<_, _> =
        shown.iter().map(|one| (one["id"].as_str().unwrap().to_owned(), one["token"].clone())).collect();
    let redrive = json!({"scope": "mailer", "ids": ["b1"], "reason": "meanwhile"});
    server.post("/v1/dead/redrive", &admin, &redrive).is(200);
    let drop = json!({"scope": "mailer", "ids": tokens.keys().collect::<Vec<_>>(), "tokens": tokens, "reason": "given up"});
    let done = server.post("/v1/dead/drop", &admin, &drop).is(200);
    let of = |id: &str| {
        let entries = done["entries"].as_array().unwrap();
        entries.iter().find(|entry| entry["id"] == id).unwrap().clone()
    };
    assert_eq!((&of("a1")["problem"], &of("a1")["after"]["state"]), (&Value::Null, &json!("lost")), "{done}");
    assert!(of("b1")["problem"].is_object() && of("b1")["after"].is_null(), "{done}");
}

/// T423: what a preview of a resume or a skip names is what the request that follows takes; an aggregate that cannot go
/// on is a row with its reason.
#[test]
fn t423_a_resume_and_a_skip_are_carried_out_as_previewed() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    // `a1` is dead, and `a2` waits behind it. What `c2` waits for never comes.
    let line = |id: &str, seq: u32, what: &str| {
        json!({"event_id": id, "aggregate_id": &id[..1], "seq": seq, "do": what}).to_string() + "\n"
    };
    let lines = [line("a1", 1, "break"), line("a2", 2, ""), line("c2", 2, "")].concat();
    produce(dir, &lines);
    let command = Sample::Python.handler(dir, "if do == 'break': raise Fatal('no such order')");
    let gap = ["--set", "consumer.gap_timeout_ms=100"];
    let strict = ["--order", "strict", "--on-dead", "park", "--first-seq", "1"];
    let counts = consume(dir, &command, &[&strict[..], &gap].concat()).code(0);
    assert_eq!((count(&counts, "dead"), count(&counts, "parked")), (1, 2));

    let server = Server::start_whole(dir, &[]);
    let decide = |what: &str, aggregate: Value| {
        let body = json!({"scope": "mailer", "what": what, "aggregate": aggregate});
        let shown = server.post("/v1/dead/preview", &admin, &body).is(200)["events"].clone();
        let events = shown.as_array().unwrap();
        let id = |event: &Value| event["id"].as_str().unwrap().to_owned();
        let tokens: serde_json::Map<_, _> =
            events.iter().map(|event| (id(event), event["token"].clone())).collect();
        let ids: Vec<_> = events.iter().map(id).collect();
        let body = json!({"scope": "mailer", "ids": ids, "tokens": tokens, "reason": "mended", "how": what});
        (shown, server.post("/v1/parked/release", &admin, &body).is(200)["entries"].clone())
    };
    let of = |entries: &Value, id: &str| {
        entries.as_array().unwrap().iter().find(|entry| entry["id"] == id).unwrap().clone()
    };
    let (shown, done) = decide("resume", Value::Null);
    assert_eq!((&of(&shown, "a1")["what"], &of(&shown, "a1")["changes"]), (&json!("redrive"), &json!(true)));
    let stays = of(&shown, "c2");
    assert_eq!(stays["changes"], false, "{shown}");
    assert!(stays["outcome"].as_str().unwrap().contains("never came"), "{shown}");
    assert_eq!(
        (&of(&done, "a1")["problem"], &of(&done, "a1")["after"]["state"]),
        (&Value::Null, &json!("retry"))
    );
    assert_eq!(of(&done, "c2")["problem"]["code"], "conflict", "{done}");
    // What was redriven meanwhile is neither parked nor dead: it stays, and says so.
    let again = json!({"scope": "mailer", "ids": ["a1"], "tokens": {"a1": of(&shown, "a1")["token"]}, "reason": "again"});
    let again = server.post("/v1/parked/release", &admin, &again).is(200);
    assert_eq!(again["entries"][0]["problem"]["code"], "conflict", "{again}");
    // The other way on.
    let (shown, done) = decide("skip", json!("c"));
    assert_eq!((&shown[0]["id"], &shown[0]["changes"]), (&json!("c2"), &json!(true)), "{shown}");
    assert_eq!(of(&done, "c2")["problem"], Value::Null, "{done}");
    // The command says the same of all that match, and leaves what cannot go on.
    let all = ["parked", "resume", "--scope", "mailer", "--all", "--reason", "r", "--yes", "--json"];
    let ran = run(dir, &all).code(0).json();
    assert!(ran["entries"].as_array().unwrap().iter().all(|entry| entry["id"] != "a1"), "{ran}");
    // Of two entries with one id each has a token of its own.
    let twice = json!({"scope": "mailer", "ids": ["a1", "a1"], "tokens": {"a1": 1}, "reason": "r"});
    let refused = server.post("/v1/dead/redrive", &admin, &twice).problem(400, "invalid");
    assert!(refused.contains("twice"), "{refused}");
}

/// T425: whoever asks over HTTP is shown no more secrets of reasons than whoever asks by the command.
#[test]
fn t425_no_answer_has_the_secrets_of_a_reason() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start_whole(dir.path(), &[]);
    let reason = "bank: x-api-key: s3cret, authorization: Bearer s3cret, cookie: sid=s3cret; a=s3cret";
    let claimed = server.ask("POST", "/v1/claims", &[], &json!({"scope": "mailer", "id": "e"})).is(200);
    let fail = json!({"scope": "mailer", "id": "e", "token": claimed["token"], "reason": reason, "then": "dead", "payload": 1});
    server.ask("POST", "/v1/claims/fail", &[], &fail).is(200);
    let preview = json!({"scope": "mailer", "pattern": null});
    for (method, path, body) in [
        ("GET", "/v1/explain?id=e", Value::Null),
        ("GET", "/v1/dead/groups", Value::Null),
        ("POST", "/v1/dead/preview", preview),
    ] {
        let answer = server.ask(method, path, &[], &body).is(200).to_string();
        assert!(answer.contains("x-api-key: ***") && !answer.contains("s3cret"), "{path}: {answer}");
    }
    // The pattern that a group has finds what is in it.
    let groups = server.ask("GET", "/v1/dead/groups", &[], &Value::Null).is(200);
    let which = json!({"scope": "mailer", "pattern": groups["groups"][0]["pattern"]});
    let found = server.ask("POST", "/v1/dead/preview", &[], &which).is(200);
    assert_eq!(found["events"].as_array().unwrap().len(), 1, "{found}");
}

#[test]
fn t338_a_cookie_changes_something_only_from_the_servers_own_page() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    let login = server.ask("POST", "/v1/login", &[], &json!({"token": admin}));
    assert_eq!(login.status, 204, "{login:?}");
    let cookie =
        login.head.lines().find(|line| line.to_ascii_lowercase().starts_with("set-cookie:")).unwrap();
    assert!(cookie.ends_with("; Path=/; HttpOnly; SameSite=Strict"), "{cookie}");
    let cookie = format!("hapax_token={admin}");
    let with = ("cookie", &*cookie);
    assert_eq!(server.ask("GET", "/v1/session", &[with], &Value::Null).is(200)["role"], "admin");
    let own = format!("http://127.0.0.1:{}", server.port);
    let body = json!({"scope": "mailer", "ids": ["a"], "reason": "r"});
    let redrive =
        |more: &[(&str, &str)]| server.ask("POST", "/v1/dead/redrive", &[&[with], more].concat(), &body);
    redrive(&[]).problem(403, "origin-forbidden");
    redrive(&[("origin", "http://127.0.0.1:1")]).problem(403, "origin-forbidden");
    redrive(&[("origin", &own)]).problem(404, "not-found"); // it was asked for, and there is none
    server
        .ask("POST", "/v1/login", &[("origin", "http://evil.example")], &json!({"token": admin}))
        .problem(403, "origin-forbidden");
    server.ask("POST", "/v1/login", &[], &json!({"token": "hpx_no"})).problem(401, "unauthenticated");
    // A header counts before the cookie, and two cookies are none.
    server
        .ask("GET", "/v1/session", &[with, ("authorization", "Bearer hpx_no")], &Value::Null)
        .problem(401, "unauthenticated");
    server.ask("GET", "/v1/session", &[with, with], &Value::Null).problem(401, "unauthenticated");
    let logout = server.ask("POST", "/v1/logout", &[with, ("origin", &own)], &Value::Null);
    assert!(logout.status == 204 && logout.head.contains("Max-Age=0"), "{logout:?}");
    // What ends the token ends the visit.
    run(dir, &["token", "revoke", crate::serve_tenants::id(&admin)]).code(0);
    until("the cookie is refused", || server.ask("GET", "/v1/session", &[with], &Value::Null).status == 401);
}

#[test]
fn the_numbers_come_live_and_end_when_the_server_stops() {
    let dir = tempfile::tempdir().unwrap();
    let mut server = Server::start_whole(dir.path(), &["--set", "serve.drain_ms=120000"]);
    server.ask("POST", "/v1/claims", &[], &json!({"scope": "mailer", "id": "a"})).is(200);
    let live = server.ask("GET", "/v1/overview/live?seconds=3", &[], &Value::Null);
    assert!(live.head.to_ascii_lowercase().contains("content-type: text/event-stream"), "{live:?}");
    assert!(live.body.matches("event: overview\n").count() >= 2, "{live:?}");
    assert!(live.body.contains("\"states\":{\"leased\":1}"), "{live:?}");
    assert!(live.body.contains("\"age_s\":") && live.body.contains("\"took_s\":"), "{live:?}");
    server.ask("GET", "/v1/overview/live?seconds=61", &[], &Value::Null).problem(400, "invalid");
    let mut listens = std::net::TcpStream::connect(("127.0.0.1", server.port)).unwrap();
    let asks = format!("GET /v1/overview/live HTTP/1.1\r\nhost: 127.0.0.1:{}\r\n\r\n", server.port);
    std::io::Write::write_all(&mut listens, asks.as_bytes()).unwrap();
    let mut first = [0; 15];
    std::io::Read::read_exact(&mut listens, &mut first).unwrap();
    assert_eq!(&first, b"HTTP/1.1 200 OK");
    let began = std::time::Instant::now();
    let stop = std::process::Command::new("kill").arg(server.child.id().to_string()).status().unwrap();
    assert!(stop.success() && server.child.wait().is_ok());
    assert!(began.elapsed() < std::time::Duration::from_secs(100), "whoever listens does not hold up a stop");
}

/// Where the identity includes the time, an id may have an entry in each week. All of them can be looked at and changed,
/// and the one that was looked at is.
#[test]
fn t391_what_is_dead_can_be_redriven_where_the_identity_includes_the_time() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("hapax.toml"), "[ledger]\nidentity = \"id_and_time\"\n").unwrap();
    let admin = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    let (january, march) = ("2024-01-03T00:00:00Z", "2024-03-06T00:00:00Z");
    for (id, time) in [("order-1", january), ("order-1", march), ("order-2", january)] {
        let claim = json!({"scope": "mailer", "id": id, "time": time});
        let claimed = server.post("/v1/claims", &admin, &claim).is(200);
        let fail = json!({"scope": "mailer", "id": id, "time": time, "token": claimed["token"], "reason": "declined", "then": "dead", "payload": 1});
        server.post("/v1/claims/fail", &admin, &fail).is(200);
    }
    let preview = server.post("/v1/dead/preview", &admin, &json!({"scope": "mailer"})).is(200);
    let events = preview["events"].as_array().unwrap();
    assert!(events.len() == 3 && events.iter().all(|event| event["runs"] == true), "{preview}");
    let dead = || {
        let entries = server.get("/v1/dead", &admin).is(200)["entries"].clone();
        let mut tokens: Vec<i64> =
            entries.as_array().unwrap().iter().map(|entry| entry["token"].as_i64().unwrap()).collect();
        tokens.sort_unstable();
        tokens
    };
    let before = dead();
    // Which of two is not said.
    let which = json!({"scope": "mailer", "ids": ["order-1"], "reason": "mended"});
    let audited = server.post("/v1/dead/redrive", &admin, &which).problem(400, "invalid");
    assert!(audited.contains("2 entries") && audited.contains("times"), "{audited}");
    assert_eq!(dead(), before, "nothing was changed");
    // The token of what was looked at says it.
    let second =
        events.iter().filter(|event| event["id"] == "order-1").nth(1).unwrap()["token"].as_i64().unwrap();
    let which =
        json!({"scope": "mailer", "ids": ["order-1"], "tokens": {"order-1": second}, "reason": "mended"});
    let done = server.post("/v1/dead/redrive", &admin, &which).is(200);
    assert!(done["entries"][0].get("problem").is_none(), "{done}");
    assert_eq!(dead(), before.into_iter().filter(|token| *token != second).collect::<Vec<_>>());
    let all = ["dead", "redrive", "--scope", "mailer", "--all", "--yes", "--reason", "mended"];
    run(dir, &all).code(0);
    assert_eq!(dead(), [0i64; 0]);
}
