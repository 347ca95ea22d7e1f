//! Held events that are due, dead letters that are not published yet, and the markers of
//! transactional batches. Each kind has an index that holds nothing else.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::time::Duration;

use super::connect::Doing;
use super::read::{Scopes, rows};
use super::snapshot::index_key;
use super::want::{Wants, member, member_key};
use super::{RedisLedger, Result, codec, wants_of};
use crate::clock::Time;
use crate::error::Error;
use crate::event::Record;
use crate::id::{Aggregate, Scope, Topic};
use crate::ledger::transition::{Head, Row};
use crate::ledger::{
    Claims as _, Due, Entry, Filter, HeldQuery, Key, Marker, PublishedDead, Rows as _, State, runnable,
};

/// How many entries of an index are read at once.
const PART: usize = 250;

async fn of_scope(ledger: &RedisLedger, scope: &Scope) -> Result<(Scopes, Vec<i32>)> {
    let scopes = Scopes::read(ledger).await?;
    let filter = Filter { scope: Some(scope.clone()), ..Filter::default() };
    let numbers = scopes.wanted(&filter);
    Ok((scopes, numbers))
}

/// The held events that may be claimed now.
pub(super) async fn due(ledger: &RedisLedger, scope: &Scope, query: &HeldQuery, limit: usize) -> Result<Due> {
    let (scopes, numbers) = of_scope(ledger, scope).await?;
    let now = ledger.now().await?;
    let mut heads: HashMap<(i32, Aggregate), Option<Head>> = HashMap::new();
    let mut found = Vec::new();
    for number in &numbers {
        // Read all of them: those at the front may wait for later ones.
        for from in (0..).step_by(PART) {
            let until = now.as_micros().to_string();
            let (count, rows, its_heads, _) = waiting(ledger, "due", *number, &until, from).await?;
            for (member, beginning) in rows {
                let codec::Beginning { order, origin, .. } = codec::waiting(&beginning)?;
                let matches = query.matches(origin.as_ref());
                found.push(((member_key(&member)?, matches), *number, order));
            }
            for (aggregate, head) in its_heads {
                let head = if head.is_empty() { None } else { Some(codec::head(&head)?) };
                let aggregate = Aggregate::new(String::from_utf8_lossy(&aggregate));
                let aggregate = aggregate.map_err(|error| Error::Corrupt(error.to_string()))?;
                heads.insert((*number, aggregate), head);
            }
            if count < PART {
                break;
            }
        }
    }
    let head = |scope, aggregate: &Aggregate| Ok(heads.get(&(scope, aggregate.clone())).cloned().flatten());
    let (keys, claimable) = runnable(found, limit, now, |(_, matches)| *matches, head)?;
    let keys: Vec<Key> = keys.into_iter().map(|(key, _)| key).collect();
    let mut entries = Vec::new();
    for (key, row) in read(ledger, &keys, query).await? {
        // Another claim may have been faster.
        if row.body.is_some() && matches!(row.state, State::Leased | State::Retry | State::Parked) {
            entries.push(scopes.entry(&key, row)?);
        }
    }
    Ok(Due { entries, claimable, held: count(ledger, &numbers).await? })
}

/// Reads rows until the query's byte limit is reached. It first reads a few to learn their size,
/// because an answer holds all its rows in memory.
async fn read(ledger: &RedisLedger, keys: &[Key], query: &HeldQuery) -> Result<Vec<(Key, Row)>> {
    let (mut found, mut bytes, mut part) = (Vec::new(), 0, PART);
    if query.bytes_max.is_some() {
        part = FIRST_PART;
    }
    let mut left = keys;
    while !left.is_empty() {
        let (now, later) = left.split_at(part.min(left.len()));
        left = later;
        for (key, stored, _) in rows(ledger, now).await? {
            let row = codec::row(&stored)?;
            if query.bytes_max.is_some_and(|max| bytes >= max) {
                return Ok(found);
            }
            bytes += row.body.as_ref().map_or(0, Record::memory_bytes);
            found.push((key, row));
        }
        let each = (bytes / found.len().max(1)).max(1);
        part = query.bytes_max.map_or(PART, |max| (max.saturating_sub(bytes) / each).clamp(1, PART));
    }
    Ok(found)
}

/// How many rows are read before their size is known.
const FIRST_PART: usize = 8;

/// Pairs of bytes in a script's answer.
type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Part of a scope's waiting rows: how many members were read, the members with the start of their
/// rows, the heads of their aggregates, and the rows' times in the index.
async fn waiting(
    ledger: &RedisLedger,
    index: &str,
    scope: i32,
    until: &str,
    from: usize,
) -> Result<(usize, Pairs, Pairs, Vec<f64>)> {
    let args = |script: &mut redis::ScriptInvocation<'_>| {
        script.arg(index_key(index, scope)).arg(scope).arg(until).arg(from).arg(PART);
        script.arg(codec::BEFORE_AGGREGATE).arg(codec::BEGINNING);
    };
    ledger.ask(&ledger.0.scripts.waiting, "looking for what is held", args).await
}

async fn count(ledger: &RedisLedger, numbers: &[i32]) -> Result<u64> {
    let mut pipe = redis::pipe();
    for number in numbers {
        for index in ["due", "out", "rest"] {
            pipe.cmd("ZCARD").arg(ledger.key(&index_key(index, *number)));
        }
    }
    if numbers.is_empty() {
        return Ok(0);
    }
    let counts: Vec<u64> = pipe.query_async(&mut ledger.connection()).await.doing("counting what is held")?;
    Ok(counts.iter().sum())
}

/// The dead letters that are not published yet. The score in their index is when they died, or
/// until when they are reserved.
pub(super) async fn unpublished_dead(
    ledger: &RedisLedger,
    scope: &Scope,
    query: &HeldQuery,
    limit: usize,
    reserve: Option<Duration>,
) -> Result<Vec<Entry>> {
    let (scopes, numbers) = of_scope(ledger, scope).await?;
    let until = match reserve {
        Some(_) => ledger.now().await?.as_micros().to_string(),
        None => "+inf".to_owned(),
    };
    let mut found = Vec::new();
    for number in numbers {
        let mut matching = Vec::new();
        for from in (0..).step_by(PART) {
            let (count, rows, _, times) = waiting(ledger, "out", number, &until, from).await?;
            for ((member, beginning), time) in rows.into_iter().zip(times) {
                if query.matches(codec::waiting(&beginning)?.origin.as_ref()) {
                    matching.push((time, member_key(&member)?));
                }
            }
            if count < PART || matching.len() >= limit {
                break;
            }
        }
        found.extend(matching);
    }
    found.sort_by(|(one, _), (other, _)| one.total_cmp(other)); // each tenant's are in order already
    let keys: Vec<Key> = found.into_iter().take(limit).map(|(_, key)| key).collect();
    let mut dead = read(ledger, &keys, query).await?;
    if let Some(reserve) = reserve {
        let mine = reserved(ledger, dead.iter().map(|(key, _)| key), reserve).await?;
        dead.retain(|(key, _)| mine.contains(&member(key)));
    }
    dead.into_iter().map(|(key, row)| scopes.entry(&key, row)).collect()
}

/// Reserves dead letters. Returns those that nobody else has reserved.
async fn reserved<'k>(
    ledger: &RedisLedger,
    keys: impl Iterator<Item = &'k Key>,
    reserve: Duration,
) -> Result<HashSet<Vec<u8>>> {
    let members: Vec<_> = keys.map(|key| (index_key("out", key.scope), member(key))).collect();
    if members.is_empty() {
        return Ok(HashSet::new());
    }
    let args = |script: &mut redis::ScriptInvocation<'_>| {
        script.arg(u64::try_from(reserve.as_micros()).unwrap_or(u64::MAX).min(RESERVE_US_MAX));
        for (index, member) in &members {
            script.arg(index).arg(member);
        }
    };
    let mine: Vec<Vec<u8>> = ledger.ask(&ledger.0.scripts.reserve, "reserving what is dead", args).await?;
    Ok(mine.into_iter().collect())
}

/// A century: a score is exact up to 2^53.
const RESERVE_US_MAX: u64 = 3_155_760_000_000_000;

/// Records that dead letters were published.
pub(super) async fn mark_dead_published(ledger: &RedisLedger, entries: &[PublishedDead]) -> Result<()> {
    if entries.is_empty() {
        return Ok(());
    }
    let wants = || wants_of(entries.iter().map(|(identity, week, _)| (identity, *week)));
    ledger
        .decide(wants, |snapshot, _| {
            for (identity, week, token) in entries {
                let Some(scope) = snapshot.known_scope(identity.tenant.as_ref(), &identity.scope)? else {
                    continue;
                };
                snapshot.mark_dead_published(
                    Key { week: *week, scope, id: identity.id.key().into_owned() },
                    *token,
                )?;
            }
            Ok(())
        })
        .await
}

pub(super) fn marker_field(scope: &Scope, topic: &Topic, partition: i32) -> String {
    format!("{}\0{}\0{partition}", scope.as_str(), topic.as_str())
}

/// Sets markers; deletes those that are empty.
pub(super) async fn set_markers(ledger: &RedisLedger, scope: &Scope, markers: &[Marker]) -> Result<()> {
    if markers.is_empty() {
        return Ok(());
    }
    ledger
        .decide(Wants::default, |snapshot, _| {
            snapshot.set_markers(scope, markers);
            Ok(())
        })
        .await
}

/// The markers of partitions, ordered by partition.
pub(super) async fn markers(
    ledger: &RedisLedger,
    scope: &Scope,
    topic: &Topic,
    partitions: &[i32],
) -> Result<Vec<Marker>> {
    let wanted: BTreeSet<i32> = partitions.iter().copied().collect();
    if wanted.is_empty() {
        return Ok(Vec::new());
    }
    let mut get = redis::cmd("HMGET");
    get.arg(ledger.key(":markers"));
    for partition in &wanted {
        get.arg(marker_field(scope, topic, *partition));
    }
    let stored: Vec<Option<Vec<u8>>> =
        get.query_async(&mut ledger.connection()).await.doing("reading markers")?;
    let mut markers = Vec::new();
    for (partition, stored) in wanted.into_iter().zip(stored) {
        let Some(stored) = stored else { continue };
        let (_, last, tried) = marker_value(&stored)?;
        markers.push(Marker::stored(topic, partition, last, tried)?);
    }
    Ok(markers)
}

/// A marker's time, its last offset, and the text of what was being tried.
fn marker_value(stored: &[u8]) -> Result<(Time, i64, &str)> {
    let parse = || {
        let mut parts = std::str::from_utf8(stored).ok()?.splitn(3, ':');
        let (at, last) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
        Some((Time::from_micros(at), last, parts.next()?))
    };
    parse().ok_or_else(|| Error::Corrupt(format!("{:?} is not a marker", String::from_utf8_lossy(stored))))
}

/// Deletes markers that were not set since the cutoff: their scopes are no longer in use. A marker
/// that is set at the same moment is deleted too; the partition's next batches set it again.
pub(super) async fn forget_markers(ledger: &RedisLedger, cutoff: Time) -> Result<()> {
    let markers = ledger.key(":markers");
    let all: Pairs = redis::cmd("HGETALL")
        .arg(&markers)
        .query_async(&mut ledger.connection())
        .await
        .doing("reading markers")?;
    let mut forget = redis::cmd("HDEL");
    forget.arg(&markers);
    let mut some = false;
    for (field, stored) in &all {
        if marker_value(stored)?.0 < cutoff {
            forget.arg(field);
            some = true;
        }
    }
    if some {
        forget.query_async::<()>(&mut ledger.connection()).await.doing("forgetting markers")?;
    }
    Ok(())
}
