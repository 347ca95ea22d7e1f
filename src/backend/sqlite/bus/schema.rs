//! The tables. The records of each partition have their own table, keyed by offset: appends go to
//! its end, and retention deletes from its beginning.

use rusqlite::{Connection, OptionalExtension};

use crate::backend::sqlite::connect::immediate;
use crate::backend::sqlite::fault::Doing;
use crate::error::{Error, Result};

const VERSION: i64 = 1;

const TABLES: &str = "
CREATE TABLE main.bus_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    swept INTEGER NOT NULL) STRICT;
CREATE TABLE main.bus_topic (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, partitions INTEGER NOT NULL,
    retention_us INTEGER, retention_bytes INTEGER, turn INTEGER NOT NULL) STRICT;
CREATE TABLE main.bus_part (number INTEGER PRIMARY KEY, topic INTEGER NOT NULL, place INTEGER NOT NULL,
    oldest INTEGER NOT NULL, next INTEGER NOT NULL, bytes INTEGER NOT NULL, UNIQUE (topic, place)) STRICT;
CREATE TABLE main.bus_group (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL) STRICT;
CREATE TABLE main.bus_member (number INTEGER PRIMARY KEY, grp INTEGER NOT NULL, joined INTEGER NOT NULL,
    seen INTEGER NOT NULL, session_us INTEGER NOT NULL, revoke_us INTEGER NOT NULL, latest INTEGER NOT NULL) STRICT;
CREATE INDEX main.bus_members ON bus_member (grp);
CREATE TABLE main.bus_wish (member INTEGER NOT NULL, topic INTEGER NOT NULL, PRIMARY KEY (member, topic))
    STRICT, WITHOUT ROWID;
CREATE TABLE main.bus_held (grp INTEGER NOT NULL, part INTEGER NOT NULL, member INTEGER NOT NULL,
    epoch INTEGER NOT NULL, revoke_by INTEGER, PRIMARY KEY (grp, part)) STRICT, WITHOUT ROWID;
CREATE TABLE main.bus_committed (grp INTEGER NOT NULL, part INTEGER NOT NULL, pos INTEGER NOT NULL,
    at INTEGER NOT NULL, PRIMARY KEY (grp, part)) STRICT, WITHOUT ROWID;
INSERT INTO main.bus_meta VALUES (1, 1, 0);
";

/// Creates the tables if they are missing. Several processes may do so at once.
pub(super) fn make(conn: &Connection) -> Result<()> {
    if is_made(conn)? {
        return Ok(());
    }
    immediate(conn, "making the bus", || {
        if is_made(conn)? {
            return Ok(()); // another process was faster
        }
        conn.execute_batch(TABLES).doing("making the bus")
    })
}

fn has(conn: &Connection, table: &str) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = ?1")
        .and_then(|mut statement| statement.exists([table]))
        .doing("looking for the tables of the bus")
}

fn is_made(conn: &Connection) -> Result<bool> {
    if !has(conn, "bus_meta")? {
        for (table, what) in [("hapax_meta", "ledger"), ("hapax_journal_meta", "journal")] {
            if has(conn, table)? {
                return Err(Error::Config(format!(
                    "this file holds a {what}; the bus needs a file of its own, since each file has one writer"
                )));
            }
        }
        return Ok(false);
    }
    let version: Option<i64> = conn
        .query_row("SELECT version FROM main.bus_meta", [], |row| row.get(0))
        .optional()
        .doing("reading the version of the bus")?;
    match version {
        Some(VERSION) => Ok(true),
        Some(other) => Err(Error::Unsupported(format!(
            "the bus in this file has version {other}, this build understands {VERSION}"
        ))),
        None => Err(Error::Corrupt("the bus has no version".into())),
    }
}

/// Creates the table for a partition's records, in the caller's transaction.
pub(super) fn make_records(conn: &Connection, part: i64) -> Result<()> {
    conn.execute_batch(&format!(
        "CREATE TABLE main.bus_record_{part} (pos INTEGER PRIMARY KEY, at INTEGER NOT NULL, stamp INTEGER NOT NULL,
            key BLOB, payload BLOB, headers BLOB) STRICT"
    ))
    .doing("making the table of a partition")
}
