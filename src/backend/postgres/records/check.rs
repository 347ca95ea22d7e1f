//! What keeps tenants apart, looked at before records are used: the role, and the protection of each module.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection, PgPool};

use super::fail;
use super::modules::{Count, modules_in};
use crate::backend::postgres::connect;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::error::{Error, Result};
use crate::records::{Module, ModuleSlug};

/// Refuses a URL whose role bypasses row security, before anything is made with it. Keys and records are
/// both kept apart by row security. `name` is the setting that has the URL. If the role is `accepted`, a
/// warning says so.
pub async fn refuse_bypass(name: &str, url: &str, acquire_timeout: Duration, accepted: bool) -> Result<()> {
    let pool = connect::open_pool(name, url, 1, acquire_timeout).await?;
    let checked = check_role(&pool, accepted).await;
    pool.close().await;
    checked.map(|_| ())
}

/// Refuses a role that row security does not bind, unless that is `accepted`. Says whether it is so.
pub(super) async fn check_role(pool: &PgPool, accepted: bool) -> Result<bool> {
    let what = "looking at this role's rights";
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail(what, e))?;
    let (role, bypasses): (String, bool) = sqlx::query_as(
        "select r.rolname::text, r.rolsuper or r.rolbypassrls from pg_roles r where r.rolname = current_user",
    )
    .persistent(false)
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    if !bypasses {
        return Ok(false);
    }
    if accepted {
        tracing::warn!(target: "hapax", role, "this role bypasses row security, and that is accepted: only the statements of hapax keep tenants apart");
        return Ok(true);
    }
    Err(Error::Refused {
        what: format!(
            "the role {role} bypasses row security (a superuser, or BYPASSRLS), which keeps tenants apart; connect with another \
             one (`hapax modules grants` prints its rights), or set records.accept_bypass for development"
        ),
        source: None,
    })
}

/// What protects keys: whether row security is forced, whether the policies are those that were made, with
/// their conditions and roles, and whether the functions that they and the statements use are. `{q}` is the
/// schema as the server writes it, in quotes where it is a keyword.
const KEYS: &str = "
select c.relrowsecurity and c.relforcerowsecurity,
  coalesce((select array_agg(p.polname::text || ' ' || p.polcmd::text || ' ' || p.polpermissive::text || ' '
      || (p.polroles = '{0}'::oid[])::text || ' ' || coalesce(pg_get_expr(p.polqual, c.oid), '') || ' '
      || coalesce(pg_get_expr(p.polwithcheck, c.oid), '') order by p.polname)
     from pg_policy p where p.polrelid = c.oid), '{}'::text[]) = array[
    'keys_maintenance * true true ((current_setting(''hapax.maintenance''::text, true) = ''on''::text) AND has_table_privilege((''{q}.keys''::regclass)::oid, ''DELETE''::text)) false',
    'keys_tenant * true true {q}.keys_visible(tenant) {q}.keys_visible(tenant)'],
  (select coalesce(array_agg(f.proname::text || ' ' || l.lanname::text || ' ' || f.prosecdef::text || ' '
      || coalesce(f.proconfig::text, '') || ' ' || coalesce(pg_get_function_sqlbody(f.oid), f.prosrc) order by f.proname), '{}'::text[])
     from pg_proc f join pg_language l on l.oid = f.prolang
    where f.pronamespace = c.relnamespace and f.proname in ('keys_enter', 'keys_maintains', 'keys_visible')) = array[
    'keys_enter plpgsql false {\"search_path=pg_catalog, pg_temp\"} ' || $1::text,
    'keys_maintains sql false  RETURN ((NOT row_security_active((''{q}.keys''::regclass)::oid)) OR has_table_privilege((''{q}.keys''::regclass)::oid, ''DELETE''::text))',
    'keys_visible sql false  RETURN CASE WHEN (p_tenant = ''''::text) THEN (current_setting(''hapax.tenant''::text, true) = ''00000000-0000-0000-0000-000000000000''::text) ELSE (p_tenant = current_setting(''hapax.tenant''::text, true)) END']
  from pg_class c where c.oid = '{s}.keys'::regclass";

/// Refuses keys whose protection is not as it was made: forced row security, its policies, and the functions
/// that these use.
/// `accepted`: a role that bypasses row security is, and has nothing to look at.
pub async fn check_keys(pool: &PgPool, schema: &str, accepted: bool) -> Result<()> {
    if check_role(pool, accepted).await? {
        return Ok(());
    }
    let what = "looking at the protection of keys";
    crate::backend::postgres::schema::check_name(schema)?;
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail(what, e))?;
    let enter = super::schema::body("keys_enter", include_str!("../keys/functions/row_security.sql"), schema);
    let sql = KEYS.replace("{q}", &format!("' || quote_ident('{schema}') || '")).replace("{s}", schema);
    let (forced, policies, functions): (bool, bool, bool) = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .bind(enter)
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| fail(what, e))?;
    let problem = match (forced, policies, functions) {
        (true, true, true) => return Ok(()),
        (false, _, _) => "row security is not forced",
        (true, false, _) => "its policies are not keys_tenant and keys_maintenance as they were made",
        (true, true, false) => "a function that its policies use was changed",
    };
    let what = format!("the protection of the table {schema}.keys was changed: {problem}");
    Err(Error::Refused { what, source: None })
}

/// The modules that are protected as they were made. Each is looked at before its first use. One that is
/// not protected is refused alone, and looked at each time, so that it works again once it is mended.
#[derive(Debug)]
pub(super) struct Protection {
    schema: String,
    /// `None`: nothing is looked at.
    sound: Option<Mutex<HashSet<ModuleSlug>>>,
}

impl Protection {
    /// `bypassed`: the role is one that the protection does not bind, so there is nothing to look at.
    pub(super) fn new(schema: &str, bypassed: bool) -> Self {
        Protection { schema: schema.to_owned(), sound: (!bypassed).then(Mutex::default) }
    }

    fn is_known(&self, module: &ModuleSlug) -> bool {
        let Some(sound) = &self.sound else { return true };
        sound.lock().unwrap_or_else(PoisonError::into_inner).contains(module)
    }

    fn learn(&self, module: &Module) -> Result<()> {
        if !module.problems.is_empty() {
            let (slug, problems) = (&module.slug, module.problems.join(", "));
            let what = format!("the protection of module {slug} was changed: {problems}");
            return Err(Error::Refused { what, source: None });
        }
        if let Some(sound) = &self.sound {
            sound.lock().unwrap_or_else(PoisonError::into_inner).insert(module.slug.clone());
        }
        Ok(())
    }

    /// Looks at all modules. What is wrong with one is logged; the others can be used.
    pub(super) async fn check_all(&self, pool: &PgPool) -> Result<()> {
        if self.sound.is_none() {
            return Ok(());
        }
        let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("looking at modules", e))?;
        for module in modules_in(&mut tx, &self.schema, None, Count::No).await? {
            if let Err(error) = self.learn(&module) {
                tracing::error!(target: "hapax", error = %error.chain(), "a module is not served");
            }
        }
        Ok(())
    }

    /// Looks at a module that was not found protected before. One that does not exist passes: whoever
    /// uses it is told.
    pub(super) async fn check(&self, pool: &PgPool, module: &ModuleSlug) -> Result<()> {
        if self.is_known(module) {
            return Ok(());
        }
        let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("looking at a module", e))?;
        let found = modules_in(&mut tx, &self.schema, Some(module), Count::No).await?;
        found.first().map_or(Ok(()), |module| self.learn(module))
    }

    /// The same in a transaction of the caller, whose search path stays as it is: waiting for a second
    /// connection there could wait for ever.
    pub(super) async fn check_in(&self, tx: &mut PgConnection, module: &ModuleSlug) -> Result<()> {
        if self.is_known(module) {
            return Ok(());
        }
        let before = "select pg_catalog.current_setting('search_path')";
        let before: String = sqlx::query_scalar(before)
            .persistent(false)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| fail("looking at a module", e))?;
        search_path(tx, "pg_catalog, pg_temp").await?;
        let found = modules_in(tx, &self.schema, Some(module), Count::No).await?;
        search_path(tx, &before).await?;
        found.first().map_or(Ok(()), |module| self.learn(module))
    }
}

/// Sets the search path until the transaction ends.
async fn search_path(tx: &mut PgConnection, to: &str) -> Result<()> {
    sqlx::query("select pg_catalog.set_config('search_path', $1, true)")
        .persistent(false)
        .bind(to)
        .execute(tx)
        .await
        .map_err(|e| fail("looking at a module", e))?;
    Ok(())
}
