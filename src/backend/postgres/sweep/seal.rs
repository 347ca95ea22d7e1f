//! Seals weeks that are over: counts their rows once, so that dropping them needs no look at the rows.
//!
//! Whoever writes to a week adds a touch unless there is one of this hour. A seal is made only when the last touch is older
//! than that and no transaction is writing to the week; so whoever writes afterwards adds a touch, and a seal whose touch
//! is not the week's last one is void. Interventions, which do not touch, remove the seal.

use sqlx::AssertSqlSafe;

use super::super::Inner;
use super::super::error::{Meaning, meaning, translate};
use super::{WHAT, execute};
use crate::error::Result;

/// How long to wait for those who are writing to a week that is over. Claims behind this lock wait as long at most.
const LOCK_TIMEOUT: &str = "50ms";

/// The week's last touch, as SQL.
fn last_touch(schema: &str, week: &str) -> String {
    format!("coalesce((select max(t.at) from {schema}.touch t where t.week = {week}), '-infinity')")
}

/// How many rows a sealed week has, if the seal holds and none of them is open.
pub(super) async fn find(inner: &Inner, week: i16) -> Result<Option<u64>> {
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    let rows: Option<i64> = sqlx::query_scalar(AssertSqlSafe(format!(
        "select x.rows from {s}.sealed x where x.week = $1 and x.open = 0 and x.touched = {}",
        last_touch(s, "x.week")
    )))
    .persistent(false)
    .bind(week)
    .fetch_optional(&mut *connection)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok(rows.map(|rows| rows as u64))
}

/// Seals what is over and has no seal that holds.
pub(super) async fn seal(inner: &Inner) -> Result<()> {
    let s = &inner.settings.schema;
    let weeks: Vec<i16> = {
        let mut connection = inner.begin().await?;
        sqlx::query_scalar(AssertSqlSafe(format!(
            "select w.week from ( \
               select substr(c.relname, 7)::smallint as week from pg_inherits i join pg_class c on c.oid = i.inhrelid \
                where i.inhparent = '{s}.entry'::regclass and not i.inhdetachpending and c.relname ~ '^entry_[1-9][0-9]*$') w \
             where timestamptz '1999-12-27 00:00:00+00' + w.week * interval '168 hours' < {s}.ledger_now() \
               and {touch} < {s}.ledger_now() - interval '1 hour' \
               and not exists (select from {s}.sealed x where x.week = w.week and x.touched = {touch} and x.rows is not null) \
             order by 1",
            touch = last_touch(s, "w.week")
        )))
        .persistent(false)
        .fetch_all(&mut *connection)
        .await
        .map_err(|e| translate(WHAT, e))?
    };
    for week in weeks {
        if begin(inner, week).await? {
            count(inner, week).await?;
        }
    }
    Ok(())
}

/// Writes down after which touch the count begins, at a moment when nobody is writing to the week; false if there is none.
async fn begin(inner: &Inner, week: i16) -> Result<bool> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    let sql =
        format!("set local lock_timeout = '{LOCK_TIMEOUT}'; lock table only {s}.entry_{week} in share mode");
    match sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *tx).await {
        Ok(_) => {}
        Err(error) if meaning(&error) == Meaning::Locked => return Ok(false),
        Err(error) => return Err(translate(WHAT, error)),
    }
    let begun = execute(
        &mut tx,
        format!(
            "insert into {s}.sealed (week, touched) select {week}, {touch} \
              where {touch} < {s}.ledger_now() - interval '1 hour' \
             on conflict (week) do update set touched = excluded.touched, rows = null, open = null",
            touch = last_touch(s, &week.to_string())
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    Ok(begun > 0)
}

/// Counts, without any lock. An intervention meanwhile has removed the row, and then there is nothing to fill in.
async fn count(inner: &Inner, week: i16) -> Result<()> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    execute(
        &mut tx,
        format!(
            "update {s}.sealed x set rows = c.rows, open = c.open from ( \
               select count(*) as rows, count(*) filter (where state in ('L', 'R', 'X', 'P')) as open \
                 from {s}.entry_{week}) c \
              where x.week = {week} and x.rows is null"
        ),
    )
    .await?;
    tx.commit().await.map_err(|e| translate(WHAT, e))
}
