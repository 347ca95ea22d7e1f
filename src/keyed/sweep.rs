//! Forgetting keys after their retention, in the background.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use super::Keys;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::Pace;

/// How long answers are kept, unless told otherwise: 30 days.
pub const RETENTION: Duration = Duration::from_hours(30 * 24);

const DAY: Duration = Duration::from_hours(24);
/// The time of the day, in UTC, at which sweeps begin.
const AT: Duration = Duration::from_hours(3);

/// What a sweep forgets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct KeySweep {
    /// Keys that were settled longer ago than this, by the store's clock. At least a day.
    pub retention: Duration,
    /// The most keys in one transaction.
    pub batch_max: usize,
    /// Do nothing if another sweep began less than this ago, so that one of many processes sweeps.
    pub unless_within: Duration,
}

impl KeySweep {
    /// Sweeps keys older than this, 5,000 at a time.
    pub fn new(retention: Duration) -> Self {
        KeySweep { retention, batch_max: 5000, unless_within: Duration::ZERO }
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.retention < DAY {
            return Err(Error::invalid(
                "retention",
                format!("it is {:?}; keys are kept for at least 1 day", self.retention),
            ));
        }
        if self.batch_max == 0 {
            return Err(Error::invalid("batch_max", "it is 0; it needs 1 or more"));
        }
        Ok(())
    }
}

/// What a sweep that begins now may do.
#[derive(Debug)]
pub(crate) struct Plan {
    /// To be stored before anything is forgotten.
    pub pace: Pace,
    /// What is older goes; `None` while the clock is in doubt.
    pub horizon: Option<Time>,
}

impl KeySweep {
    /// Plans a sweep; `None` if one has just been. `before` is what the last one stored.
    pub(crate) fn plan(&self, before: Option<Pace>, now: Time) -> Option<Plan> {
        if before
            .is_some_and(|before| before.swept_at.plus(self.unless_within) > now && before.swept_at <= now)
        {
            return None;
        }
        let pace = Pace::next(before, now, self.retention);
        let horizon = pace.paused_until.is_none().then(|| now.minus(self.retention));
        Some(Plan { pace, horizon })
    }
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SweptKeys {
    /// How many keys it forgot.
    pub keys: u64,
    /// Whether it did nothing, because another sweep runs or has just run.
    pub skipped: bool,
    /// Set if the store's clock has leapt: nothing is forgotten before this time.
    pub paused_until: Option<Time>,
}

/// Sweeps a store every night at 03:00 UTC by the store's clock, until it is dropped. Each process
/// may have one: the first one of a night sweeps, the others find that done. A process that was down
/// at night catches up when it starts.
#[derive(Debug)]
#[must_use = "the sweeper stops when it is dropped"]
pub struct KeySweeper(JoinHandle<()>);

impl KeySweeper {
    /// Starts it on the current tokio runtime.
    pub fn spawn(keys: Arc<dyn Keys>, retention: Duration) -> Result<Self> {
        KeySweep::new(retention).check()?;
        Ok(KeySweeper(tokio::spawn(sweep_on(keys, retention))))
    }
}

impl Drop for KeySweeper {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn sweep_on(keys: Arc<dyn Keys>, retention: Duration) {
    loop {
        let pause = match keys.info().await {
            Ok(info) => match due_in(info.now, info.swept_at) {
                Duration::ZERO => {
                    sweep(&*keys, retention).await;
                    Duration::from_secs(60)
                }
                pause => pause,
            },
            Err(_) => Duration::from_secs(60),
        };
        // In steps, so that a clock that was set is noticed.
        tokio::time::sleep(pause.min(Duration::from_mins(10))).await;
    }
}

async fn sweep(keys: &dyn Keys, retention: Duration) {
    let terms = KeySweep { unless_within: DAY / 2, ..KeySweep::new(retention) };
    match keys.sweep(&terms).await {
        Ok(swept) if swept.paused_until.is_some() => tracing::warn!(
            target: "hapax",
            paused_until = %swept.paused_until.unwrap_or_default(),
            "the clock of the keys moved on by more than half the retention since the sweep before; in case it leapt, no key is forgotten for a whole retention"
        ),
        Ok(swept) => {
            tracing::info!(target: "hapax", keys = swept.keys, skipped = swept.skipped, "swept keys");
        }
        Err(error) => {
            tracing::error!(target: "hapax", error = %error.chain(), "keys could not be swept; the next sweep will try again");
        }
    }
}

/// How long until the next sweep: none if the last one began before the latest 03:00.
fn due_in(now: Time, swept_at: Option<Time>) -> Duration {
    let (day, at) = (DAY.as_micros() as i64, AT.as_micros() as i64);
    let since = (now.as_micros() - at).rem_euclid(day);
    let latest = Time::from_micros(now.as_micros() - since);
    match swept_at {
        Some(swept_at) if swept_at >= latest => Duration::from_micros((day - since) as u64),
        _ => Duration::ZERO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sweep_is_due_at_three_and_after_downtime() {
        let at = |text: &str| Time::parse(text).unwrap();
        let now = at("2026-03-04T02:00:00Z");
        assert_eq!(due_in(now, None), Duration::ZERO, "never swept");
        assert_eq!(due_in(now, Some(at("2026-03-03T03:00:01Z"))), Duration::from_hours(1));
        assert_eq!(due_in(now, Some(at("2026-03-03T02:59:00Z"))), Duration::ZERO, "it was down at three");
        let now = at("2026-03-04T03:00:00Z");
        assert_eq!(due_in(now, Some(at("2026-03-03T03:00:01Z"))), Duration::ZERO);
        assert_eq!(due_in(now, Some(now)), Duration::from_hours(24));
    }
}
