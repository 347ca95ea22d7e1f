//! The part of the schema for API tokens and audit rows: embedded, with its own version, and safe when
//! many processes start at once.

use crate::backend::postgres::part::Part;
use crate::backend::postgres::schema::check_name;
use crate::error::Result;

/// The schema version that this build writes.
pub const ACCESS_VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const ACCESS_ACCEPTS: i32 = 1;

pub(super) const PART: Part = Part {
    name: "the API tokens",
    none: "API tokens",
    is_plural: true,
    remedy: "`hapax token create` makes them and brings them up to date",
    meta: "access_meta",
    version: ACCESS_VERSION,
    accepts: ACCESS_ACCEPTS,
    steps: &[&[include_str!("migrations/0001_access.sql")]],
    again: &[],
    fail: super::fail,
};

/// The tables of API tokens and audit rows as SQL, for a DBA to read and run.
pub fn access_schema_sql(schema: &str) -> Result<String> {
    PART.schema_sql(schema, &[])
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
