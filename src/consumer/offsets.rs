//! The commit point: the offset below which everything of a partition is finished.
//!
//! Only received offsets count, so gaps (compaction, transaction markers) cannot stall it. Offsets
//! that finish above an unfinished one wait here. After a restart they are delivered again, and the
//! ledger says that they are done.

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
    /// Received offsets at or above the position, in order, each with whether it is finished.
    open: VecDeque<(i64, bool)>,
    /// The highest received offset.
    last: Option<i64>,
    unfinished: usize,
}

impl CommitPoint {
    /// Notes a received offset. Returns false if it was received before.
    pub fn receive(&mut self, offset: i64) -> bool {
        if self.last.is_some_and(|last| offset <= last) {
            return false;
        }
        self.open.push_back((offset, false));
        self.last = Some(offset);
        self.unfinished += 1;
        true
    }

    /// Notes that an offset is finished. Has no effect if it was never received or is finished
    /// already.
    pub fn finish(&mut self, offset: i64) {
        let Ok(at) = self.open.binary_search_by_key(&offset, |(offset, _)| *offset) else { return };
        if !std::mem::replace(&mut self.open[at].1, true) {
            self.unfinished -= 1;
        }
        while self.open.front().is_some_and(|(_, finished)| *finished) {
            self.open.pop_front();
        }
    }

    /// The offset to commit: the lowest unfinished one, or the one after the last. `None` if
    /// nothing was received.
    pub fn position(&self) -> Option<i64> {
        if crate::crash_point::mutant!("commit point past an unfinished event") {
            return self.last.map(|last| last + 1);
        }
        self.open.front().map(|(offset, _)| *offset).or_else(|| self.last.map(|last| last + 1))
    }

    /// The number of unfinished offsets.
    pub fn unfinished(&self) -> usize {
        self.unfinished
    }

    /// The number of received offsets at or above the position, finished or not. These are kept in
    /// memory.
    pub fn distance(&self) -> usize {
        self.open.len()
    }
}

#[cfg(test)]
mod tests {
    use super::CommitPoint;
    use proptest::prelude::*;

    proptest! {
        /// In whatever order offsets finish, the position is the lowest unfinished received offset.
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
