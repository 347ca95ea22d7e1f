//! The keys' part of the schema: embedded, with its own version, and safe when many processes start
//! at once.

use sqlx::{AssertSqlSafe, Executor, PgPool, Row as _};

use super::fail;
use crate::backend::Migrate;
use crate::backend::postgres::BEGIN;
use crate::backend::postgres::database::begin;
use crate::backend::postgres::schema::check_name;
use crate::error::{Error, Result};

/// The schema version that this build writes.
pub const KEYS_VERSION: i32 = 2;
/// The oldest build, by schema version, that can still use what this build writes.
pub const KEYS_ACCEPTS: i32 = 2;

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const STEPS: [&str; KEYS_VERSION as usize] =
    [include_str!("migrations/0001_keys.sql"), include_str!("migrations/0002_row_security.sql")];

const WHAT: &str = "preparing the schema of the keys";

/// The keys' tables and functions as SQL, for a DBA to read and run.
pub fn keys_schema_sql(schema: &str) -> Result<String> {
    check_name(schema)?;
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", steps_sql(schema, 0)))
}

/// The steps from a version to the current one, for a transaction begun with [`BEGIN`].
fn steps_sql(schema: &str, from: usize) -> String {
    let last = if from == 0 {
        format!(
            "\ninsert into {{schema}}.keys_meta (version, accepts) values ({KEYS_VERSION}, {KEYS_ACCEPTS});\n"
        )
    } else {
        format!("\nupdate {{schema}}.keys_meta set version = {KEYS_VERSION}, accepts = {KEYS_ACCEPTS};\n")
    };
    (STEPS[from..].concat() + &last).replace("{schema}", schema)
}

/// The grants for a role that begins and finishes requests: rows and functions, no DDL. Sweeping, and
/// listing the keys of all tenants, also need DELETE on `keys` and UPDATE on `keys_meta`.
pub fn keys_grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, insert, update on {schema}.keys to {role};\n\
         grant select, update (only_row) on {schema}.keys_meta to {role};\n\
         grant usage, select on {schema}.keys_token to {role};\n\
         grant execute on all functions in schema {schema} to {role};\n"
    ))
}

/// Creates or updates the schema so that this build can use it, or returns why it cannot. Returns the
/// store's secret.
pub(super) async fn prepare(pool: &PgPool, schema: &str, migrate: Migrate) -> Result<[u8; 32]> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("connecting to PostgreSQL", e))?;
    match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= KEYS_VERSION => return found.fits(schema),
        _ if migrate == Migrate::Auto => {}
        Some(found) => {
            return Err(Error::Schema(format!(
                "the keys in schema {schema} have version {}, this build needs {KEYS_VERSION}, and migrate is `check`; open \
                 them once with migrate `auto`",
                found.version
            )));
        }
        None => {
            return Err(Error::Schema(format!(
                "there are no keys in schema {schema} (or this role may not see them), and migrate is `check`; open them once \
                 with migrate `auto`"
            )));
        }
    }
    // Other processes that start now wait here, and then find the work done; also those that make a
    // ledger or a journal.
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| fail(WHAT, e))?;
    let from = match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= KEYS_VERSION => return found.fits(schema),
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
    found.ok_or_else(|| Error::Corrupt("keys were made and are not there".into()))?.fits(schema)
}

struct Found {
    version: i32,
    accepts: i32,
    secret: Vec<u8>,
}

impl Found {
    fn fits(self, schema: &str) -> Result<[u8; 32]> {
        if self.accepts > KEYS_VERSION {
            return Err(Error::Schema(format!(
                "the keys in schema {schema} have version {} and accept builds from version {} on; this build knows version \
                 {KEYS_VERSION}: update it",
                self.version, self.accepts
            )));
        }
        let secret = self.secret.try_into();
        secret.map_err(|_| Error::Corrupt("the secret of the keys does not have 32 bytes".into()))
    }
}

async fn found_in(tx: &mut sqlx::PgTransaction<'_>, schema: &str) -> Result<Option<Found>> {
    let what = "reading the schema version of the keys";
    // Not `to_regclass`: it may answer from a cache that is older than the lock we waited for.
    let there = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = $1 and c.relname = 'keys_meta')";
    let there: bool = sqlx::query_scalar(there)
        .persistent(false)
        .bind(schema)
        .fetch_one(&mut **tx)
        .await
        .map_err(|e| fail(what, e))?;
    if !there {
        return Ok(None);
    }
    let sql = format!("select version, accepts, secret from {schema}.keys_meta");
    let row = sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| fail(what, e))?;
    Ok(row.map(|row| Found { version: row.get(0), accepts: row.get(1), secret: row.get(2) }))
}
