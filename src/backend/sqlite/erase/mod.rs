//! Erases what an SQLite file has of a subject: events of a journal, answers of keys, entries of a ledger,
//! records of a bus.
//!
//! Rows go in batches, each a transaction, so that writers wait for one batch at most. At the end the file is
//! written anew (`VACUUM`) and its write-ahead log is emptied: free pages and old frames have bytes of rows
//! that no statement can reach.

mod bus;

use std::path::{Path, PathBuf};
use std::time::Duration;

use async_trait::async_trait;
use rusqlite::{Connection, params};

use super::codec::pack;
use super::connect::{self, Access, immediate, patiently};
use super::fault::Doing;
use super::journal::{aggregate_number, tenant_number};
use crate::clock::Time;
use crate::erase::{
    ANSWER_BODY, ANSWER_HEADERS, ANSWER_STATUS, DELETION, Eraser, Found, Subject, headers, name, payload,
};
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::EventId;
use crate::records::Name;

/// How many rows one transaction erases.
const BATCH: i64 = 500;
/// How often, and with which pause, the write-ahead log is tried to be emptied: somebody may read it.
const EMPTYINGS: u32 = 200;
const PAUSE: Duration = Duration::from_millis(50);

/// Erases in one SQLite file, whatever it holds of hapax.
#[derive(Debug, Clone)]
pub struct SqliteEraser {
    path: PathBuf,
}

impl SqliteEraser {
    /// Erases in a file that is there. Makes nothing.
    pub fn new(path: impl AsRef<Path>) -> Self {
        SqliteEraser { path: path.as_ref().to_owned() }
    }

    async fn run<T: Send + 'static>(
        &self,
        access: Access,
        run: impl FnOnce(&Connection) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let path = self.path.clone();
        let work = move || {
            let conn = connect::open_file(&path, access, "file to erase in")?;
            // What is deleted or shortened is overwritten with zeros, also before the file is written anew.
            conn.execute_batch("PRAGMA secure_delete = ON; PRAGMA synchronous = FULL")
                .doing("setting how to delete")?;
            run(&conn)
        };
        let done = tokio::task::spawn_blocking(work).await;
        done.unwrap_or_else(|error| Err(Error::unavailable("erasing in a file", error)))
    }
}

/// Whether the file has a table.
fn has(conn: &Connection, table: &str) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = ?1")
        .and_then(|mut statement| statement.exists([table]))
        .doing("looking for tables")
}

#[async_trait]
impl Eraser for SqliteEraser {
    async fn count(&self, of: &Subject) -> Result<Vec<Found>> {
        let of = of.clone();
        self.run(Access::Read, move |conn| each(conn, |place| patiently(|| place.count(conn, &of)))).await
    }

    async fn erase(&self, of: &Subject) -> Result<Vec<Found>> {
        let of = of.clone();
        self.run(Access::Write, move |conn| each(conn, |place| place.erase(conn, &of))).await
    }

    async fn heads(&self, of: &Subject) -> Result<Vec<(Name, u64)>> {
        let of = of.clone();
        self.run(Access::Read, move |conn| patiently(|| heads(conn, &of))).await
    }

    async fn knows(&self, of: &Subject) -> Result<bool> {
        let of = of.clone();
        self.run(Access::Read, move |conn| patiently(|| knows(conn, &of))).await
    }

    async fn compact(&self) -> Result<Vec<String>> {
        let shown = self.path.display().to_string();
        self.run(Access::Write, move |conn| compact(conn, &shown)).await
    }
}

/// What a file may hold.
#[derive(Debug, Clone, Copy)]
enum Place {
    Journal,
    Answers,
    Ledger,
    Bus,
}

fn each(conn: &Connection, mut run: impl FnMut(Place) -> Result<u64>) -> Result<Vec<Found>> {
    let places = [
        (Place::Journal, "hapax_journal_meta", "journal events"),
        (Place::Answers, "hapax_keys_meta", "answers of keys"),
        (Place::Ledger, "hapax_meta", "ledger entries"),
        (Place::Bus, "bus_meta", "bus records"),
    ];
    let mut found = Vec::new();
    for (place, table, name) in places {
        if has(conn, table)? {
            found.push(Found::new(name, run(place)?));
        }
    }
    Ok(found)
}

impl Place {
    fn count(self, conn: &Connection, of: &Subject) -> Result<u64> {
        match self {
            Place::Journal => count_events(conn, of),
            Place::Answers => {
                let sql = format!("SELECT count(*) FROM main.hapax_keys WHERE {ANSWERED}");
                number(conn, &sql, params![of.tenant_text(), ANSWER_BODY, answer_mark(of)])
            }
            Place::Ledger => {
                let mut sum = 0;
                for table in entry_tables(conn)? {
                    let (condition, values) = about(of)?;
                    let sql = format!("SELECT count(*) FROM main.{table} WHERE {condition}");
                    sum += number(conn, &sql, rusqlite::params_from_iter(values))?;
                }
                Ok(sum)
            }
            Place::Bus => bus::scan(conn, of, |_| Ok(())),
        }
    }

    fn erase(self, conn: &Connection, of: &Subject) -> Result<u64> {
        match self {
            Place::Journal => erase_events(conn, of),
            Place::Answers => erase_answers(conn, of),
            Place::Ledger => erase_entries(conn, of),
            Place::Bus => bus::erase(conn, of),
        }
    }
}

fn number(conn: &Connection, sql: &str, by: impl rusqlite::Params) -> Result<u64> {
    let count: i64 = conn.query_row(sql, by, |row| row.get(0)).doing("counting what is to be erased")?;
    Ok(count as u64)
}

/// Runs batches until one finds nothing more.
fn in_batches(conn: &Connection, what: &str, mut batch: impl FnMut() -> Result<u64>) -> Result<u64> {
    let mut sum = 0;
    loop {
        let erased = immediate(conn, what, &mut batch)?;
        crate::crash_point!("erase.batch");
        if erased == 0 {
            return Ok(sum);
        }
        sum += erased;
    }
}

/// The numbers of the tenant and of the aggregate, as the journal has them; `None` if it has never had them.
fn of_journal(conn: &Connection, of: &Subject) -> Result<Option<(i64, Option<i64>)>> {
    let Some(tenant) = tenant_number(conn, of.tenant.as_ref())? else { return Ok(None) };
    let Some(aggregate) = of.aggregate()? else { return Ok(Some((tenant, None))) };
    Ok(aggregate_number(conn, tenant, &aggregate)?.map(|(number, _)| (tenant, Some(number))))
}

/// Events with content, for parameters 1 to 4: tenant, aggregate, the kind of deletions, the fingerprint of
/// erased ones.
const TELLING_EVENTS: &str =
    "e.tenant = ?1 AND (?2 IS NULL OR e.aggregate = ?2) AND e.kind IS NOT ?3 AND e.fingerprint <> ?4";

fn count_events(conn: &Connection, of: &Subject) -> Result<u64> {
    let Some((tenant, aggregate)) = of_journal(conn, of)? else { return Ok(0) };
    let sql = format!("SELECT count(*) FROM main.hapax_journal_event e WHERE {TELLING_EVENTS}");
    number(conn, &sql, params![tenant, aggregate, DELETION, Fingerprint::ERASED.0])
}

fn erase_events(conn: &Connection, of: &Subject) -> Result<u64> {
    let what = "erasing events of a journal";
    let Some((tenant, aggregate)) = of_journal(conn, of)? else { return Ok(0) };
    let select = format!(
        "SELECT e.position, e.kind, a.aggregate, e.seq, e.at FROM main.hapax_journal_event e
         JOIN main.hapax_journal_aggregate a ON a.number = e.aggregate WHERE {TELLING_EVENTS} LIMIT {BATCH}"
    );
    let marker = pack(&headers());
    in_batches(conn, what, || {
        let mut statement = conn.prepare_cached(&select).doing(what)?;
        let found = statement.query_map(params![tenant, aggregate, DELETION, Fingerprint::ERASED.0], |row| {
            let (kind, aggregate): (Option<String>, String) = (row.get(1)?, row.get(2)?);
            let said = payload(
                kind.as_deref(),
                &aggregate,
                row.get::<_, i64>(3)? as u64,
                Time::from_micros(row.get(4)?),
            );
            Ok((row.get::<_, i64>(0)?, said))
        });
        let found: Vec<(i64, String)> = found.and_then(Iterator::collect).doing(what)?;
        for (position, said) in &found {
            conn.prepare_cached(
                "UPDATE main.hapax_journal_event SET payload = ?2, headers = ?3, trace = NULL, fingerprint = ?4 WHERE position = ?1",
            )
            .and_then(|mut update| {
                update.execute(params![position, said.as_bytes(), marker, Fingerprint::ERASED.0])
            })
            .doing(what)?;
        }
        Ok(found.len() as u64)
    })
}

/// Answers that tell something, for parameters 1 to 3: tenant, the body of erased ones, what a body about the
/// record contains.
const ANSWERED: &str = "tenant = ?1 AND settled_at IS NOT NULL AND body IS NOT CAST(?2 AS BLOB)
    AND (?3 IS NULL OR instr(body, CAST(?3 AS BLOB)) > 0 OR instr(headers, ?3) > 0)";

/// What an answer about the record contains; `None`: all of them are meant.
fn answer_mark(of: &Subject) -> Option<String> {
    of.record.is_some().then(|| of.mark())
}

fn erase_answers(conn: &Connection, of: &Subject) -> Result<u64> {
    let what = "erasing answers of keys";
    let sql = format!(
        "UPDATE main.hapax_keys SET status = {ANSWER_STATUS}, headers = ?4, body = CAST(?2 AS BLOB)
         WHERE rowid IN (SELECT rowid FROM main.hapax_keys WHERE {ANSWERED} LIMIT {BATCH})"
    );
    in_batches(conn, what, || {
        let by = params![of.tenant_text(), ANSWER_BODY, answer_mark(of), ANSWER_HEADERS];
        conn.prepare_cached(&sql)
            .and_then(|mut statement| statement.execute(by))
            .map(|rows| rows as u64)
            .doing(what)
    })
}

/// The tables of entries: one per week, and those that outlived theirs.
fn entry_tables(conn: &Connection) -> Result<Vec<String>> {
    let what = "looking for the weeks of a ledger";
    let sql = "SELECT name FROM main.sqlite_schema WHERE type = 'table'
               AND (name GLOB 'hapax_entry_[0-9]*' OR name = 'hapax_kept') ORDER BY name";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let names = statement.query_map([], |row| row.get(0)).and_then(Iterator::collect);
    names.doing(what)
}

/// Entries that tell something: the condition and its values.
fn about(of: &Subject) -> Result<(String, Vec<rusqlite::types::Value>)> {
    use rusqlite::types::Value;
    let mut values = vec![Value::Text(of.tenant_text().to_owned())];
    let mut sql = "scope IN (SELECT number FROM main.hapax_scope WHERE tenant = ?)
        AND (metadata IS NOT NULL OR fingerprint IS NOT NULL OR note IS NOT NULL AND note NOT LIKE 'dropped by %')"
        .to_owned();
    if let Some(aggregate) = of.aggregate()? {
        // As one value: a statement takes so many.
        let hex = |id: &EventId| -> String {
            let nibbles = id.key().iter().flat_map(|byte| [byte >> 4, byte & 15]).collect::<Vec<_>>();
            nibbles.into_iter().filter_map(|nibble| char::from_digit(u32::from(nibble), 16)).collect()
        };
        let ids: Vec<String> = of.events.iter().map(hex).collect();
        sql += " AND (aggregate = ? OR lower(hex(id)) IN (SELECT value FROM json_each(?)))";
        values.push(Value::Text(aggregate.as_str().to_owned()));
        values.push(Value::Text(serde_json::json!(ids).to_string()));
    }
    Ok((sql, values))
}

fn erase_entries(conn: &Connection, of: &Subject) -> Result<u64> {
    let what = "erasing what entries of a ledger tell";
    let mut sum = 0;
    for table in entry_tables(conn)? {
        sum += in_batches(conn, what, || {
            if !has(conn, &table)? {
                return Ok(0); // a sweep was faster
            }
            let (condition, values) = about(of)?;
            let key = if table == "hapax_kept" { "week, scope, id" } else { "scope, id" };
            let sql = format!(
                "UPDATE main.{table} SET metadata = NULL, fingerprint = NULL,
                     note = CASE WHEN note LIKE 'dropped by %' THEN note END
                 WHERE ({key}) IN (SELECT {key} FROM main.{table} WHERE {condition} LIMIT {BATCH})"
            );
            let rows = conn.execute(&sql, rusqlite::params_from_iter(values)).doing(what)?;
            Ok(rows as u64)
        })?;
    }
    Ok(sum)
}

fn heads(conn: &Connection, of: &Subject) -> Result<Vec<(Name, u64)>> {
    let what = "reading the heads of records";
    let (true, Some(tenant_id)) = (has(conn, "hapax_journal_meta")?, of.tenant_id()) else {
        return Ok(Vec::new());
    };
    let Some((tenant, aggregate)) = of_journal(conn, of)? else { return Ok(Vec::new()) };
    let sql = "SELECT aggregate, head FROM main.hapax_journal_aggregate WHERE tenant = ?1 AND (?2 IS NULL OR number = ?2)
               AND head > 0 ORDER BY number";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let mut rows = statement.query(params![tenant, aggregate]).doing(what)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        let aggregate: String = row.get(0).doing(what)?;
        found.extend(
            name(tenant_id, &aggregate).map(|name| Ok((name, row.get::<_, i64>(1).doing(what)? as u64))),
        );
    }
    found.into_iter().collect()
}

fn knows(conn: &Connection, of: &Subject) -> Result<bool> {
    if has(conn, "hapax_journal_meta")? && of_journal(conn, of)?.is_some() {
        return Ok(true);
    }
    let exists = |sql: &str| {
        let found = conn.prepare(sql).and_then(|mut statement| statement.exists([of.tenant_text()]));
        found.doing("looking for a tenant")
    };
    if of.record.is_some() {
        return Ok(false);
    }
    Ok(has(conn, "hapax_keys_meta")? && exists("SELECT 1 FROM main.hapax_keys WHERE tenant = ?1")?
        || has(conn, "hapax_meta")? && exists("SELECT 1 FROM main.hapax_scope WHERE tenant = ?1")?)
}

/// Writes the file anew and empties its write-ahead log.
fn compact(conn: &Connection, shown: &str) -> Result<Vec<String>> {
    let what = "rewriting a file";
    let sql =
        "SELECT name FROM main.sqlite_schema WHERE type = 'table' AND name NOT LIKE 'hapax\\_%' ESCAPE '\\'
               AND name NOT LIKE 'bus\\_%' ESCAPE '\\' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' LIMIT 1";
    let mut left = Vec::new();
    let foreign: Vec<String> = conn
        .prepare(sql)
        .and_then(|mut statement| statement.query_map([], |row| row.get(0))?.collect())
        .doing(what)?;
    if let Some(table) = foreign.first() {
        // VACUUM may give other rowids to the rows of a table that has no INTEGER PRIMARY KEY.
        left.push(format!(
            "{shown} holds tables of your own ({table}), so it was not rewritten: its free pages may contain old bytes \
             until you run VACUUM on it"
        ));
    } else {
        patiently(|| conn.execute_batch("VACUUM main").doing(what))?;
        crate::crash_point!("erase.vacuumed");
    }
    for attempt in 1..=EMPTYINGS {
        let emptied = conn.query_row("PRAGMA main.wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, i64>(0));
        if emptied.doing(what)? == 0 {
            break;
        }
        if attempt == EMPTYINGS {
            left.push(format!(
                "the write-ahead log of {shown} could not be emptied, because somebody reads the file; run this again"
            ));
        } else {
            std::thread::sleep(PAUSE);
        }
    }
    Ok(left)
}
