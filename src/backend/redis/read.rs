//! Reads entries. Hashes have no order, so a listing scans those of a week and keeps the lowest
//! keys.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::connect::Doing;
use super::want::{Names, Wants, member_key, names_of, pair, scope_value, week_key};
use super::{RedisLedger, codec};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{EventId, Scope};
use crate::ledger::transition::Row;
use crate::ledger::{
    Audit, Claims as _, Cursor, CursorParts, Entry, Filter, Identity, Key, LIST_BYTES_MAX, Page, Stat, State,
    Week, WeekSize,
};

/// How many fields one HSCAN asks for.
const SCAN_COUNT: usize = 1000;

/// The tenants and scopes by number.
pub(super) struct Scopes(BTreeMap<i32, Names>);

impl Scopes {
    pub(super) async fn read(ledger: &RedisLedger) -> Result<Self> {
        let stored: Vec<(String, Vec<u8>)> = redis::cmd("HGETALL")
            .arg(ledger.key(":scopes"))
            .query_async(&mut ledger.connection())
            .await
            .doing("listing scopes")?;
        let known = stored.into_iter().map(|(field, value)| {
            let (number, _) =
                scope_value(&value)?.ok_or_else(|| Error::Corrupt("a scope without a number".into()))?;
            Ok((number, names_of(&field)?))
        });
        Ok(Scopes(known.collect::<Result<_>>()?))
    }

    /// The scopes, whoever's.
    pub(super) fn names(self) -> BTreeSet<Scope> {
        self.0.into_values().map(|(_, scope)| scope).collect()
    }

    /// The scope numbers that match a filter, in order.
    pub(super) fn wanted(&self, filter: &Filter) -> Vec<i32> {
        let fits = |(tenant, scope): &Names| filter.wants(tenant.as_ref(), scope);
        self.0.iter().filter(|(_, names)| fits(names)).map(|(number, _)| *number).collect()
    }

    pub(super) fn entry(&self, key: &Key, row: Row) -> Result<Entry> {
        let names = self.0.get(&key.scope);
        let (tenant, scope) =
            names.ok_or_else(|| Error::Corrupt(format!("scope number {}", key.scope)))?.clone();
        let id = EventId::from_key(&key.id)?;
        Ok(row.entry(Identity { tenant, scope, id }, key.week))
    }
}

/// The existing weeks, each with the time of its last write and its note as stored.
pub(super) async fn weeks(ledger: &RedisLedger) -> Result<BTreeMap<Week, (Time, Vec<u8>)>> {
    let stored: Vec<(i16, Vec<u8>)> = redis::cmd("HGETALL")
        .arg(ledger.key(":weeks"))
        .query_async(&mut ledger.connection())
        .await
        .doing("listing weeks")?;
    let weeks = stored.into_iter().map(|(week, noted)| {
        let touched = pair(&noted)?.map_or(0, |(touched, _)| touched);
        Ok((Week::from_number(week)?, (Time::from_micros(touched), noted)))
    });
    weeks.collect()
}

/// How many entries each (week, scope) has, without the empty ones. Most scopes have none in most
/// weeks.
pub(super) async fn filled(
    ledger: &RedisLedger,
    weeks: impl IntoIterator<Item = Week>,
    numbers: &[i32],
) -> Result<BTreeMap<(Week, i32), u64>> {
    let mut filled = BTreeMap::new();
    for week in weeks {
        for numbers in numbers.chunks(SCAN_COUNT) {
            let mut pipe = redis::pipe();
            for number in numbers {
                pipe.cmd("HLEN").arg(ledger.key(&week_key(week, *number)));
            }
            let counts: Vec<u64> =
                pipe.query_async(&mut ledger.connection()).await.doing("counting entries")?;
            let counts = numbers.iter().zip(counts).filter(|(_, count)| *count > 0);
            filled.extend(counts.map(|(number, count)| ((week, *number), count)));
        }
    }
    Ok(filled)
}

/// A field of a hash and its value.
type Field = (Vec<u8>, Vec<u8>);

/// Scans a hash in parts. Calls `each` at least once for every field that exists throughout.
pub(super) async fn scan(
    ledger: &RedisLedger,
    key: &str,
    mut each: impl FnMut(Vec<u8>, Vec<u8>) -> Result<()> + Send,
) -> Result<()> {
    let mut cursor: u64 = 0;
    loop {
        let (next, fields): (u64, Vec<Field>) = redis::cmd("HSCAN")
            .arg(ledger.key(key))
            .arg(cursor)
            .arg("COUNT")
            .arg(SCAN_COUNT)
            .query_async(&mut ledger.connection())
            .await
            .doing("going through entries")?;
        for (field, value) in fields {
            each(field, value)?;
        }
        if next == 0 {
            return Ok(());
        }
        cursor = next;
    }
}

/// The lowest matching entries by key, one more than fit on a page.
struct Lowest<'l> {
    filter: &'l Filter,
    after: Option<&'l Key>,
    scopes: &'l Scopes,
    now: Time,
    most: usize,
    entries: BTreeMap<Key, Entry>,
    /// The bytes of the entries, and whether some were left out because there were too many.
    bytes: usize,
    cut: bool,
}

impl Lowest<'_> {
    fn take(&mut self, key: Key, stored: &[u8]) -> Result<()> {
        let full = self.cut || self.entries.len() >= self.most;
        if self.after.is_some_and(|after| key <= *after)
            || (full && self.entries.last_key_value().is_some_and(|(last, _)| key > *last))
        {
            return Ok(());
        }
        let row = codec::row(stored)?;
        let overdue = row.is_overdue(self.now);
        let entry = self.scopes.entry(&key, row)?;
        if self.filter.matches(&entry, overdue) {
            self.bytes += entry.page_bytes();
            // A scan may return a field twice while the hash grows or shrinks.
            if let Some(before) = self.entries.insert(key, entry) {
                self.bytes -= before.page_bytes();
            }
            if self.entries.len() > self.most {
                self.pop();
            }
            // The entry that reaches the limit stays; those after it go to the next page.
            while self.entries.len() > 1 && self.bytes_without_last() >= LIST_BYTES_MAX {
                self.pop();
                self.cut = true;
            }
        }
        Ok(())
    }

    fn bytes_without_last(&self) -> usize {
        self.bytes - self.entries.last_key_value().map_or(0, |(_, last)| last.page_bytes())
    }

    fn pop(&mut self) {
        if let Some((_, last)) = self.entries.pop_last() {
            self.bytes -= last.page_bytes();
        }
    }
}

/// A page in key order: week, scope, id.
pub(super) async fn list(
    ledger: &RedisLedger,
    filter: &Filter,
    after: Option<&Cursor>,
    limit: usize,
) -> Result<Page> {
    let after = match after.map(|cursor| CursorParts::decode(&cursor.0)).transpose()? {
        Some(parts) => Some(Key { week: Week::from_number(parts.week)?, scope: parts.scope, id: parts.key }),
        None => None,
    };
    let scopes = Scopes::read(ledger).await?;
    let numbers = scopes.wanted(filter);
    let weeks = weeks(ledger).await?;
    let mut lowest = Lowest {
        filter,
        after: after.as_ref(),
        scopes: &scopes,
        now: ledger.now().await?,
        most: limit.saturating_add(1),
        entries: BTreeMap::new(),
        bytes: 0,
        cut: false,
    };
    scan(ledger, ":kept", |field, stored| {
        let key = member_key(&field)?;
        if numbers.contains(&key.scope) { lowest.take(key, &stored) } else { Ok(()) }
    })
    .await?;
    for week in weeks.into_keys().filter(|week| after.as_ref().is_none_or(|after| *week >= after.week)) {
        let beyond = |lowest: &Lowest<'_>| {
            (lowest.cut || lowest.entries.len() >= lowest.most)
                && lowest.entries.last_key_value().is_some_and(|(last, _)| last.week < week)
        };
        if beyond(&lowest) {
            break;
        }
        if let Some(id) = &filter.id {
            let keys = numbers.iter().map(|scope| Key { week, scope: *scope, id: id.key().into_owned() });
            let keys: Vec<Key> = keys.collect();
            for (key, (stored, _)) in ledger.look(Wants::keys(&keys)).await?.rows {
                if let Some((_, stored)) = stored {
                    lowest.take(key, &stored)?;
                }
            }
            continue;
        }
        for (_, scope) in filled(ledger, [week], &numbers).await?.into_keys() {
            let all = |id, stored: Vec<u8>| lowest.take(Key { week, scope, id }, &stored);
            scan(ledger, &week_key(week, scope), all).await?;
        }
    }
    let cut = lowest.cut;
    let mut found = lowest.entries.into_iter();
    let mut entries = Vec::new();
    let mut last = None;
    for (key, entry) in found.by_ref().take(limit) {
        entries.push(entry);
        last = Some(key);
    }
    let next = last.filter(|_| cut || found.next().is_some());
    let next =
        next.map(|key| CursorParts { week: key.week.number(), scope: key.scope, key: key.id }.encode());
    Ok(Page { entries, next })
}

/// Counts all entries. It reads every one of them.
pub(super) async fn stat(ledger: &RedisLedger) -> Result<Stat> {
    let now = ledger.now().await?;
    let scopes = Scopes::read(ledger).await?;
    let weeks = weeks(ledger).await?;
    let mut seen: BTreeMap<(i32, State), u64> = BTreeMap::new();
    let mut held: BTreeMap<i32, u64> = BTreeMap::new();
    let mut count = |scope: i32, stored: &[u8]| -> Result<()> {
        let row = codec::row(stored)?;
        let state = if row.is_overdue(now) { State::Lost } else { row.state };
        *seen.entry((scope, state)).or_default() += 1;
        if row.body.is_some() {
            *held.entry(scope).or_default() += 1;
        }
        Ok(())
    };
    let numbers = scopes.wanted(&Filter::default());
    let mut sizes: BTreeMap<Week, WeekSize> =
        weeks.keys().map(|week| (*week, WeekSize { week: *week, entries: 0, bytes: Some(0) })).collect();
    for (week, scope) in filled(ledger, weeks.keys().copied(), &numbers).await?.into_keys() {
        // A scan may return a field twice while the hash grows or shrinks.
        let mut met = BTreeMap::new();
        scan(ledger, &week_key(week, scope), |id, stored| {
            met.insert(id, stored);
            Ok(())
        })
        .await?;
        met.values().try_for_each(|stored| count(scope, stored))?;
        if let Some(size) = sizes.get_mut(&week) {
            size.entries += met.len() as u64;
            size.bytes = size.bytes.zip(scope_bytes(ledger, week, scope).await).map(|(sum, more)| sum + more);
        }
    }
    let mut kept = BTreeMap::new();
    scan(ledger, ":kept", |field, stored| {
        kept.insert(field, stored);
        Ok(())
    })
    .await?;
    for (field, stored) in &kept {
        count(member_key(field)?.scope, stored)?;
    }
    let names = |number: i32| -> Result<Names> {
        let names = scopes.0.get(&number).ok_or_else(|| Error::Corrupt(format!("scope number {number}")))?;
        Ok((names.0.clone(), names.1.clone()))
    };
    let counts = seen.into_iter().map(|((number, state), count)| {
        let (tenant, scope) = names(number)?;
        Ok((tenant, scope, state, count))
    });
    let held_by = held.iter().map(|(number, count)| {
        let (tenant, scope) = names(*number)?;
        Ok((tenant, scope, *count))
    });
    Ok(Stat {
        now,
        counts: counts.collect::<Result<_>>()?,
        weeks: weeks.into_keys().collect(),
        week_sizes: sizes.into_values().collect(),
        dropped: dropped(ledger).await?,
        held: held.values().sum(),
        held_by: held_by.collect::<Result<_>>()?,
    })
}

/// The memory of a scope's week, estimated by the server from some of its entries. `None` if it may not be asked.
async fn scope_bytes(ledger: &RedisLedger, week: Week, scope: i32) -> Option<u64> {
    let key = ledger.key(&week_key(week, scope));
    let asked =
        redis::cmd("MEMORY").arg("USAGE").arg(key).query_async::<Option<u64>>(&mut ledger.connection()).await;
    asked.ok().map(Option::unwrap_or_default)
}

async fn dropped(ledger: &RedisLedger) -> Result<Vec<(Week, Time)>> {
    let stored: Vec<(i16, Vec<u8>)> = redis::cmd("HGETALL")
        .arg(ledger.key(":dropped"))
        .query_async(&mut ledger.connection())
        .await
        .doing("listing dropped weeks")?;
    let dropped = stored.into_iter().map(|(week, noted)| {
        let at = pair(&noted)?.map_or(0, |(at, _)| at);
        Ok((Week::from_number(week)?, Time::from_micros(at)))
    });
    let mut dropped: Vec<_> = dropped.collect::<Result<_>>()?;
    dropped.sort_unstable();
    Ok(dropped)
}

/// How many audit rows are read at a time where those of some entries are looked for.
const AUDIT_PAGE: usize = 10_000;

/// The latest audit rows of these entries. There is no index: all rows are read.
pub(super) async fn audit_of(ledger: &RedisLedger, entries: &[Identity], limit: usize) -> Result<Vec<Audit>> {
    let entries: HashSet<_> = entries.iter().collect();
    let (mut found, mut from) = (Vec::new(), 0);
    while found.len() < limit {
        // What is written meanwhile shifts the rest: a row may come twice, none is left out.
        let page = audit(ledger, from, AUDIT_PAGE).await?;
        from += page.len();
        let is_last = page.len() < AUDIT_PAGE;
        let of_them = page.into_iter().filter(|row| row.of.as_ref().is_some_and(|of| entries.contains(of)));
        for row in of_them {
            if !found.contains(&row) {
                found.push(row);
            }
        }
        if is_last {
            break;
        }
    }
    found.truncate(limit);
    Ok(found)
}

/// The latest audit rows, without the first few.
pub(super) async fn audit(ledger: &RedisLedger, from: usize, limit: usize) -> Result<Vec<Audit>> {
    if limit == 0 {
        return Ok(Vec::new());
    }
    let index = |at: usize| i64::try_from(at).unwrap_or(i64::MAX);
    let lines: Vec<String> = redis::cmd("LRANGE")
        .arg(ledger.key(":audit"))
        .arg(index(from))
        .arg(index(from.saturating_add(limit - 1)))
        .query_async(&mut ledger.connection())
        .await
        .doing("reading the audit")?;
    let read = |line: &String| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        let text = |name: &str| value.get(name)?.as_str().map(str::to_owned);
        let at = Time::from_micros(value.get("at")?.as_i64()?);
        Some(Audit::stored(at, text("by")?, text("what")?, text("identity")?, text("why")?))
    };
    lines
        .iter()
        .map(|line| read(line).ok_or_else(|| Error::Corrupt(format!("an audit line: {line:?}"))))
        .collect()
}

/// The rows of the given keys, without those that no longer exist.
pub(super) async fn rows(ledger: &RedisLedger, keys: &[Key]) -> Result<Vec<(Key, Vec<u8>, Vec<u8>)>> {
    let mut found = ledger.look(Wants::keys(keys)).await?.rows;
    let stored = |key: &Key| {
        let (row, head) = found.remove(key)?;
        Some((key.clone(), row?.1, head))
    };
    Ok(keys.iter().filter_map(stored).collect())
}
