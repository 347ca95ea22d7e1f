//! Detects that the server was put back: by a failover to a replica that lost its last commits, or
//! by a restore.
//!
//! Positions are then drawn again for other events, which a reader that continues at its old
//! position would skip. An event is identified by its position and the time it was appended, to the
//! microsecond. This process remembers both for events that it read recently, and a checkpoint is
//! stored with the time of the event at its position. If another event is there, or the position
//! was never drawn, reading and saving fail.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};
use sqlx::AssertSqlSafe;

use super::Inner;
use crate::backend::postgres::codes::{count, from_row};
use crate::error::{Error, Result};
use crate::journal::{Checkpoint, Position, Stored, put_back};

/// How many events are remembered: more than a relay has in flight.
const KNOWN_MAX: usize = 20_000;
/// Events appended within this many microseconds before the known ones are published again, because
/// clocks may differ.
const MARGIN_US: i64 = 60_000_000;

/// When recently read events were appended, by position.
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

    /// Forgets everything, and returns when the oldest of it was appended.
    fn forget(&self) -> Option<i64> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner)).into_values().min()
    }
}

/// A checkpoint as stored.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredCheckpoint {
    #[serde(flatten)]
    pub(super) checkpoint: Checkpoint,
    /// When the event at its position was appended, in microseconds since 1970; `None` if unknown.
    #[serde(default, rename = "appended", skip_serializing_if = "Option::is_none")]
    pub(super) at: Option<i64>,
}

/// SQL for whether the event at `position` is still the one appended at `at`. A missing event was
/// swept, so it counts as the same.
pub(super) fn is_same(position: &str, at: &str) -> String {
    format!(
        "case when {at}::bigint is null then true else coalesce((select (extract(epoch from a.at) * 1000000::numeric)::bigint = {at}::bigint \
         from {{s}}.journal_read({position}::bigint - 1, 1) a where a.position = {position}::bigint), true) end"
    )
}

/// SQL for the last position that was drawn.
pub(super) const DRAWN: &str =
    "(select case when p.is_called then p.last_value else 0 end from {s}.journal_position p)";

/// Fails if the journal has not drawn the position, or has another event there.
pub(super) async fn check(inner: &Inner, position: u64, at: Option<i64>, relay: Option<&str>) -> Result<()> {
    if position == 0 {
        return Ok(());
    }
    let sql = format!("select {DRAWN} as drawn, {} as same", is_same("$1", "$2"));
    let query = sqlx::query_as::<_, Found>(AssertSqlSafe(sql.replace("{s}", &inner.settings.schema)))
        .bind(count(position))
        .bind(at);
    let found = inner.fetch_first("checking whether the journal was restored", query).await?;
    let Found { drawn, same } = found.unwrap_or(Found { drawn: 0, same: true });
    if drawn as u64 >= position && same {
        return Ok(());
    }
    Err(refused(inner, position, at, drawn as u64, relay).await?)
}

from_row! {
    struct Found {
        drawn: i64,
        /// Whether the event is still the same.
        same: bool,
    }
}

/// The error, with a safe position to go back to: before anything that can have been appended
/// since.
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
        .bind(count(position.min(drawn)))
        .bind(since - MARGIN_US);
    let found = inner.fetch_first("checking how far the journal was restored", query).await?;
    let safe = Position::of(found.map_or(0, |(position,)| position as u64));
    let found = if drawn < position {
        format!("the last position it has given out is {drawn}")
    } else {
        format!("another event lies there; the last position it has given out is {drawn}")
    };
    Ok(put_back(relay, &Position::of(position), &found, &safe))
}
