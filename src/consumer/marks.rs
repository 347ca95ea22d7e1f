//! Markers: which offsets transactional batches are working on, committed before they begin.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ConsumerSettings;
use super::arrival::{Arrival, Source};
use crate::bus::Partition;
use crate::error::Result;
use crate::id::{Scope, Topic};
use crate::ledger::{Ledger, Marker};

/// The markers of this process.
#[derive(Debug, Default)]
pub(super) struct Marks {
    partitions: Mutex<BTreeMap<Partition, Mark>>,
    /// One marking at a time: a later one must not be overtaken by an earlier one.
    turn: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default, Clone)]
struct Mark {
    /// The first offsets of batches under way, each with a number of its own.
    under_way: BTreeSet<(i64, u64)>,
    /// Up to where the committed marker reaches.
    covered: Option<i64>,
    /// The offsets of a batch of somebody else's that never ended, until each of them is through: a marker covers them as long.
    inherited: Option<(i64, i64)>,
    number: u64,
}

/// Batches under way, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    marks: Arc<Marks>,
    batches: Vec<(Partition, (i64, u64))>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut partitions = self.marks.lock();
        for (partition, batch) in &self.batches {
            if let Some(mark) = partitions.get_mut(partition) {
                mark.under_way.remove(batch);
            }
        }
    }
}

impl Marks {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Partition, Mark>> {
        self.partitions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when committed markers cover these deliveries. A marker reaches some batches further than asked for, so
    /// that the next ones find themselves covered and need no commit of their own.
    pub(super) async fn cover(
        self: &Arc<Self>,
        ledger: &dyn Ledger,
        settings: &ConsumerSettings,
        lanes: &[Vec<Arrival>],
    ) -> Result<UnderWay> {
        let mut needed: BTreeMap<Partition, (i64, i64)> = BTreeMap::new();
        for arrival in lanes.iter().flatten() {
            let Source::Bus(assigned) = &arrival.source else { continue };
            let offset = arrival.received.origin.offset;
            let range = needed.entry(assigned.partition.clone()).or_insert((offset, offset));
            *range = (range.0.min(offset), range.1.max(offset));
        }
        let mut under_way = UnderWay { marks: Arc::clone(self), batches: Vec::new() };
        for (partition, (first, _)) in &needed {
            let mut partitions = self.lock();
            let mark = partitions.entry(partition.clone()).or_default();
            mark.number += 1;
            let batch = (*first, mark.number);
            mark.under_way.insert(batch);
            under_way.batches.push((partition.clone(), batch));
        }
        let _turn = self.turn.lock().await;
        let ahead = i64::try_from(settings.batch_max).unwrap_or(i64::MAX);
        let markers: Vec<Marker> = {
            let partitions = self.lock();
            needed
                .iter()
                .filter_map(|(partition, (first, last))| {
                    let mark = partitions.get(partition)?;
                    if mark.covered.is_some_and(|covered| *last <= covered) {
                        return None;
                    }
                    let first = mark.under_way.first().map_or(*first, |(lowest, _)| *lowest);
                    let last = last.saturating_add(ahead);
                    let (from, to) = mark.inherited.unwrap_or((first, last));
                    let (topic, partition) = (partition.topic.clone(), partition.number);
                    Some(Marker { topic, partition, first: first.min(from), last: last.max(to) })
                })
                .collect()
        };
        if markers.is_empty() {
            return Ok(under_way);
        }
        ledger.mark(&settings.scope, &markers).await?;
        crate::crash_point!("consumer.marked");
        let mut partitions = self.lock();
        for marker in markers {
            let partition = Partition { topic: marker.topic, number: marker.partition };
            if let Some(mark) = partitions.get_mut(&partition) {
                mark.covered = Some(marker.last);
            }
        }
        drop(partitions);
        Ok(under_way)
    }

    /// The offsets of batches that never ended, of partitions that were just given.
    pub(super) async fn unfinished(
        &self,
        ledger: &dyn Ledger,
        scope: &Scope,
        partitions: &[Partition],
    ) -> Result<Vec<(Partition, i64, i64)>> {
        let mut by_topic: BTreeMap<Topic, Vec<i32>> = BTreeMap::new();
        for partition in partitions {
            self.lock().remove(partition);
            by_topic.entry(partition.topic.clone()).or_default().push(partition.number);
        }
        let mut unfinished = Vec::new();
        for (topic, numbers) in by_topic {
            for marker in ledger.markers(scope, &topic, &numbers).await? {
                let partition = Partition { topic: marker.topic, number: marker.partition };
                // It is ours to clear once they are through; our own batches still need one of their own.
                let inherited = Some((marker.first, marker.last));
                let mark = Mark { covered: Some(i64::MIN), inherited, ..Mark::default() };
                self.lock().insert(partition.clone(), mark);
                unfinished.push((partition, marker.first, marker.last));
            }
        }
        Ok(unfinished)
    }

    /// The inherited offsets of a partition are through, all of them.
    pub(super) fn cleared(&self, partition: &Partition) {
        if let Some(mark) = self.lock().get_mut(partition) {
            mark.inherited = None;
        }
    }

    /// Everything that was begun of these partitions has ended well: nothing of them is suspect, but what was so before we had
    /// them and did not have its turn. With each comes up to where it is through, if anything of it was received.
    pub(super) async fn clear(
        &self,
        ledger: &dyn Ledger,
        scope: &Scope,
        partitions: &[(Partition, Option<i64>)],
    ) {
        let mut markers = Vec::new();
        for (partition, position) in partitions {
            let Some(mark) = self.lock().remove(partition).filter(|mark| mark.covered.is_some()) else {
                continue;
            };
            let mut marker = Marker::clear(partition.topic.clone(), partition.number);
            if let Some((first, last)) = mark.inherited
                && position.is_none_or(|position| position <= last)
            {
                marker.first = position.map_or(first, |position| position.max(first));
                marker.last = last;
            }
            markers.push(marker);
        }
        if markers.is_empty() {
            return;
        }
        // One that stays only means that some events are run one by one.
        if let Err(error) = ledger.mark(scope, &markers).await {
            tracing::debug!(target: "hapax", error = %error.chain(), "markers were not cleared");
        }
    }
}
