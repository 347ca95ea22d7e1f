//! Deliberately broken buses. Each makes a mistake that people make; the suite must catch every one of them.

use std::collections::BTreeMap;
use std::time::Duration;

use async_trait::async_trait;

use super::{BusHarness, MemoryBusHarness};
use crate::bus::{
    Assignment, Bus, BusEvent, Capabilities, MemoryBus, Partition, Record, Subscriber, Subscription,
    TopicInfo, TopicSettings,
};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// What is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BusMutant {
    /// Records of a key go wherever it is the turn of.
    KeyIgnored,
    /// A commit is the last finished record, not the one after it.
    CommitsTheLast,
    /// A commit is taken under whatever epoch the member has now.
    EpochIgnored,
    /// A commit that was refused is called done.
    FencedIsDone,
    /// What was revoked is given back before its member has finished.
    GivesBackAtOnce,
    /// Pausing does nothing.
    PauseIgnored,
    /// A pause or a resumption holds for a partition under whatever epoch the member has it now.
    PausesByName,
    /// Seeking goes one too far back.
    SeeksOneBefore,
    /// What `next` was about to return when it was cancelled is gone.
    LosesWhenCancelled,
    /// Lost partitions are not reported.
    LostUnreported,
    /// What is published to a partition goes where its key says.
    PartitionIgnored,
    /// A partition that is not there is taken for the first.
    AnyPartition,
    /// What retention removed is reported after the first records behind it.
    RemovedLate,
}

/// A broken bus in memory.
#[derive(Debug)]
pub struct MutantBusHarness {
    mutant: BusMutant,
    sound: MemoryBusHarness,
}

impl MutantBusHarness {
    /// With this mistake.
    pub fn new(mutant: BusMutant) -> Self {
        MutantBusHarness { mutant, sound: MemoryBusHarness::new() }
    }
}

#[async_trait]
impl BusHarness for MutantBusHarness {
    type Bus = MutantBus;

    async fn open(&self) -> MutantBus {
        MutantBus { mutant: self.mutant, bus: self.sound.open().await }
    }

    async fn silence(&self, bus: &MutantBus) {
        self.sound.silence(&bus.bus).await;
    }

    async fn wake(&self, bus: &MutantBus) {
        self.sound.wake(&bus.bus).await;
    }

    async fn remove_below(&self, partition: &Partition, offset: i64) {
        self.sound.remove_below(partition, offset).await;
    }

    fn session(&self) -> Duration {
        self.sound.session()
    }
}

/// A memory bus with a mistake.
#[derive(Debug)]
pub struct MutantBus {
    mutant: BusMutant,
    bus: MemoryBus,
}

#[async_trait]
impl Bus for MutantBus {
    async fn publish(&self, topic: &Topic, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        let mut records = records.to_vec();
        if self.mutant == BusMutant::KeyIgnored {
            for record in &mut records {
                record.key = None;
            }
        }
        self.bus.publish(topic, &records).await
    }

    async fn publish_to(&self, partition: &Partition, records: &[Record]) -> Result<Vec<Result<Origin>>> {
        match self.mutant {
            BusMutant::PartitionIgnored => {
                self.bus.range(partition).await?;
                self.bus.publish(&partition.topic, records).await
            }
            BusMutant::AnyPartition if self.bus.range(partition).await.is_err() => {
                self.bus.publish_to(&Partition { number: 0, ..partition.clone() }, records).await
            }
            _ => self.bus.publish_to(partition, records).await,
        }
    }

    async fn subscribe(&self, subscription: Subscription) -> Result<Box<dyn Subscriber>> {
        let member = self.bus.subscribe(subscription).await?;
        Ok(Box::new(MutantMember {
            mutant: self.mutant,
            member,
            epochs: BTreeMap::new(),
            late: None,
            passed: false,
        }))
    }

    async fn create_topic(&self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        self.bus.create_topic(topic, settings).await
    }

    async fn topic(&self, topic: &Topic) -> Result<Option<TopicInfo>> {
        self.bus.topic(topic).await
    }

    async fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.bus.range(partition).await
    }

    async fn committed(&self, group: &str, partition: &Partition) -> Result<Option<i64>> {
        self.bus.committed(group, partition).await
    }

    fn capabilities(&self) -> Capabilities {
        self.bus.capabilities()
    }
}

struct MutantMember {
    mutant: BusMutant,
    member: Box<dyn Subscriber>,
    epochs: BTreeMap<Partition, u64>,
    /// The report that it holds back until records have passed it.
    late: Option<BusEvent>,
    passed: bool,
}

impl MutantMember {
    /// Partitions that are paused or resumed, under today's epochs if those given are ignored.
    fn by_name(&self, partitions: &[Assignment]) -> Vec<Assignment> {
        let mut partitions = partitions.to_vec();
        if self.mutant == BusMutant::PausesByName {
            for assigned in &mut partitions {
                assigned.epoch = self.epochs.get(&assigned.partition).copied().unwrap_or(0);
            }
        }
        partitions
    }
}

#[async_trait]
impl Subscriber for MutantMember {
    async fn next(&mut self) -> Result<BusEvent> {
        loop {
            if let Some(late) = self.late.take_if(|_| self.passed) {
                return Ok(late);
            }
            let event = self.member.next().await?;
            if self.mutant == BusMutant::LosesWhenCancelled {
                tokio::task::yield_now().await;
            }
            match &event {
                BusEvent::Assigned(given) => {
                    self.epochs.extend(given.iter().map(|a| (a.partition.clone(), a.epoch)));
                }
                BusEvent::Revoked(revoked) if self.mutant == BusMutant::GivesBackAtOnce => {
                    self.member.release(revoked).await?;
                }
                BusEvent::Lost(_) if self.mutant == BusMutant::LostUnreported => continue,
                BusEvent::Removed { .. } if self.mutant == BusMutant::RemovedLate => {
                    (self.late, self.passed) = (Some(event), false);
                    continue;
                }
                BusEvent::Records(_) => self.passed = true,
                _ => {}
            }
            return Ok(event);
        }
    }

    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        if self.mutant == BusMutant::PauseIgnored {
            return Ok(());
        }
        self.member.pause(&self.by_name(partitions)).await
    }

    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.member.resume(&self.by_name(partitions)).await
    }

    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        let too_far = i64::from(self.mutant == BusMutant::SeeksOneBefore);
        self.member.seek(partition, (offset - too_far).max(0)).await
    }

    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        let mut offsets = offsets.to_vec();
        for (assigned, offset) in &mut offsets {
            match self.mutant {
                BusMutant::CommitsTheLast => *offset = (*offset - 1).max(0),
                BusMutant::EpochIgnored => {
                    assigned.epoch = self.epochs.get(&assigned.partition).copied().unwrap_or(0);
                }
                _ => {}
            }
        }
        let mut answers = self.member.commit(&offsets).await?;
        if self.mutant == BusMutant::FencedIsDone {
            for answer in &mut answers {
                if matches!(answer, Err(Error::Fenced { .. })) {
                    *answer = Ok(());
                }
            }
        }
        Ok(answers)
    }

    async fn release(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.member.release(partitions).await
    }

    async fn leave(self: Box<Self>) -> Result<()> {
        self.member.leave().await
    }
}
