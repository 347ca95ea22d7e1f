//! Forgetting old keys: the horizon in a transaction of its own, then a batch in each.
//!
//! No key that was forgotten looks new (clause 9): the horizon is committed before the first key is
//! deleted, and `keys_begin` looks at the horizon after it has inserted a key. An insert that gets past
//! a deletion comes after it, and so after the horizon. Whoever began before the horizon was raised has
//! a row that is not old. So batches need no lock on the horizon, and no request keeps a sweep from
//! going on, or the other way round. A sweep that is killed leaves old keys that are found; the next one
//! forgets them.
//!
//! Sweeps exclude each other in each transaction, by an advisory lock: a batch that is locked by somebody
//! else would look like the last one.

use sqlx::{AssertSqlSafe, PgTransaction};

use super::seen::Seen;
use super::sql::us;
use super::{Inner, fail};
use crate::backend::postgres::database::begin;
use crate::backend::postgres::error::{Meaning, meaning};
use crate::backend::postgres::executor::Repeat;
use crate::clock::Time;
use crate::error::Result;
use crate::keyed::{KeySweep, SweptKeys};
use crate::ledger::SweepState;

const WHAT: &str = "sweeping keys";
/// Begins a transaction of a sweep. If its process stops in it, the server ends it: other sweeps wait for
/// it.
const BEGIN: &str = "BEGIN; SET LOCAL search_path = pg_catalog, pg_temp; \
                     SET LOCAL idle_in_transaction_session_timeout = 60000";
/// How long a transaction of a sweep waits for another sweep's, or for a lock on the horizon. Both are
/// held for one short transaction.
const WAIT: &str = "10s";

/// Sweeps. It forgets everything that is old, or says that it was skipped, or fails.
pub(super) async fn sweep(inner: &Inner, settings: &KeySweep) -> Result<SweptKeys> {
    settings.check()?;
    if settings.dry_run {
        return would_forget(inner, settings).await;
    }
    let Some((mut swept, horizon)) = begin_sweep(inner, settings).await? else {
        return Ok(SweptKeys { skipped: true, ..SweptKeys::default() });
    };
    let Some(horizon) = horizon else { return Ok(swept) };
    let mut repeat = Repeat::statement();
    loop {
        let gone = match batch(inner, settings, horizon).await {
            Ok(gone) => gone,
            // A batch can be repeated: what is gone is gone.
            Err(error) if may_repeat(&error) && repeat.again().await => continue,
            Err(error) => return Err(fail(WHAT, error)),
        };
        repeat = Repeat::statement();
        swept.keys += gone;
        settings.forgot(gone);
        if gone < settings.batch_max as u64 {
            return Ok(swept);
        }
    }
}

fn may_repeat(error: &sqlx::Error) -> bool {
    matches!(meaning(error), Meaning::Doubt | Meaning::Conflict | Meaning::Locked)
}

/// Raises the horizon and stores when this sweep began. `None`: another sweep runs or has just run.
/// Without a horizon there is nothing to forget.
async fn begin_sweep(inner: &Inner, settings: &KeySweep) -> Result<Option<(SweptKeys, Option<Time>)>> {
    let failed = |e: sqlx::Error| fail(WHAT, e);
    let mut tx = begin(&inner.pool, BEGIN).await.map_err(failed)?;
    let alone: bool = lock(inner, &mut tx, "pg_try_advisory_xact_lock").await.map_err(failed)?;
    if !alone {
        return Ok(None);
    }
    let Some(found) = meta(inner, &mut tx, "for update").await? else { return Ok(None) };
    let Some(plan) = settings.plan(found.state, found.now) else { return Ok(None) };
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
        .bind(plan.state.swept_at.as_micros())
        .bind(plan.state.paused_until.map(Time::as_micros))
        .bind(plan.horizon.map(Time::as_micros))
        .execute(&mut *tx)
        .await
        .map_err(failed)?;
    crate::crash_point!("keyed.sweep.commit");
    tx.commit().await.map_err(failed)?;
    let swept = SweptKeys { paused_until: plan.state.paused_until, ..SweptKeys::default() };
    Ok(Some((swept, plan.horizon)))
}

/// Forgets one batch.
async fn batch(inner: &Inner, settings: &KeySweep, horizon: Time) -> sqlx::Result<u64> {
    let mut tx = begin(&inner.pool, BEGIN).await?;
    sqlx::query("select set_config('hapax.maintenance', 'on', true)")
        .persistent(false)
        .execute(&mut *tx)
        .await?;
    lock::<()>(inner, &mut tx, "pg_advisory_xact_lock").await?;
    let gone = forget(inner, &mut tx, settings, horizon).await?;
    crate::crash_point!("keyed.sweep.commit");
    tx.commit().await?;
    Ok(gone)
}

/// Takes the lock of sweeps until the transaction ends, with this function. Locks are waited for only for
/// a while from here on.
async fn lock<T>(inner: &Inner, tx: &mut PgTransaction<'_>, function: &str) -> sqlx::Result<T>
where
    T: for<'r> sqlx::Decode<'r, sqlx::Postgres> + sqlx::Type<sqlx::Postgres> + Send + Unpin,
{
    let wait = format!("set local lock_timeout = '{WAIT}'");
    sqlx::query(AssertSqlSafe(wait)).persistent(false).execute(&mut **tx).await?;
    let sql = format!("select {function}(hashtextextended('hapax.keys.sweep', hashtextextended($1, 0)))");
    let row = sqlx::query_scalar(AssertSqlSafe(sql)).persistent(false).bind(&inner.settings.schema);
    row.fetch_one(&mut **tx).await
}

struct Meta {
    now: Time,
    state: Option<SweepState>,
}

async fn meta(inner: &Inner, tx: &mut PgTransaction<'_>, lock: &str) -> Result<Option<Meta>> {
    let s = &inner.settings.schema;
    // The rest of the transaction sees the keys of all tenants.
    let sql = format!(
        "select {}, {}, {}, set_config('hapax.maintenance', 'on', true) from {s}.keys_meta {lock}",
        us(&format!("{s}.keys_now()")),
        us("swept_at"),
        us("paused_until")
    );
    let row: Option<(i64, Option<i64>, Option<i64>, String)> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_optional(&mut **tx)
        .await
        .map_err(|e| fail(WHAT, e))?;
    Ok(row.map(|(now, swept_at, paused_until, _)| {
        let paused_until = paused_until.map(Time::from_micros);
        let state = swept_at.map(|at| SweepState { swept_at: Time::from_micros(at), paused_until });
        Meta { now: Time::from_micros(now), state }
    }))
}

/// What is old: keys settled before the horizon, and those that failed, were free to run again, and
/// never did.
const OLD: [&str; 2] = ["k.aged_from < h.at", "k.aged_from is null and k.held_until < h.at"];
const HORIZON: &str = "with h as (select 'epoch'::timestamptz + $1 * interval '1 microsecond' as at)";

/// Counts what a sweep would forget.
async fn would_forget(inner: &Inner, settings: &KeySweep) -> Result<SweptKeys> {
    Seen::by(inner, None).await?; // a role that sees one tenant only would count too few
    let mut tx = begin(&inner.pool, BEGIN).await.map_err(|e| fail(WHAT, e))?;
    let found = meta(inner, &mut tx, "").await?;
    let Some(plan) = found.and_then(|meta| settings.plan(meta.state, meta.now)) else {
        return Ok(SweptKeys { skipped: true, ..SweptKeys::default() });
    };
    let mut swept = SweptKeys { paused_until: plan.state.paused_until, ..SweptKeys::default() };
    for old in OLD.iter().filter(|_| plan.horizon.is_some()) {
        let sql = format!("{HORIZON} select count(*) from {}.keys k, h where {old}", inner.settings.schema);
        let count: i64 = sqlx::query_scalar(AssertSqlSafe(sql))
            .persistent(false)
            .bind(plan.horizon.map(Time::as_micros))
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| fail(WHAT, e))?;
        swept.keys += u64::try_from(count).unwrap_or(0);
    }
    Ok(swept)
}

/// Deletes one batch.
async fn forget(
    inner: &Inner,
    tx: &mut PgTransaction<'_>,
    settings: &KeySweep,
    horizon: Time,
) -> sqlx::Result<u64> {
    let s = &inner.settings.schema;
    let mut gone = 0;
    for old in OLD {
        let sql = format!(
            "{HORIZON} delete from {s}.keys k using (select k.tenant, k.key from {s}.keys k, h where {old} \
             limit $2 for update of k skip locked) old where k.tenant = old.tenant and k.key = old.key"
        );
        let left = i64::try_from(settings.batch_max as u64 - gone).unwrap_or(i64::MAX);
        let done = sqlx::query(AssertSqlSafe(sql))
            .persistent(false)
            .bind(horizon.as_micros())
            .bind(left)
            .execute(&mut **tx)
            .await?;
        gone += done.rows_affected();
    }
    Ok(gone)
}
