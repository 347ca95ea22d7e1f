//! What someone meets who uses `hapax` for the first time: help, mistakes in names, places that are not there, small terminals.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use crate::common::consume::{Sample, consume, count, effects, entry, produce};
use crate::common::{Ran, hapax, run, run_with};
use serde_json::json;

fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// A command and all below it, as `--help` names them.
fn commands(dir: &Path, above: &[String]) -> Vec<Vec<String>> {
    let args: Vec<_> = above.iter().map(String::as_str).chain(["--help"]).collect();
    let help = run(dir, &args).code(0).out;
    let list =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    let names = list.filter_map(|line| line.strip_prefix("  ").filter(|line| !line.starts_with(' ')));
    let below = names.filter_map(|line| line.split(' ').next()).filter(|name| *name != "help");
    let below = below.flat_map(|name| commands(dir, &[above, &[name.to_owned()]].concat()));
    std::iter::once(above.to_vec()).chain(below).collect()
}

#[test]
fn e_own_options_come_first_and_the_long_help_appears() {
    let dir = dir();
    for (command, own, long) in [
        ("consume", "--topic", "what fails is retried with growing pauses"),
        ("filter", "--id", "Ids are compared as whole texts"),
        ("produce", "--topic", "kept over retries"),
    ] {
        let help = run(dir.path(), &[command, "--help"]).code(0).out;
        let flat = help.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(flat.contains(long), "{help}");
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("{command} has no {text:?}: {help}"));
        assert!(
            at(&format!("  {own} <")) < at("Global options:") && at("Global options:") < at("  --config <"),
            "{help}"
        );
        // The short one stays short, and says the same of what it is for.
        let short = run(dir.path(), &[command, "-h"]).code(0).out;
        assert!(short.len() < help.len() && short.lines().next() == help.lines().next(), "{short}");
    }
    let all = run(dir.path(), &["--help"]).code(0).out;
    assert!(
        all.contains("Run a handler for every event of a topic")
            && all.contains("Let only first occurrences")
    );
}

#[test]
fn e_filter_offers_only_what_it_takes() {
    let dir = dir();
    let help = run(dir.path(), &["filter", "--help"]).code(0).out;
    for flag in ["--ledger", "--journal", "--bus", "--data"] {
        assert!(!help.lines().any(|line| line.trim().starts_with(flag)), "{flag}: {help}");
        let ran = run(dir.path(), &["filter", flag, "x"]).code(2);
        assert!(ran.err.contains(flag) && ran.err.contains("--state FILE"), "{}", ran.err);
    }
}

#[test]
fn e_at_60_columns_everything_fits() {
    let dir = dir();
    let narrow =
        |args: &[&str]| -> Ran { hapax(dir.path(), args).env("COLUMNS", "60").output().unwrap().into() };
    let commands = commands(dir.path(), &[]);
    assert!(commands.contains(&vec!["journal".to_owned(), "append".to_owned()]), "{commands:?}");
    for command in commands {
        let args: Vec<_> = command.iter().map(String::as_str).chain(["--help"]).collect();
        let (help, command) = (narrow(&args), command.join(" "));
        assert_eq!(help.code, Some(0), "{command}: {}", help.err);
        let usage = help
            .out
            .lines()
            .skip_while(|line| !line.starts_with("Usage:"))
            .take_while(|line| !line.is_empty());
        for line in usage {
            assert!(line.chars().count() <= 60, "{command}: {line:?} has {} columns", line.chars().count());
        }
    }
    let shown = narrow(&["config", "show"]).code(0).out;
    for line in shown.lines() {
        assert!(line.chars().count() <= 60, "{line:?}");
    }
    // One long value widens no other row.
    let wide =
        run(dir.path(), &["config", "show", "--set", &format!("telemetry.prefix={}", "x".repeat(200))])
            .code(0)
            .out;
    let others = wide.lines().filter(|line| !line.contains("xxx")).map(|line| line.chars().count()).max();
    assert!(others.is_some_and(|others| others < 200), "{others:?}");
}

#[test]
fn e_a_misspelt_name_is_reported_with_the_right_one_and_the_list_is_there() {
    let dir = dir();
    let ran: Ran =
        hapax(dir.path(), &["config", "show"]).env("HAPAX_LEDGER_URI", "x").output().unwrap().into();
    let ran = ran.code(2);
    assert!(ran.err.contains("did you mean HAPAX_LEDGER_URL?"), "{}", ran.err);
    assert!(
        ran.out.contains("HAPAX_LEDGER_URL") && ran.out.contains("HAPAX_TELEMETRY_PREFIX"),
        "{}",
        ran.out
    );
    let ran = run(dir.path(), &["config", "show", "--set", "ledger.ulr=x"]).code(2);
    assert!(ran.err.contains("did you mean ledger.url?") && ran.err.len() < 200, "{}", ran.err);
    assert!(ran.out.contains("ledger.url"), "{}", ran.out);
    std::fs::write(dir.path().join("bad.toml"), "[retry]\nattempts_max = 3\n[ledger]\nurl =\n").unwrap();
    let ran = run(dir.path(), &["config", "show", "--config", "bad.toml"]).code(2);
    assert!(ran.err.contains("bad.toml line 4: "), "{}", ran.err);
    // Any other command only says what is wrong.
    let ran: Ran =
        hapax(dir.path(), &["ledger", "stat"]).env("HAPAX_LEDGER_URI", "x").output().unwrap().into();
    assert!(ran.code(2).out.is_empty());
}

#[test]
fn e_what_is_no_ledger_is_refused_by_the_configuration() {
    let dir = dir();
    std::fs::write(dir.path().join("five.toml"), "[ledger]\nurl = 5\n").unwrap();
    for args in [&["--config", "five.toml"][..], &["--ledger", "mysql://app:s3cret@db/x"]] {
        let ran = run(dir.path(), &[&["config", "show"], args].concat()).code(2);
        assert!(ran.err.contains("takes memory:, sqlite:FILE") && !ran.err.contains("s3cret"), "{}", ran.err);
    }
}

#[test]
fn e_defaults_are_shown_with_their_meaning() {
    let dir = dir();
    let shown = run(dir.path(), &["config", "show"]).code(0).out;
    let row = |key: &str| shown.lines().find(|line| line.starts_with(key)).unwrap();
    assert!(row("ledger.url").contains("sqlite:hapax-data/ledger.db"), "{shown}");
    assert!(row("lease.owner").contains("(host and process)"), "{shown}");
    assert!(row("consumer.dead_topic").contains("(<topic>.dead)"), "{shown}");
    assert!(row("window.url").contains("(none)"), "{shown}");
    let bare = shown.lines().filter(|line| line.split_whitespace().nth(1) == Some("-")).count();
    assert_eq!(bare, 0, "{shown}");
}

#[test]
fn e_a_missing_topic_is_reported_with_its_bus_and_nothing_is_made() {
    let dir = dir();
    let consume = ["consume", "--topic", "t", "--scope", "s", "--exec", "cat"];
    for args in [
        &consume[..],
        &["produce", "--topic", "t"],
        &["relay", "run", "--topic", "t", "--once"],
        &["consume", "--bus", "embedded:mine.db", "--topic", "t", "--scope", "s", "--exec", "cat"],
    ] {
        let ran = run(dir.path(), args).code(2);
        assert!(ran.err.contains("there is no topic t on the bus embedded"), "{}", ran.err);
        assert!(ran.err.contains(".db)") && ran.err.contains("--create PARTITIONS"), "{}", ran.err);
        assert!(names(dir.path()).is_empty(), "{args:?} left {:?}", names(dir.path()));
    }
    produce(dir.path(), "{}\n");
    let ran = run(dir.path(), &consume).code(2);
    assert!(
        ran.err.contains(
            "there is no topic t on the bus embedded (hapax-data/bus.db); `hapax produce --topic t --create"
        ),
        "{}",
        ran.err
    );
    assert_eq!(
        names(&dir.path().join("hapax-data")).iter().filter(|name| name.starts_with("ledger")).count(),
        0
    );
}

#[test]
fn e_directories_are_not_made_by_a_mistake_in_a_name() {
    let dir = dir();
    for args in [
        &["ledger", "init", "--ledger", "sqlite:nowhere/x.db"][..],
        &["produce", "--bus", "embedded:nowhere/x.db", "--topic", "t", "--create", "1"],
        &["journal", "append", "--journal", "sqlite:nowhere/x.db", "--aggregate", "a"],
        &["journal", "append", "--journal", "dir:nowhere/x", "--aggregate", "a"],
    ] {
        let ran = run(dir.path(), args).code(2);
        assert!(ran.err.contains("there is no directory nowhere for the"), "{}", ran.err);
        assert!(names(dir.path()).is_empty(), "{args:?}");
    }
    // The directory that is there for that is made.
    run(dir.path(), &["ledger", "init", "--data", "deep/er"]).code(0);
    assert!(dir.path().join("deep/er/ledger.db").is_file());
}

#[test]
fn e_one_is_not_many_and_ranges_are_words() {
    let dir = dir();
    let ran = run_with(dir.path(), &["filter"], b"{\"event_id\":1}\n{\"event_id\":1}\n").code(0);
    assert!(ran.err.contains("2 lines: 1 first, 1 duplicate\n"), "{}", ran.err);
    let ran = run_with(dir.path(), &["filter", "--line-bytes-max", "1"], b"{}\n").code(4);
    assert!(ran.err.contains("line 1: it is longer than 1 byte"), "{}", ran.err);
    assert!(!ran.err.contains("1 bytes"), "{}", ran.err);
    let ran = run_with(dir.path(), &["produce", "--topic", "t", "--create", "1"], b"{}\n").code(0);
    assert!(ran.err.contains("1 line published to t, 1 id made"), "{}", ran.err);
    for count in ["0", "10001", "x"] {
        let ran = run(dir.path(), &["produce", "--topic", "t", "--create", count]).code(2);
        assert!(ran.err.contains("a topic has 1 to 10000 partitions"), "{}", ran.err);
    }
    for count in ["0", "x"] {
        let ran = run(dir.path(), &["id", "make", "--count", count]).code(2);
        assert!(ran.out.is_empty() && ran.err.contains("at least 1"), "{}", ran.err);
    }
    for (args, range) in [
        ("keys ls --limit", "1 to 10000"),
        ("stats --days", "1 to 400"),
        ("plan --rate", "1 to 10000000"),
        ("plan --rate 1 --id-bytes", "1 to 1020"),
        ("query records --module m --limit", "1 to 1000"),
        ("demo --events", "200 to 200000"),
        ("keys resolve k --reason r --answer", "200 to 599"),
        ("audit ls --limit", "1 to 1000"),
    ] {
        for number in ["0", "99999999", "x"] {
            let args: Vec<_> = args.split(' ').chain([number]).collect();
            let ran = run(dir.path(), &args).code(2);
            let said = format!("invalid value '{number}' for");
            assert!(
                ran.err.contains(&format!("it must be {range}")) && ran.err.contains(&said),
                "{}",
                ran.err
            );
        }
    }
    run(dir.path(), &["ledger", "init"]).code(0);
    let stdout = run(dir.path(), &["doctor", "--topic", "t"]).code(0).out;
    assert!(!stdout.contains("604800s"), "{stdout}");
    assert!(stdout.contains("7 days"), "{stdout}");
}

#[test]
fn e_a_byte_order_mark_is_no_part_of_a_line() {
    let dir = dir();
    let lines = b"\xef\xbb\xbf{\"event_id\":\"a\"}\n\xef\xbb\xbf{\"event_id\":\"b\"}\n";
    let ran = run_with(dir.path(), &["produce", "--topic", "t", "--create", "1", "--json"], lines).code(0);
    assert_eq!((&ran.json()["published"], &ran.json()["ids_made"]), (&2.into(), &0.into()));
    let ran = run_with(dir.path(), &["journal", "append", "--aggregate", "x", "--json"], lines).code(0);
    let appended: Vec<serde_json::Value> =
        ran.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let seen: Vec<_> = appended.iter().map(|one| (&one["id"], &one["seq"], &one["placing"])).collect();
    assert_eq!(
        seen,
        [(&json!("a"), &json!(1), &json!("new")), (&json!("b"), &json!(2), &json!("new"))],
        "{}",
        ran.out
    );
    let read = run(dir.path(), &["journal", "read", "--payload", "--json"]).code(0).out;
    assert!(!read.contains('\u{feff}') && !read.to_lowercase().contains("ufeff"), "{read}");
    let ran = run_with(dir.path(), &["filter"], &lines.repeat(2)).code(0);
    assert_eq!(ran.out, "{\"event_id\":\"a\"}\n{\"event_id\":\"b\"}\n");
}

#[test]
fn t98_looking_at_a_journal_makes_none() {
    let dir = dir();
    for args in [
        &["journal", "stat"][..],
        &["journal", "read"],
        &["journal", "sweep", "--older-than", "1d", "--yes"],
        &["journal", "archive", "--to", "dir:archive", "--older-than", "1d", "--yes"],
        &["relay", "status"],
        &["relay", "resume", "--all"],
        &["relay", "rewind", "--to", "0", "--yes"],
        &["relay", "forget", "--name", "r", "--yes"],
        &["relay", "status", "--data", "nowhere/deep/er"],
        &["journal", "stat", "--journal", "dir:nowhere/x"],
        &["journal", "stat", "--journal", "sqlite:x.db"],
    ] {
        let ran = run(dir.path(), args).code(3);
        assert!(ran.err.contains("there is no journal at "), "{args:?}: {}", ran.err);
        assert!(names(dir.path()).is_empty(), "{args:?} left {:?}", names(dir.path()));
    }
    // A directory that is there and empty stays empty.
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    run(dir.path(), &["journal", "stat", "--journal", "dir:empty"]).code(3);
    assert!(names(&dir.path().join("empty")).is_empty());
    // What the hint says works.
    let hint = run(dir.path(), &["--data", "mine", "journal", "stat"]).code(3).err;
    assert!(hint.contains("`hapax --data mine journal append` makes one"), "{hint}");
    let append = ["--data", "mine", "journal", "append", "--aggregate", "a"];
    let ran = run_with(dir.path(), &append, b"{\"event_id\":\"a\"}\n").code(0);
    assert!(ran.err.contains("1 appended, 0 were there before, 0 kept as they were"), "{}", ran.err);
    let ran = run_with(dir.path(), &append, b"{\"event_id\":\"a\"}\n").code(0);
    assert!(ran.err.contains("0 appended, 1 was there before"), "{}", ran.err);
    run(dir.path(), &["--data", "mine", "journal", "stat"]).code(0);
    run(dir.path(), &["--data", "mine", "relay", "status"]).code(0);
    let archive =
        ["--data", "mine", "journal", "archive", "--older-than", "1d", "--yes", "--to", "dir:nowhere/x"];
    let ran = run(dir.path(), &archive).code(2);
    assert!(ran.err.contains("there is no directory nowhere for the archive"), "{}", ran.err);
    assert!(!dir.path().join("nowhere").exists());
}

#[test]
fn t98_a_hint_repeats_the_flags_that_were_given() {
    let dir = dir();
    let consume = ["consume", "--topic", "t", "--scope", "s", "--exec", "cat", "--data", "my data"];
    let ran = run(dir.path(), &consume).code(2);
    assert!(
        ran.err.contains("`hapax --data 'my data' produce --topic t --create PARTITIONS` makes it"),
        "{}",
        ran.err
    );
    let ran = run(dir.path(), &["ledger", "stat", "--ledger", "sqlite:mine.db"]).code(3);
    assert!(ran.err.contains("`hapax --ledger sqlite:mine.db ledger init` makes one"), "{}", ran.err);
    // The doctor says the same as the others.
    run(dir.path(), &["ledger", "init", "--data", "y"]).code(0);
    let stdout = run(dir.path(), &["doctor", "--data", "y", "--topic", "t"]).code(3).out;
    assert!(
        stdout.contains("`hapax --data y produce --topic TOPIC --create PARTITIONS` makes one"),
        "{stdout}"
    );
    run(dir.path(), &["produce", "--data", "y", "--topic", "other", "--create", "1"]).code(0);
    let stdout = run(dir.path(), &["doctor", "--data", "y", "--topic", "t", "--topic", "other"]).code(1).out;
    assert!(
        stdout.contains(
            "there is no topic t on the bus embedded (y/bus.db); `hapax --data y produce --topic t"
        ),
        "{stdout}"
    );
    assert!(stdout.contains("other keeps records"), "the other topic is looked at: {stdout}");
}

#[test]
fn t98_ids_are_made_without_places() {
    let dir = dir();
    for args in [
        &["id", "make", "--ledger", "mysql://nope"][..],
        &["id", "--bus", "zzz", "make"],
        &["id", "inspect", "--data", "d", "a"],
    ] {
        let ran = run(dir.path(), args).code(2);
        assert!(ran.err.contains("--"), "{}", ran.err);
        assert!(ran.out.is_empty(), "{}", ran.out);
    }
    let help = run(dir.path(), &["id", "make", "--help"]).code(0).out;
    assert!(!help.contains("--ledger") && help.contains("--json"), "{help}");
}

#[test]
fn t98_at_60_columns_tables_keep_their_columns() {
    let dir = dir();
    let dir = dir.path();
    let narrow = |args: &[&str]| {
        let ran: Ran = hapax(dir, args).env("COLUMNS", "60").output().unwrap().into();
        let out = ran.code(0).out;
        for line in out.lines() {
            assert!(line.chars().count() <= 60, "{line:?} of {args:?}");
        }
        out
    };
    let ids = ["0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10".to_owned(), "x".repeat(90)];
    let lines = ids.each_ref().map(|id| format!("{{\"event_id\":\"{id}\"}}\n")).concat();
    produce(dir, &lines);
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    assert_eq!(count(&consume(dir, &command, &[]).code(0), "done"), 2);
    let shown = narrow(&["ledger", "ls"]);
    let (head, row) = (shown.lines().next().unwrap(), shown.lines().find(|l| l.contains(&ids[0])).unwrap());
    for (name, cell) in [("scope", "mailer"), ("id", ids[0].as_str()), ("state", "done")] {
        assert_eq!(head.find(name), row.find(cell), "{shown}");
    }
    let shown = narrow(&["id", "inspect", &ids[0], &ids[1]]);
    let (head, row) = (shown.lines().next().unwrap(), shown.lines().find(|l| l.contains(&ids[0])).unwrap());
    assert_eq!(head.find("kind"), row.find("uuid v7"), "{shown}");
    run_with(dir, &["journal", "append", "--aggregate", "order-17"], lines.as_bytes()).code(0);
    let shown = narrow(&["journal", "read"]);
    assert!(shown.starts_with("position  aggregate  seq"), "{shown}");
}

/// Every mistake at once, and what is in force beside them.
#[test]
fn t98_a_broken_configuration_is_shown_as_it_is() {
    let dir = dir();
    let args = ["config", "show", "--data", "d", "--set", "ledger.ulr=x", "--set", "nothing"];
    let ran: Ran = hapax(dir.path(), &args).env("HAPAX_BUS", "x").output().unwrap().into();
    let ran = ran.code(2);
    for expected in
        ["did you mean ledger.url?", "--set \"nothing\" is not KEY=VALUE", "did you mean HAPAX_BUS_URL?"]
    {
        assert!(ran.err.contains(expected), "{expected}: {}", ran.err);
    }
    let row = |key: &str| ran.out.lines().find(|line| line.starts_with(key)).unwrap();
    assert!(row("data.dir").contains("flag --data"), "{}", ran.out);
    assert!(row("ledger.url").contains("sqlite:d/ledger.db"), "{}", ran.out);
    assert!(row("journal.url").contains("sqlite:d/journal.db"), "{}", ran.out);
    let ran = run(dir.path(), &["config", "show", "--data", "d", "--config", "none.toml"]).code(2);
    assert!(ran.err.contains("none.toml cannot be read") && ran.out.contains("flag --data"), "{}", ran.out);
}

/// Key and tombstone are kept with what waits in the ledger.
#[test]
fn t98_a_handler_can_delete_by_key_after_a_retry_and_a_redrive() {
    let dir = dir();
    let dir = dir.path();
    run(dir, &["produce", "--topic", "orders", "--create", "1"]).code(0);
    delete_order_1(dir);
    let script = "import json, os, sys\nfor line in sys.stdin:\n    r = json.loads(line)\n    e = r['event']\n    \
                  open('effects', 'a').write(json.dumps([r['id'], e['record_key'], e['tombstone'], e['payload']]) + '\\n')\n    \
                  done = {'done': True} if os.path.exists('works') else {'retry': True, 'error': 'not yet'}\n    \
                  print(json.dumps({'id': r['id'], 'token': r['token'], **done}), flush=True)\n";
    std::fs::write(dir.join("plain.py"), script).unwrap();
    // Retries wait in the ledger with their bytes; the second failure is the last.
    let held = ["--set", "consumer.hold_ms_max=0", "--set", "retry.attempts_max=2"];
    let ran = consume(dir, "python3 plain.py", &held).code(0);
    assert_eq!(entry(dir, "c")["state"], "dead", "{} {}", ran.out, ran.err);
    std::fs::write(dir.join("works"), "").unwrap();
    run(dir, &["dead", "redrive", "--scope", "mailer", "--reason", "fixed", "--yes", "c"]).code(0);
    consume(dir, "python3 plain.py", &held).code(0);
    assert_eq!(entry(dir, "c")["state"], "done");
    let seen: Vec<serde_json::Value> =
        effects(dir).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(seen, vec![json!(["c", "order-1", true, null]); 3], "first run, retry, redrive");
}

fn delete_order_1(dir: &Path) {
    let file = dir.join("hapax-data/bus.db");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        use hapax::bus::{Bus as _, Record, embedded::EmbeddedBus};
        let record = Record {
            key: Some("order-1".into()),
            headers: [("eventId".to_owned(), "c".to_owned())].into_iter().collect(),
            ..Record::default()
        };
        let topic = hapax::Topic::new("orders").unwrap();
        let sent = EmbeddedBus::open(file).unwrap().publish(&topic, &[record]).await.unwrap();
        assert!(sent.iter().all(Result::is_ok));
    });
}

/// A record without a payload deletes what stands under its key: a handler is told the key, and that there is no payload.
#[test]
fn e_a_handler_can_delete_by_key() {
    let dir = dir();
    let dir = dir.path();
    run(dir, &["produce", "--topic", "orders", "--create", "1"]).code(0);
    let file = dir.join("hapax-data/bus.db");
    tokio::runtime::Runtime::new().unwrap().block_on(async {
        use hapax::bus::{Bus as _, Record, embedded::EmbeddedBus};
        let bus = EmbeddedBus::open(file).unwrap();
        let record = |id: &str, key: &'static str, payload: Option<&'static str>| Record {
            key: Some(key.into()),
            payload: payload.map(Into::into),
            headers: [("eventId".to_owned(), id.to_owned())].into_iter().collect(),
            ..Record::default()
        };
        let records = [
            record("a", "order-1", Some("{\"n\":1}")),
            record("b", "order-2", Some("")),
            record("c", "order-1", None),
        ];
        let topic = hapax::Topic::new("orders").unwrap();
        assert!(bus.publish(&topic, &records).await.unwrap().iter().all(Result::is_ok));
    });
    let script = "import json, sys\nfor line in sys.stdin:\n    r = json.loads(line)\n    e = r['event']\n    \
                  open('effects', 'a').write(json.dumps([r['id'], e['record_key'], e['tombstone'], e['payload']]) + '\\n')\n    \
                  print(json.dumps({'id': r['id'], 'token': r['token'], 'done': True}), flush=True)\n";
    std::fs::write(dir.join("plain.py"), script).unwrap();
    let ran = consume(dir, "python3 plain.py", &[]).code(0);
    assert_eq!(count(&ran, "done"), 3, "{} {}", ran.out, ran.err);
    let seen: Vec<serde_json::Value> =
        effects(dir).iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    for wanted in [
        json!(["a", "order-1", false, {"n": 1}]),
        json!(["b", "order-2", false, ""]),
        json!(["c", "order-1", true, null]),
    ] {
        assert!(seen.contains(&wanted), "{wanted}: {seen:?}");
    }
}

/// A ledger or a journal that is made in the bus's file by mistake would lock the bus out.
#[test]
fn t87_a_bus_keeps_its_file() {
    let dir = dir();
    let dir = dir.path();
    produce(dir, "{\"event_id\":\"a\"}\n");
    for (args, what) in [
        (&["ledger", "init", "--ledger", "sqlite:hapax-data/bus.db"][..], "ledger"),
        (&["journal", "append", "--journal", "sqlite:hapax-data/bus.db", "--aggregate", "x"], "journal"),
    ] {
        let ran = run(dir, args).code(2);
        assert!(
            ran.err.contains(&format!("this file holds a bus; the {what} needs a file of its own")),
            "{}",
            ran.err
        );
    }
    produce(dir, "{\"event_id\":\"b\"}\n");
    let command = Sample::Python.handler(dir, "effect(request['id'])");
    let ran = consume(dir, &command, &[]).code(0);
    assert_eq!(count(&ran, "done"), 2, "{}", ran.err);
    // And the other way round, as before.
    assert_eq!(entry(dir, "a")["state"], "done");
    let ran =
        run(dir, &["produce", "--bus", "embedded:hapax-data/ledger.db", "--topic", "t", "--create", "1"])
            .code(2);
    assert!(ran.err.contains("this file holds a ledger"), "{}", ran.err);
    assert_eq!(entry(dir, "b")["state"], "done", "the ledger is as it was");
}

/// A line that the bus does not take is named, and what stands behind it is not published.
#[test]
fn t87_a_line_that_is_too_large_is_named_and_nothing_behind_it_is_published() {
    let dir = dir();
    let large = format!("{{\"event_id\":\"large\",\"pad\":\"{}\"}}", "x".repeat(1024 * 1024 - 100));
    let lines =
        format!("{{\"event_id\":\"a\"}}\n\n{large}\n{{\"event_id\":\"b\"}}\n{{\"event_id\":\"c\"}}\n");
    let args = [
        "produce",
        "--topic",
        "orders",
        "--create",
        "1",
        "--json",
        "--header",
        &format!("h={}", "y".repeat(200)),
    ];
    let ran = run_with(dir.path(), &args, lines.as_bytes()).code(4);
    assert!(ran.err.contains("hapax: line 3: record is invalid: it has "), "{}", ran.err);
    assert_eq!(ran.json()["published"], 1);
    let command = Sample::Python.handler(dir.path(), "effect(request['id'])");
    assert_eq!(count(&consume(dir.path(), &command, &[]).code(0), "done"), 1);
    assert_eq!(effects(dir.path()), ["a"]);
}

/// There is no release yet, so the README must not tell to take one.
#[test]
fn e_the_readme_adds_hapax_in_a_way_that_resolves() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().unwrap();
    let readme = std::fs::read_to_string(root.join("README.md")).unwrap();
    let add = readme.lines().find(|line| line.starts_with("cargo add hapax")).unwrap();
    let dir = dir();
    std::fs::write(dir.path().join("Cargo.toml"), "[package]\nname = \"mine\"\nedition = \"2024\"\n")
        .unwrap();
    std::fs::create_dir(dir.path().join("src")).unwrap();
    std::fs::write(dir.path().join("src/lib.rs"), "").unwrap();
    let add = format!("{} --offline", add.replace("../hapax", root.to_str().unwrap()));
    let ran = std::process::Command::new("sh").args(["-c", &add]).current_dir(dir.path()).output().unwrap();
    assert!(ran.status.success(), "{add}: {}", String::from_utf8_lossy(&ran.stderr));
    assert!(std::fs::read_to_string(dir.path().join("Cargo.toml")).unwrap().contains("postgres"));
}

/// The handler in the docs is a whole one.
#[test]
fn e_the_handler_of_the_docs_works() {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/handlers.md");
    let docs = std::fs::read_to_string(docs).unwrap();
    let script = docs.split("```python\n").nth(1).unwrap().split("```").next().unwrap();
    let script: Vec<_> = script.lines().map(|line| line.strip_prefix("  ").unwrap_or(line)).collect();
    let dir = dir();
    std::fs::write(dir.path().join("handler.py"), script.join("\n")).unwrap();
    produce(dir.path(), "{\"event_id\":\"a\"}\n{\"event_id\":\"b\"}\n");
    let ran = consume(dir.path(), "python3 handler.py", &[]).code(0);
    assert_eq!(count(&ran, "done"), 2, "{} {}", ran.out, ran.err);
    assert_eq!(ran.err.matches("mail for").count(), 2, "{}", ran.err);
}
