//! API tokens and the audit, for operators.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::{CACHE_CONTROL, HeaderValue};
use axum::response::{IntoResponse as _, Response};
use hapax::access::{
    Actor, ApiToken, AuditEntry, ListAudit, ListTokens, NewToken, Rotation, Scopes, TokenEntry, TokenId,
    revoke_with_children,
};
use hapax::problem::Problem;
use hapax::{Error, Scope, Tenant, Time};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Operator, Role};
use super::extract::{Json, Named, PAGE_MAX, Params, limit};

/// The longest lifetime and the longest overlap.
const SECONDS_MAX: u64 = 36_500 * 86_400;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(list, create))
        .routes(routes!(rotate))
        .routes(routes!(revoke))
        .routes(routes!(audit_rows))
}

/// A token, without its secret.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenAnswer {
    /// Its id. It stays the same when the secret is rotated.
    #[schema(example = "06gygt11wqed21md")]
    id: String,
    /// Who or what uses it.
    name: String,
    /// `read`, `write` or `admin`.
    role: &'static str,
    /// Whose data; none is the default tenant.
    tenant: Option<String>,
    /// For which scopes; none means all.
    scopes: Option<Vec<String>>,
    /// The id of the token that made it; none: a person did, by the command line.
    made_by: Option<String>,
    /// `live`, `expired` or `revoked`.
    state: &'static str,
    /// How often its secret was rotated.
    rotations: u32,
    /// When it was made.
    created_at: String,
    /// When it ends by itself.
    expires_at: Option<String>,
    /// Until when the secret before the last rotation is good.
    overlap_until: Option<String>,
    /// When it was last used, to within ten minutes.
    last_used_at: Option<String>,
    /// When it was revoked.
    revoked_at: Option<String>,
    /// The whole token. Only the answer that made it has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<String>,
}

impl TokenAnswer {
    fn of(entry: &TokenEntry, token: Option<&ApiToken>) -> Self {
        let time = |time: Option<Time>| time.map(|time| time.to_string());
        TokenAnswer {
            id: entry.id.to_string(),
            name: entry.name.clone(),
            role: entry.role.as_str(),
            tenant: entry.tenant.as_ref().map(ToString::to_string),
            scopes: match &entry.scopes {
                Scopes::All => None,
                Scopes::Only(scopes) => Some(scopes.iter().map(ToString::to_string).collect()),
            },
            made_by: entry.made_by.as_ref().map(ToString::to_string),
            state: entry.state.label(),
            rotations: entry.rotations,
            created_at: entry.created_at.to_string(),
            expires_at: time(entry.expires_at),
            overlap_until: time(entry.overlap_until),
            last_used_at: time(entry.last_used_at),
            revoked_at: time(entry.revoked_at),
            token: token.map(|token| token.expose().to_owned()),
        }
    }
}

/// Which tokens.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct TokensParams {
    /// Only those that are neither expired nor revoked.
    #[serde(default)]
    live: bool,
    /// Only those that the token with this id made.
    made_by: Option<String>,
    /// Those of all tenants, for an operator without a tenant.
    #[serde(default)]
    all_tenants: bool,
    /// Only those after this id, for the next page.
    after: Option<String>,
    /// How many at most.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// Tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokensAnswer {
    /// Oldest first.
    tokens: Vec<TokenAnswer>,
    /// Ask for what comes after this id; none: this was the last page.
    after: Option<String>,
}

/// Lists tokens, without their secrets
#[utoipa::path(
    get, path = "/v1/tokens", tag = "tokens", params(TokensParams),
    responses((status = 200, description = "A page of tokens", body = TokensAnswer))
)]
async fn list(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<TokensParams>,
) -> Result<Json<TokensAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let count = limit(params.limit, 100, PAGE_MAX)?;
    let which = ListTokens {
        tenant: (!params.all_tenants).then(|| caller.tenant.clone()),
        made_by: params.made_by.map(TokenId::new).transpose()?,
        live_only: params.live,
        after: params.after.map(TokenId::new).transpose()?,
        limit: count,
    };
    let entries = app.access.store().list(&which).await?;
    let after = entries.last().filter(|_| entries.len() == count).map(|entry| entry.id.to_string());
    let tokens = entries.iter().map(|entry| TokenAnswer::of(entry, None)).collect();
    Ok(Json(TokensAnswer { tokens, after }))
}

/// A token to make.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateTokenBody {
    /// Who or what uses it.
    #[schema(min_length = 1, max_length = 255, example = "shop")]
    name: String,
    /// `read`, `write` or `admin`; no more than the caller's.
    #[schema(pattern = "^(read|write|admin)$", example = "write")]
    role: String,
    /// Whose data, if not the caller's: for an operator without a tenant.
    #[schema(min_length = 1, max_length = 255)]
    tenant: Option<String>,
    /// Only these scopes; none means all.
    scopes: Option<Vec<String>>,
    /// After how many seconds it ends by itself; none: never. It never outlives the token that makes it.
    #[schema(minimum = 1)]
    expires_s: Option<u64>,
    /// The token itself, made by the client (`hapax token generate`): the same request sent again, because
    /// the answer was lost, then makes no second one. Only for an operator without a tenant and for all
    /// scopes: whether an id is taken says something about other tenants.
    #[schema(min_length = 59, max_length = 59)]
    token: Option<String>,
    /// Why, for the audit row.
    #[serde(default)]
    reason: String,
}

/// Makes a token; the answer has its secret, once
#[utoipa::path(
    post, path = "/v1/tokens", tag = "tokens", request_body = CreateTokenBody,
    responses(
        (status = 201, description = "It is made", body = TokenAnswer),
        (status = 409, description = "There is a token with this id and another secret: `conflict`"),
    )
)]
async fn create(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Json(body): Json<CreateTokenBody>,
) -> Result<Response, Problem> {
    let tenant = body.tenant.map(Tenant::new).transpose()?.or_else(|| caller.tenant.clone());
    let scopes = match body.scopes {
        None => Scopes::All,
        // An empty list permits nothing; the store refuses it.
        Some(names) => Scopes::Only(names.iter().map(Scope::new).collect::<Result<_, _>>()?),
    };
    let role = Role::parse(&body.role)?;
    may_hand_out(&caller, tenant.as_ref(), &scopes, role)?;
    if body.token.is_some() {
        caller.needs_all_tenants()?;
    }
    let about = NewToken::new(body.name, role)
        .tenant(tenant)
        .scopes(scopes)
        .expires_in(seconds(body.expires_s)?)
        .made_by(caller.token().cloned());
    let token = body.token.map_or_else(|| Ok(ApiToken::generate()), |text| ApiToken::parse(&text))?;
    let entry = app.access.store().create(&token, &about, &actor(&caller, &body.reason)).await?;
    Ok(secret(StatusCode::CREATED, &entry, &token))
}

/// How to rotate.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RotateBody {
    /// How often it was rotated before, as the list of tokens says: two who rotate at once do not lock
    /// each other out.
    rotations: u32,
    /// For how many seconds the old secret stays good beside the new one.
    #[serde(default)]
    #[schema(minimum = 0)]
    overlap_s: u64,
    /// The new token, made by the client, as for a creation. It has the id of the old one.
    #[schema(min_length = 59, max_length = 59)]
    token: Option<String>,
    /// Why, for the audit row.
    #[serde(default)]
    reason: String,
}

/// Gives a token a new secret; the answer has it, once
///
/// Who it is and what it may do stay the same, and so do its keys of writes.
#[utoipa::path(
    post, path = "/v1/tokens/{id}/rotate", tag = "tokens", request_body = RotateBody,
    params(("id" = String, Path, description = "The token's id")),
    responses(
        (status = 200, description = "It is rotated", body = TokenAnswer),
        (status = 404, description = "There is no such token: `not-found`"),
        (status = 409, description = "It is not live, or somebody else rotated it: `conflict`"),
    )
)]
async fn rotate(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Named(id): Named,
    Json(body): Json<RotateBody>,
) -> Result<Response, Problem> {
    let id = of_caller(&app, &caller, id).await?;
    let token = match body.token {
        None => ApiToken::with_secret(id.clone()),
        Some(text) => ApiToken::parse(&text)?,
    };
    if *token.id() != id {
        return Err(Error::invalid("token", "it has another id than the one in the path").into());
    }
    if body.overlap_s > SECONDS_MAX {
        return Err(Error::invalid("overlap_s", format!("it is at most {SECONDS_MAX}")).into());
    }
    let rotation = Rotation::new(body.rotations).overlap(Duration::from_secs(body.overlap_s));
    let entry = app.access.store().rotate(&token, &rotation, &actor(&caller, &body.reason)).await?;
    Ok(secret(StatusCode::OK, &entry, &token))
}

/// Why a token is revoked, and what goes with it.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct RevokeParams {
    /// Also end every token that it made, or that one of those made.
    #[serde(default)]
    children: bool,
    /// Why, for the audit row.
    #[serde(default)]
    reason: String,
}

/// A token that was revoked.
#[derive(Debug, Serialize, ToSchema)]
pub struct RevokedAnswer {
    /// The token.
    #[serde(flatten)]
    token: TokenAnswer,
    /// With `children=true`: the other tokens that were ended with it. Otherwise those that it made and
    /// that are still live, at most 1000 of them.
    children: Vec<TokenAnswer>,
}

/// Ends a token for good
///
/// Every server notices within seconds. May be repeated. The tokens that it made go on, unless
/// `children=true` ends them too; the answer lists them.
#[utoipa::path(
    delete, path = "/v1/tokens/{id}", tag = "tokens", params(("id" = String, Path, description = "The token's id"), RevokeParams),
    responses(
        (status = 200, description = "It is revoked", body = RevokedAnswer),
        (status = 404, description = "There is no such token: `not-found`"),
    )
)]
async fn revoke(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Named(id): Named,
    Params(params): Params<RevokeParams>,
) -> Result<Json<RevokedAnswer>, Problem> {
    let id = of_caller(&app, &caller, id).await?;
    let (store, by) = (app.access.store(), actor(&caller, &params.reason));
    let answer = |entry: &TokenEntry| TokenAnswer::of(entry, None);
    if params.children {
        // Whatever a token made is no more than it had, so who may end it may end them.
        let mut ended = revoke_with_children(&**store, &id, &by).await?.into_iter();
        let first = ended.next().ok_or_else(|| Error::Corrupt("a revocation without an answer".into()))?;
        let children = ended.map(|entry| answer(&entry)).collect();
        return Ok(Json(RevokedAnswer { token: answer(&first), children }));
    }
    let entry = store.revoke(&id, &by).await?;
    let which = ListTokens { made_by: Some(id), live_only: true, limit: PAGE_MAX, ..ListTokens::default() };
    let children = store.list(&which).await?;
    Ok(Json(RevokedAnswer { token: answer(&entry), children: children.iter().map(answer).collect() }))
}

/// Which audit rows.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct AuditParams {
    /// Only actions that begin with this.
    #[param(max_length = 64)]
    action: Option<String>,
    /// Only rows with a lower number, for the next page.
    before: Option<i64>,
    /// How many at most.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// An audit row.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditAnswer {
    /// Its number.
    number: i64,
    /// When.
    at: String,
    /// Who.
    who: String,
    /// What.
    action: String,
    /// To what.
    target: String,
    /// Why.
    reason: String,
    /// What else there is to say.
    details: String,
}

/// Audit rows.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditPageAnswer {
    /// Newest first.
    rows: Vec<AuditAnswer>,
    /// Ask for what is before this number; none: this was the last page.
    before: Option<i64>,
}

/// Lists who did what, newest first
///
/// For an operator without a tenant: the rows are those of all tenants.
#[utoipa::path(
    get, path = "/v1/audit", tag = "tokens", params(AuditParams),
    responses((status = 200, description = "A page of rows", body = AuditPageAnswer))
)]
async fn audit_rows(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<AuditParams>,
) -> Result<Json<AuditPageAnswer>, Problem> {
    caller.needs_all_tenants()?;
    if params.action.as_ref().is_some_and(|action| action.contains('\0') || action.chars().count() > 64) {
        return Err(Error::invalid("action", "it has at most 64 characters, and no NUL").into());
    }
    let count = limit(params.limit, 100, PAGE_MAX)?;
    let which = ListAudit { before: params.before, action: params.action, limit: count };
    let rows = app.access.store().audit(&which).await?;
    let before = rows.last().filter(|_| rows.len() == count).map(|row| row.number);
    let rows = rows.into_iter().map(|row: AuditEntry| AuditAnswer {
        number: row.number,
        at: row.at.to_string(),
        who: row.who,
        action: row.action,
        target: row.target,
        reason: row.reason,
        details: row.details,
    });
    Ok(Json(AuditPageAnswer { rows: rows.collect(), before }))
}

fn actor(caller: &Caller, reason: &str) -> Actor {
    Actor::new(caller.who(), reason)
}

fn seconds(seconds: Option<u64>) -> Result<Option<Duration>, Problem> {
    match seconds {
        Some(count) if !(1..=SECONDS_MAX).contains(&count) => {
            Err(Error::invalid("expires_s", format!("it is {count}; it must be 1 to {SECONDS_MAX}")).into())
        }
        seconds => Ok(seconds.map(Duration::from_secs)),
    }
}

fn may_hand_out(
    caller: &Caller,
    tenant: Option<&Tenant>,
    scopes: &Scopes,
    role: Role,
) -> Result<(), Problem> {
    if caller.covers(tenant, scopes, role) {
        return Ok(());
    }
    let message =
        format!("{} may not hand out more than it has: its tenant, its scopes, its role", caller.who());
    Err(Problem::new(StatusCode::FORBIDDEN, "forbidden", "The caller may not do this", message))
}

/// A token that the caller may change. Any other is not there, as far as they can see.
async fn of_caller(app: &App, caller: &Caller, id: String) -> Result<TokenId, Problem> {
    let id = TokenId::new(id)?;
    let found = app.access.store().get(&id).await?;
    let theirs = found.filter(|entry| caller.covers(entry.tenant.as_ref(), &entry.scopes, entry.role));
    theirs.map(|entry| entry.id).ok_or_else(|| Error::NotFound(format!("there is no token {id}")).into())
}

/// An answer with a secret, which nothing on its way may keep.
fn secret(status: StatusCode, entry: &TokenEntry, token: &ApiToken) -> Response {
    let mut response = Json(TokenAnswer::of(entry, Some(token))).into_response();
    *response.status_mut() = status;
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
