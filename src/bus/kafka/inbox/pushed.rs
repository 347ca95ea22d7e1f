//! What becomes of a record that a member receives.

use crate::bus::Partition;

/// What became of a record.
#[derive(Debug, PartialEq, Eq)]
pub(in super::super) enum Pushed {
    /// It will be delivered next, or its partition is not this member's.
    Open,
    /// Its partition is paused, and it waits.
    Waits,
    /// The same, and no more of its partition may be fetched.
    Full(Partition),
    /// The offsets of its partition have started over: it was lost and assigned again, and is not
    /// paused.
    Anew(Partition),
}

/// Why a record is below the offsets already received.
pub(super) enum StepBack {
    /// It is the last one once more. librdkafka pauses partitions by itself while it rebalances, and
    /// fetches a record again that is just being handed over.
    Repeat,
    /// The partition's offsets have started over.
    Anew(Partition),
}
