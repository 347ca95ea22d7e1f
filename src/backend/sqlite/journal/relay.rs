//! Relays: their leadership and checkpoints, and sweeping what all of them have passed.

use std::collections::HashMap;
use std::time::Duration;

use rusqlite::{Connection, Row, ToSql, params};

use super::append::{aggregate_number, tenant_number};
use super::codec::{last, number};
use crate::backend::sqlite::fault::Doing;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Owner, RelayName};
use crate::journal::{
    Checkpoint, JournalSweep, Leadership, RelayState, may_be_forgotten, must_be_drawn, must_be_last,
    swept_up_to,
};
use crate::ledger::Token;

const COLUMNS: &str = "relay, owner, until, token, checkpoint, saved_at";

fn state(row: &Row<'_>) -> Result<RelayState> {
    let what = "reading a relay";
    let time = |at| row.get::<_, Option<i64>>(at).doing(what).map(|time| time.map(Time::from_micros));
    let corrupt = |error: Error| Error::Corrupt(format!("a relay of the journal: {error}"));
    let relay = RelayName::new(row.get::<_, String>(0).doing(what)?).map_err(corrupt)?;
    let owner = row.get::<_, Option<String>>(1).doing(what)?.map(Owner::new).transpose().map_err(corrupt)?;
    let checkpoint = row.get::<_, Option<String>>(4).doing(what)?;
    let checkpoint: Option<Checkpoint> = checkpoint
        .map(|text| serde_json::from_str(&text))
        .transpose()
        .map_err(|error| Error::Corrupt(format!("the checkpoint of the relay {relay}: {error}")))?;
    Ok(RelayState::new(relay, owner, time(2)?, Token(row.get(3).doing(what)?), checkpoint, time(5)?))
}

/// Every relay, by name.
pub(super) fn relays(conn: &Connection) -> Result<Vec<RelayState>> {
    let what = "reading the relays";
    let mut statement = conn
        .prepare_cached(&format!("SELECT {COLUMNS} FROM main.hapax_journal_relay ORDER BY relay"))
        .doing(what)?;
    let mut rows = statement.query([]).doing(what)?;
    let mut relays = Vec::new();
    while let Some(row) = rows.next().doing(what)? {
        relays.push(state(row)?);
    }
    Ok(relays)
}

fn find(conn: &Connection, relay: &RelayName) -> Result<Option<RelayState>> {
    let what = "reading a relay";
    let mut statement = conn
        .prepare_cached(&format!("SELECT {COLUMNS} FROM main.hapax_journal_relay WHERE relay = ?1"))
        .doing(what)?;
    let mut rows = statement.query([relay.as_str()]).doing(what)?;
    rows.next().doing(what)?.map(state).transpose()
}

fn next_token(conn: &Connection) -> Result<Token> {
    conn.prepare_cached("UPDATE main.hapax_journal_meta SET token = token + 1 RETURNING token")
        .and_then(|mut statement| statement.query_row([], |row| row.get(0)))
        .map(Token)
        .doing("drawing a token")
}

/// Acquires leadership, unless it is held.
pub(super) fn acquire_leadership(
    conn: &Connection,
    journal: &str,
    relay: &RelayName,
    owner: &Owner,
    lease: Duration,
    now: Time,
) -> Result<Result<Leadership>> {
    let before = find(conn, relay)?;
    if let Some(RelayState { owner: Some(by), until: Some(until), .. }) = &before
        && *until > now
    {
        return Ok(Ok(Leadership::Taken { by: by.clone(), until: *until }));
    }
    let checkpoint = before.and_then(|state| state.checkpoint).unwrap_or_else(|| Checkpoint::start(journal));
    if let Err(error) = must_be_drawn(relay, &checkpoint.position, last(conn)?) {
        return Ok(Err(error));
    }
    let token = next_token(conn)?;
    conn.prepare_cached(
        "INSERT INTO main.hapax_journal_relay (relay, owner, until, token) VALUES (?1, ?2, ?3, ?4) \
         ON CONFLICT (relay) DO UPDATE SET (owner, until, token) = (?2, ?3, ?4)",
    )
    .and_then(|mut statement| {
        statement.execute(params![relay.as_str(), owner.as_str(), now.plus(lease).as_micros(), token.0])
    })
    .doing("acquiring leadership")?;
    Ok(Ok(Leadership::Acquired { token, checkpoint }))
}

/// Updates a relay's row if `token` is its latest. The parameters of `set` start at 3.
fn under(
    conn: &Connection,
    relay: &RelayName,
    token: Token,
    set: &str,
    values: &[&dyn ToSql],
) -> Result<Result<()>> {
    let sql = format!("UPDATE main.hapax_journal_relay SET {set} WHERE relay = ?1 AND token = ?2");
    let name = relay.as_str();
    let all = [&[&name as &dyn ToSql, &token.0], values].concat();
    let changed = conn
        .prepare_cached(&sql)
        .and_then(|mut statement| statement.execute(&all[..]))
        .doing("changing a relay")?;
    let fenced = || Error::Fenced { what: format!("relay {relay} is led by someone else now") };
    Ok((changed > 0).then_some(()).ok_or_else(fenced))
}

/// Renews leadership until the given time; `None` releases it.
pub(super) fn keep(
    conn: &Connection,
    relay: &RelayName,
    token: Token,
    until: Option<Time>,
) -> Result<Result<()>> {
    let until = until.map(Time::as_micros);
    under(conn, relay, token, "until = ?3", &[&until])
}

/// Saves a checkpoint.
pub(super) fn save(
    conn: &Connection,
    relay: &RelayName,
    token: Token,
    checkpoint: &Checkpoint,
    now: Time,
) -> Result<Result<()>> {
    let text = text_of(checkpoint)?;
    let drawn = must_be_drawn(relay, &checkpoint.position, last(conn)?);
    if drawn.is_err() && find(conn, relay)?.is_some_and(|state| state.token == token) {
        return Ok(drawn);
    }
    under(conn, relay, token, "checkpoint = ?3, saved_at = ?4", &[&text, &now.as_micros()])
}

fn text_of(checkpoint: &Checkpoint) -> Result<String> {
    serde_json::to_string(checkpoint).map_err(|error| Error::invalid("checkpoint", error.to_string()))
}

/// Moves a checkpoint, under a new token.
pub(super) fn rewind(
    conn: &Connection,
    relay: &RelayName,
    to: &Checkpoint,
    if_token: Option<Token>,
    now: Time,
) -> Result<Result<Option<Checkpoint>>> {
    let before = find(conn, relay)?;
    if let Err(error) = must_be_last(relay, if_token, before.as_ref().map(|state| state.token)) {
        return Ok(Err(error));
    }
    if let Err(error) = must_be_drawn(relay, &to.position, last(conn)?) {
        return Ok(Err(error));
    }
    let before = before.and_then(|state| state.checkpoint);
    let token = next_token(conn)?;
    let text = text_of(to)?;
    conn.prepare_cached(
        "INSERT INTO main.hapax_journal_relay (relay, token, checkpoint, saved_at) VALUES (?1, ?2, ?3, ?4) \
         ON CONFLICT (relay) DO UPDATE SET (until, token, checkpoint, saved_at) = (NULL, ?2, ?3, ?4)",
    )
    .and_then(|mut statement| statement.execute(params![relay.as_str(), token.0, text, now.as_micros()]))
    .doing("putting a checkpoint elsewhere")?;
    Ok(Ok(before))
}

/// Deletes a relay that has no leader.
pub(super) fn forget(conn: &Connection, relay: &RelayName, now: Time) -> Result<Result<RelayState>> {
    let state = match may_be_forgotten(relay, find(conn, relay)?, now) {
        Ok(state) => state,
        refused => return Ok(refused),
    };
    conn.prepare_cached("DELETE FROM main.hapax_journal_relay WHERE relay = ?1")
        .and_then(|mut statement| statement.execute([relay.as_str()]))
        .doing("forgetting a relay")?;
    Ok(Ok(state))
}

/// Removes (or, in a dry run, counts) old events that every relay has passed and none holds back.
pub(super) fn sweep(conn: &Connection, settings: &JournalSweep, now: Time) -> Result<u64> {
    let what = "sweeping the journal";
    let relays = relays(conn)?;
    let Some(up_to) = swept_up_to(&relays) else { return Ok(0) };
    let behind = behind(conn, &relays)?;
    let cutoff = now.minus(settings.older_than).as_micros();
    let mut going = Vec::new();
    {
        let mut statement = conn
            .prepare_cached(
                "SELECT position, at, aggregate, seq FROM main.hapax_journal_event WHERE position <= ?1 ORDER BY position",
            )
            .doing(what)?;
        let mut rows = statement.query([number(up_to.number())]).doing(what)?;
        while going.len() < settings.batch_max
            && let Some(row) = rows.next().doing(what)?
        {
            if row.get::<_, i64>(1).doing(what)? >= cutoff {
                break; // the following ones are younger
            }
            let (aggregate, seq): (i64, i64) = (row.get(2).doing(what)?, row.get(3).doing(what)?);
            if behind.get(&aggregate).is_none_or(|next| (seq as u64) < *next) {
                going.push(row.get::<_, i64>(0).doing(what)?);
            }
        }
    }
    if !settings.dry_run {
        let mut statement =
            conn.prepare_cached("DELETE FROM main.hapax_journal_event WHERE position = ?1").doing(what)?;
        for position in &going {
            statement.execute([position]).doing(what)?;
        }
    }
    Ok(going.len() as u64)
}

/// For each aggregate that a relay holds back, the lowest seq that it needs.
fn behind(conn: &Connection, relays: &[RelayState]) -> Result<HashMap<i64, u64>> {
    let mut lowest = HashMap::new();
    for behind in relays.iter().filter_map(|relay| relay.checkpoint.as_ref()).flat_map(|c| &c.behind) {
        let of = behind.of()?;
        let Some(tenant) = tenant_number(conn, of.tenant.as_ref())? else { continue };
        let Some((aggregate, _)) = aggregate_number(conn, tenant, &of.aggregate)? else { continue };
        let next = lowest.entry(aggregate).or_insert(behind.next);
        *next = behind.next.min(*next);
    }
    Ok(lowest)
}
