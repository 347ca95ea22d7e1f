//! `hapax verify`: a read model that is proven equal to its records, and what it reports when it is not.
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};

use crate::common::run;
use crate::common::serve::{Server, request};

const TENANT: &str = "0190d3a0-5b7e-7c3a-9f51-00000000000a";

fn create(server: &Server, tenant: Option<&str>, n: usize) -> String {
    let key = format!("k{n}");
    let mut headers = vec![("content-type", "application/json"), ("idempotency-key", key.as_str())];
    headers.extend(tenant.map(|tenant| ("hapax-tenant", tenant)));
    let body = json!({"payload": {"n": n, "text": "some text"}}).to_string();
    let answer = request(&server.address, "POST", "/v1/modules/orders/records", &headers, body.as_bytes());
    assert_eq!(answer.status, 201, "{answer:?}");
    answer.json()["id"].as_str().unwrap().to_owned()
}

/// Changes the file of the read model behind the server's back.
fn change(dir: &Path, sql: &str) {
    let file = rusqlite::Connection::open(dir.join("d/reads.db")).unwrap();
    file.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
    assert_eq!(file.execute(sql, []).unwrap(), 1, "{sql}");
}

fn blob(id: &str) -> String {
    format!("x'{}'", id.replace('-', ""))
}

/// While the server runs and writes: equal first, and then each kind of difference by its name.
#[test]
fn a_read_model_is_compared_while_it_is_in_use() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d"]);
    let ids: Vec<String> = (0..20).map(|n| create(&server, (n % 2 == 0).then_some(TENANT), n)).collect();
    let verify = |args: &[&str]| run(dir, &[&["verify", "analytics", "--data", "d"], args].concat());
    // Nobody waited for the feed: what is on its way is waited for.
    let stdout = verify(&["--wait", "60s"]).code(0).out;
    assert!(stdout.contains("20 records compared, all equal"), "{stdout}");
    let receipt = verify(&["--wait", "60s", "--json"]).code(0).json();
    assert_eq!((&receipt["records"], &receipt["differences"]), (&json!(20), &json!(0)), "{receipt}");
    assert_eq!(receipt["source"], receipt["model"], "{receipt}");
    let counted =
        receipt["sums"].as_array().unwrap().iter().map(|sum| sum["source"]["records"].as_u64().unwrap());
    assert_eq!(counted.sum::<u64>(), 20, "{receipt}");
    let stdout = verify(&["--tenant", TENANT, "--module", "orders"]).code(0).out;
    assert!(stdout.contains("10 records compared"), "{stdout}");

    let row = |id: &str| format!("WHERE id = {}", blob(id));
    change(
        dir,
        &format!("UPDATE hapax_read_row SET payload = replace(payload, 'some', 'sume') {}", row(&ids[0])),
    );
    change(dir, &format!("DELETE FROM hapax_read_row {}", row(&ids[1])));
    let columns = "generation, seq, payload, created_at, updated_at, topic, partition, offset";
    let ghost = "0190d3a0-5b7e-7c3a-9f51-00000000000b";
    change(
        dir,
        &format!(
            "INSERT INTO hapax_read_row (tenant, module, id, {columns}) SELECT tenant, module, {}, {columns} FROM hapax_read_row {}",
            blob(ghost),
            row(&ids[2])
        ),
    );
    let receipt = verify(&["--wait", "60s", "--json"]).code(1).json();
    let mut kinds: Vec<(&str, &str)> = receipt["listed"].as_array().unwrap().iter().map(named).collect();
    let mut expected = vec![(ids[0].as_str(), "corruption"), (ids[1].as_str(), "loss"), (ghost, "ghost")];
    kinds.sort_unstable();
    expected.sort_unstable();
    assert_eq!(kinds, expected, "{receipt}");
    let stdout = verify(&["--wait", "60s", "--limit", "1"]).code(1).out;
    assert!(stdout.contains("3 differ") && stdout.contains("read model"), "{stdout}");
    // Of another tenant there is nothing wrong.
    let stdout = verify(&["--tenant", "0190d3a0-5b7e-7c3a-9f51-00000000000c"]).code(0).out;
    assert!(stdout.contains("has no records: nothing is proven"), "{stdout}");
}

/// The id of a record, and what is wrong with it.
fn named(listed: &Value) -> (&str, &str) {
    let record = listed["record"].as_str().unwrap();
    (record.rsplit(':').next().unwrap(), listed["kind"].as_str().unwrap())
}

#[test]
fn mistakes_get_a_sentence_and_nothing_is_made() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let verify = |args: &[&str]| run(dir, &[&["verify"], args].concat());
    let stderr = verify(&["analytics", "--data", "d"]).code(3).err;
    assert!(stderr.contains("there is no read model at d"), "{stderr}");
    for (what, url) in [("search", "cache:redis://me:s3cret@127.0.0.1:1"), ("cache", "opensearch:http://h/a")]
    {
        let stderr = verify(&[what, "--data", "d", "--to", url]).code(2).err;
        assert!(stderr.contains("another kind of projection") && !stderr.contains("s3cret"), "{stderr}");
    }
    assert!(!dir.join("d").exists(), "looking makes nothing");
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    drop(Server::start(dir, &["--data", "d"]));
    for hostile in ["' OR 1=1 --", "x", "\u{1b}[2J"] {
        let stderr = verify(&["analytics", "--data", "d", "--tenant", hostile]).err;
        assert!(stderr.contains("tenant") && !stderr.contains('\u{1b}'), "{stderr}");
        let of_module = format!("{hostile};"); // `x` alone is a name
        let stderr = verify(&["analytics", "--data", "d", "--module", &of_module]).code(2).err;
        assert!(stderr.contains("1 to 48") && !stderr.contains('\u{1b}'), "{stderr}");
    }
    let stderr = verify(&["analytics", "--data", "d", "--module", "other"]).code(4).err;
    assert!(stderr.contains("there is no module other"), "{stderr}");
    verify(&["analytics", "--data", "d", "--wait", "0s"]).code(2);
    let stdout = verify(&["analytics", "--data", "d", "--module", "orders"]).code(0).out;
    assert!(stdout.contains("0 records compared, all equal"), "{stdout}");
}

/// PostgreSQL keeps keys in an order of its own and writes numbers out: the same values all the same. Only a role that
/// sees all tenants can compare.
#[test]
#[cfg(feature = "postgres")]
fn records_in_postgres_are_compared_by_the_role_of_maintenance() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    let set = ["--set", "analytics.url=sqlite:reads.db"];
    let keeper = format!("keys.maintenance_url={}", place.keeper_url);
    let server = place.start_with(&[&set[..], &["--set", &keeper]].concat());
    for n in 0..9 {
        let tenant = format!("0190d3a0-5b7e-7c3a-9f51-00000000000{}", n % 3);
        let key = format!("k{n}");
        let headers =
            [("content-type", "application/json"), ("idempotency-key", &*key), ("hapax-tenant", &*tenant)];
        let body = format!(r#"{{"payload": {{"z": 1.50e3, "long": {n}, "a": [-0, 1E-3, "1.0"]}}}}"#);
        let path = format!("/v1/modules/{}/records", place.slug);
        let answer = request(&server.address, "POST", &path, &headers, body.as_bytes());
        assert_eq!(answer.status, 201, "{answer:?}");
    }
    let verify = |more: &[&str]| {
        let command = ["verify", "analytics", "--wait", "60s"];
        run(dir, &[&command[..], &place.as_app()[..], &set[..], more].concat())
    };
    let receipt = verify(&["--set", &keeper, "--json"]).code(0).json();
    assert_eq!((&receipt["records"], &receipt["differences"]), (&json!(9), &json!(0)), "{receipt}");
    let of_one =
        ["--set", &keeper, "--tenant", "0190d3a0-5b7e-7c3a-9f51-000000000001", "--module", &place.slug];
    let stdout = verify(&of_one).code(0).out;
    assert!(stdout.contains("3 records compared, all equal"), "{stdout}");
    let refused = verify(&[]);
    assert!(refused.code.is_some_and(|code| code > 1), "{}", refused.out);
    assert!(refused.err.contains("does not see the records of all tenants"), "{}", refused.err);
    let file = rusqlite::Connection::open(dir.join("reads.db")).unwrap();
    file.busy_timeout(std::time::Duration::from_secs(30)).unwrap();
    let sql = r#"UPDATE hapax_read_row SET payload = replace(payload, '"long":7', '"long":8')"#;
    assert_eq!(file.execute(sql, []).unwrap(), 9);
    let receipt = verify(&["--set", &keeper, "--json"]).code(1).json();
    assert_eq!(receipt["listed"].as_array().unwrap().len(), 1, "{receipt}");
    assert_eq!(receipt["listed"][0]["kind"], "corruption", "{receipt}");
}
