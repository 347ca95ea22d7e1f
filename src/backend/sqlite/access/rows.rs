//! The rows of API tokens and of the audit, in an open transaction.

use rusqlite::{Connection, OptionalExtension, Row as SqlRow, params};

use crate::access::decide::{Change, Found, Row};
use crate::access::token::TokenHash;
use crate::access::{
    Actor, AuditEntry, AuditNote, AuditSweep, ListAudit, ListTokens, Role, Scopes, SweptAudit, TokenEntry,
    TokenId,
};
use crate::backend::sqlite::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::ledger::SweepState;

const COLUMNS: &str = "id, name, tenant, scopes, role, hash, previous_hash, previous_until, rotations, created_at, expires_at, \
                       revoked_at, last_used_at, made_by";

/// Finds the row of a token.
pub(super) fn find(conn: &Connection, id: &TokenId) -> Result<Option<Row>> {
    let sql = format!("SELECT {COLUMNS} FROM main.hapax_access_token WHERE id = ?1");
    let found = conn
        .prepare_cached(&sql)
        .and_then(|mut statement| statement.query_row([id.as_str()], |row| Ok(decode(row))).optional())
        .doing("looking for a token")?;
    found.transpose()
}

fn decode(row: &SqlRow<'_>) -> Result<Row> {
    let what = "reading a token";
    let text = |at: usize| row.get::<_, String>(at).doing(what);
    let time = |at: usize| row.get::<_, Option<i64>>(at).map(|at| at.map(Time::from_micros)).doing(what);
    let hash = |bytes: Vec<u8>| match bytes.try_into() {
        Ok(bytes) => Ok(TokenHash(bytes)),
        Err(_) => Err(Error::Corrupt("a token's hash does not have 32 bytes".into())),
    };
    let previous: Option<Vec<u8>> = row.get(6).doing(what)?;
    let tenant = text(2)?;
    let scopes: Option<String> = row.get(3).doing(what)?;
    let made_by: Option<String> = row.get(13).doing(what)?;
    Ok(Row {
        id: TokenId::new(text(0)?)?,
        name: text(1)?,
        tenant: if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) },
        scopes: Scopes::stored(scopes.as_deref())?,
        role: Role::parse(&text(4)?)?,
        made_by: made_by.map(TokenId::new).transpose()?,
        hash: hash(row.get(5).doing(what)?)?,
        previous: match (previous, time(7)?) {
            (Some(bytes), Some(until)) => Some((hash(bytes)?, until)),
            _ => None,
        },
        rotations: row.get(8).doing(what)?,
        created_at: time(9)?.unwrap_or_default(),
        expires_at: time(10)?,
        revoked_at: time(11)?,
        last_used_at: time(12)?,
    })
}

fn save(conn: &Connection, row: &Row) -> Result<()> {
    let sql = format!(
        "INSERT OR REPLACE INTO main.hapax_access_token ({COLUMNS}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, \
         ?13, ?14)"
    );
    conn.prepare_cached(&sql)
        .and_then(|mut statement| {
            statement.execute(params![
                row.id.as_str(),
                row.name,
                row.tenant.as_ref().map_or("", Tenant::as_str),
                row.scopes.text(),
                row.role.as_str(),
                row.hash.0,
                row.previous.map(|(hash, _)| hash.0),
                row.previous.map(|(_, until)| until.as_micros()),
                row.rotations,
                row.created_at.as_micros(),
                row.expires_at.map(Time::as_micros),
                row.revoked_at.map(Time::as_micros),
                row.last_used_at.map(Time::as_micros),
                row.made_by.as_ref().map(TokenId::as_str),
            ])
        })
        .doing("storing a token")?;
    Ok(())
}

/// Changes a token and adds its audit row. The inner error says why nothing was written.
pub(super) fn change(
    conn: &Connection,
    id: &TokenId,
    maker: Option<&TokenId>,
    by: &Actor,
    now: Time,
    decide: impl FnOnce(Found<'_>, Time) -> Result<Change>,
) -> Result<Result<TokenEntry>> {
    let maker = maker.map(|maker| find(conn, maker)).transpose()?.flatten();
    let found = find(conn, id)?;
    let change = match decide(Found { row: found.as_ref(), maker: maker.as_ref() }, now) {
        Ok(change) => change,
        Err(error) => return Ok(Err(error)),
    };
    if let Some((action, details)) = change.note {
        save(conn, &change.row)?;
        add(conn, &AuditNote::new(by, action, id.as_str()).details(details), now)?;
    }
    Ok(Ok(change.row.entry(now)))
}

/// Notes that a token is used, if nobody has noted it meanwhile.
pub(super) fn note_use(conn: &Connection, id: &TokenId, now: Time) -> Result<()> {
    match find(conn, id)? {
        Some(row) if !row.is_use_noted(now) => save(conn, &Row { last_used_at: Some(now), ..row }),
        _ => Ok(()),
    }
}

pub(super) fn list(conn: &Connection, which: &ListTokens, now: Time) -> Result<Vec<TokenEntry>> {
    let what = "listing tokens";
    let tenant = which.tenant.as_ref().map(|tenant| tenant.as_ref().map_or("", Tenant::as_str));
    let sql = format!(
        "SELECT {COLUMNS} FROM main.hapax_access_token WHERE (?1 IS NULL OR tenant = ?1) AND (?2 IS NULL OR id > ?2) \
         AND (NOT ?3 OR (revoked_at IS NULL AND (expires_at IS NULL OR expires_at > ?4))) \
         AND (?6 IS NULL OR made_by = ?6) ORDER BY id LIMIT ?5"
    );
    let mut statement = conn.prepare_cached(&sql).doing(what)?;
    let mut rows = statement
        .query(params![
            tenant,
            which.after.as_ref().map(TokenId::as_str),
            which.live_only,
            now.as_micros(),
            which.limit() as i64,
            which.made_by.as_ref().map(TokenId::as_str)
        ])
        .doing(what)?;
    let mut found = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        found.push(decode(row)?.entry(now));
    }
    Ok(found)
}

pub(super) fn has_tokens(conn: &Connection) -> Result<bool> {
    conn.prepare_cached("SELECT 1 FROM main.hapax_access_token LIMIT 1")
        .and_then(|mut statement| statement.exists([]))
        .doing("looking for tokens")
}

pub(super) fn add(conn: &Connection, note: &AuditNote, at: Time) -> Result<()> {
    let AuditNote { id, who, action, target, reason, details } = note;
    conn.prepare_cached(
        "INSERT INTO main.hapax_access_audit (note, at, who, action, target, reason, details) \
         VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7) ON CONFLICT (note) DO NOTHING",
    )
    .and_then(|mut statement| {
        statement.execute(params![id.as_bytes(), at.as_micros(), who, action, target, reason, details])
    })
    .doing("adding an audit row")?;
    Ok(())
}

pub(super) fn audit(conn: &Connection, which: &ListAudit) -> Result<Vec<AuditEntry>> {
    let what = "listing audit rows";
    let sql = "SELECT number, at, who, action, target, reason, details FROM main.hapax_access_audit \
               WHERE (?1 IS NULL OR number < ?1) AND (?2 IS NULL OR substr(action, 1, length(?2)) = ?2) \
               ORDER BY number DESC LIMIT ?3";
    let mut statement = conn.prepare_cached(sql).doing(what)?;
    let rows = statement
        .query_map(params![which.before, which.action, which.limit() as i64], |row| {
            Ok(AuditEntry {
                number: row.get(0)?,
                at: Time::from_micros(row.get(1)?),
                who: row.get(2)?,
                action: row.get(3)?,
                target: row.get(4)?,
                reason: row.get(5)?,
                details: row.get(6)?,
            })
        })
        .doing(what)?;
    rows.collect::<rusqlite::Result<_>>().doing(what)
}

/// Begins a sweep. The horizon to forget up to, unless there is nothing to do.
pub(super) fn begin_sweep(
    conn: &Connection,
    settings: &AuditSweep,
    now: Time,
) -> Result<(SweptAudit, Option<Time>)> {
    let what = "sweeping audit rows";
    let time = |at: Option<i64>| at.map(Time::from_micros);
    let (swept_at, paused_until) = conn
        .query_row("SELECT swept_at, paused_until FROM main.hapax_access_meta", [], |row| {
            Ok((time(row.get(0)?), time(row.get(1)?)))
        })
        .doing(what)?;
    let before = swept_at.map(|swept_at| SweepState { swept_at, paused_until });
    let Some(plan) = settings.plan(before, now) else {
        return Ok((SweptAudit { skipped: true, ..SweptAudit::default() }, None));
    };
    conn.execute(
        "UPDATE main.hapax_access_meta SET swept_at = ?1, paused_until = ?2",
        params![plan.state.swept_at.as_micros(), plan.state.paused_until.map(Time::as_micros)],
    )
    .doing(what)?;
    Ok((SweptAudit { paused_until: plan.state.paused_until, ..SweptAudit::default() }, plan.horizon))
}

/// Forgets one batch.
pub(super) fn forget(conn: &Connection, horizon: Time, batch_max: usize) -> Result<u64> {
    let sql = "DELETE FROM main.hapax_access_audit WHERE number IN \
               (SELECT number FROM main.hapax_access_audit WHERE at < ?1 LIMIT ?2)";
    let gone =
        conn.execute(sql, params![horizon.as_micros(), batch_max as i64]).doing("sweeping audit rows")?;
    Ok(gone as u64)
}
