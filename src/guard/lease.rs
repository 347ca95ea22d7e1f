//! The lease: the right to run an event, as a value that is settled once, or gives itself back.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::heartbeat::Heartbeat;
use super::{Core, Deliverable, Delivery, Granted, Guard, LeaseLost, note};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::id::EventId;
use crate::ledger::{
    Batcher, Body, Extend, Identity, LeaseSettings, Ledger, Metadata, Mode, Order, Outcome, Settle, Settled,
    Token, Verdict, Week,
};
use crate::telemetry::Meter;

/// What a handler needs to know of its run: hand key and token to the sink.
///
/// A sink that dedups on the key makes the effect exactly once; one that refuses lower tokens keeps a stale run from
/// writing last. Neither replaces the other.
#[derive(Debug, Clone)]
pub struct Run {
    key: Identity,
    token: Token,
    attempt: u32,
    suspect: bool,
}

impl Run {
    /// What is being run: the key to dedup on.
    pub fn key(&self) -> &Identity {
        &self.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Which run this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the last run ended with its process.
    pub fn suspect(&self) -> bool {
        self.suspect
    }

    /// The id of the `n`-th event this run emits. It follows from the key, so a run that is repeated emits the same ids
    /// and whoever consumes them is not fooled.
    pub fn child_id(&self, n: u64) -> EventId {
        let tenant = self.key.tenant.as_ref().map_or("", |tenant| tenant.as_str());
        let parts = [tenant.as_bytes(), self.key.scope.as_str().as_bytes(), &n.to_be_bytes()];
        EventId::derived(&self.key.id, parts)
    }
}

/// What a failed run leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It may run again.
    RetryAt {
        /// When, by ledger time; stored.
        at: Time,
    },
    /// Its attempts are used up, or it was said to be fatal. Only a redrive brings it back.
    Dead {
        /// Since when, by ledger time.
        at: Time,
    },
}

/// The right to run an event. Settle it with [`done`](Lease::done), [`fail`](Lease::fail) or
/// [`release`](Lease::release).
///
/// Dropped without that (a panic, a cancelled task), it goes back as a failed run that counts, so that an event that always
/// panics does not run for ever. A settling that cannot reach the ledger is repeated with the same token for as long as
/// the lease lives; it is never taken for a failure of the handler.
///
/// ```
/// use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
/// let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
/// if let Outcome::First(mut lease) = guard.lease("order-17-paid").await? {
///     match lease.run(charge(lease.key().id.as_str().into_owned())).await {
///         Ok(Ok(())) => lease.done().await?,
///         Ok(Err(error)) => println!("{:?}", lease.fail(error).await?),
///         Err(lost) => println!("{lost}"), // the handler was cancelled
///     }
/// }
/// assert!(guard.is_processed("order-17-paid").await?);
/// # Ok(()) }
/// # async fn charge(_: String) -> Result<(), String> { Ok(()) }
/// ```
#[must_use = "the event is yours to run; dropping the lease counts as a failed run"]
pub struct Lease {
    core: Core,
    run: Run,
    week: Week,
    order: Option<Order>,
    body: Option<Body>,
    /// How long it lasts, from when it was granted or extended.
    duration: Duration,
    deadline: Instant,
    heartbeat: Option<Heartbeat>,
    guarded: bool,
    /// Whether it is still to be settled.
    open: bool,
    dropped: Dropped,
}

/// What becomes of a lease that is dropped before it is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dropped {
    /// It counts as a failed run.
    Counts,
    /// It is given back uncounted: its run has not begun.
    Returns,
    /// It is left to lapse: for those whose handlers cannot take it with them.
    Lapses,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("run", &self.run).field("week", &self.week).finish_non_exhaustive()
    }
}

impl Lease {
    /// `sent` is the moment before the claim was sent: the ledger's lease began later, so it ends later than ours.
    fn new(core: &Core, granted: Granted, sent: Instant) -> Self {
        let Granted { claim, grant, guarded } = granted;
        let duration = match claim.mode {
            Mode::Lease(terms) => terms.lease,
            _ => core.settings().lease,
        };
        Lease {
            core: core.clone(),
            run: Run {
                key: claim.identity.clone(),
                token: grant.token,
                attempt: grant.attempt,
                suspect: grant.suspect,
            },
            week: grant.week,
            order: claim.order.clone(),
            body: claim.body.clone(),
            duration,
            deadline: sent + duration - core.settings().margin(),
            heartbeat: None,
            guarded,
            open: guarded,
            dropped: Dropped::Returns,
        }
    }

    fn when_dropped(mut self, dropped: Dropped) -> Self {
        self.dropped = dropped;
        self
    }

    /// What is being run: the key to dedup on.
    pub fn key(&self) -> &Identity {
        &self.run.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.run.token
    }

    /// Which run this is, from 1.
    pub fn attempt(&self) -> u32 {
        self.run.attempt
    }

    /// Whether the last run ended with its process.
    pub fn suspect(&self) -> bool {
        self.run.suspect
    }

    /// The id of the `n`-th event this run emits; see [`Run::child_id`].
    pub fn child_id(&self, n: u64) -> EventId {
        self.run.child_id(n)
    }

    /// Key, token and the rest, to hand to a handler.
    pub fn info(&self) -> Run {
        self.run.clone()
    }

    /// Until when the lease may be relied upon, by this machine's monotonic clock: from before the claim was sent, less a
    /// margin. Moves on with each heartbeat.
    pub fn deadline(&self) -> std::time::Instant {
        self.local_deadline().into_std()
    }

    fn local_deadline(&self) -> Instant {
        self.heartbeat.as_ref().map_or(self.deadline, |heartbeat| heartbeat.state().deadline)
    }

    /// Whether the lease is known to be lost.
    pub fn is_lost(&self) -> bool {
        let lost = self.heartbeat.as_ref().is_some_and(|heartbeat| heartbeat.state().lost.is_some());
        self.guarded && (lost || self.local_deadline() <= Instant::now())
    }

    /// Starts the heartbeat, unless it is running: a task that extends the lease until it is settled, dropped or lost.
    pub fn heartbeat(&mut self) {
        if self.guarded && self.heartbeat.is_none() {
            self.heartbeat = Some(Heartbeat::spawn(self.core.clone(), self.extending(), self.deadline));
        }
    }

    /// Ends when the lease is lost; never, if it is settled before. Starts the heartbeat. For code that must stop by
    /// itself; [`run`](Lease::run) cancels for you.
    pub fn lost(&mut self) -> impl Future<Output = ()> + Send + 'static + use<> {
        self.heartbeat();
        let lost = self.heartbeat.as_ref().map(Heartbeat::lost);
        async move {
            match lost {
                Some(lost) => _ = lost.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Runs `work` while extending the lease with every heartbeat. When the lease is lost, or cannot be extended before its
    /// [`deadline`](Lease::deadline), `work` is dropped where it stands. That is best effort: what it sent is sent, which
    /// is what the token is for.
    pub async fn run<T>(&mut self, work: impl Future<Output = T>) -> Result<T, LeaseLost> {
        self.heartbeat();
        let Some(keeper) = &self.heartbeat else { return Ok(work.await) };
        let lost = keeper.lost();
        tokio::select! {
            biased;
            value = work => Ok(value),
            cause = lost => {
                self.open = false; // nothing of it is ours to give back
                Err(LeaseLost { key: self.run.key.clone(), cause })
            }
        }
    }

    /// Extends the lease once, now.
    pub async fn extend(&mut self) -> Result<()> {
        if !self.guarded {
            return Ok(());
        }
        let sent = Instant::now();
        let settled = self.core.batcher().extend(self.extending()).await?;
        if matches!(settled, Settled::Fenced { .. }) {
            self.open = false;
        }
        settled.ok_or_fenced(&self.run.key, self.run.token)?;
        self.deadline = sent + self.duration - self.core.settings().margin();
        if self.heartbeat.take().is_some() {
            self.heartbeat(); // begins anew, from the new deadline
        }
        Ok(())
    }

    /// Settles: it took effect.
    #[doc(alias = "mark_done")]
    pub async fn done(self) -> Result<()> {
        self.settle(Verdict::Done { metadata: None }).await.map(drop)
    }

    /// Settles: it took effect, with JSON to keep.
    pub async fn done_with(self, metadata: Metadata) -> Result<()> {
        self.settle(Verdict::Done { metadata: Some(metadata) }).await.map(drop)
    }

    /// Settles: the run failed. It runs again after a pause that is stored, or is dead when its attempts are used up.
    #[doc(alias = "mark_failed")]
    pub async fn fail(self, error: impl fmt::Display) -> Result<Failure> {
        let verdict = self.failure(error);
        self.settle_failure(verdict).await
    }

    /// Settles: the run failed and no other would succeed. The event is dead.
    pub async fn fail_fatal(self, error: impl fmt::Display) -> Result<Failure> {
        let verdict = Verdict::Dead { note: note(error), body: self.body.clone() };
        self.settle_failure(verdict).await
    }

    /// Gives the lease back at once, uncounted: the event was not run.
    pub async fn release(self) -> Result<()> {
        self.settle(Verdict::release()).await.map(drop)
    }

    async fn settle_failure(self, verdict: Verdict) -> Result<Failure> {
        let dead = matches!(verdict, Verdict::Dead { .. });
        let at = self.settle(verdict).await?;
        Ok(if dead { Failure::Dead { at } } else { Failure::RetryAt { at } })
    }

    /// What a failure of this run leads to.
    fn failure(&self, error: impl fmt::Display) -> Verdict {
        let terms = self.core.settings().failure_terms();
        if self.run.attempt >= terms.attempts_max {
            return Verdict::Dead { note: note(error), body: self.body.clone() };
        }
        let after = terms.pause(self.run.attempt);
        Verdict::Retry { after, counted: true, note: Some(note(error)), body: None }
    }

    pub(crate) async fn settle(mut self, verdict: Verdict) -> Result<Time> {
        if !self.guarded {
            return Ok(Time::default());
        }
        // From here on the drop must not say anything else, whatever becomes of this call.
        self.open = false;
        let until = self.local_deadline();
        self.heartbeat = None;
        let patience = until.saturating_duration_since(Instant::now()).max(PATIENCE_MIN);
        let settled = self.core.settle(self.settling(verdict), patience).await?;
        settled.ok_or_fenced(&self.run.key, self.run.token)
    }

    pub(crate) fn settling(&self, verdict: Verdict) -> Settle {
        Settle {
            identity: self.run.key.clone(),
            week: self.week,
            token: self.run.token,
            verdict,
            order: self.order.clone(),
            advance_to: None,
        }
    }

    /// Leaves it as it is: someone else settles it, or it lapses.
    pub(crate) fn leave_open(mut self) {
        self.open = false;
    }

    fn extending(&self) -> Extend {
        Extend {
            identity: self.run.key.clone(),
            week: self.week,
            token: self.run.token,
            lease: self.duration,
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let verdict = match self.dropped {
            Dropped::Counts if !self.is_lost() => {
                self.failure("dropped before it was settled (a panic, or a cancelled task)")
            }
            Dropped::Returns => Verdict::release(),
            Dropped::Counts | Dropped::Lapses => return,
        };
        if self.open {
            self.core.batcher().settle_later(self.settling(verdict));
        }
    }
}

impl Core {
    pub(super) async fn lease(&self, delivery: Delivery) -> Result<Outcome<Lease>> {
        let sent = Instant::now();
        let outcome = self.claim(delivery, Mode::Lease(self.settings().lease_terms()), None).await?;
        Ok(self.leased(outcome, sent).await?.map(|lease| lease.when_dropped(Dropped::Counts)))
    }

    /// The lease of a claim that was sent at `sent`, given back if it is dropped. The ledger counts a lease from when it grants
    /// it, the holder from before it asked: one whose answer took long is extended before anything starts, so that its run is not
    /// cancelled at once and its attempt used up for nothing. One that cannot be extended is given back uncounted.
    async fn leased(&self, outcome: Outcome<Granted>, sent: Instant) -> Result<Outcome<Lease>> {
        let mut lease = match outcome.map(|granted| Lease::new(self, granted, sent)) {
            Outcome::First(lease) if self.is_short(sent, lease.duration) => lease,
            other => return Ok(other),
        };
        match lease.extend().await {
            Ok(()) if !lease.is_lost() => Ok(Outcome::First(lease)),
            Ok(()) => {
                let _ = lease.release().await; // should that not arrive, it lapses
                let what = "leasing: answers take longer than the lease lasts".into();
                Err(Error::Contended { what, source: None })
            }
            // It lapsed by the ledger's clock as well, and someone else has it.
            Err(Error::Fenced { .. }) => Ok(Outcome::Busy { until: None, owner: None }),
            Err(error) => {
                let _ = lease.release().await;
                Err(error)
            }
        }
    }

    /// Whether a lease that was asked for at `sent` would end before its first heartbeat.
    fn is_short(&self, sent: Instant, lease: Duration) -> bool {
        let settings = self.settings();
        settings.enabled && sent.elapsed() + settings.heartbeat + settings.margin() > lease
    }

    /// A lease on other terms than the guard's. `hold`: what would have to wait is parked with its bytes.
    pub(crate) async fn lease_on(
        &self,
        delivery: Delivery,
        terms: LeaseSettings,
        hold: bool,
    ) -> Result<Outcome<Lease>> {
        let sent = Instant::now();
        let mut claim = self.prepare(delivery, Mode::Lease(terms))?;
        claim.hold = hold;
        let outcome = self.claim_raw(claim).await?;
        Ok(self.leased(outcome, sent).await?.map(|lease| lease.when_dropped(Dropped::Lapses)))
    }

    /// Gives back what was claimed and never answered; see [`Batcher::release_doubtful`].
    pub(crate) async fn release_doubtful(&self) {
        self.batcher().release_doubtful().await;
    }

    /// Settles, and goes on trying while the ledger is away, for as long as `patience` lasts: also if the caller gives
    /// up, because what took effect took effect.
    pub(super) async fn settle(&self, settle: Settle, patience: Duration) -> Result<Settled> {
        let verdict = Meter::verdict(&settle.verdict);
        let until = Instant::now() + patience;
        let mut unsettled =
            Unsettled { batcher: self.batcher().clone(), settle: Some(settle.clone()), until };
        let mut answer = self.batcher().settle(settle).await;
        if answer.as_ref().is_err_and(Error::is_retryable)
            && let Some(again) = unsettled.go_on()
        {
            answer = again.await.unwrap_or_else(|error| Err(Error::unavailable("settling", error)));
        }
        unsettled.settle = None;
        if let Some(meter) = self.meter() {
            meter.settled(verdict, &answer);
        }
        answer
    }

    /// Asks until the event is not busy any more or the limit is reached. Between two questions it sleeps: longer and
    /// longer up to a second, but not past the end of the lease in the way.
    async fn lease_or_wait(&self, delivery: Delivery, limit: Duration) -> Result<Outcome<Lease>> {
        let end = Instant::now().checked_add(limit); // none: longer than any clock runs
        let mut pause = Duration::from_millis(20);
        let mut clock: Option<(Time, Instant)> = None;
        loop {
            let outcome = self.lease(delivery.clone()).await?;
            let Outcome::Busy { until, .. } = &outcome else { return Ok(outcome) };
            let now = Instant::now();
            if end.is_some_and(|end| now >= end) {
                return Ok(outcome);
            }
            let mut wake = now + pause;
            if let Some(until) = until {
                let (ledger, local) = match clock {
                    Some(known) => known,
                    None => *clock.insert((self.batcher().ledger().now().await?, now)),
                };
                // A millisecond more, as the lease must be over and not about to be.
                wake = wake.min(local + until.since(ledger) + Duration::from_millis(1)).max(now + PAUSE_MIN);
            }
            tokio::time::sleep_until(end.map_or(wake, |end| wake.min(end))).await;
            pause = (pause * 3 / 2).min(Duration::from_secs(1));
        }
    }
}

/// A settling that is not known to be recorded. Dropped, it goes on in a task of its own.
struct Unsettled {
    batcher: Batcher,
    settle: Option<Settle>,
    until: Instant,
}

impl Unsettled {
    fn go_on(&mut self) -> Option<JoinHandle<Result<Settled>>> {
        let settle = self.settle.take()?;
        let runtime = tokio::runtime::Handle::try_current().ok()?;
        Some(runtime.spawn(settle_until(self.batcher.clone(), settle, self.until)))
    }
}

impl Drop for Unsettled {
    fn drop(&mut self) {
        let _ = self.go_on(); // nobody waits for it
    }
}

async fn settle_until(batcher: Batcher, settle: Settle, until: Instant) -> Result<Settled> {
    let mut pause = Duration::from_millis(50);
    loop {
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_secs(5));
        let answer = batcher.settle(settle.clone()).await;
        if !answer.as_ref().is_err_and(Error::is_retryable) || Instant::now() + pause >= until {
            return answer;
        }
    }
}

/// How long a settling is tried at least, also past the end of its lease: while nobody else has the event the token still counts.
const PATIENCE_MIN: Duration = Duration::from_secs(2);
/// Between two questions there is always a pause, whatever the clocks say.
const PAUSE_MIN: Duration = Duration::from_millis(5);

impl<L: Ledger> Guard<L> {
    /// Claims an event under a lease. Whoever gets [`Outcome::First`] runs it and settles the [`Lease`]; everyone else is
    /// told what it is up to.
    pub async fn lease(&self, event: impl Deliverable) -> Result<Outcome<Lease>> {
        self.core.lease(event.delivery()?).await
    }

    /// Like [`lease`](Guard::lease), but while someone else holds the event it waits, up to `limit`; then it answers
    /// [`Outcome::Busy`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// # let guard = Guard::builder(MemoryLedger::default()).scope("billing").build()?;
    /// let Outcome::First(lease) = guard.lease("order-17-paid").await? else { return Ok(()) };
    /// tokio::spawn(lease.done());
    /// let outcome = guard.lease_or_wait("order-17-paid", Duration::from_secs(5)).await?;
    /// assert!(matches!(outcome, Outcome::Duplicate(_)));
    /// # Ok(()) }
    /// ```
    pub async fn lease_or_wait(&self, event: impl Deliverable, limit: Duration) -> Result<Outcome<Lease>> {
        self.core.lease_or_wait(event.delivery()?, limit).await
    }

    /// Leases many events at once, with an outcome each, in the order given. A bad id fails alone. Safe to cancel.
    pub async fn lease_many<D: Deliverable>(
        &self,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<Lease>>>> {
        let sent = Instant::now();
        let mode = Mode::Lease(self.settings().lease_terms());
        let outcomes = self.core.claim_many(events, mode).await?;
        let counts = |lease: Lease| lease.when_dropped(Dropped::Counts);
        if !self.core.is_short(sent, self.settings().lease) {
            let lease =
                |outcome: Outcome<Granted>| outcome.map(|granted| Lease::new(&self.core, granted, sent));
            return Ok(outcomes.into_iter().map(|outcome| Ok(lease(outcome?).map(counts))).collect());
        }
        // Side by side, so that what must be extended gathers into one statement.
        let extended: Vec<_> = outcomes
            .into_iter()
            .map(|outcome| {
                let core = self.core.clone();
                tokio::spawn(async move { core.leased(outcome?, sent).await })
            })
            .collect();
        let mut leases = Vec::with_capacity(extended.len());
        for lease in extended {
            leases.push(lease.await.unwrap_or_else(|error| Err(Error::unavailable("leasing", error))));
        }
        Ok(leases.into_iter().map(|lease| Ok(lease?.map(counts))).collect())
    }
}
