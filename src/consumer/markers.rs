//! Markers: up to which offset a partition was given to transactional batches, committed before
//! those begin.
//!
//! A batch that dies with its process leaves nothing behind but its marker. The partition's next
//! owner runs everything up to the marker as *suspects*: at full speed, in whole batches, but the
//! exact offsets of each batch are noted before it begins. A batch that survives clears all of its
//! events. If the process dies again, the noted offsets are narrowed down: those events run in
//! batches of a sixteenth of the size, with nothing beside them, then in a sixteenth of that, until
//! one runs alone under a committed lease. Only a death there counts. So a killed process costs its
//! successor next to nothing, an event that kills its process is found within a few deaths, and its
//! neighbours are not blamed. (Sixteenths, not halves: every step costs a death of the process, and
//! small batches cost only commits.)

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use super::ConsumerSettings;
use super::arrival::{Arrival, Source};
use super::worker::Suspects;
use crate::bus::Partition;
use crate::error::Result;
use crate::id::{Scope, Topic};
use crate::ledger::{Ledger, Marker};

/// Into how many smaller batches to split one that died with its process.
const PIECES: usize = 16;
/// How far a marker reaches beyond the current batches, at least, so that the next batches are
/// covered without another commit.
const AHEAD_MIN: usize = 256;

/// The markers of this process.
#[derive(Debug, Default)]
pub(super) struct Markers {
    partitions: Mutex<BTreeMap<Partition, PartitionMarker>>,
    numbers: AtomicU64,
    /// Allows one marking at a time, so that an earlier one cannot overtake a later one. The first
    /// marks for all that wait.
    marking: tokio::sync::Mutex<()>,
}

#[derive(Debug, Default)]
struct PartitionMarker {
    /// Batches in flight, by number.
    under_way: BTreeMap<u64, Handed>,
    /// Up to which offset the committed marker reaches, and since when.
    covered: Option<(i64, Instant)>,
    /// What was in flight when another process died, until all of it is finished.
    inherited: Option<Marker>,
}

/// A batch's part of a partition.
#[derive(Debug, Default, Clone)]
struct Handed {
    last: i64,
    /// Its suspects.
    tried: Vec<i64>,
    /// The number of events in the whole batch.
    batch: usize,
    /// Whether a committed marker lists its suspects.
    noted: bool,
}

impl PartitionMarker {
    fn needs(&self, handed: &Handed, expiry: Duration) -> bool {
        let covered = self.covered.filter(|(_, since)| since.elapsed() < expiry);
        (!handed.noted && !handed.tried.is_empty()) || covered.is_none_or(|(last, _)| handed.last > last)
    }

    /// The marker that covers everything in flight.
    fn marker(&self, partition: &Partition, ahead: i64) -> Marker {
        let handed = || self.under_way.values();
        let last = handed().map(|handed| handed.last.saturating_add(ahead)).max();
        let last = last.max(self.covered.map(|(last, _)| last));
        let last = last.max(self.inherited.as_ref().map(|marker| marker.last));
        let mut marker = Marker::new(partition.topic.clone(), partition.number, last.unwrap_or(-1));
        let tried: BTreeSet<i64> = handed().flat_map(|handed| handed.tried.iter().copied()).collect();
        marker.tried = tried.into_iter().collect();
        let suspect = handed().filter(|handed| !handed.tried.is_empty());
        let batch = suspect.map(|handed| handed.batch).max().unwrap_or(0);
        marker.batch = u32::try_from(batch).unwrap_or(u32::MAX);
        marker
    }
}

/// Batches in flight, until this is dropped.
#[derive(Debug)]
pub(super) struct UnderWay {
    marks: Arc<Markers>,
    number: u64,
    partitions: Vec<Partition>,
}

impl Drop for UnderWay {
    fn drop(&mut self) {
        let mut partitions = self.marks.lock();
        for partition in &self.partitions {
            if let Some(mark) = partitions.get_mut(partition) {
                mark.under_way.remove(&self.number);
            }
        }
    }
}

impl Markers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Partition, PartitionMarker>> {
        self.partitions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns once committed markers cover these deliveries.
    pub(super) async fn cover(
        self: &Arc<Self>,
        ledger: &dyn Ledger,
        settings: &ConsumerSettings,
        queues: &[Vec<Arrival>],
    ) -> Result<UnderWay> {
        let under_way = self.begin(queues);
        let _marking = self.marking.lock().await;
        let ahead = i64::try_from(settings.batch_max.max(AHEAD_MIN)).unwrap_or(i64::MAX);
        // A sweep removes markers older than the retention, so renew them well before.
        let expiry = settings.retention / 4;
        let (markers, numbers) = {
            let partitions = self.lock();
            let is_mine = |mark: &PartitionMarker| {
                mark.under_way.get(&under_way.number).is_some_and(|handed| mark.needs(handed, expiry))
            };
            if !under_way.partitions.iter().filter_map(|of| partitions.get(of)).any(is_mine) {
                return Ok(under_way);
            }
            let needy = partitions
                .iter()
                .filter(|(_, mark)| mark.under_way.values().any(|handed| mark.needs(handed, expiry)));
            let numbers = |mark: &PartitionMarker| mark.under_way.keys().copied().collect::<Vec<_>>();
            needy.map(|(of, mark)| (mark.marker(of, ahead), numbers(mark))).unzip::<_, _, Vec<_>, Vec<_>>()
        };
        ledger.set_markers(&settings.scope, &markers).await?;
        crate::crash_point!("consumer.marked");
        let mut partitions = self.lock();
        for (marker, numbers) in markers.into_iter().zip(numbers) {
            let partition = Partition { topic: marker.topic, number: marker.partition };
            let Some(mark) = partitions.get_mut(&partition) else { continue };
            mark.covered = Some((marker.last, Instant::now()));
            for number in numbers {
                if let Some(handed) = mark.under_way.get_mut(&number) {
                    handed.noted = true;
                }
            }
        }
        drop(partitions);
        Ok(under_way)
    }

    /// Registers a batch.
    fn begin(self: &Arc<Self>, queues: &[Vec<Arrival>]) -> UnderWay {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let batch = queues.iter().map(Vec::len).sum();
        let mut partitions = self.lock();
        let mut mine = BTreeSet::new();
        for arrival in queues.iter().flatten() {
            let Source::Bus(assigned) = &arrival.source else { continue };
            let offset = arrival.received.origin.offset;
            let mark = partitions.entry(assigned.partition.clone()).or_default();
            let suspect = mark.inherited.as_ref().is_some_and(|marker| offset <= marker.last);
            let handed = mark.under_way.entry(number).or_insert(Handed { batch, ..Handed::default() });
            handed.last = handed.last.max(offset);
            handed.tried.extend(suspect.then_some(offset));
            mine.insert(assigned.partition.clone());
        }
        UnderWay { marks: Arc::clone(self), number, partitions: mine.into_iter().collect() }
    }

    /// What was in flight when a process died, for partitions that were just assigned.
    pub(super) async fn unfinished(
        &self,
        ledger: &dyn Ledger,
        scope: &Scope,
        partitions: &[Partition],
    ) -> Result<Vec<Suspects>> {
        let mut by_topic: BTreeMap<Topic, Vec<i32>> = BTreeMap::new();
        for partition in partitions {
            self.lock().remove(partition);
            by_topic.entry(partition.topic.clone()).or_default().push(partition.number);
        }
        let mut unfinished = Vec::new();
        for (topic, numbers) in by_topic {
            for marker in ledger.markers(scope, &topic, &numbers).await? {
                let partition = Partition { topic: marker.topic.clone(), number: marker.partition };
                let batch_max = usize::try_from(marker.batch).unwrap_or(usize::MAX);
                unfinished.push(Suspects {
                    partition: partition.clone(),
                    last: marker.last,
                    tried: marker.tried.iter().copied().collect(),
                    batch_max: (batch_max / PIECES).max(1),
                });
                self.lock().insert(
                    partition,
                    PartitionMarker { inherited: Some(marker), ..PartitionMarker::default() },
                );
            }
        }
        Ok(unfinished)
    }

    /// Notes that all inherited offsets of a partition are finished.
    pub(super) fn cleared(&self, partition: &Partition) {
        if let Some(mark) = self.lock().get_mut(partition) {
            mark.inherited = None;
        }
    }

    /// Clears the markers of released partitions, each given with its commit point if anything of
    /// it was received. Everything that was started has ended well, so only inherited suspects that
    /// did not run yet remain. A partition with deliveries still in flight keeps its marker: its
    /// next owner finds some suspects, nothing worse.
    pub(super) async fn clear(
        &self,
        ledger: &dyn Ledger,
        scope: &Scope,
        partitions: &[(Partition, Option<i64>)],
    ) {
        let mut markers = Vec::new();
        for (partition, position) in partitions {
            let Some(mark) = self.lock().remove(partition).filter(|mark| mark.under_way.is_empty()) else {
                continue;
            };
            let marker = match mark.inherited {
                Some(marker) if position.is_none_or(|position| position <= marker.last) => {
                    let tried = marker.tried.iter().filter(|offset| Some(**offset) >= *position);
                    Marker { tried: tried.copied().collect(), ..marker }
                }
                _ if mark.covered.is_none() => continue, // it was never marked
                _ => Marker::clear(partition.topic.clone(), partition.number),
            };
            markers.push(marker);
        }
        if markers.is_empty() {
            return;
        }
        // A marker that stays only means that some batches are noted before they begin.
        if let Err(error) = ledger.set_markers(scope, &markers).await {
            tracing::debug!(target: "hapax", error = %error.chain(), "markers were not cleared");
        }
    }
}
