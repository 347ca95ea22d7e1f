//! The records of an embedded bus. Offsets stay: members go on where they are.

use rusqlite::{Connection, OptionalExtension, params};

use super::BATCH;
use crate::backend::sqlite::codec::{pack, unpack};
use crate::backend::sqlite::connect::immediate;
use crate::backend::sqlite::fault::Doing;
use crate::bus::route::aggregate_key;
use crate::clock::Time;
use crate::erase::{DELETION, HEADER, Subject, payload};
use crate::error::Result;
use crate::event::Headers;

const WHAT: &str = "erasing records of a bus";

/// The headers that say which event a record is. The others go.
const KEPT: [&str; 13] = [
    "eventId",
    "ce_id",
    "ce_specversion",
    "ce_type",
    "ce_source",
    "ce_time",
    "ce_subject",
    "aggregate_id",
    "sequence_number",
    "tenant_id",
    "ce_tenant",
    "idempotency_key",
    "event_id",
];

/// Those of them that are an id. A record without one has its id in its payload: it goes as a whole, since nobody
/// could read what is left. Members are used to gaps.
const IDS: [&str; 4] = ["eventId", "ce_id", "idempotency_key", "event_id"];

/// A record with content, and where it is.
pub(super) struct RecordAbout {
    part: i64,
    pos: i64,
    stamp: Time,
    headers: Headers,
    bytes: i64,
}

fn text<'h>(headers: &'h Headers, name: &str) -> Option<&'h str> {
    std::str::from_utf8(headers.get(name)?).ok()
}

/// Whether a record is the subject's, and was not erased.
fn is_about(of: &Subject, key: Option<&[u8]>, headers: &Headers) -> Result<bool> {
    if headers.get(HEADER).is_some() || text(headers, "ce_type") == Some(DELETION) {
        return Ok(false);
    }
    let said = text(headers, "tenant_id").or_else(|| text(headers, "ce_tenant"));
    let Some(aggregate) = of.aggregate()? else {
        let prefix = aggregate_key(of.tenant.as_ref(), "");
        let keyed = key.is_some_and(|key| key.starts_with(prefix.as_bytes()));
        return Ok(said == Some(of.tenant_text()) || said.is_none() && keyed);
    };
    let own = aggregate_key(of.tenant.as_ref(), aggregate.as_str());
    Ok(key == Some(own.as_bytes())
        || said == of.tenant.as_ref().map(crate::id::Tenant::as_str)
            && text(headers, "aggregate_id") == Some(aggregate.as_str()))
}

/// Shows every record of the subject that has content; returns how many there are.
pub(super) fn scan(
    conn: &Connection,
    of: &Subject,
    mut show: impl FnMut(RecordAbout) -> Result<()>,
) -> Result<u64> {
    let parts: Vec<i64> = conn
        .prepare("SELECT number FROM main.bus_part ORDER BY number")
        .and_then(|mut statement| statement.query_map([], |row| row.get(0))?.collect())
        .doing(WHAT)?;
    let mut count = 0;
    for part in parts {
        let sql = format!(
            "SELECT pos, stamp, key, headers, ifnull(length(payload), 0) + ifnull(length(headers), 0)
             FROM main.bus_record_{part} ORDER BY pos"
        );
        let mut statement = conn.prepare(&sql).doing(WHAT)?;
        let mut rows = statement.query([]).doing(WHAT)?;
        while let Some(row) = rows.next().doing(WHAT)? {
            let bytes = |at| row.get::<_, Option<Vec<u8>>>(at).doing(WHAT);
            let headers = bytes(3)?.map_or(Ok(Headers::default()), |packed| unpack(&packed))?;
            if is_about(of, bytes(2)?.as_deref(), &headers)? {
                count += 1;
                let stamp = Time::from_micros(row.get(1).doing(WHAT)?);
                let (pos, bytes) = (row.get(0).doing(WHAT)?, row.get(4).doing(WHAT)?);
                show(RecordAbout { part, pos, stamp, headers, bytes })?;
            }
        }
    }
    Ok(count)
}

/// Erases them, batch by batch. The scan ends first: it reads one snapshot, and must not keep the log.
pub(super) fn erase(conn: &Connection, of: &Subject) -> Result<u64> {
    let mut all = Vec::new();
    scan(conn, of, |record| {
        all.push(record);
        Ok(())
    })?;
    for batch in all.chunks(BATCH as usize) {
        immediate(conn, WHAT, || batch.iter().try_for_each(|record| replace(conn, record)))?;
        crate::crash_point!("erase.bus");
    }
    Ok(all.len() as u64)
}

fn replace(conn: &Connection, record: &RecordAbout) -> Result<()> {
    let RecordAbout { part, pos, stamp, headers, bytes } = record;
    if !IDS.iter().any(|name| headers.get(name).is_some()) {
        return remove(conn, *part, *pos);
    }
    let kept = headers.iter().filter(|(name, _)| KEPT.contains(name));
    let marked: Headers = kept
        .map(|(name, value)| (name.to_owned(), value.to_vec()))
        .chain([(HEADER.to_owned(), b"true".to_vec())])
        .collect();
    let (aggregate, seq) = (text(headers, "aggregate_id"), text(headers, "sequence_number"));
    let seq = seq.and_then(|seq| seq.parse().ok()).unwrap_or_default();
    let said = payload(text(headers, "ce_type"), aggregate.unwrap_or_default(), seq, *stamp);
    let packed = pack(&marked);
    let sql = format!("UPDATE main.bus_record_{part} SET payload = ?2, headers = ?3 WHERE pos = ?1");
    let changed = conn.execute(&sql, params![pos, said.as_bytes(), packed]).doing(WHAT)?;
    // Retention may have removed it meanwhile.
    let difference = (said.len() + packed.len()) as i64 - bytes;
    conn.execute(
        "UPDATE main.bus_part SET bytes = bytes + ?2 WHERE number = ?1",
        params![part, difference * changed as i64],
    )
    .doing(WHAT)?;
    Ok(())
}

fn remove(conn: &Connection, part: i64, pos: i64) -> Result<()> {
    let sql = format!(
        "DELETE FROM main.bus_record_{part} WHERE pos = ?1
         RETURNING ifnull(length(key), 0) + ifnull(length(payload), 0) + ifnull(length(headers), 0)"
    );
    let bytes: Option<i64> = conn.query_row(&sql, [pos], |row| row.get(0)).optional().doing(WHAT)?;
    let sql = "UPDATE main.bus_part SET bytes = bytes - ?2 WHERE number = ?1";
    conn.execute(sql, params![part, bytes.unwrap_or_default()]).doing(WHAT)?;
    Ok(())
}
