//! Idempotency keys: the state of one, and a list of all.

use axum::extract::State;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax::keyed::{Answer, IdempotencyKey, KeyEntry, KeyStatus, ListKeys};
use hapax::problem::Problem;
use hapax::{Error, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::Shared;
use super::auth::{Operator, Reader, Role};
use super::extract::{Json, Named, PAGE_MAX, Params, limit};

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(key))
}

pub fn operators() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(list))
}

/// What became of a key.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct KeyAnswer {
    /// The key.
    key: String,
    /// `running`, `done`, `outcome-unknown` (a person decides), `free` (it failed and may be sent again),
    /// `expired` (too old to know) or `unknown` (nobody used it, and no request with it runs).
    #[schema(example = "done")]
    state: &'static str,
    /// Until when the request may run, unless it runs in a transaction.
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<String>,
    /// When it began, or when it was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// The answer to the request, for who sent it and for operators.
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<StoredAnswer>,
}

/// A stored answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct StoredAnswer {
    /// Its status.
    status: u16,
    /// Its headers that are kept, as names and values.
    headers: Vec<(String, String)>,
    /// Its body, if it is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<String>,
    /// Its body in base64, if it is not text.
    #[serde(skip_serializing_if = "Option::is_none")]
    body_base64: Option<String>,
}

impl StoredAnswer {
    fn of(answer: &Answer) -> Self {
        let body = std::str::from_utf8(&answer.body).ok().map(str::to_owned);
        let text = |value: &[u8]| value.iter().map(|byte| char::from(*byte)).collect();
        StoredAnswer {
            status: answer.status,
            headers: answer.headers.iter().map(|(name, value)| (name.clone(), text(value))).collect(),
            body_base64: body.is_none().then(|| STANDARD.encode(&answer.body)),
            body,
        }
    }
}

/// What became of a write with a key
#[utoipa::path(
    get, path = "/v1/keys/{key}", tag = "keys",
    params(("key" = String, Path, description = "The key, percent-encoded", min_length = 1, max_length = 255)),
    responses((status = 200, description = "What is known", body = KeyAnswer))
)]
async fn key(
    Reader(caller): Reader,
    State(app): State<Shared>,
    Named(name): Named,
) -> Result<Json<KeyAnswer>, Problem> {
    let key = IdempotencyKey::new(&name)?;
    let status = app.keys.get(caller.tenant.as_ref(), &key).await?;
    let mut answer = KeyAnswer { key: name, state: status.word(), ..KeyAnswer::default() };
    match &status {
        KeyStatus::Running { until } => answer.until = until.map(|until| until.to_string()),
        KeyStatus::OutcomeUnknown { since } => answer.at = Some(since.to_string()),
        KeyStatus::Done(kept) => {
            answer.at = Some(kept.at.to_string());
            // A key is not secret: it is in logs, and others of the tenant may guess it.
            let may_see = kept.is_of(app.keys.secret(), Some(&caller.principal));
            let may_see = may_see || caller.needs(Role::Admin).is_ok();
            answer.answer = may_see.then(|| StoredAnswer::of(&kept.answer));
        }
        _ => {}
    }
    Ok(Json(answer))
}

/// Which keys.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct KeysParams {
    /// Only keys without an answer.
    #[serde(default)]
    open: bool,
    /// At most this many (100 unless set).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// Go on after this key.
    after: Option<String>,
    /// The tenant of that key, with `all_tenants`.
    after_tenant: Option<String>,
    /// Those of all tenants.
    #[serde(default)]
    all_tenants: bool,
}

/// A key.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeyLine {
    /// Whose key.
    tenant: Option<String>,
    /// The key.
    key: String,
    /// `running`, `outcome-unknown`, `free` or `done`.
    state: &'static str,
    /// The token of its last run.
    token: i64,
    /// When that run began.
    begun_at: String,
    /// When its answer was stored.
    settled_at: Option<String>,
    /// The status of its answer.
    status: Option<u16>,
}

/// Keys in order.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeysAnswer {
    /// The keys.
    keys: Vec<KeyLine>,
    /// Whether more follow: go on after the last one.
    more: bool,
}

/// Lists keys, for operators
#[utoipa::path(
    get, path = "/v1/keys", tag = "keys", params(KeysParams),
    responses((status = 200, description = "The keys", body = KeysAnswer))
)]
async fn list(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<KeysParams>,
) -> Result<Json<KeysAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let limit = limit(params.limit, 100, PAGE_MAX)?;
    let after_tenant = match params.after_tenant.as_deref() {
        Some(_) if !params.all_tenants => {
            return Err(Error::invalid("after_tenant", "it is only for all_tenants=true").into());
        }
        Some(tenant) => Some(Tenant::new(tenant)?),
        None if params.all_tenants => None,
        None => caller.tenant.clone(),
    };
    let after = params.after.as_deref().map(IdempotencyKey::new).transpose()?.map(|key| (after_tenant, key));
    // The role for maintenance sees all tenants, the service's own sees the one that it names.
    let (keys, tenant) =
        if params.all_tenants { (&app.kept_keys, None) } else { (&app.keys, Some(caller.tenant.clone())) };
    let found = keys.list(&ListKeys { tenant, open_only: params.open, after, limit }).await?;
    Ok(Json(KeysAnswer { more: found.len() == limit, keys: found.iter().map(line).collect() }))
}

fn line(entry: &KeyEntry) -> KeyLine {
    KeyLine {
        tenant: entry.tenant.as_ref().map(ToString::to_string),
        key: entry.key.to_string(),
        state: entry.state.label(),
        token: entry.token.0,
        begun_at: entry.begun_at.to_string(),
        settled_at: entry.settled_at.map(|at| at.to_string()),
        status: entry.status,
    }
}
