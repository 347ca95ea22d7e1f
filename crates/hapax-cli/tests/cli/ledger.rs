//! `hapax ledger` on a SQLite file.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_collect, clippy::duration_suboptimal_units)]

use crate::common;
use std::path::Path;
use std::time::Duration;

use crate::common::{Ran, run, run_with};
use hapax::ledger::{Claim, Identity, LeaseSettings, Mode};
use hapax::open::{OpenSettings, ledger_with as open};
use hapax::{EventId, Scope};

const URL: &str = "sqlite:ledger.db";

fn ledger(dir: &Path, args: &[&str]) -> Ran {
    run(dir, &[&["ledger", "--ledger", URL], args].concat())
}

/// A ledger with one leased event, `billing/held`, and one that is done, `billing/paid`.
fn filled() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    ledger(dir.path(), &["init"]).code(0);
    let url = format!("sqlite:{}", dir.path().join("ledger.db").display());
    let lease = LeaseSettings { lease: Duration::from_secs(900), attempts_max: 5, alone: true };
    let claim = |id: &str, mode| {
        let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new(id).unwrap());
        Claim::new(identity, mode)
    };
    let claims = [claim("held", Mode::Lease(lease)), claim("paid", Mode::Done)];
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let ledger = open(&url, &OpenSettings::default()).await.unwrap();
        for outcome in ledger.claim(&claims).await.unwrap() {
            assert!(outcome.unwrap().is_claimed());
        }
    });
    dir
}

fn state(dir: &Path, id: &str) -> String {
    let entry = ledger(dir, &["show", "--json", "--scope", "billing", id]).code(0).json();
    entry["state"].as_str().unwrap().to_owned()
}

#[test]
fn init_stat_ls_show_check_schema() {
    let dir = filled();
    ledger(dir.path(), &["init"]).code(0); // again is fine
    ledger(dir.path(), &["check"]).code(0);
    assert!(ledger(dir.path(), &["schema"]).code(0).out.to_uppercase().contains("CREATE TABLE"));
    let stat = ledger(dir.path(), &["stat", "--json"]).code(0).json();
    assert_eq!(stat["counts"].as_array().unwrap().len(), 2);
    let all = ledger(dir.path(), &["ls", "--json"]).code(0).json();
    assert_eq!(all["entries"].as_array().unwrap().len(), 2);
    let done = ledger(dir.path(), &["ls", "--json", "--state", "done", "--since", "1h"]).code(0).json();
    assert_eq!(done["entries"][0]["id"], "paid");
    let page = ledger(dir.path(), &["ls", "--json", "--limit", "1"]).code(0).json();
    let next = page["next"].as_str().unwrap();
    let rest = ledger(dir.path(), &["ls", "--json", "--after", next]).code(0).json();
    assert_eq!(rest["entries"].as_array().unwrap().len(), 1);
    assert!(rest["next"].is_null());
    assert!(ledger(dir.path(), &["ls"]).code(0).out.contains("leased"));
    assert!(ledger(dir.path(), &["show", "--scope", "billing", "held"]).code(0).out.contains("leased"));
    ledger(dir.path(), &["show", "--scope", "billing", "nobody"]).code(4);
}

#[test]
fn interventions_ask_first_and_are_written_down() {
    let dir = filled();
    let act =
        |args: &[&str]| ledger(dir.path(), &[args, &["--scope", "billing", "--reason", "test"]].concat());
    act(&["release", "held"]).code(2); // no terminal, no --yes
    assert_eq!(state(dir.path(), "held"), "leased");
    let dry = act(&["release", "--dry-run", "--json", "held"]).code(0).json();
    assert_eq!(
        (dry["dry_run"].as_bool(), dry["entries"][0]["after"]["state"].as_str()),
        (Some(true), Some("retry"))
    );
    assert_eq!(state(dir.path(), "held"), "leased");
    let before = ledger(dir.path(), &["show", "--json", "--scope", "billing", "held"]).json();
    let done = act(&["release", "--yes", "--json", "held"]).code(0).json();
    assert!(done["entries"][0]["after"]["token"].as_i64() > before["token"].as_i64());
    assert_eq!(state(dir.path(), "held"), "retry");
    act(&["kill", "--yes", "held"]).code(0);
    assert_eq!(state(dir.path(), "held"), "dead");
    act(&["retry", "--yes", "held"]).code(0); // of a dead one: a redrive
    assert_eq!(state(dir.path(), "held"), "retry");
    act(&["kill", "--yes", "--all"]).code(0);
    assert_eq!(state(dir.path(), "held"), "dead");
    assert_eq!(state(dir.path(), "paid"), "done");
    act(&["forget", "--yes", "held"]).code(0);
    ledger(dir.path(), &["show", "--scope", "billing", "held"]).code(4);
    act(&["forget", "--yes", "nobody"]).code(4);
}

#[test]
fn a_list_with_a_mistake_changes_nothing() {
    let dir = filled();
    let args = ["kill", "--yes", "--scope", "billing", "--reason", "test", "held", "nobody"];
    ledger(dir.path(), &args).code(4);
    assert_eq!(state(dir.path(), "held"), "leased");
}

#[test]
fn sweeping_a_filters_state() {
    let dir = tempfile::tempdir().unwrap();
    run_with(dir.path(), &["filter", "--state", "ledger.db"], b"{\"event_id\":\"a\"}\n").code(0);
    std::thread::sleep(Duration::from_millis(50)); // the entry must be older than the retention
    let dry = ledger(dir.path(), &["sweep", "--retention", "1ms", "--dry-run", "--json"]).code(0).json();
    assert_eq!((dry["entries"].as_u64(), dry["dry_run"].as_bool()), (Some(1), Some(true)));
    assert_eq!(ledger(dir.path(), &["sweep", "--retention", "1ms", "--json"]).code(0).json()["entries"], 1);
    let again = run_with(dir.path(), &["filter", "--state", "ledger.db"], b"{\"event_id\":\"a\"}\n").code(0);
    assert_eq!(again.out, "{\"event_id\":\"a\"}\n");
}

#[test]
fn a_sweep_can_be_seen() {
    let dir = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| common::run(dir.path(), args);
    run(&["--ledger", "sqlite:l.db", "ledger", "init"]).code(0);
    let ran = run(&["--ledger", "sqlite:l.db", "--log", "debug", "--metrics", "m.prom", "ledger", "sweep"]);
    ran.code(0);
    let metrics = std::fs::read_to_string(dir.path().join("m.prom")).unwrap();
    assert!(metrics.contains("# TYPE dedup_swept_entries_total"), "{metrics}");
    let ran = run(&["--ledger", "sqlite:l.db", "--metrics", "no/such/folder/m.prom", "ledger", "stat"]);
    let ran = ran.code(3);
    assert!(ran.err.contains("--metrics"), "{}", ran.err);
}

#[test]
fn a_rehearsal_needs_no_name() {
    let dir = filled();
    let release = |args: &[&str]| -> Ran {
        let fixed = ["ledger", "--ledger", URL, "release", "--scope", "billing", "--reason", "test", "held"];
        let mut command = common::hapax(dir.path(), &[&fixed, args].concat());
        command.env_remove("USER").env_remove("LOGNAME").output().unwrap().into()
    };
    release(&["--dry-run"]).code(0);
    assert!(release(&["--yes", "--by", ""]).code(2).err.contains("--by is blank"));
    assert_eq!(state(dir.path(), "held"), "leased");
    release(&["--yes"]).code(0); // by "uid N": a plain container names nobody
    assert_ne!(state(dir.path(), "held"), "leased");
}

/// Whatever the command, only `init` makes something.
const LOOKS: [&[&str]; 9] = [
    &["stat"],
    &["ls"],
    &["show", "--scope", "s", "x"],
    &["check"],
    &["sweep"],
    &["retry", "--scope", "s", "--reason", "w", "--yes", "x"],
    &["release", "--scope", "s", "--reason", "w", "--yes", "x"],
    &["kill", "--scope", "s", "--reason", "w", "--yes", "x"],
    &["forget", "--scope", "s", "--reason", "w", "--yes", "x"],
];

#[test]
fn looking_makes_no_file() {
    let dir = tempfile::tempdir().unwrap();
    for args in LOOKS {
        let ran = ledger(dir.path(), args).code(3);
        assert!(ran.err.contains("`hapax --ledger sqlite:ledger.db ledger init` makes one"), "{}", ran.err);
    }
    // A file that is somebody else's stays as it is.
    let file = dir.path().join("ledger.db");
    for content in [&b""[..], b"SQLite format 3"] {
        std::fs::write(&file, content).unwrap();
        for args in LOOKS {
            assert_ne!(ledger(dir.path(), args).code, Some(0), "{args:?}");
        }
        assert_eq!(std::fs::read(&file).unwrap(), content);
    }
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[test]
fn looking_makes_no_schema() {
    let Ok(url) = std::env::var("HAPAX_TEST_POSTGRES_URL") else {
        return println!("skipped: HAPAX_TEST_POSTGRES_URL is not set");
    };
    let dir = tempfile::tempdir().unwrap();
    let schema = format!("ledger.schema=looked_at_{}", std::process::id());
    for args in LOOKS {
        let ran = run(dir.path(), &[&["ledger", "--ledger", &url, "--set", &schema], args].concat()).code(3);
        assert!(ran.err.contains("there is no ledger in schema"), "{}", ran.err);
    }
}
