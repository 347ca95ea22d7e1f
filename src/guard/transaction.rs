//! A claim in the caller's transaction, as the caller keeps it.

use crate::ledger::{Claim, Grant, Identity, Token};

/// A claim made in the caller's own transaction: it is worth what that transaction is worth. Should the answer to the
/// commit never come, `was_committed` of the guard says how it ended.
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

    /// What was claimed.
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
