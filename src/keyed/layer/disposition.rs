//! What becomes of an answer.

use std::convert::Infallible;

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{MatchedPath, OriginalUri};
use axum::http::header::CONTENT_TYPE;
use axum::http::{Request, StatusCode, response};
use axum::response::{IntoResponseParts, Response, ResponseParts};
use http_body_util::LengthLimitError;

use crate::keyed::answer::HEADER_BYTES_MAX;
use crate::keyed::{Answer, KEPT_HEADERS};

/// Marks an answer that is not kept, whatever its status: the request did nothing, and the next one
/// with the key runs. In a transaction the handler's writes are undone.
///
/// For requests that a handler refuses before it has begun its work, because of something that is
/// not part of the request's fingerprint or that may change later: a header, a missing parent.
///
/// ```
/// use axum::{http::StatusCode, response::IntoResponse as _};
/// use hapax::keyed::NotKept;
/// let answer = (NotKept, (StatusCode::NOT_FOUND, "there is no such shop yet")).into_response();
/// assert!(answer.extensions().get::<NotKept>().is_some());
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NotKept;

impl IntoResponseParts for NotKept {
    type Error = Infallible;

    fn into_response_parts(self, mut response: ResponseParts) -> Result<ResponseParts, Infallible> {
        response.extensions_mut().insert(self);
        Ok(response)
    }
}

/// What a handler answered.
pub(super) enum Handled {
    Answered(response::Parts, Bytes),
    /// The body is a stream, or body or headers are larger than can be kept. Carries the
    /// disposition that it would otherwise have.
    TooLarge(Disposition),
    /// The body ended early. Carries the disposition that it would otherwise have.
    Broken(Disposition),
    /// It panicked, or was stopped.
    Ended,
}

/// What becomes of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Disposition {
    Kept,
    /// Nothing happened, and the same request may succeed later.
    Undone,
    Failed,
}

/// What becomes of an answer.
fn disposition(answer: &response::Parts) -> Disposition {
    if answer.extensions.get::<NotKept>().is_some() {
        return Disposition::Undone;
    }
    match answer.status.as_u16() {
        // Somebody's time was over, and what they did until then is not known.
        408 => Disposition::Failed,
        // About who sends it or when; and about how it was sent: its headers are not part of the
        // fingerprint, and the next request may have better ones.
        401 | 403 | 406 | 407 | 409 | 411..=415 | 417 | 421 | 425 | 426 | 428 | 429 | 431 => {
            Disposition::Undone
        }
        200..=499 => Disposition::Kept,
        _ => Disposition::Failed,
    }
}

/// What the router has said about a request before it reached the layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Routed {
    /// A router has seen the request.
    by_router: bool,
    /// It found a route.
    matched: bool,
}

impl Routed {
    pub(super) fn of(request: &Request<Body>) -> Self {
        let of = request.extensions();
        Routed { by_router: of.get::<OriginalUri>().is_some(), matched: of.get::<MatchedPath>().is_some() }
    }

    /// What becomes of an answer. A router's own 404 and 405 are not kept: the route may exist
    /// after the next deployment, and the retry must reach it.
    ///
    /// A router that wraps the layer marks a request that has a route, so any 404 without that mark
    /// is from a fallback. Where the layer wraps the router there are no marks: only a 404 without a
    /// body is the router's. A 405 has no mark anywhere; the router's has no body.
    pub(super) fn disposition(self, answer: &response::Parts, body: &Bytes) -> Disposition {
        let nobody = match answer.status {
            StatusCode::METHOD_NOT_ALLOWED => body.is_empty(),
            StatusCode::NOT_FOUND => !self.matched && (self.by_router || body.is_empty()),
            _ => false,
        };
        if nobody { Disposition::Undone } else { disposition(answer) }
    }
}

/// Collects an answer.
pub(super) async fn collect(response: Response, bytes_max: usize) -> Handled {
    let (parts, body) = response.into_parts();
    let stream =
        parts.headers.get(CONTENT_TYPE).is_some_and(|of| of.as_bytes().starts_with(b"text/event-stream"));
    let kept = parts.headers.iter().filter(|(name, _)| KEPT_HEADERS.contains(&name.as_str()));
    let header_bytes: usize = kept.map(|(name, value)| name.as_str().len() + value.len()).sum();
    if stream || header_bytes > HEADER_BYTES_MAX {
        return Handled::TooLarge(disposition(&parts));
    }
    match to_bytes(body, bytes_max).await {
        Ok(bytes) => Handled::Answered(parts, bytes),
        Err(error) if is_too_large(&error) => Handled::TooLarge(disposition(&parts)),
        Err(_) => Handled::Broken(disposition(&parts)),
    }
}

/// An answer as it is kept.
pub(super) fn kept(parts: &response::Parts, body: &Bytes) -> Answer {
    let answer = Answer::new(parts.status.as_u16(), body.clone());
    parts.headers.iter().fold(answer, |answer, (name, value)| answer.header(name.as_str(), value.as_bytes()))
}

/// Whether a body could not be read because of its size.
pub(super) fn is_too_large(error: &axum::Error) -> bool {
    std::error::Error::source(error).is_some_and(<dyn std::error::Error>::is::<LengthLimitError>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_routers_own_answers_are_nobodys() {
        let (route, fallback) =
            (Routed { by_router: true, matched: true }, Routed { by_router: true, matched: false });
        let outside = Routed { by_router: false, matched: false };
        let (none, some) = (Bytes::new(), Bytes::from_static(b"no such order"));
        for (routed, status, body, kept) in [
            (route, 404, &none, Disposition::Kept),
            (route, 404, &some, Disposition::Kept),
            (fallback, 404, &none, Disposition::Undone),
            (fallback, 404, &some, Disposition::Undone),
            (fallback, 201, &none, Disposition::Kept),
            (outside, 404, &none, Disposition::Undone),
            (outside, 404, &some, Disposition::Kept),
            (route, 405, &none, Disposition::Undone),
            (route, 405, &some, Disposition::Kept),
            (route, 408, &some, Disposition::Failed),
            (route, 409, &some, Disposition::Undone),
            (route, 415, &some, Disposition::Undone),
            (route, 500, &some, Disposition::Failed),
        ] {
            let status = StatusCode::from_u16(status).unwrap_or_default();
            let (mut parts, ()) = Response::new(()).into_parts();
            parts.status = status;
            assert_eq!(routed.disposition(&parts, body), kept, "{routed:?} {status} {body:?}");
            parts.extensions.insert(NotKept);
            assert_eq!(routed.disposition(&parts, body), Disposition::Undone, "{routed:?} {status} {body:?}");
        }
    }
}
