//! Records when sweeps begin, and detects clock jumps between them.

use sqlx::AssertSqlSafe;

use super::Inner;
use super::error::translate;
use super::sweep::WHAT;
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::{Pace, SweepSettings};

/// Records the start of a sweep, before it removes anything. A dry run only reads.
pub(super) async fn keep(inner: &Inner, terms: SweepSettings) -> Result<Pace> {
    let s = &inner.settings.schema;
    let us = |at: &str| format!("(extract(epoch from {at}) * 1000000)::bigint");
    let mut tx = inner.begin().await?;
    let sql = format!(
        "select {}, {}, {} from {s}.meta {}",
        us(&format!("{s}.ledger_now()")),
        us("swept_at"),
        us("paused_until"),
        if terms.dry_run { "" } else { "for update" }
    );
    let (now, swept_at, paused_until): (i64, Option<i64>, Option<i64>) = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(WHAT, e))?;
    let paused_until = paused_until.map(Time::from_micros);
    let before = swept_at.map(|at| Pace { swept_at: Time::from_micros(at), paused_until });
    let next = Pace::next(before, Time::from_micros(now), terms.retention);
    if !terms.dry_run {
        let sql = format!(
            "update {s}.meta set swept_at = 'epoch'::timestamptz + $1 * interval '1 microsecond', \
             paused_until = 'epoch'::timestamptz + $2 * interval '1 microsecond'"
        );
        sqlx::query(AssertSqlSafe(sql))
            .bind(next.swept_at.as_micros())
            .bind(next.paused_until.map(Time::as_micros))
            .persistent(false)
            .execute(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
    }
    Ok(next)
}
