//! S3 and compatible stores, through the `object_store` crate.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use object_store::aws::{AmazonS3, AmazonS3Builder, S3ConditionalPut};
use object_store::client::{
    ClientOptions, HttpClient, HttpConnector, HttpError, HttpRequest, HttpResponse, HttpService,
};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{BackoffConfig, ObjectStore, ObjectStoreExt, PutMode, PutOptions, RetryConfig};

use super::clock::StoreClock;
use super::s3_settings::S3Settings;
use super::store::{Listed, Now, Objects};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::words::span;

/// The most names per answer.
const PAGE: usize = 1000;

/// A bucket, or a part of one.
#[derive(Debug)]
pub struct S3 {
    store: AmazonS3,
    /// Precedes every name; empty, or ends with a slash.
    prefix: String,
    settings: S3Settings,
    clock: Arc<StoreClock>,
}

/// All clients of an endpoint share one clock.
fn clock_of(endpoint: &str) -> Arc<StoreClock> {
    static CLOCKS: LazyLock<Mutex<HashMap<String, Arc<StoreClock>>>> = LazyLock::new(Mutex::default);
    let mut clocks = CLOCKS.lock().unwrap_or_else(PoisonError::into_inner);
    Arc::clone(clocks.entry(endpoint.to_owned()).or_insert_with(|| Arc::new(StoreClock::new())))
}

impl S3 {
    /// Builds the client and sends one request, which reveals a missing bucket, wrong credentials
    /// or an unreachable endpoint.
    pub async fn connect(settings: S3Settings) -> Result<Self> {
        settings.check()?;
        // Keeps a provider that is already installed.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let client = reqwest::Client::builder()
            .connect_timeout(settings.timeout / 2)
            .timeout(settings.timeout)
            .redirect(reqwest::redirect::Policy::none())
            .build()
            .map_err(|e| Error::Config(format!("no HTTP client: {e}")))?;
        let clock = clock_of(&settings.endpoint());
        let connector = Dated { client, clock: Arc::clone(&clock) };
        let mut builder = AmazonS3Builder::new()
            .with_bucket_name(&settings.bucket)
            .with_region(&settings.region)
            .with_access_key_id(&settings.access_key_id)
            .with_secret_access_key(&settings.secret_access_key)
            .with_endpoint(settings.endpoint())
            .with_allow_http(true) // checked with the settings
            .with_conditional_put(S3ConditionalPut::ETagMatch)
            .with_retry(RetryConfig {
                backoff: BackoffConfig {
                    init_backoff: Duration::from_millis(50),
                    ..BackoffConfig::default()
                },
                max_retries: 3,
                retry_timeout: settings.timeout,
            })
            .with_http_connector(connector);
        if let Some(token) = &settings.session_token {
            builder = builder.with_token(token);
        }
        let store = builder.build().map_err(|e| Error::Config(format!("the object store: {e}")))?;
        let prefix = if settings.prefix.is_empty() { String::new() } else { format!("{}/", settings.prefix) };
        let s3 = S3 { store, prefix, settings, clock };
        match s3.list("", "", 1).await {
            Ok(_) => Ok(s3),
            // Later the server may be the cause; at the start it is the configuration.
            Err(Error::Refused { what, .. }) => {
                Err(Error::Config(format!("{what}; see AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")))
            }
            Err(error) => Err(error),
        }
    }

    fn path(&self, name: &str) -> Path {
        Path::from(format!("{}{name}", self.prefix))
    }

    /// Bounds the total time of the client's own retries.
    async fn bounded<T>(
        &self,
        doing: &str,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> std::result::Result<T, Failed> {
        match tokio::time::timeout(self.settings.timeout, work).await {
            Ok(done) => done.map_err(|e| self.failed(doing, e)),
            Err(_) => Err(Failed::Other(Error::Unavailable {
                what: format!(
                    "{doing} in {}: no answer within {}",
                    self.about(),
                    span(self.settings.timeout)
                ),
                source: None,
            })),
        }
    }

    fn failed(&self, doing: &str, error: object_store::Error) -> Failed {
        use object_store::Error as Store;
        let text = crate::error::chain(&error);
        let refused = ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"];
        let refused = refused.iter().any(|code| text.contains(code));
        Failed::Other(match error {
            // A failed listing is a generic error; only its text tells the cause.
            _ if text.contains("NoSuchBucket") => Error::NotFound(format!(
                "there is no bucket {:?} at {}",
                self.settings.bucket,
                self.settings.endpoint()
            )),
            Store::PermissionDenied { .. } | Store::Unauthenticated { .. } => self.refused(doing, &text),
            _ if refused => self.refused(doing, &text),
            Store::NotImplemented { .. } => self.lacks(doing, &text),
            _ if text.contains("NotImplemented") => self.lacks(doing, &text),
            Store::NotFound { .. } => return Failed::Missing,
            Store::AlreadyExists { .. } | Store::Precondition { .. } | Store::NotModified { .. } => {
                return Failed::Taken;
            }
            _ => match answered(&text) {
                Some(answer) => Error::Unavailable {
                    what: format!("{doing} in {}: it answered {answer}", self.about()),
                    source: None,
                },
                None => Error::unavailable(format!("{doing} in {}", self.about()), error),
            },
        })
    }

    /// The server says that it cannot do what was asked; retrying is pointless.
    fn lacks(&self, doing: &str, text: &str) -> Error {
        let answer = answered(text).map(|answer| format!(" ({answer})")).unwrap_or_default();
        Error::Unsupported(format!("{} cannot do what a journal needs, {doing}{answer}", self.about()))
    }

    fn refused(&self, doing: &str, text: &str) -> Error {
        let answer = answered(text).map(|answer| format!(" ({answer})")).unwrap_or_default();
        Error::Refused {
            what: format!("{} does not let these credentials in, {doing}{answer}", self.about()),
            source: None,
        }
    }
}

/// The code and the message of an XML error.
fn answered(text: &str) -> Option<String> {
    let of = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once('<').map(|(content, _)| content.trim()).filter(|content| !content.is_empty())
    };
    let code = of("Code")?;
    Some(of("Message").map_or_else(|| code.to_owned(), |message| format!("{code}: {message}")))
}

enum Failed {
    Missing,
    Taken,
    Other(Error),
}

impl Failed {
    fn into_error(self, name: &str) -> Error {
        match self {
            Failed::Missing => Error::NotFound(name.to_owned()),
            Failed::Taken => Error::Contended { what: format!("writing {name}"), source: None },
            Failed::Other(error) => error,
        }
    }
}

#[async_trait]
impl Objects for S3 {
    async fn create(&self, name: &str, body: Bytes) -> Result<bool> {
        let options = PutOptions::from(PutMode::Create);
        let path = self.path(name);
        match self.bounded("creating an object", self.store.put_opts(&path, body.into(), options)).await {
            Ok(_) => Ok(true),
            Err(Failed::Taken) => Ok(false),
            Err(failed) => Err(failed.into_error(name)),
        }
    }

    async fn put(&self, name: &str, body: Bytes) -> Result<()> {
        let path = self.path(name);
        let put = self.store.put_opts(&path, body.into(), PutOptions::default());
        self.bounded("writing an object", put).await.map(drop).map_err(|failed| failed.into_error(name))
    }

    async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        let path = self.path(name);
        let read = async { self.store.get(&path).await?.bytes().await };
        match self.bounded("reading an object", read).await {
            Ok(bytes) => Ok(Some(bytes)),
            Err(Failed::Missing) => Ok(None),
            Err(failed) => Err(failed.into_error(name)),
        }
    }

    async fn list(&self, prefix: &str, after: &str, limit: usize) -> Result<Vec<Listed>> {
        let prefix = format!("{}{prefix}", self.prefix);
        let mut offset = format!("{}{after}", self.prefix);
        let mut found = Vec::new();
        while found.len() < limit {
            let wanted = PAGE.min(limit - found.len());
            let options = PaginatedListOptions {
                offset: (!offset.is_empty()).then(|| offset.clone()),
                max_keys: Some(wanted),
                ..PaginatedListOptions::default()
            };
            let page = self.store.list_paginated((!prefix.is_empty()).then_some(&prefix), options);
            let page =
                self.bounded("listing objects", page).await.map_err(|failed| failed.into_error(&prefix))?;
            let more = page.page_token.is_some();
            let mut listed: Vec<Listed> = Vec::with_capacity(page.result.objects.len());
            for object in page.result.objects {
                let name = object.location.as_ref().strip_prefix(&self.prefix).unwrap_or_default().to_owned();
                listed.push(Listed { name, at: Time::from_micros(object.last_modified.timestamp_micros()) });
            }
            listed.sort_unstable_by(|a, b| a.name.cmp(&b.name)); // the crate promises no order
            let Some(last) = listed.last() else { break };
            offset = format!("{}{}", self.prefix, last.name);
            found.append(&mut listed);
            if !more {
                break;
            }
        }
        Ok(found)
    }

    async fn delete(&self, name: &str) -> Result<()> {
        let path = self.path(name);
        match self.bounded("removing an object", self.store.delete(&path)).await {
            Ok(()) | Err(Failed::Missing) => Ok(()),
            Err(failed) => Err(failed.into_error(name)),
        }
    }

    async fn now(&self) -> Result<Now> {
        if let Some(now) = self.clock.now() {
            return Ok(now);
        }
        self.list("", "", 1).await?;
        self.clock.now().ok_or_else(|| {
            Error::Unsupported(format!(
                "{} does not date its answers; a journal needs its clock",
                self.about()
            ))
        })
    }

    fn grain_ms(&self) -> u64 {
        1000
    }

    fn skew_ms(&self) -> u64 {
        u64::try_from(self.settings.skew.as_millis()).unwrap_or(u64::MAX)
    }

    fn durable(&self) -> bool {
        true
    }

    fn about(&self) -> String {
        format!("s3://{}/{} at {}", self.settings.bucket, self.settings.prefix, self.settings.endpoint())
    }
}

/// An HTTP client that learns the store's clock from each answer.
#[derive(Debug, Clone)]
struct Dated {
    client: reqwest::Client,
    clock: Arc<StoreClock>,
}

impl HttpConnector for Dated {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.clone()))
    }
}

#[async_trait]
impl HttpService for Dated {
    async fn call(&self, request: HttpRequest) -> std::result::Result<HttpResponse, HttpError> {
        let sent = self.clock.here();
        let answer = HttpService::call(&self.client, request).await?;
        let date = answer.headers().get("date").and_then(|value| value.to_str().ok());
        if let Some(date) = date.and_then(|text| jiff::fmt::rfc2822::parse(text).ok()) {
            let date = Time::from_micros(date.timestamp().as_microsecond());
            self.clock.learn(sent, self.clock.here(), date);
        }
        Ok(answer)
    }
}
