//! Reads what stays while librdkafka waits for what goes.
//!
//! From the moment the group wants a partition back until `incremental_unassign` is called, librdkafka pauses *all* partitions of
//! the client (`rd_kafka_rebalance_op_incr` calls `rd_kafka_assignment_pause`; 2.12.1, `rdkafka_cgrp.c:1260`), in both group
//! protocols, and nothing that an application may call lifts that pause but the answer itself (`rd_kafka_resume_partitions` is
//! about another flag). An answer with an empty list would lift it, but says that the partitions were given back: they are out of
//! what the member tells the group from the beginning of the wait on (`rdkafka_cgrp.c:1318`). So a second client, which belongs to
//! no group and commits nothing, reads the partitions that stay from where the first one stopped. When that goes on it delivers
//! some records again, which the inbox knows and drops.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::config::FromClientConfigAndContext as _;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaResult;
use rdkafka::{ClientConfig, Offset, TopicPartitionList};

use super::inbox::Inbox;
use super::link::{Context, Link};
use super::member::{Member, MemberConsumer, to_list};
use crate::bus::route::bytes_of;
use crate::bus::{Partition, Start};

/// Most waits are shorter than it takes to start a client.
const AFTER: Duration = Duration::from_millis(500);

/// The second client, while there is one.
pub(super) struct StandIn {
    config: ClientConfig,
    link: Arc<Link>,
    began: Option<Instant>,
    reader: Option<Reader>,
}

struct Reader {
    consumer: BaseConsumer<Context>,
    paused: BTreeSet<Partition>,
}

impl StandIn {
    /// One for a member with this configuration.
    pub(super) fn new(member_config: &ClientConfig, group: &str) -> Self {
        let mut config = member_config.clone();
        // It has a group's name because librdkafka assigns nothing without one, and never joins it.
        config.set("group.protocol", "classic").set("auto.offset.reset", "error");
        for name in ["group.instance.id", "group.remote.assignor", "partition.assignment.strategy"] {
            config.remove(name);
        }
        let link = Arc::new(Link::new(format!("stand-in of a member of {group}")));
        StandIn { config, link, began: None, reader: None }
    }

    /// Begins, or ends, if it is time to.
    pub(super) fn tend(&mut self, member: &Member, consumer: &MemberConsumer) {
        let inbox = &member.inbox;
        if !inbox.is_returning() {
            self.began = None;
            self.stop();
            return;
        }
        let began = *self.began.get_or_insert_with(Instant::now);
        if let Some(reader) = &mut self.reader {
            reader.follow(inbox);
        } else if began.elapsed() >= AFTER {
            self.began = Some(Instant::now()); // if it cannot, it is tried again after a while
            match self.start(member, consumer) {
                Ok(reader) => self.reader = reader,
                Err(error) => {
                    tracing::debug!(target: "hapax::kafka", group = %member.group, %error, "what stays is not read meanwhile");
                }
            }
        }
    }

    fn start(&self, member: &Member, consumer: &MemberConsumer) -> KafkaResult<Option<Reader>> {
        let staying = member.inbox.staying();
        let unknown: Vec<_> =
            staying.iter().filter(|(_, next)| next.is_none()).map(|(p, _)| p.clone()).collect();
        // Of these nothing was delivered since they were given: they are where the group's offset is.
        let committed = if unknown.is_empty() {
            TopicPartitionList::new()
        } else {
            consumer.committed_offsets(to_list(&unknown), Duration::from_secs(1))?
        };
        let mut list = TopicPartitionList::new();
        for (partition, next) in staying {
            let (topic, number) = (partition.topic.as_str(), partition.number);
            let stored = || {
                let found = committed.find_partition(topic, number)?;
                found.error().ok()?; // not known: it waits for the member
                match found.offset() {
                    Offset::Offset(offset) => Some(Offset::Offset(offset)),
                    _ if member.start == Start::Earliest => Some(Offset::Beginning),
                    _ => None,
                }
            };
            if let Some(offset) = next.map(Offset::Offset).or_else(stored) {
                list.add_partition_offset(topic, number, offset)?;
            }
        }
        if list.count() == 0 {
            return Ok(None);
        }
        let mut reader =
            BaseConsumer::from_config_and_context(&self.config, Context(Arc::clone(&self.link)))?;
        let bell = member.inbox.bell.clone();
        reader.set_nonempty_callback(move || bell.ring());
        reader.assign(&list)?;
        tracing::debug!(target: "hapax::kafka", group = %member.group, partitions = list.count(), "what stays is read meanwhile");
        Ok(Some(Reader { consumer: reader, paused: BTreeSet::new() }))
    }

    /// Takes in what it has; whether there was anything.
    pub(super) fn poll(&self, member: &Member) -> bool {
        let Some(reader) = &self.reader else { return false };
        match reader.consumer.poll(Duration::ZERO) {
            Some(Ok(message)) => {
                if let Some(received) = member.received(&message) {
                    let bytes = bytes_of(&received.record);
                    member.inbox.push_meanwhile(received, bytes);
                }
                true
            }
            Some(Err(error)) => {
                // Whatever it is, the member itself meets it when it goes on.
                tracing::debug!(target: "hapax::kafka", group = %member.group, %error, "reading what stays");
                false
            }
            None => false,
        }
    }

    /// Ends it; if it is still needed, another one begins where things are then.
    pub(super) fn stop(&mut self) {
        if let Some(reader) = self.reader.take() {
            // To close it takes a moment, which the member does not have.
            let closing =
                std::thread::Builder::new().name("hapax-kafka-end".into()).spawn(move || drop(reader));
            if let Err(error) = closing {
                tracing::debug!(target: "hapax::kafka", %error, "no thread to close a client on; it was closed here");
            }
        }
    }
}

impl Reader {
    /// Pauses what the subscriber has paused.
    fn follow(&mut self, inbox: &Inbox) {
        let paused: BTreeSet<_> = inbox.paused().into_iter().collect();
        if paused == self.paused {
            return;
        }
        let mine = |partition: &&Partition| {
            let assigned = self.consumer.assignment();
            assigned.is_ok_and(|all| all.find_partition(partition.topic.as_str(), partition.number).is_some())
        };
        let stop: Vec<_> = paused.difference(&self.paused).filter(mine).cloned().collect();
        let go: Vec<_> = self.paused.difference(&paused).filter(mine).cloned().collect();
        let _ = self.consumer.pause(&to_list(&stop)); // what comes all the same waits in the inbox
        let _ = self.consumer.resume(&to_list(&go));
        self.paused = paused;
    }
}
