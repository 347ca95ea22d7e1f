//! Opens connections, waits for other writers, begins and ends transactions.

use std::path::Path;
use std::time::Duration;

use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::fault::Doing;
use crate::error::{Error, Result};

/// How often a contended transaction is tried before the caller gets an error. SQLite waits within
/// each try (see [`wait`]); retrying covers the cases in which SQLite does not call its busy
/// handler.
const ATTEMPTS_MAX: u32 = 4;
/// How often the busy handler lets SQLite check the lock again: about five seconds in all.
const WAITS_MAX: i32 = 500;

/// Whether a file may be written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// Creates the file if it is missing.
    Write,
    Read,
}

/// Opens a ledger's file.
pub(crate) fn open(path: &Path, access: Access) -> Result<Connection> {
    open_file(path, access, "ledger")
}

/// Opens a file. The path is taken literally: URIs are not interpreted.
pub(crate) fn open_file(path: &Path, access: Access, what: &str) -> Result<Connection> {
    if path.as_os_str().is_empty() || path == Path::new(":memory:") {
        let problem = "it needs a name: what stays in memory has a type of its own, such as MemoryLedger";
        return Err(Error::invalid("file", problem));
    }
    let flags = OpenFlags::SQLITE_OPEN_NO_MUTEX
        | match access {
            Access::Write => OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_CREATE,
            Access::Read => OpenFlags::SQLITE_OPEN_READ_ONLY,
        };
    if access == Access::Write {
        make_private(path);
    }
    let mut conn =
        Connection::open_with_flags(path, flags).doing(&format!("opening the {what} {}", path.display()))?;
    conn.set_prepared_statement_cache_capacity(256);
    conn.busy_handler(Some(wait)).doing("setting how long to wait")?;
    let read = conn.query_row("PRAGMA main.schema_version", [], |row| row.get::<_, i64>(0));
    if read.is_err_and(|error| error.sqlite_error_code() == Some(ErrorCode::NotADatabase)) {
        return Err(Error::Config(format!(
            "{} is not an SQLite database; name another file as the {what}, nothing was changed",
            path.display()
        )));
    }
    if access == Access::Write && conn.is_readonly("main").doing("asking whether the file is read-only")? {
        let message = format!("{} is read-only for this user; nothing was changed", path.display());
        return Err(Error::Refused { what: message, source: None });
    }
    Ok(conn)
}

/// Makes a file that only its owner may read, if there is none: SQLite would make it as the umask says,
/// and gives its write-ahead log the same mode. A file that is there keeps its mode. Whatever goes wrong
/// here fails again when SQLite opens the file, and is reported then.
fn make_private(path: &Path) {
    let mut options = std::fs::OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let _ = options.open(path);
}

/// SQLite's busy handler: sleeps between two checks of a lock. The sleep is short because locks are
/// held for one commit.
fn wait(waits: i32) -> bool {
    std::thread::sleep(Duration::from_millis(if waits < 20 { 1 } else { 10 }));
    waits < WAITS_MAX
}

/// Switches the file to a write-ahead log and makes every commit durable before it is acknowledged.
pub(crate) fn make_durable(conn: &Connection) -> Result<()> {
    // Other processes may be changing the mode of a new file, and SQLite does not call the busy
    // handler for that.
    let mode: String = patiently(|| {
        conn.query_row("PRAGMA main.journal_mode = WAL", [], |row| row.get(0))
            .doing(&format!("{}: setting the journal mode", conn.path().unwrap_or("the file")))
    })?;
    if mode != "wal" {
        return Err(Error::Unsupported(format!(
            "the file's journal mode stays {mode:?}: it must lie on a file system on which SQLite can keep a \
             write-ahead log"
        )));
    }
    conn.execute_batch("PRAGMA main.synchronous = FULL").doing("setting synchronous")
}

/// Refuses a caller's connection that acknowledges commits before they are on disk: a claim
/// reported as committed could be gone after a power failure.
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

/// Refuses a file that holds a bus. A bus needs a file of its own, since each file has one writer.
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

/// Retries while another connection is in the way.
pub(crate) fn patiently<T>(mut run: impl FnMut() -> Result<T>) -> Result<T> {
    let mut attempts = 1;
    loop {
        match run() {
            Err(Error::Contended { .. }) if attempts < ATTEMPTS_MAX => {
                std::thread::sleep(Duration::from_millis(10 << attempts));
                attempts += 1;
            }
            result => return result,
        }
    }
}

/// Runs a transaction that takes the write lock at its start.
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

/// Begins a transaction that takes the write lock at once.
pub(crate) fn begin(conn: &Connection, what: &str) -> Result<()> {
    simple(conn, "BEGIN IMMEDIATE", what)
}

/// Commits.
pub(crate) fn commit(conn: &Connection, what: &str) -> Result<()> {
    simple(conn, "COMMIT", what)
}

/// Rolls back, unless SQLite already has.
pub(crate) fn roll_back(conn: &Connection) {
    if !conn.is_autocommit()
        && let Err(error) = conn.execute_batch("ROLLBACK")
    {
        tracing::warn!(%error, "a transaction could not be rolled back");
    }
}

/// Runs a statement without parameters that is used often.
pub(crate) fn simple(conn: &Connection, sql: &str, what: &str) -> Result<()> {
    conn.prepare_cached(sql).and_then(|mut statement| statement.raw_execute()).doing(what)?;
    Ok(())
}
