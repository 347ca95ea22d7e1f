//! Which relay of a name leads, and how far it has come. The token decides: it is drawn under the
//! lock of the relay's row, so a later leadership has a higher one.

use std::sync::Arc;
use std::time::Duration;

use sqlx::AssertSqlSafe;

use super::anchor::{self, StoredCheckpoint};
use super::{Inner, fail};
use crate::backend::postgres::codes::{self, count, from_row};
use crate::backend::postgres::database::{BEGIN, BEGIN_BRIEFLY, begin};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::journal::{Checkpoint, Leadership, RelayState, may_be_forgotten, must_be_drawn, must_be_last};
use crate::ledger::Token;

/// How often to try again when another relay took and released leadership in between.
const ATTEMPTS_MAX: u32 = 5;

fn micros(lease: Duration) -> i64 {
    // A century is long enough, and fits into a timestamp.
    codes::micros(lease).min(100 * 365 * 86_400 * 1_000_000)
}

fn parse(checkpoint: Option<String>) -> Result<Option<StoredCheckpoint>> {
    let strange = |e: serde_json::Error| Error::Corrupt(format!("a relay's checkpoint: {e}"));
    checkpoint.map(|text| serde_json::from_str(&text).map_err(strange)).transpose()
}

fn print(checkpoint: &Checkpoint, at: Option<i64>) -> Result<String> {
    let anchored = StoredCheckpoint { checkpoint: checkpoint.clone(), at };
    serde_json::to_string(&anchored).map_err(|e| Error::Corrupt(format!("a checkpoint: {e}")))
}

from_row! {
    /// The token of a relay's last leader, and its checkpoint.
    struct Stored { token: i64, checkpoint: Option<String> }
}

from_row! {
    struct Leader { owner: String, until: i64 }
}

pub(super) async fn acquire_leadership(
    inner: &Inner,
    relay: &RelayName,
    owner: &Owner,
    lease: Duration,
) -> Result<Leadership> {
    let what = "acquiring leadership";
    let s = &inner.settings.schema;
    let take = format!(
        "insert into {s}.journal_relay as r (relay, owner, until, token) \
         values ($1, $2, {s}.journal_now() + $3::bigint::float8 * interval '1 microsecond', nextval('{s}.journal_token'::regclass)) \
         on conflict (relay) do update set owner = excluded.owner, token = nextval('{s}.journal_token'::regclass), \
         until = {s}.journal_now() + $3::bigint::float8 * interval '1 microsecond' \
         where r.owner is null or r.until is null or r.until <= {s}.journal_now() returning token, checkpoint::text as checkpoint"
    );
    let who = format!(
        "select owner, (extract(epoch from until) * 1000000::numeric)::bigint as until from {s}.journal_relay \
         where relay = $1 and owner is not null and until is not null"
    );
    for _ in 0..ATTEMPTS_MAX {
        let query = sqlx::query_as::<_, Stored>(AssertSqlSafe(take.clone()))
            .persistent(false)
            .bind(relay.as_str())
            .bind(owner.as_str())
            .bind(micros(lease));
        if let Some(acquired) = inner.fetch_first(what, query).await? {
            let token = Token(acquired.token);
            let Some(StoredCheckpoint { checkpoint, at }) = parse(acquired.checkpoint)? else {
                return Ok(Leadership::Acquired { token, checkpoint: Checkpoint::start(&inner.id) });
            };
            let position = checkpoint.position.number();
            if let Err(error) = anchor::check(inner, position, at, Some(relay.as_str())).await {
                release_leadership(inner, relay, token).await?;
                return Err(error);
            }
            inner.anchors.add(at.map(|at| (position, at)));
            return Ok(Leadership::Acquired { token, checkpoint });
        }
        let query =
            sqlx::query_as::<_, Leader>(AssertSqlSafe(who.clone())).persistent(false).bind(relay.as_str());
        if let Some(leader) = inner.fetch_first(what, query).await? {
            let until = Time::from_micros(leader.until);
            return Ok(Leadership::Taken { by: Owner::new(leader.owner)?, until });
        }
    }
    Err(contended(what))
}

/// Changes the state of a leading relay. If no row changes, this relay does not lead.
async fn change(inner: &Inner, relay: &RelayName, token: Token, set: &str) -> Result<()> {
    let s = &inner.settings.schema;
    let sql = format!("update {s}.journal_relay set {set} where relay = $1 and token = $2");
    let query = sqlx::query(AssertSqlSafe(sql)).bind(relay.as_str()).bind(token.0);
    match inner.execute("writing a relay's state", query).await? {
        0 => Err(fenced(relay)),
        _ => Ok(()),
    }
}

pub(super) async fn renew_leadership(
    inner: &Inner,
    relay: &RelayName,
    token: Token,
    lease: Duration,
) -> Result<()> {
    let s = &inner.settings.schema;
    let set = format!("until = {s}.journal_now() + {}::float8 * interval '1 microsecond'", micros(lease));
    change(inner, relay, token, &set).await
}

pub(super) async fn save(
    inner: &Inner,
    relay: &RelayName,
    token: Token,
    checkpoint: &Checkpoint,
) -> Result<()> {
    checkpoint.must_be_of(&inner.id)?;
    let position = checkpoint.position.number();
    let at = inner.anchors.at(position);
    let query = sqlx::query(AssertSqlSafe(Arc::clone(&inner.sql.save)))
        .bind(relay.as_str())
        .bind(token.0)
        .bind(print(checkpoint, at)?)
        .bind(count(position))
        .bind(at);
    if inner.execute("saving a checkpoint", query).await? > 0 {
        return Ok(());
    }
    let sql = format!("select token from {}.journal_relay where relay = $1", inner.settings.schema);
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(sql)).persistent(false).bind(relay.as_str());
    let last = inner.fetch_first("reading a relay's token", query).await?;
    if last.is_some_and(|(last,)| last == token.0) {
        anchor::check(inner, position, at, Some(relay.as_str())).await?;
    }
    Err(fenced(relay))
}

fn contended(what: &str) -> Error {
    let what =
        format!("{what}: another relay took and released the leadership {ATTEMPTS_MAX} times meanwhile");
    Error::Contended { what, source: None }
}

fn fenced(relay: &RelayName) -> Error {
    Error::Fenced { what: format!("relay {relay} is led by someone else now") }
}

pub(super) async fn release_leadership(inner: &Inner, relay: &RelayName, token: Token) -> Result<()> {
    change(inner, relay, token, "until = null").await
}

pub(super) async fn relays(inner: &Inner) -> Result<Vec<RelayState>> {
    relays_in(inner, &mut *begin(inner.pool(), BEGIN).await.map_err(|e| fail("reading relays", e))?, false)
        .await
}

/// Every relay. If `locked`, none of them can be rewound or forgotten until the transaction ends. A
/// key share lock is enough, because those operations lock the whole row; it does not block a relay
/// that leads and saves.
pub(super) async fn relays_in(
    inner: &Inner,
    connection: &mut sqlx::PgConnection,
    locked: bool,
) -> Result<Vec<RelayState>> {
    let sql = format!(
        "select {COLUMNS} from {}.journal_relay order by relay {}",
        inner.settings.schema,
        if locked { "for key share" } else { "" }
    );
    let rows: Vec<Row> = sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .fetch_all(connection)
        .await
        .map_err(|e| fail("reading relays", e))?;
    rows.into_iter().map(Row::state).collect()
}

/// The columns of [`Row`].
const COLUMNS: &str = "relay, owner, (extract(epoch from until) * 1000000::numeric)::bigint as until, token, \
     checkpoint::text as checkpoint, (extract(epoch from saved_at) * 1000000::numeric)::bigint as saved_at";

from_row! {
    struct Row {
        relay: String, owner: Option<String>, until: Option<i64>, token: i64,
        checkpoint: Option<String>, saved_at: Option<i64>,
    }
}

impl Row {
    fn state(self) -> Result<RelayState> {
        Ok(RelayState::new(
            RelayName::new(self.relay)?,
            self.owner.map(Owner::new).transpose()?,
            self.until.map(Time::from_micros),
            Token(self.token),
            parse(self.checkpoint)?.map(|anchored| anchored.checkpoint),
            self.saved_at.map(Time::from_micros),
        ))
    }
}

pub(super) async fn forget(inner: &Inner, relay: &RelayName) -> Result<RelayState> {
    let what = "forgetting a relay";
    let s = &inner.settings.schema;
    let forget = format!(
        "delete from {s}.journal_relay where relay = $1 \
         and (owner is null or until is null or until <= {s}.journal_now()) returning {COLUMNS}"
    );
    for _ in 0..ATTEMPTS_MAX {
        let query =
            sqlx::query_as::<_, Row>(AssertSqlSafe(forget.clone())).persistent(false).bind(relay.as_str());
        if let Some(row) = inner.fetch_first(what, query).await? {
            return row.state();
        }
        let known = relays(inner).await?.into_iter().find(|state| state.relay == *relay);
        // A relay that may be forgotten was released just now: try again.
        may_be_forgotten(relay, known, super::read::now(inner).await?)?;
    }
    Err(contended(what))
}

from_row! {
    /// The last position that was drawn, and when the event at a position was appended.
    struct Drawn { drawn: i64, at: Option<i64> }
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
    let mut tx = begin(inner.pool(), BEGIN_BRIEFLY).await.map_err(|e| fail(what, e))?;
    let before: Option<Stored> = sqlx::query_as(AssertSqlSafe(format!(
        "select checkpoint::text as checkpoint, token from {s}.journal_relay where relay = $1 for update"
    )))
    .persistent(false)
    .bind(relay.as_str())
    .fetch_optional(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    must_be_last(relay, if_token, before.as_ref().map(|before| Token(before.token)))?;
    let position = to.position.number();
    let there: Drawn = sqlx::query_as(AssertSqlSafe(
        format!(
            "select {} as drawn, (select (extract(epoch from a.at) * 1000000::numeric)::bigint \
             from {{s}}.journal_read($1 - 1, 1) a where a.position = $1) as at",
            anchor::DRAWN
        )
        .replace("{s}", s),
    ))
    .persistent(false)
    .bind(count(position))
    .fetch_one(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    must_be_drawn(relay, &to.position, there.drawn as u64)?;
    let before = parse(before.and_then(|before| before.checkpoint))?;
    // If the position does not change, its anchor stays: nothing has checked which event is there
    // now.
    let kept = before.as_ref().filter(|anchored| anchored.checkpoint.position == to.position);
    let at = kept.map_or(there.at, |anchored| anchored.at);
    sqlx::query(AssertSqlSafe(format!(
        "insert into {s}.journal_relay (relay, token, checkpoint, saved_at) \
         values ($1, nextval('{s}.journal_token'::regclass), $2::text::json, {s}.journal_now()) \
         on conflict (relay) do update set token = nextval('{s}.journal_token'::regclass), until = null, \
         checkpoint = excluded.checkpoint, saved_at = excluded.saved_at"
    )))
    .persistent(false)
    .bind(relay.as_str())
    .bind(print(to, at)?)
    .execute(&mut *tx)
    .await
    .map_err(|e| fail(what, e))?;
    tx.commit().await.map_err(|e| fail(what, e))?;
    Ok(before.map(|anchored| anchored.checkpoint))
}
