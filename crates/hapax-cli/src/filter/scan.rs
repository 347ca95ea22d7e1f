//! Finds ids (and a time) in a line of JSON without building the document.
//!
//! It checks that the whole line is JSON, but extracts only the targets of the pointers. As
//! everywhere in hapax, the last of several equal keys counts, `null` means absent, and a whole
//! number becomes its text.

use std::borrow::Cow;
use std::fmt;

use hapax::event::Headers;
use hapax::id::{IdChain, IdSource};
use hapax::{EventId, Time};
use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// The maximum number of pointers in a chain.
const POINTERS_MAX: usize = 16;

/// What to look for in a line.
#[derive(Debug)]
pub struct Scan {
    paths: Vec<Path>,
    /// How many of the paths are ids; a path after them is the time's.
    ids: usize,
    /// Falls back to a hash of the content.
    hash: Option<IdChain>,
}

#[derive(Debug)]
struct Path {
    text: String,
    steps: Vec<Step>,
}

#[derive(Debug)]
struct Step {
    name: String,
    index: Option<usize>,
}

impl Path {
    fn new(text: &str) -> Path {
        let step = |part: &str| {
            let name = part.replace("~1", "/").replace("~0", "~");
            let index = name.parse().ok().filter(|index: &usize| index.to_string() == name);
            Step { name, index }
        };
        Path { text: text.to_owned(), steps: text.split('/').skip(1).map(step).collect() }
    }
}

impl Scan {
    /// Builds a scan from `--id` and `--time`, with the library's checks.
    pub fn new(ids: &[String], time: Option<&str>) -> hapax::Result<Self> {
        let mut sources = Vec::new();
        for id in ids {
            sources.push(match id.as_str() {
                "sha256" => IdSource::ContentHash,
                "offset" => {
                    return Err(hapax::Error::Config(
                        "--id offset: lines of a file have no offset ids".into(),
                    ));
                }
                path => IdSource::Pointer(path.to_owned()),
            });
        }
        if ids.is_empty() {
            // The part of the default chain that applies to a line.
            let default = IdChain::default();
            let pointers = default.sources().iter().filter(|s| matches!(s, IdSource::Pointer(_)));
            sources.extend(pointers.cloned());
        }
        let usage = |e: hapax::Error| hapax::Error::Config(e.to_string());
        let chain = IdChain::new(sources).map_err(usage)?;
        let mut paths = Vec::new();
        let mut hash = None;
        for source in chain.sources() {
            let IdSource::Pointer(path) = source else {
                hash = Some(IdChain::new([IdSource::ContentHash])?);
                break; // a hash always succeeds
            };
            paths.push(Path::new(path));
        }
        let ids = paths.len();
        if let Some(time) = time {
            IdChain::new([IdSource::Pointer(time.to_owned())]).map_err(usage)?;
            paths.push(Path::new(time));
        }
        if paths.len() > POINTERS_MAX {
            return Err(hapax::Error::Config(format!("more than {POINTERS_MAX} pointers")));
        }
        Ok(Scan { paths, ids, hash })
    }

    /// Finds the id of a line and, if requested, its time; or says what is wrong with the line.
    pub fn line(&self, line: &[u8]) -> Result<(EventId, Option<Time>), String> {
        let text = std::str::from_utf8(line).map_err(|e| format!("it is not UTF-8 ({e})"))?;
        let mut found: [Found<'_>; POINTERS_MAX] = [const { Found::Nothing }; POINTERS_MAX];
        let mut json = serde_json::Deserializer::from_str(text);
        let all = (1u32 << self.paths.len()) - 1;
        let node = Node { paths: &self.paths, depth: 0, mask: all, found: &mut found };
        node.deserialize(&mut json).and_then(|()| json.end()).map_err(|e| format!("it is not JSON ({e})"))?;
        let id = self.id(line, &found)?;
        let time = match self.paths.get(self.ids) {
            Some(path) => Some(time(path, &found[self.ids])?),
            None => None,
        };
        Ok((id, time))
    }

    fn id(&self, line: &[u8], found: &[Found<'_>]) -> Result<EventId, String> {
        for (path, found) in self.paths[..self.ids].iter().zip(found) {
            match found {
                Found::Nothing => {}
                Found::Text(text) => return EventId::new(text).map_err(|e| e.to_string()),
                Found::Whole(number) => return EventId::new(number.to_string()).map_err(|e| e.to_string()),
                Found::Other(what) => {
                    return Err(format!(
                        "its id at {} is {what}; ids are strings or whole numbers",
                        path.text
                    ));
                }
            }
        }
        if let Some(hash) = &self.hash {
            return hash.find(&Headers::default(), &line.to_vec().into(), None).map_err(|e| e.to_string());
        }
        let looked: Vec<_> = self.paths[..self.ids].iter().map(|path| path.text.as_str()).collect();
        Err(format!("it has no id at {}", looked.join(" or ")))
    }
}

fn time(path: &Path, found: &Found<'_>) -> Result<Time, String> {
    match found {
        Found::Text(text) => Time::parse(text).map_err(|e| e.to_string()),
        Found::Whole(ms) => i64::try_from(*ms)
            .map(Time::from_millis)
            .map_err(|_| format!("its time at {} is out of range", path.text)),
        Found::Nothing => Err(format!("it has no time at {}", path.text)),
        Found::Other(what) => Err(format!("its time at {} is {what}", path.text)),
    }
}

/// The value that a pointer leads to.
#[derive(Debug, Clone)]
enum Found<'de> {
    Nothing,
    Text(Cow<'de, str>),
    Whole(i128),
    Other(&'static str),
}

/// A value of the document, with the pointers (bits of `mask`) that lead to or through it.
struct Node<'p, 'f, 'de> {
    paths: &'p [Path],
    depth: usize,
    mask: u32,
    found: &'f mut [Found<'de>; POINTERS_MAX],
}

fn bits(mask: u32) -> impl Iterator<Item = usize> {
    (0..POINTERS_MAX).filter(move |bit| mask >> bit & 1 == 1)
}

impl<'de> Node<'_, '_, 'de> {
    /// Assigns the value to the pointers that end here.
    fn end(&mut self, value: &Found<'de>) {
        for bit in bits(self.mask) {
            if self.paths[bit].steps.len() == self.depth {
                self.found[bit] = value.clone();
            }
        }
    }

    /// The pointers that continue with a matching step.
    fn going_on(&self, step: impl Fn(&Step) -> bool) -> u32 {
        let on = |bit: &usize| self.paths[*bit].steps.get(self.depth).is_some_and(&step);
        bits(self.mask).filter(on).fold(0, |mask, bit| mask | 1 << bit)
    }

    /// The node one step down. Discards what an earlier equal key led to.
    fn child(&mut self, mask: u32) -> Node<'_, '_, 'de> {
        for bit in bits(mask) {
            self.found[bit] = Found::Nothing;
        }
        Node { paths: self.paths, depth: self.depth + 1, mask, found: self.found }
    }
}

impl<'de> DeserializeSeed<'de> for Node<'_, '_, 'de> {
    type Value = ();
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        if self.mask == 0 {
            return deserializer.deserialize_ignored_any(IgnoredAny).map(drop);
        }
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Node<'_, '_, 'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_borrowed_str<E>(mut self, text: &'de str) -> Result<(), E> {
        self.end(&Found::Text(Cow::Borrowed(text)));
        Ok(())
    }

    fn visit_str<E>(mut self, text: &str) -> Result<(), E> {
        self.end(&Found::Text(Cow::Owned(text.to_owned())));
        Ok(())
    }

    fn visit_u64<E>(mut self, number: u64) -> Result<(), E> {
        self.end(&Found::Whole(number.into()));
        Ok(())
    }

    fn visit_i64<E>(mut self, number: i64) -> Result<(), E> {
        self.end(&Found::Whole(number.into()));
        Ok(())
    }

    // Different numbers beyond 64 bits can have the same floating-point value, which would lose an
    // event.
    fn visit_f64<E>(mut self, _: f64) -> Result<(), E> {
        self.end(&Found::Other("a number that is not whole or does not fit 64 bits"));
        Ok(())
    }

    fn visit_bool<E>(mut self, _: bool) -> Result<(), E> {
        self.end(&Found::Other("true or false"));
        Ok(())
    }

    fn visit_unit<E>(mut self) -> Result<(), E> {
        self.end(&Found::Nothing);
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        self.end(&Found::Other("an object"));
        while let Some(mask) = map.next_key_seed(KeyOf(&self))? {
            if mask == 0 {
                map.next_value::<IgnoredAny>()?;
            } else {
                map.next_value_seed(self.child(mask))?;
            }
        }
        Ok(())
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<(), A::Error> {
        self.end(&Found::Other("an array"));
        for at in 0.. {
            let mask = self.going_on(|step| step.index == Some(at));
            if seq.next_element_seed(self.child(mask))?.is_none() {
                break;
            }
        }
        Ok(())
    }
}

/// A key, reduced to the pointers that continue through it.
struct KeyOf<'n, 'p, 'f, 'de>(&'n Node<'p, 'f, 'de>);

impl<'de> DeserializeSeed<'de> for KeyOf<'_, '_, '_, '_> {
    type Value = u32;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u32, D::Error> {
        deserializer.deserialize_identifier(self)
    }
}

impl Visitor<'_> for KeyOf<'_, '_, '_, '_> {
    type Value = u32;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<u32, E> {
        Ok(self.0.going_on(|step| step.name == key))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find(ids: &[&str], line: &str) -> Result<String, String> {
        let ids: Vec<_> = ids.iter().map(|id| (*id).to_owned()).collect();
        Scan::new(&ids, None).unwrap().line(line.as_bytes()).map(|(id, _)| id.as_str().into_owned())
    }

    /// The scan finds the same ids as the library.
    #[test]
    fn agrees_with_the_library() {
        let lines = [
            r#"{"id":"a","x":{"id":"b","y":[1,{"id":"c"}]}}"#,
            r#"{"id":7,"x":{"id":-7}}"#,
            r#"{"id":"first","id":"last"}"#,
            r#"{"x":{"id":"gone"},"x":{}}"#,
            r#"{"id":null,"x":{"id":"b"}}"#,
            r#"{"a/b":{"c~d":"e"}}"#,
            r#"{"\u0069d":"escaped \"key\" and value"}"#,
            r#"{"x":{"id":{"deep":1},"y":["zero","one"]}}"#,
            r#"[{"id":"in array"}]"#,
            r#""bare""#,
            "18446744073709551615",
            r#"{"id":true}"#,
        ];
        let pointers = ["/id", "/x/id", "/x/y/1/id", "/x/y/0", "/a~1b/c~0d", "/0/id", "", "/x"];
        for line in lines {
            for one in pointers {
                for two in pointers {
                    let chain = IdChain::new([one, two].map(|p| IdSource::Pointer(p.into()))).unwrap();
                    let theirs = chain.find(&Headers::default(), &line.as_bytes().to_vec().into(), None);
                    let ours = find(&[one, two], line);
                    assert_eq!(
                        theirs.map(|id| id.as_str().into_owned()).ok(),
                        ours.clone().ok(),
                        "{line} {one} {two}: {ours:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_is_no_line_is_said() {
        for (line, part) in [
            ("{", "not JSON"),
            (r#"{"id":"a"} x"#, "not JSON"),
            (r#"{"id":"a","x":}"#, "not JSON"),
            (r#"{"id":"  "}"#, "blank"),
            (r#"{"id":"a\u0000b"}"#, "NUL"),
            (r#"{"id":1.5}"#, "not whole"),
            (r#"{"id":123456789012345678901234567890}"#, "64 bits"),
            (r#"{"id":[]}"#, "an array"),
            (r#"{"other":1}"#, "no id at /id"),
        ] {
            let problem = find(&["/id"], line).unwrap_err();
            assert!(problem.contains(part), "{line}: {problem}");
        }
        let long = format!(r#"{{"id":"{}"}}"#, "x".repeat(256));
        assert!(find(&["/id"], &long).unwrap_err().contains("255"));
        let scan = Scan::new(&["/id".into()], None).unwrap();
        assert!(scan.line(b"{\"id\":\"\xff\"}").unwrap_err().contains("UTF-8"));
    }

    #[test]
    fn deep_lines_do_not_overflow() {
        let deep = format!(r#"{{"x":{}{},"id":"a"}}"#, "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(find(&["/id"], &deep).unwrap(), "a");
    }

    #[test]
    fn times() {
        let scan = Scan::new(&["/id".into()], Some("/at")).unwrap();
        let time = |line: &str| scan.line(line.as_bytes()).map(|(_, time)| time.unwrap());
        assert_eq!(time(r#"{"id":1,"at":1000}"#), time(r#"{"id":1,"at":"1970-01-01T00:00:01Z"}"#));
        assert!(time(r#"{"id":1}"#).unwrap_err().contains("no time at /at"));
        assert!(time(r#"{"id":1,"at":"soon"}"#).is_err());
    }
}
