//! Modules, as their owner sees them: whether each is protected as it was made.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgConnection, PgPool};

use super::{fail, records_grants_sql, schema};
use crate::backend::Migrate;
use crate::backend::postgres::codes::from_row;
use crate::backend::postgres::connect;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::schema::check_name;
use crate::error::Result;
use crate::records::{Module, ModuleSlug, Modules, Roles};

/// What is known of the tables of modules: of one (`$1`), or of all. `$2` and `$3` name the functions that
/// guard records, and their bodies.
const STATE: &str = "
select m.slug::text as slug, {count} as count,
  coalesce(c.relrowsecurity and c.relforcerowsecurity, false) as forced,
  coalesce(c.relreplident = 'f', false) as identity,
  coalesce((select array_agg(p.polname::text || ' ' || p.polcmd::text || ' ' || p.polpermissive::text || ' ' || case p.polname
      when 'records_maintenance' then coalesce((select array_agg(distinct r order by r) from unnest(p.polroles) r)
        = (select array_agg(distinct o order by o) from (select c.relowner union all
           select a.oid from pg_roles a where a.rolname = m.maintenance) x(o)), false)
      else p.polroles = '{0}'::oid[] end::text || ' '
      || coalesce(pg_get_expr(p.polqual, c.oid), '') || ' ' || coalesce(pg_get_expr(p.polwithcheck, c.oid), '') order by p.polname)
     from pg_policy p where p.polrelid = c.oid), '{}'::text[]) = array[
    'records_maintenance r true true (current_setting(''hapax.maintenance''::text, true) = ''on''::text) ',
    'records_tenant * true true (tenant_id = {s}.record_tenant()) (tenant_id = {s}.record_tenant())'] as policies,
  (select count(*) from pg_trigger t join pg_proc f on f.oid = t.tgfoid join pg_namespace fn on fn.oid = f.pronamespace
    where t.tgrelid = c.oid and t.tgenabled = 'A' and t.tgqual is null and t.tgattr::text = '' and fn.nspname = '{s}' and (
      (t.tgname = 'records_guard' and f.proname = 'record_guard' and t.tgtype = 31)
      or (t.tgname = 'records_no_truncate' and f.proname = 'record_no_truncate' and t.tgtype = 34))) = 2 as triggers,
  (select count(*) from unnest($2::text[], $3::text[]) w(name, body) join pg_proc f on f.proname = w.name and f.prosrc = w.body
    join pg_namespace fn on fn.oid = f.pronamespace join pg_language l on l.oid = f.prolang
    where fn.nspname = '{s}' and l.lanname = 'plpgsql' and not f.prosecdef
      and 'search_path=pg_catalog, pg_temp' = any(f.proconfig)) = cardinality($2::text[]) as functions,
  (select count(*) from pg_trigger t where t.tgrelid = '{s}.journal_head'::regclass and t.tgenabled = 'A' and pg_get_triggerdef(t.oid) in (
    'CREATE TRIGGER journal_head_rises BEFORE UPDATE ON {s}.journal_head FOR EACH ROW WHEN (((new.last <= old.last) OR (new.tenant <> old.tenant) OR (new.aggregate <> old.aggregate))) EXECUTE FUNCTION {s}.journal_head_guard()',
    'CREATE TRIGGER journal_head_stays BEFORE DELETE ON {s}.journal_head FOR EACH ROW WHEN ((old.last > 0)) EXECUTE FUNCTION {s}.journal_head_guard()')) = 2 as heads,
  exists (select from pg_publication b where b.pubname = 'hapax_records' and b.pubinsert and b.pubupdate and b.pubdelete
    and (b.puballtables or exists (select from pg_publication_rel r
      where r.prpubid = b.oid and r.prrelid = c.oid and r.prqual is null and r.prattrs is null))) as published,
  not exists (select from pg_index i where i.indrelid = c.oid and i.indisunique
    and i.indkey[0] is distinct from (select a.attnum from pg_attribute a where a.attrelid = c.oid and a.attname = 'tenant_id'))
    and exists (select from pg_index i where i.indrelid = c.oid and i.indisprimary) as keyed
 from {s}.record_modules m
 left join pg_namespace n on n.nspname = 'module_' || m.slug
 left join pg_class c on c.relnamespace = n.oid and c.relname = 'records' and c.relkind = 'r'
where $1::text is null or m.slug = $1::text
order by m.slug";

from_row! {
    /// One row of [`STATE`].
    struct State {
        slug: String, count: Option<i64>, forced: bool, identity: bool, policies: bool, triggers: bool,
        functions: bool, heads: bool, published: bool, keyed: bool,
    }
}

impl State {
    fn problems(&self) -> Vec<String> {
        let checks = [
            (self.forced, "row security is not forced"),
            (self.policies, "its policies are not records_tenant and records_maintenance as they were made"),
            (
                self.triggers,
                "the trigger records_guard or records_no_truncate is missing, disabled or changed",
            ),
            (self.functions, "a function that guards records was changed"),
            (self.heads, "a trigger that guards the journal's heads is missing, disabled or changed"),
            (self.identity, "its replica identity is not full"),
            (self.published, "it is not whole in the publication hapax_records"),
            (self.keyed, "a unique index does not begin with the tenant, or the primary key is gone"),
        ];
        checks.iter().filter(|(fine, _)| !fine).map(|(_, problem)| (*problem).to_owned()).collect()
    }
}

/// Whether records are counted, which reads all of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Count {
    Yes,
    No,
}

/// One module, or all of them. Names are deparsed with their schemas, as [`STATE`] has them, only in a
/// transaction whose search path is that of [`BEGIN`].
pub(super) async fn modules_in(
    connection: &mut PgConnection,
    schema: &str,
    which: Option<&ModuleSlug>,
    count: Count,
) -> Result<Vec<Module>> {
    let counted = if count == Count::Yes { "{s}.record_count(m.slug)" } else { "null::bigint" };
    let sql = STATE.replace("{count}", counted).replace("{s}", schema);
    let (names, bodies) = schema::guards(schema);
    let found: Vec<State> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .bind(which.map(ModuleSlug::as_str))
        .bind(names)
        .bind(bodies)
        .fetch_all(connection)
        .await
        .map_err(|e| fail("listing modules", e))?;
    let module = |state: &State| {
        let count = state.count.map(|count| count as u64);
        Ok(Module::new(ModuleSlug::new(&state.slug)?, count, state.problems()))
    };
    found.iter().map(module).collect()
}

async fn modules(pool: &PgPool, schema: &str, count: Count) -> Result<Vec<Module>> {
    let mut tx = begin(pool, BEGIN).await.map_err(|e| fail("listing modules", e))?;
    modules_in(&mut tx, schema, None, count).await
}

/// Makes modules, and says whether they are as they should be. For their owner's role, which may be one
/// that bypasses row security.
#[derive(Debug, Clone)]
pub struct PgModules {
    pool: PgPool,
    schema: String,
    roles: Roles,
}

impl PgModules {
    /// Connects by URL. With [`Migrate::Auto`], makes the tables of keys, journal, records and API tokens
    /// that are missing, and brings them up to date: all that a server needs that may not make them.
    pub async fn connect(url: &str, schema: &str, roles: Roles, migrate: Migrate) -> Result<Self> {
        let pool = connect::open_pool("journal.url", url, 2, std::time::Duration::from_secs(10)).await?;
        PgModules::with_pool(pool, schema, roles, migrate).await
    }

    /// Uses a pool of your own.
    pub async fn with_pool(pool: PgPool, schema: &str, roles: Roles, migrate: Migrate) -> Result<Self> {
        use crate::backend::postgres::{PgAccess, PgAccessSettings};
        use crate::backend::postgres::{PgJournal, PgJournalSettings, PgKeys, PgKeysSettings};
        check_name(schema)?;
        let journal =
            PgJournalSettings { schema: schema.to_owned(), migrate, ..PgJournalSettings::default() };
        PgJournal::with_pool(pool.clone(), journal).await?;
        let keys = PgKeysSettings { schema: schema.to_owned(), migrate, ..PgKeysSettings::default() };
        PgKeys::with_pool(pool.clone(), keys).await?;
        schema::PART.prepare(&pool, schema, migrate, &[]).await?;
        if migrate == Migrate::Auto {
            let access =
                PgAccessSettings { schema: schema.to_owned(), migrate, ..PgAccessSettings::default() };
            PgAccess::with_pool(pool.clone(), access).await?;
        }
        Ok(PgModules { pool, schema: schema.to_owned(), roles })
    }
}

#[async_trait]
impl Modules for PgModules {
    async fn create_module(&self, slug: &ModuleSlug) -> Result<bool> {
        schema::create_module(&self.pool, &self.schema, slug, &self.roles).await
    }

    async fn modules(&self) -> Result<Vec<Module>> {
        modules(&self.pool, &self.schema, Count::Yes).await
    }

    async fn grants_sql(&self) -> Result<String> {
        let modules = modules(&self.pool, &self.schema, Count::No).await?;
        let slugs: Vec<ModuleSlug> = modules.into_iter().map(|module| module.slug).collect();
        records_grants_sql(&self.schema, &self.roles, &slugs)
    }
}
