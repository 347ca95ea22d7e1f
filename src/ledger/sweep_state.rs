//! How fast a ledger may forget: a leap of its clock is not age.

use std::time::Duration;

use super::SweepSettings;
use crate::clock::Time;

/// Longer than any entry can have existed.
const FOREVER: Duration = Duration::from_secs(1000 * 365 * 86_400);
/// A shorter step of the clock never counts as a leap: guards sweep every hour.
const LEAP_MIN: Duration = Duration::from_hours(2);

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
        let paused_until = match before {
            None => None,
            // If the clock was set back, the pause ends at most a whole retention from the new
            // time.
            Some(SweepState { paused_until: Some(until), .. }) => (now < until).then(|| until.min(whole)),
            Some(SweepState { swept_at, .. }) => {
                let leapt = now.since(swept_at) > (retention / 2).max(leap_min);
                leapt.then_some(whole)
            }
        };
        SweepState { swept_at: now, paused_until }
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

    #[test]
    fn a_clock_that_was_put_back_shortens_the_pause() {
        let leapt = SweepState { swept_at: day(365), paused_until: Some(day(372)) };
        assert_eq!(SweepState::next(Some(leapt), day(1), DAY * 7).paused_until, Some(day(8)));
    }

    #[test]
    fn a_short_retention_is_not_a_leap() {
        let first = SweepState::next(None, day(0), Duration::ZERO);
        assert_eq!(SweepState::next(Some(first), day(0).plus(LEAP_MIN), Duration::ZERO).paused_until, None);
    }
}
