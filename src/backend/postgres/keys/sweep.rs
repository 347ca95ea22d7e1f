//! Forgetting old keys, a batch in each transaction.

use sqlx::{AssertSqlSafe, PgTransaction};

use super::{Inner, fail, us};
use crate::backend::postgres::BEGIN;
use crate::backend::postgres::database::begin;
use crate::clock::Time;
use crate::error::Result;
use crate::keyed::{KeySweep, SweptKeys};
use crate::ledger::Pace;

const WHAT: &str = "sweeping keys";

/// Sweeps. The horizon is committed before, or with, the first key that goes; whoever does not find a
/// key afterwards finds the horizon.
pub(super) async fn sweep(inner: &Inner, terms: &KeySweep) -> Result<SweptKeys> {
    terms.check()?;
    let mut swept = SweptKeys::default();
    let mut tx = begin(&inner.pool, BEGIN).await.map_err(|e| fail(WHAT, e))?;
    let Some(meta) = lock(inner, &mut tx).await? else {
        return Ok(SweptKeys { skipped: true, ..swept });
    };
    let Some(plan) = terms.plan(meta.pace, meta.now) else {
        return Ok(SweptKeys { skipped: true, ..swept });
    };
    swept.paused_until = plan.pace.paused_until;
    let s = &inner.settings.schema;
    let time = |at: &str| format!("'epoch'::timestamptz + {at} * interval '1 microsecond'");
    let sql = format!(
        "update {s}.keys_meta set swept_at = {}, paused_until = {}, horizon = greatest(horizon, {})",
        time("$1"),
        time("$2"),
        time("$3")
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(plan.pace.swept_at.as_micros())
        .bind(plan.pace.paused_until.map(Time::as_micros))
        .bind(plan.horizon.map(Time::as_micros))
        .execute(&mut *tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    let Some(horizon) = plan.horizon else {
        tx.commit().await.map_err(|e| fail(WHAT, e))?;
        return Ok(swept);
    };
    loop {
        let gone = forget(inner, &mut tx, terms, horizon).await?;
        crate::crash_point!("keyed.sweep.commit");
        tx.commit().await.map_err(|e| fail(WHAT, e))?;
        swept.keys += gone;
        if gone < terms.batch_max as u64 {
            return Ok(swept);
        }
        tx = begin(&inner.pool, BEGIN).await.map_err(|e| fail(WHAT, e))?;
        if lock(inner, &mut tx).await?.is_none() {
            return Ok(swept); // another sweep goes on with it
        }
    }
}

struct Meta {
    now: Time,
    pace: Option<Pace>,
}

/// Locks out other sweeps until the transaction ends; `None` if one is under way, or a request with an
/// old key.
async fn lock(inner: &Inner, tx: &mut PgTransaction<'_>) -> Result<Option<Meta>> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select {}, {}, {} from {s}.keys_meta for update skip locked",
        us(&format!("{s}.keys_now()")),
        us("swept_at"),
        us("paused_until")
    );
    let row: Option<(i64, Option<i64>, Option<i64>)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    Ok(row.map(|(now, swept_at, paused_until)| {
        let paused_until = paused_until.map(Time::from_micros);
        let pace = swept_at.map(|at| Pace { swept_at: Time::from_micros(at), paused_until });
        Meta { now: Time::from_micros(now), pace }
    }))
}

/// Deletes one batch: keys settled before the horizon, then those that failed, were free to run again,
/// and never did.
async fn forget(inner: &Inner, tx: &mut PgTransaction<'_>, terms: &KeySweep, horizon: Time) -> Result<u64> {
    let s = &inner.settings.schema;
    let mut gone = 0;
    for old in ["k.aged_from < h.at", "k.aged_from is null and k.held_until < h.at"] {
        let sql = format!(
            "with h as (select 'epoch'::timestamptz + $1 * interval '1 microsecond' as at) \
             delete from {s}.keys k using (select k.tenant, k.key from {s}.keys k, h where {old} \
             limit $2 for update of k skip locked) old where k.tenant = old.tenant and k.key = old.key"
        );
        let left = i64::try_from(terms.batch_max as u64 - gone).unwrap_or(i64::MAX);
        let done = sqlx::query(AssertSqlSafe(sql))
            .persistent(false)
            .bind(horizon.as_micros())
            .bind(left)
            .execute(&mut **tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        gone += done.rows_affected();
    }
    Ok(gone)
}
