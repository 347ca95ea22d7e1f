//! What a command prints for a file or another program, and which of two failures it reports.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use crate::common::{Ran, run, run_with};

#[test]
fn texts_for_files_are_fields_of_an_object_with_json() {
    let dir = tempfile::tempdir().unwrap();
    for (args, name, part) in [
        (&["config", "example"][..], "toml", "[ledger]"),
        (&["ledger", "schema", "--ledger", "sqlite:l.db"], "sql", "CREATE TABLE"),
        (&["completions", "bash"], "script", "hapax"),
    ] {
        let plain = run(dir.path(), args).code(0).out;
        assert!(plain.to_lowercase().contains(&part.to_lowercase()) && plain.lines().count() > 1, "{plain}");
        let json = run(dir.path(), &[args, &["--json"]].concat()).code(0).json();
        assert_eq!(json[name].as_str().unwrap(), plain.trim_end(), "{args:?}");
    }
}

/// Both fail: the command, and writing what it has measured.
#[test]
fn metrics_that_cannot_be_written_do_not_hide_the_commands_failure() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(
        dir.path(),
        &["--json", "--metrics", "no/such/m.prom", "dead", "ls", "--ledger", "sqlite:none.db"],
    );
    let ran = ran.code(3);
    assert!(ran.err.contains("--metrics"), "{}", ran.err);
    let last = ran.err_json();
    assert!(
        last["error"].to_string().contains("none.db") || last.to_string().contains("none.db"),
        "{}",
        ran.err
    );
}

#[test]
fn flags_that_mean_nothing_here_are_refused_in_our_words() {
    let dir = tempfile::tempdir().unwrap();
    for args in
        [&["id", "make", "--data", "x"][..], &["id", "--data", "x", "make"], &["--data", "x", "id", "make"]]
    {
        let ran = run(dir.path(), args).code(2);
        assert!(ran.err.contains("ids are made and read without --data"), "{args:?}: {}", ran.err);
    }
    let ran = run(dir.path(), &["keys", "sweep", "--retention", "1h"]).code(2);
    assert!(ran.err.contains("at least 1d"), "{}", ran.err);
}

/// A handler that fails every event, with a reason that has the event's id in it.
const FAILS: &str = r#"
import json, sys
print(json.dumps({"v": 1, "concurrency": 1}), flush=True)
for line in sys.stdin:
    message = json.loads(line)
    if "cancel" in message:
        continue
    print(json.dumps({"id": message["id"], "token": message["token"], "fatal": True, "error": "no: " + message["id"]}), flush=True)
"#;

/// Ids with markup, escapes, line breaks and marks that turn the text around, and 255 wide characters.
fn hostile() -> Vec<String> {
    let texts = [
        "<img src=x onerror=alert(1)>",
        "\u{1b}[2J\u{1b}]0;pwned\u{7}",
        "a\nFORGED line\r\u{85}b\u{2028}c",
        "invoice\u{202e}gpj.exe\u{2066}\u{200f}",
        "\u{9b}31mred",
    ];
    texts.map(str::to_owned).into_iter().chain(["漢".repeat(255)]).collect()
}

/// Publishes events with these ids and consumes them with a handler that fails.
fn consumed(dir: &Path, hostile: &[String], args: &[&str]) -> Ran {
    std::fs::write(dir.join("fails.py"), FAILS).unwrap();
    let lines: Vec<_> = hostile.iter().map(|id| serde_json::json!({"event_id": id}).to_string()).collect();
    let produce = ["produce", "--topic", "orders", "--create", "1"];
    run_with(dir, &produce, lines.join("\n").as_bytes()).code(0);
    let consume =
        ["consume", "--topic", "orders", "--scope", "mailer", "--until-idle", "1", "--log", "debug"];
    run(dir, &[&consume[..], &["--exec", "python3 fails.py"], args].concat()).code(0)
}

/// What a terminal acts upon, or what cannot be seen.
fn odd(c: char) -> bool {
    (c.is_control() && c != '\n') || "\u{202e}\u{2066}\u{200f}\u{2028}".contains(c)
}

/// In the log and in what commands print they are text on their own line, and so are the reasons that quote them.
#[test]
fn hostile_names_forge_no_line_of_the_log_and_reach_no_terminal() {
    let dir = tempfile::tempdir().unwrap();
    let consumed = consumed(dir.path(), &hostile(), &[]);
    let listed = run(dir.path(), &["dead", "ls"]).code(0);
    let entries = run(dir.path(), &["ledger", "ls", "--scope", "mailer"]).code(0);
    for text in [&consumed.err, &consumed.out, &listed.out, &entries.out] {
        assert!(!text.contains(odd), "{text:?}");
        assert!(!text.lines().any(|line| line.starts_with("FORGED")), "{text}");
    }
    assert!(listed.out.contains("\\u{202e}gpj.exe") && listed.out.contains("漢漢"), "{}", listed.out);
}

/// JSON need not escape U+009B or U+202E, and a terminal acts upon them all the same.
#[test]
fn t533_hostile_names_are_escaped_in_json_too_and_stay_what_they_are() {
    let dir = tempfile::tempdir().unwrap();
    let hostile = hostile();
    let consumed = consumed(dir.path(), &hostile, &["--log-format", "json"]);
    let listed = run(dir.path(), &["dead", "ls", "--json"]).code(0);
    for text in [&consumed.err, &consumed.out, &listed.out] {
        assert!(!text.contains(odd), "{text:?}");
    }
    for id in &hostile {
        let is_listed = listed.out.lines().any(|line| {
            serde_json::from_str::<serde_json::Value>(line)
                .unwrap()
                .to_string()
                .contains(&serde_json::json!(id).to_string())
        });
        assert!(is_listed, "{id:?}: {}", listed.out);
    }
}
