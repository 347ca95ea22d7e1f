//! Claims over HTTP: the right to run an event, and how its run ended.

use std::fmt;
use std::time::{Duration, Instant};

use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::value::{RawValue, to_raw_value};
use uuid::Uuid;

use super::Client;
use super::data::parse;
use super::error::{Error, Result};
use super::exchange::{Call, Reply, Sent};
use crate::clock::Time;
use crate::id::{EventId, Scope, Visible};

/// How the server calls the mode of a claim that runs at most once.
const AT_MOST_ONCE: &str = "at_most_once";
/// What a settling has besides payload and reason, at most: a scope, an id, a time.
const ENVELOPE_BYTES: usize = 4096;
/// The rest of a longer reason is left out, so that it does not keep a run from being settled.
const REASON_BYTES_MAX: usize = 4096;

/// A request for the right to run an event, with a name of its own: repeated because an answer was
/// lost, it gets the same token. It can be claimed with once, so that it grants one run; make a new one
/// to ask again.
///
/// ```
/// use hapax::client::ClaimRequest;
/// use std::time::Duration;
/// let claim = ClaimRequest::new("mailer", "order-17-paid")?.lease(Duration::from_secs(60));
/// # Ok::<(), hapax::client::Error>(())
/// ```
#[derive(Debug, Serialize)]
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
        self.mode = AT_MOST_ONCE;
        self
    }

    /// The event's time, where the ledger's identity includes it.
    #[must_use]
    pub fn time(mut self, time: Time) -> Self {
        self.time = Some(time.to_string());
        self
    }

    /// The event's content. The ledger keeps its fingerprint, to notice an id that is used again. The
    /// content itself is kept with the dead letter, if the event becomes one by [`fail`](Claim::fail) or
    /// [`dead`](Claim::dead).
    pub fn payload(mut self, payload: impl Serialize) -> Result<Self> {
        self.payload = Some(raw(payload)?);
        Ok(self)
    }
}

/// A claim that got no answer, or was refused: the error, and the request to ask again with. `?` turns
/// it into the [`Error`].
///
/// ```no_run
/// # use hapax::client::{ClaimOutcome, ClaimRequest, Client, Result};
/// # async fn run(client: Client) -> Result<ClaimOutcome> {
/// let request = ClaimRequest::new("mailer", "order-17-paid")?;
/// let outcome = match client.claim(request).await {
///     Err(failed) if failed.error().is_retryable() => client.claim(failed.into_request()).await?,
///     outcome => outcome?,
/// };
/// # Ok(outcome) }
/// ```
#[derive(Debug)]
pub struct ClaimError(Box<(Error, ClaimRequest)>);

impl ClaimError {
    /// What went wrong.
    pub fn error(&self) -> &Error {
        &self.0.0
    }

    /// The request. Sent again, it gets the run that a lost answer has granted.
    pub fn into_request(self) -> ClaimRequest {
        self.0.1
    }
}

impl fmt::Display for ClaimError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error().fmt(f)
    }
}

impl std::error::Error for ClaimError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error().source()
    }
}

impl From<ClaimError> for Error {
    fn from(failed: ClaimError) -> Self {
        failed.0.0
    }
}

/// What became of a claim. Only with `Claimed` may the event run.
#[derive(Debug)]
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
#[derive(Debug)]
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
    /// When the lease ends at the earliest, by this process's clock: counted from before the claim was
    /// sent. End the run before, or [`extend`](Claim::extend) the lease, which returns a later one. `None`:
    /// the claim has no lease.
    pub deadline: Option<Instant>,
    client: Client,
    run: Run,
    at_most_once: bool,
    payload: Option<Box<RawValue>>,
}

/// A lease that goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Extended {
    /// When it ends, by the ledger's clock.
    pub until: Option<Time>,
    /// When it ends at the earliest, by this process's clock; in place of [`Claim::deadline`].
    pub deadline: Instant,
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
    id: String,
    token: Option<i64>,
    until: Option<String>,
    lease_ms: Option<u64>,
    attempt: Option<u32>,
    #[serde(default)]
    suspect: bool,
    at: Option<String>,
}

#[derive(Deserialize)]
struct Settled {
    id: String,
    #[serde(rename = "state")]
    _state: String,
    at: Option<String>,
}

/// An answer is about the event that was asked about; otherwise it is somebody else's.
fn is_about(asked: &str, answered: &str) -> std::result::Result<(), String> {
    if asked == answered {
        return Ok(());
    }
    Err(format!("the answer is about {}", Visible(answered)))
}

/// A reason that the server takes: not blank, and bounded.
fn reason_of(reason: &str) -> &str {
    let reason = &reason[..reason.floor_char_boundary(REASON_BYTES_MAX)];
    if reason.trim().is_empty() { "no reason given" } else { reason }
}

fn time(text: Option<&str>) -> std::result::Result<Option<Time>, String> {
    text.map(Time::parse).transpose().map_err(|error| error.to_string())
}

/// When a lease of this length ends at the earliest. A lease starts over with every attempt at its
/// claim; an at-most-once claim does not.
fn deadline(sent: Sent, at_most_once: bool, lease: Duration) -> Option<Instant> {
    let from = if at_most_once { sent.first } else { sent.last };
    from.into_std().checked_add(lease)
}

impl Client {
    /// Asks for the right to run an event. The request is used up: two claims with one request would be
    /// one permission for two runs. A claim without an answer returns it, to ask again.
    ///
    /// If you drop the future, an event that was claimed meanwhile is busy until its lease ends.
    pub async fn claim(&self, request: ClaimRequest) -> Result<ClaimOutcome, ClaimError> {
        match self.ask(&request).await {
            Ok(outcome) => Ok(outcome),
            Err(error) => Err(ClaimError(Box::new((error, request)))),
        }
    }

    async fn ask(&self, request: &ClaimRequest) -> Result<ClaimOutcome> {
        let what = format!("claiming {:?} for {:?}", request.id, request.scope);
        let call = self.post(what, "", request)?;
        self.call(&call, |reply| self.outcome(request, reply)).await
    }

    fn outcome(&self, request: &ClaimRequest, reply: &Reply) -> std::result::Result<ClaimOutcome, String> {
        let answer: Answer = parse(reply)?;
        is_about(&request.id, &answer.id)?;
        let (until, at) = (time(answer.until.as_deref())?, time(answer.at.as_deref())?);
        Ok(match answer.outcome.as_str() {
            "claimed" => {
                let token = answer.token.ok_or("the answer has no token")?;
                let (scope, id) = (request.scope.clone(), request.id.clone());
                let run = Run { scope, id, time: request.time.clone(), token };
                let (attempt, suspect) = (answer.attempt.unwrap_or(1), answer.suspect);
                let (client, payload) = (self.clone(), request.payload.clone());
                let at_most_once = request.mode == AT_MOST_ONCE;
                let lease = answer.lease_ms.map(Duration::from_millis);
                let deadline = lease.and_then(|lease| deadline(reply.sent, at_most_once, lease));
                let claim =
                    Claim { token, attempt, suspect, until, deadline, client, run, at_most_once, payload };
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
        let (url, body) = (self.url(path, None), Some(body.into()));
        Ok(Call { what, method: Method::POST, url, key: None, body, in_doubt: false, wait: Duration::ZERO })
    }
}

impl Claim {
    /// The event's content, to be kept with the dead letter if it becomes one. Not needed if the
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

    /// It failed: it runs again after a pause, until its attempts are used up. Then it is a dead letter,
    /// with its content if that is known and fits into the request. Until then the content is not kept:
    /// whoever claims the event again has it. An at-most-once event is lost, and never keeps it.
    ///
    /// Of the reason 4096 bytes are kept.
    pub async fn fail(&self, reason: &str) -> Result<()> {
        self.failed(reason, "retry").await
    }

    /// It failed for good: only an operator runs it again. Its content, if it is known and fits into the
    /// request, is kept. An at-most-once event is lost.
    pub async fn dead(&self, reason: &str) -> Result<()> {
        self.failed(reason, "dead").await
    }

    async fn failed(&self, reason: &str, then: &'static str) -> Result<()> {
        let reason = reason_of(reason);
        // What is too large for one request together with the reason must not keep it from failing.
        let room = self.client.settings().body_bytes_max.saturating_sub(6 * reason.len() + ENVELOPE_BYTES);
        // The server refuses content that it would not keep: an at-most-once event never runs again.
        let payload =
            self.payload.as_deref().filter(|payload| !self.at_most_once && payload.get().len() <= room);
        let failed = Settling { reason: Some(reason), then: Some(then), payload, ..self.ending() };
        self.settle("fail", failed).await.map(|_| ())
    }

    /// Extends the lease from now on; returns when it ends.
    pub async fn extend(&self, lease: Duration) -> Result<Extended> {
        let lease_ms = u64::try_from(lease.as_millis()).unwrap_or(u64::MAX);
        let (until, sent) =
            self.settle("extend", Settling { lease_ms: Some(lease_ms), ..self.ending() }).await?;
        let sent = sent.last.into_std();
        Ok(Extended { until, deadline: sent.checked_add(lease).unwrap_or(sent) })
    }

    /// Gives the claim back, without having run the event.
    pub async fn release(&self) -> Result<()> {
        self.settle("release", self.ending()).await.map(|_| ())
    }

    fn ending(&self) -> Settling<'_> {
        Settling { run: &self.run, reason: None, then: None, lease_ms: None, payload: None }
    }

    async fn settle(&self, end: &str, settling: Settling<'_>) -> Result<(Option<Time>, Sent)> {
        let what = format!("{end} of {:?} for {:?}", self.run.id, self.run.scope);
        let call = self.client.post(what, end, &settling)?;
        let read = |reply: &Reply| {
            let settled: Settled = parse(reply)?;
            is_about(&self.run.id, &settled.id)?;
            Ok((time(settled.at.as_deref())?, reply.sent))
        };
        self.client.call(&call, read).await
    }
}
