//! How much one token may ask for.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How much is saved up.
const BURST: Duration = Duration::from_secs(1);
/// Above this many, buckets that are full again are dropped.
const BUCKETS_MAX: usize = 10_000;

/// A token bucket for each API token: so many requests per second, and as many at once after a quiet
/// second. It is this process's own; two servers grant twice as much.
///
/// ```
/// use hapax::access::RateLimit;
/// let limit = RateLimit::per_second(2);
/// while limit.take("shop").is_ok() {} // until it has to wait
/// assert!(limit.take("other").is_ok(), "each has its own");
/// ```
#[derive(Debug)]
pub struct RateLimit {
    /// How long one request's share lasts; zero means no limit.
    share: Duration,
    /// For each token: when its bucket is full again.
    full_at: Mutex<HashMap<String, Instant>>,
}

impl RateLimit {
    /// So many requests per second; 0 means no limit.
    pub fn per_second(requests: u32) -> Self {
        let share = if requests == 0 { Duration::ZERO } else { Duration::from_secs(1) / requests };
        RateLimit { share, full_at: Mutex::default() }
    }

    /// Takes one request from a bucket. The error is how long to wait before the next try.
    pub fn take(&self, of: &str) -> Result<(), Duration> {
        self.take_at(of, Instant::now())
    }

    /// Whether a request could be taken now. The error is how long to wait before the next try.
    pub(crate) fn look(&self, of: &str) -> Result<(), Duration> {
        let full_at = self.full_at.lock().unwrap_or_else(PoisonError::into_inner).get(of).copied();
        let full_in =
            full_at.unwrap_or_else(Instant::now).saturating_duration_since(Instant::now()) + self.share;
        if full_in > BURST { Err(full_in.saturating_sub(BURST)) } else { Ok(()) }
    }

    fn take_at(&self, of: &str, now: Instant) -> Result<(), Duration> {
        if self.share.is_zero() {
            return Ok(());
        }
        let mut buckets = self.full_at.lock().unwrap_or_else(PoisonError::into_inner);
        if buckets.len() >= BUCKETS_MAX && !buckets.contains_key(of) {
            buckets.retain(|_, full_at| *full_at > now);
        }
        let before = buckets.get(of).copied().filter(|full_at| *full_at > now).unwrap_or(now);
        let after = before + self.share;
        let full_in = after.saturating_duration_since(now);
        if full_in > BURST {
            return Err(full_in.saturating_sub(BURST));
        }
        buckets.insert(of.to_owned(), after);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_holds_the_rate_and_a_refusal_costs_nothing() {
        let (limit, start) = (RateLimit::per_second(5), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        for _ in 0..5 {
            assert_eq!(limit.take_at("a", at(0)), Ok(()));
        }
        for _ in 0..100 {
            assert_eq!(limit.take_at("a", at(0)), Err(Duration::from_millis(200)));
        }
        assert_eq!(limit.take_at("a", at(199)), Err(Duration::from_millis(1)));
        assert_eq!(limit.take_at("a", at(200)), Ok(()), "refused tries did not count");
        assert!(limit.take_at("a", at(200)).is_err());
        assert_eq!(limit.take_at("b", at(200)), Ok(()));
        for _ in 0..5 {
            assert_eq!(limit.take_at("a", at(60_000)), Ok(()), "no more is saved than a second's worth");
        }
        assert!(limit.take_at("a", at(60_000)).is_err());
    }

    #[test]
    fn none_is_no_limit_and_the_buckets_are_bounded() {
        let none = RateLimit::per_second(0);
        assert!((0..10_000).all(|_| none.take("a").is_ok()));
        let (limit, start) = (RateLimit::per_second(1000), Instant::now());
        for n in 0..3 * BUCKETS_MAX {
            let at = start + Duration::from_millis(n as u64);
            assert_eq!(limit.take_at(&n.to_string(), at), Ok(()));
        }
        assert!(limit.full_at.lock().unwrap().len() <= BUCKETS_MAX);
    }
}
