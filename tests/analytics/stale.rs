//! An answer says when it is not current: nothing is known, or the last pulse is over five seconds ago.

use std::sync::Arc;
use std::time::Duration;

use hapax::analytics::{Analytics, ListPage, MemoryReadModel, ReadModel};
use hapax::backend::sqlite::SqliteReadModel;
use hapax::testing::analytics::{block, change};

use crate::support::wait::until;

async fn is_stale(model: &Arc<dyn ReadModel>) -> bool {
    let analytics = Analytics::new(Arc::clone(model), None).unwrap();
    let listed =
        analytics.records("orders").unwrap().list(ListPage::new(None, 9).unwrap()).await.unwrap().meta;
    let counted = analytics.records("orders").unwrap().tally().await.unwrap().meta;
    assert!(counted.stale || !listed.stale, "it does not become current by itself");
    listed.stale
}

/// A pulse of so long ago arrives.
async fn pulse(model: &Arc<dyn ReadModel>, ago: Duration) {
    let mut of = block([change(1, 1, Some("{}"))]);
    of.pulse = Some(model.now().await.unwrap().minus(ago));
    model.apply(&[of]).await.unwrap();
}

async fn stale_without_pulses(model: Arc<dyn ReadModel>) {
    assert!(is_stale(&model).await, "nothing is known");
    pulse(&model, Duration::from_secs(3600)).await;
    assert!(is_stale(&model).await, "an old pulse");
    pulse(&model, Duration::from_millis(5_001)).await;
    assert!(is_stale(&model).await, "just too old");
    pulse(&model, Duration::ZERO).await;
    assert!(!is_stale(&model).await, "a pulse of now");
    until("without a pulse it becomes stale", async || is_stale(&model).await).await;
    let (now, last) =
        (model.now().await.unwrap(), model.last_sync_at(hapax::analytics::Uuid::nil()).await.unwrap());
    assert!(now.since(last.unwrap()) > Duration::from_secs(5), "not before five seconds");
    pulse(&model, Duration::ZERO).await;
    assert!(!is_stale(&model).await, "and current with the next");
}

#[tokio::test]
async fn an_answer_is_stale_without_pulses() {
    stale_without_pulses(Arc::new(MemoryReadModel::default())).await;
}

#[tokio::test]
async fn an_answer_of_sqlite_is_stale_without_pulses() {
    let dir = tempfile::tempdir().unwrap();
    stale_without_pulses(Arc::new(SqliteReadModel::open(dir.path().join("reads.db")).unwrap())).await;
}

#[cfg(feature = "clickhouse")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_of_clickhouse_is_stale_without_pulses() {
    let database = crate::engine::Database::new();
    stale_without_pulses(Arc::new(database.model())).await;
}
