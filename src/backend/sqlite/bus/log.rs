//! Topics and their records: append, read, sweep. Each function runs in the caller's transaction.

use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};

use super::schema::make_records;
use crate::backend::sqlite::codec::{pack, unpack};
use crate::backend::sqlite::fault::Doing;
use crate::bus::route::{check_topic, no_partition, no_topic, partition_of};
use crate::bus::{Partition, Received, Record, TopicInfo, TopicSettings};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Headers, Origin};
use crate::id::Topic;

/// The most records that one step of a sweep removes.
const SWEEP_STEP: i64 = 1000;

pub(super) fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Creates a topic. Returns false if it exists already.
pub(super) fn create(conn: &Connection, topic: &Topic, settings: &TopicSettings) -> Result<bool> {
    check_topic(topic, settings)?;
    if number_of(conn, topic)?.is_some() {
        return Ok(false);
    }
    let what = "making a topic";
    let retention_bytes = settings.retention_bytes.map(|bytes| i64::try_from(bytes).unwrap_or(i64::MAX));
    conn.execute(
        "INSERT INTO main.bus_topic (name, partitions, retention_us, retention_bytes, turn) VALUES (?1, ?2, ?3, ?4, 0)",
        params![topic.as_str(), settings.partitions, settings.retention.map(micros), retention_bytes],
    )
    .doing(what)?;
    let number = conn.last_insert_rowid();
    for place in 0..settings.partitions {
        conn.prepare_cached(
            "INSERT INTO main.bus_part (topic, place, oldest, next, bytes) VALUES (?1, ?2, 0, 0, 0)",
        )
        .and_then(|mut statement| statement.execute([number, i64::from(place)]))
        .doing(what)?;
        make_records(conn, conn.last_insert_rowid())?;
    }
    Ok(true)
}

/// A topic's number.
pub(super) fn number_of(conn: &Connection, topic: &Topic) -> Result<Option<i64>> {
    conn.prepare_cached("SELECT number FROM main.bus_topic WHERE name = ?1")
        .and_then(|mut statement| statement.query_row([topic.as_str()], |row| row.get(0)).optional())
        .doing("looking for a topic")
}

/// Facts about a topic.
pub(super) fn info(conn: &Connection, topic: &Topic) -> Result<Option<TopicInfo>> {
    conn.prepare_cached("SELECT partitions, retention_us FROM main.bus_topic WHERE name = ?1")
        .and_then(|mut statement| {
            let read = |row: &rusqlite::Row<'_>| {
                let retention: Option<i64> = row.get(1)?;
                Ok(TopicInfo {
                    partitions: row.get(0)?,
                    retention: retention.map(|us| Duration::from_micros(us.unsigned_abs())),
                    compacted: false,
                    replication: None,
                    min_insync: None,
                    unclean_election: false,
                })
            };
            statement.query_row([topic.as_str()], read).optional()
        })
        .doing("reading a topic")
}

/// A partition as it is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part {
    pub number: i64,
    pub oldest: i64,
    pub next: i64,
}

/// Finds a partition. The inner error says that it does not exist.
pub(super) fn part(conn: &Connection, partition: &Partition) -> Result<Result<Part>> {
    let found = conn
        .prepare_cached(
            "SELECT p.number, p.oldest, p.next FROM main.bus_part p JOIN main.bus_topic t ON t.number = p.topic \
             WHERE t.name = ?1 AND p.place = ?2",
        )
        .and_then(|mut statement| {
            let read = |row: &rusqlite::Row<'_>| {
                Ok(Part { number: row.get(0)?, oldest: row.get(1)?, next: row.get(2)? })
            };
            statement.query_row(params![partition.topic.as_str(), partition.number], read).optional()
        })
        .doing("looking for a partition")?;
    Ok(match found {
        Some(part) => Ok(part),
        None if number_of(conn, &partition.topic)?.is_none() => Err(no_topic(&partition.topic)),
        None => Err(no_partition(partition)),
    })
}

/// A partition that is being appended to.
struct Tail {
    part: i64,
    next: i64,
    bytes: i64,
    touched: bool,
}

/// Appends records to partition `to`, or where each record's key says. The inner errors concern the
/// request.
pub(super) fn publish(
    conn: &Connection,
    topic: &Topic,
    to: Option<i32>,
    records: &[Record],
    bytes_max: usize,
    now: Time,
) -> Result<Result<Vec<Result<Origin>>>> {
    let what = "publishing";
    let Some((number, mut turn)) = conn
        .prepare_cached("SELECT number, turn FROM main.bus_topic WHERE name = ?1")
        .and_then(|mut s| {
            s.query_row([topic.as_str()], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?))).optional()
        })
        .doing(what)?
    else {
        return Ok(Err(no_topic(topic)));
    };
    let mut tails = tails(conn, number)?;
    let (partitions, turn_before) = (tails.len() as i32, turn);
    if let Some(number) = to.filter(|number| !(0..partitions).contains(number)) {
        return Ok(Err(no_partition(&Partition { topic: topic.clone(), number })));
    }
    let mut answers = Vec::with_capacity(records.len());
    for record in records {
        if let Err(error) = check_size(topic, record, bytes_max) {
            answers.push(Err(error));
            continue;
        }
        let place = if let Some(number) = to {
            number
        } else if let Some(key) = &record.key {
            partition_of(key, partitions)
        } else {
            turn = (turn + 1) % i64::from(partitions);
            turn as i32
        };
        let tail = &mut tails[place as usize];
        tail.bytes += append(conn, tail.part, tail.next, record, now).doing(what)?;
        answers.push(Ok(Origin::new(topic.clone(), place, tail.next)));
        tail.next += 1;
        tail.touched = true;
    }
    for tail in tails.iter().filter(|tail| tail.touched) {
        conn.prepare_cached("UPDATE main.bus_part SET next = ?2, bytes = bytes + ?3 WHERE number = ?1")
            .and_then(|mut statement| statement.execute([tail.part, tail.next, tail.bytes]))
            .doing(what)?;
    }
    if turn != turn_before {
        conn.prepare_cached("UPDATE main.bus_topic SET turn = ?2 WHERE number = ?1")
            .and_then(|mut statement| statement.execute([number, turn]))
            .doing(what)?;
    }
    Ok(Ok(answers))
}

fn tails(conn: &Connection, topic: i64) -> Result<Vec<Tail>> {
    conn.prepare_cached("SELECT number, next FROM main.bus_part WHERE topic = ?1 ORDER BY place")
        .and_then(|mut statement| {
            let read = |row: &rusqlite::Row<'_>| {
                Ok(Tail { part: row.get(0)?, next: row.get(1)?, bytes: 0, touched: false })
            };
            statement.query_map([topic], read)?.collect()
        })
        .doing("publishing")
}

fn check_size(topic: &Topic, record: &Record, max: usize) -> Result<()> {
    let bytes = record.bytes();
    if bytes <= max {
        return Ok(());
    }
    Err(Error::invalid(
        "record",
        format!("it has {bytes} bytes (key, payload and headers) for the topic {topic}; the limit is {max}"),
    ))
}

/// Appends one record and returns its size in bytes.
fn append(conn: &Connection, part: i64, pos: i64, record: &Record, now: Time) -> rusqlite::Result<i64> {
    let headers = (!record.headers.is_empty()).then(|| pack(&record.headers));
    let (key, payload) = (record.key.as_deref(), record.payload.as_deref());
    conn.prepare_cached(&format!("INSERT INTO main.bus_record_{part} VALUES (?1, ?2, ?3, ?4, ?5, ?6)"))?
        .execute(params![
            pos,
            now.as_micros(),
            record.timestamp.unwrap_or(now).as_micros(),
            key,
            payload,
            headers.as_deref()
        ])?;
    let length = |bytes: Option<&[u8]>| bytes.map_or(0, <[u8]>::len) as i64;
    Ok(length(key) + length(payload) + length(headers.as_deref()))
}

/// Reads records of a partition from an offset on, and deducts them from the limits.
pub(super) fn read(
    conn: &Connection,
    part: i64,
    partition: &Partition,
    from: i64,
    (records_left, bytes_left): (&mut usize, &mut usize),
    into: &mut Vec<Received>,
) -> Result<()> {
    let what = "reading records";
    let sql = format!(
        "SELECT pos, stamp, key, payload, headers FROM main.bus_record_{part} WHERE pos >= ?1 ORDER BY pos LIMIT ?2"
    );
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement.query(params![from, *records_left as i64]).doing(what)?;
    while *records_left > 0 && *bytes_left > 0 {
        let Some(row) = rows.next().doing(what)? else { break };
        let bytes = |at| row.get::<_, Option<Vec<u8>>>(at).doing(what);
        let headers = bytes(4)?.map_or(Ok(Headers::default()), |packed| unpack(&packed))?;
        let record = Record {
            key: bytes(2)?.map(Into::into),
            payload: bytes(3)?.map(Into::into),
            headers,
            timestamp: Some(Time::from_micros(row.get(1).doing(what)?)),
        };
        let origin = Origin::new(partition.topic.clone(), partition.number, row.get(0).doing(what)?);
        *records_left -= 1;
        *bytes_left = bytes_left.saturating_sub(record.bytes());
        into.push(Received::new(record, origin));
    }
    Ok(())
}

/// Removes one step's worth of records that retention does not keep, and returns whether there may
/// be more. Across all processes at most one sweep runs per interval.
pub(super) fn sweep_some(conn: &Connection, interval: Duration, now: Time) -> Result<bool> {
    let what = "sweeping the bus";
    let swept: i64 = conn.query_row("SELECT swept FROM main.bus_meta", [], |row| row.get(0)).doing(what)?;
    // If the clock was set back, `since` is negative and the sweep runs anyway.
    let since = now.as_micros().saturating_sub(swept);
    if (0..micros(interval)).contains(&since) {
        return Ok(false);
    }
    let parts: Vec<(i64, i64, Option<i64>, Option<i64>)> = conn
        .prepare_cached(
            "SELECT p.number, p.bytes, t.retention_us, t.retention_bytes FROM main.bus_part p \
             JOIN main.bus_topic t ON t.number = p.topic WHERE p.oldest < p.next \
             AND (t.retention_us IS NOT NULL OR p.bytes > t.retention_bytes) ORDER BY p.number",
        )
        .and_then(|mut statement| {
            statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?)))?.collect()
        })
        .doing(what)?;
    let mut left = SWEEP_STEP;
    for (part, bytes, retention_us, bytes_max) in parts {
        let oldest_kept = retention_us.map_or(i64::MIN, |us| now.as_micros().saturating_sub(us));
        let excess = bytes_max.map_or(0, |max| (bytes - max).max(0));
        left -= cut(conn, part, oldest_kept, excess, left)?;
        if left <= 0 {
            return Ok(true);
        }
    }
    conn.execute("UPDATE main.bus_meta SET swept = ?1", [now.as_micros()]).doing(what)?;
    Ok(false)
}

/// Removes a partition's first records while they are too old or the partition exceeds its size
/// limit.
fn cut(conn: &Connection, part: i64, oldest_kept: i64, excess: i64, max: i64) -> Result<i64> {
    let what = "sweeping a partition";
    let sql = format!(
        "SELECT pos, at, ifnull(length(key), 0) + ifnull(length(payload), 0) + ifnull(length(headers), 0) \
         FROM main.bus_record_{part} ORDER BY pos LIMIT ?1"
    );
    let (mut count, mut bytes, mut below) = (0, 0, None);
    {
        let mut statement = conn.prepare_cached(&sql).doing(what)?;
        let mut rows = statement.query([max]).doing(what)?;
        while let Some(row) = rows.next().doing(what)? {
            let at: i64 = row.get(1).doing(what)?;
            if at >= oldest_kept && bytes >= excess {
                break;
            }
            count += 1;
            bytes += row.get::<_, i64>(2).doing(what)?;
            below = Some(row.get::<_, i64>(0).doing(what)? + 1);
        }
    }
    if let Some(below) = below {
        remove_below(conn, part, below, bytes)?;
    }
    Ok(count)
}

fn remove_below(conn: &Connection, part: i64, below: i64, bytes: i64) -> Result<()> {
    let what = "removing records";
    conn.prepare_cached(&format!("DELETE FROM main.bus_record_{part} WHERE pos < ?1"))
        .and_then(|mut statement| statement.execute([below]))
        .doing(what)?;
    conn.prepare_cached("UPDATE main.bus_part SET oldest = ?2, bytes = bytes - ?3 WHERE number = ?1")
        .and_then(|mut statement| statement.execute([part, below, bytes]))
        .doing(what)?;
    Ok(())
}

/// Removes the records of a partition below an offset.
#[cfg(feature = "testing")]
pub(super) fn remove(conn: &Connection, partition: &Partition, below: i64) -> Result<Result<()>> {
    let found = match part(conn, partition)? {
        Ok(found) => found,
        Err(none) => return Ok(Err(none)),
    };
    let below = below.clamp(found.oldest, found.next);
    let bytes: i64 = conn
        .query_row(
            &format!(
                "SELECT ifnull(sum(ifnull(length(key), 0) + ifnull(length(payload), 0) + ifnull(length(headers), 0)), 0) \
                 FROM main.bus_record_{} WHERE pos < ?1",
                found.number
            ),
            [below],
            |row| row.get(0),
        )
        .doing("removing records")?;
    remove_below(conn, found.number, below, bytes).map(Ok)
}
