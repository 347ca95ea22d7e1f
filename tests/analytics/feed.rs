//! From a write to an answer: records, journal, relay, bus, feed and read model together.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::analytics::{
    Analytics, Feed, FeedHandle, FeedProgress, FeedSettings, ListPage, MemoryReadModel, ReadModel, ReadToken,
    Uuid,
};
use hapax::backend::sqlite::{SqliteJournal, SqliteReadModel, SqliteRecords};
use hapax::bus::{Bus, EmbeddedBus, MemoryBus, Partition, TopicSettings};
use hapax::clock::{Clock as _, SystemClock};
use hapax::journal::{Checkpoint, Journal, JournalSettings, Position, RelayStore as _};
use hapax::records::{
    Create, Delete, List, ModuleSlug, Modules as _, Name, OfTenant, Payload, Record, Records as _, Scan,
    Snapshot, Update,
};
use hapax::relay::{Relay, RelayHandle};
use hapax::{Error, RelayName, Tenant, Time, Topic};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::support::wait::{until, until_so};

pub const PARTITIONS: i32 = 3;

pub fn topic() -> Topic {
    Topic::new("records").unwrap()
}

fn orders() -> ModuleSlug {
    ModuleSlug::new("orders").unwrap()
}

pub fn tenants() -> [Option<Tenant>; 3] {
    [None, Some(1), Some(2)]
        .map(|number| number.map(|number| Tenant::new(Uuid::from_u128(number).to_string()).unwrap()))
}

fn payload(json: &str) -> Payload {
    Payload::new(json).unwrap()
}

/// Records in a file, published to a bus that lasts as long as the test.
pub struct Source {
    dir: tempfile::TempDir,
    journal: SqliteJournal,
    pub records: SqliteRecords,
    pub bus: Arc<dyn Bus>,
}

impl Source {
    async fn new() -> Self {
        let bus = MemoryBus::default();
        Source::on(Arc::new(bus)).await
    }

    pub async fn on(bus: Arc<dyn Bus>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        bus.create_topic(&topic(), TopicSettings::new(PARTITIONS)).await.unwrap();
        let journal = SqliteJournal::open(dir.path().join("journal.db"), JournalSettings::default()).unwrap();
        let records = SqliteRecords::open(&journal).unwrap();
        records.create_module(&orders()).await.unwrap();
        Source { dir, journal, records, bus }
    }

    fn file(&self) -> std::path::PathBuf {
        self.dir.path().join("reads.db")
    }

    fn relay(&self) -> Running<hapax::relay::Progress> {
        let relay = Relay::builder(Arc::new(self.journal.clone()), Arc::clone(&self.bus))
            .name("main")
            .topic("records")
            .with(|settings| {
                settings.pulse = Some(Duration::from_millis(20));
                settings.lease = Duration::from_secs(60);
            })
            .build()
            .unwrap();
        let stop = relay.handle();
        Running { task: tokio::spawn(relay.run()), stop: Stop::Relay(stop) }
    }

    /// Publishes everything, and pulses after it.
    pub async fn publish(&self) {
        let (relay, last) = (self.relay(), self.journal.stat().await.unwrap().last.unwrap());
        let Stop::Relay(handle) = &relay.stop else { panic!("a relay has the handle of one") };
        until_so("everything is published", || handle.progress().position >= last).await;
        let pulses = handle.progress().pulses;
        until_so("a pulse follows", || handle.progress().pulses > pulses + 1).await;
        relay.end().await;
    }

    fn feed(&self, model: Arc<dyn ReadModel>) -> Running<FeedProgress> {
        let mut settings = FeedSettings::new(topic());
        settings.linger = Duration::from_millis(5);
        let feed = Feed::new(Arc::clone(&self.bus), model, settings).unwrap();
        let stop = feed.handle();
        Running { task: tokio::spawn(feed.run()), stop: Stop::Feed(stop) }
    }

    async fn create(&self, tenant: Option<&Tenant>, json: &str) -> Record {
        let create = Create::new(orders(), payload(json)).tenant(tenant.cloned());
        self.records.create(&create).await.unwrap()
    }

    /// Everything that the source has of a tenant.
    pub async fn all(&self, tenant: Option<&Tenant>) -> Vec<Record> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let list = List::new(orders()).tenant(tenant.cloned()).after(after).limit(100);
            let page = self.records.list(&list).await.unwrap();
            all.extend(page.records);
            after = page.next;
            if after.is_none() {
                return all;
            }
        }
    }
}

enum Stop {
    Relay(RelayHandle),
    Feed(FeedHandle),
}

/// Something that runs until it is stopped.
struct Running<T> {
    task: JoinHandle<hapax::Result<T>>,
    stop: Stop,
}

impl<T> Running<T> {
    async fn end(self) -> T {
        match &self.stop {
            Stop::Relay(handle) => handle.stop(),
            Stop::Feed(handle) => handle.stop(),
        }
        self.task.await.unwrap().unwrap()
    }

    async fn kill(self) {
        self.task.abort();
        let _ = self.task.await; // it was aborted
    }
}

pub async fn listed(model: &Arc<dyn ReadModel>, tenant: Option<&Tenant>) -> (Vec<Record>, Option<Time>) {
    let analytics = Analytics::new(Arc::clone(model), tenant).unwrap();
    let (mut all, mut after, mut synced) = (Vec::new(), None, None);
    loop {
        let page = ListPage::new(after, 1000).unwrap();
        let answer = analytics.records("orders").unwrap().list(page).await.unwrap();
        if after.is_none() {
            synced = answer.meta.last_sync_at; // of the first page: the others are later
        }
        all.extend(answer.value.records);
        after = answer.value.next;
        if after.is_none() {
            return (all, synced);
        }
    }
}

/// Waits until the model is in step with everything written before, and compares it with the source.
async fn equals_source(source: &Source, model: &Arc<dyn ReadModel>) {
    let now = SystemClock.now();
    for tenant in tenants() {
        until("the model is in step", async || {
            listed(model, tenant.as_ref()).await.1.is_some_and(|synced| synced >= now)
        })
        .await;
        assert_eq!(listed(model, tenant.as_ref()).await.0, source.all(tenant.as_ref()).await, "{tenant:?}");
    }
}

fn sqlite(path: &Path) -> Arc<dyn ReadModel> {
    Arc::new(SqliteReadModel::open(path).unwrap())
}

/// Whose record, the record, whether it was deleted, and the time after the acknowledgement.
pub type Acknowledged = Arc<Mutex<Vec<(Option<Tenant>, Record, bool, Time)>>>;

/// Creates, updates and deletes, and tells each write with the time after it was acknowledged.
pub async fn write(source: Arc<Source>, tenant: Option<Tenant>, count: usize, acknowledged: Acknowledged) {
    let mut live: Vec<Record> = Vec::new();
    for n in 0..count {
        let json = format!(r#"{{"n":{n},"amount":{n}.25}}"#);
        let (record, deleted) = match (n % 4, live.pop()) {
            (1 | 2, Some(found)) => {
                let update =
                    Update::new(orders(), found.id, found.seq, payload(&json)).tenant(tenant.clone());
                (source.records.update(&update).await.unwrap(), false)
            }
            (3, Some(found)) if n % 8 == 3 => {
                let delete = Delete::new(orders(), found.id, found.seq).tenant(tenant.clone());
                (source.records.delete(&delete).await.unwrap(), true)
            }
            (_, found) => {
                live.extend(found);
                (source.create(tenant.as_ref(), &json).await, false)
            }
        };
        if !deleted {
            live.push(record.clone());
        }
        acknowledged.lock().unwrap().push((tenant.clone(), record, deleted, SystemClock.now()));
    }
}

/// Reads, and checks that every write that was acknowledged before `lastSyncAt` is in the answer.
async fn look(
    read: &Arc<dyn ReadModel>,
    tenant: Option<&Tenant>,
    acknowledged: &Acknowledged,
) -> Option<Time> {
    let known: Vec<_> = acknowledged.lock().unwrap().clone();
    let (rows, synced) = listed(read, tenant).await;
    let rows: BTreeMap<Uuid, Record> = rows.into_iter().map(|record| (record.id, record)).collect();
    let of_tenant = known.iter().filter(|(of, ..)| of.as_ref() == tenant);
    for (_, record, deleted, _) in of_tenant.filter(|(.., at)| synced.is_some_and(|synced| *at < synced)) {
        if let Some(row) = rows.get(&record.id) {
            assert!(row.seq >= record.seq, "{record:?} is missing, there is {row:?}");
            continue;
        }
        let later = |(_, other, gone, _): &(Option<Tenant>, Record, bool, Time)| {
            *gone && other.id == record.id && other.seq >= record.seq
        };
        // Its deletion may have been acknowledged after we looked: then the model knows.
        let (of, orders) = (hapax::records::tenant_id(tenant).unwrap(), orders());
        let version = read.version(of, &orders, record.id).await.unwrap();
        let gone = version.is_some_and(|version| version.seq() >= record.seq);
        assert!(*deleted || known.iter().any(later) || gone, "{record:?} is missing");
    }
    synced
}

/// Whatever was acknowledged before `lastSyncAt` is in the answer. Each feed has a model of `feeds`, and is killed
/// once `lastSyncAt` has gone on with it, while writers write and this reads. `passes` counts how often all tenants
/// were looked at.
pub async fn witness(
    read: Arc<dyn ReadModel>,
    feeds: impl Fn() -> Arc<dyn ReadModel>,
    passes: watch::Sender<u64>,
) {
    const KILLS_MIN: u64 = 5;
    let source = Arc::new(Source::new().await);
    let (relay, acknowledged) = (source.relay(), Acknowledged::default());
    let writers: Vec<_> = tenants()
        .map(|tenant| tokio::spawn(write(Arc::clone(&source), tenant, 150, Arc::clone(&acknowledged))))
        .into();
    let (mut kills, mut last) = (0, None);
    while kills < KILLS_MIN || writers.iter().any(|writer| !writer.is_finished()) {
        let (feed, before) = (source.feed(feeds()), last);
        until("lastSyncAt goes on with a feed", async || {
            for tenant in tenants() {
                last = look(&read, tenant.as_ref(), &acknowledged).await.max(last);
            }
            passes.send_modify(|passes| *passes += 1);
            last > before
        })
        .await;
        // Not always at the same step of a block.
        tokio::time::sleep(Duration::from_millis(kills * 37 % 120)).await;
        feed.kill().await;
        kills += 1;
    }
    passes.send_replace(u64::MAX);
    for writer in writers {
        writer.await.unwrap();
    }
    let feed = source.feed(feeds());
    equals_source(&source, &read).await;
    feed.end().await;
    relay.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t55_every_write_acknowledged_before_last_sync_at_is_in_the_answer() {
    let dir = tempfile::tempdir().unwrap();
    let model = sqlite(&dir.path().join("reads.db"));
    witness(Arc::clone(&model), || Arc::clone(&model), watch::Sender::new(0)).await;
}

/// Everything that is published again, in any order, changes nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t53_what_is_published_again_changes_nothing() {
    let source = Arc::new(Source::new().await);
    let acknowledged = Arc::default();
    for tenant in tenants() {
        write(Arc::clone(&source), tenant, 40, Arc::clone(&acknowledged)).await;
    }
    let models: [Arc<dyn ReadModel>; 2] = [sqlite(&source.file()), Arc::new(MemoryReadModel::default())];
    for model in &models {
        for round in 0..2 {
            let relay = source.relay();
            let feed = source.feed(Arc::clone(model));
            equals_source(&source, model).await;
            let (progress, _) = (feed.end().await, relay.end().await);
            assert!(round > 0 || progress.changes >= 120, "{progress:?}");
            // From the beginning again, by the same relay.
            let (name, start) = (RelayName::new("main").unwrap(), Checkpoint::start(source.journal.id()));
            assert_eq!(start.position, Position::START);
            source.journal.rewind(&name, &start, None).await.unwrap();
        }
    }
}

/// A model that is lost is filled from the topic again, although the group has committed everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_was_lost_begins_at_the_beginning() {
    let source = Source::new().await;
    let relay = source.relay();
    for n in 0..20 {
        source.create(None, &format!(r#"{{"n":{n}}}"#)).await;
    }
    let model = sqlite(&source.file());
    let feed = source.feed(Arc::clone(&model));
    equals_source(&source, &model).await;
    feed.end().await;
    drop(model);
    let other = sqlite(&source.dir.path().join("other.db"));
    let feed = source.feed(Arc::clone(&other));
    equals_source(&source, &other).await;
    assert!(feed.end().await.changes >= 20);
    relay.end().await;
}

/// Two models follow one topic at the same time, each as if it were alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_models_on_one_topic_both_get_everything() {
    let source = Source::new().await;
    let relay = source.relay();
    let models: [Arc<dyn ReadModel>; 2] =
        [sqlite(&source.file()), sqlite(&source.dir.path().join("other.db"))];
    let feeds = [source.feed(Arc::clone(&models[0])), source.feed(Arc::clone(&models[1]))];
    for n in 0..30 {
        source.create(None, &format!(r#"{{"n":{n}}}"#)).await;
    }
    for model in &models {
        equals_source(&source, model).await;
        // Under the name of the model, which it keeps.
        let group = format!("hapax-analytics-{}", model.id().await.unwrap().unwrap().simple());
        let partition = Partition { topic: topic(), number: 0 };
        until("committed", async || source.bus.committed(&group, &partition).await.unwrap().is_some()).await;
    }
    for feed in feeds {
        feed.end().await;
    }
    relay.end().await;
}

/// A model that begins after retention removed the events begins with the records as they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_that_begins_late_begins_with_the_records_as_they_are() {
    let source = Arc::new(Source::new().await);
    let acknowledged = Arc::default();
    for tenant in tenants() {
        write(Arc::clone(&source), tenant, 40, Arc::clone(&acknowledged)).await;
    }
    // These were never published: as if they had been, and were gone.
    let (name, mut end) = (RelayName::new("main").unwrap(), Checkpoint::start(source.journal.id()));
    end.position = source.journal.stat().await.unwrap().last.unwrap();
    source.journal.rewind(&name, &end, None).await.unwrap();
    let relay = source.relay();
    let model = sqlite(&source.file());
    for _ in 0..2 {
        let mut settings = FeedSettings::new(topic());
        settings.linger = Duration::from_millis(5);
        let feed = Feed::new(Arc::clone(&source.bus), Arc::clone(&model), settings).unwrap();
        let feed = feed.with_snapshot(Arc::new(source.records.clone()));
        let stop = feed.handle();
        let feed = Running { task: tokio::spawn(feed.run()), stop: Stop::Feed(stop) };
        source.create(None, r#"{"later":1}"#).await;
        equals_source(&source, &model).await;
        feed.end().await;
    }
    assert!(model.rejected(1).await.unwrap().is_empty(), "nothing is missing");
    relay.end().await;
}

/// Records that change after a snapshot has read them, and before the model has them.
struct Changing {
    source: Arc<Source>,
    /// What happens after the first page: it is updated, it is deleted.
    after: Mutex<Option<(Record, Record)>>,
}

#[async_trait::async_trait]
impl Snapshot for Changing {
    async fn snapshot(&self, scan: &Scan) -> hapax::Result<Vec<OfTenant>> {
        let page = self.source.records.snapshot(scan).await?;
        let after = self.after.lock().unwrap().take();
        if let Some((changed, deleted)) = after {
            let changed =
                Update::new(changed.module, changed.id, changed.seq, Payload::new(r#"{"changed":1}"#)?);
            self.source.records.update(&changed).await?;
            self.source.records.delete(&Delete::new(deleted.module, deleted.id, deleted.seq)).await?;
            self.source.create(None, r#"{"late":1}"#).await;
        }
        Ok(page)
    }
    async fn gone(&self, after: Option<&Name>, limit: usize) -> hapax::Result<Vec<(Name, u64)>> {
        self.source.records.gone(after, limit).await
    }
    async fn now(&self) -> hapax::Result<Time> {
        self.source.records.now().await
    }
}

/// The snapshot has the record as it was, the topic what became of it. Which of them is applied last does not matter.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_written_while_a_model_begins_is_in_it() {
    let source = Arc::new(Source::new().await);
    let (changed, deleted) = (source.create(None, "{}").await, source.create(None, "{}").await);
    let model = sqlite(&source.file());
    let relay = source.relay();
    let after = Mutex::new(Some((changed.clone(), deleted.clone())));
    let changing = Arc::new(Changing { source: Arc::clone(&source), after });
    let mut settings = FeedSettings::new(topic());
    settings.linger = Duration::from_millis(5);
    let feed = Feed::new(Arc::clone(&source.bus), Arc::clone(&model), settings).unwrap();
    let feed = feed.with_snapshot(Arc::<Changing>::clone(&changing));
    let stop = feed.handle();
    let feed = Running { task: tokio::spawn(feed.run()), stop: Stop::Feed(stop) };
    equals_source(&source, &model).await;
    assert!(changing.after.lock().unwrap().is_none(), "it was changed after the snapshot had read it");
    let rows = listed(&model, None).await.0;
    assert_eq!(rows.len(), 2, "{rows:?}");
    assert!(rows.iter().any(|row| row.id == changed.id && row.seq == 2), "{rows:?}");
    assert!(rows.iter().all(|row| row.id != deleted.id), "{rows:?}");
    feed.end().await;
    relay.end().await;
}

/// A change that cannot be read costs nobody else anything, and holds `lastSyncAt` of its tenant back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_broken_change_holds_its_tenant_back_and_nobody_else() {
    let source = Source::new().await;
    let model = sqlite(&source.file());
    let [_, one, other] = tenants();
    source.create(one.as_ref(), "{}").await;
    let (relay, feed) = (source.relay(), source.feed(Arc::clone(&model)));
    until("in step", async || listed(&model, one.as_ref()).await.1.is_some()).await;
    let tenant = one.as_ref().unwrap().as_str().to_owned();
    let headers = [("ce_type", "record.updated".to_owned()), ("tenant_id", tenant)];
    let record = hapax::bus::Record {
        key: Some("k".into()),
        payload: Some(r#"{"id": "7"}"#.into()),
        headers: headers.into_iter().collect(),
        timestamp: None,
    };
    for answer in source.bus.publish(&topic(), &[record]).await.unwrap() {
        answer.unwrap();
    }
    until("rejected", async || !model.rejected(10).await.unwrap().is_empty()).await;
    let record = source.create(one.as_ref(), r#"{"later":1}"#).await;
    let now = SystemClock.now();
    until("others go on", async || listed(&model, other.as_ref()).await.1.is_some_and(|at| at >= now)).await;
    let (rows, synced) = listed(&model, one.as_ref()).await;
    assert!(rows.contains(&record), "what comes after it is applied");
    assert!(synced.is_none_or(|at| at < now), "held back");
    let entry = model.rejected(10).await.unwrap().remove(0);
    assert!(entry.rejected.reason.contains("not the event of a record"), "{entry:?}");
    let origin = entry.rejected.origin;
    let partition = Partition { topic: origin.topic, number: origin.partition };
    assert!(model.drop_rejected(&partition, origin.offset).await.unwrap());
    until("in step again", async || listed(&model, one.as_ref()).await.1.is_some_and(|at| at >= now)).await;
    feed.end().await;
    relay.end().await;
}

/// What retention removed before it was read is reported.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_removed_before_it_was_read_holds_everybody_back() {
    let dir = tempfile::tempdir().unwrap();
    let bus: Arc<dyn Bus> = Arc::new(EmbeddedBus::open(dir.path().join("bus.db")).unwrap());
    let source = Source::on(bus).await;
    let model = sqlite(&source.file());
    let (relay, feed) = (source.relay(), source.feed(Arc::clone(&model)));
    let first = source.create(None, "{}").await;
    equals_source(&source, &model).await;
    feed.end().await;
    relay.end().await;
    // A second model comes when the first records are gone: here, because the offsets begin above 0.
    let other: Arc<dyn ReadModel> = Arc::new(MemoryReadModel::default());
    for number in 0..PARTITIONS {
        let partition = Partition { topic: topic(), number };
        let (_, end) = source.bus.range(&partition).await.unwrap();
        let mut block = hapax::analytics::Block::new(partition, PARTITIONS, 0..end + 1000);
        block.pulse = Some(SystemClock.now());
        other.apply(&[block]).await.unwrap();
    }
    let (relay, feed) = (source.relay(), source.feed(Arc::clone(&other)));
    until("noticed", async || other.rejected(10).await.unwrap().len() == PARTITIONS as usize).await;
    until("read from the beginning", async || listed(&other, None).await.0.contains(&first)).await;
    let reason = other.rejected(1).await.unwrap().remove(0).rejected.reason;
    assert!(reason.contains("were gone before they were read"), "{reason}");
    feed.end().await;
    relay.end().await;
}

/// A reader waits for its own write, or hears how far the model is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_waits_for_its_own_write() {
    let source = Source::new().await;
    let model = sqlite(&source.file());
    let relay = source.relay();
    let record = source.create(None, "{}").await;
    let analytics = Analytics::new(Arc::clone(&model), None).unwrap();
    let ask = |wait: Duration| {
        let query = analytics.records("orders").unwrap().after(ReadToken::of(&record)).wait(wait);
        query.list(ListPage::default())
    };
    let error = ask(Duration::ZERO).await.unwrap_err();
    assert!(
        matches!(&error, Error::Conflict { actual, .. } if actual.contains("the record is not there")),
        "{error:?}"
    );
    let feed = source.feed(Arc::clone(&model));
    let answer = ask(Duration::from_secs(120)).await.unwrap();
    assert_eq!(answer.value.records, std::slice::from_ref(&record));
    let token = ReadToken::of(&record);
    let other = analytics.records("other").unwrap().after(token).list(ListPage::default()).await;
    assert!(matches!(other, Err(Error::Invalid { .. })));
    feed.end().await;
    relay.end().await;
}
