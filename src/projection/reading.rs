//! How far the consumer that keeps a projection has read.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Name;
use super::verify::tenant_of;
use crate::bus::route::{aggregate_key, partition_of};
use crate::bus::{Bus, Partition};
use crate::error::Result;
use crate::id::{RelayName, Tenant, Topic};
use crate::journal::{Behind, Journal, Position};
use crate::records::aggregate_of;

/// The pause before asking again how far a consumer is.
const PAUSE: Duration = Duration::from_millis(100);

/// The consumer that keeps a projection, and the relay that publishes what it reads.
pub struct Reading<'r> {
    bus: &'r dyn Bus,
    topic: Topic,
    group: Arc<str>,
    relay: RelayName,
}

impl<'r> Reading<'r> {
    /// The consumer of this group, and the relay of this name.
    pub fn new(bus: &'r dyn Bus, topic: Topic, group: impl Into<Arc<str>>, relay: RelayName) -> Self {
        Reading { bus, topic, group: group.into(), relay }
    }

    /// Waits until the consumer has read whatever the journal has now, for so long at most. Returns
    /// what it has not read.
    pub(super) async fn rest(&self, journal: &dyn Journal, wait: Duration) -> Result<Unread> {
        let end = Instant::now() + wait;
        let mut behind = Vec::new();
        if let Some(last) = journal.stat().await?.last {
            loop {
                let published = self.published(journal, &last).await?;
                if published.as_ref().is_some_and(Vec::is_empty) {
                    break;
                }
                if Instant::now() >= end {
                    let Some(left) = published else { return Ok(Unread::Everything) };
                    behind = left;
                    break;
                }
                tokio::time::sleep(PAUSE).await;
            }
        }
        let partitions = self.bus.topic(&self.topic).await?.map_or(0, |info| info.partitions);
        let mut unread = Vec::new();
        for number in 0..partitions {
            let partition = Partition { topic: self.topic.clone(), number };
            let upto = self.bus.range(&partition).await?.1;
            unread.push((partition, upto));
        }
        loop {
            let mut still = Vec::new();
            for (partition, upto) in unread {
                let (start, _) = self.bus.range(&partition).await?;
                let committed = self.bus.committed(&self.group, &partition).await?.unwrap_or(start);
                if committed.max(start) < upto {
                    still.push((partition, upto));
                }
            }
            if still.is_empty() || Instant::now() >= end {
                let numbers = still.into_iter().map(|(partition, _)| partition.number).collect();
                return Ok(Unread::Some { behind, numbers, of: partitions });
            }
            unread = still;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// What the relay has left behind, if it is past a position. One that never ran has published nothing that we
    /// know of.
    async fn published(&self, journal: &dyn Journal, last: &Position) -> Result<Option<Vec<Behind>>> {
        let relays = journal.relays().await?;
        let relay = relays.into_iter().find(|state| state.relay == self.relay);
        let checkpoint = relay.and_then(|state| state.checkpoint);
        Ok(checkpoint.filter(|checkpoint| checkpoint.position >= *last).map(|checkpoint| checkpoint.behind))
    }
}

/// What a consumer has not read.
pub(super) enum Unread {
    /// It may be anything: it is not published yet.
    Everything,
    /// Something of these aggregates, which the bus does not have, and something in these partitions.
    Some { behind: Vec<Behind>, numbers: BTreeSet<i32>, of: i32 },
}

impl Unread {
    /// Whether something of a record may be among it.
    pub(super) fn has(&self, name: &Name) -> Result<bool> {
        let Unread::Some { behind, numbers, of } = self else { return Ok(true) };
        let tenant = tenant_of(name)?;
        let aggregate = aggregate_of(&name.module, name.id)?;
        let named = tenant.as_ref().map(Tenant::as_str);
        if behind.iter().any(|one| one.tenant.as_deref() == named && one.aggregate == aggregate.as_str()) {
            return Ok(true);
        }
        let key = aggregate_key(tenant.as_ref(), aggregate.as_str());
        Ok(numbers.contains(&partition_of(key.as_bytes(), *of)))
    }
}
