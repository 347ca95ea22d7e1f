//! Fingerprints: they tell whether two requests are the same.

use std::collections::HashSet;

use sha2::{Digest as _, Sha256};

use crate::event::{Fingerprint, canonical, members};

/// The most fields of a JSON body that are compared one by one.
const FIELDS_MAX: usize = 32;
/// A longer name of a field is not stored.
const NAME_BYTES_MAX: usize = 128;

/// The parts of a request that must be the same under one key.
#[derive(Debug, Clone, Copy, Default)]
pub struct RequestParts<'r> {
    /// The caller.
    pub principal: Option<&'r str>,
    /// The method.
    pub method: &'r str,
    /// Path and query as sent, never the pattern of a route: one key on `/orders/1` and `/orders/2`
    /// is two requests.
    pub target: &'r str,
    /// The bytes of the body.
    pub body: &'r [u8],
    /// The headers that count, as names in lower case and values, in an order that does not change.
    /// Most requests are the same whatever their headers are.
    pub headers: &'r [(&'r str, &'r [u8])],
    /// Whether a JSON body counts in canonical form, so that white space and the order of its keys do
    /// not matter.
    pub canonical_json: bool,
}

/// The fingerprint of a request, with a hash for each of its parts that can say which one differs.
///
/// All hashes are keyed with the store's secret, so that likely bodies cannot be tried against
/// them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestFingerprint {
    /// The hash of everything.
    pub whole: Fingerprint,
    parts: Vec<(String, String)>,
}

impl RequestFingerprint {
    /// Hashes a request under a store's secret.
    ///
    /// ```
    /// use hapax::keyed::{RequestParts, RequestFingerprint};
    /// let of = |body: &str| {
    ///     let parts = RequestParts { method: "POST", target: "/orders", body: body.as_bytes(), ..Default::default() };
    ///     RequestFingerprint::of(&[7; 32], &parts)
    /// };
    /// let (first, other) = (of(r#"{"item": 1, "amount": 2}"#), of(r#"{"item": 1, "amount": 3}"#));
    /// assert_ne!(first.whole, other.whole);
    /// assert_eq!(first.differing(&other.parts_text()), ["/amount"]);
    /// ```
    pub fn of(secret: &[u8; 32], request: &RequestParts<'_>) -> Self {
        let RequestParts { principal, method, target, body, headers, canonical_json } = *request;
        let whole_body = canonical_json.then(|| canonical_body(body));
        let hashed = whole_body.as_deref().unwrap_or(body);
        let mut hash = Sha256::new();
        hash.update(secret);
        hash.update([u8::from(principal.is_some())]);
        for part in [principal.unwrap_or_default().as_bytes(), method.as_bytes(), target.as_bytes(), hashed] {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        for part in headers.iter().flat_map(|(name, value)| [name.as_bytes(), value]) {
            hash.update((part.len() as u64).to_be_bytes());
            hash.update(part);
        }
        let mut half = [0; 16];
        half.copy_from_slice(&hash.finalize()[..16]);
        let of = |name: &str, bytes: &[u8]| (name.to_owned(), part_hash(secret, name, bytes));
        let mut parts = vec![
            of("principal", principal.unwrap_or_default().as_bytes()),
            of("method", method.as_bytes()),
            of("target", target.as_bytes()),
        ];
        parts.extend(headers.iter().map(|(name, value)| of(&format!("header {name}"), value)));
        match fields(body) {
            Some(fields) => parts.extend(fields.iter().map(|(name, value)| of(name, value))),
            None => parts.push(of("body", hashed)),
        }
        RequestFingerprint { whole: Fingerprint(half), parts }
    }

    /// A fingerprint of your own, which cannot say what differs.
    pub fn opaque(fingerprint: Fingerprint) -> Self {
        RequestFingerprint { whole: fingerprint, parts: Vec::new() }
    }

    /// The hashes of the parts as text, to be stored.
    pub fn parts_text(&self) -> String {
        serde_json::to_string(&self.parts).unwrap_or_default()
    }

    /// Whether stored parts are of a request of this principal. False if they do not say whose it was.
    pub(crate) fn is_by(stored: &str, secret: &[u8; 32], principal: Option<&str>) -> bool {
        let stored: Vec<(String, String)> = serde_json::from_str(stored).unwrap_or_default();
        let asks = part_hash(secret, "principal", principal.unwrap_or_default().as_bytes());
        stored.iter().any(|(name, hash)| name == "principal" && *hash == asks)
    }

    /// Which parts differ from stored ones: `principal`, `method`, `target`, `body`, `header NAME`, or a
    /// field of a JSON object as `/name`. Empty if that is not known.
    pub fn differing(&self, stored: &str) -> Vec<String> {
        let stored: Vec<(String, String)> = serde_json::from_str(stored).unwrap_or_default();
        if stored.is_empty() || self.parts.is_empty() {
            return Vec::new();
        }
        let only = |of: &[(String, String)], other: &[(String, String)]| -> Vec<String> {
            of.iter().filter(|part| !other.contains(part)).map(|(name, _)| name.clone()).collect()
        };
        let mut names = only(&self.parts, &stored);
        names.extend(only(&stored, &self.parts));
        names.sort();
        names.dedup();
        names
    }
}

/// The canonical form of a body. One that has none could be written like the form of another: no form begins with
/// the byte that is put in front of it. An empty one stays empty, which no form is.
fn canonical_body(body: &[u8]) -> Vec<u8> {
    canonical(body).unwrap_or_else(|| if body.is_empty() { Vec::new() } else { [b"\xff", body].concat() })
}

/// The fields of a JSON object, in canonical form; `None` if it is not an object, has too many fields, or one name
/// twice: which of its values came first counts, too.
fn fields(body: &[u8]) -> Option<Vec<(String, Vec<u8>)>> {
    let members = members(body)?;
    let distinct: HashSet<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
    let named = members.len() <= FIELDS_MAX
        && distinct.len() == members.len()
        && members.iter().all(|(name, _)| name.len() <= NAME_BYTES_MAX);
    let pointer = |name: &str| format!("/{}", name.replace('~', "~0").replace('/', "~1"));
    let value = |value: &str| canonical(value.as_bytes()).unwrap_or_else(|| value.as_bytes().to_vec());
    named.then(|| members.iter().map(|(name, of)| (pointer(name), value(of.get()))).collect())
}

/// 64 bits tell two values of one field apart.
fn part_hash(secret: &[u8; 32], name: &str, bytes: &[u8]) -> String {
    let mut hash = Sha256::new();
    hash.update(secret);
    hash.update([0xff]); // no whole fingerprint begins like this
    hash.update((name.len() as u64).to_be_bytes());
    hash.update(name);
    hash.update(bytes);
    let mut half = [0; 8];
    half.copy_from_slice(&hash.finalize()[..8]);
    format!("{:016x}", u64::from_be_bytes(half))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: [u8; 32] = [1; 32];

    fn base() -> RequestParts<'static> {
        RequestParts {
            principal: Some("ann"),
            method: "POST",
            target: "/orders?x=1",
            body: br#"{"a": 1, "b": "two"}"#,
            headers: &[("if-match", b"\"1\"")],
            canonical_json: false,
        }
    }

    #[test]
    fn each_part_counts_and_is_named() {
        let first = RequestFingerprint::of(&SECRET, &base());
        assert_eq!(first, RequestFingerprint::of(&SECRET, &base()));
        let others = [
            (RequestParts { principal: Some("bob"), ..base() }, "principal"),
            (RequestParts { principal: None, ..base() }, "principal"),
            (RequestParts { method: "PATCH", ..base() }, "method"),
            (RequestParts { target: "/orders?x=2", ..base() }, "target"),
            (RequestParts { body: br#"{"a": 1, "b": "three"}"#, ..base() }, "/b"),
            (RequestParts { body: br#"{"a": 1}"#, ..base() }, "/b"),
            (RequestParts { headers: &[], ..base() }, "header if-match"),
            (RequestParts { headers: &[("if-match", b"\"2\"")], ..base() }, "header if-match"),
        ];
        for (other, part) in others {
            let other = RequestFingerprint::of(&SECRET, &other);
            assert_ne!(other.whole, first.whole, "{part}");
            assert_eq!(other.differing(&first.parts_text()), [part]);
        }
        let text = RequestFingerprint::of(&SECRET, &RequestParts { body: b"text", ..base() });
        assert_eq!(text.differing(&first.parts_text()), ["/a", "/b", "body"]);
    }

    /// The canonical form is made to be hashed, and is not JSON.
    #[test]
    fn t282_fields_are_named_in_canonical_form_too() {
        let fingerprint = |body: &[u8]| {
            RequestFingerprint::of(&SECRET, &RequestParts { body, canonical_json: true, ..base() })
        };
        let (first, other) = (fingerprint(br#"{"a":1,"b":{"c":2}}"#), fingerprint(br#"{"b":{"c":3},"a":1}"#));
        assert_eq!(first.differing(&other.parts_text()), ["/b"]);
    }

    #[test]
    fn bytes_count_unless_canonical_json_is_asked_for() {
        let spaced = br#"{ "b": "two", "a": 1 }"#;
        let fingerprint = |body, canonical_json| {
            RequestFingerprint::of(&SECRET, &RequestParts { body, canonical_json, ..base() }).whole
        };
        assert_ne!(fingerprint(spaced, false), fingerprint(base().body, false));
        assert_eq!(fingerprint(spaced, true), fingerprint(base().body, true));
        assert_ne!(
            fingerprint(br#"{"a":1.0,"b":"two"}"#, true),
            fingerprint(base().body, true),
            "numbers as written"
        );
    }

    /// The canonical form of `[1]` is `[1,]`, which a client may send too.
    #[test]
    fn t544_a_body_that_is_no_json_is_not_the_form_of_another() {
        let of = |body: &[u8]| {
            RequestFingerprint::of(&SECRET, &RequestParts { body, canonical_json: true, ..base() })
        };
        for (json, other) in [(&b"[1]"[..], &b"[1,]"[..]), (b"{\"a\":1}", b"{\"a\":1,}")] {
            assert_ne!(of(json).whole, of(other).whole);
            assert!(of(json).differing(&of(other).parts_text()).contains(&"body".to_owned()));
        }
        // A request without a body has the fingerprint that it always had.
        let empty =
            RequestFingerprint::of(&SECRET, &RequestParts { body: b"", canonical_json: false, ..base() });
        assert_eq!(of(b"").whole, empty.whole);
    }

    /// Their order counts, so two orders are two requests, and something has to be named.
    #[test]
    fn t545_names_that_are_there_twice_are_not_compared_one_by_one() {
        let of = |body: &[u8]| {
            RequestFingerprint::of(&SECRET, &RequestParts { body, canonical_json: true, ..base() })
        };
        let (first, other) = (of(br#"{"a":1,"a":2}"#), of(br#"{"a":2,"a":1}"#));
        assert_ne!(first.whole, other.whole);
        assert_eq!(other.differing(&first.parts_text()), ["body"]);
    }

    #[test]
    fn parts_do_not_run_into_each_other() {
        let fingerprint = |method, target| {
            RequestFingerprint::of(&SECRET, &RequestParts { method, target, ..base() }).whole
        };
        assert_ne!(fingerprint("POST", "/a"), fingerprint("POST/", "a"));
        let principal =
            |principal| RequestFingerprint::of(&SECRET, &RequestParts { principal, ..base() }).whole;
        assert_ne!(principal(None), principal(Some("")));
    }

    #[test]
    fn hashes_are_keyed_and_fields_are_bounded() {
        let other = RequestFingerprint::of(&[2; 32], &base());
        let first = RequestFingerprint::of(&SECRET, &base());
        assert!(other.whole != first.whole && other.parts_text() != first.parts_text());
        let many: Vec<String> = (0..33).map(|n| format!("\"f{n}\":{n}")).collect();
        let many = format!("{{{}}}", many.join(","));
        let fingerprint = RequestFingerprint::of(&SECRET, &RequestParts { body: many.as_bytes(), ..base() });
        assert!(fingerprint.parts_text().contains("\"body\"") && !fingerprint.parts_text().contains("/f1"));
        assert!(RequestFingerprint::opaque(first.whole).differing(&first.parts_text()).is_empty());
    }

    #[test]
    fn parts_say_whose_request_it_was_to_who_has_the_secret() {
        let stored = RequestFingerprint::of(&SECRET, &base()).parts_text();
        assert!(RequestFingerprint::is_by(&stored, &SECRET, Some("ann")));
        assert!(
            !RequestFingerprint::is_by(&stored, &SECRET, Some("bob"))
                && !RequestFingerprint::is_by(&stored, &SECRET, None)
        );
        assert!(!RequestFingerprint::is_by(&stored, &[2; 32], Some("ann")));
        let opaque = RequestFingerprint::opaque(Fingerprint([7; 16])).parts_text();
        assert!(
            !RequestFingerprint::is_by(&opaque, &SECRET, None)
                && !RequestFingerprint::is_by("", &SECRET, None)
        );
        // A field of the body that is called like it is another part.
        let posed = RequestParts { principal: None, body: br#"{"principal": "ann"}"#, ..base() };
        let posed = RequestFingerprint::of(&SECRET, &posed).parts_text();
        assert!(!RequestFingerprint::is_by(&posed, &SECRET, Some("ann")));
    }
}
