//! Forgets: whole weeks by dropping their partition, timeless entries in bounded batches.
//!
//! A week goes in steps, each committed, so that a sweep killed between any two of them is finished by the next one:
//! the drop is announced → what is still open is copied to held → the partition is detached (concurrently: nobody waits)
//! → it is looked at once more, and attached again if someone wrote to it meanwhile → it is dropped.
//!
//! Looking at millions of rows takes longer than dropping them, so a week that is over is counted once and *sealed*
//! (`seal.rs`); unless someone writes to it later, its drop looks at no row.

mod seal;

use sqlx::{AssertSqlSafe, PgConnection};

use super::Inner;
use super::error::translate;
use crate::error::Result;
use crate::ledger::{SweepTerms, Swept, Week};

const WHAT: &str = "sweeping";

/// Pages of the timeless partition looked at in one transaction.
const PAGES: i64 = 4096;

pub(super) async fn sweep(inner: &Inner, terms: SweepTerms) -> Result<Swept> {
    let mut swept = Swept { lost: mark_lost(inner, terms).await?, ..Swept::default() };
    sweep_rows(inner, terms, &mut swept).await?;
    if !terms.dry_run {
        seal::seal(inner).await?;
    }
    let due = due(inner, terms).await?;
    for number in due {
        let week = Week::from_number(number)?;
        if terms.dry_run {
            let (rows, open) = count(inner, number).await?;
            swept.weeks.push((week, rows));
            swept.held += open;
        } else if let Some(rows) = drop_week(inner, number, &mut swept).await? {
            swept.weeks.push((week, rows));
        }
    }
    if !swept.weeks.is_empty() {
        inner.forget_weeks();
    }
    Ok(swept)
}

fn us(terms: SweepTerms) -> i64 {
    i64::try_from(terms.retention.as_micros()).unwrap_or(i64::MAX)
}

async fn execute(connection: &mut PgConnection, sql: String) -> Result<u64> {
    sqlx::raw_sql(AssertSqlSafe(sql))
        .execute(connection)
        .await
        .map(|done| done.rows_affected())
        .map_err(|e| translate(WHAT, e))
}

/// Timeless entries, by ranges of pages: no index is needed, and no transaction is long.
async fn sweep_rows(inner: &Inner, terms: SweepTerms, swept: &mut Swept) -> Result<()> {
    let s = &inner.settings.schema;
    let pages: i64 = {
        let mut connection = inner.begin().await?;
        sqlx::query_scalar(AssertSqlSafe(format!(
            "select pg_relation_size('{s}.entry_0') / current_setting('block_size')::bigint"
        )))
        .persistent(false)
        .fetch_one(&mut *connection)
        .await
        .map_err(|e| translate(WHAT, e))?
    };
    let old = format!(
        "e.at < {s}.ledger_now() - {} * interval '1 microsecond' and e.state in ('D', 'F', 'O', 'S', 'C')",
        us(terms)
    );
    if terms.dry_run {
        let mut connection = inner.begin().await?;
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(format!(
            "select (select count(*) from {s}.entry_0 e where {old}) \
                 + (select count(*) from {s}.held e where {old} and e.week > 0)"
        )))
        .persistent(false)
        .fetch_one(&mut *connection)
        .await
        .map_err(|e| translate(WHAT, e))?;
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
                terms.batch_max
            ),
        )
        .await?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        swept.rows += deleted;
        if deleted < u64::from(terms.batch_max) {
            page += PAGES;
        }
    }
    let mut tx = inner.begin().await?;
    // What ended after its week was gone was kept in held, and is forgotten like everything else.
    swept.rows += execute(&mut tx, format!("delete from {s}.held e where {old} and e.week > 0")).await?;
    execute(
        &mut tx,
        format!(
            "delete from {s}.touch t where t.at < (select max(x.at) from {s}.touch x where x.week = t.week)"
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}

/// Weeks that may go, and weeks whose drop was begun before. Touches are true to the hour, so an hour is added.
async fn due(inner: &Inner, terms: SweepTerms) -> Result<Vec<i16>> {
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    sqlx::query_scalar(AssertSqlSafe(format!(
        "select w.week from ( \
           select substr(c.relname, 7)::smallint as week from pg_class c join pg_namespace n on n.oid = c.relnamespace \
            where n.nspname = '{s}' and c.relkind = 'r' and c.relname ~ '^entry_[1-9][0-9]*$') w \
         where timestamptz '1999-12-27 00:00:00+00' + w.week * interval '168 hours' < {s}.ledger_now() - $1 * interval '1 microsecond' \
           and coalesce((select max(t.at) from {s}.touch t where t.week = w.week), '-infinity') \
               < {s}.ledger_now() - interval '1 hour' - $1 * interval '1 microsecond' order by 1"
    )))
    .persistent(false)
    .bind(us(terms))
    .fetch_all(&mut *connection)
    .await
    .map_err(|e| translate(WHAT, e))
}

/// At-most-once claims whose end is overdue are lost.
async fn mark_lost(inner: &Inner, terms: SweepTerms) -> Result<u64> {
    let s = &inner.settings.schema;
    let overdue = "x.week = a.week and x.scope = a.scope and x.id = a.id and x.token = a.token and x.state = 'C' and x.at = a.at";
    if terms.dry_run {
        let mut connection = inner.begin().await?;
        let rows: i64 = sqlx::query_scalar(AssertSqlSafe(format!(
            "select count(distinct (a.week, a.scope, a.id)) from {s}.awaited a where a.at <= {s}.ledger_now() \
             and (exists (select from {s}.entry x where {overdue}) or exists (select from {s}.held x where {overdue}))"
        )))
        .persistent(false)
        .fetch_one(&mut *connection)
        .await
        .map_err(|e| translate(WHAT, e))?;
        return Ok(rows as u64);
    }
    let mut lost = 0;
    loop {
        let mut tx = inner.begin().await?;
        let (due, marked): (i64, i64) = sqlx::query_as(AssertSqlSafe(format!(
            "with a as (delete from {s}.awaited where ctid = any (array(select ctid from {s}.awaited \
               where at <= {s}.ledger_now() order by at limit $1 for update skip locked)) returning *), \
             m as (update {s}.entry x set state = 'O', note = 'its end was never reported' from a where {overdue} returning 1), \
             k as (update {s}.held x set state = 'O', note = 'its end was never reported' from a where {overdue} returning 1) \
             select (select count(*) from a), (select count(*) from m) + (select count(*) from k)"
        )))
        .persistent(false)
        .bind(i64::from(terms.batch_max.max(1)))
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(WHAT, e))?;
        tx.commit().await.map_err(|e| translate(WHAT, e))?;
        lost += marked as u64;
        if due < i64::from(terms.batch_max.max(1)) {
            return Ok(lost);
        }
    }
}

/// Entries of a week, and how many of them are open.
async fn count(inner: &Inner, week: i16) -> Result<(u64, u64)> {
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    let (rows, open): (i64, i64) = sqlx::query_as(AssertSqlSafe(format!(
        "select count(*), count(*) filter (where state in ('L', 'R', 'X', 'P')) from {s}.entry_{week}"
    )))
    .persistent(false)
    .fetch_one(&mut *connection)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok((rows as u64, open as u64))
}

/// Drops a week; none if someone wrote to it meanwhile and it stays.
async fn drop_week(inner: &Inner, week: i16, swept: &mut Swept) -> Result<Option<u64>> {
    let s = &inner.settings.schema;
    announce(inner, week).await?;
    crate::crash_point!("sweep.announced");
    let sealed = seal::find(inner, week).await?;
    let (rows, held) = match sealed {
        Some(rows) => (rows, 0), // all of it is known to have ended
        None => copy_open(inner, week).await?,
    };
    crate::crash_point!("sweep.copied");
    detach(inner, week).await?;
    crate::crash_point!("sweep.detached");
    let mut tx = inner.begin().await?;
    // Nobody can write to it any more; and if it is still sealed, nobody has.
    let still_sealed = sealed.is_some() && seal::find(inner, week).await?.is_some();
    let late: bool = !still_sealed && sqlx::query_scalar(AssertSqlSafe(format!(
        "select exists (select from {s}.touch t join {s}.dropped d using (week) where t.week = {week} and t.at >= d.at) \
         or exists (select from {s}.entry_{week} e where e.state in ('L', 'R', 'X', 'P') and not exists \
              (select from {s}.held h where h.week = e.week and h.scope = e.scope and h.id = e.id and h.token = e.token))"
    )))
    .persistent(false)
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    if late {
        execute(
            &mut tx,
            format!(
                "alter table {s}.entry attach partition {s}.entry_{week} for values from ({week}) to ({})",
                week + 1
            ),
        )
        .await?;
        execute(&mut tx, format!("delete from {s}.dropped where week = {week}")).await?;
    } else {
        execute(&mut tx, format!("drop table {s}.entry_{week}")).await?;
        execute(&mut tx, format!("delete from {s}.touch where week = {week}")).await?;
    }
    execute(&mut tx, format!("delete from {s}.sealed where week = {week}")).await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    crate::crash_point!("sweep.dropped");
    if late {
        return Ok(None);
    }
    swept.held += held;
    Ok(Some(rows))
}

/// From here on, an id of this week is too old for every scope there is.
async fn announce(inner: &Inner, week: i16) -> Result<()> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    execute(
        &mut tx,
        format!(
            "insert into {s}.dropped (week, at, scope_max) select {week}, {s}.ledger_now(), coalesce(max(number), 0) from {s}.scope \
             on conflict (week) do update set at = excluded.at, scope_max = excluded.scope_max"
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}

async fn copy_open(inner: &Inner, week: i16) -> Result<(u64, u64)> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    let held = execute(
        &mut tx,
        format!(
            "insert into {s}.held select e.* from {s}.entry_{week} e where e.state in ('L', 'R', 'X', 'P') \
             on conflict (scope, id, week) do update set at = excluded.at, token = excluded.token, nonce = excluded.nonce, \
               owner = excluded.owner, attempts = excluded.attempts, flags = excluded.flags, state = excluded.state"
        ),
    )
    .await?;
    let rows: i64 = sqlx::query_scalar(AssertSqlSafe(format!("select count(*) from {s}.entry_{week}")))
        .persistent(false)
        .fetch_one(&mut *tx)
        .await
        .map_err(|e| translate(WHAT, e))?;
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    Ok((rows as u64, held))
}

/// Takes the partition out without making anybody wait; finishes what a killed sweep had begun.
async fn detach(inner: &Inner, week: i16) -> Result<()> {
    let s = &inner.settings.schema;
    let pending: Option<bool> = {
        let mut connection = inner.begin().await?;
        sqlx::query_scalar(AssertSqlSafe(format!(
            "select i.inhdetachpending from pg_inherits i where i.inhrelid = '{s}.entry_{week}'::regclass"
        )))
        .persistent(false)
        .fetch_optional(&mut *connection)
        .await
        .map_err(|e| translate(WHAT, e))?
    };
    let how = match pending {
        None => return Ok(()), // detached before
        Some(true) => "finalize",
        Some(false) => "concurrently",
    };
    // Not possible inside a transaction; waits for those who are writing to the week now.
    let mut connection = inner.pool.acquire().await.map_err(|e| translate(WHAT, e))?;
    execute(&mut connection, format!("alter table {s}.entry detach partition {s}.entry_{week} {how}"))
        .await
        .map(|_| ())
}
