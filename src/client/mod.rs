//! A client of `hapax serve`: a retry never writes twice.
//!
//! ```no_run
//! use hapax::client::Client;
//! # async fn run() -> hapax::client::Result<()> {
//! let client = Client::new("http://127.0.0.1:7070")?.token("hpx_…")?;
//! let orders = client.data("orders");
//! let created = orders.create(serde_json::json!({"amount": 7})).await?;
//! let (id, seq) = (created.record.id, created.record.seq);
//! orders.update(id, seq, serde_json::json!({"amount": 8})).await?;
//! # Ok(()) }
//! ```
//!
//! Each write has a key, made before the first attempt and sent with every one. The client repeats
//! what may be repeated: a lost connection, a proxy's error page, a server that restarts, a request
//! that still runs. It decides by the `code` of the server's problem, never by the status; pauses grow
//! with full jitter, `Retry-After` is respected, and a deadline ends it.
//!
//! A write that ends without an answer comes back with its key: [`Error::prepared`]. To survive a crash
//! of your own process, or a future that is dropped, store the write before you send it: a [`PreparedWrite`]
//! is a serialisable value that holds its key.
//!
//! ```no_run
//! use hapax::client::{Client, PreparedWrite};
//! # async fn run(client: Client, stored: Option<String>) -> Result<(), Box<dyn std::error::Error>> {
//! let write: PreparedWrite = match stored {
//!     Some(text) => serde_json::from_str(&text)?, // left by the process before
//!     None => client.data("orders").prepare_create(serde_json::json!({"amount": 7}))?,
//! };
//! std::fs::write("order.json", serde_json::to_string(&write)?)?; // and fsync, if it matters
//! let written = client.send(&write).await?;
//! println!("order {} (done before: {})", written.record.id, written.replayed);
//! # Ok(()) }
//! ```
//!
//! Questions about many records go to the server's read model, where each record counts once:
//!
//! ```no_run
//! # async fn run(client: hapax::client::Client) -> hapax::client::Result<()> {
//! let orders = client.data("orders");
//! let created = orders.create(serde_json::json!({"amount": 7.5, "status": "paid"})).await?;
//! let answer = orders.analytics().sum("/amount").group_by("/status").after(&created.record).tally().await?;
//! for group in &answer.value.groups {
//!     println!("{}: {} orders, {:?}", group.key, group.count, group.sum("/amount"));
//! }
//! println!("complete up to {:?}", answer.meta.last_sync_at); // every write acknowledged before it is counted
//! # Ok(()) }
//! ```
//!
//! The client knows no server code: it imports the types of keys, fields and numbers and the names of
//! things, nothing else.

mod analytics;
mod claims;
mod data;
mod error;
mod exchange;
mod journal;
mod prepared;
mod problem;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use reqwest::header::{AUTHORIZATION, HeaderMap, HeaderValue};

pub use analytics::{Analytics, Answer, Group, Measured, Meta, Tally};
pub use claims::{Claim, ClaimError, ClaimOutcome, ClaimRequest, Extended};
pub use data::{Data, Page, Payload, Record, Records, Written};
pub use error::{Error, Result};
pub use journal::{Appended, Info, PlacedEvent, Placing};
pub use prepared::PreparedWrite;
pub use problem::Problem;
/// The type of a record's id.
pub use uuid::Uuid;

use crate::error::chain;
use crate::id::Tenant;
use crate::secret::hide_password;

/// The settings of a [`Client`].
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ClientSettings {
    /// How long a call may take, with all its attempts and pauses.
    pub deadline: Duration,
    /// How long one attempt may take. The server goes on with a write whose attempt took too long;
    /// the next attempt gets its answer.
    pub attempt_timeout: Duration,
    /// How long connecting may take.
    pub connect_timeout: Duration,
    /// The longest pause after a first attempt; doubles with each.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// The longest `Retry-After` to honour; pauses grow on top of it. One beyond the deadline ends the
    /// call.
    pub retry_after_max: Duration,
    /// The largest request.
    pub body_bytes_max: usize,
    /// The largest answer.
    pub answer_bytes_max: usize,
}

impl Default for ClientSettings {
    /// A minute for a call, 20 seconds for an attempt, pauses from 100 ms to 10 s; 1 MiB for a
    /// request, 32 MiB for an answer: more than the server puts on a page.
    fn default() -> Self {
        ClientSettings {
            deadline: Duration::from_secs(60),
            attempt_timeout: Duration::from_secs(20),
            connect_timeout: Duration::from_secs(5),
            backoff_base: Duration::from_millis(100),
            backoff_max: Duration::from_secs(10),
            retry_after_max: Duration::from_hours(1),
            body_bytes_max: 1 << 20,
            answer_bytes_max: 32 << 20,
        }
    }
}

/// A client of one server. Cloning shares its connections.
#[derive(Clone)]
pub struct Client {
    http: reqwest::Client,
    base: Url,
    settings: Arc<ClientSettings>,
    headers: HeaderMap,
    tenant: Option<Tenant>,
}

/// Without its token.
impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("base", &self.base.as_str())
            .field("tenant", &self.tenant)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the server at a URL, which may have a path if a proxy gives it one. Sends nothing
    /// yet.
    ///
    /// ```
    /// use hapax::client::Client;
    /// assert!(Client::new("https://example.org/hapax").is_ok());
    /// assert!(Client::new("example.org").unwrap_err().to_string().contains("http"));
    /// ```
    pub fn new(url: &str) -> Result<Self> {
        Client::with_settings(url, ClientSettings::default())
    }

    /// The same with settings.
    pub fn with_settings(url: &str, settings: ClientSettings) -> Result<Self> {
        let base = base(url)?;
        // Keep a provider that the application has installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .redirect(reqwest::redirect::Policy::none())
            .connect_timeout(settings.connect_timeout)
            .timeout(settings.attempt_timeout)
            .user_agent(concat!("hapax-client/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(|error| Error::invalid("the client", chain(&error.without_url())))?;
        Ok(Client { http, base, settings: Arc::new(settings), headers: HeaderMap::new(), tenant: None })
    }

    /// Sends this API token with every request; white space around it, as a file has, is left out. It
    /// is never printed. Use `https`, except to the same machine: everyone on the way can read what
    /// `http` carries.
    pub fn token(mut self, token: &str) -> Result<Self> {
        let token = token.trim();
        let value = HeaderValue::try_from(format!("Bearer {token}"));
        let plain = !token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic());
        let Some(mut value) = value.ok().filter(|_| plain) else {
            return Err(Error::invalid("the token", "it is empty, or has characters that no token has"));
        };
        value.set_sensitive(true);
        self.headers.insert(AUTHORIZATION, value);
        Ok(self)
    }

    /// Names the tenant, for a server without tokens on the same machine. With a token the tenant is
    /// the token's.
    pub fn tenant(mut self, tenant: Tenant) -> Result<Self> {
        // A header is trimmed on its way: " acme" would arrive as another tenant.
        let name = tenant.as_str();
        let trimmed = name.trim_matches([' ', '\t']).len() == name.len();
        let Some(value) = HeaderValue::try_from(name).ok().filter(|_| trimmed) else {
            let odd = name.chars().find(|char| char.is_control()).unwrap_or(' ');
            let place = if trimmed { "" } else { " at its beginning or end" };
            let problem =
                format!("{name:?} has {odd:?}{place}, which no header can carry; use a token of that tenant");
            return Err(Error::invalid("the tenant", problem));
        };
        self.headers.insert("hapax-tenant", value);
        self.tenant = Some(tenant);
        Ok(self)
    }

    /// The records of a module. Nothing is asked yet; a name that no module can have is told by the
    /// first call.
    #[doc(alias = "kernel.data")]
    pub fn data(&self, module: impl Into<String>) -> Data {
        Data::new(self.clone(), module.into())
    }

    pub(super) fn settings(&self) -> &ClientSettings {
        &self.settings
    }

    pub(super) fn http(&self) -> &reqwest::Client {
        &self.http
    }

    pub(super) fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    pub(super) fn tenant_name(&self) -> Option<&Tenant> {
        self.tenant.as_ref()
    }

    /// The server's URL, as prepared writes name it.
    pub(super) fn server(&self) -> &str {
        self.base.as_str().trim_end_matches('/')
    }

    /// The URL of a path of the server.
    pub(super) fn url(&self, path: &[impl AsRef<str>], query: Option<&str>) -> Url {
        let mut url = self.base.clone();
        if let Ok(mut segments) = url.path_segments_mut() {
            segments.pop_if_empty().extend(path);
        }
        url.set_query(query);
        url
    }
}

/// What fuzzing checks of a server's problem: it is bounded, and one line.
#[cfg(feature = "testing")]
pub(crate) fn fuzz_problem(data: &[u8]) {
    if let Some(problem) = Problem::parse(409, data) {
        let text = problem.to_string();
        assert!(!text.chars().any(char::is_control) && problem.code().len() <= 64, "{text:?}");
        assert!(problem.detail.chars().count() <= 1000 && problem.fields.len() <= 32);
    }
}

fn base(url: &str) -> Result<Url> {
    let shown = hide_password(url);
    let bad = |problem: String| Error::invalid("the server's URL", problem);
    let base = Url::parse(url).map_err(|error| {
        bad(format!("{shown:?} is not a URL ({error}); write it like http://127.0.0.1:7070"))
    })?;
    if !matches!(base.scheme(), "http" | "https") {
        return Err(bad(format!("{shown:?} is {}; it must be http or https", base.scheme())));
    }
    if base.host_str().is_none_or(str::is_empty) {
        return Err(bad(format!("{shown:?} has no host")));
    }
    if !base.username().is_empty() || base.password().is_some() {
        return Err(bad("it has a user or a password; use Client::token".to_owned()));
    }
    if base.query().is_some() || base.fragment().is_some() {
        return Err(bad(format!("{shown:?} has a query or a fragment")));
    }
    Ok(base)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_of_the_base_stays_and_names_are_escaped() {
        for (base, url) in [
            ("http://h", "http://h/v1/a%2Fb?q=1"),
            ("http://h/", "http://h/v1/a%2Fb?q=1"),
            ("https://h/x/y/", "https://h/x/y/v1/a%2Fb?q=1"),
        ] {
            let client = Client::new(base).unwrap();
            assert_eq!(client.url(&["v1", "a/b"], Some("q=1")).as_str(), url);
        }
    }

    #[test]
    fn bad_input_is_refused_with_a_sentence_and_secrets_are_not_printed() {
        for (url, says) in [
            ("", "is not a URL"),
            ("ftp://h", "http or https"),
            ("http://u:s3cret@h", "use Client::token"),
            ("http://h?x=1", "query"),
        ] {
            let error = Client::new(url).unwrap_err();
            assert_eq!(error.code(), "invalid");
            assert!(error.to_string().contains(says) && !error.to_string().contains("s3cret"), "{error}");
        }
        for token in ["", "\n", "a b", "a\nb", "é"] {
            assert!(Client::new("http://h").unwrap().token(token).is_err(), "{token:?}");
        }
        // As `hapax token create > file` leaves it.
        let from_file = Client::new("http://h").unwrap().token("hpx_1\n").unwrap();
        assert_eq!(from_file.headers()[AUTHORIZATION], "Bearer hpx_1");
        let named = |tenant| Client::new("http://h").unwrap().tenant(Tenant::new(tenant).unwrap());
        assert!(named("café").is_ok());
        for (tenant, says) in [("a\nb", "has '\\n',"), (" acme", "has ' ' at its beginning or end,")] {
            let error = named(tenant).unwrap_err();
            assert!(error.to_string().contains(says), "{error}");
        }
        let client = Client::new("http://h").unwrap().token("hpx_s3cret").unwrap();
        assert!(!format!("{client:?}").contains("s3cret"));
    }
}
