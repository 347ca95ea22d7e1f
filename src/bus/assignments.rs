//! What a member believes is assigned to it, and the events that bring it in line with the group.

use std::collections::BTreeMap;

use super::{Assignment, BusEvent, Partition, Received};
use crate::error::{Error, Result};

/// A partition of this member, as the group records it.
#[derive(Debug, Clone)]
pub(crate) struct GroupAssignment {
    pub assigned: Assignment,
    /// Whether the group asks for it back.
    pub revoking: bool,
    /// The offset the group has committed.
    pub committed: Option<i64>,
    /// The offset of its oldest record.
    pub oldest: i64,
}

/// A partition of this member, as the member records it.
#[derive(Debug, Clone, Copy)]
struct Held {
    epoch: u64,
    /// The next offset to deliver.
    position: i64,
    paused: bool,
    /// Whether the member knows that it is revoked.
    revoked: bool,
}

/// A member's partitions.
#[derive(Debug, Default)]
pub(crate) struct Assignments {
    held: BTreeMap<Partition, Held>,
    /// The latest epoch under which each partition was released. The group may learn of a release
    /// later.
    returned: BTreeMap<Partition, u64>,
    /// Rotates which partition delivers first, so that a busy one does not starve the others.
    rotation: usize,
}

impl Assignments {
    /// The next event if the group and the member disagree. Losses come first, then revocations.
    pub(crate) fn next_event(&mut self, mine: &[GroupAssignment]) -> Option<BusEvent> {
        let held = |p: &Partition, epoch| {
            mine.iter().any(|m| m.assigned.partition == *p && m.assigned.epoch == epoch)
        };
        let lost: Vec<_> = self
            .held
            .iter()
            .filter(|(partition, own)| !held(partition, own.epoch))
            .map(|(partition, own)| Assignment { partition: partition.clone(), epoch: own.epoch })
            .collect();
        if !lost.is_empty() {
            self.drop_all(&lost);
            return Some(BusEvent::Lost(lost));
        }
        let mut revoked = Vec::new();
        for m in mine.iter().filter(|m| m.revoking) {
            if let Some(own) = self.held.get_mut(&m.assigned.partition).filter(|own| !own.revoked) {
                own.revoked = true;
                revoked.push(m.assigned.clone());
            }
        }
        if !revoked.is_empty() {
            return Some(BusEvent::Revoked(revoked));
        }
        let returned =
            |m: &GroupAssignment| self.returned.get(&m.assigned.partition) >= Some(&m.assigned.epoch);
        let is_new = |m: &&GroupAssignment| !self.held.contains_key(&m.assigned.partition) && !returned(m);
        let new: Vec<_> = mine.iter().filter(is_new).collect();
        if new.is_empty() {
            return None;
        }
        for m in &new {
            let position = m.committed.unwrap_or(m.oldest);
            let own = Held { epoch: m.assigned.epoch, position, paused: false, revoked: false };
            self.held.insert(m.assigned.partition.clone(), own);
        }
        Some(BusEvent::Assigned(new.into_iter().map(|m| m.assigned.clone()).collect()))
    }

    /// The partitions that deliver, each with its epoch and position. Starts with another one each
    /// time.
    pub(crate) fn readable(&self) -> Vec<(Assignment, i64)> {
        let mut all: Vec<_> = self
            .held
            .iter()
            .filter(|(_, own)| !own.paused && !own.revoked)
            .map(|(partition, own)| {
                (Assignment { partition: partition.clone(), epoch: own.epoch }, own.position)
            })
            .collect();
        if !all.is_empty() {
            let first = self.rotation % all.len();
            all.rotate_left(first);
        }
        all
    }

    /// The event for records that were read: they are delivered, unless retention removed records
    /// before them. Then that is the event, and they are read again. Offsets of these buses have no
    /// gaps except those that retention leaves.
    pub(crate) fn deliver(&mut self, mut records: Vec<Received>) -> BusEvent {
        let mut ends = BTreeMap::new();
        for (at, received) in records.iter().enumerate() {
            let (partition, offset) = (received.partition(), received.origin.offset);
            let Some(own) = self.held.get_mut(&partition) else { continue };
            let before = ends.get(&partition).copied();
            let next = before.unwrap_or(own.position);
            if next < offset && before.is_none() {
                own.position = offset;
                return BusEvent::Removed { partition, offsets: next..offset };
            }
            if next < offset {
                records.truncate(at); // the rest comes after `Removed`
                break;
            }
            ends.insert(partition, offset + 1);
        }
        for (partition, end) in ends {
            self.rotation = self.rotation.wrapping_add(1);
            if let Some(own) = self.held.get_mut(&partition) {
                own.position = end;
            }
        }
        BusEvent::Records(records)
    }

    /// Pauses or resumes the partitions that are still assigned under the same epoch.
    pub(crate) fn pause(&mut self, partitions: &[Assignment], paused: bool) {
        for assigned in partitions {
            if let Some(own) =
                self.held.get_mut(&assigned.partition).filter(|own| own.epoch == assigned.epoch)
            {
                own.paused = paused;
            }
        }
    }

    /// Continues at another offset.
    pub(crate) fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        if offset < 0 {
            return Err(Error::invalid("offset", format!("{offset} of {partition}; offsets begin at 0")));
        }
        let own = self.held.get_mut(partition).ok_or_else(|| Error::Fenced {
            what: format!("{partition} is not in this member's assignments"),
        })?;
        own.position = offset;
        Ok(())
    }

    /// Notes that partitions were released.
    pub(crate) fn release(&mut self, partitions: &[Assignment]) {
        self.drop_all(partitions);
        for assigned in partitions {
            let epoch = self.returned.entry(assigned.partition.clone()).or_default();
            *epoch = assigned.epoch.max(*epoch);
        }
    }

    /// Removes partitions that are still assigned under the given epochs.
    fn drop_all(&mut self, partitions: &[Assignment]) {
        for assigned in partitions {
            if self.held.get(&assigned.partition).is_some_and(|own| own.epoch == assigned.epoch) {
                self.held.remove(&assigned.partition);
            }
        }
    }
}
