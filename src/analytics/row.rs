//! A row of a read model as it is compared with its record: by a hash of what is stored.

use super::Version;
use crate::clock::Time;
use crate::error::Result;
use crate::event::Fingerprint;
use crate::id::Aggregate;
use crate::records::{Name, plain_numbers};

/// What a read model has of a record, as a [scan](super::ReadModel::scan) shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Row {
    /// The record.
    pub name: Name,
    /// The version that counts.
    pub version: Version,
    /// A hash over the name, the version, the times and the payload. Payloads that are the same
    /// JSON value have the same hash, in whatever order a database keeps the keys and however it
    /// writes the numbers. A payload that is no longer JSON counts byte by byte.
    pub hash: Fingerprint,
}

impl Row {
    /// A row that was created and written at these times, and whose payload is stored in these bytes.
    pub fn new(
        name: Name,
        version: Version,
        (created_at, updated_at): (Time, Time),
        payload: &[u8],
    ) -> Result<Self> {
        let aggregate = format!("{name}:{}:{}", created_at.as_micros(), updated_at.as_micros());
        let aggregate = Aggregate::new(aggregate)?;
        let plain = std::str::from_utf8(payload).ok().map(plain_numbers);
        let payload = plain.as_ref().map_or(payload, |plain| plain.as_bytes());
        let hash = Fingerprint::of(None, Some(&aggregate), Some(version.as_u64()), payload);
        Ok(Row { name, version, hash })
    }

    /// The row with a hash that no intact row has: a column that answers are computed from
    /// contradicts the payload.
    #[cfg(feature = "clickhouse")]
    pub(crate) fn damaged(mut self) -> Self {
        self.hash.0 = self.hash.0.map(|byte| !byte);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_have_equal_hashes_and_nothing_else_has() {
        let name: Name = "00000000-0000-0000-0000-000000000000:orders:0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10"
            .parse()
            .unwrap();
        let times = (Time::from_millis(1), Time::from_millis(2));
        let of = |seq, payload: &[u8]| {
            Row::new(name.clone(), Version::new(1, seq).unwrap(), times, payload).unwrap().hash
        };
        let hash = of(1, br#"{"a":1.5,"b":[100,"x"]}"#);
        assert_eq!(of(1, br#"{ "b": [1e2, "\u0078"], "a": 1.50 }"#), hash, "as jsonb and as it was written");
        for (seq, other) in [
            (2, &br#"{"a":1.5,"b":[100,"x"]}"#[..]),
            (1, br#"{"a":1.6,"b":[100,"x"]}"#),
            (1, br#"{"a":1.5,"b":[100,"X"]}"#),
            (1, br#"{"a":"1.5","b":[100,"x"]}"#),
            (1, br#"x"a":1.5,"b":[100,"x"]}"#),
            (1, b"{\"a\":1.5,\"b\":[100,\"\xff\"]}"),
            (1, b""),
        ] {
            assert_ne!(of(seq, other), hash, "{}", String::from_utf8_lossy(other));
        }
        let other = Name { id: uuid::Uuid::nil(), ..name.clone() };
        let (version, payload) = (Version::new(1, 1).unwrap(), br#"{"a":1.5,"b":[100,"x"]}"#);
        assert_ne!(Row::new(other, version, times, payload).unwrap().hash, hash);
        for other in [(times.0, times.0), (times.1, times.1), (times.1, times.0)] {
            assert_ne!(Row::new(name.clone(), version, other, payload).unwrap().hash, hash);
        }
    }
}
