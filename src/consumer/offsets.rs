//! The commit_point: up to where a partition is finished.
//!
//! Only offsets that were received count, so gaps (compaction, transaction markers) cannot stall it. What finishes above
//! an unfinished one waits here; after a restart it is delivered again, and the ledger says that it is done.

use std::collections::VecDeque;

/// Tracks one partition. The position to commit never passes an unfinished offset.
///
/// ```
/// use hapax::consumer::CommitPoint;
/// let mut commit_point = CommitPoint::default();
/// for offset in [10, 11, 15] {
///     assert!(commit_point.receive(offset)); // 12 to 14 are a gap
/// }
/// commit_point.finish(11);
/// assert_eq!(commit_point.position(), Some(10)); // 10 is still running
/// commit_point.finish(10);
/// assert_eq!(commit_point.position(), Some(15));
/// commit_point.finish(15);
/// assert_eq!(commit_point.position(), Some(16));
/// assert!(!commit_point.receive(15)); // delivered again: known
/// ```
#[derive(Debug, Clone, Default)]
pub struct CommitPoint {
    /// Received and not yet passed, in offset order, each with whether it is finished.
    open: VecDeque<(i64, bool)>,
    /// The highest received.
    last: Option<i64>,
    unfinished: usize,
}

impl CommitPoint {
    /// Takes note of a received offset. False: it was received before.
    pub fn receive(&mut self, offset: i64) -> bool {
        if self.last.is_some_and(|last| offset <= last) {
            return false;
        }
        self.open.push_back((offset, false));
        self.last = Some(offset);
        self.unfinished += 1;
        true
    }

    /// Takes note that an offset is finished. One that was never received, or is finished already, changes nothing.
    pub fn finish(&mut self, offset: i64) {
        let Ok(at) = self.open.binary_search_by_key(&offset, |(offset, _)| *offset) else { return };
        if !std::mem::replace(&mut self.open[at].1, true) {
            self.unfinished -= 1;
        }
        while self.open.front().is_some_and(|(_, finished)| *finished) {
            self.open.pop_front();
        }
    }

    /// The offset to commit: that of the lowest unfinished record, or the one after the last. None: nothing was received.
    pub fn position(&self) -> Option<i64> {
        if crate::crash_point::mutant!("commit_point past an unfinished event") {
            return self.last.map(|last| last + 1);
        }
        self.open.front().map(|(offset, _)| *offset).or_else(|| self.last.map(|last| last + 1))
    }

    /// How many are unfinished.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// How many received offsets the position has not passed, finished or not: what is kept in memory.
    pub fn distance(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::CommitPoint;
    use proptest::prelude::*;

    proptest! {
        /// Whatever finishes in whatever order: the position is the lowest unfinished received offset.
        #[test]
        fn never_passes_an_unfinished_offset(gaps in prop::collection::vec(1i64..5, 1..60), order in prop::collection::vec(any::<prop::sample::Index>(), 0..80)) {
            let mut commit_point = CommitPoint::default();
            let mut offsets = Vec::new();
            let mut at = 0;
            for gap in gaps {
                at += gap;
                prop_assert!(commit_point.receive(at));
                offsets.push(at);
            }
            let mut open: std::collections::BTreeSet<i64> = offsets.iter().copied().collect();
            for index in order {
                let offset = *index.get(&offsets);
                commit_point.finish(offset);
                open.remove(&offset);
                let expected = open.first().copied().unwrap_or(at + 1);
                prop_assert_eq!(commit_point.position(), Some(expected));
                prop_assert_eq!(commit_point.unfinished(), open.len());
            }
        }
    }
}
