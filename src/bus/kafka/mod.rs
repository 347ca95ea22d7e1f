//! Kafka, through librdkafka.
//!
//! Publishing is idempotent and waits for all in-sync replicas. Each group member is polled on its
//! own thread. Rebalancing is cooperative: partitions are assigned and revoked one by one. Offsets
//! are committed only when the subscriber commits them, never automatically. Only records of
//! committed transactions are read.
//!
//! ```no_run
//! use hapax::bus::kafka::{KafkaBus, KafkaSettings};
//! use hapax::bus::{Bus, BusEvent, Record, Subscription};
//! # async fn f() -> hapax::Result<()> {
//! let bus = KafkaBus::connect(KafkaSettings::new("127.0.0.1:9092")).await?;
//! let topic = hapax::Topic::new("orders")?;
//! bus.publish(&topic, &[Record { payload: Some("paid".into()), ..Record::default() }]).await?;
//! let mut member = bus.subscribe(Subscription::new("mailer", [topic])?).await?;
//! loop {
//!     match member.next().await? {
//!         BusEvent::Records(records) => println!("{} records", records.len()),
//!         BusEvent::Revoked(partitions) => member.release(&partitions).await?,
//!         other => println!("{other:?}"),
//!     }
//! }
//! # }
//! ```

mod begin;
mod gaps;
mod inbox;
mod link;
mod member;
mod publish;
mod settings;
mod subscriber;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use rdkafka::admin::{
    AdminClient, AdminOptions, ConfigResource, NewTopic, ResourceSpecifier, TopicReplication,
};
use rdkafka::config::FromClientConfigAndContext;
use rdkafka::consumer::{BaseConsumer, Consumer};
use rdkafka::error::KafkaError;
use rdkafka::types::RDKafkaErrorCode as Code;
use rdkafka::{Offset, TopicPartitionList};

pub use self::settings::{GroupProtocol, Isolation, KafkaSettings};

use self::inbox::{Inbox, Probe};
use self::link::{Context, Link, meaning, meaning_of};
use self::member::Member;
use self::publish::Publisher;
use self::subscriber::KafkaSubscriber;
use super::route::{check_name, check_topic, no_partition, no_topic};
use super::{
    Bus, Capabilities, OnAnswer, Partition, Record, Start, Subscriber, Subscription, TopicInfo, TopicSettings,
};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// How many clients to cache for questions about groups.
const GROUPS_KEPT: usize = 8;
/// How soon to check whether a connection has failed permanently. Each check waits twice as long as
/// the last.
const FIRST_LOOK: Duration = Duration::from_millis(250);
/// How soon to check again whether all brokers know a new topic.
const AGAIN: Duration = Duration::from_millis(50);

type Reader = BaseConsumer<Context>;

/// A Kafka cluster. Clones share their connections.
#[derive(Clone)]
pub struct KafkaBus {
    shared: Arc<Shared>,
    /// What tests see of the members that joined through this instance.
    probe: Arc<Probe>,
}

struct Shared {
    settings: KafkaSettings,
    publisher: Publisher,
    admin: AdminClient<Context>,
    link: Arc<Link>,
    /// Queries the brokers without belonging to a group. It is a consumer, because a producer's
    /// query may create a topic.
    reader: Arc<Reader>,
    groups: Mutex<HashMap<String, Arc<Reader>>>,
    /// Topics that were seen, each with its maximum batch size in bytes, if known.
    known: Mutex<HashMap<Topic, Option<usize>>>,
}

impl fmt::Debug for KafkaBus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaBus").field("brokers", &self.shared.settings.brokers).finish_non_exhaustive()
    }
}

impl KafkaBus {
    /// Connects. Brokers that do not answer within `answer_timeout` are `Unavailable`. A user or
    /// password they reject is `Refused`, and a failed TLS handshake (such as a certificate from an
    /// unknown CA) is `Config`; both are returned as soon as they are known.
    pub async fn connect(settings: KafkaSettings) -> Result<Self> {
        settings.check()?;
        let link = Arc::new(Link::new("reader"));
        let (own, its_link) = (settings.clone(), link.clone());
        // Creating clients opens files and starts threads.
        let shared = blocking(move || -> Result<Shared> {
            let reader = reader(&own, None, &its_link)?;
            let admin =
                AdminClient::from_config_and_context(&own.reader(), Context(Arc::new(Link::new("admin"))))
                    .map_err(|e| meaning("making a Kafka client", e))?;
            Ok(Shared {
                publisher: Publisher::new(&own)?,
                admin,
                link: its_link,
                reader: Arc::new(reader),
                groups: Mutex::default(),
                known: Mutex::default(),
                settings: own,
            })
        })
        .await??;
        let bus = KafkaBus { shared: Arc::new(shared), probe: Arc::default() };
        bus.check_reachable().await?;
        Ok(bus)
    }

    /// Waits until the brokers answer. librdkafka would retry a rejected password or an untrusted
    /// certificate forever, so this asks again with increasing timeouts and checks the connection
    /// in between.
    async fn check_reachable(&self) -> Result<()> {
        let Shared { settings, link, .. } = &*self.shared;
        let by = Instant::now() + settings.answer_timeout;
        let mut patience = FIRST_LOOK;
        loop {
            let left = by.saturating_duration_since(Instant::now());
            let wait = patience.min(left);
            let asking = self.ask(move |reader, _| reader.client().fetch_metadata(None, wait)).await;
            let Err(error) = asking else { return Ok(()) };
            if let Some(rejected) = link.rejected(&format!("connecting to Kafka at {}", settings.brokers)) {
                return Err(rejected);
            }
            if wait == left {
                let reason = link.reason();
                let what = format!(
                    "Kafka at {} did not answer within {:?}{}{reason}",
                    settings.brokers,
                    settings.answer_timeout,
                    if reason.is_empty() { "" } else { ": " }
                );
                return Err(Error::unavailable(what, error));
            }
            patience *= 2;
        }
    }

    /// Makes the members that joined through this instance stop polling, as if their process were
    /// stopped. After `poll_interval_max` their groups expel them.
    #[cfg(feature = "testing")]
    pub fn silence(&self, silent: bool) {
        self.probe.silent.store(silent, std::sync::atomic::Ordering::SeqCst);
    }

    /// How often a partition was paused in librdkafka because too much of it waited in memory, and
    /// the most records of paused partitions that waited in one member.
    #[cfg(feature = "testing")]
    pub fn waited(&self) -> (usize, usize) {
        let load = |count: &std::sync::atomic::AtomicUsize| count.load(std::sync::atomic::Ordering::SeqCst);
        (load(&self.probe.fetch_pauses), load(&self.probe.waited_max))
    }

    /// Queries the brokers.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&Reader, Duration) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T, KafkaError> {
        self.ask_as(self.shared.reader.clone(), question).await
    }

    async fn ask_as<T: Send + 'static>(
        &self,
        reader: Arc<Reader>,
        question: impl FnOnce(&Reader, Duration) -> Result<T, KafkaError> + Send + 'static,
    ) -> Result<T, KafkaError> {
        let timeout = self.shared.settings.answer_timeout;
        let answer = blocking(move || {
            let answer = question(&reader, timeout);
            // Nothing else polls this client, so its log events would pile up.
            for _ in 0..64 {
                let _ = reader.poll(Duration::ZERO);
            }
            answer
        })
        .await;
        let answer = answer.unwrap_or(Err(KafkaError::Canceled));
        if answer.is_ok() {
            self.shared.link.answered();
        }
        answer
    }

    /// The number of partitions and replicas of a topic, or `None` if it does not exist.
    async fn partitions(&self, topic: &Topic) -> Result<Option<(i32, i32)>> {
        check_name(topic)?; // librdkafka treats a name that begins with ^ as a pattern
        let name = topic.clone();
        let looked = self.ask(move |reader, timeout| {
            let metadata = reader.client().fetch_metadata(Some(name.as_str()), timeout)?;
            Ok(metadata.topics().iter().find(|t| t.name() == name.as_str()).map(|found| {
                let error = found.error().or_else(|| {
                    found.partitions().iter().find_map(rdkafka::metadata::MetadataPartition::error)
                });
                let replicas = found.partitions().first().map_or(0, |p| p.replicas().len());
                (error.map(Code::from), found.partitions().len() as i32, replicas as i32)
            }))
        });
        let looking = || format!("looking at the topic {topic}");
        match looked.await.map_err(|e| meaning(looking(), e))? {
            None | Some((Some(Code::UnknownTopic | Code::UnknownTopicOrPartition), ..)) => Ok(None),
            Some((Some(code), ..)) => Err(meaning_of(looking(), code, KafkaError::MetadataFetch(code))),
            Some((None, partitions, replicas)) => Ok(Some((partitions, replicas))),
        }
    }

    /// Checks that a topic exists, since librdkafka would wait for one that does not. Returns the
    /// maximum batch size in bytes, if known.
    async fn must_exist(&self, topic: &Topic) -> Result<Option<usize>> {
        let known = || self.shared.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(limit) = known().get(topic) {
            return Ok(*limit);
        }
        self.partitions(topic).await?.ok_or_else(|| no_topic(topic))?;
        let limit = match self.config(topic).await {
            Ok(config) => config.and_then(|config| value(&config, "max.message.bytes")?.parse().ok()),
            // Permission to publish does not imply permission to read the topic's configuration.
            Err(error) => {
                tracing::debug!(target: "hapax::kafka", %topic, error = %error.chain(), "how large its records may be is not known");
                None
            }
        };
        known().insert(topic.clone(), limit);
        Ok(limit)
    }

    async fn config(&self, topic: &Topic) -> Result<Option<ConfigResource>> {
        let options = AdminOptions::new().request_timeout(Some(self.shared.settings.answer_timeout));
        let looking = || format!("looking at the settings of the topic {topic}");
        let described = self
            .shared
            .admin
            .describe_configs([&ResourceSpecifier::Topic(topic.as_str())], &options)
            .await
            .map_err(|e| meaning(looking(), e))?
            .pop();
        match described {
            Some(Err(code)) => Err(meaning_of(looking(), code, KafkaError::AdminOp(code))),
            Some(Ok(config)) => Ok(Some(config)),
            None => Ok(None),
        }
    }

    fn group_reader(&self, group: &str) -> Result<Arc<Reader>> {
        let mut groups = self.shared.groups.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(reader) = groups.get(group) {
            return Ok(reader.clone());
        }
        if groups.len() >= GROUPS_KEPT {
            groups.clear();
        }
        let reader = Arc::new(reader(&self.shared.settings, Some(group), &self.shared.link)?);
        groups.insert(group.to_owned(), reader.clone());
        Ok(reader)
    }

    async fn committed_of(&self, group: &str, partitions: &[Partition]) -> Result<Vec<Option<i64>>> {
        let bus = self.clone();
        let name = group.to_owned();
        let reader = blocking(move || bus.group_reader(&name)).await??;
        let list = member::to_list(partitions);
        let asking = || format!("asking what the group {group:?} has committed");
        let answer = self.ask_as(reader, |reader, timeout| reader.committed_offsets(list, timeout)).await;
        let answer: TopicPartitionList = answer.map_err(|e| meaning(asking(), e))?;
        partitions
            .iter()
            .map(|partition| {
                let element = answer
                    .find_partition(partition.topic.as_str(), partition.number)
                    .ok_or_else(|| no_partition(partition))?;
                element.error().map_err(|e| meaning(asking(), e))?;
                Ok(match element.offset() {
                    Offset::Offset(offset) => Some(offset),
                    _ => None,
                })
            })
            .collect()
    }

    /// Checks that a subscription can be served.
    async fn check(&self, subscription: &Subscription) -> Result<()> {
        let mut partitions = Vec::new();
        for topic in &subscription.topics {
            let (count, _) = self.partitions(topic).await?.ok_or_else(|| no_topic(topic))?;
            partitions.extend((0..count).map(|number| Partition { topic: topic.clone(), number }));
        }
        if subscription.start == Start::Refuse {
            let committed = self.committed_of(&subscription.group, &partitions).await?;
            if let Some((partition, _)) = partitions.iter().zip(&committed).find(|(_, c)| c.is_none()) {
                return Err(Error::NotFound(format!(
                    "the group {:?} has no committed offset for {partition}, and its settings say not to start without one",
                    subscription.group
                )));
            }
        }
        Ok(())
    }
}

fn value<'c>(config: &'c ConfigResource, name: &str) -> Option<&'c str> {
    config.get(name)?.value.as_deref()
}

#[async_trait]
impl Bus for KafkaBus {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let unknown = || Error::Unavailable { what: format!("publishing to {topic}"), source: None };
        let mut answers: Vec<Result<Origin>> = records.iter().map(|_| Err(unknown())).collect();
        self.publish_each(topic, records, &mut |place, answer| answers[place] = answer).await?;
        Ok(answers)
    }

    async fn publish_each(&self, topic: &Topic, records: &[Record], on_answer: OnAnswer<'_>) -> Result<()> {
        let limit = self.must_exist(topic).await?;
        let mut gone = false;
        let mut note = |place: usize, answer: Result<Origin>| {
            gone |= matches!(answer, Err(Error::NotFound(_)));
            on_answer(place, answer);
        };
        let is_as_known = self.shared.publisher.publish(topic, None, limit, records, &mut note).await?;
        if gone || !is_as_known {
            self.shared.known.lock().unwrap_or_else(PoisonError::into_inner).remove(topic);
        }
        Ok(())
    }

    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let Partition { topic, number } = partition;
        if *number < 0 {
            return Err(no_partition(partition)); // librdkafka would choose one
        }
        let limit = self.must_exist(topic).await?;
        let unknown = || Error::Unavailable { what: format!("publishing to {partition}"), source: None };
        let mut answers: Vec<Result<Origin>> = records.iter().map(|_| Err(unknown())).collect();
        let mut note = |place: usize, answer: Result<Origin>| answers[place] = answer;
        let publishing = self.shared.publisher.publish(topic, Some(*number), limit, records, &mut note);
        let is_as_known = publishing.await?;
        let gone = |answer: &Result<Origin>| matches!(answer, Err(Error::NotFound(_)));
        if answers.iter().any(gone) || !is_as_known {
            self.shared.known.lock().unwrap_or_else(PoisonError::into_inner).remove(topic);
        }
        if answers.iter().any(gone) {
            let (count, _) = self.partitions(topic).await?.ok_or_else(|| no_topic(topic))?;
            if *number >= count {
                return Err(no_partition(partition));
            }
            // It was added since the producer asked last.
            let (shared, topic) = (self.shared.clone(), topic.clone());
            blocking(move || shared.publisher.refresh(&topic)).await?;
            for answer in answers.iter_mut().filter(|answer| gone(answer)) {
                *answer = Err(unknown());
            }
        }
        Ok(answers)
    }

    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        self.check(&subscription).await?;
        let settings = &self.shared.settings;
        let inbox = Inbox::new(settings.buffer_records_max, settings.buffer_bytes_max, self.probe.clone());
        let member = Member {
            link: Arc::new(Link::new(format!("member of {}", subscription.group))),
            inbox: Arc::new(inbox),
            topics: subscription.topics.clone(),
            group: subscription.group.clone(),
            start: subscription.start,
            answer_timeout: settings.answer_timeout,
            revoke_timeout: settings.revoke_timeout(&subscription),
            poll_interval: settings.poll_interval(&subscription),
            began: Arc::default(),
            astray: Arc::default(),
            retired: Arc::default(),
        };
        let config = settings.member(&subscription);
        let subscriber = blocking(move || KafkaSubscriber::join(config, member)).await??;
        Ok(Box::new(subscriber))
    }

    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        check_topic(topic, &settings)?;
        let timeout = self.shared.settings.answer_timeout;
        let retention =
            settings.retention.map_or_else(|| "-1".to_owned(), |retention| retention.as_millis().to_string());
        let bytes = settings.retention_bytes.map_or_else(|| "-1".to_owned(), |bytes| bytes.to_string());
        let replication = TopicReplication::Fixed(self.shared.settings.replication.unwrap_or(-1));
        let new = NewTopic::new(topic.as_str(), settings.partitions, replication)
            .set("retention.ms", &retention)
            .set("retention.bytes", &bytes);
        let options = AdminOptions::new().request_timeout(Some(timeout)).operation_timeout(Some(timeout));
        let making = || format!("making the topic {topic}");
        let made = self.shared.admin.create_topics([&new], &options).await;
        let made = match made.map_err(|e| meaning(making(), e))?.pop() {
            Some(Err((_, Code::TopicAlreadyExists))) => false,
            Some(Err((_, code))) => return Err(meaning_of(making(), code, KafkaError::AdminOp(code))),
            _ => true,
        };
        // Brokers learn of the topic one by one. Wait until it is visible, so that the caller's
        // next request finds it.
        let by = Instant::now() + timeout;
        loop {
            match self.partitions(topic).await {
                Ok(Some(_)) => return Ok(made),
                Err(error) if !error.is_retryable() => return Err(error),
                _ if Instant::now() >= by => {
                    let what = format!(
                        "the topic {topic} was made, and is not known within {}",
                        crate::words::span(timeout)
                    );
                    return Err(Error::Unavailable { what, source: None });
                }
                _ => tokio::time::sleep(AGAIN).await,
            }
        }
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        let Some((partitions, replication)) = self.partitions(topic).await? else { return Ok(None) };
        let Some(config) = self.config(topic).await? else { return Ok(None) };
        let value = |name: &str| value(&config, name);
        let policy = value("cleanup.policy").unwrap_or("delete");
        let deleted = policy.split(',').any(|word| word.trim() == "delete");
        let retention = value("retention.ms").and_then(|ms| ms.parse::<i64>().ok());
        Ok(Some(TopicInfo {
            partitions,
            retention: retention
                .filter(|_| deleted)
                .and_then(|ms| u64::try_from(ms).ok())
                .map(Duration::from_millis),
            compacted: policy.split(',').any(|word| word.trim() == "compact"),
            replication: Some(replication),
            min_insync: value("min.insync.replicas").and_then(|n| n.parse().ok()),
            unclean_election: value("unclean.leader.election.enable") == Some("true"),
        }))
    }

    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        let Some((count, _)) = self.partitions(&partition.topic).await? else {
            return Err(no_topic(&partition.topic));
        };
        if !(0..count).contains(&partition.number) {
            return Err(no_partition(partition));
        }
        let (name, number) = (partition.topic.clone(), partition.number);
        self.ask(move |reader, timeout| reader.fetch_watermarks(name.as_str(), number, timeout))
            .await
            .map_err(|e| meaning(format!("asking for the offsets of {partition}"), e))
    }

    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        let Some((count, _)) = self.partitions(&partition.topic).await? else {
            return Err(no_topic(&partition.topic));
        };
        if !(0..count).contains(&partition.number) {
            return Err(no_partition(partition));
        }
        Ok(self.committed_of(group, std::slice::from_ref(partition)).await?.pop().flatten())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities { bus: "kafka", durable: true, shared: true }
    }
}

fn reader(settings: &KafkaSettings, group: Option<&str>, link: &Arc<Link>) -> Result<Reader> {
    let mut config = settings.reader();
    if let Some(group) = group {
        config.set("group.id", group);
    }
    BaseConsumer::from_config_and_context(&config, Context(link.clone()))
        .map_err(|e| meaning("making a Kafka client", e))
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|e| Error::unavailable("talking to Kafka", e))
}
