//! Weeks: the unit of retention, and the partition an id is stored in.

use std::fmt;
use std::time::Duration;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::EventId;

/// What makes up an identity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IdentityRule {
    /// The id alone. A UUIDv7 is stored in the week of the time inside it, any other id in the
    /// timeless week, so one id is one identity whatever else a delivery says.
    #[default]
    Id,
    /// The id and the week of the event's logical time. Gives up: an id delivered with times in two
    /// weeks is two identities. Use it only if your producers never do that.
    IdAndTime,
}

const DAY_US: i64 = 86_400_000_000;
const WEEK_US: i64 = 7 * DAY_US;
/// Monday 1999-12-27T00:00:00Z, the Monday of the week in which the year 2000 begins.
const FIRST_MONDAY_US: i64 = 946_252_800_000_000;
/// The bounds of routing are constants and never depend on "now", so that an id always goes to the
/// same week.
const YEAR_2000_US: i64 = 946_684_800_000_000;
const YEAR_2100_US: i64 = 4_102_444_800_000_000;

/// A week from Monday 00:00 UTC to Monday 00:00 UTC, or the timeless week.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Week(i16);

impl Week {
    /// The week of ids without a usable time.
    pub const TIMELESS: Week = Week(0);

    /// The week that contains a time; timeless before 2000 and from 2100 on.
    ///
    /// ```
    /// use hapax::{Time, ledger::Week};
    /// let sunday = Week::of(Time::parse("2026-03-01T23:30:00Z").unwrap());
    /// let monday = Week::of(Time::parse("2026-03-02T00:30:00Z").unwrap());
    /// assert_eq!(sunday.to_string(), "2026-02-23");
    /// assert_eq!(monday.to_string(), "2026-03-02");
    /// ```
    pub fn of(time: Time) -> Week {
        let us = time.as_micros();
        if !(YEAR_2000_US..YEAR_2100_US).contains(&us) {
            return Week::TIMELESS;
        }
        Week(((us - FIRST_MONDAY_US) / WEEK_US + 1) as i16)
    }

    /// The week an id is stored in, by the ledger's rule.
    pub fn route(rule: IdentityRule, id: &EventId, time: Option<Time>) -> Result<Week> {
        match rule {
            IdentityRule::Id => {
                Ok(id.v7_millis().map_or(Week::TIMELESS, |ms| Week::of(Time::from_millis(ms))))
            }
            IdentityRule::IdAndTime => time.map(Week::of).ok_or_else(|| {
                Error::invalid("event time", "it is missing, and this ledger's identity is id_and_time")
            }),
        }
    }

    /// The number under which the week is stored: 0 is timeless, 1 the week of 1999-12-27.
    pub const fn number(self) -> i16 {
        self.0
    }

    /// The week of a stored number.
    pub fn from_number(number: i16) -> Result<Week> {
        if (0..=Week::of(Time::from_micros(YEAR_2100_US - 1)).0).contains(&number) {
            Ok(Week(number))
        } else {
            Err(Error::Corrupt(format!("week number {number}")))
        }
    }

    /// Whether this is the timeless week.
    pub const fn is_timeless(self) -> bool {
        self.0 == 0
    }

    /// The Monday on which it begins (meaningless for the timeless week: the Monday before the
    /// first).
    pub const fn start(self) -> Time {
        Time::from_micros(FIRST_MONDAY_US + (self.0 as i64 - 1) * WEEK_US)
    }

    /// A time in this week; for the timeless week, a time that routes to it.
    pub(crate) fn moment(self) -> Time {
        if self.is_timeless() {
            return Time::from_micros(0);
        }
        Time::from_micros(self.start().as_micros().max(YEAR_2000_US))
    }

    /// The Monday before which it ends.
    pub const fn end(self) -> Time {
        Week(self.0 + 1).start()
    }

    /// Whether a ledger at `now` needs this week in the normal course of time: last week, this week
    /// and the next four. These are always made; any other week is odd, and the number of odd weeks
    /// is limited.
    pub fn is_present(self, now: Time) -> bool {
        let (last, next) = (Duration::from_hours(14 * 24), Duration::from_hours(28 * 24));
        self.is_timeless() || (self.start().plus(last) >= now && self.start() <= now.plus(next))
    }

    /// Whether a ledger at `now` may make this week: not more than `ahead` in the future.
    pub fn may_be_made(self, now: Time, ahead: Duration) -> Result<()> {
        if self.is_timeless() || self.start() <= now.plus(ahead) {
            return Ok(());
        }
        Err(Error::invalid(
            "event id",
            format!(
                "its time lies in the week of {self}, more than {} days after the ledger's present ({now})",
                ahead.as_secs() / 86_400
            ),
        ))
    }
}

impl fmt::Display for Week {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_timeless() {
            return f.write_str("timeless");
        }
        f.write_str(self.start().to_string().split('T').next().unwrap_or_default())
    }
}

impl fmt::Debug for Week {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Week({self})")
    }
}

#[cfg(test)]
mod tests;
