//! `hapax explain`: what happened to an event, a keyed write or an aggregate, from what the stores recorded.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};

use crate::common::consume::{Sample, consume, consume_args, count, effects, produce, wait_until};
use crate::common::serve::{Server, request};
use crate::common::{Ran, hapax, run, run_with};

/// Fails for good, or asks for another attempt, while there is no file `fixed`.
const UNTIL_FIXED: &str = "if do == 'break' and not os.path.exists('fixed'): raise Fatal('no such order')
if do == 'retry' and not os.path.exists('fixed'): raise Retry('the bank is away')
if do == 'echo': raise Fatal(request['id'])
effect(request['id'])";

const STRICT: [&str; 6] = ["--order", "strict", "--on-dead", "park", "--first-seq", "1"];

fn line(id: &str, seq: u32, what: &str) -> String {
    json!({"event_id": id, "aggregate_id": "order-1", "seq": seq, "do": what, "secret": "s3cret"}).to_string()
        + "\n"
}

fn explain(dir: &Path, args: &[&str]) -> Ran {
    run(dir, &[&["explain"], args].concat())
}

/// Where each step happened, in order.
fn places(life: &Value) -> Vec<&str> {
    life["steps"].as_array().unwrap().iter().map(|step| step["layer"].as_str().unwrap()).collect()
}

/// What happened, in order.
fn whats(life: &Value) -> Vec<&str> {
    life["steps"].as_array().unwrap().iter().map(|step| step["what"].as_str().unwrap()).collect()
}

/// The step that begins so.
#[track_caller]
fn step<'l>(life: &'l Value, what: &str) -> &'l Value {
    let steps = life["steps"].as_array().unwrap();
    let found = steps.iter().find(|step| step["what"].as_str().unwrap().starts_with(what));
    found.unwrap_or_else(|| panic!("no {what:?}: {life:#}"))
}

fn relay(dir: &Path) -> Ran {
    let lease = ["--set", "relay.lease_ms=600000"];
    run(dir, &[&["relay", "run", "--topic", "orders", "--create", "1", "--once"], &lease[..]].concat())
}

/// A time with milliseconds, in UTC.
fn is_stamp(text: &Value) -> bool {
    let text = text.as_str().unwrap_or_default();
    text.len() == "2026-01-01T00:00:00.000Z".len() && text.ends_with('Z') && text.as_bytes()[19] == b'.'
}

#[test]
fn an_event_is_followed_from_the_journal_to_its_effect() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let append = ["journal", "append", "--aggregate", "order-1", "--kind", "order.paid"];
    run_with(dir, &append, line("e-1", 1, "").as_bytes()).code(0);
    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert_eq!(places(&life), ["journal", "relay"], "{life:#}");
    assert!(whats(&life)[1].starts_with("not published: no relay"), "{life:#}");
    assert!(life["stores"][0]["message"].as_str().unwrap().starts_with("not found at"), "{life:#}");
    relay(dir).code(0);
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    consume(dir, &command, &STRICT).code(0);

    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert_eq!(places(&life), ["journal", "relay", "ledger", "ledger"], "{life:#}");
    let appended = step(&life, "appended as seq 1, at position ");
    assert!(is_stamp(&appended["at"]), "{appended}");
    let facts = &appended["facts"];
    assert_eq!((&facts["aggregate"], &facts["kind"]), (&json!("order-1"), &json!("order.paid")), "{facts}");
    assert!(facts["payload_bytes"].as_u64().unwrap() > 20, "{facts}");
    assert_eq!(facts["fingerprint"].as_str().unwrap().len(), 32, "{facts}");
    assert!(is_stamp(&step(&life, "published: the relay is at position ")["facts"]["checkpoint_saved_at"]));
    let first = step(&life, "first seen");
    assert_eq!((&first["name"], &first["facts"]["topic"]), (&json!("mailer"), &json!("orders")), "{first}");
    let done = step(&life, "done");
    assert_eq!((&done["facts"]["attempts"], &done["name"]), (&json!(1), &json!("mailer")), "{done}");
    assert!(is_stamp(&done["at"]) && done["at"].as_str() >= first["at"].as_str(), "{life:#}");
    assert!(done["facts"]["token"].is_i64(), "{done}");

    // The same for people: no payload, and what is not recorded is said.
    for format in [&[][..], &["--md"]] {
        let stdout = explain(dir, &[&["e-1"], format].concat()).code(0).out;
        for part in [
            "appended as seq 1",
            "published",
            "first seen",
            "done",
            "skipped more than",
            "when the relay published",
        ] {
            assert!(stdout.contains(part), "{part}: {stdout}");
        }
        assert!(!stdout.contains("s3cret"), "{stdout}");
    }
}

#[test]
fn an_event_that_failed_died_and_was_redriven_is_reported_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &format!("{}\n", json!({"event_id": "e-1", "do": "retry", "secret": "s3cret"})));
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    let twice = ["--set", "retry.attempts_max=2"];
    assert_eq!(count(&consume(dir, &command, &twice).code(0), "dead"), 1);

    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert_eq!(whats(&life), ["first seen", "dead after 2 attempts", "its bytes are held"], "{life:#}");
    let dead = step(&life, "dead");
    assert!(dead["facts"]["reason"].as_str().unwrap().contains("the bank is away"), "{dead}");
    assert!(step(&life, "its bytes")["facts"]["payload_bytes"].as_u64().unwrap() > 0);
    assert!(
        life["not_recorded"].as_str().unwrap().contains("runs of a scope before its last one"),
        "{life:#}"
    );

    std::fs::write(dir.join("fixed"), "").unwrap();
    let redrive = ["dead", "redrive", "--scope", "mailer", "--reason", "fixed in 1.4.2", "--yes", "e-1"];
    run(dir, &redrive).code(0);
    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert!(whats(&life)[1].starts_with("redriven") && whats(&life)[2].starts_with("waits for"), "{life:#}");
    consume(dir, &command, &twice).code(0);
    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert_eq!(whats(&life).len(), 3, "{life:#}");
    let redriven = &life["steps"][1]["facts"];
    assert_eq!(
        (&redriven["by"], &redriven["reason"]),
        (&json!("tester"), &json!("fixed in 1.4.2")),
        "{life:#}"
    );
    assert_eq!(whats(&life)[2], "done");

    // An entry that was removed leaves its audit rows.
    let forget = ["ledger", "forget", "--scope", "mailer", "--reason", "replay", "--yes", "e-1"];
    run(dir, &forget).code(0);
    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    assert!(whats(&life)[1].starts_with("forgotten") && life["steps"][1]["name"] == "mailer", "{life:#}");
}

#[test]
fn a_parked_aggregate_says_what_waits_behind_what() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &[&line("a1", 1, "break")[..], &line("a2", 2, ""), &line("a3", 3, "")].concat());
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    consume(dir, &command, &STRICT).code(0);

    let life = explain(dir, &["--aggregate", "order-1", "--json"]).code(0).json();
    let queue = &life["scopes"][0];
    assert_eq!(
        (&queue["scope"], &queue["head"], &queue["head_state"]),
        (&json!("mailer"), &json!(1), &json!("dead"))
    );
    assert_eq!(queue["waiting"], json!([2, 3]));
    let what = "nothing is done yet; seq 2, 3 wait behind seq 1, which is dead";
    assert_eq!(queue["what"], what);
    assert_eq!(step(&life, "dead")["event"], "a1");
    assert_eq!(
        life["steps"].as_array().unwrap().iter().filter(|step| step["what"] == "first seen").count(),
        3
    );
    for format in [&[][..], &["--md"]] {
        let stdout = explain(dir, &[&["--aggregate", "order-1"], format].concat()).code(0).out;
        assert!(stdout.contains("event a1") && stdout.contains("event a3"), "{stdout}");
        assert!(
            stdout.contains(what) && stdout.contains("no such order") && !stdout.contains("s3cret"),
            "{stdout}"
        );
    }
    std::fs::write(dir.join("fixed"), "").unwrap();
    run(dir, &["dead", "redrive", "--scope", "mailer", "--reason", "fixed", "--yes", "a1"]).code(0);
    consume(dir, &command, &STRICT).code(0);
    let life = explain(dir, &["--aggregate", "order-1", "--json"]).code(0).json();
    assert_eq!(life["scopes"][0]["what"], "done up to seq 3; nothing waits", "{life:#}");
}

#[test]
fn what_a_relay_cannot_publish_is_parked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let limits = ["--set", "journal.event_bytes_max=4000000", "--line-bytes-max", "4000000"];
    let append = [&["journal", "append", "--aggregate", "order-1"], &limits[..]].concat();
    let large = json!({"event_id": "large", "pad": "x".repeat(2 << 20)});
    run_with(dir, &append, format!("{large}\n{}", line("next", 2, "")).as_bytes()).code(0);
    relay(dir).code(1);
    let life = explain(dir, &["large", "--json"]).code(0).json();
    let parked = step(&life, "parked: it cannot be published");
    assert!(is_stamp(&parked["at"]) && parked["facts"]["reason"].is_string(), "{parked}");
    let life = explain(dir, &["next", "--json"]).code(0).json();
    assert_eq!(whats(&life)[1], "not published: its aggregate is parked at seq 1");
}

/// A keyed write over HTTP, from its key to the read model; the server runs meanwhile.
#[test]
fn a_keyed_record_is_followed_to_the_read_model() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders", "--data", "d"]).code(0);
    let server = Server::start(dir, &["--data", "d"]);
    let headers = [("content-type", "application/json"), ("idempotency-key", "k-1")];
    let body = json!({"payload": {"amount": 7, "secret": "s3cret"}}).to_string();
    let post = || request(&server.address, "POST", "/v1/modules/orders/records", &headers, body.as_bytes());
    let record = post().is(201);
    post().is(200); // a retry
    let of_key = || explain(dir, &["--key", "k-1", "--data", "d", "--json"]).code(0).json();
    wait_until("the read model has it, and knows how current it is", || {
        let life = of_key();
        let model =
            life["steps"].as_array().unwrap().iter().find(|step| step["layer"] == "read_model").cloned();
        model.is_some_and(|step| {
            step["what"] == "it has the record at seq 1" && is_stamp(&step["facts"]["last_sync_at"])
        })
    });
    let life = of_key();
    assert_eq!(life["of"], json!({"key": "k-1"}));
    let answered = step(&life, "its answer was stored: status 201");
    assert!(is_stamp(&answered["at"]) && answered["facts"]["body_bytes"].as_u64().unwrap() > 0, "{answered}");
    let aggregate = format!("orders/{}", record["id"].as_str().unwrap());
    let wrote = step(&life, "the request wrote a record");
    assert_eq!((&wrote["facts"]["aggregate"], &wrote["seq"]), (&json!(aggregate), &json!(1)), "{wrote}");
    let appended = step(&life, "appended as seq 1");
    assert_eq!(appended["facts"]["kind"], "record.created");
    step(&life, "the record was last written, as seq 1");
    wait_until("the relay has saved how far it is", || {
        whats(&of_key()).iter().any(|what| what.starts_with("published"))
    });
    assert!(life["not_recorded"].as_str().unwrap().contains("answered from the key"), "{life:#}");
    // The retry is in what Prometheus reads.
    wait_until("the retry is counted", || {
        let body = server.get("/metrics").body;
        metric(&body, "dedup_prevented_total", &[r#"layer="keys""#, r#"consumer_scope_id="records""#]) == 1
    });

    // Its event, and its aggregate.
    let id = appended["event"].as_str().unwrap();
    let life = explain(dir, &[id, "--data", "d", "--json"]).code(0).json();
    step(&life, "it has the record at seq 1");
    assert!(life["not_recorded"].as_str().unwrap().contains("which key wrote the event"), "{life:#}");
    let stdout = explain(dir, &["--aggregate", &aggregate, "--data", "d"]).code(0).out;
    assert!(stdout.contains("the record was last written") && !stdout.contains("s3cret"), "{stdout}");
    let stderr = explain(dir, &["--key", "nope", "--data", "d"]).code(4).err;
    assert!(stderr.contains("there is no key nope"), "{stderr}");
}

#[test]
fn what_nobody_knows_is_not_found_and_mistakes_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for of in [&["e-1"][..], &["--aggregate", "order-1"], &["--key", "k-1"]] {
        let stderr = explain(dir, of).code(3).err;
        assert!(stderr.contains("nothing is known of ") && stderr.contains("not found at "), "{stderr}");
    }
    assert!(!dir.join("hapax-data").exists(), "it makes nothing");
    // An event of a tenant is another one.
    let append = ["journal", "append", "--aggregate", "order-1", "--tenant", "acme"];
    run_with(dir, &append, line("e-1", 1, "").as_bytes()).code(0);
    relay(dir).code(0);
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    consume(dir, &command, &STRICT).code(0);
    for of in [&["e-1"][..], &["--aggregate", "order-1"]] {
        // Who else is a tenant is told to those who ask for it.
        let stderr = explain(dir, &[of, &["--tenant", "initech"]].concat()).code(4).err;
        assert!(!stderr.contains("acme") && stderr.contains("--all-tenants"), "{stderr}");
        let stderr = explain(dir, &[of, &["--all-tenants"]].concat()).code(4).err;
        assert!(stderr.contains("the ledger knows one of tenant acme"), "{stderr}");
        let stdout = explain(dir, &[of, &["--tenant", "acme"]].concat()).code(0).out;
        assert!(stdout.contains("tenant acme") && stdout.contains("done"), "{stdout}");
    }
    let ran = explain(dir, &["e-2", "--json"]).code(4);
    assert_eq!(ran.err_json()["error"]["code"], "not-found");
    assert!(ran.out.is_empty() && ran.err.contains("no store has event e-2"), "{}", ran.err);
    // A store that is away is named, and the others are asked.
    let ran = explain(dir, &["e-1", "--tenant", "acme", "--ledger", "postgres://127.0.0.1:1/x"]).code(3);
    assert!(
        ran.out.contains("appended as seq 1") && ran.out.contains("ledger: it does not answer"),
        "{}",
        ran.out
    );
    let ran = explain(dir, &["e-2", "--ledger", "postgres://127.0.0.1:1/x"]).code(3);
    assert!(ran.err.contains("nothing is known of event e-2"), "{}", ran.err);
    for wrong in [
        &[][..],
        &["e-1", "--key", "k"],
        &["e-1", "--md", "--html", "x"],
        &["e-1", "--md", "--json"],
        &["e-1", "--html", "x", "--json"],
    ] {
        assert!(!explain(dir, wrong).code(2).err.is_empty());
    }
    let long = "x".repeat(256);
    assert!(explain(dir, &[&long]).code(2).err.contains("255"));
    assert!(explain(dir, &["--aggregate", &long]).code(2).err.contains("255"));
    assert!(explain(dir, &["--key", "a b\n"]).code(2).err.contains("key"));
    let stderr = explain(dir, &["e-1", "--tenant", "acme", "--html", "no/such/file.html"]).code(3).err;
    assert!(stderr.contains("--html no/such/file.html"), "{stderr}");
}

/// A page that anybody may open: nothing runs, nothing is fetched, nothing private is in it.
#[test]
fn the_page_is_one_file_without_scripts_and_links() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &[&line("a1", 1, "break")[..], &line("a2", 2, "")].concat());
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    consume(dir, &command, &STRICT).code(0);
    for of in [&["a1"][..], &["--aggregate", "order-1"]] {
        let stdout = explain(dir, &[of, &["--html", "page.html"]].concat()).code(0).out;
        assert!(stdout.contains("page.html is written"), "{stdout}");
        let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
        for part in ["<script", "http://", "https://", "src=", "href=", "url(", "@import", "s3cret"] {
            assert!(!page.contains(part), "{part}: {page}");
        }
        for part in [
            "<!doctype html>",
            "prefers-color-scheme: dark",
            "default-src 'none'",
            "reasons of failures and of operators are left out",
            "dead after 1 attempt",
        ] {
            assert!(page.contains(part), "{part}: {page}");
        }
        assert!(!page.contains("no such order"), "a reason may quote a payload: {page}");
        explain(dir, &[of, &["--html", "page.html", "--reasons"]].concat()).code(0);
        let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
        assert!(page.contains("no such order") && page.contains("may quote a payload"), "{page}");
        std::fs::remove_file(dir.join("page.html")).unwrap();
    }
    explain(dir, &["nope", "--html", "page.html"]).code(4);
    assert!(!dir.join("page.html").exists());
}

/// Ids, aggregates and reasons from outside change nothing but themselves, in any format.
#[test]
fn hostile_names_stay_text_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let hostile = [
        "<img src=x onerror=alert(1)></title><script>alert(2)</script>&\"'|`*_[x](https://evil.example)"
            .to_owned(),
        "\u{202e}exe.txt\u{2066}\u{200b}\u{2028}".to_owned(),
        "\u{1b}[2J\u{1b}]0;x\u{7}\r\n\u{9b}31m|".to_owned(),
        "漢".repeat(255),
    ];
    let lines: Vec<_> = hostile
        .iter()
        .map(|id| json!({"event_id": id, "aggregate_id": id, "seq": 1, "do": "echo"}).to_string() + "\n")
        .collect();
    produce(dir, &lines.concat());
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    assert_eq!(count(&consume(dir, &command, &STRICT).code(0), "dead"), 4);
    let is_unsafe = |c: char| (c.is_control() && c != '\n') || "\u{202e}\u{2066}\u{200b}\u{2028}".contains(c);
    for id in &hostile {
        for of in [&[id.as_str()][..], &["--aggregate", id]] {
            let show = |format: &[&str]| explain(dir, &[of, format].concat()).code(0).out;
            let json: Value = serde_json::from_str(show(&["--json"]).trim()).unwrap();
            let dead = step(&json, "dead after 1 attempt");
            assert_eq!((&dead["event"], &dead["facts"]["reason"]), (&json!(id), &json!(id)));
            assert_eq!(json["of"].as_object().unwrap().values().next().unwrap(), id);

            let text = show(&[]);
            let md = show(&["--md"]);
            show(&["--html", "page.html"]);
            let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
            for shown in [&text, &md, &page] {
                assert!(!shown.contains(is_unsafe), "{shown:?}");
                assert!(shown.contains("dead after 1 attempt"), "{shown}");
            }
            // As many cells in each row as there are columns, and no markup of its own.
            for row in md.lines().filter(|line| line.starts_with('|')) {
                assert_eq!(row.replace("\\|", "").matches('|').count(), 5, "{row}");
            }
            let rest = md.replace("\\\\", "").replace("\\<", "").replace("\\[", "").replace("\\`", "");
            assert!(!rest.contains('<') && !rest.contains('[') && !rest.contains('`'), "{md}");
            for part in ["<script", "<img", "onerror=alert(1)>", "href="] {
                assert!(!page.contains(part), "{part}: {page}");
            }
            assert_eq!(page.matches("</title>").count(), 1, "{page}");
        }
    }
    let stderr = explain(dir, &["\u{1b}[2J\u{202e}nobody"]).code(4).err;
    assert!(!stderr.contains(is_unsafe) && stderr.contains("\\u{1b}[2J"), "{stderr:?}");
}

/// A reason quotes what failed: passwords and tokens in it are masked in every format, and a page has no reason at all.
#[test]
fn t356_secrets_in_reasons_are_not_shown() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &line("a1", 1, "break"));
    let handler = "raise Fatal('postgres://me:hunter2@db password=hunter2 Bearer hunter2 of order 17')";
    let command = Sample::Python.handler(dir, handler);
    consume(dir, &command, &STRICT).code(0);
    for format in [&[][..], &["--md"], &["--json"]] {
        let stdout = explain(dir, &[&["a1"], format].concat()).code(0).out;
        assert!(!stdout.contains("hunter2") && stdout.contains("of order 17"), "{stdout}");
    }
    explain(dir, &["a1", "--html", "page.html"]).code(0);
    let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
    assert!(!page.contains("hunter2") && !page.contains("order 17"), "{page}");
    explain(dir, &["a1", "--html", "page.html", "--reasons"]).code(0);
    let page = std::fs::read_to_string(dir.join("page.html")).unwrap();
    assert!(!page.contains("hunter2") && page.contains("order 17"), "{page}");
}

/// A page replaces a file, behind a link too, and nothing else; it is its owner's, and nothing is left beside it.
#[test]
#[cfg(unix)]
fn t357_a_page_replaces_files_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    produce(dir, &line("a1", 1, ""));
    consume(dir, &Sample::Python.handler(dir, UNTIL_FIXED), &STRICT).code(0);
    std::fs::create_dir(dir.join("folder")).unwrap();
    let stderr = explain(dir, &["a1", "--html", "folder"]).code(2).err;
    assert!(stderr.contains("--html folder is not a file"), "{stderr}");
    std::fs::write(dir.join("real.html"), "old").unwrap();
    std::os::unix::fs::symlink("real.html", dir.join("link.html")).unwrap();
    explain(dir, &["a1", "--html", "link.html"]).code(0);
    assert!(dir.join("link.html").symlink_metadata().unwrap().is_symlink());
    assert!(std::fs::read_to_string(dir.join("real.html")).unwrap().contains("<!doctype html>"));
    let mode = dir.join("real.html").metadata().unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    std::os::unix::fs::symlink("nowhere.html", dir.join("loose.html")).unwrap();
    explain(dir, &["a1", "--html", "loose.html"]).code(2);
    let names = std::fs::read_dir(dir).unwrap().map(|one| one.unwrap().file_name().into_string().unwrap());
    assert!(names.filter(|name| name.contains("part")).count() == 0, "nothing is left");
}

/// The sum of a counter's lines with these labels, in the text that Prometheus reads.
fn metric(text: &str, name: &str, labels: &[&str]) -> u64 {
    let lines =
        text.lines().filter(|line| line.starts_with(name) && labels.iter().all(|of| line.contains(of)));
    lines.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap()).sum()
}

/// What the window filters is an effect that was not done twice: counted by day, in the metrics, and shown.
#[test]
fn what_the_window_prevents_is_counted_and_scraped() {
    // More than are logged at once.
    const EVENTS: u64 = 1000;
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let lines: Vec<_> = (0..EVENTS).map(|n| format!("{{\"event_id\":\"e-{n}\"}}\n")).collect();
    let lines = lines.concat();
    produce(dir, &lines);
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let args = consume_args(&command, &["--window", "memory:", "--metrics", "m.prom"]);
    let consumer = hapax(dir, &args).spawn().unwrap();
    wait_until("all are done", || effects(dir).len() as u64 == EVENTS);
    produce(dir, &lines);
    let stats = || run(dir, &["stats", "--json"]).code(0).json();
    wait_until("all repeats are counted", || stats()["count"] == EVENTS);
    let stop = std::process::Command::new("kill").args(["-TERM", &consumer.id().to_string()]).status();
    assert!(stop.unwrap().success());
    let ran: Ran = consumer.wait_with_output().unwrap().into();
    let ran = ran.code(143);
    assert_eq!(effects(dir).len() as u64, EVENTS, "{}", ran.out);
    let (text, stats) = (std::fs::read_to_string(dir.join("m.prom")).unwrap(), stats());
    let prevented = |layer: &str| {
        let label = format!("layer=\"{layer}\"");
        metric(&text, "dedup_prevented_total", &[&label, "consumer_scope_id=\"mailer\""])
    };
    let of_day = |layer: &str| -> u64 {
        let rows = stats["prevented"].as_array().unwrap().iter().filter(|row| row["layer"] == layer);
        rows.map(|row| row["count"].as_u64().unwrap()).sum()
    };
    assert!(prevented("window") > 0, "the window prevents nothing: {text}");
    assert_eq!(prevented("window") + prevented("claims"), EVENTS, "{text}");
    assert_eq!((prevented("window"), prevented("claims")), (of_day("window"), of_day("claims")), "{stats}");
    assert_eq!((prevented("window"), prevented("claims")), (count(&ran, "window"), count(&ran, "duplicate")));
    let unlogged = metric(&text, "dedup_unlogged_skips_total", &[]);
    let not_in_the_log = stats["unlogged_skips"].as_u64().unwrap();
    assert!(unlogged > 0 && unlogged <= not_in_the_log, "{unlogged} of {not_in_the_log}: {text}");
    let life = explain(dir, &["e-0", "--json"]).code(0).json();
    assert!(whats(&life).contains(&"done"), "{life:#}");
}

/// A delivery that was skipped is a step, with its reason and its record; what was not done twice is counted and summed.
#[test]
fn skipped_deliveries_are_shown_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let paid = "{\"event_id\":\"e-1\",\"do\":\"\",\"amount\":12.50}\n";
    produce(dir, &paid.repeat(9));
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    let ran = consume(dir, &command, &["--set", "ledger.value=/amount"]).code(0);
    assert_eq!((count(&ran, "done"), count(&ran, "duplicate")), (1, 8), "{}", ran.out);
    let life = explain(dir, &["e-1", "--json"]).code(0).json();
    let skips: Vec<_> = whats(&life).into_iter().filter(|what| what.contains("skipped")).collect();
    assert_eq!(skips.len(), 7, "{life:#}");
    assert!(skips.contains(&"and skipped 2 times more between"), "{life:#}");
    let skip = step(&life, "skipped: it took effect before");
    assert_eq!((&skip["name"], &skip["facts"]["topic"]), (&json!("mailer"), &json!("orders")), "{skip}");
    assert!(is_stamp(&skip["at"]) && skip["facts"]["offset"].is_u64(), "{skip}");
    let missing = life["not_recorded"].as_str().unwrap();
    assert!(missing.contains("more than 7 days ago") && !missing.contains("dropped"), "{missing}");
    let stats = run(dir, &["stats", "--json"]).code(0).json();
    assert_eq!(
        (&stats["count"], &stats["valued"], &stats["value"]),
        (&json!(8), &json!(8), &json!("100")),
        "{stats}"
    );
    assert_eq!(stats["prevented"][0]["layer"], "claims", "{stats}");
    let text = run(dir, &["stats"]).code(0).out;
    assert!(
        text.starts_with("8 effects were not done twice since ") && text.contains(", worth 100"),
        "{text}"
    );
    let none = run(dir, &["stats", "--json", "--scope", "other"]).code(0).json();
    assert_eq!(none["count"], 0, "{none}");
    run(dir, &["stats", "--days", "0"]).code(2);
    run(dir, &["stats", "--set", "ledger.value=amount"]).code(2);
}

/// Adds more audit rows of other entries than are read at once, as an operator who redrives all of them.
const OTHERS: &str = r#"
import os, sqlite3
path = next(os.path.join(folder, "ledger.db") for folder, _, names in os.walk(".") if "ledger.db" in names)
db = sqlite3.connect(path)
with db:
    rows = ((n, '[null,"mailer","other-%d"]' % n) for n in range(10_001))
    db.executemany("INSERT INTO hapax_audit (at, by, what, identity, why) VALUES (?, 'ada', 'redrive', ?, 'fixed')", rows)
"#;

#[test]
fn t536_what_was_done_to_an_event_is_found_behind_many_others_and_without_its_entry() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let append = ["journal", "append", "--aggregate", "order-1", "--kind", "order.paid"];
    run_with(dir, &append, (line("e-1", 1, "break") + &line("e-2", 2, "")).as_bytes()).code(0);
    relay(dir).code(0);
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    consume(dir, &command, &STRICT).code(0);
    let redrive = ["dead", "redrive", "--scope", "mailer", "--reason", "fixed in 1.4.2", "--yes", "e-1"];
    run(dir, &redrive).code(0);
    std::fs::write(dir.join("fixed"), "").unwrap();
    consume(dir, &command, &STRICT).code(0);
    let added = std::process::Command::new("python3").args(["-c", OTHERS]).current_dir(dir).output().unwrap();
    assert!(added.status.success(), "{added:?}");
    for of in [&["e-1"][..], &["--aggregate", "order-1"]] {
        let life = explain(dir, &[of, &["--json"]].concat()).code(0).json();
        assert_eq!(step(&life, "redriven")["facts"]["reason"], "fixed in 1.4.2", "{life:#}");
    }
    run(dir, &["ledger", "forget", "--scope", "mailer", "--reason", "replay", "--yes", "e-1"]).code(0);
    for of in [&["e-1"][..], &["--aggregate", "order-1"]] {
        let life = explain(dir, &[of, &["--json"]].concat()).code(0).json();
        let (redriven, forgotten) = (step(&life, "redriven"), step(&life, "forgotten"));
        assert_eq!((&redriven["event"], &forgotten["event"]), (&json!("e-1"), &json!("e-1")), "{life:#}");
        assert_eq!(forgotten["name"], "mailer", "{life:#}");
    }
}
