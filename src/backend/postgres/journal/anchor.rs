//! Noticing that the server was put back: a fail-over to a replica that lost its last commits, or a restore.
//!
//! Positions are drawn again then, for other events, and whoever goes on at the old position would pass these by. An event is told by
//! its position and the moment it was appended, to the microsecond: this process remembers that of what it has lately read, and a
//! checkpoint is stored with that of the event it stands at. If another lies there, or the position was never drawn, nobody goes on.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use super::{Inner, fail, number};
use crate::error::{Error, Result};
use crate::journal::{Checkpoint, Position, Stored, put_back};

/// So many events are remembered: more than a relay has under way.
const KNOWN_MAX: usize = 20_000;
/// What was appended within so many microseconds before the last event that is known is published again: clocks may differ.
const MARGIN_US: i64 = 60_000_000;

/// When the events that were lately read were appended, by position.
#[derive(Debug, Default)]
pub(super) struct Anchors(Mutex<BTreeMap<u64, i64>>);

impl Anchors {
    pub(super) fn at(&self, position: u64) -> Option<i64> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&position).copied()
    }

    pub(super) fn learn<'s>(&self, events: impl IntoIterator<Item = &'s Stored>) {
        self.add(events.into_iter().map(|stored| (stored.position.number(), stored.at.as_micros())));
    }

    pub(super) fn add(&self, events: impl IntoIterator<Item = (u64, i64)>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(events);
        while known.len() > KNOWN_MAX {
            known.pop_first();
        }
    }

    /// Forgets everything; answers with when the oldest of it was appended.
    fn forget(&self) -> Option<i64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_values().min()
    }
}

/// A checkpoint as it is stored.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Anchored {
    #[serde(flatten)]
    pub(super) checkpoint: Checkpoint,
    /// When the event at its position was appended, in microseconds since 1970; none if that is not known.
    #[serde(default, rename = "appended", skip_serializing_if = "Option::is_none")]
    pub(super) at: Option<i64>,
}

/// Says whether the event at `$POSITION` is still the one that was appended at `$AT`; one that is not there was swept.
pub(super) fn is_same(position: &str, at: &str) -> String {
    format!(
        "case when {at}::bigint is null then true else coalesce((select (extract(epoch from a.at) * 1000000::numeric)::bigint = {at}::bigint \
         from {{s}}.journal_read({position}::bigint - 1, 1) a where a.position = {position}::bigint), true) end"
    )
}

/// The last position that was drawn.
pub(super) const DRAWN: &str =
    "(select case when p.is_called then p.last_value else 0 end from {s}.journal_position p)";

/// Refuses to go on at a position where the journal is not, or is another.
pub(super) async fn check(inner: &Inner, position: u64, at: Option<i64>, relay: Option<&str>) -> Result<()> {
    if position == 0 {
        return Ok(());
    }
    let sql = format!("select {DRAWN}, {}", is_same("$1", "$2")).replace("{s}", &inner.settings.schema);
    let query = sqlx::query_as::<_, (i64, bool)>(AssertSqlSafe(sql)).bind(number(position)).bind(at);
    let rows =
        inner.fetch_all(query).await.map_err(|e| fail("looking whether the journal was put back", e))?;
    let (drawn, same) = rows.first().copied().unwrap_or((0, true));
    if drawn as u64 >= position && same {
        return Ok(());
    }
    Err(refused(inner, position, at, drawn as u64, relay).await?)
}

/// The error, with where to go back to: before anything that can have been appended since.
pub(super) async fn refused(
    inner: &Inner,
    position: u64,
    at: Option<i64>,
    drawn: u64,
    relay: Option<&str>,
) -> Result<Error> {
    inner.horizon.forget().await;
    let oldest = inner.anchors.forget();
    let since = at.into_iter().chain(oldest).min().unwrap_or(i64::MIN + MARGIN_US);
    let sql = format!(
        "select j.position from {}.journal j where j.position <= $1 \
         and (extract(epoch from j.at) * 1000000::numeric)::bigint < $2 order by j.position desc limit 1",
        inner.settings.schema
    );
    let query = sqlx::query_as::<_, (i64,)>(AssertSqlSafe(sql))
        .persistent(false)
        .bind(number(position.min(drawn)))
        .bind(since - MARGIN_US);
    let rows =
        inner.fetch_all(query).await.map_err(|e| fail("looking how far the journal was put back", e))?;
    let safe = Position::of(rows.first().map_or(0, |row| row.0 as u64));
    let found = if drawn < position {
        format!("the last position it has given out is {drawn}")
    } else {
        format!("another event lies there; the last position it has given out is {drawn}")
    };
    Ok(put_back(relay, &Position::of(position), &found, &safe))
}
