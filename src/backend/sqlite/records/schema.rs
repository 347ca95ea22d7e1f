//! The tables of records and their migrations. They have their own version: the file also holds the
//! journal, and may hold keys, a ledger and the user's tables.

use rusqlite::Connection;

use crate::backend::sqlite::part::Part;
use crate::error::Result;

/// The text of a UUID that is stored as 16 bytes.
macro_rules! uuid {
    ($blob:expr) => {
        concat!(
            "lower(substr(hex(",
            $blob,
            "), 1, 8) || '-' || substr(hex(",
            $blob,
            "), 9, 4) || '-' || substr(hex(",
            $blob,
            "), 13, 4) || '-' || substr(hex(",
            $blob,
            "), 17, 4) || '-' || substr(hex(",
            $blob,
            "), 21))"
        )
    };
}

/// Whether the last event of a record (`NEW` or `OLD`) is of a kind, and its seq compares so.
macro_rules! last_event_is {
    ($row:literal, $kind:literal, $seq:literal) => {
        concat!(
            "EXISTS (SELECT 1 FROM hapax_journal_aggregate a JOIN hapax_journal_event e ON e.aggregate = a.number AND e.seq = a.head
        WHERE a.tenant = CASE ", $row, ".tenant WHEN zeroblob(16) THEN 0
            ELSE (SELECT t.number FROM hapax_journal_tenant t WHERE t.tenant = ", uuid!(concat!($row, ".tenant")), ") END
        AND a.aggregate = ", $row, ".module || '/' || ", uuid!(concat!($row, ".id")), "
        AND a.head ", $seq, " ", $row, ".seq AND e.kind = '", $kind, "')"
        )
    };
}

/// The triggers, as SQLite stores them: a record is written with its event, under the event's seq, and the
/// heads that seqs go on from only rise. An INSERT may not replace: then no trigger sees what goes.
#[rustfmt::skip]
pub(super) const TRIGGERS: [(&str, &str); 6] = [
    ("hapax_record_created", concat!(
"CREATE TRIGGER hapax_record_created BEFORE INSERT ON hapax_record
    WHEN NOT ", last_event_is!("NEW", "record.created", "="), "
    OR EXISTS (SELECT 1 FROM hapax_record r WHERE r.module = NEW.module AND r.tenant = NEW.tenant AND r.id = NEW.id)
    BEGIN SELECT RAISE(ABORT, 'a record is created once, with its event: append record.created first'); END")),
    ("hapax_record_updated", concat!(
"CREATE TRIGGER hapax_record_updated BEFORE UPDATE ON hapax_record
    WHEN NEW.seq <= OLD.seq OR NEW.module IS NOT OLD.module OR NEW.tenant IS NOT OLD.tenant OR NEW.id IS NOT OLD.id
    OR NOT ", last_event_is!("NEW", "record.updated", "="), "
    BEGIN SELECT RAISE(ABORT, 'a write of a record must raise its seq to that of its event, and keep its name'); END")),
    ("hapax_record_deleted", concat!(
"CREATE TRIGGER hapax_record_deleted BEFORE DELETE ON hapax_record
    WHEN NOT ", last_event_is!("OLD", "record.deleted", ">"), "
    BEGIN SELECT RAISE(ABORT, 'a record is deleted with its event: append record.deleted first'); END")),
    ("hapax_record_head_made",
"CREATE TRIGGER hapax_record_head_made BEFORE INSERT ON hapax_journal_aggregate
    WHEN EXISTS (SELECT 1 FROM hapax_journal_aggregate a WHERE a.number = NEW.number OR a.tenant = NEW.tenant AND a.aggregate = NEW.aggregate)
    BEGIN SELECT RAISE(ABORT, 'an aggregate has one head'); END"),
    ("hapax_record_head_rises",
"CREATE TRIGGER hapax_record_head_rises BEFORE UPDATE ON hapax_journal_aggregate
    WHEN NEW.head < OLD.head OR NEW.number IS NOT OLD.number OR NEW.tenant IS NOT OLD.tenant OR NEW.aggregate IS NOT OLD.aggregate
    BEGIN SELECT RAISE(ABORT, 'the head of an aggregate only rises'); END"),
    ("hapax_record_head_stays",
"CREATE TRIGGER hapax_record_head_stays BEFORE DELETE ON hapax_journal_aggregate WHEN OLD.head > 0
    BEGIN SELECT RAISE(ABORT, 'the head of an aggregate stays'); END"),
];

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// Ids and tenants are 16 bytes; a tenant of zeros means no tenant. Times are microseconds since 1970.
/// The heads that seqs go on from are the journal's. The first step makes [`TRIGGERS`] too.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_record_module (slug TEXT PRIMARY KEY, created_at INTEGER NOT NULL) STRICT;
CREATE TABLE main.hapax_record (module TEXT NOT NULL, tenant BLOB NOT NULL, id BLOB NOT NULL, payload TEXT NOT NULL,
    seq INTEGER NOT NULL CHECK (seq > 0), created_at INTEGER NOT NULL, updated_at INTEGER NOT NULL,
    PRIMARY KEY (module, tenant, id)) STRICT;
"];

const META: &str = "
CREATE TABLE main.hapax_record_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL) STRICT";

pub(super) const PART: Part = Part {
    name_has: "records have",
    name: "the tables of records",
    not_beside_bus: None, // the journal is in the file, and refuses a bus
    meta: "hapax_record_meta",
    make_meta: META,
    steps: MIGRATIONS,
    accepts: 1,
};

/// Brings the file to this build's schema. Several processes may do so at once.
pub(super) fn migrate(conn: &Connection) -> Result<()> {
    PART.migrate(conn, &[], || TRIGGERS.iter().try_for_each(|(_, sql)| conn.execute_batch(sql)))
}
