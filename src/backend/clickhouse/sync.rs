//! How far each partition was applied, and what could not be read.
//!
//! ClickHouse has no transactions, so the state of a partition is made of values that only grow: whoever inserts
//! a state again, late, or beside another feed leaves the greater one. Rows come first, then the state that
//! speaks of them.
//!
//! The place of a partition is (writer, count, offset). A feed that takes a partition over asks how far it is,
//! and from then on writes with the next writer's number: whatever the feed before it still writes, however
//! often, is less. Within one writer the last state counts, also if it goes back, as it does when a topic was
//! made anew.

use std::collections::BTreeMap;

use uuid::Uuid;

use super::http::{Server, Statement};
use super::schema::{REJECTED, SYNC, insert};
use super::wire::{Answer, Rows};
use crate::analytics::{PartitionSync, Rejected, RejectedEntry, Synced, earliest, held_back};
use crate::bus::Partition;
use crate::clock::Time;
use crate::error::Result;
use crate::event::Origin;
use crate::id::Topic;

/// The number of a topic's own row.
const OF_TOPIC: i32 = -1;
/// Less than every time: there is none.
const NEVER: i64 = i64::MIN;
/// Less than every offset.
const NOWHERE: i64 = i64::MIN;

/// Which writer, and its how many-th state.
pub(super) type WriteSeq = (u64, u64);

fn time(micros: i64) -> Option<Time> {
    (micros != NEVER).then(|| Time::from_micros(micros))
}

fn micros(time: Option<Time>) -> i64 {
    time.map_or(NEVER, Time::as_micros)
}

/// What is known of one partition.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Place {
    pub(super) writer: u64,
    offset: Option<i64>,
    pulse: Option<Time>,
}

/// Everything that is known of one topic.
#[derive(Debug, Clone, Default)]
pub(super) struct OfTopic {
    pub(super) synced: Synced,
    pub(super) places: BTreeMap<i32, Place>,
}

/// How far everything is.
pub(super) async fn read(server: &Server, model: Uuid) -> Result<BTreeMap<Topic, OfTopic>> {
    let sql = format!(
        "SELECT topic, number, max(place) AS at, max(pulse), max(partitions) FROM {}.{SYNC}
         WHERE model = {{model:UUID}} GROUP BY topic, number ORDER BY topic, number",
        server.database()
    );
    let statement = Statement::new(sql).bind("model", model);
    let answer = server.ask("reading how far a read model is", statement).await?;
    let (mut answer, mut topics) = (Answer::new(&answer), BTreeMap::<Topic, OfTopic>::new());
    while answer.more() {
        let of = topics.entry(Topic::new(answer.text()?)?).or_default();
        let number = answer.i32()?;
        let (writer, _, offset) = (answer.u64()?, answer.u64()?, answer.i64()?);
        let (pulse, partitions) = (time(answer.i64()?), answer.i32()?);
        if number == OF_TOPIC {
            of.synced.expect(partitions);
            of.synced.complete = pulse;
        } else {
            let offset = (offset != NOWHERE && writer > 0).then_some(offset);
            of.places.insert(number, Place { writer, offset, pulse });
        }
    }
    for of in topics.values_mut() {
        for (number, place) in &of.places {
            of.synced.expect(number.saturating_add(1));
            if let Some(last) = usize::try_from(*number).ok().and_then(|at| of.synced.pulses.get_mut(at)) {
                *last = place.pulse;
            }
        }
    }
    Ok(topics)
}

/// Each partition, in order.
pub(super) fn partitions(topics: &BTreeMap<Topic, OfTopic>) -> Vec<PartitionSync> {
    let mut all = Vec::new();
    for (topic, of) in topics {
        for (number, pulse) in (0..).zip(&of.synced.pulses) {
            let partition = Partition { topic: topic.clone(), number };
            all.push(PartitionSync::new(
                partition,
                of.places.get(&number).and_then(|place| place.offset),
                *pulse,
            ));
        }
    }
    all
}

/// States on their way to the server.
#[derive(Default)]
pub(super) struct States(Rows);

impl States {
    fn row(&mut self, model: Uuid, topic: &Topic, number: i32) -> &mut Rows {
        self.0.uuid(model);
        self.0.text(topic.as_str());
        self.0.i32(number);
        &mut self.0
    }

    /// A partition was applied up to an offset and a pulse.
    pub(super) fn partition(
        &mut self,
        model: Uuid,
        of: &Partition,
        write_seq: WriteSeq,
        end: Option<i64>,
        pulse: Option<Time>,
    ) {
        let row = self.row(model, &of.topic, of.number);
        // Changes that come from elsewhere say nothing about the place.
        let ((writer, count), end) = end.map_or(((0, 0), NOWHERE), |end| (write_seq, end));
        row.u64(writer);
        row.u64(count);
        row.i64(end);
        row.i64(micros(pulse));
        row.i32(0);
    }

    /// A topic has so many partitions, and is complete up to a time.
    pub(super) fn topic(&mut self, model: Uuid, topic: &Topic, synced: &Synced) {
        let row = self.row(model, topic, OF_TOPIC);
        row.u64(0);
        row.u64(0);
        row.i64(NOWHERE);
        row.i64(micros(synced.complete));
        row.i32(i32::try_from(synced.pulses.len()).unwrap_or(i32::MAX));
    }

    pub(super) async fn insert(self, server: &Server) -> Result<()> {
        server.insert("noting how far a read model is", insert(server, SYNC), self.0.0).await
    }
}

/// Up to when everything is applied, for a tenant. A rejected change is inserted before the state that passes
/// it, so it is read after that.
pub(super) async fn last_sync_at(server: &Server, model: Uuid, tenant: Uuid) -> Result<Option<Time>> {
    let topics = read(server, model).await?;
    let complete = earliest(topics.values().map(|of| of.synced.complete));
    let sql = format!(
        "SELECT min(holds) FROM (SELECT min(holds_back) AS holds FROM {}.{REJECTED}
           WHERE model = {{model:UUID}} AND tenant IN ('', {{tenant:String}})
           GROUP BY topic, number, offset, tenant HAVING max(rejected) > max(dropped)) HAVING count() > 0",
        server.database()
    );
    let statement = Statement::new(sql).bind("model", model).bind("tenant", tenant);
    let answer = server.ask("reading what holds a read model back", statement).await?;
    let mut answer = Answer::new(&answer);
    let holds = if answer.more() { Some(time(answer.i64()?)) } else { None };
    Ok(held_back(complete, holds))
}

/// Rejected changes on their way to the server.
#[derive(Default)]
pub(super) struct Rejections(Rows);

impl Rejections {
    pub(super) fn add(
        &mut self,
        model: Uuid,
        of: &Partition,
        write_seq: WriteSeq,
        rejected: &Rejected,
        holds: Option<Time>,
    ) {
        let tenant = rejected.tenant.map(|tenant| tenant.to_string()).unwrap_or_default();
        self.name(model, of, rejected.origin.offset, &tenant);
        for number in [write_seq.0, write_seq.1, 0, 0] {
            self.0.u64(number);
        }
        self.0.i64(micros(holds));
        self.0.text(&rejected.reason);
        self.0.bytes(&rejected.payload);
    }

    fn name(&mut self, model: Uuid, of: &Partition, offset: i64, tenant: &str) {
        self.0.uuid(model);
        self.0.text(of.topic.as_str());
        self.0.i32(of.number);
        self.0.i64(offset);
        self.0.text(tenant);
    }

    /// Given up: whatever was rejected there up to a write_seq.
    fn drop(&mut self, model: Uuid, of: &Partition, offset: i64, tenant: &str, write_seq: WriteSeq) {
        self.name(model, of, offset, tenant);
        for number in [0, 0, write_seq.0, write_seq.1] {
            self.0.u64(number);
        }
        self.0.i64(i64::MAX);
        self.0.text("");
        self.0.text("");
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.0.is_empty()
    }

    pub(super) async fn insert(self, server: &Server) -> Result<()> {
        server.insert("noting rejected changes", insert(server, REJECTED), self.0.0).await
    }
}

/// Rejected changes, by topic, partition and offset.
pub(super) async fn rejected(server: &Server, model: Uuid, limit: usize) -> Result<Vec<RejectedEntry>> {
    let sql = format!(
        "SELECT topic, number, offset, tenant, min(holds_back), max(reason), max(payload) FROM {}.{REJECTED}
         WHERE model = {{model:UUID}} GROUP BY topic, number, offset, tenant HAVING max(rejected) > max(dropped)
         ORDER BY topic, number, offset, tenant LIMIT {{limit:UInt64}}",
        server.database()
    );
    let statement = Statement::new(sql).bind("model", model).bind("limit", limit);
    let answer = server.ask("listing rejected changes", statement).await?;
    let (mut answer, mut all) = (Answer::new(&answer), Vec::new());
    while answer.more() {
        let origin = Origin::new(Topic::new(answer.text()?)?, answer.i32()?, answer.i64()?);
        let tenant = Uuid::try_parse(answer.text()?).ok();
        let holds_back = time(answer.i64()?);
        let reason = answer.text()?.to_owned();
        let rejected = Rejected { tenant, origin, reason, payload: answer.bytes()?.to_vec() };
        all.push(RejectedEntry::new(rejected, holds_back));
    }
    Ok(all)
}

/// Gives a rejected change up.
pub(super) async fn drop_rejected(server: &Server, model: Uuid, of: &Partition, offset: i64) -> Result<bool> {
    let sql = format!(
        "SELECT tenant, max(rejected) AS last_write FROM {}.{REJECTED}
         WHERE model = {{model:UUID}} AND topic = {{topic:String}} AND number = {{number:Int32}} AND offset = {{offset:Int64}}
         GROUP BY tenant HAVING last_write > max(dropped)",
        server.database()
    );
    let statement = Statement::new(sql).bind("model", model).bind("topic", &of.topic);
    let statement = statement.bind("number", of.number).bind("offset", offset);
    let answer = server.ask("looking for a rejected change", statement).await?;
    let (mut answer, mut drops) = (Answer::new(&answer), Rejections::default());
    while answer.more() {
        let tenant = answer.text()?;
        let write_seq = (answer.u64()?, answer.u64()?);
        drops.drop(model, of, offset, tenant, write_seq);
    }
    if drops.is_empty() {
        return Ok(false);
    }
    drops.insert(server).await?;
    Ok(true)
}
