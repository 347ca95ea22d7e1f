//! The problems that the layer itself answers with.

use std::time::Duration;

use axum::body::Body;
use axum::http::header::HeaderValue;
use axum::http::{HeaderName, Response as HttpResponse, StatusCode};
use axum::response::Response;

use crate::clock::Time;
use crate::error::Error;
use crate::keyed::Answer;
use crate::keyed::answer::HEADER_BYTES_MAX;
use crate::problem::MEDIA_TYPE;
pub(super) use crate::problem::Problem;

/// Set on an answer that was given before.
pub(super) const REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
/// How long answers are kept, in seconds.
pub(super) const RETENTION: HeaderName = HeaderName::from_static("idempotency-key-retention");

impl Problem {
    pub(super) fn missing() -> Self {
        let detail = "this request needs an Idempotency-Key header: a new key, best a UUIDv7, made before the first try and \
                      sent again with every retry";
        Problem::new(StatusCode::BAD_REQUEST, "key-missing", "The key is missing", detail)
    }

    pub(super) fn invalid(detail: impl Into<String>) -> Self {
        Problem::new(StatusCode::BAD_REQUEST, "key-invalid", "The key is invalid", detail)
    }

    pub(super) fn unreadable() -> Self {
        let detail = "the request body could not be read to its end; nothing was done";
        Problem::new(StatusCode::BAD_REQUEST, "body-unreadable", "The body could not be read", detail)
    }

    pub(super) fn too_slow(limit: Duration) -> Self {
        let detail = format!("the request body did not arrive within {limit:?}; nothing was done");
        Problem::new(StatusCode::BAD_REQUEST, "body-unreadable", "The body could not be read", detail)
    }

    pub(super) fn body_too_large(limit: usize) -> Self {
        let detail = format!(
            "the request body exceeds {limit} bytes, the limit for a request with a key; nothing was done"
        );
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large", detail)
    }

    /// Only callers who may know learn which fields differ.
    pub(super) fn mismatch(fields: Vec<String>, tells: bool) -> Self {
        let detail = if fields.is_empty() {
            "the key was used before, for the same fields in other bytes: this looks like the same request; send exactly \
             the bytes of the first attempt"
        } else {
            "the key was used before for another request; make a new key for this one"
        };
        let problem = Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "key-mismatch",
            "The key belongs to another request",
            detail,
        );
        if fields.is_empty() || !tells { problem } else { problem.member("fields", fields) }
    }

    /// The key is another caller's; or the same caller's, known by another name since.
    pub(super) fn another_caller() -> Self {
        let detail = "another caller has used this key before, or this one did under another name (a token that was \
                      replaced); if this is a retry, find out whether the request was done before a new key is made";
        let title = "The key belongs to another caller";
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "key-mismatch", title, detail)
            .member("differs", vec!["principal"])
    }

    pub(super) fn running() -> Self {
        let detail = "a request with this key is still running; send it again later to get its answer";
        Problem::new(StatusCode::CONFLICT, "key-running", "The request is still running", detail).retry()
    }

    pub(super) fn outcome_unknown() -> Self {
        let detail = "a request with this key began and never ended; it is not run again automatically, an operator decides";
        Problem::new(StatusCode::CONFLICT, "outcome-unknown", "The outcome is unknown", detail)
    }

    pub(super) fn expired() -> Self {
        let detail = "the key is older than answers are kept, so whether its request was done is not known any more; find \
                      out, and make a new key if it was not. If the key is new, the client's clock is wrong: the key carries its time";
        Problem::new(StatusCode::GONE, "key-expired", "The key has expired", detail)
    }

    pub(super) fn ahead(now: Time) -> Self {
        Problem::invalid(format!(
            "Idempotency-Key is invalid: it is a UUIDv7 that says it was made more than 28 days after the present, \
             which is {now}: the client's clock is wrong; nothing was done"
        ))
    }

    pub(super) fn answer_too_large(limit: usize, done: bool) -> Self {
        let what = if done { "the request was done" } else { "nothing was done" };
        let detail = format!(
            "the answer to a request with a key is kept, so it may not be a stream, and may have {limit} bytes and \
             {HEADER_BYTES_MAX} of headers that are kept; {what}"
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

    /// A handler runs a second time in one request.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(super) fn taken_before() -> Self {
        let detail = "the transaction of this request was taken and given back before, and can be taken once: a middleware \
                      that tries again must be outside of the layer of keys; nothing was done";
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "transaction-in-use",
            "The transaction was used before",
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
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, "unavailable", "The database is away", detail).retry()
    }

    /// An error of the store. Its details are for the log, not for clients.
    pub(super) fn of_store(error: &Error) -> Self {
        tracing::warn!(target: "hapax", error = %error.chain(), "a keyed request could not be served");
        if error.is_retryable() {
            let detail = "send the request again with the same key";
            let title = "The key store is unavailable or busy";
            return Problem::new(StatusCode::SERVICE_UNAVAILABLE, error.code(), title, detail).retry();
        }
        let title = "The key store failed";
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.code(), title, "the service's log says why")
    }

    /// The problem as an answer that is kept.
    pub(super) fn answer(&self) -> Answer {
        Answer::new(self.status().as_u16(), self.json().to_string()).header("content-type", MEDIA_TYPE)
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
