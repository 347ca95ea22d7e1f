//! The ledger's tables and their migrations.
//!
//! Every table is named `hapax_…`, since the file may be the user's own (see
//! [`claim_in`](super::SqliteLedger::claim_in)). Every statement says `main.`, so that an attached
//! file or a temporary table is never taken for the ledger.

use rusqlite::{Connection, OptionalExtension, params};

use super::codec::{AWAITED, UNCOPIED};
use super::connect::{immediate, must_hold_no_bus};
use super::fault::Doing;
use crate::error::{Error, Result};
use crate::ledger::{IdentityRule, Week};

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_scope (number INTEGER PRIMARY KEY, tenant TEXT NOT NULL, scope TEXT NOT NULL,
    began INTEGER NOT NULL, UNIQUE (tenant, scope)) STRICT;
CREATE TABLE main.hapax_name (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE) STRICT;
CREATE TABLE main.hapax_week (week INTEGER PRIMARY KEY, touched INTEGER NOT NULL) STRICT;
CREATE TABLE main.hapax_dropped (week INTEGER PRIMARY KEY, at INTEGER NOT NULL, barred INTEGER NOT NULL) STRICT;
CREATE TABLE main.hapax_head (scope INTEGER NOT NULL, aggregate TEXT NOT NULL, last INTEGER, lease_seq INTEGER,
    lease_token INTEGER, lease_until INTEGER, retrying BLOB, parked INTEGER, gap_at INTEGER,
    PRIMARY KEY (scope, aggregate)) STRICT, WITHOUT ROWID;
CREATE TABLE main.hapax_kept (week INTEGER NOT NULL, scope INTEGER NOT NULL, id BLOB NOT NULL,
    state INTEGER NOT NULL, token INTEGER NOT NULL, nonce INTEGER NOT NULL, attempts INTEGER NOT NULL,
    first_at INTEGER NOT NULL, at INTEGER NOT NULL, flags INTEGER NOT NULL, owner INTEGER, fingerprint BLOB,
    topic INTEGER, part INTEGER, pos INTEGER, aggregate TEXT, seq INTEGER, metadata TEXT, note TEXT,
    payload BLOB, headers BLOB, key BLOB, stamp INTEGER, copied INTEGER, reserved INTEGER,
    PRIMARY KEY (week, scope, id)) STRICT, WITHOUT ROWID;
CREATE INDEX main.hapax_held_kept ON hapax_kept (scope, state, at) WHERE payload IS NOT NULL;
CREATE INDEX main.hapax_out_kept ON hapax_kept (scope, at) WHERE state = 3 AND payload IS NOT NULL AND copied IS NOT token;
CREATE TABLE main.hapax_marker (scope TEXT NOT NULL, topic TEXT NOT NULL, part INTEGER NOT NULL,
    last INTEGER NOT NULL, tried TEXT NOT NULL, at INTEGER NOT NULL, PRIMARY KEY (scope, topic, part)) STRICT, WITHOUT ROWID;
CREATE TABLE main.hapax_audit (number INTEGER PRIMARY KEY, at INTEGER NOT NULL, by TEXT NOT NULL,
    what TEXT NOT NULL, identity TEXT NOT NULL, why TEXT NOT NULL) STRICT;
", "
CREATE TABLE main.hapax_skip (slot INTEGER PRIMARY KEY, tenant TEXT NOT NULL, scope TEXT NOT NULL, id TEXT NOT NULL,
    count INTEGER NOT NULL, skips TEXT NOT NULL, last_at INTEGER NOT NULL) STRICT;
CREATE TABLE main.hapax_prevented (day INTEGER NOT NULL, kind TEXT NOT NULL, tenant TEXT NOT NULL, scope TEXT NOT NULL,
    count INTEGER NOT NULL, valued INTEGER NOT NULL, value TEXT NOT NULL,
    PRIMARY KEY (day, kind, tenant, scope)) STRICT, WITHOUT ROWID;
"];

/// The version this build writes.
const VERSION: i64 = MIGRATIONS.len() as i64;
/// The oldest schema version whose builds may work on what this build writes.
const ACCEPTS: i64 = 1;

/// One row of facts about the ledger. Every version creates this table first.
const META: &str = "
CREATE TABLE main.hapax_meta (one INTEGER PRIMARY KEY CHECK (one = 1), ledger TEXT NOT NULL,
    version INTEGER NOT NULL, accepts INTEGER NOT NULL, identity TEXT NOT NULL, token INTEGER NOT NULL,
    swept_at INTEGER, paused_until INTEGER) STRICT";

/// The tables as SQL, for reading. The tables of weeks are created as needed.
pub fn schema_sql() -> String {
    format!("{};\n{}", META.trim(), MIGRATIONS.concat().trim()).replace("main.", "")
}

/// Creates a week's table in the caller's transaction. Its indexes cover only held entries and
/// at-most-once claims whose end has not been reported, so other entries do not pay for them.
pub(super) fn create_week(conn: &Connection, week: Week) -> Result<()> {
    let n = week.number();
    conn.execute_batch(&format!(
        "CREATE TABLE main.hapax_entry_{n} (scope INTEGER NOT NULL, id BLOB NOT NULL,
            state INTEGER NOT NULL, token INTEGER NOT NULL, nonce INTEGER NOT NULL, attempts INTEGER NOT NULL,
            first_at INTEGER NOT NULL, at INTEGER NOT NULL, flags INTEGER NOT NULL, owner INTEGER,
            fingerprint BLOB, topic INTEGER, part INTEGER, pos INTEGER, aggregate TEXT, seq INTEGER,
            metadata TEXT, note TEXT, payload BLOB, headers BLOB, key BLOB, stamp INTEGER, copied INTEGER, reserved INTEGER,
            PRIMARY KEY (scope, id)) STRICT, WITHOUT ROWID;
        CREATE INDEX main.hapax_due_{n} ON hapax_entry_{n} (at) WHERE {AWAITED};
        CREATE INDEX main.hapax_held_{n} ON hapax_entry_{n} (scope, state, at) WHERE payload IS NOT NULL;
        CREATE INDEX main.hapax_out_{n} ON hapax_entry_{n} (scope, at) WHERE {UNCOPIED};"
    ))
    .doing("making the table of a week")
}

/// Whether the connection's main database holds a ledger.
pub(super) fn is_there(conn: &Connection) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = 'hapax_meta'")
        .and_then(|mut statement| statement.exists([]))
        .doing("looking for the ledger's tables")
}

/// The ledger's id, schema version and identity rule.
pub(super) struct Meta {
    pub ledger: String,
    pub version: i64,
    accepts: i64,
    identity: String,
}

impl Meta {
    /// Reads the facts; `None` if there is no ledger.
    pub(super) fn read(conn: &Connection) -> Result<Option<Meta>> {
        if !is_there(conn)? {
            return Ok(None);
        }
        conn.query_row("SELECT ledger, version, accepts, identity FROM main.hapax_meta", [], |row| {
            Ok(Meta {
                ledger: row.get(0)?,
                version: row.get(1)?,
                accepts: row.get(2)?,
                identity: row.get(3)?,
            })
        })
        .optional()
        .doing("reading the schema's version")
    }

    pub(super) fn must_accept_us(&self) -> Result<()> {
        if self.version <= VERSION || self.accepts <= VERSION {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "the file's schema has version {}, which accepts builds of version {} and later; this build has version \
             {VERSION}. Use a newer hapax; nothing was changed",
            self.version, self.accepts
        )))
    }

    /// Refuses another identity rule: two rules on one file would give one event two identities.
    pub(super) fn must_follow(&self, rule: IdentityRule) -> Result<()> {
        let wanted = rule_name(rule);
        if self.identity == wanted {
            return Ok(());
        }
        Err(Error::Config(format!(
            "the file's identities follow the rule `{}`, but `{wanted}` is configured (ledger.identity); a ledger keeps \
             the rule it was made with",
            self.identity
        )))
    }
}

fn rule_name(rule: IdentityRule) -> &'static str {
    match rule {
        IdentityRule::Id => "id",
        IdentityRule::IdAndTime => "id_and_time",
    }
}

/// Brings the file to this build's schema. Several processes may do so at once: each checks again
/// once it holds the lock.
pub(super) fn migrate(conn: &Connection, rule: IdentityRule) -> Result<Meta> {
    if let Some(meta) = current(conn)? {
        return Ok(meta);
    }
    immediate(conn, "bringing the schema up to date", || {
        if let Some(meta) = current(conn)? {
            return Ok(meta);
        }
        let before = Meta::read(conn)?;
        if before.is_none() {
            must_hold_no_bus(conn, "ledger")?;
        }
        let done = before.as_ref().map_or(0, |meta| meta.version);
        let apply = || -> rusqlite::Result<()> {
            if before.is_none() {
                conn.execute_batch(META)?;
            }
            MIGRATIONS.iter().skip(done as usize).try_for_each(|step| conn.execute_batch(step))
        };
        apply().doing("bringing the schema up to date")?;
        let fresh = || (uuid::Uuid::new_v4().to_string(), rule_name(rule).to_owned());
        let (ledger, identity) = before.map_or_else(fresh, |meta| (meta.ledger, meta.identity));
        if done == 0 {
            create_week(conn, Week::TIMELESS)?;
            conn.execute("INSERT INTO main.hapax_week VALUES (0, 0)", [])
                .doing("making the timeless week")?;
        }
        conn.execute(
            "INSERT INTO main.hapax_meta (one, ledger, version, accepts, identity, token)
             VALUES (1, ?1, ?2, ?3, ?4, 0)
             ON CONFLICT (one) DO UPDATE SET version = excluded.version, accepts = excluded.accepts",
            params![ledger, VERSION, ACCEPTS, identity],
        )
        .doing("recording the schema's version")?;
        Ok(Meta { ledger, version: VERSION, accepts: ACCEPTS, identity })
    })
}

/// The ledger's facts, if the file needs no migration.
pub(super) fn current(conn: &Connection) -> Result<Option<Meta>> {
    let Some(meta) = Meta::read(conn)? else { return Ok(None) };
    meta.must_accept_us()?;
    Ok((meta.version >= VERSION).then_some(meta))
}

/// The ledger's facts. Fails if the file would need a migration, since it cannot be written to.
pub(super) fn must_be_current(conn: &Connection) -> Result<Meta> {
    current(conn)?.ok_or_else(|| {
        Error::Schema("the file has no ledger, or an older one, and it cannot be written to".into())
    })
}
