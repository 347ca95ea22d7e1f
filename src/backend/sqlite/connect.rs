//! Connections: how they are opened, how long they wait for each other, how a transaction begins and ends.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use super::fault::Doing;
use crate::error::{Error, Result};

/// How often a transaction that met another writer is tried before the caller hears of it. Each try waits by itself
/// (see [`wait`]); this is for the cases in which SQLite does not ask it.
const TRIES_MAX: u32 = 4;
/// How often one try looks again: about five seconds.
const WAITS_MAX: i32 = 500;

/// Whether a file may be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Made if it is missing.
    Write,
    Read,
}

/// Opens a ledger's file.
pub(crate) fn open(path: &Path, access: Access) -> Result<Connection> {
    if path.as_os_str().is_empty() || path == Path::new(":memory:") {
        return Err(Error::invalid("ledger file", "it needs a name: a ledger in memory is MemoryLedger"));
    }
    open_file(path, access, "ledger")
}

/// Opens a file. Its name is taken literally: no URIs.
pub(crate) fn open_file(path: &Path, access: Access, what: &str) -> Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_NO_MUTEX
        | match access {
            Access::Write => OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE,
            Access::Read => OpenFlags::SQLITE_OPEN_READ_ONLY,
        };
    let mut conn =
        Connection::open_with_flags(path, flags).doing(&format!("opening the {what} {}", path.display()))?;
    conn.set_prepared_statement_cache_capacity(256);
    conn.busy_handler(Some(wait)).doing("setting how long to wait")?;
    Ok(conn)
}

/// What is between one look at a locked file and the next: short, because whoever holds it holds it for one commit.
fn wait(waits: i32) -> bool {
    std::thread::sleep(Duration::from_millis(if waits < 20 { 1 } else { 10 }));
    waits < WAITS_MAX
}

/// Makes the file's journal a write-ahead log, and every commit durable before it is acknowledged.
pub(crate) fn make_durable(conn: &Connection) -> Result<()> {
    // Changing the mode of a fresh file meets others doing the same, and SQLite does not wait by itself then.
    let mode: String = patiently(|| {
        conn.query_row("PRAGMA main.journal_mode = WAL", [], |row| row.get(0))
            .doing("setting the journal mode")
    })?;
    if mode != "wal" {
        return Err(Error::Unsupported(format!(
            "the file's journal mode stays {mode:?}: it must lie on a file system on which SQLite can keep a \
             write-ahead log"
        )));
    }
    conn.execute_batch("PRAGMA main.synchronous = FULL").doing("setting synchronous")
}

/// Refuses a caller's connection on which a commit is acknowledged before it is on disk: whoever was told that it took effect
/// would be told so of what is gone after a power failure.
pub(crate) fn must_be_durable(conn: &Connection) -> Result<()> {
    let synchronous: i64 = conn
        .prepare_cached("PRAGMA main.synchronous")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("asking the connection how it syncs")?;
    if synchronous >= 2 {
        return Ok(());
    }
    let name = if synchronous == 0 { "OFF" } else { "NORMAL" };
    Err(Error::Unsupported(format!(
        "this connection's synchronous is {name}: what it commits may be gone after a power failure; run `PRAGMA synchronous = \
         FULL` on it before the transaction begins"
    )))
}

/// Refuses a file that holds a bus: it needs its file for itself, since each file has one writer.
pub(crate) fn must_hold_no_bus(conn: &Connection, what: &str) -> Result<()> {
    let bus = conn
        .prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'bus_meta'")
        .and_then(|mut statement| statement.exists([]))
        .doing("looking for a bus in the file")?;
    if !bus {
        return Ok(());
    }
    Err(Error::Config(format!(
        "this file holds a bus; the {what} needs a file of its own, since each file has one writer. Nothing was changed"
    )))
}

/// Tries again while another connection is in the way.
pub(crate) fn patiently<T>(mut run: impl FnMut() -> Result<T>) -> Result<T> {
    let mut tries = 1;
    loop {
        match run() {
            Err(Error::Contended { .. }) if tries < TRIES_MAX => {
                std::thread::sleep(Duration::from_millis(10 << tries));
                tries += 1;
            }
            result => return result,
        }
    }
}

/// Runs a transaction that has the right to write from its start.
pub(crate) fn immediate<T>(conn: &Connection, what: &str, mut run: impl FnMut() -> Result<T>) -> Result<T> {
    patiently(|| {
        begin(conn, what)?;
        let result = run().and_then(|value| commit(conn, what).map(|()| value));
        if result.is_err() {
            roll_back(conn);
        }
        result
    })
}

/// Begins a transaction that has the right to write.
pub(crate) fn begin(conn: &Connection, what: &str) -> Result<()> {
    simple(conn, "BEGIN IMMEDIATE", what)
}

/// Makes it so.
pub(crate) fn commit(conn: &Connection, what: &str) -> Result<()> {
    simple(conn, "COMMIT", what)
}

/// Undoes what SQLite has not undone by itself.
pub(crate) fn roll_back(conn: &Connection) {
    if !conn.is_autocommit()
        && let Err(error) = conn.execute_batch("ROLLBACK")
    {
        tracing::warn!(%error, "a transaction could not be rolled back");
    }
}

/// Runs a statement without parameters that is used again and again.
pub(crate) fn simple(conn: &Connection, sql: &str, what: &str) -> Result<()> {
    conn.prepare_cached(sql).and_then(|mut statement| statement.raw_execute()).doing(what)?;
    Ok(())
}
