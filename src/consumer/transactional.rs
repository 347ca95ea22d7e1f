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

use async_trait::async_trait;

pub(super) use self::batch::TransactionalWorker;
use super::handle::Handled;
use crate::event::Event;
use crate::ledger::TransactionalLedger;

/// Runs in the transaction and makes its effects through it. All the events are new, and those of
/// each key are in order.
#[async_trait]
pub(super) trait BatchHandler<L: TransactionalLedger>: Send + Sync + 'static {
    /// Makes the effects of all events. An error undoes all of them; the batch is then split.
    async fn handle(&self, tx: &mut L::Transaction, events: &[Event]) -> Handled;
}
