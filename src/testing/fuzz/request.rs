//! What decides between a replay and a refusal: the canonical form of a body, and the fingerprint of a request.

use std::collections::BTreeMap;

use serde_json::value::RawValue;

use crate::event::{Fingerprint, canonical, depth, members};
use crate::keyed::{RequestFingerprint, RequestParts};

/// Two bodies, and the value of a header of the second request, with NULs between them. Bodies have equal canonical
/// forms if and only if they are the same value, and what differs is named: not more, and not less.
pub fn request(data: &[u8]) {
    let mut parts = data.splitn(3, |byte| *byte == 0);
    let (a, b) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    let if_match = parts.next().unwrap_or(b"\"1\"");

    let (form_of_a, form_of_b) = (canonical(a), canonical(b));
    let are_equal = match (&form_of_a, &form_of_b) {
        (Some(form_of_a), Some(form_of_b)) => {
            let are_equal = same(text(a), text(b));
            assert_eq!(form_of_a == form_of_b, are_equal, "the form is that of the value");
            are_equal
        }
        (None, None) => a == b,
        _ => false,
    };
    if let Some(form) = &form_of_a {
        let spaced = [b" \r\n", a, b"\t"].concat();
        assert_eq!(canonical(&spaced).as_ref(), Some(form), "white space around it");
    }
    let event = |body| Fingerprint::of(None, None, None, body);
    assert_eq!(event(a) == event(b), are_equal, "fingerprints of events");

    let of = |body, if_match| {
        let headers: &[(&str, &[u8])] = &[("if-match", if_match)];
        let parts = RequestParts {
            method: "PUT",
            target: "/x",
            body,
            headers,
            canonical_json: true,
            ..Default::default()
        };
        RequestFingerprint::of(&[7; 32], &parts)
    };
    let (first, again) = (of(a, b"\"1\""), of(b, if_match));
    let is_same_header = if_match == b"\"1\"";
    assert_eq!(first.whole == again.whole, are_equal && is_same_header, "fingerprints of requests");
    let named = again.differing(&first.parts_text());
    assert_eq!(named, first.differing(&again.parts_text()), "whichever of them came first");
    assert_eq!(named.iter().any(|name| name == "header if-match"), !is_same_header, "{named:?}");
    let of_body: Vec<_> = named.iter().filter(|name| *name != "header if-match").collect();
    assert!(!are_equal || of_body.is_empty(), "nothing of equal bodies differs: {named:?}");
    if form_of_a.is_none() && form_of_b.is_none() {
        return; // compared as they were sent, so white space may be all that differs
    }
    assert!(are_equal || !of_body.is_empty(), "something is named");
    if let (Some(fields), Some(others)) = (fields(a), fields(b)) {
        let is_other = |name: &&String| match (fields.get(*name), others.get(*name)) {
            (Some(one), Some(other)) => !same(one, other),
            _ => true,
        };
        let mut differing: Vec<_> = fields.keys().chain(others.keys()).filter(is_other).collect();
        differing.sort();
        differing.dedup();
        assert_eq!(of_body, differing, "each field that differs, and no other");
    }
}

fn text(json: &[u8]) -> &str {
    std::str::from_utf8(json).expect("what has a canonical form is text")
}

/// Whether two JSON texts are the same value: members in any order, those of one name in theirs; numbers as written.
fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.trim(), b.trim());
    let kind = |json: &str| json.bytes().next();
    match (kind(a), kind(b)) {
        (Some(b'{'), Some(b'{')) => {
            let (Some(a), Some(b)) = (by_name(a.as_bytes()), by_name(b.as_bytes())) else { return false };
            let are_same = |(a, b): (&Vec<&str>, &Vec<&str>)| {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b))
            };
            a.keys().eq(b.keys()) && a.values().zip(b.values()).all(are_same)
        }
        (Some(b'['), Some(b'[')) => {
            let of = |json| serde_json::from_str::<Vec<&RawValue>>(json).unwrap_or_default();
            let (a, b) = (of(a), of(b));
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a.get(), b.get()))
        }
        (Some(b'"'), Some(b'"')) => {
            let of = |json| serde_json::from_str::<String>(json).ok();
            of(a) == of(b)
        }
        _ => a == b,
    }
}

/// The values of each name, in their order.
fn by_name(json: &[u8]) -> Option<BTreeMap<String, Vec<&str>>> {
    let mut all = BTreeMap::<_, Vec<_>>::new();
    for (name, value) in members(json)? {
        all.entry(name).or_default().push(value.get());
    }
    Some(all)
}

/// The fields of a body that are compared one by one, as pointers.
fn fields(body: &[u8]) -> Option<BTreeMap<String, &str>> {
    let all = by_name(body).filter(|all| all.len() <= 32 && depth(body) <= 100)?;
    let is_compared = |(name, values): (&String, &Vec<&str>)| name.len() <= 128 && values.len() == 1;
    if !all.iter().all(is_compared) || canonical(body).is_none() {
        return None;
    }
    let pointer = |name: String| format!("/{}", name.replace('~', "~0").replace('/', "~1"));
    Some(all.into_iter().map(|(name, values)| (pointer(name), values[0])).collect())
}
