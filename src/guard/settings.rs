//! The settings of a guard, and their validation.

use std::time::Duration;

use super::Guard;
use crate::clock::jitter_permille;
use crate::error::{Error, Result};
use crate::exact::Field;
use crate::id::{Scope, Tenant};
use crate::ledger::{FailureSettings, LeaseSettings, Ledger, OnDead, OrderPolicy};
use crate::words::span;

/// The settings of a [`Guard`].
///
/// ```
/// use std::time::Duration;
/// use hapax::guard::GuardSettings;
///
/// let mut settings = GuardSettings::default();
/// assert_eq!(settings.lease, Duration::from_secs(900));
/// settings.heartbeat = settings.lease;
/// assert!(settings.check().unwrap_err().to_string().contains("heartbeat"));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GuardSettings {
    /// The scope of calls that name none. Without it such calls fail.
    pub scope: Option<Scope>,
    /// The tenant of deliveries that name none.
    pub tenant: Option<Tenant>,
    /// False lets every event pass unguarded (in leased and at-most-once calls; same-transaction
    /// claims fail). Set by the variable `ENABLE_PROCESSED_EVENT_REGISTRY`. Gives up: everything
    /// but availability.
    pub enabled: bool,
    /// How long a lease lasts unless it is extended.
    pub lease: Duration,
    /// How often a running lease is extended.
    pub heartbeat: Duration,
    /// How long before its end the holder treats a lease as over; if unset, a tenth of the lease,
    /// at most 5 s.
    pub lease_margin: Option<Duration>,
    /// How many runs an event gets before it is dead.
    pub attempts_max: u32,
    /// The pause after the first failure; doubles with each further one.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// How long entries stay after they were settled.
    pub retention: Duration,
    /// Whether the guard sweeps in the background, from its first use on. Set it to false if
    /// another process sweeps, or only another database role may (`hapax ledger sweep`).
    pub sweep: bool,
    /// How often the background sweeper runs.
    pub sweep_interval: Duration,
    /// How events with aggregate and seq follow each other, and what a dead one does to its
    /// successors. `None` means no order: each event stands alone. There is no default policy,
    /// because only you know what is right for a dead event.
    pub order: Option<(OrderPolicy, OnDead)>,
    /// Whether deliveries that were skipped are logged, and effects that were not done twice
    /// counted, in the background.
    pub log_skips: bool,
    /// Where the value of an event is in its payload: the values of effects that were not done twice
    /// are summed.
    pub value: Option<Field>,
    /// The prefix of metrics and spans.
    pub telemetry_prefix: Option<String>,
}

impl Default for GuardSettings {
    fn default() -> Self {
        GuardSettings {
            scope: None,
            tenant: None,
            enabled: true,
            lease: Duration::from_mins(15),
            heartbeat: Duration::from_secs(30),
            lease_margin: None,
            attempts_max: 5,
            backoff_base: Duration::from_secs(1),
            backoff_max: Duration::from_mins(5),
            retention: Duration::from_hours(7 * 24),
            sweep: true,
            sweep_interval: Duration::from_hours(1),
            order: None,
            log_skips: true,
            value: None,
            telemetry_prefix: None,
        }
    }
}

/// The maximum number of runs of an event: ledgers count them in 16 bits.
pub(crate) const ATTEMPTS_MAX: u32 = 32_767;
/// The longest lease, retention or interval: a century, so that adding it to a time cannot overflow.
const DURATION_MAX: Duration = Duration::from_hours(100 * 365 * 24);

impl GuardSettings {
    /// Rejects impossible settings; the error names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let positive = [
            ("lease", self.lease),
            ("heartbeat", self.heartbeat),
            ("retention", self.retention),
            ("sweep_interval", self.sweep_interval),
        ];
        for (key, value) in positive {
            if value.is_zero() || value > DURATION_MAX {
                return Err(Error::Config(format!(
                    "{key} is {}; it must be more than 0 and at most 100 years",
                    span(value)
                )));
            }
        }
        if self.heartbeat >= self.lease {
            return Err(Error::Config(format!(
                "heartbeat is {}; it must be shorter than lease, which is {}",
                span(self.heartbeat),
                span(self.lease)
            )));
        }
        if self.margin().saturating_add(self.heartbeat) >= self.lease {
            return Err(Error::Config(format!(
                "lease_margin is {}; with heartbeat ({}) it must be shorter than lease, which is {}",
                span(self.margin()),
                span(self.heartbeat),
                span(self.lease)
            )));
        }
        if !(1..=ATTEMPTS_MAX).contains(&self.attempts_max) {
            return Err(Error::Config(format!(
                "attempts_max is {}; it must be 1 to {ATTEMPTS_MAX}",
                self.attempts_max
            )));
        }
        if self.backoff_base > self.backoff_max || self.backoff_max > DURATION_MAX {
            return Err(Error::Config(format!(
                "backoff_base is {:?}; it must be 0 to backoff_max, which is {:?} (at most 100 years)",
                self.backoff_base, self.backoff_max
            )));
        }
        Ok(())
    }

    /// How long before its end the holder treats a lease as over.
    pub fn margin(&self) -> Duration {
        self.lease_margin.unwrap_or_else(|| (self.lease / 10).min(Duration::from_secs(5)))
    }

    /// A run counts from its start (`alone`): an event that kills its process must reach `dead`,
    /// and a guard cannot know what else was running.
    pub(crate) fn lease_settings(&self) -> LeaseSettings {
        LeaseSettings { lease: self.lease, attempts_max: self.attempts_max, alone: true }
    }

    /// Backoff with full jitter.
    pub(crate) fn failure_settings(&self) -> FailureSettings {
        FailureSettings {
            attempts_max: self.attempts_max,
            backoff_base: self.backoff_base,
            backoff_max: self.backoff_max,
            jitter_permille: jitter_permille(),
        }
    }
}

/// Builds a [`Guard`]. See [`Guard::builder`].
#[derive(Debug)]
#[must_use = "a builder does nothing until it is built"]
pub struct GuardBuilder<L> {
    ledger: L,
    settings: GuardSettings,
    error: Option<Error>,
}

impl<L: Ledger> GuardBuilder<L> {
    pub(super) fn new(ledger: L) -> Self {
        GuardBuilder { ledger, settings: GuardSettings::default(), error: None }
    }

    /// Sets all settings at once.
    pub fn settings(mut self, settings: GuardSettings) -> Self {
        self.settings = settings;
        self
    }

    /// Changes settings in place.
    pub fn with(mut self, change: impl FnOnce(&mut GuardSettings)) -> Self {
        change(&mut self.settings);
        self
    }

    /// Sets the scope of calls that name none. `build` rejects an invalid one.
    #[doc(alias = "consumer_scope_id")]
    pub fn scope(mut self, scope: impl AsRef<str>) -> Self {
        match Scope::new(scope) {
            Ok(scope) => self.settings.scope = Some(scope),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// Sets the tenant of deliveries that name none. `build` rejects an invalid one.
    pub fn tenant(mut self, tenant: impl AsRef<str>) -> Self {
        match Tenant::new(tenant) {
            Ok(tenant) => self.settings.tenant = Some(tenant),
            Err(error) => self.error = self.error.or(Some(error)),
        }
        self
    }

    /// Sets how long a lease lasts, and how often it is extended while its handler runs.
    pub fn lease(mut self, lease: Duration, heartbeat: Duration) -> Self {
        self.settings.lease = lease;
        self.settings.heartbeat = heartbeat;
        self
    }

    /// Sets how many runs an event gets before it is dead.
    pub fn attempts_max(mut self, attempts_max: u32) -> Self {
        self.settings.attempts_max = attempts_max;
        self
    }

    /// Sets the pause after the first failure, which doubles with each further one, and the longest
    /// pause.
    pub fn backoff(mut self, base: Duration, max: Duration) -> Self {
        self.settings.backoff_base = base;
        self.settings.backoff_max = max;
        self
    }

    /// Sets how long entries stay after they were settled.
    pub fn retention(mut self, retention: Duration) -> Self {
        self.settings.retention = retention;
        self
    }

    /// Sets how events with aggregate and seq follow each other.
    #[doc(alias = "last_sequence")]
    pub fn order(mut self, policy: OrderPolicy, on_dead: OnDead) -> Self {
        self.settings.order = Some((policy, on_dead));
        self
    }

    /// False lets every event pass unguarded.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.settings.enabled = enabled;
        self
    }

    /// Sets the prefix of metrics and spans.
    pub fn telemetry_prefix(mut self, prefix: impl Into<String>) -> Self {
        self.settings.telemetry_prefix = Some(prefix.into());
        self
    }

    /// Builds the guard. Fails if a setting is invalid.
    pub fn build(self) -> Result<Guard<L>> {
        match self.error {
            Some(error) => Err(error),
            None => Guard::with_settings(self.ledger, self.settings),
        }
    }
}
