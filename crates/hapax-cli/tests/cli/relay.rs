//! `hapax relay` for scripts and operators: when a run ends and with which code, what status shows, what resume and skip change.

#![allow(missing_docs, clippy::unwrap_used)]

use std::io::Read as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use crate::common::{Ran, hapax, run, run_with};
use hapax::backend::postgres::{PgJournal, PgJournalSettings};
use hapax::journal::{Append, Checkpoint, Expected, Leadership, Position, RelayStore as _};
use hapax::ledger::Token;
use hapax::{Aggregate, Event, EventId, Journal, Owner, RelayName};

/// With a lease that no busy machine loses.
const ONCE: [&str; 9] =
    ["relay", "run", "--topic", "orders", "--create", "2", "--set", "relay.lease_ms=600000", "--once"];

/// A run that should end by itself; one that does not is ended after this, and fails.
const PATIENCE: &str = "120";

fn once(dir: &Path, more: &[&str]) -> Ran {
    let hapax = hapax(dir, &[&ONCE[..], more].concat());
    limited(dir, &[], &hapax).stderr(Stdio::piped()).output().unwrap().into()
}

/// The command, behind others, for so long at most.
fn limited(dir: &Path, before: &[&str], hapax: &Command) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE).args(before).arg(hapax.get_program()).args(hapax.get_args()).current_dir(dir);
    for (name, value) in hapax.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped());
    command
}

/// Appends events, each as (id, aggregate, bytes of its payload at least).
fn append(dir: &Path, events: &[(&str, &str, usize)]) {
    let line = |(id, order, bytes): &(&str, &str, usize)| {
        format!("{{\"event_id\":\"{id}\",\"order\":\"{order}\",\"pad\":\"{}\"}}\n", "x".repeat(*bytes))
    };
    let text: String = events.iter().map(line).collect();
    let limits = ["--set", "journal.event_bytes_max=4000000", "--line-bytes-max", "4000000"];
    let args = [&["journal", "append", "--aggregate-at", "/order"], &limits[..]].concat();
    run_with(dir, &args, text.as_bytes()).code(0);
}

/// More than the embedded bus takes.
const LARGE: usize = 2 << 20;

/// Two aggregates that the relay parks at their first event, with a small one behind it, and one that it publishes.
fn append_poison(dir: &Path) {
    append(
        dir,
        &[("a1", "o-1", LARGE), ("b1", "o-2", LARGE), ("c1", "o-3", 1), ("a2", "o-1", 1), ("b2", "o-2", 1)],
    );
}

fn block_on<T>(doing: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(doing)
}

async fn journal(dir: &Path) -> Arc<dyn Journal> {
    let url = format!("sqlite:{}", dir.join("hapax-data/journal.db").display());
    hapax::open::journal_with(&url, &hapax::open::OpenSettings::default()).await.unwrap()
}

fn name() -> RelayName {
    RelayName::new("relay").unwrap()
}

/// Somebody else leads, for long.
fn lead(dir: &Path) -> Token {
    block_on(async {
        let owner = Owner::new("somebody").unwrap();
        let answer =
            journal(dir).await.acquire_leadership(&name(), &owner, Duration::from_secs(3600)).await.unwrap();
        let Leadership::Acquired { token, .. } = answer else { panic!("{answer:?}") };
        token
    })
}

fn save(dir: &Path, token: Token, position: u64) {
    block_on(async {
        let journal = journal(dir).await;
        let mut checkpoint = Checkpoint::start(journal.id());
        checkpoint.position = Position::of(position);
        journal.save(&name(), token, &checkpoint).await.unwrap();
    });
}

fn status(dir: &Path) -> serde_json::Value {
    run(dir, &["--json", "relay", "status"]).code(0).json()["relays"][0].clone()
}

#[test]
fn a_run_that_is_done_says_nothing_of_the_leadership_it_released() {
    let dir = tempfile::tempdir().unwrap();
    append(dir.path(), &[("a", "o-1", 1)]);
    for published in [1, 0] {
        let ran = once(dir.path(), &[]).code(0);
        let message = format!("{published} published up to 1, 0 aggregates behind, 0 of them parked");
        assert_eq!(ran.err.lines().last(), Some(&*message), "{}", ran.err);
    }
}

/// On a terminal, while another leads that has not published everything; and it ends when that has.
#[test]
fn a_candidate_says_once_that_it_waits_and_ends_when_the_leader_is_through() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &[("a", "o-1", 1), ("b", "o-2", 1)]);
    let token = lead(dir);
    save(dir, token, 1);
    let terminal = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))";
    let hapax = hapax(dir, &ONCE);
    let mut child = limited(dir, &["python3", "-c", terminal], &hapax).spawn().unwrap();
    let mut out = child.stdout.take().unwrap();
    let (mut seen, mut part) = (Vec::new(), [0; 1024]);
    while !String::from_utf8_lossy(&seen).contains("waiting for leadership") {
        let count = out.read(&mut part).unwrap();
        assert!(count > 0, "it ended early: {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&part[..count]);
    }
    save(dir, token, 2);
    out.read_to_end(&mut seen).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    let seen = String::from_utf8_lossy(&seen);
    assert!(seen.contains("another one leads (somebody)"), "{seen}");
    for drawn in seen.split('\r') {
        assert!(drawn.matches("waiting for leadership").count() <= 1, "{drawn}");
    }
}

#[test]
fn once_ends_while_another_leads_that_has_published_everything() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &[("a", "o-1", 1), ("b", "o-2", 1)]);
    let token = lead(dir);
    save(dir, token, 2);
    let ran = once(dir, &[]).code(0);
    assert!(ran.err.contains("0 published by this one; another one leads (somebody)"), "{}", ran.err);
    let answer = once(dir, &["--json"]).code(0).json();
    let expected = ("somebody".into(), "2".into(), 0.into());
    assert_eq!(
        (&answer["led_by"], &answer["position"], &answer["published"]),
        (&expected.0, &expected.1, &expected.2)
    );
    assert_eq!(status(dir)["token"], token.0, "nobody has touched its leadership");
}

#[test]
fn once_fails_if_what_is_left_is_parked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append_poison(dir);
    let ran = once(dir, &["--json"]).code(1);
    assert_eq!((&ran.json()["published"], &ran.json()["parked"]), (&1.into(), &2.into()), "{}", ran.out);
    let error = ran.err_json()["error"].clone();
    let message = error["message"].as_str().unwrap();
    assert_eq!(error["code"], "parked");
    for expected in
        ["2 aggregates are parked", "resume --name relay --all", "skip --name relay AGGREGATE --seq N"]
    {
        assert!(message.contains(expected), "{message}");
    }
    // Nothing new: it is still not all published.
    once(dir, &[]).code(1);
    // Each parked event given up, the rest is published and all is well.
    for order in ["o-1", "o-2"] {
        run(dir, &["relay", "skip", "--name", "relay", order, "--seq", "1", "--yes"]).code(0);
    }
    assert_eq!(once(dir, &["--json"]).code(0).json()["published"], 2);
}

#[test]
fn after_a_skip_the_next_seq_does_not_bear_the_reason_of_the_last() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append_poison(dir);
    once(dir, &[]).code(1);
    let before = status(dir)["behind"][0].clone();
    assert_eq!((&before["aggregate"], &before["seq"]), (&"o-1".into(), &1.into()));
    run(dir, &["relay", "skip", "o-1", "--seq", "1", "--yes"]).code(0);
    let after = status(dir)["behind"][0].clone();
    assert_eq!((&after["seq"], &after["parked"]), (&2.into(), &false.into()));
    assert_ne!(after["reason"], before["reason"]);
    assert!(after["reason"].as_str().unwrap().contains("seq 1 was given up"), "{after}");
}

#[test]
fn every_parked_aggregate_is_resumed_in_one_change() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append_poison(dir);
    once(dir, &[]).code(1);
    let token = status(dir)["token"].as_u64().unwrap();
    let resumed = run(dir, &["--json", "relay", "resume", "--all"]).code(0).json();
    assert_eq!((&resumed["what"], &resumed["count"]), (&"resumed".into(), &2.into()), "{resumed}");
    assert_eq!(resumed["aggregates"][1]["aggregate"], "o-2");
    let after = status(dir);
    assert_eq!(after["token"], token + 1, "one change");
    let parked: Vec<_> = after["behind"].as_array().unwrap().iter().map(|behind| &behind["parked"]).collect();
    assert_eq!(parked, [false, false]);
    // Nothing is parked: nothing is changed, and nobody fenced.
    let ran = run(dir, &["relay", "resume", "--all"]).code(0);
    assert_eq!(ran.out.trim(), "0 parked aggregates resumed");
    assert_eq!(status(dir)["token"], token + 1);
    // They are tried again, in vain.
    once(dir, &[]).code(1);
    assert_eq!(run(dir, &["relay", "resume", "--all"]).code(0).out.trim(), "2 parked aggregates resumed");
    for wrong in [&["relay", "resume"][..], &["relay", "resume", "o-1", "--all"]] {
        run(dir, wrong).code(2);
    }
}

/// What an operator does to a relay is written down, where there is an audit: beside the API tokens.
#[test]
fn what_is_done_to_a_relay_leaves_an_audit_row() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append_poison(dir);
    once(dir, &[]).code(1);
    run(dir, &["relay", "resume", "o-1"]).code(0); // there is no audit yet
    run(dir, &["token", "create", "--name", "ops", "--role", "admin"]).code(0);
    let by = ["--by", "ada", "--reason", "ticket 7"];
    for action in [
        &["resume", "--all"][..],
        &["resume", "o-2"],
        &["skip", "o-1", "--seq", "1", "--yes"],
        &["rewind", "--to", "0", "--yes"],
        &["forget", "--name", "relay", "--yes"],
    ] {
        once(dir, &[]); // what was resumed is parked again
        run(dir, &[&["relay"][..], action, &by[..]].concat()).code(0);
    }
    let audit = run(dir, &["--json", "audit", "ls", "--action", "relay."]).code(0).json();
    let rows = audit["audit"].as_array().unwrap_or_else(|| panic!("{audit}"));
    let actions: Vec<_> = rows.iter().rev().map(|row| row["action"].as_str().unwrap()).collect();
    let all = ["relay.resume", "relay.resume", "relay.skip", "relay.rewind", "relay.forget"];
    assert_eq!(actions, all, "{audit}");
    for row in rows {
        assert_eq!((&row["who"], &row["reason"]), (&"ada".into(), &"ticket 7".into()), "{row}");
        assert_eq!(row["target"], "relay", "{row}");
    }
}

#[test]
fn the_name_of_a_relay_may_stand_on_either_side_of_the_command() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &[("a", "o-1", 1)]);
    once(dir, &["--name", "x"]).code(0);
    assert_eq!(status(dir)["relay"], "x");
    let rewind = ["rewind", "--to", "0", "--dry-run", "--json"];
    let before = run(dir, &[&["relay", "--name", "x"], &rewind[..]].concat()).code(0).json();
    let after = run(dir, &[&["relay"], &rewind[..], &["--name", "x"]].concat()).code(0).json();
    assert_eq!((&before, &after["published_again"]), (&after, &1.into()));
}

#[test]
fn both_sides_of_a_conflict_are_fields() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &[("a", "o-1", 1), ("b", "o-1", 1)]);
    let at = |expected| {
        let append = ["--json", "journal", "append", "--aggregate", "o-1", "--expected", expected];
        let error = run_with(dir, &append, b"{\"event_id\":\"c\"}").code(4).err_json()["error"].clone();
        assert_eq!(error["code"], "conflict");
        (error["expected"].clone(), error["actual"].clone())
    };
    assert_eq!(at("1"), (1.into(), 2.into()));
    assert_eq!(at("new"), (0.into(), 2.into()));
    once(dir, &[]).code(0);
    let error =
        run(dir, &["--json", "relay", "rewind", "--to", "9", "--yes"]).code(4).err_json()["error"].clone();
    assert_eq!(error["expected"], "a position up to 2, where relay relay is");
    assert!(error["actual"].as_str().unwrap().starts_with("9: "), "{error}");
}

/// That is a conflict too, but of nothing that the command was given.
#[test]
fn a_relay_that_finds_its_journal_put_back_fails_a_promise() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &[("a", "o-1", 1), ("b", "o-2", 1)]);
    once(dir, &[]).code(0);
    let put_back = "import sqlite3; db = sqlite3.connect('hapax-data/journal.db'); \
        db.executescript('DELETE FROM hapax_journal_event WHERE position > 1; UPDATE hapax_journal_meta SET last = 1')";
    assert!(Command::new("python3").args(["-c", put_back]).current_dir(dir).status().unwrap().success());
    let error = once(dir, &["--json"]).code(1).err_json()["error"].clone();
    assert_eq!(error["code"], "conflict");
    assert!(error["actual"].as_str().unwrap().contains("it was put back"), "{error}");
}

/// A writer that has forgotten its transaction stops a relay without a word; status has one.
#[test]
fn status_tells_of_a_hole_that_is_waited_for() {
    let url = std::env::var("HAPAX_TEST_POSTGRES_URL").unwrap_or_else(|_| {
        panic!("HAPAX_TEST_POSTGRES_URL is not set: run `scripts/services up` and `eval \"$(scripts/services env)\"`")
    });
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let id = run(dir, &["id", "make"]).code(0).out.trim().replace('-', "");
    let mut settings = PgJournalSettings::default();
    settings.schema = format!("t_{id}");
    let schema = format!("journal.schema={}", settings.schema);
    let status = || {
        let args = ["--journal", &url, "--set", &schema, "relay", "status"];
        let text = run(dir, &args).code(0).out;
        let json = run(dir, &[&args[..], &["--json"]].concat()).code(0).json();
        (text.contains("relay: waits at position 1 for a writer whose transaction is open"), json)
    };
    block_on(async {
        let journal = PgJournal::connect(&url, settings).await.unwrap();
        let event = |id: &str| {
            let event = Event::new(EventId::new(id).unwrap());
            Append::new(Aggregate::new(format!("of-{id}")).unwrap(), Expected::New, [event])
        };
        let _ = journal.append(&event("a")).await.unwrap();
        let mut checkpoint = Checkpoint::start(journal.id());
        checkpoint.position = Position::of(1);
        journal.rewind(&name(), &checkpoint, None).await.unwrap();
        assert_eq!((status().0, &status().1["relays"][0]["at_hole"]), (false, &false.into()));
        let mut open = journal.pool().begin().await.unwrap();
        let _ = journal.append_in(&mut open, &event("b")).await.unwrap();
        let _ = journal.append(&event("c")).await.unwrap();
        let (expected, json) = status();
        assert_eq!(
            (expected, &json["relays"][0]["at_hole"], &json["relays"][0]["left"]),
            (true, &true.into(), &1.into())
        );
        open.commit().await.unwrap();
        let (expected, json) = status();
        assert_eq!(
            (expected, &json["relays"][0]["at_hole"], &json["relays"][0]["left"]),
            (false, &false.into(), &2.into())
        );
    });
}
