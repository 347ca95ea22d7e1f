//! Writes changes in bulk, each with its own outcome.

use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::check_generation;
use super::client::{Client, parsed, reason_of};
use crate::error::{Error, Result};
use crate::projection::{Applied, Change, Name};

/// How many bytes and changes one request has.
const REQUEST_BYTES: usize = 4 << 20;
const REQUEST_CHANGES: usize = 500;
/// The longest field and value together that the engine indexes, in bytes.
const TERM_BYTES_MAX: usize = 32_000;

/// The first line of a change.
#[derive(Serialize)]
struct Action<'a> {
    index: Target<'a>,
}

#[derive(Serialize)]
struct Target<'a> {
    #[serde(rename = "_id")]
    id: &'a str,
    version: u64,
    version_type: &'a str,
}

/// The second line: the document. A deletion has no payload.
#[derive(Serialize)]
struct Written<'c> {
    tenant: String,
    module: &'c str,
    id: String,
    seq: u64,
    created_at: String,
    updated_at: String,
    deleted: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    payload: Option<&'c RawValue>,
    /// Instead of `payload`, if that has a text that is too long to be indexed.
    #[serde(skip_serializing_if = "Option::is_none")]
    large_payload: Option<&'c RawValue>,
}

/// One answer of many.
#[derive(Deserialize)]
struct Answers {
    items: Vec<Item>,
}

#[derive(Deserialize)]
struct Item {
    index: Outcome,
}

#[derive(Deserialize)]
struct Outcome {
    status: u16,
    error: Option<Value>,
}

impl Client {
    /// Applies changes through an alias. A missing alias makes no index: nothing is written.
    pub(super) async fn apply(&self, alias: &str, changes: &[Change]) -> Result<Vec<Applied>> {
        let mut answers = Vec::with_capacity(changes.len());
        let (mut body, mut count) = (String::new(), 0);
        for change in changes {
            let lines = lines(change)?;
            if count > 0 && (count >= REQUEST_CHANGES || body.len() + lines.len() > REQUEST_BYTES) {
                answers.extend(self.bulk(alias, std::mem::take(&mut body), count).await?);
                count = 0;
            }
            body.push_str(&lines);
            count += 1;
        }
        if count > 0 {
            answers.extend(self.bulk(alias, body, count).await?);
        }
        Ok(answers)
    }

    async fn bulk(&self, alias: &str, body: String, count: usize) -> Result<Vec<Applied>> {
        let path = format!("{alias}/_bulk?require_alias=true");
        let answer = self.ok(Method::POST, &path, Some(body), "writing documents").await?;
        let answers: Answers = parsed(&answer)?;
        if answers.items.len() != count {
            return Err(Error::Corrupt(format!("{count} changes had {} answers", answers.items.len())));
        }
        Ok(answers.items.into_iter().map(|item| applied(&item.index)).collect())
    }
}

/// What an answer says about a change.
fn applied(outcome: &Outcome) -> Applied {
    let reason = || {
        let cause = outcome.error.as_ref().map(reason_of).unwrap_or_default();
        format!("the search engine answered {}: {cause}", outcome.status)
    };
    match outcome.status {
        200..=299 => Applied::Newer,
        409 => Applied::Stale,
        400 => Applied::Rejected { reason: reason() },
        // It is full, blocked, or its alias is missing: that is not about this change.
        403 | 404 | 429 | 503 => Applied::Busy { reason: reason() },
        _ => Applied::Failed { reason: reason() },
    }
}

/// The two lines of a change.
fn lines(change: &Change) -> Result<String> {
    check_generation(change.version.generation())?;
    let unwritable = |error: serde_json::Error| Error::Corrupt(format!("a change is not JSON: {error}"));
    let name = Name::of(change).to_string();
    let target = Target { id: &name, version: change.version.as_u64(), version_type: "external" };
    let payload: Option<&RawValue> = match &change.payload {
        Some(payload) => Some(serde_json::from_str(payload.as_str()).map_err(unwritable)?),
        None => None,
    };
    let is_large = payload.is_some_and(|payload| is_large(payload.get()));
    let written = Written {
        tenant: change.tenant.hyphenated().to_string(),
        module: change.module.as_str(),
        id: change.id.hyphenated().to_string(),
        seq: change.version.seq(),
        created_at: change.created_at.to_string(),
        updated_at: change.updated_at.to_string(),
        deleted: change.payload.is_none(),
        payload: payload.filter(|_| !is_large),
        large_payload: payload.filter(|_| is_large),
    };
    let mut lines = serde_json::to_string(&Action { index: target }).map_err(unwritable)?;
    lines.push('\n');
    lines.push_str(&serde_json::to_string(&written).map_err(unwritable)?);
    lines.push('\n');
    Ok(lines)
}

/// Whether a payload has a value that is too long to be indexed with its path.
pub(super) fn is_large(payload: &str) -> bool {
    payload.len() > TERM_BYTES_MAX
        && serde_json::from_str::<Value>(payload).map_or(true, |value| longest(&value) > TERM_BYTES_MAX)
}

/// The length of the longest path with its value.
fn longest(value: &Value) -> usize {
    match value {
        Value::Object(members) => {
            members.iter().map(|(key, value)| key.len() + 1 + longest(value)).max().unwrap_or(0)
        }
        Value::Array(values) => values.iter().map(longest).max().unwrap_or(0),
        Value::String(text) => text.len(),
        Value::Number(_) | Value::Bool(_) | Value::Null => 64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t322_each_status_has_its_meaning() {
        let of = |status| applied(&Outcome { status, error: Some(serde_json::json!({"reason": "why"})) });
        assert_eq!((of(200), of(201), of(409)), (Applied::Newer, Applied::Newer, Applied::Stale));
        for status in [403, 404, 429, 503] {
            assert!(matches!(of(status), Applied::Busy { reason } if reason.contains("why")), "{status}");
        }
        assert!(matches!(of(400), Applied::Rejected { reason } if reason.contains("why")));
        assert!(matches!(of(500), Applied::Failed { .. }));
    }

    #[test]
    fn only_what_is_too_long_with_its_path_is_large() {
        let text =
            |length: usize| format!(r#"{{"a":{{"b":"{}"}},"c":["{}"]}}"#, "x".repeat(length), "y".repeat(9));
        assert!(!is_large(&text(100)) && !is_large(&text(31_990)) && is_large(&text(32_100)));
        let many = format!("[{}]", vec![r#""some text""#; 10_000].join(","));
        assert!(many.len() > TERM_BYTES_MAX && !is_large(&format!(r#"{{"many":{many}}}"#)));
    }
}
