//! A COMMIT that waits for a synchronous standby. PostgreSQL answers one whose wait is cancelled with success and a warning, though a
//! fail-over would forget it: no limit of hapax may cancel one.
#![cfg(all(feature = "testing", feature = "postgres"))]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::time::Duration;

use crate::support::cluster::Cluster;
use crate::support::postgres::{ask, pool_to, run, settings, until};
use hapax::Result;
use hapax::backend::postgres::PgLedger;
use hapax::ledger::{Claim, Mode, TransactionalLedger};
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
