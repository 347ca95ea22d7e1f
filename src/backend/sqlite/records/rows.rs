//! The rows of records, in an open transaction. The tenant is in every statement.

use rusqlite::{Connection, OptionalExtension, Row, params, params_from_iter};
use uuid::Uuid;

use super::schema::TRIGGERS;
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::scan::page;
use crate::clock::Time;
use crate::erase::{name, tenant_of};
use crate::error::{Error, Result};
use crate::records::{
    Filling, Found, LIST_BYTES_MAX, List, Listed, Module, ModuleSlug, Name, OfTenant, Payload, Record, Scan,
    Write,
};

/// Whether there is such a module.
pub(super) fn has_module(conn: &Connection, slug: &ModuleSlug) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.hapax_record_module WHERE slug = ?1")
        .and_then(|mut statement| statement.exists([slug.as_str()]))
        .doing("looking for a module")
}

/// Makes a module; false if it is there.
pub(super) fn create_module(conn: &Connection, slug: &ModuleSlug, now: Time) -> Result<bool> {
    let made = conn
        .execute(
            "INSERT OR IGNORE INTO main.hapax_record_module (slug, created_at) VALUES (?1, ?2)",
            params![slug.as_str(), now.as_micros()],
        )
        .doing("making a module")?;
    Ok(made == 1)
}

/// All modules. They share one table, and so its triggers.
pub(super) fn modules(conn: &Connection) -> Result<Vec<Module>> {
    let what = "listing modules";
    let problems = problems(conn)?;
    let sql = "SELECT m.slug, (SELECT count(*) FROM main.hapax_record r WHERE r.module = m.slug)
               FROM main.hapax_record_module m ORDER BY m.slug";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let mut rows = statement.query([]).doing(what)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        let slug: String = row.get(0).doing(what)?;
        let count: i64 = row.get(1).doing(what)?;
        found.push(Module::new(ModuleSlug::new(slug)?, Some(count as u64), problems.clone()));
    }
    Ok(found)
}

/// Which triggers are not as they were made.
fn problems(conn: &Connection) -> Result<Vec<String>> {
    let mut problems = Vec::new();
    let sql = "SELECT sql FROM main.sqlite_schema WHERE type = 'trigger' AND name = ?1";
    let mut statement = conn.prepare_cached(sql).doing("looking at the triggers of records")?;
    for (name, made) in TRIGGERS {
        let found = statement.query_row([name], |row| row.get::<_, String>(0)).optional();
        match found.doing("looking at the triggers of records")? {
            Some(found) if found == made => {}
            Some(_) => problems.push(format!("the trigger {name} was changed")),
            None => problems.push(format!("the trigger {name} is missing")),
        }
    }
    Ok(problems)
}

/// What there is of a record that is written.
pub(super) fn find(conn: &Connection, tenant: Uuid, write: Write<'_>) -> Result<Option<Found>> {
    Ok(get(conn, tenant, write.module(), write.id())?.map(|record| Found {
        seq: record.seq,
        payload: record.payload,
        created_at: record.created_at,
    }))
}

/// Stores a write under its seq. `before` is the seq that the record has.
pub(super) fn store(
    conn: &Connection,
    tenant: Uuid,
    write: Write<'_>,
    before: Option<u64>,
    seq: u64,
    now: Time,
) -> Result<()> {
    let (module, id, now) = (write.module().as_str(), write.id().into_bytes(), now.as_micros());
    let (tenant, before, seq) = (tenant.into_bytes(), before.unwrap_or_default() as i64, seq as i64);
    let changed = match write {
        Write::Create(create) => conn
            .prepare_cached(
                "INSERT INTO main.hapax_record (module, tenant, id, payload, seq, created_at, updated_at)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?6)",
            )
            .and_then(|mut s| s.execute(params![module, tenant, id, create.payload.as_str(), seq, now])),
        Write::Update(update) => conn
            .prepare_cached(
                "UPDATE main.hapax_record SET payload = ?4, seq = ?5, updated_at = ?6
                 WHERE module = ?1 AND tenant = ?2 AND id = ?3 AND seq = ?7",
            )
            .and_then(|mut s| {
                s.execute(params![module, tenant, id, update.payload.as_str(), seq, now, before])
            }),
        Write::Delete(_) => conn
            .prepare_cached(
                "DELETE FROM main.hapax_record WHERE module = ?1 AND tenant = ?2 AND id = ?3 AND seq = ?4",
            )
            .and_then(|mut s| s.execute(params![module, tenant, id, before])),
    };
    match changed.doing("writing a record")? {
        1 => Ok(()),
        rows => Err(Error::Corrupt(format!("the write of one record reached {rows} rows"))),
    }
}

const COLUMNS: &str = "id, seq, payload, created_at, updated_at";

/// A record.
pub(super) fn get(conn: &Connection, tenant: Uuid, module: &ModuleSlug, id: Uuid) -> Result<Option<Record>> {
    let sql =
        format!("SELECT {COLUMNS} FROM main.hapax_record WHERE module = ?1 AND tenant = ?2 AND id = ?3");
    let found = conn
        .prepare_cached(&sql)
        .and_then(|mut statement| {
            statement
                .query_row(params![module.as_str(), tenant.into_bytes(), id.into_bytes()], |row| {
                    Ok(decode(row, module))
                })
                .optional()
        })
        .doing("reading a record")?;
    found.transpose()
}

/// A page. Nothing is read of what does not fit on it.
pub(super) fn list(conn: &Connection, tenant: Uuid, which: &List) -> Result<Listed> {
    let what = "listing records";
    let sql = format!(
        "SELECT {COLUMNS} FROM main.hapax_record WHERE module = ?1 AND tenant = ?2 AND id > ?3 ORDER BY id LIMIT ?4"
    );
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    // The empty blob comes before every id.
    let after = which.after.map_or_else(Vec::new, |id| id.into_bytes().to_vec());
    let limit = which.limit as i64 + 1;
    let mut rows =
        statement.query(params![which.module.as_str(), tenant.into_bytes(), after, limit]).doing(what)?;
    let mut page = Filling::new(which.limit);
    while let Some(row) = rows.next().doing(what)? {
        if page.is_full() {
            return Ok(page.done(true));
        }
        page.add(decode(row, &which.module)?);
    }
    Ok(page.done(false))
}

/// A page of a scan. Ends with the record that makes it a page, by count or bytes.
pub(super) fn snapshot(conn: &Connection, scan: &Scan) -> Result<Vec<OfTenant>> {
    let what = "reading the records of all tenants";
    let (page, values) = page(scan, ["module", "tenant", "id"]);
    let sql = format!("SELECT {COLUMNS}, module, tenant FROM main.hapax_record {page}");
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement.query(params_from_iter(values)).doing(what)?;
    let (mut found, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.next().doing(what)? {
        let module = ModuleSlug::new(row.get::<_, String>(5).doing(what)?)?;
        let tenant: [u8; 16] = row.get(6).doing(what)?;
        let record = decode(row, &module)?;
        bytes += record.payload.as_str().len();
        found.push(OfTenant { tenant: Uuid::from_bytes(tenant), record });
        if bytes >= LIST_BYTES_MAX {
            break;
        }
    }
    Ok(found)
}

/// The next records that were deleted and are not there, by tenant and aggregate.
pub(super) fn gone(conn: &Connection, after: Option<&Name>, limit: usize) -> Result<Vec<(Name, u64)>> {
    let what = "reading the heads of deleted records";
    let text = |tenant: Uuid| if tenant.is_nil() { String::new() } else { tenant.to_string() };
    let mut at = after.map(|name| (text(name.tenant), format!("{}/{}", name.module, name.id)));
    // Tenant 0 means no tenant, and has no row.
    let mut tenants = conn
        .prepare_cached(
            "SELECT 0, '' WHERE ?1 = '' UNION ALL
             SELECT * FROM (SELECT number, tenant FROM main.hapax_journal_tenant WHERE tenant >= ?1 ORDER BY tenant)",
        )
        .doing(what)?;
    let mut heads = conn
        .prepare_cached(
            "SELECT aggregate, head FROM main.hapax_journal_aggregate
             WHERE tenant = ?1 AND aggregate > ?2 AND head > 0 ORDER BY aggregate",
        )
        .doing(what)?;
    let mut there = conn
        .prepare_cached("SELECT 1 FROM main.hapax_record WHERE module = ?1 AND tenant = ?2 AND id = ?3")
        .doing(what)?;
    let (mut found, from) = (Vec::new(), at.as_ref().map_or("", |(tenant, _)| tenant).to_owned());
    let mut of_tenants = tenants.query([&from]).doing(what)?;
    while let Some(tenant) = of_tenants.next().doing(what)? {
        let (number, tenant): (i64, String) = (tenant.get(0).doing(what)?, tenant.get(1).doing(what)?);
        let after = at.take().filter(|(of, _)| *of == tenant).map(|(_, aggregate)| aggregate);
        let Some(tenant) = tenant_of(&tenant) else { continue };
        let mut of_heads = heads.query(params![number, after.unwrap_or_default()]).doing(what)?;
        while let Some(head) = of_heads.next().doing(what)? {
            let aggregate: String = head.get(0).doing(what)?;
            let Some(name) = name(tenant, &aggregate) else { continue };
            let of = params![name.module.as_str(), name.tenant.into_bytes(), name.id.into_bytes()];
            if there.exists(of).doing(what)? {
                continue;
            }
            found.push((name, head.get::<_, i64>(1).doing(what)? as u64));
            if found.len() >= limit {
                return Ok(found);
            }
        }
    }
    Ok(found)
}

/// A record from the columns id, seq, payload, created_at, updated_at.
pub(in crate::backend::sqlite) fn decode(row: &Row<'_>, module: &ModuleSlug) -> Result<Record> {
    let what = "reading a record";
    let time = |at: usize| row.get::<_, i64>(at).map(Time::from_micros).doing(what);
    let id: [u8; 16] = row.get(0).doing(what)?;
    let payload: String = row.get(2).doing(what)?;
    Ok(Record {
        id: Uuid::from_bytes(id),
        module: module.clone(),
        seq: row.get::<_, i64>(1).doing(what)? as u64,
        payload: Payload::stored(&payload)?,
        created_at: time(3)?,
        updated_at: time(4)?,
    })
}
