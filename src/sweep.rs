//! Retention in the background: forgets entries that were settled longer ago than the retention.
//!
//! A sweeper uses the ledger and telemetry. It knows no guard: the guard that starts one gives it what
//! to sweep, as a `Retention`.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::task::JoinHandle;
use tracing::Instrument as _;

use crate::clock::jitter_permille;
use crate::error::{Error, Result};
use crate::ledger::{Ledger, SweepSettings, Swept};
use crate::telemetry::Telemetry;

/// The maximum number of rows that one transaction of a sweep deletes.
const BATCH_MAX: u32 = 10_000;

/// What is swept, and how often: a guard's ledger, by the guard's settings.
pub(crate) struct Retention {
    pub(crate) ledger: Arc<dyn Ledger>,
    pub(crate) telemetry: Arc<Telemetry>,
    /// How long entries stay after they were settled.
    pub(crate) stay: Duration,
    /// How often the background sweeper runs.
    pub(crate) interval: Duration,
}

impl Retention {
    /// Sweeps once, and counts what was swept.
    pub(crate) async fn sweep(&self) -> Result<Swept> {
        let span =
            tracing::info_span!(target: "hapax", "dedup.sweep", otel.name = self.telemetry.span_name(2));
        let settings = SweepSettings { retention: self.stay, batch_max: BATCH_MAX, dry_run: false };
        let swept = self.ledger.sweep(settings).instrument(span).await;
        match &swept {
            Ok(swept) => self.telemetry.swept(swept),
            Err(_) => self.telemetry.sweep_failed(),
        }
        swept
    }
}

/// A running sweeper. A guard starts one on its own
/// ([`sweep`](crate::guard::GuardSettings::sweep)); use
/// [`Guard::spawn_sweeper`](crate::Guard::spawn_sweeper) to control it yourself. It stops when this
/// handle is dropped or the runtime ends. If it is killed during a sweep, the next sweep continues
/// there.
///
/// ```
/// use hapax::{Guard, backend::memory::MemoryLedger};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
/// let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
/// let sweeper = guard.spawn_sweeper(); // keep it for as long as the service runs
/// // …
/// sweeper.stop().await;
/// # Ok(()) }
/// ```
#[derive(Debug)]
#[must_use = "the sweeper stops when its handle is dropped"]
pub struct Sweeper(JoinHandle<()>);

impl Sweeper {
    pub(crate) fn spawn(of: &Arc<Retention>) -> Self {
        Sweeper(tokio::spawn(sweep_on(Arc::downgrade(of))))
    }

    /// Stops it, and returns when it has stopped.
    pub async fn stop(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await; // cancelled, as intended
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The longest pause before the first sweep, so that a fleet that starts together does not sweep
/// together.
const FIRST_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Sweeps for as long as its guard exists. Holds a reference to what is the guard's only during a
/// sweep.
pub(crate) async fn sweep_on(of: Weak<Retention>) {
    let Some(interval) = of.upgrade().map(|of| of.interval) else { return };
    let mut pause = part(FIRST_PAUSE_MAX.min(interval / 2), jitter_permille());
    loop {
        tokio::time::sleep(pause).await;
        let Some(retention) = of.upgrade() else { return };
        if let Err(error) = retention.ledger.make_ahead().await
            && !error.is_retryable()
        {
            tracing::warn!(target: "hapax", error = %error.chain(), "could not create next week's partition in advance; it will be created on demand");
        }
        match retention.sweep().await {
            Ok(swept) if swept.paused_until.is_some() => tracing::warn!(
                target: "hapax",
                paused_until = %swept.paused_until.unwrap_or_default(),
                "the ledger's clock advanced by more than half the retention since the last sweep; in case it jumped, nothing is deleted for a whole retention"
            ),
            Ok(swept) => tracing::info!(
                target: "hapax",
                entries = swept.entries(),
                weeks = swept.weeks.len(),
                held = swept.held,
                lost = swept.lost,
                "swept"
            ),
            Err(error @ Error::Refused { .. }) => {
                tracing::warn!(target: "hapax", error = %error.chain(), "this role may not sweep, so this process does not; run `hapax ledger sweep` as the ledger's owner");
                return;
            }
            Err(error) => {
                tracing::error!(target: "hapax", error = %error.chain(), "sweep failed; the next one will try again");
            }
        }
        pause = interval + part(interval / 10, jitter_permille());
    }
}

fn part(of: Duration, permille: u16) -> Duration {
    of * u32::from(permille) / 1000
}
