//! Audit rows: who did what, and why. Rows are only added, and removed after a retention.

use std::time::Duration;

use uuid::Uuid;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::ledger::SweepState;

const WHO_CHARS_MAX: usize = 320;
const ACTION_CHARS_MAX: usize = 64;
const TEXT_CHARS_MAX: usize = 1024;
const DETAILS_CHARS_MAX: usize = 4096;
const DAY: Duration = Duration::from_hours(24);

/// Who makes a change, and why: both are in its audit row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Actor {
    who: String,
    reason: String,
}

impl Actor {
    /// Someone, for a reason (which may be empty).
    pub fn new(who: impl AsRef<str>, reason: impl AsRef<str>) -> Self {
        Actor { who: bounded(who.as_ref(), WHO_CHARS_MAX), reason: bounded(reason.as_ref(), TEXT_CHARS_MAX) }
    }
}

/// A row to add. Texts that are too long are cut, and characters that no database takes are replaced:
/// an action is never refused, or left out, because of what its row would say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditNote {
    pub(crate) id: Uuid,
    pub(crate) who: String,
    pub(crate) action: String,
    pub(crate) target: String,
    pub(crate) reason: String,
    pub(crate) details: String,
}

impl AuditNote {
    /// Someone does something to something. Adding the same note again adds nothing.
    ///
    /// ```
    /// use hapax::access::{Actor, AuditNote};
    /// let by = Actor::new("token 01kz… (ops)", "fixed in 1.4.2");
    /// let note = AuditNote::new(&by, "dead.redrive", "mailer/order-17").details("one entry");
    /// assert!(format!("{note:?}").contains("fixed in 1.4.2"));
    /// ```
    pub fn new(by: &Actor, action: impl AsRef<str>, target: impl AsRef<str>) -> Self {
        AuditNote {
            id: Uuid::now_v7(),
            who: by.who.clone(),
            action: bounded(action.as_ref(), ACTION_CHARS_MAX),
            target: bounded(target.as_ref(), TEXT_CHARS_MAX),
            reason: by.reason.clone(),
            details: String::new(),
        }
    }

    /// Adds details, at most 4096 characters.
    #[must_use]
    pub fn details(mut self, details: impl AsRef<str>) -> Self {
        self.details = bounded(details.as_ref(), DETAILS_CHARS_MAX);
        self
    }
}

/// At most so many characters, and no NUL.
fn bounded(text: &str, chars_max: usize) -> String {
    let mut chars = text.chars().map(|c| if c == '\0' { char::REPLACEMENT_CHARACTER } else { c });
    let mut cut: String = chars.by_ref().take(chars_max).collect();
    if chars.next().is_some() {
        cut.pop();
        cut.push('…');
    }
    cut
}

/// A row.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditEntry {
    /// Its number: later rows have higher ones, and some numbers are missing.
    pub number: i64,
    /// When, by the store's clock.
    pub at: Time,
    /// Who.
    pub who: String,
    /// The action, as a word: `token.create`, `dead.redrive`.
    pub action: String,
    /// To what.
    pub target: String,
    /// Why, as they said.
    pub reason: String,
    /// The details.
    pub details: String,
}

/// Which rows to list, newest first.
#[derive(Debug, Clone, Default)]
pub struct ListAudit {
    /// Only those with a lower number, for the next page.
    pub before: Option<i64>,
    /// Only actions that begin with this.
    pub action: Option<String>,
    /// The most to return; 0 means 100, and 1000 is the limit.
    pub limit: usize,
}

impl ListAudit {
    pub(crate) fn limit(&self) -> usize {
        if self.limit == 0 { 100 } else { self.limit.min(1000) }
    }
}

/// Which rows a sweep forgets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct AuditSweep {
    /// Rows that are older than this, by the store's clock. At least a day.
    pub retention: Duration,
    /// The most rows in one transaction.
    pub batch_max: usize,
    /// Do nothing if another sweep began less than this ago, so that one of many processes sweeps.
    pub unless_within: Duration,
}

impl AuditSweep {
    /// Sweeps rows older than this, 5,000 at a time.
    pub fn new(retention: Duration) -> Self {
        AuditSweep { retention, batch_max: 5000, unless_within: Duration::ZERO }
    }

    /// Does nothing if another sweep began less than this ago.
    #[must_use]
    pub fn unless_within(mut self, time: Duration) -> Self {
        self.unless_within = time;
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        if self.retention < DAY {
            return Err(Error::invalid(
                "retention",
                format!("it is {:?}; audit rows are kept for at least 1 day", self.retention),
            ));
        }
        if self.batch_max == 0 {
            return Err(Error::invalid("batch_max", "it is 0; it needs 1 or more"));
        }
        Ok(())
    }

    /// Plans a sweep; `None` if one has just been. `before` is what the last one stored.
    pub(crate) fn plan(&self, before: Option<SweepState>, now: Time) -> Option<Plan> {
        let just =
            |before: SweepState| before.swept_at <= now && before.swept_at.plus(self.unless_within) > now;
        if before.is_some_and(just) {
            return None;
        }
        let state = SweepState::next(before, now, self.retention);
        let horizon = state.paused_until.is_none().then(|| now.minus(self.retention));
        Some(Plan { state, horizon })
    }
}

/// What a sweep that begins now may do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// To be stored before anything is forgotten.
    pub state: SweepState,
    /// Older rows are removed; `None` while the clock is in doubt.
    pub horizon: Option<Time>,
}

/// What a sweep did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct SweptAudit {
    /// How many rows it forgot.
    pub rows: u64,
    /// Whether it did nothing, because another sweep runs or has just run.
    pub skipped: bool,
    /// Set if the store's clock has jumped: nothing is deleted before this time.
    pub paused_until: Option<Time>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_bounded_and_clean() {
        let note = AuditNote::new(&Actor::new("é".repeat(10_000), "a\0b"), "x".repeat(100), "t".repeat(5000))
            .details("d".repeat(100_000));
        assert_eq!(note.who.chars().count(), WHO_CHARS_MAX);
        assert!(note.who.ends_with('…') && note.reason == "a\u{fffd}b");
        assert_eq!(note.action.chars().count(), ACTION_CHARS_MAX);
        assert_eq!(note.target.chars().count(), TEXT_CHARS_MAX);
        assert_eq!(note.details.chars().count(), DETAILS_CHARS_MAX);
        assert_eq!(bounded("four", 4), "four");
    }
}
