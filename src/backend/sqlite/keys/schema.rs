//! The keys' tables and their migrations. They have their own version: the file may also hold a
//! ledger, a journal and the user's tables.

use rusqlite::{Connection, OptionalExtension, params};

use crate::backend::memory::keys::new_secret;
use crate::backend::sqlite::connect::{immediate, must_hold_no_bus};
use crate::backend::sqlite::fault::Doing;
use crate::error::{Error, Result};

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// The empty tenant means no tenant. Times are microseconds since 1970.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_keys (tenant TEXT NOT NULL, key TEXT NOT NULL, token INTEGER NOT NULL, nonce INTEGER NOT NULL,
    fingerprint BLOB NOT NULL, parts TEXT NOT NULL, begun_at INTEGER NOT NULL, until INTEGER NOT NULL,
    held_until INTEGER NOT NULL, ended INTEGER NOT NULL, bound INTEGER NOT NULL, settled_at INTEGER, aged_from INTEGER, status INTEGER, headers TEXT, body BLOB,
    resolved_at INTEGER, resolved_by TEXT, resolved_why TEXT,
    PRIMARY KEY (tenant, key)) STRICT;
CREATE INDEX main.hapax_keys_aged ON hapax_keys (aged_from) WHERE aged_from IS NOT NULL;
CREATE INDEX main.hapax_keys_open ON hapax_keys (held_until) WHERE aged_from IS NULL;
"];

/// The version this build writes.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// The oldest schema version whose builds may work on what this build writes.
const ACCEPTS: i64 = 1;

/// One row of facts about the keys. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_keys_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL, secret BLOB NOT NULL, token INTEGER NOT NULL, horizon INTEGER, swept_at INTEGER,
    paused_until INTEGER) STRICT";

/// The secret of the keys in a file, if it needs no migration.
pub(super) fn current(conn: &Connection) -> Result<Option<[u8; 32]>> {
    let Some((version, accepts, secret)) = read(conn)? else { return Ok(None) };
    if version > VERSION && accepts > VERSION {
        return Err(Error::Schema(format!(
            "the file's keys have version {version}, which accepts builds of version {accepts} and later; this build has \
             version {VERSION}. Use a newer hapax; nothing was changed"
        )));
    }
    if version < VERSION {
        return Ok(None);
    }
    let secret = secret.try_into();
    secret.map(Some).map_err(|_| Error::Corrupt("the secret of the keys does not have 32 bytes".into()))
}

/// Whether the connection's main database holds keys.
pub(super) fn is_there(conn: &Connection) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'hapax_keys_meta'")
        .and_then(|mut statement| statement.exists([]))
        .doing("looking for the keys' tables")
}

fn read(conn: &Connection) -> Result<Option<(i64, i64, Vec<u8>)>> {
    if !is_there(conn)? {
        return Ok(None);
    }
    conn.query_row("SELECT version, accepts, secret FROM main.hapax_keys_meta", [], |row| {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?))
    })
    .optional()
    .doing("reading the version of the keys' schema")
}

/// Brings the file to this build's schema. Several processes may do so at once: each checks again
/// once it holds the lock.
pub(super) fn migrate(conn: &Connection) -> Result<[u8; 32]> {
    let what = "bringing the keys' schema up to date";
    if let Some(secret) = current(conn)? {
        return Ok(secret);
    }
    immediate(conn, what, || {
        if let Some(secret) = current(conn)? {
            return Ok(secret);
        }
        let before = read(conn)?;
        let done = before.as_ref().map_or(0, |(version, ..)| *version);
        if before.is_none() {
            must_hold_no_bus(conn, "store of keys")?;
            conn.execute_batch(META).doing(what)?;
        }
        for step in MIGRATIONS.iter().skip(done as usize) {
            conn.execute_batch(step).doing(what)?;
        }
        conn.execute(
            "INSERT INTO main.hapax_keys_meta (one, version, accepts, secret, token) VALUES (1, ?1, ?2, ?3, 0)
             ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts",
            params![VERSION, ACCEPTS, new_secret()],
        )
        .doing(what)?;
        current(conn)?.ok_or_else(|| Error::Corrupt("keys were made and are not there".into()))
    })
}
