//! The key that a client sends with a write.

use std::fmt;
use std::sync::{Arc, Mutex};

use uuid::{ContextV7, Timestamp, Uuid};

use crate::clock::{Clock as _, SystemClock, Time};
use crate::error::{Error, Result};

/// The longest key, in characters.
pub const KEY_CHARS_MAX: usize = 255;

/// A client's retry token for one write: 1 to 255 visible ASCII characters.
///
/// A client makes one before its first attempt and sends it again with every retry. Two keys are
/// equal if and only if they are the same bytes.
///
/// ```
/// use hapax::keyed::IdempotencyKey;
/// let key = IdempotencyKey::new("order-17").unwrap();
/// // The quoted form of the Internet draft and the bare form name the same key:
/// assert_eq!(IdempotencyKey::from_header(b"\"order-17\"").unwrap(), key);
/// assert_eq!(IdempotencyKey::from_header(b"order-17").unwrap(), key);
/// assert!(IdempotencyKey::from_header(b"").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IdempotencyKey(Arc<str>);

fn invalid(problem: impl Into<String>) -> Error {
    Error::invalid("Idempotency-Key", problem)
}

impl IdempotencyKey {
    /// Validates a key.
    pub fn new(text: impl AsRef<str>) -> Result<Self> {
        let text = text.as_ref();
        if text.is_empty() {
            return Err(invalid(format!("it is empty; it needs 1 to {KEY_CHARS_MAX} characters")));
        }
        if let Some(at) = text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            return Err(invalid(format!(
                "character {} is not visible ASCII (a space, a control character or a letter beyond ASCII)",
                at + 1
            )));
        }
        if text.len() > KEY_CHARS_MAX {
            return Err(invalid(format!("it has {} characters; the limit is {KEY_CHARS_MAX}", text.len())));
        }
        Ok(IdempotencyKey(text.into()))
    }

    /// Reads the value of an `Idempotency-Key` header: a quoted string of structured fields (RFC
    /// 8941), as the draft asks for, or the bare text that most services take.
    pub fn from_header(value: &[u8]) -> Result<Self> {
        let value = value.trim_ascii();
        let Ok(text) = std::str::from_utf8(value) else {
            return Err(invalid("it has characters beyond ASCII"));
        };
        if let Some(quoted) = text.strip_prefix('"') {
            return IdempotencyKey::new(unquoted(quoted)?);
        }
        // Proxies join repeated headers by commas.
        if text.contains([',', '"']) {
            return Err(invalid(
                "the bare form has no comma and no quotation mark (are these two keys?); quote it: \"…\"",
            ));
        }
        IdempotencyKey::new(text)
    }

    /// A new key, a UUIDv7: 48 bits are the time in milliseconds, 6 are the same in all, and 74 are
    /// drawn at random for each millisecond (the first of them is 0). Within a millisecond, and while
    /// the clock is set back, the first 42 of these count up and the other 32 are random: keys made by
    /// one process are strictly increasing.
    pub fn now_v7() -> Self {
        IdempotencyKey(v7_at(&MADE, SystemClock.now()).to_string().into())
    }

    /// When the key was made, if it is a UUIDv7 in the form with hyphens.
    pub fn time(&self) -> Option<Time> {
        let uuid = Uuid::try_parse(&self.0).ok().filter(|_| self.0.len() == 36)?;
        // Version 7 with another variant is not a UUIDv7.
        let v7 = uuid.get_version_num() == 7 && uuid.get_variant() == uuid::Variant::RFC4122;
        v7.then(|| Time::from_millis((uuid.as_u128() >> 80) as i64))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The value of an `Idempotency-Key` header: the quoted string of the draft.
    ///
    /// ```
    /// use hapax::keyed::IdempotencyKey;
    /// let key = IdempotencyKey::new(r#"a"b"#).unwrap();
    /// assert_eq!(key.to_header(), r#""a\"b""#);
    /// assert_eq!(IdempotencyKey::from_header(key.to_header().as_bytes()).unwrap(), key);
    /// ```
    pub fn to_header(&self) -> String {
        format!("\"{}\"", self.0.replace('\\', "\\\\").replace('"', "\\\""))
    }
}

/// What the keys of this process have counted.
static MADE: Mutex<ContextV7> = Mutex::new(ContextV7::new());

/// A UUIDv7 of a time, or of the latest time that was made, if that is later.
fn v7_at(made: &Mutex<ContextV7>, now: Time) -> Uuid {
    let us = u64::try_from(now.as_micros()).unwrap_or(0);
    let nanos = u32::try_from(us % 1_000_000 * 1000).unwrap_or(0);
    Uuid::new_v7(Timestamp::from_unix(made, us / 1_000_000, nanos))
}

/// The text of a quoted string whose first quotation mark is read already.
fn unquoted(quoted: &str) -> Result<String> {
    let mut text = String::with_capacity(quoted.len());
    let mut chars = quoted.chars();
    loop {
        match chars.next() {
            Some('"') if chars.as_str().is_empty() => return Ok(text),
            Some('"') => {
                return Err(invalid("something follows its closing quotation mark (are these two keys?)"));
            }
            Some('\\') => match chars.next() {
                Some(escaped @ ('"' | '\\')) => text.push(escaped),
                _ => return Err(invalid("a backslash stands only before \" and \\")),
            },
            Some(other) => text.push(other),
            None => return Err(invalid("its closing quotation mark is missing")),
        }
    }
}

impl fmt::Display for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for IdempotencyKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "IdempotencyKey({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(text: &str) -> Result<String> {
        IdempotencyKey::from_header(text.as_bytes()).map(|key| key.as_str().to_owned())
    }

    #[test]
    fn both_forms_name_one_key() {
        for (text, wanted) in [
            ("a", "a"),
            ("\"a\"", "a"),
            (" \"a\" ", "a"),
            (r#""a\"b\\c""#, r#"a"b\c"#),
            (r"a\b", r"a\b"),
            ("\"a,b\"", "a,b"),
            ("!~", "!~"),
        ] {
            assert_eq!(header(text).unwrap(), wanted, "{text}");
        }
        let long = "k".repeat(255);
        assert_eq!(header(&format!("\"{long}\"")).unwrap(), long);
    }

    #[test]
    fn what_is_not_a_key_is_refused_with_a_sentence() {
        let long = "k".repeat(256);
        for (text, says) in [
            ("", "empty"),
            ("\"\"", "empty"),
            ("a b", "character 2"),
            ("\"a b\"", "character 2"),
            ("a\u{7f}", "character 2"),
            ("é", "character 1"),
            ("a,b", "two keys"),
            ("\"a\", \"b\"", "two keys"),
            ("\"a\";x=1", "two keys"),
            ("\"a", "closing"),
            ("\"a\\", "backslash"),
            ("\"a\\n\"", "backslash"),
            ("a\"", "quotation"),
            (&long, "256 characters; the limit is 255"),
        ] {
            let error = header(text).unwrap_err().to_string();
            assert!(
                error.starts_with("Idempotency-Key is invalid: ") && error.contains(says),
                "{text}: {error}"
            );
        }
        assert!(IdempotencyKey::from_header(b"a\xff").is_err());
    }

    #[test]
    fn the_time_is_that_of_a_uuid_v7_only() {
        let time = |text: &str| IdempotencyKey::new(text).unwrap().time();
        let at = Some(Time::from_millis(0x0190_d3a0_5b7e));
        assert_eq!(time("0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c10"), at);
        assert_eq!(time("0190D3A0-5B7E-7C3A-9F51-2F6F1F3B7C10"), at);
        for other in [
            "0190d3a0-5b7e-4c3a-9f51-2f6f1f3b7c10",
            "0190d3a0-5b7e-7c3a-1f51-2f6f1f3b7c10",
            "0190d3a05b7e7c3a9f512f6f1f3b7c10",
            "{0190d3a0-5b7e-7c3a-9f51-2f6f1f3b7c1}",
            "order-17",
        ] {
            assert_eq!(time(other), None, "{other}");
        }
    }

    /// A million keys of several threads: no two are equal, and each thread's are increasing.
    #[test]
    fn t08_a_million_keys_of_many_threads_are_unique_and_increasing() {
        let threads: Vec<_> = (0..8)
            .map(|_| {
                std::thread::spawn(|| {
                    let keys: Vec<IdempotencyKey> = (0..125_000).map(|_| IdempotencyKey::now_v7()).collect();
                    assert!(keys.windows(2).all(|two| two[0] < two[1] && two[0].time() <= two[1].time()));
                    keys.iter()
                        .map(|key| Uuid::parse_str(key.as_str()).unwrap().as_u128())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        let mut all: Vec<u128> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        assert_eq!(all.len(), 1_000_000);
        all.sort_unstable();
        assert!(all.windows(2).all(|two| two[0] < two[1]), "no two are equal");
    }

    #[test]
    fn t08_keys_increase_within_a_millisecond_and_while_the_clock_goes_back() {
        let made = Mutex::new(ContextV7::new());
        let noon = Time::parse("2026-03-04T12:00:00Z").unwrap();
        let mut last = v7_at(&made, noon);
        let hour = std::time::Duration::from_hours(1);
        for now in [noon, noon, noon.minus(hour), noon.minus(hour * 24), noon, noon.plus(hour)] {
            for _ in 0..1000 {
                let next = v7_at(&made, now);
                assert!(next > last, "{next} after {last}");
                last = next;
            }
            let time = IdempotencyKey::new(last.to_string()).unwrap().time().unwrap();
            assert_eq!(time, now.max(noon), "the time does not go back");
        }
    }

    /// 128 bits, less 48 of time, less 4 of version and 2 of variant: 74, not 80.
    #[test]
    fn t08_74_bits_are_not_fixed_by_the_time() {
        let noon = Time::parse("2026-03-04T12:00:00Z").unwrap();
        let (mut ones, mut zeros) = (0_u128, 0_u128);
        for _ in 0..1000 {
            let uuid = v7_at(&Mutex::new(ContextV7::new()), noon).as_u128();
            ones |= uuid;
            zeros |= !uuid;
        }
        let varying = (ones & zeros).count_ones();
        assert_eq!(varying, 73, "74 bits, and the first is kept free for the count");
    }
}
