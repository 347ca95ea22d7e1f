//! At most once: claim in a separate transaction, then run.

use std::fmt;
use std::time::Duration;

use super::{Core, Deliverable, Delivery, Granted, Guard, reason_of};
use crate::error::Result;
use crate::ledger::{Identity, Ledger, Metadata, Mode, Outcome, Settle, Token, Verdict, Week};

/// An at-most-once claim: run the event now. It never runs again, unless an operator intervenes.
///
/// Reporting the end is optional, except for claims made with [`Guard::try_claim_tracked`]: if such
/// a claim is dropped unreported, or not reported in time, the event is listed as lost.
#[must_use = "the event is yours to run, and nobody else will"]
pub struct Claimed {
    core: Core,
    identity: Identity,
    week: Week,
    token: Token,
    attempt: u32,
    tracked: bool,
    guarded: bool,
}

impl fmt::Debug for Claimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Claimed")
            .field("key", &self.identity)
            .field("token", &self.token)
            .field("tracked", &self.tracked)
            .finish_non_exhaustive()
    }
}

impl Claimed {
    fn new(core: &Core, granted: &Granted) -> Self {
        let tracked = matches!(granted.claim.mode, Mode::Once { track: Some(_) });
        Claimed {
            core: core.clone(),
            identity: granted.claim.identity.clone(),
            week: granted.grant.week,
            token: granted.grant.token,
            attempt: granted.grant.attempt,
            tracked,
            guarded: granted.guarded,
        }
    }

    /// The event's identity: the key to pass to sinks that deduplicate.
    pub fn key(&self) -> &Identity {
        &self.identity
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Which run this is: more than 1 only after an intervention.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the end must be reported.
    pub fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Reports that the run succeeded.
    pub async fn finished(self) -> Result<()> {
        self.settle(Verdict::Finished { metadata: None }).await
    }

    /// Reports that the run succeeded, with JSON to store.
    pub async fn finished_with(self, metadata: Metadata) -> Result<()> {
        self.settle(Verdict::Finished { metadata: Some(metadata) }).await
    }

    /// Reports that the run failed. The event does not run again, but is listed.
    pub async fn lost(self, reason: impl fmt::Display) -> Result<()> {
        self.settle(Verdict::Lost { reason: reason_of(reason) }).await
    }

    /// Reports the end.
    pub(crate) async fn end(self, verdict: Verdict) -> Result<()> {
        self.settle(verdict).await
    }

    async fn settle(mut self, verdict: Verdict) -> Result<()> {
        self.tracked = false; // this is the report, so the drop must not make one
        if !self.guarded {
            return Ok(());
        }
        let settle = self.settling(verdict);
        self.core
            .settle(settle, self.core.settings().lease)
            .await?
            .ok_or_fenced(&self.identity, self.token)?;
        Ok(())
    }

    fn settling(&self, verdict: Verdict) -> Settle {
        Settle {
            identity: self.identity.clone(),
            week: self.week,
            token: self.token,
            verdict,
            order: None,
            advance_to: None,
        }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if self.tracked && self.guarded {
            let reason = "dropped before its end was reported (a panic, or a cancelled task)".into();
            self.core.batcher().settle_later(self.settling(Verdict::Lost { reason }));
        }
    }
}

impl Core {
    /// An at-most-once claim. With `hold`, an event that would have to wait is parked with its
    /// bytes.
    pub(crate) async fn once(
        &self,
        delivery: Delivery,
        track: Option<Duration>,
        hold: bool,
    ) -> Result<Outcome<Claimed>> {
        let mut claim = self.prepare(delivery, Mode::Once { track })?;
        claim.hold = hold;
        Ok(self.claim_raw(claim).await?.map(|granted| Claimed::new(self, &granted)))
    }
}

impl<L: Ledger> Guard<L> {
    /// Claims an event in a separate transaction, to run it **at most once**: if the run fails or
    /// crashes after this call, the event does not run again. For effects that may be lost but must
    /// not be repeated.
    ///
    /// ```
    /// use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("push").build()?;
    /// match guard.try_claim("order-17-paid").await? {
    ///     Outcome::First(claimed) => println!("run it, with token {}", claimed.token()),
    ///     Outcome::Duplicate(_) => println!("skip it"),
    ///     other => println!("{}", other.name()),
    /// }
    /// # Ok(()) }
    /// ```
    #[doc(alias = "tryClaim")]
    pub async fn try_claim(&self, event: impl Deliverable) -> Result<Outcome<Claimed>> {
        let outcome = self.core.claim(event.delivery()?, Mode::Once { track: None }, None).await?;
        Ok(outcome.map(|granted| Claimed::new(&self.core, &granted)))
    }

    /// Like [`try_claim`](Guard::try_claim), but the caller must report the end `within` this time
    /// with [`Claimed::finished`] or [`Claimed::lost`]. Otherwise the event is listed as lost, so
    /// that a crash is never silent.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// # let guard = Guard::builder(MemoryLedger::default()).scope("push").build()?;
    /// if let Outcome::First(claimed) = guard.try_claim_tracked("order-17-paid", Duration::from_mins(1)).await? {
    ///     println!("pushing");
    ///     claimed.finished().await?;
    /// }
    /// assert!(guard.is_processed("order-17-paid").await?);
    /// # Ok(()) }
    /// ```
    pub async fn try_claim_tracked(
        &self,
        event: impl Deliverable,
        within: Duration,
    ) -> Result<Outcome<Claimed>> {
        let outcome = self.core.claim(event.delivery()?, Mode::Once { track: Some(within) }, None).await?;
        Ok(outcome.map(|granted| Claimed::new(&self.core, &granted)))
    }

    /// Claims many events at once, each at most once, and returns their outcomes in the order
    /// given. A bad id fails only itself. Safe to cancel: claims that did not reach the caller are
    /// released.
    ///
    /// ```
    /// # use hapax::{Guard, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("push").build()?;
    /// let outcomes = guard.claim_many(["a", "b", "a", " "]).await?;
    /// let claimed = |at: usize| outcomes[at].as_ref().is_ok_and(|outcome| outcome.is_claimed());
    /// assert!(claimed(0) && claimed(1) && !claimed(2));
    /// assert!(outcomes[3].is_err());
    /// # Ok(()) }
    /// ```
    pub async fn claim_many<D: Deliverable>(
        &self,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<Claimed>>>> {
        let outcomes = self.core.claim_many(events, Mode::Once { track: None }).await?;
        let claimed = |outcome: Outcome<Granted>| outcome.map(|granted| Claimed::new(&self.core, &granted));
        Ok(outcomes.into_iter().map(|outcome| outcome.map(claimed)).collect())
    }
}
