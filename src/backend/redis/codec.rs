//! Encodes rows and heads as bytes. A stored value begins with a stamp that the server assigns;
//! this module writes the rest.
//!
//! In a row, the state follows, then the aggregate with its length in two bytes, because the
//! reading script looks for those. The rest is a sequence of length-prefixed parts in a fixed
//! order; flags say which parts are present.

use std::collections::BTreeSet;

use bytes::Bytes;

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Headers, Origin, Record};
use crate::id::{Aggregate, Owner, Topic};
use crate::ledger::transition::{Head, HeadLease, Row};
use crate::ledger::{Metadata, Nonce, State, Token};

/// The length of the stamp that the server puts before a value.
pub(super) const STAMP_BYTES: usize = 6;

const TRACKED: u16 = 1;
const ALONE: u16 = 1 << 1;
const SUSPECT: u16 = 1 << 2;
const UNORDERED: u16 = 1 << 3;
const ORDER: u16 = 1 << 4;
const OWNER: u16 = 1 << 5;
const FINGERPRINT: u16 = 1 << 6;
const ORIGIN: u16 = 1 << 7;
const METADATA: u16 = 1 << 8;
const REASON: u16 = 1 << 9;
const BODY: u16 = 1 << 10;
const KEY: u16 = 1 << 11;
const TIMESTAMP: u16 = 1 << 12;
const PAYLOAD: u16 = 1 << 13;

#[derive(Default)]
struct Writer(Vec<u8>);

impl Writer {
    /// Writes seven bits per byte, the lowest first.
    fn number(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.0.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.0.push(number as u8);
    }

    /// Zigzag encoding: small numbers of either sign are short.
    fn signed(&mut self, number: i64) {
        self.number(((number << 1) ^ (number >> 63)) as u64);
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.extend_from_slice(bytes);
    }
}

struct Reader<'b>(&'b [u8]);

impl<'b> Reader<'b> {
    fn take(&mut self, count: usize) -> Result<&'b [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(short)?;
        self.0 = rest;
        Ok(taken)
    }

    fn byte(&mut self) -> Result<u8> {
        self.take(1).map(|bytes| bytes[0])
    }

    fn short(&mut self) -> Result<u16> {
        Ok(u16::from_be_bytes([self.byte()?, self.byte()?]))
    }

    fn number(&mut self) -> Result<u64> {
        let mut number = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            number |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(number);
            }
        }
        Err(Error::Corrupt("a number of an entry has no end".into()))
    }

    fn signed(&mut self) -> Result<i64> {
        let number = self.number()?;
        Ok((number >> 1) as i64 ^ -((number & 1) as i64))
    }

    fn bytes(&mut self) -> Result<&'b [u8]> {
        let count = self.number()?;
        self.take(usize::try_from(count).map_err(|_| short())?)
    }

    fn text(&mut self) -> Result<&'b str> {
        std::str::from_utf8(self.bytes()?)
            .map_err(|_| Error::Corrupt("a text of an entry is not UTF-8".into()))
    }

    fn time(&mut self) -> Result<Time> {
        self.signed().map(Time::from_micros)
    }
}

fn short() -> Error {
    Error::Corrupt("an entry ends too early".into())
}

/// Reports a stored value that cannot be read as corrupt, whatever rule it breaks.
fn sound<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| Error::Corrupt(error.to_string()))
}

fn state_code(state: State) -> u8 {
    State::ALL.iter().position(|of| *of == state).unwrap_or_default() as u8
}

fn state_of(code: u8) -> Result<State> {
    State::ALL.get(usize::from(code)).copied().ok_or_else(|| Error::Corrupt(format!("state number {code}")))
}

/// The state of a stored row, without reading the rest.
pub(super) fn state(stored: &[u8]) -> Result<State> {
    state_of(*stored.get(STAMP_BYTES).ok_or_else(short)?)
}

fn flags(row: &Row) -> u16 {
    let body = row.body.as_ref();
    [
        (row.tracked, TRACKED),
        (row.alone, ALONE),
        (row.suspect, SUSPECT),
        (row.unordered, UNORDERED),
        (row.order.is_some(), ORDER),
        (row.owner.is_some(), OWNER),
        (row.fingerprint.is_some(), FINGERPRINT),
        (row.origin.is_some(), ORIGIN),
        (row.metadata.is_some(), METADATA),
        (row.reason.is_some(), REASON),
        (body.is_some(), BODY),
        (body.is_some_and(|body| body.key.is_some()), KEY),
        (body.is_some_and(|body| body.timestamp.is_some()), TIMESTAMP),
        (body.is_some_and(|body| body.payload.is_some()), PAYLOAD),
    ]
    .into_iter()
    .fold(0, |flags, (set, flag)| if set { flags | flag } else { flags })
}

/// Encodes a row, without its stamp.
pub(super) fn pack_row(row: &Row) -> Vec<u8> {
    let mut to = Writer::default();
    to.0.push(state_code(row.state));
    let aggregate = row.order.as_ref().map_or("", |(aggregate, _)| aggregate.as_str());
    to.0.extend_from_slice(&(aggregate.len() as u16).to_be_bytes()); // at most 255 characters
    to.0.extend_from_slice(aggregate.as_bytes());
    to.0.extend_from_slice(&flags(row).to_be_bytes());
    to.signed(row.token.0);
    to.0.extend_from_slice(&row.nonce.0.to_be_bytes());
    to.number(u64::from(row.attempts));
    to.signed(row.first_at.as_micros());
    to.signed(row.at.as_micros().wrapping_sub(row.first_at.as_micros()));
    if let Some((_, seq)) = &row.order {
        to.number(*seq);
    }
    if let Some(owner) = &row.owner {
        to.bytes(owner.as_str().as_bytes());
    }
    if let Some(fingerprint) = &row.fingerprint {
        to.0.extend_from_slice(&fingerprint.0);
    }
    if let Some(origin) = &row.origin {
        to.bytes(origin.topic.as_str().as_bytes());
        to.signed(i64::from(origin.partition));
        to.signed(origin.offset);
    }
    if let Some(metadata) = &row.metadata {
        to.bytes(metadata.as_str().as_bytes());
    }
    if let Some(reason) = &row.reason {
        to.bytes(reason.as_bytes());
    }
    if let Some(body) = &row.body {
        pack_body(&mut to, body);
    }
    to.0
}

fn pack_body(to: &mut Writer, body: &Record) {
    if let Some(payload) = &body.payload {
        to.bytes(payload);
    }
    to.number(body.headers.iter().count() as u64);
    for (name, value) in body.headers.iter() {
        to.bytes(name.as_bytes());
        to.bytes(value);
    }
    if let Some(key) = &body.key {
        to.bytes(key);
    }
    if let Some(timestamp) = body.timestamp {
        to.signed(timestamp.as_micros());
    }
}

/// The bytes before the aggregate of a stored row: stamp, state, length. The scripts rely on this
/// number.
pub(super) const BEFORE_AGGREGATE: usize = STAMP_BYTES + 3;
/// The most bytes after the aggregate that hold the row's times and its seq.
const BEHIND_AGGREGATE: usize = 2 + 10 + 8 + 10 + 10 + 10 + 10;
/// The same plus the origin, for owner and topic names of usual length.
pub(super) const BEGINNING: usize = BEHIND_AGGREGATE + 320;

/// Reads a row's due time, order and origin from its start. There is no origin if the names are so
/// long that the start ends before it: such a row could be from anywhere.
pub(super) fn waiting(beginning: &[u8]) -> Result<Beginning> {
    let mut from = Reader(beginning);
    let start = Start::read(&mut from)?;
    let origin = Origins::read(&mut from, start.flags).ok().and_then(|origins| origins.origin);
    Ok(Beginning { at: start.at, order: start.order, origin })
}

/// What [`waiting`] reads.
#[derive(Debug, PartialEq)]
pub(super) struct Beginning {
    pub(super) at: Time,
    pub(super) order: Option<(Aggregate, u64)>,
    pub(super) origin: Option<Origin>,
}

/// The part of a stored row that follows [`Start`].
struct Origins {
    owner: Option<Owner>,
    fingerprint: Option<Fingerprint>,
    origin: Option<Origin>,
}

impl Origins {
    fn read(from: &mut Reader<'_>, flags: u16) -> Result<Self> {
        let has = |flag| flags & flag != 0;
        let owner = has(OWNER).then(|| sound(Owner::new(from.text()?))).transpose()?;
        let fingerprint = has(FINGERPRINT)
            .then(|| from.take(16)?.try_into().map(Fingerprint).map_err(|_| short()))
            .transpose()?;
        let origin = has(ORIGIN).then(|| {
            let topic = sound(Topic::new(from.text()?))?;
            let partition =
                i32::try_from(from.signed()?).map_err(|_| Error::Corrupt("a partition".into()))?;
            Ok::<_, Error>(Origin::new(topic, partition, from.signed()?))
        });
        Ok(Origins { owner, fingerprint, origin: origin.transpose()? })
    }
}

/// The first part of a stored row.
struct Start {
    state: State,
    flags: u16,
    token: Token,
    nonce: Nonce,
    attempts: u32,
    first_at: Time,
    at: Time,
    order: Option<(Aggregate, u64)>,
}

impl Start {
    fn read(from: &mut Reader<'_>) -> Result<Self> {
        from.take(STAMP_BYTES)?;
        let state = state_of(from.byte()?)?;
        let aggregate = from.short()?;
        let aggregate = from.take(usize::from(aggregate))?;
        let flags = from.short()?;
        let token = Token(from.signed()?);
        let nonce = from.take(8)?;
        let nonce = Nonce(i64::from_be_bytes(nonce.try_into().map_err(|_| short())?));
        let attempts = u32::try_from(from.number()?).map_err(|_| Error::Corrupt("a count of runs".into()))?;
        let first_at = from.time()?;
        let at = Time::from_micros(first_at.as_micros().wrapping_add(from.signed()?));
        let order = (flags & ORDER != 0).then(|| {
            let aggregate = String::from_utf8_lossy(aggregate);
            Ok::<_, Error>((sound(Aggregate::new(aggregate))?, from.number()?))
        });
        let order = order.transpose()?;
        Ok(Start { state, flags, token, nonce, attempts, first_at, at, order })
    }
}

/// Decodes a stored row.
pub(super) fn row(stored: &[u8]) -> Result<Row> {
    let mut from = Reader(stored);
    let Start { state, flags, token, nonce, attempts, first_at, at, order } = Start::read(&mut from)?;
    let has = |flag| flags & flag != 0;
    let Origins { owner, fingerprint, origin } = Origins::read(&mut from, flags)?;
    let metadata = has(METADATA).then(|| sound(Metadata::new(from.text()?))).transpose()?;
    let reason = has(REASON).then(|| from.text().map(Into::into)).transpose()?;
    let body = has(BODY).then(|| body(&mut from, flags)).transpose()?;
    Ok(Row {
        state,
        token,
        nonce,
        attempts,
        first_at,
        at,
        owner,
        fingerprint,
        order,
        origin,
        metadata,
        reason,
        tracked: has(TRACKED),
        alone: has(ALONE),
        suspect: has(SUSPECT),
        unordered: has(UNORDERED),
        body,
    })
}

fn body(from: &mut Reader<'_>, flags: u16) -> Result<Record> {
    let has = |flag| flags & flag != 0;
    let payload = has(PAYLOAD).then(|| from.bytes().map(Bytes::copy_from_slice)).transpose()?;
    let count = from.number()?;
    let mut headers = Vec::new();
    for _ in 0..count {
        headers.push((from.text()?.to_owned(), Bytes::copy_from_slice(from.bytes()?)));
    }
    let key = has(KEY).then(|| from.bytes().map(Bytes::copy_from_slice)).transpose()?;
    let timestamp = has(TIMESTAMP).then(|| from.time()).transpose()?;
    Ok(Record { payload, headers: Headers::from_iter(headers), key, timestamp })
}

/// Encodes a head, without its stamp.
pub(super) fn pack_head(head: &Head) -> Vec<u8> {
    let mut to = Writer::default();
    let there = [head.last.is_some(), head.lease.is_some(), head.parked.is_some(), head.gap_at.is_some()];
    to.0.push(there.iter().enumerate().fold(0, |bits, (n, there)| bits | (u8::from(*there) << n)));
    if let Some(last) = head.last {
        to.number(last);
    }
    if let Some(lease) = &head.lease {
        to.number(lease.seq);
        to.signed(lease.token.0);
        to.signed(lease.until.as_micros());
    }
    if let Some(parked) = head.parked {
        to.number(parked);
    }
    if let Some(gap_at) = head.gap_at {
        to.signed(gap_at.as_micros());
    }
    to.number(head.retrying.len() as u64);
    let mut before = 0;
    for seq in &head.retrying {
        to.number(seq - before); // the differences of ascending seqs are small
        before = *seq;
    }
    to.0
}

/// Decodes a stored head.
pub(super) fn head(stored: &[u8]) -> Result<Head> {
    let mut from = Reader(stored);
    from.take(STAMP_BYTES)?;
    let bits = from.byte()?;
    let has = |n: u8| bits & (1 << n) != 0;
    let last = has(0).then(|| from.number()).transpose()?;
    let lease = has(1).then(|| {
        Ok::<_, Error>(HeadLease { seq: from.number()?, token: Token(from.signed()?), until: from.time()? })
    });
    let lease = lease.transpose()?;
    let parked = has(2).then(|| from.number()).transpose()?;
    let gap_at = has(3).then(|| from.time()).transpose()?;
    let mut retrying = BTreeSet::new();
    let mut seq = 0u64;
    for _ in 0..from.number()? {
        seq = seq.wrapping_add(from.number()?);
        retrying.insert(seq);
    }
    Ok(Head { last, lease, retrying, parked, gap_at })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamped(packed: Vec<u8>) -> Vec<u8> {
        [vec![0; STAMP_BYTES], packed].concat()
    }

    fn plain() -> Row {
        Row {
            state: State::Done,
            token: Token(1_000_000),
            nonce: Nonce(i64::MIN),
            attempts: 1,
            first_at: Time::from_micros(1_772_600_000_000_000),
            at: Time::from_micros(1_772_600_000_500_000),
            owner: None,
            fingerprint: None,
            order: None,
            origin: None,
            metadata: None,
            reason: None,
            tracked: false,
            alone: true,
            suspect: false,
            unordered: false,
            body: None,
        }
    }

    #[test]
    fn rows_come_back_as_they_were() {
        let full = Row {
            state: State::Parked,
            token: Token(i64::MAX),
            attempts: u32::MAX,
            first_at: Time::from_micros(-1),
            at: Time::from_micros(i64::MAX),
            owner: Some(Owner::new("ada").unwrap()),
            fingerprint: Some(Fingerprint([7; 16])),
            order: Some((Aggregate::new("ä".repeat(255)).unwrap(), i64::MAX as u64)),
            origin: Some(Origin::new(Topic::new("orders").unwrap(), -1, i64::MIN)),
            metadata: Some(Metadata::new("{\"a\":1}").unwrap()),
            reason: Some("boom".into()),
            tracked: true,
            alone: false,
            suspect: true,
            unordered: true,
            body: Some(Record {
                payload: Some(Bytes::from_static(b"\0\xff")),
                headers: Headers::from_iter([("a", "1"), ("a", "")]),
                key: Some(Bytes::new()),
                timestamp: Some(Time::from_micros(-5)),
            }),
            ..plain()
        };
        let tombstone = Row { body: Some(Record::default()), ..plain() };
        for row_ in [plain(), full, tombstone] {
            let stored = stamped(pack_row(&row_));
            assert_eq!(row(&stored).unwrap(), row_);
            assert_eq!(state(&stored).unwrap(), row_.state);
            let aggregate = row_.order.as_ref().map_or(0, |(aggregate, _)| aggregate.as_str().len());
            let (at, order) = (row_.at, row_.order.clone());
            let start = stored.len().min(BEFORE_AGGREGATE + aggregate + BEGINNING);
            let beginning = Beginning { at, order: order.clone(), origin: row_.origin.clone() };
            assert_eq!(waiting(&stored[..start]).unwrap(), beginning);
            let start = stored.len().min(BEFORE_AGGREGATE + aggregate + BEHIND_AGGREGATE);
            let decoded = waiting(&stored[..start]).unwrap();
            assert_eq!((decoded.at, decoded.order), (at, order), "however long the names are");
            for end in 0..stored.len() {
                assert_eq!(row(&stored[..end]).unwrap_err().code(), "corrupt");
            }
        }
        println!("a plain done row: {} bytes", stamped(pack_row(&plain())).len());
    }

    #[test]
    fn heads_come_back_as_they_were() {
        let lease = HeadLease { seq: 9, token: Token(3), until: Time::from_micros(5) };
        let full = Head {
            last: Some(0),
            lease: Some(lease),
            retrying: BTreeSet::from([0, 7, i64::MAX as u64]),
            parked: Some(8),
            gap_at: Some(Time::from_micros(-1)),
        };
        for head_ in [Head::default(), full] {
            assert_eq!(head(&stamped(pack_head(&head_))).unwrap(), head_);
        }
    }
}
