//! The settings of a consumer, and their checks.

use std::sync::Arc;
use std::time::Duration;

use super::decode::Decoder;
use crate::bus::Start;
use crate::error::{Error, Result};
use crate::event::Event;
use crate::exact::Field;
use crate::guard::GuardSettings;
use crate::id::{Kind, Scope, Topic};
use crate::ledger::{OnDead, OrderPolicy};

/// What to do while the ledger is unavailable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OutagePolicy {
    /// Wait for it: start nothing new, pause partitions when the queues are full, stay in the
    /// group. Gives up: progress.
    #[default]
    Pause,
    /// End with the error and let the supervisor of the process decide. Gives up: the process.
    FailFast,
    /// Copy events that arrive meanwhile to the dead-letter topic without running them, and
    /// continue. Gives up: order, and running these events automatically.
    DeadLetter,
}

impl std::str::FromStr for OutagePolicy {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self> {
        match text {
            "pause" => Ok(OutagePolicy::Pause),
            "fail_fast" => Ok(OutagePolicy::FailFast),
            "dead_letter" => Ok(OutagePolicy::DeadLetter),
            _ => Err(Error::Config(format!(
                "consumer.outage is {text:?}; it must be pause, fail_fast or dead_letter"
            ))),
        }
    }
}

/// Which events a scope wants. An unwanted event is counted and costs no ledger write, except under
/// a strict order, which must step past it.
#[derive(Clone, Default)]
pub enum Wants {
    /// All events.
    #[default]
    All,
    /// Events of these kinds.
    Kinds(Vec<Kind>),
    /// Events with this header and value.
    Header(String, Vec<u8>),
    /// Events for which a function returns true. It must always return the same for the same event.
    Matching(Arc<dyn Fn(&Event) -> bool + Send + Sync>),
}

impl std::fmt::Debug for Wants {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Wants::All => f.write_str("All"),
            Wants::Kinds(kinds) => f.debug_tuple("Kinds").field(kinds).finish(),
            Wants::Header(name, _) => f.debug_tuple("Header").field(name).finish_non_exhaustive(),
            Wants::Matching(_) => f.write_str("Matching(…)"),
        }
    }
}

impl Wants {
    /// Whether the scope wants an event.
    pub fn matches(&self, event: &Event) -> bool {
        match self {
            Wants::All => true,
            Wants::Kinds(kinds) => event.kind.as_ref().is_some_and(|kind| kinds.contains(kind)),
            Wants::Header(name, value) => event.headers.get(name).is_some_and(|given| given == value),
            Wants::Matching(matches) => matches(event),
        }
    }
}

/// Settings of a [`Consumer`](super::Consumer).
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ConsumerSettings {
    /// Whose effect it is.
    pub scope: Scope,
    /// The topics.
    pub topics: Vec<Topic>,
    /// The group. Defaults to the scope's name.
    pub group: Option<Arc<str>>,
    /// Where to start if nothing was committed.
    pub start: Start,
    /// How records are decoded.
    pub decoder: Decoder,
    /// Which events are wanted.
    pub wants: Wants,
    /// How events of one aggregate are ordered, and how a dead one affects its successors. `None`:
    /// events with the same record key run in the order of their offsets, and a dead one does not
    /// block the others.
    pub order: Option<(OrderPolicy, OnDead)>,
    /// How many handlers may run at once.
    pub concurrency: usize,
    /// The most events in a batch, transactional or leased.
    pub batch_max: usize,
    /// How many deliveries may be in memory, from all partitions and the ledger together. Above it
    /// partitions pause.
    pub in_flight_max: usize,
    /// How many bytes they may have. Above it partitions pause.
    pub in_flight_bytes_max: usize,
    /// How long a handler may take.
    pub handler_timeout: Duration,
    /// How long a lease lasts unless it is extended.
    pub lease: Duration,
    /// How often leases are extended.
    pub heartbeat: Duration,
    /// How many attempts an event gets before it is dead.
    pub attempts_max: u32,
    /// The pause after the first failure. It doubles with each failure.
    pub backoff_base: Duration,
    /// The longest pause.
    pub backoff_max: Duration,
    /// A retry later than this waits in the ledger instead of in memory, and the commit point moves
    /// past it.
    pub hold_max: Duration,
    /// How many events the scope may hold in the ledger. At this limit partitions pause.
    pub held_max: u64,
    /// How often to ask the ledger for due events and for dead letters to copy.
    pub held_interval: Duration,
    /// How long a member has to copy a dead letter to the dead-letter topic. If it is not copied by
    /// then, any member tries again.
    pub dead_reserve: Duration,
    /// The topic that dead letters are copied to. Defaults to `<topic>.dead`. If empty, they stay
    /// in the ledger only.
    pub dead_topic: Option<String>,
    /// What to do while the ledger is unavailable.
    pub outage: OutagePolicy,
    /// How often offsets are committed.
    pub commit_interval: Duration,
    /// How long a stop waits for handlers before it releases their events.
    pub drain: Duration,
    /// How many events in a row may be too old before the consumer stops with an error instead of
    /// filling the dead letters.
    pub too_old_max: u32,
    /// How long the ledger keeps entries.
    pub retention: Duration,
    /// A member that shows no sign of life for this long loses its partitions to others.
    pub session_timeout: Duration,
    /// Whether skipped deliveries are logged, and effects that were not done twice counted.
    pub log_skips: bool,
    /// Where the value of an event is in its payload: the values of effects that were not done twice
    /// are summed.
    pub value: Option<Field>,
    /// Prefix of metrics and spans.
    pub telemetry_prefix: Option<String>,
}

impl ConsumerSettings {
    /// The defaults, for a scope and its topics.
    pub fn new(scope: Scope, topics: Vec<Topic>) -> Self {
        ConsumerSettings {
            scope,
            topics,
            group: None,
            start: Start::default(),
            decoder: Decoder::default(),
            wants: Wants::default(),
            order: None,
            concurrency: 64,
            batch_max: 200,
            in_flight_max: 4096,
            in_flight_bytes_max: 32 * 1024 * 1024,
            handler_timeout: Duration::from_secs(30),
            lease: Duration::from_secs(30),
            heartbeat: Duration::from_secs(10),
            attempts_max: 5,
            backoff_base: Duration::from_secs(1),
            backoff_max: Duration::from_mins(5),
            hold_max: Duration::from_secs(30),
            held_max: 100_000,
            held_interval: Duration::from_millis(500),
            dead_reserve: Duration::from_mins(1),
            dead_topic: None,
            outage: OutagePolicy::default(),
            commit_interval: Duration::from_millis(500),
            drain: Duration::from_secs(20),
            too_old_max: 100,
            retention: Duration::from_hours(7 * 24),
            session_timeout: Duration::from_secs(45),
            log_skips: true,
            value: None,
            telemetry_prefix: None,
        }
    }

    /// The group's name.
    pub fn group(&self) -> Arc<str> {
        self.group.clone().unwrap_or_else(|| self.scope.as_str().into())
    }

    /// Whether sequence numbers must follow each other without gaps.
    pub(crate) fn is_strict(&self) -> bool {
        matches!(self.order, Some((OrderPolicy::Strict { .. }, _)))
    }

    /// The topic that a topic's dead letters are copied to.
    pub fn dead_topic_of(&self, topic: &Topic) -> Option<Topic> {
        match self.dead_topic.as_deref() {
            Some("") => None,
            Some(name) => Topic::new(name).ok(),
            None => Topic::new(format!("{}.dead", topic.as_str())).ok(),
        }
    }

    /// Checks the settings. An error names the setting and its range.
    pub fn check(&self) -> Result<()> {
        let range = |key: &str, value: usize, max: usize| {
            if (1..=max).contains(&value) {
                return Ok(());
            }
            Err(Error::Config(format!("consumer.{key} is {value}; it must be 1 to {max}")))
        };
        range("concurrency", self.concurrency, 100_000)?;
        range("batch_max", self.batch_max, 10_000)?;
        range("in_flight_max", self.in_flight_max, 10_000_000)?;
        range("in_flight_bytes_max", self.in_flight_bytes_max, 1 << 40)?;
        range("topics", self.topics.len(), 1000)?;
        let hour = Duration::from_hours(1);
        for (key, value, max) in [
            ("handler_timeout", self.handler_timeout, 24 * hour),
            ("held_interval", self.held_interval, hour),
            ("dead_reserve", self.dead_reserve, 24 * hour),
            ("commit_interval", self.commit_interval, hour),
            ("session_timeout", self.session_timeout, hour),
        ] {
            if value.is_zero() || value > max {
                return Err(Error::Config(format!(
                    "consumer.{key} is {value:?}; it must be more than 0 and at most {max:?}"
                )));
            }
        }
        if let Some(name) = self.dead_topic.as_deref().filter(|name| !name.is_empty()) {
            let dead = Topic::new(name)?;
            if self.topics.contains(&dead) {
                return Err(Error::Config(format!(
                    "consumer.dead_topic is {name:?}, which the consumer reads itself; name another"
                )));
            }
        }
        self.guard().check()
    }

    /// The guard's settings.
    pub(crate) fn guard(&self) -> GuardSettings {
        GuardSettings {
            scope: Some(self.scope.clone()),
            lease: self.lease,
            heartbeat: self.heartbeat,
            attempts_max: self.attempts_max,
            backoff_base: self.backoff_base,
            backoff_max: self.backoff_max,
            retention: self.retention,
            order: self.order,
            log_skips: self.log_skips,
            value: self.value.clone(),
            telemetry_prefix: self.telemetry_prefix.clone(),
            ..GuardSettings::default()
        }
    }
}
