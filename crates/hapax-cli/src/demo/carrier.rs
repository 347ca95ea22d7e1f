//! The carrier: a system outside the ledger's database, and the sink of the leased effects.
//!
//! It keeps one document per customer, the list of booked parcels, and can only replace it as a
//! whole, as object stores and document stores do. It follows the two rules of `hapax::sink`: the
//! order is stored in the document itself, so a repeated booking changes nothing (dedup on the
//! key), and a document that was written under a newer token is not replaced (fencing).

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OptionalExtension as _, params};

/// How long to wait for another writer.
const BUSY: Duration = Duration::from_secs(30);

pub struct Carrier(Mutex<Connection>);

/// The answer to a booking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Put {
    Written,
    /// The document was written under this newer token.
    Refused {
        newest: i64,
    },
}

impl Carrier {
    pub fn open(file: &Path) -> rusqlite::Result<Self> {
        let conn = Connection::open(file)?;
        conn.busy_timeout(BUSY)?;
        // The demo kills processes, not the machine: what is written need not be on disk yet.
        conn.execute_batch("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL")?;
        conn.execute(
            "CREATE TABLE IF NOT EXISTS parcels (customer TEXT PRIMARY KEY, token INTEGER NOT NULL, orders TEXT NOT NULL)",
            [],
        )?;
        Ok(Carrier(Mutex::new(conn)))
    }

    fn with<T>(&self, run: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> rusqlite::Result<T> {
        run(&self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The orders of a customer whose parcels are booked.
    pub fn get(&self, customer: &str) -> rusqlite::Result<Vec<u64>> {
        let found: Option<String> = self.with(|conn| {
            conn.prepare_cached("SELECT orders FROM parcels WHERE customer = ?1")?
                .query_row([customer], |row| row.get(0))
                .optional()
        })?;
        // Only `put` writes it.
        Ok(found.map(|text| serde_json::from_str(&text).unwrap_or_default()).unwrap_or_default())
    }

    /// Replaces the document of a customer, unless a newer token has written it.
    pub fn put(&self, customer: &str, orders: &[u64], token: i64) -> rusqlite::Result<Put> {
        let text = serde_json::json!(orders).to_string();
        self.with(|conn| {
            let written = conn
                .prepare_cached(
                    "INSERT INTO parcels VALUES (?1, ?2, ?3) ON CONFLICT (customer) \
                     DO UPDATE SET token = ?2, orders = ?3 WHERE token <= ?2",
                )?
                .execute(params![customer, token, text])?;
            if written > 0 {
                return Ok(Put::Written);
            }
            let newest = conn
                .prepare_cached("SELECT token FROM parcels WHERE customer = ?1")?
                .query_row([customer], |row| row.get(0))?;
            Ok(Put::Refused { newest })
        })
    }
}
