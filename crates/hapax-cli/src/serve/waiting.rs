//! Aggregates that wait, and for what.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use hapax::ledger::{Entry, Filter, State as Is};
use hapax::problem::Problem;
use hapax::{Aggregate, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::Operator;
use super::extract::{Json, Params};
use super::groups::Question;
use super::overview::OPEN_STATES;
use super::recent::{Latest, RecentBy};
use crate::explain::entries::{Seen, open_entries, with_settled};

/// How many aggregates are answered.
const AGGREGATES_MAX: usize = 50;
/// How many open entries are looked at to choose them, and how many on a page.
const LOOKED_MAX: usize = 20_000;
const PAGE: usize = 500;
/// How long an answer waits for a look that is under way.
const PATIENCE: Duration = Duration::from_secs(10);

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(waiting))
}

/// Whose aggregates.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct WaitingParams {
    /// Those of all tenants.
    #[serde(default)]
    all_tenants: bool,
}

/// How a scope stands with an aggregate.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct WaitingAggregate {
    /// Whose data.
    tenant: Option<String>,
    /// Whose effect.
    scope: String,
    /// The aggregate.
    aggregate: String,
    /// The last seq that the journal has of it; none: it is not in this journal.
    last_seq: Option<u64>,
    /// The highest seq that took effect.
    done_up_to: Option<u64>,
    /// The lowest seq that is not settled.
    head: Option<u64>,
    /// Its state.
    head_state: Option<&'static str>,
    /// The seqs that are parked.
    waiting: Vec<u64>,
    /// All of that in words.
    what: String,
}

/// Aggregates that wait.
#[derive(Debug, Serialize, ToSchema)]
pub struct WaitingAnswer {
    /// Those with the most parked events first.
    aggregates: Vec<WaitingAggregate>,
    /// Whether there are more.
    more: bool,
    /// How long ago the ledger was asked, in seconds. One that takes long to answer is asked less often.
    age_s: f64,
}

/// What waits.
pub struct Found {
    aggregates: Vec<WaitingAggregate>,
    more: bool,
}

/// What was found lately. A look reads all settled entries of the aggregates that wait.
pub type Waits = RecentBy<Question, Found>;

/// Aggregates of which something is not settled: what is parked behind what
///
/// While a large ledger is looked through for the first time, the answer is 503.
#[utoipa::path(
    get, path = "/v1/waiting", tag = "letters", params(WaitingParams),
    responses((status = 200, description = "The aggregates", body = WaitingAnswer))
)]
async fn waiting(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<WaitingParams>,
) -> Result<Json<WaitingAnswer>, Problem> {
    let question = Question::of(&caller, params.all_tenants, None)?;
    let look = || find(Arc::clone(&app), question.filter(&OPEN_STATES));
    let latest = app.waits.of(&question).get(PATIENCE, &app.stopping, look).await;
    match latest.map_err(|error| Problem::of(&error))? {
        Latest::Counted(found) => Ok(Json(WaitingAnswer {
            aggregates: found.value.aggregates.clone(),
            more: found.value.more,
            age_s: found.age().as_secs_f64(),
        })),
        Latest::Counting(time) => Err(looking(time)),
    }
}

/// Nothing was found yet.
fn looking(time: Duration) -> Problem {
    let detail = format!("the ledger has been looked through for {} s so far; ask again", time.as_secs());
    let title = "Aggregates that wait are being looked for";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", title, detail).retry()
}

async fn find(app: Shared, filter: Filter) -> hapax::Result<Found> {
    let (open, is_cut) = entries(&app, &filter).await?;
    let mut found: BTreeMap<(Option<Tenant>, Aggregate), Vec<Entry>> = BTreeMap::new();
    for entry in open {
        let Some((aggregate, _)) = entry.order.clone() else { continue };
        found.entry((entry.identity.tenant.clone(), aggregate)).or_default().push(entry);
    }
    let mut order: Vec<_> = found.into_iter().collect();
    // How many of each are parked, and whether anything is dead: that needs an operator first.
    let count = |of: &[Entry], state| of.iter().filter(|entry| entry.state == state).count();
    order.sort_by_cached_key(|(_, of)| std::cmp::Reverse((count(of, Is::Parked), count(of, Is::Dead))));
    let mut more = is_cut || order.len() > AGGREGATES_MAX;
    let mut aggregates = Vec::new();
    for ((tenant, aggregate), open) in order.into_iter().take(AGGREGATES_MAX) {
        let filter = Filter {
            tenant: Some(tenant.clone()),
            // Those in which something is open; how far others are is not shown.
            scopes: Some(open.iter().map(|entry| entry.identity.scope.clone()).collect()),
            aggregate: Some(aggregate.clone()),
            ..Filter::default()
        };
        let open = if is_cut {
            let (open, cut) = open_entries(&*app.ledger, &filter).await?;
            more |= cut;
            open
        } else {
            open.into_iter().map(Seen::new).collect()
        };
        let seen = with_settled(&*app.ledger, &filter, open, 0).await?;
        let last = app.journal.head(tenant.as_ref(), &aggregate).await?;
        for queue in seen.queues().into_iter().filter(|queue| queue.head.is_some()) {
            aggregates.push(WaitingAggregate {
                tenant: tenant.as_ref().map(ToString::to_string),
                scope: queue.scope,
                aggregate: aggregate.to_string(),
                last_seq: (last > 0).then_some(last),
                done_up_to: queue.done_up_to,
                head: queue.head,
                head_state: queue.head_state,
                waiting: queue.waiting,
                what: queue.what,
            });
        }
    }
    Ok(Found { aggregates, more })
}

/// The entries that match, without their bytes, and whether there are more than are looked at.
async fn entries(app: &App, filter: &Filter) -> hapax::Result<(Vec<Entry>, bool)> {
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
