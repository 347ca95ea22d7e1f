//! The handler that applies the events of records to a projection.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{Applied, Projection, change_of};
use crate::consumer::{
    BatchHandled, ConsumerHandle, ConsumerSettings, Failed, Handled, LeasedBatchHandler, LeasedEvent, Wants,
};
use crate::error::{Error, Result};
use crate::id::{Scope, Topic};
use crate::ledger::{OnDead, OrderPolicy};
use crate::records::KIND_PREFIX;

/// How long to wait before asking again a projection that could not take a change.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// Settings of a consumer for a projection: the events of records, in the order `latest`. A dead event
/// does not stop its successors, since each carries the whole record.
pub fn settings(scope: Scope, topic: Topic) -> ConsumerSettings {
    let mut settings = ConsumerSettings::new(scope, vec![topic]);
    project(&mut settings);
    settings
}

/// Makes settings fit for a projection.
pub(crate) fn project(settings: &mut ConsumerSettings) {
    settings.order = Some((OrderPolicy::Latest, OnDead::Skip));
    settings.wants = Wants::Matching(std::sync::Arc::new(|event| {
        event.kind.as_ref().is_some_and(|kind| kind.as_str().starts_with(KIND_PREFIX))
    }));
}

/// Applies the events of records to a projection: the handler for
/// [`Consumer::leased_batch`](crate::Consumer::leased_batch), with [`settings`].
///
/// | what happens | the event is |
/// |---|---|
/// | it is applied, or a newer version is there | done |
/// | the projection cannot take it now, or does not answer | retried after a pause; no attempt is counted |
/// | it fails otherwise | retried, and dead when its attempts are used up |
/// | it is refused permanently, or is not a readable event of a record | dead |
#[derive(Debug)]
pub struct Projector<P> {
    projection: P,
    generation: u16,
    outage: Outage,
    stops: Option<(ConsumerHandle, Broken)>,
}

/// Why a projection was given up; see [`Projector::stopping`]. Clones share the same state.
#[derive(Debug, Clone, Default)]
pub struct Broken(Arc<Mutex<Option<Error>>>);

impl Broken {
    /// The first error that is not retryable, if there was one.
    pub fn take(&self) -> Option<Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn note(&self, error: Error) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }
}

/// Whether the projection takes changes. Logged when an outage begins and when it ends, not in between.
#[derive(Debug, Default)]
struct Outage(AtomicBool);

impl Outage {
    /// Whether it begins.
    fn begins(&self) -> bool {
        !self.0.swap(true, Ordering::Relaxed)
    }

    /// Whether it ends.
    fn ends(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

impl<P: Projection> Projector<P> {
    /// A projector of records whose source has this generation (at least 1; see
    /// [`Version`](super::Version)).
    pub fn new(projection: P, generation: u16) -> Result<Self> {
        if generation == 0 {
            return Err(Error::Config("the generation of a projection must be at least 1".into()));
        }
        projection.accepts(generation)?;
        Ok(Projector { projection, generation, outage: Outage::default(), stops: None })
    }

    /// Stops a consumer when the projection fails with an error that is not
    /// [retryable](Error::is_retryable): a password that is wrong, an index that is not ours. Nothing could be
    /// applied until somebody mends that, and no event is given up for it.
    #[must_use = "`Broken` says why the consumer was stopped"]
    pub fn stopping(mut self, consumer: ConsumerHandle) -> (Self, Broken) {
        let broken = Broken::default();
        self.stops = Some((consumer, broken.clone()));
        (self, broken)
    }

    fn log_outage(&self, reason: &str) {
        if self.outage.begins() {
            let about = self.projection.about();
            tracing::warn!(target: "hapax", projection = %about, reason, "the projection refuses changes; retrying every second");
        }
    }

    fn log_recovery(&self) {
        if self.outage.ends() {
            let about = self.projection.about();
            tracing::warn!(target: "hapax", projection = %about, "the projection takes changes again");
        }
    }
}

impl<P: Projection> LeasedBatchHandler for Projector<P> {
    async fn handle(&self, batch: &[LeasedEvent]) -> BatchHandled {
        let (mut handled, mut places, mut changes) =
            (Vec::with_capacity(batch.len()), Vec::new(), Vec::new());
        for (place, item) in batch.iter().enumerate() {
            handled.push(match change_of(&item.event, self.generation) {
                Ok(Some(change)) => {
                    places.push(place);
                    changes.push(change);
                    Ok(())
                }
                Ok(None) => Ok(()),
                Err(error) => Err(Failed::fatal(error.chain())),
            });
        }
        if changes.is_empty() {
            return Ok(handled);
        }
        crate::crash_point!("projection.before-write");
        // An error is about the projection, not about these events.
        let applied = self.projection.apply(&changes).await;
        let applied = applied.map_err(|error| {
            let reason = error.chain();
            match &self.stops {
                Some((consumer, broken)) if !error.is_retryable() => {
                    broken.note(error);
                    consumer.stop();
                }
                _ => self.log_outage(&reason),
            }
            Failed::uncounted(reason, BUSY_PAUSE)
        })?;
        crate::crash_point!("projection.after-write");
        if applied.len() != changes.len() {
            let message = format!("{} changes had {} outcomes", changes.len(), applied.len());
            return Err(Failed::retryable(message));
        }
        let busy = applied.iter().find_map(|one| match one {
            Applied::Busy { reason } => Some(reason),
            _ => None,
        });
        match busy {
            Some(reason) => self.log_outage(reason),
            None => self.log_recovery(),
        }
        for (place, applied) in places.into_iter().zip(applied) {
            handled[place] = outcome(applied);
        }
        Ok(handled)
    }
}

fn outcome(applied: Applied) -> Handled {
    match applied {
        Applied::Newer | Applied::Stale => Ok(()),
        Applied::Busy { reason } => Err(Failed::uncounted(reason, BUSY_PAUSE)),
        Applied::Failed { reason } => Err(Failed::retryable(reason)),
        Applied::Rejected { reason } => Err(Failed::fatal(reason)),
    }
}

#[cfg(test)]
mod tests {
    use super::Outage;

    #[test]
    fn t358_an_outage_is_reported_once_when_it_begins_and_once_when_it_ends() {
        let outage = Outage::default();
        assert_eq!(
            [outage.ends(), outage.begins(), outage.begins(), outage.ends(), outage.ends()],
            [false, true, false, true, false]
        );
        assert!(outage.begins(), "the next one is reported again");
    }
}
