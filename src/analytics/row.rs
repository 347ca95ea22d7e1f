//! A row of a read model as it is compared with its record: by a hash of what is stored.

use super::Version;
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
    /// A hash over the name, the version and the payload. Payloads that are the same JSON value have the
    /// same hash, in whatever order a database keeps the keys and however it writes the numbers. What is no
    /// JSON any more counts byte by byte.
    pub hash: Fingerprint,
}

impl Row {
    /// A row whose payload is stored in these bytes.
    pub fn new(name: Name, version: Version, payload: &[u8]) -> Result<Self> {
        let aggregate = Aggregate::new(name.to_string())?;
        let plain = std::str::from_utf8(payload).ok().map(plain_numbers);
        let payload = plain.as_ref().map_or(payload, |plain| plain.as_bytes());
        let hash = Fingerprint::of(None, Some(&aggregate), Some(version.as_u64()), payload);
        Ok(Row { name, version, hash })
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
        let of = |seq, payload: &[u8]| {
            Row::new(name.clone(), Version::new(1, seq).unwrap(), payload).unwrap().hash
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
        assert_ne!(
            Row::new(other, Version::new(1, 1).unwrap(), br#"{"a":1.5,"b":[100,"x"]}"#).unwrap().hash,
            hash
        );
    }
}
