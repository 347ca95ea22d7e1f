//! The telemetry of the feed of a read model.

use metrics::Key;

use super::{METADATA, check_prefix, count, describe, prefixed};
use crate::error::Result;

pub(super) const CHANGES: &str = "analytics_changes_total";
pub(super) const REJECTED: &str = "analytics_rejected_total";
pub(super) const LAG: &str = "analytics_lag_seconds";

/// The metrics of one feed. Their keys are made once.
#[derive(Debug)]
pub(crate) struct FeedMeter {
    changes: Key,
    rejected: Key,
    lag: Key,
}

impl FeedMeter {
    pub(crate) fn new(prefix: Option<&str>) -> Result<Self> {
        if let Some(prefix) = prefix {
            check_prefix(prefix)?;
        }
        describe(prefix);
        let key = |name| Key::from_name(prefixed(prefix, name));
        Ok(FeedMeter { changes: key(CHANGES), rejected: key(REJECTED), lag: key(LAG) })
    }

    pub(crate) fn changes(&self, changes: u64) {
        count(&self.changes, changes);
    }

    pub(crate) fn rejected(&self) {
        count(&self.rejected, 1);
    }

    /// How long ago `lastSyncAt` is, in seconds; infinite while it is unknown.
    pub(crate) fn lag(&self, seconds: f64) {
        metrics::with_recorder(|recorder| recorder.register_gauge(&self.lag, &METADATA).set(seconds));
    }
}
