//! An entry, as backends store it.

use std::sync::Arc;

use crate::clock::Time;
use crate::event::{Fingerprint, Origin};
use crate::id::{Aggregate, Owner};
use crate::ledger::{Body, Entry, Identity, Metadata, Nonce, Prior, State, Token, Week};

/// An entry as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // each is a fact of its own, and a column
pub struct Row {
    /// What became of it.
    pub state: State,
    /// Of its last run.
    pub token: Token,
    /// Of the claim that set it.
    pub nonce: Nonce,
    /// Runs that counted, the present one included.
    pub attempts: u32,
    /// When first seen.
    pub first_at: Time,
    /// Leased or claimed: until when; retry: due when; else: since when.
    pub at: Time,
    /// Who, for humans.
    pub owner: Option<Owner>,
    /// Hash of the immutable part.
    pub fingerprint: Option<Fingerprint>,
    /// Aggregate and number.
    pub order: Option<(Aggregate, u64)>,
    /// The record it came from.
    pub origin: Option<Origin>,
    /// JSON kept with it.
    pub metadata: Option<Metadata>,
    /// Last error or reason.
    pub note: Option<Arc<str>>,
    /// Whether the end of an at-most-once run will be reported.
    pub tracked: bool,
    /// Whether its run goes alone, so that a death of the process counts.
    pub alone: bool,
    /// Whether the run before this one ended with its process.
    pub suspect: bool,
    /// Whether it runs without order, whatever a claim says: someone took its order away.
    pub unordered: bool,
    /// The event's bytes while it is held.
    pub body: Option<Body>,
}

impl Row {
    /// The entry of an identity with this row.
    pub fn entry(self, identity: Identity, week: Week) -> Entry {
        Entry {
            identity,
            week,
            state: self.state,
            token: self.token,
            attempts: self.attempts,
            first_at: self.first_at,
            at: self.at,
            owner: self.owner,
            fingerprint: self.fingerprint,
            order: self.order,
            origin: self.origin,
            metadata: self.metadata,
            note: self.note,
            tracked: self.tracked,
            body: self.body,
        }
    }

    /// Whether an at-most-once run should have reported its end by `now` and did not.
    pub fn is_overdue(&self, now: Time) -> bool {
        self.state == State::Claimed && self.tracked && self.at <= now
    }

    pub(super) fn prior(&self) -> Prior {
        Prior { state: self.state, at: self.at, owner: self.owner.clone() }
    }
}
