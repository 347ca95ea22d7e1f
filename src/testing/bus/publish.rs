//! Clauses 1, 2, 10 and 12: what is published, where it lies, what stays.

use std::collections::{BTreeMap, BTreeSet};

use super::BusHarness;
use super::kit::{Stage, publish, record, until};
use crate::bus::{Bus, Partition, Record, TopicSettings};
use crate::clock::Time;
use crate::error::Error;
use crate::event::Headers;
use crate::id::Topic;

/// Key, payload, headers and time arrive as they were sent, where the answer said.
pub async fn b1_each_record_is_answered_with_where_it_lies<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 3).await;
    let headers: Headers =
        [("id", &b"1"[..]), ("id", &b"2"[..]), ("empty", &b""[..]), ("raw", &b"\xff\x00"[..])]
            .into_iter()
            .map(|(name, value)| (name, bytes::Bytes::from_static(value)))
            .collect();
    let timestamp = Some(Time::parse("2026-03-04T12:00:00.123Z").unwrap());
    let sent = [
        Record { headers, timestamp, ..record("a", "full") },
        Record { payload: None, ..record("a", "") },
        record("b", ""),
        Record { key: None, ..record("", "no key") },
        Record { payload: Some(vec![0; 100_000].into()), ..record("c", "") },
    ];
    let origins = stage.publish(&sent).await;
    assert_eq!(origins.iter().cloned().collect::<std::collections::HashSet<_>>().len(), sent.len());
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= sent.len()).await;
    for (record, origin) in sent.iter().zip(&origins) {
        let received =
            recorder.records.iter().find(|received| received.origin == *origin).expect("it lies there");
        let stamped = received.record.timestamp;
        assert!(stamped.is_some(), "the bus fills in a time");
        assert_eq!(received.record, Record { timestamp: record.timestamp.or(stamped), ..record.clone() });
    }
    recorder.leave().await;
}

/// Acknowledged is visible, to another opening too.
pub async fn b1_what_is_acknowledged_others_see<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let other = harness.open().await;
    assert_eq!(other.range(&stage.partition(0)).await.unwrap(), (0, 0));
    for n in 1..=3 {
        let origins = stage.publish_some(1).await;
        let (_, end) = other.range(&stage.partition(0)).await.unwrap();
        assert!(end > origins[0].offset, "record {n} is at {}, the end is {end}", origins[0].offset);
    }
    assert!(stage.bus.publish(&stage.topic, &[]).await.unwrap().is_empty());
}

/// Nothing is made by a slip of the pen.
pub async fn b1_an_unknown_topic_is_an_error<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let unknown = Topic::new(harness.unique("unknown")).unwrap();
    assert_eq!(stage.bus.topic(&unknown).await.unwrap(), None);
    let answer = stage.bus.publish(&unknown, &[record("a", "x")]).await;
    assert!(answer.as_ref().map_or(true, |answers| answers[0].is_err()), "{answer:?}");
    let mut subscription = stage.subscription();
    subscription.topics.push(unknown.clone());
    let refused = stage.bus.subscribe(subscription).await.map(|_| ()).unwrap_err();
    assert!(refused.to_string().contains(unknown.as_str()), "{refused}");
    assert!(matches!(refused, Error::NotFound(_)), "{refused:?}");
    assert_eq!(stage.bus.topic(&unknown).await.unwrap(), None, "asking made it");
}

/// Making a topic that is there changes nothing; bad names and numbers are refused.
pub async fn b1_a_topic_is_made_once<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    assert!(!stage.bus.create_topic(&stage.topic, TopicSettings::new(7)).await.unwrap());
    let info = stage.bus.topic(&stage.topic).await.unwrap().expect("it is there");
    assert_eq!(info.partitions, 2);
    for (name, partitions) in [("a b", 1), ("a/b", 1), ("..", 1), ("fine", 0), ("fine", -1)] {
        let topic = Topic::new(name).unwrap();
        let refused = stage.bus.create_topic(&topic, TopicSettings::new(partitions)).await;
        assert!(refused.is_err(), "{name} with {partitions} partitions is {refused:?}");
    }
    assert!(stage.bus.range(&stage.partition(2)).await.is_err(), "there are two partitions");
}

/// One key, one partition, whoever publishes.
pub async fn b2_a_key_has_one_partition<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 4).await;
    let other = harness.open().await;
    let records: Vec<_> = (0..100).map(|n| record(&format!("key-{}", n % 25), "x")).collect();
    let mut places: BTreeMap<_, BTreeSet<i32>> = BTreeMap::new();
    let origins = [stage.publish(&records).await, publish(&other, &stage.topic, &records).await].concat();
    for (record, origin) in records.iter().cycle().zip(origins) {
        places.entry(record.key.clone()).or_default().insert(origin.partition);
    }
    assert!(places.values().all(|partitions| partitions.len() == 1), "{places:?}");
    let used: BTreeSet<_> = places.values().flatten().collect();
    assert!(used.len() > 1, "25 keys in one of 4 partitions");
}

/// Several publishers at once: each one's records of a key arrive in the order it published them.
pub async fn b2_a_partition_keeps_its_publishers_order<H: BusHarness>(harness: &H) {
    const BATCHES: usize = 10;
    let stage = Stage::new(harness, 2).await;
    let (one, two) = (harness.open().await, harness.open().await);
    let run = |bus: H::Bus, name: &'static str| {
        let topic = stage.topic.clone();
        async move {
            for batch in 0..BATCHES {
                let records: Vec<_> =
                    (0..5).map(|n| record(&format!("key-{n}"), &format!("{name}:{batch}"))).collect();
                publish(&bus, &topic, &records).await;
            }
        }
    };
    tokio::join!(run(one, "one"), run(two, "two"));
    let mut recorder = stage.member("a").await;
    until(&mut recorder, "all records", |recorder| recorder.records.len() >= BATCHES * 10).await;
    let mut last: BTreeMap<(bytes::Bytes, String), usize> = BTreeMap::new();
    for received in &recorder.records {
        let payload = received.record.payload.clone().unwrap();
        let (name, batch) = std::str::from_utf8(&payload).unwrap().split_once(':').unwrap();
        let batch: usize = batch.parse().unwrap();
        let before = last.insert((received.record.key.clone().unwrap(), name.to_owned()), batch);
        assert_eq!(before.map_or(0, |before| before + 1), batch, "{received:?}");
    }
    recorder.leave().await;
}

/// An offset belongs to its record for ever, also when nothing is left.
pub async fn b10_offsets_are_never_reused<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let last = stage.publish_some(5).await[4].offset;
    let (_, end) = stage.bus.range(&stage.partition(0)).await.unwrap();
    harness.remove_below(&stage.partition(0), end).await;
    assert_eq!(stage.bus.range(&stage.partition(0)).await.unwrap(), (end, end));
    let again = harness.open().await;
    let origin = publish(&again, &stage.topic, &[record("one-key", "new")]).await.remove(0);
    assert!(origin.offset > last, "{} was used before", origin.offset);
    assert!(origin.offset >= end);
}

/// A group that was behind retention goes on with what is left.
pub async fn b10_what_was_removed_leaves_a_gap<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 1).await;
    let partition = stage.behind_retention().await;
    assert_eq!(stage.bus.range(&partition).await.unwrap(), (4, 6));
    let mut recorder = stage.member("b").await;
    until(&mut recorder, "what is left", |recorder| recorder.records.len() >= 2).await;
    assert_eq!(recorder.offsets(&partition), [4, 5]);
    recorder.leave().await;
}

/// Whatever its key: with one, without one, with one that belongs elsewhere. Each record arrives as it was sent.
pub async fn b12_a_record_goes_to_the_partition_it_is_published_to<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 3).await;
    let sent = [
        record("one-key", "a"),
        Record { key: None, ..record("", "b") },
        record("another", "c"),
        Record { key: None, payload: None, ..Record::default() },
    ];
    let mut origins = Vec::new();
    for number in [2, 0, 1, 2] {
        let answers = stage.bus.publish_to(&stage.partition(number), &sent).await.expect("the bus is there");
        let lie: Vec<_> = answers.into_iter().map(|answer| answer.expect("it is published")).collect();
        assert!(lie.iter().all(|origin| origin.partition == number), "{number}: {lie:?}");
        assert!(lie.windows(2).all(|two| two[0].offset < two[1].offset), "in order: {lie:?}");
        origins.extend(lie);
    }
    let mut ear = stage.member("a").await;
    until(&mut ear, "all records", |ear| ear.records.len() >= origins.len()).await;
    for (record, origin) in sent.iter().cycle().zip(&origins) {
        let received = ear.records.iter().find(|received| received.origin == *origin).expect("it lies there");
        let timestamp = received.record.timestamp;
        assert_eq!(received.record, Record { timestamp, ..record.clone() });
    }
    ear.leave().await;
}

/// By key and to a partition, by one publisher and by another: what was acknowledged comes first.
pub async fn b12_what_is_published_after_an_acknowledgement_comes_after_it<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    let other = harness.open().await;
    let mut last: BTreeMap<i32, i64> = BTreeMap::new();
    for n in 0..10 {
        let keyed = publish(&other, &stage.topic, &[record(&format!("key-{n}"), "keyed")]).await.remove(0);
        let partition = stage.partition(keyed.partition);
        let mut answers = stage.bus.publish_to(&partition, &[record("x", "placed")]).await.unwrap();
        let placed = answers.remove(0).expect("it is published");
        let before = last.insert(partition.number, placed.offset);
        assert!(before.is_none_or(|before| before < keyed.offset), "{before:?} {keyed:?}");
        assert!(keyed.offset < placed.offset, "{keyed:?} {placed:?}");
    }
}

/// Too high, negative, of an unknown topic: nothing is stored anywhere.
pub async fn b12_a_partition_that_is_not_there_is_an_error<H: BusHarness>(harness: &H) {
    let stage = Stage::new(harness, 2).await;
    for number in 0..2 {
        // Both have a leader from here on, so that what they have can be asked for.
        let answers = stage.bus.publish_to(&stage.partition(number), &[record("a", "x")]).await.unwrap();
        assert!(answers[0].is_ok(), "{number}: {answers:?}");
    }
    let unknown = Topic::new(harness.unique("unknown")).unwrap();
    let none = [stage.partition(2), stage.partition(-1), Partition { topic: unknown.clone(), number: 0 }];
    for partition in none {
        let error = stage.bus.publish_to(&partition, &[record("a", "x")]).await.expect_err("it is not there");
        assert!(matches!(error, Error::NotFound(_)), "{partition}: {error:?}");
    }
    assert_eq!(stage.total().await, 2, "nothing was stored");
    assert_eq!(stage.bus.topic(&unknown).await.unwrap(), None, "nothing was made");
    let answers = stage.bus.publish_to(&stage.partition(1), &[record("a", "x")]).await.unwrap();
    assert!(answers[0].is_ok(), "what is there goes on: {answers:?}");
}
