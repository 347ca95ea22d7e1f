//! The log of skips, and daily counts.

use std::collections::HashMap;

use rusqlite::{Connection, OptionalExtension, Row, params};

use super::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::exact::Decimal;
use crate::id::{EventId, Scope, Tenant};
use crate::ledger::{
    Amount, Counted, Identity, Logged, PreventedDays, SkipBatch, day_of, plan_skips, prevented_days,
    skip_horizons, skip_slots,
};

const NOTING: &str = "logging skips";
const READING: &str = "reading the log of skips";

/// Adds a batch, in the caller's transaction.
pub(super) fn note(conn: &Connection, batch: &SkipBatch, now: Time) -> Result<()> {
    let mut stored = HashMap::new();
    for slot in skip_slots(batch) {
        let sql = "SELECT tenant, scope, id, count, skips FROM main.hapax_skip WHERE slot = ?1";
        let row = conn
            .prepare_cached(sql)
            .and_then(|mut statement| statement.query_row([slot], texts).optional())
            .doing(NOTING)?;
        if let Some(row) = row {
            stored.insert(slot, logged(row)?);
        }
    }
    let day = day_of(now);
    let counts = counts(conn, "day = ?1", day)?.into_iter().map(|(_, counted, amount)| (counted, amount));
    let planned = plan_skips(batch, now, stored, counts.collect());
    let put = "INSERT OR REPLACE INTO main.hapax_skip VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    for (slot, logged) in &planned.slots {
        let Identity { tenant, scope, id } = &logged.identity;
        let tenant = tenant.as_ref().map_or("", Tenant::as_str);
        let last_at = logged.last_at().as_micros();
        let row =
            params![slot, tenant, scope.as_str(), id.as_str(), whole(logged.count), logged.text(), last_at];
        conn.prepare_cached(put).and_then(|mut statement| statement.execute(row)).doing(NOTING)?;
    }
    let put = "INSERT OR REPLACE INTO main.hapax_prevented VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)";
    for (counted, amount) in &planned.counts {
        let (kind, tenant, scope) = counted.texts();
        let Amount { count, valued, value } = amount;
        let row = params![day, kind, tenant, scope, whole(*count), whole(*valued), value.to_string()];
        conn.prepare_cached(put).and_then(|mut statement| statement.execute(row)).doing(NOTING)?;
    }
    Ok(())
}

pub(super) fn of(conn: &Connection, tenant: Option<&Tenant>, ids: &[EventId]) -> Result<Vec<Logged>> {
    let sql = "SELECT tenant, scope, id, count, skips FROM main.hapax_skip \
               WHERE tenant = ?1 AND id IN (SELECT value FROM json_each(?2))";
    let ids = serde_json::json!(ids.iter().map(|id| id.as_str()).collect::<Vec<_>>()).to_string();
    let rows: Vec<Texts> = conn
        .prepare_cached(sql)
        .and_then(|mut statement| {
            statement.query_map(params![tenant.map_or("", Tenant::as_str), ids], texts)?.collect()
        })
        .doing(READING)?;
    rows.into_iter().map(logged).collect()
}

pub(super) fn prevented(conn: &Connection, since_day: i32) -> Result<PreventedDays> {
    Ok(prevented_days(counts(conn, "day >= ?1", since_day)?))
}

/// Forgets what is old.
pub(super) fn sweep(conn: &Connection, now: Time) -> Result<()> {
    let (skips_from, first_day) = skip_horizons(now);
    conn.execute("DELETE FROM main.hapax_skip WHERE last_at < ?1", [skips_from.as_micros()])
        .and_then(|_| conn.execute("DELETE FROM main.hapax_prevented WHERE day < ?1", [first_day]))
        .map(drop)
        .doing("sweeping the log of skips")
}

type Texts = (String, String, String, i64, String);

fn texts(row: &Row<'_>) -> rusqlite::Result<Texts> {
    Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?))
}

fn logged((tenant, scope, id, count, skips): Texts) -> Result<Logged> {
    let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) };
    let identity = Identity { tenant, scope: Scope::new(scope)?, id: EventId::new(id)? };
    Logged::stored(identity, count, &skips)
}

fn counts(conn: &Connection, which: &str, day: i32) -> Result<Vec<(i32, Counted, Amount)>> {
    type Counts = (i32, String, String, String, i64, i64, String);
    let sql = format!(
        "SELECT day, kind, tenant, scope, count, valued, value FROM main.hapax_prevented WHERE {which}"
    );
    let read = |row: &Row<'_>| -> rusqlite::Result<Counts> {
        Ok((row.get(0)?, row.get(1)?, row.get(2)?, row.get(3)?, row.get(4)?, row.get(5)?, row.get(6)?))
    };
    let rows: Vec<Counts> = conn
        .prepare_cached(&sql)
        .and_then(|mut statement| statement.query_map([day], read)?.collect())
        .doing(READING)?;
    let mut found = Vec::with_capacity(rows.len());
    for (day, kind, tenant, scope, count, valued, value) in rows {
        let Some(counted) = Counted::stored(&kind, &tenant, &scope)? else { continue };
        let value =
            Decimal::parse_sum(&value).ok_or_else(|| Error::Corrupt(format!("a sum is {value:?}")))?;
        let number = |number: i64| u64::try_from(number).unwrap_or(0);
        found.push((day, counted, Amount { count: number(count), valued: number(valued), value }));
    }
    Ok(found)
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
