//! Stores rows and heads as columns. Unused columns are NULL, which costs one byte.

use std::collections::BTreeSet;

use bytes::Bytes;
use rusqlite::types::{ToSql, ToSqlOutput, Value, ValueRef};
use rusqlite::{Row as Columns, Statement};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Fingerprint, Headers, Origin, Record};
use crate::id::{Aggregate, Owner, Topic};
use crate::ledger::transition::{Head, HeadLease, Row};
use crate::ledger::{Metadata, Nonce, State, Token};

/// The columns of an entry besides its key, in the order in which they are bound, from parameter 3.
/// The reason is in `note`: another name would need a migration.
pub(super) const COLUMNS: &str = "state, token, nonce, attempts, first_at, at, flags, owner, fingerprint, topic, part, \
     pos, aggregate, seq, metadata, note, payload, headers, key, stamp";

/// The same columns as [`Stored`] reads them, with the names of owner and topic.
pub(super) const READ: &str = "state, token, nonce, attempts, first_at, at, flags, \
     (SELECT name FROM main.hapax_name WHERE number = owner), fingerprint, \
     (SELECT name FROM main.hapax_name WHERE number = topic), part, pos, aggregate, seq, metadata, note, payload, headers, \
     key, stamp";

/// How many columns [`READ`] has.
pub(super) const READ_COUNT: usize = 20;

/// The states in which an entry is open ([`State::is_open`]), as SQL.
pub(super) const OPEN: &str = "(0, 2, 3, 7)";

/// An at-most-once claim whose end has not been reported, as SQL. The words must equal those of the
/// week's index.
pub(super) const AWAITED: &str = "state = 4 AND flags & 1";

/// A held dead event that was not published yet, as SQL. The words must equal those of the week's
/// index.
pub(super) const UNCOPIED: &str = "state = 3 AND payload IS NOT NULL AND copied IS NOT token";

const TRACKED: i64 = 1;
const ALONE: i64 = 2;
const SUSPECT: i64 = 4;
const UNORDERED: i64 = 8;
/// The held event had no payload. An empty one is stored, because held rows are found by
/// `payload IS NOT NULL`.
const TOMBSTONE: i64 = 16;

/// The number a state is stored under: its index in [`State::ALL`].
pub(super) fn state_code(state: State) -> i64 {
    match state {
        State::Leased => 0,
        State::Done => 1,
        State::Retry => 2,
        State::Dead => 3,
        State::Claimed => 4,
        State::Finished => 5,
        State::Lost => 6,
        State::Parked => 7,
        State::Stale => 8,
    }
}

/// The state stored under a number.
pub(super) fn state(code: i64) -> Result<State> {
    usize::try_from(code)
        .ok()
        .and_then(|at| State::ALL.get(at).copied())
        .ok_or_else(|| Error::Corrupt(format!("state number {code}")))
}

/// The numbers of a row's names.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Names {
    pub owner: Option<i64>,
    pub topic: Option<i64>,
}

/// Optional bytes.
pub(crate) struct Blob<'a>(pub Option<&'a [u8]>);

impl ToSql for Blob<'_> {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        Ok(match self.0 {
            Some(bytes) => ToSqlOutput::Borrowed(ValueRef::Blob(bytes)),
            None => ToSqlOutput::Owned(Value::Null),
        })
    }
}

fn flags(row: &Row) -> i64 {
    i64::from(row.tracked) * TRACKED
        + i64::from(row.alone) * ALONE
        + i64::from(row.suspect) * SUSPECT
        + i64::from(row.unordered) * UNORDERED
        + i64::from(row.body.as_ref().is_some_and(|body| body.payload.is_none())) * TOMBSTONE
}

/// Binds the columns that most rows of a batch share: parameters 3, 4, 6, 9 and 10.
pub(super) fn bind_common(statement: &mut Statement<'_>, row: &Row, names: Names) -> rusqlite::Result<()> {
    statement.raw_bind_parameter(3, state_code(row.state))?;
    statement.raw_bind_parameter(4, row.token.0)?;
    statement.raw_bind_parameter(6, row.attempts)?;
    statement.raw_bind_parameter(9, flags(row))?;
    statement.raw_bind_parameter(10, names.owner)
}

/// The values that [`bind_common`] binds, for comparison.
pub(super) fn common(row: &Row, names: Names) -> (State, Token, u32, i64, Option<i64>) {
    (row.state, row.token, row.attempts, flags(row), names.owner)
}

/// Binds the columns that differ from row to row: parameters 5, 7 and 8.
pub(super) fn bind_own(statement: &mut Statement<'_>, row: &Row) -> rusqlite::Result<()> {
    statement.raw_bind_parameter(5, row.nonce.0)?;
    statement.raw_bind_parameter(7, row.first_at.as_micros())?;
    statement.raw_bind_parameter(8, row.at.as_micros())
}

/// Whether a row has any value for [`bind_rest`] to bind.
pub(super) fn has_rest(row: &Row) -> bool {
    row.fingerprint.is_some()
        || row.origin.is_some()
        || row.metadata.is_some()
        || row.order.is_some()
        || row.reason.is_some()
        || row.body.is_some()
}

/// Binds the columns that few rows use: parameters 11 to 22.
pub(super) fn bind_rest(statement: &mut Statement<'_>, row: &Row, names: Names) -> rusqlite::Result<()> {
    let (aggregate, seq) =
        row.order.as_ref().map(|(aggregate, seq)| (aggregate.as_str(), *seq as i64)).unzip();
    let origin = row.origin.as_ref();
    let headers = row.body.as_ref().filter(|body| !body.headers.is_empty()).map(|body| pack(&body.headers));
    statement.raw_bind_parameter(11, Blob(row.fingerprint.as_ref().map(|f| f.0.as_slice())))?;
    statement.raw_bind_parameter(12, names.topic)?;
    statement.raw_bind_parameter(13, origin.map(|origin| origin.partition))?;
    statement.raw_bind_parameter(14, origin.map(|origin| origin.offset))?;
    statement.raw_bind_parameter(15, aggregate)?;
    statement.raw_bind_parameter(16, seq)?;
    statement.raw_bind_parameter(17, row.metadata.as_ref().map(Metadata::as_str))?;
    statement.raw_bind_parameter(18, row.reason.as_deref())?;
    statement.raw_bind_parameter(
        19,
        Blob(row.body.as_ref().map(|body| body.payload.as_deref().unwrap_or_default())),
    )?;
    statement.raw_bind_parameter(20, Blob(headers.as_deref()))?;
    let body = row.body.as_ref();
    statement.raw_bind_parameter(21, Blob(body.and_then(|body| body.key.as_deref())))?;
    statement.raw_bind_parameter(22, body.and_then(|body| body.timestamp).map(Time::as_micros))
}

/// A row as read, before its texts are validated.
pub(super) struct Stored {
    state: i64,
    row: Row,
    owner: Option<String>,
    topic: Option<(String, i32, i64)>,
    order: Option<(String, i64)>,
    metadata: Option<String>,
    headers: Option<Vec<u8>>,
}

impl Stored {
    /// Reads the columns of [`READ`].
    pub(super) fn read(columns: &Columns<'_>) -> rusqlite::Result<Stored> {
        let topic: Option<String> = columns.get(9)?;
        let aggregate: Option<String> = columns.get(12)?;
        let payload: Option<Vec<u8>> = columns.get(16)?;
        let key: Option<Vec<u8>> = columns.get(18)?;
        let stamp: Option<i64> = columns.get(19)?;
        let flags: i64 = columns.get(6)?;
        let row = Row {
            state: State::Done,
            token: Token(columns.get(1)?),
            nonce: Nonce(columns.get(2)?),
            attempts: columns.get(3)?,
            first_at: Time::from_micros(columns.get(4)?),
            at: Time::from_micros(columns.get(5)?),
            owner: None,
            fingerprint: columns.get::<_, Option<[u8; 16]>>(8)?.map(Fingerprint),
            order: None,
            origin: None,
            metadata: None,
            reason: columns.get::<_, Option<String>>(15)?.map(Into::into),
            tracked: flags & TRACKED != 0,
            alone: flags & ALONE != 0,
            suspect: flags & SUSPECT != 0,
            unordered: flags & UNORDERED != 0,
            body: payload.map(|payload| Record {
                payload: (flags & TOMBSTONE == 0).then(|| payload.into()),
                headers: Headers::default(),
                key: key.map(Bytes::from),
                timestamp: stamp.map(Time::from_micros),
            }),
        };
        Ok(Stored {
            state: columns.get(0)?,
            row,
            owner: columns.get(7)?,
            topic: match topic {
                Some(topic) => Some((topic, columns.get(10)?, columns.get(11)?)),
                None => None,
            },
            order: match aggregate {
                Some(aggregate) => Some((aggregate, columns.get(13)?)),
                None => None,
            },
            metadata: columns.get(14)?,
            headers: columns.get(17)?,
        })
    }

    /// Validates the row.
    pub(super) fn row(self) -> Result<Row> {
        let mut row = self.row;
        row.state = state(self.state)?;
        row.owner = self.owner.map(|owner| sound(Owner::new(owner))).transpose()?;
        row.metadata = self.metadata.map(|metadata| sound(Metadata::new(metadata))).transpose()?;
        if let Some((topic, partition, offset)) = self.topic {
            row.origin = Some(Origin::new(sound(Topic::new(topic))?, partition, offset));
        }
        if let Some((aggregate, seq)) = self.order {
            row.order = Some((sound(Aggregate::new(aggregate))?, seq as u64));
        }
        if let (Some(body), Some(headers)) = (row.body.as_mut(), self.headers) {
            body.headers = unpack(&headers)?;
        }
        Ok(row)
    }
}

/// Reports an invalid stored text as corruption: the file is wrong, not the caller's input.
pub(crate) fn sound<T>(result: Result<T>) -> Result<T> {
    result.map_err(|error| Error::Corrupt(error.to_string()))
}

/// Packs headers into bytes: for each, the lengths of name and value, then both.
pub(crate) fn pack(headers: &Headers) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, value) in headers.iter() {
        for part in [name.as_bytes(), value] {
            bytes.extend_from_slice(&(part.len() as u32).to_le_bytes());
            bytes.extend_from_slice(part);
        }
    }
    bytes
}

/// Unpacks headers packed by [`pack`].
pub(crate) fn unpack(mut bytes: &[u8]) -> Result<Headers> {
    fn part(bytes: &mut &[u8]) -> Option<Vec<u8>> {
        let (length, rest) = bytes.split_first_chunk::<4>()?;
        let (part, rest) = rest.split_at_checked(u32::from_le_bytes(*length) as usize)?;
        *bytes = rest;
        Some(part.to_vec())
    }
    let mut headers = Vec::new();
    while !bytes.is_empty() {
        let pair = part(&mut bytes).and_then(|name| String::from_utf8(name).ok()).zip(part(&mut bytes));
        let (name, value) = pair.ok_or_else(|| Error::Corrupt("headers".into()))?;
        headers.push((name, Bytes::from(value)));
    }
    Ok(headers.into_iter().collect())
}

/// The columns of a head.
pub(super) const HEAD: &str = "last, lease_seq, lease_token, lease_until, retrying, parked, gap_at";

/// Reads the columns of [`HEAD`].
pub(super) fn head(columns: &Columns<'_>) -> rusqlite::Result<Head> {
    let number = |at: usize| columns.get::<_, Option<i64>>(at);
    let lease = match (number(1)?, number(2)?, number(3)?) {
        (Some(seq), Some(token), Some(until)) => {
            Some(HeadLease { seq: seq as u64, token: Token(token), until: Time::from_micros(until) })
        }
        _ => None,
    };
    let retrying: Option<Vec<u8>> = columns.get(4)?;
    let (seqs, _) = retrying.as_deref().unwrap_or_default().as_chunks::<8>();
    Ok(Head {
        last: number(0)?.map(|last| last as u64),
        lease,
        retrying: seqs.iter().map(|seq| u64::from_le_bytes(*seq)).collect(),
        parked: number(5)?.map(|parked| parked as u64),
        gap_at: number(6)?.map(Time::from_micros),
    })
}

/// Packs the seqs of a head that will be retried; `None` if there are none.
pub(super) fn pack_seqs(seqs: &BTreeSet<u64>) -> Option<Vec<u8>> {
    (!seqs.is_empty()).then(|| seqs.iter().flat_map(|seq| seq.to_le_bytes()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_keep_their_numbers() {
        for (place, state_at) in State::ALL.into_iter().enumerate() {
            assert_eq!(state_code(state_at), place as i64);
            assert_eq!(state(place as i64).unwrap(), state_at);
            assert_eq!(OPEN.contains(char::from(b'0' + place as u8)), state_at.is_open());
        }
        assert!(state(9).is_err() && state(-1).is_err());
    }

    #[test]
    fn headers_survive() {
        let headers: Headers = [("a", &b"\0\xff"[..]), ("", b""), ("a", b"again")]
            .into_iter()
            .map(|(name, value)| (name, Bytes::copy_from_slice(value)))
            .collect();
        assert_eq!(unpack(&pack(&headers)).unwrap(), headers);
        assert!(unpack(&[1, 0, 0, 0]).is_err());
    }
}
