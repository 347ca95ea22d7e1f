//! kill -9 at every step: workers, projections and sweeps are real processes that die at crash points. An independent
//! record counts the effects.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::os::unix::process::ExitStatusExt as _;
use std::time::Duration;

use crate::support::postgres::{PgHarness, ask, child, pool, role, run, settings, until};
use hapax::Guard;
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Claims, Intervention, Mode, Outcome, State, Verdict};
use hapax::testing::{Harness as _, crash, kit};
use sqlx::{AssertSqlSafe, PgPool};

const EVENTS: usize = 5;
const LEASE: Duration = Duration::from_secs(60);
const ATTEMPTS_MAX: u32 = 3;

fn guard(ledger: PgLedger) -> Guard<PgLedger> {
    let guard = Guard::builder(ledger).scope("orders").attempts_max(ATTEMPTS_MAX);
    guard.lease(LEASE, LEASE / 4).build().unwrap()
}

/// The stage: a ledger whose clock moves when told to, a sink that dedups on the key, and a record of every call to it.
async fn stage() -> PgHarness {
    let harness = PgHarness::new().await;
    let s = &harness.schema;
    run(
        &harness.pool,
        format!(
            "create table {s}.called (key text not null, token bigint not null); \
             create table {s}.sink (key text primary key); \
             create table {s}.balance (account int primary key, amount int not null, writes int not null); \
             insert into {s}.balance values (1, 0, 0)"
        ),
    )
    .await;
    harness
}

/// Runs a child until it dies at its crash point (or ends well, without one).
async fn play(test: &str, part: &str, schema: &str, crash_at: Option<&str>) {
    let mut command = child(test, part, schema);
    if let Some(point) = crash_at {
        let hit = if point.contains(':') { "" } else { ":1" };
        command.env(crash::VARIABLE, format!("{point}{hit}"));
    }
    let status = command.status().await.unwrap();
    match crash_at {
        Some(point) => assert_eq!(status.signal(), Some(9), "{part} should die at {point}, and is {status}"),
        None => assert!(status.success(), "{part}: {status}"),
    }
}

// --- A2: a leased worker ---------------------------------------------------------------------------------------------

/// A child: leases each event, calls the sink, settles.
async fn worker(schema: &str) {
    let pool = pool(2).await;
    let guard = guard(PgLedger::with_pool(pool.clone(), settings(schema)).await.unwrap());
    for n in 0..EVENTS {
        if let Outcome::First(mut lease) = guard.lease(format!("event-{n}")).await.unwrap() {
            hapax::crash_point!("worker.before_effect");
            let (key, token) = (lease.key().to_string(), lease.token().0);
            lease.run(call_the_sink(&pool, schema, &key, token)).await.unwrap();
            hapax::crash_point!("worker.after_effect");
            lease.done().await.unwrap();
            hapax::crash_point!("worker.after_done");
        }
    }
}

/// The sink dedups on the key; the record keeps every call.
async fn call_the_sink(pool: &PgPool, schema: &str, key: &str, token: i64) {
    let sql = format!(
        "with call as (insert into {schema}.called values ($1, $2)) insert into {schema}.sink values ($1) on conflict do nothing"
    );
    sqlx::query(AssertSqlSafe(sql)).bind(key).bind(token).execute(pool).await.unwrap();
}

/// Kills a worker at the first, second … hit of a crash point until a run is clean; then every effect is there once.
async fn killed_worker(test: &str, point: &str) {
    if let Some((_, schema)) = role() {
        return worker(&schema).await;
    }
    let harness = stage().await;
    let s = &harness.schema;
    let mut kills = 0;
    // Each event gets killed once, some points (a claim that is asked for again) may be hit more often.
    for _ in 0..EVENTS {
        play(test, "worker", s, Some(point)).await;
        kills += 1;
        // The dead one's lease runs out; the record is looked at by nobody but us.
        harness.advance(LEASE + Duration::from_secs(1)).await;
        // What was killed runs again, alone, to its end: the next kill meets another event.
        one_run(&harness).await;
    }
    play(test, "worker", s, None).await;
    let (called, effects): (i64, i64) = (
        ask(&harness.pool, format!("select count(*) from {s}.called")).await,
        ask(&harness.pool, format!("select count(*) from {s}.sink")).await,
    );
    let done: i64 =
        ask(&harness.pool, format!("select count(*) from {s}.entries where state = 'done'")).await;
    println!("{point}: {kills} kills, {called} calls to the sink, {effects} effects, {done} done");
    assert_eq!((effects, done), (EVENTS as i64, EVENTS as i64));
    assert!(called <= effects + kills, "a kill repeats at most one call");
}

/// Finishes what is claimable now and was begun before, here in this process.
async fn one_run(harness: &PgHarness) {
    let ledger = kit::open(harness).await;
    let guard = guard(ledger.clone());
    for n in 0..EVENTS {
        let claim = kit::claim(&format!("event-{n}"), kit::lease());
        if kit::entry(&ledger, &claim).await.is_some_and(|entry| entry.state == State::Leased)
            && let Outcome::First(lease) = guard.lease(&claim.identity.id).await.unwrap()
        {
            assert!(lease.suspect(), "its last run ended with its process");
            call_the_sink(&harness.pool, &harness.schema, &lease.key().to_string(), lease.token().0).await;
            lease.done().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_2_worker_killed_after_claim() {
    killed_worker("acceptance_2_worker_killed_after_claim", "claim.answered").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_2_worker_killed_before_effect() {
    killed_worker("acceptance_2_worker_killed_before_effect", "worker.before_effect").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_2_worker_killed_after_effect() {
    killed_worker("acceptance_2_worker_killed_after_effect", "worker.after_effect").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_2_worker_killed_before_done() {
    killed_worker("acceptance_2_worker_killed_before_done", "settle.sending").await;
}

/// The two steps that acceptance does not name: before the claim is sent, and after the settle was answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_killed_outside_of_its_lease_costs_nothing() {
    const NAME: &str = "a_worker_killed_outside_of_its_lease_costs_nothing";
    if let Some((_, schema)) = role() {
        return worker(&schema).await;
    }
    let harness = stage().await;
    let s = &harness.schema;
    play(NAME, "worker", s, Some("claim.sending")).await;
    for hit in 1..=EVENTS {
        play(NAME, "worker", s, Some(if hit % 2 == 0 { "settle.answered" } else { "worker.after_done" }))
            .await;
    }
    let (called, attempts): (i64, i64) = (
        ask(&harness.pool, format!("select count(*) from {s}.called")).await,
        ask(&harness.pool, format!("select sum(attempts) from {s}.entries")).await,
    );
    println!("{} kills outside of a lease: {called} calls, {attempts} attempts", EVENTS + 1);
    assert_eq!((called, attempts), (EVENTS as i64, EVENTS as i64));
}

#[tokio::test(flavor = "multi_thread")]
async fn t22_an_event_that_kills_its_process_is_dead_lettered() {
    const NAME: &str = "t22_an_event_that_kills_its_process_is_dead_lettered";
    if let Some((_, schema)) = role() {
        return worker(&schema).await;
    }
    let harness = stage().await;
    let s = &harness.schema;
    for _ in 0..ATTEMPTS_MAX {
        play(NAME, "worker", s, Some("worker.before_effect")).await;
        harness.advance(LEASE + Duration::from_secs(1)).await;
    }
    play(NAME, "worker", s, None).await; // the killer is told to be dead, all others run
    let ledger = kit::open(&harness).await;
    let killer = kit::there(&ledger, &kit::claim("event-0", kit::lease())).await;
    println!("{}: {} after {} runs: {:?}", killer.identity, killer.state, killer.attempts, killer.reason);
    assert_eq!((killer.state, killer.attempts), (State::Dead, ATTEMPTS_MAX));
    let done: i64 =
        ask(&harness.pool, format!("select count(*) from {s}.entries where state = 'done'")).await;
    assert_eq!(done, EVENTS as i64 - 1, "bystanders do not die with a killer");
}

// --- A3: a projection in one transaction -----------------------------------------------------------------------------

/// A child: claims and writes in one transaction.
async fn projection(schema: &str) {
    let ledger = PgLedger::with_pool(pool(2).await, settings(schema)).await.unwrap();
    let guard = guard(ledger.clone());
    for n in 0..EVENTS {
        let mut tx = ledger.pool().begin().await.unwrap();
        if guard.try_claim_in(&mut tx, format!("event-{n}")).await.unwrap().is_claimed() {
            hapax::crash_point!("projection.before_write");
            let sql = format!("update {schema}.balance set amount = amount + $1, writes = writes + 1");
            sqlx::query(AssertSqlSafe(sql)).bind(n as i32 + 1).execute(&mut *tx).await.unwrap();
            hapax::crash_point!("projection.after_write");
            tx.commit().await.unwrap();
        }
    }
}

async fn killed_projection(test: &str, point: &str) {
    if let Some((_, schema)) = role() {
        return projection(&schema).await;
    }
    let harness = stage().await;
    let s = &harness.schema;
    for n in 0..EVENTS {
        // Killed at the first event; then that one commits and the next is killed, and so on.
        play(test, "projection", s, Some(&format!("{point}:{}", n.min(1) + 1))).await;
        finish_dead_transactions(&harness).await;
    }
    play(test, "projection", s, None).await;
    let model: (i32, i32) = sqlx::query_as(AssertSqlSafe(format!("select amount, writes from {s}.balance")))
        .fetch_one(&harness.pool)
        .await
        .unwrap();
    println!("{point}: {EVENTS} kills, the read model is {model:?}");
    assert_eq!(model, ((1..=EVENTS as i32).sum(), EVENTS as i32), "the same as without a kill");
}

/// The server notices that a client is gone when it next listens to it; a redelivery comes later than that.
async fn finish_dead_transactions(harness: &PgHarness) {
    until("the dead client's transaction has ended", async || {
        ask::<i64>(
            &harness.pool,
            format!(
                "select count(*) from pg_stat_activity where state like 'idle in transaction%' and query like '%{}%'",
                harness.schema
            ),
        )
        .await
            == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_3_projection_killed_before_write() {
    killed_projection("acceptance_3_projection_killed_before_write", "projection.before_write").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn acceptance_3_projection_killed_after_write() {
    killed_projection("acceptance_3_projection_killed_after_write", "projection.after_write").await;
}

// --- T43: sweeps and recovery ----------------------------------------------------------------------------------------

/// A child: sweeps.
async fn sweeper(schema: &str) {
    let ledger = PgLedger::with_pool(pool(2).await, settings(schema)).await.unwrap();
    kit::sweep(&ledger, 7 * kit::DAY).await;
}

/// An old week with one event done, one leased and lapsed, one waiting for its retry and one dead.
struct OldWeek {
    done: Claim,
    leased: Claim,
    retrying: Claim,
    dead: Claim,
    token: hapax::ledger::Token,
}

async fn old_week(harness: &PgHarness) -> OldWeek {
    let ledger = kit::open(harness).await;
    let now = ledger.now().await.unwrap();
    let claim = |n| kit::claim(&kit::v7_at(now, n).to_string(), kit::lease());
    let (done, leased, retrying, dead) = (claim(1), claim(2), claim(3), claim(4));
    kit::run(&ledger, &done).await;
    let grant = kit::first(&ledger, &leased).await;
    for (claim, verdict) in [(&retrying, kit::retry(Duration::from_secs(1))), (&dead, kit::dead())] {
        let grant = kit::first(&ledger, claim).await;
        kit::settled(&ledger, claim, &grant, verdict).await;
    }
    harness.advance(30 * kit::DAY).await;
    OldWeek { done, leased, retrying, dead, token: grant.token }
}

#[tokio::test(flavor = "multi_thread")]
async fn t43_a_sweep_killed_at_any_step_is_finished_later() {
    const NAME: &str = "t43_a_sweep_killed_at_any_step_is_finished_later";
    if let Some((_, schema)) = role() {
        return sweeper(&schema).await;
    }
    for point in [
        "sweep.closed",
        "sweep.listed",
        "sweep.waited",
        "sweep.moved",
        "sweep.waited_again",
        "sweep.detached",
        "sweep.dropped",
    ] {
        for settle_between in [false, true] {
            let harness = stage().await;
            let week = old_week(&harness).await;
            play(NAME, "sweeper", &harness.schema, Some(point)).await;
            between(&harness, &week, point, settle_between).await;
            finished_later(&harness, &week, point, settle_between).await;
        }
    }
}

/// After the kill, before the next sweep: nothing is fresh, nothing open is lost, and work may go on.
async fn between(harness: &PgHarness, week: &OldWeek, point: &str, settle: bool) {
    let ledger = kit::open(harness).await;
    let word = kit::one(&ledger, &kit::another(&week.done)).await.name();
    assert!(["duplicate", "too_old"].contains(&word), "{point}: a done one is {word}");
    kit::expect(&ledger, &kit::another(&week.dead), "dead").await;
    if settle {
        // The worker that held a lease all the while comes back and settles.
        let grant = hapax::ledger::Grant {
            token: week.token,
            week: kit::there(&ledger, &week.leased).await.week,
            until: ledger.now().await.unwrap(),
            attempt: 1,
            suspect: false,
        };
        kit::settled(&ledger, &week.leased, &grant, kit::done()).await;
        kit::expect(&ledger, &kit::another(&week.leased), "duplicate").await;
    }
}

async fn finished_later(harness: &PgHarness, week: &OldWeek, point: &str, settled: bool) {
    let ledger = kit::open(harness).await;
    let s = &harness.schema;
    let tables = format!(
        "select count(*) from pg_class where relname like 'entry\\__%' and relkind = 'r' and relnamespace = '{s}'::regnamespace"
    );
    let mut sweeps = 0;
    // A settle is news of its week, which then stays for another retention.
    while ask::<i64>(&harness.pool, tables.clone()).await > 1 {
        kit::sweep(&ledger, 7 * kit::DAY).await;
        // What was settled is never run again, at any point in between.
        if settled {
            let word = kit::one(&ledger, &kit::another(&week.leased)).await.name();
            assert!(["duplicate", "too_old"].contains(&word), "{point}: a settled one is {word}");
        }
        sweeps += 1;
        harness.advance(8 * kit::DAY).await;
        assert!(sweeps < 5, "{point}: the week is still there after {sweeps} sweeps");
    }
    let done = kit::one(&ledger, &kit::another(&week.done)).await.name();
    let leased = kit::one(&ledger, &kit::another(&week.leased)).await.name();
    let retrying = kit::one(&ledger, &kit::another(&week.retrying)).await.name();
    let dead = kit::one(&ledger, &kit::another(&week.dead)).await.name();
    println!(
        "{point}, settled between: {settled}: gone after {sweeps} more sweeps; done: {done}, leased: {leased}, retrying: {retrying}, dead: {dead}"
    );
    assert_eq!(done, "too_old", "{point}");
    assert_eq!((retrying, dead), ("claimed", "dead"), "{point}: what is open outlives its week");
    if settled {
        assert!(["duplicate", "too_old"].contains(&leased), "{point}: a settled one is {leased}");
    } else {
        assert_eq!(leased, "claimed", "{point}: a lapsed lease is taken over");
    }
}

/// The server itself stops in the middle of DETACH CONCURRENTLY; the next sweep finishes it.
#[tokio::test(flavor = "multi_thread")]
async fn t43_a_detach_that_was_cut_short_is_finished_later() {
    const NAME: &str = "t43_a_detach_that_was_cut_short_is_finished_later";
    if let Some((_, schema)) = role() {
        return sweeper(&schema).await;
    }
    let harness = stage().await;
    let week = old_week(&harness).await;
    let s = &harness.schema;
    let ledger = kit::open(&harness).await;
    let settings = hapax::ledger::SweepSettings { retention: 7 * kit::DAY, batch_max: 1000, dry_run: false };
    until("everything is moved", async || {
        ledger.sweep_part(settings, 1).await.unwrap();
        ask(&harness.pool, format!("select exists (select from {s}.dropped where phase = 'empty')")).await
    })
    .await;
    // Someone reads the ledger in a transaction: a detach waits for its end.
    let mut reader = harness.pool.begin().await.unwrap();
    sqlx::query(AssertSqlSafe(format!("select from {s}.entry"))).execute(&mut *reader).await.unwrap();
    let mut command = child(NAME, "sweeper", s);
    let mut sweeping = command.stderr(std::process::Stdio::null()).spawn().unwrap();
    until("the detach is under way", async || {
        ask(&harness.pool, format!("select exists (select from pg_inherits where inhparent = '{s}.entry'::regclass and inhdetachpending)")).await
    })
    .await;
    sweeping.kill().await.unwrap();
    let ended: i64 = ask(&harness.pool, format!("select count(pg_terminate_backend(pid)) from pg_stat_activity where query like 'alter table {s}.entry detach%'")).await;
    assert_eq!(ended, 1);
    reader.rollback().await.unwrap();
    between(&harness, &week, "detach", true).await;
    finished_later(&harness, &week, "detach", true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn t43_recovery_from_a_stale_read_changes_nothing() {
    let harness = stage().await;
    let ledger = kit::open(&harness).await;
    let claim = kit::claim("event-0", kit::lease());
    let old = kit::first(&ledger, &claim).await;
    harness.advance(LEASE + Duration::from_secs(1)).await;
    // Recovery reads: leased by someone who is gone …
    let stale = kit::there(&ledger, &claim).await;
    assert_eq!(stale.token, old.token);
    // … and before it acts, another worker takes over and is done.
    let again = kit::another(&claim);
    let new = kit::first(&ledger, &again).await;
    kit::settled(&ledger, &again, &new, kit::done()).await;
    let before = kit::there(&ledger, &claim).await;
    for verdict in [kit::done(), kit::retry(Duration::ZERO), kit::dead(), Verdict::release()] {
        assert!(kit::is_fenced(kit::settle(&ledger, &claim, &old, verdict).await));
    }
    assert!(kit::is_fenced(kit::extend(&ledger, &claim, &old, LEASE).await));
    assert!(kit::intervene(&ledger, &claim, Intervention::Redrive).await.is_err());
    assert_eq!(kit::there(&ledger, &claim).await, before, "nothing was changed");
    kit::expect(&ledger, &kit::another(&claim), "duplicate").await;
    // The same in the caller's transaction.
    let outcome = harness.in_transaction(&ledger, &[kit::claim("event-0", Mode::Done)], true).await.unwrap();
    assert_eq!(outcome[0].as_ref().unwrap().name(), "duplicate");
}
