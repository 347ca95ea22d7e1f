//! Groups: members, assignments and committed offsets. Each function runs in the caller's
//! transaction.

use std::collections::{BTreeMap, BTreeSet};

use rusqlite::{Connection, OptionalExtension, params};

use super::log::{self, micros};
use crate::backend::sqlite::codec::sound;
use crate::backend::sqlite::fault::Doing;
use crate::bus::assignments::GroupAssignment;
use crate::bus::group::{PartitionSlot, Step, plan};
use crate::bus::route::{check_offset, fenced, no_topic};
use crate::bus::{Assignment, Partition, Start, Subscription};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Topic;

fn run(conn: &Connection, sql: &str, params: impl rusqlite::Params) -> Result<usize> {
    conn.prepare_cached(sql).and_then(|mut statement| statement.execute(params)).doing("changing a group")
}

fn rows<T>(
    conn: &Connection,
    sql: &str,
    params: impl rusqlite::Params,
    read: impl FnMut(&rusqlite::Row<'_>) -> rusqlite::Result<T>,
) -> Result<Vec<T>> {
    conn.prepare_cached(sql)
        .and_then(|mut statement| statement.query_map(params, read)?.collect())
        .doing("reading a group")
}

/// A group's number, if any member ever joined it.
pub(super) fn number_of(conn: &Connection, group: &str) -> Result<Option<i64>> {
    conn.prepare_cached("SELECT number FROM main.bus_group WHERE name = ?1")
        .and_then(|mut statement| statement.query_row([group], |row| row.get(0)).optional())
        .doing("looking for a group")
}

fn committed_of(conn: &Connection, group: i64, part: i64) -> Result<Option<i64>> {
    conn.prepare_cached("SELECT pos FROM main.bus_committed WHERE grp = ?1 AND part = ?2")
        .and_then(|mut statement| statement.query_row([group, part], |row| row.get(0)).optional())
        .doing("reading what is committed")
}

/// The offset a group has committed for a partition.
pub(super) fn committed(conn: &Connection, group: &str, partition: &Partition) -> Result<Option<i64>> {
    let part = log::part(conn, partition)??;
    match number_of(conn, group)? {
        Some(group) => committed_of(conn, group, part.number),
        None => Ok(None),
    }
}

/// Adds a member. The inner error concerns the subscription.
pub(super) fn join(
    conn: &Connection,
    subscription: &Subscription,
    member: i64,
    now: Time,
) -> Result<Result<()>> {
    let mut topics = Vec::new();
    for topic in &subscription.topics {
        match log::number_of(conn, topic)? {
            Some(number) => topics.push(number),
            None => return Ok(Err(no_topic(topic))),
        }
    }
    run(
        conn,
        "INSERT INTO main.bus_group (name, epoch) VALUES (?1, 0) ON CONFLICT DO NOTHING",
        [&*subscription.group],
    )?;
    let group = number_of(conn, &subscription.group)?.ok_or_else(|| Error::Corrupt("a lost group".into()))?;
    if subscription.start == Start::Refuse
        && let Some(refused) = not_begun(conn, group, subscription, &topics)?
    {
        return Ok(Err(refused));
    }
    run(
        conn,
        "INSERT INTO main.bus_member (number, grp, joined, seen, session_us, revoke_us, latest) \
         VALUES (?1, ?2, ?3, ?3, ?4, ?5, ?6)",
        params![
            member,
            group,
            now.as_micros(),
            micros(subscription.session_timeout),
            micros(subscription.revoke_timeout),
            subscription.start == Start::Latest
        ],
    )?;
    for topic in topics {
        run(conn, "INSERT OR IGNORE INTO main.bus_wish (member, topic) VALUES (?1, ?2)", [member, topic])?;
    }
    expire(conn, group, now)?;
    rebalance(conn, group, now)?;
    Ok(Ok(()))
}

/// An error for the first partition of which nothing was committed.
fn not_begun(
    conn: &Connection,
    group: i64,
    subscription: &Subscription,
    topics: &[i64],
) -> Result<Option<Error>> {
    for (number, topic) in topics.iter().zip(&subscription.topics) {
        let missing = rows(
            conn,
            "SELECT p.place FROM main.bus_part p WHERE p.topic = ?1 AND NOT EXISTS \
             (SELECT 1 FROM main.bus_committed c WHERE c.grp = ?2 AND c.part = p.number) ORDER BY p.place LIMIT 1",
            [*number, group],
            |row| row.get(0),
        )?;
        if let Some(number) = missing.first() {
            let partition = Partition { topic: topic.clone(), number: *number };
            return Ok(Some(Error::NotFound(format!(
                "the group {:?} has no committed offset for {partition}, and its settings say not to start without one",
                subscription.group
            ))));
        }
    }
    Ok(None)
}

/// Removes a member from its group.
pub(super) fn leave(conn: &Connection, member: i64, now: Time) -> Result<()> {
    let group = rows(conn, "SELECT grp FROM main.bus_member WHERE number = ?1", [member], |row| row.get(0))?;
    if let Some(group) = group.first() {
        remove_member(conn, member)?;
        rebalance(conn, *group, now)?;
    }
    Ok(())
}

fn remove_member(conn: &Connection, member: i64) -> Result<()> {
    run(
        conn,
        "DELETE FROM main.bus_held WHERE grp = (SELECT grp FROM main.bus_member WHERE number = ?1) AND member = ?1",
        [member],
    )?;
    run(conn, "DELETE FROM main.bus_wish WHERE member = ?1", [member])?;
    run(conn, "DELETE FROM main.bus_member WHERE number = ?1", [member])?;
    Ok(())
}

/// Expels members that sent no heartbeat in time, or did not release revoked partitions in time. A
/// heartbeat from the future predates a clock that was set back; it does not count, or dead members
/// would stay until the clock catches up.
fn expire(conn: &Connection, group: i64, now: Time) -> Result<bool> {
    let dead: Vec<i64> = rows(
        conn,
        "SELECT number FROM main.bus_member WHERE grp = ?1 AND (seen + session_us < ?2 OR seen - session_us > ?2 OR number IN \
         (SELECT member FROM main.bus_held WHERE grp = ?1 AND revoke_by < ?2))",
        [group, now.as_micros()],
        |row| row.get(0),
    )?;
    for member in &dead {
        tracing::info!(
            member,
            "a member of a group gave no sign of life, or nothing back; its partitions go to others"
        );
        remove_member(conn, *member)?;
    }
    Ok(!dead.is_empty())
}

/// Records heartbeats. Returns true if assignments changed.
pub(super) fn heartbeat(conn: &Connection, members: &[i64], now: Time) -> Result<bool> {
    let mut groups = BTreeSet::new();
    for member in members {
        run(conn, "UPDATE main.bus_member SET seen = ?2 WHERE number = ?1", [*member, now.as_micros()])?;
        groups.extend(rows(conn, "SELECT grp FROM main.bus_member WHERE number = ?1", [*member], |row| {
            row.get::<_, i64>(0)
        })?);
    }
    let mut changed = false;
    for group in groups {
        if expire(conn, group, now)? {
            rebalance(conn, group, now)?;
            changed = true;
        }
    }
    Ok(changed)
}

/// A member's partitions, or `None` if it is no longer a member.
pub(super) fn mine(conn: &Connection, member: i64) -> Result<Option<Vec<(i64, GroupAssignment)>>> {
    let group = rows(conn, "SELECT grp FROM main.bus_member WHERE number = ?1", [member], |row| row.get(0))?;
    let Some(group) = group.first().copied() else { return Ok(None) };
    let found = rows(
        conn,
        "SELECT h.part, t.name, p.place, h.epoch, h.revoke_by IS NOT NULL, c.pos, p.oldest FROM main.bus_held h \
         JOIN main.bus_part p ON p.number = h.part JOIN main.bus_topic t ON t.number = p.topic \
         LEFT JOIN main.bus_committed c ON c.grp = h.grp AND c.part = h.part \
         WHERE h.grp = ?1 AND h.member = ?2 ORDER BY h.part",
        [group, member],
        |row| {
            let topic: String = row.get(1)?;
            let (number, epoch): (i32, i64) = (row.get(2)?, row.get(3)?);
            let (part, revoking, committed, oldest) = (row.get(0)?, row.get(4)?, row.get(5)?, row.get(6)?);
            Ok(sound(Topic::new(topic)).map(|topic| {
                let partition = Partition { topic, number };
                let assigned = Assignment { partition, epoch: epoch.unsigned_abs() };
                (part, GroupAssignment { assigned, revoking, committed, oldest })
            }))
        },
    )?;
    found.into_iter().collect::<Result<_>>().map(Some)
}

/// The group and partition, if the member owns the partition under this epoch.
fn held(conn: &Connection, member: i64, assigned: &Assignment) -> Result<Option<(i64, log::Part)>> {
    let Ok(part) = log::part(conn, &assigned.partition)? else { return Ok(None) };
    let group = rows(
        conn,
        "SELECT h.grp FROM main.bus_held h JOIN main.bus_member m ON m.number = ?1 AND m.grp = h.grp \
         WHERE h.part = ?2 AND h.member = ?1 AND h.epoch = ?3",
        params![member, part.number, assigned.epoch as i64],
        |row| row.get(0),
    )?;
    Ok(group.first().map(|group| (*group, part)))
}

/// Commits offsets. The inner results are for each offset.
pub(super) fn commit(
    conn: &Connection,
    member: i64,
    offsets: &[(Assignment, i64)],
    now: Time,
) -> Result<Vec<Result<()>>> {
    let mut answers = Vec::with_capacity(offsets.len());
    for (assigned, offset) in offsets {
        let Some((group, part)) = held(conn, member, assigned)? else {
            answers.push(Err(fenced(assigned)));
            continue;
        };
        let checked = check_offset(&assigned.partition, *offset, part.next);
        if checked.is_ok() {
            run(
                conn,
                "INSERT INTO main.bus_committed (grp, part, pos, at) VALUES (?1, ?2, ?3, ?4) \
                 ON CONFLICT DO UPDATE SET pos = excluded.pos, at = excluded.at",
                [group, part.number, *offset, now.as_micros()],
            )?;
        }
        answers.push(checked);
    }
    Ok(answers)
}

/// Releases partitions. Ignores those that the member no longer owns.
pub(super) fn release(conn: &Connection, member: i64, partitions: &[Assignment], now: Time) -> Result<()> {
    let mut groups = BTreeSet::new();
    for assigned in partitions {
        if let Some((group, part)) = held(conn, member, assigned)? {
            run(conn, "DELETE FROM main.bus_held WHERE grp = ?1 AND part = ?2", [group, part.number])?;
            groups.insert(group);
        }
    }
    for group in groups {
        rebalance(conn, group, now)?;
    }
    Ok(())
}

/// A member, as a rebalance sees it.
struct GroupMember {
    number: i64,
    revoke_us: i64,
    latest: bool,
    topics: BTreeSet<i64>,
}

fn group_members(conn: &Connection, group: i64) -> Result<Vec<GroupMember>> {
    let mut members = rows(
        conn,
        "SELECT number, revoke_us, latest FROM main.bus_member WHERE grp = ?1 ORDER BY joined, number",
        [group],
        |row| {
            let (number, revoke_us, latest) = (row.get(0)?, row.get(1)?, row.get(2)?);
            Ok(GroupMember { number, revoke_us, latest, topics: BTreeSet::new() })
        },
    )?;
    for member in &mut members {
        member.topics.extend(rows(
            conn,
            "SELECT topic FROM main.bus_wish WHERE member = ?1",
            [member.number],
            |row| row.get::<_, i64>(0),
        )?);
    }
    Ok(members)
}

/// Assigns free partitions and revokes those that should move.
fn rebalance(conn: &Connection, group: i64, now: Time) -> Result<()> {
    let members = group_members(conn, group)?;
    let parts: Vec<(i64, i64, i64)> = rows(
        conn,
        "SELECT number, topic, next FROM main.bus_part WHERE topic IN (SELECT w.topic FROM main.bus_wish w \
         JOIN main.bus_member m ON m.number = w.member WHERE m.grp = ?1) ORDER BY topic, place",
        [group],
        |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
    )?;
    let held: BTreeMap<i64, (i64, bool)> = rows(
        conn,
        "SELECT part, member, revoke_by IS NOT NULL FROM main.bus_held WHERE grp = ?1",
        [group],
        |row| Ok((row.get(0)?, (row.get(1)?, row.get(2)?))),
    )?
    .into_iter()
    .collect();
    let slots: Vec<PartitionSlot> = parts
        .iter()
        .map(|(part, topic, _)| {
            let holding = held.get(part);
            PartitionSlot {
                holder: holding.and_then(|(member, _)| members.iter().position(|m| m.number == *member)),
                revoking: holding.is_some_and(|(_, revoking)| *revoking),
                eligible: (0..members.len()).filter(|at| members[*at].topics.contains(topic)).collect(),
            }
        })
        .collect();
    let begun: BTreeSet<i64> = rows(
        conn,
        "SELECT DISTINCT p.topic FROM main.bus_committed c JOIN main.bus_part p ON p.number = c.part WHERE c.grp = ?1",
        [group],
        |row| row.get(0),
    )?
    .into_iter()
    .collect();
    for step in plan(members.len(), &slots) {
        match step {
            Step::Assign { slot, to } => {
                let (part, topic, end) = parts[slot];
                // "From now on" counts from the group's first assignment of the topic, even if the
                // partition moves later.
                let first = Some(end).filter(|_| members[to].latest && !begun.contains(&topic));
                give(conn, group, part, members[to].number, first, now)?;
            }
            Step::Revoke { slot } => {
                let patience = slots[slot].holder.map_or(0, |at| members[at].revoke_us);
                let by = now.as_micros().saturating_add(patience);
                let sql = "UPDATE main.bus_held SET revoke_by = ?3 WHERE grp = ?1 AND part = ?2";
                run(conn, sql, [group, parts[slot].0, by])?;
            }
        }
    }
    Ok(())
}

/// Assigns a partition to a member. With `begin`, also commits that offset as its start.
fn give(conn: &Connection, group: i64, part: i64, to: i64, begin: Option<i64>, now: Time) -> Result<()> {
    run(conn, "UPDATE main.bus_group SET epoch = epoch + 1 WHERE number = ?1", [group])?;
    run(
        conn,
        "INSERT INTO main.bus_held (grp, part, member, epoch) \
         SELECT number, ?2, ?3, epoch FROM main.bus_group WHERE number = ?1 \
         ON CONFLICT DO UPDATE SET member = excluded.member, epoch = excluded.epoch, revoke_by = NULL",
        [group, part, to],
    )?;
    if let Some(begin) = begin {
        let sql = "INSERT INTO main.bus_committed (grp, part, pos, at) VALUES (?1, ?2, ?3, ?4) ON CONFLICT DO NOTHING";
        run(conn, sql, [group, part, begin, now.as_micros()])?;
    }
    Ok(())
}
