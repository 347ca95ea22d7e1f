//! Offsets that go away, begin anew or appear: retention that passes a commit, partitions that are added, topics made again.
#![cfg(all(feature = "testing", feature = "kafka"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax::backend::memory::MemoryLedger;
use hapax::bus::kafka::{GroupProtocol, KafkaBus, KafkaSettings};
use hapax::bus::{
    Assignment, Bus, BusEvent, Partition, Received, Record, Start, Subscriber, Subscription, TopicSettings,
};
use hapax::consumer::Consumer;
use hapax::testing::kafka::{add_partitions, connect, delete_topic, produce_to, remove_below, settings};
use hapax::{Error, Topic};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};

const DEADLINE: Duration = Duration::from_secs(120);
const PROTOCOLS: [GroupProtocol; 2] = [GroupProtocol::Classic, GroupProtocol::Consumer];

fn unique(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

fn latest(group: &str, topic: &Topic) -> Subscription {
    let mut subscription = Subscription::new(group, [topic.clone()]).unwrap();
    subscription.session_timeout = Duration::from_secs(6);
    subscription.start = Start::Latest;
    subscription
}

async fn stage(protocol: GroupProtocol) -> (KafkaBus, Topic, String) {
    let mut settings: KafkaSettings = settings();
    settings.group_protocol = protocol;
    let bus = connect(settings).await;
    let topic = Topic::new(unique("topic")).unwrap();
    assert!(bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap());
    (bus, topic, unique("group"))
}

async fn publish(bus: &KafkaBus, topic: &Topic, texts: impl IntoIterator<Item = String>) {
    let record = |text: String| Record { payload: Some(text.into()), ..Record::default() };
    let records: Vec<_> = texts.into_iter().map(record).collect();
    for answer in bus.publish(topic, &records).await.unwrap() {
        answer.unwrap();
    }
}

/// Deletes a topic that has records and creates it again. The controller answers before the broker has let go of the old log, which
/// would still take a record, and then be removed with it: wait until the log that answers is empty.
async fn make_again(bus: &KafkaBus, topic: &Topic) {
    delete_topic(topic).await;
    while !bus.create_topic(topic, TopicSettings::new(1)).await.unwrap_or(false) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while !matches!(bus.range(&partition(topic, 0)).await, Ok((0, 0))) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn partition(topic: &Topic, number: i32) -> Partition {
    Partition { topic: topic.clone(), number }
}

/// What a member hears until something is so.
#[derive(Default, Debug)]
struct Recorder {
    given: Vec<Assignment>,
    lost: Vec<Assignment>,
    records: Vec<Received>,
    removed: Vec<std::ops::Range<i64>>,
    failed: Vec<Error>,
}

impl Recorder {
    async fn until(&mut self, member: &mut Box<dyn Subscriber>, what: &str, so: impl Fn(&Recorder) -> bool) {
        let end = tokio::time::Instant::now() + DEADLINE;
        while !so(self) {
            assert!(tokio::time::Instant::now() < end, "waited for {what}: {self:?}");
            match tokio::time::timeout(Duration::from_millis(200), member.next()).await {
                Err(_) => {}
                Ok(Ok(BusEvent::Assigned(given))) => self.given.extend(given),
                Ok(Ok(BusEvent::Lost(lost))) => self.lost.extend(lost),
                Ok(Ok(BusEvent::Records(records))) => self.records.extend(records),
                Ok(Ok(BusEvent::Removed { offsets, .. })) => self.removed.push(offsets),
                Ok(Ok(BusEvent::Revoked(revoked))) => {
                    member.release(&revoked).await.unwrap();
                    self.lost.extend(revoked);
                }
                Ok(Err(error)) => self.failed.push(error),
            }
        }
    }

    fn offsets(&self, number: i32) -> Vec<i64> {
        let of = self.records.iter().filter(|received| received.origin.partition == number);
        of.map(|received| received.origin.offset).collect()
    }
}

/// A group that began at the end goes on with what is left when retention has passed its commit: while it was away, and while it
/// was a member that did not keep up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t74_latest_goes_on_with_what_is_left_when_retention_passed_its_commit() {
    for protocol in PROTOCOLS {
        let (bus, topic, group) = stage(protocol).await;
        publish(&bus, &topic, (0..10).map(|n| n.to_string())).await;
        let mut member = bus.subscribe(latest(&group, &topic)).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "the partition", |ear| !ear.given.is_empty()).await;
        publish(&bus, &topic, (10..20).map(|n| n.to_string())).await;
        ear.until(&mut member, "what comes", |ear| ear.records.len() >= 10).await;
        assert!(member.commit(&[(ear.given[0].clone(), 12)]).await.unwrap()[0].is_ok());
        member.leave().await.unwrap();
        remove_below(&partition(&topic, 0), 15).await;
        let mut small: KafkaSettings = settings();
        (small.group_protocol, small.buffer_records_max) = (protocol, 2);
        let bus = connect(small).await;
        let mut member = bus.subscribe(latest(&group, &topic)).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "what is left", |ear| ear.records.len() >= 5).await;
        assert_eq!(ear.offsets(0), [15, 16, 17, 18, 19], "{protocol:?}");
        ear.until(&mut member, "removed partitions to be reported", |ear| !ear.removed.is_empty()).await;
        assert_eq!(ear.removed, [12..15], "{protocol:?}");
        // It does not keep up: it has room for eight more, and the records behind those go before it reads them.
        let assigned = [ear.given[0].clone()];
        member.pause(&assigned).await.unwrap();
        publish(&bus, &topic, (20..30).map(|n| n.to_string())).await;
        let full = async {
            while bus.waited().0 == 0 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(DEADLINE, full).await.expect("too much waits in memory");
        publish(&bus, &topic, (30..40).map(|n| n.to_string())).await;
        remove_below(&partition(&topic, 0), 37).await;
        member.resume(&assigned).await.unwrap();
        ear.until(&mut member, "what is left", |ear| ear.offsets(0).ends_with(&[37, 38, 39])).await;
        assert_eq!(ear.removed.len(), 2, "{protocol:?}: {ear:?}");
        let gone = ear.removed[1].clone();
        assert!((28..=30).contains(&gone.start) && gone.end == 37, "{protocol:?}: {ear:?}");
        let expected: Vec<i64> = (15..gone.start).chain(37..40).collect();
        assert_eq!(ear.offsets(0), expected, "{protocol:?}");
        member.leave().await.unwrap();
    }
}

/// A partition is added, and written to before anyone has noticed: the group has begun long ago, so it begins at its beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t75_latest_reads_what_was_published_to_an_added_partition_before_it_was_noticed() {
    for protocol in PROTOCOLS {
        let (bus, topic, group) = stage(protocol).await;
        publish(&bus, &topic, (0..3).map(|n| n.to_string())).await;
        let mut member = bus.subscribe(latest(&group, &topic)).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "the partition", |ear| !ear.given.is_empty()).await;
        publish(&bus, &topic, ["3".to_owned()]).await;
        ear.until(&mut member, "what comes", |ear| !ear.records.is_empty()).await;
        assert_eq!(ear.offsets(0), [3]);
        assert!(member.commit(&[(ear.given[0].clone(), 4)]).await.unwrap()[0].is_ok());
        member.leave().await.unwrap();
        add_partitions(&topic, 2).await;
        let name = topic.clone();
        tokio::task::spawn_blocking(move || produce_to(&name, 1, &["new 0", "new 1"])).await.unwrap();
        let mut member = bus.subscribe(latest(&group, &topic)).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "both partitions", |ear| ear.given.len() == 2).await;
        ear.until(&mut member, "what was published to it", |ear| ear.records.len() >= 2).await;
        assert_eq!(ear.offsets(1), [0, 1], "{protocol:?}");
        assert_eq!(ear.offsets(0), [0; 0], "{protocol:?}: what was committed stays committed");
        member.leave().await.unwrap();
    }
}

/// A topic is deleted and made again while its partition is paused: what is in it now is heard, under another epoch.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t76_offsets_that_begin_anew_are_a_new_assignment() {
    for protocol in PROTOCOLS {
        let (bus, topic, group) = stage(protocol).await;
        let mut subscription = latest(&group, &topic);
        subscription.start = Start::Earliest;
        publish(&bus, &topic, (0..20).map(|n| format!("old {n}"))).await;
        let mut member = bus.subscribe(subscription).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "all records", |ear| ear.records.len() >= 20).await;
        let before = ear.given[0].clone();
        member.pause(std::slice::from_ref(&before)).await.unwrap();
        make_again(&bus, &topic).await;
        publish(&bus, &topic, (0..5).map(|n| format!("new {n}"))).await;
        member.resume(std::slice::from_ref(&before)).await.unwrap();
        let mut ear = Recorder::default();
        ear.until(&mut member, "the new records", |ear| ear.records.len() >= 5).await;
        assert_eq!(ear.offsets(0), [0, 1, 2, 3, 4], "{protocol:?}");
        assert!(ear.given.iter().any(|assigned| assigned.epoch > before.epoch), "{protocol:?}: {ear:?}");
        assert!(ear.lost.contains(&before), "{protocol:?}: {ear:?}");
        // The topic was missing for a moment, and that may be said; nothing else went wrong.
        assert!(ear.failed.iter().all(|error| matches!(error, Error::NotFound(_))), "{protocol:?}: {ear:?}");
        let late = member.commit(&[(before, 20)]).await.unwrap();
        assert!(matches!(late[0], Err(Error::Fenced { .. })), "{late:?}");
        member.leave().await.unwrap();
    }
}

/// The same under a consumer: every event of the new topic takes effect. While the topic is missing the consumer may end with an
/// error that says so; whoever starts it again loses nothing either.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t76_a_consumer_drops_nothing_when_its_topic_is_made_again() {
    let (bus, topic, _) = stage(GroupProtocol::Classic).await;
    let event = |id: String| format!("{{\"event_id\":\"{id}\"}}");
    publish(&bus, &topic, (0..20).map(|n| event(format!("old-{n}")))).await;
    let seen = Arc::new(Mutex::new(BTreeSet::new()));
    let (scope, ledger) = (unique("scope"), MemoryLedger::default());
    let start = || {
        let builder = Consumer::builder(Arc::new(bus.clone()), ledger.clone());
        let consumer = builder.scope(scope.as_str()).topic(topic.as_str()).build().unwrap();
        let (handle, its) = (consumer.handle(), seen.clone());
        let running = tokio::spawn(consumer.leased(move |event: &hapax::Event, _: &hapax::guard::Run| {
            its.lock().unwrap().insert(String::from(event.id.as_str()));
            async { Ok(()) }
        }));
        (handle, running)
    };
    let count =
        |prefix: &'static str| seen.lock().unwrap().iter().filter(|id| id.starts_with(prefix)).count();
    let (mut handle, mut running) = start();
    let end = tokio::time::Instant::now() + DEADLINE * 2;
    while count("old") < 20 {
        assert!(tokio::time::Instant::now() < end && !running.is_finished());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    make_again(&bus, &topic).await;
    publish(&bus, &topic, (0..10).map(|n| event(format!("new-{n}")))).await;
    while count("new") < 10 {
        assert!(tokio::time::Instant::now() < end, "{} of 10 new events", count("new"));
        if running.is_finished() {
            let error = running.await.unwrap().expect_err("nothing told it to stop");
            println!("starting it again after: {error}");
            let said = error.to_string();
            assert!(matches!(error, Error::NotFound(_)) || said.contains("offset"), "{said}");
            (handle, running) = start();
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    handle.stop();
    running.await.unwrap().unwrap();
    assert_eq!((count("old"), count("new")), (20, 10));
}

/// Counts the lines of a text that this thread logs.
#[derive(Debug, Clone)]
struct Said(&'static str, Arc<AtomicUsize>);

impl<S: tracing::Subscriber> Layer<S> for Said {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        struct Find<'s>(&'s Said);
        impl tracing::field::Visit for Find<'_> {
            fn record_debug(&mut self, _: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                let hit = format!("{value:?}").contains(self.0.0);
                self.0.1.fetch_add(usize::from(hit), Ordering::SeqCst);
            }
        }
        event.record(&mut Find(self));
    }
}

/// One partition after the other fills the buffer and is paused with what it has: beyond a limit that is dropped, and read again.
/// Every record is delivered once and in order all the same.
#[tokio::test]
async fn t79_partitions_that_were_dropped_from_memory_are_read_again() {
    const PARTITIONS: i32 = 6;
    let dropped = Said("paused with too much in memory", Arc::default());
    let _guard = tracing::subscriber::set_default(tracing_subscriber::registry().with(dropped.clone()));
    let mut settings: KafkaSettings = settings();
    settings.buffer_bytes_max = 64 << 10;
    let bus = connect(settings).await;
    let topic = Topic::new(unique("topic")).unwrap();
    bus.create_topic(&topic, TopicSettings::new(PARTITIONS)).await.unwrap();
    let mut subscription = latest(&unique("group"), &topic);
    subscription.start = Start::Earliest;
    let mut member = bus.subscribe(subscription).await.unwrap();
    let mut ear = Recorder::default();
    ear.until(&mut member, "all partitions", |ear| ear.given.len() == PARTITIONS as usize).await;
    let given = ear.given.clone();
    let end = tokio::time::Instant::now() + DEADLINE;
    let (mut published, mut turn) = (0, 0);
    while dropped.1.load(Ordering::SeqCst) < 5 || ear.records.len() < published {
        assert!(tokio::time::Instant::now() < end, "{} of {published}, {dropped:?}", ear.records.len());
        if ear.records.len() == published {
            let record = Record { payload: Some(vec![b'x'; 1024].into()), ..Record::default() };
            for number in 0..PARTITIONS {
                let sent =
                    bus.publish_to(&partition(&topic, number), &vec![record.clone(); 500]).await.unwrap();
                published += sent.into_iter().map(Result::unwrap).count();
            }
        }
        // Only the partition whose turn it is delivers. It has time to fill the buffer again before it is paused.
        turn = (turn + 1) % given.len();
        let others: Vec<_> =
            given.iter().enumerate().filter(|(n, _)| *n != turn).map(|(_, one)| one.clone()).collect();
        member.pause(&others).await.unwrap();
        member.resume(&given[turn..=turn]).await.unwrap();
        let before = ear.records.len();
        let waited = tokio::time::Instant::now() + Duration::from_millis(500);
        let so = |ear: &Recorder| ear.records.len() > before || tokio::time::Instant::now() > waited;
        ear.until(&mut member, "what it has", so).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for number in 0..PARTITIONS {
        let all: Vec<_> = (0..(published / PARTITIONS as usize) as i64).collect();
        assert_eq!(ear.offsets(number), all, "partition {number}");
    }
    assert!(ear.failed.is_empty() && ear.lost.is_empty() && ear.removed.is_empty());
    member.leave().await.unwrap();
}

/// The end at which a group begins cannot be committed: nothing is delivered until it is. Otherwise whoever has the partition next
/// would begin at another end, and pass over what came in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t75_an_end_that_could_not_be_committed_is_no_beginning() {
    use rdkafka::mocking::MockCluster;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};
    let cluster = MockCluster::new(1).unwrap(); // real brokers refuse no single commit on order
    let (topic, group) = (Topic::new("orders").unwrap(), unique("group"));
    cluster.create_topic(topic.as_str(), 1, 1).unwrap();
    let mut settings = KafkaSettings::new(cluster.bootstrap_servers());
    settings.group_protocol = GroupProtocol::Classic;
    let bus = connect(settings).await;
    publish(&bus, &topic, (0..5).map(|n| n.to_string())).await;
    let refused = RDKafkaRespErr::RD_KAFKA_RESP_ERR_INVALID_COMMIT_OFFSET_SIZE;
    cluster.request_errors(RDKafkaApiKey::OffsetCommit, &[refused]);
    let mut member = bus.subscribe(latest(&group, &topic)).await.unwrap();
    let mut ear = Recorder::default();
    ear.until(&mut member, "the partition", |ear| !ear.given.is_empty()).await;
    assert_eq!(bus.committed(&group, &partition(&topic, 0)).await.unwrap(), Some(5), "its beginning stands");
    publish(&bus, &topic, ["5".to_owned()]).await;
    ear.until(&mut member, "what comes", |ear| !ear.records.is_empty()).await;
    assert_eq!(ear.offsets(0), [5]);
    member.leave().await.unwrap();
}
