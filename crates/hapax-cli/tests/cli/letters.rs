//! `hapax dead`, `hapax parked` and `hapax doctor`: what could not be processed is one command away from going on.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use crate::common::consume::{Sample, consume, count, effects, entry, produce};
use crate::common::{Ran, run};

/// Fails for good while there is no file `fixed`.
const UNTIL_FIXED: &str = "if do == 'break' and not os.path.exists('fixed'): raise Fatal('no such order')
effect(request['id'])";

const STRICT: [&str; 6] = ["--order", "strict", "--on-dead", "park", "--first-seq", "1"];

fn line(id: &str, seq: u32, what: &str) -> String {
    format!("{{\"event_id\":\"{id}\",\"aggregate_id\":\"order-1\",\"seq\":{seq},\"do\":\"{what}\"}}\n")
}

/// `a1` is dead, `a2` and `a3` are parked behind it, `b` of nothing is dead too.
fn broken(dir: &Path) -> String {
    let other = "{\"event_id\":\"b\",\"do\":\"break\",\"secret\":\"payload of b\"}\n";
    produce(dir, &[&line("a1", 1, "break"), &line("a2", 2, ""), &line("a3", 3, ""), other].concat());
    let command = Sample::Python.handler(dir, UNTIL_FIXED);
    let ran = consume(dir, &command, &STRICT).code(0);
    println!("{}", ran.out.trim());
    assert_eq!(count(&ran, "dead"), 2, "{}", ran.out);
    assert_eq!(effects(dir), Vec::<String>::new());
    command
}

fn ids(ran: &Ran) -> Vec<String> {
    let list = ran.json()["entries"].as_array().unwrap().clone();
    let mut ids: Vec<_> = list
        .iter()
        .map(|entry| entry.get("before").unwrap_or(entry)["id"].as_str().unwrap().to_owned())
        .collect();
    ids.sort();
    ids
}

#[test]
fn dead_letters_are_listed_shown_and_redriven_in_order() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let command = broken(dir);
    assert_eq!(ids(&run(dir, &["dead", "ls", "--json", "--scope", "mailer"]).code(0)), ["a1", "b"]);
    assert_eq!(
        ids(&run(dir, &["dead", "ls", "--json", "--aggregate", "order-1", "--topic", "orders"]).code(0)),
        ["a1"]
    );
    assert_eq!(ids(&run(dir, &["parked", "ls", "--json", "--since", "1h"]).code(0)), ["a2", "a3"]);
    assert_eq!(ids(&run(dir, &["dead", "ls", "--json", "--topic", "other"]).code(0)), Vec::<String>::new());
    let table = run(dir, &["dead", "ls"]).code(0);
    assert!(table.out.contains("no such order") && !table.out.contains("payload of b"), "{}", table.out);
    // Payloads only when asked for.
    let show = ["dead", "show", "--scope", "mailer", "b"];
    assert!(!run(dir, &show).code(0).out.contains("payload of b"));
    assert!(run(dir, &[&show[..], &["--payload"]].concat()).code(0).out.contains("payload of b"));
    let ran = run(dir, &["dead", "show", "--scope", "mailer", "a2"]).code(4);
    assert!(ran.err.contains("is parked, not dead"), "{}", ran.err);
    // Nothing happens without consent.
    let redrive = ["dead", "redrive", "--json", "--scope", "mailer", "--all", "--reason", "fixed in 1.4.2"];
    assert_eq!(ids(&run(dir, &[&redrive[..], &["--dry-run"]].concat()).code(0)), ["a1", "b"]);
    let ran = run(dir, &redrive).code(2);
    assert!(ran.err.contains("--yes"), "{}", ran.err);
    assert_eq!(entry(dir, "a1")["state"], "dead");
    let ran = run(dir, &["dead", "redrive", "--all", "--yes", "--reason", "x"]).code(2);
    assert!(ran.err.contains("narrow it down"), "{}", ran.err);
    // With it everything runs, in order, once.
    std::fs::write(dir.join("fixed"), "").unwrap();
    run(dir, &[&redrive[..], &["--yes"]].concat()).code(0);
    assert_eq!(entry(dir, "a1")["state"], "retry");
    produce(dir, &line("a4", 4, ""));
    let ran = consume(dir, &command, &STRICT).code(0);
    println!("{}", ran.out.trim());
    let ran_in_order: Vec<_> = effects(dir).into_iter().filter(|id| id.starts_with('a')).collect();
    assert_eq!(ran_in_order, ["a1", "a2", "a3", "a4"]);
    assert_eq!(effects(dir).len(), 5);
    assert_eq!(ids(&run(dir, &["dead", "ls", "--json"]).code(0)), Vec::<String>::new());
    assert_eq!(ids(&run(dir, &["parked", "ls", "--json"]).code(0)), Vec::<String>::new());
    let audit = run(dir, &["ledger", "audit", "--json"]).code(0).json();
    let audit = audit["audit"].as_array().unwrap();
    assert_eq!(audit.len(), 2);
    assert!(
        audit.iter().all(|row| row["by"] == "tester"
            && row["reason"] == "fixed in 1.4.2"
            && row["what"] == "redrive")
    );
}

#[test]
fn parked_events_are_resumed_by_redriving_their_head() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let command = broken(dir);
    let resume = ["parked", "resume", "--json", "--scope", "mailer", "--reason", "fixed", "--yes"];
    std::fs::write(dir.join("fixed"), "").unwrap();
    // Whichever of them is named, what they are behind is run.
    let ran = run(dir, &[&resume[..], &["a3"]].concat()).code(0);
    assert_eq!(ids(&ran), ["a1"]);
    consume(dir, &command, &STRICT).code(0);
    assert_eq!(effects(dir), ["a1", "a2", "a3"]);
}

#[test]
fn parked_events_go_on_past_what_is_skipped_or_dropped() {
    for skip in [true, false] {
        let dir = tempfile::tempdir().unwrap();
        let dir = dir.path();
        let command = broken(dir);
        let change = [
            "--json",
            "--scope",
            "mailer",
            "--aggregate",
            "order-1",
            "--all",
            "--reason",
            "never existed",
            "--yes",
        ];
        let act: &[&str] = if skip { &["parked", "skip"] } else { &["dead", "drop"] };
        let ran = run(dir, &[act, &change].concat()).code(0);
        assert_eq!(
            ran.json()["entries"].as_array().unwrap().len(),
            1,
            "one moves the aggregate: {}",
            ran.out
        );
        consume(dir, &command, &STRICT).code(0);
        assert_eq!(effects(dir), ["a2", "a3"], "skip: {skip}");
        assert_eq!(entry(dir, "a1")["state"], if skip { "dead" } else { "lost" });
        if skip {
            // Its turn has passed: only out of order.
            std::fs::write(dir.join("fixed"), "").unwrap();
            let redrive = ["dead", "redrive", "--scope", "mailer", "--reason", "late", "--yes", "a1"];
            let ran = run(dir, &redrive).code(4);
            assert!(ran.err.contains("mailer/a1") && ran.err.contains("out of order"), "{}", ran.err);
            run(dir, &[&redrive[..], &["--out-of-order"]].concat()).code(0);
            consume(dir, &command, &STRICT).code(0);
            assert_eq!(effects(dir), ["a2", "a3", "a1"]);
        }
    }
}

#[test]
fn doctor_says_what_is_wrong() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let doctor = |args: &[&str]| run(dir, &[&["doctor", "--json"], args].concat());
    let levels = |ran: &Ran, level: &str| -> Vec<String> {
        let list = ran.json()["findings"].as_array().unwrap().clone();
        let of = list.iter().filter(|finding| finding["level"] == level);
        of.map(|finding| finding["check"].as_str().unwrap().to_owned()).collect()
    };
    let nothing = doctor(&[]).code(3);
    assert_eq!(levels(&nothing, "unreachable"), ["ledger", "bus"]);
    assert!(!dir.join("hapax-data").exists(), "looking makes nothing");
    produce(dir, "{}\n");
    run(dir, &["ledger", "init"]).code(0);
    let fine = doctor(&["--topic", "orders", "--scope", "mailer", "--window", "memory:"]).code(0);
    assert!(
        levels(&fine, "refusal").is_empty() && levels(&fine, "fine").contains(&"clock".to_owned()),
        "{}",
        fine.out
    );
    assert!(
        levels(&fine, "fine")
            .iter()
            .chain(&levels(&fine, "warning"))
            .any(|check| check.starts_with("window")),
        "{}",
        fine.out
    );
    let refused = doctor(&["--topic", "nope"]).code(1);
    assert_eq!(levels(&refused, "refusal"), ["topic"]);
    let short = doctor(&["--topic", "orders", "--set", "ledger.retention_days=1"]).code(0);
    assert_eq!(levels(&short, "warning"), ["retention"]);
    let away = doctor(&["--ledger", "postgres://127.0.0.1:1/x"]).code(3);
    assert_eq!(levels(&away, "unreachable"), ["ledger"]);
    let away = doctor(&["--window", "redis://127.0.0.1:1"]).code(3);
    assert_eq!(levels(&away, "unreachable"), ["window"]);
    let table = run(dir, &["doctor"]).code(0);
    assert!(table.out.contains("embedded answers"), "{}", table.out);
}

/// Every decision shows first what it does to each event, and why; of those that match, some may stay.
#[test]
fn decisions_show_first_what_they_do_to_each_event() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    broken(dir);
    let outcomes = |args: &[&str]| {
        let ran = run(
            dir,
            &[args, &["--scope", "mailer", "--all", "--reason", "r", "--dry-run", "--json"]].concat(),
        );
        let entries = ran.code(0).json()["entries"].as_array().unwrap().clone();
        let outcome = |entry: &serde_json::Value| {
            let text = |name: &str| entry[name].as_str().unwrap().to_owned();
            (text("id"), entry["changes"] == true, text("outcome"))
        };
        entries.iter().map(outcome).collect::<Vec<_>>()
    };
    let runs = "runs again now, its attempts count from 0";
    let both =
        |what: &str| vec![("a1".to_owned(), true, what.to_owned()), ("b".to_owned(), true, what.to_owned())];
    let mut redrive = outcomes(&["dead", "redrive"]);
    redrive.sort();
    assert_eq!(redrive, both(runs));
    let mut dropped = outcomes(&["dead", "drop"]);
    dropped.sort();
    assert_eq!(dropped, both("is lost: its bytes are deleted, its aggregate goes on past it"));
    assert_eq!(outcomes(&["parked", "resume"]), [("a1".to_owned(), true, runs.to_owned())]);
    let skip = outcomes(&["parked", "skip"]);
    let past = "stays parked, its aggregate goes on past what it waits behind";
    assert_eq!(skip, [("a2".to_owned(), true, past.to_owned())]);
    // The aggregate moves past its dead event, which then stays, while the other runs.
    let all = ["--scope", "mailer", "--all", "--reason", "r", "--yes", "--json"];
    run(dir, &[&["parked", "skip"], &all[..]].concat()).code(0);
    let done = run(dir, &[&["dead", "redrive"], &all[..]].concat()).code(0).json();
    let entries = done["entries"].as_array().unwrap();
    let of = |id: &str| entries.iter().find(|entry| entry["id"] == id).unwrap();
    assert_eq!(
        (&of("b")["changes"], &of("b")["after"]["state"]),
        (&true.into(), &"retry".into()),
        "{done:#}"
    );
    assert_eq!(of("a1")["changes"], false, "{done:#}");
    assert!(of("a1")["outcome"].as_str().unwrap().starts_with("stays: it needs "), "{done:#}");
    // One that is named and cannot be changed is a mistake.
    run(dir, &["dead", "redrive", "--scope", "mailer", "--reason", "r", "--yes", "a1"]).code(4);
}

/// T472: on the command line too, what few of many died of is counted, and chosen by its pattern.
#[test]
fn t472_dead_letters_are_counted_and_chosen_by_reason() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let code = "raise Fatal(request['id'] + (': HTTP 402' if do == 'pay' else ': no such order'))";
    let line = |id: &str, what: &str| format!("{{\"event_id\":\"{id}\",\"do\":\"{what}\"}}\n");
    produce(dir, &[line("e-1001", ""), line("e-1002", "pay"), line("e-1003", "")].concat());
    consume(dir, &Sample::Python.handler(dir, code), &[]).code(0);
    let listed = run(dir, &["dead", "ls", "--by-reason", "--json"]).code(0).json();
    let groups: Vec<_> = listed["groups"].as_array().unwrap().iter().collect();
    let said: Vec<_> =
        groups.iter().map(|group| (group["count"].as_u64(), group["pattern"].as_str())).collect();
    assert_eq!(said, [(Some(2), Some("#: no such order")), (Some(1), Some("#: HTTP 402"))], "{listed}");
    assert_eq!((listed["looked"].as_u64(), listed["more"].as_bool()), (Some(3), Some(false)), "{listed}");
    let table = run(dir, &["dead", "ls", "--by-reason", "--scope", "mailer", "--limit", "1"]).code(0);
    assert!(table.out.contains("#: no such order") && !table.out.contains("HTTP 402"), "{}", table.out);
    assert!(table.out.contains("there are more reasons"), "{}", table.out);
    // A pattern narrows down by itself, and is of no use beside an id.
    let of = ["--pattern", "#: HTTP 402", "--reason", "paid otherwise", "--json"];
    let args = [&["dead", "drop", "--all", "--yes"], &of[..]].concat();
    assert_eq!(ids(&run(dir, &args).code(0)), ["e-1002"]);
    run(dir, &[&["dead", "redrive", "--scope", "mailer", "e-1001"], &of[..]].concat()).code(2);
    let args =
        ["dead", "redrive", "--all", "--yes", "--json", "--pattern", "#: no such order", "--reason", "r"];
    assert_eq!(ids(&run(dir, &args).code(0)), ["e-1001", "e-1003"]);
}
