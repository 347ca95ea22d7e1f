//! Aggregates that wait, and for what.

use std::collections::BTreeMap;

use axum::extract::State;
use hapax::ledger::{Filter, State as Is};
use hapax::problem::Problem;
use hapax::{Aggregate, Tenant};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::Shared;
use super::auth::Operator;
use super::explain::visibility_of;
use super::extract::{Json, Params};
use super::groups::{entries, scopes_of};
use super::overview::OPEN_STATES;
use crate::explain::entries::look_without_audit;

/// How many aggregates are answered.
const AGGREGATES_MAX: usize = 50;

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
#[derive(Debug, Serialize, ToSchema)]
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
}

/// Aggregates of which something is not settled: what is parked behind what
#[utoipa::path(
    get, path = "/v1/waiting", tag = "letters", params(WaitingParams),
    responses((status = 200, description = "The aggregates", body = WaitingAnswer))
)]
async fn waiting(
    Operator(caller): Operator,
    State(app): State<Shared>,
    Params(params): Params<WaitingParams>,
) -> Result<Json<WaitingAnswer>, Problem> {
    if params.all_tenants {
        caller.needs_all_tenants()?;
    }
    let filter = Filter {
        tenant: (!params.all_tenants).then(|| caller.tenant.clone()),
        scopes: scopes_of(&caller),
        states: OPEN_STATES.to_vec(),
        ..Filter::default()
    };
    let (open, mut more) = entries(&app, &filter).await?;
    // How many of each are parked, and whether anything is dead: that needs an operator first.
    let mut found: BTreeMap<(Option<Tenant>, Aggregate), (usize, usize)> = BTreeMap::new();
    for entry in &open {
        let Some((aggregate, _)) = &entry.order else { continue };
        let counts = found.entry((entry.identity.tenant.clone(), aggregate.clone())).or_default();
        counts.0 += usize::from(entry.state == Is::Parked);
        counts.1 += usize::from(entry.state == Is::Dead);
    }
    let mut order: Vec<_> = found.into_iter().collect();
    order.sort_by_key(|(_, counts)| std::cmp::Reverse(*counts));
    more |= order.len() > AGGREGATES_MAX;
    let visibility = visibility_of(&caller);
    let mut aggregates = Vec::new();
    for ((tenant, aggregate), _) in order.into_iter().take(AGGREGATES_MAX) {
        let filter = Filter {
            aggregate: Some(aggregate.clone()),
            scopes: visibility.scopes.clone(),
            ..Filter::default()
        };
        let seen = look_without_audit(&*app.ledger, tenant.as_ref(), filter, &visibility).await?;
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
    Ok(Json(WaitingAnswer { aggregates, more }))
}
