//! Seals: a week that is over and quiet is counted once, ahead of its drop, so that dropping it looks at no row.
//!
//! A seal says how many rows there are, which of them are open, and which touches of the week it has seen. It is void as
//! soon as there is a touch that it has not seen, so everything hangs on this: *whoever writes to the week and was not
//! counted leaves a touch that was not seen.* A writer leaves none only if it finds one that is less than an hour old by
//! the time it has written (`touch_weeks`). Hence two steps:
//!
//! 1. *Mark*: all touches there are lie an hour back or more. The transaction that marks notes its own number.
//! 2. *Count*, once no transaction with a lower number is open, in one snapshot with the touches. Whoever is not counted
//!    got its number after the mark, and looked at the clock after that: every touch of before is too old for it, so it has
//!    added one, however long its transaction takes, in whatever isolation.

use sqlx::{AssertSqlSafe, PgConnection};

use super::Inner;
use super::error::translate;
use super::sweep::{OPEN, WHAT, execute, is_anothers, us};
use crate::error::Result;
use crate::ledger::SweepTerms;

/// Weeks are left alone for so long before they are counted, so that a trickle of late events does not have them counted
/// over and over.
const QUIET_US: i64 = 6 * 3_600_000_000;
/// Touches are true to the hour.
const HOUR_US: i64 = 3_600_000_000;
/// More open rows than this are not remembered by key, but looked for when the week goes.
const KEYS_MAX: i64 = 10_000;

/// What a seal says.
#[derive(Debug, Clone, Copy)]
pub(super) struct Seal {
    pub rows: u64,
    pub open: u64,
    /// Whether it knows the open rows by key.
    pub keyed: bool,
}

/// A touch of week {week} that seal s has not seen.
fn unseen(schema: &str, week: &str) -> String {
    format!("exists (select from {schema}.touch t where t.week = {week} and not t.number = any (s.seen))")
}

/// Seals what can be sealed now. What cannot, because a transaction of before is still open, is sealed by a later sweep.
pub(super) async fn seal_weeks(inner: &Inner, terms: SweepTerms) -> Result<()> {
    let s = &inner.settings.schema;
    let quiet = QUIET_US.min(us(terms).saturating_add(HOUR_US));
    let weeks: Vec<i16> = {
        let mut tx = inner.begin().await?;
        sqlx::query_scalar(AssertSqlSafe(format!(
            "select w.week from ( \
               select substr(c.relname, 7)::smallint as week from pg_inherits i join pg_class c on c.oid = i.inhrelid \
                where i.inhparent = '{s}.entry'::regclass and not i.inhdetachpending and c.relname ~ '^entry_[1-9][0-9]*$') w \
             left join {s}.sealed s on s.week = w.week \
             where timestamptz '1999-12-27 00:00:00+00' + w.week * interval '168 hours' < {s}.ledger_now() - $1 * interval '1 microsecond' \
               and coalesce((select max(t.at) from {s}.touch t where t.week = w.week), '-infinity') \
                   < {s}.ledger_now() - $1 * interval '1 microsecond' \
               and (s.rows is null or {}) order by 1",
            unseen(s, "w.week")
        )))
        .persistent(false)
        .bind(quiet)
        .fetch_all(&mut *tx)
        .await
        .map_err(|e| translate(WHAT, e))?
    };
    for week in weeks {
        match seal_week(inner, week, quiet).await {
            Err(error) if !is_anothers(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

async fn seal_week(inner: &Inner, week: i16, quiet: i64) -> Result<()> {
    mark(inner, week, quiet).await?;
    crate::crash_point!("sweep.marked");
    count(inner, week, quiet).await?;
    crate::crash_point!("sweep.sealed");
    Ok(())
}

/// Begins a seal, unless one is begun that can still be finished: nobody has touched the week since, and it is not stuck (its
/// number is from another server, or from a transaction that never ends).
async fn mark(inner: &Inner, week: i16, quiet: i64) -> Result<()> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    // The number of this very transaction: lower ones were given out before. (A snapshot's xmax will not do: it is the first
    // that had not ended, not the first that was free.)
    execute(
        &mut tx,
        format!(
            "insert into {s}.sealed as s (week, at, mark) values ({week}, {s}.ledger_now(), pg_current_xact_id()) \
             on conflict (week) do update set at = excluded.at, mark = excluded.mark, rows = null, scopes = null, ids = null \
             where s.rows is not null or s.at < excluded.at - interval '1 day' or exists (select from {s}.touch t \
               where t.week = {week} and t.at >= s.at - {quiet} * interval '1 microsecond')"
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}

/// Finishes a seal, if every transaction of before the mark has ended.
async fn count(inner: &Inner, week: i16, quiet: i64) -> Result<()> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    // One snapshot for all that follows. Another sweeper that marks or drops meanwhile makes the last statement fail.
    execute(&mut tx, "set transaction isolation level repeatable read".into()).await?;
    let seen: Option<Vec<i64>> = sqlx::query_scalar(AssertSqlSafe(format!(
        "select array(select t.number from {s}.touch t where t.week = {week}) from {s}.sealed s \
          where s.week = {week} and s.rows is null and s.mark < pg_snapshot_xmin(pg_current_snapshot()) \
            and not exists (select from {s}.touch t where t.week = {week} and t.at >= s.at - {quiet} * interval '1 microsecond')"
    )))
    .persistent(false)
    .fetch_optional(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    let Some(seen) = seen else { return Ok(()) };
    let (rows, open): (i64, i64) = sqlx::query_as(AssertSqlSafe(format!(
        "select count(*), count(*) filter (where state in {OPEN}) from {s}.entry_{week}"
    )))
    .persistent(false)
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    let keys = if (1..=KEYS_MAX).contains(&open) {
        "(select array_agg(scope) from open), (select array_agg(id) from open)"
    } else {
        "null::int[], null::bytea[]" // and what is not asked for is not looked for
    };
    sqlx::query(AssertSqlSafe(format!(
        "with open as materialized (select scope, id from {s}.entry_{week} where state in {OPEN}) \
         update {s}.sealed set (rows, open, seen, scopes, ids) = (select $1::bigint, $2::bigint, $3::bigint[], {keys}) \
         where week = {week} and rows is null"
    )))
    .persistent(false)
    .bind(rows)
    .bind(open)
    .bind(seen)
    .execute(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}

/// The seal of a week, if it has one that is not void.
pub(super) async fn seal_of(s: &str, tx: &mut PgConnection, week: i16) -> Result<Option<Seal>> {
    let seal: Option<(i64, i64, bool)> = sqlx::query_as(AssertSqlSafe(format!(
        "select s.rows, s.open, s.ids is not null or s.open = 0 from {s}.sealed s \
          where s.week = {week} and s.rows is not null and not {}",
        unseen(s, &week.to_string())
    )))
    .persistent(false)
    .fetch_optional(tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok(seal.map(|(rows, open, keyed)| Seal { rows: rows as u64, open: open as u64, keyed }))
}
