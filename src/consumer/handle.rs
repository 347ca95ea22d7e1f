//! Handlers, and the guarantees they are wrapped in: the type says what is promised.

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
    /// Which event of a batch it was, if that is known.
    at: Option<usize>,
}

impl Failed {
    /// It may succeed next time.
    pub fn retryable(error: impl Into<Source>) -> Self {
        Failed { error: error.into(), fatal: false, uncounted: false, after: None, at: None }
    }

    /// It was not tried, because the same event is being applied already: again after a pause, and no attempt is used up. (Run at
    /// most once it is lost like any other failure.)
    pub fn in_progress(error: impl Into<Source>, after: Duration) -> Self {
        Failed::uncounted(error, after)
    }

    /// It did not fail by itself (what it ran in was brought down by another): again after a pause, and no attempt is used up. (Run
    /// at most once it is lost like any other failure.)
    pub fn uncounted(error: impl Into<Source>, after: Duration) -> Self {
        Failed { uncounted: true, ..Failed::retry_after(error, after) }
    }

    /// It may succeed next time, but not before this pause.
    pub fn retry_after(error: impl Into<Source>, after: Duration) -> Self {
        Failed { after: Some(after), ..Failed::retryable(error) }
    }

    /// No run will succeed: straight to the dead letters.
    pub fn fatal(error: impl Into<Source>) -> Self {
        Failed { fatal: true, ..Failed::retryable(error) }
    }

    /// Whether no run will succeed.
    pub fn is_fatal(&self) -> bool {
        self.fatal
    }

    /// Whether it uses up an attempt.
    pub fn is_counted(&self) -> bool {
        !self.uncounted
    }

    pub(crate) fn at(self, at: usize) -> Self {
        Failed { at: Some(at), ..self }
    }

    pub(crate) fn place(&self) -> Option<usize> {
        self.at
    }

    /// The error and what caused it.
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

/// Says of an error, where it happens, whether running again can help.
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
    /// No run will succeed.
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

/// What a handler answers.
pub type Handled = Result<(), Failed>;

/// Lets fewer handlers run at once than events are claimed at once, where what runs them can take only so many.
///
/// A run waits here *before* its time limit begins: time in a queue is never charged to the event. A leased run waits under
/// its lease, which is extended meanwhile; one that runs at most once waits before it is claimed.
#[async_trait]
pub trait Permits: Send + Sync + 'static {
    /// Waits until one more handler may run. `leased` is what the run is leased as; none if it is run at most once. The
    /// permit is dropped when the handler has ended. None: no more handlers will run, and the event is given back
    /// uncounted.
    async fn permit(&self, leased: Option<&Identity>) -> Option<Permit>;
}

/// Kept for as long as a handler runs.
pub type Permit = Box<dyn Any + Send>;

/// Runs a handler for at most `limit`; a panic is a failure like another.
pub(crate) async fn within(limit: Duration, work: impl Future<Output = Handled> + Send) -> Handled {
    use std::panic::AssertUnwindSafe;
    match tokio::time::timeout(limit, catch(AssertUnwindSafe(work))).await {
        Ok(Ok(handled)) => handled,
        Ok(Err(panic)) => Err(Failed::retryable(format!("the handler panicked: {panic}"))),
        Err(_) => {
            Err(Failed::retryable(format!("the handler did not end within {}", crate::words::span(limit))))
        }
    }
}

/// The future's value, or what it panicked with.
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
