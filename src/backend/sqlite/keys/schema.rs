//! The keys' tables and their migrations. They have their own version: the file may also hold a
//! ledger, a journal and the user's tables.

use rusqlite::Connection;

use crate::backend::memory::keys::new_secret;
use crate::backend::sqlite::connect::patiently;
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::part::Part;
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

/// One row of facts about the keys. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_keys_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL, secret BLOB NOT NULL, token INTEGER NOT NULL, horizon INTEGER, swept_at INTEGER,
    paused_until INTEGER) STRICT";

pub(super) const PART: Part = Part {
    name_has: "keys have",
    name: "the keys",
    not_beside_bus: Some("store of keys"),
    meta: "hapax_keys_meta",
    make_meta: META,
    steps: MIGRATIONS,
    accepts: 1,
};

/// The secret of the keys in a file, if it needs no migration.
pub(super) fn current(conn: &Connection) -> Result<Option<[u8; 32]>> {
    if !PART.is_current(conn)? {
        return Ok(None);
    }
    let secret: Vec<u8> = conn
        .prepare_cached("SELECT secret FROM main.hapax_keys_meta")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("reading the secret of the keys")?;
    let secret = secret.try_into();
    secret.map(Some).map_err(|_| Error::Corrupt("the secret of the keys does not have 32 bytes".into()))
}

/// Brings the file to this build's schema. Several processes may do so at once.
pub(super) fn migrate(conn: &Connection) -> Result<[u8; 32]> {
    PART.migrate(conn, &[("secret", &new_secret()), ("token", &0)], || Ok(()))?;
    patiently(|| current(conn))?.ok_or_else(|| Error::Corrupt("keys were made and are not there".into()))
}
