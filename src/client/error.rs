//! What a call can end with, by what a caller can do about it.

use std::fmt;

use super::exchange::AnswerTooLarge;
use super::prepared::PreparedWrite;
use super::problem::Problem;
use crate::error::Source;

/// The result of a call.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a call did not succeed. [`code`](Error::code) is stable and has a page in `docs/errors/`.
///
/// The client has repeated what may be repeated before it returns an error. Whether the call may
/// have taken effect all the same, [`in_doubt`](Error::in_doubt) says.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// The input breaks a rule, and nothing was sent; or a payload does not fit the type that it is read
    /// as.
    Invalid {
        /// Which input.
        what: &'static str,
        /// What is wrong with it and what the limit is.
        problem: String,
    },
    /// The record or the aggregate has another seq than expected: somebody else wrote first. Read it
    /// and decide again; a new write has a new key. Nothing was changed.
    Conflict {
        /// The seq that was expected, if it is a number.
        expected: Option<u64>,
        /// The seq that was found, if it is a number.
        actual: Option<u64>,
        /// What the server says.
        problem: Box<Problem>,
    },
    /// There is no such record or module.
    NotFound(Box<Problem>),
    /// The key belongs to another request. If the call is [in doubt](Error::in_doubt), that request may
    /// be this one, sent before by another caller or in other bytes. A token that was replaced is another
    /// caller, a rotated one is the same. Send the write as it was first sent: in the same bytes, with the
    /// same token. If it is not in doubt, prepare the write again, which makes a new key.
    KeyMismatch(Box<Problem>),
    /// The key is older than answers are kept: whether the write was done is not known any more. Find
    /// out before you prepare it again.
    KeyExpired(Box<Problem>),
    /// A write with this key began and never ended, and it is not run again by itself. Keep the
    /// prepared write and send it again once an operator has decided.
    OutcomeUnknown(Box<Problem>),
    /// The id of an event was used before for another content. Nothing was changed.
    Mismatch(Box<Problem>),
    /// The token no longer holds the lease, and this attempt changed nothing. If the call is [in
    /// doubt](Error::in_doubt), an earlier attempt may have settled the run before the token was fenced.
    Fenced(Box<Problem>),
    /// The credentials are missing, wrong or not enough.
    Denied(Box<Problem>),
    /// The server refuses the call for another reason; the problem's code says which.
    Refused(Box<Problem>),
    /// No answer of the server came within the deadline. Send the same prepared write again later:
    /// [`prepared`](Error::prepared) has it.
    Unavailable {
        /// What was asked, and what came instead of an answer.
        what: String,
        /// How often it was asked.
        attempts: u32,
        /// Whether one of the attempts, or one of an earlier call, may have reached the server.
        in_doubt: bool,
        /// The server's last problem, if there was one.
        problem: Option<Box<Problem>>,
        /// The write that was sent, with its key.
        prepared: Option<Box<PreparedWrite>>,
        /// The last error of the connection.
        source: Option<Source>,
    },
}

impl Error {
    /// A stable name for this kind of error; `docs/errors/<code>.md` explains it.
    pub fn code(&self) -> &str {
        match self {
            Error::Invalid { .. } => "invalid",
            Error::Unavailable { problem: None, .. } => "unavailable",
            _ => self.problem().map_or("unavailable", Problem::code),
        }
    }

    /// The server's problem, if it answered with one.
    pub fn problem(&self) -> Option<&Problem> {
        match self {
            Error::Invalid { .. } => None,
            Error::Unavailable { problem, .. } => problem.as_deref(),
            Error::Conflict { problem, .. }
            | Error::NotFound(problem)
            | Error::KeyMismatch(problem)
            | Error::KeyExpired(problem)
            | Error::OutcomeUnknown(problem)
            | Error::Mismatch(problem)
            | Error::Fenced(problem)
            | Error::Denied(problem)
            | Error::Refused(problem) => Some(problem),
        }
    }

    /// The write that this error is about, with its key. If the error is [in doubt](Error::in_doubt),
    /// store it and [send](super::Client::send) it again; a new write would have a new key, and could
    /// write twice.
    ///
    /// ```no_run
    /// # async fn run(client: hapax::client::Client, id: hapax::client::Uuid) -> Result<(), Box<dyn std::error::Error>> {
    /// if let Err(error) = client.data("orders").delete(id, 3).await
    ///     && error.in_doubt()
    ///     && let Some(write) = error.prepared()
    /// {
    ///     std::fs::write("unfinished.json", serde_json::to_string(write)?)?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn prepared(&self) -> Option<&PreparedWrite> {
        match self {
            Error::Unavailable { prepared, .. } => prepared.as_deref(),
            _ => self.problem().and_then(|problem| problem.prepared.as_deref()),
        }
    }

    /// The same error, about this write.
    pub(super) fn about(mut self, write: &PreparedWrite) -> Self {
        match &mut self {
            Error::Invalid { .. } => {}
            Error::Unavailable { prepared, .. } => *prepared = Some(Box::new(write.clone())),
            Error::Conflict { problem, .. }
            | Error::NotFound(problem)
            | Error::KeyMismatch(problem)
            | Error::KeyExpired(problem)
            | Error::OutcomeUnknown(problem)
            | Error::Mismatch(problem)
            | Error::Fenced(problem)
            | Error::Denied(problem)
            | Error::Refused(problem) => problem.prepared = Some(Box::new(write.clone())),
        }
        self
    }

    /// Whether the call may have taken effect: an attempt got no answer, in this call or in an earlier
    /// one of the same [`PreparedWrite`], and no later answer says what became of it. A write that was
    /// read from a store counts as sent. Sending the same prepared write again is safe and finds out;
    /// preparing the write anew could write twice.
    pub fn in_doubt(&self) -> bool {
        match self {
            // The server looked the key or the id up before it answered so.
            Error::Invalid { .. } | Error::Conflict { .. } | Error::Mismatch(_) => false,
            Error::KeyExpired(_) | Error::OutcomeUnknown(_) => true,
            Error::Unavailable { in_doubt, .. } => *in_doubt,
            // What has the key may be an earlier attempt of this very write: by another principal, or in
            // other bytes, if the server knows of no part that differs.
            Error::KeyMismatch(problem) => {
                let differs = &problem.differs;
                problem.in_doubt
                    || *differs == ["principal"]
                    || (differs.is_empty() && problem.fields.is_empty())
            }
            // The server did the work, and could not keep its answer.
            Error::Refused(problem) if problem.code() == "answer-too-large" => true,
            // Repeated with the token that settled, a settling is accepted, unless the event has gone on since.
            Error::Fenced(problem)
            | Error::NotFound(problem)
            | Error::Denied(problem)
            | Error::Refused(problem) => problem.in_doubt,
        }
    }

    /// Whether the same call may succeed later without any change. An answer that is larger than
    /// [`answer_bytes_max`](super::ClientSettings::answer_bytes_max) is as large the next time.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Error::Unavailable { .. }) && !self.is_too_large()
    }

    /// Whether the answer was larger than the client reads.
    pub(super) fn is_too_large(&self) -> bool {
        std::error::Error::source(self).is_some_and(<dyn std::error::Error>::is::<AnswerTooLarge>)
    }

    pub(super) fn invalid(what: &'static str, problem: impl Into<String>) -> Self {
        Error::Invalid { what, problem: problem.into() }
    }

    /// The meaning of a problem that is not a reason to try again.
    pub(super) fn of(problem: Problem) -> Self {
        let problem = Box::new(problem);
        match problem.code() {
            "conflict" => Error::Conflict { expected: problem.expected, actual: problem.actual, problem },
            "not-found" => Error::NotFound(problem),
            "key-mismatch" => Error::KeyMismatch(problem),
            "key-expired" => Error::KeyExpired(problem),
            "outcome-unknown" => Error::OutcomeUnknown(problem),
            "mismatch" => Error::Mismatch(problem),
            "fenced" => Error::Fenced(problem),
            "unauthenticated" | "forbidden" | "host-forbidden" | "origin-forbidden" => Error::Denied(problem),
            _ => Error::Refused(problem),
        }
    }
}

impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Self {
        match error {
            crate::Error::Invalid { what, problem } => Error::Invalid { what, problem },
            other => Error::Invalid { what: "the call", problem: other.chain() },
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Error::Invalid { what, problem } => write!(f, "{what} is invalid: {problem}"),
            Error::Unavailable { what, attempts, in_doubt, .. } => {
                let times =
                    if *attempts == 1 { "1 attempt".to_owned() } else { format!("{attempts} attempts") };
                let effect = if *in_doubt { "; it may have taken effect" } else { "" };
                write!(f, "unavailable after {times}: {what}{effect}")
            }
            Error::KeyMismatch(problem) if self.in_doubt() => write!(
                f,
                "{problem}; it may have taken effect: send exactly the bytes of the first attempt, with the same token \
                 (a rotated one is the same)"
            ),
            other => match other.problem() {
                Some(problem) => problem.fmt(f),
                None => f.write_str(other.code()),
            },
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Error::Unavailable { source: Some(source), .. } => Some(source.as_ref()),
            _ => None,
        }
    }
}
