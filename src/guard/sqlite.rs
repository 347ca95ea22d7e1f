//! Same-transaction claims on SQLite.

use super::{Deliverable, Guard, InTransaction};
use rusqlite::Transaction;

use crate::backend::sqlite::SqliteLedger;
use crate::error::{Error, Result};
use crate::ledger::{Mode, Outcome};

impl Guard<SqliteLedger> {
    /// Claims an event in the caller's transaction: the claim commits or rolls back with the effect.
    ///
    /// **With this call alone a poison event loops forever**: the rollback of a failed effect
    /// includes the claim, so nothing counts the attempt and the next delivery runs it again. Call
    /// [`failed`](Guard::failed) after each rollback; it counts the failure and returns when to
    /// retry, or that the event is dead.
    ///
    /// ```
    /// use hapax::{Guard, backend::sqlite::SqliteLedger, ledger::Settings};
    ///
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let dir = tempfile::tempdir()?;
    /// # let file = dir.path().join("app.db");
    /// let ledger = SqliteLedger::open(&file, Settings::default())?;
    /// let guard = Guard::builder(ledger).scope("billing").build()?;
    /// let mut db = rusqlite::Connection::open(&file)?; // your own connection to the same file
    /// let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    /// assert!(guard.try_claim_in(&tx, "order-17-paid")?.is_claimed());
    /// tx.execute_batch("create table paid (order_id text); insert into paid values ('17')")?;
    /// tx.commit()?; // claim and effect
    /// # Ok(()) }
    /// ```
    #[doc(alias = "tryClaimSameTx")]
    pub fn try_claim_in(
        &self,
        tx: &Transaction<'_>,
        event: impl Deliverable,
    ) -> Result<Outcome<InTransaction>> {
        let mut outcomes = self.try_claim_many_in(tx, [event])?;
        outcomes.pop().unwrap_or_else(|| Err(Error::Corrupt("a claim without an answer".into())))
    }

    /// Claims many events in the caller's transaction and returns their outcomes in the order
    /// given. A bad id fails only itself. The warning of [`try_claim_in`](Guard::try_claim_in)
    /// applies.
    pub fn try_claim_many_in<D: Deliverable>(
        &self,
        tx: &Transaction<'_>,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<InTransaction>>>> {
        let core = self.core();
        core.check_transactional()?;
        let batch = core.prepare_many(events, Mode::Done)?;
        let answers = self.ledger().claim_in(tx, &batch.claims)?;
        Ok(core.answer_many(batch, answers))
    }

    /// Whether the transaction of a claim was committed, for a caller whose commit ended in doubt.
    /// Blocks until the current writer has finished, so the answer is final: false means that it
    /// never will be.
    pub fn was_committed(&self, claim: &InTransaction) -> Result<bool> {
        self.ledger().was_committed(claim.claim())
    }
}
