//! How fast a ledger may forget: a leap of its clock is not age.

use std::time::Duration;

use super::SweepSettings;
use crate::clock::Time;

/// Longer than any entry can have existed.
const FOREVER: Duration = Duration::from_secs(1000 * 365 * 86_400);
/// A shorter step of the clock never counts as a leap: guards sweep every hour.
const LEAP_MIN: Duration = Duration::from_hours(2);
/// Tells a pause that was shortened, because the clock was set back, from one that begins now.
const NOT_NEW: Duration = Duration::from_micros(1);

/// What a ledger stores about its sweeps. [`SweepSettings`] documents the rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SweepState {
    /// When the last sweep began, by ledger time.
    pub swept_at: Time,
    /// Set after the clock leapt: sweeps forget nothing before this time.
    pub paused_until: Option<Time>,
}

impl SweepState {
    /// What a sweep that begins now stores before it forgets anything. `before` is what the
    /// previous sweep stored.
    pub(crate) fn next(before: Option<SweepState>, now: Time, retention: Duration) -> Self {
        SweepState::next_with(before, now, retention, LEAP_MIN)
    }

    /// The same where sweeps are rarer: a step of the clock of less than `leap_min` is not a leap.
    pub(crate) fn next_with(
        before: Option<SweepState>,
        now: Time,
        retention: Duration,
        leap_min: Duration,
    ) -> Self {
        let whole = now.plus(retention);
        // A longer step cannot be told from a leap, and of a pause it counts for no more.
        let step_max = (retention / 2).max(leap_min);
        let paused_until = before.and_then(|before| {
            let step = now.since(before.swept_at);
            let Some(until) = before.paused_until else { return (step > step_max).then_some(whole) };
            // Rare sweeps come after one long step and another. They may forget every second time.
            let beyond =
                if before.began_pause(retention) { Duration::ZERO } else { step.saturating_sub(step_max) };
            let until = until.plus(beyond);
            // If the clock was set back, the pause ends at most a whole retention from the new time.
            (now < until).then(|| until.min(whole.plus(NOT_NEW)))
        });
        SweepState { swept_at: now, paused_until }
    }

    /// Whether the sweep that stored this began the pause, because the step before it was too long.
    fn began_pause(&self, retention: Duration) -> bool {
        self.paused_until == Some(self.swept_at.plus(retention))
    }

    /// The settings for this sweep: during a pause, nothing is old enough to be forgotten.
    pub(crate) fn apply(&self, settings: SweepSettings) -> SweepSettings {
        SweepSettings { retention: self.paused_until.map_or(settings.retention, |_| FOREVER), ..settings }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_hours(24);

    fn day(n: u32) -> Time {
        Time::from_millis(1_800_000_000_000).plus(DAY * n)
    }

    #[test]
    fn only_a_leap_pauses() {
        let first = SweepState::next(None, day(0), DAY * 7);
        assert_eq!(first, SweepState { swept_at: day(0), paused_until: None }, "nothing to compare with");
        let regular = SweepState::next(Some(first), day(3), DAY * 7);
        assert_eq!(regular.paused_until, None);
        let leapt = SweepState::next(Some(regular), day(7), DAY * 7);
        assert_eq!(leapt, SweepState { swept_at: day(7), paused_until: Some(day(14)) });
        // Sweeps during the pause keep it; it ends a whole retention after the leap.
        let paused = SweepState::next(Some(leapt), day(13), DAY * 7);
        assert_eq!(paused.paused_until, Some(day(14)));
        assert_eq!(SweepState::next(Some(paused), day(14), DAY * 7).paused_until, None);
    }

    #[test]
    fn rare_sweeps_forget_every_second_time() {
        let mut state = SweepState::next(None, day(0), DAY * 7);
        let mut pauses = Vec::new();
        for n in 1..=4 {
            state = SweepState::next(Some(state), day(30 * n), DAY * 7);
            pauses.push(state.paused_until.is_some());
        }
        assert_eq!(pauses, [true, false, true, false]);
    }

    /// Whether each sweep is paused, for sweeps on these days.
    fn paused(days: impl IntoIterator<Item = f64>) -> Vec<bool> {
        let mut state = SweepState::next(None, day(0), DAY * 7);
        let mut pauses = Vec::new();
        for days in days {
            state = SweepState::next(Some(state), day(0).plus(DAY.mul_f64(days)), DAY * 7);
            pauses.push(state.paused_until.is_some());
        }
        pauses
    }

    /// Whoever sweeps a little too rarely, or rarely and then several times, forgets in the end.
    #[test]
    fn sweeps_of_any_regular_kind_forget() {
        for every in 4..=6 {
            let pauses = paused((1..=6).map(|n| f64::from(every * n)));
            assert_eq!(pauses, [true, true, false, true, true, false], "every {every} days");
        }
        for every in 4..=30 {
            let thrice = |n| [0.0, 0.04, 0.08].map(|later| f64::from(every * n) + later);
            let pauses = paused((1..=6).flat_map(thrice));
            assert!(!pauses[6..12].iter().all(|paused| *paused), "three every {every} days: {pauses:?}");
        }
    }

    #[test]
    fn a_clock_that_was_put_back_shortens_the_pause() {
        let leapt = SweepState { swept_at: day(365), paused_until: Some(day(372)) };
        let back = SweepState::next(Some(leapt), day(1), DAY * 7);
        assert_eq!(back.paused_until, Some(day(8).plus(NOT_NEW)));
        let mut state = back;
        for n in 2..=8 {
            state = SweepState::next(Some(state), day(n), DAY * 7);
            assert_eq!(state.paused_until, back.paused_until, "day {n}");
        }
        assert_eq!(SweepState::next(Some(state), day(9), DAY * 7).paused_until, None);
    }

    /// It counts for half the retention, as a step that is not a leap would.
    #[test]
    fn t400_a_leap_within_a_pause_does_not_end_it() {
        let hour = Duration::from_hours(1);
        let first = SweepState::next(Some(SweepState::next(None, day(0), DAY * 7)), day(365), DAY * 7);
        let later = SweepState::next(Some(first), day(365).plus(hour), DAY * 7);
        for leap in [371, 800] {
            let second = SweepState::next(Some(later), day(leap).plus(hour), DAY * 7);
            assert_eq!(second.paused_until, Some(day(leap + 3).plus(DAY / 2)), "day {leap}");
        }
    }

    /// The ledger's clock changes between two that are a year apart: a failover, and back.
    #[test]
    fn t400_a_clock_that_leaps_to_and_fro_forgets_nothing() {
        let mut state = SweepState::next(None, day(0), DAY * 7);
        for n in 1..=20 {
            let hours = Duration::from_hours(n);
            let now = if n % 2 == 1 { day(365).plus(hours) } else { day(0).plus(hours) };
            state = SweepState::next(Some(state), now, DAY * 7);
            assert!(state.paused_until.is_some_and(|until| until > now), "hour {n}: {state:?}");
        }
    }

    #[test]
    fn a_short_retention_is_not_a_leap() {
        let first = SweepState::next(None, day(0), Duration::ZERO);
        assert_eq!(SweepState::next(Some(first), day(0).plus(LEAP_MIN), Duration::ZERO).paused_until, None);
    }
}
