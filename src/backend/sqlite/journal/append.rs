//! Appends events in a transaction. The inner result says what is wrong with an append; the outer
//! error means that the file failed and that the transaction must be rolled back.

use rusqlite::{Connection, OptionalExtension, params};

use super::codec;
use crate::backend::sqlite::codec::pack;
use crate::backend::sqlite::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint};
use crate::id::{Aggregate, Tenant};
use crate::journal::{Append, Appended, JournalSettings, Placing, Position, Ready};

/// Takes the write lock and returns the last position; `None` if the connection's main database is
/// not this journal's file.
pub(super) fn enter(conn: &Connection, journal: &str) -> rusqlite::Result<Option<u64>> {
    conn.prepare_cached("UPDATE main.hapax_journal_meta SET last = last WHERE journal = ?1 RETURNING last")?
        .query_row([journal], |row| row.get::<_, i64>(0))
        .optional()
        .map(|last| last.map(|last| last as u64))
}

/// Appends after the last position and advances it.
pub(super) fn append(
    conn: &Connection,
    append: &Append,
    settings: &JournalSettings,
    now: Time,
    last: &mut u64,
) -> Result<Result<Appended>> {
    let ready = match append.check(settings) {
        Ok(ready) => ready,
        Err(error) => return Ok(Err(error)),
    };
    let tenant = tenant_number(conn, append.tenant.as_ref())?;
    let found = tenant.map(|tenant| aggregate_number(conn, tenant, &append.aggregate)).transpose()?.flatten();
    let known = known(conn, tenant, &ready)?;
    let head = found.map_or(0, |(_, head)| head);
    let mut placed = match ready.decide(head, settings, |index| known[index].clone()) {
        Ok(placed) => placed,
        Err(error) => return Ok(Err(error)),
    };
    if placed.iter().all(|placed| placed.placing != Placing::New) {
        return Ok(Ok(Appended::new(placed)));
    }
    let tenant = tenant.map_or_else(|| new_tenant(conn, append.tenant.as_ref()), Ok)?;
    let aggregate = found.map_or_else(|| new_aggregate(conn, tenant, &append.aggregate), |(n, _)| Ok(n))?;
    let mut seq_last = head;
    for (index, event) in append.events.iter().enumerate() {
        if ready.same[index] != index {
            placed[index].position = placed[ready.same[index]].position.clone();
        } else if placed[index].placing == Placing::New {
            crate::crash_point!("journal.append.event");
            *last += 1;
            seq_last = placed[index].seq;
            placed[index].position = Position::of(*last);
            let place = Place { position: *last, aggregate, seq: seq_last, tenant, at: now };
            store(conn, &place, event, ready.fingerprints[index]).doing("storing an event")?;
        }
    }
    crate::crash_point!("journal.append.head");
    move_on(conn, aggregate, seq_last, *last).doing("numbering events")?;
    crate::crash_point!("journal.append.after");
    Ok(Ok(Appended::new(placed)))
}

type Known = Option<(u64, Position, Fingerprint)>;

/// What is stored under each event's id.
fn known(conn: &Connection, tenant: Option<i64>, ready: &Ready<'_>) -> Result<Vec<Known>> {
    let events = &ready.append.events;
    let Some(tenant) = tenant else { return Ok(vec![None; events.len()]) };
    let what = "looking for an id";
    let mut statement = conn
        .prepare_cached(
            "SELECT seq, position, fingerprint FROM main.hapax_journal_event WHERE tenant = ?1 AND id = ?2",
        )
        .doing(what)?;
    let mut known = Vec::with_capacity(events.len());
    for (index, event) in events.iter().enumerate() {
        if ready.same[index] != index {
            known.push(None);
            continue;
        }
        let found = statement
            .query_row(params![tenant, event.id.key()], |row| {
                Ok((row.get::<_, i64>(0)?, row.get::<_, i64>(1)?, row.get::<_, [u8; 16]>(2)?))
            })
            .optional()
            .doing(what)?;
        known.push(found.map(|(seq, position, fingerprint)| {
            (seq as u64, Position::of(position as u64), Fingerprint(fingerprint))
        }));
    }
    Ok(known)
}

/// Where an event is stored.
struct Place {
    position: u64,
    aggregate: i64,
    seq: u64,
    tenant: i64,
    at: Time,
}

fn store(conn: &Connection, place: &Place, event: &Event, fingerprint: Fingerprint) -> rusqlite::Result<()> {
    let headers = (!event.headers.is_empty()).then(|| pack(&event.headers));
    conn.prepare_cached(
        "INSERT INTO main.hapax_journal_event (position, aggregate, seq, tenant, id, at, fingerprint, time, kind, trace, \
         headers, payload) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
    )?
    .execute(params![
        place.position as i64,
        place.aggregate,
        place.seq as i64,
        place.tenant,
        event.id.key(),
        place.at.as_micros(),
        fingerprint.0,
        event.time.map(Time::as_micros),
        event.kind.as_ref().map(crate::id::Kind::as_str),
        event.trace.map(codec::pack_trace),
        headers,
        &event.payload[..],
    ])?;
    Ok(())
}

fn move_on(conn: &Connection, aggregate: i64, head: u64, last: u64) -> rusqlite::Result<()> {
    conn.prepare_cached("UPDATE main.hapax_journal_aggregate SET head = ?2 WHERE number = ?1")?
        .execute([aggregate, head as i64])?;
    conn.prepare_cached("UPDATE main.hapax_journal_meta SET last = ?1")?.execute([last as i64])?;
    Ok(())
}

/// A tenant's number: 0 for no tenant, `None` if the tenant is unknown.
pub(in crate::backend::sqlite) fn tenant_number(
    conn: &Connection,
    tenant: Option<&Tenant>,
) -> Result<Option<i64>> {
    let Some(tenant) = tenant else { return Ok(Some(0)) };
    conn.prepare_cached("SELECT number FROM main.hapax_journal_tenant WHERE tenant = ?1")
        .and_then(|mut statement| statement.query_row([tenant.as_str()], |row| row.get(0)).optional())
        .doing("looking for a tenant")
}

fn new_tenant(conn: &Connection, tenant: Option<&Tenant>) -> Result<i64> {
    let tenant = tenant.ok_or_else(|| Error::Corrupt("no tenant is always known".into()))?;
    conn.prepare_cached("INSERT INTO main.hapax_journal_tenant (tenant) VALUES (?1)")
        .and_then(|mut statement| statement.insert([tenant.as_str()]))
        .doing("registering a tenant")
}

/// An aggregate's number and its last seq.
pub(in crate::backend::sqlite) fn aggregate_number(
    conn: &Connection,
    tenant: i64,
    aggregate: &Aggregate,
) -> Result<Option<(i64, u64)>> {
    conn.prepare_cached(
        "SELECT number, head FROM main.hapax_journal_aggregate WHERE tenant = ?1 AND aggregate = ?2",
    )
    .and_then(|mut statement| {
        let read = |row: &rusqlite::Row<'_>| Ok((row.get(0)?, row.get::<_, i64>(1)? as u64));
        statement.query_row(params![tenant, aggregate.as_str()], read).optional()
    })
    .doing("looking for an aggregate")
}

fn new_aggregate(conn: &Connection, tenant: i64, aggregate: &Aggregate) -> Result<i64> {
    conn.prepare_cached(
        "INSERT INTO main.hapax_journal_aggregate (tenant, aggregate, head) VALUES (?1, ?2, 0)",
    )
    .and_then(|mut statement| statement.insert(params![tenant, aggregate.as_str()]))
    .doing("registering an aggregate")
}
