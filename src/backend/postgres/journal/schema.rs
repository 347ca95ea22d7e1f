//! The journal's part of the schema: embedded, with its own version, and safe when many processes
//! start at once.

use sqlx::{AssertSqlSafe, Executor, PgPool};

use super::fail;
use crate::backend::Migrate;
use crate::backend::postgres::PgTx;
use crate::backend::postgres::codes::from_row;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::schema::{check_name, read_meta};
use crate::error::{Error, Result};

/// The schema version that this build writes.
pub const JOURNAL_VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const JOURNAL_ACCEPTS: i32 = 1;

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const STEPS: [&[&str]; JOURNAL_VERSION as usize] =
    [&[include_str!("migrations/0001_journal.sql"), include_str!("migrations/0002_languages.sql")]];

const WHAT: &str = "preparing the journal's schema";

/// The journal's tables and functions as SQL, for a DBA to read and run.
pub fn journal_schema_sql(schema: &str) -> Result<String> {
    check_name(schema)?;
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", steps_sql(schema, 0)))
}

/// The steps from a version to the current one, for a transaction begun with [`BEGIN`].
fn steps_sql(schema: &str, from: usize) -> String {
    let steps: String = STEPS[from..].concat().concat();
    let last = if from == 0 {
        format!(
            "\ninsert into {{schema}}.journal_meta (version, accepts) values ({JOURNAL_VERSION}, {JOURNAL_ACCEPTS});\n"
        )
    } else {
        format!(
            "\nupdate {{schema}}.journal_meta set version = {JOURNAL_VERSION}, accepts = {JOURNAL_ACCEPTS};\n"
        )
    };
    (steps + &last).replace("{schema}", schema)
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
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("connecting to PostgreSQL", e))?;
    match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= JOURNAL_VERSION => return found.fits(schema),
        _ if migrate == Migrate::Auto => {}
        Some(found) => {
            return Err(Error::Schema(format!(
                "the journal in schema {schema} has version {}, this build needs {JOURNAL_VERSION}, and migrate is `check`; \
                 open it once with migrate `auto`",
                found.version
            )));
        }
        None => {
            return Err(Error::Schema(format!(
                "there is no journal in schema {schema} (or this role may not see it), and migrate is `check`; open it once with \
                 migrate `auto`"
            )));
        }
    }
    // Other processes that start now wait here, and then find the work done; also those that make a
    // ledger.
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| fail(WHAT, e))?;
    let from = match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= JOURNAL_VERSION => return found.fits(schema),
        Some(found) => {
            let version = found.version;
            found.fits(schema)?;
            usize::try_from(version).unwrap_or(0)
        }
        None => 0,
    };
    tx.execute(sqlx::raw_sql(AssertSqlSafe(steps_sql(schema, from)))).await.map_err(|e| fail(WHAT, e))?;
    let found = found_in(&mut tx, schema).await?;
    tx.commit().await.map_err(|e| fail(WHAT, e))?;
    found.ok_or_else(|| Error::Corrupt("a journal was made and is not there".into()))?.fits(schema)
}

from_row! {
    /// The version and id that a journal stores.
    struct Found { version: i32, accepts: i32, id: String }
}

impl Found {
    fn fits(self, schema: &str) -> Result<String> {
        if self.accepts > JOURNAL_VERSION {
            return Err(Error::Schema(format!(
                "the journal in schema {schema} has version {} and accepts builds from version {} on; this build knows version \
                 {JOURNAL_VERSION}: update it",
                self.version, self.accepts
            )));
        }
        Ok(self.id)
    }
}

async fn found_in(tx: &mut PgTx, schema: &str) -> Result<Option<Found>> {
    let sql = format!("select version, accepts, journal_id::text as id from {schema}.journal_meta");
    let found = read_meta(tx, schema, "journal_meta", sql).await;
    found.map_err(|e| fail("reading the journal's schema version", e))
}
