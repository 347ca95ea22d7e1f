//! What no feed goes on after, each in a database of its own: a truncate, and a slot that was made anew.

use hapax::Time;
use serde_json::json;

use crate::common::consume::wait_until;
use crate::common::run;
use crate::{Deployment, PARTITIONS, create, listed, text, visible, world};

/// The trigger that refuses it is disabled. Debezium tells, the feed ends with a sentence, and whoever asks is told what to do.
#[test]
fn t54_a_truncate_behind_the_trigger_is_told_by_status_and_doctor() {
    let _one_at_a_time = world();
    let world = Deployment::new("hapax_test_cdc_truncate", "hapax-test-truncate");
    world.cdc(&["apply", "--create", &PARTITIONS.to_string()]).code(0);
    let server = world.serve();
    visible(&server, &create(&server, "orders", &json!({"n": 1})));
    run(&world.dir, &["cdc", "status"]).code(0);
    world.admin().run(
        "alter table module_orders.records disable trigger user; truncate module_orders.records;
         alter table module_orders.records enable trigger user",
    );
    wait_until("the feed has failed", || server.get("/readyz").body.contains("\"analytics\":\"failed\""));
    let sentences = ["the records of module orders were truncated", "hapax analytics rebuild"];
    let explains = |text: &str| sentences.iter().all(|sentence| text.contains(sentence));
    let status = run(&world.dir, &["cdc", "status", "--json"]).code(1).json();
    assert!(status["gap"].as_str().is_some_and(explains) && status["flows"] == false, "{status}");
    let doctor = run(&world.dir, &["doctor"]).out;
    assert!(explains(&doctor), "{doctor}");
    assert!(explains(&run(&world.dir, &["query", "status"]).code(1).out));
    drop(server);
    world.cdc(&["remove", "--slot"]).code(0);
}

/// Somebody drops the slot and makes another of the same name, and the connector has its offsets still: it must not stream
/// on as if nothing had happened.
#[test]
fn t438_a_slot_that_is_made_anew_under_the_offsets_of_a_connector_is_told() {
    let _one_at_a_time = world();
    let world = Deployment::new("hapax_test_cdc_offsets", "hapax-test-offsets");
    world.cdc(&["apply", "--create", &PARTITIONS.to_string()]).code(0);
    let server = world.serve();
    let seen = create(&server, "orders", &json!({"n": 1}));
    visible(&server, &seen);
    world.cdc(&["remove"]).code(0); // the slot and the offsets stay
    let slot = "hapax_test_cdc_offsets";
    let mut admin = world.admin();
    let inactive = format!("select from pg_replication_slots where slot_name = '{slot}' and not active");
    wait_until("its reader has left", || admin.rows(&inactive) == 1);
    admin.run(&format!("select pg_drop_replication_slot('{slot}')"));
    let unseen = create(&server, "orders", &json!({"n": "unseen"}));
    admin.run(&format!("select pg_create_logical_replication_slot('{slot}', 'pgoutput')"));
    create(&server, "orders", &json!({"n": "after"}));
    let applied = world.cdc(&["apply", "--wait", "30s"]);
    println!("apply: {:?} {} {}", applied.code, applied.out, applied.err);
    let status = run(&world.dir, &["cdc", "status", "--json"]).code(1).json();
    println!("{status}");
    assert!(status["flows"] == false || status["gap"].is_string(), "{status}");
    let (rows, synced) = listed(&server, "orders");
    let is_in = rows.iter().any(|row| row["id"] == unseen["id"]);
    let written = Time::parse(text(&unseen, "updated_at")).unwrap();
    let is_claimed = synced.is_some_and(|synced| Time::parse(&synced).unwrap() > written);
    assert!(!is_in && !is_claimed, "it is missing, and no answer says otherwise");
    drop(server);
    world.cdc(&["remove", "--slot"]).code(0);
}
