//! How much of its partitions a member keeps in memory.

use super::partition::PartitionState;

/// What partitions that are not paused may have together.
#[derive(Clone, Copy)]
pub(super) struct Room {
    pub(super) records_max: usize,
    pub(super) bytes_max: usize,
}

/// Paused partitions are fetched on while they have less than this many times as much together. It
/// leaves room for those that are paused next, with what they have then.
const FETCHED_ON: Multiple = Multiple { records: 4, bytes: 2 };
/// Paused partitions keep at most this many times as much together.
const KEPT: Multiple = Multiple { records: 8, bytes: 3 };

struct Multiple {
    records: usize,
    bytes: usize,
}

/// What partitions have in memory.
#[derive(Clone, Copy, Default)]
pub(super) struct Waiting {
    pub(super) records: usize,
    bytes: usize,
}

impl Waiting {
    pub(super) fn of<'p>(partitions: impl Iterator<Item = &'p PartitionState>) -> Self {
        partitions.fold(Waiting::default(), |sum, own| Waiting {
            records: sum.records + own.records.len(),
            bytes: sum.bytes + own.bytes,
        })
    }
}

impl Room {
    /// Whether more may be buffered of partitions that are not paused, which have this much.
    pub(super) fn is_free(self, open: Waiting) -> bool {
        open.records < self.records_max && open.bytes < self.bytes_max
    }

    /// Whether paused partitions, which have this much, are fetched on.
    pub(super) fn fetches_on(self, paused: Waiting) -> bool {
        self.times(&FETCHED_ON).is_free(paused)
    }

    /// Whether paused partitions have more than they may keep.
    pub(super) fn is_exceeded(self, paused: Waiting) -> bool {
        let kept = self.times(&KEPT);
        paused.records > kept.records_max || paused.bytes > kept.bytes_max
    }

    fn times(self, multiple: &Multiple) -> Room {
        Room {
            records_max: self.records_max.saturating_mul(multiple.records),
            bytes_max: self.bytes_max.saturating_mul(multiple.bytes),
        }
    }
}
