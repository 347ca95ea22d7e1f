//! Removes old entries: whole weeks by dropping their partition ([`super::week`]), timeless entries
//! in bounded batches.

use std::fmt;
use std::time::Instant;

use sqlx::{AssertSqlSafe, PgConnection};

use super::codes::{self, from_row, micros};
use super::error::translate;
use super::{Inner, held, sweep_state, week};
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::{State, SweepSettings, Swept, Week};

pub(super) const WHAT: &str = "sweeping";

/// How many pages of the timeless partition one transaction scans.
const PAGES: i64 = 4096;

/// Runs one sweep. Tests limit how many steps of each week's drop it takes.
pub(super) async fn sweep(inner: &Inner, mut settings: SweepSettings, steps: u32) -> Result<Swept> {
    settings.batch_max = settings.batch_max.max(1);
    let state = sweep_state::record(inner, settings).await?;
    // While sweeps are paused nothing is old, but drops that have begun are finished.
    let bounded = state.apply(settings);
    let mut swept = Swept { paused_until: state.paused_until, ..Swept::default() };
    swept.lost = mark_lost(inner, settings).await?;
    let now = Present::of(inner, state.swept_at);
    sweep_rows(inner, &now, bounded, &mut swept).await?;
    if !settings.dry_run {
        held::forget_markers(inner, &now, micros(bounded.retention)).await?;
    }
    let end = Instant::now() + inner.settings.sweep_patience;
    for due in due(inner, &now, bounded).await? {
        let week = Week::from_number(due.week)?;
        let leaving = week::Leaving { inner, week, partition: due.number, settings, now: &now, end };
        let gone = if settings.dry_run { leaving.count().await? } else { leaving.go_on(steps).await? };
        if let Some(gone) = gone {
            swept.weeks.push((week, gone.rows.saturating_sub(gone.held)));
            swept.held += gone.held;
        }
    }
    if !swept.weeks.is_empty() {
        inner.forget_weeks();
    }
    Ok(swept)
}

/// The current time of one sweep, in SQL: the ledger's clock, but never later than the time at
/// which the clock was checked for jumps. A jump during the sweep makes nothing older.
pub(super) struct Present(String);

impl Present {
    fn of(inner: &Inner, checked: Time) -> Self {
        let (s, us) = (&inner.settings.schema, checked.as_micros());
        Present(format!("least({s}.ledger_now(), timestamptz 'epoch' + {us} * interval '1 microsecond')"))
    }
}

impl fmt::Display for Present {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

pub(super) async fn execute(connection: &mut PgConnection, sql: String) -> Result<u64> {
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(connection)
        .await
        .map(|done| done.rows_affected())
        .map_err(|e| translate(WHAT, e))
}

/// Deletes timeless entries by ranges of pages: this needs no index, and transactions stay short.
async fn sweep_rows(inner: &Inner, now: &Present, settings: SweepSettings, swept: &mut Swept) -> Result<()> {
    let s = &inner.settings.schema;
    let pages = format!("select pg_relation_size('{s}.entry_0') / current_setting('block_size')::bigint");
    let (pages,): (i64,) = inner.fetch_one(WHAT, sqlx::query_as(AssertSqlSafe(pages))).await?;
    let ended = codes::list(State::ALL.into_iter().filter(|state| !state.is_open()));
    let old = format!(
        "e.at < {now} - {} * interval '1 microsecond' and e.state in {ended}",
        micros(settings.retention)
    );
    if settings.dry_run {
        let sql = format!(
            "select (select count(*) from {s}.entry_0 e where {old}) \
                 + (select count(*) from {s}.held e where e.week > 0 and {old} and not exists \
                   (select from {s}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id))"
        );
        let (rows,): (i64,) = inner.fetch_one(WHAT, sqlx::query_as(AssertSqlSafe(sql))).await?;
        swept.rows += rows as u64;
        return Ok(());
    }
    let mut page = 0;
    while page < pages {
        let range = format!("e.ctid >= '({page},0)'::tid and e.ctid < '({},0)'::tid", page + PAGES);
        let mut tx = inner.begin().await?;
        let deleted = execute(
            &mut tx,
            format!(
                "delete from {s}.entry_0 where ctid = any (array(select e.ctid from {s}.entry_0 e \
                 where {range} and {old} limit {} for update skip locked))",
                settings.batch_max
            ),
        )
        .await?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        swept.rows += deleted;
        if deleted < u64::from(settings.batch_max) {
            page += PAGES;
        }
    }
    let mut tx = inner.begin().await?;
    // Entries that ended after their week was dropped are in `held`, under the same retention.
    let alone = format!(
        "{old} and not exists (select from {s}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id)"
    );
    swept.rows += execute(&mut tx, format!("delete from {s}.held e where e.week > 0 and {alone}")).await?;
    // The bytes of timeless entries that were deleted, and counted, above.
    execute(&mut tx, format!("delete from {s}.held e where e.week = 0 and {alone}")).await?;
    execute(
        &mut tx,
        format!(
            "delete from {s}.touch t where t.at < (select max(x.at) from {s}.touch x where x.week = t.week)"
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}

from_row! {
    /// A week and the number in its partition's name.
    struct DueWeek { week: i16, number: i64 }
}

/// Weeks whose drop has begun, and weeks that may be dropped. Touches are accurate to the hour, so
/// an hour is added.
async fn due(inner: &Inner, now: &Present, settings: SweepSettings) -> Result<Vec<DueWeek>> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select w.week, w.number from ( \
           select split_part(c.relname, '_', 2)::smallint as week, split_part(c.relname, '_', 3)::bigint as number \
             from pg_inherits i join pg_class c on c.oid = i.inhrelid \
            where i.inhparent = '{s}.entry'::regclass and c.relname ~ '^entry_[1-9][0-9]*_[0-9]+$') w \
         where not exists (select from {s}.dropped d where d.week = w.week and d.phase is not null) \
           and timestamptz '1999-12-27 00:00:00+00' + w.week * interval '168 hours' < {now} - $1 * interval '1 microsecond' \
           and coalesce((select max(t.at) from {s}.touch t where t.week = w.week), '-infinity') \
               < {now} - interval '1 hour' - $1 * interval '1 microsecond' \
         union all select d.week, d.number from {s}.dropped d where d.phase is not null order by 1"
    );
    inner.fetch_all(WHAT, sqlx::query_as(AssertSqlSafe(sql)).bind(micros(settings.retention))).await
}

from_row! { "o_",
    /// How many awaited claims were due, and how many of them were marked as lost.
    struct Marked { due: i64, lost: i64 }
}

/// Marks at-most-once claims as lost when their end is overdue.
async fn mark_lost(inner: &Inner, settings: SweepSettings) -> Result<u64> {
    let s = &inner.settings.schema;
    if settings.dry_run {
        let overdue = format!(
            "x.week = a.week and x.scope = a.scope and x.id = a.id and x.token = a.token and x.state in {} and x.at = a.at",
            codes::list([State::Claimed])
        );
        let sql = format!(
            "select count(distinct (a.week, a.scope, a.id)) from {s}.awaited a where a.at <= {s}.ledger_now() \
             and (exists (select from {s}.entry x where {overdue}) or exists (select from {s}.held x where {overdue}))"
        );
        let (rows,): (i64,) = inner.fetch_one(WHAT, sqlx::query_as(AssertSqlSafe(sql))).await?;
        return Ok(rows as u64);
    }
    let mut lost = 0;
    loop {
        let mut tx = inner.begin().await?;
        let marked: Marked = sqlx::query_as(AssertSqlSafe(format!("select * from {s}.mark_lost($1)")))
            .persistent(false)
            .bind(i32::try_from(settings.batch_max).unwrap_or(i32::MAX))
            .fetch_one(&mut *tx)
            .await
            .map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        lost += marked.lost as u64;
        if marked.due < i64::from(settings.batch_max) {
            return Ok(lost);
        }
    }
}
