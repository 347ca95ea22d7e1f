//! The embedded bus beyond the contract: durability, retention, limits, turns, and errors that say what to do.
#![cfg(all(feature = "testing", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)] // a panic is how a test fails

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use hapax::bus::embedded::{EmbeddedBus, EmbeddedSettings};
use hapax::bus::{Bus, BusEvent, MemoryBus, Partition, Record, Subscription, TopicSettings};
use hapax::clock::{Clock, ManualClock};
use hapax::testing::noon;
use hapax::{Error, Topic};

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn partition(number: i32) -> Partition {
    Partition { topic: topic(), number }
}

fn records(count: usize, bytes: usize) -> Vec<Record> {
    vec![Record { payload: Some(vec![7; bytes].into()), ..Record::default() }; count]
}

struct File {
    dir: tempfile::TempDir,
    clock: ManualClock,
}

impl File {
    fn new() -> Self {
        File { dir: tempfile::tempdir().unwrap(), clock: ManualClock::new(noon()) }
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("bus.db")
    }

    fn open(&self) -> EmbeddedBus {
        let clock: Arc<dyn Clock> = Arc::new(self.clock.clone());
        EmbeddedBus::open_with(self.path(), EmbeddedSettings::default(), clock).unwrap()
    }
}

async fn publish(bus: &impl Bus, records: &[Record]) -> Vec<(i32, i64)> {
    let answers = bus.publish(&topic(), records).await.unwrap();
    answers.into_iter().map(|answer| answer.map(|o| (o.partition, o.offset)).unwrap()).collect()
}

/// Waits until a partition begins at an offset. The sweep comes by itself, after what woke the writer.
async fn until_oldest(bus: &impl Bus, number: i32, oldest: i64) {
    let waiting = async {
        while bus.range(&partition(number)).await.unwrap().0 != oldest {
            tokio::task::yield_now().await;
        }
    };
    let swept = tokio::time::timeout(Duration::from_mins(1), waiting).await;
    assert!(swept.is_ok(), "{:?} should begin at {oldest}", bus.range(&partition(number)).await);
}

#[tokio::test]
async fn everything_is_there_after_reopening() {
    let file = File::new();
    let bus = file.open();
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    publish(&bus, &records(3, 10)).await;
    let mut member = bus.subscribe(Subscription::new("g", [topic()]).unwrap()).await.unwrap();
    let BusEvent::Assigned(given) = member.next().await.unwrap() else { panic!("an assignment comes first") };
    member.commit(&[(given[0].clone(), 2)]).await.unwrap().remove(0).unwrap();
    member.leave().await.unwrap();
    drop(bus);
    let bus = file.open();
    assert_eq!(bus.range(&partition(0)).await.unwrap(), (0, 3));
    assert_eq!(bus.committed("g", &partition(0)).await.unwrap(), Some(2));
    assert_eq!(publish(&bus, &records(1, 10)).await, [(0, 3)]);
}

#[tokio::test]
async fn retention_by_time_sweeps_by_itself_and_reuses_no_offset() {
    let file = File::new();
    let bus = file.open();
    let mut settings = TopicSettings::new(1);
    settings.retention = Some(Duration::from_secs(3600));
    bus.create_topic(&topic(), settings).await.unwrap();
    assert_eq!(bus.topic(&topic()).await.unwrap().unwrap().retention, settings.retention);
    publish(&bus, &records(2500, 10)).await; // more than one step of a sweep
    file.clock.advance(Duration::from_secs(1800));
    publish(&bus, &records(2, 10)).await;
    assert_eq!(bus.range(&partition(0)).await.unwrap(), (0, 2502), "nothing is old enough");
    file.clock.advance(Duration::from_secs(1801));
    publish(&bus, &records(1, 10)).await;
    until_oldest(&bus, 0, 2500).await;
    file.clock.advance(Duration::from_secs(36000));
    // A subscriber's process sweeps too.
    let member = bus.subscribe(Subscription::new("g", [topic()]).unwrap()).await.unwrap();
    until_oldest(&bus, 0, 2503).await;
    member.leave().await.unwrap();
    assert_eq!(bus.range(&partition(0)).await.unwrap(), (2503, 2503), "everything was swept");
    drop(bus);
    assert_eq!(publish(&file.open(), &records(1, 10)).await, [(0, 2503)]);
}

#[tokio::test]
async fn retention_by_size_keeps_the_newest() {
    let file = File::new();
    let bus = file.open();
    let mut settings = TopicSettings::new(1);
    settings.retention_bytes = Some(1000);
    bus.create_topic(&topic(), settings).await.unwrap();
    publish(&bus, &records(26, 100)).await;
    file.clock.advance(Duration::from_secs(61));
    assert!(!bus.create_topic(&topic(), settings).await.unwrap(), "any request wakes the writer");
    until_oldest(&bus, 0, 16).await;
    assert_eq!(bus.range(&partition(0)).await.unwrap(), (16, 26), "ten of a hundred bytes stay");
}

#[tokio::test]
async fn records_without_a_key_take_turns_across_processes() {
    let file = File::new();
    let (one, two) = (file.open(), file.open());
    one.create_topic(&topic(), TopicSettings::new(3)).await.unwrap();
    for _ in 0..3 {
        publish(&one, &records(1, 1)).await;
        publish(&two, &records(1, 1)).await;
    }
    for number in 0..3 {
        assert_eq!(one.range(&partition(number)).await.unwrap(), (0, 2), "partition {number}");
    }
}

#[tokio::test]
async fn both_buses_send_a_key_to_the_same_partition() {
    let file = File::new();
    let (file, memory) = (file.open(), MemoryBus::new());
    let keyed: Vec<_> =
        (0..50).map(|n| Record { key: Some(format!("key-{n}").into()), ..Record::default() }).collect();
    file.create_topic(&topic(), TopicSettings::new(7)).await.unwrap();
    memory.create_topic(&topic(), TopicSettings::new(7)).await.unwrap();
    assert_eq!(publish(&file, &keyed).await, publish(&memory, &keyed).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_publishes_share_commits_and_each_is_acknowledged() {
    let file = File::new();
    let bus = file.open();
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let tasks: Vec<_> = (0..200)
        .map(|_| {
            let bus = bus.clone();
            tokio::spawn(async move { publish(&bus, &records(1, 100)).await[0].1 })
        })
        .collect();
    let mut offsets = Vec::new();
    for task in tasks {
        offsets.push(task.await.unwrap());
    }
    offsets.sort_unstable();
    assert_eq!(offsets, (0..200).collect::<Vec<i64>>());
    // One that is refused does not take its neighbours along.
    let other = Topic::new("other").unwrap();
    let (good, bad) = (records(1, 1), records(1, 1));
    let (good, bad) = tokio::join!(publish(&bus, &good), bus.publish(&other, &bad));
    assert_eq!(good, [(0, 200)]);
    assert!(matches!(bad, Err(Error::NotFound(_))), "{bad:?}");
}

/// The largest event that a journal takes by default, under the longest names: the relay says much of it, and the bus takes it as it is.
#[tokio::test]
async fn the_largest_event_of_a_journal_is_published() {
    use hapax::journal::{Append, Expected, Journal as _, JournalSettings, MemoryJournal};
    let file = File::new();
    let bus = Arc::new(file.open());
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let journal = MemoryJournal::default();
    let (bytes, longest) = (JournalSettings::default().event_bytes_max, "🦀".repeat(255));
    let event = hapax::Event::new(hapax::EventId::new(&longest).unwrap())
        .kind(hapax::Kind::new(&longest).unwrap())
        .payload(vec![7; bytes]);
    let append = Append::new(hapax::Aggregate::new(&longest).unwrap(), Expected::New, [event])
        .tenant(hapax::Tenant::new(&longest).unwrap());
    let _ = journal.append(&append).await.unwrap();
    let larger = hapax::Event::new(hapax::EventId::now_v7()).payload(vec![7; bytes + 1]);
    let larger = Append::new(hapax::Aggregate::new("a").unwrap(), Expected::New, [larger]);
    assert!(journal.append(&larger).await.unwrap_err().to_string().contains("983040 are allowed"));

    let settings = hapax::relay::RelaySettings::new(hapax::RelayName::new("main").unwrap(), topic());
    let relay = hapax::relay::Relay::new(Arc::new(journal), bus.clone(), settings).unwrap();
    let handle = relay.handle();
    let through = async {
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while handle.progress().published + handle.progress().parked as u64 == 0
            && std::time::Instant::now() < end
        {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let (ran, ()) = tokio::join!(relay.run(), async {
        through.await;
        handle.stop();
    });
    let progress = ran.unwrap();
    assert_eq!((progress.published, progress.parked), (1, 0), "{progress:?}");
    let records = hapax::testing::relay::read_topic(&*bus, &topic()).await;
    assert_eq!(records[0].record.payload.as_ref().map(bytes::Bytes::len), Some(bytes));
    assert_eq!(records[0].record.headers.get("tenant_id"), Some(longest.as_bytes()));
}

#[tokio::test]
async fn a_record_that_is_too_large_is_refused_alone() {
    let file = File::new();
    let bus = file.open();
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let mixed = [records(1, 10), records(1, (1 << 20) + 1), records(1, 1 << 20)].concat();
    let answers = bus.publish(&topic(), &mixed).await.unwrap();
    assert!(answers[0].is_ok() && answers[2].is_ok(), "{answers:?}");
    let refused = answers[1].as_ref().unwrap_err();
    assert!(refused.to_string().contains("1048577") && refused.to_string().contains("1048576"), "{refused}");
    assert_eq!(refused.code(), "invalid");
}

#[tokio::test]
async fn errors_say_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let missing = EmbeddedBus::open(dir.path().join("no/such/dir/bus.db")).unwrap_err();
    assert_eq!(missing.code(), "unavailable");
    assert!(missing.to_string().contains("directory must exist"), "{missing}");
    let text = dir.path().join("text.db");
    std::fs::write(&text, "this is a text, and longer than the header of a database would be. ".repeat(9))
        .unwrap();
    let error = EmbeddedBus::open(&text).unwrap_err();
    assert!(error.to_string().contains("not an SQLite database"), "{error}");
    assert!(EmbeddedBus::open("").unwrap_err().to_string().contains("it needs a name"));
    let ledger = dir.path().join("ledger.db");
    drop(hapax::backend::sqlite::SqliteLedger::open(&ledger, hapax::ledger::Settings::default()).unwrap());
    let error = EmbeddedBus::open(&ledger).unwrap_err();
    assert!(error.to_string().contains("a file of its own"), "{error}");
    let bus = EmbeddedBus::open(dir.path().join("bus.db")).unwrap();
    let unknown = bus.subscribe(Subscription::new("g", [topic()]).unwrap()).await.map(|_| ()).unwrap_err();
    assert!(unknown.to_string().contains("no topic orders"), "{unknown}");
    assert_eq!(bus.committed("g", &partition(0)).await.unwrap_err().code(), "not-found");
}

/// Somebody else holds the file: the caller hears that it is contention, and nothing was published.
#[tokio::test]
async fn a_locked_file_is_contention() {
    let file = File::new();
    let bus = file.open();
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let blocker = rusqlite::Connection::open(file.path()).unwrap();
    blocker.execute_batch("BEGIN IMMEDIATE").unwrap();
    let error = bus.publish(&topic(), &records(1, 1)).await.unwrap_err();
    assert!(matches!(error, Error::Contended { .. }), "{error:?}");
    assert!(error.is_retryable());
    assert_eq!(bus.range(&partition(0)).await.unwrap(), (0, 0), "reading goes on meanwhile");
    blocker.execute_batch("ROLLBACK").unwrap();
    assert_eq!(publish(&bus, &records(1, 1)).await, [(0, 0)]);
}

/// A sign of life from before the clock was set back is none.
#[tokio::test]
async fn a_clock_that_is_set_back_keeps_no_dead_alive() {
    let file = File::new();
    let ahead = ManualClock::new(noon().plus(Duration::from_secs(3600)));
    let settings = EmbeddedSettings::default();
    let (still, bus) = (EmbeddedBus::open_with(file.path(), settings, Arc::new(ahead)).unwrap(), file.open());
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    let mut subscription = Subscription::new("g", [topic()]).unwrap();
    subscription.session_timeout = Duration::from_millis(400); // beats every 100 ms
    let mut dead = still.subscribe(subscription.clone()).await.unwrap();
    let BusEvent::Assigned(before) = dead.next().await.unwrap() else { panic!("an assignment comes first") };
    still.silence(true);
    // Its last sign of life lies an hour ahead of what the clock says now.
    let mut member = bus.subscribe(subscription).await.unwrap();
    let first = tokio::time::timeout(Duration::from_mins(1), member.next()).await.expect("an heir");
    let BusEvent::Assigned(given) = first.unwrap() else { panic!("an assignment comes first") };
    assert_eq!(given[0].partition, partition(0));
    still.silence(false);
    assert_eq!(dead.next().await.unwrap(), BusEvent::Lost(before));
}
