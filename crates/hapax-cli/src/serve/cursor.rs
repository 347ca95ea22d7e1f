//! Where a reader of one tenant goes on in the journal.
//!
//! A position of an object store has the name of an object: the seq of an event that may be another's,
//! and a hash by which its tenant and its aggregate can be guessed. So it is sealed: the reader can send
//! it back, and read nothing in it. A position that is a number says no more than how far the journal
//! is, and stays as it is.

use hapax::journal::Position;
use hapax::{Error, Result};
use sha2::{Digest as _, Sha256};

/// What a sealed position begins with; no position does.
const SEALED: &str = "~";
const TAG_BYTES: usize = 16;

/// The text of a position for a reader of one tenant.
pub fn seal(secret: &[u8; 32], position: &Position) -> String {
    if position.name().is_none() {
        return position.to_string();
    }
    let text = position.to_string().into_bytes();
    let tag = tag(secret, &text);
    let mut sealed = String::from(SEALED);
    for byte in tag.into_iter().chain(mixed(secret, &tag, &text)) {
        use std::fmt::Write as _;
        let _ = write!(sealed, "{byte:02x}"); // writing to a String cannot fail
    }
    sealed
}

/// The position in a sealed text, or in the plain text of a position.
pub fn open(secret: &[u8; 32], text: &str) -> Result<Position> {
    let Some(sealed) = text.strip_prefix(SEALED) else { return text.parse() };
    let bad = || Error::invalid("after", "this server did not issue it");
    let digit = |at: usize| sealed.get(at..at + 2).and_then(|two| u8::from_str_radix(two, 16).ok());
    let bytes: Vec<u8> = (0..sealed.len()).step_by(2).map(digit).collect::<Option<_>>().ok_or_else(bad)?;
    let (given, mixture) = bytes.split_first_chunk::<TAG_BYTES>().ok_or_else(bad)?;
    let text = mixed(secret, given, mixture);
    if tag(secret, &text) != *given {
        return Err(bad());
    }
    String::from_utf8(text).map_err(|_| bad())?.parse()
}

/// Depends on the secret and on every byte of the text: the start of its keystream, and the proof that
/// it is ours.
fn tag(secret: &[u8; 32], text: &[u8]) -> [u8; TAG_BYTES] {
    let inner = Sha256::new().chain_update(secret).chain_update(b"cursor tag").chain_update(text).finalize();
    let outer = Sha256::new().chain_update(secret).chain_update(b"cursor end").chain_update(inner).finalize();
    let mut tag = [0; TAG_BYTES];
    tag.copy_from_slice(&outer[..TAG_BYTES]);
    tag
}

/// The bytes mixed with a keystream; the same again gives the bytes back.
fn mixed(secret: &[u8; 32], tag: &[u8; TAG_BYTES], bytes: &[u8]) -> Vec<u8> {
    let block = |number: usize| {
        let hash = Sha256::new().chain_update(secret).chain_update(b"cursor key").chain_update(tag);
        hash.chain_update((number as u64).to_be_bytes()).finalize()
    };
    bytes
        .chunks(32)
        .enumerate()
        .flat_map(|(number, chunk)| {
            let key = block(number);
            chunk.iter().zip(key).map(|(byte, key)| byte ^ key).collect::<Vec<_>>()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t242_a_sealed_position_comes_back_and_shows_nothing() {
        let secret = [7; 32];
        for name in ["z", "acme_.order-17.000003", &"long".repeat(50)] {
            let position = Position::named(1_772_000_000_000, name);
            let sealed = seal(&secret, &position);
            assert!(sealed.starts_with('~') && !sealed.contains(name), "{sealed}");
            let hidden: Vec<u8> = (1..sealed.len() - 1)
                .step_by(2)
                .map(|at| u8::from_str_radix(&sealed[at..at + 2], 16).unwrap())
                .collect();
            assert!(!hidden.windows(name.len()).any(|part| part == name.as_bytes()) || name.len() < 3);
            assert_eq!(open(&secret, &sealed).unwrap(), position);
            assert!(open(&[8; 32], &sealed).is_err(), "another server's");
            for at in 1..sealed.len() {
                let mut changed = sealed.clone();
                let other = if &sealed[at..=at] == "0" { "1" } else { "0" };
                changed.replace_range(at..=at, other);
                assert!(open(&secret, &changed).is_err(), "{changed}");
            }
        }
        assert_eq!(seal(&secret, &Position::of(17)), "17");
        assert_eq!(open(&secret, "17/a").unwrap(), Position::named(17, "a"));
        for bad in ["~", "~0", "~é", "~zz", "~00112233445566778899aabbccddeeff", "x"] {
            assert!(open(&secret, bad).is_err(), "{bad}");
        }
    }

    /// Whatever a client sends gives a position or an error, and only the server that sealed a cursor opens it.
    #[test]
    fn what_clients_send_is_a_position_or_refused() {
        let (secret, mut state) = ([7; 32], 17_u64);
        let mut next = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize
        };
        let seeds = [
            seal(&secret, &Position::named(17, "acme_.order-17.000003")),
            "17/a".into(),
            "~".into(),
            "é~+f/".into(),
        ];
        for _ in 0..20_000 {
            let mut text: Vec<char> = seeds[next() % seeds.len()].chars().collect();
            for _ in 0..next() % 4 {
                let at = next() % (text.len() + 1);
                match next() % 3 {
                    0 => text.truncate(at),
                    1 => text.insert(at, ['~', '+', 'f', '0', '/', '\u{1F600}', '\0'][next() % 7]),
                    _ if at < text.len() => text[at] = ['0', '-', 'F', '.'][next() % 4],
                    _ => {}
                }
            }
            let text: String = text.into_iter().collect();
            if let Ok(position) = open(&secret, &text) {
                assert_eq!(open(&secret, &seal(&secret, &position)).unwrap(), position, "{text:?}");
            }
        }
    }
}
