//! What waits: held events that are due, dead ones on their way out, and the markers of transactional batches.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Entry, Identity, Token, Week};
use crate::clock::Time;
use crate::event::Origin;
use crate::id::Topic;

/// Which dead event was copied out: its identity, the week of its entry, and the entry's token.
pub type Copied = (Identity, Week, Token);

/// The held events of a scope that may be claimed now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Due {
    /// The entries, with their bytes, the oldest first.
    pub entries: Vec<Entry>,
    /// How many events the scope holds with their bytes, in whatever state.
    pub held: u64,
}

/// Which held events somebody looks for. Those of a partition are for whoever has it, so that a group takes up each once.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Share {
    /// The topics that the asker consumes, each with the partitions that it has. Events of other topics are never for it; those
    /// of no topic are for everybody. None: whatever they are of.
    pub topics: Option<BTreeMap<Topic, BTreeSet<i32>>>,
    /// What has been due, or dead, for longer than this is for everybody who consumes its topic, so that nothing is stranded
    /// while partitions go from hand to hand.
    pub grace: Duration,
    /// Only what has been due, or dead, since then: how a look goes on behind a page of what nobody here can do anything about.
    pub since: Option<Time>,
}

impl Share {
    /// Everything.
    pub fn all() -> Self {
        Share::default()
    }

    /// Whether an event from there, whose time came then, is looked for.
    pub fn takes(&self, origin: Option<&Origin>, at: Time, now: Time) -> bool {
        if self.since.is_some_and(|since| at < since) {
            return false;
        }
        let (Some(topics), Some(origin)) = (&self.topics, origin) else { return true };
        let mine = topics.get(&origin.topic);
        mine.is_some_and(|mine| mine.contains(&origin.partition) || at.plus(self.grace) <= now)
    }
}

/// Which offsets a batch of transactional claims covers. Committed before the batch begins: if it is found later, that
/// batch did not end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marker {
    /// The topic.
    pub topic: Topic,
    /// The partition.
    pub partition: i32,
    /// The first offset.
    pub first: i64,
    /// The last offset, itself included.
    pub last: i64,
}

impl Marker {
    /// One that removes what is noted of a partition.
    pub fn clear(topic: Topic, partition: i32) -> Self {
        Marker { topic, partition, first: 0, last: -1 }
    }

    /// Whether it covers nothing, and so removes.
    pub fn is_empty(&self) -> bool {
        self.first > self.last
    }
}

/// Counts deliveries of reused ids that were answered as the original. Clones share the count.
#[derive(Debug, Clone, Default)]
pub struct Reused(Arc<AtomicU64>);

impl Reused {
    /// One more.
    pub(crate) fn note(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    /// How many since the last time somebody asked.
    pub fn take(&self) -> u64 {
        // Mostly there are none, and a read shares the cache line where a swap would not.
        if self.0.load(Ordering::Relaxed) == 0 { 0 } else { self.0.swap(0, Ordering::Relaxed) }
    }
}
