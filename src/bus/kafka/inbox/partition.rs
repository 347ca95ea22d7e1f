//! What an inbox knows of one partition.

use std::collections::VecDeque;

use bytes::Bytes;

use super::super::gaps::Gaps;
use crate::bus::Received;
use crate::clock::Time;
use crate::event::Headers;

/// A partition assigned to this member.
#[derive(Default)]
pub(super) struct PartitionState {
    pub(super) epoch: u64,
    /// Nothing is delivered until it is resumed. It is fetched all the same, as far as there is room.
    pub(super) paused: bool,
    /// It is paused in librdkafka too, which fetches none of it.
    pub(super) fetch_paused: bool,
    /// The group asks for it back; nothing more is delivered.
    pub(super) revoking: bool,
    pub(super) records: VecDeque<Received>,
    pub(super) bytes: usize,
    /// The offset after the last record received, or the one sought. Initially the group's commit,
    /// if any.
    pub(super) next: Option<i64>,
    /// The last record received.
    pub(super) last: Option<Mark>,
    pub(super) gaps: Gaps,
    /// The offset after the last one delivered to the subscriber. Before that, where it began, if
    /// known.
    pub(super) delivered: Option<i64>,
    /// Fetched records were dropped, to save memory: it must be read again from this offset. Until
    /// then nothing that arrives counts.
    pub(super) rewind: Option<i64>,
}

/// What tells a record that is fetched again from one that was written to a new topic.
#[derive(PartialEq)]
pub(super) struct Mark {
    offset: i64,
    timestamp: Option<Time>,
    key: Option<Bytes>,
    headers: Headers,
    payload: Option<Bytes>,
}

impl Mark {
    pub(super) fn of(received: &Received) -> Self {
        let record = &received.record;
        Mark {
            offset: received.origin.offset,
            timestamp: record.timestamp,
            key: record.key.clone(),
            headers: record.headers.clone(),
            payload: record.payload.clone(),
        }
    }
}

impl PartitionState {
    /// How many records may be delivered now.
    pub(super) fn ready(&self) -> usize {
        match self.gaps.end() {
            Some(end) => self.records.partition_point(|next| next.origin.offset < end),
            None => self.records.len(),
        }
    }

    /// Drops everything that was fetched.
    pub(super) fn clear(&mut self) {
        self.records = VecDeque::new();
        (self.bytes, self.gaps, self.rewind) = (0, Gaps::default(), None);
    }

    /// Continues at `next`, without what was fetched.
    pub(super) fn continue_at(&mut self, next: i64) {
        (self.next, self.delivered, self.last) = (Some(next), Some(next), None);
        self.clear();
    }

    /// Drops what was fetched; the thread reads it again. Starts behind what was heard of, not at
    /// the first record, so that a gap before that record is found again too.
    pub(super) fn drop_fetched(&mut self) {
        let Some(from) = self.delivered.or(self.records.front().map(|first| first.origin.offset)) else {
            return;
        };
        self.continue_at(from);
        self.rewind = Some(from);
    }
}
