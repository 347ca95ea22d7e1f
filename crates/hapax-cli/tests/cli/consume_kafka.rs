//! `hapax produce` and `hapax consume` on a real Kafka, with a real Valkey in front of the ledger.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use std::io::Write as _;
use std::process::{Command, Stdio};

use crate::common::consume::{Sample, count, effects, wait_until};
use crate::common::{Ran, hapax, run, run_with};
use hapax::Topic;
use hapax::bus::Partition;

fn server(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| {
        panic!("{name} is not set: run `scripts/services up` and `eval \"$(scripts/services env)\"`")
    })
}

fn bus() -> String {
    format!("kafka://{}", server("HAPAX_TEST_KAFKA"))
}

#[test]
fn the_same_commands_on_kafka() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (bus, window) = (bus(), server("HAPAX_TEST_VALKEY_URL"));
    // A topic, a scope and a group of this run alone.
    let topic = run(dir, &["id", "make"]).code(0).out.trim().to_owned();
    let produce = |more: &[&str], lines: &str| {
        run_with(
            dir,
            &[&["produce", "--bus", &bus, "--topic", &topic, "--json"], more].concat(),
            lines.as_bytes(),
        )
    };
    let ran = produce(&[], "{}\n").code(2);
    assert!(ran.err.contains("there is no topic"), "{}", ran.err);
    let lines = (0..50)
        .fold(String::new(), |text, n| text + &format!("{{\"event_id\":\"e-{n}\",\"k\":{}}}\n", n % 5));
    let twice = format!("{lines}{lines}");
    let ran = produce(&["--create", "3", "--key", "/k"], &twice).code(0);
    assert_eq!(ran.json()["published"], 100);
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let consume = |more: &[&str]| -> Ran {
        let fixed =
            ["consume", "--bus", &bus, "--topic", &topic, "--scope", &topic, "--exec", &command, "--json"];
        run(dir, &[&fixed[..], &["--until-idle", "2", "--window", &window], more].concat())
    };
    let ran = consume(&[]).code(0);
    println!("{}", ran.out.trim());
    assert_eq!(count(&ran, "done"), 50, "{} {}", ran.out, ran.err);
    assert_eq!(count(&ran, "duplicate") + count(&ran, "window"), 50, "{}", ran.out);
    assert_eq!(effects(dir).len(), 50);
    // What was done a short while ago is stopped by the window, without the ledger.
    produce(&["--key", "/k"], &lines).code(0);
    let ran = consume(&[]).code(0);
    println!("{}", ran.out.trim());
    assert_eq!(count(&ran, "window"), 50, "{}", ran.out);
    assert_eq!(effects(dir).len(), 50);
    // Another group reads from the beginning; the ledger knows it all.
    let ran = consume(&["--group", &format!("{topic}-2")]).code(0);
    assert_eq!(
        ran.json()["deliveries"]
            .as_object()
            .unwrap()
            .values()
            .filter_map(serde_json::Value::as_u64)
            .sum::<u64>(),
        150
    );
    assert_eq!(effects(dir).len(), 50);
    let ran = run(dir, &["doctor", "--json", "--bus", &bus, "--topic", &topic, "--window", &window]).code(0);
    assert!(ran.out.contains("maxmemory"), "{}", ran.out);
}

/// How many records of a topic's three partitions lie below what a group of its name has committed; -1 if nobody says.
fn committed(bus: &str, topic: &str) -> i64 {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        // A busy broker may not answer at once: then it is asked again.
        let Ok(bus) = hapax::open::bus(bus).await else { return -1 };
        let mut sum = 0;
        for number in 0..3 {
            let partition = Partition { topic: Topic::new(topic).unwrap(), number };
            let Ok(offset) = bus.committed(topic, &partition).await else { return -1 };
            sum += offset.unwrap_or(0);
        }
        sum
    })
}

/// A publisher that is killed and begins anew, and one that lost half of its checkpoint: both say again what was said, under the
/// ids it had. Three consumer processes on Kafka and PostgreSQL; the effects are lines of a file that the ledger knows nothing of.
#[test]
fn acceptance_1_what_produce_publishes_again_takes_effect_once() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (bus, ledger) = (bus(), server("HAPAX_TEST_POSTGRES_URL"));
    let topic = run(dir, &["id", "make"]).code(0).out.trim().to_owned();
    let schema = format!("ledger.schema=t_{}", topic.replace('-', ""));
    let lines: Vec<_> = (0..300).map(|n| format!("{{\"event_id\":\"e-{n}\",\"k\":{}}}\n", n % 30)).collect();
    let fixed = ["produce", "--bus", &bus, "--topic", &topic, "--json", "--key", "/k", "--create", "3"];
    run_with(dir, &fixed, b"").code(0);

    // It is killed while it waits for more, and has not noted how far it came.
    let mut killed = hapax(dir, &fixed).stdin(Stdio::piped()).spawn().unwrap();
    let mut pipe = killed.stdin.take().unwrap();
    pipe.write_all(lines[..200].concat().as_bytes()).unwrap();
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let consumers: Vec<_> = (0..3)
        .map(|_| {
            let args = ["consume", "--bus", &bus, "--topic", &topic, "--scope", &topic, "--exec", &command];
            let more = ["--ledger", &ledger, "--set", &schema, "--workers", "1", "--json"];
            hapax(dir, &[&args[..], &more].concat()).spawn().unwrap()
        })
        .collect();
    wait_until("all that it said took effect", || effects(dir).len() == 200);
    killed.kill().unwrap();
    killed.wait().unwrap();
    drop(pipe);
    let ran = run_with(dir, &fixed, lines.concat().as_bytes()).code(0);
    assert_eq!((&ran.json()["published"], &ran.json()["ids_made"]), (&300.into(), &0.into()));
    run_with(dir, &fixed, lines[150..].concat().as_bytes()).code(0);

    wait_until("all of it took effect", || effects(dir).len() == 300);
    wait_until("the offsets of all 650 are committed", || committed(&bus, &topic) == 650);
    for consumer in &consumers {
        let pid = consumer.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
    }
    let ran: Vec<Ran> =
        consumers.into_iter().map(|child| Ran::from(child.wait_with_output().unwrap()).code(143)).collect();
    let sum = |word| ran.iter().map(|ran| count(ran, word)).sum::<u64>();
    let (done, duplicates) = (sum("done"), sum("duplicate"));
    let mut ids = effects(dir);
    ids.sort();
    ids.dedup();
    println!(
        "650 published: {done} done, {duplicates} duplicates; {} effects of {} ids",
        effects(dir).len(),
        ids.len()
    );
    assert_eq!((effects(dir).len(), ids.len(), done), (300, 300, 300));
    assert!(duplicates >= 350, "each of the others was delivered, and did not run");
}

#[test]
fn wrong_configuration_of_kafka_is_a_sentence_and_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let bus = bus();
    let cases: [(&str, i32, &str); 4] = [
        (bus.as_str(), 2, "there is no topic no-such-topic"),
        ("kafka://127.0.0.1:1", 3, "did not answer"),
        ("kafka://", 2, "lacks a server"),
        ("kafka://127.0.0.1:1?enable.auto.commit=true", 2, "enable.auto.commit"),
    ];
    for (bus, code, expected) in cases {
        let args = ["consume", "--bus", bus, "--topic", "no-such-topic", "--scope", "s", "--exec", "cat"];
        let ran = run(dir.path(), &args);
        println!("{bus}: {}", ran.err.lines().last().unwrap_or_default());
        let ran = ran.code(code);
        assert!(ran.err.contains(expected), "{bus}: {}", ran.err);
    }
}
