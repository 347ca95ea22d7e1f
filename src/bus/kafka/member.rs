//! A member's thread: the only one that polls librdkafka for it, and so the one on which the group's wishes arrive.
//!
//! It polls while there is room in the inbox. If the subscriber does not come for `poll_interval_max`, it leaves the group
//! until it does: a member that hangs does not keep its partitions.
//!
//! A partition that is wanted back is not waited for inside the callback: librdkafka is told when it was given back, and
//! until then the thread goes on. librdkafka itself delivers nothing meanwhile, of the others neither: a stand-in does.
//!
//! A member that was thrown out joins again with a client of its own: librdkafka 2.12 may come out of that with a fatal
//! error or with partitions that nobody was told of (confluentinc/librdkafka#5541).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message};
use rdkafka::statistics::Statistics;
use rdkafka::types::{RDKafkaErrorCode as Code, RDKafkaRespErr};
use rdkafka::{Offset, TopicPartitionList};

use super::inbox::{Inbox, Seek};
use super::link::{Context, Link, meaning, meaning_of};
use super::stand_in::StandIn;
use crate::bus::route::bytes_of;
use crate::bus::{Partition, Received, Record, Start};
use crate::clock::Time;
use crate::error::Error;
use crate::event::{Headers, Origin};
use crate::id::Topic;

/// How long the thread sleeps when nothing happens: what it looks after by itself (deadlines) is late by this at most.
pub(super) const IDLE: Duration = Duration::from_millis(100);

pub(super) type MemberConsumer = BaseConsumer<Member>;

/// What librdkafka's callbacks know of the member.
#[derive(Clone)]
pub(super) struct Member {
    pub(super) link: Arc<Link>,
    pub(super) inbox: Arc<Inbox>,
    pub(super) topics: Vec<Topic>,
    pub(super) group: Arc<str>,
    pub(super) start: Start,
    pub(super) answer_timeout: Duration,
    pub(super) revoke_timeout: Duration,
    pub(super) poll_interval: Duration,
    /// Whether its client is being closed: what the group still wants of that one, it gets at once.
    pub(super) retired: Arc<AtomicBool>,
}

impl ClientContext for Member {
    fn log(&self, level: RDKafkaLogLevel, about: &str, line: &str) {
        Context(self.link.clone()).log(level, about, line);
    }
    fn stats(&self, _: Statistics) {}
    fn error(&self, error: KafkaError, reason: &str) {
        Context(self.link.clone()).error(error, reason);
    }
}

impl ConsumerContext for Member {
    fn rebalance(&self, consumer: &MemberConsumer, err: RDKafkaRespErr, list: &mut TopicPartitionList) {
        if self.retired.load(Ordering::SeqCst) {
            if err != RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
                unassign(consumer, list);
            }
            return;
        }
        self.link.answered();
        let partitions = self.partitions(list);
        if err == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            self.assign(consumer, list, partitions);
        } else if consumer.assignment_lost() {
            tracing::info!(target: "hapax::kafka", group = %self.group, partitions = %names(&partitions), "lost");
            self.inbox.lost(&partitions);
            unassign(consumer, list);
        } else if self.inbox.wanted(partitions.clone(), Instant::now() + self.revoke_timeout) {
            tracing::info!(target: "hapax::kafka", group = %self.group, partitions = %names(&partitions), "revoked");
            // Nothing of them is delivered any more, so nothing of them need be fetched.
            let _ = consumer.pause(list);
        } else {
            unassign(consumer, list);
        }
    }
}

impl Member {
    fn topic(&self, name: &str) -> Option<&Topic> {
        self.topics.iter().find(|topic| topic.as_str() == name)
    }

    fn partitions(&self, list: &TopicPartitionList) -> Vec<Partition> {
        let of =
            |name: &str, number| self.topic(name).map(|topic| Partition { topic: topic.clone(), number });
        list.elements().iter().filter_map(|e| of(e.topic(), e.partition())).collect()
    }

    fn assign(&self, consumer: &MemberConsumer, list: &mut TopicPartitionList, partitions: Vec<Partition>) {
        let fresh = if self.start == Start::Latest { self.begin_now(consumer, list) } else { None };
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(list),
            _ => consumer.assign(list),
        };
        if let Err(error) = assigned {
            self.inbox.failed(meaning(format!("taking {}", names(&partitions)), error));
            return;
        }
        if let Some(fresh) = fresh.filter(|fresh| fresh.count() > 0)
            && let Err(error) = consumer.commit(&fresh, CommitMode::Sync)
        {
            // Only what comes before the first commit, and only if the partition moves before, would be passed over.
            tracing::warn!(target: "hapax::kafka", group = %self.group, %error, "the beginning was not committed");
        }
        // What was paused when it was here before is not paused now.
        let _ = consumer.resume(list);
        let still = to_list(&self.inbox.paused());
        if still.count() > 0 {
            let _ = consumer.pause(&still);
        }
        if !partitions.is_empty() {
            tracing::info!(target: "hapax::kafka", group = %self.group, partitions = %names(&partitions), "given");
        }
        self.inbox.given(partitions);
    }

    /// "From now on" is from the group's first gift of a partition, whoever has it later: the ends of those partitions of
    /// which nothing was committed are where they begin, and are committed as such.
    fn begin_now(
        &self,
        consumer: &MemberConsumer,
        list: &mut TopicPartitionList,
    ) -> Option<TopicPartitionList> {
        let warn = |error: KafkaError| {
            tracing::warn!(target: "hapax::kafka", group = %self.group, %error, "the end of a topic is not known");
        };
        let committed = consumer.committed_offsets(list.clone(), self.answer_timeout).map_err(warn).ok()?;
        let mut fresh = TopicPartitionList::new();
        for element in committed.elements() {
            if element.offset() != Offset::Invalid {
                continue;
            }
            let (topic, number) = (element.topic(), element.partition());
            let (_, end) =
                consumer.fetch_watermarks(topic, number, self.answer_timeout).map_err(warn).ok()?;
            list.set_partition_offset(topic, number, Offset::Offset(end)).map_err(warn).ok()?;
            fresh.add_partition_offset(topic, number, Offset::Offset(end)).map_err(warn).ok()?;
        }
        Some(fresh)
    }

    /// What the subscriber must know of an error; none: librdkafka goes on by itself.
    fn serious(&self, code: Code) -> Option<Error> {
        match code {
            Code::AutoOffsetReset => Some(Error::NotFound(format!(
                "the group {:?} has committed nothing of a partition, or what it committed is gone, and is told not \
                 to start by itself ({})",
                self.group,
                self.link.reason()
            ))),
            Code::UnknownTopic
            | Code::UnknownPartition
            | Code::UnknownTopicOrPartition
            | Code::TopicAuthorizationFailed
            | Code::GroupAuthorizationFailed
            | Code::ClusterAuthorizationFailed
            | Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::InvalidSessionTimeout
            | Code::InconsistentGroupProtocol
            | Code::UnsupportedVersion
            | Code::UnsupportedFeature
            | Code::NotImplemented => {
                let doing = format!("being a member of the group {:?} ({})", self.group, self.link.reason());
                Some(meaning_of(doing, code, KafkaError::MessageConsumption(code)))
            }
            _ => None,
        }
    }

    /// What follows from an error that librdkafka does not recover from.
    fn fatal(&self, code: Code) -> End {
        match code {
            Code::FencedInstanceId
            | Code::UnreleasedInstanceId
            | Code::GroupAuthorizationFailed
            | Code::UnsupportedVersion
            | Code::UnsupportedFeature
            | Code::UnsupportedAssignor
            | Code::GroupMaxSizeReached => {
                let doing = format!("being a member of the group {:?} ({})", self.group, self.link.reason());
                End::Over(meaning_of(doing, code, KafkaError::MessageConsumptionFatal(code)))
            }
            _ => End::Again,
        }
    }

    pub(super) fn received(&self, message: &BorrowedMessage<'_>) -> Option<Received> {
        let topic = self.topic(message.topic())?.clone();
        let headers = message.headers().map_or_else(Headers::default, |headers| {
            headers
                .iter()
                .map(|h| (h.key.to_owned(), Bytes::copy_from_slice(h.value.unwrap_or_default())))
                .collect()
        });
        let record = Record {
            key: message.key().map(Bytes::copy_from_slice),
            payload: message.payload().map(Bytes::copy_from_slice),
            headers,
            timestamp: message.timestamp().to_millis().map(Time::from_millis),
        };
        Some(Received { record, origin: Origin::new(topic, message.partition(), message.offset()) })
    }
}

/// How a client's time as a member ended.
pub(super) enum End {
    /// The subscriber wanted to.
    Left,
    /// It was thrown out, or its client is of no use any more: another one joins.
    Again,
    /// It cannot go on.
    Over(Error),
}

/// The thread, as long as one client is the member.
pub(super) fn run(consumer: &MemberConsumer, stand_in: &mut StandIn) -> End {
    let member = consumer.context().clone();
    let inbox = &member.inbox;
    let mut seeks: Vec<Seek> = Vec::new();
    let mut told: Option<Code> = None;
    let mut idle = 0;
    let mut polled = Instant::now();
    loop {
        if inbox.is_leaving() {
            return End::Left;
        }
        // Either this thread stood still, and the group has gone on without it; or the subscriber does not come for what is
        // there, and the group shall.
        if polled.elapsed() >= member.poll_interval || !inbox.is_listened_to(member.poll_interval) {
            return End::Again;
        }
        if inbox.silent.load(Ordering::SeqCst) {
            inbox.bell.wait(IDLE);
            continue;
        }
        seeks.extend(inbox.seeks());
        if !seeks.is_empty() {
            stand_in.stop(); // it is elsewhere
        }
        seeks.retain_mut(|seek| !try_seek(consumer, inbox, seek));
        if let Some(partitions) = inbox.returned(|| consumer.assignment_lost()) {
            unassign(consumer, &to_list(&partitions));
        }
        stand_in.tend(&member, consumer);
        if !inbox.has_room() {
            inbox.bell.wait(IDLE);
            continue;
        }
        polled = Instant::now();
        if stand_in.poll(&member) {
            idle = 0;
        }
        match consumer.poll(Duration::ZERO) {
            Some(Ok(message)) => {
                (idle, told) = (0, None);
                member.link.delivered();
                if let Some(received) = member.received(&message) {
                    let bytes = bytes_of(&received.record);
                    inbox.push(received, bytes);
                }
            }
            Some(Err(error)) => match error.rdkafka_error_code() {
                Some(Code::PollExceeded) => return End::Again,
                Some(code) if matches!(error, KafkaError::MessageConsumptionFatal(_)) => {
                    return member.fatal(code);
                }
                Some(code) if told != Some(code) => {
                    told = Some(code);
                    member.serious(code).into_iter().for_each(|error| inbox.failed(error));
                }
                _ => {}
            },
            // Also after an event that was no message: the queue is empty when nothing comes twice.
            None if idle == 0 => idle = 1, // also after a record of the stand-in
            None => {
                idle = 0;
                member.link.drained();
                inbox.bell.wait(IDLE);
            }
        }
    }
}

/// True when it is answered. A partition that was given a moment ago may not be ready for it.
fn try_seek(consumer: &MemberConsumer, inbox: &Inbox, seek: &mut Seek) -> bool {
    let (topic, number) = (seek.partition.topic.as_str(), seek.partition.number);
    let sought = consumer.seek(topic, number, Offset::Offset(seek.offset), Duration::from_secs(1));
    let answer = match sought {
        Ok(()) => {
            // This thread is the only one that polls: whatever it polls from here on comes from behind the seek.
            inbox.clear(&seek.partition, seek.offset);
            Ok(())
        }
        Err(_) if Instant::now() < seek.by => return false,
        Err(error) => Err(meaning(format!("going to {} of {}", seek.offset, seek.partition), error)),
    };
    let (closed, _) = tokio::sync::oneshot::channel();
    let _ = std::mem::replace(&mut seek.answer, closed).send(answer); // whoever does not wait any more needs none
    true
}

pub(super) fn unassign(consumer: &MemberConsumer, list: &TopicPartitionList) {
    let done = match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
        _ => consumer.unassign(),
    };
    if let Err(error) = done {
        tracing::warn!(target: "hapax::kafka", %error, "partitions could not be given back");
    }
}

pub(super) fn to_list(partitions: &[Partition]) -> TopicPartitionList {
    let mut list = TopicPartitionList::with_capacity(partitions.len());
    for partition in partitions {
        list.add_partition(partition.topic.as_str(), partition.number);
    }
    list
}

fn names(partitions: &[Partition]) -> String {
    partitions.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
}
