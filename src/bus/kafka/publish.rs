//! Publishing: each record with its own answer, in order, and never more under way than the queue holds.

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
use crate::bus::{Record, Tell};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// How long to wait for room if none of the records in the way is ours.
const AGAIN: Duration = Duration::from_millis(5);

type Producer = FutureProducer<Context>;

pub(super) struct Publisher {
    settings: KafkaSettings,
    link: Arc<Link>,
    /// Another one after a fatal error: an idempotent producer that met one publishes nothing more.
    producer: RwLock<Producer>,
}

impl Publisher {
    pub(super) fn new(settings: &KafkaSettings) -> Result<Self> {
        let link = Arc::new(Link::new("publisher"));
        let producer = RwLock::new(producer(settings, &link)?);
        Ok(Publisher { settings: settings.clone(), link, producer })
    }

    fn current(&self) -> Producer {
        self.producer.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) async fn publish(&self, topic: &Topic, records: &[Record], tell: Tell<'_>) {
        let producer = self.current();
        let answer =
            async |place: usize, delivery: DeliveryFuture| (place, self.answer(topic, delivery).await);
        let mut under_way = FuturesUnordered::new();
        for (place, record) in records.iter().enumerate() {
            let mut next = to_kafka(topic, record);
            loop {
                match producer.send_result(next) {
                    Ok(delivery) => {
                        under_way.push(answer(place, delivery));
                        break;
                    }
                    // Full: whatever is under way is acknowledged or given up within `publish_timeout`.
                    Err((KafkaError::MessageProduction(Code::QueueFull), again)) => {
                        next = again;
                        match under_way.next().await {
                            Some((place, answer)) => tell(place, answer),
                            None => tokio::time::sleep(AGAIN).await,
                        }
                    }
                    Err((error, _)) => {
                        tell(place, Err(self.failed(topic, error)));
                        break;
                    }
                }
            }
        }
        while let Some((place, answer)) = under_way.next().await {
            tell(place, answer);
        }
    }

    async fn answer(&self, topic: &Topic, delivery: DeliveryFuture) -> Result<Origin> {
        match delivery.await {
            Ok(Ok(delivered)) => {
                self.link.answered();
                Ok(Origin::new(topic.clone(), delivered.partition, delivered.offset))
            }
            Ok(Err((error, _))) => Err(self.failed(topic, error)),
            Err(canceled) => Err(Error::unavailable(format!("publishing to {topic}"), canceled)),
        }
    }

    fn failed(&self, topic: &Topic, error: KafkaError) -> Error {
        use rdkafka::producer::Producer as _;
        if code(&error) == Some(Code::Fatal) {
            let mut current = self.producer.write().unwrap_or_else(PoisonError::into_inner);
            // Another publisher may have replaced it already.
            if let Some((_, reason)) = current.client().fatal_error() {
                tracing::warn!(target: "hapax::kafka", reason, "the producer is replaced");
                match producer(&self.settings, &self.link) {
                    Ok(new) => *current = new,
                    Err(error) => return error,
                }
            }
        }
        meaning(format!("publishing to {topic}"), error)
    }
}

fn producer(settings: &KafkaSettings, link: &Arc<Link>) -> Result<Producer> {
    FutureProducer::from_config_and_context(&settings.producer(), Context(link.clone()))
        .map_err(|e| meaning("making a Kafka producer", e))
}

fn to_kafka<'a>(topic: &'a Topic, record: &'a Record) -> FutureRecord<'a, [u8], [u8]> {
    let mut to = FutureRecord::to(topic.as_str());
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
