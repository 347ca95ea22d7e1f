//! Whether the pulses of a partition follow one another, so that nothing between them is missing.
//!
//! Each pulse of Debezium names the one before it. Whatever was written between two pulses is
//! between them in the topic, but only if the second one follows the first: a replication slot that
//! was created again, a restored database, or a snapshot that was taken twice leaves changes out
//! without a sign. A snapshot shows no deletions, so the chain of pulses must start at its time.
//!
//! The first stamp of a row names no pulse before it. That is right where no pulse is known yet,
//! and when the topic got more partitions, because those have rows of their own. Anywhere else the
//! table of pulses was emptied, and what the slot left out in the meantime is missing.

use crate::analytics::PartitionSync;
use crate::bus::Pulse;
use crate::clock::Time;

/// The pulses of one partition, as far as they are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chain {
    last: Last,
    /// How many partitions the last pulse spoke of; `None`: it is not known, or a partition has no pulse yet.
    partitions: Option<i32>,
    /// The latest pulse of any partition when this feed began. A first stamp of that time or before is one that
    /// another partition has already.
    begun: Option<Time>,
}

/// The last pulse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// No pulse is known. The chain can start only with a snapshot, or with the first stamp of a
    /// row.
    Unknown,
    /// A gap was noted already: the chain continues from the next pulse.
    Noted,
    /// A snapshot has the pulse of this time.
    Snapshot(Time),
    /// The last one that was streamed.
    At(Time),
}

impl Chain {
    /// Where a feed continues: at the model's last pulse of this partition. `topic`: its last
    /// pulses of all partitions of the topic.
    pub(super) fn from<'p>(pulse: Option<Time>, topic: impl Iterator<Item = &'p PartitionSync>) -> Self {
        let pulses: Vec<Option<Time>> = topic.map(|of| of.pulse).collect();
        // One that has none was added, and the first stamps for it may be still to come.
        let is_whole = pulses.iter().all(Option::is_some);
        Chain {
            last: pulse.map_or(Last::Unknown, Last::At),
            partitions: i32::try_from(pulses.len()).ok().filter(|_| is_whole),
            begun: pulses.into_iter().flatten().max(),
        }
    }

    /// Whether no pulse is known.
    pub(super) fn is_unknown(&self) -> bool {
        self.last == Last::Unknown
    }

    /// A gap was noted: the next pulse need not say it again.
    pub(super) fn note(&mut self) {
        self.last = Last::Noted;
    }

    /// A pulse in a snapshot. Returns what is missing, if it does not fit.
    pub(super) fn on_snapshot(&mut self, pulse: Pulse) -> Option<String> {
        let at = pulse.at;
        let before = match self.last {
            // One that is taken again beside a stream: the stream itself goes on.
            Last::At(_) => return None,
            Last::Snapshot(before) if before == at => return None,
            Last::Snapshot(before) => Some(before),
            Last::Unknown | Last::Noted => None,
        };
        (self.last, self.partitions) = (Last::Snapshot(at), Some(pulse.partitions));
        before.map(|before| {
            format!(
                "a snapshot of {before} was cut off, and another of {at} followed: what was deleted between them is missing"
            )
        })
    }

    /// A pulse of the stream, and the one before it; `None`: its row was new. Returns what is missing, if
    /// it does not follow.
    pub(super) fn on_pulse(&mut self, pulse: Pulse, last: Option<Time>) -> Option<String> {
        let at = pulse.at;
        let known = match self.last {
            Last::At(known) | Last::Snapshot(known) if at <= known => return None, // published again
            Last::At(known) | Last::Snapshot(known) => Some(known),
            Last::Unknown | Last::Noted => None,
        };
        let is_noted = self.last == Last::Noted;
        let may_be_new = self.partitions != Some(pulse.partitions) || self.begun >= Some(at);
        (self.last, self.partitions) = (Last::At(at), Some(pulse.partitions));
        match (last, known) {
            _ if is_noted => None,
            (last, known) if last == known => None,
            (None, _) if may_be_new => None,
            (Some(last), Some(known)) => Some(format!(
                "changes before it are missing: the last pulse here is of {known}, and this one follows a pulse of {last}"
            )),
            (Some(last), None) => Some(format!(
                "the beginning is missing: this pulse follows one of {last}, and there is no snapshot before it"
            )),
            (None, known) => known.map(|known| {
                format!(
                    "changes before it may be missing: the last pulse here is of {known}, and this one is the first of its row, \
                     so the table of pulses was emptied"
                )
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::Partition;
    use crate::id::Topic;

    fn at(second: u64) -> Time {
        Time::from_micros(i64::try_from(second * 1_000_000).unwrap())
    }

    /// The chain of partition 0, from the pulses that the model has of each.
    fn knows(pulses: &[Option<u64>]) -> Chain {
        let topic = Topic::new("cdc").unwrap();
        let of = |(number, pulse): (i32, &Option<u64>)| {
            PartitionSync::new(Partition { topic: topic.clone(), number }, None, pulse.map(at))
        };
        let all: Vec<_> = (0..).zip(pulses).map(of).collect();
        Chain::from(pulses.first().copied().flatten().map(at), all.iter())
    }

    /// Plays pulses for so many partitions: `(partitions, snapshot, last, at)`. How often something was missing.
    fn missing_of(mut chain: Chain, pulses: &[(i32, bool, Option<u64>, u64)]) -> usize {
        let gaps = pulses.iter().map(|&(partitions, snapshot, last, second)| {
            let pulse = Pulse { at: at(second), partitions };
            if snapshot { chain.on_snapshot(pulse) } else { chain.on_pulse(pulse, last.map(at)) }
        });
        gaps.flatten().count()
    }

    /// The same for one partition.
    fn missing(chain: Chain, pulses: &[(bool, Option<u64>, u64)]) -> usize {
        let pulses: Vec<_> =
            pulses.iter().map(|&(snapshot, last, second)| (1, snapshot, last, second)).collect();
        missing_of(chain, &pulses)
    }

    #[test]
    fn pulses_that_follow_one_another_have_no_gap() {
        let stream = [(false, None, 1), (false, Some(1), 2), (false, Some(2), 3)];
        assert_eq!(missing(knows(&[None]), &stream), 0);
        let twice = [stream, stream].concat();
        assert_eq!(missing(knows(&[None]), &twice), 0, "published again");
        assert_eq!(missing(knows(&[Some(2)]), &stream), 0, "read again");
        let begun =
            [(true, None, 5), (false, Some(4), 5), (false, Some(5), 6), (true, None, 9), (false, Some(6), 7)];
        assert_eq!(
            missing(knows(&[None]), &begun),
            0,
            "a snapshot, its stream, and a second snapshot beside it"
        );
    }

    #[test]
    fn t327_pulses_that_do_not_follow_are_a_gap() {
        let gaps_after = missing;
        assert_eq!(
            gaps_after(knows(&[Some(3)]), &[(false, Some(6), 7), (false, Some(7), 8)]),
            1,
            "a new slot"
        );
        assert_eq!(gaps_after(knows(&[Some(10)]), &[(false, Some(8), 30)]), 1, "a past that was restored");
        assert_eq!(gaps_after(knows(&[None]), &[(false, Some(9), 10)]), 1, "a topic without a beginning");
        let cut = [(true, None, 5), (true, None, 20), (false, Some(20), 21)];
        assert_eq!(gaps_after(knows(&[None]), &cut), 1, "a snapshot that was cut off");
        assert_eq!(
            gaps_after(knows(&[Some(5)]), &[(true, None, 20), (false, Some(20), 21)]),
            1,
            "begun again later"
        );
        let mut noted = knows(&[Some(3)]);
        noted.note();
        assert_eq!(missing(noted, &[(false, Some(6), 7), (false, Some(7), 8)]), 0, "reported already");
    }

    /// A slot that was made anew, and the table of pulses emptied with it: the first stamp names no pulse before it.
    #[test]
    fn t431_a_first_stamp_follows_only_what_is_unknown_or_a_topic_that_grew() {
        let emptied = [(1, false, None, 20), (1, false, Some(20), 21)];
        assert_eq!(missing_of(knows(&[Some(3)]), &emptied), 1, "the model has a pulse");
        let streamed = [&[(1, false, None, 1), (1, false, Some(1), 2)], &emptied[..]].concat();
        assert_eq!(missing_of(knows(&[None]), &streamed), 1, "a pulse was streamed");
        let snapshot = [&[(1, true, None, 5)], &emptied[..]].concat();
        assert_eq!(missing_of(knows(&[None]), &snapshot), 1, "a snapshot had one");
        assert_eq!(missing_of(knows(&[None]), &emptied), 0, "nothing was known");

        let grown = [(1, false, Some(1), 2), (2, false, None, 4), (2, false, Some(4), 5)];
        assert_eq!(missing_of(knows(&[Some(1)]), &grown), 0, "rows for more partitions");
        let first = [(2, false, None, 4), (2, false, Some(4), 5)];
        assert_eq!(missing_of(knows(&[Some(1)]), &first), 0, "it grew while no feed ran");
        assert_eq!(missing_of(knows(&[Some(1), None]), &first), 0, "and the model knows that already");
        assert_eq!(missing_of(knows(&[Some(1), Some(5)]), &first), 0, "the new partition was read first");
        assert_eq!(missing_of(knows(&[Some(1), Some(3)]), &first), 1, "all had a pulse before: emptied");
    }
}
