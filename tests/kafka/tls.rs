//! Kafka behind TLS and SASL: a broker's certificate by a CA of its own, users with passwords.
#![cfg(all(feature = "testing", feature = "kafka-tls"))]
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::time::{Duration, Instant};

use hapax::bus::kafka::{GroupProtocol, KafkaBus, KafkaSettings};
use hapax::bus::{Bus, BusEvent, Record, Subscription, TopicSettings};
use hapax::{Error, Topic};

const DEADLINE: Duration = Duration::from_secs(120);

fn variable(name: &str) -> String {
    std::env::var(name).unwrap_or_else(|_| panic!("{name}: run scripts/test"))
}

/// Without a word on who is there and whom to trust.
fn secure(mechanism: &str) -> KafkaSettings {
    let mut settings = KafkaSettings::new(variable("HAPAX_TEST_KAFKA_TLS"))
        .property("security.protocol", "sasl_ssl")
        .property("sasl.mechanism", mechanism)
        .property("sasl.username", variable("HAPAX_TEST_KAFKA_USER"));
    settings.answer_timeout = DEADLINE; // a rejection comes long before
    settings
}

fn trusting(mechanism: &str, password: &str) -> KafkaSettings {
    secure(mechanism)
        .property("ssl.ca.location", variable("HAPAX_TEST_KAFKA_CA"))
        .property("sasl.password", password)
}

/// The error of a connection, which must come well before the time for an answer is over.
async fn rejected(settings: KafkaSettings) -> Error {
    let began = Instant::now();
    let error = KafkaBus::connect(settings).await.unwrap_err();
    println!("{:?}: {}", began.elapsed(), error.chain());
    assert!(began.elapsed() < DEADLINE / 2, "{:?}", began.elapsed());
    assert!(!error.is_retryable(), "{error:?}");
    assert!(error.to_string().contains(&variable("HAPAX_TEST_KAFKA_TLS")), "{error}");
    error
}

#[tokio::test]
async fn records_travel_over_tls_with_either_mechanism() {
    let password = variable("HAPAX_TEST_KAFKA_PASSWORD");
    let turns = [("PLAIN", GroupProtocol::Classic), ("SCRAM-SHA-256", GroupProtocol::Consumer)];
    for (mechanism, protocol) in turns {
        let mut settings = trusting(mechanism, &password);
        settings.group_protocol = protocol;
        let bus = KafkaBus::connect(settings).await.unwrap();
        let topic = Topic::new(format!("tls-{}", uuid::Uuid::new_v4().simple())).unwrap();
        assert!(bus.create_topic(&topic, TopicSettings::new(1)).await.unwrap());
        let record = Record { payload: Some("over TLS".into()), ..Record::default() };
        for answer in bus.publish(&topic, std::slice::from_ref(&record)).await.unwrap() {
            answer.unwrap();
        }
        let group = format!("group of {topic}");
        let mut member =
            bus.subscribe(Subscription::new(group.as_str(), [topic.clone()]).unwrap()).await.unwrap();
        let mut given = None;
        let received = loop {
            match tokio::time::timeout(DEADLINE, member.next()).await.expect("something is received").unwrap()
            {
                BusEvent::Assigned(partitions) => given = partitions.into_iter().next(),
                BusEvent::Records(mut records) => break records.remove(0),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(received.record.payload, record.payload, "{mechanism}");
        let given = given.expect("a partition");
        member.commit(&[(given.clone(), 1)]).await.unwrap().remove(0).unwrap();
        assert_eq!(bus.committed(&group, &given.partition).await.unwrap(), Some(1), "{mechanism}");
        member.leave().await.unwrap();
    }
}

#[tokio::test]
async fn a_wrong_password_is_refused_at_once() {
    for mechanism in ["PLAIN", "SCRAM-SHA-256"] {
        let error = rejected(trusting(mechanism, "wrong-and-secret")).await;
        assert!(matches!(error, Error::Refused { .. }), "{error:?}");
        assert!(error.to_string().contains("password"), "{error}");
        assert!(!format!("{error:?}").contains("wrong-and-secret"), "{error:?}");
    }
}

#[tokio::test]
async fn a_broker_of_an_unknown_ca_is_not_trusted() {
    let password = variable("HAPAX_TEST_KAFKA_PASSWORD");
    let error = rejected(secure("PLAIN").property("sasl.password", password)).await;
    assert!(matches!(error, Error::Config(_)), "{error:?}");
    assert!(error.to_string().contains("ssl.ca.location"), "{error}");
}

/// TLS spoken to a listener without, and none to one with: the connection is closed, which is all that is known and reported.
#[tokio::test]
async fn the_wrong_listener_is_reported_in_bounded_time() {
    let plain = KafkaSettings::new(variable("HAPAX_TEST_KAFKA_TLS"));
    let mut swapped = trusting("PLAIN", "any");
    swapped.brokers = hapax::testing::kafka::brokers();
    for mut settings in [plain, swapped] {
        settings.answer_timeout = Duration::from_secs(3);
        let began = Instant::now();
        let error = KafkaBus::connect(settings).await.unwrap_err();
        println!("{:?}: {}", began.elapsed(), error.chain());
        assert!(began.elapsed() < DEADLINE / 2, "{:?}", began.elapsed());
        assert!(matches!(error, Error::Unavailable { .. }), "{error:?}");
        assert!(error.to_string().contains("Disconnected"), "{error}");
    }
}

/// The property that names a file that is not there is named before anything is sent.
#[tokio::test]
async fn a_ca_file_that_is_not_there_is_reported() {
    let settings =
        secure("PLAIN").property("sasl.password", "any").property("ssl.ca.location", "nowhere.pem");
    let error = KafkaBus::connect(settings).await.unwrap_err();
    println!("{}", error.chain());
    assert!(matches!(error, Error::Config(_)), "{error:?}");
    assert!(error.to_string().contains("ssl.ca.location"), "{error}");
}
