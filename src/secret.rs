//! Keeps passwords out of what people see.

/// A URL with its password replaced by `***`. Hides too much rather than too little: a text that is
/// not a URL, or anything before the last `@`, might be a password.
///
/// ```
/// use hapax::config::hide_password;
/// assert_eq!(hide_password("postgres://app:s3cret@db/orders"), "postgres://app:***@db/orders");
/// assert_eq!(hide_password("postgres://db/orders?password=s3cret"), "postgres://db/orders?password=***");
/// assert_eq!(hide_password("sqlite:ledger.db"), "sqlite:ledger.db");
/// assert_eq!(hide_password("cache:redis://me:s3cret@host"), "cache:redis://me:***@host");
/// assert_eq!(hide_password("host=db password=s3cret"), "***");
/// ```
pub fn hide_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once(':') else {
        return if url.is_empty() || url == "embedded" { url.to_owned() } else { "***".to_owned() };
    };
    if !scheme.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'-' | b'.')) {
        return "***".to_owned();
    }
    let Some(rest) = rest.strip_prefix("//") else {
        // A URL within it, as `cache:redis://…` has.
        let nested = rest.contains("://").then(|| format!("{scheme}:{}", hide_password(rest)));
        return nested.unwrap_or_else(|| url.to_owned());
    };
    let (user_info, place) = match rest.rsplit_once('@') {
        Some((user_info, place)) => (Some(user_info), place),
        None => (None, rest),
    };
    let mut out = format!("{scheme}://");
    if let Some(user_info) = user_info {
        match user_info.split_once(':') {
            Some((user, _)) => out.extend([user, ":***@"]),
            None => out.extend([user_info, "@"]),
        }
    }
    let (path, query) = place.split_once('?').unwrap_or((place, ""));
    out.push_str(path);
    for (at, pair) in query.split('&').filter(|pair| !pair.is_empty()).enumerate() {
        out.push(if at == 0 { '?' } else { '&' });
        match pair.split_once('=') {
            Some((name, _)) if name.to_ascii_lowercase().contains("pass") => {
                out.extend([name, "=***"]);
            }
            _ => out.push_str(pair),
        }
    }
    out
}
