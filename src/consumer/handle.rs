//! Results of handlers, and limits on running them.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use async_trait::async_trait;

use crate::error::Source;
use crate::ledger::Identity;

/// Why a handler failed, and whether running it again can help.
#[derive(Debug)]
pub struct Failed {
    error: Source,
    fatal: bool,
    uncounted: bool,
    after: Option<Duration>,
    /// Which event of a batch failed, if known.
    at: Option<usize>,
}

impl Failed {
    /// A failure that may succeed next time.
    pub fn retryable(error: impl Into<Source>) -> Self {
        Failed { error: error.into(), fatal: false, uncounted: false, after: None, at: None }
    }

    /// The event was not tried, because it is being applied already. Retries after a pause without
    /// counting an attempt. (At most once, it is lost like any other failure.)
    pub fn in_progress(error: impl Into<Source>, after: Duration) -> Self {
        Failed::uncounted(error, after)
    }

    /// The failure is not the event's own (another brought down the process it ran in). Retries
    /// after a pause without counting an attempt. (At most once, it is lost like any other
    /// failure.)
    pub fn uncounted(error: impl Into<Source>, after: Duration) -> Self {
        Failed { uncounted: true, ..Failed::retry_after(error, after) }
    }

    /// A failure that may succeed next time, but not before this pause.
    pub fn retry_after(error: impl Into<Source>, after: Duration) -> Self {
        Failed { after: Some(after), ..Failed::retryable(error) }
    }

    /// A failure that no attempt can avoid. The event goes straight to the dead letters.
    pub fn fatal(error: impl Into<Source>) -> Self {
        Failed { fatal: true, ..Failed::retryable(error) }
    }

    /// Whether no attempt can succeed.
    pub fn is_fatal(&self) -> bool {
        self.fatal
    }

    /// Whether it counts as an attempt.
    pub fn is_counted(&self) -> bool {
        !self.uncounted
    }

    /// The same failure of another event of the batch, with the error's text.
    pub(crate) fn repeated(&self) -> Self {
        let Failed { fatal, uncounted, after, .. } = *self;
        Failed { error: self.to_string().into(), fatal, uncounted, after, at: None }
    }

    pub(crate) fn at(self, at: usize) -> Self {
        Failed { at: Some(at), ..self }
    }

    pub(crate) fn place(&self) -> Option<usize> {
        self.at
    }

    /// The error and its causes.
    pub(crate) fn causes(&self) -> impl Iterator<Item = &(dyn std::error::Error + 'static)> {
        std::iter::successors(Some(&*self.error as &(dyn std::error::Error + 'static)), |error| {
            error.source()
        })
    }

    /// The pause the handler asked for.
    pub fn after(&self) -> Option<Duration> {
        self.after
    }
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&crate::error::chain(&*self.error))
    }
}

/// `?` on any error makes a retryable failure.
impl<E: std::error::Error + Send + Sync + 'static> From<E> for Failed {
    fn from(error: E) -> Self {
        Failed::retryable(error)
    }
}

/// Marks an error, where it happens, as retryable or fatal.
///
/// ```
/// use hapax::consumer::{Failed, FailedExt};
/// fn parse(text: &str) -> Result<u64, Failed> {
///     text.parse().fatal() // no retry makes it a number
/// }
/// assert!(parse("x").unwrap_err().is_fatal());
/// ```
pub trait FailedExt<T> {
    /// It may succeed next time.
    fn retryable(self) -> Result<T, Failed>;
    /// No attempt can succeed.
    fn fatal(self) -> Result<T, Failed>;
}

impl<T, E: Into<Source>> FailedExt<T> for Result<T, E> {
    fn retryable(self) -> Result<T, Failed> {
        self.map_err(Failed::retryable)
    }
    fn fatal(self) -> Result<T, Failed> {
        self.map_err(Failed::fatal)
    }
}

/// The result of a handler.
pub type Handled = Result<(), Failed>;

/// The result of a handler of leased batches: an outcome for each event, in order. An error is the
/// failure of every event of the batch.
pub type BatchHandled = Result<Vec<Handled>, Failed>;

/// Limits how many handlers run at once below how many events are claimed at once, for runners with
/// limited capacity.
///
/// A run waits here *before* its time limit starts: time in a queue is never charged to the event.
/// A leased run waits under its lease, which is extended meanwhile. An at-most-once run waits
/// before its claim.
#[async_trait]
pub trait Permits: Send + Sync + 'static {
    /// Waits until one more handler may run. `leased` is the identity of a leased run, or `None` if
    /// it runs at most once. The permit is dropped when the handler has ended. Returns `None` if no
    /// more handlers will run; the event is then released without counting an attempt.
    async fn permit(&self, leased: Option<&Identity>) -> Option<Permit>;
}

/// Kept for as long as a handler runs.
pub type Permit = Box<dyn Any + Send>;

/// Runs a handler for at most `limit`. A panic is a retryable failure.
pub(crate) async fn within(limit: Duration, work: impl Future<Output = Handled> + Send) -> Handled {
    ended_within(limit, work).await.flatten()
}

/// What a handler returned within `limit`; an error if it returned nothing.
pub(crate) async fn ended_within<T>(
    limit: Duration,
    work: impl Future<Output = T> + Send,
) -> Result<T, Failed> {
    use std::panic::AssertUnwindSafe;
    match tokio::time::timeout(limit, catch(AssertUnwindSafe(work))).await {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(panic)) => Err(Failed::retryable(format!("the handler panicked: {panic}"))),
        Err(_) => {
            Err(Failed::retryable(format!("the handler did not end within {}", crate::words::span(limit))))
        }
    }
}

/// The future's value, or its panic message.
async fn catch<F: Future>(work: std::panic::AssertUnwindSafe<F>) -> Result<F::Output, String> {
    let mut work = Box::pin(work.0);
    std::future::poll_fn(move |context| {
        let polled = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| work.as_mut().poll(context)));
        match polled {
            Ok(std::task::Poll::Pending) => std::task::Poll::Pending,
            Ok(std::task::Poll::Ready(value)) => std::task::Poll::Ready(Ok(value)),
            Err(panic) => {
                let text = panic
                    .downcast_ref::<&str>()
                    .map(|text| (*text).to_owned())
                    .or_else(|| panic.downcast_ref::<String>().cloned());
                std::task::Poll::Ready(Err(text.unwrap_or_else(|| "no message".to_owned())))
            }
        }
    })
    .await
}
