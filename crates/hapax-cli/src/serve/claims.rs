//! Claims over HTTP: the right to run an event.

use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use hapax::ledger::{Claim, Identity, LeaseSettings, Metadata, Mode, Nonce, Outcome};
use hapax::problem::Problem;
use hapax::{Error, Event, EventId, Fingerprint, Kind, Time};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use utoipa::{IntoParams, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::{App, Shared};
use super::auth::{Caller, Reader, Writer};
use super::extract::{Json, Params};

/// The longest lease.
const LEASE_MS_MAX: u64 = 86_400_000;

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(claim)).routes(routes!(claim_batch)).routes(routes!(processed))
}

/// What the claimer intends to do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ClaimMode {
    /// Run it under a lease, then settle it: at least once.
    #[default]
    Lease,
    /// Run it at most once: what fails or crashes after the claim is lost, and listed.
    AtMostOnce,
}

/// A request for the right to run an event.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimBody {
    /// Whose effect it is: the name of a handler.
    #[schema(min_length = 1, max_length = 255, example = "mailer")]
    scope: String,
    /// The event's id.
    #[schema(min_length = 1, max_length = 255, example = "order-17-paid")]
    id: String,
    /// The event's time (RFC 3339), where the ledger's identity includes it.
    #[schema(format = DateTime)]
    time: Option<String>,
    /// What the claimer intends to do.
    #[serde(default)]
    mode: ClaimMode,
    /// How long the lease lasts unless it is extended; at most once: within how long the end will be
    /// reported (unset: it will not).
    #[schema(minimum = 1, maximum = 86_400_000)]
    lease_ms: Option<u64>,
    /// A name for this attempt, unique in the world (best a UUID). The same claim sent again with it,
    /// because the answer was lost, gets the same token. Two workers must not share one. While an open
    /// transaction holds the event, a claim with a name is the problem `contended` and not `busy`: that
    /// transaction may be its own first try.
    #[schema(min_length = 1, max_length = 255)]
    request_id: Option<String>,
    /// The event's kind.
    #[schema(min_length = 1, max_length = 255)]
    kind: Option<String>,
    /// The event's content. The ledger keeps its fingerprint, to notice an id that is used again.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<Value>)]
    payload: Option<Box<RawValue>>,
    /// The fingerprint itself, instead of the content: 32 hexadecimal digits.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    fingerprint: Option<String>,
    /// JSON to store with the entry.
    #[schema(value_type = Option<Value>)]
    metadata: Option<Value>,
}

/// Many claims.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClaimBatchBody {
    /// A name for this attempt, as that of a single claim, for those of the claims that have none.
    #[schema(min_length = 1, max_length = 255)]
    request_id: Option<String>,
    /// The claims.
    claims: Vec<ClaimBody>,
}

/// What became of a claim. Only with `claimed` may the event run.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ClaimAnswer {
    /// `claimed`, `duplicate`, `busy`, `retry_later`, `wait`, `stale`, `parked`, `dead`, `mismatch` or
    /// `too_old`; in a batch also `error`.
    #[schema(example = "claimed")]
    outcome: &'static str,
    /// The event.
    id: String,
    /// The fencing token, if it is claimed. Settle with it; pass it to what dedups or fences.
    #[serde(skip_serializing_if = "Option::is_none")]
    token: Option<i64>,
    /// When the lease (of this claim, or of the one that is in the way) ends, by the ledger's clock.
    #[serde(skip_serializing_if = "Option::is_none")]
    until: Option<String>,
    /// How long the lease lasts from the moment at which the ledger granted it: count from when the claim was
    /// sent, by a clock of your own. None for an at-most-once claim whose end is not reported.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    /// Which run this is, counted from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
    /// Whether the last run's process died, so that this one should run alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    suspect: Option<bool>,
    /// The event's state before.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<&'static str>,
    /// Since when it has been in that state; or when a retry is due.
    #[serde(skip_serializing_if = "Option::is_none")]
    at: Option<String>,
    /// How many runs it has had.
    #[serde(skip_serializing_if = "Option::is_none")]
    attempts: Option<u32>,
    /// The seq of its aggregate that is in the way, or the last one done.
    #[serde(skip_serializing_if = "Option::is_none")]
    seq: Option<u64>,
    /// Why this claim of a batch failed; the others did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<super::openapi::ProblemBody>)]
    problem: Option<Value>,
}

/// What became of many claims.
#[derive(Debug, Serialize, ToSchema)]
pub struct ClaimBatchAnswer {
    /// One for each claim, in their order.
    outcomes: Vec<ClaimAnswer>,
}

/// Claims an event
///
/// Whatever the outcome, the answer is 200: a duplicate is not an error. Only with `claimed` run the event;
/// then report `done` or `fail` with the token.
#[utoipa::path(
    post, path = "/v1/claims", tag = "claims", request_body = ClaimBody,
    responses((status = 200, description = "The outcome", body = ClaimAnswer))
)]
async fn claim(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<ClaimBody>,
) -> Result<Json<ClaimAnswer>, Problem> {
    let (id, named) = (body.id.clone(), body.request_id.is_some());
    let claim = prepared(&app, &caller, body, None)?;
    let lease = lease_of(&claim);
    let outcome = one(app.guard.claim_remote(vec![claim]).await.pop())?;
    decided(named, &outcome)?;
    Ok(Json(answer(id, &outcome, lease)))
}

/// Claims many events, each with its own outcome
///
/// A claim that fails, or that cannot be decided yet (`contended`), fails alone, with the outcome `error` and
/// a problem: decide by its `code`, as for an answer. Only if the server failed at every claim does the request
/// fail. An event that is there twice is claimed once.
#[utoipa::path(
    post, path = "/v1/claims/batch", tag = "claims", request_body = ClaimBatchBody,
    responses((status = 200, description = "The outcomes", body = ClaimBatchAnswer))
)]
async fn claim_batch(
    Writer(caller): Writer,
    State(app): State<Shared>,
    Json(body): Json<ClaimBatchBody>,
) -> Result<Json<ClaimBatchAnswer>, Problem> {
    check_batch(&app, "claims", body.claims.len())?;
    if let Some(request_id) = &body.request_id {
        check_request_id(request_id)?;
    }
    let mut names = Vec::with_capacity(body.claims.len());
    let mut refused = Vec::with_capacity(body.claims.len());
    let mut claims = Vec::with_capacity(body.claims.len());
    let mut leases = Vec::with_capacity(body.claims.len());
    for (at, claim) in body.claims.into_iter().enumerate() {
        names.push((claim.id.clone(), claim.request_id.is_some() || body.request_id.is_some()));
        // The place makes nonces differ: one event may be there twice, and only one of the two runs it.
        let of_batch = body.request_id.as_ref().map(|request_id| format!("{at}\0{request_id}"));
        match prepared(&app, &caller, claim, of_batch.as_deref()) {
            Ok(claim) => {
                refused.push(None);
                leases.push(lease_of(&claim));
                claims.push(claim);
            }
            Err(problem) => refused.push(Some(problem)),
        }
    }
    let mut outcomes = app.guard.claim_remote(claims).await.into_iter();
    let mut leases = leases.into_iter();
    let mut answers = Vec::with_capacity(names.len());
    for ((id, named), refused) in names.into_iter().zip(refused) {
        let lease = if refused.is_none() { leases.next().flatten() } else { None };
        let outcome = refused.map_or_else(|| one(outcomes.next()), Err);
        let outcome = outcome.and_then(|outcome| decided(named, &outcome).map(|()| outcome));
        answers.push(match outcome {
            Ok(outcome) => Ok(answer(id, &outcome, lease)),
            Err(problem) => Err((id, problem)),
        });
    }
    let outcomes = each(answers, |id, problem| ClaimAnswer {
        outcome: "error",
        id,
        problem: Some(problem.json()),
        ..ClaimAnswer::default()
    })?;
    Ok(Json(ClaimBatchAnswer { outcomes }))
}

/// The answers to a batch, in which an item that failed has its own problem. The request as a whole fails only
/// if the server failed at every item: a token that was granted, or an end that was stored, is never hidden by
/// the failure of a neighbour.
pub(super) fn each<T>(
    answers: Vec<Result<T, (String, Problem)>>,
    failed: impl Fn(String, &Problem) -> T,
) -> Result<Vec<T>, Problem> {
    if let Some(problem) = failed_whole(&answers) {
        return Err(problem);
    }
    let answers = answers.into_iter();
    Ok(answers.map(|answer| answer.unwrap_or_else(|(id, problem)| failed(id, &problem))).collect())
}

/// The problem of a batch at every item of which the server failed: one that passes, if there is one.
fn failed_whole<T>(answers: &[Result<T, (String, Problem)>]) -> Option<Problem> {
    let mut found: Option<&Problem> = None;
    for answer in answers {
        let (_, problem) = answer.as_ref().err().filter(|(_, problem)| problem.status().is_server_error())?;
        if found.is_none_or(|found| problem.is_retryable() && !found.is_retryable()) {
            found = Some(problem);
        }
    }
    found.cloned()
}

pub(super) fn one<T>(answer: Option<hapax::Result<T>>) -> Result<T, Problem> {
    Ok(answer.unwrap_or_else(|| Err(Error::Corrupt("a batch had fewer answers than claims".into())))?)
}

/// A claim with a name may have been sent before, and the open transaction that holds its event may be
/// its own first try. "Busy" would let its sender forget a claim that may yet be granted.
fn decided(named: bool, outcome: &Outcome) -> Result<(), Problem> {
    if !named || !matches!(outcome, Outcome::Busy { until: None, .. }) {
        return Ok(());
    }
    let detail = "an open transaction holds the event, and it may be an earlier attempt of this very claim; \
                  send the same claim again";
    Err(Problem::new(StatusCode::SERVICE_UNAVAILABLE, "contended", "A database is busy", detail).retry())
}

pub(super) fn check_batch(app: &App, what: &'static str, count: usize) -> Result<(), Problem> {
    let max = app.config.serve.batch_max;
    if (1..=max).contains(&count) {
        return Ok(());
    }
    Err(Error::invalid(what, format!("there are {count}; 1 to {max} are allowed (serve.batch_max)")).into())
}

fn check_request_id(text: &str) -> Result<(), Problem> {
    let count = text.chars().count();
    if !(1..=255).contains(&count) || text.chars().any(char::is_control) {
        let message = format!("it has {count} characters; it must have 1 to 255, and no control characters");
        return Err(Error::invalid("request_id", message).into());
    }
    Ok(())
}

/// The claim that a request asks for.
fn prepared(app: &App, caller: &Caller, body: ClaimBody, of_batch: Option<&str>) -> Result<Claim, Problem> {
    let scope = caller.scope(&body.scope)?;
    let lease = lease(body.lease_ms)?;
    let mode = match body.mode {
        ClaimMode::Lease => Mode::Lease(LeaseSettings {
            lease: lease.unwrap_or(app.config.lease.timeout),
            attempts_max: app.config.attempts_max(&scope)?,
            alone: true,
        }),
        ClaimMode::AtMostOnce => Mode::Once { track: lease },
    };
    let mut event = Event::new(EventId::new(&body.id)?);
    event.tenant.clone_from(&caller.tenant);
    event.time = time(body.time.as_deref())?;
    event.kind = body.kind.as_deref().map(Kind::new).transpose()?;
    if let Some(payload) = &body.payload {
        event.payload = payload.get().to_owned().into();
    }
    let mut claim = Claim::of(scope, &event, mode);
    if let Some(fingerprint) = &body.fingerprint {
        if body.payload.is_some() {
            return Err(Error::invalid("fingerprint", "send either this or a payload, not both").into());
        }
        claim.fingerprint = Some(fingerprint_of(fingerprint)?);
    }
    claim.metadata = body.metadata.map(Metadata::try_from).transpose()?;
    if let Some(request_id) = &body.request_id {
        check_request_id(request_id)?;
        claim.nonce = nonce(&caller.principal, request_id);
    } else if let Some(request_id) = of_batch {
        claim.nonce = nonce(&caller.principal, request_id);
    }
    Ok(claim)
}

/// The nonce of a named attempt: a caller that repeats it gets its own claim again.
fn nonce(principal: &str, request_id: &str) -> Nonce {
    let text = format!("claim\0{principal}\0{request_id}"); // no JSON, so it is hashed as it is
    let Fingerprint(hash) = Fingerprint::of(None, None, None, text.as_bytes());
    let mut half = [0; 8];
    half.copy_from_slice(&hash[..8]);
    Nonce(i64::from_be_bytes(half))
}

fn fingerprint_of(text: &str) -> Result<Fingerprint, Problem> {
    let bad = || Error::invalid("fingerprint", "it must be 32 hexadecimal digits");
    if text.len() != 32 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return Err(bad().into());
    }
    Ok(Fingerprint(u128::from_str_radix(text, 16).map_err(|_| bad())?.to_be_bytes()))
}

pub(super) fn lease(ms: Option<u64>) -> Result<Option<Duration>, Problem> {
    match ms {
        Some(ms) if !(1..=LEASE_MS_MAX).contains(&ms) => {
            Err(Error::invalid("lease_ms", format!("it is {ms}; it must be 1 to {LEASE_MS_MAX} (a day)"))
                .into())
        }
        ms => Ok(ms.map(Duration::from_millis)),
    }
}

pub(super) fn time(text: Option<&str>) -> Result<Option<Time>, Problem> {
    Ok(text.map(Time::parse).transpose()?)
}

/// How long a claim's lease lasts.
fn lease_of(claim: &Claim) -> Option<Duration> {
    match claim.mode {
        Mode::Lease(settings) => Some(settings.lease),
        Mode::Once { track } => track,
        _ => None,
    }
}

/// A member that is there, whatever it is: `null` is content too.
pub(super) fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Box<RawValue>>, D::Error> {
    Box::<RawValue>::deserialize(from).map(Some)
}

fn answer(id: String, outcome: &Outcome, lease: Option<Duration>) -> ClaimAnswer {
    let mut answer = ClaimAnswer { outcome: outcome.name(), id, ..ClaimAnswer::default() };
    match outcome {
        Outcome::First(grant) => {
            answer.token = Some(grant.token.0);
            answer.until = Some(grant.until.to_string());
            answer.lease_ms = lease.map(|lease| u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
            answer.attempt = Some(grant.attempt);
            answer.suspect = Some(grant.suspect);
        }
        Outcome::Duplicate(prior) | Outcome::Mismatch(prior) => {
            answer.state = Some(prior.state.name());
            answer.at = Some(prior.at.to_string());
        }
        Outcome::Busy { until, .. } => answer.until = until.map(|until| until.to_string()),
        Outcome::RetryLater { at, attempts } | Outcome::Dead { at, attempts } => {
            answer.at = Some(at.to_string());
            answer.attempts = Some(*attempts);
        }
        Outcome::Wait { on } => answer.seq = *on,
        Outcome::Stale { last } => answer.seq = Some(*last),
        Outcome::Parked { behind } => answer.seq = Some(*behind),
        Outcome::TooOld { .. } => {}
    }
    answer
}

/// Which event.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub struct ProcessedParams {
    /// Whose effect it is.
    #[param(min_length = 1, max_length = 255)]
    scope: String,
    /// The event's id.
    #[param(min_length = 1, max_length = 255)]
    id: String,
    /// The event's time, where the ledger's identity includes it.
    time: Option<String>,
}

/// What the ledger knows about an event.
#[derive(Debug, Serialize, ToSchema)]
pub struct ProcessedAnswer {
    /// Whether it took effect.
    processed: bool,
    /// Its state; none if the ledger does not know it.
    #[schema(example = "done")]
    state: Option<&'static str>,
    /// Since when; or when a retry is due, or a lease ends.
    at: Option<String>,
    /// How many runs it has had.
    attempts: Option<u32>,
}

/// Whether an event took effect
///
/// This only reads. To decide whether to run something, claim it.
#[utoipa::path(
    get, path = "/v1/processed", tag = "claims", params(ProcessedParams),
    responses((status = 200, description = "What the ledger knows", body = ProcessedAnswer))
)]
async fn processed(
    Reader(caller): Reader,
    State(app): State<Shared>,
    Params(params): Params<ProcessedParams>,
) -> Result<Json<ProcessedAnswer>, Problem> {
    use hapax::ledger::State as Is;
    let id = EventId::new(&params.id)?;
    let identity = Identity { tenant: caller.tenant.clone(), scope: caller.scope(&params.scope)?, id };
    let entry = app.ledger.get(&identity, time(params.time.as_deref())?).await?;
    Ok(Json(ProcessedAnswer {
        processed: entry.as_ref().is_some_and(|entry| matches!(entry.state, Is::Done | Is::Finished)),
        state: entry.as_ref().map(|entry| entry.state.name()),
        at: entry.as_ref().map(|entry| entry.at.to_string()),
        attempts: entry.as_ref().map(|entry| entry.attempts),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(error: Error) -> Result<u32, (String, Problem)> {
        Err(("e".to_owned(), error.into()))
    }

    #[test]
    fn t410_a_batch_fails_only_if_the_server_failed_at_every_line() {
        let away = || failed(Error::unavailable("the ledger", "it is away"));
        let corrupt = || failed(Error::Corrupt("a row".into()));
        let invalid = || failed(Error::invalid("id", "it is blank"));
        let line = |_: String, problem: &Problem| u32::from(problem.status().as_u16());
        assert_eq!(each(vec![Ok(1), away(), corrupt()], line).unwrap(), [1, 503, 500]);
        assert_eq!(each(vec![invalid(), away()], line).unwrap(), [400, 503]);
        assert_eq!(each(vec![invalid()], line).unwrap(), [400]);
        // What passes is worth another try.
        for lines in [vec![corrupt(), away(), away()], vec![away(), corrupt()]] {
            assert_eq!(each(lines, line).unwrap_err().code(), "unavailable");
        }
        assert_eq!(each(vec![corrupt(), corrupt()], line).unwrap_err().code(), "corrupt");
    }
}
