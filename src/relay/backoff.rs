//! How long to wait when there is nothing to do: no busy-looping, and no longer than needed.

use std::time::Duration;

/// The shortest wait between two reads that found nothing.
const SHORTEST: Duration = Duration::from_millis(1);
/// The longest wait at a hole, or after a wake-up without new events.
const LONGEST: Duration = Duration::from_millis(50);

/// The number of consecutive reads that found nothing.
#[derive(Debug, Default)]
pub(super) struct ReadBackoff {
    empty: u32,
}

impl ReadBackoff {
    /// A read found something, or a wait lasted its full time: the next read may follow at once.
    pub(super) fn reset(&mut self) {
        self.empty = 0;
    }

    /// A read found nothing. Returns how long to pause before waiting for the journal again: zero
    /// the first time, because events may have arrived during the read, then longer and longer.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = match self.empty {
            0 => Duration::ZERO,
            times => SHORTEST.saturating_mul(1 << (times - 1).min(10)).min(LONGEST),
        };
        self.empty = self.empty.saturating_add(1);
        pause
    }

    /// The pause at a hole. Its writer will soon commit or be gone, but nothing signals when.
    pub(super) fn at_hole(&mut self) -> Duration {
        self.next_pause().max(SHORTEST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_begin_again_when_something_is_found() {
        let mut backoff = ReadBackoff::default();
        assert_eq!(backoff.next_pause(), Duration::ZERO);
        assert_eq!(backoff.next_pause(), SHORTEST);
        let sum: Duration = (0..100).map(|_| backoff.next_pause()).sum();
        assert!(sum > Duration::from_secs(4) && sum < Duration::from_secs(5), "{sum:?}");
        backoff.reset();
        assert_eq!((backoff.next_pause(), backoff.at_hole()), (Duration::ZERO, SHORTEST));
    }
}
