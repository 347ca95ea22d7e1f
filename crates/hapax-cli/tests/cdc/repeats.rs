//! Everything is published again, by a slot that was copied before it was written, and ClickHouse has it twice.
#![cfg(feature = "clickhouse")]

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::serve::Server;
use crate::own::Own;
use crate::{Deployment, PARTITIONS, create, delete, listed, stored, text, update, visible, world};

const COPY: &str = "hapax_test_repeats";

/// A pipeline whose slot was copied before anything was written, and which merges nothing.
fn begun(world: &Deployment) -> (Own, Server) {
    let own = Own::new();
    own.run(world, &["cdc", "remove", "--slot"], 1, "first"); // of a run before
    let mut admin = world.admin();
    admin.run(&format!(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = '{COPY}' and not active"
    ));
    own.run(world, &["cdc", "apply", "--create", &PARTITIONS.to_string()], 1, "first").code(0);
    admin.run(&format!("select pg_copy_logical_replication_slot('hapax_test_generations', '{COPY}')"));
    let server = own.serve(world, 1);
    visible(&server, &create(&server, "orders", &json!({"first": true}))); // the tables are there
    // Nothing tidies up in between; deletions of rows, which stopped merges would hold up, go on.
    own.sql("ALTER TABLE DB.data_records MODIFY SETTING max_bytes_to_merge_at_max_space_in_pool = 1");
    (own, server)
}

fn count(server: &Server, more: &str) -> u64 {
    let tally = server.get(&format!("/v1/analytics/modules/orders/tally?{more}")).is(200);
    tally["groups"][0]["count"].as_u64().unwrap_or(0)
}

/// The layer and the layer off: with FINAL every record counts once, and without it whatever was published again counts too.
#[test]
fn t59_what_a_copied_slot_publishes_again_counts_once_with_final_and_more_often_without() {
    let world = world();
    let (own, server) = begun(&world);
    let mut records: Vec<Value> = (0..20).map(|n| create(&server, "orders", &json!({"n": n}))).collect();
    for record in &mut records[..10] {
        *record = update(&server, record, &json!({"again": true}));
    }
    for record in &mut records[..5] {
        *record = delete(&server, record);
    }
    for record in &records {
        visible(&server, record);
    }
    let rows =
        || own.sql("SELECT count() FROM DB.data_records WHERE module = 'orders'").parse::<u64>().unwrap();
    let before = rows();
    own.publish_again(&world, COPY);
    // A row for each record at least: versions of one record that come in one block are one row.
    wait_until("everything is there twice", || rows() >= before + 20);
    let stored = stored(&server, "orders");
    assert_eq!(listed(&server, "orders").0, stored, "with FINAL");
    assert_eq!(count(&server, ""), stored.len() as u64, "with FINAL");
    let approximate = count(&server, "approximate=true");
    assert!(approximate > stored.len() as u64, "without it: {approximate} for {}", stored.len());
    own.run(&world, &["verify", "analytics", "--module", "orders", "--wait", "60s"], 1, "first").code(0);
    drop(server);
    own.run(&world, &["cdc", "remove", "--slot"], 1, "first").code(0);
}

/// What is erased stays away when Debezium publishes its older versions again: whatever of them is inserted is hidden, and the
/// next run of the same command removes it.
#[test]
fn t51_what_is_erased_stays_away_when_a_copied_slot_publishes_it_again() {
    const SECRET: &str = "alice@example.com";
    let world = world();
    let (own, server) = begun(&world);
    let record = create(&server, "orders", &json!({"mail": SECRET}));
    let record = update(&server, &record, &json!({"mail": SECRET, "n": 2}));
    visible(&server, &record);
    let id = text(&record, "id");
    let versions = || {
        let sql = format!("SELECT count() FROM DB.data_records WHERE position(payload, '{SECRET}') > 0");
        own.sql(&sql).parse::<u64>().unwrap()
    };
    assert!(versions() >= 1);
    let erase = || {
        let args = ["erase", "--module", "orders", "--record", id, "--yes", "--wait", "60s", "--json"];
        let report = own.run(&world, &args, 1, "first").code(0).json();
        assert_eq!(report["state"], "in-topic", "{report}");
        assert!(report["out_of_reach"].to_string().contains("deletions carry the row before"), "{report}");
    };
    erase();
    assert_eq!(versions(), 0);
    let rows = || {
        own.sql(&format!("SELECT count() FROM DB.data_records WHERE record_id = '{id}'"))
            .parse::<u64>()
            .unwrap()
    };
    let before = rows();
    own.publish_again(&world, COPY);
    wait_until("it is published again", || rows() > before);
    let last = create(&server, "orders", &json!({"last": true}));
    visible(&server, &last);
    assert!(!listed(&server, "orders").0.iter().any(|one| text(one, "id") == id), "and hidden");
    erase();
    assert_eq!(versions(), 0, "and removed");
    wait_until("the model is equal", || listed(&server, "orders").0 == stored(&server, "orders"));
    drop(server);
    own.run(&world, &["cdc", "remove", "--slot"], 1, "first").code(0);
}
