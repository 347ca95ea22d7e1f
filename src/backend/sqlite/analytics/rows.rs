//! The rows of a read model, in an open transaction. The tenant is in every question.

use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use uuid::Uuid;

use crate::analytics::{
    self, Block, Change, Groups, ListPage, PartitionSync, Rejected, RejectedEntry, Selection, Synced, Tally,
    Tallying, Version, earliest, held_back,
};
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::records::rows::decode;
use crate::backend::sqlite::scan::page;
use crate::bus::Partition;
use crate::clock::Time;
use crate::erase::Subject;
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::id::Topic;
use crate::records::{Filling, LIST_BYTES_MAX, Listed, ModuleSlug, Name, Payload, Scan};

/// Applies a block.
pub(super) fn apply(conn: &Connection, block: &Block) -> Result<()> {
    for change in &block.changes {
        keep(conn, change)?;
    }
    let Partition { topic, number } = &block.partition;
    expect(conn, topic, block.partitions.max(number.saturating_add(1)))?;
    let mut synced = synced(conn, topic)?;
    let before = usize::try_from(*number).ok().and_then(|place| synced.pulses.get(place).copied().flatten());
    if let Some(at) = block.pulse {
        synced.pulse(*number, at);
    }
    for (rejected, pulse) in &block.rejected {
        reject(conn, &block.partition, rejected, (*pulse).or(before))?;
    }
    let what = "noting how far a read model is";
    let sql = "UPDATE main.hapax_read_partition SET offset = coalesce(?3, offset), pulse = max(coalesce(pulse, ?4), ?4)
               WHERE topic = ?1 AND number = ?2";
    let pulse = block.pulse.or(before).map(Time::as_micros);
    let noted = conn
        .prepare_cached(sql)
        .and_then(|mut statement| statement.execute(params![topic.as_str(), number, block.end(), pulse]))
        .doing(what)?;
    if noted != 1 {
        return Err(Error::Corrupt(format!(
            "the read model has {noted} rows for partition {}",
            block.partition
        )));
    }
    conn.prepare_cached("UPDATE main.hapax_read_topic SET complete = ?2 WHERE topic = ?1")
        .and_then(|mut statement| {
            statement.execute(params![topic.as_str(), synced.complete.map(Time::as_micros)])
        })
        .doing(what)?;
    Ok(())
}

/// Keeps a change if it is newer than what is there.
fn keep(conn: &Connection, change: &Change) -> Result<()> {
    let sql = "INSERT INTO main.hapax_read_row AS r (tenant, module, id, generation, seq, payload, created_at, updated_at,
                   topic, partition, offset) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)
               ON CONFLICT (tenant, module, id) DO UPDATE SET generation = excluded.generation, seq = excluded.seq,
                   payload = excluded.payload, created_at = excluded.created_at, updated_at = excluded.updated_at,
                   topic = excluded.topic, partition = excluded.partition, offset = excluded.offset
               WHERE (excluded.generation, excluded.seq) > (r.generation, r.seq)";
    conn.prepare_cached(sql)
        .and_then(|mut statement| {
            statement.execute(params![
                change.tenant.into_bytes(),
                change.module.as_str(),
                change.id.into_bytes(),
                change.version.generation(),
                change.version.seq() as i64,
                change.payload.as_ref().map(Payload::as_str),
                change.created_at.as_micros(),
                change.updated_at.as_micros(),
                change.origin.topic.as_str(),
                change.origin.partition,
                change.origin.offset,
            ])
        })
        .doing("applying a change to a read model")?;
    Ok(())
}

/// What holds everybody back may have the place of what held one tenant back: then both are reported.
fn reject(conn: &Connection, partition: &Partition, of: &Rejected, holds_back: Option<Time>) -> Result<()> {
    let sql =
        "INSERT INTO main.hapax_read_rejected (topic, number, offset, tenant, reason, payload, holds_back)
               VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)
               ON CONFLICT (topic, number, offset) DO UPDATE SET tenant = NULL, reason = reason || '; ' || excluded.reason,
                   holds_back = min(holds_back, excluded.holds_back)
               WHERE excluded.tenant IS NULL AND hapax_read_rejected.tenant IS NOT NULL";
    conn.prepare_cached(sql)
        .and_then(|mut statement| {
            statement.execute(params![
                partition.topic.as_str(),
                partition.number,
                of.origin.offset,
                of.tenant.map(Uuid::into_bytes),
                of.reason,
                of.payload,
                holds_back.map(Time::as_micros),
            ])
        })
        .doing("noting a rejected change")?;
    Ok(())
}

/// Expects so many partitions of a topic, at least.
pub(super) fn expect(conn: &Connection, topic: &Topic, partitions: i32) -> Result<()> {
    let what = "noting the partitions of a topic";
    conn.prepare_cached("INSERT INTO main.hapax_read_topic (topic) VALUES (?1) ON CONFLICT DO NOTHING")
        .and_then(|mut statement| statement.execute([topic.as_str()]))
        .doing(what)?;
    let known: i32 = conn
        .prepare_cached("SELECT count(*) FROM main.hapax_read_partition WHERE topic = ?1")
        .and_then(|mut statement| statement.query_row([topic.as_str()], |row| row.get(0)))
        .doing(what)?;
    for number in known..partitions {
        conn.prepare_cached("INSERT INTO main.hapax_read_partition (topic, number) VALUES (?1, ?2)")
            .and_then(|mut statement| statement.execute(params![topic.as_str(), number]))
            .doing(what)?;
    }
    Ok(())
}

fn synced(conn: &Connection, topic: &Topic) -> Result<Synced> {
    let what = "reading how far a read model is";
    let complete: Option<i64> = conn
        .prepare_cached("SELECT complete FROM main.hapax_read_topic WHERE topic = ?1")
        .and_then(|mut statement| statement.query_row([topic.as_str()], |row| row.get(0)).optional())
        .doing(what)?
        .flatten();
    let mut statement = conn
        .prepare_cached("SELECT pulse FROM main.hapax_read_partition WHERE topic = ?1 ORDER BY number")
        .doing(what)?;
    let pulses = statement.query_map([topic.as_str()], |row| time(row, 0)).doing(what)?;
    let pulses = pulses.collect::<rusqlite::Result<_>>().doing(what)?;
    Ok(Synced { pulses, complete: complete.map(Time::from_micros) })
}

fn time(row: &Row<'_>, at: usize) -> rusqlite::Result<Option<Time>> {
    Ok(row.get::<_, Option<i64>>(at)?.map(Time::from_micros))
}

/// What is selected, for parameters 1 to 3. A deleted record has no payload.
const SELECTED: &str =
    "tenant = ?1 AND module = ?2 AND payload IS NOT NULL AND (?3 IS NULL OR updated_at >= ?3)";

/// A page. Nothing is read of what does not fit on it.
pub(super) fn list(conn: &Connection, of: &Selection, page: ListPage) -> Result<Listed> {
    let what = "listing the rows of a read model";
    let sql = format!(
        "SELECT id, seq, payload, created_at, updated_at FROM main.hapax_read_row
         WHERE {SELECTED} AND id > ?4 ORDER BY id LIMIT ?5"
    );
    // The empty blob comes before every id.
    let after = page.after.map_or_else(Vec::new, |id| id.into_bytes().to_vec());
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement
        .query(params![
            of.tenant.into_bytes(),
            of.module.as_str(),
            of.since.map(Time::as_micros),
            after,
            page.limit as i64 + 1
        ])
        .doing(what)?;
    let mut filling = Filling::new(page.limit);
    while let Some(row) = rows.next().doing(what)? {
        if filling.is_full() {
            return Ok(filling.done(true));
        }
        filling.add(decode(row, &of.module)?);
    }
    Ok(filling.done(false))
}

/// A page of a scan. Ends with the row that makes it a page, by count or bytes.
pub(super) fn scan(conn: &Connection, scan: &Scan) -> Result<Vec<analytics::Row>> {
    let what = "scanning a read model";
    let (page, values) = page(scan, ["tenant", "module", "id"]);
    let sql = format!(
        "SELECT tenant, module, id, generation, seq, payload, created_at, updated_at FROM main.hapax_read_row {page}"
    );
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement.query(params_from_iter(values)).doing(what)?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next().doing(what)? {
        let uuid = |at: usize| row.get::<_, [u8; 16]>(at).map(Uuid::from_bytes).doing(what);
        let module = ModuleSlug::new(row.get::<_, String>(1).doing(what)?)?;
        let name = Name { tenant: uuid(0)?, module, id: uuid(2)? };
        let version = Version::new(row.get(3).doing(what)?, row.get::<_, i64>(4).doing(what)? as u64)?;
        let payload = row.get_ref(5).doing(what)?;
        let payload = payload.as_bytes().map_err(|error| Error::Corrupt(format!("{what}: {error}")))?;
        bytes += payload.len();
        let time = |at: usize| row.get(at).map(Time::from_micros).doing(what);
        found.push(analytics::Row::new(name, version, (time(6)?, time(7)?), payload)?);
        if bytes >= LIST_BYTES_MAX {
            break;
        }
    }
    Ok(found)
}

/// Numbers about records.
pub(super) fn tally(conn: &Connection, of: &Selection, tally: &Tally) -> Result<Groups> {
    let what = "reading the rows of a read model";
    let count_only = tally.measures.is_empty() && tally.group_by.is_none();
    let columns = if count_only { "count(*)" } else { "payload" };
    let sql = format!("SELECT {columns} FROM main.hapax_read_row WHERE {SELECTED}");
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let values = params![of.tenant.into_bytes(), of.module.as_str(), of.since.map(Time::as_micros)];
    let mut rows = statement.query(values).doing(what)?;
    let mut tallying = Tallying::new(tally);
    while let Some(row) = rows.next().doing(what)? {
        if count_only {
            return Ok(tallying.counted(row.get::<_, i64>(0).doing(what)? as u64));
        }
        let payload = row.get_ref(0).doing(what)?;
        let payload = payload.as_str().map_err(|error| Error::Corrupt(format!("{what}: {error}")))?;
        tallying.add(payload)?;
    }
    Ok(tallying.done())
}

/// Up to when everything is applied, for a tenant.
pub(super) fn last_sync_at(conn: &Connection, tenant: Uuid) -> Result<Option<Time>> {
    let what = "reading how far a read model is";
    let times = |sql: &str, values: &[&dyn rusqlite::ToSql]| -> Result<Vec<Option<Time>>> {
        let mut statement = conn.prepare_cached(sql).doing(what)?;
        let times = statement.query_map(values, |row| time(row, 0)).doing(what)?;
        times.collect::<rusqlite::Result<_>>().doing(what)
    };
    let complete = earliest(times("SELECT complete FROM main.hapax_read_topic", &[])?);
    // One row, if anything holds back; null counts as the earliest.
    let sql = "SELECT holds_back FROM main.hapax_read_rejected WHERE tenant = ?1 OR tenant IS NULL
               ORDER BY holds_back LIMIT 1";
    Ok(held_back(complete, times(sql, &[&tenant.into_bytes()])?))
}

/// The version of a record.
pub(super) fn version(
    conn: &Connection,
    tenant: Uuid,
    module: &ModuleSlug,
    id: Uuid,
) -> Result<Option<Version>> {
    let sql = "SELECT generation, seq FROM main.hapax_read_row WHERE tenant = ?1 AND module = ?2 AND id = ?3";
    let found: Option<(u16, i64)> = conn
        .prepare_cached(sql)
        .and_then(|mut statement| {
            statement
                .query_row(params![tenant.into_bytes(), module.as_str(), id.into_bytes()], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })
                .optional()
        })
        .doing("reading a version")?;
    found.map(|(generation, seq)| Version::new(generation, seq as u64)).transpose()
}

/// How far each partition was applied.
pub(super) fn partitions(conn: &Connection) -> Result<Vec<PartitionSync>> {
    let what = "reading how far a read model is";
    let sql = "SELECT topic, number, offset, pulse FROM main.hapax_read_partition ORDER BY topic, number";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let mut rows = statement.query([]).doing(what)?;
    let mut all = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        let partition = partition(row)?;
        all.push(PartitionSync::new(partition, row.get(2).doing(what)?, time(row, 3).doing(what)?));
    }
    Ok(all)
}

/// The partition in the first two columns.
fn partition(row: &Row<'_>) -> Result<Partition> {
    let what = "reading the name of a partition";
    let topic: String = row.get(0).doing(what)?;
    Ok(Partition { topic: Topic::new(topic)?, number: row.get(1).doing(what)? })
}

/// Rejected changes.
pub(super) fn rejected(conn: &Connection, limit: usize) -> Result<Vec<RejectedEntry>> {
    let what = "listing rejected changes";
    let sql =
        "SELECT topic, number, offset, tenant, reason, payload, holds_back FROM main.hapax_read_rejected
               ORDER BY topic, number, offset LIMIT ?1";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let mut rows = statement.query([i64::try_from(limit).unwrap_or(i64::MAX)]).doing(what)?;
    let mut all = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        let Partition { topic, number } = partition(row)?;
        let tenant: Option<[u8; 16]> = row.get(3).doing(what)?;
        let rejected = Rejected {
            tenant: tenant.map(Uuid::from_bytes),
            origin: Origin::new(topic, number, row.get(2).doing(what)?),
            reason: row.get(4).doing(what)?,
            payload: row.get(5).doing(what)?,
        };
        all.push(RejectedEntry::new(rejected, time(row, 6).doing(what)?));
    }
    Ok(all)
}

/// Gives a rejected change up.
pub(super) fn drop_rejected(conn: &Connection, partition: &Partition, offset: i64) -> Result<bool> {
    let sql = "DELETE FROM main.hapax_read_rejected WHERE topic = ?1 AND number = ?2 AND offset = ?3";
    let gone = conn
        .execute(sql, params![partition.topic.as_str(), partition.number, offset])
        .doing("giving a rejected change up")?;
    Ok(gone == 1)
}

/// What a rejected change that was erased says.
const ERASED: &str = "its content was erased";

/// Rejected changes of a subject that have content, for parameters 1 to 4: tenant, what the payload contains,
/// whether all of the tenant's are meant, the reason of erased ones. One whose tenant could not be read is the
/// subject's if it names it.
const REJECTED: &str =
    "(tenant IS ?1 AND ?3 OR (tenant IS ?1 OR tenant IS NULL) AND instr(payload, CAST(?2 AS BLOB)) > 0)
    AND (length(payload) > 0 OR reason <> ?4)";

/// How many rows and rejected changes have content of a subject.
pub(super) fn erasable(conn: &Connection, of: &Subject) -> Result<u64> {
    let Some(tenant) = of.tenant_id() else { return Ok(0) };
    let (tenant, what) = (tenant.into_bytes(), "counting what is to be erased");
    let (module, id) = of.record.as_ref().map(|(module, id)| (module.as_str(), id.into_bytes())).unzip();
    let sql = "SELECT count(*) FROM main.hapax_read_row WHERE tenant = ?1 AND payload IS NOT NULL
               AND (?2 IS NULL OR module = ?2 AND id = ?3)";
    let rows: i64 = conn.query_row(sql, params![tenant, module, id], |row| row.get(0)).doing(what)?;
    let sql = format!("SELECT count(*) FROM main.hapax_read_rejected WHERE {REJECTED}");
    let by = params![tenant, of.mark(), of.record.is_none(), ERASED];
    let rejected: i64 = conn.query_row(&sql, by, |row| row.get(0)).doing(what)?;
    Ok((rows + rejected) as u64)
}

/// Takes the content out of rejected changes. They stay, and hold back what they held back.
pub(super) fn erase_rejected(conn: &Connection, of: &Subject) -> Result<u64> {
    let Some(tenant) = of.tenant_id() else { return Ok(0) };
    let sql = format!("UPDATE main.hapax_read_rejected SET payload = x'', reason = ?4 WHERE {REJECTED}");
    let by = params![tenant.into_bytes(), of.mark(), of.record.is_none(), ERASED];
    let rows = conn.execute(&sql, by).doing("erasing rejected changes")?;
    Ok(rows as u64)
}
