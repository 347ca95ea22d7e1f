//! Connections: accepts them, bounds them, and ends them when the server stops.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, HeaderValue};
use axum::response::{IntoResponse as _, Response};
use hapax::config::ServeSection;
use hapax::problem::Problem;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::JoinSet;
use tower_service::Service as _;

use super::app::stopped;
use super::health::PROBES;
use super::hosts::{LocalAddress, PeerAddress};
use super::stream::{Activity, Stream};
use crate::failure::Failure;

/// How many connections beyond the limit get an answer at once: a probe its own, other requests that
/// there are too many. More are closed.
const RESERVE: usize = 64;
/// How long such a connection may live: the reserve is for everybody.
const RESERVE_TIME: Duration = Duration::from_secs(10);
/// The pause after a connection could not be accepted, for example because no file is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A head is read up to this many times its limits: one that is a little too large gets an answer that
/// says what the limit is, which `hyper` by itself does not give.
const READ_BEYOND: usize = 4;

/// The limits of a listener.
#[derive(Debug, Clone)]
pub struct Limits {
    connections: Arc<Semaphore>,
    reserve: Arc<Semaphore>,
    header_bytes_max: usize,
    headers_max: usize,
    /// How long a head may take to arrive, and how long a client may read nothing of its answer.
    patience: Duration,
}

impl Limits {
    /// Limits that are shared with no other listener, so that none takes another's connections.
    pub fn of(serve: &ServeSection) -> Self {
        Limits {
            connections: Arc::new(Semaphore::new(serve.connections_max)),
            reserve: Arc::new(Semaphore::new(RESERVE)),
            header_bytes_max: serve.header_bytes_max,
            headers_max: serve.headers_max,
            patience: serve.request_timeout,
        }
    }
}

pub async fn bind(address: SocketAddr, flag: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => Failure::dependency(
            "unavailable",
            format!("{flag} {address} is in use by another process; stop that one, or choose another port (0: any free one)"),
        ),
        ErrorKind::AddrNotAvailable => {
            Failure::config(format!("{flag} {address} is not an address of this machine"))
        }
        ErrorKind::PermissionDenied => {
            Failure::config(format!("{flag} {address}: this user may not listen there (ports below 1024 are for root)"))
        }
        _ => Failure::dependency("unavailable", format!("{flag} {address}: {error}")),
    })
}

pub fn address(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    listener
        .local_addr()
        .map_err(|error| Failure::dependency("unavailable", format!("the listener: {error}")))
}

/// Accepts connections until the server stops, and returns when the last one has ended.
pub async fn serve(
    listener: TcpListener,
    router: Router,
    limits: Limits,
    mut stopping: watch::Receiver<bool>,
) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            () = stopped(&mut stopping) => break,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            accepted = listener.accept() => accepted,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::warn!(target: "hapax", %error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let (permit, place) = match Arc::clone(&limits.connections).try_acquire_owned() {
            Ok(permit) => (permit, Place::Regular),
            Err(_) => match Arc::clone(&limits.reserve).try_acquire_owned() {
                Ok(permit) => (permit, Place::Reserve),
                Err(_) => continue,
            },
        };
        let (router, limits, stopping) = (router.clone(), limits.clone(), stopping.clone());
        connections.spawn(async move {
            match place {
                Place::Regular => connection(stream, router, place, &limits, stopping).await,
                Place::Reserve => {
                    let served = connection(stream, router, place, &limits, stopping);
                    let _ = tokio::time::timeout(RESERVE_TIME, served).await; // cut off if it takes longer
                }
            }
            drop(permit);
        });
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

/// Among which connections one counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Within the limit.
    Regular,
    /// Beyond it: only probes are served.
    Reserve,
}

/// Serves one connection.
async fn connection(
    stream: TcpStream,
    router: Router,
    place: Place,
    limits: &Limits,
    mut stopping: watch::Receiver<bool>,
) {
    let Ok(local) = stream.local_addr() else { return }; // it has gone
    let local = LocalAddress(local.ip().to_canonical());
    let Ok(peer) = stream.peer_addr() else { return };
    let peer = PeerAddress(peer.ip().to_canonical());
    let _ = stream.set_nodelay(true); // only slower without
    let activity = Activity::default();
    let stream = Stream::new(stream, limits.patience, activity.clone());
    let arrived = activity.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        let (mut router, under_way) = (router.clone(), arrived.begin());
        async move {
            let response = if place == Place::Regular || PROBES.contains(&request.uri().path()) {
                request.extensions_mut().insert(local);
                request.extensions_mut().insert(peer);
                router.call(request).await?
            } else {
                overloaded("connection limit reached (serve.connections_max)")
            };
            Ok::<_, Infallible>(response.map(|body| under_way.until_sent(body)))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.patience)
        .max_buf_size(limits.header_bytes_max * READ_BEYOND)
        .max_headers(limits.headers_max * READ_BEYOND)
        .keep_alive(place == Place::Regular)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stopped(&mut stopping) => {
            // The request that runs is answered, and no other is read. One whose head has not arrived
            // does not run, and is not waited for.
            connection.as_mut().graceful_shutdown();
            poll_fn(|context| match connection.as_mut().poll(context) {
                Poll::Pending if activity.is_idle() => Poll::Ready(Ok(())),
                polled => polled,
            })
            .await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(target: "hapax", %error, "a connection broke");
    }
}

/// Nothing was begun: there is too much already.
pub fn overloaded(reason: &str) -> Response {
    let message = format!("{reason}; nothing was done; try again in a second");
    let problem =
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "overloaded", "The server is overloaded", message)
            .retry();
    let mut response = problem.into_response();
    response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    response
}
