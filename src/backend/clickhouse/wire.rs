//! ClickHouse's format `RowBinary`: values one after the other, without names or types.

use uuid::Uuid;

use crate::error::{Error, Result};

/// Writes rows.
#[derive(Default)]
pub(super) struct Rows(pub(super) Vec<u8>);

impl Rows {
    pub(super) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }

    pub(super) fn i32(&mut self, value: i32) {
        self.0.extend(value.to_le_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Also a `DateTime64`, in its own units.
    pub(super) fn i64(&mut self, value: i64) {
        self.0.extend(value.to_le_bytes());
    }

    /// Also a `Decimal(38, …)`, in units of its last digit.
    pub(super) fn i128(&mut self, value: i128) {
        self.0.extend(value.to_le_bytes());
    }

    /// Two halves, each with its last byte first.
    pub(super) fn uuid(&mut self, value: Uuid) {
        let (high, low) = value.as_u64_pair();
        self.u64(high);
        self.u64(low);
    }

    pub(super) fn text(&mut self, value: &str) {
        self.bytes(value.as_bytes());
    }

    pub(super) fn bytes(&mut self, value: &[u8]) {
        self.count(value.len());
        self.0.extend(value);
    }

    /// How many bytes or members follow.
    pub(super) fn count(&mut self, mut count: usize) {
        while count >= 0x80 {
            self.u8(0x80 | (count & 0x7f) as u8);
            count >>= 7;
        }
        self.u8(count as u8);
    }
}

/// Reads rows.
pub(super) struct Answer<'a>(&'a [u8]);

impl<'a> Answer<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Answer(bytes)
    }

    /// Whether another row follows.
    pub(super) fn more(&self) -> bool {
        !self.0.is_empty()
    }

    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        self.take(N)?.try_into().map_err(|_| short())
    }

    pub(super) fn i32(&mut self) -> Result<i32> {
        Ok(i32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    pub(super) fn i64(&mut self) -> Result<i64> {
        Ok(i64::from_le_bytes(self.array()?))
    }

    /// A `Decimal(76, …)` in units of its last digit, if it fits 128 bits.
    pub(super) fn i256(&mut self) -> Result<Option<i128>> {
        let (low, high) = (i128::from_le_bytes(self.array()?), i128::from_le_bytes(self.array()?));
        Ok((high == low >> 127).then_some(low))
    }

    /// A `Decimal(38, …)` in units of its last digit.
    pub(super) fn i128(&mut self) -> Result<i128> {
        Ok(i128::from_le_bytes(self.array()?))
    }

    pub(super) fn bytes(&mut self) -> Result<&'a [u8]> {
        let count = self.count()?;
        self.take(count)
    }

    /// How many follow.
    pub(super) fn count(&mut self) -> Result<usize> {
        let (mut count, mut shift) = (0_usize, 0);
        loop {
            let [byte] = self.array()?;
            count |= usize::from(byte & 0x7f) << shift;
            shift += 7;
            if byte < 0x80 {
                return Ok(count);
            }
            if shift > 56 {
                return Err(short());
            }
        }
    }

    pub(super) fn text(&mut self) -> Result<&'a str> {
        std::str::from_utf8(self.bytes()?)
            .map_err(|_| Error::Corrupt("a text in the read model is not UTF-8".into()))
    }

    pub(super) fn uuid(&mut self) -> Result<Uuid> {
        Ok(Uuid::from_u64_pair(self.u64()?, self.u64()?))
    }
}

fn short() -> Error {
    Error::Corrupt("an answer of ClickHouse has other columns than were asked for".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_as_they_were_written() {
        let long = "x".repeat(20_000);
        let mut rows = Rows::default();
        rows.i32(-7);
        rows.u64(u64::MAX);
        rows.i64(i64::MIN);
        rows.uuid(Uuid::from_u128(1 << 100 | 5));
        for text in ["", "é", &long] {
            rows.text(text);
        }
        let mut answer = Answer::new(&rows.0);
        assert_eq!((answer.i32().unwrap(), answer.u64().unwrap()), (-7, u64::MAX));
        assert_eq!(
            (answer.i64().unwrap(), answer.uuid().unwrap()),
            (i64::MIN, Uuid::from_u128(1 << 100 | 5))
        );
        for text in ["", "é", &long] {
            assert_eq!(answer.text().unwrap(), text);
        }
        assert!(!answer.more());
        assert!(answer.i32().is_err(), "there is no more");
    }

    #[test]
    fn a_wide_number_is_read_only_if_it_fits() {
        for (low, high, read) in [
            (5, 0, Some(5)),
            (-5, -1, Some(-5)),
            (i128::MAX, 0, Some(i128::MAX)),
            (i128::MIN, 0, None), // 2^127
            (0, 1, None),
        ] {
            let mut rows = Rows::default();
            rows.i128(low);
            rows.i128(high);
            assert_eq!(Answer::new(&rows.0).i256().unwrap(), read);
        }
    }

    #[test]
    fn a_length_that_lies_is_an_error() {
        for bytes in [&b"\x05abc"[..], b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x80"] {
            assert!(Answer::new(bytes).bytes().is_err(), "{bytes:?}");
        }
    }
}
