//! Values within JSON, named by pointers.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::Decimal;
use crate::error::{Error, Result};
use crate::id::Visible;

/// The longest field, in characters.
pub(crate) const FIELD_MAX: usize = 255;
/// The deepest field.
pub(crate) const DEPTH_MAX: usize = 16;

/// A value within a payload, as a JSON pointer (RFC 6901): `/amount`, `/customer/city`.
///
/// ```
/// use hapax::exact::Field;
/// let city = Field::new("/customer/city")?;
/// assert_eq!(city.parts().collect::<Vec<_>>(), ["customer", "city"]);
/// assert!(Field::new("amount").is_err());
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Field {
    text: Arc<str>,
    parts: Arc<[String]>,
}

impl Field {
    /// A field, if it is one.
    pub fn new(pointer: impl AsRef<str>) -> Result<Self> {
        let text = pointer.as_ref();
        let bad = |problem: String| Error::invalid("field", problem);
        if text.chars().count() > FIELD_MAX || text.contains('\0') {
            return Err(bad(format!("it has more than {FIELD_MAX} characters, or a NUL")));
        }
        let Some(rest) = text.strip_prefix('/') else {
            let message = format!("it is \"{}\"; a field begins with a slash, as /amount", Visible(text));
            return Err(bad(message));
        };
        let parts: Option<Vec<String>> = rest.split('/').map(unescaped).collect();
        let Some(parts) = parts else {
            return Err(bad(format!("it is \"{}\"; after ~ comes 0 or 1", Visible(text))));
        };
        if parts.len() > DEPTH_MAX {
            return Err(bad(format!("it has {} parts; the limit is {DEPTH_MAX}", parts.len())));
        }
        Ok(Field { text: text.into(), parts: parts.into() })
    }

    /// The pointer.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The names on the way to the value.
    pub fn parts(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().map(String::as_str)
    }

    /// The value in a payload, as it is written there. Only names of objects are followed, no numbers of
    /// arrays.
    pub(crate) fn find<'p>(&self, payload: &'p str) -> Option<&'p RawValue> {
        let mut value: &'p RawValue = serde_json::from_str(payload).ok()?;
        for part in self.parts() {
            let members = crate::event::members(value.get().as_bytes())?;
            value = members.into_iter().find(|(name, _)| name == part)?.1;
        }
        Some(value)
    }

    /// The number in a payload, exactly as it is written there; `None` if there is none, or one that
    /// does not fit.
    pub fn number(&self, payload: &[u8]) -> Option<Decimal> {
        let value = self.find(std::str::from_utf8(payload).ok()?)?.get();
        value.starts_with(|c: char| c == '-' || c.is_ascii_digit()).then(|| Decimal::parse(value)).flatten()
    }
}

fn unescaped(part: &str) -> Option<String> {
    let sound = part.split('~').skip(1).all(|after| after.starts_with(['0', '1']));
    sound.then(|| part.replace("~1", "/").replace("~0", "~"))
}

impl fmt::Debug for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Field({})", self.text)
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Field {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        Field::new(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_finds_what_a_pointer_names() {
        let payload = r#"{"a":{"b/c":{"~d":7}},"e":[1],"f":"x","":2,"n":null}"#;
        for (pointer, found) in [
            ("/a/b~1c/~0d", Some("7")),
            ("/e", Some("[1]")),
            ("/f", Some("\"x\"")),
            ("/", Some("2")),
            ("/n", Some("null")),
            ("/e/0", None),
            ("/missing", None),
            ("/f/x", None),
        ] {
            let field = Field::new(pointer).unwrap();
            assert_eq!(field.find(payload).map(RawValue::get), found, "{pointer}");
        }
        for bad in ["", "a", "/a~2", "/~", &format!("/{}", "x".repeat(255)), &"/x".repeat(17), "/a\0"] {
            assert!(matches!(Field::new(bad), Err(Error::Invalid { .. })), "{bad}");
        }
    }

    #[test]
    fn a_number_is_exact_or_none() {
        let amount = Field::new("/amount").unwrap();
        for (payload, number) in [
            (r#"{"amount":0.1}"#, Some("0.1")),
            (r#"{"amount":-12345678901234567890.123456789}"#, Some("-12345678901234567890.123456789")),
            (r#"{"amount":"5"}"#, None),
            (r#"{"amount":1e40}"#, None),
            (r#"{"amount":null}"#, None),
            ("not JSON", None),
        ] {
            let found = amount.number(payload.as_bytes()).map(|number| number.to_string());
            assert_eq!(found.as_deref(), number, "{payload}");
        }
        assert_eq!(amount.number(b"\xff"), None);
    }
}
