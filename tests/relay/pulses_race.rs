//! Writers append while a relay publishes pulses, and a reader of the topic compares what the pulses say with what the writers were
//! told: when a pulse of time T is read, every event of that partition that was acknowledged before T was read before it.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::wait::until;
use hapax::bus::{Bus, MemoryBus, Pulse, Received, Record, TopicSettings};
use hapax::journal::{Append, Expected, Journal, MemoryJournal};
use hapax::relay::{Progress, Relay, RelayHandle, RelaySettings};
use hapax::testing::relay::{FaultyBus, away, read_topic, witness};
use hapax::{Aggregate, Event, EventId, RelayName, Time, Topic};
use tokio::task::{JoinHandle, JoinSet};

const INTERVAL: Duration = Duration::from_millis(2);
const WRITERS: usize = 3;
const AGGREGATES: usize = 8;
/// How far the writers may be ahead of the relay, in events.
const AHEAD_MAX: u64 = 300;

/// What was acknowledged to writers: when they knew that an event was appended, by the journal's clock.
type Acknowledged = Arc<Mutex<HashMap<String, Time>>>;

/// Starts a writer of this number.
type StartWriter = Box<dyn FnOnce(&mut Race, usize) + Send>;
type Writers = Vec<StartWriter>;

/// How events get into the journal.
#[async_trait::async_trait]
trait Write: Send + Sync {
    async fn write(&self, append: &Append) -> hapax::journal::Appended;
}

struct Plainly(Arc<dyn Journal>);

#[async_trait::async_trait]
impl Write for Plainly {
    async fn write(&self, append: &Append) -> hapax::journal::Appended {
        self.0.append(append).await.unwrap()
    }
}

struct Race {
    journal: Arc<dyn Journal>,
    bus: Arc<FaultyBus>,
    topic: Topic,
    acknowledged: Acknowledged,
    stop: Arc<AtomicBool>,
    /// The relay that runs.
    relay: Mutex<Option<(RelayHandle, JoinHandle<hapax::Result<Progress>>)>>,
    writers: JoinSet<()>,
}

fn is_of(record: &Record, aggregate: &str) -> bool {
    record.headers.get("aggregate_id") == Some(aggregate.as_bytes())
}

impl Race {
    async fn new(journal: Arc<dyn Journal>, bus: Arc<dyn Bus>, partitions: i32) -> Self {
        let topic = Topic::new(format!("t-{}", uuid::Uuid::new_v4().simple())).unwrap();
        bus.create_topic(&topic, TopicSettings::new(partitions)).await.unwrap();
        let bus = Arc::new(FaultyBus::new(bus));
        bus.late_ms.store(1, Ordering::SeqCst); // a pulse that is sent too early overtakes events
        let (acknowledged, stop) = (Acknowledged::default(), Arc::default());
        Race { journal, bus, topic, acknowledged, stop, relay: Mutex::default(), writers: JoinSet::new() }
    }

    fn start_relay(&self) {
        let mut settings = RelaySettings::new(RelayName::new("main").unwrap(), self.topic.clone());
        settings.backoff_base = Duration::from_millis(2);
        settings.backoff_max = Duration::from_millis(20);
        settings.flush_timeout = Duration::from_secs(1);
        settings.batch_max = 20;
        settings.pulse = Some(INTERVAL);
        let relay = Relay::new(Arc::clone(&self.journal), self.bus.clone(), settings).unwrap();
        let handle = relay.handle();
        *self.relay.lock().unwrap() = Some((handle, tokio::spawn(relay.run())));
    }

    fn progress(&self) -> Progress {
        self.relay.lock().unwrap().as_ref().expect("a relay runs").0.progress()
    }

    async fn stop_relay(&self) {
        let (handle, task) = self.relay.lock().unwrap().take().expect("a relay runs");
        handle.stop();
        task.await.unwrap().unwrap();
    }

    /// Appends until it is told to stop, and not much faster than the relay publishes.
    fn start_writer(self: &mut Race, number: usize, write: impl Write + 'static) {
        let (journal, acknowledged, stop) =
            (Arc::clone(&self.journal), Arc::clone(&self.acknowledged), Arc::clone(&self.stop));
        self.writers.spawn(async move {
            for n in 0.. {
                if stop.load(Ordering::SeqCst) {
                    return;
                }
                let id = format!("e-{number}-{n}");
                let event = Event::new(EventId::new(&id).unwrap()).payload(r#"{"n": 1}"#);
                let aggregate = Aggregate::new(format!("a{}", (n + number) % AGGREGATES)).unwrap();
                let appended = write.write(&Append::new(aggregate, Expected::Any, [event])).await;
                let at = journal.now().await.unwrap();
                acknowledged.lock().unwrap().insert(id, at);
                let position = &appended.placed[0].position;
                while !stop.load(Ordering::SeqCst) {
                    let relays = journal.relays().await.unwrap();
                    let passed = relays.first().and_then(|relay| relay.checkpoint.as_ref());
                    let passed = passed.map_or(0, |checkpoint| checkpoint.position.number());
                    if position.number() < passed + AHEAD_MAX {
                        break;
                    }
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                tokio::task::yield_now().await;
            }
        });
    }

    /// So many more pulses. Two: the second one's time is after this call began.
    async fn pulses(&self, more: u64) {
        let pulses = self.progress().pulses;
        // Each for itself: on a busy disk they are slow, and they come.
        for number in 1..=more {
            until("a pulse", async || self.progress().pulses >= pulses + number).await;
        }
    }

    /// Until the relay has left an aggregate behind.
    async fn left_behind(&self, aggregate: &str) {
        until("it is behind", async || self.is_behind(aggregate).await).await;
    }

    async fn is_behind(&self, aggregate: &str) -> bool {
        let relays = self.journal.relays().await.unwrap();
        let behind = relays.into_iter().filter_map(|relay| relay.checkpoint).flat_map(|c| c.behind);
        behind.into_iter().any(|behind| behind.aggregate == aggregate)
    }

    /// Has the bus not answer for an aggregate, until the relay has left it behind. Where a whole batch is of that aggregate the relay
    /// waits, as for a bus that is away: then it gets its answers, and the next batch may have others.
    async fn slow_until_left_behind(&self, aggregate: &str) {
        let mut looks = 0;
        until("it is behind", async || {
            if looks % 400 == 0 {
                self.bus.let_go();
                let name = aggregate.to_owned();
                self.bus.slow(move |record| is_of(record, &name));
            }
            looks += 1;
            self.is_behind(aggregate).await
        })
        .await;
    }

    /// Until the journal's clock has gone on by some intervals: a relay that errs would have sent pulses.
    async fn intervals(&self) {
        let now = self.journal.now().await.unwrap();
        let then = now.plus(20 * INTERVAL);
        until("some intervals", async || self.journal.now().await.unwrap() > then).await;
    }

    /// Everything is on the topic, and a pulse says so; then the reader looks.
    async fn end(mut self) {
        self.stop.store(true, Ordering::SeqCst);
        while let Some(ended) = self.writers.join_next().await {
            ended.unwrap();
        }
        let all = self.journal.now().await.unwrap();
        let last = self.journal.stat().await.unwrap().last.unwrap();
        until("everything is relayed", async || {
            let progress = self.progress();
            progress.position >= last && progress.behind == 0
        })
        .await;
        self.pulses(2).await;
        self.stop_relay().await;
        let records = read_topic(&*self.bus, &self.topic).await;
        let acknowledged = self.acknowledged.lock().unwrap();
        assert_eq!(witness(&records).unwrap().events, acknowledged.len(), "everything is there");
        compare(&records, &acknowledged, all);
    }
}

/// Compares what pulses say with what was acknowledged to the writers, partition by partition.
fn compare(records: &[Received], acknowledged: &HashMap<String, Time>, all: Time) {
    let mut partitions: HashMap<i32, Vec<&Received>> = HashMap::new();
    for received in records {
        partitions.entry(received.origin.partition).or_default().push(received);
    }
    let (mut pulses, mut covered) = (0, 0);
    for (number, records) in partitions {
        let mut firsts: HashMap<&str, usize> = HashMap::new();
        for (place, received) in records.iter().enumerate() {
            if let Some(id) = received.record.headers.get("eventId") {
                firsts.entry(std::str::from_utf8(id).unwrap()).or_insert(place);
            }
        }
        let mut latest = None;
        for (place, received) in records.iter().enumerate() {
            let Some(pulse) = Pulse::of(&received.record) else { continue };
            let at = pulse.unwrap().at;
            (pulses, latest) = (pulses + 1, latest.max(Some(at)));
            for (id, first) in firsts.iter().filter(|(id, _)| acknowledged[**id] < at) {
                covered += 1;
                assert!(
                    *first < place,
                    "partition {number}: the pulse {place} of {at} came before {id} ({first}), acknowledged at {}",
                    acknowledged[*id]
                );
            }
        }
        assert!(latest > Some(all), "partition {number}: the last pulse speaks of everything");
    }
    println!("{} events, {pulses} pulses, {covered} comparisons", acknowledged.len());
    assert!(pulses > 0 && covered > 0);
}

/// Writers, a relay and pulses; the relay is replaced in the middle.
async fn race(mut race: Race, writers: Writers) {
    race.start_relay();
    for (number, start) in writers.into_iter().enumerate() {
        start(&mut race, number);
    }
    race.pulses(10).await;
    race.stop_relay().await;
    race.start_relay();
    race.pulses(10).await;
    race.end().await;
}

/// The same, while the bus refuses an aggregate for a while, and then does not answer for another.
async fn refusing_race(mut race: Race, writers: Writers) {
    race.start_relay();
    for (number, start) in writers.into_iter().enumerate() {
        start(&mut race, number);
    }
    for round in 0..2 {
        race.pulses(2).await;
        let refused = format!("a{round}");
        let name = refused.clone();
        race.bus.fail(move |record| is_of(record, &name).then(away));
        race.left_behind(&refused).await;
        race.intervals().await;
        race.bus.heal();
        race.pulses(2).await;
        race.slow_until_left_behind(&format!("a{}", round + 2)).await;
        race.intervals().await;
        race.bus.let_go();
    }
    race.pulses(2).await;
    race.end().await;
}

fn plain_writers() -> Writers {
    let one = |_| -> StartWriter {
        Box::new(|race, number| {
            let journal = Arc::clone(&race.journal);
            race.start_writer(number, Plainly(journal));
        })
    };
    (0..WRITERS).map(one).collect()
}

async fn on_memory() -> Race {
    Race::new(Arc::new(MemoryJournal::default()), Arc::new(MemoryBus::default()), 3).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pulses_are_true_on_memory() {
    race(on_memory().await, plain_writers()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pulses_are_true_on_memory_while_some_aggregates_are_refused() {
    refusing_race(on_memory().await, plain_writers()).await;
}

#[cfg(feature = "sqlite")]
mod embedded {
    use super::*;
    use hapax::backend::sqlite::SqliteJournal;
    use hapax::bus::EmbeddedBus;
    use hapax::journal::JournalSettings;

    async fn in_files(folder: &tempfile::TempDir) -> Race {
        let journal =
            SqliteJournal::open(folder.path().join("journal.db"), JournalSettings::default()).unwrap();
        let bus = EmbeddedBus::open(folder.path().join("bus.db")).unwrap();
        Race::new(Arc::new(journal), Arc::new(bus), 3).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pulses_are_true_in_files() {
        let folder = tempfile::tempdir().unwrap();
        race(in_files(&folder).await, plain_writers()).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pulses_are_true_in_files_while_some_aggregates_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        refusing_race(in_files(&folder).await, plain_writers()).await;
    }
}

#[cfg(all(feature = "postgres", feature = "kafka", feature = "http"))]
mod servers {
    use super::*;
    use crate::support::postgres as support;
    use crate::support::world;
    use hapax::backend::postgres::{PgJournal, PgJournalSettings, Pooling};

    async fn journal() -> PgJournal {
        let mut settings = PgJournalSettings::default();
        settings.schema = support::fresh_schema();
        settings.pooling = Pooling::Session;
        PgJournal::with_pool(support::pool(8).await, settings).await.expect("the journal")
    }

    /// Appends in a transaction that stays open for a while: its time and its position are older than its commit. Some are rolled back.
    struct Late(PgJournal);

    #[async_trait::async_trait]
    impl Write for Late {
        async fn write(&self, append: &Append) -> hapax::journal::Appended {
            let mut undone = self.0.transaction().await.unwrap();
            let _ = self.0.append_in(&mut undone, append).await.unwrap();
            undone.rollback().await.unwrap();
            let mut tx = self.0.transaction().await.unwrap();
            let appended = self.0.append_in(&mut tx, append).await.unwrap();
            sqlx::query("select pg_sleep(0.005)").execute(&mut *tx).await.unwrap();
            tx.commit().await.unwrap();
            appended
        }
    }

    fn late_writers(journal: &PgJournal) -> Writers {
        let late = journal.clone();
        let mut writers = plain_writers();
        writers.push(Box::new(|race, number| race.start_writer(number, Late(late))));
        writers
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pulses_are_true_from_postgres_to_kafka() {
        let journal = journal().await;
        let on = Race::new(Arc::new(journal.clone()), world::bus().await, 3).await;
        race(on, late_writers(&journal)).await;
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn pulses_are_true_from_postgres_to_kafka_while_some_aggregates_are_refused() {
        let journal = journal().await;
        let on = Race::new(Arc::new(journal.clone()), world::bus().await, 3).await;
        refusing_race(on, late_writers(&journal)).await;
    }

    /// An open transaction has its time and its position, and comes to the topic behind a pulse that is later than that time: commit
    /// order is not the order of times. A read model that went by the events' times would have said that it was there.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn t55_what_commits_after_a_pulse_comes_after_it_however_old_its_time_is() {
        let journal = journal().await;
        let race = Race::new(Arc::new(journal.clone()), Arc::new(MemoryBus::default()), 1).await;
        let append = |id: &str| {
            let event = Event::new(EventId::new(id).unwrap());
            Append::new(Aggregate::new(id).unwrap(), Expected::New, [event])
        };
        // The last position drawn is of a transaction that was rolled back: no event will ever be there.
        let mut undone = journal.transaction().await.unwrap();
        let _ = journal.append_in(&mut undone, &append("undone")).await.unwrap();
        undone.rollback().await.unwrap();
        race.start_relay();
        race.pulses(2).await;

        let mut open = journal.transaction().await.unwrap();
        let _ = journal.append_in(&mut open, &append("late")).await.unwrap();
        race.pulses(3).await;
        open.commit().await.unwrap();
        let now = journal.now().await.unwrap();
        until("it is relayed", async || race.progress().published == 1).await;
        race.pulses(2).await;
        race.stop_relay().await;

        let stored = journal.find(None, &EventId::new("late").unwrap()).await.unwrap().unwrap();
        let records = read_topic(&*race.bus, &race.topic).await;
        let pulses: Vec<Option<Time>> = records
            .iter()
            .map(|received| Pulse::of(&received.record).map(|pulse| pulse.unwrap().at))
            .collect();
        let place = pulses.iter().position(Option::is_none).expect("the event");
        assert!(pulses[..place].iter().any(|at| *at > Some(stored.at)), "later than its time, and before it");
        assert!(pulses[..place].iter().all(|at| *at <= Some(now)), "none says that it is there");
        assert!(pulses[place..].iter().any(|at| *at > Some(now)), "and then one does");
    }
}
