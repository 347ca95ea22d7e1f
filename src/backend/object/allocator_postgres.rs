//! The allocator's rows in PostgreSQL.

use std::time::Duration;

use async_trait::async_trait;
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::{AssertSqlSafe, Row as _};

use super::allocator::{Allocator, AllocatorSettings, Known, Reservation};
use super::chain::Tail;
use super::name::Slot;
use crate::backend::postgres::{check_name, translate};
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::journal::AggregateOf;

type Statement = sqlx::query::Query<'static, sqlx::Postgres, sqlx::postgres::PgArguments>;

#[derive(Debug)]
pub(super) struct PgAllocator {
    pool: PgPool,
    table: String,
    handler: String,
}

/// The table. `next_*` is the end of the chain, `last_*` the slot of its last object; `pending_*`
/// is the append announced for that end.
fn table_sql(schema: &str) -> String {
    format!(
        "create schema if not exists {schema};
         create table if not exists {schema}.aggregate_sequence (
             handler text not null,
             tenant text not null,
             aggregate text not null,
             next_seq bigint not null,
             next_void integer not null,
             last_seq bigint,
             last_void integer,
             index_ms bigint not null,
             pending_count bigint,
             pending_id text,
             pending_fingerprint bytea,
             changed_at timestamptz not null default clock_timestamp(),
             primary key (handler, tenant, aggregate)
         );"
    )
}

impl PgAllocator {
    /// Connects, and creates the table if it is missing.
    pub(super) async fn open(url: &str, settings: &AllocatorSettings, journal: &str) -> Result<Self> {
        let schema = &settings.schema;
        check_name(schema).map_err(|_| {
            Error::Config(format!(
                "the schema of the allocator is {schema:?}; it needs 1 to 48 characters a-z, 0-9 or _, not starting with a \
                 digit, and no word of SQL"
            ))
        })?;
        let handler = format!("{}:{journal}", settings.handler_prefix);
        let pool = PgPoolOptions::new().max_connections(10).acquire_timeout(Duration::from_secs(10));
        let pool =
            pool.connect(url).await.map_err(|e| translate("connecting to the allocator's PostgreSQL", e))?;
        let known: bool = sqlx::query_scalar("select to_regclass($1) is not null")
            .bind(format!("{schema}.aggregate_sequence"))
            .fetch_one(&pool)
            .await
            .map_err(|e| translate("looking for the allocator's table", e))?;
        if !known {
            // Two sessions that create it at once would collide in the catalogue, so take a lock.
            let sql =
                format!("select pg_advisory_xact_lock(7402318, hashtext('{schema}')); {}", table_sql(schema));
            sqlx::raw_sql(AssertSqlSafe(sql)) // one message, so one transaction
                .execute(&pool)
                .await
                .map_err(|e| translate("making the allocator's table", e))?;
        }
        Ok(PgAllocator { pool, table: format!("{schema}.aggregate_sequence"), handler })
    }

    /// A statement about the end of a chain, which is its parameters 1 to 8.
    fn about(&self, sql: String, of: &AggregateOf, tail: Tail) -> Statement {
        sqlx::query(AssertSqlSafe(sql))
            .bind(&self.handler)
            .bind(Self::tenant(of))
            .bind(of.aggregate.as_str())
            .bind(big(tail.next.seq))
            .bind(tail.next.void as i32)
            .bind(tail.last.map(|slot| big(slot.seq)))
            .bind(tail.last.map(|slot| slot.void as i32))
            .bind(big(tail.ms))
    }

    fn tenant(of: &AggregateOf) -> &str {
        of.tenant.as_ref().map_or("", Tenant::as_str) // a tenant's name is never empty
    }
}

fn big(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

#[async_trait]
impl Allocator for PgAllocator {
    async fn known(&self, of: &AggregateOf) -> Result<Option<Known>> {
        let sql = format!(
            "select next_seq, next_void, last_seq, last_void, index_ms, pending_id is not null as pending from {} \
             where handler = $1 and tenant = $2 and aggregate = $3",
            self.table
        );
        let row = sqlx::query(AssertSqlSafe(sql))
            .bind(&self.handler)
            .bind(Self::tenant(of))
            .bind(of.aggregate.as_str())
            .fetch_optional(&self.pool)
            .await
            .map_err(|e| translate("asking the allocator", e))?;
        let Some(row) = row else { return Ok(None) };
        let read = || -> Result<Known, sqlx::Error> {
            let (seq, void): (i64, i32) = (row.try_get(0)?, row.try_get(1)?);
            let (last_seq, last_void): (Option<i64>, Option<i32>) = (row.try_get(2)?, row.try_get(3)?);
            let ms: i64 = row.try_get(4)?;
            let slot = |seq: i64, void: i32| Slot { seq: seq as u64, void: void as u32 };
            let last = last_seq.zip(last_void).map(|(seq, void)| slot(seq, void));
            Ok(Known { tail: Tail { next: slot(seq, void), ms: ms as u64, last }, pending: row.try_get(5)? })
        };
        read().map(Some).map_err(|e| translate("reading the allocator", e))
    }

    async fn reserve(&self, of: &AggregateOf, reservation: &Reservation) -> Result<bool> {
        let sql = format!(
            "insert into {table} as t (handler, tenant, aggregate, next_seq, next_void, last_seq, last_void, index_ms, \
                 pending_count, pending_id, pending_fingerprint)
             values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
             on conflict (handler, tenant, aggregate) do update set
                 next_seq = excluded.next_seq, next_void = excluded.next_void, last_seq = excluded.last_seq,
                 last_void = excluded.last_void, index_ms = excluded.index_ms, pending_count = excluded.pending_count,
                 pending_id = excluded.pending_id, pending_fingerprint = excluded.pending_fingerprint,
                 changed_at = clock_timestamp()
             where (t.next_seq, t.next_void) <= (excluded.next_seq, excluded.next_void)",
            table = self.table
        );
        let done = self
            .about(sql, of, reservation.after)
            .bind(big(reservation.count))
            .bind(&reservation.id)
            .bind(&reservation.fingerprint.0[..])
            .execute(&self.pool)
            .await
            .map_err(|e| translate("reserving in the allocator", e))?;
        Ok(done.rows_affected() == 1)
    }

    async fn settle(&self, of: &AggregateOf, tail: Tail) -> Result<()> {
        let sql = format!(
            "update {} set next_seq = $4, next_void = $5, last_seq = $6, last_void = $7, index_ms = $8,
                 pending_count = null, pending_id = null, pending_fingerprint = null, changed_at = clock_timestamp()
             where handler = $1 and tenant = $2 and aggregate = $3 and (next_seq, next_void) < ($4, $5)",
            self.table
        );
        self.about(sql, of, tail)
            .execute(&self.pool)
            .await
            .map_err(|e| translate("settling in the allocator", e))?;
        Ok(())
    }
}
