//! Opens buses.

use std::path::PathBuf;
use std::sync::Arc;

use super::OpenSettings;
use crate::bus::{Bus, MemoryBus};
use crate::error::{Error, Result};
use crate::secret::hide_password;

/// The file name of the embedded bus in the data directory.
pub const EMBEDDED_FILE: &str = "bus.db";

/// A bus, as named by a URL.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Named<'u> {
    Memory,
    Embedded(PathBuf),
    Kafka(&'u str),
}

impl<'u> Named<'u> {
    fn of(url: &'u str, data: Option<&PathBuf>) -> Result<Self> {
        match url.split_once(':').unwrap_or((url, "")) {
            ("memory", "") => Ok(Named::Memory),
            ("embedded", "") => match data {
                Some(data) => Ok(Named::Embedded(data.join(EMBEDDED_FILE))),
                None => Err(Error::Config(
                    "embedded lacks a file name, and there is no data directory; write embedded:FILE".into(),
                )),
            },
            ("embedded", path) => match path.strip_prefix("//").unwrap_or(path) {
                "" => Err(Error::Config("embedded:// lacks a file name; write embedded:FILE".into())),
                path => Ok(Named::Embedded(path.into())),
            },
            ("kafka", servers) if servers.strip_prefix("//").is_some_and(|s| !s.is_empty()) => {
                Ok(Named::Kafka(url))
            }
            ("kafka", _) => Err(Error::Config(format!(
                "{:?} lacks a server; write kafka://HOST:PORT[,HOST:PORT]",
                hide_password(url)
            ))),
            _ => Err(Error::Config(format!(
                "{:?} is not the URL of a bus; use memory:, embedded, embedded:FILE or kafka://HOST:PORT[,HOST:PORT]",
                hide_password(url)
            ))),
        }
    }
}

pub(super) async fn open(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Bus>> {
    match Named::of(url, settings.data.as_ref())? {
        Named::Memory => Ok(Arc::new(MemoryBus::new())),
        Named::Embedded(path) => open_embedded(path, settings),
        Named::Kafka(url) => open_kafka(url, settings).await,
    }
}

#[cfg(feature = "sqlite")]
fn open_embedded(path: PathBuf, settings: &OpenSettings) -> Result<Arc<dyn Bus>> {
    use crate::bus::embedded::{EmbeddedBus, EmbeddedSettings};
    let mut embedded = EmbeddedSettings::default();
    embedded.record_bytes_max = settings.record_bytes_max.unwrap_or(embedded.record_bytes_max);
    Ok(Arc::new(EmbeddedBus::open_with(path, embedded, Arc::new(crate::clock::SystemClock))?))
}

#[cfg(not(feature = "sqlite"))]
fn open_embedded(_: PathBuf, _: &OpenSettings) -> Result<Arc<dyn Bus>> {
    Err(Error::NotBuiltIn { what: "the embedded bus", feature: "sqlite" })
}

#[cfg(feature = "kafka")]
async fn open_kafka(url: &str, settings: &OpenSettings) -> Result<Arc<dyn Bus>> {
    use crate::bus::kafka::{KafkaBus, KafkaSettings};
    let mut kafka = KafkaSettings::from_url(url)?;
    if let Some(bytes) = settings.record_bytes_max {
        kafka = kafka.property("message.max.bytes", bytes.to_string());
    }
    Ok(Arc::new(KafkaBus::connect(kafka).await?))
}

#[cfg(not(feature = "kafka"))]
#[allow(clippy::unused_async)] // has the signature of the built-in one
async fn open_kafka(_: &str, _: &OpenSettings) -> Result<Arc<dyn Bus>> {
    Err(Error::NotBuiltIn { what: "Kafka", feature: "kafka" })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn urls_name_buses() {
        let data = PathBuf::from("data");
        let of = |url| Named::of(url, Some(&data));
        assert_eq!(of("memory:").unwrap(), Named::Memory);
        assert_eq!(of("embedded").unwrap(), Named::Embedded(Path::new("data").join("bus.db")));
        assert_eq!(of("embedded:").unwrap(), Named::Embedded(Path::new("data").join("bus.db")));
        assert_eq!(of("embedded:a/b.db").unwrap(), Named::Embedded("a/b.db".into()));
        assert_eq!(of("embedded:///a/b.db").unwrap(), Named::Embedded("/a/b.db".into()));
        assert_eq!(of("kafka://a:1,b:2").unwrap(), Named::Kafka("kafka://a:1,b:2"));
        assert!(Named::of("embedded", None).unwrap_err().to_string().contains("embedded:FILE"));
        for bad in ["", "kafka:", "kafka://", "embedded://", "memory:x", "amqp://host"] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
        let secret = of("amqp://me:secret@host").unwrap_err().to_string();
        assert!(!secret.contains("secret"), "{secret}");
    }
}
