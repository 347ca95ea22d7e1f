//! Leased and at-most-once runs: claim, handle, settle, one delivery at a time.

use std::marker::PhantomData;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::Passed;
use super::arrival::{Arrival, Ending};
use super::claim::{ConsumerContext, away};
use super::dead::unclaimed_record;
use super::handle::{Failed, Handled, within};
use super::handler::{AtMostOnceHandler, LeasedHandler};
use super::worker::Worker;
use crate::error::Error;
use crate::event::Event;
use crate::guard::{Lease, Run, reason_of};
use crate::ledger::{Outcome, Verdict};

/// Runs deliveries under a lease.
pub(super) struct LeasedWorker<H, Args> {
    context: ConsumerContext,
    handler: H,
    _args: PhantomData<fn() -> Args>,
}

impl<H, Args> LeasedWorker<H, Args> {
    pub(super) fn new(context: ConsumerContext, handler: H) -> Self {
        LeasedWorker { context, handler, _args: PhantomData }
    }
}

#[async_trait]
impl<H: LeasedHandler<Args>, Args: 'static> Worker for LeasedWorker<H, Args> {
    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        let delivery = arrival.delivery();
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
                self.run(lease, arrival).await
            }
            other => self.context.unclaimed(other, arrival).await,
        }
    }
}

impl<H: LeasedHandler<Args>, Args: 'static> LeasedWorker<H, Args> {
    async fn run(&self, mut lease: Lease, arrival: &Arrival) -> Ending {
        crate::crash_point!("consumer.after-claim");
        let work = self.in_turn(&arrival.event, lease.info());
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

    /// Waits for a permit, then runs the handler. Returns its result and how long it took, or
    /// `None` if no more handlers may run.
    async fn in_turn(&self, event: &Event, run: Run) -> Option<(Handled, Duration)> {
        let permit = match self.handler.permits() {
            Some(permits) => Some(permits.permit(Some(run.key())).await?),
            None => None,
        };
        let began = Instant::now();
        let handled = within(self.context.settings.handler_timeout, self.handler.handle(event, &run)).await;
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

/// Runs deliveries at most once.
pub(super) struct OnceWorker<H, Args> {
    context: ConsumerContext,
    handler: H,
    _args: PhantomData<fn() -> Args>,
}

impl<H, Args> OnceWorker<H, Args> {
    pub(super) fn new(context: ConsumerContext, handler: H) -> Self {
        OnceWorker { context, handler, _args: PhantomData }
    }
}

#[async_trait]
impl<H: AtMostOnceHandler<Args>, Args: 'static> Worker for OnceWorker<H, Args> {
    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        let delivery = arrival.delivery();
        let limit = self.context.settings.handler_timeout;
        // Get the permit before the claim. After the claim the event counts as started, and is lost
        // if it does not end.
        let _permit = match self.handler.permits() {
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
            handled = within(limit, self.handler.handle(&arrival.event)) => handled,
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
