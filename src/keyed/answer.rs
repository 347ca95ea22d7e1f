//! Answers as they are kept.

use bytes::Bytes;

use crate::error::{Error, Result};

/// The largest body that any store keeps, in bytes.
pub const ANSWER_BYTES_MAX: usize = 16 << 20;

/// The most bytes that the kept headers of an answer may have, names and values.
pub(crate) const HEADER_BYTES_MAX: usize = 64 << 10;

/// The headers of an answer that are kept, in lower case. Headers that belong to a single exchange
/// are not: cookies, dates, traces, rates.
pub const KEPT_HEADERS: [&str; 7] =
    ["content-type", "content-encoding", "content-language", "location", "etag", "last-modified", "link"];

/// The answer to a request, as it is stored and replayed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The HTTP status.
    pub status: u16,
    /// Names in lower case, and values, of [`KEPT_HEADERS`] only.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Bytes,
}

impl Answer {
    /// An answer without headers.
    pub fn new(status: u16, body: impl Into<Bytes>) -> Self {
        Answer { status, headers: Vec::new(), body: body.into() }
    }

    /// Adds a header, if it is one that is kept.
    #[must_use]
    pub fn header(mut self, name: &str, value: impl Into<Vec<u8>>) -> Self {
        let name = name.to_ascii_lowercase();
        if KEPT_HEADERS.contains(&name.as_str()) {
            self.headers.push((name, value.into()));
        }
        self
    }

    pub(crate) fn check(&self) -> Result<()> {
        let bad = |problem: String| Err(Error::invalid("answer", problem));
        if !(200..=599).contains(&self.status) {
            return bad(format!("its status is {}; 200 to 599 are statuses of answers", self.status));
        }
        if self.body.len() > ANSWER_BYTES_MAX {
            return bad(format!("its body has {} bytes; the limit is {ANSWER_BYTES_MAX}", self.body.len()));
        }
        let bytes: usize = self.headers.iter().map(|(name, value)| name.len() + value.len()).sum();
        if bytes > HEADER_BYTES_MAX {
            return bad(format!("its headers have {bytes} bytes; the limit is {HEADER_BYTES_MAX}"));
        }
        match self.headers.iter().find(|(name, _)| !KEPT_HEADERS.contains(&name.as_str())) {
            Some((name, _)) => bad(format!("the header {name:?} is not among those that are kept")),
            None => Ok(()),
        }
    }

    /// The headers as text: an array of names and values. A byte of a value is one character.
    #[cfg(any(test, feature = "postgres", feature = "sqlite"))]
    pub(crate) fn headers_text(&self) -> String {
        let text = |value: &[u8]| value.iter().map(|byte| char::from(*byte)).collect::<String>();
        let pairs: Vec<_> = self.headers.iter().map(|(name, value)| (name, text(value))).collect();
        serde_json::to_string(&pairs).unwrap_or_default()
    }

    /// An answer as it was stored.
    #[cfg(any(test, feature = "postgres", feature = "sqlite"))]
    pub(crate) fn stored(status: i64, headers: &str, body: Vec<u8>) -> Result<Self> {
        let corrupt = |what: &str| Error::Corrupt(format!("a stored answer: {what}"));
        let pairs: Vec<(String, String)> =
            serde_json::from_str(headers).map_err(|_| corrupt("its headers are not pairs of texts"))?;
        let mut answer = Answer::new(u16::try_from(status).map_err(|_| corrupt("its status"))?, body);
        for (name, value) in pairs {
            let bytes = value.chars().map(u8::try_from).collect::<Result<_, _>>();
            let bytes = bytes.map_err(|_| corrupt("a header has characters beyond Latin-1"))?;
            answer.headers.push((name, bytes));
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_headers_of_the_list_are_kept_and_come_back_as_bytes() {
        let answer = Answer::new(201, "x")
            .header("Location", "/orders/17")
            .header("Set-Cookie", "secret=1")
            .header("Date", "today")
            .header("Link", b"caf\xe9".to_vec());
        assert_eq!(answer.headers.len(), 2);
        answer.check().unwrap();
        assert_eq!(Answer::stored(201, &answer.headers_text(), b"x".to_vec()).unwrap(), answer);
        assert!(Answer::new(101, "").check().is_err());
        assert!(Answer::stored(201, "{}", Vec::new()).is_err());
    }
}
