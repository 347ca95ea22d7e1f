//! Turns an event of a journal into a record on a bus, in the form that
//! [`Decoder`](crate::consumer::Decoder) reads without configuration.
//!
//! The key is the aggregate, prefixed with the tenant if there is one, so that tenants stay apart
//! even for features that look only at keys (compaction, for example). The event's time travels as
//! a header and not as the record's timestamp: a bus computes retention from that, and would remove
//! an event that waited long before anyone read it.

use bytes::Bytes;

use super::RelaySettings;
use crate::bus::route::aggregate_key;
use crate::bus::{PULSE, Record};
use crate::event::Headers;
use crate::id::{Json, KIND_HEADERS, RECORD_KINDS, Tenant, implied_kind, says_structured};
use crate::journal::Stored;

/// The prefix for an event's own header if the relay sets another value under its name.
pub const ORIGINAL: &str = "original_";

/// Headers that tell readers which event a record is, or that it is none. If the relay does not set
/// them, the event's own are renamed.
const DECISIVE: [&str; 4] = ["idempotency_key", "tenant_id", "ce_tenant", PULSE];

/// Encodes the events of one journal as records.
pub(super) struct RecordEncoder {
    source: Bytes,
    schema: Option<Bytes>,
}

impl RecordEncoder {
    pub(super) fn new(settings: &RelaySettings, journal: &str) -> Self {
        let source = settings.source.clone().unwrap_or_else(|| format!("/hapax/journal/{journal}"));
        RecordEncoder { source: source.into(), schema: settings.schema.clone().map(Into::into) }
    }

    pub(super) fn record(&self, stored: &Stored) -> Record {
        let event = &stored.event;
        let said = self.said(stored);
        let own = event.headers.iter().filter_map(|(name, value)| {
            match said.iter().find(|(said, _)| *said == name) {
                Some((_, same)) if same == value => None, // already set
                Some(_) => Some((format!("{ORIGINAL}{name}"), value)),
                None if self.is_misleading(name, value, stored) => Some((format!("{ORIGINAL}{name}"), value)),
                None => Some((name.to_owned(), value)),
            }
        });
        let own: Vec<_> = own.map(|(name, value)| (name, Bytes::copy_from_slice(value))).collect();
        let said = said.iter().map(|(name, value)| ((*name).to_owned(), value.clone()));
        let mut headers: Headers = said.chain(own).collect();
        if event.kind.is_none()
            && let Some(forged) = forged_kind(&headers, &event.payload)
        {
            let neutral = ("ce_type".to_owned(), Bytes::from(format!("{ORIGINAL}{forged}")));
            let others = headers.iter().map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value)));
            headers = std::iter::once(neutral).chain(others).collect();
        }
        Record { key: Some(key(stored)), payload: Some(event.payload.clone()), headers, timestamp: None }
    }

    /// The headers that the relay sets for an event.
    fn said(&self, stored: &Stored) -> Vec<(&'static str, Bytes)> {
        let event = &stored.event;
        let id = Bytes::from(event.id.as_str().into_owned());
        let aggregate = event.aggregate.as_ref().map(|a| Bytes::from(a.as_str().to_owned()));
        let mut said = Vec::with_capacity(16);
        said.push(("eventId", id.clone()));
        said.push(("ce_id", id));
        // Only an event with a type is a CloudEvent.
        if let Some(kind) = &event.kind {
            said.push(("ce_specversion", Bytes::from_static(b"1.0")));
            said.push(("ce_type", kind.as_str().to_owned().into()));
        }
        said.push(("ce_source", self.source.clone()));
        said.push(("ce_time", event.time.unwrap_or(stored.at).to_string().into()));
        if let Some(aggregate) = aggregate {
            said.push(("ce_subject", aggregate.clone()));
            said.push(("aggregate_id", aggregate));
        }
        said.push(("sequence_number", stored.seq.to_string().into()));
        if let Some(tenant) = &event.tenant {
            said.push(("tenant_id", tenant.as_str().to_owned().into()));
        }
        if let Some(trace) = &event.trace {
            said.push(("traceparent", trace.to_string().into()));
        }
        if let Some(schema) = &self.schema
            && event.headers.get("ce_dataschema").is_none()
        {
            said.push(("ce_dataschema", schema.clone()));
        }
        said
    }

    /// Whether an event's own header would make readers mistake it for another event, for one of another
    /// tenant, or for the event of a record.
    #[allow(clippy::unused_self)] // kept next to `said`, which it complements
    fn is_misleading(&self, name: &str, value: &[u8], stored: &Stored) -> bool {
        let id = stored.event.id.as_str();
        if name == "idempotency_key" {
            return value != id.as_bytes();
        }
        if says_structured(name, value) {
            return !is_its_own_envelope(stored);
        }
        if KIND_HEADERS.contains(&name) {
            return value.starts_with(RECORD_KINDS.as_bytes());
        }
        DECISIVE.contains(&name)
    }
}

/// The kind that readers would find in a record whose event has none, if it is reserved for the events of
/// records. Whoever may append could forge those otherwise.
fn forged_kind(headers: &Headers, payload: &Bytes) -> Option<String> {
    implied_kind(headers, &mut Json::of(payload)).filter(|kind| kind.starts_with(RECORD_KINDS))
}

/// Whether the payload, read as a structured CloudEvent, is this event. Id, kind and tenant are what a
/// reader may take from it: the relay's own headers say aggregate, seq and time, and come first.
fn is_its_own_envelope(stored: &Stored) -> bool {
    let event = &stored.event;
    let mut json = Json::of(&event.payload);
    let id = json.get("/id").and_then(|id| id.as_str()) == Some(&*event.id.as_str());
    let tenant = json.text("/tenant");
    let tenant = tenant.is_none() || tenant.as_deref() == event.tenant.as_ref().map(Tenant::as_str);
    let kind = json.text("/type").is_none_or(|said| match &event.kind {
        Some(kind) => said == kind.as_str(),
        None => !said.starts_with(RECORD_KINDS),
    });
    id && tenant && kind
}

fn key(stored: &Stored) -> Bytes {
    let event = &stored.event;
    let aggregate = event.aggregate.as_ref().map_or("", |aggregate| aggregate.as_str());
    aggregate_key(event.tenant.as_ref(), aggregate).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bus::Received;
    use crate::consumer::Decoder;
    use crate::event::{Origin, TraceContext};
    use crate::journal::Position;
    use crate::{Aggregate, Event, EventId, Kind, RelayName, Time, Topic};

    fn encoder() -> RecordEncoder {
        let settings = RelaySettings::new(RelayName::new("r").unwrap(), Topic::new("orders").unwrap());
        RecordEncoder::new(&settings, "journal-1")
    }

    fn stored(event: Event) -> Stored {
        let aggregate = Aggregate::new("order-17").unwrap();
        let fingerprint = event.fingerprint();
        Stored::new(Position::of(7), Time::from_millis(1_000), fingerprint, event, aggregate, 3)
    }

    fn decoded(record: Record) -> Event {
        let origin = Origin::new(Topic::new("orders").unwrap(), 0, 0);
        Decoder::default().decode(&Received::new(record, origin)).unwrap()
    }

    fn full() -> Event {
        let mut event = Event::new(EventId::new("e-1").unwrap())
            .kind(Kind::new("order.paid").unwrap())
            .tenant(Tenant::new("acme").unwrap())
            .time(Time::parse("2026-01-02T03:04:05.678901Z").unwrap())
            .payload(r#"{"event_id": "another", "seq": 99}"#);
        let trace = TraceContext::parse(b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01");
        event.trace = Some(trace.unwrap());
        event.headers = [("x", "1"), ("x", "2")].into_iter().collect();
        event
    }

    #[test]
    fn the_consumer_reads_what_the_relay_writes() {
        let event = full();
        let record = encoder().record(&stored(event.clone()));
        assert_eq!(record.key.as_deref(), Some(&b"acme/order-17"[..]));
        assert_eq!(record.payload.as_ref(), Some(&event.payload));
        let back = decoded(record.clone());
        assert_eq!(
            (back.id, back.kind, back.tenant, back.time, back.trace, back.seq),
            (event.id, event.kind, event.tenant, event.time, event.trace, Some(3))
        );
        assert_eq!(back.aggregate.unwrap().as_str(), "order-17");
        for (name, value) in [
            ("eventId", "e-1"),
            ("ce_id", "e-1"),
            ("ce_specversion", "1.0"),
            ("ce_type", "order.paid"),
            ("ce_source", "/hapax/journal/journal-1"),
            ("ce_subject", "order-17"),
            ("ce_time", "2026-01-02T03:04:05.678901Z"),
        ] {
            assert_eq!(record.headers.get(name), Some(value.as_bytes()), "{name}");
        }
        let own: Vec<_> = record.headers.iter().filter(|(name, _)| *name == "x").collect();
        assert_eq!(own, [("x", &b"1"[..]), ("x", &b"2"[..])]);
    }

    #[test]
    fn an_event_with_nothing_but_an_id_is_itself_again() {
        let record = encoder().record(&stored(Event::new(EventId::new("e-1").unwrap())));
        assert_eq!(record.key.as_deref(), Some(&b"order-17"[..]));
        let back = decoded(record);
        assert_eq!(
            (back.id.to_string().as_str(), back.seq, back.kind, back.tenant),
            ("e-1", Some(3), None, None)
        );
        assert_eq!(back.time, Some(Time::from_millis(1_000)), "the same each time it is published");
    }

    #[test]
    fn an_own_header_never_says_who_the_event_is() {
        let mut event = Event::new(EventId::new("e-1").unwrap()).payload(r#"{"id": "structured"}"#);
        event.headers = [
            ("ce_id", "other"),
            ("idempotency_key", "other"),
            ("tenant_id", "other"),
            ("ce_tenant", "other"),
            ("aggregate_id", "other"),
            ("hapax_pulse", "other"),
            ("eventId", "e-1"),
            ("content-type", "application/cloudevents+json"),
        ]
        .into_iter()
        .collect();
        let record = encoder().record(&stored(event));
        let back = decoded(record.clone());
        assert_eq!((back.id.to_string().as_str(), back.tenant), ("e-1", None));
        assert_eq!(back.aggregate.unwrap().as_str(), "order-17");
        assert!(crate::bus::Pulse::of(&record).is_none(), "consumers would pass it by");
        for name in ["ce_id", "idempotency_key", "tenant_id", "ce_tenant", "aggregate_id", PULSE] {
            assert_eq!(record.headers.get(&format!("{ORIGINAL}{name}")), Some(&b"other"[..]), "{name}");
        }
        let names: Vec<_> = record.headers.iter().map(|(name, _)| name).collect();
        assert_eq!(names.iter().filter(|name| **name == "eventId").count(), 1, "said once");
        // Names and values of content types are case-insensitive.
        for (name, value) in [
            ("Content-Type", "Application/CloudEvents+JSON"),
            ("CONTENT-TYPE", " application/cloudevents+json"),
        ] {
            let mut event = Event::new(EventId::new("e-1").unwrap()).payload(r#"{"id": "structured"}"#);
            event.headers = [(name, value)].into_iter().collect();
            let record = encoder().record(&stored(event));
            assert!(record.headers.get(name).is_none(), "{name}");
            assert_eq!(record.headers.get(&format!("{ORIGINAL}{name}")), Some(value.as_bytes()), "{name}");
            assert_eq!(decoded(record).id.to_string(), "e-1", "{name}");
        }
    }
}
