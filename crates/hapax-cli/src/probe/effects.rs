//! What answers show of effects: two writes are distinguished by what the service calls them.

use serde_json::Value;

use crate::http::Answer;

/// What of an answer tells one effect from another. Two writes with different keys show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Its `Location`.
    Location,
    /// The `id` in its body.
    Id,
    /// Its whole body. It may also vary within one effect: a request's id, a time.
    Body,
    /// Nothing: the answers to different writes are alike, or they only repeat the key.
    Nothing,
}

/// What the answers to requests with one key show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shown {
    /// One effect.
    One,
    /// So many, each with a name of its own.
    Several(usize),
    /// The answers differ, and name no effect.
    Unclear,
    /// Nothing.
    Nothing,
}

impl Signal {
    /// What tells the answers to two writes apart, each with its key.
    pub fn of(one: (&str, &Answer), other: (&str, &Answer)) -> Self {
        let tells = |signal: &Signal| {
            let name = |(key, answer): (&str, &Answer)| {
                signal.name(answer).filter(|name| !plain(name).contains(&plain(key)))
            };
            matches!((name(one), name(other)), (Some(one), Some(other)) if one != other)
        };
        [Signal::Location, Signal::Id, Signal::Body].into_iter().find(tells).unwrap_or(Signal::Nothing)
    }

    /// What an answer calls its effect.
    fn name(self, answer: &Answer) -> Option<String> {
        match self {
            Signal::Location => answer.header("location").map(str::to_owned),
            Signal::Id => id(&answer.body),
            Signal::Body => Some(String::from_utf8_lossy(&answer.body).into_owned()),
            Signal::Nothing => None,
        }
    }

    /// Whether two successes tell of the same effect.
    pub fn is_same(self, one: &Answer, other: &Answer) -> bool {
        one.is_success() && other.is_success() && self.shown(&[one, other]) == Shown::One
    }

    /// What the successes among these answers show.
    pub fn shown(self, answers: &[&Answer]) -> Shown {
        let successes = answers.iter().filter(|answer| answer.is_success());
        let mut names: Vec<Option<String>> = successes.map(|answer| self.name(answer)).collect();
        names.sort();
        names.dedup();
        match (self, names.iter().flatten().count()) {
            (Signal::Nothing, _) | (_, 0) => Shown::Nothing,
            (Signal::Body, 2..) => Shown::Unclear,
            (_, several @ 2..) => Shown::Several(several),
            (_, _) if names.len() > 1 => Shown::Unclear, // some have no name
            (_, _) => Shown::One,
        }
    }
}

/// The `id` of a JSON object, or of the one object in it that has an `id`.
fn id(body: &[u8]) -> Option<String> {
    let scalar = |value: &Value| match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        _ => None,
    };
    let value: Value = serde_json::from_slice(body).ok()?;
    let fields = value.as_object()?;
    if let Some(id) = fields.get("id").and_then(scalar) {
        return Some(id);
    }
    let mut inner = fields.values().filter_map(|field| field.get("id").and_then(scalar));
    inner.next().filter(|_| inner.next().is_none())
}

/// A text without what differs between the ways to write a UUID.
fn plain(text: &str) -> String {
    text.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(location: Option<&str>, body: &str) -> Answer {
        let location = location.map(|place| format!("location: {place}\r\n")).unwrap_or_default();
        Answer::parse(format!("HTTP/1.1 201 Created\r\n{location}\r\n{body}").as_bytes()).unwrap()
    }

    #[test]
    fn effects_are_told_apart_by_what_the_service_calls_them() {
        let of = |one: &Answer, two: &Answer| Signal::of(("0190-AA", one), ("0190-bb", two));
        let placed = |n: u8, said: &str| answer(Some(&format!("/orders/{n}")), said);
        let bare = |said: &str| answer(None, said);
        assert_eq!(of(&placed(1, "x"), &placed(2, "x")), Signal::Location);
        assert_eq!(of(&placed(1, r#"{"id":1}"#), &placed(1, r#"{"id":2}"#)), Signal::Id);
        assert_eq!(of(&bare(r#"{"data":{"id":"a"}}"#), &bare(r#"{"data":{"id":"b"}}"#)), Signal::Id);
        assert_eq!(of(&bare("1"), &bare("2")), Signal::Body);
        assert_eq!(of(&bare("ok"), &bare("ok")), Signal::Nothing);
        // What only repeats the key tells nothing, however it is written.
        assert_eq!(of(&bare(r#"{"id":"0190aa"}"#), &bare(r#"{"id":"0190BB"}"#)), Signal::Nothing);
        assert_eq!(of(&answer(Some("/0190-aa"), ""), &answer(Some("/0190-bb"), "")), Signal::Nothing);
    }

    #[test]
    fn answers_that_vary_are_no_second_effect() {
        let placed = |n: u8, said: &str| answer(Some(&format!("/orders/{n}")), said);
        let (one, again, other) = (placed(1, "a"), placed(1, "b"), placed(2, "a"));
        assert_eq!(Signal::Location.shown(&[&one, &again]), Shown::One);
        assert_eq!(Signal::Location.shown(&[&one, &again, &other]), Shown::Several(2));
        assert_eq!(Signal::Location.shown(&[&one, &answer(None, "a")]), Shown::Unclear);
        assert_eq!(Signal::Body.shown(&[&one, &again]), Shown::Unclear);
        assert_eq!(Signal::Nothing.shown(&[&one, &one]), Shown::Nothing);
        assert_eq!(Signal::Location.shown(&[]), Shown::Nothing);
        let refused = Answer::parse(b"HTTP/1.1 422 No\r\n\r\n").unwrap();
        assert!(Signal::Location.is_same(&one, &again) && !Signal::Location.is_same(&one, &refused));
    }
}
