//! The content of a record: a JSON object that every backend stores and returns alike.

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use serde::de::{DeserializeSeed, Error as _, MapAccess, SeqAccess, Visitor};

use crate::error::{Error, Result};

/// The largest payload, in bytes without white space. The event of a write carries it, and leaves
/// room for what a relay adds.
pub const PAYLOAD_BYTES_MAX: usize = 896 << 10;
/// How deeply objects and arrays may nest: the parsers of all backends go at least that far.
const NESTING_MAX: usize = 127;
/// The longest number, in characters.
const NUMBER_MAX: usize = 64;
/// The largest exponent of a number, whatever its sign.
const EXPONENT_MAX: u32 = 400;

/// The content of a record: a JSON object, as text without white space between its parts.
///
/// It is refused if a backend could not return it as the same value: with a key that occurs twice in
/// one object, U+0000 or half a surrogate pair in a string, or numbers beyond what a double holds.
/// Numbers are never rounded. A backend may write a number in another way (PostgreSQL writes exponents
/// out, and `-0` as `0`).
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
        let nested = crate::event::depth(json.as_bytes());
        if nested > NESTING_MAX {
            return bad(format!("it nests {nested} levels deep; the limit is {NESTING_MAX}"));
        }
        let written_out = written_out(json)?;
        let mut deserializer = serde_json::Deserializer::from_str(json);
        let checked = Checked.deserialize(&mut deserializer).and_then(|()| deserializer.end());
        if let Err(error) = checked {
            return bad(error.to_string());
        }
        let text = compact(json);
        let grown = text.len() + written_out;
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

    /// A payload as a backend returns it. The limits are for input: a number that was within them may be
    /// longer here, because PostgreSQL writes exponents out.
    pub(crate) fn stored(json: &str) -> Result<Self> {
        if !json.trim_start().starts_with('{') {
            return Err(Error::Corrupt("a stored payload is not a JSON object".into()));
        }
        Ok(Payload(compact(json).into()))
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

/// The parts of a sound JSON text: strings, each with its quotes, and what is between them.
fn parts(json: &str) -> impl Iterator<Item = &str> {
    let mut rest = json;
    std::iter::from_fn(move || {
        let (part, after) = rest.split_at(part_end(rest));
        rest = after;
        (!part.is_empty()).then_some(part)
    })
}

fn part_end(json: &str) -> usize {
    let Some(string) = json.strip_prefix('"') else { return json.find('"').unwrap_or(json.len()) };
    let mut escaped = false;
    let quote = string.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    quote.map_or(json.len(), |quote| quote + 2)
}

/// Removes white space between the parts of a sound JSON text.
fn compact(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for part in parts(json) {
        if part.starts_with('"') {
            text.push_str(part);
        } else {
            text.extend(part.split_ascii_whitespace());
        }
    }
    text
}

/// What a number is written with; `true` and `false` have an `e` too.
fn is_of_number(c: char) -> bool {
    matches!(c, '0'..='9' | '-' | '+' | '.' | 'e' | 'E')
}

/// The same JSON with its numbers written out, as PostgreSQL does it, and without zeros at the end of
/// fractions: equal numbers are then equal texts. For comparing; it may be much longer.
pub(crate) fn plain_numbers(json: &str) -> Cow<'_, str> {
    // Most payloads have no number that can be written in two ways.
    let unsure = |part: &str| !part.starts_with('"') && part.contains(['.', '-', 'e', 'E']);
    if !parts(json).any(unsure) {
        return Cow::Borrowed(json);
    }
    let mut text = String::with_capacity(json.len());
    for part in parts(json) {
        if !unsure(part) {
            text.push_str(part);
            continue;
        }
        let mut rest = part;
        while let Some(begin) = rest.find(|c: char| c == '-' || c.is_ascii_digit()) {
            let (before, from) = rest.split_at(begin);
            let (number, after) = from.split_at(from.find(|c| !is_of_number(c)).unwrap_or(from.len()));
            text.push_str(before);
            text.push_str(&plain_number(number).unwrap_or_else(|| number.to_owned()));
            rest = after;
        }
        text.push_str(rest);
    }
    Cow::Owned(text)
}

/// A number written out; `None` if it is none, or one that no payload may have.
fn plain_number(number: &str) -> Option<String> {
    let (sign, size) = number.strip_prefix('-').map_or(("", number), |size| ("-", size));
    let (digits, exponent) = size.split_once(['e', 'E']).unwrap_or((size, "0"));
    let exponent = exponent.parse::<i32>().ok().filter(|digits| digits.unsigned_abs() <= EXPONENT_MAX)?;
    let (whole, fraction) = digits.split_once('.').unwrap_or((digits, "0"));
    let sound = |digits: &str| !digits.is_empty() && digits.bytes().all(|digit| digit.is_ascii_digit());
    if !sound(whole) || !sound(fraction) || (whole.len() > 1 && whole.starts_with('0')) {
        return None;
    }
    // The point stands after so many digits of all.
    let (mut all, mut point) = (format!("{whole}{fraction}"), i32::try_from(whole.len()).ok()? + exponent);
    if point < 0 {
        all.insert_str(0, &"0".repeat(point.unsigned_abs() as usize));
        point = 0;
    }
    let point = usize::try_from(point).ok()?;
    if all.len() < point {
        all.push_str(&"0".repeat(point - all.len()));
    }
    let (whole, fraction) = all.split_at(point);
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    Some(match (whole, fraction) {
        ("", "") => "0".to_owned(),
        (whole, "") => format!("{sign}{whole}"),
        ("", fraction) => format!("{sign}0.{fraction}"),
        (whole, fraction) => format!("{sign}{whole}.{fraction}"),
    })
}

/// How much longer a text may become when a database writes its exponents out. Refuses numbers beyond
/// the limits.
fn written_out(json: &str) -> Result<usize> {
    let numbers =
        parts(json).filter(|part| !part.starts_with('"')).flat_map(|part| part.split(|c| !is_of_number(c)));
    numbers.map(exponent).sum()
}

/// How many digits the exponent of a number stands for.
fn exponent(number: &str) -> Result<usize> {
    let bad = |problem: String| Err(Error::invalid("payload", problem));
    if number.len() > NUMBER_MAX {
        return bad(format!("a number has {} characters; the limit is {NUMBER_MAX}", number.len()));
    }
    // `true` and `false` leave an `e`.
    let Some((_, exponent)) = number.split_once(['e', 'E']).filter(|(digits, _)| !digits.is_empty()) else {
        return Ok(0);
    };
    let digits = exponent.parse::<i32>().map(i32::unsigned_abs);
    match digits {
        Ok(_) if number.parse::<f64>().is_ok_and(f64::is_infinite) => bad(format!(
            "the number {number} is beyond what a double holds; the limit is 1.7976931348623157e308, with either sign"
        )),
        Ok(digits) if digits <= EXPONENT_MAX => Ok(digits as usize),
        _ => bad(format!(
            "the number {number} has an exponent beyond the limits, -{EXPONENT_MAX} and {EXPONENT_MAX}"
        )),
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

    /// PostgreSQL writes numbers out: what was within the limits is longer when it comes back.
    #[test]
    #[allow(clippy::float_cmp, reason = "the same number is the same double")]
    fn t300_what_a_database_returns_is_not_measured_again() {
        for (json, returned) in [
            (r#"{"a":1e100}"#, format!(r#"{{"a": 1{}}}"#, "0".repeat(100))),
            (r#"{"a":1e-400}"#, format!(r#"{{"a": 0.{}1}}"#, "0".repeat(399))),
        ] {
            let payload = Payload::new(json).unwrap();
            let read = Payload::stored(&returned).unwrap();
            assert_eq!(read.as_str(), returned.replace(' ', ""));
            let number =
                |payload: &Payload| payload.as_str()[5..payload.as_str().len() - 1].parse::<f64>().unwrap();
            assert_eq!(number(&read), number(&payload));
        }
        assert_eq!(Payload::stored("null").unwrap_err().code(), "corrupt");
    }

    #[test]
    fn equal_numbers_are_equal_texts_when_they_are_plain() {
        for (json, plain) in [
            (r#"{"a":[1,20,0,"1e2",true,false,null]}"#, r#"{"a":[1,20,0,"1e2",true,false,null]}"#),
            (r#"{"a":1e2,"b":1.0E+1,"c":-0,"d":-0.0}"#, r#"{"a":100,"b":10,"c":0,"d":0}"#),
            (r#"{"a":1.50,"b":-20.0,"c":[1e-3,-12.5e-1]}"#, r#"{"a":1.5,"b":-20,"c":[0.001,-1.25]}"#),
            (r#"{"1.0":"\"1.0","a":false,"b":0.10e1}"#, r#"{"1.0":"\"1.0","a":false,"b":1}"#),
            // No payload has these; a file that somebody changed may.
            (
                r#"{"a":1e401,"b":1e99999999999,"c":1.2.3,"d":-}"#,
                r#"{"a":1e401,"b":1e99999999999,"c":1.2.3,"d":-}"#,
            ),
            (r#"{"a":--1,"b":1-2,"c":1e,"d":01"#, r#"{"a":--1,"b":1-2,"c":1e,"d":01"#),
        ] {
            assert_eq!(plain_numbers(json), plain);
            assert_eq!(plain_numbers(plain), plain, "it stays");
        }
    }

    #[test]
    fn t141_what_a_database_would_change_or_blow_up_is_refused_with_a_sentence() {
        let deep = format!("{}{}", r#"{"a":"#.repeat(200), "1".to_owned() + &"}".repeat(200));
        let many = format!(r#"{{"a":[{}1]}}"#, "1e300,".repeat(4000));
        let long = format!(r#"{{"a":{}}}"#, "1".repeat(65));
        let longest = format!(r#"{{"a":{}}}"#, "1".repeat(400));
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
            (r#"{"a":1e999}"#, "the number 1e999 is beyond what a double holds; the limit is"),
            (r#"{"a":-2e308}"#, "the number -2e308 is beyond what a double holds; the limit is"),
            (r#"{"a":1e-999999}"#, "exponent beyond the limits, -400 and 400"),
            (r#"{"a":1e99999999999}"#, "exponent beyond the limits, -400 and 400"),
            (&deep, "it nests 200 levels deep; the limit is 127"),
            (&many, "the limit is"),
            (&long, "a number has 65 characters; the limit is 64"),
            (&longest, "a number has 400 characters; the limit is 64"),
            (&large, "the limit is"),
        ] {
            let error = Payload::new(json).unwrap_err().to_string();
            assert!(error.contains(says), "{}: {error}", &json[..json.len().min(40)]);
        }
        let deepest = format!("{}{}{}", r#"{"a":"#.repeat(127), "1", "}".repeat(127));
        assert_eq!(Payload::new(&deepest).unwrap().as_str(), deepest, "the limit itself is allowed");
    }
}
