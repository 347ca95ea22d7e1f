//! `/v1/keys` over HTTP: real requests that run, whose answers they are, and who may list them.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax::clock::{Clock as _, SystemClock};
use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::run;
use crate::common::serve::{Server, request};

const A: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";
const PATIENCE: Duration = Duration::from_secs(90);

/// Creates a record under a key.
fn create(server: &Server, slug: &str, key: &str, headers: &[(&str, &str)]) -> u16 {
    let path = format!("/v1/modules/{slug}/records");
    let headers = [&[("content-type", "application/json"), ("idempotency-key", key)], headers].concat();
    request(&server.address, "POST", &path, &headers, br#"{"payload":{"n":1}}"#).status
}

fn state(server: &Server, key: &str, headers: &[(&str, &str)]) -> Value {
    request(&server.address, "GET", &format!("/v1/keys/{key}"), headers, b"").is(200)["state"].clone()
}

/// Sends a write that cannot get on, again and again, until the server says of its key that it runs.
fn runs_while_it_runs(server: &Server, slug: &str) {
    let (seen, began) = (AtomicBool::new(false), Instant::now());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !seen.load(Ordering::SeqCst) && began.elapsed() < PATIENCE {
                assert_ne!(create(server, slug, "slow", &[("hapax-tenant", A)]), 201, "it cannot get on");
            }
        });
        while began.elapsed() < PATIENCE && !seen.load(Ordering::SeqCst) {
            let said = state(server, "slow", &[("hapax-tenant", A)]);
            assert!(said == "running" || said == "unknown", "{said}");
            seen.store(said == "running", Ordering::SeqCst);
        }
    });
    assert!(seen.load(Ordering::SeqCst), "a request ran, and its key was said to be unknown");
}

/// A client that got no answer in time asks for its key. "Nobody used it" would make it write again, with a new one.
#[test]
fn t222_the_key_of_a_request_that_runs_is_running() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &[]);
    assert_eq!(create(&server, "orders", "quick", &[("hapax-tenant", A)]), 201);
    // From now on an append takes for ever: until its transaction is too old.
    let conn = rusqlite::Connection::open(dir.join("hapax-data/journal.db")).unwrap();
    conn.busy_timeout(PATIENCE).unwrap();
    conn.execute_batch(
        "CREATE TABLE many (n INTEGER); \
         INSERT INTO many WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM c LIMIT 10000) SELECT n FROM c; \
         CREATE TRIGGER slow AFTER INSERT ON hapax_journal_event BEGIN \
         INSERT INTO many SELECT a.n FROM many a, many b, many c WHERE a.n + b.n + c.n < 0; END;",
    )
    .unwrap();
    runs_while_it_runs(&server, "orders");
    assert_eq!(state(&server, "quick", &[("hapax-tenant", A)]), "done");
}

#[test]
#[cfg(feature = "postgres")]
fn t222_the_key_of_a_request_that_runs_on_postgres_is_running() {
    let dir = tempfile::tempdir().unwrap();
    let place = crate::common::roles::Postgres::new(dir.path());
    let server = place.start();
    let lock = place.lock("journal_head");
    runs_while_it_runs(&server, &place.slug);
    drop(lock);
}

/// The service's role sees the tenant that it names, the one for maintenance sees all. No tenant is one of them.
#[test]
#[cfg(feature = "postgres")]
fn t223_keys_are_listed_with_the_three_roles() {
    let dir = tempfile::tempdir().unwrap();
    let place = crate::common::roles::Postgres::new(dir.path());
    let server = place.start();
    for (key, tenant) in [("of-nobody", None), ("of-a", Some(A))] {
        let headers: Vec<_> = tenant.map(|tenant| ("hapax-tenant", tenant)).into_iter().collect();
        assert_eq!(create(&server, &place.slug, key, &headers), 201, "{key}");
    }
    let listed = |query: &str, headers: &[(&str, &str)]| {
        let found = request(&server.address, "GET", &format!("/v1/keys{query}"), headers, b"").is(200);
        let names = |key: &Value| {
            format!("{} {}", key["tenant"].as_str().unwrap_or("-"), key["key"].as_str().unwrap())
        };
        (found["keys"].as_array().unwrap().iter().map(names).collect::<Vec<_>>(), found["more"].clone())
    };
    let of_a = format!("{A} of-a");
    assert_eq!(listed("", &[]), (vec!["- of-nobody".to_owned()], json!(false)));
    assert_eq!(listed("", &[("hapax-tenant", A)]), (vec![of_a.clone()], json!(false)));
    assert_eq!(listed("?limit=1", &[]).1, json!(true), "a full page");
    assert_eq!(listed("?after=of-nobody", &[]), (vec![], json!(false)));
    let all = vec!["- of-nobody".to_owned(), of_a.clone()];
    assert_eq!(listed("?all_tenants=true", &[]), (all, json!(false)));
    assert_eq!(listed("?all_tenants=true&after=of-nobody", &[]), (vec![of_a], json!(false)));
    assert_eq!(listed("?all_tenants=true&open=true", &[]), (vec![], json!(false)));
}

fn token(dir: &Path, role: &str) -> String {
    let made = run(dir, &["token", "create", "--name", "test", "--role", role, "--tenant", A]);
    format!("Bearer {}", made.code(0).out.trim())
}

/// A key is not secret. Another token of the tenant learns that it was used, and not what was answered.
#[test]
fn t226_an_answer_is_shown_to_who_asked_for_it_and_to_operators() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let [asked, other, reader, operator] = ["write", "write", "read", "admin"].map(|role| token(dir, role));
    let server = Server::start(dir, &[]);
    assert_eq!(create(&server, "orders", "k-1", &[("authorization", &asked)]), 201);
    for (who, sees) in [(&asked, true), (&operator, true), (&other, false), (&reader, false)] {
        let answer = request(&server.address, "GET", "/v1/keys/k-1", &[("authorization", who)], b"").is(200);
        assert!(answer["state"] == "done" && answer["at"].is_string(), "{answer}");
        assert_eq!(answer["answer"]["status"] == 201, sees, "{answer}");
        assert_eq!(answer.get("answer").is_some(), sees, "{answer}");
    }
}

/// What a sweep has forgotten is told apart from what nobody used.
#[test]
fn a_key_from_before_the_last_sweep_is_expired() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let server = Server::start(dir, &[]);
    let ms = SystemClock.now().as_micros() / 1000 - 2 * 86_400_000;
    let hex = format!("{ms:012x}");
    let old = format!("{}-{}-7abc-8abc-0123456789ab", &hex[..8], &hex[8..]);
    assert_eq!(state(&server, &old, &[]), "unknown");
    run(dir, &["keys", "sweep", "--retention", "1d", "--keys", "sqlite:hapax-data/journal.db"]).code(0);
    assert_eq!(state(&server, &old, &[]), "expired");
    assert_eq!(state(&server, "not-a-uuid", &[]), "unknown");
}

/// A week, as the configuration and as answers say it.
const WEEK: (&str, &str) = ("DATA_IDEMPOTENCY_KEY_RETENTION_DAYS", "7");
const WEEK_S: &str = "604800";

/// Starts a server that keeps keys for a week, has it write two keys, makes one of them a month old while it is down,
/// and waits until the next server has forgotten that one.
fn a_server_forgets(start: impl Fn() -> Server, slug: &str, make_old: impl FnOnce(&str)) {
    let swept_at = |server: &Server| server.get("/v1/retention").is(200)["keys_swept_at"].clone();
    let mut server = start();
    assert_eq!(server.get("/v1/info").is(200)["key_retention_s"].to_string(), WEEK_S);
    assert_eq!(server.get("/v1/retention").is(200)["key_retention_s"].to_string(), WEEK_S);
    let path = format!("/v1/modules/{slug}/records");
    for key in ["old", "young"] {
        let headers = [("content-type", "application/json"), ("idempotency-key", key), ("hapax-tenant", A)];
        let answer = request(&server.address, "POST", &path, &headers, br#"{"payload":{"n":1}}"#);
        assert_eq!((answer.status, answer.header("idempotency-key-retention")), (201, Some(WEEK_S)));
    }
    wait_until("it sweeps when it starts", || swept_at(&server).is_string());
    let first = swept_at(&server);
    assert_eq!(state(&server, "old", &[("hapax-tenant", A)]), "done");
    assert!(server.stop().is_some());
    make_old("old");
    let server = start();
    wait_until("it sweeps again", || {
        let at = swept_at(&server);
        at.as_str() > first.as_str()
    });
    wait_until("the key is gone", || state(&server, "old", &[("hapax-tenant", A)]) == "unknown");
    assert_eq!(state(&server, "young", &[("hapax-tenant", A)]), "done");
    let records = request(&server.address, "GET", &path, &[("hapax-tenant", A)], b"").is(200);
    assert_eq!(records["records"].as_array().unwrap().len(), 2, "a sweep touches no record");
}

#[test]
fn a_server_forgets_keys_after_the_retention_that_it_states() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let start = || Server::start_in(dir, &[], &[WEEK]);
    a_server_forgets(start, "orders", |key| {
        let conn = rusqlite::Connection::open(dir.join("hapax-data/journal.db")).unwrap();
        let (month, night) = (31 * 86_400_000_000_i64, 25 * 3_600_000_000_i64);
        let aged = conn.execute(
            "UPDATE hapax_keys SET begun_at = begun_at - ?1, settled_at = settled_at - ?1, aged_from = aged_from - ?1 \
             WHERE key = ?2",
            rusqlite::params![month, key],
        );
        assert_eq!(aged.unwrap(), 1);
        conn.execute("UPDATE hapax_keys_meta SET swept_at = swept_at - ?1", [night]).unwrap();
    });
}

/// The server's own role may not delete keys. The one for maintenance does.
#[test]
#[cfg(feature = "postgres")]
fn a_server_on_postgres_forgets_keys_as_the_role_for_maintenance() {
    use crate::common::roles::{Connection, Postgres};
    let dir = tempfile::tempdir().unwrap();
    let place = Postgres::new(dir.path());
    let flags = place.serve();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let start = || Server::start_in(dir.path(), &flags, &[WEEK]);
    // Row security binds the owner too.
    let mut admin = Connection::to(&place.owner_url.replace("hapax_test_owner", "postgres"));
    let schema = &place.schema;
    admin.run(&format!(
        "create table {schema}.sweepers (who text); grant insert on {schema}.sweepers to public; \
         create function {schema}.note_sweeper() returns trigger language plpgsql as \
         $$ begin insert into {schema}.sweepers values (current_user); return null; end $$; \
         create trigger note_sweeper after delete on {schema}.keys for each row execute function {schema}.note_sweeper()"
    ));
    a_server_forgets(start, &place.slug, |key| {
        admin.run(&format!(
            "update {schema}.keys set begun_at = begun_at - interval '31 days', settled_at = settled_at - interval '31 days', \
             aged_from = aged_from - interval '31 days' where key = '{key}'; \
             update {schema}.keys_meta set swept_at = swept_at - interval '25 hours'"
        ));
    });
    assert_eq!(admin.rows(&format!("select from {schema}.sweepers")), 1);
    let of_maintenance = format!("select from {schema}.sweepers where who = 'hapax_test_maintenance'");
    assert_eq!(admin.rows(&of_maintenance), 1);
    let mut app = Connection::to(&place.app_url);
    let may = format!("select where has_table_privilege('{schema}.keys', 'delete')");
    assert_eq!(app.rows(&may), 0, "the server's role may not");
}

/// A client's clock is a year ahead. Its key would be forgotten long before it is old, and a retry would be new then.
#[test]
fn t413_a_key_from_a_clock_that_is_far_ahead_is_refused_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir, &[]);
    let ahead = |days: u64| {
        let ms = SystemClock.now().as_micros() as u64 / 1000 + days * 86_400_000;
        format!("{:08x}-{:04x}-7000-8000-000000000017", ms >> 16, ms & 0xffff)
    };
    let path = "/v1/modules/orders/records";
    let post = |key: &str| {
        let headers = [("content-type", "application/json"), ("idempotency-key", key)];
        request(&server.address, "POST", path, &headers, br#"{"payload":{"n":1}}"#)
    };
    let (year, weeks) = (ahead(365), ahead(27));
    for _ in 0..2 {
        let said = post(&year).problem(400, "key-invalid");
        assert!(said.contains("28 days") && said.contains("clock"), "{said}");
        assert_eq!(state(&server, &year, &[]), "unknown");
    }
    post(&weeks).is(201);
    assert_eq!(post(&weeks).is(200)["seq"], 1);
    assert_eq!(server.get(path).is(200)["records"].as_array().unwrap().len(), 1);
}
