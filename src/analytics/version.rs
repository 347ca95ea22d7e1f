//! The version of a row in a read model: the one clock that decides which of two rows is newer.

use std::fmt;

use crate::error::{Error, Result};

/// Bits of the seq.
pub(crate) const SEQ_BITS: u32 = 48;
/// The greatest seq that a version can hold.
pub const SEQ_MAX: u64 = (1 << SEQ_BITS) - 1;

/// The version of a row: the source's generation (16 bits), then the record's seq (48 bits).
///
/// A record's seq rises with every write, and a delete has the next one, so of two rows of a record
/// the one with the higher version is the later one, whatever order they arrive in and whatever a
/// clock or a log position says. A source that starts over (a restore, a lost replication slot) has the
/// next generation, which is later than every row before it.
///
/// ```
/// use hapax::analytics::Version;
/// let (first, later) = (Version::new(1, 7)?, Version::new(1, 8)?);
/// assert!(first < later && later < Version::new(2, 1)?);
/// assert_eq!((later.generation(), later.seq()), (1, 8));
/// assert_eq!(Version::from_u64(later.as_u64())?, later);
/// # Ok::<(), hapax::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version(u64);

impl Version {
    /// Lower than every version of a source, whose generations begin with 1.
    pub(crate) const LOWEST: Version = Version(1);

    /// A version. A seq is 1 to [`SEQ_MAX`].
    pub fn new(generation: u16, seq: u64) -> Result<Self> {
        if !(1..=SEQ_MAX).contains(&seq) {
            let problem = format!("it is {seq}; the seq of a record in a read model is 1 to {SEQ_MAX}");
            return Err(Error::invalid("seq", problem));
        }
        Ok(Version(u64::from(generation) << SEQ_BITS | seq))
    }

    /// A version as a read model stores it.
    pub fn from_u64(version: u64) -> Result<Self> {
        Version::new((version >> SEQ_BITS) as u16, version & SEQ_MAX)
    }

    /// As a read model stores it.
    pub fn as_u64(self) -> u64 {
        self.0
    }

    /// The generation of the source.
    pub fn generation(self) -> u16 {
        (self.0 >> SEQ_BITS) as u16
    }

    /// The record's seq.
    pub fn seq(self) -> u64 {
        self.0 & SEQ_MAX
    }
}

impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Version({}, {})", self.generation(), self.seq())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn t47_a_generation_and_a_seq_fit_and_are_ordered() {
        let mut versions = Vec::new();
        for generation in [0, 1, 2, u16::MAX] {
            for seq in [1, 2, SEQ_MAX] {
                let version = Version::new(generation, seq).unwrap();
                assert_eq!((version.generation(), version.seq()), (generation, seq));
                assert_eq!(Version::from_u64(version.as_u64()).unwrap(), version);
                versions.push(version);
            }
        }
        assert!(versions.is_sorted());
        for seq in [0, SEQ_MAX + 1, u64::MAX] {
            let message = Version::new(1, seq).unwrap_err().to_string();
            assert!(
                message.contains(&seq.to_string()) && message.contains(&SEQ_MAX.to_string()),
                "{message}"
            );
        }
    }
}
