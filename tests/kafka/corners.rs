//! What only a real Kafka does: transactions, compaction, back-pressure, members that are slow, brokers that are not there.
#![cfg(all(feature = "testing", feature = "kafka"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::time::{Duration, Instant};

use hapax::backend::memory::MemoryLedger;
use hapax::bus::kafka::{GroupProtocol, Isolation, KafkaBus, KafkaSettings};
use hapax::bus::{
    Assignment, Bus, BusEvent, Partition, Received, Record, Start, Subscriber, Subscription, TopicSettings,
};
use hapax::consumer::{self, ConsumerSettings};
use hapax::testing::kafka::{connect, delete_topic, settings, topic_with, transaction};
use hapax::{Error, Scope, Topic};

const DEADLINE: Duration = Duration::from_secs(120);

fn unique(what: &str) -> String {
    format!("{what}-{}", uuid::Uuid::new_v4().simple())
}

fn record(key: &str, payload: &str) -> Record {
    Record { key: Some(key.to_owned().into()), payload: Some(payload.to_owned().into()), ..Record::default() }
}

fn payload(received: &Received) -> String {
    String::from_utf8(received.record.payload.clone().expect("a payload").to_vec()).unwrap()
}

fn subscription(group: &str, topic: &Topic) -> Subscription {
    let mut subscription = Subscription::new(group, [topic.clone()]).unwrap();
    subscription.session_timeout = Duration::from_secs(6);
    subscription
}

async fn stage(settings: KafkaSettings, partitions: i32) -> (KafkaBus, Topic, String) {
    let bus = connect(settings).await;
    let topic = Topic::new(unique("topic")).unwrap();
    assert!(bus.create_topic(&topic, TopicSettings::new(partitions)).await.unwrap());
    (bus, topic, unique("group"))
}

async fn next(member: &mut Box<dyn Subscriber>) -> BusEvent {
    tokio::time::timeout(DEADLINE, member.next()).await.expect("something is received").unwrap()
}

async fn given(member: &mut Box<dyn Subscriber>) -> Vec<Assignment> {
    match next(member).await {
        BusEvent::Assigned(given) => given,
        other => panic!("{other:?}"),
    }
}

/// Hears records until there are so many, and what else was heard.
async fn receive(member: &mut Box<dyn Subscriber>, count: usize) -> (Vec<Received>, Vec<BusEvent>) {
    let (mut records, mut rest) = (Vec::new(), Vec::new());
    while records.len() < count {
        match next(member).await {
            BusEvent::Records(more) => records.extend(more),
            other => rest.push(other),
        }
    }
    (records, rest)
}

async fn publish(bus: &KafkaBus, topic: &Topic, records: &[Record]) {
    for answer in bus.publish(topic, records).await.unwrap() {
        answer.unwrap();
    }
}

#[tokio::test]
async fn aborted_records_are_never_heard_and_markers_are_gaps() {
    let (bus, topic, group) = stage(settings(), 1).await;
    let names = topic.clone();
    tokio::task::spawn_blocking(move || {
        transaction(&names, &["a", "b"], true); // 0 1, marker 2
        transaction(&names, &["x", "y", "z"], false); // 3 4 5, marker 6
        transaction(&names, &["c"], true); // 7, marker 8
    })
    .await
    .unwrap();
    let partition = Partition { topic: topic.clone(), number: 0 };
    assert_eq!(bus.range(&partition).await.unwrap(), (0, 9));
    let mut member = bus.subscribe(subscription(&group, &topic)).await.unwrap();
    let (records, rest) = receive(&mut member, 3).await;
    let received: Vec<_> = records.iter().map(|r| (r.origin.offset, payload(r))).collect();
    assert_eq!(received, [(0, "a".to_owned()), (1, "b".to_owned()), (7, "c".to_owned())]);
    let [BusEvent::Assigned(assigned)] = &rest[..] else { panic!("{rest:?}") };
    let answers = member.commit(&[(assigned[0].clone(), 8)]).await.unwrap();
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(bus.committed(&group, &partition).await.unwrap(), Some(8));
    member.leave().await.unwrap();

    let mut all = settings();
    all.isolation = Isolation::Uncommitted;
    let bus = connect(all).await;
    let mut member = bus.subscribe(subscription(&unique("group"), &topic)).await.unwrap();
    let (records, _) = receive(&mut member, 6).await;
    assert_eq!(records.iter().map(payload).collect::<String>(), "abxyzc");
    member.leave().await.unwrap();
}

#[tokio::test]
async fn a_compacted_topic_has_gaps_and_says_so() {
    let bus = connect(settings()).await;
    let topic = Topic::new(unique("compacted")).unwrap();
    let config = [
        ("cleanup.policy", "compact"),
        ("min.cleanable.dirty.ratio", "0.01"),
        ("segment.ms", "100"),
        ("min.compaction.lag.ms", "0"),
        ("max.compaction.lag.ms", "200"),
    ];
    topic_with(&topic, 1, &config).await;
    let end = Instant::now() + DEADLINE;
    // Each record may roll a segment; what is in older ones is compacted within a second or so.
    loop {
        publish(&bus, &topic, &[record("same", "again"), record("same", "and again")]).await;
        let mut member = bus.subscribe(subscription(&unique("group"), &topic)).await.unwrap();
        let (_, last) = bus.range(&Partition { topic: topic.clone(), number: 0 }).await.unwrap();
        let mut offsets: Vec<i64> = Vec::new();
        while offsets.last().is_none_or(|offset| offset + 1 < last) {
            if let BusEvent::Records(records) = next(&mut member).await {
                offsets.extend(records.iter().map(|r| r.origin.offset));
            }
        }
        member.leave().await.unwrap();
        assert!(offsets.is_sorted(), "{offsets:?}");
        if offsets.len() < usize::try_from(last).unwrap() {
            break;
        }
        assert!(Instant::now() < end, "nothing was compacted");
    }
    let info = bus.topic(&topic).await.unwrap().expect("the topic");
    assert!(info.compacted && info.retention.is_none(), "{info:?}");
    assert_eq!((info.replication, info.min_insync), (Some(1), Some(1)));
}

/// A leader that lags gives the offsets of lost records to others.
#[tokio::test]
async fn t442_a_topic_whose_leader_may_lag_is_refused() {
    let bus = connect(settings()).await;
    let found = async |unclean: &str| {
        let topic = Topic::new(unique("unclean")).unwrap();
        topic_with(&topic, 1, &[("unclean.leader.election.enable", unclean)]).await;
        let settings = ConsumerSettings::new(Scope::new("mailer").unwrap(), vec![topic.clone()]);
        let findings = consumer::check(&bus, &MemoryLedger::default(), None, &settings).await.unwrap();
        delete_topic(&topic).await;
        consumer::refuse(&findings)
    };
    found("false").await.unwrap();
    let error = found("true").await.expect_err("a lagging replica may become the leader").to_string();
    assert!(error.contains("unclean.leader.election.enable") && !error.contains("  "), "{error}");
}

#[tokio::test]
async fn what_is_not_there_is_reported_in_bounded_time() {
    let mut away = KafkaSettings::new("127.0.0.1:1");
    away.answer_timeout = Duration::from_secs(2);
    let began = Instant::now();
    let error = KafkaBus::connect(away).await.unwrap_err();
    assert!(began.elapsed() < Duration::from_mins(1), "{:?}", began.elapsed());
    assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
    assert!(error.to_string().contains("127.0.0.1:1"), "{error}");
    println!("{}", error.chain());

    let bus = connect(settings()).await;
    let nowhere = Topic::new(unique("nowhere")).unwrap();
    let error = bus.subscribe(subscription("g", &nowhere)).await.err().expect("an error");
    assert!(matches!(error, Error::NotFound(_)), "{error:?}");
    let pattern = Topic::new("^.*").unwrap();
    let error = bus.subscribe(subscription("g", &pattern)).await.err().expect("an error");
    assert!(matches!(error, Error::Invalid { .. }), "{error:?}");
    assert!(bus.topic(&nowhere).await.unwrap().is_none(), "asking does not make it");
}

#[tokio::test]
async fn a_url_opens_it() {
    let url = format!("kafka://{}?group.protocol=consumer", hapax::testing::kafka::brokers());
    let mut settings = hapax::open::OpenSettings::default();
    settings.record_bytes_max = Some(100_000);
    let bus = hapax::open::bus_with(&url, &settings).await.unwrap();
    let capabilities = bus.capabilities();
    assert!(capabilities.bus == "kafka" && capabilities.durable && capabilities.shared, "{capabilities:?}");
    let topic = Topic::new(unique("topic")).unwrap();
    bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap();
    let answers = bus.publish(&topic, &[record("k", &"x".repeat(200_000))]).await.unwrap();
    assert!(matches!(answers[0], Err(Error::Invalid { .. })), "{answers:?}");
    let typo = format!("{url}&no.such.property=1");
    let error = hapax::open::bus_with(&typo, &settings).await.err().expect("an error");
    assert!(error.to_string().contains("no.such.property") && error.code() == "config", "{error}");
}

#[tokio::test]
async fn a_record_that_is_too_large_is_refused_and_its_neighbours_are_not() {
    let (bus, topic, _) = stage(settings(), 1).await;
    let large = "x".repeat(2 << 20);
    let answers =
        bus.publish(&topic, &[record("k", "a"), record("k", &large), record("k", "b")]).await.unwrap();
    assert_eq!(answers[0].as_ref().unwrap().offset, 0);
    assert!(matches!(answers[1], Err(Error::Invalid { .. })), "{:?}", answers[1]);
    assert_eq!(answers[2].as_ref().unwrap().offset, 1);
}

/// The broker refuses whole batches: what fits the topic by itself is published, however much of it there is.
#[tokio::test]
async fn a_topic_that_takes_little_takes_many_records() {
    let (bus, topic, _) = stage(settings(), 1).await;
    limit(&topic, 20_000).await;
    let mut records: Vec<_> = (0..100).map(|n| record("k", &format!("{n:0>3000}"))).collect();
    records.insert(50, record("k", &"x".repeat(30_000)));
    let answers = bus.publish(&topic, &records).await.unwrap();
    for (place, answer) in answers.iter().enumerate() {
        if place == 50 {
            assert!(matches!(answer, Err(Error::Invalid { .. })), "{answer:?}");
        } else {
            let offset = answer.as_ref().unwrap().offset;
            assert_eq!(offset, place as i64 - i64::from(place > 50), "in order");
        }
    }
    // It takes even less from now on, which is noticed: nobody is blamed for others, and the next try fits.
    records.remove(50);
    limit(&topic, 5_000).await;
    let end = Instant::now() + Duration::from_secs(60);
    loop {
        assert!(Instant::now() < end, "the topic never took less");
        let answers = bus.publish(&topic, &records).await.unwrap();
        let blamed = answers.iter().find(|answer| matches!(answer, Err(Error::Invalid { .. })));
        assert!(blamed.is_none(), "{blamed:?}");
        if answers.iter().any(Result::is_err) {
            break;
        }
    }
    publish(&bus, &topic, &records).await;
}

/// Has a topic take batches of so many bytes.
async fn limit(topic: &Topic, bytes: usize) {
    use rdkafka::admin::{AdminClient, AdminOptions, AlterConfig, ResourceSpecifier};
    let admin: AdminClient<rdkafka::client::DefaultClientContext> =
        rdkafka::ClientConfig::new().set("bootstrap.servers", settings().brokers).create().unwrap();
    let text = bytes.to_string();
    let change = AlterConfig::new(ResourceSpecifier::Topic(topic.as_str())).set("max.message.bytes", &text);
    admin.alter_configs([&change], &AdminOptions::new()).await.unwrap()[0].as_ref().unwrap();
}

/// A partition that is not there, and the same once it is: the producer asked for partitions before it was added.
#[tokio::test]
async fn a_partition_that_was_added_can_be_published_to() {
    use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
    let (bus, topic, _) = stage(settings(), 1).await;
    let [first, second] = [0, 1].map(|number| Partition { topic: topic.clone(), number });
    let sent = [record("k", "x")];
    bus.publish_to(&first, &sent).await.unwrap().remove(0).unwrap();
    let missing = bus.publish_to(&second, &sent).await.unwrap_err();
    assert!(matches!(missing, Error::NotFound(_)), "{missing:?}");
    let admin: AdminClient<rdkafka::client::DefaultClientContext> =
        rdkafka::ClientConfig::new().set("bootstrap.servers", settings().brokers).create().unwrap();
    let more = NewPartitions::new(topic.as_str(), 2);
    admin.create_partitions([&more], &AdminOptions::new()).await.unwrap()[0].as_ref().unwrap();
    let end = Instant::now() + DEADLINE;
    loop {
        match bus.publish_to(&second, &sent).await {
            Ok(answers) if answers[0].is_ok() => break,
            answer => assert!(Instant::now() < end, "never taken: {answer:?}"),
        }
    }
    assert_eq!(bus.range(&second).await.unwrap(), (0, 1), "it lies there once");
}

#[tokio::test]
async fn more_than_the_buffers_hold_arrives_in_order() {
    let mut small = settings().property("queue.buffering.max.messages", "100");
    small.buffer_records_max = 10;
    let (bus, topic, group) = stage(small, 1).await;
    let records: Vec<_> = (0..5000).map(|n| record("k", &n.to_string())).collect();
    publish(&bus, &topic, &records).await;
    let mut member = bus.subscribe(subscription(&group, &topic)).await.unwrap();
    let (received, _) = receive(&mut member, 5000).await;
    let expected: Vec<_> = (0..5000).map(|n: i32| n.to_string()).collect();
    assert_eq!(received.iter().map(payload).collect::<Vec<_>>(), expected);
    member.leave().await.unwrap();
}

/// A partition that moved before anything was committed goes on where "from now on" was, not at the end.
#[tokio::test]
async fn latest_passes_over_nothing_when_a_partition_moves() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        let (bus, topic, group) = stage(settings, 1).await;
        publish(&bus, &topic, &[record("k", "before")]).await;
        let mut latest = subscription(&group, &topic);
        latest.start = Start::Latest;
        let mut first = bus.subscribe(latest.clone()).await.unwrap();
        given(&mut first).await;
        publish(&bus, &topic, &[record("k", "after")]).await;
        first.leave().await.unwrap();
        let mut second = bus.subscribe(latest).await.unwrap();
        let (records, _) = receive(&mut second, 1).await;
        assert_eq!(payload(&records[0]), "after", "{protocol:?}");
        second.leave().await.unwrap();
    }
}

/// Two members: the slow one keeps what is wanted back beyond the time, and is told that it is gone.
#[tokio::test]
async fn what_is_not_given_back_in_time_is_lost() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        let (bus, topic, group) = stage(settings, 2).await;
        let mut slow = subscription(&group, &topic);
        slow.revoke_timeout = Duration::from_secs(1);
        let mut first = bus.subscribe(slow.clone()).await.unwrap();
        let mine = given(&mut first).await;
        assert_eq!(mine.len(), 2);
        let began = Instant::now();
        let mut second = bus.subscribe(slow).await.unwrap();
        let listening = async {
            let BusEvent::Revoked(revoked) = next(&mut first).await else { panic!("revoked first") };
            let wanted = began.elapsed();
            let in_time = first.commit(&[(revoked[0].clone(), 0)]).await.unwrap();
            assert!(in_time[0].is_ok(), "the old epoch may still commit: {in_time:?}");
            let BusEvent::Lost(lost) = next(&mut first).await else { panic!("lost after that") };
            assert_eq!(lost, revoked);
            let late = first.commit(&[(lost[0].clone(), 0)]).await.unwrap();
            assert!(matches!(late[0], Err(Error::Fenced { .. })), "{late:?}");
            wanted
        };
        let (wanted, got) = tokio::join!(listening, given(&mut second));
        println!("{protocol:?}: wanted back after {wanted:?}, moved after {:?}", began.elapsed());
        assert_eq!(got.len(), 1);
        first.leave().await.unwrap();
        second.leave().await.unwrap();
    }
}

/// One that does not listen, on a topic where nothing happens: others get what it had, and it joins again when it listens.
#[tokio::test]
async fn a_subscriber_that_does_not_listen_loses_its_partitions() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        let (bus, topic, group) = stage(settings, 2).await;
        let mut first = bus.subscribe(subscription(&group, &topic)).await.unwrap();
        let mine = given(&mut first).await;
        assert_eq!(mine.len(), 2);
        let began = Instant::now();
        let mut second = bus.subscribe(subscription(&group, &topic)).await.unwrap();
        let mut got = 0;
        while got < 2 {
            got += given(&mut second).await.len();
        }
        println!("{protocol:?}: who does not listen has nothing after {:?}", began.elapsed());
        let late = first.commit(&[(mine[0].clone(), 0)]).await.unwrap();
        assert!(matches!(late[0], Err(Error::Fenced { .. })), "{late:?}");
        let mut lost = Vec::new(); // at once or one by one
        while lost.len() < mine.len() {
            let BusEvent::Lost(more) = next(&mut first).await else { panic!("lost") };
            lost.extend(more);
        }
        lost.sort_by(|a, b| a.partition.cmp(&b.partition));
        assert_eq!(lost, mine);
        let giving = async {
            let BusEvent::Revoked(revoked) = next(&mut second).await else { panic!("revoked") };
            second.release(&revoked).await.unwrap();
            revoked
        };
        let (revoked, again) = tokio::join!(giving, given(&mut first));
        assert_eq!(revoked.len(), again.len());
        assert!(again[0].epoch > mine[0].epoch, "another assignment, another epoch");
        first.leave().await.unwrap();
        second.leave().await.unwrap();
    }
}

/// One that stands still while a partition is wanted back is thrown out, and joins again when it wakes up.
#[tokio::test]
async fn who_is_thrown_out_while_a_partition_is_wanted_back_joins_again() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        let (bus, topic, group) = stage(settings.clone(), 2).await;
        let mut first = bus.subscribe(subscription(&group, &topic)).await.unwrap();
        let mine = given(&mut first).await;
        assert_eq!(mine.len(), 2);
        let other = connect(settings).await;
        let mut second = other.subscribe(subscription(&group, &topic)).await.unwrap();
        let BusEvent::Revoked(_) = next(&mut first).await else { panic!("{protocol:?}: revoked") };
        bus.silence(true);
        let mut got = 0;
        while got < 2 {
            got += given(&mut second).await.len();
        }
        bus.silence(false);
        let mut lost = 0;
        while lost < mine.len() {
            let BusEvent::Lost(more) = next(&mut first).await else { panic!("{protocol:?}: lost") };
            lost += more.len();
        }
        second.leave().await.unwrap();
        let mut again = 0;
        while again < 2 {
            again += given(&mut first).await.len();
        }
        first.leave().await.unwrap();
    }
}

/// A pause holds while other partitions come and go, and what waited in this process is neither lost nor heard twice.
#[tokio::test]
async fn a_pause_survives_rebalances_of_others() {
    for protocol in [GroupProtocol::Classic, GroupProtocol::Consumer] {
        let mut settings = settings();
        settings.group_protocol = protocol;
        let (bus, topic, group) = stage(settings, 4).await;
        let mut first = bus.subscribe(subscription(&group, &topic)).await.unwrap();
        let mine = given(&mut first).await;
        first.pause(&mine).await.unwrap();
        let records: Vec<_> = (0..200).map(|n| record(&n.to_string(), "x")).collect();
        publish(&bus, &topic, &records).await;
        let mut second = bus.subscribe(subscription(&group, &topic)).await.unwrap();
        let giving = async {
            loop {
                match next(&mut first).await {
                    BusEvent::Revoked(revoked) => {
                        first.release(&revoked).await.unwrap();
                        break revoked;
                    }
                    BusEvent::Records(records) => panic!("paused, and received {}", records.len()),
                    _ => {}
                }
            }
        };
        let (revoked, got) = tokio::join!(giving, given(&mut second));
        assert_eq!(revoked.len(), got.len());
        let kept: Vec<_> = mine.iter().filter(|assigned| !revoked.contains(assigned)).cloned().collect();
        second.leave().await.unwrap();
        // The others come back, unpaused; those that stayed are still silent.
        let mut back = 0;
        let mut received = Vec::new();
        let mut expected = 0;
        for assigned in &revoked {
            expected += bus.range(&assigned.partition).await.unwrap().1;
        }
        while back < revoked.len() || i64::try_from(received.len()).unwrap() < expected {
            match next(&mut first).await {
                BusEvent::Assigned(given) => back += given.len(),
                BusEvent::Records(records) => received.extend(records),
                other => panic!("{other:?}"),
            }
        }
        let silent = |r: &Received| kept.iter().any(|own| own.partition.number == r.origin.partition);
        assert!(!received.iter().any(silent), "{protocol:?}: a paused partition was read");
        first.resume(&kept).await.unwrap();
        let (rest, _) = receive(&mut first, 200 - received.len()).await;
        let mut offsets: Vec<_> =
            received.iter().chain(&rest).map(|r| (r.origin.partition, r.origin.offset)).collect();
        offsets.sort_unstable();
        offsets.dedup();
        assert_eq!(offsets.len(), 200, "{protocol:?}");
        first.leave().await.unwrap();
    }
}

#[tokio::test]
async fn a_seek_while_paused_holds_when_it_goes_on() {
    let (bus, topic, group) = stage(settings(), 1).await;
    let records: Vec<_> = (0..50).map(|n| record("k", &n.to_string())).collect();
    publish(&bus, &topic, &records).await;
    let mut member = bus.subscribe(subscription(&group, &topic)).await.unwrap();
    let mine = given(&mut member).await;
    let (received, _) = receive(&mut member, 1).await;
    member.pause(&mine).await.unwrap();
    member.seek(&mine[0].partition, 7).await.unwrap();
    member.resume(&mine).await.unwrap();
    assert_eq!(received[0].origin.offset, 0);
    let (received, _) = receive(&mut member, 43).await;
    assert_eq!(received.iter().map(|r| r.origin.offset).collect::<Vec<_>>(), (7..50).collect::<Vec<_>>());
    member.leave().await.unwrap();
}

#[tokio::test]
async fn a_topic_that_is_deleted_is_an_error_and_not_silence() {
    let (bus, topic, group) =
        stage(settings().property("topic.metadata.refresh.interval.ms", "500"), 1).await;
    let mut member = bus.subscribe(subscription(&group, &topic)).await.unwrap();
    given(&mut member).await;
    delete_topic(&topic).await;
    let end = Instant::now() + DEADLINE;
    let code = loop {
        assert!(Instant::now() < end, "nothing was reported");
        match tokio::time::timeout(DEADLINE, member.next()).await.expect("something is received") {
            Ok(BusEvent::Revoked(partitions)) => {
                member.release(&partitions).await.unwrap();
                break "revoked".to_owned();
            }
            Ok(_) => {}
            Err(error) => break error.to_string(),
        }
    };
    println!("{code}");
    let again = bus.publish(&topic, &[record("k", "v")]).await;
    println!("{again:?}");
    member.leave().await.unwrap();
}
