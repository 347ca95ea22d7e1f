//! An event of a journal as JSON, the format of objects and archives. Bytes that are not UTF-8 are
//! in base64, so that all bytes survive a round trip.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Position, Stored};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Fingerprint, TraceContext};
use crate::id::{Aggregate, EventId, Kind, Tenant};

/// Bytes as JSON: a string if they are UTF-8, otherwise `{"base64": "…"}`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Octets(pub(crate) Bytes);

#[derive(Serialize, Deserialize)]
struct Encoded<'a> {
    base64: std::borrow::Cow<'a, str>,
}

impl Serialize for Octets {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match std::str::from_utf8(&self.0) {
            Ok(text) => serializer.serialize_str(text),
            Err(_) => Encoded { base64: STANDARD.encode(&self.0).into() }.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Octets {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Either<'a> {
            Text(String),
            #[serde(borrow)]
            Encoded(Encoded<'a>),
        }
        match Either::deserialize(deserializer)? {
            Either::Text(text) => Ok(Octets(text.into())),
            Either::Encoded(Encoded { base64 }) => {
                let bytes = STANDARD.decode(base64.as_bytes()).map_err(serde::de::Error::custom)?;
                Ok(Octets(bytes.into()))
            }
        }
    }
}

/// The event itself, without its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct EventRecord {
    pub(crate) id: String,
    /// In hexadecimal.
    pub(crate) fingerprint: String,
    /// In microseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    time: Option<i64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    kind: Option<String>,
    payload: Octets,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    headers: Vec<(String, Octets)>,
    /// Trace, span and flags in hexadecimal.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    trace: Option<String>,
}

impl EventRecord {
    pub(crate) fn new(event: &Event, fingerprint: Fingerprint) -> Self {
        let headers = event.headers.iter();
        let trace = |t: &TraceContext| format!("{:032x}-{:016x}-{:02x}", t.trace_id, t.span_id, t.flags);
        EventRecord {
            id: event.id.as_str().into_owned(),
            fingerprint: fingerprint.to_string(),
            time: event.time.map(Time::as_micros),
            kind: event.kind.as_ref().map(|kind| kind.as_str().to_owned()),
            payload: Octets(event.payload.clone()),
            headers: headers.map(|(n, v)| (n.to_owned(), Octets(Bytes::copy_from_slice(v)))).collect(),
            trace: event.trace.as_ref().map(trace),
        }
    }

    pub(crate) fn fingerprint(&self) -> Result<Fingerprint> {
        let number = u128::from_str_radix(&self.fingerprint, 16);
        number.map(|number| Fingerprint(number.to_be_bytes())).map_err(|_| corrupt(&self.id, "fingerprint"))
    }

    pub(crate) fn event(&self, tenant: Option<&Tenant>) -> Result<Event> {
        let id = EventId::new(&self.id).map_err(|_| corrupt(&self.id, "id"))?;
        let mut event = Event::new(id).payload(self.payload.0.clone());
        event.time = self.time.map(Time::from_micros);
        event.kind =
            self.kind.as_deref().map(Kind::new).transpose().map_err(|_| corrupt(&self.id, "kind"))?;
        event.tenant = tenant.cloned();
        event.headers = self.headers.iter().map(|(name, value)| (name.clone(), value.0.clone())).collect();
        let trace = self.trace.as_deref().map(|text| trace(text).ok_or_else(|| corrupt(&self.id, "trace")));
        event.trace = trace.transpose()?;
        Ok(event)
    }
}

fn trace(text: &str) -> Option<TraceContext> {
    let mut parts = text.split('-');
    let trace_id = u128::from_str_radix(parts.next()?, 16).ok()?;
    let span_id = u64::from_str_radix(parts.next()?, 16).ok()?;
    Some(TraceContext { trace_id, span_id, flags: u8::from_str_radix(parts.next()?, 16).ok()? })
}

fn corrupt(id: &str, what: &str) -> Error {
    Error::Corrupt(format!("the {what} of a stored event ({id:?}) is invalid"))
}

/// An event with its place: a line of an archive.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredRecord {
    position: Position,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    tenant: Option<String>,
    aggregate: String,
    seq: u64,
    /// In microseconds since 1970, by the journal's clock.
    at: i64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<Position>,
    #[serde(flatten)]
    event: EventRecord,
}

impl StoredRecord {
    pub(crate) fn new(stored: &Stored) -> Self {
        let event = &stored.event;
        StoredRecord {
            position: stored.position.clone(),
            tenant: event.tenant.as_ref().map(|tenant| tenant.as_str().to_owned()),
            aggregate: event.aggregate.as_ref().map_or_else(String::new, |a| a.as_str().to_owned()),
            seq: stored.seq,
            at: stored.at.as_micros(),
            previous: stored.previous.clone(),
            event: EventRecord::new(event, stored.fingerprint),
        }
    }

    pub(crate) fn stored(&self) -> Result<Stored> {
        let tenant = self.tenant.as_deref().map(Tenant::new).transpose();
        let tenant = tenant.map_err(|_| corrupt(&self.event.id, "tenant"))?;
        let aggregate = Aggregate::new(&self.aggregate).map_err(|_| corrupt(&self.event.id, "aggregate"))?;
        let event = self.event.event(tenant.as_ref())?;
        let fingerprint = self.event.fingerprint()?;
        let at = Time::from_micros(self.at);
        let mut stored = Stored::new(self.position.clone(), at, fingerprint, event, aggregate, self.seq);
        stored.previous.clone_from(&self.previous);
        Ok(stored)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_comes_back(
            id in "\\PC{1,20}", payload: Vec<u8>, text: String, headers: Vec<(String, Vec<u8>)>,
            time: Option<i64>, trace: Option<(u128, u64, u8)>, seq in 1..u64::MAX, tenant: bool,
        ) {
            let Ok(id) = EventId::new(id) else { return Ok(()) };
            for payload in [Bytes::from(payload.clone()), Bytes::from(text.clone())] {
                let mut event = Event::new(id.clone()).payload(payload);
                event.headers = headers.iter().cloned().collect();
                event.time = time.map(Time::from_micros);
                event.trace = trace.map(|(trace_id, span_id, flags)| TraceContext { trace_id, span_id, flags });
                event.tenant = tenant.then(|| Tenant::new("t\u{fc}").unwrap());
                let fingerprint = event.fingerprint();
                let position = Position::named(7, "a.b");
                let aggregate = Aggregate::new("a b").unwrap();
                let at = Time::from_micros(5);
                let mut stored = Stored::new(position, at, fingerprint, event, aggregate, seq);
                stored.previous = tenant.then(|| Position::of(6));
                let line = serde_json::to_string(&StoredRecord::new(&stored)).unwrap();
                prop_assert!(!line.contains('\n'));
                let back: StoredRecord = serde_json::from_str(&line).unwrap();
                prop_assert_eq!(back.stored().unwrap(), stored);
            }
        }
    }
}
