//! Gaps in the offsets of a partition: records that retention removed, or offsets that never had a
//! record a consumer sees (compaction and transactions leave them).
//!
//! When the offset that librdkafka asks for was removed, it resets the partition to its beginning and
//! goes on there. Only the broker's oldest offset tells what was removed. Until it is known, nothing
//! behind the gap is delivered: the subscriber must hear of removed records before it hears of what
//! follows them.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::{Duration, Instant};

/// How long after a gap librdkafka may report the reset that caused it.
const LATE_MAX: Duration = Duration::from_secs(5);

/// The gaps of one partition.
#[derive(Default)]
pub(super) struct Gaps {
    /// Whether librdkafka has reset the partition, and what was removed is not found yet.
    reset: bool,
    /// The last gap that came when no reset was known.
    skipped: Option<Gap>,
    /// Those that may be removed records, in order.
    waiting: VecDeque<Gap>,
}

/// Offsets that were skipped.
struct Gap {
    offsets: Range<i64>,
    since: Instant,
    /// Those that retention removed. `None` until it is known.
    removed: Option<Range<i64>>,
}

impl Gaps {
    /// A record was fetched where `next` was expected, if anything was.
    pub(super) fn on_record(&mut self, next: Option<i64>, offset: i64) {
        match next {
            Some(next) if next < offset => {
                let gap = Gap { offsets: next..offset, since: Instant::now(), removed: None };
                if self.reset { self.waiting.push_back(gap) } else { self.skipped = Some(gap) }
            }
            Some(_) => {}
            None => self.reset = false, // it begins here
        }
    }

    /// librdkafka has reset the partition.
    pub(super) fn on_reset(&mut self) {
        self.reset = true;
        self.waiting.extend(self.skipped.take().filter(|gap| gap.since.elapsed() < LATE_MAX));
    }

    /// The first gap, if the broker must be asked about it, and since when.
    pub(super) fn unknown(&self) -> Option<(Range<i64>, Instant)> {
        let gap = self.waiting.front().filter(|gap| gap.removed.is_none())?;
        Some((gap.offsets.clone(), gap.since))
    }

    /// The partition's oldest offset is known, or the broker does not tell it: then the first gap
    /// counts as removed.
    pub(super) fn answered(&mut self, gap: &Range<i64>, oldest: Option<i64>) {
        let Some(first) = self.waiting.front_mut().filter(|first| first.offsets == *gap) else { return };
        let until = oldest.unwrap_or(gap.end).min(gap.end);
        if until <= gap.start {
            self.waiting.pop_front(); // they never had records
            return;
        }
        first.removed = Some(gap.start..until);
        // Where the partition went on. A gap that ends before it may be another one.
        self.reset &= oldest.is_none_or(|oldest| oldest > gap.end);
    }

    /// The first offset that is not delivered yet.
    pub(super) fn end(&self) -> Option<i64> {
        self.waiting.front().map(|gap| gap.offsets.end)
    }

    /// The removed offsets to report now, if `next`, the next record to deliver, lies behind them.
    pub(super) fn take_removed(&mut self, next: Option<i64>) -> Option<Range<i64>> {
        let gap = self.waiting.front().filter(|gap| next.is_none_or(|next| next >= gap.offsets.end))?;
        let removed = gap.removed.clone()?;
        self.waiting.pop_front();
        Some(removed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::inbox::Inbox;
    use super::*;
    use crate::bus::{BusEvent, Partition, Received, Record};
    use crate::event::Origin;
    use crate::id::Topic;

    fn stage(next: i64) -> (Inbox, Partition, impl Fn(i64) -> Received) {
        let inbox = Inbox::new(10, 1000, Arc::default());
        let topic = Topic::new("t").unwrap();
        let partition = Partition { topic: topic.clone(), number: 0 };
        inbox.assigned(vec![(partition.clone(), Some(next))]);
        assert!(matches!(inbox.take(), Some(Ok(BusEvent::Assigned(_)))));
        (inbox, partition, move |offset| {
            Received::new(Record::default(), Origin::new(topic.clone(), 0, offset))
        })
    }

    /// What is handed out next: records by their offsets, or removed offsets.
    fn taken(inbox: &Inbox) -> Option<(Vec<i64>, Option<Range<i64>>)> {
        match inbox.take()?.unwrap() {
            BusEvent::Records(records) => {
                Some((records.iter().map(|record| record.origin.offset).collect(), None))
            }
            BusEvent::Removed { offsets, .. } => Some((Vec::new(), Some(offsets))),
            other => panic!("{other:?}"),
        }
    }

    /// The broker does not say whether records were removed: nothing behind the gap is delivered, and
    /// the gap is asked about again. What lies before it is delivered first.
    #[test]
    fn t331_a_gap_that_is_not_known_yet_is_asked_about_again() {
        let (inbox, partition, record) = stage(3);
        inbox.push(record(3), 1);
        inbox.reset(Some(&("t".to_owned(), 0)));
        inbox.push(record(9), 1);
        inbox.push(record(10), 1);
        for _ in 0..3 {
            let [(_, gap, _)] = &inbox.unknown_gaps()[..] else { panic!("one gap") };
            assert_eq!(*gap, 4..9, "no answer: it is asked again");
        }
        inbox.answered(&partition, &(4..9), Some(8));
        assert_eq!(taken(&inbox), Some((vec![3], None)));
        assert_eq!(taken(&inbox), Some((vec![], Some(4..8))));
        assert_eq!(taken(&inbox), Some((vec![9, 10], None)));
        assert!(inbox.unknown_gaps().is_empty());
        // The records before the gap do not wait for the answer; those behind it do.
        inbox.reset(None);
        inbox.push(record(11), 1);
        inbox.push(record(20), 1);
        assert_eq!(taken(&inbox), Some((vec![11], None)));
        assert_eq!(taken(&inbox), None);
        inbox.answered(&partition, &(12..20), Some(8));
        assert_eq!(taken(&inbox), Some((vec![20], None)), "a gap that never had records");
        // Compaction left a gap before the one that the reset was for: both are looked at.
        inbox.push(record(22), 1);
        inbox.push(record(40), 1);
        inbox.answered(&partition, &(21..22), Some(40));
        assert_eq!(taken(&inbox), Some((vec![], Some(21..22))), "nobody knows");
        assert_eq!(taken(&inbox), Some((vec![22], None)));
        inbox.answered(&partition, &(23..40), None);
        assert_eq!(taken(&inbox), Some((vec![], Some(23..40))), "the broker does not answer");
        assert_eq!(taken(&inbox), Some((vec![40], None)));
        // A gap without a reset is none of retention's.
        let (inbox, _, record) = stage(0);
        inbox.push(record(5), 1);
        assert!(inbox.unknown_gaps().is_empty());
        assert_eq!(taken(&inbox), Some((vec![5], None)));
        // librdkafka reports the reset a moment later.
        inbox.reset(None);
        assert_eq!(inbox.unknown_gaps().len(), 1);
    }
}
