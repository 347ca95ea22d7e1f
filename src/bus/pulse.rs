//! Pulses: how far a topic is.
//!
//! A pulse is a record that a relay publishes to every partition of its topic. It says: everything
//! that was acknowledged to its writer before this time, by the journal's clock, lies before this
//! record. A read model that has applied a partition up to a pulse may say so. A pulse is not an event:
//! consumers pass it by.
//!
//! Pulses may come again and out of order, since a pulse that was slow is still true when it
//! arrives. The latest time of a partition counts.

use bytes::Bytes;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Headers, Record};

/// The header that makes a record a pulse. Its value is the time in microseconds since 1970, a slash, and
/// the number of partitions.
pub const PULSE: &str = "hapax_pulse";

/// The most partitions that a pulse may speak of: a hostile one must not make readers expect more.
pub(crate) const PARTITIONS_MAX: i32 = 100_000;

/// Everything that was acknowledged before this time lies before this record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pulse {
    /// The time, by the journal's clock.
    pub at: Time,
    /// How many partitions the topic had when all of that was on it: each has, or will have, this pulse.
    /// A reader that waits for so many misses no partition that was added.
    pub partitions: i32,
}

impl Pulse {
    /// The pulse as a record, for [`publish_to`](super::Bus::publish_to).
    pub fn record(&self) -> Record {
        let value = format!("{}/{}", self.at.as_micros(), self.partitions);
        let headers: Headers = [(PULSE, value)].into_iter().collect();
        // The header decides; the payload is for people who look at a topic.
        let payload = serde_json::json!({ "pulse_at": self.at.to_string() }).to_string();
        Record { key: None, payload: Some(Bytes::from(payload)), headers, timestamp: None }
    }

    /// The pulse in a record; `None` if the record is not a pulse. One whose time cannot be read is an
    /// error, and still no event.
    ///
    /// ```
    /// use hapax::bus::{Pulse, Record};
    /// use hapax::Time;
    /// let pulse = Pulse { at: Time::from_millis(1000), partitions: 4 };
    /// assert_eq!(Pulse::of(&pulse.record()).unwrap().unwrap(), pulse);
    /// assert!(Pulse::of(&Record::default()).is_none());
    /// ```
    pub fn of(record: &Record) -> Option<Result<Pulse>> {
        let value = record.headers.get(PULSE)?;
        let parsed = std::str::from_utf8(value).ok().and_then(|text| {
            let (micros, partitions) = text.split_once('/')?;
            let partitions =
                partitions.parse().ok().filter(|partitions| (1..=PARTITIONS_MAX).contains(partitions));
            Some(Pulse { at: Time::from_micros(micros.parse().ok()?), partitions: partitions? })
        });
        Some(parsed.ok_or_else(|| {
            let shown = String::from_utf8_lossy(&value[..value.len().min(40)]).into_owned();
            let reason = format!(
                "its header {PULSE} is {shown:?}, not microseconds since 1970, a slash and 1 to {PARTITIONS_MAX} partitions"
            );
            Error::invalid("pulse", reason)
        }))
    }

    /// Whether a record is a pulse, readable or not.
    pub(crate) fn is(record: &Record) -> bool {
        record.headers.get(PULSE).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with_header(value: &'static [u8]) -> Record {
        let headers: Headers = [(PULSE, Bytes::from_static(value))].into_iter().collect();
        Record { headers, ..Record::default() }
    }

    #[test]
    fn a_pulse_reads_back_to_the_microsecond() {
        for at in ["2026-03-04T12:00:00.123456Z", "1969-12-31T23:59:59.999999Z"] {
            let pulse = Pulse { at: Time::parse(at).unwrap(), partitions: 7 };
            let record = pulse.record();
            assert_eq!(Pulse::of(&record).unwrap().unwrap(), pulse);
            assert_eq!((record.key, record.timestamp), (None, None));
            let payload: serde_json::Value = serde_json::from_slice(&record.payload.unwrap()).unwrap();
            assert_eq!(payload, serde_json::json!({ "pulse_at": at }));
        }
    }

    #[test]
    fn another_record_is_no_pulse() {
        let payload = Pulse { at: Time::from_millis(1), partitions: 1 }.record().payload;
        assert!(Pulse::of(&Record { payload, ..Record::default() }).is_none(), "the header decides");
    }

    #[test]
    fn a_time_that_cannot_be_read_is_a_sentence() {
        for value in [
            &b""[..],
            b"soon",
            b"1.5/1",
            b"\xff",
            b"99999999999999999999/1",
            b"1",
            b"1/0",
            b"1/-1",
            b"1/999999999",
        ] {
            let record = with_header(value);
            assert!(Pulse::is(&record));
            let error = Pulse::of(&record).unwrap().unwrap_err().to_string();
            assert!(error.contains("microseconds since 1970"), "{error}");
        }
    }
}
