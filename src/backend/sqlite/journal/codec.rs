//! Stores events as columns and reads them.

use bytes::Bytes;
use rusqlite::{Connection, OptionalExtension, Params, Row, params};

use super::append::{aggregate_number, tenant_number};
use crate::backend::sqlite::codec::unpack;
use crate::backend::sqlite::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint, TraceContext};
use crate::id::{Aggregate, EventId, Kind, Tenant};
use crate::journal::{Filling, JournalStat, Page, Position, ReadBatch, Stored};

/// Up to this many events are counted exactly.
const COUNTED_MAX: u64 = 1_000_000;

/// The columns that [`stored`] reads.
const COLUMNS: &str = "e.position, e.seq, e.id, e.at, e.fingerprint, e.time, e.kind, e.trace, e.headers, e.payload, \
     a.aggregate, (SELECT t.tenant FROM main.hapax_journal_tenant t WHERE t.number = e.tenant) \
     FROM main.hapax_journal_event e JOIN main.hapax_journal_aggregate a ON a.number = e.aggregate";

/// Packs a trace context into bytes: trace, span, flags.
pub(super) fn pack_trace(trace: TraceContext) -> [u8; 25] {
    let mut bytes = [0; 25];
    bytes[..16].copy_from_slice(&trace.trace_id.to_be_bytes());
    bytes[16..24].copy_from_slice(&trace.span_id.to_be_bytes());
    bytes[24] = trace.flags;
    bytes
}

fn unpack_trace(bytes: [u8; 25]) -> TraceContext {
    let (mut trace, mut span) = ([0; 16], [0; 8]);
    trace.copy_from_slice(&bytes[..16]);
    span.copy_from_slice(&bytes[16..24]);
    TraceContext { trace_id: u128::from_be_bytes(trace), span_id: u64::from_be_bytes(span), flags: bytes[24] }
}

/// Converts to SQLite's signed integers; larger numbers become the largest.
pub(super) fn number(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

/// Reads an event from [`COLUMNS`]. Its names were validated when it was appended.
fn stored(row: &Row<'_>, what: &str) -> Result<Stored> {
    let bytes = |at| row.get::<_, Option<Vec<u8>>>(at).doing(what);
    let text = |at| row.get::<_, Option<String>>(at).doing(what);
    let corrupt = |error: Error| Error::Corrupt(format!("an event of the journal: {error}"));
    let id = bytes(2)?.ok_or_else(|| Error::Corrupt("an event without an id".into()))?;
    let mut event = Event::new(EventId::from_key(&id)?).payload(Bytes::from(bytes(9)?.unwrap_or_default()));
    event.time = row.get::<_, Option<i64>>(5).doing(what)?.map(Time::from_micros);
    event.kind = text(6)?.map(Kind::new).transpose().map_err(corrupt)?;
    event.trace = row.get::<_, Option<[u8; 25]>>(7).doing(what)?.map(unpack_trace);
    if let Some(packed) = bytes(8)? {
        event.headers = unpack(&packed)?;
    }
    event.tenant = text(11)?.map(Tenant::new).transpose().map_err(corrupt)?;
    let aggregate = Aggregate::new(text(10)?.unwrap_or_default()).map_err(corrupt)?;
    let seq = row.get::<_, i64>(1).doing(what)? as u64;
    let position = Position::of(row.get::<_, i64>(0).doing(what)? as u64);
    let at = Time::from_micros(row.get(3).doing(what)?);
    Ok(Stored::new(position, at, Fingerprint(row.get(4).doing(what)?), event, aggregate, seq))
}

/// Reads the events of a query until the page is full.
fn events(conn: &Connection, rest: &str, by: impl Params, mut page: Filling) -> Result<Page> {
    let what = "reading events";
    let mut statement = conn.prepare_cached(&format!("SELECT {COLUMNS} WHERE {rest}")).doing(what)?;
    let mut rows = statement.query(by).doing(what)?;
    while !page.is_full()
        && let Some(row) = rows.next().doing(what)?
    {
        page.take(stored(row, what)?);
    }
    Ok(page.done())
}

/// The events of an aggregate from a seq on.
pub(super) fn read_aggregate(
    conn: &Connection,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
    from: u64,
    page: Filling,
) -> Result<Page> {
    let Some((aggregate, _)) = find_aggregate(conn, tenant, aggregate)? else { return Ok(Page::default()) };
    let rest = "e.aggregate = ?1 AND e.seq >= ?2 ORDER BY e.seq";
    events(conn, rest, params![aggregate, number(from)], page)
}

fn find_aggregate(
    conn: &Connection,
    tenant: Option<&Tenant>,
    aggregate: &Aggregate,
) -> Result<Option<(i64, u64)>> {
    let Some(tenant) = tenant_number(conn, tenant)? else { return Ok(None) };
    aggregate_number(conn, tenant, aggregate)
}

/// The last seq of an aggregate.
pub(super) fn head(conn: &Connection, tenant: Option<&Tenant>, aggregate: &Aggregate) -> Result<u64> {
    Ok(find_aggregate(conn, tenant, aggregate)?.map_or(0, |(_, head)| head))
}

/// The events after a position.
pub(super) fn read(conn: &Connection, after: &Position, page: Filling) -> Result<ReadBatch> {
    if page.is_full() {
        return Ok(ReadBatch::new(Vec::new(), after.clone(), false)); // no events are asked for
    }
    // The reader sees one snapshot, in which every drawn position is committed.
    let last = last(conn)?;
    let rest = "e.position > ?1 ORDER BY e.position";
    let page = events(conn, rest, params![number(after.number())], page)?;
    let next = match page.events.last() {
        Some(end) if page.more => end.position.clone(),
        // Skips positions that were swept, so that the follower does not look at them again.
        _ => after.clone().max(Position::of(last)),
    };
    Ok(ReadBatch::new(page.events, next, false).more(page.more))
}

/// The event with an id.
pub(super) fn find(conn: &Connection, tenant: Option<&Tenant>, id: &EventId) -> Result<Option<Stored>> {
    let Some(tenant) = tenant_number(conn, tenant)? else { return Ok(None) };
    let found = events(conn, "e.tenant = ?1 AND e.id = ?2", params![tenant, id.key()], Filling::new(1, 0))?;
    Ok(found.events.into_iter().next())
}

/// The last position drawn.
pub(super) fn last(conn: &Connection) -> Result<u64> {
    conn.prepare_cached("SELECT last FROM main.hapax_journal_meta")
        .and_then(|mut statement| statement.query_row([], |row| row.get::<_, i64>(0)))
        .map(|last| last as u64)
        .doing("reading the last position")
}

/// A number that changes when another connection commits.
pub(super) fn version(conn: &Connection) -> Result<i64> {
    conn.prepare_cached("PRAGMA main.data_version")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("looking for changes")
}

/// How many events come after a position, up to a limit.
pub(super) fn count_after(conn: &Connection, after: u64, limit: u64) -> Result<u64> {
    conn.prepare_cached(
        "SELECT count(*) FROM (SELECT 1 FROM main.hapax_journal_event WHERE position > ?1 LIMIT ?2)",
    )
    .and_then(|mut statement| statement.query_row([number(after), number(limit)], |row| row.get::<_, i64>(0)))
    .map(|count| count as u64)
    .doing("counting events")
}

/// Statistics. Positions are dense except where events were swept in between, so they give the
/// estimate for a large journal.
pub(super) fn stat(conn: &Connection) -> Result<JournalStat> {
    let what = "counting events";
    let ends: Option<(i64, i64)> = conn
        .query_row(
            "SELECT (SELECT min(position) FROM main.hapax_journal_event), \
             (SELECT max(position) FROM main.hapax_journal_event)",
            [],
            |row| Ok(row.get::<_, Option<i64>>(0)?.zip(row.get(1)?)),
        )
        .doing(what)?;
    let aggregates: Option<i64> = conn
        .query_row("SELECT max(number) FROM main.hapax_journal_aggregate", [], |row| row.get(0))
        .doing(what)?;
    let mut stat = JournalStat { exact: true, ..JournalStat::default() };
    stat.aggregates = aggregates.unwrap_or(0) as u64; // numbers have no gaps and are never removed
    let Some((first, last)) = ends else { return Ok(stat) };
    stat.events = (last - first + 1) as u64;
    stat.exact = stat.events <= COUNTED_MAX;
    if stat.exact {
        stat.events = count_after(conn, 0, u64::MAX)?;
    }
    stat.last = Some(Position::of(last as u64));
    stat.oldest_at = conn
        .query_row("SELECT at FROM main.hapax_journal_event WHERE position = ?1", [first], |row| row.get(0))
        .optional()
        .doing(what)?
        .map(Time::from_micros);
    Ok(stat)
}
