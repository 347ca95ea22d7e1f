//! `hapax produce` and `hapax consume` on a real Kafka, with a real Valkey in front of the ledger.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::consume::{Sample, count, effects};
use common::{Ran, run, run_with};

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

#[test]
fn wrong_configuration_of_kafka_is_a_sentence_and_an_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let bus = bus();
    let cases: [(&str, i32, &str); 4] = [
        (bus.as_str(), 2, "there is no topic no-such-topic"),
        ("kafka://127.0.0.1:1", 3, "did not answer"),
        ("kafka://", 2, "names no server"),
        ("kafka://127.0.0.1:1?enable.auto.commit=true", 2, "enable.auto.commit"),
    ];
    for (bus, code, told) in cases {
        let args = ["consume", "--bus", bus, "--topic", "no-such-topic", "--scope", "s", "--exec", "cat"];
        let ran = run(dir.path(), &args);
        println!("{bus}: {}", ran.err.lines().last().unwrap_or_default());
        let ran = ran.code(code);
        assert!(ran.err.contains(told), "{bus}: {}", ran.err);
    }
}
