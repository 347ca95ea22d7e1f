//! Who calls, and what they may do.
//!
//! Every request but those for probes, the API's description and the files of the page is authenticated here, before its route
//! runs: a route that forgets to ask is not open. Requests that look need the role `read`, others
//! `write`; a route may ask for more (`Operator`).
//!
//! A store without tokens has only this machine as its caller: a listener on a loopback address lets
//! requests pass as an operator's, for the tenant in `Hapax-Tenant` or none. As soon as there is a
//! token, or on any other address, a request needs one, and the tenant is the token's.

use std::net::IpAddr;

use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::header::{AUTHORIZATION, HeaderValue, WWW_AUTHENTICATE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hapax::access::{ApiToken, Authentication, Grant, Scopes, TokenId};
use hapax::config::{Config, Migrate, sqlite_path};
use hapax::problem::Problem;
use hapax::{Error, Scope, Tenant};

pub use hapax::access::Role;

use super::app::Shared;
use super::hosts::PeerAddress;
use super::{page, session};
use crate::cli::Global;
use crate::failure::Failure;

/// Routes that ask nobody who calls.
const OPEN: [&str; 3] = ["/healthz", "/readyz", "/openapi.json"];

/// Where a request came in.
#[derive(Clone)]
pub struct Listener {
    pub app: Shared,
    /// Whether only this machine can reach it.
    pub loopback: bool,
}

/// Who calls.
#[derive(Debug, Clone)]
pub struct Caller {
    /// Whose data; none is a tenant of its own.
    pub tenant: Option<Tenant>,
    /// Who it is, in a word that stays the same when a secret is rotated.
    pub principal: String,
    /// What they may do.
    pub role: Role,
    /// For which scopes.
    scopes: Scopes,
    /// Who it is, for people.
    who: String,
    /// The token, if the listener asked for one.
    token: Option<TokenId>,
    /// Whether the listener asked for no token.
    is_local: bool,
}

impl Caller {
    fn of(grant: Grant) -> Self {
        Caller {
            principal: grant.principal().unwrap_or("loopback").to_owned(),
            who: grant.token.as_ref().map_or_else(|| "loopback".to_owned(), |_| grant.who()),
            is_local: grant.token.is_none(),
            token: grant.token.clone(),
            tenant: grant.tenant,
            role: grant.role,
            scopes: grant.scopes,
        }
    }

    /// Who it is, for audit rows.
    pub fn who(&self) -> &str {
        &self.who
    }

    /// Whether the caller has this role.
    pub fn needs(&self, role: Role) -> Result<(), Problem> {
        if self.role >= role {
            return Ok(());
        }
        Err(forbidden(format!("this needs the role {role}; {} has the role {}", self.who, self.role))
            .member("role", role.as_str()))
    }

    /// The scope that a request names, if the caller may use it.
    pub fn scope(&self, text: &str) -> Result<Scope, Problem> {
        let scope = Scope::new(text)?;
        if self.scopes.contain(&scope) {
            return Ok(scope);
        }
        let message = format!("this needs the scope {scope}, which {} may not use", self.who);
        Err(forbidden(message).member("scope", scope.as_str()))
    }

    /// For which scopes.
    pub fn scopes(&self) -> &Scopes {
        &self.scopes
    }

    /// The token that calls, if one does.
    pub fn token(&self) -> Option<&TokenId> {
        self.token.as_ref()
    }

    /// Whether something of this tenant is the caller's.
    pub fn owns(&self, tenant: Option<&Tenant>) -> bool {
        self.tenant.as_ref() == tenant
    }

    /// Whether something of this scope is among what the caller may see.
    pub fn sees(&self, scope: &Scope) -> bool {
        self.scopes.contain(scope)
    }

    /// Whether the caller is without a tenant and for all scopes: what is counted for the whole server is
    /// for nobody else.
    pub fn is_unbound(&self) -> bool {
        self.tenant.is_none() && self.scopes == Scopes::All
    }

    /// Whether the caller may look at what is counted for the whole server.
    pub fn needs_whole_server(&self) -> Result<(), Problem> {
        // Without a token, who names a tenant can as well name none.
        if self.is_local || self.is_unbound() {
            return Ok(());
        }
        let message = format!(
            "this is about all tenants and scopes, so it needs a token without a tenant and for all scopes; \
             {} has a tenant or scopes",
            self.who
        );
        Err(forbidden(message))
    }

    /// Whether the caller may look beyond its tenant: an operator without a tenant and for all scopes.
    pub fn needs_all_tenants(&self) -> Result<(), Problem> {
        self.needs(Role::Admin)?;
        self.needs_whole_server()
    }

    /// Whether the caller may make, or end, a token that permits this: nobody hands out more than they
    /// have. An operator of all tenants has everything.
    pub fn covers(&self, tenant: Option<&Tenant>, scopes: &Scopes, role: Role) -> bool {
        self.needs_all_tenants().is_ok()
            || (self.owns(tenant) && self.scopes.contain_all(scopes) && self.role >= role)
    }
}

/// Lets a request pass to its route if its caller may.
pub async fn authorise(State(listener): State<Listener>, mut request: Request, next: Next) -> Response {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    // Anybody may learn that there is no such route.
    let is_open =
        |route: &str| OPEN.contains(&route) || session::OPEN.contains(&route) || page::is_page(route);
    if route.is_none_or(is_open) {
        return next.run(request).await;
    }
    let needed = match *request.method() {
        Method::GET | Method::HEAD => Role::Read,
        _ => Role::Write,
    };
    let peer = request.extensions().get::<PeerAddress>().map(|peer| peer.0);
    let caller = match authenticated(&listener, peer, request.method(), request.headers()).await {
        Ok(caller) => caller,
        Err(response) => return response,
    };
    if let Err(problem) = caller.needs(needed) {
        return problem.into_response();
    }
    request.extensions_mut().insert(caller);
    next.run(request).await
}

#[allow(clippy::result_large_err, reason = "the error is the answer")]
async fn authenticated(
    listener: &Listener,
    peer: Option<IpAddr>,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Caller, Response> {
    let grant = granted(listener, peer, method, headers).await?;
    if let Some(id) = grant.principal() {
        if let Err(wait) = listener.app.rate.take(id) {
            let message = "rate limit exceeded (serve.rate_per_s); ";
            return Err(rate_limited(message, wait).into_response());
        }
        let asked = tenant(headers).map_err(Problem::into_response)?;
        if asked.is_some() && asked != grant.tenant {
            let message =
                "the header Hapax-Tenant names another tenant than the token's; leave it out".to_owned();
            return Err(forbidden(message).into_response());
        }
    }
    Ok(Caller::of(grant))
}

/// What the token of a request grants; or what anybody on this machine may do, while there is no token.
#[allow(clippy::result_large_err, reason = "the error is the answer")]
async fn granted(
    listener: &Listener,
    peer: Option<IpAddr>,
    method: &Method,
    headers: &HeaderMap,
) -> Result<Grant, Response> {
    let access = &listener.app.access;
    let refuse = |error: Error| Problem::of(&error).into_response();
    if listener.loopback && !access.has_tokens().await.map_err(refuse)? {
        let tenant = tenant(headers).map_err(Problem::into_response)?;
        return Ok(Grant::without_token(tenant));
    }
    // A program's header counts before a browser's cookie.
    let token = match session::token(headers).filter(|_| !token_given(headers)) {
        Some(token) => {
            session::check_origin(method, headers).map_err(Problem::into_response)?;
            token
        }
        None => bearer(headers).map_err(|message| unauthenticated(&message, token_given(headers)))?,
    };
    match access.authenticate_from(token, peer).await.map_err(refuse)? {
        Authentication::Granted { grant, .. } => Ok(grant),
        said => Err(refused(token, said)),
    }
}

/// What a caller has shown, to be looked at again while an answer goes on.
#[derive(Clone)]
pub struct Shown {
    listener: Listener,
    peer: Option<IpAddr>,
    headers: HeaderMap,
}

impl Shown {
    /// The caller, if it still is one with this role. Its rate is not counted: it has not asked again.
    pub async fn still(&self, role: Role) -> Option<Caller> {
        let grant = granted(&self.listener, self.peer, &Method::GET, &self.headers).await.ok()?;
        Some(Caller::of(grant)).filter(|caller| caller.needs(role).is_ok())
    }
}

impl FromRequestParts<Shared> for Shown {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, Problem> {
        let caller = parts.extensions.get::<Caller>().ok_or_else(missing)?;
        Ok(Shown {
            // Only a listener on a loopback address lets anybody call without a token.
            listener: Listener { app: Shared::clone(app), loopback: caller.is_local },
            peer: parts.extensions.get::<PeerAddress>().map(|peer| peer.0),
            headers: parts.headers.clone(),
        })
    }
}

/// The answer to a token that grants nothing.
pub fn refused(token: &str, said: Authentication) -> Response {
    match said {
        Authentication::Expired => unauthenticated("the token has expired", true),
        Authentication::Throttled { wait } => {
            let message = "too many tokens that nobody knows were sent to this server just now, and this one \
                        was not looked up; ";
            rate_limited(message, wait).into_response()
        }
        Authentication::Malformed => {
            let message = ApiToken::parse(token).err().map_or_else(String::new, |error| error.to_string());
            unauthenticated(&format!("{message}; the token was cut off or mistyped"), true)
        }
        // Whoever guesses learns no more than that they guessed wrong.
        said => {
            tracing::warn!(target: "hapax", said = said.word(), "a request came with a token that is not valid");
            unauthenticated("the token is not valid", true)
        }
    }
}

fn token_given(headers: &HeaderMap) -> bool {
    headers.contains_key(AUTHORIZATION)
}

/// The one token in the headers. The error is a sentence.
pub(super) fn bearer(headers: &HeaderMap) -> Result<&str, String> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let Some(value) = values.next() else {
        return Err("this needs a token: send the header Authorization: Bearer hpx_…".into());
    };
    // A proxy in front may look at the first one, and we at the last.
    if values.next().is_some() {
        return Err("the header Authorization was sent more than once".into());
    }
    let bad = "the header Authorization is not Bearer hpx_…";
    let text = value.to_str().map_err(|_| bad)?;
    let (scheme, token) = text.split_once(' ').ok_or(bad)?;
    if !scheme.eq_ignore_ascii_case("bearer") {
        return Err(bad.into());
    }
    Ok(token.trim_matches(' '))
}

/// The tenant that a request names.
fn tenant(headers: &HeaderMap) -> Result<Option<Tenant>, Problem> {
    let mut values = headers.get_all("hapax-tenant").iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => {
            let text = std::str::from_utf8(value.as_bytes())
                .map_err(|_| Error::invalid("Hapax-Tenant", "it is not UTF-8"))?;
            Ok(Some(Tenant::new(text)?))
        }
        _ => Err(Error::invalid("Hapax-Tenant", "the header was sent more than once").into()),
    }
}

fn missing() -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, "unauthenticated", "Authentication required", "this needs a token")
}

fn unauthenticated(message: &str, given: bool) -> Response {
    let problem = Problem::new(
        StatusCode::UNAUTHORIZED,
        "unauthenticated",
        "Authentication required",
        message.to_owned(),
    );
    let mut response = problem.into_response();
    let challenge =
        if given { "Bearer realm=\"hapax\", error=\"invalid_token\"" } else { "Bearer realm=\"hapax\"" };
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static(challenge));
    response
}

fn forbidden(message: String) -> Problem {
    Problem::new(StatusCode::FORBIDDEN, "forbidden", "The caller may not do this", message)
}

fn rate_limited(message: &str, wait: std::time::Duration) -> Problem {
    let message = format!("{message}the next request is allowed in {} ms", wait.as_millis() + 1);
    Problem::new(StatusCode::TOO_MANY_REQUESTS, "rate-limited", "Too many requests", message).retry()
}

macro_rules! role {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $name(pub Caller);

        impl FromRequestParts<Shared> for $name {
            type Rejection = Problem;

            async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, Problem> {
                let caller = parts.extensions.get::<Caller>().ok_or_else(missing)?;
                caller.needs(role!(@ $name))?;
                Ok($name(caller.clone()))
            }
        }
    };
    (@ Reader) => { Role::Read };
    (@ Writer) => { Role::Write };
    (@ Operator) => { Role::Admin };
}

role!(/// A caller that may look.
    Reader);
role!(/// A caller that may claim, settle and append.
    Writer);
role!(/// A caller that may intervene.
    Operator);

/// Refuses to listen where other machines can call while there is no token: nobody could use it, and a
/// mistake in the name of the database would go unnoticed. Looks, and makes nothing.
pub async fn check_addresses(global: &Global, config: &Config) -> Result<(), Failure> {
    let serve = &config.serve;
    for (flag, address) in [("--listen", Some(serve.listen)), ("--admin-listen", serve.admin_listen)] {
        let Some(address) = address.filter(|address| !address.ip().is_loopback()) else { continue };
        if serve.bootstrap_token.trim().is_empty() && !has_tokens(config).await? {
            return Err(Failure::config(format!(
                "{flag} {address} can be reached from other machines, and there are no tokens in {}: make one with \
                 `hapax{} token create --name NAME`, give one by serve.bootstrap_token, or listen on 127.0.0.1",
                config.keys_url_shown(),
                global.given(&["--data", "--journal"])
            )));
        }
    }
    Ok(())
}

async fn has_tokens(config: &Config) -> Result<bool, Failure> {
    let missing = sqlite_path(&config.keys.url).is_some_and(|path| !path.exists());
    if missing || config.keys.url == "memory:" {
        return Ok(false);
    }
    let mut settings = config.keys_settings();
    settings.migrate = Migrate::Check;
    match hapax::open::access_with(&config.keys.url, &settings).await {
        Ok(store) => Ok(store.has_tokens().await?),
        Err(Error::Schema(_)) => Ok(false), // no tables yet, or older ones: opening them says more
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(values: &[&[u8]]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(AUTHORIZATION, HeaderValue::from_bytes(value).unwrap());
        }
        headers
    }

    #[test]
    fn t184_one_header_with_one_token_is_read_and_nothing_else() {
        assert_eq!(bearer(&headers(&[b"Bearer abc"])).unwrap(), "abc");
        assert_eq!(bearer(&headers(&[b"bEARER   abc "])).unwrap(), "abc");
        let bad: [&[&[u8]]; 9] = [
            &[],
            &[b"Bearer abc", b"Bearer abc"],
            &[b"Bearer abc", b"Basic abc"],
            &[b"Basic abc"],
            &[b"Bearer"],
            &[b"abc"],
            &[b""],
            &[b"Bearer \xff"],
            &[b"Bearer\tabc"],
        ];
        for bad in bad {
            let error = bearer(&headers(bad)).unwrap_err();
            assert!(!error.contains("abc"), "{error}");
        }
    }

    fn caller(tenant: Option<&str>, scopes: &[&str], role: Role) -> Caller {
        let scopes = Scopes::of(scopes.iter().map(|name| Scope::new(name).unwrap()));
        let tenant = tenant.map(|name| Tenant::new(name).unwrap());
        Caller { scopes, role, is_local: false, ..Caller::of(Grant::without_token(tenant)) }
    }

    #[test]
    fn t186_nobody_hands_out_more_than_they_have() {
        let acme = Tenant::new("acme").unwrap();
        let operator = caller(None, &[], Role::Admin);
        assert!(
            operator.covers(Some(&acme), &Scopes::All, Role::Admin) && operator.needs_all_tenants().is_ok()
        );
        let of_acme = caller(Some("acme"), &[], Role::Admin);
        assert!(of_acme.needs_all_tenants().is_err());
        assert!(of_acme.covers(Some(&acme), &Scopes::All, Role::Admin));
        assert!(!of_acme.covers(None, &Scopes::All, Role::Read));
        let scoped = caller(None, &["mailer"], Role::Admin);
        assert!(scoped.needs_all_tenants().is_err() && !scoped.covers(None, &Scopes::All, Role::Read));
        assert!(scoped.scope("mailer").is_ok() && scoped.scope("billing").is_err());
        let writer = caller(None, &[], Role::Write);
        assert!(writer.needs_all_tenants().is_err() && !writer.covers(None, &Scopes::All, Role::Admin));
    }
}
