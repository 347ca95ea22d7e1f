//! Transactional runs: claim and effects commit together, for many events at a time.
//!
//! One transaction per batch. A batch that fails is split until the failing event is found. That
//! event's failure is counted in a separate transaction and the event waits; its neighbours commit.
//! A batch that dies with its process counts nothing, so a *marker* is committed before it begins:
//! the highest offset that was handed out, and some more, so that it covers the next batches too. The
//! partition's next owner runs everything up to the marker as suspects: in whole batches, at full
//! speed, with the exact offsets of each batch noted before it begins
//! (`t84_after_a_kill_the_rest_runs_in_whole_batches`). If the process dies again, only the noted
//! offsets run in smaller batches, and after a few deaths each alone under a committed lease. So the
//! event that kills its process is found and its neighbours are not blamed
//! (`t84_postgres_suspects_are_narrowed_by_deaths`).

mod batch;
mod one;

use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;

use super::claim::ConsumerContext;
use super::handle::Handled;
use super::worker::{Guarantee, Worker};
use crate::event::Event;
use crate::ledger::TransactionalLedger;

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

/// Runs a closure per event in the transaction of its claim; many of them share one transaction.
/// Programs use [`Consumer::transactional`](super::Consumer::transactional).
pub fn transactional<L, F>(handler: F) -> Transactional<L, Each<F>>
where
    L: TransactionalLedger,
    F: for<'a> Fn(&'a mut L::Transaction, &'a Event) -> HandledIn<'a> + Send + Sync + 'static,
{
    Transactional { handler: Each(handler), _ledger: PhantomData }
}

/// Runs a closure per batch of events. Programs use
/// [`Consumer::transactional_batch`](super::Consumer::transactional_batch).
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
            markers: Arc::default(),
        })
    }
}
