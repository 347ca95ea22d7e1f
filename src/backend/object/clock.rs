//! Estimates the clock of a store from the `Date` of its answers, which is precise to the second.
//!
//! Each answer narrows the offset between the store's clock and ours: it was stamped after the
//! request was sent and before the answer was received. Answers on both sides of a full second soon
//! narrow it to about one round trip.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::store::Now;
use crate::clock::Time;

const SECOND: i64 = 1_000_000;
/// Observations expire after one to two of these periods, because clocks drift.
const FORGET: Duration = Duration::from_secs(60);

/// Bounds of the store's clock minus ours, in microseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Between {
    low: i64,
    high: i64,
}

impl Between {
    /// Intersects two bounds. If they contradict each other, a clock was set or there are several:
    /// then returns bounds that contain both.
    fn and(self, other: Between) -> Between {
        let both = Between { low: self.low.max(other.low), high: self.high.min(other.high) };
        if both.low <= both.high {
            return both;
        }
        Between { low: self.low.min(other.low), high: self.high.max(other.high) }
    }
}

#[derive(Debug)]
pub(super) struct StoreClock {
    began: Instant,
    learnt: Mutex<Learnt>,
}

#[derive(Debug, Default)]
struct Learnt {
    lately: Option<Between>,
    before: Option<Between>,
    since: i64,
    /// The last time returned.
    returned: i64,
}

impl StoreClock {
    pub(super) fn new() -> Self {
        StoreClock { began: Instant::now(), learnt: Mutex::default() }
    }

    /// Our own monotonic clock.
    pub(super) fn here(&self) -> i64 {
        i64::try_from(self.began.elapsed().as_micros()).unwrap_or(i64::MAX)
    }

    /// Learns from an answer that was requested at `sent`, received at `received`, and stamped with
    /// a full second.
    pub(super) fn learn(&self, sent: i64, received: i64, date: Time) {
        let date = date.as_micros();
        let now = Between { low: date - received, high: date + SECOND - sent };
        let mut learnt = self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
        if received - learnt.since > FORGET.as_micros() as i64 {
            learnt.before = learnt.lately.take();
            learnt.since = received;
        }
        learnt.lately = Some(learnt.lately.map_or(now, |lately| lately.and(now)));
    }

    /// The store's time now; `None` if no answer has come for too long.
    pub(super) fn now(&self) -> Option<Now> {
        let here = self.here();
        let mut learnt = self.learnt.lock().unwrap_or_else(PoisonError::into_inner);
        if here - learnt.since > 2 * FORGET.as_micros() as i64 {
            return None;
        }
        let lately = learnt.lately?;
        let known = learnt.before.map_or(lately, |before| lately.and(before));
        let (low, high) = (here + known.low, here + known.high);
        let middle = low.midpoint(high);
        // A better estimate must not turn time back, unless the clock was set.
        let about = if learnt.returned - middle < 2 * SECOND { middle.max(learnt.returned) } else { middle };
        learnt.returned = about;
        Some(Now {
            low: Time::from_micros(low),
            high: Time::from_micros(high),
            about: Time::from_micros(about),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A store that is 1,000,000.4 s ahead of us; each answer takes 20 ms.
    fn answer(clock: &StoreClock, at: i64) {
        let stamped = (at + 10_000 + 1_000_000_400_000) / SECOND * SECOND;
        clock.learn(at, at + 20_000, Time::from_micros(stamped));
    }

    fn known(clock: &StoreClock) -> (i64, i64) {
        let learnt = clock.learnt.lock().unwrap();
        let known = learnt.lately.unwrap();
        (known.low, known.high)
    }

    #[test]
    fn one_answer_tells_the_second_and_many_tell_the_moment() {
        let clock = StoreClock::new();
        assert_eq!(clock.now(), None);
        answer(&clock, 0);
        let (low, high) = known(&clock);
        assert!(low <= 1_000_000_400_000 && 1_000_000_400_000 <= high && high - low > SECOND);
        for at in 1..40 {
            answer(&clock, at * 70_000);
        }
        let (low, high) = known(&clock);
        assert!(
            low <= 1_000_000_400_000 && 1_000_000_400_000 <= high && high - low < 100_000,
            "{low} {high}"
        );
    }

    #[test]
    fn a_clock_that_was_set_widens_the_bounds_and_is_forgotten() {
        let clock = StoreClock::new();
        clock.learn(0, 1000, Time::from_micros(500 * SECOND));
        clock.learn(2000, 3000, Time::from_micros(100 * SECOND));
        let (low, high) = known(&clock);
        assert!(low < 101 * SECOND && high > 500 * SECOND, "either may be right");
        clock.learn(70 * SECOND, 70 * SECOND + 1, Time::from_micros(170 * SECOND));
        clock.learn(140 * SECOND, 140 * SECOND + 1, Time::from_micros(240 * SECOND));
        let (low, high) = known(&clock);
        assert!(high - low <= SECOND + 1 && low <= 100 * SECOND, "{low} {high}");
    }
}
