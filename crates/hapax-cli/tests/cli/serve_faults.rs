//! Faults that were found on real servers, each with the story of how it happened.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use serde_json::{Value, json};

#[cfg(feature = "postgres")]
use std::sync::atomic::{AtomicBool, Ordering};
#[cfg(feature = "postgres")]
use std::time::{Duration, Instant};

#[cfg(feature = "postgres")]
use crate::common::consume::wait_until;
use crate::common::consume::{Sample, consume, effects};
use crate::common::run;
use crate::common::serve::{Answer, Server, connect, request, to_the_end};

#[cfg(feature = "postgres")]
use crate::common::roles::{Connection, Postgres};

const A: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
const B: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000b";

fn create(server: &Server, slug: &str, tenant: Option<&str>, key: &str, body: &Value) -> Answer {
    let mut headers = vec![("content-type", "application/json"), ("idempotency-key", key)];
    headers.extend(tenant.map(|tenant| ("hapax-tenant", tenant)));
    let path = format!("/v1/modules/{slug}/records");
    request(&server.address, "POST", &path, &headers, body.to_string().as_bytes())
}

/// Two tenants and nobody append and write under the same ids, and one of them says that its event is the other's. Behind
/// the relay the handler is told whose each is.
#[test]
fn t301_a_tenant_is_the_same_from_the_request_to_the_handler() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let mut server = Server::start(dir, &["--set", "relay.topic=orders"]);
    let forged = json!({"specversion": "1.0", "id": "e-1", "type": "t", "tenant": A, "marker": "nobody"});
    let structured = json!([{"name": "content-type", "value": "application/cloudevents+json"}]);
    for (tenant, marker) in [(Some(A), "of a"), (Some(B), "of b"), (None, "nobody")] {
        let payload = if tenant.is_none() { forged.clone() } else { json!({"marker": marker}) };
        let headers = if tenant.is_none() { structured.clone() } else { json!([]) };
        let event = json!({"id": "e-1", "kind": "t", "payload": payload, "headers": headers});
        let append = json!({"aggregate": "agg", "events": [event]});
        let with: Vec<_> = tenant.map(|tenant| ("hapax-tenant", tenant)).into_iter().collect();
        server.post_with("/v1/journal/append", &with, &append).is(200);
        create(&server, "orders", tenant, "k", &json!({"payload": {"marker": marker}})).is(201);
    }
    assert_eq!(server.stop(), Some(143));
    run(dir, &["relay", "run", "--once", "--topic", "orders"]).code(0);
    let body = "p = request['event']['payload']\nm = p.get('marker') or p['payload']['marker']\n\
                effect(f\"{request.get('tenant')} {request['event'].get('kind')} {m}\")";
    let ran = consume(dir, &Sample::Python.handler(dir, body), &[]).code(0);
    let mut seen = effects(dir);
    seen.sort();
    let of = |tenant: &str, marker: &str| {
        [format!("{tenant} record.created {marker}"), format!("{tenant} t {marker}")]
    };
    let mut wanted = [of(A, "of a"), of(B, "of b"), of("None", "nobody")].concat();
    wanted.sort();
    assert_eq!(seen, wanted, "{} {}", ran.out, ran.err);
}

/// The time to drain is over, and a thread still waits for a file that another process has locked: four times five seconds.
/// A thread of this test waits for the same file, and began before: if the server ends first, it did not wait.
#[test]
fn t303_a_stop_does_not_wait_for_a_locked_file() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut server =
        Server::start(dir, &["--set", "serve.drain_ms=100", "--without", "relay", "--without", "sweepers"]);
    let file = dir.join("hapax-data/ledger.db");
    let url = format!("sqlite:{}", file.display());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let ledger = runtime.block_on(hapax::open::ledger(&url)).unwrap();
    let guard = hapax::Guard::new(ledger);
    let held = rusqlite::Connection::open(&file).unwrap();
    held.busy_timeout(crate::common::serve::PATIENCE).unwrap();
    held.execute_batch("begin immediate").unwrap();
    let waiting = runtime.spawn(async move {
        guard.in_scope(hapax::Scope::new("s").unwrap()).try_claim("other").await.map(|_| ())
    });
    let mut stream = connect(&server.address);
    let body = json!({"scope": "s", "id": "i"}).to_string();
    let sent = format!(
        "POST /v1/claims HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        server.address,
        body.len()
    );
    std::io::Write::write_all(&mut stream, sent.as_bytes()).unwrap();
    crate::common::consume::wait_until("the claim has arrived", || {
        server.get("/metrics").body.contains("http_requests_in_flight 2")
    });
    assert_eq!(server.stop(), Some(143));
    assert!(!waiting.is_finished(), "the server ended no sooner than who waited for the file before it");
    drop(held);
}

/// One request that was refused is mended, and sent with the same key.
#[test]
fn t306_a_create_that_was_refused_can_be_mended_under_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &["--without", "relay"]);
    let nil = json!({"payload": {}, "id": "00000000-0000-0000-0000-000000000000"});
    create(&server, "orders", None, "k", &nil).problem(400, "invalid");
    create(&server, "orders", None, "k", &json!({"payload": {}})).is(201);
}

/// `limit` bounds what is done, not only what is shown.
#[test]
fn t307_a_limit_bounds_what_is_done() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start(dir, &["--without", "relay"]);
    for n in 0..5 {
        let claim = json!({"scope": "s", "id": format!("e-{n}")});
        let token = server.post("/v1/claims", &claim).is(200)["token"].clone();
        let fail = json!({"scope": "s", "id": format!("e-{n}"), "token": token, "reason": "bad", "then": "dead", "payload": {}});
        server.post("/v1/claims/fail", &fail).is(200);
    }
    let drop = json!({"scope": "s", "all": true, "limit": 2, "reason": "mended"});
    let done = server.post("/v1/dead/drop", &drop).is(200);
    assert_eq!((done["entries"].as_array().unwrap().len(), &done["more"]), (2, &json!(true)), "{done}");
    let left = server.get("/v1/dead").is(200);
    assert_eq!(left["entries"].as_array().unwrap().len(), 3, "{left}");
    let rest = server
        .post("/v1/dead/drop", &json!({"scope": "s", "all": true, "limit": 3, "reason": "mended"}))
        .is(200);
    assert_eq!((rest["entries"].as_array().unwrap().len(), &rest["more"]), (3, &json!(false)), "{rest}");
}

/// An old key comes again after a sweep has forgotten what it was answered.
#[test]
fn a_key_that_is_older_than_what_sweeps_forgot_is_410_on_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &["--without", "relay"]);
    run(dir, &["keys", "sweep", "--retention", "1d"]).code(0);
    // Made in 2023: sweeps have forgotten what was then.
    let old = "018bcfe5-6800-7c3a-9f51-2f6f1f3b7c10";
    create(&server, "orders", None, old, &json!({"payload": {}})).problem(410, "key-expired");
    create(&server, "orders", None, "k", &json!({"payload": {}})).is(201);
}

/// What a person does to keys leaves a row, as every other admin action.
#[test]
fn t311_what_is_done_to_keys_leaves_an_audit_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["token", "create", "--name", "ops"]).code(0);
    run(dir, &["keys", "init"]).code(0);
    run(dir, &["keys", "sweep", "--dry-run"]).code(0);
    let audit = |dir| run(dir, &["audit", "ls", "--json"]).code(0).out;
    assert!(!audit(dir).contains("keys.sweep"), "nothing was done");
    run(dir, &["keys", "sweep"]).code(0);
    assert!(audit(dir).contains("keys.sweep"), "{}", audit(dir));
}

#[cfg(feature = "postgres")]
fn count(connection: &mut Connection, sql: &str) -> usize {
    connection.rows(sql)
}

/// Ledger, journal, keys, records and tokens on one server with default settings, under more requests than it has
/// connections: the sum in docs/server.md is not passed, and others find a place.
#[test]
#[cfg(feature = "postgres")]
fn t304_one_server_leaves_connections_for_others() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = Postgres::new(dir);
    let name = format!("hapax_{}", place.slug);
    let named = |url: &str| format!("{url}?application_name={name}");
    let (app, keeper) = (named(&place.app_url), format!("keys.maintenance_url={}", named(&place.keeper_url)));
    let ledger = format!("ledger.schema={}_l", place.schema);
    run(dir, &["--ledger", &place.owner_url, "--set", &ledger, "ledger", "init"]).code(0);
    let owner = |sql: &str| place.owner_runs(sql);
    owner(&format!(
        "grant usage on schema {0}_l to {1}; grant all on all tables in schema {0}_l to {1}; grant all on all sequences in schema {0}_l to {1}; grant execute on all functions in schema {0}_l to {1}",
        place.schema, place.app
    ));
    let more = [
        "--ledger",
        &app,
        "--set",
        &ledger,
        "--journal",
        &app,
        "--set",
        place.schema_flag(),
        "--set",
        &keeper,
        "--set",
        "journal.migrate=check",
        "--set",
        "ledger.migrate=check",
        "--without",
        "sweepers",
        "--without",
        "relay",
    ];
    let server = Server::start(dir, &more);
    // Every write waits for this lock, and holds its connection.
    let mut held = place.lock("journal_head");
    let mut watch = Connection::to(&place.admin_url);
    let mine = format!("select from pg_stat_activity where application_name = '{name}'");
    let waiting = format!("{mine} and wait_event_type = 'Lock'");
    // On a busy machine the first have given up before the last begin: they write again until it is seen.
    let (seen, began) = (&AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for n in 0..100 {
            let (server, slug) = (&server, &place.slug);
            writers.push(scope.spawn(move || {
                for turn in 0.. {
                    let key = format!("k-{n}-{turn}");
                    let status = create(server, slug, Some(A), &key, &json!({"payload": {}})).status;
                    assert!([201, 409, 503, 504, 408].contains(&status), "{status}");
                    if seen.load(Ordering::SeqCst) || began.elapsed() > Duration::from_secs(150) {
                        return;
                    }
                }
            }));
        }
        wait_until("writes wait for the lock", || count(&mut watch, &waiting) >= 30);
        seen.store(true, Ordering::SeqCst);
        // What is short is answered meanwhile.
        let claim = json!({"scope": "s", "id": "i"});
        assert_eq!(server.post("/v1/claims", &claim).is(200)["outcome"], "claimed");
        let most = count(&mut watch, &mine);
        held.run("rollback");
        for writer in writers {
            writer.join().unwrap();
        }
        let after = count(&mut watch, &mine);
        assert!(most.max(after) <= 57, "{most} and {after} connections; docs/server.md says 57");
    });
}

/// The role of maintenance would see all tenants without saying so.
#[test]
#[cfg(feature = "postgres")]
fn t305_a_role_of_maintenance_that_bypasses_row_security_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    let database = place.app_url.rsplit_once('/').unwrap().1;
    let admin = format!("{}/{database}", place.admin_url.rsplit_once('/').unwrap().0);
    for (keeper, expected) in
        [(admin.as_str(), "bypasses row security"), ("postgres://nobody_at_all@127.0.0.1:1/x", "PostgreSQL")]
    {
        let keeper = format!("keys.maintenance_url={keeper}");
        let refused = place.refused(&["--set", &keeper]);
        assert!(refused.err.contains(expected), "{}", refused.err);
    }
}

/// "Accept a role that bypasses" says nothing about a role that does not: its modules are looked at.
#[test]
#[cfg(feature = "postgres")]
fn t308_accepting_a_bypass_does_not_switch_off_what_protects_others() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    place.owner_runs(&format!("alter table module_{}.records no force row level security", place.slug));
    let server = place.start_with(&["--set", "records.accept_bypass=true", "--without", "sweepers"]);
    create(&server, &place.slug, Some(A), "k", &json!({"payload": {}})).problem(503, "unavailable");
}

/// Records of an older build are there, and not "no module".
#[test]
#[cfg(feature = "postgres")]
fn t309_records_of_an_older_build_are_not_called_missing() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    place.owner_runs(&format!("update {}.records_meta set version = 0", place.schema));
    let refused = place.refused(&["--without", "sweepers"]);
    assert!(refused.err.contains("version 0"), "{}", refused.err);
}

/// Numbers at the ends of a double, written and read over HTTP where the database writes them out.
#[test]
#[cfg(feature = "postgres")]
fn t300_numbers_that_a_database_writes_out_can_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    let server = place.start();
    for (n, number) in ["1e100", "-1e308", "1.7976931348623157e308", "5e-324", "1e-400"].iter().enumerate() {
        let headers = [
            ("content-type", "application/json"),
            ("idempotency-key", &*format!("k-{n}")),
            ("hapax-tenant", A),
        ];
        let path = format!("/v1/modules/{}/records", place.slug);
        let body = format!(r#"{{"payload":{{"a":{number}}}}}"#);
        let created = request(&server.address, "POST", &path, &headers, body.as_bytes());
        assert_eq!(created.status, 201, "{created:?}");
        let place_of = created.header("location").unwrap().to_owned();
        assert_eq!(request(&server.address, "GET", &place_of, &headers, b"").status, 200, "{number}");
        assert_eq!(request(&server.address, "GET", &path, &headers, b"").status, 200, "{number}");
    }
}

/// Somebody switched row security of the keys off. One tenant's answers would be every tenant's.
#[test]
#[cfg(feature = "postgres")]
fn t312_keys_whose_protection_was_changed_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    for (change, back, expected) in [
        (
            "alter table {s}.keys no force row level security",
            "alter table {s}.keys force row level security",
            "not forced",
        ),
        ("create policy more on {s}.keys using (true)", "drop policy more on {s}.keys", "policies"),
        (
            "alter policy keys_tenant on {s}.keys using (true)",
            "alter policy keys_tenant on {s}.keys using ({s}.keys_visible(tenant))",
            "policies",
        ),
        (
            "alter policy keys_tenant on {s}.keys to current_user",
            "alter policy keys_tenant on {s}.keys to public",
            "policies",
        ),
        (
            "create or replace function {s}.keys_visible(p_tenant text) returns boolean language sql stable return true",
            "create or replace function {s}.keys_visible(p_tenant text) returns boolean language sql stable return \
             case when p_tenant = '' then current_setting('hapax.tenant', true) = '00000000-0000-0000-0000-000000000000' \
             else p_tenant = current_setting('hapax.tenant', true) end",
            "function",
        ),
    ] {
        place.owner_runs(&change.replace("{s}", &place.schema));
        let refused = place.refused(&[]);
        assert!(refused.err.contains(expected), "{}", refused.err);
        place.owner_runs(&back.replace("{s}", &place.schema));
    }
    drop(place.start());
}

/// The write is committed, and the server dies before it answers: its client has not a byte. On the way back it gets what
/// it would have got.
fn dies_before_it_answers(start: impl Fn(&[(&str, &str)]) -> Server, slug: &str) {
    let body = json!({"payload": {"amount": 7}});
    let mut doomed = start(&[("HAPAX_CRASH_AT", "keyed.committed:1")]);
    let text = body.to_string();
    let head = format!(
        "POST /v1/modules/{slug}/records HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\nidempotency-key: k\r\n\
         hapax-tenant: {A}\r\ncontent-length: {}\r\n\r\n{text}",
        doomed.address,
        text.len()
    );
    let mut stream = connect(&doomed.address);
    std::io::Write::write_all(&mut stream, head.as_bytes()).unwrap();
    let nothing = to_the_end(&mut stream);
    assert!(nothing.is_empty(), "it answered: {}", String::from_utf8_lossy(&nothing));
    assert_eq!(doomed.ended(), None, "a signal ended it");
    drop(doomed);
    let server = start(&[]);
    let all = || {
        let path = format!("/v1/modules/{slug}/records");
        let all = request(&server.address, "GET", &path, &[("hapax-tenant", A)], b"").is(200);
        all["records"].as_array().unwrap().clone()
    };
    let before = all();
    assert_eq!(before.len(), 1, "it was committed: {before:?}");
    let again = create(&server, slug, Some(A), "k", &body);
    assert_eq!((again.is(200), again.header("idempotency-replayed")), (before[0].clone(), Some("true")));
    assert_eq!(all(), before);
}

#[test]
fn t414_an_embedded_server_killed_between_commit_and_answer_writes_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    dies_before_it_answers(|env| Server::start_in(dir, &[], env), "orders");
    let events = run(dir, &["--json", "journal", "read", "--limit", "1000"]).code(0).out;
    assert_eq!(events.matches("record.created").count(), 1, "{events}");
}

#[test]
#[cfg(feature = "postgres")]
fn t150_a_server_killed_between_commit_and_answer_writes_once() {
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    let database = place.app_url.rsplit_once('/').unwrap().1;
    let mut admin = Connection::to(&format!("{}/{database}", place.admin_url.rsplit_once('/').unwrap().0));
    dies_before_it_answers(|env| place.start_in(env), &place.slug);
    assert_eq!(admin.rows(&format!("select from module_{}.records", place.slug)), 1);
    let events = format!("select from {}.journal where kind = 'record.created'", place.schema);
    assert_eq!(admin.rows(&events), 1, "one event");
}
