//! Which names the server answers to, and whose pages may change something.
//!
//! A web page that somebody visits can send requests to this machine. If its name is made to point here
//! (DNS rebinding), it can read the answers too. So a request must name this server as its host, and a
//! request that changes something must not come from another site's page.
//!
//! The address at which a connection arrived is always a name of this server: the page of an address
//! comes from who has it.

use std::net::IpAddr;

use axum::http::header::{HOST, ORIGIN};
use axum::http::uri::Authority;
use axum::http::{HeaderMap, Method, StatusCode, Uri};
use hapax::config::ServeSection;
use hapax::problem::Problem;

/// The address of this machine at which a connection arrived.
#[derive(Debug, Clone, Copy)]
pub struct LocalAddress(pub IpAddr);

/// The address that a connection came from.
#[derive(Debug, Clone, Copy)]
pub struct PeerAddress(pub IpAddr);

/// The names that the server answers to.
#[derive(Debug, Clone)]
pub struct Hosts(Vec<String>);

/// The address that is a host's name, if it is one.
fn literal(host: &str) -> Option<IpAddr> {
    match host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(six) => six.parse().ok().map(IpAddr::V6),
        None => host.parse().ok().map(IpAddr::V4),
    }
}

impl Hosts {
    pub fn of(serve: &ServeSection) -> Self {
        let mut names: Vec<_> = ["localhost", "127.0.0.1", "[::1]"].map(str::to_owned).into();
        for address in [Some(serve.listen), serve.admin_listen].into_iter().flatten() {
            names.push(match address.ip() {
                IpAddr::V4(ip) => ip.to_string(),
                IpAddr::V6(ip) => format!("[{ip}]"),
            });
        }
        names.extend(serve.hosts.iter().cloned());
        Hosts(names)
    }

    fn knows(&self, host: &str, local: Option<LocalAddress>) -> bool {
        let is_local =
            || local.is_some_and(|local| literal(host).is_some_and(|ip| ip.to_canonical() == local.0));
        self.0.iter().any(|name| name.eq_ignore_ascii_case(host)) || is_local()
    }

    /// Refuses a request for another host, or from another site.
    pub fn check(
        &self,
        local: Option<LocalAddress>,
        method: &Method,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<(), Problem> {
        let host = self.host(local, uri, headers)?;
        if [Method::GET, Method::HEAD, Method::OPTIONS, Method::TRACE].contains(method) {
            return Ok(()); // it changes nothing
        }
        for origin in headers.get_all(ORIGIN) {
            let same = std::str::from_utf8(origin.as_bytes()).is_ok_and(|origin| {
                let rest = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
                rest.is_some_and(|rest| rest.eq_ignore_ascii_case(host.as_str()))
            });
            if !same {
                let message = format!(
                    "the request comes from a page of {}, and only pages of {host} may change something here; nothing was done",
                    String::from_utf8_lossy(origin.as_bytes())
                );
                return Err(Problem::new(
                    StatusCode::FORBIDDEN,
                    "origin-forbidden",
                    "The origin is foreign",
                    message,
                ));
            }
        }
        Ok(())
    }

    fn host(
        &self,
        local: Option<LocalAddress>,
        uri: &Uri,
        headers: &HeaderMap,
    ) -> Result<Authority, Problem> {
        let refused = |message: String| {
            let message = format!("{message}; serve.hosts adds one; nothing was done");
            Problem::new(StatusCode::FORBIDDEN, "host-forbidden", "The host is unknown", message)
        };
        let mut named = headers.get_all(HOST).iter();
        let host = match (named.next(), named.next()) {
            (Some(host), None) => Authority::try_from(host.as_bytes()).ok(),
            (None, _) => return Err(refused("the request has no Host header".to_owned())),
            (Some(_), Some(_)) => return Err(refused("the request names two hosts".to_owned())),
        };
        let Some(host) = host else {
            return Err(refused("the request's Host is not a name with a port".to_owned()));
        };
        for authority in uri.authority().into_iter().chain([&host]) {
            // Nothing but a port may follow the name.
            let plain = authority.as_str() == authority.host() || authority.port_u16().is_some();
            let known = plain && !authority.as_str().contains('@') && self.knows(authority.host(), local);
            if !known {
                return Err(refused(format!("{:?} is not a name of this server", authority.as_str())));
            }
        }
        Ok(host)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;
    use hapax::config::{Config, Sources};

    fn check(method: &Method, uri: &str, headers: &[(&'static str, &str)]) -> Result<(), &'static str> {
        check_at(None, method, uri, headers)
    }

    fn check_at(
        local: Option<&str>,
        method: &Method,
        uri: &str,
        headers: &[(&'static str, &str)],
    ) -> Result<(), &'static str> {
        let local = local.map(|ip| LocalAddress(ip.parse::<IpAddr>().unwrap().to_canonical()));
        let config = Config::load(&Sources::new().flag("serve.hosts", "--set", "api.example")).unwrap();
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.append(*name, HeaderValue::from_str(value).unwrap());
        }
        let uri = uri.parse().unwrap();
        Hosts::of(&config.serve).check(local, method, &uri, &map).map_err(|problem| problem.code())
    }

    #[test]
    fn t235_the_address_of_the_connection_is_a_name_and_no_other_address_is() {
        let at = |local: &str, host: &str| check_at(Some(local), &Method::GET, "/", &[("host", host)]);
        for (local, host) in [
            ("10.1.2.3", "10.1.2.3:7070"),
            ("10.1.2.3", "10.1.2.3"),
            ("::ffff:10.1.2.3", "10.1.2.3:7070"),
            ("2001:db8::1", "[2001:db8::1]:7070"),
            ("2001:db8::1", "[2001:0DB8:0::1]"),
        ] {
            assert_eq!(at(local, host), Ok(()), "{host} at {local}");
        }
        for (local, host) in [
            ("10.1.2.3", "10.1.2.4:7070"),
            ("10.1.2.3", "10.1.2.3.evil.example"),
            ("10.1.2.3", "10.1.2.3@evil.example"),
            ("10.1.2.3", "0x0a.1.2.3"),
            ("2001:db8::1", "[2001:db8::2]:7070"),
        ] {
            assert_eq!(at(local, host), Err("host-forbidden"), "{host} at {local}");
        }
        assert_eq!(check(&Method::GET, "/", &[("host", "10.1.2.3")]), Err("host-forbidden"));
    }

    #[test]
    fn t161_a_name_that_was_made_to_point_here_is_refused() {
        for host in
            ["localhost", "LOCALHOST:7070", "127.0.0.1:1", "[::1]:7070", "api.example", "Api.Example:80"]
        {
            assert_eq!(check(&Method::GET, "/", &[("host", host)]), Ok(()), "{host}");
        }
        for host in [
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1@evil.example",
            "evil.example@127.0.0.1",
            "",
            "0x7f.1",
            "localhost:x",
        ] {
            assert_eq!(check(&Method::GET, "/", &[("host", host)]), Err("host-forbidden"), "{host}");
        }
        assert_eq!(check(&Method::GET, "/", &[]), Err("host-forbidden"));
        assert_eq!(
            check(&Method::GET, "/", &[("host", "localhost"), ("host", "localhost")]),
            Err("host-forbidden")
        );
        assert_eq!(
            check(&Method::GET, "http://evil.example/", &[("host", "localhost")]),
            Err("host-forbidden")
        );
        assert_eq!(
            check(&Method::GET, "http://localhost/", &[("host", "evil.example")]),
            Err("host-forbidden")
        );
    }

    #[test]
    fn t162_pages_of_other_sites_change_nothing() {
        let post = |origin| check(&Method::POST, "/", &[("host", "localhost:7070"), ("origin", origin)]);
        assert_eq!(post("http://localhost:7070"), Ok(()));
        assert_eq!(check(&Method::POST, "/", &[("host", "localhost:7070")]), Ok(()), "no browser");
        for origin in
            ["http://evil.example", "null", "http://localhost:7071", "http://localhost", "", "file://"]
        {
            assert_eq!(post(origin), Err("origin-forbidden"), "{origin}");
        }
        let get = check(&Method::GET, "/", &[("host", "localhost"), ("origin", "http://evil.example")]);
        assert_eq!(get, Ok(()), "it cannot read the answer");
    }

    /// Whatever a `Host` or an `Origin` is made of, only the known names pass, and no page of another site.
    #[test]
    fn no_mixture_of_parts_is_a_name_of_this_server() {
        let mut state = 17_u64;
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let parts = [
            "localhost",
            "127.0.0.1",
            "[::1]",
            "api.example",
            "evil.example",
            ":",
            "80",
            "@",
            ".",
            "/",
            "?",
            "#",
            "%",
            " ",
        ];
        for _ in 0..20_000 {
            let mixture: String = (0..=next() % 4).map(|_| parts[next() % parts.len()]).collect();
            let name = mixture
                .split_once(':')
                .filter(|_| !mixture.starts_with('['))
                .map_or(&*mixture, |(name, _)| name);
            let name = mixture.strip_prefix("[::1]").map_or(name, |_| "[::1]");
            let known = ["localhost", "127.0.0.1", "[::1]", "api.example"].contains(&name);
            if check(&Method::GET, "/", &[("host", &mixture)]).is_ok() {
                assert!(known && !mixture.contains(['@', '/', '?', '#', '%', ' ']), "{mixture:?}");
            }
            let origin = format!("http://{mixture}");
            if check(&Method::POST, "/", &[("host", "localhost:80"), ("origin", &origin)]).is_ok() {
                assert_eq!(mixture, "localhost:80");
            }
        }
    }
}
