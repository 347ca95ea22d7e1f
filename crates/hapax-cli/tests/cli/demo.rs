//! `hapax demo`: nothing is lost or doubled, the witness notices a broken ledger, and nothing stays behind.

#![allow(missing_docs, clippy::unwrap_used)]
#![cfg(unix)]

use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde_json::{Value, json};

use crate::common::consume::wait_until;
use crate::common::serve::{Server, request};
use crate::common::{Ran, hapax, run};

/// One demo at a time: each has five processes.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A small demo, whose temporary directory is made in `dir`.
fn demo(dir: &Path, args: &[&str]) -> Command {
    let mut command = hapax(dir, &[&["demo", "--events", "300"], args].concat());
    command.env("TMPDIR", dir);
    command
}

fn ran(dir: &Path, args: &[&str]) -> Ran {
    demo(dir, args).output().unwrap().into()
}

/// The arguments of all processes that work on files in `dir`.
fn processes(dir: &Path) -> Vec<String> {
    let listed = Command::new("ps").args(["-A", "-ww", "-o", "args="]).output().unwrap();
    let dir = dir.to_str().unwrap();
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    listed
        .lines()
        .filter(|line| line.contains("demo-worker") && line.contains(dir))
        .map(str::to_owned)
        .collect()
}

fn is_empty(dir: &Path) -> bool {
    std::fs::read_dir(dir).unwrap().next().is_none()
}

#[test]
fn the_demo_loses_and_doubles_nothing() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let ran = ran(dir.path(), &["--seed", "7", "--json"]).code(0);
    let last: serde_json::Value = serde_json::from_str(ran.out.lines().last().unwrap()).unwrap();
    let of = |field: &str| last[field].as_u64().unwrap_or_else(|| panic!("no {field}: {last}"));
    assert_eq!(
        (of("events"), of("effects"), of("lost"), of("doubled"), of("seed")),
        (300, 300, 0, 0, 7),
        "{last}"
    );
    assert!(of("kills") >= 5 && of("retries") > 0 && of("fenced") == 1, "{last}");
    assert!(of("deliveries") == 300 + of("duplicates") && of("duplicates") * 4 >= of("deliveries"), "{last}");
    // The third layer: every change of an order was published twice, and each order is one row, as it is now.
    assert_eq!((of("orders"), of("republished"), of("rows"), of("outdated")), (150, 300, 150, 0), "{last}");
    assert!(is_empty(dir.path()) && processes(dir.path()).is_empty());
}

/// With `--data` the files stay, and every command that it names works on them.
#[test]
fn the_demo_without_claims_charges_twice() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let ran = ran(dir.path(), &["--break", "claim", "--data", "my shop"]).code(1);
    let doubled = ran.out.split("doubled ").nth(1).unwrap().split('.').next().unwrap();
    assert!(doubled.parse::<u64>().unwrap() > 0 && ran.out.contains("lost 0"), "{}", ran.out);
    assert!(ran.out.contains(" was charged ") && ran.out.contains("broken on purpose"), "{}", ran.out);
    assert!(ran.out.contains("150 orders, 150 rows, 0 missing or outdated; 300 changes"), "{}", ran.out);
    assert!(ran.err.contains("killed worker") && ran.err.contains("froze worker"), "{}", ran.err);
    let named: Vec<_> = ran.out.lines().filter_map(|line| line.strip_prefix("  hapax ")).collect();
    assert!(named.len() >= 5, "{}", ran.out);
    for arguments in named {
        let line = format!("'{}' {arguments}", env!("CARGO_BIN_EXE_hapax"));
        let looked = Command::new("sh").args(["-c", &line]).current_dir(dir.path()).output().unwrap();
        assert!(looked.status.success(), "{line}: {}", String::from_utf8_lossy(&looked.stderr));
    }
    let again = run(dir.path(), &["demo", "--data", "my shop"]).code(2);
    assert!(again.err.contains("is not empty"), "{}", again.err);
}

#[test]
fn the_demo_without_tokens_loses_a_parcel() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let ran = ran(dir.path(), &["--break", "token"]).code(1);
    let lost = ran.out.split("lost ").nth(1).unwrap().split(',').next().unwrap();
    assert!(lost.parse::<u64>().unwrap() > 0 && ran.out.contains("has no parcel"), "{}", ran.out);
    assert!(ran.err.contains("woke up and overwrote"), "{}", ran.err);
    assert!(is_empty(dir.path()));
}

/// A read model that keeps what arrived last shows orders as they were; charges and parcels are not affected.
#[test]
fn the_demo_without_versions_shows_outdated_orders() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let ran = ran(dir.path(), &["--break", "version"]).code(1);
    let outdated = ran.out.split("150 rows, ").nth(1).unwrap().split(' ').next().unwrap();
    assert!(outdated.parse::<u64>().unwrap() > 0 && ran.out.contains(r#""status":"taken""#), "{}", ran.out);
    assert!(ran.out.contains("effects 300, lost 0, doubled 0"), "{}", ran.out);
    assert!(is_empty(dir.path()));
}

/// Ctrl-C while a worker is frozen: the hardest to get rid of.
#[test]
fn ctrl_c_ends_the_demo_and_leaves_nothing() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let mut child = demo(dir.path(), &[]).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut rest = lines.skip_while(|line| !line.contains("froze worker"));
    assert!(rest.next().is_some(), "it ended before it froze a worker");
    assert!(processes(dir.path()).len() >= 5 && !is_empty(dir.path()));
    let sent = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(sent.success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert!(is_empty(dir.path()));
    wait_until("no process is left", || processes(dir.path()).is_empty());
}

/// A demo that is killed itself takes its workers with it, the frozen one too.
#[test]
fn a_killed_demo_leaves_no_process() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let mut child = demo(dir.path(), &[]).spawn().unwrap();
    let lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    let mut rest = lines.skip_while(|line| !line.contains("froze worker"));
    assert!(rest.next().is_some(), "it ended before it froze a worker");
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("no process is left", || processes(dir.path()).is_empty());
}

/// The page of a demo: it has the routes of a server and buttons of its own, and Ctrl-C finishes what was sent.
#[test]
fn the_page_of_a_demo_breaks_things_and_the_witness_still_judges() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let mut child = demo(dir.path(), &["--page", "--json", "--data", "shop"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let first: Value = serde_json::from_str(&lines.next().unwrap()).unwrap();
    let url = first["page"].as_str().unwrap();
    let address = url.strip_prefix("http://").unwrap().trim_end_matches('/').to_owned();
    assert!(address.starts_with("127.0.0.1:"), "{url}");
    assert_eq!(request(&address, "GET", "/v1/session", &[], b"").is(200)["demo"], true);
    let chaos = |what: &str, origin: &str| {
        let headers = [("content-type", "application/json"), ("origin", origin)];
        request(&address, "POST", "/v1/demo/chaos", &headers, json!({"what": what}).to_string().as_bytes())
    };
    // Another site's page may not press a button.
    chaos("kill", "http://evil.example").problem(403, "origin-forbidden");
    chaos("burn", &format!("http://{address}")).problem(400, "json-invalid");
    for (what, said) in
        [("kill", "killed worker"), ("storm", "copies"), ("cut", "nobody can write"), ("freeze", "froze")]
    {
        let mut done = json!(null);
        wait_until(what, || {
            let answer = chaos(what, &format!("http://{address}"));
            done = answer.json();
            answer.status == 200 // until then, what the story needs is refused
        });
        assert!(done["said"].as_str().unwrap().contains(said), "{done}");
    }
    let mut shown = json!(null);
    wait_until("the story is over", || {
        shown = request(&address, "GET", "/v1/demo", &[], b"").is(200);
        shown["events"].as_u64().unwrap() > 300
    });
    let signalled = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(signalled.success());
    let last: Value = serde_json::from_str(&lines.last().unwrap()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0), "{last}");
    assert_eq!(
        (&last["lost"], &last["doubled"], &last["outdated"]),
        (&json!(0), &json!(0), &json!(0)),
        "{last}"
    );
    assert!(last["events"].as_u64().unwrap() > 300 && last["effects"] == last["events"], "{last}");
    wait_until("no process is left", || processes(dir.path()).is_empty());
    // The dead letters of the printer can be run again, also when the demo is over.
    let shop = |args: &[&str]| run(dir.path(), &[&["--data", "shop"], args].concat()).code(0).out;
    assert!(shop(&["dead", "ls"]).contains("the label printer has no paper"));
    shop(&[
        "dead",
        "redrive",
        "--yes",
        "--scope",
        "shipping",
        "--reason",
        "there is paper",
        "gift-1-shipped",
    ]);
    assert!(shop(&["explain", "gift-1-shipped"]).contains("there is paper"));
}

/// What the demo's page can break, no server can.
#[test]
fn a_server_has_no_route_that_breaks_things() {
    let dir = tempfile::tempdir().unwrap();
    let server = Server::start(dir.path(), &[]);
    assert_eq!(server.get("/v1/session").is(200)["demo"], false);
    server.get("/v1/demo").problem(404, "route-unknown");
    server.post("/v1/demo/chaos", &json!({"what": "kill"})).problem(404, "route-unknown");
}

#[test]
fn the_demo_takes_no_other_places() {
    let dir = tempfile::tempdir().unwrap();
    for flag in ["--ledger", "--journal", "--bus"] {
        let ran = run(dir.path(), &["demo", flag, "memory:"]).code(2);
        assert!(ran.err.contains(flag) && ran.err.contains("--data DIR"), "{}", ran.err);
    }
    run(dir.path(), &["demo", "--events", "10"]).code(2);
    run(dir.path(), &["demo", "--break", "nothing"]).code(2);
    for flag in [["--for", "5s"], ["--port", "7070"]] {
        let ran = run(dir.path(), &[&["demo"], &flag[..]].concat()).code(2);
        assert!(ran.err.contains("--page"), "{}", ran.err);
    }
    let help = run(dir.path(), &["demo", "--help"]).code(0).out;
    assert!(
        help.contains("--break token") && !help.contains("demo-worker") && !help.contains("--ledger"),
        "{help}"
    );
    assert!(is_empty(dir.path()));
}
