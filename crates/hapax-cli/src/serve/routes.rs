//! All routes.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::http::StatusCode;
use axum::http::{Method, Uri};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use hapax::problem::Problem;
use tokio::sync::Semaphore;
use utoipa::OpenApi as _;
use utoipa_axum::router::OpenApiRouter;

use super::app::Shared;
use super::auth::{self, Listener};
use super::front::{self, Front};
use super::hosts::Hosts;
use super::openapi::{self, Api};
use super::{
    analytics, checks, claims, explain, groups, health, journal, keys, letters, overview, page, records,
    retention, session, settle, stats, tokens, waiting,
};

/// The routes for everybody.
fn of_callers(app: &Shared) -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .merge(claims::routes())
        .merge(settle::routes())
        .merge(journal::routes())
        .merge(keys::routes())
        .merge(stats::routes())
        .merge(records::routes(app))
        .merge(analytics::routes())
}

/// The routes for operators and collectors.
fn of_operators() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .merge(keys::operators())
        .merge(letters::routes())
        .merge(groups::routes())
        .merge(waiting::routes())
        .merge(explain::routes())
        .merge(overview::routes())
        .merge(retention::routes())
        .merge(checks::routes())
        .merge(session::routes())
        .merge(stats::operators())
        .merge(analytics::operators())
        .merge(tokens::routes())
        .merge(health::metrics_routes())
}

/// The routers of both listeners. If operators have a listener of their own, their routes are only
/// there.
pub fn build(app: &Shared, apart: bool) -> (Router, Router) {
    let all = || OpenApiRouter::with_openapi(Api::openapi()).merge(health::probes());
    let main =
        if apart { all().merge(of_callers(app)) } else { all().merge(of_callers(app)).merge(of_operators()) };
    let serve = &app.config.serve;
    let admin = serve.admin_listen.unwrap_or(serve.listen);
    let [work, admin_work] = app.work.clone();
    let operators = all().merge(of_operators());
    // The page asks what operators ask, so it is where their routes are.
    let pages = |here: bool| if here { page::routes() } else { Router::new() };
    (
        finished(app, main, pages(!apart), serve.listen, work),
        finished(app, operators, pages(true), admin, admin_work),
    )
}

/// The router of the server beside a demo, with the demo's own routes.
pub fn beside(app: &Shared, more: Router<Shared>) -> Router {
    let described = OpenApiRouter::with_openapi(Api::openapi()).merge(health::probes());
    let described = described.merge(of_callers(app)).merge(of_operators());
    let [work, _] = app.work.clone();
    finished(app, described, page::routes().merge(more), app.config.serve.listen, work)
}

fn finished(
    app: &Shared,
    described: OpenApiRouter<Shared>,
    pages: Router<Shared>,
    address: SocketAddr,
    work: Arc<Semaphore>,
) -> Router {
    let (router, api) = described.split_for_parts();
    let document: Arc<str> = openapi::document(&api).to_string().into();
    let describe = get(move || async move {
        let json = [(axum::http::header::CONTENT_TYPE, "application/json")];
        (json, document.to_string()).into_response()
    });
    let front = Front { app: Arc::clone(app), hosts: Arc::new(Hosts::of(&app.config.serve)), work };
    let listener = Listener { app: Arc::clone(app), loopback: address.ip().is_loopback() };
    router
        .merge(pages)
        .route("/openapi.json", describe)
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .layer(from_fn_with_state(Arc::clone(app), front::arrived))
        .layer(from_fn_with_state(listener, auth::authorise))
        .layer(from_fn_with_state(front, front::front))
        .with_state(Arc::clone(app))
}

async fn unknown(method: Method, uri: Uri) -> Response {
    let message = format!("no route for {method} {}; GET /openapi.json lists all routes", uri.path());
    Problem::new(StatusCode::NOT_FOUND, "route-unknown", "No such route", message).into_response()
}

async fn not_allowed(method: Method, uri: Uri) -> Response {
    let message = format!("{} has no {method}; the header Allow says what it has", uri.path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", "The method is not allowed", message)
        .into_response()
}
