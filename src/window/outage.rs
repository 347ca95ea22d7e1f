//! What happens while the window is away: an explicit choice, never an accident of error handling.

use std::time::Duration;

use async_trait::async_trait;

use super::{Sighting, Window};
use crate::error::Result;
use crate::ledger::{Finding, Outage};
use crate::telemetry::WindowMeter;

/// What to do while a window is away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOutage {
    /// Everything passes, unfiltered and counted, and the ledger stops what was done before. Gives up: the load that the
    /// window would have kept off the ledger.
    #[default]
    PassThrough,
    /// Deliveries wait, and the window is asked again and again until it answers. Gives up: progress while it is away.
    Pause,
}

/// A window with a policy for outages: it never returns an error. One log line when an outage begins, one when it ends.
///
/// Under either policy what cannot be remembered is dropped and counted: it is done, the ledger knows it, and only a later
/// duplicate costs a claim. The next look tells whether the window is back.
#[derive(Debug)]
pub struct OutageWindow<W> {
    window: W,
    policy: OnOutage,
    outage: Outage,
    meter: WindowMeter,
    probe: (Duration, Duration),
}

impl<W: Window> OutageWindow<W> {
    /// Puts a policy in front of a window.
    pub fn new(window: W, policy: OnOutage) -> Self {
        OutageWindow {
            window,
            policy,
            outage: Outage::of("the window"),
            meter: WindowMeter::new(None),
            probe: (Duration::from_millis(100), Duration::from_secs(5)),
        }
    }

    /// Puts a prefix before the names of its metrics.
    #[must_use]
    pub fn telemetry_prefix(self, prefix: Option<&str>) -> Self {
        OutageWindow { meter: WindowMeter::new(prefix), ..self }
    }

    /// How long to wait before the window is asked again: the first time, doubling up to the second.
    #[must_use]
    pub fn probe(self, first: Duration, most: Duration) -> Self {
        OutageWindow { probe: (first, most), ..self }
    }

    /// The window behind it.
    pub fn inner(&self) -> &W {
        &self.window
    }

    /// Takes note of whether the window answered. Whatever error it gives, it is no filter then.
    fn note<T>(&self, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.outage.ended();
                Some(value)
            }
            Err(error) => {
                self.outage.began(&error);
                None
            }
        }
    }
}

#[async_trait]
impl<W: Window> Window for OutageWindow<W> {
    async fn seen(&self, sightings: &[Sighting]) -> Result<Vec<bool>> {
        let (mut pause, most) = self.probe;
        loop {
            if let Some(seen) = self.note(self.window.seen(sightings).await) {
                self.meter.checked(&seen);
                return Ok(seen);
            }
            if self.policy == OnOutage::PassThrough {
                self.meter.unfiltered(sightings.len());
                return Ok(vec![false; sightings.len()]);
            }
            tokio::time::sleep(pause).await;
            pause = pause.saturating_mul(2).min(most);
        }
    }

    async fn remember(&self, sightings: &[Sighting]) -> Result<()> {
        if self.note(self.window.remember(sightings).await).is_none() {
            self.meter.unremembered(sightings.len());
        }
        Ok(())
    }

    async fn check(&self, redelivery: Option<Duration>) -> Vec<Finding> {
        self.window.check(redelivery).await
    }
}
