//! `hapax erase` while a read model in ClickHouse is built again.

#![cfg(feature = "clickhouse")]
#![allow(missing_docs, clippy::unwrap_used)]

use hapax::analytics::{Block, Change, ReadModel as _, Second, Uuid};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::bus::Partition;
use hapax::event::Origin;
use hapax::records::{ModuleSlug, OfTenant, Payload, Record};
use hapax::{Time, Topic};

use crate::common::run;
use crate::common::serve::Server;
use crate::erase::{ALICE, BOB, OF_ALICE, OF_BOB, create};
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
