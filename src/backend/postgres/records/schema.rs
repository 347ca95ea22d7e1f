//! The records' part of the schema, and modules: embedded, versioned, and safe when many processes start
//! at once.

use std::fmt::Write as _;

use sqlx::{AssertSqlSafe, Executor as _, PgPool};

use super::fail;
use crate::backend::Migrate;
use crate::backend::postgres::PgTx;
use crate::backend::postgres::access::{access_grants_sql, access_maintenance_grants_sql};
use crate::backend::postgres::codes::from_row;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::journal::journal_grants_sql;
use crate::backend::postgres::keys::keys_grants_sql;
use crate::backend::postgres::schema::{check_name, read_meta};
use crate::error::{Error, Result};
use crate::records::{ModuleSlug, Roles};

/// The schema version that this build writes.
pub const RECORDS_VERSION: i32 = 1;
/// The oldest build, by schema version, that can still use what this build writes.
pub const RECORDS_ACCEPTS: i32 = 1;

/// The step at index n brings the schema to version n + 1. A released step is never changed.
const STEPS: [&str; RECORDS_VERSION as usize] = [include_str!("migrations/0001_records.sql")];
const MODULE: &str = include_str!("migrations/module.sql");

/// The functions that guard records, and where they are made.
const GUARDS: [(&str, &str); 5] = [
    ("record_guard", STEPS[0]),
    ("record_is_own", STEPS[0]),
    ("record_no_truncate", STEPS[0]),
    ("record_tenant", STEPS[0]),
    ("journal_head_guard", include_str!("../journal/migrations/0001_journal.sql")),
];

/// The names of the functions that guard records, and the body that each has.
pub(super) fn guards(schema: &str) -> (Vec<String>, Vec<String>) {
    let body = |(name, sql): &(&str, &str)| {
        let from = sql.find(&format!("create function {{schema}}.{name}(")).unwrap_or(sql.len());
        let body = sql[from..].split("$$").nth(1).unwrap_or_default();
        ((*name).to_owned(), body.replace("{schema}", schema))
    };
    GUARDS.iter().map(body).unzip()
}

const WHAT: &str = "preparing the schema of the records";

/// What records need in a schema as SQL, for a DBA to read and run. The journal's part comes first.
pub fn records_schema_sql(schema: &str) -> Result<String> {
    check_name(schema)?;
    Ok(format!("{BEGIN};\n\n{}\nCOMMIT;\n", steps_sql(schema, 0)))
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
            "{shown:?} cannot be used as a role: it needs 1 to 48 characters a-z, 0-9 or _, not starting with a digit, and is no \
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
             grant select on {schema}.journal_meta, {schema}.records_meta, {schema}.record_modules to {maintenance};"
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

fn steps_sql(schema: &str, from: usize) -> String {
    let last = if from == 0 {
        format!(
            "\ninsert into {{schema}}.records_meta (version, accepts) values ({RECORDS_VERSION}, {RECORDS_ACCEPTS});\n"
        )
    } else {
        format!(
            "\nupdate {{schema}}.records_meta set version = {RECORDS_VERSION}, accepts = {RECORDS_ACCEPTS};\n"
        )
    };
    (STEPS[from..].concat() + &last).replace("{schema}", schema)
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

/// Creates or updates what records need, or returns why it cannot be used.
pub(super) async fn prepare(pool: &PgPool, schema: &str, migrate: Migrate) -> Result<()> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("connecting to PostgreSQL", e))?;
    match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= RECORDS_VERSION => return found.fits(schema),
        _ if migrate == Migrate::Auto => {}
        Some(found) => {
            return Err(Error::Schema(format!(
                "the records in schema {schema} have version {}, this build needs {RECORDS_VERSION}, and migrate is `check`; run \
                 `hapax modules create` with their owner's role",
                found.version
            )));
        }
        None => {
            return Err(Error::Schema(format!(
                "there are no records in schema {schema} (or this role may not see them), and migrate is `check`; `hapax modules \
                 create SLUG` makes them, with the owner's role"
            )));
        }
    }
    lock(&mut tx, schema).await?;
    let from = match found_in(&mut tx, schema).await? {
        Some(found) if found.version >= RECORDS_VERSION => return found.fits(schema),
        Some(found) => {
            found.fits(schema)?;
            usize::try_from(found.version).unwrap_or(0)
        }
        None => 0,
    };
    tx.execute(sqlx::raw_sql(AssertSqlSafe(steps_sql(schema, from)))).await.map_err(|e| fail(WHAT, e))?;
    tx.commit().await.map_err(|e| fail(WHAT, e))
}

/// Other processes that change the schema now wait here, and then find the work done.
async fn lock(tx: &mut PgTx, schema: &str) -> Result<()> {
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.migrate.{schema}'))");
    tx.execute(sqlx::raw_sql(AssertSqlSafe(lock))).await.map_err(|e| fail(WHAT, e))?;
    Ok(())
}

from_row! {
    /// The version that records store.
    struct FoundVersion { version: i32, accepts: i32 }
}

impl FoundVersion {
    fn fits(&self, schema: &str) -> Result<()> {
        if self.accepts <= RECORDS_VERSION {
            return Ok(());
        }
        Err(Error::Schema(format!(
            "the records in schema {schema} have version {} and accept builds from version {} on; this build knows version \
             {RECORDS_VERSION}: update it",
            self.version, self.accepts
        )))
    }
}

async fn found_in(tx: &mut PgTx, schema: &str) -> Result<Option<FoundVersion>> {
    let sql = format!("select version, accepts from {schema}.records_meta");
    let found = read_meta(tx, schema, "records_meta", sql).await;
    found.map_err(|e| fail("reading the schema version of the records", e))
}

/// Whether there are records, of whatever version.
pub(super) async fn is_there(pool: &PgPool, schema: &str) -> Result<bool> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("looking for records", e))?;
    Ok(found_in(&mut tx, schema).await?.is_some())
}

/// Whether there is a module.
pub(super) async fn has_module(pool: &PgPool, schema: &str, slug: &ModuleSlug) -> Result<bool> {
    let what = "looking for a module";
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail(what, e))?;
    if found_in(&mut tx, schema).await?.is_none() {
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
    lock(&mut tx, "modules").await?; // the publication is the database's
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
