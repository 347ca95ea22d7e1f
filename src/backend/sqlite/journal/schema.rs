//! The journal's tables and their migrations. They have their own version: the file may also hold a
//! ledger and the user's tables.

use rusqlite::{Connection, OptionalExtension, params};

use crate::backend::sqlite::connect::{immediate, must_hold_no_bus};
use crate::backend::sqlite::fault::Doing;
use crate::error::{Error, Result};

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// Tenant 0 means no tenant. Positions are drawn from `hapax_journal_meta.last`, so a sweep does
/// not free them for reuse.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_journal_tenant (number INTEGER PRIMARY KEY, tenant TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE main.hapax_journal_aggregate (number INTEGER PRIMARY KEY, tenant INTEGER NOT NULL, aggregate TEXT NOT NULL,
    head INTEGER NOT NULL, UNIQUE (tenant, aggregate)) STRICT;
CREATE TABLE main.hapax_journal_event (position INTEGER PRIMARY KEY, aggregate INTEGER NOT NULL, seq INTEGER NOT NULL,
    tenant INTEGER NOT NULL, id BLOB NOT NULL, at INTEGER NOT NULL, fingerprint BLOB NOT NULL, time INTEGER, kind TEXT,
    trace BLOB, headers BLOB, payload BLOB NOT NULL) STRICT;
CREATE UNIQUE INDEX main.hapax_journal_seq ON hapax_journal_event (aggregate, seq);
CREATE UNIQUE INDEX main.hapax_journal_id ON hapax_journal_event (tenant, id);
CREATE TABLE main.hapax_journal_relay (relay TEXT PRIMARY KEY, owner TEXT, until INTEGER, token INTEGER NOT NULL,
    checkpoint TEXT, saved_at INTEGER) STRICT, WITHOUT ROWID;
"];

/// The version this build writes.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// The oldest schema version whose builds may work on what this build writes.
const ACCEPTS: i64 = 1;

/// One row of facts about the journal. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_journal_meta (one INTEGER PRIMARY KEY CHECK (one = 1), journal TEXT NOT NULL,
    version INTEGER NOT NULL, accepts INTEGER NOT NULL, last INTEGER NOT NULL, token INTEGER NOT NULL) STRICT";

/// The tables as SQL, for reading.
pub fn schema_sql() -> String {
    format!("{};\n{}", META.trim(), MIGRATIONS.concat().trim()).replace("main.", "")
}

/// Whether the connection's main database holds a journal.
pub(super) fn is_there(conn: &Connection) -> Result<bool> {
    conn.prepare_cached(
        "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'hapax_journal_meta'",
    )
    .and_then(|mut statement| statement.exists([]))
    .doing("looking for the journal's tables")
}

/// The journal's id and schema version.
#[derive(Debug, Clone)]
pub(super) struct Meta {
    pub journal: String,
    version: i64,
    accepts: i64,
}

impl Meta {
    fn read(conn: &Connection) -> Result<Option<Meta>> {
        if !is_there(conn)? {
            return Ok(None);
        }
        conn.query_row("SELECT journal, version, accepts FROM main.hapax_journal_meta", [], |row| {
            Ok(Meta { journal: row.get(0)?, version: row.get(1)?, accepts: row.get(2)? })
        })
        .optional()
        .doing("reading the version of the journal's schema")
    }

    fn must_accept_us(&self) -> Result<()> {
        if self.version <= VERSION || self.accepts <= VERSION {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "the file's journal has version {}, which accepts builds of version {} and later; this build has version \
             {VERSION}. Use a newer hapax; nothing was changed",
            self.version, self.accepts
        )))
    }
}

/// The journal's facts, if the file needs no migration. Refuses a newer schema that does not accept
/// this build.
pub(super) fn current(conn: &Connection) -> Result<Option<Meta>> {
    let Some(meta) = Meta::read(conn)? else { return Ok(None) };
    meta.must_accept_us()?;
    Ok((meta.version >= VERSION).then_some(meta))
}

/// Brings the file to this build's schema. Several processes may do so at once: each checks again
/// once it holds the lock.
pub(super) fn migrate(conn: &Connection) -> Result<Meta> {
    if let Some(meta) = current(conn)? {
        return Ok(meta);
    }
    let what = "bringing the journal's schema up to date";
    immediate(conn, what, || {
        if let Some(meta) = current(conn)? {
            return Ok(meta);
        }
        let before = Meta::read(conn)?;
        let done = before.as_ref().map_or(0, |meta| meta.version);
        if before.is_none() {
            must_hold_no_bus(conn, "journal")?;
            conn.execute_batch(META).doing(what)?;
        }
        for step in MIGRATIONS.iter().skip(done as usize) {
            conn.execute_batch(step).doing(what)?;
        }
        let journal = before.map_or_else(|| uuid::Uuid::new_v4().to_string(), |meta| meta.journal);
        conn.execute(
            "INSERT INTO main.hapax_journal_meta (one, journal, version, accepts, last, token)
             VALUES (1, ?1, ?2, ?3, 0, 0)
             ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts",
            params![journal, VERSION, ACCEPTS],
        )
        .doing(what)?;
        Ok(Meta { journal, version: VERSION, accepts: ACCEPTS })
    })
}
