//! Retention. The reading connection looks for what is old, so that claims do not wait for it. Each
//! change is one transaction, so the next sweep finishes one that was killed.

use rusqlite::{Connection, OptionalExtension, params};

use super::codec::{AWAITED, COLUMNS, OPEN};
use super::connect::simple;
use super::fault::Doing;
use super::ledger_tx::{LedgerTx, Memo};
use super::{SqliteLedger, answer, held, read};
use crate::clock::Time;
use crate::error::Result;
use crate::ledger::{SweepSettings, SweepState, Swept, Week};

/// A key within a table.
type RowKey = (i32, Vec<u8>);

/// A week that may be dropped, and its counts.
#[derive(Debug, Clone, Copy)]
struct Old {
    week: Week,
    touched: i64,
    rows: u64,
    open: u64,
}

pub(super) async fn sweep(ledger: &SqliteLedger, settings: SweepSettings) -> Result<Swept> {
    let now = ledger.0.clock.now();
    if settings.dry_run {
        return answer(ledger.0.read.send(move |conn| rehearse(conn, now, settings))).await;
    }
    let state = answer(ledger.0.write.send(move |ledger_tx| record_sweep(ledger_tx, now, settings))).await?;
    let cutoff = now.minus(state.apply(settings).retention);
    let mut swept = Swept { paused_until: state.paused_until, ..Swept::default() };
    swept.lost = mark_lost(ledger, now, settings.batch_max).await?;
    swept.rows = sweep_timeless(ledger, cutoff, settings.batch_max).await?;
    swept.rows += sweep_kept(ledger, cutoff, settings.batch_max).await?;
    answer(ledger.0.write.send(move |ledger_tx| held::forget_markers(ledger_tx.conn, cutoff))).await?;
    for week in answer(ledger.0.read.send(move |conn| old_weeks(conn, cutoff))).await? {
        let seen = answer(ledger.0.read.send(move |conn| look_at(conn, week))).await?;
        let Some(old) = seen.filter(|old| old.touched < cutoff.as_micros()) else { continue };
        if answer(ledger.0.write.send(move |ledger_tx| drop_week(ledger_tx, old, now))).await? {
            swept.weeks.push((week, old.rows - old.open));
            swept.held += old.open;
        }
    }
    Ok(swept)
}

fn sweep_state(conn: &Connection) -> Result<Option<SweepState>> {
    conn.query_row("SELECT swept_at, paused_until FROM main.hapax_meta", [], |row| {
        let (swept_at, paused_until): (Option<i64>, Option<i64>) = (row.get(0)?, row.get(1)?);
        let paused_until = paused_until.map(Time::from_micros);
        Ok(swept_at.map(|at| SweepState { swept_at: Time::from_micros(at), paused_until }))
    })
    .doing("reading when the last sweep was")
}

/// Records that a sweep begins, before it deletes anything.
fn record_sweep(ledger_tx: &mut LedgerTx<'_>, now: Time, settings: SweepSettings) -> Result<SweepState> {
    let next = SweepState::next(sweep_state(ledger_tx.conn)?, now, settings.retention);
    ledger_tx
        .conn
        .execute(
            "UPDATE main.hapax_meta SET swept_at = ?1, paused_until = ?2",
            params![next.swept_at.as_micros(), next.paused_until.map(Time::as_micros)],
        )
        .doing("noting that a sweep begins")?;
    Ok(next)
}

/// What a sweep would do.
fn rehearse(conn: &Connection, now: Time, settings: SweepSettings) -> Result<Swept> {
    let state = SweepState::next(sweep_state(conn)?, now, settings.retention);
    let cutoff = now.minus(state.apply(settings).retention);
    let mut swept = Swept { paused_until: state.paused_until, ..Swept::default() };
    for table in tables(conn)? {
        swept.lost +=
            count(conn, &format!("SELECT count(*) FROM {table} WHERE {AWAITED} AND at <= ?1"), now)?;
    }
    let sql = format!("SELECT count(*) FROM main.hapax_entry_0 WHERE state NOT IN {OPEN} AND at < ?1");
    swept.rows = count(conn, &sql, cutoff)?;
    swept.rows += count(conn, &sql.replace("hapax_entry_0", "hapax_kept"), cutoff)?;
    for week in old_weeks(conn, cutoff)? {
        if let Some(old) = look_at(conn, week)? {
            swept.weeks.push((week, old.rows - old.open));
            swept.held += old.open;
        }
    }
    Ok(swept)
}

fn count(conn: &Connection, sql: &str, at: Time) -> Result<u64> {
    conn.query_row(sql, [at.as_micros()], |row| tally(row, 0)).doing("counting what a sweep would do")
}

fn tally(row: &rusqlite::Row<'_>, at: usize) -> rusqlite::Result<u64> {
    Ok(row.get::<_, i64>(at)? as u64)
}

fn tables(conn: &Connection) -> Result<Vec<String>> {
    let weeks = read::weeks(conn)?;
    let tables = weeks.iter().map(|week| format!("main.hapax_entry_{}", week.number()));
    Ok(tables.chain(["main.hapax_kept".to_owned()]).collect())
}

/// Marks at-most-once claims as lost whose end is overdue. The index of a week finds them.
async fn mark_lost(ledger: &SqliteLedger, now: Time, batch_max: u32) -> Result<u64> {
    let mut lost = 0;
    for table in answer(ledger.0.read.send(tables)).await? {
        let key = if table.ends_with("kept") { "week, scope, id" } else { "scope, id" };
        let sql = format!(
            "UPDATE {table} SET state = 6, note = 'its end was never reported' WHERE ({key}) IN \
             (SELECT {key} FROM {table} WHERE {AWAITED} AND at <= ?1 LIMIT ?2)"
        );
        loop {
            let (sql, table) = (sql.clone(), table.clone());
            let marked = answer(ledger.0.write.send(move |ledger_tx| {
                if !exists(ledger_tx.conn, &table)? {
                    return Ok(0); // another process dropped it
                }
                ledger_tx
                    .conn
                    .execute(&sql, params![now.as_micros(), batch_max.max(1)])
                    .doing("marking overdue claims as lost")
            }))
            .await?;
            lost += marked as u64;
            if marked < batch_max.max(1) as usize {
                break;
            }
        }
    }
    Ok(lost)
}

fn exists(conn: &Connection, table: &str) -> Result<bool> {
    let name = table.trim_start_matches("main.");
    conn.query_row("SELECT 1 FROM main.sqlite_schema WHERE type = 'table' AND name = ?1", [name], |_| Ok(()))
        .optional()
        .doing("looking for a table")
        .map(|found| found.is_some())
}

/// Deletes old timeless entries, one batch per transaction.
async fn sweep_timeless(ledger: &SqliteLedger, cutoff: Time, batch_max: u32) -> Result<u64> {
    let most = batch_max.max(1) as usize;
    let mut after: RowKey = (i32::MIN, Vec::new());
    let mut gone = 0;
    loop {
        let from = after.clone();
        let keys = answer(ledger.0.read.send(move |conn| old_timeless(conn, &from, cutoff, most))).await?;
        let Some(last) = keys.last() else { return Ok(gone) };
        after.clone_from(last);
        let done = keys.len() < most;
        gone +=
            answer(ledger.0.write.send(move |ledger_tx| delete_timeless(ledger_tx, &keys, cutoff))).await?;
        if done {
            return Ok(gone);
        }
    }
}

/// Deletes entries kept from dropped weeks once they are settled and old. The record of the dropped
/// week answers for them afterwards.
async fn sweep_kept(ledger: &SqliteLedger, cutoff: Time, batch_max: u32) -> Result<u64> {
    let most = batch_max.max(1);
    let mut gone = 0;
    loop {
        let deleted = answer(ledger.0.write.send(move |ledger_tx| {
            let sql = format!(
                "DELETE FROM main.hapax_kept WHERE (week, scope, id) IN (SELECT week, scope, id FROM main.hapax_kept \
                 WHERE state NOT IN {OPEN} AND at < ?1 LIMIT ?2)"
            );
            ledger_tx.conn.execute(&sql, params![cutoff.as_micros(), most]).doing("sweeping what was kept")
        }))
        .await?;
        gone += deleted as u64;
        if deleted < most as usize {
            return Ok(gone);
        }
    }
}

fn old_timeless(conn: &Connection, after: &RowKey, cutoff: Time, most: usize) -> Result<Vec<RowKey>> {
    let sql = format!(
        "SELECT scope, id FROM main.hapax_entry_0 WHERE (scope, id) > (?1, ?2) AND state NOT IN {OPEN} AND at < ?3 \
         ORDER BY scope, id LIMIT ?4"
    );
    conn.prepare_cached(&sql)
        .and_then(|mut statement| {
            statement
                .query_map(params![after.0, after.1, cutoff.as_micros(), most as i64], |row| {
                    Ok((row.get(0)?, row.get(1)?))
                })?
                .collect()
        })
        .doing("looking for what is old")
}

/// Deletes entries that are still old: they may have changed since they were read.
fn delete_timeless(ledger_tx: &mut LedgerTx<'_>, keys: &[RowKey], cutoff: Time) -> Result<u64> {
    let sql = format!(
        "DELETE FROM main.hapax_entry_0 WHERE scope = ?1 AND id = ?2 AND state NOT IN {OPEN} AND at < ?3"
    );
    let run = || -> rusqlite::Result<u64> {
        let mut statement = ledger_tx.conn.prepare_cached(&sql)?;
        let mut gone = 0;
        for (scope, id) in keys {
            gone += statement.execute(params![scope, id, cutoff.as_micros()])? as u64;
        }
        Ok(gone)
    };
    run().doing("deleting what is old")
}

/// The weeks that ended, and were last touched, before the cutoff.
fn old_weeks(conn: &Connection, cutoff: Time) -> Result<Vec<Week>> {
    let numbers: Vec<i16> = conn
        .prepare_cached("SELECT week FROM main.hapax_week WHERE week > 0 AND touched < ?1 ORDER BY week")
        .and_then(|mut statement| statement.query_map([cutoff.as_micros()], |row| row.get(0))?.collect())
        .doing("looking for old weeks")?;
    let weeks = numbers.into_iter().map(Week::from_number);
    weeks.filter(|week| week.as_ref().map_or(true, |week| week.end() < cutoff)).collect()
}

fn look_at(conn: &Connection, week: Week) -> Result<Option<Old>> {
    let Some(touched) = touched(conn, week)? else { return Ok(None) };
    let sql = format!(
        "SELECT count(*), count(*) FILTER (WHERE state IN {OPEN}) FROM main.hapax_entry_{}",
        week.number()
    );
    conn.query_row(&sql, [], |row| Ok(Old { week, touched, rows: tally(row, 0)?, open: tally(row, 1)? }))
        .doing("counting an old week")
        .map(Some)
}

fn touched(conn: &Connection, week: Week) -> Result<Option<i64>> {
    conn.query_row("SELECT touched FROM main.hapax_week WHERE week = ?1", [week.number()], |row| row.get(0))
        .optional()
        .doing("looking at a week")
}

/// Drops a week and keeps its open entries. Returns false if the week changed since it was counted:
/// every transaction that changes a week stamps it, so an equal stamp means equal rows.
fn drop_week(ledger_tx: &mut LedgerTx<'_>, old: Old, now: Time) -> Result<bool> {
    ledger_tx.finish()?; // writes the stamps of other requests in this transaction
    if touched(ledger_tx.conn, old.week)? != Some(old.touched) {
        return Ok(false);
    }
    let number = old.week.number();
    if old.open > 0 {
        ledger_tx.conn
            .execute(
                &format!(
                    "INSERT OR REPLACE INTO main.hapax_kept (week, scope, id, {COLUMNS}, copied) \
                     SELECT {number}, scope, id, {COLUMNS}, copied FROM main.hapax_entry_{number} WHERE state IN {OPEN}"
                ),
                [],
            )
            .doing("keeping what is open")?;
    }
    simple(ledger_tx.conn, &format!("DROP TABLE main.hapax_entry_{number}"), "dropping a week")?;
    ledger_tx
        .conn
        .execute("DELETE FROM main.hapax_week WHERE week = ?1", [number])
        .doing("dropping a week")?;
    // A week without rows forgets nothing: it bars no scope that was not barred before.
    ledger_tx
        .conn
        .execute(
            "INSERT OR REPLACE INTO main.hapax_dropped (week, at, barred) SELECT ?1, ?2, \
             CASE WHEN ?3 > 0 THEN (SELECT coalesce(max(number), 0) FROM main.hapax_scope) \
                  ELSE coalesce((SELECT barred FROM main.hapax_dropped WHERE week = ?1), -1) END",
            params![number, now.as_micros(), i64::try_from(old.rows).unwrap_or(i64::MAX)],
        )
        .doing("recording a dropped week")?;
    *ledger_tx.memo = Memo::default(); // it still caches the week
    Ok(true)
}
