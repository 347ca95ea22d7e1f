//! The guard: asks the ledger before your handler runs, and records how the run ended.
//!
//! Three guarantees, each with its own calls:
//!
//! | call | guarantee | for |
//! |---|---|---|
//! | `try_claim_in(&mut tx, …)` | exactly once: the claim commits or rolls back with your effect | effects in the ledger's database |
//! | [`lease`](Guard::lease), [`process_if_new`](Guard::process_if_new) | at least once, one live lease at a time; exactly once if the sink deduplicates on our key | effects elsewhere |
//! | [`try_claim`](Guard::try_claim) | at most once: an event that fails after the claim is lost, and can be listed | effects that may be lost |
//!
//! ```
//! use hapax::backend::memory::MemoryLedger;
//! use hapax::{Guard, guard::ProcessingResult};
//!
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
//! let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
//! for _ in 0..2 {
//!     match guard.process_if_new("order-17-paid", || async { Ok::<_, String>(println!("mail sent")) }).await? {
//!         ProcessingResult::Success => println!("took effect"),
//!         ProcessingResult::AlreadyProcessed => println!("had taken effect before"),
//!         other => println!("not now: {other}"),
//!     }
//! }
//! # Ok(()) }
//! ```
//!
//! A guard is cheap to clone. It gathers single calls of concurrent tasks into batches.
//!
//! A guard uses a ledger, telemetry and the sweeper. Only the files named after a database know one:
//! they take its transactions.

mod claimed;
mod delivery;
mod heartbeat;
mod lease;
mod memory;
#[cfg(feature = "postgres")]
mod postgres;
mod process;
mod remote;
mod settings;
mod shared;
#[cfg(feature = "sqlite")]
mod sqlite;
mod transaction;

use std::fmt;
use std::sync::Arc;

pub use claimed::Claimed;
pub use delivery::{Deliverable, Delivery};
pub use heartbeat::LeaseLost;
pub use lease::{Failure, Lease, Run};
pub use process::{DeadLetter, DeadLetters, ProcessingResult};
pub use remote::{RemoteEnd, RemoteRun, RemoteSettled};
pub(crate) use settings::ATTEMPTS_MAX;
pub use settings::{GuardBuilder, GuardSettings};
pub use transaction::InTransaction;

pub(crate) use shared::Core;
use shared::Granted;
pub(crate) use shared::reason_of;

use crate::error::Result;
use crate::id::{Scope, Tenant};
use crate::ledger::{IdentityRule, Ledger, Metadata, Mode, Outcome, SkipLog, State, Swept, Token};
use crate::sweep::Sweeper;
use crate::telemetry::Telemetry;

/// Guards handlers with a ledger. Clones share everything.
///
/// ```
/// use std::sync::Arc;
/// use hapax::backend::memory::MemoryLedger;
/// use hapax::{Guard, Ledger, Scope, Tenant};
///
/// // Any ledger, or one that is picked when the program runs:
/// let ledger: Arc<dyn Ledger> = Arc::new(MemoryLedger::default());
/// let guard = Guard::new(ledger);
/// let mailer = guard.in_scope(Scope::new("mailer")?).in_tenant(Tenant::new("acme")?);
/// # let _ = mailer;
/// # Ok::<(), hapax::Error>(())
/// ```
pub struct Guard<L: Ledger = Arc<dyn Ledger>> {
    ledger: Arc<L>,
    core: Core,
}

impl<L: Ledger> Clone for Guard<L> {
    fn clone(&self) -> Self {
        Guard { ledger: Arc::clone(&self.ledger), core: self.core.clone() }
    }
}

impl<L: Ledger> fmt::Debug for Guard<L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard")
            .field("backend", &self.ledger.capabilities().backend)
            .field("core", &self.core)
            .finish_non_exhaustive()
    }
}

impl<L: Ledger> Guard<L> {
    /// A guard with default settings and no default scope: set one with
    /// [`in_scope`](Guard::in_scope).
    pub fn new(ledger: L) -> Self {
        Guard::assemble(ledger, GuardSettings::default(), Telemetry::default())
    }

    /// A builder for a guard with your own settings.
    ///
    /// ```
    /// use std::time::Duration;
    /// use hapax::{Guard, backend::memory::MemoryLedger};
    ///
    /// let guard = Guard::builder(MemoryLedger::default())
    ///     .scope("mailer")
    ///     .lease(Duration::from_secs(60), Duration::from_secs(10))
    ///     .build()?;
    /// assert!(Guard::builder(MemoryLedger::default()).scope(" ").build().is_err());
    /// # let _ = guard;
    /// # Ok::<(), hapax::Error>(())
    /// ```
    pub fn builder(ledger: L) -> GuardBuilder<L> {
        GuardBuilder::new(ledger)
    }

    /// A guard with the given settings.
    pub fn with_settings(ledger: L, settings: GuardSettings) -> Result<Self> {
        settings.check()?;
        let telemetry = Telemetry::new(settings.telemetry_prefix.as_deref())?;
        Ok(Guard::assemble(ledger, settings, telemetry))
    }

    fn assemble(ledger: L, settings: GuardSettings, telemetry: Telemetry) -> Self {
        let ledger = Arc::new(ledger);
        let core = Core::new(Arc::clone(&ledger) as Arc<dyn Ledger>, settings, telemetry);
        Guard { ledger, core }
    }

    /// The same guard for another scope.
    #[must_use]
    pub fn in_scope(&self, scope: Scope) -> Self {
        Guard { ledger: Arc::clone(&self.ledger), core: self.core.in_scope(scope) }
    }

    /// The same guard for one tenant.
    #[must_use]
    pub fn in_tenant(&self, tenant: Tenant) -> Self {
        Guard { ledger: Arc::clone(&self.ledger), core: self.core.in_tenant(tenant) }
    }

    /// The underlying ledger.
    pub fn ledger(&self) -> &L {
        &self.ledger
    }

    /// The settings it was made with.
    pub fn settings(&self) -> &GuardSettings {
        self.core.settings()
    }

    pub(crate) fn core(&self) -> &Core {
        &self.core
    }

    /// Whether an event took effect: done, or finished under an at-most-once claim. An event that
    /// is running, waits for a retry or is dead has not.
    ///
    /// This only reads. To decide whether to run something, claim it: another caller may run it
    /// between the check and your run.
    ///
    /// ```
    /// # use hapax::{Guard, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
    /// assert!(!guard.is_processed("order-17-paid").await?);
    /// guard.mark_processed("order-17-paid", None).await?.is_claimed();
    /// assert!(guard.is_processed("order-17-paid").await?);
    /// # Ok(()) }
    /// ```
    pub async fn is_processed(&self, event: impl Deliverable) -> Result<bool> {
        let delivery = event.delivery()?;
        let time = delivery.time;
        let identity = self.core.identity(delivery)?;
        if !self.core.guarded() {
            return Ok(false);
        }
        if self.ledger.settings().identity == IdentityRule::Id {
            return self.core.batcher().known(identity).await;
        }
        let entry = self.ledger.get(&identity, time).await?;
        Ok(entry.is_some_and(|entry| matches!(entry.state, State::Done | State::Finished)))
    }

    /// Records that an event took effect, without running anything. [`Outcome::First`]: recorded
    /// now; [`Outcome::Duplicate`]: recorded before; [`Outcome::Busy`]: another caller is running
    /// it, and nothing was written.
    ///
    /// ```
    /// # use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
    /// assert!(matches!(guard.mark_processed("order-17-paid", None).await?, Outcome::First(_)));
    /// assert!(matches!(guard.mark_processed("order-17-paid", None).await?, Outcome::Duplicate(_)));
    /// # Ok(()) }
    /// ```
    #[doc(alias = "mark_done")]
    pub async fn mark_processed(
        &self,
        event: impl Deliverable,
        metadata: impl Into<Option<Metadata>>,
    ) -> Result<Outcome<Token>> {
        let mut delivery = event.delivery()?;
        delivery.metadata = metadata.into().or(delivery.metadata);
        Ok(self.core.claim(delivery, Mode::Done, None).await?.map(|granted| granted.grant.token))
    }

    /// Counts a failed same-transaction attempt, in a transaction of its own. Call it after the
    /// effect's transaction was rolled back. The rollback included the claim and so every trace of
    /// the attempt; without this call an event that always fails is redelivered forever.
    ///
    /// Returns [`Outcome::RetryLater`] with the stored time, or [`Outcome::Dead`] once the attempts
    /// are used up. Claims made before that time get the same answer.
    ///
    /// ```
    /// # use hapax::{Guard, Outcome, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("billing").attempts_max(2).build()?;
    /// assert!(matches!(guard.failed("order-17-paid", "no such account").await?, Outcome::RetryLater { .. }));
    /// assert!(matches!(guard.failed("order-17-paid", "no such account").await?, Outcome::Dead { .. }));
    /// # Ok(()) }
    /// ```
    #[doc(alias = "mark_failed")]
    pub async fn failed(&self, event: impl Deliverable, error: impl fmt::Display) -> Result<Outcome<Token>> {
        self.core.check_transactional()?;
        let mode = Mode::Failed(self.settings().failure_settings());
        let granted = self.core.claim(event.delivery()?, mode, Some(reason_of(error))).await?;
        Ok(granted.map(|granted| granted.grant.token))
    }

    /// Forgets entries that were settled longer ago than the retention, and returns their number.
    /// It drops whole weeks, and deletes entries without a week in transactions of at most 10,000
    /// until none is left.
    pub async fn cleanup_old_events(&self) -> Result<u64> {
        Ok(self.sweep().await?.entries())
    }

    /// Like [`cleanup_old_events`](Guard::cleanup_old_events), with the details.
    pub async fn sweep(&self) -> Result<Swept> {
        self.core.retention().sweep().await
    }

    /// The log to which this guard notes skipped deliveries. It writes within a second; a program
    /// that ends sooner calls [`flush`](SkipLog::flush).
    ///
    /// ```
    /// # use hapax::{Guard, Ledger, backend::memory::MemoryLedger};
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> hapax::Result<()> {
    /// let guard = Guard::builder(MemoryLedger::default()).scope("mailer").build()?;
    /// for _ in 0..3 {
    ///     guard.process_if_new("order-17-paid", || async { Ok::<_, String>(()) }).await?;
    /// }
    /// guard.skip_log().flush().await?;
    /// let days = hapax::ledger::Operations::prevented(guard.ledger(), 0).await?;
    /// assert_eq!(days.prevented[0].amount.count, 2);
    /// # Ok(()) }
    /// ```
    pub fn skip_log(&self) -> &SkipLog {
        self.core.skip_log()
    }

    /// Sweeps in the background, soon after the start and then every
    /// [`sweep_interval`](GuardSettings::sweep_interval), instead of the sweeper that the guard
    /// would start on its own. Stops when the handle is dropped.
    pub fn spawn_sweeper(&self) -> Sweeper {
        let _ = self.core.begin_sweeping(); // so that the guard does not start its own
        Sweeper::spawn(self.core.retention())
    }
}
