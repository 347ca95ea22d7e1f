//! The SQLite ledger among processes: several on one file, killed ones, files that are full, read-only, foreign or
//! from the future. What it has in common with other ledgers is tested by the conformance suite.
#![cfg(all(feature = "sqlite", feature = "testing"))]
#![allow(clippy::unwrap_used)] // helpers of tests are tests too

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::time::Duration;

use hapax::backend::sqlite::{SqliteJournal, SqliteLedger};
use hapax::clock::{Clock, ManualClock};
use hapax::journal::{Append, Expected, JournalSettings};
use hapax::ledger::{
    Baseline, Claim, Filter, Identity, Intervene, Intervention, LeaseSettings, Mode, Nonce, OnDead, Order,
    OrderPolicy, Settings, Settle, Settled, State, SweepSettings, Verdict, Week,
};
use hapax::{Aggregate, Claims, Error, Event, EventId, Operations, Outcome, Scope, Tenant, Time};
use rusqlite::{Connection, TransactionBehavior};

const IDS: usize = 10_000;
const DAY: Duration = Duration::from_hours(24);

fn scope() -> Scope {
    Scope::new("billing").unwrap()
}

fn identity(id: &str) -> Identity {
    Identity::new(scope(), EventId::new(id).unwrap())
}

fn lease() -> Mode {
    Mode::Lease(LeaseSettings { lease: Duration::from_secs(30), attempts_max: 5, alone: true })
}

fn file(dir: &tempfile::TempDir) -> PathBuf {
    dir.path().join("ledger.db")
}

fn open(path: &Path) -> SqliteLedger {
    SqliteLedger::open(path, Settings::default()).unwrap()
}

async fn claim(ledger: &SqliteLedger, claim: Claim) -> Outcome {
    ledger.claim(&[claim]).await.unwrap().remove(0).unwrap()
}

fn firsts(outcomes: &[hapax::Result<Outcome>]) -> usize {
    outcomes.iter().filter(|outcome| outcome.as_ref().is_ok_and(Outcome::is_claimed)).count()
}

/// Starts this test binary again, to play a role on a file.
fn child(role: &str, path: &Path) -> Child {
    crate::support::this::test("plays_its_role_on_a_ledger")
        .env("HAPAX_CHILD", role)
        .env("HAPAX_FILE", path)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// What a child reported in lines that begin with `=`.
fn reports(child: Child) -> Vec<String> {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}");
    text.lines().filter_map(|line| line.split_once('=')).map(|(_, rest)| rest.to_owned()).collect()
}

/// Not a case of its own: what the children of other cases do. Without a role it has nothing to do.
#[tokio::test]
async fn plays_its_role_on_a_ledger() {
    let Ok(role) = std::env::var("HAPAX_CHILD") else { return };
    let path = PathBuf::from(std::env::var("HAPAX_FILE").unwrap());
    let ledger = open(&path);
    match role.as_str() {
        "open" => println!("=opened"),
        "claim all" => {
            let mut won = 0;
            for from in (0..IDS).step_by(250) {
                let claims: Vec<Claim> = (from..from + 250)
                    .map(|n| Claim::new(identity(&format!("event-{n}")), Mode::Done))
                    .collect();
                let outcomes = ledger.claim(&claims).await.unwrap();
                assert!(outcomes.iter().all(Result::is_ok));
                won += firsts(&outcomes);
            }
            println!("={won}");
        }
        "claim for ever" => {
            println!("=started");
            for batch in 0u64.. {
                let aggregate = Aggregate::new("order").unwrap();
                let claims: Vec<Claim> = (0..20)
                    .map(|n| {
                        let mut claim = Claim::new(identity(&format!("{batch}-{n}")), Mode::Done);
                        let policy = OrderPolicy::Strict { baseline: Baseline::FirstSeen, gap_timeout: DAY };
                        let aggregate = aggregate.clone();
                        claim.order =
                            Some(Order { aggregate, seq: batch * 20 + n + 1, policy, on_dead: OnDead::Park });
                        claim
                    })
                    .collect();
                assert_eq!(firsts(&ledger.claim(&claims).await.unwrap()), 20);
                println!("={}", (batch + 1) * 20);
            }
        }
        role => panic!("no such role: {role}"),
    }
}

#[test]
fn ten_processes_claim_the_same_ids_and_each_id_has_one_winner() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    open(&path);
    let children: Vec<Child> = (0..10).map(|_| child("claim all", &path)).collect();
    let won: Vec<usize> = children.into_iter().map(|child| reports(child)[0].parse().unwrap()).collect();
    println!("ids won by each of ten processes: {won:?}");
    assert_eq!(won.iter().sum::<usize>(), IDS);
    let rows: i64 = Connection::open(&path)
        .unwrap()
        .query_row("SELECT count(*) FROM hapax_entry_0", [], |row| row.get(0))
        .unwrap();
    assert_eq!(rows as usize, IDS);
}

#[test]
fn ten_processes_open_a_fresh_file_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let children: Vec<Child> = (0..10).map(|_| child("open", &path)).collect();
    for child in children {
        assert_eq!(reports(child), ["opened"]);
    }
    let conn = Connection::open(&path).unwrap();
    let ledgers: i64 = conn.query_row("SELECT count(*) FROM hapax_meta", [], |row| row.get(0)).unwrap();
    assert_eq!(ledgers, 1);
}

#[tokio::test]
async fn a_killed_process_leaves_whole_batches_and_a_sound_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    for round in 0..3 {
        let path = path.with_extension(round.to_string());
        let mut running = child("claim for ever", &path);
        let mut lines = BufReader::new(running.stdout.take().unwrap()).lines();
        let mut acknowledged = 0;
        while acknowledged < 200 + round * 111 {
            let line = lines.next().unwrap().unwrap();
            acknowledged = line.split_once('=').and_then(|(_, n)| n.parse().ok()).unwrap_or(acknowledged);
        }
        running.kill().unwrap(); // SIGKILL
        running.wait().unwrap();
        let answer =
            lines.map_while(Result::ok).filter_map(|line| line.split_once('=')?.1.parse().ok()).max();
        let acknowledged: i64 = answer.unwrap_or(acknowledged);

        let ledger = open(&path);
        let conn = Connection::open(&path).unwrap();
        let sound: String = conn.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
        assert_eq!(sound, "ok");
        let rows: i64 = conn.query_row("SELECT count(*) FROM hapax_entry_0", [], |row| row.get(0)).unwrap();
        let last: i64 = conn.query_row("SELECT last FROM hapax_head", [], |row| row.get(0)).unwrap();
        println!("killed after {acknowledged} acknowledged claims; the file has {rows}");
        assert!(rows >= acknowledged && rows % 20 == 0, "{rows} rows, {acknowledged} acknowledged");
        assert_eq!(rows, last, "entries and their aggregate's head are one step");
        let again = claim(&ledger, Claim::new(identity("0-0"), Mode::Done)).await;
        assert!(matches!(again, Outcome::Duplicate(_)), "{again:?}");
    }
}

#[test]
fn a_newer_schema_is_refused_unless_it_accepts_this_build() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    open(&path);
    let conn = Connection::open(&path).unwrap();
    conn.execute("UPDATE hapax_meta SET version = 9, accepts = 7", []).unwrap();
    let error = SqliteLedger::open(&path, Settings::default()).unwrap_err();
    println!("{error}");
    assert!(matches!(error, Error::Schema(_)) && error.to_string().contains("version 9"), "{error}");
    conn.execute("UPDATE hapax_meta SET accepts = 1", []).unwrap();
    open(&path);
    let version: i64 = conn.query_row("SELECT version FROM hapax_meta", [], |row| row.get(0)).unwrap();
    assert_eq!(version, 9, "an older build leaves the newer version standing");
}

#[tokio::test]
async fn a_read_only_file_can_be_looked_at_and_refuses_writes() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let missing = SqliteLedger::open_read_only(&path, Settings::default()).unwrap_err();
    assert_eq!(missing.code(), "unavailable", "{missing}");
    let writing = open(&path);
    assert!(claim(&writing, Claim::new(identity("a"), Mode::Done)).await.is_claimed());
    let reading = SqliteLedger::open_read_only(&path, Settings::default()).unwrap();
    let error = reading.claim(&[Claim::new(identity("b"), Mode::Done)]).await.unwrap_err();
    println!("{}", error.chain());
    assert!(matches!(error, Error::Refused { .. }) && !error.is_retryable(), "{error}");
    let sweep = SweepSettings { retention: DAY, batch_max: 10, dry_run: false };
    assert!(matches!(reading.sweep(sweep).await.unwrap_err(), Error::Refused { .. }));
    assert_eq!(reading.get(&identity("a"), None).await.unwrap().unwrap().state, State::Done);
    assert!(reading.get(&identity("b"), None).await.unwrap().is_none());
    assert!(reading.check().await.is_ok());
}

#[test]
fn files_that_are_no_ledger_get_a_sentence() {
    let dir = tempfile::tempdir().unwrap();
    let text = dir.path().join("text");
    std::fs::write(&text, "this is not a database, and it is long enough to be looked at as one".repeat(20))
        .unwrap();
    let error = SqliteLedger::open(&text, Settings::default()).unwrap_err();
    assert!(matches!(error, Error::Config(_)), "{error}");
    assert!(error.to_string().contains(&format!("{} is not an SQLite database", text.display())), "{error}");
    let nowhere = SqliteLedger::open(dir.path().join("no/such/dir/file"), Settings::default()).unwrap_err();
    assert!(matches!(nowhere, Error::Unavailable { .. }), "{nowhere}");
    let memory = SqliteLedger::open(":memory:", Settings::default()).unwrap_err();
    assert!(matches!(memory, Error::Invalid { .. }), "{memory}");
}

#[tokio::test]
async fn a_full_disk_changes_nothing_and_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(&file(&dir));
    assert!(claim(&ledger, Claim::new(identity("first"), Mode::Done)).await.is_claimed());
    ledger.limit_pages(1).unwrap(); // what it has now
    let claims: Vec<Claim> =
        (0..5000).map(|n| Claim::new(identity(&format!("more-{n}")), Mode::Done)).collect();
    let error = ledger.claim(&claims).await.unwrap_err();
    println!("{}", error.chain());
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert_eq!(ledger.stat().await.unwrap().counts.iter().map(|(.., count)| count).sum::<u64>(), 1);
    ledger.limit_pages(1_000_000).unwrap();
    assert_eq!(firsts(&ledger.claim(&claims).await.unwrap()), 5000);
}

#[tokio::test]
async fn claims_are_committed_and_rolled_back_with_the_callers_transaction() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let ledger = open(&path);
    let mut conn = Connection::open(&path).unwrap();
    conn.execute("CREATE TABLE paid (id TEXT)", []).unwrap();
    let first = Claim::new(identity("order-17"), Mode::Done);
    for (commit, earlier) in [(false, false), (true, false), (true, true)] {
        let again = Claim { nonce: if earlier { Nonce::random() } else { first.nonce }, ..first.clone() };
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let outcome = ledger.claim_in(&tx, std::slice::from_ref(&again)).unwrap().remove(0).unwrap();
        assert_eq!(outcome.is_claimed(), !earlier, "{outcome:?}");
        if outcome.is_claimed() {
            tx.execute("INSERT INTO paid VALUES ('order-17')", []).unwrap();
        }
        if commit {
            tx.commit().unwrap();
        } else {
            tx.rollback().unwrap();
        }
        assert_eq!(ledger.was_committed(&first).unwrap(), commit);
    }
    let paid: i64 = conn.query_row("SELECT count(*) FROM paid", [], |row| row.get(0)).unwrap();
    assert_eq!(paid, 1);
    let other = Claim { nonce: Nonce::random(), ..first.clone() };
    assert!(!ledger.was_committed(&other).unwrap(), "another's claim is not this one");
    let never = Claim::new(identity("never"), Mode::Done);
    assert!(!ledger.was_committed(&never).unwrap());
    assert!(ledger.get(&identity("never"), None).await.unwrap().is_none(), "asking leaves nothing");
}

#[tokio::test]
async fn was_committed_waits_for_the_transaction_it_asks_about() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let ledger = open(&path);
    let claim = Claim::new(identity("slow"), Mode::Done);
    let mut conn = Connection::open(&path).unwrap();
    let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
    assert_eq!(firsts(&ledger.claim_in(&tx, std::slice::from_ref(&claim)).unwrap()), 1);
    let asking = std::thread::spawn({
        let (ledger, claim) = (ledger.clone(), claim.clone());
        move || ledger.was_committed(&claim).unwrap()
    });
    std::thread::sleep(Duration::from_millis(100)); // long enough to look too early
    tx.commit().unwrap();
    assert!(asking.join().unwrap());
}

#[test]
fn a_transaction_on_another_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let ledger = open(&path);
    let claims = [Claim::new(identity("a"), Mode::Done)];
    let mut elsewhere = Connection::open(dir.path().join("data.db")).unwrap();
    let sql = format!("ATTACH '{}' AS ledger", path.display());
    elsewhere.execute_batch(&sql).unwrap();
    let refused = |conn: &mut Connection| {
        let tx = conn.transaction().unwrap();
        let error = ledger.claim_in(&tx, &claims).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
        println!("{error}");
    };
    refused(&mut elsewhere);
    let other = dir.path().join("other.db");
    open(&other);
    refused(&mut Connection::open(&other).unwrap());
}

/// A UUIDv7 of a moment.
fn v7_at(time: Time, n: u8) -> EventId {
    let mut bytes = [0; 16];
    bytes[..6].copy_from_slice(&(time.as_micros() / 1000).to_be_bytes()[2..]);
    bytes[6] = 0x70;
    bytes[8] = 0x80;
    bytes[15] = n;
    EventId::from_key(&bytes).unwrap()
}

#[tokio::test]
async fn sweep_drops_old_weeks_whole_and_keeps_what_is_open() {
    let dir = tempfile::tempdir().unwrap();
    let start = Time::parse("2026-03-04T12:00:00Z").unwrap();
    let clock = ManualClock::new(start);
    let ledger =
        SqliteLedger::open_with_clock(file(&dir), Settings::default(), Arc::new(clock.clone())).unwrap();
    let of = |n: u8| Identity::new(scope(), v7_at(start, n));
    let week = Week::of(start);
    let once = Mode::Once { track: Some(Duration::from_mins(1)) };
    for (n, mode) in [(1, Mode::Done), (2, Mode::Done), (3, lease()), (4, once)] {
        assert!(claim(&ledger, Claim::new(of(n), mode)).await.is_claimed());
    }
    for n in 0..25 {
        assert!(
            claim(&ledger, Claim::new(identity(&format!("timeless-{n}")), Mode::Done)).await.is_claimed()
        );
    }
    assert!(claim(&ledger, Claim::new(identity("open"), lease())).await.is_claimed());
    clock.advance(DAY * 12 + Duration::from_secs(1)); // the week itself is over for seven days
    let settings = SweepSettings { retention: DAY * 7, batch_max: 10, dry_run: true };
    let rehearsed = ledger.sweep(settings).await.unwrap();
    let swept = ledger.sweep(SweepSettings { dry_run: false, ..settings }).await.unwrap();
    println!("{swept:?}");
    assert_eq!(rehearsed, swept);
    assert_eq!((swept.rows, swept.held, swept.lost), (25, 1, 1));
    assert_eq!(swept.weeks, [(week, 3)]); // the fourth is open, and kept
    assert_eq!(ledger.sweep(SweepSettings { dry_run: false, ..settings }).await.unwrap().entries(), 0);

    let counted = ledger.stat().await.unwrap();
    assert_eq!(counted.dropped, [(week, clock.now())]);
    let too_old = claim(&ledger, Claim::new(of(1), Mode::Done)).await;
    assert_eq!(too_old, Outcome::TooOld { week });
    let Outcome::First(grant) = claim(&ledger, Claim::new(of(3), lease())).await else {
        panic!("it was open")
    };
    assert_eq!((grant.attempt, grant.suspect), (2, true));
    let done = Settle {
        identity: of(3),
        week,
        token: grant.token,
        verdict: Verdict::Done { metadata: None },
        order: None,
        advance_to: None,
    };
    assert!(matches!(ledger.settle(&[done]).await.unwrap()[0], Ok(Settled::Ok { .. })));
    let page = ledger.list(&Filter::default(), None, 10).await.unwrap();
    let seen: Vec<_> = page.entries.iter().map(|entry| (entry.identity.id.clone(), entry.state)).collect();
    assert_eq!(seen, [(EventId::new("open").unwrap(), State::Leased), (of(3).id, State::Done)]);

    let younger = Identity { scope: Scope::new("younger").unwrap(), ..of(1) };
    assert!(claim(&ledger, Claim::new(younger, Mode::Done)).await.is_claimed());
    assert_eq!(claim(&ledger, Claim::new(of(2), Mode::Done)).await, Outcome::TooOld { week });
}

/// A commit on a connection that does not sync is acknowledged before it is on disk.
#[tokio::test]
async fn t72_a_connection_that_does_not_sync_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = SqliteLedger::open(file(&dir), Settings::default()).unwrap();
    let journal = SqliteJournal::open(file(&dir), JournalSettings::default()).unwrap();
    let mut conn = Connection::open(file(&dir)).unwrap();
    let append =
        Append::new(Aggregate::new("a").unwrap(), Expected::Any, [Event::new(EventId::new("e").unwrap())]);
    for (synchronous, fine) in [("OFF", false), ("NORMAL", false), ("FULL", true), ("EXTRA", true)] {
        conn.execute_batch(&format!("PRAGMA synchronous = {synchronous}")).unwrap();
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let claimed = ledger.claim_in(&tx, &[Claim::new(identity(synchronous), Mode::Done)]).map(drop);
        let appended = journal.append_in(&tx, &append).map(drop);
        for result in [claimed, appended] {
            match result {
                Ok(()) => assert!(fine, "{synchronous} was accepted"),
                Err(error @ Error::Unsupported(_)) => {
                    assert!(!fine && error.to_string().contains(synchronous));
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

#[tokio::test]
async fn a_settle_keeps_its_week() {
    let dir = tempfile::tempdir().unwrap();
    let start = Time::parse("2026-03-04T12:00:00Z").unwrap();
    let clock = ManualClock::new(start);
    let ledger =
        SqliteLedger::open_with_clock(file(&dir), Settings::default(), Arc::new(clock.clone())).unwrap();
    let identity = Identity::new(scope(), v7_at(start, 1));
    let Outcome::First(grant) = claim(&ledger, Claim::new(identity.clone(), lease())).await else { panic!() };
    clock.advance(DAY * 6);
    let (week, token) = (grant.week, grant.token);
    let verdict = Verdict::Done { metadata: None };
    let settle = Settle { identity, week, token, verdict, order: None, advance_to: None };
    assert!(matches!(ledger.settle(&[settle]).await.unwrap()[0], Ok(Settled::Ok { .. })));
    clock.advance(DAY * 6);
    let settings = SweepSettings { retention: DAY * 7, batch_max: 10, dry_run: false };
    assert!(ledger.sweep(settings).await.unwrap().weeks.is_empty(), "its newest settle is six days old");
    clock.advance(DAY * 2);
    assert_eq!(ledger.sweep(settings).await.unwrap().weeks, [(week, 1)]);
}

#[tokio::test]
async fn another_process_dropping_a_week_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let start = Time::parse("2026-03-04T12:00:00Z").unwrap();
    let clock = ManualClock::new(start);
    let again =
        || SqliteLedger::open_with_clock(file(&dir), Settings::default(), Arc::new(clock.clone())).unwrap();
    let (one, other) = (again(), again());
    let of = |n: u8| Claim::new(Identity::new(scope(), v7_at(start, n)), Mode::Done);
    assert!(claim(&one, of(1)).await.is_claimed());
    clock.advance(DAY * 12); // the week itself is over for seven days
    let settings = SweepSettings { retention: DAY * 7, batch_max: 10, dry_run: false };
    assert_eq!(other.sweep(settings).await.unwrap().weeks.len(), 1);
    assert_eq!(claim(&one, of(2)).await, Outcome::TooOld { week: Week::of(start) });
}

#[tokio::test]
async fn pages_follow_each_other_in_key_order() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(&file(&dir));
    let now = ledger.now().await.unwrap();
    let mut claims = Vec::new();
    for n in 0..30u8 {
        for tenant in [None, Some(Tenant::new("acme").unwrap())] {
            let id = if n % 2 == 0 {
                v7_at(now.minus(DAY * 7 * u32::from(n % 3)), n)
            } else {
                EventId::new(format!("e{n}")).unwrap()
            };
            claims.push(Claim::new(Identity { tenant, scope: scope(), id }, Mode::Done));
        }
    }
    assert_eq!(firsts(&ledger.claim(&claims).await.unwrap()), 60);
    let mut after = None;
    let mut seen = Vec::new();
    loop {
        let page = ledger.list(&Filter::default(), after.as_ref(), 7).await.unwrap();
        seen.extend(page.entries.into_iter().map(|entry| (entry.week, entry.identity)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(seen.len(), 60);
    assert!(seen.is_sorted_by_key(|(week, _)| *week));
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), 60);
    let acme = Filter { tenant: Some(Some(Tenant::new("acme").unwrap())), ..Filter::default() };
    assert_eq!(ledger.list(&acme, None, 100).await.unwrap().entries.len(), 30);
    let retrying = Filter { states: vec![State::Retry], ..Filter::default() };
    assert!(ledger.list(&retrying, None, 100).await.unwrap().entries.is_empty());
}

#[tokio::test]
async fn a_dry_intervention_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let ledger = open(&file(&dir));
    assert!(claim(&ledger, Claim::new(identity("a"), lease())).await.is_claimed());
    let mut intervene = Intervene {
        identity: identity("a"),
        time: None,
        what: Intervention::Kill,
        by: "someone".into(),
        reason: "because".into(),
        out_of_order: false,
        token: None,
        dry_run: true,
    };
    assert_eq!(ledger.intervene(&intervene).await.unwrap().after.unwrap().state, State::Dead);
    assert_eq!(ledger.get(&identity("a"), None).await.unwrap().unwrap().state, State::Leased);
    intervene.dry_run = false;
    assert_eq!(ledger.intervene(&intervene).await.unwrap().after.unwrap().state, State::Dead);
    assert_eq!(ledger.audit(10).await.unwrap().len(), 1);
    intervene.identity = identity("nobody");
    assert_eq!(ledger.intervene(&intervene).await.unwrap_err().code(), "not-found");
}

#[tokio::test]
async fn the_check_finds_everything_in_order() {
    let dir = tempfile::tempdir().unwrap();
    for finding in open(&file(&dir)).check().await.unwrap() {
        println!("{}: {}", finding.check, finding.message);
        assert_eq!(finding.level, hapax::ledger::Level::Fine);
    }
}

#[tokio::test]
async fn t31_a_guard_says_whether_a_claim_was_committed() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let guard = hapax::Guard::builder(open(&path)).scope("billing").build().unwrap();
    let mut conn = Connection::open(&path).unwrap();
    for commit in [false, true] {
        let tx = conn.transaction_with_behavior(TransactionBehavior::Immediate).unwrap();
        let Outcome::First(claim) = guard.try_claim_in(&tx, "order-17").unwrap() else { panic!() };
        if commit {
            tx.commit().unwrap();
        } else {
            tx.rollback().unwrap();
        }
        assert_eq!(guard.was_committed(&claim).unwrap(), commit);
    }
}

/// Two rules on one file would make two identities of one event.
#[tokio::test]
async fn a_file_keeps_its_identity_rule() {
    use hapax::ledger::IdentityRule::{Id, IdAndTime};
    for (made, other, names) in
        [(Id, IdAndTime, ["`id`", "`id_and_time`"]), (IdAndTime, Id, ["`id_and_time`", "`id`"])]
    {
        let dir = tempfile::tempdir().unwrap();
        let path = file(&dir);
        let with = |identity| {
            let mut settings = Settings::default();
            settings.identity = identity;
            settings
        };
        drop(SqliteLedger::open(&path, with(made)).unwrap());
        for refused in
            [SqliteLedger::open(&path, with(other)), SqliteLedger::open_read_only(&path, with(other))]
        {
            let error = refused.unwrap_err();
            assert!(matches!(error, Error::Config(_)), "{error:?}");
            let text = error.to_string();
            assert!(names.iter().all(|name| text.contains(name)), "{text}");
        }
        drop(SqliteLedger::open(&path, with(made)).unwrap());
    }
}

/// A copy of the file that is put in its place is another incarnation of the ledger, though it has the same id.
#[tokio::test]
async fn c11_a_file_that_was_put_in_its_place_has_another_epoch() {
    let dir = tempfile::tempdir().unwrap();
    let path = file(&dir);
    let ledger = open(&path);
    let before = ledger.epoch().await.unwrap();
    drop(ledger);
    std::fs::copy(&path, dir.path().join("backup.db")).unwrap();
    assert_eq!(open(&path).epoch().await.unwrap(), before);
    std::fs::rename(dir.path().join("backup.db"), &path).unwrap();
    assert_ne!(open(&path).epoch().await.unwrap(), before);
}
