//! Dead, held, parked and lost events over HTTP, for operators.

use std::collections::BTreeMap;

use axum::extract::State;
use hapax::access::Scopes;
use hapax::ledger::{Entry, Filter, Identity, Intervene, Intervention, State as Is, Token};
use hapax::problem::Problem;
use hapax::{Aggregate, Error, EventId, Scope, Time, Topic};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::audit::audit;
use super::auth::{Caller, Operator};
use super::claims::check_batch;
use super::extract::{Json, PAGE_MAX, Params, limit};
use super::groups::tenant_of;
use super::openapi::ProblemBody;
use crate::ledger::act::{ChangeArgs, Target, Wanted, intervene, stays, targets};
use crate::ledger::look::{WhichArgs, entry_json};
use crate::letters;
use crate::select::{Part, Place, first};

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(dead))
        .routes(routes!(held))
        .routes(routes!(parked))
        .routes(routes!(lost))
        .routes(routes!(redrive))
        .routes(routes!(drop_dead))
        .routes(routes!(release_parked))
}

/// Which entries.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct EntriesParams {
    /// Only this scope.
    #[param(min_length = 1, max_length = 255)]
    scope: Option<String>,
    /// Only this aggregate.
    #[param(min_length = 1, max_length = 255)]
    aggregate: Option<String>,
    /// Only from this topic.
    #[param(min_length = 1, max_length = 255)]
    topic: Option<String>,
    /// Only this event.
    #[param(min_length = 1, max_length = 255)]
    id: Option<String>,
    /// First seen at or after this time (RFC 3339).
    since: Option<String>,
    /// First seen before this time (RFC 3339).
    until: Option<String>,
    /// With headers and payload.
    #[serde(default)]
    payload: bool,
    /// At most this many (100 unless set). A page ends earlier once it has 16 MiB.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// Go on after a page, with its `next`.
    after: Option<String>,
    /// Those of all tenants.
    #[serde(default)]
    all_tenants: bool,
}

/// A page of entries.
#[derive(Debug, Serialize, ToSchema)]
pub struct EntriesAnswer {
    /// The entries: tenant, scope, id, state, token, attempts, times, order, origin, reason. There may be
    /// none although there is a next page.
    #[schema(value_type = Vec<Object>)]
    entries: Vec<Value>,
    /// Where the next page begins; none: this is the last.
    next: Option<String>,
}

/// Lists dead letters, each with its reason
#[utoipa::path(
    get, path = "/v1/dead", tag = "letters", params(EntriesParams),
    responses((status = 200, description = "The entries", body = EntriesAnswer))
)]
async fn dead(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<EntriesParams>,
) -> Result<Json<EntriesAnswer>, Problem> {
    list(&app, &caller, &params, &[Is::Dead], |_| true).await
}

/// Lists parked events, which wait behind something unresolved
#[utoipa::path(
    get, path = "/v1/parked", tag = "letters", params(EntriesParams),
    responses((status = 200, description = "The entries", body = EntriesAnswer))
)]
async fn parked(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<EntriesParams>,
) -> Result<Json<EntriesAnswer>, Problem> {
    list(&app, &caller, &params, &[Is::Parked], |_| true).await
}

/// Lists lost events: at-most-once runs that failed, or did not report their end in time
///
/// None of them runs again by itself. An event that is dropped from the dead letters is lost too.
#[utoipa::path(
    get, path = "/v1/lost", tag = "letters", params(EntriesParams),
    responses((status = 200, description = "The entries", body = EntriesAnswer))
)]
async fn lost(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<EntriesParams>,
) -> Result<Json<EntriesAnswer>, Problem> {
    list(&app, &caller, &params, &[Is::Lost], |_| true).await
}

/// Lists held events: those that wait in the ledger with their bytes
#[utoipa::path(
    get, path = "/v1/held", tag = "letters", params(EntriesParams),
    responses((status = 200, description = "The entries", body = EntriesAnswer))
)]
async fn held(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<EntriesParams>,
) -> Result<Json<EntriesAnswer>, Problem> {
    list(&app, &caller, &params, &[Is::Retry, Is::Parked, Is::Dead, Is::Leased], |entry| entry.body.is_some())
        .await
}

async fn list(
    app: &App,
    caller: &Caller,
    params: &EntriesParams,
    states: &[Is],
    is_wanted: impl Fn(&Entry) -> bool,
) -> Result<Json<EntriesAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let limit = limit(params.limit, 100, PAGE_MAX)?;
    // All of it is in the filter: a cursor, and an error, must not come from what is another's.
    let filter = Filter {
        tenant: (!params.all_tenants).then(|| caller.tenant.clone()),
        scope: params.scope.as_deref().map(|scope| caller.scope(scope)).transpose()?,
        scopes: match caller.scopes() {
            Scopes::All => None,
            Scopes::Only(scopes) => Some(scopes.clone()),
        },
        id: params.id.as_deref().map(EventId::new).transpose()?,
        states: states.to_vec(),
        since: params.since.as_deref().map(Time::parse).transpose()?,
        until: params.until.as_deref().map(Time::parse).transpose()?,
        metadata: None,
        aggregate: params.aggregate.as_deref().map(Aggregate::new).transpose()?,
        topic: params.topic.as_deref().map(Topic::new).transpose()?,
        partition: None,
    };
    let after = params.after.as_deref().map(str::parse).transpose()?;
    let page = app.ledger.list(&filter, after.as_ref(), limit).await?;
    let wanted = page.entries.iter().filter(|entry| is_wanted(entry));
    Ok(Json(EntriesAnswer {
        entries: wanted.map(|entry| entry_json(entry, params.payload)).collect(),
        next: page.next.map(|next| next.to_string()),
    }))
}

/// Which entries to change, and why.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeBody {
    /// Whose effect it is.
    #[schema(min_length = 1, max_length = 255)]
    scope: String,
    /// Whose data, for those who see all tenants; unset: the caller's.
    #[schema(min_length = 1, max_length = 255)]
    tenant: Option<String>,
    /// The events; or `all`. A release that resumes also takes a dead event that others wait behind, as its preview
    /// names it.
    #[serde(default)]
    ids: Vec<String>,
    /// With `ids`: the token that each entry had when it was looked at (`POST /v1/dead/preview`). Then each
    /// event is changed for itself: one that has another token by now, or that cannot be changed, stays as it
    /// is and says why.
    #[serde(default)]
    tokens: BTreeMap<String, i64>,
    /// Every event of the scope that matches the filters below, up to `limit`. A dead letter that cannot be changed
    /// stays as it is and says why.
    #[serde(default)]
    all: bool,
    /// With `all`: only of this aggregate.
    #[schema(min_length = 1, max_length = 255)]
    aggregate: Option<String>,
    /// With `all`: only from this topic.
    #[schema(min_length = 1, max_length = 255)]
    topic: Option<String>,
    /// With `all`: only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it.
    pattern: Option<String>,
    /// With `all`: at most this many.
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// With `all`, for dead letters: go on after an answer, with its `next`.
    after: Option<String>,
    /// The event's time (RFC 3339), where the ledger's identity includes it.
    #[schema(format = DateTime)]
    time: Option<String>,
    /// Why, for the audit row.
    #[schema(min_length = 1, example = "fixed in 1.4.2")]
    reason: String,
    /// Say what would happen, change nothing.
    #[serde(default)]
    dry_run: bool,
    /// Redrive: also events whose aggregate has moved past them. They then run without order.
    #[serde(default)]
    out_of_order: bool,
    /// Release: how parked events go on (`resume` unless set).
    how: Option<ReleaseHow>,
}

/// How parked events go on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ReleaseHow {
    /// What they wait behind runs again: the dead event of their aggregate, or else themselves.
    #[default]
    Resume,
    /// Their aggregates go on without what they wait behind.
    Skip,
}

/// What was changed in one entry.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChangedEntry {
    /// What was done: `redrive`, `retry`, `drop` or `skip`; or would be done.
    what: &'static str,
    /// The event.
    id: String,
    /// The entry before.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    before: Option<Value>,
    /// The entry after.
    #[schema(value_type = Option<Object>)]
    #[serde(skip_serializing_if = "Option::is_none")]
    after: Option<Value>,
    /// Whether it runs only when it is delivered again: its bytes are not held, or it was claimed without a topic, so
    /// that no consumer is known to take it up. Publish it again.
    needs_delivery: bool,
    /// Why this one stayed as it was; the others were changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<ProblemBody>)]
    problem: Option<Value>,
}

/// What was changed.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChangedAnswer {
    /// Whether nothing was changed, because only that was asked.
    dry_run: bool,
    /// Each entry.
    entries: Vec<ChangedEntry>,
    /// Whether more match: send the request again, with `next` if there is one.
    more: bool,
    /// Send it as `after` to go on behind these, also behind what stayed as it was; only for dead letters.
    next: Option<String>,
}

/// Runs dead letters again, with attempts reset, in the order of their aggregates
#[utoipa::path(
    post, path = "/v1/dead/redrive", tag = "letters", request_body = ChangeBody,
    responses(
        (status = 200, description = "They run again", body = ChangedAnswer),
        (status = 404, description = "There is no such entry: `not-found`; nothing was changed"),
        (status = 409, description = "One of them is not dead: `conflict`; nothing was changed"),
    )
)]
async fn redrive(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Json(body): Json<ChangeBody>,
) -> Result<Json<ChangedAnswer>, Problem> {
    only_for(body.how.is_some(), "how", "release")?;
    let args = args(&app, &caller, &body)?;
    let chosen = dead_letters(&app, Intervention::Redrive, &args, &body).await?;
    carry_out(&app, &caller, chosen, &args, &body).await
}

/// Gives dead letters up: removes their bytes, and their aggregates go on past them
#[utoipa::path(
    post, path = "/v1/dead/drop", tag = "letters", request_body = ChangeBody,
    responses(
        (status = 200, description = "They are lost", body = ChangedAnswer),
        (status = 404, description = "There is no such entry: `not-found`; nothing was changed"),
        (status = 409, description = "One of them is not dead: `conflict`; nothing was changed"),
    )
)]
async fn drop_dead(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Json(body): Json<ChangeBody>,
) -> Result<Json<ChangedAnswer>, Problem> {
    only_for(body.how.is_some(), "how", "release")?;
    only_for(body.out_of_order, "out_of_order", "redrive")?;
    let args = args(&app, &caller, &body)?;
    let chosen = dead_letters(&app, Intervention::Drop, &args, &body).await?;
    carry_out(&app, &caller, chosen, &args, &body).await
}

/// Lets parked events go on
#[utoipa::path(
    post, path = "/v1/parked/release", tag = "letters", request_body = ChangeBody,
    responses(
        (status = 200, description = "They go on", body = ChangedAnswer),
        (status = 404, description = "There is no such entry: `not-found`; nothing was changed"),
        (status = 409, description = "One of them is not parked, or waits for an event that never came: `conflict`; nothing was changed"),
    )
)]
async fn release_parked(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Json(body): Json<ChangeBody>,
) -> Result<Json<ChangedAnswer>, Problem> {
    only_for(body.out_of_order, "out_of_order", "redrive")?;
    only_for(body.pattern.is_some(), "pattern", "dead letters")?;
    only_for(body.after.is_some(), "after", "dead letters")?;
    let args = args(&app, &caller, &body)?;
    let steps = match body.how.unwrap_or_default() {
        ReleaseHow::Resume => letters::resume(&*app.ledger, &args).await?,
        ReleaseHow::Skip => letters::skip(&*app.ledger, &args).await?,
    };
    carry_out(&app, &caller, Chosen { steps, next: None, may_stay: false }, &args, &body).await
}

/// What is wanted, of how many.
struct Chosen {
    /// Up to one more than the limit.
    steps: Vec<Wanted>,
    /// Where to go on, if there is one more.
    next: Option<String>,
    /// Whether what cannot be changed stays as it is; otherwise nothing is changed then.
    may_stay: bool,
}

/// An intervention in each of the named dead letters, or in the next of those that match.
async fn dead_letters(
    app: &App,
    what: Intervention,
    args: &ChangeArgs,
    body: &ChangeBody,
) -> Result<Chosen, Problem> {
    let states = [Is::Dead];
    if !body.all {
        let named = targets(&*app.ledger, &states, args).await?;
        let steps = named.into_iter().map(|target| Wanted::new(what, target)).collect();
        return Ok(Chosen { steps, next: None, may_stay: false });
    }
    let limit = limit(body.limit, PAGE_MAX, PAGE_MAX)?;
    let part =
        Part { pattern: body.pattern.clone(), after: body.after.as_deref().map(Place::read).transpose()? };
    let filter = args.which.filter(&*app.ledger, &states).await?;
    let found = first(&*app.ledger, &filter, &part, limit + 1).await?;
    let last = limit.checked_sub(1).filter(|_| found.len() > limit).and_then(|last| found.get(last));
    let next = last.map(|(place, _)| place.to_string());
    let steps = found.iter().map(|(_, entry)| Wanted::new(what, Target::of(entry))).collect();
    Ok(Chosen { steps, next, may_stay: true })
}

/// Refuses what means nothing for this request, rather than leave it unheard.
fn only_for(given: bool, what: &'static str, route: &str) -> Result<(), Problem> {
    if given { Err(Error::invalid(what, format!("it is only for {route}")).into()) } else { Ok(()) }
}

/// The same request as that of the command.
fn args(app: &App, caller: &Caller, body: &ChangeBody) -> Result<ChangeArgs, Problem> {
    let invalid =
        |what, message: &str| -> Result<ChangeArgs, Problem> { Err(Error::invalid(what, message).into()) };
    if body.all != body.ids.is_empty() {
        return invalid("ids", "send ids, or all=true");
    }
    let is_narrowed = body.aggregate.is_some() || body.topic.is_some() || body.pattern.is_some();
    if !body.all && (is_narrowed || body.limit.is_some() || body.after.is_some()) {
        return invalid("ids", "aggregate, topic, pattern, limit and after are only for all=true");
    }
    if !body.all {
        check_batch(app, "ids", body.ids.len())?;
    }
    if body.reason.trim().is_empty() {
        return invalid("reason", "it is blank; the audit row needs a reason");
    }
    if body.reason.chars().count() > 1000 || body.reason.contains('\0') {
        return invalid("reason", "it must have 1 to 1000 characters, none of them NUL");
    }
    if body.all && !body.tokens.is_empty() {
        return invalid("tokens", "they are only for ids");
    }
    let is_repeated = |(at, id): &(usize, &String)| body.ids[..*at].contains(id);
    if let Some((_, id)) = body.ids.iter().enumerate().find(is_repeated).filter(|_| !body.tokens.is_empty()) {
        // Of two entries with one id (in two weeks) each has a token of its own.
        return invalid(
            "ids",
            &format!("{id:?} is there twice: send the other entry in a request of its own"),
        );
    }
    let unfixed = |id: &&String| !body.tokens.is_empty() && !body.tokens.contains_key(*id);
    if let Some(id) = body.ids.iter().find(unfixed) {
        return invalid("tokens", &format!("they have none for {id:?}"));
    }
    let scope: Scope = caller.scope(&body.scope)?;
    let tenant = tenant_of(caller, body.tenant.as_deref())?;
    let which = WhichArgs {
        scope: Some(scope),
        no_tenant: tenant.is_none(),
        tenant,
        aggregate: body.aggregate.as_deref().map(Aggregate::new).transpose()?,
        topic: body.topic.as_deref().map(Topic::new).transpose()?,
        ..WhichArgs::default()
    };
    Ok(ChangeArgs {
        which,
        all: body.all,
        time: body.time.as_deref().map(Time::parse).transpose()?,
        // One more than is done, to know whether there are more.
        limit: Some(limit(body.limit, PAGE_MAX, PAGE_MAX)? + 1),
        reason: body.reason.clone(),
        by: Some(caller.principal.clone()),
        dry_run: body.dry_run,
        yes: true,
        ids: body.ids.iter().map(EventId::new).collect::<Result<_, _>>()?,
        tokens: body.tokens.clone(),
    })
}

/// Carries out an intervention in each entry: first a dry run of all, so that a mistake in the list changes
/// nothing at all.
async fn carry_out(
    app: &App,
    caller: &Caller,
    Chosen { mut steps, next, may_stay }: Chosen,
    args: &ChangeArgs,
    body: &ChangeBody,
) -> Result<Json<ChangedAnswer>, Problem> {
    let limit = limit(body.limit, PAGE_MAX, PAGE_MAX)?;
    let more = steps.len() > limit;
    steps.truncate(limit);
    // The change itself is given a token: an entry may change between the dry run and the change.
    let request = |what: Intervention, target: &Target, token: Option<Token>, dry_run| Intervene {
        identity: target.identity.clone(),
        time: target.time,
        what,
        by: caller.principal.clone(),
        reason: args.reason.clone(),
        out_of_order: body.out_of_order,
        token,
        dry_run,
    };
    let looked_at =
        |target: &Target| body.tokens.get(target.identity.id.as_str().as_ref()).copied().map(Token);
    let mut entries = Vec::with_capacity(steps.len());
    let mut runs = Vec::with_capacity(steps.len());
    for Wanted { what, target, refused } in &mut steps {
        let step = match refused.take() {
            Some(error) => Err(error),
            None => intervene(&*app.ledger, request(*what, target, looked_at(target), true)).await,
        };
        match step {
            Ok(step) => {
                entries.push(changed(&step));
                runs.push((*what, &*target, step.1.before.token));
            }
            // Of all that match, some may stay: whoever comes back for the rest must get past them.
            Err(error) if !body.tokens.is_empty() || (may_stay && stays(&error).is_some()) => {
                entries.push(unchanged(*what, &target.identity, &Problem::of(&error)));
            }
            Err(error) => return Err(error.into()),
        }
    }
    if !body.dry_run {
        entries.retain(|entry| entry.problem.is_some());
        for (what, target, token) in runs {
            let identity = &target.identity;
            let action = format!("ledger.{}", what.name());
            let step = match audit(app, caller, &action, &identity.to_string(), &args.reason).await {
                Ok(()) => {
                    let step = intervene(&*app.ledger, request(what, target, Some(token), false)).await;
                    step.map_err(|error| Problem::of(&error))
                }
                Err(problem) => Err(problem),
            };
            entries.push(match step {
                Ok(step) => changed(&step),
                Err(problem) => unchanged(what, identity, &problem),
            });
        }
        app.waits.forget();
        app.groups.forget();
    }
    Ok(Json(ChangedAnswer { dry_run: body.dry_run, entries, more, next }))
}

fn unchanged(what: Intervention, identity: &Identity, problem: &Problem) -> ChangedEntry {
    ChangedEntry {
        what: what.name(),
        id: identity.id.to_string(),
        before: None,
        after: None,
        needs_delivery: false,
        problem: Some(problem.json()),
    }
}

fn changed((what, step): &(Intervention, hapax::ledger::Intervened)) -> ChangedEntry {
    ChangedEntry {
        what: what.name(),
        id: step.before.identity.id.to_string(),
        before: Some(entry_json(&step.before, false)),
        after: step.after.as_ref().map(|entry| entry_json(entry, false)),
        needs_delivery: step.needs_delivery(),
        problem: None,
    }
}
