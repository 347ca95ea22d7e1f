//! The text of an API token: an id that everyone may see, a secret that is shown once, and a checksum.

use std::fmt;

use sha2::{Digest as _, Sha256};
use uuid::Uuid;

use crate::error::{Error, Result};

/// The prefix of every token, so that people and secret scanners recognise one.
const PREFIX: &str = "hpx_";
/// Crockford's alphabet: nothing looks like anything else, and text sorts as the bytes do.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ID_CHARS: usize = 16;
const SECRET_CHARS: usize = 32;
const CHECK_CHARS: usize = 6;

/// The id of an API token. It is not secret: it names the token in lists, logs and audit rows, and it
/// stays the same when the secret is rotated. Ids sort by the time at which they were made.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenId(String);

impl TokenId {
    /// Validates an id.
    ///
    /// ```
    /// use hapax::access::{ApiToken, TokenId};
    /// let token = ApiToken::generate();
    /// assert_eq!(&TokenId::new(token.id().as_str()).unwrap(), token.id());
    /// assert!(TokenId::new("no id").is_err());
    /// ```
    pub fn new(text: impl Into<String>) -> Result<Self> {
        let text = text.into();
        if text.len() == ID_CHARS && text.bytes().all(|b| ALPHABET.contains(&b)) {
            return Ok(TokenId(text));
        }
        Err(Error::invalid("token id", format!("it needs {ID_CHARS} of 0-9 and a-z without i, l, o and u")))
    }

    fn fresh() -> Self {
        let mut bytes = [0; 10];
        bytes[..6].copy_from_slice(&Uuid::now_v7().as_bytes()[..6]);
        bytes[6..].copy_from_slice(&Uuid::new_v4().as_bytes()[..4]);
        TokenId(encode(&bytes))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl fmt::Debug for TokenId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An API token with its secret: `hpx_`, the id, `_`, a secret of 160 random bits and a checksum.
///
/// The checksum tells a mistyped or truncated token from an unknown one without a query of the
/// store. It is not protection: anyone can compute it. `Debug` shows the id only.
///
/// ```
/// use hapax::access::ApiToken;
/// let token = ApiToken::generate();
/// let text = token.expose();
/// assert!(text.starts_with("hpx_") && text.len() == 59);
/// assert_eq!(ApiToken::parse(text).unwrap().id(), token.id());
/// assert!(ApiToken::parse(&text[..58]).is_err());
/// assert!(!format!("{token:?}").contains(&text[21..]));
/// ```
#[derive(Clone)]
pub struct ApiToken {
    id: TokenId,
    text: String,
}

impl ApiToken {
    /// A new token, with an id of its own.
    pub fn generate() -> Self {
        ApiToken::with_secret(TokenId::fresh())
    }

    /// A new secret for an id: what a rotation gives out.
    pub fn with_secret(id: TokenId) -> Self {
        // 160 of the 244 random bits of two UUIDs.
        let mut hash = Sha256::new();
        hash.update(Uuid::new_v4());
        hash.update(Uuid::new_v4());
        let body = format!("{id}_{}", encode(&hash.finalize()[..SECRET_CHARS * 5 / 8]));
        let check = checksum(&body);
        ApiToken { id, text: format!("{PREFIX}{body}{check}") }
    }

    /// Reads a token. The error never contains what was read.
    pub fn parse(text: &str) -> Result<Self> {
        let wrong = |problem: &str| Err(Error::invalid("token", problem.to_owned()));
        let Some(body) = text.strip_prefix(PREFIX) else {
            return wrong("it does not begin with hpx_");
        };
        let all = ID_CHARS + 1 + SECRET_CHARS + CHECK_CHARS;
        if body.len() != all {
            return wrong(&format!(
                "it has {} characters; a token has {}",
                text.chars().count(),
                all + PREFIX.len()
            ));
        }
        let well_formed = body
            .bytes()
            .enumerate()
            .all(|(at, b)| if at == ID_CHARS { b == b'_' } else { ALPHABET.contains(&b) });
        if !well_formed {
            return wrong("it has a character that no token has, or in a place where no token has it");
        }
        let (body, check) = body.split_at(all - CHECK_CHARS);
        if checksum(body) != check {
            return wrong("its checksum is wrong: it was mistyped or damaged");
        }
        Ok(ApiToken { id: TokenId(body[..ID_CHARS].to_owned()), text: text.to_owned() })
    }

    /// The id.
    pub fn id(&self) -> &TokenId {
        &self.id
    }

    /// The whole token, for the one who shall use it. Do not log it.
    pub fn expose(&self) -> &str {
        &self.text
    }

    /// The hash that a store keeps.
    pub(crate) fn hash(&self) -> TokenHash {
        TokenHash(Sha256::digest(self.text.as_bytes()).into())
    }
}

impl fmt::Debug for ApiToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}_***", self.id)
    }
}

/// The SHA-256 of a whole token. A secret of 160 random bits cannot be guessed from it, so a slow hash
/// would protect nothing and cost every request.
#[derive(Clone, Copy)]
pub(crate) struct TokenHash(pub [u8; 32]);

impl TokenHash {
    /// Compares in a time that does not depend on where they differ.
    pub(crate) fn matches(&self, other: &TokenHash) -> bool {
        use subtle::ConstantTimeEq as _;
        self.0.ct_eq(&other.0).into()
    }
}

impl fmt::Debug for TokenHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// The bytes in base 32, a multiple of five of them.
fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() / 5 * 8);
    for chunk in bytes.chunks(5) {
        let bits = chunk.iter().fold(0_u64, |bits, byte| bits << 8 | u64::from(*byte));
        for digit in (0..8).rev() {
            text.push(char::from(ALPHABET[(bits >> (digit * 5)) as usize % 32]));
        }
    }
    text
}

fn checksum(body: &str) -> String {
    let hash = Sha256::digest(format!("{PREFIX}{body}").as_bytes());
    let mut check = encode(&hash[..5]);
    check.truncate(CHECK_CHARS);
    check
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_single_typo_is_noticed() {
        let token = ApiToken::generate();
        for at in 0..token.text.len() {
            for other in ["0", "1", "z", "_", "Z", "i", "é", "\0"] {
                let mut text = token.text.clone();
                text.replace_range(at..=at, other);
                assert!(text == token.text || ApiToken::parse(&text).is_err(), "{text}");
            }
            assert!(ApiToken::parse(&token.text[..at]).is_err());
        }
        for text in ["", "hpx_", "Bearer", &format!("{} ", token.text), &token.text.to_uppercase()] {
            let error = ApiToken::parse(text).unwrap_err().to_string();
            assert!(text.is_empty() || !error.contains(&token.text[21..]), "{error}");
        }
    }

    #[test]
    fn tokens_differ_and_ids_sort_by_time() {
        let tokens: Vec<_> = (0..100).map(|_| ApiToken::generate()).collect();
        let texts: BTreeSet<_> = tokens.iter().map(ApiToken::expose).collect();
        assert_eq!(texts.len(), 100);
        let earlier = TokenId::new("01d3m6z6kj000000").unwrap();
        assert!(earlier < *tokens[0].id());
        let again = ApiToken::with_secret(tokens[0].id().clone());
        assert!(again.id() == tokens[0].id() && !again.hash().matches(&tokens[0].hash()));
    }

    #[test]
    fn text_sorts_as_bytes_do() {
        assert_eq!(encode(&[0; 5]), "00000000");
        assert_eq!(encode(&[255; 5]), "zzzzzzzz");
        assert!(encode(&[1, 0, 0, 0, 0]) > encode(&[0, 255, 255, 255, 255]));
    }
}
