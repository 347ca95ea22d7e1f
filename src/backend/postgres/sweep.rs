//! Forgets: whole weeks by dropping their partition, timeless entries in bounded batches.
//!
//! A week goes in steps, each committed, so that a sweep killed between any two of them is finished by the next one:
//! the drop is announced → what is still open is copied to held → the partition is detached (concurrently: nobody waits)
//! → it is attached again if someone wrote to it meanwhile → it is dropped. A week that was sealed ([`super::seal`]) is
//! looked at through its seal; only one that could not be sealed is looked at row by row, before it is detached and after.
//!
//! While a partition is attached its rows are the truth, and copies in held follow them; once it is detached held is the
//! truth, and a late copy would undo what was settled there since. So copying happens under a lock that keeps the
//! partition attached, and two sweepers at once are one sweeper and an onlooker.

use sqlx::{AssertSqlSafe, PgConnection};

use super::Inner;
use super::error::translate;
use super::{held, pace, seal};
use crate::error::{Error, Result};
use crate::ledger::{SweepTerms, Swept, Week};

pub(super) const WHAT: &str = "sweeping";

/// States that must outlive their week.
pub(super) const OPEN: &str = "('L', 'R', 'X', 'P')";
/// What a row of a week and its copy in held have in common, but for the key.
const COLUMNS: [&str; 16] = [
    "first_at",
    "at",
    "token",
    "nonce",
    "owner",
    "attempts",
    "flags",
    "state",
    "fingerprint",
    "seq",
    "aggregate",
    "partition",
    "\"offset\"",
    "topic",
    "note",
    "metadata",
];

/// Pages of the timeless partition looked at in one transaction.
const PAGES: i64 = 4096;

pub(super) async fn sweep(inner: &Inner, mut terms: SweepTerms) -> Result<Swept> {
    terms.batch_max = terms.batch_max.max(1);
    let pace = pace::keep(inner, terms).await?;
    terms = pace.terms(terms); // from here on: while sweeps are paused, nothing is old
    let mut swept = Swept { paused_until: pace.paused_until, ..Swept::default() };
    swept.lost = mark_lost(inner, terms).await?;
    sweep_rows(inner, terms, &mut swept).await?;
    if !terms.dry_run {
        held::forget_markers(inner, us(terms)).await?;
        seal::seal_weeks(inner, terms).await?;
    }
    for number in due(inner, terms).await? {
        let week = Week::from_number(number)?;
        if terms.dry_run {
            let (rows, open) = count(inner, number).await?;
            swept.weeks.push((week, rows));
            swept.held += open;
        } else if let Some(rows) = drop_week(inner, number, terms, &mut swept).await? {
            swept.weeks.push((week, rows));
        }
    }
    if !swept.weeks.is_empty() {
        inner.forget_weeks();
    }
    Ok(swept)
}

pub(super) fn us(terms: SweepTerms) -> i64 {
    i64::try_from(terms.retention.as_micros()).unwrap_or(i64::MAX)
}

pub(super) async fn execute(connection: &mut PgConnection, sql: String) -> Result<u64> {
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
                 + (select count(*) from {s}.held e where e.week > 0 and {old} and not exists \
                   (select from {s}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id))"
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
    // Not while its week is half dropped: what is in there would be taken for the newer one.
    let alone = format!(
        "{old} and not exists (select from {s}.entry x where x.week = e.week and x.scope = e.scope and x.id = e.id) \
         and not exists (select from {s}.dropped d where d.week = e.week and d.barred is distinct from d.scope_max)"
    );
    swept.rows += execute(&mut tx, format!("delete from {s}.held e where e.week > 0 and {alone}")).await?;
    // The bytes of timeless ones that went above; they were counted there.
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

/// Weeks that may go, and weeks whose drop was begun before. Touches are true to the hour, so an hour is added.
async fn due(inner: &Inner, terms: SweepTerms) -> Result<Vec<i16>> {
    let s = &inner.settings.schema;
    let mut connection = inner.begin().await?;
    sqlx::query_scalar(AssertSqlSafe(format!(
        "select w.week from ( \
           select substr(c.relname, 7)::smallint as week from pg_class c join pg_namespace n on n.oid = c.relnamespace \
            where n.nspname = '{s}' and c.relkind = 'r' and c.relname ~ '^entry_[1-9][0-9]*$') w \
         where not exists (select from pg_inherits i where i.inhrelid = to_regclass('{s}.entry_' || w.week) \
                and not i.inhdetachpending) \
            or timestamptz '1999-12-27 00:00:00+00' + w.week * interval '168 hours' < {s}.ledger_now() - $1 * interval '1 microsecond' \
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
             m as (update {s}.entry x set state = 'O', note = 'its end was never reported' from a where {overdue} returning x.week, x.scope, x.id), \
             k as (update {s}.held x set state = 'O', note = 'its end was never reported' from a where {overdue} returning x.week, x.scope, x.id) \
             select (select count(*) from a), (select count(*) from (select * from m union select * from k) u)"
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
    if let Some(seal) = seal::seal_of(s, &mut connection, week).await? {
        return Ok((seal.rows, seal.open));
    }
    let (rows, open): (i64, i64) = sqlx::query_as(AssertSqlSafe(format!(
        "select count(*), count(*) filter (where state in {OPEN}) from {s}.entry_{week}"
    )))
    .persistent(false)
    .fetch_one(&mut *connection)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok((rows as u64, open as u64))
}

/// Drops a week; none if it stays, because someone wrote to it meanwhile or another sweeper is at it.
async fn drop_week(inner: &Inner, week: i16, terms: SweepTerms, swept: &mut Swept) -> Result<Option<u64>> {
    match drop_steps(inner, week, terms, swept).await {
        Err(error) if is_anothers(&error) => Ok(None),
        other => other,
    }
}

/// Whether an error says that someone else is at it: the table is gone, is being detached, or two met in a deadlock that
/// the other one survived. Whatever is left to do, the next sweep does.
pub(super) fn is_anothers(error: &Error) -> bool {
    let code = std::error::Error::source(error)
        .and_then(|source| source.downcast_ref::<sqlx::Error>())
        .and_then(|error| error.as_database_error())
        .and_then(|error| error.code().map(std::borrow::Cow::into_owned));
    matches!(error, Error::Schema(_) | Error::Contended { .. })
        || matches!(code.as_deref(), Some("55000" | "42P01"))
}

async fn drop_steps(inner: &Inner, week: i16, terms: SweepTerms, swept: &mut Swept) -> Result<Option<u64>> {
    let s = &inner.settings.schema;
    let looked = match announce(inner, week, terms).await? {
        Announced::Now => {
            crate::crash_point!("sweep.announced");
            let looked = copy_open(inner, week).await?;
            crate::crash_point!("sweep.copied");
            detach(inner, week).await?;
            looked
        }
        Announced::Before => {
            detach(inner, week).await?; // what a killed sweep had begun
            None
        }
        Announced::NotDue => return Ok(None),
    };
    crate::crash_point!("sweep.detached");
    let mut tx = inner.begin().await?;
    let mut late: bool = sqlx::query_scalar(AssertSqlSafe(format!(
        "select exists (select from {s}.touch t join {s}.dropped d using (week) \
                        where t.week = {week} and not t.number = any (d.seen))"
    )))
    .persistent(false)
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    let held = looked.map_or(0, |looked| looked.open);
    let rows = match looked {
        // Nobody has written since it was sealed, or it would be late.
        Some(looked) if looked.sealed => looked.rows,
        _ if late => 0,
        _ => {
            let (rows, newer) = look_again(s, &mut tx, week).await?;
            late = newer;
            rows
        }
    };
    if late {
        attach_again(s, &mut tx, week).await?;
    } else {
        execute(&mut tx, format!("drop table {s}.entry_{week}")).await?;
        execute(
            &mut tx,
            format!("delete from {s}.touch where week = {week}; delete from {s}.sealed where week = {week}"),
        )
        .await?;
        execute(&mut tx, format!("delete from {s}.held where week = {week} and state not in {OPEN}")).await?;
        if rows == 0 {
            call_off(s, &mut tx, week).await?; // nothing was forgotten with it
        } else {
            execute(&mut tx, format!("update {s}.dropped set barred = scope_max where week = {week}"))
                .await?;
        }
    }
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    crate::crash_point!("sweep.dropped");
    if late {
        return Ok(None);
    }
    swept.held += held;
    Ok(Some(rows))
}

/// What was not sealed, or was left behind by another sweep, is looked at row by row: how many there are, and whether one is newer than its copy.
async fn look_again(s: &str, tx: &mut PgConnection, week: i16) -> Result<(u64, bool)> {
    let (rows, newer): (i64, bool) = sqlx::query_as(AssertSqlSafe(format!(
        "select count(*), coalesce(bool_or(case when h.id is null then e.state in {OPEN} else {} end), false) \
           from {s}.entry_{week} e left join {s}.held h on h.week = e.week and h.scope = e.scope and h.id = e.id",
        is_newer("e", "h")
    )))
    .persistent(false)
    .fetch_one(tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok((rows as u64, newer))
}

/// Which of two versions of a row was written later: tokens only grow, and under one token only what runs changes.
fn is_newer(one: &str, other: &str) -> String {
    format!(
        "({one}.token > {other}.token or ({one}.token = {other}.token and {other}.state in ('L', 'C') \
         and ({one}.state <> {other}.state or {one}.at > {other}.at)))"
    )
}

/// The week stays. What was settled in held while it was out goes back into it.
async fn attach_again(s: &str, tx: &mut PgConnection, week: i16) -> Result<()> {
    let columns = COLUMNS.map(|column| match column {
        "flags" => format!("flags = case when h.state in {OPEN} then h.flags else h.flags & ~4 end"),
        column => format!("{column} = h.{column}"),
    });
    let newer = is_newer("h", "e");
    for sql in [
        format!(
            "update {s}.entry_{week} e set {} from {s}.held h \
             where h.week = {week} and h.scope = e.scope and h.id = e.id and {newer}",
            columns.join(", ")
        ),
        format!(
            "delete from {s}.held h where h.week = {week} and ((h.flags & 4) = 0 or h.state not in {OPEN}) \
             and exists (select from {s}.entry_{week} e where e.scope = h.scope and e.id = h.id)"
        ),
        format!(
            "alter table {s}.entry attach partition {s}.entry_{week} for values from ({week}) to ({})",
            week + 1
        ),
        format!("delete from {s}.sealed where week = {week}"),
    ] {
        execute(tx, sql).await?;
    }
    call_off(s, tx, week).await
}

/// Takes an announcement back: as dropped as before counts, if it ever was.
async fn call_off(s: &str, tx: &mut PgConnection, week: i16) -> Result<()> {
    execute(tx, format!("delete from {s}.dropped where week = {week} and barred is null")).await?;
    execute(tx, format!("update {s}.dropped set scope_max = barred where week = {week}")).await.map(drop)
}

/// Opens a transaction in which the partition stays attached; none if it is not.
async fn begin_attached(inner: &Inner, week: i16) -> Result<Option<sqlx::PgTransaction<'static>>> {
    let s = &inner.settings.schema;
    let mut tx = inner.begin().await?;
    execute(&mut tx, format!("lock table {s}.entry_{week} in share update exclusive mode")).await?;
    let attached: bool = sqlx::query_scalar(AssertSqlSafe(format!(
        "select exists (select from pg_inherits i where i.inhrelid = '{s}.entry_{week}'::regclass and not i.inhdetachpending)"
    )))
    .persistent(false)
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| translate(WHAT, e))?;
    Ok(attached.then_some(tx))
}

/// How an announcement went.
enum Announced {
    /// The week is on its way out.
    Now,
    /// It is out already.
    Before,
    /// Someone has written to it since it was looked at.
    NotDue,
}

/// From here on, an id of this week is too old for every scope there is, those that open transactions are registering
/// included. Writes down which touches are known: whoever writes to the week now has added one (the known ones are old), so one
/// that is not known means that someone wrote meanwhile, however long their transaction took.
async fn announce(inner: &Inner, week: i16, terms: SweepTerms) -> Result<Announced> {
    let s = &inner.settings.schema;
    let Some(mut tx) = begin_attached(inner, week).await? else { return Ok(Announced::Before) };
    let announced = execute(
        &mut tx,
        format!(
            "insert into {s}.dropped as d (week, at, scope_max, seen) \
             select {week}, {s}.ledger_now(), \
                    coalesce(pg_sequence_last_value(pg_get_serial_sequence('{s}.scope', 'number')::regclass), 0), \
                    array(select t.number from {s}.touch t where t.week = {week}) \
              where coalesce((select max(t.at) from {s}.touch t where t.week = {week}), '-infinity') \
                    < {s}.ledger_now() - interval '1 hour' - {} * interval '1 microsecond' \
             on conflict (week) do update set scope_max = excluded.scope_max, at = excluded.at, seen = excluded.seen",
            us(terms)
        ),
    )
    .await?;
    if announced == 0 {
        call_off(s, &mut tx, week).await?; // an announcement that was never followed up
    }
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    Ok(if announced == 0 { Announced::NotDue } else { Announced::Now })
}

/// What was known of a week when its open rows were copied.
#[derive(Debug, Clone, Copy)]
struct Looked {
    rows: u64,
    open: u64,
    /// By its seal, so that everybody who wrote later has left a touch.
    sealed: bool,
}

/// Copies what is still open, and takes back copies of what has ended since an earlier attempt; none if the week is out
/// already.
async fn copy_open(inner: &Inner, week: i16) -> Result<Option<Looked>> {
    let s = &inner.settings.schema;
    let Some(mut tx) = begin_attached(inner, week).await? else { return Ok(None) };
    let seal = seal::seal_of(s, &mut tx, week).await?;
    // Copies are few: each is looked up by its key, whatever the statistics say.
    let by_key = ["seqscan", "hashjoin", "mergejoin"].map(|way| format!("set local enable_{way} = off"));
    execute(
        &mut tx,
        format!(
            "{}; delete from {s}.held h where h.week = {week} and exists (select from {s}.entry_{week} e \
             where e.scope = h.scope and e.id = h.id and e.state not in {OPEN})",
            by_key.join("; ")
        ),
    )
    .await?;
    let from = if seal.is_some_and(|seal| seal.keyed) {
        format!(
            "{s}.sealed s cross join unnest(s.scopes, s.ids) u (scope, id) \
             join {s}.entry_{week} e on s.week = {week} and e.scope = u.scope and e.id = u.id"
        )
    } else {
        format!("{s}.entry_{week} e")
    };
    let mut copied = 0;
    if seal.is_none_or(|seal| seal.open > 0) {
        let columns = COLUMNS.map(|column| format!("{column} = excluded.{column}"));
        copied = execute(
            &mut tx,
            format!(
                "insert into {s}.held select e.* from {from} where e.state in {OPEN} \
                 on conflict (scope, id, week) do update set {}",
                columns.join(", ")
            ),
        )
        .await?;
    }
    tx.commit().await.map_err(|e| translate(WHAT, e))?;
    Ok(Some(match seal {
        Some(seal) => Looked { rows: seal.rows, open: seal.open, sealed: true },
        None => Looked { rows: 0, open: copied, sealed: false },
    }))
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
