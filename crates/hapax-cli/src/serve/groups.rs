//! Dead letters by their reason, and what a redrive of them would do.

use std::collections::BTreeMap;

use axum::extract::State;
use hapax::access::Scopes;
use hapax::ledger::{Entry, Filter, Identity, IdentityRule, Intervene, Intervention, State as Is};
use hapax::problem::Problem;
use hapax::{Aggregate, Error, Scope, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Operator};
use super::extract::{Json, PAGE_MAX, Params, limit};
use crate::explain::masked;
use crate::ledger::act::{ChangeArgs, Target, Wanted, intervene, outcome, stays};
use crate::ledger::look::WhichArgs;
use crate::letters;

/// How many dead letters are looked at, and how many on a page.
const LOOKED_MAX: usize = 20_000;
const PAGE: usize = 500;
/// How many groups are answered, and how many ids name each.
const GROUPS_MAX: usize = 200;
const IDS_MAX: usize = 3;

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
#[derive(Debug, Serialize, ToSchema)]
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

/// Dead letters by reason.
#[derive(Debug, Serialize, ToSchema)]
pub struct GroupsAnswer {
    /// The groups, the largest first.
    groups: Vec<DeadGroup>,
    /// How many dead letters were looked at.
    looked: usize,
    /// Whether there are more, which were not looked at, or more groups.
    more: bool,
}

/// Dead letters by reason, the most frequent first
#[utoipa::path(
    get, path = "/v1/dead/groups", tag = "letters", params(GroupsParams),
    responses((status = 200, description = "The groups", body = GroupsAnswer))
)]
async fn groups(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<GroupsParams>,
) -> Result<Json<GroupsAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let filter = Filter {
        tenant: (!params.all_tenants).then(|| caller.tenant.clone()),
        scope: params.scope.as_deref().map(|scope| caller.scope(scope)).transpose()?,
        scopes: scopes_of(&caller),
        states: vec![Is::Dead],
        ..Filter::default()
    };
    let (entries, mut more) = entries(&app, &filter).await?;
    let looked = entries.len();
    let mut found: BTreeMap<(Option<Tenant>, Scope, String), Vec<Entry>> = BTreeMap::new();
    for entry in entries {
        let Identity { tenant, scope, .. } = entry.identity.clone();
        found.entry((tenant, scope, pattern(entry.reason.as_deref()))).or_default().push(entry);
    }
    let mut groups: Vec<_> = found.into_iter().map(|(key, of)| group(key, of)).collect();
    groups.sort_by(|a, b| b.count.cmp(&a.count).then_with(|| b.last_at.cmp(&a.last_at)));
    more |= groups.len() > GROUPS_MAX;
    groups.truncate(GROUPS_MAX);
    Ok(Json(GroupsAnswer { groups, looked, more }))
}

/// The scopes to which a caller is bound, for a filter.
pub fn scopes_of(caller: &Caller) -> Option<std::collections::BTreeSet<Scope>> {
    match caller.scopes() {
        Scopes::All => None,
        Scopes::Only(scopes) => Some(scopes.clone()),
    }
}

/// The entries that match, without their bytes, and whether there are more than are looked at.
pub async fn entries(app: &App, filter: &Filter) -> hapax::Result<(Vec<Entry>, bool)> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let page = app.ledger.list(filter, after.as_ref(), PAGE).await?;
        for mut entry in page.entries {
            entry.row.body = None;
            found.push(entry);
        }
        after = page.next;
        if after.is_none() || found.len() >= LOOKED_MAX {
            return Ok((found, after.is_some()));
        }
    }
}

fn group((tenant, scope, pattern): (Option<Tenant>, Scope, String), mut of: Vec<Entry>) -> DeadGroup {
    of.sort_by_key(|entry| std::cmp::Reverse(entry.at));
    let at = |entry: Option<&Entry>| entry.map_or_else(String::new, |entry| entry.at.to_string());
    DeadGroup {
        tenant: tenant.map(|tenant| tenant.to_string()),
        scope: scope.to_string(),
        pattern,
        reason: of.first().and_then(|entry| entry.reason.as_deref()).map(masked).unwrap_or_default(),
        count: of.len() as u64,
        first_at: at(of.last()),
        last_at: at(of.first()),
        ids: of.iter().take(IDS_MAX).map(|entry| entry.identity.id.to_string()).collect(),
    }
}

/// A reason without secrets, and without what differs from event to event: words with digits become `#`, but not
/// numbers of up to three digits, such as the status of an answer.
fn pattern(reason: Option<&str>) -> String {
    let reason = masked(reason.unwrap_or("no reason was given"));
    let is_word = |c: char| c.is_alphanumeric() || c == '-' || c == '_';
    let (mut pattern, mut rest) = (String::new(), reason.as_str());
    while let Some(first) = rest.chars().next() {
        let end = rest.find(|c| is_word(c) != is_word(first)).unwrap_or(rest.len());
        let (part, after) = rest.split_at(end);
        let has_digit = part.chars().any(|c| c.is_ascii_digit());
        let is_short_number = part.len() <= 3 && part.chars().all(|c| c.is_ascii_digit());
        pattern.push_str(if is_word(first) && has_digit && !is_short_number { "#" } else { part });
        rest = after;
    }
    pattern
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
    let (mut found, mut more) = entries(&app, &filter).await?;
    if let Some(wanted) = &body.pattern {
        found.retain(|entry| pattern(entry.reason.as_deref()) == *wanted);
    }
    // As the command orders them: by aggregate and seq.
    found.sort_by(|a, b| (&a.order, a.first_at, &a.identity.id).cmp(&(&b.order, b.first_at, &b.identity.id)));
    more |= found.len() > limit;
    found.truncate(limit);
    let mut events = Vec::with_capacity(found.len());
    for entry in found {
        events.push(previewed(&app, what, entry, None, body.out_of_order).await?);
    }
    Ok(Json(PreviewAnswer { events, more }))
}

/// The same for parked events.
async fn parked(
    app: &App,
    caller: &Caller,
    body: &PreviewBody,
    limit: usize,
) -> Result<Json<PreviewAnswer>, Problem> {
    if body.out_of_order || body.pattern.is_some() {
        return Err(Error::invalid("what", "out_of_order and pattern are only for dead letters").into());
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
    for Wanted { what, target, refused } in steps {
        // One that is gone by now is not there to be changed.
        if let Some(entry) = app.ledger.get(&target.identity, target.time).await? {
            events.push(previewed(app, what, entry, refused, false).await?);
        }
    }
    Ok(Json(PreviewAnswer { events, more }))
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

#[cfg(test)]
mod tests {
    use super::pattern;

    #[test]
    fn reasons_that_differ_in_ids_are_one_pattern_and_statuses_are_not() {
        assert_eq!(pattern(Some("order-17-paid: HTTP 500")), "#: HTTP 500");
        assert_eq!(pattern(Some("order-18-paid: HTTP 500")), "#: HTTP 500");
        assert_ne!(pattern(Some("HTTP 404")), pattern(Some("HTTP 500")));
        assert_eq!(
            pattern(Some("card 0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10 of é1 at 12345")),
            "card # of # at #"
        );
        assert_eq!(pattern(None), "no reason was given");
        assert_eq!(pattern(Some("")), "");
        assert_eq!(pattern(Some("401: Authorization: Bearer s3cret")), "401: Authorization: ***");
    }
}
