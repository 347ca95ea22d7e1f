//! `hapax erase` and topics on Kafka, which have what was erased until their retention has passed.

#![cfg(all(feature = "postgres", feature = "clickhouse", feature = "kafka"))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::io::{Read as _, Write as _};
use std::path::Path;

use crate::common::roles::Postgres;
use crate::common::{run, run_with};
use crate::erase::{ALICE, OF_ALICE, create};

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
    let topic = topic.strip_prefix("relay.topic=").unwrap();
    let ends = noted_ends(dir, &bus, topic);
    // One partition has let go, and then the other.
    for (partition, state) in [(0, "in-topic"), (1, "gone")] {
        remove_below(topic, partition, ends[partition as usize]);
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

/// The ends of a topic's partitions that the first erasure noted. The next one waits until the read model has read that far: what is
/// removed below them is missing to nobody.
fn noted_ends(dir: &Path, args: &[&str], topic: &str) -> Vec<i64> {
    let audit = run(dir, &[&["audit", "ls", "--json"], args].concat()).code(0).out;
    let of_topic = format!("ends of {topic} ");
    let (_, first) = audit.rsplit_once(&of_topic).unwrap_or_else(|| panic!("no {of_topic:?} in {audit}"));
    let ends = first.split(|c: char| !c.is_ascii_digit() && c != ',').next().unwrap();
    ends.split(',').map(|end| end.parse().unwrap()).collect()
}

/// Has Kafka remove everything from a partition, as retention does.
fn remove_all(topic: &str, partition: i32) {
    remove_below(topic, partition, -1);
}

/// Has Kafka remove what is below an offset: a request `DeleteRecords`, version 1.
fn remove_below(topic: &str, partition: i32, offset: i64) {
    let mut request = Vec::new();
    let text = |text: &str| [&u16::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat();
    request.extend([21_i16.to_be_bytes(), 1_i16.to_be_bytes()].concat()); // which request, and its version
    request.extend(7_i32.to_be_bytes()); // its number
    request.extend(text("test"));
    request.extend(1_i32.to_be_bytes()); // topics
    request.extend(text(topic));
    request.extend(1_i32.to_be_bytes()); // partitions
    request.extend(partition.to_be_bytes());
    request.extend(offset.to_be_bytes()); // -1: up to the end
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

/// The relay was told another topic, and the read model was made anew, as it is for a new generation. The earlier topic
/// has everything still.
#[test]
fn t465_the_topics_of_before_are_waited_for_too() {
    let dir = tempfile::tempdir().unwrap();
    let dir: &Path = dir.path();
    let kafka = format!("kafka://{}", std::env::var("HAPAX_TEST_KAFKA").unwrap());
    let of_this_run = run(dir, &["id", "make"]).code(0).out.trim().to_owned();
    let topics = ["before", "now"].map(|name| format!("erase-{name}-{of_this_run}"));
    let [before, now] = topics.each_ref().map(String::as_str);
    let configure = |topic: &str, model: &str| {
        let text = format!(
            "[data]\ndir = 'd'\n[bus]\nurl = '{kafka}'\n[relay]\ntopic = '{topic}'\n[analytics]\nurl = 'sqlite:d/{model}.db'\n"
        );
        std::fs::write(dir.join("hapax.toml"), text).unwrap();
    };
    for topic in [before, now] {
        configure(topic, topic);
        run(dir, &["modules", "create", "orders"]).code(0);
        run(dir, &["produce", "--topic", topic, "--create", "1"]).code(0);
        let server = crate::common::serve::Server::start(dir, &[]);
        create(&server, "orders", ALICE, topic, OF_ALICE);
        run(dir, &["verify", "analytics", "--wait", "60s"]).code(0);
    }
    // A model that was fed from a topic knows it.
    configure(now, before);
    let said = run(dir, &["erase", "--tenant", ALICE, "--dry-run"]).code(0).out;
    assert!([before, now].iter().all(|topic| said.contains(&format!("topic {topic} on Kafka"))), "{said}");

    configure(now, now);
    let server = crate::common::serve::Server::start(dir, &[]);
    let erase = |more: &[&str]| {
        let command = ["erase", "--tenant", ALICE, "--yes", "--wait", "60s", "--json"];
        run(dir, &[&command[..], more].concat())
    };
    let state = |more: &[&str]| {
        let report = erase(more).code(0).json();
        println!("{report}");
        report["state"].as_str().unwrap().to_owned()
    };
    for _ in 0..2 {
        assert_eq!(state(&["--topic", before]), "in-topic");
    }
    remove_below(now, 0, noted_ends(dir, &[], now)[0]);
    assert_eq!(state(&["--topic", before]), "in-topic", "the one of before has it");
    remove_below(before, 0, noted_ends(dir, &[], before)[0]);
    assert_eq!(state(&["--topic", before]), "gone");
    let stderr = erase(&["--topic", "erase-nowhere"]).code(4).err;
    assert!(stderr.contains("there is no such topic"), "{stderr}");
    let stderr = erase(&["--topic", before, "--set", "bus.url=embedded"]).code(4).err;
    assert!(stderr.contains("the bus is not Kafka"), "{stderr}");
    drop(server);
    // Nobody knows which there were before.
    let said = run(dir, &["erase", "--tenant", ALICE, "--dry-run", "--set", "analytics.generation=2"]);
    let said = said.code(0).out;
    assert!(said.contains("generations before 2"), "{said}");
}
