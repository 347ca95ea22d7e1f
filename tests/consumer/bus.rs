//! A bus that misbehaves: what a consumer does about it, and what it says.
#![cfg(feature = "testing")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use crate::support::faulty;
use crate::support::wait;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::memory::MemoryBus;
use hapax::bus::{
    Assignment, Bus, BusEvent, Capabilities, Partition, Record, Subscriber, Subscription, TopicInfo,
    TopicSettings,
};
use hapax::consumer::{Consumer, ConsumerBuilder, Failed, OutagePolicy, Passed};
use hapax::error::Result;
use hapax::guard::Run;
use hapax::ledger::{Filter, Ledger, State};
use hapax::{Error, Event, Origin, Topic};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

/// What goes wrong.
#[derive(Default)]
struct Faults {
    /// So many pauses, and so many resumes, are not answered.
    pauses: AtomicU32,
    resumes: AtomicU32,
    /// Every commit is refused for good.
    commits_refused: AtomicBool,
    /// The subscription has ended.
    over: AtomicBool,
    /// Records are delivered again under the same epoch.
    steps_back: AtomicBool,
    /// The first fetch takes long: no records come.
    fetch_stands: AtomicBool,
    /// A partition was assigned.
    assigned: AtomicBool,
}

/// A memory bus with faults to order.
#[derive(Clone)]
struct Flaky(MemoryBus, Arc<Faults>);

struct Member(Box<dyn Subscriber>, Arc<Faults>);

fn away() -> Error {
    Error::Unavailable { what: "a fault the test ordered".into(), source: None }
}

fn one_of(count: &AtomicU32) -> bool {
    count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok()
}

#[async_trait]
impl Bus for Flaky {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.0.publish(topic, records).await
    }
    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        self.0.publish_to(partition, records).await
    }
    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        Ok(Box::new(Member(self.0.subscribe(subscription).await?, self.1.clone())))
    }
    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.0.create_topic(topic, settings).await
    }
    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.0.topic(topic).await
    }
    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.0.range(partition).await
    }
    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.0.committed(group, partition).await
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
}

#[async_trait]
impl Subscriber for Member {
    async fn next(&mut self) -> Result<BusEvent> {
        while self.1.fetch_stands.load(Ordering::SeqCst) && self.1.assigned.load(Ordering::SeqCst) {
            // Slower than the bus, so that four are in flight and partitions pause.
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let ends = async {
            while !self.1.over.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let mut received = tokio::select! {
            received = self.0.next() => received?,
            () = ends => return Err(Error::Refused { what: "a fault the test ordered".into(), source: None }),
        };
        if let BusEvent::Assigned(_) = received {
            self.1.assigned.store(true, Ordering::SeqCst);
        }
        if let BusEvent::Records(records) = &mut received
            && self.1.steps_back.load(Ordering::SeqCst)
        {
            for received in records {
                received.origin.offset = 0;
            }
        }
        Ok(received)
    }
    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        if one_of(&self.1.pauses) { Err(away()) } else { self.0.pause(partitions).await }
    }
    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        if one_of(&self.1.resumes) { Err(away()) } else { self.0.resume(partitions).await }
    }
    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        self.0.seek(partition, offset).await
    }
    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        if self.1.commits_refused.load(Ordering::SeqCst) {
            let refused = || Err(Error::Refused { what: "no right to commit".into(), source: None });
            return Ok(offsets.iter().map(|_| refused()).collect());
        }
        self.0.commit(offsets).await
    }
    async fn release(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.0.release(partitions).await
    }
    async fn leave(self: Box<Self>) -> Result<()> {
        self.0.leave().await
    }
}

/// Warnings of the consumer.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl<S: tracing::Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Text(String);
        impl tracing::field::Visit for Text {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                use std::fmt::Write as _;
                let _ = write!(self.0, "{field}={value:?} ");
            }
        }
        if *event.metadata().level() <= tracing::Level::INFO {
            let mut text = Text(format!("{} ", event.metadata().level()));
            event.record(&mut text);
            self.0.lock().unwrap().push(text.0);
        }
    }
}

impl Lines {
    fn count(&self, text: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|line| line.contains(text)).count()
    }
}

async fn world(faults: Faults, count: usize) -> (Flaky, Topic) {
    let bus = Flaky(MemoryBus::default(), Arc::new(faults));
    let topic = Topic::new("orders").unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    publish(&bus, &topic, 0..count).await;
    (bus, topic)
}

async fn publish(bus: &Flaky, topic: &Topic, numbers: std::ops::Range<usize>) {
    let record = |n: usize| Record {
        payload: Some(format!("{{\"event_id\":\"e-{n}\"}}").into()),
        ..Record::default()
    };
    let records: Vec<_> = numbers.map(record).collect();
    for answer in bus.publish(topic, &records).await.unwrap() {
        answer.unwrap();
    }
}

fn consumer(bus: &Flaky) -> ConsumerBuilder<MemoryLedger> {
    Consumer::builder(Arc::new(bus.clone()), MemoryLedger::default()).scope("mailer").topic("orders").with(
        |settings| {
            settings.commit_interval = Duration::from_millis(5);
            settings.held_interval = Duration::from_millis(10);
        },
    )
}

async fn until(what: &str, is: impl Fn() -> bool) {
    wait::until(what, async || is()).await;
}

/// How far a consumer is behind is known while the first fetch still takes its time, and of a group that has read everything before
/// there is something to read: `--until-idle` must neither end too early nor wait for ever.
#[tokio::test]
async fn t256_the_lag_is_known_before_anything_is_read() {
    let (bus, _) = world(Faults { fetch_stands: true.into(), ..Faults::default() }, 10).await;
    for lag in [10, 0] {
        let consumer = consumer(&bus).build().unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
        until("it is known", || handle.progress().lag.is_some()).await;
        assert_eq!((handle.progress().lag, handle.progress().passed.len()), (Some(lag), 0));
        bus.1.fetch_stands.store(false, Ordering::SeqCst);
        until("all is read", || handle.progress().lag == Some(0)).await;
        handle.stop();
        let counts = running.await.unwrap().unwrap();
        assert_eq!(counts.values().sum::<u64>(), lag.unsigned_abs());
    }
}

/// A pause that is not answered is asked for again, and so is a resume: neither ends the consumer.
#[tokio::test]
async fn t82_a_pause_or_a_resume_that_is_not_answered_is_asked_for_again() {
    let faults = Faults { pauses: 3.into(), resumes: 3.into(), ..Faults::default() };
    let (bus, topic) = world(faults, 40).await;
    let consumer = consumer(&bus).with(|settings| settings.in_flight_max = 4).build().unwrap();
    let handle = consumer.handle();
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let its = seen.clone();
    let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
        let event = event.clone();
        let its = its.clone();
        async move {
            tokio::time::sleep(Duration::from_millis(5)).await;
            its.lock().unwrap().insert(String::from(event.id.as_str()));
            Ok(())
        }
    }));
    until("the first forty", || running.is_finished() || seen.lock().unwrap().len() == 40).await;
    publish(&bus, &topic, 40..80).await;
    until("all events", || running.is_finished() || seen.lock().unwrap().len() == 80).await;
    handle.stop();
    running.await.unwrap().expect("it goes on");
    let Faults { pauses, resumes, .. } = &*bus.1;
    assert_eq!(
        (pauses.load(Ordering::SeqCst), resumes.load(Ordering::SeqCst)),
        (0, 0),
        "the faults happened"
    );
    assert_eq!(bus.committed("mailer", &Partition { topic, number: 0 }).await.unwrap(), Some(80));
}

/// Offsets that are refused for good are logged at once, and once; so is their end.
#[tokio::test]
async fn t82_a_commit_that_is_refused_for_good_is_reported_of() {
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let faults = Faults { commits_refused: true.into(), ..Faults::default() };
    let (bus, topic) = world(faults, 1).await;
    let consumer = consumer(&bus).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("it is logged", || lines.count("no right to commit") > 0).await;
    publish(&bus, &topic, 1..20).await;
    until("all through", || handle.progress().passed.values().sum::<u64>() == 20).await;
    tokio::time::sleep(Duration::from_millis(100)).await; // twenty more commits
    assert_eq!(lines.count("no right to commit"), 1, "once: {:?}", lines.0.lock().unwrap());
    bus.1.commits_refused.store(false, Ordering::SeqCst);
    until("its end is logged", || lines.count("committed again") == 1).await;
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!(bus.committed("mailer", &Partition { topic, number: 0 }).await.unwrap(), Some(20));
}

/// What retention removed before it was read is logged once, with its place and its number, and counted.
#[tokio::test]
async fn t74_offsets_that_retention_passed_are_logged_and_counted() {
    let lines = Lines::default();
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(lines.clone()));
    let (bus, topic) = world(Faults::default(), 5).await;
    let partition = Partition { topic: topic.clone(), number: 0 };
    for (read, logged) in [(5, 0), (2, 1)] {
        let consumer = consumer(&bus).build().unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
        until("what is there", || handle.progress().passed.get(&Passed::Done) == Some(&read)).await;
        handle.stop();
        running.await.unwrap().unwrap();
        assert_eq!(lines.count("retention removed records"), logged, "{:?}", lines.0.lock().unwrap());
        publish(&bus, &topic, 5..10).await;
        bus.0.remove_below(&partition, 8).unwrap();
    }
    assert_eq!(lines.count("WARN message=retention removed records before they were read"), 1);
    assert_eq!(lines.count("partition=orders[0] from=5 to=8 count=3"), 1, "{:?}", lines.0.lock().unwrap());
}

/// A bus that goes back without saying so is not believed: nothing is dropped in silence.
#[tokio::test]
async fn t76_an_offset_that_comes_again_under_one_epoch_is_an_error() {
    let (bus, topic) = world(Faults::default(), 5).await;
    let consumer = consumer(&bus).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("the first five", || handle.progress().passed.values().sum::<u64>() == 5).await;
    bus.1.steps_back.store(true, Ordering::SeqCst);
    publish(&bus, &topic, 5..6).await;
    until("it ends", || running.is_finished()).await;
    let error = running.await.unwrap().expect_err("the event was dropped");
    assert!(error.to_string().contains("orders[0]"), "{error}");
}

/// Two of three partitions are stuck behind retries that wait in memory. What they leave of the budget is little, but the third one
/// needs no more: all of its events take effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t95_stuck_partitions_do_not_starve_a_healthy_one() {
    let bus = Flaky(MemoryBus::default(), Arc::default());
    let topic = Topic::new("orders").unwrap();
    bus.create_topic(&topic, TopicSettings::new(3)).await.unwrap();
    let record = |n: usize| Record {
        key: Some(format!("k-{n}").into()),
        payload: Some(format!("{{\"event_id\":\"e-{n}\"}}").into()),
        ..Record::default()
    };
    let records: Vec<_> = (0..4000).map(record).collect();
    for answer in bus.publish(&topic, &records).await.unwrap() {
        answer.unwrap();
    }
    let (_, healthy) = bus.range(&Partition { topic: topic.clone(), number: 2 }).await.unwrap();
    let consumer = consumer(&bus).with(|settings| {
        settings.in_flight_max = 1024;
        settings.drain = Duration::from_millis(10);
    });
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(async |event: &Event, _: &Run| {
        if event.origin.as_ref().is_some_and(|origin| origin.partition == 2) {
            return Ok(());
        }
        Err(Failed::retry_after("the sink is away", Duration::from_secs(3600)))
    }));
    let done = || handle.progress().passed.get("done").copied().unwrap_or_default();
    until("all of the healthy one", || done() == u64::try_from(healthy).unwrap()).await;
    let in_flight = handle.progress().in_flight;
    assert!(in_flight < 2048, "{in_flight} in memory, where 1024 may be");
    handle.stop();
    running.await.unwrap().unwrap();
}

async fn states(ledger: &impl Ledger) -> Vec<(State, u32)> {
    let page = ledger.list(&Filter::default(), None, 100).await.unwrap();
    page.entries.into_iter().map(|entry| (entry.state, entry.attempts)).collect()
}

/// A consumer that ends with an error while a handler runs: its lease goes back, what is finished is committed, the group is left.
#[tokio::test]
async fn t96_an_end_by_an_error_gives_back_commits_and_leaves() {
    let (bus, topic) = world(Faults::default(), 2).await;
    let ledger = Arc::new(MemoryLedger::default());
    let consumer =
        Consumer::builder(Arc::new(bus.clone()), Arc::clone(&ledger)).scope("mailer").topic("orders");
    let consumer = consumer.with(|settings| settings.commit_interval = Duration::from_secs(3600));
    let consumer = consumer.with(|settings| settings.session_timeout = Duration::from_secs(3600));
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let begun = Arc::new(AtomicBool::new(false));
    let its = Arc::clone(&begun);
    let running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
        let event = event.clone();
        let its = Arc::clone(&its);
        async move {
            if event.id.as_str() == "e-1" {
                its.store(true, Ordering::SeqCst);
                std::future::pending::<()>().await;
            }
            Ok(())
        }
    }));
    until("one is done, one runs", || {
        begun.load(Ordering::SeqCst) && handle.progress().passed.get("done") == Some(&1)
    })
    .await;
    bus.1.over.store(true, Ordering::SeqCst);
    until("it ends", || running.is_finished()).await;
    running.await.unwrap().expect_err("the subscription is over");
    assert!(states(&ledger).await.contains(&(State::Retry, 0)), "given back, uncounted");
    assert_eq!(
        bus.committed("mailer", &Partition { topic: topic.clone(), number: 0 }).await.unwrap(),
        Some(1)
    );
    let mut next = bus.0.subscribe(Subscription::new("mailer", [topic]).unwrap()).await.unwrap();
    let received = tokio::time::timeout(Duration::from_secs(60), next.next()).await;
    assert!(matches!(received, Ok(Ok(BusEvent::Assigned(_)))), "nobody waits for the session: {received:?}");
}

/// A ledger that stands still, and answers neither claims nor settlings: a stop ends all the same, soon after its deadline.
#[tokio::test]
async fn t96_a_stop_does_not_wait_for_a_ledger_that_stands_still() {
    for running_too in [false, true] {
        let (bus, _) = world(Faults::default(), 1).await;
        let ledger = faulty::Faulty::default();
        ledger.faults.stalled.store(!running_too, Ordering::SeqCst);
        let consumer =
            Consumer::builder(Arc::new(bus.clone()), ledger.clone()).scope("mailer").topic("orders");
        let consumer = consumer.with(|settings| settings.drain = Duration::from_millis(50)).build().unwrap();
        let handle = consumer.handle();
        let begun = Arc::new(AtomicBool::new(!running_too));
        let its = Arc::clone(&begun);
        let running = tokio::spawn(consumer.leased(move |_: &Event, _: &Run| {
            its.store(true, Ordering::SeqCst);
            std::future::pending()
        }));
        until("it has its event", || begun.load(Ordering::SeqCst) && handle.progress().in_flight == 1).await;
        ledger.faults.stalled.store(true, Ordering::SeqCst);
        handle.stop();
        let ended = tokio::time::timeout(Duration::from_secs(60), running).await;
        ended.expect("it ends").unwrap().unwrap();
    }
}

/// Claims that are in someone's way are asked for again. That is not an outage: nothing is copied out, and the consumer goes on.
#[tokio::test]
async fn t96_contention_is_no_outage() {
    for outage in [OutagePolicy::FailFast, OutagePolicy::DeadLetter] {
        let (bus, _) = world(Faults::default(), 20).await;
        let dead = Topic::new("orders.dlq").unwrap();
        bus.create_topic(&dead, TopicSettings::new(1)).await.unwrap();
        let ledger = faulty::Faulty::default();
        ledger.faults.claims_contended.store(5, Ordering::SeqCst);
        let consumer =
            Consumer::builder(Arc::new(bus.clone()), ledger.clone()).scope("mailer").topic("orders");
        let copies = dead.to_string();
        let consumer = consumer
            .with(move |settings| {
                settings.outage = outage;
                settings.dead_topic = Some(copies);
            })
            .build()
            .unwrap();
        let handle = consumer.handle();
        let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
        until("all through", || {
            running.is_finished() || handle.progress().passed.values().sum::<u64>() == 20
        })
        .await;
        handle.stop();
        let counts = running.await.unwrap().expect("contention passes");
        assert_eq!(counts.get("done"), Some(&20), "{counts:?}");
        assert_eq!(ledger.faults.claims_contended.load(Ordering::SeqCst), 0, "the faults happened");
        assert_eq!(bus.range(&Partition { topic: dead, number: 0 }).await.unwrap(), (0, 0));
    }
}

/// A ledger that went away and refuses for good when it is asked whether it is back: the consumer ends and says why.
#[tokio::test]
async fn t82_a_ledger_that_refuses_for_good_ends_the_consumer() {
    let (bus, topic) = world(Faults::default(), 1).await;
    let ledger = faulty::Faulty::default();
    let consumer = Consumer::builder(Arc::new(bus.clone()), ledger.clone()).scope("mailer").topic("orders");
    let consumer = consumer.build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("the first one", || handle.progress().passed.get("done") == Some(&1)).await;
    ledger.faults.claims_lost.store(u32::MAX, Ordering::SeqCst);
    ledger.faults.now_refused.store(true, Ordering::SeqCst);
    publish(&bus, &topic, 1..2).await;
    until("it ends", || running.is_finished()).await;
    let error = running.await.unwrap().expect_err("nobody can go on");
    assert!(matches!(error, Error::Refused { .. }), "{error}");
}

/// A ledger that went away, and whose code panics when it is asked whether it is back: the consumer ends and says why, instead of
/// asking for ever.
#[tokio::test]
async fn t453_a_probe_that_panics_ends_the_consumer() {
    let (bus, topic) = world(Faults::default(), 1).await;
    let ledger = faulty::Faulty::default();
    let consumer = Consumer::builder(Arc::new(bus.clone()), ledger.clone()).scope("mailer").topic("orders");
    let consumer = consumer.with(|settings| settings.drain = Duration::from_millis(50)).build().unwrap();
    let handle = consumer.handle();
    let running = tokio::spawn(consumer.leased(|_: &Event, _: &Run| async { Ok(()) }));
    until("the first one", || handle.progress().passed.get("done") == Some(&1)).await;
    ledger.faults.claims_lost.store(u32::MAX, Ordering::SeqCst);
    ledger.faults.probes_panic.store(true, Ordering::SeqCst);
    publish(&bus, &topic, 1..2).await;
    until("it ends", || running.is_finished()).await;
    let error = running.await.unwrap().expect_err("nobody can go on");
    let says = "a task of the consumer ended badly";
    assert!(matches!(&error, Error::Corrupt(what) if what.contains(says)), "{error}");
}
