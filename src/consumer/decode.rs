//! From a record to an event: finds id, time, kind, aggregate and seq wherever the producer's tool
//! put them.
//!
//! Understood without configuration: an `eventId` (or `event_id`) in header or payload, CloudEvents
//! in binary mode (`ce_…` headers) and in structured mode (`content-type:
//! application/cloudevents+json`), and W3C `traceparent`. A CloudEvent is identified by its source
//! and id together ([`EventId::sourced`]).

use serde_json::Value;

use crate::bus::Received;
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::{Event, Headers};
use crate::id::{
    Aggregate, EventId, IdChain, Json, KIND_HEADERS, KIND_POINTERS, Kind, Tenant, is_structured, look,
};

/// Where to look for the parts of an event: headers first, then the payload. The defaults are the
/// names that common producers use.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Decoder {
    /// How to find the id.
    pub id: IdChain,
    /// The aggregate.
    pub aggregate: Places,
    /// The sequence number within the aggregate.
    pub seq: Places,
    /// The kind.
    pub kind: Places,
    /// The producer's time, RFC 3339. Defaults to the record's timestamp.
    pub time: Places,
    /// The tenant: whose data it is. By default only a header names it.
    pub tenant: Places,
}

/// Names under which to look for one part of an event.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// Header names, in order.
    pub headers: Vec<String>,
    /// JSON pointers into the payload, in order.
    pub pointers: Vec<String>,
}

impl Places {
    /// Headers, then pointers.
    pub fn new(headers: &[&str], pointers: &[&str]) -> Self {
        let owned = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Places { headers: owned(headers), pointers: owned(pointers) }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Decoder {
            id: IdChain::default(),
            aggregate: Places::new(
                &["aggregate_id", "aggregateId", "ce_subject"],
                &["/aggregate_id", "/aggregateId"],
            ),
            seq: Places::new(
                &["sequence_number", "seq", "ce_sequence"],
                &["/sequence_number", "/sequenceNumber", "/seq"],
            ),
            kind: Places::new(&KIND_HEADERS, &KIND_POINTERS),
            time: Places::new(&["ce_time"], &["/occurred_at", "/occurredAt"]),
            tenant: Places::new(&["tenant_id", "ce_tenant"], &[]),
        }
    }
}

impl Decoder {
    /// Decodes the event in a record. The error says in a sentence why there is none.
    ///
    /// ```
    /// use hapax::bus::{Received, Record};
    /// use hapax::consumer::Decoder;
    /// use hapax::{Origin, Topic};
    /// let payload = br#"{"event_id": "e-1", "aggregate_id": "order-17", "sequence_number": 3}"#;
    /// let record = Record { payload: Some(payload[..].into()), ..Record::default() };
    /// let received = Received::new(record, Origin::new(Topic::new("orders")?, 0, 42));
    /// let event = Decoder::default().decode(&received)?;
    /// assert_eq!((&*event.id.as_str(), event.seq), ("e-1", Some(3)));
    /// # Ok::<(), hapax::Error>(())
    /// ```
    pub fn decode(&self, received: &Received) -> Result<Event> {
        self.decode_for(received, true)
    }

    /// Decodes a record. Without an order, aggregate and seq are not used, so an unreadable one
    /// does not refuse the record.
    pub(super) fn decode_for(&self, received: &Received, ordered: bool) -> Result<Event> {
        if let Some(problem) = &received.unreadable {
            return Err(Error::invalid("record", problem.clone()));
        }
        let record = &received.record;
        let payload = record.payload.clone().unwrap_or_default();
        let mut json = Json::of(&payload);
        let structured = is_structured(&record.headers);
        let id = if structured && !self.id.knows_sources() {
            self.structured_id(&record.headers, &mut json, received)?
        } else {
            self.id.find_in(&record.headers, &mut json, Some(&received.origin))?
        };
        let mut event = Event::new(id).payload(payload.clone()).origin(received.origin.clone());
        event.headers = record.headers.clone();
        event.tombstone = record.payload.is_none();
        event.record_key.clone_from(&record.key);
        event.trace =
            record.headers.get("traceparent").and_then(|value| crate::event::TraceContext::parse(value).ok());
        let mut find = |places: &Places, attribute: &str| {
            let attribute = structured.then_some(attribute);
            look(&places.headers, attribute, &places.pointers, &record.headers, &mut json)
        };
        event.kind = find(&self.kind, "/type")?.map(Kind::new).transpose()?;
        let aggregate =
            find(&self.aggregate, "/subject").and_then(|found| found.map(Aggregate::new).transpose());
        event.aggregate = if ordered { aggregate? } else { aggregate.ok().flatten() };
        event.tenant = find(&self.tenant, "/tenant")?.map(Tenant::new).transpose()?;
        let number = find(&self.seq, "/sequence").and_then(|found| found.map(|text| seq(&text)).transpose());
        event.seq = if ordered { number? } else { number.ok().flatten() };
        // An unreadable time does not refuse the event, because nothing depends on it.
        let time = find(&self.time, "/time").ok().flatten().and_then(|text| Time::parse(&text).ok());
        event.time = time.or(record.timestamp);
        Ok(event)
    }

    /// For id chains that ignore sources: the event's own id comes first.
    fn structured_id(&self, headers: &Headers, json: &mut Json<'_>, received: &Received) -> Result<EventId> {
        match json.get("/id") {
            Some(Value::String(id)) => EventId::new(id),
            _ => self.id.find_in(headers, json, Some(&received.origin)),
        }
    }
}

fn seq(text: &str) -> Result<u64> {
    text.parse().ok().filter(|seq| i64::try_from(*seq).is_ok()).ok_or_else(|| {
        Error::invalid("seq", format!("{text:?} is not a whole number from 0 to {}", i64::MAX))
    })
}

#[cfg(test)]
mod tests {
    use super::Decoder;
    use crate::bus::{Received, Record};
    use crate::event::{Headers, Origin};
    use crate::id::{IdChain, IdSource};
    use crate::ledger::{IdentityRule, Week};
    use crate::{Time, Topic};

    fn received(headers: &[(&str, &str)], payload: &str) -> Received {
        let headers: Headers = headers.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
        let record = Record { headers, payload: Some(payload.to_owned().into()), ..Record::default() };
        Received::new(record, Origin::new(Topic::new("orders").unwrap(), 1, 2))
    }

    #[test]
    fn binary_cloud_events_need_no_configuration() {
        let headers = [
            ("ce_id", "e-1"),
            ("ce_type", "order.paid"),
            ("ce_subject", "order-17"),
            ("ce_sequence", "7"),
            ("ce_time", "2026-01-02T03:04:05Z"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ];
        let event = Decoder::default().decode(&received(&headers, "not json")).unwrap();
        assert_eq!(event.id.to_string(), "e-1");
        assert_eq!(event.kind.unwrap().as_str(), "order.paid");
        assert_eq!(event.aggregate.unwrap().as_str(), "order-17");
        assert_eq!(event.seq, Some(7));
        assert_eq!(event.time, Some(Time::parse("2026-01-02T03:04:05Z").unwrap()));
        assert!(event.trace.is_some());
    }

    #[test]
    fn structured_cloud_events_need_no_configuration() {
        let payload = r#"{"specversion":"1.0","id":"e-2","type":"order.paid","subject":"order-17","sequence":"8","time":"2026-01-02T03:04:05Z","data":{"a":1}}"#;
        let headers = [("content-type", "application/cloudevents+json; charset=UTF-8")];
        let event = Decoder::default().decode(&received(&headers, payload)).unwrap();
        assert_eq!((event.id.to_string().as_str(), event.seq), ("e-2", Some(8)));
        assert_eq!(event.kind.unwrap().as_str(), "order.paid");
    }

    /// Events of two sources that both count from 1 do not collide, in either mode, and one event
    /// has the same id in both.
    #[test]
    fn t70_cloud_events_of_two_sources_never_meet() {
        let decode = |decoder: &Decoder, mode: &str, source: Option<&str>, id: &str| {
            let mut headers = vec![("content-type", "application/cloudevents+json")];
            let mut payload = serde_json::json!({ "specversion": "1.0", "id": id });
            if mode == "binary" {
                headers = vec![("ce_id", id)];
                headers.extend(source.map(|source| ("ce_source", source)));
            } else if let Some(source) = source {
                payload["source"] = source.into();
            }
            decoder.decode(&received(&headers, &payload.to_string())).unwrap().id
        };
        let default = Decoder::default();
        let v7 = "0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10";
        for own in ["1", v7] {
            let mut seen = std::collections::BTreeSet::new();
            for source in [Some("/orders"), Some("/invoices"), Some("https://example.com/a b"), None] {
                let id = decode(&default, "binary", source, own);
                assert_eq!(id, decode(&default, "structured", source, own), "{source:?} {own}");
                assert_eq!(id.to_string() == own, source.is_none(), "without a source the id is what it was");
                assert!(seen.insert(id), "{source:?} {own}");
            }
            let weeks: std::collections::BTreeSet<_> =
                seen.iter().map(|id| Week::route(IdentityRule::Id, id, None).unwrap()).collect();
            assert_eq!(weeks.len(), 1, "a v7 stays in its week");
        }
        // A ledger that identifies them by id alone keeps doing so with its existing chain.
        let mut before = Decoder::default();
        let header = |name: &str| IdSource::Header(name.into());
        before.id = IdChain::new([header("idempotency_key"), header("ce_id"), header("eventId")]).unwrap();
        for mode in ["binary", "structured"] {
            assert_eq!(decode(&before, mode, Some("/orders"), "1").to_string(), "1");
        }
    }

    #[test]
    fn e_a_content_type_has_no_case() {
        for (name, value) in [
            ("Content-Type", "application/cloudevents+json"),
            ("CONTENT-TYPE", "Application/CloudEvents+JSON; charset=UTF-8"),
        ] {
            let received =
                received(&[(name, value)], r#"{"specversion":"1.0","id":"e-2","type":"order.paid"}"#);
            let event = Decoder::default().decode(&received).unwrap();
            assert_eq!((&*event.id.as_str(), event.kind.unwrap().as_str()), ("e-2", "order.paid"), "{name}");
        }
    }

    #[test]
    fn e_a_byte_order_mark_is_no_part_of_the_payload() {
        let event = Decoder::default().decode(&received(&[], "\u{feff}{\"event_id\":\"e-3\"}")).unwrap();
        assert_eq!(event.id.as_str(), "e-3");
    }

    #[test]
    fn e_the_key_of_a_record_and_a_tombstone_are_reported() {
        let mut received = received(&[("eventId", "e-4")], "");
        received.record.key = Some("order-17".into());
        let event = Decoder::default().decode(&received).unwrap();
        assert!(!event.tombstone && event.record_key.as_deref() == Some(b"order-17"));
        received.record.payload = None;
        assert!(Decoder::default().decode(&received).unwrap().tombstone);
    }

    #[test]
    fn what_cannot_be_decoded_is_a_sentence() {
        for (headers, payload, expected) in [
            (&[][..], "{}", "no event id"),
            (&[("eventId", "  ")][..], "{}", "blank"),
            (&[("eventId", "e"), ("seq", "-1")][..], "{}", "whole number"),
            (&[("eventId", "e"), ("tenant_id", "")][..], "{}", "empty"),
            (&[][..], "\u{0}\u{1}garbage", "no event id"),
        ] {
            let error = Decoder::default().decode(&received(headers, payload)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn a_time_that_cannot_be_read_does_not_refuse_the_event() {
        let event =
            Decoder::default().decode(&received(&[("eventId", "e"), ("ce_time", "soon")], "")).unwrap();
        assert_eq!(event.time, None);
    }
}
