//! Dead letters by their reason, and what a redrive of them would do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use hapax::access::Scopes;
use hapax::ledger::{Entry, Filter, IdentityRule, Intervene, Intervention, State as Is};
use hapax::problem::Problem;
use hapax::{Aggregate, Error, Scope, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Operator};
use super::extract::{Json, PAGE_MAX, Params, limit};
use super::recent::{Latest, RecentBy};
use crate::explain::masked;
use crate::ledger::act::{ChangeArgs, Target, Wanted, intervene, outcome, stays};
use crate::ledger::look::WhichArgs;
use crate::letters;
use crate::reasons::Groups;
use crate::select::{Part, Place, each_match, first};

/// How many groups are answered.
const GROUPS_MAX: usize = 200;
/// How long an answer waits for a look that is under way.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(groups)).routes(routes!(preview))
}

/// Which dead letters.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct GroupsParams {
    /// Only this scope.
    #[param(min_length = 1, max_length = 255)]
    scope: Option<String>,
    /// Those of all tenants.
    #[serde(default)]
    all_tenants: bool,
}

/// Dead letters that failed alike.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct DeadGroup {
    /// Whose data.
    tenant: Option<String>,
    /// Whose effect.
    scope: String,
    /// The reason, with `#` for ids and long numbers, which differ.
    pattern: String,
    /// The reason of the latest one.
    reason: String,
    /// How many.
    count: u64,
    /// When the first of them died.
    first_at: String,
    /// When the latest of them died.
    last_at: String,
    /// Some of them, the latest first.
    ids: Vec<String>,
}

/// Whose entries are looked at.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Question {
    all_tenants: bool,
    tenant: Option<Tenant>,
    scope: Option<Scope>,
    scopes: Option<BTreeSet<Scope>>,
}

impl Question {
    /// What a caller may see, of a scope or of all of them.
    pub fn of(caller: &Caller, all_tenants: bool, scope: Option<Scope>) -> Result<Self, Problem> {
        if all_tenants {
            caller.needs_all_tenants()?;
        }
        let tenant = caller.tenant.clone().filter(|_| !all_tenants);
        Ok(Question { all_tenants, tenant, scope, scopes: scopes_of(caller) })
    }

    /// The entries in these states.
    pub fn filter(&self, states: &[Is]) -> Filter {
        Filter {
            tenant: (!self.all_tenants).then(|| self.tenant.clone()),
            scope: self.scope.clone(),
            scopes: self.scopes.clone(),
            states: states.to_vec(),
            ..Filter::default()
        }
    }
}

/// What was found lately. A look reads all dead letters.
pub type RecentGroups = RecentBy<Question, GroupsAnswer>;

/// Dead letters by reason.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct GroupsAnswer {
    /// The groups, the largest first.
    groups: Vec<DeadGroup>,
    /// How many dead letters were looked at.
    looked: usize,
    /// Whether there are more groups.
    more: bool,
    /// How long ago that was, in seconds. A ledger that takes long to answer is asked less often.
    age_s: f64,
}

/// Dead letters by reason, the most frequent first
///
/// While very many are looked through for the first time, the answer is 503.
#[utoipa::path(
    get, path = "/v1/dead/groups", tag = "letters", params(GroupsParams),
    responses((status = 200, description = "The groups", body = GroupsAnswer))
)]
async fn groups(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<GroupsParams>,
) -> Result<Json<GroupsAnswer>, Problem> {
    let scope = params.scope.as_deref().map(|scope| caller.scope(scope)).transpose()?;
    let question = Question::of(&caller, params.all_tenants, scope)?;
    let look = || {
        let (ledger, filter) = (Arc::clone(&app.ledger), question.filter(&[Is::Dead]));
        async move {
            let mut groups = Groups::default();
            each_match(&*ledger, &filter, |entry| groups.add(&entry)).await?;
            Ok(found(groups))
        }
    };
    let latest = app.groups.of(&question).get(PATIENCE, &app.stopping, look).await;
    match latest.map_err(|error| Problem::of(&error))? {
        Latest::Counted(found) => {
            Ok(Json(GroupsAnswer { age_s: found.age().as_secs_f64(), ..found.value.clone() }))
        }
        Latest::Counting(time) => {
            let detail =
                format!("dead letters have been looked through for {} s so far; ask again", time.as_secs());
            let title = "Dead letters are being grouped";
            Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", title, detail).retry())
        }
    }
}

fn found(groups: Groups) -> GroupsAnswer {
    let (looked, is_cut) = (groups.looked, groups.is_cut);
    let mut groups = groups.sorted();
    let more = is_cut || groups.len() > GROUPS_MAX;
    groups.truncate(GROUPS_MAX);
    let groups = groups.into_iter().map(|group| DeadGroup {
        tenant: group.tenant.map(|tenant| tenant.to_string()),
        scope: group.scope.to_string(),
        pattern: group.pattern,
        reason: group.reason,
        count: group.count,
        first_at: group.first_at.to_string(),
        last_at: group.last_at.to_string(),
        ids: group.ids,
    });
    GroupsAnswer { groups: groups.collect(), looked, more, age_s: 0.0 }
}

/// The scopes to which a caller is bound, for a filter.
pub fn scopes_of(caller: &Caller) -> Option<BTreeSet<Scope>> {
    match caller.scopes() {
        Scopes::All => None,
        Scopes::Only(scopes) => Some(scopes.clone()),
    }
}

/// What is previewed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PreviewWhat {
    /// Dead letters run again.
    #[default]
    Redrive,
    /// Dead letters are given up.
    Drop,
    /// What parked events wait behind runs again.
    Resume,
    /// Aggregates go on past what their parked events wait behind.
    Skip,
}

/// Which events are meant, and what for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct PreviewBody {
    /// What would be done (`redrive` unless set).
    #[serde(default)]
    what: PreviewWhat,
    /// Whose effect it is.
    #[schema(min_length = 1, max_length = 255)]
    scope: String,
    /// Whose data, for those who see all tenants; unset: the caller's.
    #[schema(min_length = 1, max_length = 255)]
    tenant: Option<String>,
    /// Only dead letters whose reason has this pattern, as `GET /v1/dead/groups` says it.
    pattern: Option<String>,
    /// Only of this aggregate.
    #[schema(min_length = 1, max_length = 255)]
    aggregate: Option<String>,
    /// Also events whose aggregate has moved past them. They then run without order.
    #[serde(default)]
    out_of_order: bool,
    /// At most this many (1000 unless set).
    #[schema(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// Go on after an answer, with its `next`; only for dead letters.
    after: Option<String>,
}

/// What would be done to one event.
#[derive(Debug, Serialize, ToSchema)]
pub struct PreviewedEvent {
    /// What would be done: `redrive`, `retry`, `drop` or `skip`.
    what: &'static str,
    /// The event.
    id: String,
    /// Its aggregate.
    aggregate: Option<String>,
    /// Its number in it.
    seq: Option<u64>,
    /// A time of its week (RFC 3339), where the ledger's identity includes the time.
    time: Option<String>,
    /// Its token. Send it with the request: an event that has changed since is left as it is.
    token: i64,
    /// Why it is dead.
    reason: Option<String>,
    /// Whether anything would change.
    changes: bool,
    /// Whether it would run again.
    runs: bool,
    /// What would happen, or why nothing would.
    outcome: String,
}

/// What would be done.
#[derive(Debug, Serialize, ToSchema)]
pub struct PreviewAnswer {
    /// Each event, in the order in which they would run.
    events: Vec<PreviewedEvent>,
    /// Whether more match.
    more: bool,
    /// Send it as `after` to go on with those; only for dead letters.
    next: Option<String>,
}

/// What a redrive, a drop, a resume or a skip would do to each event; changes nothing
///
/// The ledger decides as it would, event by event. Send the ids and their tokens with the request that follows
/// (`/v1/dead/redrive`, `/v1/dead/drop`, or `/v1/parked/release` for a resume or a skip): what arrives later, or has
/// changed since, is left as it is. Two entries may have one id, in two weeks: send them in two requests.
#[utoipa::path(
    post, path = "/v1/dead/preview", tag = "letters", request_body = PreviewBody,
    responses(
        (status = 200, description = "Each event with its outcome", body = PreviewAnswer),
    )
)]
async fn preview(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Json(body): Json<PreviewBody>,
) -> Result<Json<PreviewAnswer>, Problem> {
    let limit = limit(body.limit, PAGE_MAX, PAGE_MAX)?;
    let what = match body.what {
        PreviewWhat::Redrive => Intervention::Redrive,
        PreviewWhat::Drop => Intervention::Drop,
        PreviewWhat::Resume | PreviewWhat::Skip => return parked(&app, &caller, &body, limit).await,
    };
    if body.out_of_order && what != Intervention::Redrive {
        return Err(Error::invalid("out_of_order", "it is only for a redrive").into());
    }
    let filter = Filter {
        tenant: Some(tenant_of(&caller, body.tenant.as_deref())?),
        scope: Some(caller.scope(&body.scope)?),
        states: vec![Is::Dead],
        aggregate: body.aggregate.as_deref().map(Aggregate::new).transpose()?,
        ..Filter::default()
    };
    let part =
        Part { pattern: body.pattern.clone(), after: body.after.as_deref().map(Place::read).transpose()? };
    let mut found = first(&*app.ledger, &filter, &part, limit + 1).await?;
    let more = found.len() > limit;
    found.truncate(limit);
    let next = found.last().filter(|_| more).map(|(place, _)| place.to_string());
    let mut events = Vec::with_capacity(found.len());
    for (_, entry) in found {
        events.push(previewed(&app, what, entry, None, body.out_of_order).await?);
    }
    Ok(Json(PreviewAnswer { events, more, next }))
}

/// The same for parked events.
async fn parked(
    app: &App,
    caller: &Caller,
    body: &PreviewBody,
    limit: usize,
) -> Result<Json<PreviewAnswer>, Problem> {
    if body.out_of_order || body.pattern.is_some() || body.after.is_some() {
        let message = "out_of_order, pattern and after are only for dead letters";
        return Err(Error::invalid("what", message).into());
    }
    let tenant = tenant_of(caller, body.tenant.as_deref())?;
    let which = WhichArgs {
        scope: Some(caller.scope(&body.scope)?),
        no_tenant: tenant.is_none(),
        tenant,
        aggregate: body.aggregate.as_deref().map(Aggregate::new).transpose()?,
        ..WhichArgs::default()
    };
    let args = ChangeArgs {
        which,
        all: true,
        time: None,
        limit: Some(limit + 1),
        reason: "preview".to_owned(),
        by: Some(caller.principal.clone()),
        dry_run: true,
        yes: true,
        ids: Vec::new(),
        tokens: BTreeMap::new(),
    };
    let mut steps = match body.what {
        PreviewWhat::Skip => letters::skip(&*app.ledger, &args).await?,
        _ => letters::resume(&*app.ledger, &args).await?,
    };
    let more = steps.len() > limit;
    steps.truncate(limit);
    let mut events = Vec::with_capacity(steps.len());
    for Wanted { what, target, refused, .. } in steps {
        // One that is gone by now is not there to be changed.
        if let Some(entry) = app.ledger.get(&target.identity, target.time).await? {
            events.push(previewed(app, what, entry, refused, false).await?);
        }
    }
    Ok(Json(PreviewAnswer { events, more, next: None }))
}

/// The tenant that a request means: the caller's, or for those who see all tenants, the one it names.
pub fn tenant_of(caller: &Caller, named: Option<&str>) -> Result<Option<Tenant>, Problem> {
    let Some(named) = named else { return Ok(caller.tenant.clone()) };
    let named = Tenant::new(named)?;
    if !caller.owns(Some(&named)) {
        caller.needs_all_tenants()?;
    }
    Ok(Some(named))
}

async fn previewed(
    app: &App,
    what: Intervention,
    entry: Entry,
    refused: Option<Error>,
    out_of_order: bool,
) -> Result<PreviewedEvent, Problem> {
    let request = Intervene {
        identity: entry.identity.clone(),
        time: Target::of(&entry).time,
        what,
        by: "preview".to_owned(),
        reason: "preview".to_owned(),
        out_of_order,
        token: Some(entry.token),
        dry_run: true,
    };
    let answer = match refused {
        Some(error) => Err(error),
        None => intervene(&*app.ledger, request).await,
    };
    let (changes, outcome) = match answer {
        Ok((what, step)) => (true, outcome(what, &step)),
        Err(error) => match stays(&error) {
            Some(why) => (false, format!("stays: {why}")),
            None => return Err(error.into()),
        },
    };
    let (aggregate, seq) = entry.order.as_ref().map(|(of, seq)| (of.to_string(), *seq)).unzip();
    Ok(PreviewedEvent {
        what: what.name(),
        id: entry.identity.id.to_string(),
        aggregate,
        seq,
        time: (app.ledger.settings().identity == IdentityRule::IdAndTime)
            .then(|| Target::of(&entry).time.unwrap_or_default().to_string()),
        token: entry.token.0,
        reason: entry.reason.as_deref().map(masked),
        changes,
        runs: changes && matches!(what, Intervention::Redrive | Intervention::Retry),
        outcome,
    })
}
