//! Claims and settles in a transaction that also makes the effects.

use std::time::Duration;

use async_trait::async_trait;

use super::{Claim, Ledger, Marker, Outcome, Settle, Settled};
use crate::error::{Result, Source};
use crate::id::Scope;

/// A ledger whose database can also hold the effects, so that claim and effects commit together. The
/// consumer's transactional worker calls it. The contract of [`Ledger`] applies.
#[async_trait]
pub trait TransactionalLedger: Ledger + Clone {
    /// An open transaction, as passed to a handler.
    type Transaction: Send + 'static;

    /// Begins a transaction. The server ends it if it is not over within `time_max`, so that a
    /// process that hangs or is stopped does not hold locks forever. A server that cannot do this
    /// (PostgreSQL before 17) ends it after being idle for that long. A statement that takes longer
    /// than `statement_max` fails, whether or not the client still waits for it.
    async fn begin(&self, time_max: Duration, statement_max: Duration) -> Result<Self::Transaction>;
    /// Claims in the transaction.
    async fn claim_in(&self, tx: &mut Self::Transaction, claims: &[Claim]) -> Result<Vec<Result<Outcome>>>;
    /// Settles in the transaction.
    async fn settle_in(&self, tx: &mut Self::Transaction, settles: &[Settle])
    -> Result<Vec<Result<Settled>>>;
    /// Writes markers in the transaction.
    async fn set_markers_in(
        &self,
        tx: &mut Self::Transaction,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()>;
    /// Whether the transaction can still be committed. It cannot if a statement failed, even if the
    /// handler ignored the error. Checks deferred constraints, if the database can. An error that
    /// is neither contention nor doubt is the handler's.
    async fn is_sound(&self, tx: &mut Self::Transaction) -> Result<bool>;
    /// Whether a handler's error only says that another transaction got in the way.
    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool;
    /// Whether a handler's error says that a connection broke or a server is unavailable.
    /// [`is_lost`](Self::is_lost) tells whether it was the transaction's own.
    fn is_doubt(&self, error: &(dyn std::error::Error + 'static)) -> bool;
    /// Whether the transaction's own connection broke, so that it is undone through no fault of the
    /// handler.
    async fn is_lost(&self, tx: &mut Self::Transaction) -> bool;
    /// Commits. An error leaves open whether it committed. The inner error means that it did not,
    /// because the database rejects what was done in the transaction (a deferred constraint); it is
    /// the driver's.
    async fn commit(&self, tx: Self::Transaction) -> Result<Result<(), Source>>;
    /// Rolls the transaction back.
    async fn roll_back(&self, tx: Self::Transaction);
    /// Whether the transaction of a claim was committed. The answer is final.
    async fn was_committed(&self, claim: &Claim) -> Result<bool>;
}
