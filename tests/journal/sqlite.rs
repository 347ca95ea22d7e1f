//! The SQLite journal passes the conformance suite; and what only a file has: processes that are killed or share it, a disk
//! that is full, a file that is busy, foreign or from the future, and the caller's own transaction.
#![cfg(all(feature = "sqlite", feature = "testing"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::path::{Path, PathBuf};
use std::process::{Child, Output, Stdio};
use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::sqlite::{SqliteJournal, SqliteLedger};
use hapax::journal::{Append, Expected, Journal, JournalSettings, Placing, Position};
use hapax::ledger::{Claim, Identity, Mode, Settings};
use hapax::testing::journal::{Follower, JournalHarness, aggregate, append, event, put};
use hapax::{Aggregate, Claims, EventId, Operations, Scope};
use rusqlite::{Connection, TransactionBehavior};

/// A fresh file.
struct SqliteJournalHarness(tempfile::TempDir);

impl SqliteJournalHarness {
    fn new() -> Self {
        SqliteJournalHarness(tempfile::tempdir().expect("a directory for the test"))
    }
}

#[async_trait]
impl JournalHarness for SqliteJournalHarness {
    type Journal = SqliteJournal;

    async fn open(&self, settings: JournalSettings) -> SqliteJournal {
        SqliteJournal::open(file(&self.0), settings).expect("the file opens")
    }
}

hapax::journal_conformance!(sqlite, SqliteJournalHarness::new());

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("journal.db")
}

fn open(path: &Path) -> SqliteJournal {
    SqliteJournal::open(path, JournalSettings::default()).unwrap()
}

fn begin(conn: &mut Connection) -> rusqlite::Transaction<'_> {
    conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap()
}

/// A connection of the user's own, with a table of the user's own.
fn shop(path: &Path) -> Connection {
    let conn = Connection::open(path).unwrap();
    conn.busy_timeout(Duration::from_secs(120)).unwrap();
    conn.execute_batch("CREATE TABLE IF NOT EXISTS orders (id TEXT)").unwrap();
    conn
}

fn orders(conn: &Connection) -> i64 {
    conn.query_row("SELECT count(*) FROM orders", [], |row| row.get(0)).unwrap()
}

/// Starts this test binary again, to play a role on a file.
fn child(role: &str, path: &Path, crash_at: Option<&str>) -> Child {
    let mut command = crate::support::this::test("plays_its_role_on_a_journal_file");

    command.env("HAPAX_CHILD", role).env("HAPAX_FILE", path).env_remove(hapax::testing::crash::VARIABLE);
    if let Some(at) = crash_at {
        command.env(hapax::testing::crash::VARIABLE, at);
    }
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// What a child reported in lines that begin with `=`.
fn reports(output: &Output) -> Vec<String> {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.split_once('=')).map(|(_, rest)| rest.to_owned()).collect()
}

const APPENDS: u64 = 6;

/// Not a case of its own: what the children of other cases do. Without a role it has nothing to do.
#[tokio::test]
async fn plays_its_role_on_a_journal_file() {
    let Ok(role) = std::env::var("HAPAX_CHILD") else { return };
    let path = PathBuf::from(std::env::var("HAPAX_FILE").unwrap());
    let journal = open(&path);
    match role.as_str() {
        "outbox" => {
            // Business row and events in one transaction, and then the same through the writing thread.
            let mut conn = shop(&path);
            for n in 1..=APPENDS {
                let names = [format!("e{n}-1"), format!("e{n}-2")];
                let two = append("a", Expected::Any, &[&names[0], &names[1]]);
                if n % 2 == 0 {
                    let tx = begin(&mut conn);
                    let appended = journal.append_in(&tx, &two).unwrap();
                    if !appended.is_repeat() {
                        tx.execute("INSERT INTO orders VALUES (?1)", [n.to_string()]).unwrap();
                    }
                    tx.commit().unwrap();
                } else {
                    let _ = put(&journal, &two).await;
                }
                println!("={n}");
            }
        }
        writer => {
            for n in 0..200 {
                let of = format!("aggregate-{}", n % 4);
                let _ = put(&journal, &append(&of, Expected::Any, &[&format!("{writer}-{n}")])).await;
            }
        }
    }
}

/// Killed at every step of an append: what was acknowledged is there, whole, with its business row; nothing is there in
/// part, no number is missing, and doing it all again ends the same.
#[tokio::test]
async fn killed_at_any_step_nothing_is_half_written() {
    let steps = [
        "journal.append.event",
        "journal.append.head",
        "journal.append.after",
        "journal.commit.before",
        "journal.commit.after",
    ];
    let mut kills = 0;
    for step in steps {
        for hit in 1.. {
            assert!(hit < 100, "{step} never ends");
            let dir = tempfile::tempdir().unwrap();
            let path = file(&dir);
            let output = child("outbox", &path, Some(&format!("{step}:{hit}"))).wait_with_output().unwrap();
            let acknowledged = reports(&output).len() as u64;
            let journal = open(&path);
            let head = journal.head(None, &aggregate("a")).await.unwrap();
            let events = journal.read_aggregate(None, &aggregate("a"), 1, 100).await.unwrap().events;
            assert_eq!(events.len() as u64, head, "{step}:{hit}");
            assert!(
                head % 2 == 0 && head >= acknowledged * 2,
                "{step}:{hit}: {acknowledged} appends, head {head}"
            );
            assert_eq!(orders(&shop(&path)) as u64, head / 4, "{step}:{hit}: rows and events differ");
            let mut follower = Follower::new(&journal, 3);
            follower.until(head as usize).await;
            if output.status.success() {
                assert_eq!((acknowledged, head), (APPENDS, APPENDS * 2));
                break;
            }
            kills += 1;
            drop(journal);
            let again = child("outbox", &path, None).wait_with_output().unwrap();
            assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
            let journal = open(&path);
            let ids: Vec<_> = journal.read_aggregate(None, &aggregate("a"), 1, 100).await.unwrap().events;
            let ids: Vec<_> = ids.iter().map(|stored| stored.event.id.to_string()).collect();
            let wanted: Vec<_> = (1..=APPENDS).flat_map(|n| [format!("e{n}-1"), format!("e{n}-2")]).collect();
            assert_eq!(ids, wanted, "{step}:{hit}");
            assert_eq!(orders(&shop(&path)) as u64, APPENDS / 2);
        }
    }
    println!("killed {kills} times");
    assert!(kills > steps.len());
}

/// Two processes on one file, and a follower in a third: numbers without a gap, everything once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_append_to_the_same_aggregates() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let journal = open(&path);
    let children = [child("one", &path, None), child("two", &path, None)];
    let mut follower = Follower::new(&journal, 50);
    follower.until(400).await;
    for child in children {
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    assert_eq!(follower.events.len(), 4);
    assert!(follower.events.values().all(|events| events.len() == 100));
}

/// Another process's append wakes whoever waits, and so does a transaction of the user's.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_the_users_own_wakes_those_who_wait() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(&file(&dir));
    let waiting = journal.clone();
    let wait = tokio::spawn(async move { waiting.wait(&Position::START, Duration::from_mins(10)).await });
    let mut conn = shop(&file(&dir));
    let tx = begin(&mut conn);
    let appended = journal.append_in(&tx, &append("a", Expected::New, &["a1"])).unwrap();
    assert!(!wait.is_finished(), "woken before the commit");
    tx.commit().unwrap();
    tokio::time::timeout(Duration::from_mins(1), wait).await.expect("it is woken").unwrap().unwrap();
    let batch = journal.read(&Position::START, 10).await.unwrap();
    assert_eq!(batch.next, appended.placed[0].position);
}

#[tokio::test]
async fn events_and_rows_are_committed_or_rolled_back_as_one() {
    let dir = tempfile::tempdir().unwrap();
    let (path, mut conn) = (file(&dir), shop(&file(&dir)));
    let journal = open(&path);
    let _ = put(&journal, &append("a", Expected::New, &["a1"])).await;
    for commit in [false, true] {
        let tx = begin(&mut conn);
        tx.execute("INSERT INTO orders VALUES ('a2')", []).unwrap();
        // A refusal changes nothing, and the transaction goes on.
        let refused = journal.append_in(&tx, &append("a", Expected::Exact(7), &["a2"])).unwrap_err();
        assert_eq!(refused.code(), "conflict");
        let appended = journal.append_in(&tx, &append("a", Expected::Exact(1), &["a2", "a3"])).unwrap();
        assert_eq!(appended.last_seq(), 3);
        let again = journal.append_in(&tx, &append("a", Expected::Exact(1), &["a2"])).unwrap();
        assert_eq!(again.placed[0].placing, Placing::Repeat, "it sees its own");
        assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 1, "nobody else sees it yet");
        if commit {
            tx.commit().unwrap();
        }
    }
    assert_eq!(orders(&conn), 1);
    assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 3);
    let _ = put(&journal, &append("a", Expected::Exact(3), &["a4"])).await;
    Follower::new(&journal, 10).until(4).await;
}

/// A transactional handler's own transaction: claim, effect and event are one.
#[tokio::test]
async fn a_handlers_transaction_appends_too() {
    use hapax::ledger::TransactionalLedger as _;
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let ledger = SqliteLedger::open(&path, Settings::default()).unwrap();
    let journal = open(&path);
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new("order-17").unwrap());
    for commit in [false, true] {
        let claim = Claim::new(identity.clone(), Mode::Done);
        let mut tx = ledger.begin(Duration::from_secs(30), Duration::from_secs(30)).await.unwrap();
        let outcomes =
            hapax::ledger::TransactionalLedger::claim_in(&ledger, &mut tx, &[claim]).await.unwrap();
        assert!(outcomes[0].as_ref().unwrap().is_claimed());
        let appended = journal.append_in(&tx, &append("invoice", Expected::New, &["invoice-17"])).unwrap();
        assert_eq!(appended.last_seq(), 1);
        if commit {
            ledger.commit(tx).await.unwrap().unwrap();
        } else {
            ledger.roll_back(tx).await;
        }
        assert_eq!(journal.head(None, &aggregate("invoice")).await.unwrap(), u64::from(commit));
        assert_eq!(ledger.get(&identity, None).await.unwrap().is_some(), commit);
    }
}

#[test]
fn a_transaction_on_another_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(&file(&dir));
    let (empty, other) = (dir.path().join("empty.db"), dir.path().join("other.db"));
    open(&other);
    for path in [empty, other] {
        let mut conn = shop(&path);
        conn.execute("ATTACH ?1 AS journal", [file(&dir).to_str().unwrap()]).unwrap();
        let tx = begin(&mut conn);
        let error = journal.append_in(&tx, &append("a", Expected::New, &["a1"])).unwrap_err();
        assert_eq!(error.code(), "unsupported");
        assert!(error.to_string().contains("journal.db"), "{error}");
    }
}

#[tokio::test]
async fn a_full_disk_changes_nothing_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(&file(&dir));
    let _ = put(&journal, &append("a", Expected::New, &["a1"])).await;
    journal.limit_pages(1).await.unwrap(); // what it has now
    let large =
        |name: &str| Append::new(aggregate("a"), Expected::Any, [event(name).payload(vec![7; 100_000])]);
    let error = journal.append(&large("a2")).await.unwrap_err();
    assert_eq!(error.code(), "refused");
    assert!(error.to_string().contains("full"), "{error}");
    // Small ones may still fit; each that is refused leaves everything as it was.
    let before = journal.head(None, &aggregate("a")).await.unwrap();
    assert_eq!(before, 1);
    journal.limit_pages(1_000_000).await.unwrap();
    assert_eq!(put(&journal, &large("a2")).await.last_seq(), 2);
    Follower::new(&journal, 10).until(2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_file_is_waited_for_and_then_refused() {
    let dir = tempfile::tempdir().unwrap();
    let journal = open(&file(&dir));
    let mut conn = shop(&file(&dir));
    let tx = begin(&mut conn);
    let waiting = journal.clone();
    let append_soon = tokio::spawn(async move { waiting.append(&append("a", Expected::New, &["a1"])).await });
    assert_eq!(journal.head(None, &aggregate("a")).await.unwrap(), 0, "reading does not wait");
    tx.commit().unwrap();
    assert_eq!(append_soon.await.unwrap().unwrap().last_seq(), 1);
    // Whoever holds the file for ever is named.
    let tx = begin(&mut conn);
    let error = journal.append(&append("a", Expected::Any, &["a2"])).await.unwrap_err();
    assert_eq!(error.code(), "contended");
    drop(tx);
    assert_eq!(put(&journal, &append("a", Expected::Any, &["a2"])).await.last_seq(), 2);
}

#[test]
fn a_newer_schema_is_refused_unless_it_accepts_this_build() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let id = open(&path).id().to_owned();
    let set = |version: i64, accepts: i64| {
        let conn = Connection::open(&path).unwrap();
        conn.execute("UPDATE hapax_journal_meta SET version = ?1, accepts = ?2", [version, accepts]).unwrap();
    };
    set(99, 1);
    assert_eq!(open(&path).id(), id);
    set(99, 98);
    let error = SqliteJournal::open(&path, JournalSettings::default()).unwrap_err();
    assert_eq!(error.code(), "schema");
    assert!(error.to_string().contains("99") && error.to_string().contains("newer"), "{error}");
}

#[tokio::test]
async fn one_file_holds_a_journal_a_ledger_and_the_users_tables() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let (conn, ledger, journal) =
        (shop(&path), SqliteLedger::open(&path, Settings::default()).unwrap(), open(&path));
    let _ = put(&journal, &append("a", Expected::New, &["a1"])).await;
    let identity = Identity::new(Scope::new("billing").unwrap(), EventId::new("a1").unwrap());
    assert!(
        ledger.claim(&[Claim::new(identity, Mode::Done)]).await.unwrap()[0].as_ref().unwrap().is_claimed()
    );
    assert_eq!(orders(&conn), 0);
    let findings = ledger.check().await.unwrap();
    // The file is the user's own, so its mode is theirs too.
    let fine = |finding: &hapax::ledger::Finding| {
        finding.level == hapax::ledger::Level::Fine || finding.check == "permissions"
    };
    assert!(findings.iter().all(fine), "{findings:?}");
}

#[tokio::test]
async fn a_url_opens_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let url = format!("sqlite:{}", file(&dir).display());
    let mut settings = hapax::open::OpenSettings::default();
    settings.migrate = hapax::config::Migrate::Check;
    assert!(hapax::open::journal_with(&url, &settings).await.is_err(), "there is none to check");
    settings.migrate = hapax::config::Migrate::Auto;
    let journal = hapax::open::journal_with(&url, &settings).await.unwrap();
    let _ = put(&journal, &append("a", Expected::New, &["a1"])).await;
    settings.migrate = hapax::config::Migrate::Check;
    let again = hapax::open::journal_with(&url, &settings).await.unwrap();
    assert_eq!((again.id(), again.capabilities().backend), (journal.id(), "sqlite"));
    assert_eq!(again.head(None, &Aggregate::new("a").unwrap()).await.unwrap(), 1);
    for bad in ["sqlite:", "sqlite://", "sqlite::memory:", "sqlite:/no/such/directory/journal.db"] {
        assert!(hapax::open::journal_with(bad, &settings).await.is_err(), "{bad}");
    }
}

#[test]
fn files_that_are_no_journal_get_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("notes.txt");
    std::fs::write(&text, "these are notes, many of them, and no database at all ".repeat(100)).unwrap();
    let error = SqliteJournal::open(&text, JournalSettings::default()).unwrap_err();
    assert!(error.to_string().contains("not an SQLite database"), "{error}");
    assert!(
        SqliteJournal::open("", JournalSettings::default())
            .unwrap_err()
            .to_string()
            .contains("it needs a name")
    );
}
