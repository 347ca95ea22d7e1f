//! A read model in ClickHouse is built again while it answers: a second table is filled, compared and exchanged.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hapax::analytics::{
    Analytics, Block, Feed, FeedSettings, ReadModel, RebuildSettings, Rebuilt, Second, Uuid, VerifySettings,
    Version, rebuild, verify,
};
use hapax::backend::clickhouse::ClickHouseReadModel;
use hapax::backend::sqlite::{SqliteJournal, SqliteRecords};
use hapax::bus::{Bus, EmbeddedBus, TopicSettings};
use hapax::erase::Subject;
use hapax::journal::JournalSettings;
use hapax::records::{Create, Delete, ModuleSlug, Modules as _, Payload, Records as _, Update};
use hapax::relay::{Relay, RelayHandle};
use hapax::testing::analytics::{apply, change, partition};
use hapax::{Error, Topic};

use crate::engine::Database;
use crate::support::this;
use crate::support::wait::until;

const PARTITIONS: i32 = 2;
const DIR: &str = "HAPAX_TEST_REBUILD_DIR";
const URL: &str = "HAPAX_TEST_REBUILD_URL";

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

fn id(n: u128) -> Uuid {
    Uuid::from_u128(n)
}

/// Records in a file, and a relay that publishes them with pulses until this is dropped.
struct Source {
    journal: SqliteJournal,
    records: SqliteRecords,
    relay: Option<RelayHandle>,
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Some(relay) = &self.relay {
            relay.stop();
        }
    }
}

impl Source {
    async fn new(dir: &Path) -> Self {
        std::fs::create_dir_all(dir).unwrap();
        let source = Source::open(dir);
        source.records.create_module(&orders()).await.unwrap();
        source
    }

    fn open(dir: &Path) -> Self {
        let journal = SqliteJournal::open(dir.join("journal.db"), JournalSettings::default()).unwrap();
        let records = SqliteRecords::open(&journal).unwrap();
        Source { journal, records, relay: None }
    }

    async fn write(&self, ids: std::ops::RangeInclusive<u128>, json: &str) {
        for n in ids {
            let create = Create::new(orders(), Payload::new(json).unwrap()).id(id(n));
            self.records.create(&create).await.unwrap();
        }
    }

    /// Publishes to a topic from now on.
    async fn publish(&mut self, bus: &Arc<dyn Bus>, topic: &str) {
        let name = Topic::new(topic).unwrap();
        bus.create_topic(&name, TopicSettings::new(PARTITIONS)).await.unwrap();
        let relay = Relay::builder(Arc::new(self.journal.clone()), Arc::clone(bus)).name("main").topic(topic);
        let relay = relay.with(|settings| settings.pulse = Some(Duration::from_millis(50))).build().unwrap();
        self.relay = Some(relay.handle());
        tokio::spawn(relay.run());
    }
}

fn settings(topic: &str, generation: u16) -> RebuildSettings {
    let mut feed = FeedSettings::new(Topic::new(topic).unwrap());
    (feed.generation, feed.linger) = (generation, Duration::from_millis(20));
    RebuildSettings::new(feed)
}

async fn built(
    model: &ClickHouseReadModel,
    bus: &Arc<dyn Bus>,
    source: &Source,
    settings: &RebuildSettings,
) -> hapax::Result<Rebuilt> {
    let begin = Arc::new(source.records.clone());
    rebuild(model, Arc::clone(bus), Some(begin), &source.records, settings, &mut |_| {}).await
}

/// How many records there are, as a reader is told.
async fn count(model: &ClickHouseReadModel) -> hapax::Result<u64> {
    let analytics = Analytics::new(Arc::new(model.clone()), None)?;
    Ok(analytics.records("orders")?.tally().await?.value.groups[0].count)
}

fn second_tables(database: &Database) -> String {
    let sql =
        "SELECT count() FROM system.tables WHERE database = '{}' AND startsWith(name, 'data_records_next_')";
    database.sql(&sql.replace("{}", &database.name))
}

async fn equal(model: &ClickHouseReadModel, source: &Source, generation: u16) {
    let mut settings = VerifySettings::default();
    (settings.generation, settings.wait) = (generation, Duration::from_secs(60));
    let verified = verify(model, &source.records, &settings).await.unwrap();
    assert!(verified.differences.is_empty(), "{:?}", verified.differences);
}

/// The records are put back from a backup: some are gone, others have lower seqs. The model of the first generation
/// answers until that of the second takes its place, and nothing of the first is left: also not what a feed
/// that knows nothing of it would still write.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t53_a_new_generation_leaves_no_ghosts_and_the_old_one_answers_meanwhile() {
    let (dir, database) = (tempfile::tempdir().unwrap(), Database::new());
    let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(dir.path().join("bus.db")).unwrap());
    let mut before = Source::new(&dir.path().join("before")).await;
    before.write(1..=40, r#"{"n":1}"#).await;
    for n in 1..=40 {
        let update = Update::new(orders(), id(n), 1, Payload::new(r#"{"n":2}"#).unwrap());
        before.records.update(&update).await.unwrap();
    }
    before.publish(&bus, "records").await;
    let first = Arc::new(ClickHouseReadModel::open_for(&database.url(), 1).unwrap());
    let feed = Feed::new(Arc::clone(&bus), first.clone(), settings("records", 1).feed).unwrap();
    let (handle, feeding) = (feed.handle(), tokio::spawn(feed.run()));
    until("the first model has them", async || count(&first).await.unwrap() == 40).await;

    let mut after = Source::new(&dir.path().join("after")).await;
    after.write(1..=25, r#"{"n":3}"#).await;
    after.publish(&bus, "records-2").await;
    // Nothing feeds a model of the first generation with rows of the second.
    let mixed = Feed::new(Arc::clone(&bus), first.clone(), settings("records-2", 2).feed).unwrap();
    let error = mixed.run().await.unwrap_err();
    assert!(matches!(&error, Error::Schema(error) if error.contains("hapax analytics rebuild")), "{error}");

    let reader = ClickHouseReadModel::open_existing(&database.url()).unwrap();
    let asking = tokio::spawn(async move {
        let mut counts = Vec::new();
        while counts.last() != Some(&25) {
            counts.push(count(&reader).await.unwrap());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        counts
    });
    let model = ClickHouseReadModel::open_existing(&database.url()).unwrap();
    let rebuilt = built(&model, &bus, &after, &settings("records-2", 2)).await.unwrap();
    let Rebuilt::Exchanged(verified) = rebuilt else { panic!("{rebuilt:?}") };
    assert_eq!((verified.source.total().records, &verified.source), (25, &verified.model));
    let counts = tokio::time::timeout(Duration::from_secs(60), asking).await.unwrap().unwrap();
    assert!(
        counts.iter().all(|count| [40, 25].contains(count)),
        "an answer of one model or the other: {counts:?}"
    );
    assert_eq!(count(&model).await.unwrap(), 25, "what the restore undid is gone");
    equal(&model, &after, 2).await;
    assert_eq!((second_tables(&database).as_str(), model.generation().await.unwrap()), ("0", Some(2)));

    // The feed of the first generation ends, and a process that knew nothing of it adds nothing.
    let error = tokio::time::timeout(Duration::from_secs(60), feeding).await.unwrap().unwrap().unwrap_err();
    assert!(matches!(error, Error::Schema(_)), "{error}");
    handle.stop();
    let late = ClickHouseReadModel::open_existing(&database.url()).unwrap();
    let error = late.apply(&[ghost(77, 1)]).await.unwrap_err();
    assert!(matches!(&error, Error::Schema(error) if error.contains("generation")), "{error}");
    assert_eq!(count(&model).await.unwrap(), 25);
}

/// A row of a record that is nowhere.
fn ghost(n: u128, generation: u16) -> Block {
    let mut of = change(n, 1, Some("{}"));
    of.version = Version::new(generation, 1).unwrap();
    let mut block = Block::aside(partition(0), PARTITIONS);
    block.changes = vec![of];
    block
}

/// Not a test: the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_builds_again() {
    let (Ok(dir), Ok(url)) = (std::env::var(DIR), std::env::var(URL)) else { return };
    let dir = Path::new(&dir);
    let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(dir.join("bus.db")).unwrap());
    let model = ClickHouseReadModel::open_existing(&url).unwrap();
    built(&model, &bus, &Source::open(dir), &settings("records", 1)).await.unwrap();
}

/// Killed at any step, a rebuild leaves a model that answers, and the next one goes on: one table is left, and the
/// ghost is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t53_a_rebuild_that_is_killed_goes_on() {
    let killed_at: [&[&str]; 4] = [
        &["analytics.rebuild.made", "analytics.rebuild.filled", "analytics.rebuild.taken"],
        &["analytics.rebuild.verified"],
        &["analytics.rebuild.exchanged"],
        &["analytics.rebuild.removed"],
    ];
    for points in killed_at {
        let (dir, database) = (tempfile::tempdir().unwrap(), Database::new());
        let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(dir.path().join("bus.db")).unwrap());
        let mut source = Source::new(dir.path()).await;
        source.write(1..=20, "{}").await;
        source.records.delete(&Delete::new(orders(), id(20), 1)).await.unwrap();
        source.publish(&bus, "records").await;
        let model = ClickHouseReadModel::open_for(&database.url(), 1).unwrap();
        apply(&model, ghost(99, 1)).await; // all that it has
        for point in points {
            let (url, dir) = (database.url(), dir.path().to_owned());
            let killed = tokio::task::spawn_blocking(move || {
                let mut child = this::test("the_process_that_builds_again");
                child.env(DIR, dir).env(URL, url);
                child.env(hapax::testing::crash::VARIABLE, format!("{point}:1")).output().unwrap()
            });
            let out = killed.await.unwrap();
            assert!(!out.status.success(), "killed at {point}: {}", String::from_utf8_lossy(&out.stdout));
        }
        let last = *points.last().unwrap();
        let is_exchanged = ["analytics.rebuild.exchanged", "analytics.rebuild.removed"].contains(&last);
        assert_eq!(count(&model).await.unwrap(), if is_exchanged { 19 } else { 1 }, "{last}: it answers");
        assert_eq!(
            model.unfinished().await.unwrap().is_some(),
            last != "analytics.rebuild.removed",
            "{last}"
        );
        let rebuilt = built(&model, &bus, &source, &settings("records", 1)).await.unwrap();
        match rebuilt {
            Rebuilt::Finished => assert_eq!(last, "analytics.rebuild.exchanged"),
            Rebuilt::Exchanged(_) => assert_ne!(last, "analytics.rebuild.exchanged"),
            other => panic!("{last}: {other:?}"),
        }
        assert_eq!((count(&model).await.unwrap(), second_tables(&database).as_str()), (19, "0"), "{last}");
        assert_eq!(model.unfinished().await.unwrap(), None);
        equal(&model, &source, 1).await;
    }
}

/// Two rebuilds at once: one of them puts its table there, and the other undoes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t53_two_rebuilds_at_once_leave_one_whole_model() {
    let (dir, database) = (tempfile::tempdir().unwrap(), Database::new());
    let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(dir.path().join("bus.db")).unwrap());
    let mut source = Source::new(dir.path()).await;
    source.write(1..=20, "{}").await;
    source.publish(&bus, "records").await;
    let model = ClickHouseReadModel::open_for(&database.url(), 1).unwrap();
    apply(&model, ghost(99, 1)).await;
    let settings = settings("records", 1);
    let (one, other) =
        tokio::join!(built(&model, &bus, &source, &settings), built(&model, &bus, &source, &settings));
    let done = [&one, &other].iter().filter(|done| done.is_ok()).count();
    assert!(done >= 1, "{one:?} {other:?}");
    assert_eq!(count(&model).await.unwrap(), 20);
    built(&model, &bus, &source, &settings).await.unwrap(); // whatever the other left
    assert_eq!((count(&model).await.unwrap(), second_tables(&database).as_str()), (20, "0"));
    equal(&model, &source, 1).await;
}

/// What takes a table over takes it from whoever fills it, and a table of rows that was replaced is never put back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t53_a_table_that_was_taken_over_is_written_and_exchanged_by_its_last_owner_only() {
    let database = Database::new();
    let model = ClickHouseReadModel::open_for(&database.url(), 1).unwrap();
    apply(&model, ghost(1, 1)).await;
    let filling = async |anew| match model.second(1, anew).await.unwrap() {
        Second::Filling(second) => second,
        _ => panic!("nothing is left to do"),
    };
    let (first, id) = (filling(false).await, model.id().await.unwrap());
    apply(&first.model(), ghost(2, 1)).await;
    let second = filling(false).await;
    apply(&second.model(), ghost(3, 1)).await;
    for error in [first.model().apply(&[ghost(4, 1)]).await, first.exchange().await] {
        assert!(
            matches!(&error, Err(Error::Schema(error)) if error.contains("another rebuild")),
            "{error:?}"
        );
    }
    assert_eq!(model.id().await.unwrap(), id, "the first still serves");
    second.exchange().await.unwrap();
    assert_ne!(model.id().await.unwrap(), id);
    assert_eq!(count(&model).await.unwrap(), 2);
    let error = second.exchange().await.unwrap_err();
    assert!(matches!(error, Error::Schema(_)), "{error:?}");
    assert_eq!(count(&model).await.unwrap(), 2, "nothing is put back");
    // Anew: what was filled before is gone.
    apply(&filling(false).await.model(), ghost(5, 1)).await;
    filling(true).await.exchange().await.unwrap();
    assert_eq!((count(&model).await.unwrap(), second_tables(&database).as_str()), (0, "0"));
}

/// A rebuild that did not end has contents, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_erasure_reaches_the_second_table() {
    let database = Database::new();
    let model = ClickHouseReadModel::open_for(&database.url(), 1).unwrap();
    let Second::Filling(second) = model.second(1, false).await.unwrap() else { panic!("it is filled") };
    apply(&second.model(), ghost(1, 1)).await;
    let mut gone = Block::aside(partition(0), 1);
    gone.changes = vec![change(1, 2, None)];
    apply(&second.model(), gone).await;
    let of = Subject::record(None, orders(), id(1));
    assert_eq!(model.erasable(&of).await.unwrap(), 1);
    assert_eq!(model.erase(&of).await.unwrap(), 1);
    assert_eq!(model.erasable(&of).await.unwrap(), 0, "its content is gone from both");
}

/// A rebuild that did not end has read a record that was deleted afterwards, and nobody fills it any more: the first
/// model knows of the deletion.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t434_what_only_the_second_table_has_is_erased() {
    let database = Database::new();
    let model = ClickHouseReadModel::open_for(&database.url(), 1).unwrap();
    let of_first = |n, seq, json| {
        let mut block = Block::aside(partition(0), 1);
        block.changes = vec![change(n, seq, json)];
        block
    };
    apply(&model, of_first(1, 2, None)).await;
    apply(&model, of_first(2, 1, Some("{}"))).await;
    let Second::Filling(second) = model.second(2, false).await.unwrap() else { panic!("it is filled") };
    for n in 1..=2 {
        apply(&second.model(), ghost(n, 2)).await;
    }
    let of = Subject::record(None, orders(), id(1));
    assert_eq!(model.erasable(&of).await.unwrap(), 1);
    assert_eq!(model.erase(&of).await.unwrap(), 1);
    assert_eq!(model.erasable(&of).await.unwrap(), 0, "its content is gone");
    let version = async |n| second.model().version(Uuid::nil(), &orders(), id(n)).await.unwrap();
    assert_eq!(
        version(1).await,
        Some(Version::new(2, 2).unwrap()),
        "the deletion is there, in its generation"
    );
    assert_eq!(version(2).await, Some(Version::new(2, 1).unwrap()), "others are as they were");
    assert!(model.unfinished().await.unwrap().is_some(), "whoever erases is told to look again");
}
