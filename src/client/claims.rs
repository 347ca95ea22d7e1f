//! Claims over HTTP: the right to run an event, and how its run ended.

use std::time::Duration;

use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use uuid::Uuid;

use super::Client;
use super::data::parse;
use super::error::{Error, Result};
use super::exchange::{Call, Reply};
use crate::clock::Time;
use crate::id::{EventId, Scope};

/// What a settling has besides payload and reason, at most: a scope, an id, a time.
const ENVELOPE_BYTES: usize = 4096;

/// A request for the right to run an event, with a name of its own: repeated because an answer was
/// lost, it gets the same token.
///
/// ```
/// use hapax::client::ClaimRequest;
/// use std::time::Duration;
/// let claim = ClaimRequest::new("mailer", "order-17-paid")?.lease(Duration::from_secs(60));
/// # Ok::<(), hapax::client::Error>(())
/// ```
#[derive(Debug, Clone, Serialize)]
pub struct ClaimRequest {
    scope: String,
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    mode: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    request_id: Uuid,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<Box<RawValue>>,
}

fn raw(payload: impl Serialize) -> Result<Box<RawValue>> {
    to_raw_value(&payload).map_err(|error| Error::invalid("the payload", format!("it is not JSON: {error}")))
}

impl ClaimRequest {
    /// A claim under a lease: at least once.
    pub fn new(scope: impl AsRef<str>, id: impl AsRef<str>) -> Result<Self> {
        let (scope, id) = (Scope::new(scope.as_ref())?, EventId::new(id)?);
        Ok(ClaimRequest {
            scope: scope.as_str().to_owned(),
            id: id.as_str().into_owned(),
            time: None,
            mode: "lease",
            lease_ms: None,
            request_id: Uuid::new_v4(),
            payload: None,
        })
    }

    /// How long the lease lasts unless it is extended; the server's default otherwise.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease_ms = Some(u64::try_from(lease.as_millis()).unwrap_or(u64::MAX));
        self
    }

    /// Runs at most once: what fails or crashes after the claim is lost, and listed. A
    /// [`lease`](ClaimRequest::lease) then says within how long the end will be reported.
    #[must_use]
    pub fn at_most_once(mut self) -> Self {
        self.mode = "at_most_once";
        self
    }

    /// The event's time, where the ledger's identity includes it.
    #[must_use]
    pub fn time(mut self, time: Time) -> Self {
        self.time = Some(time.to_string());
        self
    }

    /// The event's content. The ledger keeps its fingerprint, to notice an id that is used again. If
    /// the run [fails](Claim::fail) or is [dead](Claim::dead), the content is kept with it.
    pub fn payload(mut self, payload: impl Serialize) -> Result<Self> {
        self.payload = Some(raw(payload)?);
        Ok(self)
    }
}

/// What became of a claim. Only with `Claimed` may the event run.
#[derive(Debug, Clone)]
#[non_exhaustive]
#[must_use = "only a claimed event may run"]
pub enum ClaimOutcome {
    /// Run it, then settle it.
    Claimed(Box<Claim>),
    /// It took effect before, or its run was recorded as ended.
    Duplicate,
    /// Somebody else runs it.
    Busy {
        /// When that lease ends, by the ledger's clock, if it is known.
        until: Option<Time>,
    },
    /// It failed and is not due yet.
    RetryLater {
        /// When it is due, by the ledger's clock.
        at: Option<Time>,
    },
    /// Another event of its aggregate comes first.
    Wait,
    /// A later event of its aggregate is done.
    Stale,
    /// It waits behind something unresolved.
    Parked,
    /// It has failed for good; only an operator runs it again.
    Dead,
    /// Its id was used before for another content.
    Mismatch,
    /// It is older than what the ledger remembers.
    TooOld,
}

/// An event that is this caller's to run.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Claim {
    /// The fencing token: pass it to what dedups or fences.
    pub token: i64,
    /// Which run this is, counted from 1.
    pub attempt: u32,
    /// Whether the last run's process died.
    pub suspect: bool,
    /// When the lease ends, by the ledger's clock.
    pub until: Option<Time>,
    client: Client,
    run: Run,
    payload: Option<Box<RawValue>>,
}

/// What names a run.
#[derive(Debug, Clone, Serialize)]
struct Run {
    scope: String,
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    token: i64,
}

#[derive(Serialize)]
struct Settling<'r> {
    #[serde(flatten)]
    run: &'r Run,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'r str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    then: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'r RawValue>,
}

#[derive(Deserialize)]
struct Answer {
    outcome: String,
    token: Option<i64>,
    until: Option<String>,
    attempt: Option<u32>,
    #[serde(default)]
    suspect: bool,
    at: Option<String>,
}

#[derive(Deserialize)]
struct Settled {
    #[serde(rename = "state")]
    _state: String,
    at: Option<String>,
}

fn time(text: Option<&str>) -> std::result::Result<Option<Time>, String> {
    text.map(Time::parse).transpose().map_err(|error| error.to_string())
}

impl Client {
    /// Asks for the right to run an event.
    pub async fn claim(&self, request: &ClaimRequest) -> Result<ClaimOutcome> {
        let what = format!("claiming {:?} for {:?}", request.id, request.scope);
        let call = self.post(what, "", request)?;
        self.call(&call, |reply| self.outcome(request, reply)).await
    }

    fn outcome(&self, request: &ClaimRequest, reply: &Reply) -> std::result::Result<ClaimOutcome, String> {
        let answer: Answer = parse(reply)?;
        let (until, at) = (time(answer.until.as_deref())?, time(answer.at.as_deref())?);
        Ok(match answer.outcome.as_str() {
            "claimed" => {
                let token = answer.token.ok_or("the answer has no token")?;
                let (scope, id) = (request.scope.clone(), request.id.clone());
                let run = Run { scope, id, time: request.time.clone(), token };
                let (attempt, suspect) = (answer.attempt.unwrap_or(1), answer.suspect);
                let (client, payload) = (self.clone(), request.payload.clone());
                let claim = Claim { token, attempt, suspect, until, client, run, payload };
                ClaimOutcome::Claimed(Box::new(claim))
            }
            "duplicate" => ClaimOutcome::Duplicate,
            "busy" => ClaimOutcome::Busy { until },
            "retry_later" => ClaimOutcome::RetryLater { at },
            "wait" => ClaimOutcome::Wait,
            "stale" => ClaimOutcome::Stale,
            "parked" => ClaimOutcome::Parked,
            "dead" => ClaimOutcome::Dead,
            "mismatch" => ClaimOutcome::Mismatch,
            "too_old" => ClaimOutcome::TooOld,
            other => {
                return Err(format!("the answer has an outcome that this build does not know: {other:?}"));
            }
        })
    }

    /// A call that may be repeated: its body names the attempt or the token.
    fn post(&self, what: String, end: &str, body: &impl Serialize) -> Result<Call<'static>> {
        let body = serde_json::to_vec(body)
            .map_err(|error| Error::invalid("the request", format!("it is not JSON: {error}")))?;
        let path = ["v1", "claims", end];
        let path = &path[..if end.is_empty() { 2 } else { 3 }];
        Ok(Call { what, method: Method::POST, url: self.url(path, None), key: None, body: Some(body.into()) })
    }
}

impl Claim {
    /// The event's content, to be kept if it fails. Not needed if the
    /// [request](ClaimRequest::payload) had it.
    pub fn with_payload(mut self, payload: impl Serialize) -> Result<Self> {
        self.payload = Some(raw(payload)?);
        Ok(self)
    }

    /// It took effect. May be repeated; a token that another run has fenced is
    /// [`Fenced`](Error::Fenced).
    pub async fn done(&self) -> Result<()> {
        self.settle("done", self.ending()).await.map(|_| ())
    }

    /// It failed: it runs again after a pause, until its attempts are used up. Its content, if it is
    /// known and fits into the request, is kept, so that a dead letter can be looked at and run again.
    pub async fn fail(&self, reason: &str) -> Result<()> {
        self.failed(reason, "retry").await
    }

    /// It failed for good: only an operator runs it again. Its content, if it is known, is kept.
    pub async fn dead(&self, reason: &str) -> Result<()> {
        self.failed(reason, "dead").await
    }

    async fn failed(&self, reason: &str, then: &'static str) -> Result<()> {
        // What is too large for one request together with the reason must not keep it from failing.
        let room = self.client.settings().body_bytes_max.saturating_sub(6 * reason.len() + ENVELOPE_BYTES);
        let payload = self.payload.as_deref().filter(|payload| payload.get().len() <= room);
        let failed = Settling { reason: Some(reason), then: Some(then), payload, ..self.ending() };
        self.settle("fail", failed).await.map(|_| ())
    }

    /// Extends the lease from now on; returns when it ends, by the ledger's clock.
    pub async fn extend(&self, lease: Duration) -> Result<Option<Time>> {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        self.settle("extend", Settling { lease_ms: Some(lease_ms), ..self.ending() }).await
    }

    /// Gives the claim back, without having run the event.
    pub async fn release(&self) -> Result<()> {
        self.settle("release", self.ending()).await.map(|_| ())
    }

    fn ending(&self) -> Settling<'_> {
        Settling { run: &self.run, reason: None, then: None, lease_ms: None, payload: None }
    }

    async fn settle(&self, end: &str, settling: Settling<'_>) -> Result<Option<Time>> {
        let what = format!("{end} of {:?} for {:?}", self.run.id, self.run.scope);
        let call = self.client.post(what, end, &settling)?;
        self.client.call(&call, |reply| time(parse::<Settled>(reply)?.at.as_deref())).await
    }
}
