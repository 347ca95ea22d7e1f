//! The ledger's schema: embedded, versioned, and safe when many processes start at once.

use sqlx::{AssertSqlSafe, Executor, PgPool};

use super::PgTx;
use super::codes::from_row;
use super::database::{BEGIN, Decoded, begin};
use super::error::translate;
use crate::backend::Migrate;
use crate::error::{Error, Result};
use crate::ledger::IdentityRule;

/// The schema version that this build writes.
pub const VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const ACCEPTS: i32 = 1;

/// How long a claim waits for another open transaction before it answers that the id is busy.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const STEPS: [&[&str]; VERSION as usize] = [&[
    include_str!("migrations/0001_ledger.sql"),
    include_str!("migrations/0002_claim.sql"),
    include_str!("migrations/0003_settle.sql"),
    include_str!("migrations/0004_languages.sql"),
]];

/// Reserved words of SQL.
#[rustfmt::skip]
const RESERVED: [&str; 77] = [
    "all", "analyse", "analyze", "and", "any", "array", "as", "asc", "asymmetric", "both", "case", "cast", "check",
    "collate", "column", "constraint", "create", "current_catalog", "current_date", "current_role", "current_time",
    "current_timestamp", "current_user", "default", "deferrable", "desc", "distinct", "do", "else", "end", "except",
    "false", "fetch", "for", "foreign", "from", "grant", "group", "having", "in", "initially", "intersect", "into",
    "lateral", "leading", "limit", "localtime", "localtimestamp", "not", "null", "offset", "on", "only", "or", "order",
    "placing", "primary", "references", "returning", "select", "session_user", "some", "symmetric", "system_user",
    "table", "then", "to", "trailing", "true", "union", "unique", "user", "using", "variadic", "when", "where", "window",
];

/// Checks a schema name: it must be a plain lower-case identifier, so that it never needs quoting.
pub(in crate::backend) fn check_name(schema: &str) -> Result<()> {
    let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if RESERVED.contains(&schema) {
        return Err(Error::Config(format!("{schema:?} is a word of SQL and cannot name a schema or role")));
    }
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
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", steps_sql(schema, 0, IdentityRule::Id)))
}

/// The steps from a version to the current one, for a transaction begun with [`BEGIN`].
fn steps_sql(schema: &str, from: usize, identity: IdentityRule) -> String {
    let steps: String = STEPS[from..].concat().concat();
    let last = if from == 0 {
        let rule = rule_name(identity);
        format!(
            "\ninsert into {{schema}}.meta (version, accepts, identity) values ({VERSION}, {ACCEPTS}, '{rule}');\n"
        )
    } else {
        format!("\nupdate {{schema}}.meta set version = {VERSION}, accepts = {ACCEPTS};\n")
    };
    (steps + &last)
        .replace("{schema_literal}", &format!("'{schema}'"))
        .replace("{schema}", schema)
        .replace("{lock_timeout}", LOCK_TIMEOUT)
}

fn rule_name(identity: IdentityRule) -> &'static str {
    match identity {
        IdentityRule::Id => "id",
        IdentityRule::IdAndTime => "id_and_time",
    }
}

/// The grants that a runtime role needs: rows, functions and sequences, no DDL.
pub fn grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, insert, update, delete on {schema}.entry, {schema}.held, {schema}.head, {schema}.touch, {schema}.awaited, {schema}.marker to {role};\n\
         grant select, insert on {schema}.scope, {schema}.owner, {schema}.audit to {role};\n\
         grant select on {schema}.meta, {schema}.dropped, {schema}.entries to {role};\n\
         grant usage on all sequences in schema {schema} to {role};\n\
         grant execute on all functions in schema {schema} to {role};\n"
    ))
}

/// Creates or updates the schema so that this build can use it, or returns why it cannot.
pub(super) async fn prepare(
    pool: &PgPool,
    schema: &str,
    migrate: Migrate,
    identity: IdentityRule,
) -> Result<()> {
    let what = "preparing the ledger's schema";
    match found(pool, schema).await? {
        Some(found) if found.version >= VERSION => return found.fits(schema, identity),
        _ if migrate == Migrate::Auto => {}
        Some(found) => {
            return Err(Error::Schema(format!(
                "schema {schema} has version {}, this build needs {VERSION}, and migrate is `check`; run `hapax ledger init`",
                found.version
            )));
        }
        None => {
            return Err(Error::Schema(format!(
                "there is no ledger in schema {schema} (or this role may not see it), and migrate is `check`; run `hapax ledger init`"
            )));
        }
    }
    let mut tx = begin(pool, BEGIN).await.map_err(|e| translate(what, e))?;
    // Other processes that start now wait here, and then find the work done.
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| translate(what, e))?;
    let from = match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= VERSION => return found.fits(schema, identity),
        Some(found) => {
            found.fits(schema, identity)?;
            usize::try_from(found.version).unwrap_or(0)
        }
        None => 0,
    };
    let sql = steps_sql(schema, from, identity);
    tx.execute(sqlx::raw_sql(AssertSqlSafe(sql))).await.map_err(|e| translate(what, e))?;
    tx.commit().await.map_err(|e| translate(what, e))
}

from_row! {
    /// The version and identity rule that a schema stores.
    struct Found { version: i32, accepts: i32, identity: String }
}

impl Found {
    fn fits(&self, schema: &str, identity: IdentityRule) -> Result<()> {
        let Found { version, accepts, .. } = self;
        if *accepts > VERSION {
            return Err(Error::Schema(format!(
                "schema {schema} has version {version} and accepts builds from version {accepts} on; this build knows \
                 version {VERSION}: update it"
            )));
        }
        let rule = rule_name(identity);
        if self.identity != rule {
            return Err(Error::Config(format!(
                "ledger.identity is {rule}, but the ledger in schema {schema} was made with {}; it cannot change, because \
                 ids would be looked for where they are not",
                self.identity
            )));
        }
        Ok(())
    }
}

async fn found(pool: &PgPool, schema: &str) -> Result<Option<Found>> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| translate("connecting to PostgreSQL", e))?;
    found_in(&mut tx, schema).await
}

async fn found_in(tx: &mut PgTx, schema: &str) -> Result<Option<Found>> {
    let what = "reading the ledger's schema version";
    let sql = format!("select version, accepts, identity from {schema}.meta");
    read_meta(tx, schema, "meta", sql).await.map_err(|e| translate(what, e))
}

/// Reads a table of one row; `None` if there is no such table.
pub(super) async fn read_meta<T: Decoded>(
    tx: &mut PgTx,
    schema: &str,
    table: &str,
    sql: String,
) -> sqlx::Result<Option<T>> {
    // Not `to_regclass`: it may answer from a cache that is older than the lock we waited for.
    let there = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace \
                 where n.nspname = $1 and c.relname = $2)";
    let there: bool =
        sqlx::query_scalar(there).persistent(false).bind(schema).bind(table).fetch_one(&mut **tx).await?;
    if !there {
        return Ok(None);
    }
    sqlx::query_as(AssertSqlSafe(sql)).persistent(false).fetch_optional(&mut **tx).await
}
