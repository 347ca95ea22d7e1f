//! Reads for people and tools: entries, pages, counts, findings.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

use rusqlite::types::Value;
use rusqlite::{Connection, OptionalExtension, params, params_from_iter};

use super::codec::{self, AWAITED, READ, READ_COUNT, Stored, sound};
use super::fault::Doing;
use super::ledger_tx::find_scope;
use super::schema::Meta;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{EventId, Scope, Tenant};
use crate::ledger::transition::Row;
use crate::ledger::{
    Audit, CursorParts, Entry, Epoch, Filter, Finding, Identity, LIST_BYTES_MAX, Level, Page, Stat, State,
    Week, WeekSize,
};

/// Identifies the ledger and its file. A file that replaced it has another inode and creation time.
/// (A file copied *into* it while no process had it open cannot be detected.)
pub(super) fn epoch(conn: &Connection, path: &Path) -> Result<Epoch> {
    let id: String = conn
        .query_row("SELECT ledger FROM main.hapax_meta", [], |row| row.get(0))
        .doing("reading the ledger's epoch")?;
    let mut parts = vec![id];
    if let Ok(file) = std::fs::metadata(path) {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt as _;
            parts.push(format!("{} {}", file.dev(), file.ino()));
        }
        // Not every file system records it.
        parts.extend(file.created().ok().map(|at| format!("{at:?}")));
    }
    Ok(Epoch::of(parts))
}

/// The weeks that have a table, in order.
pub(super) fn weeks(conn: &Connection) -> Result<Vec<Week>> {
    numbers(conn, "SELECT week FROM main.hapax_week ORDER BY week")
}

fn numbers(conn: &Connection, sql: &str) -> Result<Vec<Week>> {
    conn.prepare_cached(sql)
        .and_then(|mut statement| statement.query_map([], |row| row.get::<_, i16>(0))?.collect())
        .doing("listing weeks")
        .and_then(|all: Vec<i16>| all.into_iter().map(Week::from_number).collect())
}

/// The tables that hold entries of a week: its own, and the entries kept when it was dropped.
fn sources(conn: &Connection, week: Week) -> Result<Vec<String>> {
    let mut sources = vec![format!("main.hapax_kept WHERE week = {}", week.number())];
    let made = conn
        .prepare_cached("SELECT 1 FROM main.hapax_week WHERE week = ?1")
        .and_then(|mut statement| statement.exists([week.number()]))
        .doing("looking for a week")?;
    if made {
        sources.push(format!("main.hapax_entry_{} WHERE 1", week.number()));
    }
    Ok(sources)
}

/// Which identities have taken effect, in one snapshot of the file.
pub(super) fn known(conn: &Connection, identities: &[Identity]) -> Result<Vec<bool>> {
    let made: BTreeSet<Week> = weeks(conn)?.into_iter().collect();
    let mut scopes: HashMap<(Option<&Tenant>, &Scope), Option<i32>> = HashMap::new();
    let mut known = Vec::with_capacity(identities.len());
    for identity in identities {
        let (tenant, scope) = (identity.tenant.as_ref(), &identity.scope);
        let number = if let Some(number) = scopes.get(&(tenant, scope)) {
            *number
        } else {
            let number = find_scope(conn, tenant, scope)?.map(|(number, _)| number);
            scopes.insert((tenant, scope), number);
            number
        };
        let Some(number) = number else {
            known.push(false);
            continue;
        };
        let week = Week::route(crate::ledger::IdentityRule::Id, &identity.id, None)?;
        let (done, finished) = (codec::state_code(State::Done), codec::state_code(State::Finished));
        let mut there = false;
        if made.contains(&week) {
            let sql = format!(
                "SELECT state IN ({done}, {finished}) FROM main.hapax_entry_{} WHERE scope = ?1 AND id = ?2",
                week.number()
            );
            there = conn
                .prepare_cached(&sql)
                .and_then(|mut s| {
                    s.query_row(params![number, &identity.id.key()[..]], |row| row.get(0)).optional()
                })
                .doing("looking for entries")?
                .unwrap_or(false);
        }
        if !there && !week.is_timeless() {
            let sql = format!(
                "SELECT state IN ({done}, {finished}) FROM main.hapax_kept WHERE week = ?1 AND scope = ?2 AND id = ?3"
            );
            there = conn
                .prepare_cached(&sql)
                .and_then(|mut s| {
                    s.query_row(params![week.number(), number, &identity.id.key()[..]], |row| row.get(0))
                        .optional()
                })
                .doing("looking for entries")?
                .unwrap_or(false);
        }
        known.push(there);
    }
    Ok(known)
}

/// One entry.
pub(super) fn get(conn: &Connection, identity: &Identity, week: Week) -> Result<Option<Entry>> {
    let Some((scope, _)) = find_scope(conn, identity.tenant.as_ref(), &identity.scope)? else {
        return Ok(None);
    };
    for source in sources(conn, week)? {
        let found = conn
            .prepare_cached(&format!("SELECT {READ} FROM {source} AND scope = ?1 AND id = ?2"))
            .and_then(|mut statement| {
                statement.query_row(params![scope, &identity.id.key()[..]], Stored::read).optional()
            })
            .doing("reading an entry")?;
        if let Some(stored) = found {
            return Ok(Some(stored.row()?.entry(identity.clone(), week)));
        }
    }
    Ok(None)
}

/// The tenants and scopes by number.
pub(super) struct Scopes(HashMap<i32, (Option<Tenant>, Scope)>);

impl Scopes {
    pub(super) fn read(conn: &Connection) -> Result<Self> {
        let rows: Vec<(i32, String, String)> = conn
            .prepare_cached("SELECT number, tenant, scope FROM main.hapax_scope")
            .and_then(|mut statement| {
                statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?.collect()
            })
            .doing("listing scopes")?;
        let known = rows.into_iter().map(|(number, tenant, scope)| {
            let tenant = (!tenant.is_empty()).then(|| sound(Tenant::new(tenant))).transpose()?;
            Ok((number, (tenant, sound(Scope::new(scope))?)))
        });
        Ok(Scopes(known.collect::<Result<_>>()?))
    }

    /// The scopes, whoever's.
    pub(super) fn names(self) -> BTreeSet<Scope> {
        self.0.into_values().map(|(_, scope)| scope).collect()
    }

    pub(super) fn get(&self, number: i32) -> Result<&(Option<Tenant>, Scope)> {
        self.0.get(&number).ok_or_else(|| Error::Corrupt(format!("scope number {number}")))
    }

    /// The scope numbers that match a filter; `None` if all do.
    pub(super) fn wanted(&self, filter: &Filter) -> Option<Vec<i32>> {
        if filter.tenant.is_none() && filter.scope.is_none() && filter.scopes.is_none() {
            return None;
        }
        let fits = |(tenant, scope): &(Option<Tenant>, Scope)| filter.wants(tenant.as_ref(), scope);
        Some(self.0.iter().filter(|(_, names)| fits(names)).map(|(number, _)| *number).collect())
    }
}

/// An entry with the key it is sorted by.
type Listed = ((i32, Vec<u8>), Entry);

/// A query for a page of entries.
pub(super) struct Listing {
    pub filter: Filter,
    pub after: Option<CursorParts>,
    pub limit: usize,
    pub now: Time,
}

impl Listing {
    /// A page in key order. Never holds more than two pages of entries in memory.
    pub(super) fn page(&self, conn: &Connection) -> Result<Page> {
        let scopes = Scopes::read(conn)?;
        let mut all: BTreeSet<Week> = weeks(conn)?.into_iter().collect();
        all.extend(numbers(conn, "SELECT DISTINCT week FROM main.hapax_kept")?);
        let mut entries = Vec::new();
        let mut bytes = 0;
        let mut last: Option<CursorParts> = None;
        for week in all {
            if self.after.as_ref().is_some_and(|after| week.number() < after.week) {
                continue;
            }
            let mut found: Vec<Listed> = Vec::new();
            // Up to where every table was read.
            let mut end: Option<(i32, Vec<u8>)> = None;
            for source in sources(conn, week)? {
                let more = (self.limit - entries.len()).saturating_add(1);
                let (mut some, cut) = self.some(conn, &scopes, week, &source, more)?;
                if let Some((key, _)) = some.last().filter(|_| cut)
                    && end.as_ref().is_none_or(|end| key < end)
                {
                    end = Some(key.clone());
                }
                found.append(&mut some);
            }
            found.sort_by(|(a, _), (b, _)| a.cmp(b));
            for ((scope, key), entry) in found {
                let beyond = end.as_ref().is_some_and(|end| (scope, &key) > (end.0, &end.1));
                if entries.len() == self.limit || bytes >= LIST_BYTES_MAX || beyond {
                    return Ok(Page { entries, next: last.map(|parts| parts.encode()) });
                }
                bytes += entry.page_bytes();
                entries.push(entry);
                last = Some(CursorParts { week: week.number(), scope, key });
            }
            if end.is_some() {
                return Ok(Page { entries, next: last.map(|parts| parts.encode()) });
            }
        }
        Ok(Page { entries, next: None })
    }

    /// At most `most` matching entries of one table, and whether a page's bytes ended it before.
    fn some(
        &self,
        conn: &Connection,
        scopes: &Scopes,
        week: Week,
        source: &str,
        most: usize,
    ) -> Result<(Vec<Listed>, bool)> {
        let (sql, values) = self.query(scopes, week, source);
        let mut statement = conn.prepare_cached(&sql).doing("listing")?;
        let mut rows = statement.query(params_from_iter(values)).doing("listing")?;
        let (mut found, mut bytes) = (Vec::new(), 0);
        while let Some(columns) = rows.next().doing("listing")? {
            let read =
                || Ok((columns.get(READ_COUNT)?, columns.get(READ_COUNT + 1)?, Stored::read(columns)?));
            let (number, key, stored): (i32, Vec<u8>, Stored) = read().doing("listing")?;
            let row: Row = stored.row()?;
            let overdue = row.is_overdue(self.now);
            let (tenant, scope) = scopes.get(number)?.clone();
            let identity = Identity { tenant, scope, id: EventId::from_key(&key)? };
            let entry = row.entry(identity, week);
            if self.filter.matches(&entry, overdue) {
                bytes += entry.page_bytes();
                found.push(((number, key), entry));
                if found.len() == most {
                    break;
                }
                if bytes >= LIST_BYTES_MAX {
                    return Ok((found, true));
                }
            }
        }
        Ok((found, false))
    }

    /// SQL filters what it can; [`Filter::matches`] decides.
    fn query(&self, scopes: &Scopes, week: Week, source: &str) -> (String, Vec<Value>) {
        use std::fmt::Write as _;
        let mut sql = format!("SELECT {READ}, scope, id FROM {source}");
        let mut values = Vec::new();
        let mut and = |text: &str, more: Vec<Value>| {
            let _ = write!(sql, " AND {text}"); // writing to a String cannot fail
            values.extend(more);
        };
        if let Some(after) = self.after.as_ref().filter(|after| after.week == week.number()) {
            and("(scope, id) > (?, ?)", vec![Value::from(after.scope), Value::from(after.key.clone())]);
        }
        if let Some(numbers) = scopes.wanted(&self.filter) {
            let numbers: Vec<String> = numbers.iter().map(i32::to_string).collect();
            and(&format!("scope IN ({})", numbers.join(", ")), vec![]);
        }
        if let Some(id) = &self.filter.id {
            and("id = ?", vec![Value::from(id.key().into_owned())]);
        }
        if let Some(since) = self.filter.since {
            and("first_at >= ?", vec![Value::from(since.as_micros())]);
        }
        if let Some(until) = self.filter.until {
            and("first_at < ?", vec![Value::from(until.as_micros())]);
        }
        if let Some(aggregate) = &self.filter.aggregate {
            and("aggregate = ?", vec![Value::from(aggregate.as_str().to_owned())]);
        }
        if let Some(partition) = self.filter.partition {
            and("part = ?", vec![Value::from(partition)]);
        }
        if !self.filter.states.is_empty() {
            let mut codes: BTreeSet<i64> =
                self.filter.states.iter().copied().map(codec::state_code).collect();
            if self.filter.states.contains(&State::Lost) {
                codes.insert(codec::state_code(State::Claimed)); // overdue claims count as lost
            }
            let codes: Vec<String> = codes.iter().map(i64::to_string).collect();
            and(&format!("state IN ({})", codes.join(", ")), vec![]);
        }
        sql.push_str(" ORDER BY scope, id");
        (sql, values)
    }
}

/// Counts all entries. It reads every one of them.
pub(super) fn stat(conn: &Connection, now: Time) -> Result<Stat> {
    let scopes = Scopes::read(conn)?;
    let weeks = weeks(conn)?;
    let mut counts: BTreeMap<(i32, State), u64> = BTreeMap::new();
    let mut held: BTreeMap<i32, u64> = BTreeMap::new();
    let mut week_sizes = Vec::with_capacity(weeks.len());
    for week in weeks.iter().copied().map(Some).chain([None]) {
        let table =
            week.map_or_else(|| "hapax_kept".to_owned(), |week| format!("hapax_entry_{}", week.number()));
        let sql = format!(
            "SELECT scope, CASE WHEN {AWAITED} AND at <= ?1 THEN 6 ELSE state END AS shown_state, count(*), count(payload) \
             FROM main.{table} GROUP BY scope, shown_state"
        );
        let rows: Vec<(i32, i64, i64, i64)> = conn
            .prepare_cached(&sql)
            .and_then(|mut statement| {
                let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?));
                statement.query_map([now.as_micros()], read)?.collect()
            })
            .doing("counting")?;
        if let Some(week) = week {
            let entries = rows.iter().map(|(.., count, _)| *count as u64).sum();
            week_sizes.push(WeekSize { week, entries, bytes: table_bytes(conn, &table) });
        }
        for (scope, code, count, bodies) in rows {
            *counts.entry((scope, codec::state(code)?)).or_default() += count as u64;
            if bodies > 0 {
                *held.entry(scope).or_default() += bodies as u64;
            }
        }
    }
    let counts = counts.into_iter().map(|((number, state), count)| {
        let (tenant, scope) = scopes.get(number)?.clone();
        Ok((tenant, scope, state, count))
    });
    let held_by = held.iter().map(|(number, count)| {
        let (tenant, scope) = scopes.get(*number)?.clone();
        Ok((tenant, scope, *count))
    });
    Ok(Stat {
        now,
        counts: counts.collect::<Result<_>>()?,
        weeks,
        week_sizes,
        dropped: dropped(conn)?,
        held: held.values().sum(),
        held_by: held_by.collect::<Result<_>>()?,
    })
}

/// The pages of a table and its indexes. `None` if this SQLite cannot tell.
fn table_bytes(conn: &Connection, table: &str) -> Option<u64> {
    let sql = "SELECT sum(pgsize) FROM dbstat WHERE name IN (SELECT name FROM main.sqlite_schema WHERE tbl_name = ?1)";
    let bytes = conn
        .prepare_cached(sql)
        .and_then(|mut sum| sum.query_row([table], |row| row.get::<_, Option<i64>>(0)));
    bytes.ok().flatten().map(i64::unsigned_abs)
}

fn dropped(conn: &Connection) -> Result<Vec<(Week, Time)>> {
    let rows: Vec<(i16, i64)> = conn
        .prepare_cached("SELECT week, at FROM main.hapax_dropped ORDER BY week")
        .and_then(|mut statement| statement.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?.collect())
        .doing("listing dropped weeks")?;
    rows.into_iter().map(|(week, at)| Ok((Week::from_number(week)?, Time::from_micros(at)))).collect()
}

/// The latest audit rows, of all entries or of those with these names.
pub(super) fn audit(conn: &Connection, of: Option<&[String]>, limit: usize) -> Result<Vec<Audit>> {
    let names = of.map(|names| serde_json::json!(names).to_string());
    conn.prepare_cached(
        "SELECT at, by, what, identity, why FROM main.hapax_audit \
         WHERE ?2 IS NULL OR identity IN (SELECT value FROM json_each(?2)) ORDER BY number DESC LIMIT ?1",
    )
    .and_then(|mut statement| {
        statement
            .query_map((i64::try_from(limit).unwrap_or(i64::MAX), names), |row| {
                let at = Time::from_micros(row.get(0)?);
                Ok(Audit::stored(at, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
            })?
            .collect()
    })
    .doing("reading the audit")
}

/// A warning if users other than the owner and its group can read a file of ours, which holds payloads or
/// answers: its own mode and that of its directory permit it. New files do not.
#[cfg(unix)]
pub fn readable_by_others(file: &std::path::Path) -> Option<Finding> {
    use std::os::unix::fs::PermissionsExt as _;
    let mode = |path: &std::path::Path| path.metadata().map_or(0, |meta| meta.permissions().mode());
    let within = file.parent().filter(|within| !within.as_os_str().is_empty());
    let (own, above) = (mode(file), mode(within.unwrap_or(std::path::Path::new("."))));
    if own & 0o004 == 0 || above & 0o001 == 0 {
        return None;
    }
    let message = format!(
        "every user of this machine can read {} (mode {:o}), and payloads are in it; `chmod o-rwx` keeps others out",
        file.display(),
        own & 0o777
    );
    Some(Finding { level: Level::Warning, check: "permissions", message })
}

/// A warning if others can read a file of ours. On this system nobody looks.
#[cfg(not(unix))]
pub fn readable_by_others(_: &std::path::Path) -> Option<Finding> {
    None
}

/// Checks what the guarantees depend on, as the writing connection sees it.
pub(super) fn check(conn: &Connection) -> Result<Vec<Finding>> {
    let fact = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, Value>(0)).doing("checking");
    let mut findings = Vec::new();
    let mut report = |fine: bool, check, message: String| {
        findings.push(Finding { level: if fine { Level::Fine } else { Level::Refusal }, check, message });
    };
    let mode = text(fact("PRAGMA main.journal_mode")?);
    report(mode == "wal", "journal", format!("the journal mode is {mode}; it must be wal"));
    let synchronous = number(&fact("PRAGMA main.synchronous")?);
    report(
        synchronous >= 2,
        "synchronous",
        format!(
            "synchronous is {synchronous}; it must be 2 (full) or more, so that what is acknowledged is on disk"
        ),
    );
    let version = Meta::read(conn)?.map_or(0, |meta| meta.version);
    report(version > 0, "schema", format!("the schema has version {version}"));
    let bytes = number(&fact("PRAGMA main.page_count")?) * number(&fact("PRAGMA main.page_size")?);
    let free = number(&fact("PRAGMA main.freelist_count")?) * number(&fact("PRAGMA main.page_size")?);
    report(true, "size", format!("the file has {bytes} bytes, {free} of them free for reuse"));
    report(true, "version", format!("SQLite {}", rusqlite::version()));
    findings.extend(conn.path().and_then(|file| readable_by_others(std::path::Path::new(file))));
    Ok(findings)
}

fn text(value: Value) -> String {
    match value {
        Value::Text(text) => text,
        other => format!("{other:?}"),
    }
}

fn number(value: &Value) -> i64 {
    if let Value::Integer(number) = value { *number } else { 0 }
}
