//! The journal's part of the schema: embedded, with its own version, and safe when many processes
//! start at once.

use sqlx::PgPool;

use crate::backend::Migrate;
use crate::backend::postgres::part::Part;
use crate::backend::postgres::schema::check_name;
use crate::error::Result;

/// The schema version that this build writes.
pub const JOURNAL_VERSION: i32 = 2;
/// The oldest build, by schema version, that can still use what this build writes.
pub const JOURNAL_ACCEPTS: i32 = 1;

const PART: Part = Part {
    name: "the journal",
    none: "journal",
    is_plural: false,
    remedy: "with the owner's role, `hapax modules create SLUG` makes it and brings it up to date (so does `hapax journal \
             append`, without modules), and `hapax modules grants` prints what another role needs",
    meta: "journal_meta",
    version: JOURNAL_VERSION,
    accepts: JOURNAL_ACCEPTS,
    steps: &[
        &[include_str!("migrations/0001_journal.sql"), include_str!("migrations/0002_languages.sql")],
        &[include_str!("migrations/0003_erased.sql")],
    ],
    again: &[],
    fail: super::fail,
};

/// The journal's tables and functions as SQL, for a DBA to read and run.
pub fn journal_schema_sql(schema: &str) -> Result<String> {
    PART.schema_sql(schema, &[])
}

/// The grants for a role that appends, reads and relays: rows, functions and sequences, no DDL.
/// Sweeping also needs DELETE on `journal`, forgetting a relay DELETE on `journal_relay`.
pub fn journal_grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, insert on {schema}.journal to {role};\n\
         grant select, insert, update, delete on {schema}.journal_head to {role};\n\
         grant select, insert, update on {schema}.journal_relay to {role};\n\
         grant select on {schema}.journal_meta, {schema}.journal_events to {role};\n\
         grant usage, select on {schema}.journal_position, {schema}.journal_token to {role};\n\
         grant execute on all functions in schema {schema} to {role};\n"
    ))
}

/// Creates or updates the schema so that this build can use it, or returns why it cannot. Returns
/// the journal's id.
pub(super) async fn prepare(pool: &PgPool, schema: &str, migrate: Migrate) -> Result<String> {
    PART.prepare(pool, schema, migrate, &[]).await?;
    let (id,): (String,) = PART.read_prepared(pool, schema, "journal_id::text").await?;
    Ok(id)
}
