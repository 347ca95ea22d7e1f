//! The process that feeds ClickHouse is killed between any two steps: before it inserts rows, after that, before it notes how far
//! it is, and before the group's offsets are committed. The next one leaves the read model as if nothing had happened.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::analytics::{Feed, FeedSettings, ReadModel};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::bus::{Bus, EmbeddedBus, Partition};
use hapax::clock::{Clock as _, SystemClock};

use crate::engine::Database;
use crate::feed::{PARTITIONS, Source, listed, tenants, topic, write};
use crate::support::this;
use crate::support::wait::until;

const DIR: &str = "HAPAX_TEST_FEED_DIR";
const URL: &str = "HAPAX_TEST_FEED_URL";
const GROUP: &str = "HAPAX_TEST_FEED_GROUP";

fn bus(dir: &Path) -> Arc<dyn Bus> {
    Arc::new(EmbeddedBus::open(dir.join("bus.db")).unwrap())
}

/// Whether a model is where the topic ends.
async fn is_complete(bus: &dyn Bus, model: &ClickHouseReadModel) -> bool {
    let applied = model.partitions().await.unwrap();
    for number in 0..PARTITIONS {
        let partition = Partition { topic: topic(), number };
        let end = bus.range(&partition).await.unwrap().1;
        if !applied.iter().any(|of| of.partition == partition && of.offset == Some(end)) {
            return false;
        }
    }
    true
}

/// Not a test: the process that feeds, which is killed or ends where the topic does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_feeds() {
    let (Ok(dir), Ok(url)) = (std::env::var(DIR), std::env::var(URL)) else { return };
    let (bus, model) = (bus(Path::new(&dir)), ClickHouseReadModel::open(&url).unwrap());
    let mut settings = FeedSettings::new(topic());
    settings.linger = Duration::from_millis(5);
    settings.group = std::env::var(GROUP).ok().map(Into::into);
    let feed = Feed::new(Arc::clone(&bus), Arc::new(model.clone()), settings).unwrap();
    let handle = feed.handle();
    let running = tokio::spawn(feed.run());
    until("everything is applied", async || is_complete(&*bus, &model).await).await;
    handle.stop();
    running.await.unwrap().unwrap();
}

/// Runs the process; whether it ended by itself.
async fn feed(dir: &Path, database: &Database, group: &str, crash_at: &str) -> bool {
    let mut child = this::test("the_process_that_feeds");
    child.env(DIR, dir).env(URL, database.url()).env(GROUP, group);
    child.env(hapax::testing::crash::VARIABLE, crash_at);
    let done = tokio::task::spawn_blocking(move || child.output().unwrap()).await.unwrap();
    if crash_at.is_empty() {
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    }
    done.status.success()
}

/// A change of a tenant that nobody else is, which cannot be read.
async fn publish_broken(bus: &dyn Bus) {
    let tenant = hapax::analytics::Uuid::from_u128(9).to_string();
    let headers = [("ce_type", "record.updated".to_owned()), ("tenant_id", tenant)];
    let record = hapax::bus::Record {
        key: Some("k".into()),
        payload: Some(r#"{"id": "7"}"#.into()),
        headers: headers.into_iter().collect(),
        timestamp: None,
    };
    bus.publish(&topic(), &[record]).await.unwrap().remove(0).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acceptance_3_clickhouse_is_fed_by_a_process_killed_between_any_two_steps() {
    // Whether there are rows, and whether there is a place to go on from, when the process is killed with a model's first block.
    let points = [
        ("analytics.clickhouse.rejected", false, false),
        ("analytics.clickhouse.rows", true, false),
        ("analytics.clickhouse.states", true, false),
        ("analytics.feed.before-commit", true, true),
    ];
    for (point, rows, placed) in points {
        for is_later in [false, true] {
            let (dir, database) = (tempfile::tempdir().unwrap(), Database::new());
            let source = Arc::new(Source::on(bus(dir.path())).await);
            let model = database.model();
            model.partitions().await.unwrap(); // makes the tables
            database.sql("SYSTEM STOP MERGES DB.data_records");
            let write_all = async |count| {
                for tenant in tenants() {
                    write(Arc::clone(&source), tenant, count, Arc::default()).await;
                }
                let written = SystemClock.now();
                source.publish().await;
                written
            };
            if is_later {
                write_all(10).await;
                feed(dir.path(), &database, "first", "").await;
            }
            publish_broken(&*source.bus).await;
            let written = write_all(24).await;

            let at = format!("{point}:1");
            assert!(!feed(dir.path(), &database, "first", &at).await, "the process is killed at {at}");
            if !is_later {
                let is_placed = model.partitions().await.unwrap().iter().any(|of| of.offset.is_some());
                assert_eq!((database.rows() > 0, is_placed), (rows, placed), "{at}");
            }
            // In its own group a process gets the partitions of one that was killed when the session of that is over, after
            // 45 s. The model knows where to go on, so one of these tries is enough: the one whose offsets were not committed.
            let group = if placed && !is_later { "first" } else { "second" };
            feed(dir.path(), &database, group, "").await;

            let of: Arc<dyn ReadModel> = Arc::new(database.model());
            let mut records = 0;
            for tenant in tenants() {
                let (found, synced) = listed(&of, tenant.as_ref()).await;
                let expected = source.all(tenant.as_ref()).await;
                records += expected.len();
                assert_eq!(found, expected, "{at}: {tenant:?}");
                assert!(synced.is_some_and(|synced| synced >= written), "{at}: {synced:?}");
            }
            let counted = database.sql("SELECT count() FROM DB.data_records FINAL WHERE module != ''");
            assert_eq!(counted, records.to_string(), "{at}: one row for each record");
            assert_eq!(of.rejected(9).await.unwrap().len(), 1, "{at}: what cannot be read is noted once");
        }
    }
}
