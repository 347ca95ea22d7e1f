//! `hapax filter --state`: what one run saw, the next one remembers, and nothing is ever lost.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_collect, clippy::duration_suboptimal_units)]

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::process::Stdio;
use std::time::Duration;

use crate::common::{events, hapax, ids, run, run_with};

const STATE: [&str; 5] = ["filter", "--id", "/event_id", "--state", "seen.db"];

#[test]
fn a_second_run_prints_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let input = events(25_000, 2);
    let first = run_with(dir.path(), &STATE, input.as_bytes()).code(0);
    assert_eq!(ids(&first.out).len(), 25_000);
    let second = run_with(dir.path(), &[&STATE[..], &["--json"]].concat(), input.as_bytes()).code(0);
    assert_eq!(second.out, "");
    assert_eq!(second.err_json()["duplicates"], 50_000);
    let other = run_with(dir.path(), &[&STATE[..], &["--scope", "other"]].concat(), input.as_bytes()).code(0);
    assert_eq!(ids(&other.out).len(), 25_000);
}

#[test]
fn showing_duplicates_records_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let show = [&STATE[..], &["--show", "duplicates"]].concat();
    let ran = run_with(dir.path(), &show, events(3, 2).as_bytes()).code(0);
    assert_eq!(ids(&ran.out), ["e-0", "e-1", "e-2"]);
    assert_eq!(ids(&run_with(dir.path(), &STATE, events(3, 1).as_bytes()).code(0).out).len(), 3);
    assert_eq!(ids(&run_with(dir.path(), &show, events(3, 1).as_bytes()).code(0).out).len(), 3);
}

#[test]
fn what_came_before_a_broken_line_is_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let input = "{\"event_id\":\"a\"}\nbroken\n{\"event_id\":\"b\"}\n";
    assert_eq!(ids(&run_with(dir.path(), &STATE, input.as_bytes()).code(4).out), ["a"]);
    let skip = [&STATE[..], &["--broken", "skip"]].concat();
    assert_eq!(ids(&run_with(dir.path(), &skip, input.as_bytes()).code(0).out), ["b"]);
}

#[test]
fn an_id_from_the_far_future_is_a_broken_line() {
    let dir = tempfile::tempdir().unwrap();
    let input = "{\"event_id\":\"0372f1c8-5b7e-7c3a-9f51-2f6f1f3b7c10\"}\n";
    let ran = run_with(dir.path(), &STATE, input.as_bytes()).code(4);
    assert!(ran.out.is_empty() && ran.err.contains("line 1: "), "{}", ran.err);
}

/// The reader takes some of the output and leaves. Whatever it did not take, the next run brings.
#[test]
fn a_broken_pipe_loses_none() {
    for take in [1, 100, 70_000, 1_000_000, 3_000_000] {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("in"), events(50_000, 1)).unwrap();
        let args = [&STATE[..], &["in"]].concat();
        let mut child = hapax(dir.path(), &args).spawn().unwrap();
        let mut taken = vec![0; take];
        child.stdout.as_mut().unwrap().read_exact(&mut taken).unwrap();
        drop(child.stdout.take());
        assert_eq!(child.wait().unwrap().code(), Some(0));
        let mut got: BTreeSet<_> = ids(&String::from_utf8(taken).unwrap()).into_iter().collect();
        got.extend(ids(&run(dir.path(), &args).code(0).out));
        assert_eq!(got.len(), 50_000, "after taking {take}");
    }
}

/// `head -1` through a real shell, as a person would.
#[cfg(unix)]
#[test]
fn head_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("in"), events(50_000, 1)).unwrap();
    let script = format!("'{}' {} in 2>err | head -n 1", env!("CARGO_BIN_EXE_hapax"), STATE.join(" "));
    let head =
        std::process::Command::new("sh").args(["-c", &script]).current_dir(dir.path()).output().unwrap();
    let mut got: BTreeSet<_> = ids(&String::from_utf8(head.stdout).unwrap()).into_iter().collect();
    assert_eq!(got.len(), 1);
    got.extend(ids(&run(dir.path(), &[&STATE[..], &["in"]].concat()).code(0).out));
    assert_eq!(got.len(), 50_000);
}

/// A signal at any moment, gentle or not: what was written or is written later is everything.
#[cfg(unix)]
#[test]
fn a_signal_half_way_loses_none() {
    for (signal, pause_ms) in [("-INT", 30), ("-TERM", 60), ("-KILL", 90), ("-INT", 200), ("-KILL", 300)] {
        let dir = tempfile::tempdir().unwrap();
        let mut child = hapax(dir.path(), &STATE).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let feeder = std::thread::spawn(move || {
            for chunk in events(50_000, 1).as_bytes().chunks(100_000) {
                if stdin.write_all(chunk).is_err() {
                    return;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let mut stdout = child.stdout.take().unwrap();
        let reader = std::thread::spawn(move || {
            let mut text = Vec::new();
            stdout.read_to_end(&mut text).unwrap();
            String::from_utf8(text).unwrap()
        });
        // The signal shall come at any point of its work: a state to wait for would always be the same point.
        std::thread::sleep(Duration::from_millis(pause_ms));
        let id = child.id().to_string();
        // It may have ended by itself; then there is nobody to signal.
        let _ = std::process::Command::new("kill").args([signal, &id]).status().unwrap();
        let code = child.wait().unwrap().code();
        // None: by the signal itself, which a slow machine may bring before it is listened for.
        let expected = [None, Some(0), Some(if signal == "-INT" { 130 } else { 143 })];
        assert!(expected.contains(&code), "{signal}: {code:?}");
        feeder.join().unwrap();
        let mut got: BTreeSet<_> = ids(&reader.join().unwrap()).into_iter().collect();
        let rest = run_with(dir.path(), &STATE, events(50_000, 1).as_bytes()).code(0);
        got.extend(ids(&rest.out));
        assert_eq!(got.len(), 50_000, "{signal} after {pause_ms} ms");
    }
}

/// Two at once on one file: both work, every line is written by at least one of them.
#[test]
fn two_filters_share_a_state() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("in"), events(20_000, 1)).unwrap();
    let args = [&STATE[..], &["in"]].concat();
    let both: Vec<_> = std::thread::scope(|scope| {
        let run_one = || run(dir.path(), &args).code(0);
        let (one, two) = (scope.spawn(run_one), scope.spawn(run_one));
        [one.join().unwrap(), two.join().unwrap()].into_iter().flat_map(|ran| ids(&ran.out)).collect()
    });
    assert!(both.len() >= 20_000);
    assert_eq!(both.into_iter().collect::<BTreeSet<_>>().len(), 20_000);
    assert_eq!(run(dir.path(), &args).code(0).out, "");
}

#[test]
fn a_state_that_cannot_be_had_is_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run_with(dir.path(), &["filter", "--state", "/no/such/folder/seen.db"], b"{\"event_id\":1}\n")
        .code(3);
    assert!(ran.out.is_empty() && ran.err.lines().count() <= 2, "{}", ran.err);
    std::fs::write(dir.path().join("text"), "this is not a database at all, it only looks like a file")
        .unwrap();
    let ran = run_with(dir.path(), &["filter", "--state", "text"], b"{\"event_id\":1}\n").code(2);
    assert!(ran.out.is_empty() && ran.err.contains("not an SQLite database"), "{}", ran.err);
}

#[test]
fn mistakes_about_the_state_are_sentences() {
    let dir = tempfile::tempdir().unwrap();
    let ran = run(dir.path(), &["filter", "--ledger", "sqlite:seen.db"]).code(2);
    assert!(ran.err.contains("--state") && !ran.err.contains("lines"), "{}", ran.err);
    std::fs::write(dir.path().join("notes.txt"), "no database at all, but long enough\n".repeat(100))
        .unwrap();
    let ran = run(dir.path(), &["filter", "--state", "notes.txt"]).code(2);
    assert!(ran.err.contains("notes.txt") && ran.err.contains("not an SQLite database"), "{}", ran.err);
    for args in [&["filter", "nofile"][..], &["filter", "--json", "nofile"]] {
        let ran = run(dir.path(), args).code(2);
        assert!(ran.err.starts_with("hapax: nofile cannot be opened"), "{}", ran.err);
    }
}
