//! Time. A ledger decides by its own clock only: the database's if there is a server, or a
//! [`Clock`] if the ledger lives in this process or in a local file.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use crate::error::{Error, Result};

/// A point in time in UTC, in microseconds since 1970, which every backend can store exactly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Time(i64);

impl Time {
    /// From microseconds since 1970-01-01T00:00:00Z.
    pub const fn from_micros(micros: i64) -> Self {
        Time(micros)
    }

    /// From milliseconds since 1970-01-01T00:00:00Z.
    pub const fn from_millis(millis: i64) -> Self {
        Time(millis.saturating_mul(1000))
    }

    /// Microseconds since 1970-01-01T00:00:00Z.
    pub const fn as_micros(self) -> i64 {
        self.0
    }

    /// This time plus a duration, saturating.
    #[must_use]
    pub fn plus(self, duration: Duration) -> Self {
        Time(self.0.saturating_add(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)))
    }

    /// This time minus a duration, saturating.
    #[must_use]
    pub fn minus(self, duration: Duration) -> Self {
        Time(self.0.saturating_sub(i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)))
    }

    /// How long after `earlier` this is; zero if it is not later.
    pub fn since(self, earlier: Time) -> Duration {
        Duration::from_micros(u64::try_from(self.0.saturating_sub(earlier.0)).unwrap_or(0))
    }

    /// Parses an RFC 3339 time.
    ///
    /// ```
    /// use hapax::Time;
    /// assert_eq!(Time::parse("1970-01-01T00:00:01Z").unwrap(), Time::from_millis(1000));
    /// assert!(Time::parse("yesterday").is_err());
    /// ```
    pub fn parse(text: &str) -> Result<Self> {
        text.parse::<jiff::Timestamp>()
            .map(|t| Time(t.as_microsecond()))
            .map_err(|e| Error::invalid("time", format!("{text:?} is not an RFC 3339 time ({e})")))
    }
}

impl fmt::Display for Time {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match jiff::Timestamp::from_microsecond(self.0) {
            Ok(t) => t.fmt(f),
            Err(_) => write!(f, "{}us", self.0),
        }
    }
}

/// The time source of an in-process ledger.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// The current time.
    fn now(&self) -> Time;
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    #[expect(clippy::disallowed_methods, reason = "the one place that reads the machine's clock")]
    fn now(&self) -> Time {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Time(i64::try_from(since.as_micros()).unwrap_or(i64::MAX))
    }
}

/// The pause that a `Retry-After` header asks for, given in seconds or as a date. A date counts from the
/// answer's own `Date`, if it has one: the two clocks may differ.
#[cfg(any(feature = "http", feature = "client"))]
pub(crate) fn retry_after(value: &str, date: Option<&str>) -> Option<Duration> {
    let text = value.trim();
    if let Ok(seconds) = text.parse::<u64>() {
        return Some(Duration::from_secs(seconds));
    }
    let parse = |text: &str| {
        jiff::fmt::rfc2822::parse(text.trim())
            .ok()
            .map(|at| Time::from_micros(at.timestamp().as_microsecond()))
    };
    let from = date.and_then(parse).unwrap_or_else(|| SystemClock.now());
    Some(parse(text)?.since(from))
}

/// A random number in 1..=1000, for pauses with full jitter: never 0, so that there is always a pause.
pub(crate) fn jitter_permille() -> u16 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    ((high ^ low) % 1000) as u16 + 1
}

/// A clock that moves only on request, for tests.
#[derive(Debug, Clone)]
pub struct ManualClock(Arc<AtomicI64>);

impl ManualClock {
    /// Starts at `now`.
    pub fn new(now: Time) -> Self {
        ManualClock(Arc::new(AtomicI64::new(now.0)))
    }

    /// Moves the clock forward.
    pub fn advance(&self, by: Duration) {
        self.0.fetch_add(i64::try_from(by.as_micros()).unwrap_or(i64::MAX), Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Time {
        Time(self.0.load(Ordering::SeqCst))
    }
}

#[cfg(test)]
mod tests;
