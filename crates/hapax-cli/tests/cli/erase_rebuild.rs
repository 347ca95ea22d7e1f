//! `hapax erase` while a read model in ClickHouse, or a search index, is built again.

#![cfg(all(feature = "clickhouse", feature = "opensearch"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use hapax::analytics::{Block, Change, ReadModel as _, Second, Uuid};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::bus::Partition;
use hapax::event::Origin;
use hapax::records::{ModuleSlug, OfTenant, Payload, Record};
use hapax::{Time, Topic};

use crate::common::serve::{Server, request};
use crate::common::{hapax, run};
use crate::erase::{ALICE, BOB, OF_ALICE, OF_BOB, create, place};
use crate::query_clickhouse::Database;

/// A rebuild has read a record and not inserted it yet, when the record is erased everywhere. It inserts it then.
#[test]
fn t434_nothing_is_called_gone_while_a_rebuild_may_insert_it() {
    let dir = tempfile::tempdir().unwrap();
    let (dir, database) = (dir.path(), Database::new(dir.path()));
    let set = database.set();
    let hapax = |args: &[&str]| run(dir, &[args, &["--data", "d", "--set", &set]].concat());
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d", "--set", &set]);
    let id = create(&server, "orders", ALICE, "one", OF_ALICE);
    create(&server, "orders", BOB, "one", OF_BOB);
    hapax(&["verify", "analytics", "--wait", "60s"]).code(0);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let model = ClickHouseReadModel::open_existing(set.strip_prefix("analytics.url=").unwrap()).unwrap();
    let Second::Filling(second) = runtime.block_on(model.second(1, false)).unwrap() else {
        panic!("there is no second model yet")
    };
    let (topic, at) = (Topic::new("events").unwrap(), Time::from_millis(1));
    let payload = Payload::new(format!(r#"{{"mail":"{OF_ALICE}","n":1}}"#)).unwrap();
    let record =
        Record::new(ModuleSlug::new("orders").unwrap(), Uuid::try_parse(&id).unwrap(), 1, payload, (at, at));
    let of = OfTenant { tenant: Uuid::try_parse(ALICE).unwrap(), record };
    let mut block = Block::aside(Partition { topic: topic.clone(), number: 0 }, 1);
    block.changes = vec![Change::of_record(of, 1, Origin::new(topic, 0, 0)).unwrap()];

    let erase = |wait: &str, more: &[&str]| {
        hapax(&[&["erase", "--tenant", ALICE, "--yes", "--wait", wait], more].concat()).code(0)
    };
    let report = erase("1s", &["--json"]).json();
    assert_eq!(report["state"], "on-its-way", "{report}");
    let has = |table: &str| {
        let of = format!("position(payload, '{OF_ALICE}') > 0");
        database.ask(&format!("SELECT count() FROM merge('{}', '^{table}') WHERE {of}", database.name))
    };
    assert_eq!(has("data_records($|_next_)"), 0);
    runtime.block_on(second.model().apply(&[block])).unwrap();
    assert_eq!(has("data_records_next_"), 1);
    let said = erase("1s", &[]).out;
    assert!(said.contains("data_records_next_") && !said.contains("physically gone"), "{said}");
    assert_eq!(has("data_records($|_next_)"), 0, "it is erased all the same");
    let doctor = hapax(&["doctor"]).out;
    assert!(doctor.contains(&format!("not gone yet: tenant {ALICE}")), "{doctor}");

    // Another rebuild takes the second table over, and ends.
    drop(second);
    hapax(&["analytics", "rebuild"]).code(0);
    let report = erase("60s", &["--json"]).json();
    assert_eq!(report["state"], "gone", "{report}");
    let doctor = hapax(&["doctor"]).out;
    assert!(!doctor.contains("not gone yet"), "{doctor}");
    hapax(&["verify", "analytics", "--wait", "60s"]).code(0);
}

/// A rebuild of a search index was killed, before it took the writes or after that. What it has filled is nowhere
/// called gone, and readers are not served what was erased.
#[test]
fn t460_nothing_is_called_gone_while_an_index_of_a_rebuild_is_left() {
    let engine = std::env::var("HAPAX_TEST_OPENSEARCH_URL").expect("scripts/services up opensearch");
    let host = engine.strip_prefix("http://").unwrap();
    let ask = |method: &str, path: &str| {
        let answer = request(host, method, path, &[], b"");
        assert_eq!(answer.status, 200, "{path}: {answer:?}");
        answer.body
    };
    for (point, is_cut_off) in [("projection.before-take", false), ("projection.after-take", true)] {
        let alias = format!("t_{}", Uuid::now_v7().simple());
        let (to, all) = (format!("opensearch:{engine}/{alias}"), format!("{alias}-*"));
        let has = |of: &str| {
            ask("POST", &format!("/{of}/_refresh"));
            ask("GET", &format!("/{of}/_search?size=100")).contains(OF_ALICE)
        };
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
        let server = Server::start(dir, &["--data", "d"]);
        create(&server, "orders", ALICE, "one", OF_ALICE);
        create(&server, "orders", BOB, "one", OF_BOB);
        run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
        drop(server); // its pulses would keep the topic from ever being idle
        let project = |command: &str, more: &[&str]| {
            run(dir, &[&["project", command, "--data", "d", "--to", &to], more].concat())
        };
        project("run", &["--create", "--until-idle", "1"]).code(0);
        let mut rebuild = hapax(dir, &["project", "rebuild", "--data", "d", "--to", &to]);
        rebuild.env(hapax::testing::crash::VARIABLE, format!("{point}:1"));
        assert!(!rebuild.status().unwrap().success(), "killed at {point}");

        let server = Server::start(dir, &["--data", "d"]); // it publishes the deletion
        let set = format!("projection.url={to}");
        let erase = |wait: &str, more: &[&str]| {
            let args = ["erase", "--data", "d", "--tenant", ALICE, "--yes", "--wait", wait, "--set", &set];
            run(dir, &[&args[..], more].concat()).code(0)
        };
        let report = erase("1s", &["--json"]).json();
        assert_eq!((&report["state"], place(&report, "projection")), (&"on-its-way".into(), 1), "{report}");
        assert!(!has(&alias), "{point}: readers are served what was erased");
        assert_eq!(has(&all), !is_cut_off, "{point}: what was not switched to keeps it");
        let said = erase("1s", &[]).out;
        assert!(said.contains(&format!("{alias}-")) && !said.contains("physically gone"), "{said}");
        let doctor = run(dir, &["doctor", "--data", "d", "--set", &set]).out;
        let status = project("status", &[]).code(i32::from(is_cut_off)).out;
        for said in [doctor, status] {
            let line = said.lines().find(|line| line.contains("project rebuild")).expect("a line about it");
            assert!(line.contains(&format!("{alias}-")), "{line}");
        }

        project("rebuild", &[]).code(0);
        let report = erase("60s", &["--json"]).json();
        assert_eq!(report["state"], "gone", "{report}");
        assert!(!has(&all), "{point}");
        drop(server);
        project("verify", &[]).code(0);
        let indices = ask("GET", &format!("/{alias}/_alias"));
        let indices: serde_json::Value = serde_json::from_str(&indices).unwrap();
        indices.as_object().unwrap().keys().for_each(|index| drop(ask("DELETE", &format!("/{index}"))));
    }
}
