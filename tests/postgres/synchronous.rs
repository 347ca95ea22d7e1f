//! A COMMIT that waits for a synchronous standby. PostgreSQL answers one whose wait is cancelled with success and a warning, though a
//! fail-over would forget it: no limit of hapax may cancel one.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::postgres::{ask, pool_to, run, settings, until, until_waiting};
use hapax::Result;
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Claims as _, Mode, SweepSettings, TransactionalLedger};
use hapax::testing::kit;
use sqlx::PgPool;
use tokio::task::JoinHandle;

/// A server whose commits wait for a standby that is not there. Its superuser's own commits wait for nobody.
struct Waiting {
    server: Cluster,
    admin: PgPool,
}

/// Longer than a transaction or a statement may take here.
const LIMIT: Duration = Duration::from_secs(1);

impl Waiting {
    async fn new() -> Self {
        let server = Cluster::new().await;
        let admin = pool_to(&format!("{}?options=-c%20synchronous_commit=local", server.url()), 2).await;
        PgLedger::connect(&server.url(), settings("hapax")).await.unwrap();
        run(&admin, "create table effect (id text)".into()).await;
        let waiting = Waiting { server, admin };
        waiting.wait_for("nobody").await;
        waiting
    }

    /// Has commits wait for these standbys.
    async fn wait_for(&self, names: &str) {
        run(&self.admin, format!("alter system set synchronous_standby_names = '{names}'")).await;
        run(&self.admin, "select pg_reload_conf()".into()).await;
        let set = format!("select current_setting('synchronous_standby_names') = '{names}'");
        until("the server knows the names", async || ask::<bool>(&self.admin, set.clone()).await).await;
    }

    async fn ledger(&self) -> PgLedger {
        PgLedger::connect(&self.server.url(), settings("hapax")).await.unwrap()
    }

    /// Waits until a commit waits for so long.
    async fn until_waiting(&self, long: Duration) {
        let waits = format!(
            "select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep' \
             and clock_timestamp() - query_start >= interval '{} milliseconds'",
            long.as_millis()
        );
        until("a commit waits", async || ask::<bool>(&self.admin, waits.clone()).await).await;
    }

    /// Waits until a question has waited for long enough. It has no answer that a fail-over would not forget.
    async fn until_asked<T>(&self, asked: &JoinHandle<T>) {
        let waits = "select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep' and query ilike 'commit%' \
                     and clock_timestamp() - query_start >= interval '1 second'";
        until("the question waits for the standby", async || {
            assert!(!asked.is_finished(), "it was answered by what no standby has");
            ask::<bool>(&self.admin, waits).await
        })
        .await;
    }

    async fn pool(&self) -> PgPool {
        pool_to(&self.server.url(), 1).await
    }

    async fn effects(&self) -> i64 {
        ask(&self.admin, "select count(*) from effect").await
    }
}

fn claim(id: &str) -> Claim {
    kit::claim(id, Mode::Done)
}

/// An effect and its claim, up to the COMMIT.
async fn commit(ledger: &PgLedger, claim: &Claim) -> JoinHandle<Result<()>> {
    let mut tx = TransactionalLedger::begin(ledger, LIMIT, LIMIT).await.unwrap();
    let outcome = ledger.claim_in(&mut tx, std::slice::from_ref(claim)).await.unwrap().remove(0);
    assert!(outcome.unwrap().is_claimed());
    let id = claim.identity.id.to_string();
    sqlx::query("insert into effect (id) values ($1)").bind(id).execute(&mut *tx).await.unwrap();
    let ledger = ledger.clone();
    tokio::spawn(async move { TransactionalLedger::commit(&ledger, tx).await.map(Result::unwrap) })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t480_a_commit_that_waits_for_a_standby_outlasts_every_limit() {
    let waiting = Waiting::new().await;
    let ledger = waiting.ledger().await;
    let committing = commit(&ledger, &claim("a")).await;
    waiting.until_waiting(3 * LIMIT).await;
    assert!(!committing.is_finished(), "its transaction may take {LIMIT:?}, but its COMMIT waits");
    waiting.wait_for("").await;
    committing.await.unwrap().expect("committed");
    assert!(ledger.was_committed(&claim("b")).await.is_ok_and(|was| !was));
    assert_eq!(waiting.effects().await, 1);
}

/// Ends the session whose COMMIT waits for the standby: what it committed can be seen then.
async fn end_waiting(waiting: &Waiting) {
    waiting.until_waiting(Duration::ZERO).await;
    let end = "select count(pg_terminate_backend(pid)) from pg_stat_activity where wait_event = 'SyncRep'";
    assert_eq!(ask::<i64>(&waiting.admin, end).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t514_a_doubt_is_not_answered_by_what_no_standby_has() {
    use hapax::backend::postgres::{PgKeys, PgKeysSettings};
    use hapax::keyed::{Answer, Begin, Begun, IdempotencyKey, Keys as _, RequestFingerprint, RequestParts};
    let waiting = Waiting::new().await;
    waiting.wait_for("").await;
    let ledger = waiting.ledger().await;
    let keys = PgKeys::connect(&waiting.server.url(), PgKeysSettings::default()).await.unwrap();
    let request = RequestParts { method: "POST", target: "/", body: b"{}", ..Default::default() };
    let print = RequestFingerprint::of(keys.secret(), &request);
    let begin = Begin::new(None, IdempotencyKey::now_v7(), print);
    waiting.wait_for("nobody").await;

    let mine = claim("a");
    let committing = commit(&ledger, &mine).await;
    end_waiting(&waiting).await;
    assert!(committing.await.unwrap().is_err(), "its COMMIT was never answered");
    assert_eq!(waiting.effects().await, 1, "and can be seen");
    let asked = tokio::spawn(async move { ledger.was_committed(&mine).await });
    waiting.until_asked(&asked).await;
    waiting.wait_for("").await;
    assert!(asked.await.unwrap().unwrap());

    waiting.wait_for("nobody").await;
    let mut tx = waiting.pool().await.begin().await.unwrap();
    let Begun::First(lease) = keys.begin_in(&mut tx, &begin).await.unwrap() else { panic!("it is new") };
    let answer = Answer::new(201, "kept");
    keys.finish_in(&mut tx, &lease, &answer).await.unwrap();
    let committing = tokio::spawn(tx.commit());
    end_waiting(&waiting).await;
    assert!(committing.await.unwrap().is_err(), "its COMMIT was never answered");
    let asked = tokio::spawn(async move { keys.was_committed(&begin).await });
    waiting.until_asked(&asked).await;
    waiting.wait_for("").await;
    assert_eq!(asked.await.unwrap().unwrap(), Some(answer));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t513_a_detach_that_waits_for_a_standby_is_not_cancelled() {
    const PATIENCE: Duration = Duration::from_secs(10);
    let waiting = Waiting::new().await;
    waiting.wait_for("").await;
    let mut hasty = settings("hapax");
    hasty.sweep_patience = PATIENCE;
    let ledger = PgLedger::connect(&waiting.server.url(), hasty).await.unwrap();
    let now = ledger.now().await.unwrap().as_micros();
    let then = hapax::Time::from_micros(now - 40 * 86_400_000_000);
    kit::run(&ledger, &kit::claim(&kit::v7_at(then, 1).to_string(), kit::lease())).await;
    let aged = "at = at - interval '40 days'";
    run(&waiting.admin, format!("update hapax.touch set {aged}; update hapax.entry set {aged}")).await;
    let sweeps =
        SweepSettings { retention: Duration::from_secs(7 * 86_400), batch_max: 1000, dry_run: false };
    let is = async |phase: &str| {
        let there = format!("select exists (select from hapax.dropped where {phase})");
        ask::<bool>(&waiting.admin, there).await
    };
    until("the week is empty", async || {
        ledger.sweep_part(sweeps, 1).await.unwrap();
        is("phase = 'empty'").await
    })
    .await;
    // Everything before the detach has committed when commits begin to wait.
    let mut gate = waiting.admin.begin().await.unwrap();
    let lock = "lock table hapax.entry in share update exclusive mode";
    sqlx::query(lock).execute(&mut *gate).await.unwrap();
    let sweeping = tokio::spawn(async move { ledger.sweep_part(sweeps, 1).await });
    until_waiting(&waiting.admin, "detach partition").await;
    waiting.wait_for("nobody").await;
    gate.rollback().await.unwrap();
    let waits = format!(
        "select count(*) > 0 from pg_stat_activity where wait_event = 'SyncRep' and query like '%detach partition%' \
         and clock_timestamp() - query_start > interval '{} seconds'",
        PATIENCE.as_secs() + 2
    );
    until("the detach waits", async || ask::<bool>(&waiting.admin, waits.clone()).await).await;
    assert!(!sweeping.is_finished());
    let log = waiting.server.log();
    assert!(!log.contains("canceling wait for synchronous replication"), "{log}");
    waiting.wait_for("").await;
    sweeping.await.unwrap().unwrap();
    assert!(is("phase is null").await, "the week is gone");
}
