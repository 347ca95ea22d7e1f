//! Opens projections.

use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::projection::Projection;
use crate::secret::hide_password;

/// What a projection is opened for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ProjectionUse {
    /// To write to it and to read it: a missing one is refused.
    #[default]
    Run,
    /// The same, and an empty one is made if it is missing.
    Create,
    /// To make it anew.
    Rebuild,
}

/// Settings of [`projection`](super::projection()).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProjectionSettings {
    /// What it is opened for.
    pub purpose: ProjectionUse,
    /// How long an event can be delivered again: a cache keeps versions at least so long.
    pub redelivery: Duration,
    /// How long a cache keeps values; `None`: until they are replaced.
    pub value_ttl: Option<Duration>,
}

impl Default for ProjectionSettings {
    fn default() -> Self {
        let day = Duration::from_hours(24);
        ProjectionSettings { purpose: ProjectionUse::Run, redelivery: 7 * day, value_ttl: Some(day) }
    }
}

pub(super) async fn open(url: &str, settings: &ProjectionSettings) -> Result<Arc<dyn Projection>> {
    match url.split_once(':') {
        Some(("cache", server)) => cache(server, settings).await,
        Some(("opensearch", server)) => search(server, settings.purpose).await,
        _ => Err(Error::Config(format!(
            "{:?} is not the URL of a projection; use cache:redis://HOST:PORT or opensearch:http://HOST:PORT/ALIAS",
            hide_password(url)
        ))),
    }
}

#[cfg(feature = "redis")]
async fn cache(url: &str, settings: &ProjectionSettings) -> Result<Arc<dyn Projection>> {
    use crate::backend::redis::{CacheProjection, CacheSettings};
    let usual = CacheSettings::default();
    let of = CacheSettings {
        value_ttl: settings.value_ttl,
        marker_ttl: usual.marker_ttl.max(settings.redelivery).max(settings.value_ttl.unwrap_or_default()),
        ..usual
    };
    Ok(Arc::new(CacheProjection::connect(url, of, settings.redelivery).await?))
}

#[cfg(not(feature = "redis"))]
#[allow(clippy::unused_async)] // the other one waits
async fn cache(_: &str, _: &ProjectionSettings) -> Result<Arc<dyn Projection>> {
    Err(Error::NotBuiltIn { what: "Redis", feature: "redis" })
}

#[cfg(feature = "opensearch")]
async fn search(url: &str, purpose: ProjectionUse) -> Result<Arc<dyn Projection>> {
    use crate::backend::opensearch::{MissingAlias, SearchProjection, SearchSettings};
    let settings = SearchSettings::default();
    Ok(Arc::new(match purpose {
        ProjectionUse::Rebuild => SearchProjection::connect_to_rebuild(url, settings).await?,
        ProjectionUse::Create => SearchProjection::connect(url, settings, MissingAlias::Create).await?,
        ProjectionUse::Run => SearchProjection::connect(url, settings, MissingAlias::Refuse).await?,
    }))
}

#[cfg(not(feature = "opensearch"))]
#[allow(clippy::unused_async)] // the other one waits
async fn search(_: &str, _: ProjectionUse) -> Result<Arc<dyn Projection>> {
    Err(Error::NotBuiltIn { what: "OpenSearch", feature: "opensearch" })
}
