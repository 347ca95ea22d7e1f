//! The journal's tables and their migrations. They have their own version: the file may also hold a
//! ledger and the user's tables.

use rusqlite::Connection;

use crate::backend::sqlite::connect::patiently;
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::part::Part;
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

/// One row of facts about the journal. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_journal_meta (one INTEGER PRIMARY KEY CHECK (one = 1), journal TEXT NOT NULL,
    version INTEGER NOT NULL, accepts INTEGER NOT NULL, last INTEGER NOT NULL, token INTEGER NOT NULL) STRICT";

/// The tables as SQL, for reading.
pub fn schema_sql() -> String {
    format!("{};\n{}", META.trim(), MIGRATIONS.concat().trim()).replace("main.", "")
}

pub(super) const PART: Part = Part {
    name_has: "journal has",
    name: "the journal's tables",
    not_beside_bus: Some("journal"),
    meta: "hapax_journal_meta",
    make_meta: META,
    steps: MIGRATIONS,
    accepts: 1,
};

/// The journal's id, if the file needs no migration. Refuses a newer schema that does not accept
/// this build.
pub(super) fn current(conn: &Connection) -> Result<Option<String>> {
    if !PART.is_current(conn)? {
        return Ok(None);
    }
    conn.query_row("SELECT journal FROM main.hapax_journal_meta", [], |row| row.get(0))
        .map(Some)
        .doing("reading the journal's id")
}

/// Brings the file to this build's schema, and returns the journal's id. Several processes may do so at
/// once.
pub(super) fn migrate(conn: &Connection) -> Result<String> {
    let id = uuid::Uuid::new_v4().to_string();
    PART.migrate(conn, &[("journal", &id), ("last", &0), ("token", &0)], || Ok(()))?;
    patiently(|| current(conn))?.ok_or_else(|| Error::Corrupt("a journal was made and is not there".into()))
}
