//! `hapax erase` on PostgreSQL and ClickHouse, with a topic on Kafka, in the cache and in OpenSearch.

#![cfg(all(feature = "postgres", feature = "clickhouse", feature = "kafka"))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
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
    let stdout = erase(&[]).code(0).out;
    assert!(
        stdout.contains("still has it: run the same command again") && !stdout.contains("physically gone"),
        "{stdout}"
    );
    let audit = run(dir, &[&["audit", "ls", "--json"], &bus[..]].concat()).code(0).out;
    assert!(audit.contains("ends of erase-"), "{audit}");
    // One partition has let go, and then the other.
    let topic = topic.strip_prefix("relay.topic=").unwrap();
    for (partition, state) in [(0, "in-topic"), (1, "gone")] {
        remove_all(topic, partition);
        let report = erase(&["--json"]).code(0).json();
        assert_eq!(report["state"], state, "{report}");
    }
    assert!(erase(&[]).code(0).out.contains("physically gone"));
}

/// Where Debezium feeds the read model, the relay still publishes the same payloads to a topic of its own: it is gone when
/// both topics have let go, whichever is first.
#[test]
fn both_topics_on_kafka_are_waited_for_where_debezium_feeds_the_read_model() {
    for relay_first in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let dir: &Path = dir.path();
        let postgres = Postgres::new(dir);
        let kafka = format!("kafka://{}", std::env::var("HAPAX_TEST_KAFKA").unwrap());
        let id = run(dir, &["id", "make"]).code(0).out.trim().to_owned();
        let topics = [format!("erase-relay-{id}"), format!("erase-cdc-{id}")];
        let sets = [format!("relay.topic={}", topics[0]), format!("cdc.topic={}", topics[1])];
        let bus =
            ["--bus", &kafka, "--set", &sets[0], "--set", &sets[1], "--set", "analytics.source=debezium"];
        for topic in &topics {
            // As Debezium publishes it; the relay's events are like it.
            let change = format!("{{\"after\":{{\"payload\":\"{OF_ALICE}\"}}}}\n");
            let produce = ["produce", "--bus", &kafka, "--topic", topic, "--create", "1", "-"];
            run_with(dir, &produce, change.as_bytes()).code(0);
        }
        {
            let server = postgres.start_with(&[]);
            create(&server, &postgres.slug, ALICE, "one", OF_ALICE);
        }
        let erase = |more: &[&str]| {
            let command = ["erase", "--tenant", ALICE, "--yes"];
            run(dir, &[&command[..], &postgres.as_owner(), &bus, more].concat()).code(0)
        };
        let report = erase(&["--json"]).json();
        assert_eq!(report["state"], "in-topic", "{report}");
        for topic in &topics {
            assert!(report["out_of_reach"].to_string().contains(topic), "{report}");
        }
        let (first, second) = if relay_first { (0, 1) } else { (1, 0) };
        remove_all(&topics[first], 0);
        let said = erase(&[]).out;
        let still = format!("Topic {} still has it", topics[second]);
        assert!(said.contains(&still) && !said.contains("physically gone"), "{said}");
        remove_all(&topics[second], 0);
        assert_eq!(erase(&["--json"]).json()["state"], "gone");
    }
}

/// Has Kafka remove everything from a partition, as retention does: a request `DeleteRecords`, version 1.
fn remove_all(topic: &str, partition: i32) {
    let mut request = Vec::new();
    let text = |text: &str| [&u16::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat();
    request.extend([21_i16.to_be_bytes(), 1_i16.to_be_bytes()].concat()); // which request, and its version
    request.extend(7_i32.to_be_bytes()); // its number
    request.extend(text("test"));
    request.extend(1_i32.to_be_bytes()); // topics
    request.extend(text(topic));
    request.extend(1_i32.to_be_bytes()); // partitions
    request.extend(partition.to_be_bytes());
    request.extend((-1_i64).to_be_bytes()); // up to the end
    request.extend(30_000_i32.to_be_bytes()); // at most so many milliseconds
    let mut kafka = std::net::TcpStream::connect(std::env::var("HAPAX_TEST_KAFKA").unwrap()).unwrap();
    kafka.write_all(&i32::try_from(request.len()).unwrap().to_be_bytes()).unwrap();
    kafka.write_all(&request).unwrap();
    let mut size = [0; 4];
    kafka.read_exact(&mut size).unwrap();
    let mut answer = vec![0; usize::try_from(i32::from_be_bytes(size)).unwrap()];
    kafka.read_exact(&mut answer).unwrap();
    assert_eq!(answer[answer.len() - 2..], [0, 0], "an error of Kafka: {answer:?}");
}

/// What a projection has of a record is gone with it, and an event that is delivered again does not bring it back.
fn erased_from(to: &str, has: impl Fn(&str) -> bool) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]);
    create(&server, "orders", ALICE, "one", OF_ALICE);
    create(&server, "orders", BOB, "one", OF_BOB);
    run(dir, &["verify", "analytics", "--data", "d", "--wait", "60s"]).code(0);
    drop(server); // its pulses would keep the topic from ever being idle
    let project = |scope: &str| {
        let args =
            ["project", "run", "--data", "d", "--to", to, "--create", "--until-idle", "1", "--scope", scope];
        run(dir, &args).code(0)
    };
    project("first");
    assert!(has(OF_ALICE) && has(OF_BOB), "both are there");
    let of = format!("projection.url={to}");
    let erase = |more: &[&str]| {
        let args = ["erase", "--data", "d", "--tenant", ALICE, "--json", "--set", &of];
        run(dir, &[&args[..], more].concat()).code(0).json()
    };
    assert_eq!(place(&erase(&["--dry-run"]), "projection"), 1);
    // The relay publishes the deletion.
    let server = crate::common::serve::Server::start(dir, &["--data", "d"]);
    let report = erase(&["--yes", "--wait", "60s"]);
    assert_eq!((place(&report, "projection"), &report["state"]), (1, &json!("gone")), "{report}");
    drop(server);
    assert!(!has(OF_ALICE) && has(OF_BOB), "one is gone");
    project("second"); // everything that was published, from its beginning
    assert!(!has(OF_ALICE) && has(OF_BOB), "it stays gone");
    run(dir, &["project", "verify", "--data", "d", "--to", to]).code(0);
    let again = erase(&["--yes", "--wait", "60s"]);
    assert_eq!((place(&again, "projection"), &again["state"]), (0, &json!("gone")), "{again}");
}

/// Whether any value of a cache has these bytes: every key is read.
#[test]
#[cfg(feature = "redis")]
fn what_is_erased_is_gone_from_the_cache() {
    let url = std::env::var("HAPAX_TEST_VALKEY_URL").expect("HAPAX_TEST_VALKEY_URL is not set");
    let database = 13; // of this test's own
    let host = url.strip_prefix("redis://").unwrap().to_owned();
    let ask = |commands: &str| {
        let mut stream = std::net::TcpStream::connect(&host).unwrap();
        write!(stream, "SELECT {database}\r\n{commands}\r\nQUIT\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    };
    ask("FLUSHDB");
    erased_from(&format!("cache:{url}/{database}"), |bytes| {
        let keys = ask("KEYS *");
        let keys: Vec<&str> = keys.lines().filter(|line| line.starts_with("hapax:")).collect();
        assert!(!keys.is_empty(), "the cache is filled");
        keys.iter().any(|key| ask(&format!("GET {key}")).contains(bytes))
    });
    ask("FLUSHDB");
}

/// The index is searched, and every document is read, deleted ones too.
#[test]
#[cfg(feature = "opensearch")]
fn what_is_erased_is_gone_from_opensearch() {
    let engine = std::env::var("HAPAX_TEST_OPENSEARCH_URL").expect("scripts/services up opensearch");
    let alias = format!("t_{}", hapax::records::Uuid::now_v7().simple());
    let host = engine.strip_prefix("http://").unwrap();
    let ask = |method: &str, path: &str| {
        let answer = crate::common::serve::request(host, method, path, &[], b"");
        (answer.status, answer.body)
    };
    erased_from(&format!("opensearch:{engine}/{alias}"), |bytes| {
        assert_eq!(ask("POST", &format!("/{alias}/_refresh")).0, 200);
        let (status, all) = ask("GET", &format!("/{alias}-*/_search?size=100&version=true"));
        assert_eq!(status, 200, "{all}");
        all.contains(bytes)
    });
    let (_, indices) = ask("GET", &format!("/_alias/{alias}"));
    let indices: serde_json::Value = serde_json::from_str(&indices).unwrap();
    for index in indices.as_object().unwrap().keys() {
        assert_eq!(ask("DELETE", &format!("/{index}")).0, 200);
    }
}
