//! Partitions that are paused: for moments, because a consumer is at its limit, and for long.
#![cfg(all(feature = "testing", feature = "kafka"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use crate::support::wait::until;
use hapax::backend::memory::MemoryLedger;
use hapax::bus::kafka::{KafkaBus, KafkaSettings};
use hapax::bus::{Assignment, Bus, BusEvent, Partition, Record, Subscriber, Subscription, TopicSettings};
use hapax::consumer::Consumer;
use hapax::testing::kafka::{connect, remove_below, settings};
use hapax::{Event, Topic};

const DEADLINE: Duration = Duration::from_secs(120);

fn unique(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

async fn stage(settings: KafkaSettings, partitions: i32) -> (KafkaBus, Topic) {
    let bus = connect(settings).await;
    let topic = Topic::new(unique("topic")).unwrap();
    assert!(bus.create_topic(&topic, TopicSettings::new(partitions)).await.unwrap());
    (bus, topic)
}

async fn publish(bus: &KafkaBus, topic: &Topic, number: i32, texts: impl Iterator<Item = String>) {
    let record = |text: String| Record { payload: Some(text.into()), ..Record::default() };
    let records: Vec<_> = texts.map(record).collect();
    let partition = Partition { topic: topic.clone(), number };
    for answer in bus.publish_to(&partition, &records).await.unwrap() {
        answer.unwrap();
    }
}

/// A consumer that may have 50 events in memory reads thousands: it pauses and resumes its partition all the time. librdkafka's own
/// pause would drop what it has fetched ahead each time, and fetch nothing for up to a second after it was resumed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t490_a_consumer_at_its_limit_keeps_what_was_fetched() {
    const EVENTS: usize = 3000;
    let mut roomy = settings();
    roomy.buffer_records_max = EVENTS; // four times as many may wait, more than there are
    let (bus, topic) = stage(roomy, 1).await;
    publish(&bus, &topic, 0, (0..EVENTS).map(|n| format!("{{\"event_id\":\"{n}\"}}"))).await;
    let builder = Consumer::builder(Arc::new(bus.clone()), MemoryLedger::default());
    let builder = builder.scope(unique("scope")).topic(topic.as_str());
    let consumer = builder.with(|settings| settings.in_flight_max = 50).build().unwrap();
    let (handle, done) = (consumer.handle(), Arc::new(AtomicUsize::new(0)));
    let counted = done.clone();
    let running = tokio::spawn(consumer.leased(move |_: &Event, _: &hapax::guard::Run| {
        counted.fetch_add(1, Ordering::SeqCst);
        async { Ok(()) }
    }));
    let waiting = async {
        while done.load(Ordering::SeqCst) < EVENTS {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, waiting).await.expect("all events take effect");
    handle.stop();
    running.await.unwrap().unwrap();
    let (paused, waited) = bus.waited();
    assert_eq!(paused, 0, "paused in librdkafka");
    assert!(waited > 0, "its partition was paused, and records arrived meanwhile");
}

/// What a member receives, by partition.
#[derive(Default)]
struct Received(Mutex<BTreeMap<i32, Vec<i64>>>);

impl Received {
    async fn until(&self, member: &mut Box<dyn Subscriber>, so: impl Fn(&BTreeMap<i32, Vec<i64>>) -> bool) {
        let receiving = async {
            while !so(&self.0.lock().unwrap()) {
                let next = tokio::time::timeout(Duration::from_millis(200), member.next()).await;
                match next {
                    Ok(Ok(BusEvent::Records(records))) => {
                        let mut all = self.0.lock().unwrap();
                        for record in records {
                            all.entry(record.origin.partition).or_default().push(record.origin.offset);
                        }
                    }
                    Ok(other) => panic!("{other:?}"),
                    Err(_) => {} // ask again whether it is so
                }
            }
        };
        tokio::time::timeout(DEADLINE, receiving).await.expect("what is waited for");
    }
}

/// A consumer stands still with one of its partitions, of which thousands of records are left: four times the buffer waits in memory,
/// and no more. The other partition goes on, before and after the limit is reached, and nothing is lost or comes twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t491_a_partition_that_stands_still_has_its_bound() {
    const EACH: i64 = 3000;
    let mut small = settings();
    small.buffer_records_max = 50;
    let (bus, topic) = stage(small, 2).await;
    for number in 0..2 {
        publish(&bus, &topic, number, (0..EACH).map(|n| n.to_string())).await;
    }
    let mut subscription = Subscription::new(unique("group"), [topic.clone()]).unwrap();
    subscription.session_timeout = Duration::from_secs(6);
    let mut member = bus.subscribe(subscription).await.unwrap();
    let BusEvent::Assigned(given) = member.next().await.unwrap() else { panic!("assigned") };
    let still: Vec<Assignment> = given.into_iter().filter(|own| own.partition.number == 0).collect();
    assert_eq!(still.len(), 1);
    member.pause(&still).await.unwrap();
    let received = Received::default();
    let of = |all: &BTreeMap<i32, Vec<i64>>, number| all.get(&number).map_or(0, Vec::len);
    received.until(&mut member, |all| of(all, 1) == EACH as usize && bus.waited().0 > 0).await;
    publish(&bus, &topic, 1, (0..EACH).map(|n| n.to_string())).await;
    received.until(&mut member, |all| of(all, 1) == 2 * EACH as usize).await;
    assert_eq!(of(&received.0.lock().unwrap(), 0), 0, "it is paused");
    assert_eq!(bus.waited(), (1, 200), "paused in librdkafka once, with four times the buffer");
    member.resume(&still).await.unwrap();
    received.until(&mut member, |all| of(all, 0) >= EACH as usize).await;
    assert_eq!(received.0.lock().unwrap()[&0], (0..EACH).collect::<Vec<_>>());
    assert_eq!(received.0.lock().unwrap()[&1], (0..2 * EACH).collect::<Vec<_>>());
    member.leave().await.unwrap();
}

/// Retention removes records that a member which stands still has not fetched: it delivers what it has in memory, and then reports
/// what was removed before what lies behind it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn t492_what_was_removed_behind_what_waits_in_memory_is_reported() {
    const EACH: i64 = 3000;
    let mut small = settings();
    small.buffer_records_max = 50;
    let (bus, topic) = stage(small, 1).await;
    let texts = || (0..EACH).map(|n| n.to_string());
    publish(&bus, &topic, 0, texts()).await;
    let subscription = Subscription::new(unique("group"), [topic.clone()]).unwrap();
    let mut member = bus.subscribe(subscription).await.unwrap();
    let BusEvent::Assigned(given) = member.next().await.unwrap() else { panic!("assigned") };
    member.pause(&given).await.unwrap();
    until("too much waits in memory", async || bus.waited().0 > 0).await;
    publish(&bus, &topic, 0, texts()).await;
    remove_below(&given[0].partition, EACH + 1000).await;
    member.resume(&given).await.unwrap();
    let (mut offsets, mut removed) = (Vec::new(), Vec::new());
    let receiving = async {
        while offsets.last() != Some(&(2 * EACH - 1)) {
            match member.next().await.unwrap() {
                BusEvent::Records(records) => offsets.extend(records.iter().map(|one| one.origin.offset)),
                BusEvent::Removed { offsets: gone, .. } => removed.push((offsets.len(), gone)),
                other => panic!("{other:?}"),
            }
        }
    };
    tokio::time::timeout(DEADLINE, receiving).await.expect("all that is left");
    let waited = bus.waited().1 as i64;
    let expected: Vec<i64> = (0..waited).chain(EACH + 1000..2 * EACH).collect();
    assert_eq!(offsets, expected);
    assert_eq!(removed, [(waited as usize, waited..EACH + 1000)]);
    member.leave().await.unwrap();
}
