//! The records of all tenants, for a role that may see them.

use std::collections::BTreeSet;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgPool};

use super::{Row, fail};
use crate::backend::postgres::PgTx;
use crate::backend::postgres::codes::{count, from_row};
use crate::backend::postgres::connect;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::schema::check_name;
use crate::clock::Time;
use crate::erase::{name, tenant_of};
use crate::error::{Error, Result};
use crate::records::{LIST_BYTES_MAX, ModuleSlug, Name, OfTenant, RECORD_BYTES, Scan, Snapshot, Uuid};

const WHAT: &str = "reading the records of all tenants";

/// The modules from one on, and whether this role sees all records of each. A role that row security binds
/// sees no rows and gets no error, unless the policy for maintenance names it.
const MODULES: &str = "
select m.slug::text as slug, coalesce(has_schema_privilege(n.oid, 'USAGE') and has_table_privilege(c.oid, 'SELECT')
  and (not row_security_active(c.oid) or exists (select from pg_policy p, unnest(p.polroles) r
    where p.polrelid = c.oid and p.polname = 'records_maintenance' and pg_has_role(r, 'USAGE'))), false) as visible
 from {s}.record_modules m
 left join pg_namespace n on n.nspname = 'module_' || m.slug
 left join pg_class c on c.relnamespace = n.oid and c.relname = 'records' and c.relkind = 'r'
where m.slug >= $1 and ($2::text is null or m.slug = $2::text)
order by m.slug";

/// A page of one module: up to `$3` records, and none after the one that reaches `$4` bytes.
const PAGE: &str = "
select p.tenant_id::text as o_tenant, p.id::text as o_id, p.seq as o_seq, p.payload as o_payload,
  (extract(epoch from p.created_at) * 1000000)::bigint as o_created_us,
  (extract(epoch from p.updated_at) * 1000000)::bigint as o_updated_us
 from (select f.*, sum({each} + octet_length(f.payload)) over (order by f.tenant_id, f.id)
     - {each} - octet_length(f.payload) as before
   from (select r.tenant_id, r.id, r.seq, r.payload::text as payload, r.created_at, r.updated_at from {table} r
     where {from} order by r.tenant_id, r.id limit $3) f) p
where p.before < $4
order by p.tenant_id, p.id";

from_row! {
    /// One row of [`MODULES`].
    struct Known { slug: String, visible: bool }
}

from_row! { "o_",
    /// One row of [`PAGE`].
    struct Found { tenant: String, id: String, seq: i64, payload: Option<String>, created_us: i64, updated_us: i64 }
}

/// Heads of the journal, from one on.
const HEADS: &str = "
select h.tenant::text as h_tenant, h.aggregate::text as h_aggregate, h.last as h_last from {s}.journal_head h
where (h.tenant, h.aggregate) > ($1::text collate \"C\", $2::text collate \"C\") and h.last > 0
order by h.tenant, h.aggregate limit $3";

/// Which of these records of a module are stored.
const STORED: &str = "
select w.tenant::text as tenant, w.id::text as id from unnest($1::text[], $2::text[]) w(tenant, id)
where exists (select from {table} r where r.tenant_id = w.tenant::uuid and r.id = w.id::uuid)";

from_row! { "h_",
    /// One row of [`HEADS`].
    struct Head { tenant: String, aggregate: String, last: i64 }
}

from_row! {
    /// One row of [`STORED`].
    struct StoredName { tenant: String, id: String }
}

/// Reads the records of all tenants. Its role is the owner of the modules, or that of maintenance
/// (`keys.maintenance_url`); another one is refused.
#[derive(Debug, Clone)]
pub struct PgSnapshot {
    pool: PgPool,
    schema: String,
}

impl PgSnapshot {
    /// Connects by URL, to the schema of a journal. Makes nothing.
    pub async fn connect(url: &str, schema: &str) -> Result<Self> {
        let pool = connect::open_pool("journal.url", url, 1, std::time::Duration::from_secs(10)).await?;
        PgSnapshot::with_pool(pool, schema)
    }

    /// Uses a pool of your own.
    pub fn with_pool(pool: PgPool, schema: &str) -> Result<Self> {
        check_name(schema)?;
        Ok(PgSnapshot { pool, schema: schema.to_owned() })
    }

    /// Begins to read. The policy for maintenance holds until the transaction ends.
    async fn begin(&self) -> Result<PgTx> {
        let mut tx = begin(&self.pool, BEGIN).await.map_err(|e| fail(WHAT, e))?;
        sqlx::query("select set_config('hapax.maintenance', 'on', true), set_config('transaction_read_only', 'on', true)")
            .persistent(false)
            .execute(&mut *tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        Ok(tx)
    }

    async fn modules(&self, tx: &mut PgTx, scan: &Scan) -> Result<Vec<Known>> {
        let sql = MODULES.replace("{s}", &self.schema);
        sqlx::query_as(AssertSqlSafe(sql))
            .persistent(false)
            .bind(scan.after.as_ref().map_or("", |after| after.module.as_str()))
            .bind(scan.module.as_ref().map(ModuleSlug::as_str))
            .fetch_all(&mut **tx)
            .await
            .map_err(|e| fail(WHAT, e))
    }

    async fn page(&self, tx: &mut PgTx, module: &ModuleSlug, scan: &Scan) -> Result<Vec<OfTenant>> {
        let after = scan.after.as_ref().filter(|after| after.module == *module);
        // The nil UUID is an id too, and nothing is less: only a first page may begin with it.
        let than = if after.is_some() { ">" } else { ">=" };
        let from = match scan.tenant {
            Some(_) => format!("r.tenant_id = $1::text::uuid and r.id {than} $2::text::uuid"),
            None => format!("(r.tenant_id, r.id) {than} ($1::text::uuid, $2::text::uuid)"),
        };
        let buckets = scan.buckets_text().map(|buckets| {
            format!(" and get_byte(sha256(convert_to(r.id::text, 'UTF8')), 0) in ({buckets})")
        });
        let from = from + buckets.as_deref().unwrap_or_default();
        let sql = PAGE.replace("{table}", &format!("module_{module}.records")).replace("{from}", &from);
        let sql = sql.replace("{each}", &RECORD_BYTES.to_string());
        let tenant = scan.tenant.or(after.map(|after| after.tenant)).unwrap_or_default();
        let found: Vec<Found> = sqlx::query_as(AssertSqlSafe(sql))
            .persistent(false)
            .bind(tenant.to_string())
            .bind(after.map(|after| after.id).unwrap_or_default().to_string())
            .bind(count(scan.limit as u64))
            .bind(count(LIST_BYTES_MAX as u64))
            .fetch_all(&mut **tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        found.into_iter().map(|found| found.record(module)).collect()
    }

    /// Refuses a role that does not see all records of these modules: a scan that ends halfway would leave its
    /// reader with some of them.
    fn must_see(modules: &[Known]) -> Result<()> {
        let Some(Known { slug, .. }) = modules.iter().find(|module| !module.visible) else { return Ok(()) };
        let what = format!(
            "this role does not see the records of all tenants in module {slug}; use that of the owner, or name the role \
             of maintenance (keys.maintenance_url; `hapax modules grants --maintenance-role ROLE` prints its rights)"
        );
        Err(Error::Refused { what, source: None })
    }

    /// A page of the journal's heads, and which of them are records of some modules.
    async fn heads(
        &self,
        tx: &mut PgTx,
        after: &(String, String),
        limit: usize,
    ) -> Result<(Option<(String, String)>, Vec<(Name, u64)>)> {
        let heads: Vec<Head> = sqlx::query_as(AssertSqlSafe(HEADS.replace("{s}", &self.schema)))
            .persistent(false)
            .bind(&after.0)
            .bind(&after.1)
            .bind(count(limit as u64))
            .fetch_all(&mut **tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        let last = heads.last().map(|head| (head.tenant.clone(), head.aggregate.clone()));
        let named = heads
            .into_iter()
            .filter_map(|head| Some((name(tenant_of(&head.tenant)?, &head.aggregate)?, head.last as u64)));
        Ok((last, named.collect()))
    }

    /// Leaves out records that are stored, and heads of no module.
    async fn without_stored(
        &self,
        tx: &mut PgTx,
        modules: &[Known],
        heads: Vec<(Name, u64)>,
    ) -> Result<Vec<(Name, u64)>> {
        let mut gone: Vec<(Name, u64)> = Vec::new();
        for Known { slug, .. } in modules {
            let of_module: Vec<_> = heads.iter().filter(|(name, _)| name.module.as_str() == slug).collect();
            let (tenants, ids): (Vec<String>, Vec<String>) =
                of_module.iter().map(|(name, _)| (name.tenant.to_string(), name.id.to_string())).unzip();
            if ids.is_empty() {
                continue;
            }
            let stored: Vec<StoredName> =
                sqlx::query_as(AssertSqlSafe(STORED.replace("{table}", &format!("module_{slug}.records"))))
                    .persistent(false)
                    .bind(tenants)
                    .bind(ids)
                    .fetch_all(&mut **tx)
                    .await
                    .map_err(|e| fail(WHAT, e))?;
            let stored: BTreeSet<_> = stored.into_iter().map(|stored| (stored.tenant, stored.id)).collect();
            let is_stored = |name: &Name| stored.contains(&(name.tenant.to_string(), name.id.to_string()));
            gone.extend(of_module.into_iter().filter(|(name, _)| !is_stored(name)).cloned());
        }
        // In the journal's order: whoever continues after the last one misses none.
        gone.sort_by_cached_key(|(name, _)| key_of(name));
        Ok(gone)
    }
}

/// Where the head of a record is among the heads.
fn key_of(name: &Name) -> (String, String) {
    let tenant = if name.tenant.is_nil() { String::new() } else { name.tenant.to_string() };
    (tenant, format!("{}/{}", name.module, name.id))
}

impl Found {
    fn record(self, module: &ModuleSlug) -> Result<OfTenant> {
        let Found { tenant, id, seq, payload, created_us, updated_us } = self;
        let tenant =
            Uuid::try_parse(&tenant).map_err(|_| Error::Corrupt("a record's tenant is not a UUID".into()))?;
        Ok(OfTenant { tenant, record: Row { id, seq, payload, created_us, updated_us }.record(module)? })
    }
}

#[async_trait]
impl Snapshot for PgSnapshot {
    async fn snapshot(&self, scan: &Scan) -> Result<Vec<OfTenant>> {
        let mut tx = self.begin().await?;
        let modules = self.modules(&mut tx, scan).await?;
        PgSnapshot::must_see(&modules)?; // before the first row
        for Known { slug, .. } in modules {
            let page = self.page(&mut tx, &ModuleSlug::new(slug)?, scan).await?;
            if !page.is_empty() {
                return Ok(page);
            }
        }
        Ok(Vec::new())
    }

    async fn gone(&self, after: Option<&Name>, limit: usize) -> Result<Vec<(Name, u64)>> {
        let mut tx = self.begin().await?;
        let modules = self.modules(&mut tx, &Scan::new(limit)).await?;
        PgSnapshot::must_see(&modules)?;
        let mut from = after.map(key_of).unwrap_or_default();
        loop {
            let (last, heads) = self.heads(&mut tx, &from, limit).await?;
            let Some(last) = last else { return Ok(Vec::new()) };
            let gone = self.without_stored(&mut tx, &modules, heads).await?;
            if !gone.is_empty() {
                return Ok(gone);
            }
            from = last;
        }
    }

    async fn now(&self) -> Result<Time> {
        let mut tx = self.begin().await?;
        let now: i64 = sqlx::query_scalar("select (extract(epoch from clock_timestamp()) * 1000000)::bigint")
            .persistent(false)
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        Ok(Time::from_micros(now))
    }
}
