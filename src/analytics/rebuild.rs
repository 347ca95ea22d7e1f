//! Rebuilds a read model while it serves: a second one is filled, compared with the records, and
//! replaces the first.
//!
//! ```text
//! second model ─▶ fed like the first ─▶ every partition has a pulse ─▶ equal to the records ─▶ as far as the first ─▶ exchanged
//! ```
//!
//! Emptying the first one instead would interrupt its answers. Overwriting it would keep a record
//! whose deletion was missed (a lost replication slot, a restore), because no change says that it
//! was deleted.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::{
    Feed, FeedHandle, FeedProgress, FeedSettings, PartitionSync, ReadModel, RejectedEntry, Uuid, Verified,
    VerifySettings, earliest, verify,
};
use crate::bus::{Bus, Partition};
use crate::error::{Error, Result};
use crate::event::Origin;
use crate::records::Snapshot;

/// How long between two looks.
const PAUSE: Duration = Duration::from_millis(200);
/// How many rejected changes are read at once, at first.
const REJECTED: usize = 1000;

/// A second model that is filled.
#[async_trait]
pub trait SecondModel: Send + Sync {
    /// The model.
    fn model(&self) -> Arc<dyn ReadModel>;

    /// Puts it in the place of the first one in one step, and removes that. Fails if another process has taken it
    /// over, or has put another one there.
    async fn exchange(&self) -> Result<()>;
}

/// What [`ReadModel::second`] found.
#[non_exhaustive]
pub enum Second {
    /// One that is to be filled, or filled on.
    Filling(Box<dyn SecondModel>),
    /// A rebuild had ended but for its last step, which is done now: there is nothing to fill.
    Finished,
}

/// How to build a read model again.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct RebuildSettings {
    /// How the second model is fed.
    pub feed: FeedSettings,
    /// How long to wait without progress before giving up, and how long to recheck differences.
    pub wait: Duration,
    /// Whether to start over instead of continuing an unfinished rebuild.
    pub anew: bool,
}

impl RebuildSettings {
    /// Settings with a patience of 60 s, which continue an unfinished rebuild.
    pub fn new(feed: FeedSettings) -> Self {
        RebuildSettings { feed, wait: Duration::from_secs(60), anew: false }
    }
}

/// How a rebuild ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rebuilt {
    /// The second model has taken the place of the first. These are its sums.
    Exchanged(Verified),
    /// The second model differs from the records. The first one still serves, and the next rebuild
    /// continues with the second one.
    Differs(Verified),
    /// An earlier rebuild had exchanged the models already; what it left is removed.
    Finished,
}

/// Rebuilds a read model. It may be killed at any point and called again: it continues where it
/// was. A feed of the first model continues with the second one by itself, if its settings are the
/// same.
///
/// `begin` is what the second model starts with, as for [`Feed::with_snapshot`]; it is compared
/// with `records`. `say` is called with each step.
pub async fn rebuild(
    model: &dyn ReadModel,
    bus: Arc<dyn Bus>,
    begin: Option<Arc<dyn Snapshot>>,
    records: &dyn Snapshot,
    settings: &RebuildSettings,
    say: &mut (dyn FnMut(&str) + Send),
) -> Result<Rebuilt> {
    let generation = settings.feed.generation;
    let second = match model.second(generation, settings.anew).await? {
        Second::Finished => return Ok(Rebuilt::Finished),
        Second::Filling(second) => second,
    };
    let topic = &settings.feed.topic;
    for known in second.model().partitions().await? {
        if known.partition.topic != *topic {
            return Err(Error::Config(format!(
                "an unfinished rebuild has read topic {}, but this one would read {topic}: start over",
                known.partition.topic
            )));
        }
    }
    say("filling the second read model");
    let mut feed = Feed::new(bus, second.model(), settings.feed.clone())?;
    if let Some(begin) = begin {
        feed = feed.with_snapshot(begin);
    }
    let feeding = Feeding { handle: feed.handle(), task: Some(tokio::spawn(feed.run())) };
    let mut build = Build { first: model, second: &*second, feeding, wait: settings.wait };
    let rebuilt = build.go_on(records, generation, say).await;
    let ended = build.feeding.end().await;
    match rebuilt {
        Ok(verified) if !verified.differences.is_empty() => Ok(Rebuilt::Differs(verified)),
        Ok(verified) => {
            ended?;
            second.exchange().await?;
            Ok(Rebuilt::Exchanged(verified))
        }
        Err(error) => Err(error),
    }
}

/// The feed of the second model. It ends with this.
struct Feeding {
    handle: FeedHandle,
    task: Option<JoinHandle<Result<FeedProgress>>>,
}

impl Feeding {
    /// Fails if the feed has ended.
    async fn alive(&mut self) -> Result<()> {
        match self.task.take_if(|task| task.is_finished()) {
            None => Ok(()),
            Some(task) => {
                task.await.map_err(|error| Error::Corrupt(format!("the feed panicked: {error}")))??;
                Err(Error::Unavailable {
                    what: "the feed of the second read model ended".into(),
                    source: None,
                })
            }
        }
    }

    async fn end(&mut self) -> Result<()> {
        self.handle.stop();
        match self.task.take() {
            Some(task) => {
                task.await.map_err(|error| Error::Corrupt(format!("the feed panicked: {error}")))?.map(drop)
            }
            None => Ok(()),
        }
    }
}

impl Drop for Feeding {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

struct Build<'b> {
    first: &'b dyn ReadModel,
    second: &'b dyn SecondModel,
    feeding: Feeding,
    wait: Duration,
}

impl Build<'_> {
    /// From a second model that begins to one that may be exchanged, unless it differs.
    async fn go_on(
        &mut self,
        records: &dyn Snapshot,
        generation: u16,
        say: &mut (dyn FnMut(&str) + Send),
    ) -> Result<Verified> {
        let model = self.second.model();
        self.until_pulses(&*model).await?;
        crate::crash_point!("analytics.rebuild.filled");
        let before = model.partitions().await?;
        say("comparing it with the records");
        let settings = VerifySettings { generation, wait: self.wait, ..VerifySettings::default() };
        let verified = verify(&*model, records, &settings).await?;
        self.feeding.alive().await?;
        if !verified.differences.is_empty() {
            return Ok(verified);
        }
        // What could not be read before was not missing after all: every record is as it should be.
        drop_rejected_before(&*model, &before, REJECTED).await?;
        crate::crash_point!("analytics.rebuild.verified");
        self.until_as_far(&*model).await?;
        say("replacing the first read model with it");
        Ok(verified)
    }

    /// Waits until every partition has a pulse: then everything that was written before is in it.
    async fn until_pulses(&mut self, model: &dyn ReadModel) -> Result<()> {
        let (mut end, mut seen) = (Instant::now() + self.wait, None);
        loop {
            self.feeding.alive().await?;
            let progress = self.feeding.handle.progress();
            let partitions = model.partitions().await?;
            if progress.follows && earliest(partitions.iter().map(|of| of.pulse)).is_some() {
                return Ok(());
            }
            // Filling a large model takes its time, but something happens.
            let now = Some((progress.clone(), partitions));
            if now != seen || (!progress.follows && progress.away.is_none()) {
                (end, seen) = (Instant::now() + self.wait, now);
            }
            if Instant::now() >= end {
                let reason = progress.away.unwrap_or_else(|| {
                    "no pulse has arrived in some partition: is `hapax serve` running, with the same settings?".into()
                });
                let what = format!(
                    "the second read model is not complete yet ({reason}); run this again to continue"
                );
                return Err(Error::Unavailable { what, source: None });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Waits until the second model is as far as the first: `lastSyncAt` steps back by a moment at most.
    async fn until_as_far(&mut self, model: &dyn ReadModel) -> Result<()> {
        let end = Instant::now() + self.wait;
        loop {
            self.feeding.alive().await?;
            let first = self.first.last_sync_at(Uuid::nil()).await?;
            let second = model.last_sync_at(Uuid::nil()).await?;
            if second.is_some() && second >= first {
                return Ok(());
            }
            if Instant::now() >= end {
                let known = |at: Option<crate::Time>| {
                    at.map_or_else(|| "no known time".to_owned(), |at| at.to_string())
                };
                let what = format!(
                    "the second read model is complete up to {}, the first up to {}; run this again to continue",
                    known(second),
                    known(first)
                );
                return Err(Error::Unavailable { what, source: None });
            }
            tokio::time::sleep(PAUSE).await;
        }
    }
}

/// Drops what was rejected before these places, however much it is; what was rejected later stays.
async fn drop_rejected_before(model: &dyn ReadModel, places: &[PartitionSync], page: usize) -> Result<()> {
    let mut limit = page;
    loop {
        let rejected = model.rejected(limit).await?;
        let (is_all, mut dropped) = (rejected.len() < limit, 0);
        for RejectedEntry { rejected, .. } in rejected {
            let Origin { topic, partition: number, offset } = rejected.origin;
            let partition = Partition { topic, number };
            let place =
                places.iter().find(|place| place.partition == partition).and_then(|place| place.offset);
            if place.is_some_and(|place| offset < place) {
                model.drop_rejected(&partition, offset).await?;
                dropped += 1;
            }
        }
        match (is_all, dropped) {
            (true, _) => return Ok(()),
            // All of the page stays. What is to be dropped may follow it.
            (false, 0) => limit = limit.saturating_mul(2),
            (false, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::analytics::{Block, MemoryReadModel, Rejected};
    use crate::id::Topic;

    /// More than a page was rejected before the comparison, and more than a page after it, in the partition that comes
    /// first.
    #[tokio::test]
    async fn t436_however_much_was_rejected_before_a_comparison_is_dropped_and_nothing_else() {
        let (model, topic) = (MemoryReadModel::default(), Topic::new("records").unwrap());
        let mut places = Vec::new();
        for number in 0..2 {
            let partition = Partition { topic: topic.clone(), number };
            let mut block = Block::new(partition.clone(), 2, 0..50);
            let rejected = |offset| {
                let origin = Origin::new(topic.clone(), number, offset);
                (Rejected { tenant: None, origin, reason: "it is broken".into(), payload: Vec::new() }, None)
            };
            block.rejected = (0..50).map(rejected).collect();
            model.apply(&[block]).await.unwrap();
            places.push(PartitionSync::new(partition, Some(if number == 0 { 10 } else { 50 }), None));
        }
        drop_rejected_before(&model, &places, 7).await.unwrap();
        let left: Vec<_> =
            model.rejected(1000).await.unwrap().into_iter().map(|of| of.rejected.origin).collect();
        let expected: Vec<_> = (10..50).map(|offset| Origin::new(topic.clone(), 0, offset)).collect();
        assert_eq!(left, expected);
    }
}
