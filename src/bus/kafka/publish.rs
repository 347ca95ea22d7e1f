//! Publishing: in order, with an answer for each record, and never more in flight than the queue
//! holds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::future_producer::{DeliveryFuture, FutureProducer, FutureRecord};
use rdkafka::types::RDKafkaErrorCode as Code;

use super::link::{Context, Link, code, meaning};
use super::settings::KafkaSettings;
use crate::bus::{OnAnswer, Record};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// How long to wait for room in the queue if none of the records in it is ours.
const AGAIN: Duration = Duration::from_millis(5);

type Producer = FutureProducer<Context>;

/// Approximate overhead of a record on the wire: the batch header and a few lengths.
const FRAME_BYTES: usize = 200;
/// Approximate overhead of each header.
const HEADER_BYTES: usize = 8;

pub(super) struct Publisher {
    settings: KafkaSettings,
    link: Arc<Link>,
    /// Producers by batch size. One that meets a fatal error is replaced: an idempotent producer
    /// publishes nothing after it.
    producers: RwLock<HashMap<usize, Producer>>,
}

/// One call to `publish`.
struct Publishing<'p> {
    topic: &'p Topic,
    records: &'p [Record],
    /// The most bytes of a batch in this topic, if known.
    limit: Option<usize>,
    batch_bytes: usize,
    /// Whether the broker refused a batch that the limit would have allowed.
    takes_less: AtomicBool,
}

impl Publisher {
    pub(super) fn new(settings: &KafkaSettings) -> Result<Self> {
        let publisher = Publisher {
            settings: settings.clone(),
            link: Arc::new(Link::new("publisher")),
            producers: RwLock::default(),
        };
        let _ = publisher.producer(settings.batch_bytes())?;
        Ok(publisher)
    }

    fn producer(&self, batch_bytes: usize) -> Result<Producer> {
        if let Some(producer) =
            self.producers.read().unwrap_or_else(PoisonError::into_inner).get(&batch_bytes)
        {
            return Ok(producer.clone());
        }
        let mut all = self.producers.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(producer) = all.get(&batch_bytes) {
            return Ok(producer.clone());
        }
        let new = producer(&self.settings, batch_bytes, &self.link)?;
        all.insert(batch_bytes, new.clone());
        Ok(new)
    }

    /// The batch size for a topic. The broker refuses a batch larger than the topic allows, with
    /// all of its records, so batches stay below that.
    fn batch_bytes(&self, limit: Option<usize>) -> usize {
        let most = self.settings.batch_bytes();
        limit.map_or(most, |limit| most.min(limit.saturating_sub(FRAME_BYTES).max(1)))
    }

    /// Publishes records to a topic whose batches may have `limit` bytes: to partition `to`, or
    /// where their keys say. Returns false if the topic accepts less.
    pub(super) async fn publish(
        &self,
        topic: &Topic,
        to: Option<i32>,
        limit: Option<usize>,
        records: &[Record],
        on_answer: OnAnswer<'_>,
    ) -> Result<bool> {
        let batch_bytes = self.batch_bytes(limit);
        let producer = self.producer(batch_bytes)?;
        let what = &Publishing { topic, records, limit, batch_bytes, takes_less: AtomicBool::new(false) };
        let answer =
            async |place: usize, delivery: DeliveryFuture| (place, self.answer(what, place, delivery).await);
        let mut under_way = FuturesUnordered::new();
        for (place, record) in records.iter().enumerate() {
            let mut next = to_kafka(topic, to, record);
            loop {
                match producer.send_result(next) {
                    Ok(delivery) => {
                        under_way.push(answer(place, delivery));
                        break;
                    }
                    // The queue is full. Anything in flight is acknowledged or fails within
                    // `publish_timeout`.
                    Err((KafkaError::MessageProduction(Code::QueueFull), again)) => {
                        next = again;
                        match under_way.next().await {
                            Some((place, answer)) => on_answer(place, answer),
                            None => tokio::time::sleep(AGAIN).await,
                        }
                    }
                    Err((error, _)) => {
                        on_answer(place, Err(self.failed(what, error)));
                        break;
                    }
                }
            }
        }
        while let Some((place, answer)) = under_way.next().await {
            on_answer(place, answer);
        }
        Ok(!what.takes_less.load(Ordering::Relaxed))
    }

    /// Makes a topic's producers ask anew which partitions it has. Blocks.
    pub(super) fn refresh(&self, topic: &Topic) {
        use rdkafka::producer::Producer as _;
        // Not under the lock: brokers may take their time.
        let all: Vec<Producer> =
            self.producers.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        for producer in all {
            // If it fails, they ask by themselves some minutes later.
            let _ = producer.client().fetch_metadata(Some(topic.as_str()), self.settings.answer_timeout);
        }
    }

    async fn answer(&self, what: &Publishing<'_>, place: usize, delivery: DeliveryFuture) -> Result<Origin> {
        let doing = || format!("publishing to {}", what.topic);
        match delivery.await {
            // No broker acknowledged these records: librdkafka concluded that they were stored
            // because a later batch was.
            Ok(Ok(delivered)) if delivered.offset < 0 => {
                let what = format!("{}: the acknowledgement has no offset", doing());
                Err(Error::Unavailable { what, source: None })
            }
            Ok(Ok(delivered)) => {
                self.link.answered();
                Ok(Origin::new(what.topic.clone(), delivered.partition, delivered.offset))
            }
            Ok(Err((error, _))) if !what.is_to_blame(place, &error) => {
                Err(Error::unavailable(doing(), error))
            }
            Ok(Err((error, _))) => Err(self.failed(what, error)),
            Err(canceled) => Err(Error::unavailable(doing(), canceled)),
        }
    }

    fn failed(&self, what: &Publishing<'_>, error: KafkaError) -> Error {
        use rdkafka::producer::Producer as _;
        if code(&error) == Some(Code::Fatal) {
            let mut all = self.producers.write().unwrap_or_else(PoisonError::into_inner);
            // Another publisher may have replaced it already.
            let fatal = all.get(&what.batch_bytes).and_then(|current| current.client().fatal_error());
            if let Some((_, reason)) = fatal {
                tracing::warn!(target: "hapax::kafka", reason, "the producer is replaced");
                match producer(&self.settings, what.batch_bytes, &self.link) {
                    Ok(new) => all.insert(what.batch_bytes, new),
                    Err(error) => return error,
                };
            }
        }
        meaning(format!("publishing to {}", what.topic), error)
    }
}

impl Publishing<'_> {
    /// Whether the broker's error concerns this record, and not others in its batch or this
    /// machine's clock.
    fn is_to_blame(&self, place: usize, error: &KafkaError) -> bool {
        let record = &self.records[place];
        match code(error) {
            Some(Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize) => {
                let bytes = record.bytes() + FRAME_BYTES + HEADER_BYTES * record.headers.iter().count();
                let is = self.records.len() == 1 || self.limit.is_some_and(|limit| bytes >= limit);
                self.takes_less.fetch_or(!is, Ordering::Relaxed);
                is
            }
            Some(Code::InvalidTimestamp) => record.timestamp.is_some(),
            _ => true,
        }
    }
}

fn producer(settings: &KafkaSettings, batch_bytes: usize, link: &Arc<Link>) -> Result<Producer> {
    let config = settings.producer(batch_bytes);
    FutureProducer::from_config_and_context(&config, Context(link.clone()))
        .map_err(|e| meaning("making a Kafka producer", e))
}

fn to_kafka<'a>(
    topic: &'a Topic,
    partition: Option<i32>,
    record: &'a Record,
) -> FutureRecord<'a, [u8], [u8]> {
    let mut to = FutureRecord::to(topic.as_str());
    if let Some(number) = partition {
        to = to.partition(number);
    }
    if let Some(key) = &record.key {
        to = to.key(&key[..]);
    }
    if let Some(payload) = &record.payload {
        to = to.payload(&payload[..]);
    }
    if let Some(time) = record.timestamp {
        to = to.timestamp(time.as_micros().div_euclid(1000));
    }
    if !record.headers.is_empty() {
        let headers = record.headers.iter().fold(OwnedHeaders::new(), |headers, (key, value)| {
            headers.insert(Header { key, value: Some(value) })
        });
        to = to.headers(headers);
    }
    to
}

#[cfg(test)]
mod tests {
    use rdkafka::mocking::MockCluster;
    use rdkafka::types::{RDKafkaApiKey, RDKafkaRespErr};

    use super::*;

    const TOPIC: &str = "orders";

    /// Publishes four records, one request each, to a broker that refuses the first request.
    async fn after_a_refusal(in_flight: &str) -> Vec<Result<Origin>> {
        let cluster = MockCluster::new(1).unwrap();
        cluster.create_topic(TOPIC, 1, 1).unwrap();
        // Long enough that all four are on their way before the first answer.
        cluster.broker_round_trip_time(1, Duration::from_millis(300)).unwrap();
        let settings = KafkaSettings::new(cluster.bootstrap_servers());
        let publisher = Publisher::new(&settings).unwrap();
        let batch_bytes = settings.batch_bytes();
        let mut config = settings.producer(batch_bytes);
        config.set("max.in.flight.requests.per.connection", in_flight).set("batch.num.messages", "1");
        let producer = FutureProducer::from_config_and_context(&config, Context(publisher.link.clone()));
        publisher.producers.write().unwrap().insert(batch_bytes, producer.unwrap());
        cluster.request_errors(
            RDKafkaApiKey::Produce,
            &[RDKafkaRespErr::RD_KAFKA_RESP_ERR_NOT_LEADER_FOR_PARTITION],
        );
        let records = vec![Record { payload: Some("x".into()), ..Record::default() }; 4];
        let mut answers = Vec::new();
        let topic = Topic::new(TOPIC).unwrap();
        publisher
            .publish(&topic, Some(0), None, &records, &mut |place, answer| answers.push((place, answer)))
            .await
            .unwrap();
        answers.sort_by_key(|(place, _)| *place);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    #[tokio::test]
    async fn t335_a_refused_batch_is_stored_before_the_next() {
        let answers = after_a_refusal("1").await;
        let offsets: Vec<i64> = answers.into_iter().map(|answer| answer.unwrap().offset).collect();
        assert_eq!(offsets, [0, 1, 2, 3]);
    }

    /// With several requests in flight, as librdkafka has by default.
    #[tokio::test]
    async fn t335_an_acknowledgement_without_an_offset_is_none() {
        let mut answers = after_a_refusal("5").await;
        let first = answers.remove(0).unwrap_err();
        assert_eq!((first.code(), first.is_retryable()), ("unavailable", true), "{first}");
        assert_eq!(answers.remove(0).unwrap().offset, 0, "the second took its place");
    }
}
