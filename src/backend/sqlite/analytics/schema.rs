//! The tables of a read model and their migrations.

use rusqlite::Connection;

use crate::analytics::Uuid;
use crate::backend::sqlite::fault::Doing;
use crate::backend::sqlite::part::Part;
use crate::error::Result;

/// The step at index n brings the schema to version n + 1. A released step is never changed.
///
/// Ids and tenants are 16 bytes; a tenant of zeros means no tenant. Times are microseconds since 1970. A
/// row without a payload is a deleted record: its version stays.
const MIGRATIONS: &[&str] = &["
CREATE TABLE main.hapax_read_row (tenant BLOB NOT NULL, module TEXT NOT NULL, id BLOB NOT NULL,
    generation INTEGER NOT NULL, seq INTEGER NOT NULL, payload TEXT, created_at INTEGER NOT NULL,
    updated_at INTEGER NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL,
    PRIMARY KEY (tenant, module, id)) STRICT;
CREATE TABLE main.hapax_read_topic (topic TEXT PRIMARY KEY, complete INTEGER) STRICT;
CREATE TABLE main.hapax_read_partition (topic TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER, pulse INTEGER,
    PRIMARY KEY (topic, number)) STRICT;
CREATE TABLE main.hapax_read_rejected (topic TEXT NOT NULL, number INTEGER NOT NULL, offset INTEGER NOT NULL,
    tenant BLOB, reason TEXT NOT NULL, payload BLOB NOT NULL, holds_back INTEGER, PRIMARY KEY (topic, number, offset)) STRICT;
",
// A new file has no row yet: its id comes with the row.
"ALTER TABLE main.hapax_read_meta ADD COLUMN id BLOB;
UPDATE main.hapax_read_meta SET id = randomblob(16)",
"ALTER TABLE main.hapax_read_meta ADD COLUMN generation INTEGER"];

/// The id of the read model.
pub(super) fn id(conn: &Connection) -> Result<Uuid> {
    let id: [u8; 16] = conn
        .query_row("SELECT id FROM main.hapax_read_meta", [], |row| row.get(0))
        .doing("reading the id of a read model")?;
    Ok(Uuid::from_bytes(id))
}

/// The generation of the source whose rows the file takes; `None`: any.
pub(super) fn generation(conn: &Connection) -> Result<Option<u16>> {
    conn.prepare_cached("SELECT generation FROM main.hapax_read_meta")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("reading the generation of a read model")
}

/// From now on the file takes rows of one generation: that of its rows, or this one if it has none.
pub(super) fn of_generation(conn: &Connection, generation: u16) -> Result<()> {
    let sql = "UPDATE main.hapax_read_meta SET generation = coalesce((SELECT max(generation) FROM main.hapax_read_row), ?1)
               WHERE generation IS NULL";
    conn.execute(sql, [generation]).doing("noting the generation of a read model")?;
    Ok(())
}

const META: &str = "
CREATE TABLE main.hapax_read_meta (one INTEGER PRIMARY KEY CHECK (one = 1), version INTEGER NOT NULL,
    accepts INTEGER NOT NULL) STRICT";

pub(super) const PART: Part = Part {
    name_has: "read model has",
    name: "a read model",
    not_beside_bus: Some("read model"),
    meta: "hapax_read_meta",
    make_meta: META,
    steps: MIGRATIONS,
    accepts: 1,
};

/// What makes the tables.
pub(super) fn statements() -> Vec<String> {
    let all = std::iter::once(&META).chain(MIGRATIONS).flat_map(|step| step.split(';'));
    all.map(|statement| statement.trim().to_owned()).filter(|statement| !statement.is_empty()).collect()
}
