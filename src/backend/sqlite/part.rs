//! The parts of a file: journal, keys, records, read model and API tokens. Each has its own version, and
//! is made or brought up to date in the same way, also by several processes at once. (The ledger, which
//! also makes tables for weeks, has its own way.)

use rusqlite::{Connection, OptionalExtension, ToSql, params_from_iter};

use super::connect::{immediate, must_hold_no_bus};
use super::fault::Doing;
use crate::error::{Error, Result};

/// A part, and what messages call it.
pub(super) struct Part {
    /// With its verb, as in `the file's keys have`.
    pub name_has: &'static str,
    /// As in `bringing the keys up to date`.
    pub name: &'static str,
    /// What it is if it must not share its file with a bus: `store of keys`.
    pub not_beside_bus: Option<&'static str>,
    /// The table of one row that has the version, without `main.`.
    pub meta: &'static str,
    /// Makes that table. Every version does so first.
    pub make_meta: &'static str,
    /// The step at index n brings the part to version n + 1. A released step is never changed.
    pub steps: &'static [&'static str],
    /// The oldest schema version whose builds may work on what this build writes.
    pub accepts: i64,
}

impl Part {
    /// The version that this build writes.
    pub const fn version(&self) -> i64 {
        self.steps.len() as i64
    }

    /// Whether the connection's main database holds the part.
    pub fn is_there(&self, conn: &Connection) -> Result<bool> {
        conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = ?1")
            .and_then(|mut statement| statement.exists([self.meta]))
            .doing(&format!("looking for the tables of {}", self.name))
    }

    /// The version of the part in a file; an error if this build cannot use it.
    fn found(&self, conn: &Connection) -> Result<Option<i64>> {
        if !self.is_there(conn)? {
            return Ok(None);
        }
        let sql = format!("SELECT version, accepts FROM main.{}", self.meta);
        let found: Option<(i64, i64)> = conn
            .prepare_cached(&sql)
            .and_then(|mut statement| {
                statement.query_row([], |row| Ok((row.get(0)?, row.get(1)?))).optional()
            })
            .doing(&format!("reading the version of {}", self.name))?;
        let (version, accepts) = found.unwrap_or((0, 0));
        if accepts > self.version() {
            return Err(Error::Schema(format!(
                "the file's {} version {version}, which accepts builds of version {accepts} and later; this build has version \
                 {}. Use a newer hapax; nothing was changed",
                self.name_has,
                self.version()
            )));
        }
        Ok(Some(version))
    }

    /// Whether the file needs no migration. Refuses a newer part that does not accept this build.
    pub fn is_current(&self, conn: &Connection) -> Result<bool> {
        Ok(self.found(conn)?.is_some_and(|version| version >= self.version()))
    }

    /// Brings the file to this build's version. Several processes may do so at once: each checks again
    /// once it holds the lock. `facts` are further columns of a new part's row; `then` runs in the
    /// transaction that makes a new part.
    pub fn migrate(
        &self,
        conn: &Connection,
        facts: &[(&str, &dyn ToSql)],
        then: impl Fn() -> rusqlite::Result<()>,
    ) -> Result<()> {
        if self.is_current(conn)? {
            return Ok(());
        }
        let what = format!("bringing {} up to date", self.name);
        immediate(conn, &what, || {
            let found = self.found(conn)?;
            if found.is_some_and(|version| version >= self.version()) {
                return Ok(()); // another process was faster
            }
            if found.is_none() {
                self.not_beside_bus.map_or(Ok(()), |part| must_hold_no_bus(conn, part))?;
                conn.execute_batch(self.make_meta).doing(&what)?;
            }
            for step in self.steps.iter().skip(found.unwrap_or(0) as usize) {
                conn.execute_batch(step).doing(&what)?;
            }
            if found.is_none_or(|version| version == 0) {
                then().doing(&what)?;
            }
            self.record_version(conn, facts).doing(&what)
        })
    }

    fn record_version(&self, conn: &Connection, facts: &[(&str, &dyn ToSql)]) -> rusqlite::Result<()> {
        let version = self.version();
        let own: [(&str, &dyn ToSql); 3] = [("one", &1), ("version", &version), ("accepts", &self.accepts)];
        let (names, values): (Vec<_>, Vec<_>) = own.into_iter().chain(facts.iter().copied()).unzip();
        let sql = format!(
            "INSERT INTO main.{} ({}) VALUES ({}) \
             ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts",
            self.meta,
            names.join(", "),
            vec!["?"; names.len()].join(", ")
        );
        conn.execute(&sql, params_from_iter(values)).map(drop)
    }
}
