//! Leased and at-most-once runs: claim, handle, settle, one delivery at a time.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::Passed;
use super::arrival::{Arrival, Ending};
use super::claim::{ConsumerContext, away};
use super::dead::unclaimed_record;
use super::handle::{Failed, Handled, Permits, within};
use super::worker::{Guarantee, Worker};
use crate::error::Error;
use crate::event::Event;
use crate::guard::{Lease, Run, reason_of};
use crate::ledger::{Ledger, Outcome, Verdict};

/// At least once, one live lease at a time: **exactly once if the sink dedups on the key** that the
/// handler gets. Gives up: a crash after the effect runs the handler again.
#[derive(Clone)]
pub struct Leased<F> {
    handler: F,
    permits: Option<Arc<dyn Permits>>,
}

impl<F> Leased<F> {
    /// Handlers run only with a permit. The time limit of a run starts when it has one.
    #[must_use]
    pub fn permits(self, permits: Arc<dyn Permits>) -> Self {
        Leased { permits: Some(permits), ..self }
    }
}

/// Runs a closure under a lease, with a key and token to pass on to the sink. Programs use
/// [`Consumer::leased`](super::Consumer::leased).
pub fn leased<F, R>(handler: F) -> Leased<F>
where
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    Leased { handler, permits: None }
}

/// At most once: never twice, never retried. Gives up: an event that failed, timed out or crashed
/// after its claim is `lost`. It is listed and counted, but not run again automatically.
#[derive(Clone)]
pub struct AtMostOnce<F> {
    handler: F,
    permits: Option<Arc<dyn Permits>>,
}

impl<F> AtMostOnce<F> {
    /// Events are claimed, and their handlers run, only with a permit.
    #[must_use]
    pub fn permits(self, permits: Arc<dyn Permits>) -> Self {
        AtMostOnce { permits: Some(permits), ..self }
    }
}

/// Runs a closure at most once per event. Programs use
/// [`Consumer::at_most_once`](super::Consumer::at_most_once).
pub fn at_most_once<F, R>(handler: F) -> AtMostOnce<F>
where
    F: Fn(Event) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    AtMostOnce { handler, permits: None }
}

impl<L, F, R> Guarantee<L> for Leased<F>
where
    L: Ledger,
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    fn worker(self, context: ConsumerContext, _: &L) -> Arc<dyn Worker> {
        Arc::new(LeasedWorker { context, handler: self.handler, permits: self.permits })
    }
}

impl<L, F, R> Guarantee<L> for AtMostOnce<F>
where
    L: Ledger,
    F: Fn(Event) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    fn worker(self, context: ConsumerContext, _: &L) -> Arc<dyn Worker> {
        Arc::new(OnceWorker { context, handler: self.handler, permits: self.permits })
    }
}

struct LeasedWorker<F> {
    context: ConsumerContext,
    handler: F,
    permits: Option<Arc<dyn Permits>>,
}

#[async_trait]
impl<F, R> Worker for LeasedWorker<F>
where
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        let (event, delivery) = (arrival.event.clone(), arrival.delivery());
        let settings = self.context.lease_settings(arrival);
        let outcome = match self.context.core.lease_on(delivery, settings, self.context.holds(arrival)).await
        {
            Ok(outcome) => outcome,
            Err(error @ Error::Invalid { .. }) => {
                return self.context.refuse(arrival, &error.to_string()).await;
            }
            Err(error) => return away(error),
        };
        match outcome {
            // The answer took longer than the lease lasts. Nothing was started, and nothing counts.
            Outcome::First(lease) if lease.is_lost() => release_lease(lease, Ending::Later(PAUSE)).await,
            Outcome::First(lease) if lease.suspect() && !arrival.alone => {
                release_lease(lease, Ending::Alone).await
            }
            Outcome::First(lease) => {
                arrival.ran = true;
                self.run(event, lease, arrival).await
            }
            other => self.context.unclaimed(other, arrival).await,
        }
    }
}

impl<F, R> LeasedWorker<F>
where
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    async fn run(&self, event: Event, mut lease: Lease, arrival: &Arrival) -> Ending {
        crate::crash_point!("consumer.after-claim");
        let work = self.in_turn(event, lease.info());
        let work = tracing::Instrument::instrument(work, arrival.span.clone());
        let handled = tokio::select! {
            handled = lease.run(work) => handled,
            () = arrival.cancelled() => return release_lease(lease, Ending::Cancelled).await,
        };
        crate::crash_point!("consumer.before-settle");
        let (handled, took) = match handled {
            Ok(Some((handled, took))) => (Ok(handled), took),
            Ok(None) => return release_lease(lease, Ending::Cancelled).await,
            Err(lost) => (Err(lost), Duration::ZERO),
        };
        self.context.core.handled(took, matches!(handled, Ok(Ok(()))));
        match handled {
            Ok(Ok(())) => {
                let metadata = arrival.metadata(self.context.group_apart(), Some(took));
                settled(lease.settle(Verdict::Done { metadata }).await, Ending::Passed(Passed::Done))
            }
            Ok(Err(failed)) => settle_failure(&self.context, lease, &failed, arrival).await,
            // The ledger may still list it as leased for some time; release it, so that others need
            // not wait. If another process has it by now, the token keeps this from changing
            // anything.
            Err(lost) => {
                tracing::debug!(target: "hapax", %lost, "run cancelled");
                release_lease(lease, Ending::Later(PAUSE)).await
            }
        }
    }
}

impl<F, R> LeasedWorker<F>
where
    F: Fn(Event, Run) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    /// Waits for a permit, then runs the handler. Returns its result and how long it took, or
    /// `None` if no more handlers may run.
    async fn in_turn(&self, event: Event, run: Run) -> Option<(Handled, Duration)> {
        let permit = match &self.permits {
            Some(permits) => Some(permits.permit(Some(run.key())).await?),
            None => None,
        };
        let began = Instant::now();
        let handled = within(self.context.settings.handler_timeout, (self.handler)(event, run)).await;
        drop(permit);
        Some((handled, began.elapsed()))
    }
}

/// Settles a failed run under a lease: as a later retry, or as dead.
pub(super) async fn settle_failure(
    context: &ConsumerContext,
    lease: Lease,
    failed: &Failed,
    arrival: &Arrival,
) -> Ending {
    let settings = &context.settings;
    if failed.is_fatal() || (failed.is_counted() && lease.attempt() >= settings.attempts_max) {
        if crate::crash_point::mutant!("publish before mark")
            && let Some(topic) = settings.dead_topic_of(&arrival.received.origin.topic)
        {
            let copy = unclaimed_record(context, &arrival.received, &failed.to_string());
            let _ = context.bus.publish(&topic, &[copy]).await;
        }
        let verdict = Verdict::Dead { reason: reason_of(failed), body: Some(arrival.body()) };
        return settled(lease.settle(verdict).await, Ending::Passed(Passed::Dead));
    }
    let backoff = context.failure_settings().pause(lease.attempt());
    let pause = backoff.max(failed.after().unwrap_or_default());
    // One that came from the ledger waits there, however short the pause: any member may run it then.
    let held = (pause > settings.hold_max || arrival.is_held()) && arrival.may_be_held();
    let verdict = Verdict::Retry {
        after: pause,
        counted: failed.is_counted(),
        reason: Some(reason_of(failed)),
        body: held.then(|| arrival.body()),
    };
    let ending = if held { Ending::Passed(Passed::Held) } else { Ending::Later(pause) };
    settled(lease.settle(verdict).await, ending)
}

/// How long to wait before claiming an event again that could not run.
pub(super) const PAUSE: Duration = Duration::from_millis(100);

/// Releases a lease without counting an attempt. A stop waits for this, so that others need not
/// wait for the lease of a process that left.
pub(super) async fn release_lease(lease: Lease, ending: Ending) -> Ending {
    // If the release is lost, the lease expires.
    match lease.release().await {
        Ok(()) | Err(Error::Fenced { .. }) => ending,
        Err(error) => away(error),
    }
}

/// Maps the answer to a settle. A settle that failed is not a failure of the handler: the event is
/// claimed again to learn its state.
pub(super) fn settled<T>(answer: crate::error::Result<T>, ending: Ending) -> Ending {
    match answer {
        Ok(_) => ending,
        Err(Error::Fenced { what }) => {
            tracing::warn!(target: "hapax", what, "settled by someone else");
            Ending::Later(Duration::from_millis(10))
        }
        Err(error) => away(error),
    }
}

struct OnceWorker<F> {
    context: ConsumerContext,
    handler: F,
    permits: Option<Arc<dyn Permits>>,
}

#[async_trait]
impl<F, R> Worker for OnceWorker<F>
where
    F: Fn(Event) -> R + Send + Sync + 'static,
    R: Future<Output = Handled> + Send,
{
    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        let (event, delivery) = (arrival.event.clone(), arrival.delivery());
        let limit = self.context.settings.handler_timeout;
        // Get the permit before the claim. After the claim the event counts as started, and is lost
        // if it does not end.
        let _permit = match &self.permits {
            None => None,
            Some(permits) => tokio::select! {
                permit = permits.permit(None) => match permit {
                    Some(permit) => Some(permit),
                    None => return Ending::Cancelled,
                },
                () = arrival.cancelled() => return Ending::Cancelled,
            },
        };
        let claimed =
            match self.context.core.once(delivery, Some(limit * 2), self.context.holds(arrival)).await {
                Ok(Outcome::First(claimed)) => claimed,
                Ok(other) => return self.context.unclaimed(other, arrival).await,
                Err(error @ Error::Invalid { .. }) => {
                    return self.context.refuse(arrival, &error.to_string()).await;
                }
                Err(error) => return away(error),
            };
        arrival.ran = true;
        crate::crash_point!("consumer.after-claim");
        let began = Instant::now();
        let handled = tokio::select! {
            handled = within(limit, (self.handler)(event)) => handled,
            () = arrival.cancelled() => Err(Failed::fatal("the process was stopped before the handler finished")),
        };
        let took = began.elapsed();
        self.context.core.handled(took, handled.is_ok());
        let (answer, ending) = match handled {
            Ok(()) => {
                let metadata = arrival.metadata(self.context.group_apart(), Some(took));
                (claimed.end(Verdict::Finished { metadata }).await, Ending::Passed(Passed::Finished))
            }
            Err(failed) => (claimed.lost(failed).await, Ending::Passed(Passed::Lost)),
        };
        match answer {
            // The claim stands whatever happened to the report, so the event never runs again.
            Ok(()) | Err(Error::Fenced { .. }) => ending,
            Err(error) => {
                tracing::warn!(target: "hapax", error = %error.chain(), "the end of an at-most-once run was not recorded; it will be listed as lost");
                ending
            }
        }
    }
}
