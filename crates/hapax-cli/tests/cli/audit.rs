//! Every admin action leaves an audit row: each command, and each operation of the server.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use serde_json::{Value, json};

use crate::common::run;
use crate::serve_access::process::{Server, until};
use crate::serve_tenants::{id, token};

/// The rows whose action begins with this, the oldest first.
fn rows(dir: &Path, action: &str) -> Vec<Value> {
    let audit = run(dir, &["--json", "audit", "ls", "--action", action, "--limit", "1000"]).code(0).json();
    let rows = audit["audit"].as_array().unwrap_or_else(|| panic!("{audit}"));
    rows.iter().rev().cloned().collect()
}

/// Whether a command leaves a row of who did it.
#[derive(Debug)]
enum Audited {
    /// It does, and the test below sees it.
    Here,
    /// It does, and the tests of this file see it.
    In(&'static str),
    /// The ledger records it in the step that changes the entry, for whoever intervenes: `letters.rs`.
    InLedger,
    /// It is not an admin action, because.
    Exempt(&'static str),
}

/// It only looks, or prints.
const LOOKS: Audited = Audited::Exempt("it changes nothing");
/// It is the work that hapax is for, or makes what is not there yet.
const WORKS: Audited = Audited::Exempt("it is the user's own work");
const MAKES: Audited = Audited::Exempt("it makes what is missing, and changes nothing that is there");

fn audited(command: &str) -> Option<Audited> {
    Some(match command {
        "ledger sweep" | "journal sweep" | "journal archive" | "query drop" | "analytics rebuild"
        | "keys sweep" => Audited::Here,
        "token create" | "token revoke" | "token rotate" => Audited::In("cli/token.rs"),
        "keys resolve" => Audited::In("cli/keys.rs"),
        "modules create" => Audited::In("cli/modules.rs"),
        "relay rewind" | "relay resume" | "relay skip" | "relay forget" => Audited::In("cli/relay.rs"),
        "ledger import" => Audited::In("cli/import.rs"),
        "project rebuild" => Audited::In("cli/project.rs"),
        "cdc apply" | "cdc remove" => Audited::In("cdc/commands.rs"),
        "erase" => Audited::In("cli/erase.rs"),
        "dead redrive" | "dead drop" | "parked resume" | "parked skip" | "ledger retry"
        | "ledger release" | "ledger kill" | "ledger forget" => Audited::InLedger,
        "demo" => Audited::Exempt("its files are its own"),
        "probe" => Audited::Exempt("it is a client of a service"),
        "consume" | "produce" | "journal append" | "relay run" | "project run" | "serve" | "filter" => WORKS,
        "keys init" | "ledger init" => MAKES,
        "journal read" | "journal stat" | "modules ls" | "modules grants" | "relay status"
        | "project verify" | "project status" | "top" | "plan" | "query records" | "query status"
        | "query schema" | "verify analytics" | "verify search" | "verify cache" | "cdc config"
        | "cdc status" | "explain" | "stats" | "dead ls" | "dead show" | "parked ls" | "parked show"
        | "doctor" | "id make" | "id derive" | "id inspect" | "config show" | "config example"
        | "keys ls" | "keys show" | "completions" | "ledger schema" | "ledger grants" | "ledger check"
        | "ledger stat" | "ledger ls" | "ledger show" | "ledger audit" | "token ls" | "token generate"
        | "audit ls" => LOOKS,
        _ => return None,
    })
}

/// All commands, as the help lists them, each with its help.
fn commands(dir: &Path, of: &[&str]) -> Vec<(String, String)> {
    let help = run(dir, &[of, &["--help"]].concat()).code(0).out;
    let listed = help.split_once("\nCommands:\n").map_or("", |(_, rest)| rest);
    let names: Vec<_> = listed
        .lines()
        .take_while(|line| line.is_empty() || line.starts_with("  "))
        .filter_map(|line| {
            line.strip_prefix("  ").filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()))
        })
        .filter_map(|line| line.split(' ').next().filter(|name| *name != "help"))
        .collect();
    if names.is_empty() {
        return vec![(of.join(" "), help)];
    }
    names.into_iter().flat_map(|name| commands(dir, &[of, &[name]].concat())).collect()
}

/// A command that is added and forgets its audit row is named here, or fails.
#[test]
fn t417_each_command_leaves_an_audit_row_or_says_why_not() {
    let dir = tempfile::tempdir().unwrap();
    let all = commands(dir.path(), &[]);
    assert!(all.len() > 70, "{all:?}");
    for (command, help) in all {
        let audited =
            audited(&command).unwrap_or_else(|| panic!("hapax {command}: does it leave an audit row?"));
        // Who takes a person's name writes it down. The sweep of the keys is a service's too, and names the user.
        let asks = help.contains("--by ") || command == "keys sweep";
        match audited {
            Audited::Exempt(why) => assert!(!asks, "{command} asks who runs it, although {why}"),
            _ => assert!(asks, "{command} does not ask who runs it"),
        }
        if let Audited::In(file) = audited {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(file);
            let text = std::fs::read_to_string(path).unwrap();
            let group = command.split(' ').next().unwrap_or(&command);
            assert!(
                text.contains("\"audit\"") && text.contains(&format!("\"{group}.")),
                "{command}: {file} sees no row of it"
            );
        }
    }
}

/// Those of [`Audited::Here`].
#[test]
fn each_command_that_changes_what_is_not_ones_own_leaves_an_audit_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    token(dir, &["--role", "admin"]);
    drop(Server::start_whole(dir, &[])); // it makes all stores
    let by = ["--by", "ada", "--reason", "ticket 7"];
    for (command, code, action, target, details) in [
        (&["ledger", "sweep", "--retention", "9d"][..], 0, "ledger.sweep", "ledger.db", "777600 s"),
        (&["journal", "sweep", "--older-than", "2d", "--yes"], 0, "journal.sweep", "journal.db", "172800 s"),
        (
            &["journal", "archive", "--to", "dir:kept", "--older-than", "2d", "--yes"],
            0,
            "journal.archive",
            "journal.db",
            "dir:kept",
        ),
        // Nothing was rejected there. The row says what was asked for.
        (
            &["query", "drop", "--topic", "events", "--partition", "3", "--offset", "5"],
            4,
            "query.drop",
            "offset 5 of events",
            "",
        ),
        // The embedded read model is not rebuilt.
        (&["analytics", "rebuild", "--anew"], 2, "analytics.rebuild", "sqlite:", "anew"),
    ] {
        let before = rows(dir, "");
        run(dir, &[command, &by[..]].concat()).code(code);
        let after = rows(dir, "");
        assert_eq!(after.len(), before.len() + 1, "{command:?}: {after:?}");
        let row = after.last().unwrap();
        assert_eq!(
            (&row["action"], &row["who"], &row["reason"]),
            (&json!(action), &json!("ada"), &json!("ticket 7")),
            "{command:?}"
        );
        let has = |field: &str, text: &str| row[field].as_str().unwrap().contains(text);
        assert!(has("target", target) && has("details", details), "{command:?}: {row}");
    }
    run(dir, &["keys", "sweep"]).code(0);
    assert_eq!(rows(dir, "keys.sweep").len(), 1);
    // Looking leaves none.
    let before = rows(dir, "").len();
    for command in [
        &["ledger", "sweep", "--dry-run"][..],
        &["journal", "sweep", "--older-than", "2d", "--dry-run"],
        &["keys", "sweep", "--dry-run"],
    ] {
        run(dir, command).code(0);
    }
    assert_eq!(rows(dir, "").len(), before);
}

/// What an operation leaves in the audit.
enum Leaves {
    /// It is an admin action: this request is one.
    Row(String, Value, &'static str),
    /// It is the caller's own work, or it only looks.
    Nothing,
}

fn of(method: &str, path: &str, child: &str) -> Option<Leaves> {
    let change = |id: &str| json!({"scope": "mailer", "ids": [id], "reason": "r"});
    Some(match (method, path) {
        ("post", "/v1/dead/redrive") => Leaves::Row(path.into(), change("dead-1"), "ledger.redrive"),
        ("post", "/v1/dead/drop") => Leaves::Row(path.into(), change("dead-2"), "ledger.drop"),
        ("post", "/v1/parked/release") => Leaves::Row(path.into(), change("parked-2"), "ledger."),
        ("post", "/v1/tokens") => {
            Leaves::Row(path.into(), json!({"name": "made", "role": "read"}), "token.create")
        }
        ("post", "/v1/tokens/{id}/rotate") => {
            Leaves::Row(format!("/v1/tokens/{child}/rotate"), json!({"rotations": 0}), "token.rotate")
        }
        ("delete", "/v1/tokens/{id}") => {
            Leaves::Row(format!("/v1/tokens/{child}"), Value::Null, "token.revoke")
        }
        (
            "post",
            "/v1/claims"
            | "/v1/claims/batch"
            | "/v1/claims/done"
            | "/v1/claims/done/batch"
            | "/v1/claims/extend"
            | "/v1/claims/release"
            | "/v1/claims/fail"
            | "/v1/journal/append"
            | "/v1/modules/{slug}/records"
            | "/v1/dead/preview"
            | "/v1/login"
            | "/v1/logout",
        )
        | ("put" | "delete", "/v1/modules/{slug}/records/{id}") => Leaves::Nothing,
        _ => return None,
    })
}

/// A route that is added and forgets its audit row is named here, or fails.
#[test]
fn each_admin_operation_of_the_server_leaves_one_audit_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let admin = token(dir, &["--role", "admin"]);
    let child = token(dir, &["--role", "read"]);
    let server = Server::start(dir, &[]);
    for event in ["dead-1", "dead-2"] {
        let claimed = server.post("/v1/claims", &admin, &json!({"scope": "mailer", "id": event})).is(200);
        let fail = json!({"scope": "mailer", "id": event, "token": claimed["token"], "reason": "r", "then": "dead", "payload": {}});
        server.post("/v1/claims/fail", &admin, &fail).is(200);
    }
    crate::serve_tenants::park(dir, None, "parked-", true);
    let api = server.ask("GET", "/openapi.json", &[], &Value::Null).is(200);
    let bearer = format!("Bearer {admin}");
    let mut acted = 0;
    let mut operations: Vec<(String, String)> = Vec::new();
    for (path, item) in api["paths"].as_object().unwrap() {
        let changes = item.as_object().unwrap().keys().filter(|method| *method != "get");
        operations.extend(changes.map(|method| (method.clone(), path.clone())));
    }
    operations.sort_by_key(|(method, _)| method == "delete"); // a token is rotated before it is revoked
    for (method, path) in operations {
        let leaves = of(&method, &path, id(&child)).unwrap_or_else(|| panic!("{method} {path} is not asked"));
        let Leaves::Row(target, body, action) = leaves else { continue };
        let before = rows(dir, "").len();
        let answer = server.ask(&method.to_uppercase(), &target, &[("authorization", &bearer)], &body);
        assert!(answer.status < 300, "{method} {target}: {answer:?}");
        let mut after = Vec::new();
        until("its row is there", || {
            after = rows(dir, "");
            after.len() > before
        });
        let row = after.last().unwrap();
        assert_eq!(after.len(), before + 1, "{method} {path}: {after:?}");
        assert!(row["action"].as_str().unwrap().starts_with(action), "{method} {path}: {row}");
        assert!(row["who"].as_str().unwrap().contains(id(&admin)), "{method} {path}: {row}");
        acted += 1;
    }
    assert_eq!(acted, 6);
}
