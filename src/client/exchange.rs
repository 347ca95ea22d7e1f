//! One call: attempts until there is an answer that counts, or no time left.

use std::time::Duration;

use reqwest::header::{ACCEPT, CONTENT_TYPE, DATE, RETRY_AFTER};
use reqwest::{Method, Response, Url};
use tokio::time::Instant;

use super::error::{Error, Result};
use super::problem::{Problem, Verdict};
use super::{Client, ClientSettings};
use crate::clock::{jitter_permille, retry_after};
use crate::error::{Source, chain};
use crate::id::Visible;
use crate::keyed::IdempotencyKey;

/// How often to repeat what a repeat probably does not mend: a failing handler, a proxy's refusal.
const A_FEW_TIMES: u32 = 5;
/// No attempt begins with less time than this: it could only leave a doubt.
const ATTEMPT_MIN: Duration = Duration::from_millis(50);

/// What is asked. Every attempt sends the same bytes.
#[derive(Debug)]
pub(super) struct Call<'c> {
    /// In words, for errors: `creating a record of orders`.
    pub(super) what: String,
    pub(super) method: Method,
    pub(super) url: Url,
    pub(super) key: Option<&'c IdempotencyKey>,
    pub(super) body: Option<bytes::Bytes>,
    /// Whether it may have been sent before, by an earlier call.
    pub(super) in_doubt: bool,
    /// How long the server may wait before it answers, on top of an attempt's time and of the deadline.
    pub(super) wait: Duration,
}

impl Call<'_> {
    /// A question: it changes nothing.
    pub(super) fn question(what: String, url: Url) -> Self {
        Call { what, method: Method::GET, url, key: None, body: None, in_doubt: false, wait: Duration::ZERO }
    }
}

/// A success.
#[derive(Debug)]
pub(super) struct Reply {
    /// Whether the server gave this answer before, to an earlier attempt or an equal request.
    pub(super) replayed: bool,
    pub(super) body: Vec<u8>,
    pub(super) sent: Sent,
}

/// When a call was sent, by this process's clock.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sent {
    /// Before its first attempt.
    pub(super) first: Instant,
    /// Before the attempt that was answered.
    pub(super) last: Instant,
}

/// What came of one attempt.
enum Attempt {
    Reply {
        replayed: bool,
        body: Vec<u8>,
    },
    Problem {
        problem: Problem,
        after: Option<Duration>,
    },
    /// No answer of the server: a proxy's page, a broken answer, nothing.
    Nothing {
        said: String,
        after: Option<Duration>,
        verdict: Verdict,
        source: Option<Source>,
    },
}

/// What the attempts so far have shown.
#[derive(Default)]
struct History {
    attempts: u32,
    a_few: u32,
    in_doubt: bool,
    said: String,
    problem: Option<Problem>,
    source: Option<Source>,
}

impl Client {
    /// Sends a call until `read` accepts an answer, the server refuses it, or the deadline is over.
    pub(super) async fn call<T>(
        &self,
        call: &Call<'_>,
        read: impl Fn(&Reply) -> std::result::Result<T, String>,
    ) -> Result<T> {
        let settings = self.settings();
        let bytes = call.body.as_ref().map_or(0, bytes::Bytes::len);
        if bytes > settings.body_bytes_max {
            let limit = settings.body_bytes_max;
            return Err(Error::invalid("the request", format!("it has {bytes} bytes; the limit is {limit}")));
        }
        let deadline = settings.deadline.saturating_add(call.wait);
        let deadline = Instant::now().checked_add(deadline); // `None`: it is too far away
        let mut history = History { in_doubt: call.in_doubt, ..History::default() };
        let first = Instant::now();
        loop {
            let sent = Sent { first, last: Instant::now() };
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            let longest = settings.attempt_timeout.saturating_add(call.wait);
            let attempt = self.attempt(call, left.min(longest)).await?;
            history.attempts = history.attempts.saturating_add(1);
            let (verdict, after) = match attempt {
                Attempt::Reply { replayed, body } => match read(&Reply { replayed, body, sent }) {
                    Ok(value) => return Ok(value),
                    Err(odd) => {
                        history.record(odd, None, None);
                        (Verdict::Again { in_doubt: true }, None)
                    }
                },
                Attempt::Problem { problem, after } => {
                    let verdict = problem.verdict(after.is_some());
                    history.record(problem.to_string(), Some(problem), None);
                    (verdict, after)
                }
                Attempt::Nothing { said, after, verdict, source } => {
                    history.record(said, None, source);
                    (verdict, after)
                }
            };
            if !history.goes_on(verdict) {
                return Err(history.end(call, verdict));
            }
            let pause = pause(settings, history.attempts, after);
            let in_time = |at: &Instant| deadline.is_none_or(|end| *at + ATTEMPT_MIN < end);
            let wakes = Instant::now().checked_add(pause).filter(in_time);
            let Some(wakes) = wakes else { return Err(history.end(call, verdict)) };
            tracing::debug!(
                target: "hapax::client", call = %call.what, attempt = history.attempts, said = %history.said,
                pause_ms = u64::try_from(pause.as_millis()).unwrap_or(u64::MAX), "no answer yet; trying again"
            );
            tokio::time::sleep_until(wakes).await;
        }
    }

    /// Sends a call once. An error means that it could not even be built.
    async fn attempt(&self, call: &Call<'_>, timeout: Duration) -> Result<Attempt> {
        let mut request = self
            .http()
            .request(call.method.clone(), call.url.clone())
            .headers(self.headers().clone())
            .header(ACCEPT, "application/json, application/problem+json")
            .timeout(timeout.max(Duration::from_millis(1)));
        if let Some(key) = call.key {
            request = request.header("idempotency-key", key.to_header());
        }
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, "application/json").body(body.clone());
        }
        let mut response = match request.send().await {
            Ok(response) => response,
            Err(error) if error.is_builder() => {
                return Err(Error::invalid("the request", chain(&error.without_url())));
            }
            Err(error) => {
                // A connection that was never made carried nothing.
                let in_doubt = !error.is_connect();
                return Ok(no_answer("there was no answer", error, in_doubt));
            }
        };
        let body = match read_body(&mut response, self.settings().answer_bytes_max).await {
            Ok(body) => body,
            // What is read changes nothing, and is as large the next time.
            Err(Attempt::Nothing { said, source, verdict: Verdict::AFewTimes { .. }, .. })
                if call.method == Method::GET =>
            {
                return Ok(Attempt::Nothing { said, after: None, verdict: Verdict::Stop, source });
            }
            Err(attempt) => return Ok(attempt),
        };
        Ok(judge(&response, body, self.settings().retry_after_max))
    }
}

fn no_answer(said: &str, error: reqwest::Error, in_doubt: bool) -> Attempt {
    let error = error.without_url(); // it may hold a secret
    Attempt::Nothing {
        said: format!("{said} ({})", chain(&error)),
        after: None,
        verdict: Verdict::Again { in_doubt },
        source: Some(error.into()),
    }
}

/// An answer that is larger than the client reads.
#[derive(Debug)]
pub(super) struct AnswerTooLarge {
    bytes_max: usize,
}

impl std::fmt::Display for AnswerTooLarge {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the answer has more than {} bytes (answer_bytes_max)", self.bytes_max)
    }
}

impl std::error::Error for AnswerTooLarge {}

/// The answer's body, if it is not too long.
async fn read_body(response: &mut Response, bytes_max: usize) -> std::result::Result<Vec<u8>, Attempt> {
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() > bytes_max => {
                let too_large = AnswerTooLarge { bytes_max };
                return Err(Attempt::Nothing {
                    said: too_large.to_string(),
                    after: None,
                    verdict: Verdict::AFewTimes { in_doubt: true },
                    source: Some(too_large.into()),
                });
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => return Ok(body),
            Err(error) => return Err(no_answer("the answer broke off", error, true)),
        }
    }
}

/// What an answer is: a success, a problem of the server, or somebody else's page.
fn judge(response: &Response, body: Vec<u8>, after_max: Duration) -> Attempt {
    let header = |name| response.headers().get(name).and_then(|value| value.to_str().ok());
    let status = response.status();
    let after = header(RETRY_AFTER.as_str()).and_then(|after| retry_after(after, header(DATE.as_str())));
    let after = after.map(|after| after.min(after_max));
    let kind = header(CONTENT_TYPE.as_str()).unwrap_or_default();
    let kind = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
    if status.is_success() && kind == "application/json" {
        return Attempt::Reply { replayed: header("idempotency-replayed") == Some("true"), body };
    }
    if !status.is_success()
        && kind == "application/problem+json"
        && let Some(problem) = Problem::parse(status.as_u16(), &body)
    {
        return Attempt::Problem { problem, after };
    }
    // A proxy has only its status to say: 5xx, 408, 425 and 429 pass; another refusal, and a
    // redirect, which is not followed, probably does not.
    let passes = status.is_server_error()
        || status.is_success()
        || matches!(status.as_u16(), 408 | 425 | 429)
        || after.is_some();
    let verdict =
        if passes { Verdict::Again { in_doubt: true } } else { Verdict::AFewTimes { in_doubt: true } };
    let text = String::from_utf8_lossy(&body);
    let start: String = text.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(120).collect();
    let said =
        format!("{status} is not the server's own answer (content-type {kind:?}: {})", Visible(&start));
    Attempt::Nothing { said, after, verdict, source: None }
}

impl History {
    /// Notes what came of an attempt.
    fn record(&mut self, said: String, problem: Option<Problem>, source: Option<Source>) {
        self.said = said;
        self.problem = problem;
        self.source = source;
    }

    /// Notes what an attempt leaves in doubt, and whether there may be another.
    fn goes_on(&mut self, verdict: Verdict) -> bool {
        match verdict {
            Verdict::Stop => false,
            Verdict::Again { in_doubt } => {
                self.in_doubt |= in_doubt;
                true
            }
            Verdict::AFewTimes { in_doubt } => {
                self.in_doubt |= in_doubt;
                self.a_few += 1;
                self.a_few < A_FEW_TIMES
            }
        }
    }

    /// The error that the attempts amount to, after the last one's verdict.
    fn end(self, call: &Call<'_>, verdict: Verdict) -> Error {
        let in_doubt = self.in_doubt && call.method != Method::GET;
        match self.problem {
            Some(problem) if !matches!(verdict, Verdict::Again { .. }) => {
                Error::of(Problem { in_doubt, ..problem })
            }
            problem => Error::Unavailable {
                what: format!("{}: {}", call.what, self.said),
                attempts: self.attempts,
                in_doubt,
                problem: problem.map(|problem| Box::new(Problem { in_doubt, ..problem })),
                prepared: None,
                source: self.source,
            },
        }
    }
}

/// Full jitter up to an exponential bound, on top of what the server asks for: whoever asks everybody
/// to come back in a second does not get them all at once, nor every second.
fn pause(settings: &ClientSettings, attempts: u32, after: Option<Duration>) -> Duration {
    let doubled = 1_u32.checked_shl(attempts.saturating_sub(1)).unwrap_or(u32::MAX);
    let longest = settings.backoff_base.saturating_mul(doubled).min(settings.backoff_max);
    let jitter = longest.saturating_mul(u32::from(jitter_permille())) / 1000;
    after.unwrap_or_default().saturating_add(jitter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_jitter_and_respect_the_server() {
        let settings = ClientSettings::default();
        for attempts in [1, 2, 10, 40, u32::MAX] {
            let pause = pause(&settings, attempts, None);
            assert!(pause > Duration::ZERO && pause <= settings.backoff_max, "{attempts}: {pause:?}");
        }
        let first = super::pause(&settings, 1, None);
        assert!(first <= settings.backoff_base, "{first:?}");
        let asked = super::pause(&settings, 9, Some(Duration::from_secs(30)));
        assert!(asked > Duration::from_secs(30) && asked <= Duration::from_secs(30) + settings.backoff_max);
        let huge = super::pause(&settings, 1, Some(Duration::MAX));
        assert_eq!(huge, Duration::MAX);
    }

    /// A server that says "1" or "0" to everybody for a minute.
    #[test]
    fn t284_retry_after_does_not_switch_the_backoff_off() {
        let settings = ClientSettings::default();
        for after in [0, 1] {
            let after = Duration::from_secs(after);
            let longest = (0..100).map(|_| super::pause(&settings, 9, Some(after))).max().unwrap();
            assert!(longest > after + 5 * settings.backoff_base, "{longest:?}");
        }
    }

    /// The machine's clock may be years away from the server's.
    #[test]
    fn t284_a_date_to_come_back_counts_from_the_date_of_the_answer() {
        let (now, later) = ("Sun, 06 Nov 1994 08:49:07 GMT", "Sun, 06 Nov 1994 08:49:37 GMT");
        assert_eq!(retry_after(later, Some(now)), Some(Duration::from_secs(30)));
        assert_eq!(retry_after(now, Some(later)), Some(Duration::ZERO));
        assert_eq!(retry_after(later, None), Some(Duration::ZERO));
        assert_eq!(retry_after(" 7 ", Some(now)), Some(Duration::from_secs(7)));
        assert_eq!(retry_after("soon", Some(now)), None);
    }
}
