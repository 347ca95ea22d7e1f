//! Processing in one call: claim, run, settle.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;
use tokio::time::Instant;
use tracing::Instrument as _;

use super::lease::{Failure, Lease, Run};
use super::{Core, Deliverable, Delivery, Guard};
use crate::clock::{Time, jitter_permille};
use crate::error::{Error, Result, Source};
use crate::event::{Origin, Record};
use crate::ledger::{Identity, Ledger, Outcome};

/// The result of processing a delivery.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "it says whether the delivery may be acknowledged"]
#[non_exhaustive]
pub enum ProcessingResult {
    /// It took effect now.
    Success,
    /// It took effect before.
    AlreadyProcessed,
    /// Another caller is running it.
    Busy {
        /// When that lease ends, by ledger time, if known.
        until: Option<Time>,
    },
    /// It failed before, and its pause is not over.
    RetryLater {
        /// When it may run, by ledger time.
        at: Time,
    },
    /// Another event of its aggregate must come first.
    Wait,
    /// Its aggregate has moved past it.
    Stale,
    /// Its aggregate waits behind something unresolved.
    Parked,
    /// It failed permanently before.
    Dead,
    /// It failed permanently and was sent to the dead letters.
    DeadLettered,
    /// Its id was used before for a different event.
    Mismatch,
    /// The ledger no longer knows what happened in its week.
    TooOld,
    /// The lease was lost: the handler was cancelled, or ended too late. Another claimer runs it,
    /// or will.
    LeaseLost,
    /// The handler failed. The ledger has counted the failure; a later delivery runs the event
    /// again or finds it dead.
    Failed(String),
}

impl ProcessingResult {
    /// Whether the delivery is settled, so that its offset may be committed.
    ///
    /// Not if it is busy or waiting: the current run may still fail. Not if it is dead either,
    /// unless it was sent to the dead letters, because the ledger may not hold its bytes.
    pub fn may_acknowledge(&self) -> bool {
        matches!(
            self,
            ProcessingResult::Success
                | ProcessingResult::AlreadyProcessed
                | ProcessingResult::Stale
                | ProcessingResult::DeadLettered
        )
    }

    /// The result for an outcome that allows no run.
    fn of(outcome: &Outcome<Lease>) -> Self {
        match outcome {
            Outcome::First(_) | Outcome::Duplicate(_) => ProcessingResult::AlreadyProcessed,
            Outcome::Busy { until, .. } => ProcessingResult::Busy { until: *until },
            Outcome::RetryLater { at, .. } => ProcessingResult::RetryLater { at: *at },
            Outcome::Wait { .. } => ProcessingResult::Wait,
            Outcome::Stale { .. } => ProcessingResult::Stale,
            Outcome::Parked { .. } => ProcessingResult::Parked,
            Outcome::Dead { .. } => ProcessingResult::Dead,
            Outcome::Mismatch(_) => ProcessingResult::Mismatch,
            Outcome::TooOld { .. } => ProcessingResult::TooOld,
        }
    }
}

impl fmt::Display for ProcessingResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProcessingResult::Success => f.write_str("it took effect"),
            ProcessingResult::AlreadyProcessed => f.write_str("it took effect before"),
            ProcessingResult::Busy { until: Some(until) } => write!(f, "someone else has it until {until}"),
            ProcessingResult::Busy { until: None } => f.write_str("someone else has it"),
            ProcessingResult::RetryLater { at } => write!(f, "it failed and may run again at {at}"),
            ProcessingResult::Wait => f.write_str("another event of its aggregate must come first"),
            ProcessingResult::Stale => f.write_str("its aggregate has moved past it"),
            ProcessingResult::Parked => f.write_str("its aggregate waits behind something unresolved"),
            ProcessingResult::Dead => f.write_str("it failed for good"),
            ProcessingResult::DeadLettered => f.write_str("it failed for good, and the dead letters have it"),
            ProcessingResult::Mismatch => f.write_str("its id was used before for something else"),
            ProcessingResult::TooOld => {
                f.write_str("the event's week was dropped, so it is unknown whether it took effect")
            }
            ProcessingResult::LeaseLost => f.write_str("its lease was lost"),
            ProcessingResult::Failed(message) => write!(f, "it failed: {message}"),
        }
    }
}

/// An event that failed permanently, as it is sent to the dead letters.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeadLetter {
    /// The event's identity.
    pub key: Identity,
    /// Why it died.
    pub reason: String,
    /// How many runs it had.
    pub attempts: u32,
    /// The record it came from, if known.
    pub origin: Option<Origin>,
    /// Its bytes, if the delivery included them.
    pub body: Option<Record>,
}

/// The destination of dead events: a topic, a table, a person.
///
/// ```
/// use hapax::error::Source;
/// use hapax::guard::{DeadLetter, DeadLetters};
///
/// struct Log;
///
/// #[async_trait::async_trait]
/// impl DeadLetters for Log {
///     async fn send(&self, letter: &DeadLetter) -> Result<(), Source> {
///         eprintln!("{} died: {}", letter.key, letter.reason);
///         Ok(())
///     }
/// }
/// ```
#[async_trait]
pub trait DeadLetters: Send + Sync {
    /// Takes a dead event. May be called again for the same event, so deduplicate on the key.
    async fn send(&self, letter: &DeadLetter) -> Result<(), Source>;
}

/// The result of processing, with reason and attempts for the dead letter if the event is dead.
struct Processed {
    result: ProcessingResult,
    dead: Option<(String, u32)>,
}

impl From<ProcessingResult> for Processed {
    fn from(result: ProcessingResult) -> Self {
        Processed { result, dead: None }
    }
}

impl Core {
    async fn process<Fut, E>(
        &self,
        delivery: Delivery,
        trace: Option<String>,
        work: impl FnOnce(Run) -> Fut,
    ) -> Result<Processed>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        let outcome = self.lease(delivery).await;
        self.telemetry().checked(outcome.as_ref().ok());
        let mut lease = match outcome? {
            Outcome::First(lease) => lease,
            Outcome::Dead { attempts, .. } => {
                return Ok(Processed {
                    result: ProcessingResult::Dead,
                    dead: Some((String::new(), attempts)),
                });
            }
            other => return Ok(ProcessingResult::of(&other).into()),
        };
        let run = lease.info();
        let span = tracing::info_span!(
            target: "hapax",
            "dedup.process",
            otel.name = self.telemetry().span_name(1),
            consumer.scope_id = run.key().scope.as_str(),
            event.id = %run.key().id,
            dedup.attempt = run.attempt(),
            trace.parent = trace,
        );
        let started = Instant::now();
        let work = span.in_scope(|| work(run));
        let ended = lease.run(work.instrument(span)).await;
        if let Some(meter) = self.meter() {
            let result = match &ended {
                Ok(Ok(())) => "success",
                Ok(Err(_)) => "failed",
                Err(_) => "lease_lost",
            };
            meter.processed(started.elapsed(), result);
        }
        match ended {
            Ok(Ok(())) => finish(lease).await.map(Processed::from),
            Ok(Err(error)) => Ok(give_up(lease, error.to_string()).await),
            Err(_) => Ok(ProcessingResult::LeaseLost.into()),
        }
    }

    /// Sends a dead event to the dead letters. The ledger has marked it dead already, so a run that
    /// lost its lease cannot send one.
    async fn send_dead_letter(
        &self,
        delivery: Delivery,
        reason: String,
        attempts: u32,
        to: &dyn DeadLetters,
    ) -> Result<ProcessingResult> {
        let (time, origin, body) = (delivery.time, delivery.origin.clone(), delivery.body.clone());
        let key = self.identity(delivery)?;
        let mut letter = DeadLetter { key, reason, attempts, origin, body };
        if letter.reason.is_empty() {
            // It died in an earlier delivery; the ledger has the reason.
            let entry = self.batcher().ledger().get(&letter.key, time).await?;
            letter.reason = entry.and_then(|entry| entry.row.reason).unwrap_or_default().to_string();
        }
        let sent = to.send(&letter).await;
        if let Some(meter) = self.meter() {
            meter.dead_letter(if sent.is_ok() { "sent" } else { "failed" });
        }
        match sent {
            Ok(()) => Ok(ProcessingResult::DeadLettered),
            Err(error) => {
                tracing::error!(target: "hapax", key = %letter.key, %error, "the dead letters did not take a dead event; it stays dead and listed");
                Ok(ProcessingResult::Dead)
            }
        }
    }
}

/// The handler succeeded. If that cannot be recorded, the caller gets an error; it never becomes a
/// failure of the handler.
async fn finish(lease: Lease) -> Result<ProcessingResult> {
    match lease.done().await {
        Ok(()) => Ok(ProcessingResult::Success),
        Err(Error::Fenced { .. }) => Ok(ProcessingResult::LeaseLost),
        Err(error) => Err(error),
    }
}

/// The handler failed. If that cannot be recorded, the lease lapses, which counts as well.
async fn give_up(lease: Lease, message: String) -> Processed {
    let attempts = lease.attempt();
    match lease.fail(&message).await {
        Ok(Failure::RetryAt { .. }) => ProcessingResult::Failed(message).into(),
        Ok(Failure::Dead { .. }) => {
            Processed { dead: Some((message.clone(), attempts)), result: ProcessingResult::Failed(message) }
        }
        Err(Error::Fenced { .. }) => ProcessingResult::LeaseLost.into(),
        Err(error) => {
            tracing::warn!(target: "hapax", error = %error.chain(), "a failed run could not be recorded; its lease will lapse");
            ProcessingResult::Failed(message).into()
        }
    }
}

impl<L: Ledger> Guard<L> {
    /// Runs `work` if the event has not taken effect yet, and records that it has. The event is
    /// claimed first, so of ten concurrent callers one runs it and nine get
    /// [`Busy`](ProcessingResult::Busy), or
    /// [`AlreadyProcessed`](ProcessingResult::AlreadyProcessed) afterwards.
    ///
    /// The effect is at least once: after a crash between the effect and its recording, `work` runs
    /// again, unless the sink deduplicates on the key (which [`with_lease`](Guard::with_lease)
    /// provides). The lease is extended while `work` runs; if it is lost, `work` is cancelled. If
    /// `work` succeeded and the ledger then becomes unavailable, the call returns an error, and it
    /// is in doubt whether the success was recorded.
    ///
    /// ```
    /// use hapax::{Guard, backend::memory::MemoryLedger, guard::ProcessingResult};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
    /// let result = guard.process_if_new("order-17-paid", || async { send_mail() }).await?;
    /// assert_eq!(result, ProcessingResult::Success);
    /// let again = guard.process_if_new("order-17-paid", || async { send_mail() }).await?;
    /// assert_eq!(again, ProcessingResult::AlreadyProcessed);
    /// assert!(again.may_acknowledge());
    /// # Ok(()) }
    /// # fn send_mail() -> Result<(), String> { Ok(()) }
    /// ```
    pub async fn process_if_new<Fut, E>(
        &self,
        event: impl Deliverable,
        work: impl FnOnce() -> Fut,
    ) -> Result<ProcessingResult>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        self.with_lease(event, |_| work()).await
    }

    /// Like [`process_if_new`](Guard::process_if_new), but `work` gets key, token and attempt of
    /// its [`Run`].
    ///
    /// ```
    /// # use hapax::{Guard, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// # let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
    /// let result = guard
    ///     .with_lease("order-17-paid", |run| async move {
    ///         // An HTTP sink gets the key as `Idempotency-Key`; emitted events get ids that a re-run repeats.
    ///         println!("{} {} {}", run.key(), run.token(), run.child_id(0));
    ///         Ok::<_, String>(())
    ///     })
    ///     .await?;
    /// # assert!(result.may_acknowledge());
    /// # Ok(()) }
    /// ```
    pub async fn with_lease<Fut, E>(
        &self,
        event: impl Deliverable,
        work: impl FnOnce(Run) -> Fut,
    ) -> Result<ProcessingResult>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        Ok(self.core.process(event.delivery()?, None, work).await?.result)
    }

    /// Like [`process_if_new`](Guard::process_if_new), but with the trace of the delivery (a trace
    /// id, or a [`TraceContext`](crate::TraceContext)): it becomes the field `trace.parent` of the
    /// span `dedup.process`, in which `work` runs.
    ///
    /// ```
    /// # use hapax::{Guard, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// # let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
    /// let trace = "4bf92f3577b34da6a3ce929d0e0e4736";
    /// let result =
    ///     guard.process_if_new_with_trace("order-17-paid", trace, || async { Ok::<_, String>(()) }).await?;
    /// # assert!(result.may_acknowledge());
    /// # Ok(()) }
    /// ```
    pub async fn process_if_new_with_trace<Fut, E>(
        &self,
        event: impl Deliverable,
        trace: impl fmt::Display,
        work: impl FnOnce() -> Fut,
    ) -> Result<ProcessingResult>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        Ok(self.core.process(event.delivery()?, Some(trace.to_string()), |_| work()).await?.result)
    }

    /// Like [`process_if_new`](Guard::process_if_new), but runs a failing `work` again up to
    /// `max_retries` times, after `backoff` and then twice as long each time (full jitter, at most
    /// the guard's longest backoff), under the same lease. Only if all runs fail does this count as
    /// one failed attempt.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use hapax::{Guard, backend::memory::MemoryLedger, guard::ProcessingResult};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// # let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
    /// let mut runs = 0;
    /// let result = guard
    ///     .process_with_retry("order-17-paid", 3, Duration::from_millis(1), || {
    ///         runs += 1;
    ///         let answer = if runs < 3 { Err("busy line") } else { Ok(()) };
    ///         async move { answer }
    ///     })
    ///     .await?;
    /// assert_eq!((result, runs), (ProcessingResult::Success, 3));
    /// # Ok(()) }
    /// ```
    pub async fn process_with_retry<Fut, E>(
        &self,
        event: impl Deliverable,
        max_retries: u32,
        backoff: Duration,
        mut work: impl FnMut() -> Fut,
    ) -> Result<ProcessingResult>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        let backoff_max = self.settings().backoff_max;
        let work = |_| async move {
            let mut retries = 0;
            let mut longest = backoff.min(backoff_max);
            loop {
                match work().await {
                    Err(_) if retries < max_retries => {}
                    ended => return ended,
                }
                retries += 1;
                tokio::time::sleep(longest * u32::from(jitter_permille()) / 1000).await;
                longest = longest.saturating_mul(2).min(backoff_max);
            }
        };
        Ok(self.core.process(event.delivery()?, None, work).await?.result)
    }

    /// Like [`process_if_new`](Guard::process_if_new), but sends a dead event to `dead_letters`:
    /// [`DeadLettered`](ProcessingResult::DeadLettered) may be acknowledged. The event is marked
    /// dead first and sent second. If sending fails, the result is
    /// [`Dead`](ProcessingResult::Dead): the event stays dead and listed, and the next delivery
    /// sends it again.
    ///
    /// ```
    /// # use hapax::error::Source;
    /// # use hapax::guard::{DeadLetter, DeadLetters, ProcessingResult};
    /// # use hapax::{Guard, backend::memory::MemoryLedger};
    /// # struct Log;
    /// # #[async_trait::async_trait]
    /// # impl DeadLetters for Log {
    /// #     async fn send(&self, letter: &DeadLetter) -> Result<(), Source> { Ok(()) }
    /// # }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("billing").attempts_max(1).build()?;
    /// let result = guard.process_with_dlq("order-17-paid", || async { Err("no such account") }, &Log).await?;
    /// assert_eq!(result, ProcessingResult::DeadLettered);
    /// # Ok(()) }
    /// ```
    pub async fn process_with_dlq<Fut, E>(
        &self,
        event: impl Deliverable,
        work: impl FnOnce() -> Fut,
        dead_letters: &dyn DeadLetters,
    ) -> Result<ProcessingResult>
    where
        Fut: Future<Output = Result<(), E>>,
        E: fmt::Display,
    {
        let delivery = event.delivery()?;
        let processed = self.core.process(delivery.clone(), None, |_| work()).await?;
        match processed.dead {
            Some((reason, attempts)) => {
                self.core.send_dead_letter(delivery, reason, attempts, dead_letters).await
            }
            None => Ok(processed.result),
        }
    }
}
