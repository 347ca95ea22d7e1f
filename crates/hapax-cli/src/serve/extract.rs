//! Reads requests and writes answers. What is wrong with a request is a problem with a sentence.

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::header::CONTENT_TYPE;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use hapax::Error;
use hapax::problem::Problem;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde::de::DeserializeOwned;
use utoipa::{IntoParams, ToSchema};

use super::app::Shared;
use super::wording;

/// A body of JSON: of a request, or of an answer.
#[derive(Debug)]
pub struct Json<T>(pub T);

impl<T: DeserializeOwned + ToSchema> FromRequest<Shared> for Json<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &Shared) -> Result<Self, Problem> {
        check_media_type(request.headers())?;
        let bytes = read(request.into_body(), app.config.serve.body_bytes_max).await?;
        serde_json::from_slice(&bytes).map(Json).map_err(|error| not_json::<T>(&bytes, &error))
    }
}

impl<T: Serialize> IntoResponse for Json<T> {
    fn into_response(self) -> Response {
        match serde_json::to_vec(&self.0) {
            Ok(bytes) => {
                let mut response = Response::new(Body::from(bytes));
                response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
                response
            }
            Err(error) => {
                tracing::error!(target: "hapax", %error, "an answer could not be written");
                internal().into_response()
            }
        }
    }
}

/// Something that must not happen did; the log says what.
pub fn internal() -> Problem {
    let message = "the server's log says why";
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "The server failed", message)
}

fn check_media_type(headers: &HeaderMap) -> Result<(), Problem> {
    let content_type =
        headers.get(CONTENT_TYPE).map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    let essence = content_type.as_deref().unwrap_or_default().split(';').next().unwrap_or_default().trim();
    let essence = essence.to_ascii_lowercase();
    if essence == "application/json" || (essence.starts_with("application/") && essence.ends_with("+json")) {
        return Ok(());
    }
    let detail = match content_type {
        Some(content_type) => {
            format!("the body is {content_type:?}; send JSON, with Content-Type: application/json")
        }
        None => "the request says nothing about its body; send JSON, with Content-Type: application/json"
            .to_owned(),
    };
    Err(Problem::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "media-type", "The body is not JSON", detail))
}

/// Reads a body of at most `limit` bytes.
pub async fn read(body: Body, limit: usize) -> Result<Bytes, Problem> {
    to_bytes(body, limit).await.map_err(|error| {
        let source = std::error::Error::source(&error);
        if source.is_some_and(<dyn std::error::Error>::is::<http_body_util::LengthLimitError>) {
            let message =
                format!("the request body exceeds {limit} bytes (serve.body_bytes_max); nothing was done");
            Problem::new(StatusCode::PAYLOAD_TOO_LARGE, "body-too-large", "The body is too large", message)
        } else {
            let message = "the request body could not be read to its end; nothing was done";
            Problem::new(StatusCode::BAD_REQUEST, "body-unreadable", "The body could not be read", message)
        }
    })
}

fn not_json<T: DeserializeOwned + ToSchema>(bytes: &[u8], error: &serde_json::Error) -> Problem {
    let detail = wording::of_body::<T>(bytes, error);
    Problem::new(StatusCode::BAD_REQUEST, "json-invalid", "The body is not what is expected", detail)
        .member("line", error.line())
        .member("column", error.column())
}

/// The parameters after the question mark.
#[derive(Debug)]
pub struct Params<T>(pub T);

impl<T: DeserializeOwned + IntoParams> FromRequestParts<Shared> for Params<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, Problem> {
        // The parser would replace it, and another id would be meant.
        if percent_decode_str(parts.uri.query().unwrap_or_default()).decode_utf8().is_err() {
            let message = "it has percent-encoded bytes that are not UTF-8";
            return Err(Error::invalid("query", message).into());
        }
        match Query::try_from_uri(&parts.uri) {
            Ok(Query(params)) => Ok(Params(params)),
            Err(rejection) => {
                let pairs = Query::<Vec<(String, String)>>::try_from_uri(&parts.uri);
                let pairs = pairs.map(|Query(pairs)| pairs).unwrap_or_default();
                let message = wording::of_query::<T>(&pairs, &rejection.body_text());
                Err(Error::invalid("query", message).into())
            }
        }
    }
}

/// The name in a path, or all of them, decoded.
#[derive(Debug)]
pub struct Named<T = String>(pub T);

impl<T: DeserializeOwned + Send> FromRequestParts<Shared> for Named<T> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        match Path::<T>::from_request_parts(parts, app).await {
            Ok(Path(name)) => Ok(Named(name)),
            Err(rejection) => Err(Error::invalid("path", rejection.body_text()).into()),
        }
    }
}

/// The most things on a page, as the API's description says.
pub const PAGE_MAX: usize = 1000;

/// How many things to list: what was asked for, from 1 to `max`, or `default`.
pub fn limit(asked: Option<u64>, default: usize, max: usize) -> Result<usize, Problem> {
    match asked {
        None => Ok(default.min(max)),
        Some(asked) if asked >= 1 && asked <= max as u64 => Ok(usize::try_from(asked).unwrap_or(max)),
        Some(asked) => Err(Error::invalid("limit", format!("it is {asked}; it must be 1 to {max}")).into()),
    }
}
