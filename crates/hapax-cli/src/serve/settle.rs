//! How runs ended: done, failed, released; and leases that are extended.

use axum::extract::State;
use hapax::guard::{RemoteEnd, RemoteRun};
use hapax::ledger::{Identity, Metadata, Token};
use hapax::problem::Problem;
use hapax::{Error, EventId};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Writer};
use super::claims::{check_batch, each, lease, one, present, time};
use super::extract::Json;
use super::openapi::ProblemBody;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(done))
        .routes(routes!(done_batch))
        .routes(routes!(fail))
        .routes(routes!(extend))
        .routes(routes!(release))
}

/// The body of a request about a run: what names the run, and more. (`flatten` does not go with
/// `deny_unknown_fields`.)
macro_rules! run_body {
    ($(#[$attr:meta])* pub struct $name:ident { $($(#[$field_attr:meta])* $field:ident: $type:ty,)* }) => {
        $(#[$attr])*
        #[derive(Debug, Deserialize, ToSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            /// The scope of the claim.
            #[schema(min_length = 1, max_length = 255)]
            scope: String,
            /// The event.
            #[schema(min_length = 1, max_length = 255)]
            id: String,
            /// The event's time, as in the claim.
            #[schema(format = DateTime)]
            time: Option<String>,
            /// The token of the claim.
            token: i64,
            $($(#[$field_attr])* $field: $type,)*
        }

        impl $name {
            /// The run that a caller means.
            fn run(&self, caller: &Caller) -> Result<RemoteRun, Problem> {
                let (tenant, scope) = (caller.tenant.clone(), caller.scope(&self.scope)?);
                let identity = Identity { tenant, scope, id: EventId::new(&self.id)? };
                Ok(RemoteRun { identity, time: time(self.time.as_deref())?, token: Token(self.token) })
            }
        }
    };
}

run_body! {
    /// A run that took effect.
    pub struct DoneBody {
        /// JSON to store, replacing that of the claim.
        #[schema(value_type = Option<Value>)]
        metadata: Option<Value>,
    }
}

/// Many runs that took effect.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DoneBatchBody {
    /// The runs.
    claims: Vec<DoneBody>,
}

/// What comes after a failure.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum AfterFailure {
    /// It runs again after a pause, until its attempts are used up.
    #[default]
    Retry,
    /// It is dead: only an operator runs it again.
    Dead,
}

run_body! {
    /// A run that failed.
    pub struct FailBody {
        /// Why it failed.
        #[schema(min_length = 1)]
        reason: String,
        /// What comes next.
        #[serde(default)]
        then: AfterFailure,
        /// The event's content, kept with the dead letter so that it can be run again. Not for an at-most-once
        /// claim, which never runs again.
        #[serde(default, deserialize_with = "present")]
        #[schema(value_type = Option<Value>)]
        payload: Option<Box<RawValue>>,
    }
}

run_body! {
    /// A lease to extend.
    pub struct ExtendBody {
        /// How long it lasts from now.
        #[schema(minimum = 1, maximum = 86_400_000)]
        lease_ms: Option<u64>,
    }
}

run_body! {
    /// A lease to give back.
    pub struct ReleaseBody {
    }
}

/// What a run was settled as.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct SettledAnswer {
    /// The event.
    id: String,
    /// Its state now; in a batch `error` if it was not settled.
    #[schema(example = "done")]
    state: &'static str,
    /// Since when; or when a retry is due, or a lease ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// Why this one of a batch was not settled; the others were.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<ProblemBody>)]
    problem: Option<Value>,
}

/// What many runs were settled as.
#[derive(Debug, Serialize, ToSchema)]
pub struct SettledBatchAnswer {
    /// One for each run, in their order.
    outcomes: Vec<SettledAnswer>,
}

async fn settle(app: &App, run: &RemoteRun, end: RemoteEnd) -> Result<Json<SettledAnswer>, Problem> {
    let settled = app.guard.settle_remote(run, end).await?;
    Ok(Json(SettledAnswer {
        id: run.identity.id.to_string(),
        state: settled.state.name(),
        at: Some(settled.at.to_string()),
        problem: None,
    }))
}

/// Settles a run as done
///
/// May be repeated with the same token.
#[utoipa::path(
    post, path = "/v1/claims/done", tag = "claims", request_body = DoneBody,
    responses(
        (status = 200, description = "It is done", body = SettledAnswer),
        (status = 409, description = "The token does not hold the event, or its state does not permit this: `fenced`"),
    )
)]
async fn done(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<DoneBody>,
) -> Result<Json<SettledAnswer>, Problem> {
    let run = body.run(&caller)?;
    let metadata = body.metadata.map(Metadata::try_from).transpose()?;
    settle(&app, &run, RemoteEnd::Done { metadata }).await
}

/// Settles many runs as done, each with its own outcome
///
/// A run that is not settled fails alone, with the state `error` and a problem: decide by its `code`, as for an
/// answer. Only if the server failed at every run does the request fail.
#[utoipa::path(
    post, path = "/v1/claims/done/batch", tag = "claims", request_body = DoneBatchBody,
    responses((status = 200, description = "The outcomes", body = SettledBatchAnswer))
)]
async fn done_batch(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<DoneBatchBody>,
) -> Result<Json<SettledBatchAnswer>, Problem> {
    check_batch(&app, "claims", body.claims.len())?;
    let mut refused = Vec::with_capacity(body.claims.len());
    let (mut ids, mut runs) = (Vec::new(), Vec::new());
    for claim in body.claims {
        let run = claim.run(&caller);
        let metadata = claim.metadata.map(Metadata::try_from).transpose();
        ids.push(claim.id);
        match run.and_then(|run| Ok((run, metadata?))) {
            Ok(run) => {
                runs.push(run);
                refused.push(None);
            }
            Err(problem) => refused.push(Some(problem)),
        }
    }
    let mut settled = app.guard.done_remote(runs).await.into_iter();
    let mut outcomes = Vec::with_capacity(ids.len());
    for (id, refused) in ids.into_iter().zip(refused) {
        outcomes.push(match refused.map_or_else(|| one(settled.next()), Err) {
            Ok(settled) => {
                let at = Some(settled.at.to_string());
                Ok(SettledAnswer { id, state: settled.state.name(), at, problem: None })
            }
            Err(problem) => Err((id, problem)),
        });
    }
    let outcomes = each(outcomes, |id, problem| SettledAnswer {
        id,
        state: "error",
        problem: Some(problem.json()),
        ..SettledAnswer::default()
    })?;
    Ok(Json(SettledBatchAnswer { outcomes }))
}

/// Settles a run as failed
///
/// A leased event runs again after a pause, or is dead; an at-most-once event is lost, and listed.
#[utoipa::path(
    post, path = "/v1/claims/fail", tag = "claims", request_body = FailBody,
    responses(
        (status = 200, description = "It is recorded", body = SettledAnswer),
        (status = 409, description = "The token does not hold the event, or its state does not permit this: `fenced`"),
    )
)]
async fn fail(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<FailBody>,
) -> Result<Json<SettledAnswer>, Problem> {
    let run = body.run(&caller)?;
    if body.reason.trim().is_empty() {
        return Err(Error::invalid("reason", "it is blank; say why the run failed").into());
    }
    let record = body.payload.map(|payload| hapax::event::Record {
        payload: Some(payload.get().to_owned().into()),
        ..hapax::event::Record::default()
    });
    let end = match body.then {
        AfterFailure::Retry => {
            // As in the claim: a scope may have a limit of its own.
            let attempts_max = Some(app.config.attempts_max(&run.identity.scope)?);
            RemoteEnd::Failed { reason: body.reason, body: record, attempts_max }
        }
        AfterFailure::Dead => RemoteEnd::Dead { reason: body.reason, body: record },
    };
    settle(&app, &run, end).await
}

/// Extends a lease
#[utoipa::path(
    post, path = "/v1/claims/extend", tag = "claims", request_body = ExtendBody,
    responses(
        (status = 200, description = "It is extended", body = SettledAnswer),
        (status = 409, description = "The token does not hold the event, or its state does not permit this: `fenced`"),
    )
)]
async fn extend(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<ExtendBody>,
) -> Result<Json<SettledAnswer>, Problem> {
    let run = body.run(&caller)?;
    let lease = lease(body.lease_ms)?.unwrap_or(app.config.lease.timeout);
    let until = app.guard.extend_remote(&run, lease).await?;
    let id = run.identity.id.to_string();
    Ok(Json(SettledAnswer { id, state: "leased", at: Some(until.to_string()), problem: None }))
}

/// Gives a claim back, without having run the event
#[utoipa::path(
    post, path = "/v1/claims/release", tag = "claims", request_body = ReleaseBody,
    responses(
        (status = 200, description = "The event may be claimed again", body = SettledAnswer),
        (status = 409, description = "The token does not hold the event, or its state does not permit this: `fenced`"),
    )
)]
async fn release(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<ReleaseBody>,
) -> Result<Json<SettledAnswer>, Problem> {
    let run = body.run(&caller)?;
    settle(&app, &run, RemoteEnd::Released).await
}
