//! Fills a new read model with a copy of the records.
//!
//! The oldest offset of each partition is read first. A change that retention removed below it was
//! written before the records are read, so the copy has it; later changes are read from the topic.
//! A change that is in both is the same version twice.
//!
//! Deletions are copied too. The topic no longer has old deletions, but a relay that is rewound
//! publishes a record's creation and its deletion again, and answers between the two would show the
//! record.

use super::{Block, Change, FeedSettings, ReadModel, Version};
use crate::bus::{Bus, Partition};
use crate::error::Result;
use crate::event::Origin;
use crate::records::{Scan, Snapshot};

/// How many records are read at once.
const PAGE: usize = 1000;

/// Does nothing if the model has read anything before.
pub(super) async fn take(
    bus: &dyn Bus,
    model: &dyn ReadModel,
    source: &dyn Snapshot,
    settings: &FeedSettings,
) -> Result<()> {
    let known = model.partitions().await?;
    let of_topic = || known.iter().filter(|known| known.partition.topic == settings.topic);
    if of_topic().any(|known| known.offset.is_some()) {
        return Ok(());
    }
    let mut oldest = Vec::new();
    for known in of_topic() {
        oldest.push((known.partition.clone(), bus.range(&known.partition).await?.0));
    }
    let partitions = i32::try_from(oldest.len()).unwrap_or(i32::MAX);
    let mut scan = Scan::new(PAGE);
    let mut count = 0_u64;
    loop {
        let page = source.snapshot(&scan).await?;
        let Some(last) = page.last() else { break };
        scan.after = Some(last.name());
        count += page.len() as u64;
        // The offsets are noted at the end: until then the model has read nothing, and begins again.
        let Some((partition, _)) = oldest.first() else { break };
        let origin = Origin::new(partition.topic.clone(), partition.number, -1);
        let changes = page.into_iter().map(|of| Change::of_record(of, settings.generation, origin.clone()));
        let mut block = Block::aside(partition.clone(), partitions);
        block.changes = changes.collect::<Result<_>>()?;
        model.apply(&[block]).await?;
    }
    bury(model, source, settings, oldest.first().map(|(partition, _)| partition), partitions).await?;
    let blocks = oldest.into_iter().map(|(partition, oldest)| Block::new(partition, partitions, 0..oldest));
    model.apply(&blocks.collect::<Vec<_>>()).await?;
    if count > 0 {
        tracing::info!(target: "hapax::analytics", records = count, "the read model starts from a snapshot of the records");
    }
    Ok(())
}

/// Gives the model the deletions of records that are not there.
async fn bury(
    model: &dyn ReadModel,
    source: &dyn Snapshot,
    settings: &FeedSettings,
    partition: Option<&Partition>,
    partitions: i32,
) -> Result<()> {
    let (Some(partition), now) = (partition, source.now().await?) else { return Ok(()) };
    let mut after = None;
    loop {
        let page = source.gone(after.as_ref(), PAGE).await?;
        let Some((last, _)) = page.last() else { return Ok(()) };
        after = Some(last.clone());
        let deletion = |(name, seq)| {
            let version = Version::new(settings.generation, seq)?;
            Ok(Change::deletion(name, version, now, settings.topic.clone()))
        };
        let mut block = Block::aside(partition.clone(), partitions);
        block.changes = page.into_iter().map(deletion).collect::<Result<_>>()?;
        model.apply(&[block]).await?;
    }
}
