//! `hapax erase` on PostgreSQL and ClickHouse, and with a topic on Kafka.

#![cfg(all(feature = "postgres", feature = "clickhouse", feature = "kafka"))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use serde_json::json;

use crate::common::roles::{Connection, Postgres};
use crate::common::{run, run_with};
use crate::erase::{ALICE, BOB, OF_ALICE, OF_BOB, create, place, send};
use crate::query_clickhouse::Database;

/// How many rows of a read model have this in their payload, replaced versions too.
fn versions(database: &Database, secret: &str) -> u64 {
    database.ask(&format!(
        "SELECT count() FROM {}.data_records WHERE position(payload, '{secret}') > 0",
        database.name
    ))
}

/// How many rows of the schema's tables have this.
fn rows(place: &Postgres, secret: &str) -> usize {
    let server = place.admin_url.rsplit_once('/').unwrap().0;
    let mut owner = Connection::to(&format!("{server}/hapax_test_records"));
    let like = format!("%{secret}%");
    let of =
        |table: &str, text: &str| format!("select from {}.{table} where {text} like '{like}'", place.schema);
    owner.rows(&of("journal", "convert_from(payload, 'UTF8')"))
        + owner.rows(&of("keys", "convert_from(body, 'UTF8')"))
        + owner.rows(&format!("select from module_{}.records where payload::text like '{like}'", place.slug))
}

fn set(of: &str) -> [String; 2] {
    ["--set".to_owned(), of.to_owned()]
}

fn texts(args: &[String]) -> Vec<&str> {
    args.iter().map(String::as_str).collect()
}

/// Records in PostgreSQL, a read model in ClickHouse: by the owner, since an app may not change events. A version that
/// a feed inserts again is hidden by the deletion, and goes with the next run.
#[test]
fn t337_an_old_version_that_is_inserted_again_stays_hidden_and_goes_for_good() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (postgres, database) = (Postgres::new(dir), Database::new(dir));
    let model = set(&database.set());
    let server = postgres.start_with(
        &[&texts(&model)[..], &["--set", &format!("keys.maintenance_url={}", postgres.keeper_url)]].concat(),
    );
    // No merge removes what the command is to remove.
    let no_merge = "MODIFY SETTING max_bytes_to_merge_at_max_space_in_pool = 1";
    database.run(&format!("ALTER TABLE {}.data_records {no_merge}", database.name));
    let id = create(&server, &postgres.slug, ALICE, "one", OF_ALICE);
    let update = json!({"payload": {"mail": OF_ALICE, "n": 2}, "expected_seq": 1});
    let path = format!("/v1/modules/{}/records/{id}", postgres.slug);
    assert_eq!(send(&server, "PUT", &path, ALICE, "two", &update).status, 200);
    create(&server, &postgres.slug, BOB, "one", OF_BOB);
    let as_owner = |command: &[&str], more: &[&str]| {
        run(dir, &[command, &postgres.as_owner()[..], &texts(&model), more].concat())
    };
    let append = |what: &str| {
        let of = ["journal", "append", "--tenant", ALICE, "--aggregate", "mails", "--json", "-"];
        let event = format!("{{\"event_id\":\"mail\",\"do\":\"{what}\"}}\n");
        run_with(dir, &[&of[..], &postgres.as_owner()].concat(), event.as_bytes()).code(0).out
    };
    assert!(append(OF_ALICE).contains("\"new\""));
    as_owner(&["verify", "analytics", "--wait", "60s"], &[]).code(0);
    assert!(rows(&postgres, OF_ALICE) >= 5 && versions(&database, OF_ALICE) >= 1);
    // The app may not, and is told who may.
    let as_app = [
        &["erase", "--tenant", ALICE, "--yes"],
        &postgres.as_app()[..],
        &texts(&model),
        &["--set", "journal.migrate=check"],
    ]
    .concat();
    let refused = run(dir, &as_app);
    assert!(
        refused.code.is_some_and(|code| code > 1) && refused.err.contains("privilege"),
        "{}",
        refused.err
    );
    let erase = |more: &[&str]| as_owner(&["erase", "--tenant", ALICE, "--wait", "60s", "--json"], more);
    let counted = erase(&["--dry-run"]).code(0).json();
    // The app has deleted the record before it was refused.
    assert!(place(&counted, "journal events") == 3 && place(&counted, "answers of keys") == 2, "{counted}");
    let report = erase(&["--yes"]).code(0).json();
    assert_eq!(report["state"], "gone", "{report}");
    assert!(append("other").contains("\"repeat\""), "an erased id is a repeat");
    assert_eq!((rows(&postgres, OF_ALICE), versions(&database, OF_ALICE)), (0, 0));
    assert!(rows(&postgres, OF_BOB) >= 3 && versions(&database, OF_BOB) == 1);
    let kept = send(
        &server,
        "POST",
        &format!("/v1/modules/{}/records", postgres.slug),
        ALICE,
        "one",
        &json!({"payload": {"mail": OF_ALICE, "n": 1}}),
    );
    kept.problem(410, "answer-erased");

    // As a feed would that had read it before.
    database.run(&format!(
        "INSERT INTO {}.data_records (tenant_id, module, record_id, payload, _version, _deleted) VALUES
         ('{ALICE}', '{}', '{id}', '{{\"mail\":\"{OF_ALICE}\"}}', {}, 0)",
        database.name,
        postgres.slug,
        (1_u64 << 48) + 2
    ));
    let query = ["query", "records", "--module", &postgres.slug, "--tenant", ALICE, "--count", "--json"];
    let asked = as_owner(&query, &[]).code(0).out;
    assert!(!asked.contains("\"count\":1"), "{asked}");
    assert_eq!(versions(&database, OF_ALICE), 1);
    let report = erase(&["--yes"]).code(0).json();
    assert_eq!((place(&report, "read model"), &report["state"]), (1, &json!("gone")), "{report}");
    assert_eq!(versions(&database, OF_ALICE), 0);
    as_owner(&["verify", "analytics", "--wait", "60s"], &[]).code(0);
}

/// What a topic on Kafka has stays there for its retention: until then it is not called gone.
#[test]
fn a_topic_on_kafka_is_waited_for() {
    let dir = tempfile::tempdir().unwrap();
    let dir: &Path = dir.path();
    let kafka = format!("kafka://{}", std::env::var("HAPAX_TEST_KAFKA").unwrap());
    let topic = format!("relay.topic=erase-{}", run(dir, &["id", "make"]).code(0).out.trim());
    let bus = ["--data", "d", "--bus", &kafka, "--set", &topic, "--set", "analytics.url=sqlite:d/reads.db"];
    run(dir, &[&["modules", "create", "orders"], &bus[..]].concat()).code(0);
    run(dir, &[&["relay", "run", "--create", "2", "--once"], &bus[..]].concat()).code(0);
    let server = crate::common::serve::Server::start(dir, &bus);
    create(&server, "orders", ALICE, "one", OF_ALICE);
    run(dir, &[&["verify", "analytics", "--wait", "60s"], &bus[..]].concat()).code(0);
    let erase = |more: &[&str]| {
        run(dir, &[&["erase", "--tenant", ALICE, "--yes", "--wait", "60s"], &bus[..], more].concat())
    };
    let report = erase(&["--json"]).code(0).json();
    assert_eq!(report["state"], "in-topic", "{report}");
    assert!(report["out_of_reach"].to_string().contains("on Kafka"), "{report}");
    let told = erase(&[]).code(0).out;
    assert!(
        told.contains("still has it: run the same command again") && !told.contains("physically gone"),
        "{told}"
    );
    let audit = run(dir, &[&["audit", "ls", "--json"], &bus[..]].concat()).code(0).out;
    assert!(audit.contains("ends of erase-"), "{audit}");
}
