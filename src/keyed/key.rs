//! The key that a client sends with a write.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::clock::Time;
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

    /// A new key, a UUIDv7: 48 bits of time and 74 random bits. Keys made by one process are strictly
    /// increasing, within a millisecond too.
    pub fn now_v7() -> Self {
        IdempotencyKey(Uuid::now_v7().to_string().into())
    }

    /// When the key was made, if it is a UUIDv7 in the form with hyphens.
    pub fn time(&self) -> Option<Time> {
        let uuid = Uuid::try_parse(&self.0).ok().filter(|_| self.0.len() == 36)?;
        // Version 7 with another variant is no UUIDv7.
        let v7 = uuid.get_version_num() == 7 && uuid.get_variant() == uuid::Variant::RFC4122;
        v7.then(|| Time::from_millis((uuid.as_u128() >> 80) as i64))
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
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
    fn what_is_no_key_is_told_in_a_sentence() {
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

    /// 74 random bits and a counter within the millisecond: no two are equal, and each is greater.
    #[test]
    fn t08_keys_of_one_process_are_strictly_increasing() {
        let mut last = IdempotencyKey::now_v7();
        for _ in 0..100_000 {
            let next = IdempotencyKey::now_v7();
            assert!(next > last && next.time() >= last.time(), "{next} after {last}");
            last = next;
        }
        assert!(last.time().is_some());
    }
}
