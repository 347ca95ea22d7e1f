//! The content of a record: a JSON object that every backend stores and returns alike.

use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};

/// The largest payload, in bytes without white space. The event of a write carries it, and leaves
/// room for what a relay adds.
pub const PAYLOAD_BYTES_MAX: usize = 896 << 10;
/// The longest number, in characters.
const NUMBER_MAX: usize = 64;

/// The content of a record: a JSON object, as text without white space between its parts.
///
/// It is refused if a backend could not return it as the same value: with a key that occurs twice in
/// one object, U+0000 or half a surrogate pair in a string, or numbers beyond what a double holds.
/// Numbers are never rounded.
///
/// ```
/// use hapax::records::Payload;
/// let payload = Payload::new(r#" {"amount": 12345678901234567890.10} "#)?;
/// assert_eq!(payload.as_str(), r#"{"amount":12345678901234567890.10}"#);
/// assert!(Payload::new(r#"{"a": 1, "a": 2}"#).is_err());
/// assert!(Payload::new("[]").is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Payload(Arc<str>);

impl Payload {
    /// A payload, if it is one.
    pub fn new(json: impl AsRef<str>) -> Result<Self> {
        let json = json.as_ref();
        let bad = |problem: String| Err(Error::invalid("payload", problem));
        if !json.trim_start().starts_with('{') {
            return bad("it is not a JSON object".into());
        }
        let mut deserializer = serde_json::Deserializer::from_str(json);
        let checked = Checked.deserialize(&mut deserializer).and_then(|()| deserializer.end());
        if let Err(error) = checked {
            return bad(error.to_string());
        }
        let (text, grown) = compact(json)?;
        if grown > PAYLOAD_BYTES_MAX {
            return bad(format!("it has {grown} bytes; the limit is {PAYLOAD_BYTES_MAX}"));
        }
        Ok(Payload(text.into()))
    }

    /// A payload from anything that serialises to a JSON object.
    pub fn of(value: &impl serde::Serialize) -> Result<Self> {
        let json = serde_json::to_string(value);
        Payload::new(json.map_err(|error| Error::invalid("payload", error.to_string()))?)
    }

    /// A payload as a backend stored it.
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn stored(json: &str) -> Result<Self> {
        let (text, _) = compact(json).map_err(|error| Error::Corrupt(format!("a stored {error}")))?;
        Ok(Payload(text.into()))
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Payload({})", self.0)
    }
}

impl serde::Serialize for Payload {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let raw: &serde_json::value::RawValue =
            serde_json::from_str(&self.0).map_err(serde::ser::Error::custom)?;
        raw.serialize(to)
    }
}

/// Removes white space between the parts of a sound JSON text. Also returns how long the text is with
/// its exponents written out, as a database may return it.
fn compact(json: &str) -> Result<(String, usize)> {
    let mut text = String::with_capacity(json.len());
    let (mut in_string, mut escaped, mut number, mut grown) = (false, false, 0usize, 0usize);
    for c in json.chars() {
        if in_string {
            text.push(c);
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                '"' => in_string = false,
                _ => {}
            }
            continue;
        }
        let part_of_number = matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E');
        if part_of_number && (number > 0 || c == '-' || c.is_ascii_digit()) {
            number += 1;
            if number > NUMBER_MAX {
                let problem = format!("a number has more than {NUMBER_MAX} characters");
                return Err(Error::invalid("payload", problem));
            }
        } else if number > 0 {
            grown += exponent(&text[text.len() - number..])?;
            number = 0;
        }
        in_string = c == '"';
        if !c.is_ascii_whitespace() {
            text.push(c);
        }
    }
    let length = text.len() + grown;
    Ok((text, length))
}

/// How many digits the exponent of a number stands for.
fn exponent(number: &str) -> Result<usize> {
    let Some((_, exponent)) = number.split_once(['e', 'E']) else { return Ok(0) };
    match exponent.parse::<i32>() {
        Ok(digits) if digits.unsigned_abs() <= 400 => Ok(digits.unsigned_abs() as usize),
        _ => Err(Error::invalid("payload", format!("the number {number} has an exponent beyond 400"))),
    }
}

/// Walks through a JSON value and refuses what a backend would change.
struct Checked;

impl<'de> DeserializeSeed<'de> for Checked {
    type Value = ();

    fn deserialize<D: serde::Deserializer<'de>>(self, from: D) -> std::result::Result<(), D::Error> {
        from.deserialize_any(self)
    }
}

fn text_is_sound<E: serde::de::Error>(text: &str) -> std::result::Result<(), E> {
    if text.contains('\0') {
        return Err(E::custom("a string contains U+0000, which a database cannot store"));
    }
    Ok(())
}

impl<'de> Visitor<'de> for Checked {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_bool<E>(self, _: bool) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_i64<E>(self, _: i64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_u64<E>(self, _: u64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_f64<E>(self, _: f64) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_unit<E>(self) -> std::result::Result<(), E> {
        Ok(())
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<(), E> {
        text_is_sound(text)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<(), A::Error> {
        while seq.next_element_seed(Checked)?.is_some() {}
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<(), A::Error> {
        let mut keys = std::collections::HashSet::new();
        while let Some(key) = map.next_key::<String>()? {
            text_is_sound(&key)?;
            if keys.contains(&key) {
                let shown: String = key.chars().take(64).collect();
                return Err(A::Error::custom(format!("the key {shown:?} is in one object twice")));
            }
            keys.insert(key);
            map.next_value_seed(Checked)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payloads_keep_their_numbers_and_lose_only_white_space() {
        for (json, wanted) in [
            ("{}", "{}"),
            (" {\t\"a b\" : [ 1 , -2.50 , 1e5 , true , null ] }\n", r#"{"a b":[1,-2.50,1e5,true,null]}"#),
            (r#"{"q\" : 1":"\\ \" x"}"#, r#"{"q\" : 1":"\\ \" x"}"#),
            (r#"{"n":123456789012345678901234567890.5}"#, r#"{"n":123456789012345678901234567890.5}"#),
            (r#"{"a":{"a":{"b":[]}},"😀":"\ud83d\ude00"}"#, r#"{"a":{"a":{"b":[]}},"😀":"\ud83d\ude00"}"#),
        ] {
            assert_eq!(Payload::new(json).unwrap().as_str(), wanted);
        }
        assert_eq!(Payload::of(&serde_json::json!({"a": 1})).unwrap().as_str(), r#"{"a":1}"#);
    }

    #[test]
    fn t141_what_a_database_would_change_or_blow_up_is_refused_with_a_sentence() {
        let deep = format!("{}{}", r#"{"a":"#.repeat(200), "1".to_owned() + &"}".repeat(200));
        let many = format!(r#"{{"a":[{}1]}}"#, "1e300,".repeat(4000));
        let long = format!(r#"{{"a":{}}}"#, "1".repeat(65));
        let large = format!(r#"{{"a":"{}"}}"#, "x".repeat(PAYLOAD_BYTES_MAX));
        for (json, says) in [
            ("", "not a JSON object"),
            ("[]", "not a JSON object"),
            ("\"x\"", "not a JSON object"),
            ("{} {}", "trailing"),
            ("{\"a\":}", "column"),
            (r#"{"a":1,"a":2}"#, "twice"),
            (r#"{"x":[{"a":1,"\u0061":2}]}"#, "twice"),
            (r#"{"a":"\u0000"}"#, "U+0000"),
            (r#"{"\u0000":1}"#, "U+0000"),
            (r#"{"a":"\ud800"}"#, "hex escape"),
            (r#"{"a":1e999}"#, "out of range"),
            (r#"{"a":1e-999999}"#, "exponent"),
            (&deep, "recursion"),
            (&many, "the limit is"),
            (&long, "64 characters"),
            (&large, "the limit is"),
        ] {
            let error = Payload::new(json).unwrap_err().to_string();
            assert!(error.contains(says), "{}: {error}", &json[..json.len().min(40)]);
        }
    }
}
