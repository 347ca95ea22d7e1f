//! Waiting events: held ones that are due, dead ones to be copied out, and the markers of
//! transactional batches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Entry, Identity, Token, Week};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// A dead event that was copied out: its identity, its week, and the entry's token.
pub type PublishedDead = (Identity, Week, Token);

/// The held events of a scope that may be claimed now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Due {
    /// The entries with their bytes, oldest first.
    pub entries: Vec<Entry>,
    /// How many events the scope holds with their bytes, in any state.
    pub held: u64,
}

/// Which held events a consumer asks for. Those of a partition go to the member that owns it, so
/// that only one member of a group takes up each.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Share {
    /// The topics that the member consumes, each with the partitions it owns. It never gets events
    /// of other topics; events without a topic go to every member. `None` matches every event.
    pub topics: Option<BTreeMap<Topic, BTreeSet<i32>>>,
    /// Events that have been due, or dead, for longer than this go to every member that consumes
    /// their topic, so that nothing is stranded while partitions move between members.
    pub grace: Duration,
    /// The maximum size of the answer, as [`Entry::bytes`] counts: it ends with the entry that
    /// reaches it. `None` means unlimited.
    pub bytes_max: Option<usize>,
    /// Only events that have been due, or dead, since this time. A caller that can do nothing about
    /// a whole page continues behind it this way.
    pub since: Option<Time>,
    /// How many of those to skip: several may have the same time.
    pub skip: usize,
}

impl Share {
    /// A share that matches every event.
    pub fn all() -> Self {
        Share::default()
    }

    /// How many entries of these sizes fit into the answer.
    pub(crate) fn fill(&self, sizes: impl IntoIterator<Item = usize>) -> usize {
        let mut bytes = 0;
        let is_open = |size: &usize| {
            let open = self.bytes_max.is_none_or(|max| bytes < max);
            bytes += *size;
            open
        };
        sizes.into_iter().take_while(is_open).count()
    }

    /// Whether an answer is full, so that there may be more.
    pub fn is_full(&self, entries: &[Entry], limit: usize) -> bool {
        let bytes = || entries.iter().map(Entry::bytes).sum::<usize>();
        entries.len() >= limit || self.bytes_max.is_some_and(|max| bytes() >= max)
    }

    /// Whether the share includes an event of this origin that has been due, or dead, since `at`.
    pub fn takes(&self, origin: Option<&Origin>, at: Time, now: Time) -> bool {
        if self.since.is_some_and(|since| at < since) {
            return false;
        }
        let (Some(topics), Some(origin)) = (&self.topics, origin) else { return true };
        let mine = topics.get(&origin.topic);
        mine.is_some_and(|mine| mine.contains(&origin.partition) || at.plus(self.grace) <= now)
    }
}

/// The offset of a partition up to which records were passed to transactional batches. It is
/// committed before a batch begins and removed by a clean stop. A marker that exists when a
/// partition is assigned means that a process died; the records it had in flight are suspect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// The topic.
    pub topic: Topic,
    /// The partition.
    pub partition: i32,
    /// The highest offset passed to a batch. Everything from the committed offset to it is suspect.
    /// Negative means empty.
    pub last: i64,
    /// Suspects that were being run again, in order. If there are any, a process died while running
    /// them.
    pub tried: Vec<i64>,
    /// The maximum batch size with which they were run.
    pub batch: u32,
}

impl Marker {
    /// A marker up to an offset.
    pub fn new(topic: Topic, partition: i32, last: i64) -> Self {
        Marker { topic, partition, last, tried: Vec::new(), batch: 0 }
    }

    /// A marker that removes the one stored for a partition.
    pub fn clear(topic: Topic, partition: i32) -> Self {
        Marker::new(topic, partition, -1)
    }

    /// Whether it covers nothing, and so removes the stored one.
    pub fn is_empty(&self) -> bool {
        self.last < 0
    }

    /// `tried` as it is stored: the batch size, the first offset, then the distance to each next
    /// one.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres", feature = "redis")), allow(dead_code))]
    pub(crate) fn tried_text(&self) -> String {
        let mut text = self.batch.to_string();
        let mut before = 0;
        for offset in &self.tried {
            text.push(' ');
            text.push_str(&(offset - before).to_string());
            before = *offset;
        }
        text
    }

    /// Parses a stored marker.
    #[cfg_attr(not(any(feature = "sqlite", feature = "postgres", feature = "redis")), allow(dead_code))]
    pub(crate) fn stored(topic: &Topic, partition: i32, last: i64, tried: &str) -> Result<Self> {
        let mut numbers = tried.split(' ').map(str::parse::<i64>);
        let corrupt = || Error::Corrupt(format!("the marker of {topic}-{partition} is {tried:?}"));
        let batch = numbers.next().and_then(std::result::Result::ok).ok_or_else(corrupt)?;
        let mut marker = Marker::new(topic.clone(), partition, last);
        marker.batch = u32::try_from(batch).map_err(|_| corrupt())?;
        let mut at = 0i64;
        for distance in numbers {
            at = distance.ok().and_then(|distance| at.checked_add(distance)).ok_or_else(corrupt)?;
            marker.tried.push(at);
        }
        Ok(marker)
    }
}

/// Counts deliveries of reused ids that were answered as the original. Clones share the count.
#[derive(Debug, Clone, Default)]
pub struct Reused(Arc<AtomicU64>);

impl Reused {
    /// Counts one delivery.
    pub(crate) fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were since the last call.
    pub fn take(&self) -> u64 {
        // Usually there are none, and a load shares the cache line where a swap would not.
        if self.0.load(Ordering::Relaxed) == 0 { 0 } else { self.0.swap(0, Ordering::Relaxed) }
    }
}

#[cfg(test)]
mod tests {
    use super::Marker;
    use crate::id::Topic;

    #[test]
    fn a_marker_is_read_as_it_was_stored() {
        let topic = Topic::new("orders").unwrap();
        for (tried, batch) in [(vec![], 0), (vec![0], 1), (vec![7, 8, 1_000_000, i64::MAX], 200)] {
            let marker = Marker { tried, batch, ..Marker::new(topic.clone(), 3, i64::MAX) };
            let text = marker.tried_text();
            assert_eq!(Marker::stored(&topic, 3, i64::MAX, &text).unwrap(), marker, "{text}");
        }
        for text in ["", "x", "1 2 x", "1 9223372036854775807 1"] {
            assert!(Marker::stored(&topic, 3, 1, text).is_err(), "{text}");
        }
    }
}
