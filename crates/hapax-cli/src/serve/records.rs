//! Records over HTTP: each write under a key, which commits with the record, its event and the answer.
//!
//! The layer of keys is around all routes here. `identify` runs before it: it says who calls, and opens
//! what is opened late, so that no request waits for a second connection inside its transaction. Only
//! what a write of a record was answered is kept under its key: what is wrong with a request, and a
//! module that is not there yet, are found without it ([`Refused`]).

use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Extension;
use axum::extract::{FromRequest, FromRequestParts, RawPathParams, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use hapax::keyed::{Caller as KeyedCaller, KeyedLayer, Keys, NotKept};
use hapax::problem::Problem;
use hapax::records::{
    Create, Delete, LIST_DEFAULT, LIST_MAX, List, ModuleSlug, Payload, Record, Update, Uuid, tenant_id,
};
use hapax::{Error, Scope};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Reader, Writer};
use super::extract::{Json, Named, Params, limit};
use super::store::{Store, Tx, Write};

/// How long a request waits for another one with its key.
const WAIT: std::time::Duration = std::time::Duration::from_secs(5);

pub fn routes(app: &Shared) -> OpenApiRouter<Shared> {
    let routes = OpenApiRouter::new().routes(routes!(list, create)).routes(routes!(read, update, delete));
    let routes = match &app.records {
        Store::Sqlite { keys, .. } => keyed(routes, KeyedLayer::new(keys.clone()).transactional(), app),
        #[cfg(feature = "postgres")]
        Store::Postgres(of) => keyed(routes, KeyedLayer::new(of.keys.clone()).transactional(), app),
        Store::Nowhere(_) => routes,
    };
    let state = (app.clone(), Modules::default());
    routes.route_layer(from_fn_with_state(state, identify))
}

/// What was refused before anything was done: it is not kept under the key, so that the same key works
/// once it is mended.
pub struct Refused(Problem);

impl From<Problem> for Refused {
    fn from(problem: Problem) -> Self {
        Refused(problem)
    }
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Refused(error.into())
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        (NotKept, self.0).into_response()
    }
}

/// A body of JSON; what is wrong with it is [`Refused`].
struct Body<T>(T);

impl<T: DeserializeOwned + ToSchema> FromRequest<Shared> for Body<T> {
    type Rejection = Refused;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, Refused> {
        let Json(body) = Json::from_request(request, app).await?;
        Ok(Body(body))
    }
}

/// The modules that were found; modules are not removed.
#[derive(Clone, Default)]
struct Modules(Arc<Mutex<HashSet<String>>>);

impl Modules {
    /// Refuses a write to a module that is not there. It may be there tomorrow, so that does not answer
    /// keep; and inside of the transaction a missing module looks like a missing record.
    async fn check(&self, app: &Shared, slug: &str, caller: &Caller) -> Result<(), Problem> {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(slug) {
            return Ok(());
        }
        let module = ModuleSlug::new(slug)?;
        app.records.reader()?.list(&List::new(module).tenant(caller.tenant.clone()).limit(1)).await?;
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(slug.to_owned());
        Ok(())
    }
}

/// As whose effects writes of records are counted that were not done twice.
const KEYED: &str = "records";

#[allow(clippy::result_large_err)] // axum rejects with responses
fn keyed<K: Keys + Clone + Sync + 'static>(
    routes: OpenApiRouter<Shared>,
    layer: KeyedLayer<K>,
    app: &App,
) -> OpenApiRouter<Shared> {
    let serve = &app.config.serve;
    let layer = layer
        .required()
        .replay_status(StatusCode::OK)
        .tell_fields()
        .canonical_json()
        .fingerprint_headers([header::IF_MATCH])
        .wait(WAIT.min(serve.request_timeout))
        .timeout(serve.request_timeout)
        .retention(app.config.keys.retention)
        .bytes_max(serve.body_bytes_max, 1 << 20)
        .caller(|parts| {
            let caller = parts.extensions.get::<Caller>();
            let caller = caller.ok_or_else(|| super::extract::internal().into_response())?;
            Ok(KeyedCaller { tenant: caller.tenant.clone(), principal: Some(caller.principal.clone()) })
        });
    let layer = match app.records.writes() {
        Some(permits) => layer.transactions_max(permits),
        None => layer,
    };
    let layer = match Scope::new(KEYED) {
        Ok(scope) => layer.count_replays(app.guard.skip_log().clone(), scope),
        Err(_) => layer,
    };
    routes.route_layer(layer)
}

/// Says who calls, before anything is looked at.
async fn identify(State((app, modules)): State<(Shared, Modules)>, request: Request, next: Next) -> Response {
    let (mut parts, body) = request.into_parts();
    let writes = parts.method != Method::GET && parts.method != Method::HEAD;
    match identified(&app, &modules, &mut parts, writes).await {
        Ok(caller) => parts.extensions.insert(caller),
        Err(problem) => return problem.into_response(),
    };
    let response = next.run(Request::from_parts(parts, body)).await;
    if writes && response.status().is_success() {
        app.records.wake(); // the relay need not wait for its next look
    }
    response
}

async fn identified(
    app: &Shared,
    modules: &Modules,
    parts: &mut Parts,
    writes: bool,
) -> Result<Caller, Problem> {
    let caller = if writes {
        Writer::from_request_parts(parts, app).await?.0
    } else {
        Reader::from_request_parts(parts, app).await?.0
    };
    tenant_id(caller.tenant.as_ref())?;
    app.records.ready().await?;
    if let Ok(path) = RawPathParams::from_request_parts(parts, app).await
        && let Some((_, slug)) = path.iter().find(|(name, _)| *name == "slug")
    {
        app.records.serves(slug).await?;
        if writes {
            modules.check(app, slug, &caller).await?;
        }
    }
    Ok(caller)
}

/// A record to create.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateBody {
    /// Its content: a JSON object.
    #[schema(value_type = Object, example = json!({"large": 1e100, "largest": 1.7976931348623157e308, "least": 5e-324}))]
    payload: Box<RawValue>,
    /// Its id; unset: a new UUIDv7.
    #[schema(format = "uuid")]
    id: Option<String>,
}

/// New content for a record.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpdateBody {
    /// The new content, which replaces the old one: a JSON object.
    #[schema(value_type = Object)]
    payload: Box<RawValue>,
    /// The seq that the record has; `If-Match: "SEQ"` may say it instead.
    expected_seq: Option<u64>,
}

/// A record.
#[derive(Debug, Serialize, ToSchema)]
pub struct RecordBody {
    /// Its id.
    #[schema(format = "uuid")]
    id: String,
    /// Its module.
    module: String,
    /// Its version: the seq of its last event. It is the ETag too.
    seq: u64,
    /// Its content.
    #[schema(value_type = Object)]
    payload: Payload,
    /// When it was created.
    #[schema(format = DateTime)]
    created_at: String,
    /// When it was last written.
    #[schema(format = DateTime)]
    updated_at: String,
}

impl From<&Record> for RecordBody {
    fn from(record: &Record) -> Self {
        RecordBody {
            id: record.id.to_string(),
            module: record.module.to_string(),
            seq: record.seq,
            payload: record.payload.clone(),
            created_at: record.created_at.to_string(),
            updated_at: record.updated_at.to_string(),
        }
    }
}

/// A page of records.
#[derive(Debug, Serialize, ToSchema)]
pub struct ListAnswer {
    /// The records, by id.
    records: Vec<RecordBody>,
    /// Where the next page begins, if there may be one: send it as `after`.
    #[schema(format = "uuid")]
    next: Option<String>,
}

/// Which records to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ListParams {
    /// Only records with a greater id.
    #[param(format = "uuid")]
    after: Option<String>,
    /// How many at most (default 100).
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// What a delete expects.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct DeleteParams {
    /// The seq that the record has; `If-Match: "SEQ"` may say it instead.
    expected_seq: Option<u64>,
}

fn uuid(what: &'static str, text: &str) -> Result<Uuid, Problem> {
    let parsed = Uuid::try_parse(text).ok().filter(|_| text.len() == 36);
    let shown: String = text.chars().take(64).collect();
    let message = || format!("it is {shown:?}; it needs to be a UUID of 32 hexadecimal digits with hyphens");
    parsed.ok_or_else(|| Error::invalid(what, message()).into())
}

/// The module and the id in a path.
fn named((slug, id): (String, String)) -> Result<(ModuleSlug, Uuid), Problem> {
    Ok((ModuleSlug::new(slug)?, uuid("id", &id)?))
}

/// The seq that a write expects, from the request or from `If-Match`.
pub(super) fn expected(headers: &HeaderMap, given: Option<u64>) -> Result<u64, Problem> {
    let mut values = headers.get_all(header::IF_MATCH).iter();
    let matched = match (values.next(), values.next()) {
        (None, _) => None,
        (Some(value), None) => {
            let quoted = value.to_str().ok().and_then(|text| text.strip_prefix('"')?.strip_suffix('"'));
            let digits = quoted.filter(|text| text.bytes().all(|b| b.is_ascii_digit()));
            let seq = digits.and_then(|text| text.parse().ok());
            let bad = || Error::invalid("If-Match", "it needs one ETag of the record, such as \"3\"");
            Some(seq.ok_or_else(bad)?)
        }
        _ => return Err(Error::invalid("If-Match", "the header was sent more than once").into()),
    };
    match (matched, given) {
        (Some(matched), Some(given)) if matched != given => {
            let problem = format!("it is {given}, and If-Match says {matched}");
            Err(Error::invalid("expected_seq", problem).into())
        }
        (Some(seq), _) | (None, Some(seq)) => Ok(seq),
        (None, None) => {
            let message = "name the seq you have read, in expected_seq or If-Match; nothing was done";
            Err(Problem::new(
                StatusCode::PRECONDITION_REQUIRED,
                "precondition-required",
                "The expected seq is missing",
                message,
            ))
        }
    }
}

fn answer(status: StatusCode, record: &Record) -> Response {
    let mut response = Json(RecordBody::from(record)).into_response();
    *response.status_mut() = status;
    let headers = response.headers_mut();
    // Both are plain ASCII: a slug, a UUID and a number.
    if let Ok(etag) = HeaderValue::try_from(format!("\"{}\"", record.seq)) {
        headers.insert(header::ETAG, etag);
    }
    let place = format!("/v1/modules/{}/records/{}", record.module, record.id);
    if let Ok(place) = HeaderValue::try_from(place)
        && status == StatusCode::CREATED
    {
        headers.insert(header::LOCATION, place);
    }
    response
}

/// What a write was answered.
fn written(status: StatusCode, record: hapax::Result<Record>) -> Response {
    match record {
        Ok(record) => answer(status, &record),
        // It was refused before the store was asked.
        Err(error @ Error::Invalid { .. }) => Refused::from(error).into_response(),
        Err(error) => Problem::from(error).into_response(),
    }
}

/// Creates a record
///
/// The record, its event and the answer commit together under the key. The same request again is
/// answered with 200, the same body and `Idempotency-Replayed: true`.
#[utoipa::path(
    post, path = "/v1/modules/{slug}/records", tag = "records", request_body = CreateBody,
    params(
        ("slug" = String, Path, description = "The module"),
        ("Idempotency-Key" = String, Header, description = "A new key for this write, best a UUIDv7; the same for its retries"),
    ),
    responses(
        (status = 201, description = "Created", body = RecordBody),
        (status = 200, description = "It was created before, with this key", body = RecordBody),
        (status = 404, description = "There is no such module: `not-found`"),
        (status = 409, description = "The id exists (`conflict`), or the key runs (`key-running`)"),
        (status = 410, description = "The key is too old: `key-expired`"),
    )
)]
async fn create(
    Extension(caller): Extension<Caller>,
    State(app): State<Shared>,
    Named(slug): Named,
    tx: Tx,
    Body(body): Body<CreateBody>,
) -> Result<Response, Refused> {
    let create = Create::new(ModuleSlug::new(slug)?, Payload::new(body.payload.get())?).tenant(caller.tenant);
    let create = match &body.id {
        Some(id) => create.id(uuid("id", id)?),
        None => create,
    };
    Ok(written(StatusCode::CREATED, app.records.write(tx, Write::Create(create)).await))
}

/// Lists records in the order of their ids
///
/// A page has up to `limit` records, and fewer if their content reaches 8 MiB: `next` goes on.
#[utoipa::path(
    get, path = "/v1/modules/{slug}/records", tag = "records",
    params(("slug" = String, Path, description = "The module"), ListParams),
    responses(
        (status = 200, description = "A page", body = ListAnswer),
        (status = 404, description = "There is no such module: `not-found`"),
    )
)]
async fn list(
    Extension(caller): Extension<Caller>,
    State(app): State<Shared>,
    Named(slug): Named,
    Params(params): Params<ListParams>,
) -> Result<Json<ListAnswer>, Problem> {
    let after = params.after.as_deref().map(|after| uuid("after", after)).transpose()?;
    let which = List::new(ModuleSlug::new(slug)?).tenant(caller.tenant).after(after);
    let which = which.limit(limit(params.limit, LIST_DEFAULT, LIST_MAX)?);
    let page = app.records.reader()?.list(&which).await?;
    Ok(Json(ListAnswer {
        records: page.records.iter().map(RecordBody::from).collect(),
        next: page.next.map(|next| next.to_string()),
    }))
}

/// Reads a record
#[utoipa::path(
    get, path = "/v1/modules/{slug}/records/{id}", tag = "records",
    params(("slug" = String, Path, description = "The module"), ("id" = String, Path, description = "The record")),
    responses(
        (status = 200, description = "The record", body = RecordBody),
        (status = 404, description = "There is no such record or module: `not-found`"),
    )
)]
async fn read(
    Extension(caller): Extension<Caller>,
    State(app): State<Shared>,
    Named(path): Named<(String, String)>,
) -> Result<Response, Problem> {
    let (module, id) = named(path)?;
    let found = app.records.reader()?.get(caller.tenant.as_ref(), &module, id).await?;
    let missing = || Error::NotFound(format!("there is no record {id} in module {module}"));
    Ok(answer(StatusCode::OK, &found.ok_or_else(missing)?))
}

/// Replaces the content of a record
///
/// The key is checked first: a retry of a write that committed gets its answer, and no conflict.
#[utoipa::path(
    put, path = "/v1/modules/{slug}/records/{id}", tag = "records", request_body = UpdateBody,
    params(
        ("slug" = String, Path, description = "The module"), ("id" = String, Path, description = "The record"),
        ("Idempotency-Key" = String, Header, description = "A new key for this write, best a UUIDv7; the same for its retries"),
        ("If-Match" = Option<String>, Header, description = "The ETag of the record, instead of `expected_seq`"),
    ),
    responses(
        (status = 200, description = "The record after the write", body = RecordBody),
        (status = 404, description = "There is no such record or module: `not-found`"),
        (status = 409, description = "The record has another seq (`conflict`, with both), or the key runs (`key-running`)"),
        (status = 410, description = "The key is too old: `key-expired`"),
        (status = 428, description = "The expected seq is missing: `precondition-required`"),
    )
)]
async fn update(
    Extension(caller): Extension<Caller>,
    State(app): State<Shared>,
    Named(path): Named<(String, String)>,
    headers: HeaderMap,
    tx: Tx,
    Body(body): Body<UpdateBody>,
) -> Result<Response, Refused> {
    let (module, id) = named(path)?;
    let seq = expected(&headers, body.expected_seq)?;
    let update = Update::new(module, id, seq, Payload::new(body.payload.get())?).tenant(caller.tenant);
    Ok(written(StatusCode::OK, app.records.write(tx, Write::Update(update)).await))
}

/// Deletes a record
///
/// The answer is its last content, with the seq of the deletion. If its id is created again, its seq
/// goes on from there.
#[utoipa::path(
    delete, path = "/v1/modules/{slug}/records/{id}", tag = "records",
    params(
        ("slug" = String, Path, description = "The module"), ("id" = String, Path, description = "The record"), DeleteParams,
        ("Idempotency-Key" = String, Header, description = "A new key for this write, best a UUIDv7; the same for its retries"),
        ("If-Match" = Option<String>, Header, description = "The ETag of the record, instead of `expected_seq`"),
    ),
    responses(
        (status = 200, description = "The record as it was, with the seq of the deletion", body = RecordBody),
        (status = 404, description = "There is no such record or module: `not-found`"),
        (status = 408, description = "The body came too slowly: `request-timeout`"),
        (status = 409, description = "The record has another seq (`conflict`, with both), or the key runs (`key-running`)"),
        (status = 410, description = "The key is too old: `key-expired`"),
        (status = 413, description = "The body is too large: `body-too-large`"),
        (status = 422, description = "The key belongs to another request: `key-mismatch`"),
        (status = 428, description = "The expected seq is missing: `precondition-required`"),
    )
)]
async fn delete(
    Extension(caller): Extension<Caller>,
    State(app): State<Shared>,
    Named(path): Named<(String, String)>,
    params: Result<Params<DeleteParams>, Problem>,
    headers: HeaderMap,
    tx: Tx,
) -> Result<Response, Refused> {
    let ((module, id), Params(params)) = (named(path)?, params?);
    let seq = expected(&headers, params.expected_seq)?;
    let delete = Delete::new(module, id, seq).tenant(caller.tenant);
    Ok(written(StatusCode::OK, app.records.write(tx, Write::Delete(delete)).await))
}
