//! The server itself: what it is, and how much it has.

use axum::extract::State;
use hapax::problem::Problem;
use hapax::{Scope, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::Shared;
use super::auth::{Operator, Reader};
use super::extract::{Json, Params};

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(info))
}

pub fn operators() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(stats))
}

/// What this server is.
#[derive(Debug, Serialize, ToSchema)]
pub struct InfoAnswer {
    /// Its version.
    version: &'static str,
    /// The backend of the ledger.
    ledger: &'static str,
    /// The backend of the journal.
    journal: &'static str,
    /// The backend of the keys.
    keys: &'static str,
    /// The bus to which the relay of this server publishes; none if it has no relay.
    bus: Option<&'static str>,
    /// The topic to which it publishes.
    topic: Option<String>,
    /// How long the answer to a keyed write is kept, in seconds.
    key_retention_s: u64,
    /// How long the ledger remembers a settled event, in seconds.
    ledger_retention_s: u64,
    /// How long a lease lasts if a claim does not say, in milliseconds.
    lease_ms: u64,
    /// The largest body of a request.
    body_bytes_max: usize,
    /// How many events one request may have.
    batch_max: usize,
}

/// What this server is, and its limits
#[utoipa::path(
    get, path = "/v1/info", tag = "server",
    responses((status = 200, description = "What it is", body = InfoAnswer))
)]
async fn info(_: Reader, State(app): State<Shared>) -> Json<InfoAnswer> {
    let config = &app.config;
    Json(InfoAnswer {
        version: env!("CARGO_PKG_VERSION"),
        ledger: app.ledger.capabilities().backend,
        journal: app.journal.capabilities().backend,
        keys: app.keys.capabilities().backend,
        bus: app.bus.as_ref().map(|bus| bus.capabilities().bus),
        topic: app.bus.as_ref().map(|_| config.relay.topic.to_string()),
        key_retention_s: config.keys.retention.as_secs(),
        ledger_retention_s: config.ledger.retention.as_secs(),
        lease_ms: u64::try_from(config.lease.timeout.as_millis()).unwrap_or(u64::MAX),
        body_bytes_max: config.serve.body_bytes_max,
        batch_max: config.serve.batch_max,
    })
}

/// Whose numbers.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct StatsParams {
    /// Those of all tenants.
    #[serde(default)]
    all_tenants: bool,
}

/// How many entries of a scope are in a state.
#[derive(Debug, Serialize, ToSchema)]
pub struct CountAnswer {
    /// Whose data.
    tenant: Option<String>,
    /// Whose effect.
    scope: String,
    /// The state.
    state: &'static str,
    /// How many.
    count: u64,
}

/// The journal's numbers.
#[derive(Debug, Serialize, ToSchema)]
pub struct JournalStats {
    /// How many events it has.
    events: u64,
    /// How many aggregates.
    aggregates: u64,
    /// Whether these numbers are exact.
    exact: bool,
    /// The position of the newest event.
    last: Option<String>,
}

impl JournalStats {
    pub fn of(stat: &hapax::journal::JournalStat) -> Self {
        JournalStats {
            events: stat.events,
            aggregates: stat.aggregates,
            exact: stat.exact,
            last: stat.last.as_ref().map(ToString::to_string),
        }
    }
}

/// The numbers of the relay in this process.
#[derive(Debug, Serialize, ToSchema)]
pub struct RelayStats {
    /// Whether it leads; if not, another process publishes.
    leads: bool,
    /// How many records the bus has acknowledged since the start.
    published: u64,
    /// Up to where it has published.
    position: String,
    /// Aggregates of which something could not be published yet.
    behind: usize,
    /// Those of them that wait for an operator.
    parked: usize,
    /// The age of the oldest event that is not published, in seconds.
    lag_s: f64,
}

impl RelayStats {
    pub fn of(progress: &hapax::relay::Progress) -> Self {
        RelayStats {
            leads: progress.leads,
            published: progress.published,
            position: progress.position.to_string(),
            behind: progress.behind,
            parked: progress.parked,
            lag_s: progress.lag.as_secs_f64(),
        }
    }
}

/// How much there is.
#[derive(Debug, Serialize, ToSchema)]
pub struct StatsAnswer {
    /// The ledger's clock.
    now: String,
    /// Entries by scope and state.
    ledger: Vec<CountAnswer>,
    /// Events that the ledger holds with their bytes.
    held: u64,
    /// The journal, of all tenants: only for a caller without a tenant and for all scopes.
    journal: Option<JournalStats>,
    /// The relay, if it runs here, of all tenants: only for such a caller.
    relay: Option<RelayStats>,
}

/// How much there is, for operators
#[utoipa::path(
    get, path = "/v1/stats", tag = "server", params(StatsParams),
    responses((status = 200, description = "The numbers", body = StatsAnswer))
)]
async fn stats(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<StatsParams>,
) -> Result<Json<StatsAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    // The journal counts all tenants' events together.
    let whole = params.all_tenants || caller.is_unbound();
    let journal = async { if whole { app.journal.stat().await.map(Some) } else { Ok(None) } };
    let (ledger, journal) = tokio::try_join!(app.ledger.stat(), journal)?;
    let is_seen = |tenant: Option<&Tenant>, scope: &Scope| {
        caller.sees(scope) && (params.all_tenants || caller.owns(tenant))
    };
    let seen = ledger.counts.into_iter().filter(|(tenant, scope, ..)| is_seen(tenant.as_ref(), scope));
    let held = ledger.held_by.iter().filter(|(tenant, scope, _)| is_seen(tenant.as_ref(), scope));
    Ok(Json(StatsAnswer {
        now: ledger.now.to_string(),
        ledger: seen
            .map(|(tenant, scope, state, count)| CountAnswer {
                tenant: tenant.map(|tenant| tenant.to_string()),
                scope: scope.to_string(),
                state: state.name(),
                count,
            })
            .collect(),
        held: held.map(|(.., count)| count).sum(),
        journal: journal.as_ref().map(JournalStats::of),
        relay: app.relay.progress().filter(|_| whole).as_ref().map(RelayStats::of),
    }))
}
