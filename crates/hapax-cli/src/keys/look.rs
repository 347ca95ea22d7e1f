//! `hapax keys ls` and `hapax keys show`.

use std::str::FromStr;

use clap::Args;
use hapax::Tenant;
use hapax::keyed::{Answer, IdempotencyKey, KeyEntry, KeyStatus, Keys, ListKeys};
use serde_json::{Value, json};

use super::NameArgs;
use crate::cli::{Global, between};
use crate::failure::Failure;
use crate::ledger::look::or_dash;
use crate::print;

#[derive(Debug, Args)]
pub struct ListArgs {
    /// Only keys of this tenant
    #[arg(long)]
    tenant: Option<Tenant>,
    /// Only keys without a tenant
    #[arg(long, conflicts_with = "tenant")]
    no_tenant: bool,
    /// Only keys that have no answer
    #[arg(long)]
    open: bool,
    /// List at most this many, up to 10000
    #[arg(long, default_value_t = 100, value_parser = between::<u16>(1, 10_000))]
    limit: u16,
    /// Continue after a page, with the cursor printed as `next`
    #[arg(long, value_name = "CURSOR")]
    after: Option<Cursor>,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Print the body of the answer too
    #[arg(long)]
    body: bool,
    #[command(flatten)]
    name: NameArgs,
}

/// The last key of a page: tenant and key, percent-encoded, with a slash between them.
#[derive(Debug, Clone)]
struct Cursor(Option<Tenant>, IdempotencyKey);

impl FromStr for Cursor {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || "it is not a cursor; take what `more:` (with --json: `next`) said".to_owned();
        let (tenant, key) = text.split_once('/').ok_or_else(bad)?;
        let (tenant, key) = (decoded(tenant).ok_or_else(bad)?, decoded(key).ok_or_else(bad)?);
        let tenant = if tenant.is_empty() { None } else { Some(Tenant::new(tenant).map_err(|_| bad())?) };
        Ok(Cursor(tenant, IdempotencyKey::new(key).map_err(|_| bad())?))
    }
}

impl std::fmt::Display for Cursor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tenant = self.0.as_ref().map_or("", Tenant::as_str);
        write!(f, "{}/{}", encoded(tenant), encoded(self.1.as_str()))
    }
}

fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._~-".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        if *first == b'%' {
            let hex = std::str::from_utf8(after.get(..2)?).ok()?;
            bytes.push(u8::from_str_radix(hex, 16).ok()?);
            rest = &after[2..];
        } else {
            bytes.push(*first);
            rest = after;
        }
    }
    String::from_utf8(bytes).ok()
}

pub async fn list(global: &Global, keys: &dyn Keys, args: &ListArgs) -> Result<u8, Failure> {
    let limit = usize::from(args.limit);
    let which = ListKeys {
        tenant: (args.no_tenant || args.tenant.is_some()).then(|| args.tenant.clone()),
        open_only: args.open,
        after: args.after.clone().map(|Cursor(tenant, key)| (tenant, key)),
        limit,
    };
    let page = keys.list(&which).await?;
    let full = page.last().filter(|_| page.len() == limit);
    let next = full.map(|last| Cursor(last.tenant.clone(), last.key.clone()).to_string());
    if global.json {
        let entries: Vec<_> = page.iter().map(entry_json).collect();
        print::json(&json!({"keys": entries, "next": next}))?;
        return Ok(0);
    }
    let rows: Vec<_> = page
        .iter()
        .map(|entry| {
            [
                or_dash(entry.tenant.as_ref()),
                entry.key.to_string(),
                entry.state.to_string(),
                or_dash(entry.status.as_ref()),
                entry.begun_at.to_string(),
                or_dash(entry.settled_at.as_ref()),
            ]
        })
        .collect();
    print::table(["tenant", "key", "state", "status", "begun", "answered"], &rows)?;
    if let Some(next) = next {
        print::line(&format!("more: --after {next}"))?;
    }
    Ok(0)
}

pub async fn show(global: &Global, keys: &dyn Keys, args: &ShowArgs) -> Result<u8, Failure> {
    let (tenant, key) = (args.name.tenant.as_ref(), &args.name.key);
    let Some(entry) = keys.entry(tenant, key).await? else {
        let reason = why_missing(&keys.get(tenant, key).await?);
        return Err(hapax::Error::NotFound(format!("there is no key {}; {reason}", args.name.shown())).into());
    };
    let mut value = entry_json(&entry);
    match keys.get(tenant, key).await? {
        KeyStatus::Done(kept) => answer_json(&mut value, &kept.answer, args.body),
        KeyStatus::Running { until } => value["leased_until"] = json!(until.map(|until| until.to_string())),
        _ => {}
    }
    print::fields(global.json, &value)?;
    Ok(0)
}

/// Why a key is not listed.
pub fn why_missing(status: &KeyStatus) -> &'static str {
    match status {
        KeyStatus::Expired => "its answer, if it had one, was swept: it is older than the retention",
        KeyStatus::Running { .. } => "a request with it runs in a transaction, which is still open",
        _ => "no request with it was kept (a key belongs to a tenant: --tenant)",
    }
}

/// A key as JSON, for tools.
pub fn entry_json(entry: &KeyEntry) -> Value {
    json!({
        "tenant": entry.tenant.as_ref().map(Tenant::as_str),
        "key": entry.key.as_str(),
        "state": entry.state.label(),
        "token": entry.token.0,
        "begun_at": entry.begun_at.to_string(),
        "answered_at": entry.settled_at.map(|at| at.to_string()),
        "status": entry.status,
        "decided_at": entry.resolved.as_ref().map(|of| of.at.to_string()),
        "decided_by": entry.resolved.as_ref().map(|of| of.by.as_str()),
        "reason": entry.resolved.as_ref().map(|of| of.reason.as_str()),
    })
}

/// Adds an answer; its body only on request, because it may be large or private.
fn answer_json(value: &mut Value, answer: &Answer, body: bool) {
    let header = |(name, value): &(String, Vec<u8>)| json!([name, String::from_utf8_lossy(value)]);
    value["status"] = json!(answer.status);
    value["headers"] = answer.headers.iter().map(header).collect();
    value["body_bytes"] = json!(answer.body.len());
    if body {
        value["body"] = json!(String::from_utf8_lossy(&answer.body));
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

    use super::*;

    #[test]
    fn a_cursor_comes_back_whatever_the_names_are() {
        for (tenant, key) in [(None, "a"), (Some("a/b c%"), "/%2F~"), (Some("\u{e9}\u{1b}"), "\"")] {
            let cursor = Cursor(tenant.map(|of| Tenant::new(of).unwrap()), IdempotencyKey::new(key).unwrap());
            let text = cursor.to_string();
            assert!(
                text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._~-%/".contains(&byte)),
                "{text}"
            );
            let back: Cursor = text.parse().unwrap();
            assert_eq!((back.0, back.1), (cursor.0, cursor.1));
        }
        for bad in ["", "a", "/", "/%4", "/%zz", "/%ff", "%00/a", "/a b"] {
            assert!(bad.parse::<Cursor>().is_err(), "{bad:?}");
        }
    }
}
