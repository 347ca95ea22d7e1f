//! `hapax cdc` and what `hapax doctor` says, as an operator types it.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::run;
use crate::{SLOT, create, visible, world};

#[test]
fn the_configuration_is_printed_without_passwords() {
    let world = world();
    let set = |password: &str| {
        let stdout =
            run(&world.dir, &["cdc", "config", "--set", &format!("cdc.password={password}")]).code(0).out;
        let whole: Value = serde_json::from_str(&stdout).unwrap();
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
    run(&world.dir, &["cdc", "remove", "--by", "ada", "--reason", "ticket 7"]).code(0);
    let audit = run(&world.dir, &["--json", "audit", "ls", "--action", "cdc."]).code(0).json();
    let [removed, applied] = [&audit["audit"][0], &audit["audit"][1]];
    assert_eq!(
        (&removed["action"], &applied["action"]),
        (&"cdc.remove".into(), &"cdc.apply".into()),
        "{audit}"
    );
    assert_eq!((&removed["who"], &removed["reason"]), (&"ada".into(), &"ticket 7".into()), "{audit}");
    assert_eq!(
        (&removed["target"], &applied["target"]),
        (&"hapax-test".into(), &"hapax-test".into()),
        "{audit}"
    );
    // Connect still lists a connector for a moment after it was deleted.
    let patience = Instant::now() + Duration::from_secs(120);
    loop {
        let stdout = run(&world.dir, &["cdc", "status"]).code(1).out;
        if stdout.contains("missing") && stdout.contains("hapax cdc apply") {
            break;
        }
        assert!(Instant::now() < patience, "{stdout}");
        // Connect has no way to wait for the end of a deletion, so it is asked again.
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
    let stderr = run(&world.dir, &["cdc", "status", "--connect", "http://127.0.0.1:9"]).code(3).err;
    assert!(stderr.contains("Kafka Connect at http://127.0.0.1:9"), "{stderr}");
    let stderr =
        run(&world.dir, &["cdc", "apply", "--journal", "sqlite:x.db", "--set", "analytics.source=journal"])
            .code(2)
            .err;
    assert!(stderr.contains("PostgreSQL"), "{stderr}");
    let stderr = run(&world.dir, &["serve", "--journal", "sqlite:x.db"]).code(2).err;
    assert!(stderr.contains("analytics.source = debezium needs records in PostgreSQL"), "{stderr}");
    // A connector that Debezium refuses, under a name of its own: nothing is left of it.
    let other = ["--set", "cdc.connector=hapax-wrong", "--set", "cdc.slot=hapax_wrong"];
    let stderr =
        run(&world.dir, &[&["cdc", "apply", "--with", "poll.interval.ms=soon"][..], &other].concat())
            .code(4)
            .err;
    assert!(stderr.contains("poll.interval.ms"), "{stderr}");
    run(&world.dir, &[&["cdc", "status"][..], &other].concat()).code(1);
    // A role that cannot see the records would take an empty snapshot.
    let app = format!("cdc.database_url={}", world.url("hapax_test_cdc_app"));
    let stderr = run(&world.dir, &["cdc", "apply", "--set", &app]).code(1).err;
    assert!(stderr.contains("REPLICATION"), "{stderr}");
}

/// Debezium before 3.7 loses rows when it is restarted within a COPY: whoever asks gets a warning, and what is wrong with the
/// database is reported with its remedy.
#[test]
fn t52_the_doctor_warns_of_copy_and_tells_each_remedy() {
    let world = world();
    let ran = run(&world.dir, &["doctor"]);
    assert!(ran.out.contains("within a COPY") && ran.out.contains("3.6.1"), "{}", ran.out);
    for fine in ["wal_level is logical", "hapax_records has every module", "that of every module is FULL"] {
        assert!(ran.out.contains(fine), "{}", ran.out);
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
        let ran = run(&world.dir, &["doctor"]);
        admin.run(mends);
        let stdout = ran.code(1).out;
        assert!(stdout.contains(remedy), "{stdout}");
    }
}
