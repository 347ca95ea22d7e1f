//! Forgetting keys after their retention, in the background.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::task::JoinHandle;

use super::Keys;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::SweepState;

/// How long answers are kept by default: 30 days.
pub const RETENTION: Duration = Duration::from_hours(30 * 24);

const DAY: Duration = Duration::from_hours(24);
/// The time of the day, in UTC, at which sweeps begin.
const AT: Duration = Duration::from_hours(3);
/// A shorter step of the clock between two sweeps is a night, and no leap.
const LEAP_MIN: Duration = Duration::from_hours(36);

/// Which keys a sweep removes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct KeySweep {
    /// Keys that were settled longer ago than this, by the store's clock. At least a day.
    pub retention: Duration,
    /// The most keys in one transaction.
    pub batch_max: usize,
    /// Do nothing if another sweep began at this time or later, by the store's clock, so that one of
    /// many processes sweeps.
    pub unless_since: Option<Time>,
    /// Only count what would be forgotten.
    pub dry_run: bool,
    /// Counts what is forgotten during the sweep, for progress displays.
    pub progress: Option<Arc<AtomicU64>>,
}

impl KeySweep {
    /// Sweeps keys older than this, 5,000 at a time.
    pub fn new(retention: Duration) -> Self {
        KeySweep { retention, batch_max: 5000, unless_since: None, dry_run: false, progress: None }
    }

    /// A batch was forgotten.
    pub(crate) fn forgot(&self, keys: u64) {
        if let Some(progress) = &self.progress {
            progress.fetch_add(keys, Ordering::Relaxed);
        }
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
    pub state: SweepState,
    /// Older keys are removed; `None` while the clock is in doubt.
    pub horizon: Option<Time>,
}

impl KeySweep {
    /// Plans a sweep; `None` if one has just been. `before` is what the last one stored.
    pub(crate) fn plan(&self, before: Option<SweepState>, now: Time) -> Option<Plan> {
        if self.unless_since.is_some_and(|since| is_swept(before.map(|before| before.swept_at), since, now)) {
            return None;
        }
        let state = SweepState::next_with(before, now, self.retention, LEAP_MIN);
        let horizon = state.paused_until.is_none().then(|| now.minus(self.retention));
        Some(Plan { state, horizon })
    }
}

/// Whether a sweep began at `since` or later. One in the future is from before the clock was set
/// back, and does not count.
fn is_swept(swept_at: Option<Time>, since: Time, now: Time) -> bool {
    swept_at.is_some_and(|swept_at| since <= swept_at && swept_at <= now)
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SweptKeys {
    /// How many keys it forgot, or would forget.
    pub keys: u64,
    /// Whether it did nothing, because another sweep runs or has just run.
    pub skipped: bool,
    /// Set if the store's clock has jumped: nothing is deleted before this time.
    pub paused_until: Option<Time>,
}

/// Sweeps a store every night at 03:00 UTC by the store's clock, until it is dropped. Each process
/// may have one: the first one of a night sweeps, the others find that done. If all were down at
/// night, the first one catches up when it starts, and sweeps again the next night.
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
            Ok(info) => match due(info.now, info.swept_at) {
                Due::Now { since } => {
                    sweep(&*keys, retention, since).await;
                    Duration::from_secs(60)
                }
                Due::In(pause) => pause,
            },
            Err(_) => Duration::from_secs(60),
        };
        // In steps, so that a clock that was set is noticed.
        tokio::time::sleep(pause.min(Duration::from_mins(10))).await;
    }
}

async fn sweep(keys: &dyn Keys, retention: Duration, since: Time) {
    let settings = KeySweep { unless_since: Some(since), ..KeySweep::new(retention) };
    match keys.sweep(&settings).await {
        Ok(swept) if swept.paused_until.is_some() => tracing::warn!(
            target: "hapax",
            paused_until = %swept.paused_until.unwrap_or_default(),
            "the key store's clock advanced by more than half the retention since the last sweep; in case it jumped, nothing is deleted for a whole retention"
        ),
        Ok(swept) => {
            tracing::info!(target: "hapax", keys = swept.keys, skipped = swept.skipped, "swept keys");
        }
        Err(error) => {
            tracing::error!(target: "hapax", error = %error.chain(), "keys could not be swept; the next sweep will try again");
        }
    }
}

/// When the next sweep is due.
#[derive(Debug, PartialEq, Eq)]
enum Due {
    /// Now, unless somebody has begun it since the latest 03:00.
    Now {
        since: Time,
    },
    In(Duration),
}

/// A sweep is due if the last one began before the latest 03:00.
fn due(now: Time, swept_at: Option<Time>) -> Due {
    let (day, at) = (DAY.as_micros() as i64, AT.as_micros() as i64);
    let passed = (now.as_micros() - at).rem_euclid(day);
    let since = Time::from_micros(now.as_micros() - passed);
    if is_swept(swept_at, since, now) {
        Due::In(Duration::from_micros((day - passed) as u64))
    } else {
        Due::Now { since }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> Time {
        Time::parse(text).unwrap()
    }

    #[test]
    fn a_sweep_is_due_at_three_and_after_downtime() {
        let (now, since) = (at("2026-03-04T02:00:00Z"), at("2026-03-03T03:00:00Z"));
        assert_eq!(due(now, None), Due::Now { since }, "never swept");
        assert_eq!(due(now, Some(at("2026-03-03T03:00:01Z"))), Due::In(Duration::from_hours(1)));
        assert_eq!(due(now, Some(at("2026-03-03T02:59:00Z"))), Due::Now { since }, "it was down at three");
        assert_eq!(due(now, Some(at("2027-01-01T00:00:00Z"))), Due::Now { since }, "the clock was set back");
        let now = at("2026-03-04T03:00:00Z");
        assert_eq!(due(now, Some(at("2026-03-03T03:00:01Z"))), Due::Now { since: now });
        assert_eq!(due(now, Some(now)), Due::In(DAY));
    }

    /// The nights of a sweeper: whether each sweep is skipped, and whether it forgets.
    fn nights(retention: Duration, sweeps: &[&str]) -> Vec<Option<bool>> {
        let mut state = None;
        let mut done = Vec::new();
        for now in sweeps.iter().map(|text| at(text)) {
            let Due::Now { since } = due(now, state.map(|state: SweepState| state.swept_at)) else {
                done.push(None);
                continue;
            };
            let settings = KeySweep { unless_since: Some(since), ..KeySweep::new(retention) };
            let plan = settings.plan(state, now);
            done.push(plan.as_ref().map(|plan| plan.horizon.is_some()));
            state = plan.map(|plan| plan.state).or(state);
        }
        done
    }

    #[test]
    fn t134_a_catch_up_in_the_evening_does_not_skip_the_night() {
        let sweeps =
            ["2026-03-03T20:00:00Z", "2026-03-04T02:59:59Z", "2026-03-04T03:00:00Z", "2026-03-04T03:01:00Z"];
        assert_eq!(nights(RETENTION, &sweeps), [Some(true), None, Some(true), None]);
    }

    #[test]
    fn t134_the_shortest_retention_is_swept_every_night() {
        // A sweep begins some minutes after 03:00, never at the same one.
        let sweeps: Vec<String> =
            (1..=9).map(|day| format!("2026-03-0{day}T03:0{}:00Z", day * 5 % 7)).collect();
        let sweeps: Vec<&str> = sweeps.iter().map(String::as_str).collect();
        for days in 1..=4 {
            let swept = nights(DAY * days, &sweeps);
            assert!(swept.iter().all(|swept| *swept == Some(true)), "{days} days: {swept:?}");
        }
        // A leap is still noticed.
        let leap = ["2026-03-01T03:00:00Z", "2026-03-02T03:00:00Z", "2026-03-05T03:00:00Z"];
        assert_eq!(nights(DAY, &leap), [Some(true), Some(true), Some(false)]);
    }
}
