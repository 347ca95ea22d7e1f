//! What other clients than ours write to Kafka: every codec, transactions, null values, and records that no library would write.
#![cfg(all(feature = "testing", feature = "kafka"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use crate::support::raw_kafka;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::raw_kafka::RawRecord;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::kafka::KafkaBus;
use hapax::bus::{Bus, BusEvent, Received, Subscription, TopicSettings};
use hapax::consumer::Consumer;
use hapax::guard::Run;
use hapax::ledger::{Filter, Operations as _, State};
use hapax::testing::kafka::{brokers, connect, settings, topic_with};
use hapax::{Event, Time, Topic};

const DEADLINE: Duration = Duration::from_secs(120);
const CODECS: [&str; 5] = ["none", "gzip", "snappy", "lz4", "zstd"];
const PARTITIONS: i32 = 100;

fn unique(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

/// Hears every record of a topic, up to the ends of its partitions.
async fn receive_all(bus: &KafkaBus, topic: &Topic, count: usize) -> Vec<Received> {
    let subscription = Subscription::new(unique("group"), [topic.clone()]).unwrap();
    let mut member = bus.subscribe(subscription).await.unwrap();
    let mut all = Vec::new();
    while all.len() < count {
        let received =
            tokio::time::timeout(DEADLINE, member.next()).await.expect("something is received").unwrap();
        if let BusEvent::Records(records) = received {
            all.extend(records);
        }
    }
    member.leave().await.unwrap();
    all
}

fn id(received: &Received) -> String {
    String::from_utf8(received.record.headers.get("eventId").expect("an id").to_vec()).unwrap()
}

/// Runs a leased consumer until so many deliveries are through; the ids that its handler saw, each with how often.
async fn consume(bus: &KafkaBus, ledger: &MemoryLedger, topic: &Topic, count: u64) -> BTreeMap<String, u32> {
    let seen = Arc::new(Mutex::new(BTreeMap::<String, u32>::new()));
    let consumer = Consumer::builder(Arc::new(bus.clone()), ledger.clone())
        .scope("foreign")
        .topic(topic.as_str())
        .with(|settings| settings.dead_topic = Some(String::new()))
        .build()
        .unwrap();
    let handle = consumer.handle();
    let its = seen.clone();
    let mut running = tokio::spawn(consumer.leased(move |event: &Event, _: &Run| {
        *its.lock().unwrap().entry(String::from(event.id.as_str())).or_default() += 1;
        async { Ok(()) }
    }));
    let end = tokio::time::Instant::now() + DEADLINE;
    while handle.progress().passed.values().sum::<u64>() < count {
        assert!(tokio::time::Instant::now() < end, "{:?} of {count}", handle.progress());
        let ended = tokio::time::timeout(Duration::from_millis(20), &mut running).await;
        assert!(ended.is_err(), "it ended: {ended:?}");
    }
    handle.stop();
    running.await.unwrap().unwrap();
    Arc::into_inner(seen).unwrap().into_inner().unwrap()
}

/// Kafka's own Java client writes gzip, snappy, lz4 and zstd batches, transactions that abort, headers without a value, tombstones
/// and large records, to 100 partitions whose broker stamps the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t83_what_the_java_client_writes_in_any_codec_takes_effect_once() {
    let libs = std::env::var("HAPAX_TEST_KAFKA_LIBS").expect("HAPAX_TEST_KAFKA_LIBS: run scripts/test");
    let bus = connect(settings()).await;
    let topic = Topic::new(unique("foreign")).unwrap();
    let config = [("message.timestamp.type", "LogAppendTime"), ("max.message.bytes", "4194304")];
    topic_with(&topic, PARTITIONS, &config).await;
    let before = std::time::UNIX_EPOCH.elapsed().unwrap();
    let written = tokio::process::Command::new("java")
        .args(["-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-cp", &format!("{libs}/*")])
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/support/ForeignProducer.java"))
        .args([brokers(), topic.as_str().to_owned(), PARTITIONS.to_string()])
        .kill_on_drop(true)
        .output();
    let written = tokio::time::timeout(DEADLINE, written).await.expect("Java ends").expect("java runs");
    assert!(written.status.success(), "{}", String::from_utf8_lossy(&written.stderr));

    let some = |name: &str, count: i32| (0..count).map(|n| format!("{name}-{n}")).collect::<Vec<_>>();
    let mut expected: BTreeSet<String> =
        CODECS.iter().flat_map(|codec| some(codec, 2 * PARTITIONS)).collect();
    expected.extend(CODECS.iter().flat_map(|codec| [format!("large-{codec}"), format!("tombstone-{codec}")]));
    expected.extend((0..3).flat_map(|round| some(&format!("committed{round}"), PARTITIONS)));

    let records = receive_all(&bus, &topic, expected.len()).await;
    assert_eq!(records.len(), expected.len());
    for received in &records {
        let (id, record) = (id(received), &received.record);
        assert_eq!(record.headers.get("nothing").map(<[u8]>::len), Some(0), "{id}");
        assert!(
            record.timestamp.unwrap() >= Time::from_millis(before.as_millis() as i64),
            "{id}: the broker's time"
        );
        match &record.payload {
            None => assert!(id.starts_with("tombstone-"), "{id}"),
            Some(payload) if id.starts_with("large-") => assert_eq!(payload.len(), 1_000_000, "{id}"),
            Some(payload) => assert!(payload.starts_with(b"{\"from\":"), "{id}"),
        }
    }
    let partitions: BTreeSet<_> = records.iter().map(|received| received.origin.partition).collect();
    assert_eq!(partitions.len(), PARTITIONS as usize);

    let seen = consume(&bus, &MemoryLedger::default(), &topic, expected.len() as u64).await;
    assert_eq!(seen.keys().cloned().collect::<BTreeSet<_>>(), expected);
    assert!(seen.values().all(|count| *count == 1), "each once");
}

/// Our own records in a topic that the broker keeps compressed with zstd.
#[tokio::test]
async fn t83_a_topic_with_a_codec_of_its_own_is_read_back() {
    let bus = connect(settings()).await;
    for codec in &CODECS[1..] {
        let topic = Topic::new(unique("codec")).unwrap();
        topic_with(&topic, 1, &[("compression.type", codec)]).await;
        let records: Vec<_> = (0..20)
            .map(|n| hapax::bus::Record { payload: Some(format!("{n:0>100}").into()), ..Default::default() })
            .collect();
        for answer in bus.publish(&topic, &records).await.unwrap() {
            answer.unwrap();
        }
        let received = receive_all(&bus, &topic, 20).await;
        assert!(
            received.iter().zip(&records).all(|(received, sent)| received.record.payload == sent.payload),
            "{codec}"
        );
    }
}

/// One record has a header whose name is not UTF-8. It is a dead letter, with its bytes; its neighbours take effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t73_a_header_name_that_is_not_utf8_is_a_dead_letter_and_no_silence() {
    let bus = connect(settings()).await;
    let topic = Topic::new(unique("odd")).unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let (broker, name) = (brokers(), topic.as_str().to_owned());
    tokio::task::spawn_blocking(move || {
        let plain = |id: &'static [u8]| RawRecord {
            key: b"k",
            value: id,
            headers: vec![(&b"eventId"[..], id)].leak(),
        };
        let odd = RawRecord {
            key: b"k",
            value: b"its bytes",
            headers: &[(b"eventId", b"odd"), (b"\xff\xfe", b"x"), (b"after", b"it")],
        };
        raw_kafka::produce(&broker, &name, &[plain(b"before"), odd, plain(b"after")]);
    })
    .await
    .unwrap();
    let ledger = MemoryLedger::default();
    let seen = consume(&bus, &ledger, &topic, 3).await;
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [("after".to_owned(), 1), ("before".to_owned(), 1)]);
    let dead = Filter { states: vec![State::Dead], ..Filter::default() };
    let dead = ledger.list(&dead, None, 10).await.unwrap().entries;
    let [dead] = &dead[..] else { panic!("{dead:?}") };
    let body = dead.body.as_ref().expect("its bytes");
    assert_eq!(body.payload.as_deref(), Some(&b"its bytes"[..]));
    assert_eq!(body.key.as_deref(), Some(&b"k"[..]));
    assert_eq!(body.headers.get("after"), Some(&b"it"[..]), "what can be read is kept");
    assert!(dead.reason.as_deref().is_some_and(|reason| reason.contains("UTF-8")), "{:?}", dead.reason);
}

/// The thread that polls Kafka panics for real, at the first record. Its consumer ends, and says why.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t73_a_thread_that_panics_while_it_polls_ends_its_consumer() {
    const POINT: &str = "kafka.polled:1:panic";
    if std::env::var(hapax::testing::crash::VARIABLE).as_deref() != Ok(POINT) {
        let mut child =
            crate::support::this::test("t73_a_thread_that_panics_while_it_polls_ends_its_consumer");
        let ran = child.env(hapax::testing::crash::VARIABLE, POINT).output().unwrap();
        assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
        return;
    }
    let bus = connect(settings()).await;
    let topic = Topic::new(unique("panic")).unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let record =
        hapax::bus::Record { payload: Some("{\"id\":\"one\"}".into()), ..hapax::bus::Record::default() };
    bus.publish(&topic, &[record]).await.unwrap().pop().unwrap().unwrap();
    let consumer = Consumer::builder(Arc::new(bus.clone()), MemoryLedger::default())
        .scope("panic")
        .topic(topic.as_str())
        .build()
        .unwrap();
    let running = consumer.leased(|_: &Event, _: &Run| async { Ok(()) });
    let ended = tokio::time::timeout(DEADLINE, running).await.expect("it ends, instead of waiting for ever");
    let error = ended.expect_err("its thread is gone");
    assert!(!error.is_retryable() && error.chain().contains("kafka.polled"), "{}", error.chain());
}
