//! `hapax probe`: would this service do a write twice?

mod checks;
mod count;
mod effects;

use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};

use crate::cli::{Global, NoPlaces, duration};
use crate::failure::{BROKEN_PROMISE, Failure};
use crate::http::{Request, Target};
use crate::print;
use checks::{Check, Probe, Restart, Verdict};
use count::Count;

/// What the report is made against.
const DRAFT: &str = "draft-ietf-httpapi-idempotency-key-header-07";

/// Check whether a service does a write twice when it is retried; exit 1 if it would
///
/// It sends real writes with an `Idempotency-Key`, so probe a service of a test machine: retries,
/// many at once, hang-ups, other bodies, both forms of the key. Any language, any framework. The
/// report says what draft-ietf-httpapi-idempotency-key-header-07 asks for.
///
/// Two writes are distinguished by the `Location` or the `id` of their answers. If a service gives
/// neither, or to see what became of requests whose answers were lost, say where effects can be
/// counted (`--count`). The count must rise by 1 with each write; it may lag behind.
///
/// A service that has its keys in memory only looks well until its process ends. With `--restart` the
/// probe has it killed and started again, once after a write and once during one.
#[derive(Debug, Args)]
#[command(
    after_help = "Example: hapax probe http://127.0.0.1:8080/orders --body '{\"item\": \"lamp\", \"n\": 1}' \
                        --count http://127.0.0.1:8080/orders"
)]
pub struct ProbeArgs {
    /// The URL to write to, over HTTP
    url: String,
    /// The body of a write that succeeds
    #[arg(long, value_name = "JSON", default_value = "{}")]
    body: String,
    /// Another body that succeeds [default: the body with its first number changed]
    #[arg(long, value_name = "JSON")]
    other_body: Option<String>,
    /// The method
    #[arg(long, default_value = "POST")]
    method: String,
    /// A header for every request, such as `Authorization: Bearer …`; may be repeated
    #[arg(long, value_name = "NAME: VALUE")]
    header: Vec<String>,
    /// A URL to read whose answer is the number of effects, or an array of them
    #[arg(long, value_name = "URL")]
    count: Option<String>,
    /// Where the effects are in the answer to --count (a JSON pointer)
    #[arg(long, value_name = "POINTER", default_value = "")]
    count_at: String,
    /// How long to wait until an effect is counted
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = duration)]
    count_wait: Duration,
    /// Another URL of the service that takes the same body: a key must not replay across both
    #[arg(long, value_name = "URL")]
    other: Option<String>,
    /// A shell command that kills the service, starts it again, and exits
    #[arg(long, value_name = "COMMAND")]
    restart: Option<String>,
    /// How long to wait until the service answers again
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    restart_wait: Duration,
    /// How long to wait for an answer
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    timeout: Duration,
    /// How long the whole probe may take
    #[arg(long, value_name = "TIME", default_value = "10m", value_parser = duration)]
    within: Duration,
    #[command(flatten)]
    no_places: NoPlaces,
}

pub async fn run(global: &Global, args: &ProbeArgs) -> Result<u8, Failure> {
    if let Some(flag) = args.no_places.given() {
        return Err(Failure::config(format!("a service is probed without {flag}")));
    }
    let mut checks = Vec::new();
    let ended = tokio::time::timeout(args.within, probe(args)?.run(&mut checks)).await;
    match ended {
        Ok(run) => run?,
        Err(_) if checks.iter().any(|check| check.verdict == Verdict::Doubles) => checks.push(Check {
            name: "the rest",
            draft: "",
            verdict: Verdict::Unknown,
            message: format!("not probed: the time was over (--within {:?})", args.within),
        }),
        Err(_) => {
            let (made, within) = (checks.len(), args.within);
            return Err(Failure::dependency(
                "unavailable",
                format!(
                    "the probe did not end within {within:?} (--within); {made} checks were made, and found no write that took effect twice"
                ),
            ));
        }
    }
    let doubles = checks.iter().any(|check| check.verdict == Verdict::Doubles);
    if global.json {
        let list: Vec<Value> = checks
            .iter()
            .map(|check| json!({"check": check.name, "verdict": check.verdict.name(), "message": check.message, "section": check.draft}))
            .collect();
        print::json(&json!({"url": args.url, "draft": DRAFT, "doubles": doubles, "checks": list}))?;
    } else {
        let rows: Vec<[String; 3]> = checks
            .iter()
            .map(|check| [check.name.to_owned(), check.verdict.name().to_owned(), check.message.clone()])
            .collect();
        print::table(["CHECK", "VERDICT", "WHAT WAS SEEN"], &rows)?;
        let unknown = checks.iter().any(|check| check.verdict == Verdict::Unknown);
        print::line(match (doubles, unknown) {
            (true, _) => "\nA retry can take effect twice.",
            (false, true) => "\nNo write took effect twice, as far as answers show.",
            (false, false) => "\nNo write took effect twice.",
        })?;
    }
    Ok(if doubles { BROKEN_PROMISE } else { 0 })
}

fn probe(args: &ProbeArgs) -> Result<Probe, Failure> {
    let mut headers = vec![("content-type".to_owned(), "application/json".to_owned())];
    for header in &args.header {
        let plain =
            header.split_once(':').filter(|(name, _)| !name.is_empty() && !header.contains(['\r', '\n']));
        let Some((name, value)) = plain else {
            return Err(Failure::config(format!("--header {header:?} is not a header; write NAME: VALUE")));
        };
        if name.trim().eq_ignore_ascii_case("idempotency-key") {
            return Err(Failure::config("--header: the probe makes the keys itself"));
        }
        headers.push((name.trim().to_ascii_lowercase(), value.trim().to_owned()));
    }
    if args.method.is_empty() || !args.method.bytes().all(|byte| byte.is_ascii_uppercase()) {
        return Err(Failure::config(format!(
            "--method {:?} is not a method; write it like POST",
            args.method
        )));
    }
    let target = Target::parse(&args.url)?;
    let request =
        Request { method: args.method.clone(), target, headers: headers.clone(), body: args.body.clone() };
    let count = match &args.count {
        None => None,
        Some(url) => {
            let (method, target, body) = ("GET".to_owned(), Target::parse(url)?, String::new());
            let request = Request { method, target, headers, body };
            Some(Count::new(request, args.count_at.clone(), args.timeout, args.count_wait))
        }
    };
    let other = match &args.other {
        None => None,
        Some(url) => Some(Request { target: Target::parse(url)?, ..request.clone() }),
    };
    let other_body = args.other_body.clone().or_else(|| changed(&args.body));
    let restart =
        args.restart.as_ref().map(|command| Restart { command: command.clone(), wait: args.restart_wait });
    Ok(Probe { request, other_body, other, restart, count, timeout: args.timeout })
}

/// The same JSON with another number, if it has one.
fn changed(body: &str) -> Option<String> {
    fn change(value: &mut Value) -> bool {
        match value {
            Value::Number(number) => {
                *value = number.as_i64().map_or_else(|| json!(1), |number| json!(number.wrapping_add(1)));
                true
            }
            Value::Array(list) => list.iter_mut().any(change),
            Value::Object(fields) => fields.values_mut().any(change),
            _ => false,
        }
    }
    let mut value: Value = serde_json::from_str(body).ok()?;
    change(&mut value).then(|| value.to_string())
}

#[cfg(test)]
mod tests {
    use super::changed;

    #[test]
    fn another_body_has_another_number() {
        assert_eq!(changed(r#"{"a":{"b":["x",7]}}"#).unwrap(), r#"{"a":{"b":["x",8]}}"#);
        assert_eq!(changed(r#"{"a":1.5}"#).unwrap(), r#"{"a":1}"#);
        for none in ["", "{}", r#"{"a":"b"}"#, "no JSON"] {
            assert_eq!(changed(none), None, "{none}");
        }
    }
}
