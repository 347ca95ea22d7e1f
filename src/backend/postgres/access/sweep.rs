//! Forgetting old audit rows, a batch in each transaction.

use sqlx::{AssertSqlSafe, PgTransaction};

use super::{Inner, fail, us};
use crate::access::{AuditSweep, SweptAudit};
use crate::backend::postgres::database::{BEGIN_BRIEFLY, begin};
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::SweepState;

const WHAT: &str = "sweeping audit rows";

pub(super) async fn sweep(inner: &Inner, settings: &AuditSweep) -> Result<SweptAudit> {
    settings.check()?;
    let skipped = SweptAudit { skipped: true, ..SweptAudit::default() };
    let mut tx = begin(inner.pool(), BEGIN_BRIEFLY).await.map_err(|e| fail(WHAT, e))?;
    let Some((now, before)) = lock(inner, &mut tx).await? else { return Ok(skipped) };
    let Some(plan) = settings.plan(before, now) else { return Ok(skipped) };
    let mut swept = SweptAudit { paused_until: plan.state.paused_until, ..SweptAudit::default() };
    let s = &inner.schema;
    let sql = format!(
        "update {s}.access_meta set swept_at = 'epoch'::timestamptz + $1 * interval '1 microsecond', \
         paused_until = 'epoch'::timestamptz + $2 * interval '1 microsecond'"
    );
    sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(plan.state.swept_at.as_micros())
        .bind(plan.state.paused_until.map(Time::as_micros))
        .execute(&mut *tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    let Some(horizon) = plan.horizon else {
        tx.commit().await.map_err(|e| fail(WHAT, e))?;
        return Ok(swept);
    };
    loop {
        let gone = forget(inner, &mut tx, horizon, settings.batch_max).await?;
        crate::crash_point!("access.sweep.commit");
        tx.commit().await.map_err(|e| fail(WHAT, e))?;
        swept.rows += gone;
        if gone < settings.batch_max as u64 {
            return Ok(swept);
        }
        tx = begin(inner.pool(), BEGIN_BRIEFLY).await.map_err(|e| fail(WHAT, e))?;
        if lock(inner, &mut tx).await?.is_none() {
            return Ok(swept); // another sweep goes on with it
        }
    }
}

/// Locks out other sweeps until the transaction ends; `None` if one is under way.
async fn lock(inner: &Inner, tx: &mut PgTransaction<'_>) -> Result<Option<(Time, Option<SweepState>)>> {
    let s = &inner.schema;
    let (now, swept_at) = (us(&format!("{s}.access_now()")), us("swept_at"));
    let sql = format!(
        "select {now}, {swept_at}, {} from {s}.access_meta for update skip locked",
        us("paused_until")
    );
    let row: Option<(i64, Option<i64>, Option<i64>)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    Ok(row.map(|(now, swept_at, paused_until)| {
        let paused_until = paused_until.map(Time::from_micros);
        let state = swept_at.map(|at| SweepState { swept_at: Time::from_micros(at), paused_until });
        (Time::from_micros(now), state)
    }))
}

async fn forget(inner: &Inner, tx: &mut PgTransaction<'_>, horizon: Time, batch_max: usize) -> Result<u64> {
    let s = &inner.schema;
    let sql = format!(
        "delete from {s}.access_audit a using (select o.number from {s}.access_audit o \
         where o.at < 'epoch'::timestamptz + $1 * interval '1 microsecond' limit $2) old where a.number = old.number"
    );
    let done = sqlx::query(AssertSqlSafe(sql))
        .persistent(false)
        .bind(horizon.as_micros())
        .bind(i64::try_from(batch_max).unwrap_or(i64::MAX))
        .execute(&mut **tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    Ok(done.rows_affected())
}
