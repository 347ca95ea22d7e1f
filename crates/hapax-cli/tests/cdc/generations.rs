//! A replication slot that is lost or made anew: what was written meanwhile is in no topic, so the source has a new generation.
#![cfg(feature = "clickhouse")]

use serde_json::json;

use crate::common::consume::wait_until;
use crate::common::serve::Server;
use crate::flows::writes_are_visible_soon;
use crate::own::Own;
use crate::{PARTITIONS, create, delete, listed, stored, text, visible, world};

/// The slot is dropped, a record is deleted and another created, and the slot is made again: Debezium streams as if nothing had
/// happened. The pulses tell, `cdc status` says what to do, and after that the deleted record is gone from the model.
#[test]
fn t53_a_slot_that_is_made_anew_leads_to_a_new_generation() {
    let (world, own) = (world(), Own::new());
    let partitions = PARTITIONS.to_string();
    own.run(&world, &["cdc", "remove", "--slot"], 1, "first"); // of a run before
    own.run(&world, &["cdc", "apply", "--create", &partitions], 1, "first").code(0);
    let server = own.serve(&world, 1);
    let records: Vec<_> = (0..5).map(|n| create(&server, "orders", &json!({"n": n}))).collect();
    for record in &records {
        visible(&server, record);
    }
    own.run(&world, &["cdc", "status"], 1, "first").code(0);

    own.run(&world, &["cdc", "remove", "--slot"], 1, "first").code(0);
    let status = own.run(&world, &["cdc", "status"], 1, "first").code(1).out;
    assert!(status.contains("gone") && status.contains("raise analytics.generation"), "{status}");
    delete(&server, &records[0]);
    let unseen = create(&server, "orders", &json!({"n": "unseen"}));
    own.run(&world, &["cdc", "apply", "--with", "snapshot.mode=no_data"], 1, "second").code(0);
    let after = create(&server, "orders", &json!({"n": "after"}));
    visible(&server, &after);
    wait_until("the gap is reported", || {
        let status = own.run(&world, &["cdc", "status", "--json"], 1, "second").code(1).json();
        status["gap"]
            .as_str()
            .is_some_and(|gap| gap.contains("are missing") && gap.contains("analytics rebuild"))
    });
    let has = |server: &Server, record: &serde_json::Value| {
        listed(server, "orders").0.iter().any(|one| text(one, "id") == text(record, "id"))
    };
    assert!(has(&server, &records[0]) && !has(&server, &unseen), "a ghost and a loss");
    drop(server);

    own.run(&world, &["cdc", "remove", "--slot"], 1, "second").code(0);
    own.run(&world, &["cdc", "apply", "--create", &partitions], 2, "first").code(0);
    let server = own.serve(&world, 2);
    assert!(has(&server, &records[0]), "the old model answers");
    let doctor = own.run(&world, &["doctor"], 2, "first").out;
    assert!(doctor.contains("rows of generation 1, and analytics.generation is 2"), "{doctor}");
    let rebuilt = own.run(&world, &["analytics", "rebuild", "--wait", "2m"], 2, "first").code(0).out;
    assert!(rebuilt.contains("all equal") && rebuilt.contains("is built again"), "{rebuilt}");
    assert!(!has(&server, &records[0]) && has(&server, &unseen), "no ghost, and no loss");
    let last = create(&server, "orders", &json!({"n": "last"}));
    visible(&server, &last); // the server's feed goes on with the new table
    wait_until("the model is equal", || listed(&server, "orders").0 == stored(&server, "orders"));
    own.run(&world, &["cdc", "status"], 2, "first").code(0);
    own.run(&world, &["verify", "analytics", "--module", "orders", "--wait", "60s"], 2, "first").code(0);
    own.run(&world, &["cdc", "remove", "--slot"], 2, "first").code(0);
}

/// From the acknowledgement of a write, through Debezium, to an answer of ClickHouse.
#[test]
fn a_write_is_visible_soon_in_clickhouse() {
    let (world, own) = (world(), Own::new());
    own.run(&world, &["cdc", "remove", "--slot"], 1, "first"); // of a run before
    own.run(&world, &["cdc", "apply", "--create", &PARTITIONS.to_string()], 1, "first").code(0);
    let server = own.serve(&world, 1);
    writes_are_visible_soon(&server);
    drop(server);
    own.run(&world, &["cdc", "remove", "--slot"], 1, "first").code(0);
}
