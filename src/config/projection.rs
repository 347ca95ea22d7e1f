//! `projection.*`: the projections that `hapax project` keeps.

use std::time::Duration;

use super::kind::Kind;
use super::table::{Setting, int, row};
use super::{Config, Typed, hide_password};
use crate::consumer::ConsumerSettings;
use crate::error::Result;
use crate::id::{Scope, Topic};
use crate::open::ProjectionSettings;
use crate::projection;

/// The settings of the projections.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ProjectionSection {
    /// The URLs of the projections; may contain passwords.
    pub urls: Vec<String>,
    /// How long a cache keeps values.
    pub value_ttl: Duration,
}

const PROJECTIONS: Kind =
    Kind::Urls(&[("cache", "cache:redis://HOST:PORT"), ("opensearch", "opensearch:http://HOST:PORT/ALIAS")]);

/// The scope whose number of attempts is that of projections.
const WORKER: &str = "projection_worker";

/// The rows of the table.
pub(super) const OF_PROJECTION: &[Setting] = &[
    Setting {
        flag: Some("--to"),
        secret: true,
        ..row(
            "projection.url",
            PROJECTIONS,
            "",
            "the projections of records that `hapax project` keeps, and that `hapax erase`, `doctor` and `explain` look at",
        )
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
            urls: of.text("projection.url")?.split_whitespace().map(str::to_owned).collect(),
            value_ttl: of.seconds("projection.value_ttl_s")?,
        })
    }

    /// The scope of a projection's consumer that is given none: with the name of the projection's server, so
    /// that two projections never take events from each other.
    pub fn scope_of(url: &str) -> Result<Scope> {
        Scope::new(format!("{WORKER}:{}", place(url)))
    }

    /// Whether a scope is [that](ProjectionSection::scope_of) of some projection.
    pub fn is_scope(scope: &Scope) -> bool {
        scope.as_str().strip_prefix(WORKER).is_some_and(|place| place.starts_with(':'))
    }
}

impl Config {
    /// The URLs of the projections, with their passwords hidden.
    pub fn projection_urls_shown(&self) -> Vec<String> {
        self.projection.urls.iter().map(|url| hide_password(url)).collect()
    }

    /// How to open a projection.
    pub fn projection_settings(&self) -> ProjectionSettings {
        ProjectionSettings {
            redelivery: self.ledger.retention,
            value_ttl: Some(self.projection.value_ttl),
            ..ProjectionSettings::default()
        }
    }

    /// The settings of the consumer of the first projection. Without a scope of its own it has
    /// [that of the projection](ProjectionSection::scope_of), and the attempts of the scope `projection_worker`.
    pub fn projector_settings(&self, scope: Option<Scope>, topic: Topic) -> Result<ConsumerSettings> {
        let of = |scope| self.consumer_settings(scope, vec![topic]);
        let mut settings = if let Some(scope) = scope {
            of(scope)?
        } else {
            let url = self.projection.urls.first().map_or("", String::as_str);
            let mut settings = of(ProjectionSection::scope_of(url)?)?;
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
        assert!(!of.projection_urls_shown()[0].contains("secret"));
        assert!(of.values().iter().all(|value| !value.shown().contains("secret")));
        assert!(ProjectionSection::is_scope(&settings.scope) && !ProjectionSection::is_scope(&own.scope));
    }

    #[test]
    fn there_may_be_several_and_no_password_is_shown() {
        let urls =
            "opensearch:http://search/records  cache:redis://me:secret@h\n cache:redis://other:hidden@k";
        let of = config(&[("HAPAX_PROJECTION_URL", urls)]);
        assert_eq!(of.projection.urls.len(), 3);
        let shown = of.values().iter().find(|value| value.setting.key == "projection.url").unwrap().shown();
        assert_eq!(
            shown,
            "opensearch:http://search/records cache:redis://me:***@h cache:redis://other:***@k"
        );
        for wrong in ["cache:redis://me:secret@h secret@h", "cache:redis://h, mysql://me:secret@db"] {
            let message = Config::load(&Sources::new().env([("HAPAX_PROJECTION_URL", wrong)])).unwrap_err();
            assert!(!message.to_string().contains("secret"), "{message}");
        }
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
