//! `projection.*`: the projection that `hapax project` keeps.

use std::time::Duration;

use super::kind::Kind;
use super::table::{Setting, int, row};
use super::{Config, Typed, hide_password};
use crate::consumer::ConsumerSettings;
use crate::error::Result;
use crate::id::{Scope, Topic};
use crate::open::ProjectionSettings;
use crate::projection;

/// The settings of the projection.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProjectionSection {
    /// The URL of the projection, if there is one; may contain a password.
    pub url: Option<String>,
    /// How long a cache keeps values.
    pub value_ttl: Duration,
}

const PROJECTIONS: Kind =
    Kind::Url(&[("cache", "cache:redis://HOST:PORT"), ("opensearch", "opensearch:http://HOST:PORT/ALIAS")]);

/// The scope whose number of attempts is that of projections.
const WORKER: &str = "projection_worker";

/// The rows of the table.
pub(super) const OF_PROJECTION: &[Setting] = &[
    Setting {
        flag: Some("--to"),
        secret: true,
        ..row("projection.url", PROJECTIONS, "", "the projection of records that `hapax project` keeps")
    },
    row(
        "projection.value_ttl_s",
        int(1, 3_153_600_000),
        "86400",
        "how long a cache keeps the value of a record after it was written; its version is kept longer",
    ),
];

impl ProjectionSection {
    pub(super) fn of(of: &Typed<'_>) -> Result<Self> {
        Ok(ProjectionSection {
            url: Some(of.text("projection.url")?.to_owned()).filter(|url| !url.is_empty()),
            value_ttl: of.seconds("projection.value_ttl_s")?,
        })
    }
}

impl Config {
    /// The URL of the projection, with its password hidden.
    pub fn projection_url_shown(&self) -> Option<String> {
        self.projection.url.as_deref().map(hide_password)
    }

    /// How to open the projection.
    pub fn projection_settings(&self) -> ProjectionSettings {
        ProjectionSettings {
            redelivery: self.ledger.retention,
            value_ttl: Some(self.projection.value_ttl),
            ..ProjectionSettings::default()
        }
    }

    /// The settings of the consumer of a projection. Without a scope of its own it has the name of the
    /// projection's server, and the attempts of the scope `projection_worker`: two projections never
    /// take events from each other.
    pub fn projector_settings(&self, scope: Option<Scope>, topic: Topic) -> Result<ConsumerSettings> {
        let of = |scope| self.consumer_settings(scope, vec![topic]);
        let mut settings = if let Some(scope) = scope {
            of(scope)?
        } else {
            let url = self.projection.url.as_deref().unwrap_or_default();
            let mut settings = of(Scope::new(format!("{WORKER}:{}", place(url)))?)?;
            settings.attempts_max = self.attempts_max(&Scope::new(WORKER)?)?;
            settings
        };
        projection::project(&mut settings);
        Ok(settings)
    }
}

/// Where a projection is: its URL without a user, a password and what follows `?`.
fn place(url: &str) -> String {
    let (kind, rest) = url.split_once(':').unwrap_or_default();
    let rest = rest.split_once("://").map_or(rest, |(_, rest)| rest);
    let rest = rest.split('?').next().unwrap_or_default();
    let rest = rest.rsplit_once('@').map_or(rest, |(_, place)| place);
    format!("{kind}:{}", rest.trim_end_matches('/')).chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Sources;

    fn config(pairs: &[(&str, &str)]) -> Config {
        Config::load(&Sources::new().env(pairs.iter().copied())).unwrap()
    }

    #[test]
    fn each_projection_has_a_scope_of_its_own_and_shares_the_attempts() {
        let topic = || Topic::new("events").unwrap();
        let url = ("HAPAX_PROJECTION_URL", "opensearch:https://me:secret@search:9200/records");
        let of = config(&[url, ("PROJECTION_WORKER_MAX_RETRIES", "8")]);
        let settings = of.projector_settings(None, topic()).unwrap();
        assert_eq!(settings.scope.as_str(), "projection_worker:opensearch:search:9200/records");
        assert_eq!((settings.attempts_max, settings.order.is_some()), (8, true));
        let own = of.projector_settings(Some(Scope::new("own").unwrap()), topic()).unwrap();
        assert_eq!((own.scope.as_str(), own.attempts_max), ("own", 5));
        assert!(!of.projection_url_shown().unwrap().contains("secret"));
        assert!(of.values().iter().all(|value| !value.shown().contains("secret")));
    }

    #[test]
    fn a_url_of_another_kind_is_refused() {
        let message = Config::load(&Sources::new().env([("HAPAX_PROJECTION_URL", "mysql://db")]))
            .unwrap_err()
            .to_string();
        assert!(
            message.contains("HAPAX_PROJECTION_URL") && message.contains("cache:redis://HOST:PORT"),
            "{message}"
        );
    }
}
