//! Problems (RFC 9457): what an HTTP service of hapax answers when it does not do what was asked.
//!
//! A problem has a stable `code`, by which clients decide (never by the status or by a text). Each
//! code has a page in `docs/errors/`. The codes are those of [`Error`], those of keyed writes
//! ([`keyed::PROBLEMS`](crate::keyed::PROBLEMS)) and [`CODES`].
//!
//! ```
//! use hapax::{Error, problem::Problem};
//! let problem = Problem::of(&Error::Conflict { expected: "seq 3".into(), actual: "seq 5".into() });
//! assert_eq!((problem.status().as_u16(), problem.code()), (409, "conflict"));
//! assert_eq!(problem.json()["actual"], 5);
//! ```

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::http::{Response as HttpResponse, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::Value;

use crate::error::Error;
use crate::id::Visible;

/// The media type of a problem.
pub const MEDIA_TYPE: &str = "application/problem+json";

/// The codes that only a server has, besides those of [`Error`] and of keyed writes.
pub use crate::error::SERVER_CODES as CODES;

/// A detail is no longer than this, whatever the input was that it quotes.
const DETAIL_CHARS_MAX: usize = 1000;

/// A problem, on its way to a client.
#[derive(Debug, Clone, PartialEq)]
pub struct Problem {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    detail: String,
    members: Vec<(&'static str, Value)>,
    retry: bool,
}

impl Problem {
    /// A problem. The detail is a sentence about this request; it may quote what the client sent,
    /// and nothing that a client must not see.
    pub fn new(
        status: StatusCode,
        code: &'static str,
        title: &'static str,
        detail: impl Into<String>,
    ) -> Self {
        let mut detail: String = detail.into();
        if let Some((end, _)) = detail.char_indices().nth(DETAIL_CHARS_MAX) {
            detail.truncate(end);
            detail.push('…');
        }
        Problem {
            status,
            code,
            title,
            detail: Visible(&detail).to_string(),
            members: Vec::new(),
            retry: false,
        }
    }

    /// Adds a member to the JSON object, for programs.
    #[must_use]
    pub fn member(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.members.push((name, value.into()));
        self
    }

    /// Tells the client to send the same request again (`Retry-After`).
    #[must_use]
    pub fn retry(mut self) -> Self {
        self.retry = true;
        self
    }

    /// The problem that an error is to a client. What only concerns the operator (which server did
    /// not answer, and with which words) is logged, and not part of it.
    pub fn of(error: &Error) -> Self {
        let (status, title) = match error {
            Error::Invalid { .. } => (StatusCode::BAD_REQUEST, "The input is invalid"),
            Error::NotFound(_) => (StatusCode::NOT_FOUND, "Not found"),
            Error::Conflict { .. } => (StatusCode::CONFLICT, "An expectation did not hold"),
            Error::Fenced { .. } => (StatusCode::CONFLICT, "The token cannot do this"),
            Error::Mismatch { .. } => (StatusCode::UNPROCESSABLE_ENTITY, "The id belongs to other content"),
            Error::Unsupported(_) | Error::NotBuiltIn { .. } => {
                (StatusCode::NOT_IMPLEMENTED, "This server cannot do this")
            }
            Error::Unavailable { .. } | Error::Contended { .. } | Error::WeekMissing { .. } => {
                return Problem::logged(error, StatusCode::SERVICE_UNAVAILABLE).retry();
            }
            Error::Config(_) | Error::Refused { .. } | Error::Schema(_) | Error::Corrupt(_) => {
                return Problem::logged(error, StatusCode::INTERNAL_SERVER_ERROR);
            }
        };
        let problem = Problem::new(status, error.code(), title, error.to_string());
        match error {
            Error::Conflict { expected, actual } => {
                let (expected, actual) = sides(expected, actual);
                problem.member("expected", expected).member("actual", actual)
            }
            _ => problem,
        }
    }

    /// An error whose words are for the log only.
    fn logged(error: &Error, status: StatusCode) -> Self {
        tracing::warn!(target: "hapax", error = %error.chain(), "a request could not be served");
        let (title, detail) = if status == StatusCode::SERVICE_UNAVAILABLE {
            (
                "A database is unavailable or busy",
                "the request may or may not have been carried out; send the same request again",
            )
        } else {
            ("The server failed", "the server's log says why")
        };
        Problem::new(status, error.code(), title, detail)
    }

    /// The HTTP status.
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The stable code.
    pub fn code(&self) -> &'static str {
        self.code
    }

    /// Whether the same request may be sent again, and may then succeed.
    pub fn is_retryable(&self) -> bool {
        self.retry
    }

    /// The JSON object.
    pub fn json(&self) -> Value {
        let mut body = serde_json::json!({
            "type": format!("https://github.com/hapax-rs/hapax/blob/main/docs/errors/{}.md", self.code),
            "title": self.title,
            "status": self.status.as_u16(),
            "code": self.code,
            "detail": self.detail,
        });
        for (name, value) in &self.members {
            body[*name] = value.clone();
        }
        body
    }
}

/// Both sides of a conflict: numbers if it is about seqs, otherwise sentences.
fn sides(expected: &str, actual: &str) -> (Value, Value) {
    let seq = |text: &str| text.strip_prefix("seq ")?.split(' ').next()?.parse::<u64>().ok();
    match (seq(expected), seq(actual)) {
        (Some(expected), Some(actual)) => (expected.into(), actual.into()),
        _ => (expected.into(), actual.into()),
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        Problem::of(&error)
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = HttpResponse::new(Body::from(self.json().to_string()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(MEDIA_TYPE));
        if self.retry {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t160_what_a_server_said_is_not_told_to_clients() {
        let secret = "password authentication failed for postgres://app:s3cret@db/orders";
        for error in [
            Error::unavailable(secret, secret),
            Error::Refused { what: secret.into(), source: Some(secret.into()) },
            Error::Contended { what: secret.into(), source: None },
            Error::Config(secret.into()),
            Error::Schema(secret.into()),
            Error::Corrupt(secret.into()),
        ] {
            let problem = Problem::of(&error);
            assert!(!problem.json().to_string().contains("s3cret"), "{problem:?}");
            assert_eq!(problem.code(), error.code());
            assert_eq!(problem.retry, error.is_retryable());
            assert!(problem.status().is_server_error());
        }
    }

    #[test]
    fn every_error_has_a_status() {
        let status = |error: Error| Problem::of(&error).status().as_u16();
        assert_eq!(status(Error::invalid("id", "it is blank")), 400);
        assert_eq!(status(Error::NotFound("no entry".into())), 404);
        assert_eq!(status(Error::Fenced { what: "it".into() }), 409);
        assert_eq!(status(Error::Mismatch { what: "it".into() }), 422);
        assert_eq!(status(Error::Unsupported("it".into())), 501);
        assert_eq!(status(Error::NotBuiltIn { what: "Redis", feature: "redis" }), 501);
        assert_eq!(status(Error::WeekMissing { monday: "2026-03-02".into() }), 503);
        let problem = Problem::of(&Error::Conflict { expected: "a".into(), actual: "seq 4".into() });
        assert_eq!(
            (problem.json()["expected"].as_str(), problem.json()["status"].as_u64()),
            (Some("a"), Some(409))
        );
    }

    #[test]
    fn details_are_bounded_and_visible() {
        let problem = Problem::new(StatusCode::BAD_REQUEST, "invalid", "t", "\u{1b}[2J".repeat(10_000));
        assert!(problem.detail.len() < 12_000 && !problem.detail.contains('\u{1b}'), "{}", problem.detail);
    }
}
