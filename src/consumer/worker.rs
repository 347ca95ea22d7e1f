//! Workers run deliveries: one per guarantee.

use std::collections::BTreeSet;

use async_trait::async_trait;

use super::arrival::{Arrival, Ending};
use crate::bus::Partition;
use crate::error::Result;

/// The offsets of a partition that were in flight when a process died.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Suspects {
    pub(crate) partition: Partition,
    /// The highest of them.
    pub(crate) last: i64,
    /// Those that were suspects already. They run with nothing beside them.
    pub(crate) tried: BTreeSet<i64>,
    /// How many of those run in one batch.
    pub(crate) batch_max: usize,
}

/// Runs deliveries. A worker for batches gets several queues at once, each in order.
#[async_trait]
pub(crate) trait Worker: Send + Sync + 'static {
    /// The most deliveries per call; 1 means one by one.
    fn batch_max(&self) -> usize {
        1
    }

    /// The most deliveries of one key per call.
    fn per_key_max(&self) -> usize {
        self.batch_max()
    }

    /// Runs one delivery.
    async fn work_one(&self, arrival: &mut Arrival) -> Ending;

    /// Runs several queues together. Returns the endings of each queue's deliveries, up to and
    /// including the first that is not passed. The rest of that queue was not run.
    async fn work(&self, queues: &mut [Vec<Arrival>]) -> Vec<Vec<Ending>> {
        let mut endings = Vec::with_capacity(queues.len());
        for queue in queues {
            let mut ended = Vec::with_capacity(queue.len());
            for arrival in queue {
                let ending = self.work_one(arrival).await;
                let passed = matches!(ending, Ending::Passed(_));
                ended.push(ending);
                if !passed {
                    break;
                }
            }
            endings.push(ended);
        }
        endings
    }

    /// Notes that partitions are released; some of their deliveries may still be in flight. Each
    /// comes with its commit point, or `None` if nothing of it was received.
    async fn release(&self, partitions: &[(Partition, Option<i64>)]) {
        let _ = partitions;
    }

    /// Notes that all suspects of a partition are finished.
    fn cleared(&self, partition: &Partition) {
        let _ = partition;
    }

    /// The suspects of newly assigned partitions: offsets that were in flight when a process died.
    async fn suspects(&self, partitions: &[Partition]) -> Result<Vec<Suspects>> {
        let _ = partitions;
        Ok(Vec::new())
    }
}
