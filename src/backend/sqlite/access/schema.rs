//! The tables of API tokens and audit rows, and their migrations. They have their own version: the
//! file may also hold a ledger, a journal, keys and the user's tables.

use rusqlite::{Connection, OptionalExtension, params};

use crate::backend::sqlite::connect::{immediate, must_hold_no_bus};
use crate::backend::sqlite::fault::Doing;
use crate::error::{Error, Result};

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// The empty tenant means no tenant; no scopes mean all. Times are microseconds since 1970.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_access_token (id TEXT PRIMARY KEY, name TEXT NOT NULL, tenant TEXT NOT NULL, scopes TEXT,
    role TEXT NOT NULL, hash BLOB NOT NULL, previous_hash BLOB, previous_until INTEGER, rotations INTEGER NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER, revoked_at INTEGER, last_used_at INTEGER,
    made_by TEXT) STRICT, WITHOUT ROWID;
CREATE INDEX main.hapax_access_token_made_by ON hapax_access_token (made_by) WHERE made_by IS NOT NULL;
CREATE TABLE main.hapax_access_audit (number INTEGER PRIMARY KEY AUTOINCREMENT, note BLOB NOT NULL UNIQUE,
    at INTEGER NOT NULL, who TEXT NOT NULL, action TEXT NOT NULL, target TEXT NOT NULL, reason TEXT NOT NULL,
    details TEXT NOT NULL) STRICT;
CREATE INDEX main.hapax_access_audit_at ON hapax_access_audit (at);
"];

/// The version this build writes.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// The oldest schema version whose builds may work on what this build writes.
const ACCEPTS: i64 = 1;

/// One row of facts. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_access_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL, swept_at INTEGER, paused_until INTEGER) STRICT";

/// Whether a file has tokens that need no migration.
pub(super) fn is_current(conn: &Connection) -> Result<bool> {
    let Some((version, accepts)) = read(conn)? else { return Ok(false) };
    if version > VERSION && accepts > VERSION {
        return Err(Error::Schema(format!(
            "the file's API tokens have version {version}, which accepts builds of version {accepts} and later; this build \
             has version {VERSION}. Use a newer hapax; nothing was changed"
        )));
    }
    Ok(version >= VERSION)
}

fn read(conn: &Connection) -> Result<Option<(i64, i64)>> {
    let what = "reading the version of the API tokens' schema";
    let there = conn
        .prepare_cached(
            "SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'hapax_access_meta'",
        )
        .and_then(|mut statement| statement.exists([]))
        .doing(what)?;
    if !there {
        return Ok(None);
    }
    conn.query_row("SELECT version, accepts FROM main.hapax_access_meta", [], |row| {
        Ok((row.get(0)?, row.get(1)?))
    })
    .optional()
    .doing(what)
}

/// Brings the file to this build's schema. Several processes may do so at once: each checks again
/// once it holds the lock.
pub(super) fn migrate(conn: &Connection) -> Result<()> {
    let what = "bringing the API tokens' schema up to date";
    if is_current(conn)? {
        return Ok(());
    }
    immediate(conn, what, || {
        if is_current(conn)? {
            return Ok(());
        }
        let before = read(conn)?;
        let done = before.map_or(0, |(version, _)| version);
        if before.is_none() {
            must_hold_no_bus(conn, "store of API tokens")?;
            conn.execute_batch(META).doing(what)?;
        }
        for step in MIGRATIONS.iter().skip(done as usize) {
            conn.execute_batch(step).doing(what)?;
        }
        conn.execute(
            "INSERT INTO main.hapax_access_meta (one, version, accepts) VALUES (1, ?1, ?2)
             ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts",
            params![VERSION, ACCEPTS],
        )
        .doing(what)?;
        Ok(())
    })
}
