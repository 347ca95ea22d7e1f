//! What fuzzing checks: a function for each parser of bytes from outside, which panics if a property does not hold.
//!
//! `fuzz/` calls them with the bytes of libFuzzer (`scripts/fuzz`), and an ordinary test with those of `fuzz/corpus`:
//! what fuzzing once found is kept there.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use bytes::Bytes;
use serde_json::{Value, json};

use crate::access::{ApiToken, TokenId};
use crate::analytics::{Input, Source};
use crate::bus::Received;
use crate::clock::Time;
use crate::config::{Config, Place, Sources};
use crate::consumer::{Decoder, Failed};
use crate::error::Error;
use crate::event::{Event, Headers, Origin, Record, TraceContext};
use crate::id::{EventId, IdChain, IdSource, Topic};
use crate::journal::Position;
use crate::journal::record::StoredRecord;
use crate::keyed::{IdempotencyKey, KEY_CHARS_MAX};
use crate::ledger::{Cursor, CursorParts};
use crate::records::{PAYLOAD_BYTES_MAX, Payload};
use crate::sink::protocol::{Line, Reply};

mod request;

pub use request::request;

/// A check of one parser.
pub type Target = fn(&[u8]);

/// Every target, by the name of its folder in `fuzz/corpus`.
pub const TARGETS: &[(&str, Target)] = &[
    ("key_header", key_header),
    ("envelope", envelope),
    ("config_file", config_file),
    ("id_chain", id_chain),
    ("protocol_line", protocol_line),
    ("journal_record", journal_record),
    ("times_and_traces", times_and_traces),
    ("payload", payload),
    ("api_token", api_token),
    ("cursors", cursors),
    ("debezium", debezium),
    ("request", request),
    #[cfg(feature = "client")]
    ("prepared_write", prepared_write),
];

/// No input of a few kilobytes may take longer, on any machine.
const LONGEST: Duration = Duration::from_secs(20);

/// Runs a target, in bounded time.
pub fn check(target: Target, data: &[u8]) {
    let started = Instant::now();
    target(data);
    let took = started.elapsed();
    assert!(took < LONGEST, "{} bytes took {took:?}", data.len());
}

/// A sentence for a person: not empty, bounded, and nothing in it moves a cursor.
fn is_a_sentence(error: &Error, input: usize) {
    let text = error.chain();
    assert!(text.len() > 10 && text.len() < 2000 + 10 * input, "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// `Idempotency-Key`: the quoted and the bare form name the same key, and a key survives its own header.
pub fn key_header(data: &[u8]) {
    match IdempotencyKey::from_header(data) {
        Ok(key) => {
            let text = key.as_str();
            assert!((1..=KEY_CHARS_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic()));
            assert_eq!(IdempotencyKey::new(text).unwrap(), key);
            assert_eq!(IdempotencyKey::from_header(key.to_header().as_bytes()).unwrap(), key, "quoted");
            let bare = IdempotencyKey::from_header(text.as_bytes());
            match bare {
                Ok(bare) => assert_eq!(bare, key, "bare"),
                Err(_) => assert!(text.contains([',', '"']), "a key without them has a bare form: {text}"),
            }
            let spaced = [b" \t", data, b" "].concat();
            assert_eq!(IdempotencyKey::from_header(&spaced).unwrap(), key, "white space around it");
        }
        Err(error) => is_a_sentence(&error, data.len()),
    }
    // Whatever is a key has a header.
    if let Ok(key) =
        std::str::from_utf8(data).map_err(drop).and_then(|text| IdempotencyKey::new(text).map_err(drop))
    {
        assert_eq!(IdempotencyKey::from_header(key.to_header().as_bytes()).unwrap(), key);
    }
}

/// Lines `name: value` up to an empty one are headers, the rest is the payload.
fn message(data: &[u8]) -> (Headers, Bytes) {
    let mut headers = Vec::new();
    let mut rest = data;
    while let Some(end) = rest.iter().position(|b| *b == b'\n') {
        let line = &rest[..end];
        rest = &rest[end + 1..];
        let Some(colon) = line.windows(2).position(|two| two == b": ") else { break };
        let name = String::from_utf8_lossy(&line[..colon]).into_owned();
        headers.push((name, Bytes::copy_from_slice(&line[colon + 2..])));
    }
    (headers.into_iter().collect(), Bytes::copy_from_slice(rest))
}

fn decoded(headers: &Headers, payload: &Bytes) -> crate::Result<Event> {
    let record = Record { headers: headers.clone(), payload: Some(payload.clone()), ..Record::default() };
    Decoder::default().decode(&Received::new(record, Origin::new(Topic::new("orders").unwrap(), 1, 2)))
}

/// The envelope of an event: CloudEvents in headers and in JSON, and what other producers send.
pub fn envelope(data: &[u8]) {
    let (headers, payload) = message(data);
    let event = match decoded(&headers, &payload) {
        Ok(event) => event,
        Err(error) => return is_a_sentence(&error, data.len()),
    };
    assert_eq!(EventId::new(event.id.as_str()).unwrap(), event.id, "an id is what its text says");
    assert_eq!(event.payload, payload, "the payload is passed on as it is");
    assert!(event.seq.is_none_or(|seq| i64::try_from(seq).is_ok()), "every backend can store a seq");
    // A header that means nothing changes nothing.
    let more: Headers = headers
        .iter()
        .map(|(name, value)| (name.to_owned(), Bytes::copy_from_slice(value)))
        .chain([("x-unrelated".to_owned(), Bytes::from_static(b"x"))])
        .collect();
    let mut again = decoded(&more, &payload).unwrap();
    again.headers = headers;
    assert_eq!(again, event);
    // White space around JSON does not change the content.
    if serde_json::from_slice::<Value>(&payload).is_ok() {
        let mut spaced = event.clone();
        spaced.payload = [b" ", &payload[..], b"\n"].concat().into();
        assert_eq!(spaced.fingerprint(), event.fingerprint());
    }
    both_modes(&event);
}

/// A CloudEvent has one id, whether its attributes are headers or JSON.
fn both_modes(event: &Event) {
    let text = |name: &str| event.headers.get(name).and_then(|value| std::str::from_utf8(value).ok());
    let Some(id) = text("ce_id") else { return };
    let mut attributes = json!({ "specversion": "1.0", "id": id });
    let mut headers = vec![("ce_id".to_owned(), Bytes::copy_from_slice(id.as_bytes()))];
    if let Some(source) = text("ce_source") {
        attributes["source"] = source.into();
        headers.push(("ce_source".to_owned(), Bytes::copy_from_slice(source.as_bytes())));
    }
    let structured: Headers = [("content-type", "application/cloudevents+json")].into_iter().collect();
    let structured = decoded(&structured, &attributes.to_string().into()).map(|event| event.id);
    let binary = decoded(&headers.into_iter().collect(), &Bytes::new()).map(|event| event.id);
    assert_eq!(structured.ok(), binary.ok());
}

/// `hapax.toml`: what was accepted is accepted again in normal form, with the same values.
pub fn config_file(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let load = |text: &str| Config::load(&Sources::new().toml("hapax.toml", text));
    let config = match load(text) {
        Ok(config) => config,
        Err(error) => {
            is_a_sentence(&error, data.len());
            assert_eq!(error.code(), "config");
            return;
        }
    };
    let mut normal = String::new();
    for value in config.values().iter().filter(|value| matches!(value.place, Place::File(..))) {
        let literal = toml::Value::String(value.text().to_owned());
        let _ = writeln!(normal, "{} = {literal}", value.setting.key); // a String takes all
    }
    let again = load(&normal).unwrap_or_else(|error| panic!("{error}\n{normal}"));
    for (value, again) in config.values().iter().zip(again.values()) {
        assert_eq!(value.text(), again.text(), "{}", value.setting.key);
    }
}

/// The first line is a JSON pointer, the rest a payload: the id is what RFC 6901 and the table of kinds say.
pub fn id_chain(data: &[u8]) {
    let end = data.iter().position(|b| *b == b'\n').unwrap_or(data.len());
    let Ok(pointer) = std::str::from_utf8(&data[..end]) else { return };
    let payload = Bytes::copy_from_slice(data.get(end + 1..).unwrap_or_default());
    let chain = match IdChain::new([IdSource::Pointer(pointer.to_owned())]) {
        Ok(chain) => chain,
        Err(error) => {
            assert!(!pointer.is_empty() && !pointer.starts_with('/'), "{pointer:?} is a pointer");
            return is_a_sentence(&error, data.len());
        }
    };
    let found = chain.find(&Headers::default(), &payload, None);
    let json: Option<Value> = serde_json::from_slice(crate::id::unmarked(&payload)).ok();
    let expected = match json.as_ref().and_then(|json| json.pointer(pointer)) {
        Some(Value::String(text)) => EventId::new(text).ok(),
        Some(Value::Number(number)) if number.is_i64() || number.is_u64() => {
            EventId::new(number.to_string()).ok()
        }
        _ => None,
    };
    if let Err(error) = &found {
        is_a_sentence(error, data.len());
    }
    assert_eq!(found.ok(), expected);
    // With a last resort there is always an id, the same each time, unless an earlier one is bad.
    let chain = IdChain::new([IdSource::Pointer("/none".to_owned()), IdSource::ContentHash]).unwrap();
    if json.as_ref().is_none_or(|json| json.pointer("/none").is_none()) {
        let hash = |payload| chain.find(&Headers::default(), payload, None).unwrap();
        assert_eq!(hash(&payload), hash(&payload));
        let other: Bytes = [&payload[..], b"!"].concat().into();
        assert!(serde_json::from_slice::<Value>(&other).is_ok() || hash(&other) != hash(&payload));
    }
}

/// Id, token, and of a failure its reason, whether it is fatal, and when to try again.
type Plain = (String, i64, Option<(String, bool, Option<Duration>)>);

/// A reply in words that do not depend on how it was written.
fn plain(reply: &Reply) -> Plain {
    let failed = |failed: &Failed| (failed.to_string(), failed.is_fatal(), failed.after());
    (reply.id.clone(), reply.token, reply.handled.as_ref().err().map(failed))
}

/// A line of a handler's process: what was understood means the same when it is written plainly.
pub fn protocol_line(data: &[u8]) {
    let reply = match Line::parse(data) {
        Ok(Line::Concurrency(number)) => {
            let line = json!({ "v": 1, "concurrency": number }).to_string();
            assert!(matches!(Line::parse(line.as_bytes()), Ok(Line::Concurrency(same)) if same == number));
            return assert!((1..=100_000).contains(&number));
        }
        Ok(Line::Reply(reply)) => reply,
        Err(problem) => {
            return assert!(!problem.is_empty() && problem.len() < 2000 + 2 * data.len(), "{problem}");
        }
    };
    assert_eq!(plain(&Reply::parse(data).unwrap()), plain(&reply), "a reply is a line");
    let outcome = match &reply.handled {
        Ok(()) => json!({ "done": true }),
        Err(failed) => {
            let error = failed.to_string();
            assert!(!error.contains('\0') && error.chars().count() < 5000, "{error:?}");
            match failed.after() {
                _ if failed.is_fatal() => json!({ "fatal": true, "error": error }),
                Some(after) => json!({ "retry": true, "after_ms": after.as_millis() as u64, "error": error }),
                None => json!({ "retry": true, "error": error }),
            }
        }
    };
    let mut line = json!({ "id": reply.id, "token": reply.token });
    line.as_object_mut().unwrap().extend(outcome.as_object().unwrap().clone());
    let again = Reply::parse(line.to_string().as_bytes()).unwrap();
    let (mut first, mut second) = (plain(&reply), plain(&again));
    // What was cut to its limit is cut again.
    for (text, _, _) in [&mut first.2, &mut second.2].into_iter().flatten() {
        *text = text.chars().take(4000).collect();
    }
    assert_eq!(first, second);
}

/// A line of an archive, and an object of a journal: every byte comes back.
pub fn journal_record(data: &[u8]) {
    let Ok(record) = serde_json::from_slice::<StoredRecord>(data) else { return };
    let stored = match record.stored() {
        Ok(stored) => stored,
        Err(error) => {
            is_a_sentence(&error, data.len());
            return assert_eq!(error.code(), "corrupt");
        }
    };
    let line = serde_json::to_string(&StoredRecord::new(&stored)).unwrap();
    assert!(!line.contains('\n'), "a record is a line");
    let again: StoredRecord = serde_json::from_str(&line).unwrap();
    assert_eq!(again.stored().unwrap(), stored);
}

/// Times and `traceparent`: what was read is written and read again as the same.
pub fn times_and_traces(data: &[u8]) {
    match TraceContext::parse(data) {
        Ok(trace) => assert_eq!(TraceContext::parse(trace.to_string().as_bytes()).unwrap(), trace),
        Err(error) => is_a_sentence(&error, data.len()),
    }
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Time::parse(text) {
        Ok(time) => {
            assert_eq!(Time::parse(&time.to_string()).unwrap(), time);
            assert_eq!(Time::from_micros(time.as_micros()), time);
        }
        Err(error) => is_a_sentence(&error, data.len()),
    }
    #[cfg(any(feature = "http", feature = "client"))]
    if let Some(after) = crate::clock::retry_after(text, None) {
        assert!(after <= Duration::from_secs(u64::MAX));
    }
}

/// A number in plain digits, as PostgreSQL writes a `numeric`: its sign unless it is zero, no exponent.
fn plain_digits(number: &str) -> String {
    let (number, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (sign, number) = number.strip_prefix('-').map_or(("", number), |number| ("-", number));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let exponent: i64 = exponent.parse().unwrap();
    let mut digits = format!("{whole}{fraction}");
    let mut point = whole.len() as i64 + exponent;
    if point <= 0 {
        digits = format!("{}{digits}", "0".repeat((1 - point) as usize));
        point = 1;
    }
    let point = point as usize;
    digits.push_str(&"0".repeat(point.saturating_sub(digits.len())));
    let (whole, fraction) = digits.split_at(point);
    let whole = Some(whole.trim_start_matches('0')).filter(|whole| !whole.is_empty()).unwrap_or("0");
    let sign = if digits.bytes().all(|digit| digit == b'0') { "" } else { sign };
    if fraction.is_empty() { format!("{sign}{whole}") } else { format!("{sign}{whole}.{fraction}") }
}

/// A JSON text as PostgreSQL prints what it stored of it: a space after each comma and colon, and numbers in plain digits.
fn printed(json: &str) -> String {
    let (mut text, mut number, mut in_string, mut escaped) = (String::new(), String::new(), false, false);
    for c in json.chars() {
        if in_string {
            in_string = c != '"' || escaped;
            escaped = c == '\\' && !escaped;
            text.push(c);
            continue;
        }
        if matches!(c, '0'..='9' | '-' | '+' | '.') || (matches!(c, 'e' | 'E') && !number.is_empty()) {
            number.push(c);
            continue;
        }
        if !number.is_empty() {
            text.push_str(&plain_digits(&std::mem::take(&mut number)));
        }
        text.push(c);
        in_string = c == '"';
        if matches!(c, ',' | ':') {
            text.push(' ');
        }
    }
    text
}

/// The content of a record: what is accepted can be stored, read and written again as the same value, and stays within
/// its limit however a database writes its numbers.
pub fn payload(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let payload = match Payload::new(text) {
        Ok(payload) => payload,
        Err(error) => return is_a_sentence(&error, data.len()),
    };
    let value = |json: &str| serde_json::from_str::<Value>(json).unwrap();
    assert_eq!(value(payload.as_str()), value(text));
    assert_eq!(Payload::new(payload.as_str()).unwrap(), payload);
    assert_eq!(Payload::stored(payload.as_str()).unwrap(), payload);
    let returned = printed(payload.as_str());
    let read = Payload::stored(&returned).unwrap_or_else(|error| panic!("{error}: {returned}"));
    // Digit for digit: a double would hide a difference.
    assert_eq!(printed(read.as_str()), returned);
    assert!(read.as_str().len() <= PAYLOAD_BYTES_MAX);
}

/// An API token, and the id in it: one text for each, and no error repeats what was sent.
pub fn api_token(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match ApiToken::parse(text) {
        Ok(token) => {
            assert_eq!(token.expose(), text);
            assert_eq!(TokenId::new(token.id().as_str()).unwrap(), *token.id());
            assert!(!format!("{token:?}").contains(&text[text.len() - 38..]), "{token:?}");
        }
        Err(error) => {
            is_a_sentence(&error, 0);
            assert!(text.len() < 16 || !error.to_string().contains(text), "{error}");
        }
    }
    if let Ok(id) = TokenId::new(text) {
        assert_eq!(id.to_string(), text);
    }
}

/// Where a list goes on, in the journal and in the ledger: what was read is written and read again as the same.
pub fn cursors(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match text.parse::<Position>() {
        Ok(position) => assert_eq!(position.to_string().parse::<Position>().unwrap(), position),
        Err(error) => is_a_sentence(&error, data.len()),
    }
    match text.parse::<Cursor>() {
        Ok(cursor) => {
            assert_eq!(cursor.to_string(), text);
            let parts = CursorParts::decode(text).unwrap();
            assert_eq!(CursorParts::decode(&parts.encode().to_string()).unwrap(), parts);
        }
        Err(error) => is_a_sentence(&error, data.len()),
    }
}

/// A message of Debezium: with a schema around it it says the same, and what cannot be read is kept with a reason.
pub fn debezium(data: &[u8]) {
    let read = |bytes: Vec<u8>| {
        let record = Record { payload: Some(bytes.into()), ..Record::default() };
        Source::Debezium.read(&Received::new(record, Origin::new(Topic::new("cdc").unwrap(), 1, 2)), 3)
    };
    let plain = read(data.to_vec());
    match &plain {
        Ok(Input::Change(change)) => {
            assert!(change.version.generation() == 3 && change.version.seq() > 0);
            assert!(change.payload.as_ref().is_none_or(|payload| payload.as_str().starts_with('{')));
        }
        Ok(Input::Pulse(pulse) | Input::NextPulse { pulse, .. } | Input::SnapshotPulse(pulse)) => {
            assert!(pulse.partitions > 0);
        }
        Ok(_) => {}
        Err(rejected) => {
            let length = rejected.reason.len();
            assert!(length > 10 && length < 2000 + 10 * data.len(), "{}", rejected.reason);
            assert_eq!(rejected.payload, data, "it is kept as it is");
        }
    }
    if serde_json::from_slice::<Value>(data).is_ok_and(|value| value["op"].is_string()) {
        let wrapped = [b"{\"schema\":{},\"payload\":", data, b"}"].concat();
        assert_eq!(read(wrapped).ok(), plain.ok());
    }
}

/// A stored write, and a server's problem: what is read is bounded, and the write comes back to the byte.
#[cfg(feature = "client")]
pub fn prepared_write(data: &[u8]) {
    crate::client::fuzz_problem(data);
    let write: crate::client::PreparedWrite = match serde_json::from_slice(data) {
        Ok(write) => write,
        Err(error) => return assert!(!error.to_string().is_empty()),
    };
    let stored = serde_json::to_string(&write).unwrap();
    let again: crate::client::PreparedWrite = serde_json::from_str(&stored).unwrap();
    assert_eq!(again, write);
    assert_eq!(serde_json::to_string(&again).unwrap(), stored);
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::PathBuf;

    use super::*;
    use crate::testing::model::rng::{Rng, seed};

    fn fuzz() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz")
    }

    fn names(of: &str) -> BTreeSet<String> {
        let entries = std::fs::read_dir(fuzz().join(of)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    fn corpus(target: &str) -> Vec<Vec<u8>> {
        let dir = fuzz().join("corpus").join(target);
        names(&format!("corpus/{target}")).iter().map(|file| std::fs::read(dir.join(file)).unwrap()).collect()
    }

    #[test]
    fn every_target_is_fuzzed_and_has_a_corpus() {
        let targets: BTreeSet<_> = TARGETS.iter().map(|(name, _)| (*name).to_owned()).collect();
        assert_eq!(names("corpus"), targets);
        assert_eq!(names("fuzz_targets"), targets.iter().map(|name| format!("{name}.rs")).collect());
        let manifest = std::fs::read_to_string(fuzz().join("Cargo.toml")).unwrap();
        for name in &targets {
            assert!(manifest.contains(&format!("name = \"{name}\"")), "fuzz/Cargo.toml does not name {name}");
            let program = std::fs::read_to_string(fuzz().join(format!("fuzz_targets/{name}.rs"))).unwrap();
            assert!(program.contains(&format!("fuzz::{name}(")), "{name} fuzzes something else");
            assert!(corpus(name).len() >= 3, "{name} needs seeds");
        }
    }

    /// The corpora hold, and so does what is near them: each seed cut short at each byte, and with each byte changed.
    #[test]
    fn the_corpora_are_replayed() {
        for (_, target) in TARGETS {
            for seed in corpus(target_name(*target)) {
                check(*target, &seed);
                for at in 0..seed.len().min(600) {
                    check(*target, &seed[..at]);
                    for other in [seed[at] ^ 1, b'"', 0, 0xff] {
                        let mut changed = seed.clone();
                        changed[at] = other;
                        check(*target, &changed);
                    }
                }
            }
        }
    }

    /// A second for each target of what is further from the corpora. `HAPAX_SEED` repeats the inputs, `HAPAX_FUZZ_MS`
    /// sets how long; `scripts/fuzz` is guided by what the code does with them, and takes minutes.
    #[test]
    fn what_is_made_of_the_corpora_holds_too() {
        let mut rng = Rng::new(seed());
        let time = std::env::var("HAPAX_FUZZ_MS").map_or(1000, |text| text.parse().unwrap());
        for (name, target) in TARGETS {
            let (seeds, started, mut count) = (corpus(name), Instant::now(), 0_u64);
            while count < 100 || started.elapsed() < Duration::from_millis(time) {
                let input = made(&mut rng, &seeds);
                let held = std::panic::catch_unwind(|| check(*target, &input));
                assert!(held.is_ok(), "{name}: keep this in fuzz/corpus: {}", input.escape_ascii());
                count += 1;
            }
            println!("{name}: {count} inputs");
        }
    }

    /// What parsers stumble over.
    const PIECES: [&[u8]; 16] = [
        b"\"",
        b"\\",
        b"\\u0000",
        b"{",
        b"}",
        b"[",
        b",",
        b": ",
        b"\n",
        b"/",
        b"~1",
        b"-1",
        b"18446744073709551616",
        b"null",
        b"\xef\xbb\xbf",
        b"\xc3",
    ];

    /// One seed, changed at up to eight places.
    fn made(rng: &mut Rng, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut input = rng.pick(seeds);
        for _ in 0..=rng.below(8) {
            let at = rng.below(input.len() as u64 + 1) as usize;
            let end = at + rng.below((input.len() - at) as u64 + 1) as usize;
            match rng.below(6) {
                0 if at < input.len() => input[at] = rng.below(256) as u8,
                1 => drop(input.drain(at..end)),
                2 => {
                    let again = input[at..end].to_vec();
                    input.splice(at..at, again);
                }
                3 => {
                    let other = rng.pick(seeds);
                    let from = rng.below(other.len() as u64 + 1) as usize;
                    input.splice(at.., other[from..].iter().copied());
                }
                4 => input.truncate(at),
                _ => drop(input.splice(at..at, rng.pick(&PIECES).iter().copied())),
            }
            input.truncate(4096);
        }
        input
    }

    fn target_name(target: Target) -> &'static str {
        let is = |other: &&(&'static str, Target)| std::ptr::fn_addr_eq(other.1, target);
        TARGETS.iter().find(is).map_or("", |(name, _)| name)
    }

    /// What is small to send and could be large to read.
    #[test]
    fn hostile_shapes_take_no_longer() {
        let shapes: [Vec<u8>; 6] = [
            b"[".repeat(200_000),
            br#"{"a":"#.repeat(50_000),
            b"\\\"".repeat(100_000),
            [b"{\"a\":\"", &b"\\u0000".repeat(30_000)[..], b"\"}"].concat(),
            b"a.".repeat(50_000),
            [b"/".repeat(100_000), b"\n{}".to_vec()].concat(),
        ];
        for (_, target) in TARGETS {
            for shape in &shapes {
                check(*target, shape);
            }
        }
    }
}
