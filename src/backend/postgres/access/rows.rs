//! Statements about API tokens and audit rows, and how their rows are read.

use std::sync::Arc;

use sqlx::postgres::PgRow;
use sqlx::{PgTransaction, Row as _};

use super::{Statement, fail, us};
use crate::access::decide::Row;
use crate::access::token::TokenHash;
use crate::access::{AuditEntry, AuditNote, Role, Scopes, TokenId};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;

/// Statements with the schema's name in them.
pub(super) struct Sql {
    /// A token by its id, and the time.
    pub find: Arc<str>,
    /// The same, locked, without the time.
    pub lock: Arc<str>,
    pub now: Arc<str>,
    pub insert: Arc<str>,
    pub update: Arc<str>,
    pub used: Arc<str>,
    pub list: Arc<str>,
    pub any: Arc<str>,
    pub note: Arc<str>,
    pub audit: Arc<str>,
}

/// A parameter that is a time in microseconds.
fn time(parameter: &str) -> String {
    format!("'epoch'::timestamptz + {parameter} * interval '1 microsecond'")
}

impl Sql {
    pub(super) fn new(schema: &str) -> Self {
        let sql = |text: String| -> Arc<str> { text.replace("{s}", schema).into() };
        let columns = format!(
            "t.id, t.name, t.tenant, t.scopes, t.role, t.hash, t.previous_hash, {}, t.rotations, {}, {}, {}, {}, t.made_by",
            us("t.previous_until"),
            us("t.created_at"),
            us("t.expires_at"),
            us("t.revoked_at"),
            us("t.last_used_at")
        );
        let now = "(select {s}.access_now() as at) n";
        let values = |first: usize| {
            let times = [7, 9, 10, 11, 12];
            let values: Vec<_> = (0..14)
                .map(|at| {
                    let parameter = format!("${}", first + at);
                    if times.contains(&at) { time(&parameter) } else { parameter }
                })
                .collect();
            values.join(", ")
        };
        let names = "id, name, tenant, scopes, role, hash, previous_hash, previous_until, rotations, created_at, expires_at, \
                     revoked_at, last_used_at, made_by";
        Sql {
            find: sql(format!(
                "select {columns}, {} from {now} left join {{s}}.access_token t on t.id = $1",
                us("n.at")
            )),
            lock: sql(format!("select {columns} from {{s}}.access_token t where t.id = $1 for update")),
            now: sql(format!("select {}", us("{s}.access_now()"))),
            insert: sql(format!("insert into {{s}}.access_token ({names}) values ({})", values(1))),
            update: sql(format!("update {{s}}.access_token set ({names}) = ({}) where id = $1", values(1))),
            used: sql(format!(
                "update {{s}}.access_token t set last_used_at = n.at from {now} where t.id = $1 \
                 and (t.last_used_at is null or t.last_used_at <= n.at - $2 * interval '1 microsecond')"
            )),
            list: sql(format!(
                "select {columns}, {} from {now}, {{s}}.access_token t where ($1::text is null or t.tenant = $1) \
                 and ($2::text is null or t.id > $2) \
                 and (not $3 or (t.revoked_at is null and (t.expires_at is null or t.expires_at > n.at))) \
                 and ($5::text is null or t.made_by = $5) order by t.id limit $4",
                us("n.at")
            )),
            any: sql("select exists (select from {s}.access_token)".to_owned()),
            note: sql("insert into {s}.access_audit (note, at, who, action, target, reason, details) \
                 values ($1, {s}.access_now(), $2, $3, $4, $5, $6) on conflict (note) do nothing"
                .to_owned()),
            audit: sql(format!(
                "select a.number, {}, a.who, a.action, a.target, a.reason, a.details from {{s}}.access_audit a \
                 where ($1::bigint is null or a.number < $1) \
                 and ($2::text is null or pg_catalog.starts_with(a.action, $2)) order by a.number desc limit $3",
                us("a.at")
            )),
        }
    }
}

/// Binds a row to the parameters of `insert` or `update`.
pub(super) fn bind(statement: Statement, row: &Row) -> Statement {
    let us = |time: Option<Time>| time.map(Time::as_micros);
    statement
        .bind(row.id.as_str().to_owned())
        .bind(row.name.clone())
        .bind(row.tenant.as_ref().map_or("", Tenant::as_str).to_owned())
        .bind(row.scopes.text())
        .bind(row.role.as_str())
        .bind(row.hash.0.to_vec())
        .bind(row.previous.map(|(hash, _)| hash.0.to_vec()))
        .bind(us(row.previous.map(|(_, until)| until)))
        .bind(i32::try_from(row.rotations).unwrap_or(i32::MAX))
        .bind(row.created_at.as_micros())
        .bind(us(row.expires_at))
        .bind(us(row.revoked_at))
        .bind(us(row.last_used_at))
        .bind(row.made_by.as_ref().map(|id| id.as_str().to_owned()))
}

pub(super) fn bind_note(statement: Statement, note: &AuditNote) -> Statement {
    statement
        .bind(note.id.as_bytes().to_vec())
        .bind(note.who.clone())
        .bind(note.action.clone())
        .bind(note.target.clone())
        .bind(note.reason.clone())
        .bind(note.details.clone())
}

/// The token in the first 14 columns, if there is one.
pub(super) fn decode(row: &PgRow) -> Result<Option<Row>> {
    let read = |e: sqlx::Error| fail("reading a token", e);
    let Some(id) = row.try_get::<Option<String>, _>(0).map_err(read)? else { return Ok(None) };
    let text = |at: usize| row.try_get::<String, _>(at).map_err(read);
    let time =
        |at: usize| row.try_get::<Option<i64>, _>(at).map(|at| at.map(Time::from_micros)).map_err(read);
    let hash = |bytes: Vec<u8>| match bytes.try_into() {
        Ok(bytes) => Ok(TokenHash(bytes)),
        Err(_) => Err(Error::Corrupt("a token's hash does not have 32 bytes".into())),
    };
    let tenant = text(2)?;
    let scopes: Option<String> = row.try_get(3).map_err(read)?;
    let made_by: Option<String> = row.try_get(13).map_err(read)?;
    let previous: Option<Vec<u8>> = row.try_get(6).map_err(read)?;
    let rotations: i32 = row.try_get(8).map_err(read)?;
    Ok(Some(Row {
        id: TokenId::new(id)?,
        name: text(1)?,
        tenant: if tenant.is_empty() { None } else { Some(Tenant::new(tenant)?) },
        scopes: Scopes::stored(scopes.as_deref())?,
        role: Role::parse(&text(4)?)?,
        made_by: made_by.map(TokenId::new).transpose()?,
        hash: hash(row.try_get(5).map_err(read)?)?,
        previous: match (previous, time(7)?) {
            (Some(bytes), Some(until)) => Some((hash(bytes)?, until)),
            _ => None,
        },
        rotations: u32::try_from(rotations).unwrap_or(0),
        created_at: time(9)?.unwrap_or_default(),
        expires_at: time(10)?,
        revoked_at: time(11)?,
        last_used_at: time(12)?,
    }))
}

/// The time in the column after a token's.
pub(super) fn now_of(row: &PgRow) -> Result<Time> {
    row.try_get(14).map(Time::from_micros).map_err(|e| fail("reading the clock", e))
}

pub(super) fn decode_audit(row: &PgRow) -> Result<AuditEntry> {
    let read = |e: sqlx::Error| fail("reading an audit row", e);
    let text = |at: usize| row.try_get::<String, _>(at).map_err(read);
    Ok(AuditEntry {
        number: row.try_get(0).map_err(read)?,
        at: Time::from_micros(row.try_get(1).map_err(read)?),
        who: text(2)?,
        action: text(3)?,
        target: text(4)?,
        reason: text(5)?,
        details: text(6)?,
    })
}

/// The time, in an open transaction, after the locks it holds.
pub(super) async fn now_in(tx: &mut PgTransaction<'_>, statement: Statement) -> sqlx::Result<Time> {
    let row = statement.fetch_one(&mut **tx).await?;
    row.try_get(0).map(Time::from_micros)
}
