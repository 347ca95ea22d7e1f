//! The rows of keys, in an open transaction.

use rusqlite::{Connection, OptionalExtension, Row as SqlRow, params};

use crate::backend::sqlite::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Fingerprint;
use crate::id::Tenant;
use crate::keyed::decide::{self, Decision, Row, Settled};
use crate::keyed::sweep::Plan;
use crate::keyed::{
    Answer, Begin, Begun, IdempotencyKey, KeyEntry, KeyLease, KeyStatus, KeySweep, KeysInfo, ListKeys,
    Resolved, SweptKeys,
};
use crate::ledger::{Nonce, SweepState, Token};

const COLUMNS: &str = "token, nonce, fingerprint, parts, begun_at, until, held_until, settled_at, aged_from, status, \
                       headers, body, resolved_at, resolved_by, resolved_why, ended, bound";

/// Finds the row of a key.
fn find(conn: &Connection, tenant: &str, key: &IdempotencyKey) -> Result<Option<Row>> {
    let sql = format!("SELECT {COLUMNS} FROM main.hapax_keys WHERE tenant = ?1 AND key = ?2");
    let found = conn
        .prepare_cached(&sql)
        .and_then(|mut statement| {
            statement.query_row(params![tenant, key.as_str()], |row| Ok(decode(row))).optional()
        })
        .doing("looking for a key")?;
    found.transpose()
}

fn decode(row: &SqlRow<'_>) -> Result<Row> {
    let what = "reading a key";
    let time = |at: usize| row.get::<_, i64>(at).map(Time::from_micros).doing(what);
    let fingerprint: Vec<u8> = row.get(2).doing(what)?;
    let fingerprint = fingerprint.try_into();
    let settled_at: Option<i64> = row.get(7).doing(what)?;
    let settled = match settled_at {
        Some(at) => {
            let headers: String = row.get(10).doing(what)?;
            let answer = Answer::stored(row.get(9).doing(what)?, &headers, row.get(11).doing(what)?)?;
            Some(Settled { at: Time::from_micros(at), aged_from: time(8)?, answer })
        }
        None => None,
    };
    Ok(Row {
        token: Token(row.get(0).doing(what)?),
        nonce: Nonce(row.get(1).doing(what)?),
        fingerprint: Fingerprint(
            fingerprint.map_err(|_| Error::Corrupt("a key's fingerprint does not have 16 bytes".into()))?,
        ),
        parts: row.get(3).doing(what)?,
        begun_at: time(4)?,
        until: time(5)?,
        held_until: time(6)?,
        ended: row.get(15).doing(what)?,
        bound: row.get(16).doing(what)?,
        settled,
        resolved: resolved(row)?,
    })
}

fn resolved(row: &SqlRow<'_>) -> Result<Option<Resolved>> {
    let what = "reading who decided about a key";
    let Some(at) = row.get::<_, Option<i64>>(12).doing(what)? else { return Ok(None) };
    let (by, reason) = (row.get(13).doing(what)?, row.get(14).doing(what)?);
    Ok(Some(Resolved { at: Time::from_micros(at), by, reason }))
}

fn save(conn: &Connection, tenant: &str, key: &IdempotencyKey, row: &Row) -> Result<()> {
    let settled = row.settled.as_ref();
    let sql = format!(
        "INSERT OR REPLACE INTO main.hapax_keys (tenant, key, {COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, \
         ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19)"
    );
    conn.prepare_cached(&sql)
        .and_then(|mut statement| {
            statement.execute(params![
                tenant,
                key.as_str(),
                row.token.0,
                row.nonce.0,
                row.fingerprint.0,
                row.parts,
                row.begun_at.as_micros(),
                row.until.as_micros(),
                row.held_until.as_micros(),
                settled.map(|settled| settled.at.as_micros()),
                settled.map(|settled| settled.aged_from.as_micros()),
                settled.map(|settled| settled.answer.status),
                settled.map(|settled| settled.answer.headers_text()),
                settled.map(|settled| settled.answer.body.to_vec()),
                row.resolved.as_ref().map(|resolved| resolved.at.as_micros()),
                row.resolved.as_ref().map(|resolved| &resolved.by),
                row.resolved.as_ref().map(|resolved| &resolved.reason),
                row.ended,
                row.bound,
            ])
        })
        .doing("storing a key")?;
    Ok(())
}

/// The answer to a request that changes nothing. `None`: it needs the writer.
pub(super) fn peek(conn: &Connection, begin: &Begin, now: Time) -> Result<Option<Begun>> {
    let found = find(conn, begin.tenant_text(), &begin.key)?;
    match decide::decide(found.as_ref(), begin, info(conn, now)?.horizon, now) {
        Decision::Answer(outcome) => Ok(Some(outcome)),
        Decision::Insert | Decision::TakeOver | Decision::Renew => Ok(None),
    }
}

/// Begins a request.
pub(super) fn begin(conn: &Connection, begin: &Begin, now: Time, leased: bool) -> Result<Begun> {
    let tenant = begin.tenant_text();
    let found = find(conn, tenant, &begin.key)?;
    let horizon = info(conn, now)?.horizon;
    let row = match decide::decide(found.as_ref(), begin, horizon, now) {
        Decision::Answer(outcome) => return Ok(outcome),
        Decision::Renew => {
            let mut row = found.ok_or_else(|| Error::Corrupt("a key to renew is missing".into()))?;
            row.renew(begin, now);
            row
        }
        Decision::Insert | Decision::TakeOver => {
            Row::taken_over(found.as_ref(), begin, draw(conn)?, now, leased)
        }
    };
    save(conn, tenant, &begin.key, &row)?;
    Ok(Begun::First(KeyLease { tenant: begin.tenant.clone(), key: begin.key.clone(), token: row.token }))
}

/// Draws a token that was never used before.
pub(super) fn draw(conn: &Connection) -> Result<Token> {
    conn.prepare_cached("UPDATE main.hapax_keys_meta SET token = token + 1 RETURNING token")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .doing("drawing a token")
        .map(Token)
}

/// Changes the row of a lease. The inner error says why it was not changed; then nothing is written.
pub(super) fn change(
    conn: &Connection,
    of: &KeyLease,
    gone: impl FnOnce() -> Error,
    change: impl FnOnce(&mut Row) -> Result<()>,
) -> Result<Result<()>> {
    let Some(mut row) = find(conn, of.tenant_text(), &of.key)? else { return Ok(Err(gone())) };
    match change(&mut row) {
        Ok(()) => save(conn, of.tenant_text(), &of.key, &row).map(Ok),
        Err(error) => Ok(Err(error)),
    }
}

pub(super) fn status(conn: &Connection, tenant: &str, key: &IdempotencyKey, now: Time) -> Result<KeyStatus> {
    let horizon = info(conn, now)?.horizon;
    let found = find(conn, tenant, key)?;
    Ok(found.map_or_else(|| decide::missing(key, horizon), |row| row.status(now)))
}

/// The state of a key as a row, for listing.
pub(super) fn entry(
    conn: &Connection,
    tenant: Option<Tenant>,
    key: &IdempotencyKey,
    now: Time,
) -> Result<Option<KeyEntry>> {
    let found = find(conn, tenant.as_ref().map_or("", Tenant::as_str), key)?;
    Ok(found.map(|row| row.entry(tenant, key.clone(), now)))
}

pub(super) fn list(conn: &Connection, which: &ListKeys, now: Time) -> Result<Vec<KeyEntry>> {
    let what = "listing keys";
    let text = |tenant: &Option<Tenant>| tenant.as_ref().map_or("", Tenant::as_str).to_owned();
    // Without the bodies: they may be large.
    let columns = COLUMNS.replace("body", "x''");
    let sql = format!(
        "SELECT {columns}, tenant, key FROM main.hapax_keys \
         WHERE (?1 IS NULL OR tenant = ?1) AND (NOT ?2 OR settled_at IS NULL) \
         AND (?3 IS NULL OR (tenant, key) > (?3, ?4)) ORDER BY tenant, key LIMIT ?5"
    );
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement
        .query(params![
            which.tenant_text(),
            which.open_only,
            which.after.as_ref().map(|(tenant, _)| text(tenant)),
            which.after.as_ref().map(|(_, key)| key.as_str()),
            which.limit() as i64,
        ])
        .doing(what)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        let tenant: String = row.get(17).doing(what)?;
        let key: String = row.get(18).doing(what)?;
        let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) };
        found.push(decode(row)?.entry(tenant, IdempotencyKey::new(key)?, now));
    }
    Ok(found)
}

pub(super) fn info(conn: &Connection, now: Time) -> Result<KeysInfo> {
    conn.prepare_cached("SELECT horizon, swept_at FROM main.hapax_keys_meta")
        .and_then(|mut statement| {
            statement.query_row([], |row| {
                let time = |at: usize| row.get::<_, Option<i64>>(at).map(|at| at.map(Time::from_micros));
                Ok(KeysInfo { now, horizon: time(0)?, swept_at: time(1)? })
            })
        })
        .doing("reading what sweeps have forgotten")
}

/// Plans a sweep by what the last one stored.
fn plan(conn: &Connection, settings: &KeySweep, now: Time) -> Result<Option<Plan>> {
    let paused: Option<i64> = conn
        .query_row("SELECT paused_until FROM main.hapax_keys_meta", [], |row| row.get(0))
        .doing("sweeping keys")?;
    let paused_until = paused.map(Time::from_micros);
    let before = info(conn, now)?.swept_at.map(|swept_at| SweepState { swept_at, paused_until });
    Ok(settings.plan(before, now))
}

/// Counts what a sweep would forget.
pub(super) fn would_forget(conn: &Connection, settings: &KeySweep, now: Time) -> Result<SweptKeys> {
    let Some(plan) = plan(conn, settings, now)? else {
        return Ok(SweptKeys { skipped: true, ..SweptKeys::default() });
    };
    let mut swept = SweptKeys { paused_until: plan.state.paused_until, ..SweptKeys::default() };
    if let Some(horizon) = plan.horizon {
        for old in OLD {
            let sql = format!("SELECT count(*) FROM main.hapax_keys WHERE {old}");
            let count: i64 =
                conn.query_row(&sql, [horizon.as_micros()], |row| row.get(0)).doing("counting old keys")?;
            swept.keys += count as u64;
        }
    }
    Ok(swept)
}

/// Begins a sweep: stores the horizon. The horizon to forget up to, unless there is nothing to do.
pub(super) fn begin_sweep(
    conn: &Connection,
    settings: &KeySweep,
    now: Time,
) -> Result<(SweptKeys, Option<Time>)> {
    let Some(plan) = plan(conn, settings, now)? else {
        return Ok((SweptKeys { skipped: true, ..SweptKeys::default() }, None));
    };
    conn.execute(
        "UPDATE main.hapax_keys_meta SET swept_at = ?1, paused_until = ?2,
         horizon = CASE WHEN ?3 IS NULL THEN horizon ELSE max(ifnull(horizon, ?3), ?3) END",
        params![
            plan.state.swept_at.as_micros(),
            plan.state.paused_until.map(Time::as_micros),
            plan.horizon.map(Time::as_micros)
        ],
    )
    .doing("sweeping keys")?;
    let swept = SweptKeys { paused_until: plan.state.paused_until, ..SweptKeys::default() };
    Ok((swept, plan.horizon))
}

/// What is old: keys settled before the horizon, and those that were free to run again and never did.
const OLD: [&str; 2] = ["aged_from < ?1", "aged_from IS NULL AND held_until < ?1"];

/// Forgets one batch.
pub(super) fn forget(conn: &Connection, settings: &KeySweep, horizon: Time) -> Result<u64> {
    let mut gone = 0;
    for old in OLD {
        let sql = format!(
            "DELETE FROM main.hapax_keys WHERE rowid IN (SELECT rowid FROM main.hapax_keys WHERE {old} LIMIT ?2)"
        );
        let left = settings.batch_max - gone;
        gone += conn.execute(&sql, params![horizon.as_micros(), left as i64]).doing("sweeping keys")?;
    }
    Ok(gone as u64)
}
