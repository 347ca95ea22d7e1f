//! `hapax id`, `hapax config show`, configuration errors, help and exit codes.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_collect, clippy::duration_suboptimal_units)]

use std::path::Path;

use crate::common;
use crate::common::{hapax, run, run_with};

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn ids_are_made_in_order() {
    let dir = dir();
    let ran = run(dir.path(), &["id", "make", "--count", "100"]).code(0);
    let ids: Vec<_> = ran.out.lines().collect();
    assert_eq!(ids.len(), 100);
    assert!(ids.is_sorted() && ids.iter().all(|id| id.len() == 36 && id.as_bytes()[14] == b'7'));
}

#[test]
fn derived_ids_follow_from_their_parts() {
    let dir = dir();
    let derive = |args: &[&str]| run(dir.path(), &[&["id", "derive"], args].concat()).code(0).out;
    assert_eq!(derive(&["invoices", "a", "b"]), derive(&["invoices", "a", "b"]));
    assert_ne!(derive(&["invoices", "ab", "c"]), derive(&["invoices", "a", "bc"]));
    run(dir.path(), &["id", "derive", "invoices"]).code(2);
    run(dir.path(), &["id", "derive", " ", "x"]).code(2);
}

#[test]
fn ids_are_inspected() {
    let dir = dir();
    let v7 = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
    let report = run(dir.path(), &["id", "inspect", "--json", v7]).code(0).json();
    assert_eq!(report["kind"], "uuid v7");
    assert_eq!(report["week"], "2024-07-15");
    assert!(report["time"].as_str().unwrap().starts_with("2024-07-2"));
    let ran = run(dir.path(), &["id", "inspect", "order\u{1b}[2J-17", "  ", &v7.to_uppercase()]).code(4);
    assert!(!ran.out.contains('\u{1b}') && ran.out.contains("order\\u{1b}[2J-17"), "{}", ran.out);
    assert!(ran.out.contains("blank") && ran.out.contains("looks like a UUID"), "{}", ran.out);
    // A time that no ledger takes, and one that is in no week.
    for (id, part) in [
        ("0372f1c8-5b7e-7c3a-9f51-2f6f1f3b7c10", "28 days"),
        ("00000000-5b7e-7c3a-9f51-2f6f1f3b7c10", "2000 to 2100"),
        ("ffffffff-5b7e-7c3a-9f51-2f6f1f3b7c10", "2000 to 2100"),
    ] {
        let report = run(dir.path(), &["id", "inspect", "--json", id]).code(0).json();
        assert!(report["note"].as_str().is_some_and(|note| note.contains(part)), "{report}");
    }
    let long = "x".repeat(256);
    let ran = run(dir.path(), &["id", "inspect", "--json", &long]).code(4);
    assert!(ran.json()["problem"].as_str().unwrap().contains("255"));
}

#[test]
fn config_says_where_values_came_from_and_hides_secrets() {
    let dir = dir();
    std::fs::write(dir.path().join("hapax.toml"), "[retry]\nattempts_max = 9\n").unwrap();
    let show = |args: &[&str]| {
        hapax(dir.path(), &[&["config", "show", "--set", "lease.timeout_s=60"], args].concat())
            .env("HAPAX_LEDGER_URL", "postgres://app:s3cret@db/orders")
            .env("PROCESSED_EVENT_OWNER", "pod-7")
            .output()
            .unwrap()
            .into()
    };
    let ran: common::Ran = show(&[]);
    let ran = ran.code(0);
    assert!(!ran.out.contains("s3cret") && ran.out.contains("postgres://app:***@db/orders"), "{}", ran.out);
    assert!(ran.out.contains("HAPAX_LEASE_OWNER, PROCESSED_EVENT_OWNER"), "{}", ran.out);
    let ran: common::Ran = show(&["--json"]);
    assert!(!ran.out.contains("s3cret"));
    let json = ran.json();
    let of = |key: &str| {
        let settings = json["settings"].as_array().unwrap();
        settings.iter().find(|setting| setting["key"] == key).unwrap().clone()
    };
    assert_eq!(
        (of("lease.timeout_s")["from"].as_str(), of("lease.timeout_s")["value"].as_str()),
        (Some("flag --set"), Some("60"))
    );
    assert_eq!(of("lease.owner")["from"], "environment PROCESSED_EVENT_OWNER");
    assert_eq!(of("retry.attempts_max")["from"], "hapax.toml retry.attempts_max");
    assert_eq!(of("ledger.pool_max")["from"], "default");
}

#[test]
fn configuration_mistakes_are_sentences_and_exit_2() {
    let dir = dir();
    let with = |name: &str, value: &str| -> common::Ran {
        hapax(dir.path(), &["config", "show", "--json"]).env(name, value).output().unwrap().into()
    };
    for (name, value, part) in [
        ("HAPAX_LEDGER_ULR", "x", "HAPAX_LEDGER_ULR"),
        ("PROCESSED_EVENT_OWNRE", "x", "PROCESSED_EVENT_OWNRE"),
        ("HAPAX_LEDGER_RETENTION_DAYS", "0", "1 to 36500"),
        ("PROCESSED_EVENT_HEARTBEAT_INTERVAL_SECONDS", "900", "shorter than"),
        ("HAPAX_LEDGER_URL_FILE", "/no/such/file", "cannot be read"),
        ("HAPAX_CONFIG", "/no/such.toml", "/no/such.toml"),
    ] {
        let ran = with(name, value).code(2);
        assert!(ran.err.contains(part), "{name}: {}", ran.err);
        // Whoever looks for the right name finds it all the same.
        assert!(ran.json()["settings"].as_array().is_some_and(|settings| settings.len() > 50), "{name}");
        assert_eq!(ran.err_json()["error"]["code"], "config");
    }
    std::fs::write(dir.path().join("bad.toml"), "[ledger]\nulr = 1").unwrap();
    let ran = run(dir.path(), &["config", "show", "--config", "bad.toml"]).code(2);
    assert!(ran.err.contains("bad.toml") && ran.err.contains("ledger.ulr"), "{}", ran.err);
    run(dir.path(), &["config", "show", "--set", "nonsense"]).code(2);
    run(dir.path(), &["config", "show", "--set", "no.such=1"]).code(2);
}

#[test]
fn an_unknown_ledger_is_named_without_its_password() {
    let dir = dir();
    let ran = run(dir.path(), &["ledger", "stat", "--ledger", "mysql://app:s3cret@db/x"]).code(2);
    assert!(ran.err.contains("sqlite:FILE") && !ran.err.contains("s3cret"), "{}", ran.err);
    let ran = run(dir.path(), &["ledger", "stat"]).code(3);
    assert!(ran.err.contains("hapax ledger init"), "{}", ran.err);
}

#[test]
fn a_memory_ledger_is_looked_into() {
    let dir = dir();
    let ledger = |args: &[&str]| run(dir.path(), &[&["ledger", "--ledger", "memory:"], args].concat());
    assert!(ledger(&["check"]).code(0).out.contains("warning"));
    assert_eq!(ledger(&["stat", "--json"]).code(0).json()["backend"], "memory");
    assert_eq!(ledger(&["ls", "--json"]).code(0).json()["entries"].as_array().unwrap().len(), 0);
    ledger(&["sweep", "--retention", "1d", "--dry-run"]).code(0);
    ledger(&["show", "--scope", "s", "x"]).code(4);
    ledger(&["ls", "--state", "nonsense"]).code(2);
    ledger(&["ls", "--since", "soon"]).code(2);
    ledger(&["retry", "--scope", "s", "x"]).code(2); // no --reason
    ledger(&["retry", "--scope", "s", "--reason", " ", "--yes", "x"]).code(2);
    ledger(&["forget", "--all", "--reason", "w", "--yes"]).code(2); // no filter
    ledger(&["kill", "--scope", "s", "--reason", "w", "--yes", "x"]).code(4); // no such entry
    ledger(&["schema"]).code(2);
}

#[test]
fn every_command_has_help_with_an_example() {
    let dir = dir();
    for args in [
        "demo",
        "filter",
        "id make",
        "id derive",
        "id inspect",
        "config show",
        "config example",
        "completions",
        "ledger init",
        "ledger schema",
        "ledger grants",
        "ledger check",
        "ledger stat",
        "ledger ls",
        "ledger show",
        "ledger sweep",
        "ledger retry",
        "ledger release",
        "ledger kill",
        "ledger forget",
        "ledger import",
        "token create",
        "token ls",
        "token revoke",
        "token rotate",
        "token generate",
        "audit ls",
        "explain",
    ] {
        let args: Vec<_> = args.split(' ').chain(["--help"]).collect();
        let ran = run(dir.path(), &args).code(0);
        assert!(ran.out.contains("Example"), "{args:?}");
    }
    assert!(run(dir.path(), &["--version"]).code(0).out.starts_with("hapax "));
}

/// The example is a hapax.toml: as it is printed, and with every setting in effect.
#[test]
fn the_example_of_a_configuration_is_one() {
    let dir = dir();
    let example = run(dir.path(), &["config", "example"]).code(0).out;
    let values = || run(dir.path(), &["config", "show", "--json"]).code(0).json()["settings"].clone();
    let is_default = |value: &serde_json::Value| value["from"].as_str().unwrap().starts_with("default");
    std::fs::write(dir.path().join("hapax.toml"), &example).unwrap();
    let before = values();
    assert!(before.as_array().unwrap().iter().all(is_default), "it sets nothing: {before}");
    let lines = example.lines().map(|line| match line.strip_prefix('#') {
        Some(setting) if setting.starts_with(|c: char| c.is_ascii_lowercase()) => setting,
        _ => line,
    });
    std::fs::write(dir.path().join("hapax.toml"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let after = values();
    for (value, before) in after.as_array().unwrap().iter().zip(before.as_array().unwrap()) {
        assert!(value["from"].as_str().unwrap().contains("hapax.toml"), "{value} is not in the example");
        // Some defaults follow from other settings; named, they are what they are.
        let is_the_default = [&before["value"], &value["default"]].contains(&&value["value"]);
        assert!(is_the_default, "{value}, and not {before}");
    }
    // A mistake in the file does not keep the example back.
    std::fs::write(dir.path().join("hapax.toml"), "[ledger]\nuri = 5").unwrap();
    assert_eq!(run(dir.path(), &["config", "example"]).code(0).out, example);
}

#[test]
fn every_shell_gets_completions() {
    let dir = dir();
    for shell in ["bash", "zsh", "fish", "powershell", "elvish"] {
        let script = run(dir.path(), &["completions", shell]).code(0).out;
        assert!(!script.contains("demo-worker"), "{shell} is offered what is our own");
        for word in ["consume", "completions", "redrive", "json"] {
            assert!(script.contains(word), "{shell} does not know {word}");
        }
    }
    assert!(
        run(dir.path(), &["completions", "tcsh"]).code(2).err.contains("elvish"),
        "it names what there is"
    );
    let script = run(dir.path(), &["completions", "bash"]).out;
    std::fs::write(dir.path().join("hapax.bash"), script).unwrap();
    let complete = |words: &str, count: usize| {
        let ask = format!(
            "source ./hapax.bash; COMP_WORDS=({words}); COMP_CWORD={count}; _hapax hapax \"${{COMP_WORDS[{count}]}}\" \"${{COMP_WORDS[{}]}}\"; echo ${{COMPREPLY[@]}}",
            count - 1
        );
        let ran =
            std::process::Command::new("bash").args(["-c", &ask]).current_dir(dir.path()).output().unwrap();
        String::from_utf8(ran.stdout).unwrap().trim().to_owned()
    };
    assert_eq!(complete("hapax conf", 1), "config");
    assert_eq!(complete("hapax config ex", 2), "example");
    assert_eq!(complete("hapax completions z", 2), "zsh");
}

/// Payloads and answers are in these files: others on the machine have no business in them.
#[test]
#[cfg(unix)]
fn t392_data_is_its_owners_alone() {
    use std::os::unix::fs::PermissionsExt as _;
    fn modes(of: &Path, found: &mut Vec<(std::path::PathBuf, u32)>) {
        for entry in std::fs::read_dir(of).unwrap() {
            let path = entry.unwrap().path();
            let Ok(meta) = path.metadata() else { continue }; // a file may be gone by now
            found.push((path.clone(), meta.permissions().mode() & 0o777));
            if meta.is_dir() {
                modes(&path, found);
            }
        }
    }
    let dir = dir();
    let dir = dir.path();
    run(dir, &["modules", "create", "orders"]).code(0);
    let server = crate::serve_access::process::Server::start_whole(dir, &[]);
    let with = [("idempotency-key", "one")];
    let body = serde_json::json!({"payload": {"n": 1}});
    server.ask("POST", "/v1/modules/orders/records", &with, &body).is(201);
    let objects = format!("--journal=dir:{}", dir.join("hapax-data/objects").display());
    let append = ["journal", "append", &objects, "--aggregate", "a", "-"];
    run_with(dir, &append, b"{\"id\": \"a\"}\n").code(0);
    let data = dir.join("hapax-data");
    assert_eq!(data.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    let mut found = Vec::new();
    modes(&data, &mut found);
    let has = |end: &str| found.iter().any(|(path, _)| path.to_string_lossy().ends_with(end));
    assert!(has(".db") && has("-wal") && has("objects"), "{found:?}");
    for (path, mode) in &found {
        assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", path.display());
    }
    // What is there keeps its mode, and `check` says it.
    let open = dir.join("open");
    std::fs::create_dir(&open).unwrap();
    std::fs::write(open.join("ledger.db"), "").unwrap();
    for (path, mode) in [(open.clone(), 0o755), (open.join("ledger.db"), 0o644)] {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let ledger = format!("--ledger=sqlite:{}", open.join("ledger.db").display());
    run(dir, &["ledger", "init", &ledger]).code(0);
    let checked = run(dir, &["ledger", "check", &ledger]).code(0);
    assert!(checked.out.contains("every user of this machine can read"), "{}", checked.out);
    assert_eq!(open.join("ledger.db").metadata().unwrap().permissions().mode() & 0o777, 0o644);
}
