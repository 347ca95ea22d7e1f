//! The ledger's schema: embedded, versioned, and safe when many processes start at once.

use sqlx::PgPool;

use super::database::{BEGIN, begin};
use super::error::translate;
use super::part::Part;
use crate::backend::Migrate;
use crate::error::{Error, Result};
use crate::ledger::IdentityRule;

/// The schema version that this build writes.
pub const VERSION: i32 = 3;
/// The oldest build, by schema version, that can still use what this build writes.
pub const ACCEPTS: i32 = 1;

/// How long a claim waits for another open transaction before it answers that the id is busy.
pub(super) const LOCK_TIMEOUT: &str = "100ms";

const PART: Part = Part {
    name: "the ledger",
    none: "ledger",
    is_plural: false,
    remedy: "run `hapax ledger init` with the owner's role, and what `hapax ledger grants` prints for another role",
    meta: "meta",
    version: VERSION,
    accepts: ACCEPTS,
    steps: &[
        &[include_str!("migrations/0001_ledger.sql")],
        &[include_str!("migrations/0002_skips.sql")],
        &[include_str!("migrations/0003_late_scopes.sql")],
    ],
    again: &[
        include_str!("functions/ledger.sql"),
        include_str!("functions/claim.sql"),
        include_str!("functions/settle.sql"),
        include_str!("functions/languages.sql"),
    ],
    fail: translate,
};

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
    PART.schema_sql(schema, &[identity_fact(IdentityRule::Id)])
}

/// The identity rule, as a column of the ledger's row.
fn identity_fact(identity: IdentityRule) -> (&'static str, &'static str) {
    match identity {
        IdentityRule::Id => ("identity", "id"),
        IdentityRule::IdAndTime => ("identity", "id_and_time"),
    }
}

/// The grants that a runtime role needs: rows, functions and sequences, no DDL.
pub fn grants_sql(schema: &str, role: &str) -> Result<String> {
    check_name(schema)?;
    check_name(role)?;
    Ok(format!(
        "grant usage on schema {schema} to {role};\n\
         grant select, insert, update, delete on {schema}.entry, {schema}.held, {schema}.head, {schema}.touch, {schema}.awaited, {schema}.marker, {schema}.skip, {schema}.prevented to {role};\n\
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
    let mut tx = begin(pool, BEGIN).await.map_err(|e| translate("connecting to PostgreSQL", e))?;
    let found: Option<(String,)> = PART.read(&mut tx, schema, "identity").await?;
    if let Some((found,)) = found {
        must_be_identity(&found, schema, identity)?; // before anything is changed
    }
    drop(tx);
    PART.prepare(pool, schema, migrate, &[identity_fact(identity)]).await?;
    // Another process may have made it meanwhile, with another rule.
    let (found,): (String,) = PART.read_prepared(pool, schema, "identity").await?;
    must_be_identity(&found, schema, identity)
}

fn must_be_identity(found: &str, schema: &str, identity: IdentityRule) -> Result<()> {
    let (_, rule) = identity_fact(identity);
    if found == rule {
        return Ok(());
    }
    Err(Error::Config(format!(
        "ledger.identity is {rule}, but the ledger in schema {schema} was made with {found}; it cannot change, because ids \
         would be looked for where they are not"
    )))
}
