//! Waiting events: held ones that are due, dead ones to be copied out, and the markers of
//! transactional batches.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::{Entry, Identity, Token, Week};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;

/// A dead event that was copied out: its identity, its week, and the entry's token.
pub type PublishedDead = (Identity, Week, Token);

/// The held events of a scope that may be claimed now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Due {
    /// The entries with their bytes, in random order.
    pub entries: Vec<Entry>,
    /// How many events may be claimed now. If there are more than entries, the answer is a random
    /// choice of them.
    pub claimable: u64,
    /// How many events the scope holds with their bytes, in any state.
    pub held: u64,
}

/// Which held events a consumer asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeldQuery {
    /// Events of these topics, and events without a topic. `None` matches every event.
    pub topics: Option<BTreeSet<Topic>>,
    /// The maximum size of the answer, as [`Entry::bytes`] counts: it ends with the entry that
    /// reaches it. `None` means unlimited.
    pub bytes_max: Option<usize>,
}

impl HeldQuery {
    /// Matches every event, without a limit.
    pub fn all() -> Self {
        HeldQuery::default()
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

    /// Whether it matches an event of this origin.
    pub fn matches(&self, origin: Option<&Origin>) -> bool {
        match (&self.topics, origin) {
            (Some(topics), Some(origin)) => topics.contains(&origin.topic),
            _ => true,
        }
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
