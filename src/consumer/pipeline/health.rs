//! Whether the ledger answers, and which epoch it is in.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinError, JoinSet};

use super::task_failed;
use crate::consumer::meter::Meter;
use crate::error::{Error, Result};
use crate::ledger::{Epoch, Ledger};

/// Whether the ledger is back, and its epoch.
#[derive(Clone, Copy, Default)]
pub(super) struct Probed {
    back: bool,
    epoch: Option<Epoch>,
}

/// Probes a ledger that does not answer until it does.
pub(in crate::consumer) struct LedgerHealth {
    ledger: Arc<dyn Ledger>,
    meter: Arc<Meter>,
    is_away: bool,
    probing: JoinSet<Result<Probed>>,
    /// The ledger's epoch, if there is a window. Read at start, when the ledger is back after an
    /// outage, and whenever the window says "seen".
    epoch: Option<Epoch>,
}

impl LedgerHealth {
    pub(in crate::consumer) fn new(ledger: Arc<dyn Ledger>, meter: Arc<Meter>, epoch: Option<Epoch>) -> Self {
        LedgerHealth { ledger, meter, is_away: false, probing: JoinSet::new(), epoch }
    }

    /// Whether it did not answer, and has not since.
    pub(super) fn is_away(&self) -> bool {
        self.is_away
    }

    /// Its epoch, if there is a window.
    pub(super) fn epoch(&self) -> Option<Epoch> {
        self.epoch
    }

    /// Notes that it did not answer.
    pub(super) fn on_away(&mut self) {
        self.is_away = true;
        self.meter.ledger_away();
    }

    /// Notes its epoch, if it was queried.
    pub(super) fn on_epoch(&mut self, epoch: Option<Epoch>) {
        self.epoch = epoch.or(self.epoch);
    }

    /// Probes it, if it is away.
    pub(super) fn start(&mut self) {
        if self.is_away && self.probing.is_empty() {
            self.probing.spawn(probe(Arc::clone(&self.ledger), self.epoch.is_some()));
        }
    }

    /// The result of the current probe, or `None` if there is none.
    pub(super) async fn probed(&mut self) -> Option<std::result::Result<Result<Probed>, JoinError>> {
        self.probing.join_next().await
    }

    /// Notes the result of a probe. A permanent error ends the consumer, and so does a panic.
    pub(super) fn on_probed(&mut self, probed: std::result::Result<Result<Probed>, JoinError>) -> Result<()> {
        let probed = probed.map_err(task_failed)??;
        self.is_away = !probed.back;
        self.on_epoch(probed.epoch);
        Ok(())
    }
}

/// Asks the ledger, after a short pause, whether it takes claims. Returns an error that is not
/// retryable.
async fn probe(ledger: Arc<dyn Ledger>, epoch: bool) -> Result<Probed> {
    let ask = async {
        let epoch = if epoch { Some(ledger.epoch().await?) } else { None };
        ledger.probe().await?; // a standby that a fail-over reached first tells the time, and claims nothing
        Ok::<_, Error>(Probed { back: true, epoch })
    };
    tokio::time::sleep(Duration::from_millis(200)).await;
    match tokio::time::timeout(Duration::from_secs(5), ask).await {
        Ok(Err(error)) if error.is_retryable() => Ok(Probed::default()),
        Ok(probed) => probed,
        Err(_) => Ok(Probed::default()),
    }
}
