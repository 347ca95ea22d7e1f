//! Why a delivery's offset may be passed.

use std::borrow::Borrow;
use std::cmp::Ordering;
use std::fmt;

/// What became of a delivery whose offset may be committed: nothing more is to happen to it here. Its label is the word in
/// counts, metrics and traces, and a map by `Passed` can be asked by label: `counts["done"]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Passed {
    /// Its effect was made, and recorded.
    Done,
    /// Its handler ended well, at most once.
    Finished,
    /// Its handler failed or timed out, at most once: it is listed as lost.
    Lost,
    /// Its effect had been made before.
    Duplicate,
    /// A later event of its aggregate was done before.
    Stale,
    /// It is a dead letter.
    Dead,
    /// It waits in the ledger behind an event of its aggregate that is unresolved.
    Parked,
    /// It waits in the ledger for its retry.
    Held,
    /// It cannot run at all (no id, undecodable, an id used again) and is a dead letter under its place on the bus.
    Refused,
    /// Its week was dropped, so nobody knows whether it took effect. It is a dead letter.
    TooOld,
    /// No handler of the scope wants it.
    Unwanted,
    /// The window had seen it.
    Window,
    /// The ledger was away, and it was copied to the dead-letter topic, as the outage policy says.
    DeadLettered,
    /// It is held in the ledger, and was left to a process that wants it.
    Left,
    /// Retention removed it from the bus before it was read.
    Removed,
}

impl Passed {
    /// Its word, for counts, metrics and traces.
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

// Ordered as its label, so that a map can be asked by label.
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
