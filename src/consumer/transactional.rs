//! Transactional runs: claim and effects commit together, for many events at a time.
//!
//! One transaction per batch. A batch that fails is split until the failing event is found. That
//! event's failure is counted in a separate transaction and the event waits; its neighbours commit.
//! A batch that dies with its process counts nothing, so a *marker* of its offsets is committed
//! before it begins (one marker covers several batches). A member that finds an unfinished marker
//! runs those offsets one by one, each under a committed lease, so that the event that kills its
//! process is found and its neighbours are not blamed.

mod batch;
mod one;

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;

use super::claim::ConsumerContext;
use super::handle::Handled;
use super::worker::{Guarantee, Worker};
use crate::error::Result;
use crate::event::Event;
use crate::id::Scope;
use crate::ledger::{Claim, Ledger, Marker, Outcome, Settle, Settled};

/// A ledger whose database can also hold the effects.
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
    /// Commits. An error leaves open whether it committed. A failure in the inner result means that
    /// it did not, because the database rejects what the handler did (a deferred constraint).
    async fn commit(&self, tx: Self::Transaction) -> Result<Handled>;
    /// Rolls the transaction back.
    async fn roll_back(&self, tx: Self::Transaction);
    /// Whether the transaction of a claim was committed. The answer is final.
    async fn was_committed(&self, claim: &Claim) -> Result<bool>;
}

/// Runs in the transaction and makes its effects through it. All the events are new, and those of
/// each key are in order.
#[async_trait]
pub trait BatchHandler<L: TransactionalLedger>: Send + Sync + 'static {
    /// Makes the effects of all events. An error undoes all of them; the batch is then split.
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled;
}

/// Exactly once, through any crash: claim and effects are one transaction. Gives up: effects
/// anywhere but in the ledger's database. Anything a handler does outside its transaction is
/// repeated when it runs again.
pub struct Transactional<L, H> {
    handler: H,
    _ledger: PhantomData<fn() -> L>,
}

impl<L, H> Transactional<L, H> {
    pub(super) fn new(handler: H) -> Self {
        Transactional { handler, _ledger: PhantomData }
    }
}

/// A handler's future, which borrows its transaction.
pub type HandledIn<'a> = Pin<Box<dyn Future<Output = Handled> + Send + 'a>>;

/// Runs a handler per event in the transaction of its claim; many of them share one transaction.
///
/// ```no_run
/// use hapax::backend::postgres::PgLedger;
/// use hapax::consumer::{Consumer, transactional};
/// # use std::sync::Arc;
/// # async fn run(bus: Arc<dyn hapax::bus::Bus>, ledger: PgLedger) -> hapax::Result<()> {
/// let consumer = Consumer::builder(bus, ledger).scope("billing").topic("orders").build()?;
/// consumer
///     .run(transactional::<PgLedger, _>(|tx, event| {
///         Box::pin(async move {
///             sqlx::query("insert into paid (id) values ($1)").bind(event.id.as_str()).execute(&mut **tx).await?;
///             Ok(())
///         })
///     }))
///     .await?;
/// # Ok(()) }
/// ```
pub fn transactional<L, F>(handler: F) -> Transactional<L, Each<F>>
where
    L: TransactionalLedger,
    F: for<'a> Fn(&'a mut L::Transaction, &'a Event) -> HandledIn<'a> + Send + Sync + 'static,
{
    Transactional { handler: Each(handler), _ledger: PhantomData }
}

/// Runs a handler per batch of events, for effects that work on sets, such as one multi-row insert.
pub fn transactional_batch<L, F>(handler: F) -> Transactional<L, Batched<F>>
where
    L: TransactionalLedger,
    F: for<'a> Fn(&'a mut L::Transaction, &'a [Event]) -> HandledIn<'a> + Send + Sync + 'static,
{
    Transactional { handler: Batched(handler), _ledger: PhantomData }
}

/// A handler per event.
pub struct Each<F>(F);

/// A handler per batch.
pub struct Batched<F>(F);

#[async_trait]
impl<L, F> BatchHandler<L> for Each<F>
where
    L: TransactionalLedger,
    F: for<'a> Fn(&'a mut L::Transaction, &'a Event) -> HandledIn<'a> + Send + Sync + 'static,
{
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled {
        for (at, event) in events.iter().enumerate() {
            (self.0)(tx, event).await.map_err(|failed| failed.at(at))?;
        }
        Ok(())
    }
}

#[async_trait]
impl<L, F> BatchHandler<L> for Batched<F>
where
    L: TransactionalLedger,
    F: for<'a> Fn(&'a mut L::Transaction, &'a [Event]) -> HandledIn<'a> + Send + Sync + 'static,
{
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled {
        (self.0)(tx, events).await
    }
}

impl<L: TransactionalLedger, H: BatchHandler<L>> Guarantee<L> for Transactional<L, H> {
    fn worker(self, context: ConsumerContext, ledger: &L) -> Arc<dyn Worker> {
        Arc::new(batch::TransactionalWorker {
            context,
            ledger: ledger.clone(),
            handler: self.handler,
            marks: Arc::default(),
        })
    }
}
