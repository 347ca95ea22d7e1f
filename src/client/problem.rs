//! A server's problem (RFC 9457), and whether it is a reason to try again.

use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use super::prepared::PreparedWrite;
use crate::error::{Error, SERVER_CODES};
use crate::id::Visible;
use crate::keyed;

/// How many characters of a server's sentence to keep.
const DETAIL_CHARS_MAX: usize = 1000;
/// How many names of fields to keep.
const FIELDS_MAX: usize = 32;

/// What a server answered instead of what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Problem {
    /// The HTTP status. Decide by the [`code`](Problem::code).
    pub status: u16,
    /// One sentence: what is wrong and what the limit is.
    pub detail: String,
    /// Of a reused key: the fields in which the two requests differ, if the server tells.
    pub fields: Vec<String>,
    /// Of a reused key: the parts in which the two requests differ, if the server tells. `principal`
    /// alone is the same request of another caller.
    pub differs: Vec<String>,
    /// Of a conflict: the seq that was expected, if it is a number.
    pub expected: Option<u64>,
    /// Of a conflict: the seq that was found, if it is a number.
    pub actual: Option<u64>,
    /// Whether an earlier attempt of the same call, or of the same prepared write, got no answer.
    pub in_doubt: bool,
    /// The write that was sent.
    pub(super) prepared: Option<Box<PreparedWrite>>,
    pub(super) code: String,
}

#[derive(Deserialize)]
struct Body {
    code: String,
    #[serde(default)]
    title: String,
    #[serde(default)]
    detail: String,
    #[serde(default)]
    fields: Vec<String>,
    #[serde(default)]
    differs: Vec<String>,
    #[serde(default)]
    expected: Value,
    #[serde(default)]
    actual: Value,
}

impl Problem {
    /// Reads the body of a problem. `None` if it is none of ours: it has no code.
    pub(super) fn parse(status: u16, body: &[u8]) -> Option<Self> {
        let body: Body = serde_json::from_slice(body).ok()?;
        let plain = !body.code.is_empty()
            && body.code.len() <= 64
            && body.code.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-');
        if !plain {
            return None;
        }
        let detail = if body.detail.is_empty() { body.title } else { body.detail };
        Some(Problem {
            status,
            detail: detail.chars().take(DETAIL_CHARS_MAX).collect(),
            fields: body.fields.into_iter().take(FIELDS_MAX).collect(),
            differs: body.differs.into_iter().take(FIELDS_MAX).collect(),
            expected: number(&body.expected),
            actual: number(&body.actual),
            in_doubt: false,
            prepared: None,
            code: body.code,
        })
    }

    /// Its stable name; `docs/errors/<code>.md` explains it.
    pub fn code(&self) -> &str {
        &self.code
    }

    /// What to do about it. Known codes decide; of an unknown one the server says by `Retry-After`
    /// whether it passes.
    pub(super) fn verdict(&self, has_retry_after: bool) -> Verdict {
        match self.code.as_str() {
            "key-running" | "unavailable" | "handler-timeout" | "request-timeout" => {
                Verdict::Again { in_doubt: true }
            }
            "contended" | "week-missing" | "rate-limited" | "body-unreadable" | "overloaded"
            | "not-ready" => Verdict::Again { in_doubt: false },
            // It may be a moment's failure or a mistake that no repeat mends.
            "handler-failed" | "internal" => Verdict::AFewTimes { in_doubt: true },
            code if is_known(code) => Verdict::Stop,
            _ if has_retry_after => Verdict::Again { in_doubt: true },
            _ => Verdict::Stop,
        }
    }
}

/// Whether this build knows what a code means, whatever headers a proxy adds.
fn is_known(code: &str) -> bool {
    Error::CODES.contains(&code) || keyed::PROBLEMS.contains(&code) || SERVER_CODES.contains(&code)
}

/// What to do about an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Ask again until the deadline.
    Again {
        /// Whether the request may have taken effect, or still may.
        in_doubt: bool,
    },
    /// Ask again, but not until the deadline.
    AFewTimes {
        /// Whether the request may have taken effect.
        in_doubt: bool,
    },
    /// The answer is final.
    Stop,
}

/// A number, or a text that ends in one (`seq 7`).
fn number(value: &Value) -> Option<u64> {
    match value {
        Value::Number(number) => number.as_u64(),
        Value::String(text) => text.rsplit(' ').next()?.parse().ok(),
        _ => None,
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, Visible(&self.detail))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(code: &str) -> Problem {
        Problem::parse(409, format!(r#"{{"code":"{code}","detail":"d"}}"#).as_bytes()).unwrap()
    }

    #[test]
    fn codes_decide_and_not_the_status() {
        let again = |code: &str, after| matches!(of(code).verdict(after), Verdict::Again { .. });
        assert!(again("key-running", false) && again("contended", false) && again("unavailable", false));
        assert!(!again("outcome-unknown", true) && !again("conflict", true) && !again("key-mismatch", true));
        assert!(!again("something-new", false) && again("something-new", true));
        assert_eq!(of("handler-failed").verdict(true), Verdict::AFewTimes { in_doubt: true });
    }

    /// A known code is final, unless it is one of those that pass.
    #[test]
    fn every_code_of_the_server_is_known() {
        let mut repeated: Vec<_> =
            Error::CODES.into_iter().chain(keyed::PROBLEMS).chain(SERVER_CODES).collect();
        repeated.retain(|code| of(code).verdict(true) != Verdict::Stop);
        repeated.sort_unstable();
        let pass = [
            "body-unreadable",
            "contended",
            "handler-failed",
            "handler-timeout",
            "internal",
            "key-running",
            "not-ready",
            "overloaded",
            "rate-limited",
            "request-timeout",
            "unavailable",
            "week-missing",
        ];
        assert_eq!(repeated, pass);
    }

    #[test]
    fn what_is_no_problem_of_ours_is_none() {
        for body in ["", "{}", "<html>", r#"{"code":7}"#, r#"{"code":""}"#, r#"{"code":"A b"}"#, "[]"] {
            assert_eq!(Problem::parse(500, body.as_bytes()), None, "{body}");
        }
        let both = Problem::parse(409, br#"{"code":"conflict","expected":3,"actual":"seq 7"}"#).unwrap();
        assert_eq!((both.expected, both.actual), (Some(3), Some(7)));
        let long = format!(r#"{{"code":"x","detail":"{}"}}"#, "é".repeat(5000));
        assert_eq!(Problem::parse(400, long.as_bytes()).unwrap().detail.chars().count(), DETAIL_CHARS_MAX);
        assert!(!of("x").to_string().contains('\u{1b}'));
    }
}
