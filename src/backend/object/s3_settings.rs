//! The bucket, its endpoint and the credentials.

use std::fmt;
use std::time::Duration;

use super::name::PREFIX_MAX;
use crate::error::{Error, Result};

/// How to reach a bucket. `Debug` omits the secrets.
#[derive(Clone)]
#[non_exhaustive]
pub struct S3Settings {
    /// The bucket. It must exist.
    pub bucket: String,
    /// The prefix of every name; several journals may share a bucket.
    pub prefix: String,
    /// The endpoint; `None` means Amazon's, in the region.
    pub endpoint: Option<String>,
    /// The region.
    pub region: String,
    /// The access key's id.
    pub access_key_id: String,
    /// The access key's secret.
    pub secret_access_key: String,
    /// The token of temporary credentials.
    pub session_token: Option<String>,
    /// Whether plain HTTP is allowed to an endpoint that is not on this machine.
    pub allow_http: bool,
    /// How long one operation may take, retries included.
    pub timeout: Duration,
    /// How far apart the clocks of the service's machines may be. Readers get an event only once it
    /// is older than that.
    pub skew: Duration,
}

impl fmt::Debug for S3Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("S3Settings")
            .field("bucket", &self.bucket)
            .field("prefix", &self.prefix)
            .field("endpoint", &self.endpoint())
            .field("region", &self.region)
            .finish_non_exhaustive()
    }
}

impl S3Settings {
    /// A bucket with credentials, at Amazon in `us-east-1` unless changed.
    pub fn new(
        bucket: impl Into<String>,
        access_key_id: impl Into<String>,
        secret: impl Into<String>,
    ) -> Self {
        S3Settings {
            bucket: bucket.into(),
            prefix: String::new(),
            endpoint: None,
            region: "us-east-1".to_owned(),
            access_key_id: access_key_id.into(),
            secret_access_key: secret.into(),
            session_token: None,
            allow_http: false,
            timeout: Duration::from_secs(10),
            skew: Duration::from_millis(250),
        }
    }

    /// Parses `s3://BUCKET/PREFIX?endpoint=…&region=…&allow_http=true&skew_ms=…`. Credentials come
    /// from `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY` and `AWS_SESSION_TOKEN`, or from the files
    /// named by the same variables with the suffix `_FILE`.
    pub fn from_url(url: &str) -> Result<Self> {
        Self::read(url, |name| std::env::var(name).ok())
    }

    fn read(url: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let bad = |problem: &str| {
            Err(Error::Config(format!(
                "an object store is named s3://BUCKET/PREFIX?endpoint=…&region=…; {problem}"
            )))
        };
        let Some(rest) = url.strip_prefix("s3://") else { return bad("this one does not begin with s3://") };
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        if place.contains('@') {
            return bad("do not put credentials in the URL: use AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY");
        }
        let (bucket, prefix) = place.split_once('/').unwrap_or((place, ""));
        let secret = |name: &str| secret(name, &variable);
        let (Some(key), Some(secret_key)) = (secret("AWS_ACCESS_KEY_ID")?, secret("AWS_SECRET_ACCESS_KEY")?)
        else {
            return Err(Error::Config(
                "the object store needs credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_ACCESS_KEY_ID_FILE \
                 and AWS_SECRET_ACCESS_KEY_FILE"
                    .into(),
            ));
        };
        let mut settings = S3Settings::new(bucket, key, secret_key);
        settings.session_token = secret("AWS_SESSION_TOKEN")?;
        prefix.trim_matches('/').clone_into(&mut settings.prefix);
        settings.endpoint = variable("AWS_ENDPOINT_URL");
        if let Some(region) = variable("AWS_REGION").or_else(|| variable("AWS_DEFAULT_REGION")) {
            settings.region = region;
        }
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let value = percent_encoding::percent_decode_str(value).decode_utf8_lossy().into_owned();
            match (name, value.as_str()) {
                ("endpoint", _) => settings.endpoint = Some(value),
                ("region", _) => settings.region = value,
                ("allow_http", "true") => settings.allow_http = true,
                ("allow_http", "false") => settings.allow_http = false,
                ("skew_ms", _) if value.parse::<u32>().is_ok() => {
                    settings.skew = Duration::from_millis(value.parse().unwrap_or_default());
                }
                _ => return bad(&format!("{name:?} is not known, or {value:?} is not a value for it")),
            }
        }
        settings.check()?;
        Ok(settings)
    }

    /// The effective endpoint.
    pub fn endpoint(&self) -> String {
        let amazon = || format!("https://s3.{}.amazonaws.com", self.region);
        self.endpoint.as_ref().map_or_else(amazon, |endpoint| endpoint.trim_end_matches('/').to_owned())
    }

    /// Checks what can be checked without a request.
    pub(super) fn check(&self) -> Result<()> {
        let plain =
            |text: &str, more: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || more.contains(c));
        if !(3..=63).contains(&self.bucket.len()) || !plain(&self.bucket, "-._") {
            let problem =
                format!("bucket {:?}: it needs 3 to 63 letters, digits, dots or hyphens", self.bucket);
            return Err(Error::Config(problem));
        }
        let dots = self.prefix.split('/').any(|part| part.is_empty() || part == "." || part == "..");
        if self.prefix.len() > PREFIX_MAX || !plain(&self.prefix, "-._/") || (dots && !self.prefix.is_empty())
        {
            return Err(Error::Config(format!(
                "prefix {:?}: it needs at most {PREFIX_MAX} letters, digits, dots, hyphens, underscores or single slashes",
                self.prefix
            )));
        }
        let endpoint = self.endpoint();
        let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
        let Some(host) = host.filter(|host| !host.is_empty() && !host.contains(['@', '?', '#'])) else {
            return Err(Error::Config(
                "the endpoint of the object store must be https://HOST or http://HOST, without credentials"
                    .into(),
            ));
        };
        let name = if host.starts_with('[') { host } else { host.split(['/', ':']).next().unwrap_or(host) };
        let here = name == "localhost" || name.starts_with("127.") || name.starts_with("[::1]");
        if endpoint.starts_with("http://") && !here && !self.allow_http {
            return Err(Error::Config(format!(
                "{endpoint} is plain HTTP, so the network can read everything; use https://, or set allow_http=true"
            )));
        }
        Ok(())
    }
}

/// A variable's value, or the content of the file named by the variable with the suffix `_FILE`.
fn secret(name: &str, variable: impl Fn(&str) -> Option<String>) -> Result<Option<String>> {
    let file = variable(&format!("{name}_FILE"));
    match (variable(name).filter(|value| !value.is_empty()), file) {
        (Some(_), Some(_)) => {
            Err(Error::Config(format!("{name} and {name}_FILE are both set; one is enough")))
        }
        (value, None) => Ok(value),
        (None, Some(file)) => match std::fs::read_to_string(&file) {
            Ok(text) => Ok(Some(text.trim_end_matches(['\r', '\n']).to_owned())),
            Err(e) => Err(Error::Config(format!("{name}_FILE names {file}, which cannot be read: {e}"))),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<S3Settings> {
        S3Settings::read(url, |name| {
            name.contains("KEY").then(|| name.to_owned()).filter(|n| !n.ends_with("_FILE"))
        })
    }

    #[test]
    fn a_url_is_read_and_its_secrets_are_not_printed() {
        let settings =
            read("s3://bucket/a/b?endpoint=http%3A%2F%2F127.0.0.1:9&region=eu-west-1&skew_ms=7").unwrap();
        assert_eq!((settings.bucket.as_str(), settings.prefix.as_str()), ("bucket", "a/b"));
        assert_eq!(
            (settings.endpoint().as_str(), settings.region.as_str()),
            ("http://127.0.0.1:9", "eu-west-1")
        );
        assert_eq!(settings.skew, Duration::from_millis(7));
        assert!(!format!("{settings:?}").contains("SECRET"));
        assert_eq!(read("s3://bucket").unwrap().endpoint(), "https://s3.us-east-1.amazonaws.com");
    }

    #[test]
    fn bad_ones_get_a_sentence() {
        for (url, word) in [
            ("s3://key:secret@bucket/a", "credentials"),
            ("s3://b", "bucket"),
            ("s3://bucket/a//b", "prefix"),
            ("s3://bucket/a/../b", "prefix"),
            ("s3://bucket/ä", "prefix"),
            ("s3://bucket?colour=red", "colour"),
            ("s3://bucket?endpoint=ftp://x", "endpoint"),
            ("s3://bucket?endpoint=http://example.com", "plain HTTP"),
        ] {
            let text = read(url).unwrap_err().to_string();
            assert!(text.contains(word), "{url}: {text}");
        }
        assert!(read("s3://bucket?endpoint=http://example.com&allow_http=true").is_ok());
        let text = S3Settings::read("s3://bucket", |_| None).unwrap_err().to_string();
        assert!(text.contains("AWS_SECRET_ACCESS_KEY_FILE"), "{text}");
    }
}
