//! Lost acknowledgements: the server commits, its answer never arrives. Nothing is lost, nothing is doubled, and nobody
//! finds himself busy with himself.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use crate::support::postgres as support;
use std::time::Duration;

use crate::support::postgres::{ask, fresh_schema, pool, pool_to, run, settings, until, url};
use crate::support::proxy::Proxy;
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Claims, Mode, Outcome, State};
use hapax::testing::kit;
use hapax::{Error, Guard};
use sqlx::{AssertSqlSafe, PgPool};

const CUTS: usize = 100;

/// The independent record: one row per effect, unique in nothing, so that a double would show.
pub(super) async fn effect<'e>(
    database: impl sqlx::PgExecutor<'e>,
    schema: &str,
    id: &str,
) -> sqlx::Result<()> {
    sqlx::query(AssertSqlSafe(format!("insert into {schema}.effect values ($1)")))
        .bind(id)
        .execute(database)
        .await
        .map(drop)
}

/// (ids with an effect, effects)
pub(super) async fn effects(pool: &PgPool, schema: &str, like: &str) -> (i64, i64) {
    let count = |what: &str| format!("select count({what}) from {schema}.effect where id like '{like}%'");
    (ask(pool, count("distinct id")).await, ask(pool, count("*")).await)
}

pub(super) struct Scene {
    pub proxy: Proxy,
    /// Through the proxy.
    pub ledger: PgLedger,
    /// Past it.
    pub direct: PgPool,
    pub schema: String,
}

pub(super) async fn scene() -> Scene {
    let (direct, schema) = (pool(4).await, fresh_schema());
    PgLedger::with_pool(direct.clone(), settings(&schema)).await.expect("a fresh ledger");
    run(&direct, format!("create table {schema}.effect (id text not null)")).await;
    let proxy = Proxy::new(&url()).await;
    let through = pool_to(&proxy.url(&url()), 3).await;
    let ledger = PgLedger::with_pool(through, settings(&schema)).await.expect("the ledger opens again");
    // The scope is registered and statements are known before anything is cut.
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await;
    Scene { proxy, ledger, direct, schema }
}

#[tokio::test(flavor = "multi_thread")]
async fn t31_cut_commit_acknowledgements_lose_and_double_nothing() {
    let scene = scene().await;
    let (claims, settles) = claims_and_settles(&scene).await;
    let commits = commits(&scene).await;
    let unsent = unsent_commits(&scene).await;
    println!(
        "cut: {claims} answers to claims, {settles} answers to settles, {commits} answers to COMMIT, {unsent} COMMITs; \
         0 lost, 0 doubled, 0 busy"
    );
    assert_eq!((claims, settles, commits, unsent), (CUTS, CUTS, CUTS, CUTS));
}

/// Leases through the guard's per-event calls: each claim's and each settle's answer is cut.
async fn claims_and_settles(scene: &Scene) -> (usize, usize) {
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    let (mut claims, mut settles) = (0, 0);
    for n in 0..CUTS {
        let id = format!("leased-{n}");
        let before = scene.proxy.lost();
        scene.proxy.lose_answer();
        let outcome = guard.lease(&id).await.expect("doubt is resolved, not handed on");
        let Outcome::First(lease) = outcome else { panic!("{id} found itself {}", outcome.name()) };
        claims += scene.proxy.lost() - before;
        effect(&scene.direct, &scene.schema, &id).await.unwrap();
        let before = scene.proxy.lost();
        scene.proxy.lose_answer();
        lease.done().await.expect("a settle is repeated with its token");
        settles += scene.proxy.lost() - before;
    }
    for n in 0..CUTS {
        let claim = kit::claim(&format!("leased-{n}"), kit::lease());
        let entry = kit::there(&scene.ledger, &claim).await;
        assert_eq!((entry.state, entry.attempts), (State::Done, 1), "{}", claim.identity);
        kit::expect(&scene.ledger, &claim, "duplicate").await;
    }
    assert_eq!(effects(&scene.direct, &scene.schema, "leased-").await, (CUTS as i64, CUTS as i64));
    (claims, settles)
}

/// One try of claim and effect in one transaction; the error is that of COMMIT.
async fn in_one_transaction(scene: &Scene, claim: &Claim, lose: impl Fn(&Proxy)) -> sqlx::Result<()> {
    let mut tx = scene.ledger.pool().begin().await.unwrap();
    let outcome =
        scene.ledger.claim_in(&mut tx, std::slice::from_ref(claim)).await.unwrap().remove(0).unwrap();
    assert!(outcome.is_claimed(), "{} found itself {}", claim.identity, outcome.name());
    effect(&mut *tx, &scene.schema, &claim.identity.id.to_string()).await.unwrap();
    lose(&scene.proxy);
    tx.commit().await
}

/// COMMIT was answered by a cut: `was_committed` decides whether to do it again.
async fn decide(scene: &Scene, kind: &str, lose: impl Fn(&Proxy) + Copy) -> (usize, usize) {
    let (mut tried, mut cut, mut again) = (0, 0, 0);
    while cut < CUTS {
        let claim = kit::claim(&format!("{kind}-{tried}"), Mode::Done);
        tried += 1;
        assert!(tried <= 2 * CUTS, "the cuts go elsewhere");
        if in_one_transaction(scene, &claim, lose).await.is_err() {
            cut += 1;
            if !scene.ledger.was_committed(&claim).await.expect("an answer to the doubt") {
                again += 1;
                in_one_transaction(scene, &claim, |_| ()).await.expect("nothing is cut this time");
                assert!(scene.ledger.was_committed(&claim).await.unwrap());
            }
        } // else a connection on its way back to the pool met the cut
        kit::expect(&scene.ledger, &kit::another(&claim), "duplicate").await;
    }
    assert_eq!(effects(&scene.direct, &scene.schema, kind).await, (tried as i64, tried as i64));
    (cut, again)
}

async fn commits(scene: &Scene) -> usize {
    let (cut, again) = decide(scene, "committed", Proxy::lose_answer).await;
    assert_eq!(again, 0, "what was committed is not done again");
    cut
}

async fn unsent_commits(scene: &Scene) -> usize {
    let (cut, again) = decide(scene, "unsent", Proxy::lose_commit).await;
    assert_eq!(again, CUTS, "what never arrived is done again");
    cut
}

#[tokio::test(flavor = "multi_thread")]
async fn was_committed_waits_for_a_transaction_that_is_still_open() {
    let scene = scene().await;
    let claim = kit::claim("still-open", Mode::Done);
    let mut tx = scene.direct.begin().await.unwrap();
    let slice = std::slice::from_ref(&claim);
    assert!(scene.ledger.claim_in(&mut tx, slice).await.unwrap().remove(0).unwrap().is_claimed());
    let asking = tokio::spawn({
        let (ledger, claim) = (scene.ledger.clone(), claim.clone());
        async move { ledger.was_committed(&claim).await }
    });
    support::until_waiting(&scene.direct, &format!("{}.claim_batch", scene.schema)).await;
    tx.commit().await.unwrap();
    assert!(asking.await.unwrap().unwrap(), "the commit landed after the question");
}

/// The database goes away under the guard's calls: explicit, retryable, free of charge; then work goes on.
#[tokio::test(flavor = "multi_thread")]
async fn acceptance_8_outage_is_explicit_and_costs_no_attempt() {
    let scene = scene().await;
    let guard = Guard::builder(scene.ledger.clone()).scope("orders").build().unwrap();
    let Outcome::First(held) = guard.lease("held-through").await.unwrap() else { panic!("a first") };
    scene.proxy.refuse();
    let began = std::time::Instant::now();
    let error = guard.lease("during").await.expect_err("the ledger is away");
    println!("answered after {:?}: {}", began.elapsed(), error.chain());
    assert!(matches!(error, Error::Unavailable { .. }) && error.is_retryable(), "{error:?}");
    let before = scene.proxy.lost();
    let settling = tokio::spawn(held.done());
    until("the settle was refused", async || scene.proxy.lost() > before).await;
    scene.proxy.heal();
    settling.await.unwrap().expect("the settle outlives the outage");
    let Outcome::First(lease) = guard.lease("during").await.expect("the ledger is back") else {
        panic!("a first")
    };
    assert_eq!(lease.attempt(), 1, "an outage is not an attempt");
    lease.done().await.unwrap();
    for id in ["held-through", "during"] {
        let entry = scene.ledger.get(&kit::identity(id), None).await.unwrap().expect("an entry");
        assert_eq!((entry.state, entry.attempts), (State::Done, 1), "{id}");
    }
}

/// A caller that is cancelled while it begins a transaction leaves nothing open: what the pool's connections do next by
/// themselves is committed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t99_a_cancelled_begin_leaves_no_transaction_in_the_pool() {
    let witness = support::pool(1).await;
    let ledger = support::ledger(1).await; // one connection: whoever comes next gets the same one
    let table = format!("effect_{}", uuid::Uuid::new_v4().simple());
    support::run(&witness, format!("create table {table} (n int)")).await;
    for n in 0..60 {
        // Cancelled before, while and after the server answers.
        let begun = tokio::time::timeout(Duration::from_micros(n * 25), ledger.transaction()).await;
        drop(begun);
        support::run(ledger.pool(), format!("insert into {table} values ({n})")).await;
        let rows: i64 = support::ask(&witness, format!("select count(*) from {table}")).await;
        assert_eq!(rows, i64::try_from(n).unwrap() + 1, "it was acknowledged, and is not there");
    }
    support::run(&witness, format!("drop table {table}")).await;
}

/// A restarted server has closed every connection of the pool. The first call gets over all of them at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_call_gets_over_a_pool_whose_connections_are_all_dead() {
    // A pool as hapax opens it: sqlx does not test connections before it hands them out.
    let (witness, mut settings) = (pool(1).await, settings(&fresh_schema()));
    settings.pool_max = 8;
    let ledger = PgLedger::connect(&url(), settings).await.unwrap();
    let claim = kit::claim("after-the-restart", kit::lease());
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await;
    let mut grant = None;
    for round in 0..3 {
        let mut open = Vec::new();
        for _ in 0..8 {
            open.push(ledger.pool().acquire().await.unwrap());
        }
        let mut pids: Vec<i32> = Vec::new();
        for connection in &mut open {
            let pid =
                sqlx::query_scalar("select pg_backend_pid()").fetch_one(&mut **connection).await.unwrap();
            pids.push(pid);
        }
        drop(open);
        until("the connections are back in the pool", async || ledger.pool().num_idle() == 8).await;
        let pids = pids.iter().map(i32::to_string).collect::<Vec<_>>().join(", ");
        run(&witness, format!("select pg_terminate_backend(pid, 60000) from unnest(array[{pids}]) pid"))
            .await;
        // Each of these is one call of the ledger itself, with no guard that would repeat it.
        match (round, &grant) {
            (0, _) => grant = Some(kit::first(&ledger, &claim).await),
            (1, Some(grant)) => {
                let settles = [kit::settling(&claim, grant, kit::done())];
                let answer =
                    ledger.settle(&settles).await.expect("a settle is sent again").remove(0).unwrap();
                assert!(!kit::is_fenced(answer));
            }
            _ => kit::expect(&ledger, &kit::another(&claim), "duplicate").await,
        }
    }
}

/// One budget in one place: a statement that meets a conflict each time is sent 20 times, through the guard as well, and the
/// error says so.
#[tokio::test(flavor = "multi_thread")]
async fn conflicts_are_given_up_after_20_in_all() {
    let ledger = support::ledger(4).await;
    let s = ledger.schema().to_owned();
    kit::run(&ledger, &kit::claim("warm-up", kit::lease())).await;
    run(
        ledger.pool(),
        format!(
            "create sequence {s}.sends; \
             create function {s}.conflict() returns trigger language plpgsql as \
             $$ begin perform nextval('{s}.sends'); raise exception 'a conflict' using errcode = '40001'; end $$; \
             create trigger conflict before insert on {s}.entry for each row execute function {s}.conflict()"
        ),
    )
    .await;
    let sends = || ask::<i64>(ledger.pool(), format!("select last_value from {s}.sends"));
    let claims: Vec<Claim> = (0..3).map(|n| kit::claim(&format!("e-{n}"), kit::lease())).collect();
    let error = ledger.claim(&claims).await.expect_err("nothing gets through");
    assert!(matches!(&error, Error::Contended { .. }) && error.is_retryable(), "{error:?}");
    assert!(error.chain().contains("gave up after 20 lock conflicts"), "{}", error.chain());
    assert_eq!(sends().await, 20);
    let guard = Guard::builder(ledger.clone()).scope("orders").build().unwrap();
    let error = guard.lease("one").await.expect_err("nothing gets through");
    assert!(error.chain().contains("gave up after 20 lock conflicts"), "{}", error.chain());
    assert_eq!(sends().await, 40, "the guard does not multiply it");
}
