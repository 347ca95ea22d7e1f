//! At most once: claim in a transaction of its own, then run.

use std::fmt;
use std::time::Duration;

use super::{Core, Deliverable, Delivery, Granted, Guard, note};
use crate::error::Result;
use crate::ledger::{Identity, Ledger, Metadata, Mode, Outcome, Settle, Token, Verdict, Week};

/// An at-most-once claim: run the event now. Nobody else ever will, unless someone intervenes.
///
/// Reporting the end is optional. A claim made with [`Guard::try_claim_tracked`] promised to: dropped without a word, or
/// silent past its time, it is listed as lost.
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

    /// What was claimed: the key to hand to sinks that dedup.
    pub fn key(&self) -> &Identity {
        &self.identity
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Which run this is: more than 1 only after someone intervened.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the end is expected to be reported.
    pub fn is_tracked(&self) -> bool {
        self.tracked
    }

    /// Reports that the run ended well.
    pub async fn finished(self) -> Result<()> {
        self.settle(Verdict::Finished { metadata: None }).await
    }

    /// Reports that the run ended well, with JSON to keep.
    pub async fn finished_with(self, metadata: Metadata) -> Result<()> {
        self.settle(Verdict::Finished { metadata: Some(metadata) }).await
    }

    /// Reports that the run failed. It is not run again, but listed.
    pub async fn lost(self, reason: impl fmt::Display) -> Result<()> {
        self.settle(Verdict::Lost { note: note(reason) }).await
    }

    /// Reports the end.
    pub(crate) async fn end(self, verdict: Verdict) -> Result<()> {
        self.settle(verdict).await
    }

    async fn settle(mut self, verdict: Verdict) -> Result<()> {
        self.tracked = false; // what follows is the report, so the drop has none to make
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
            let note = "dropped before its end was reported (a panic, or a cancelled task)".into();
            self.core.batcher().settle_later(self.settling(Verdict::Lost { note }));
        }
    }
}

impl Core {
    /// An at-most-once claim. `hold`: what would have to wait is parked with its bytes.
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
    /// Claims an event in a transaction of its own, to run it **at most once**: if the run fails or crashes after this
    /// call, the event is not run again. For effects that may be lost but must not be repeated.
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

    /// Like [`try_claim`](Guard::try_claim), and the end is reported `within` this time by [`Claimed::finished`] or
    /// [`Claimed::lost`]. What is not is listed as lost, so that a crash is never silent.
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

    /// Claims many events at once, at most once each, with an outcome each, in the order given. A bad id fails alone. Safe
    /// to cancel: what was claimed and not delivered is given back.
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
