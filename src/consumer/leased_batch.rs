//! Leased batches: many claims, one call of the handler, one end per event.
//!
//! Each event has its own lease, its own heartbeat and its own settling, as if it ran by itself. Only
//! the head of each key is in a batch, so the order within keys is that of single runs.

use std::future::Future;
use std::marker::PhantomData;
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;

use super::Passed;
use super::arrival::{Arrival, Ending};
use super::claim::{ConsumerContext, away};
use super::handle::{BatchHandled, Failed, ended_within};
use super::handler::LeasedBatchHandler;
use super::leased::{PAUSE, release_lease, settle_failure, settled};
use super::worker::Worker;
use crate::error::Error;
use crate::event::Event;
use crate::guard::{Lease, Run};
use crate::ledger::{Outcome, Verdict};

/// An event of a leased batch.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LeasedEvent {
    /// The event.
    pub event: Event,
    /// Its run: pass key and token to the sink.
    pub run: Run,
}

impl LeasedEvent {
    /// An event of a batch, for the unit test of a handler. In production the consumer makes it.
    pub fn new(event: Event, run: Run) -> Self {
        LeasedEvent { event, run }
    }
}

/// Runs deliveries in batches, each delivery under its own lease.
pub(super) struct LeasedBatchWorker<H, Args> {
    context: ConsumerContext,
    handler: H,
    _args: PhantomData<fn() -> Args>,
}

impl<H, Args> LeasedBatchWorker<H, Args> {
    pub(super) fn new(context: ConsumerContext, handler: H) -> Self {
        LeasedBatchWorker { context, handler, _args: PhantomData }
    }
}

#[async_trait]
impl<Args: 'static, H: LeasedBatchHandler<Args>> Worker for LeasedBatchWorker<H, Args> {
    fn batch_max(&self) -> usize {
        self.context.settings.batch_max
    }

    /// A lease on an event would make its successors wait, so only the head of a key is claimed.
    fn per_key_max(&self) -> usize {
        1
    }

    async fn work_one(&self, arrival: &mut Arrival) -> Ending {
        let mut endings = self.batch(vec![arrival]).await;
        endings.pop().unwrap_or(Ending::Later(PAUSE))
    }

    async fn work(&self, queues: &mut [Vec<Arrival>]) -> Vec<Vec<Ending>> {
        let mut endings: Vec<Option<Ending>> = queues.iter().map(|_| None).collect();
        let (mut together, mut groups) = (Vec::new(), Vec::new());
        for (queue, arrivals) in queues.iter_mut().enumerate() {
            let Some(arrival) = arrivals.first_mut() else { continue };
            if !self.context.settings.wants.matches(&arrival.event) {
                endings[queue] = Some(self.context.step_past(arrival).await);
            } else if arrival.apart {
                groups.push(vec![(queue, arrival)]);
            } else {
                together.push((queue, arrival));
            }
        }
        groups.push(together);
        let ran = all(groups.into_iter().map(async |group| {
            let (queues, arrivals): (Vec<_>, Vec<_>) = group.into_iter().unzip();
            queues.into_iter().zip(self.batch(arrivals).await).collect::<Vec<_>>()
        }));
        for (queue, ending) in ran.await.into_iter().flatten() {
            endings[queue] = Some(ending);
        }
        endings.into_iter().map(|ending| ending.into_iter().collect()).collect()
    }
}

/// Why a batch has no answer.
enum Broken {
    /// The handler panicked or took too long.
    Failed(Failed),
    /// A lease was lost, or the process must let go.
    Interrupted,
}

/// A claimed delivery.
struct Claimed<'a> {
    lease: Lease,
    arrival: &'a mut Arrival,
}

impl<Args: 'static, H: LeasedBatchHandler<Args>> LeasedBatchWorker<H, Args> {
    /// Runs deliveries in one call of the handler. An ending for each, in order.
    async fn batch(&self, arrivals: Vec<&mut Arrival>) -> Vec<Ending> {
        let count = arrivals.len();
        let claims = all(arrivals.into_iter().map(|arrival| self.claim(arrival))).await;
        let mut endings: Vec<Option<Ending>> = Vec::with_capacity(count);
        let (mut places, mut claimed) = (Vec::new(), Vec::new());
        for (place, claim) in claims.into_iter().enumerate() {
            match claim {
                Ok(claim) => {
                    places.push(place);
                    claimed.push(claim);
                    endings.push(None);
                }
                Err(ending) => endings.push(Some(ending)),
            }
        }
        if !claimed.is_empty() {
            for (place, ending) in places.into_iter().zip(self.run(claimed).await) {
                endings[place] = Some(ending);
            }
        }
        endings.into_iter().map(|ending| ending.unwrap_or(Ending::Later(PAUSE))).collect()
    }

    /// Claims a delivery, or tells how it ends without a run.
    async fn claim<'a>(&self, arrival: &'a mut Arrival) -> Result<Claimed<'a>, Ending> {
        let settings = self.context.lease_settings(arrival);
        let holds = self.context.holds(arrival);
        match self.context.core.lease_on(arrival.delivery(), settings, holds).await {
            // The answer took longer than the lease lasts. Nothing was started, and nothing counts.
            Ok(Outcome::First(lease)) if lease.is_lost() => {
                Err(release_lease(lease, Ending::Later(PAUSE)).await)
            }
            Ok(Outcome::First(lease)) if lease.suspect() && !arrival.alone => {
                Err(release_lease(lease, Ending::Alone).await)
            }
            Ok(Outcome::First(lease)) => {
                arrival.ran = true;
                Ok(Claimed { lease, arrival })
            }
            Ok(other) => Err(self.context.unclaimed(other, arrival).await),
            Err(error @ Error::Invalid { .. }) => Err(self.context.refuse(arrival, &error.to_string()).await),
            Err(error) => Err(away(error)),
        }
    }

    /// Calls the handler once for all, then settles each by its own outcome.
    async fn run(&self, mut claimed: Vec<Claimed<'_>>) -> Vec<Ending> {
        crate::crash_point!("consumer.after-claim");
        let items: Vec<LeasedEvent> =
            claimed.iter().map(|one| LeasedEvent::new(one.arrival.event.clone(), one.lease.info())).collect();
        let began = Instant::now();
        let answer = self.call(&items, &mut claimed).await;
        let took = began.elapsed();
        crate::crash_point!("consumer.before-settle");
        match answer {
            Ok(Ok(outcomes)) => {
                let settles = claimed.into_iter().zip(outcomes);
                all(settles.map(async |(one, outcome)| match outcome {
                    Ok(()) => self.done(one, took).await,
                    Err(failed) => self.failed(one, &failed, took).await,
                }))
                .await
            }
            // The failure of the batch is that of each event.
            Ok(Err(failed)) => {
                all(claimed.into_iter().map(async |one| self.failed(one, &failed, took).await)).await
            }
            Err(Broken::Failed(failed)) if claimed.len() == 1 => {
                all(claimed.into_iter().map(async |one| self.failed(one, &failed, took).await)).await
            }
            // Nobody knows which event it was. Each runs by itself next, and answers for itself.
            Err(Broken::Failed(failed)) => {
                tracing::warn!(target: "hapax", reason = %failed, events = claimed.len(), "a batch failed as a whole; its events run one by one");
                all(claimed.into_iter().map(async |one| {
                    one.arrival.apart = true;
                    release_lease(one.lease, Ending::Later(PAUSE)).await
                }))
                .await
            }
            Err(Broken::Interrupted) => all(claimed.into_iter().map(let_go)).await,
        }
    }

    /// The handler's answer, with an outcome for each event, if it comes in time and every lease is
    /// kept meanwhile.
    async fn call(&self, items: &[LeasedEvent], claimed: &mut [Claimed<'_>]) -> Result<BatchHandled, Broken> {
        let lost: Vec<_> = claimed.iter_mut().map(|one| one.lease.lost()).collect();
        let cancelled: Vec<_> = claimed.iter().map(|one| one.arrival.cancelled()).collect();
        let work = ended_within(self.context.settings.handler_timeout, self.handler.handle(items));
        let answer = tokio::select! {
            biased;
            answer = work => answer.map_err(Broken::Failed)?,
            () = any(lost) => return Err(Broken::Interrupted),
            () = any(cancelled) => return Err(Broken::Interrupted),
        };
        match answer {
            Ok(outcomes) if outcomes.len() != items.len() => Err(Broken::Failed(Failed::retryable(format!(
                "the handler returned {} outcomes for {} events; it must return one for each, in order",
                outcomes.len(),
                items.len()
            )))),
            answer => Ok(answer),
        }
    }

    async fn done(&self, one: Claimed<'_>, took: Duration) -> Ending {
        self.context.core.handled(took, true);
        let metadata = one.arrival.metadata(self.context.group_apart(), Some(took));
        settled(one.lease.settle(Verdict::Done { metadata }).await, Ending::Passed(Passed::Done))
    }

    async fn failed(&self, one: Claimed<'_>, failed: &Failed, took: Duration) -> Ending {
        self.context.core.handled(took, false);
        settle_failure(&self.context, one.lease, failed, one.arrival).await
    }
}

/// Lets an event go that was interrupted, without counting an attempt. A lost lease changes nothing
/// here: its token is stale.
async fn let_go(one: Claimed<'_>) -> Ending {
    let ending = if one.arrival.is_cancelled() { Ending::Cancelled } else { Ending::Later(PAUSE) };
    release_lease(one.lease, ending).await
}

/// Runs futures side by side, so that their claims and settles gather into batches. Their values, in
/// order.
async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut running: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut open = false;
        for (future, value) in running.iter_mut().filter(|(_, value)| value.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(ready) => *value = Some(ready),
                Poll::Pending => open = true,
            }
        }
        if open { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    running.into_iter().filter_map(|(_, value)| value).collect()
}

/// Completes with the first of them.
async fn any<F: Future<Output = ()>>(futures: Vec<F>) {
    let mut futures: Vec<Pin<Box<F>>> = futures.into_iter().map(Box::pin).collect();
    let first = std::future::poll_fn(|context| {
        if futures.iter_mut().any(|future| future.as_mut().poll(context).is_ready()) {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    });
    pin!(first).await;
}
