//! The event: the fact itself, on its whole path.

use std::fmt;

use bytes::Bytes;
use serde_json::value::RawValue;
use sha2::{Digest, Sha256};

use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::{Aggregate, EventId, IdChain, Kind, Tenant, Topic};

/// A fact with an id. Cloning shares payload, headers and names.
///
/// ```
/// use hapax::{Event, EventId};
/// let event = Event::new(EventId::new("order-17-paid").unwrap()).payload(r#"{"amount": 7}"#);
/// assert_eq!(event.id.as_str(), "order-17-paid");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// Its id, unique within tenant and scope.
    pub id: EventId,
    /// When it happened, according to its producer. Decides nothing unless a ledger is configured
    /// to trust it.
    pub time: Option<Time>,
    /// What kind of fact it is.
    pub kind: Option<Kind>,
    /// The thing whose events are ordered.
    pub aggregate: Option<Aggregate>,
    /// Its number within the aggregate.
    pub seq: Option<u64>,
    /// Whose data it is.
    pub tenant: Option<Tenant>,
    /// Its content.
    pub payload: Bytes,
    /// Whether the record had no payload at all, which differs from an empty one: on a compacted
    /// topic it deletes the value of its key.
    pub tombstone: bool,
    /// The key of the record it came in.
    pub record_key: Option<Bytes>,
    /// The headers, unchanged.
    pub headers: Headers,
    /// W3C trace context, if the producer sent one.
    pub trace: Option<TraceContext>,
    /// The record it came from.
    pub origin: Option<Origin>,
}

impl Event {
    /// An event with only an id, which is validated: `Event::of("order-17-paid")?`.
    pub fn of(id: impl AsRef<str>) -> crate::error::Result<Self> {
        Ok(Event::new(EventId::new(id)?))
    }

    /// An event with only an id.
    pub fn new(id: EventId) -> Self {
        Event {
            id,
            time: None,
            kind: None,
            aggregate: None,
            seq: None,
            tenant: None,
            payload: Bytes::new(),
            tombstone: false,
            record_key: None,
            headers: Headers::default(),
            trace: None,
            origin: None,
        }
    }

    /// An event from a record, with the id that `chain` finds. Reads a `traceparent` header.
    pub fn from_record(
        chain: &IdChain,
        headers: Headers,
        payload: impl Into<Bytes>,
        origin: Option<Origin>,
    ) -> Result<Self> {
        let payload = payload.into();
        let id = chain.find(&headers, &payload, origin.as_ref())?;
        let trace = headers.get("traceparent").and_then(|value| TraceContext::parse(value).ok());
        Ok(Event { payload, headers, trace, origin, ..Event::new(id) })
    }

    /// Sets the logical time.
    #[must_use]
    pub fn time(mut self, time: Time) -> Self {
        self.time = Some(time);
        self
    }

    /// Sets the kind.
    #[must_use]
    pub fn kind(mut self, kind: Kind) -> Self {
        self.kind = Some(kind);
        self
    }

    /// Sets the aggregate and the seq within it.
    #[must_use]
    pub fn seq(mut self, aggregate: Aggregate, seq: u64) -> Self {
        self.aggregate = Some(aggregate);
        self.seq = Some(seq);
        self
    }

    /// Sets the tenant.
    #[must_use]
    pub fn tenant(mut self, tenant: Tenant) -> Self {
        self.tenant = Some(tenant);
        self
    }

    /// Sets the payload.
    #[must_use]
    pub fn payload(mut self, payload: impl Into<Bytes>) -> Self {
        self.payload = payload.into();
        self
    }

    /// Sets the record it came from.
    #[must_use]
    pub fn origin(mut self, origin: Origin) -> Self {
        self.origin = Some(origin);
        self
    }

    /// The fingerprint, unless the event is only an id and so has no immutable part to compare.
    pub(crate) fn fingerprint_if_any(&self) -> Option<Fingerprint> {
        let has_content = !self.payload.is_empty() || self.kind.is_some() || self.seq.is_some();
        has_content.then(|| self.fingerprint())
    }

    /// The hash of the immutable part: kind, aggregate, seq and payload. See [`Fingerprint`].
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of(self.kind.as_ref(), self.aggregate.as_ref(), self.seq, &self.payload)
    }
}

/// The content of a record: as published, as received, and as a ledger holds it while its event waits
/// or is dead. Cloning shares the bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Record {
    /// The partitioning key. Records with the same key share a partition and stay in order.
    pub key: Option<Bytes>,
    /// The content. `None` is a tombstone, which differs from an empty one.
    pub payload: Option<Bytes>,
    /// The headers.
    pub headers: Headers,
    /// When the producer created it. The bus fills it in if unset.
    pub timestamp: Option<Time>,
}

impl Record {
    /// Its size: key, payload and headers.
    pub fn bytes(&self) -> usize {
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        let part = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        part(&self.key) + part(&self.payload) + headers
    }

    /// Its approximate size in memory.
    pub fn memory_bytes(&self) -> usize {
        self.bytes() + RECORD_OVERHEAD_BYTES
    }
}

/// What a record takes in memory besides its bytes.
pub(crate) const RECORD_OVERHEAD_BYTES: usize = 256;

/// The record an event came from.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Origin {
    /// The topic.
    pub topic: Topic,
    /// The partition.
    pub partition: i32,
    /// The offset within it.
    pub offset: i64,
}

impl Origin {
    /// Topic, partition and offset.
    pub fn new(topic: Topic, partition: i32, offset: i64) -> Self {
        Origin { topic, partition, offset }
    }
}

/// Headers in order. Names may repeat; values are bytes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Headers(std::sync::Arc<Vec<(String, Bytes)>>);

impl Headers {
    /// The first value of a name. Names are case-sensitive.
    pub fn get(&self, name: &str) -> Option<&[u8]> {
        self.0.iter().find(|(n, _)| n == name).map(|(_, value)| &value[..])
    }

    /// All headers, in order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &[u8])> {
        self.0.iter().map(|(name, value)| (name.as_str(), &value[..]))
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl<N: Into<String>, V: Into<Bytes>> FromIterator<(N, V)> for Headers {
    fn from_iter<I: IntoIterator<Item = (N, V)>>(iter: I) -> Self {
        Headers(std::sync::Arc::new(iter.into_iter().map(|(n, v)| (n.into(), v.into())).collect()))
    }
}

/// W3C trace context of the producer (`traceparent`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TraceContext {
    /// The trace.
    pub trace_id: u128,
    /// The producer's span.
    pub span_id: u64,
    /// Flags; bit 0 is "sampled".
    pub flags: u8,
}

impl TraceContext {
    /// Parses a `traceparent` value.
    pub fn parse(value: &[u8]) -> Result<Self> {
        let bad = || Error::invalid("traceparent", "it is not version-trace-span-flags in hexadecimal");
        let text = std::str::from_utf8(value).map_err(|_| bad())?;
        let mut parts = text.split('-');
        let mut part = |len: usize| {
            parts
                .next()
                .filter(|p| p.len() == len && p.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')))
                .ok_or_else(bad)
        };
        let version = part(2)?;
        let trace_id = u128::from_str_radix(part(32)?, 16).map_err(|_| bad())?;
        let span_id = u64::from_str_radix(part(16)?, 16).map_err(|_| bad())?;
        let flags = u8::from_str_radix(part(2)?, 16).map_err(|_| bad())?;
        let ends = parts.next().is_none() || version != "00"; // only later versions may have more
        if !ends || version == "ff" || trace_id == 0 || span_id == 0 {
            return Err(bad());
        }
        Ok(TraceContext { trace_id, span_id, flags })
    }
}

impl fmt::Display for TraceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, self.flags)
    }
}

/// A hash of the part of an event that must not change under its id: kind, aggregate, seq and payload.
///
/// A JSON payload is hashed in canonical form: the order of keys, white space and string escapes do
/// not matter; numbers count as written, and a repeated key counts each time. 128 bits: half of a
/// SHA-256.
///
/// ```
/// use hapax::{Event, EventId};
/// let id = EventId::new("e").unwrap();
/// let a = Event::new(id.clone()).payload(r#"{"a": 1, "b": 2}"#);
/// let b = Event::new(id.clone()).payload(r#"{"b":2,"a":1}"#);
/// let c = Event::new(id).payload(r#"{"b":2,"a":3}"#);
/// assert_eq!(a.fingerprint(), b.fingerprint());
/// assert_ne!(a.fingerprint(), c.fingerprint());
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint(pub [u8; 16]);

/// JSON nested deeper than this is hashed as raw bytes.
const DEPTH_MAX: usize = 128;

impl Fingerprint {
    /// That of an event whose content was [erased](crate::erase): it equals any other, since nothing is left to
    /// compare. A hash of what was erased would let whoever has it try out what the content was.
    pub const ERASED: Fingerprint = Fingerprint([0; 16]);

    /// Hashes the immutable part of an event.
    pub fn of(kind: Option<&Kind>, aggregate: Option<&Aggregate>, seq: Option<u64>, payload: &[u8]) -> Self {
        let mut hash = Sha256::new();
        let mut part = |tag: u8, bytes: &[u8]| {
            hash.update([tag]);
            hash.update((bytes.len() as u64).to_be_bytes());
            hash.update(bytes);
        };
        if let Some(kind) = kind {
            part(1, kind.as_str().as_bytes());
        }
        if let Some(aggregate) = aggregate {
            part(2, aggregate.as_str().as_bytes());
        }
        if let Some(seq) = seq {
            part(3, &seq.to_be_bytes());
        }
        match canonical(payload) {
            Some(canonical) => part(4, &canonical),
            None => part(5, payload),
        }
        let digest = hash.finalize();
        let mut half = [0; 16];
        half.copy_from_slice(&digest[..16]);
        Fingerprint(half)
    }
}

/// The canonical form of a JSON text: keys sorted, no white space, one way to write a string. `None`
/// if it is not JSON, or nested too deeply.
pub(crate) fn canonical(payload: &[u8]) -> Option<Vec<u8>> {
    // The depth is checked first: each level is parsed again by the next, which a hostile payload
    // could exploit.
    let json = (depth(payload) <= DEPTH_MAX).then(|| std::str::from_utf8(payload).ok()).flatten()?;
    let mut canonical = Vec::with_capacity(payload.len());
    (is_sound(json) && canonical_json(json, DEPTH_MAX, &mut canonical)).then_some(canonical)
}

/// The members of a JSON object in their order, repeated ones too. `None` if it is none.
pub(crate) fn members(json: &[u8]) -> Option<Vec<(String, &RawValue)>> {
    serde_json::from_slice(json).ok().map(|Members(members)| members)
}

/// Whether a scalar is valid JSON. [`canonical_json`] itself parses and validates objects and
/// arrays.
fn is_sound(json: &str) -> bool {
    json.trim_start().starts_with(['{', '[']) || serde_json::from_str::<&RawValue>(json).is_ok()
}

/// How deeply brackets nest, ignoring those in strings.
pub(crate) fn depth(json: &[u8]) -> usize {
    let (mut depth, mut deepest, mut in_string, mut escaped) = (0usize, 0, false, false);
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' | b'[' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b'}' | b']' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Writes `json` (an object, an array, or a scalar that [`is_sound`]) with sorted keys and no white
/// space. Returns false if it is not JSON, or nested deeper than `depth`.
fn canonical_json(json: &str, depth: usize, out: &mut Vec<u8>) -> bool {
    if depth == 0 {
        return false;
    }
    match json.trim_start().as_bytes().first() {
        Some(b'{') => {
            let Ok(Members(mut members)) = serde_json::from_str(json) else { return false };
            members.sort_by(|(a, _), (b, _)| a.cmp(b)); // stable: repeated keys all count, in their order
            out.push(b'{');
            for (key, value) in members {
                if !(canonical_string(&key, out) && canonical_json(value.get(), depth - 1, out)) {
                    return false;
                }
                out.push(b',');
            }
            out.push(b'}');
            true
        }
        Some(b'[') => {
            let Ok(items) = serde_json::from_str::<Vec<&RawValue>>(json) else { return false };
            out.push(b'[');
            for item in items {
                if !canonical_json(item.get(), depth - 1, out) {
                    return false;
                }
                out.push(b',');
            }
            out.push(b']');
            true
        }
        Some(b'"') if json.contains('\\') => {
            serde_json::from_str::<String>(json).is_ok_and(|text| canonical_string(&text, out))
        }
        // This includes strings without escapes: they can be written in only one way.
        _ => {
            out.extend_from_slice(json.trim().as_bytes());
            true
        }
    }
}

/// The members of an object in their order. A map would keep only one of a repeated key, and
/// parsers differ in which.
struct Members<'j>(Vec<(String, &'j RawValue)>);

impl<'de> serde::Deserialize<'de> for Members<'de> {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Members<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: serde::de::MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Self::Value, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        from.deserialize_map(Visitor)
    }
}

fn canonical_string(text: &str, out: &mut Vec<u8>) -> bool {
    serde_json::to_writer(out, text).is_ok()
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

#[cfg(test)]
mod tests;
