//! The history of an event over HTTP: what `hapax explain` gathers, as far as the caller may see it.

use axum::extract::State;
use axum::http::StatusCode;
use hapax::keyed::IdempotencyKey;
use hapax::problem::Problem;
use hapax::{Aggregate, Error, EventId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Operator};
use super::extract::{Json, Params, internal};
use super::groups::{scopes_of, tenant_of};
use crate::explain::gather;
use crate::explain::stores::{Open, Stores, Visibility};
use crate::failure::Failure;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(explain))
}

/// What to explain: one of `id`, `key` and `aggregate`.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ExplainParams {
    /// An event.
    #[param(min_length = 1, max_length = 255)]
    id: Option<String>,
    /// The key of a write.
    #[param(min_length = 1, max_length = 255)]
    key: Option<String>,
    /// An aggregate.
    #[param(min_length = 1, max_length = 255)]
    aggregate: Option<String>,
    /// Whose data, for those who see all tenants; unset: the caller's.
    #[param(min_length = 1, max_length = 255)]
    tenant: Option<String>,
}

/// The history of an event, of a keyed write or of an aggregate.
#[derive(Debug, Serialize, ToSchema)]
pub struct ExplainAnswer {
    /// What it is about: `event`, `key` or `aggregate`, with its name.
    #[schema(value_type = Object)]
    of: Value,
    /// Whose data.
    tenant: Option<String>,
    /// When the stores were asked.
    asked_at: String,
    /// What happened and how it stands, in order: `at`, `layer`, `name` (the scope or the relay), `event`,
    /// `seq`, `what` and `facts`.
    #[schema(value_type = Vec<Object>)]
    steps: Value,
    /// How each scope stands with the aggregate.
    #[schema(value_type = Vec<Object>)]
    scopes: Value,
    /// What stores said besides: `store`, `message` and whether it was `unreachable`.
    #[schema(value_type = Vec<Object>)]
    stores: Value,
    /// What is not recorded, in a sentence.
    not_recorded: String,
}

/// The whole history of an event, of a keyed write or of an aggregate, for operators
///
/// What `hapax explain` shows: key, journal, relay, every scope that the caller may see, record and read model.
/// Payloads and the values of headers are never part of it.
#[utoipa::path(
    get, path = "/v1/explain", tag = "letters", params(ExplainParams),
    responses(
        (status = 200, description = "Its history", body = ExplainAnswer),
        (status = 404, description = "No store knows it: `not-found`"),
    )
)]
async fn explain(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<ExplainParams>,
) -> Result<Json<ExplainAnswer>, Problem> {
    let tenant = tenant_of(&caller, params.tenant.as_deref())?;
    let mut stores = Stores::of_server(&app.global, &app.config, open(&app).await, visibility_of(&caller));
    let tenant = tenant.as_ref();
    let explanation = match (&params.id, &params.key, &params.aggregate) {
        (Some(id), None, None) => gather::event(&mut stores, tenant, &EventId::new(id)?).await,
        (None, Some(key), None) => gather::key(&mut stores, tenant, &IdempotencyKey::new(key)?).await,
        (None, None, Some(of)) => gather::aggregate(&mut stores, tenant, &Aggregate::new(of)?).await,
        _ => return Err(Error::invalid("query", "send one of id, key and aggregate").into()),
    };
    let mut explanation =
        serde_json::to_value(explanation.map_err(|failure| problem(&failure))?).map_err(|_| internal())?;
    let text = |value: &Value| value.as_str().map(str::to_owned);
    Ok(Json(ExplainAnswer {
        tenant: text(&explanation["tenant"]),
        asked_at: text(&explanation["asked_at"]).unwrap_or_default(),
        not_recorded: text(&explanation["not_recorded"]).unwrap_or_default(),
        of: explanation["of"].take(),
        steps: explanation["steps"].take(),
        scopes: explanation["scopes"].take(),
        stores: explanation["stores"].take(),
    }))
}

/// What a caller may see of what the stores have.
pub fn visibility_of(caller: &Caller) -> Visibility {
    Visibility { scopes: scopes_of(caller), is_bound: caller.needs_all_tenants().is_err() }
}

async fn open(app: &App) -> Open {
    let records = match app.records.ready().await {
        Ok(()) => app.records.shared(),
        Err(_) => None, // it says so where it is used
    };
    Open {
        ledger: app.ledger.clone(),
        journal: app.journal.clone(),
        keys: app.kept_keys.clone(),
        records,
        read_model: app.reads.clone(),
    }
}

fn problem(failure: &Failure) -> Problem {
    match failure.code() {
        "not-found" => Problem::new(StatusCode::NOT_FOUND, "not-found", "Not found", failure.message()),
        "invalid" => {
            Problem::new(StatusCode::BAD_REQUEST, "invalid", "The input is invalid", failure.message())
        }
        _ if failure.is_dependency() => {
            let message = "a store did not answer, and no other has it; the server's log says which";
            Problem::new(
                StatusCode::SERVICE_UNAVAILABLE,
                "unavailable",
                "A database is unavailable or busy",
                message,
            )
            .retry()
        }
        _ => {
            tracing::error!(target: "hapax", error = failure.message(), "an event could not be explained");
            internal()
        }
    }
}
