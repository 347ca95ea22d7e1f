//! Where a member starts in the partitions it is assigned.
//!
//! A group that starts at the end commits that end when a partition is first assigned, so that it
//! skips nothing when the partition moves later. Partitions added to the topic after that start at
//! their beginning. To tell the two apart, such a group's commits carry the number of partitions
//! the topic had when the group started: several members may get their first partitions at the same
//! time, and each must know whether the others' commits belong to that same start.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::PoisonError;

use rdkafka::consumer::Consumer as _;
use rdkafka::error::KafkaResult;
use rdkafka::topic_partition_list::TopicPartitionListElem;
use rdkafka::{Offset, TopicPartitionList};

use super::member::{Member, MemberConsumer};
use crate::bus::{Partition, Start};
use crate::id::Topic;

/// Prefix of the commit metadata of a group that started at the end. The partition count follows.
const BEGAN: &str = "hapax: began at the end of ";

/// The commit metadata of such a group.
pub(super) fn metadata(began: i32) -> String {
    format!("{BEGAN}{began} partitions")
}

/// Where partitions start.
pub(super) struct Beginnings {
    /// The list to assign.
    pub(super) list: TopicPartitionList,
    /// The offsets to commit as the group's start.
    pub(super) fresh: TopicPartitionList,
}

impl Beginnings {
    /// Leaves it to librdkafka to find the offsets.
    pub(super) fn unknown(list: &TopicPartitionList) -> Self {
        Beginnings { list: list.clone(), fresh: TopicPartitionList::new() }
    }

    /// The first offset, if known.
    pub(super) fn next(&self, partition: &Partition) -> Option<i64> {
        match self.list.find_partition(partition.topic.as_str(), partition.number)?.offset() {
            Offset::Offset(offset) => Some(offset),
            _ => None,
        }
    }
}

impl Member {
    /// Where partitions start: at the group's commit. Without one, a group that starts at the end
    /// starts there, unless it has started in the topic before.
    pub(super) fn beginnings(
        &self,
        consumer: &MemberConsumer,
        list: &TopicPartitionList,
    ) -> KafkaResult<Beginnings> {
        let committed = consumer.committed_offsets(list.clone(), self.answer_timeout)?;
        let mut begin = Beginnings::unknown(list);
        let mut without = BTreeSet::new();
        for element in committed.elements() {
            element.error()?;
            let (name, number) = (element.topic(), element.partition());
            if let offset @ Offset::Offset(_) = element.offset() {
                begin.list.set_partition_offset(name, number, offset)?;
                self.note_began(name, began(&element));
            } else if self.start == Start::Latest
                && let Some(topic) = self.topic(name)
            {
                without.insert((topic.clone(), number));
            }
        }
        let topics: BTreeSet<_> = without.iter().map(|(topic, _)| topic.clone()).collect();
        for topic in topics {
            let mine: Vec<i32> = without.iter().filter(|(of, _)| *of == topic).map(|(_, n)| *n).collect();
            self.begin_in(consumer, &topic, &mine, &mut begin)?;
        }
        Ok(begin)
    }

    /// For a group that starts at the end: where those partitions of a topic start that have no
    /// commit.
    fn begin_in(
        &self,
        consumer: &MemberConsumer,
        topic: &Topic,
        numbers: &[i32],
        begin: &mut Beginnings,
    ) -> KafkaResult<()> {
        let name = topic.as_str();
        let metadata_of_topic = consumer.client().fetch_metadata(Some(name), self.answer_timeout)?;
        let found = metadata_of_topic.topics().iter().find(|found| found.name() == name);
        let count = found.map_or(0, |found| found.partitions().len() as i32);
        let mut all = TopicPartitionList::new();
        for number in 0..count {
            all.add_partition(name, number);
        }
        let committed = consumer.committed_offsets(all, self.answer_timeout)?;
        let mut commits = Vec::new();
        for element in committed.elements() {
            element.error()?;
            if matches!(element.offset(), Offset::Offset(_)) {
                commits.push(began(&element));
            }
        }
        let began_with = if commits.is_empty() { Some(count) } else { commits.into_iter().flatten().min() };
        self.note_began(name, began_with);
        for number in numbers {
            if begins_at_end(*number, began_with) {
                let (_, end) = consumer.fetch_watermarks(name, *number, self.answer_timeout)?;
                begin.list.set_partition_offset(name, *number, Offset::Offset(end))?;
                let mut fresh = begin.fresh.add_partition(name, *number);
                fresh.set_offset(Offset::Offset(end))?;
                fresh.set_metadata(metadata(began_with.unwrap_or(count)));
            } else {
                begin.list.set_partition_offset(name, *number, Offset::Beginning)?;
            }
        }
        Ok(())
    }

    fn note_began(&self, topic: &str, began: Option<i32>) {
        if let (Some(topic), Some(began)) = (self.topic(topic), began)
            && self.start == Start::Latest
        {
            self.began.lock().unwrap_or_else(PoisonError::into_inner).insert(topic.clone(), began);
        }
    }
}

/// Whether a partition without a commit starts at its end: it existed when the group started, and
/// is assigned for the first time. `began_with` is the number of partitions at that time, or `None`
/// if the group has started but the number is unknown.
fn begins_at_end(number: i32, began_with: Option<i32>) -> bool {
    began_with.is_some_and(|count| number < count)
}

/// The number of partitions the topic had when the group started, if the commit says so.
fn began(element: &TopicPartitionListElem<'_>) -> Option<i32> {
    // rdkafka panics on metadata that is not UTF-8, and any client may have written it.
    let text = catch_unwind(AssertUnwindSafe(|| element.metadata().to_owned())).ok()?;
    parse(&text)
}

fn parse(metadata: &str) -> Option<i32> {
    metadata.strip_prefix(BEGAN)?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two members are assigned two partitions each at the same time. The second to look finds the
    /// first's commits and knows that its own partitions existed when the group started. The fifth
    /// did not.
    #[test]
    fn t75_what_was_there_when_the_group_began_begins_at_its_end() {
        let began_with = parse(&metadata(4));
        assert_eq!(began_with, Some(4));
        let at_end: Vec<_> = (0..6).map(|number| begins_at_end(number, began_with)).collect();
        assert_eq!(at_end, [true, true, true, true, false, false]);
        // A commit without the number: the group has started, but the number is unknown.
        for unknown in ["", "x", "hapax: began at the end of ? partitions"] {
            assert!(!begins_at_end(0, parse(unknown)), "{unknown:?}");
        }
    }
}
