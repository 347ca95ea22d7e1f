//! Transactional runs: claim and effect commit together, many at a time.
//!
//! One transaction per batch. A batch that fails is taken apart until the failing event is found, which is then counted in a
//! transaction of its own and waits; its neighbours commit. A batch that ends with its process counts nothing by itself, so
//! a *marker* of its offsets is committed before it begins (one reaches over several batches): whoever
//! finds an unfinished marker runs those offsets one by one, each under a committed lease, so that an event that kills its
//! process is found and its neighbours are not.

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

/// A ledger whose database can hold the effects too.
#[async_trait]
pub trait TransactionalLedger: Ledger + Clone {
    /// An open transaction, as a handler gets it.
    type Transaction: Send + 'static;

    /// Begins one. The server ends it if it is not over within `time_max`, so that a process that stands still, or never comes to
    /// an end, holds nothing for ever. A server that cannot (PostgreSQL before 17) ends it if nothing is heard of it for so long.
    /// A statement in it that takes longer than `statement_max` fails, whether or not anyone still waits for it.
    async fn begin(&self, time_max: Duration, statement_max: Duration) -> Result<Self::Transaction>;
    /// Claims in it.
    async fn claim_in(&self, tx: &mut Self::Transaction, claims: &[Claim]) -> Result<Vec<Result<Outcome>>>;
    /// Settles in it.
    async fn settle_in(&self, tx: &mut Self::Transaction, settles: &[Settle])
    -> Result<Vec<Result<Settled>>>;
    /// Leaves markers in it.
    async fn set_markers_in(
        &self,
        tx: &mut Self::Transaction,
        scope: &Scope,
        markers: &[Marker],
    ) -> Result<()>;
    /// Whether the transaction can still be committed: not if a statement in it failed, even if whoever made it did not say so.
    /// Checks what was deferred until the commit, if the database can: an error that is neither a contention nor a doubt is the
    /// handler's.
    async fn is_sound(&self, tx: &mut Self::Transaction) -> Result<bool>;
    /// Whether a handler's error only says that another transaction was in the way.
    fn is_contention(&self, error: &(dyn std::error::Error + 'static)) -> bool;
    /// Whether a handler's error says that a connection broke or a server is away. Which one, [`is_lost`](Self::is_lost) tells.
    fn is_doubt(&self, error: &(dyn std::error::Error + 'static)) -> bool;
    /// Whether the transaction's own connection broke, so that it is undone through no fault of the handler's.
    async fn is_lost(&self, tx: &mut Self::Transaction) -> bool;
    /// Commits. An error does not say whether it was; a failure inside says that it was not, because the database refuses what
    /// the handler did (a deferred constraint).
    async fn commit(&self, tx: Self::Transaction) -> Result<Handled>;
    /// Undoes everything.
    async fn roll_back(&self, tx: Self::Transaction);
    /// Whether the transaction of a claim was committed; final.
    async fn was_committed(&self, claim: &Claim) -> Result<bool>;
}

/// What runs in the transaction: events in, effects through the transaction. The events are all first ones, each key's in order.
#[async_trait]
pub trait BatchHandler<L: TransactionalLedger>: Send + Sync + 'static {
    /// Makes the effects of all events. An error undoes all of them; the batch is then taken apart.
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled;
}

/// Exactly once, through any crash: claim and effects are one transaction. Gives up: effects anywhere but in the ledger's
/// database. What a handler does outside of its transaction is repeated when it is run again.
pub struct Transactional<L, H> {
    handler: H,
    _ledger: PhantomData<fn() -> L>,
}

impl<L, H> Transactional<L, H> {
    pub(super) fn new(handler: H) -> Self {
        Transactional { handler, _ledger: PhantomData }
    }
}

/// A handler's answer that borrows its transaction.
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

/// Runs a handler per batch of events: for effects that are made of sets, such as one multi-row insert.
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
