//! Same-transaction claims on PostgreSQL.

use sqlx::PgTransaction;

use super::{Deliverable, Guard, InTransaction};
use crate::backend::postgres::PgLedger;
use crate::error::{Error, Result};
use crate::ledger::{Mode, Outcome};

impl Guard<PgLedger> {
    /// Claims an event in the caller's transaction: the claim commits or rolls back with the
    /// effect. The parameter's type enforces that there is a transaction.
    ///
    /// **With this call alone a poison event loops forever**: the rollback of a failed effect
    /// includes the claim, so nothing counts the attempt and the next delivery runs it again. Call
    /// [`failed`](Guard::failed) after each rollback; it counts the failure and returns when to
    /// retry, or that the event is dead.
    ///
    /// ```no_run
    /// use hapax::{Guard, backend::postgres::{PgLedger, PgSettings}};
    ///
    /// # async fn pay(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    /// let ledger = PgLedger::connect(url, PgSettings::default()).await?;
    /// let guard = Guard::builder(ledger.clone()).scope("billing").build()?;
    /// let mut tx = ledger.transaction().await?;
    /// if guard.try_claim_in(&mut tx, "order-17-paid").await?.is_claimed() {
    ///     sqlx::query("update account set balance = balance + 7").execute(&mut *tx).await?;
    /// }
    /// tx.commit().await?; // claim and effect
    /// # Ok(()) }
    /// ```
    #[doc(alias = "tryClaimSameTx")]
    pub async fn try_claim_in(
        &self,
        tx: &mut PgTransaction<'_>,
        event: impl Deliverable,
    ) -> Result<Outcome<InTransaction>> {
        let mut outcomes = self.try_claim_many_in(tx, [event]).await?;
        outcomes.pop().unwrap_or_else(|| Err(Error::Corrupt("a claim without an answer".into())))
    }

    /// Claims many events in the caller's transaction and returns their outcomes in the order
    /// given. A bad id fails only itself. The warning of [`try_claim_in`](Guard::try_claim_in)
    /// applies.
    pub async fn try_claim_many_in<D: Deliverable>(
        &self,
        tx: &mut PgTransaction<'_>,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<InTransaction>>>> {
        let core = self.core();
        core.check_transactional()?;
        let batch = core.prepare_many(events, Mode::Done)?;
        let answers = self.ledger().claim_in(tx, &batch.claims).await?;
        Ok(core.answer_many(batch, answers))
    }

    /// Whether the transaction of a claim was committed, for a caller that never got the answer to
    /// its COMMIT. Waits for a transaction that is still open, so the answer is final: false means
    /// that it never will be, and that claim and effect must be repeated.
    ///
    /// ```no_run
    /// # use hapax::{Guard, Outcome, backend::postgres::PgLedger};
    /// # async fn pay(guard: Guard<PgLedger>) -> Result<(), Box<dyn std::error::Error>> {
    /// let mut tx = guard.ledger().transaction().await?;
    /// if let Outcome::First(claim) = guard.try_claim_in(&mut tx, "order-17-paid").await? {
    ///     sqlx::query("update account set balance = balance + 7").execute(&mut *tx).await?;
    ///     if tx.commit().await.is_err() && !guard.was_committed(&claim).await? {
    ///         println!("neither happened: once more");
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn was_committed(&self, claim: &InTransaction) -> Result<bool> {
        self.ledger().was_committed(claim.claim()).await
    }
}
