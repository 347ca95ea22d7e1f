//! `hapax cdc` and what `hapax doctor` says, as an operator types it.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::run;
use crate::{SLOT, create, visible, world};

#[test]
fn the_configuration_is_printed_without_passwords() {
    let world = world();
    let set = |password: &str| {
        let told =
            run(&world.dir, &["cdc", "config", "--set", &format!("cdc.password={password}")]).code(0).out;
        let whole: Value = serde_json::from_str(&told).unwrap();
        assert_eq!(whole["name"], "hapax-test");
        whole["config"].clone()
    };
    let config = set("s3cret");
    for (key, value) in [
        ("database.password", "***"),
        ("offset.mismatch.strategy", "trust_offset"),
        ("skipped.operations", "none"),
        ("publication.autocreate.mode", "disabled"),
        ("publication.name", "hapax_records"),
        ("slot.name", SLOT),
        ("slot.failover", "true"),
        ("database.user", "hapax_test_cdc_keeper"),
        ("table.include.list", r"hapax\.record_pulse,module_[a-z0-9_]+\.records"),
        ("transforms.route.replacement", world.topic.as_str()),
    ] {
        assert_eq!(config[key], value, "{key}");
    }
    assert_eq!(set("${file:/run/pg:password}")["database.password"], "${file:/run/pg:password}");
    let own = run(&world.dir, &["cdc", "config", "--with", "poll.interval.ms=7"]).code(0).out;
    assert!(own.contains("\"poll.interval.ms\": \"7\""), "{own}");
}

#[test]
fn apply_is_idempotent_and_remove_keeps_the_place() {
    let world = world();
    let again = run(&world.dir, &["cdc", "apply", "--json"]).code(0).json();
    assert_eq!((&again["done"], &again["partitions"]), (&"same".into(), &crate::PARTITIONS.into()));
    let status = run(&world.dir, &["cdc", "status", "--json"]).code(0).json();
    assert_eq!((&status["connector"], &status["tasks"][0]["state"]), (&"RUNNING".into(), &"RUNNING".into()));
    assert_eq!((&status["slot"]["active"], &status["slot"]["failover"]), (&true.into(), &true.into()));
    assert!(status["last_pulse"].is_string() && status["slot"]["lag_bytes"].is_u64(), "{status}");

    // What is written while there is no connector arrives: the slot and the offsets stay.
    run(&world.dir, &["cdc", "remove"]).code(0);
    // Connect still lists a connector for a moment after it was deleted.
    let patience = Instant::now() + Duration::from_secs(120);
    loop {
        let told = run(&world.dir, &["cdc", "status"]).code(1).out;
        if told.contains("missing") && told.contains("hapax cdc apply") {
            break;
        }
        assert!(Instant::now() < patience, "{told}");
        std::thread::sleep(Duration::from_millis(200));
    }
    let server = world.serve();
    let record = create(&server, "orders", &serde_json::json!({"while": "removed"}));
    assert_eq!(run(&world.dir, &["cdc", "apply", "--json"]).code(0).json()["done"], "made");
    visible(&server, &record);
}

#[test]
fn what_is_wrong_is_a_sentence() {
    let world = world();
    let told = run(&world.dir, &["cdc", "status", "--connect", "http://127.0.0.1:9"]).code(3).err;
    assert!(told.contains("Kafka Connect at http://127.0.0.1:9"), "{told}");
    let told =
        run(&world.dir, &["cdc", "apply", "--journal", "sqlite:x.db", "--set", "analytics.source=journal"])
            .code(2)
            .err;
    assert!(told.contains("PostgreSQL"), "{told}");
    let told = run(&world.dir, &["serve", "--journal", "sqlite:x.db"]).code(2).err;
    assert!(told.contains("analytics.source = debezium needs records in PostgreSQL"), "{told}");
    // A connector that Debezium refuses, under a name of its own: nothing is left of it.
    let other = ["--set", "cdc.connector=hapax-wrong", "--set", "cdc.slot=hapax_wrong"];
    let told = run(&world.dir, &[&["cdc", "apply", "--with", "poll.interval.ms=soon"][..], &other].concat())
        .code(4)
        .err;
    assert!(told.contains("poll.interval.ms"), "{told}");
    run(&world.dir, &[&["cdc", "status"][..], &other].concat()).code(1);
    // A role that cannot see the records would take an empty snapshot.
    let app = format!("cdc.database_url={}", world.url("hapax_test_cdc_app"));
    let told = run(&world.dir, &["cdc", "apply", "--set", &app]).code(1).err;
    assert!(told.contains("REPLICATION"), "{told}");
}

/// Debezium before 3.7 loses rows when it is restarted within a COPY: whoever asks is told, and what is wrong with the
/// database is told with its remedy.
#[test]
fn t52_the_doctor_warns_of_copy_and_tells_each_remedy() {
    let world = world();
    let told = run(&world.dir, &["doctor"]);
    assert!(told.out.contains("within a COPY") && told.out.contains("3.6.1"), "{}", told.out);
    for fine in ["wal_level is logical", "hapax_records has every module", "that of every module is FULL"] {
        assert!(told.out.contains(fine), "{}", told.out);
    }
    let mut admin = world.admin();
    for (breaks, mends, remedy) in [
        (
            "alter table module_orders.records replica identity default",
            "alter table module_orders.records replica identity full",
            "REPLICA IDENTITY FULL for orders",
        ),
        (
            "alter publication hapax_records add table hapax.keys",
            "alter publication hapax_records drop table hapax.keys",
            "DROP TABLE hapax.keys",
        ),
    ] {
        admin.run(breaks);
        let told = run(&world.dir, &["doctor"]);
        admin.run(mends);
        let told = told.code(1).out;
        assert!(told.contains(remedy), "{told}");
    }
}
