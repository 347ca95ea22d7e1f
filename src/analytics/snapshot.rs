//! Fills a read model that begins with the records as they are.
//!
//! The oldest offset of each partition is read first. Whatever was removed below it was written before
//! the records are read, so they have it; whatever comes later is read from the topic. A change that is
//! in both is the same version twice.

use super::{Block, Change, FeedSettings, ReadModel};
use crate::bus::Bus;
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
    let blocks = oldest.into_iter().map(|(partition, oldest)| Block::new(partition, partitions, 0..oldest));
    model.apply(&blocks.collect::<Vec<_>>()).await?;
    if count > 0 {
        tracing::info!(target: "hapax::analytics", records = count, "the read model starts from a snapshot of the records");
    }
    Ok(())
}
