//! A claim in the caller's transaction.

use crate::ledger::{Claim, Grant, Identity, Token};

/// A claim made in the caller's own transaction: it counts if that transaction commits. If the
/// answer to the commit is lost, `was_committed` of the guard tells how it ended.
#[derive(Debug, Clone)]
#[must_use = "the event is yours to run, in this transaction"]
pub struct InTransaction {
    claim: Claim,
    token: Token,
}

impl InTransaction {
    pub(super) fn new(claim: Claim, grant: &Grant) -> Self {
        InTransaction { claim, token: grant.token }
    }

    /// The event's identity.
    pub fn key(&self) -> &Identity {
        &self.claim.identity
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }

    pub(super) fn claim(&self) -> &Claim {
        &self.claim
    }
}
