//! The protocol for handlers in any language, version 1: one JSON object per request, one per
//! reply. `docs/handlers.md` describes it for authors of handlers.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Map, Value, json};

use super::{Effect, key};
use crate::consumer::{Failed, Handled};
use crate::event::{Event, Headers};
use crate::id::{Aggregate, Kind, Tenant, unmarked};

/// The version of the protocol.
pub const VERSION: u64 = 1;
/// The longest pause a reply may ask for.
const AFTER_MAX: Duration = Duration::from_hours(30 * 24);
/// The most requests a child may take at once.
const CONCURRENCY_MAX: usize = 100_000;
/// How many characters of a handler's error to keep.
const ERROR_CHARS_MAX: usize = 4000;

/// The request for one attempt. `number` replaces the token where there is none (at most once): it
/// tells replies apart and fences nothing.
///
/// ```
/// use hapax::{Event, EventId, Scope, sink::{Effect, protocol}};
/// let event = Event::new(EventId::new("e-1").unwrap()).payload(r#"{"amount": 7}"#);
/// let effect = Effect::at_most_once(Scope::new("mailer").unwrap(), event, std::time::Duration::from_secs(30));
/// let request = protocol::request(&effect, 1);
/// assert_eq!((&request["v"], &request["id"], &request["event"]["payload"]["amount"]), (&1.into(), &"e-1".into(), &7.into()));
/// ```
pub fn request(effect: &Effect, number: i64) -> Value {
    let event = &effect.event;
    json!({
        "v": VERSION,
        "tenant": event.tenant.as_ref().map(Tenant::as_str),
        "scope": effect.scope.as_str(),
        "id": event.id.as_str(),
        "key": effect.lease.as_ref().map(|(identity, _)| key(identity)),
        "token": token(effect, number),
        "attempt": effect.attempt,
        "deadline": effect.deadline.to_string(),
        "timeout_ms": u64::try_from(effect.timeout.as_millis()).unwrap_or(u64::MAX),
        "event": event_json(event),
    })
}

/// The number that a reply must carry.
pub fn token(effect: &Effect, number: i64) -> i64 {
    effect.lease.as_ref().map_or(number, |(_, token)| token.0)
}

/// Tells a handler that its reply is no longer expected.
pub fn cancel(id: &str, token: i64) -> Value {
    json!({"v": VERSION, "cancel": {"id": id, "token": token}})
}

fn event_json(event: &Event) -> Value {
    let origin = event.origin.as_ref();
    let mut fields = Map::new();
    let mut put = |name: &str, value: Value| fields.insert(name.to_owned(), value);
    put("kind", json!(event.kind.as_ref().map(Kind::as_str)));
    put("time", json!(event.time.map(|time| time.to_string())));
    put("aggregate", json!(event.aggregate.as_ref().map(Aggregate::as_str)));
    put("seq", json!(event.seq));
    put("tombstone", json!(event.tombstone));
    match serde_json::from_slice::<Value>(unmarked(&event.payload)) {
        _ if event.tombstone => put("payload", Value::Null),
        // Common JSON readers would round numbers they cannot represent, so send such payloads as
        // bytes.
        Ok(value) if is_exact(&value) => put("payload", value),
        _ => {
            put("payload", json!(STANDARD.encode(&event.payload)));
            put("payload_encoding", json!("base64"))
        }
    };
    put("record_key", event.record_key.as_ref().map_or(Value::Null, |key| text_or_base64(key)));
    put("headers", headers_json(&event.headers));
    put("topic", json!(origin.map(|origin| origin.topic.as_str())));
    put("partition", json!(origin.map(|origin| origin.partition)));
    put("offset", json!(origin.map(|origin| origin.offset)));
    Value::Object(fields)
}

/// Whether a value survives being read and written: no number was rounded to a float that looks
/// like a whole number.
fn is_exact(value: &Value) -> bool {
    match value {
        Value::Number(number) => {
            number.is_i64()
                || number.is_u64()
                || number.as_f64().is_some_and(|n| n.abs() < 2f64.powi(53) || n.fract() != 0.0)
        }
        Value::Array(items) => items.iter().all(is_exact),
        Value::Object(fields) => fields.values().all(is_exact),
        _ => true,
    }
}

/// Headers by name: a string, or `{"base64": …}` if the value is not UTF-8. If a name occurs twice,
/// the first one counts.
fn headers_json(headers: &Headers) -> Value {
    let mut fields = Map::new();
    for (name, value) in headers.iter() {
        fields.entry(name.to_owned()).or_insert_with(|| text_or_base64(value));
    }
    Value::Object(fields)
}

fn text_or_base64(bytes: &[u8]) -> Value {
    std::str::from_utf8(bytes).map_or_else(|_| json!({"base64": STANDARD.encode(bytes)}), |text| json!(text))
}

/// A line from a child.
#[derive(Debug)]
#[non_exhaustive]
pub enum Line {
    /// The outcome of a request.
    Reply(Reply),
    /// How many requests it takes at once: `{"v": 1, "concurrency": 16}`. A child that sends no
    /// greeting takes one.
    Concurrency(usize),
}

impl Line {
    /// Parses a line. The error says in a sentence why it is neither a reply nor a greeting.
    ///
    /// ```
    /// use hapax::sink::protocol::Line;
    /// assert!(matches!(Line::parse(br#"{"v": 1, "concurrency": 16}"#), Ok(Line::Concurrency(16))));
    /// assert!(matches!(Line::parse(br#"{"id": "e-1", "token": 7, "done": true}"#), Ok(Line::Reply(_))));
    /// assert!(Line::parse(br#"{"v": 1, "concurrency": 0}"#).is_err());
    /// ```
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        let fields = object(line)?;
        match fields.get("concurrency") {
            Some(at_once) if !fields.contains_key("id") => {
                if fields.get("v") != Some(&json!(VERSION)) {
                    return Err(format!("a greeting needs \"v\": {VERSION}"));
                }
                let number = at_once.as_u64().and_then(|number| usize::try_from(number).ok());
                let number = number.filter(|number| (1..=CONCURRENCY_MAX).contains(number));
                number.map(Line::Concurrency).ok_or_else(|| {
                    format!(
                        "its concurrency is {at_once}; it takes a whole number from 1 to {CONCURRENCY_MAX}"
                    )
                })
            }
            _ => Reply::of(&fields).map(Line::Reply),
        }
    }
}

fn object(line: &[u8]) -> Result<Map<String, Value>, String> {
    match serde_json::from_slice(line) {
        Ok(Value::Object(fields)) => Ok(fields),
        Ok(_) => Err("it is not a JSON object".to_owned()),
        Err(error) => Err(format!("it is not JSON ({error})")),
    }
}

/// A handler's reply.
#[derive(Debug)]
pub struct Reply {
    /// The id of the event.
    pub id: String,
    /// The token of the request.
    pub token: i64,
    /// The outcome.
    pub handled: Handled,
}

impl Reply {
    /// Parses a reply. The error says in a sentence why it is not one. A reply that names its
    /// request but is otherwise invalid is a failed attempt, because waiting longer would not help.
    ///
    /// ```
    /// use hapax::sink::protocol::Reply;
    /// assert!(Reply::parse(br#"{"id": "e-1", "token": 7, "done": true}"#).unwrap().handled.is_ok());
    /// assert!(Reply::parse(br#"{"id": "e-1", "token": 7, "fatal": true, "error": "no such order"}"#).unwrap().handled.is_err());
    /// assert!(Reply::parse(b"hello").is_err());
    /// ```
    pub fn parse(line: &[u8]) -> Result<Self, String> {
        Self::of(&object(line)?)
    }

    fn of(fields: &Map<String, Value>) -> Result<Self, String> {
        let id = match fields.get("id") {
            Some(Value::String(id)) => id.clone(),
            _ => return Err("it has no id (a text)".to_owned()),
        };
        let token = fields.get("token").and_then(Value::as_i64).ok_or("it has no token (a whole number)")?;
        Ok(Reply { id, token, handled: outcome(fields) })
    }
}

#[cfg(feature = "http")]
/// Whether an object has any field of an outcome.
pub(crate) fn has_outcome(fields: &Map<String, Value>) -> bool {
    ["done", "retry", "fatal"].iter().any(|name| fields.contains_key(*name))
}

/// The outcome in a reply.
pub(crate) fn outcome(fields: &Map<String, Value>) -> Handled {
    let said = |name: &str| match fields.get(name) {
        None | Some(Value::Null | Value::Bool(false)) => Ok(false),
        Some(Value::Bool(true)) => Ok(true),
        Some(other) => Err(Failed::retryable(format!("the reply's {name} is {other}; it takes true"))),
    };
    let error = match fields.get("error") {
        Some(Value::String(text)) => clean(text),
        Some(Value::Null) | None => "the handler gave no reason".to_owned(),
        Some(other) => clean(&other.to_string()),
    };
    match (said("done")?, said("retry")?, said("fatal")?) {
        (true, false, false) => Ok(()),
        (false, true, false) => match fields.get("after_ms") {
            None | Some(Value::Null) => Err(Failed::retryable(error)),
            Some(after) => {
                match after.as_u64().map(Duration::from_millis).filter(|after| *after <= AFTER_MAX) {
                    Some(after) => Err(Failed::retry_after(error, after)),
                    None => Err(Failed::retryable(format!(
                        "{error} (the reply's after_ms is {after}; it takes 0 to {} ms)",
                        AFTER_MAX.as_millis()
                    ))),
                }
            }
        },
        (false, false, true) => Err(Failed::fatal(error)),
        _ => Err(Failed::retryable("the reply says not exactly one of done, retry and fatal")),
    }
}

/// Cleans external text for a reason: limits its length and removes NUL, which ledgers cannot store.
pub(crate) fn clean(text: &str) -> String {
    text.chars().filter(|c| *c != '\0').take(ERROR_CHARS_MAX).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{EventId, Origin, Scope, Topic};

    fn effect(payload: &[u8]) -> Effect {
        let headers: Headers = [("a", &b"x"[..]), ("b", b"\xff"), ("a", b"y")]
            .map(|(n, v)| (n.to_owned(), v.to_vec()))
            .into_iter()
            .collect();
        let mut event = Event::new(EventId::new("e").unwrap()).payload(payload.to_vec()).origin(Origin::new(
            Topic::new("t").unwrap(),
            2,
            42,
        ));
        event.headers = headers;
        Effect::at_most_once(Scope::new("s").unwrap(), event, Duration::from_secs(3))
    }

    #[test]
    fn payloads_are_json_or_marked_bytes() {
        let of = |payload: &[u8]| request(&effect(payload), 1)["event"].clone();
        assert_eq!(of(br#"{"a":1}"#)["payload"], json!({"a": 1}));
        assert!(of(br#"{"a":1}"#).get("payload_encoding").is_none());
        for bytes in [&b"\xff\x00"[..], b"", b"not json", br#"{"n":123456789012345678901234567890}"#] {
            let event = of(bytes);
            assert_eq!(event["payload_encoding"], "base64");
            assert_eq!(STANDARD.decode(event["payload"].as_str().unwrap()).unwrap(), bytes);
        }
        let event = of(b"1");
        assert_eq!(event["headers"], json!({"a": "x", "b": {"base64": "/w=="}}));
        assert_eq!(
            (&event["topic"], &event["partition"], &event["offset"]),
            (&json!("t"), &json!(2), &json!(42))
        );
    }

    #[test]
    fn e_keys_and_tombstones_are_reported() {
        let of = |payload: &[u8], tombstone: bool, key: Option<&'static [u8]>| {
            let mut effect = effect(payload);
            effect.event.tombstone = tombstone;
            effect.event.record_key = key.map(Into::into);
            request(&effect, 1)["event"].clone()
        };
        let (empty, deleted) = (of(b"", false, Some(b"order-17")), of(b"", true, Some(b"order-17")));
        assert_eq!((&empty["tombstone"], &empty["payload"]), (&json!(false), &json!("")));
        assert_eq!((&deleted["tombstone"], &deleted["payload"]), (&json!(true), &Value::Null));
        assert!(deleted.get("payload_encoding").is_none());
        assert_eq!(deleted["record_key"], "order-17");
        assert_eq!(of(b"1", false, Some(b"\xff"))["record_key"], json!({"base64": "/w=="}));
        assert_eq!(of(b"1", false, None)["record_key"], Value::Null);
        assert_eq!(of(b"\xef\xbb\xbf{\"a\":1}", false, None)["payload"], json!({"a": 1}));
    }

    #[test]
    fn greetings() {
        assert!(matches!(Line::parse(br#"{"v":1,"concurrency":3}"#), Ok(Line::Concurrency(3))));
        for bad in [
            r#"{"concurrency":3}"#,
            r#"{"v":2,"concurrency":3}"#,
            r#"{"v":1,"concurrency":"3"}"#,
            r#"{"v":1,"concurrency":100001}"#,
        ] {
            assert!(Line::parse(bad.as_bytes()).is_err(), "{bad}");
        }
    }

    #[test]
    fn replies() {
        let of = |text: &str| Reply::parse(text.as_bytes());
        for bad in ["", "[]", "{}", r#"{"id":1,"token":1}"#, r#"{"id":"e","token":"1"}"#] {
            assert!(of(bad).is_err(), "{bad}");
        }
        let failed =
            |text: &str| of(&format!(r#"{{"id":"e","token":7,{text}}}"#)).unwrap().handled.unwrap_err();
        let retry = failed(r#""retry":true,"after_ms":5000,"error":"busy""#);
        assert_eq!(
            (retry.is_fatal(), retry.after(), retry.to_string().as_str()),
            (false, Some(Duration::from_secs(5)), "busy")
        );
        assert!(failed(r#""fatal":true"#).is_fatal());
        for odd in
            [r#""done":true,"fatal":true"#, r#""done":"yes""#, r#""x":1"#, r#""retry":true,"after_ms":-1"#]
        {
            let failed = failed(odd);
            assert!(!failed.is_fatal() && !failed.to_string().is_empty(), "{odd}");
        }
    }
}
