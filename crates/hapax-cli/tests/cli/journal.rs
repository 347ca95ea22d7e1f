//! `hapax journal` and `hapax relay`: append, read, publish, send back, with no server.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

use crate::common;
use std::path::Path;

use crate::common::{Ran, run};

/// Writes JSON Lines into the folder and gives the file's name.
fn lines(dir: &Path, name: &str, lines: &[&str]) -> String {
    std::fs::write(dir.join(name), lines.join("\n")).unwrap();
    name.to_owned()
}

/// Three events of two orders.
fn orders(dir: &Path) -> String {
    let file = [
        r#"{"event_id":"a","order":"o-1","type":"placed","time":"2026-01-02T03:04:05Z"}"#,
        r#"{"event_id":"b","order":"o-2","type":"placed","time":"2026-01-02T03:04:06Z"}"#,
        r#"{"event_id":"c","order":"o-1","type":"paid","time":"2026-01-02T03:04:07Z"}"#,
    ];
    lines(dir, "orders.jsonl", &file)
}

fn append(dir: &Path, file: &str) -> Ran {
    let places = ["--aggregate-at", "/order", "--kind-at", "/type", "--time-at", "/time"];
    run(dir, &[&["--json", "journal", "append"], &places[..], &[file]].concat())
}

/// A field of each line.
fn field(ran: &Ran, name: &str) -> Vec<String> {
    let values = ran.out.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    values.map(|value| value[name].to_string().trim_matches('"').to_owned()).collect()
}

#[test]
fn events_are_numbered_once_and_read_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let file = orders(dir);
    let first = append(dir, &file).code(0);
    assert_eq!(field(&first, "seq"), ["1", "1", "2"]);
    assert_eq!(field(&first, "placing"), ["new", "new", "new"]);
    let again = append(dir, &file).code(0);
    assert_eq!(field(&again, "seq"), ["1", "1", "2"]);
    assert_eq!(field(&again, "placing"), ["repeat", "repeat", "repeat"]);
    let order = run(dir, &["--json", "journal", "read", "--aggregate", "o-1"]).code(0);
    assert_eq!(
        (field(&order, "id"), field(&order, "kind")),
        (vec!["a".into(), "c".into()], vec!["placed".into(), "paid".into()])
    );
    assert_eq!(
        field(&run(dir, &["--json", "journal", "read", "--aggregate", "o-1", "--from", "2"]).code(0), "id"),
        ["c"]
    );
    assert_eq!(
        field(&run(dir, &["--json", "journal", "read", "--after", "1", "--limit", "1"]).code(0), "id"),
        ["b"]
    );
    let shown = run(dir, &["journal", "read", "--id", "b", "--payload"]).code(0);
    assert!(
        shown.out.contains("o-2        1    placed  b") && shown.out.contains(r#""order":"o-2""#),
        "{}",
        shown.out
    );
    assert!(!run(dir, &["journal", "read"]).code(0).out.contains("event_id"), "payloads only when asked for");
    let stat = run(dir, &["--json", "journal", "stat"]).code(0).json();
    assert_eq!((stat["events"].as_u64(), stat["aggregates"].as_u64()), (Some(3), Some(2)), "{stat}");
}

#[test]
fn what_is_not_as_expected_is_refused_with_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &orders(dir)).code(0);
    let more = lines(dir, "more.jsonl", &[r#"{"event_id":"d"}"#, r#"{"event_id":"e"}"#]);
    let at = |expected| run(dir, &["journal", "append", "--aggregate", "o-1", "--expected", expected, &more]);
    let ran = at("1").code(4);
    assert!(ran.err.contains("expected seq 1, found seq 2"), "{}", ran.err);
    let ran = at("new").code(4);
    assert!(ran.err.contains("a new aggregate"), "{}", ran.err);
    assert!(at("first").code(2).err.contains("neither a whole number"));
    at("2").code(0);
    // All lines of it are one step: a bad one leaves the others out.
    let bad = lines(dir, "bad.jsonl", &[r#"{"event_id":"f"}"#, "nonsense"]);
    let ran = run(dir, &["journal", "append", "--aggregate", "o-1", "--expected", "4", &bad]).code(4);
    assert!(ran.err.contains("line 2: it is not JSON"), "{}", ran.err);
    let reused = lines(dir, "reused.jsonl", &[r#"{"event_id":"d","other":true}"#]);
    let ran = run(dir, &["journal", "append", "--aggregate", "o-1", &reused]).code(1);
    assert!(ran.err.contains("line 1: the id was used before"), "{}", ran.err);
    let warned =
        ["--set", "journal.mismatch=warn", "--json", "journal", "append", "--aggregate", "o-1", &reused];
    assert_eq!(field(&run(dir, &warned).code(0), "placing"), ["kept"]);
    let large = lines(dir, "large.jsonl", &[&format!(r#"{{"event_id":"g","x":"{}"}}"#, "x".repeat(200))]);
    let tight = ["--set", "journal.event_bytes_max=100", "journal", "append", "--aggregate", "o-1", &large];
    assert!(run(dir, &tight).code(4).err.contains("100 are allowed"));
    let command = r#"{"event_id":"h","metadata":{"kind":"command"}}"#;
    let command = lines(dir, "command.jsonl", &[command]);
    let ran =
        run(dir, &["journal", "append", "--aggregate", "o-1", "--kind", "UPDATE_ORDER", &command]).code(4);
    assert!(ran.err.contains("must say which seq"), "{}", ran.err);
    let stat = run(dir, &["--json", "journal", "stat"]).code(0).json();
    assert_eq!(stat["events"], 5, "nothing of it was stored");
    for (journal, expected) in [
        ("memory:", "would end with this command"),
        ("tape:x", "journal.url takes"),
        ("dir:", "journal.url takes"),
    ] {
        assert!(
            run(dir, &["--journal", journal, "journal", "stat"]).code(2).err.contains(expected),
            "{journal}"
        );
    }
}

#[test]
fn a_relay_publishes_and_is_sent_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &orders(dir)).code(0);
    let ran = run(dir, &["relay", "run", "--topic", "orders", "--once"]).code(2);
    assert!(ran.err.contains("--create PARTITIONS makes it"), "{}", ran.err);
    let relay = ["--json", "relay", "run", "--topic", "orders", "--create", "2", "--once"];
    assert_eq!(run(dir, &relay).code(0).json()["published"], 3);
    assert_eq!(run(dir, &relay).code(0).json()["published"], 0, "the checkpoint is kept");
    let status = run(dir, &["--json", "relay", "status"]).code(0).json();
    assert_eq!(
        (&status["relays"][0]["left"], &status["relays"][0]["led_by"]),
        (&0.into(), &serde_json::Value::Null)
    );
    // It says how many, and asks.
    let rewind = ["--json", "relay", "rewind", "--to", "1"];
    assert_eq!(run(dir, &[&rewind[..], &["--dry-run"]].concat()).code(0).json()["published_again"], 2);
    let ran = run(dir, &rewind).code(2);
    assert!(ran.err.contains("publishes 2 events again") && ran.err.contains("--yes"), "{}", ran.err);
    assert_eq!(run(dir, &relay).code(0).json()["published"], 0, "nothing has moved");
    run(dir, &[&rewind[..], &["--yes"]].concat()).code(0);
    assert_eq!(run(dir, &relay).code(0).json()["published"], 2);
    let ran = run(dir, &["relay", "rewind", "--to", "9", "--yes"]).code(4);
    assert!(ran.err.contains("would never be published"), "{}", ran.err);
    assert!(
        run(dir, &["relay", "--name", "other", "rewind", "--to", "0", "--yes"])
            .code(4)
            .err
            .contains("this journal has no relay")
    );
    assert!(run(dir, &["relay", "resume", "o-1"]).code(4).err.contains("is not behind"));
    // The consumer reads what the relay wrote, each event once although two were published twice.
    let consume = [
        "--json",
        "consume",
        "--topic",
        "orders",
        "--scope",
        "mailer",
        "--exec",
        HANDLER,
        "--until-idle",
        "1",
    ];
    let counts = run(dir, &consume).code(0);
    assert!(counts.out.contains("\"done\":3") && counts.out.contains("\"duplicate\":2"), "{}", counts.out);
    // What every relay has published may go; numbers go on.
    assert_eq!(
        run(dir, &["--json", "journal", "sweep", "--older-than", "1ms", "--yes"]).code(0).json()["removed"],
        3
    );
    let next = lines(
        dir,
        "next.jsonl",
        &[r#"{"event_id":"z","order":"o-1","type":"x","time":"2026-01-02T03:04:05Z"}"#],
    );
    assert_eq!(field(&append(dir, &next).code(0), "seq"), ["3"]);
}

/// A name that was mistyped once holds back every sweep, until it is forgotten.
#[test]
fn a_relay_that_was_named_by_mistake_is_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &orders(dir)).code(0);
    let relay = |args: &[&str]| run(dir, &[&["relay"], args].concat());
    let topic = ["--topic", "orders", "--create", "1", "--once"];
    relay(&[&["run", "--name", "mian"], &topic[..]].concat()).code(0);
    relay(&[&["rewind", "--name", "mian", "--to", "1", "--yes"][..]].concat()).code(0);
    relay(&[&["run"], &topic[..]].concat()).code(0);
    let sweep = ["--json", "journal", "sweep", "--older-than", "1ms", "--dry-run"];
    assert_eq!(run(dir, &sweep).code(0).json()["removed"], 1);

    assert!(relay(&["forget", "--yes"]).code(2).err.contains("Give --name"));
    assert!(
        relay(&["forget", "--name", "nobody", "--yes"]).code(4).err.contains("this journal has no relay")
    );
    let asked = relay(&["forget", "--name", "mian"]).code(2);
    assert!(asked.err.contains("holds back 2 events") && asked.err.contains("--yes"), "{}", asked.err);
    assert_eq!(run(dir, &sweep).code(0).json()["removed"], 1, "nothing was changed");
    let done = run(dir, &["--json", "relay", "forget", "--name", "mian", "--yes"]).code(0).json();
    assert_eq!((&done["relay"], &done["position"]), (&"mian".into(), &"1".into()), "{done}");
    assert_eq!((&done["held_back"], &done["last_relay"]), (&2.into(), &false.into()), "{done}");
    assert_eq!(run(dir, &sweep).code(0).json()["removed"], 3);
    let last = relay(&["forget", "--name", "relay", "--yes"]).code(0);
    assert!(
        last.out.contains("relay relay is forgotten at position 3: no other relay follows"),
        "{}",
        last.out
    );
}

#[test]
fn a_relay_that_leads_is_not_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let url = format!("sqlite:{}", dir.join("own.db").display());
    let acquired = async {
        let journal = hapax::open::journal_with(&url, &hapax::open::OpenSettings::default()).await.unwrap();
        let (name, owner) = (hapax::RelayName::new("main").unwrap(), hapax::Owner::new("ada").unwrap());
        journal.acquire_leadership(&name, &owner, std::time::Duration::from_secs(3600)).await.unwrap();
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(acquired);
    let ran = run(dir, &["--journal", &url, "relay", "forget", "--name", "main", "--yes"]).code(4);
    assert!(ran.err.contains("found ada, who leads it until 20"), "{}", ran.err);
}

fn server() -> String {
    std::env::var("HAPAX_TEST_POSTGRES_URL").expect("scripts/services env")
}

/// Whoever reads is told that it is not the end where someone has not committed yet.
#[test]
fn a_hole_is_reported() {
    use hapax::backend::postgres::{PgJournal, PgJournalSettings};
    use hapax::journal::{Append, Expected, Journal as _};
    let dir = tempfile::tempdir().unwrap();
    let (dir, url) = (dir.path(), server());
    let schema = format!("t_{}", hapax::EventId::now_v7().to_string().replace('-', ""));
    let journal = ["--journal", &url, "--set", &format!("journal.schema={schema}")];
    let read = |args: &[&str]| run(dir, &[&journal[..], &["journal", "read"], args].concat()).code(0);
    let event = |id: &str| {
        let event = hapax::Event::new(hapax::EventId::new(id).unwrap());
        Append::new(hapax::Aggregate::new(id).unwrap(), Expected::Any, [event])
    };
    let tell = async {
        let mut settings = PgJournalSettings::default();
        settings.schema.clone_from(&schema);
        let journal = PgJournal::connect(&url, settings).await.unwrap();
        let _ = journal.append(&event("one")).await.unwrap();
        let whole = read(&[]);
        assert!(whole.out.contains("one") && !whole.err.contains("hole"), "{}", whole.err);
        let mut open = journal.pool().begin().await.unwrap();
        let _ = journal.append_in(&mut open, &event("two")).await.unwrap();
        let _ = journal.append(&event("three")).await.unwrap();
        let cut = read(&[]);
        assert!(cut.out.contains("one") && !cut.out.contains("three"), "{}", cut.out);
        assert!(cut.err.contains("a hole after position 1: a transaction that appends there"), "{}", cut.err);
        let json = read(&["--json"]);
        assert_eq!(json.err_json()["hole"]["after"], "1");
        assert!(!read(&["--limit", "1"]).err.contains("hole"), "it was not asked for what follows");
        open.commit().await.unwrap();
        let whole = read(&[]);
        assert!(whole.out.contains("two") && whole.out.contains("three") && !whole.err.contains("hole"));
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(tell);
}

/// What cannot be opened gets a sentence for people: no line of a server's source, no XML.
#[test]
fn a_database_that_is_missing_and_a_credential_that_is_wrong_get_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let url = server();
    let missing = format!("{}/no_such_database", url.rsplit_once('/').unwrap().0);
    let ran = run(dir, &["--journal", &missing, "journal", "stat"]).code(3);
    assert!(ran.err.contains("no_such_database") && ran.err.contains("does not exist"), "{}", ran.err);
    assert!(!ran.err.contains("at line"), "{}", ran.err);

    let of = |name: &str| std::env::var(name).expect("scripts/services env");
    let bucket = of("HAPAX_TEST_S3_BUCKET");
    let url = format!("s3://{bucket}/x?endpoint={}", of("HAPAX_TEST_S3_ENDPOINT"));
    for (key, secret) in [("test", "wrong-secret"), ("nobody", "testtest")] {
        let mut command = common::hapax(dir, &["--journal", &url, "journal", "stat"]);
        command.env("AWS_ACCESS_KEY_ID", key).env("AWS_SECRET_ACCESS_KEY", secret);
        let ran = Ran::from(command.output().unwrap()).code(2);
        assert!(ran.err.contains("does not let these credentials in"), "{}", ran.err);
        assert!(ran.err.contains("AWS_ACCESS_KEY_ID"), "{}", ran.err);
        assert!(!ran.err.contains('<') && !ran.err.contains(secret), "{}", ran.err);
    }
}

/// Says done to everything.
const HANDLER: &str = r#"python3 -c '
import json, sys
for line in sys.stdin:
    request = json.loads(line)
    if "event" in request:
        print(json.dumps({"id": request["id"], "token": request["token"], "done": True}), flush=True)
'"#;

#[test]
fn published_events_are_archived() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &orders(dir)).code(0);
    let archive = ["--json", "journal", "archive", "--to", "dir:archive", "--older-than", "1ms", "--yes"];
    assert_eq!(run(dir, &archive).code(0).json()["archived"], 0, "nobody has published it");
    run(dir, &["relay", "run", "--topic", "orders", "--create", "1", "--once"]).code(0);
    let refused = run(dir, &archive[..7]).code(2);
    assert!(refused.err.contains("--yes"), "{}", refused.err);
    assert!(!dir.join("archive/archive").exists(), "nothing is done before it is asked for");
    let done = run(dir, &archive).code(0).json();
    assert_eq!((&done["archived"], &done["removed"]), (&3.into(), &3.into()), "{done}");
    let ran = run(dir, &["journal", "archive", "--to", "ftp://x", "--older-than", "1d", "--keep"]).code(2);
    assert!(ran.err.contains("is not the URL of an object store"), "{}", ran.err);
}

/// What is set in vain is said once; what stands still is named with its tenant.
#[test]
fn a_relay_says_what_does_nothing_and_status_says_whose_aggregate_is_parked() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    append(dir, &orders(dir)).code(0);
    let url = format!("sqlite:{}", dir.join("own.db").display());
    let command = |args: &[&str]| {
        let mut command = common::hapax(dir, args);
        command.env("HAPAX_JOURNAL_URL", &url);
        command
    };
    let relay = ["relay", "run", "--topic", "orders", "--create", "1", "--once"];
    let message = "relay.lookback_s does nothing here";
    let ran = Ran::from(command(&relay).env("HAPAX_RELAY_LOOKBACK_S", "5").output().unwrap()).code(0);
    assert_eq!(ran.err.matches(message).count(), 1, "{}", ran.err);
    assert!(!ran.err.contains("relay.lookback_max"), "{}", ran.err);
    let ran = Ran::from(command(&relay).output().unwrap()).code(0);
    assert!(!ran.err.contains("does nothing here"), "{}", ran.err);

    let checkpoint = async {
        let journal = hapax::open::journal_with(&url, &hapax::open::OpenSettings::default()).await.unwrap();
        let parked = serde_json::json!({
            "journal": journal.id(), "position": "0", "behind": [{
                "tenant": "acme", "aggregate": "o-1", "next": 1, "position": "0", "reason": "too large",
                "poison": true, "since": 1, "attempts": 1,
            }],
        });
        let name = hapax::RelayName::new("relay").unwrap();
        journal.rewind(&name, &serde_json::from_value(parked).unwrap(), None).await.unwrap();
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(checkpoint);
    let ran = Ran::from(command(&["relay", "status"]).output().unwrap()).code(0);
    assert!(ran.out.contains("o-1 of tenant acme is parked at seq 1: too large"), "{}", ran.out);
}
