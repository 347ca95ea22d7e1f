//! What somebody types for the first time, and the sentence they read: it begins with the thing they named, and a command in it can
//! be typed as it is.

#![allow(missing_docs, clippy::unwrap_used)]

use crate::common::serve::{Server, refused, request};
use crate::common::{run, run_with};

/// The first line on standard error.
#[track_caller]
fn message_of(dir: &std::path::Path, args: &[&str], code: i32) -> String {
    let ran = run(dir, args).code(code);
    ran.err.lines().next().unwrap_or_default().to_owned()
}

#[test]
fn a_store_without_what_is_asked_for_says_what_makes_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let lines = b"{\"id\": \"e\"}\n";
    run_with(dir, &["--data", "jj", "journal", "append", "--aggregate", "order-1"], lines);
    for (command, thing, makes) in [
        (
            "modules",
            "there is no module in jj/journal.db yet;",
            "`hapax --data jj modules create SLUG` makes one",
        ),
        (
            "token",
            "there is no API token in jj/journal.db yet;",
            "`hapax --data jj token create --name NAME` makes one",
        ),
        ("keys", "there is no store of keys in jj/journal.db yet", "`hapax --data jj keys init` makes one"),
    ] {
        let text = message_of(dir, &["--data", "jj", command, "ls"], 3);
        assert!(text.starts_with(&format!("hapax: {thing}")) && text.ends_with(makes), "{text}");
    }
}

#[test]
fn files_and_directories_that_are_something_else_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("afile"), "notes, and longer than the header of a database ".repeat(20)).unwrap();
    let text = message_of(dir, &["--data", "afile", "modules", "ls"], 2);
    assert_eq!(text, "hapax: --data afile is a file; it must be a directory");
    for args in [
        ["--journal", "sqlite:afile", "journal", "stat"],
        ["--ledger", "sqlite:afile", "ledger", "stat"],
        ["--journal", "sqlite:afile", "modules", "ls"],
    ] {
        let text = message_of(dir, &args, 2);
        assert!(
            text.starts_with("hapax: configuration: afile is not an SQLite database"),
            "{args:?}: {text}"
        );
    }
}

#[test]
fn settings_are_reported_as_they_were_given() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let text = message_of(dir, &["--set", "keys.retention_days=0", "config", "show"], 2);
    assert!(text.contains("--set keys.retention_days=0 is not allowed: it takes a whole number"), "{text}");
    std::fs::write(dir.join("d.toml"), "# ours\n[serve]\nlisten = \"nowhere\"\n").unwrap();
    let text = refused(dir, &["--config", "d.toml"]).code(2).err;
    assert!(text.contains("d.toml line 3: serve.listen = \"nowhere\" is not an ADDRESS:PORT"), "{text}");
    let same = ["--listen", "127.0.0.1:7099", "--admin-listen", "127.0.0.1:7099"];
    let text = refused(dir, &same).code(2).err;
    assert!(text.contains("--listen and --admin-listen are the same address (127.0.0.1:7099)"), "{text}");
    let text = refused(dir, &["--listen", "0.0.0.0:7099", "--data", "dd"]).code(2).err;
    assert!(text.contains("`hapax --data dd token create --name NAME`"), "{text}");
}

#[test]
#[cfg(all(feature = "postgres", feature = "redis"))]
fn a_server_that_refuses_is_named_with_its_port() {
    let dir = tempfile::tempdir().unwrap();
    for url in ["postgres://nobody@127.0.0.1:1/none", "redis://127.0.0.1:1"] {
        let text = message_of(dir.path(), &["--ledger", url, "ledger", "stat"], 3);
        assert!(text.contains("127.0.0.1:1") && text.contains("refused"), "{text}");
    }
}

#[test]
fn a_request_with_a_mistake_is_reported_which() {
    let dir = tempfile::tempdir().unwrap();
    run(dir.path(), &["modules", "create", "orders"]).code(0);
    let server = Server::start(dir.path(), &[]);
    let path = "/v1/modules/orders/records/01890d3a-5b7e-7c3a-9f51-2f6f1f3b7c10";
    for (query, says) in [
        ("expected_seq=17x", "expected_seq is \"17x\"; it must be a whole number"),
        ("expected_seq=", "expected_seq is \"\"; it must be a whole number"),
    ] {
        let key = format!("\"{}\"", query.len()); // one of its own
        let key = [("idempotency-key", key.as_str())];
        let answer = request(&server.address, "DELETE", &format!("{path}?{query}"), &key, b"");
        let detail = answer.problem(400, "invalid");
        assert!(detail.contains(says), "{detail}");
    }
    let detail = server.get("/v1/dead?payload=perhaps").problem(400, "invalid");
    assert!(detail.contains("payload is \"perhaps\"; it must be true or false"), "{detail}");
    let detail = request(&server.address, "GET", "/v1/info", &[("host", "evil")], b"");
    let detail = detail.problem(403, "host-forbidden");
    assert!(detail.starts_with("\"evil\" is not a name of this server; serve.hosts adds one"), "{detail}");
}
