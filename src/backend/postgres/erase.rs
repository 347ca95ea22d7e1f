//! Erases what a PostgreSQL schema has of a subject: events of a journal, answers of keys, entries of a ledger.
//!
//! It needs the rights of the owner: the role of an app may not change events. Row security holds for the owner
//! too, so each transaction names its tenant.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::{AssertSqlSafe, Executor as _, PgPool, Row as _};

use super::PgTx;
use super::codes::from_row;
use super::connect;
use super::database::{BEGIN, begin};
use super::error::translate;
use super::executor::Repeat;
use super::schema::check_name;
use crate::clock::Time;
use crate::erase::{
    ANSWER_BODY, ANSWER_HEADERS, ANSWER_STATUS, DELETION, Eraser, Found, HEADER, Subject, name, payload,
};
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::Aggregate;
use crate::records::{Name, Uuid};

/// How many rows one transaction erases.
const BATCH: i64 = 500;

/// Events with content, for parameters 1 to 4: tenant, aggregate, the kind of deletions, the fingerprint of erased
/// ones.
const EVENTS: &str =
    "j.tenant = $1 and ($2::text is null or j.aggregate = $2::text) and j.kind is distinct from $3
    and j.fingerprint <> $4";

/// Answers that tell something, for parameters 1 to 3: tenant, the body of erased ones, what a body about the record
/// contains.
const ANSWERS: &str = "k.tenant = $1 and k.settled_at is not null and k.body is distinct from $2
    and ($3::text is null or position(convert_to($3::text, 'UTF8') in k.body) > 0 or strpos(k.headers, $3::text) > 0)";

/// Entries that tell something, for parameters 1 to 3: tenant, aggregate, ids of events.
const ENTRIES: &str = "e.scope in (select c.number from {s}.scope c where c.tenant = $1)
    and (e.metadata is not null or e.fingerprint is not null or e.note is not null and e.note not like 'dropped by %')
    and ($2::text is null or e.aggregate = $2::text or e.id = any($3))";

/// Erases in one PostgreSQL schema, whatever it holds of hapax.
#[derive(Debug, Clone)]
pub struct PgEraser {
    pool: PgPool,
    schema: String,
}

from_row! {
    /// An event that is to be erased.
    struct EventAbout { position: i64, kind: Option<String>, aggregate: String, seq: i64, at_us: i64 }
}

/// What a schema may hold.
#[derive(Debug, Clone, Copy)]
enum Place {
    Journal,
    Answers,
    Ledger,
}

const PLACES: [(Place, &str, &str); 3] = [
    (Place::Journal, "journal_meta", "journal events"),
    (Place::Answers, "keys_meta", "answers of keys"),
    (Place::Ledger, "meta", "ledger entries"),
];

fn fail(error: sqlx::Error) -> Error {
    match translate("erasing in PostgreSQL", error) {
        Error::Refused { what, source } => {
            Error::Refused { what: format!("{what}; erasing needs the role that owns the tables"), source }
        }
        other => other,
    }
}

impl PgEraser {
    /// Connects by URL, to a schema. Makes nothing.
    pub async fn connect(url: &str, schema: &str) -> Result<Self> {
        check_name(schema)?;
        let pool = connect::open_pool("journal.url", url, 2, Duration::from_secs(10)).await?;
        Ok(PgEraser { pool, schema: schema.to_owned() })
    }

    /// A transaction that sees the tenant.
    async fn begin(&self, of: &Subject) -> Result<PgTx> {
        let mut tx = begin(&self.pool, BEGIN).await.map_err(fail)?;
        let nil = Uuid::nil().to_string();
        let tenant = if of.tenant.is_some() { of.tenant_text() } else { &nil };
        sqlx::query("select set_config('hapax.tenant', $1, true)")
            .persistent(false)
            .bind(tenant)
            .execute(&mut *tx)
            .await
            .map_err(fail)?;
        Ok(tx)
    }

    async fn places(&self, tx: &mut PgTx) -> Result<Vec<(Place, &'static str)>> {
        let mut there = Vec::new();
        for (place, table, name) in PLACES {
            let sql = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                       where n.nspname = $1 and c.relname = $2 and c.relkind = 'r')";
            let found: bool = sqlx::query_scalar(sql)
                .persistent(false)
                .bind(&self.schema)
                .bind(table)
                .fetch_one(&mut **tx)
                .await
                .map_err(fail)?;
            if found {
                there.push((place, name));
            }
        }
        Ok(there)
    }

    fn sql(&self, sql: &str) -> AssertSqlSafe<String> {
        AssertSqlSafe(sql.replace("{s}", &self.schema))
    }

    async fn count_in(&self, tx: &mut PgTx, place: Place, of: &Subject) -> Result<u64> {
        let aggregate = of.aggregate()?;
        let aggregate = aggregate.as_ref().map(Aggregate::as_str);
        let tables: &[&str] = if matches!(place, Place::Ledger) { &["entry", "held"] } else { &[""] };
        let mut sum = 0;
        for table in tables {
            let sql = match place {
                Place::Journal => format!("select count(*) from {{s}}.journal j where {EVENTS}"),
                Place::Answers => format!("select count(*) from {{s}}.keys k where {ANSWERS}"),
                Place::Ledger => format!("select count(*) from {{s}}.{table} e where {ENTRIES}"),
            };
            let query = sqlx::query_scalar::<_, i64>(self.sql(&sql)).persistent(false).bind(of.tenant_text());
            let query = match place {
                Place::Journal => query.bind(aggregate).bind(DELETION).bind(&Fingerprint::ERASED.0[..]),
                Place::Answers => {
                    query.bind(ANSWER_BODY.as_bytes()).bind(of.record.is_some().then(|| of.mark()))
                }
                Place::Ledger => query.bind(aggregate).bind(keys(of)),
            };
            sum += query.fetch_one(&mut **tx).await.map_err(fail)?;
        }
        Ok(sum as u64)
    }

    /// One batch; how many rows it erased.
    async fn batch(&self, place: Place, of: &Subject) -> Result<u64> {
        let mut tx = self.begin(of).await?;
        let rows = match place {
            Place::Journal => self.events(&mut tx, of).await?,
            Place::Answers => self.answers(&mut tx, of).await?,
            Place::Ledger => {
                self.entries(&mut tx, of, "entry").await? + self.entries(&mut tx, of, "held").await?
            }
        };
        tx.commit().await.map_err(fail)?;
        crate::crash_point!("erase.batch");
        Ok(rows)
    }

    async fn events(&self, tx: &mut PgTx, of: &Subject) -> Result<u64> {
        let aggregate = of.aggregate()?;
        let sql = format!(
            "select j.position, j.kind::text as kind, j.aggregate::text as aggregate, j.seq,
                 (extract(epoch from j.at) * 1000000)::bigint as at_us
             from {{s}}.journal j where {EVENTS} order by j.position limit {BATCH} for update"
        );
        let found: Vec<EventAbout> = sqlx::query_as(self.sql(&sql))
            .persistent(false)
            .bind(of.tenant_text())
            .bind(aggregate.as_ref().map(Aggregate::as_str))
            .bind(DELETION)
            .bind(&Fingerprint::ERASED.0[..])
            .fetch_all(&mut **tx)
            .await
            .map_err(fail)?;
        let said = |event: &EventAbout| {
            let at = Time::from_micros(event.at_us);
            payload(event.kind.as_deref(), &event.aggregate, event.seq as u64, at).into_bytes()
        };
        let (positions, payloads): (Vec<i64>, Vec<Vec<u8>>) =
            found.iter().map(|event| (event.position, said(event))).unzip();
        let sql = "update {s}.journal j set payload = x.payload, header_names = array[$3], header_values = array[$4], trace = null,
                       fingerprint = $5
                   from unnest($1::bigint[], $2::bytea[]) x(position, payload) where j.position = x.position";
        let done = sqlx::query(self.sql(sql))
            .persistent(false)
            .bind(positions)
            .bind(payloads)
            .bind(HEADER.as_bytes())
            .bind(&b"true"[..])
            .bind(&Fingerprint::ERASED.0[..])
            .execute(&mut **tx)
            .await
            .map_err(fail)?;
        Ok(done.rows_affected())
    }

    async fn answers(&self, tx: &mut PgTx, of: &Subject) -> Result<u64> {
        let sql = format!(
            "update {{s}}.keys k set status = {ANSWER_STATUS}, headers = $4, body = $2 where (k.tenant, k.key) in
               (select k.tenant, k.key from {{s}}.keys k where {ANSWERS} limit {BATCH})"
        );
        let done = sqlx::query(self.sql(&sql))
            .persistent(false)
            .bind(of.tenant_text())
            .bind(ANSWER_BODY.as_bytes())
            .bind(of.record.is_some().then(|| of.mark()))
            .bind(ANSWER_HEADERS)
            .execute(&mut **tx)
            .await
            .map_err(fail)?;
        Ok(done.rows_affected())
    }

    /// Rows are locked in the order of their keys, as settlings lock them; one that somebody holds is left to the next
    /// batch.
    async fn entries(&self, tx: &mut PgTx, of: &Subject, table: &str) -> Result<u64> {
        let aggregate = of.aggregate()?;
        let sql = format!(
            "with found as materialized (select e.week, e.scope, e.id from {{s}}.{table} e where {ENTRIES}
               order by e.scope, e.id limit {BATCH} for update skip locked)
             update {{s}}.{table} e set metadata = null, fingerprint = null, note = case when e.note like 'dropped by %' then e.note end
               from found f where e.week = f.week and e.scope = f.scope and e.id = f.id"
        );
        let done = sqlx::query(self.sql(&sql))
            .persistent(false)
            .bind(of.tenant_text())
            .bind(aggregate.as_ref().map(Aggregate::as_str))
            .bind(keys(of))
            .execute(&mut **tx)
            .await
            .map_err(fail)?;
        Ok(done.rows_affected())
    }
}

/// The ids of the subject's events, as they are stored.
fn keys(of: &Subject) -> Vec<Vec<u8>> {
    of.events.iter().map(|id| id.key().to_vec()).collect()
}

#[async_trait]
impl Eraser for PgEraser {
    async fn count(&self, of: &Subject) -> Result<Vec<Found>> {
        let mut tx = self.begin(of).await?;
        let mut found = Vec::new();
        for (place, name) in self.places(&mut tx).await? {
            found.push(Found::new(name, self.count_in(&mut tx, place, of).await?));
        }
        Ok(found)
    }

    async fn erase(&self, of: &Subject) -> Result<Vec<Found>> {
        let mut tx = self.begin(of).await?;
        let places = self.places(&mut tx).await?;
        drop(tx);
        let mut found = Vec::new();
        for (place, name) in places {
            let (mut sum, mut repeat) = (0, Repeat::behind_writers());
            loop {
                match self.batch(place, of).await {
                    Ok(0) => break,
                    Ok(rows) => (sum, repeat) = (sum + rows, Repeat::behind_writers()),
                    Err(Error::Contended { .. }) if repeat.again().await => {}
                    Err(error) => return Err(error),
                }
            }
            found.push(Found::new(name, sum));
        }
        Ok(found)
    }

    async fn heads(&self, of: &Subject) -> Result<Vec<(Name, u64)>> {
        let mut tx = self.begin(of).await?;
        let there = self.places(&mut tx).await?.iter().any(|(place, _)| matches!(place, Place::Journal));
        let (true, Some(tenant)) = (there, of.tenant_id()) else { return Ok(Vec::new()) };
        let aggregate = of.aggregate()?;
        let sql =
            "select h.aggregate::text, h.last from {s}.journal_head h where h.tenant = $1 and h.last > 0
                   and ($2::text is null or h.aggregate = $2::text) order by h.aggregate";
        let rows = sqlx::query(self.sql(sql))
            .persistent(false)
            .bind(of.tenant_text())
            .bind(aggregate.as_ref().map(Aggregate::as_str))
            .fetch_all(&mut *tx)
            .await
            .map_err(fail)?;
        let mut heads = Vec::new();
        for row in rows {
            let aggregate: String = row.try_get(0).map_err(fail)?;
            let last: i64 = row.try_get(1).map_err(fail)?;
            heads.extend(name(tenant, &aggregate).map(|name| (name, last as u64)));
        }
        Ok(heads)
    }

    async fn knows(&self, of: &Subject) -> Result<bool> {
        let mut tx = self.begin(of).await?;
        let aggregate = of.aggregate()?;
        for (place, _) in self.places(&mut tx).await? {
            let sql = match place {
                Place::Journal => {
                    "select exists (select from {s}.journal_head h where h.tenant = $1 and ($2::text is null or h.aggregate = $2::text))"
                }
                Place::Answers => {
                    "select exists (select from {s}.keys k where k.tenant = $1 and $2::text is null)"
                }
                Place::Ledger => {
                    "select exists (select from {s}.scope c where c.tenant = $1 and $2::text is null)"
                }
            };
            let known: bool = sqlx::query_scalar(self.sql(sql))
                .persistent(false)
                .bind(of.tenant_text())
                .bind(aggregate.as_ref().map(Aggregate::as_str))
                .fetch_one(&mut *tx)
                .await
                .map_err(fail)?;
            if known {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Dead rows go; their bytes are overwritten when their space is used again.
    async fn compact(&self) -> Result<Vec<String>> {
        let mut tx = begin(&self.pool, BEGIN).await.map_err(fail)?;
        let places = self.places(&mut tx).await?;
        let sql = "select format('module_%s.records', m.slug) from {s}.record_modules m order by m.slug";
        let records = "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace
                       where n.nspname = $1 and c.relname = 'record_modules')";
        let has: bool = sqlx::query_scalar(records)
            .persistent(false)
            .bind(&self.schema)
            .fetch_one(&mut *tx)
            .await
            .map_err(fail)?;
        let mut tables: Vec<String> = Vec::new();
        if has {
            let found = sqlx::query_scalar(self.sql(sql)).persistent(false).fetch_all(&mut *tx).await;
            tables = found.map_err(fail)?;
        }
        drop(tx);
        for (place, _) in places {
            let own: &[&str] = match place {
                Place::Journal => &["journal"],
                Place::Answers => &["keys"],
                Place::Ledger => &["entry", "held"],
            };
            tables.extend(own.iter().map(|table| format!("{}.{table}", self.schema)));
        }
        for table in tables {
            let vacuum = sqlx::raw_sql(AssertSqlSafe(format!("vacuum {table}")));
            self.pool.execute(vacuum).await.map_err(fail)?;
        }
        Ok(vec![
            "PostgreSQL: the bytes of vacuumed rows stay in free space until it is used again (VACUUM FULL rewrites a table); \
             its write-ahead log, replicas and slots have them until those are recycled"
                .to_owned(),
        ])
    }
}
