//! Who leads among the relays of a name, and how far they have come. The token decides: it is drawn under the lock of the relay's
//! row, so a later lead has a higher one.

use std::time::Duration;

use sqlx::AssertSqlSafe;

use super::{Inner, fail};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::journal::{Checkpoint, Lead, RelayState, must_be_last};
use crate::ledger::Token;

/// How often a lead that someone took and gave up meanwhile is tried for.
const TRIES_MAX: u32 = 5;

fn micros(lease: Duration) -> i64 {
    // A century is for ever, and what a timestamp can hold.
    i64::try_from(lease.as_micros()).unwrap_or(i64::MAX).min(100 * 365 * 86_400 * 1_000_000)
}

fn parse(checkpoint: Option<String>) -> Result<Option<Checkpoint>> {
    let strange = |e: serde_json::Error| Error::Corrupt(format!("a relay's checkpoint: {e}"));
    checkpoint.map(|text| serde_json::from_str(&text).map_err(strange)).transpose()
}

fn print(checkpoint: &Checkpoint) -> Result<String> {
    serde_json::to_string(checkpoint).map_err(|e| Error::Corrupt(format!("a checkpoint: {e}")))
}

pub(super) async fn lead(inner: &Inner, relay: &RelayName, owner: &Owner, lease: Duration) -> Result<Lead> {
    let what = "taking the lead";
    let s = &inner.settings.schema;
    let take = format!(
        "insert into {s}.journal_relay as r (relay, owner, until, token) \
         values ($1, $2, {s}.journal_now() + $3 * interval '1 microsecond', nextval('{s}.journal_token')) \
         on conflict (relay) do update set owner = excluded.owner, token = nextval('{s}.journal_token'), \
         until = {s}.journal_now() + $3 * interval '1 microsecond' \
         where r.owner is null or r.until is null or r.until <= {s}.journal_now() returning token, checkpoint::text"
    );
    let who = format!(
        "select owner, (extract(epoch from until) * 1000000)::bigint from {s}.journal_relay \
         where relay = $1 and owner is not null and until is not null"
    );
    for _ in 0..TRIES_MAX {
        let query = sqlx::query_as::<_, (i64, Option<String>)>(AssertSqlSafe(take.clone()))
            .persistent(false)
            .bind(relay.as_str())
            .bind(owner.as_str())
            .bind(micros(lease));
        let taken = inner.fetch_all(query).await.map_err(|e| fail(what, e))?;
        if let Some((token, checkpoint)) = taken.into_iter().next() {
            let checkpoint = parse(checkpoint)?.unwrap_or_else(|| Checkpoint::start(&inner.id));
            return Ok(Lead::Leads { token: Token(token), checkpoint });
        }
        let query = sqlx::query_as::<_, (String, i64)>(AssertSqlSafe(who.clone()))
            .persistent(false)
            .bind(relay.as_str());
        let found = inner.fetch_all(query).await.map_err(|e| fail(what, e))?;
        if let Some((by, until)) = found.into_iter().next() {
            return Ok(Lead::Taken { by: Owner::new(by)?, until: Time::from_micros(until) });
        }
    }
    Err(Error::Contended { what: format!("{what}: it changes hands all the time"), source: None })
}

/// One change of the one who leads; nothing changed means that he does not.
async fn change(
    inner: &Inner,
    relay: &RelayName,
    token: Token,
    set: &str,
    value: Option<String>,
) -> Result<()> {
    let s = &inner.settings.schema;
    // The value is in use in every form of the statement, so that its type is known.
    let sql = format!(
        "update {s}.journal_relay set {set} where relay = $1 and token = $2 and ($3::text is null or true)"
    );
    let query = sqlx::query(AssertSqlSafe(sql)).bind(relay.as_str()).bind(token.0).bind(value);
    match inner.execute("writing a relay's state", query).await? {
        0 => Err(Error::Fenced { what: format!("relay {relay} is led by someone else now") }),
        _ => Ok(()),
    }
}

pub(super) async fn keep_lead(inner: &Inner, relay: &RelayName, token: Token, lease: Duration) -> Result<()> {
    let s = &inner.settings.schema;
    let set = format!("until = {s}.journal_now() + {} * interval '1 microsecond'", micros(lease));
    change(inner, relay, token, &set, None).await
}

pub(super) async fn save(
    inner: &Inner,
    relay: &RelayName,
    token: Token,
    checkpoint: &Checkpoint,
) -> Result<()> {
    checkpoint.must_be_of(&inner.id)?;
    let set = format!("checkpoint = $3::text::json, saved_at = {}.journal_now()", inner.settings.schema);
    change(inner, relay, token, &set, Some(print(checkpoint)?)).await
}

pub(super) async fn give_up_lead(inner: &Inner, relay: &RelayName, token: Token) -> Result<()> {
    change(inner, relay, token, "until = null", None).await
}

pub(super) async fn relays(inner: &Inner) -> Result<Vec<RelayState>> {
    relays_in(inner, &mut *inner.pool.begin().await.map_err(|e| fail("reading relays", e))?, false).await
}

/// Every relay; locked: none of them goes back until the transaction ends.
pub(super) async fn relays_in(
    inner: &Inner,
    connection: &mut sqlx::PgConnection,
    locked: bool,
) -> Result<Vec<RelayState>> {
    type Row = (String, Option<String>, Option<i64>, i64, Option<String>, Option<i64>);
    let sql = format!(
        "select relay, owner, (extract(epoch from until) * 1000000)::bigint, token, checkpoint::text, \
         (extract(epoch from saved_at) * 1000000)::bigint from {}.journal_relay order by relay {}",
        inner.settings.schema,
        if locked { "for share" } else { "" }
    );
    let rows: Vec<Row> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_all(connection)
        .await
        .map_err(|e| fail("reading relays", e))?;
    let state = |(relay, owner, until, token, checkpoint, saved_at): Row| -> Result<RelayState> {
        Ok(RelayState::new(
            RelayName::new(relay)?,
            owner.map(Owner::new).transpose()?,
            until.map(Time::from_micros),
            Token(token),
            parse(checkpoint)?,
            saved_at.map(Time::from_micros),
        ))
    };
    rows.into_iter().map(state).collect()
}

pub(super) async fn rewind(
    inner: &Inner,
    relay: &RelayName,
    to: &Checkpoint,
    if_token: Option<Token>,
) -> Result<Option<Checkpoint>> {
    to.must_be_of(&inner.id)?;
    let what = "rewinding a relay";
    let s = &inner.settings.schema;
    let mut tx = inner.pool.begin().await.map_err(|e| fail(what, e))?;
    let before: Option<(Option<String>, i64)> = sqlx::query_as(AssertSqlSafe(format!(
        "select checkpoint::text, token from {s}.journal_relay where relay = $1 for update"
    )))
    .persistent(false)
    .bind(relay.as_str())
    .fetch_optional(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    must_be_last(relay, if_token, before.as_ref().map(|row| Token(row.1)))?;
    sqlx::query(AssertSqlSafe(format!(
        "insert into {s}.journal_relay (relay, token, checkpoint, saved_at) \
         values ($1, nextval('{s}.journal_token'), $2::text::json, {s}.journal_now()) \
         on conflict (relay) do update set token = nextval('{s}.journal_token'), until = null, \
         checkpoint = excluded.checkpoint, saved_at = excluded.saved_at"
    )))
    .persistent(false)
    .bind(relay.as_str())
    .bind(print(to)?)
    .execute(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    tx.commit().await.map_err(|e| fail(what, e))?;
    parse(before.and_then(|row| row.0))
}
