//! The records of all tenants, for a role that may see them.

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, PgPool};

use super::{Row, fail};
use crate::backend::postgres::PgTx;
use crate::backend::postgres::codes::{count, from_row};
use crate::backend::postgres::connect;
use crate::backend::postgres::database::{BEGIN, begin};
use crate::backend::postgres::schema::check_name;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::records::{LIST_BYTES_MAX, ModuleSlug, OfTenant, RECORD_BYTES, Scan, Snapshot, Uuid};

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
        // Before the first row: a scan that ends halfway would leave its reader with some of the modules.
        if let Some(Known { slug, .. }) = modules.iter().find(|module| !module.visible) {
            let what = format!(
                "this role does not see the records of all tenants in module {slug}; use that of the owner, or name the role \
                 of maintenance (keys.maintenance_url; `hapax modules grants --maintenance-role ROLE` prints its rights)"
            );
            return Err(Error::Refused { what, source: None });
        }
        for Known { slug, .. } in modules {
            let page = self.page(&mut tx, &ModuleSlug::new(slug)?, scan).await?;
            if !page.is_empty() {
                return Ok(page);
            }
        }
        Ok(Vec::new())
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
