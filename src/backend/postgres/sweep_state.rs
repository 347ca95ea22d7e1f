//! Records when sweeps begin, and detects clock jumps between them.

use sqlx::AssertSqlSafe;

use super::Inner;
use super::codes::from_row;
use super::error::translate;
use super::sweep::WHAT;
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::{SweepSettings, SweepState};

from_row! {
    struct Stored { now: i64, swept_at: Option<i64>, paused_until: Option<i64> }
}

/// Records the start of a sweep, before it removes anything. A dry run only reads.
pub(super) async fn record(inner: &Inner, settings: SweepSettings) -> Result<SweepState> {
    let s = &inner.settings.schema;
    let us = |at: &str| format!("(extract(epoch from {at}) * 1000000)::bigint");
    let mut tx = inner.begin().await?;
    let sql = format!(
        "select {} as now, {} as swept_at, {} as paused_until from {s}.meta {}",
        us(&format!("{s}.ledger_now()")),
        us("swept_at"),
        us("paused_until"),
        if settings.dry_run { "" } else { "for update" }
    );
    let stored: Stored = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(WHAT, e))?;
    let paused_until = stored.paused_until.map(Time::from_micros);
    let before = stored.swept_at.map(|at| SweepState { swept_at: Time::from_micros(at), paused_until });
    let next = SweepState::next(before, Time::from_micros(stored.now), settings.retention);
    if !settings.dry_run {
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
