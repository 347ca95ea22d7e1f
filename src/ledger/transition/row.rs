//! The row of an entry, as backends store it.

use std::sync::Arc;

use crate::clock::Time;
use crate::event::{Fingerprint, Origin, Record};
use crate::id::{Aggregate, Owner};
use crate::ledger::{Entry, Identity, Metadata, Nonce, Prior, State, Token, Week};

/// An entry as it is stored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)] // each is an independent fact and a column
pub struct Row {
    /// The entry's state.
    pub state: State,
    /// The token of its last run.
    pub token: Token,
    /// The nonce of the claim that set the token.
    pub nonce: Nonce,
    /// How many runs counted, including the current one.
    pub attempts: u32,
    /// When the ledger first saw it.
    pub first_at: Time,
    /// Leased or claimed: until when; retry: when it is due; otherwise: since when.
    pub at: Time,
    /// Who ran it last, for humans.
    pub owner: Option<Owner>,
    /// Hash of the event's immutable part.
    pub fingerprint: Option<Fingerprint>,
    /// Its aggregate and seq.
    pub order: Option<(Aggregate, u64)>,
    /// The record it came from.
    pub origin: Option<Origin>,
    /// JSON stored with it.
    pub metadata: Option<Metadata>,
    /// The reason of its state: the last error, or what was said when it was settled.
    pub reason: Option<Arc<str>>,
    /// Whether the end of an at-most-once run will be reported.
    pub tracked: bool,
    /// Whether its run goes alone, so that a death of the process counts as an attempt.
    pub alone: bool,
    /// Whether the process died during the previous run.
    pub suspect: bool,
    /// Whether it runs without order, whatever a claim says: an intervention took it out of its
    /// order.
    pub unordered: bool,
    /// The event's bytes while it is held.
    pub body: Option<Record>,
}

impl Row {
    /// Turns the row into the entry of an identity.
    pub fn entry(self, identity: Identity, week: Week) -> Entry {
        Entry { identity, week, row: self }
    }

    /// Whether an at-most-once run should have reported its end by `now` and did not.
    pub fn is_overdue(&self, now: Time) -> bool {
        self.state == State::Claimed && self.tracked && self.at <= now
    }

    pub(super) fn prior(&self) -> Prior {
        Prior { state: self.state, at: self.at, owner: self.owner.clone() }
    }
}
