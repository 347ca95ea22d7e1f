//! Why the commit point may move past a delivery.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;

/// How a delivery ended whose offset may be committed: nothing more happens to it here. Its label
/// is used in counts, metrics and traces, and a map by `Passed` can be queried by label:
/// `counts["done"]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Passed {
    /// Its effect was made and recorded.
    Done,
    /// Its handler succeeded, at most once.
    Finished,
    /// Its handler failed or timed out, at most once. It is listed as lost.
    Lost,
    /// Its effect had been made before.
    Duplicate,
    /// A later event of its aggregate was done before.
    Stale,
    /// It is a dead letter.
    Dead,
    /// It waits in the ledger behind an unresolved event of its aggregate.
    Parked,
    /// It waits in the ledger for its retry.
    Held,
    /// It cannot run (no id, undecodable, a reused id) and is a dead letter under its location on
    /// the bus.
    Refused,
    /// Its week was dropped, so it is unknown whether it took effect. It is a dead letter.
    TooOld,
    /// No handler of the scope wants it.
    Unwanted,
    /// The window had seen it.
    Window,
    /// The ledger was unavailable, and it was copied to the dead-letter topic, as the outage policy
    /// says.
    DeadLettered,
    /// It is held in the ledger and was left to another process, which runs it or wants it.
    Left,
    /// Retention removed it from the bus before it was read.
    Removed,
}

impl Passed {
    /// Its label in counts, metrics and traces.
    pub fn label(self) -> &'static str {
        match self {
            Passed::Done => "done",
            Passed::Finished => "finished",
            Passed::Lost => "lost",
            Passed::Duplicate => "duplicate",
            Passed::Stale => "stale",
            Passed::Dead => "dead",
            Passed::Parked => "parked",
            Passed::Held => "held",
            Passed::Refused => "refused",
            Passed::TooOld => "too_old",
            Passed::Unwanted => "unwanted",
            Passed::Window => "window",
            Passed::DeadLettered => "dead_lettered",
            Passed::Left => "left",
            Passed::Removed => "removed",
        }
    }
}

impl fmt::Display for Passed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label())
    }
}

// Ordered by label, so that a map can be queried by label.
impl Ord for Passed {
    fn cmp(&self, other: &Self) -> Ordering {
        self.label().cmp(other.label())
    }
}

impl PartialOrd for Passed {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Borrow<str> for Passed {
    fn borrow(&self) -> &str {
        self.label()
    }
}
