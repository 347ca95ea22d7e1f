//! Held events that are due, dead letters that are not published yet, and the markers of
//! transactional batches. Partial indexes that cover only these rows find them.

use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension, params};

use super::codec::{self, HEAD, READ, READ_COUNT, Stored, UNCOPIED};
use super::fault::Doing;
use super::ledger_tx::LedgerTx;
use super::read::{Scopes, weeks};
use crate::clock::Time;
use crate::error::Result;
use crate::event::Record;
use crate::id::{Aggregate, EventId, Scope, Topic};
use crate::ledger::transition::Row;
use crate::ledger::{
    Due, Entry, Filter, HeldQuery, Identity, Marker, PublishedDead, Rows, Waiting, Week, runnable,
};

/// A held row, with its week, its scope's number and its key.
type Found = (Week, i32, Vec<u8>, Row);

/// A table with entries.
#[derive(Debug, Clone, Copy)]
enum Table {
    /// The entries of one week.
    OfWeek(Week),
    /// Entries of any week, which a column names.
    Kept,
}

impl Table {
    fn name(self) -> String {
        match self {
            Table::OfWeek(week) => format!("main.hapax_entry_{}", week.number()),
            Table::Kept => "main.hapax_kept".to_owned(),
        }
    }

    /// The week of a row, as SQL.
    fn week(self) -> String {
        match self {
            Table::OfWeek(week) => week.number().to_string(),
            Table::Kept => "week".to_owned(),
        }
    }
}

/// All tables with entries.
fn tables(conn: &Connection) -> Result<Vec<Table>> {
    Ok(weeks(conn)?.into_iter().map(Table::OfWeek).chain([Table::Kept]).collect())
}

/// Selects rows of the given scopes: the oldest first, and those that were reserved last.
fn select(
    conn: &Connection,
    scopes: &[i32],
    which: &str,
    query: &HeldQuery,
    limit: i64,
) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for table in tables(conn)? {
        let (table, week) = (table.name(), table.week());
        let sql = format!(
            "SELECT {READ}, {week}, id, coalesce(reserved, at) AS place FROM {table} \
             WHERE scope = ?1 AND {which} ORDER BY place LIMIT ?2"
        );
        let mut statement = conn.prepare(&sql).doing("looking for what is held")?;
        for scope in scopes {
            let rows = statement
                .query_map(params![scope, limit], |columns| {
                    let place = columns.get(READ_COUNT + 2)?;
                    Ok((
                        columns.get(READ_COUNT)?,
                        columns.get(READ_COUNT + 1)?,
                        place,
                        Stored::read(columns)?,
                    ))
                })
                .doing("looking for what is held")?;
            // Reads at most `bytes_max` bytes per table and scope; more could not be returned anyway.
            let mut bytes = 0;
            for row in rows {
                if query.bytes_max.is_some_and(|max| bytes >= max) {
                    break;
                }
                let (week, key, place, stored): (i16, Vec<u8>, i64, Stored) =
                    row.doing("looking for what is held")?;
                let row = stored.row()?;
                bytes += row.body.as_ref().map_or(0, Record::memory_bytes);
                found.push((place, (Week::from_number(week)?, *scope, key, row)));
            }
        }
    }
    found.sort_by_key(|(place, _)| *place);
    Ok(found.into_iter().map(|(_, found)| found).collect())
}

fn of_scope(conn: &Connection, scope: &Scope) -> Result<(Scopes, Vec<i32>)> {
    let scopes = Scopes::read(conn)?;
    let filter = Filter { scope: Some(scope.clone()), ..Filter::default() };
    let numbers = scopes.wanted(&filter).unwrap_or_default();
    Ok((scopes, numbers))
}

fn entry(scopes: &Scopes, week: Week, number: i32, key: &[u8], row: Row) -> Result<Entry> {
    let (tenant, scope) = scopes.get(number)?.clone();
    Ok(row.entry(Identity { tenant, scope, id: EventId::from_key(key)? }, week))
}

/// The held events that may be claimed now.
pub(super) fn due(
    conn: &Connection,
    scope: &Scope,
    query: &HeldQuery,
    limit: usize,
    now: Time,
) -> Result<Due> {
    let (scopes, numbers) = of_scope(conn, scope)?;
    let waiting = waiting(conn, &numbers, &matches(conn, query)?, now)?;
    let (runnable, claimable) = runnable(
        waiting,
        limit,
        now,
        |place| place.matches,
        |number, aggregate| {
            conn.prepare_cached(&format!(
                "SELECT {HEAD} FROM main.hapax_head WHERE scope = ?1 AND aggregate = ?2"
            ))
            .and_then(|mut s| s.query_row(params![number, aggregate.as_str()], codec::head).optional())
            .doing("reading the head of an aggregate")
        },
    )?;
    let (mut entries, mut bytes) = (Vec::new(), 0);
    for place in runnable {
        if query.bytes_max.is_some_and(|max| bytes >= max) {
            break;
        }
        let sql = format!(
            "SELECT {READ} FROM {} WHERE scope = ?1 AND id = ?2 AND {WAITS} {}",
            place.table, place.and
        );
        let found = conn
            .prepare_cached(&sql)
            .and_then(|mut s| s.query_row(params![place.scope, place.id], Stored::read).optional())
            .doing("reading what is due")?;
        // `None`: another claim was faster.
        if let Some(stored) = found {
            let entry = entry(&scopes, place.week, place.scope, &place.id, stored.row()?)?;
            bytes += entry.bytes();
            entries.push(entry);
        }
    }
    Ok(Due { entries, claimable, held: count(conn, &numbers)? })
}

/// A held event that waits for its time, as SQL. A partial index covers these states.
const WAITS: &str = "state IN (0, 2, 7) AND payload IS NOT NULL";

/// The location of a held row.
struct Place {
    table: Rc<str>,
    /// A further SQL condition that the row's table needs.
    and: String,
    week: Week,
    scope: i32,
    id: Vec<u8>,
    /// Whether the query matches it.
    matches: bool,
}

/// Week, id, aggregate and seq as stored, and whether the query matches the row.
type Line = (i16, Vec<u8>, Option<String>, Option<i64>, bool);

/// Whether a query matches a row, as SQL; the rule is that of [`HeldQuery::matches`]. Topics are
/// numbers, so nothing needs quoting.
fn matches(conn: &Connection, query: &HeldQuery) -> Result<String> {
    let Some(topics) = &query.topics else { return Ok("1".to_owned()) };
    let mut numbers = Vec::new();
    for topic in topics {
        let number: Option<i64> = conn
            .prepare_cached("SELECT number FROM main.hapax_name WHERE name = ?1")
            .and_then(|mut s| s.query_row([topic.as_str()], |row| row.get(0)).optional())
            .doing("looking for a topic")?;
        numbers.extend(number.map(|number| number.to_string())); // `None`: no event came from it
    }
    Ok(format!("(topic IS NULL OR topic IN ({}))", numbers.join(", ")))
}

/// The waiting events that are due. Reads only their location: there may be many, with large
/// payloads.
fn waiting(conn: &Connection, scopes: &[i32], matches: &str, now: Time) -> Result<Vec<Waiting<Place>>> {
    let mut found = Vec::new();
    for from in tables(conn)? {
        let (table, week): (Rc<str>, _) = (from.name().into(), from.week());
        let sql = format!(
            "SELECT {week}, id, aggregate, seq, {matches} FROM {table} WHERE scope = ?1 AND {WAITS} AND at <= ?2"
        );
        let mut statement = conn.prepare(&sql).doing("looking for what is held")?;
        for scope in scopes {
            let mut rows =
                statement.query(params![scope, now.as_micros()]).doing("looking for what is held")?;
            while let Some(row) = rows.next().doing("looking for what is held")? {
                let read = || -> rusqlite::Result<Line> {
                    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
                };
                let (number, id, aggregate, seq, matches) = read().doing("looking for what is held")?;
                let order = match aggregate.zip(seq) {
                    Some((aggregate, seq)) => Some((codec::sound(Aggregate::new(aggregate))?, seq as u64)),
                    None => None,
                };
                let and = match from {
                    Table::Kept => format!("AND week = {number}"),
                    Table::OfWeek(_) => String::new(),
                };
                let week = Week::from_number(number)?;
                let place = Place { table: table.clone(), and, week, scope: *scope, id, matches };
                found.push((place, *scope, order));
            }
        }
    }
    Ok(found)
}

fn count(conn: &Connection, numbers: &[i32]) -> Result<u64> {
    let mut held = 0;
    for table in tables(conn)? {
        let table = table.name();
        let sql = format!("SELECT count(*) FROM {table} WHERE scope = ?1 AND payload IS NOT NULL");
        let mut statement = conn.prepare_cached(&sql).doing("counting what is held")?;
        for number in numbers {
            held += statement
                .query_row([number], |row| row.get::<_, i64>(0))
                .doing("counting what is held")? as u64;
        }
    }
    Ok(held)
}

/// The dead letters that are not published yet; with `free`, those that nobody has reserved.
pub(super) fn unpublished_dead(
    conn: &Connection,
    scope: &Scope,
    query: &HeldQuery,
    limit: usize,
    free: Option<Time>,
) -> Result<Vec<Entry>> {
    let (scopes, numbers) = of_scope(conn, scope)?;
    let free =
        free.map_or("1".to_owned(), |now| format!("(reserved IS NULL OR reserved <= {})", now.as_micros()));
    let which = format!("{UNCOPIED} AND {} AND {free}", matches(conn, query)?);
    let most = i64::try_from(limit).unwrap_or(i64::MAX);
    let dead = select(conn, &numbers, &which, query, most)?;
    let sizes = dead.iter().map(|(.., row)| row.body.as_ref().map_or(0, Record::memory_bytes));
    let count = query.fill(sizes).min(limit);
    let entries = dead.into_iter().take(count);
    entries.map(|(week, number, key, row)| entry(&scopes, week, number, &key, row)).collect()
}

/// Reserves dead letters. Returns those that nobody else has reserved.
pub(super) fn reserve(
    ledger_tx: &mut LedgerTx<'_>,
    entries: &[Entry],
    reserve: Duration,
) -> Result<Vec<Entry>> {
    let now = ledger_tx.now();
    let set = format!("reserved = {}", now.plus(reserve).as_micros());
    let free = format!("(reserved IS NULL OR reserved <= {})", now.as_micros());
    let made: BTreeSet<Week> = weeks(ledger_tx.conn)?.into_iter().collect();
    let mut mine = Vec::with_capacity(entries.len());
    for entry in entries {
        let dead = (entry.identity.clone(), entry.week, entry.token);
        if update_dead(ledger_tx, &made, &dead, &set, &free)? {
            mine.push(entry.clone());
        }
    }
    Ok(mine)
}

/// Records that dead letters were published.
pub(super) fn mark_dead_published(ledger_tx: &mut LedgerTx<'_>, entries: &[PublishedDead]) -> Result<()> {
    let made: BTreeSet<Week> = weeks(ledger_tx.conn)?.into_iter().collect();
    for dead in entries {
        update_dead(ledger_tx, &made, dead, "copied = token", "1")?;
    }
    Ok(())
}

/// Changes the row of a dead letter if its token is unchanged. Returns whether it did.
fn update_dead(
    ledger_tx: &mut LedgerTx<'_>,
    made: &BTreeSet<Week>,
    (identity, week, token): &PublishedDead,
    set: &str,
    only_if: &str,
) -> Result<bool> {
    let Some(scope) = ledger_tx.known_scope(identity.tenant.as_ref(), &identity.scope)? else {
        return Ok(false);
    };
    let n = week.number();
    let mut tables = vec![("main.hapax_kept".to_owned(), format!("week = {n} AND"))];
    if made.contains(week) {
        tables.push((format!("main.hapax_entry_{n}"), String::new()));
    }
    let mut changed = 0;
    for (table, of_week) in tables {
        changed += ledger_tx
            .conn
            .prepare(&format!(
                "UPDATE {table} SET {set} WHERE {of_week} scope = ?1 AND id = ?2 AND token = ?3 AND state = 3 AND {only_if}"
            ))
            .and_then(|mut s| s.execute(params![scope, &identity.id.key()[..], token.0]))
            .doing("noting what is copied out")?;
    }
    Ok(changed > 0)
}

/// Sets markers; deletes those that are empty.
pub(super) fn set_markers(conn: &Connection, scope: &Scope, markers: &[Marker], now: Time) -> Result<()> {
    for marker in markers {
        let (topic, partition) = (marker.topic.as_str(), marker.partition);
        let done = if marker.is_empty() {
            conn.prepare_cached("DELETE FROM main.hapax_marker WHERE scope = ?1 AND topic = ?2 AND part = ?3")
                .and_then(|mut s| s.execute(params![scope.as_str(), topic, partition]))
        } else {
            let (tried, at) = (marker.tried_text(), now.as_micros());
            conn.prepare_cached(
                "INSERT OR REPLACE INTO main.hapax_marker (scope, topic, part, last, tried, at) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )
            .and_then(|mut s| {
                s.execute(params![scope.as_str(), topic, partition, marker.last, tried, at])
            })
        };
        done.doing("noting a marker")?;
    }
    Ok(())
}

/// Deletes markers that were not set since the cutoff: their scopes are no longer in use.
pub(super) fn forget_markers(conn: &Connection, cutoff: Time) -> Result<()> {
    conn.execute("DELETE FROM main.hapax_marker WHERE at < ?1", [cutoff.as_micros()])
        .map(drop)
        .doing("forgetting markers")
}

/// The markers of partitions, ordered by partition.
pub(super) fn markers(
    conn: &Connection,
    scope: &Scope,
    topic: &Topic,
    partitions: &[i32],
) -> Result<Vec<Marker>> {
    let wanted: BTreeSet<i32> = partitions.iter().copied().collect();
    let mut statement = conn
        .prepare_cached(
            "SELECT last, tried FROM main.hapax_marker WHERE scope = ?1 AND topic = ?2 AND part = ?3",
        )
        .doing("reading markers")?;
    let mut found = Vec::new();
    for partition in wanted {
        let stored: Option<(i64, String)> = statement
            .query_row(params![scope.as_str(), topic.as_str(), partition], |row| {
                Ok((row.get(0)?, row.get(1)?))
            })
            .optional()
            .doing("reading markers")?;
        if let Some((last, tried)) = stored {
            found.push(Marker::stored(topic, partition, last, &tried)?);
        }
    }
    Ok(found)
}
