//! Whether the pulses of a partition follow one another, so that nothing between them is missing.
//!
//! Each pulse of Debezium names the one before it. What was written between two pulses lies between them
//! in the topic, but only if the second one follows the first: a replication slot that was created again, a
//! past that was restored, or a snapshot that was taken twice leaves changes out without a word. A snapshot
//! shows no deletions, so the pulses must lead from its time on.

use crate::clock::Time;

/// The pulses of one partition, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Chain {
    /// None is known. Only a snapshot can begin, or the first stamp of a row.
    Unknown,
    /// A gap was noted already: whatever comes goes on from there.
    Noted,
    /// A snapshot has the pulse of this time.
    Snapshot(Time),
    /// The last one that was streamed.
    At(Time),
}

impl Chain {
    /// Where a feed goes on: at the last pulse that the model has.
    pub(super) fn from(pulse: Option<Time>) -> Self {
        pulse.map_or(Chain::Unknown, Chain::At)
    }

    /// A pulse in a snapshot. Returns what is missing, if it does not fit.
    pub(super) fn on_snapshot(&mut self, at: Time) -> Option<String> {
        match *self {
            // One that is taken again beside a stream: the stream itself goes on.
            Chain::At(_) => None,
            Chain::Snapshot(before) if before == at => None,
            Chain::Snapshot(before) => {
                *self = Chain::Snapshot(at);
                Some(format!(
                    "a snapshot of {before} was cut off, and another of {at} followed: what was deleted between them is missing"
                ))
            }
            Chain::Unknown | Chain::Noted => {
                *self = Chain::Snapshot(at);
                None
            }
        }
    }

    /// A pulse of the stream, and the one before it; `None`: its row was new. Returns what is missing, if
    /// it does not follow.
    pub(super) fn on_pulse(&mut self, last: Option<Time>, at: Time) -> Option<String> {
        let known = match *self {
            Chain::At(known) | Chain::Snapshot(known) if at <= known => return None, // published again
            Chain::At(known) | Chain::Snapshot(known) => Some(known),
            Chain::Unknown | Chain::Noted => None,
        };
        let follows = last.is_none() || last == known || *self == Chain::Noted;
        *self = Chain::At(at);
        match (last, known) {
            _ if follows => None,
            (Some(last), Some(known)) => Some(format!(
                "changes before it are missing: the last pulse here is of {known}, and this one follows a pulse of {last}"
            )),
            (Some(last), None) => Some(format!(
                "the beginning is missing: this pulse follows one of {last}, and there is no snapshot before it"
            )),
            (None, _) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(second: u64) -> Time {
        Time::from_micros(i64::try_from(second * 1_000_000).unwrap())
    }

    /// Plays pulses: `(snapshot, last, at)`. How often something was missing.
    fn missing(from: Chain, pulses: &[(bool, Option<u64>, u64)]) -> usize {
        let mut chain = from;
        let gaps = pulses.iter().map(|&(snapshot, last, second)| {
            if snapshot { chain.on_snapshot(at(second)) } else { chain.on_pulse(last.map(at), at(second)) }
        });
        gaps.flatten().count()
    }

    #[test]
    fn pulses_that_follow_one_another_have_no_gap() {
        let stream = [(false, None, 1), (false, Some(1), 2), (false, Some(2), 3)];
        assert_eq!(missing(Chain::Unknown, &stream), 0);
        let twice = [stream, stream].concat();
        assert_eq!(missing(Chain::Unknown, &twice), 0, "published again");
        assert_eq!(missing(Chain::At(at(2)), &stream), 0, "read again");
        let begun =
            [(true, None, 5), (false, Some(4), 5), (false, Some(5), 6), (true, None, 9), (false, Some(6), 7)];
        assert_eq!(
            missing(Chain::Unknown, &begun),
            0,
            "a snapshot, its stream, and a second snapshot beside it"
        );
        let more = [(false, Some(1), 2), (false, None, 4), (false, Some(4), 5)];
        assert_eq!(missing(Chain::At(at(1)), &more), 0, "rows for more partitions");
    }

    #[test]
    fn t327_pulses_that_do_not_follow_are_a_gap() {
        let gaps_after = |from, pulses: &[_]| missing(from, pulses);
        assert_eq!(
            gaps_after(Chain::At(at(3)), &[(false, Some(6), 7), (false, Some(7), 8)]),
            1,
            "a new slot"
        );
        assert_eq!(gaps_after(Chain::At(at(10)), &[(false, Some(8), 30)]), 1, "a past that was restored");
        assert_eq!(gaps_after(Chain::Unknown, &[(false, Some(9), 10)]), 1, "a topic without a beginning");
        let cut = [(true, None, 5), (true, None, 20), (false, Some(20), 21)];
        assert_eq!(gaps_after(Chain::Unknown, &cut), 1, "a snapshot that was cut off");
        assert_eq!(
            gaps_after(Chain::At(at(5)), &[(true, None, 20), (false, Some(20), 21)]),
            1,
            "begun again later"
        );
        assert_eq!(
            gaps_after(Chain::Noted, &[(false, Some(6), 7), (false, Some(7), 8)]),
            0,
            "reported already"
        );
    }
}
