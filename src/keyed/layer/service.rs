//! The order of checks, and who runs.

use std::convert::Infallible;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::OriginalUri;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, Request};
use axum::response::{IntoResponse as _, Response};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, timeout, timeout_at};
use tower_service::Service;
use tracing::Instrument as _;

use super::Settings;
use super::disposition::{Routed, is_too_large};
use super::flight::{Entered, Flights, Leader};
use super::given_up::{GivenUp, release_key};
use super::handle::{InTransaction, Leased};
use super::problem::{Problem, RETENTION, replayed};
use crate::error::{Error, Result as StoreResult};
use crate::keyed::{Answer, Begin, Begun, IdempotencyKey, Keys, RequestFingerprint, RequestParts};
use crate::ledger::Layer as Effects;

/// The pause before a running request of another process is looked at again. It doubles.
const PAUSE_MIN: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Nobody waits for a request of this process for longer, whatever the settings are.
const PATIENCE_MAX: Duration = Duration::from_hours(1);
/// How often a store that gives no answer is asked to begin a request.
const ATTEMPTS_MAX: u32 = 3;

/// The service that [`KeyedLayer`](super::KeyedLayer) makes.
#[derive(Clone)]
pub struct KeyedService<S> {
    inner: S,
    layer: Arc<Shared>,
}

/// What all requests of a layer share.
pub(super) struct Shared {
    pub(super) keys: Arc<dyn Keys>,
    pub(super) settings: Settings,
    flights: Flights,
    pub(super) given_up: GivenUp,
}

impl Shared {
    /// Bounds a call to the store: one that hangs must not hold the request, and with it its key in
    /// this process, for ever.
    pub(super) async fn bounded<T>(
        &self,
        what: &str,
        call: impl Future<Output = StoreResult<T>>,
    ) -> StoreResult<T> {
        let late = |late| Error::unavailable(what.to_owned(), late);
        timeout(self.settings.store_timeout, call).await.map_err(late)?
    }

    /// Waits until another transaction may begin. `None` where there is no limit.
    async fn permit(&self) -> StoreResult<Option<OwnedSemaphorePermit>> {
        let Some(permits) = &self.settings.transactions_max else { return Ok(None) };
        let what = "waiting for a transaction of another request to end";
        match timeout(self.settings.timeout, Arc::clone(permits).acquire_owned()).await {
            Ok(permit) => permit.map(Some).map_err(|closed| Error::unavailable(what, closed)),
            Err(late) => Err(Error::unavailable(what, late)),
        }
    }

    /// Begins a leased request. A call without an answer may have been granted the key: it is repeated
    /// under its nonce, and gets what it was granted.
    async fn begin(&self, begin: &Begin) -> StoreResult<Begun> {
        let mut attempts = 1;
        loop {
            match timeout(self.settings.store_timeout, self.keys.begin(begin)).await {
                Ok(outcome) => return outcome,
                Err(late) if attempts == ATTEMPTS_MAX => {
                    return Err(Error::unavailable("beginning a request", late));
                }
                Err(_) => attempts += 1,
            }
        }
    }

    /// How long requests wait for one of this process, before they ask the store themselves.
    fn patience(&self) -> Duration {
        self.settings.timeout.saturating_add(self.settings.store_timeout).min(PATIENCE_MAX)
    }
}

impl<S> KeyedService<S> {
    pub(super) fn new(
        inner: S,
        keys: Arc<dyn Keys>,
        settings: Settings,
        flights: Flights,
        given_up: GivenUp,
    ) -> Self {
        KeyedService { inner, layer: Arc::new(Shared { keys, settings, flights, given_up }) }
    }
}

impl<S> fmt::Debug for KeyedService<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedService").finish_non_exhaustive()
    }
}

impl<S> Service<Request<Body>> for KeyedService<S>
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // The service that was polled ready is the one to be called.
        let clone = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, clone);
        let layer = Arc::clone(&self.layer);
        Box::pin(async move {
            let safe = [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(request.method());
            let keyed = request.headers().contains_key("idempotency-key");
            if safe || !(keyed || layer.settings.required) {
                return inner.call(request).await;
            }
            let retention = layer.settings.retention.as_secs();
            let mut response = match prepare(&layer, request).await {
                // In a task of its own: a client that hangs up cancels nothing.
                Ok((parts, body, begin)) => {
                    let task = run(layer, inner, parts, body, begin).in_current_span();
                    tokio::spawn(task).await.unwrap_or_else(|_| Problem::failed().into_response())
                }
                Err(response) => response,
            };
            response.headers_mut().insert(RETENTION, HeaderValue::from(retention));
            Ok(response)
        })
    }
}

/// Checks a request in order: the caller, the key's syntax, the body's size; and takes its fingerprint.
async fn prepare(layer: &Shared, request: Request<Body>) -> Result<(Parts, Bytes, Begin), Response> {
    let settings = &layer.settings;
    let (parts, body) = request.into_parts();
    let caller = (settings.caller)(&parts)?;
    let key = key_of(&parts.headers).map_err(Problem::into_response)?;
    let limit = settings.body_bytes_max;
    let body = match timeout(settings.body_timeout, to_bytes(body, limit)).await {
        Ok(Ok(body)) => body,
        Ok(Err(error)) if is_too_large(&error) => return Err(Problem::body_too_large(limit).into_response()),
        Ok(Err(_)) => return Err(Problem::unreadable().into_response()),
        Err(_) => return Err(Problem::too_slow(settings.body_timeout).into_response()),
    };
    // As sent: a nested router strips its prefix.
    let uri = parts.extensions.get::<OriginalUri>().map_or(&parts.uri, |OriginalUri(uri)| uri);
    let names = settings.fingerprint_headers.iter();
    let values = names.flat_map(|name| parts.headers.get_all(name).iter().map(move |of| (name.as_str(), of)));
    let headers: Vec<_> = values.map(|(name, value)| (name, value.as_bytes())).collect();
    let request = RequestParts {
        principal: caller.principal.as_deref(),
        method: parts.method.as_str(),
        target: uri.path_and_query().map_or("/", |target| target.as_str()),
        body: &body,
        headers: &headers,
        canonical_json: settings.canonical_json,
    };
    let fingerprint = RequestFingerprint::of(layer.keys.secret(), &request);
    let mut begin = Begin::new(caller.tenant, key, fingerprint);
    begin.after_failure = settings.after_failure;
    // A transaction ends with its handler, at the latest.
    begin.lease = if settings.transactions.is_some() { settings.timeout } else { settings.lease };
    Ok((parts, body, begin))
}

fn key_of(headers: &HeaderMap) -> Result<IdempotencyKey, Problem> {
    let mut values = headers.get_all("idempotency-key").iter();
    let value = values.next().ok_or_else(Problem::missing)?;
    if values.next().is_some() {
        return Err(Problem::invalid("Idempotency-Key is invalid: the header was sent more than once"));
    }
    IdempotencyKey::from_header(value.as_bytes()).map_err(|error| Problem::invalid(error.to_string()))
}

/// Runs a request, or finds out how the one that ran has ended.
async fn run<S>(layer: Arc<Shared>, inner: S, parts: Parts, body: Bytes, begin: Begin) -> Response
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    let deadline = Instant::now() + layer.settings.wait;
    loop {
        match layer.flights.enter(&begin, layer.patience()) {
            Entered::Leader(leader) => {
                return run_first(layer, inner, parts, body, &begin, deadline, leader).await;
            }
            Entered::Follower(mut flight) => {
                let at_most = deadline.min(flight.until);
                match timeout_at(at_most, flight.answer.wait_for(Option::is_some)).await {
                    Ok(Ok(known)) => {
                        if let Some(known) = known.as_ref() {
                            return replay(&layer, &begin, &body, known);
                        }
                    }
                    Ok(Err(_)) => {} // it ended without an answer that is kept: one of us is next
                    Err(_) if Instant::now() < deadline => {} // it takes too long: the store is asked
                    Err(_) => return Problem::running().into_response(),
                }
            }
        }
    }
}

fn replay(layer: &Shared, begin: &Begin, body: &Bytes, answer: &Answer) -> Response {
    // A refusal took no effect.
    if let Some((log, scope)) =
        layer.settings.replays.as_ref().filter(|_| (200..300).contains(&answer.status))
    {
        log.prevented(Effects::Keys, (begin.tenant.clone(), scope.clone()), Some(body));
    }
    replayed(answer, layer.settings.replay_status)
}

fn mismatch(layer: &Shared, begin: &Begin, differing: Vec<String>) -> Response {
    // The names of fields are the client's: `?` escapes what would forge lines of the log.
    tracing::warn!(target: "hapax", key = %begin.key, ?differing, "a key was used again for another request");
    // Another principal learns nothing about the request that has the key.
    if differing.iter().any(|part| part == "principal") {
        return Problem::another_caller().into_response();
    }
    Problem::mismatch(differing, layer.settings.tell_fields).into_response()
}

/// Runs the first of the requests with one key in this process; the others wait for its answer.
async fn run_first<S>(
    layer: Arc<Shared>,
    inner: S,
    parts: Parts,
    body: Bytes,
    begin: &Begin,
    deadline: Instant,
    leader: Leader,
) -> Response
where
    S: Service<Request<Body>, Response = Response, Error = Infallible> + Send + 'static,
    S::Future: Send,
{
    let request = Request::from_parts(parts, Body::from(body.clone()));
    let routed = Routed::of(&request);
    let mut pause = PAUSE_MIN;
    let (outcome, asked) = loop {
        let asked = Instant::now();
        let outcome = match &layer.settings.transactions {
            None => layer.begin(begin).await,
            Some(transactions) => {
                // Dropped before a pause: who waits for another process holds none.
                let permit = match layer.permit().await {
                    Ok(permit) => permit,
                    Err(error) => return Problem::of_store(&error).into_response(),
                };
                match layer.bounded("beginning a request", transactions.open(begin)).await {
                    Ok(Ok(open)) => {
                        let running = InTransaction { layer, leader, routed, _permit: permit };
                        return running.run(inner, request, open).await;
                    }
                    Ok(Err(outcome)) => Ok(outcome),
                    Err(error) => Err(error),
                }
            }
        };
        match outcome {
            // Asked again in a while, with no connection until then.
            Ok(Begun::Running { .. }) if Instant::now() + pause < deadline => {
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
            }
            Ok(outcome) => break (outcome, asked),
            Err(error) => {
                // A transaction ends with its connection; a lease may have been granted all the same.
                if layer.settings.transactions.is_none() && error.is_retryable() {
                    release_key(&layer, begin);
                }
                return Problem::of_store(&error).into_response();
            }
        }
    };
    match outcome {
        Begun::First(lease) => Leased { layer, lease, leader, routed }.run(inner, request, asked).await,
        Begun::Running { .. } => Problem::running().into_response(),
        Begun::Done(kept) => {
            let answer = Arc::new(kept.answer);
            leader.done(Arc::clone(&answer));
            replay(&layer, begin, &body, &answer)
        }
        Begun::Mismatch { differing } => mismatch(&layer, begin, differing),
        Begun::Expired => Problem::expired().into_response(),
        Begun::Ahead { now } => Problem::ahead(now).into_response(),
        Begun::OutcomeUnknown { .. } => Problem::outcome_unknown().into_response(),
    }
}

#[cfg(test)]
mod tests {
    use tower_layer::Layer as _;

    use super::*;
    use crate::keyed::{KeyedLayer, MemoryKeys};

    /// axum makes a service for each connection; a request waits for one of another connection too.
    #[test]
    fn services_of_a_layer_share_their_requests() {
        let layer = KeyedLayer::new(MemoryKeys::default());
        let (one, other) = (layer.layer(()), layer.layer(()));
        let request = RequestParts { method: "POST", target: "/", body: b"", ..Default::default() };
        let fingerprint = RequestFingerprint::of(one.layer.keys.secret(), &request);
        let begin = Begin::new(None, IdempotencyKey::now_v7(), fingerprint);
        let patience = one.layer.patience();
        let first = one.layer.flights.enter(&begin, patience);
        assert!(matches!(first, Entered::Leader(_)));
        assert!(matches!(other.layer.flights.enter(&begin, patience), Entered::Follower(_)));
    }
}
