//! What one tenant learns of another through the server: nothing. Tokens of two tenants on every route.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax::access::{ApiToken, TokenId};
use hapax::ledger::{
    Claim, Identity, LeaseSettings, Mode, OnDead, Order, OrderPolicy, Outcome, Settle, Verdict,
};
use hapax::{Aggregate, EventId, Scope, Tenant};
use serde_json::{Value, json};

use crate::common::run;
use crate::serve_access::process::{Answer, Server, until};

const ZEBRA: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
const OTHER: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000b";

/// A number in a record of the tenant, which sums and the like would show. It is in the markers.
const ZEBRAS: u64 = 7_352_918_465;

/// Makes a token by the CLI.
pub fn token(dir: &Path, args: &[&str]) -> String {
    run(dir, &[&["token", "create", "--name", "test"], args].concat()).code(0).out.trim().to_owned()
}

pub fn id(token: &str) -> &str {
    &token[4..20]
}

/// What is one tenant's, and must be in no answer to anybody else.
const MARKERS: [&str; 10] = [
    ZEBRA,
    "7352918465",
    "zebrascope",
    "zebraevent",
    "zebraagg",
    "zebrakey",
    "zebrapayload",
    "zebrareason",
    "zebratoken",
    "zebrarecord",
];

/// The text, and whatever it may hide: runs of hexadecimal digits and of base64, decoded.
fn shown(text: &str) -> Vec<String> {
    let mut all = vec![text.to_owned()];
    for run in text.split(|c: char| !c.is_ascii_hexdigit()).filter(|run| run.len() >= 8) {
        for from in 0..2 {
            let bytes: Vec<u8> = (from..run.len() - 1)
                .step_by(2)
                .map(|at| u8::from_str_radix(&run[at..at + 2], 16).unwrap())
                .collect();
            all.push(String::from_utf8_lossy(&bytes).into_owned());
        }
    }
    let in_base64 = |c: char| c.is_ascii_alphanumeric() || matches!(c, '+' | '/' | '-' | '_');
    for run in text.split(|c: char| !in_base64(c)).filter(|run| run.len() >= 8) {
        let run = run.replace('-', "+").replace('_', "/");
        for from in 0..4.min(run.len()) {
            let part = &run[from..];
            let part = &part[..part.len() / 4 * 4];
            all.extend(STANDARD.decode(part).ok().map(|bytes| String::from_utf8_lossy(&bytes).into_owned()));
        }
    }
    all
}

/// No marker is in an answer but for those that the request itself named.
#[track_caller]
fn shows_nothing(asked: &str, answer: &Answer) {
    for text in shown(&format!("{}\n{}", answer.head, answer.body)) {
        for marker in MARKERS.iter().filter(|marker| !asked.contains(**marker)) {
            assert!(!text.contains(marker), "{asked} shows {marker}: {text}\n{answer:?}");
        }
    }
}

/// A request that a stranger sends.
struct Asked {
    target: String,
    body: Value,
    key: String,
}

/// What the tenant has, by which strangers ask for it.
struct Known {
    slug: String,
    token_id: String,
    lease: Value,
    record: String,
}

/// The requests that come nearest to what is the tenant's. An operation that is not here fails the test.
#[allow(clippy::too_many_lines)] // a line per part of the API
fn requests(method: &str, path: &str, known: &Known) -> Option<Vec<Asked>> {
    let settle = json!({"scope": "mailer", "id": "zebraevent-3", "token": known.lease, "reason": "r"});
    let bare = json!({"scope": "mailer", "id": "zebraevent-3", "token": known.lease});
    let change = |more: Value| {
        let mut body = json!({"scope": "mailer", "reason": "r"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let taken = ApiToken::with_secret(TokenId::new(&*known.token_id).unwrap()).expose().to_owned();
    let (records, read) =
        (format!("/v1/modules/{}/records", known.slug), format!("/v1/analytics/modules/{}", known.slug));
    let record = format!("{records}/{}", known.record);
    let get = |targets: &[&str]| targets.iter().map(|target| ((*target).to_owned(), Value::Null)).collect();
    let post = |bodies: Vec<Value>| bodies.into_iter().map(|body| (path.to_owned(), body)).collect();
    let all: Vec<(String, Value)> = match (method, path) {
        ("get", "/healthz" | "/readyz" | "/metrics" | "/v1/info" | "/v1/stats") => get(&[path]),
        ("get", "/v1/session" | "/v1/overview" | "/v1/doctor" | "/v1/retention" | "/v1/waiting") => {
            get(&[path])
        }
        ("get", "/v1/overview/live") => get(&["/v1/overview/live?seconds=1"]),
        ("get", "/v1/dead/groups") => {
            get(&[path, "/v1/dead/groups?scope=mailer", "/v1/dead/groups?all_tenants=true"])
        }
        ("get", "/v1/explain") => {
            let of_them = format!("/v1/explain?id=zebraevent-2&tenant={ZEBRA}");
            let ids =
                ["zebraevent-1", "zebraevent-2", "zebraevent-5"].map(|id| format!("/v1/explain?id={id}"));
            get(&[
                &ids[0],
                &ids[1],
                &ids[2],
                &of_them,
                "/v1/explain?aggregate=zebraagg",
                "/v1/explain?key=zebrakey-post",
            ])
        }
        ("post", "/v1/dead/preview") => {
            post(vec![json!({"scope": "mailer"}), json!({"scope": "mailer", "tenant": ZEBRA})])
        }
        ("post", "/v1/login") => post(vec![json!({"token": taken})]),
        ("post", "/v1/logout") => post(vec![json!({})]),
        ("get", "/v1/audit" | "/v1/keys" | "/v1/journal/events") => {
            get(&[path, &format!("{path}?limit=1"), &format!("{path}?limit=1000")])
        }
        ("get", "/v1/dead" | "/v1/parked" | "/v1/held" | "/v1/lost") => {
            let (one, all) =
                (format!("{path}?limit=1&payload=true"), format!("{path}?limit=1000&payload=true"));
            get(&[&one, &all, &format!("{path}?scope=mailer&limit=1")])
        }
        ("get", "/v1/tokens") => {
            get(&["/v1/tokens?limit=1", &format!("/v1/tokens?limit=1000&made_by={}", known.token_id)])
        }
        ("get", "/v1/processed") => get(&["/v1/processed?scope=mailer&id=zebraevent-2"]),
        ("get", "/v1/keys/{key}") => get(&["/v1/keys/zebrakey"]),
        ("get", "/v1/journal/aggregates/{aggregate}") => get(&["/v1/journal/aggregates/zebraagg"]),
        ("get", "/v1/modules/{slug}/records") => get(&[&format!("{records}?limit=1")]),
        ("get", "/v1/modules/{slug}/records/{id}") => get(&[&record]),
        ("post", "/v1/claims") => post(vec![json!({"scope": "mailer", "id": "zebraevent-2"})]),
        ("post", "/v1/claims/batch") => {
            post(vec![json!({"claims": [{"scope": "mailer", "id": "zebraevent-1"}]})])
        }
        ("post", "/v1/claims/done" | "/v1/claims/extend" | "/v1/claims/release") => post(vec![bare]),
        ("post", "/v1/claims/done/batch") => post(vec![json!({"claims": [bare]})]),
        ("post", "/v1/claims/fail") => post(vec![settle]),
        ("post", "/v1/journal/append") => {
            post(vec![json!({"aggregate": "zebraagg", "expected": 7, "events": [{"id": "zebraevent-5"}]})])
        }
        ("post", "/v1/dead/redrive" | "/v1/dead/drop") => post(vec![
            change(json!({"all": true})),
            change(json!({"ids": ["zebraevent-2"]})),
            change(json!({"ids": ["zebraevent-2"], "tokens": {"zebraevent-2": 1}})),
            change(json!({"ids": ["zebraevent-2"], "tenant": ZEBRA})),
        ]),
        ("post", "/v1/parked/release") => post(vec![
            change(json!({"all": true})),
            change(json!({"all": true, "how": "skip"})),
            change(json!({"ids": ["zebraevent-p2"]})),
        ]),
        ("post", "/v1/tokens") => post(vec![
            json!({"name": "x", "role": "read", "scopes": ["mailer"]}),
            json!({"name": "x", "role": "read", "scopes": ["mailer"], "token": taken}),
        ]),
        ("post", "/v1/tokens/{id}/rotate") => {
            vec![(format!("/v1/tokens/{}/rotate", known.token_id), json!({"rotations": 0}))]
        }
        ("delete", "/v1/tokens/{id}") => {
            vec![(format!("/v1/tokens/{}?children=true", known.token_id), Value::Null)]
        }
        ("get", "/v1/analytics/status") => vec![("/v1/analytics/status".to_owned(), Value::Null)],
        ("get", "/v1/analytics/modules/{slug}/records") => {
            let of_them = format!("{}/{}@1", known.slug, known.record);
            let waiting = format!("{read}/records?after_write={of_them}&wait_ms=0");
            get(&[&format!("{read}/records?limit=1"), &format!("{read}/records"), &waiting])
        }
        ("get", "/v1/analytics/modules/{slug}/tally") => {
            get(&[&format!("{read}/tally?group_by=/z&max=/n"), &format!("{read}/tally?min=/n&sum=/n")])
        }
        ("post", "/v1/modules/{slug}/records") => {
            vec![(records, json!({"payload": {"n": 1}, "id": known.record}))]
        }
        ("put", "/v1/modules/{slug}/records/{id}") => {
            vec![(record, json!({"payload": {"n": 1}, "expected_seq": 1}))]
        }
        ("delete", "/v1/modules/{slug}/records/{id}") => {
            vec![(format!("{record}?expected_seq=1"), Value::Null)]
        }
        _ => return None,
    };
    let mut requests = Vec::new();
    for (target, body) in all {
        let keys = if target.contains("/modules/") { vec!["zebrakey", "mine"] } else { vec!["mine"] };
        for key in keys {
            requests.push(Asked {
                target: target.clone(),
                body: body.clone(),
                key: format!("{key}-{method}"),
            });
        }
    }
    Some(requests)
}

/// Parks an event behind a dead one, or behind one that still runs, by a library that shares the ledger's file.
pub fn park(dir: &Path, tenant: Option<&str>, prefix: &str, head_is_dead: bool) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let url = format!("sqlite:{}", dir.join("hapax-data/ledger.db").display());
        let ledger = hapax::open::ledger(&url).await.unwrap();
        let claim = |seq: u64| {
            let identity = Identity {
                tenant: tenant.map(|name| Tenant::new(name).unwrap()),
                scope: Scope::new("mailer").unwrap(),
                id: EventId::new(format!("{prefix}{seq}")).unwrap(),
            };
            let settings =
                LeaseSettings { lease: std::time::Duration::from_secs(600), attempts_max: 5, alone: true };
            let mut claim = Claim::new(identity, Mode::Lease(settings));
            let aggregate = Aggregate::new(format!("{prefix}aggregate")).unwrap();
            claim.order = Some(Order { aggregate, seq, policy: OrderPolicy::Latest, on_dead: OnDead::Park });
            claim.hold = true;
            claim
        };
        let head = claim(1);
        let Some(Ok(Outcome::First(grant))) = ledger.claim(std::slice::from_ref(&head)).await.unwrap().pop()
        else {
            panic!("it is the first")
        };
        if head_is_dead {
            let settle = Settle {
                identity: head.identity.clone(),
                week: grant.week,
                token: grant.token,
                verdict: Verdict::Dead { reason: format!("{prefix}reason").into(), body: None },
                order: head.order.clone(),
                advance_to: None,
            };
            let settled = ledger.settle(&[settle]).await.unwrap().pop().unwrap().unwrap();
            settled.ok_or_fenced(&head.identity, grant.token).unwrap();
        }
        assert_eq!(ledger.claim(&[claim(2)]).await.unwrap().pop().unwrap().unwrap().name(), "parked");
    });
}

/// Claims an event and ends it.
fn ended(server: &Server, token: &str, claim: &Value, how: Option<&Value>) -> Value {
    let claimed = server.post("/v1/claims", token, claim).is(200);
    assert_eq!(claimed["outcome"], "claimed", "{claimed}");
    if let Some(how) = how {
        let mut fail = json!({"scope": claim["scope"], "id": claim["id"], "token": claimed["token"], "reason": "zebrareason"});
        fail.as_object_mut().unwrap().extend(how.as_object().unwrap().clone());
        server.post("/v1/claims/fail", token, &fail).is(200);
    }
    claimed["token"].clone()
}

/// Fills every place with something of the tenant's.
fn fill(dir: &Path, server: &Server, token: &str, slug: &str) -> Known {
    let dead = json!({"then": "dead", "payload": {"z": "zebrapayload"}});
    ended(server, token, &json!({"scope": "zebrascope", "id": "zebraevent-1"}), Some(&dead));
    ended(server, token, &json!({"scope": "mailer", "id": "zebraevent-2"}), Some(&dead));
    let lease = ended(server, token, &json!({"scope": "mailer", "id": "zebraevent-3"}), None);
    let once = json!({"scope": "mailer", "id": "zebraevent-4", "mode": "at_most_once"});
    ended(server, token, &once, Some(&json!({})));
    park(dir, Some(ZEBRA), "zebraevent-p", true);
    let event =
        json!({"aggregate": "zebraagg", "events": [{"id": "zebraevent-5", "payload": "zebrapayload"}]});
    server.post("/v1/journal/append", token, &event).is(200);
    let with = [("authorization", &*format!("Bearer {token}")), ("idempotency-key", "zebrakey-post")];
    let body = json!({"payload": {"z": "zebrarecord", "n": ZEBRAS}});
    let record = server.ask("POST", &format!("/v1/modules/{slug}/records"), &with, &body).is(201);
    let child = json!({"name": "zebratoken", "role": "write", "reason": "zebrareason"});
    let child = server.post("/v1/tokens", token, &child).is(201);
    let read = format!("/v1/analytics/modules/{slug}/records");
    until("the read model has it", || server.get(&read, token).body.contains("zebrarecord"));
    Known {
        slug: slug.to_owned(),
        token_id: child["id"].as_str().unwrap().to_owned(),
        lease,
        record: record["id"].as_str().unwrap().to_owned(),
    }
}

/// Everything that the tenant sees of its own.
fn seen(server: &Server, token: &str, slug: &str) -> Vec<Value> {
    let (records, read) = (format!("/v1/modules/{slug}/records"), format!("/v1/analytics/modules/{slug}"));
    let paths = [
        &*format!("{read}/records"),
        &*format!("{read}/tally?group_by=/z&max=/n"),
        "/v1/dead?payload=true",
        "/v1/held?payload=true",
        "/v1/parked",
        "/v1/lost",
        "/v1/keys",
        "/v1/tokens",
        "/v1/journal/events",
        "/v1/journal/aggregates/zebraagg",
        &records,
        "/v1/processed?scope=mailer&id=zebraevent-3",
    ];
    let all = paths.iter().map(|path| server.get(path, token).is(200));
    all.map(|mut answer| {
        answer["next"] = Value::Null; // others may have appended meanwhile
        answer["meta"] = Value::Null; // time passes
        for token in answer["tokens"].as_array_mut().into_iter().flatten() {
            token["last_used_at"] = Value::Null;
        }
        answer
    })
    .collect()
}

/// Another tenant, and an operator of one scope, ask every route for what is the first one's.
#[test]
fn t241_no_route_shows_another_tenant() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    walk(dir, "orders", &[], |args| token(dir, args));
}

/// The same where row security keeps journal, keys and records of tenants apart.
#[test]
#[cfg(feature = "postgres")]
fn t241_no_route_shows_another_tenant_on_postgres() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    let reads = format!("analytics.url=sqlite:{}", dir.join("reads.db").display());
    let serve = place.serve();
    let serve: Vec<&str> = serve.iter().map(String::as_str).chain(["--set", &*reads]).collect();
    walk(dir, &place.slug, &serve, |args| token(dir, &[&place.as_owner()[..], args].concat()));
}

/// The same where the read model is in ClickHouse, which has a filter of tenants of its own.
#[test]
#[cfg(feature = "clickhouse")]
fn t241_no_route_shows_another_tenant_on_clickhouse() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let database = crate::query_clickhouse::Database::new(dir);
    run(dir, &["modules", "create", "orders"]).code(0);
    walk(dir, "orders", &["--set", &database.set()], |args| token(dir, args));
}

/// Asks every route of a server that is started with these flags, and whose tokens are made like that.
fn walk(dir: &Path, slug: &str, serve: &[&str], token: impl Fn(&[&str]) -> String) {
    let zebra = token(&["--role", "admin", "--tenant", ZEBRA]);
    let strangers = [
        token(&["--role", "admin", "--tenant", OTHER]),
        token(&["--role", "admin", "--scope", "mailer"]),
        token(&["--role", "read", "--tenant", OTHER]),
    ];
    let operator = token(&["--role", "read"]);
    let server = Server::start_whole(dir, serve);
    let known = fill(dir, &server, &zebra, slug);
    let before = seen(&server, &zebra, slug);
    for marker in MARKERS.iter().filter(|marker| **marker != "zebrascope") {
        assert!(
            json!(before).to_string().contains(marker),
            "{marker} is nowhere, and looking for it shows nothing"
        );
    }
    let metrics = server.get("/metrics", &operator);
    assert!(metrics.status == 200 && metrics.body.contains("zebrascope"), "{metrics:?}");
    server.get("/metrics", &zebra).problem(403, "forbidden");
    let api = server.ask("GET", "/openapi.json", &[], &Value::Null).is(200);
    let mut operations: Vec<(String, String)> = Vec::new();
    for (path, item) in api["paths"].as_object().unwrap() {
        operations.extend(item.as_object().unwrap().keys().map(|method| (method.clone(), path.clone())));
    }
    operations.sort_by_key(|(method, _)| method != "get"); // first look, then change
    let mut asked_for = 0;
    for (method, path) in &operations {
        let requests =
            requests(method, path, &known).unwrap_or_else(|| panic!("{method} {path} is not asked"));
        for (asked, stranger) in
            requests.iter().flat_map(|asked| strangers.iter().map(move |who| (asked, who)))
        {
            let bearer = format!("Bearer {stranger}");
            let with = [("authorization", &*bearer), ("idempotency-key", &*asked.key)];
            let mut target = asked.target.clone();
            // Every page, for a cursor is part of an answer.
            for _ in 0..100 {
                let answer = server.ask(&method.to_uppercase(), &target, &with, &asked.body);
                assert!(answer.status < 500, "{method} {target}: {answer:?}");
                shows_nothing(&format!("{target} {} {}", asked.body, asked.key), &answer);
                asked_for += 1;
                let next = serde_json::from_str::<Value>(&answer.body).ok().and_then(|json| {
                    let more = json["more"] != false && method == "get";
                    json["next"].as_str().or(json["after"].as_str()).filter(|_| more).map(str::to_owned)
                });
                let Some(next) = next else { break };
                let joint = if asked.target.contains('?') { '&' } else { '?' };
                target = format!("{}{joint}after={next}", asked.target);
            }
        }
    }
    assert!(asked_for > 100, "{asked_for}");
    // Whoever names the tenant in the header is refused on every route that asks who calls.
    for (method, path) in &operations {
        let asked = &requests(method, path, &known).unwrap()[0];
        let open = ["/healthz", "/readyz", "/v1/login", "/v1/logout"].contains(&path.as_str());
        for stranger in &strangers {
            let bearer = format!("Bearer {stranger}");
            let with = [("authorization", &*bearer), ("idempotency-key", "named"), ("hapax-tenant", ZEBRA)];
            let answer = server.ask(&method.to_uppercase(), &asked.target, &with, &asked.body);
            shows_nothing(&format!("{} {} {ZEBRA}", asked.target, asked.body), &answer);
            if open {
                assert_ne!(answer.status, 403, "{method} {path}: {answer:?}");
            } else {
                answer.problem(403, "forbidden");
            }
        }
    }
    assert_eq!(seen(&server, &zebra, slug), before, "nothing of it was changed");
    // Whether an id is known_token says that somebody has it.
    let free = run(dir, &["token", "generate"]).code(0).out.trim().to_owned();
    let known_token = ApiToken::with_secret(TokenId::new(&*known.token_id).unwrap()).expose().to_owned();
    for token in [&free, &known_token] {
        let body = json!({"name": "x", "role": "read", "scopes": ["mailer"], "token": token});
        for stranger in &strangers[..2] {
            server.post("/v1/tokens", stranger, &body).problem(403, "forbidden");
        }
    }
    let stats = server.get("/v1/stats", &strangers[0]).is(200);
    assert_eq!((&stats["held"], &stats["journal"]), (&json!(0), &Value::Null), "{stats}");
}

/// A position of an object store has a name in it, by which an event's tenant and aggregate can be guessed.
#[test]
fn t242_a_reader_goes_on_without_seeing_where_others_are() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let journal = format!("journal.url=dir:{}", dir.join("journal").display());
    let keys = format!("keys.url=sqlite:{}", dir.join("keys.db").display());
    let sets = ["--set", &*keys];
    let make = |tenant: &str| token(dir, &[&["--role", "write", "--tenant", tenant], &sets[..]].concat());
    let (zebra, other) = (make(ZEBRA), make(OTHER));
    let server = Server::start(dir, &["--set", &journal, "--set", &keys]);
    let append = |token: &str, aggregate: &str, id: &str| {
        let event = json!({"aggregate": aggregate, "events": [{"id": id}]});
        server.post("/v1/journal/append", token, &event).is(200);
    };
    for n in 0..3 {
        append(&other, "mine", &format!("mine-{n}"));
        append(&zebra, "zebraagg", &format!("zebraevent-{n}"));
    }
    for n in 3..6 {
        append(&zebra, "zebraagg", &format!("zebraevent-{n}"));
    }
    let mut foreign: Vec<String> = Vec::new();
    until("its owner sees them", || {
        let events = server.get("/v1/journal/events?limit=1000", &zebra).is(200)["events"].clone();
        let position =
            |event: &Value| event["position"].as_str().unwrap().split_once('/').unwrap().1.to_owned();
        foreign = events.as_array().unwrap().iter().map(position).collect();
        foreign.len() == 6
    });
    let (mut ids, mut after) = (Vec::new(), String::new());
    until("it has read all", || {
        let target = format!("/v1/journal/events?limit=1{after}");
        let page = server.get(&target, &other);
        shows_nothing("", &page);
        for text in shown(&format!("{}\n{}", page.head, page.body)) {
            assert!(!foreign.iter().any(|name| text.contains(name)), "{text}");
        }
        let page = page.is(200);
        let events = page["events"].as_array().unwrap().clone();
        ids.extend(events.iter().map(|event| event["id"].as_str().unwrap().to_owned()));
        after = format!("&after={}", page["next"].as_str().unwrap());
        ids.len() == 3 && page["more"] == false
    });
    assert_eq!(ids, ["mine-0", "mine-1", "mine-2"]);
    assert!(after.contains('~'), "{after}");
    server.get(&format!("/v1/journal/events?limit=1{after}00"), &other).problem(400, "invalid");
}

/// An operator lets go what is parked. One event of another tenant that nobody can resume is not in the way.
#[test]
fn t244_releasing_all_is_releasing_ones_own() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mailer = token(dir, &["--role", "admin", "--scope", "mailer"]);
    let zebra = token(dir, &["--role", "admin", "--tenant", ZEBRA]);
    let server = Server::start(dir, &[]);
    server.get("/v1/parked", &mailer).is(200);
    park(dir, None, "mine-", true);
    park(dir, Some(ZEBRA), "zebraevent-", false);
    let release = |token: &str| {
        let body = json!({"scope": "mailer", "all": true, "reason": "fixed"});
        let answer = server.post("/v1/parked/release", token, &body);
        (answer.status, answer)
    };
    let (status, released) = release(&mailer);
    shows_nothing("", &released);
    assert_eq!(status, 200, "{released:?}");
    let entries = released.is(200)["entries"].as_array().unwrap().clone();
    assert_eq!((entries.len(), &entries[0]["id"]), (1, &json!("mine-1")));
    // Its owner is told what is in the way.
    let (_, refused) = release(&zebra);
    assert!(refused.problem(409, "conflict").contains("zebraevent-2"), "{refused:?}");
}

/// A thousand dead letters of a megabyte are not one answer.
#[test]
fn a_page_of_dead_letters_is_bounded_by_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let token = token(dir, &["--role", "admin"]);
    let server = Server::start(dir, &[]);
    let large = "x".repeat(900_000);
    for n in 0..40 {
        let dead = json!({"then": "dead", "payload": large});
        ended(&server, &token, &json!({"scope": "mailer", "id": format!("e-{n:02}")}), Some(&dead));
    }
    let (mut ids, mut after, mut pages) = (Vec::new(), String::new(), 0);
    loop {
        let page = server.get(&format!("/v1/dead?limit=1000&payload=true{after}"), &token);
        assert!(page.body.len() < 18 << 20, "{}", page.body.len());
        let page = page.is(200);
        let entries = page["entries"].as_array().unwrap();
        assert!(entries.iter().all(|entry| entry["payload"].as_str().unwrap().len() == 900_002));
        ids.extend(entries.iter().map(|entry| entry["id"].as_str().unwrap().to_owned()));
        pages += 1;
        let Some(next) = page["next"].as_str() else { break };
        after = format!("&after={next}");
    }
    assert_eq!(ids, (0..40).map(|n| format!("e-{n:02}")).collect::<Vec<_>>());
    assert_eq!(pages, 3);
}

/// The same tokens on PostgreSQL, with its roles and its row security.
#[test]
#[cfg(feature = "postgres")]
fn tokens_of_two_tenants_on_postgres() {
    use crate::common::serve::request;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    let make = |tenant: &str| {
        token(dir, &[&place.as_owner()[..], &["--role", "write", "--tenant", tenant]].concat())
    };
    let (zebra, other) = (make(ZEBRA), make(OTHER));
    let server = place.start();
    let ask = |method: &str, path: &str, token: Option<&str>, key: &str, body: &str| {
        let bearer = format!("Bearer {}", token.unwrap_or_default());
        let mut headers = vec![("content-type", "application/json"), ("idempotency-key", key)];
        headers.extend(token.map(|_| ("authorization", &*bearer)));
        request(&server.address, method, path, &headers, body.as_bytes())
    };
    let records = format!("/v1/modules/{}/records", place.slug);
    ask("GET", &records, None, "k", "").problem(401, "unauthenticated");
    let body = |text: &str| json!({"payload": {"of": text}}).to_string();
    let mine = ask("POST", &records, Some(&zebra), "key-1", &body("zebrarecord")).is(201);
    // The same key of another tenant is another key.
    let theirs = ask("POST", &records, Some(&other), "key-1", &body("other")).is(201);
    assert_ne!(mine["id"], theirs["id"]);
    let path = |record: &Value| format!("{records}/{}", record["id"].as_str().unwrap());
    for (token, own, foreign) in [(&zebra, &mine, &theirs), (&other, &theirs, &mine)] {
        assert_eq!(ask("GET", &path(own), Some(token), "k", "").is(200)["payload"], own["payload"]);
        ask("GET", &path(foreign), Some(token), "k", "").problem(404, "not-found");
        let update = json!({"payload": {"n": 1}, "expected_seq": 1}).to_string();
        ask("PUT", &path(foreign), Some(token), "key-2", &update).problem(404, "not-found");
        ask("DELETE", &format!("{}?expected_seq=1", path(foreign)), Some(token), "key-3", "")
            .problem(404, "not-found");
        let listed = ask("GET", &records, Some(token), "k", "").is(200)["records"].clone();
        assert_eq!((listed.as_array().unwrap().len(), &listed[0]["id"]), (1, &own["id"]));
        let key = ask("GET", "/v1/keys/key-1", Some(token), "k", "").is(200);
        assert_eq!(key["state"], "done");
        let stored = key["answer"]["body"].as_str().unwrap();
        assert!(stored.contains(own["id"].as_str().unwrap()), "{key}");
    }
    assert!(!ask("GET", "/v1/keys/key-1", Some(&other), "k", "").body.contains("zebrarecord"));
    // A token that is revoked is over here too.
    let revoke = ["token", "revoke", id(&zebra)];
    run(dir, &[&place.as_owner()[..], &revoke].concat()).code(0);
    until("it is over", || ask("GET", &records, Some(&zebra), "k", "").status == 401);
    ask("GET", &records, Some(&other), "k", "").is(200);
}
