//! The visit of an operator's browser: a token becomes a cookie that no script can read.
//!
//! The cookie has the token itself, so that whatever ends the token ends the visit: nothing else is stored.
//! A browser sends it along with requests of other pages of this machine too. So a request that changes
//! something and is authenticated by the cookie must come from this server's own page: its `Origin` must be
//! there, and `hosts.rs` refuses a foreign one.

use axum::extract::{FromRequest, Request, State};
use axum::http::header::{COOKIE, HeaderMap, HeaderValue, ORIGIN, SET_COOKIE};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse as _, Response};
use hapax::access::Authentication;
use hapax::problem::Problem;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::app::Shared;
use super::auth::{self, Reader};
use super::extract::Json;
use super::hosts::PeerAddress;

/// The name of the cookie.
const NAME: &str = "hapax_token";

/// Where a browser logs in and out: open to everybody, like the page.
pub const OPEN: [&str; 2] = ["/v1/login", "/v1/logout"];

pub fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(session)).routes(routes!(login)).routes(routes!(logout))
}

/// The token in the cookie, if there is one.
pub fn token(headers: &HeaderMap) -> Option<&str> {
    let pairs = headers.get_all(COOKIE).iter().filter_map(|value| value.to_str().ok());
    let mut found = pairs.flat_map(|value| value.split(';')).filter_map(|pair| {
        let (name, value) = pair.trim().split_once('=')?;
        (name == NAME).then_some(value)
    });
    // Another service of this host may have set a second one: then it is not known which is ours.
    found.next().filter(|_| found.next().is_none())
}

/// Whether a request that carries the cookie may do what it does: anything that may change something must
/// come from this server's page.
pub fn check_origin(method: &Method, headers: &HeaderMap) -> Result<(), Problem> {
    if method.is_safe() || headers.contains_key(ORIGIN) {
        return Ok(()); // a foreign origin was refused before
    }
    let message = "a request with the cookie of the page must have the header Origin; programs send the token as \
                Authorization: Bearer hpx_…; nothing was done";
    Err(Problem::new(StatusCode::FORBIDDEN, "origin-forbidden", "The origin is unknown", message))
}

/// A token to log in with.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LoginBody {
    /// The API token (`hapax token create`).
    #[schema(min_length = 1, max_length = 255)]
    token: String,
}

/// Logs a browser in: the answer sets a cookie
///
/// It is HttpOnly and SameSite=Strict, and ends with the browser. Programs send the token with each request
/// instead.
#[utoipa::path(
    post, path = "/v1/login", tag = "server", request_body = LoginBody,
    responses((status = 204, description = "The cookie is set"))
)]
async fn login(State(app): State<Shared>, request: Request) -> Result<Response, Problem> {
    let peer = request.extensions().get::<PeerAddress>().map(|peer| peer.0);
    let is_secure =
        request.headers().get(ORIGIN).is_some_and(|origin| origin.as_bytes().starts_with(b"https:"));
    let Json(body) = <Json<LoginBody> as FromRequest<Shared>>::from_request(request, &app).await?;
    let text = body.token.trim();
    match app.access.authenticate_from(text, peer).await? {
        Authentication::Granted { .. } => {}
        refused => return Ok(auth::refused(text, refused)),
    }
    Ok(with_cookie(text, is_secure))
}

/// Logs a browser out
#[utoipa::path(
    post, path = "/v1/logout", tag = "server",
    responses((status = 204, description = "The cookie is gone"))
)]
async fn logout() -> Response {
    with_cookie("", false)
}

fn with_cookie(token: &str, is_secure: bool) -> Response {
    let end = if token.is_empty() { "; Max-Age=0" } else { "" };
    let secure = if is_secure { "; Secure" } else { "" };
    let cookie = format!("{NAME}={token}; Path=/; HttpOnly; SameSite=Strict{secure}{end}");
    let mut response = StatusCode::NO_CONTENT.into_response();
    // A token that is valid has letters and digits only.
    if let Ok(cookie) = HeaderValue::from_str(&cookie) {
        response.headers_mut().insert(SET_COOKIE, cookie);
    }
    response
}

/// Who visits.
#[derive(Debug, Serialize, ToSchema)]
pub struct SessionAnswer {
    /// Who it is, as audit rows name it.
    who: String,
    /// `read`, `write` or `admin`.
    role: String,
    /// Whose data; none is a tenant of its own.
    tenant: Option<String>,
    /// The scopes, if only some may be seen.
    scopes: Option<Vec<String>>,
    /// Whether what is counted for the whole server may be seen, and what all tenants have.
    whole: bool,
    /// Whether the server asks for no token, because there is none and only this machine can call.
    local: bool,
    /// How commands reach the same stores: `hapax` with the flags that this server was started with. Only for
    /// those who see the whole server.
    command: Option<String>,
    /// Whether this is the page of `hapax demo`, which has buttons of its own.
    demo: bool,
    /// The version of the server.
    version: &'static str,
}

/// Who calls, and what they may see
#[utoipa::path(
    get, path = "/v1/session", tag = "server",
    responses((status = 200, description = "The caller", body = SessionAnswer))
)]
async fn session(Reader(caller): Reader, State(app): State<Shared>) -> Json<SessionAnswer> {
    let whole = caller.needs_all_tenants().is_ok();
    let scopes = match caller.scopes() {
        hapax::access::Scopes::All => None,
        hapax::access::Scopes::Only(scopes) => Some(scopes.iter().map(ToString::to_string).collect()),
    };
    Json(SessionAnswer {
        who: caller.who().to_owned(),
        role: caller.role.to_string(),
        tenant: caller.tenant.as_ref().map(ToString::to_string),
        scopes,
        whole,
        local: caller.token().is_none(),
        command: whole
            .then(|| format!("hapax{}", app.global.given(&["--data", "--ledger", "--journal", "--bus"]))),
        demo: app.watched.is_some(),
        version: env!("CARGO_PKG_VERSION"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(cookies: &[&'static str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for cookie in cookies {
            headers.append(COOKIE, HeaderValue::from_static(cookie));
        }
        headers
    }

    #[test]
    fn one_cookie_with_the_token_is_read_and_two_are_none() {
        assert_eq!(token(&headers(&["a=b; hapax_token=hpx_1; c=d"])), Some("hpx_1"));
        assert_eq!(token(&headers(&["a=b", "hapax_token=hpx_1"])), Some("hpx_1"));
        for none in
            [&["a=b"][..], &["xhapax_token=1"], &["hapax_token"], &["hapax_token=1; hapax_token=2"], &[]]
        {
            assert_eq!(token(&headers(none)), None, "{none:?}");
        }
    }

    #[test]
    fn a_write_with_the_cookie_needs_an_origin() {
        let mut headers = headers(&["hapax_token=1"]);
        assert!(check_origin(&Method::GET, &headers).is_ok());
        assert!(check_origin(&Method::POST, &headers).is_err());
        headers.insert(ORIGIN, HeaderValue::from_static("http://localhost:7070"));
        assert!(check_origin(&Method::POST, &headers).is_ok(), "hosts.rs has looked at it");
    }
}
