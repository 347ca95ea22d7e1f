//! Runs the handler of the first request, and keeps its answer.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header::{ACCEPT_ENCODING, HeaderValue};
use axum::http::{Request, response};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tower_service::Service;
use tracing::Instrument as _;

use super::disposition::{Disposition, Handled, Routed, collect, kept};
use super::flight::Leader;
use super::heartbeat::{self, Heartbeat};
use super::problem::Problem;
use super::service::Shared;
use super::tx::{Closed, OpenRequest, Slot};
use crate::error::{Error, Result};
use crate::keyed::{Answer, Ended, KeyLease};

/// How often to report the end of a run to the store.
const ATTEMPTS_MAX: u32 = 5;
/// How long a client waits for the end of a handler that was stopped. The handler is waited for
/// without it as long as that takes.
const END_WAIT: Duration = Duration::from_secs(1);

/// Starts the handler in a task of its own, so that a panic ends only the task.
fn start<S>(layer: &Shared, mut inner: S, mut request: Request<Body>) -> JoinHandle<Handled>
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    // The answer is kept for clients that may not decode what this one does. A layer outside of this
    // one may encode it for each of them.
    request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    let bytes_max = layer.settings.answer_bytes_max;
    let task = async move {
        let Ok(response) = inner.call(request).await;
        collect(response, bytes_max).await
    };
    tokio::spawn(task.in_current_span())
}

/// Waits for the end of something that goes on without its client after a while. `instead` is the
/// answer then.
async fn ended_soon(end: impl Future<Output = Response> + Send + 'static, instead: Problem) -> Response {
    match timeout(END_WAIT, tokio::spawn(end.in_current_span())).await {
        Ok(response) => response.unwrap_or_else(|_| Problem::failed().into_response()),
        Err(_) => instead.into_response(),
    }
}

fn sent(parts: response::Parts, body: Bytes) -> Response {
    Response::from_parts(parts, Body::from(body))
}

/// A request that runs under a lease.
pub(super) struct Leased {
    pub(super) layer: Arc<Shared>,
    pub(super) lease: KeyLease,
    pub(super) leader: Leader,
    pub(super) routed: Routed,
}

impl Leased {
    /// Runs the handler. The lease was asked for at `asked`. Its heartbeat goes on until the handler
    /// has ended and its answer is stored: a handler that was stopped still runs until it next waits,
    /// and nobody may run the request beside it.
    pub(super) async fn run<S>(self, inner: S, mut request: Request<Body>, asked: Instant) -> Response
    where
        S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
        S::Future: Send,
    {
        crate::crash_point!("keyed.granted");
        let mut asked = asked;
        if heartbeat::is_late(&self.layer, asked) {
            let before = asked + self.layer.settings.lease;
            let Ok(extended) = heartbeat::extend(&self.layer, &self.lease, before).await else {
                self.release(Ended::Undone).await;
                return Problem::running().into_response();
            };
            asked = extended;
        }
        request.extensions_mut().insert(self.lease.clone());
        let mut heartbeat = Heartbeat::start(&self.layer, &self.lease, asked);
        let mut task = start(&self.layer, inner, request);
        let stopped: fn() -> Problem = tokio::select! {
            handled = &mut task => {
                crate::crash_point!("keyed.handled");
                let handled = handled.unwrap_or(Handled::Ended);
                return heartbeat.during(self.settle(handled, Problem::failed())).await;
            }
            () = tokio::time::sleep(self.layer.settings.timeout) => Problem::timeout,
            () = heartbeat.lost() => Problem::running,
        };
        task.abort();
        let end = async move {
            // If it ends after all, it has an answer, and that is kept.
            let handled = heartbeat.during(task).await.unwrap_or(Handled::Ended);
            heartbeat.during(self.settle(handled, stopped())).await
        };
        ended_soon(end, stopped()).await
    }

    /// Stores the answer, or releases the key. `ended` is what to say of a handler without an answer.
    async fn settle(&self, handled: Handled, ended: Problem) -> Response {
        let limit = self.layer.settings.answer_bytes_max;
        let (ended, response) = match handled {
            Handled::Answered(parts, body) => match self.routed.disposition(&parts, &body) {
                Disposition::Kept => {
                    let answer = kept(&parts, &body);
                    if crate::crash_point::mutant!("answer before key") {
                        let (keys, lease) = (Arc::clone(&self.layer.keys), self.lease.clone());
                        tokio::spawn(async move { keys.finish(&lease, &answer).await });
                        return sent(parts, body);
                    }
                    return self
                        .finish(answer)
                        .await
                        .map_or_else(Problem::into_response, |()| sent(parts, body));
                }
                Disposition::Undone => (Ended::Undone, sent(parts, body)),
                Disposition::Failed => (Ended::Failed, sent(parts, body)),
            },
            Handled::TooLarge(disposition) => match disposition {
                // It was done, and must not be run again only because of its answer.
                Disposition::Kept => {
                    let problem = Problem::answer_too_large(limit, true);
                    return self
                        .finish(problem.answer())
                        .await
                        .map_or_else(Problem::into_response, |()| problem.into_response());
                }
                Disposition::Undone => {
                    (Ended::Undone, Problem::answer_too_large(limit, false).into_response())
                }
                Disposition::Failed => (Ended::Failed, Problem::failed().into_response()),
            },
            // Nobody knows what a body that broke off was about to say.
            Handled::Broken(disposition) => match disposition {
                Disposition::Undone => (Ended::Undone, Problem::failed().into_response()),
                Disposition::Kept | Disposition::Failed => (Ended::Failed, Problem::failed().into_response()),
            },
            Handled::Ended => (Ended::Failed, ended.into_response()),
        };
        self.release(ended).await;
        response
    }

    /// Tells the store how the run has ended. A call without an answer is repeated: under its token it
    /// ends the run once.
    async fn repeat<F: Future<Output = Result<()>>>(&self, what: &str, call: impl Fn() -> F) -> Result<()> {
        let mut attempts = 1;
        loop {
            match self.layer.bounded(what, call()).await {
                Err(error) if error.is_retryable() && attempts < ATTEMPTS_MAX => {
                    tokio::time::sleep(Duration::from_millis(50) * attempts).await;
                    attempts += 1;
                }
                ended => return ended,
            }
        }
    }

    /// Stores an answer. The error is what to answer instead.
    async fn finish(&self, answer: Answer) -> Result<(), Problem> {
        match self.repeat("storing an answer", || self.layer.keys.finish(&self.lease, &answer)).await {
            Ok(()) => {
                crate::crash_point!("keyed.finished");
                self.leader.done(Arc::new(answer));
                Ok(())
            }
            // Another run has the key: what that one answers is the answer.
            Err(Error::Fenced { .. }) => Err(Problem::running()),
            // The request was done, so the client gets its answer; a failure here is not the handler's.
            Err(error) => {
                tracing::error!(target: "hapax", key = %self.lease.key, error = %error.chain(), "the answer of a request could not be kept; a retry follows `after_failure`");
                Ok(())
            }
        }
    }

    async fn release(&self, ended: Ended) {
        match self.repeat("releasing a key", || self.layer.keys.release(&self.lease, ended)).await {
            // The lease is over already, maybe by a try whose answer was lost.
            Ok(()) | Err(Error::Fenced { .. }) => {}
            Err(error) => {
                tracing::warn!(target: "hapax", key = %self.lease.key, error = %error.chain(), "a key could not be released; its lease will expire");
            }
        }
    }
}

/// A request that runs in a transaction.
pub(super) struct InTransaction {
    pub(super) layer: Arc<Shared>,
    pub(super) leader: Leader,
    pub(super) routed: Routed,
    /// Held until the transaction has ended.
    pub(super) _permit: Option<OwnedSemaphorePermit>,
}

impl InTransaction {
    /// Runs the handler. A handler that was stopped still runs until it next waits; the transaction
    /// and with it the key are let go only after that, or by the server.
    pub(super) async fn run<S>(
        self,
        inner: S,
        mut request: Request<Body>,
        open: Box<dyn OpenRequest>,
    ) -> Response
    where
        S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
        S::Future: Send,
    {
        request.extensions_mut().insert(open.lease().clone());
        let slot = Slot::new(open);
        request.extensions_mut().insert(slot.clone());
        let mut task = start(&self.layer, inner, request);
        if let Ok(handled) = timeout(self.layer.settings.timeout, &mut task).await {
            return self.settle(handled.unwrap_or(Handled::Ended), &slot, Problem::failed()).await;
        }
        task.abort();
        let end = async move {
            let handled = task.await.unwrap_or(Handled::Ended);
            self.settle(handled, &slot, Problem::timeout()).await
        };
        ended_soon(end, Problem::timeout()).await
    }

    /// Commits the answer with the handler's work, or rolls back. `ended` is what to say of a handler
    /// without an answer.
    async fn settle(&self, handled: Handled, slot: &Slot, ended: Problem) -> Response {
        let Some(Closed { open, undo, taken }) = slot.close() else {
            return Problem::in_use().into_response();
        };
        if let Handled::Answered(parts, _) = &handled
            && parts.status.is_success()
            && !taken
            && !self.layer.settings.warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(target: "hapax", "a handler behind a transactional layer does not take its transaction: a retry after a failure repeats what it does elsewhere");
        }
        let response = match handled {
            Handled::Answered(parts, body) => {
                if self.routed.disposition(&parts, &body) == Disposition::Kept {
                    return self.commit(open, undo, parts, body).await;
                }
                sent(parts, body)
            }
            Handled::TooLarge(_) => {
                Problem::answer_too_large(self.layer.settings.answer_bytes_max, false).into_response()
            }
            Handled::Broken(_) => Problem::failed().into_response(),
            Handled::Ended => ended.into_response(),
        };
        self.roll_back(open).await;
        response
    }

    async fn commit(
        &self,
        open: Box<dyn OpenRequest>,
        undo: bool,
        parts: response::Parts,
        body: Bytes,
    ) -> Response {
        let (answer, within) = (kept(&parts, &body), self.layer.settings.store_timeout);
        match open.commit(&answer, undo || parts.status.is_client_error(), within).await {
            Ok(true) => {
                crate::crash_point!("keyed.committed");
                self.leader.done(Arc::new(answer));
                sent(parts, body)
            }
            Ok(false) => Problem::not_committed().into_response(),
            Err(error) => Problem::of_store(&error).into_response(),
        }
    }

    async fn roll_back(&self, open: Box<dyn OpenRequest>) {
        if let Err(error) = open.roll_back(self.layer.settings.store_timeout).await {
            tracing::warn!(target: "hapax", error = %error.chain(), "the transaction of a request could not be rolled back; the server will");
        }
    }
}
