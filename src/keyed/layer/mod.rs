//! `Idempotency-Key` for the routes of an axum service.

mod disposition;
mod flight;
mod given_up;
mod handle;
mod heartbeat;
mod problem;
mod service;
mod tx;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use axum::http::header::{AUTHORIZATION, COOKIE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, StatusCode};
use axum::response::Response;
use sha2::{Digest as _, Sha256};
use tokio::sync::Semaphore;
use tower_layer::Layer;

pub use disposition::NotKept;
pub use service::KeyedService;
#[cfg(feature = "sqlite")]
pub use tx::KeyedSqlite;
#[cfg(feature = "postgres")]
pub use tx::KeyedTx;
pub use tx::TransactionalKeys;

use flight::Flights;
use given_up::GivenUp;

use super::{AfterFailure, Keys, LEASE_MAX, LEASE_MIN, RETENTION};
use crate::id::{Scope, Tenant};
use crate::ledger::SkipLog;

/// Nobody waits for a running request for longer.
const WAIT_MAX: Duration = Duration::from_hours(24);

/// The caller of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Caller {
    /// Whose keys and data.
    pub tenant: Option<Tenant>,
    /// The caller's name, which does not change between retries. A key that another principal has
    /// used is refused, and its answer is not shown.
    pub principal: Option<String>,
}

/// The headers that identify the caller by default.
const CREDENTIALS: [HeaderName; 3] = [AUTHORIZATION, COOKIE, HeaderName::from_static("x-api-key")];

/// A caller is whoever sends the same credentials: all values of all of these headers, byte for
/// byte. They are hashed, so that they are not stored.
fn by_credentials(headers: &HeaderMap) -> Option<String> {
    let mut hash = Sha256::new();
    let mut any = false;
    for (n, name) in (0_u8..).zip(&CREDENTIALS) {
        for value in headers.get_all(name) {
            any = true;
            hash.update([n]);
            hash.update((value.len() as u64).to_be_bytes());
            hash.update(value.as_bytes());
        }
    }
    let mut half = [0; 16];
    half.copy_from_slice(&hash.finalize()[..16]);
    any.then(|| format!("credentials {:032x}", u128::from_be_bytes(half)))
}

type CallerOf = dyn Fn(&Parts) -> Result<Caller, Response> + Send + Sync;

/// The settings of a layer.
#[derive(Clone)]
struct Settings {
    required: bool,
    wait: Duration,
    lease: Duration,
    timeout: Duration,
    store_timeout: Duration,
    after_failure: AfterFailure,
    replay_status: Option<StatusCode>,
    canonical_json: bool,
    fingerprint_headers: Arc<[HeaderName]>,
    tell_fields: bool,
    body_bytes_max: usize,
    body_timeout: Duration,
    answer_bytes_max: usize,
    retention: Duration,
    caller: Arc<CallerOf>,
    transactions: Option<Arc<dyn tx::Transactions>>,
    transactions_max: Option<Arc<Semaphore>>,
    /// Whether it was said that a handler does not take its transaction.
    warned: Arc<AtomicBool>,
    /// Where replays are counted, and as whose.
    replays: Option<(SkipLog, Scope)>,
}

impl Settings {
    /// A transaction that is rolled back leaves no trace of its key, so nothing can hold it.
    #[track_caller]
    fn check(&self) {
        assert!(
            self.transactions.is_none() || self.after_failure == AfterFailure::Rerun,
            "KeyedLayer: after_failure({:?}) and transactional() contradict each other. A request that fails in a \
             transaction leaves nothing behind, neither its work nor its key, and its retry runs; so nothing can be held. \
             Leave out one of them",
            self.after_failure
        );
    }
}

/// A tower layer that makes retries harmless: the first request with an `Idempotency-Key` runs, every
/// later one gets its answer.
///
/// Put it *inside* the layers that authenticate and authorise, so that unauthorised callers learn
/// nothing about a key, and *on routes* (`route_layer`), so that only handlers are behind it.
/// Requests without the header pass, unless it is [`required`](KeyedLayer::required); GET, HEAD,
/// OPTIONS and TRACE always pass.
///
/// ```
/// use axum::{Router, routing::post};
/// use hapax::keyed::{KeyedLayer, MemoryKeys};
/// # use tower::ServiceExt as _;
/// # use axum::{body::Body, http::Request};
///
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// let app: Router = Router::new()
///     .route("/orders", post(|| async { "order 17" }))
///     .route_layer(KeyedLayer::new(MemoryKeys::default()).required());
/// # let request = || Request::post("/orders").header("Idempotency-Key", "\"k\"").body(Body::empty()).unwrap();
/// # let first = app.clone().oneshot(request()).await.unwrap();
/// # assert!(!first.headers().contains_key("idempotency-replayed"));
/// # let again = app.clone().oneshot(request()).await.unwrap();
/// # assert_eq!(again.headers()["idempotency-replayed"], "true");
/// # let bare = Request::post("/orders").body(Body::empty()).unwrap();
/// # assert_eq!(app.oneshot(bare).await.unwrap().status(), 400);
/// # }
/// ```
///
/// By default a request runs under a *lease*: its effect is elsewhere, and
/// [`after_failure`](KeyedLayer::after_failure) says what happens if its process dies. Where the
/// effect is in the database of the keys, make the layer
/// [`transactional`](KeyedLayer::transactional): the handler takes its transaction (`KeyedTx`, or
/// `KeyedSqlite`), and its writes, the key and the answer commit together before the answer is
/// sent.
///
/// ```no_run
/// use axum::{Router, http::StatusCode, routing::post};
/// use hapax::keyed::{KeyedLayer, KeyedTx};
/// use hapax::backend::postgres::{PgKeys, PgKeysSettings};
///
/// async fn order(mut tx: KeyedTx) -> Result<(StatusCode, &'static str), StatusCode> {
///     sqlx::query("insert into orders values (17)").execute(&mut **tx).await
///         .map_err(|_| StatusCode::INTERNAL_SERVER_ERROR)?;
///     Ok((StatusCode::CREATED, "order 17"))
/// }
///
/// # async fn serve(url: &str) -> hapax::Result<Router> {
/// let keys = PgKeys::connect(url, PgKeysSettings::default()).await?;
/// let app = Router::new().route("/orders", post(order)).route_layer(KeyedLayer::new(keys).transactional());
/// # Ok(app) }
/// ```
///
/// Answers of 2xx and 3xx are kept, and so are definite refusals: 4xx except those about who sends
/// the request or when (401, 403, 407, 409, 412, 421, 425, 428, 429) and about how it was sent
/// (406, 411, 413, 414, 415, 417, 426, 431). Those mean that nothing was done, and the next request
/// with the key runs. The same holds for an answer with [`NotKept`], and for a router's own 404 and
/// 405. After 408 and 5xx the next request runs again, or is held. Handlers are asked for answers
/// without Content-Encoding; put compression outside of this layer. Errors of the layer are RFC
/// 9457 problems with a stable `code`.
#[derive(Clone)]
pub struct KeyedLayer<K> {
    keys: K,
    settings: Settings,
    /// Shared by all services of the layer: axum makes one for each connection.
    flights: Flights,
    given_up: GivenUp,
}

impl<K: fmt::Debug> fmt::Debug for KeyedLayer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedLayer").field("keys", &self.keys).finish_non_exhaustive()
    }
}

impl<K: Keys + Clone> KeyedLayer<K> {
    /// A layer with these defaults: the key is optional, a running request is answered with 409, runs
    /// are leased for 30 seconds at a time and may take a minute, failed ones run again, bodies and
    /// answers may have 1 MiB, and the caller is whoever sends the same `Authorization`, `Cookie` and
    /// `X-Api-Key` headers. A service that knows its callers by anything else (a client certificate, a
    /// header of its own) must say so: [`caller`](KeyedLayer::caller).
    #[allow(clippy::result_large_err)] // axum rejects with responses
    pub fn new(keys: K) -> Self {
        let caller = |parts: &Parts| Ok(Caller { tenant: None, principal: by_credentials(&parts.headers) });
        let settings = Settings {
            required: false,
            wait: Duration::ZERO,
            lease: Duration::from_secs(30),
            timeout: Duration::from_secs(60),
            store_timeout: Duration::from_secs(15),
            after_failure: AfterFailure::Rerun,
            replay_status: None,
            canonical_json: false,
            fingerprint_headers: Arc::new([]),
            tell_fields: false,
            body_bytes_max: 1 << 20,
            body_timeout: Duration::from_secs(30),
            answer_bytes_max: 1 << 20,
            retention: RETENTION,
            caller: Arc::new(caller),
            transactions: None,
            transactions_max: None,
            warned: Arc::default(),
            replays: None,
        };
        KeyedLayer { keys, settings, flights: Flights::default(), given_up: GivenUp::default() }
    }

    /// Counts requests that were answered with the first answer, if that was a success: without the layer
    /// they would have taken effect again. They are counted in the background, as effects of this scope
    /// that were not done twice ([`Layer::Keys`](crate::ledger::Layer::Keys)).
    #[must_use]
    pub fn count_replays(mut self, log: SkipLog, scope: Scope) -> Self {
        self.settings.replays = Some((log, scope));
        self
    }

    /// Refuses requests without a key: 400 `key-missing`.
    #[must_use]
    pub fn required(mut self) -> Self {
        self.settings.required = true;
        self
    }

    /// Identifies the caller. It may refuse a request with an answer of its own. Use it where tokens or cookies
    /// change between retries, where callers are known by anything else, or where there are tenants.
    #[must_use]
    pub fn caller(
        mut self,
        caller: impl Fn(&Parts) -> Result<Caller, Response> + Send + Sync + 'static,
    ) -> Self {
        self.settings.caller = Arc::new(caller);
        self
    }

    /// All requests come from the same caller: anyone with the key gets its answer. For services without callers;
    /// nothing but the key protects an answer then.
    #[must_use]
    #[allow(clippy::result_large_err)] // axum rejects with responses
    pub fn anonymous(self) -> Self {
        self.caller(|_| Ok(Caller::default()))
    }

    /// Headers that are part of the request: the same key with another value of one of these is another
    /// request (422). Name those that decide what is written, such as `If-Match`.
    #[must_use]
    pub fn fingerprint_headers(mut self, names: impl IntoIterator<Item = HeaderName>) -> Self {
        self.settings.fingerprint_headers = names.into_iter().collect();
        self
    }

    /// How long a request waits for one with the same key that runs, before it is answered with 409.
    /// A request that waits holds no connection. More than a day counts as a day.
    #[must_use]
    pub fn wait(mut self, at_most: Duration) -> Self {
        self.settings.wait = at_most.min(WAIT_MAX);
        self
    }

    /// Sets what happens to a leased request that failed or never ended.
    ///
    /// # Panics
    ///
    /// If the layer is [`transactional`](KeyedLayer::transactional) and the rule holds requests: a
    /// transaction that fails leaves nothing that could be held.
    #[must_use]
    #[track_caller]
    pub fn after_failure(mut self, rule: AfterFailure) -> Self {
        self.settings.after_failure = rule;
        self.settings.check();
        self
    }

    /// How long a lease lasts without being extended: after a crash, retries are answered with 409 for
    /// so long. The layer extends the lease until the handler has ended and its answer is stored; if it
    /// cannot, it stops the handler a third of this time before the lease ends. 1 millisecond to 24 hours;
    /// less or more counts as these.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.settings.lease = lease.clamp(LEASE_MIN, LEASE_MAX);
        self
    }

    /// How long a handler may take. Then it is stopped where it next waits, and its client gets 504; its
    /// key is free once it has ended. A transaction is ended by the server after this time; on SQLite,
    /// where it holds the file's only writer, after 5 seconds at most. 1 millisecond to 24 hours; less or
    /// more counts as these.
    #[must_use]
    pub fn timeout(mut self, at_most: Duration) -> Self {
        self.settings.timeout = at_most.clamp(LEASE_MIN, LEASE_MAX);
        self
    }

    /// How long an answer of the store is waited for. Then a request that begins gets 503, a COMMIT is
    /// in doubt and resolved by asking again, and the connection is not used any more.
    #[must_use]
    pub fn store_timeout(mut self, at_most: Duration) -> Self {
        self.settings.store_timeout = at_most;
        self
    }

    /// Limits how many requests have a transaction at once, by the permits of a semaphore that several
    /// layers may share. Give it fewer permits than the pool has connections, so that reads get one
    /// too. A request waits for a permit without a connection, and one that waits for another request
    /// with its key holds no permit.
    #[must_use]
    pub fn transactions_max(mut self, permits: Arc<Semaphore>) -> Self {
        self.settings.transactions_max = Some(permits);
        self
    }

    /// The status of a replayed success, if it is not that of the original: 200 for a resource that
    /// was created (201) before, for one.
    #[must_use]
    pub fn replay_status(mut self, status: StatusCode) -> Self {
        self.settings.replay_status = Some(status);
        self
    }

    /// Compares JSON bodies in canonical form: white space and the order of keys do not matter.
    #[must_use]
    pub fn canonical_json(mut self) -> Self {
        self.settings.canonical_json = true;
        self
    }

    /// Tells a client that reuses its own key which fields differ. It is always logged.
    #[must_use]
    pub fn tell_fields(mut self) -> Self {
        self.settings.tell_fields = true;
        self
    }

    /// The largest bodies of requests and answers, in bytes.
    #[must_use]
    pub fn bytes_max(mut self, request: usize, answer: usize) -> Self {
        self.settings.body_bytes_max = request;
        self.settings.answer_bytes_max = answer.min(super::ANSWER_BYTES_MAX);
        self
    }

    /// How long the body of a request may take to arrive: then it is answered with 400 `body-unreadable`,
    /// and nothing was done. More than a day counts as a day.
    #[must_use]
    pub fn body_timeout(mut self, at_most: Duration) -> Self {
        self.settings.body_timeout = at_most.min(WAIT_MAX);
        self
    }

    /// How long answers are kept, as announced to clients in the header `Idempotency-Key-Retention` (in
    /// seconds). Give the sweeper the same.
    #[must_use]
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }
}

impl<K: TransactionalKeys + Clone> KeyedLayer<K> {
    /// Runs each request in a transaction of the keys' database. A handler that fails, or answers 4xx,
    /// has its writes undone. In PostgreSQL `hapax.tenant` is the caller's tenant there, if it has one.
    ///
    /// The handler must take the transaction (`KeyedTx`, `KeyedSqlite`). If it does not, its
    /// effects are elsewhere, and a retry after a failure repeats them; the log says once that a
    /// handler did not take the transaction.
    ///
    /// # Panics
    ///
    /// If [`after_failure`](KeyedLayer::after_failure) is to hold requests: a transaction that fails leaves
    /// nothing that could be held.
    #[must_use]
    #[track_caller]
    pub fn transactional(mut self) -> Self {
        self.settings.transactions = Some(self.keys.transactions());
        self.settings.check();
        self
    }
}

impl<S, K: Keys + Clone> Layer<S> for KeyedLayer<K> {
    type Service = KeyedService<S>;

    fn layer(&self, inner: S) -> KeyedService<S> {
        KeyedService::new(
            inner,
            Arc::new(self.keys.clone()),
            self.settings.clone(),
            self.flights.clone(),
            self.given_up.clone(),
        )
    }
}
