//! A read model of records in PostgreSQL that begins late: with the records as they are, and then the topic.

#![cfg(all(feature = "postgres", unix))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::roles::Postgres;
use crate::common::run;
use crate::common::serve::{Answer, Server, request};

const TENANTS: [&str; 2] = ["0190d3a0-5b7e-7c3a-9f51-00000000000a", "0190d3a0-5b7e-7c3a-9f51-00000000000b"];

fn send(server: &Server, tenant: &str, method: &str, path: &str, body: &Value) -> Answer {
    static KEYS: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    let key = format!("k{}", KEYS.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let headers =
        [("content-type", "application/json"), ("idempotency-key", &*key), ("hapax-tenant", tenant)];
    request(&server.address, method, &format!("/v1/modules/{path}"), &headers, body.to_string().as_bytes())
}

fn create(server: &Server, tenant: &str, module: &str, n: usize) -> Value {
    send(server, tenant, "POST", &format!("{module}/records"), &json!({"payload": {"n": n}})).is(201)
}

fn update(server: &Server, tenant: &str, record: &Value) -> Value {
    let path = format!("{}/records/{}", text(record, "module"), text(record, "id"));
    let body = json!({"payload": {"changed": true}, "expected_seq": record["seq"]});
    send(server, tenant, "PUT", &path, &body).is(200)
}

fn delete(server: &Server, tenant: &str, record: &Value) {
    let (module, id) = (text(record, "module"), text(record, "id"));
    let path = format!("{module}/records/{id}?expected_seq={}", record["seq"]);
    send(server, tenant, "DELETE", &path, &Value::Null).is(200);
}

fn text<'v>(value: &'v Value, name: &str) -> &'v str {
    value[name].as_str().unwrap_or_else(|| panic!("no {name}: {value}"))
}

fn get(server: &Server, tenant: &str, path: &str) -> Value {
    request(&server.address, "GET", path, &[("hapax-tenant", tenant)], b"").is(200)
}

/// How many records the topic has, with those that are gone.
fn published(bus: &Path) -> i64 {
    let conn = rusqlite::Connection::open(bus).unwrap();
    conn.query_row("SELECT sum(next) FROM bus_part", [], |row| row.get(0)).unwrap()
}

/// Removes every record of the bus, as retention does.
fn remove_all(bus: &Path) {
    let conn = rusqlite::Connection::open(bus).unwrap();
    let mut parts = conn.prepare("SELECT number FROM bus_part").unwrap();
    let parts: Vec<i64> = parts.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    for part in parts {
        conn.execute(&format!("DELETE FROM bus_record_{part}"), []).unwrap();
        conn.execute("UPDATE bus_part SET oldest = next, bytes = 0 WHERE number = ?1", [part]).unwrap();
    }
}

/// Whether the read model has what the records are, for each tenant and module.
fn equal(server: &Server, modules: [&str; 2]) -> bool {
    TENANTS.iter().all(|tenant| {
        modules.iter().all(|module| {
            let page = get(server, tenant, &format!("/v1/analytics/modules/{module}/records?limit=1000"));
            let records = get(server, tenant, &format!("/v1/modules/{module}/records?limit=1000"));
            page["records"] == records["records"] && !page["meta"]["lastSyncAt"].is_null()
        })
    })
}

/// The topic's beginning is gone when the model begins. (`what_is_written_while_a_model_begins_is_in_it` has what
/// changes in between.)
#[test]
fn a_model_of_records_in_postgres_begins_with_the_records_as_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = Postgres::new(dir);
    let (one, two) = (place.slug.clone(), format!("{}_z", place.slug));
    place.create_module(&two);
    let grants =
        ["modules", "grants", "--app-role", &place.app, "--maintenance-role", "hapax_test_maintenance"];
    place.owner_runs(&run(dir, &[&place.as_owner()[..], &grants].concat()).code(0).out);
    let keeper = format!("keys.maintenance_url={}", place.keeper_url);
    let (bus, fixed) = (dir.join("d").join("bus.db"), ["--data", "d", "--set", &keeper]);

    let mut server = place.start_with(&fixed);
    let mut records = Vec::new();
    for n in 0..12 {
        records.push(create(&server, TENANTS[n % 2], [&one, &two][n / 6], n));
    }
    let changed = update(&server, TENANTS[0], &records[0]);
    delete(&server, TENANTS[1], &records[1]);
    wait_until("all of it is published", || published(&bus) >= 14);
    server.stop();
    remove_all(&bus);

    // A role that does not see all tenants begins with the topic, which says that something is missing.
    let topic_only = place.start_with(&["--data", "d", "--set", "analytics.url=sqlite:topic.db"]);
    wait_until("it is noticed", || {
        let status = topic_only.get("/v1/analytics/status").json();
        status["rejected"].to_string().contains("were gone before they were read")
    });
    let page = get(&topic_only, TENANTS[0], &format!("/v1/analytics/modules/{one}/records"));
    assert_eq!((&page["records"], &page["meta"]["lastSyncAt"]), (&json!([]), &Value::Null), "{page}");
    drop(topic_only);

    // With the role of maintenance the model has all of it, and what is written from here on.
    let set = "analytics.url=sqlite:reads.db";
    let server = place.start_with(&[&fixed[..], &["--set", set]].concat());
    update(&server, TENANTS[0], &changed);
    delete(&server, TENANTS[0], &records[2]);
    update(&server, TENANTS[1], &records[3]);
    create(&server, TENANTS[1], &one, 99);
    wait_until("it is as the records are", || equal(&server, [&one, &two]));
    // It knows what was deleted before: whoever publishes that again brings nothing back.
    let token = format!("{one}/{}@2", text(&records[1], "id"));
    let path = format!("/v1/analytics/modules/{one}/records?after_write={token}&wait_ms=0");
    get(&server, TENANTS[1], &path);
    let status = server.get("/v1/analytics/status").json();
    assert_eq!(status["rejected"], json!([]), "{status}");
    let verify = ["verify", "analytics", "--wait", "60s", "--json", "--set", &keeper, "--set", set];
    let receipt = run(dir, &[&verify[..], &place.as_app()[..]].concat()).code(0).json();
    assert_eq!((&receipt["records"], &receipt["differences"]), (&json!(11), &json!(0)), "{receipt}");
}
