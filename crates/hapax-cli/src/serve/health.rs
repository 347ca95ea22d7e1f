//! Probes and metrics.

use std::future::Future;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CONTENT_TYPE, HeaderValue};
use axum::response::{IntoResponse, Response};
use hapax::problem::Problem;
use serde::Serialize;
use serde_json::{Map, Value};
use tokio::sync::Mutex;
use tokio::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::Reader;
use super::background::RelayState;
use super::extract::Json;
use super::feeding::FeedState;

/// How long a dependency may take to answer a probe.
const PROBE: Duration = Duration::from_secs(2);
/// How long its answer is remembered.
const REMEMBERED: Duration = Duration::from_secs(1);

/// The paths of probes, which are answered by any name and under any load.
pub const PROBES: [&str; 2] = ["/healthz", "/readyz"];

/// Probes are open to everybody.
pub fn probes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(healthz)).routes(routes!(readyz))
}

pub fn metrics_routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(metrics))
}

/// The process runs.
#[derive(Debug, Serialize, ToSchema)]
pub struct Healthy {
    /// Always `ok`.
    #[schema(example = "ok")]
    status: &'static str,
}

/// Whether the process runs
///
/// Asks nobody: a server whose database is away is alive, but not ready.
#[utoipa::path(get, path = "/healthz", tag = "probes", responses((status = 200, description = "It runs", body = Healthy)))]
async fn healthz() -> Json<Healthy> {
    Json(Healthy { status: "ok" })
}

/// Every dependency answers.
#[derive(Debug, Serialize, ToSchema)]
pub struct Ready {
    /// Always true.
    ready: bool,
    /// Each dependency: `ok`. The relay `leads` or `follows`; the feed of the read model (`analytics`) `follows`,
    /// or is `starting`.
    #[schema(value_type = Object, example = json!({"ledger": "ok", "journal": "ok", "keys": "ok", "bus": "ok", "relay": "leads", "analytics": "follows"}))]
    checks: Value,
}

/// How the dependencies answered lately. Probes are open to everybody, so they are not passed on one by
/// one.
#[derive(Debug, Default)]
pub struct Readiness(Mutex<Option<(Instant, Answers)>>);

/// Each dependency with its answer in a word.
type Answers = [(&'static str, Option<&'static str>); 4];

impl Readiness {
    async fn answers(&self, app: &App) -> Answers {
        // Others wait for the answer to the first.
        let mut last = self.0.lock().await;
        if let Some((at, answers)) = *last
            && at.elapsed() < REMEMBERED
        {
            return answers;
        }
        let bus = async {
            match &app.bus {
                Some(bus) => Some(probe("bus", bus.probe(&app.config.relay.topic)).await),
                None => None,
            }
        };
        let (ledger, journal, keys, bus) = tokio::join!(
            probe("ledger", app.ledger.probe()),
            probe("journal", app.journal.probe()),
            probe("keys", app.keys.probe()),
            bus
        );
        let answers =
            [("ledger", Some(ledger)), ("journal", Some(journal)), ("keys", Some(keys)), ("bus", bus)];
        *last = Some((Instant::now(), answers));
        answers
    }
}

/// Whether every dependency answers
///
/// Each has two seconds; the answers are remembered for one. Ledger, journal, keys and an embedded bus
/// answer once they could write. What does not answer is named.
#[utoipa::path(
    get, path = "/readyz", tag = "probes",
    responses(
        (status = 200, description = "Every dependency answers", body = Ready),
        (status = 503, description = "A dependency does not: `checks` says which", body = super::openapi::ProblemBody, content_type = "application/problem+json"),
    )
)]
async fn readyz(State(app): State<Shared>) -> Response {
    let answers = app.readiness.answers(&app).await;
    let (relay, feed) = (app.bus.as_ref().map(|_| app.relay.state()), app.feed.state());
    let stopping = app.leaving.load(Ordering::Acquire);
    let dependencies =
        answers.into_iter().map(|(name, answer)| (name, answer, answer.is_none_or(|word| word == "ok")));
    let all = dependencies.chain([
        ("relay", relay.map(RelayState::word), relay.is_none_or(RelayState::is_ready)),
        ("analytics", feed.map(FeedState::word), feed.is_none_or(FeedState::is_ready)),
        ("server", stopping.then_some("stopping"), !stopping),
    ]);
    let (mut checks, mut down) = (Map::new(), Vec::new());
    for (name, word, fine) in all {
        if let Some(word) = word {
            checks.insert(name.to_owned(), word.into());
        }
        if !fine {
            down.push(name);
        }
    }
    if down.is_empty() {
        return Json(Ready { ready: true, checks: checks.into() }).into_response();
    }
    let message = format!("not ready: {}; the server's log says why", down.join(", "));
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "not-ready", "The server is not ready", message)
        .member("checks", checks)
        .retry()
        .into_response()
}

/// How a dependency answers, in a word. What it said is for the log.
async fn probe(of: &'static str, asked: impl Future<Output = hapax::Result<()>>) -> &'static str {
    match tokio::time::timeout(PROBE, asked).await {
        Ok(Ok(())) => "ok",
        Ok(Err(error)) => {
            tracing::warn!(target: "hapax", of, error = %error.chain(), "a probe failed");
            error.code()
        }
        Err(_) => {
            tracing::warn!(target: "hapax", of, "a probe got no answer in time");
            "timeout"
        }
    }
}

/// Metrics in the text format of Prometheus
///
/// They name the scopes of all tenants, so they need a token without a tenant and for all scopes.
#[utoipa::path(
    get, path = "/metrics", tag = "probes",
    responses((status = 200, description = "All metrics", body = String, content_type = "text/plain"))
)]
async fn metrics(Reader(caller): Reader, State(app): State<Shared>) -> Response {
    if let Err(problem) = caller.needs_whole_server() {
        return problem.into_response();
    }
    let mut response = app.metrics.render().into_response();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
