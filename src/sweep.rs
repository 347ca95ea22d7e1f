//! Retention in the background: forgets what was settled longer ago than the retention.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::error::Error;
use crate::guard::{Core, WeakCore, jitter_permille};

/// A sweeper at work. A guard starts one by itself ([`sweep`](crate::guard::GuardSettings::sweep)); this is for those who want to
/// hold it in their hands: see [`Guard::spawn_sweeper`](crate::Guard::spawn_sweeper). It stops when this is dropped, and with the
/// runtime. Killed in the middle of a sweep, the next one goes on where it was.
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
    pub(crate) fn spawn(core: &Core) -> Self {
        Sweeper(tokio::spawn(sweep_on(core.downgrade())))
    }

    /// Stops it, and returns when it has stopped.
    pub async fn stop(mut self) {
        self.0.abort();
        let _ = (&mut self.0).await; // cancelled, as it should be
    }
}

impl Drop for Sweeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The first sweep waits a moment, so that a fleet that starts together does not sweep together.
const FIRST_PAUSE_MAX: Duration = Duration::from_secs(10);

/// Sweeps for as long as the guard is there. It holds the guard only while it sweeps.
pub(crate) async fn sweep_on(guard: WeakCore) {
    let Some(interval) = guard.upgrade().map(|core| core.settings().sweep_interval) else { return };
    let mut pause = part(FIRST_PAUSE_MAX.min(interval / 2), jitter_permille());
    loop {
        tokio::time::sleep(pause).await;
        let Some(core) = guard.upgrade() else { return };
        if let Err(error) = core.make_ahead().await
            && !error.is_retryable()
        {
            tracing::warn!(target: "hapax", error = %error.chain(), "the coming week could not be made ahead; it will be made on demand");
        }
        match core.sweep().await {
            Ok(swept) if swept.paused_until.is_some() => tracing::warn!(
                target: "hapax",
                paused_until = %swept.paused_until.unwrap_or_default(),
                "the ledger's clock moved on by more than half the retention since the sweep before; in case it leapt, nothing is forgotten for a whole retention"
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
