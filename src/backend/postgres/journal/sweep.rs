//! Removes old events that are published, in steps.

use std::time::Duration;

use sqlx::{AssertSqlSafe, PgConnection};

use super::{Inner, fail, relay};
use crate::backend::postgres::codes::{count, from_row, micros, tenant};
use crate::backend::postgres::database::{BEGIN_BRIEFLY, begin};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint};
use crate::id::{Aggregate, EventId};
use crate::journal::{JournalSweep, Position, RelayState, Stored, is_behind, swept_up_to};

const WHAT: &str = "sweeping the journal";

from_row! {
    /// An event that may go.
    struct Candidate { position: i64, seq: i64, tenant: String, aggregate: String, is_old: bool }
}

/// Removes up to `batch_max` events that may go. Events that another sweep removed first do not
/// count; then it looks for others.
pub(super) async fn sweep(inner: &Inner, settings: &JournalSweep) -> Result<u64> {
    loop {
        let (found, gone) = step(inner, settings).await?;
        if found == 0 || gone > 0 {
            return Ok(gone);
        }
    }
}

/// Reads the oldest events, a page at a time, and removes the first that may go. It ends at a page
/// without an old event, because later events are newer. It skips events that a relay still needs.
/// Returns how many events it found, and how many of them it removed itself.
async fn step(inner: &Inner, settings: &JournalSweep) -> Result<(usize, u64)> {
    let mut tx = begin(inner.pool(), BEGIN_BRIEFLY).await.map_err(|e| fail(WHAT, e))?;
    let relays = relay::relays_in(inner, &mut tx, true).await?;
    let Some(up_to) = swept_up_to(&relays) else { return Ok((0, 0)) };
    let (mut after, mut going) = (0, Vec::new());
    while going.len() < settings.batch_max {
        let page = page(inner, &mut tx, after, &up_to, settings).await?;
        let Some(last) = page.last() else { break };
        after = last.position;
        let is_old = page.iter().any(|candidate| candidate.is_old);
        for candidate in page {
            let position = candidate.position;
            if going.len() < settings.batch_max && candidate.is_old && !held_back(&relays, candidate)? {
                going.push(position);
            }
        }
        if !is_old {
            break;
        }
    }
    if settings.dry_run || going.is_empty() {
        return Ok((going.len(), going.len() as u64));
    }
    let sql = format!("delete from {}.journal where position = any($1)", inner.settings.schema);
    let query = sqlx::query(AssertSqlSafe(sql)).persistent(false).bind(&going);
    let gone = query.execute(&mut *tx).await.map_err(|e| fail(WHAT, e))?.rows_affected();
    tx.commit().await.map_err(|e| fail(WHAT, e))?;
    Ok((going.len(), gone))
}

async fn page(
    inner: &Inner,
    connection: &mut PgConnection,
    after: i64,
    up_to: &Position,
    settings: &JournalSweep,
) -> Result<Vec<Candidate>> {
    let s = &inner.settings.schema;
    let sql = format!(
        "select j.position, j.seq, j.tenant, j.aggregate, j.at < now.at - $3 * interval '1 microsecond' as is_old \
         from {s}.journal j cross join (select {s}.journal_now() as at offset 0) now \
         where j.position > $1 and j.position <= $2 order by j.position limit $4"
    );
    // A timestamp cannot express anything longer ago.
    let older = settings.older_than.min(Duration::from_secs(4000 * 365 * 86_400));
    sqlx::query_as(AssertSqlSafe(sql))
        .persistent(false)
        .bind(after)
        .bind(count(up_to.number()))
        .bind(micros(older))
        .bind(count(settings.batch_max.clamp(100, 10_000) as u64))
        .fetch_all(connection)
        .await
        .map_err(|e| fail(WHAT, e))
}

fn held_back(relays: &[RelayState], candidate: Candidate) -> Result<bool> {
    // Only aggregate and seq matter.
    let nobody = EventId::new("-").map_err(|e| Error::Corrupt(e.to_string()))?;
    let mut event = Event::new(nobody);
    event.tenant = tenant(candidate.tenant)?;
    let stored = Stored::new(
        Position::of(candidate.position as u64),
        Time::default(),
        Fingerprint([0; 16]),
        event,
        Aggregate::new(candidate.aggregate)?,
        candidate.seq as u64,
    );
    Ok(is_behind(relays, &stored))
}
