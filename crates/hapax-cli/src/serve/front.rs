//! What every request goes through: a name and a span, the host, a time limit, a counter.
//!
//! A request runs in a task of its own. One that only reads ends with its connection; one that may write
//! goes on when its client hangs up, and keeps a permit until it ends, so that the number of those is
//! bounded too. Whether a request that takes too long has begun is decided once ([`Beginning`]): either
//! its route runs, or its client learns that nothing was done.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::header::{CONNECTION, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hapax::problem::Problem;
use hapax::{EventId, TraceContext};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tracing::{Instrument as _, Span};

use super::app::Shared;
use super::extract::{internal, read};
use super::health::PROBES;
use super::hosts::{Hosts, LocalAddress};
use super::listen::overloaded;
use super::tally::Tally;

/// The name of a request: the client's, or a new one. It is in the answer and in the log.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// What the front needs.
#[derive(Clone)]
pub struct Front {
    pub app: Shared,
    pub hosts: Arc<Hosts>,
    /// A permit for each request that runs, whether or not its client still waits.
    pub work: Arc<Semaphore>,
}

pub async fn front(State(front): State<Front>, request: Request, next: Next) -> Response {
    let id = request_id(request.headers());
    let method = request.method().clone();
    let route = request.extensions().get::<MatchedPath>().map_or("unknown", MatchedPath::as_str).to_owned();
    // The client's trace goes on here, if it sent one.
    let trace =
        request.headers().get("traceparent").and_then(|value| TraceContext::parse(value.as_bytes()).ok());
    let span = tracing::info_span!(
        target: "hapax", "http.request", otel.kind = "server", trace.parent = trace.map(tracing::field::display),
        request.id = id.to_str().unwrap_or_default(), http.method = %method, http.route = route,
        http.status = tracing::field::Empty,
    );
    let tally = Tally::new(&front.app, method, route, span.clone());
    let mut response = match admitted(&front, request) {
        Ok(admitted) => limited(&front.app, admitted, next, Arc::clone(&tally), span).await,
        Err(response) => {
            tally.answered(response.status().as_u16());
            response
        }
    };
    response.headers_mut().insert(REQUEST_ID, id);
    response
}

/// A request that may run.
struct Admitted {
    request: Request,
    /// None for probes, which are answered also when there is too much to do.
    permit: Option<tokio::sync::OwnedSemaphorePermit>,
}

#[allow(clippy::result_large_err, reason = "the error is the answer")]
fn admitted(front: &Front, request: Request) -> Result<Admitted, Response> {
    let serve = &front.app.config.serve;
    head_fits(&request, serve.header_bytes_max, serve.headers_max).map_err(Problem::into_response)?;
    if PROBES.contains(&request.uri().path()) {
        // Whoever probes calls by an address that nobody configured.
        return Ok(Admitted { request, permit: None });
    }
    let local = request.extensions().get::<LocalAddress>().copied();
    let (method, uri, headers): (&Method, &Uri, _) = (request.method(), request.uri(), request.headers());
    front.hosts.check(local, method, uri, headers).map_err(Problem::into_response)?;
    match Arc::clone(&front.work).try_acquire_owned() {
        Ok(permit) => Ok(Admitted { request, permit: Some(permit) }),
        Err(_) => Err(overloaded(
            "the server runs as many requests as it has connections (serve.connections_max), some for clients that have \
             hung up",
        )),
    }
}

/// Refuses a head beyond the limits.
fn head_fits(request: &Request, bytes_max: usize, headers_max: usize) -> Result<(), Problem> {
    let headers = request.headers();
    let bytes = head_bytes(request.method(), request.uri(), headers);
    let message = if bytes > bytes_max {
        format!(
            "the head of the request has {bytes} bytes; the limit is {bytes_max} (serve.header_bytes_max)"
        )
    } else if headers.len() > headers_max {
        format!("the request has {} headers; the limit is {headers_max} (serve.headers_max)", headers.len())
    } else {
        return Ok(());
    };
    Err(Problem::new(
        StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
        "head-too-large",
        "The head is too large",
        format!("{message}; nothing was done"),
    ))
}

/// How long a head is as it is sent: the request line, a line for each header, and an empty one.
fn head_bytes(method: &Method, uri: &Uri, headers: &HeaderMap) -> usize {
    let target = uri.path_and_query().map_or(1, |target| target.as_str().len());
    let host = uri.authority().map_or(0, |host| "http://".len() + host.as_str().len());
    let line = method.as_str().len() + "  HTTP/1.1\r\n".len() + host + target;
    let header =
        |(name, value): (&HeaderName, &HeaderValue)| name.as_str().len() + value.len() + ": \r\n".len();
    line + headers.iter().map(header).sum::<usize>() + "\r\n".len()
}

/// Runs a request in a task of its own, and answers when its time is over.
async fn limited(app: &Shared, admitted: Admitted, next: Next, tally: Arc<Tally>, span: Span) -> Response {
    let Admitted { mut request, permit } = admitted;
    let beginning = Beginning::default();
    request.extensions_mut().insert(beginning.clone());
    let reads = request.method().is_safe();
    let counted = Arc::clone(&tally);
    let run = async move {
        let _permit = permit;
        let response = next.run(request).await;
        counted.answered(response.status().as_u16());
        response
    };
    let mut task = Task { handle: tokio::spawn(run.instrument(span)), reads, tally };
    let limit = app.config.serve.request_timeout;
    let response = match tokio::time::timeout(limit, &mut task.handle).await {
        Ok(Ok(response)) => return response,
        Ok(Err(error)) => {
            tracing::error!(target: "hapax", %error, "a request ended without an answer");
            internal().into_response()
        }
        Err(_) if beginning.call_off() => {
            task.handle.abort();
            too_slow(limit)
        }
        Err(_) => took_too_long(limit, reads), // a task that only reads is ended with this function
    };
    task.tally.answered(response.status().as_u16());
    response
}

/// The task of a request, as its connection sees it.
struct Task {
    handle: JoinHandle<Response>,
    /// Whether nobody misses it when its client has gone.
    reads: bool,
    tally: Arc<Tally>,
}

impl Drop for Task {
    fn drop(&mut self) {
        if self.handle.is_finished() {
            return;
        }
        if self.reads {
            self.handle.abort();
        }
        self.tally.left();
    }
}

fn too_slow(limit: Duration) -> Response {
    let message = format!(
        "within {} ms (serve.request_timeout_ms) the request had not arrived in full, or it was not known who calls; \
         nothing was done",
        limit.as_millis()
    );
    let problem =
        Problem::new(StatusCode::REQUEST_TIMEOUT, "request-timeout", "The request was too slow", message);
    let mut response = problem.into_response();
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}

fn took_too_long(limit: Duration, reads: bool) -> Response {
    let rest = if reads {
        "and was stopped; it changes nothing"
    } else {
        "and what it does goes on; send the same request again to learn what became of it"
    };
    let message =
        format!("the request took longer than {} ms (serve.request_timeout_ms), {rest}", limit.as_millis());
    Problem::new(StatusCode::GATEWAY_TIMEOUT, "handler-timeout", "The request took too long", message)
        .into_response()
}

/// Whether the route of a request has begun. The route and the time limit ask once each, and only one of
/// them is told yes.
#[derive(Debug, Clone, Default)]
struct Beginning(Arc<AtomicU8>);

impl Beginning {
    const OPEN: u8 = 0;
    const BEGUN: u8 = 1;
    const CALLED_OFF: u8 = 2;

    fn decide(&self, what: u8) -> bool {
        self.0.compare_exchange(Self::OPEN, what, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// Whether the route may run.
    fn begin(&self) -> bool {
        self.decide(Self::BEGUN)
    }

    /// Whether the route can never run any more.
    fn call_off(&self) -> bool {
        self.decide(Self::CALLED_OFF)
    }
}

/// Lets the route run once the request is here in full, also where the route does not look at its body.
/// It comes after `authorise`: nobody's body is read before it is known who they are.
pub async fn arrived(State(app): State<Shared>, request: Request, next: Next) -> Response {
    if request.extensions().get::<MatchedPath>().is_none() {
        return next.run(request).await; // the answer is that there is no such route
    }
    let beginning = request.extensions().get::<Beginning>().cloned();
    let (parts, body) = request.into_parts();
    let body = match read(body, app.config.serve.body_bytes_max).await {
        Ok(bytes) => Body::from(bytes),
        Err(problem) => return problem.into_response(),
    };
    if beginning.is_some_and(|beginning| !beginning.begin()) {
        return too_slow(app.config.serve.request_timeout); // as its client was told
    }
    next.run(Request::from_parts(parts, body)).await
}

fn request_id(headers: &HeaderMap) -> HeaderValue {
    let given = headers
        .get(REQUEST_ID)
        .filter(|id| (1..=128).contains(&id.len()) && id.as_bytes().iter().all(u8::is_ascii_graphic));
    given.cloned().unwrap_or_else(|| {
        HeaderValue::from_str(&EventId::now_v7().to_string()).unwrap_or(HeaderValue::from_static("unnamed"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_head_is_counted_as_it_is_sent() {
        let sent = "POST /v1/claims?a=b HTTP/1.1\r\nhost: h\r\nx-a: 12\r\nx-a: 3\r\n\r\n";
        let request =
            Request::post("/v1/claims?a=b").header("host", "h").header("x-a", "12").header("x-a", "3");
        let request = request.body(Body::empty()).unwrap();
        assert_eq!(head_bytes(request.method(), request.uri(), request.headers()), sent.len());
        assert!(head_fits(&request, sent.len(), 3).is_ok());
        let refused =
            |bytes, headers| head_fits(&request, bytes, headers).unwrap_err().into_response().status();
        assert_eq!((refused(sent.len() - 1, 3).as_u16(), refused(sent.len(), 2).as_u16()), (431, 431));
    }

    #[test]
    fn t232_a_route_begins_or_is_called_off_and_never_both() {
        let beginning = Beginning::default();
        assert!(beginning.begin() && !beginning.call_off());
        let beginning = Beginning::default();
        assert!(beginning.call_off() && !beginning.begin());
        for _ in 0..1000 {
            let beginning = Beginning::default();
            let other = beginning.clone();
            let begun = std::thread::scope(|scope| {
                let begins = scope.spawn(move || other.begin());
                let off = beginning.call_off();
                begins.join().unwrap() != off
            });
            assert!(begun);
        }
    }
}
