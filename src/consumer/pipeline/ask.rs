//! Questions to the ledger and the bus that are asked beside the pipeline.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::bus::{Assignment, Bus, Partition};
use crate::consumer::worker::{Suspects, Worker};
use crate::error::{Error, Result};
use crate::ledger::{Epoch, Ledger};

/// How often the ends of the partitions are asked for.
pub(super) const LAG_INTERVAL: Duration = Duration::from_secs(5);
/// How long something may fail that is tried again before it is logged.
const FAILING_MAX: Duration = Duration::from_secs(30);

/// Whether the ledger is back, and which one it is.
#[derive(Clone, Copy, Default)]
pub(super) struct Probed {
    pub(super) back: bool,
    pub(super) epoch: Option<Epoch>,
}

/// Asks the ledger, a little later, whether it is there. An error that does not pass is returned.
pub(super) async fn probe(ledger: Arc<dyn Ledger>, epoch: bool) -> Result<Probed> {
    let ask = async {
        let epoch = if epoch { Some(ledger.epoch().await?) } else { None };
        ledger.now().await?;
        Ok::<_, Error>(Probed { back: true, epoch })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    match tokio::time::timeout(Duration::from_secs(5), ask).await {
        Ok(Err(error)) if error.is_retryable() => Ok(Probed::default()),
        Ok(probed) => probed,
        Err(_) => Ok(Probed::default()),
    }
}

/// How many records are between the positions and the ends of their partitions; none if the bus does not say.
pub(super) async fn lag(bus: Arc<dyn Bus>, at: Vec<(Partition, Option<i64>)>) -> Option<i64> {
    let mut behind = 0;
    for (partition, position) in at {
        let (first, end) = bus.range(&partition).await.ok()?;
        behind += end - position.unwrap_or(first).clamp(first, end);
    }
    Some(behind)
}

/// The suspects of partitions, as they were assigned when this was asked.
pub(super) struct SuspectsAnswer {
    pub(super) assigned: Vec<Assignment>,
    pub(super) suspects: Result<Vec<Suspects>>,
}

pub(super) async fn suspects(worker: Arc<dyn Worker>, assigned: Vec<Assignment>) -> SuspectsAnswer {
    let partitions: Vec<_> = assigned.iter().map(|assigned| assigned.partition.clone()).collect();
    let suspects = worker.suspects(&partitions).await;
    SuspectsAnswer { assigned, suspects }
}

/// Since when something that is tried again and again fails, and whether that was logged.
#[derive(Default)]
pub(super) struct Failing {
    since: Option<Instant>,
    told: bool,
}

impl Failing {
    /// It failed. True: that is to be logged now, at once if the error does not pass, after a while if it may.
    pub(super) fn failed(&mut self, error: &Error) -> bool {
        let since = *self.since.get_or_insert_with(Instant::now);
        let tell = !self.told && (!error.is_retryable() || since.elapsed() >= FAILING_MAX);
        self.told |= tell;
        tell
    }

    /// It succeeded. True: its failing was logged, so this is too.
    pub(super) fn succeeded(&mut self) -> bool {
        std::mem::take(self).told
    }
}
