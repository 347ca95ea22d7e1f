//! `hapax doctor` on what a server writes to and reads from: journal, keys, records and the read model.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use hapax::Topic;
use hapax::analytics::{Block, ReadModel as _};
use hapax::backend::sqlite::SqliteReadModel;
use hapax::bus::Partition;
use serde_json::Value;

use crate::common::{Ran, run, run_with};

/// A ledger and a bus, so that nothing else is to be complained of.
fn prepared(dir: &Path) {
    run(dir, &["ledger", "init"]).code(0);
    run_with(dir, &["produce", "--topic", "orders", "--create", "1"], b"").code(0);
}

fn doctor(dir: &Path, more: &[&str]) -> Ran {
    run(dir, &[&["doctor", "--json"], more].concat())
}

/// The findings of a check, each with its level.
fn told(ran: &Ran, check: &str) -> Vec<(String, String)> {
    let all = ran.json()["findings"].as_array().unwrap().clone();
    let text = |finding: &Value, of: &str| finding[of].as_str().unwrap().to_owned();
    let of_check = all.iter().filter(|finding| finding["check"] == check);
    of_check.map(|finding| (text(finding, "level"), text(finding, "message"))).collect()
}

#[track_caller]
fn says(ran: &Ran, check: &str, level: &str, parts: &[&str]) {
    let found = told(ran, check);
    let is =
        |(of, message): &(String, String)| of == level && parts.iter().all(|part| message.contains(part));
    assert!(found.iter().any(is), "{check} {level} {parts:?}: {found:?}");
}

#[test]
fn doctor_looks_at_what_a_server_uses() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    prepared(dir);
    // What nobody has used yet is no fault, and is not made.
    let before = doctor(dir, &[]).code(0);
    for check in ["journal", "keys", "records", "read model"] {
        says(&before, check, "fine", &["yet", "`hapax"]);
    }
    assert!(!dir.join("hapax-data/journal.db").exists() && !dir.join("hapax-data/reads.db").exists());
    run(dir, &["modules", "create", "orders"]).code(0);
    let made = doctor(dir, &[]).code(0);
    says(&made, "journal", "fine", &["takes writes", "sqlite"]);
    says(&made, "keys", "warning", &["there is no store of keys", "`hapax serve`"]);
    says(&made, "records", "fine", &["module orders is protected"]);
    run(dir, &["keys", "init"]).code(0);
    says(&doctor(dir, &[]).code(0), "keys", "fine", &["takes writes", "sqlite"]);
    // A read model of which nothing is known, and one that is in step.
    let model = SqliteReadModel::open(dir.join("hapax-data/reads.db")).unwrap();
    says(&doctor(dir, &[]).code(0), "read model", "warning", &["nothing is known", "`hapax serve`"]);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let pulse = |seconds: u64| {
        runtime.block_on(async {
            let partition = Partition { topic: Topic::new("events").unwrap(), number: 0 };
            let mut block = Block::new(partition, 1, 0..1);
            block.pulse = Some(model.now().await.unwrap().plus(std::time::Duration::from_secs(seconds)));
            model.apply(&[block]).await.unwrap();
        });
    };
    pulse(0);
    // Whether that is long ago is up to the machine.
    let in_step = told(&doctor(dir, &[]).code(0), "read model");
    assert!(in_step[0].1.contains("complete up to"), "{in_step:?}");
    pulse(3600);
    says(&doctor(dir, &[]).code(0), "read model", "fine", &["complete up to"]);
    // Somebody has removed what protects records.
    let file = rusqlite::Connection::open(dir.join("hapax-data/journal.db")).unwrap();
    let sql = "SELECT name FROM sqlite_schema WHERE type = 'trigger' AND tbl_name = 'hapax_record' LIMIT 1";
    let trigger: String = file.query_row(sql, [], |row| row.get(0)).unwrap();
    file.execute_batch(&format!("DROP TRIGGER {trigger}")).unwrap();
    let refused = doctor(dir, &[]).code(1);
    says(&refused, "records", "refusal", &["module orders", &trigger, "docs/records.md"]);
    let table = run(dir, &["doctor"]).code(1);
    assert!(table.out.contains("refusal") && table.out.contains(&trigger), "{}", table.out);
    // What does not answer is told apart from what is wrong.
    let away = doctor(dir, &["--journal", "postgres://127.0.0.1:1/x"]).code(3);
    for check in ["journal", "keys", "records"] {
        says(&away, check, "unreachable", &[]);
    }
}

#[test]
#[cfg(feature = "postgres")]
fn doctor_sees_what_was_changed_in_postgres() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let place = crate::common::roles::Postgres::new(dir);
    prepared(dir);
    let flags = place.serve();
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let sound = doctor(dir, &flags).code(0);
    says(&sound, "journal", "fine", &["takes writes", "postgres"]);
    says(&sound, "keys", "fine", &["takes writes", "postgres"]);
    says(&sound, "roles", "fine", &["keys.url"]);
    says(&sound, "roles", "fine", &["keys.maintenance_url"]);
    says(&sound, "row security", "fine", &["keys"]);
    says(&sound, "records", "fine", &[&place.slug, "is protected"]);
    says(&sound, "read model", "fine", &["analytics.url is unset"]);
    // What one statement changes.
    let table = format!("module_{}.records", place.slug);
    place.owner_runs(&format!(
        "alter table {table} no force row level security; alter table {table} replica identity default; \
         alter table {table} disable trigger records_guard; alter publication hapax_records drop table {table}"
    ));
    let changed = doctor(dir, &flags).code(1);
    let problems = [
        "row security is not forced",
        "replica identity",
        "records_guard",
        "hapax_records",
        "docs/records.md",
    ];
    says(&changed, "records", "refusal", &problems);
    place.owner_runs(&format!("alter table {}.keys no force row level security", place.schema));
    says(&doctor(dir, &flags).code(1), "row security", "refusal", &["keys", "not forced"]);
    // A role that row security does not bind.
    let admin = place.owner_url.replace("hapax_test_owner", "postgres");
    let as_admin = ["--journal", &admin, "--set", place.schema_flag()];
    says(&doctor(dir, &as_admin).code(1), "roles", "refusal", &["bypasses row security", "another"]);
    let accepted = doctor(dir, &[&as_admin[..], &["--set", "records.accept_bypass=true"]].concat());
    says(&accepted, "roles", "warning", &["bypasses row security", "records.accept_bypass"]);
}
