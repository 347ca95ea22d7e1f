//! PostgreSQL itself is killed with -9, under claims, inside a sweep, and inside the sweep that finishes what the killed one
//! left: nothing is lost, nothing is doubled. And a server that wants a password.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::postgres::{PgHarness, ask, fresh_schema, pool_to, run, settings, until, until_waiting};
use hapax::Error;
use hapax::backend::postgres::{PgLedger, PgSettings};
use hapax::ledger::{Claim, Claims, Mode, Operations, Outcome, SweepSettings};
use hapax::testing::{Harness as _, kit};
use sqlx::{AssertSqlSafe, PgPool};

const RETENTION: Duration = Duration::from_secs(7 * 86_400);

/// A pool whose broken connections are noticed when they are used, as a ledger's own pool is.
async fn own_pool(url: &str) -> PgPool {
    sqlx::postgres::PgPoolOptions::new().max_connections(12).connect(url).await.unwrap()
}

/// Claims until there is an answer: the same claim, whatever the server does.
async fn insist(ledger: &PgLedger, claim: &Claim) -> Outcome {
    loop {
        match ledger.claim(std::slice::from_ref(claim)).await.map(|mut outcomes| outcomes.remove(0)) {
            Ok(Ok(outcome @ Outcome::Busy { .. })) => drop(outcome), // locked by somebody whose end is near
            Ok(Ok(outcome)) => return outcome,
            Ok(Err(error)) | Err(error) => assert!(error.is_retryable(), "{error:?}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Three rivals claim the same ids while the server dies again and again; each id has one winner, and its row.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_1_claims_while_the_server_is_killed() {
    const RIVALS: usize = 3;
    const IDS: usize = 600;
    const KILLS: usize = 4;
    let mut cluster = Cluster::new().await;
    let schema = fresh_schema();
    let ledger = PgLedger::with_pool(own_pool(&cluster.url()).await, settings(&schema)).await.unwrap();
    let now = ledger.now().await.unwrap();
    let answered = Arc::new(AtomicUsize::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for rival in 0..RIVALS {
        for part in 0..4 {
            let (ledger, answered) = (ledger.clone(), Arc::clone(&answered));
            tasks.spawn(async move {
                let mut won = Vec::new();
                for n in (0..IDS).filter(|n| n % 4 == part) {
                    // Half of them of a week, half timeless.
                    let id = if n % 8 < 4 {
                        format!("event-{n}")
                    } else {
                        let uuid = kit::v7_at(now, 0).to_string();
                        format!("{}{n:012x}", &uuid[..24])
                    };
                    let claim = kit::claim(&id, Mode::Done);
                    match insist(&ledger, &claim).await {
                        Outcome::First(_) => won.push(id),
                        Outcome::Duplicate { .. } => {}
                        other => panic!("rival {rival}, {id}: {other:?}"),
                    }
                    answered.fetch_add(1, Ordering::SeqCst);
                }
                won
            });
        }
    }
    for kill in 1..=KILLS {
        let at = RIVALS * IDS * kill / (KILLS + 1);
        until("enough claims are answered", async || answered.load(Ordering::SeqCst) >= at).await;
        cluster.kill();
        cluster.start().await;
    }
    let mut won = Vec::new();
    while let Some(mine) = tasks.join_next().await {
        won.extend(mine.unwrap());
    }
    let all = won.len();
    won.sort();
    won.dedup();
    let pool = pool_to(&cluster.url(), 1).await;
    let rows: i64 = ask(&pool, format!("select count(*) from {schema}.entries where state = 'done'")).await;
    println!("{KILLS} kills: {} ids, {all} winners, {rows} rows", won.len());
    assert_eq!((won.len(), all, rows), (IDS, IDS, IDS as i64));
}

struct OldWeek {
    done: Claim,
    leased: Claim,
    dead: Claim,
}

impl OldWeek {
    async fn new(harness: &PgHarness) -> Self {
        let ledger = kit::open(harness).await;
        let now = ledger.now().await.unwrap();
        let claim = |n| kit::claim(&kit::v7_at(now, n).to_string(), kit::lease());
        let week = OldWeek { done: claim(1), leased: claim(2), dead: claim(3) };
        kit::run(&ledger, &week.done).await;
        kit::first(&ledger, &week.leased).await;
        let grant = kit::first(&ledger, &week.dead).await;
        kit::settled(&ledger, &week.dead, &grant, kit::dead()).await;
        harness.advance(30 * kit::DAY).await;
        week
    }

    /// Nothing that took effect is new, nothing open is gone.
    async fn is_whole(&self, harness: &PgHarness, when: &str) {
        let ledger = kit::open(harness).await;
        let done = kit::one(&ledger, &kit::another(&self.done)).await.name();
        assert!(["duplicate", "too_old"].contains(&done), "{when}: a done one is {done}");
        kit::expect(&ledger, &kit::another(&self.dead), "dead").await;
        assert!(kit::entry(&ledger, &self.leased).await.is_some(), "{when}: the open lease is gone");
        println!("{when}: done is {done}, dead is dead, the lease is there");
    }
}

fn sweep_beside(ledger: &PgLedger) -> tokio::task::JoinHandle<hapax::Result<hapax::ledger::Swept>> {
    let ledger = ledger.clone();
    tokio::spawn(async move {
        ledger.sweep(SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false }).await
    })
}

/// Someone whose snapshot is old: a detach waits for them.
async fn reader(harness: &PgHarness) -> sqlx::PgTransaction<'static> {
    let mut tx = harness.pool.begin().await.unwrap();
    sqlx::raw_sql("set transaction isolation level repeatable read").execute(&mut *tx).await.unwrap();
    let sql = format!("select from {}.entry", harness.schema);
    sqlx::query(AssertSqlSafe(sql)).execute(&mut *tx).await.unwrap();
    tx
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t43_the_server_killed_inside_a_sweep_and_inside_its_recovery() {
    let mut cluster = Cluster::new().await;
    let harness = PgHarness::on(own_pool(&cluster.url()).await).await;
    let ledger = kit::open(&harness).await;
    let s = harness.schema.clone();
    let week = OldWeek::new(&harness).await;
    let settings = SweepSettings { retention: RETENTION, batch_max: 1000, dry_run: false };
    // Inside the closing: somebody has the table it is written to.
    let mut lock = harness.pool.begin().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("lock table {s}.dropped in share mode")))
        .execute(&mut *lock)
        .await
        .unwrap();
    let sweeping = sweep_beside(&ledger);
    until_waiting(&harness.pool, &format!("insert into {s}.dropped")).await;
    die(&mut cluster, &harness, sweeping).await;
    drop(lock);
    week.is_whole(&harness, "killed before it is closed").await;
    // Inside the wait.
    let old = reader(&harness).await;
    let sweeping = sweep_beside(&ledger);
    until("it waits", async || {
        ask(&harness.pool, format!("select exists (select from {s}.dropped where waits <> '{{}}')")).await
    })
    .await;
    die(&mut cluster, &harness, sweeping).await;
    drop(old);
    week.is_whole(&harness, "killed while it waits").await;
    // Inside the detach.
    until("everything is moved", async || {
        ledger.sweep_part(settings, 1).await.unwrap();
        ask(&harness.pool, format!("select exists (select from {s}.dropped where phase = 'empty')")).await
    })
    .await;
    let old = reader(&harness).await;
    let sweeping = sweep_beside(&ledger);
    until_waiting(&harness.pool, "detach partition").await;
    die(&mut cluster, &harness, sweeping).await;
    drop(old);
    let pending: bool = ask(&harness.pool, format!("select exists (select from pg_inherits where inhparent = '{s}.entry'::regclass and inhdetachpending)")).await;
    assert!(pending, "it died inside the detach");
    week.is_whole(&harness, "killed inside the detach").await;
    // Inside the recovery: it finishes the detach, and waits for the row that says so.
    let mut lock = harness.pool.begin().await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("select from {s}.dropped for update")))
        .execute(&mut *lock)
        .await
        .unwrap();
    let sweeping = sweep_beside(&ledger);
    until_waiting(&harness.pool, "select true from").await;
    die(&mut cluster, &harness, sweeping).await;
    drop(lock);
    week.is_whole(&harness, "killed inside the recovery").await;
    // And then it is left in peace.
    until("the week is gone", async || kit::sweep(&ledger, RETENTION).await.weeks.len() == 1).await;
    week.is_whole(&harness, "in the end").await;
    kit::expect(&ledger, &kit::another(&week.done), "too_old").await;
    kit::expect(&ledger, &kit::another(&week.leased), "claimed").await;
}

/// Kills the server, with everything that goes on in it, and has it up again.
async fn die(
    cluster: &mut Cluster,
    harness: &PgHarness,
    sweeping: tokio::task::JoinHandle<hapax::Result<hapax::ledger::Swept>>,
) {
    cluster.kill();
    let error = sweeping.await.unwrap().expect_err("its server is gone");
    assert!(error.is_retryable(), "{error:?}");
    cluster.start().await;
    // Connections of before are noticed to be dead.
    until("the pool has connections again", async || {
        sqlx::query("select 1").execute(&harness.pool).await.is_ok()
    })
    .await;
}

#[tokio::test]
async fn a_wrong_password_is_a_sentence_without_it() {
    let cluster = Cluster::new().await;
    let admin = pool_to(&cluster.url(), 1).await;
    run(&admin, "create role app login password 'right-one'".into()).await;
    let hba = cluster.data().join("pg_hba.conf");
    let rules = std::fs::read_to_string(&hba).unwrap();
    std::fs::write(&hba, format!("host all app 127.0.0.1/32 scram-sha-256\n{rules}")).unwrap();
    run(&admin, "select pg_reload_conf()".into()).await;
    run(&admin, "grant create on database postgres to app".into()).await;
    until("the password is asked for", async || {
        <sqlx::PgConnection as sqlx::Connection>::connect(&cluster.url_as("app")).await.is_err()
    })
    .await;
    for who in ["app:wrong-one", "app", "nobody-of-that-name:wrong-one"] {
        let error = PgLedger::connect(&cluster.url_as(who), PgSettings::default()).await.expect_err(who);
        let text = error.chain();
        println!("{who}: {text}");
        assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
        assert!(text.contains("refused the connection") && !text.contains("wrong-one"), "{text}");
    }
    PgLedger::connect(&cluster.url_as("app:right-one"), PgSettings::default()).await.expect("the right one");
}
