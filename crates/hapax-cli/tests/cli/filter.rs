//! `hapax filter` without a state: what comes out, what is refused, and how it ends.

#![allow(missing_docs, clippy::unwrap_used, clippy::format_collect, clippy::duration_suboptimal_units)]

use crate::common;
use crate::common::{events, hapax, ids, run, run_with};
use std::io::{Read as _, Write as _};
use std::process::Stdio;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

#[test]
fn first_occurrences_in_order_and_unchanged() {
    let dir = dir();
    let input = "{\"event_id\": \"a\",  \"n\":1}\r\n{\"eventId\":\"b\"}\n\n{\"event_id\":\"a\",\"n\":2}\n{\"event_id\":7}\n{\"event_id\":\"7\"}";
    let ran = run_with(dir.path(), &["filter"], input.as_bytes()).code(0);
    assert_eq!(ran.out, "{\"event_id\": \"a\",  \"n\":1}\r\n{\"eventId\":\"b\"}\n{\"event_id\":7}\n");
    assert!(ran.err.contains("5 lines: 3 first, 2 duplicates"), "{}", ran.err);
}

#[test]
fn the_last_line_gets_its_newline_and_a_mark_is_no_text() {
    let dir = dir();
    let ran = run_with(dir.path(), &["filter"], b"\xef\xbb\xbf{\"event_id\":1}").code(0);
    assert_eq!(ran.out, "{\"event_id\":1}\n");
    assert_eq!(run_with(dir.path(), &["filter"], b"").code(0).out, "");
}

#[test]
fn files_chains_and_hashes() {
    let dir = dir();
    std::fs::write(dir.path().join("one"), "{\"a\":{\"id\":\"x\"}}\n{\"b\":\"y\"}\n").unwrap();
    std::fs::write(dir.path().join("two"), "{\"b\":\"x\"}\n{\"c\":1}\n{\"c\":1}\n").unwrap();
    let ran =
        run(dir.path(), &["filter", "--id", "/a/id", "--id", "/b", "--id", "sha256", "one", "two"]).code(0);
    assert_eq!(ran.out, "{\"a\":{\"id\":\"x\"}}\n{\"b\":\"y\"}\n{\"c\":1}\n");
    let ran = run(dir.path(), &["filter", "--id", "/b", "--broken", "skip", "two", "one"]).code(0);
    assert_eq!(ran.out, "{\"b\":\"x\"}\n{\"b\":\"y\"}\n");
    assert!(ran.err.contains("two line 2: it has no id at /b"), "{}", ran.err);
}

#[test]
fn duplicates_can_be_shown() {
    let dir = dir();
    let ran =
        run_with(dir.path(), &["filter", "--show", "duplicates", "--json"], events(3, 3).as_bytes()).code(0);
    assert_eq!(ids(&ran.out), ["e-0", "e-1", "e-2", "e-0", "e-1", "e-2"]);
    let counts = ran.err_json();
    assert_eq!((counts["read"].as_u64(), counts["duplicates"].as_u64()), (Some(9), Some(6)));
}

#[test]
fn a_broken_line_stops_after_what_came_before_it() {
    let dir = dir();
    let input = "{\"event_id\":\"a\"}\n{\"event_id\":\"b\"}\nnot json\n{\"event_id\":\"c\"}\n";
    let ran = run_with(dir.path(), &["filter", "--json"], input.as_bytes()).code(4);
    assert_eq!(ids(&ran.out), ["a", "b"]);
    assert!(ran.err.contains("stdin line 3: it is not JSON"), "{}", ran.err);
    assert_eq!(ran.err_json()["error"]["code"], "invalid");
}

#[test]
fn hostile_lines_are_reported_one_by_one() {
    let dir = dir();
    let long_id = "x".repeat(256);
    let lines: Vec<Vec<u8>> = vec![
        br#"{"event_id":"fine"}"#.to_vec(),
        br#"{"event_id":"  "}"#.to_vec(),
        br#"{"event_id":""}"#.to_vec(),
        br#"{"event_id":"a\u0000"}"#.to_vec(),
        format!(r#"{{"event_id":"{long_id}"}}"#).into_bytes(),
        br#"{"event_id":1e400}"#.to_vec(),
        br#"{"event_id":0.5}"#.to_vec(),
        br#"{"event_id":{"$oid":"x"}}"#.to_vec(),
        b"{\"event_id\":\"\xff\"}".to_vec(),
        b"\x00".to_vec(),
        b"{\"event_id\":\"a\tb\"}".to_vec(),
        br#"{"event_id":null}"#.to_vec(),
        br#"{"event_id":"\ud800"}"#.to_vec(),
        br#"{"event_id":"last"}"#.to_vec(),
    ];
    let input = lines.join(&b'\n');
    let ran = run_with(dir.path(), &["filter", "--broken-to", "bad"], &input).code(0);
    assert_eq!(ids(&ran.out), ["fine", "last"]);
    for number in 2..=13 {
        assert!(ran.err.contains(&format!("stdin line {number}: ")), "{number}: {}", ran.err);
    }
    assert!(!ran.err.contains('\0'));
    let bad = std::fs::read(dir.path().join("bad")).unwrap();
    assert_eq!(bad, [lines[1..13].join(&b'\n'), b"\n".to_vec()].concat());
}

#[test]
fn overlong_lines_are_broken_and_kept_whole() {
    let dir = dir();
    let long = format!(r#"{{"event_id":"l","pad":"{}"}}"#, "x".repeat(3_000_000));
    let input = format!("{{\"event_id\":\"a\"}}\n{long}\n{{\"event_id\":\"b\"}}\n{long}");
    let args = ["filter", "--line-bytes-max", "1000", "--broken-to", "bad"];
    let ran = run_with(dir.path(), &args, input.as_bytes()).code(0);
    assert_eq!(ids(&ran.out), ["a", "b"]);
    assert!(
        ran.err.contains("line 2: it is longer than 1000 bytes") && ran.err.contains("line 4: "),
        "{}",
        ran.err
    );
    assert!(ran.err.contains("4 lines: 2 first, 0 duplicates, 2 broken"), "{}", ran.err);
    assert_eq!(std::fs::read_to_string(dir.path().join("bad")).unwrap(), format!("{long}\n{long}"));
    let ran = run_with(dir.path(), &["filter", "--line-bytes-max", "1000"], input.as_bytes()).code(4);
    assert_eq!(ids(&ran.out), ["a"]);
}

#[test]
fn lines_longer_than_a_read_pass() {
    let dir = dir();
    let long = format!("{{\"event_id\":\"l\",\"pad\":\"{}\"}}\n", "x".repeat(3_000_000));
    let ran = run_with(dir.path(), &["filter"], long.repeat(2).as_bytes()).code(0);
    assert_eq!(ran.out, long);
}

#[test]
fn windows() {
    let dir = dir();
    let lines =
        |ids: &[&str]| ids.iter().map(|id| format!("{{\"event_id\":\"{id}\"}}\n")).collect::<String>();
    let ran =
        run_with(dir.path(), &["filter", "--window", "2"], lines(&["a", "b", "a", "c", "a"]).as_bytes())
            .code(0);
    assert_eq!(ids(&ran.out), ["a", "b", "c", "a"]);
    let timed = "{\"event_id\":\"a\",\"t\":\"2026-01-01T00:00:00Z\"}\n{\"event_id\":\"a\",\"t\":\"2026-01-01T01:00:00Z\"}\n\
                 {\"event_id\":\"b\",\"t\":\"2026-01-02T00:00:01Z\"}\n{\"event_id\":\"a\",\"t\":\"2026-01-02T00:00:02Z\"}\n";
    let ran = run_with(dir.path(), &["filter", "--window", "24h", "--time", "/t"], timed.as_bytes()).code(0);
    assert_eq!(ids(&ran.out), ["a", "b", "a"]);
    let ran = run_with(dir.path(), &["filter", "--window", "24h", "--time", "/x"], timed.as_bytes()).code(4);
    assert!(ran.err.contains("line 1: it has no time at /x"), "{}", ran.err);
}

#[test]
fn usage_mistakes_are_exit_2() {
    let dir = dir();
    for args in [
        &["filter", "--id", "event_id"][..],
        &["filter", "--id", "offset"],
        &["filter", "--window", "0"],
        &["filter", "--window", "24h"],
        &["filter", "--window", "10", "--time", "/t"],
        &["filter", "--time", "/t"],
        &["filter", "--window", "5", "--state", "s"],
        &["filter", "--scope", " "],
        &["filter", "--show", "both"],
        &["filter", "/no/such/file"],
        &["filter", "--broken-to", "/no/such/folder/file"],
        &["nonsense"],
        &[],
    ] {
        let ran = run(dir.path(), args).code(2);
        assert!(!ran.err.is_empty() && ran.out.is_empty(), "{args:?}");
    }
    let ran = run(dir.path(), &["filter", "--json", "--show", "both"]).code(2);
    assert_eq!(ran.err_json()["error"]["code"], "usage");
}

#[test]
fn lines_come_out_while_the_input_is_still_open() {
    let dir = dir();
    let mut child = hapax(dir.path(), &["filter"]).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let line = b"{\"event_id\":\"now\"}\n";
    stdin.write_all(line).unwrap();
    let mut got = vec![0; line.len()];
    child.stdout.as_mut().unwrap().read_exact(&mut got).unwrap();
    assert_eq!(got, line);
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    let dir = dir();
    std::fs::write(dir.path().join("in"), events(50_000, 1)).unwrap();
    let mut child = hapax(dir.path(), &["filter", "in"]).spawn().unwrap();
    let mut some = [0; 100];
    child.stdout.take().unwrap().read_exact(&mut some).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[cfg(unix)]
#[test]
fn signals_have_their_codes() {
    let dir = dir();
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut child = hapax(dir.path(), &["filter"]).stdin(Stdio::piped()).spawn().unwrap();
        // A line through it shows that it is up.
        let mut stdin = child.stdin.take().unwrap(); // `wait` would close it, and the end of input is not a signal
        stdin.write_all(b"{\"event_id\":1}\n").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 15]).unwrap();
        let id = child.id().to_string();
        assert!(std::process::Command::new("kill").args([signal, &id]).status().unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(code));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_a_sentence() {
    let dir = dir();
    let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
    std::fs::write(dir.path().join("in"), events(10, 1)).unwrap();
    let child = hapax(dir.path(), &["filter", "in"]).stdout(full).spawn().unwrap();
    let ran = common::Ran::from(child.wait_with_output().unwrap()).code(3);
    assert!(ran.err.contains("standard output cannot be written"), "{}", ran.err);
}

#[test]
fn the_sample_has_duplicates() {
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../samples/events.jsonl");
    let ran = run(dir().path(), &["filter", "--id", "/event_id", "--json", sample]).code(0);
    let counts = ran.err_json();
    assert_eq!((counts["read"].as_u64(), counts["duplicates"].as_u64()), (Some(42), Some(12)));
}
