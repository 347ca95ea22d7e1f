//! Requests to the engine, and what its answers mean.

use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderValue};
use reqwest::{Method, StatusCode, Url};
use serde::Deserialize;
use serde_json::Value;

use crate::error::{Error, Result, chain};
use crate::secret::hide_password;

/// Settings of a [`SearchProjection`](super::SearchProjection).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SearchSettings {
    /// How long a request may take.
    pub timeout: Duration,
    /// How many primary shards a new index has.
    pub shards: u32,
    /// How many replicas each of them has.
    pub replicas: u32,
}

impl Default for SearchSettings {
    fn default() -> Self {
        SearchSettings { timeout: Duration::from_secs(20), shards: 1, replicas: 1 }
    }
}

/// The engine at a URL.
#[derive(Debug)]
pub(super) struct Client {
    http: reqwest::Client,
    url: Url,
    pub(super) settings: SearchSettings,
}

impl Client {
    /// The client for a URL, and the alias that its path names.
    pub(super) fn new(text: &str, settings: SearchSettings) -> Result<(Self, String)> {
        let shown = hide_password(text);
        let bad = |problem: String| {
            Error::Config(format!(
                "{shown:?} is not the URL of an OpenSearch alias ({problem}); write http://HOST:PORT/ALIAS"
            ))
        };
        let mut url = Url::parse(text).map_err(|error| bad(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none_or(str::is_empty) {
            return Err(bad("it is not http or https, or has no host".into()));
        }
        let alias = url.path().trim_matches('/').to_owned();
        let plain = |c: u8| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'_' || c == b'-';
        let fits = (1..=128).contains(&alias.len()) && alias.bytes().all(plain);
        if !fits || !alias.as_bytes()[0].is_ascii_lowercase() || url.query().is_some() {
            return Err(bad(
                "an alias has 1 to 128 characters a-z, 0-9, _ or -, beginning with a letter".into()
            ));
        }
        if settings.shards == 0 || settings.timeout.is_zero() {
            return Err(Error::Config(
                "shards and the timeout of a search projection must be at least 1".into(),
            ));
        }
        url.set_path("/");
        // Keep a provider that the application has installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(settings.timeout)
            .timeout(settings.timeout)
            .user_agent(concat!("hapax/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Error::Config(format!("no HTTP client for {shown:?}: {}", chain(&error))))?;
        Ok((Client { http, url, settings }, alias))
    }

    /// The server, without parts of the URL that may be secret.
    pub(super) fn server(&self) -> String {
        let port = self.url.port_or_known_default().unwrap_or_default();
        format!("{}://{}:{port}", self.url.scheme(), self.url.host_str().unwrap_or_default())
    }

    /// Sends a request. An error means that there is no answer.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        doing: &str,
    ) -> Result<(StatusCode, String)> {
        let lost = |error: reqwest::Error| {
            // The URL may hold a password.
            Error::unavailable(format!("{doing} at {}", self.server()), error.without_url())
        };
        let url = self.url.join(path).map_err(|error| Error::Config(format!("{path:?}: {error}")))?;
        let mut request = self.http.request(method, url);
        if let Some(body) = body {
            request = request.header(CONTENT_TYPE, HeaderValue::from_static("application/json")).body(body);
        }
        let response = request.send().await.map_err(lost)?;
        let status = response.status();
        Ok((status, response.text().await.map_err(lost)?))
    }

    /// Sends a request that should succeed. Returns the body.
    pub(super) async fn ok(
        &self,
        method: Method,
        path: &str,
        body: Option<String>,
        doing: &str,
    ) -> Result<String> {
        let (status, text) = self.ask(method, path, body, doing).await?;
        if status.is_success() { Ok(text) } else { Err(self.refused(status, &text, doing)) }
    }

    /// The meaning of an answer that is not a success.
    pub(super) fn refused(&self, status: StatusCode, text: &str, doing: &str) -> Error {
        let what = format!("{doing} at {}: {status}{}", self.server(), said(text));
        match status.as_u16() {
            404 => Error::NotFound(what),
            408 | 429 | 500..=599 => Error::Unavailable { what, source: None },
            _ => Error::Refused { what, source: None },
        }
    }
}

/// Parses an answer of the engine.
pub(super) fn parsed<'t, T: Deserialize<'t>>(text: &'t str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| {
        Error::Corrupt(format!("the search engine's answer cannot be read ({error}): {}", short(text)))
    })
}

/// What an answer says is wrong.
fn said(text: &str) -> String {
    let message = match serde_json::from_str::<Value>(text) {
        Ok(value) if !value["error"].is_null() => reason_of(&value["error"]),
        _ => short(text),
    };
    if message.is_empty() { message } else { format!(" ({message})") }
}

/// The reason in an error of the engine.
pub(super) fn reason_of(error: &Value) -> String {
    let reason = error["reason"].as_str().or_else(|| error.as_str()).unwrap_or_default();
    let kind = error["type"].as_str().unwrap_or_default();
    let cause = error.pointer("/caused_by/reason").and_then(Value::as_str).unwrap_or_default();
    let parts = [kind, reason, cause].into_iter().filter(|part| !part.is_empty());
    short(&parts.collect::<Vec<_>>().join(": "))
}

/// The beginning of a text, for a sentence.
fn short(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(300).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_an_alias() {
        let of = |url: &str| {
            Client::new(url, SearchSettings::default()).map(|(client, alias)| (client.server(), alias))
        };
        let (server, alias) = of("http://user:secret@search:9200/records").unwrap();
        assert_eq!((server.as_str(), alias.as_str()), ("http://search:9200", "records"));
        for bad in [
            "http://search:9200",
            "ftp://search/records",
            "records",
            "http://search/Records",
            "http://u:secret@h/a*",
        ] {
            let message = of(bad).unwrap_err().to_string();
            assert!(message.contains("http://HOST:PORT/ALIAS") && !message.contains("secret"), "{message}");
        }
    }

    #[test]
    fn a_reason_names_its_cause() {
        let error = serde_json::json!({"type": "a", "reason": "b", "caused_by": {"reason": "c"}});
        assert_eq!(reason_of(&error), "a: b: c");
        assert_eq!(said(r#"{"error":"alias [x] missing"}"#), " (alias [x] missing)");
        assert_eq!(said(""), "");
    }
}
