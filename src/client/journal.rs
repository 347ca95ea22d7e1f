//! Appends to the server's journal, and what the server says about itself.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::Client;
use super::data::parse;
use super::error::{Error, Result};
use super::exchange::{Call, Reply};
use crate::event::Event;
use crate::id::{Aggregate, Kind};
use crate::journal::Expected;

#[derive(Serialize)]
struct AppendBody<'e> {
    aggregate: &'e str,
    expected: Value,
    events: Vec<EventBody<'e>>,
}

#[derive(Serialize)]
struct EventBody<'e> {
    id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    kind: Option<&'e str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    time: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'e RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload_base64: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    headers: Vec<HeaderBody<'e>>,
}

#[derive(Serialize)]
struct HeaderBody<'e> {
    name: &'e str,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<&'e str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    value_base64: Option<String>,
}

impl<'e> EventBody<'e> {
    fn of(event: &'e Event) -> Self {
        // The server stores the bytes of a JSON value, without the white space around it. Anything else is
        // sent as bytes: they are what was given, and what the fingerprint is made of. So is a null, which
        // many a JSON parser on the way takes for no payload.
        let json = serde_json::from_slice::<&RawValue>(&event.payload).ok();
        let json = json.filter(|json| json.get().len() == event.payload.len() && json.get() != "null");
        let is_bytes = json.is_none() && !event.payload.is_empty();
        let header = |(name, value): (&'e str, &'e [u8])| {
            let text = std::str::from_utf8(value).ok();
            HeaderBody { name, value: text, value_base64: text.is_none().then(|| STANDARD.encode(value)) }
        };
        EventBody {
            id: event.id.as_str().into_owned(),
            kind: event.kind.as_ref().map(Kind::as_str),
            time: event.time.map(|time| time.to_string()),
            payload: json,
            payload_base64: is_bytes.then(|| STANDARD.encode(&event.payload)),
            headers: event.headers.iter().map(header).collect(),
        }
    }
}

/// What was appended.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Appended {
    /// The highest seq of the events.
    pub last_seq: u64,
    /// Where each event is, in their order.
    pub events: Vec<PlacedEvent>,
    /// Set if an id was used before for another content, and the server keeps the original
    /// (`journal.mismatch = warn`).
    #[serde(default)]
    pub warning: Option<String>,
}

/// Where an event is stored.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct PlacedEvent {
    /// The event.
    pub id: String,
    /// Its number within the aggregate.
    pub seq: u64,
    /// Its place in the journal's order.
    pub position: String,
    /// What became of it.
    pub placing: Placing,
}

/// What became of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Placing {
    /// It was stored now.
    New,
    /// It was there already.
    Repeat,
    /// Another event is there under its id, and this one was not stored.
    Kept,
}

/// What a server says about itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[non_exhaustive]
pub struct Info {
    /// Its version.
    pub version: String,
    /// How long it keeps the answer to a keyed write, in seconds. A prepared write must be sent within
    /// this time.
    pub key_retention_s: u64,
    /// The largest body of a request.
    #[serde(default)]
    pub body_bytes_max: Option<usize>,
    /// How many events one request may have.
    #[serde(default)]
    pub batch_max: Option<usize>,
}

impl Client {
    /// Appends events to an aggregate: all of them, or none. An event that is there already, because
    /// an answer was lost or because it was sent before, keeps its seq. An event that names another
    /// aggregate or tenant, or a seq, is refused.
    ///
    /// ```no_run
    /// use hapax::{Event, client::Client, journal::Expected};
    /// # async fn run(client: Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let paid = Event::of("order-17-paid")?.payload(r#"{"amount": 7}"#);
    /// let appended = client.append("order-17", Expected::Exact(3), &[paid]).await?;
    /// assert_eq!(appended.last_seq, 4);
    /// # Ok(()) }
    /// ```
    pub async fn append(&self, aggregate: &str, expected: Expected, events: &[Event]) -> Result<Appended> {
        let aggregate = Aggregate::new(aggregate)?;
        if events.is_empty() {
            return Err(Error::invalid("the events", "there are none; append at least one"));
        }
        for event in events {
            self.check(&aggregate, event)?;
        }
        let body = AppendBody {
            aggregate: aggregate.as_str(),
            expected: match expected {
                Expected::Exact(seq) => seq.into(),
                Expected::New => "new".into(),
                Expected::Any => "any".into(),
            },
            events: events.iter().map(EventBody::of).collect(),
        };
        let body = serde_json::to_vec(&body)
            .map_err(|error| Error::invalid("the request", format!("it is not JSON: {error}")))?;
        let call = Call {
            what: format!("appending to {:?}", aggregate.as_str()),
            method: Method::POST,
            url: self.url(&["v1", "journal", "append"], None),
            key: None,
            body: Some(body.into()),
            in_doubt: false,
            wait: Duration::ZERO,
        };
        let read = |reply: &Reply| {
            let appended: Appended = parse(reply)?;
            let asked = events.iter().map(|event| event.id.as_str());
            if !appended.events.iter().map(|placed| placed.id.as_str()).eq(asked) {
                return Err("the answer is about other events".to_owned());
            }
            Ok(appended)
        };
        self.call(&call, read).await
    }

    /// What the request has no field for must not be lost in silence.
    fn check(&self, aggregate: &Aggregate, event: &Event) -> Result<()> {
        let odd = |problem: &str| Error::invalid("the event", format!("{} {problem}", event.id));
        if event.aggregate.as_ref().is_some_and(|named| named != aggregate) {
            return Err(odd("names another aggregate than the append"));
        }
        if event.tenant.is_some() && event.tenant.as_ref() != self.tenant_name() {
            return Err(odd("names another tenant than the client (see Client::tenant)"));
        }
        if event.seq.is_some() {
            return Err(odd("has a seq, which the server gives; say what is there with Expected::Exact"));
        }
        Ok(())
    }

    /// What the server is, and its limits.
    pub async fn info(&self) -> Result<Info> {
        let call = Call::question("asking for the server's info".to_owned(), self.url(&["v1", "info"], None));
        self.call(&call, parse::<Info>).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The server reads back the bytes that were given.
    #[test]
    fn t253_a_payload_is_sent_to_the_byte() {
        for (payload, as_json) in [
            (&b"{\"a\": 1,\n \"b\": 12345678901234567890.12}"[..], true),
            (b"7", true),
            (b"\"null\"", true),
            (b"null", false),
            (b" 7", false),
            (b"{}\n", false),
            (b"{", false),
            (b"\xff", false),
        ] {
            let event = Event::of("e").unwrap().payload(payload);
            let sent = serde_json::to_string(&EventBody::of(&event)).unwrap();
            let text = String::from_utf8_lossy(payload);
            let field = if as_json {
                format!(r#""payload":{text}"#)
            } else {
                format!(r#""payload_base64":"{}""#, STANDARD.encode(payload))
            };
            assert!(sent.contains(&field), "{text:?}: {sent}");
            assert_eq!(sent.matches("payload").count(), 1, "{sent}");
        }
        let none = serde_json::to_string(&EventBody::of(&Event::of("e").unwrap())).unwrap();
        assert!(!none.contains("payload"), "{none}");
    }
}
