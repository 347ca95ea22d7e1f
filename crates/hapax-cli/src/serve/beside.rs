//! The server beside another command: the page on the files of a demo, with buttons that only a demo has.
//!
//! It publishes nothing, sweeps nothing and feeds no read model: the demo's own processes do that. Its
//! routes are those of `hapax serve`, and two more. `hapax serve` has neither of them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Extension;
use axum::http::StatusCode;
use axum::routing::{get, post};
use hapax::Topic;
use hapax::bus::Bus;
use hapax::problem::Problem;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use utoipa::ToSchema;

use super::app::{App, Shared, With};
use super::auth::Operator;
use super::extract::Json;
use super::{listen, routes};
use crate::cli::Global;
use crate::failure::Failure;

/// How long a button may take.
const ANSWERS: Duration = Duration::from_secs(25);
/// How long requests may go on when the demo ends.
const ENDS: Duration = Duration::from_secs(2);

/// The bus that others publish to, and the topics whose lag is shown.
#[derive(Clone)]
pub struct Watched {
    pub bus: Arc<dyn Bus>,
    pub topics: Vec<Topic>,
}

/// What a visitor can do to a demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Chaos {
    /// Kills a process, as `kill -9` does.
    Kill,
    /// Freezes a worker for longer than its lease.
    Freeze,
    /// Cuts everybody off from the ledger's database.
    Cut,
    /// Delivers many events once more, and once more.
    Storm,
}

/// Something that a visitor asks for, and where to say what was done; an error says why nothing was.
pub type Asked = (Chaos, oneshot::Sender<Result<String, String>>);

/// What the routes need of a demo.
#[derive(Clone)]
pub struct Demo {
    pub asks: mpsc::Sender<Asked>,
    /// How far it is.
    pub look: Arc<dyn Fn() -> Value + Send + Sync>,
}

#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Body {
    what: Chaos,
}

async fn look(Operator(_): Operator, Extension(demo): Extension<Demo>) -> Json<Value> {
    Json((demo.look)())
}

async fn chaos(
    Operator(_): Operator,
    Extension(demo): Extension<Demo>,
    Json(body): Json<Body>,
) -> Result<Json<Value>, Problem> {
    let nothing = |detail: String| Problem::new(StatusCode::CONFLICT, "conflict", "Nothing was done", detail);
    let (sender, answer) = oneshot::channel();
    demo.asks
        .try_send((body.what, sender))
        .map_err(|_| nothing("the demo is over, or has much to do".to_owned()))?;
    match tokio::time::timeout(ANSWERS, answer).await {
        Ok(Ok(Ok(said))) => Ok(Json(json!({"said": said}))),
        Ok(Ok(Err(reason))) => Err(nothing(reason)),
        Ok(Err(_)) => Err(nothing("the demo is over".to_owned())),
        Err(_) => Err(nothing("the demo did not answer in time; what was asked may still happen".to_owned())),
    }
}

fn more_routes(demo: Demo) -> Router<Shared> {
    Router::new().route("/v1/demo", get(look)).route("/v1/demo/chaos", post(chaos)).layer(Extension(demo))
}

/// A server that runs beside a demo.
pub struct Beside {
    pub address: SocketAddr,
    stop: watch::Sender<bool>,
    servers: JoinSet<()>,
    app: Shared,
}

impl Beside {
    /// Starts it. `global` names the demo's stores.
    pub async fn start(global: &Global, watched: Watched, demo: Demo) -> Result<Self, Failure> {
        let config = global.load()?;
        let listener = listen::bind(config.serve.listen, "--port").await?;
        let address = listen::address(&listener)?;
        let (stop, stopping) = watch::channel(false);
        let with = With { relay: false, sweepers: false, analytics: false };
        let (app, _) = App::open(global, config, None, stopping.clone(), with, Some(watched)).await?;
        let router = routes::beside(&app, more_routes(demo));
        let mut servers = JoinSet::new();
        servers.spawn(listen::serve(listener, router, listen::Limits::of(&app.config.serve), stopping));
        Ok(Beside { address, stop, servers, app })
    }

    /// Stops it. Requests that take longer are cut off.
    pub async fn end(mut self) {
        self.stop.send_replace(true);
        let _ = tokio::time::timeout(ENDS, async { while self.servers.join_next().await.is_some() {} }).await;
        self.servers.abort_all();
        super::close(self.app).await;
    }
}
