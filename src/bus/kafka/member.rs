//! A member's thread. It alone polls librdkafka for the member, so rebalance callbacks run on it.
//!
//! It polls while there is room in the inbox. If the subscriber does not call `next` for
//! `poll_interval_max`, the thread leaves the group until it does, so a member that hangs does not
//! keep its partitions.
//!
//! The callback does not wait for a revoked partition. The thread continues and unassigns the
//! partition once it was released. Meanwhile librdkafka delivers nothing, not even from other
//! partitions, so subscribers must release at once.
//!
//! An expelled member joins again with a new client: librdkafka 2.12 may otherwise end up with a
//! fatal error, or with partitions it never reported (confluentinc/librdkafka#5541).

use std::collections::BTreeMap;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer, ConsumerContext, RebalanceProtocol};
use rdkafka::error::KafkaError;
use rdkafka::message::{BorrowedMessage, Headers as _, Message};
use rdkafka::statistics::Statistics;
use rdkafka::types::{RDKafkaErrorCode as Code, RDKafkaRespErr};
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::begin::Beginnings;
use super::inbox::{Inbox, Pushed, Seek};
use super::link::{Context, Link, meaning, meaning_of};
use crate::bus::{Partition, Received, Record, Start};
use crate::clock::Time;
use crate::error::Error;
use crate::event::{Headers, Origin};
use crate::id::Topic;

/// How long the thread sleeps when nothing happens. Its deadlines are late by at most this.
pub(super) const IDLE: Duration = Duration::from_millis(100);

/// How long the broker may take to say whether the records of a gap were removed.
const LOOK_MAX: Duration = Duration::from_secs(2);
/// How long it is asked. A gap about which it does not answer until then is reported as removed.
const UNKNOWN_MAX: Duration = Duration::from_secs(30);

pub(super) type MemberConsumer = BaseConsumer<Member>;

/// The member's state that librdkafka's callbacks use.
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
    /// The number of partitions each topic had when the group started, if it started at the end.
    /// All its commits carry it.
    pub(super) began: Arc<Mutex<BTreeMap<Topic, i32>>>,
    /// Whether its client could not read or commit where to start. A new client then tries again.
    pub(super) astray: Arc<AtomicBool>,
    /// Whether its client is being closed. It then answers rebalances at once.
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
        } else if self.inbox.revoke(partitions.clone(), Instant::now() + self.revoke_timeout) {
            tracing::info!(target: "hapax::kafka", group = %self.group, partitions = %names(&partitions), "revoked");
            // Nothing of them is delivered any more, so do not fetch them either.
            let _ = consumer.pause(list);
        } else {
            unassign(consumer, list);
        }
    }
}

impl Member {
    pub(super) fn topic(&self, name: &str) -> Option<&Topic> {
        self.topics.iter().find(|topic| topic.as_str() == name)
    }

    fn partitions(&self, list: &TopicPartitionList) -> Vec<Partition> {
        let of =
            |name: &str, number| self.topic(name).map(|topic| Partition { topic: topic.clone(), number });
        list.elements().iter().filter_map(|e| of(e.topic(), e.partition())).collect()
    }

    fn assign(&self, consumer: &MemberConsumer, list: &TopicPartitionList, partitions: Vec<Partition>) {
        let begin = match self.beginnings(consumer, list) {
            Ok(begin) => begin,
            // `Latest` must know where to start. Otherwise librdkafka finds the committed offsets
            // itself.
            Err(error) if self.start == Start::Latest => {
                tracing::warn!(target: "hapax::kafka", group = %self.group, %error, "where to begin is not known; joining again");
                self.astray.store(true, Ordering::SeqCst);
                Beginnings::unknown(list)
            }
            Err(error) => {
                tracing::debug!(target: "hapax::kafka", group = %self.group, %error, "what is committed is not known");
                Beginnings::unknown(list)
            }
        };
        let assigned = match consumer.rebalance_protocol() {
            RebalanceProtocol::Cooperative => consumer.incremental_assign(&begin.list),
            _ => consumer.assign(&begin.list),
        };
        if self.astray.load(Ordering::SeqCst) {
            return; // the assignment was accepted, but none of it is reported
        }
        if let Err(error) = assigned {
            self.inbox.failed(meaning(format!("taking {}", names(&partitions)), error));
            return;
        }
        if begin.fresh.count() > 0
            && let Err(error) = consumer.commit(&begin.fresh, CommitMode::Sync)
        {
            // The next owner would start at a later end and skip the records in between.
            tracing::warn!(target: "hapax::kafka", group = %self.group, %error, "where to begin could not be committed; joining again");
            self.astray.store(true, Ordering::SeqCst);
            return;
        }
        let _flow = self.inbox.flow();
        // A partition that was paused under an earlier assignment is not paused now.
        let _ = consumer.resume(list);
        let still = to_list(&self.inbox.fetch_paused());
        if still.count() > 0 {
            let _ = consumer.pause(&still);
        }
        if !partitions.is_empty() {
            tracing::info!(target: "hapax::kafka", group = %self.group, partitions = %names(&partitions), "partitions assigned");
        }
        let next = |partition: &Partition| begin.next(partition);
        self.inbox.assigned(partitions.into_iter().map(|p| (p.clone(), next(&p))).collect());
    }

    /// The error to report to the subscriber, or `None` if librdkafka recovers on its own.
    fn serious(&self, code: Code) -> Option<Error> {
        match code {
            Code::AutoOffsetReset => Some(Error::NotFound(format!(
                "group {:?} has no committed offset for a partition, or the broker no longer has that offset, and its \
                 start is `Refuse` ({})",
                self.group,
                self.link.reason()
            ))),
            Code::NotImplemented | Code::UnsupportedCompressionType => Some(cannot_decompress(&self.group)),
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
            | Code::UnsupportedFeature => {
                let doing = format!("being a member of the group {:?} ({})", self.group, self.link.reason());
                Some(meaning_of(doing, code, KafkaError::MessageConsumption(code)))
            }
            _ => None,
        }
    }

    /// How to proceed after an error that librdkafka does not recover from.
    fn fatal(&self, code: Code) -> End {
        match code {
            Code::FencedInstanceId
            | Code::UnreleasedInstanceId
            | Code::GroupAuthorizationFailed
            | Code::UnsupportedVersion
            | Code::UnsupportedFeature
            | Code::UnsupportedAssignor => {
                let doing = format!("being a member of the group {:?} ({})", self.group, self.link.reason());
                End::Over(meaning_of(doing, code, KafkaError::MessageConsumptionFatal(code)))
            }
            _ => End::Again,
        }
    }

    pub(super) fn received(&self, message: &BorrowedMessage<'_>) -> Option<Received> {
        let topic = self.topic(message.topic())?.clone();
        let (headers, unreadable) = headers_of(message);
        let record = Record {
            key: message.key().map(Bytes::copy_from_slice),
            payload: message.payload().map(Bytes::copy_from_slice),
            headers,
            timestamp: message.timestamp().to_millis().map(Time::from_millis),
        };
        let origin = Origin::new(topic, message.partition(), message.offset());
        Some(Received { record, origin, unreadable })
    }

    /// Passes on which partitions librdkafka has reset. Called before a record is buffered: the reset
    /// came before it.
    fn note_resets(&self) {
        for reset in self.link.resets() {
            self.inbox.reset(reset.as_ref());
        }
    }

    /// Asks the broker whether gaps are records that retention removed. Without an answer it is asked
    /// again, and what lies behind the gap waits.
    fn look_at_gaps(&self, consumer: &MemberConsumer, gaps: Vec<(Partition, Range<i64>, Instant)>) {
        for (partition, gap, since) in gaps {
            let (topic, number) = (partition.topic.as_str(), partition.number);
            match consumer.fetch_watermarks(topic, number, LOOK_MAX) {
                Ok((oldest, _)) => self.inbox.answered(&partition, &gap, Some(oldest)),
                Err(error) if since.elapsed() < UNKNOWN_MAX => {
                    tracing::debug!(target: "hapax::kafka", group = %self.group, %partition, %error, "whether records were removed is not known yet");
                    return; // the thread must poll; the others have their turn
                }
                Err(error) => {
                    tracing::warn!(target: "hapax::kafka", group = %self.group, %partition, %error, "whether records were removed is not known; they are reported as removed");
                    self.inbox.answered(&partition, &gap, None);
                }
            }
        }
    }
}

/// A record's headers, and which of them cannot be read. rdkafka panics on a name that is not
/// UTF-8.
fn headers_of(message: &BorrowedMessage<'_>) -> (Headers, Option<String>) {
    let Some(headers) = message.headers() else { return (Headers::default(), None) };
    let mut unreadable = Vec::new();
    let read = (0..headers.count()).filter_map(|at| {
        let read = catch_unwind(AssertUnwindSafe(|| {
            let header = headers.get(at);
            (header.key.to_owned(), Bytes::copy_from_slice(header.value.unwrap_or_default()))
        }));
        read.map_err(|_| unreadable.push(at + 1)).ok()
    });
    let read: Headers = read.collect();
    let problem = (!unreadable.is_empty())
        .then(|| format!("headers {unreadable:?} have names that are not UTF-8 and were dropped"));
    (read, problem)
}

/// The codecs of Kafka's clients.
const CODECS: [&str; 4] = ["gzip", "snappy", "lz4", "zstd"];

/// The error for a batch that this build of librdkafka cannot read.
fn cannot_decompress(group: &str) -> Error {
    let features = ClientConfig::new().create_native_config().and_then(|c| c.get("builtin.features"));
    Error::Unsupported(codecs_message(group, &features.unwrap_or_default()))
}

/// Names the codecs that a librdkafka with these `builtin.features` cannot read, and the remedy.
fn codecs_message(group: &str, features: &str) -> String {
    let has = |codec: &&str| features.split(',').any(|feature| feature.trim() == *codec);
    let (with, without): (Vec<_>, Vec<_>) = CODECS.into_iter().partition(has);
    let or_none = |codecs: Vec<&str>, none: &str| {
        if codecs.is_empty() { none.to_owned() } else { codecs.join(", ") }
    };
    format!(
        "records for the group {group:?} are compressed with a codec that this build cannot read ({}; it reads {}): build hapax \
         with its own librdkafka instead of the system's, or have the producers, or the topic's compression.type, use one of those",
        or_none(without, "none of gzip, snappy, lz4 and zstd"),
        or_none(with, "only what is not compressed"),
    )
}

/// How a client's membership ended.
pub(super) enum End {
    /// The subscriber left.
    Left,
    /// It was expelled, or its client is unusable. A new client joins.
    Again,
    /// The member cannot continue.
    Over(Error),
}

/// Runs the thread as long as one client is the member.
pub(super) fn run(consumer: &MemberConsumer) -> End {
    let member = consumer.context().clone();
    let inbox = &member.inbox;
    let mut seeks: Vec<Seek> = Vec::new();
    let mut rewound: Option<Instant> = None;
    let mut reported: Option<Code> = None;
    let mut unreadable: Vec<Code> = Vec::new();
    let (mut idle, mut pace) = (0, Pace::default());
    let mut polled = Instant::now();
    let mut looked = Instant::now();
    loop {
        if inbox.is_leaving() {
            return End::Left;
        }
        // Either this thread was stopped and the group has expelled the member, or the subscriber
        // no longer calls `next` and the member must leave the group.
        if polled.elapsed() >= member.poll_interval || !inbox.is_listened_to(member.poll_interval) {
            return End::Again;
        }
        if inbox.probe.silent.load(Ordering::SeqCst) {
            inbox.wake_up.wait(IDLE);
            continue;
        }
        seeks.extend(inbox.seeks());
        seeks.retain_mut(|seek| !try_seek(consumer, inbox, seek));
        if rewound.is_none_or(|at: Instant| at.elapsed() >= IDLE) {
            rewound = rewind(consumer, inbox);
        }
        if let Some(partitions) = inbox.returned(|| consumer.assignment_lost()) {
            unassign(consumer, &to_list(&partitions));
        }
        if member.astray.load(Ordering::SeqCst) {
            return End::Again;
        }
        member.note_resets();
        if looked.elapsed() >= IDLE {
            member.look_at_gaps(consumer, inbox.unknown_gaps());
            looked = Instant::now();
        }
        if !inbox.has_room() {
            inbox.wake_up.wait(IDLE);
            continue;
        }
        polled = Instant::now();
        match consumer.poll(Duration::ZERO) {
            Some(Ok(message)) => {
                (idle, reported) = (0, None);
                crate::crash_point!("kafka.polled");
                member.link.delivered();
                if let Some(received) = member.received(&message) {
                    let bytes = received.record.bytes();
                    member.note_resets();
                    pace.on_pushed(&buffer(consumer, inbox, received, bytes), inbox);
                }
            }
            Some(Err(error)) => match error.rdkafka_error_code() {
                Some(Code::PollExceeded) => return End::Again,
                Some(code) if matches!(error, KafkaError::MessageConsumptionFatal(_)) => {
                    return member.fatal(code);
                }
                Some(code) if reported != Some(code) => {
                    reported = Some(code);
                    member.serious(code).into_iter().for_each(|error| inbox.failed(error));
                    if matches!(code, Code::BadCompression | Code::BadMessage) && !unreadable.contains(&code)
                    {
                        unreadable.push(code);
                        tracing::warn!(target: "hapax::kafka", group = %member.group, %error, "records cannot be read");
                    }
                }
                _ => {}
            },
            // `poll` also returns `None` after an event that is not a message. The queue is empty
            // when it does so twice.
            None if idle == 0 => idle = 1,
            None => {
                idle = 0;
                member.link.drained();
                inbox.wake_up.wait(IDLE);
            }
        }
    }
}

/// Tries a seek. Returns true once it is answered. A partition that was assigned a moment ago may
/// not be ready for it.
fn try_seek(consumer: &MemberConsumer, inbox: &Inbox, seek: &mut Seek) -> bool {
    let (topic, number) = (seek.partition.topic.as_str(), seek.partition.number);
    let sought = consumer.seek(topic, number, Offset::Offset(seek.offset), Duration::from_secs(1));
    let answer = match sought {
        Ok(()) => {
            // Only this thread polls, so everything it polls from here on comes after the seek.
            inbox.clear(&seek.partition, seek.offset);
            Ok(())
        }
        Err(_) if Instant::now() < seek.by => return false,
        Err(error) => Err(meaning(format!("going to {} of {}", seek.offset, seek.partition), error)),
    };
    let (closed, _) = tokio::sync::oneshot::channel();
    let _ = std::mem::replace(&mut seek.answer, closed).send(answer); // the caller may have stopped waiting
    true
}

/// Goes back to where partitions were dropped from memory. Returns when it failed, if it did: it is
/// tried again until the partition can be read from there, or is gone.
fn rewind(consumer: &MemberConsumer, inbox: &Inbox) -> Option<Instant> {
    for (partition, offset) in inbox.rewinds() {
        let (topic, number) = (partition.topic.as_str(), partition.number);
        match consumer.seek(topic, number, Offset::Offset(offset), Duration::from_secs(1)) {
            Ok(()) => inbox.clear(&partition, offset),
            Err(error) => {
                tracing::debug!(target: "hapax::kafka", %partition, offset, %error, "cannot go back yet");
                return Some(Instant::now()); // the thread must poll
            }
        }
    }
    None
}

/// Buffers a record, and tells librdkafka what that changes.
fn buffer(consumer: &MemberConsumer, inbox: &Inbox, received: Received, bytes: usize) -> Pushed {
    let _flow = inbox.flow();
    let pushed = inbox.push(received, bytes);
    match &pushed {
        Pushed::Full(partition) => {
            // If it fails, the next record tries again.
            if let Err(error) = pause_fetching(consumer, std::slice::from_ref(partition)) {
                tracing::debug!(target: "hapax::kafka", %partition, %error, "fetching was not paused");
            }
        }
        Pushed::Anew(partition) => {
            let _ = consumer.resume(&to_list(std::slice::from_ref(partition)));
        }
        Pushed::Open | Pushed::Waits => {}
    }
    pushed
}

/// Pauses partitions in librdkafka, which drops what it has fetched of them. Holding `flow`.
pub(super) fn pause_fetching(consumer: &MemberConsumer, partitions: &[Partition]) -> Result<(), KafkaError> {
    if !partitions.is_empty() {
        consumer.pause(&to_list(partitions))?;
        consumer.context().inbox.set_fetch_paused(partitions, true);
    }
    Ok(())
}

/// Resumes partitions in librdkafka. Holding `flow`.
pub(super) fn resume_fetching(consumer: &MemberConsumer, partitions: &[Partition]) -> Result<(), KafkaError> {
    if !partitions.is_empty() {
        consumer.resume(&to_list(partitions))?;
        consumer.context().inbox.set_fetch_paused(partitions, false);
    }
    Ok(())
}

/// How fast records of paused partitions are taken: so many, and then a pause. A consumer whose
/// deliveries are paused for moments finds little more than before in memory, while one that stands
/// still has its limit soon, and the records of the others, which come behind these, do not wait
/// for long.
#[derive(Default)]
struct Pace {
    taken: usize,
}

/// Eight records in a millisecond.
const PACE_RECORDS: usize = 40;
const PACE_WAIT: Duration = Duration::from_millis(5);

impl Pace {
    fn on_pushed(&mut self, pushed: &Pushed, inbox: &Inbox) {
        self.taken = if *pushed == Pushed::Waits { self.taken + 1 } else { 0 };
        if self.taken >= PACE_RECORDS {
            self.taken = 0;
            inbox.wake_up.wait(PACE_WAIT);
        }
    }
}

pub(super) fn unassign(consumer: &MemberConsumer, list: &TopicPartitionList) {
    let done = match consumer.rebalance_protocol() {
        RebalanceProtocol::Cooperative => consumer.incremental_unassign(list),
        _ => consumer.unassign(),
    };
    if let Err(error) = done {
        tracing::warn!(target: "hapax::kafka", %error, "partitions could not be unassigned");
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t83_a_codec_that_is_missing_is_named_with_the_remedy() {
        let message = codecs_message("mailer", "gzip,snappy");
        for part in
            ["\"mailer\"", "(lz4, zstd; it reads gzip, snappy)", "its own librdkafka", "compression.type"]
        {
            assert!(message.contains(part), "{part}: {message}");
        }
        // As librdkafka writes them, among others.
        let message = codecs_message("mailer", "ssl, gzip, snappy, lz4_x, sasl, zstd");
        assert!(message.contains("(lz4; it reads gzip, snappy, zstd)"), "{message}");
        let message = codecs_message("mailer", "gzip,snappy,lz4,zstd");
        assert!(message.contains("(none of gzip, snappy, lz4 and zstd; it reads gzip"), "{message}");
        assert!(codecs_message("mailer", "").contains("it reads only what is not compressed"));
        assert!(matches!(cannot_decompress("mailer"), Error::Unsupported(said) if said.contains("zstd")));
    }
}
