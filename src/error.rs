//! One error type, by meaning. Driver errors are boxed as sources; a duplicate is never an error
//! (see [`Outcome`](crate::ledger::Outcome)).

use std::error::Error as StdError;
use std::sync::OnceLock;

/// A boxed driver error.
pub type Source = Box<dyn StdError + Send + Sync + 'static>;
/// The result of every fallible call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, by what a caller can do about it. Each variant has a page in `docs/errors/`,
/// named after its [`code`](Error::code).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The input breaks a rule. Nothing was changed.
    #[error("{what} is invalid: {problem}")]
    Invalid {
        /// Which input.
        what: &'static str,
        /// What is wrong with it and what the limit is.
        problem: String,
    },
    /// A setting is missing, unknown or impossible.
    #[error("configuration: {0}")]
    Config(String),
    /// The ledger, the bus or another server cannot be reached or did not answer. The effect of the
    /// call is unknown only where its docs say so.
    #[error("unavailable: {what}")]
    Unavailable {
        /// What was being done.
        what: String,
        /// The driver's error.
        #[source]
        source: Option<Source>,
    },
    /// Another transaction was in the way (serialization failure, deadlock, lock timeout, a busy
    /// database file). Nothing was changed; repeat the whole transaction.
    #[error("contention: {what}")]
    Contended {
        /// What was being done.
        what: String,
        /// The driver's error.
        #[source]
        source: Option<Source>,
    },
    /// The week an id belongs to is being made. Roll back and try again.
    #[error("the ledger has no partition yet for the week of {monday}; it is being made, try again")]
    WeekMissing {
        /// The Monday the week starts on.
        monday: String,
    },
    /// The caller no longer holds the lease, the leadership or the partition: it expired, or was
    /// taken over. Nothing was changed, and trying again is useless: whoever holds it now does the
    /// work. Drop what was in progress.
    #[error("fenced: {what}")]
    Fenced {
        /// What the caller no longer holds, and who or what holds it now, if that is known.
        what: String,
    },
    /// An expectation did not hold.
    #[error("conflict: expected {expected}, found {actual}")]
    Conflict {
        /// What the caller expected.
        expected: String,
        /// What it found.
        actual: String,
    },
    /// The id exists already with different content. Nothing was changed.
    #[error("the id was used before: {what}")]
    Mismatch {
        /// Which id, and what it belongs to.
        what: String,
    },
    /// A server refuses the request: it is read-only, privileges are missing, credentials are wrong
    /// or its disk is full. Nothing was changed.
    #[error("refused: {what}")]
    Refused {
        /// Why.
        what: String,
        /// The driver's error.
        #[source]
        source: Option<Source>,
    },
    /// The schema is missing, older or newer than this build understands.
    #[error("schema: {0}")]
    Schema(String),
    /// This backend cannot do this.
    #[error("unsupported: {0}")]
    Unsupported(String),
    /// A backend was named that this build of hapax does not contain.
    #[error("{what} is not built in; build hapax with the feature `{feature}`")]
    NotBuiltIn {
        /// The backend.
        what: &'static str,
        /// The feature that contains it.
        feature: &'static str,
    },
    /// Stored data is inconsistent.
    #[error("corrupt data: {0}")]
    Corrupt(String),
    /// There is no such entry.
    #[error("not found: {0}")]
    NotFound(String),
}

/// The codes of problems (RFC 9457) that only a server has, besides those of [`Error`] and of keyed
/// writes. Servers and clients share them.
#[cfg(any(feature = "axum", feature = "client"))]
pub const SERVER_CODES: [&str; 15] = [
    "route-unknown",
    "method-not-allowed",
    "json-invalid",
    "media-type",
    "request-timeout",
    "head-too-large",
    "host-forbidden",
    "origin-forbidden",
    "forbidden",
    "unauthenticated",
    "rate-limited",
    "overloaded",
    "not-ready",
    "internal",
    "precondition-required",
];

impl Error {
    /// Every [`code`](Error::code).
    pub const CODES: [&str; 14] = [
        "invalid",
        "config",
        "unavailable",
        "contended",
        "week-missing",
        "fenced",
        "conflict",
        "mismatch",
        "refused",
        "schema",
        "unsupported",
        "not-built-in",
        "corrupt",
        "not-found",
    ];

    /// A stable name for this kind of error; `docs/errors/<code>.md` explains it.
    pub fn code(&self) -> &'static str {
        match self {
            Error::Invalid { .. } => "invalid",
            Error::Config(_) => "config",
            Error::Unavailable { .. } => "unavailable",
            Error::Contended { .. } => "contended",
            Error::WeekMissing { .. } => "week-missing",
            Error::Fenced { .. } => "fenced",
            Error::Conflict { .. } => "conflict",
            Error::Mismatch { .. } => "mismatch",
            Error::Refused { .. } => "refused",
            Error::Schema(_) => "schema",
            Error::Unsupported(_) => "unsupported",
            Error::NotBuiltIn { .. } => "not-built-in",
            Error::Corrupt(_) => "corrupt",
            Error::NotFound(_) => "not-found",
        }
    }

    /// Whether the same call may succeed later without any change.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Unavailable { .. } | Error::Contended { .. } | Error::WeekMissing { .. })
    }

    /// An [`Error::Invalid`].
    pub fn invalid(what: &'static str, problem: impl Into<String>) -> Self {
        Error::Invalid { what, problem: problem.into() }
    }

    /// An [`Error::Unavailable`] with its cause.
    pub fn unavailable(what: impl Into<String>, source: impl Into<Source>) -> Self {
        Error::Unavailable { what: what.into(), source: Some(source.into()) }
    }

    /// The whole chain of causes in one line, for logs and people: each cause once, and invisible
    /// characters escaped.
    pub fn chain(&self) -> String {
        crate::id::Visible(&chain(self)).to_string()
    }
}

impl Error {
    /// The same error for another caller in the same batch; its cause becomes text.
    pub(crate) fn copy(&self) -> Error {
        let cause = |source: &Option<Source>| {
            source.as_ref().map(|source| -> Source { chain(source.as_ref()).into() })
        };
        match self {
            Error::Invalid { what, problem } => Error::Invalid { what, problem: problem.clone() },
            Error::Config(text) => Error::Config(text.clone()),
            Error::Unavailable { what, source } => {
                Error::Unavailable { what: what.clone(), source: cause(source) }
            }
            Error::Contended { what, source } => {
                Error::Contended { what: what.clone(), source: cause(source) }
            }
            Error::WeekMissing { monday } => Error::WeekMissing { monday: monday.clone() },
            Error::Fenced { what } => Error::Fenced { what: what.clone() },
            Error::Conflict { expected, actual } => {
                Error::Conflict { expected: expected.clone(), actual: actual.clone() }
            }
            Error::Mismatch { what } => Error::Mismatch { what: what.clone() },
            Error::Refused { what, source } => Error::Refused { what: what.clone(), source: cause(source) },
            Error::Schema(text) => Error::Schema(text.clone()),
            Error::Unsupported(text) => Error::Unsupported(text.clone()),
            Error::NotBuiltIn { what, feature } => Error::NotBuiltIn { what, feature },
            Error::Corrupt(text) => Error::Corrupt(text.clone()),
            Error::NotFound(text) => Error::NotFound(text.clone()),
        }
    }
}

/// How a driver's error reads; `None` for any other error.
type Reword = fn(&(dyn StdError + 'static)) -> Option<String>;

static REWORD: OnceLock<Reword> = OnceLock::new();

/// Sets how errors of a driver read. A backend calls it before its first error, if its driver's own
/// messages say too much: errors know no driver, and handlers return them too.
#[allow(dead_code, reason = "only some backends need it")]
pub(crate) fn reword_with(reword: Reword) {
    let _ = REWORD.set(reword); // the second time it is the same function
}

/// An error with its causes in one line, each cause once.
pub(crate) fn chain(error: &(dyn StdError + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(cause) = next {
        let whole = REWORD.get().and_then(|reword| reword(cause));
        next = if whole.is_some() { None } else { cause.source() };
        let cause_text = whole.unwrap_or_else(|| cause.to_string());
        if text.is_empty() {
            text = cause_text;
        } else if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
    }
    text
}
