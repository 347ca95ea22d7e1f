//! What a command prints for a file or another program, and which of two failures it reports.

#![allow(missing_docs, clippy::unwrap_used)]

use crate::common::run;

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
