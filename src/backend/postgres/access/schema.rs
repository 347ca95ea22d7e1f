//! The part of the schema for API tokens and audit rows: embedded, with its own version, and safe when
//! many processes start at once.

use sqlx::{AssertSqlSafe, Executor, PgPool};

use super::fail;
use crate::backend::Migrate;
use crate::backend::postgres::BEGIN;
use crate::backend::postgres::database::begin;
use crate::backend::postgres::schema::check_name;
use crate::error::{Error, Result};

/// The schema version that this build writes.
pub const ACCESS_VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const ACCESS_ACCEPTS: i32 = 1;

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const STEPS: [&str; ACCESS_VERSION as usize] = [include_str!("migrations/0001_access.sql")];

const WHAT: &str = "preparing the schema of the API tokens";

/// The tables of API tokens and audit rows as SQL, for a DBA to read and run.
pub fn access_schema_sql(schema: &str) -> Result<String> {
    check_name(schema)?;
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", steps_sql(schema, 0)))
}

/// The steps from a version to the current one, for a transaction begun with [`BEGIN`].
fn steps_sql(schema: &str, from: usize) -> String {
    let (version, accepts) = (ACCESS_VERSION, ACCESS_ACCEPTS);
    let last = if from == 0 {
        format!("\ninsert into {{schema}}.access_meta (version, accepts) values ({version}, {accepts});\n")
    } else {
        format!("\nupdate {{schema}}.access_meta set version = {version}, accepts = {accepts};\n")
    };
    (STEPS[from..].concat() + &last).replace("{schema}", schema)
}

/// The grants for the role of a server: it authenticates, makes and ends tokens, and adds audit rows.
/// Sweeping is for a role of its own: [`access_maintenance_grants_sql`].
pub fn access_grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select on {schema}.access_meta to {role};\n\
         grant select, insert, update on {schema}.access_token to {role};\n\
         grant select, insert on {schema}.access_audit to {role};\n\
         grant execute on function {schema}.access_now() to {role};\n"
    ))
}

/// The grants for the role that sweeps audit rows, and leaves rows of its own: it reads no tokens, and makes none.
pub fn access_maintenance_grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, update (swept_at, paused_until) on {schema}.access_meta to {role};\n\
         grant select, insert, delete on {schema}.access_audit to {role};\n\
         grant execute on function {schema}.access_now() to {role};\n"
    ))
}

/// Creates or updates the schema so that this build can use it, or returns why it cannot.
pub(super) async fn prepare(pool: &PgPool, schema: &str, migrate: Migrate) -> Result<()> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("connecting to PostgreSQL", e))?;
    match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= ACCESS_VERSION => return found.fits(schema),
        _ if migrate == Migrate::Auto => {}
        Some(found) => {
            return Err(Error::Schema(format!(
                "the API tokens in schema {schema} have version {}, this build needs {ACCESS_VERSION}, and migrate is \
                 `check`; `hapax token create` brings them up to date",
                found.version
            )));
        }
        None => {
            return Err(Error::Schema(format!(
                "there are no API tokens in schema {schema} (or this role may not see them), and migrate is `check`; \
                 `hapax token create` makes them"
            )));
        }
    }
    // Other processes that start now wait here, and then find the work done; also those that make a
    // ledger, a journal or keys.
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| fail(WHAT, e))?;
    let from = match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= ACCESS_VERSION => return found.fits(schema),
        Some(found) => {
            found.fits(schema)?;
            usize::try_from(found.version).unwrap_or(0)
        }
        None => 0,
    };
    tx.execute(sqlx::raw_sql(AssertSqlSafe(steps_sql(schema, from)))).await.map_err(|e| fail(WHAT, e))?;
    tx.commit().await.map_err(|e| fail(WHAT, e))
}

#[derive(Clone, Copy)]
struct Found {
    version: i32,
    accepts: i32,
}

impl Found {
    fn fits(self, schema: &str) -> Result<()> {
        if self.accepts <= ACCESS_VERSION {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "the API tokens in schema {schema} have version {} and accept builds from version {} on; this build knows \
             version {ACCESS_VERSION}: update it",
            self.version, self.accepts
        )))
    }
}

async fn found_in(tx: &mut sqlx::PgTransaction<'_>, schema: &str) -> Result<Option<Found>> {
    let what = "reading the schema version of the API tokens";
    // Not `to_regclass`: it may answer from a cache that is older than the lock we waited for.
    let there = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = $1 and c.relname = 'access_meta')";
    let there: bool = sqlx::query_scalar(there)
        .persistent(false)
        .bind(schema)
        .fetch_one(&mut **tx)
        .await
        .map_err(|e| fail(what, e))?;
    if !there {
        return Ok(None);
    }
    let sql = format!("select version, accepts from {schema}.access_meta");
    let row: Option<(i32, i32)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| fail(what, e))?;
    Ok(row.map(|(version, accepts)| Found { version, accepts }))
}
