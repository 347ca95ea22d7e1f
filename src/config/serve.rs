//! `serve.*`: where the server listens, and its limits.

use std::net::SocketAddr;
use std::time::Duration;

use super::Typed;
use super::kind::Kind;
use super::table::{Setting, int, row, unset};
use crate::error::{Error, Result};

/// The settings of the server.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ServeSection {
    /// Where it listens; port 0 picks a free one.
    pub listen: SocketAddr,
    /// Where it listens for operators instead, if that is somewhere else.
    pub admin_listen: Option<SocketAddr>,
    /// The names by which clients may call it, besides those of the loopback addresses.
    pub hosts: Vec<String>,
    /// The maximum size of a request's body.
    pub body_bytes_max: usize,
    /// The maximum number of events in one request.
    pub batch_max: usize,
    /// The maximum number of connections at once.
    pub connections_max: usize,
    /// How long a request may take.
    pub request_timeout: Duration,
    /// The maximum size of a request's head.
    pub header_bytes_max: usize,
    /// The maximum number of a request's headers.
    pub headers_max: usize,
    /// How long the server goes on after it was told to stop, while probes say that it stops.
    pub stop_delay: Duration,
    /// How long a stop waits for requests that run.
    pub drain: Duration,
    /// How many requests per second one API token may make; 0: no limit.
    pub rate_per_s: u32,
    /// How long audit rows are kept.
    pub audit_retention: Duration,
    /// The first API token, stored at start if it is not there; empty: none. It is a secret.
    pub bootstrap_token: Secret,
}

/// A text that is not printed.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Secret(String);

impl std::ops::Deref for Secret {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "***" })
    }
}

/// The rows of the table.
pub(super) const OF_SERVER: &[Setting] = &[
    Setting {
        flag: Some("--listen"),
        ..row(
            "serve.listen",
            Kind::Text,
            "127.0.0.1:7070",
            "where the server listens; port 0 picks a free one",
        )
    },
    Setting {
        flag: Some("--admin-listen"),
        ..unset(
            "with everything else",
            row("serve.admin_listen", Kind::Text, "", "where the server listens for operators, if apart"),
        )
    },
    unset(
        "those of this machine's loopback",
        row("serve.hosts", Kind::Text, "", "names by which clients may call the server, with commas between"),
    ),
    row("serve.body_bytes_max", int(1024, 1 << 30), "1048576", "the largest body of a request to the server"),
    row("serve.batch_max", int(1, 100_000), "1000", "how many events one request to the server may have"),
    row("serve.connections_max", int(1, 1_000_000), "1024", "how many connections the server has at once"),
    row("serve.request_timeout_ms", int(10, 3_600_000), "30000", "how long a request to the server may take"),
    row(
        "serve.header_bytes_max",
        int(8192, 1 << 20),
        "16384",
        "the largest head of a request: target and headers",
    ),
    row("serve.headers_max", int(10, 1000), "100", "how many headers a request to the server may have"),
    row(
        "serve.stop_delay_ms",
        int(0, 3_600_000),
        "0",
        "how long the server continues after a signal, while /readyz says that it is stopping",
    ),
    row(
        "serve.drain_ms",
        int(0, 3_600_000),
        "10000",
        "how long a server that stops waits for requests that run",
    ),
    row(
        "serve.rate_per_s",
        int(0, 1_000_000),
        "2000",
        "how many requests per second one API token may make (0: no limit)",
    ),
    row("serve.audit_retention_days", int(1, 36_500), "400", "how long the server keeps audit rows"),
    Setting {
        secret: true,
        older_env: &["HAPAX_BOOTSTRAP_TOKEN"],
        ..row(
            "serve.bootstrap_token",
            Kind::Text,
            "",
            "an admin token (`hapax token generate`) that the server stores at start, if it is not stored yet",
        )
    },
];

impl ServeSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        let count = |key: &str| of.int(key).map(|number| number as usize);
        let millis = |key: &str| of.int(key).map(Duration::from_millis);
        let Some(listen) = address(of, "serve.listen")? else {
            return Err(Error::Config(format!("{} is empty", of.at("serve.listen")?.place)));
        };
        Ok(ServeSection {
            listen,
            admin_listen: address(of, "serve.admin_listen")?,
            hosts: hosts(of)?,
            body_bytes_max: count("serve.body_bytes_max")?,
            batch_max: count("serve.batch_max")?,
            connections_max: count("serve.connections_max")?,
            request_timeout: millis("serve.request_timeout_ms")?,
            header_bytes_max: count("serve.header_bytes_max")?,
            headers_max: count("serve.headers_max")?,
            stop_delay: millis("serve.stop_delay_ms")?,
            drain: millis("serve.drain_ms")?,
            rate_per_s: of.int("serve.rate_per_s")? as u32,
            audit_retention: Duration::from_secs(of.int("serve.audit_retention_days")? * 86_400),
            bootstrap_token: Secret(of.text("serve.bootstrap_token")?.to_owned()),
        })
    }
}

/// The names in `serve.hosts`. One that no request can have is refused: it would look as if it were
/// allowed.
fn hosts(of: &Typed<'_>) -> Result<Vec<String>> {
    let value = of.at("serve.hosts")?;
    let names = value.text().split(',').map(str::trim).filter(|host| !host.is_empty());
    names
        .map(|host| match wrong_with(host) {
            None => Ok(host.to_ascii_lowercase()),
            Some(what) => Err(Error::Config(format!(
                "serve.hosts has {host:?} (from {}), which {what}; it takes names such as api.example and addresses such as \
                 192.0.2.7 or [2001:db8::7]",
                value.place
            ))),
        })
        .collect()
}

/// Why no request can name this host; none if one can.
fn wrong_with(host: &str) -> Option<&'static str> {
    if let Some(six) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let is_six = six.parse::<std::net::Ipv6Addr>().is_ok();
        return (!is_six).then_some("has brackets and no IPv6 address between them");
    }
    if host.parse::<std::net::Ipv6Addr>().is_ok() {
        return Some("is an IPv6 address without its brackets");
    }
    if host.contains("://") {
        return Some("has a scheme");
    }
    if host.contains('*') {
        return Some("has a wildcard: each name is listed by itself");
    }
    if host.contains(':') {
        return Some("has a port: a name holds for every port");
    }
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    let is_name = host.chars().all(plain) && host.split('.').all(|label| !label.is_empty());
    (!is_name).then_some("is not a host name")
}

/// The address in a setting; `localhost` is 127.0.0.1. No other name is looked up, because which
/// address it means could change.
fn address(of: &Typed<'_>, key: &str) -> Result<Option<SocketAddr>> {
    let value = of.at(key)?;
    let text = value.text();
    if text.is_empty() {
        return Ok(None);
    }
    let named = text.strip_prefix("localhost:").map(|port| format!("127.0.0.1:{port}"));
    named.as_deref().unwrap_or(text).parse().map(Some).map_err(|_| {
        Error::Config(format!(
            "{} = {text:?} is not an ADDRESS:PORT, such as 127.0.0.1:7070",
            value.place.said(key)
        ))
    })
}
