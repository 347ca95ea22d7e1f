//! Beginning a request under its key, and ending it.

use std::time::Duration;

use super::{Answer, IdempotencyKey, RequestFingerprint};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::Tenant;
use crate::ledger::{Nonce, Token};

/// The default length of a lease.
const LEASE: Duration = Duration::from_secs(30);
/// The bounds of a lease.
pub(crate) const LEASE_MIN: Duration = Duration::from_millis(1);
pub(crate) const LEASE_MAX: Duration = Duration::from_hours(24);

/// How no tenant is called in PostgreSQL's `hapax.tenant`.
const NIL: &str = "00000000-0000-0000-0000-000000000000";

/// What happens to a leased request that began and never ended: its process died, or its outcome
/// could not be stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AfterFailure {
    /// The next request with the key runs it again. Gives up: exactly once; the effect must dedup on
    /// the key, or may happen twice.
    #[default]
    Rerun,
    /// It is never run again automatically: its outcome is unknown until a person decides. Gives up:
    /// retries that succeed without help.
    Hold,
    /// As [`Hold`](AfterFailure::Hold), but only for this long after the lease has ended; then it
    /// runs again.
    HoldFor(Duration),
}

/// A request that begins.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Begin {
    /// Whose key.
    pub tenant: Option<Tenant>,
    /// The key.
    pub key: IdempotencyKey,
    /// The fingerprint of the request.
    pub fingerprint: RequestFingerprint,
    /// Makes the call repeatable after a lost acknowledgement.
    pub nonce: Nonce,
    /// How long it may run before it counts as failed, unless it extends its lease.
    pub lease: Duration,
    /// What happens if it never ends.
    pub after_failure: AfterFailure,
}

impl Begin {
    /// A request under a fresh nonce, with a lease of 30 seconds, to be run again after a failure.
    pub fn new(tenant: Option<Tenant>, key: IdempotencyKey, fingerprint: RequestFingerprint) -> Self {
        Begin {
            tenant,
            key,
            fingerprint,
            nonce: Nonce::random(),
            lease: LEASE,
            after_failure: AfterFailure::default(),
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        // Row security calls no tenant so: a tenant of that name would see what is nobody's.
        if self.tenant.as_ref().is_some_and(|tenant| tenant.as_str() == NIL) {
            let problem = "it is the nil UUID, which stands for no tenant; name none";
            return Err(Error::invalid("tenant", problem));
        }
        check_lease(self.lease)
    }

    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn tenant_text(&self) -> &str {
        self.tenant.as_ref().map_or("", Tenant::as_str)
    }
}

pub(crate) fn check_lease(lease: Duration) -> Result<()> {
    if (LEASE_MIN..=LEASE_MAX).contains(&lease) {
        return Ok(());
    }
    Err(Error::invalid("lease", format!("it is {lease:?}; it needs 1 millisecond to 24 hours")))
}

/// The right to run a request, and to store its answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeyLease {
    /// Whose key.
    pub tenant: Option<Tenant>,
    /// The key. Pass it on to whatever the request calls, so that it can dedup.
    pub key: IdempotencyKey,
    /// The fencing token: a later run has a higher one.
    pub token: Token,
}

impl KeyLease {
    #[cfg(any(feature = "postgres", feature = "sqlite"))]
    pub(crate) fn tenant_text(&self) -> &str {
        self.tenant.as_ref().map_or("", Tenant::as_str)
    }

    pub(crate) fn fenced(&self) -> Error {
        Error::Fenced { what: format!("key {} is not held under token {} any more", self.key, self.token) }
    }

    pub(crate) fn not_unknown(&self, found: &str) -> Error {
        Error::Conflict {
            expected: format!("key {} with token {} and an unknown outcome", self.key, self.token),
            actual: found.to_owned(),
        }
    }
}

/// A stored answer.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Kept {
    /// The answer.
    pub answer: Answer,
    /// When it was stored, by the store's clock.
    pub at: Time,
    /// Whether it was stored under the nonce that asks: this very request committed.
    pub mine: bool,
    /// The hashes of the request's parts.
    pub(crate) parts: String,
}

impl Kept {
    /// Whether the request was this principal's, by the hashes under the store's `secret`. False if its
    /// principal is not known, as for requests of other languages.
    pub fn is_of(&self, secret: &[u8; 32], principal: Option<&str>) -> bool {
        RequestFingerprint::is_by(&self.parts, secret, principal)
    }
}

/// The answer to a request that begins.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "only `First` may run"]
pub enum Begun {
    /// Run it, and finish or release it.
    First(KeyLease),
    /// Another request with the key runs.
    Running {
        /// When its lease ends; `None` if an open transaction holds it.
        until: Option<Time>,
    },
    /// It was done before.
    Done(Kept),
    /// The key belongs to another request.
    Mismatch {
        /// Which parts differ, if that is known; see [`RequestFingerprint::differing`].
        differing: Vec<String>,
    },
    /// The key is a UUIDv7 from before the horizon: whether it was done is forgotten.
    Expired,
    /// The key is a UUIDv7 that says it was made more than 28 days after the store's present time: it is
    /// not begun, for it could not be kept until it is old.
    Ahead {
        /// The present time by the store's clock.
        now: Time,
    },
    /// A request with the key began and never ended.
    OutcomeUnknown {
        /// When it began.
        since: Time,
    },
}

/// How a run ended that has no answer to keep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It did nothing: the next request with the key may run at once.
    Undone,
    /// It failed, and may have done something: [`AfterFailure`] decides.
    Failed,
}

/// Who decided about a key whose outcome was unknown, and why. It is stored with the key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decided {
    /// The person.
    pub by: String,
    /// The reason.
    pub reason: String,
}

impl Decided {
    /// A decision.
    pub fn new(by: impl Into<String>, reason: impl Into<String>) -> Self {
        Decided { by: by.into(), reason: reason.into() }
    }

    pub(crate) fn check(&self) -> Result<()> {
        for (name, text, chars_max) in [("by", &self.by, 255), ("reason", &self.reason, 1000)] {
            let chars = text.chars().count();
            let problem = if text.trim().is_empty() {
                "it is blank".to_owned()
            } else if chars > chars_max {
                format!("it has {chars} characters; the limit is {chars_max}")
            } else if text.contains('\0') {
                "it contains a NUL".to_owned()
            } else {
                continue;
            };
            return Err(Error::invalid(name, problem));
        }
        Ok(())
    }
}

/// A person's decision about a key whose outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// The write did not happen: the next request with the key runs it.
    Rerun,
    /// It happened, and this is its answer.
    Answer(Answer),
}
