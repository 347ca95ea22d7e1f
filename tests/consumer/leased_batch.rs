//! Leased batches: one call of the handler for many events, and each event ends by itself.
#![cfg(all(feature = "testing", feature = "sqlite"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::backend::sqlite::SqliteLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{Bus, EmbeddedBus, Record, TopicSettings};
use hapax::consumer::{
    BatchHandled, ConsumerBuilder, ConsumerHandle, Counts, Failed, Handled, LeasedBatchHandler, LeasedEvent,
};
use hapax::ledger::{Entry, Filter, Ledger, OnDead, OrderPolicy, Settings, State};
use hapax::{Consumer, Guard, Outcome, Topic};

use crate::support::faulty::Faulty;
use crate::support::this;
use crate::support::wait::{until, until_so};

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn record(id: &str) -> Record {
    let payload = serde_json::json!({ "event_id": id }).to_string();
    Record { payload: Some(payload.into()), ..Record::default() }
}

fn numbered(id: &str, aggregate: &str, seq: u64) -> Record {
    let payload = serde_json::json!({"event_id": id, "aggregate_id": aggregate, "seq": seq}).to_string();
    Record { key: Some(aggregate.to_owned().into()), payload: Some(payload.into()), ..Record::default() }
}

async fn bus(records: &[Record]) -> Arc<MemoryBus> {
    let bus = Arc::new(MemoryBus::default());
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    bus.publish(&topic(), records).await.unwrap();
    bus
}

fn consumer<L: Ledger>(bus: Arc<dyn Bus>, ledger: L) -> ConsumerBuilder<L> {
    Consumer::builder(bus, ledger).scope("search").topic("orders").with(|settings| {
        settings.backoff_base = Duration::from_millis(10);
        settings.backoff_max = Duration::from_millis(20);
        settings.attempts_max = 3;
        settings.concurrency = 1; // what arrives while a batch runs is the next batch
    })
}

/// A handler that has state: a closure over copies of it.
struct Stateful<F>(F);

impl<F, R> LeasedBatchHandler for Stateful<F>
where
    F: Fn(Vec<LeasedEvent>) -> R + Send + Sync + 'static,
    R: Future<Output = BatchHandled> + Send + 'static,
{
    async fn handle(&self, batch: &[LeasedEvent]) -> BatchHandled {
        (self.0)(batch.to_vec()).await
    }
}

/// What a handler saw: the ids of each batch.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<Vec<String>>>>);

impl Log {
    fn note(&self, batch: &[LeasedEvent]) {
        self.0.lock().unwrap().push(batch.iter().map(|item| item.event.id.to_string()).collect());
    }

    fn batches(&self) -> Vec<Vec<String>> {
        self.0.lock().unwrap().clone()
    }

    /// How often each id ran.
    fn runs(&self) -> BTreeMap<String, usize> {
        let mut runs = BTreeMap::new();
        for id in self.batches().into_iter().flatten() {
            *runs.entry(id).or_default() += 1;
        }
        runs
    }
}

/// In the batch of "first": publishes the others and waits until they are in memory, so that they are the next batch.
async fn gather(bus: &MemoryBus, handle: &ConsumerHandle, batch: &[LeasedEvent], others: &[Record]) {
    if batch.iter().any(|item| *item.event.id.as_str() == *"first") {
        bus.publish(&topic(), others).await.unwrap();
        until_so("the others are here", || handle.progress().in_flight > others.len()).await;
    }
}

/// Stops a consumer once so many deliveries are through.
fn stop_after(handle: &ConsumerHandle, count: u64) {
    let handle = handle.clone();
    tokio::spawn(async move {
        until_so("all is through", || handle.progress().passed.values().sum::<u64>() >= count).await;
        handle.stop();
    });
}

async fn entries(ledger: &impl Ledger, state: State) -> Vec<Entry> {
    let filter = Filter { states: vec![state], ..Filter::default() };
    ledger.list(&filter, None, 100).await.unwrap().entries
}

fn records(ids: &[String]) -> Vec<Record> {
    ids.iter().map(|id| record(id)).collect()
}

fn ids(prefix: &str, count: usize) -> Vec<String> {
    (0..count).map(|n| format!("{prefix}-{n}")).collect()
}

/// Runs a consumer whose handler decides about each event by itself: "first", then the others in one batch.
async fn run<L: Ledger>(
    ledger: L,
    others: Vec<Record>,
    order: bool,
    decide: impl Fn(&LeasedEvent) -> Handled + Send + Sync + 'static,
) -> (Counts, Log) {
    let bus = bus(&[record("first")]).await;
    let mut builder = consumer(Arc::clone(&bus) as Arc<dyn Bus>, ledger);
    if order {
        builder = builder.order(OrderPolicy::Latest, OnDead::Skip);
    }
    let consumer = builder.build().unwrap();
    let (handle, log) = (consumer.handle(), Log::default());
    stop_after(&handle, others.len() as u64 + 1);
    let (seen, shared) = (log.clone(), Arc::new((bus, others, decide)));
    let counts = consumer
        .leased_batch(Stateful(move |batch: Vec<LeasedEvent>| {
            let (handle, shared) = (handle.clone(), Arc::clone(&shared));
            seen.note(&batch);
            async move {
                let (bus, others, decide) = &*shared;
                gather(bus, &handle, &batch, others).await;
                Ok(batch.iter().map(decide).collect())
            }
        }))
        .await
        .unwrap();
    (counts, log)
}

/// One is dead at once, one needs a second attempt, one never succeeds: the others are done, and ran once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_event_of_a_batch_fails_alone() {
    let ledger = Arc::new(MemoryLedger::default());
    let others = records(&ids("e", 6));
    let (counts, log) = run(Arc::clone(&ledger), others, false, |item| {
        match (&*item.event.id.as_str(), item.run.attempt()) {
            ("e-1", _) => Err(Failed::fatal("it is refused")),
            ("e-2", 1) => Err(Failed::retryable("not now")),
            ("e-3", _) => Err(Failed::retryable("never")),
            _ => Ok(()),
        }
    })
    .await;
    assert_eq!((counts["done"], counts["dead"]), (5, 2), "{counts:?}");
    assert!(
        log.batches().iter().any(|batch| batch.len() == 6),
        "one batch had them all: {:?}",
        log.batches()
    );
    let runs = log.runs();
    for (id, times) in [("first", 1), ("e-0", 1), ("e-1", 1), ("e-2", 2), ("e-3", 3), ("e-4", 1), ("e-5", 1)]
    {
        assert_eq!(runs[id], times, "{id}: {:?}", log.batches());
    }
    let mut dead: Vec<_> = entries(&*ledger, State::Dead).await;
    dead.sort_by_key(|entry| entry.identity.id.to_string());
    assert_eq!(dead.iter().map(|entry| entry.attempts).collect::<Vec<_>>(), [1, 3]);
    assert!(dead[0].reason.as_deref().unwrap().contains("it is refused"));
}

/// Events of one aggregate are never in one batch, and run in order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_head_of_a_key_is_in_a_batch() {
    let mut all = Vec::new();
    for seq in 1..=3 {
        for aggregate in ["a", "b"] {
            all.push(numbered(&format!("{aggregate}-{seq}"), aggregate, seq));
        }
    }
    let (counts, log) = run(MemoryLedger::default(), all, true, |_| Ok(())).await;
    assert_eq!(counts["done"], 7, "{counts:?}");
    for batch in log.batches() {
        let mut aggregates: Vec<&str> = batch.iter().map(|id| &id[..1]).collect();
        aggregates.sort_unstable();
        aggregates.dedup();
        assert_eq!(aggregates.len(), batch.len(), "{batch:?}");
    }
    let order: Vec<String> = log.batches().into_iter().flatten().collect();
    for aggregate in ["a", "b"] {
        let own: Vec<&String> = order.iter().filter(|id| id.starts_with(aggregate)).collect();
        assert_eq!(own, [&format!("{aggregate}-1"), &format!("{aggregate}-2"), &format!("{aggregate}-3")]);
    }
}

/// Nobody knows which event of a batch made the handler panic, so they run one by one: only the one that does is dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_batch_that_panics_is_run_event_by_event() {
    let ledger = Arc::new(MemoryLedger::default());
    let others = records(&ids("e", 5));
    let (counts, log) = run(Arc::clone(&ledger), others, false, |item| {
        assert!(*item.event.id.as_str() != *"e-3", "a panic the test ordered");
        Ok(())
    })
    .await;
    assert_eq!((counts["done"], counts["dead"]), (5, 1), "{counts:?}");
    let dead = entries(&*ledger, State::Dead).await;
    assert_eq!(
        (dead[0].identity.id.to_string().as_str(), dead[0].attempts),
        ("e-3", 3),
        "only its own runs count"
    );
    let done = entries(&*ledger, State::Done).await;
    assert!(done.iter().all(|entry| entry.attempts == 1), "the batch that panicked cost nobody an attempt");
    assert!(log.batches().iter().any(|batch| batch.len() == 5), "{:?}", log.batches());
}

/// A handler that returns too few outcomes is told so, and no event passes for done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_number_of_outcomes_settles_nothing_as_done() {
    let ledger = Arc::new(MemoryLedger::default());
    let consumer = consumer(bus(&[record("a")]).await, Arc::clone(&ledger)).build().unwrap();
    stop_after(&consumer.handle(), 1);
    let counts =
        consumer.leased_batch(async |_: &[LeasedEvent]| -> BatchHandled { Ok(Vec::new()) }).await.unwrap();
    assert_eq!(counts["dead"], 1, "{counts:?}");
    let reason = entries(&*ledger, State::Dead).await[0].reason.clone().unwrap();
    assert!(reason.contains("0 outcomes for 1 events"), "{reason}");
}

/// The failure of a batch is that of each event, and counts as such.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_a_batch_is_the_failure_of_each() {
    let ledger = Arc::new(MemoryLedger::default());
    let consumer = consumer(bus(&records(&ids("e", 3))).await, Arc::clone(&ledger))
        .with(|settings| settings.attempts_max = 100) // a neighbour that comes late fails the others once more
        .build()
        .unwrap();
    stop_after(&consumer.handle(), 3);
    let counts = consumer
        .leased_batch(async |batch: &[LeasedEvent]| -> BatchHandled {
            if batch.iter().any(|item| item.run.attempt() < 2) {
                return Err(Failed::retryable("the sink is away"));
            }
            Ok(batch.iter().map(|_| Ok(())).collect())
        })
        .await
        .unwrap();
    assert_eq!(counts["done"], 3, "{counts:?}");
    assert!(entries(&*ledger, State::Done).await.iter().all(|entry| entry.attempts >= 2));
}

/// The ledger is away for the consumer, its lease lapses, and somebody else settles the event. The batch is cancelled, and what
/// it would have settled stays as the other one left it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_lease_settles_nothing() {
    let ledger = Faulty::default();
    let bus = bus(&[record("a"), record("b")]).await;
    let consumer = consumer(bus, ledger.clone())
        .with(|settings| {
            settings.lease = Duration::from_secs(2);
            settings.heartbeat = Duration::from_millis(500);
        })
        .build()
        .unwrap();
    let (handle, log) = (consumer.handle(), Log::default());
    let seen = log.clone();
    let running = tokio::spawn(consumer.leased_batch(Stateful(move |batch: Vec<LeasedEvent>| {
        seen.note(&batch);
        async move {
            if batch.iter().any(|item| *item.event.id.as_str() == *"a") {
                std::future::pending::<()>().await; // it can only be cancelled
            }
            Ok(batch.iter().map(|_| Ok(())).collect())
        }
    })));
    until("the handler has it", async || log.runs().contains_key("a")).await;
    let faults = [&ledger.faults.extends_lost, &ledger.faults.settles_lost, &ledger.faults.claims_lost];
    for fault in &faults {
        fault.store(u32::MAX, Ordering::SeqCst);
    }
    // Another process, for which the ledger is there.
    let guard = Guard::builder(ledger.inner.clone()).scope("search").build().unwrap();
    let mut other = None;
    until("the lease has lapsed", async || {
        if let Outcome::First(lease) = guard.lease("a").await.unwrap() {
            other = Some(lease);
        }
        other.is_some()
    })
    .await;
    other.unwrap().done().await.unwrap();
    for fault in &faults {
        fault.store(0, Ordering::SeqCst);
    }
    until("both are through", async || handle.progress().passed.values().sum::<u64>() == 2).await;
    handle.stop();
    let counts = running.await.unwrap().unwrap();
    assert_eq!(
        (counts["duplicate"], counts["done"]),
        (1, 1),
        "what the other one settled is a duplicate here: {counts:?}"
    );
    assert_eq!(log.runs()["a"], 1, "it was cancelled, and never ran again: {:?}", log.batches());
    let done = entries(&ledger.inner, State::Done).await;
    assert_eq!(done.len(), 2);
}

const CHILD: &str = "HAPAX_TEST_LEASED_BATCH_DIR";

/// A consumer on files, whose effect is a line in a file of its own. Returns how its deliveries ended.
async fn write_lines(dir: &Path, stop: impl Fn(ConsumerHandle)) -> Counts {
    let bus = Arc::new(EmbeddedBus::open(dir.join("bus.db")).unwrap());
    let ledger = SqliteLedger::open(dir.join("ledger.db"), Settings::default()).unwrap();
    let consumer = consumer(bus, ledger)
        .with(|settings| {
            settings.lease = Duration::from_secs(2);
            settings.heartbeat = Duration::from_millis(500);
            settings.session_timeout = Duration::from_secs(2);
            settings.commit_interval = Duration::from_millis(100);
        })
        .build()
        .unwrap();
    let file = dir.join("effects");
    stop(consumer.handle());
    consumer
        .leased_batch(Stateful(move |batch: Vec<LeasedEvent>| {
            let file = file.clone();
            async move {
                let mut effects = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
                for item in &batch {
                    writeln!(effects, "{}", item.event.id)?;
                }
                Ok(batch.iter().map(|_| Ok(())).collect())
            }
        }))
        .await
        .unwrap()
}

fn lines(dir: &Path) -> Vec<String> {
    let text = std::fs::read_to_string(dir.join("effects")).unwrap_or_default();
    text.lines().map(str::to_owned).collect()
}

/// Killed after the write and before the settle: what was written is written again, each event is settled once, and nothing is
/// written a third time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_between_the_write_and_the_settle_repeats() {
    if let Ok(dir) = std::env::var(CHILD) {
        write_lines(Path::new(&dir), |_| {}).await;
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let bus = EmbeddedBus::open(dir.path().join("bus.db")).unwrap();
    bus.create_topic(&topic(), TopicSettings::new(1)).await.unwrap();
    bus.publish(&topic(), &records(&ids("e", 5))).await.unwrap();
    drop(bus);
    let status = this::test("a_crash_between_the_write_and_the_settle_repeats")
        .env(CHILD, dir.path())
        .env(hapax::testing::crash::VARIABLE, "consumer.before-settle:1")
        .status()
        .unwrap();
    assert!(!status.success(), "it was killed");
    let killed = lines(dir.path());
    assert!(!killed.is_empty(), "a batch was written before the kill");
    let counts = write_lines(dir.path(), |handle| stop_after(&handle, 5)).await;
    let after = lines(dir.path());
    for id in ids("e", 5) {
        let times = |lines: &[String]| lines.iter().filter(|line| **line == id).count();
        assert_eq!(times(&after), 1 + times(&killed), "{id}: {killed:?}, then {after:?}");
    }
    assert_eq!(counts["done"], 5, "{counts:?}");
    let ledger = SqliteLedger::open(dir.path().join("ledger.db"), Settings::default()).unwrap();
    assert_eq!(entries(&ledger, State::Done).await.len(), 5);
}

/// A handler as a plain function, and as a type; deliveries that come twice take effect once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leased_batch_handlers_come_as_functions_and_as_types() {
    async fn plain(batch: &[LeasedEvent]) -> BatchHandled {
        Ok(batch
            .iter()
            .map(|item| {
                assert_eq!(item.run.key().id, item.event.id);
                Ok(())
            })
            .collect())
    }
    struct Counting(Arc<AtomicU32>);
    impl LeasedBatchHandler for Counting {
        async fn handle(&self, batch: &[LeasedEvent]) -> BatchHandled {
            self.0.fetch_add(u32::try_from(batch.len()).unwrap(), Ordering::SeqCst);
            Ok(batch.iter().map(|_| Ok(())).collect())
        }
    }
    let twice: Vec<Record> = ["a", "b", "a", "c", "b", "c"].map(record).into();
    let effects = Arc::new(AtomicU32::new(0));
    for with_type in [false, true] {
        let consumer = consumer(bus(&twice).await, MemoryLedger::default()).build().unwrap();
        stop_after(&consumer.handle(), 6);
        let counts = if with_type {
            consumer.leased_batch(Counting(Arc::clone(&effects))).await.unwrap()
        } else {
            consumer.leased_batch(plain).await.unwrap()
        };
        assert_eq!((counts["done"], counts["duplicate"]), (3, 3), "{counts:?}");
    }
    assert_eq!(effects.load(Ordering::SeqCst), 3);
}
