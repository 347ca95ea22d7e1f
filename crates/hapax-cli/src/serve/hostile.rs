//! Headers made at random, beside the corpora of `fuzz/`: what reads them lives in this crate, where no fuzz target
//! reaches it. `HAPAX_SEED` repeats a run.

use std::hash::{BuildHasher as _, Hasher as _};

use axum::http::header::{AUTHORIZATION, COOKIE, HeaderName, IF_MATCH};
use axum::http::{HeaderMap, HeaderValue};

use super::{auth, records, session};

/// What these parsers may stumble over.
const PIECES: [&[u8]; 24] = [
    b"\"",
    b"W/",
    b"0",
    b"7",
    b"18446744073709551615",
    b"18446744073709551616",
    b"-1",
    b"+",
    b"*",
    b",",
    b" ",
    b"\t",
    b";",
    b"=",
    b"hapax_token",
    b"hapax_token=",
    b"HAPAX_TOKEN=",
    b"hpx_a",
    b"Bearer ",
    b"bearer",
    b"Basic ",
    b"\xff",
    b"\xc3\xa9",
    b"1",
];

/// A step of splitmix64.
fn next(state: &mut u64) -> usize {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    ((mixed ^ (mixed >> 27)) >> 33) as usize
}

fn made(state: &mut u64, name: &HeaderName) -> HeaderMap {
    let mut headers = HeaderMap::new();
    let count = [1, 1, 1, 0, 2][next(state) % 5];
    for _ in 0..count {
        let value: Vec<u8> =
            (0..next(state) % 6).flat_map(|_| PIECES[next(state) % PIECES.len()]).copied().collect();
        headers.append(name, HeaderValue::from_bytes(&value).unwrap());
    }
    headers
}

/// The value of the header, if there is one and it is text.
fn only(headers: &HeaderMap) -> Option<&str> {
    headers.values().next().filter(|_| headers.len() == 1)?.to_str().ok()
}

#[test]
fn t547_random_headers_are_read_as_what_they_are_or_refused() {
    let given = std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = given.unwrap_or_else(|| std::hash::RandomState::new().build_hasher().finish());
    println!("HAPAX_SEED={seed}");
    let mut state = seed;
    for _ in 0..100_000 {
        let headers = made(&mut state, &IF_MATCH);
        let digits = only(&headers).filter(|text| text.len() > 2);
        let digits = digits.and_then(|text| text.strip_prefix('"')?.strip_suffix('"'));
        let digits = digits.filter(|digits| !digits.contains(|c: char| !c.is_ascii_digit()));
        let seq: Option<u64> = digits.and_then(|digits| digits.parse().ok());
        match records::expected(&headers, None) {
            Ok(read) => assert_eq!(Some(read), seq, "{headers:?}"),
            Err(_) => assert_eq!(seq, None, "{headers:?}"),
        }
        if let Some(seq) = seq {
            assert!(records::expected(&headers, Some(seq)).is_ok_and(|read| read == seq));
            assert!(records::expected(&headers, Some(seq ^ 1)).is_err(), "two that differ");
        }

        let headers = made(&mut state, &COOKIE);
        let texts = headers.values().filter_map(|value| value.to_str().ok());
        let ours: Vec<&str> = texts
            .flat_map(|text| text.split(';'))
            .filter_map(|pair| pair.trim().strip_prefix("hapax_token="))
            .collect();
        let one = if let [one] = ours[..] { Some(one) } else { None };
        assert_eq!(session::token(&headers), one, "{headers:?}");

        let headers = made(&mut state, &AUTHORIZATION);
        match auth::bearer(&headers) {
            Ok(token) => {
                let text = only(&headers).unwrap_or_else(|| panic!("{headers:?}"));
                assert!(text.is_char_boundary(7) && text[..7].eq_ignore_ascii_case("bearer "), "{headers:?}");
                assert_eq!(text[7..].trim_matches(' '), token);
            }
            Err(sentence) => {
                assert!(!sentence.contains("hpx_a") && !sentence.chars().any(char::is_control), "{sentence}");
            }
        }
    }
}
