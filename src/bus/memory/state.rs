//! The state of a memory bus.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use tokio::time::Instant;

use crate::bus::assignments::GroupAssignment;
use crate::bus::group::{PartitionSlot, Step, plan};
use crate::bus::route::{check_offset, check_topic, fenced, no_partition, no_topic, partition_of};
use crate::bus::{Assignment, Partition, Received, Record, Start, Subscription, TopicInfo, TopicSettings};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

#[derive(Default)]
pub(super) struct State {
    topics: BTreeMap<Topic, Records>,
    groups: BTreeMap<Arc<str>, Group>,
}

struct Records {
    settings: TopicSettings,
    partitions: Vec<Log>,
    /// The partition that got the last record without a key.
    rotation: usize,
}

/// A partition's records; the first has the offset `oldest`.
#[derive(Default)]
struct Log {
    oldest: i64,
    records: VecDeque<(Time, Record)>,
    bytes: u64,
}

impl Log {
    fn end(&self) -> i64 {
        self.oldest + self.records.len() as i64
    }

    fn remove_first(&mut self) {
        if let Some((_, record)) = self.records.pop_front() {
            self.oldest += 1;
            self.bytes -= record.bytes() as u64;
        }
    }

    fn sweep(&mut self, settings: &TopicSettings, now: Time) {
        let too_old = |at: Time| settings.retention.is_some_and(|kept| now.since(at) > kept);
        while self.records.front().is_some_and(|(at, _)| too_old(*at))
            || settings.retention_bytes.is_some_and(|max| self.bytes > max && !self.records.is_empty())
        {
            self.remove_first();
        }
    }
}

#[derive(Default)]
struct Group {
    members: BTreeMap<u64, Membership>,
    member_last: u64,
    epoch_last: u64,
    held: BTreeMap<Partition, Holding>,
    committed: BTreeMap<Partition, i64>,
}

struct Membership {
    topics: Vec<Topic>,
    start: Start,
    revoke_timeout: Duration,
    #[cfg_attr(not(feature = "testing"), expect(dead_code, reason = "only tests make members stand still"))]
    silent: Arc<AtomicBool>,
}

struct Holding {
    member: u64,
    epoch: u64,
    /// When it must be released at the latest, if it is revoked.
    revoke_by: Option<Instant>,
}

impl State {
    pub(super) fn create_topic(&mut self, topic: &Topic, settings: TopicSettings) -> Result<bool> {
        check_topic(topic, &settings)?;
        if self.topics.contains_key(topic) {
            return Ok(false);
        }
        let partitions = (0..settings.partitions).map(|_| Log::default()).collect();
        self.topics.insert(topic.clone(), Records { settings, partitions, rotation: 0 });
        Ok(true)
    }

    pub(super) fn topic(&self, topic: &Topic) -> Option<TopicInfo> {
        self.topics.get(topic).map(|records| TopicInfo {
            partitions: records.settings.partitions,
            retention: records.settings.retention,
            compacted: false,
            replication: None,
            min_insync: None,
            unclean_election: false,
        })
    }

    fn log(&self, partition: &Partition) -> Result<&Log> {
        let records = self.topics.get(&partition.topic).ok_or_else(|| no_topic(&partition.topic))?;
        usize::try_from(partition.number)
            .ok()
            .and_then(|number| records.partitions.get(number))
            .ok_or_else(|| no_partition(partition))
    }

    pub(super) fn range(&self, partition: &Partition) -> Result<(i64, i64)> {
        self.log(partition).map(|log| (log.oldest, log.end()))
    }

    /// Publishes to partition `to`, or where each record's key says.
    pub(super) fn publish(
        &mut self,
        topic: &Topic,
        to: Option<i32>,
        records: &[Record],
        now: Time,
    ) -> Result<Vec<Result<Origin>>> {
        if let Some(number) = to {
            self.range(&Partition { topic: topic.clone(), number })?;
        }
        let all = self.topics.get_mut(topic).ok_or_else(|| no_topic(topic))?;
        let mut origins = Vec::with_capacity(records.len());
        for record in records {
            let number = if let Some(number) = to {
                number
            } else if let Some(key) = &record.key {
                partition_of(key, all.settings.partitions)
            } else {
                all.rotation = (all.rotation + 1) % all.partitions.len();
                all.rotation as i32
            };
            let log = &mut all.partitions[number as usize];
            log.sweep(&all.settings, now);
            origins.push(Ok(Origin::new(topic.clone(), number, log.end())));
            log.bytes += record.bytes() as u64;
            log.records
                .push_back((now, Record { timestamp: record.timestamp.or(Some(now)), ..record.clone() }));
        }
        Ok(origins)
    }

    /// Appends the records from an offset on to `into`.
    pub(super) fn read(&self, partition: &Partition, from: i64, max: usize, into: &mut Vec<Received>) {
        let Ok(log) = self.log(partition) else { return };
        let skip = usize::try_from(from - log.oldest).unwrap_or(0);
        for (at, (_, record)) in log.records.iter().enumerate().skip(skip).take(max) {
            let origin = Origin::new(partition.topic.clone(), partition.number, log.oldest + at as i64);
            into.push(Received::new(record.clone(), origin));
        }
    }

    #[cfg(feature = "testing")]
    pub(super) fn remove_below(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        self.range(partition)?;
        if let Some(records) = self.topics.get_mut(&partition.topic) {
            let log = &mut records.partitions[partition.number as usize];
            while log.oldest < offset && !log.records.is_empty() {
                log.remove_first();
            }
        }
        Ok(())
    }

    pub(super) fn committed(&self, group: &str, partition: &Partition) -> Option<i64> {
        self.groups.get(group)?.committed.get(partition).copied()
    }

    /// Checks that a subscription can be served.
    pub(super) fn check(&self, subscription: &Subscription) -> Result<()> {
        for topic in &subscription.topics {
            let records = self.topics.get(topic).ok_or_else(|| no_topic(topic))?;
            if subscription.start != Start::Refuse {
                continue;
            }
            for number in 0..records.settings.partitions {
                let partition = Partition { topic: topic.clone(), number };
                if self.committed(&subscription.group, &partition).is_none() {
                    return Err(Error::NotFound(format!(
                        "the group {:?} has no committed offset for {partition}, and its settings say not to start without one",
                        subscription.group
                    )));
                }
            }
        }
        Ok(())
    }

    pub(super) fn join(&mut self, subscription: &Subscription, silent: Arc<AtomicBool>, now: Instant) -> u64 {
        let group = self.groups.entry(subscription.group.clone()).or_default();
        group.member_last += 1;
        let number = group.member_last;
        let membership = Membership {
            topics: subscription.topics.clone(),
            start: subscription.start,
            revoke_timeout: subscription.revoke_timeout,
            silent,
        };
        group.members.insert(number, membership);
        self.rebalance(&subscription.group, now);
        number
    }

    pub(super) fn leave(&mut self, group: &str, member: u64, now: Instant) {
        if let Some(group) = self.groups.get_mut(group) {
            group.remove_member(member);
        }
        self.rebalance(group, now);
    }

    /// A member's partitions, or `None` if it is no longer a member.
    pub(super) fn mine(&self, group: &str, member: u64) -> Option<Vec<GroupAssignment>> {
        let group = self.groups.get(group)?;
        group.members.get(&member)?;
        let held = group.held.iter().filter(|(_, holding)| holding.member == member);
        Some(
            held.map(|(partition, holding)| GroupAssignment {
                assigned: Assignment { partition: partition.clone(), epoch: holding.epoch },
                revoking: holding.revoke_by.is_some(),
                committed: group.committed.get(partition).copied(),
                oldest: self.log(partition).map_or(0, |log| log.oldest),
            })
            .collect(),
        )
    }

    pub(super) fn commit(
        &mut self,
        group: &str,
        member: u64,
        assigned: &Assignment,
        offset: i64,
    ) -> Result<()> {
        let (_, end) = self.range(&assigned.partition)?;
        let Some(group) = self.groups.get_mut(group) else { return Err(fenced(assigned)) };
        if !group.holds(member, assigned) {
            return Err(fenced(assigned));
        }
        check_offset(&assigned.partition, offset, end)?;
        group.committed.insert(assigned.partition.clone(), offset);
        Ok(())
    }

    pub(super) fn release(&mut self, name: &str, member: u64, partitions: &[Assignment], now: Instant) {
        let Some(group) = self.groups.get_mut(name) else { return };
        for assigned in partitions {
            if group.holds(member, assigned) {
                group.held.remove(&assigned.partition);
            }
        }
        self.rebalance(name, now);
    }

    /// When the first revoked partition is overdue.
    pub(super) fn overdue_at(&self, group: &str) -> Option<Instant> {
        self.groups.get(group)?.held.values().filter_map(|holding| holding.revoke_by).min()
    }

    /// Expels members that did not release revoked partitions in time.
    pub(super) fn expire_overdue(&mut self, name: &str, now: Instant) -> bool {
        let Some(group) = self.groups.get_mut(name) else { return false };
        let late = |holding: &&Holding| holding.revoke_by.is_some_and(|by| by <= now);
        let members: Vec<u64> = group.held.values().filter(late).map(|holding| holding.member).collect();
        for member in &members {
            group.remove_member(*member);
        }
        if !members.is_empty() {
            self.rebalance(name, now);
        }
        !members.is_empty()
    }

    #[cfg(feature = "testing")]
    pub(super) fn expire(&mut self, name: &str, partition: &Partition) -> bool {
        let Some(group) = self.groups.get_mut(name) else { return false };
        let Some(member) = group.held.get(partition).map(|holding| holding.member) else { return false };
        group.remove_member(member);
        self.rebalance(name, Instant::now());
        true
    }

    #[cfg(feature = "testing")]
    pub(super) fn expire_silent(&mut self) {
        let names: Vec<_> = self.groups.keys().cloned().collect();
        for name in names {
            let Some(group) = self.groups.get_mut(&name) else { continue };
            let silent = |m: &&u64| group.members[*m].silent.load(std::sync::atomic::Ordering::SeqCst);
            let members: Vec<u64> = group.members.keys().filter(silent).copied().collect();
            for member in members {
                group.remove_member(member);
            }
            self.rebalance(&name, Instant::now());
        }
    }

    /// Assigns free partitions and revokes those that should move.
    fn rebalance(&mut self, name: &str, now: Instant) {
        let Some(group) = self.groups.get_mut(name) else { return };
        let members: Vec<u64> = group.members.keys().copied().collect();
        let mut topics: Vec<&Topic> = group.members.values().flat_map(|m| &m.topics).collect();
        topics.sort();
        topics.dedup();
        let mut partitions = Vec::new();
        for topic in topics {
            let count = self.topics.get(topic).map_or(0, |records| records.settings.partitions);
            partitions.extend((0..count).map(|number| Partition { topic: topic.clone(), number }));
        }
        let begun: BTreeSet<Topic> =
            group.committed.keys().map(|partition| partition.topic.clone()).collect();
        let slots: Vec<PartitionSlot> = partitions.iter().map(|p| group.slot(p, &members)).collect();
        for step in plan(members.len(), &slots) {
            match step {
                Step::Assign { slot, to } => {
                    let partition = &partitions[slot];
                    group.epoch_last += 1;
                    let holding = Holding { member: members[to], epoch: group.epoch_last, revoke_by: None };
                    group.held.insert(partition.clone(), holding);
                    // "From now on" counts from the group's first assignment of the topic, even if
                    // the partition moves later.
                    if group.members[&members[to]].start == Start::Latest
                        && !begun.contains(&partition.topic)
                        && let Some(records) = self.topics.get(&partition.topic)
                    {
                        let end = records.partitions[partition.number as usize].end();
                        group.committed.entry(partition.clone()).or_insert(end);
                    }
                }
                Step::Revoke { slot } => {
                    if let Some(holding) = group.held.get_mut(&partitions[slot]) {
                        holding.revoke_by = Some(now + group.members[&holding.member].revoke_timeout);
                    }
                }
            }
        }
    }
}

impl Group {
    fn holds(&self, member: u64, assigned: &Assignment) -> bool {
        let holding = self.held.get(&assigned.partition);
        holding.is_some_and(|holding| holding.member == member && holding.epoch == assigned.epoch)
    }

    fn remove_member(&mut self, member: u64) {
        self.members.remove(&member);
        self.held.retain(|_, holding| holding.member != member);
    }

    fn slot(&self, partition: &Partition, members: &[u64]) -> PartitionSlot {
        let holding = self.held.get(partition);
        PartitionSlot {
            holder: holding.and_then(|holding| members.iter().position(|m| *m == holding.member)),
            revoking: holding.is_some_and(|holding| holding.revoke_by.is_some()),
            eligible: (0..members.len())
                .filter(|at| self.members[&members[*at]].topics.contains(&partition.topic))
                .collect(),
        }
    }
}
