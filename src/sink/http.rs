//! Effects over HTTP: a POST per attempt, with `Idempotency-Key` and the token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use reqwest::header::{DATE, HeaderMap, HeaderValue, RETRY_AFTER};
use reqwest::{Client, Response, Url};
use serde_json::Value;

use super::{Effect, Sink, key, protocol};
use crate::clock::retry_after;
use crate::consumer::{Failed, Handled};
use crate::error::{Error, Result, chain};
use crate::secret::hide_password;

/// Settings of an HTTP sink.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct HttpSettings {
    /// How many bytes of an answer to read.
    pub answer_bytes_max: usize,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// The longest `Retry-After` to honour.
    pub retry_after_max: Duration,
}

impl Default for HttpSettings {
    fn default() -> Self {
        HttpSettings {
            answer_bytes_max: 64 * 1024,
            connect_timeout: Duration::from_secs(10),
            retry_after_max: Duration::from_hours(24),
        }
    }
}

/// Sends each event to a URL and interprets the answer.
///
/// | answer | means |
/// |---|---|
/// | 2xx | done; if the body is a JSON object with `done`, `retry` or `fatal`, what that says |
/// | 409 | the same key is in progress: again soon, and no attempt is counted |
/// | 422 | the same key with other content, or content that is refused: fatal |
/// | 400, 410, 413, 414, 415, 431 | this event will never be accepted: fatal |
/// | 429, 503 and any other with `Retry-After` | again, not before that |
/// | 408, 425, 5xx, no answer | again |
/// | any other 4xx (401, 403, 404 …), 3xx | concerns the endpoint, not the event: again; redirects are not followed |
///
/// "Again" counts an attempt, except for 409. An event that has no attempts left is dead.
///
/// ```
/// use hapax::sink::HttpSink;
/// assert!(HttpSink::new("https://example.org/orders").is_ok());
/// assert!(HttpSink::new("ftp://example.org").unwrap_err().to_string().contains("http"));
/// ```
#[derive(Debug, Clone)]
pub struct HttpSink {
    client: Client,
    url: Url,
    settings: HttpSettings,
    /// Whether the last request got no answer. Logs one line when that begins and one when it ends.
    away: Arc<AtomicBool>,
}

impl HttpSink {
    /// A sink at a URL, which must be `http` or `https`. Sends nothing yet.
    pub fn new(url: &str) -> Result<Self> {
        HttpSink::with_settings(url, HttpSettings::default())
    }

    /// The same with settings.
    pub fn with_settings(url: &str, settings: HttpSettings) -> Result<Self> {
        let shown = hide_password(url);
        let parsed = Url::parse(url)
            .map_err(|e| Error::Config(format!("the sink's URL {shown:?} is invalid: {e}")))?;
        if !matches!(parsed.scheme(), "http" | "https") {
            return Err(Error::Config(format!(
                "the sink's URL {shown:?} is {}; it must be http or https",
                parsed.scheme()
            )));
        }
        if parsed.host_str().is_none_or(str::is_empty) {
            return Err(Error::Config(format!("the sink's URL {shown:?} has no host")));
        }
        // Keep a provider that the application has installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(settings.connect_timeout)
            .user_agent(concat!("hapax/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|e| Error::Config(format!("no HTTP client for {shown:?}: {}", chain(&e))))?;
        Ok(HttpSink { client, url: parsed, settings, away: Arc::default() })
    }

    async fn send(&self, effect: &Effect) -> std::result::Result<Response, Failed> {
        let mut headers = HeaderMap::new();
        headers.insert("content-type", HeaderValue::from_static("application/json"));
        if let Some((identity, token)) = &effect.lease {
            let key = HeaderValue::try_from(key(identity)).map_err(Failed::fatal)?;
            headers.insert("idempotency-key", key);
            headers.insert("hapax-token", HeaderValue::from(token.0));
        }
        if let Some(trace) = &effect.event.trace {
            headers.insert("traceparent", HeaderValue::try_from(trace.to_string()).map_err(Failed::fatal)?);
        }
        let request = self
            .client
            .post(self.url.clone())
            .timeout(effect.timeout)
            .headers(headers)
            .body(protocol::request(effect, 0).to_string());
        let answer = request.send().await;
        let was_away = self.away.swap(answer.is_err(), Ordering::Relaxed);
        match answer {
            Ok(response) => {
                if was_away {
                    tracing::info!(target: "hapax::sink", sink = %self.host(), "the sink answers again");
                }
                Ok(response)
            }
            Err(error) => {
                let error = chain(&error.without_url()); // it may hold a password
                if !was_away {
                    tracing::warn!(target: "hapax::sink", sink = %self.host(), error, "the sink gives no answer; attempts are counted");
                }
                Err(Failed::retryable(format!("the sink gave no answer: {error}")))
            }
        }
    }

    /// The host, without parts of the URL that may be secret.
    fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// The answer's body, if it is not too long.
    async fn body(&self, response: &mut Response) -> std::result::Result<Vec<u8>, Failed> {
        let mut body = Vec::new();
        loop {
            let chunk = response.chunk().await.map_err(|error| {
                Failed::retryable(format!("the sink's answer broke off: {}", chain(&error.without_url())))
            })?;
            let Some(chunk) = chunk else { return Ok(body) };
            if body.len() + chunk.len() > self.settings.answer_bytes_max {
                return Err(Failed::retryable(format!(
                    "the sink's answer has more than {} bytes",
                    self.settings.answer_bytes_max
                )));
            }
            body.extend_from_slice(&chunk);
        }
    }

    /// The pause that an answer asks for, given in seconds or as a date.
    fn retry_after(&self, response: &Response) -> Option<Duration> {
        let header = |name| response.headers().get(name)?.to_str().ok();
        let after = retry_after(header(RETRY_AFTER)?, header(DATE))?;
        Some(after.min(self.settings.retry_after_max))
    }
}

#[async_trait]
impl Sink for HttpSink {
    async fn apply(&self, effect: Effect) -> Handled {
        let mut response = self.send(&effect).await?;
        let status = response.status();
        let after = self.retry_after(&response);
        let body = self.body(&mut response).await;
        if status.is_success() {
            return accepted(&body?, &effect);
        }
        let said = body.map(|body| said(&body)).unwrap_or_default();
        let message = format!("the sink answered {status}{said}");
        match (status.as_u16(), after) {
            (409, after) => Err(Failed::in_progress(
                format!("{message}: the same key is in progress"),
                after.unwrap_or(Duration::ZERO),
            )),
            (400 | 410 | 413 | 414 | 415 | 422 | 431, _) => Err(Failed::fatal(message)),
            (_, Some(after)) => Err(Failed::retry_after(message, after)),
            _ if status.is_redirection() => {
                Err(Failed::retryable(format!("{message}; redirects are not followed")))
            }
            _ => Err(Failed::retryable(message)),
        }
    }
}

/// A 2xx means done, unless the body is a reply that says otherwise.
fn accepted(body: &[u8], effect: &Effect) -> Handled {
    let Ok(Value::Object(fields)) = serde_json::from_slice::<Value>(body) else { return Ok(()) };
    if !protocol::has_outcome(&fields) {
        return Ok(());
    }
    let other = |name: &str, ours: Value| fields.get(name).is_some_and(|theirs| *theirs != ours);
    let id = Value::from(effect.event.id.as_str().into_owned());
    if other("id", id) || other("token", protocol::token(effect, 0).into()) {
        return Err(Failed::retryable("the sink's answer is about another event or token"));
    }
    protocol::outcome(&fields)
}

/// The beginning of an answer, for the reason.
fn said(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    if text.trim().is_empty() { String::new() } else { format!(" ({})", text.trim()) }
}
