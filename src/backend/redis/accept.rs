//! The weaknesses of a server that an operator may accept, by name.

use crate::error::{Error, Result};
use crate::secret::hide_password;

/// A weakness of a server that can make its ledger forget entries. The ledger refuses to start on
/// such a server unless the weakness is accepted by name, in
/// [`RedisSettings::accept`](super::RedisSettings::accept) or as `?accept=NAME,NAME` in the
/// ledger's URL. Events whose entries are lost run again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Accept {
    /// `no-appendonly`: the server has no append-only file. When it stops, it loses everything
    /// since the last snapshot.
    NoAppendonly,
    /// `eviction`: the server deletes entries when its memory is full.
    Eviction,
    /// `replicas`: a replica that takes over may lack the last acknowledged writes.
    Replicas,
}

impl Accept {
    /// Every weakness.
    pub const ALL: [Accept; 3] = [Accept::NoAppendonly, Accept::Eviction, Accept::Replicas];

    /// The name under which it is accepted.
    pub fn name(self) -> &'static str {
        match self {
            Accept::NoAppendonly => "no-appendonly",
            Accept::Eviction => "eviction",
            Accept::Replicas => "replicas",
        }
    }
}

impl std::str::FromStr for Accept {
    type Err = Error;
    fn from_str(name: &str) -> Result<Self> {
        Accept::ALL.into_iter().find(|one| one.name() == name).ok_or_else(|| {
            let names = Accept::ALL.map(Accept::name).join(", ");
            Error::Config(format!("accept={name}: what can be accepted of a Redis server is {names}"))
        })
    }
}

/// Removes `accept` from a URL; the rest is for the driver.
pub(super) fn from_url(url: &str) -> Result<(String, Vec<Accept>)> {
    let Some((base, query)) = url.split_once('?') else { return Ok((url.to_owned(), Vec::new())) };
    let mut accepted = Vec::new();
    let mut rest = Vec::new();
    for pair in query.split('&') {
        match pair.strip_prefix("accept=") {
            Some(names) => {
                for name in names.split(',') {
                    accepted.push(name.parse()?);
                }
            }
            None if pair.starts_with("accept") => {
                return Err(Error::Config(format!("{:?}: say accept=NAME", hide_password(url))));
            }
            None => rest.push(pair),
        }
    }
    let rest = rest.join("&");
    Ok((if rest.is_empty() { base.to_owned() } else { format!("{base}?{rest}") }, accepted))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_what_is_accepted() {
        let none = from_url("redis://h:1/2").unwrap();
        assert_eq!(none, ("redis://h:1/2".to_owned(), Vec::new()));
        let (url, accepted) = from_url("redis://h?accept=eviction,replicas&protocol=resp3").unwrap();
        assert_eq!(url, "redis://h?protocol=resp3");
        assert_eq!(accepted, [Accept::Eviction, Accept::Replicas]);
        let error = from_url("redis://h?accept=everything").unwrap_err().to_string();
        assert!(error.contains("no-appendonly, eviction, replicas"), "{error}");
        assert!(from_url("redis://h?accept").is_err());
    }
}
