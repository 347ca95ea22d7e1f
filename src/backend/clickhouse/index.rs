//! What a row says about its payload beside the payload: values by JSON pointer.
//!
//! ClickHouse's own JSON functions read numbers as doubles, which loses digits of money. So the values that a
//! question may name are written apart, as text and as exact decimals, by the rules that every read model has.

use crate::analytics::{DEPTH_MAX, Decimal, FIELD_MAX, group_text};
use crate::records::Payload;

/// How many bytes the names and values of one record may take. Only deeply nested names reach it: the payload
/// itself is smaller by far.
pub(super) const INDEX_BYTES_MAX: usize = 8 << 20;

/// The values of one record, by pointer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Index {
    /// Every value that is there and not null: its text if it groups records, else empty.
    pub(super) fields: Vec<(String, String)>,
    /// Every number that fits.
    pub(super) numbers: Vec<(String, Decimal)>,
}

impl Index {
    /// The values of a payload; `None` if there are too many.
    pub(super) fn of(payload: &Payload) -> Option<Self> {
        let mut index = Index::default();
        index.add("", payload.as_str(), 0, &mut 0)?;
        Some(index)
    }

    fn add(&mut self, at: &str, object: &str, depth: usize, bytes: &mut usize) -> Option<()> {
        if depth == DEPTH_MAX {
            return Some(()); // no pointer reaches further
        }
        for (name, value) in crate::event::members(object.as_bytes()).unwrap_or_default() {
            let name = name.replace('~', "~0").replace('/', "~1");
            let pointer = format!("{at}/{name}");
            let value = value.get();
            if value == "null" || pointer.chars().count() > FIELD_MAX {
                continue;
            }
            if value.starts_with('{') {
                self.add(&pointer, value, depth + 1, bytes)?;
            }
            let text = group_text(value).unwrap_or_default();
            let number = value.starts_with(|c: char| c == '-' || c.is_ascii_digit());
            let number = number.then(|| Decimal::parse(value)).flatten();
            *bytes += pointer.len() + text.len() + number.map_or(0, |_| pointer.len() + size_of::<Decimal>());
            if *bytes > INDEX_BYTES_MAX {
                return None;
            }
            self.numbers.extend(number.map(|number| (pointer.clone(), number)));
            self.fields.push((pointer, text));
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn index(json: &str) -> Option<Index> {
        Index::of(&Payload::new(json).unwrap())
    }

    #[test]
    fn an_index_has_what_a_pointer_can_name() {
        let found =
            index(r#"{"a":{"b/c":{"~":1.50}},"s":"\u0061","l":[1],"n":null,"big":1e-30,"t":true}"#).unwrap();
        let fields: Vec<_> = found.fields.iter().map(|(at, text)| (at.as_str(), text.as_str())).collect();
        assert_eq!(
            fields,
            [
                ("/a/b~1c/~0", "1.50"),
                ("/a/b~1c", ""),
                ("/a", ""),
                ("/s", "\"a\""),
                ("/l", ""),
                ("/big", "1e-30"),
                ("/t", "true")
            ]
        );
        let numbers: Vec<_> = found.numbers.iter().map(|(at, n)| (at.as_str(), n.to_string())).collect();
        assert_eq!(numbers, [("/a/b~1c/~0", "1.5".to_owned())]);
    }

    #[test]
    fn a_payload_of_nothing_but_long_names_is_bounded() {
        let names = "x".repeat(120);
        let many: Vec<_> = (0..60_000).map(|n| format!(r#""{n}":1"#)).collect();
        assert!(index(&format!(r#"{{"{names}":{{"{names}":{{{}}}}}}}"#, many.join(","))).is_none());
        assert!(index(&format!("{{{}}}", many.join(","))).is_some());
    }
}
