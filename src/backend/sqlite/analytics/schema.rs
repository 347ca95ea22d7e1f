//! The tables of a read model and their migrations.

use rusqlite::{Connection, OptionalExtension, params};

use crate::backend::sqlite::connect::immediate;
use crate::backend::sqlite::fault::Doing;
use crate::error::{Error, Result};

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// Ids and tenants are 16 bytes; a tenant of zeros means no tenant. Times are microseconds since 1970. A
/// row without a payload is a deleted record: its version stays.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_read_row (tenant BLOB NOT NULL, module TEXT NOT NULL, id BLOB NOT NULL,
    generation INTEGER NOT NULL, seq INTEGER NOT NULL, payload TEXT, created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    PRIMARY KEY (tenant, module, id)) STRICT;
CREATE TABLE main.hapax_read_topic (topic TEXT PRIMARY KEY, complete INTEGER) STRICT;
CREATE TABLE main.hapax_read_partition (topic TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER, pulse INTEGER,
    PRIMARY KEY (topic, number)) STRICT;
CREATE TABLE main.hapax_read_rejected (topic TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,
    tenant BLOB, reason TEXT NOT NULL, payload BLOB NOT NULL, holds_back INTEGER, PRIMARY KEY (topic, number, offset)) STRICT;
"];

/// The version this build writes.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// The oldest schema version whose builds may work on what this build writes.
const ACCEPTS: i64 = 1;

const META: &str = "
CREATE TABLE main.hapax_read_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL) STRICT";

/// Whether the connection's main database holds a read model.
pub(super) fn is_there(conn: &Connection) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'hapax_read_meta'")
        .and_then(|mut statement| statement.exists([]))
        .doing("looking for the tables of a read model")
}

/// The version of the tables in a file; an error if this build cannot use them.
pub(super) fn version(conn: &Connection) -> Result<i64> {
    if !is_there(conn)? {
        return Ok(0);
    }
    let found: Option<(i64, i64)> = conn
        .query_row("SELECT version, accepts FROM main.hapax_read_meta", [], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })
        .optional()
        .doing("reading the version of a read model")?;
    let (version, accepts) = found.unwrap_or((0, 0));
    if accepts > VERSION {
        return Err(Error::Schema(format!(
            "the file's read model has version {version}, which accepts builds of version {accepts} and later; this build has \
             version {VERSION}. Use a newer hapax; nothing was changed"
        )));
    }
    Ok(version)
}

/// Brings the file to this build's schema. Several processes may do so at once: each checks again once it
/// holds the lock.
pub(super) fn migrate(conn: &Connection) -> Result<()> {
    let what = "bringing a read model up to date";
    if version(conn)? >= VERSION {
        return Ok(());
    }
    immediate(conn, what, || {
        let done = version(conn)?;
        if done >= VERSION {
            return Ok(());
        }
        if !is_there(conn)? {
            conn.execute_batch(META).doing(what)?;
        }
        for step in MIGRATIONS.iter().skip(done as usize) {
            conn.execute_batch(step).doing(what)?;
        }
        let sql = "INSERT INTO main.hapax_read_meta (one, version, accepts) VALUES (1, ?1, ?2)
                   ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts";
        conn.execute(sql, params![VERSION, ACCEPTS]).doing(what)?;
        Ok(())
    })
}
