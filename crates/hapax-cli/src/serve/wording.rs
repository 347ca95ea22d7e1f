//! Says what is wrong with a request to who sent it: what, where, and what it takes.
//!
//! The parsers know types only. Ranges are those of the API's description.

use std::collections::HashMap;

use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::Value;
use serde_path_to_error::Segment;
use utoipa::{IntoParams, ToSchema};

/// How deeply a body may nest: the parser's limit.
const NESTING_MAX: usize = 127;
/// How much of what was sent is shown.
const SHOWN_MAX: usize = 64;

/// What is wrong with a body that is no `T`.
pub fn of_body<T: DeserializeOwned + ToSchema>(bytes: &[u8], error: &serde_json::Error) -> String {
    let told = error.to_string();
    let message = told.strip_suffix(&format!(" at line {} column {}", error.line(), error.column()));
    let message = message.unwrap_or(&told);
    let (is_array, is_empty) = (bytes.trim_ascii().starts_with(b"["), bytes.trim_ascii().is_empty());
    if is_array || is_empty {
        let found = if is_array { "an array" } else { "empty" };
        return format!("the body is {found}; it must be a JSON object");
    }
    let path = path::<T>(bytes, &told);
    let (schema, known) = described::<T>(&path);
    if message == "recursion limit exceeded" {
        let limit = format!("deeper than {NESTING_MAX} levels, which is the limit");
        return match known {
            0 => format!("the body nests {limit}"),
            known => format!("{} makes the body nest {limit}", place(&path[..known])),
        };
    }
    if message == "number out of range" {
        return format!("{} is a number beyond ±1.8e308, which is the limit", place(&path));
    }
    if error.is_data() {
        return of_data(message, &path, &schema);
    }
    // A word or a text was expected, and there is another type.
    if message == "expected value" && serde_json::from_slice::<IgnoredAny>(bytes).is_ok() {
        let sent = serde_json::from_slice::<Value>(bytes).unwrap_or_default();
        let sent = path.iter().try_fold(&sent, |at, segment| match segment {
            Segment::Map { key } => at.get(key),
            Segment::Seq { index } => at.get(index),
            _ => Some(at),
        });
        let found = match sent {
            Some(Value::Array(_)) => "an array".to_owned(),
            Some(Value::Object(_)) => "an object".to_owned(),
            Some(sent) => cut(&sent.to_string()),
            None => "of another type".to_owned(),
        };
        return format!("{} is {found}; it must be {}", place(&path), takes("a string", &schema));
    }
    format!(
        "the body is not JSON: {} at line {}, column {}",
        of_syntax(message),
        error.line(),
        error.column()
    )
}

/// Where the parser stopped.
fn path<T: DeserializeOwned>(bytes: &[u8], told: &str) -> Vec<Segment> {
    match serde_path_to_error::deserialize::<_, T>(&mut serde_json::Deserializer::from_slice(bytes)) {
        Err(error) if error.inner().to_string() == told => {
            let is_place = |segment: &&Segment| matches!(segment, Segment::Map { .. } | Segment::Seq { .. });
            error.path().iter().filter(is_place).cloned().collect()
        }
        _ => Vec::new(),
    }
}

fn place(path: &[Segment]) -> String {
    let mut text = String::new();
    for segment in path {
        let dot = if text.is_empty() || matches!(segment, Segment::Seq { .. }) { "" } else { "." };
        text = format!("{text}{dot}{segment}");
    }
    if text.is_empty() { "the body".to_owned() } else { name(&text) }
}

fn name(text: &str) -> String {
    format!("`{}`", cut(text).escape_debug())
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

fn of_data(message: &str, path: &[Segment], schema: &Value) -> String {
    let at = place(path);
    let of = |prefix: &str| message.strip_prefix(prefix);
    let wrong = of("invalid type: ").or_else(|| of("invalid value: ")).or_else(|| of("invalid length "));
    if let Some((found, expected)) = wrong.and_then(|wrong| wrong.rsplit_once(", expected ")) {
        return format!("{at} is {}; it must be {}", found_words(found), takes(expected, schema));
    }
    if let Some(missing) = of("missing field `") {
        return format!("{} is missing in {at}", name(missing.trim_end_matches('`')));
    }
    if let Some(twice) = of("duplicate field `") {
        return format!("{} is in {at} twice", name(twice.trim_end_matches('`')));
    }
    if let Some((unknown, known)) = of("unknown field `").and_then(unknown) {
        let (at, known) = (place(&path[..path.len().saturating_sub(1)]), list(&known, "and"));
        return format!("{at} has no {}; it takes {known}", name(unknown));
    }
    if let Some((unknown, known)) = of("unknown variant `").and_then(unknown) {
        let known: Vec<_> = known.iter().map(|known| known.replace('`', "\"")).collect();
        return format!("{at} is {:?}; it must be {}", cut(unknown), list(&known, "or"));
    }
    message.to_owned()
}

/// The name that is unknown, and those that are known, each in backquotes.
fn unknown(rest: &str) -> Option<(&str, Vec<String>)> {
    let end = rest.rfind("`, expected ").or_else(|| rest.rfind("`, there are no "))?;
    let known = rest[end + 1..].split('`').skip(1).step_by(2).map(|known| format!("`{known}`"));
    Some((&rest[..end], known.collect()))
}

fn list(names: &[String], word: &str) -> String {
    match names {
        [] => "nothing".to_owned(),
        [name] => name.clone(),
        [names @ .., last] => format!("{} {word} {last}", names.join(", ")),
    }
}

fn found_words(found: &str) -> String {
    match found.split_once(' ') {
        Some(("string", text)) if text.chars().count() > SHOWN_MAX => format!("{}\"", cut(text)),
        Some(("string", text)) => text.to_owned(),
        _ => match found.split('`').nth(1) {
            Some(value) => cut(value),
            None if found == "map" => "an object".to_owned(),
            None if found == "null" || found == "unit value" => "null".to_owned(),
            None if found == "number" => "a number".to_owned(),
            None => "an array".to_owned(),
        },
    }
}

fn takes(expected: &str, schema: &Value) -> String {
    if let Some(words) = schema["enum"].as_array() {
        let words = words.iter().filter(|word| !word.is_null()).map(Value::to_string);
        return list(&words.collect::<Vec<_>>(), "or");
    }
    match expected {
        "u8" | "u16" | "u32" | "u64" | "usize" | "i8" | "i16" | "i32" | "i64" | "isize" => {
            whole_number(schema, expected.starts_with('i'))
        }
        "a borrowed string" | "str" => "a string".to_owned(),
        "a boolean" => "true or false".to_owned(),
        "a sequence" => "an array".to_owned(),
        "a map" => "a JSON object".to_owned(),
        expected if expected.starts_with("struct ") => "a JSON object".to_owned(),
        expected => expected.to_owned(),
    }
}

fn whole_number(schema: &Value, is_signed: bool) -> String {
    let limit = |name: &str, otherwise: String| match &schema[name] {
        Value::Null => otherwise,
        limit => limit.to_string(),
    };
    let (min, max) = if is_signed {
        (i64::MIN.to_string(), i64::MAX.to_string())
    } else {
        (u64::MIN.to_string(), u64::MAX.to_string())
    };
    format!("a whole number from {} to {}", limit("minimum", min), limit("maximum", max))
}

fn of_syntax(message: &str) -> &str {
    match message {
        "expected value" => "a value is missing, or is not written as JSON writes it,",
        "expected ident" => "a word is none of true, false and null",
        "expected `:`" => "a colon is missing",
        "expected `,` or `}`" | "expected `,` or `]`" => "a comma or a bracket is missing",
        "expected `\"`" => "a quotation mark is missing",
        "invalid escape" => "a string has an escape that JSON does not have",
        "invalid number" => "a number is not written as JSON writes it",
        "invalid unicode code point" => "a string has bytes that are not UTF-8",
        "lone leading surrogate in hex escape" | "unexpected end of hex escape" => {
            "a string has half of a surrogate pair"
        }
        "key must be a string" => "a name is not in quotation marks",
        "trailing comma" => "a comma has nothing behind it",
        "trailing characters" => "something follows the value",
        message if message.starts_with("EOF ") => "it ends too early,",
        message if message.starts_with("control character ") => {
            "a string has a control character that is not escaped"
        }
        message => message,
    }
}

/// What the API's description says of the place, and how much of the path it knows.
fn described<T: ToSchema>(path: &[Segment]) -> (Value, usize) {
    let mut named = Vec::new();
    T::schemas(&mut named);
    let json = |schema| serde_json::to_value(schema).unwrap_or_default();
    let named: HashMap<_, _> = named.into_iter().map(|(name, schema)| (name, json(schema))).collect();
    let mut at = followed(json(T::schema()), &named);
    for (known, segment) in path.iter().enumerate() {
        let next = match segment {
            Segment::Map { key } => at["properties"].get(key),
            _ => at.get("items"),
        };
        match next.cloned() {
            Some(next) => at = followed(next, &named),
            None => return (Value::Null, known),
        }
    }
    (at, path.len())
}

/// A schema itself, where another one names it.
fn followed(mut schema: Value, named: &HashMap<String, Value>) -> Value {
    for _ in 0..8 {
        let of = ["oneOf", "anyOf", "allOf"].iter().find_map(|word| schema[*word].as_array());
        let next = match (schema["$ref"].as_str(), of) {
            (Some(name), _) => named.get(name.rsplit('/').next().unwrap_or_default()),
            (None, Some(of)) => of.iter().find(|one| one["type"] != "null"),
            (None, None) => None,
        };
        match next.cloned() {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// What is wrong with the parameters after the question mark, from what their parser says.
pub fn of_query<T: IntoParams>(pairs: &[(String, String)], message: &str) -> String {
    let message = message.strip_prefix("Failed to deserialize query string: ").unwrap_or(message);
    if let Some((unknown, known)) = message.split_once("unknown field `").and_then(|(_, rest)| unknown(rest))
    {
        return format!("there is no parameter {}; there are {}", name(unknown), list(&known, "and"));
    }
    if let Some(missing) = message.strip_prefix("missing field `") {
        return format!("{} is missing", missing.trim_end_matches('`'));
    }
    if let Some(twice) = message.strip_prefix("duplicate field `") {
        return format!("{} is there twice", twice.trim_end_matches('`'));
    }
    let Some((name, reason)) = message.split_once(": ") else { return message.to_owned() };
    let given = pairs.iter().find(|(given, _)| given == name).map_or("", |(_, value)| value);
    let takes = match reason {
        "invalid digit found in string"
        | "cannot parse integer from empty string"
        | "number too large to fit in target type"
        | "number too small to fit in target type" => {
            let all = T::into_params(|| None);
            let all = all.iter().filter(|parameter| parameter.name == name);
            let mut schemas =
                all.map(|parameter| serde_json::to_value(&parameter.schema).unwrap_or_default());
            let schema = schemas.next().unwrap_or_default();
            // The description has a minimum for each type without a sign.
            whole_number(&schema, schema["minimum"].is_null())
        }
        "provided string was not `true` or `false`" => "true or false".to_owned(),
        reason => reason.to_owned(),
    };
    format!("{name} is {:?}; it must be {takes}", cut(given))
}
