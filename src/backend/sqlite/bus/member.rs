//! A member of a group on the embedded bus.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::Connection;

use super::{Inner, group, log};
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::{answer, thread_gone};
use crate::bus::assignments::{Assignments, GroupAssignment};
use crate::bus::{Assignment, BusEvent, Partition, Received, Subscriber, Subscription};
use crate::error::Result;

/// The most records returned at once.
const RECORDS_MAX: usize = 500;
/// Roughly the most bytes returned at once.
const BYTES_MAX: usize = 4 << 20;
/// How long to wait before checking again for changes by other processes: at first, and at most.
const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(50);

pub(super) struct Member {
    inner: Arc<Inner>,
    subscription: Subscription,
    /// Its number in the group. It gets a new one each time it joins.
    number: i64,
    assignments: Assignments,
    /// The version of the file that had nothing new. `None` once this side may have changed.
    seen: Option<i64>,
    /// The query in progress. If a call is cancelled, the next one takes it over, because it would
    /// ask the same.
    asked: Option<Asked>,
}

struct Asked {
    question: (i64, Vec<(Assignment, i64)>, Option<i64>),
    answer: tokio::sync::oneshot::Receiver<Result<Option<Look>>>,
}

/// What one version of the file has for a member.
struct Look {
    version: i64,
    mine: Option<Vec<GroupAssignment>>,
    records: Vec<Received>,
}

/// Checks the file for a member. Returns `None` if the file is unchanged.
fn look(
    conn: &Connection,
    member: i64,
    readable: &[(Assignment, i64)],
    seen: Option<i64>,
) -> Result<Option<Look>> {
    // Changes whenever another connection has committed, in this process or another.
    let version = conn
        .prepare_cached("PRAGMA main.data_version")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("looking for changes")?;
    if seen == Some(version) {
        return Ok(None);
    }
    let mine = group::mine(conn, member)?;
    let mut records = Vec::new();
    let (mut records_left, mut bytes_left) = (RECORDS_MAX, BYTES_MAX);
    for (assigned, position) in readable {
        let held = mine.iter().flatten().find(|(_, m)| m.assigned == *assigned && !m.revoking);
        if let Some((part, _)) = held {
            let left = (&mut records_left, &mut bytes_left);
            log::read(conn, *part, &assigned.partition, *position, left, &mut records)?;
        }
    }
    let mine = mine.map(|mine| mine.into_iter().map(|(_, mine)| mine).collect());
    Ok(Some(Look { version, mine, records }))
}

impl Member {
    pub(super) async fn join(inner: Arc<Inner>, subscription: Subscription) -> Result<Self> {
        let mut member = Member {
            inner,
            subscription,
            number: 0,
            assignments: Assignments::default(),
            seen: None,
            asked: None,
        };
        member.enter().await?;
        Ok(member)
    }

    /// Joins under a new number. If this is cancelled the member has joined anyway, and dropping it
    /// removes it.
    async fn enter(&mut self) -> Result<()> {
        let common = &self.inner.common;
        common.end(self.number);
        let number = (uuid::Uuid::new_v4().as_u128() as i64) & i64::MAX;
        self.number = number;
        common.begin(number, self.subscription.session_timeout, self.subscription.revoke_timeout);
        let subscription = self.subscription.clone();
        let joined = self.inner.write.send(move |conn, now| group::join(conn, &subscription, number, now));
        answer(joined).await?
    }

    /// The next event, if there is one.
    async fn next_event(&mut self) -> Result<Option<BusEvent>> {
        let question = (self.number, self.assignments.readable(), self.seen);
        if self.asked.as_ref().is_none_or(|asked| asked.question != question) {
            let (member, readable, seen) = question.clone();
            let answer = self.inner.read.send(move |conn| look(conn, member, &readable, seen));
            self.asked = Some(Asked { question, answer });
        }
        let Some(asked) = &mut self.asked else { return Ok(None) };
        let looked = (&mut asked.answer).await;
        self.asked = None;
        let Some(look) = looked.map_err(|_| thread_gone())?? else { return Ok(None) };
        // No `await` between here and the return, so an event that was noted is always returned.
        if let Some(event) = self.assignments.next_event(look.mine.as_deref().unwrap_or_default()) {
            return Ok(Some(event));
        }
        if look.mine.is_none() {
            self.enter().await?;
            return Ok(None);
        }
        if look.records.is_empty() {
            self.seen = Some(look.version);
            return Ok(None);
        }
        Ok(Some(self.assignments.deliver(look.records)))
    }
}

#[async_trait]
impl Subscriber for Member {
    async fn next(&mut self) -> Result<BusEvent> {
        let inner = self.inner.clone();
        let mut pause = PAUSE_MIN;
        loop {
            let mut changed = std::pin::pin!(inner.common.changed.notified());
            changed.as_mut().enable(); // changes from here on are not missed
            if let Some(event) = self.next_event().await? {
                self.seen = None;
                return Ok(event);
            }
            let changed_here = tokio::time::timeout(pause, changed).await.is_ok();
            pause = if changed_here { PAUSE_MIN } else { (pause * 2).min(PAUSE_MAX) };
        }
    }

    async fn pause(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.assignments.pause(partitions, true);
        Ok(())
    }

    async fn resume(&mut self, partitions: &[Assignment]) -> Result<()> {
        self.assignments.pause(partitions, false);
        self.seen = None;
        Ok(())
    }

    async fn seek(&mut self, partition: &Partition, offset: i64) -> Result<()> {
        self.seen = None;
        self.assignments.seek(partition, offset)
    }

    async fn commit(&mut self, offsets: &[(Assignment, i64)]) -> Result<Vec<Result<()>>> {
        let (member, offsets) = (self.number, offsets.to_vec());
        answer(self.inner.write.send(move |conn, now| group::commit(conn, member, &offsets, now))).await
    }

    async fn release(&mut self, partitions: &[Assignment]) -> Result<()> {
        let (member, given) = (self.number, partitions.to_vec());
        let done = self.inner.write.send(move |conn, now| group::release(conn, member, &given, now));
        // The request was sent and cannot be withdrawn, so the partitions are no longer this
        // member's, answered or not.
        self.assignments.release(partitions);
        answer(done).await
    }

    async fn leave(mut self: Box<Self>) -> Result<()> {
        let member = std::mem::take(&mut self.number);
        self.inner.common.end(member);
        answer(self.inner.write.send(move |conn, now| group::leave(conn, member, now))).await
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        let member = self.number;
        self.inner.common.end(member);
        if member != 0 {
            drop(self.inner.write.send(move |conn, now| group::leave(conn, member, now)));
        }
    }
}
