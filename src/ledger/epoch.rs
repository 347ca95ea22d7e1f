//! The epoch of a ledger.

use std::fmt;

use sha2::{Digest as _, Sha256};

/// One incarnation of a ledger: a hash of everything that changes when the ledger may have lost
/// acknowledged data (it was restored, copied, failed over, or its server restarted). Anything
/// cached about a ledger, such as a [window](crate::window), is valid only under the epoch in which
/// it was learned. Two incarnations never share an epoch; one may have several, which costs only
/// the cache.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Epoch([u8; 16]);

impl Epoch {
    /// The epoch made of these parts.
    ///
    /// ```
    /// use hapax::ledger::Epoch;
    /// assert_eq!(Epoch::of(["a", "b"]), Epoch::of(["a", "b"]));
    /// assert_ne!(Epoch::of(["a", "b"]), Epoch::of(["ab"]));
    /// ```
    pub fn of<P: AsRef<[u8]>>(parts: impl IntoIterator<Item = P>) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.as_ref().len() as u64).to_be_bytes());
            hash.update(part.as_ref());
        }
        let mut half = [0; 16];
        half.copy_from_slice(&hash.finalize()[..16]);
        Epoch(half)
    }

    /// Its bytes, which are as good as random.
    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }
}

impl fmt::Display for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Epoch({self})")
    }
}
