//! Connection state as librdkafka reports it, and the meaning of its errors.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::statistics::Statistics;
use rdkafka::types::RDKafkaErrorCode as Code;

use crate::error::{Error, Source};

/// The state of one client's connection to the brokers. Logs one line when they go away and one
/// when they are back.
pub(super) struct Link {
    /// The name of this client, for logs.
    who: String,
    state: Mutex<State>,
    /// The partitions that librdkafka has reset to their beginning, because the requested offset was
    /// gone, and whether there are any. `None` stands for one whose name could not be read.
    resets: Mutex<Vec<Option<(String, i32)>>>,
    has_resets: AtomicBool,
}

#[derive(Default)]
struct State {
    away_since: Option<Instant>,
    /// Whether the records fetched before the outage are used up. Only later records show that a
    /// broker is back.
    drained: bool,
    /// The last error logged. A repetition is not logged.
    logged: Option<Code>,
    /// Why the last connection failed.
    reason: String,
    /// Set if the error concerns our settings, so that retrying would not help.
    rejected: Option<Rejected>,
}

/// What is wrong on our side rather than with the brokers.
#[derive(Clone, Copy)]
enum Rejected {
    Credentials,
    Tls,
}

impl Link {
    pub(super) fn new(who: impl Into<String>) -> Self {
        Link {
            who: who.into(),
            state: Mutex::default(),
            resets: Mutex::default(),
            has_resets: AtomicBool::default(),
        }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that a broker answered.
    pub(super) fn answered(&self) {
        let mut state = self.state();
        (state.logged, state.rejected) = (None, None);
        if let Some(since) = state.away_since.take() {
            drop(state);
            let seconds = since.elapsed().as_secs_f64();
            tracing::info!(target: "hapax::kafka", client = %self.who, seconds, "Kafka is back");
        }
    }

    /// Notes that a record was delivered. It may have been fetched before an outage.
    pub(super) fn delivered(&self) {
        if self.state().drained {
            self.answered();
        }
    }

    /// Notes that no fetched record is left.
    pub(super) fn drained(&self) {
        self.state().drained = true;
    }

    /// The partitions (topic and number) that librdkafka has reset to their beginning since the last
    /// call. `None` may be any.
    pub(super) fn resets(&self) -> Vec<Option<(String, i32)>> {
        if !self.has_resets.swap(false, Ordering::AcqRel) {
            return Vec::new();
        }
        std::mem::take(&mut self.resets.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Why the last connection failed, if one did.
    pub(super) fn reason(&self) -> String {
        self.state().reason.clone()
    }

    /// Why no connection can be made with these settings, if so. `doing` as in [`meaning`].
    pub(super) fn rejected(&self, doing: &str) -> Option<Error> {
        let state = self.state();
        Some(match state.rejected? {
            Rejected::Credentials => Error::Refused {
                what: format!("{doing}: the user or the password is not taken: {}", state.reason),
                source: None,
            },
            Rejected::Tls => Error::Config(format!("{doing}: {}", state.reason)),
        })
    }

    fn failed(&self, code: Code, reason: &str) {
        let mut state = self.state();
        state.rejected = match code {
            Code::Authentication | Code::SaslAuthenticationFailed => Some(Rejected::Credentials),
            Code::SSL => Some(Rejected::Tls),
            Code::AllBrokersDown => state.rejected, // does not say why
            _ => None,
        };
        let away = matches!(code, Code::AllBrokersDown);
        if !away || state.reason.is_empty() {
            reason.clone_into(&mut state.reason);
        }
        let reason = state.reason.clone(); // the reason of a single broker: "all brokers down" says little
        // One broker being away is not an outage; all of them being away is one line.
        let connection =
            matches!(code, Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut);
        if connection || state.logged == Some(code) {
            drop(state);
            tracing::debug!(target: "hapax::kafka", client = %self.who, code = ?code, "{reason}");
            return;
        }
        state.logged = Some(code);
        if away {
            state.away_since.get_or_insert_with(Instant::now);
            state.drained = false;
        }
        drop(state);
        if away {
            tracing::warn!(target: "hapax::kafka", client = %self.who, %reason, "Kafka is away");
        } else if code != Code::AutoOffsetReset && code != Code::PollExceeded {
            tracing::warn!(target: "hapax::kafka", client = %self.who, code = ?code, "{reason}");
        }
    }

    fn line(&self, level: RDKafkaLogLevel, about: &str, line: &str) {
        // Log connection attempts and leader changes at debug level only, since each would be a
        // line. `failed` reports outages.
        let connection = matches!(about, "FAIL" | "ERROR" | "REQTMOUT" | "METADATAUPDATE");
        // This log line is librdkafka's only sign of a reset. It comes before the records that the
        // partition goes on with, and decides which gaps are looked at.
        if about == "OFFSET" {
            self.resets.lock().unwrap_or_else(PoisonError::into_inner).push(reset_of(line));
            self.has_resets.store(true, Ordering::Release);
        }
        // Only this log line says why the first connection fails.
        if about == "FAIL" {
            line.clone_into(&mut self.state().reason);
        }
        match level {
            _ if connection => tracing::debug!(target: "hapax::kafka", client = %self.who, about, "{line}"),
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => {
                tracing::error!(target: "hapax::kafka", client = %self.who, about, "{line}");
            }
            RDKafkaLogLevel::Warning => {
                tracing::warn!(target: "hapax::kafka", client = %self.who, about, "{line}");
            }
            _ => tracing::debug!(target: "hapax::kafka", client = %self.who, about, "{line}"),
        }
    }
}

/// The partition in a line such as `[thrd:main]: orders [3]: offset reset (at offset 5, …`.
fn reset_of(line: &str) -> Option<(String, i32)> {
    let (head, _) = line.split_once(": offset reset ")?;
    let (topic, number) = head.strip_suffix(']')?.rsplit_once(" [")?;
    let topic = topic.rsplit(' ').next().unwrap_or(topic);
    Some((topic.to_owned(), number.parse().ok()?))
}

/// The context of clients that do not belong to a group.
#[derive(Clone)]
pub(super) struct Context(pub(super) std::sync::Arc<Link>);

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, about: &str, line: &str) {
        self.0.line(level, about, line);
    }
    fn stats(&self, _: Statistics) {}
    fn error(&self, error: KafkaError, reason: &str) {
        if let Some(code) = error.rdkafka_error_code() {
            self.0.failed(code, reason);
        }
    }
}

impl rdkafka::consumer::ConsumerContext for Context {}

/// librdkafka's error code, also where the Rust wrapper omits it.
pub(super) fn code(error: &KafkaError) -> Option<Code> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        other => other.rdkafka_error_code(),
    }
}

/// Maps an error by meaning. `doing` is a clause such as "publishing to orders".
pub(super) fn meaning(doing: impl Into<String>, error: KafkaError) -> Error {
    let doing = doing.into();
    match code(&error) {
        Some(code) => meaning_of(doing, code, error),
        None => match error {
            // Omit the value, which may be a secret.
            KafkaError::ClientConfig(_, problem, name, _) => {
                Error::Config(format!("{doing}: the property {name}: {problem}"))
            }
            KafkaError::ClientCreation(_) => Error::Config(format!("{doing}: {error}")),
            error => Error::unavailable(doing, error),
        },
    }
}

pub(super) fn meaning_of(doing: String, code: Code, source: impl Into<Source>) -> Error {
    match code {
        Code::UnknownTopic
        | Code::UnknownPartition
        | Code::UnknownTopicOrPartition
        | Code::UnknownTopicId => Error::NotFound(format!("{doing}: Kafka has no such topic or partition")),
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge | Code::InvalidMessageSize => Error::invalid(
            "record",
            format!(
                "{doing}: it is larger than the client (message.max.bytes) or the topic (max.message.bytes) \
                 allows"
            ),
        ),
        Code::InvalidRecord | Code::InvalidTimestamp | Code::InvalidTopic | Code::InvalidPartitions => {
            Error::invalid("record or topic", format!("{doing}: {code}"))
        }
        Code::InvalidReplicationFactor | Code::InvalidConfig | Code::UnsupportedAssignor => {
            Error::Config(format!("{doing}: {code}"))
        }
        Code::TopicAuthorizationFailed
        | Code::GroupAuthorizationFailed
        | Code::ClusterAuthorizationFailed
        | Code::TransactionalIdAuthorizationFailed
        | Code::Authentication
        | Code::SaslAuthenticationFailed
        | Code::PolicyViolation => Error::Refused { what: doing, source: Some(source.into()) },
        Code::IllegalGeneration
        | Code::UnknownMemberId
        | Code::FencedInstanceId
        | Code::FencedMemberEpoch
        | Code::UnreleasedInstanceId
        | Code::AssignmentLost => Error::Fenced { what: format!("{doing}: {code}") },
        Code::UnsupportedVersion | Code::UnsupportedFeature | Code::NotImplemented => {
            Error::Unsupported(format!("{doing}: {code}"))
        }
        _ => Error::unavailable(doing, source),
    }
}

/// Whether a commit may succeed shortly, because the group is only rebalancing or its coordinator
/// is moving.
pub(super) fn passes_soon(code: Code) -> bool {
    matches!(
        code,
        Code::RebalanceInProgress
            | Code::StaleMemberEpoch
            | Code::CoordinatorLoadInProgress
            | Code::CoordinatorNotAvailable
            | Code::NotCoordinator
            | Code::WaitingForCoordinator
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reset_names_its_partition() {
        let logged = "[thrd:main]: orders.v1 [3]: offset reset (at offset 5 (leader epoch 0), broker 1) to offset BEGINNING \
                    (leader epoch -1): fetch failed due to requested offset not available on the broker: Broker: Offset out of range";
        let link = Link::new("test");
        assert_eq!(link.resets(), []);
        link.line(RDKafkaLogLevel::Warning, "OFFSET", logged);
        link.line(RDKafkaLogLevel::Warning, "OFFSET", "in other words");
        assert_eq!(link.resets(), [Some(("orders.v1".to_owned(), 3)), None]);
        assert_eq!(link.resets(), []);
    }
}
