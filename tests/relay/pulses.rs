//! When a relay publishes pulses, and when it does not. Whether they are true while everybody writes is in `pulses_race.rs`.
//!
//! Time stands still here unless every task waits (`start_paused`): hours pass in no time, and nothing depends on the machine.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a panic is how a test fails")]

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax::bus::{Bus, MemoryBus, Partition, Pulse, Record, TopicSettings};
use hapax::journal::{AggregateOf, Append, Expected, Journal, MemoryJournal, Position, RelayStore as _};
use hapax::relay::{Progress, Relay, RelayHandle, RelaySettings, skip};
use hapax::testing::relay::{FaultyBus, OddJournal, away, read_topic, too_large};
use hapax::{Aggregate, Event, EventId, RelayName, Time, Topic};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};

const SECOND: Duration = Duration::from_secs(1);
const PARTITIONS: i32 = 3;

fn topic() -> Topic {
    Topic::new("orders").unwrap()
}

fn settings() -> RelaySettings {
    let mut settings = RelaySettings::new(RelayName::new("main").unwrap(), topic());
    settings.backoff_base = Duration::from_millis(2);
    settings.backoff_max = Duration::from_millis(20);
    settings.batch_max = 20;
    // The journal's clock does not stand still: a lease by it never lapses here.
    settings.lease = Duration::from_secs(3600);
    settings.pulse = Some(SECOND);
    settings
}

async fn bus() -> Arc<FaultyBus> {
    let bus = MemoryBus::default();
    bus.create_topic(&topic(), TopicSettings::new(PARTITIONS)).await.unwrap();
    Arc::new(FaultyBus::new(Arc::new(bus)))
}

async fn append(journal: &dyn Journal, aggregate: &str, count: usize) {
    for _ in 0..count {
        let event = Event::new(EventId::now_v7()).payload(format!(r#"{{"of": "{aggregate}"}}"#));
        let append = Append::new(Aggregate::new(aggregate).unwrap(), Expected::Any, [event]);
        let _ = journal.append(&append).await.unwrap();
    }
}

fn is_of(record: &Record, aggregate: &str) -> bool {
    record.headers.get("aggregate_id") == Some(aggregate.as_bytes())
}

struct Running {
    handle: RelayHandle,
    task: JoinHandle<hapax::Result<Progress>>,
}

fn start(journal: Arc<dyn Journal>, bus: &Arc<FaultyBus>, settings: RelaySettings) -> Running {
    let relay = Relay::new(journal, bus.clone(), settings).unwrap();
    let handle = relay.handle();
    Running { handle, task: tokio::spawn(relay.run()) }
}

impl Running {
    async fn until(&self, what: &str, is: impl Fn(&Progress) -> bool) -> Progress {
        let end = Instant::now() + Duration::from_secs(600);
        loop {
            let progress = self.handle.progress();
            if is(&progress) {
                return progress;
            }
            assert!(Instant::now() < end, "never came: {what}: {progress:?}");
            sleep(Duration::from_millis(1)).await;
        }
    }

    fn pulses(&self) -> u64 {
        self.handle.progress().pulses
    }

    async fn stop(self) -> Progress {
        self.handle.stop();
        self.task.await.unwrap().unwrap()
    }
}

/// The times of a partition's pulses, in order.
async fn times(bus: &FaultyBus, partition: i32) -> Vec<Time> {
    let records = read_topic(bus, &topic()).await;
    let of = records.iter().filter(|received| received.origin.partition == partition);
    of.filter_map(|received| Pulse::of(&received.record)).map(|pulse| pulse.unwrap().at).collect()
}

#[tokio::test(start_paused = true)]
async fn pulses_come_while_nothing_happens_to_every_partition_once_per_interval() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    append(&*journal, "a", 3).await;
    let appended = journal.now().await.unwrap();
    let running = start(journal.clone(), &bus, settings());
    running.until("the first", |progress| progress.pulses == 1).await;
    let looks = running.handle.progress().looks;
    sleep(60 * SECOND).await;
    let progress = running.stop().await;
    assert!((60..=62).contains(&progress.pulses), "{progress:?}");
    assert!(progress.looks - looks < 4 * 60, "a pulse costs a look or two: {progress:?}");
    assert_eq!((progress.published, progress.outages), (3, 0), "a pulse is not a record of an event");
    for partition in 0..PARTITIONS {
        let times = times(&bus, partition).await;
        assert_eq!(times.len() as u64, progress.pulses);
        assert!(times.is_sorted() && times[0] >= appended, "{times:?}");
    }
    assert_eq!(journal.relays().await.unwrap()[0].checkpoint.as_ref().unwrap().position, Position::of(3));
}

#[tokio::test(start_paused = true)]
async fn there_are_no_pulses_unless_they_are_asked_for() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    append(&*journal, "a", 3).await;
    let mut settings = settings();
    settings.pulse = None;
    let running = start(journal, &bus, settings);
    sleep(60 * SECOND).await;
    assert_eq!(running.stop().await.pulses, 0);
    assert_eq!(read_topic(&*bus, &topic()).await.len(), 3);
}

/// The relay never comes to the end of the journal, and publishes pulses all the same.
#[tokio::test(start_paused = true)]
async fn pulses_come_under_constant_load() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    bus.late_ms.store(10, Ordering::SeqCst);
    let writing = Arc::clone(&journal);
    append(&*journal, "a0", 200).await;
    // 30 events while a batch of 20 is under way: the relay falls further behind.
    let writer = tokio::spawn(async move {
        for n in 0.. {
            append(&*writing, &format!("a{}", n % 7), 3).await;
            sleep(Duration::from_millis(1)).await;
        }
    });
    let running = start(journal.clone(), &bus, settings());
    let first = running.until("some pulses", |progress| progress.pulses >= 5).await;
    let last = journal.stat().await.unwrap().last.unwrap();
    assert!(last.number() > first.position.number() + 100, "it is behind: {first:?}, {last}");
    writer.abort();
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn no_pulse_comes_while_an_aggregate_is_behind() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    let running = start(journal.clone(), &bus, settings());
    running.until("the first", |progress| progress.pulses >= 1).await;
    bus.fail(|record| is_of(record, "bad").then(away));
    append(&*journal, "good", 1).await;
    append(&*journal, "bad", 1).await;
    append(&*journal, "good", 1).await;
    running.until("it is behind", |progress| progress.behind == 1).await;
    sleep(SECOND).await; // one that was under way
    let pulses = running.pulses();
    for _ in 0..60 {
        append(&*journal, "good", 1).await; // others go on
        sleep(SECOND).await;
        assert_eq!(running.pulses(), pulses);
    }
    bus.heal();
    running.until("pulses again", |progress| progress.behind == 0 && progress.pulses > pulses + 1).await;
    running.stop().await;
}

/// An aggregate that has an event in every batch fell behind: it goes on a batch late for as long as it is busy, and pulses do too.
#[tokio::test(start_paused = true)]
async fn pulses_come_although_a_busy_aggregate_never_quite_catches_up() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    bus.late_ms.store(10, Ordering::SeqCst);
    bus.fail(|record| is_of(record, "busy").then(away));
    let writing = Arc::clone(&journal);
    let writer = tokio::spawn(async move {
        loop {
            append(&*writing, "busy", 1).await;
            append(&*writing, "other", 1).await;
            sleep(Duration::from_millis(5)).await;
        }
    });
    let running = start(journal, &bus, settings());
    running.until("it is behind", |progress| progress.behind == 1).await;
    bus.heal();
    let pulses = running.pulses();
    running.until("pulses", |progress| progress.pulses >= pulses + 5).await;
    writer.abort();
    running.until("it has caught up", |progress| progress.behind == 0).await;
    running.stop().await;
}

#[tokio::test(start_paused = true)]
async fn no_pulse_comes_while_an_aggregate_is_parked() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    append(&*journal, "good", 3).await;
    append(&*journal, "bad", 1).await;
    bus.fail(|record| is_of(record, "bad").then(too_large));
    let running = start(journal.clone(), &bus, settings());
    running.until("it is parked", |progress| progress.parked == 1).await;
    sleep(3600 * SECOND).await;
    append(&*journal, "good", 3).await;
    sleep(3600 * SECOND).await;
    assert_eq!(running.stop().await.pulses, 0, "what is parked was acknowledged to its writer");

    // The next leader knows it from the checkpoint; an operator's decision ends it.
    let running = start(journal.clone(), &bus, settings());
    sleep(3600 * SECOND).await;
    assert_eq!(running.stop().await.pulses, 0);
    let of = AggregateOf { tenant: None, aggregate: Aggregate::new("bad").unwrap() };
    skip(&*journal, &RelayName::new("main").unwrap(), &of, 1).await.unwrap();
    let running = start(journal.clone(), &bus, settings());
    running.until("a pulse", |progress| progress.pulses > 0).await;
    running.stop().await;
}

/// What is sent and not answered may be on the bus or not.
#[tokio::test(start_paused = true)]
async fn no_pulse_comes_while_an_answer_is_missing() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    append(&*journal, "good", 3).await;
    append(&*journal, "slow", 3).await;
    bus.slow(|record| is_of(record, "slow"));
    let running = start(journal.clone(), &bus, settings());
    running.until("the others", |progress| progress.behind == 1).await;
    sleep(600 * SECOND).await;
    assert_eq!(running.pulses(), 0);
    bus.let_go();
    running.until("a pulse", |progress| progress.pulses > 0).await;
    running.stop().await;
}

/// A writer has drawn a position and not committed; the next one has, and was told so.
#[tokio::test(start_paused = true)]
async fn no_pulse_passes_a_hole() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    append(&*journal, "a", 1).await;
    append(&*journal, "b", 1).await;
    append(&*journal, "c", 1).await;
    journal.hide([2]);
    let running = start(journal.clone(), &bus, settings());
    running.until("it is at the hole", |progress| progress.position == Position::of(1)).await;
    sleep(60 * SECOND).await;
    assert_eq!(running.pulses(), 0);
    journal.show();
    running.until("a pulse", |progress| progress.pulses > 0).await;
    running.stop().await;
    assert_eq!(times(&bus, 0).await.len(), times(&bus, 1).await.len());
}

/// Some partitions take no pulses: that is not an outage, delays nothing, and ends by itself.
#[tokio::test(start_paused = true)]
async fn a_pulse_that_fails_is_dropped_and_is_no_outage() {
    let (journal, bus) = (Arc::new(MemoryJournal::default()), bus().await);
    bus.fail(|record| Pulse::of(record).is_some().then(away));
    let running = start(journal.clone(), &bus, settings());
    for n in 1..=20_u64 {
        append(&*journal, "a", 1).await;
        running.until("the event", |progress| progress.position == Position::of(n)).await;
        sleep(SECOND).await;
    }
    let progress = running.handle.progress();
    assert_eq!((progress.pulses, progress.outages, progress.behind, progress.published), (0, 0, 0, 20));
    bus.heal();
    running.until("pulses", |progress| progress.pulses > 1).await;
    running.stop().await;
    let times = times(&bus, 0).await;
    assert!(times.windows(2).all(|two| two[0] < two[1]), "each has a horizon of its own: {times:?}");
}

/// A bus that does not answer a pulse does not keep events waiting.
#[tokio::test(start_paused = true)]
async fn a_pulse_without_an_answer_delays_no_event() {
    let (journal, inner) = (Arc::new(MemoryJournal::default()), MemoryBus::default());
    inner.create_topic(&topic(), TopicSettings::new(PARTITIONS)).await.unwrap();
    let deaf = Arc::new(Deaf(inner));
    let relay = Relay::new(journal.clone(), deaf.clone(), settings()).unwrap();
    let handle = relay.handle();
    let running = Running { handle, task: tokio::spawn(relay.run()) };
    for n in 1..=20_u64 {
        append(&*journal, "a", 1).await;
        running.until("the event", |progress| progress.position == Position::of(n)).await;
        sleep(SECOND).await;
    }
    let progress = running.stop().await;
    assert_eq!((progress.pulses, progress.published, progress.outages), (0, 20, 0));
}

#[tokio::test(start_paused = true)]
async fn a_journal_that_cannot_tell_is_relayed_without_pulses() {
    let (journal, bus) = (Arc::new(OddJournal::default()), bus().await);
    journal.no_horizon.store(true, Ordering::SeqCst);
    append(&*journal, "a", 3).await;
    let running = start(journal.clone(), &bus, settings());
    running.until("the events", |progress| progress.position == Position::of(3)).await;
    sleep(60 * SECOND).await;
    let progress = running.stop().await;
    assert_eq!((progress.pulses, progress.published), (0, 3));
}

#[tokio::test(start_paused = true)]
async fn partitions_that_are_added_get_pulses() {
    let (journal, inner) = (Arc::new(MemoryJournal::default()), MemoryBus::default());
    inner.create_topic(&topic(), TopicSettings::new(PARTITIONS)).await.unwrap();
    let growing = Arc::new(Growing { inner, shown: 1.into() });
    let relay = Relay::new(journal, growing.clone(), settings()).unwrap();
    let handle = relay.handle();
    let running = Running { handle, task: tokio::spawn(relay.run()) };
    running.until("some pulses", |progress| progress.pulses >= 3).await;
    let end = async |number| growing.range(&Partition { topic: topic(), number }).await.unwrap().1;
    assert_eq!((end(0).await > 0, end(1).await, end(2).await), (true, 0, 0));
    growing.shown.store(PARTITIONS, Ordering::SeqCst);
    sleep(15 * SECOND).await;
    assert!(end(1).await > 0 && end(2).await > 0);
    running.stop().await;
    // Each says how many there were.
    let records = read_topic(&growing.inner, &topic()).await;
    let first = records.iter().filter(|received| received.origin.partition == 0);
    let seen: Vec<i32> =
        first.map(|received| Pulse::of(&received.record).unwrap().unwrap().partitions).collect();
    assert!(seen.is_sorted() && seen.first() == Some(&1) && seen.last() == Some(&PARTITIONS), "{seen:?}");
}

#[test]
fn pulses_and_a_route_are_refused_with_a_sentence() {
    let mut settings = settings();
    settings.check().unwrap();
    settings.route = Some(Arc::new(|_| topic()));
    let error = settings.check().unwrap_err().to_string();
    assert!(error.contains("relay.pulse") && error.contains("route"), "{error}");
    settings.pulse = Some(Duration::ZERO);
    let error = settings.check().unwrap_err().to_string();
    assert!(error.contains("relay.pulse is 0ns; it must be 1ms to 3600s"), "{error}");
}

/// A bus that never answers what goes to a partition.
struct Deaf(MemoryBus);
/// A bus that shows the first partitions of its topic.
struct Growing {
    inner: MemoryBus,
    shown: std::sync::atomic::AtomicI32,
}

macro_rules! bus_over {
    ($type:ty, $inner:tt, { $($own:tt)* }) => {
        #[async_trait::async_trait]
        impl Bus for $type {
            $($own)*
            async fn publish(
                &self,
                topic: &Topic,
                records: &[Record],
            ) -> hapax::Result<Vec<hapax::Result<hapax::event::Origin>>> {
                self.$inner.publish(topic, records).await
            }
            async fn subscribe(
                &self,
                subscription: hapax::bus::Subscription,
            ) -> hapax::Result<Box<dyn hapax::bus::Subscriber>> {
                self.$inner.subscribe(subscription).await
            }
            async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> hapax::Result<bool> {
                self.$inner.create_topic(topic, settings).await
            }
            async fn range(&self, partition: &Partition) -> hapax::Result<(i64, i64)> {
                self.$inner.range(partition).await
            }
            async fn committed(&self, group: &str, partition: &Partition) -> hapax::Result<Option<i64>> {
                self.$inner.committed(group, partition).await
            }
            fn capabilities(&self) -> hapax::bus::Capabilities {
                self.$inner.capabilities()
            }
        }
    };
}

bus_over!(Deaf, 0, {
    async fn publish_to(
        &self,
        _: &Partition,
        _: &[Record],
    ) -> hapax::Result<Vec<hapax::Result<hapax::event::Origin>>> {
        std::future::pending().await
    }
    async fn topic(&self, topic: &Topic) -> hapax::Result<Option<hapax::bus::TopicInfo>> {
        self.0.topic(topic).await
    }
});

bus_over!(Growing, inner, {
    async fn publish_to(
        &self,
        partition: &Partition,
        records: &[Record],
    ) -> hapax::Result<Vec<hapax::Result<hapax::event::Origin>>> {
        self.inner.publish_to(partition, records).await
    }
    async fn topic(&self, topic: &Topic) -> hapax::Result<Option<hapax::bus::TopicInfo>> {
        let partitions = self.shown.load(Ordering::SeqCst);
        Ok(self.inner.topic(topic).await?.map(|info| hapax::bus::TopicInfo { partitions, ..info }))
    }
});

/// Each mutant makes its scenario fail; without one they pass.
#[test]
fn mutants_of_pulses_are_caught() {
    let runs = |scenario: &str, mutant: &str| {
        let mut command = crate::support::this::test(scenario);
        command.env("HAPAX_MUTANT", mutant);
        command.output().unwrap().status.success()
    };
    for (scenario, mutants) in [
        (
            "pulses_are_true_on_memory_while_some_aggregates_are_refused",
            &["pulse before ack", "pulse despite what is behind"][..],
        ),
        ("pulses_are_true_on_memory", &["pulse before ack"]),
        ("no_pulse_comes_while_an_aggregate_is_parked", &["pulse despite what is behind"]),
        ("no_pulse_comes_while_an_answer_is_missing", &["pulse despite what is behind"]),
        ("no_pulse_passes_a_hole", &["pulse past a hole"]),
    ] {
        assert!(runs(scenario, "none"), "{scenario} holds");
        for mutant in mutants {
            assert!(!runs(scenario, mutant), "{scenario} does not notice: {mutant}");
        }
    }
}
