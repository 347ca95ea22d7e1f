//! Behaviour while the window is unavailable: an explicit choice, never an accident of error
//! handling.

use std::time::Duration;

use async_trait::async_trait;

use super::{Sighting, Window};
use crate::error::Result;
use crate::ledger::{Finding, Outage};
use crate::telemetry::WindowMeter;

/// What to do while a window is unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnOutage {
    /// Everything passes unfiltered and is counted, and the ledger stops duplicates. Gives up: the
    /// ledger load that the window would have saved.
    #[default]
    PassThrough,
    /// Deliveries wait, and the window is asked again until it answers. Gives up: progress during
    /// the outage.
    Pause,
}

/// A window with a policy for outages. It never returns an error. It logs one line when an outage
/// begins and one when it ends.
///
/// Under either policy, what cannot be remembered is dropped and counted: the event is done and the
/// ledger knows it, so only a later duplicate costs a claim. The next query shows whether the
/// window is back.
#[derive(Debug)]
pub struct OutageWindow<W> {
    window: W,
    policy: OnOutage,
    outage: Outage,
    meter: WindowMeter,
    probe: (Duration, Duration),
}

impl<W: Window> OutageWindow<W> {
    /// Adds a policy to a window.
    pub fn new(window: W, policy: OnOutage) -> Self {
        OutageWindow {
            window,
            policy,
            outage: Outage::of("the window"),
            meter: WindowMeter::new(None),
            probe: (Duration::from_millis(100), Duration::from_secs(5)),
        }
    }

    /// Adds a prefix to the names of its metrics.
    #[must_use]
    pub fn telemetry_prefix(self, prefix: Option<&str>) -> Self {
        OutageWindow { meter: WindowMeter::new(prefix), ..self }
    }

    /// How long to wait before asking the window again: `first`, then doubling up to `most`.
    #[must_use]
    pub fn probe(self, first: Duration, most: Duration) -> Self {
        OutageWindow { probe: (first, most), ..self }
    }

    /// The wrapped window.
    pub fn inner(&self) -> &W {
        &self.window
    }

    /// Notes whether the window answered. Any error counts as an outage.
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
