//! The log of skips, and daily counts.

use std::borrow::Cow;
use std::collections::HashMap;

use sqlx::AssertSqlSafe;

use super::codes::{from_row, tenant_text};
use super::database::{BEGIN_BRIEFLY, begin};
use super::error::translate;
use super::{Inner, PgTx};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::exact::Decimal;
use crate::id::{EventId, Scope, Tenant};
use crate::ledger::{
    Amount, Counted, Identity, Logged, PreventedDays, SkipBatch, day_of, plan_skips, prevented_days,
    skip_horizons, skip_slots,
};

const NOTING: &str = "logging skips";
const READING: &str = "reading the log of skips";

from_row! {
    /// A row of the log.
    struct SkipRow { slot: i32, tenant: String, scope: String, id: String, count: i64, skips: String }
}

from_row! {
    /// A day's count.
    struct CountRow { day: i32, kind: String, tenant: String, scope: String, count: i64, valued: i64, value: String }
}

impl SkipRow {
    fn logged(self) -> Result<Logged> {
        let tenant = if self.tenant.is_empty() { None } else { Some(Tenant::new(self.tenant)?) };
        let identity = Identity { tenant, scope: Scope::new(self.scope)?, id: EventId::new(self.id)? };
        Logged::stored(identity, self.count, &self.skips)
    }
}

impl CountRow {
    fn read(self) -> Result<Option<(i32, Counted, Amount)>> {
        let Some(counted) = Counted::stored(&self.kind, &self.tenant, &self.scope)? else { return Ok(None) };
        let bad = || Error::Corrupt(format!("a sum is {:?}", self.value));
        let value = Decimal::parse_sum(&self.value).ok_or_else(bad)?;
        let number = |number: i64| u64::try_from(number).unwrap_or(0);
        Ok(Some((
            self.day,
            counted,
            Amount { count: number(self.count), valued: number(self.valued), value },
        )))
    }
}

/// Adds a batch. Flushes of all processes go one after the other, so that nothing is added to a row
/// that another has read, and the limits are exact. It is sent once: see `Operations::note_skips`.
pub(super) async fn note(inner: &Inner, batch: &SkipBatch) -> Result<()> {
    let fail = |error| translate(NOTING, error);
    let mut tx = begin(inner.database.pool(), BEGIN_BRIEFLY).await.map_err(fail)?;
    let s = &inner.settings.schema;
    let lock = format!("select pg_advisory_xact_lock(hashtext('hapax.skips.{s}'))");
    sqlx::query(AssertSqlSafe(lock)).persistent(false).execute(&mut *tx).await.map_err(fail)?;
    let now = format!("select {s}.us({s}.ledger_now())");
    let now: i64 =
        sqlx::query_scalar(AssertSqlSafe(now)).persistent(false).fetch_one(&mut *tx).await.map_err(fail)?;
    let now = Time::from_micros(now);
    let stored = format!("select slot, tenant, scope, id, count, skips from {s}.skip where slot = any($1)");
    let stored: Vec<SkipRow> = sqlx::query_as(AssertSqlSafe(stored))
        .persistent(false)
        .bind(skip_slots(batch))
        .fetch_all(&mut *tx)
        .await
        .map_err(fail)?;
    let stored = stored.into_iter().map(|row| Ok((row.slot, row.logged()?))).collect::<Result<_>>()?;
    let day = day_of(now);
    let counts = format!("select * from {s}.prevented where day = $1");
    let counts: Vec<CountRow> = sqlx::query_as(AssertSqlSafe(counts))
        .persistent(false)
        .bind(day)
        .fetch_all(&mut *tx)
        .await
        .map_err(fail)?;
    let counts = read(counts)?.into_iter().map(|(_, counted, amount)| (counted, amount));
    let planned = plan_skips(batch, now, stored, counts.collect::<HashMap<_, _>>());
    put_slots(s, &mut tx, &planned.slots).await.map_err(fail)?;
    put_counts(s, &mut tx, day, &planned.counts).await.map_err(fail)?;
    tx.commit().await.map_err(fail)
}

fn read(rows: Vec<CountRow>) -> Result<Vec<(i32, Counted, Amount)>> {
    rows.into_iter().filter_map(|row| row.read().transpose()).collect()
}

async fn put_slots(s: &str, tx: &mut PgTx, slots: &[(i32, Logged)]) -> sqlx::Result<()> {
    if slots.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "insert into {s}.skip (slot, tenant, scope, id, count, skips, last_at) \
         select * from unnest($1::int[], $2::text[], $3::text[], $4::text[], $5::bigint[], $6::text[], $7::bigint[]) \
         on conflict (slot) do update set tenant = excluded.tenant, scope = excluded.scope, id = excluded.id, \
         count = excluded.count, skips = excluded.skips, last_at = excluded.last_at"
    );
    let of = |get: fn(&Logged) -> String| slots.iter().map(|(_, logged)| get(logged)).collect::<Vec<_>>();
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(slots.iter().map(|(slot, _)| *slot).collect::<Vec<_>>())
        .bind(of(|logged| tenant_text(logged.identity.tenant.as_ref()).to_owned()))
        .bind(of(|logged| logged.identity.scope.to_string()))
        .bind(of(|logged| logged.identity.id.to_string()))
        .bind(slots.iter().map(|(_, logged)| whole(logged.count)).collect::<Vec<_>>())
        .bind(of(Logged::text))
        .bind(slots.iter().map(|(_, logged)| logged.last_at().as_micros()).collect::<Vec<_>>())
        .execute(&mut **tx)
        .await
        .map(drop)
}

async fn put_counts(s: &str, tx: &mut PgTx, day: i32, counts: &[(Counted, Amount)]) -> sqlx::Result<()> {
    if counts.is_empty() {
        return Ok(());
    }
    let sql = format!(
        "insert into {s}.prevented (day, kind, tenant, scope, count, valued, value) \
         select $1, * from unnest($2::text[], $3::text[], $4::text[], $5::bigint[], $6::bigint[], $7::text[]) \
         on conflict (day, kind, tenant, scope) do update \
         set count = excluded.count, valued = excluded.valued, value = excluded.value"
    );
    let names: Vec<_> = counts.iter().map(|(counted, _)| counted.texts()).collect();
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(day)
        .bind(names.iter().map(|(kind, ..)| *kind).collect::<Vec<_>>())
        .bind(names.iter().map(|(_, tenant, _)| *tenant).collect::<Vec<_>>())
        .bind(names.iter().map(|(.., scope)| *scope).collect::<Vec<_>>())
        .bind(counts.iter().map(|(_, amount)| whole(amount.count)).collect::<Vec<_>>())
        .bind(counts.iter().map(|(_, amount)| whole(amount.valued)).collect::<Vec<_>>())
        .bind(counts.iter().map(|(_, amount)| amount.value.to_string()).collect::<Vec<_>>())
        .execute(&mut **tx)
        .await
        .map(drop)
}

pub(super) async fn of(inner: &Inner, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select slot, tenant, scope, id, count, skips from {s}.skip where tenant = $1 and id = any($2)"
    );
    let ids: Vec<String> = ids.iter().map(EventId::as_str).map(Cow::into_owned).collect();
    let query = sqlx::query_as::<_, SkipRow>(AssertSqlSafe(sql)).bind(tenant_text(tenant)).bind(ids);
    let rows = inner.fetch_all(READING, query).await?;
    rows.into_iter().map(SkipRow::logged).collect()
}

pub(super) async fn prevented(inner: &Inner, since_day: i32) -> Result<PreventedDays> {
    let s = &inner.settings.schema;
    let sql = format!("select * from {s}.prevented where day >= $1");
    let query = sqlx::query_as::<_, CountRow>(AssertSqlSafe(sql)).bind(since_day);
    Ok(prevented_days(read(inner.fetch_all(READING, query).await?)?))
}

/// Forgets what is old.
pub(super) async fn sweep(inner: &Inner) -> Result<()> {
    let fail = |error| translate("sweeping the log of skips", error);
    let s = &inner.settings.schema;
    let (skips_from, first_day) = skip_horizons(super::read::now(inner).await?);
    let mut tx = begin(inner.database.pool(), BEGIN_BRIEFLY).await.map_err(fail)?;
    let skips = format!("delete from {s}.skip where last_at < $1");
    let skips = sqlx::query(AssertSqlSafe(skips)).persistent(false).bind(skips_from.as_micros());
    skips.execute(&mut *tx).await.map_err(fail)?;
    let days = format!("delete from {s}.prevented where day < $1");
    let days = sqlx::query(AssertSqlSafe(days)).persistent(false).bind(first_day);
    days.execute(&mut *tx).await.map_err(fail)?;
    tx.commit().await.map_err(fail)
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
