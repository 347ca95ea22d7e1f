//! Hides what looks like a secret in a reason. A reason is whatever a handler or an operator wrote, and quotes what failed.

/// What stands instead of a secret.
const HIDDEN: &str = "***";
/// Names whose value is a secret, in lower case.
const NAMES: [&str; 14] = [
    "password",
    "passwd",
    "pwd",
    "secret",
    "token",
    "api_key",
    "api-key",
    "apikey",
    "access_key",
    "access-key",
    "accesskey",
    "private_key",
    "private-key",
    AUTHORIZATION,
];
/// Before its value there may be a scheme.
const AUTHORIZATION: &str = "authorization";
/// A header whose value goes on to the end of its line: pairs, with spaces between them.
const COOKIE: &str = "cookie";
/// Words before a secret, in lower case.
const SCHEMES: [&str; 2] = ["bearer ", "basic "];

/// A text without the passwords of URLs, the values of names like `password` and `x-api-key`, cookies, and bearer
/// tokens.
pub fn masked(text: &str) -> String {
    let lower = text.to_ascii_lowercase(); // as long as the text, byte for byte
    let mut spans = Vec::new();
    spans.extend(lower.match_indices("://").filter_map(|(at, _)| password(text, at + 3)));
    for name in NAMES {
        let end: fn(&str, usize) -> usize = if name == AUTHORIZATION { end_of_credentials } else { end };
        spans.extend(lower.match_indices(name).filter_map(|(at, _)| value(text, at + name.len(), end)));
    }
    let cookies = lower.match_indices(COOKIE);
    spans.extend(cookies.filter_map(|(at, _)| value(text, at + COOKIE.len(), end_of_line)));
    for scheme in SCHEMES {
        spans.extend(lower.match_indices(scheme).map(|(at, _)| {
            let from = at + scheme.len();
            (from, end(text, from))
        }));
    }
    spans.sort_unstable();
    let (mut out, mut done) = (String::with_capacity(text.len()), 0);
    for (from, to) in spans {
        if to > done && to > from {
            out.push_str(text.get(done..from.max(done)).unwrap_or_default());
            if from >= done {
                out.push_str(HIDDEN);
            }
            done = to;
        }
    }
    out.push_str(text.get(done..).unwrap_or_default());
    out
}

/// Where a word from here on ends.
fn end(text: &str, from: usize) -> usize {
    let stops =
        |c: char| c.is_whitespace() || matches!(c, '"' | '\'' | ',' | ';' | '&' | ')' | '}' | '>' | '<');
    let rest = text.get(from..).unwrap_or_default();
    from + rest.find(stops).unwrap_or(rest.len())
}

/// Where a scheme and what follows it end, or a word.
fn end_of_credentials(text: &str, from: usize) -> usize {
    let rest = text.get(from..).unwrap_or_default().to_ascii_lowercase();
    let scheme = SCHEMES.iter().find(|scheme| rest.starts_with(**scheme));
    end(text, from + scheme.map_or(0, |scheme| scheme.len()))
}

fn end_of_line(text: &str, from: usize) -> usize {
    let rest = text.get(from..).unwrap_or_default();
    from + rest.find(['\r', '\n', '"', '\'']).unwrap_or(rest.len())
}

/// The password of a URL whose authority begins here.
fn password(text: &str, from: usize) -> Option<(usize, usize)> {
    let to = from
        + text[from..]
            .find(|c: char| c.is_whitespace() || matches!(c, '"' | '\''))
            .unwrap_or(text.len() - from);
    let user_info = text[from..to].rsplit_once('@')?.0;
    let colon = user_info.find(':')?;
    Some((from + colon + 1, from + user_info.len()))
}

/// The value of a name that ends here: after `=` or `:`, in quotes or up to an `end`.
fn value(text: &str, from: usize, end: fn(&str, usize) -> usize) -> Option<(usize, usize)> {
    let rest = text[from..].trim_start_matches(['"', '\'', '\\']).trim_start();
    let rest = rest.strip_prefix(['=', ':'])?.trim_start();
    let rest = rest.trim_start_matches('\\');
    let quote = rest.chars().next().filter(|c| matches!(c, '"' | '\''));
    let rest = quote.map_or(rest, |_| &rest[1..]);
    let from = text.len() - rest.len();
    let to = match quote {
        Some(quote) => from + rest.find(quote).unwrap_or(rest.len()),
        None => end(text, from),
    };
    Some((from, to))
}

#[cfg(test)]
mod tests {
    use super::masked;

    #[test]
    fn secrets_are_hidden_and_nothing_else_is() {
        for (text, wanted) in [
            ("no such order", "no such order"),
            ("", ""),
            ("pg: postgres://me:s3:cr@t@db/x is away", "pg: postgres://me:***@db/x is away"),
            ("GET https://h:80/p failed", "GET https://h:80/p failed"),
            ("host=db password=s3cret user=me", "host=db password=*** user=me"),
            (r#"{"password": "s3 cret", "n": 1}"#, r#"{"password": "***", "n": 1}"#),
            (r#"{\"api_key\":\"s3cret\"}"#, r#"{\"api_key\":\"***"}"#),
            ("401: Authorization: Bearer abc.def-1, again", "401: Authorization: ***, again"),
            ("x-api-key: s3cret, again", "x-api-key: ***, again"),
            ("X-Api-Key=s3cret&n=1", "X-Api-Key=***&n=1"),
            ("Set-Cookie: sid=s3cret; Path=/\nnext", "Set-Cookie: ***\nnext"),
            ("cookie: a=s3cret; b=s3cret", "cookie: ***"),
            (r#"{"cookie": "a=s3cret; b=c", "n": 1}"#, r#"{"cookie": "***", "n": 1}"#),
            ("proxy-authorization: Basic s3cret==", "proxy-authorization: ***"),
            ("{'authorization': 's3cret'}", "{'authorization': '***'}"),
            ("sent BEARER s3cret", "sent BEARER ***"),
            ("ü token=é; ü", "ü token=***; ü"),
            ("a token was missing", "a token was missing"),
        ] {
            assert_eq!(masked(text), wanted, "{text}");
        }
    }
}
