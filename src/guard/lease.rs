//! The lease: the right to run an event. It is settled once, or settles itself on drop.

use std::fmt;
use std::future::Future;
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::heartbeat::Heartbeat;
use super::{Core, Deliverable, Delivery, Granted, Guard, LeaseLost, reason_of};
use crate::clock::Time;
use crate::error::{Error, Result};
use crate::event::Record;
use crate::id::EventId;
use crate::ledger::{
    Batcher, Extend, Identity, LeaseSettings, Ledger, Metadata, Mode, Order, Outcome, Settle, Settled, Token,
    Verdict, Week,
};
use crate::telemetry::Meter;

/// What a handler needs to know about its run: pass key and token to the sink.
///
/// A sink that deduplicates on the key makes the effect exactly once; one that refuses lower tokens
/// keeps a stale run from writing last. Neither replaces the other.
#[derive(Debug, Clone)]
pub struct Run {
    key: Identity,
    token: Token,
    attempt: u32,
    suspect: bool,
}

impl Run {
    /// A first run, for the unit test of a handler. In production a claim makes it.
    pub fn for_test(key: Identity, token: Token) -> Self {
        Run { key, token, attempt: 1, suspect: false }
    }

    /// The same run as another attempt, counted from 1: for the unit test of a handler.
    #[must_use]
    pub fn at_attempt(self, attempt: u32) -> Self {
        Run { attempt, ..self }
    }

    /// The event's identity: the key to deduplicate on.
    pub fn key(&self) -> &Identity {
        &self.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.token
    }

    /// Which run this is, counted from 1.
    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Whether the process died during the last run.
    pub fn suspect(&self) -> bool {
        self.suspect
    }

    /// The id of the `n`-th event that this run emits. It is derived from the key, so a repeated
    /// run emits the same ids and consumers of those events can deduplicate them.
    pub fn child_id(&self, n: u64) -> EventId {
        let tenant = self.key.tenant.as_ref().map_or("", |tenant| tenant.as_str());
        let parts = [tenant.as_bytes(), self.key.scope.as_str().as_bytes(), &n.to_be_bytes()];
        EventId::derived(&self.key.id, parts)
    }
}

/// The consequence of a failed run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Failure {
    /// It may run again.
    RetryAt {
        /// When, by ledger time. The ledger stores it.
        at: Time,
    },
    /// Its attempts are used up, or the failure was fatal. Only a redrive runs it again.
    Dead {
        /// When it died, by ledger time.
        at: Time,
    },
}

/// The right to run an event. Settle it with [`done`](Lease::done), [`fail`](Lease::fail) or
/// [`release`](Lease::release).
///
/// A lease that is dropped unsettled (a panic, a cancelled task) counts as a failed run, so that an
/// event that always panics does not run forever. If the ledger cannot be reached, settling is
/// repeated with the same token for as long as the lease lives; that never counts as a failure of
/// the handler.
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
    body: Option<Record>,
    /// How long it lasts after it is granted or extended.
    duration: Duration,
    deadline: Instant,
    heartbeat: Option<Heartbeat>,
    guarded: bool,
    /// Whether it still has to be settled.
    open: bool,
    dropped: Dropped,
}

/// What happens to a lease that is dropped before it is settled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dropped {
    /// It counts as a failed run.
    Counts,
    /// It is released, uncounted: its run has not begun.
    Returns,
    /// It lapses. For consumers: their handlers do not own the lease, so a drop is not a sign of a
    /// failed run.
    Lapses,
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lease").field("run", &self.run).field("week", &self.week).finish_non_exhaustive()
    }
}

impl Lease {
    /// `sent` is taken before the claim is sent: the ledger's lease begins later, so it ends later
    /// than ours.
    fn new(core: &Core, granted: Granted, sent: Instant) -> Self {
        let Granted { claim, grant, guarded } = granted;
        let duration = match claim.mode {
            Mode::Lease(settings) => settings.lease,
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

    /// The event's identity: the key to deduplicate on.
    pub fn key(&self) -> &Identity {
        &self.run.key
    }

    /// The fencing token.
    pub fn token(&self) -> Token {
        self.run.token
    }

    /// Which run this is, counted from 1.
    pub fn attempt(&self) -> u32 {
        self.run.attempt
    }

    /// Whether the process died during the last run.
    pub fn suspect(&self) -> bool {
        self.run.suspect
    }

    /// The id of the `n`-th event this run emits; see [`Run::child_id`].
    pub fn child_id(&self, n: u64) -> EventId {
        self.run.child_id(n)
    }

    /// Key, token and the rest, to pass to a handler.
    pub fn info(&self) -> Run {
        self.run.clone()
    }

    /// The time, by this machine's monotonic clock, until which the lease can be relied upon:
    /// counted from before the claim was sent, less a margin. Each heartbeat extends it.
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

    /// Starts the heartbeat, unless it is running: a task that extends the lease until it is
    /// settled, dropped or lost.
    pub fn heartbeat(&mut self) {
        if self.guarded && self.heartbeat.is_none() {
            self.heartbeat = Some(Heartbeat::spawn(self.core.clone(), self.extending(), self.deadline));
        }
    }

    /// Completes when the lease is lost, and never if it is settled first. Starts the heartbeat.
    /// For code that has to stop on its own; [`run`](Lease::run) cancels for you.
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

    /// Runs `work` and extends the lease with every heartbeat. If the lease is lost, or cannot be
    /// extended before its [`deadline`](Lease::deadline), `work` is dropped. That is best effort:
    /// it cannot take back what `work` has already sent, which is what the token is for.
    pub async fn run<T>(&mut self, work: impl Future<Output = T>) -> Result<T, LeaseLost> {
        self.heartbeat();
        let Some(keeper) = &self.heartbeat else { return Ok(work.await) };
        let lost = keeper.lost();
        tokio::select! {
            biased;
            value = work => Ok(value),
            cause = lost => {
                self.open = false; // it is no longer ours to release
                Err(LeaseLost { key: self.run.key.clone(), cause })
            }
        }
    }

    /// Extends the lease once.
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
            self.heartbeat(); // restarts, from the new deadline
        }
        Ok(())
    }

    /// Settles the event as done.
    #[doc(alias = "mark_done")]
    pub async fn done(self) -> Result<()> {
        self.settle(Verdict::Done { metadata: None }).await.map(drop)
    }

    /// Settles the event as done, with JSON to store.
    pub async fn done_with(self, metadata: Metadata) -> Result<()> {
        self.settle(Verdict::Done { metadata: Some(metadata) }).await.map(drop)
    }

    /// Settles the run as failed. The event runs again after a stored pause, or is dead when its
    /// attempts are used up.
    #[doc(alias = "mark_failed")]
    pub async fn fail(self, error: impl fmt::Display) -> Result<Failure> {
        let verdict = self.failure(error);
        self.settle_failure(verdict).await
    }

    /// Settles the run as failed permanently. The event is dead.
    pub async fn fail_fatal(self, error: impl fmt::Display) -> Result<Failure> {
        let verdict = Verdict::Dead { reason: reason_of(error), body: self.body.clone() };
        self.settle_failure(verdict).await
    }

    /// Releases the lease immediately, uncounted: the event was not run.
    pub async fn release(self) -> Result<()> {
        self.settle(Verdict::release()).await.map(drop)
    }

    async fn settle_failure(self, verdict: Verdict) -> Result<Failure> {
        let dead = matches!(verdict, Verdict::Dead { .. });
        let at = self.settle(verdict).await?;
        Ok(if dead { Failure::Dead { at } } else { Failure::RetryAt { at } })
    }

    /// The verdict for a failure of this run.
    fn failure(&self, error: impl fmt::Display) -> Verdict {
        let settings = self.core.settings().failure_settings();
        if self.run.attempt >= settings.attempts_max {
            return Verdict::Dead { reason: reason_of(error), body: self.body.clone() };
        }
        let after = settings.pause(self.run.attempt);
        Verdict::Retry { after, counted: true, reason: Some(reason_of(error)), body: None }
    }

    pub(crate) async fn settle(mut self, verdict: Verdict) -> Result<Time> {
        if !self.guarded {
            return Ok(Time::default());
        }
        // From here on the drop must not settle differently, whatever happens to this call.
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

    /// Leaves it unsettled: another task settles it, or it lapses.
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
        let outcome = self.claim(delivery, Mode::Lease(self.settings().lease_settings()), None).await?;
        Ok(self.leased(outcome, sent).await?.map(|lease| lease.when_dropped(Dropped::Counts)))
    }

    /// The lease of a claim that was sent at `sent`; released if it is dropped. The ledger counts a
    /// lease from when it grants it, the holder from before the request. If the answer took long,
    /// the lease is extended before anything starts, so that its run is not cancelled immediately
    /// at the cost of an attempt. If it cannot be extended, it is released uncounted.
    async fn leased(&self, outcome: Outcome<Granted>, sent: Instant) -> Result<Outcome<Lease>> {
        let mut lease = match outcome.map(|granted| Lease::new(self, granted, sent)) {
            Outcome::First(lease) if self.is_short(sent, lease.duration) => lease,
            other => return Ok(other),
        };
        match lease.extend().await {
            Ok(()) if !lease.is_lost() => Ok(Outcome::First(lease)),
            Ok(()) => {
                let _ = lease.release().await; // if this fails, it lapses
                let what = "leasing: answers take longer than the lease lasts".into();
                Err(Error::Contended { what, source: None })
            }
            // It lapsed by the ledger's clock as well, and another claimer has it.
            Err(Error::Fenced { .. }) => Ok(Outcome::Busy { until: None, owner: None }),
            Err(error) => {
                let _ = lease.release().await;
                Err(error)
            }
        }
    }

    /// Whether a lease requested at `sent` would end before its first heartbeat.
    fn is_short(&self, sent: Instant, lease: Duration) -> bool {
        let settings = self.settings();
        settings.enabled && sent.elapsed() + settings.heartbeat + settings.margin() > lease
    }

    /// A lease with its own settings instead of the guard's. With `hold`, an event that would have to
    /// wait is parked with its bytes.
    pub(crate) async fn lease_on(
        &self,
        delivery: Delivery,
        settings: LeaseSettings,
        hold: bool,
    ) -> Result<Outcome<Lease>> {
        let sent = Instant::now();
        let mut claim = self.prepare(delivery, Mode::Lease(settings))?;
        claim.hold = hold;
        let outcome = self.claim_raw(claim).await?;
        Ok(self.leased(outcome, sent).await?.map(|lease| lease.when_dropped(Dropped::Lapses)))
    }

    /// Releases claims that were never answered; see [`Batcher::release_doubtful`].
    pub(crate) async fn release_doubtful(&self) {
        self.batcher().release_doubtful().await;
    }

    /// Settles, and retries for up to `patience` while the ledger is unavailable. It continues even
    /// if the caller is cancelled, because the effect has happened.
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

    /// Retries until the event is no longer busy or the limit is reached. Sleeps between attempts:
    /// longer each time, up to a second, but not past the end of the lease in the way.
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
                // One millisecond more, because the lease must have ended.
                wake = wake.min(local + until.since(ledger) + Duration::from_millis(1)).max(now + PAUSE_MIN);
            }
            tokio::time::sleep_until(end.map_or(wake, |end| wake.min(end))).await;
            pause = (pause * 3 / 2).min(Duration::from_secs(1));
        }
    }
}

/// A settle request that is not known to be recorded. If it is dropped, it continues in a task of
/// its own.
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
        let _ = self.go_on(); // detached
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

/// The minimum time to retry settling, even past the end of the lease: while no other claimer has
/// the event, the token is still valid.
const PATIENCE_MIN: Duration = Duration::from_secs(2);
/// The minimum pause between two attempts, whatever the clocks say.
const PAUSE_MIN: Duration = Duration::from_millis(5);

impl<L: Ledger> Guard<L> {
    /// Claims an event under a lease. With [`Outcome::First`], run the event and settle the
    /// [`Lease`]; any other outcome says why it is not yours to run.
    pub async fn lease(&self, event: impl Deliverable) -> Result<Outcome<Lease>> {
        self.core.lease(event.delivery()?).await
    }

    /// Like [`lease`](Guard::lease), but waits up to `limit` while another caller holds the event;
    /// after that it returns [`Outcome::Busy`].
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

    /// Leases many events at once and returns their outcomes in the order given. A bad id fails
    /// only itself. Safe to cancel.
    pub async fn lease_many<D: Deliverable>(
        &self,
        events: impl IntoIterator<Item = D>,
    ) -> Result<Vec<Result<Outcome<Lease>>>> {
        let sent = Instant::now();
        let mode = Mode::Lease(self.settings().lease_settings());
        let outcomes = self.core.claim_many(events, mode).await?;
        let counts = |lease: Lease| lease.when_dropped(Dropped::Counts);
        if !self.core.is_short(sent, self.settings().lease) {
            let lease =
                |outcome: Outcome<Granted>| outcome.map(|granted| Lease::new(&self.core, granted, sent));
            return Ok(outcomes.into_iter().map(|outcome| Ok(lease(outcome?).map(counts))).collect());
        }
        // Concurrently, so that the extensions gather into one statement.
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
