//! The schema: embedded, versioned, safe when many processes start at once.

use sqlx::{AssertSqlSafe, Executor, PgPool, Row};

use super::error::translate;
use crate::config::Migrate;
use crate::error::{Error, Result};

/// The schema this build writes.
pub const VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const ACCEPTS: i32 = 1;

/// How long a claim waits for somebody's open transaction before it calls the id busy.
const LOCK_TIMEOUT: &str = "100ms";

const MIGRATIONS: [&str; 4] = [
    include_str!("migrations/0001_ledger.sql"),
    include_str!("migrations/0002_claim.sql"),
    include_str!("migrations/0003_settle.sql"),
    include_str!("migrations/0004_languages.sql"),
];

/// Checks a schema name: a plain lower-case identifier, so that no quoting can go wrong anywhere.
pub(super) fn check_name(schema: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    let starts = schema.starts_with(|c: char| c.is_ascii_lowercase() || c == '_');
    if schema.is_empty() || schema.len() > 48 || !starts || !schema.chars().all(plain) {
        return Err(Error::Config(format!(
            "ledger.schema is {schema:?}; it needs 1 to 48 characters a-z, 0-9 or _, not starting with a digit"
        )));
    }
    Ok(())
}

/// The whole schema as SQL, for a DBA to read and run.
pub fn schema_sql(schema: &str) -> Result<String> {
    check_name(schema)?;
    let mut sql = MIGRATIONS.concat();
    sql.push_str(&format!(
        "\ninsert into {{schema}}.meta (version, accepts) values ({VERSION}, {ACCEPTS});\n"
    ));
    Ok(sql
        .replace("{schema_literal}", &format!("'{schema}'"))
        .replace("{schema}", schema)
        .replace("{lock_timeout}", LOCK_TIMEOUT))
}

/// The grants a runtime role needs: rows, functions and sequences, no DDL.
pub fn grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, insert, update, delete on {schema}.entry, {schema}.held, {schema}.head, {schema}.touch, {schema}.awaited to {role};\n\
         grant select, delete on {schema}.sealed to {role};\n\
         grant select, insert on {schema}.scope, {schema}.owner, {schema}.audit to {role};\n\
         grant select on {schema}.meta, {schema}.dropped, {schema}.entries to {role};\n\
         grant usage on all sequences in schema {schema} to {role};\n\
         grant execute on all functions in schema {schema} to {role};\n"
    ))
}

/// Brings the schema to where this build can use it, or says why it cannot.
pub(super) async fn prepare(pool: &PgPool, schema: &str, migrate: Migrate) -> Result<()> {
    let what = "preparing the ledger's schema";
    match found(pool, schema).await? {
        Some((version, accepts)) => return fits(schema, version, accepts),
        None if migrate == Migrate::Check => {
            return Err(Error::Schema(format!(
                "there is no ledger in schema {schema} (or this role may not see it), and migrate is `check`; run `hapax ledger init`"
            )));
        }
        None => {}
    }
    let mut tx = pool.begin().await.map_err(|e| translate(what, e))?;
    // Others that start now wait here, and then find it done.
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| translate(what, e))?;
    if let Some((version, accepts)) = found_in(&mut tx, schema).await? {
        return fits(schema, version, accepts);
    }
    tx.execute(sqlx::raw_sql(AssertSqlSafe(schema_sql(schema)?))).await.map_err(|e| translate(what, e))?;
    tx.commit().await.map_err(|e| translate(what, e))
}

async fn found(pool: &PgPool, schema: &str) -> Result<Option<(i32, i32)>> {
    let mut tx = pool.begin().await.map_err(|e| translate("connecting to PostgreSQL", e))?;
    found_in(&mut tx, schema).await
}

async fn found_in(tx: &mut sqlx::PgTransaction<'_>, schema: &str) -> Result<Option<(i32, i32)>> {
    let what = "reading the ledger's schema version";
    let there: bool = sqlx::query_scalar("select to_regclass($1) is not null")
        .persistent(false)
        .bind(format!("{schema}.meta"))
        .fetch_one(&mut **tx)
        .await
        .map_err(|e| translate(what, e))?;
    if !there {
        return Ok(None);
    }
    let row = sqlx::query(AssertSqlSafe(format!("select version, accepts from {schema}.meta")))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| translate(what, e))?;
    Ok(row.map(|row| (row.get(0), row.get(1))))
}

fn fits(schema: &str, version: i32, accepts: i32) -> Result<()> {
    if accepts > VERSION {
        return Err(Error::Schema(format!(
            "schema {schema} has version {version} and accepts builds from version {accepts} on; this build knows \
             version {VERSION}: update it"
        )));
    }
    Ok(())
}
