//! A truncate, in a database of its own: no feed of its topic goes on after it.

use serde_json::json;

use crate::common::consume::wait_until;
use crate::common::run;
use crate::{Deployment, PARTITIONS, create, visible, world};

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
