//! The tables of API tokens and audit rows, and their migrations. They have their own version: the
//! file may also hold a ledger, a journal, keys and the user's tables.

use crate::backend::sqlite::part::Part;

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

/// One row of facts. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_access_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL, swept_at INTEGER, paused_until INTEGER) STRICT";

pub(super) const PART: Part = Part {
    name_has: "API tokens have",
    name: "the API tokens",
    not_beside_bus: Some("store of API tokens"),
    meta: "hapax_access_meta",
    make_meta: META,
    steps: MIGRATIONS,
    accepts: 1,
};
