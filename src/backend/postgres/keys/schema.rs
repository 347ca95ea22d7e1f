//! The keys' part of the schema: embedded, with its own version, and safe when many processes start
//! at once.

use sqlx::PgPool;

use crate::backend::Migrate;
use crate::backend::postgres::part::Part;
use crate::backend::postgres::schema::check_name;
use crate::error::{Error, Result};

/// The schema version that this build writes.
pub const KEYS_VERSION: i32 = 3;
/// The oldest build, by schema version, that can still use what this build writes.
pub const KEYS_ACCEPTS: i32 = 2;

const PART: Part = Part {
    name: "the keys",
    none: "keys",
    is_plural: true,
    remedy: "run `hapax keys init` with the owner's role (`hapax modules create SLUG` makes them too), and what `hapax modules \
             grants` prints for another role",
    meta: "keys_meta",
    version: KEYS_VERSION,
    accepts: KEYS_ACCEPTS,
    // Version 2 has row security, and version 3 refuses keys of clocks that are ahead: neither changed a table.
    steps: &[&[include_str!("migrations/0001_keys.sql")], &[], &[]],
    again: &[include_str!("functions/keys.sql"), include_str!("functions/row_security.sql")],
    fail: super::fail,
};

/// The keys' tables and functions as SQL, for a DBA to read and run.
pub fn keys_schema_sql(schema: &str) -> Result<String> {
    PART.schema_sql(schema, &[])
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
    PART.prepare(pool, schema, migrate, &[]).await?;
    let (secret,): (Vec<u8>,) = PART.read_prepared(pool, schema, "secret").await?;
    secret.try_into().map_err(|_| Error::Corrupt("the secret of the keys does not have 32 bytes".into()))
}
