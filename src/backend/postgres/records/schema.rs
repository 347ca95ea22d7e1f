//! The records' part of the schema, and modules: embedded, versioned, and safe when many processes start
//! at once.

use std::fmt::Write as _;

use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use super::fail;
use crate::backend::postgres::access::{access_grants_sql, access_maintenance_grants_sql};
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::journal::journal_grants_sql;
use crate::backend::postgres::keys::keys_grants_sql;
use crate::backend::postgres::part::{Part, lock};
use crate::backend::postgres::schema::check_name;
use crate::error::{Error, Result};
use crate::records::{ModuleSlug, Roles};

/// The schema version that this build writes.
pub const RECORDS_VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const RECORDS_ACCEPTS: i32 = 1;

const RECORDS: &str = include_str!("migrations/0001_records.sql");
const MODULE: &str = include_str!("migrations/module.sql");

/// The functions that guard records, and where they are made.
const GUARDS: [(&str, &str); 5] = [
    ("record_guard", RECORDS),
    ("record_is_own", RECORDS),
    ("record_no_truncate", RECORDS),
    ("record_tenant", RECORDS),
    ("journal_head_guard", include_str!("../journal/migrations/0001_journal.sql")),
];

/// The names of the functions that guard records, and the body that each has.
pub(super) fn guards(schema: &str) -> (Vec<String>, Vec<String>) {
    GUARDS.iter().map(|(name, sql)| ((*name).to_owned(), body(name, sql, schema))).unzip()
}

/// The body of a function in PL/pgSQL, from the SQL that makes it.
pub(super) fn body(name: &str, sql: &str, schema: &str) -> String {
    let from = sql.find(&format!("create function {{schema}}.{name}(")).unwrap_or(sql.len());
    sql[from..].split("$$").nth(1).unwrap_or_default().replace("{schema}", schema)
}

pub(super) const PART: Part = Part {
    name: "the records",
    none: "records",
    is_plural: true,
    remedy: "with the owner's role, `hapax modules create SLUG` makes them and brings them up to date, and `hapax modules grants` \
             prints what another role needs",
    meta: "records_meta",
    version: RECORDS_VERSION,
    accepts: RECORDS_ACCEPTS,
    steps: &[&[RECORDS]],
    again: &[],
    fail,
};

/// What records need in a schema as SQL, for a DBA to read and run. The journal's part comes first.
pub fn records_schema_sql(schema: &str) -> Result<String> {
    PART.schema_sql(schema, &[])
}

/// One module as SQL, as `hapax modules create` makes it.
pub fn module_sql(schema: &str, slug: &ModuleSlug, roles: &Roles) -> Result<String> {
    check_name(schema)?;
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", module_steps(schema, slug, roles)?))
}

fn check_roles(roles: &Roles) -> Result<()> {
    let refused = |role: &str| {
        let shown: String = role.chars().take(64).collect();
        Error::Config(format!(
            "{shown:?} cannot be used as a role: it needs 1 to 48 characters a-z, 0-9 or _, not starting with a digit, and is not a \
             word of SQL"
        ))
    };
    roles
        .app
        .iter()
        .chain(&roles.maintenance)
        .try_for_each(|role| check_name(role).map_err(|_| refused(role)))
}

/// The grants for the roles of a database with keys, journal, records and API tokens in one schema, and
/// for each of these modules. The owner runs it: it made the tables.
pub fn records_grants_sql(schema: &str, roles: &Roles, modules: &[ModuleSlug]) -> Result<String> {
    check_name(schema)?;
    check_roles(roles)?;
    let mut sql = String::new();
    if let Some(app) = &roles.app {
        sql += &keys_grants_sql(schema, app)?;
        sql += &journal_grants_sql(schema, app)?;
        sql += &access_grants_sql(schema, app)?;
        let _ = writeln!(sql, "grant select on {schema}.records_meta, {schema}.record_modules to {app};"); // a String takes all
    }
    if let Some(maintenance) = &roles.maintenance {
        sql += &keys_grants_sql(schema, maintenance)?;
        sql += &access_maintenance_grants_sql(schema, maintenance)?;
        let _ = writeln!(
            sql,
            "grant delete on {schema}.keys to {maintenance};\n\
             grant update on {schema}.keys_meta to {maintenance};\n\
             grant select on {schema}.journal_meta, {schema}.journal_head, {schema}.records_meta, {schema}.record_modules to {maintenance};"
        );
    }
    for module in modules {
        sql += &module_grants(module, roles);
        if let Some(maintenance) = &roles.maintenance {
            let _ = writeln!(
                sql,
                "update {schema}.record_modules set maintenance = '{maintenance}' where slug = '{module}';\n\
                 alter policy records_maintenance on module_{module}.records to current_user, {maintenance};"
            );
        }
    }
    Ok(sql)
}

fn module_grants(module: &ModuleSlug, roles: &Roles) -> String {
    let mut sql = String::new();
    for (role, rights) in [(&roles.app, "select, insert, update, delete"), (&roles.maintenance, "select")] {
        if let Some(role) = role {
            let _ = writeln!(
                sql,
                "grant usage on schema module_{module} to {role};\ngrant {rights} on module_{module}.records to {role};"
            );
        }
    }
    sql
}

fn module_steps(schema: &str, slug: &ModuleSlug, roles: &Roles) -> Result<String> {
    check_roles(roles)?;
    let (seers, name) = match &roles.maintenance {
        Some(role) => (format!("current_user, {role}"), format!("'{role}'")),
        None => ("current_user".to_owned(), "null".to_owned()),
    };
    let sql = MODULE.replace("{schema}", schema).replace("{slug}", slug.as_str());
    let sql = sql.replace("{maintenance}", &seers).replace("{maintenance_name}", &name);
    Ok(sql + &module_grants(slug, roles))
}

/// Whether there are records, of whatever version.
pub(super) async fn is_there(pool: &PgPool, schema: &str) -> Result<bool> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("looking for records", e))?;
    PART.is_there(&mut tx, schema).await
}

/// Whether there is a module.
pub(super) async fn has_module(pool: &PgPool, schema: &str, slug: &ModuleSlug) -> Result<bool> {
    let what = "looking for a module";
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail(what, e))?;
    if !PART.is_there(&mut tx, schema).await? {
        return Ok(false);
    }
    let sql = format!("select {schema}.record_module_exists($1)");
    let found = sqlx::query_scalar(AssertSqlSafe(sql)).persistent(false).bind(slug.as_str());
    found.fetch_one(&mut *tx).await.map_err(|e| fail(what, e))
}

/// Makes a module; false if it is there.
pub(super) async fn create_module(
    pool: &PgPool,
    schema: &str,
    slug: &ModuleSlug,
    roles: &Roles,
) -> Result<bool> {
    let what = "making a module";
    let steps = module_steps(schema, slug, roles)?;
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail(what, e))?;
    lock(&mut tx, "modules").await.map_err(|e| fail(what, e))?; // the publication is the database's
    let sql = format!(
        "select {schema}.record_module_exists($1), exists (select from pg_namespace n where n.nspname = 'module_' || $1)"
    );
    let (there, taken): (bool, bool) = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .bind(slug.as_str())
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| fail(what, e))?;
    if there {
        return Ok(false);
    }
    if taken {
        return Err(Error::Conflict {
            expected: format!("no schema module_{slug}"),
            actual: "one that is not a module of these records".into(),
        });
    }
    tx.execute(sqlx::raw_sql(AssertSqlSafe(steps))).await.map_err(|e| fail(what, e))?;
    tx.commit().await.map_err(|e| fail(what, e))?;
    Ok(true)
}
