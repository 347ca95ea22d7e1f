//! What librdkafka tells of itself, and what its errors mean.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use rdkafka::client::ClientContext;
use rdkafka::config::RDKafkaLogLevel;
use rdkafka::error::KafkaError;
use rdkafka::statistics::Statistics;
use rdkafka::types::RDKafkaErrorCode as Code;

use crate::error::{Error, Source};

/// One client's connection to the brokers, as far as is known: one line when they go away, one when they are back.
pub(super) struct Link {
    /// Who this client is, for people.
    who: String,
    state: Mutex<State>,
    /// Whether librdkafka has gone to the beginning of a partition because what it asked for was not there.
    reset: AtomicBool,
}

#[derive(Default)]
struct State {
    away_since: Option<Instant>,
    /// Whether what was fetched before they went away is used up: only what comes after that is a sign of life.
    drained: bool,
    /// The last error told: the same again is no news.
    told: Option<Code>,
    /// Why the last connection failed.
    reason: String,
    /// What it says of our settings, if it is about them: trying again would not mend it.
    rejected: Option<Rejected>,
}

/// What is wrong with how we come, and not with the brokers.
#[derive(Clone, Copy)]
enum Rejected {
    Credentials,
    Tls,
}

impl Link {
    pub(super) fn new(who: impl Into<String>) -> Self {
        Link { who: who.into(), state: Mutex::default(), reset: AtomicBool::default() }
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A broker answered.
    pub(super) fn answered(&self) {
        let mut state = self.state();
        (state.told, state.rejected) = (None, None);
        if let Some(since) = state.away_since.take() {
            drop(state);
            let seconds = since.elapsed().as_secs_f64();
            tracing::info!(target: "hapax::kafka", client = %self.who, seconds, "Kafka is back");
        }
    }

    /// A record came, which may have been fetched before.
    pub(super) fn delivered(&self) {
        if self.state().drained {
            self.answered();
        }
    }

    /// Nothing of what was fetched is left.
    pub(super) fn drained(&self) {
        self.state().drained = true;
    }

    /// Whether librdkafka went to the beginning of a partition since this was asked last.
    pub(super) fn was_reset(&self) -> bool {
        self.reset.swap(false, Ordering::Relaxed)
    }

    /// Why the last connection failed, if one did.
    pub(super) fn reason(&self) -> String {
        self.state().reason.clone()
    }

    /// Why no connection will ever be made with these settings, if that is so. `doing` as in [`meaning`].
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
            Code::AllBrokersDown => state.rejected, // says nothing of why
            _ => None,
        };
        let away = matches!(code, Code::AllBrokersDown);
        if !away || state.reason.is_empty() {
            reason.clone_into(&mut state.reason);
        }
        let reason = state.reason.clone(); // of a broker: that all are down says little
        // A single broker that is away is no outage, and all of them are one line.
        let connection =
            matches!(code, Code::BrokerTransportFailure | Code::Resolve | Code::OperationTimedOut);
        if connection || state.told == Some(code) {
            drop(state);
            tracing::debug!(target: "hapax::kafka", client = %self.who, code = ?code, "{reason}");
            return;
        }
        state.told = Some(code);
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
        // Connections come and go, and each attempt would be a line: `failed` tells what there is to tell.
        // And each partition's leader would be a line.
        let connection = matches!(about, "FAIL" | "ERROR" | "REQTMOUT" | "METADATAUPDATE");
        // librdkafka tells in no other way that it has gone elsewhere. It decides nothing, but what is looked at.
        if about == "OFFSET" {
            self.reset.store(true, Ordering::Relaxed);
        }
        // Why the first connection fails is told only here.
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

/// The context of clients that are no members of a group.
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

/// librdkafka's error code, also where the Rust wrapper forgets to answer with it.
pub(super) fn code(error: &KafkaError) -> Option<Code> {
    match error {
        KafkaError::AdminOp(code) => Some(*code),
        other => other.rdkafka_error_code(),
    }
}

/// An error by meaning. `doing` says what was being done, as a clause: "publishing to orders".
pub(super) fn meaning(doing: impl Into<String>, error: KafkaError) -> Error {
    let doing = doing.into();
    match code(&error) {
        Some(code) => meaning_of(doing, code, error),
        None => match error {
            // Not its value, which may be a secret.
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

/// Whether a commit may go through in a moment, because the group is only rearranging itself.
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
