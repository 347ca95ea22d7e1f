//! How long to wait when there is nothing to do: never busy, never longer than needed.

use std::time::Duration;

/// The shortest wait between two looks that found nothing.
const SHORTEST: Duration = Duration::from_millis(1);
/// The longest wait at a hole, and after a wait that ended for nothing.
const LONGEST: Duration = Duration::from_millis(50);

/// Looks that found nothing, in a row.
#[derive(Debug, Default)]
pub(super) struct Pace {
    empty: u32,
}

impl Pace {
    /// Something was found.
    pub(super) fn found(&mut self) {
        self.empty = 0;
    }

    /// Nothing was found: how long to leave the journal alone before it may wake us again. The first time not at all, since something may
    /// have come while we looked; then longer and longer.
    pub(super) fn rest(&mut self) -> Duration {
        let rest = match self.empty {
            0 => Duration::ZERO,
            times => SHORTEST.saturating_mul(1 << (times - 1).min(10)).min(LONGEST),
        };
        self.empty = self.empty.saturating_add(1);
        rest
    }

    /// A hole: its writer commits or is gone soon, and nothing tells us when.
    pub(super) fn at_hole(&mut self) -> Duration {
        self.rest().max(SHORTEST)
    }

    /// A wait was as long as was asked for: the journal is quiet, and the next look may follow at once.
    pub(super) fn waited_out(&mut self) {
        self.empty = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_to_a_limit_and_begin_again_when_something_is_found() {
        let mut pace = Pace::default();
        assert_eq!(pace.rest(), Duration::ZERO);
        assert_eq!(pace.rest(), SHORTEST);
        let sum: Duration = (0..100).map(|_| pace.rest()).sum();
        assert!(sum > Duration::from_secs(4) && sum < Duration::from_secs(5), "{sum:?}");
        pace.found();
        assert_eq!((pace.rest(), pace.at_hole()), (Duration::ZERO, SHORTEST));
    }
}
