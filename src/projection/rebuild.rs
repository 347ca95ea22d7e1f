//! Rebuilds a projection from the history of its records.

use std::time::Duration;

use super::{Applied, Change, History, Name, Projection, Rebuilding};
use crate::error::{Error, Result};

/// How often a change that the projection cannot take is offered, and the pause in between.
/// Together five minutes, since a search engine may be busy for minutes.
const OFFERS: u32 = 300;
const PAUSE: Duration = Duration::from_secs(1);
/// How many changes are applied at once.
const BATCH: usize = 200;
/// How many rejections are kept as examples.
const EXAMPLES: usize = 10;

/// What a rebuild did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Rebuilt {
    /// How many changes were applied.
    pub changes: u64,
    /// How many records they were about.
    pub records: u64,
    /// How many changes the projection refused permanently.
    pub rejected: u64,
    /// How many records of a lower generation, which the history does not have, were removed from a place that is
    /// filled while it serves.
    pub removed: u64,
    /// The first refused records, with the reasons.
    pub examples: Vec<(Name, String)>,
}

/// Rebuilds a projection from a history, while it serves. Nothing is begun unless the history has every
/// event of every record.
///
/// 1. A separate place is filled with the last version of each record.
/// 2. Consumers write there from now on.
/// 3. What they wrote to the old place meanwhile is read from the history.
/// 4. Readers are switched to the new place, and the old one is removed.
///
/// Killed at any point it loses nothing: readers keep the old place until the new one has everything, and
/// the next rebuild begins again or goes on. Consumers need not know, and run under their own scope:
/// versions decide, so it does not matter who writes first.
pub async fn rebuild(projection: &dyn Projection, history: &mut History<'_>) -> Result<Rebuilt> {
    let mut rebuilt = Rebuilt::default();
    projection.accepts(history.generation)?;
    history.survey().await?;
    let fresh = projection.begin_rebuild().await?;
    while let Some(changes) = history.next().await? {
        fill(&*fresh, &changes, &mut rebuilt).await?;
    }
    history.check()?;
    crate::crash_point!("projection.before-take");
    fresh.take_writes().await?;
    crate::crash_point!("projection.after-take");
    // A consumer has written what it read meanwhile to the old place.
    while let Some(changes) = history.next().await? {
        fill(&*fresh, &changes, &mut rebuilt).await?;
    }
    crate::crash_point!("projection.before-switch");
    fresh.switch().await?;
    crate::crash_point!("projection.after-switch");
    rebuilt.removed = fresh.remove_older(history.generation).await?;
    rebuilt.records = history.records() as u64;
    Ok(rebuilt)
}

async fn fill(fresh: &dyn Rebuilding, changes: &[Change], rebuilt: &mut Rebuilt) -> Result<()> {
    for batch in changes.chunks(BATCH) {
        let mut left = batch.to_vec();
        let mut offers = 0;
        while !left.is_empty() {
            offers += 1;
            let (mut again, mut failure) = (Vec::new(), None);
            match fresh.apply(&left).await {
                Ok(applied) => {
                    for (change, applied) in left.into_iter().zip(applied) {
                        match applied {
                            Applied::Newer | Applied::Stale => rebuilt.changes += 1,
                            Applied::Rejected { reason } => reject(rebuilt, &change, reason),
                            Applied::Busy { reason } | Applied::Failed { reason } => {
                                failure = Some(Error::Unavailable { what: reason, source: None });
                                again.push(change);
                            }
                        }
                    }
                }
                Err(error) if error.is_retryable() => (again, failure) = (left, Some(error)),
                Err(error) => return Err(error),
            }
            left = again;
            if let Some(error) = failure {
                if offers >= OFFERS {
                    return Err(error);
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
    }
    Ok(())
}

fn reject(rebuilt: &mut Rebuilt, change: &Change, reason: String) {
    rebuilt.rejected += 1;
    if rebuilt.examples.len() < EXAMPLES {
        rebuilt.examples.push((Name::of(change), reason));
    }
}
