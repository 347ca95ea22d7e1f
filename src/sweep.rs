//! Retention in the background: forgets what was settled longer ago than the retention.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::guard::{Core, jitter_permille};

/// A sweeper at work; see [`Guard::spawn_sweeper`](crate::Guard::spawn_sweeper). It stops when this is dropped, and with the
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
    pub(crate) fn spawn(core: Core) -> Self {
        Sweeper(tokio::spawn(sweep_on(core)))
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

async fn sweep_on(core: Core) {
    let interval = core.settings().sweep_interval;
    let mut pause = part(FIRST_PAUSE_MAX.min(interval / 2), jitter_permille());
    loop {
        tokio::time::sleep(pause).await;
        match core.sweep().await {
            Ok(swept) => tracing::info!(
                target: "hapax",
                entries = swept.entries(),
                weeks = swept.weeks.len(),
                held = swept.held,
                lost = swept.lost,
                "swept"
            ),
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
