//! What the layer answers by itself: problems (RFC 9457) with stable codes.

use axum::body::Body;
use axum::http::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use axum::http::{HeaderName, Response as HttpResponse, StatusCode};
use axum::response::{IntoResponse, Response};

use crate::error::Error;
use crate::keyed::Answer;

/// Set on an answer that was given before.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// How long answers are kept, in seconds.
pub(super) const RETENTION: HeaderName = HeaderName::from_static("idempotency-key-retention");

/// A problem.
#[derive(Debug)]
pub(super) struct Problem {
    status: StatusCode,
    code: &'static str,
    title: &'static str,
    detail: String,
    fields: Vec<String>,
    retry: bool,
}

impl Problem {
    fn new(status: StatusCode, code: &'static str, title: &'static str, detail: impl Into<String>) -> Self {
        Problem { status, code, title, detail: detail.into(), fields: Vec::new(), retry: false }
    }

    pub(super) fn missing() -> Self {
        let detail = "this request needs an Idempotency-Key header: a new key, best a UUIDv7, made before the first try and \
                      sent again with every retry";
        Problem::new(StatusCode::BAD_REQUEST, "key-missing", "The key is missing", detail)
    }

    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::BAD_REQUEST, "key-invalid", "The key is invalid", detail)
    }

    pub(super) fn unreadable() -> Self {
        let detail = "the body of the request could not be read to its end; nothing was done";
        Problem::new(StatusCode::BAD_REQUEST, "body-unreadable", "The body could not be read", detail)
    }

    pub(super) fn body_too_large(limit: usize) -> Self {
        let detail = format!("the body of a request with a key may have {limit} bytes; nothing was done");
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large", detail)
    }

    pub(super) fn mismatch(fields: Vec<String>) -> Self {
        let detail = "the key was used before for another request; make a new key for this one";
        let problem = Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "key-mismatch",
            "The key belongs to another request",
            detail,
        );
        Problem { fields, ..problem }
    }

    pub(super) fn running() -> Self {
        let detail = "a request with this key runs; send it again later to get its answer";
        let problem = Problem::new(StatusCode::CONFLICT, "key-running", "The request runs", detail);
        Problem { retry: true, ..problem }
    }

    pub(super) fn outcome_unknown() -> Self {
        let detail = "a request with this key began and never ended, and it is not run again by itself; an operator decides";
        Problem::new(StatusCode::CONFLICT, "outcome-unknown", "The outcome is unknown", detail)
    }

    pub(super) fn expired() -> Self {
        let detail = "the key is older than answers are kept, so whether its request was done is not known any more; find \
                      out, and make a new key if it was not";
        Problem::new(StatusCode::GONE, "key-expired", "The key has expired", detail)
    }

    pub(super) fn answer_too_large(limit: usize, done: bool) -> Self {
        let what = if done { "the request was done" } else { "nothing was done" };
        let detail = format!(
            "the answer to a request with a key is kept, so it may not be a stream and may have {limit} bytes; {what}"
        );
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "answer-too-large",
            "The answer cannot be kept",
            detail,
        )
    }

    pub(super) fn failed() -> Self {
        let detail = "the handler of the request ended without an answer";
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "handler-failed", "The request failed", detail)
    }

    pub(super) fn timeout() -> Self {
        let detail = "the handler of the request took too long";
        Problem::new(StatusCode::GATEWAY_TIMEOUT, "handler-timeout", "The request took too long", detail)
    }

    pub(super) fn in_use() -> Self {
        let detail = "the handler answered while its transaction was still in use; nothing was done";
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "transaction-in-use",
            "The transaction is in use",
            detail,
        )
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn no_transaction() -> Self {
        let detail = "the handler takes a transaction, but its layer is not transactional, or its keys are in another database";
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "transaction-missing",
            "There is no transaction",
            detail,
        )
    }

    /// A COMMIT whose acknowledgement was lost, and which did not happen.
    pub(super) fn not_committed() -> Self {
        let detail =
            "the database was lost before the request was committed; nothing was done, send it again";
        let problem =
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "The database is away", detail);
        Problem { retry: true, ..problem }
    }

    /// An error of the store. Its details are for the log, not for clients.
    pub(super) fn of(error: &Error) -> Self {
        tracing::warn!(target: "hapax", error = %error.chain(), "a keyed request could not be served");
        let retry = error.is_retryable();
        let (status, title) = if retry {
            (StatusCode::SERVICE_UNAVAILABLE, "The store of keys is away or busy")
        } else {
            (StatusCode::INTERNAL_SERVER_ERROR, "The store of keys has failed")
        };
        let detail =
            if retry { "send the request again with the same key" } else { "the service's log says why" };
        Problem { retry, ..Problem::new(status, error.code(), title, detail) }
    }

    fn json(&self) -> String {
        let mut body = serde_json::json!({
            "type": format!("https://github.com/hapax-rs/hapax/blob/main/docs/errors/{}.md", self.code),
            "title": self.title,
            "status": self.status.as_u16(),
            "code": self.code,
            "detail": self.detail,
        });
        if !self.fields.is_empty() {
            body["fields"] = serde_json::json!(self.fields);
        }
        body.to_string()
    }

    /// The problem as an answer that is kept.
    pub(super) fn answer(&self) -> Answer {
        Answer::new(self.status.as_u16(), self.json()).header("content-type", "application/problem+json")
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = HttpResponse::new(Body::from(self.json()));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if self.retry {
            headers.insert(RETRY_AFTER, HeaderValue::from_static("1"));
        }
        response
    }
}

/// A stored answer as a response.
pub(super) fn replayed(answer: &Answer, success: Option<StatusCode>) -> Response {
    let original = StatusCode::from_u16(answer.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = HttpResponse::new(Body::from(answer.body.clone()));
    *response.status_mut() = success.filter(|_| original.is_success()).unwrap_or(original);
    for (name, value) in &answer.headers {
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name.as_str()), HeaderValue::from_bytes(value)) {
            response.headers_mut().append(name, value);
        }
    }
    response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    response
}
