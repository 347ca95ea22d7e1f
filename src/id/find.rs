//! How an id is found in a record.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::EventId;
use crate::error::{Error, Result};
use crate::event::{Headers, Origin};

/// One way to find an event's id. Each documents what it cannot protect against.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum IdSource {
    /// A header. As reliable as the producer, which must set it once and keep it across its own
    /// retries.
    Header(String),
    /// The id of a CloudEvent, from `ce_id` or, in structured mode, from `/id`. Producers guarantee
    /// it to be unique only together with their `source`, so the id is made of both if there is a
    /// source ([`EventId::sourced`]). As reliable as the producer.
    CloudEvent,
    /// A JSON pointer (RFC 6901) into the payload: a string, or a 64-bit integer taken as its text.
    /// As reliable as the producer.
    Pointer(String),
    /// `topic-partition-offset`. Catches redelivery of a record; **cannot** catch a producer's
    /// retry, a relay's repeat or a republished topic, which have new offsets.
    Offset,
    /// `sha256:…` of the payload. Catches every byte-equal repeat; **merges two distinct events**
    /// whose payloads happen to be equal, so the payload must contain something that distinguishes
    /// them.
    ContentHash,
}

/// Ways to find an id, tried in order: the first that yields an id wins; an invalid id is an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdChain(Vec<IdSource>);

impl Default for IdChain {
    /// Header `idempotency_key`, header `eventId`, the id of a CloudEvent, payload `/eventId`,
    /// `/event_id`. The offset is used only on request.
    fn default() -> Self {
        let header = |name: &str| IdSource::Header(name.to_owned());
        let pointer = |path: &str| IdSource::Pointer(path.to_owned());
        IdChain(vec![
            header("idempotency_key"),
            header("eventId"),
            IdSource::CloudEvent,
            pointer("/eventId"),
            pointer("/event_id"),
        ])
    }
}

/// A text without the byte order mark that some tools prepend.
pub(crate) fn unmarked(text: &[u8]) -> &[u8] {
    text.strip_prefix(b"\xef\xbb\xbf").unwrap_or(text)
}

/// A payload as JSON, parsed on first use and only once.
#[allow(clippy::option_option)] // not parsed yet; parsed, and not JSON
pub(crate) struct Json<'p> {
    payload: &'p Bytes,
    value: Option<Option<serde_json::Value>>,
}

impl<'p> Json<'p> {
    pub(crate) fn of(payload: &'p Bytes) -> Self {
        Json { payload, value: None }
    }

    fn value(&mut self) -> Option<&serde_json::Value> {
        self.value.get_or_insert_with(|| serde_json::from_slice(unmarked(self.payload)).ok()).as_ref()
    }

    /// The value at a pointer, unless it is null.
    pub(crate) fn get(&mut self, pointer: &str) -> Option<&serde_json::Value> {
        // Only an object or an array has something to point into.
        let first = unmarked(self.payload).iter().find(|byte| !byte.is_ascii_whitespace());
        if self.value.is_none() && !first.is_some_and(|byte| matches!(byte, b'{' | b'[')) {
            return None;
        }
        at(self.value()?, pointer).filter(|value| !value.is_null())
    }

    /// The text or the number at a pointer, as text.
    pub(crate) fn text(&mut self, pointer: &str) -> Option<String> {
        match self.get(pointer)? {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Number(number) => Some(number.to_string()),
            _ => None,
        }
    }
}

/// The value at a pointer. Most pointers name a key of the outermost object and need no unescaping.
fn at<'v>(json: &'v serde_json::Value, pointer: &str) -> Option<&'v serde_json::Value> {
    match (json, pointer.strip_prefix('/')) {
        (serde_json::Value::Object(map), Some(key)) if !key.contains(['/', '~']) => map.get(key),
        _ => json.pointer(pointer),
    }
}

impl IdChain {
    /// A chain of the given sources.
    ///
    /// ```
    /// use hapax::id::{IdChain, IdSource};
    /// use hapax::event::Headers;
    /// let chain = IdChain::new([IdSource::Pointer("/order/id".into()), IdSource::ContentHash]).unwrap();
    /// let id = chain.find(&Headers::default(), &br#"{"order":{"id":"o-17"}}"#[..].into(), None).unwrap();
    /// assert_eq!(id.as_str(), "o-17");
    /// ```
    pub fn new(sources: impl IntoIterator<Item = IdSource>) -> Result<Self> {
        let sources: Vec<_> = sources.into_iter().collect();
        if sources.is_empty() {
            return Err(Error::invalid("id chain", "it is empty; name at least one way to find an id"));
        }
        for source in &sources {
            match source {
                IdSource::Pointer(path) if !path.is_empty() && !path.starts_with('/') => {
                    return Err(Error::invalid("id pointer", format!("{path:?} does not start with '/'")));
                }
                IdSource::Header(name) if name.is_empty() => {
                    return Err(Error::invalid("id header", "its name is empty"));
                }
                _ => {}
            }
        }
        Ok(IdChain(sources))
    }

    /// Whether CloudEvents are identified by source and id.
    pub(crate) fn knows_sources(&self) -> bool {
        self.0.contains(&IdSource::CloudEvent)
    }

    /// The sources, in order.
    pub fn sources(&self) -> &[IdSource] {
        &self.0
    }

    /// Finds the id of a record.
    pub fn find(&self, headers: &Headers, payload: &Bytes, origin: Option<&Origin>) -> Result<EventId> {
        self.find_in(headers, &mut Json::of(payload), origin)
    }

    pub(crate) fn find_in(
        &self,
        headers: &Headers,
        json: &mut Json<'_>,
        origin: Option<&Origin>,
    ) -> Result<EventId> {
        for source in &self.0 {
            let found = match source {
                IdSource::Header(name) => match headers.get(name) {
                    Some(value) => Some(header_id(name, value)?),
                    None => None,
                },
                IdSource::CloudEvent => cloud_event_id(headers, json)?,
                IdSource::Pointer(path) => match json.value().and_then(|json| at(json, path)) {
                    Some(value) => pointer_id(path, value)?,
                    None => None,
                },
                IdSource::Offset => match origin {
                    Some(o) => {
                        Some(EventId::new(format!("{}-{}-{}", o.topic.as_str(), o.partition, o.offset))?)
                    }
                    None => None,
                },
                IdSource::ContentHash => Some(content_hash(json.payload)),
            };
            if let Some(id) = found {
                return Ok(id);
            }
        }
        Err(Error::invalid("record", format!("it has no event id; looked for {}", self.describe())))
    }

    fn describe(&self) -> String {
        let names = self.0.iter().map(|source| match source {
            IdSource::Header(name) => format!("header {name}"),
            IdSource::CloudEvent => "ce_id".to_owned(),
            IdSource::Pointer(path) => format!("payload {path}"),
            IdSource::Offset => "topic-partition-offset".to_owned(),
            IdSource::ContentHash => "content hash".to_owned(),
        });
        names.collect::<Vec<_>>().join(", ")
    }
}

fn header_id(name: &str, value: &[u8]) -> Result<EventId> {
    EventId::new(header_text(name, value)?)
}

fn header_text<'v>(name: &str, value: &'v [u8]) -> Result<&'v str> {
    std::str::from_utf8(value)
        .map_err(|e| Error::invalid("event id", format!("header {name} is not UTF-8 ({e})")))
}

/// Where a consumer looks for an event's kind by default: these headers, in structured mode `/type`, then
/// these members of the payload.
pub(crate) const KIND_HEADERS: [&str; 3] = ["ce_type", "eventType", "event_type"];
/// See [`KIND_HEADERS`].
pub(crate) const KIND_POINTERS: [&str; 2] = ["/event_type", "/eventType"];

/// How the kinds of the events of records begin. Only a write of a record appends such events.
pub(crate) const RECORD_KINDS: &str = "record.";

/// What a consumer with the default places reads as the kind of an event that has none of its own.
/// `None` if that cannot be read as text.
pub(crate) fn implied_kind(headers: &Headers, json: &mut Json<'_>) -> Option<String> {
    let attribute = is_structured(headers).then_some("/type");
    look(&KIND_HEADERS, attribute, &KIND_POINTERS, headers, json).ok().flatten()
}

/// The first text under any of these names: headers, then the attribute of a structured CloudEvent, then
/// members of the payload.
pub(crate) fn look(
    names: &[impl AsRef<str>],
    attribute: Option<&str>,
    pointers: &[impl AsRef<str>],
    headers: &Headers,
    json: &mut Json<'_>,
) -> Result<Option<String>> {
    for name in names.iter().map(AsRef::as_ref) {
        if let Some(value) = headers.get(name) {
            let text = std::str::from_utf8(value)
                .map_err(|e| Error::invalid("record", format!("its header {name} is not UTF-8 ({e})")))?;
            return Ok(Some(text.to_owned()));
        }
    }
    let pointers = attribute.into_iter().chain(pointers.iter().map(AsRef::as_ref));
    Ok(pointers.into_iter().find_map(|pointer| json.text(pointer)))
}

/// The content type of structured CloudEvents.
const STRUCTURED: &[u8] = b"application/cloudevents+json";

/// Whether the payload is a structured CloudEvent, attributes included.
///
/// Header names are case-sensitive, except this one: it comes from HTTP, where its name and value
/// are not.
pub(crate) fn is_structured(headers: &Headers) -> bool {
    let content_type = headers.iter().find(|(name, _)| is_content_type(name));
    content_type.is_some_and(|(name, value)| says_structured(name, value))
}

/// Whether this header says that the payload is a structured CloudEvent.
pub(crate) fn says_structured(name: &str, value: &[u8]) -> bool {
    let start = value.trim_ascii_start().get(..STRUCTURED.len());
    is_content_type(name) && start.is_some_and(|start| start.eq_ignore_ascii_case(STRUCTURED))
}

fn is_content_type(name: &str) -> bool {
    name.eq_ignore_ascii_case("content-type")
}

fn cloud_event_id(headers: &Headers, json: &mut Json<'_>) -> Result<Option<EventId>> {
    let (id, source) = if is_structured(headers) {
        let Some(id) = json.get("/id").and_then(|id| id.as_str()).map(EventId::new).transpose()? else {
            return Ok(None);
        };
        (id, json.get("/source").and_then(|source| source.as_str()))
    } else {
        let Some(id) = headers.get("ce_id") else { return Ok(None) };
        let source = headers.get("ce_source").map(|value| header_text("ce_source", value)).transpose()?;
        (header_id("ce_id", id)?, source)
    };
    Ok(Some(match source {
        Some(source) if !source.is_empty() => EventId::sourced(source, &id),
        _ => id,
    }))
}

fn pointer_id(path: &str, value: &serde_json::Value) -> Result<Option<EventId>> {
    match value {
        serde_json::Value::String(text) => EventId::new(text).map(Some),
        // Any other number was rounded by the parser, and two ids could become one.
        serde_json::Value::Number(number) if number.is_i64() || number.is_u64() => {
            EventId::new(number.to_string()).map(Some)
        }
        serde_json::Value::Number(_) => Err(Error::invalid(
            "event id",
            format!("payload {path} is a number that is not a 64-bit integer; write it as a string"),
        )),
        serde_json::Value::Null => Ok(None),
        _ => Err(Error::invalid("event id", format!("payload {path} is neither a string nor a number"))),
    }
}

/// `sha256:` and the hexadecimal digest of the payload.
fn content_hash(payload: &[u8]) -> EventId {
    use std::fmt::Write as _;
    let mut text = String::with_capacity(7 + 64);
    text.push_str("sha256:");
    for byte in Sha256::digest(payload) {
        // Writing to a String cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    EventId(super::Repr::Text(text.into()))
}
