//! Same-transaction claims on the memory ledger.

use super::{Deliverable, Guard, InTransaction};
use crate::backend::memory::{MemoryLedger, MemoryTransaction};
use crate::error::{Error, Result};
use crate::ledger::{Mode, Outcome};

impl Guard<MemoryLedger> {
    /// Claims an event in the caller's transaction: the claim commits or rolls back with the effect.
    ///
    /// **With this call alone a poison event loops forever**: the rollback of a failed effect
    /// includes the claim, so nothing counts the attempt and the next delivery runs it again. Call
    /// [`failed`](Guard::failed) after each rollback; it counts the failure and returns when to
    /// retry, or that the event is dead.
    ///
    /// ```
    /// use hapax::{Guard, backend::memory::MemoryLedger};
    ///
    /// let ledger = MemoryLedger::default();
    /// let guard = Guard::builder(ledger.clone()).scope("billing").build()?;
    /// let mut tx = ledger.begin();
    /// assert!(guard.try_claim_in(&mut tx, "order-17-paid")?.is_claimed());
    /// tx.commit(); // claim and effect
    /// assert!(!guard.try_claim_in(&mut ledger.begin(), "order-17-paid")?.is_claimed());
    /// # Ok::<(), hapax::Error>(())
    /// ```
    #[doc(alias = "tryClaimSameTx")]
    pub fn try_claim_in(
        &self,
        tx: &mut MemoryTransaction<'_>,
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
        tx: &mut MemoryTransaction<'_>,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<InTransaction>>>> {
        let core = self.core();
        core.check_transactional()?;
        let batch = core.prepare_many(events, Mode::Done)?;
        let answers = tx.claim(&batch.claims)?;
        Ok(core.answer_many(batch, answers))
    }

    /// Whether the transaction of a claim was committed.
    ///
    /// ```
    /// use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    ///
    /// let ledger = MemoryLedger::default();
    /// let guard = Guard::builder(ledger.clone()).scope("billing").build()?;
    /// let mut tx = ledger.begin();
    /// let Outcome::First(claim) = guard.try_claim_in(&mut tx, "order-17-paid")? else { panic!("not the first") };
    /// tx.commit();
    /// assert!(guard.was_committed(&claim)?);
    /// # Ok::<(), hapax::Error>(())
    /// ```
    pub fn was_committed(&self, claim: &InTransaction) -> Result<bool> {
        self.ledger().was_committed(claim.claim())
    }
}
