//! Up to when a read model is complete, from the pulses of its partitions.

use crate::clock::Time;

/// The pulses of one topic.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Synced {
    /// The last pulse of each partition.
    pub(crate) pulses: Vec<Option<Time>>,
    /// Up to when the topic is complete. A partition that is added later has no pulse yet, but nothing
    /// from before this time: a pulse says how many partitions there are.
    pub(crate) complete: Option<Time>,
}

impl Synced {
    /// The topic has so many partitions, at least.
    pub(crate) fn expect(&mut self, partitions: i32) {
        let partitions = usize::try_from(partitions).unwrap_or_default().max(self.pulses.len());
        self.pulses.resize(partitions, None);
    }

    /// Notes a pulse of a partition.
    pub(crate) fn pulse(&mut self, partition: i32, at: Time) {
        self.expect(partition.saturating_add(1));
        if let Some(last) = usize::try_from(partition).ok().and_then(|place| self.pulses.get_mut(place)) {
            *last = (*last).max(Some(at));
        }
        self.complete = self.complete.max(earliest(self.pulses.iter().copied()));
    }
}

/// The earliest of some times; `None` if one of them is unknown, or if there are none.
pub(crate) fn earliest(times: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    times.into_iter().reduce(|one, other| one.zip(other).map(|(one, other)| one.min(other))).flatten()
}

/// A time, unless something holds it back; `None` holds everything back.
pub(crate) fn held_back(at: Option<Time>, by: impl IntoIterator<Item = Option<Time>>) -> Option<Time> {
    earliest(std::iter::once(at).chain(by))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[allow(clippy::unnecessary_wraps)] // as the times that it is compared with
    fn at(millis: i64) -> Option<Time> {
        Some(Time::from_millis(millis))
    }

    #[test]
    fn t55_a_topic_is_complete_up_to_the_earliest_last_pulse() {
        let mut topic = Synced::default();
        topic.expect(2);
        topic.pulse(0, Time::from_millis(5));
        assert_eq!(topic.complete, None, "partition 1 has none");
        topic.pulse(1, Time::from_millis(3));
        assert_eq!(topic.complete, at(3));
        topic.pulse(1, Time::from_millis(2)); // late, of a relay that leads no more
        topic.pulse(1, Time::from_millis(9));
        assert_eq!(topic.complete, at(5));
        topic.expect(3);
        topic.pulse(0, Time::from_millis(20));
        assert_eq!(topic.complete, at(5), "the new partition has none, and what was complete stays so");
        topic.pulse(2, Time::from_millis(15));
        assert_eq!(topic.complete, at(9));
    }

    #[test]
    fn what_is_unknown_holds_everything_back() {
        assert_eq!(earliest([]), None);
        assert_eq!(earliest([at(1), None]), None);
        assert_eq!(held_back(at(5), [at(3), at(7)]), at(3));
        assert_eq!(held_back(at(5), [None]), None);
        assert_eq!(held_back(None, [at(1)]), None);
    }
}
