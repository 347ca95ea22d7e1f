//! Runs the handler of the first request, and keeps its answer.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Request, StatusCode, response};
use axum::response::{IntoResponse as _, Response};
use tokio::time::Instant;
use tower_service::Service;
use tracing::Instrument as _;

use super::flight::Leader;
use super::problem::Problem;
use super::service::Shared;
use super::tx::{OpenRequest, Slot};
use crate::error::Error;
use crate::keyed::{Answer, Ended, KeyLease};

/// How often storing an answer is tried.
const TRIES_MAX: u32 = 5;

/// What a handler answered.
enum Handled {
    Answered(response::Parts, Bytes),
    /// More than can be kept, or a stream.
    TooLarge,
    Panicked,
    TooSlow,
    /// Its lease was lost while it ran.
    Lost,
}

/// What becomes of an answer.
enum Fate {
    Kept,
    /// Nothing happened, and the same request may succeed later.
    Undone,
    Failed,
}

fn fate(status: StatusCode) -> Fate {
    match status.as_u16() {
        401 | 403 | 408 | 409 | 412 | 425 | 428 | 429 => Fate::Undone,
        200..=499 => Fate::Kept,
        _ => Fate::Failed,
    }
}

/// Calls the handler and collects its answer.
async fn call<S>(mut inner: S, request: Request<Body>, bytes_max: usize) -> Handled
where
    S: Service<Request<Body>, Response = Response, Error = Infallible>,
{
    let Ok(response) = inner.call(request).await;
    let (parts, body) = response.into_parts();
    let stream =
        parts.headers.get(CONTENT_TYPE).is_some_and(|of| of.as_bytes().starts_with(b"text/event-stream"));
    if stream {
        return Handled::TooLarge;
    }
    match to_bytes(body, bytes_max).await {
        Ok(bytes) => Handled::Answered(parts, bytes),
        Err(_) => Handled::TooLarge,
    }
}

/// Runs the handler in a task of its own, so that a panic ends only the task, for as long as `lost`
/// does not end.
async fn watched<S>(
    layer: &Shared,
    inner: S,
    request: Request<Body>,
    lost: impl Future<Output = ()>,
) -> Handled
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    let task = call(inner, request, layer.settings.answer_bytes_max).in_current_span();
    let mut task = tokio::spawn(task);
    tokio::select! {
        done = &mut task => return done.unwrap_or(Handled::Panicked),
        () = tokio::time::sleep(layer.settings.timeout) => {}
        () = lost => {
            task.abort();
            return Handled::Lost;
        }
    }
    task.abort();
    Handled::TooSlow
}

fn kept(parts: &response::Parts, body: &Bytes) -> Answer {
    let answer = Answer::new(parts.status.as_u16(), body.clone());
    parts.headers.iter().fold(answer, |answer, (name, value)| answer.header(name.as_str(), value.as_bytes()))
}

fn sent(parts: response::Parts, body: Bytes) -> Response {
    Response::from_parts(parts, Body::from(body))
}

/// Runs a request under a lease.
pub(super) async fn leased<S>(
    layer: &Shared,
    inner: S,
    mut request: Request<Body>,
    lease: &KeyLease,
    leader: &Leader,
) -> Response
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    request.extensions_mut().insert(lease.clone());
    let handled = watched(layer, inner, request, heartbeat(layer, lease)).await;
    crate::crash_point!("keyed.handled");
    match handled {
        Handled::Answered(parts, body) => {
            let ended = match fate(parts.status) {
                Fate::Kept => {
                    let answer = kept(&parts, &body);
                    return match finish(layer, lease, answer, leader).await {
                        Ok(()) => sent(parts, body),
                        Err(problem) => problem.into_response(),
                    };
                }
                Fate::Undone => Ended::Undone,
                Fate::Failed => Ended::Failed,
            };
            release(layer, lease, ended).await;
            sent(parts, body)
        }
        // It was done, and must not be run again only because of its answer.
        Handled::TooLarge => {
            let problem = Problem::answer_too_large(layer.settings.answer_bytes_max, true);
            match finish(layer, lease, problem.answer(), leader).await {
                Ok(()) => problem.into_response(),
                Err(problem) => problem.into_response(),
            }
        }
        Handled::Panicked => {
            release(layer, lease, Ended::Failed).await;
            Problem::failed().into_response()
        }
        Handled::TooSlow => {
            release(layer, lease, Ended::Failed).await;
            Problem::timeout().into_response()
        }
        Handled::Lost => Problem::running().into_response(),
    }
}

/// Extends the lease for as long as it can; ends when it is lost, or may be.
async fn heartbeat(layer: &Shared, lease: &KeyLease) {
    let whole = layer.settings.lease;
    let mut until = Instant::now() + whole;
    loop {
        tokio::time::sleep(whole / 3).await;
        let asked = Instant::now();
        match layer.keys.extend(lease, whole).await {
            Ok(()) => until = asked + whole,
            Err(Error::Fenced { .. }) => return,
            // Stopped before another one may begin.
            Err(_) if Instant::now() + whole / 3 >= until => return,
            Err(_) => {}
        }
    }
}

/// Stores an answer. The error is what to answer instead.
async fn finish(layer: &Shared, lease: &KeyLease, answer: Answer, leader: &Leader) -> Result<(), Problem> {
    let mut tries = 1;
    loop {
        match layer.keys.finish(lease, &answer).await {
            Ok(()) => {
                crate::crash_point!("keyed.finished");
                leader.done(Arc::new(answer));
                return Ok(());
            }
            // Another run has the key: what that one answers is the answer.
            Err(Error::Fenced { .. }) => return Err(Problem::running()),
            Err(error) if error.is_retryable() && tries < TRIES_MAX => {
                tokio::time::sleep(Duration::from_millis(50) * tries).await;
                tries += 1;
            }
            // The request was done, so the client is told; a failure here is not the handler's.
            Err(error) => {
                tracing::error!(target: "hapax", key = %lease.key, error = %error.chain(), "the answer of a request could not be kept; a retry follows `after_failure`");
                return Ok(());
            }
        }
    }
}

async fn release(layer: &Shared, lease: &KeyLease, ended: Ended) {
    if let Err(error) = layer.keys.release(lease, ended).await {
        tracing::warn!(target: "hapax", key = %lease.key, error = %error.chain(), "a key could not be released; its lease will lapse");
    }
}

/// Runs a request in its transaction.
pub(super) async fn in_transaction<S>(
    layer: &Shared,
    inner: S,
    mut request: Request<Body>,
    open: Box<dyn OpenRequest>,
    leader: &Leader,
) -> Response
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    request.extensions_mut().insert(open.lease().clone());
    let slot = Slot::new(open);
    request.extensions_mut().insert(slot.clone());
    let handled = watched(layer, inner, request, std::future::pending()).await;
    let Some((open, undo)) = slot.close() else {
        return match handled {
            Handled::TooSlow => Problem::timeout().into_response(), // the handler's task is being ended
            _ => Problem::in_use().into_response(),
        };
    };
    let problem = match handled {
        Handled::Answered(parts, body) => {
            if !matches!(fate(parts.status), Fate::Kept) {
                roll_back(open).await;
                return sent(parts, body);
            }
            let answer = kept(&parts, &body);
            return match open.commit(&answer, undo || parts.status.is_client_error()).await {
                Ok(true) => {
                    leader.done(Arc::new(answer));
                    sent(parts, body)
                }
                Ok(false) => Problem::not_committed().into_response(),
                Err(error) => Problem::of(&error).into_response(),
            };
        }
        Handled::TooLarge => Problem::answer_too_large(layer.settings.answer_bytes_max, false),
        Handled::TooSlow => Problem::timeout(),
        Handled::Panicked | Handled::Lost => Problem::failed(),
    };
    roll_back(open).await;
    problem.into_response()
}

async fn roll_back(open: Box<dyn OpenRequest>) {
    if let Err(error) = open.roll_back().await {
        tracing::warn!(target: "hapax", error = %error.chain(), "the transaction of a request could not be rolled back; the server will");
    }
}
